"""Grade a folder of handed-in notebooks, and write the verdicts as one table.

    python -m publish.grade build/handed_in --output build/verdicts.csv --jobs 4

Each notebook runs in a new kernel and an empty folder, on one thread, with limits of time and
memory. A notebook that crashes or never ends does not stop the others. The rows of the table come
from this run, and stored outputs are not read. A second table, `verdicts_by_exercise.csv`, counts
the verdicts of the class on each exercise.

A notebook is a program that runs with your rights. Grading notices edited checks, but malicious
code can read and send your files, or imitate a check. Grade in an account or a container that
contains nothing of yours.
"""

import argparse
import ast
import contextlib
import importlib.util
import json
import logging
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import TypeAlias, cast

from course_lib.labels import current, in_both_languages

from . import not_installed

try:
    import nbformat
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from nbformat import NotebookNode
    from nbformat.reader import parse_json

    from .cells import (
        NOTEBOOKS,
        SOLUTION,
        UNREADABLE,
        EditionError,
        is_solution,
        parse,
        read_lessons,
        without_solutions,
    )
    from .kernels import LIBRARY, Limits, Run, TooMuchOutput
    from .student import check_of, reason_in
    from .verdicts import (
        MARKS,
        RIGHT,
        TROUBLE,
        UNANSWERED,
        WRONG,
        Row,
        by_exercise,
        write_by_exercise,
        write_table,
    )
except ImportError as error:
    if __name__ != "__main__":
        raise
    sys.exit(not_installed("grade", error))

HANDED_IN, TABLE = Path("build/handed_in"), Path("build/verdicts.csv")
_NOT_ANSWERED = tuple(words.removesuffix(".") for words in in_both_languages("Not answered yet."))
_LARGEST = 50 * 10**6  # bytes of a file; a lesson with all outputs has about 1 MB
KEPT_OUT = (
    "A notebook runs with your rights. Edited checks are noticed, but malicious code can read your"
    " files and imitate a check, so grade in an account or a container without anything of yours."
)


_Graded: TypeAlias = tuple[list[Row], float]  # rows of a file, and its seconds
MARKS_SAY = f"{RIGHT} right, {WRONG} wrong, {UNANSWERED} not answered, {TROUBLE} to look at."


@dataclass(frozen=True)
class Lesson:
    """A lesson of the student edition, with which handed-in notebooks are compared.

    Attributes:
        calls: Check -> the line that calls it.
        stubs: Check -> the cell of its exercise before anything is answered.
        roots: `course_lib`, and the modules and names of lessons that the cells import.
        imports: Modules of the library that the cells import from.
    """

    number: str
    calls: dict[str, str]
    stubs: dict[str, str]
    roots: frozenset[str]
    imports: frozenset[str]


@dataclass
class Problem(Exception):
    """A notebook cannot be graded. The message is one sentence."""

    message: str
    lesson: str = "–"


# --- what was handed in ---


def lessons_of(notebooks: Path) -> dict[str, Lesson]:
    """Return the lessons of a folder as a dict from number to lesson."""
    found = {}
    for name, stored in read_lessons(notebooks).items():
        code = [cell for cell in stored.cells if cell.cell_type == "code" and not is_solution(cell)]
        calls = {
            check: cell.source.rstrip().rpartition("\n")[2]
            for cell in code
            if (check := check_of(cell))
        }
        stubs = {
            check: cell.source
            for cell in without_solutions(stored).cells
            if (check := check_of(cell))
        }
        imported = [each for cell in code for each in _imports(parse(cell.source))]
        found[name[:2]] = Lesson(
            name[:2],
            calls,
            stubs,
            frozenset(
                {"course_lib", *(n for m, n in imported if m.startswith("course_lib.lessons"))}
            ),
            frozenset(module for module, _ in imported),
        )
    return found


def read_submission(path: Path, lessons: dict[str, Lesson]) -> tuple[NotebookNode, Lesson]:
    """Read a handed-in file, and find its lesson by the number in its title.

    The course's solutions, which a learner's copy has, are taken out.

    Raises:
        Problem: The file is not a notebook, or not a lesson.
    """
    try:
        if not path.is_file():  # opening a pipe would wait for a writer
            raise ValueError("it is a folder" if path.is_dir() else "it is not a file")
        if path.stat().st_size > _LARGEST:
            raise ValueError(f"it is larger than {_LARGEST // 10**6} MB")
        given = path.read_text("utf-8")
        if not isinstance(parse_json(given), dict):
            raise ValueError(f"it starts {given[:20]!r}")
        with warnings.catch_warnings(action="ignore"):  # nbformat repairs repeated ids
            notebook = cast(NotebookNode, nbformat.reads(given, as_version=4))
            nbformat.validate(notebook)
    except Exception as error:  # nbformat raises many types, also AssertionError
        reason = _one_line(getattr(error, "message", "") or error) or type(error).__name__
        raise Problem(f"It is not a notebook: {reason}.") from None
    title = next((cell.source for cell in notebook.cells if cell.cell_type == "markdown"), "")
    number = re.match(r"# (\d{1,2}) ", title)
    lesson = lessons.get(f"{int(number[1]):02}") if number else None
    if lesson is None:
        raise Problem(f"It is not a lesson of this course; its title is {title[:60]!r}.")
    notebook.cells = [
        cell
        for cell in notebook.cells
        if cell.cell_type != "code"
        or not ("### BEGIN SOLUTION" in cell.source or cell.source.startswith(SOLUTION))
    ]
    return notebook, lesson


def cells_of(notebook: NotebookNode, lesson: Lesson) -> dict[str, int]:
    """Return the place of each check's cell: the last one that calls it as the lesson does."""
    found = {}
    for place, cell in enumerate(notebook.cells):
        for check, call in lesson.calls.items():
            if cell.cell_type == "code" and _last_statement(cell.source) == _bare(call):
                found[check] = place
    return found


def find_tampering(notebook: NotebookNode, lesson: Lesson) -> Iterator[str]:
    """Yield a sentence for each change to the checks, which no answer needs."""
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type != "code":
            continue
        tree = parse(cell.source)
        for module, _ in _imports(tree):
            if module not in lesson.imports and re.match(r"course_lib\.(lessons|teaching)", module):
                yield f"Cell {number} imports {module}, which the lesson does not."
        for node in ast.walk(tree):
            for name in _changed_names(node):
                if name in lesson.roots:
                    yield f"Cell {number} changes {name}, which the lesson imports."


def _changed_names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement binds, or whose attributes it sets."""
    if isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and isinstance(
        node.ctx, ast.Store | ast.Del
    ):
        root = node
        while isinstance(root, ast.Attribute | ast.Subscript):
            root = root.value
        if isinstance(root, ast.Name):
            yield root.id
    elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("setattr", "delattr"):
        first = node.args[0] if node.args else None
        while isinstance(first, ast.Attribute):
            first = first.value
        if isinstance(first, ast.Name):
            yield first.id
    elif isinstance(node, ast.Import | ast.ImportFrom):
        module = getattr(node, "module", "") or ""
        for alias in node.names:
            if not f"{module or alias.name}".startswith("course_lib"):
                yield alias.asname or alias.name


def _imports(tree: ast.AST) -> list[tuple[str, str]]:
    """Return (module, name that it binds) of each import from the library."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(a.name, a.asname or a.name.partition(".")[0]) for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                found.append((_module(node.module, alias.name), alias.asname or alias.name))
    return [each for each in found if each[0].partition(".")[0] == "course_lib"]


@cache
def _module(package: str, name: str) -> str:
    """Return the module that `from package import name` imports from: `package.name`, or `package`
    if `name` is not a module."""
    if package.partition(".")[0] != "course_lib":
        return package
    with contextlib.suppress(ImportError):
        if importlib.util.find_spec(f"{package}.{name}"):
            return f"{package}.{name}"
    return package


def _last_statement(source: str) -> str:
    body = getattr(parse(source), "body", [])
    last = ast.get_source_segment(source, body[-1]) if body else None
    return _bare(last or source.rstrip().rpartition("\n")[2])


def _bare(code: str) -> str:
    with contextlib.suppress(*UNREADABLE):
        code = ast.unparse(ast.parse(code))
    return "".join(code.split())


def _one_line(words: object) -> str:
    return " ".join(str(words).split()).removesuffix(".")[:200]


# --- its run ---


def grade(path: Path, lessons: dict[str, Lesson], limits: Limits, wanted: str = "") -> list[Row]:
    """Return the rows of one file, at least one for any content."""
    name = _format_path(path.name)
    try:
        notebook, lesson = read_submission(path, lessons)
        if wanted and lesson.number != wanted:
            raise Problem(f"It is lesson {lesson.number}, not {wanted}.", lesson.number)
        return _grade_lesson(name, notebook, lesson, limits)
    except Problem as problem:
        return [Row(name, problem.lesson, "–", TROUBLE, problem.message)]
    except Exception as error:  # `ast` may fail on a file, and the others are graded
        problem = f"It could not be graded: {type(error).__name__}: {_one_line(error)}."
        return [Row(name, "–", "–", TROUBLE, problem)]


def _grade_lesson(name: str, notebook: NotebookNode, lesson: Lesson, limits: Limits) -> list[Row]:
    rows = [
        Row(name, lesson.number, "–", TROUBLE, problem)
        for problem in find_tampering(notebook, lesson)
    ]
    places = cells_of(notebook, lesson)
    ticket = secrets.token_hex(8)
    probes = _with_probes(notebook, lesson, places, ticket)
    ended = _run(notebook, limits)
    for check in lesson.calls:
        if check not in places:
            called = any(
                check in cell.source for cell in notebook.cells if cell.cell_type == "code"
            )
            message = (
                "The line that calls its check was edited."
                if called
                else "Its check cell is missing."
            )
            verdict = TROUBLE
        else:
            verdict, message = _verdict(probes[check], lesson, ticket, ended)
            stub = lesson.stubs.get(check, "")
            if verdict == WRONG and (
                message in _NOT_ANSWERED or _bare(probes[check][0].source) == _bare(stub)
            ):
                verdict = UNANSWERED
        exercise = check.removeprefix("check_")
        rows.append(
            Row(name, lesson.number, exercise, verdict, message, reason_in(notebook, check))
        )
    if ended or not lesson.calls:
        message = ended or "It ran to its end; the lesson has no exercises."
        rows.append(Row(name, lesson.number, "–", TROUBLE if ended else RIGHT, message))
    return rows


def _with_probes(
    notebook: NotebookNode, lesson: Lesson, places: dict[str, int], ticket: str
) -> dict[str, tuple[NotebookNode, NotebookNode]]:
    """Insert a cell that reports the verdict after the cell of each check, in place.

    Returns:
        Check -> (its cell, the cell that reports).
    """
    found, cells = {}, []
    behind = {place: check for check, place in places.items()}
    for place, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
        cells.append(cell)
        if check := behind.get(place):
            source = (
                "from publish.fingerprint import report as _report\n"
                f"_report('lesson_{lesson.number}', {check!r}, {ticket!r})"
            )
            probe = nbformat.v4.new_code_cell(source)
            found[check] = (cell, probe)
            cells.append(probe)
    notebook.cells = cells
    return found


def _run(notebook: NotebookNode, limits: Limits) -> str:
    """Run all cells. Return a sentence about what stopped the run, or ""."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            Run(notebook, limits, Path(folder)).execute()
        except CellTimeoutError:
            return f"It was stopped after {limits.seconds} seconds."
        except DeadKernelError:
            return f"Its kernel died: a crash, or more than {limits.gigabytes} GB of memory."
        except TooMuchOutput:
            return "It was stopped: it printed more than any lesson does."
        except Exception as error:  # one notebook must not stop the others
            return f"It could not be run: {type(error).__name__}: {_one_line(error)}."
    return ""


def _verdict(
    cells: tuple[NotebookNode, NotebookNode], lesson: Lesson, ticket: str, ended: str
) -> tuple[str, str]:
    """Return (verdict, message) of a check, whether or not it ran."""
    cell, probe = cells
    errors = [out for out in cell.outputs if out.output_type == "error"]
    verdict_lines = [
        out.data.get("text/plain", "")
        for out in cell.outputs
        if out.output_type == "execute_result"
    ]
    report = _report_of(probe, ticket)
    if report is None and not errors:
        return TROUBLE, f"It was not reached. {ended}".strip()
    if report is not None and (changed := _changed_modules(report["code"], lesson)):
        return TROUBLE, f"{changed[0]} was changed by a cell above."
    if errors:
        return WRONG, f"{errors[0].ename}: {_one_line(errors[0].evalue)}".removesuffix(": ")
    if not verdict_lines or verdict_lines[-1][:1] not in (RIGHT, WRONG):
        return TROUBLE, "The check gave no verdict."
    mark, message = (
        verdict_lines[-1][:1],
        _one_line(verdict_lines[-1][1:].partition("\n")[0]),
    )  # without the hint
    if (mark == RIGHT) != report["accepted"]:
        return TROUBLE, "What is shown is not what the check said."
    return mark, message


def _changed_modules(reported: dict[str, str], lesson: Lesson) -> list[str]:
    """Return the modules of the library whose code differs from that of a new process."""
    untouched = _fingerprints(lesson.imports | {f"course_lib.lessons.lesson_{lesson.number}"})
    return [name for name, code in sorted(reported.items()) if untouched.get(name, code) != code]


@cache
def _fingerprints(modules: frozenset[str]) -> dict[str, str]:
    """Return the fingerprints after the modules are imported, from a new process.

    This process may have changed the library, as tests do.
    """
    lines = [f"import {name}" for name in sorted(modules)]
    lines.append("import json, publish.fingerprint as fingerprint")
    lines.append("print(json.dumps(fingerprint.fingerprints()))")
    paths = [str(LIBRARY), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def _report_of(probe: NotebookNode, ticket: str) -> dict[str, object] | None:
    for output in probe.get("outputs", []):
        for line in output.get("text", "").splitlines() if output.output_type == "stream" else ():
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict) and found.get("ticket") == ticket:
                return found
    return None


# --- the table ---


def _format_path(path: str) -> str:
    """Return a file's path on one line, without `.ipynb`."""
    name = path.removesuffix(".ipynb")
    return name if name.isprintable() else name.encode("unicode_escape").decode()


def _grade_in_time(path: Path, lessons: dict[str, Lesson], limits: Limits, wanted: str) -> _Graded:
    start = time.perf_counter()
    return grade(path, lessons, limits, wanted), time.perf_counter() - start


def _quiet() -> None:
    """Silence the warnings that a killed kernel leaves."""
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)


def _side_by_side(
    jobs: int, work: Callable[[Path], _Graded], paths: list[Path]
) -> Iterator[_Graded]:
    """Yield the results in the order of the paths, from `jobs` processes.

    Threads would not do: a run ends all processes that its own process has started meanwhile.
    """
    if jobs == 1:
        yield from map(work, paths)
        return
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), _quiet)
    try:
        yield from pool.map(work, paths)
    except BrokenProcessPool:
        raise EditionError(
            "a grading process was killed, perhaps for its memory: use fewer --jobs"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def grade_folder(
    folder: Path,
    notebooks: Path,
    limits: Limits,
    wanted: str = "",
    say: Callable[[str], None] = print,
    jobs: int = 1,
) -> list[Row]:
    """Return the rows of all files of a folder, in the order of their names.

    If it has folders, for example one for each learner, their notebooks are graded.

    Raises:
        EditionError: The folder is empty, no lesson has the wanted number, or a grading process was
            killed.
    """
    if wanted and not any(notebooks.glob(f"{wanted}_*.ipynb")):
        raise EditionError(f"there is no lesson {wanted!r} in {notebooks}")
    if jobs < 1:
        raise EditionError(f"--jobs must be at least 1, got {jobs}")
    paths = [
        path
        for entry in sorted(folder.glob("*"))
        if entry.name[:1] != "."
        for path in sorted(entry.glob("[!.]*.ipynb")) or [entry]
    ]
    if not paths:
        raise EditionError(f"there is nothing in {folder}: put the handed-in notebooks there")
    work = partial(_grade_in_time, lessons=lessons_of(notebooks), limits=limits, wanted=wanted)
    rows = []
    graded = _side_by_side(min(jobs, len(paths)), work, paths)
    for path, (found, seconds) in zip(paths, graded, strict=True):
        name = _format_path(path.relative_to(folder).as_posix())
        say(f"{name}: {' '.join(row.verdict for row in found)}  ({seconds:.0f} s)")
        rows += [replace(row, name=name) for row in found]
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0], epilog=KEPT_OUT)
    parser.add_argument("folder", type=Path, nargs="?", default=HANDED_IN)
    parser.add_argument("--output", type=Path, default=TABLE, help="CSV file to write")
    parser.add_argument(
        "--notebooks", type=Path, default=NOTEBOOKS, help="folder of the course's notebooks"
    )
    parser.add_argument("--lesson", default="", help='number of the assigned lesson, such as "02"')
    parser.add_argument(
        "-j", "--jobs", type=int, default=1, help="notebooks that run at the same time"
    )
    parser.add_argument(
        "--seconds", type=int, default=600, help="time limit per notebook, also with --jobs"
    )
    parser.add_argument("--gigabytes", type=int, default=8, help="memory limit (on Linux)")
    chosen = parser.parse_args(arguments)
    _quiet()
    try:
        current()  # raises for an unknown language, in which every check would fail
        limits = Limits(chosen.seconds, chosen.gigabytes)
        rows = grade_folder(
            chosen.folder, chosen.notebooks, limits, chosen.lesson, jobs=chosen.jobs
        )
        counts = by_exercise(rows)
        summary = chosen.output.with_name(f"{chosen.output.stem}_by_exercise.csv")
        write_table(rows, chosen.output)
        write_by_exercise(counts, summary)
    except (EditionError, ValueError, OSError) as error:
        sys.exit(f"grade: {error}")
    except KeyboardInterrupt:
        sys.exit(f"grade: stopped; {chosen.output} is left as it was")
    for line in counts:
        print(line)
    found = ", ".join(f"{sum(row.verdict == mark for row in rows)} {mark}" for mark in MARKS)
    print(f"{chosen.output}, {summary}: {found}. {MARKS_SAY} {KEPT_OUT}")


if __name__ == "__main__":
    main()
