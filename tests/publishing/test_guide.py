"""Test that the instructor's guide agrees with the notebooks, for example in minutes and claims."""

import re
from decimal import ROUND_HALF_UP
from functools import cache

from test_notebooks import (
    FOLDER,
    HAN,
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
PARTS_OF_A_PROJECT = ("Aims", "Minutes", "Grading", "Where learners get stuck")
PARTS = ("Aims", "Minutes", "Misconceptions", "Discussion", "Grading", "Where learners get stuck")
SECTION_WITH_MINUTES = re.compile(r"(\d+\.\d+): \d+")
NAMED_SECTIONS = re.compile(r"\bsections? (\d+\.\d+)|(\d+\.\d+) 节")


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


def assert_language_halves_agree(guide):
    """Assert that both languages have equal numbers, formulas, code and terms, and do not mix."""
    english, chinese = (guide_in(guide, language) for language in ("en", "zh"))
    assert agreement_problems(english, chinese) + glossary_problems(english, chinese) == []
    assert chinese_problems(chinese) + re.findall(f"[{HAN}]+", english) == []
    assert re.findall(r"(?:[a-z]{3,} ){3}[a-z]{3,}", chinese) == []


def assert_lesson_agrees(lesson, notebook):
    """Compare a lesson's section with its notebook; `test_pace.py` compares the minutes."""
    all_sections = sections(notebook.cells)
    rows, graded = (rows_of(part_of(lesson, part)) for part in ("Minutes", "Grading"))
    assert [n for row in rows for n in SECTION_WITH_MINUTES.findall(row[0])] == all_sections
    named = {"".join(match) for match in NAMED_SECTIONS.findall(lesson)}
    assert named <= {*all_sections}
    prose = "\n".join(cell.source for cell in notebook.cells)
    exercises = sorted(set(re.findall(r"\*\*Exercise (\d)\.\*\*", prose)))
    assert [row[0] for row in graded] == exercises
    # full marks, half marks, and a remark about the check, in both languages
    filled = {row[0]: len(re.findall(r"\S<br>\S", " | ".join(row))) for row in graded}
    assert filled == dict.fromkeys(exercises, 3)
    # claims and verdicts
    assert {(row[0], row[2]) for row in rows_of(part_of(lesson, "Misconceptions"))} == {
        tuple(f"{words_in(text, 'en')}<br>{words_in(text, 'zh')}" for text in (claim, verdict))
        for claim, verdict in ((each.claim, each.verdict) for each in claims_of(lesson[:2]))
    }


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


LESSONS = lessons_of(GUIDE)


@each_notebook
def test_instructor_guide_agrees_with_notebook_sections_numbers_and_claims(path):
    lesson, notebook = LESSONS[path.stem[:2]], load(path)
    parts = PARTS_OF_A_PROJECT if is_project(path.stem) else PARTS
    assert [part for part in parts if not part_of(lesson, part).strip()] == []
    assert_language_halves_agree(f"## {lesson}")
    if not is_project(path.stem):
        assert_lesson_agrees(lesson, notebook)
        assert number_problems(lesson, notebook) == []


def test_guide_has_correct_minutes_equal_translations_and_working_links():
    rows = re.findall(r"^\| \[?(\d\d)\]?\S* \| .*? \| ([^|]*) \|", README, re.M)
    minutes = {number: sum(map(int, re.findall(r"\d+", cell))) for number, cell in rows}
    plans = re.search(r"^## Plans / .*?$(.*?)^## ", GUIDE, re.M | re.S)[1]
    for when, lessons, total in rows_of(plans):
        assert str(sum(minutes.get(each, 0) for each in lessons.split(", "))) == total, when
    assert_language_halves_agree(GUIDE)
    assert missing_links(GUIDE, FOLDER) == []
    for readme in (README, (ROOT / "README.zh.md").read_text(encoding="utf-8")):
        assert readme.count("](notebooks/INSTRUCTORS.md)") == 1
