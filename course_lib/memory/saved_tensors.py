"""List the tensors that autograd keeps for the backward pass of a function."""

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
from .._torch.autograd import AccumulateGrad, checked_torch_func
from .._torch.tensors import tensors_in
from .show import Table, bytes_text
from .storages import saved_tensor_names, storages_of


@dataclass(frozen=True)
class SavedTensor:
    """One tensor that the autograd graph keeps for backward.

    Attributes:
        operator: Name of the autograd node that holds the tensor, for example "AddmmBackward0".
        argument: Name under which this node saves the tensor, such as "mat1" or "result".
        shape: Shape of the saved tensor, which may be a view.
        dtype: Dtype of the tensor's elements.
        bytes: Bytes of the storage that the tensor keeps alive. For a view this is the whole
            storage.
        shared_with: Index, in `SavedTensors`, of the first tensor with the same storage. None if
            this tensor is the first.
    """

    operator: str
    argument: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    shared_with: int | None


class SavedTensors(Table, tuple):
    """Tuple of `SavedTensor` objects in the order of saving, displayed as a table.

    Attributes:
        total_bytes: Bytes that the tensors keep alive. A storage that several tensors share counts
            once.
        packed_bytes: Sum of `Tensor.nbytes` of the listed tensors, as a pack hook would count them.
            Tensors that share a storage all count, and a view counts with its own elements, not
            with its whole storage.
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
                _shape_text(row.shape),
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
        function: A module or a function that returns tensors with an autograd graph. The tensors
            may be in lists, tuples, mappings and dataclasses, such as the outputs of Hugging Face
            models.
        args, kwargs: Arguments of `function`. Tensors among them are listed if they are saved for
            backward.
        parameters: Whether to list saved parameters and buffers too. A saved tensor counts as a
            parameter if it has the storage of a parameter. For example, a Linear layer saves a view
            of its weight.

    Returns:
        A table of the saved tensors, with sums of their bytes. Tensors that the autograd graph does
        not hold are not listed. Examples are attributes of an `autograd.Function`'s `ctx`, and
        tensors that code inside the function packs with its own saved-tensor hooks, as offloading
        does.

    Raises:
        TypeError: `function` is not callable.
        ValueError: No tensor in the result requires a gradient.
    """
    _check.function("function", function, "a module or a function that returns tensors")
    # The references are weak, so that tensors which the graph has released are not listed.
    packed: list[weakref.ref[_PackedTensor]] = []

    def pack(tensor: Tensor) -> _PackedTensor:
        item = _PackedTensor(tensor, torch.autograd._get_sequence_nr() - 1)
        packed.append(weakref.ref(item))
        return item

    # Addresses of the storages of the parameters and buffers of all called modules.
    belongings: set[int] = set()

    def add_belongings(module: nn.Module, inputs) -> None:
        belongings.update(_storage_addresses([*module.parameters(), *module.buffers()]))

    with (
        checked_torch_func("saved_tensors"),
        register_module_forward_pre_hook(add_belongings),
        saved_tensors_hooks(pack, _PackedTensor.unpack),
    ):
        result = function(*args, **kwargs)
    roots = [tensor.grad_fn for tensor in tensors_in(result) if tensor.grad_fn is not None]
    if not roots:
        raise ValueError(
            "function must return a tensor that requires a gradient, got none; without such"
            " a tensor, autograd saves nothing for backward"
        )
    held = [item for item in (ref() for ref in packed) if item is not None]
    leaves = _name_packed_tensors(roots, held)
    in_arguments = _storage_addresses(tensors_in((args, kwargs)))
    return _table(held, set() if parameters else (belongings | leaves) - in_arguments)


def _table(held: list[_PackedTensor], hidden: set[int]) -> SavedTensors:
    """Return a table with one row for each saved tensor that is not hidden, and sums of bytes.

    Args:
        held: Saved tensors that the graph still holds, with their names.
        hidden: Addresses of storages. A tensor is left out if all its storages are among them.
    """
    first: dict[int, int] = {}  # storage address -> index of the first row with this storage
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


class _PackedTensor:
    """Result of the pack hook, which the graph holds instead of a saved tensor.

    Args:
        tensor: The saved tensor.
        number: Sequence number of the autograd node that saves it.

    Attributes:
        operator: Name of the autograd node that saves the tensor, such as "AddmmBackward0".
        argument: Name under which the node saves the tensor, such as "mat1".
    """

    # Packed tensors that autograd unpacked while `_name_tensors_of_node` read a saved tensor. They
    # show which packed tensor belongs to the name that is being read.
    unpacked: ClassVar[list[_PackedTensor]] = []

    def __init__(self, tensor: Tensor, number: int):
        # The tensor is detached. Otherwise the graph node of an operator that saves its own result
        # would keep itself alive forever, because the result refers to the node.
        self.tensor = tensor.detach()
        self.number = number
        # Some nodes are not found from the result, for example those inside `CopySlices`, the node
        # of a view that was changed in place. Their tensors keep this name.
        self.operator = "(not reached from the result)"
        self.argument = ""

    def unpack(self) -> Tensor:
        """Return the tensor; this is the unpack hook."""
        _PackedTensor.unpacked.append(self)
        return self.tensor


def _name_packed_tensors(roots: list, held: list[_PackedTensor]) -> set[int]:
    """Set the names of the packed tensors, and return the storage addresses of the graph's leaves.

    Args:
        roots: Autograd nodes of the function's results, from which the graph is searched.
        held: Packed tensors that the graph holds.
    """
    by_number: dict[int, list[_PackedTensor]] = {}
    for item in held:
        by_number.setdefault(item.number, []).append(item)
    leaves: set[int] = set()
    waiting, seen = list(roots), set(roots)
    while waiting:
        node = waiting.pop()
        if isinstance(node, AccumulateGrad):
            leaves |= _storage_addresses([node.variable])
        elif node._sequence_nr() in by_number:
            _name_tensors_of_node(node, by_number[node._sequence_nr()])
        next_nodes = {other for other, _ in node.next_functions if other is not None} - seen
        seen |= next_nodes
        waiting.extend(next_nodes)
    return leaves


def _name_tensors_of_node(node, items: list[_PackedTensor]) -> None:
    """Set `operator` and `argument` of the packed tensors that a node has saved."""
    function = isinstance(node, torch.autograd.function.BackwardCFunction)
    for name in ("saved_tensors",) if function else saved_tensor_names(type(node)):
        _PackedTensor.unpacked.clear()
        getattr(node, name if function else f"_saved_{name}")
        for item in _PackedTensor.unpacked:
            item.argument = name
    for item in items:
        item.operator = node.name().removeprefix("torch::autograd::")
    _PackedTensor.unpacked.clear()


def _storage_addresses(tensors: Iterable[Tensor]) -> set[int]:
    """Return the addresses of the tensors' storages."""
    return {storage._cdata for tensor in tensors for storage in storages_of(tensor)}


def _shape_text(shape: tuple[int, ...]) -> str:
    """Return a shape as text, such as "2 × 3", or "scalar"."""
    return " × ".join(map(str, shape)) or "scalar"
