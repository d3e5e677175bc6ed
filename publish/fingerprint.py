"""Code that runs in the kernel of a graded notebook: the library's fingerprint, and slow output.

A fingerprint is a hash of one module. It is the same in every process of one Python version, and
changes if a cell changes a function, an exercise or a constant of the module. If a notebook prints
too many characters, further output is slowed down.
"""

import dataclasses
import hashlib
import inspect
import re
import sys
import time
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import TextIO

MOST_OUTPUT = 20 * 10**6  # characters of all cells; a lesson with pictures prints a tenth
_COMPARING = ("builtins", "math", "torch", "torch.nn.functional")
OF_IPYTHON = ("open", "input")  # builtins that the kernel itself replaces
_CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*")
_STATE = {"Exercise", "Messages"}  # classes whose objects determine a verdict
_DEEPEST = 6  # nested levels of a constant that are hashed


def load_ipython_extension(shell: object) -> None:
    """Slow down endless output. The kernel calls this function before the first cell."""
    for stream in (sys.stdout, sys.stderr):
        hold_back(stream, MOST_OUTPUT)


def hold_back(stream: TextIO, most: int) -> None:
    """Delay each write to a stream by one second once `most` characters have been written.

    Otherwise an endless loop that prints would fill the memory of this process and of the grader.
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
    """Return a dict from imported module to a hash of its functions, exercises and constants.

    The dict has all imported modules of the library. It also has the modules of Python and PyTorch
    that are in `_COMPARING`, because checks compare values with their functions. In these modules,
    only the functions are hashed.
    """
    found = {}
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] == "course_lib" and module is not None:
            found[name] = _hash(_describe(name, vars(module)))
    for name in _COMPARING:
        if name in sys.modules:
            found[name] = _hash(_functions(name, vars(sys.modules[name])))
    if "torch" in sys.modules:
        tensor = sys.modules["torch"].Tensor
        found["torch.Tensor"] = _hash(_functions("torch.Tensor", dict(vars(tensor))))
    return found


def _hash(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _describe(home: str, names: dict[str, object]) -> Iterator[str]:
    """Yield a line for each function, exercise and constant of a module or class.

    The caller hashes these lines to the fingerprint of the module.
    """
    for name, value in sorted(names.items()):
        function = function_of(value)
        if "__getattr__" in names and _is_imported(home, name, value):
            continue  # a name that this module imports only when the name is first used
        if function is not None:
            yield f"{home}.{name}: {_value(function)}"
        if isinstance(value, type) and value.__module__ == home:
            yield from _describe(f"{home}.{name}", dict(vars(value)))
        elif _STATE & {base.__name__ for base in type(value).__mro__}:
            yield f"{home}.{name}: {_value(_without_tries(value))}"
        elif _CONSTANT.fullmatch(name):  # other names may be caches, which change
            yield f"{home}.{name}: {_value(value)}"


def _is_imported(home: str, name: str, value: object) -> bool:
    origin = getattr(value, "__module__", home)
    return origin != home and getattr(sys.modules.get(origin), name, None) is value


def _functions(home: str, names: dict[str, object]) -> Iterator[str]:
    """Yield a line for each function of a module or class. The caller hashes these lines."""
    for name, value in sorted(names.items()):
        # IPython adds functions of other modules to the builtins
        added = home == "builtins" and getattr(value, "__module__", "") != home
        if callable(value) and not added and name not in OF_IPYTHON:
            function = function_of(value)
            yield f"{name}: {_value(function) if function else _type(value)}"


def _without_tries(exercise: object) -> dict[str, object]:
    state = {each: value for each, value in vars(exercise).items() if not each.startswith("__")}
    return {each: value for each, value in state.items() if each not in ("accepted", "tries")}


def function_of(value: object) -> types.FunctionType | None:
    """Return the function inside a method, property, cache or exercise, or None without one."""
    if isinstance(value, property):
        value = value.fget
    value = getattr(value, "__func__", value) if not isinstance(value, type) else value
    try:
        value = inspect.unwrap(value, stop=_is_of_cells)  # type: ignore[arg-type]
    except (ValueError, AttributeError):
        return None
    return value if isinstance(value, types.FunctionType) else None


def _is_of_cells(function: object) -> bool:
    """Return whether a notebook cell defined the function.

    Such a function is not unwrapped, even if it wraps a function of the library.
    """
    return getattr(function, "__globals__", {}).get("__name__") == "__main__"


def _value(value: object, depth: int = 0) -> str:
    """Return a text that describes a value, and is the same in every process for equal values."""
    inner = [] if depth > _DEEPEST else _parts(value)
    if isinstance(value, types.MethodType) or hasattr(value, "cache_info"):
        value = function_of(value)
    if isinstance(value, types.FunctionType):
        return f"{_code(value.__code__)} {_value(value.__defaults__, depth + 1)}"
    if isinstance(value, (bool, int, float, str, bytes, type(None))):
        return repr(value)
    if type(value).__name__ == "Tensor" and hasattr(value, "tolist"):
        return repr(value.detach().tolist()) if not value.is_meta else _type(value)
    texts = [_value(each, depth + 1) for each in inner]
    # the order of a set differs between processes
    return f"{_type(value)} {sorted(texts) if isinstance(value, set | frozenset) else texts}"


def _parts(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return [part for pair in value.items() for part in pair]
    if isinstance(value, (tuple, list, set, frozenset)):
        return list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return []


def _type(value: object) -> str:
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(named, '__module__', '')}.{named.__qualname__} {type(value).__name__}"


def _code(code: types.CodeType) -> str:
    constants = [
        _code(each) if isinstance(each, types.CodeType) else _value(each) for each in code.co_consts
    ]
    return f"{code.co_name} {code.co_code.hex()} {code.co_names} {constants}"
