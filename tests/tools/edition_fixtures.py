"""Helpers for the tests of editions: a small course, errors, and editions that are built once.

An edition is a form of the course that `publish` builds, such as the website or the slides.
"""

import json
import os
from functools import cache
from pathlib import Path

import pytest
from filelock import FileLock

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))  # of lessons and projects
NOTEBOOK, SCRIPT = "notebooks/00_a.ipynb", "notebooks/scripts/00_a.py"
STAMP = ".course-edition"  # a folder with this file may be replaced


@cache
def stored_lessons():
    """Return name -> lesson of the course. Tests must not change the lessons."""
    # GPU machines import this file but lack what `publish` needs.
    from publish.cells import read_lessons

    return read_lessons(NOTEBOOKS)


def write_lesson(root, content):
    """Write the notebook of a small course from its JSON, and the corresponding script."""
    import jupytext

    (root / SCRIPT).parent.mkdir(parents=True, exist_ok=True)
    (root / NOTEBOOK).write_text(content, encoding="utf-8")
    jupytext.write(jupytext.reads(content, "ipynb"), root / SCRIPT, fmt="py:percent")


def notebook_of(*sources):
    """Return a notebook of executed code cells; a source that starts with "# " is prose."""
    new = pytest.importorskip("nbformat").v4
    output = new.new_output("execute_result", {"text/plain": "2"})
    run = {"outputs": [output], "execution_count": 1}
    cells = [
        new.new_markdown_cell(each) if each.startswith("# ") else new.new_code_cell(each, **run)
        for each in sources
    ]
    return new.new_notebook(cells=cells)


def small_course(folder):
    """Write a course of one lesson, with the folder `old` of an earlier edition."""
    root = folder / "course"
    write_lesson(root, json.dumps(notebook_of("# 0 A / 甲", "1")))
    (root / "README.md").write_text("# Small\n\n[lesson](notebooks/00_a.ipynb)\n", "utf-8")
    (root / "README.zh.md").write_text("# 小\n\n[课](notebooks/00_a.ipynb)\n", "utf-8")
    (root / "old").mkdir()
    for name in (STAMP, "index.html"):
        (root / "old" / name).touch()
    return root


def snapshot(folder):
    """Return path -> bytes of all files in a folder; False for a folder."""
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}


def failure(edition, root, capsys):
    """Return the sentence with which the command of an edition fails. It must change nothing."""
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


def built_once(tmp_path_factory, name, build):
    """Return a folder that `build(folder)` has written once, for all workers of this run."""
    base = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        base = base.parent
    folder = base / "editions" / name
    folder.parent.mkdir(exist_ok=True)
    with FileLock(folder.parent / f"{name}.lock"):
        if not folder.exists():
            build(folder)
    return folder


# Module that Python runs first in a process whose PYTHONPATH contains its folder.
_OFFLINE = """
import socket

def reject(*arguments):
    raise AssertionError(f"the build connects to {arguments[1:]}")

socket.socket.connect = socket.getaddrinfo = reject
"""


def block_network(monkeypatch, folder):
    """Prevent network connections of processes that are started from here on."""
    (folder / "offline").mkdir()
    (folder / "offline" / "sitecustomize.py").write_text(_OFFLINE, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(folder / "offline"))
