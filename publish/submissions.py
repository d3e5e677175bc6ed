"""Read handed-in notebooks, and put their answers into the course's own lesson.

The grader runs the course's cells in the order of the lesson, with the learner's answers and
guesses instead of the stubs. Cells that the learner added or changed run at their place. A cell
that reaches beyond an answer (see `reading.py`) does not run, and is reported to the instructor.
"""

import ast
import contextlib
import re
import warnings
from collections import defaultdict
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import nbformat
from nbformat import NotebookNode
from nbformat.reader import parse_json

from course_lib.labels import in_both_languages

from .cells import (
    SOLUTION,
    UNREADABLE,
    asks,
    id_of,
    is_project,
    names_in,
    parse,
    read_lessons,
    without_solutions,
)
from .reading import EXERCISES, Reach, foreign_names, reaches
from .student import check_of

_LARGEST = 50 * 10**6  # largest file in bytes; a lesson with all outputs has about 1 MB
_INSTALLS = "install"  # id of the cell that installs the library in the one-language edition


@dataclass(frozen=True)
class Lesson:
    """A lesson of the student edition, into which the grader inserts answers.

    Attributes:
        cells: Code cells of the lesson, with stubs instead of solutions.
        calls: Dict from a check to the line that calls it.
        stubs: Dict from a check to the source of its exercise's cell, with the stub.
        imports: Modules that the cells import, of any library.
        of_exercises: Names of the module `exercises` that the cells use.
    """

    number: str
    cells: list[NotebookNode]
    calls: dict[str, str]
    stubs: dict[str, str]
    imports: frozenset[str]
    of_exercises: frozenset[str]


@dataclass
class Problem(Exception):
    """Error for a notebook that cannot be graded; its message is one sentence."""

    message: str
    lesson: str = "–"


@dataclass(frozen=True)
class Held:
    """A cell that was not run, because it does more than an answer may do (see `reading.py`)."""

    number: int  # number of the cell in the handed-in notebook, from 1
    names: frozenset[str]  # names that the cell binds
    reach: Reach
    changed: bool = True  # False if the id is the hash of the source (see `id_of`)

    def __str__(self) -> str:
        return f"Cell {self.number} was not run: {self.reach}."


@dataclass
class Program:
    """The cells of one submission that run, and the cells that do not run.

    Attributes:
        cells: Cells that run, of the course and the learner, in the order of the lesson.
        answers: Dict from a check to the cell in `cells` that answers it.
        held: Cells that do not run.
        held_answers: Dict from a check to its cell, for answers that do not run.
    """

    cells: list[NotebookNode] = field(default_factory=list)
    answers: dict[str, NotebookNode] = field(default_factory=dict)
    held: list[Held] = field(default_factory=list)
    held_answers: dict[str, Held] = field(default_factory=dict)


# --- the course's lessons ---


def lessons_of(notebooks: Path) -> dict[str, Lesson]:
    """Return the lessons of a folder as a dict from number to lesson."""
    found = {}
    for name, stored in read_lessons(notebooks).items():
        cells = [cell for cell in without_solutions(stored).cells if cell.cell_type == "code"]
        stubs = {check: cell.source for cell in cells if (check := check_of(cell))}
        calls = {check: _last_line(source) for check, source in stubs.items()}
        imports = frozenset(module for cell in cells for module in _imports(parse(cell.source)))
        used = frozenset(_of_exercises("\n".join(cell.source for cell in cells)))
        found[name[:2]] = Lesson(name[:2], cells, calls, stubs, imports, used)
    return found


def _imports(tree: ast.AST) -> set[str]:
    """Return the modules that code imports.

    For `from module import name`, the result also has "module.name".
    """
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def _of_exercises(code: str) -> set[str]:
    """Return the names of the module `exercises` that code uses."""
    return set(re.findall(rf"\b{EXERCISES}\.(\w+)", code))


# --- what was handed in ---


def read_submission(path: Path, lessons: dict[str, Lesson]) -> tuple[NotebookNode, Lesson]:
    """Read a handed-in file, and find its lesson by the number in its title.

    Outputs are removed, as are the course's solutions, which a learner's copy contains.

    Raises:
        Problem: The file is not a notebook, or not a lesson.
    """
    try:
        if not path.is_file():  # opening a named pipe would block
            raise ValueError("it is a folder" if path.is_dir() else "it is not a file")
        if path.stat().st_size > _LARGEST:
            raise ValueError(f"it is larger than {_LARGEST // 10**6} MB")
        given = path.read_text("utf-8")
        if not isinstance(parse_json(given), dict):
            raise ValueError(f"it starts {given[:20]!r}")
        with warnings.catch_warnings(action="ignore"):  # repeated ids cause warnings
            notebook = cast(NotebookNode, nbformat.reads(given, as_version=4))
            nbformat.validate(notebook)
    except Exception as error:  # nbformat raises errors of many types
        reason = one_line(getattr(error, "message", "") or error) or type(error).__name__
        raise Problem(f"It is not a notebook: {reason}.") from None
    texts = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    # in the one-language edition, a link to the other language is above the title
    title = next((text for text in texts if text.startswith("# ")), (*texts, "")[0])
    number = re.match(r"# (\d{1,2}) ", title)
    lesson = lessons.get(f"{int(number[1]):02}") if number else None
    if lesson is None:
        raise Problem(f"It is not a lesson of this course; its title is {title[:60]!r}.")
    if is_project(lesson.number):
        notebook.metadata["sheet_complete"] = _is_sheet_complete(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
            if "### BEGIN SOLUTION" in cell.source or cell.source.startswith(SOLUTION):
                cell.source = ""
    return notebook, lesson


def _is_sheet_complete(notebook: NotebookNode) -> bool:
    """Return whether the stored outputs of a project state that its sheet is complete."""
    from course_lib.lessons.lesson_10.project import say

    shown = [
        output.get("data", {}).get("text/plain", "")
        for cell in notebook.cells
        for output in cell.get("outputs", ())
    ]
    complete = in_both_languages(say("common.complete"))
    return any(words in text for words in complete for text in shown)


def cells_of(notebook: NotebookNode, lesson: Lesson) -> dict[str, int]:
    """Return a dict from check to the index of the last cell that calls it as the lesson does."""
    found = {}
    for place, cell in enumerate(notebook.cells):
        for check, call in lesson.calls.items():
            if cell.cell_type == "code" and _last_statement(cell.source) == bare(call):
                found[check] = place
    return found


def assemble(notebook: NotebookNode, lesson: Lesson) -> Program:
    """Put the answers, guesses and other cells of a submission into the lesson.

    A cell that the learner added runs after the course's cell that it follows in the submission. If
    a submitted cell has the same code as a course's cell, the course's cell runs. A course's cell
    that asks for a guess or a fill-in is replaced by the submitted cell with the same id.
    """
    program, behind = Program(), defaultdict(list)
    checks = {place: check for check, place in cells_of(notebook, lesson).items()}
    at_check = {check: at for at, cell in enumerate(lesson.cells) if (check := check_of(cell))}
    at_code = {bare(cell.source): at for at, cell in reversed([*enumerate(lesson.cells)])}
    at_id = {cell.id: at for at, cell in enumerate(lesson.cells)}
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    foreign = foreign_names([*(cell.source for cell in lesson.cells), *code])
    instead: dict[int, NotebookNode] = {}
    at = -1  # index of the course's cell before the learner's cells; -1 is the beginning
    for place, cell in enumerate(notebook.cells):
        check = checks.get(place)
        if cell.cell_type != "code" or cell.get("id") == _INSTALLS or not bare(cell.source):
            continue
        if check is None and bare(cell.source) in at_code:
            at = at_code[bare(cell.source)]
            continue
        at = at_check[check] if check else at_id.get(cell.get("id"), at)
        if found := reaches(cell.source, foreign, lesson.imports, lesson.of_exercises):
            names = frozenset(names_in(cell.source)[0])
            changed = id_of(cell) != cell.get("id", "").partition("-")[0]
            held = Held(place + 1, names, found[0], changed)
            program.held.append(held)
            if check:
                program.held_answers[check] = held
            continue
        own = nbformat.v4.new_code_cell(cell.source)
        if check:
            program.answers[check] = own
        if check or (at >= 0 and cell.get("id") in at_id and asks(lesson.cells[at])):
            instead[at] = own
        else:
            behind[at].append(own)
    program.cells = behind[-1]
    for at, cell in enumerate(lesson.cells):
        program.cells += [instead.get(at) or deepcopy(cell), *behind[at]]
    return program


# --- comparing code ---


def _last_line(source: str) -> str:
    return source.rstrip().rpartition("\n")[2]


def _last_statement(source: str) -> str:
    body = getattr(parse(source), "body", [])
    last = ast.get_source_segment(source, body[-1]) if body else None
    return bare(last or _last_line(source))


def bare(code: str) -> str:
    """Return code without comments and spaces, to compare two versions of a cell."""
    with contextlib.suppress(*UNREADABLE):
        code = ast.unparse(ast.parse(code))
    return "".join(code.split())


def one_line(words: object) -> str:
    """Return at most 200 characters of a text on one line, without the last full stop."""
    return " ".join(str(words).split()).removesuffix(".")[:200]
