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


def test_commit_with_lint_error_or_invalid_subject_is_rejected(tmp_path):
    (tmp_path / "tests/tools").mkdir(parents=True)
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parents[1])
    shutil.copy(ROOT / "tests/tools/git_hooks.py", tmp_path / "tests/tools")
    shutil.copytree(ROOT / ".githooks", tmp_path / ".githooks")
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    for role in ("AUTHOR", "COMMITTER"):
        environment |= {f"GIT_{role}_NAME": "a", f"GIT_{role}_EMAIL": "a@b"}

    def run(*command):
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    run("git", "init", "--quiet")
    assert run("make", "hooks").returncode == 0
    for text, message, reason in (
        ("print(missing)\n", GOOD, "F821"),
        ("x=1\n", GOOD, "1 file would be reformatted"),
        ("x = 1\n", "tests: mend a test", "commit-msg: the verb after the area must be"),
    ):
        (tmp_path / "a.py").write_text(text)
        run("git", "add", "a.py")
        done = run("git", "commit", "--message", message)
        assert done.returncode != 0 and reason in done.stderr
    assert run("git", "commit", "--message", f"{GOOD}\n\n# The reason.").returncode == 0
