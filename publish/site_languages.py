"""Make one page per language, in en/ and zh/, from each page of the site, which has both.

Sphinx reads and writes every page once. `lang` attributes mark the elements of each language, so a
page in one language is the same page without the elements of the other. Styles, scripts, pictures
and the index of the search are those of the site itself.
"""

import html
import posixpath
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from itertools import accumulate
from pathlib import Path

from .cells import EditionError

#: Folder of the pages -> the language that they say they are in. The site's own are in both.
TREES = {"en": "en", "zh": "zh-Hans", "both": "en"}
NAMES = {"en": "English", "zh": "中文", "both": "both 双语"}
# Other elements with a `lang`, as links to the other language, are for all.
_OF_ONE_LANGUAGE = frozenset(["div", "span", "p", "td", "th", "li", "tr", "details", "figure"])
_PLACE = "<!-- language-switch -->"  # in templates/sidebar/language.html

# Words of the theme and of MyST-NB.
_WORDS = {
    "Next": "下一页",
    "Previous": "上一页",
    "Home": "首页",
    "On this page": "本页内容",
    "Back to top": "回到顶部",
    "Skip to content": "跳到正文",
    "Index": "索引",
    "Search": "搜索",
    "Show the solution": "显示答案",
    "Hide the solution": "收起答案",
    "Show the code": "显示代码",
    "Hide the code": "收起代码",
    "Link to this heading": "链接到此标题",
    "Link to this definition": "链接到此定义",
    "Toggle site navigation sidebar": "打开或收起导航栏",
    "Toggle table of contents sidebar": "打开或收起本页内容",
    "Toggle Light / Dark / Auto color theme": "切换浅色、深色或自动配色",
    "Site": "全站",
    "Please activate JavaScript to enable the search functionality.": "搜索功能需要 JavaScript。",
}


@dataclass(frozen=True)
class _Edit:
    """A part of a page, and the text that replaces it in one tree."""

    start: int
    end: int
    text: str = ""


class _Page(HTMLParser):
    """Place in a page of what differs from tree to tree.

    Attributes:
        edits: folder -> edits; some lie within others.
    """

    def __init__(self, page: str, name: str, names: Collection[str]) -> None:
        super().__init__(convert_charrefs=False)
        self.name, self.names = name, names
        self.edits: dict[str, list[_Edit]] = {tree: [] for tree in TREES}
        self._lines = [0, *accumulate(len(line) + 1 for line in page.split("\n"))]
        # elements around here: the tag, the trees that it is not in, where it starts
        self._open: list[tuple[str, Collection[str], int]] = []
        self._article = False
        self.feed(page)
        self._close(0)

    def _offset(self) -> int:
        line, column = self.getpos()
        return self._lines[line - 1] + column

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        start, raw = self._offset(), self.get_starttag_text() or ""
        self._article |= tag == "article"
        absent = _absent_from(tag, dict(attrs))
        if tag in _OF_ONE_LANGUAGE:
            self._open.append((tag, absent, start))
        else:
            self._cut(absent, start, start + len(raw))
        for tree in ("en", "zh"):
            moved = self._in_tree(raw, tree)
            if moved != raw:
                self.edits[tree].append(_Edit(start, start + len(raw), moved))

    def handle_endtag(self, tag: str) -> None:
        self._article &= tag != "article"
        places = [place for place, (name, *_) in enumerate(self._open) if name == tag]
        if places:
            _, absent, start = self._open[places[-1]]
            self._close(places[-1] + 1)
            self._open.pop()
            self._cut(absent, start, self._offset() + len(f"</{tag}>"))

    def _close(self, place: int) -> None:
        """Elements that end without saying so: of both languages only."""
        for tag, absent, _ in self._open[place:]:
            if absent:
                raise EditionError(f"{self.name} has a <{tag}> of one language without an end")
        del self._open[place:]

    def handle_data(self, data: str) -> None:
        word = data.strip()
        # In code, "Index" is a word like any other; a heading of one word is the theme's.
        if word in _WORDS and not (self._article and self.lasttag == "span"):
            start = self._offset() + data.index(word)
            self.edits["zh"].append(_Edit(start, start + len(word), _WORDS[word]))

    def _cut(self, trees: Collection[str], start: int, end: int) -> None:
        for tree in trees:
            self.edits[tree].append(_Edit(start, end))

    def _in_tree(self, raw: str, tree: str) -> str:
        """A start tag one folder deeper, with the theme's words in the tree's language."""

        def attribute(found: re.Match[str]) -> str:
            name, value = found.groups()
            if name in ("href", "src"):
                return f'{name}="{self._address(value)}"'
            return f'{name}="{_WORDS.get(value, value) if tree == "zh" else value}"'

        return re.sub(r'\b(href|src|title|aria-label|placeholder)="([^"]*)"', attribute, raw)

    def _address(self, value: str) -> str:
        """Pages have their own in each tree; all else is where it was."""
        path = re.split("[?#]", html.unescape(value))[0]
        if not path or re.match(r"[a-z][a-z+.-]*:|//", value):
            return value
        target = posixpath.normpath(posixpath.join(posixpath.dirname(self.name), path))
        return value if target in self.names else f"../{value}"


def _absent_from(tag: str, attributes: dict[str, str | None]) -> Collection[str]:
    """The trees that an element is not in."""
    if "both-languages" in (attributes.get("class") or "").split():
        return ("en", "zh")
    if tag in _OF_ONE_LANGUAGE:
        return {"en": ("zh",), "zh": ("en",)}.get(attributes.get("lang") or "", ())
    return ()


def in_each_tree(page: str, name: str, names: Collection[str]) -> Iterator[tuple[str, str]]:
    """(folder, page) for each of TREES.

    Args:
        page: the page in both languages, as Sphinx wrote it.
        name: its path from the site's root, as "notebooks/claims.html".
        names: those of all pages; other addresses lead out of the folder.

    Raises:
        EditionError: an element of one language that does not end.
    """
    found = _Page(page, name, names)
    for tree, edits in found.edits.items():
        parts, at = [], 0
        # of edits within one another, the outer one counts
        for edit in sorted(edits, key=lambda edit: (edit.start, -edit.end)):
            if edit.start >= at:
                parts += [page[at : edit.start], edit.text]
                at = edit.end
        yield tree, "".join([*parts, page[at:]])


# HTML that the theme, MyST-NB and pandas write, and HTML that a screen reader reads better.
_CLEARER = (
    # an empty cell is no heading of its column
    (r"<th\b([^>]*)>((?:\s|<(?:div|p)\b[^>]*>|</(?:div|p)>)*)</th>", r"<td\1>\2</td>"),
    # hides from them what the button says
    (r'<summary aria-label="Toggle hidden content">', "<summary>"),
    # two of a kind have names
    (r'<aside class="sidebar-drawer">', '<aside class="sidebar-drawer" aria-label="Site">'),
    (r'<aside class="toc-drawer(.*?)">', r'<aside class="toc-drawer\1" aria-label="On this page">'),
)


def clearer(page: str) -> str:
    """The page as Sphinx wrote it, changed for screen readers."""
    for pattern, instead in _CLEARER:
        page = re.sub(pattern, instead, page)
    return page


def switch(name: str, tree: str) -> str:
    """Links to the same page in the other trees, as the page in this one has them."""
    root = "../" * (name.count("/") + (tree != "both"))
    links = []
    for other, language in TREES.items():
        place = f"{root}{name}?lang=both" if other == "both" else f"{root}{other}/{name}"
        spoken = "" if other == "both" else f' lang="{language}" hreflang="{language}"'
        current = ' aria-current="true"' if other == tree else ""
        links.append(f'<a href="{place}"{spoken}{current}>{NAMES[other]}</a>')
    return f'<nav class="language-switch" aria-label="Language 语言">{"".join(links)}</nav>'


def alternates(name: str, address: str) -> str:
    """Lines for search engines: where the page is in each language; nothing where the site has no
    address yet."""
    if not address:
        return ""
    places = {TREES[tree]: f"{address}/{tree}/{name}" for tree in ("en", "zh")}
    places["x-default"] = f"{address}/{name}"
    return "".join(
        f'<link rel="alternate" hreflang="{language}" href="{html.escape(place)}">'
        for language, place in places.items()
    )


_TITLED = (r"<h1[^>]*>(.*?)(?:<a class=\"headerlink\"|</h1>)", r'brand-text">(.*?)</span>\s*<')


def _title(page: str) -> str:
    """Title of a page in one language: its heading and the course."""
    found = (re.search(pattern, page, re.S) for pattern in _TITLED)
    words = (re.sub("<[^>]+>", "", each[1]) if each else "" for each in found)
    return " - ".join(dict.fromkeys(" ".join(each.split()) for each in words if each.strip()))


def write_trees(site: Path, address: str = "") -> None:
    """Write en/ and zh/ into a site, and the switch between them into every page.

    Args:
        address: the site's own, without a slash at the end, "" where it is not known.

    Raises:
        EditionError: as `in_each_tree`.
    """
    paths = sorted(site.rglob("*.html"))
    paths = [path for path in paths if "_static" not in path.parts]
    names: Sequence[str] = [path.relative_to(site).as_posix() for path in paths]
    known = frozenset(names)
    for path, name in zip(paths, names, strict=True):
        for tree, page in in_each_tree(clearer(path.read_text("utf-8")), name, known):
            target = path if tree == "both" else site / tree / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(_finished(page, name, tree, address), "utf-8")


def _finished(page: str, name: str, tree: str, address: str) -> str:
    switched = switch(name, tree)
    page = page.replace(_PLACE, switched)
    # on a narrow screen the sidebar is hidden
    page = page.replace('<div class="header-right">', f'<div class="header-right">{switched}', 1)
    spoken = f' lang="{TREES[tree]}" data-language="{tree}" data-page="{html.escape(name)}"'
    page = re.sub(r'(<html\b[^>]*?) lang="en"', lambda tag: tag[1] + spoken, page, count=1)
    page = page.replace("</head>", f"{alternates(name, address)}</head>", 1)
    if tree != "both":
        title = f"<title>{_title(page)}</title>"
        page = re.sub("<title>.*?</title>", lambda _: title, page, count=1, flags=re.S)
    return page
