"""Run the lessons' scripts and store them, with their outputs, as notebooks.

    python -m course_lib.teaching.editions.notebooks              # all lessons
    python -m course_lib.teaching.editions.notebooks 02 03_sqrt   # select by the name's beginning
    python -m course_lib.teaching.editions.notebooks --force 02   # store even equal outputs
    python -m course_lib.teaching.editions.notebooks --same 02.5  # section 2.5 was edited in one
                                                                  # language; both are right

A notebook follows from its script: cell ids are hashes of the cells, and no times or versions are
kept. Seconds, devices and addresses differ from run to run: a stored notebook that differs in
nothing else stays as it is, so that a second run changes no byte. The hashes in `translations.toml`
are renewed where both languages of a text have changed.
"""

import argparse
import hashlib
import os
import re
import sys
from collections import Counter
from copy import deepcopy
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError

from . import translations

NOTEBOOKS = Path(__file__).resolve().parents[3] / "notebooks"
KEPT_CELL_METADATA = {"tags", "slideshow", "lang", "jupyter", "slide", "minutes"}
# A lesson takes 45. Where a cell takes so long, its kernel sleeps with that cell still to run: seen
# of ipykernel 6.31 and 7.4, after cells with widgets. A new kernel runs through.
MOST_SECONDS_OF_A_CELL = 150
VARYING_TAGS = {"shows-seconds", "shows-device"}
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"file_extension": ".py", "name": "python", "pygments_lexer": "ipython3"},
}


def read_script(path):
    """The script as a notebook without outputs, with the same cell ids every time."""
    notebook = jupytext.read(path, fmt="py:percent")
    notebook.nbformat_minor = 5
    seen = Counter()
    for cell in notebook.cells:
        cell.metadata = {
            key: value for key, value in cell.metadata.items() if key in KEPT_CELL_METADATA
        }
        if "### BEGIN SOLUTION" in cell.source:  # what it shows would tell, too
            cell.metadata["jupyter"] = {**cell.metadata.get("jupyter", {}), "outputs_hidden": True}
        digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:12]
        seen[digest] += 1
        cell.id = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
    notebook.metadata = nbformat.from_dict(METADATA)
    return notebook


def execute(notebook):
    """Run all cells from the notebooks' folder, in place, and drop what changes from run to run."""
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
    # the kernel has written its exact Python version
    notebook.metadata = nbformat.from_dict(METADATA)
    told = any("slide" in cell.metadata for cell in notebook.cells)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if told and "slide" not in cell.metadata:  # its picture for slides would never be shown
                output.get("metadata", {}).pop("slides", None)
            # Without the widget's state its random id shows nothing; what stays is the output's
            # plain text.
            output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)
    return notebook


def lasting_text(notebook):
    """The notebook's text without what differs from run to run: seconds, devices, addresses in
    memory."""
    copy = deepcopy(notebook)
    for cell in copy.cells:
        if VARYING_TAGS & set(cell.metadata.get("tags", [])):
            cell.outputs = []
    return re.sub(r"\bat 0x[0-9a-f]+", "at ADDRESS", nbformat.writes(copy))


def build(script, *, force=False):
    """Build one notebook; say whether it was stored or stays as it is."""
    target = NOTEBOOKS / f"{script.stem}.ipynb"
    notebook = execute(read_script(script))
    if (
        target.exists()
        and not force
        and lasting_text(nbformat.read(target, as_version=4)) == lasting_text(notebook)
    ):
        return "unchanged"
    nbformat.write(notebook, target)
    return "stored"


def renew_translations(script, same):
    """Renew the pairs of a lesson's texts; say which ones are left, since one language alone has
    changed."""
    lesson, found, known = (
        script.stem[:2],
        translations.pairs(read_script(script)),
        translations.read_pairs(),
    )
    of_lesson = {place: pair for place, pair in known.items() if place.startswith(lesson)}
    kept = translations.renewed(found, of_lesson, same)
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
        help="store notebooks in which only seconds or devices changed",
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
    # on a busy machine threads that wait for one another take far longer
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
                f"no script in notebooks/scripts starts with {name!r}; there are"
                f" {[s.stem for s in scripts]}"
            )
    for script in (script for script in scripts if script.stem.startswith(tuple(names))):
        try:
            print(f"{script.stem}: {build(script, force=arguments.force)}", flush=True)
        except CellExecutionError as error:
            sys.exit(
                f"{script.stem}: a cell failed, the stored notebook is left as it was\n{error}"
            )
        for place in renew_translations(script, arguments.same):
            print(
                f"  {place}: edited in one language alone; if both are right, --same"
                f" {translations.section_of(place)}"
            )


if __name__ == "__main__":
    main()
