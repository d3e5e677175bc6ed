"""The student edition: solutions go, checks stay, and everything runs with nothing solved."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from editions import failure, write_lesson

nbformat = pytest.importorskip("nbformat")

from course_lib.teaching.editions import (
    cells,
    student,
)
from course_lib.teaching.editions.cells import (
    STAMP,
    STUB,
    EditionError,
    in_language,
    output_folder,
    read_lessons,
    unguarded,
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
    plain = unguarded(GUARDED)
    assert "accepted" not in plain and "\n        total = a + b" not in plain
    assert (
        "SOLUTION\ndef add(a, b):\n    total = a + b\n\n    return total\n\nanswer = add(22, 20)\n"
        in plain
    )
    assert unguarded("if not ready:\n    wait()") == "if not ready:\n    wait()"
    assert unguarded(SOLUTION) == SOLUTION
    assert sources_of(without_guards(notebook_of(ATTEMPT, GUARDED))) == [ATTEMPT, plain]


def test_a_guarded_solution_goes_like_any_other_and_may_not_stand_elsewhere():
    assert sources_of(without_solutions(notebook_of(ATTEMPT, GUARDED))) == [ATTEMPT]
    with pytest.raises(EditionError, match="stands outside of its markers as well: 'answer = add"):
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


# --- one language ---


def test_a_cell_in_one_language_has_half_of_the_heading_and_one_div():
    cell = (
        '## 1.1 Bytes / 字节\n\n<div lang="en">\n\nA / B.\n\n</div>\n<div lang="zh">\n\n甲 / 乙。'
        "\n\n</div>"
    )
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
        f"course_lib.teaching.editions.{edition}",
        "--output",
        str(tmp_path / "out"),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and package in done.stderr
    assert not done.stdout and not (tmp_path / "out").exists()


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
    assert (
        "instructor's guide" in " ".join(readme.split())
        and not (edition / "INSTRUCTORS.md").exists()
    )


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
