"""Hashes of the English and Chinese of each text, to detect edits of only one language.

`make notebooks` renews the pair of hashes in `translations.toml` if both languages have changed. If
only one has changed, the stored pair stays and a test fails. If both texts of section 2.5, for
example, are right after such an edit, renew their pair with

    make notebooks ARGS="--same 02.5"
"""

import hashlib
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from nbformat import NotebookNode

from .languages import markdown_in

STORE = Path(__file__).with_name("translations.toml")
_HEAD = """# A place in the lessons -> a hash of its English, a hash of its Chinese.
# `make notebooks` writes this file; 02.5-3 is the third text of section 2.5.
# After an edit that leaves the other language right as it is, say so:
#     make notebooks ARGS="--same 02.5"
"""
HashPair = tuple[str, str]  # hashes of the English and the Chinese


def pairs(notebook: NotebookNode) -> dict[str, HashPair]:
    """Return a dict from the place of each text, such as "02.5-3 slide", to its hashes (en, zh)."""
    return {place: (_hash(en), _hash(zh)) for place, en, zh in _texts(notebook)}


def _texts(notebook: NotebookNode) -> Iterator[tuple[str, str, str]]:
    section, number = "", 0
    for cell in notebook.cells:
        if cell.cell_type != "markdown":
            continue
        found = re.match(r"##? (\d+)((?:\.\d+)?) ", cell.source)
        if found:
            section, number = f"{int(found[1]):02d}{found[2]}", 0
        number += 1
        place = section if number == 1 else f"{section}-{number}"
        english, chinese = (markdown_in(cell.source, language) for language in ("en", "zh"))
        # the hash of the Chinese leaves out the section's number, which both languages share
        yield place, english, re.sub(r"^(#+ )[\d.]+ ", r"\1", chinese)
        slide = cell.metadata.get("slide")
        if isinstance(slide, Mapping):
            yield f"{place} slide", slide["en"], slide["zh"]


def _hash(text: str) -> str:
    return hashlib.sha256(" ".join(text.split()).encode()).hexdigest()[:10]


def one_sided(found: Mapping[str, HashPair], known: Mapping[str, HashPair]) -> dict[str, HashPair]:
    """Return the stored hash pairs of texts that changed in only one language, by place.

    A text is identified by its hashes instead of its place, because it may move.
    """
    changed = {}
    for place, pair in found.items():
        if pair not in known.values():
            halves = [old for old in known.values() if old[0] == pair[0] or old[1] == pair[1]]
            if halves:
                changed[place] = halves[0]
    return changed


def renew_pairs(
    found: Mapping[str, HashPair], known: Mapping[str, HashPair], same: Collection[str] = ()
) -> dict[str, HashPair]:
    """Return the hash pairs to store, by place.

    This is the old pair of a text if only one language changed, and otherwise the new pair.

    Args:
        same: Sections, such as "02.5", whose new pairs are always stored.
    """
    old = {
        place: pair
        for place, pair in one_sided(found, known).items()
        if section_of(place) not in same
    }
    return {**found, **old}


def section_of(place: str) -> str:
    """Return the section of a place: "02.5" for "02.5-3 slide"."""
    return re.match(r"[\d.]+", place)[0]


def read_pairs(store: Path = STORE) -> dict[str, HashPair]:
    """Read the stored hash pairs, as a dict from the place of a text to its pair."""
    if not store.exists():
        return {}
    return {place: tuple(pair) for place, pair in tomllib.loads(store.read_text("utf-8")).items()}


def store_pairs(lesson: str, of_lesson: Mapping[str, HashPair], store: Path = STORE) -> None:
    """Replace the stored hash pairs of one lesson."""
    others = {
        place: pair for place, pair in read_pairs(store).items() if not place.startswith(lesson)
    }
    lines = [
        f'"{place}" = ["{en}", "{zh}"]'
        for place, (en, zh) in sorted({**others, **of_lesson}.items(), key=_order)
    ]
    store.write_text(_HEAD + "\n".join(lines) + "\n", "utf-8")


def _order(item: tuple[str, HashPair]) -> tuple[list[int], bool]:
    return [int(number) for number in re.findall(r"\d+", item[0])], item[0].endswith("slide")
