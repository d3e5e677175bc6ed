"""The student edition, and what all editions share: folders, and sentences for a broken course."""

import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from itertools import pairwise
from pathlib import Path

import editions
import pytest
from editions import failure, notebook_of, small_course, stored_lessons, write_lesson
from test_readme import differences

nbformat = pytest.importorskip("nbformat")

from course_lib.attention import kernels
from publish import cells, student
from publish.cells import STAMP, EditionError, output_folder, remove_guard, without_solutions
from publish.student import check_of

ROOT = editions.NOTEBOOKS.parent
ATTEMPT = "answer = None\ncheck_sum(answer)"
SOLUTION = "### BEGIN SOLUTION\nanswer = sum([10, 20, 12])\ncheck_sum(answer)\n### END SOLUTION"
GUARDED = """### BEGIN SOLUTION
if not lesson.check_sum.accepted:

    def add(a, b):
        total = a + b

        return total

    answer = add(22, 20)

check_sum(answer)
### END SOLUTION"""


IN_FUNCTION = "def f(x):\n    ### BEGIN SOLUTION\n    return x + 1\n    ### END SOLUTION\n\n\nf(1)"


def sources_of(notebook):
    return [cell.source for cell in notebook.cells]


# --- solutions ---


@pytest.mark.parametrize(
    ("sources", "kept"),
    [
        ([ATTEMPT, SOLUTION, "1 + 1"], [ATTEMPT, "1 + 1"]),
        ([ATTEMPT, GUARDED], [ATTEMPT]),
        ([IN_FUNCTION], [f"def f(x):\n    {cells.STUB}\n\n\nf(1)"]),
        (["### BEGIN SOLUTION\nfigure = draw_it()\n### END SOLUTION"], [cells.COMMENT_STUB]),
    ],
)
def test_solutions_and_outputs_go_and_attempts_stay(sources, kept):
    given = notebook_of(*sources)
    made = without_solutions(given)
    assert sources_of(made) == kept and sources_of(given) == sources
    assert all(cell.outputs for cell in given.cells)
    assert not any(cell.outputs or cell.execution_count for cell in made.cells)


def test_a_guard_that_keeps_the_readers_work_is_gone_where_nobody_answers():
    plain = """### BEGIN SOLUTION
def add(a, b):
    total = a + b

    return total

answer = add(22, 20)

check_sum(answer)
### END SOLUTION"""
    other = "if not ready:\n    wait()"
    found = cells.without_guards(notebook_of(ATTEMPT, GUARDED, other))
    assert sources_of(found) == [ATTEMPT, plain, other]


@pytest.mark.parametrize(
    ("sources", "cell"),
    [
        ([ATTEMPT, SOLUTION.replace("### END SOLUTION", "")], 2),
        ([ATTEMPT, SOLUTION.replace("### BEGIN SOLUTION", "")], 2),
        ([ATTEMPT, "### BEGIN SOLUTION\n" + SOLUTION], 2),
        ([ATTEMPT, SOLUTION.replace("### BEGIN", "## BEGIN")], 2),  # no marker
        # a marker that is no line of its own
        ([ATTEMPT, SOLUTION.replace("### END", "pass  ### END")], 2),
        (["# prose\n### BEGIN SOLUTION\n### END SOLUTION"], 1),
        ([f"x = 1\n{SOLUTION}"], 1),  # a stub would stop the notebook
        ([f"if True:\n    x = 1\n    {SOLUTION}".replace("\n", "\n    ")], 1),
        (["1 + 1", SOLUTION], 2),  # no attempt
        # a name that the solution alone makes
        ([ATTEMPT, SOLUTION.replace("answer", "total"), "total + 1"], 3),
        # the solution once more, outside of its markers
        ([ATTEMPT, SOLUTION, "answer = sum([10, 20, 12])"], 2),
        ([ATTEMPT, GUARDED, "answer = add(22, 20)\nadd = max"], 2),
        (["# The answer is `answer = sum([10, 20, 12])`.", ATTEMPT, SOLUTION], 3),
    ],
)
def test_what_cannot_be_taken_out_names_its_cell(sources, cell):
    with pytest.raises(EditionError, match=rf"cell {cell}\b[^\n]+$"):
        without_solutions(notebook_of(*sources))


# --- what all editions share ---


def test_an_error_leaves_the_old_folder_as_it_was_and_nothing_beside_it(tmp_path, monkeypatch):
    target = tmp_path / "out"

    def write(name):
        with output_folder(target) as folder:
            (folder / name).touch()
        assert {path.name for path in target.iterdir()} == {name, STAMP}

    write("old")
    with pytest.raises(KeyboardInterrupt), output_folder(target) as folder:
        (folder / "new").touch()
        raise KeyboardInterrupt
    assert {path.name for path in target.iterdir()} == {"old", STAMP}
    write("next")
    move = Path.rename

    def rename(path, place):
        if path.name == "new":
            raise OSError("no space left")
        return move(path, place)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError, match="no space left"):
        write("last")
    assert (target / "next").exists() and list(tmp_path.iterdir()) == [target]


def changed(change):
    """Change the stored notebook by hand."""

    def harm(root):
        notebook = json.loads((root / editions.NOTEBOOK).read_text("utf-8"))
        change(notebook)
        (root / editions.NOTEBOOK).write_text(json.dumps(notebook), "utf-8")

    return harm


def without(path):
    return lambda root: (root / path).unlink()


def with_file(path, text):
    def harm(root):
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_text(text, "utf-8")

    return harm


def of_cells(*sources):
    return lambda root: write_lesson(root, json.dumps(notebook_of(*sources)))


NOT_RUN = changed(lambda notebook: notebook["cells"][1].update(outputs=[], execution_count=None))
HALF = '# 0 A / 甲\n\n<div lang="en">\n\nOnly English.\n\n</div>'


@pytest.mark.parametrize(
    ("edition", "harm", "named"),
    [
        ("student", with_file(editions.NOTEBOOK, "{"), "00_a.ipynb"),
        ("site", lambda root: (root / editions.NOTEBOOK).write_bytes(b"\xff"), "00_a.ipynb"),
        ("pages", changed(lambda notebook: notebook.pop("cells")), "00_a.ipynb"),
        ("slides", changed(lambda notebook: notebook.update(nbformat=3)), "00_a.ipynb"),
        ("student", without(editions.NOTEBOOK), "must contain lessons"),
        # the script says something else, or is gone
        ("student", changed(lambda notebook: notebook["cells"][1].update(source="2")), "cell 2"),
        ("slides", changed(lambda notebook: notebook["cells"].pop()), "cell 2"),
        ("pages", without(editions.SCRIPT), "00_a.py is missing"),
        ("site", without(editions.SCRIPT), "00_a.py is missing"),
        *((edition, NOT_RUN, "cell 2 has") for edition in ("pages", "site", "slides")),
        ("slides", changed(lambda notebook: notebook["cells"][1].update(outputs=[])), "no outputs"),
        ("student", of_cells(SOLUTION), "00_a, cell 1"),
        ("student", of_cells("# [gone](gone.md)"), "gone.md"),
        ("pages", of_cells(HALF, "1"), '00_a, a markdown cell has no <div lang="zh">'),
        ("slides", of_cells("# 0 A / 甲", "1"), "NOTES.md with"),
        ("slides", with_file(cells.NOTES, "none"), "NOTES.md has no row for section 0"),
        ("slides", with_file(cells.NOTES, "| 0 | 5 | Why? | 为何？ |"), "no cell has `slide`"),
        ("site", without("README.md"), "README.md"),
        ("site", without("README.zh.md"), "README.zh.md"),
        ("site", with_file("README.md", "# S\n\n![map](gone.svg)\n"), "gone.svg"),
        ("site", without(f"old/{STAMP}"), "was not made by an edition"),
    ],
)
def test_what_is_wrong_is_named_in_one_sentence_and_the_old_folder_stays(
    tmp_path, capsys, monkeypatch, edition, harm, named
):
    # it takes seconds, and what is wrong is found without it
    monkeypatch.setattr(student, "pack_library", lambda folder: None)
    root = small_course(tmp_path)
    harm(root)
    assert named in failure(importlib.import_module(f"publish.{edition}"), root, capsys)


EDITIONS = ["site", "student", "slides", "pages", "grade", "work"]
# What `python -m` does, once for all of them, where a package is missing.
WITHOUT_A_PACKAGE = f"""
import runpy, sys
sys.modules["nbformat"] = None
for edition in {EDITIONS}:
    try:
        runpy.run_module(f"publish.{{edition}}", run_name="__main__", alter_sys=True)
    except SystemExit as stopped:
        print(stopped)"""


def test_a_missing_package_is_one_sentence_that_names_it(tmp_path):
    command = [sys.executable, "-c", WITHOUT_A_PACKAGE]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    said = re.findall("^(.+?): .*nbformat", done.stdout, re.M)
    assert said == EDITIONS and done.stdout.count("\n") == len(EDITIONS), done
    assert not done.stderr and list(tmp_path.iterdir()) == []


# --- the course's lessons ---


@pytest.fixture(scope="module")
def edition(tmp_path_factory):
    folder = tmp_path_factory.mktemp("editions") / "student"
    student.build(editions.NOTEBOOKS, folder)
    return folder


@pytest.fixture(scope="module")
def lessons(edition):
    return cells.read_lessons(edition)


@pytest.fixture(scope="module")
def library(edition):
    """The wheel."""
    return zipfile.ZipFile(next(edition.glob("*.whl")))


def test_the_readmes_are_the_students_own_and_say_the_same(edition):
    texts = [(edition / name).read_text("utf-8") for name in ("README.md", "README.zh.md")]
    assert differences(*texts) == []
    minutes = re.compile(r"^\| \[(\d\d)\].*?\| (\d+) \|", re.M)
    for text in texts:
        targets = cells.relative_links(text)
        assert [target for target in targets if not (edition / target).exists()] == []
        assert {path.name for path in edition.glob("*.ipynb")} < set(targets)
        assert "apt install" in text and "xcode-select" in text
        assert "make test" not in text and "SOLUTION" not in text and "notebooks/" not in text
        assert minutes.findall(text) == minutes.findall((ROOT / "README.md").read_text("utf-8"))


def test_the_zip_holds_the_folder_and_a_library_that_has_all_the_pins(edition, library):
    (packed,) = edition.glob("*.zip")
    names = {name.partition("/")[2] for name in zipfile.ZipFile(packed).namelist()}
    here = {path.relative_to(edition).as_posix() for path in edition.rglob("*") if path.is_file()}
    assert names == here - {packed.name, STAMP}
    assert {"LICENSE", "GLOSSARY.md", "examples/your_model.py", "docs/out_of_memory.zh.md"} < names
    (metadata,) = (name for name in library.namelist() if name.endswith("/METADATA"))
    needed = r"^Requires-Dist: ([\w-]+)[^;\n]*(?:$|; extra == .course.$)"
    wanted = re.findall(needed, library.read(metadata).decode(), re.M)
    assert {"torch", "jupyterlab", "transformers"} <= set(wanted)
    pins = (edition / "constraints.txt").read_text("utf-8")
    assert [name for name in wanted if f"\n{name}==" not in pins] == []


def test_the_students_makefile_installs_the_wheel_with_its_pins(edition):
    if shutil.which("make") is None:
        pytest.skip("needs make")

    def make(*arguments):
        command = ["make", "lab", *arguments]
        return subprocess.run(command, cwd=edition, capture_output=True, text=True)

    said = make("-n", "TORCH=cpu").stdout
    cpu = said.index("--index-url https://download.pytorch.org/whl/cpu torch==")
    wheel = said.index('install -c constraints.txt -c .venv/torch.txt "./course_lib-')
    assert said.index("-m venv .venv") < cpu < wheel < said.index("/jupyter-lab ")
    assert "download.pytorch.org" not in make("-n").stdout
    assert "needs Python 3.11, 3.12 or 3.13" in make("PYTHON=no-such-python").stderr


def definitions_in(source):
    """(name, code) of each function and class."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, ast.unparse(node)


def test_no_function_of_a_solution_is_in_the_library(library):
    """The library that checks an answer computes what it compares with, in another way."""
    sources = [source for each in stored_lessons().values() for source in sources_of(each)]
    code = [remove_guard(source) for source in sources if "SOLUTION" in source]
    solutions = {found for source in code for found in definitions_in(source)}
    modules = [name for name in library.namelist() if name.endswith(".py")]
    told = {found for name in modules for found in definitions_in(library.read(name))}
    assert "course_lib/lessons/lesson_02/exercises.py" in modules
    assert len(solutions) > 10 and solutions & told == set()


def test_lessons_keep_their_checks_with_a_place_for_each_reason_and_no_solution(lessons):
    assert lessons.keys() == stored_lessons().keys()
    for name, notebook in lessons.items():
        checks = [check for cell in notebook.cells if (check := check_of(cell))]
        stored = {check_of(cell) for cell in stored_lessons()[name].cells} - {None}
        assert set(checks) == stored and len(checks) == len(stored)
        assert bool(checks) == (name[:2] != "00")
        assert not any(cell.get("outputs") or "SOLUTION" in cell.source for cell in notebook.cells)
        below = [next_.id for cell, next_ in pairwise(notebook.cells) if check_of(cell)]
        assert below == [student.reason_id(check) for check in checks]
        assert not any(student.reason_in(notebook, check) for check in checks)


# --- reasons, and a department's tool ---


def test_a_reason_is_read_with_its_prompt_or_without_and_by_its_prompt_where_ids_are_lost():
    notebook = student.with_reasons(notebook_of("answer = None\nlesson.check_sum(answer)"))
    reason = notebook.cells[1]
    prompted = f"{reason.source}\nBecause both\nare live."
    for key, source in (
        (reason.id, prompted),
        ("another", prompted),
        (student.reason_id("check_sum"), "Because both are live."),
    ):
        reason.id, reason.source = key, source
        assert student.reason_in(notebook, "check_sum") == "Because both are live."
    assert student.reason_in(notebook, "check_other") == ""


def test_nbgrader_finds_a_locked_test_and_a_reason_for_each_exercise():
    notebook = notebook_of("answer = None\nlesson.check_sum(answer)", "1 + 1")
    notebook = student.with_nbgrader(student.with_reasons(notebook))
    nbformat.validate(notebook)
    _, test, question, reason, _ = notebook.cells
    assert "assert lesson.check_sum.accepted" in test.source
    assert question.source == student.PROMPT.format(check="check_sum")
    reason.source = "YOUR ANSWER HERE"  # as generate_assignment leaves it
    assert student.reason_in(notebook, "check_sum") == "YOUR ANSWER HERE"
    common = {"schema_version": 3, "grade": True, "points": 1, "task": False}
    locked = {"grade_id": "test-check_sum", "cell_type": "code", "locked": True, "solution": False}
    open_ = {"grade_id": "why-check_sum", "cell_type": "markdown", "locked": False}
    graded = [cell.metadata.get("nbgrader") for cell in notebook.cells]
    assert graded == [None, common | locked, None, common | open_ | {"solution": True}, None]


# --- nothing is solved ---


def made_by(source):
    """The names that an attempt defines for the cells below it."""
    top = ast.parse(source).body
    targets = [target for node in top if isinstance(node, ast.Assign) for target in node.targets]
    made = {node.name for node in top if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return made | {target.id for target in targets if isinstance(target, ast.Name)}


def about_the_attempts(code):
    """Of a lesson's code cells: attempts, cells that use their names, and what these need above."""
    made = set().union(*(made_by(cell.source) for cell in code if check_of(cell)))
    kept, needed = [], set()
    for cell in reversed(code):
        bound, read = cells.names_in(cell.source)
        if check_of(cell) or bound & needed or (read - bound) & made:
            kept.append(cell)
            needed = (needed - bound) | (read - bound)
    return kept[::-1]


# These stubs run, so a check judges them as wrong answers. Do not add new ones.
STUBS_THAT_ANSWER = {"checkpoint", "loss_in_pieces", "offloading", "loop", "log_sum_exp"}
STUBS_THAT_ANSWER |= {"probabilities"}


@pytest.mark.parametrize("name", editions.NAMES)
def test_with_nothing_solved_every_check_says_so_and_no_cell_raises(lessons, name, monkeypatch):
    # another test of this process may have imported Triton without its interpreter
    monkeypatch.setattr(kernels, "INTERPRETED", True)
    code = [cell for cell in lessons[name].cells if cell.cell_type == "code"]
    names, told = {}, {}
    for cell in about_the_attempts(code):
        above, _, call = cell.source.rstrip().rpartition("\n")
        exec(above if check_of(cell) else cell.source, names)
        if check := check_of(cell):
            told[check.removeprefix("check_")] = str(eval(call, names))
    assert [check for check, verdict in told.items() if not verdict.startswith("✗")] == []
    # any other stub is not answered yet, and no hint goes with it
    assert {check for check, verdict in told.items() if "Hint: " in verdict} <= STUBS_THAT_ANSWER
