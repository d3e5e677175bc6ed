"""List of the tensors that autograd keeps for backward, one by one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_pre_hook

from .. import _check
from .._torch.autograd import AccumulateGrad, torch_func_refused
from .._torch.tensors import tensors_in
from .show import Table, bytes_text
from .storages import saved_names, storages_of


@dataclass(frozen=True)
class SavedTensor:
    """One tensor that the graph holds.

    Attributes:
        operator: Autograd node that holds the tensor, for example "AddmmBackward0".
        argument: Name of the tensor in the operator: "mat1", "result", ...
        shape: Shape of the saved tensor, which may be a view.
        dtype: Dtype of its elements.
        bytes: Bytes of the storage that the tensor keeps alive. For a view they are those of the
            whole storage.
        shared_with: Number of the first row with the same storage; None if this row is the first.
    """

    operator: str
    argument: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    shared_with: int | None


class SavedTensors(Table, tuple):
    """Tuple of the `SavedTensor` rows, in the order in which the tensors were saved.

    Attributes:
        total_bytes: Sum in which each storage counts once.
        packed_bytes: Sum in which each tensor counts separately, as in a pack hook that adds up the
            bytes of its tensors.
    """

    columns = ("#", "operator", "argument", "shape", "dtype", "bytes", "shared with")

    total_bytes: int
    packed_bytes: int

    def rows(self):
        return [
            (
                i,
                row.operator,
                row.argument,
                _shape(row.shape),
                str(row.dtype).removeprefix("torch."),
                row.bytes,
                None if row.shared_with is None else f"# {row.shared_with}",
            )
            for i, row in enumerate(self)
        ]

    def caption(self) -> str:
        from course_lib.labels import text

        return text(
            "{count} saved tensors, {total} in storages counted once",
            count=len(self),
            total=bytes_text(self.total_bytes),
        )


def saved_tensors(
    function: Callable[..., Any], *args: Any, parameters: bool = False, **kwargs: Any
) -> SavedTensors:
    """Run `function(*args, **kwargs)` and list the tensors that its result keeps for backward.

    Args:
        function: A module or a function that returns tensors with a graph. The tensors may be in
            lists, tuples, mappings and dataclasses, such as the outputs of Hugging Face models.
        args, kwargs: Arguments of `function`. Those that are saved are listed.
        parameters: Whether to list parameters too, and the buffers of modules. They are identified
            by their storage, because a Linear layer saves a view of its weight, not the weight
            itself.

    Returns:
        A `SavedTensors`. It does not include tensors that code inside the function packs with its
        own saved-tensor hooks, as non-reentrant checkpointing and offloading do, because the graph
        does not hold these tensors. It does not include attributes of `ctx` either.

    Raises:
        TypeError: `function` is not callable.
        ValueError: Nothing in the result requires a gradient.
    """
    _check.function("function", function, "a module or a function that returns tensors")
    # The references are weak, so that a tensor that the graph has released is gone.
    packed: list[weakref.ref[_SavedTensor]] = []

    def pack(tensor: Tensor) -> _SavedTensor:
        item = _SavedTensor(tensor, torch.autograd._get_sequence_nr() - 1)
        packed.append(weakref.ref(item))
        return item

    # Addresses of the storages of the parameters and buffers of all called modules.
    belongings: set[int] = set()

    def meet(module: nn.Module, inputs) -> None:
        belongings.update(_addresses([*module.parameters(), *module.buffers()]))

    with (
        torch_func_refused("saved_tensors"),
        register_module_forward_pre_hook(meet),
        saved_tensors_hooks(pack, _SavedTensor.unpack),
    ):
        result = function(*args, **kwargs)
    roots = [tensor.grad_fn for tensor in tensors_in(result) if tensor.grad_fn is not None]
    if not roots:
        raise ValueError(
            "function must return a tensor that requires a gradient, got none; without one"
            " autograd keeps no tensors"
        )
    held = [item for item in (ref() for ref in packed) if item is not None]
    leaves = _name_items(roots, held)
    given = _addresses(tensors_in((args, kwargs)))
    return _table(held, set() if parameters else (belongings | leaves) - given)


def _table(held: list[_SavedTensor], hidden: set[int]) -> SavedTensors:
    """Return one row for each saved tensor, without tensors whose storages all have hidden
    addresses."""
    first: dict[int, int] = {}
    rows, total, total_packed = [], 0, 0
    for item in held:
        tensor = item.tensor
        storages = [s for s in storages_of(item.tensor) if s._cdata not in hidden]
        if not storages:
            continue
        kept = sum(storage.nbytes() for storage in storages)
        known = [first[storage._cdata] for storage in storages if storage._cdata in first]
        total += sum(storage.nbytes() for storage in storages if storage._cdata not in first)
        total_packed += tensor.nbytes if tensor.layout is torch.strided else kept
        for storage in storages:
            first.setdefault(storage._cdata, len(rows))
        shared_with = known[0] if known else None
        rows.append(
            SavedTensor(
                item.operator, item.argument, tuple(tensor.shape), tensor.dtype, kept, shared_with
            )
        )
    table = SavedTensors(rows)
    table.total_bytes, table.packed_bytes = total, total_packed
    return table


class _SavedTensor:
    """Object that the graph holds instead of a saved tensor, with the number of the autograd node
    that saved it."""

    # Items that autograd unpacked while `_name` read a node's saved tensors.
    asked: ClassVar[list[_SavedTensor]] = []

    def __init__(self, tensor: Tensor, number: int):
        # The tensor is detached. Otherwise an operator that saves its own result would keep itself
        # alive forever through it.
        self.tensor = tensor.detach()
        self.number = number
        # This name is kept, for example, for tensors inside CopySlices, which is an in-place change
        # of a view.
        self.operator = "(not reached from the result)"
        self.argument = ""

    def unpack(self) -> Tensor:
        _SavedTensor.asked.append(self)
        return self.tensor


def _name_items(roots: list, held: list[_SavedTensor]) -> set[int]:
    """Give saved tensors the names of their nodes and arguments. Return the addresses of the
    leaves' storages."""
    by_number: dict[int, list[_SavedTensor]] = {}
    for item in held:
        by_number.setdefault(item.number, []).append(item)
    leaves: set[int] = set()
    waiting, seen = list(roots), set(roots)
    while waiting:
        node = waiting.pop()
        if isinstance(node, AccumulateGrad):
            leaves |= _addresses([node.variable])
        elif node._sequence_nr() in by_number:
            _name(node, by_number[node._sequence_nr()])
        above = {function for function, _ in node.next_functions if function is not None} - seen
        seen |= above
        waiting.extend(above)
    return leaves


def _name(node, items: list[_SavedTensor]) -> None:
    """Give the saved tensors of a node the node's name and the names of the operator's
    arguments."""
    function = isinstance(node, torch.autograd.function.BackwardCFunction)
    for name in ("saved_tensors",) if function else saved_names(type(node)):
        _SavedTensor.asked.clear()
        getattr(node, name if function else f"_saved_{name}")
        for item in _SavedTensor.asked:
            item.argument = name
    for item in items:
        item.operator = node.name().removeprefix("torch::autograd::")
    _SavedTensor.asked.clear()


def _addresses(tensors: Iterable[Tensor]) -> set[int]:
    """Return the addresses of the tensors' storages."""
    return {storage._cdata for tensor in tensors for storage in storages_of(tensor)}


def _shape(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "scalar"
