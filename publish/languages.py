"""Select one language from text, prose cells, outputs and guides in English and Chinese.

All editions use these functions. A heading or a table cell has the form "English / 中文", or a line
break between the two languages. A prose cell has one `<div lang>` per language, and an output has
`lang` attributes.
"""

import re
from copy import deepcopy
from functools import cache
from itertools import pairwise

from bs4 import BeautifulSoup
from nbformat import NotebookNode

from course_lib import labels
from course_lib.teaching.pictures import LANGUAGES
from course_lib.teaching.switch import PER_LANGUAGE

from .cells import EditionError
from .chinese import HAN

_DIV = re.compile(r'<div lang="(en|zh)">\n(.*?)\n</div>', re.S)
_BREAK, _SLASH = re.compile(r"\s*<br ?/?>\s*"), re.compile(" / ")
_CODE = re.compile(r"`[^`]*`|\$[^$]*\$")
# The mark of a heading (with its number) or a list item, which both languages keep.
_MARK = re.compile(r"\s*(?:#{1,6} (?:[\d.]+ )?|- |\d+\. )?")
# Matches a text that is true only in JupyterLab, which is a part of a line or a whole line. A whole
# line is matched with its line break, so that no empty list item remains.
_LAB_ONLY = re.compile(
    r"^(?:- )?{span}(?:\n|\Z)|{span} ?".format(span=r'<span class="lab-only">[^<]*</span>'), re.M
)


def languages_in(language: str) -> tuple[str, ...]:
    """Return the languages that an edition shows: one, or English and Chinese for "both"."""
    return LANGUAGES if language == "both" else (language,)


def words_in(label: str, language: str) -> str:
    """Return a label of the course in one language, or in both with a space between them."""
    words = dict(zip(LANGUAGES, labels.in_both_languages(label), strict=True))
    return " ".join(words[each] for each in languages_in(language))


def markdown_in(source: str, language: str) -> str:
    """Return a prose cell in one language: the headings, and the text of the language's `<div>`.

    Args:
        source: Markdown with at most one div per language.
        language: "en", "zh", or "both" for the unchanged cell.

    Raises:
        EditionError: The cell has divs, but none in this language.
    """
    if language == "both":
        return source
    bodies = dict(_DIV.findall(source))
    if bodies and language not in bodies:
        raise EditionError(
            f'a markdown cell has no <div lang="{language}">, it starts {source[:60]!r}'
        )
    lines = [
        half(line, language) if line.startswith("#") else line
        for line in _DIV.sub("", source).splitlines()
    ]
    parts = ("\n".join(lines).strip(), bodies.get(language, "").strip())
    return "\n\n".join(part for part in parts if part)


def without_lab_texts(source: str) -> str:
    """Return a prose cell without its `<span class="lab-only">` elements.

    These elements are sentences, paragraphs or list items that are true only in JupyterLab.
    """
    return re.sub(r"\n{3,}", "\n\n", _LAB_ONLY.sub("", source)).strip()


def half(text: str, language: str) -> str:
    """Return one language of a text such as "English / 中文" or "English<br>中文".

    The number of a heading and the mark of a list item belong to both halves. A text that does not
    have two halves is returned unchanged, and so is every text for "both".
    """
    if language == "both":
        return text
    mark = _MARK.match(text)[0]
    hidden = _CODE.sub(lambda found: "x" * len(found[0]), text)
    for between in (_BREAK, _SLASH):
        for cut in reversed(list(between.finditer(hidden, len(mark)))):
            english, chinese = text[len(mark) : cut.start()], text[cut.end() :]
            # after a line break, few Chinese characters are enough, as in "bf16 的 autocast"
            few = between is _BREAK and re.search(HAN, chinese) and not re.search(HAN, english)
            if few or (is_chinese(chinese) and not is_chinese(english)):
                return mark + (english if language == "en" else chinese)
    return text


def is_chinese(text: str) -> bool:
    """Return whether a text has more than a word or two of Chinese outside of code.

    For example, "English, 中文 or both" is English.
    """
    text = re.sub(r"<[^>]*>|\]\([^)]*\)", "", _CODE.sub("", text))
    return len(re.findall(HAN, text)) > 0.2 * len(re.findall(r"[A-Za-z]", text))


def guide_in(text: str, language: str) -> str:
    """Return a guide in one language, such as the glossary.

    A guide has no `<div lang>`. A Chinese paragraph follows its English original, and list items
    and table cells have two halves. If a table has two columns such as "question" and "问题", each
    language shows one of them. The glossary's columns "English" and "中文" are always shown.
    """
    kept: list[str] = []
    before = ""
    for block in re.split(r"\n{2,}", text.strip()):
        translated = _is_paragraph(before) and _is_paragraph(block)
        if translated and is_chinese(block) and not is_chinese(before):
            if language == "zh":
                kept[-1] = block
        elif block.startswith("|"):
            kept.append(_table_in(block, language))
        else:
            items = re.split(r"\n(?=\s*(?:- |\d+\. ))", block)
            kept.append("\n".join(half(item, language) for item in items))
        before = block
    return "\n\n".join(kept) + "\n"


def _is_paragraph(block: str) -> bool:
    return bool(block) and _MARK.match(block)[0].strip() == "" and block[0] != "|"


def _table_in(table: str, language: str) -> str:
    rows = [row.strip("| ").split(" | ") for row in table.splitlines() if not re.match(r"\|-", row)]
    absent = {
        place + (language == "en")
        for place, (english, chinese) in enumerate(pairwise(rows[0]))
        if english != "English" and not re.search(HAN, english) and re.fullmatch(f"{HAN}+", chinese)
    }
    rows = [
        [half(cell, language) for place, cell in enumerate(row) if place not in absent]
        for row in rows
    ]
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


@cache
def html_in(html: str, language: str) -> str:
    """Return HTML without the elements of the other language.

    Results are cached, because a page and the notebook to download show the same outputs.
    """
    soup = BeautifulSoup(html, "html.parser")
    for other in set(LANGUAGES) - set(languages_in(language)):
        for element in soup.find_all(PER_LANGUAGE, lang=other):
            element.decompose()
    return str(soup)


def output_in(output: NotebookNode, language: str) -> NotebookNode:
    """Return a copy of a cell's output in one language."""
    output = deepcopy(output)
    data = output.get("data", {})
    if "text/html" in data:
        data["text/html"] = html_in(data["text/html"], language)
    return output


def notebook_in(notebook: NotebookNode, language: str) -> NotebookNode:
    """Return a copy of a notebook in one language, without the texts for JupyterLab only."""
    notebook = deepcopy(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = without_lab_texts(markdown_in(cell.source, language))
        elif cell.cell_type == "code":
            cell.outputs = [output_in(output, language) for output in cell.outputs]
    return notebook
