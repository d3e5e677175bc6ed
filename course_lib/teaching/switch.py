"""The language switch in a notebook's first cell."""

from course_lib.labels import choose, choose_only, user_language

from .pictures import show_in_both_languages

# HTML elements that a page has once per language, and that the switch hides. Other elements with a
# `lang`, such as the switch's own labels, are always shown.
PER_LANGUAGE = ("div", "span", "p", "td", "th", "li", "tr", "details", "figure")

# CSS rule that hides the elements of one language when the other language is selected.
# `.jp-Notebook` is one open notebook (JupyterLab, Notebook 7) or the whole of an exported page, so
# open notebooks do not affect each other. Only elements inside cells are hidden, because the page
# itself has a `lang`. `:not` keeps a second switch in the same notebook from hiding everything.
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
.course-language legend { float: left; padding: 0; opacity: 0.75; }
.course-language small { display: none; }"""
# A style hides this text. The preview of a code host, such as GitHub, removes the style and
# disables the buttons, so the text appears next to them.
_ELSEWHERE = "(The buttons work in JupyterLab. / 按钮在 JupyterLab 里才有效。)"
# When a cell runs again, its old output is removed, and with it the buttons that show the choice.
# Therefore the script stores the learner's choice in the notebook's element, which stays in the
# page, and a new switch reads it there. Only JupyterLab and its exports have this element. The
# choice is also kept in the browser's storage, for other lessons and later days. Each value of the
# user's language setting has its own key there, because a choice made under another value must not
# apply. A page without storage raises an error, which the script catches.
_REMEMBER = """\
(() => {{
  const form = document.currentScript.parentElement.querySelector(".course-language");
  const notebook = form?.closest(".jp-Notebook");
  if (!notebook) return;
  const remembered = (value) => {{
    try {{
      if (value) localStorage.setItem("{key}", value);
      return localStorage.getItem("{key}");
    }} catch {{ return null; }}
  }};
  const shown = notebook.dataset.courseLanguage ?? remembered() ?? {otherwise};
  const button = shown && form.querySelector(`input[value="${{shown}}"]`);
  if (button) button.checked = true;
  form.addEventListener("change", (event) => {{
    notebook.dataset.courseLanguage = event.target.value;
    remembered(event.target.value);
  }});
}})();"""
_BROWSERS = '((navigator.language || "").startsWith("zh") ? "zh" : "en")'
_OPTIONS = (("en", "English"), ("zh", "中文"), ("both", "both 双语"))


class Switch:
    """Buttons in a notebook that select the language of the page.

    A language that the learner has selected stays selected when the cell runs again. In a terminal,
    the switch is one line of text that shows the language.

    Args:
        chosen: Language at the start: "en", "zh" or "both".
        follow_browser: Whether the page starts in the language of the browser instead of `chosen`.
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
        key, otherwise = f"course-language-{self.chosen}", "null"
        if self.follow_browser:
            key, otherwise = "course-language", _BROWSERS
        script = _REMEMBER.format(key=key, otherwise=otherwise)
        return "\n".join(
            (
                '<form class="course-language" method="dialog" autocomplete="off">',
                '<fieldset>\n<legend lang="mul">Language 语言</legend>',
                buttons,
                f'<small lang="mul">{_ELSEWHERE}</small>\n</fieldset>\n</form>',
                f"<style>\n{rules}\n{_LOOK}\n</style>",
                f"<script>\n{script}\n</script>",
            )
        )


def language(default: str | None = None, *, only: bool = False) -> None:
    """Show the language switch of a notebook, and set the language of plain text.

    The switch shows or hides text and figures on the page, for which no running kernel is needed.
    It does not change plain text that is already printed. The browser remembers the language that
    the learner has selected, for this notebook and the other lessons. After this call, a notebook
    shows each figure once per language. Without IPython, one line is printed instead of the switch.

    Args:
        default: Language if the user has no setting: "en", "zh" or "both". With None, plain text is
            then in English, and the page starts in the language of the browser. The user's setting
            is the environment variable COURSE_LANG, or else the file that `make lab LANGUAGE=zh`
            writes next to the lessons.
        only: Whether the page has text in one language only, which is `default`. Tables, verdicts
            and figures are then in this language, and no switch is shown.

    Raises:
        ValueError: The setting or `default` is not one of the three values, or `only` is true and
            `default` is neither "en" nor "zh".
    """
    if only:
        choose_only(default)
        show_in_both_languages()
        return
    follow_browser = default is None and user_language() is None
    switch = Switch(choose(default or "en"), follow_browser=follow_browser)
    try:
        from IPython.display import display
    except ImportError:
        print(switch)
    else:
        display(switch)
        show_in_both_languages()
