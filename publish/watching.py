"""Code that runs in the kernel of a graded notebook, while an answer's check runs.

A Python profile function inspects each value that the code of the cells passes to the course or to
PyTorch. It records values that can compare equal to any number or tensor. It also records changes
of PyTorch's modes, or of functions with which checks compare, even if a later call undoes them.
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
_DEEPEST = 5  # nested levels of lists and other objects that are inspected
# A class in an answer may override these attributes, so they are read through `type`.
_mro, _names, _flags = (
    type.__dict__[name].__get__ for name in ("__mro__", "__dict__", "__flags__")
)
_MADE_BY_PYTHON = 1 << 9  # flag of classes that are not part of a C library
_HOOKS = [name for name in vars(modules) if name.startswith("_global_")]

_State: TypeAlias = tuple[set[str], dict[str, object]]


class Watch:
    """Recorder of attempts to fool a check, by code in the cells of a notebook.

    It records from the call of `start` to the call of `stop`.

    Args:
        cells: Global variables of the cells, by default those of the kernel.
    """

    def __init__(self, cells: dict[str, object] | None = None) -> None:
        self.found: list[str] = []
        self._cells = vars(sys.modules["__main__"]) if cells is None else cells

    def start(self) -> None:
        """Start to watch the current thread."""
        self.found.clear()
        self._before: list[_State] = []  # the state at the start of each running call
        self._functions = []
        for home in map(vars, _HOMES):
            names = [name for name in home if callable(home[name]) and name not in OF_IPYTHON]
            self._functions.append((home, names, tuple(map(home.get, names))))
        self._look_at = self._look  # stored, because `stop` compares it by identity
        sys.setprofile(self._look_at)

    def stop(self) -> list[str]:
        """Stop watching; return a sentence on each attempt that was recorded."""
        if sys.getprofile() is not self._look_at:
            self.found.append("The answer was not watched, because a cell uses `sys.setprofile`.")
        sys.setprofile(None)
        return self.found

    def _look(self, frame: types.FrameType, event: str, value: object) -> None:
        if event == "call" and frame.f_code is _CHECKED:
            self._record_fooling(frame.f_locals["answer"])
        if frame.f_globals is not self._cells or event not in ("call", "return"):
            return
        caller = frame.f_back
        if frame.f_code.co_name == "<module>" or caller is None or caller.f_globals is self._cells:
            return  # a cell itself, or a call from the code of cells
        if event == "call":
            self._before.append(self._state())
        else:
            self._record_fooling(value)
            if self._before:
                self._compare(frame.f_code.co_name, self._before.pop(), self._state())

    def _record_fooling(self, value: object) -> None:
        if reason := next(_fooling(value), ""):
            self.found.append(f"The check was given {reason}.")

    def _state(self) -> _State:
        """Return the names of functions that were replaced since `start`, and PyTorch's modes.

        A meter, for example, replaces some functions. The mode of gradients is left out, because a
        backward pass changes it.
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
    """Watch the answer in the next cell, until `report` is called."""
    _watches[:] = [Watch()]
    _watches[0].start()


def report(lesson: str, check: str, ticket: str) -> None:
    """Print a line of JSON: whether the check accepted its last answer, and recorded attempts.

    If a cell bound the name `exercises` to another object, the line reports this as a change.

    Args:
        lesson: Name of the lesson's package, such as "lesson_02".
        check: Name of the check, such as "check_policy".
        ticket: Random text that is printed as well, by which the grader recognizes the line.
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
    """Return PyTorch's global settings, except random states, by their names in messages."""
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
    """Count the kernels that Python code has registered for operators that compare.

    Kernels for CUDA and symbolic tensors are left out, because imports in PyTorch register them.

    Args:
        registered: Number of all registered kernels, as a key for the cache.
    """
    names = (name.split("/") for name in torch.library._impls)
    return sum(
        home == "aten" and operator.partition(".")[0] in _COMPARING and key not in ("CUDA", "Meta")
        for home, operator, key in names
    )


def _same(one: object, first: object) -> bool:
    """Return whether a function is `first`, or a wrapper of it that PyTorch made meanwhile."""
    inner = function_of(one)
    return one is first or (inner is not None and inner is function_of(first))


def _fooling(value: Any, depth: int = 0) -> Iterator[str]:
    """Yield phrases on a value, or values inside it, that can compare equal to any other value."""
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
            # the `__eq__` of a dataclass is generated by its decorator, and its `__hash__` is None
            if getattr(code, "co_filename", "") != "<string>" and _names(each)[name] is not None:
                yield f"{given}, which defines `{name}`"


def _is_known(kind: type) -> bool:
    """Return whether a class belongs to a library, and was not created by code of the cells."""
    if not _flags(kind) & _MADE_BY_PYTHON:
        return True
    if kind.__module__ == "__main__" or kind.__module__.startswith("unittest"):
        return False
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is kind


def _parts(value: Any) -> Iterator[object]:
    """Yield the values inside a container, a partial function, a bound method or an object."""
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
