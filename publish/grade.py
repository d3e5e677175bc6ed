"""Grade a folder of handed-in notebooks, and write the verdicts as one table.

    python -m publish.grade build/handed_in --output build/verdicts.csv --jobs 4

The grader runs the course's own lesson with the learner's answers in it (`submissions.py`). A cell
that does more than an answer may do does not run, and is reported (`reading.py`). Answers are
watched while their checks run (`watching.py`). Checks use random cases, which differ from those in
the notebook. Each notebook runs in a new kernel and an empty folder, on one thread, with limits of
time and memory. A notebook that crashes or never ends does not stop the others. The rows of the
table come from this run, and stored outputs are not read. A second table,
`verdicts_by_exercise.csv`, counts the verdicts of the class on each exercise.

A notebook is a program that runs with your rights. Reading its cells does not keep out malicious
code, which can still read and send your files. Grade in an account or a container that contains
nothing of yours.
"""

import argparse
import json
import logging
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeAlias

import nbformat
from nbclient.exceptions import DeadKernelError
from nbformat import NotebookNode

from course_lib.labels import current, in_both_languages

from .cells import NOTEBOOKS, EditionError, is_project, names_in
from .kernels import LIBRARY, Limits, OutOfTime, Run, TooMuchOutput
from .progress import Progress, key_of
from .student import reason_in
from .submissions import (
    Lesson,
    Problem,
    Program,
    assemble,
    bare,
    lessons_of,
    one_line,
    read_submission,
)
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

HANDED_IN, TABLE = Path("build/handed_in"), Path("build/verdicts.csv")
_NOT_ANSWERED = tuple(words.removesuffix(".") for words in in_both_languages("Not answered yet."))
_WATCH = "from publish.watching import watch as _watch\n_watch()"
_INTERPRET = """import os, torch
if not torch.cuda.is_available(): os.environ["TRITON_INTERPRET"] = "1\""""
_UNDEFINED = re.compile(r"name '(\w+)' is not defined")
KEPT_OUT = (
    "A notebook runs with your rights. Cells that reach beyond an answer do not run, but malicious"
    " code can hide, so grade in an account or a container without anything of yours."
)


_Task: TypeAlias = "tuple[Submission, dict[str, str]]"  # with the fingerprints of unchanged modules
_Graded: TypeAlias = tuple[list[Row], float]  # rows of a file, and the seconds that grading it took
MARKS_SAY = f"{RIGHT} right, {WRONG} wrong, {UNANSWERED} not answered, {TROUBLE} to look at."


@dataclass(frozen=True)
class Submission:
    """A handed-in file: its notebook and lesson, or the reason why it cannot be graded."""

    name: str
    notebook: NotebookNode | None = None
    lesson: Lesson | None = None
    problem: Problem | None = None
    seed: str = ""  # seed of the cases that checks draw; "" for the fixed cases of the lesson


# --- its run ---


def read(path: Path, lessons: dict[str, Lesson], wanted: str = "") -> Submission:
    """Read a handed-in file. Instead of an error, the result has the problem of a bad file."""
    name = _format_path(path.name)
    try:
        notebook, lesson = read_submission(path, lessons)
        if wanted and lesson.number != wanted:
            raise Problem(f"It is lesson {lesson.number}, not {wanted}.", lesson.number)
        return Submission(name, notebook, lesson)
    except Problem as problem:
        return Submission(name, problem=problem)


def grade(submission: Submission, limits: Limits, untouched: dict[str, str]) -> list[Row]:
    """Grade one submission; return at least one row, whatever the file contains.

    Args:
        untouched: Dict from the name of a module to its fingerprint in a new process, in which no
            learner's code has run (see `fingerprints_of`).
    """
    problem = submission.problem
    try:
        if submission.lesson and submission.notebook:
            return _grade_lesson(submission, submission.lesson, limits, untouched)
    except Exception as error:  # one file must not stop the others
        words = f"It could not be graded: {type(error).__name__}: {one_line(error)}."
        problem = Problem(words)
    assert problem
    return [Row(submission.name, problem.lesson, "–", TROUBLE, problem.message)]


def _grade_lesson(
    submission: Submission, lesson: Lesson, limits: Limits, untouched: dict[str, str]
) -> list[Row]:
    name, notebook = submission.name, submission.notebook
    if is_project(lesson.number):
        return [_project_row(name, lesson.number, notebook.metadata["sheet_complete"])]
    program = assemble(notebook, lesson)
    ticket = secrets.token_hex(8)
    probes = _probes(program, lesson, ticket)
    ended = _run(program, probes, limits, submission.seed)
    answering = program.held_answers.values()
    rows = [
        Row(name, lesson.number, "–", TROUBLE, str(held))
        for held in program.held
        if held.changed and held not in answering
    ]
    for check in lesson.calls:
        if check in program.answers:
            cell = program.answers[check]
            report = _report_of(probes[check], ticket)
            if report and report["seed"] != submission.seed:
                report["seen"] = ["The seed of the checks was changed."]
            verdict, message = _verdict(cell, report, ended, untouched)
            verdict, message = _reconsider(verdict, message, cell, lesson.stubs[check], program)
        elif check in program.held_answers:
            verdict, message = TROUBLE, str(program.held_answers[check])
        else:
            code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
            called = any(check in source for source in code)
            message = (
                "The line that calls its check was edited."
                if called
                else "Its check cell is missing."
            )
            verdict = TROUBLE
        exercise = check.removeprefix("check_")
        rows.append(
            Row(name, lesson.number, exercise, verdict, message, reason_in(notebook, check))
        )
    if ended or not lesson.calls:
        message = ended or "It ran to its end; the lesson has no exercises."
        rows.append(Row(name, lesson.number, "–", TROUBLE if ended else RIGHT, message))
    return rows


def _project_row(name: str, number: str, complete: bool) -> Row:
    """Return the row of a project. The row states whether the project's table is complete.

    A project is not run.
    """
    told = "complete" if complete else "not complete"
    message = f"The project was handed in, and its sheet is {told}. Read it."
    return Row(name, number, "–", RIGHT if complete else UNANSWERED, message)


def _reconsider(
    verdict: str, message: str, cell: NotebookNode, stub: str, program: Program
) -> tuple[str, str]:
    """Return a verdict and its message, corrected in two cases.

    The cell may still have the unchanged stub, or it may need a name from a cell that did not run.

    Args:
        verdict, message: The uncorrected pair.
        cell: The cell with the answer.
        stub: Source of the exercise's cell with the stub.
        program: The cells of the submission.
    """
    unchanged = bare(cell.source) == bare(stub)
    if verdict == RIGHT and unchanged:
        return TROUBLE, "Nothing is answered, but the check accepted it."
    if verdict != WRONG:
        return verdict, message
    if message in _NOT_ANSWERED or unchanged:
        return UNANSWERED, message
    needed = names_in(cell.source)[1] | {*_UNDEFINED.findall(message)}
    for held in program.held:
        if names := sorted(held.names & needed):
            return TROUBLE, f"It needs {names[0]}. {held}"
    return verdict, message


def _probes(program: Program, lesson: Lesson, ticket: str) -> dict[str, NotebookNode]:
    """Return a dict from check to its probe: a cell that runs after the answer and reports on it.

    Args:
        program: The cells of the submission.
        lesson: Its lesson.
        ticket: Random text by which the grader recognizes a report of its own probe.
    """
    source = "from publish.watching import report as _report\n_report({!r}, {!r}, {!r})"
    return {
        check: nbformat.v4.new_code_cell(source.format(f"lesson_{lesson.number}", check, ticket))
        for check in program.answers
    }


def _run(program: Program, probes: dict[str, NotebookNode], limits: Limits, seed: str) -> str:
    """Run all cells and probes; return the reason why the run ended early, or "" if it did not."""
    notebook = nbformat.v4.new_notebook()
    behind = {id(cell): probes[check] for check, cell in program.answers.items()}
    for cell in program.cells:
        if probe := behind.get(id(cell)):
            before = nbformat.v4.new_code_cell(_WATCH)
            notebook.cells += [before, cell, probe]
        else:
            notebook.cells.append(cell)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            Run(notebook, limits, Path(folder), seed).execute()
        except OutOfTime as stopped:
            return str(stopped)
        except DeadKernelError:
            return (
                f"Its kernel died. It crashed, or it exceeded the limit of {limits.gigabytes} GB of"
                " memory."
            )
        except TooMuchOutput:
            return "It was stopped: it printed more than any lesson does."
        except Exception as error:  # one notebook must not stop the others
            return f"It could not be run: {type(error).__name__}: {one_line(error)}."
    return ""


def _verdict(
    cell: NotebookNode, report: dict[str, Any] | None, ended: str, untouched: dict[str, str]
) -> tuple[str, str]:
    """Return (verdict, message) of a check, also if the check did not run.

    Args:
        cell: The cell with the answer, after the run.
        report: Report of the probe after this cell, or None if the probe did not run.
        ended: Reason why the run ended early, or "".
        untouched: Dict from the name of a module to its fingerprint in a new process.
    """
    errors = [out for out in cell.outputs if out.output_type == "error"]
    verdict_lines = [
        out.data.get("text/plain", "")
        for out in cell.outputs
        if out.output_type == "execute_result"
    ]
    if report is None and not errors:
        return TROUBLE, f"It was not reached. {ended}".strip()
    if report is not None:
        code = sorted(report["code"].items())
        if changed := [name for name, found in code if untouched.get(name, found) != found]:
            return TROUBLE, f"{changed[0]} was changed by this cell or one above."
        if report["seen"]:
            return TROUBLE, report["seen"][0]
    if errors:
        return WRONG, f"{errors[0].ename}: {one_line(errors[0].evalue)}".removesuffix(": ")
    if not verdict_lines or verdict_lines[-1][:1] not in (RIGHT, WRONG):
        return TROUBLE, "The check gave no verdict."
    mark, message = (
        verdict_lines[-1][:1],
        one_line(verdict_lines[-1][1:].partition("\n")[0]),
    )  # without the hint
    if (mark == RIGHT) != report["accepted"]:
        return TROUBLE, "What is shown is not what the check said."
    return mark, message


def fingerprints_of(lesson: Lesson) -> dict[str, str]:
    """Return the fingerprints of unchanged modules, from a new process with the lesson's imports.

    The present process is not used, because other code in it, such as a test, may have changed the
    library.
    """
    modules = {f"course_lib.lessons.lesson_{lesson.number}", *lesson.imports}
    lines = ["import contextlib, importlib, json, publish.watching as watching"]
    lines += [
        f"with contextlib.suppress(ImportError): importlib.import_module({name!r})"
        for name in sorted(modules)
        if name.partition(".")[0] == "course_lib"
    ]
    if any("TRITON_INTERPRET" in cell.source for cell in lesson.cells):
        lines.insert(0, _INTERPRET)  # as a cell of the lesson does
    lines.append("print(json.dumps(watching.state()))")
    paths = [str(LIBRARY), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def _report_of(probe: NotebookNode, ticket: str) -> dict[str, Any] | None:
    """Return what `watching.report` printed in a probe, or None if there is no such report.

    Reports with another ticket are ignored, because a learner's cell may have printed them.
    """
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


def _grade_timed(task: tuple[Submission, dict[str, str]], limits: Limits) -> _Graded:
    start = time.perf_counter()
    return grade(task[0], limits, task[1]), time.perf_counter() - start


def _silence_asyncio() -> None:
    """Silence the warnings that asyncio logs after a kernel was killed."""
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)


def _run_in_processes(
    jobs: int, work: Callable[[_Task], _Graded], tasks: list[_Task]
) -> Iterator[_Graded]:
    """Run `work` on each task in `jobs` processes, and yield the results in order.

    Threads cannot be used, because a run ends all processes that its own process has started.
    """
    if jobs == 1:
        yield from map(work, tasks)
        return
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), _silence_asyncio)
    try:
        yield from pool.map(work, tasks)
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
    progress: Progress | None = None,
    seed: str = "",
) -> list[Row]:
    """Grade all files of a folder; return their rows, in the order of the file names.

    Notebooks in subfolders, for example one subfolder per learner, are graded as well.

    Raises:
        EditionError: The folder is empty, or no lesson has the wanted number.
        Stopped: The grading was interrupted, or a grading process was killed.
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
    lessons = lessons_of(notebooks)
    # All files are read first, because a running notebook may change files.
    submissions = [
        replace(
            read(path, lessons, wanted),
            name=_format_path(path.relative_to(folder).as_posix()),
            seed=seed,
        )
        for path in paths
    ]
    numbers = {each.lesson.number for each in submissions if each.lesson}
    untouched = {number: fingerprints_of(lessons[number]) for number in sorted(numbers)}
    tasks = [(each, untouched[each.lesson.number] if each.lesson else {}) for each in submissions]
    keys = [_key(*task, limits) for task in tasks]
    done = {at: rows for at, key in enumerate(keys) if (rows := progress and progress.rows(key))}
    left = [at for at in range(len(tasks)) if at not in done]
    graded = _run_in_processes(
        max(1, min(jobs, len(left))),
        partial(_grade_timed, limits=limits),
        [tasks[at] for at in left],
    )
    try:
        for at, (found, seconds) in zip(left, graded, strict=True):
            name = submissions[at].name
            say(f"{name}: {' '.join(row.verdict for row in found)}  ({seconds:.0f} s)")
            done[at] = found
            if progress:
                progress.add(keys[at], found)
    except (KeyboardInterrupt, EditionError, OSError) as error:
        raise Stopped(error, _all_rows(submissions, done), len(done), len(tasks)) from None
    return _all_rows(submissions, done)


def _key(submission: Submission, untouched: dict[str, str], limits: Limits) -> str:
    """Return a hash of everything that determines the rows of a submission in the table."""
    notebook, lesson, problem = submission.notebook, submission.lesson, submission.problem
    cells = [[cell.cell_type, cell.source] for cell in (notebook.cells if notebook else [])]
    course = [cell.source for cell in (lesson.cells if lesson else [])]
    said = problem.message if problem else ""
    return key_of(submission.name, cells, course, said, untouched, asdict(limits), submission.seed)


def _all_rows(submissions: list[Submission], done: dict[int, list[Row]]) -> list[Row]:
    """Return the rows of all files; a file that is not graded yet has one row that says so."""
    rows = []
    for at, each in enumerate(submissions):
        number = each.lesson.number if each.lesson else "–"
        later = Row(each.name, number, "–", TROUBLE, "It is not graded yet: grade again.")
        rows += done.get(at, [later])
    return rows


@dataclass
class Stopped(Exception):
    """Error for a grading that ended before its last file. It contains the rows so far."""

    cause: BaseException
    rows: list[Row]
    graded: int
    files: int

    def __str__(self) -> str:
        reason = "stopped" if isinstance(self.cause, KeyboardInterrupt) else str(self.cause)
        return f"{reason}; {self.graded} of {self.files} files are graded, run again to go on"


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
        "--seconds", type=int, default=600, help="limit of CPU time, and of waiting, per notebook"
    )
    parser.add_argument(
        "--seed",
        help="seed of the cases that checks draw; by default a new one for each complete grading",
    )
    parser.add_argument("--gigabytes", type=int, default=8, help="memory limit (on Linux)")
    chosen = parser.parse_args(arguments)
    _silence_asyncio()
    try:
        current()  # raises for an unknown language, in which every check would fail
        limits = Limits(chosen.seconds, chosen.gigabytes)
        with Progress(chosen.output) as progress:
            seed = progress.seed(chosen.seed)
            print(
                "The checks also draw cases that are not on the page. To draw the same cases again,"
                f" pass --seed {seed}."
            )
            stopped = None
            try:
                rows = grade_folder(
                    chosen.folder,
                    chosen.notebooks,
                    limits,
                    chosen.lesson,
                    jobs=chosen.jobs,
                    progress=progress,
                    seed=seed,
                )
            except Stopped as early:
                stopped, rows = early, early.rows
            counts = by_exercise(rows)
            summary = chosen.output.with_name(f"{chosen.output.stem}_by_exercise.csv")
            write_table(rows, chosen.output)
            write_by_exercise(counts, summary)
            if stopped:
                sys.exit(f"grade: {stopped}")
            progress.finish()
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
