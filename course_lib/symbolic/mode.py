"""Dispatch mode in which tensors are symbolic, except for small tensors of integers and booleans.

These small tensors are real, because steps read their values.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, partial, wraps
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

# A tensor of integers or booleans is real only if its storage has at most this number of bytes. The
# limit is small enough that a symbolic model takes almost no memory. It is large enough that 128
# samples of 4,096 tokens each are real.
MAX_REAL_BYTES = 1 << 22
_aten = torch.ops.aten
# Operators whose results have no defined values, and are therefore symbolic.
_WITHOUT_VALUES = {
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
}
# Models make floating-point masks with these operators, and test whether such a mask is causal.
# Therefore the values that these operators return are remembered.
_CONSTANT_FILLS = {_aten.zeros, _aten.ones, _aten.full}
# Operators that copy values of their input, and operators that compare values. Models read the
# values of the results.
_COPIES = {_aten._to_copy, _aten.clone, _aten.triu, _aten.tril}
_COMPARISONS = {_aten.eq, _aten.ne, _aten.lt, _aten.le, _aten.gt, _aten.ge, _aten.isinf}
# Operators whose floating-point results keep their values if they have few elements. Models that
# drop layers at random read such values: one random number per layer, and drop rates that rise
# linearly with the layer.
_VALUES_ARE_READ = {_aten.rand, _aten.linspace}
# Tags of operators that read the values of their inputs, such as `item` and `nonzero`.
_TAGS_OF_VALUE_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# Operators that begin and end a named part of a profile. Each optimizer step runs them. None of
# their inputs is a tensor.
_PROFILER_MARKERS = {
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
}
_DEVICE = torch.ops.prim.device.default
_INDEXING = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}


class Symbolic(FakeTensorMode):
    """Dispatch mode in which tensors are symbolic: they have shapes and storages, but no values.

    There are two exceptions: small tensors of integers or booleans are real, and some symbolic
    floating-point tensors have known values. Tensors of integers or booleans on the CPU are real if
    they take at most 4 MiB, because training steps read their values. For example, Hugging Face
    models drop an attention mask if it is real and all ones, but they keep a symbolic mask.

    - If all inputs of an operator are real and its outputs are tensors of integers or booleans of
      at most 4 MiB, the operator runs on real tensors.
    - If an input of an operator is symbolic, all outputs of the operator are symbolic. If the
      operator writes its output into a real tensor, the values of that tensor are unknown from then
      on. Reading them raises the same error as reading a symbolic tensor.

    Two kinds of symbolic floating-point tensors have known values:

    - Results of `torch.rand` and `torch.linspace`, tensors with a single element that was computed
      from real tensors, and views of these tensors. `item` returns their values, as PyTorch's
      `FakeTensorMode` does for `torch.tensor(0.5)`.
    - Results of `torch.ones`, `torch.zeros` and `torch.full`, and their upper or lower triangles,
      until they are written to. Comparing such tensors with each other or with numbers, or
      converting them to integers, gives real tensors.

    Args:
        kind: Kind of device for which bytes are estimated, "cpu" or "cuda". All tensors report the
            CPU as their device. With "cuda", each operator saves the same tensors for
            backward as on CUDA (see `cuda_kernels`).
        gpu: GPU that determines which attention kernels run if `kind` is "cuda". The default is an
            H100 or H200.

    Attributes:
        looks: Number of times so far that code has read the values of a real tensor. If a step does
            not increase this number, its operators do not depend on the values in the batch.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, kind: str = "cpu", gpu: Gpu | None = None):
        super().__init__()
        self.kind, self.gpu = kind, gpu or Gpu()
        # `shape_cache` finds almost all results, so PyTorch's own cache would only take time.
        self.cache_enabled = False
        # Maps each device to the attributes that all symbolic tensors on it have in common.
        self.attributes: dict[torch.device, dict[str, Any]] = {}
        # `_is_decomposing` is True while PyTorch runs an operator by decomposing it into others.
        self.looks, self._is_decomposing = 0, False
        # Storages of real tensors into which a symbolic tensor was written.
        self._unknown: WeakSet[torch.UntypedStorage] = WeakSet()
        # Maps the storages of symbolic tensors with known values to functions that make these
        # values. The values take memory only when such a function is called.
        self._values_functions: WeakKeyDictionary[torch.UntypedStorage, Callable[[], Tensor]] = (
            WeakKeyDictionary()
        )
        self._dispatch_cached = partial(shape_cache.dispatch_cached, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Symbolic:
        # A symbolic tensor refers to its mode. A copy of the tensor must refer to the same mode.
        return self

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # While PyTorch runs an operator by decomposing it, all operators of the decomposition must
        # return symbolic tensors. Here, real tensors cannot be combined with symbolic ones.
        if self._is_decomposing:
            return shape_cache.fake(self, func, types, args, kwargs or {})
        # Autograd and conversions call this operator very often, so it is handled first.
        if func is _DEVICE:
            return args[0].fake_device
        self._is_decomposing = True
        try:
            result = self._dispatch(func, types, args, kwargs or {})
            if self.kind == "cuda" and (rule := cuda_kernels.RULES.get(func)):
                return rule(self._dispatch_cached, result)
            return result
        finally:
            self._is_decomposing = False

    def cached_result(self, func, args, kwargs) -> Any:
        """Return the cached result of an operator, or `shape_cache.NOT_FOUND` if there is none.

        The cache has the result if the operator has run before on equal arguments. Tensors count as
        equal if they have the same shape, strides, storage offset and dtype. The result is equal to
        that of `__torch_dispatch__`, but PyTorch's dispatcher is not called.

        Args:
            func, args, kwargs: Operator and its arguments, as `__torch_dispatch__` receives them.
        """
        if self._values_functions or torch.is_inference_mode_enabled():
            return shape_cache.NOT_FOUND
        if not _depends_on_shapes_only(func, self.kind):
            return shape_cache.NOT_FOUND
        return shape_cache.cached_result(self, func, args, kwargs)

    def _dispatch(self, func, types, args, kwargs) -> Any:
        """Run an operator and return its result.

        Operators run differently on symbolic inputs, on real inputs, and on inputs of both kinds.
        """
        if found := cpu_kernels.INEXACT.get(func):
            warnings.warn(f"{func} {found.reason}; {found.remedy}", stacklevel=2)
        if not isinstance(func, OpOverload):
            return shape_cache.fake(self, func, types, args, kwargs)
        inputs = tensors_among(args, kwargs)
        real = [tensor for tensor in inputs if not isinstance(tensor, FakeTensor)]
        if inputs and not real:
            return self._run_on_symbolic(inputs, func, types, args, kwargs)
        if not inputs and func in _PROFILER_MARKERS:
            return func(*args, **kwargs)
        if not all(map(_is_integer_or_bool, real)):
            # A real floating-point tensor is either the number inside `torch.tensor(0.5)`, which
            # becomes symbolic here, or it was made outside the mode. PyTorch rejects the latter.
            return self._dispatch_cached(func, types, args, kwargs)
        run = self._run_with_placeholders if len(real) < len(inputs) else self._run_on_real
        return run(func, types, args, kwargs)

    def _run_on_symbolic(self, inputs: list[Tensor], func, types, args, kwargs) -> Any:
        if not self._values_functions or not any(map(self._values_function, inputs)):
            return self._dispatch_cached(func, types, args, kwargs)
        result = self._run_with_placeholders(func, types, args, kwargs)
        return self._symbolic_result(func, result, inputs, args, kwargs)

    def _values_function(self, tensor: Tensor) -> Callable[[], Tensor] | None:
        """Return the function that makes the values of a tensor's storage, or None.

        The result is None if the values of the symbolic tensor are not known.
        """
        # A sparse tensor has no storage of its own.
        strided = tensor.layout is torch.strided
        return self._values_functions.get(tensor.untyped_storage()) if strided else None

    def _run_on_real(self, func, types, args, kwargs) -> Any:
        # A view of a real tensor is real, even if a symbolic tensor was written into its storage.
        if func.is_view or torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)
        if all(map(self.has_known_values, tensors_among(args, kwargs))):
            return self._run_on_known_values(func, types, args, kwargs)
        return self._run_with_placeholders(func, types, args, kwargs)

    def has_known_values(self, tensor: Tensor) -> bool:
        """Return whether a tensor is real and its values are known.

        The values of a real tensor are unknown if an operator has written a symbolic tensor into
        its storage.
        """
        return not isinstance(tensor, FakeTensor) and (
            tensor.untyped_storage() not in self._unknown
        )

    def _run_on_known_values(self, func, types, args, kwargs) -> Any:
        """Run an operator whose inputs have known values, and return real or symbolic outputs.

        The outputs are real if they are small initialized tensors of integers or booleans, if the
        operator writes in place, or if it reads values, as `item` does. Otherwise they are
        symbolic, so that they take no memory.
        """
        reads_values = bool(_TAGS_OF_VALUE_READS & set(func.tags))
        self.looks += reads_values
        if func._schema.is_mutable or reads_values:
            return func(*args, **kwargs)
        inputs, kind = tensors_among(args, kwargs), func.overloadpacket
        run = self._run_with_placeholders if inputs else self._dispatch_cached
        result = run(func, types, args, kwargs)
        outputs = tensors_among((result,))
        if kind in _WITHOUT_VALUES or any(tensor.device.type != "cpu" for tensor in outputs):
            return result
        if all(map(_is_small_integer_or_bool, outputs)):
            return func(*args, **kwargs)
        # The current dtype is passed on, because the default dtype can change before the values are
        # read.
        if kind in _CONSTANT_FILLS:
            self._remember_values(result, partial(func, *args, **kwargs | {"dtype": result.dtype}))
        is_number = (
            isinstance(result, Tensor) and result.is_floating_point() and result.numel() == 1
        )
        if kind in _VALUES_ARE_READ or (is_number and inputs):
            return self.fake_tensor_converter.from_real_tensor(
                self, func(*args, **kwargs), make_constant=True
            )
        return result

    def _symbolic_result(self, func, result: Tensor, inputs: list[Tensor], args, kwargs) -> Tensor:
        """Return the result of an operator on symbolic inputs, some of which have known values.

        The result of a copy or a comparison is real if all inputs have known values and the result
        is a small tensor of integers or booleans. Otherwise the symbolic `result` is returned. If
        it is a copy of known values, these values are remembered.
        """
        if func.overloadpacket not in _COPIES | _COMPARISONS:
            return result
        functions = list(map(self._values_function, inputs))
        if None in functions or result.device.type != "cpu":
            return result
        values = {
            tensor: _values_of_view(function, tensor)
            for tensor, function in zip(inputs, functions, strict=True)
        }
        if _is_small_integer_or_bool(result):
            return func(*map_tensors(lambda tensor: values[tensor](), args), **kwargs)
        if func.overloadpacket in _COPIES:
            source, *others = values[args[0]], *args[1:]
            self._remember_values(result, lambda: func(source(), *others, **kwargs))
        return result

    def _remember_values(self, tensor: Tensor, values: Callable[[], Tensor]) -> None:
        """Remember that the function `values` returns the values of a symbolic tensor.

        Tensors that are too large or not floating-point are ignored.
        """
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.nbytes() <= MAX_REAL_BYTES * tensor.itemsize:
            self._values_functions[storage] = values

    def _run_with_placeholders(self, func, types, args, kwargs) -> Any:
        """Run an operator with a symbolic placeholder for each real tensor, and return its result.

        The result is symbolic. If the operator writes into a real tensor in place and returns it,
        the result is that real tensor, whose values are unknown from then on.
        """
        in_place_of: dict[Tensor, Tensor] = {}

        def placeholder(tensor: Tensor) -> Tensor:
            if isinstance(tensor, FakeTensor):
                return tensor
            if tensor not in in_place_of:
                in_place_of[tensor] = cpu_kernels.make_result(
                    self._dispatch_cached, tensor.size(), tensor.stride(), tensor
                )
            return in_place_of[tensor]

        # The size of a result that a mask selects is known only if the mask's values are known.
        if func.overloadpacket in _INDEXING:
            args = args[0], _replace_known_masks(self, args[1]), *args[2:]
        # The size of one result of the CTC loss depends on the lengths of the targets.
        if func is _aten._ctc_loss.Tensor and self.has_known_values(args[3]):
            func, args = _aten._ctc_loss.default, _with_target_lengths(args)
            self.looks += 1
        result = self._dispatch_cached(func, types, *map_tensors(placeholder, (args, kwargs)))
        if not func._schema.is_mutable:
            return result
        written = list(tensors_in([value for _, value in written_arguments(func, args, kwargs)]))
        for tensor in written:
            self._values_functions.pop(tensor.untyped_storage(), None)
        back = {in_place_of[tensor]: tensor for tensor in written if tensor in in_place_of}
        self._unknown.update(tensor.untyped_storage() for tensor in back.values())
        return map_tensors(lambda tensor: back.get(tensor, tensor), result)


@cache
def _depends_on_shapes_only(func, kind: str) -> bool:
    """Return whether `cached_result` may use the cache for an operator.

    The cache is not used for operators whose results need a correction for CUDA (if `kind` is
    "cuda"), or whose bytes cannot be exact.

    Args:
        func: The operator.
        kind: Kind of device of the mode, "cpu" or "cuda".
    """
    if not isinstance(func, OpOverload) or func in cpu_kernels.INEXACT:
        return False
    return kind == "cpu" or func not in cuda_kernels.RULES


def _replace_known_masks(mode: Symbolic, indices) -> list[Tensor | None]:
    """Return the indices of an indexing operator, with masks replaced by integer indices.

    A mask is replaced by the indices of the elements that it selects, if its values are known.
    """
    replaced = []
    for index in indices:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        is_known_mask = is_mask and mode.has_known_values(index)
        mode.looks += is_known_mask
        replaced += index.nonzero().unbind(1) if is_known_mask else [index]
    return replaced


def _with_target_lengths(args) -> tuple:
    """Return the arguments of a CTC loss, with the lengths of its targets as a list of integers."""
    return *args[:2], [], args[3].flatten().tolist(), *args[4:]


def _values_of_view(whole_values: Callable[[], Tensor], view: Tensor) -> Callable[[], Tensor]:
    """Return a function that returns the values of a symbolic tensor.

    Args:
        whole_values: Function that returns a real tensor with the values of the whole storage.
        view: The symbolic tensor, which may be a part of this storage. The returned function keeps
            no reference to it.
    """
    place, dtype = (view.storage_offset(), view.size(), view.stride()), view.dtype
    return lambda: torch.empty(0, dtype=dtype, device="cpu").set_(
        whole_values().untyped_storage(), *place
    )


def _is_small_integer_or_bool(made: Tensor) -> bool:
    """Return whether a tensor has integers or booleans, and at most `MAX_REAL_BYTES` bytes.

    Such a tensor is computed with its real values, not symbolically.
    """
    return _is_integer_or_bool(made) and made.untyped_storage().nbytes() <= MAX_REAL_BYTES


def _is_integer_or_bool(value: Tensor | torch.dtype | None) -> bool:
    """Return whether a dtype, or the dtype of a tensor, is an integer or boolean dtype.

    The result is False for a tensor of a subclass that the user has defined.
    """
    if isinstance(value, Tensor):
        ordinary = type(value) in (Tensor, nn.Parameter, FakeTensor)
        return ordinary and _is_integer_or_bool(value.dtype)
    return value is not None and not value.is_floating_point and not value.is_complex


@contextmanager
def symbolic(mode: Symbolic | None = None) -> Iterator[Symbolic]:
    """Return a context in which tensors are symbolic: they have shapes and storages, but no values.

    Symbolic tensors take no memory. A model can be built and trained for a step inside the context.
    A `MemoryMeter` in the context counts the bytes that the same step needs on real tensors. All
    tensors that the step uses must be made inside the context, except for tensors of integers.

    - **Integers.** Tensors of integers and booleans, such as tokens and masks, are real if they are
      on the CPU and take at most 4 MiB each. A step that reads their values therefore takes the
      same branches as the real step. For example, it drops a mask that is all ones.
    - **Values of other tensors** are unknown, with the exceptions that `Symbolic` lists. Reading
      unknown values raises PyTorch's own error, which names the operator.
    - **Random numbers.** Where a model drops layers at random, the random numbers are drawn, and
      they decide which layers are dropped. At the end of the context the random number generators
      are restored to their earlier states.
    - **Compiled code.** Functions and modules that `torch.compile` has compiled run uncompiled
      inside the context, and run compiled again after it.

    Args:
        mode: The mode to enter. By default a new `Symbolic()` for the CPU. Pass
            `Symbolic(kind="cuda")` to estimate the bytes on a GPU. To continue with the tensors of
            an earlier context, pass the mode that `with symbolic() as mode` returned there.

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
    # Random tensors of integers, such as tokens, are real and change the generators' states.
    state = AllRandomState(counted=False)
    try:
        # `_no_grad_trunc_normal_` reads the drawn values to draw those outside the bounds again.
        # Symbolic weights have no values, so the function is skipped.
        without_values = patch.object(
            nn.init, "_no_grad_trunc_normal_", lambda tensor, *_, **__: tensor
        )
        mode = mode or Symbolic()
        with (
            without_values,
            patch.object(nn.Module, "_apply", apply_to_module),
            patch.object(torch, "ctc_loss", _ctc_loss),
            _run_compiled_code_eagerly(),
            _count_value_reads(mode),
            mode,
            parameter_subclasses(),
            cuda_kernels.choose_operators_as_on_cuda(mode.gpu)
            if mode.kind == "cuda"
            else nullcontext(),
        ):
            yield mode
    finally:
        state.restore()


@contextmanager
def _count_value_reads(mode: Symbolic) -> Iterator[None]:
    """Count the calls of `Tensor.numpy` and `Tensor.tolist` in a `with` block in `mode.looks`.

    These methods read the values of a tensor without an operator, so the mode does not see them.
    """

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
    """Run `torch.ctc_loss` so that its mean also works on symbolic tensors.

    If the lengths of the targets are a list and the loss is a mean, PyTorch writes the lengths into
    a new tensor without an operator. Symbolic tensors do not allow this, so in this case this
    function computes the mean with operators. In all other cases it calls PyTorch's function.

    Source: aten/src/ATen/native/LossCTC.cpp (`get_clamped_target_length`).
    """
    lengths = log_probs, targets, input_lengths, target_lengths, blank
    if isinstance(target_lengths, Tensor) or reduction != 1:
        return _torch_ctc_loss(*lengths, reduction, zero_infinity)
    losses = _torch_ctc_loss(*lengths, 0, zero_infinity)
    return (losses / torch.tensor(target_lengths, dtype=losses.dtype).clamp_min(1)).mean()


@contextmanager
def _run_compiled_code_eagerly() -> Iterator[None]:
    """Let functions that `torch.compile` has compiled run uncompiled inside a `with` block."""
    compile_ = torch.compile
    with ExitStack() as stack:

        def compile_and_disable(*args: Any, **kwargs: Any) -> Any:
            result = compile_(*args, **kwargs)
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            return result

        # `set_stance` would load the compiler, which takes seconds. If the compiler is not loaded
        # yet, no function has been compiled, so `set_stance` can wait until `torch.compile` is
        # called.
        if DYNAMO in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        else:
            stack.enter_context(patch.object(torch, "compile", compile_and_disable))
        yield
