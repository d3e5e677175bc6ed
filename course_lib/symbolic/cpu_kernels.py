"""Correct the storages and strides of symbolic results to those that the CPU kernels give.

PyTorch finds the shape of a symbolic result by a decomposition or a "meta" function in Python. Both
give the right shape and dtype, but not always the right strides and the right number of bytes in
the result's storage. `RULES` has one row per operator whose symbolic result differs from the real
one. The rows were found by running the samples of PyTorch's operator database on real and on
symbolic tensors (`tests/tools/sweep_operators.py`). `INEXACT` lists the operators whose bytes no
rule can give. `symbolic` warns when a step runs one of them, and `estimate` raises an error.

A rule is a function (dispatch, arguments by name, symbolic result) that returns the corrected
result. It makes new symbolic tensors by running operators with `dispatch`.

According to the source of torch 2.13, the CUDA kernels of the losses, `im2col`, `col2im` and the
backward passes of GLU, log-softmax and layer norm allocate the same bytes as the CPU kernels. On
CUDA, padding, `max_unpool2d` and `channel_shuffle` return contiguous results, and `_embedding_bag`
allocates other indices. Therefore the rules for these operators are only in `CPU_RULES`, which
apply to CPU tensors. None of this has been measured on a GPU.
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
# Function (operator, types, args, kwargs) that runs an operator on symbolic tensors.
Dispatch = Callable[..., Any]
# Function (dispatch, arguments by name, symbolic result) that returns the corrected result.
Rule = Callable[[Dispatch, dict[str, Any], Any], Any]


def with_real_strides(
    symbolically: Dispatch,
    dispatch: Dispatch,
    func: OpOverload,
    types: Sequence[type],
    args: Sequence,
    kwargs: Mapping,
    *,
    kind: str = "cpu",
) -> Any:
    """Run an operator on symbolic tensors and return a result with the strides of the CPU kernel.

    Symbolic tensors have shapes and storages, but no values. The storages of the result have the
    sizes that the CPU kernel allocates.

    Args:
        symbolically: Function that runs `func` as PyTorch runs it on symbolic tensors. Its result
            may have other strides than the result of the CPU kernel.
        dispatch: Function that runs any operator on symbolic tensors. It is used to make a result
            with corrected strides.
        func, types, args, kwargs: Arguments of `__torch_dispatch__`: the operator, the tensor
            types, and the operator's arguments.
        kind: Kind of device, "cpu" or "cuda". With "cuda", the rules for CPU kernels in `CPU_RULES`
            are not applied.
    """
    if func is _aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
        return _grouped_mm(dispatch, func, args, kwargs)
    if func is _aten._ctc_loss.default:
        return _ctc_loss(dispatch, _by_name(func, args, kwargs))
    result = symbolically(func, types, args, kwargs)
    if rule := RULES.get(func) or (CPU_RULES.get(func) if kind == "cpu" else None):
        return rule(dispatch, _by_name(func, args, kwargs), result)
    if _is_elementwise(func):
        operands = list(tensors_in((args, kwargs)))[:: -1 if func in _OPERANDS_REVERSED else 1]
        return _elementwise(dispatch, operands, result, one_shape=not _reads_numbers(func, args))
    return result


def make_result(
    dispatch: Dispatch, size, strides, like: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """Return a new symbolic tensor on the device of `like`.

    Args:
        dispatch: Function that runs operators on symbolic tensors.
        size: Shape of the new tensor.
        strides: Strides of the new tensor; None for a contiguous tensor.
        like: Tensor whose device and, by default, dtype the new tensor has.
        dtype: Dtype of the new tensor; None for the dtype of `like`.
    """
    options = {"dtype": dtype or like.dtype, "device": like.device}
    if strides is None:
        return dispatch(_aten.empty.memory_format, (), (size,), options)
    return dispatch(_aten.empty_strided.default, (), (size, strides), options)


def _by_name(func: OpOverload, args: Sequence, kwargs: Mapping) -> dict[str, Any]:
    """Return all arguments of a call by their names, including defaults."""
    arguments = func._schema.arguments
    positional = {argument.name: value for argument, value in zip(arguments, args, strict=False)}
    defaults = {each.name: each.default_value for each in arguments if each.has_default_value()}
    return defaults | positional | dict(kwargs)


def _view_of_larger_storage(dispatch: Dispatch, elements: int, outline: Tensor) -> Tensor:
    """Return a contiguous tensor with the shape of `outline` in a storage of `elements` elements.

    The tensor begins at the first element of the storage. `outline` also gives dtype and device.
    """
    whole = make_result(dispatch, (elements,), None, outline)
    strides = make_result(dispatch, outline.size(), None, outline).stride()
    return dispatch(_aten.as_strided.default, (), (whole, outline.size(), strides, 0), {})


def _grouped_mm(dispatch: Dispatch, func: OpOverload, args: Sequence, kwargs: Mapping) -> Tensor:
    """Return the symbolic result of a grouped matrix product in a dtype other than bfloat16.

    PyTorch's symbolic kernel rejects other dtypes than bfloat16, unlike the real kernel. Therefore
    the shape of the result is found with operands in bfloat16.
    """
    in_bf16 = [make_result(dispatch, t.size(), t.stride(), t, torch.bfloat16) for t in args[:2]]
    result = dispatch(func, (), (*in_bf16, *args[2:]), kwargs)
    return make_result(dispatch, result.size(), None, args[0])


def _ctc_loss(dispatch: Dispatch, call_args: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the symbolic results of the CTC loss: one loss per sample, and the alignment table.

    The table has the shape (samples, time steps, states). There are 2 l + 1 states, where l is the
    length of the longest target. PyTorch's symbolic kernel rejects the operator, because l is a
    value and not a size.

    Source: aten/src/ATen/native/LossCTC.cpp (`ctc_loss_allocate_outputs`).
    """
    log_probs = call_args["log_probs"]
    steps, samples = log_probs.shape[:2]
    states = 2 * max(call_args["target_lengths"], default=0) + 1
    shapes = (samples,), (samples, steps, states)
    loss, alignment = (make_result(dispatch, shape, None, log_probs) for shape in shapes)
    return loss, alignment


# ---- rules


def _view(dispatch: Dispatch, call_args: dict[str, Any], result: Tensor) -> Tensor:
    """Return a view with the strides of the real view, also for dimensions of size 1.

    These strides matter because they determine whether later operators return results in the memory
    format channels_last.

    Source: aten/src/ATen/TensorUtils.cpp (`computeStride`).
    """
    viewed = call_args["self"]
    strides = _view_strides(viewed.shape, viewed.stride(), result.shape)
    if result.stride() == strides:
        return result
    arguments = (viewed, result.size(), strides, viewed.storage_offset())
    return dispatch(_aten.as_strided.default, (), arguments, {})


def _view_strides(
    sizes: Sequence[int], strides: Sequence[int], wanted: Sequence[int]
) -> tuple[int, ...]:
    """Return the strides of a view, as PyTorch computes them.

    Neighboring dimensions of the viewed tensor form one run if their elements are evenly spaced in
    memory. Each dimension of the view lies within one run. A dimension of size 1 is assigned to the
    innermost run that is possible.

    Args:
        sizes, strides: Shape and strides of the tensor that is viewed.
        wanted: Shape of the view.
    """
    if 0 in sizes:
        return tuple(strides) if sizes == wanted else make_contiguous_strides_for(wanted)
    # One pair (number of elements, distance between neighboring elements) per run, from the
    # innermost run to the outermost.
    runs: list[list[int]] = []
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if runs and (size == 1 or stride == math.prod(runs[-1])):
            runs[-1][0] *= size
        else:
            runs.append([size, stride])
    remaining, view_strides = list(wanted), []
    for elements, distance in runs or [[1, 1]]:
        used = 1
        while remaining and (used < elements or remaining[-1] == 1):
            view_strides.append(used * distance)
            used *= remaining.pop()
    return tuple(reversed(view_strides))


def _like_dense_self(dispatch: Dispatch, call_args: dict[str, Any], result: Tensor) -> Tensor:
    """Return the result of a function such as `zeros_like` with the strides of its input.

    If the input is not dense, or the call chooses a memory format, the symbolic result is returned
    unchanged.

    Source: aten/src/ATen/native/TensorFactories.cpp (`empty_like`).
    """
    preserved = call_args["memory_format"] in (None, torch.preserve_format)
    if not preserved or {result.layout, call_args["self"].layout} != {torch.strided}:
        return result
    return _like_dense(dispatch, call_args, result)


def _loss_in_full_storage(
    dispatch: Dispatch, call_args: dict[str, Any], result: Tensor, *, unreduced: Rule | None = None
) -> Tensor:
    """Return a reduced loss as a scalar in a storage as large as that of the unreduced loss.

    The kernel first computes all elements in the output's storage. At the end it resizes the output
    to a scalar, but this does not free any memory. An unreduced loss follows the rule `unreduced`.

    Source: aten/src/ATen/native/BinaryOps.cpp and Loss.cpp.
    """
    if not call_args["reduction"]:
        return unreduced(dispatch, call_args, result) if unreduced else result
    shape = torch.broadcast_shapes(call_args["self"].shape, call_args["target"].shape)
    return _view_of_larger_storage(dispatch, max(math.prod(shape), 1), result)


def _with_elementwise_strides(
    dispatch: Dispatch, call_args: dict[str, Any], result: Tensor
) -> Tensor:
    """Return a loss with the strides that an elementwise kernel on input and target chooses."""
    return _elementwise(dispatch, (call_args["self"], call_args["target"]), result)


def _like_input(dispatch: Dispatch, call_args: dict[str, Any], result: Tensor) -> Tensor:
    """Return a result with the shape and strides of the input, `self`.

    The kernel allocates its output with `empty_like(input)`, whatever the target's strides are.
    """
    return dispatch(_aten.empty_like.default, (), (call_args["self"],), {})


def _huber_loss(dispatch: Dispatch, call_args: dict[str, Any], result: Tensor) -> Tensor:
    """Return an unreduced Huber loss with the strides of the input, and a reduced one unchanged."""
    return result if call_args["reduction"] else _like_input(dispatch, call_args, result)


def _bce_with_logits(dispatch: Dispatch, call_args: dict[str, Any], result: Tensor) -> Tensor:
    """Return an unreduced loss with the strides of `1 - target`, and a reduced one unchanged.

    Source: aten/src/ATen/native/Loss.cpp (`binary_cross_entropy_with_logits`).
    """
    if call_args["reduction"]:
        return result
    return _elementwise(dispatch, (call_args["target"],), result, one_shape=False)


def _soft_margin_backward(dispatch: Dispatch, call_args: dict[str, Any], result: Tensor) -> Tensor:
    """Return a gradient with the strides of `target * (-target * input)`, as in the kernel.

    Source: aten/src/ATen/native/Loss.cpp (`soft_margin_loss_backward_out`).
    """
    negated = dispatch(_aten.neg.default, (), (call_args["target"],), {})
    product = dispatch(_aten.mul.Tensor, (), (negated, call_args["self"]), {})
    return dispatch(_aten.mul.Tensor, (), (call_args["target"], product), {})


# Operators whose kernels consider the strides of the last operand first. Other kernels consider the
# operands in the order of the operator's schema.
_OPERANDS_REVERSED = {_aten.threshold_backward.default}
# Elementwise operators to which PyTorch gives no tag `pointwise`.
_UNTAGGED_ELEMENTWISE = {
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
# Operators that have a number among their operands and use it directly. All other operators convert
# a number to a 0-dimensional tensor, so their operands do not all have the same shape. If the
# shapes differ, the strides of dimensions of size 1 affect the strides of the result.
_TAKE_NUMBERS = {_aten.pow.Tensor_Scalar, _aten.lerp.Scalar}


@cache
def _is_elementwise(func: OpOverload) -> bool:
    """Return whether an operator is elementwise and makes a new tensor whose strides it chooses."""
    tagged = torch.Tag.pointwise in func.tags and not func._schema.is_mutable
    # The caller of `clone` chooses the strides.
    return (tagged and func is not _aten.clone.default) or func in _UNTAGGED_ELEMENTWISE


def _reads_numbers(func: OpOverload, args: Sequence) -> bool:
    """Return whether an operator converts a number among its operands to a tensor."""
    if "calar" in func._overloadname:
        return func not in _TAKE_NUMBERS
    return any(
        isinstance(argument.type, torch.TensorType) and isinstance(value, (bool, int, float))
        for argument, value in zip(func._schema.arguments, args, strict=False)
    )


def _elementwise(
    dispatch: Dispatch, operands: Iterable[Tensor], result: Any, *, one_shape: bool = True
) -> Any:
    """Return an elementwise operator's result with the strides that the real kernel chooses.

    The real kernel finds the strides of the result from those of the operands. PyTorch's symbolic
    kernel may find other strides, because it computes the operator in several steps and first
    converts 16-bit operands to fp32. The strides of its result come from the last step, whose
    operands may be dense although the operator's own operands are expanded.

    If operands have different dtypes and one of them is not dense, the symbolic result is returned
    unchanged. In this case the real kernel converts an operand, and the conversion changes the
    operand's strides.

    Args:
        dispatch: Function that runs operators on symbolic tensors.
        operands: The operator's tensors, in the order in which the kernel considers them.
        result: The symbolic result.
        one_shape: False if there is an operand of another shape that is not in `operands`, such as
            a number.
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
    """Return the strides that an elementwise kernel chooses for its result.

    PyTorch's own function in Python, `compute_elementwise_output_strides`, gives other strides to
    dimensions of size 1. The strides of such dimensions determine the memory format of later
    results.

    Args:
        operands: The tensors from which the result is computed.
        shape: Shape of the result.
        one_shape: False if an operand that is not in `operands`, such as a number, has another
            shape.

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
    # The loop sorts the dimensions in this list from the innermost to the outermost.
    order = from_last.copy()
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
    """Return the strides that a tensor has when it is broadcast to a shape."""
    missing = len(shape) - tensor.dim()
    sizes = zip(tensor.shape, tensor.stride(), shape[missing:], strict=True)
    return [0] * missing + [0 if own == 1 != size else step for own, step, size in sizes]


def _is_outer(
    one: int, other: int, steps: Sequence[Sequence[int]], shape: torch.Size
) -> bool | None:
    """Return whether the result must have a larger stride in dimension `one` than in `other`.

    Args:
        one, other: Indices of dimensions.
        steps: Strides of each operand, broadcast to `shape`.
        shape: Shape of the result.

    Returns:
        The decision of the first operand that decides; None if no operand decides. An operand with
        a stride of 0 in one of the dimensions does not decide. Otherwise, the dimension with the
        larger stride is the outer one. If the strides are equal, the operand decides only if
        dimension `one` has the larger size, and the result is True.
    """
    for each in steps:
        if not each[one] or not each[other]:
            continue
        if each[one] != each[other]:
            return each[one] > each[other]
        if shape[one] > shape[other]:
            return True
    return None


def _contiguous_in_larger_storage(
    dispatch: Dispatch, call_args: dict[str, Any], result: Tensor
) -> Tensor:
    """Return a contiguous result in a storage with at least as many elements as the input.

    The kernel allocates the output with the size of the input, and then resizes the output.
    Resizing never frees memory.

    Source: aten/src/ATen/native/Im2Col.cpp and Col2Im.cpp.
    """
    return _view_of_larger_storage(dispatch, max(call_args["self"].numel(), result.numel()), result)


def _contiguous(dispatch: Dispatch, call_args: dict[str, Any], result: Tensor) -> Tensor:
    """Return a contiguous result, whatever the strides of the arguments are."""
    return make_result(dispatch, result.size(), None, result)


def _like_dense(
    dispatch: Dispatch, call_args: dict[str, Any], result: Tensor, *, name: str = "self"
) -> Tensor:
    """Return an operator's symbolic result with the strides of its input `name`, if possible.

    The result is returned unchanged if the input has gaps or overlaps in memory (is not dense), or
    if its shape is not that of the result.
    """
    like = call_args[name]
    if like.stride() == result.stride() or like.shape != result.shape or not _is_dense(like):
        return result
    return make_result(dispatch, result.size(), like.stride(), result)


def _apply_to_first(
    dispatch: Dispatch, call_args: dict[str, Any], result: tuple, *, rule: Rule = _contiguous
) -> tuple:
    """Apply a rule to the first result of an operator, and return all results.

    The other results are unchanged. A first result of None is unchanged, too.
    """
    if result[0] is None:
        return result
    return rule(dispatch, call_args, result[0]), *result[1:]


def _apply_to_each(
    dispatch: Dispatch, call_args: dict[str, Any], result: tuple, *, rule: Rule
) -> tuple:
    """Apply a rule to each result of an operator, and return the corrected results."""
    return tuple(rule(dispatch, call_args, each) for each in result)


def _in_memory_format(dispatch: Dispatch, call_args: dict[str, Any], result: Tensor) -> Tensor:
    """Return a result in the memory format and the dtype of the operator's input.

    Source: `suggest_memory_format` in aten/src/ATen/native/MaxUnpooling.cpp, ReflectionPad.cpp,
    ReplicationPadding.cpp and ChanelShuffle.cpp.
    """
    if result.device.type != "cpu":
        return result
    x = call_args["self" if "self" in call_args else "input"]
    options = {
        "dtype": x.dtype,
        "device": result.device,
        "memory_format": suggest_memory_format(x),
    }
    return dispatch(_aten.empty.memory_format, (), (result.size(),), options)


def _batch_norm(dispatch: Dispatch, call_args: dict[str, Any], result: Tensor) -> Tensor:
    """Return the result of a batch norm in the memory format in which the input is contiguous.

    PyTorch's `suggest_memory_format` alone does not find this format: the strides of an input with
    a single sample may differ from the strides that it expects.
    """
    x = call_args["input"]
    if x.is_contiguous():
        return _contiguous(dispatch, call_args, result)
    formats = torch.channels_last, torch.channels_last_3d
    if any(x.is_contiguous(memory_format=each) for each in formats):
        strides = make_channels_last_strides_for(result.shape)
        return make_result(dispatch, result.size(), strides, result)
    return _in_memory_format(dispatch, call_args, result)


def _norm_with_parameter_dtype(
    dispatch: Dispatch, call_args: dict[str, Any], result: tuple, *, rule: Rule
) -> tuple:
    """Apply a rule to the output of a norm, and give its statistics the dtype of the parameters.

    Under autocast the symbolic result has another dtype than the real one, because the input is in
    bf16 and the parameters are in fp32.

    Source: aten/src/ATen/native/cpu/mixed_data_type.h (`param_scalar_type`).
    """
    output, *rest = _apply_to_first(dispatch, call_args, result, rule=rule)
    names = "weight", "bias", "running_mean", "running_var"
    parameters = [call_args[name] for name in names if call_args.get(name) is not None]
    if output.device.type == "cpu" and parameters and parameters[0].dtype != output.dtype:
        dtype = parameters[0].dtype
        rest[:2] = [make_result(dispatch, x.size(), None, x, dtype) for x in rest[:2]]
    return output, *rest


def _embedding_bag(
    dispatch: Dispatch, call_args: dict[str, Any], result: tuple, *, forward_only: bool
) -> tuple:
    """Return the four results of `embedding_bag` with the storages that the CPU kernel allocates.

    - The output is unchanged.
    - The tensor with the bag of each index is in a storage with one element more than there are
      indices. It is empty if the kernel for sums of contiguous rows runs.
    - The tensor with the size of each bag is in a storage with one element per offset, although the
      last offset may not begin a bag.
    - Except in mode "max", the tensor with the indices of the largest elements has one element per
      bag, or one per offset in a forward-only sum.

    Source: aten/src/ATen/native/EmbeddingBag.cpp (`make_bag_size_out`, `make_offset2bag_out`,
    `make_max_indices_out`).
    """
    output, bag_of_each, sizes, max_indices = result
    if output.device.type != "cpu":
        return result
    weight, weights, mode = call_args["weight"], call_args["per_sample_weights"], call_args["mode"]
    offsets, indices = len(call_args["offsets"]), len(call_args["indices"])
    sums_rows = (
        mode == 0
        and weight.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and weight.stride(1) == 1
        and call_args["padding_idx"] < 0
        and (weights is None or weights.stride(0) == 1)
    )
    outline = make_result(dispatch, (0 if sums_rows else indices,), None, bag_of_each)
    bag_of_each = outline if sums_rows else _view_of_larger_storage(dispatch, indices + 1, outline)
    bags = len(output)
    if mode == 0 and forward_only:
        bags = offsets
    sizes = _view_of_larger_storage(dispatch, offsets, make_result(dispatch, (bags,), None, sizes))
    if mode != 2:
        max_indices = make_result(dispatch, (bags,), None, max_indices)
    return output, bag_of_each, sizes, max_indices


def _to_sparse(dispatch: Dispatch, call_args: dict[str, Any], result: Tensor) -> Tensor:
    """Return the sparse form of a dense tensor, as large as if none of its elements were zero.

    PyTorch's symbolic kernel returns a sparse tensor without any values.
    """
    if result.layout is not torch.sparse_coo:
        return result
    dense = call_args["self"]
    dimensions = call_args.get("sparse_dim") or dense.dim()
    return _sparse(dispatch, dense, dimensions, math.prod(dense.shape[:dimensions]))


def _sparse_mask(dispatch: Dispatch, call_args: dict[str, Any], result: Tensor) -> Tensor:
    """Return a sparse tensor with as many values as the sparse mask has.

    PyTorch's symbolic kernel returns a sparse tensor without any values.
    """
    dense, mask = call_args["self"], call_args["mask"]
    if dense.layout is not torch.strided or mask.layout is not torch.sparse_coo:
        return result
    return _sparse(dispatch, dense, mask.sparse_dim(), mask._nnz())


def _sparse(dispatch: Dispatch, dense: Tensor, dimensions: int, count: int) -> Tensor:
    """Return a symbolic sparse COO tensor with the shape, dtype and device of a dense tensor.

    Args:
        dispatch: Function that runs operators on symbolic tensors.
        dense: The dense tensor.
        dimensions: Number of sparse dimensions; they come first, and the others are dense.
        count: Number of specified elements.
    """
    indices = make_result(dispatch, (dimensions, count), None, dense, torch.int64)
    values = make_result(dispatch, (count, *dense.shape[dimensions:]), None, dense)
    make = _aten._sparse_coo_tensor_with_dims_and_tensors.default
    options = {"layout": torch.sparse_coo, "dtype": dense.dtype, "device": dense.device}
    arguments = (dimensions, dense.dim() - dimensions, dense.shape, indices, values)
    return dispatch(make, (), arguments, options | {"is_coalesced": True})


_LIKE_FUNCTIONS = ("empty_like", "full_like", "ones_like", "zeros_like")
_LIKE_FUNCTIONS += ("rand_like", "randn_like", "randint_like")
# Rules for all kinds of devices.
RULES: dict[OpOverload, Rule] = {
    **dict.fromkeys((_aten.view.default, _aten._unsafe_view.default), _view),
    **{
        getattr(packet, overload): _like_dense_self
        for packet in (getattr(_aten, name) for name in _LIKE_FUNCTIONS)
        for overload in packet.overloads()
        if "out" not in overload
    },
    _aten.mse_loss.default: partial(_loss_in_full_storage, unreduced=_with_elementwise_strides),
    _aten.smooth_l1_loss.default: partial(
        _loss_in_full_storage, unreduced=_with_elementwise_strides
    ),
    _aten.binary_cross_entropy.default: partial(_loss_in_full_storage, unreduced=_like_input),
    _aten.soft_margin_loss.default: _loss_in_full_storage,
    _aten.huber_loss.default: _huber_loss,
    _aten.mse_loss_backward.default: _contiguous,
    _aten.smooth_l1_loss_backward.default: _contiguous,
    _aten.huber_loss_backward.default: _contiguous,
    _aten.binary_cross_entropy_backward.default: _like_input,
    _aten.soft_margin_loss_backward.default: _soft_margin_backward,
    _aten.im2col.default: _contiguous_in_larger_storage,
    _aten.col2im.default: _contiguous_in_larger_storage,
    _aten.native_layer_norm_backward.default: _apply_to_first,
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
    _aten.native_layer_norm.default: partial(_norm_with_parameter_dtype, rule=_contiguous),
    _aten._weight_norm_interface.default: _apply_to_first,
    _aten._weight_norm_interface_backward.default: _apply_to_first,
    _aten.binary_cross_entropy_with_logits.default: _bce_with_logits,
    _aten.hardtanh.default: _like_input,
    _aten.renorm.default: _contiguous,
    _aten.frexp.Tensor: partial(_apply_to_each, rule=_like_dense),
    _aten._conj_physical.default: _like_input,
    _aten.log_sigmoid_backward.default: partial(_like_dense, name="grad_output"),
    _aten.sort.default: partial(_apply_to_each, rule=_like_dense),
    _aten.sort.stable: partial(_apply_to_each, rule=_like_dense),
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


# Rules for operators that exist only on a CPU, or whose CPU kernel differs from the CUDA kernel.
CPU_RULES: dict[OpOverload, Rule] = {
    **dict.fromkeys(
        (
            _aten.native_batch_norm.default,
            _aten._native_batch_norm_legit.default,
            _aten._native_batch_norm_legit.no_stats,
            _aten._batch_norm_with_update.default,
        ),
        partial(_norm_with_parameter_dtype, rule=_batch_norm),
    ),
    **dict.fromkeys(
        (
            _aten.native_batch_norm_backward.default,
            _aten.batch_norm_backward.default,
            _aten.native_group_norm_backward.default,
        ),
        partial(_apply_to_first, rule=_in_memory_format),
    ),
    _aten.native_group_norm.default: partial(_norm_with_parameter_dtype, rule=_in_memory_format),
    _aten.roll.default: _in_memory_format,
    _aten.log_sigmoid_forward.default: partial(_apply_to_each, rule=_contiguous),
    _aten._scaled_dot_product_flash_attention_for_cpu.default: partial(
        _apply_to_first, rule=partial(_like_dense, name="query")
    ),
}


class Inexact(NamedTuple):
    """Explanation of why an operator's bytes are not exact on symbolic tensors, with advice.

    When such an operator runs, the warning "{operator} {reason}; {remedy}" is shown.

    Attributes:
        reason: Verb phrase, with the operator as its subject, that explains why the bytes are not
            exact.
        remedy: Advice to the user, in the imperative.
    """

    reason: str
    remedy: str


_ZEROS_UNKNOWN = Inexact(
    "keeps only nonzero values, but symbolic tensors have no values, so the result is counted as"
    " if all values were nonzero",
    "keep the tensor dense",
)
# Operators for which no rule can give exact bytes.
INEXACT: dict[OpOverload, Inexact] = {
    _aten._to_sparse.default: _ZEROS_UNKNOWN,
    _aten._to_sparse.sparse_dim: _ZEROS_UNKNOWN,
    # `nn.LSTM` runs this operator on a CPU.
    _aten.mkldnn_rnn_layer.default: Inexact(
        "keeps memory that symbolic tensors do not show",
        "run both the estimate and the step itself under"
        " torch.backends.mkldnn.flags(enabled=False)",
    ),
}
