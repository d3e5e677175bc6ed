"""Compare a block's recomputation with its first run, by the tensors saved for backward.

`FunctionWithSavedTensorCheck` installs saved-tensor hooks inside those of a checkpoint. In the
forward pass, the inner hooks keep a checksum of each saved tensor, and pass the tensor on to the
checkpoint's hooks. In the backward pass, they compare this checksum with that of the tensor that
the checkpoint returns. This works with every checkpoint that uses saved-tensor hooks, such as
PyTorch's.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError

from .._torch.autograd import (
    current_node,
    saved_value_may_differ,
    top_saved_tensors_hooks,
    writes_after_saving,
)
from .._torch.modes import disable_current_modes

# (pack, unpack), the arguments of `torch.autograd.graph.saved_tensors_hooks`
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]

STATE_PRESERVED = (
    "A block that is recomputed must not change buffers, parameters, global variables or other"
    " objects, such as a cache among its arguments (call a model of transformers with"
    " use_cache=False and without past_key_values). It may change its other attributes (tensors,"
    " numbers and containers of these) and draw random numbers from torch, random, numpy or a"
    " generator in an attribute. Change the block"
)


class Comparison:
    """Comparison of later runs of a block with its first run, by checksums of tensors.

    The first run is in the forward pass, and later runs recompute the block's activations. With a
    checkpoint, the tensors saved for backward are compared. The outputs cannot be compared, because
    a recomputation in a checkpoint stops early and does not run the last operator. With a schedule
    (`schedule_blocks`), each block runs to its end, and the outputs are compared.

    On a CPU, checksums are exact. On other devices they allow for rounding, because operators there
    may add numbers in any order. Memory meters do not count the checksums. Symbolic, sparse, nested
    and quantized tensors and subclasses of `Tensor` are not compared.

    Args:
        name: Name of the block, for error messages.
        advice: Advice at the end of the error message, such as "exclude the block from
            checkpointing".
        rule: Sentences that list which state a recomputed block may change (such as attributes) and
            which state it must not change (such as buffers). Error messages contain them, unless
            the comparison has found the cause.
    """

    hint = ""  # additional sentence at the end of the error message about a difference

    def __init__(self, name: str, advice: str, rule: str = STATE_PRESERVED):
        self.name, self.advice, self.rule = name, advice, rule
        self.checksums_before: dict[str, Any] = {}
        self.statistics: set[int] = set()

    def describe_difference(self, first: Any, tensor: Tensor, name: str) -> str:
        """Describe how a tensor of a later run differs from the same tensor of the first run.

        Args:
            first: Checksum of the tensor in the first run, or None if the tensor is not compared.
            tensor: The tensor of the later run.
            name: Name of the tensor in the description.

        Returns:
            The description, or "" if the checksums are equal or `first` is None.
        """
        if first is None or not checksums_differ(first, checksum(tensor)):
            return ""
        kind = f"{str(tensor.dtype).removeprefix('torch.')}, shape {tuple(tensor.shape)}"
        return f"{name} ({kind}) has different values"

    def record_tensors(self, statistics: list[Tensor], tensors: dict[str, Tensor]) -> None:
        """Record checksums of the block's parameters, buffers and attributes before a later run.

        Args:
            statistics: Running statistics of batch norms. They are among `tensors`, but a
                recomputation may change them.
            tensors: Dict from name to tensor, with all tensors that `check_unchanged` compares
                after the recomputation.
        """
        self.checksums_before = {name: checksum(tensor) for name, tensor in tensors.items()}
        # Tensors without a checksum are left out, because symbolic tensors have no address.
        compared = [x for x in statistics if checksum(x) is not None]
        self.statistics = {x.untyped_storage().data_ptr() for x in compared}

    def check_unchanged(self, tensors: dict[str, Tensor]) -> None:
        """Raise an error if a recomputation changed a tensor that is not a running statistic.

        Args:
            tensors: The tensors that were passed to `record_tensors` before the recomputation, by
                name.

        Raises:
            RuntimeError: A tensor has changed. The message has its name.
        """
        for name, tensor in tensors.items():
            if checksums_differ(self.checksums_before[name], checksum(tensor)):
                if tensor.untyped_storage().data_ptr() not in self.statistics:
                    self.fail(f"the recomputation changes {name} again")
        self.checksums_before = {}

    def fail(self, difference: str, rule: str = "") -> None:
        """Raise a RuntimeError that describes a difference between two runs of the block.

        Args:
            difference: Description of the difference.
            rule: Sentences that replace those of the attribute `rule`, or "" for the attribute.
        """
        raise RuntimeError(
            f"the recomputation of {self.name} differs from the first run of this block, so"
            f" gradients or buffers would be wrong: {difference}. {rule or self.rule}, or"
            f" {self.advice}" + self.hint
        )


class FirstComparison(Comparison):
    """Comparison of a block's recomputations with its first run, until one of them is equal.

    `checkpoint_blocks` uses this class if `compare=True`. Only the tensors saved for backward are
    compared. A recomputation may change the block's buffers without an error.

    Args:
        name, advice, rule: The arguments of `Comparison`.
        equal: Set of the names of all blocks whose recomputation was equal. The comparisons of all
            blocks share this set. A comparison adds the name of its block when a recomputed tensor
            is equal, and removes the name if a later tensor of the block differs.
    """

    hint = ". If the difference does not matter, pass compare=False to checkpoint_blocks"

    def __init__(self, name: str, advice: str, rule: str, equal: set[str]):
        super().__init__(name, advice, rule)
        self.equal = equal

    def describe_difference(self, first: Any, tensor: Tensor, name: str) -> str:
        found = super().describe_difference(first, tensor, name)
        (self.equal.discard if found else self.equal.add)(self.name)
        return found


class FunctionWithSavedTensorCheck:
    """Wrapper of a block's function, to check that a recomputation saves equal tensors.

    A checkpoint calls this object instead of the function: once in the forward pass, and again in
    the backward pass. When backward reads a recomputed tensor, this tensor is compared with the one
    that the first call saved.

    Args:
        function: The block's function.
        comparison: Comparison that raises an error if two tensors differ.
    """

    def __init__(self, function: Callable, comparison: Comparison):
        self.function, self.comparison = function, comparison
        self.has_run = False
        self.__qualname__ = getattr(function, "__qualname__", type(function).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hooks = top_saved_tensors_hooks(False)
        if self.has_run or hooks is None:  # without hooks, no checkpoint is around the function
            return self.function(*args, **kwargs)
        self.has_run = True
        comparing = ComparingHooks(self.comparison, hooks)
        with saved_tensors_hooks(comparing.pack, comparing.unpack):
            return self.function(*args, **kwargs)


class ComparingHooks:
    """Saved-tensor hooks that add a comparison to the hooks of a checkpoint.

    `pack` passes a saved tensor to the checkpoint's `pack`, and records its checksum. `unpack` gets
    the recomputed tensor from the checkpoint's `unpack`, and raises an error if its checksum
    differs.

    Args:
        comparison: Comparison of the checkpointed block's first run with its recomputation.
            `comparison` must not refer to this object. Otherwise there would be a reference cycle,
            because this object refers to the checkpoint's hooks, which refer to `comparison`.
        inner: The checkpoint's hooks, a tuple (pack, unpack).
    """

    def __init__(self, comparison: Comparison, inner: Hooks):
        self.comparison, self.inner = comparison, inner
        self.count = 0

    def pack(self, tensor: Tensor) -> list[Any]:
        packed = [self.count, checksum(tensor), self.inner[0](tensor)]
        self.count += 1
        return packed

    def unpack(self, packed: list[Any]) -> Tensor:
        try:
            tensor = self.inner[1](packed[2])
        except Exception as error:
            self._explain(error)
            raise
        self._check_complete(packed[0])
        self._compare(packed, tensor)
        return tensor

    def _check_complete(self, position: int) -> None:
        """Raise an error if the recomputation stopped before it had filled the last saved tensor.

        This happens if the last operator is `rrelu` in training mode. It saves its noise tensor
        before it fills the tensor, and the recomputation stops after the last tensor is saved.

        Args:
            position: Number of the tensor among the tensors that the function saved.
        """
        last = position == self.count - 1
        if last and writes_after_saving(current_node()):
            self.comparison.fail(
                (
                    "the last operator of the block is rrelu in training mode. It saves its noise"
                    " tensor before filling it, but the recomputation stops as soon as all tensors"
                    " are saved, so the noise is missing"
                ),
                "Add a differentiable operator after rrelu, use another activation",
            )

    # `torch.compile` can trace functions that a backward pass calls, but it must not trace this
    # one.
    @torch._disable_dynamo
    def _compare(self, packed: list[Any], tensor: Tensor) -> None:
        """Raise an error if a tensor differs from the one that was saved in the first run.

        Args:
            packed: Result of `pack` for the tensor.
            tensor: The tensor that the checkpoint returns for backward.
        """
        position, first, _ = packed
        if first is None or saved_value_may_differ(current_node(), tensor):
            return
        name = f"tensor {position} saved for backward"
        if difference := self.comparison.describe_difference(first, tensor, name):
            self.comparison.fail(difference)
        packed[1] = None  # a second recomputation, with `retain_graph=True`, is not compared

    def _explain(self, error: Exception) -> None:
        """Raise an error with advice if a recomputation failed, although the first run did not.

        Only a `CheckpointError` and errors of Python's built-in types, except `MemoryError`, are
        explained. For any other error, such as `torch.OutOfMemoryError`, and for an error that
        names its block already, nothing is raised.
        """
        raw = type(error).__module__ == "builtins" or isinstance(error, CheckpointError)
        named = str(error).startswith("the recomputation of ")
        if raw and not named and not isinstance(error, MemoryError):
            kind, text = type(error).__name__, str(error).partition("\n")[0].removesuffix(".")
            raise RuntimeError(
                f"the recomputation of {self.comparison.name} did not repeat the first run of this"
                f" block, but raised {kind}. {self.comparison.rule}, or {self.comparison.advice}."
                f" Message of {kind}: {text}"
            ) from error


# ---- checksums


def checksum(tensor: Tensor) -> Any:
    """Return a checksum of a tensor's values, or None for a tensor that cannot be compared.

    Returns:
        An int for a tensor on the CPU, and a `Sketch` for a tensor on another device. None for
        symbolic, meta, sparse, nested and quantized tensors, and for subclasses of `Tensor` other
        than `nn.Parameter` and `nn.Buffer`.
    """
    plain = type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and tensor.layout is torch.strided
    if not plain or tensor.is_quantized or tensor.is_nested or tensor.device.type == "meta":
        return None
    with disable_current_modes(), torch.no_grad():
        tensor = tensor.detach()
        tensor = tensor.conj() if tensor.is_conj() else tensor
        tensor = torch._neg_view(tensor) if tensor.is_neg() else tensor
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0:  # an expanded dimension repeats its values
                tensor = tensor.narrow(dim, 0, min(1, tensor.shape[dim]))
        # Dimensions are sorted by stride, so that a transposed tensor is not copied.
        tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
        return _bit_checksum(tensor) if tensor.device.type == "cpu" else Sketch(tensor)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bit_checksum(tensor: Tensor) -> int:
    """Return a checksum of the bits of a tensor on the CPU.

    NumPy makes the copies, so that memory meters do not count them. `tensor.numpy()` is not used,
    because it would make the storage unresizable, and FSDP resizes the storages of its parameters.
    """
    return zlib.crc32(np.ascontiguousarray(np.from_dlpack(tensor.view(_INTEGERS[tensor.itemsize]))))


@cache
def _signs(count: int) -> Tensor:
    """Return a tensor of `count` random signs, 1 or -1, which are the same in each process."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(2, (count,), generator=generator, dtype=torch.int8) * 2 - 1


class Sketch:
    """A checksum that allows for rounding: the sum of the values with random signs.

    If a tensor is computed twice, the sums of the two results differ only by rounding errors. These
    errors are small compared with the norm of the values.

    Attributes:
        sum: Sum of the values, each multiplied by 1 or -1. A float64 scalar on the tensor's device.
        square: Sum of the squares of the values, a float64 scalar on the tensor's device.
        tolerance: Largest difference between two sums that is attributed to rounding, as a fraction
            of the norm of the values. 0 for integers.
    """

    chunk = 1 << 18  # number of values that are summed at once; in float64 they take 2 MiB

    def __init__(self, tensor: Tensor):
        signs = _signs(self.chunk).to(tensor.device)
        self.sum = torch.zeros((), dtype=torch.float64, device=tensor.device)
        self.square = self.sum.clone()
        for number, part in enumerate(tensor.reshape(-1).split(self.chunk)):
            # `copy=True`, so that the in-place product below does not change a float64 tensor.
            values = part.to(torch.float64, copy=True)
            self.square += values.square().sum()
            # The signs are rolled by one for each chunk. Otherwise the sum would not change if two
            # chunks were exchanged.
            self.sum += values.mul_(signs.roll(number)[: len(values)]).sum()
        exact = not tensor.is_floating_point()
        self.tolerance = 0.0 if exact else 2e-2 if tensor.itemsize < 4 else 1e-3

    def differs(self, other: Sketch) -> bool:
        """Return whether the values of two sketches differ by more than rounding."""
        # Modes that observe the block's operators, such as selective checkpointing, must not see
        # the operators of the comparison.
        with disable_current_modes():
            values = torch.stack([self.sum, other.sum, self.square]).tolist()
        value, other_value, square = values
        if not np.isfinite(values).all():
            return bool(np.isfinite([value, other_value]).any())
        return abs(value - other_value) > self.tolerance * square**0.5


def checksums_differ(a: Any, b: Any) -> bool:
    """Return whether two checksums belong to different values; False if either of them is None."""
    if a is None or b is None:
        return False
    return a.differs(b) if isinstance(a, Sketch) else a != b
