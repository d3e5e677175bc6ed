"""The Triton kernels of attention against float64, in Triton's interpreter or on a GPU.

The interpreter runs in one process for all cases: this file, started as a program, prints its
results as JSON.
"""

import json
import os
import subprocess
import sys
from unittest.mock import MagicMock

import pytest
import torch
from timeouts import TIMEOUT_SECONDS

from course_lib.attention import kernels, launch
from course_lib.attention.tiled import Options

pytestmark = pytest.mark.skipif(kernels.triton is None, reason="Triton is not installed")


def older_triton() -> bool:
    """Return whether Triton is older than 3.7, whose interpreter fails with current NumPy."""
    version = getattr(kernels.triton, "__version__", "0.0").split(".")
    return (int(version[0]), int(version[1])) < (3, 7)


H100 = 232_448  # bytes of shared memory per instance
NAMES = ("o", "lse", "dq", "dk", "dv")

# Shape is (batch, heads, kv_heads, n_q, n_k, d). Defaults: fp32, no mask, blocks of 16 x 16.
CASES = {
    "top-left causal": dict(shape=(1, 2, 1, 40, 33, 16), top_left=True, blocks=(16, 32)),
    "fewer queries than keys, causal": dict(shape=(1, 1, 1, 17, 53, 16), causal=True),
    "one query, one key": dict(shape=(1, 1, 1, 1, 1, 16), causal=True),
    "grouped-query": dict(shape=(1, 4, 2, 16, 20, 16)),
    "wide queries": dict(shape=(1, 1, 1, 70, 50, 16), causal=True, blocks=(64, 16)),
    "blocks not given": dict(shape=(1, 1, 1, 40, 50, 16), causal=True, blocks=(None, None)),
    "head dim 200": dict(shape=(1, 1, 1, 17, 20, 200), causal=True),
    "any strides": dict(shape=(2, 2, 2, 20, 20, 24), causal=True, strides="any"),
    "large scores": dict(shape=(1, 1, 1, 33, 33, 16), scale=100.0),
    "negative scale, causal": dict(shape=(1, 1, 1, 24, 20, 24), scale=-0.5, causal=True),
    "scale zero": dict(shape=(1, 1, 1, 24, 20, 16), scale=0.0, causal=True),
    "scores all far below zero": dict(shape=(1, 1, 1, 20, 24, 16), shift=12.0, causal=True),
    "fp16": dict(shape=(1, 1, 1, 20, 37, 24), causal=True, dtype="float16"),
    "bf16, fully masked rows": dict(shape=(1, 1, 1, 37, 20, 64), causal=True, dtype="bfloat16"),
}


def inputs(shape, dtype="float32", strides="contiguous", shift=0.0, device="cpu", **_):
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
    if case.get("top_left"):
        return 0
    return case["shape"][4] - case["shape"][3] if case.get("causal") else None


def standard(q, k, v, grad_o, shift, scale):
    """Return o, lse, dq, dk, dv from the full score matrix, in the dtype of the inputs."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    n_q, n_k, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * scale
    if shift is not None:
        visible = torch.ones(n_q, n_k, dtype=torch.bool, device=q.device).tril(shift)
        scores = scores.masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    o = weights @ v.repeat_interleave(group, 1)
    return o.detach(), lse.detach(), *torch.autograd.grad(o, (q, k, v), grad_o)


def run_case(case, device="cpu"):
    q, k, v, grad_o = inputs(device=device, **case)
    shift, scale = shift_of(case), case.get("scale", q.shape[-1] ** -0.5)
    options = Options(shift, scale, *case.get("blocks", (16, 16)))
    o, lse = launch.forward(q, k, v, options)
    found = (o, lse, *launch.backward(q, k, v, o, lse, grad_o, options))
    expected = standard(q.double(), k.double(), v.double(), grad_o.double(), shift, scale)
    return (q, k, v, grad_o), found, expected


def error(found, expected):
    """Return the largest difference, relative to the largest expected entry."""
    found = found.double()
    if found.isnan().any() or not torch.equal(found == -torch.inf, expected == -torch.inf):
        return float("inf")
    finite = expected != -torch.inf
    difference = (found - expected)[finite].abs().max()
    return (difference / expected[finite].abs().max().clamp(min=1.0)).item()


# ---- the program


def report_case(case):
    (q, k, v, _), found, expected = run_case(case)
    masked = expected[1] == -torch.inf
    outlines = [(x.shape, x.dtype) for x in (q, q[..., 0].float(), q, k, v)]
    return {
        "errors": {name: error(a, b) for name, a, b in zip(NAMES, found, expected, strict=True)},
        "outlines": [(x.shape, x.dtype) for x in found] == outlines,
        "contiguous": all(x.is_contiguous() for x in found),
        "masked rows": int(masked.sum()),
        "masked are zero": not found[0][masked].any() and not found[2][masked].any(),
    }


def report_skipping():
    """Put NaN into masked tiles of v and grad_o; it spreads if the kernels compute these tiles."""
    shape, options = (1, 1, 1, 64, 64, 16), Options(0, 0.25, 16, 16)
    q, k, v, grad_o = inputs(shape)
    v[:, :, 48:] = torch.nan
    o, lse = launch.forward(q, k, v, options)
    dq, _, _ = launch.backward(q, k, v, o, lse, grad_o, options)
    grad_o[:, :, :16] = torch.nan
    _, dk, dv = launch.backward(q, k, inputs(shape)[2], o, lse, grad_o, options)
    late = [bool(x[:, :, :48].isfinite().all() and x[:, :, 48:].isnan().all()) for x in (o, dq)]
    early = [bool(x[:, :, :16].isnan().all()) for x in (dk, dv)]
    return [*late, *early, bool(dv[:, :, 16:48].isfinite().all())]


def compile_without_gpu():
    from triton_without_gpu import compile_only

    compiled = compile_only(90, H100)
    for tuned in launch.TUNED.values():
        tuned._do_bench = lambda call, quantiles: call() or [1.0, 1.0, 1.0]

    def compile_kernels(case, block, shift=0):
        q, k, v, grad_o = inputs(**case)
        options = Options(shift, 0.125, block, block)
        o, lse = launch.forward(q, k, v, options)
        launch.backward(q, k, v, o, lse, grad_o, options)
        found = compiled.copy()
        compiled.clear()
        return found

    strided = compile_kernels(dict(shape=(1, 4, 2, 1, 1, 24), strides="any"), 16, None)
    for sizes in launch.CANDIDATES.values():
        sizes.update({d: settings[:1] for d, settings in sizes.items()})
    tuned, tunings = [], []
    for n in (1000, 600, 500):  # causal, because masks take registers
        tuned += compile_kernels(dict(shape=(1, 2, 2, n, n, 128), dtype="bfloat16"), None)
        tunings.append([len(each.cache) for each in launch.TUNED.values()])
    tuned += compile_kernels(dict(shape=(1, 2, 2, 1000, 1000, 64), dtype="bfloat16"), None)
    return {"strided": strided, "tuned": tuned, "tunings": tunings}


if __name__ == "__main__":
    if kernels.INTERPRETED:
        report = {name: report_case(case) for name, case in CASES.items()}
        print(json.dumps({"cases": report, "skipping": report_skipping()}))
    else:
        print(json.dumps(compile_without_gpu()))


# ---- in the interpreter


def start(environment):
    result = subprocess.run(
        [sys.executable, __file__],
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        | {"PYTHONPATH": os.pathsep.join(sys.path)}
        | environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def interpreted():
    if older_triton():
        pytest.skip("the interpreter needs Triton 3.7 or later")
    return start({"TRITON_INTERPRET": "1"})


@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_float64_reference_and_fully_masked_rows_are_zero(interpreted, name):
    report, case = interpreted["cases"][name], CASES[name]
    assert report["outlines"] and report["contiguous"] and report["masked are zero"]
    batch, heads, _, n_q, n_k, _ = case["shape"]
    assert report["masked rows"] == batch * heads * max(0, n_q - n_k) * case.get("causal", False)
    # The interpreter truncates numbers to bf16 where a GPU rounds them.
    allowed = {"float16": 1e-3, "bfloat16": 1.5e-2}.get(case.get("dtype"), 2e-6)
    if name in ("large scores", "scores all far below zero"):
        # adjacent fp32 numbers in the thousands differ by 1.2e-4
        allowed = 2e-4
    errors = report["errors"]
    assert errors.pop("lse") <= 2e-6 and max(errors.values()) <= allowed, report


def test_kernels_skip_tiles_above_the_diagonal(interpreted):
    assert interpreted["skipping"] == [True] * 5


def test_kernels_report_unsupported_head_dims_and_dtypes(monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", True)
    x = torch.zeros(1, 1, 4, 16)
    shapes = {str(d): torch.zeros(1, 1, 4, d) for d in (8, 15, 257)}
    for name, q in (shapes | {"float64": x.double(), "meta": x.to("meta")}).items():
        assert name in launch.unsupported_reason(q, q)
    assert "24" in launch.unsupported_reason(x, torch.zeros(1, 1, 4, 24))
    for q in (x, torch.zeros(1, 1, 4, 256), x.half(), x.bfloat16()):
        assert launch.unsupported_reason(q, q) is None


# ---- compiled for a GPU


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return start({"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))})


def test_kernels_compile_for_h100_and_reuse_tuning_for_similar_lengths(compiled):
    assert len(compiled["strided"]) == 4
    assert compiled["tunings"] == [[1] * 3, [1] * 3, [2] * 3]  # for lengths 1000, 600, 500


def test_default_kernel_configurations_spill_no_registers_and_fit_h100(compiled):
    if older_triton():
        pytest.skip("Triton 3.5 puts 8 bytes per thread of one kernel on the stack")
    rows = [row for row in compiled["tuned"] if row["kernel"] != "rows_kernel"]
    assert len(rows) >= 2 * 3
    assert all(row["stack"] == 0 and row["tensor cores"] and row["shared"] <= H100 for row in rows)


def test_small_tiles_are_tuned_only_if_larger_exceed_shared_memory():
    forward = launch.forward_kernel
    assert launch._settings_to_try(forward, 64, 2, 1024) == [(16, 16, 4, 1)]
    assert launch._settings_to_try(forward, 64, 2, 101_376) == launch.CANDIDATES[forward][64]
    # the first may need too much
    assert launch._settings_to_try(forward, 256, 2, 101_376) == [(64, 64, 8, 2), (32, 32, 4, 2)]


@pytest.mark.parametrize(("name", "block"), [("block_q", 48), ("block_k", 256)])
def test_kernel_rejects_unsupported_block_size(block, name):
    options = Options(None, 1.0)._replace(**{name: block})
    with pytest.raises(ValueError, match=rf"^{name} must be .*, got {block}$"):
        launch._launch(launch.forward_kernel, None, torch.zeros(1, 1, 4, 16), options)


def test_kernel_rejects_block_sizes_beyond_shared_memory_with_advice():
    def run_kernel(*arguments, BLOCK_Q, BLOCK_K, **options):
        raise launch.OutOfResources(2 * (BLOCK_Q + BLOCK_K) * 256, 101_376, "shared memory")

    kernel, options = MagicMock(), Options(None, 1.0, 128, 128)
    kernel.__getitem__.return_value = run_kernel
    with pytest.raises(
        ValueError, match=r"64 and 64, .* 128 and 128, .* 131072 bytes .* 101376 bytes$"
    ):
        launch._launch(kernel, None, torch.zeros(1, 1, 4, 128), options)


def test_input_with_offsets_beyond_32_bits_is_copied_before_attention():
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
def test_kernel_rounding_errors_on_gpu_stay_near_standard_attention(case):
    tensors, found, exact = run_case(case, device="cuda")
    scale = case.get("scale", tensors[0].shape[-1] ** -0.5)
    same_precision = standard(*tensors, shift_of(case), scale)
    allowed = {"o": 2.0, "lse": 2.0, "dq": 3.0, "dk": 3.0, "dv": 3.0}
    for name, x, other, expected in zip(NAMES, found, same_precision, exact, strict=True):
        assert error(x, expected) <= allowed[name] * error(other, expected) + 1e-6, name
    masked = exact[1] == -torch.inf
    assert not found[0][masked].any() and not found[2][masked].any()


@pytest.mark.gpu
def test_kernels_on_gpu_are_deterministic():
    case = dict(shape=(1, 8, 2, 1000, 1000, 64), causal=True, dtype="bfloat16", blocks=(64, 64))
    (_, first, _), (_, second, _) = run_case(case, "cuda"), run_case(case, "cuda")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_kernels_run_on_same_gpu_as_their_tensors():
    _, found, expected = run_case(CASES["fewer queries than keys, causal"], "cuda:1")
    assert all(error(a, b) < 1e-5 for a, b in zip(found, expected, strict=True))
