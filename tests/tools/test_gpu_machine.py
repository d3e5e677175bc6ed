"""Test the repository on a GPU machine that has only torch, Triton and pytest; test `make gpu`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*arguments):
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def test_gpu_tests_are_collected_in_minimal_environment():
    options = ("-p", "no:cacheprovider", "-q", "-m", "gpu", "--collect-only")
    done = run("tests/tools/minimal_environment.py", "pytest", *options, "tests")
    assert done.returncode == 0, done.stdout[-2000:]
    found = {line.partition("::")[0] for line in done.stdout.splitlines()}
    paths = set(ROOT.glob("tests/*/test_*.py")) - {Path(__file__)}
    marked = [path for path in paths if "pytest.mark.gpu" in path.read_text("utf-8")]
    assert {path.relative_to(ROOT).as_posix() for path in marked} <= found


def test_experiments_run_in_minimal_environment(tmp_path):
    names = ["01.korthikanti", "06.attention_forward_and_backward"]
    options = ("--device", "cpu", "--folder", str(tmp_path), "--only", *names)
    done = run("tests/tools/minimal_environment.py", "course_lib.lessons", *options)
    assert [line.partition(": ")[0] for line in done.stdout.splitlines()] == names, done.stderr
    recorded = json.loads((tmp_path / "cpu.json").read_text())["experiments"]
    assert set(recorded) == {name[:2] for name in names}


# The Makefile
# --------------------------------------------------------------------------------------------------


def run_make(folder, *arguments, failing):
    """Run `make` with a Python that logs its calls and fails at one; return calls and status."""
    python, log = folder / "python", folder / "log"
    script = f'echo "$@" >> {log}\ncase "$*" in *{failing}*) echo no; exit 1;; esac'
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    command = ["make", *arguments, f"PYTHON={python}", f"OUT={folder}/out"]
    status = subprocess.run(command, cwd=ROOT, capture_output=True).returncode
    lines = log.read_text().replace(str(folder), "").splitlines()
    return [line for line in lines if not line.startswith("-c ")], status


CHECK = "-m course_lib.lessons --check"
ALLOCATOR = "-m pytest -p no:cacheprovider -rs -m gpu tests/library/test_caching_allocator.py"
TESTS = "-m pytest -p no:cacheprovider -rs --durations=10 -m gpu -n auto tests"
RECORD = "-m course_lib.lessons --only 04 --skip 04.p"
ALL = [
    *(CHECK, CHECK, ALLOCATOR, CHECK, TESTS, RECORD, CHECK),
    *map("benchmarks/gpu_{0}.py --output /out/{0}.json".format, ("attention", "offload")),
]
WHOLE = ["gpu", "ARGS=--only 04 --skip 04.p"]


@pytest.mark.parametrize(
    ("arguments", "failing", "expected", "status"),
    [
        (WHOLE, "nothing", ALL, 0),
        (WHOLE, "pytest", ALL, 2),
        *(([target], "--check", [CHECK], 2) for target in ("gpu", "gpu-tests", "gpu-bench")),
    ],
    ids=["no failure", "failed tests", "failed check", "tests only", "benchmarks only"],
)
def test_make_gpu_stops_only_after_failed_check(arguments, failing, expected, status, tmp_path):
    assert run_make(tmp_path, *arguments, failing=failing) == (expected, status)


def test_make_gpu_tests_uses_one_worker_without_xdist(tmp_path):
    lines, status = run_make(tmp_path, "gpu-tests", "ARGS=-k offload", failing="xdist")
    assert (lines, status) == ([CHECK, f"{TESTS.replace('-n auto ', '')} -k offload"], 0)
