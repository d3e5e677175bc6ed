"""The instructor's guide beside the notebooks: sections, minutes, figures, claims and exercises agree with them.

Every check takes text and returns a list of problems; the second half shows that each one rejects a small bad example.
"""

import inspect
import re
from decimal import ROUND_HALF_UP, Decimal

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
    link_problems,
    load,
    nbformat,
    numbers_in,
    output_texts,
    printed_asterisks,
    take_apart,
)

from course_lib import lessons as course_lessons
from course_lib.teaching import Claim

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
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for table in tables for row in table.splitlines()]


def pairs_of(guide):
    """(English, Chinese) of the headings, paragraphs, list items and cells.

    Chinese is "" where it is missing, and None for a cell without a <br>, such as a figure.
    """
    pairs, waiting = [], None
    for block in re.split(r"\n\s*\n", guide.strip()):
        if waiting and re.match(r"[#|-]|\d\. ", block):  # no paragraph in the other language follows
            pairs, waiting = [*pairs, (waiting, "")], None
        if block.startswith("#"):
            left, _, right = re.sub(r"^#+ (\d\d )?", "", block).partition(" / ")
            pairs.append((left, right))
        elif block.startswith("|"):
            cells = [cell for row in block.splitlines() for cell in re.split(r" \| |^\| | \|$", row) if cell]
            cells = [cell.partition("<br>") for cell in cells if not re.fullmatch(r"[-|]+", cell)]
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


def sections_of(notebook):
    """The numbers of a notebook's sections, "2.1", in order."""
    return [
        number
        for cell in notebook.cells
        if cell.cell_type == "markdown"
        for number in re.findall(r"^## (\d+\.\d+) ", cell.source, re.M)
    ]


def outputs_of(notebook):
    return [text for cell in notebook.cells for text in output_texts(cell)]


def figures_of(notebook):
    """Every number that a notebook shows, its code and the checks of its exercises included."""
    text = "\n".join([*(cell.source for cell in notebook.cells), *outputs_of(notebook)])
    modules = map(course_lessons.lesson, course_lessons.LESSONS)
    checks = [check for module in modules for name, check in vars(module).items() if name.startswith("check_")]
    checks = [check for check in checks if f"{check.__name__}(" in text]
    return set().union(*(numbers_in(source) for source in [text, *map(inspect.getsource, checks)]))


def rounds_to(figure, shown):
    """A figure with decimals may be one of those shown, rounded."""
    step = Decimal(1).scaleb(figure.as_tuple().exponent)
    return step < 1 and any(
        other.as_tuple().exponent < step.as_tuple().exponent and other.quantize(step, ROUND_HALF_UP) == figure
        for other in shown
    )


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


def lesson_problems(number, lesson, notebook, minutes):
    """A lesson's section against its notebook, whose minutes are those of the README."""
    problems = [f"has no part {title!r}" for title in PARTS if not part_of(lesson, title).strip()]
    sections = sections_of(notebook)
    rows = rows_of(part_of(lesson, "Minutes"))
    timed = [found for row in rows for found in SECTION_MINUTES.findall(row[0])]
    if [section for section, _ in timed] != sections:
        problems.append(f"minutes are given for {[section for section, _ in timed]}, the notebook has {sections}")
    for row in rows:
        added_up = sum(int(time) for _, time in SECTION_MINUTES.findall(row[0]))
        if str(added_up) != row[1]:
            problems.append(f"{row[0]} makes {added_up} minutes, not {row[1]}")
    if sum(int(time) for _, time in timed) != minutes:
        problems.append(f"{sum(int(time) for _, time in timed)} minutes, the README says {minutes}")
    if not any(f"({minutes} minutes)" in cell.source for cell in notebook.cells):
        problems.append(f"the notebook does not say ({minutes} minutes)")
    for match in NAMED_SECTIONS.finditer(lesson):
        if (match[1] or match[2]) not in sections:
            problems.append(f"{match[0]!r}: the notebook has no such section")
    there = {int(found) for cell in notebook.cells for found in re.findall(r"\*\*Exercise (\d)\.\*\*", cell.source)}
    graded = [int(row[0]) for row in rows_of(part_of(lesson, "Grading"))]
    if graded != sorted(there):
        problems.append(f"grades exercises {graded}, the notebook has {sorted(there)}")
    if not 2 <= len(re.findall(r"^\d\. ", part_of(lesson, "Discussion"), re.M)) <= 4:
        problems.append("needs two to four questions for discussion")
    return problems + claim_problems(number, lesson, notebook)


def claim_problems(number, lesson, notebook):
    """The claims are the lesson's, with its verdicts and with the figures that the notebook stores."""
    measured = re.findall(r"^measured 实测: (.+)$", "\n".join(outputs_of(notebook)), re.M)
    claims = course_lessons.claims_of(number)
    wanted = [
        ["<br>".join(each.claim), figure, "<br>".join(each.verdict)]
        for each, figure in zip(claims, measured, strict=True)
    ]
    rows = rows_of(part_of(lesson, "Misconceptions"))
    found = [[claim, figure.replace("<br>", " "), *rest] for claim, figure, *rest in rows]  # as a table joins the two
    return [f"claims: {row} instead of {want}" for row, want in zip(found, wanted, strict=False) if row != want] + (
        [f"{len(found)} claims, the lesson has {len(wanted)}"] if len(found) != len(wanted) else []
    )


def figure_problems(lesson, notebook):
    """Numbers that the notebook does not show."""
    minutes = part_of(lesson, "Minutes")
    text = lesson.replace(minutes, "\n".join(cell for row in rows_of(minutes) for cell in row[2:]) + "\n")
    text = re.sub(r"^(#+ \d*|\d\. |\| \d \|)", "", text, flags=re.M)  # numbers of lessons, questions and exercises
    words, _, _ = take_apart(NAMED_SECTIONS.sub("", text))
    shown = figures_of(notebook)
    return [str(figure) for figure in sorted(numbers_in(words) - shown) if not rounds_to(figure, shown)]


def plan_problems(guide, minutes):
    """The table of plans adds up the minutes of its lessons, and names only lessons that exist."""
    plans = re.search(r"^## Plans / .*?$(.*?)^## ", guide, re.M | re.S)[1]
    problems = []
    for when, lessons, total in rows_of(plans):
        if str(sum(minutes.get(lesson, 0) for lesson in lessons.split(", "))) != total:
            problems.append(f"{when}: lessons {lessons} do not take {total} minutes")
    return problems


# --- the guide ---


def test_every_notebook_has_its_section_in_the_guide():
    written = [number for number, lesson in lessons_of(GUIDE).items() if part_of(lesson, "Aims")]
    assert written == [path.stem[:2] for path in PATHS]


@each_notebook
def test_a_lessons_section_agrees_with_its_notebook(path):
    number = path.stem[:2]
    assert lesson_problems(number, lessons_of(GUIDE)[number], load(path), readme_minutes(README)[number]) == []


@each_notebook
def test_every_figure_of_the_guide_stands_in_the_notebook(path):
    assert figure_problems(lessons_of(GUIDE)[path.stem[:2]], load(path)) == []


def test_the_plans_add_up():
    assert plan_problems(GUIDE, readme_minutes(README)) == []


def test_the_guide_says_the_same_in_both_languages():
    assert language_problems(GUIDE) == []


def test_the_links_of_the_guide_lead_somewhere_and_the_readme_links_it():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(GUIDE)])
    assert link_problems(notebook, FOLDER) == []
    assert README.count("](notebooks/INSTRUCTORS.md)") == 2  # once in each language


# --- each check rejects a small bad example, and accepts a good one ---

LESSON = """## 02 Checkpointing / 检查点

### Aims / 目标

Afterwards they save 42 MB, see section 2.1.

学完之后能省 42 MB，见 2.1 节。

### Minutes / 时间

| sections<br>节 | minutes<br>分钟 | how<br>怎么讲 |
|---|---|---|
| 2.1: 6, 2.2: 7 | 13 | Vote.<br>表决。 |

### Misconceptions / 常见误解

| claim<br>说法 | measured<br>实测 | verdict<br>结论 |
|---|---|---|
| It trains.<br>它会训练。 | 2 / 6 | No.<br>不会。 |
| It is equal.<br>它们相等。 | 0 of 4 are<br>4 个中有 0 个 | Never.<br>从不相等。 |

### Discussion / 讨论

1. **Why?** Because.<br>
   **为什么？** 因为如此。
2. **When?** Now.<br>
   **何时？** 现在。

### Grading / 评分

| exercise<br>练习 | full marks<br>满分 |
|---|---|
| 1 | 100.7 MB.<br>100.7 MB，即峰值。 |

### Where learners get stuck / 容易卡住的地方

- Nowhere.<br>
  没有。
"""


@pytest.fixture
def notebook(monkeypatch):
    claims = [Claim(("It trains.", "它会训练。"), ("", ""), ("No.", "不会。"), "fails")]
    claims.append(Claim(("It is equal.", "它们相等。"), ("", ""), ("Never.", "从不相等。"), "fails"))
    monkeypatch.setattr(course_lessons, "claims_of", lambda number: claims if number == "02" else ())
    cells = [nbformat.v4.new_markdown_cell(f"## 2.{k} A / 甲") for k in (1, 2)]
    cells.append(nbformat.v4.new_markdown_cell("**Goals** (13 minutes). **Exercise 1.** Save 42 MB."))
    shown = "measured 实测: 2 / 6\nmeasured 实测: 0 of 4 are 4 个中有 0 个\n100.700 MB"
    table = nbformat.v4.new_output("display_data", data={"text/plain": shown})
    cells.append(nbformat.v4.new_code_cell("show()", outputs=[table]))
    return nbformat.v4.new_notebook(cells=cells)


def test_a_good_section_is_accepted(notebook):
    assert lesson_problems("02", LESSON, notebook, 13) == []
    assert figure_problems(LESSON, notebook) == []
    assert language_problems(LESSON) == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("### Aims / 目标", "### Goals / 目标", "has no part 'Aims'"),
        ("2.1: 6, 2.2: 7", "2.1: 13", "minutes are given for"),
        ("2.1: 6, 2.2: 7 | 13", "2.1: 6, 2.2: 8 | 14", "14 minutes, the README says 13"),
        ("2.2: 7 | 13", "2.2: 7 | 14", "makes 13 minutes, not 14"),
        ("section 2.1", "section 2.7", "'section 2.7': the notebook has no such section"),
        ("2.1 节", "2.7 节", "'2.7 节': the notebook has no such section"),
        ("| 1 | 100.7 MB.<br>100.7 MB，即峰值。 |\n", "", "grades exercises []"),
        ("2. **When?** Now.<br>\n   **何时？** 现在。\n", "", "two to four questions"),
        ("| 2 / 6 |", "| 3 / 6 |", "claims:"),
        ("不会。", "会。", "claims:"),
        ("4 个中有 0 个", "4 个中有 1 个", "claims:"),
        ("| It trains.<br>它会训练。 | 2 / 6 | No.<br>不会。 |\n", "", "1 claims, the lesson has 2"),
    ],
)
def test_a_section_that_disagrees_with_its_notebook_is_found(notebook, old, new, problem):
    assert old in LESSON
    assert problem in "\n".join(lesson_problems("02", LESSON.replace(old, new), notebook, 13))


def test_other_minutes_in_the_notebook_are_found(notebook):
    notebook.cells[2].source = "**Goals** (90 minutes). **Exercise 1.**"
    assert lesson_problems("02", LESSON, notebook, 13) == ["the notebook does not say (13 minutes)"]


@pytest.mark.parametrize(("old", "new"), [("42 MB,", "43 MB,"), ("100.7 MB.", "100.8 MB."), ("Vote.", "Vote 9 times.")])
def test_a_figure_that_the_notebook_does_not_show_is_found(notebook, old, new):
    assert old in LESSON
    assert figure_problems(LESSON.replace(old, new), notebook)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("能省 42 MB", "能省 43 MB", "numbers:"),
        ("省 42 MB", "省42 MB", "no space between"),
        ("Nowhere.", "At the peak.", "'peak' is in the English text"),
        ("Vote.<br>表决。", "Vote.<br>Vote.", "no Chinese in it"),
        ("Nowhere.<br>\n  没有。", "没有。", "one language only"),
        ("\n学完之后能省 42 MB，见 2.1 节。\n", "", "one language only"),
        ("**为什么？** 因为如此", "**为什么：**因为如此", "**"),
    ],
)
def test_languages_that_disagree_are_found(old, new, problem):
    assert old in LESSON
    assert problem in "\n".join(map(str, language_problems(LESSON.replace(old, new))))


def test_plans_that_do_not_add_up_are_found():
    guide = "## Plans / 安排\n\n| when | lessons | minutes |\n|---|---|---|\n| a day | 00, 01 | {} |\n\n## Next / 下\n"
    assert plan_problems(guide.format(110), {"00": 20, "01": 90}) == []
    assert plan_problems(guide.format(100), {"00": 20, "01": 90})


def test_the_minutes_of_the_readme_are_read():
    table = "| [00](a.ipynb) | why<br>为何 | 20 | run |\n| 07 | what | in preparation | fit |\n"
    assert readme_minutes(table) == {"00": 20, "07": 0}
