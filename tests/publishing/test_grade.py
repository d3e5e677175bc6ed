"""Test the grading of submitted notebooks: verdicts, limits, cheats, and the tables.

Solutions of whole lessons, and endless loops, which take minutes, are in
`grade_generated_submissions.py`, a program.
"""

import csv
import importlib
import io
import os
import re
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from answers import FILES
from edition_fixtures import NOTEBOOKS, stored_lessons
from timeouts import TIMEOUT_SECONDS
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
psutil = pytest.importorskip("psutil")
pytest.importorskip("jupytext")

from exercise_mutants import solutions

from course_lib.teaching import exercises
from publish import fingerprint, grade, reading, submissions, verdicts, watching
from publish.cells import SOLUTION, id_of
from publish.kernels import Limits, OutOfTime, Run
from publish.student import reason_id

LIMITS = Limits(TIMEOUT_SECONDS)
CALL = "exercises.check_training_state(mine)"
IMPORT = "from course_lib.lessons.lesson_01 import exercises"


@pytest.fixture(scope="module")
def lessons(tmp_path_factory):
    """Lesson 00 without exercises, and six exercises of lesson 01."""
    folder = tmp_path_factory.mktemp("course")
    write_course(folder)
    return grade.lessons_of(folder)


@pytest.fixture(scope="module")
def untouched(lessons):
    return grade.fingerprints_of(lessons["01"])


@pytest.fixture
def read_once(lessons, untouched, monkeypatch):
    monkeypatch.setattr(grade, "lessons_of", lambda notebooks: lessons)
    monkeypatch.setattr(grade, "fingerprints_of", lambda lesson: untouched)


@pytest.fixture
def run_command(tmp_path, read_once):
    """Return a function that grades the folder `in` into `t.csv` with more options."""
    places = [str(tmp_path / "in"), "--output", str(tmp_path / "t.csv")]
    return lambda *options: grade.main([*places, "--notebooks", str(NOTEBOOKS), *options])


STUBS = {
    "training_state": (
        'mine = {"weights": None, "parameter": None, "gradient": None, "optimizer": None}\n'
        "exercises.check_training_state(mine)"
    ),
    "adapter_bytes": "answer = None\nexercises.check_adapter_bytes(answer)",
    "whole_peak": "my_parts = None\nexercises.check_whole_peak(my_parts)",
    "new_storages": "TinyMeter = None\nexercises.check_new_storages(TinyMeter)",
    "largest_batch": "answer = None\nexercises.check_largest_batch(answer)",
    "layer_formula": "formula = None\nexercises.check_layer_formula(formula)",
}


def write_course(folder):
    guess, course = "my_guess = None", "shown = [my_guess]"
    first, *others = STUBS.values()
    for name, cells in {
        "00_a": of_lesson_00("1", HIDDEN_OS),
        "01_b": submission(IMPORT, first, guess, course, *others),
    }.items():
        for number, cell in enumerate(cells.cells):
            cell.id = f"cell-{number}"
            if cell.source == "my_guess = None":
                cell.metadata.tags = ["guess"]
        hand_in(folder / f"{name}.ipynb", cells)


def rows_of(path, lessons, untouched):
    """Return the rows by exercise, and the messages of rows about the whole notebook."""
    submitted = replace(grade.read(path, lessons), seed="7")
    rows = grade.grade(submitted, LIMITS, untouched)
    whole = [row.message for row in rows if row.exercise == "–"]
    return {row.exercise: row for row in rows if row.exercise != "–"}, whole


def submission(*sources, title="# 1 Where do the bytes go? / 字节去了哪里？"):
    """Return a notebook with a lesson's title; strings become code cells."""
    make = nbformat.v4
    cells = [make.new_code_cell(each) if isinstance(each, str) else each for each in sources]
    return make.new_notebook(cells=[make.new_markdown_cell(title), *cells])


def of_lesson_00(*sources):
    """Return a notebook of the lesson without exercises."""
    return submission(*sources, title="# 0 Start here / 从这里开始")


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


def test_grade_returns_verdict_per_exercise_and_leaves_no_files(
    tmp_path, lessons, untouched, monkeypatch
):
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
        "formula = [\nexercises.check_layer_formula(formula)",
    )
    path = hand_in(tmp_path / "Ada\nL.ipynb", notebook)
    rows, whole = rows_of(path, lessons, untouched)
    assert {(row.name, row.lesson) for row in rows.values()} == {("Ada\\nL", "01")}
    for exercise, verdict, message in (
        ("training_state", "✓", "two for Adam"),
        ("adapter_bytes", "✗", "NameError: name 'no_such_name' is not defined"),
        ("largest_batch", "✗", ""),
        ("layer_formula", "✗", "SyntaxError"),
        ("whole_peak", "!", "was edited"),
        ("new_storages", "○", "Not answered yet"),  # the course's solution is not an answer
    ):
        assert rows[exercise].verdict == verdict and message in rows[exercise].message, exercise
    assert "Error" not in rows["largest_batch"].message
    assert "Hint" not in rows["largest_batch"].message
    assert rows["training_state"].sentence.endswith("Adam keeps two.")
    assert not whole and list(tmp_path.iterdir()) == [path]


# Where state changes, and the cell that changes it. A verdict names the first of all changes in
# alphabetical order, so each change here is before the ones above it.
CHANGES = [
    (
        "torch.nn.functional",
        "import functools, torch\n"
        "functional = torch.nn.functional\n"
        "wrap = functools.wraps(functional.cross_entropy)\n"
        "functional.cross_entropy = wrap(lambda *arguments: 0)",
    ),
    (
        "course_lib.lessons.lesson_01.exercises",
        "V = type(exercises.check_adapter_bytes(None))\n"
        "exercises.check_adapter_bytes._check = lambda answer: V(True, 'Right.')",
    ),
    (
        "course_lib.lessons.ledger",
        "from course_lib.lessons import ledger\nvars(ledger)['PARAMETERS'] = 0",
    ),
    (
        "PyTorch: the kernels of operators",
        "library = torch.library.Library('aten', 'IMPL')\n"
        "library.impl('equal', lambda one, other: True, 'CPU')",
    ),
    (
        "PyTorch: the hooks of all modules",
        "torch.nn.modules.module.register_module_forward_hook(lambda *values: values[-1])",
    ),
    ("PyTorch: deterministic algorithms", "torch.use_deterministic_algorithms(True)"),
]


def test_grade_rejects_answers_if_submission_modifies_checker_functions(
    tmp_path, lessons, untouched, monkeypatch
):
    """Disable the static check, because it does not follow computed values."""
    monkeypatch.setattr(submissions, "reaches", lambda *arguments: [])
    cells = [
        cell
        for (_, change), stub in zip(CHANGES, STUBS.values(), strict=True)
        for cell in (change, stub)
    ]
    path = hand_in(tmp_path / "a.ipynb", submission(IMPORT, *cells))
    rows, _ = rows_of(path, lessons, untouched)
    assert [(row.verdict, row.message) for row in rows.values()] == [
        ("!", f"{changed} was changed by this cell or one above.") for changed, _ in CHANGES
    ]


FUNCTION = "def answer(x):\n    return {}\n"
AGREES = "X = type('X', (), {'__e' + 'q__': lambda self, other: True})\n"
ANSWERS_THAT_AGREE = (
    *("answer = X()", "answer = X", "answer = {'a': [X()]}", "answer = functools.partial(X)"),
    *("answer = [X()].pop", "answer = SimpleNamespace(loss=X())", FUNCTION.format("(1, X())")),
)
WATCHED = [  # cell, and a part of the reason; an empty reason for an answer that is accepted
    *((AGREES + each, "an object of `X`, which defines `__eq__`") for each in ANSWERS_THAT_AGREE),
    (f"{AGREES}{FUNCTION.format('map(X, [])')}", "an iterator, `map`, instead of a list"),
    *(
        (f"answer = type('X', (), {{{name!r}: lambda self, *other: 5}})()", f"defines `{name}`")
        for name in ("__torch_function__", "__class__")
    ),
    *(
        (f"answer = type('X', ({kind},), {{}})(5)", f"derived from `{kind.rpartition('.')[2]}`")
        for kind in ("float", "torch.Tensor", "fractions.Fraction")
    ),
    ("class M(type): pass\nanswer = M('X', (), {})", "whose class has a metaclass"),
    ("X = type('X', (), {'__module__': 'builtins', '__le__': 5})\nanswer = X()", "`__le__`"),
    ("from unittest.mock import ANY\nanswer = ANY", "which defines `__eq__`"),
    (FUNCTION.format("setattr(torch, 'equal', print)"), "`equal` was changed while `answer` ran"),
    (
        "old = []\ndef answer(x):\n    torch.equal = old.pop() if old else old.append(torch.equal)",
        "`equal` was changed while `answer` ran",
    ),
    (FUNCTION.format("Mode().__enter__()"), "`answer` left the dispatch mode"),
    (
        FUNCTION.format("torch.autograd.graph.saved_tensors_hooks(id, id).__enter__()"),
        "left the hooks of saved tensors changed",
    ),
    ("import sys\n" + FUNCTION.format("sys.setprofile(None)"), "not watched"),
    (FUNCTION.format("x, None, torch.ones(1), numpy.float32(1), Fraction(1), (1 for _ in '')"), ""),
    (FUNCTION.format("torch.nn.Linear(1, 1), torch.ops.aten.add.default, [range(2)]"), ""),
    ("@dataclasses.dataclass\nclass A:\n    x: int\nanswer = A(1)", ""),
    ("class P(typing.NamedTuple):\n    x: int\nanswer = P(1)", ""),
    ("answer = Mode", ""),
    ("@functools.cache\ndef answer(x):\n    with torch.no_grad():\n        return x", ""),
    ("answer = lambda x: [y for y in (torch.manual_seed(x), torch.rand(1))]", ""),
]
PRELUDE = """import dataclasses, fractions, functools, numpy, torch, typing
from fractions import Fraction
from types import SimpleNamespace
from torch.utils._python_dispatch import TorchDispatchMode

class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))
"""


@pytest.mark.parametrize(("source", "reason"), WATCHED)
def test_grading_watch_reports_answer_that_manipulates_comparison(monkeypatch, source, reason):
    monkeypatch.setattr(torch, "equal", torch.equal)  # some answers replace it
    names = {"__name__": "__main__"}
    exec(PRELUDE, names)
    watch = watching.Watch(names)

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
        while torch._C._autograd._top_saved_tensors_default_hooks(True):
            torch._C._autograd._pop_saved_tensors_default_hooks()
        while _get_current_dispatch_mode_stack():
            _get_current_dispatch_mode_stack()[-1].__exit__(None, None, None)
    assert_reported(found[:1], reason)


def run_cell(source, folder, limits=LIMITS):
    """Return the printed texts of a notebook with one cell."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    (cell,) = Run(notebook, limits, folder).execute().cells
    return [output["text"] for output in cell.outputs]


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


def test_notebook_run_includes_output_arriving_after_cell_ended(tmp_path):
    """The kernel sends it five seconds late; nbclient by itself waits for four."""
    assert run_cell(LATE_OUTPUT, tmp_path) == ["late\n"]


# a process that leaves its session, and whose parent ends
LEAVES = """import subprocess

subprocess.run(["setsid", "-f", "sleep", "1177"])
print("left")"""


@pytest.mark.skipif(sys.platform != "linux", reason="adopting orphans needs prctl of Linux")
def test_notebook_run_kills_child_process_in_new_session(tmp_path):
    assert run_cell(LEAVES, tmp_path) == ["left\n"]
    running = [each.info["cmdline"] for each in psutil.process_iter(["cmdline"])]
    assert ["sleep", "1177"] not in running


@pytest.mark.parametrize(
    ("loop", "verb"),
    [("while True: pass", "computed"), ("import time\ntime.sleep(10**6)", "waited")],
)
def test_notebook_run_stops_at_time_limit(tmp_path, loop, verb):
    """The start of the kernel counts as well, so the limit leaves time for it."""
    with pytest.raises(OutOfTime, match=f"it {verb} for more than 3 seconds"):
        run_cell(loop, tmp_path, Limits(3))


HIDDEN_OS = "import os as hidden"  # a cell of lesson 00 here, so the static check accepts it
WAITS = """from time import sleep

hidden.mkdir({mine!r})
while not hidden.path.exists({other!r}):
    sleep(0.1)"""


def test_parallel_grading_continues_after_one_kernel_dies(tmp_path, run_command, capsys):
    """Two notebooks wait for each other."""
    for mine, other, end in (("a", "b", "hidden._exit(1)"), ("b", "a", "1 / 0")):
        waits = WAITS.format(mine=str(tmp_path / mine), other=str(tmp_path / other))
        hand_in(tmp_path / f"in/{mine}.ipynb", of_lesson_00(HIDDEN_OS, waits, end))
    run_command("--jobs", "2", "--seconds", str(TIMEOUT_SECONDS), "--seed", "5")
    _, first, second = read_csv(tmp_path / "t.csv")
    assert first[:4] == ["a", "00", "–", "!"] and "kernel died" in first[4]
    assert second[:4] == ["b", "00", "–", "✓"] and "to its end" in second[4]
    printed = capsys.readouterr().out
    assert (
        printed.index("--seed 5")
        < printed.index("a: !")
        < printed.index("b: ✓")
        < printed.index("1 ✓, 0 ✗, 0 ○, 1 !")
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "It is not a notebook: "),
        (
            '{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": "5"}',
            "It is not a notebook: AssertionError.",
        ),
        (submission("1", title="# 77 Where / 哪里"), "It is not a lesson of this course"),
        (nbformat.v4.new_notebook(), "It is not a lesson of this course; its title is ''."),
        (submission("1", title="# 0 Start / 开始"), "It is lesson 00, not 01."),
    ],
)
def test_grade_reports_invalid_notebook_in_one_row(tmp_path, lessons, content, message):
    path = hand_in(tmp_path / "a.ipynb", content)
    (row,) = grade.grade(grade.read(path, lessons, wanted="01"), LIMITS, {})
    assert (row.exercise, row.verdict) == ("–", "!") and row.message.startswith(message)
    assert row.message.endswith(".") and "\n" not in row.message


def test_grade_folder_continues_after_invalid_files_and_internal_errors(
    tmp_path, read_once, monkeypatch
):
    """Grade a folder, a broken link, a pipe, a notebook that causes an internal error, and the
    notebooks in a learner's folder."""
    (tmp_path / "a.ipynb").mkdir()
    (tmp_path / "b.ipynb").symlink_to("nowhere")
    os.mkfifo(tmp_path / "c.ipynb")
    hand_in(tmp_path / "d.ipynb", submission("1"))
    for name in ("e.txt", "f/01.ipynb", "f/notes.txt", "f/.old/01.ipynb", ".g/01.ipynb"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("[]", "utf-8")

    def fail(*_):
        raise RuntimeError("an internal\nerror")

    monkeypatch.setattr(grade, "assemble", fail)
    lines = []
    rows = grade.grade_folder(tmp_path, NOTEBOOKS, LIMITS, say=lines.append)
    assert [(row.name, row.message) for row in rows] == [
        ("a", "It is not a notebook: it is a folder."),
        ("b", "It is not a notebook: it is not a file."),
        ("c", "It is not a notebook: it is not a file."),
        ("d", "It could not be graded: RuntimeError: an internal error."),
        ("e.txt", "It is not a notebook: it starts '[]'."),
        ("f/01", "It is not a notebook: it starts '[]'."),
    ]
    assert [line.partition("  (")[0] for line in lines] == [f"{row.name}: !" for row in rows]


def test_interrupted_grading_saves_finished_rows_and_resumes(tmp_path, run_command, monkeypatch):
    """A file that changed after the interruption is graded again.

    The checks draw the same cases as before, because with another seed all files would be graded
    again.
    """
    for name in "abc":
        hand_in(tmp_path / f"in/{name}.ipynb", of_lesson_00(name))
    calls, table = [], tmp_path / "t.csv"

    def grade_until_interrupted(submission, limits, untouched):
        calls.append(submission.name)
        if calls == ["a", "b", "c"]:
            raise KeyboardInterrupt
        return [verdicts.Row(submission.name, "00", "–", "✓", "ok")]

    monkeypatch.setattr(grade, "grade", grade_until_interrupted)
    with pytest.raises(SystemExit, match="stopped; 2 of 3 files are graded, run again to go on"):
        run_command()
    assert [row[3:5] for row in read_csv(table)[1:]] == [
        ["✓", "ok"],
        ["✓", "ok"],
        ["!", "It is not graded yet: grade again."],
    ]
    with (tmp_path / ".t_progress.jsonl").open("a") as file:
        file.write('["half a li')  # the grading was killed
    hand_in(tmp_path / "in/b.ipynb", of_lesson_00("changed"))
    run_command()
    assert calls == ["a", "b", "c", "b", "c"]
    assert [row[3] for row in read_csv(table)[1:]] == ["✓"] * 3
    assert not (tmp_path / ".t_progress.jsonl").exists()


def test_submission_cannot_change_file_of_later_submission(tmp_path, read_once, monkeypatch):
    """Truncate the second file while the first one runs."""
    _, second = (hand_in(tmp_path / f"{name}.ipynb", of_lesson_00("1")) for name in "ab")
    monkeypatch.setattr(grade, "_run", lambda *arguments: second.write_text("") or "")
    rows = grade.grade_folder(tmp_path, NOTEBOOKS, LIMITS, say=list)
    assert [(row.name, row.verdict) for row in rows] == [("a", "✓"), ("b", "✓")]


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("options", "language", "message"),
    [
        ([], "en", "there is nothing in"),
        (["--lesson", "zz"], "en", "there is no lesson 'zz'"),
        (["--seconds", "0"], "en", "limits must be positive"),
        (["--jobs", "0"], "en", "--jobs must be at least 1, got 0"),
        ([], "xx", "COURSE_LANG must be"),  # each right answer would be wrong
    ],
)
def test_grade_command_rejects_invalid_options_in_one_sentence(
    tmp_path, run_command, monkeypatch, options, language, message
):
    monkeypatch.setenv("COURSE_LANG", language)
    with pytest.raises(SystemExit, match=rf"^grade: .*{message}"):
        run_command(*options)
    assert list(tmp_path.iterdir()) == []


# --- the static check ---

REACHES = [  # source, and a part of the reason; an empty reason for an answer that is accepted
    ("lesson_01 = None", "changes lesson_01"),
    ("exercises = None", "changes exercises"),
    ("try: x\nexcept E as exercises: pass", "changes exercises"),
    ("match x:\n    case exercises: pass", "changes exercises"),
    ("import torch as exercises", "changes exercises"),
    ("from torch import exercises", "changes exercises"),
    ("exercises.check_training_state = lambda answer: True", "changes exercises"),
    ("del exercises.check_meter", "changes exercises.check_meter"),
    ("setattr(exercises, 'check_meter', print)", "changes exercises"),
    ("setattr(exercises, name, print)", "sets an attribute with a computed name"),
    ("map(setattr, [exercises], names, values)", "passes setattr on"),
    ("getattr(exercises, '__wrap' + 'ped__')", "reads an attribute with a computed name"),
    ("getattr(exercises, '__wrapped__')", "names __wrapped__"),
    ("c, d = [exercises.check_meter, 1]\nc.check = print", "changes c.check"),
    ("for c in [exercises.check_meter]:\n    c.accepted = True", "changes c.accepted"),
    ("type(exercises.check_meter).tries = 5", "changes type"),
    ("from torch import Tensor as T\nT.equal = print", "changes T.equal"),
    ("x.__class__ = Y", "changes x.__class__"),
    ("one = exercises", "passes exercises on"),
    ("n = next(n for n in x if exercises.check_meter(n))", "tries answers with a check"),
    ("x = exercises.check_meter", "tries answers with a check"),
    *((f"{name}(x)", f"uses {name}") for name in ("__import__", "exec", "globals", "open", "vars")),
    *(
        (f"import numpy\nnumpy.{name}", f"uses {name}")
        for name in (
            *("_C", "ctypeslib", "formatwarning", "library", "os", "testing", "timeit"),
            *("__dict__", "_check", "_disable_current_modes", "disable_current_modes", "f_back"),
            *("Formatter", "tb_frame", "update_wrapper"),
        )
    ),
    *(
        (f"from {path} import {name}", f"imports {path}.{name}")
        for path, name in (
            *(("torch", "save"), ("torch.fx", "GraphModule"), ("importlib", "reload")),
            *(("operator", "attrgetter"), ("functools", "singledispatch")),
            *(("typing", "get_type_hints"), ("unittest.mock", "ANY"), ("numpy.testing", "measure")),
            *(("course_lib.teaching", "exercises"), ("course_lib._torch.modes", "dispatch_modes")),
            ("course_lib.lessons.lesson_01", "gpu"),
        )
    ),
    ("import gc as numbers", "imports gc"),
    ("import course_lib.lessons.lesson_01.exercises", "imports course_lib.lessons.lesson_01"),
    ("import torch\ntorch.load('x')", "reads or writes files"),
    ("import functools\n@functools.wraps(f, assigned=names)\ndef g(): pass", "copies attributes"),
    (
        "from course_lib.lessons import lesson_01 as one\none.exercises",
        "uses one.exercises, a module of the checks",
    ),
    ("match torch:\n    case object(os=x): pass", "reads os"),
    ("class A:\n    __match_args__ = ('_' + 'check',)", "computes __match_args__ of A"),
    ("%%bash\nls", "uses get_ipython"),
    ("import torch\nclass A(torch.Tensor): pass", "derives A from a number or a tensor"),
    ("A = type('A', (float,), {})", "derives a class from a number"),
    ("class A:\n    def __eq__(self, other):\n        return True", "defines __eq__ in A"),
    ("class A:\n    __float__ = lambda self: 5.0", "defines __float__ in A"),
    ("class A(metaclass=B): pass", "gives A a metaclass"),
    ("f = " + "(" * 2000 + ")" * 2000, ""),  # Python cannot run it either
    ("import torch\nfrom course_lib.memory import measure\ntable = {}\ntable[0] = torch", ""),
    ("exercises.check_meter(3)\nexercises.check_meter(4)", ""),
    ("from __future__ import annotations", ""),
    ("%%time\nx = 1", ""),
    ("%matplotlib inline\nx = 1", ""),
    ("class A:\n    __match_args__ = ('x', 'y')", ""),
    ("half a line of (", ""),
    ("def f(context, block):\n    context.block = block\n    return getattr(block, 'bias')", ""),
    ("for p in model.parameters():\n    p.grad = None", ""),
    ("class A:\n    def __init__(self):\n        super().__init__()\n        self.x = 0", ""),
    ("import functools\n@functools.wraps(f)\ndef g(): pass", ""),
    ("import torch\ntorch.testing.assert_close(x, x)", ""),
    ("input = 5\nprint(input, type(input), __name__ == '__main__')", ""),
    # the lesson imports `exercises` and `figures`, and uses `exercises.storages`
    ("figures = None", "changes figures"),
    ("def figures(): pass", "changes figures"),
    ("def f():\n    global figures\n    figures = 1", "changes figures"),
    ("from course_lib.lessons.lesson_01 import figures as f", "imports course_lib.lessons"),
    ("from course_lib.lessons.lesson_01.exercises import _two", "imports course_lib.lessons"),
    ("exercises.right", "uses exercises.right, a part of the checks"),
    ("def f(results):\n    figures = results\n    return figures", ""),  # its own names
    ("gpu = 5\nsimulation = 6", ""),  # files of the lesson that it does not import
    ("from course_lib.lessons.lesson_01 import exercises, figures", ""),
    ("exercises.storages(x)\nfigures.draw_lengths(f, 5)", ""),
]


def assert_reported(found, reason):
    """Assert that one of the reports contains the reason; an empty reason means no report."""
    assert bool(found) == bool(reason), found
    assert not reason or any(reason in str(each) for each in found), found


@pytest.mark.parametrize(("source", "reason"), REACHES)
def test_static_check_reports_lines_that_modify_more_than_answer(source, reason):
    first = "from course_lib.lessons.lesson_01 import exercises, figures"
    imports = submissions._imports(reading.tree_of(first))
    foreign = reading.foreign_names([first, source])
    assert_reported(reading.reaches(source, foreign, imports, {"storages"}), reason)


HELPERS = re.compile(  # lines with which a file of answers makes several answers
    r"imports course_lib\.(lessons|_torch)|changes (wire|room)\.|tries answers with a check"
)


@pytest.mark.parametrize("number", sorted(FILES))
def test_static_check_accepts_solutions_and_right_answers(number):
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


def test_assembled_submission_restores_course_cells_and_includes_added_learner_cells(lessons):
    """Cells of the course replace edited ones, and a cell that reaches beyond does not run."""
    own = "helper = 5"
    notebook = submission(
        own, IMPORT, "import gc", "# mine\nmy_guess = 7", own, RIGHT, "shown = [my_guess, 1]"
    )
    notebook.cells[4].id = "cell-3"  # as the course's cell for the guess
    notebook.cells[-1].id = "cell-4"  # a changed cell of the course
    program = submissions.assemble(notebook, lessons["01"])
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
def test_verdict_distinguishes_unanswered_stub_and_names_skipped_cell(
    source, verdict, message, expected
):
    held = submissions.Held(4, frozenset({"helper"}), reading.Reach(1, "imports gc"))
    program, cell = submissions.Program(held=[held]), nbformat.v4.new_code_cell(source)
    found = grade._reconsider(verdict, message, cell, "answer = None", program)
    assert found[0] == expected[0] and expected[1] in found[1]


def test_grade_accepts_older_edition_in_one_language(tmp_path, lessons, monkeypatch):
    """A cell of an older edition that reaches beyond an answer is skipped without a row."""
    monkeypatch.setattr(grade, "_run", lambda *arguments: "")
    older, changed = (
        nbformat.v4.new_code_cell(f"import gc\n{name} = gc.collect()") for name in ("one", "two")
    )
    older.id, changed.id = id_of(older), id_of(changed)
    changed.source += "  # mine"
    notebook = submission(
        IMPORT,
        older,
        changed,
        "answer = 14320000000\nexercises.check_adapter_bytes(answer)",
        "answer = one\nexercises.check_largest_batch(answer)",
        title="# 1 字节去了哪里？",
    )
    notebook.cells.insert(0, nbformat.v4.new_markdown_cell("*[English](../en/01.ipynb)*"))
    rows, whole = rows_of(hand_in(tmp_path / "a.ipynb", notebook), lessons, {})
    reached = [rows[name].message for name in ("adapter_bytes", "largest_batch", "whole_peak")]
    assert reached == [*["It was not reached."] * 2, "Its check cell is missing."]
    assert whole == ["Cell 5 was not run: line 1 imports gc."]


def test_submission_made_from_unedited_lesson_equals_the_lesson():
    """Compare the cells with the lesson's, because some stubs run and give a wrong number."""
    for number, lesson in submissions.lessons_of(NOTEBOOKS).items():
        assert lesson.stubs.keys() == lesson.calls.keys(), number
        notebook = nbformat.v4.new_notebook(cells=deepcopy(lesson.cells))
        program = submissions.assemble(notebook, lesson)
        assert program.held == [] and program.answers.keys() == lesson.calls.keys()
        sources = [cell.source for cell in program.cells]
        assert sources == [cell.source for cell in lesson.cells]


@pytest.mark.parametrize(
    ("above", "last", "is_found"),
    [
        *((above, CALL, True) for above in ("x = '\ud800'", "x = 1" + " + 1" * 700, "half a (")),
        *(("", last, True) for last in (f"{CALL}  # mine", f"{CALL[:-1]} , )")),
        *(("", last, False) for last in (f"{CALL} or 1", f"x = {CALL}", CALL.replace("mine", "x"))),
    ],
)
def test_submission_check_calls_are_found_only_with_unchanged_arguments(
    lessons, above, last, is_found
):
    places = submissions.cells_of(submission(above, f"mine = 1\n{last}"), lessons["01"])
    assert places.keys() == ({"check_training_state"} if is_found else set())


def test_submission_output_beyond_size_limit_is_delayed(monkeypatch):
    waits = []
    monkeypatch.setattr(fingerprint.time, "sleep", waits.append)
    stream = io.StringIO()
    fingerprint.hold_back(stream, most=10)
    for _ in range(4):
        stream.write("1234")
    assert stream.getvalue() == "1234" * 4 and len(waits) == 2  # after 12 and 16


def test_grade_table_escapes_formulas_and_failed_write_preserves_old_table(tmp_path):
    table = tmp_path / "t.csv"
    sentence = '=HYPERLINK("x"), "quoted"'
    verdicts.write_table([verdicts.Row("+a", "01", "meter", "✓", "ok", sentence)], table)
    _, row = read_csv(table)
    assert row == ["'+a", "01", "meter", "✓", "ok", f"'{sentence}"]
    before = table.read_bytes()
    with pytest.raises(AttributeError):
        verdicts.write_table([None], table)
    assert table.read_bytes() == before and list(tmp_path.iterdir()) == [table]


def test_class_table_counts_verdicts_and_names_most_frequent_mistake(tmp_path):
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
