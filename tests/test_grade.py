"""Grading: the verdicts on handed-in notebooks, whatever they contain.

`twenty_submissions.py`, which is run by hand, has crashes, loops and cheats that take minutes.
"""

import csv
import dataclasses
import errno
import fractions
import functools
import importlib
import io
import os
import re
import sys
import typing
from copy import deepcopy
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from answers import ANSWERS, CHECKS, FILES
from editions import NOTEBOOKS, stored_lessons
from patience import HANGS_SECONDS
from torch.nn.modules.module import _global_forward_hooks, register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
psutil = pytest.importorskip("psutil")
pytest.importorskip("jupytext")

from mutants import solutions
from nbclient.exceptions import DeadKernelError

from course_lib.teaching import exercises
from publish import (
    fingerprint,
    grade,
    notebooks,
    progress,
    reading,
    submissions,
    verdicts,
    watching,
)
from publish.cells import SOLUTION, EditionError, id_of
from publish.kernels import Limits, OutOfTime, Run
from publish.student import check_of, reason_id

LIMITS = Limits(HANGS_SECONDS)
CALL = "exercises.check_training_state(mine)"
IMPORT = "from course_lib.lessons.lesson_01 import exercises"


@pytest.fixture(scope="module")
def lessons(tmp_path_factory):
    """Lesson 00 without exercises, and five exercises of lesson 01."""
    folder = tmp_path_factory.mktemp("course")
    write_course(folder)
    return grade.lessons_of(folder)


@pytest.fixture(scope="module")
def untouched(lessons):
    return grade.fingerprints_of(lessons["01"])


@pytest.fixture
def read_once(lessons, monkeypatch):
    monkeypatch.setattr(grade, "lessons_of", lambda notebooks: lessons)


STUBS = {
    "training_state": (
        'mine = {"weights": None, "parameter": None, "gradient": None, "optimizer": None}\n'
        "exercises.check_training_state(mine)"
    ),
    "adapter_bytes": "answer = None\nexercises.check_adapter_bytes(answer)",
    "whole_peak": "my_parts = None\nexercises.check_whole_peak(my_parts)",
    "new_storages": "TinyMeter = None\nexercises.check_new_storages(TinyMeter)",
    "largest_batch": "answer = None\nexercises.check_largest_batch(answer)",
}


def write_course(folder):
    guess, course = "my_guess = None", "shown = [my_guess]"
    first, *others = STUBS.values()
    for name, cells in {
        "00_a": submission("1", HIDDEN_OS, title="# 0 Start here / 从这里开始"),
        "01_b": submission(IMPORT, first, guess, course, *others),
    }.items():
        for number, cell in enumerate(cells.cells):
            cell.id = f"cell-{number}"
            if cell.source == "my_guess = None":
                cell.metadata.tags = ["guess"]
        hand_in(folder / f"{name}.ipynb", cells)


def rows_of(path, lessons, untouched, limits=LIMITS):
    """Exercise -> its row, and the messages of the rows of the whole notebook."""
    submitted = dataclasses.replace(grade.read(path, lessons), seed="7")
    rows = grade.grade(submitted, limits, untouched)
    whole = [row.message for row in rows if row.exercise == "–"]
    return {row.exercise: row for row in rows if row.exercise != "–"}, whole


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
exercises.check_training_state(mine)"""


def test_grading_gives_verdicts_and_leaves_no_files(tmp_path, lessons, untouched, monkeypatch):
    """Changes of the library in this process do not affect the grades."""
    lesson = importlib.import_module("course_lib.lessons.lesson_01.exercises")
    monkeypatch.setattr(lesson, "check_adapter_bytes", lambda: None)
    reason = nbformat.v4.new_markdown_cell(
        "**Why?**\n\nAdam keeps\ntwo.", id=reason_id("check_training_state")
    )
    notebook = submission(
        IMPORT,
        RIGHT,
        reason,
        "answer = no_such_name\nexercises.check_adapter_bytes(answer)",
        "print('✓ Right') or exercises.check_whole_peak(1)",
        STUBS["new_storages"],
        f"{SOLUTION}\nTinyMeter = 5\nexercises.check_new_storages(TinyMeter)",
        "answer = 'many'\nexercises.check_largest_batch(answer)",
    )
    path = hand_in(tmp_path / "Ada\nL.ipynb", notebook)
    rows, whole = rows_of(path, lessons, untouched)
    assert {(row.name, row.lesson) for row in rows.values()} == {("Ada\\nL", "01")}
    for exercise, verdict, said in (
        ("training_state", "✓", "two for Adam"),
        ("adapter_bytes", "✗", "NameError: name 'no_such_name' is not defined"),
        ("largest_batch", "✗", ""),
        ("whole_peak", "!", "was edited"),
        ("new_storages", "○", "Not answered yet"),  # the course's solution is not an answer
    ):
        assert rows[exercise].verdict == verdict and said in rows[exercise].message, exercise
    assert "Error" not in rows["largest_batch"].message
    assert "Hint" not in rows["largest_batch"].message
    assert rows["training_state"].sentence.endswith("Adam keeps two.")
    assert not whole and list(tmp_path.iterdir()) == [path]


UNREAD = {  # name -> a cell that the reader would report
    "check": """V = type(exercises.check_adapter_bytes(None))
exercises.check_adapter_bytes._check = lambda answer: V(True, "Right.")""",
    "messages": """vars(exercises)["say"].refuse_if = lambda *given, **values: None""",
    "peak": """exercises.check_largest_batch._peak = lambda size: 0""",
    "constants": """numbers = vars(exercises)
for name in [*numbers]:
    if name.isupper() and isinstance(numbers[name], int):
        numbers[name] = 0""",
    "torch": """import torch

torch.equal = torch.allclose = lambda *given, **options: True""",
    "wrapper": """import functools

import torch

functional = torch.nn.functional
functional.cross_entropy = functools.wraps(functional.cross_entropy)(lambda *given: 0)""",
    "kernel": """import torch

fakes = torch.library.Library("aten", "IMPL")
fakes.impl("equal", lambda one, other: True, "CPU")""",
    "mode": "import torch\n\ntorch.use_deterministic_algorithms(True)",
    "hook": """import torch

torch.nn.modules.module.register_module_forward_hook(lambda *given: given[-1])""",
}


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("check", "course_lib.lessons.lesson_01.exercises"),
        ("messages", "course_lib.lessons.lesson_01.exercises"),
        ("peak", "course_lib.lessons.lesson_01.exercises"),
        ("constants", "course_lib.lessons.lesson_01.exercises"),
        ("torch", "torch"),
        ("wrapper", "torch.nn.functional"),
        ("kernel", "PyTorch: the kernels of operators"),
        ("mode", "PyTorch: deterministic algorithms"),
        ("hook", "PyTorch: the hooks of all modules"),
    ],
)
def test_changed_state_of_a_check_is_no_right_answer(
    tmp_path, lessons, untouched, monkeypatch, name, changed
):
    """The reader does not follow values that are computed, so it is switched off here."""
    monkeypatch.setattr(submissions, "reaches", lambda *given: [])
    path = hand_in(tmp_path / "a.ipynb", submission(IMPORT, UNREAD[name], *STUBS.values()))
    rows, _ = rows_of(path, lessons, untouched)
    assert {row.verdict for row in rows.values()} == {"!"}, rows
    messages = {row.message for row in rows.values()}
    assert messages == {f"{changed} was changed by this cell or one above."}


FUNCTION = "def answer(x):\n    return {}\n"
AGREES = "X = type('X', (), {'__e' + 'q__': lambda self, other: True})\n"
WATCHED = [  # cells, and a part of what is said of them; None for what an answer may do
    (f"{AGREES}answer = X()", "an object of `X`, which defines `__eq__`"),
    (f"{AGREES}answer = X", "an object of `X`, which defines `__eq__`"),
    (f"{AGREES}answer = {{'a': [X()]}}", "an object of `X`, which defines `__eq__`"),
    (f"{AGREES}{FUNCTION.format('(1, X())')}", "an object of `X`, which defines `__eq__`"),
    (f"{AGREES}answer = functools.partial(X)", "an object of `X`, which defines `__eq__`"),
    (f"{AGREES}answer = [X()].pop", "an object of `X`, which defines `__eq__`"),
    (f"{AGREES}answer = SimpleNamespace(loss=X())", "an object of `X`, which defines `__eq__`"),
    (f"{AGREES}{FUNCTION.format('map(X, [])')}", "an iterator, `map`, instead of a list"),
    *(
        (f"answer = type('X', (), {{{name!r}: lambda self, *given: 5}})()", f"defines `{name}`")
        for name in ("__float__", "__array__", "__torch_function__", "__rsub__", "__class__")
    ),
    *(
        (f"answer = type('X', ({kind},), {{}})(5)", f"derived from `{kind.rpartition('.')[2]}`")
        for kind in ("int", "float", "torch.Tensor", "fractions.Fraction")
    ),
    ("class M(type): pass\nanswer = M('X', (), {})", "whose class has a metaclass"),
    ("X = type('X', (), {'__module__': 'builtins', '__le__': 5})\nanswer = X()", "`__le__`"),
    ("from unittest.mock import ANY\nanswer = ANY", "which defines `__eq__`"),
    (FUNCTION.format("setattr(torch, 'equal', print)"), "`equal` was changed while `answer` ran"),
    (
        "seen = []\ndef answer(x):\n"
        "    torch.equal = seen.pop() if seen else seen.append(torch.equal)",
        "`equal` was changed while `answer` ran",
    ),
    (FUNCTION.format("Mode().__enter__()"), "`answer` left the dispatch mode"),
    (FUNCTION.format("torch.set_default_dtype(torch.float64)"), "was changed while"),
    (
        FUNCTION.format("torch.use_deterministic_algorithms(True)"),
        "left deterministic algorithms changed",
    ),
    (
        FUNCTION.format("torch.autograd.graph.saved_tensors_hooks(id, id).__enter__()"),
        "left the hooks of saved tensors changed",
    ),
    (FUNCTION.format("register(lambda *given: None)"), "left the hooks of all modules changed"),
    ("import sys\n" + FUNCTION.format("sys.setprofile(None)"), "not watched"),
    (
        FUNCTION.format("x, None, torch.ones(1), numpy.float32(1), Fraction(1), (1 for _ in '')"),
        None,
    ),
    (FUNCTION.format("torch.nn.Linear(1, 1), torch.ops.aten.add.default, [range(2)]"), None),
    ("@dataclasses.dataclass\nclass A:\n    x: int\nanswer = A(1)", None),
    ("class P(typing.NamedTuple):\n    x: int\nanswer = P(1)", None),
    ("answer = Mode", None),
    ("@functools.cache\ndef answer(x):\n    with torch.no_grad():\n        return x", None),
    ("answer = lambda x: [y for y in (torch.manual_seed(x), torch.rand(1))]", None),
]
MODE = """class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))
"""


@pytest.mark.parametrize(("source", "said"), WATCHED)
def test_answer_that_fools_a_comparison_is_seen_while_its_check_runs(source, said):
    names = {"__name__": "__main__", "torch": torch, "Fraction": Fraction, "typing": typing}
    names |= {"functools": functools, "dataclasses": dataclasses, "fractions": fractions}
    names |= {"numpy": numpy, "SimpleNamespace": SimpleNamespace}
    names |= {"TorchDispatchMode": TorchDispatchMode, "register": register_module_forward_hook}
    exec(MODE, names)
    watch, equal = watching.Watch(names), torch.equal

    def called(answer):
        if callable(answer):
            answer(1)
        return exercises.right("Right.")

    check = exercises.Exercise(called, ("hint",), str)

    try:
        watch.start()
        exec(compile(source, "cell", "exec"), names)
        check(names["answer"])
        check(names["answer"])
        found = watch.stop()
    finally:
        sys.setprofile(None)
        torch.equal = equal
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        _global_forward_hooks.clear()
        while torch._C._autograd._top_saved_tensors_default_hooks(True):
            torch._C._autograd._pop_saved_tensors_default_hooks()
        while _get_current_dispatch_mode_stack():
            _get_current_dispatch_mode_stack()[-1].__exit__(None, None, None)
    assert bool(found) == (said is not None), found
    assert said is None or said in found[0], found


@pytest.mark.parametrize("name", ANSWERS)
def test_right_answers_are_not_refused_while_their_check_runs(name):
    watch = watching.Watch(vars(FILES[name[:2]]))
    for answer in ANSWERS[name][0]:
        watch.start()
        verdict = CHECKS[name](answer)
        assert watch.stop() == [] and verdict, answer


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


# a process that leaves its session, and whose parent ends
LEAVES = """import subprocess

subprocess.run(["setsid", "-f", "sleep", "1177"])
print("left")"""


@pytest.mark.skipif(sys.platform != "linux", reason="adopting orphans needs prctl of Linux")
def test_process_that_left_its_session_ends_with_its_notebook(tmp_path):
    cells = [nbformat.v4.new_code_cell(LEAVES)]
    notebook = Run(nbformat.v4.new_notebook(cells=cells), LIMITS, tmp_path).execute()
    assert [output["text"] for output in notebook.cells[0].outputs] == ["left\n"]
    running = [each.info["cmdline"] for each in psutil.process_iter(["cmdline"])]
    assert ["sleep", "1177"] not in running


def test_kernel_has_a_limit_of_its_own(tmp_path, monkeypatch):
    """The system ends it, also if nothing looks at its processes."""
    if not hasattr(psutil, "RLIMIT_CPU"):
        pytest.skip("limits of another process need Linux")
    monkeypatch.setattr(Run, "_watch", lambda self, kernel: None)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("while True: pass")])
    with pytest.raises(DeadKernelError):
        Run(notebook, Limits(5), tmp_path).execute()


@pytest.mark.parametrize(
    ("loop", "verb"),
    [("while True: pass", "computed"), ("import time\ntime.sleep(10**6)", "waited")],
)
def test_notebook_that_computes_or_waits_too_long_is_stopped(tmp_path, loop, verb):
    """The limit leaves time for the start of the kernel, which counts as well."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(loop)])
    with pytest.raises(OutOfTime, match=f"it {verb} for more than 10 seconds"):
        Run(notebook, Limits(10), tmp_path).execute()


HIDDEN_OS = "import os as hidden"  # a cell of lesson 00 here, so the reader does not report it
WAITS = """from time import sleep

hidden.mkdir({mine!r})
while not hidden.path.exists({other!r}):
    sleep(0.1)"""


def test_notebooks_run_side_by_side_and_one_that_crashes_does_not_stop_the_other(
    tmp_path, read_once, capsys
):
    """Each of the two waits for the other. Lesson 00 has no exercises: did it run to its end?"""
    for mine, other, end in (("a", "b", "hidden._exit(1)"), ("b", "a", "1 / 0")):
        waits = WAITS.format(mine=str(tmp_path / mine), other=str(tmp_path / other))
        notebook = submission(HIDDEN_OS, waits, end, title="# 0 Start here / 从这里开始")
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
        (submission("1", title="# 0 Start / 开始"), "It is lesson 00, not 01."),
        (
            submission("answer = 5\nlesson_01.check_adapter_bytes(answer)"),
            "It is of an older edition of the course: `make update` brings its answers into",
        ),
    ],
)
def test_a_file_that_cannot_be_graded_is_one_sentence_in_the_table(
    tmp_path, lessons, content, said
):
    path = hand_in(tmp_path / "a.ipynb", content)
    (row,) = grade.grade(grade.read(path, lessons, wanted="01"), LIMITS, {})
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

    monkeypatch.setattr(grade, "assemble", stumbles)
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


def test_interrupted_grading_keeps_its_rows_and_goes_on(tmp_path, read_once, monkeypatch, capsys):
    """The table names the files that are not graded; a changed file is graded again."""
    for name in "abc":
        hand_in(tmp_path / f"in/{name}.ipynb", submission(name, title="# 0 Start / 开始"))
    calls, table = [], tmp_path / "t.csv"

    def grade_until_c(submission, limits, untouched):
        calls.append(submission.name)
        if calls == ["a", "b", "c"]:
            raise KeyboardInterrupt
        return [verdicts.Row(submission.name, "00", "–", "✓", "ok")]

    monkeypatch.setattr(grade, "grade", grade_until_c)
    monkeypatch.setattr(grade, "fingerprints_of", lambda lesson: {})
    options = [str(tmp_path / "in"), "--output", str(table), "--notebooks", str(NOTEBOOKS)]
    with pytest.raises(SystemExit, match="stopped; 2 of 3 files are graded, run again to go on"):
        grade.main(options)
    assert [row[3:5] for row in read_csv(table)[1:]] == [
        ["✓", "ok"],
        ["✓", "ok"],
        ["!", "It is not graded yet: grade again."],
    ]
    with (tmp_path / ".t_progress.jsonl").open("a") as file:
        file.write('["half a li')  # the disk was full
    hand_in(tmp_path / "in/b.ipynb", submission("changed", title="# 0 Start / 开始"))
    grade.main(options)
    assert calls == ["a", "b", "c", "b", "c"]
    assert [row[3] for row in read_csv(table)[1:]] == ["✓"] * 3
    assert not (tmp_path / ".t_progress.jsonl").exists()


def no_space(*given, **options):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("home", "name", "said", "rows"),
    [
        (
            progress.os,
            "fsync",
            "the disk is full; 1 of 2 files are graded, make space and run again to go on",
            ["✓", "!"],
        ),
        (
            grade,
            "_run",
            "the disk is full; 0 of 2 files are graded, make space and run again to go on",
            ["!", "!"],
        ),
        (verdicts.csv, "writer", "the disk is full: make space and run again; .*t.csv may be", []),
    ],
)
def test_full_disk_leaves_a_true_table_and_a_sentence(
    tmp_path, read_once, monkeypatch, home, name, said, rows
):
    """With space, the next grading writes all rows; a file is not graded twice."""
    for file in "ab":
        hand_in(tmp_path / f"in/{file}.ipynb", submission("1", title="# 0 Start / 开始"))
    monkeypatch.setattr(grade, "_run", lambda *given: "")
    monkeypatch.setattr(grade, "fingerprints_of", lambda lesson: {})
    table = tmp_path / "t.csv"
    options = [str(tmp_path / "in"), "--output", str(table), "--notebooks", str(NOTEBOOKS)]
    with monkeypatch.context() as full:
        full.setattr(home, name, no_space)
        with pytest.raises(SystemExit, match=f"^grade: {said}"):
            grade.main(options)
    assert [row[3] for row in read_csv(table)[1:]] == rows if rows else not table.exists()
    grade.main(options)
    assert [row[3] for row in read_csv(table)[1:]] == ["✓", "✓"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "t.csv", "t_by_exercise.csv"]


def test_two_gradings_of_one_table_are_rejected(tmp_path):
    first, second = (progress.Progress(tmp_path / "t.csv") for _ in range(2))
    with first, pytest.raises(EditionError, match="another grading is writing"):
        second.__enter__()
    assert list(tmp_path.iterdir()) == []


def test_submission_that_rewrites_a_file_does_not_change_a_later_one(tmp_path, read_once):
    """The second file is read before the first one runs."""
    second = hand_in(tmp_path / "in/b.ipynb", submission("1", title="# 0 Start / 开始"))
    rewrites = f"hidden.truncate({str(second)!r}, 0)"
    cells = submission(HIDDEN_OS, rewrites, title="# 0 Start / 开始")
    hand_in(tmp_path / "in/a.ipynb", cells)
    rows = grade.grade_folder(tmp_path / "in", NOTEBOOKS, LIMITS, say=list)
    assert [(row.name, row.verdict) for row in rows] == [("a", "✓"), ("b", "✓")]
    assert second.read_text() == ""


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


# --- what is read before it runs ---

REACHES = [
    ("lesson_01 = None", "changes lesson_01"),
    ("for lesson_01 in range(3): pass", "changes lesson_01"),
    ("import torch as lesson_01", "changes lesson_01"),
    ("exercises.check_training_state = lambda answer: True", "changes exercises"),
    ("exercises = None", "changes exercises"),
    ("setattr(exercises, 'check_meter', print)", "changes exercises"),
    ("setattr(exercises, name, print)", "sets an attribute with a computed name"),
    ("map(setattr, [exercises], names, values)", "passes setattr on"),
    ("exercises.__dict__['x'] = 1", "uses __dict__"),
    ("vars(k)[n] = 0", "uses vars"),
    ("for exercises in range(3): pass", "changes exercises"),
    ("for exercises.check_meter in [print]: pass", "changes exercises.check_meter"),
    ("with hooks() as exercises.check_meter: pass", "changes exercises.check_meter"),
    ("try: x\nexcept E as exercises: pass", "changes exercises"),
    ("match x:\n    case exercises: pass", "changes exercises"),
    ("(exercises := 5)", "changes exercises"),
    ("del exercises.check_meter", "changes exercises.check_meter"),
    ("import torch as exercises", "changes exercises"),
    ("c = exercises.check_meter\nc.check = print", "changes c.check"),
    ("c, d = [exercises.check_meter, 1]\nc.check = print", "changes c.check"),
    ("for c in [exercises.check_meter]:\n    c.accepted = True", "changes c.accepted"),
    ("c = {0: exercises}[0] if x else None\nc.check_meter = print", "changes c.check_meter"),
    ("type(exercises.check_meter).tries = 5", "changes type"),
    ("(lambda: exercises)().x = 5", "changes (lambda"),
    ("c._check = lambda answer: True", "uses _check"),
    ("import torch\nt = torch\nt.allclose = print", "changes t.allclose"),
    ("from torch import Tensor as T\nT.equal = print", "changes T.equal"),
    ("import torch\ntorch.os.system('ls')", "uses os"),
    ("import torch\ntorch.load('x')", "reads or writes files"),
    ("from torch import save", "imports torch.save"),
    ("import gc", "imports gc"),
    ("import sys as numbers", "imports sys"),
    ("from importlib import reload", "imports importlib.reload"),
    ("__import__('gc')", "uses __import__"),
    ("exec('exercises = 1')", "uses exec"),
    ("globals()['exercises'] = 1", "uses globals"),
    ("open('x')", "uses open"),
    ("getattr(exercises, '__wrap' + 'ped__')", "reads an attribute with a computed name"),
    ("def f(x, name):\n    return getattr(x, name)", "reads an attribute with a computed name"),
    ("import torch\ntorch.library.Library('aten', 'IMPL')", "uses library"),
    ("import torch\ntorch.utils.benchmark.Timer('1').timeit(1)", "uses timeit"),
    ("import numpy\nnumpy.ctypeslib.as_array(x)", "uses ctypeslib"),
    ("from torch.fx import GraphModule", "imports torch.fx.GraphModule"),
    ("import functools\n@functools.wraps(f, assigned=names)\ndef g(): pass", "copies attributes"),
    ("import functools\nfunctools.update_wrapper(A, b)", "uses update_wrapper"),
    ("from functools import singledispatch", "imports functools.singledispatch"),
    ("import string\nstring.Formatter().get_field('0.x', [y], {})", "uses Formatter"),
    *(
        (f"import {name}", f"imports {name}")
        for name in ("timeit", "code", "codeop", "runpy", "pickle", "marshal", "doctest", "pdb")
    ),
    (
        "from course_lib.lessons import lesson_01\nlesson_01.exercises.f",
        "uses lesson_01.exercises, a module of the checks",
    ),
    (
        "from course_lib.lessons import lesson_01 as one\none.exercises",
        "uses one.exercises, a module of the checks",
    ),
    ("import course_lib\ncourse_lib.teaching.exercises.seed", "uses course_lib.teaching"),
    ("import course_lib.teaching as t\nt.exercises.seed", "uses t.exercises"),
    ("import torch\ntorch._C._set_grad_enabled(False)", "uses _C"),
    ("import numpy\nnumpy.testing.measure('1')", "uses testing"),
    ("from numpy.testing import measure", "imports numpy.testing.measure"),
    ("getattr(exercises, '__wrapped__')", "names __wrapped__"),
    ("from operator import attrgetter", "imports operator.attrgetter"),
    ("(x for x in y).gi_frame.f_back", "uses f_back"),
    ("error.tb_frame", "uses tb_frame"),
    ("match torch:\n    case object(os=x): pass", "reads os"),
    ("class A:\n    __match_args__ = ('_' + 'check',)", "computes __match_args__ of A"),
    ("class A:\n    __match_args__ = ('_check',)", "names _check"),
    ("import warnings\nwarnings.formatwarning('', UserWarning, 'x', 1)", "uses formatwarning"),
    ("from torch.utils._python_dispatch import _disable_current_modes", "imports torch.utils"),
    ("import torch.utils._python_dispatch as d\nd._disable_current_modes()", "uses _disable_curr"),
    ("from course_lib._torch.modes import dispatch_modes", "imports course_lib._torch"),
    ("import course_lib.models as m\nm.disable_current_modes()", "uses disable_curr"),
    ("n = next(n for n in x if exercises.check_meter(n))", "tries answers with a check"),
    ("x = exercises.check_meter", "tries answers with a check"),
    ("from typing import get_type_hints", "imports typing.get_type_hints"),
    ("x.__class__ = Y", "changes x.__class__"),
    ("!ls", "uses get_ipython"),
    ("%run other.py", "uses get_ipython"),
    ("%%bash\nls", "uses get_ipython"),
    ("class A(int): pass", "derives A from a number"),
    ("import torch\nclass A(torch.Tensor): pass", "derives A from a number or a tensor"),
    ("class A:\n    def __eq__(self, other):\n        return True", "defines __eq__ in A"),
    ("class A:\n    __float__ = lambda self: 5.0", "defines __float__ in A"),
    ("A = type('A', (float,), {})", "derives a class from a number"),
    ("class A(metaclass=B): pass", "gives A a metaclass"),
    ("from unittest.mock import ANY", "imports unittest.mock.ANY"),
    ("from course_lib.teaching import exercises", "imports course_lib.teaching.exercises"),
    ("import course_lib.lessons.lesson_01.exercises", "imports course_lib.lessons.lesson_01"),
    ("exercises._verdict", "uses exercises._verdict, a part of the checks"),
    ("one = exercises", "passes exercises on"),
    ("getattr(exercises, 'storages')", "passes exercises on"),
    ("from torch import exercises", "changes exercises"),
    ("def f():\n    global exercises\n    exercises = 1", "changes exercises"),
    ("from course_lib.lessons.lesson_01 import gpu", "imports course_lib.lessons.lesson_01.gpu"),
    ("f = " + "(" * 2000 + ")" * 2000, None),  # Python cannot run it either
    ("import torch\nfrom course_lib.memory import measure\ntable = {}\ntable[0] = torch", None),
    ("exercises.check_meter(3)\nexercises.check_meter(4)", None),
    ("from __future__ import annotations", None),
    ("%%time\nx = 1", None),
    ("%matplotlib inline\nx = 1", None),
    ("class A:\n    __match_args__ = ('x', 'y')", None),
    ("half a line of (", None),
    ("def f(context, block):\n    context.block = block\n    return getattr(block, 'bias')", None),
    ("for p in model.parameters():\n    p.grad = None", None),
    ("class A:\n    def __init__(self):\n        super().__init__()\n        self.x = 0", None),
    ("import functools\n@functools.wraps(f)\ndef g(): pass", None),
    ("import weakref\nweakref.finalize(x, f)", None),
    ("import torch\ntorch.testing.assert_close(x, x)", None),
    ("input = 5\nprint(input, type(input), __name__ == '__main__')", None),
]


@pytest.mark.parametrize(("source", "said"), REACHES)
def test_reading_reports_lines_that_reach_beyond_an_answer(source, said):
    foreign = reading.foreign_names([IMPORT, source])
    found = [str(each) for each in reading.reaches(source, foreign)]
    assert bool(found) == (said is not None), found
    assert said is None or any(said in each for each in found), found


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("figures = None", "changes figures"),
        ("import torch as figures", "changes figures"),
        ("def figures(): pass", "changes figures"),
        ("def f():\n    global figures\n    figures = 1", "changes figures"),
        ("figures.draw_lengths = print", "changes figures.draw_lengths"),
        ("from course_lib.lessons.lesson_01 import figures as f", "imports course_lib.lessons"),
        ("from course_lib.lessons.lesson_01.exercises import _two", "imports course_lib.lessons"),
        (
            "from course_lib.lessons.lesson_02 import figures",
            "imports course_lib.lessons.lesson_02",
        ),
        ("import course_lib.lessons.lesson_01.exercises as e", "imports course_lib.lessons"),
        ("exercises.right", "uses exercises.right"),
        ("def f(results):\n    figures = results\n    return figures", None),  # its own names
        ("gpu = 5\nsimulation = 6", None),  # lesson 01 imports no such file
        ("from course_lib.lessons.lesson_01 import exercises, figures", None),
        ("exercises.storages(x)\nfigures.draw_lengths(f, 5)", None),
    ],
)
def test_reading_keeps_the_names_of_the_files_that_a_lesson_imports(source, said):
    first = "from course_lib.lessons.lesson_01 import exercises, figures"
    imports = submissions._imports(reading.tree_of(first))
    foreign = reading.foreign_names([first, source])
    found = [str(each) for each in reading.reaches(source, foreign, imports, {"storages"})]
    assert bool(found) == (said is not None), found
    assert said is None or any(said in each for each in found), found


HELPERS = re.compile(  # lines with which a file of answers makes several answers
    r"imports course_lib\.(lessons|_torch)|changes (wire|room)\."
)


@pytest.mark.parametrize("number", sorted(FILES))
def test_reading_reports_no_solution_and_no_right_answer(number):
    stored = next(book for name, book in stored_lessons().items() if name[:2] == number)
    code = [cell.source for cell in stored.cells if cell.cell_type == "code"]
    imports = {name for source in code for name in submissions._imports(reading.tree_of(source))}
    foreign = reading.foreign_names(code)
    used = submissions._of_exercises("\n".join(code))
    for solution in solutions(number):
        assert reading.reaches(solution.plain, foreign, imports, used) == [], solution.name
    answers = Path(FILES[number].__file__).read_text("utf-8")
    found = reading.reaches(answers, reading.foreign_names([answers]), imports, used)
    assert [str(each) for each in found if not HELPERS.search(str(each))] == []


def test_lesson_runs_with_the_cells_of_the_learner_at_their_places(lessons):
    """The course's own cells are the course's, and a cell that reaches beyond does not run."""
    own = "helper = 5"
    made = submission(
        own, IMPORT, "import gc", "# mine\nmy_guess = 7", own, RIGHT, "shown = [my_guess, 1]"
    )
    made.cells[4].id = "cell-3"  # as the course's cell for the guess
    made.cells[-1].id = "cell-4"  # a changed cell of the course
    program = submissions.assemble(made, lessons["01"])
    assert [cell.source for cell in program.cells] == [
        own,
        IMPORT,
        RIGHT,
        "# mine\nmy_guess = 7",
        own,
        "shown = [my_guess]",
        "shown = [my_guess, 1]",
        *list(STUBS.values())[1:],
    ]
    assert [str(held) for held in program.held] == ["Cell 4 was not run: line 1 imports gc."]
    assert program.answers.keys() == {"check_training_state"}


@pytest.mark.parametrize(
    ("source", "verdict", "message", "expected"),
    [
        ("answer = f()", "✗", "NameError: name 'helper' is not defined", ("!", "needs helper")),
        ("answer = helper", "✗", "Not yet", ("!", "needs helper. Cell 4 was not run: line 1")),
        ("answer = 5", "✗", "Not yet", ("✗", "Not yet")),
        ("answer = None  # mine", "✓", "Right", ("!", "Nothing is answered")),
        ("answer = None", "✗", "Not yet", ("○", "Not yet")),
    ],
)
def test_verdict_considers_the_stub_and_cells_that_did_not_run(source, verdict, message, expected):
    held = submissions.Held(4, frozenset({"helper"}), reading.Reach(1, "imports gc"))
    program, cell = submissions.Program(held=[held]), nbformat.v4.new_code_cell(source)
    found = grade._reconsider(verdict, message, cell, "answer = None", program)
    assert found[0] == expected[0] and expected[1] in found[1]


def test_older_edition_and_one_language_are_graded(tmp_path, lessons, untouched):
    """A cell of an older edition that reaches beyond an answer does not run, and no row says so."""
    older = nbformat.v4.new_code_cell("import gc\ncollected = gc.collect()")
    older.id = id_of(older)
    changed = nbformat.v4.new_code_cell("import gc  # mine", id=older.id)
    answer = "answer = 14320000000 + 0 * {}\nexercises.check_adapter_bytes(answer)"
    for own, name, verdict, messages in (
        (older, "1", "✓", []),
        (older, "collected", "!", []),
        (changed, "1", "✓", ["Cell 4 was not run: line 1 imports gc."]),
    ):
        made = submission(IMPORT, own, answer.format(name), title="# 1 字节去了哪里？")
        made.cells.insert(0, nbformat.v4.new_markdown_cell("*[English](../en/01.ipynb)*"))
        rows, whole = rows_of(hand_in(tmp_path / "a.ipynb", made), lessons, untouched)
        assert (rows["adapter_bytes"].verdict, whole) == (verdict, messages)


def test_cells_that_ask_for_a_value_without_an_exercise_have_a_tag():
    """Their names get None, and begin with `my_` or end with `_slot`."""
    scripts = sorted((NOTEBOOKS / "scripts").glob("[0-9]*.py"))
    cells = [cell for path in scripts for cell in notebooks.read_script(path).cells]
    asking = [cell.source for cell in cells if submissions.asks(cell)]
    empty = re.compile(r"^(my_\w+|\w+_slot)\b.*= \[?None", re.M)
    found = [
        cell.source
        for cell in cells
        if cell.cell_type == "code" and empty.search(cell.source) and not check_of(cell)
    ]
    models = [source for source in asking if source.startswith("def make_model()")]
    assert sorted(asking) == sorted(found + models)
    assert len(found) == 8 and len(models) == 1


def test_every_lesson_has_its_stubs_and_is_its_own_submission():
    """Some stubs run and give a wrong number: their cells are compared with the lesson's."""
    for number, lesson in submissions.lessons_of(NOTEBOOKS).items():
        assert lesson.stubs.keys() == lesson.calls.keys(), number
        notebook = nbformat.v4.new_notebook(cells=deepcopy(lesson.cells))
        program = submissions.assemble(notebook, lesson)
        assert program.held == [] and program.answers.keys() == lesson.calls.keys()
        sources = [cell.source for cell in program.cells]
        assert sources == [cell.source for cell in lesson.cells]


@pytest.mark.parametrize(
    ("above", "last", "there"),
    [
        *((above, CALL, True) for above in ("x = '\ud800'", "x = 1" + " + 1" * 700, "half a (")),
        *(("", last, True) for last in (f"{CALL}  # mine", f"{CALL[:-1]} , )")),
        *(("", last, False) for last in (f"{CALL} or 1", f"x = {CALL}", CALL.replace("mine", "x"))),
    ],
)
def test_a_check_that_is_called_in_another_way_is_edited(lessons, above, last, there):
    places = submissions.cells_of(submission(above, f"mine = 1\n{last}"), lessons["01"])
    assert places.keys() == ({"check_training_state"} if there else set())


def test_a_changed_function_changes_the_fingerprint_of_its_module_alone(monkeypatch):
    """A right answer is graded only if fingerprints of two processes agree; see the test above."""
    check = importlib.import_module("course_lib.lessons.lesson_01.exercises").check_training_state
    before = fingerprint.fingerprints()
    monkeypatch.setattr(type(check), "__call__", lambda self, answer: True)
    monkeypatch.setattr(check.__wrapped__, "__code__", (lambda answer: True).__code__)
    after = fingerprint.fingerprints()
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {type(check).__module__, check.__wrapped__.__module__}


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


def test_a_grading_that_goes_on_keeps_its_seed(tmp_path):
    table = tmp_path / "grades.csv"
    with progress.Progress(table) as first:
        seed = first.seed(None)
        first.add("a", [])
    with progress.Progress(table) as second:
        assert second.seed(None) == seed != second.seed("other")
        second.add("b", [])
    with progress.Progress(table) as third:
        assert third.seed(None) == "other"
        third.finish()
    with progress.Progress(table) as complete:
        assert complete.seed(None) not in (seed, "other")
