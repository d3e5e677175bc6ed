"""Grading: what a handed-in notebook is told, whatever it holds.

Twenty submissions, with crashes, loops and cheats that take minutes, are in
`twenty_submissions.py`, which is run by hand.
"""

import csv
import importlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import HANGS_SECONDS

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")

from publish import fingerprint, grade, verdicts
from publish.cells import SOLUTION
from publish.kernels import Limits, Run
from publish.student import reason_id

ROOT = Path(__file__).parents[1]
LIMITS = Limits(HANGS_SECONDS)
CALL = "lesson_01.check_training_state(mine)"
IMPORT = "from course_lib.lessons import lesson_01"


@pytest.fixture(scope="module")
def lessons():
    return grade.lessons_of(ROOT / "notebooks")


def submission(*sources, title="# 1 Where do the bytes go? / 字节去了哪里？"):
    """Code cells under a lesson's title; a cell that is given stays as it is."""
    make = nbformat.v4
    cells = [make.new_code_cell(each) if isinstance(each, str) else each for each in sources]
    return make.new_notebook(cells=[make.new_markdown_cell(title), *cells])


def table_of(rows):
    return {row.exercise: (row.verdict, row.message) for row in rows}


# --- one run in a kernel ---

RIGHT = """mine = dict(weights=6875648, parameter=27502592, gradient=27502592, optimizer=55005184)
lesson_01.check_training_state(mine)"""


def test_a_kernel_gives_the_verdicts_and_the_sentence_and_nothing_of_it_stays(
    tmp_path, lessons, monkeypatch
):
    """A right answer, one that crashes its cell, one whose check is edited, one that is missing;
    what this process did to the library is held against nobody."""
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
    path = tmp_path / "Ada\nL.ipynb"
    path.write_text(nbformat.writes(notebook), "utf-8")
    rows = grade.grade(path, lessons, LIMITS)
    told = table_of(rows)
    assert {(row.name, row.lesson) for row in rows} == {("Ada\\nL", "01")}
    assert told["training_state"][0] == "✓" and "two for Adam" in told["training_state"][1]
    assert told["adapter_bytes"] == ("✗", "NameError: name 'no_such_name' is not defined")
    verdict, message = told["largest_batch"]
    assert verdict == "✗" and "Error" not in message and "Hint" not in message
    assert told["whole_peak"] == ("!", "The line that calls its check was edited.")
    assert told["meter"] == ("!", "Its check cell is missing.")
    assert told["new_storages"] == ("○", "Not answered yet")
    assert told["layer_formula"][0] == "○", "the course's solution is not the learner's answer"
    assert {row.exercise: row.sentence for row in rows}["training_state"].endswith(
        "Adam keeps two."
    )
    assert "–" not in told and list(tmp_path.iterdir()) == [path]


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


def test_a_submission_of_lesson_00_which_crashes_does_not_stop_the_next(tmp_path, capsys):
    """It has no exercises: the table says whether it ran to its end."""
    title = "# 0 Start here / 从这里开始"
    dies = submission("import os\nos._exit(1)", title=title)
    runs = submission("1 + 1", "raise ValueError", title=title)
    for name, notebook in (("a", dies), ("b", runs)):
        (tmp_path / f"{name}.ipynb").write_text(nbformat.writes(notebook), "utf-8")
    table = tmp_path / "out/table.csv"
    limits = ["--seconds", str(HANGS_SECONDS)]
    folders = ["--output", str(table), "--notebooks", str(ROOT / "notebooks")]
    grade.main([str(tmp_path), *folders, *limits])
    with table.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["name"], row["lesson"], row["verdict"]) for row in rows] == [
        ("a", "00", "!"),
        ("b", "00", "✓"),
    ]
    assert "kernel died" in rows[0]["message"] and "to its end" in rows[1]["message"]
    said = capsys.readouterr().out
    assert "1 ✓, 0 ✗, 0 ○, 1 !" in said and said.rstrip().endswith(grade.KEPT_OUT)


WAITS = """from pathlib import Path
from time import sleep

Path({mine!r}).touch()
while not Path({other!r}).exists():
    sleep(0.1)"""


def test_notebooks_run_side_by_side_and_keep_their_order(tmp_path):
    """Each of the two waits for the other, so one after the other they would never end."""
    folder = tmp_path / "in"
    folder.mkdir()
    for mine, other in (("a", "b"), ("b", "a")):
        waits = WAITS.format(mine=str(tmp_path / mine), other=str(tmp_path / other))
        notebook = submission(waits, title="# 0 Start here / 从这里开始")
        (folder / f"{mine}.ipynb").write_text(nbformat.writes(notebook), "utf-8")
    said = []
    rows = grade.grade_folder(folder, ROOT / "notebooks", LIMITS, say=said.append, jobs=2)
    assert [(row.name, row.verdict) for row in rows] == [("a", "✓"), ("b", "✓")]
    assert [line[:4] for line in said] == ["a: ✓", "b: ✓"]


# --- what is no lesson ---


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "It is not a notebook: Notebook does not appear to be JSON"),
        ("[]", "It is not a notebook: it starts '[]'."),
        (b"\xff\xfe", "It is not a notebook: "),
        ('{"cells": [], "nbformat": 4}', "It is not a notebook: "),
        (
            '{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": "5"}',
            "It is not a notebook: AssertionError.",
        ),
        (
            submission("1", title="# Shopping"),
            "It is not a lesson of this course; its title is '# Sho",
        ),
        (submission("1", title="# 77 Where / 哪里"), "It is not a lesson of this course"),
        (nbformat.v4.new_notebook(), "It is not a lesson of this course; its title is ''."),
        (submission("1", title="# 2 What if / 会怎样"), "It is lesson 02, not 01."),
    ],
)
def test_a_file_that_cannot_be_graded_is_one_sentence_in_the_table(
    tmp_path, lessons, content, said
):
    path = tmp_path / "a.ipynb"
    content = content if isinstance(content, str | bytes) else nbformat.writes(content)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (row,) = grade.grade(path, lessons, LIMITS, wanted="01")
    assert (row.exercise, row.verdict) == ("–", "!") and row.message.startswith(said)
    assert row.message.endswith(".") and "\n" not in row.message


def test_what_is_no_file_and_what_breaks_grading_cost_the_others_nothing(tmp_path, monkeypatch):
    """A folder, a link that leads nowhere, a pipe, which is never opened, and a notebook that the
    grader itself stumbles over; the last one is graded all the same."""
    (tmp_path / "a.ipynb").mkdir()
    (tmp_path / "b.ipynb").symlink_to("nowhere")
    os.mkfifo(tmp_path / "c.ipynb")
    (tmp_path / "d.ipynb").write_text(nbformat.writes(submission("1")), "utf-8")
    (tmp_path / "e.txt").write_text("{", "utf-8")
    (tmp_path / ".hidden").mkdir()

    def stumbles(*_):
        raise RuntimeError("a slip\nof mine")

    monkeypatch.setattr(grade, "find_tampering", stumbles)
    rows = grade.grade_folder(tmp_path, ROOT / "notebooks", LIMITS, say=lambda line: None)
    assert [(row.name, row.verdict, row.message) for row in rows[:4]] == [
        ("a", "!", "It is not a notebook: it is a folder."),
        ("b", "!", "It is not a notebook: it is not a file."),
        ("c", "!", "It is not a notebook: it is not a file."),
        ("d", "!", "It could not be graded: RuntimeError: a slip of mine."),
    ]
    assert rows[4].name == "e.txt" and rows[4].message.startswith("It is not a notebook: ")


def test_the_notebooks_in_a_folder_per_learner_are_graded_under_the_name_of_the_folder(tmp_path):
    for name in ("ann", "bo"):
        (tmp_path / name / ".ipynb_checkpoints").mkdir(parents=True)
        (tmp_path / name / "01.ipynb").write_text("{}", "utf-8")
    (tmp_path / "bo/02.ipynb").write_text("{}", "utf-8")
    (tmp_path / "bo/notes.txt").write_text("", "utf-8")
    told = []
    rows = grade.grade_folder(tmp_path, ROOT / "notebooks", LIMITS, say=told.append)
    assert [row.name for row in rows] == ["ann/01", "bo/01", "bo/02"]
    assert [line.partition(":")[0] for line in told] == [row.name for row in rows]


@pytest.mark.usefixtures("fresh")
def test_a_folder_without_files_a_lesson_and_a_language_that_are_none_are_one_sentence(
    tmp_path, monkeypatch
):
    here = ["--notebooks", str(ROOT / "notebooks")]
    for arguments, said in (
        ([str(tmp_path), *here], "there is nothing in"),
        ([str(ROOT / "notebooks"), "--lesson", "zz", *here], "there is no lesson 'zz'"),
        ([str(tmp_path), "--seconds", "0", *here], "limits must be positive"),
        ([str(ROOT / "notebooks"), "--jobs", "0", *here], "--jobs must be at least 1, got 0"),
    ):
        with pytest.raises(SystemExit) as stopped:
            grade.main([*arguments, "--output", str(tmp_path / "t.csv")])
        assert str(stopped.value.code).startswith("grade: ") and said in str(stopped.value.code)
    monkeypatch.setenv("COURSE_LANG", "xx")  # in which each right answer would be wrong
    with pytest.raises(SystemExit, match=r"^grade: COURSE_LANG must be .*, got 'xx'"):
        grade.main([str(ROOT / "notebooks"), *here, "--output", str(tmp_path / "t.csv")])
    assert list(tmp_path.iterdir()) == []


# --- edited checks ---


@pytest.mark.parametrize(
    ("source", "noticed"),
    [
        ("lesson_01.check_training_state = lambda answer: True", "changes lesson_01"),
        ("lesson_01 = None", "changes lesson_01"),
        ("def lesson_01(): pass", "changes lesson_01"),
        ("setattr(lesson_01, 'check_meter', print)", "changes lesson_01"),
        ("lesson_01.checks.__dict__['x'] = 1", "changes lesson_01"),
        ("for lesson_01 in range(3): pass", "changes lesson_01"),
        ("import mine as lesson_01", "changes lesson_01"),
        ("from course_lib.teaching import exercises", "imports course_lib.teaching.exercises"),
        ("import course_lib.teaching.exercises as e", "imports course_lib.teaching.exercises"),
        (
            "import course_lib.lessons.lesson_01.checks",
            "imports course_lib.lessons.lesson_01.checks",
        ),
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


def test_no_cell_of_a_stored_lesson_or_of_its_solutions_is_taken_for_tampering(lessons):
    from publish.cells import read_lessons

    for name, notebook in read_lessons(ROOT / "notebooks").items():
        assert list(grade.find_tampering(notebook, lessons[name[:2]])) == []
        places = grade.cells_of(notebook, lessons[name[:2]])
        assert places.keys() == lessons[name[:2]].calls.keys()


def test_a_check_that_is_called_in_another_way_is_edited(lessons):
    lesson = lessons["01"]
    for last, there in ((CALL, True), (f"{CALL}  # mine", True), (f"{CALL[:-1]} , )", True)):
        assert bool(grade.cells_of(submission(f"mine = 1\n{last}"), lesson)) is there
    for above in ("x = '\ud800'", "x = 1" + " + 1" * 700, "half a line of ("):
        assert grade.cells_of(submission(above, f"mine = 1\n{CALL}"), lesson).keys() == {
            "check_training_state"
        }
    for last in (f"{CALL} or 1", "lesson_01.check_training_state(other)", f"x = {CALL}"):
        assert grade.cells_of(submission(f"mine = 1\n{last}"), lesson) == {}


def test_a_changed_function_changes_the_fingerprint_of_its_module_and_another_process_does_not(
    monkeypatch,
):
    from course_lib.lessons import lesson_01
    from course_lib.teaching import exercises

    program = (
        "import json\nfrom course_lib.lessons import lesson_01\n"
        "from publish.fingerprint import fingerprints\n"
        "print(json.dumps(fingerprints()))"
    )
    import json

    def of_a_new_process():
        """Other tests exchange parts of some modules in this process for good."""
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
        )
        return json.loads(done.stdout)

    other = of_a_new_process()
    assert len(other) > 30 and of_a_new_process() == other
    monkeypatch.setattr(exercises.Exercise, "__call__", lambda self, answer: exercises.right("Yes"))
    assert (
        fingerprint.fingerprints()["course_lib.teaching.exercises"]
        != other["course_lib.teaching.exercises"]
    )
    check = lesson_01.check_training_state
    monkeypatch.setattr(check.__wrapped__, "__code__", (lambda answer: True).__code__)
    home = check.__wrapped__.__module__
    assert fingerprint.fingerprints()[home] != other[home]


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
    with table.open(encoding="utf-8-sig", newline="") as file:
        _, row = csv.reader(file)
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
    assert [(each.exercise, *each.counts.values(), each.made_by) for each in found] == [
        ("meter", 1, 3, 1, 0, 2),
        ("whole_peak", 0, 0, 0, 1, 0),
    ]
    assert "2 × Not yet. Views are counted twice" in str(found[0]) and "×" not in str(found[1])
    table = tmp_path / "t.csv"
    verdicts.write_by_exercise(found, table)
    with table.open(encoding="utf-8-sig", newline="") as file:
        head, first, _ = csv.reader(file)
    assert head[2:6] == ["✓", "✗", "○", "!"]
    assert first == ["01", "meter", "1", "3", "1", "0", "Not yet. Views are counted twice", "2"]


def test_an_exercise_as_the_course_gives_it_is_not_answered(lessons):
    """Some stubs run and give a wrong number: their cells are compared with the lesson's."""
    for lesson in lessons.values():
        assert lesson.stubs.keys() == lesson.calls.keys()
    assert "None" in lessons["01"].stubs["check_training_state"]
