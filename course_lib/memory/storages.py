"""Find the storages of a tensor, and the tensors of a model, an optimizer or an autograd node."""

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
from .._torch.symbolic import FakeTensor, tracked_device_kind
from .._torch.tensors import tensors_among, tensors_in
from ..symbolic.quantization import quantization_state


def storages_of(tensor: Tensor) -> tuple[UntypedStorage, ...]:
    """Return the storages that hold a tensor's bytes.

    Most tensors have one storage. Sparse, nested and quantized tensors and wrapper subclasses may
    have several.

    Raises:
        NotImplementedError: The storages cannot be found. The tensor has oneDNN's opaque layout, or
            it is a wrapper subclass whose attributes contain no tensors.
    """
    if not (type(tensor) is Tensor or type(tensor) is nn.Parameter or owns_storage(type(tensor))):
        # This case includes DTensors and jagged tensors, which are wrappers with the layout
        # `torch.jagged`. The parts of a DTensor include its mesh, which is not a tensor.
        parts = _inner_tensors(tensor)
    elif tensor.layout is torch.strided:
        if not (tensor.is_nested or tensor.is_quantized):
            return (tensor.untyped_storage(),)
        others = (part.untyped_storage() for part in _auxiliary_tensors(tensor))
        return (tensor.untyped_storage(), *others)
    elif tensor.layout is torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    else:
        raise NotImplementedError(
            "the bytes of a tensor can be counted only if its layout is strided or sparse, got"
            f" {tensor.layout}"
        )
    return tuple(
        storage for part in parts if isinstance(part, Tensor) for storage in storages_of(part)
    )


def _auxiliary_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that a nested or quantized tensor holds in addition to its values."""
    if tensor.is_nested:
        shapes = [tensor._nested_tensor_size(), tensor._nested_tensor_strides()]
        return [*shapes, tensor._nested_tensor_storage_offsets()]
    if tensor.qscheme() in (torch.per_channel_affine, torch.per_channel_affine_float_qparams):
        return [tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]
    return []


def _inner_tensors(tensor: Tensor) -> list[Any]:
    """Return the inner tensors of a wrapper subclass; the list may also contain other objects.

    Raises:
        NotImplementedError: No inner tensor is found.
    """
    if hasattr(tensor, "__tensor_flatten__"):
        return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    parts = list(tensors_in(list(vars(tensor).values())))
    if not parts:
        raise NotImplementedError(
            f"the bytes of {type(tensor).__name__} cannot be counted without its method"
            " __tensor_flatten__. Define it in this class; it must return a pair: the names of the"
            " attributes that hold tensors, and any further data, such as None"
        )
    return parts


def owns_storage(tensor_type: type) -> bool:
    """Return whether tensors of this type have a storage of their own.

    The result is False only for wrapper subclasses, whose bytes are in the storages of their inner
    tensors.
    """
    if tensor_type is FakeTensor or tensor_type is Tensor:
        return True
    plain = tensor_type.__torch_dispatch__ is disabled_torch_dispatch
    return plain or issubclass(tensor_type, FakeTensor)


def belongings(
    model: nn.Module | None, optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[tuple[Tensor, str]]:
    """Yield (tensor, category) for each tensor of a model and its optimizers.

    The categories are "parameter", "gradient", "buffer" and "optimizer". A parameter without a
    gradient yields no gradient. The tensors of an optimizer are those that `held_by` yields.
    """
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
    """Yield the tensors of an optimizer: its state and its master weights.

    Master weights are tensors in the optimizer's parameter groups that the optimizer updates
    instead of the model's parameters. If the optimizer has a method `held_tensors`, as
    `OffloadedOptimizer` does, only the tensors that this method returns are yielded.

    Args:
        optimizer: The optimizer.
        of_groups: Whether to limit the yielded state to the parameters that are in the parameter
            groups now. True saves time for an optimizer whose groups contain only a few of its
            parameters at a time. With False, the state of all parameters is yielded.
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
    """Return whether saved-tensor hooks are active.

    Non-reentrant checkpointing and offloading, for example, set such hooks with
    `torch.autograd.graph.saved_tensors_hooks`.
    """
    return top_saved_tensors_hooks(False) is not None


@cache
def saved_tensor_names(kind: type) -> tuple[str, ...]:
    """Return the names under which autograd nodes of a class save tensors.

    For example, `torch.mm` makes a node of the class "MmBackward0", and the names for this class
    are "mat2" and "self".

    Args:
        kind: Class of the autograd nodes.
    """
    return tuple(name[len("_raw_saved_") :] for name in dir(kind) if name.startswith("_raw_saved_"))


def saved_by(node) -> list[Tensor]:
    """Return the tensors that a node of the autograd graph has saved for backward.

    The list is empty if the node has released its tensors, or if a saved tensor was changed in
    place.

    Args:
        node: A `grad_fn` that was made while no saved-tensor hooks were active. If hooks were
            active, reading the node's tensors would run their unpack functions.
    """
    try:
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return tensors_among(node.saved_tensors)
        return tensors_among(
            [getattr(node, f"_saved_{name}") for name in saved_tensor_names(type(node))]
        )
    except RuntimeError:
        return []


def check_model_and_optimizer(model, optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Check the arguments `model` and `optimizer`, and return the optimizers as a tuple.

    Args:
        model: A module or None.
        optimizer: One optimizer, an iterable of optimizers, or None.

    Raises:
        TypeError: `model` or `optimizer` has none of the types above, or the iterable `optimizer`
            contains an object that is not a `torch.optim.Optimizer`.
    """
    kind("model", model, (nn.Module, type(None)), "a torch.nn.Module or None")
    wanted = "a torch.optim.Optimizer, a list of them or None"
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
        return () if optimizer is None else (optimizer,)
    optimizers = tuple(kind("optimizer", optimizer, Iterable, wanted))
    for each in optimizers:
        kind("optimizer", each, torch.optim.Optimizer, wanted)
    return optimizers


@contextmanager
def storages_without_operators(
    mode: TorchDispatchMode, on_new: Callable, on_resize: Callable
) -> Iterator[None]:
    """Inside a `with` block, report storages that are made or resized without an operator.

    Three kinds of storages are reported: states of random number generators, copies by
    `copy.deepcopy`, and storages that FSDP empties and fills. For example, a checkpoint keeps the
    state of the CPU's generator (5,056 bytes) until backward. In a step on CUDA, this state is in
    host memory and is not reported.

    Args:
        mode: Dispatch mode. Storages are reported only in threads in which this mode is active.
        on_new: Function that is called as `on_new(storage)` for a new storage.
        on_resize: Function that is called as `on_resize(storage, was_empty)` after a storage was
            resized. `was_empty` is True if the storage had 0 bytes before.
    """

    def wrap(function: Callable, report: Callable) -> Callable:
        def call(*args):
            was_empty = [not args[0].nbytes()] if report is on_resize else []
            result = function(*args)
            if mode in dispatch_modes():
                storage = result.untyped_storage() if isinstance(result, Tensor) else result
                report(storage, *was_empty)
            return result

        return call

    def on_generator_state(storage: UntypedStorage) -> None:
        # In a step on CUDA, the state of the CPU's generator is in host memory and does not count.
        if tracked_device_kind() == "cpu":
            on_new(storage)

    with ExitStack() as stack:
        patches = (
            (torch, "get_rng_state", on_generator_state),
            (UntypedStorage, "clone", on_new),
            (UntypedStorage, "resize_", on_resize),
        )
        for owner, name, report in patches:
            stack.enter_context(patch.object(owner, name, wrap(getattr(owner, name), report)))
        yield
