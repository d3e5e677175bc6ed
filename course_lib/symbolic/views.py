"""Gradient functions of views whose base was changed in place.

After such a change, autograd derives the gradient function of a view again. For real tensors it
uses the view's geometry (`AsStridedBackward0`), whose gradient is computed in a new storage. For
symbolic tensors, as for every tensor with a dispatch in Python, it repeats the operators that made
the view instead, and their backward passes need less memory.

Source: torch/csrc/autograd/variable.cpp (`VariableHooks::grad_fn`) and FunctionsManual.cpp
(`as_strided_backward`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from course_lib._torch.symbolic import FakeTensor


def views_by_geometry() -> AbstractContextManager:
    """Return a context in which symbolic views of changed bases have the gradient functions of real
    ones.

    Each call of PyTorch is slower in it, so estimates enter it for the forward pass and for
    recomputations only.
    """
    active = any(isinstance(mode, _ViewsByGeometry) for mode in _get_current_function_mode_stack())
    return nullcontext() if active else _ViewsByGeometry()


class _ViewsByGeometry(TorchFunctionMode):
    """Mode that replaces such a view, where it is an argument, by an equal view that
    `torch.as_strided` made of the base."""

    when_recomputed = True

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        replaced = tuple(map(_by_geometry, args))
        result = func(*replaced, **(kwargs or {}))
        if args:
            # If an operator changes a view in place, autograd derives the gradient function of
            # the view immediately. A function that is created later would run earlier in the
            # backward pass.
            _by_geometry(args[0])
        if isinstance(result, FakeTensor) and result._is_view():
            if args and result is replaced[0]:
                return args[0]
            vars(result).setdefault("_version_when_made", result._version)
        return result


def _by_geometry(argument: Any) -> Any:
    """Return an equal view made by `torch.as_strided`, if the argument is a view that was made
    before its base changed; lists and tuples may contain such views."""
    if type(argument) in (list, tuple):
        return type(argument)(map(_by_geometry, argument))
    # A placeholder, such as that for logits in chunks, refuses to be asked for its base.
    if (
        not isinstance(argument, FakeTensor)
        or not argument._is_view()
        or not argument.requires_grad
    ):
        return argument
    attributes, version = vars(argument), argument._version
    if attributes.get("_version_when_made", version) == version:
        return argument
    # One gradient function adds up the gradients of all uses until the next change.
    if "_by_geometry" not in attributes or attributes["_by_geometry"]._version != version:
        geometry = argument.size(), argument.stride(), argument.storage_offset()
        attributes["_by_geometry"] = torch.as_strided(argument._base, *geometry)
    return attributes["_by_geometry"]
