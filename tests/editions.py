"""What the editions' tests share: the lessons, a small course, errors, addresses that a page loads,
and editions that are built once for all workers."""

import fcntl
import json
import os
import re
from functools import cache
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))  # of the lessons
NOTEBOOK, SCRIPT = "notebooks/00_a.ipynb", "notebooks/scripts/00_a.py"
STAMP = ".course-edition"  # a folder with this file may be replaced


@cache
def stored_lessons():
    """The lessons of the course by name, read once; no test may change them."""
    # not there on a GPU machine, whose tests load this file
    from publish.cells import read_lessons

    return read_lessons(NOTEBOOKS)


def write_lesson(root, content):
    """Write the notebook of a small course, given as its text, and a script that says the same."""
    import jupytext

    (root / SCRIPT).parent.mkdir(parents=True, exist_ok=True)
    (root / NOTEBOOK).write_text(content, encoding="utf-8")
    jupytext.write(jupytext.reads(content, "ipynb"), root / SCRIPT, fmt="py:percent")


def notebook_of(*sources):
    """A notebook of code cells that were run; a text that starts with # and a space is prose."""
    new = pytest.importorskip("nbformat").v4
    output = new.new_output("execute_result", {"text/plain": "2"})
    run = {"outputs": [output], "execution_count": 1}
    made = [
        new.new_markdown_cell(each) if each.startswith("# ") else new.new_code_cell(each, **run)
        for each in sources
    ]
    return new.new_notebook(cells=made)


def small_course(folder):
    """A course of one lesson, with the folder `old` of an earlier edition."""
    root = folder / "course"
    write_lesson(root, json.dumps(notebook_of("# 0 A / 甲", "1")))
    (root / "README.md").write_text("# Small\n\n[lesson](notebooks/00_a.ipynb)\n", "utf-8")
    (root / "README.zh.md").write_text("# 小\n\n[课](notebooks/00_a.ipynb)\n", "utf-8")
    (root / "old").mkdir()
    for name in (STAMP, "index.html"):
        (root / "old" / name).touch()
    return root


def snapshot(folder):
    """All that is in a folder: path -> bytes, False for a folder."""
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}


def failure(edition, root, capsys):
    """The one sentence with which an edition's command line gives up, and changes nothing."""
    from publish.cells import run_edition

    before, output = snapshot(root), root / "old"
    options = ["--notebooks", str(root / "notebooks"), "--output", str(output)]
    with pytest.raises(SystemExit) as stopped:
        run_edition(edition.build, "edition", "", options)
    assert snapshot(root) == before
    printed = capsys.readouterr()
    sentence = str(stopped.value.code)
    assert not printed.out and not printed.err and "\n" not in sentence, sentence
    assert sentence.startswith("edition: ") and sentence.endswith(f"; {output} is left as it was")
    return sentence


def loaded_addresses(page):
    """What a browser would load when it opens the page; links to follow are none."""
    keys = ("src", "srcset", "poster", "data")
    found = [tag[key] for key in keys for tag in page.find_all(attrs={key: True})]
    pages = {"next", "prev", "canonical", "alternate"}
    links = [tag for tag in page.find_all("link") if not pages & {*tag.get("rel", ())}]
    found += [tag.get("href", "") for tag in links]
    styles = [tag.text for tag in page.find_all("style")]
    found += addresses_in(" ".join(styles + [tag["style"] for tag in page.select("[style]")]))
    return [address for address in found if not address.startswith("data:")]


def addresses_in(css):
    return re.findall(r"""(?:url\(\s*|@import\s+)["']?([^"')\s]+)""", css)


def built_once(tmp_path_factory, name, build):
    """The folder that `build(folder)` writes for the first worker that asks; the others wait."""
    base = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        base = base.parent  # one folder for all workers of this run
    folder = base / "editions" / name
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            build(folder)
    return folder


# What Python runs first in a process whose PYTHONPATH leads to it.
_OFFLINE = """
import socket

def refuse(*arguments):
    raise AssertionError(f"the build connects to {arguments[1:]}")

socket.socket.connect = socket.getaddrinfo = refuse
"""


def take_network(monkeypatch, folder):
    """Processes started from here on cannot reach any machine."""
    (folder / "offline").mkdir()
    (folder / "offline" / "sitecustomize.py").write_text(_OFFLINE, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(folder / "offline"))
