"""The student edition: solutions go, checks stay, and everything runs with nothing solved."""

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from editions import failure, write_lesson
from patience import HANGS_SECONDS

nbformat = pytest.importorskip("nbformat")

from publish import (
    cells,
    student,
)
from publish.cells import (
    STAMP,
    STUB,
    EditionError,
    output_folder,
    read_lessons,
    remove_guard,
    without_guards,
    without_solutions,
)

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ROOT / "notebooks"
NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
ATTEMPT = "answer = None\ncheck_sum(answer)"
SOLUTION = "### BEGIN SOLUTION\nanswer = sum([10, 20, 12])\ncheck_sum(answer)\n### END SOLUTION"


def notebook_of(*sources):
    """Code cells; a text that starts with # and a space is prose."""
    make = nbformat.v4
    cells = [
        make.new_markdown_cell(s) if s.startswith("# ") else make.new_code_cell(s) for s in sources
    ]
    return make.new_notebook(cells=cells)


def sources_of(notebook):
    return [cell.source for cell in notebook.cells]


# --- solutions ---


def test_a_cell_that_is_only_a_solution_goes_and_the_attempt_stays():
    assert sources_of(without_solutions(notebook_of(ATTEMPT, SOLUTION, "1 + 1"))) == [
        ATTEMPT,
        "1 + 1",
    ]


def test_a_solution_inside_a_function_becomes_a_stub_that_raises_when_called():
    source = (
        "def f(x):\n    ### BEGIN SOLUTION\n    y = x + 1\n    return y\n    ### END"
        " SOLUTION\n\n\ncheck_f(f)"
    )
    (stubbed,) = sources_of(without_solutions(notebook_of(source)))
    assert stubbed == f"def f(x):\n    {STUB}\n\n\ncheck_f(f)"
    names = {"check_f": lambda f: None}
    exec(stubbed, names)
    with pytest.raises(NotImplementedError):
        names["f"](1)


def test_a_solution_without_a_check_leaves_a_place_to_write():
    source = "### BEGIN SOLUTION\nfigure = draw_the_timeline()\n### END SOLUTION"
    assert sources_of(without_solutions(notebook_of(source))) == ["# your solution / 你的答案"]


GUARDED = """### BEGIN SOLUTION
if not lesson.check_sum.accepted:

    def add(a, b):
        total = a + b

        return total

    answer = add(22, 20)

check_sum(answer)
### END SOLUTION"""


def test_a_guard_that_keeps_the_readers_work_is_gone_where_nobody_answers():
    plain = remove_guard(GUARDED)
    assert "accepted" not in plain and "\n        total = a + b" not in plain
    assert (
        "SOLUTION\ndef add(a, b):\n    total = a + b\n\n    return total\n\nanswer = add(22, 20)\n"
        in plain
    )
    assert remove_guard("if not ready:\n    wait()") == "if not ready:\n    wait()"
    assert remove_guard(SOLUTION) == SOLUTION
    assert sources_of(without_guards(notebook_of(ATTEMPT, GUARDED))) == [ATTEMPT, plain]


def test_a_guarded_solution_goes_like_any_other_and_may_not_stand_elsewhere():
    assert sources_of(without_solutions(notebook_of(ATTEMPT, GUARDED))) == [ATTEMPT]
    with pytest.raises(EditionError, match="is outside of its markers as well: 'answer = add"):
        without_solutions(notebook_of(ATTEMPT, GUARDED, "answer = add(22, 20)\nadd = max"))


def test_outputs_and_counts_go_and_the_given_notebook_stays_as_it_is():
    notebook = notebook_of("1 + 1")
    notebook.cells[0].outputs, notebook.cells[0].execution_count = (
        [nbformat.v4.new_output("stream", text="2")],
        1,
    )
    cell = without_solutions(notebook).cells[0]
    assert (cell.outputs, cell.execution_count) == ([], None)
    assert notebook.cells[0].outputs


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
        (["# The answer is `answer = sum([10, 20, 12])`.", ATTEMPT, SOLUTION], 3),
    ],
)
def test_what_cannot_be_taken_out_names_its_cell(sources, cell):
    with pytest.raises(EditionError, match=rf"cell {cell}\b[^\n]+$"):
        without_solutions(notebook_of(*sources))


# --- files ---


def test_a_failure_leaves_the_old_folder_as_it_was_and_nothing_beside_it(tmp_path):
    target = tmp_path / "out"
    with output_folder(target) as folder:
        (folder / "old").touch()
    with pytest.raises(KeyboardInterrupt), output_folder(target) as folder:
        (folder / "new").touch()
        raise KeyboardInterrupt
    assert (target / "old").exists() and not (target / "new").exists()
    with output_folder(target) as folder:
        (folder / "new").touch()
    assert (target / "new").exists() and not (target / "old").exists()
    assert list(tmp_path.iterdir()) == [target]


def test_the_old_folder_comes_back_if_the_new_one_cannot_take_its_place(tmp_path, monkeypatch):
    target = tmp_path / "out"
    with output_folder(target) as folder:
        (folder / "old").touch()

    move = Path.rename

    def rename(path, place):
        if path.name == "new":
            raise OSError("no space left")
        return move(path, place)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError, match="no space left"), output_folder(target):
        pass
    assert (target / "old").exists() and list(tmp_path.iterdir()) == [target]


def test_a_folder_that_no_edition_made_is_not_replaced(tmp_path):
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(EditionError, match="was not made by an edition"), output_folder(tmp_path):
        pass
    assert (tmp_path / "thesis.txt").exists()


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("00_a", "{", "00_a.ipynb"),
        ("00_a", nbformat.writes(notebook_of(SOLUTION)), "00_a, cell 1"),
        ("00_a", nbformat.writes(notebook_of("# [gone](gone.md)")), "gone.md"),
        ("notes", "", "notebooks"),
    ],
)
def test_the_program_names_what_is_wrong_in_one_sentence_and_builds_nothing(
    tmp_path, capsys, name, content, named
):
    write_lesson(tmp_path / "notebooks", name, content)
    assert named in failure(student, tmp_path / "notebooks", tmp_path / "out", capsys)


def test_a_notebook_that_its_script_does_not_know_is_refused(tmp_path, capsys):
    folder = tmp_path / "notebooks"
    write_lesson(folder, "01_b", nbformat.writes(notebook_of("1 + 1", "2 + 2")))
    script = folder / "scripts/01_b.py"
    script.write_text(script.read_text("utf-8").replace("2 + 2", "2 + 3"), "utf-8")
    assert "cell 2" in failure(student, folder, tmp_path / "o", capsys)
    script.unlink()
    assert "01_b.ipynb has no script" in failure(student, folder, tmp_path / "o", capsys)


@pytest.mark.parametrize(("edition", "package"), [("slides", "latex2mathml"), ("site", "nbformat")])
def test_a_missing_package_is_one_sentence_that_names_it(edition, package, tmp_path):
    """The package is missing for Python itself: `python -m` imports it before any code of the
    edition's runs."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys; sys.modules[{package!r}] = None", "utf-8"
    )
    command = [
        sys.executable,
        "-m",
        f"publish.{edition}",
        "--output",
        str(tmp_path / "out"),
    ]
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
    student.build(NOTEBOOKS, folder)
    return folder


def test_the_readmes_are_the_students_own_and_say_the_same(edition):
    texts = [(edition / name).read_text("utf-8") for name in ("README.md", "README.zh.md")]
    for text in texts:
        targets = cells.relative_links(text)
        assert targets and [target for target in targets if not (edition / target).exists()] == []
        assert "apt install" in text and "xcode-select" in text
        assert "make test" not in text and "SOLUTION" not in text and "notebooks/" not in text
    same = (
        r"^```.*?^```",
        r"(?<!`)`[^`\n]+`(?!`)",
        r"\b\d[\d.]*\b",
        r"\]\((?!README)([^)]*?)/?(?:deed.zh-hans)?\)",
    )
    for pattern in same:
        english, chinese = (sorted(re.findall(pattern, text, re.M | re.S)) for text in texts)
        assert english == chinese, pattern


def test_the_zip_holds_the_folder_and_a_library_that_has_all_the_pins(edition):
    (packed,) = edition.glob("*.zip")
    names = {name.partition("/")[2] for name in zipfile.ZipFile(packed).namelist()}
    here = {path.relative_to(edition).as_posix() for path in edition.rglob("*") if path.is_file()}
    assert names == here - {packed.name, STAMP}
    assert {"LICENSE", "examples/your_model.py", "docs/out_of_memory.zh.md"} < names
    (wheel,) = edition.glob("*.whl")
    library = zipfile.ZipFile(wheel)
    assert "course_lib/lessons/lesson_02/checks.py" in library.namelist()
    assert not [name for name in library.namelist() if "editions" in name or name.endswith("ipynb")]
    metadata = library.read(next(n for n in library.namelist() if n.endswith("/METADATA"))).decode()
    pins = (edition / "constraints.txt").read_text("utf-8")
    wanted = re.findall(
        r"^Requires-Dist: ([\w-]+)[^;\n]*(?:$|; extra == .course.$)", metadata, re.M
    )
    assert {"torch", "jupyterlab", "transformers"} <= set(wanted)
    assert [name for name in wanted if f"\n{name}==" not in pins] == []
    assert "Author: The authors of" in metadata


def test_the_students_makefile_installs_the_wheel_with_its_pins(edition, tmp_path):
    if shutil.which("make") is None:
        pytest.skip("needs make")

    def commands(*arguments):
        command = ["make", "-n", "lab", *arguments]
        done = subprocess.run(command, cwd=edition, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    said = commands("TORCH=cpu")
    cpu = said.index("--index-url https://download.pytorch.org/whl/cpu torch==")
    wheel = said.index('install -c constraints.txt "./course_lib-')
    assert said.index("-m venv .venv") < cpu < wheel < said.index("/jupyter-lab ")
    assert "download.pytorch.org" not in commands()
    assert "--no-browser 00_start_here.ipynb" in commands("ARGS=--no-browser")
    wrong = subprocess.run(
        ["make", "lab", "PYTHON=no-such-python"], cwd=edition, capture_output=True, text=True
    )
    assert wrong.returncode and "needs Python 3.11, 3.12 or 3.13" in wrong.stderr
    rules = (edition / "Makefile").read_text("utf-8").splitlines()
    assert sum(line[:1] not in "#" for line in rules if line) <= 20
    shown = subprocess.run(["make", "help"], cwd=edition, capture_output=True, text=True).stdout
    assert shown.count("make lab") == 2 and "TORCH=cpu" in shown


@pytest.mark.parametrize("name", ["README.md", "README.zh.md"])
def test_the_students_readme_lists_every_lesson(edition, name):
    listed = re.findall(r"^\| \[\d\d\]\((\S+)\)", (edition / name).read_text("utf-8"), re.M)
    assert listed == sorted(path.name for path in edition.glob("*.ipynb"))
    minutes = r"^\| \[(\d\d)\].*?\| (\d+) \|"
    own = dict(re.findall(minutes, (edition / name).read_text("utf-8"), re.M))
    assert own == dict(re.findall(minutes, (ROOT / name).read_text("utf-8"), re.M))


def test_no_statement_of_a_solution_is_in_the_zip(edition):
    """The library that checks an answer computes what it compares with, in another way."""
    (wheel,) = edition.glob("*.whl")
    library = zipfile.ZipFile(wheel)
    modules = {n: library.read(n).decode() for n in library.namelist() if n.endswith(".py")}
    known = {
        ast.unparse(node)
        for source in modules.values()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    told = []
    for name, notebook in read_lessons(NOTEBOOKS).items():
        for cell in without_guards(notebook).cells:
            if cell.cell_type == "code" and "SOLUTION" in cell.source:
                for node in ast.parse(cell.source).body:
                    if (
                        isinstance(node, ast.FunctionDef | ast.ClassDef)
                        and ast.unparse(node) in known
                    ):
                        told.append(f"{name}: {node.name}")
    assert told == []


# --- reasons, and a department's tool ---


def test_each_exercise_has_a_place_for_a_reason_and_what_stands_there_is_found(edition):
    for name, notebook in read_lessons(edition).items():
        checks = [check for cell in notebook.cells if (check := student.check_of(cell))]
        assert bool(checks) == (name[:2] != "00") and len(checks) == len(set(checks))
        for place, cell in enumerate(notebook.cells):
            if check := student.check_of(cell):
                assert notebook.cells[place + 1].id == student.reason_id(check)
                assert student.reason_in(notebook, check) == ""


def test_a_reason_is_read_with_its_prompt_or_without_and_by_its_prompt_where_ids_are_lost():
    notebook = student.with_reasons(notebook_of("answer = None\nlesson.check_sum(answer)"))
    reason = notebook.cells[1]
    reason.source += "\nBecause both\nare live."
    assert student.reason_in(notebook, "check_sum") == "Because both are live."
    reason.id = "another"
    assert student.reason_in(notebook, "check_sum") == "Because both are live."
    reason.id, reason.source = student.reason_id("check_sum"), "So."
    assert student.reason_in(notebook, "check_sum") == "So."
    assert student.reason_in(notebook, "check_other") == ""


def test_nbgrader_finds_a_locked_test_and_a_reason_for_each_exercise(tmp_path):
    notebook = student.with_nbgrader(
        student.with_reasons(notebook_of("answer = None\nlesson.check_sum(answer)", "1 + 1"))
    )
    nbformat.validate(notebook)
    test, question, reason = notebook.cells[1:4]
    has = [("nbgrader" in cell.metadata) for cell in notebook.cells]
    assert has == [False, True, False, True, False]
    assert question.source == student.PROMPT.format(check="check_sum")
    reason.source = "YOUR ANSWER HERE"  # as generate_assignment leaves it
    assert student.reason_in(notebook, "check_sum") == "YOUR ANSWER HERE"
    assert "assert lesson.check_sum.accepted" in test.source
    for cell, locked in ((test, True), (reason, False)):
        graded = cell.metadata.nbgrader
        assert graded["grade"] and graded["locked"] is locked and graded["solution"] is not locked
        assert graded["cell_type"] == cell.cell_type and graded["points"] == 1
        # the schema's keys, version 3
        assert graded.keys() == {
            *("schema_version", "grade", "solution", "locked", "task", "points"),
            *("grade_id", "cell_type"),
        }
        assert re.fullmatch(r"[a-zA-Z0-9_-]+", graded["grade_id"])
    assert test.metadata.nbgrader.grade_id != reason.metadata.nbgrader.grade_id


def test_all_lessons_are_there_with_their_checks_and_without_solutions_or_outputs(edition):
    assert sorted(path.stem for path in edition.glob("*.ipynb")) == NAMES
    assert (edition / STAMP).is_file() and (edition / "GLOSSARY.md").is_file()
    originals = read_lessons(NOTEBOOKS)
    for name, notebook in read_lessons(edition).items():
        code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
        assert "SOLUTION" not in code
        assert not any(cell.get("outputs") for cell in notebook.cells)
        original = "\n".join(sources_of(originals[name]))
        assert set(re.findall(r"check_\w+", code)) == set(re.findall(r"check_\w+", original)), name


def is_attempt(source):
    return re.search(r"\bcheck_\w+\(", source)


def made_by(source):
    """Names that a cell makes for those below it."""
    made = {
        node.name
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    targets = [
        target
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign)
        for target in node.targets
    ]
    return made | {target.id for target in targets if isinstance(target, ast.Name)}


def about_the_attempts(code):
    """Of a lesson's code cells: attempts with their checks, what uses them below, and what all of
    these need above."""
    made = set().union(*(made_by(source) for source in code if is_attempt(source)))
    kept, needed = [], set()
    for source in reversed(code):
        bound, read = cells._names(source)
        if is_attempt(source) or bound & needed or (read - bound) & made:
            kept.append(source)
            needed = (needed - bound) | (read - bound)
    return kept[::-1]


def run_cell(source, names):
    """Run a cell; the value of its last line, which a notebook shows."""
    *body, last = ast.parse(source).body
    shows = isinstance(last, ast.Expr)
    exec(compile(ast.Module(body if shows else [*body, last], []), "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if shows else None


# Stubs that run are taken for a first, wrong answer; new ones are not to be.
STUBS_THAT_ANSWER = {
    "checkpoint",
    "loss_in_pieces",
    "offloading",
    "loop",
    "log_sum_exp",
    "probabilities",
}


# A whole lesson takes up to a minute; this takes seconds for all.
@pytest.mark.parametrize("name", NAMES)
def test_with_nothing_solved_every_check_says_so_and_no_cell_raises(edition, name):
    code = [cell.source for cell in read_lessons(edition)[name].cells if cell.cell_type == "code"]
    names = {}
    shown = [(source, run_cell(source, names)) for source in about_the_attempts(code)]
    told = {
        re.search(r"\bcheck_(\w+)\(", source)[1]: str(verdict)
        for source, verdict in shown
        if is_attempt(source)
    }
    assert [check for check, verdict in told.items() if not verdict.startswith("✗")] == []
    assert {check for check, verdict in told.items() if "Hint: " in verdict} <= STUBS_THAT_ANSWER, (
        "a stub that returns None or `...`, or raises NotImplementedError, is not answered yet: no"
        " hint goes with it"
    )
