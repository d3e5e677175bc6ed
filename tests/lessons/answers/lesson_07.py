"""Right and wrong answers to the exercises of lesson 07, with the expected messages."""

from functools import partial

import torch

from course_lib.budget import Recipe
from course_lib.lessons.ledger import BASELINE
from course_lib.memory import MemoryMeter, symbolic


def peak(make_model, make_batch, changes=(), steps=2, watched=2, foreach=False):
    """The peak of a step, with changes to the solution: some are mistakes, some are right."""
    with symbolic():
        model = make_model()
        adam = torch.optim.Adam(model.parameters(), foreach=foreach)
        for _ in range(steps):
            if "no zero" not in changes:
                adam.zero_grad()
            with MemoryMeter(*[model, adam][:watched]) as meter:
                batch = make_batch()
                loss = model.loss(batch)
                if "keep batch" not in changes:
                    del batch
                loss.backward()
                if "keep loss" not in changes:
                    del loss
                if "update outside" not in changes:
                    adam.step()
            if "update outside" in changes:
                adam.step()
    return meter.peak_bytes


def changed(*changes, **options):
    return partial(peak, changes=changes, **options)


def made_outside(make_model, make_batch):
    model = make_model()
    return peak(lambda: model, make_batch)


def in_no_grad(frozen, x, down, up):
    with torch.no_grad():
        kept = frozen(x)
    return kept + x @ down.T @ up.T


LEAST = {"offload_optimizer": 1.0, "in_backward": True, "offload_activations": True}

#: check -> right answers
RIGHT = {
    "peak_without_memory": [peak, changed("keep batch", "keep loss", steps=3)],
    "break_even": [lambda a, b: abs(a.flops - b.flops) / abs(a.moved_bytes - b.moved_bytes)],
    "same_flops": [Recipe(micro_batches=8)],
    "keeps_clipping": [Recipe(checkpoint="layers", first_blocks=7, micro_batches=8)],
    "adapted_layer": [
        lambda frozen, x, down, up: frozen(x) + x @ down.T @ up.T,
        lambda frozen, x, down, up: torch.einsum("bti,ri,or->bto", x, down, up) + frozen(x),
    ],
    "fifty": [Recipe(**LEAST, head_chunk=128)],
}

#: check -> wrong answers, each alone or with a part of the expected message
WRONG = {
    "peak_without_memory": [
        (changed(steps=1), "Adam's state is missing"),
        (changed(watched=0), "Your meter counts neither"),
        (changed("no zero"), "still live"),
        (changed("update outside"), "the temporaries of Adam's update"),
        changed(foreach=True),
        (made_outside, "outside `with symbolic():`"),
        (lambda make_model, make_batch: BASELINE.peak_bytes, "never called `make_model`"),
        (lambda *make: peak(*make) / 1e6, "in MB"),
    ],
    "same_flops": [
        (Recipe(), "277.7 MB > 160 MB. Its peak has activation 178.4 MB"),
        (Recipe(checkpoint="layers"), "needs 1.214 times the baseline's FLOPs"),
        (Recipe(offload_activations=True), "fits, but it moves"),
        ("micro_batches=4", "got a `str`"),
        (Recipe(optimizer="sgd"), "Keep the precision"),
        (Recipe(precision="bf16"), "Keep the precision"),
        (Recipe(micro_batches=9), "cannot be estimated: micro_batches must be 1, 2"),
    ],
    "keeps_clipping": [
        (Recipe(checkpoint="layers", micro_batches=8), "1.214 times the baseline's FLOPs"),
        (Recipe(checkpoint="layers", in_backward=True), "clipping is impossible"),
        (Recipe(micro_batches=8), "134.8 MB > 120 MB. Its peak has optimizer state 55.0 MB"),
        (Recipe(checkpoint="layers", micro_batches=8, offload_optimizer=1.0), "fits, but it moves"),
    ],
    "adapted_layer": [
        (lambda frozen, x, down, up: frozen(x), "the frozen layer alone"),
        (lambda frozen, x, down, up: x @ down.T @ up.T, "the adapter alone"),
        (lambda frozen, x, down, up: frozen(x) + x @ (up @ down).T, "a tensor as large as W"),
        (in_no_grad, "the gradient must pass through it"),
        (lambda frozen, x, down, up: frozen(x) + x @ down.detach().T @ up.T, "are not all right"),
        (lambda frozen, x, down, up: (frozen(x) + x @ down.T @ up.T).detach(), "not all right"),
        (lambda frozen, x, down, up: frozen(x + x @ down.T @ down), "differs from the sum"),
        (lambda frozen, x, down, up: (frozen(x) + x @ down.T @ up.T).sum(), "the shape"),
        lambda frozen, x, down, up: frozen(x) + x @ down @ up,
    ],
    "fifty": [
        (Recipe(**LEAST), "53.9 MB > 50 MB"),
        (Recipe(micro_batches=8), "optimizer state 55.0 MB"),
    ],
}

#: check -> why mutants of its solution are right as well -> the mutants
EQUIVALENT = {
    "peak_without_memory": {
        "a third step peaks as the second does, because Adam's state exists": [
            "2 → 3 in `for _ in range(2):`"
        ]
    },
    "keeps_clipping": {
        "119.8 MB and still fewer FLOPs: the layer before the last needs no checkpoint either": [
            "7 → 6 in `exercises.check_keeps_clipping(Recipe(checkpoint='layers', first_blocks=7, micro_batches=8))`"
        ]
    },
    "fifty": {
        "the head is no longer the peak, whether a chunk has a token more or less": [
            f"128 → {chunk} in `exercises.check_fifty(Recipe(**least, head_chunk=128))`"
            for chunk in (127, 129)
        ]
    },
}
