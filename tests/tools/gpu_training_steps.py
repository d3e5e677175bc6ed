"""Peaks of training steps on a GPU, for `test_budget_on_gpu`.

python tests/tools/gpu_training_steps.py h200_steps.csv [PART PARTS]  # write rows of one part
"""

import gc
import sys
from functools import partial
from pathlib import Path

import csv_tables
import torch
from estimate_checks import feasible
from hugging_face_models import maker
from test_budget_estimate_equals_run import CASES, options_of
from torch import nn

from course_lib._torch.steps import not_collecting
from course_lib._torch.tensors import map_tensors
from course_lib.budget import Recipe, build
from course_lib.budget.step import default_dtype, make_state, micro_batches_of, run_micro_batches
from course_lib.memory import MemoryMeter
from course_lib.models import Decoder, random_tokens

# ---- larger models, whose tensor sizes the allocator does not round

decoder = partial(Decoder, vocabulary=8192, hidden=512, heads=8, layers=4, sequence=1024)


llama = maker(
    "Llama:LlamaForCausalLM",
    vocab_size=32000,
    hidden_size=512,
    intermediate_size=1408,
    num_attention_heads=8,
    num_key_value_heads=4,
    num_hidden_layers=4,
    use_cache=False,
)
gpt2 = maker("GPT2:GPT2LMHeadModel", n_layer=3, use_cache=False)


def text():
    tokens = random_tokens(2, 1023, 8192)
    return {"input_ids": tokens, "labels": tokens}


class Convolutions(nn.Module):
    """Convolutions with batch norm, which cuDNN computes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(c, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU())
                for c in (3, 16, 16)
            )
        )

    def loss_sum(self, x):
        return self.layers(x).square().mean((1, 2, 3)).sum(), len(x)


DEFAULT, SDPA = {"attention": None}, {"attention": "sdpa"}
LARGE = {
    "decoder": (
        *(decoder, partial(random_tokens, 4, 1024, 8192)),
        [
            *(Recipe(), Recipe("bf16"), Recipe("bf16", attention="flash", checkpoint="layers")),
            Recipe("bf16", attention="flash", checkpoint="segments", segments=3),
            Recipe("bf16", attention="flash", checkpoint="optimal", schedule_bytes=1),
            Recipe("bf16", attention="flash", offload_activations=True),
            Recipe("bf16", attention="flash", head_chunk=512, micro_batches=2),
        ],
    ),
    "Llama": (
        *(llama, text),
        [
            *(Recipe(**DEFAULT), Recipe("bf16", **DEFAULT), Recipe(attention="eager")),
            *(Recipe("bf16", checkpoint="layers", update=how, **SDPA) for how in (None, "fused")),
            Recipe("bf16", checkpoint="selective", micro_batches=2, **SDPA),
            Recipe("bf16", checkpoint="layers", head_chunk=512, **SDPA),
            Recipe("bf16", checkpoint="layers", offload_optimizer=1.0, in_backward=True, **SDPA),
            Recipe(None, "sgd", in_backward=True, **SDPA),
        ],
    ),
    # dropout, in attention as well
    "GPT-2": (
        *(gpt2, text),
        [
            *(Recipe(**DEFAULT), Recipe("bf16", **DEFAULT)),
            Recipe("bf16", checkpoint="layers", **SDPA),
            Recipe("bf16", checkpoint="selective", micro_batches=2, **SDPA),
        ],
    ),
    "convolutions": (
        *(Convolutions, partial(torch.randn, 4, 3, 64, 64)),
        [Recipe(**DEFAULT), Recipe("bf16", **DEFAULT)],
    ),
}
STEPS = {f"{name}: {recipe!r}": (make, batch, recipe) for name, make, batch, recipe in CASES}
STEPS |= {
    f"large {name}: {recipe!r}": (make, batch, recipe)
    for name, (make, batch, recipes) in LARGE.items()
    for recipe in recipes
}


def measured(make_model, make_batch, recipe) -> dict[str, int]:
    """Return what the meter counts in the second step. The first one tunes kernels."""
    recipe = feasible(make_model, make_batch, recipe)
    torch.manual_seed(0)
    model, optimizer = build(lambda: make_model().cuda(), recipe)
    with default_dtype(recipe.dtype):
        batch = map_tensors(torch.Tensor.cuda, make_batch())
    make_state(model, optimizer)
    loss_sum = options_of(make_batch).get("loss_sum")
    for _ in range(2):
        micro_batches = micro_batches_of(batch, recipe.micro_batches)
        with not_collecting(), MemoryMeter(model, optimizer) as meter:
            run_micro_batches(model, optimizer, micro_batches, recipe, loss_sum, None, None)
    trace = meter.trace()
    return {
        "schedule_bytes": recipe.schedule_bytes or "",
        "peak": trace.peak_bytes,
        # the peak of the forward pass differs, because only a run stacks losses of micro-batches
        "backward": trace.phase_peaks()["backward"],
    }


def main(path: str, part: str = "0", parts: str = "1") -> None:
    rows = []
    for name in list(STEPS)[int(part) :: int(parts)]:
        try:
            rows.append({"case": name, **measured(*STEPS[name])})
        except Exception as error:  # go on with the next step
            print(name, f"{type(error).__name__}: {error}", file=sys.stderr)
        csv_tables.write(Path(path), rows)
        gc.collect()


if __name__ == "__main__":
    main(*sys.argv[1:])
