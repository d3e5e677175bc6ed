"""Find the cheapest recipes with which a training step fits into a byte budget, and run the first.

python examples/your_budget.py
"""

import torch

from course_lib.budget import fit, run
from course_lib.models import Decoder

BUDGET_BYTES = 9_000_000


def make_model() -> Decoder:
    return Decoder(vocabulary=256, hidden=128, heads=4, layers=2, sequence=64)


def make_batch() -> torch.Tensor:
    return torch.randint(256, (8, 65))  # 8 sequences; the 65th token is the last input's label


estimates = fit(make_model, make_batch, BUDGET_BYTES)
for candidate in estimates[:3]:
    print(f"{candidate.peak_bytes:>12,} bytes, {candidate.flops:>15,} FLOPs: {candidate.recipe}")
step = run(make_model, make_batch, estimates[0].recipe, budget_bytes=BUDGET_BYTES)
print(f"{step.meter.peak_bytes:>12,} bytes measured: {estimates[0].recipe}")
