"""Test that the instructor's guide agrees with the notebooks: minutes, numbers, claims, exercises.

Each check takes text and returns a list of problems. Faults that are inserted into the guide show
that the checks report them.
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
    glossary_problems,
    load,
    missing_links,
    numbers_in,
    output_texts,
    take_apart,
)
from test_pace import sections

from course_lib.lessons import claims_of
from publish.cells import is_project
from publish.languages import guide_in, words_in

GUIDE = (FOLDER / "INSTRUCTORS.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
PARTS = ("Aims", "Minutes", "Misconceptions", "Discussion", "Grading", "Where learners get stuck")
SECTION_WITH_MINUTES = re.compile(r"(\d+\.\d+): \d+")
NAMED_SECTIONS = re.compile(r"\bsections? (\d+\.\d+)|(\d+\.\d+) 节")


# --- helpers ---


def lessons_of(guide):
    """Return each lesson's text, from one heading "## 02 ..." to the next, by its number."""
    parts = re.split(r"^## (?=\d\d )", guide, flags=re.M)[1:]
    return {part[:2]: part for part in parts}


def part_of(lesson, title):
    """Return the text below "### Title / ..." of a lesson, "" if there is none."""
    found = re.search(rf"^### {title} / .*?$(.*?)(?=^### |\Z)", lesson, re.M | re.S)
    return found[1] if found else ""


def rows_of(text):
    """Return the rows of all tables as lists of cells, without headings and rules."""
    tables = re.findall(r"^\|.*\n\|[-|]+\|\n((?:\|.*\n?)*)", text, re.M)
    return [
        [cell.strip() for cell in row.strip("|").split(" | ")]
        for table in tables
        for row in table.splitlines()
    ]


def readme_minutes(readme):
    """Return the minutes of each lesson in the README's table, by its number."""
    rows = re.findall(r"^\| \[?(\d\d)\]?\S* \| .*? \| ([^|]*) \|", readme, re.M)
    return {number: sum(map(int, re.findall(r"\d+", cell))) for number, cell in rows}


@cache
def sources_of_checks():
    """Return (name, source) of the checks of all exercises in the library."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "course_lib").rglob("*.py")]
    check = re.compile(r"^def (check_\w+)(.*?)(?=^[@\w]|\Z)", re.M | re.S)
    return [found for text in texts for found in check.findall(text)]


def all_numbers_of(notebook):
    """Return the numbers in a notebook, its outputs, and the checks of its exercises."""
    texts = [text for cell in notebook.cells for text in (cell.source, *output_texts(cell))]
    text = "\n".join(texts)
    checks = [source for name, source in sources_of_checks() if name in text]
    return set().union(*map(numbers_in, [text, *checks]))


def is_rounded(number, shown):
    """Return whether a number with decimals is one of the shown numbers, rounded."""
    digits = number.as_tuple().exponent
    finer = [other for other in shown if other.as_tuple().exponent < digits < 0]
    return any(other.quantize(number, ROUND_HALF_UP) == number for other in finer)


# --- checks ---


def language_problems(guide):
    """Report text in one language only, and different numbers, formulas, code or terms."""
    english, chinese = (guide_in(guide, language) for language in ("en", "zh"))
    problems = agreement_problems(english, chinese) + glossary_problems(english, chinese)
    problems += chinese_problems(chinese) + re.findall(f"[{HAN}]+", english)
    return problems + re.findall(r"(?:[a-z]{3,} ){3}[a-z]{3,}", chinese)


def lesson_problems(lesson, notebook):
    """Compare a lesson's section with its notebook; `test_pace.py` compares the minutes."""
    all_sections = sections(notebook.cells)
    rows, graded = (rows_of(part_of(lesson, part)) for part in ("Minutes", "Grading"))
    prose = "\n".join(cell.source for cell in notebook.cells)
    named = ["".join(match) for match in NAMED_SECTIONS.findall(lesson)]
    exercises = sorted(set(re.findall(r"\*\*Exercise (\d)\.\*\*", prose)))
    # full marks, half marks, and a remark about the check, in both languages
    filled = {row[0]: len(re.findall(r"\S<br>\S", " | ".join(row))) for row in graded}
    compared = {
        "empty parts": ([title for title in PARTS if not part_of(lesson, title).strip()], []),
        "sections with minutes": (
            [n for row in rows for n in SECTION_WITH_MINUTES.findall(row[0])],
            all_sections,
        ),
        "unknown sections": ([name for name in named if name not in all_sections], []),
        "graded exercises": ([row[0] for row in graded], exercises),
        "cells of the grading": (filled, dict.fromkeys(exercises, 3)),
    }
    problems = [f"{what}: {a}, not {b}" for what, (a, b) in compared.items() if a != b]
    return problems + claim_problems(lesson)


def claim_problems(lesson):
    """Report claims and verdicts that differ from the lesson's."""
    expected = {
        tuple(f"{words_in(text, 'en')}<br>{words_in(text, 'zh')}" for text in (claim, verdict))
        for claim, verdict in ((each.claim, each.verdict) for each in claims_of(lesson[:2]))
    }
    rows = rows_of(part_of(lesson, "Misconceptions"))
    return [f"claims: {row}" for row in sorted(expected ^ {(row[0], row[2]) for row in rows})]


def number_problems(lesson, notebook):
    """Report numbers that the notebook does not show."""
    minutes = part_of(lesson, "Minutes")
    prose_of_rows = "\n".join(cell for row in rows_of(minutes) for cell in row[2:])
    text = lesson.replace(minutes, f"{prose_of_rows}\n")
    # otherwise the last number of one language meets the first of the other
    text = text.replace("<br>", " ")
    # numbers of lessons, questions and exercises
    text = re.sub(r"^(#+ \d*|\d\. |\| \d \|)", "", text, flags=re.M)
    words, _, _ = take_apart(NAMED_SECTIONS.sub("", text))
    shown = all_numbers_of(notebook)
    return [f"{each}" for each in sorted(numbers_in(words) - shown) if not is_rounded(each, shown)]


def plan_problems(guide, minutes):
    """Report plans whose total differs from the minutes of their lessons."""
    plans = re.search(r"^## Plans / .*?$(.*?)^## ", guide, re.M | re.S)[1]
    return [
        f"{when}: lessons {lessons} do not take {total} minutes"
        for when, lessons, total in rows_of(plans)
        if str(sum(minutes.get(lesson, 0) for lesson in lessons.split(", "))) != total
    ]


# --- the guide ---

LESSONS = lessons_of(GUIDE)
MINUTES = readme_minutes(README)


PARTS_OF_A_PROJECT = ("Aims", "Minutes", "Grading", "Where learners get stuck")


def problems_of(lesson, path):
    if is_project(path.stem):
        empty = [part for part in PARTS_OF_A_PROJECT if not part_of(lesson, part).strip()]
        return empty + language_problems(f"## {lesson}")
    notebook = load(path)
    found = lesson_problems(lesson, notebook) + number_problems(lesson, notebook)
    return found + language_problems(f"## {lesson}")


def test_instructor_guide_has_section_for_every_notebook():
    written = [number for number, lesson in LESSONS.items() if part_of(lesson, "Aims")]
    assert written == [path.stem[:2] for path in PATHS]


@each_notebook
def test_instructor_guide_section_agrees_with_notebook_in_both_languages(path):
    assert problems_of(LESSONS[path.stem[:2]], path) == []


def test_guide_has_correct_minutes_equal_translations_and_working_links():
    assert plan_problems(GUIDE, MINUTES) == []
    assert plan_problems(GUIDE, dict.fromkeys(MINUTES, 1000)) != []
    assert language_problems(GUIDE) == []
    assert missing_links(GUIDE, FOLDER) == []
    for readme in (README, (ROOT / "README.zh.md").read_text(encoding="utf-8")):
        assert readme.count("](notebooks/INSTRUCTORS.md)") == 1


# --- inserted faults ---


@pytest.mark.parametrize(
    ("pattern", "fault"),
    [
        (r"^### Aims", "### Goals"),
        (r"(\d\.1): \d+, ", ""),
        (r"\bsection (\d)\.\d+", r"section \1.99"),
        (r"^\| 1 \| .*\n", ""),  # an exercise that is not graded
        (r"^(\| 1 \| )[^|]* \|", r"\1 |"),  # no full marks
        (r"^(\| \S.*<br>.* \| )[^|]*\d MB( \|)", r"\g<1>987 MB\2"),  # a claim's number
        (r"(\d) MB\b", r"\g<1>9876 MB"),
        (r"<br>\n  +\S.*", ""),  # Chinese is missing
    ],
)
def test_fault_in_instructor_guide_section_is_reported(pattern, fault):
    path = next(path for path in PATHS if re.search(pattern, LESSONS[path.stem[:2]], re.M))
    lesson = re.sub(pattern, fault, LESSONS[path.stem[:2]], count=1, flags=re.M)
    assert problems_of(lesson, path)
