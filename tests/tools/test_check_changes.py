"""`make check`: which tests belong to a changed file, and which of them fit into its time."""

import subprocess
from pathlib import Path

import check_changes
import pytest
from check_changes import choose, find_tests, groups

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("file", "first", "others"),
    [
        ("course_lib/offload/stores.py", "library/test_offload", ["library/test_argument_errors"]),
        ("course_lib/workload.py", "library/test_budget_command", ["library/test_workload"]),
        ("course_lib/_torch/steps.py", "library/test_private_torch_names", []),
        ("docs/gpus.md", "publishing/test_readme", ["tools/test_prose"]),
        ("publish/site.py", "publishing/test_site", []),
        ("tests/tools/seconds.csv", "tools/test_workers", ["tools/test_check_changes"]),
        ("tests/library/test_offload.py", "library/test_offload", []),
    ],
)
def test_tests_of_changed_file_are_selected_before_related_tests(file, first, others):
    found = find_tests(file)
    assert found[0] == f"tests/{first}.py"
    assert {f"tests/{name}.py" for name in others} <= set(found)


def test_every_library_file_is_assigned_existing_tests():
    library = ROOT / "course_lib"
    files = [path.relative_to(ROOT).as_posix() for path in library.rglob("*.py")]
    without = [file for file in files if not find_tests(file)]
    assert without == []


def test_lesson_tests_are_selected_only_for_changed_lesson():
    files = ["notebooks/scripts/02_checkpointing.py", "course_lib/lessons/lesson_03/claims.py"]
    found = groups([*files, "README.md"])
    assert list(found) == ["02", "", "03"]
    assert found["02"] == ["tests/lessons/test_notebooks.py"]
    assert found[""] == ["tests/tools/test_prose.py", "tests/publishing/test_readme.py"]
    assert "tests/lessons/test_exercises.py" in found["03"]


def test_selection_within_time_budget_prefers_quickest_tests():
    names = {"a.py": ["a_slow", "b", "c"], "b.py": ["p", "q"], "c.py": ["x", "y"], "d.py": ["z"]}
    table = {"a.py": 60, "a.py::a_slow": 35, "b.py": 90, "c.py": 30, "d.py": 50}
    chosen, left_out = choose(list(names), names, table, 2)
    assert chosen == ["a.py", "c.py"]
    assert left_out == ["a.py::a_slow", "b.py::p", "b.py::q", "d.py::z"]
    chosen, left_out = choose(list(names), names, table, 1)  # 25 and 15 seconds fit into 40
    assert chosen == ["a.py", "c.py"]
    assert left_out == ["a.py::a_slow", "b.py::p", "b.py::q", "c.py::y", "d.py::z"]
    assert choose(["new.py"], {"new.py": ["a", "b"]}, {}, 1)[1] == []  # 20 s by default


def test_changed_files_include_modified_and_untracked_files(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.hooksPath="]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True)

    for name in ("same.py", "edited.py", "staged.py", ".gitignore"):
        (tmp_path / name).write_text("ignored.py\n")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "x")
    for name in ("edited.py", "staged.py", "new.py", "ignored.py"):
        (tmp_path / name).write_text("x = 2\n")
    git("add", "staged.py")
    assert check_changes.changed_files(tmp_path) == ["edited.py", "new.py", "staged.py"]


def test_command_runs_selected_tests_and_returns_their_exit_status(monkeypatch):
    ran = []

    def run(command, **_):
        ran.append(command)
        return subprocess.CompletedProcess(command, returncode=1)

    monkeypatch.setattr(check_changes.subprocess, "run", run)
    monkeypatch.setattr(check_changes.seconds, "read", dict)
    assert check_changes.main(["schedule", "--workers", "2"]) == 1
    (command,) = ran
    assert "tests/library/test_schedule.py" in command and command[-1][-3:] == ".py"
    assert command[command.index("-n") :][:3] == ["-n", "2", "--dist=loadscope"]
