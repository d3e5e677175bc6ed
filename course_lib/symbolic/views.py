"""Give symbolic views the gradient functions of real views after their base was changed in place.

After such a change, autograd makes a new gradient function for a view. For a real tensor this is
`AsStridedBackward0`, which computes the gradient in a new storage. For a symbolic tensor, as for
every tensor with a dispatch in Python, autograd repeats the operators that made the view instead.
Their backward passes need less memory, so an estimate would be too small. Inside
`views_by_geometry()` symbolic views have the gradient function `AsStridedBackward0`, too.

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
    """Return a context in which symbolic views have the gradient functions of real views.

    The context matters for a view whose base was changed in place after the view was made. Inside
    the context, such a symbolic view has the gradient function `AsStridedBackward0`, as a real view
    has. Outside the context, it has another gradient function. Every call of a PyTorch function
    takes longer inside the context, so estimates enter it only for the forward pass and for
    recomputations.
    """
    active = any(isinstance(mode, _ViewsByGeometry) for mode in _get_current_function_mode_stack())
    return nullcontext() if active else _ViewsByGeometry()


class _ViewsByGeometry(TorchFunctionMode):
    """Function mode that replaces outdated views among the arguments of a function.

    A view is outdated if its base was changed in place after the view was made. It is replaced by
    an equal view that `torch.as_strided` makes of the base.
    """

    # No function mode is active inside `backward`. If a mode has this attribute, checkpoints enter
    # the mode again before they recompute.
    when_recomputed = True

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        replaced = tuple(map(_by_geometry, args))
        result = func(*replaced, **(kwargs or {}))
        if args:
            # If an operator changes a view in place, autograd immediately makes a new gradient
            # function for the view. This call does the same, because a gradient function that is
            # made later would run earlier in the backward pass.
            _by_geometry(args[0])
        if isinstance(result, FakeTensor) and result._is_view():
            if args and result is replaced[0]:
                return args[0]
            vars(result).setdefault("_version_when_made", result._version)
        return result


def _by_geometry(argument: Any) -> Any:
    """Return an argument of a function, with outdated views replaced as in `_ViewsByGeometry`.

    Only views that require gradients are replaced. The argument may be a view, or a list or tuple
    that contains views; any other argument is returned unchanged.
    """
    if type(argument) in (list, tuple):
        return type(argument)(map(_by_geometry, argument))
    # `_is_view` and `requires_grad` are checked before `_base` is read, because some placeholder
    # tensors raise an error if their `_base` is read. For example, such a placeholder represents
    # logits that are computed in chunks.
    if (
        not isinstance(argument, FakeTensor)
        or not argument._is_view()
        or not argument.requires_grad
    ):
        return argument
    attributes, version = vars(argument), argument._version
    if attributes.get("_version_when_made", version) == version:
        return argument
    # All uses of the view until the next change share one gradient function, as for real tensors.
    if "_by_geometry" not in attributes or attributes["_by_geometry"]._version != version:
        geometry = argument.size(), argument.stride(), argument.storage_offset()
        attributes["_by_geometry"] = torch.as_strided(argument._base, *geometry)
    return attributes["_by_geometry"]
