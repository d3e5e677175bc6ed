"""Results of operators whose CPU kernels return another storage, or other strides, than PyTorch's
symbolic kernels do.

PyTorch finds the shape of a symbolic result by a decomposition or a "meta" function in Python. Both
promise the shape and the dtype, but not how many bytes the result's storage has. `RULES` has one
row per operator for which the two differ. The rows were found by running the samples of PyTorch's
operator database on real and on symbolic tensors (`tests/sweep_operators.py`). `INEXACT` names
the operators whose bytes no rule can give. `symbolic` warns when a step runs one of them, and
`estimate` refuses the step.

According to the source of torch 2.13, the CUDA kernels of the losses, `im2col`, `col2im` and the
backward passes of GLU, log-softmax and layer norm allocate what the CPU kernels allocate. Padding,
`max_unpool2d` and `channel_shuffle` return contiguous results on CUDA, and `_embedding_bag`
allocates other indices there, so that these rules apply to CPU tensors only. This has not been
measured on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch.operators import (
    OpOverload,
    make_channels_last_strides_for,
    make_contiguous_strides_for,
    suggest_memory_format,
)
from .._torch.tensors import tensors_in

_aten = torch.ops.aten
Dispatch = Callable[..., Any]  # (operator, types, args, kwargs) -> result on symbolic tensors
Rule = Callable[
    [Dispatch, dict[str, Any], Any], Any
]  # (dispatch, arguments by name, symbolic result) -> result


def as_for_real(
    symbolically: Dispatch,
    dispatch: Dispatch,
    func: OpOverload,
    types: Sequence[type],
    args: Sequence,
    kwargs: Mapping,
    *,
    kind: str = "cpu",
) -> Any:
    """Return the result of an operator on symbolic tensors, with the storages and the strides that
    the CPU kernel gives its result.

    Args:
        symbolically: Function that runs the operator as PyTorch does.
        dispatch: Function that runs the operators that make another result.
        func, types, args, kwargs: The call, as a dispatch mode receives it.
        kind: Kind of device. `CPU_RULES` apply to "cpu" only.
    """
    if func is _aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
        return _grouped_mm(dispatch, func, args, kwargs)
    if func is _aten._ctc_loss.default:
        return _ctc_loss(dispatch, _by_name(func, args, kwargs))
    result = symbolically(func, types, args, kwargs)
    if rule := RULES.get(func) or (CPU_RULES.get(func) if kind == "cpu" else None):
        return rule(dispatch, _by_name(func, args, kwargs), result)
    if _is_elementwise(func):
        operands = list(tensors_in((args, kwargs)))[:: -1 if func in _REVERSED else 1]
        return _elementwise(dispatch, operands, result, one_shape=not _reads_numbers(func, args))
    return result


def make_result(
    dispatch: Dispatch, size, strides, like: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """Return a symbolic tensor with its own storage. It is contiguous if `strides` is None."""
    options = {"dtype": dtype or like.dtype, "device": like.device}
    if strides is None:
        return dispatch(_aten.empty.memory_format, (), (size,), options)
    return dispatch(_aten.empty_strided.default, (), (size, strides), options)


def _by_name(func: OpOverload, args: Sequence, kwargs: Mapping) -> dict[str, Any]:
    """Return all arguments of a call by their names, including defaults."""
    arguments = func._schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)}
    defaults = {each.name: each.default_value for each in arguments if each.has_default_value()}
    return defaults | given | dict(kwargs)


def _part_of(dispatch: Dispatch, elements: int, outline: Tensor) -> Tensor:
    """Return a contiguous tensor like the outline, at the beginning of a storage of `elements`
    elements."""
    whole = make_result(dispatch, (elements,), None, outline)
    strides = make_result(dispatch, outline.size(), None, outline).stride()
    return dispatch(_aten.as_strided.default, (), (whole, outline.size(), strides, 0), {})


def _grouped_mm(dispatch: Dispatch, func: OpOverload, args: Sequence, kwargs: Mapping) -> Tensor:
    """Return the result of a grouped product in a dtype other than bfloat16.

    The shape is found with bfloat16 operands, because PyTorch's symbolic kernel refuses other
    dtypes, unlike the real kernel.
    """
    in_bf16 = [make_result(dispatch, t.size(), t.stride(), t, torch.bfloat16) for t in args[:2]]
    result = dispatch(func, (), (*in_bf16, *args[2:]), kwargs)
    return make_result(dispatch, result.size(), None, args[0])


def _ctc_loss(dispatch: Dispatch, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return a loss per sample, and a number per sample, time step and state of the alignment.

    There are 2 l + 1 states, where l is the length of the longest target. PyTorch's symbolic kernel
    refuses the operator, because l is a value and not a size.

    Source: aten/src/ATen/native/LossCTC.cpp (`ctc_loss_allocate_outputs`).
    """
    log_probs = given["log_probs"]
    steps, samples = log_probs.shape[:2]
    states = 2 * max(given["target_lengths"], default=0) + 1
    shapes = (samples,), (samples, steps, states)
    loss, alignment = (make_result(dispatch, shape, None, log_probs) for shape in shapes)
    return loss, alignment


# ---- rules


def _view(dispatch: Dispatch, given: dict[str, Any], result: Tensor) -> Tensor:
    """Return a view with the strides of the real one, also along dimensions of size 1.

    They decide whether a tensor counts as channels_last, which is the memory format of the results
    of later operators.

    Source: aten/src/ATen/TensorUtils.cpp (`computeStride`).
    """
    viewed = given["self"]
    strides = _view_strides(viewed.shape, viewed.stride(), result.shape)
    if result.stride() == strides:
        return result
    arguments = (viewed, result.size(), strides, viewed.storage_offset())
    return dispatch(_aten.as_strided.default, (), arguments, {})


def _view_strides(
    sizes: Sequence[int], strides: Sequence[int], wanted: Sequence[int]
) -> tuple[int, ...]:
    """Return the strides that a tensor's elements have in a view of another shape.

    Neighboring dimensions whose elements have even distances in memory form one run. Each dimension
    of the view is a part of one run, and one of size 1 belongs to the innermost run that it can be
    part of.
    """
    if 0 in sizes:
        return tuple(strides) if sizes == wanted else make_contiguous_strides_for(wanted)
    runs: list[list[int]] = []  # elements and the distance of neighbors, from the innermost run
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if runs and (size == 1 or stride == math.prod(runs[-1])):
            runs[-1][0] *= size
        else:
            runs.append([size, stride])
    left, made = list(wanted), []
    for elements, distance in runs or [[1, 1]]:
        taken = 1
        while left and (taken < elements or left[-1] == 1):
            made.append(taken * distance)
            taken *= left.pop()
    return tuple(reversed(made))


def _like(dispatch: Dispatch, given: dict[str, Any], result: Tensor) -> Tensor:
    """Return a tensor with the strides of a dense input, unless a memory format is chosen.

    Source: aten/src/ATen/native/TensorFactories.cpp (`empty_like`).
    """
    preserved = given["memory_format"] in (None, torch.preserve_format)
    if not preserved or {result.layout, given["self"].layout} != {torch.strided}:
        return result
    return _like_dense(dispatch, given, result)


def _loss(
    dispatch: Dispatch, given: dict[str, Any], result: Tensor, *, unreduced: Rule | None = None
) -> Tensor:
    """Return a scalar loss whose storage is as large as that of the unreduced loss.

    The kernel computes all elements in the output. At the end it resizes the output to a scalar,
    which does not free any memory.

    Source: aten/src/ATen/native/BinaryOps.cpp and Loss.cpp.
    """
    if not given["reduction"]:
        return unreduced(dispatch, given, result) if unreduced else result
    shape = torch.broadcast_shapes(given["self"].shape, given["target"].shape)
    return _part_of(dispatch, max(math.prod(shape), 1), result)


def _with_elementwise_strides(dispatch: Dispatch, given: dict[str, Any], result: Tensor) -> Tensor:
    """Return a result with the strides that `_elementwise` finds for the input and the target."""
    return _elementwise(dispatch, (given["self"], given["target"]), result)


def _like_input(dispatch: Dispatch, given: dict[str, Any], result: Tensor) -> Tensor:
    """Return a tensor like the input, because the kernel allocates its output with
    `empty_like(input)` and ignores the target's strides."""
    return dispatch(_aten.empty_like.default, (), (given["self"],), {})


def _huber_loss(dispatch: Dispatch, given: dict[str, Any], result: Tensor) -> Tensor:
    """Return the symbolic result if the loss is reduced, and a tensor like the input otherwise."""
    return result if given["reduction"] else _like_input(dispatch, given, result)


def _bce_with_logits(dispatch: Dispatch, given: dict[str, Any], result: Tensor) -> Tensor:
    """Return an unreduced loss with the strides of one minus the target.

    Source: aten/src/ATen/native/Loss.cpp (`binary_cross_entropy_with_logits`).
    """
    if given["reduction"]:
        return result
    return _elementwise(dispatch, (given["target"],), result, one_shape=False)


def _soft_margin_backward(dispatch: Dispatch, given: dict[str, Any], result: Tensor) -> Tensor:
    """Return a result with the strides of the target times the product of input and negated target.

    Source: aten/src/ATen/native/Loss.cpp (`soft_margin_loss_backward_out`).
    """
    negated = dispatch(_aten.neg.default, (), (given["target"],), {})
    product = dispatch(_aten.mul.Tensor, (), (negated, given["self"]), {})
    return dispatch(_aten.mul.Tensor, (), (given["target"], product), {})


# Kernels that consider the strides of their operands in the reverse of the schema's order.
_REVERSED = {_aten.threshold_backward.default}
# Elementwise kernels without PyTorch's tag.
_ELEMENTWISE = {
    _aten._prelu_kernel_backward.default,
    _aten.complex.default,
    _aten.elu_backward.default,
    _aten.floor_divide.default,
    _aten.hardsigmoid_backward.default,
    _aten.hardswish.default,
    _aten.hardswish_backward.default,
    _aten.hardtanh_backward.default,
    _aten.leaky_relu_backward.default,
    _aten.mish_backward.default,
    _aten.softplus_backward.default,
    _aten.softshrink_backward.default,
}
# Kernels that take a number. Other overloads for a number make a 0-dimensional tensor of it, and
# their result then depends on the strides of dimensions of size 1, too.
_TAKE_NUMBERS = {_aten.pow.Tensor_Scalar, _aten.lerp.Scalar}


@cache
def _is_elementwise(func: OpOverload) -> bool:
    """Return whether a kernel makes a new tensor element by element, and chooses its strides
    itself."""
    tagged = torch.Tag.pointwise in func.tags and not func._schema.is_mutable
    # The caller of `clone` chooses the strides.
    return (tagged and func is not _aten.clone.default) or func in _ELEMENTWISE


def _reads_numbers(func: OpOverload, args: Sequence) -> bool:
    """Return whether a kernel makes a tensor of a number that is one of its operands."""
    if "calar" in func._overloadname:
        return func not in _TAKE_NUMBERS
    return any(
        isinstance(argument.type, torch.TensorType) and isinstance(value, (bool, int, float))
        for argument, value in zip(func._schema.arguments, args, strict=False)
    )


def _elementwise(
    dispatch: Dispatch, operands: Iterable[Tensor], result: Any, *, one_shape: bool = True
) -> Any:
    """Return a result with the strides on which the operands agree.

    The symbolic kernel computes the operator in several steps, and converts 16-bit operands to fp32
    first. The strides of the symbolic result then come from the last of these steps. Its operands
    may be dense although the operator's own operands are expanded.

    The real kernel converts an operand of another dtype than the others. Where that changes
    strides, because the operand is not dense, the symbolic result is left unchanged.

    Args:
        dispatch: Function that runs the operators that make another result.
        operands: The operator's tensors, in the order in which the kernel considers them.
        result: The symbolic result.
        one_shape: False if there is an operand of another shape that is not in `operands`.
    """
    operands = list(operands)
    if isinstance(result, tuple):
        alike = (_elementwise(dispatch, operands, x, one_shape=one_shape) for x in result)
        return tuple(alike)
    if (
        not isinstance(result, Tensor)
        or {each.layout for each in (result, *operands)} != {torch.strided}
        or (len({x.dtype for x in operands if x.dim()}) > 1 and not all(map(_is_dense, operands)))
    ):
        return result
    strides = _iterated_strides(operands, result.shape, one_shape)
    return (
        result
        if result.stride() == strides
        else make_result(dispatch, result.size(), strides, result)
    )


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's elements fill a part of memory without gaps and overlaps."""
    if tensor.is_contiguous():
        return True
    filled = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != filled:
                return False
            filled *= size
    return True


def _iterated_strides(
    operands: Sequence[Tensor], shape: torch.Size, one_shape: bool
) -> tuple[int, ...]:
    """Return the strides of a new tensor that is computed element by element from strided ones.

    PyTorch's own function in Python, `compute_elementwise_output_strides`, gives other strides to
    dimensions of size 1, on which the memory format of later results depends.

    Source: aten/src/ATen/TensorIterator.cpp (`fast_set_up`, `reorder_dimensions`).
    """
    if one_shape and all(each.shape == shape for each in operands):
        if all(each.is_contiguous() for each in operands):
            return make_contiguous_strides_for(shape)
        if all(each.is_contiguous(memory_format=torch.channels_last) for each in operands):
            return make_channels_last_strides_for(shape)
        if len({each.stride() for each in operands}) == 1 and _is_dense(operands[0]):
            return operands[0].stride()
    steps = [_broadcast_strides(each, shape) for each in operands if each.dim()]
    from_last = list(reversed(range(len(shape))))
    order = from_last.copy()  # becomes: dimensions from the innermost to the outermost one
    for place in range(1, len(order)):
        for before in reversed(range(place)):
            outer = _is_outer(order[before], order[place], steps, shape)
            if outer:
                order[before], order[place] = order[place], order[before]
                place = before
            elif outer is False:
                break
    if order == from_last:
        return make_contiguous_strides_for(shape)
    strides = {x: math.prod(shape[y] for y in order[:i]) for i, x in enumerate(order)}
    return tuple(strides[dimension] for dimension in range(len(shape)))


def _broadcast_strides(tensor: Tensor, shape: torch.Size) -> list[int]:
    """Return the strides of a tensor that is broadcast to a shape."""
    missing = len(shape) - tensor.dim()
    sizes = zip(tensor.shape, tensor.stride(), shape[missing:], strict=True)
    return [0] * missing + [0 if own == 1 != size else step for own, step, size in sizes]


def _is_outer(
    one: int, other: int, steps: Sequence[Sequence[int]], shape: torch.Size
) -> bool | None:
    """Return whether dimension `one` lies outside `other` in memory, or None if no operand
    decides."""
    for each in steps:
        if not each[one] or not each[other]:
            continue
        if each[one] != each[other]:
            return each[one] > each[other]
        if shape[one] > shape[other]:
            return True
    return None


def _columns(dispatch: Dispatch, given: dict[str, Any], result: Tensor) -> Tensor:
    """Return a contiguous result whose storage is at least as large as the input.

    The kernel makes the output like the input and then resizes it, which never frees memory.

    Source: aten/src/ATen/native/Im2Col.cpp and Col2Im.cpp.
    """
    return _part_of(dispatch, max(given["self"].numel(), result.numel()), result)


def _contiguous(dispatch: Dispatch, given: dict[str, Any], result: Tensor) -> Tensor:
    """Return a contiguous result, whatever the strides of the arguments are."""
    return make_result(dispatch, result.size(), None, result)


def _like_dense(
    dispatch: Dispatch, given: dict[str, Any], result: Tensor, *, name: str = "self"
) -> Tensor:
    """Return a result with the strides of an input of its shape, if that input is dense."""
    like = given[name]
    if like.stride() == result.stride() or like.shape != result.shape or not _is_dense(like):
        return result
    return make_result(dispatch, result.size(), like.stride(), result)


def _first(
    dispatch: Dispatch, given: dict[str, Any], result: tuple, *, rule: Rule = _contiguous
) -> tuple:
    """Return results whose first one follows a rule, unless it is None."""
    if result[0] is None:
        return result
    return rule(dispatch, given, result[0]), *result[1:]


def _each(dispatch: Dispatch, given: dict[str, Any], result: tuple, *, rule: Rule) -> tuple:
    """Return results that each follow the same rule."""
    return tuple(rule(dispatch, given, each) for each in result)


def _in_memory_format(dispatch: Dispatch, given: dict[str, Any], result: Tensor) -> Tensor:
    """Return a result in the memory format and the dtype of the input, `self`.

    Source: `suggest_memory_format` in aten/src/ATen/native/MaxUnpooling.cpp, ReflectionPad.cpp,
    ReplicationPadding.cpp and ChanelShuffle.cpp.
    """
    if result.device.type != "cpu":
        return result
    x = given["self" if "self" in given else "input"]
    options = {
        "dtype": x.dtype,
        "device": result.device,
        "memory_format": suggest_memory_format(x),
    }
    return dispatch(_aten.empty.memory_format, (), (result.size(),), options)


def _batch_norm(dispatch: Dispatch, given: dict[str, Any], result: Tensor) -> Tensor:
    """Return a result in the memory format in which the input is contiguous.

    The strides of an input with one sample need not be those that `suggest_memory_format` expects.
    """
    x = given["input"]
    if x.is_contiguous():
        return _contiguous(dispatch, given, result)
    formats = torch.channels_last, torch.channels_last_3d
    if any(x.is_contiguous(memory_format=each) for each in formats):
        strides = make_channels_last_strides_for(result.shape)
        return make_result(dispatch, result.size(), strides, result)
    return _in_memory_format(dispatch, given, result)


def _norm(dispatch: Dispatch, given: dict[str, Any], result: tuple, *, rule: Rule) -> tuple:
    """Return results whose first one follows a rule, and statistics in the dtype of the parameters.

    Under autocast, an input in bf16 meets parameters in fp32.

    Source: aten/src/ATen/native/cpu/mixed_data_type.h (`param_scalar_type`).
    """
    output, *rest = _first(dispatch, given, result, rule=rule)
    names = "weight", "bias", "running_mean", "running_var"
    parameters = [given[name] for name in names if given.get(name) is not None]
    if output.device.type == "cpu" and parameters and parameters[0].dtype != output.dtype:
        dtype = parameters[0].dtype
        rest[:2] = [make_result(dispatch, x.size(), None, x, dtype) for x in rest[:2]]
    return output, *rest


def _embedding_bag(
    dispatch: Dispatch, given: dict[str, Any], result: tuple, *, forward_only: bool
) -> tuple:
    """Return the four results with the storages that the CPU kernel makes.

    The bags' sizes have a storage with one element per offset, although the last offset may not
    begin a bag. The tensor that holds the bag of each index has one element more than there are
    indices. It is empty if the kernel for sums of contiguous rows runs.

    Source: aten/src/ATen/native/EmbeddingBag.cpp (`make_bag_size_out`, `make_offset2bag_out`,
    `make_max_indices_out`).
    """
    output, bag_of_each, sizes, most = result
    if output.device.type != "cpu":
        return result
    weight, weights, mode = given["weight"], given["per_sample_weights"], given["mode"]
    offsets, indices = len(given["offsets"]), len(given["indices"])
    sums_rows = (
        mode == 0
        and weight.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and weight.stride(1) == 1
        and given["padding_idx"] < 0
        and (weights is None or weights.stride(0) == 1)
    )
    outline = make_result(dispatch, (0 if sums_rows else indices,), None, bag_of_each)
    bag_of_each = outline if sums_rows else _part_of(dispatch, indices + 1, outline)
    bags = len(output)
    if mode == 0 and forward_only:
        bags = offsets
    sizes = _part_of(dispatch, offsets, make_result(dispatch, (bags,), None, sizes))
    if mode != 2:
        most = make_result(dispatch, (bags,), None, most)
    return output, bag_of_each, sizes, most


def _to_sparse(dispatch: Dispatch, given: dict[str, Any], result: Tensor) -> Tensor:
    """Return a sparse tensor with a value for each element of the dense tensor, which is the
    largest possible number. The symbolic kernel returns a tensor without values."""
    if result.layout is not torch.sparse_coo:
        return result
    dense = given["self"]
    dimensions = given.get("sparse_dim") or dense.dim()
    return _sparse(dispatch, dense, dimensions, math.prod(dense.shape[:dimensions]))


def _sparse_mask(dispatch: Dispatch, given: dict[str, Any], result: Tensor) -> Tensor:
    """Return a sparse tensor with a value for each value of the mask. The symbolic kernel returns a
    tensor without values."""
    dense, mask = given["self"], given["mask"]
    if dense.layout is not torch.strided or mask.layout is not torch.sparse_coo:
        return result
    return _sparse(dispatch, dense, mask.sparse_dim(), mask._nnz())


def _sparse(dispatch: Dispatch, dense: Tensor, dimensions: int, count: int) -> Tensor:
    """Return a sparse tensor that holds `count` parts of a dense tensor.

    Each part has an index of `dimensions` numbers.
    """
    indices = make_result(dispatch, (dimensions, count), None, dense, torch.int64)
    values = make_result(dispatch, (count, *dense.shape[dimensions:]), None, dense)
    make = _aten._sparse_coo_tensor_with_dims_and_tensors.default
    options = {"layout": torch.sparse_coo, "dtype": dense.dtype, "device": dense.device}
    arguments = (dimensions, dense.dim() - dimensions, dense.shape, indices, values)
    return dispatch(make, (), arguments, options | {"is_coalesced": True})


_LIKE = ("empty_like", "full_like", "ones_like", "zeros_like")
_LIKE += ("rand_like", "randn_like", "randint_like")
RULES: dict[OpOverload, Rule] = {
    **dict.fromkeys((_aten.view.default, _aten._unsafe_view.default), _view),
    **{
        getattr(packet, overload): _like
        for packet in (getattr(_aten, name) for name in _LIKE)
        for overload in packet.overloads()
        if "out" not in overload
    },
    _aten.mse_loss.default: partial(_loss, unreduced=_with_elementwise_strides),
    _aten.smooth_l1_loss.default: partial(_loss, unreduced=_with_elementwise_strides),
    _aten.binary_cross_entropy.default: partial(_loss, unreduced=_like_input),
    _aten.soft_margin_loss.default: _loss,
    _aten.huber_loss.default: _huber_loss,
    _aten.mse_loss_backward.default: _contiguous,
    _aten.smooth_l1_loss_backward.default: _contiguous,
    _aten.huber_loss_backward.default: _contiguous,
    _aten.binary_cross_entropy_backward.default: _like_input,
    _aten.soft_margin_loss_backward.default: _soft_margin_backward,
    _aten.im2col.default: _columns,
    _aten.col2im.default: _columns,
    _aten.native_layer_norm_backward.default: _first,
    _aten.glu_backward.default: _contiguous,
    _aten.masked_fill.Scalar: _contiguous,
    _aten.masked_fill.Tensor: _contiguous,
    _aten.pow.Scalar: _contiguous,
    _aten.tril.default: _contiguous,
    _aten.triu.default: _contiguous,
    _aten.index_add.default: _contiguous,
    _aten.rrelu_with_noise.default: _contiguous,
    _aten._log_softmax.default: _contiguous,
    _aten._prelu_kernel.default: _like_input,
    _aten.nan_to_num.default: _like_input,
    _aten.flip.default: _like_input,
    _aten.index_put.default: _like_input,
    _aten.native_layer_norm.default: partial(_norm, rule=_contiguous),
    _aten._weight_norm_interface.default: _first,
    _aten._weight_norm_interface_backward.default: _first,
    _aten.binary_cross_entropy_with_logits.default: _bce_with_logits,
    _aten.hardtanh.default: _like_input,
    _aten.renorm.default: _contiguous,
    _aten.frexp.Tensor: partial(_each, rule=_like_dense),
    _aten._conj_physical.default: _like_input,
    _aten.log_sigmoid_backward.default: partial(_like_dense, name="grad_output"),
    _aten.sort.default: partial(_each, rule=_like_dense),
    _aten.sort.stable: partial(_each, rule=_like_dense),
    _aten._log_softmax_backward_data.default: _contiguous,
    _aten.max_unpool2d.default: _in_memory_format,
    _aten.channel_shuffle.default: _in_memory_format,
    _aten.reflection_pad2d_backward.default: _in_memory_format,
    _aten.replication_pad2d_backward.default: _in_memory_format,
    _aten.reflection_pad3d.default: _in_memory_format,
    _aten.reflection_pad3d_backward.default: _in_memory_format,
    _aten.replication_pad3d.default: _in_memory_format,
    _aten.replication_pad3d_backward.default: _in_memory_format,
    _aten._embedding_bag.default: partial(_embedding_bag, forward_only=False),
    _aten._embedding_bag_forward_only.default: partial(_embedding_bag, forward_only=True),
    _aten._to_sparse.default: _to_sparse,
    _aten._to_sparse.sparse_dim: _to_sparse,
    _aten.sparse_mask.default: _sparse_mask,
}


# Rows for kernels that exist only on a CPU, or that differ from those on CUDA.
CPU_RULES: dict[OpOverload, Rule] = {
    **dict.fromkeys(
        (
            _aten.native_batch_norm.default,
            _aten._native_batch_norm_legit.default,
            _aten._native_batch_norm_legit.no_stats,
            _aten._batch_norm_with_update.default,
        ),
        partial(_norm, rule=_batch_norm),
    ),
    **dict.fromkeys(
        (
            _aten.native_batch_norm_backward.default,
            _aten.batch_norm_backward.default,
            _aten.native_group_norm_backward.default,
        ),
        partial(_first, rule=_in_memory_format),
    ),
    _aten.native_group_norm.default: partial(_norm, rule=_in_memory_format),
    _aten.roll.default: _in_memory_format,
    _aten.log_sigmoid_forward.default: partial(_each, rule=_contiguous),
    _aten._scaled_dot_product_flash_attention_for_cpu.default: partial(
        _first, rule=partial(_like_dense, name="query")
    ),
}


class Inexact(NamedTuple):
    """Reason why the bytes of an operator's symbolic result are not exact, and how to avoid the
    operator.

    Attributes:
        reason: Clause that describes the operator.
        remedy: Clause that tells the caller what to do.
    """

    reason: str
    remedy: str


_VALUES = Inexact(
    "keeps only values that are not zero, but symbolic tensors have no values and the result is"
    " counted as if none were zero",
    "keep the tensor dense",
)
INEXACT: dict[OpOverload, Inexact] = {
    _aten._to_sparse.default: _VALUES,
    _aten._to_sparse.sparse_dim: _VALUES,
    # `nn.LSTM` runs this operator on a CPU.
    _aten.mkldnn_rnn_layer.default: Inexact(
        "keeps memory that symbolic tensors do not show",
        "run both the estimate and the step itself under"
        " torch.backends.mkldnn.flags(enabled=False)",
    ),
}
