"""Sphinx's settings for the course's site, and what makes its pages bilingual."""

import re
from itertools import pairwise
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.domains.python import PyObject
from sphinx.search.en import SearchEnglish
from sphinx.transforms import SphinxTransform

EN, ZH = "Memory-saving training in PyTorch", "PyTorch 省显存训练"

project = f"{EN} / {ZH}"
html_title = (
    f'<span lang="en">{EN}</span><span class="both-languages"> / </span><span lang="zh">{ZH}</span>'
)
language = "en"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
templates_path = ["templates"]
exclude_patterns = ["templates", "static", "pages"]

nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
myst_mathjax_classes = "math"

mathjax_path = "mathjax/tex-chtml.js"
# The menu offers things that come from the network.
mathjax3_config = {"options": {"enableMenu": False}}

autodoc_typehints = "signature"
autodoc_preserve_defaults = True
maximum_signature_line_length = 90
default_role = "literal"  # the docstrings write `code` as markdown does
autodoc_inherit_docstrings = False  # torch's own would refer to pages of torch's own
napoleon_use_ivar = True  # otherwise "Attributes:" and documented attributes describe each twice
smartquotes = False  # there are none for Chinese

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

HAN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff]")


def is_chinese(words: str) -> bool:
    """More than a word or two of Chinese: "English, 中文 or both" is English."""
    return len(HAN.findall(words)) > 0.2 * len(re.findall(r"[A-Za-z]", words))


def spoken(node: nodes.Node) -> str:
    """A node's text without its code; a picture's is its description."""
    if isinstance(node, nodes.Text):
        return str(node)
    if isinstance(node, nodes.image):
        return node.get("alt", "")
    return (
        "" if isinstance(node, nodes.literal | nodes.raw) else "".join(map(spoken, node.children))
    )


def halves(children: list[nodes.Node]) -> tuple[list[nodes.Node], str, list[nodes.Node]] | None:
    """Nodes "English / 中文", or the two with a line break between, as three: the English, what
    separates them, the Chinese."""
    for place, child in reversed(list(enumerate(children))):
        if isinstance(child, nodes.raw) and re.fullmatch(r"\s*<br\s*/?>\s*", child.astext()):
            candidates = [(children[:place], "\n", children[place + 1 :])]
        elif isinstance(child, nodes.Text):
            text = str(child)
            cuts = [match.start() for match in re.finditer(" / ", text)][::-1]
            candidates = [
                (
                    [*children[:place], nodes.Text(text[:cut])],
                    " / ",
                    [nodes.Text(text[cut + 3 :]), *children[place + 1 :]],
                )
                for cut in cuts
            ]
        else:
            continue
        for english, between, chinese in candidates:
            en, zh = ("".join(map(spoken, each)) for each in (english, chinese))
            broken = (
                between == "\n" and HAN.search(zh) and not HAN.search(en)
            )  # few characters, as in: bf16 的 autocast
            if broken or (is_chinese(zh) and not is_chinese(en)):
                return english, between, chinese
    return None


def split(element: nodes.Element) -> bool:
    """Put the English and the Chinese half of a heading, a cell or a line into elements of their
    own."""
    found = halves(list(element.children))
    if found is None:
        return False
    english, between, chinese = found
    number = re.match(r"[\d.]+ ", str(english[0])) if isinstance(english[0], nodes.Text) else None
    kept = []
    if number:  # a section's number belongs to both
        kept, english[0] = [nodes.Text(number[0])], nodes.Text(str(english[0])[number.end() :])
    # docutils writes the class "language-zh" as the attribute lang="zh".
    element.children = []
    element.extend(kept)
    element += nodes.inline("", "", *english, classes=["language-en"])
    if between.strip():
        element += nodes.inline("", between, classes=["both-languages"])
    else:
        element += nodes.raw("", "<br class='both-languages'>", format="html")
    element += nodes.inline("", "", *chinese, classes=["language-zh"])
    return True


def mark_columns(table: nodes.table) -> None:
    """Neighbours "question" and "问题" are one column in each language; a glossary's "English" and
    "中文" are two."""
    rows = [list(row.children) for row in table.findall(nodes.row)]
    heads = ["".join(map(spoken, cell.children)) for cell in rows[0]]
    for place, (english, chinese) in enumerate(pairwise(heads)):
        if (
            english != "English"
            and not HAN.search(english)
            and re.fullmatch(rf"{HAN.pattern}+", chinese)
        ):
            for row in rows:
                row[place]["classes"].append("language-en")
                row[place + 1]["classes"].append("language-zh")


class TwoLanguages(SphinxTransform):
    """Headings in two elements; and so the pages that are written without divs, paragraph below
    paragraph."""

    default_priority = 400

    def apply(self, **kwargs: object) -> None:
        for title in list(self.document.findall(nodes.title)):
            split(title)
        for dashes in list(
            self.document.findall(lambda node: node == " -- " and isinstance(node, nodes.Text))
        ):
            dashes.parent.replace(dashes, nodes.Text(" – "))  # between an argument and what it is
        if re.fullmatch(r"api/(?!index).*", self.env.docname):
            # English in every language of the page; its screen readers shall know, and the button
            # shall not hide it.
            self.document[0]["classes"].append("language-en-US")
        if any("<div lang=" in raw.astext() for raw in self.document.findall(nodes.raw)):
            return  # this page says itself which language is where
        for table in self.document.findall(nodes.table):
            mark_columns(table)
        for paragraph in list(self.document.findall(nodes.paragraph)):
            if split(paragraph):
                continue
            following = paragraph.next_node(descend=False, siblings=True)
            if isinstance(following, nodes.paragraph):
                if is_chinese(spoken(following)) and not is_chinese(spoken(paragraph)):
                    paragraph["classes"].append("language-en")
                    following["classes"].append("language-zh")


class EnglishAndChinese(SearchEnglish):
    """English by words and their stems; Chinese, which has no spaces, by every character and every
    two neighbours."""

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

    def split(self, input: str) -> list[str]:
        words = super().split(HAN.sub(" ", input))
        for run in re.findall(rf"{HAN.pattern}+", input):
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
    """A named tuple's fields, of which Python itself says "Alias for field number 0"."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def setup(app: Sphinx) -> None:
    """Entry point that Sphinx calls first."""
    app.add_transform(TwoLanguages)
    app.add_search_language(EnglishAndChinese)
    app.connect("autodoc-process-signature", tidy_signature)
    app.connect("autodoc-skip-member", skip_field)
    next(
        field for field in PyObject.doc_field_types if field.name == "variable"
    ).label = "Attributes"
