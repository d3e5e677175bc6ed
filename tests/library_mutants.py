"""Slips of the hand in the library, each of which the tests of its area should see.

    PYTHONPATH=. python tests/library_mutants.py               # all; ten minutes or so of a core
    PYTHONPATH=. python tests/library_mutants.py memory        # those of an area

They stand in `library_mutants.toml`. Each is put into a copy of the repository, and the tests of
its area run there until the first that fails, within a limit of CPU time. A survivor is a sentence
that no test says. Before and after a change of the tests the same should be killed.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import signal
import sys
import tempfile
import tomllib
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LIMIT_S = 60  # of CPU, for a mutant
TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
RESULTS = {0: "survived", 1: "killed", 2: "killed"}  # of pytest's exit status, and of its signal
RESULTS |= {-signal.SIGXCPU: "slow", -signal.SIGALRM: "slow"}


class Mutant(NamedTuple):
    """`old` stands in the file once, and is `new` for a while."""

    area: str
    file: str  # in course_lib
    old: str
    new: str


MUTANTS = [
    Mutant(area, file, old, new)
    for area, files in TABLE["mutants"].items()
    for file, changes in files.items()
    for old, new in changes
]


def copy_to(folder: Path) -> None:
    """Copy the library and its tests, and link to all else."""
    for path in ROOT.iterdir():
        if path.name in ("course_lib", "tests"):
            skipped = shutil.ignore_patterns("__pycache__")
            shutil.copytree(path, folder / path.name, ignore=skipped)
        elif path.name != ".git":
            (folder / path.name).symlink_to(path)


def run(mutant: Mutant, folder: Path) -> tuple[str, str]:
    """ "killed", "survived" or "slow"; the test that failed."""
    file = folder / "course_lib" / mutant.file
    text = file.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        return f"stands {text.count(mutant.old)} times", ""
    file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    tests = TABLE["tests"].get(mutant.file, TABLE["tests"][mutant.area])
    code = _forked([str(folder / "tests" / f"test_{name}.py") for name in tests], folder)
    file.write_text(text, encoding="utf-8")
    told = (folder / "told").read_text(encoding="utf-8").splitlines()
    failed = [line.split(" - ")[0] for line in told if line.startswith(("FAILED", "ERROR "))]
    return RESULTS.get(code, f"exit {code}"), next(iter(failed), "")


def _forked(names: list[str], folder: Path) -> int:
    """pytest's exit status, from a child that need not import torch again."""
    child = os.fork()
    if child == 0:
        code = 3
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S + 5))
            signal.alarm(10 * LIMIT_S)  # where it waits for ever
            signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup has it ignored
            os.environ["PYTHONPATH"] = str(folder)
            here = (ROOT, ROOT / "tests")  # of which nothing has been imported yet
            others = [path for path in sys.path if Path(path or ".").resolve() not in here]
            sys.path[:] = [str(folder), *others]
            os.chdir(folder)
            import pytest

            options = ["-p", "no:cacheprovider", "-qx", "--no-header", f"--rootdir={folder}"]
            with (folder / "told").open("w") as told, redirect_stdout(told), redirect_stderr(told):
                code = int(pytest.main([*options, *names]))
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("areas", nargs="*", choices=[[], *TABLE["mutants"]], help="all if left out")
    given = parser.parse_args()
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    import numpy  # noqa: F401 - what each child has then
    import pytest  # noqa: F401
    import torch  # noqa: F401

    every_one_killed = True
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy_to(Path(folder))
        for mutant in MUTANTS:
            if mutant.area in (given.areas or TABLE["mutants"]):
                result, failed = run(mutant, Path(folder))
                every_one_killed &= result == "killed"
                print(f"{mutant.area:12} {result:9} {mutant.old[:60]!r}  {failed}", flush=True)
    return int(not every_one_killed)


if __name__ == "__main__":
    sys.exit(main())
