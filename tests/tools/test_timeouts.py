"""Test that no test depends on the speed of the machine: no own time limits, no compared clocks."""

import re
from pathlib import Path
from types import SimpleNamespace

from timeouts import TIMEOUT_SECONDS, extend_output_timeout

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
# programs that are run by hand, and this file, which has examples
EXEMPT = {
    "library_mutants.py",
    "sweep_models.py",
    "grade_generated_submissions.py",
    "brute_force_fit.py",
}
EXEMPT |= {Path(__file__).name}
LIMIT = re.compile(r"\b(?:(?:startup_|default_)?timeout|timeout_ms|deadline)=[\d(]|timedelta\(.*\d")
WAIT = re.compile(r"(?:wait|join|result|acquire|_timeout|alarm|setitimer)\(\d[\d *_.]*[,)]")
CLOCK = r"(?:monotonic|perf_counter|process_time|thread_time|time\.time)\(\)"
COMPARED = re.compile(rf"{CLOCK}.*[<>]|[<>].*{CLOCK}")


def time_limits(source):
    """Return the lines of a test's code with a time limit of its own, or a compared clock."""
    rules = (LIMIT, WAIT, COMPARED)
    return [line for line in source.splitlines() if any(rule.search(line) for rule in rules)]


def test_tests_use_only_shared_timeout_constant():
    paths = [path for path in TESTS.rglob("*.py") if path.name not in EXEMPT]
    found = {path.name: time_limits(path.read_text("utf-8")) for path in paths}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_numeric_timeouts_and_clock_comparisons_in_tests_are_reported():
    limits = ["run(command, timeout=120)", "event.wait(2 * 60)", "settings(deadline=200)"]
    clocks = ["while time.monotonic() < end: pass", "assert perf_counter() - start < 3"]
    allowed = ["def ends(work, timeout=None): pass", "event.wait(TIMEOUT_SECONDS)", "','.join(x)"]
    assert time_limits("\n".join([*limits, *allowed, *clocks])) == [*limits, *clocks]


def test_all_notebook_timeouts_use_shared_timeout_constant():
    """nbval has two options for time limits; `conftest.py` sets a third one for each cell."""
    words = (ROOT / "Makefile").read_text("utf-8").split()
    for name in ("cell-timeout", "kernel-startup-timeout"):
        assert f"--nbval-{name}={TIMEOUT_SECONDS}" in words
    cell = SimpleNamespace(output_timeout=5)
    extend_output_timeout(cell)
    assert cell.output_timeout == TIMEOUT_SECONDS
    assert "extend_output_timeout(item)" in (TESTS / "conftest.py").read_text("utf-8")
