"""The student edition: solutions go, checks stay, and run with nothing solved. Also
what all editions share: their folders, and one sentence for a course that is broken."""

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
from patience import HANGS_SECONDS
from test_readme import differences

nbformat = pytest.importorskip("nbformat")

from publish import cells, student
from publish.cells import STAMP, EditionError, output_folder, remove_guard, without_solutions
from publish.student import check_of

ROOT = Path(__file__).parents[1]
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


def sources_of(notebook):
    return [cell.source for cell in notebook.cells]


# --- solutions ---

IN_FUNCTION = "def f(x):\n    ### BEGIN SOLUTION\n    return x + 1\n    ### END SOLUTION\n\n\nf(1)"


@pytest.mark.parametrize(
    ("sources", "kept"),
    [
        ([ATTEMPT, SOLUTION, "1 + 1"], [ATTEMPT, "1 + 1"]),
        ([ATTEMPT, GUARDED], [ATTEMPT]),
        (
            [IN_FUNCTION],
            [f"def f(x):\n    raise NotImplementedError  {cells.COMMENT_STUB}\n\n\nf(1)"],
        ),
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
    plain = remove_guard(GUARDED)
    assert (
        plain == "### BEGIN SOLUTION\ndef add(a, b):\n    total = a + b\n\n    return total\n\n"
        "answer = add(22, 20)\n\ncheck_sum(answer)\n### END SOLUTION"
    )
    assert remove_guard("if not ready:\n    wait()") == "if not ready:\n    wait()"
    assert sources_of(cells.without_guards(notebook_of(ATTEMPT, GUARDED))) == [ATTEMPT, plain]


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


def write(target, name):
    with output_folder(target) as folder:
        (folder / name).touch()


def test_an_error_leaves_the_old_folder_as_it_was_and_nothing_beside_it(tmp_path, monkeypatch):
    target = tmp_path / "out"
    write(target, "old")
    with pytest.raises(KeyboardInterrupt), output_folder(target) as folder:
        (folder / "new").touch()
        raise KeyboardInterrupt
    assert {path.name for path in target.iterdir()} == {"old", STAMP}
    write(target, "next")
    assert {path.name for path in target.iterdir()} == {"next", STAMP}
    move = Path.rename

    def rename(path, place):
        if path.name == "new":
            raise OSError("no space left")
        return move(path, place)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError, match="no space left"):
        write(target, "last")
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


NOT_RUN = {"outputs": [], "execution_count": None}
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
        *[
            (edition, changed(lambda notebook: notebook["cells"][1].update(NOT_RUN)), "cell 2 has")
            for edition in ("pages", "site", "slides")
        ],
        ("slides", changed(lambda notebook: notebook["cells"][1].update(outputs=[])), "no outputs"),
        ("student", of_cells(SOLUTION), "00_a, cell 1"),
        ("student", of_cells("# [gone](gone.md)"), "gone.md"),
        ("pages", of_cells(HALF, "1"), '00_a, a markdown cell has no <div lang="zh">'),
        ("slides", of_cells("# 0 A / 甲", "1"), "NOTES.md with"),
        ("slides", with_file(cells.NOTES, "none"), "NOTES.md has no row for section 0"),
        (
            "slides",
            with_file(cells.NOTES, "| 0 | 5 | Why? | 为何？ |"),
            "00_a: no cell has `slide`",
        ),
        ("site", without("README.md"), "README.md"),
        ("site", without("README.zh.md"), "README.zh.md"),
        ("site", with_file("README.md", "# S\n\n![map](gone.svg)\n"), "gone.svg"),
        ("site", without(f"old/{STAMP}"), "was not made by an edition"),
    ],
)
def test_what_is_wrong_is_named_in_one_sentence_and_the_old_folder_stays(
    tmp_path, capsys, edition, harm, named
):
    root = small_course(tmp_path)
    harm(root)
    assert named in failure(importlib.import_module(f"publish.{edition}"), root, capsys)


@pytest.mark.parametrize(("edition", "package"), [("slides", "latex2mathml"), ("site", "nbformat")])
def test_a_missing_package_is_one_sentence_that_names_it(edition, package, tmp_path):
    """The package is missing for Python itself: `python -m` imports it before any code of the
    edition's runs."""
    missing = f"import sys; sys.modules[{package!r}] = None"
    (tmp_path / "sitecustomize.py").write_text(missing, "utf-8")
    command = [sys.executable, "-m", f"publish.{edition}", "--output", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=HANGS_SECONDS
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and package in done.stderr
    assert not done.stdout and not (tmp_path / "out").exists()


# --- the course's lessons ---


@pytest.fixture(scope="module")
def edition(tmp_path_factory):
    folder = tmp_path_factory.mktemp("editions") / "student"
    student.build(ROOT / "notebooks", folder)
    return folder


@pytest.fixture(scope="module")
def lessons(edition):
    return cells.read_lessons(edition)


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


def wheel_of(edition):
    return zipfile.ZipFile(next(edition.glob("*.whl")))


def test_the_zip_holds_the_folder_and_a_library_that_has_all_the_pins(edition):
    (packed,) = edition.glob("*.zip")
    names = {name.partition("/")[2] for name in zipfile.ZipFile(packed).namelist()}
    here = {path.relative_to(edition).as_posix() for path in edition.rglob("*") if path.is_file()}
    assert names == here - {packed.name, STAMP}
    assert {"LICENSE", "GLOSSARY.md", "examples/your_model.py", "docs/out_of_memory.zh.md"} < names
    library = wheel_of(edition)
    names = library.namelist()
    assert "course_lib/lessons/lesson_02/checks.py" in names
    metadata = library.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    wanted = re.findall(
        r"^Requires-Dist: ([\w-]+)[^;\n]*(?:$|; extra == .course.$)", metadata, re.M
    )
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
    wheel = said.index('install -c constraints.txt "./course_lib-')
    assert said.index("-m venv .venv") < cpu < wheel < said.index("/jupyter-lab ")
    assert "download.pytorch.org" not in make("-n").stdout
    assert "needs Python 3.11, 3.12 or 3.13" in make("PYTHON=no-such-python").stderr


DEFINITION = ast.FunctionDef | ast.ClassDef


def test_no_function_of_a_solution_is_in_the_library(edition):
    """The library that checks an answer computes what it compares with, in another way."""
    solutions = {
        (node.name, ast.unparse(node))
        for notebook in stored_lessons().values()
        for cell in notebook.cells
        if cell.cell_type == "code" and "SOLUTION" in cell.source
        for node in ast.parse(remove_guard(cell.source)).body
        if isinstance(node, DEFINITION)
    }
    names = {name for name, _ in solutions}
    library = wheel_of(edition)
    told = [
        node.name
        for module in library.namelist()
        if module.endswith(".py")
        for node in ast.walk(ast.parse(library.read(module)))
        if isinstance(node, DEFINITION) and node.name in names
        if (node.name, ast.unparse(node)) in solutions
    ]
    assert len(names) > 10 and told == []


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
        bound, read = cells._names(cell.source)
        if check_of(cell) or bound & needed or (read - bound) & made:
            kept.append(cell)
            needed = (needed - bound) | (read - bound)
    return kept[::-1]


# These stubs run, so a check judges them as wrong answers. Do not add new ones.
STUBS_THAT_ANSWER = {"checkpoint", "loss_in_pieces", "offloading", "loop", "log_sum_exp"}
STUBS_THAT_ANSWER |= {"probabilities"}


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "notebooks").glob("0*")))
def test_with_nothing_solved_every_check_says_so_and_no_cell_raises(lessons, name):
    code = [cell for cell in lessons[name].cells if cell.cell_type == "code"]
    names, told = {}, {}
    for cell in about_the_attempts(code):
        above, _, call = cell.source.rstrip().rpartition("\n")
        exec(above if check_of(cell) else cell.source, names)
        if check := check_of(cell):
            told[check.removeprefix("check_")] = str(eval(call, names))
    assert [check for check, verdict in told.items() if not verdict.startswith("✗")] == []
    assert {check for check, verdict in told.items() if "Hint: " in verdict} <= STUBS_THAT_ANSWER, (
        "a stub that returns None or `...`, or raises NotImplementedError, is not answered yet: no"
        " hint goes with it"
    )
