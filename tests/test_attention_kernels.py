"""The Triton kernels against float64. Without a GPU Triton's interpreter runs them, in one process
for all cases: this file, started as a program, prints what it found as JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from patience import HANGS_SECONDS

from course_lib.attention import kernels, launch
from course_lib.attention.tiled import Options

pytestmark = pytest.mark.skipif(kernels.triton is None, reason="Triton is not installed here")


def older_triton() -> bool:
    """Before Triton 3.7. Up to 3.6 the interpreter turns arrays of one number into indices, which
    today's NumPy refuses."""
    version = getattr(kernels.triton, "__version__", "0.0").split(".")
    return (int(version[0]), int(version[1])) < (3, 7)


H100 = 232_448  # bytes of shared memory that an instance can have
NAMES = ("o", "lse", "dq", "dk", "dv")

# batch, heads, kv_heads, n_q, n_k, d, and what else is not as usual: fp32, full attention, blocks
# of 16 x 16
CASES = {
    "top-left causal": dict(shape=(1, 2, 1, 70, 33, 16), top_left=True, blocks=(16, 32)),
    "causal": dict(shape=(1, 2, 2, 37, 37, 24), causal=True),
    "fewer queries than keys, causal": dict(shape=(1, 1, 1, 17, 53, 16), causal=True),
    "one query, one key": dict(shape=(1, 1, 1, 1, 1, 16), causal=True),
    "grouped-query": dict(shape=(2, 4, 2, 33, 20, 16)),
    "wide queries": dict(shape=(1, 1, 1, 70, 50, 16), causal=True, blocks=(64, 16)),
    "blocks not given": dict(shape=(1, 1, 1, 40, 50, 16), causal=True, blocks=(None, None)),
    "head dim 200": dict(shape=(1, 1, 1, 17, 20, 200), causal=True),
    "any strides": dict(shape=(2, 2, 2, 20, 20, 24), causal=True, strides="any"),
    "large scores": dict(shape=(1, 1, 1, 33, 33, 16), scale=100.0),
    "negative scale, causal": dict(shape=(1, 2, 1, 70, 33, 24), scale=-0.5, causal=True),
    "scale zero": dict(shape=(1, 1, 1, 40, 33, 16), scale=0.0, causal=True),
    "scores all far below zero": dict(shape=(1, 1, 1, 20, 37, 16), shift=12.0, causal=True),
    "fp16": dict(shape=(1, 2, 1, 37, 53, 24), causal=True, dtype="float16"),
    "bf16, fully masked rows": dict(shape=(1, 1, 1, 50, 20, 64), causal=True, dtype="bfloat16"),
}


def inputs(shape, dtype="float32", strides="contiguous", shift=0.0, device="cpu", **_):
    """q, k, v and the gradient of o."""
    batch, heads, kv_heads, n_q, n_k, d = shape
    generator = torch.Generator(device).manual_seed(sum(shape))

    def normal(*size):
        return torch.randn(*size, generator=generator, device=device).to(getattr(torch, dtype))

    if strides == "any":
        q = normal(batch, n_q, heads, d).transpose(1, 2)
        k = normal(batch, kv_heads, d, 2 * n_k).mT[:, :, ::2]
        v = normal(1, 1, n_k, d).expand(batch, kv_heads, n_k, d)
        return q, k, v, normal(d).expand(batch, heads, n_q, d)
    q, grad_o = normal(batch, heads, n_q, d) + shift, normal(batch, heads, n_q, d)
    return q, normal(batch, kv_heads, n_k, d) - shift, normal(batch, kv_heads, n_k, d), grad_o


def shift_of(case):
    """Row i sees the columns up to i + shift; all of them if None."""
    if case.get("top_left"):
        return 0
    return case["shape"][4] - case["shape"][3] if case.get("causal") else None


def standard(q, k, v, grad_o, shift, scale):
    """o, lse, dq, dk, dv, from the whole matrix of scores, in the dtype of the inputs."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    n_q, n_k, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * scale
    if shift is not None:
        seen = torch.ones(n_q, n_k, dtype=torch.bool, device=q.device).tril(shift)
        scores = scores.masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    o = weights @ v.repeat_interleave(group, 1)
    return o.detach(), lse.detach(), *torch.autograd.grad(o, (q, k, v), grad_o)


def run_case(case, device="cpu"):
    q, k, v, grad_o = inputs(device=device, **case)
    shift, scale = shift_of(case), case.get("scale", q.shape[-1] ** -0.5)
    options = Options(shift, scale, *case.get("blocks", (16, 16)))
    o, lse = launch.forward(q, k, v, options)
    got = (o, lse, *launch.backward(q, k, v, o, lse, grad_o, options))
    want = standard(q.double(), k.double(), v.double(), grad_o.double(), shift, scale)
    return (q, k, v, grad_o), got, want


def error(got, want):
    """The largest difference, as a part of the largest entry wanted; infinite where exactly one of
    both is."""
    got = got.double()
    if got.isnan().any() or not torch.equal(got == -torch.inf, want == -torch.inf):
        return float("inf")
    finite = want != -torch.inf
    difference = (got - want)[finite].abs().max()
    return (difference / want[finite].abs().max().clamp(min=1.0)).item()


# ---- what the program does


def report_case(case):
    (q, k, v, _), got, want = run_case(case)
    blind = want[1] == -torch.inf
    wanted = [(x.shape, x.dtype) for x in (q, q[..., 0].float(), q, k, v)]
    return {
        "errors": {name: error(a, b) for name, a, b in zip(NAMES, got, want, strict=True)},
        "as wanted": [(x.shape, x.dtype) for x in got] == wanted,
        "contiguous": all(x.is_contiguous() for x in got),
        "blind rows": int(blind.sum()),
        "blind are zero": not got[0][blind].any() and not got[2][blind].any(),
    }


def report_skipping():
    """NaNs in v and grad_o where no visible tile reaches: 0 * NaN is NaN, so a tile that is visited
    shows."""
    shape, options = (1, 1, 1, 64, 64, 16), Options(0, 0.25, 16, 16)
    q, k, v, grad_o = inputs(shape)
    v[:, :, 48:] = torch.nan
    o, lse = launch.forward(q, k, v, options)
    dq, _, _ = launch.backward(q, k, v, o, lse, grad_o, options)
    grad_o[:, :, :16] = torch.nan
    _, dk, dv = launch.backward(q, k, inputs(shape)[2], o, lse, grad_o, options)
    seen = [bool(x[:, :, :48].isfinite().all() and x[:, :, 48:].isnan().all()) for x in (o, dq)]
    early = [bool(x[:, :, :16].isnan().all()) for x in (dk, dv)]
    return [*seen, *early, bool(dv[:, :, 16:48].isfinite().all())]


def report_reasons():
    x = torch.zeros(1, 1, 4, 16)
    cases = {str(d): torch.zeros(1, 1, 4, d) for d in (8, 15, 16, 200, 256, 257)}
    cases |= {name: x.to(getattr(torch, name)) for name in ("float16", "bfloat16", "float64")}
    reasons = {name: launch.why_not(x, x) for name, x in (cases | {"meta": x.to("meta")}).items()}
    return reasons | {"24": launch.why_not(x, torch.zeros(1, 1, 4, 24))}


def compile_for_an_absent_gpu():
    from absent_gpu import compile_only

    compiled = compile_only(90, H100)
    for tuned in launch.TUNED.values():
        tuned._do_bench = lambda call, quantiles: call() or [1.0, 1.0, 1.0]

    def both(case, block, shift=0):
        q, k, v, grad_o = inputs(**case)
        options = Options(shift, 0.125, block, block)
        o, lse = launch.forward(q, k, v, options)
        launch.backward(q, k, v, o, lse, grad_o, options)
        found = compiled.copy()
        compiled.clear()
        return found

    given = both(dict(shape=(1, 4, 2, 100, 200, 64), dtype="bfloat16"), 64, None)
    odd = both(dict(shape=(1, 1, 1, 1, 1, 24), dtype="float32", strides="any"), 16)
    for sizes in launch.CANDIDATES.values():
        sizes.update({d: tried[:1] for d, tried in sizes.items()})
    first, choices = [], []
    for n, d in ((1000, 64), (1000, 128), (600, 128), (500, 128)):  # causal: masks take registers
        first += both(dict(shape=(1, 2, 2, n, n, d), dtype="bfloat16"), None)
        choices.append([len(tuned.cache) for tuned in launch.TUNED.values()])
    return {"given": given, "odd": odd, "first": first, "choices": choices[1:]}


if __name__ == "__main__":
    if kernels.INTERPRETED:
        report = {name: report_case(case) for name, case in CASES.items()}
        reports = {"skipping": report_skipping(), "reasons": report_reasons()}
        print(json.dumps({"cases": report, **reports}))
    else:
        print(json.dumps(compile_for_an_absent_gpu()))


# ---- in the interpreter


def start(**environment):
    result = subprocess.run(
        [sys.executable, __file__],
        env={**{k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}, **environment},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=HANGS_SECONDS,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def interpreted():
    if older_triton():
        pytest.skip("Triton's interpreter needs Triton 3.7 or later here")
    return start(TRITON_INTERPRET="1")


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_agree_with_float64_and_rows_that_see_no_key_give_zeros(interpreted, name):
    report, case = interpreted["cases"][name], CASES[name]
    assert report["as wanted"] and report["contiguous"] and report["blind are zero"]
    batch, heads, _, n_q, n_k, _ = case["shape"]
    assert report["blind rows"] == batch * heads * max(0, n_q - n_k) * case.get("causal", False)
    # The interpreter cuts numbers off where a GPU rounds them to bf16.
    allowed = {"float16": 1e-3, "bfloat16": 1.5e-2}.get(case.get("dtype"), 2e-6)
    if name in ("large scores", "scores all far below zero"):
        # neighbours among fp32 numbers in the thousands lie 1.2e-4 apart; the exponential sees that
        allowed = 2e-4
    errors = report["errors"]
    assert errors.pop("lse") <= 2e-6 and max(errors.values()) <= allowed, report


def test_tiles_above_the_diagonal_are_not_visited(interpreted):
    assert interpreted["skipping"] == [True] * 5


def test_head_dims_and_dtypes_that_the_kernels_lack_are_named(interpreted):
    refused = {name: reason for name, reason in interpreted["reasons"].items() if reason}
    assert list(refused) == ["8", "15", "257", "float64", "meta", "24"]
    assert all(name in reason for name, reason in refused.items())


# ---- for GPUs


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return start(TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton")))


def test_the_kernels_compile_for_a_gpu_that_is_not_here_and_a_like_length_is_not_tuned_again(
    compiled,
):
    assert [row["tensor cores"] for row in compiled["given"]].count(True) == 3
    assert len(compiled["odd"]) == 4
    assert compiled["choices"] == [[2] * 3, [2] * 3, [3] * 3]  # after 1000, after 600, after 500


def test_the_configurations_tried_first_keep_all_in_registers_and_fit_an_h100(compiled):
    if older_triton():
        pytest.skip("Triton 3.5 puts 8 bytes a thread of one kernel on the stack")
    first = [row for row in compiled["first"] if row["kernel"] != "rows_kernel"]
    assert len(first) >= 2 * 3
    assert all(row["stack"] == 0 and row["tensor cores"] and row["shared"] <= H100 for row in first)


def test_small_configurations_are_tried_only_where_no_larger_one_is_sure_to_fit():
    for kernel, by_d in launch.CANDIDATES.items():
        for d, larger in by_d.items():
            assert launch._settings_to_try(kernel, d, 2, H100) == larger and len(larger) <= 4
            assert launch._settings_to_try(kernel, d, 2, 1024) == [(16, 16, 4, 1)]
    forward = launch.forward_kernel
    assert launch._settings_to_try(forward, 64, 2, 101_376) == launch.CANDIDATES[forward][64]
    # the first may need too much
    assert launch._settings_to_try(forward, 256, 2, 101_376) == [(64, 64, 8, 2), (32, 32, 4, 2)]


@pytest.mark.parametrize("name", ["block_q", "block_k"])
@pytest.mark.parametrize("block", [8, 48, 256])
def test_a_block_that_the_kernels_do_not_take_is_refused(block, name):
    options = Options(None, 1.0)._replace(**{name: block})
    with pytest.raises(ValueError, match=rf"^{name} must be .*, got {block}$"):
        launch._launch(launch.forward_kernel, None, torch.zeros(1, 1, 4, 16), options)


def test_blocks_that_do_not_fit_are_refused_with_some_that_do():
    def launched(*arguments, BLOCK_Q, BLOCK_K, **options):
        raise launch.OutOfResources(2 * (BLOCK_Q + BLOCK_K) * 256, 101_376, "shared memory")

    full, options = MagicMock(), Options(None, 1.0, 128, 128)
    full.__getitem__.return_value = launched
    with pytest.raises(ValueError, match=r"64 and 64, .* 128 and 128, .* 131072 bytes .* 101376$"):
        launch._launch(full, None, torch.zeros(1, 1, 4, 128), options)


def test_a_tensor_whose_heads_reach_further_than_32_bits_count_is_copied():
    def rows(n, apart):
        return torch.empty_strided((1, 1, n, 64), (2**40, 2**40, apart, 1), device="meta")

    far, near = rows(2**16 + 1, 2**15), rows(2**16, 2**15)
    assert launch._with_32_bit_offsets(near) is near
    assert launch._with_32_bit_offsets(far).is_contiguous()


GPU_CASES = [
    dict(blocks=(None, None)) | case
    for case in (
        *(
            dict(shape=(2, 4, 4, 1024, 1024, d), causal=causal, dtype=dtype)
            for d in (64, 128)
            for causal in (False, True)
            for dtype in ("bfloat16", "float16")
        ),
        dict(shape=(1, 8, 2, 777, 1000, 64), causal=True, dtype="bfloat16", blocks=(64, 64)),
        dict(shape=(1, 4, 1, 1000, 333, 128), causal=True, dtype="bfloat16", blocks=(128, 64)),
        dict(shape=(1, 2, 2, 300, 300, 256), causal=True, dtype="bfloat16"),
        dict(shape=(1, 2, 2, 300, 300, 96), causal=False, dtype="float16"),
        dict(shape=(2, 4, 4, 300, 300, 64), causal=True, dtype="bfloat16", strides="any"),
        dict(shape=(1, 2, 2, 300, 300, 64), causal=True, dtype="bfloat16", scale=-0.2),
        dict(shape=(1, 2, 1, 500, 300, 64), causal=True, dtype="float32"),
        dict(shape=(1, 2, 1, 300, 300, 128), causal=False, dtype="float32", blocks=(16, 16)),
        dict(shape=(1, 1, 1, 1, 1, 16), causal=True, dtype="float32", blocks=(32, 32)),
    )
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_on_a_gpu_errors_stay_near_the_standard_ones_and_rows_without_keys_give_zeros(case):
    given, got, want = run_case(case, device="cuda")
    same_precision = standard(*given, shift_of(case), case.get("scale", given[0].shape[-1] ** -0.5))
    allowed = {"o": 2.0, "lse": 2.0, "dq": 3.0, "dk": 3.0, "dv": 3.0}
    for name, mine, theirs, exact in zip(NAMES, got, same_precision, want, strict=True):
        assert error(mine, exact) <= allowed[name] * error(theirs, exact) + 1e-6, name
    blind = want[1] == -torch.inf
    assert not got[0][blind].any() and not got[2][blind].any()


@pytest.mark.gpu
def test_on_a_gpu_two_runs_give_the_same_bits():
    case = dict(shape=(1, 8, 2, 1000, 1000, 64), causal=True, dtype="bfloat16", blocks=(64, 64))
    (_, first, _), (_, second, _) = run_case(case, "cuda"), run_case(case, "cuda")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_kernels_run_on_the_tensors_gpu_not_the_current_one():
    _, got, want = run_case(CASES["causal"], "cuda:1")
    assert all(error(a, b) < 1e-5 for a, b in zip(got, want, strict=True))
