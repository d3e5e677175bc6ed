"""Tiled attention against float64, the framework's own, the saved-tensor list, the meter and the
FLOP counter."""

import inspect
import math
import os
import subprocess
import sys
import threading
import types

import numpy
import pytest
import torch
from patience import HANGS_SECONDS
from properties import given, settings, st
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import course_lib.attention
from course_lib.attention import (
    attention_cost,
    flash,
    flash_attention,
    online_softmax,
    standard_attention,
    threads,
    tiled,
)
from course_lib.checkpoint import checkpoint
from course_lib.memory import MemoryMeter, attention_saved_bytes, saved_tensors, symbolic

few_examples = settings(max_examples=25, deadline=None)
HALVES = (torch.bfloat16, torch.float16)
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
# torch 2.9's own attention ends the process where there are no heads: it takes the remainder by
# their number. 2.13's does not; those between were not tried.
no_heads = pytest.mark.skipif(
    VERSION < (2, 13), reason="PyTorch's own attention divides by zero heads, pytorch#141218"
)


def inputs(
    n_q=7,
    n_k=None,
    *,
    batch=2,
    heads=4,
    kv_heads=None,
    d=8,
    d_v=None,
    dtype=torch.float32,
    size=1.0,
    seed=0,
    grad=True,
):
    """q, k, v and a gradient of the output, from numbers that the dtype holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    n_k, kv_heads, d_v = n_k or n_q, kv_heads or heads, d_v or d
    shapes = [
        (batch, heads, n_q, d),
        (batch, kv_heads, n_k, d),
        (batch, kv_heads, n_k, d_v),
        (batch, heads, n_q, d_v),
    ]
    q, k, v, grad_o = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    )
    return (
        *((x * factor).requires_grad_(grad) for x, factor in ((q, size), (k, size), (v, 1))),
        grad_o,
    )


def run(attention, q, k, v, grad_o, **options):
    """The output and the gradients of q, k and v."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    o = attention(q, k, v, **options)
    return o.detach(), *torch.autograd.grad(o, (q, k, v), grad_o)


def reference(q, k, v, *, causal=False, is_causal=False, scale=None):
    """Attention written down once more: all scores, each head for itself, in the dtype of the
    inputs."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal or is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(
            0 if is_causal else k.shape[2] - q.shape[2]
        )
        p = (
            scores.masked_fill(~seen, -math.inf)
            .softmax(-1)
            .masked_fill(~seen.any(-1, keepdim=True), 0.0)
        )
        return p.nan_to_num(0.0) @ v if not seen.any(-1).all() else p @ v
    return scores.softmax(-1) @ v


def exact(q, k, v, grad_o, **options):
    return run(reference, q.double(), k.double(), v.double(), grad_o.double(), **options)


def relative_error(x, expected):
    return ((x.double() - expected).norm() / expected.norm()).item()


class Sizes(TorchDispatchMode):
    """The elements of the largest storage that an operator returned."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.untyped_storage().nbytes() // x.element_size())
        return result


# ---- the softmax over blocks


@few_examples
@given(
    n=st.integers(1, 40),
    block=st.integers(1, 45),
    size=st.sampled_from([1.0, 100.0]),
    seed=st.integers(0, 99),
)
def test_a_softmax_in_one_pass_over_blocks_is_the_softmax(n, block, size, seed):
    scores = size * torch.randn(
        3, 2, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    assert_close(online_softmax(scores, block), scores.softmax(-1), rtol=1e-13, atol=1e-300)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_the_softmax_over_blocks_keeps_the_dtype_and_does_not_overflow(dtype):
    scores = torch.tensor(
        [[-3e4, 0.0, 3e4, 3e4], [-3e4] * 4, [0.0, 1.0, -math.inf, 2.0]], dtype=dtype
    )
    p = online_softmax(scores, 3)
    assert p.dtype == dtype
    assert_close(p, scores.softmax(-1), rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", HALVES)
def test_the_sum_over_blocks_does_not_stall_in_half_precision(dtype):
    assert_close(
        online_softmax(torch.zeros(2, 4096, dtype=dtype), 8),
        torch.full((2, 4096), 2.0**-12, dtype=dtype),
    )


def test_a_row_of_minus_infinity_has_no_probabilities():
    scores = torch.full((2, 5), -math.inf)
    scores[1, 3] = 0.0
    assert online_softmax(scores, 2).tolist() == [[0.0] * 5, [0.0, 0.0, 0.0, 1.0, 0.0]]
    assert online_softmax(torch.zeros(3, 0), 2).shape == (3, 0)


def test_the_softmax_over_blocks_has_the_gradient_of_the_softmax():
    scores = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: online_softmax(x, 3), scores)


# ---- the same attention


shapes = st.fixed_dictionaries(
    {
        "n_q": st.integers(1, 40),
        "n_k": st.integers(1, 40),
        "batch": st.integers(1, 2),
        "heads": st.sampled_from([1, 2, 6]),
        "kv_heads": st.integers(1, 6),
        "d": st.sampled_from([1, 5, 16, 64]),
        "d_v": st.sampled_from([None, 3, 24]),
        "size": st.sampled_from([0.3, 1.0, 3.0]),
        "seed": st.integers(0, 99),
    }
).filter(lambda shape: shape["heads"] % shape["kv_heads"] == 0)
options = st.fixed_dictionaries(
    {"scale": st.sampled_from([None, 0.3, -1.0])},
    optional={"causal": st.booleans(), "is_causal": st.just(False)},
) | st.just({"is_causal": True})
blocks = st.fixed_dictionaries({"block_q": st.integers(1, 45), "block_k": st.integers(1, 45)})


@few_examples
@given(shape=shapes, options=options, blocks=blocks)
def test_tiles_of_any_size_give_the_attention_of_any_shape(shape, options, blocks):
    case = inputs(dtype=torch.float64, **shape)
    expected = exact(*case, **options)
    for found in (
        run(flash_attention, *case, **options, **blocks),
        run(standard_attention, *case, **options),
    ):
        for x, y in zip(found, expected, strict=True):
            assert_close(x, y, rtol=1e-9, atol=1e-10)


def roundings(q, k, v, grad_o, causal):
    """The norms of O, dQ, dK and dV with all that is added up taken as positive: what one rounding
    each may do.

    Below a rounding of these an error says nothing: with one key, dQ is 0, and the standard error
    may be 0 by luck.
    """
    q, k, v, grad_o = (x.detach().double() for x in (q, k, v, grad_o))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    p = reference(
        q, k, torch.eye(k.shape[2], dtype=torch.float64).expand(*k.shape[:2], -1, -1), causal=causal
    )
    # a relative error of exp is an absolute one of the score
    p = p * (1 + q.abs() @ k.abs().mT * q.shape[3] ** -0.5)
    dp = grad_o.abs() @ v.abs().mT
    ds = p * (dp + (p * dp).sum(-1, keepdim=True)) * q.shape[3] ** -0.5
    sums = p @ v.abs(), ds @ k.abs(), ds.mT @ q.abs(), p.mT @ grad_o.abs()
    return [torch.finfo(torch.float64).tiny + x.norm().item() for x in sums]


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@few_examples
@given(shape=shapes, blocks=blocks, causal=st.booleans())
def test_errors_are_at_most_twice_the_standard_ones_and_three_times_in_gradients(
    dtype, shape, blocks, causal
):
    case = inputs(dtype=dtype, **shape | {"size": 1.0})
    expected = exact(*case, causal=causal)
    standard = run(standard_attention, *case, causal=causal)
    found = run(flash_attention, *case, causal=causal, **blocks)
    for factor, x, y, z, sums in zip(
        (2, 3, 3, 3), found, standard, expected, roundings(*case, causal), strict=True
    ):
        assert x.dtype == dtype
        error, allowed = ((a.double() - z).norm().item() for a in (x, y))
        assert error <= factor * allowed + torch.finfo(dtype).eps * sums


@pytest.mark.parametrize(
    ("dtype", "causal"), [(torch.float32, True), (torch.bfloat16, True), (torch.float16, False)]
)
def test_errors_at_a_length_of_many_tiles_are_no_larger_than_the_standard_ones_allow(dtype, causal):
    case = inputs(300, batch=1, heads=2, d=32, dtype=dtype)
    expected = exact(*case, causal=causal)
    standard = run(standard_attention, *case, causal=causal)
    found = run(flash_attention, *case, causal=causal, block_q=64, block_k=96)
    for factor, x, y, z in zip((2, 3, 3, 3), found, standard, expected, strict=True):
        assert relative_error(x, z) <= factor * relative_error(y, z)


@pytest.mark.parametrize(
    ("n_q", "n_k", "causal", "heads", "kv_heads"),
    [(5, 5, False, 1, 1), (5, 5, True, 4, 2), (3, 6, True, 1, 1), (6, 3, True, 4, 2)],
)
def test_the_gradient_is_the_numerical_one(n_q, n_k, causal, heads, kv_heads):
    q, k, v, _ = inputs(n_q, n_k, batch=1, heads=heads, kv_heads=kv_heads, d=2, dtype=torch.float64)
    for attention in (
        lambda *x: flash_attention(*x, causal=causal, block_q=2, block_k=4),
        standard_attention,
    ):
        assert torch.autograd.gradcheck(attention, (q, k, v), fast_mode=True)


@pytest.mark.parametrize(("n_q", "n_k"), [(33, 33), (20, 50), (1, 50)])
def test_causal_is_aligned_to_the_bottom_right_as_the_frameworks_bias(n_q, n_k):
    q, k, v, _ = inputs(n_q, n_k, grad=False)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(n_q, n_k))
    assert_close(flash_attention(q, k, v, causal=True, block_q=8, block_k=16), expected)
    assert_close(standard_attention(q, k, v, causal=True), expected)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_queries_share_keys_as_the_frameworks_do(kv_heads):
    *case, grad_o = inputs(20, heads=4, kv_heads=kv_heads)
    expected = run(F.scaled_dot_product_attention, *case, grad_o, enable_gqa=True)
    assert_close(run(flash_attention, *case, grad_o, block_q=8), expected)
    assert_close(run(standard_attention, *case, grad_o), expected)


# ---- the framework's arguments


@few_examples
@given(shape=shapes, is_causal=st.booleans(), scale=st.sampled_from([None, 0.3]), blocks=blocks)
def test_the_frameworks_arguments_give_the_frameworks_results(shape, is_causal, scale, blocks):
    case = inputs(dtype=torch.float64, **shape)
    options = {
        "is_causal": is_causal,
        "scale": scale,
        "enable_gqa": True,
        "attn_mask": None,
        "dropout_p": 0.0,
    }
    with sdpa_kernel(SDPBackend.MATH):
        expected = run(F.scaled_dot_product_attention, *case, **options)
    for found in (
        run(flash_attention, *case, **options, **blocks),
        run(standard_attention, *case, **options),
    ):
        for x, y in zip(found, expected, strict=True):
            assert_close(x, y, rtol=1e-9, atol=1e-10)


def formula(q, k, v, is_causal=False):
    """The definition, for any leading dimensions, in the dtype of the inputs."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    unseen = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return (scores.masked_fill(unseen, -math.inf) if is_causal else scores).softmax(-1) @ v


@pytest.mark.parametrize("attention", [flash_attention, standard_attention])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1, 3), (2, 3, 1, 2), (2, 0, 3)])
def test_attention_has_any_leading_dimensions_as_the_frameworks(leading, is_causal, attention):
    def rows(count, width, seed):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(*leading[::-1], count, width, generator=generator, dtype=torch.float64)
        # not contiguous: the leading dimensions come from a permuted tensor
        return x.permute(*range(len(leading))[::-1], -2, -1)

    case = rows(9, 8, 0), rows(13, 8, 1), rows(13, 5, 2), rows(9, 5, 3)
    found = run(attention, *case, is_causal=is_causal)
    with sdpa_kernel(SDPBackend.MATH):
        theirs = run(F.scaled_dot_product_attention, *case, is_causal=is_causal)
    for expected in (theirs, run(formula, *case, is_causal=is_causal)):
        for x, y in zip(found, expected, strict=True):
            assert_close(x, y, rtol=1e-9, atol=1e-10)
    with symbolic():
        outline = attention(*(torch.empty(x.shape) for x in case[:3]), is_causal=is_causal)
    assert outline.shape == found[0].shape


def test_grouped_queries_in_five_dimensions_are_the_frameworks():
    shapes = (2, 3, 4, 9, 8), (2, 3, 2, 9, 8), (2, 3, 2, 9, 8), (2, 3, 4, 9, 8)
    case = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    with sdpa_kernel(SDPBackend.MATH):
        expected = run(F.scaled_dot_product_attention, *case, enable_gqa=True)
    assert_close(run(flash_attention, *case), expected, rtol=1e-9, atol=1e-10)


def test_leading_dimensions_other_than_four_save_as_few_bytes():
    q, k, v = (torch.randn(6, 16, 8, requires_grad=True) for _ in range(3))
    in_four = (x.detach().unflatten(0, (1, 6)).requires_grad_() for x in (q, k, v))
    saved = saved_tensors(flash_attention, q, k, v).total_bytes
    assert saved == saved_tensors(flash_attention, *in_four).total_bytes


@pytest.mark.parametrize("attention", [flash_attention, standard_attention])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((0, 3, 4, 8), (0, 3, 5, 8), (0, 3, 5, 8)),
        pytest.param((2, 0, 4, 8), (2, 0, 5, 8), (2, 0, 5, 8), marks=no_heads),
        ((2, 0, 4, 8), (2, 3, 5, 8), (2, 3, 5, 8)),
        ((2, 3, 0, 8), (2, 3, 5, 8), (2, 3, 5, 8)),
        ((2, 4, 4, 8), (2, 2, 0, 8), (2, 2, 0, 8)),
        ((2, 3, 4, 0), (2, 3, 5, 0), (2, 3, 5, 8)),
        ((2, 3, 4, 8), (2, 3, 5, 8), (2, 3, 5, 0)),
    ],
)
def test_empty_tensors_give_the_frameworks_results(q, k, v, is_causal, attention):
    case = [torch.randn(shape) for shape in (q, k, v, (*q[:3], v[3]))]
    with sdpa_kernel(SDPBackend.MATH):
        expected = run(F.scaled_dot_product_attention, *case, is_causal=is_causal, enable_gqa=True)
    assert_close(run(attention, *case, is_causal=is_causal), expected)
    with symbolic():
        found = run(attention, *(torch.empty(x.shape) for x in case), is_causal=is_causal)
    assert [x.shape for x in found] == [x.shape for x in expected]


@pytest.mark.parametrize("attention", [flash_attention, standard_attention])
def test_a_flag_may_be_numpys(attention):
    q, k, v, _ = inputs(grad=False)
    assert torch.equal(attention(q, k, v, causal=numpy.True_), attention(q, k, v, causal=True))
    assert torch.equal(attention(q, k, v, is_causal=numpy.False_), attention(q, k, v))


# ---- what is in the way of exact sums


@pytest.mark.parametrize("attention", [flash_attention, standard_attention])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_that_see_no_key_give_zeros_and_take_no_part_in_gradients(attention, dtype):
    case = inputs(9, 4, dtype=dtype)
    o, dq, dk, dv = run(attention, *case, causal=True)
    assert not o[:, :, :5].any() and not dq[:, :, :5].any() and o[:, :, 5:].all()
    q, k, v, grad_o = case
    below = run(attention, q[:, :, 5:], k, v, grad_o[:, :, 5:], causal=True)
    assert_close((o[:, :, 5:], dq[:, :, 5:], dk, dv), below)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_scores_too_large_for_exp_or_for_the_dtype_do_not_overflow(dtype):
    q, k, v, grad_o = inputs(20, d=64, dtype=dtype, size=200.0)
    assert (q.double() @ k.double().mT).abs().max() > 65504 * 8
    found = run(flash_attention, q, k, v, grad_o, causal=True, block_q=8, block_k=8)
    assert all(x.isfinite().all() for x in found)
    assert_close(found[0], exact(q, k, v, grad_o, causal=True)[0].to(dtype), rtol=0.02, atol=0.02)


def test_a_block_may_hold_far_smaller_scores_than_one_before_or_after_it():
    q = torch.ones(1, 1, 1, 1)
    for k in ([500.0, -500.0, 400.0], [-500.0, 400.0, 500.0], [-1e30, -1e30, -1e30]):
        k = torch.tensor(k).view(1, 1, 3, 1)
        v = torch.tensor([1.0, 2.0, 4.0]).view(1, 1, 3, 1)
        assert_close(flash_attention(q, k, v, block_k=1), reference(q, k, v))


STRIDES = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "features first": lambda x: x.mT.contiguous().mT,
    "every second row": lambda x: x.repeat_interleave(2, dim=2)[:, :, ::2],
    "a slice of features": lambda x: torch.cat([x, x], dim=-1)[..., : x.shape[-1]],
}


@pytest.mark.parametrize("name", STRIDES)
@pytest.mark.parametrize("attention", [flash_attention, standard_attention])
def test_strides_make_no_difference(name, attention):
    case = inputs(20, 30, kv_heads=2)
    strided = [STRIDES[name](x.detach()) for x in case]
    assert name == "contiguous" or not any(x.is_contiguous() for x in strided)
    assert_close(run(attention, *strided, causal=True), run(attention, *case, causal=True))


@pytest.mark.parametrize("attention", [flash_attention, standard_attention])
def test_expanded_inputs_get_the_sum_of_the_gradients(attention):
    q, k, v, grad_o = inputs(20, grad=False)
    small = [x[:1, :1].clone().requires_grad_() for x in (q, k, v)]
    o = attention(*(x.expand(2, 4, 20, 8) for x in small))
    found = torch.autograd.grad(o, small, grad_o)
    _, *gradients = run(attention, *(x.detach().expand(2, 4, 20, 8).clone() for x in small), grad_o)
    assert_close(found, tuple(x.sum((0, 1), keepdim=True) for x in gradients))
    assert_close(
        run(attention, q, k, v, torch.ones(()).expand_as(q)),
        run(attention, q, k, v, torch.ones_like(q)),
    )


def test_many_heads_at_a_time_are_each_by_itself(monkeypatch):
    case = inputs(30, 40, batch=3, heads=6, kv_heads=2)
    expected = run(flash_attention, *case, causal=True)
    monkeypatch.setattr(tiled, "MIN_HEADS_AT_ONCE", 1)
    # one head of keys, two, four and then two
    for elements in (1, 2 * 3 * 30 * 40, 4 * 3 * 30 * 40):
        monkeypatch.setitem(tiled.TILE_ELEMENTS, "cpu", elements)
        assert_close(run(flash_attention, *case, causal=True), expected)


def test_only_the_gradients_asked_for_are_given():
    for i in range(3):
        case = [x.detach() for x in inputs(20)[:3]]
        case[i].requires_grad_()
        flash_attention(*case).sum().backward()
        assert [x.grad is not None for x in case] == [j == i for j in range(3)]
    assert not flash_attention(*(x.detach() for x in case)).requires_grad
    with torch.no_grad():
        assert flash_attention(*case).grad_fn is None


# ---- autocast, functional transforms, second derivatives


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("attention", [flash_attention, standard_attention])
def test_autocast_casts_the_inputs_as_it_does_for_the_framework(attention, dtype):
    case = inputs(40, d=16)
    with torch.autocast("cpu", dtype):
        found = run(attention, *case[:3], case[3].to(dtype))  # the backward pass under autocast too
        framework = run(F.scaled_dot_product_attention, *case[:3], case[3].to(dtype))
    cast = run(attention, *(x.to(dtype) for x in case))
    assert [x.dtype for x in found] == [x.dtype for x in framework] == [dtype] + [torch.float32] * 3
    assert_close(
        found, tuple(x.to(y.dtype) for x, y in zip(cast, found, strict=True)), rtol=0, atol=0
    )
    for x, y in zip(found, exact(*case), strict=True):
        assert relative_error(x, y) < 4 * torch.finfo(dtype).eps


def test_autocast_takes_inputs_of_several_dtypes_and_leaves_float64_alone():
    q, k, v, _ = inputs(20, grad=False)
    with torch.autocast("cpu", torch.bfloat16):
        assert flash_attention(q, k.bfloat16(), v.half()).dtype == torch.bfloat16
        assert flash_attention(q.double(), k.double(), v.double()).dtype == torch.float64
        inside = flash_attention(q, k, v)
    assert torch.equal(inside, flash_attention(q.bfloat16(), k.bfloat16(), v.bfloat16()))


def test_vmap_is_refused_with_what_to_do_instead():
    q, k, v, _ = inputs(grad=False)
    with pytest.raises(
        RuntimeError, match=r"cannot be combined with torch\.vmap; use its batch dimension"
    ):
        torch.vmap(flash_attention)(q[None], k[None], v[None])
    with pytest.raises(RuntimeError, match=r"cannot be combined with torch\.vmap"):
        torch.func.jacrev(flash_attention)(q, k, v)


def test_the_functional_gradient_is_the_gradient():
    q, k, v, grad_o = inputs(20)
    found = torch.func.grad(lambda *x: (flash_attention(*x) * grad_o).sum(), argnums=(0, 1, 2))(
        q, k, v
    )
    assert_close(found, run(flash_attention, q, k, v, grad_o)[1:])


def test_a_second_derivative_is_refused():
    q, k, v, _ = inputs()
    [dq] = torch.autograd.grad(flash_attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(
        RuntimeError, match="cannot be differentiated twice; use standard_attention for that"
    ):
        dq.sum().backward()

    def slope(q):
        return torch.func.grad(lambda q: flash_attention(q, k, v).square().sum())(q).sum()

    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.func.grad(slope)(q)
    assert torch.autograd.gradgradcheck(
        standard_attention, inputs(3, d=2, dtype=torch.float64)[:3], fast_mode=True
    )


# ---- what is saved, what is live


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("kv_heads", "dtype", "n"), [(4, torch.float32, 33), (2, torch.bfloat16, 65)]
)
def test_saved_bytes_are_predicted_to_the_byte(n, dtype, kv_heads, causal):
    q, k, v, _ = inputs(n, kv_heads=kv_heads, dtype=dtype, d=16)
    for kind, attention in (("standard", standard_attention), ("flash", flash_attention)):
        predicted = attention_saved_bytes(
            sequence=n,
            batch=2,
            heads=4,
            kv_heads=kv_heads,
            head_dim=16,
            dtype_bytes=dtype.itemsize,
            kind=kind,
        )
        saved = saved_tensors(lambda *x, attention=attention: attention(*x, causal=causal), q, k, v)
        assert saved.total_bytes == sum(predicted.values())
        found = sorted(row.bytes for row in saved if row.shared_with is None)
        assert found == sorted(predicted.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_frameworks_fused_kernel_saves_as_many_bytes(dtype):
    q, k, v, _ = inputs(512, dtype=dtype, d=16)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        fused = saved_tensors(F.scaled_dot_product_attention, q, k, v)
    assert saved_tensors(flash_attention, q, k, v).total_bytes == fused.total_bytes


def test_flash_saves_its_inputs_its_output_and_the_log_sum_exp_of_each_row():
    q, k, v, _ = inputs(20, 30, kv_heads=2)
    o = flash_attention(q, k, v, causal=True, block_q=8, block_k=8)
    saved = o.grad_fn.saved_tensors
    assert [x.data_ptr() for x in saved[:4]] == [x.data_ptr() for x in (q, k, v, o)] and len(
        saved
    ) == 5
    scores = q @ k.repeat_interleave(2, dim=1).mT / math.sqrt(8)
    scores.masked_fill_(torch.ones(20, 30, dtype=torch.bool).triu(11), -math.inf)
    assert saved[4].shape == (2, 4, 20) and saved[4].dtype == torch.float32
    assert_close(saved[4], scores.logsumexp(-1))


def test_nothing_is_copied_to_be_saved():
    x = torch.randn(2, 50, 3, 4, 8, requires_grad=True)
    q, k, v = x.permute(2, 0, 3, 1, 4)  # three views of one tensor
    grouped = torch.randn(2, 1, 50, 8, requires_grad=True).expand(2, 4, 50, 8)
    o_bytes, lse_bytes = q.nbytes, 2 * 4 * 50 * 4
    assert saved_tensors(flash_attention, q, k, v).total_bytes == x.nbytes + o_bytes + lse_bytes
    assert saved_tensors(flash_attention, q, grouped, grouped).total_bytes == (
        x.nbytes + grouped.untyped_storage().nbytes() + o_bytes + lse_bytes
    )


@pytest.mark.parametrize("causal", [False, True])
def test_nothing_of_n_times_n_is_ever_live(causal):
    n, d, block = 1024, 16, 128
    case = inputs(n, batch=1, heads=2, d=d)
    with MemoryMeter() as meter, Sizes() as sizes:
        run(flash_attention, *case, causal=causal, block_q=block, block_k=block)
    assert sizes.largest == max(2 * n * d, 2 * block * block) == case[0].numel()
    outputs = 4 * case[0].nbytes + 2 * n * 4  # o, dq, dk, dv and the log-sum-exp
    tiles = 3 * 2 * block * block * 4
    assert meter.peak_bytes <= outputs + tiles + 3 * case[0].nbytes < 2 * n * n * 4 / 4
    with Sizes() as sizes:
        run(standard_attention, *case, causal=causal)
    assert sizes.largest == 2 * n * n


def test_tiles_do_not_grow_with_heads_or_batch():
    def largest(batch, heads, n, kv_heads=None):
        with Sizes() as sizes:
            run(flash_attention, *inputs(n, batch=batch, heads=heads, kv_heads=kv_heads, d=1))
        return sizes.largest

    assert largest(1, 1, 512) == largest(1, 1, 1000) == largest(8, 8, 64) == 512 * 512
    assert largest(1, 8, 512, kv_heads=1) == 512 * 512
    assert (
        largest(2, 4, 512) == largest(1, 2, 1000) == largest(2, 8, 600, kv_heads=2) == 2 * 512 * 512
    )


def test_the_peak_grows_with_n_and_not_with_its_square():
    def peak(n, attention=flash_attention):
        case = inputs(n, batch=1, heads=1, d=16)
        with MemoryMeter() as meter:
            run(attention, *case)
        return meter.peak_bytes

    assert peak(4096) - peak(2048) == 2 * (peak(2048) - peak(1024))
    assert peak(1024, standard_attention) > 3.5 * peak(512, standard_attention)


def test_symbolic_tensors_take_the_same_peak():
    def peak():
        q, k, v = (torch.ones(1, 2, 1030, 16, requires_grad=True) for _ in range(3))
        with MemoryMeter() as meter:
            flash_attention(q, k, v, causal=True).sum().backward()
        return meter.peak_bytes

    with symbolic():
        counted = peak()
    assert counted == peak()


OUTLINED = [  # batch, heads, kv_heads, n_q, n_k, d, d_v, mask, blocks, dtype
    (2, 4, 2, 64, 64, 8, 8, "causal", (16, 16), torch.bfloat16),
    (1, 4, 4, 130, 130, 16, 16, "causal", (16, 64), torch.float32),
    (1, 4, 1, 200, 200, 16, 8, None, (48, 64), torch.float32),
    (1, 2, 2, 700, 900, 64, 64, "causal", (256, 128), torch.float32),
    (1, 2, 2, 900, 700, 64, 64, "causal", (128, 256), torch.bfloat16),
    (1, 3, 3, 600, 1300, 16, 24, "causal", (None, None), torch.bfloat16),
    (1, 12, 12, 1024, 1024, 64, 64, None, (None, None), torch.float32),
    (1, 6, 3, 140, 300, 8, 8, "is_causal", (64, 64), torch.float32),
    (1, 3, 3, 300, 140, 8, 12, "is_causal", (64, 32), torch.bfloat16),
    (1, 1, 1, 1, 40, 4, 4, "causal", (8, 8), torch.float32),
]


@pytest.mark.parametrize("sizes", OUTLINED, ids=str)
def test_the_outline_for_symbolic_tensors_takes_the_bytes_and_flops_of_all_tiles(sizes):
    batch, heads, kv_heads, n_q, n_k, d, d_v, mask, (block_q, block_k), dtype = sizes
    options = {"block_q": block_q, "block_k": block_k, **({mask: True} if mask else {})}

    def make(count, n, d):
        if dtype == torch.float32:  # as in a model
            return (
                torch.empty(batch, n, 3, count, d, dtype=dtype)
                .permute(2, 0, 3, 1, 4)[0]
                .requires_grad_()
            )
        return torch.empty(batch, count, n, d, dtype=dtype, requires_grad=True)

    def taken(backend):
        with symbolic():
            q, k, v = make(heads, n_q, d), make(kv_heads, n_k, d), make(kv_heads, n_k, d_v)
            flops, peaks = [], []
            for backwards in (False, True):
                with MemoryMeter() as meter, FlopCounterMode(display=False) as counter:
                    o = flash_attention(q, k, v, backend=backend, **options)
                    if backwards:
                        o.transpose(1, 2).reshape(batch, n_q, heads * d_v).sum().backward()
                        q.grad = k.grad = v.grad = None
                peaks += [meter.peak_bytes, meter.live_bytes]
                flops.append(counter.get_total_flops())
                del o
            return flops, peaks, len(meter.timeline)

    (*outline, short), (*tiles, long) = taken("auto"), taken("torch")
    assert outline == tiles
    assert short <= long + 25


# ---- threads


@pytest.fixture
def two_threads(monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(threads, "MIN_SCORES_FOR_THREADS", 0)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def names(monkeypatch):
    """The names of the threads that tiles are computed in."""
    names = set()
    for name in ("forward_tiles", "backward_tiles"):
        function = getattr(tiled, name)

        def noted(*args, function=function):
            names.add(threading.current_thread().name.split("_")[0])
            return function(*args)

        monkeypatch.setattr(tiled, name, noted)
    return names


@pytest.mark.parametrize(
    ("heads", "kv_heads", "causal"), [(2, 2, False), (6, 3, True), (3, 3, True)]
)
def test_heads_in_threads_give_the_same(two_threads, names, heads, kv_heads, causal):
    case = inputs(70, 90, heads=heads, kv_heads=kv_heads, dtype=torch.float64)
    found = run(flash_attention, *case, causal=causal, block_q=16, block_k=32)
    assert names == {"attention"} and torch.get_num_threads() == 2
    assert_close(found, exact(*case, causal=causal))


def test_threads_take_no_more_bytes_than_heads_together(two_threads, names, monkeypatch):
    sizes = []
    monkeypatch.setattr(
        tiled, "_exp_", lambda x, exp=tiled._exp_: (sizes.append(x.numel()), exp(x))[1]
    )
    case = inputs(40, batch=1, heads=6)
    run(flash_attention, *case)
    in_threads = 2 * max(sizes)
    sizes.clear()
    with MemoryMeter():
        run(flash_attention, *case)
    assert in_threads == max(sizes) == 6 * 40 * 40


def test_an_operator_that_is_watched_runs_in_the_thread_that_is_watched(two_threads, names):
    q, k, v, grad_o = inputs(40)
    for watcher in (MemoryMeter(), FlopCounterMode(display=False), torch.profiler.profile()):
        with watcher:
            run(flash_attention, q, k, v, grad_o)
    assert names == {"MainThread"}


def test_threads_compute_in_inference_mode_and_without_gradients_too(two_threads, names):
    q, k, v, _ = inputs(40)
    expected = reference(q, k, v)
    for mode in (torch.inference_mode(), torch.no_grad(), torch.enable_grad()):
        with mode:
            assert_close(flash_attention(q, k, v), expected)
    with torch.inference_mode():
        q = q.clone()
        assert_close(flash_attention(q, q, q), reference(q, q, q))
    assert names == {"attention"}


def test_an_error_in_a_thread_is_raised(two_threads, monkeypatch):
    def fail(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(tiled, "forward_tiles", fail)
    with pytest.raises(MemoryError, match="no room"):
        flash_attention(*inputs(40)[:3])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_has_threads_of_its_own():
    program = """if True:
        import os, torch
        from course_lib.attention import flash_attention
        torch.set_num_threads(2)
        x = torch.randn(1, 4, 512, 8)
        expected = flash_attention(x, x, x)
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.allclose(flash_attention(x, x, x), expected) else 1)
        raise SystemExit(os.waitpid(child, 0)[1])
    """
    assert subprocess.run([sys.executable, "-c", program], timeout=HANGS_SECONDS).returncode == 0


# ---- costs


def counted_flops(attention, n, d=16, **options):
    """FLOPs of the forward and of the backward pass of one head."""
    q, k, v, grad_o = inputs(n, batch=1, heads=1, d=d)
    with FlopCounterMode(display=False) as forward:
        o = attention(q, k, v, **options)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(o, (q, k, v), grad_o)
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("n", [50, 128])
@pytest.mark.parametrize(
    ("kind", "attention"), [("standard", standard_attention), ("flash", flash_attention)]
)
def test_flops_are_those_that_are_counted(kind, attention, n):
    predicted = [
        attention_cost(sequence=n, head_dim=16, kind=kind, pass_=p).flops
        for p in ("forward", "backward")
    ]
    assert list(counted_flops(attention, n)) == predicted
    assert predicted == [4 * n * n * 16, (8 if kind == "standard" else 10) * n * n * 16]
    many = attention_cost(sequence=n, head_dim=16, batch=3, heads=5, kind=kind)
    one = attention_cost(sequence=n, head_dim=16, kind=kind)
    assert (many.flops, many.moved_bytes) == (15 * one.flops, 15 * one.moved_bytes)


def test_a_backward_in_two_passes_takes_seven_products_as_many_as_the_kernels_do():
    kernels = pytest.importorskip("course_lib.attention.kernels")
    each = (kernels.keys_backward_kernel, kernels.queries_backward_kernel)
    products = sum(
        inspect.getsource(getattr(kernel, "fn", kernel)).count("= product(") for kernel in each
    )
    size = {"sequence": 128, "head_dim": 16, "kind": "flash"}
    assert (
        attention_cost(pass_="backward", tile_passes=2, **size).flops
        == 2 * products * 128**2 * 16
        == 14 * 128**2 * 16
    )
    with pytest.raises(
        ValueError,
        match="tile_passes must be 1 unless kind is 'flash' and pass_ is 'backward', got 2",
    ):
        attention_cost(pass_="forward", tile_passes=2, **size)


@pytest.mark.parametrize(("n_q", "n_k"), [(96, 96), (64, 96), (96, 64)])
def test_tiles_above_the_causal_diagonal_are_skipped(n_q, n_k):
    q, k, v, grad_o = inputs(n_q, n_k, batch=1, heads=1)
    with FlopCounterMode(display=False) as forward:
        o = flash_attention(q, k, v, causal=True, block_q=16, block_k=16)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(o, (q, k, v), grad_o)
    seen = torch.ones(n_q, n_k).tril(n_k - n_q)
    tiles = seen.view(n_q // 16, 16, n_k // 16, 16).amax((1, 3)).sum().item()
    assert forward.get_total_flops() == 4 * 16 * 16 * 8 * tiles
    assert backward.get_total_flops() == 10 * 16 * 16 * 8 * tiles


def test_standard_attention_moves_each_operators_inputs_and_outputs():
    n, d = 100, 16
    tensors = {"q": n * d, "k": n * d, "v": n * d, "o": n * d, "s": n * n, "p": n * n}
    gradients = {f"d{name}": count for name, count in tensors.items()}
    passes = {
        "forward": ["q k s", "s p", "p v o"],
        "backward": ["p do dv", "do v dp", "p dp ds", "ds k dq", "ds q dk"],
    }
    for pass_, operators in passes.items():
        moved = sum(
            (tensors | gradients)[name] for operator in operators for name in operator.split()
        )
        for dtype_bytes in (2, 4):
            cost = attention_cost(
                sequence=n, head_dim=d, kind="standard", pass_=pass_, dtype_bytes=dtype_bytes
            )
            assert cost.moved_bytes == dtype_bytes * moved
            assert cost.arithmetic_intensity == cost.flops / cost.moved_bytes


@pytest.mark.parametrize(
    ("n", "d", "sram_bytes"), [(1000, 64, 192 * 1024), (512, 128, 100_000), (5, 64, 192 * 1024)]
)
def test_flash_moves_what_a_walk_over_its_blocks_moves(n, d, sram_bytes):
    def walk(rows_per_block, kept, streamed, numbers):
        """Elements and fp32 numbers: `kept` tensors once, `streamed` tensors and `numbers` for each
        block."""
        elements, statistics = kept * n * d, 0
        for _ in range(0, n, rows_per_block):
            elements, statistics = elements + streamed * n * d, statistics + numbers * n
        return elements, statistics

    cost = {p: attention_cost(sequence=n, head_dim=d, kind="flash", pass_=p, sram_bytes=sram_bytes)
            for p in ("forward", "backward")}  # fmt: skip
    elements, statistics = walk(sram_bytes // 2 // (4 * d), kept=2, streamed=2, numbers=0)
    assert cost["forward"].moved_bytes == 2 * elements + 4 * (statistics + n)
    elements, statistics = walk(sram_bytes // 2 // (8 * d), kept=2 + 4, streamed=4, numbers=2)
    assert cost["backward"].moved_bytes == 2 * elements + 4 * (statistics + n)


def test_the_leading_terms_of_the_bytes_moved_are_those_of_the_paper():
    n, d, sram_bytes = 2**20, 64, 192 * 1024
    m = sram_bytes // 2
    leading = {
        ("standard", "forward"): 4 * n * n,
        ("standard", "backward"): 7 * n * n,
        ("flash", "forward"): 8 * n * n * d * d / m,
        ("flash", "backward"): 32 * n * n * d * d / m,
    }
    for (kind, pass_), elements in leading.items():
        cost = attention_cost(sequence=n, head_dim=d, kind=kind, pass_=pass_, sram_bytes=sram_bytes)
        assert cost.moved_bytes == pytest.approx(2 * elements, rel=0.02)


# ---- backends


@pytest.fixture
def triton(monkeypatch):
    """Stands in for the Triton backend: the torch backend with a reason not to be used."""
    module = types.ModuleType("course_lib.attention.launch")
    module.calls, module.reason = [], None
    module.why_not = lambda q, v: module.reason
    module.forward = lambda *args: (module.calls.append("forward"), tiled.forward(*args))[1]
    module.backward = lambda *args: (module.calls.append("backward"), tiled.backward(*args))[1]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(course_lib.attention, "launch", module, raising=False)
    return module


def test_auto_takes_triton_for_cuda_tensors_where_it_can_run(triton):
    cpu, cuda = (
        types.SimpleNamespace(is_cuda=is_cuda, shape=(1, 1, 1, 1)) for is_cuda in (False, True)
    )
    assert [flash._backend(name, *[cuda] * 3) for name in ("auto", "triton", "torch")] == [
        triton,
        triton,
        tiled,
    ]
    assert [flash._backend(name, *[cpu] * 3) for name in ("auto", "triton", "torch")] == [
        tiled,
        triton,
        tiled,
    ]
    triton.reason = "the head dimension is 7"
    assert flash._backend("auto", *[cuda] * 3) is tiled


def test_a_backend_asked_for_runs_forward_and_backward(triton):
    case = inputs(20)
    assert_close(
        run(flash_attention, *case, backend="triton"), run(flash_attention, *case, backend="torch")
    )
    assert triton.calls == ["forward", "backward"]


def test_triton_where_it_cannot_run_is_an_error_that_says_why_and_what_works(triton):
    triton.reason = "q is on a CPU"
    with pytest.raises(
        RuntimeError, match=r"backend must be 'torch' or 'auto' .*, got 'triton': q is on a CPU$"
    ):
        flash_attention(*inputs()[:3], backend="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_on_a_gpu_the_torch_backend_gives_the_same(dtype):
    case = inputs(700, 900, kv_heads=2, d=64, dtype=dtype)
    found = run(flash_attention, *(x.detach().cuda() for x in case), causal=True, backend="torch")
    for x, y in zip(found, exact(*case, causal=True), strict=True):
        assert (
            relative_error(x.cpu(), y)
            < (16 if dtype == torch.float32 else 4) * torch.finfo(dtype).eps
        )


@pytest.mark.gpu
# whose softmax is float32 by itself
def test_on_a_gpu_the_standard_probabilities_are_saved_in_autocasts_dtype():
    q, k, v = (x.detach().cuda().bfloat16().requires_grad_() for x in inputs(64, d=16)[:3])
    with torch.autocast("cuda", torch.bfloat16):
        assert {row.dtype for row in saved_tensors(standard_attention, q, k, v)} == {torch.bfloat16}


# ---- what is refused

X = torch.ones(2, 4, 6, 8)
SHARED = X[:, :2]
COST = {"sequence": 64, "head_dim": 64, "kind": "flash"}


def test_the_least_on_chip_memory_is_a_row_of_each_block():
    assert (
        attention_cost(**COST, sram_bytes=512).moved_bytes
        > attention_cost(**COST, sram_bytes=1024).moved_bytes
    )


# ---- what you may have read


def test_one_number_a_row_suffices_and_it_is_fp32_where_the_rest_is_half():
    q, k, v, grad_o = inputs(64, dtype=torch.bfloat16, d=16)
    saved = saved_tensors(flash_attention, q, k, v)
    assert [row.dtype for row in saved].count(torch.float32) == 1
    [statistic] = [row for row in saved if row.dtype == torch.float32]
    assert statistic.shape == (2, 4, 64) and statistic.bytes == 4 * 2 * 4 * 64
    assert_close(
        run(flash_attention, q, k, v, grad_o),
        run(standard_attention, q, k, v, grad_o),
        rtol=0.05,
        atol=0.05,
    )


def test_the_backward_pass_takes_two_and_a_half_times_the_forwards_flops():
    forward, backward = counted_flops(flash_attention, 256)
    assert backward / forward == 2.5
    forward, backward = counted_flops(standard_attention, 256)
    assert backward / forward == 2.0


def test_memory_is_linear_in_n_and_flops_are_quadratic():
    short, long = (
        saved_tensors(flash_attention, *inputs(n, d=16)[:3]).total_bytes for n in (128, 256)
    )
    assert long == 2 * short
    short, long = (sum(counted_flops(flash_attention, n)) for n in (64, 128))
    assert long == 4 * short


def test_checkpointed_attention_costs_more_flops_than_flash():
    def checkpointed(q, k, v):
        return checkpoint(standard_attention, q, k, v, use_reentrant=False, early_stop=False)

    unit = 256 * 256 * 16
    assert [
        sum(counted_flops(kind, 256)) // unit
        for kind in (standard_attention, checkpointed, flash_attention)
    ] == [
        12,
        16,
        14,
    ]


def test_checkpoints_save_nothing_of_one_attention_layers_peak_and_more_with_each_further_one():
    inputs = [torch.randn(1, 4, 256, 16, requires_grad=True) for _ in range(3)]
    for x in inputs:
        x.grad = torch.zeros_like(x)

    def peak(layer, depth):
        with MemoryMeter() as meter:
            o, k, v = inputs
            for _ in range(depth):
                o = layer(o, k, v)
            o.sum().backward()
        return meter.peak_bytes

    def checkpointed(q, k, v):
        return checkpoint(
            standard_attention, q, k, v, use_reentrant=False, preserve_rng_state=False
        )

    savings = [
        1 - peak(checkpointed, depth) / peak(standard_attention, depth) for depth in (1, 2, 4, 8)
    ]
    assert abs(savings[0]) < 0.01
    assert savings == sorted(savings) and 0.5 < savings[-1] < 0.8
