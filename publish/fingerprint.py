"""Code that runs in the kernel of a graded notebook: the library's fingerprint, and slow output.

The fingerprint is one hash per module. It is the same in every process of one Python version, and
changes if a cell changes the module. Output is slowed down after too many characters.
"""

import hashlib
import importlib
import inspect
import json
import sys
import time
import types
from collections.abc import Iterator
from typing import TextIO

MOST_OUTPUT = 20 * 10**6  # characters of all cells; a lesson with its pictures prints a tenth


def report(lesson: str, check: str, ticket: str) -> None:
    """Print a line of JSON: whether the check accepted its last answer, and the fingerprints."""
    module = importlib.import_module(f"course_lib.lessons.{lesson}")
    accepted = getattr(getattr(module, check, None), "accepted", None)
    found = {"ticket": ticket, "accepted": accepted is True, "code": fingerprints()}
    print("\n" + json.dumps(found), flush=True)


def load_ipython_extension(shell: object) -> None:
    """Slow down endless output. The kernel calls this function before the first cell."""
    for stream in (sys.stdout, sys.stderr):
        hold_back(stream, MOST_OUTPUT)


def hold_back(stream: TextIO, most: int) -> None:
    """Make each write wait for a second after `most` characters.

    Otherwise a loop that prints would fill the memory of this process and of its reader.
    """
    write, printed = stream.write, 0

    def slowly(text: str) -> int:
        nonlocal printed
        printed += len(text)
        if printed > most:
            time.sleep(1)
        return write(text)

    stream.write = slowly  # type: ignore[method-assign]


def fingerprints() -> dict[str, str]:
    """Return a hash of the functions' code, by imported module of the library."""
    found = {}
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] == "course_lib" and module is not None:
            lines = "".join(_describe(name, vars(module)))
            found[name] = hashlib.sha256(lines.encode()).hexdigest()[:16]
    return found


def _describe(home: str, names: dict[str, object]) -> Iterator[str]:
    for name, value in sorted(names.items()):
        function = _function(value)
        if function is not None:
            yield f"{home}.{name}: {_code(function.__code__)}\n"
        elif isinstance(value, type) and value.__module__ == home:
            yield from _describe(f"{home}.{name}", dict(vars(value)))


def _function(value: object) -> types.FunctionType | None:
    """Return the function of a method, a property, a cache or an exercise, or None."""
    if isinstance(value, property):
        value = value.fget
    value = getattr(value, "__func__", value) if not isinstance(value, type) else value
    try:
        value = inspect.unwrap(value)  # type: ignore[arg-type]
    except (ValueError, AttributeError):
        return None
    return value if isinstance(value, types.FunctionType) else None


def _code(code: types.CodeType) -> str:
    constants = [
        _code(each) if isinstance(each, types.CodeType) else _constant(each)
        for each in code.co_consts
    ]
    return f"{code.co_name} {code.co_code.hex()} {code.co_names} {constants}"


def _constant(value: object) -> str:
    # the order of a set differs between processes
    return repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)
