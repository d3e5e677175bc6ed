"""Code that runs in the kernel of a notebook that is graded: the fingerprint of the library, and a
brake for output without end.

The fingerprint is a number a module, the same in every process of one Python, and another once a
cell has changed it.
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

MOST_OUTPUT = 20 * 10**6  # characters of all cells; a lesson prints a tenth, pictures included


def report(lesson: str, check: str, ticket: str) -> None:
    """Print whether the check accepted its last answer, and the fingerprints, as a line of JSON."""
    module = importlib.import_module(f"course_lib.lessons.{lesson}")
    accepted = getattr(getattr(module, check, None), "accepted", None)
    found = {"ticket": ticket, "accepted": accepted is True, "code": fingerprints()}
    print("\n" + json.dumps(found), flush=True)


def load_ipython_extension(shell: object) -> None:
    """Put the brake on before the first cell; the kernel calls it by this name."""
    for stream in (sys.stdout, sys.stderr):
        hold_back(stream, MOST_OUTPUT)


def hold_back(stream: TextIO, most: int) -> None:
    """Let what prints more characters than that wait a second a time from then on: a loop would
    fill the memory of this process and of its reader before anything is read."""
    write, printed = stream.write, 0

    def slowly(text: str) -> int:
        nonlocal printed
        printed += len(text)
        if printed > most:
            time.sleep(1)
        return write(text)

    stream.write = slowly  # type: ignore[method-assign]


def fingerprints() -> dict[str, str]:
    """Module of the library that is imported -> a hash of the code of its functions."""
    found = {}
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] == "course_lib" and module is not None:
            lines = "".join(_described(name, vars(module)))
            found[name] = hashlib.sha256(lines.encode()).hexdigest()[:16]
    return found


def _described(home: str, names: dict[str, object]) -> Iterator[str]:
    for name, value in sorted(names.items()):
        function = _function(value)
        if function is not None:
            yield f"{home}.{name}: {_code(function.__code__)}\n"
        elif isinstance(value, type) and value.__module__ == home:
            yield from _described(f"{home}.{name}", dict(vars(value)))


def _function(value: object) -> types.FunctionType | None:
    """The function behind a method, a property, a cache or an exercise; None if there is none."""
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
    # a set's order differs from process to process
    return repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)
