"""No test depends on how fast the machine is: a time limit is the one of `patience.py`, which only
what hangs can reach, and no test compares seconds that a clock has measured."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from patience import HANGS_SECONDS, patient

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
# Programs that people run by hand, and the examples below.
EXEMPT = {"library_mutants.py", "sweep_models.py", "twenty_submissions.py", "brute_force_fit.py"}
EXEMPT |= {Path(__file__).name}
LIMIT = re.compile(r"\b(?:(?:startup_|default_)?timeout|timeout_ms|deadline)=[\d(]|timedelta\(.*\d")
WAIT = re.compile(r"(?:wait|join|result|acquire|_timeout|alarm|setitimer)\(\d[\d *_.]*[,)]")
CLOCK = r"(?:monotonic|perf_counter|process_time|thread_time|time\.time)\(\)"
COMPARED = re.compile(rf"{CLOCK}.*[<>]|[<>].*{CLOCK}")


def time_limits(source):
    """The lines of a test's code that hold a time limit of its own, or compare a clock."""
    rules = (LIMIT, WAIT, COMPARED)
    return [line for line in source.splitlines() if any(rule.search(line) for rule in rules)]


def test_tests_have_no_time_limit_of_their_own():
    paths = [path for path in TESTS.rglob("*.py") if path.name not in EXEMPT]
    found = {path.name: time_limits(path.read_text("utf-8")) for path in paths}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("subprocess.run(command, timeout=120)", 1),
        ("def finishes(work, timeout=60): pass", 1),
        ("def finishes(work, timeout=None): pass", 0),
        ("event.wait(2 * 60)", 1),
        ("event.wait(HANGS_SECONDS)", 0),
        ("while time.monotonic() < end: pass", 1),
        ("assert perf_counter() - start < 3", 1),
        ("settings(max_examples=20, deadline=200)", 1),
        ("','.join(words)", 0),
    ],
)
def test_time_limit_is_found(source, found):
    assert len(time_limits(source)) == found


def test_cells_of_notebooks_have_as_much_time():
    """nbval's own limits: two options, and one that `conftest.py` sets for each cell."""
    given = (ROOT / "Makefile").read_text("utf-8").split()
    for name in ("cell-timeout", "kernel-startup-timeout"):
        assert f"--nbval-{name}={HANGS_SECONDS}" in given
    cell = SimpleNamespace(output_timeout=5)
    patient(cell)
    assert cell.output_timeout == HANGS_SECONDS
    assert "patient(item)" in (TESTS / "conftest.py").read_text("utf-8")
