"""Grading: the verdicts on handed-in notebooks, whatever they contain.

`twenty_submissions.py`, which is run by hand, has crashes, loops and cheats that take minutes.
"""

import csv
import importlib
import io
import os

import pytest
from editions import NOTEBOOKS, stored_lessons
from patience import HANGS_SECONDS

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")

from publish import fingerprint, grade, verdicts
from publish.cells import SOLUTION
from publish.kernels import Limits, Run
from publish.student import reason_id

LIMITS = Limits(HANGS_SECONDS)
CALL = "lesson_01.check_training_state(mine)"
IMPORT = "from course_lib.lessons import lesson_01"


@pytest.fixture(scope="module")
def lessons():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grade, "read_lessons", lambda folder: stored_lessons())
        return grade.lessons_of(NOTEBOOKS)


@pytest.fixture
def read_once(lessons, monkeypatch):
    monkeypatch.setattr(grade, "lessons_of", lambda notebooks: lessons)


def submission(*sources, title="# 1 Where do the bytes go? / 字节去了哪里？"):
    """Code cells under a lesson's title; a cell that is given stays as it is."""
    make = nbformat.v4
    cells = [make.new_code_cell(each) if isinstance(each, str) else each for each in sources]
    return make.new_notebook(cells=[make.new_markdown_cell(title), *cells])


def hand_in(path, notebook):
    path.parent.mkdir(exist_ok=True)
    path.write_text(notebook if isinstance(notebook, str) else nbformat.writes(notebook), "utf-8")
    return path


def read_csv(path):
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.reader(file))


# --- one run in a kernel ---

RIGHT = """mine = dict(weights=6875648, parameter=27502592, gradient=27502592, optimizer=55005184)
lesson_01.check_training_state(mine)"""


def test_a_kernel_gives_the_verdicts_and_the_sentence_and_nothing_of_it_stays(
    tmp_path, lessons, monkeypatch
):
    """A right answer, one that crashes its cell, one whose check is edited, one that is missing;
    changes of the library in this process do not affect the grades."""
    lesson = importlib.import_module("course_lib.lessons.lesson_01")
    monkeypatch.setattr(lesson, "check_adapter_bytes", lambda: None)
    reason = nbformat.v4.new_markdown_cell(
        "**Why?**\n\nAdam keeps\ntwo.", id=reason_id("check_training_state")
    )
    notebook = submission(
        IMPORT,
        RIGHT,
        reason,
        "open('left', 'w').close()\nanswer = no_such_name\nlesson_01.check_adapter_bytes(answer)",
        "import os\nassert os.listdir() == ['left'] and os.environ['OMP_NUM_THREADS'] == '1'\n"
        "answer = 'many'\nlesson_01.check_largest_batch(answer)",
        "print('✓ Right') or lesson_01.check_whole_peak(1)",
        "TinyMeter = None\nlesson_01.check_new_storages(TinyMeter)",
        "saved_by_one_layer = None\nlesson_01.check_layer_formula(saved_by_one_layer)",
        f"{SOLUTION}\nsaved_by_one_layer = 5\nlesson_01.check_layer_formula(saved_by_one_layer)",
    )
    path = hand_in(tmp_path / "Ada\nL.ipynb", notebook)
    rows = {row.exercise: row for row in grade.grade(path, lessons, LIMITS)}
    assert {(row.name, row.lesson) for row in rows.values()} == {("Ada\\nL", "01")}
    for exercise, verdict, said in (
        ("training_state", "✓", "two for Adam"),
        ("adapter_bytes", "✗", "NameError: name 'no_such_name' is not defined"),
        ("largest_batch", "✗", ""),
        ("whole_peak", "!", "was edited"),
        ("meter", "!", "is missing"),
        ("new_storages", "○", "Not answered yet"),
        ("layer_formula", "○", ""),  # the course's solution is not the learner's answer
    ):
        assert rows[exercise].verdict == verdict and said in rows[exercise].message, exercise
    assert "Error" not in rows["largest_batch"].message
    assert "Hint" not in rows["largest_batch"].message
    assert rows["training_state"].sentence.endswith("Adam keeps two.")
    assert "–" not in rows and list(tmp_path.iterdir()) == [path]


LATE_OUTPUT = """
import sys, threading, time

thread = get_ipython().kernel.iopub_thread
send = thread._really_send
sent_before, sending = threading.Event(), threading.Event()
thread.schedule(sent_before.set)
sent_before.wait()  # the next message is the output

def send_late(*arguments, **options):
    thread._really_send = send
    sending.set()
    time.sleep(5)
    send(*arguments, **options)

thread._really_send = send_late
print("late")
sys.stdout.flush_timeout = sys.stderr.flush_timeout = 0.1  # the reply does not wait for the output
sys.stdout.flush()
assert sending.wait()
"""


def test_output_that_arrives_after_the_cell_has_run_is_kept(tmp_path):
    """The kernel sends it five seconds late; nbclient by itself waits for four."""
    cells = [nbformat.v4.new_code_cell(LATE_OUTPUT)]
    notebook = Run(nbformat.v4.new_notebook(cells=cells), LIMITS, tmp_path).execute()
    assert [output["text"] for output in notebook.cells[0].outputs] == ["late\n"]


WAITS = """from pathlib import Path
from time import sleep

Path({mine!r}).touch()
while not Path({other!r}).exists():
    sleep(0.1)"""


def test_notebooks_run_side_by_side_and_one_that_crashes_does_not_stop_the_other(
    tmp_path, read_once, capsys
):
    """Each of the two waits for the other. Lesson 00 has no exercises: did it run to its end?"""
    for mine, other, end in (("a", "b", "import os\nos._exit(1)"), ("b", "a", "1 / 0")):
        waits = WAITS.format(mine=str(tmp_path / mine), other=str(tmp_path / other))
        notebook = submission(waits, end, title="# 0 Start here / 从这里开始")
        hand_in(tmp_path / f"in/{mine}.ipynb", notebook)
    table = tmp_path / "out/table.csv"
    options = ["--output", str(table), "--notebooks", str(NOTEBOOKS), "--jobs", "2"]
    grade.main([str(tmp_path / "in"), *options, "--seconds", str(HANGS_SECONDS)])
    _, first, second = read_csv(table)
    assert first[:4] == ["a", "00", "–", "!"] and "kernel died" in first[4]
    assert second[:4] == ["b", "00", "–", "✓"] and "to its end" in second[4]
    said = capsys.readouterr().out
    assert said.index("a: !") < said.index("b: ✓") < said.index("1 ✓, 0 ✗, 0 ○, 1 !")
    assert said.rstrip().endswith(grade.KEPT_OUT)


# --- what is no lesson ---


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "It is not a notebook: "),
        ("[]", "It is not a notebook: it starts '[]'."),
        ('{"cells": [], "nbformat": 4}', "It is not a notebook: "),
        (
            '{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": "5"}',
            "It is not a notebook: AssertionError.",
        ),
        (
            submission("1", title="# Shop"),
            "It is not a lesson of this course; its title is '# Shop",
        ),
        (submission("1", title="# 77 Where / 哪里"), "It is not a lesson of this course"),
        (nbformat.v4.new_notebook(), "It is not a lesson of this course; its title is ''."),
        (submission("1", title="# 2 What if / 会怎样"), "It is lesson 02, not 01."),
    ],
)
def test_a_file_that_cannot_be_graded_is_one_sentence_in_the_table(
    tmp_path, lessons, content, said
):
    (row,) = grade.grade(hand_in(tmp_path / "a.ipynb", content), lessons, LIMITS, wanted="01")
    assert (row.exercise, row.verdict) == ("–", "!") and row.message.startswith(said)
    assert row.message.endswith(".") and "\n" not in row.message


def test_what_is_no_file_and_what_breaks_grading_cost_the_others_nothing(
    tmp_path, read_once, monkeypatch
):
    """A folder, a link that leads nowhere, a pipe, which is never opened, a notebook that the
    grader itself stumbles over, and a learner's folder; the last one is graded all the same."""
    (tmp_path / "a.ipynb").mkdir()
    (tmp_path / "b.ipynb").symlink_to("nowhere")
    os.mkfifo(tmp_path / "c.ipynb")
    hand_in(tmp_path / "d.ipynb", submission("1"))
    for name in ("e.txt", "f/01.ipynb", "f/notes.txt", "f/.old/01.ipynb", ".g/01.ipynb"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("[]", "utf-8")

    def stumbles(*_):
        raise RuntimeError("a slip\nof mine")

    monkeypatch.setattr(grade, "find_tampering", stumbles)
    told = []
    rows = grade.grade_folder(tmp_path, NOTEBOOKS, LIMITS, say=told.append)
    assert [(row.name, row.message) for row in rows] == [
        ("a", "It is not a notebook: it is a folder."),
        ("b", "It is not a notebook: it is not a file."),
        ("c", "It is not a notebook: it is not a file."),
        ("d", "It could not be graded: RuntimeError: a slip of mine."),
        ("e.txt", "It is not a notebook: it starts '[]'."),
        ("f/01", "It is not a notebook: it starts '[]'."),
    ]
    assert [line.partition("  (")[0] for line in told] == [f"{row.name}: !" for row in rows]


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("options", "language", "said"),
    [
        ([], "en", "there is nothing in"),
        (["--lesson", "zz"], "en", "there is no lesson 'zz'"),
        (["--seconds", "0"], "en", "limits must be positive"),
        (["--jobs", "0"], "en", "--jobs must be at least 1, got 0"),
        ([], "xx", "COURSE_LANG must be"),  # each right answer would be wrong
    ],
)
def test_what_cannot_be_graded_at_all_is_one_sentence(
    tmp_path, read_once, monkeypatch, options, language, said
):
    monkeypatch.setenv("COURSE_LANG", language)
    options = [*options, "--notebooks", str(NOTEBOOKS), "--output", str(tmp_path / "t.csv")]
    with pytest.raises(SystemExit, match=rf"^grade: .*{said}"):
        grade.main([str(tmp_path), *options])
    assert list(tmp_path.iterdir()) == []


# --- edited checks ---


@pytest.mark.parametrize(
    ("source", "noticed"),
    [
        ("lesson_01.check_training_state = lambda answer: True", "changes lesson_01"),
        ("lesson_01 = None", "changes lesson_01"),
        ("setattr(lesson_01, 'check_meter', print)", "changes lesson_01"),
        ("lesson_01.checks.__dict__['x'] = 1", "changes lesson_01"),
        ("for lesson_01 in range(3): pass", "changes lesson_01"),
        ("import mine as lesson_01", "changes lesson_01"),
        ("from course_lib.teaching import exercises", "imports course_lib.teaching.exercises"),
        ("import course_lib.lessons.lesson_01.checks", "imports course_lib.lessons.lesson_01"),
        ("mine = 1\ntable = 2\nfrom course_lib.memory import measure", None),
        ("x = lesson_01.check_meter", None),
        ("half a line of (", None),
    ],
)
def test_what_a_cell_does_to_checks_is_noticed_and_what_an_answer_needs_is_not(
    lessons, source, noticed
):
    found = list(grade.find_tampering(submission(IMPORT, source), lessons["01"]))
    assert len(found) == (noticed is not None)
    assert noticed is None or (found[0].startswith("Cell 3 ") and noticed in found[0])


def test_no_cell_of_a_stored_lesson_is_taken_for_tampering_and_each_check_has_its_stub(lessons):
    """Some stubs run and give a wrong number: their cells are compared with the lesson's."""
    for name, notebook in stored_lessons().items():
        lesson = lessons[name[:2]]
        assert list(grade.find_tampering(notebook, lesson)) == []
        calls = lesson.calls.keys()
        assert grade.cells_of(notebook, lesson).keys() == lesson.stubs.keys() == calls
    assert "None" in lessons["01"].stubs["check_training_state"]


@pytest.mark.parametrize(
    ("above", "last", "there"),
    [
        *((above, CALL, True) for above in ("x = '\ud800'", "x = 1" + " + 1" * 700, "half a (")),
        *(("", last, True) for last in (f"{CALL}  # mine", f"{CALL[:-1]} , )")),
        *(("", last, False) for last in (f"{CALL} or 1", f"x = {CALL}", CALL.replace("mine", "x"))),
    ],
)
def test_a_check_that_is_called_in_another_way_is_edited(lessons, above, last, there):
    places = grade.cells_of(submission(above, f"mine = 1\n{last}"), lessons["01"])
    assert places.keys() == ({"check_training_state"} if there else set())


def test_a_changed_function_changes_the_fingerprint_of_its_module_alone(monkeypatch):
    """A right answer is graded only if fingerprints of two processes agree; see the test above."""
    check = importlib.import_module("course_lib.lessons.lesson_01").check_training_state
    before = fingerprint.fingerprints()
    monkeypatch.setattr(type(check), "__call__", lambda self, answer: True)
    monkeypatch.setattr(check.__wrapped__, "__code__", (lambda answer: True).__code__)
    after = fingerprint.fingerprints()
    changed = {name for name in after if after[name] != before[name]}
    # the lesson's own module imports the check
    homes = {type(check).__module__, check.__wrapped__.__module__, "course_lib.lessons.lesson_01"}
    assert changed == homes


def test_a_loop_that_prints_without_end_waits_before_it_has_filled_the_memory(monkeypatch):
    waits = []
    monkeypatch.setattr(fingerprint.time, "sleep", waits.append)
    stream = io.StringIO()
    fingerprint.hold_back(stream, most=10)
    for _ in range(4):
        stream.write("1234")
    assert stream.getvalue() == "1234" * 4 and len(waits) == 2  # after 12 and 16


# --- the table ---


def test_no_cell_of_the_table_is_a_formula_and_an_error_leaves_the_old_one(tmp_path):
    table = tmp_path / "t.csv"
    sentence = '=HYPERLINK("x"), "quoted"'
    verdicts.write_table([verdicts.Row("+a", "01", "meter", "✓", "ok", sentence)], table)
    _, row = read_csv(table)
    assert row == ["'+a", "01", "meter", "✓", "ok", f"'{sentence}"]
    before = table.read_bytes()
    with pytest.raises(AttributeError):
        verdicts.write_table([None], table)
    assert table.read_bytes() == before and list(tmp_path.iterdir()) == [table]


def test_the_class_table_counts_verdicts_and_names_the_most_frequent_mistake(tmp_path):
    answers = [
        ("a", "01", "meter", "✓", "Right"),
        ("b", "01", "meter", "✗", "Not yet. Views are counted twice"),
        ("c", "01", "meter", "✗", "Not yet. Views are counted twice"),
        ("d", "01", "meter", "✗", "NameError"),
        ("e", "01", "meter", "○", "Not answered yet"),
        ("a", "01", "whole_peak", "!", "It was not reached."),
        ("f", "–", "–", "!", "It is not a notebook."),
    ]
    found = verdicts.by_exercise([verdicts.Row(*each) for each in answers])
    assert "2 × Not yet. Views are counted twice" in str(found[0]) and "×" not in str(found[1])
    table = tmp_path / "t.csv"
    verdicts.write_by_exercise(found, table)
    assert [row[1:] for row in read_csv(table)] == [
        ["exercise", "✓", "✗", "○", "!", "most frequent mistake", "made by"],
        ["meter", "1", "3", "1", "0", "Not yet. Views are counted twice", "2"],
        ["whole_peak", "0", "0", "0", "1", "", "0"],
    ]
