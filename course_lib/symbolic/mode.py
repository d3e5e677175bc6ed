"""Mode in which all tensors are symbolic, except for small tensors of integers, which are real
because steps read their values."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from .._torch.generators import AllRandomState
from .._torch.modes import DYNAMO
from .._torch.operators import OpOverload, written_arguments
from .._torch.symbolic import FakeTensor, FakeTensorMode
from .._torch.tensors import map_tensors, tensors_among, tensors_in
from . import cpu_kernels, cuda_kernels, shape_cache
from .conversion import apply_to_module
from .cuda_kernels import Gpu
from .quantization import parameter_subclasses

# Largest size of a real storage in bytes, so that a symbolic model takes no memory. It is enough
# for the tokens of 128 samples of 4,096 tokens each.
MOST_BYTES = 1 << 22
_aten = torch.ops.aten
_WITHOUT_VALUES = {
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
}
# Floating-point masks are made by these operators, and models test whether such masks are causal.
_FILLED = {_aten.zeros, _aten.ones, _aten.full}
_COPIED = {_aten._to_copy, _aten.clone, _aten.triu, _aten.tril}
_COMPARED = {_aten.eq, _aten.ne, _aten.lt, _aten.le, _aten.gt, _aten.ge, _aten.isinf}
# Models that drop layers at random draw these numbers, at drop rates that rise from layer to layer.
_LOOKED_AT = {_aten.rand, _aten.linspace}
_LOOKING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# Operators that name a part of a profile, as each step of an optimizer does. They read no tensors.
_MARKERS = {
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
}
_DEVICE = torch.ops.prim.device.default
_INDEXING = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}


class Symbolic(FakeTensorMode):
    """Mode in which tensors are symbolic, except that small tensors of integers and booleans on the
    CPU are real.

    Steps read the values of such tensors. For example, Hugging Face models drop an attention mask
    that is all ones, but they do not test a symbolic mask. An operator runs on real tensors if all
    its inputs are real and its outputs are small tensors of integers or booleans. If one of its
    inputs is symbolic, its outputs are symbolic. If it writes into a real tensor, the values of
    that tensor are unknown from then on, and reading them raises the error that reading a symbolic
    tensor raises.

    Two kinds of symbolic floating-point tensors have known values:

    - A single number that is drawn or computed from real tensors, and the numbers of
      `torch.linspace` and of its views. `item` returns the value, as PyTorch does for
      `torch.tensor(0.5)`.
    - The result of `torch.ones`, `torch.zeros` or `torch.full`, and a triangle of it, until it is
      written to. Comparing such tensors with each other or with numbers, or converting them to
      integers, gives real tensors.

    Args:
        kind: Kind of device, "cpu" or "cuda". All tensors are on the CPU; with "cuda" operators
            save what they save there (see `cuda_kernels`).
        gpu: GPU whose kernels of attention run, if the kind is "cuda"; an H100 or H200 by default.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, kind: str = "cpu", gpu: Gpu | None = None):
        super().__init__()
        self.kind, self.gpu = kind, gpu or Gpu()
        # Attributes that all symbolic tensors on a device share.
        self.attributes: dict[torch.device, dict[str, Any]] = {}
        self.looks = 0  # number of times that the values of a real tensor were read
        # Storages of real tensors whose values are no longer known.
        self._unknown: WeakSet[torch.UntypedStorage] = WeakSet()
        # Storages of symbolic tensors with known values, and the functions that make these values.
        # The values take memory only when such a function is called.
        self._numbers: WeakKeyDictionary[torch.UntypedStorage, Callable[[], Tensor]] = (
            WeakKeyDictionary()
        )
        self._cached = partial(shape_cache.dispatch_cached, self)
        # True while PyTorch runs an operator by decomposing it into other operators.
        self._inside = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Symbolic:
        # The copy of a symbolic tensor, whose attributes are copied, belongs to the same mode.
        return self

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # An operator is running that PyTorch decomposes. The operators into which it is decomposed
        # must be symbolic too, because real numbers would be combined with symbolic tensors.
        if self._inside:
            return shape_cache.fake(self, func, types, args, kwargs or {})
        # Autograd and conversions call this operator very often, so it comes first.
        if func is _DEVICE:
            return args[0].fake_device
        self._inside = True
        try:
            result = self._dispatch(func, types, args, kwargs or {})
            if self.kind == "cuda" and (rule := cuda_kernels.RULES.get(func)):
                return rule(self._cached, result)
            return result
        finally:
            self._inside = False

    def _dispatch(self, func, types, args, kwargs) -> Any:
        """Run an operator by one of three methods: for symbolic, mixed or real inputs."""
        if found := cpu_kernels.INEXACT.get(func):
            warnings.warn(f"{func} {found.reason}; {found.remedy}", stacklevel=2)
        if not isinstance(func, OpOverload):
            return shape_cache.fake(self, func, types, args, kwargs)
        inputs = tensors_among(args, kwargs)
        real = [tensor for tensor in inputs if not isinstance(tensor, FakeTensor)]
        if inputs and not real:
            return self._run_on_symbolic(inputs, func, types, args, kwargs)
        if not inputs and func in _MARKERS:
            return func(*args, **kwargs)
        if not all(map(_is_whole, real)):
            # PyTorch makes the result of `torch.tensor(0.5)` symbolic, and refuses other real
            # floating-point tensors.
            return self._cached(func, types, args, kwargs)
        run = self._symbolically if len(real) < len(inputs) else self._run_on_real
        return run(func, types, args, kwargs)

    def _run_on_symbolic(self, inputs: list[Tensor], func, types, args, kwargs) -> Any:
        if not self._numbers or not any(map(self._maker, inputs)):
            return self._cached(func, types, args, kwargs)
        result = self._symbolically(func, types, args, kwargs)
        return self._symbolic_result(func, result, inputs, args, kwargs)

    def _maker(self, tensor: Tensor) -> Callable[[], Tensor] | None:
        """Return the function that makes a symbolic tensor's values, if they are known."""
        # A sparse tensor has no storage of its own.
        strided = tensor.layout is torch.strided
        return self._numbers.get(tensor.untyped_storage()) if strided else None

    def _run_on_real(self, func, types, args, kwargs) -> Any:
        # A view is real whether or not its values are known.
        if func.is_view or torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)
        if all(map(self.knows, tensors_among(args, kwargs))):
            return self._for_real(func, types, args, kwargs)
        return self._symbolically(func, types, args, kwargs)

    def knows(self, tensor: Tensor) -> bool:
        """Return whether a tensor is real and nothing symbolic has been written into its
        storage."""
        return not isinstance(tensor, FakeTensor) and (
            tensor.untyped_storage() not in self._unknown
        )

    def _for_real(self, func, types, args, kwargs) -> Any:
        """Run the operator if its outputs are to be real, and return them. Otherwise return
        symbolic outputs."""
        looks = bool(_LOOKING & set(func.tags))
        self.looks += looks
        if func._schema.is_mutable or looks:
            return func(*args, **kwargs)
        outline, kind = self._symbolically(func, types, args, kwargs), func.overloadpacket
        made = tensors_among((outline,))
        if kind in _WITHOUT_VALUES or any(tensor.device.type != "cpu" for tensor in made):
            return outline
        if all(map(_is_small, made)):
            return func(*args, **kwargs)
        # Fix the dtype now, because the default dtype may have changed when the values are read.
        if kind in _FILLED:
            self._keep(outline, partial(func, *args, **kwargs | {"dtype": outline.dtype}))
        number = (
            isinstance(outline, Tensor) and outline.is_floating_point() and outline.numel() == 1
        )
        if kind in _LOOKED_AT or (number and tensors_among(args, kwargs)):
            return self.fake_tensor_converter.from_real_tensor(
                self, func(*args, **kwargs), make_constant=True
            )
        return outline

    def _symbolic_result(self, func, outline: Tensor, met: list[Tensor], args, kwargs) -> Tensor:
        """Return the result of an operator that reads only symbolic tensors.

        The result of a copy or a comparison is real if all inputs have known values and it is a
        small tensor of integers or booleans. Otherwise it is `outline`, the symbolic result.
        """
        if func.overloadpacket not in _COPIED | _COMPARED:
            return outline
        makers = list(map(self._maker, met))
        if None in makers or outline.device.type != "cpu":
            return outline
        parts = {tensor: _part(maker, tensor) for tensor, maker in zip(met, makers, strict=True)}
        if _is_small(outline):
            return func(*map_tensors(lambda tensor: parts[tensor](), args), **kwargs)
        if func.overloadpacket in _COPIED:
            of, *others = parts[args[0]], *args[1:]
            self._keep(outline, lambda: func(of(), *others, **kwargs))
        return outline

    def _keep(self, outline: Tensor, numbers: Callable[[], Tensor]) -> None:
        storage = outline.untyped_storage()
        if outline.is_floating_point() and storage.nbytes() <= MOST_BYTES * outline.itemsize:
            self._numbers[storage] = numbers

    def _symbolically(self, func, types, args, kwargs) -> Any:
        """Run the operator with a symbolic tensor instead of each real one, and return its symbolic
        result.

        A result that is one of the real tensors, written to in place, is returned as that tensor.
        """
        in_place_of: dict[Tensor, Tensor] = {}

        def placeholder(tensor: Tensor) -> Tensor:
            if isinstance(tensor, FakeTensor):
                return tensor
            if tensor not in in_place_of:
                in_place_of[tensor] = cpu_kernels.make_result(
                    self._cached, tensor.size(), tensor.stride(), tensor
                )
            return in_place_of[tensor]

        # If the values of a mask are known, the number of elements that it selects is known too.
        if func.overloadpacket in _INDEXING:
            args = args[0], _known_places(self, args[1]), *args[2:]
        # The size of one result of the CTC loss depends on the lengths of the targets.
        if func is _aten._ctc_loss.Tensor and self.knows(args[3]):
            func, args = _aten._ctc_loss.default, _with_lengths(args)
            self.looks += 1
        result = self._cached(func, types, *map_tensors(placeholder, (args, kwargs)))
        if not func._schema.is_mutable:
            return result
        written = list(tensors_in([value for _, value in written_arguments(func, args, kwargs)]))
        for tensor in written:
            self._numbers.pop(tensor.untyped_storage(), None)
        back = {in_place_of[tensor]: tensor for tensor in written if tensor in in_place_of}
        self._unknown.update(tensor.untyped_storage() for tensor in back.values())
        return map_tensors(lambda tensor: back.get(tensor, tensor), result)


def _known_places(mode: Symbolic, indices) -> list[Tensor | None]:
    """Return the indices, with each mask of known values replaced by the indices that it
    selects."""
    found = []
    for index in indices:
        mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        known = mask and mode.knows(index)
        mode.looks += known
        found += index.nonzero().unbind(1) if known else [index]
    return found


def _with_lengths(args) -> tuple:
    """Return the arguments of a CTC loss, with the lengths of its targets as a list of numbers."""
    return *args[:2], [], args[3].flatten().tolist(), *args[4:]


def _part(maker: Callable[[], Tensor], of: Tensor) -> Callable[[], Tensor]:
    """Return a function that returns the values of a symbolic tensor, computed from those of its
    storage.

    The function keeps no reference to the tensor.
    """
    place, dtype = (of.storage_offset(), of.size(), of.stride()), of.dtype
    return lambda: torch.empty(0, dtype=dtype, device="cpu").set_(maker().untyped_storage(), *place)


def _is_small(made: Tensor) -> bool:
    return _is_whole(made) and made.untyped_storage().nbytes() <= MOST_BYTES


def _is_whole(given: Tensor | torch.dtype | None) -> bool:
    """Return whether the argument is an ordinary tensor of integers or booleans, or the dtype of
    one."""
    if isinstance(given, Tensor):
        return type(given) in (Tensor, nn.Parameter, FakeTensor) and _is_whole(given.dtype)
    return given is not None and not given.is_floating_point and not given.is_complex


@contextmanager
def symbolic(mode: Symbolic | None = None) -> Iterator[Symbolic]:
    """Return a context in which tensors have shapes, dtypes and storages, but take no memory. A
    model can be built and trained for a step inside it.

    A `MemoryMeter` inside the context counts the bytes that the same step takes on real tensors.
    Everything that the step uses must be made inside the context, except for tensors of integers.

    Tensors of integers and booleans, such as tokens, labels and masks, are real if they are on the
    CPU and take at most 4 MiB each. A step that reads their values then takes the same branches as
    the real step: for example, it drops a mask that is all ones. All other values are unknown, and
    reading them raises PyTorch's own error, which names the operator. Where layers are dropped at
    random, one random draw decides which. At the end of the context the random number generators
    are restored to their earlier states. Functions and modules that `torch.compile` has compiled
    run uncompiled inside the context, and run compiled again after it.

    Args:
        mode: The mode that an earlier `with symbolic() as mode` returned, to continue with its
            tensors; or a new one, such as `Symbolic(kind="cuda")`.

    PyTorch's own counterpart of a meter in this context is
    `torch.distributed._tools.mem_tracker.MemTracker`.

    Example:
        >>> from course_lib.memory import MemoryMeter
        >>> with symbolic():
        ...     model, batch = nn.Linear(100_000, 100_000), torch.randn(8, 100_000)
        ...     with MemoryMeter(model) as meter:
        ...         model(batch).sum().backward()
        >>> meter.peak_bytes
        80000800008

    Source: `torch._subclasses.FakeTensorMode`.
    """
    # Real tensors, such as tokens, are drawn from the real generators, whose states are restored at
    # the end.
    state = AllRandomState(counted=False)
    try:
        # `_no_grad_trunc_normal_` draws values outside the bounds again, for which it must read
        # them. Symbolic weights need no values.
        without_values = patch.object(
            nn.init, "_no_grad_trunc_normal_", lambda tensor, *_, **__: tensor
        )
        mode = mode or Symbolic()
        with (
            without_values,
            patch.object(nn.Module, "_apply", apply_to_module),
            patch.object(torch, "ctc_loss", _ctc_loss),
            _compiled_code_set_aside(),
            _count_looks(mode),
            mode,
            parameter_subclasses(),
            cuda_kernels.chosen_as_on_cuda(mode.gpu) if mode.kind == "cuda" else nullcontext(),
        ):
            yield mode
    finally:
        state.restore()


@contextmanager
def _count_looks(mode: Symbolic) -> Iterator[None]:
    """Count in `mode.looks`, inside the block, the calls that read a real tensor without an
    operator."""

    def with_count(read: Callable) -> Callable:
        @wraps(read)
        def read_and_count(*args: Any, **kwargs: Any) -> Any:
            mode.looks += 1
            return read(*args, **kwargs)

        return read_and_count

    with ExitStack() as stack:
        for name in ("numpy", "tolist"):
            stack.enter_context(patch.object(Tensor, name, with_count(getattr(Tensor, name))))
        yield


_torch_ctc_loss = torch.ctc_loss


def _ctc_loss(
    log_probs, targets, input_lengths, target_lengths, blank=0, reduction=0, zero_infinity=False
) -> Tensor:
    """Compute the mean of `torch.ctc_loss` for lengths in a list by operators.

    PyTorch writes these lengths into a new tensor without an operator, which a symbolic tensor does
    not allow. All other losses are left to PyTorch.

    Source: aten/src/ATen/native/LossCTC.cpp (`get_clamped_target_length`).
    """
    lengths = log_probs, targets, input_lengths, target_lengths, blank
    if isinstance(target_lengths, Tensor) or reduction != 1:
        return _torch_ctc_loss(*lengths, reduction, zero_infinity)
    losses = _torch_ctc_loss(*lengths, 0, zero_infinity)
    return (losses / torch.tensor(target_lengths, dtype=losses.dtype).clamp_min(1)).mean()


@contextmanager
def _compiled_code_set_aside() -> Iterator[None]:
    """Run functions and modules that `torch.compile` has compiled without compilation inside the
    block, and compiled again after it."""
    compile_ = torch.compile
    with ExitStack() as stack:

        def compile_and_disable(*args: Any, **kwargs: Any) -> Any:
            result = compile_(*args, **kwargs)
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            return result

        # Nothing can be compiled before the compiler is loaded, and loading it takes seconds.
        if DYNAMO in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        else:
            stack.enter_context(patch.object(torch, "compile", compile_and_disable))
        yield
