"""Checkpoint each segment of a chain of functions: `checkpoint_sequential`.

Unlike `checkpoint_blocks`, it runs the functions itself and does not change a model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .._check import whole
from .nonreentrant import USE_REENTRANT_WARNING, checkpoint


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

    Returns:
        The output of the last function.

    Raises:
        TypeError, ValueError: `segments` is not a whole number between 1 and the number of
            functions, or there are other keyword arguments.
    """
    if use_reentrant is None:
        warnings.warn(
            f"torch.utils.checkpoint.checkpoint_sequential: {USE_REENTRANT_WARNING}", stacklevel=2
        )
        use_reentrant = False
    preserve_rng_state = kwargs.pop("preserve_rng_state", True)
    if kwargs:
        raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))
    functions = list(functions)
    size = len(functions) // whole("segments", segments, 1, len(functions))
    options = {"use_reentrant": use_reentrant, "preserve_rng_state": preserve_rng_state}
    for start in range(0, size * (segments - 1), size):
        input = checkpoint(_compose(functions[start : start + size]), input, **options)
    return _compose(functions[size * (segments - 1) :])(input)


def _compose(functions: list) -> Callable:
    def forward(x):
        for function in functions:
            x = function(x)
        return x

    return forward
