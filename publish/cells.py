"""Functions that all editions use, such as the student notebooks, the slides and the website.

They replace solutions by stubs, check notebooks, and write output folders. An output folder is
written completely or not at all.
"""

import argparse
import ast
import hashlib
import re
import shutil
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from pathlib import Path

import nbformat
from nbformat import NotebookNode

NOTEBOOKS = Path("notebooks")
#: Numbers of the notebooks that are projects with the learner's own model. A project has no deck,
#: sections in depth, exercises with a check, row in the ledger, or stated minutes.
PROJECTS = frozenset({"10"})
# Paths of the pages that the lessons link to, relative to the project's folder.
PAGES = tuple(
    f"docs/{name}*.md" for name in ("exact", "fsdp2", "installing", "models", "out_of_memory")
)
NOTES = "publish/NOTES.md"  # path of the speaker notes in the project
COMMENT_STUB = "# your solution / 你的答案"
# Tags of cells in which learners set values, such as guesses, that no check tests.
ASKING_TAGS = frozenset({"guess", "fill-in"})
# First line of a solution in the learner's copy. JupyterLab shows only this line of a folded cell.
SOLUTION = "# Solution: click the three dots to open / 答案：点三个点展开"
STUB_NAME = "NotImplementedError"
STUB = f"raise {STUB_NAME}  {COMMENT_STUB}"
# Marks a folder that an edition has written, which the next run may therefore replace.
STAMP = ".course-edition"

_MARKER = re.compile(r"^(\s*)### (BEGIN|END) SOLUTION\s*$")
# Matches a guard (an `if` that keeps an accepted answer from being overwritten) and its block.
_GUARD = re.compile(r"^if not [\w.]+\.accepted:\n\n?((?:(?: {4}.*)?\n)+)", re.M)
_LINK = re.compile(r"\]\(([^)\s#]+)[^)]*\)|(?:src|href)=\"([^\"#]+)")
# Keys of a notebook's metadata that an edition keeps. Only publish.notebooks needs other keys.
_NOTEBOOK_METADATA = ("kernelspec", "language_info")
# Errors of `ast` for text that is not Python, is not Unicode, or is nested too deeply.
UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
_SHORT = 20  # characters; a shorter statement, such as `peaks = []`, gives no solution away


class EditionError(ValueError):
    """Error for a notebook or folder from which no edition can be made."""


# --- solutions ---


def remove_guard(source: str) -> str:
    """Return code without the guard that keeps a learner's accepted answer from being overwritten.

    Editions that show the solution need no guard.
    """
    return _GUARD.sub(lambda found: textwrap.dedent(found[1]), source + "\n").removesuffix("\n")


def without_guards(notebook: NotebookNode) -> NotebookNode:
    """Return a copy of the notebook without guards, for editions that are read and not run."""
    notebook = deepcopy(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.source = remove_guard(cell.source)
    return notebook


def without_markers(source: str) -> str:
    """Return code without the lines that mark the start and end of a solution."""
    return "\n".join(line for line in source.splitlines() if not _MARKER.match(line)).strip("\n")


def is_solution(cell: NotebookNode) -> bool:
    """Return whether a cell contains nothing except a solution."""
    return (
        cell.cell_type == "code"
        and "### BEGIN SOLUTION" in cell.source
        and not _take_out(cell.source)[0].strip()
    )


def id_of(cell: NotebookNode) -> str:
    """Return a hash of a cell's type and source, which is the cell's id in a lesson.

    A learner has changed a cell if its id differs from this hash. If two cells are equal,
    `read_script` appends `-2` to the id of the second cell.
    """
    return hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:12]


def asks(cell: NotebookNode) -> bool:
    """Return whether a cell asks for a guess, or for a fill-in that no check tests."""
    return not ASKING_TAGS.isdisjoint(cell.metadata.get("tags", ()))


def without_solutions(notebook: NotebookNode) -> NotebookNode:
    """Return a copy of the notebook with stubs instead of the solutions, and without outputs.

    A stub is a line that the learner replaces. Inside a function it is `raise NotImplementedError`,
    which the checks report. A cell that contains only a solution is removed, because the cell above
    it has the learner's attempt and the check.

    Raises:
        EditionError: Solutions cannot be removed. For example, their markers are unbalanced, a stub
            would stop the notebook, a later cell needs a name that only a solution defines, or code
            of a solution is also outside of the markers.
    """
    notebook = deepcopy(notebook)
    solutions, kept = [], []
    for number, cell in enumerate(notebook.cells, 1):
        before = [other.source for other in kept if other.cell_type == "code"]
        with _in_cell(number):
            solution = _replace_solution(cell, before[-1] if before else "")
        if solution is None or cell.source.strip():
            kept.append(cell)
        if solution is not None:
            solutions.append((number, solution))
        elif cell.cell_type == "code":
            _check_names(number, cell.source, before, solutions)
    statements = [
        (number, line) for number, solution in solutions for line in _own_statements(solution)
    ]
    for cell in kept:
        _check_leaks(cell, statements)
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    notebook.cells = kept
    return notebook


@contextmanager
def _in_cell(number: int) -> Iterator[None]:
    try:
        yield
    except EditionError as error:
        raise EditionError(f"cell {number}: {error}") from None


def _take_out(source: str, stub: str = "") -> tuple[str, str]:
    """Return (source with stubs instead of solutions, the solutions).

    A stub is indented like the marker that it replaces.
    """
    kept, taken, inside = [], [], False
    for line in source.splitlines():
        marker = _MARKER.match(line)
        if marker is None and "SOLUTION" in line:
            raise EditionError(
                f"a solution marker must be on a line of its own, got {line.strip()!r}"
            )
        if marker is None:
            (taken if inside else kept).append(line)
            continue
        if inside == (marker[2] == "BEGIN"):
            raise EditionError(
                f"unbalanced solution markers, {marker[2]} SOLUTION follows"
                f" {('END', 'BEGIN')[inside]}"
            )
        inside = not inside
        if inside:
            kept.append(marker[1] + stub)
    if inside:
        raise EditionError("unbalanced solution markers, BEGIN SOLUTION without END SOLUTION")
    return "\n".join(kept), "\n".join(taken)


def _replace_solution(cell: NotebookNode, attempt: str) -> str | None:
    """Replace the solution in the cell by a stub, and return the solution.

    A cell that contains only a solution becomes empty. Return None if the cell has no solution.
    """
    if "SOLUTION" not in cell.source:
        return None
    if cell.cell_type != "code":
        raise EditionError(
            f"a solution marker must be in a code cell, got one in a {cell.cell_type} cell"
        )
    rest, solution = _take_out(remove_guard(cell.source))
    if not rest.strip():
        lacking = _checks(solution) - _checks(attempt)
        if lacking:
            raise EditionError(
                f"the code cell above this solution must call {sorted(lacking)[0]} with an attempt"
            )
        cell.source = "" if _checks(solution) else COMMENT_STUB
    else:
        cell.source, _ = _take_out(cell.source, stub=STUB)
        if STUB_NAME in {getattr(node, "id", None) for node in _run_at_once(parse(cell.source))}:
            raise EditionError(
                "a solution outside of a function shares its cell with other code, where a stub"
                " would stop the notebook: put it into a cell of its own"
            )
    for folded in ("source_hidden", "outputs_hidden"):
        cell.metadata.get("jupyter", {}).pop(folded, None)
    return solution


def _run_at_once(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run when the cell runs: all nodes outside of function bodies."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from _run_at_once(child)


def parse(source: str) -> ast.AST:
    """Return the syntax tree of code, or an empty tree if the code is not Python (a magic)."""
    try:
        return ast.parse(source)
    except UNREADABLE:
        return ast.Module([], [])


def _checks(source: str) -> set[str]:
    return set(re.findall(r"\bcheck_\w+", source))


@cache  # each cell is compared with all later ones
def names_in(source: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return (names that the code binds, names that it reads)."""
    bound, read = set(), set()
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
    return frozenset(bound), frozenset(read)


def _check_names(
    number: int, source: str, before: list[str], solutions: list[tuple[int, str]]
) -> None:
    """Check that a cell reads no name that only a solution binds."""
    bound, read = names_in(source)
    wanted = read - bound - set().union(*(names_in(other)[0] for other in before))
    for solution_number, solution in solutions:
        for name in sorted(wanted & names_in(solution)[0]):
            raise EditionError(
                f"cell {number}: uses `{name}`, which only the solution in cell {solution_number}"
                " defines"
            )


def _own_statements(solution: str) -> Iterator[str]:
    """Yield the statements of a solution, without short statements, imports and calls of checks."""
    for node in getattr(parse(solution), "body", []):
        statement = ast.unparse(node)
        own_check = isinstance(node, ast.Expr) and re.fullmatch(
            r"[\w.]*check_\w+\((\w+|\(\w+(, \w+)*\))\)", statement
        )
        is_import = isinstance(node, ast.Import | ast.ImportFrom)
        if not (is_import or own_check or len(statement) < _SHORT):
            yield statement


def _check_leaks(cell: NotebookNode, statements: list[tuple[int, str]]) -> None:
    """Raise an error if a cell of code or prose has a solution's statement outside of markers."""
    here = {
        ast.unparse(node) for node in ast.walk(parse(cell.source)) if isinstance(node, ast.stmt)
    }
    for number, statement in statements:
        if statement in here or (cell.cell_type == "markdown" and statement in cell.source):
            line = statement.splitlines()[0]
            raise EditionError(
                f"the solution in cell {number} is outside of its markers as well: {line!r}"
            )


# --- files ---


def read_lessons(folder: Path = NOTEBOOKS) -> dict[str, NotebookNode]:
    """Return a dict from the name of each notebook of a folder to the notebook.

    Raises:
        EditionError: The folder has no notebooks, or a file is not a notebook.
    """
    paths = sorted(folder.glob("[0-9]*.ipynb"))
    if not paths:
        raise EditionError(
            f"{folder} must contain lessons, and has none: name the course's folder of notebooks"
        )
    return {path.stem: _read_notebook(path) for path in paths}


def is_project(name: str) -> bool:
    """Return whether the notebook of this name, such as "10_your_model", is a project."""
    return name[:2] in PROJECTS


def _read_notebook(path: Path) -> NotebookNode:
    notebook = _valid_notebook(path)
    kept = {key: notebook.metadata[key] for key in _NOTEBOOK_METADATA if key in notebook.metadata}
    notebook.metadata = nbformat.from_dict(kept)
    return notebook


def _valid_notebook(path: Path) -> NotebookNode:
    try:
        # nbformat.read would log an invalid notebook instead of raising
        notebook = nbformat.v4.reads(path.read_text(encoding="utf-8"))
        if notebook.get("nbformat") != 4:
            raise ValueError(f"nbformat must be 4, got {notebook.get('nbformat')}")
        nbformat.validate(notebook)
    except (ValueError, AttributeError, TypeError, nbformat.ValidationError) as error:
        reason = str(error).splitlines()[0].removesuffix(".")[:100]
        raise EditionError(f"{path} is not a notebook ({reason}): {stored_again(path)}") from None
    return notebook


def stored_again(path: Path) -> str:
    """Return the advice that an error gives for a notebook that has to be made again."""
    return f"`make notebooks ARGS={path.stem[:2]}` stores it again"


def check_twins(folder: Path, lessons: dict[str, NotebookNode]) -> None:
    """Check that the notebooks have the same cells as their scripts.

    Raises:
        EditionError: A notebook has no script, or its script is broken or has other cells.
    """
    import jupytext

    for name, notebook in lessons.items():
        path, script = folder / f"{name}.ipynb", folder / "scripts" / f"{name}.py"
        if not script.exists():
            raise EditionError(f"{path} has no script: {script} is missing")
        try:
            twin = jupytext.read(script, fmt="py:percent")
        except Exception as error:  # jupytext's parsers raise many types
            raise EditionError(f"{script} is not a jupytext script: {error}") from None
        here, there = (
            [(cell.cell_type, cell.source.strip()) for cell in book.cells]
            for book in (notebook, twin)
        )
        if here != there:
            pairs = enumerate(zip(here, there, strict=False), 1)
            number = next(
                (number for number, (one, other) in pairs if one != other),
                min(len(here), len(there)) + 1,
            )
            raise EditionError(
                f"{path} and {script} differ from cell {number} on: {stored_again(path)}"
            )


def check_outputs(folder: Path, lessons: dict[str, NotebookNode]) -> None:
    """Check that the notebooks have outputs, because an edition runs no cells.

    Raises:
        EditionError: A notebook was never run, or has no outputs.
    """
    for name, notebook in lessons.items():
        path = folder / f"{name}.ipynb"
        code = [
            (number, cell)
            for number, cell in enumerate(notebook.cells, 1)
            if cell.cell_type == "code"
        ]
        never_run = [
            number for number, cell in code if cell.source.strip() and cell.execution_count is None
        ]
        if never_run:
            raise EditionError(
                f"{path}: cell {never_run[0]} has never been run: {stored_again(path)}"
            )
        if not any(cell.outputs for _, cell in code):
            raise EditionError(f"{path} has no outputs: {stored_again(path)}")


@contextmanager
def output_folder(target: Path) -> Iterator[Path]:
    """Yield a new folder to write into, which replaces the target when the `with` block ends.

    After an error the new folder is removed and the target stays as it was.

    Raises:
        EditionError: The target exists and was not written by an edition.
    """
    if (
        target.exists()
        and not (target / STAMP).is_file()
        and not (target.is_dir() and not any(target.iterdir()))
    ):
        raise EditionError(
            f"{target} exists and was not made by an edition of the course: name another --output"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as work:
        new, old = Path(work) / "new", Path(work) / "old"
        new.mkdir()
        yield new
        (new / STAMP).write_text(
            "Made by an edition of the course, which replaces all of this folder.\n", "utf-8"
        )
        replaces = target.exists()
        if replaces:
            target.rename(old)
        try:
            new.rename(target)
        except OSError:
            if replaces:
                old.rename(target)
            raise


def relative_links(prose: str) -> list[str]:
    """Return the files that a Markdown text links to."""
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", prose, flags=re.M | re.S)
    targets = [link or source for link, source in _LINK.findall(prose)]
    return [target for target in targets if not re.match(r"[a-z][a-z0-9+.-]*:", target)]


def check_links(name: str, notebook: NotebookNode, folder: Path) -> None:
    """Check that the files that a notebook's prose links to are in the edition's folder.

    Raises:
        EditionError: A file is missing.
    """
    for cell in notebook.cells:
        for target in relative_links(cell.source) if cell.cell_type == "markdown" else ():
            if not (folder / target).exists():
                raise EditionError(f"{name} links to {target}, which is not in this edition")


def copy_files(source: Path, target: Path, *patterns: str) -> None:
    """Copy the files of a folder that match a pattern, and keep their relative paths."""
    for path in sorted(path for pattern in patterns for path in source.glob(pattern)):
        (target / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / path.relative_to(source))


def copy_pages(notebooks: Path, target: Path, lessons: str) -> None:
    """Copy the pages of docs/ that the lessons link to.

    Args:
        notebooks: Folder of the notebooks. Its parent has docs/.
        target: The edition's docs/.
        lessons: Path from `target` to the lessons, in which "{language}" stands for "en" or "zh".
    """
    root = notebooks.resolve().parent
    for page in sorted(page for pattern in PAGES for page in root.glob(pattern)):
        language = "zh" if ".zh" in page.suffixes else "en"
        text = page.read_text("utf-8").replace("../notebooks/", lessons.format(language=language))
        target.mkdir(exist_ok=True)
        (target / page.name).write_text(text, "utf-8")


def run_edition(
    build: Callable[..., Sequence[str] | None],
    name: str,
    description: str,
    arguments: list[str] | None = None,
    switches: Mapping[str, str] | None = None,
) -> None:
    """Parse the command line of an edition, build the edition, and print its size and time.

    An error is printed as one sentence, and each warning as one line.

    Args:
        build: Function (folder of the notebooks, folder to write, **switches) that builds the
            edition. It may return warnings.
        arguments: Arguments of the command line, by default those of the process.
        switches: Dict from the name of an option without a value to its help text.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--notebooks", type=Path, default=NOTEBOOKS, help="folder of the executed notebooks"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("build") / name, help="folder that is made or replaced"
    )
    for switch, words in (switches or {}).items():
        parser.add_argument(f"--{switch}", action="store_true", help=words)
    chosen = parser.parse_args(arguments)
    on = {switch: getattr(chosen, switch) for switch in switches or ()}
    start = time.perf_counter()
    try:
        for warning in build(chosen.notebooks, chosen.output, **on) or ():
            print(warning, file=sys.stderr)
    except (
        EditionError,
        OSError,
    ) as error:  # such as a missing README.md, a full disk or a missing permission
        sys.exit(f"{name}: {error}; {chosen.output} is left as it was")
    files = [path for path in chosen.output.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files) / 10**6
    seconds = time.perf_counter() - start
    print(f"{chosen.output}: {len(files)} files, {size:.1f} MB, in {seconds:.0f} s")
