"""Storages that hold a tensor's bytes, and the tensors that belong to a model, an optimizer, an
operator's call or the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, UntypedStorage, nn

from .._check import kind
from .._torch.autograd import top_saved_tensors_hooks
from .._torch.modes import TorchDispatchMode, disabled_torch_dispatch, dispatch_modes
from .._torch.symbolic import FakeTensor, counted_kind
from .._torch.tensors import tensors_among, tensors_in
from ..symbolic.quantization import quantization_state


def storages_of(tensor: Tensor) -> tuple[UntypedStorage, ...]:
    """Return the storages that hold a tensor's bytes: one, or several for a sparse, nested,
    quantized or wrapper tensor.

    Raises:
        NotImplementedError: The bytes cannot be seen (oneDNN's opaque layout, or a wrapper that
            does not hold its tensors in its attributes).
    """
    if not (type(tensor) is Tensor or type(tensor) is nn.Parameter or holds_bytes(type(tensor))):
        # The parts of a DTensor include its mesh. A jagged tensor is a wrapper too, with its own
        # layout `torch.jagged`.
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
            "the layout of a tensor must be strided or sparse for its bytes to be counted, got"
            f" {tensor.layout}"
        )
    return tuple(
        storage for part in parts if isinstance(part, Tensor) for storage in storages_of(part)
    )


def _held_beside(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that a nested or quantized tensor holds in addition to its values."""
    if tensor.is_nested:
        shapes = [tensor._nested_tensor_size(), tensor._nested_tensor_strides()]
        return [*shapes, tensor._nested_tensor_storage_offsets()]
    if tensor.qscheme() in (torch.per_channel_affine, torch.per_channel_affine_float_qparams):
        return [tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]
    return []


def _parts_of_wrapper(tensor: Tensor) -> list[Any]:
    """Return the values in which a wrapper holds its tensors.

    Raises:
        NotImplementedError: No tensors are found.
    """
    if hasattr(tensor, "__tensor_flatten__"):
        return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    parts = list(tensors_in(list(vars(tensor).values())))
    if not parts:
        raise NotImplementedError(
            f"the bytes of {type(tensor).__name__} cannot be counted: define a method"
            " __tensor_flatten__ in its class that names the attributes that hold its tensors"
        )
    return parts


def holds_bytes(tensor_type: type) -> bool:
    """Return whether tensors of this type hold their bytes in their own storage, as all except
    wrapper subclasses do."""
    if tensor_type is FakeTensor or tensor_type is Tensor:
        return True
    plain = tensor_type.__torch_dispatch__ is disabled_torch_dispatch
    return plain or issubclass(tensor_type, FakeTensor)


def belongings(
    model: nn.Module | None, optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[tuple[Tensor, str]]:
    """Yield the tensors that the model and the optimizers hold, with the category of each."""
    if model is not None:
        for parameter in model.parameters():
            yield parameter, "parameter"
            if parameter.grad is not None:
                yield parameter.grad, "gradient"
        for tensor in quantization_state(model):
            yield tensor, "parameter"
        for buffer in model.buffers():
            yield buffer, "buffer"
    for optimizer in optimizers:
        for tensor in held_by(optimizer):
            yield tensor, "optimizer"


def held_by(optimizer: torch.optim.Optimizer, of_groups: bool = False) -> Iterator[Tensor]:
    """Yield an optimizer's state, and the master weights that it steps instead of the model's
    parameters.

    If the optimizer has a method `held_tensors`, because it keeps its state elsewhere, that
    method's tensors are yielded instead.

    Args:
        optimizer: The optimizer.
        of_groups: Whether to yield only the state of the parameters in its groups. This is useful
            for an optimizer that is stepped for a few parameters at a time.
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
    """Return whether saved-tensor hooks are active, such as those of non-reentrant checkpointing or
    of offloading."""
    return top_saved_tensors_hooks(False) is not None


@cache
def saved_names(kind: type) -> tuple[str, ...]:
    """Return the names of the tensors that a kind of node saves, such as ("mat1", "mat2")."""
    return tuple(name[len("_raw_saved_") :] for name in dir(kind) if name.startswith("_raw_saved_"))


def saved_by(node) -> list[Tensor]:
    """Return the tensors that a node of the graph has saved for backward.

    The list is empty if the node has released them, or if one of them was changed in place.

    Args:
        node: A `grad_fn` that was made outside saved-tensor hooks. Otherwise reading the tensors
            would run the hooks.
    """
    try:
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return tensors_among(node.saved_tensors)
        return tensors_among([getattr(node, f"_saved_{name}") for name in saved_names(type(node))])
    except RuntimeError:
        return []


def check_model_and_optimizer(model, optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Return a tuple of the optimizers: none, one or several.

    Raises:
        TypeError: `model` is neither a module nor None, or one of the optimizers is not an
            optimizer.
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
    """Report storages that Python makes or resizes without an operator, while the block runs.

    For each one, `made(storage)` or `resized(storage, was_empty)` is called. Such storages are the
    states of random number generators (5,056 bytes, which a checkpoint keeps until backward),
    copies by `copy.deepcopy`, and the storages that FSDP empties and fills. Threads in which the
    mode is not active are ignored.
    """

    def wrap(function: Callable, tell: Callable) -> Callable:
        def call(*args):
            empty = [not args[0].nbytes()] if tell is resized else []
            result = function(*args)
            if mode in dispatch_modes():
                tell(result.untyped_storage() if isinstance(result, Tensor) else result, *empty)
            return result

        return call

    def made_on_host(storage: UntypedStorage) -> None:
        if counted_kind() == "cpu":  # a step on CUDA keeps this state on the host
            made(storage)

    with ExitStack() as stack:
        patches = (
            (torch, "get_rng_state", made_on_host),
            (UntypedStorage, "clone", made),
            (UntypedStorage, "resize_", resized),
        )
        for owner, name, tell in patches:
            stack.enter_context(patch.object(owner, name, wrap(getattr(owner, name), tell)))
        yield
