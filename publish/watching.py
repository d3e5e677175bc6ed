"""Code that runs in the kernel of a graded notebook, while an answer's check runs.

A profile function of Python sees each value that the code of the cells gives to the course or to
PyTorch. The watch records each value that can compare equal to any number or tensor. It also
records each change of a mode of PyTorch, or of a function that checks use for comparisons, even if
a later call undoes the change.
"""

import builtins
import functools
import importlib
import json
import math
import sys
import types
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from course_lib.teaching.exercises import Exercise, graded_cases

from .fingerprint import OF_IPYTHON, fingerprints, function_of
from .reading import EXERCISES, FOOLING, VALUES

_HOMES = (builtins, math, torch, nn.functional, torch.Tensor)
_CHECKED = Exercise.__call__.__code__
_COMPARING = frozenset({"abs", "all", "allclose", "any", "eq", "equal", "ge", "gt", "isclose"})
_COMPARING |= {"is_nonzero", "le", "lt", "ne", "sub", "_local_scalar_dense"}
_DEEPEST = 5  # levels of lists and other objects that are looked into
# A class in an answer may override these attributes, so they are read through `type`.
_mro, _names, _flags = (
    type.__dict__[name].__get__ for name in ("__mro__", "__dict__", "__flags__")
)
_MADE_BY_PYTHON = 1 << 9  # flag of classes that are not part of a C library
_HOOKS = [name for name in vars(modules) if name.startswith("_global_")]

_State: TypeAlias = tuple[set[str], dict[str, object]]


class Watch:
    """Records what the code of cells does to checks, from `start` to `stop`.

    Args:
        cells: The names of the cells, by default those of the kernel.
    """

    def __init__(self, cells: dict[str, object] | None = None) -> None:
        self.found: list[str] = []
        self._cells = vars(sys.modules["__main__"]) if cells is None else cells

    def start(self) -> None:
        """Watch this thread."""
        self.found.clear()
        self._before: list[_State] = []  # at the start of each call that runs
        self._functions = []
        for home in map(vars, _HOMES):
            names = [name for name in home if callable(home[name]) and name not in OF_IPYTHON]
            self._functions.append((home, names, tuple(map(home.get, names))))
        self._look_at = self._look  # each access creates a new bound method, and `stop` compares
        sys.setprofile(self._look_at)

    def stop(self) -> list[str]:
        """Return sentences about what was seen."""
        if sys.getprofile() is not self._look_at:
            self.found.append("The answer was not watched, because a cell uses `sys.setprofile`.")
        sys.setprofile(None)
        return self.found

    def _look(self, frame: types.FrameType, event: str, value: object) -> None:
        if event == "call" and frame.f_code is _CHECKED:
            self._refuse(frame.f_locals["answer"])
        if frame.f_globals is not self._cells or event not in ("call", "return"):
            return
        caller = frame.f_back
        if frame.f_code.co_name == "<module>" or caller is None or caller.f_globals is self._cells:
            return  # the cell itself, or the cells' code calls itself
        if event == "call":
            self._before.append(self._state())
        else:
            self._refuse(value)
            if self._before:
                self._compare(frame.f_code.co_name, self._before.pop(), self._state())

    def _refuse(self, value: object) -> None:
        if reason := next(_fooling(value), ""):
            self.found.append(f"The check was given {reason}.")

    def _state(self) -> _State:
        """Return the names of the functions that were replaced since `start` (a meter, for example,
        replaces some), and PyTorch's modes.

        The mode of gradients is left out, because a backward pass changes it.
        """
        other = set()
        for home, names, values in self._functions:
            now = tuple(map(home.get, names))
            if now != values:
                changed = zip(names, now, values, strict=True)
                other |= {name for name, *pair in changed if not _same(*pair)}
        return other, {each: value for each, value in modes().items() if each != "gradients"}

    def _compare(self, name: str, before: _State, after: _State) -> None:
        if changed := sorted(before[0] ^ after[0]):
            self.found.append(f"`{changed[0]}` was changed while `{name}` ran.")
        elif name not in ("__enter__", "__exit__"):  # a method may enter and leave a mode
            changed = [each for each in before[1] if before[1][each] != after[1][each]]
            self.found += [f"`{name}` left {each} changed." for each in changed]


_watches: list[Watch] = []


def watch() -> None:
    """Watch the answer of the next cell, until `report`."""
    _watches[:] = [Watch()]
    _watches[0].start()


def report(lesson: str, check: str, ticket: str) -> None:
    """Print a line of JSON: whether the check accepted its last answer, and what was seen.

    If a cell gave the name of the checks to something else, the verdict was not the lesson's.
    """
    seen = _watches[0].stop()
    module = importlib.import_module(f"course_lib.lessons.{lesson}.{EXERCISES}")
    accepted = getattr(getattr(module, check, None), "accepted", None)
    code = state()
    if vars(sys.modules["__main__"]).get(EXERCISES, module) is not module:
        code[module.__name__] = "another object"
    found = {"ticket": ticket, "accepted": accepted is True, "code": code, "seen": seen}
    print("\n" + json.dumps({**found, "seed": graded_cases.seed}), flush=True)


def state() -> dict[str, str]:
    """Return the fingerprints of the library's code and constants, and PyTorch's settings."""
    settings = {f"PyTorch: {name}": json.dumps(value) for name, value in modes().items()}
    return {**fingerprints(), **settings}


def modes() -> dict[str, object]:
    """Return PyTorch's global settings, by the words of a message. Random numbers are left out."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return {
        "the default dtype": str(torch.get_default_dtype()),
        "the default device": str(torch.get_default_device()),
        "gradients": torch.is_grad_enabled(),
        "the inference mode": torch.is_inference_mode_enabled(),
        "autocast": [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")],
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "the precision of products": torch.get_float32_matmul_precision(),
        "the cuDNN flags": [torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark],
        "the search for anomalies": torch.is_anomaly_enabled(),
        "the function modes": torch._C._len_torch_function_stack(),
        "the dispatch modes": [
            type(mode).__qualname__ for mode in _get_current_dispatch_mode_stack()
        ],
        "the hooks of saved tensors": hooks is not None,
        "the hooks of all modules": [len(each) for name in _HOOKS if (each := vars(modules)[name])],
        "the kernels of operators": _kernels(len(torch.library._impls)),
    }


@functools.cache
def _kernels(registered: int) -> int:
    """Count kernels that Python code has registered for the operators of comparisons.

    PyTorch registers others, for CUDA and for symbolic tensors, when a module is imported.

    Args:
        registered: Number of all kernels, with which the count may change.
    """
    names = (name.split("/") for name in torch.library._impls)
    return sum(
        home == "aten" and operator.partition(".")[0] in _COMPARING and key not in ("CUDA", "Meta")
        for home, operator, key in names
    )


def _same(one: object, first: object) -> bool:
    """Whether a function is the first one, or a wrapper of it that PyTorch has made meanwhile."""
    inner = function_of(one)
    return one is first or (inner is not None and inner is function_of(first))


def _fooling(value: Any, depth: int = 0) -> Iterator[str]:
    """Yield phrases about the values in a value that can agree with any other one."""
    is_class = type in _mro(type(value))
    yield from _fooling_class(value if is_class else type(value))
    if depth < _DEEPEST and not is_class:
        for each in _parts(value):
            yield from _fooling(each, depth + 1)


def _fooling_class(kind: type) -> Iterator[str]:
    made = [each for each in _mro(kind) if not _is_known(each)]
    given = f"an object of `{kind.__name__}`"
    if not made:
        if kind.__module__ in ("builtins", "itertools") and "__next__" in _names(kind):
            if kind is not types.GeneratorType:
                yield f"an iterator, `{kind.__name__}`, instead of a list"
        return
    if not _is_known(type(kind)):
        yield f"{given}, whose class has a metaclass"
    if known := [each.__name__ for each in _mro(kind) if each.__name__ in VALUES]:
        yield f"{given}, which is derived from `{known[0]}`"
    for each in made:
        for name in sorted(FOOLING & set(_names(each))):
            code = getattr(_names(each)[name], "__code__", None)
            # a dataclass has `__eq__` from its decorator, and no `__hash__`
            if getattr(code, "co_filename", "") != "<string>" and _names(each)[name] is not None:
                yield f"{given}, which defines `{name}`"


def _is_known(kind: type) -> bool:
    """Whether a class is that of a library, and not one that the cells have made."""
    if not _flags(kind) & _MADE_BY_PYTHON:
        return True
    if kind.__module__ == "__main__" or kind.__module__.startswith("unittest"):
        return False
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is kind


def _parts(value: Any) -> Iterator[object]:
    kind = type(value)
    if kind in (list, tuple, set, frozenset) or tuple in _mro(kind):
        yield from value
    elif kind in (dict, types.MappingProxyType):
        yield from value.keys()
        yield from value.values()
    elif kind is functools.partial:
        yield from (value.func, value.args, value.keywords)
    elif kind in (types.BuiltinMethodType, types.MethodType, types.MethodWrapperType):
        if not isinstance(value.__self__, types.ModuleType):
            yield value.__self__
    elif kind is types.SimpleNamespace or (not _is_known(kind) and hasattr(value, "__dict__")):
        yield from vars(value).values()
