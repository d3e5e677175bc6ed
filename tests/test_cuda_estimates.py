"""An estimate for "cuda" equals the step on a GPU: its peak, and the peak of its backward pass.

`h200_steps.csv` has what an H200 took, measured by `cuda_steps.py` with torch 2.11 and transformers
5.17. FLOPs are not compared, because the meter sees none inside a Triton kernel."""

import csv
from functools import partial
from pathlib import Path

import pytest
import torch
from cuda_steps import STEPS, measured, options_of, with_schedule
from torch import nn
from torch.nn import functional as F

from course_lib.budget import estimate
from course_lib.memory import MemoryMeter, saved_tensors, symbolic
from course_lib.symbolic import Symbolic

with (Path(__file__).with_name("h200_steps.csv")).open(encoding="utf-8", newline="") as file:
    RECORDED = {row["case"]: row for row in csv.DictReader(file)}
# Bytes by which an estimate may be too high, and why.
TOO_HIGH = {
    # a mask that the model makes on the CPU, whatever its own device is
    **dict.fromkeys(("encoder: ", "dropout modules: "), 24 * 24),
    "speech: ": 4,  # a number that the model makes on the CPU
    # attention whose mask needs a gradient, which no fused kernel takes
    "encoder and decoder, relative positions: ": 3 * 4096,
}
# Other versions of transformers make other tensors in these models.
OF_A_VERSION = ("experts, ", "encoder and decoder, relative positions: ")


def assert_equal(case, row):
    make_model, make_batch, recipe = STEPS[case]
    recipe, options = with_schedule(recipe, row), options_of(make_batch)
    found = estimate(make_model, make_batch, recipe, kind="cuda", tier="host", **options)
    most = next((count for name, count in TOO_HIGH.items() if case.startswith(name)), 0)
    for mine, real in (
        (found.peak_bytes, row["peak"]),
        (found.phase_peaks["backward"], row["backward"]),
    ):
        assert 0 <= mine - int(real) <= most


@pytest.mark.parametrize(
    "case",
    [
        name
        for i, name in enumerate(RECORDED)
        if (i % 6 == 0 or "large" in name) and not name.startswith(OF_A_VERSION)
    ],
)
def test_an_estimate_equals_the_step_of_an_h200(case):
    assert_equal(case, RECORDED[case])


@pytest.mark.parametrize(
    ("case", "peak"),
    [  # what an H200 took with transformers 5.17
        ("own checkpoints: Recipe(attention='flash')", 497_072),
        ("own reentrant checkpoints: Recipe(attention='flash', in_backward=True)", 455_212),
    ],
)
def test_checkpoints_of_a_model_keep_the_state_of_the_cpus_generator_on_the_host(case, peak):
    make_model, make_batch, recipe = STEPS[case]
    options = options_of(make_batch)
    assert estimate(make_model, make_batch, recipe, kind="cuda", **options).peak_bytes == peak


@pytest.mark.gpu
@pytest.mark.parametrize("case", STEPS)
def test_an_estimate_equals_the_step_of_this_gpu(case):
    assert_equal(case, measured(*STEPS[case]))


# ---- single operators, as an H200 ran them: bytes saved for backward, and at the peak


class Attention(nn.Module):
    def __init__(self, masked=False, **options):
        super().__init__()
        self.masked, self.options = masked, options

    def forward(self, q):
        mask = torch.zeros(q.shape[2], q.shape[2], dtype=q.dtype, device=q.device)
        options = self.options | ({"attn_mask": mask} if self.masked else {})
        del mask
        return F.scaled_dot_product_attention(q, q * 1, q * 2, **options)


ATTENTION, FLAT = (2, 4, 1000, 64), (1 << 20,)
OPERATORS = {
    "dropout": (partial(nn.Dropout, 0.1), FLAT, (1_048_576, 13_631_488), (1_048_576, 7_340_032)),
    "attention": (
        *(partial(Attention, is_causal=True), ATTENTION),
        *((8_224_784, 14_368_768), (4_128_016, 7_200_016)),
    ),
    "attention with a mask": (
        *(partial(Attention, masked=True), ATTENTION),
        *((12_224_784, 18_368_768), (6_128_016, 9_200_016)),
    ),
    "attention with dropout": (
        *(partial(Attention, is_causal=True, dropout_p=0.1), ATTENTION),
        *((8_224_784, 14_368_768), (4_128_016, 7_200_016)),
    ),
    "layer norm": (
        *(partial(nn.LayerNorm, 256), (1024, 256)),
        *((1_056_768, 3_158_016), (532_480, 1_583_104)),
    ),
    "RMS norm": (
        *(partial(nn.RMSNorm, 256), (1024, 256)),
        *((1_052_672, 3_151_872), (528_384, 1_577_984)),
    ),
    "batch norm": (
        *(partial(nn.BatchNorm2d, 16), (8, 16, 64, 64)),
        *((2_097_280, 6_291_976), (1_048_704, 3_146_056)),
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_operator_saves_what_it_saves_on_an_h200(name, dtype):
    make, shape, *expected = OPERATORS[name]
    with symbolic(Symbolic(kind="cuda")):
        module, x = make().to(dtype), torch.randn(shape, dtype=dtype, requires_grad=True)
        saved = saved_tensors(module, x).total_bytes
        with MemoryMeter(module) as meter:
            y = module(x)
            y.backward(torch.ones_like(y))
    # Seeds that a kernel keeps on the host are saved too, but are not the device's.
    host = 16 if name.startswith("attention") and dtype == torch.float32 else 0
    assert (saved + host, meter.peak_bytes) == expected[dtype == torch.bfloat16]


def test_functions_choose_their_operator_by_the_device_only_inside_the_mode():
    before = F.scaled_dot_product_attention, F.dropout, F.rms_norm
    with pytest.raises(RuntimeError, match="own"), symbolic(Symbolic(kind="cuda")):
        assert F.scaled_dot_product_attention is not before[0]
        raise RuntimeError("own")
    assert (F.scaled_dot_product_attention, F.dropout, F.rms_norm) == before
    with symbolic():
        assert F.dropout is before[1]
