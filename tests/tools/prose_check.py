"""Count hard constructions in the prose, per rule and folder, against a table that may only fall.

    python tests/tools/prose_check.py  # compare the counts with tests/tools/prose_counts.csv
    python tests/tools/prose_check.py course_lib/budget     # list the hits in a folder or file
    python tests/tools/prose_check.py --write  # lower the table where counts have fallen

The rules know patterns, not meaning: a hit is a place to look at, and a text without hits may still
be hard to read. English is searched in docstrings, comments, messages of errors and warnings, the
help of commands, lessons, slides, Markdown files and labels. In Chinese, colons and
semicolons are counted in lessons, slides, Markdown files and labels. Names of tests are counted if
they are long; in names and docstrings of tests, words are counted that have a plain synonym.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import math
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import csv_tables

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tests/tools/prose_counts.csv"
# Wrong answers and mutants are learners' code, and this file shows what the rules find.
EXCLUDED = ("tests/lessons/answers", "tests/tools/prose_check.py")
HAN = re.compile("[\u3400-\u9fff]")


# The rules
# ----------------------------------------------------------------------------------------------

UNIT = (
    r"\b(?:bytes?|numbers?|elements?|seconds?|MB|GB|FLOPs?|products?|rows?|lines?|deck|pages?|table"
    r"|masks?|copy|copies|state|checkpoint|process|dict|one|two|three|\d[\d.,]*)"
)
EACH = (
    r"an? (?:parameter|row|token|layer|second|number|element|rank|byte|block|sample|tile|lesson"
    r"|head|device|stage|mode|weight|sequence|query|piece|stream|group|operator|technique|language"
    r"|step|walk)\b"
)
AUXILIARY = r"(?:is|are|was|were|do|does|did|will|would|can|could|should|must|has|have|if|about)\b"
START = r"(?:\A\s*(?:[-*] )?|[.;:!?]\s+|\n\s*\n\s*|\n\s*[-*|] )"

PATTERNS = {
    "subject without a noun (What ..., Who ...)": (
        START + r"(?:What|Who|Whoever|Whatever) (?!" + AUXILIARY + r")[a-z][^?.:;]{0,200}[.:;]"
    ),
    "'a X' for 'per X'": UNIT + " " + EACH,
    "'is no N'": (
        r"(?<!\b[Tt]here\s)\b(?:is|are|was|were) no (?!longer|more|less|fewer|such|larger|smaller"
        r"|other|reason|need|way|doubt|point|saving)[a-z]+\b(?! (?:is|are|was|were|left|of)\b)"
    ),
    "bare 'there'": (
        r"\b(?:is|are|was|were|be) there\b(?=[,.;:)]| (?:already|anyway|too|yet|before|at|when"
        r"|until|from|beside|in|all))"
    ),
    "'but for'": r"\bbut for\b|\bnothing beside\b",
    "'so many', 'as much' without as": (
        r"\b(?:so many|so much|so few|so little|as many|as much)\b(?!(?: \S+){0,6} (?:as|that)\b)"
    ),
    "nobody, somebody": r"\b(?:nobody|somebody|whoever)\b",
    "'it takes', 'comes with'": r"; it takes\b|--\S+ comes with --",
    "'as it is'": (
        r"\bas (?:it|they) (?:is|are|was|were)(?=[,.;:)]|\Z| (?:in|on|before|when|where|and)\b)"
    ),
    "old words": r"\b(?:anew|lest|dearer|dearest|mended?)\b|\bin place of\b|\bbeside\b",
    "'Of ...' in front": (
        START + r"(?:Of|Exact|Told|Wrong) (?!course\b)[a-z`][^.:;]{0,80}?\b(?:is|are|was|were|has"
        r"|have|runs?)\b"
    ),
    "'stands in'": r"\b(?:stands?|stood) (?:there|beside|above|below|at|under|in (?!for))\b",
    "told, said, known": r"\b(?:is|are|be) (?:told|said|known (?:to|for|of|here|by))\b",
    "'of which', 'in whose'": (
        r"(?<!,\s)(?<!(?:each|some|most|both|none)\s)(?<!(?:one|all|any)\s)\bof which\b"
        r"|\b(?:of whom|in whose|whose are|from so many)\b"
    ),
    "nickname": r"\b(?:pieces?|levers?|tier below|state below|the turn)\b",
}
# In names and docstrings of tests. Plain words for these are: reject; given, tested, found; package
# or budget; learner or user; matrix product; number or plot; point of the trace; mutant or mistake;
# micro-batch.
PRIVATE_WORDS = (
    r"\b(?:refus(?:e|es|ed|ing|al)|told|said|asked|known|met|seen|rooms?|readers?|figures?|moment"
    r"|twins?|slips?|pieces?|doors?|walk(?:s|ed|ing)?|ways?|books|masters|referees?|as it is"
    r"|is there|stands? in)\b|(?<!matrix\s)\bproducts?\b"
)
DOCSTRING_PATTERNS = {"private word": PRIVATE_WORDS}
NAME_PATTERNS = {"name of more than ten words": r"\A(?:\S+ ){10,}\S+", **DOCSTRING_PATTERNS}


def _compiled(patterns: dict[str, str]) -> dict[str, re.Pattern[str]]:
    """Compile patterns in which a space is any white space, as a phrase may go over two lines."""
    return {name: re.compile(text.replace(" ", r"\s+")) for name, text in patterns.items()}


RULES = _compiled(PATTERNS)
TEST_NAMES, TEST_DOCSTRINGS = "names of tests", "docstrings of tests"
# These two rows of the table have rules of their own.
RULES_OF = {TEST_NAMES: _compiled(NAME_PATTERNS), TEST_DOCSTRINGS: _compiled(DOCSTRING_PATTERNS)}
# "It is left as it is" and "as long as it is" are plain English.
PLAIN_BEFORE = {
    "'as it is'": re.compile(
        r"\b(?:leav|left|stay|keep|kept|remain|far|long|soon|much)\w*(?:\s+\S+){0,4}\s+\Z",
        re.IGNORECASE,
    )
}
MARKS = {"colons per 100 Chinese characters": "：", "semicolons per 100 Chinese characters": "；"}
# A rate at or below its goal may move freely.
GOALS = dict(zip(MARKS, (0.6, 0.4), strict=True))


class Hit(NamedTuple):
    """A place that a rule finds."""

    path: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.rule}: {self.text!r}"


def hits(
    path: str, line: int, text: str, rules: dict[str, re.Pattern[str]] = RULES
) -> Iterator[Hit]:
    """Find constructions in one English text that begins in this line of a file."""
    for rule, pattern in rules.items():
        plain = PLAIN_BEFORE.get(rule)
        for match in pattern.finditer(text):
            if plain and plain.search(text[: match.start()]):
                continue
            found = " ".join(match[0].split())
            start = match.end() - len(match[0].lstrip(" .;:!?\n"))
            yield Hit(path, line + text.count("\n", 0, start), rule, found[:80])


# The texts
# ----------------------------------------------------------------------------------------------


class Text(NamedTuple):
    """A text in one language, and where it begins."""

    folder: str
    path: str
    line: int
    words: str


def folder_of(path: str) -> str:
    """Return the row of the table: a package of the library, `tests`, `notebooks`, or `docs`."""
    *folders, _ = path.split("/")
    if not folders or folders[0].startswith("."):
        return "docs"
    return "/".join(folders[: 2 if folders[0] in ("course_lib", "notebooks") else 1])


def in_python(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of docstrings, messages, help of commands, and comments."""
    messages = ("add_argument", "Parser", "ArgumentParser", "warn")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if docstring := ast.get_docstring(node):
                yield node.body[0].lineno, docstring
        elif isinstance(node, ast.Raise) and node.exc:
            yield from strings(node.exc)
        elif isinstance(node, ast.Call):
            if getattr(node.func, "attr", getattr(node.func, "id", "")) in messages:
                yield from strings(node)
    yield from comments(source)


def in_tests(source: str) -> Iterator[tuple[str, int, str]]:
    """(folder, line, text) of the names of tests and of their docstrings."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            name = " ".join(word for word in node.name.split("_")[1:] if word)
            yield TEST_NAMES, node.lineno, name
            if docstring := ast.get_docstring(node):
                yield TEST_DOCSTRINGS, node.body[0].lineno, docstring


def strings(node: ast.AST) -> Iterator[tuple[int, str]]:
    """The strings below a node; an f-string is one of them, with {} for its values."""
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        yield node.lineno, "".join(map(str, parts))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.lineno, node.value
    else:
        for child in ast.iter_child_nodes(node):
            yield from strings(child)


def comments(source: str) -> list[tuple[int, str]]:
    """Comments; those of adjacent lines are one text."""
    found: list[tuple[int, list[str]]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            n, words = token.start[0], token.string.lstrip("#: ")
            alone = token.line.lstrip().startswith("#")
            if found and alone and n == found[-1][0] + len(found[-1][1]):
                found[-1][1].append(words)
            else:
                found.append((n, [words]))
    return [(n, "\n".join(lines)) for n, lines in found]


def in_markdown(source: str, first: int = 1) -> Iterator[tuple[int, str]]:
    """(line, text) of paragraphs, items and cells of tables, each in one language; no code."""
    source = re.sub(
        r"^```.*?^```", lambda code: "\n" * code[0].count("\n"), source, flags=re.M | re.S
    )
    block: list[str] = []
    for n, line in enumerate([*source.split("\n"), ""], first):
        if line.startswith("|"):
            yield from ((n, cell) for cell in re.split(r"\||<br>", line) if cell.strip())
            line = ""
        item = re.match(r"\s*(?:[-*]|\d+\.) ", line)
        changed = block and bool(HAN.search(line)) != bool(HAN.search(block[-1]))
        if block and (not line.strip() or item or changed):
            yield n - len(block), "\n".join(block)
            block = []
        if line.strip():
            block.append(re.sub(r"<br>$|^#+ ", "", line))


def in_lesson(source: str) -> Iterator[tuple[str, int, str]]:
    """(folder, line, text) of a lesson's script: its prose, slides and code."""
    lines = source.split("\n")
    code, cell_is_text = [], False
    for n, line in enumerate(lines, 1):
        if line.startswith("# %%"):
            cell_is_text = "[markdown]" in line
            if (at := line.find('slide={"')) >= 0:
                slide, _ = json.JSONDecoder().raw_decode(line, at + len("slide="))
                yield from (("slides", n, text) for text in slide.values())
        code.append("" if cell_is_text or line.startswith("# %%") else line)
    for div in re.finditer(r'^# <div lang="(?:en|zh)">\n(.*?)^# </div>', source, re.M | re.S):
        first = source.count("\n", 0, div.start(1)) + 1
        words = re.sub(r"^# ?", "", div[1], flags=re.M)
        yield from (("notebooks/scripts", n, text) for n, text in in_markdown(words, first))
    yield from (("notebooks/scripts", n, text) for n, text in in_python("\n".join(code)))


def in_catalog(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of the labels: their English, which are keys, and their Chinese."""
    for n, line in enumerate(source.split("\n"), 1):
        if line.startswith('"'):
            yield from ((n, words) for pair in tomllib.loads(line).items() for words in pair)
        elif found := re.match(r"(?:\w+\.)?(?:en|zh) = ", line):  # a message, or a part of a claim
            yield n, tomllib.loads("words = " + line[found.end() :])["words"]


def texts(path: str) -> Iterator[Text]:
    """The texts of one file of the repository."""
    source = (ROOT / path).read_text("utf-8")
    if path.startswith("notebooks/scripts/"):
        yield from (Text(folder, path, n, words) for folder, n, words in in_lesson(source))
        return
    if path.startswith("tests/") and path.rpartition("/")[2].startswith("test_"):
        yield from (Text(folder, path, n, words) for folder, n, words in in_tests(source))
    if path.endswith(".toml"):
        folder, found = "labels", in_catalog(source)
    else:
        folder = folder_of(path)
        found = in_python(source) if path.endswith(".py") else in_markdown(source)
    yield from (Text(folder, path, n, words) for n, words in found)


def files() -> list[str]:
    """The files with texts, tracked by git or new."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    patterns = ["*.py", "*.md", "course_lib/labels/zh.toml", "course_lib/lessons/*/*.toml"]
    done = subprocess.run(
        [*command, *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = sorted(set(done.stdout.splitlines()))
    return [each for each in found if not each.startswith(EXCLUDED) and (ROOT / each).exists()]


# Counts, and the table of them
# ----------------------------------------------------------------------------------------------

Counts = dict[tuple[str, str], float]


class Prose:
    """All texts of the repository, what the rules find in them, and the counts.

    Attributes:
        hits: Folder and rule to the hits there.
        counts: Folder and rule to the number of hits, or to the rate of a mark in Chinese.
    """

    def __init__(self, found: Iterator[Text] | None = None) -> None:
        found = (text for path in files() for text in texts(path)) if found is None else found
        self.hits: dict[tuple[str, str], list[Hit]] = defaultdict(list)
        self.counts: Counts = {}
        folders: dict[str, Counter[str]] = defaultdict(Counter)
        for text in found:
            characters = folders[text.folder]
            if HAN.search(text.words):
                characters.update(text.words)
                continue
            rules = RULES_OF.get(text.folder, RULES)
            for hit in hits(text.path, text.line, text.words, rules):
                self.hits[text.folder, hit.rule].append(hit)
        for folder, characters in folders.items():
            for rule in RULES_OF.get(folder, RULES):
                self.counts[folder, rule] = len(self.hits[folder, rule])
            han = sum(count for character, count in characters.items() if HAN.match(character))
            if han >= 500:  # in fewer, a single mark is a rate
                for rule, mark in MARKS.items():
                    self.counts[folder, rule] = math.ceil(1e4 * characters[mark] / han) / 100

    def problems(self, table: Counts) -> list[str]:
        """What has more hits than the table allows, with all hits of the rule in that folder."""
        found = []
        for (folder, rule), count in self.counts.items():
            allowed = max(table.get((folder, rule), 0), GOALS.get(rule, 0))
            if count > allowed:
                found.append(f"{folder}: {rule}: {count:g}, and the table allows {allowed:g}")
                found += [f"  {hit}" for hit in sorted(self.hits.get((folder, rule), ()))]
        return found


def read() -> Counts:
    """The stored table, which has no rows with zero hits."""
    rows = csv_tables.read(TABLE)
    return {(row["folder"], row["rule"]): float(row["count"]) for row in rows}


def write(counts: Counts) -> None:
    """Store a table."""
    found = sorted((*key, f"{count:g}") for key, count in counts.items() if count)
    columns = "folder", "rule", "count"
    csv_tables.write(TABLE, [dict(zip(columns, row, strict=True)) for row in found])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("paths", nargs="*", help="list the hits in these files and folders")
    parser.add_argument("--write", action="store_true", help="lower the stored table")
    given = parser.parse_args(arguments)
    if given.paths:
        chosen = tuple(given.paths)
        found = Prose(text for path in files() if path.startswith(chosen) for text in texts(path))
        print(*sorted(chain(*found.hits.values())), sep="\n")
        return 0
    prose = Prose()
    problems = prose.problems(read())
    if given.write and not problems:
        write(prose.counts)
    else:
        print(*problems, sep="\n")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
