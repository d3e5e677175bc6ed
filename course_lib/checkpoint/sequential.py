"""Checkpoint each segment of a chain of functions."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .._check import whole
from .nonreentrant import NOT_EXPLICIT, checkpoint


def checkpoint_sequential(
    functions, segments: int, input: Tensor, use_reentrant: bool | None = None, **kwargs
) -> Any:
    """Run functions one after the other, and checkpoint each segment of them except the last.

    Args:
        functions: A `torch.nn.Sequential`, or a list (or `ModuleList`) of modules or functions.
        segments: Number of segments, from 1 to the number of functions. All have the same length,
            except that the last one includes the remaining functions.
        input: Input of the first function.
        use_reentrant, preserve_rng_state: Options of `checkpoint`.

    Raises:
        ValueError: There are more segments than functions, or other keyword arguments are given.
    """
    if use_reentrant is None:
        warnings.warn(f"torch.utils.checkpoint.checkpoint_sequential: {NOT_EXPLICIT}", stacklevel=2)
        use_reentrant = False
    preserve_rng_state = kwargs.pop("preserve_rng_state", True)
    if kwargs:
        raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))
    functions = list(functions)
    size = len(functions) // whole("segments", segments, 1, len(functions))
    options = {"use_reentrant": use_reentrant, "preserve_rng_state": preserve_rng_state}
    for start in range(0, size * (segments - 1), size):
        input = checkpoint(_in_a_row(functions[start : start + size]), input, **options)
    return _in_a_row(functions[size * (segments - 1) :])(input)


def _in_a_row(functions: list) -> Callable:
    def forward(x):
        for function in functions:
            x = function(x)
        return x

    return forward
