"""Tiled attention against float64 and PyTorch's attention; its costs against measurements."""

import math
import os
import subprocess
import sys
import threading
import types
from functools import partial
from unittest.mock import Mock

import numpy
import pytest
import torch
from hypothesis_settings import given, settings, st
from timeouts import TIMEOUT_SECONDS
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode
from training_steps import metered

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
from course_lib.memory import MemoryMeter, attention_saved_bytes, saved_tensors, symbolic

few_examples = settings(max_examples=25, deadline=None)
HALVES = (torch.bfloat16, torch.float16)
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
# The attention of torch 2.9 crashes without heads, because it divides by their number; that of 2.13
# does not.
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
    """Return q, k, v and a gradient of the output."""
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
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    o = attention(q, k, v, **options)
    return o.detach(), *torch.autograd.grad(o, (q, k, v), grad_o)


def reference(q, k, v, *, causal=False, is_causal=False, scale=None):
    """Compute attention from all scores of each head, in the dtype of the inputs."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool)
    if causal or is_causal:
        visible = visible.tril(0 if is_causal else k.shape[2] - q.shape[2])
    p = scores.masked_fill(~visible, -math.inf).softmax(-1)
    return p.masked_fill(~visible.any(-1, keepdim=True), 0.0) @ v


def exact(q, k, v, grad_o, **options):
    return run(reference, q.double(), k.double(), v.double(), grad_o.double(), **options)


def relative_error(x, expected):
    return ((x.double() - expected).norm() / expected.norm()).item()


@pytest.fixture
def tiles(monkeypatch):
    """Record the threads that compute exponentials of tiles, and the most elements of a tile."""
    found, exp = types.SimpleNamespace(threads=set(), largest=0), tiled._exp_

    def record(x):
        found.threads.add(threading.current_thread().name.split("_")[0])
        found.largest = max(found.largest, x.numel())
        return exp(x)

    monkeypatch.setattr(tiled, "_exp_", record)
    return found


# ---- online_softmax


@few_examples
@given(
    n=st.integers(1, 40),
    block=st.integers(1, 45),
    size=st.sampled_from([1.0, 100.0]),
    seed=st.integers(0, 99),
)
def test_online_softmax_equals_softmax(n, block, size, seed):
    scores = size * torch.randn(
        3, 2, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    assert_close(online_softmax(scores, block), scores.softmax(-1), rtol=1e-13, atol=1e-300)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_online_softmax_preserves_input_dtype_and_does_not_overflow(dtype):
    scores = torch.tensor(
        [[-3e4, 0.0, 3e4, 3e4], [-3e4] * 4, [0.0, 1.0, -math.inf, 2.0]], dtype=dtype
    )
    p = online_softmax(scores, 3)
    assert p.dtype == dtype
    assert_close(p, scores.softmax(-1), rtol=2 * torch.finfo(dtype).eps, atol=0)
    flat = torch.zeros(2, 4096, dtype=dtype)
    assert_close(online_softmax(flat, 8), torch.full_like(flat, 2.0**-12))


def test_online_softmax_of_minus_infinity_is_zero():
    scores = torch.full((2, 5), -math.inf)
    scores[1, 3] = 0.0
    assert online_softmax(scores, 2).tolist() == [[0.0] * 5, [0.0, 0.0, 0.0, 1.0, 0.0]]
    assert online_softmax(torch.zeros(3, 0), 2).shape == (3, 0)


def test_gradient_of_online_softmax_equals_finite_differences():
    scores = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: online_softmax(x, 3), scores)


# ---- results and gradients


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
def test_attention_of_any_shape_and_tile_size_equals_float64_reference(shape, options, blocks):
    case = inputs(dtype=torch.float64, **shape)
    expected = [exact(*case, **options)]
    pytorch_options = {"enable_gqa": True, "attn_mask": None, "dropout_p": 0.0}
    if "causal" not in options:
        with sdpa_kernel(SDPBackend.MATH):
            pytorch = partial(F.scaled_dot_product_attention, **pytorch_options)
            expected.append(run(pytorch, *case, **options))
    for found in (
        run(flash_attention, *case, **options, **pytorch_options, **blocks),
        run(standard_attention, *case, **options, **pytorch_options),
    ):
        for each in expected:
            assert_close(found, each, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("dtype", "causal"), [(torch.float32, True), (torch.bfloat16, True), (torch.float16, False)]
)
def test_flash_attention_error_is_within_factor_of_standard_attention_error(dtype, causal):
    case = inputs(300, 340, batch=1, heads=4, kv_heads=2, d=32, d_v=24, dtype=dtype)
    expected = exact(*case, causal=causal)
    standard = run(standard_attention, *case, causal=causal)
    found = run(flash_attention, *case, causal=causal, block_q=64, block_k=8)
    assert {x.dtype for x in found} == {dtype}
    for factor, x, y, z in zip((2, 3, 3, 3), found, standard, expected, strict=True):
        assert relative_error(x, z) <= factor * relative_error(y, z)


def test_causal_attention_equals_pytorch_with_bottom_right_causal_bias():
    q, k, v, _ = inputs(20, 50, grad=False)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(20, 50))
    assert_close(flash_attention(q, k, v, causal=True, block_q=8, block_k=16), expected)
    assert_close(standard_attention(q, k, v, causal=numpy.True_), expected)


# ---- shapes and strides


@pytest.mark.parametrize("attention", [flash_attention, standard_attention])
@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((9, 8), (13, 8), (13, 5)),
        ((3, 9, 8), (3, 13, 8), (3, 13, 5)),
        ((2, 3, 4, 9, 8), (2, 3, 2, 9, 8), (2, 3, 2, 9, 8)),
        ((2, 3, 1, 2, 9, 8), (2, 3, 1, 2, 13, 8), (2, 3, 1, 2, 13, 5)),
        ((2, 0, 3, 9, 8), (2, 0, 3, 13, 8), (2, 0, 3, 13, 5)),
        ((0, 3, 4, 8), (0, 3, 5, 8), (0, 3, 5, 8)),
        pytest.param((2, 0, 4, 8), (2, 0, 5, 8), (2, 0, 5, 8), marks=no_heads),
        ((2, 0, 4, 8), (2, 3, 5, 8), (2, 3, 5, 8)),
        ((2, 3, 0, 8), (2, 3, 5, 8), (2, 3, 5, 8)),
        ((2, 4, 4, 8), (2, 2, 0, 8), (2, 2, 0, 8)),
        ((2, 3, 4, 0), (2, 3, 5, 0), (2, 3, 5, 8)),
        ((2, 3, 4, 8), (2, 3, 5, 8), (2, 3, 5, 0)),
    ],
)
def test_attention_with_any_dimensions_or_empty_tensors_equals_pytorch(q, k, v, attention):
    def make(*shape):
        # not contiguous: the leading dimensions come from a permuted tensor
        x = torch.randn(*shape[-3::-1], *shape[-2:], dtype=torch.float64)
        return x.permute(*range(len(shape) - 2)[::-1], -2, -1)

    case = [make(*shape) for shape in (q, k, v, (*q[:-1], v[-1]))]
    for is_causal in (False, True):
        options = {"is_causal": is_causal, "enable_gqa": len(q) > 3}
        with sdpa_kernel(SDPBackend.MATH):
            expected = run(F.scaled_dot_product_attention, *case, **options)
        assert_close(run(attention, *case, **options), expected, rtol=1e-9, atol=1e-10)
    with symbolic():
        found = run(attention, *(torch.empty(x.shape) for x in case), is_causal=True)
    assert [x.shape for x in found] == [x.shape for x in expected]


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_attention_scores_beyond_dtype_range_do_not_overflow(dtype):
    q, k, v, grad_o = inputs(20, d=64, dtype=dtype, size=200.0)
    assert (q.double() @ k.double().mT).abs().max() > 65504 * 8
    found = run(flash_attention, q, k, v, grad_o, causal=True, block_q=8, block_k=8)
    assert all(x.isfinite().all() for x in found)
    assert_close(found[0], exact(q, k, v, grad_o, causal=True)[0].to(dtype), rtol=0.02, atol=0.02)


def test_flash_attention_result_does_not_depend_on_heads_per_tile(monkeypatch):
    case = inputs(30, 40, batch=3, heads=6, kv_heads=2)
    expected = run(flash_attention, *case, causal=True)
    monkeypatch.setattr(tiled, "MIN_HEADS_AT_ONCE", 1)
    # tiles with one head of keys, two, and four and then two
    for elements in (1, 2 * 3 * 30 * 40, 4 * 3 * 30 * 40):
        monkeypatch.setitem(tiled.TILE_ELEMENTS, "cpu", elements)
        assert_close(run(flash_attention, *case, causal=True), expected)


# ---- autocast, functional transforms, second derivatives


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("attention", [flash_attention, standard_attention])
def test_flash_attention_under_autocast_casts_inputs_like_pytorch_attention(attention, dtype):
    *case, grad_o = inputs(40, d=16)
    with torch.autocast("cpu", dtype):  # includes the backward pass
        found, pytorch = (
            run(each, *case, grad_o.to(dtype))
            for each in (attention, F.scaled_dot_product_attention)
        )
    cast = run(attention, *(x.to(dtype) for x in (*case, grad_o)))
    assert [x.dtype for x in found] == [x.dtype for x in pytorch] == [dtype] + [torch.float32] * 3
    assert_close(found, cast, rtol=0, atol=0, check_dtype=False)
    for x, y in zip(found, exact(*case, grad_o), strict=True):
        assert relative_error(x, y) < 4 * torch.finfo(dtype).eps


def test_autocast_casts_mixed_attention_inputs_but_not_float64():
    q, k, v, _ = inputs(20, grad=False)
    with torch.autocast("cpu", torch.bfloat16):
        assert flash_attention(q, k.bfloat16(), v.half()).dtype == torch.bfloat16
        assert flash_attention(q.double(), k.double(), v.double()).dtype == torch.float64


def test_vmap_of_flash_attention_is_rejected():
    q, k, v, _ = inputs(grad=False)
    for call in (
        lambda: torch.vmap(flash_attention)(q[None], k[None], v[None]),
        lambda: torch.func.jacrev(flash_attention)(q, k, v),
    ):
        with pytest.raises(RuntimeError, match=r"cannot be combined with torch\.vmap"):
            call()


def test_torch_func_grad_of_flash_attention_equals_autograd():
    q, k, v, grad_o = inputs(20)
    found = torch.func.grad(lambda *x: (flash_attention(*x) * grad_o).sum(), argnums=(0, 1, 2))(
        q, k, v
    )
    assert_close(found, run(flash_attention, q, k, v, grad_o)[1:])


def test_second_derivative_of_flash_attention_is_rejected():
    q, k, v, _ = inputs()
    [dq] = torch.autograd.grad(flash_attention(q, k, v).square().sum(), q, create_graph=True)

    def gradient_sum(q):
        return torch.func.grad(lambda q: flash_attention(q, k, v).square().sum())(q).sum()

    for call in (dq.sum().backward, lambda: torch.func.grad(gradient_sum)(q)):
        with pytest.raises(RuntimeError, match="twice; use standard_attention"):
            call()
    few = inputs(3, d=2, dtype=torch.float64)[:3]
    assert torch.autograd.gradgradcheck(standard_attention, few, fast_mode=True)


# ---- saved and live bytes


@pytest.mark.parametrize(
    ("kv_heads", "dtype", "n", "causal"),
    [(4, torch.float32, 33, False), (2, torch.bfloat16, 65, True)],
)
@pytest.mark.parametrize(
    ("kind", "attention"), [("standard", standard_attention), ("flash", flash_attention)]
)
def test_bytes_that_attention_saves_for_backward_equal_the_formula(
    kind, attention, n, dtype, kv_heads, causal
):
    q, k, v, _ = inputs(n, kv_heads=kv_heads, dtype=dtype, d=16)
    sizes = {"sequence": n, "batch": 2, "heads": 4, "kv_heads": kv_heads, "head_dim": 16}
    predicted = attention_saved_bytes(**sizes, dtype_bytes=dtype.itemsize, kind=kind).values()
    saved = saved_tensors(partial(attention, causal=causal), q, k, v)
    assert saved.total_bytes == sum(predicted)
    assert sorted(row.bytes for row in saved if row.shared_with is None) == sorted(predicted)


def test_flash_attention_saves_inputs_without_copies():
    x = torch.randn(2, 50, 3, 4, 8, requires_grad=True)
    q, k, v = x.permute(2, 0, 3, 1, 4)  # three views of one tensor
    grouped = torch.randn(2, 1, 50, 8, requires_grad=True).expand(2, 4, 50, 8)
    o_and_lse = q.nbytes + 2 * 4 * 50 * 4
    with_grouped = x.nbytes + grouped.untyped_storage().nbytes() + o_and_lse
    assert saved_tensors(flash_attention, q, k, v).total_bytes == x.nbytes + o_and_lse
    assert saved_tensors(flash_attention, q, grouped, grouped).total_bytes == with_grouped
    one_sample = saved_tensors(flash_attention, q[0], k[0], v[0]).total_bytes
    assert one_sample == x.nbytes + o_and_lse / 2


@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention_never_allocates_full_score_matrix(tiles, causal):
    n, d, block = 1024, 16, 128
    case = inputs(n, batch=1, heads=2, d=d)
    with MemoryMeter() as meter:
        run(flash_attention, *case, causal=causal, block_q=block, block_k=block)
    assert tiles.largest == 2 * block * block
    outputs = 4 * case[0].nbytes + 2 * n * 4  # o, dq, dk, dv and the log-sum-exp
    peak = outputs + 3 * 2 * block * block * 4 + 3 * case[0].nbytes
    assert meter.peak_bytes <= peak < 2 * n * n * 4 / 4


@pytest.mark.parametrize(
    ("batch", "heads", "n", "kv_heads", "at_once"),
    [(1, 1, 1000, 1, 1), (8, 8, 64, 8, 1), (1, 8, 512, 1, 1), (2, 8, 600, 2, 2)],
)
def test_attention_tile_size_does_not_grow_with_heads_or_batch(
    tiles, batch, heads, n, kv_heads, at_once
):
    case = inputs(n, batch=batch, heads=heads, kv_heads=kv_heads, d=1)
    metered(partial(run, flash_attention, *case))  # in a single thread
    assert tiles.largest == at_once * 512**2


SYMBOLIC_CASES = [  # batch, heads, kv_heads, n_q, n_k, d, d_v, mask, blocks, dtype
    (2, 4, 2, 64, 64, 8, 8, "causal", (16, 16), torch.bfloat16),
    (1, 2, 2, 90, 70, 32, 32, "causal", (32, 32), torch.bfloat16),
    (1, 2, 2, 600, 1300, 16, 24, "causal", (None, None), torch.bfloat16),
    (1, 6, 2, 30, 70, 8, 8, None, (48, 64), torch.float32),
    (1, 3, 3, 70, 40, 8, 12, "is_causal", (32, 16), torch.bfloat16),
]


@pytest.mark.parametrize("sizes", SYMBOLIC_CASES, ids=str)
def test_symbolic_flash_attention_has_bytes_and_flops_of_tiled_computation(sizes):
    batch, heads, kv_heads, n_q, n_k, d, d_v, mask, (block_q, block_k), dtype = sizes
    options = {"block_q": block_q, "block_k": block_k, **({mask: True} if mask else {})}

    def make(count, n, d):
        if dtype == torch.float32:  # as in a model
            together = torch.empty(batch, n, 3, count, d)
            return together.permute(2, 0, 3, 1, 4)[0].requires_grad_()
        return torch.empty(batch, count, n, d, dtype=dtype, requires_grad=True)

    def measured(backend, backwards):
        with symbolic():
            q, k, v = make(heads, n_q, d), make(kv_heads, n_k, d), make(kv_heads, n_k, d_v)
            with MemoryMeter() as meter, FlopCounterMode(display=False) as counter:
                o = flash_attention(q, k, v, backend=backend, **options)
                if backwards:
                    o.transpose(1, 2).reshape(batch, n_q, heads * d_v).sum().backward()
        found = meter.peak_bytes, meter.live_bytes, counter.get_total_flops()
        return found, len(meter.timeline)

    for backwards in (False, True):
        (outline, short), (tiles, long) = (measured(name, backwards) for name in ("auto", "torch"))
        assert outline == tiles and short <= long + 25


# ---- threads


@pytest.fixture
def two_threads(monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(threads, "MIN_SCORES_FOR_THREADS", 0)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "causal"), [(2, 2, False), (6, 3, True), (3, 3, True)]
)
def test_attention_with_heads_in_parallel_threads_equals_reference(
    two_threads, tiles, heads, kv_heads, causal
):
    case = inputs(70, 90, heads=heads, kv_heads=kv_heads, dtype=torch.float64)
    found = run(flash_attention, *case, causal=causal, block_q=16, block_k=32)
    assert tiles.threads == {"attention"} and torch.get_num_threads() == 2
    assert_close(found, exact(*case, causal=causal))


def test_attention_under_meter_or_profiler_runs_in_main_thread(two_threads, tiles):
    case = inputs(40, batch=1, heads=6)
    run(flash_attention, *case)
    in_threads = 2 * tiles.largest
    tiles.threads.clear()
    for mode in (MemoryMeter(), FlopCounterMode(display=False), torch.profiler.profile()):
        with mode:
            run(flash_attention, *case)
    assert tiles.threads == {"MainThread"} and in_threads == tiles.largest == 6 * 40 * 40


def test_attention_runs_in_threads_under_inference_mode_and_no_grad(two_threads, tiles):
    q, k, v, _ = inputs(40)
    expected = reference(q, k, v)
    for mode in (torch.inference_mode(), torch.no_grad(), torch.enable_grad()):
        with mode:
            assert_close(flash_attention(q.clone(), k, v), expected)
    assert tiles.threads == {"attention"}


def test_error_in_attention_thread_is_raised_in_caller(two_threads, monkeypatch):
    monkeypatch.setattr(tiled, "forward_tiles", Mock(side_effect=MemoryError("full")))
    with pytest.raises(MemoryError, match="full"):
        flash_attention(*inputs(40)[:3])


@pytest.fixture(scope="module")
def new_process():
    """Run attention without Triton in a new process, in a fork of it, and with backend "triton"."""
    program = """if True:
        import os, sys, torch
        sys.modules["triton"] = None
        from course_lib.attention import flash_attention
        torch.set_num_threads(2)
        x = torch.randn(1, 4, 512, 8)
        expected = flash_attention(x, x, x)
        child = os.fork() if hasattr(os, "fork") else None
        if child == 0:
            os._exit(0 if torch.allclose(flash_attention(x, x, x), expected) else 1)
        if child:
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        flash_attention(x, x, x, backend="triton")
    """
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_forked_process_starts_its_own_attention_threads(new_process):
    assert new_process.stdout == "0\n"


# ---- costs


def counted_flops(attention, q, k, v, grad_o, **options):
    with FlopCounterMode(display=False) as forward:
        o = attention(q, k, v, **options)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(o, (q, k, v), grad_o)
    return [forward.get_total_flops(), backward.get_total_flops()]


@pytest.mark.parametrize("n", [50, 128])
@pytest.mark.parametrize(
    ("kind", "attention", "products"),
    [("standard", standard_attention, 8), ("flash", flash_attention, 10)],
)
def test_attention_cost_formula_equals_pytorch_flop_counter(kind, attention, products, n):
    size = {"sequence": n, "head_dim": 16, "kind": kind}
    predicted = [attention_cost(**size, pass_=p).flops for p in ("forward", "backward")]
    assert counted_flops(attention, *inputs(n, batch=1, heads=1, d=16)) == predicted
    assert predicted == [4 * n * n * 16, products * n * n * 16]
    one, many = attention_cost(**size), attention_cost(**size, batch=3, heads=5)
    assert (many.flops, many.moved_bytes) == (15 * one.flops, 15 * one.moved_bytes)


def test_flash_backward_in_two_passes_counts_seven_matrix_products():
    cost = attention_cost(sequence=64, head_dim=16, kind="flash", pass_="backward", tile_passes=2)
    assert cost.flops == 7 * 2 * 64**2 * 16


@pytest.mark.parametrize(("n_q", "n_k"), [(96, 96), (64, 96), (96, 64)])
def test_causal_flash_attention_skips_tiles_above_diagonal(n_q, n_k):
    case = inputs(n_q, n_k, batch=1, heads=1)
    found = counted_flops(flash_attention, *case, causal=True, block_q=16, block_k=16)
    visible = torch.ones(n_q, n_k).tril(n_k - n_q)
    tiles = visible.view(n_q // 16, 16, n_k // 16, 16).amax((1, 3)).sum().item()
    assert found == [4 * 16 * 16 * 8 * tiles, 10 * 16 * 16 * 8 * tiles]


@pytest.mark.parametrize("dtype_bytes", [2, 4])
@pytest.mark.parametrize(
    ("pass_", "operators"),
    [("forward", "q k s, s p, p v o"), ("backward", "p o v, o v s, p s s, s k q, s q k")],
)
def test_standard_attention_cost_counts_bytes_moved_per_operator(pass_, operators, dtype_bytes):
    n, d = 100, 16
    # a tensor and its gradient have the same number of elements
    sizes = {"q": n * d, "k": n * d, "v": n * d, "o": n * d, "s": n * n, "p": n * n}
    moved = sum(sizes.get(name, 0) for name in operators)
    size = {"sequence": n, "head_dim": d, "kind": "standard"}
    cost = attention_cost(**size, pass_=pass_, dtype_bytes=dtype_bytes)
    assert cost.moved_bytes == dtype_bytes * moved
    assert cost.arithmetic_intensity == cost.flops / cost.moved_bytes


@pytest.mark.parametrize(
    ("pass_", "kept", "streamed", "numbers"), [("forward", 2, 2, 0), ("backward", 2 + 4, 4, 2)]
)
@pytest.mark.parametrize(
    ("n", "d", "sram_bytes"),
    # the last one is the smallest that holds one row of each block
    [(1000, 64, 192 * 1024), (512, 128, 100_000), (5, 64, 192 * 1024), (64, 64, 1024)],
)
def test_flash_attention_cost_counts_bytes_moved_per_block(
    n, d, sram_bytes, pass_, kept, streamed, numbers
):
    """Move `kept` tensors once, and `streamed` tensors and `numbers` per row for each block."""
    size = {"sequence": n, "head_dim": d, "kind": "flash"}
    cost = attention_cost(**size, pass_=pass_, sram_bytes=sram_bytes)
    blocks = len(range(0, n, sram_bytes // 2 // ((4 if pass_ == "forward" else 8) * d)))
    elements = (kept + streamed * blocks) * n * d
    assert cost.moved_bytes == 2 * elements + 4 * (numbers * blocks + 1) * n


# ---- backends


@pytest.fixture
def triton(monkeypatch):
    """Replace the Triton backend by a mock of the torch backend."""
    module = Mock(wraps=tiled, unsupported_reason=Mock(return_value=None))
    monkeypatch.setitem(sys.modules, "course_lib.attention.launch", module)
    monkeypatch.setattr(course_lib.attention, "launch", module, raising=False)
    return module


def test_auto_backend_selects_triton_for_supported_cuda_tensors(triton):
    def backend(name, is_cuda):
        x = types.SimpleNamespace(is_cuda=is_cuda, shape=(1, 1, 1, 1))
        return flash._backend_module(name, x, x, x)

    names = ("auto", "triton", "torch")
    assert [backend(name, True) for name in names] == [triton, triton, tiled]
    assert [backend(name, False) for name in names] == [tiled, triton, tiled]
    triton.unsupported_reason.return_value = "the head dimension is 7"
    assert backend("auto", True) is tiled
    with pytest.raises(RuntimeError, match=r"'torch' or 'auto' .* the head dimension is 7$"):
        backend("triton", True)


def test_triton_backend_runs_forward_and_backward_and_equals_torch(triton):
    case = inputs(20)
    by_triton, by_torch = (
        run(flash_attention, *case, backend=name) for name in ("triton", "torch")
    )
    assert_close(by_triton, by_torch)
    assert triton.forward.call_count == triton.backward.call_count == 1


def test_selecting_triton_backend_without_triton_raises(new_process):
    errors = new_process.stderr
    assert "RuntimeError: backend must be" in errors and "Triton is not installed" in errors


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_torch_backend_on_gpu_equals_float64_reference(dtype):
    case = inputs(700, 900, kv_heads=2, d=64, dtype=dtype)
    found = run(flash_attention, *(x.detach().cuda() for x in case), causal=True, backend="torch")
    allowed = (16 if dtype == torch.float32 else 4) * torch.finfo(dtype).eps
    for x, y in zip(found, exact(*case, causal=True), strict=True):
        assert relative_error(x.cpu(), y) < allowed


@pytest.mark.gpu
def test_standard_attention_on_gpu_saves_tensors_in_autocast_dtype():
    q, k, v = (x.detach().cuda().bfloat16().requires_grad_() for x in inputs(64, d=16)[:3])
    with torch.autocast("cuda", torch.bfloat16):
        assert {row.dtype for row in saved_tensors(standard_attention, q, k, v)} == {torch.bfloat16}
