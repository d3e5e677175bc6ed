"""Mutants of the library, each of which the tests of its area should kill.

    PYTHONPATH=. python tests/tools/library_mutants.py  # all; about ten minutes on one core
    PYTHONPATH=. python tests/tools/library_mutants.py memory        # those of an area
    PYTHONPATH=. python tests/tools/library_mutants.py --random 50   # drawn ones, half an hour
    PYTHONPATH=. python tests/tools/library_mutants.py --random 50 --seed 1  # others

The mutants of an area are listed in `library_mutants.toml`. `random_mutants.py` draws others at
random. Each mutant is written into a copy of the repository, and the tests of its area run there
until the first that fails, within a limit of CPU time. A survivor is a behavior that no test
checks. Compare the results before and after a change of the tests: the same mutants should be
killed.
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
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout, suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import random_mutants

ROOT = Path(__file__).parents[2]
LIMIT_S = 60  # of CPU, for a mutant
TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
RESULTS = {  # of pytest's exit status, and of its signal
    0: "survived",
    1: "killed",
    2: "killed",
    -signal.SIGXCPU: "slow",
    -signal.SIGALRM: "slow",
}


class Mutant(NamedTuple):
    """A change of one file: the text `old`, which it contains once, becomes `new`."""

    area: str
    file: str  # in course_lib
    old: str
    new: str
    name: str


MUTANTS = [
    Mutant(area, file, old, new, repr(old[:60]))
    for area, files in TABLE["mutants"].items()
    for file, changes in files.items()
    for old, new in changes
]


# The area of a file that has tests of its own, such as `checkpoint/state.py` in the area `state`.
AREAS = {file: area for area, files in TABLE["mutants"].items() for file in files}


def area_of(file: str) -> str:
    """Return the area whose tests are for a file of course_lib, or "" if it has none."""
    area = AREAS.get(file, file.removesuffix(".py").split("/")[0])
    return area if file in TABLE["tests"] or area in TABLE["tests"] else ""


def drawn_sources() -> dict[str, str]:
    """Map the files of course_lib from which random mutants are drawn to their sources."""
    library = ROOT / "course_lib"
    names = (path.relative_to(library).as_posix() for path in library.rglob("*.py"))
    return {name: (library / name).read_text("utf-8") for name in names if area_of(name)}


def run(mutant: Mutant, folder: Path) -> tuple[str, str]:
    """Return "killed", "survived" or "slow", and the test that failed."""
    file = folder / "course_lib" / mutant.file
    text = file.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        return f"stands {text.count(mutant.old)} times", ""
    file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    tests = TABLE["tests"].get(mutant.file) or TABLE["tests"][mutant.area]
    names = [str(folder / "tests/library" / f"test_{name}.py") for name in tests]
    code = _forked(names, folder)
    file.write_text(text, encoding="utf-8")
    output = (folder / "output").read_text(encoding="utf-8").splitlines()
    failed = [line.split(" - ")[0] for line in output if line.startswith(("FAILED", "ERROR "))]
    return RESULTS.get(code, f"exit {code}"), next(iter(failed), "")


def is_executed(drawn: random_mutants.RandomMutant, folder: Path) -> bool:
    """Return whether the tests of a file execute the statement of a random mutant."""
    mark = folder / "executed"
    mark.unlink(missing_ok=True)
    source = (ROOT / "course_lib" / drawn.file).read_text("utf-8")
    line = f"import os; open({str(mark)!r}, 'w').close(); os._exit(1)"
    new = random_mutants.with_line_before(source, drawn.statement, line)
    run(Mutant(area_of(drawn.file), drawn.file, source, new, ""), folder)
    return mark.exists()


def _forked(names: list[str], folder: Path) -> int:
    """Return pytest's exit status, from a child that need not import torch again."""
    child = os.fork()
    if child == 0:
        code = 3
        try:
            os.setpgid(0, 0)  # a group with the processes that the tests start, such as ranks
            resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S + 5))
            signal.alarm(10 * LIMIT_S)  # ends a mutant that waits forever, also on a busy machine
            signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup ignores it
            os.environ["PYTHONPATH"] = str(folder)
            here = (ROOT, ROOT / "tests/tools")  # course_lib has not been imported yet
            others = [path for path in sys.path if Path(path or ".").resolve() not in here]
            sys.path[:] = [str(folder), *others]
            os.chdir(folder)
            import pytest

            options = ["-p", "no:cacheprovider", "-qx", "--no-header", f"--rootdir={folder}"]
            file = (folder / "output").open("w")
            with file, redirect_stdout(file), redirect_stderr(file):
                code = int(pytest.main([*options, *names]))
        finally:
            os._exit(code)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("areas", nargs="*", choices=[[], *TABLE["mutants"]], help="default: all")
    parser.add_argument("--random", type=int, metavar="N", help="try N mutants drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of --random")
    given = parser.parse_args()
    if given.areas and given.random:
        parser.error("--random cannot be combined with areas")
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    import numpy  # noqa: F401 - each child then has it
    import pytest  # noqa: F401
    import torch  # noqa: F401

    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        skipped = shutil.ignore_patterns(".git", ".venv*", "__pycache__", "build")
        shutil.copytree(ROOT, folder, ignore=skipped, dirs_exist_ok=True)
        if given.random:
            return _run_random(given.random, given.seed, Path(folder))
        every_one_killed = True
        for mutant in MUTANTS:
            if mutant.area in (given.areas or TABLE["mutants"]):
                result, failed = run(mutant, Path(folder))
                every_one_killed &= result == "killed"
                print(f"{mutant.area:12} {result:9} {mutant.name}  {failed}", flush=True)
    return int(not every_one_killed)


def _run_random(count: int, seed: int, folder: Path) -> int:
    """Print the result of each drawn mutant and their counts; return 0 if no mutant survives."""
    results, sources = Counter[str](), drawn_sources()
    for drawn in islice(random_mutants.draw(sources, seed), count):
        first_line = drawn.statement.source.splitlines()[0]
        name = f"{drawn.file}: {drawn.change!r} at `{first_line[:60]}`"
        mutant = Mutant(area_of(drawn.file), drawn.file, sources[drawn.file], drawn.source, name)
        result, failed = run(mutant, folder)
        if result in ("survived", "slow") and not is_executed(drawn, folder):
            result = "not run"
        results[result] += 1
        print(f"{mutant.area:12} {result:9} {mutant.name}  {failed}", flush=True)
    print(", ".join(f"{count} {result}" for result, count in results.items()))
    return int(set(results) != {"killed"})


if __name__ == "__main__":
    sys.exit(main())
