"""Sphinx's settings for the course's site.

`publish/site.py` sets the title and the language of each of its two builds.
"""

import re
from functools import cache
from pathlib import Path

import snowballstemmer
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.domains.python import PyObject
from sphinx.search.en import SearchEnglish
from sphinx.transforms import SphinxTransform

from publish.chinese import HAN

locale_dirs = ["locale"]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
templates_path = ["templates"]
exclude_patterns = ["templates", "static", "pages", "locale"]

nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
myst_mathjax_classes = "math"

mathjax_path = "mathjax/tex-chtml.js"
# The menu offers services that need a network.
mathjax3_config = {"options": {"enableMenu": False}}

autodoc_typehints = "signature"
autodoc_preserve_defaults = True
maximum_signature_line_length = 90
default_role = "literal"  # the docstrings write `code` as markdown does
autodoc_inherit_docstrings = False  # docstrings of torch refer to pages of torch's site
napoleon_use_ivar = True  # otherwise each attribute would be described twice
smartquotes = False  # Sphinx has no Chinese quotation marks

html_theme = "furo"
html_favicon = "static/favicon.svg"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_search_language = "en"
html_search_scorer = str(Path(__file__).parent / "static/scorer.js")
html_domain_indices = False  # the modules are in the sidebar
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/language.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}


class Reference(SphinxTransform):
    """Mark the pages of the reference as English, which they are in both builds."""

    default_priority = 400

    def apply(self, **kwargs: object) -> None:
        if not re.fullmatch(r"api/(?!index).*", self.env.docname):
            return
        # docutils writes the class "language-en-US" as the attribute lang="en-US"
        self.document[0]["classes"].append("language-en-US")
        for text in list(self.document.findall(nodes.Text)):
            if text == " -- ":  # between a parameter and its description
                text.parent.replace(text, nodes.Text(" – "))


_ENGLISH = snowballstemmer.stemmer("english")


@cache
def _stem(word: str) -> str:
    """Return the stem of a word in lower case. Cached, because most words are on several pages."""
    return _ENGLISH.stemWord(word)


class EnglishAndChinese(SearchEnglish):
    """Index of English words by their stems, and of Chinese by characters and pairs of characters.

    Chinese has no spaces, and Sphinx's own index of it needs the package jieba.
    """

    lang = "en"
    js_splitter_code = """
function splitQuery(query) {
  const han = /[\\u3400-\\u4dbf\\u4e00-\\u9fff]+/gu;
  const words = query.replace(han, " ")
    .split(/[^\\p{Letter}\\p{Number}_\\p{Emoji_Presentation}]+/gu);
  const pairs = (query.match(han) || []).flatMap((run) =>
    run.length < 2 ? [run] : [...run].slice(1).map((character, place) => run[place] + character));
  return [...words.filter((word) => word), ...pairs];
}
"""

    def stem(self, word: str) -> str:
        return _stem(word.lower())

    def split(self, input: str) -> list[str]:
        words = super().split(re.sub(HAN, " ", input))
        for run in re.findall(f"{HAN}+", input):
            words += [*run, *(run[place : place + 2] for place in range(len(run) - 1))]
        return words


def tidy_signature(
    app: Sphinx,
    what: str,
    name: str,
    obj: object,
    options: object,
    signature: str | None,
    returns: str | None,
) -> tuple[str | None, str | None]:
    """Show a default made for each instance as `...`, because Sphinx cannot read "<factory>"."""
    return (signature and signature.replace("<factory>", "..."), returns)


def skip_field(
    app: Sphinx, what: str, name: str, obj: object, skip: bool, options: object
) -> bool | None:
    """Leave out the fields of a named tuple, whose docstring is "Alias for field number 0"."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def clearer(
    app: Sphinx, page: str, template: str, context: dict[str, object], doctree: object
) -> None:
    """For readers with a screen reader, change HTML that MyST-NB and pandas have written."""
    if body := context.get("body"):
        # An empty cell is not the heading of its column.
        body = re.sub(
            r"<th\b([^>]*)>((?:\s|<(?:div|p)\b[^>]*>|</(?:div|p)>)*)</th>", r"<td\1>\2</td>", body
        )
        # A screen reader would read the `aria-label` instead of the words of the button.
        context["body"] = body.replace('<summary aria-label="Toggle hidden content">', "<summary>")


def setup(app: Sphinx) -> None:
    """Register this file's functions and classes with Sphinx, which calls this function first."""
    app.add_transform(Reference)
    app.connect("html-page-context", clearer)
    app.add_search_language(EnglishAndChinese)
    app.connect("autodoc-process-signature", tidy_signature)
    app.connect("autodoc-skip-member", skip_field)
    next(
        field for field in PyObject.doc_field_types if field.name == "variable"
    ).label = "Attributes"
