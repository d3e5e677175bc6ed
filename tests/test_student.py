"""The student edition: solutions go, checks stay, and everything runs with nothing solved."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from editions import failure, write_lesson

nbformat = pytest.importorskip("nbformat")
NotebookClient = pytest.importorskip("nbclient").NotebookClient

from course_lib.teaching.editions import student  # noqa: E402 - after the checks for what a GPU machine lacks
from course_lib.teaching.editions.cells import (  # noqa: E402
    STAMP,
    STUB,
    EditionError,
    in_language,
    output_folder,
    read_lessons,
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
    cells = [make.new_markdown_cell(s) if s.startswith("# ") else make.new_code_cell(s) for s in sources]
    return make.new_notebook(cells=cells)


def sources_of(notebook):
    return [cell.source for cell in notebook.cells]


def run(notebook, folder):
    NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()


def verdicts(notebook):
    """What the checks say."""
    texts = [o.data["text/plain"] for cell in notebook.cells for o in cell.get("outputs", []) if "data" in o]
    return [text for text in texts if re.match("[✓✗]", text)]


# --- solutions ---


def test_a_cell_that_is_only_a_solution_goes_and_the_attempt_stays():
    assert sources_of(without_solutions(notebook_of(ATTEMPT, SOLUTION, "1 + 1"))) == [ATTEMPT, "1 + 1"]


def test_a_solution_inside_a_function_becomes_a_stub_that_raises_when_called():
    source = "def f(x):\n    ### BEGIN SOLUTION\n    y = x + 1\n    return y\n    ### END SOLUTION\n\n\ncheck_f(f)"
    (stubbed,) = sources_of(without_solutions(notebook_of(source)))
    assert stubbed == f"def f(x):\n    {STUB}\n\n\ncheck_f(f)"
    names = {"check_f": lambda f: None}
    exec(stubbed, names)
    with pytest.raises(NotImplementedError):
        names["f"](1)


def test_a_solution_without_a_check_leaves_a_place_to_write():
    source = "### BEGIN SOLUTION\nfigure = draw_the_timeline()\n### END SOLUTION"
    assert sources_of(without_solutions(notebook_of(source))) == ["# your solution / 你的解答"]


def test_outputs_and_counts_go_and_the_given_notebook_stays_as_it_is():
    notebook = notebook_of("1 + 1")
    notebook.cells[0].outputs, notebook.cells[0].execution_count = [nbformat.v4.new_output("stream", text="2")], 1
    cell = without_solutions(notebook).cells[0]
    assert (cell.outputs, cell.execution_count) == ([], None)
    assert notebook.cells[0].outputs


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([ATTEMPT, SOLUTION.replace("### END SOLUTION", "")], "cell 2: unbalanced .* BEGIN SOLUTION without END"),
        ([ATTEMPT, SOLUTION.replace("### BEGIN SOLUTION", "")], "cell 2: unbalanced .* END SOLUTION follows END"),
        ([ATTEMPT, "### BEGIN SOLUTION\n" + SOLUTION], "cell 2: unbalanced .* BEGIN SOLUTION follows BEGIN"),
        ([ATTEMPT, SOLUTION.replace("### BEGIN", "## BEGIN")], "cell 2: a solution marker is a line of its own"),
        ([ATTEMPT, SOLUTION.replace("### END", "pass  ### END")], "cell 2: a solution marker is a line of its own"),
        (["# prose\n### BEGIN SOLUTION\n### END SOLUTION"], "cell 1: a solution marker in a cell that is no code"),
        ([f"x = 1\n{SOLUTION}"], "cell 1: a solution outside of a function shares its cell"),
        ([f"if True:\n    x = 1\n    {SOLUTION}".replace("\n", "\n    ")], "cell 1: a solution outside of a function"),
        (["1 + 1", SOLUTION], "cell 2: the code cell above this solution must call check_sum"),
        ([ATTEMPT, SOLUTION.replace("answer", "total"), "total + 1"], "cell 3: uses `total`, which only the solution"),
        ([ATTEMPT, SOLUTION, "answer = sum([10, 20, 12])"], "cell 2 stands outside of its markers .*sum"),
        (["def f():\n    return sum([10, 20, 12])", *[ATTEMPT, "### BEGIN SOLUTION\nreturn_ = sum([10, 20, 12])\n"
          "check_sum(sum([10, 20, 12]))\n### END SOLUTION"], "check_sum(sum([10, 20, 12]))"], "outside of its markers"),
        (["# The answer is `answer = sum([10, 20, 12])`.", ATTEMPT, SOLUTION], "cell 3 stands outside of its markers"),
    ],
)  # fmt: skip
def test_what_cannot_be_taken_out_is_one_sentence(sources, message):
    with pytest.raises(EditionError, match=message) as caught:
        without_solutions(notebook_of(*sources))
    assert "\n" not in str(caught.value)


def test_short_statements_imports_and_the_check_itself_are_no_leak():
    solution = SOLUTION.replace("answer = sum", "from itertools import accumulate\npeaks = []\nanswer = sum")
    assert (
        len(without_solutions(notebook_of(ATTEMPT, solution, "from itertools import accumulate\npeaks = []")).cells)
        == 2
    )


# --- one language ---


def test_a_cell_in_one_language_has_half_of_the_heading_and_one_div():
    cell = '## 1.1 Bytes / 字节\n\n<div lang="en">\n\nA / B.\n\n</div>\n<div lang="zh">\n\n甲 / 乙。\n\n</div>'
    assert in_language(cell, "en") == "## 1.1 Bytes\n\nA / B."
    assert in_language(cell, "zh") == "## 字节\n\n甲 / 乙。"
    assert in_language(cell, "both") == cell
    with pytest.raises(EditionError, match='no <div lang="zh">'):
        in_language('<div lang="en">\n\nA.\n\n</div>', "zh")


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

    def rename(path, place):
        if path.name == "new":
            raise OSError("no space left")
        return os.rename(path, place)

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
    ("name", "content", "message"),
    [
        ("00_a", "{", "00_a.ipynb is no notebook"),
        ("00_a", nbformat.writes(notebook_of(SOLUTION)), "00_a, cell 1: the code cell above"),
        ("00_a", nbformat.writes(notebook_of("# [gone](gone.md)")), "00_a links to gone.md"),
        ("notes", "", "there are no lessons in"),
    ],
)
def test_the_program_says_what_is_wrong_in_one_sentence_and_builds_nothing(tmp_path, capsys, name, content, message):
    write_lesson(tmp_path / "notebooks", name, content)
    assert message in failure(student, tmp_path / "notebooks", tmp_path / "out", capsys)


def test_a_notebook_that_its_script_does_not_know_is_one_sentence(tmp_path, capsys):
    folder = tmp_path / "notebooks"
    write_lesson(folder, "00_a", nbformat.writes(notebook_of("1 + 1")))
    write_lesson(folder, "01_b", nbformat.writes(notebook_of("1 + 1", "2 + 2")))
    script = folder / "scripts/01_b.py"
    script.write_text(script.read_text("utf-8").replace("2 + 2", "2 + 3"), "utf-8")
    assert "differ from cell 2 on: `make notebooks ARGS=01` stores" in failure(student, folder, tmp_path / "o", capsys)
    script.unlink()
    assert "01_b.ipynb has no script" in failure(student, folder, tmp_path / "o", capsys)


def test_the_program_prints_the_sentence_and_nothing_else(tmp_path):
    write_lesson(tmp_path, "00_a", "{")
    command = [sys.executable, "-m", student.__name__, "--notebooks", str(tmp_path), "--output", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=NOTEBOOKS.parent)
    assert done.returncode == 1 and not done.stdout and not (tmp_path / "out").exists()
    assert done.stderr.count("\n") == 1 and "00_a.ipynb is no notebook" in done.stderr


# --- the course's lessons ---


@pytest.fixture(scope="module")
def edition(tmp_path_factory):
    folder = tmp_path_factory.mktemp("editions") / "student"
    student.build(NOTEBOOKS, folder)
    return folder


def test_links_lead_to_files_of_the_edition(edition):
    readme = (edition / "README.md").read_text("utf-8")
    targets = student._relative_links(readme)
    assert len(targets) > len(NAMES)
    assert [target for target in targets if not (edition / target).exists()] == []
    assert "instructor's guide" in " ".join(readme.split()) and not (edition / "INSTRUCTORS.md").exists()


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


# All lessons take minutes; these two are light and have attempts of each kind.
@pytest.mark.parametrize("name", [name for name in NAMES if name[:2] in ("04", "05")])
def test_a_lesson_runs_from_top_to_bottom_with_nothing_solved(edition, name, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(NOTEBOOKS.parent), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(edition / f"{name}.ipynb", as_version=4)
    run(notebook, edition)
    checks = sum(len(re.findall(r"check_\w+\(", cell.source)) for cell in notebook.cells if cell.cell_type == "code")
    assert len(verdicts(notebook)) == checks
    assert all(verdict.startswith("✗") for verdict in verdicts(notebook))


@pytest.mark.parametrize(
    ("edition", "package"),
    [("slides", "latex2mathml"), ("slides", "jupytext"), ("student", "nbformat"), ("student", "jupytext"),
     ("site", "nbformat")],
)  # fmt: skip
def test_a_missing_package_is_one_sentence_that_names_it(edition, package, tmp_path):
    """The package is missing for Python itself: `python -m` imports it before any code of the edition's runs."""
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules[{package!r}] = None", "utf-8")
    command = [sys.executable, "-m", f"course_lib.teaching.editions.{edition}", "--output", str(tmp_path / "out")]
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert package in done.stderr and f"`make {edition}` installs" in done.stderr
    assert not (tmp_path / "out").exists()
