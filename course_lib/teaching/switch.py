"""The language switch in a notebook's first cell."""

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
_OPTIONS = (("en", "English"), ("zh", "中文"), ("both", "both 双语"))


class Switch:
    """The output that shows the switch: an HTML form in a notebook, or one line in a terminal."""

    def __init__(self, chosen: str) -> None:
        self.chosen = chosen

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
        return (
            '<form class="course-language" method="dialog"'
            ' autocomplete="off">\n<fieldset>\n<legend lang="mul">Language'
            f" 语言</legend>\n{buttons}\n</fieldset>\n</form>\n<style>\n{rules}\n{_LOOK}\n</style>"
        )


def language(default: str = "en", *, only: bool = False) -> None:
    """Show the language switch, and set the language of plain text.

    The switch works on the cells of its own notebook, without a kernel. After this call, a notebook
    shows each figure once per language. Plain text keeps the language in which it was printed.
    Without IPython, one line is printed instead.

    Args:
        default: "en", "zh" or "both"; the environment variable COURSE_LANG overrides it.
        only: Whether the page has text in a single language, "en" or "zh". No switch is then shown,
            and tables, verdicts and figures are in this language.

    Raises:
        ValueError: The environment variable or `default` is not one of the three values.
    """
    if only:
        choose_only(default)
        show_in_both_languages()
        return
    switch = Switch(choose(default))
    try:
        from IPython.display import display
    except ImportError:
        print(switch)
    else:
        display(switch)
        show_in_both_languages()
