"""Test the student edition, and the folders and error messages that all editions share."""

import ast
import importlib
import json
import re
import subprocess
import zipfile
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import edition_fixtures
import pytest
import torch
from edition_fixtures import failure, notebook_of, small_course, stored_lessons, write_lesson
from test_readme import differences

nbformat = pytest.importorskip("nbformat")

from exercise_mutants import bound_by

from course_lib.attention import kernels
from course_lib.lessons import lesson
from course_lib.memory import MemoryMeter
from course_lib.schedule import ScheduledSequential, optimal
from publish import cells, student
from publish.cells import STAMP, EditionError, output_folder, remove_guard, without_solutions
from publish.student import check_of

ROOT = edition_fixtures.NOTEBOOKS.parent
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


@pytest.mark.parametrize(
    ("sources", "kept"),
    [
        ([ATTEMPT, SOLUTION, "1 + 1"], [ATTEMPT, "1 + 1"]),
        ([ATTEMPT, GUARDED], [ATTEMPT]),
        ([IN_FUNCTION], [f"def f(x):\n    {cells.STUB}\n\n\nf(1)"]),
        (["### BEGIN SOLUTION\nfigure = draw_it()\n### END SOLUTION"], [cells.COMMENT_STUB]),
    ],
)
def test_student_notebook_contains_no_solutions_or_outputs(sources, kept):
    notebook = notebook_of(*sources)
    result = without_solutions(notebook)
    assert sources_of(result) == kept and sources_of(notebook) == sources
    assert not any(cell.outputs or cell.execution_count for cell in result.cells)


@pytest.mark.parametrize(
    ("sources", "cell"),
    [
        ([ATTEMPT, SOLUTION.replace("### END SOLUTION", "")], 2),
        ([ATTEMPT, SOLUTION.replace("### BEGIN SOLUTION", "")], 2),
        ([ATTEMPT, "### BEGIN SOLUTION\n" + SOLUTION], 2),
        # a marker that is not a line of its own
        ([ATTEMPT, SOLUTION.replace("### END", "pass  ### END")], 2),
        (["# prose\n### BEGIN SOLUTION\n### END SOLUTION"], 1),
        ([f"x = 1\n{SOLUTION}"], 1),  # a stub would stop the notebook
        ([f"if True:\n    x = 1\n    {SOLUTION}".replace("\n", "\n    ")], 1),
        (["1 + 1", SOLUTION], 2),  # no attempt
        # a name that only the solution defines
        ([ATTEMPT, SOLUTION.replace("answer", "total"), "total + 1"], 3),
        # the solution once more, outside of its markers
        ([ATTEMPT, SOLUTION, "answer = sum([10, 20, 12])"], 2),
        ([ATTEMPT, GUARDED, "answer = add(22, 20)\nadd = max"], 2),
        (["# The answer is `answer = sum([10, 20, 12])`.", ATTEMPT, SOLUTION], 3),
    ],
)
def test_malformed_solution_raises_with_number_of_cell(sources, cell):
    with pytest.raises(EditionError, match=rf"cell {cell}\b[^\n]+$"):
        without_solutions(notebook_of(*sources))


def test_failed_build_preserves_old_edition_and_removes_temporary_folder(tmp_path, monkeypatch):
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

    def damage(root):
        notebook = json.loads((root / edition_fixtures.NOTEBOOK).read_text("utf-8"))
        change(notebook)
        (root / edition_fixtures.NOTEBOOK).write_text(json.dumps(notebook), "utf-8")

    return damage


def without(path):
    return lambda root: (root / path).unlink()


def with_file(path, text):
    def damage(root):
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_text(text, "utf-8")

    return damage


def with_cells(*sources):
    return lambda root: write_lesson(root, json.dumps(notebook_of(*sources)))


NOT_RUN = changed(lambda notebook: notebook["cells"][1].update(outputs=[], execution_count=None))
HALF = '# 0 A / 甲\n\n<div lang="en">\n\nOnly English.\n\n</div>'


@pytest.mark.parametrize(
    ("edition", "damage", "reason"),
    [
        ("student", with_file(edition_fixtures.NOTEBOOK, "{"), "00_a.ipynb"),
        ("pages", changed(lambda notebook: notebook.pop("cells")), "00_a.ipynb"),
        ("slides", changed(lambda notebook: notebook.update(nbformat=3)), "00_a.ipynb"),
        ("student", without(edition_fixtures.NOTEBOOK), "must contain lessons"),
        # the script differs, or is missing
        ("student", changed(lambda notebook: notebook["cells"][1].update(source="2")), "cell 2"),
        ("slides", changed(lambda notebook: notebook["cells"].pop()), "cell 2"),
        ("pages", without(edition_fixtures.SCRIPT), "00_a.py is missing"),
        ("pages", NOT_RUN, "cell 2 has"),
        ("slides", changed(lambda notebook: notebook["cells"][1].update(outputs=[])), "no outputs"),
        ("student", with_cells(SOLUTION), "00_a, cell 1"),
        ("student", with_cells("# [gone](gone.md)"), "gone.md"),
        ("pages", with_cells(HALF, "1"), '00_a, a markdown cell has no <div lang="zh">'),
        ("slides", with_cells("# 0 A / 甲", "1"), "NOTES.md with"),
        ("slides", with_file(cells.NOTES, "none"), "NOTES.md has no row for section 0"),
        ("slides", with_file(cells.NOTES, "| 0 | 5 | Why? | 为何？ |"), "no cell has `slide`"),
        ("site", without("README.md"), "README.md"),
        ("site", with_file("README.md", "# S\n\n![map](gone.svg)\n"), "gone.svg"),
        ("site", without(f"old/{STAMP}"), "was not made by an edition"),
    ],
)
def test_building_invalid_course_fails_with_reason_and_preserves_old_edition(
    tmp_path, capsys, monkeypatch, edition, damage, reason
):
    # packing takes seconds, and the errors here occur without it
    monkeypatch.setattr(student, "pack_library", lambda folder: None)
    root = small_course(tmp_path)
    damage(root)
    assert reason in failure(importlib.import_module(f"publish.{edition}"), root, capsys)


@pytest.fixture(scope="module")
def edition(tmp_path_factory):
    folder = tmp_path_factory.mktemp("editions") / "student"
    student.build(edition_fixtures.NOTEBOOKS, folder)
    return folder


@pytest.fixture(scope="module")
def lessons(edition):
    return cells.read_lessons(edition)


@pytest.fixture(scope="module")
def library(edition):
    """Return the wheel."""
    return zipfile.ZipFile(next(edition.glob("*.whl")))


def test_student_readmes_agree_in_both_languages_and_link_existing_files(edition):
    texts = [(edition / name).read_text("utf-8") for name in ("README.md", "README.zh.md")]
    assert differences(*texts) == []
    minutes = re.compile(r"^\| \[(\d\d)\].*?\| (\d+(?: \+ \d+|–\d+)?) \|", re.M)
    for text in texts:
        targets = cells.relative_links(text)
        assert [target for target in targets if not (edition / target).exists()] == []
        assert {path.name for path in edition.glob("*.ipynb")} < set(targets)
        assert minutes.findall(text) == minutes.findall((ROOT / "README.md").read_text("utf-8"))


def test_zip_contains_edition_and_pinned_library(edition, library):
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


def test_wheel_contains_all_files_of_library(library):
    files = [path.relative_to(ROOT) for path in (ROOT / "course_lib").rglob("*") if path.is_file()]
    expected = {path.as_posix() for path in files if "__pycache__" not in path.parts}
    assert {name for name in library.namelist() if name.startswith("course_lib/")} == expected


def test_student_makefile_installs_wheel_with_pins(edition):
    def make(*arguments):
        command = ["make", "lab", *arguments]
        return subprocess.run(command, cwd=edition, capture_output=True, text=True)

    commands = make("-n", "TORCH=cpu").stdout
    cpu = commands.index("--index-url https://download.pytorch.org/whl/cpu torch==")
    wheel = commands.index('install -c constraints.txt -c .venv/torch.txt "./course_lib-')
    assert commands.index("-m venv .venv") < cpu < wheel < commands.index("/jupyter-lab ")
    assert "download.pytorch.org" not in make("-n").stdout
    assert "needs Python 3.11, 3.12 or 3.13" in make("PYTHON=no-such-python").stderr


def definitions_in(source):
    """Yield (name, code) of each function and class."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, ast.unparse(node)


def test_library_for_students_contains_no_solution_functions(library):
    """The library computes the expected results of its checks by other methods."""
    sources = [source for each in stored_lessons().values() for source in sources_of(each)]
    code = [remove_guard(source) for source in sources if "SOLUTION" in source]
    solutions = {found for source in code for found in definitions_in(source)}
    modules = [name for name in library.namelist() if name.endswith(".py")]
    packed = {found for name in modules for found in definitions_in(library.read(name))}
    assert "course_lib/lessons/lesson_02/exercises.py" in modules
    assert len(solutions) > 10 and solutions & packed == set()


def test_student_lessons_contain_checks_and_reason_cells_but_no_solutions(lessons):
    assert lessons.keys() == stored_lessons().keys()
    for name, notebook in lessons.items():
        checks = [check for cell in notebook.cells if (check := check_of(cell))]
        stored = {check_of(cell) for cell in stored_lessons()[name].cells} - {None}
        assert set(checks) == stored and len(checks) == len(stored)
        assert checks or cells.is_project(name)
        assert not any(cell.get("outputs") or "SOLUTION" in cell.source for cell in notebook.cells)
        below = [next_.id for cell, next_ in pairwise(notebook.cells) if check_of(cell)]
        assert below == [student.reason_id(check) for check in checks]
        assert not any(student.reason_in(notebook, check) for check in checks)


def test_learner_explanation_is_found_without_cell_id_by_question_text():
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


def test_nbgrader_metadata_locks_test_cells_and_grades_explanation_cells():
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


def cells_of_attempts(code, known):
    """Return the attempts, the cells that use their names, and the cells that these need.

    Cells are not needed for names that are known.
    """
    defined = set().union(*(bound_by(cell.source) for cell in code if check_of(cell)))
    kept, needed = [], set()
    for cell in reversed(code):
        bound, read = cells.names_in(cell.source)
        if check_of(cell) or bound & needed or (read - bound) & defined:
            kept.append(cell)
            needed = ((needed - bound) | (read - bound)) - known
    return kept[::-1]


def small_meter(*arguments, **options):
    """Return a meter that has measured one operator instead of a training step."""
    with MemoryMeter() as meter:
        torch.ones(1, 1) @ torch.ones(1, 1)
    return meter


# Names of cells that measure for long and depend on no answer. The cells that use them next to an
# answer run with any numbers.
RANKS = {"measured": {"parameter": [1, 1]}, "communicated": {"measured": 1}}
MEASURED = {
    "01": {"metered_step": small_meter},
    "03": {
        "eight": {"each layer": (1, 1), "two layers per checkpoint": (1, 1)},
        "sweep": dict.fromkeys((1, 10, 14, 50, 51), 1),
        "optimal": optimal,
        "scheduled": lambda layers, schedule, x: ScheduledSequential(layers, schedule)(x),
    },
    "04": {"all_above": 1, "measured": dict.fromkeys((1, 4, 16, 32), 1)},
    "05": {"metered_step": small_meter},
    "08": {"two": {mode: RANKS | {"mode": mode} for mode in ("ddp", "zero1", "fsdp", "fsdp-bf16")}},
    "09": {"large": {"LoRA, nf4 weights": SimpleNamespace(at_peak={"parameter": 1})}},
}


@pytest.fixture
def short_measurements(monkeypatch):
    """Replace functions of lesson 02 that measure code which depends on no answer."""
    lesson("02", "exercises")  # keeps the replaced functions
    figures, own_code = lesson("02", "figures"), lesson("02", "own_code")
    costs, cost_of = own_code.Cost(1, 1, 1.0, []), own_code.cost_of

    def cost_of_answer(model, batch, loss):
        return costs if loss is own_code.loss_of_model else cost_of(model, batch, loss)

    monkeypatch.setattr(own_code, "cost_of", cost_of_answer)
    for name in ("measured_step", "metered_step"):
        monkeypatch.setattr(figures, name, small_meter)


@pytest.mark.usefixtures("short_measurements")
@pytest.mark.parametrize("name", edition_fixtures.NAMES)
def test_unsolved_lesson_runs_and_every_exercise_check_rejects_stub(lessons, name, monkeypatch):
    # another test of this process may have imported Triton without its interpreter
    monkeypatch.setattr(kernels, "INTERPRETED", True)
    code = [cell for cell in lessons[name].cells if cell.cell_type == "code"]
    names, verdicts = dict(MEASURED.get(name[:2], {})), {}
    assert names.keys() <= set().union(*(cells.names_in(cell.source)[0] for cell in code))
    for cell in cells_of_attempts(code, names.keys()):
        above, _, call = cell.source.rstrip().rpartition("\n")
        exec(above if check_of(cell) else cell.source, names)
        if check := check_of(cell):
            verdicts[check.removeprefix("check_")] = str(eval(call, names))
    assert [check for check, verdict in verdicts.items() if not verdict.startswith("✗")] == []
