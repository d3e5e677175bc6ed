"""The language switch in a notebook's first cell."""

import os

from course_lib.labels import choose, choose_only

from .pictures import show_in_both_languages

# HTML elements that a page has once per language, and that the switch hides. Other elements with a
# `lang`, such as the switch's own labels, are always shown.
PER_LANGUAGE = ("div", "span", "p", "td", "th", "li", "tr", "details", "figure")

# One rule per language hides the other. `.jp-Notebook` is one open notebook (JupyterLab, Notebook
# 7) or the whole of an exported page, so open notebooks do not affect each other. Only elements
# inside cells are hidden, because the page itself has a `lang`. `:not` keeps a second switch in the
# same notebook from hiding everything.
_RULE = (
    ".jp-Notebook:has(.course-language input[value={shown}]:checked)"
    ":not(:has(.course-language input:not([value={shown}]):checked)) "
    f".jp-Cell :is({', '.join(PER_LANGUAGE)})"
    "[lang={hidden}] {{ display: none !important; }}"
)
_LOOK = """\
.course-language fieldset { display: flex; flex-wrap: wrap; gap: 0 1.1em; align-items: center;
  border: 0; margin: 0; padding: 0.15em 0;
  font-family: var(--jp-ui-font-family, sans-serif); font-size: 13px; color: inherit; }
.course-language label { display: inline-flex; gap: 0.35em; align-items: center; cursor: pointer; \
opacity: 0.75; }
.course-language label:has(input:checked) { opacity: 1; }
.course-language input { margin: 0; accent-color: var(--jp-brand-color1, #4477aa); }
.course-language input:focus-visible { outline: 2px solid currentColor; outline-offset: 2px; }
.course-language legend { float: left; padding: 0; opacity: 0.75; }"""
# A cell that runs removes its old output, and with it the buttons that hold the learner's choice.
# The notebook's element stays in the page, so the script keeps the choice there, and a new switch
# reads it. Outside of JupyterLab and its exports there is no such element.
_REMEMBER = """\
(() => {{
  const form = document.currentScript.parentElement.querySelector(".course-language");
  const notebook = form?.closest(".jp-Notebook");
  if (!notebook) return;
  const shown = notebook.dataset.courseLanguage ?? {otherwise};
  if (shown) form.querySelector(`input[value=${{shown}}]`).checked = true;
  form.addEventListener("change", (event) => {{
    notebook.dataset.courseLanguage = event.target.value;
  }});
}})();"""
_BROWSERS = '((navigator.language || "").startsWith("zh") ? "zh" : "en")'
_OPTIONS = (("en", "English"), ("zh", "中文"), ("both", "both 双语"))


class Switch:
    """The output that shows the switch: an HTML form in a notebook, or one line in a terminal.

    In a notebook, a language that the learner has chosen by a button stays chosen when the cell
    runs again.

    Args:
        chosen: "en", "zh" or "both".
        follow_browser: Whether the page opens in the language of the browser instead of `chosen`,
            as long as the learner has not chosen a language.
    """

    def __init__(self, chosen: str, *, follow_browser: bool = False) -> None:
        self.chosen = chosen
        self.follow_browser = follow_browser

    def __repr__(self) -> str:
        return f"Language 语言: {dict(_OPTIONS)[self.chosen]} (COURSE_LANG=en | zh | both)"

    def _repr_html_(self) -> str:
        # The name of a radio group is local to its <form>, so it may be the same in every notebook.
        # method="dialog" makes the Enter key do nothing. The data attribute stops JupyterLab from
        # using the arrow keys itself.
        buttons = "\n".join(
            f'<label lang="{value if value in ("en", "zh") else "mul"}"><input type="radio"'
            f' name="course-language" value="{value}"'
            f' data-lm-suppress-shortcuts="true"{" checked" * (value == self.chosen)}>'
            f" {words}</label>"
            for value, words in _OPTIONS
        )
        rules = "\n".join(
            _RULE.format(shown=shown, hidden=hidden)
            for shown, hidden in (("en", "zh"), ("zh", "en"))
        )
        script = _REMEMBER.format(otherwise=_BROWSERS if self.follow_browser else "null")
        return (
            '<form class="course-language" method="dialog"'
            ' autocomplete="off">\n<fieldset>\n<legend lang="mul">Language'
            f" 语言</legend>\n{buttons}\n</fieldset>\n</form>\n<style>\n{rules}\n{_LOOK}\n</style>"
            f"\n<script>\n{script}\n</script>"
        )


def language(default: str | None = None, *, only: bool = False) -> None:
    """Show the language switch, and set the language of plain text.

    The switch works on the cells of its own notebook, without a kernel. The language that a learner
    has chosen by a button stays chosen when the cell runs again. After this call, a notebook shows
    each figure once per language. Plain text keeps the language in which it was printed. Without
    IPython, one line is printed instead.

    Args:
        default: "en", "zh" or "both". The environment variable COURSE_LANG overrides it. If neither
            is set, plain text is in English, and the page opens in the language of the browser.
        only: Whether the page has text only in the language `default`, "en" or "zh". Then no switch
            is shown, and tables, verdicts and figures are in this language.

    Raises:
        ValueError: The environment variable or `default` is not one of the three values; or `only`
            is set and `default` is neither "en" nor "zh".
    """
    if only:
        choose_only(default)
        show_in_both_languages()
        return
    follow_browser = default is None and not os.environ.get("COURSE_LANG")
    switch = Switch(choose(default or "en"), follow_browser=follow_browser)
    try:
        from IPython.display import display
    except ImportError:
        print(switch)
    else:
        display(switch)
        show_in_both_languages()
