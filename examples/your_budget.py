"""The cheapest ways to fit a training step into a number of bytes.

python examples/your_budget.py
"""

import torch

from course_lib.budget import fit, run
from course_lib.models import Decoder

BUDGET_BYTES = 9_000_000


def make_model() -> Decoder:
    return Decoder(vocabulary=256, hidden=128, heads=4, layers=2, sequence=64)


def make_batch() -> torch.Tensor:
    return torch.randint(256, (8, 65))  # (sequences, tokens and the one to predict)


found = fit(make_model, make_batch, BUDGET_BYTES)
for way in found[:3]:
    print(f"{way.peak_bytes:>12,} bytes, {way.flops:>15,} FLOPs: {way.recipe}")
step = run(make_model, make_batch, found[0].recipe, budget_bytes=BUDGET_BYTES)
print(f"{step.meter.peak_bytes:>12,} bytes measured: {found[0].recipe}")
