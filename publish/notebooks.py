"""Run the lessons' scripts and store them, with their outputs, as notebooks.

    python -m publish.notebooks              # all lessons
    python -m publish.notebooks 02 03_sqrt   # select by the name's beginning
    python -m publish.notebooks --force 02   # run it, store even equal outputs
    python -m publish.notebooks --same 02.5  # section 2.5 was edited in one
                                                                  # language; both are right

A notebook depends only on its script: cell ids are hashes of the cells, and no times or versions
are stored. A lesson runs completely or not at all. The notebook's metadata has hashes of its code
cells, of what it uses of the library (see `dependencies`), and of the pinned versions. If none of
them has changed, the stored outputs would be the same, and the lesson does not run. Seconds,
devices and addresses differ from run to run. If a run changes nothing else, the stored outputs are
kept. If both languages of a text have changed, their hashes in `translations.toml` are renewed.
"""

import argparse
import ast
import hashlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbformat import NotebookNode

from . import translations
from .cells import ASKING_TAGS, id_of
from .dependencies import Library

PROJECT = Path(__file__).resolve().parents[1]
NOTEBOOKS = PROJECT / "notebooks"
KEPT_CELL_METADATA = {"tags", "slideshow", "lang", "jupyter", "slide", "minutes"}
# A whole lesson takes 45 seconds. A kernel of ipykernel 6.31 or 7.4 may stop before a cell that
# follows widgets, and a new kernel then runs all cells.
MOST_SECONDS_OF_A_CELL = 150
MADE_FROM = "outputs_made_from"  # the key of the hashes in a stored notebook's metadata
VARYING_TAGS = {"shows-seconds", "shows-device"}
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    # The kernel reports these values. When JupyterLab opens a notebook that stores others, it marks
    # it as changed. `publish/jupyterlab/ipython_kernel_config.json` sets the version to 3.
    "language_info": {
        "codemirror_mode": {"name": "ipython", "version": 3},
        "file_extension": ".py",
        "mimetype": "text/x-python",
        "name": "python",
        "nbconvert_exporter": "python",
        "pygments_lexer": "ipython3",
        "version": "3",
    },
}


def read_script(path):
    """Read a script as a notebook without outputs, with the same cell ids every time."""
    notebook = jupytext.read(path, fmt="py:percent")
    notebook.nbformat_minor = 5
    seen = Counter()
    for cell in notebook.cells:
        cell.metadata = {
            key: value for key, value in cell.metadata.items() if key in KEPT_CELL_METADATA
        }
        if "### BEGIN SOLUTION" in cell.source:  # the output would reveal the solution
            cell.metadata["jupyter"] = {**cell.metadata.get("jupyter", {}), "outputs_hidden": True}
        digest = id_of(cell)
        seen[digest] += 1
        cell.id = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
    notebook.metadata = nbformat.from_dict(METADATA)
    return notebook


def code_of(notebook: NotebookNode) -> ast.Module:
    """Return the code of a lesson's cells, without lines that are not Python."""
    lines = (
        line
        for cell in notebook.cells
        if cell.cell_type == "code"
        for line in cell.source.splitlines()
        if not line.lstrip().startswith(("%", "!"))
    )
    return ast.parse("\n".join(lines))


def library_of(notebook: NotebookNode, project: Path = PROJECT) -> Iterator[bytes]:
    """Yield everything of the library that can affect a lesson's outputs.

    These are the modules that the lesson uses (see `dependencies`), with their names, their data
    files and their labels. This module is included, because it decides which parts of an output are
    stored.
    """
    library, code = Library(project), code_of(notebook)
    modules = sorted(library.closure(code))
    paths = [library.paths[name] for name in modules] + library.data_of(modules)
    for path in [project / "publish" / Path(__file__).name, *paths]:
        yield path.relative_to(project).as_posix().encode()
        yield path.read_bytes()
    yield library.labels_of(modules, code).encode()


def outputs_made_from(notebook: NotebookNode, project: Path = PROJECT) -> dict[str, str]:
    """Hash everything that determines the outputs of a lesson.

    Args:
        notebook: A lesson, with or without outputs.
        project: The folder that contains `course_lib` and `constraints.txt`.

    Returns:
        A dict of hashes, with one key for each of three sources of the outputs. They are the code
        cells with their tags, the parts of the library that the lesson uses, and the pinned
        versions of all packages.
    """
    cells = (
        json.dumps([cell.source, _tags_for_outputs(cell), "slide" in cell.metadata])
        for cell in notebook.cells
        if cell.cell_type == "code"
    )
    return {
        "code cells": _hash(cell.encode() for cell in cells),
        "library": _hash(library_of(notebook, project)),
        "pinned versions": _hash([(project / "constraints.txt").read_bytes()]),
    }


def _tags_for_outputs(cell: NotebookNode) -> list[str] | None:
    """Return the cell's tags without those that only the grader uses."""
    return [tag for tag in cell.metadata.get("tags", ()) if tag not in ASKING_TAGS] or None


def _hash(parts: Iterable[bytes]) -> str:
    # Each part is hashed alone, so that moving text from one part to the next changes the hash.
    digests = (hashlib.sha256(part).digest() for part in parts)
    return hashlib.sha256(b"".join(digests)).hexdigest()[:16]


_LOADED = "import sys\nprint(*(name for name in sys.modules if name.startswith('course_lib')))"


def execute(notebook):
    """Run all cells in the notebooks' folder, in place, and remove what differs from run to run.

    Raises:
        RuntimeError: The lesson has loaded a module of the library that `library_of` does not find.
    """
    used = Library(PROJECT).closure(code_of(notebook))
    notebook.cells.append(nbformat.v4.new_code_cell(_LOADED))
    for tries_left in (1, 0):
        client = NotebookClient(
            notebook,
            timeout=MOST_SECONDS_OF_A_CELL,
            kernel_name="python3",
            resources={"metadata": {"path": str(NOTEBOOKS)}},
            record_timing=False,
            store_widget_state=True,
            coalesce_streams=True,
        )
        try:
            client.execute()
            break
        except CellTimeoutError:
            if not tries_left:
                raise
    loaded = set(notebook.cells.pop().outputs[0].text.split())
    if missed := loaded - used:
        raise RuntimeError(
            "dependencies must find each module that a lesson loads, but did not find"
            f" {', '.join(sorted(missed))}"
        )
    # the kernel has added its exact Python version
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "slide" not in cell.metadata:  # no slide shows pictures of this cell
                output.get("metadata", {}).pop("slides", None)
            # Without its state a widget cannot be shown, so only its plain text is kept.
            output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)
    return notebook


def lasting_text(notebook):
    """Return the notebook's text without parts that differ from run to run.

    These parts are seconds, devices and addresses in memory. The hashes of everything that
    determines the outputs are left out, too.
    """
    copy = deepcopy(notebook)
    copy.metadata.pop(MADE_FROM, None)
    for cell in copy.cells:
        if VARYING_TAGS & set(cell.metadata.get("tags", [])):
            cell.outputs = []
    return re.sub(r"\bat 0x[0-9a-f]+", "at ADDRESS", nbformat.writes(copy))


def reason_to_run(stored: NotebookNode | None, notebook: NotebookNode, project: Path) -> str:
    """Return the reason why a lesson has to run, or "" if its stored outputs can be kept.

    Args:
        stored: The stored notebook, or None if there is none.
        notebook: The notebook made from the script, without outputs.
        project: The folder that contains `course_lib` and `constraints.txt`.
    """
    if stored is None:
        return "there is no stored notebook"
    known = stored.metadata.get(MADE_FROM)
    if not known:
        return "the stored notebook has no hashes of what its outputs were made from"
    wanted = outputs_made_from(notebook, project)
    # the stored cells count too, because a notebook may have been edited or merged by hand
    changed = {
        name
        for found in (wanted, outputs_made_from(stored, project))
        for name in found
        if known.get(name) != found[name]
    }
    return f"changed: {', '.join(sorted(changed))}" if changed else ""


def copy_outputs(source: NotebookNode, target: NotebookNode) -> None:
    """Copy the outputs of all code cells into a notebook with the same code cells."""
    ran, without = (
        [cell for cell in notebook.cells if cell.cell_type == "code"]
        for notebook in (source, target)
    )
    for old, new in zip(ran, without, strict=True):
        new.outputs = deepcopy(old.outputs)
        new.execution_count = old.execution_count


def build(
    script: Path,
    *,
    force: bool = False,
    run: Callable[[NotebookNode], NotebookNode] = execute,
) -> str:
    """Build one notebook, running the lesson only if its stored outputs cannot be kept.

    Args:
        script: The lesson's script, `notebooks/scripts/NN_name.py` in its project.
        force: Whether the lesson always runs and is stored with its new outputs.
        run: Function that executes all cells of a notebook.

    Returns:
        A sentence for the terminal: whether the lesson ran, and whether the notebook was stored.
    """
    target = script.parents[1] / f"{script.stem}.ipynb"
    project = script.parents[2]
    stored = nbformat.read(target, as_version=4) if target.exists() else None
    notebook = read_script(script)
    reason = "--force" if force else reason_to_run(stored, notebook, project)
    if not reason:
        copy_outputs(stored, notebook)
    else:
        print(f"{script.stem}: the lesson runs now ({reason})", flush=True)
        notebook = run(notebook)
        if stored is not None and not force and lasting_text(stored) == lasting_text(notebook):
            copy_outputs(stored, notebook)
    notebook.metadata[MADE_FROM] = outputs_made_from(notebook, project)

    did = f"ran ({reason})" if reason else "did not run, its outputs are kept"
    if stored is not None and nbformat.writes(stored) == nbformat.writes(notebook):
        return f"{did}; unchanged"
    nbformat.write(notebook, target)
    return f"{did}; stored"


def renew_translations(script, same):
    """Renew the hashes of a lesson's texts; return the places where only one language changed."""
    lesson, found, known = (
        script.stem[:2],
        translations.pairs(read_script(script)),
        translations.read_pairs(),
    )
    of_lesson = {place: pair for place, pair in known.items() if place.startswith(lesson)}
    kept = translations.renew_pairs(found, of_lesson, same)
    translations.store_pairs(lesson, kept)
    return [place for place in found if found[place] != kept[place]]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "names", nargs="*", help="beginnings of lesson names; all lessons if none is given"
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="run every lesson, and store it even if only seconds or devices changed",
    )
    parser.add_argument(
        "--same",
        nargs="+",
        default=[],
        metavar="02.5",
        help="sections whose two languages agree, though one was edited",
    )
    arguments = parser.parse_args()
    os.environ.pop("COURSE_LANG", None)  # notebooks are stored in the default language
    os.environ["COURSE_LABELS"] = "strict"  # a label without Chinese is an error
    os.environ["COURSE_SLIDES"] = "1"  # figures are also drawn for slides
    # several threads are slower on a busy machine, because they wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    names = (
        [Path(name).stem for name in arguments.names]
        or [section[:2] for section in arguments.same]
        or [""]
    )
    scripts = sorted((NOTEBOOKS / "scripts").glob("[0-9]*.py"))
    for name in names:
        if name and not any(script.stem.startswith(name) for script in scripts):
            sys.exit(
                f"a name must be the beginning of one of {[s.stem for s in scripts]}, got {name!r}"
            )
    for script in (script for script in scripts if script.stem.startswith(tuple(names))):
        try:
            print(f"{script.stem}: {build(script, force=arguments.force)}", flush=True)
        except CellExecutionError as error:
            sys.exit(f"{script.stem}: a cell failed, so the stored notebook is kept\n{error}")
        for place in renew_translations(script, arguments.same):
            print(
                f"  {place}: only one language was edited; if both are right, run with --same"
                f" {translations.section_of(place)}"
            )


if __name__ == "__main__":
    main()
