"""No test depends on how fast the machine is: a time limit is the one of `patience.py`, which only
what hangs can reach, and no test compares seconds that a clock has measured."""

import ast
from pathlib import Path

import pytest
from patience import HANGS_SECONDS, patient

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
# Programs that people run by hand; no test runs them.
TOOLS = {"library_mutants.py", "sweep_models.py", "twenty_submissions.py", "brute_force_fit.py"}
LIMITS = {"timeout", "timeout_ms", "startup_timeout", "deadline", "default_timeout"}
WAITS = {"wait", "join", "result", "acquire", "set_default_timeout", "alarm", "setitimer"}
WAITS |= {"timedelta"}
CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time", "time"}


def files():
    """The files of the tests, without benchmarks and tools."""
    return [path for path in sorted(TESTS.rglob("*.py")) if path.name not in TOOLS]


def name_of(function):
    return getattr(function, "attr", getattr(function, "id", ""))


def is_number(node):
    """Whether an expression is made of numbers alone, such as 2 * 60."""
    if isinstance(node, ast.BinOp):
        return is_number(node.left) and is_number(node.right)
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def reads_clock(node):
    return any(
        isinstance(part, ast.Call)
        and name_of(part.func) in CLOCKS
        and (not isinstance(part.func, ast.Attribute) or name_of(part.func.value) == "time")
        for part in ast.walk(node)
    )


def time_limits(source):
    """The lines of a test's code that hold a time limit of its own, or compare a clock."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            waits = name_of(node.func) in WAITS
            given = [key.value for key in node.keywords if waits or key.arg in LIMITS]
            limited = any(map(is_number, [*given, *(node.args if waits else [])]))
        elif isinstance(node, ast.FunctionDef):
            given = node.args
            pairs = [
                *zip(reversed(given.args), reversed(given.defaults), strict=False),
                *zip(given.kwonlyargs, given.kw_defaults, strict=True),
            ]
            limited = any(each.arg in LIMITS and is_number(value) for each, value in pairs)
        else:
            limited = isinstance(node, ast.Compare) and reads_clock(node)
        if limited:
            found.append(node)
    return [f"line {node.lineno}: {ast.unparse(node).splitlines()[0]}" for node in found]


def test_tests_have_no_time_limit_of_their_own():
    assert {
        path.relative_to(TESTS).as_posix(): limits
        for path in files()
        if (limits := time_limits(path.read_text("utf-8")))
    } == {}


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


def test_cells_of_notebooks_have_as_much_time(request):
    """nbval's own limits: two options, and one that `conftest.py` sets for each cell."""
    given = (ROOT / "Makefile").read_text("utf-8").split()
    for name in ("cell-timeout", "kernel-startup-timeout"):
        assert f"--nbval-{name}={HANGS_SECONDS}" in given
    from nbval.plugin import IPyNbCell

    cell = IPyNbCell.__new__(IPyNbCell)
    cell.output_timeout = 5
    patient(cell)
    assert cell.output_timeout == HANGS_SECONDS
    assert "patient(item)" in (TESTS / "conftest.py").read_text("utf-8")


def test_hypothesis_does_not_fail_a_slow_test():
    default = pytest.importorskip("hypothesis").settings.default
    assert default.deadline is None
    assert "too_slow" in [check.name for check in default.suppress_health_check]
