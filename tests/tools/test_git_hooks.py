"""Hooks of git: commits in a temporary repository, with the hooks that `make hooks` installs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import git_hooks
import pytest

ROOT = Path(__file__).parents[2]
GOOD = "memory: add a test"
SUBJECTS = {  # subject -> the reported problem; an empty one for a subject that is accepted
    "budget: reject recipes that raise": "",
    "tests, docs: rename two folders": "",
    "course_lib/lesson 05: speed up the trace": "",
    f'Revert "{GOOD}"': "",
    f"tests: add {'x' * 61}": "",
    f"tests: add {'x' * 62}": "at most 72 characters, got 73",
    "Add a test": "'Add a test'",
    "tests:add a test": "'tests:add a test'",
    "tests: speed things up": "got 'speed'",
}


@pytest.mark.parametrize(("subject", "message"), SUBJECTS.items())
def test_invalid_commit_subject_is_reported_with_required_form(subject, message, tmp_path):
    file = tmp_path / "message"
    file.write_text(f"# a comment\n\n{subject}\n\nreason\n")
    problems = git_hooks.check_message(file)
    assert bool(problems) == bool(message)
    assert all(message in each and " must " in each for each in problems)


@pytest.fixture
def repository(tmp_path):
    """A repository with the hooks installed, and a function that runs git in it."""
    (tmp_path / "tests/tools").mkdir(parents=True)
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parents[1])
    shutil.copy(ROOT / "tests/tools/git_hooks.py", tmp_path / "tests/tools")
    shutil.copytree(ROOT / ".githooks", tmp_path / ".githooks")
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@b",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@b",
    }

    def run(*command):
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    run("git", "init", "--quiet")
    assert run("make", "hooks").returncode == 0
    return tmp_path, run


def test_commit_with_invalid_subject_is_rejected(repository):
    folder, run = repository
    (folder / "a.txt").write_text("a\n")
    run("git", "add", "a.txt")
    done = run("git", "commit", "--message", "tests: mend a test")
    assert done.returncode != 0 and "commit-msg: the verb after the area must be" in done.stderr
    assert run("git", "commit", "--message", f"{GOOD}\n\n# The reason.").returncode == 0


def test_commit_fixes_staged_files_and_leaves_unstaged_changes(repository):
    folder, run = repository
    (folder / "whole.py").write_text("import sys,os\nprint( os.sep )\n")
    (folder / "partly.py").write_text("x = 1\n")
    run("git", "add", "whole.py", "partly.py")
    (folder / "partly.py").write_text("x = 1\ny=2\n")
    done = run("git", "commit", "--message", GOOD)
    assert done.returncode == 0, done.stderr
    fixed = "import os\n\nprint(os.sep)\n"
    assert run("git", "show", "HEAD:whole.py").stdout == fixed
    assert (folder / "whole.py").read_text() == fixed
    assert run("git", "show", "HEAD:partly.py").stdout == "x = 1\n"
    assert (folder / "partly.py").read_text() == "x = 1\ny=2\n"


@pytest.mark.parametrize("unstaged", ["", "x = 1\n"], ids=["whole file", "part of the file"])
def test_commit_that_ruff_cannot_fix_is_rejected(unstaged, repository):
    folder, run = repository
    (folder / "a.py").write_text("print(missing)\n")
    run("git", "add", "a.py")
    (folder / "a.py").write_text(f"print(missing)\n{unstaged}")
    done = run("git", "commit", "--message", GOOD)
    assert done.returncode != 0 and "F821" in done.stdout + done.stderr
    assert "pre-commit: `ruff check` failed" in done.stderr
