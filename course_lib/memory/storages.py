"""Storages that hold a tensor's bytes, and which tensors belong to a model, an optimizer, an
operator's call or the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from .._check import kind
from .._torch import tensors_in

AccumulateGrad = torch._C._functions.AccumulateGrad


def storages_of(tensor: Tensor) -> tuple[UntypedStorage, ...]:
    """The storages that hold a tensor's bytes: one, or one for each part of a sparse, nested or
    wrapper tensor.

    Raises:
        NotImplementedError: they cannot be seen (oneDNN's opaque layout, or a wrapper that holds
            its tensors elsewhere than in its attributes).
    """
    if not (type(tensor) is Tensor or type(tensor) is nn.Parameter or holds_bytes(type(tensor))):
        # Of a DTensor, the mesh too. A jagged tensor is a wrapper whose layout is its own.
        parts = _parts_of_wrapper(tensor)
    elif tensor.layout is torch.strided:
        if not (tensor.is_nested or tensor.is_quantized):
            return (tensor.untyped_storage(),)
        return (tensor.untyped_storage(), *(t.untyped_storage() for t in _held_beside(tensor)))
    elif tensor.layout is torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    else:
        raise NotImplementedError(
            f"MemoryMeter cannot see the bytes of a tensor with layout {tensor.layout}; it sees"
            " strided and sparse ones"
        )
    return tuple(
        storage for part in parts if isinstance(part, Tensor) for storage in storages_of(part)
    )


def _held_beside(tensor: Tensor) -> list[Tensor]:
    """Tensors that a nested or quantized tensor holds besides its numbers."""
    if tensor.is_nested:
        shapes = [tensor._nested_tensor_size(), tensor._nested_tensor_strides()]
        return [*shapes, tensor._nested_tensor_storage_offsets()]
    if tensor.qscheme() in (torch.per_channel_affine, torch.per_channel_affine_float_qparams):
        return [tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]
    return []


def _parts_of_wrapper(tensor: Tensor) -> list[Any]:
    if hasattr(tensor, "__tensor_flatten__"):
        return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    parts = list(tensors_in(list(vars(tensor).values())))
    if not parts:
        raise NotImplementedError(
            f"MemoryMeter cannot see the bytes of a {type(tensor).__name__}: give its class a"
            " method __tensor_flatten__, which names the attributes that hold its tensors"
        )
    return parts


def holds_bytes(tensor_type: type) -> bool:
    """True for tensors whose own storage is what they hold: all but wrapper subclasses."""
    if tensor_type is FakeTensor or tensor_type is Tensor:
        return True
    plain = tensor_type.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    return plain or issubclass(tensor_type, FakeTensor)


def tensors_among(args, kwargs: Mapping | None = None) -> list[Tensor]:
    """The tensors among an operator's arguments, in lists too; quicker than `tensors_in`, which
    looks deeper."""
    found = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(item for item in value if isinstance(item, Tensor))
    return found


def belongings(
    model: nn.Module | None, optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[tuple[Tensor, str]]:
    """Tensors that model and optimizers hold, with the category of each."""
    if model is not None:
        for parameter in model.parameters():
            yield parameter, "parameter"
            if parameter.grad is not None:
                yield parameter.grad, "gradient"
        for buffer in model.buffers():
            yield buffer, "buffer"
    for optimizer in optimizers:
        for tensor in held_by(optimizer):
            yield tensor, "optimizer"


def held_by(optimizer: torch.optim.Optimizer, of_groups: bool = False) -> Iterator[Tensor]:
    """An optimizer's state, and the master weights that it steps in place of the model's
    parameters.

    With `of_groups`, only the state of the parameters in its groups: an optimizer may be stepped a
    few at a time. An optimizer that keeps its state elsewhere says what it holds by a method
    `held_tensors`.
    """
    if hasattr(optimizer, "held_tensors"):
        yield from optimizer.held_tensors()
        return
    if of_groups:
        for group in optimizer.param_groups:
            yield from tensors_in(
                [optimizer.state[p] for p in group["params"] if p in optimizer.state]
            )
    else:
        yield from tensors_in(optimizer.state)
    for group in optimizer.param_groups:
        yield from (
            p for p in group["params"] if not p.requires_grad and not isinstance(p, nn.Parameter)
        )


def hooks_active() -> bool:
    """True inside saved-tensor hooks, such as those of non-reentrant checkpointing or of
    offloading."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


@cache
def saved_names(kind: type) -> tuple[str, ...]:
    """Names of what a kind of node saves, such as ("mat1", "mat2")."""
    return tuple(name[len("_raw_saved_") :] for name in dir(kind) if name.startswith("_raw_saved_"))


def saved_by(node) -> list[Tensor]:
    """Tensors that a node of the graph has saved for backward; nothing if it has been freed or one
    of them was changed.

    Args:
        node: a `grad_fn` made outside saved-tensor hooks (else asking would run them).
    """
    try:
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return tensors_among(node.saved_tensors)
        return tensors_among([getattr(node, f"_saved_{name}") for name in saved_names(type(node))])
    except RuntimeError:
        return []


def check_model_and_optimizer(model, optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers, of which there may be one, several or none.

    Raises:
        TypeError: model is no module, or one of the optimizers is none.
    """
    kind("model", model, (nn.Module, type(None)), "a torch.nn.Module or None")
    wanted = "a torch.optim.Optimizer, several of them or None"
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
        return () if optimizer is None else (optimizer,)
    optimizers = tuple(kind("optimizer", optimizer, Iterable, wanted))
    for each in optimizers:
        kind("optimizer", each, torch.optim.Optimizer, wanted)
    return optimizers


@contextmanager
def storages_without_operators(
    mode: TorchDispatchMode, made: Callable, resized: Callable
) -> Iterator[None]:
    """Tell of the storages that Python makes or resizes past a mode: `made(storage)`,
    `resized(storage, was_empty)`.

    They are the states of random number generators (5,056 bytes, which a checkpoint keeps until
    backward), copies by `copy.deepcopy`, and the storages that FSDP empties and fills. Threads in
    which the mode is not active don't count.
    """

    def telling(function: Callable, tell: Callable) -> Callable:
        def call(*args):
            empty = [not args[0].nbytes()] if tell is resized else []
            result = function(*args)
            if mode in _get_current_dispatch_mode_stack():
                tell(result.untyped_storage() if isinstance(result, Tensor) else result, *empty)
            return result

        return call

    with ExitStack() as stack:
        told = (
            (torch, "get_rng_state", made),
            (UntypedStorage, "clone", made),
            (UntypedStorage, "resize_", resized),
        )
        for owner, name, tell in told:
            stack.enter_context(patch.object(owner, name, telling(getattr(owner, name), tell)))
        yield
