"""Run the tests of what changed since the last commit, within a minute.

    python tests/tools/check_changes.py  # changed and new files, from git
    python tests/tools/check_changes.py offload memory/meter.py  # packages, modules or files

`make check` runs this after the linter and the type checker. For a file of the library, the tests
are those that `library_mutants.toml` names for it, and those whose name begins with its package.
If they take longer than the budget, by the seconds in `seconds.csv`, the longest tests are left
out, and their number is printed. `make test` runs all of them.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

import seconds
import workers

ROOT = Path(__file__).parents[2]
BUDGET_SECONDS = 40  # for the tests of one worker; make check itself needs up to 20 in addition
TABLE = tomllib.loads((ROOT / "tests/tools/library_mutants.toml").read_text("utf-8"))
PROSE = "tests/tools/test_prose.py"
LESSONS = "tests/lessons/test_lessons.py"
# The first pattern that matches a changed file names its tests; {0} is the first group of the
# pattern. Tests of the library and helpers of tests are found by `library_tests` and `importers`.
RULES = (
    (r"(tests/.*/test_\w+\.py)", ["{0}"]),
    (r"notebooks/(?:scripts/)?\d\d_.*", ["tests/lessons/test_notebooks.py", PROSE]),
    (r"course_lib/lessons/.*", [LESSONS, "tests/lessons/test_exercises.py"]),
    (r"course_lib/teaching/.*", ["tests/lessons/test_teaching.py"]),
    (r"publish/(\w+)_assets/.*", ["tests/publishing/test_{0}.py"]),
    (r"publish/(?:jupyterlab/.*|dependencies\.py)", ["tests/tools/test_environment.py"]),
    (r"(?:README|docs/|CONTRIBUTING|CHANGELOG).*", ["tests/publishing/test_readme.py", PROSE]),
    (r"(benchmarks|examples)/.*", ["tests/*/test_{0}.py"]),
    (r"course_lib/recordings/.*", ["tests/lessons/test_recordings.py"]),
    (r"(?:[^/]+|\..*|binder/.*|tests/conftest\.py)", ["tests/tools/test_environment.py"]),
)
LESSON = re.compile(r"notebooks/(?:scripts/)?(\d\d)_|course_lib/lessons/lesson_(\d\d)/")


# Which files
# --------------------------------------------------------------------------------------------------


def changed_files(root: Path = ROOT) -> list[str]:
    """Return files that differ from the last commit, and new ones that git does not ignore."""
    commands = (
        ["git", "diff", "--name-only", "--relative", "HEAD"],
        ["git", "ls-files", "--others", "--exclude-standard"],
    )
    found = [
        subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
        for command in commands
    ]
    return sorted({line for output in found for line in output.splitlines()})


def files_of(name: str) -> list[str]:
    """Return the files of a package or module of the library, or of a path of the repository."""
    for path in (ROOT / "course_lib" / name, ROOT / "course_lib" / f"{name}.py", ROOT / name):
        if path.exists():
            found = sorted(path.rglob("*.py")) if path.is_dir() else [path]
            return [each.relative_to(ROOT).as_posix() for each in found]
    raise argparse.ArgumentTypeError(f"ARGS must be packages of course_lib or paths, got {name!r}")


def library_tests(file: str) -> list[str]:
    """Return the test files of a file of course_lib: those of its module first."""
    module = file.removeprefix("course_lib/")
    package, *rest = module.removesuffix(".py").split("/")
    found = _named(module)
    for part in reversed(rest):
        found += _existing(f"tests/library/test_{package}_{part}*.py")
    found += [*_named(package), *_existing(f"tests/library/test_{package}.py")]
    found += _existing(f"tests/library/test_{package}_*.py")
    if package.startswith("_") or not found:  # what all packages share
        found += ["tests/library/test_private_torch_names.py"]
        found += ["tests/library/test_argument_errors.py"]
    return found


def _named(area: str) -> list[str]:
    return [f"tests/library/test_{name}.py" for name in TABLE["tests"].get(area, ())]


def importers(file: str) -> list[str]:
    """Return the test files that import a module of publish/ or a helper of tests/, directly or
    through another helper."""
    found, names = [], [Path(file).stem]
    for name in names:
        pattern = re.compile(rf"^\s*(?:import|from) {name}\b", re.M)
        if file.startswith("publish/") and name == names[0]:
            pattern = re.compile(rf"\bpublish\.{name}\b|from publish import .*\b{name}\b")
        for path, source in _test_sources().items():
            if pattern.search(source):
                if path.name.startswith("test_"):
                    found.append(path.relative_to(ROOT).as_posix())
                elif path.stem not in names:
                    names.append(path.stem)
    return found


@cache
def _test_sources() -> dict[Path, str]:
    return {path: path.read_text("utf-8") for path in sorted((ROOT / "tests").rglob("*.py"))}


def _existing(pattern: str) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob(pattern))]


def find_tests(file: str) -> list[str]:
    """Return the test files of a changed file, those that matter most first."""
    found: list[str] = []
    for pattern, names in RULES:
        if match := re.fullmatch(pattern, file):
            for name in names:
                found += _existing(name.format(*match.groups()))
            break
    else:
        if file.startswith("course_lib/"):
            found += library_tests(file)
        elif file.startswith(("tests/", "publish/")):
            found += _existing(f"tests/publishing/test_{Path(file).stem}.py")
            found += importers(file)
    return [name for name in dict.fromkeys(found) if (ROOT / name).exists()]


def groups(files: Iterable[str]) -> dict[str, list[str]]:
    """Map the number of a lesson, or "", to the test files to run for it.

    Tests of a lesson's notebook or package run for this lesson alone (`pytest -k 02`).
    """
    found: dict[str, list[str]] = {}
    for file in files:
        match = LESSON.match(file)
        number = (match[1] or match[2]) if match else ""
        for test in find_tests(file):
            key = number if test.startswith("tests/lessons/") else ""
            if test not in found.setdefault(key, []):
                found[key].append(test)
    return found


# Which of their tests
# --------------------------------------------------------------------------------------------------


def test_functions(source: str) -> list[str]:
    """Return the names of the tests in a file."""
    return [
        node.name
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test")
    ]


def choose(
    files: Sequence[str], names: Mapping[str, list[str]], table: Mapping[str, float], count: int
) -> tuple[list[str], list[str]]:
    """Choose tests that `count` workers run within the budget.

    One worker runs all tests of a file, so each file gets at most the budget of one worker.

    Args:
        files: Test files, those that matter most first.
        names: File to the names of its tests.
        table: Seconds of files and of single tests, from `seconds.csv`. The other tests of a file
            share the rest of its seconds.
        count: Number of workers.

    Returns:
        Test files, and the tests that are left out, in these and in other files.
    """
    chosen, left_out, spent = [], [], 0.0
    for file in files:
        left = min(BUDGET_SECONDS, BUDGET_SECONDS * count - spent)
        costs = _costs(file, names[file], table)
        skipped = []
        for name in sorted(costs, key=costs.__getitem__):
            if costs[name] <= left:
                left -= costs[name]
                spent += costs[name]
            else:
                skipped.append(f"{file}::{name}")
        left_out += skipped
        if len(skipped) < len(costs):
            chosen.append(file)
    return chosen, left_out


def _costs(file: str, names: list[str], table: Mapping[str, float]) -> dict[str, float]:
    listed = {name: table[f"{file}::{name}"] for name in names if f"{file}::{name}" in table}
    others = max(1, len(names) - len(listed))
    rest = max(0.0, table.get(file, seconds.UNKNOWN_SECONDS) - sum(listed.values()))
    return {name: listed.get(name, rest / others) for name in names}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "names", nargs="*", type=files_of, help="packages, modules or files; default: from git"
    )
    parser.add_argument("--workers", default="auto", help="number of worker processes")
    given = parser.parse_args(arguments)
    files = [file for named in given.names for file in named] or changed_files()
    found, status = groups(files), 0
    if not found:
        print("no tests belong to the changed files" if files else "no file has changed")
    available = workers.available_cores(), workers.available_memory()
    count = workers.worker_count(*available) if given.workers == "auto" else int(given.workers)
    table = seconds.read()
    for number, tests in found.items():
        names = {test: test_functions((ROOT / test).read_text("utf-8")) for test in tests}
        chosen, left_out = (tests, []) if number else choose(tests, names, table, count)
        print(f"tests: {' '.join(chosen)}{number and f' -k {number}'}")
        if left_out:
            total = sum(map(len, names.values()))
            print(f"left out {len(left_out)} of {total} tests; `make test` runs all of them")
        if chosen:
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
            if count > 1 and len(chosen) > 1:
                command += ["-n", str(min(count, len(chosen)))]
                command += ["--dist=loadscope", "--no-loadscope-reorder"]
            command += [*chosen, *(["-k", number] if number else [])]
            command += [f"--deselect={name}" for name in left_out]
            status |= subprocess.run(command, cwd=ROOT).returncode not in (0, 5)
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
