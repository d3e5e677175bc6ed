"""Detect changes in arguments of a block that are objects, such as a key-value cache.

A checkpoint keeps the tensors among the arguments of a block, and copies lists and dicts. It cannot
copy other objects. If the block changes such an object, the recomputation starts from the changed
object, and its result may be wrong. The error message then names the argument that has changed.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, islice
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from .._torch.tensors import version

_PLAIN = (int, float, complex, str, bytes, type(None))
_WITHOUT_PARTS = (*_PLAIN, Tensor, type, ModuleType, FunctionType)
# Largest number of parts that are recorded per argument. A key-value cache of 100 layers has about
# 1,000 parts.
_MAX_PARTS = 10_000


class ObjectArguments:
    """Record of those arguments of a call that a checkpoint cannot copy, to detect their changes.

    These arguments are objects such as a key-value cache. They may also be items of lists, tuples
    or dicts among the arguments. Tensors, numbers, strings, functions and classes are not recorded.

    The record refers to each object and copies none of its content. For a tensor inside an object,
    it stores only the identity and the version counter.

    Args:
        function: The function that is called. Its signature gives the names of the arguments.
        args, kwargs: Positional and keyword arguments of the call.
    """

    def __init__(self, function: Callable, args: tuple, kwargs: dict[str, Any]):
        self.function = function
        self.records = [
            (key, path, value, _part_identities(value))
            for key, argument in (*enumerate(args), *kwargs.items())
            for path, value in _objects_in(argument)
        ]

    def changes(self) -> str:
        """Describe the first argument that has changed since the call, and how to avoid the change.

        Returns:
            A part of an error message, or "" if no argument has changed. The part is two sentences
            without a period at the end, so that the caller can add a comma and its own advice.
        """
        for key, path, value, before in self.records:
            now = _part_identities(value)
            changed = [part for part in before | now if before.get(part) != now.get(part)]
            if changed:
                argument = f"{self._argument_name(key)}{path} ({type(value).__name__})"
                where = f", in {changed[0].lstrip('.')}" if changed[0] else ""
                return (
                    f"The argument {argument} has changed since the block received it{where}, so"
                    " the recomputation used other values. If it is a cache of transformers, pass"
                    " use_cache=False to the model. Otherwise pass an object that no code changes,"
                    " let the block change a copy of the object"
                )
        return ""

    def _argument_name(self, key: int | str) -> str:
        """Return the name of an argument; `key` is its position or its keyword."""
        if isinstance(key, str):
            return key
        try:
            parameters = inspect.signature(self.function).parameters.values()
        except (TypeError, ValueError):  # the function has no signature
            parameters = ()
        positional = [p.name for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD]
        return positional[key] if key < len(positional) else str(key + 1)


def _objects_in(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the objects inside nested lists, tuples and dicts, each with its path such as "[0]"."""
    if isinstance(value, (list, tuple, dict)):
        for step, item in _items(value):
            yield from _objects_in(item, path + step)
    elif not isinstance(value, _WITHOUT_PARTS):
        yield path, value


def _part_identities(value: Any) -> dict[str, Any]:
    """Return a dict from the path of each part of an object to the identity of this part.

    The object itself has the path "". Parts with shorter paths come first.

    Two results are equal if no part was replaced or changed in place between the two calls.
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()
    waiting = deque([("", value)])
    while waiting and len(found) < _MAX_PARTS:
        path, part = waiting.popleft()
        found[path] = _identity(part)
        if id(part) not in seen and not isinstance(part, _WITHOUT_PARTS):
            seen.add(id(part))
            steps = islice(chain(_items(part), _attributes(part)), _MAX_PARTS)
            waiting.extend((path + step, inner) for step, inner in steps)
    return found


def _items(container: Any) -> Iterator[tuple[str, Any]]:
    """Yield the items of a container, each with its path such as "['key']"."""
    if isinstance(container, dict):
        for i, (key, item) in enumerate(container.items()):
            yield f"[{repr(key) if isinstance(key, _PLAIN) else i}]", item
    elif isinstance(container, (list, tuple, set, deque)):
        yield from ((f"[{i}]", item) for i, item in enumerate(container))


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object, also those in `__slots__`, each with its path."""
    names = [*getattr(value, "__dict__", ())]
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    yield from ((f".{name}", getattr(value, name)) for name in names if hasattr(value, name))


def _identity(part: Any) -> Any:
    """Return a key that stays equal until the part is replaced or, for a tensor, changed."""
    if isinstance(part, Tensor):
        storage = part.untyped_storage()._cdata if part.layout is torch.strided else None
        return id(part), version(part), storage
    # Plain values are compared inside a tuple. A NaN is not equal to itself, but two tuples with
    # the same NaN object are equal.
    return (type(part), part) if isinstance(part, _PLAIN) else id(part)
