"""The instructor's guide beside the notebooks: sections, minutes, figures, claims and exercises
agree with them.

Every check takes text and returns a list of problems; faults that are put into the guide show that
it finds them.
"""

import re
from decimal import ROUND_HALF_UP
from functools import cache

import pytest
from test_notebooks import (
    FOLDER,
    HAN,
    PATHS,
    ROOT,
    agreement_problems,
    chinese_problems,
    each_notebook,
    english_problems,
    glossary_problems,
    load,
    missing_links,
    numbers_in,
    output_texts,
    printed_asterisks,
    take_apart,
)
from test_pace import core, sections

BeautifulSoup = pytest.importorskip("bs4").BeautifulSoup

GUIDE = (FOLDER / "INSTRUCTORS.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
PARTS = ("Aims", "Minutes", "Misconceptions", "Discussion", "Grading", "Where learners get stuck")
# "2.4: 9" in the table of minutes.
SECTION_MINUTES = re.compile(r"(\d+\.\d+): (\d+)")
# A section that the prose names.
NAMED_SECTIONS = re.compile(r"\bsections? (\d+\.\d+)|(\d+\.\d+) 节")


# --- helpers ---


def lessons_of(guide):
    """Lesson's number -> its text, from one heading "## 02 ..." to the next."""
    parts = re.split(r"^## (?=\d\d )", guide, flags=re.M)[1:]
    return {part[:2]: part for part in parts}


def part_of(lesson, title):
    """The text below "### Title / ..." of a lesson, "" if there is none."""
    found = re.search(rf"^### {title} / .*?$(.*?)(?=^### |\Z)", lesson, re.M | re.S)
    return found[1] if found else ""


def rows_of(text):
    """The tables' rows as lists of cells, without headings and rules."""
    tables = re.findall(r"^\|.*\n\|[-|]+\|\n((?:\|.*\n?)*)", text, re.M)
    return [
        [cell.strip() for cell in row.strip("|").split(" | ")]
        for table in tables
        for row in table.splitlines()
    ]


def pairs_of(guide):
    """(English, Chinese) of the headings, paragraphs, list items and cells.

    Chinese is "" where it is missing, and None for a cell without a <br>, such as a figure.
    """
    pairs, waiting = [], None
    for block in re.split(r"\n\s*\n", guide.strip()):
        # no paragraph in the other language follows
        if waiting and re.match(r"[#|-]|\d\. ", block):
            pairs, waiting = [*pairs, (waiting, "")], None
        if block.startswith("#"):
            left, _, right = re.sub(r"^#+ (\d\d )?", "", block).partition(" / ")
            pairs.append((left, right))
        elif block.startswith("|"):
            cells = re.split(r" \| |^\| | \|$", block, flags=re.M)
            cells = [cell.partition("<br>") for cell in cells if not re.fullmatch(r"[-|\s]*", cell)]
            pairs += [(english, chinese if tag else None) for english, tag, chinese in cells]
        elif re.match(r"- |\d\. ", block):
            items = re.split(r"^(?:- |\d\. )", block, flags=re.M)[1:]
            pairs += [tuple(item.partition("<br>\n")[::2]) for item in items]
        elif waiting is None:
            waiting = block
        else:
            pairs.append((waiting, block))
            waiting = None
    return pairs if waiting is None else [*pairs, (waiting, "")]


def readme_minutes(readme):
    """Lesson's number -> minutes, from the README's table; 0 for a lesson in preparation."""
    rows = re.findall(r"^\| \[?(\d\d)\]?\S* \| .*? \| ([^|]*) \|", readme, re.M)
    return {number: int(cell) if cell.isdecimal() else 0 for number, cell in rows}


def outputs_of(notebook):
    return [text for cell in notebook.cells for text in output_texts(cell)]


@cache
def sources_of_checks():
    """(name of an exercise's check, its source), wherever in the library it stands."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "course_lib").rglob("*.py")]
    check = re.compile(r"^def (check_\w+)(.*?)(?=^[@\w]|\Z)", re.M | re.S)
    return [found for text in texts for found in check.findall(text)]


def figures_of(notebook):
    """Every number that a notebook shows, its code and the checks of its exercises included."""
    text = "\n".join([*(cell.source for cell in notebook.cells), *outputs_of(notebook)])
    checks = [source for name, source in sources_of_checks() if name in text]
    return set().union(*map(numbers_in, [text, *checks]))


def rounds_to(figure, shown):
    """A figure with decimals may be one of those shown, rounded."""
    digits = figure.as_tuple().exponent
    finer = [other for other in shown if other.as_tuple().exponent < digits < 0]
    return any(other.quantize(figure, ROUND_HALF_UP) == figure for other in finer)


# --- checks ---


def language_problems(guide):
    """Both languages everywhere, with the same numbers, formulas, code and terms."""
    problems = []
    for english, chinese in pairs_of(guide):
        if chinese:
            found = agreement_problems(english, chinese) + glossary_problems(english, chinese)
            found += english_problems(english) + chinese_problems(chinese)
            found += printed_asterisks(english) + printed_asterisks(chinese)
            problems += [f"{english[:40]!r}: {problem}" for problem in found]
        elif chinese == "" or re.search(f"[{HAN}]", english):
            problems.append(f"{english[:40]!r}: is there in one language only")
    return problems


def lesson_problems(lesson, notebook, minutes):
    """A lesson's section against its notebook, whose minutes are those of the README."""
    there, of_core = sections(notebook.cells), sections(core(notebook))
    rows, graded = (rows_of(part_of(lesson, part)) for part in ("Minutes", "Grading"))
    timed = [[(name, int(n)) for name, n in SECTION_MINUTES.findall(row[0])] for row in rows]
    prose = "\n".join(cell.source for cell in notebook.cells)
    named = ["".join(match) for match in NAMED_SECTIONS.findall(lesson)]
    in_core = [n for row in timed for name, n in row if name in of_core]
    exercises = sorted(set(re.findall(r"\*\*Exercise (\d)\.\*\*", prose)))
    # full marks, half marks, and what the check does not see, in both languages
    filled = {row[0]: len(re.findall(r"\S<br>\S", " | ".join(row))) for row in graded}
    compared = {
        "empty parts": ([title for title in PARTS if not part_of(lesson, title).strip()], []),
        "sections with minutes": ([name for row in timed for name, _ in row], there),
        "sums": ([row[1] for row in rows], [str(sum(n for _, n in row)) for row in timed]),
        "minutes of the core": (sum(in_core), minutes),
        "the notebook says its minutes": (f"({minutes} minutes)" in prose, True),
        "unknown sections": ([name for name in named if name not in there], []),
        "graded exercises": ([row[0] for row in graded], exercises),
        "cells of the grading": (filled, dict.fromkeys(exercises, 3)),
    }
    problems = [f"{what}: {a}, not {b}" for what, (a, b) in compared.items() if a != b]
    return problems + claim_problems(lesson, notebook)


def claims_of(notebook):
    """(claim, measured figure, verdict) of each row of a lesson's tables of claims, English before
    Chinese."""
    texts = outputs_of(notebook)
    tables = [text for text in texts if 'class="dataframe' in text and ">claim<" in text]
    found = []
    for table in (BeautifulSoup(html, "html.parser") for html in tables):
        for code in table.find_all("code"):
            code.replace_with(f"`{code.text}`")
        names = [cell.text.split()[0] for cell in table.select("th")]
        for row in table.select("tbody tr"):
            cells = dict(zip(names, row.find_all("td"), strict=True))
            shown = [cells[name] for name in ("claim", "measured", "verdict")]
            parts = [cell.select("[lang]") or [cell] for cell in shown]
            texts = (" ".join(part.text for part in each) for each in parts)
            found.append(tuple(" ".join(text.split()) for text in texts))  # also no-break spaces
    return found


def claim_problems(lesson, notebook):
    """The claims are the lesson's, with the figures and verdicts that the notebook stores."""
    there = set(claims_of(notebook))
    rows = rows_of(part_of(lesson, "Misconceptions"))
    here = {tuple(cell.replace("<br>", " ") for cell in row) for row in rows}
    return [f"claims: {row}" for row in sorted(there ^ here)]


def figure_problems(lesson, notebook):
    """Numbers that the notebook does not show."""
    minutes = part_of(lesson, "Minutes")
    prose_of_rows = "\n".join(cell for row in rows_of(minutes) for cell in row[2:])
    text = lesson.replace(minutes, f"{prose_of_rows}\n")
    # or the last number of one language meets the first of the other
    text = text.replace("<br>", " ")
    # numbers of lessons, questions and exercises
    text = re.sub(r"^(#+ \d*|\d\. |\| \d \|)", "", text, flags=re.M)
    words, _, _ = take_apart(NAMED_SECTIONS.sub("", text))
    shown = figures_of(notebook)
    return [f"{each}" for each in sorted(numbers_in(words) - shown) if not rounds_to(each, shown)]


def plan_problems(guide, minutes):
    """The table of plans adds up the minutes of its lessons, and names only lessons that exist."""
    plans = re.search(r"^## Plans / .*?$(.*?)^## ", guide, re.M | re.S)[1]
    return [
        f"{when}: lessons {lessons} do not take {total} minutes"
        for when, lessons, total in rows_of(plans)
        if str(sum(minutes.get(lesson, 0) for lesson in lessons.split(", "))) != total
    ]


# --- the guide ---

LESSONS = lessons_of(GUIDE)
MINUTES = readme_minutes(README)


def problems_of(lesson, path):
    notebook, minutes = load(path), MINUTES[path.stem[:2]]
    found = lesson_problems(lesson, notebook, minutes) + figure_problems(lesson, notebook)
    return found + language_problems(f"## {lesson}")


def test_every_notebook_has_its_section_in_the_guide():
    written = [number for number, lesson in LESSONS.items() if part_of(lesson, "Aims")]
    assert written == [path.stem[:2] for path in PATHS]


@each_notebook
def test_a_lessons_section_agrees_with_its_notebook_and_in_both_languages(path):
    assert problems_of(LESSONS[path.stem[:2]], path) == []


def test_the_rest_of_the_guide_agrees_too():
    assert plan_problems(GUIDE, MINUTES) == []
    assert plan_problems(GUIDE, dict.fromkeys(MINUTES, 1000)) != []
    assert language_problems(GUIDE) == []
    assert missing_links(GUIDE, FOLDER) == []
    for readme in (README, (ROOT / "README.zh.md").read_text(encoding="utf-8")):
        assert readme.count("](notebooks/INSTRUCTORS.md)") == 1


# --- each check finds a fault that is put into the guide ---


@pytest.mark.parametrize(
    ("pattern", "fault"),
    [
        (r"^### Aims", "### Goals"),
        (r"(\d\.1): \d+", r"\1: 99"),
        (r"(\d\.1): \d+, ", ""),
        (r"(\d\.2: \d+) \| \d+ \|", r"\1 | 99 |"),
        (r"\bsection (\d)\.\d+", r"section \1.99"),
        (r"(\d)\.\d+ 节", r"\1.99 节"),
        (r"^\| 1 \| .*\n", ""),  # an exercise that is not graded
        (r"^(\| 1 \| )[^|]* \|", r"\1 |"),  # no full marks
        (r"^(\| \S.*<br>.* \| )[^|]*\d MB( \|)", r"\g<1>987 MB\2"),  # the figure of a claim
        (r"^(\| .* \| )No\b", r"\1Yes"),  # its verdict
        (r"(\d) MB\b", r"\g<1>9876 MB"),
        (r"<br>\n  +\S.*", ""),  # Chinese is missing
    ],
)
def test_a_fault_in_the_guide_is_found(pattern, fault):
    path = next(path for path in PATHS if re.search(pattern, LESSONS[path.stem[:2]], re.M))
    lesson = re.sub(pattern, fault, LESSONS[path.stem[:2]], count=1, flags=re.M)
    assert problems_of(lesson, path)
