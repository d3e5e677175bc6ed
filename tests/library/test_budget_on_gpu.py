"""Estimates for "cuda" equal steps on a GPU: the peak, and the peak of the backward pass.

`h200_steps.csv` has the peaks of an H200, measured by `gpu_training_steps.py` with torch 2.11 and
transformers 5.17. FLOPs are not compared, because the meter counts none inside a Triton kernel."""

import csv
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from gpu_training_steps import STEPS, measured, options_of
from torch import nn
from torch.nn import functional as F

from course_lib.budget import Recipe, estimate, fit
from course_lib.memory import symbolic
from course_lib.symbolic import Gpu, Symbolic

with (Path(__file__).parents[1] / "tools/h200_steps.csv").open(
    encoding="utf-8", newline=""
) as file:
    RECORDED = {row["case"]: row for row in csv.DictReader(file)}
# Bytes by which an estimate may be too high, and why.
TOO_HIGH = {
    # the model makes a mask on the CPU even if it is on a GPU
    **dict.fromkeys(("encoder: ", "dropout modules: "), 24 * 24),
    "speech: ": 4,  # the model makes a number on the CPU
    # no fused kernel supports a mask that needs a gradient
    "encoder and decoder, relative positions: ": 3 * 4096,
}
# Other versions of transformers create other tensors in these models.
VERSION_DEPENDENT = ("experts, ", "encoder and decoder, relative positions: ")


MEASURED = Gpu(torch=(2, 11))  # the version whose rules chose the kernels of attention


def assert_equal(case, row, gpu):
    make_model, make_batch, recipe = STEPS[case]
    if row["schedule_bytes"]:
        recipe = replace(recipe, schedule_bytes=int(row["schedule_bytes"]))
    options = {"kind": "cuda", "gpu": gpu, "tier": "host", **options_of(make_batch)}
    found = estimate(make_model, make_batch, recipe, **options)
    excess = next((count for name, count in TOO_HIGH.items() if case.startswith(name)), 0)
    assert 0 <= found.peak_bytes - int(row["peak"]) <= excess
    assert 0 <= found.phase_peaks["backward"] - int(row["backward"]) <= excess


PART = [name for i, name in enumerate(RECORDED) if i % (4 if "large" in name else 12) == 0]


@pytest.mark.parametrize("case", [name for name in PART if not name.startswith(VERSION_DEPENDENT)])
def test_estimate_equals_step_recorded_on_h200(case):
    assert_equal(case, RECORDED[case], MEASURED)


@pytest.mark.parametrize(
    ("case", "peak"),
    [  # measured on an H200 with transformers 5.17
        ("own checkpoints: Recipe(attention='flash')", 497_072),
        ("own reentrant checkpoints: Recipe(attention='flash', in_backward=True)", 455_212),
    ],
)
def test_checkpoints_inside_model_do_not_store_generator_state_on_gpu(case, peak):
    make_model, make_batch, recipe = STEPS[case]
    options = {"kind": "cuda", "gpu": MEASURED, **options_of(make_batch)}
    assert estimate(make_model, make_batch, recipe, **options).peak_bytes == peak


@pytest.mark.gpu
@pytest.mark.parametrize("case", STEPS)
def test_estimate_equals_step_measured_on_current_gpu(case):
    gpu = Gpu(torch.cuda.get_device_capability())
    assert_equal(case, measured(*STEPS[case]), gpu)


class MaskedGroups(nn.Module):
    """Attention with a mask and grouped queries. An A100 has no fused kernel for it in bf16."""

    def __init__(self):
        super().__init__()
        self.inputs, self.output = nn.Linear(64, 64 + 2 * 16), nn.Linear(64, 64)

    def loss_sum(self, x):
        parts = self.inputs(x).split([64, 16, 16], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, 16)).transpose(1, 2) for part in parts)
        mask = torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype)
        o = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        return self.output(o.transpose(1, 2).flatten(2)).square().sum(), x.numel()


def test_search_uses_attention_kernels_of_selected_gpu():
    functions = MaskedGroups, partial(torch.randn, 2, 128, 64)
    options = {"kind": "cuda", "tier": "host"}
    recipe = Recipe("bf16", attention=None)
    peaks = []
    for name, capability in (("A100", (8, 0)), ("H100", (9, 0))):
        found = fit(*functions, 10**9, recipes=[recipe], rates=name, progress=False, **options)
        expected = estimate(*functions, recipe, gpu=Gpu(capability), **options)
        assert found[0].peak_bytes == expected.peak_bytes
        peaks.append(expected.peak_bytes)
    assert peaks[0] > 1.5 * peaks[1]


def test_functional_operators_are_patched_only_inside_symbolic_mode():
    before = F.scaled_dot_product_attention, F.dropout, F.rms_norm
    with pytest.raises(LookupError), symbolic(Symbolic(kind="cuda")):
        assert F.scaled_dot_product_attention is not before[0]
        raise LookupError
    assert (F.scaled_dot_product_attention, F.dropout, F.rms_norm) == before
