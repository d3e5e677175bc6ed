"""What the editions' tests share: lessons with their scripts, errors, editions that are built once
for all workers."""

import fcntl
import os

import pytest


def write_lesson(folder, name, content):
    """A notebook, given as its text, and if it is one, the script that says the same."""
    import jupytext

    (folder / "scripts").mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.ipynb").write_text(content, encoding="utf-8")
    if content.startswith('{\n "cells"'):
        jupytext.write(
            jupytext.reads(content, "ipynb"), folder / "scripts" / f"{name}.py", fmt="py:percent"
        )


def snapshot(folder):
    """All that is in a folder: path -> bytes, False for a folder."""
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}


def failure(edition, notebooks, output, capsys):
    """The one sentence with which an edition's command line gives up; what was beside the output is
    still there."""
    # not there on a GPU machine, whose tests load this file
    from publish.cells import run_edition

    before = snapshot(output.parent)
    with pytest.raises(SystemExit) as stopped:
        run_edition(
            edition.build, "edition", "", ["--notebooks", str(notebooks), "--output", str(output)]
        )
    assert snapshot(output.parent) == before
    printed = capsys.readouterr()
    sentence = str(stopped.value.code)
    assert not printed.out and not printed.err and "\n" not in sentence, sentence
    assert sentence.startswith("edition: ") and sentence.endswith(f"; {output} is left as it was")
    return sentence


def built_once(tmp_path_factory, name, build):
    """The folder that `build(folder)` writes, by the first worker that asks for it; the others
    wait."""
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
