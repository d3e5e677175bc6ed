"""Write the student edition: notebooks with stubs for solutions, and cells for reasons.

    python -m publish.student --output build/student --nbgrader

The folder, and the zip in it, also have the library as a wheel, its pinned versions, a Makefile,
and a README in each language. Nothing else is needed. With --nbgrader, each exercise gets a locked
cell that tests whether the check has accepted the answer. Each cell for a reason gets the metadata
of an answer that is graded by hand.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from .cells import (
    EditionError,
    check_links,
    check_twins,
    copy_files,
    copy_pages,
    output_folder,
    read_lessons,
    run_edition,
    without_solutions,
)

ASSETS = Path(__file__).resolve().parent / "student_assets"
LIBRARY = Path(__file__).resolve().parents[1]  # the folder with course_lib and pyproject.toml
JUPYTERLAB = LIBRARY / "publish/jupyterlab"
NAME = "memory-course"  # name of the zip, and of the folder in it
PROMPT = "**Why?** · **为什么？** (`{check}`)"
_PLACE = "*Your sentence / 你的理由：*"
_CHECK = re.compile(r"\b(\w+\.)?(check_\w+)\(")
_EPOCH = (
    2020,
    1,
    1,
    0,
    0,
    0,
)  # date of all entries, so that equal contents give equal zip files


def build(notebooks: Path, output: Path, nbgrader: bool = False) -> None:
    """Write the student edition of all lessons with the files that they link to, and a zip of it.

    Args:
        nbgrader: Whether cells get the metadata that nbgrader needs to collect and grade.

    Raises:
        EditionError: A solution cannot be removed, a linked file is missing, or the library cannot
            be packed.
    """
    lessons = read_lessons(notebooks)
    check_twins(notebooks, lessons)
    with output_folder(output) as folder:
        for name, notebook in lessons.items():
            try:
                edition = with_reasons(without_solutions(notebook))
            except EditionError as error:
                raise EditionError(f"{name}, {error}") from None
            edition = with_nbgrader(edition) if nbgrader else edition
            for cell in edition.cells:
                if cell.cell_type == "markdown":  # this edition has docs/ next to the notebooks
                    cell.source = cell.source.replace("](../docs/", "](docs/")
            nbformat.write(edition, folder / f"{name}.ipynb")
        copy_files(notebooks, folder, "GLOSSARY.md")
        copy_pages(notebooks, folder / "docs", "../")
        copy_files(JUPYTERLAB, folder, "overrides.json", "ipython_kernel_config.json")
        copy_files(ASSETS, folder, "README.md", "README.zh.md", "Makefile")
        copy_files(LIBRARY, folder, "constraints.txt", "LICENSE", "examples/*.py")
        pack_library(folder)
        for name, notebook in read_lessons(folder).items():
            check_links(name, notebook, folder)
        _zip(folder, folder / f"{NAME}.zip")


# --- the notebooks ---


def check_of(cell: NotebookNode) -> str | None:
    """Return the check that a cell calls in its last line, such as "check_meter", or None."""
    last = cell.source.rstrip().rpartition("\n")[2] if cell.cell_type == "code" else ""
    found = _CHECK.match(last)
    return found[2] if found else None


def with_reasons(notebook: NotebookNode) -> NotebookNode:
    """Insert a cell for the student's reason below each exercise, in place."""
    cells = []
    for cell in notebook.cells:
        cells.append(cell)
        if check := check_of(cell):
            source = f"{PROMPT.format(check=check)}\n\n{_PLACE}"
            cells.append(nbformat.v4.new_markdown_cell(source, id=reason_id(check)))
    notebook.cells = cells
    return notebook


def reason_id(check: str) -> str:
    """Return the id, of at most 64 characters, of the cell for an exercise's reason."""
    return f"why-{check}"[:64]


def reason_in(notebook: NotebookNode, check: str) -> str:
    """Return the reason that a student wrote below an exercise, on one line, or ""."""
    prompt = PROMPT.format(check=check)
    markdown = [cell for cell in notebook.cells if cell.cell_type == "markdown"]
    places = [cell for cell in markdown if cell.get("id") == reason_id(check)] or [
        cell for cell in markdown if prompt in cell.source
    ]
    if not places:
        return ""
    return " ".join(places[0].source.replace(prompt, "").replace(_PLACE, "").split())


def with_nbgrader(notebook: NotebookNode) -> NotebookNode:
    """Add nbgrader's metadata (schema 3) to the notebook, in place.

    The cell of an exercise gets no metadata, so nbgrader does not change it. Below it are a locked
    cell that tests whether the check has accepted the answer (one point), and the reason (one
    point, given by hand). The question for the reason is in a separate cell, because `nbgrader
    generate_assignment` empties the cell of an answer.
    """
    cells = []
    for cell in notebook.cells:
        cells.append(cell)
        if check := check_of(cell):
            call = cell.source.rstrip().rpartition("\n")[2].partition("(")[0]
            test = nbformat.v4.new_code_cell(
                f"assert {call}.accepted, 'not accepted yet / 尚未通过'", id=f"test-{check}"[:64]
            )
            test.metadata.nbgrader = _grade_metadata(
                f"test-{check}", solution=False, cell_type="code"
            )
            cells.append(test)
        elif cell.get("id", "").startswith("why-check_"):
            question = cell.source.partition("\n")[0]
            cells.insert(-1, nbformat.v4.new_markdown_cell(question, id=f"ask-{cell.id}"[:64]))
            cell.source = _PLACE
            cell.metadata.nbgrader = _grade_metadata(cell.id, solution=True, cell_type="markdown")
    notebook.cells = cells
    return notebook


def _grade_metadata(grade_id: str, *, solution: bool, cell_type: str) -> dict[str, object]:
    return {
        "schema_version": 3,
        "grade": True,
        "solution": solution,
        "locked": not solution,
        "task": False,
        "points": 1,
        "grade_id": grade_id,
        "cell_type": cell_type,
    }


# --- what runs them ---


def pack_library(folder: Path) -> Path:
    """Build the library's wheel into a folder with the installed setuptools, without a download.

    Raises:
        EditionError: setuptools is too old, or the build failed.
    """
    files = ("pyproject.toml", "LICENSE", "README.md")
    with tempfile.TemporaryDirectory() as work:
        copy = Path(work) / "source"
        unwanted = shutil.ignore_patterns("__pycache__", ".*")
        shutil.copytree(LIBRARY / "course_lib", copy / "course_lib", ignore=unwanted)
        for name in files:
            shutil.copy(LIBRARY / name, copy)
        program = "from setuptools import build_meta as b; print(b.build_wheel('.'))"
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=copy, capture_output=True, text=True
        )
        wheels = list(copy.glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            reason = done.stderr.strip().rpartition("\n")[2]
            raise EditionError(f"the library cannot be packed (setuptools must be >= 77): {reason}")
        return Path(shutil.copy(wheels[0], folder))


def _zip(folder: Path, target: Path) -> None:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as packed:
        for path in paths:
            entry = zipfile.ZipInfo(f"{NAME}/{path.relative_to(folder).as_posix()}", _EPOCH)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            packed.writestr(entry, path.read_bytes())


if __name__ == "__main__":
    run_edition(
        build,
        "student",
        __doc__.partition("\n\n")[0],
        switches={"nbgrader": "write nbgrader's metadata into the cells"},
    )
