"""A GPU machine as it is, with torch, Triton, pytest and nothing else: its tests are found there,
its figures made."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*arguments):
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def test_the_bare_machine_lacks_what_it_should():
    tried = (
        "nbformat IPython jupyterlab hypothesis matplotlib pandas yaml sphinx torch numpy pytest"
    )
    program = (
        "import sys; sys.path.insert(0, 'tests'); import bare; from importlib.util import find_spec"
        f"; sys.meta_path = [bare.Bare]; print(*filter(find_spec, '{tried}'.split()))"
    )
    assert run("-c", program).stdout.split() == ["torch", "numpy", "pytest"]


def test_all_gpu_tests_are_collected_where_there_are_torch_triton_and_pytest_alone():
    options = ("-p", "no:cacheprovider", "-q", "-m", "gpu", "--collect-only")
    done = run("tests/bare.py", "pytest", *options, "tests")
    assert done.returncode == 0, done.stdout[-2000:]
    found = {line.partition("::")[0] for line in done.stdout.splitlines()}
    paths = set(ROOT.glob("tests/test_*.py")) - {Path(__file__)}
    marked = [path for path in paths if "pytest.mark.gpu" in path.read_text("utf-8")]
    assert {f"tests/{path.name}" for path in marked} <= found


def test_the_experiments_run_there_too(tmp_path):
    named = [
        *("01.korthikanti", "04.offloaded_optimizer"),
        *("06.attention_forward_and_backward", "07.three_recipes"),
    ]
    options = ("--device", "cpu", "--folder", str(tmp_path), "--only", *named)
    done = run("tests/bare.py", "course_lib.lessons", *options)
    assert [line.partition(": ")[0] for line in done.stdout.splitlines()] == named, done.stderr
    recorded = json.loads((tmp_path / "cpu.json").read_text())["experiments"]
    assert set(recorded) == {name[:2] for name in named}


# The Makefile
# --------------------------------------------------------------------------------------------------


def made(folder, *arguments, fails):
    """Run `make` with a Python that logs its calls and fails at one; return calls and status."""
    if shutil.which("make") is None:
        pytest.skip("needs make")
    python, log = folder / "python", folder / "log"
    does = f'echo "$@" >> {log}\ncase "$*" in *{fails}*) echo no; exit 1;; esac'
    python.write_text(f"#!/bin/sh\n{does}\n")
    python.chmod(0o755)
    command = ["make", *arguments, f"PYTHON={python}", f"OUT={folder}/out"]
    status = subprocess.run(command, cwd=ROOT, capture_output=True).returncode
    lines = log.read_text().replace(str(folder), "").splitlines()
    return [line for line in lines if not line.startswith("-c ")], status


CHECK = "-m course_lib.lessons --check"
ALLOCATOR = "-m pytest -p no:cacheprovider -rs -m gpu tests/test_caching_allocator.py"
TESTS = "-m pytest -p no:cacheprovider -rs --durations=10 -m gpu -n auto tests"
RECORD = "-m course_lib.lessons --only 04 --skip 04.p"
ALL = [
    *(CHECK, CHECK, ALLOCATOR, CHECK, TESTS, RECORD, CHECK),
    *map("benchmarks/gpu_{0}.py --output /out/{0}.json".format, ("attention", "offload")),
]
WHOLE = ["gpu", "ARGS=--only 04 --skip 04.p"]


@pytest.mark.parametrize(
    ("arguments", "fails", "expected", "status"),
    [
        (WHOLE, "nothing", ALL, 0),
        *((WHOLE, fails, ALL, 2) for fails in ("pytest", "attention")),
        *(
            ([f"gpu{part}"], "--check", [CHECK], 2)
            for part in ("", "-allocator", "-tests", "-bench")
        ),
    ],
)
def test_make_gpu_goes_on_after_a_failure_but_not_where_the_check_fails(
    arguments, fails, expected, status, tmp_path
):
    assert made(tmp_path, *arguments, fails=fails) == (expected, status)


def test_make_gpu_tests_takes_one_worker_where_there_is_no_xdist(tmp_path):
    lines, status = made(tmp_path, "gpu-tests", "ARGS=-k offload", fails="xdist")
    assert (lines, status) == ([CHECK, f"{TESTS.replace('-n auto ', '')} -k offload"], 0)
