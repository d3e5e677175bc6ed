"""An estimate for "cuda" equals the step on a GPU: the peak, the peaks of two phases, and FLOPs.

`h200_steps.csv` has what an H200 took, measured by `cuda_steps.py` with torch 2.11."""

import csv
from functools import partial
from pathlib import Path

import pytest
import torch
from cuda_steps import STEPS, measured, options_of, row_of, with_schedule
from torch import nn
from torch.nn import functional as F

from course_lib.budget import estimate
from course_lib.memory import MemoryMeter, saved_tensors, symbolic
from course_lib.symbolic import Symbolic

with (Path(__file__).with_name("h200_steps.csv")).open(encoding="utf-8", newline="") as file:
    RECORDED = {row["case"]: row for row in csv.DictReader(file)}
# Here the model itself asks for a device, or makes tensors on the CPU, whatever its own is.
ON_THE_HOST = ("encoder: ", "dropout modules: ", "speech: ", "experts, batched, and a shared one: ")


def estimated(make_model, make_batch, recipe):
    options = options_of(make_batch)
    return row_of(estimate(make_model, make_batch, recipe, kind="cuda", tier="host", **options))


@pytest.mark.parametrize(
    "case", [name for i, name in enumerate(RECORDED) if i % 2 or "large" in name]
)
def test_an_estimate_equals_the_step_of_an_h200(case):
    make_model, make_batch, recipe = STEPS[case]
    row = RECORDED[case]
    found = estimated(make_model, make_batch, with_schedule(recipe, row))
    close = case.startswith(ON_THE_HOST)
    for name, count in found.items():
        assert count == (pytest.approx(int(row[name]), abs=2048) if close else int(row[name])), name


@pytest.mark.gpu
@pytest.mark.parametrize("case", [name for name in STEPS if not name.startswith(ON_THE_HOST)])
def test_an_estimate_equals_the_step_of_this_gpu(case):
    make_model, make_batch, recipe = STEPS[case]
    row = measured(*STEPS[case])
    found = estimated(make_model, make_batch, with_schedule(recipe, row))
    assert found == {name: row[name] for name in found}


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
