"""Arguments of a block that are objects, such as a key-value cache, and what has changed in them.

A checkpoint keeps the tensors among the arguments of a block, and copies lists and dicts. It cannot
copy other objects. If the block changes one of them, the recomputation starts from the changed
object.
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
# Limit for the parts of one argument. A key-value cache of 100 layers has about 1,000.
_MOST_PARTS = 10_000


class ObjectArguments:
    """Arguments of a call that are objects, with a record of their parts at the time of the call.

    The record holds no tensors, only their identities and their numbers of in-place changes.

    Args:
        function: The function that is called. Its signature gives the names of the arguments.
        args, kwargs: The arguments.
    """

    def __init__(self, function: Callable, args: tuple, kwargs: dict[str, Any]):
        self.function = function
        self.records = [
            (key, path, value, _parts(value))
            for key, argument in (*enumerate(args), *kwargs.items())
            for path, value in _objects(argument)
        ]

    def changes(self) -> str:
        """Describe what has changed in an argument since the call, and what to do.

        Returns:
            Two sentences about the first argument that has changed, without a period at the end,
            or "" if none has.
        """
        for key, path, value, before in self.records:
            now = _parts(value)
            changed = [part for part in before | now if before.get(part) != now.get(part)]
            if changed:
                argument = f"{self._argument_name(key)}{path} ({type(value).__name__})"
                where = f", in {changed[0].lstrip('.')}" if changed[0] else ""
                return (
                    f"The argument {argument} has changed since the block received it{where}, so"
                    " the recomputation started from other values. Do not pass such an object while"
                    " training (if it is a cache of transformers, pass use_cache=False to the"
                    " model), let the block change a copy of it"
                )
        return ""

    def _argument_name(self, key: int | str) -> str:
        if isinstance(key, str):
            return key
        try:
            parameters = inspect.signature(self.function).parameters.values()
        except (TypeError, ValueError):  # the function has no signature
            parameters = ()
        positional = [p.name for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD]
        return positional[key] if key < len(positional) else str(key + 1)


def _objects(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the objects in nested lists, tuples and dicts, each with its path."""
    if isinstance(value, (list, tuple, dict)):
        for step, item in _items(value):
            yield from _objects(item, path + step)
    elif not isinstance(value, _WITHOUT_PARTS):
        yield path, value


def _parts(value: Any) -> dict[str, Any]:
    """Return what identifies the object and all its parts, by their paths; the nearest come first.

    Two results are equal if no part was replaced or changed in place in between.
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()
    waiting = deque([("", value)])
    while waiting and len(found) < _MOST_PARTS:
        path, part = waiting.popleft()
        found[path] = _identity(part)
        if id(part) not in seen and not isinstance(part, _WITHOUT_PARTS):
            seen.add(id(part))
            steps = islice(chain(_items(part), _attributes(part)), _MOST_PARTS)
            waiting.extend((path + step, inner) for step, inner in steps)
    return found


def _items(container: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(container, dict):
        for i, (key, item) in enumerate(container.items()):
            yield f"[{repr(key) if isinstance(key, _PLAIN) else i}]", item
    elif isinstance(container, (list, tuple, set, deque)):
        yield from ((f"[{i}]", item) for i, item in enumerate(container))


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    names = [*getattr(value, "__dict__", ())]
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    yield from ((f".{name}", getattr(value, name)) for name in names if hasattr(value, name))


def _identity(part: Any) -> Any:
    """Return what is equal for the same unchanged part: for a tensor, also its version."""
    if isinstance(part, Tensor):
        storage = part.untyped_storage()._cdata if part.layout is torch.strided else None
        return id(part), version(part), storage
    # A tuple, because NaN is not equal to itself, but a tuple of the same NaN is.
    return (type(part), part) if isinstance(part, _PLAIN) else id(part)
