"""Write and update the learner's copy of the lessons without losing what the learner typed.

    python -m publish.work            # write the files that are missing
    python -m publish.work --update   # update the lessons, and keep the answers
    python -m publish.work --language zh   # open the lessons in Chinese from now on

The copy is in `work/`, which git ignores, so answers never conflict with `git pull`. Its notebooks
have no outputs except the language switch, so that no guess is answered before it is made.
`work/.given` has each file in its original form. A cell that differs from its original form was
changed by the learner.
"""

import argparse
import difflib
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from copy import deepcopy
from datetime import datetime
from pathlib import Path

import nbformat
from nbconvert.preprocessors import ClearOutputPreprocessor
from nbformat import NotebookNode
from nbformat.sign import NotebookNotary

from course_lib.labels import LANGUAGES, SETTING

from .cells import (
    NOTEBOOKS,
    SOLUTION,
    EditionError,
    copy_files,
    copy_pages,
    is_solution,
    read_lessons,
)
from .student import check_of

WORK = Path("work")
SHOWN = {"en": "English", "zh": "Chinese / 各课以中文打开", "both": "both languages / 两种语言"}
GIVEN = ".given"  # JupyterLab does not list names that start with a dot
BACKUPS = "backup"
FOLDED = "# Folded code: run it to see its result / 折叠的代码：运行后显示结果"
EARLIER = (
    "**From an earlier edition.** The course has changed the cell above. Below is what you had"
    " written.\n\n**旧版里的内容。** 课程改动了上面的单元格，下面是你原来写的。"
)
_LEAST_ALIKE = 0.5  # least similarity, from 0 to 1, of two cells that are editions of one cell


# --- the files of the copy ---


def for_learners(notebook: NotebookNode) -> NotebookNode:
    """Return a lesson in the form in which learners first open it.

    All outputs are removed except the language switch, the output of the first code cell. A folded
    cell shows its first line. Therefore that line becomes a comment in both languages, which does
    not reveal the title of a figure.
    """
    notebook = deepcopy(notebook)
    clear = ClearOutputPreprocessor()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for number, cell in enumerate(code):
        if is_solution(cell):
            lines = cell.source.strip("\n").splitlines()[1:-1]
            cell.source = "\n".join([SOLUTION, *lines])
        elif cell.metadata.get("jupyter", {}).get("source_hidden"):
            cell.source = f"{FOLDED}\n{cell.source}"
        if number:
            clear.preprocess_cell(cell, {}, number)
        cell.execution_count = None
    for cell in notebook.cells:
        if cell.cell_type == "markdown":  # docs/ is next to the notebooks, as in the student zip
            cell.source = cell.source.replace("](../docs/", "](docs/")
    return notebook


def write_edition(notebooks: Path, folder: Path) -> None:
    """Write all files of the learner's copy into a folder.

    Raises:
        EditionError: The folder has no notebooks.
    """
    for name, notebook in read_lessons(notebooks).items():
        nbformat.write(for_learners(notebook), folder / f"{name}.ipynb")
    copy_files(notebooks, folder, "GLOSSARY.md")
    copy_pages(notebooks, folder / "docs", "../")
    copy_files(notebooks.resolve().parent, folder, "examples/*.py")


def _files(folder: Path) -> dict[str, Path]:
    return {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# --- making and updating ---


def make(notebooks: Path, work: Path) -> Iterator[str]:
    """Write the files that are missing in the copy, and leave all other files unchanged.

    Yields:
        Sentences for the terminal.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_edition(notebooks, Path(folder))
        new, given = _files(Path(folder)), _files(work / GIVEN)
        missing = [name for name in new if not (work / name).exists()]
        for name in missing:
            _write(work / name, new[name].read_bytes())
            _write(work / GIVEN / name, new[name].read_bytes())
        changed = [
            name
            for name in new
            if name not in missing
            and (name not in given or given[name].read_bytes() != new[name].read_bytes())
        ]
    _trust(work, list(new))
    if missing:
        yield f"{work}: {len(missing)} files written. Your answers are kept there."
    if changed:
        yield (
            f"The course has new editions of {', '.join(changed)}: `make update` brings them into"
            f" {work} and keeps your answers."
        )


def update(notebooks: Path, work: Path) -> Iterator[str]:
    """Update the copy to the new edition, after a backup of each file that the learner changed.

    Yields:
        Sentences for the terminal.
    """
    backup = work / BACKUPS / f"{datetime.now():%Y-%m-%d_%H%M%S}"
    with tempfile.TemporaryDirectory() as folder:
        write_edition(notebooks, Path(folder))
        new, given = _files(Path(folder)), _files(work / GIVEN)
        written = []
        for name, path in new.items():
            theirs, base = path.read_bytes(), given[name].read_bytes() if name in given else None
            mine = (work / name).read_bytes() if (work / name).exists() else None
            if base == theirs and mine is not None:
                continue
            try:
                merged, outcome = _updated(name, base, mine, theirs)
            except ValueError as error:
                yield (
                    f"{work / name} cannot be read and stays unchanged ({error}): move it away, and"
                    " `make lab` writes it again."
                )
                continue
            if mine not in (None, base, merged):
                _write(backup / name, mine)
                outcome += f"; the file as it was: {backup / name}"
            _write(work / name, merged)
            _write(work / GIVEN / name, theirs)
            written.append(name)
            yield f"{work / name}: {outcome}."
    _trust(work, list(new))
    for name in sorted(set(given) - set(new)):
        given[name].unlink()
        if (work / name).exists():
            yield f"{work / name}: the course no longer has this file; yours stays."
    if not written:
        yield f"{work} has the newest edition of every lesson."


def choose_language(language: str, work: Path) -> Iterator[str]:
    """Make all lessons of the copy open in a language, and print plain text in this language.

    Yields:
        Sentences for the terminal.
    """
    from course_lib.teaching.switch import Switch

    _write(work / SETTING, f"{language}\n".encode())
    names = []
    for path in sorted(work.glob("*.ipynb")):
        try:
            notebook = _notebook(path.read_bytes())
        except ValueError:
            continue  # `_trust` has reported this file
        switch = next((cell for cell in notebook.cells if cell.cell_type == "code"), None)
        for output in switch.outputs if switch else ():
            if "course-language" in output.get("data", {}).get("text/html", ""):
                output.data["text/html"] = Switch(language)._repr_html_()
                _write(path, nbformat.writes(notebook).encode() + b"\n")
                names.append(path.name)
    _trust(work, names)
    yield f"{work}: the lessons open in {SHOWN[language]}."


def _updated(name: str, base: bytes | None, mine: bytes | None, new: bytes) -> tuple[bytes, str]:
    """Return a pair: an updated file with the learner's cells, and a description of the update.

    A file that is not a notebook is replaced by the new edition, also if the learner changed it.

    Args:
        name: Name of the file.
        base: The file in the form in which the learner received it, or None if it did not exist.
        mine: The learner's file, or None if it does not exist.
        new: The file in the new edition.

    Raises:
        ValueError: The learner's notebook cannot be read.
    """
    if mine in (None, base):
        return new, "new edition"
    if not name.endswith(".ipynb"):
        return new, "new edition instead of your changed file"
    merged, kept = merge(*(_notebook(text) for text in (base or new, mine, new)))
    return nbformat.writes(merged).encode() + b"\n", f"new edition, {kept} of your cells kept"


def _notebook(text: bytes) -> NotebookNode:
    try:
        notebook = nbformat.reads(text.decode(), as_version=4)
        nbformat.validate(notebook)
    except Exception as error:  # nbformat raises errors of many types
        raise ValueError(str(error).partition("\n")[0][:100]) from None
    return notebook


def _write(target: Path, content: bytes) -> None:
    """Write a file completely or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.with_name(f".{target.name}.new")
    new.write_bytes(content)
    new.replace(target)


def _trust(work: Path, names: list[str]) -> None:
    """Sign the lessons as `jupyter trust` does.

    JupyterLab removes the language switch from notebooks without a signature.
    """
    notary = NotebookNotary()
    for name in names:
        if name.endswith(".ipynb"):
            try:
                notary.sign(_notebook((work / name).read_bytes()))
            except ValueError as error:
                print(f"{work / name} cannot be read: {error}", file=sys.stderr)


# --- merging a notebook ---


def merge(base: NotebookNode, mine: NotebookNode, new: NotebookNode) -> tuple[NotebookNode, int]:
    """Merge a new edition of a lesson into the learner's notebook.

    A cell that is in all three notebooks keeps the learner's source and outputs. Cells that the
    course changed or added come from the new edition.

    A cell that the course removed is removed, unless the learner typed something into it. If the
    learner did, the cell is placed below the cell that replaces it. A cell that the learner created
    stays below the same cell as before.

    Args:
        base: The lesson as it was given.
        mine: The learner's notebook.
        new: The new edition of the lesson.

    Returns:
        The notebook, and the number of cells in it that the learner typed.
    """
    mine = deepcopy(mine)
    given = {cell.id: cell.source for cell in base.cells}
    ids = {cell.id for cell in new.cells}
    kept: dict[str, NotebookNode] = {}
    behind: defaultdict[str, list[NotebookNode]] = defaultdict(
        list
    )  # "" is the beginning of the notebook
    before, number = "", 0
    replaced = []  # (removed cell with the learner's text, id of the cell before it)
    for cell in mine.cells:
        typed = bool(cell.source.strip()) and cell.source != given.get(cell.id)
        number += typed
        if cell.id in ids and cell.id not in kept:
            kept[cell.id], before = cell, cell.id
        elif typed and cell.id in given and cell.id not in kept:
            replaced.append((cell, before))
        elif typed:
            if cell.id in kept:  # a copy with the id of the original cell
                cell.id = nbformat.v4.new_raw_cell().id
            behind[before].append(cell)
    for cell, place in replaced:
        was = next(each for each in base.cells if each.id == cell.id)
        successor = _successor(was, [each for each in new.cells if each.id not in kept])
        note = [nbformat.v4.new_markdown_cell(EARLIER), cell] if successor else [cell]
        behind[successor or place][:0] = note
    switch = next((cell.id for cell in new.cells if cell.cell_type == "code"), "")
    cells = behind[""]
    for cell in new.cells:
        own = kept.get(cell.id)
        if cell.id == switch and own is not None and own.source == cell.source:
            own = None  # the new edition's language switch is used
        cells += [own or cell, *behind[cell.id]]
    merged = deepcopy(new)
    merged.cells = deepcopy(cells)
    return merged, number


def _successor(cell: NotebookNode, candidates: list[NotebookNode]) -> str:
    """Return the id of the new cell that replaces a cell of the earlier edition, or "".

    The cell of an exercise is replaced by the cell with the same check, any other cell by the most
    similar cell.
    """
    same = [each for each in candidates if each.cell_type == cell.cell_type]
    if check := check_of(cell):
        return next((each.id for each in same if check_of(each) == check), "")
    ratios = [
        (difflib.SequenceMatcher(None, cell.source, each.source).ratio(), each.id)
        for each in same
        if not check_of(each)
    ]
    best = max(ratios, default=(0.0, ""))
    return best[1] if best[0] >= _LEAST_ALIKE else ""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--update", action="store_true", help="bring in new editions of lessons")
    parser.add_argument("--language", choices=LANGUAGES, help="language in which lessons open")
    parser.add_argument("--notebooks", type=Path, default=NOTEBOOKS, help="the stored lessons")
    parser.add_argument("--work", type=Path, default=WORK, help="the learner's folder")
    chosen = parser.parse_args(arguments)
    try:
        for sentence in (update if chosen.update else make)(chosen.notebooks, chosen.work):
            print(sentence)
        for sentence in choose_language(chosen.language, chosen.work) if chosen.language else ():
            print(sentence)
    except (EditionError, OSError) as error:
        sys.exit(f"work: {error}")


if __name__ == "__main__":
    main()
