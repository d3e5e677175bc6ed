"""`checkpoint`: what it takes, and which mode runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import noop_context_fn

from .nonreentrant import Region
from .reentrant import CheckpointFunction
from .report import OperatorLog, warn

overrides: dict[str, bool | None] = {"early_stop": None, "debug": None}


@contextmanager
def _override(name: str, value: bool | None) -> Iterator[None]:
    before, overrides[name] = overrides[name], value
    try:
        yield
    finally:
        overrides[name] = before


def set_checkpoint_early_stop(enable: bool) -> AbstractContextManager:
    """Overrides `early_stop` of every checkpoint whose forward pass runs inside the block."""
    return _override("early_stop", enable)


def set_checkpoint_debug_enabled(enabled: bool | None) -> AbstractContextManager:
    """Overrides `debug` of every checkpoint whose forward pass runs inside the block; None leaves it as passed."""
    return _override("debug", enabled)


def warn_not_explicit(name: str) -> None:
    warn(
        f"{name}: the use_reentrant parameter should be passed explicitly. use_reentrant=False is recommended, and is "
        "what leaving it out means here; in PyTorch it means True, or is an error, depending on the version."
    )


# The compiler does not look inside: it would break its graph at the hooks, but then compile the frames of the function,
# and its graphs save other tensors than the recomputation, which runs as it is. This decorator loads the compiler when
# the function is first called; `torch.compiler.disable` does so when this module is imported.
@torch._disable_dynamo
def checkpoint(
    function: Callable,
    *args,
    use_reentrant: bool | None = None,
    context_fn: Callable[[], tuple[AbstractContextManager, AbstractContextManager]] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    **kwargs,
) -> Any:
    """Run `function(*args, **kwargs)`, keep its inputs instead of its activations, and run it again for backward.

    Args:
        function: must do the same in both runs.
        use_reentrant: True runs the function without a graph, and then again with a backward pass inside the backward
            pass: an input must require gradients, and `torch.autograd.grad` cannot be used. False builds the graph and
            leaves its saved tensors out: all ways to go backward work. The remaining arguments are for False only.
        context_fn: returns two contexts, one for each run.
        determinism_check: "default" compares shapes, dtypes and devices of what both runs save; "none" only counts.
        debug: let a `CheckpointError` list the operators of both runs.
        early_stop: end the second run as soon as everything needed is there.
        **kwargs: the function's (for use_reentrant=False), and `preserve_rng_state` (default True): give the second
            run the random numbers of the first, on the CPU, the devices of the inputs and the current device.

    Raises:
        ValueError: arguments that don't go together.
        CheckpointError: (in the backward pass) both runs did not save the same.
        RuntimeError: (in the backward pass) an input was changed in place.

    Source: Chen et al. 2016, arXiv:1604.06174; behaviour as of torch 2.13.
    """
    if use_reentrant is None:
        warn_not_explicit("torch.utils.checkpoint")
    preserve_rng_state = kwargs.pop("preserve_rng_state", True)
    if use_reentrant:
        if kwargs:
            raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))
        if context_fn is not noop_context_fn or debug is not False:
            raise ValueError("Passing `context_fn` or `debug` is only supported when use_reentrant=False.")
        return CheckpointFunction.apply(function, preserve_rng_state, *args)

    if determinism_check not in ("default", "none"):
        raise ValueError(f"determinism_check should be one of ['default', 'none'], but got {determinism_check}")
    logs = None
    if debug if overrides["debug"] is None else overrides["debug"]:
        if context_fn is not noop_context_fn:
            raise ValueError("debug=True is incompatible with non-default context_fn")
        logs = OperatorLog(), OperatorLog()
    forward_context, recompute_context = context_fn() if logs is None else logs
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if torch._C._are_functorch_transforms_active():
        warn("checkpoint: inside a transform of torch.func, such as vmap, activations are kept as if it were not there")
        return function(*args, **kwargs)
    early_stop = early_stop if overrides["early_stop"] is None else overrides["early_stop"]
    how = preserve_rng_state, early_stop, determinism_check == "default", recompute_context, logs
    return Region(function, args, kwargs, *how).forward(args, kwargs, forward_context)
