"""Answers to the exercises of lesson 07: right ones, and wrong ones with what they are told."""

from functools import partial

import torch

from course_lib.budget import Recipe
from course_lib.lessons.ledger import BASELINE
from course_lib.memory import MemoryMeter, symbolic


def peak(make_model, make_batch, slips=(), steps=2, watched=2, kind=torch.optim.Adam, **settings):
    """The peak of a step, with a mistake for each of the slips and other arguments."""
    with symbolic():
        model = make_model()
        adam = kind(model.parameters(), **{"foreach": False, **settings})
        for _ in range(steps):
            if "no zero" not in slips:
                adam.zero_grad(set_to_none="zeros" not in slips)
            early = make_batch() if "batch before" in slips else None
            with MemoryMeter(*[model, adam][:watched]) as meter:
                batch = make_batch() if early is None else early
                loss = model.loss(batch)
                if "keep batch" not in slips:
                    del batch
                loss.backward()
                if "keep loss" not in slips:
                    del loss
                if "update outside" not in slips:
                    adam.step()
            if "update outside" in slips:
                adam.step()
    return meter.peak_bytes


def slip(*slips, **options):
    return partial(peak, slips=slips, **options)


def made_outside(make_model, make_batch):
    model = make_model()
    return peak(lambda: model, make_batch)


LEAST = {"offload_optimizer": 1.0, "in_backward": True, "offload_activations": True}
ALL_IN = {**LEAST, "checkpoint": "layers"}

#: check -> right answers
RIGHT = {
    "peak_without_memory": [
        peak,
        slip("batch before", "keep loss"),
        slip(steps=3),
        slip("keep batch"),
        slip("keep loss"),
        slip("keep batch", "keep loss"),
    ],
    "break_even": [lambda a, b: abs(a.flops - b.flops) / abs(a.moved_bytes - b.moved_bytes)],
    "same_flops": [Recipe(micro_batches=4), Recipe(micro_batches=8)],
    "keeps_clipping": [
        Recipe(checkpoint="layers", first_blocks=7, micro_batches=8),
        Recipe(checkpoint="segments", segments=8, micro_batches=8),
    ],
    "fifty": [Recipe(**LEAST, head_chunk=128), Recipe(**LEAST, head_chunk=128, attention="flash")],
}

#: check -> wrong answers, each alone or with a part of what it is told
WRONG = {
    "peak_without_memory": [
        (slip(steps=1), "Adam's state is missing"),
        (slip(watched=1), "`MemoryMeter(model, adam)`"),
        (slip(watched=0), "Your meter counts neither"),
        (slip(kind=torch.optim.SGD), "the second step of Adam"),
        (slip("no zero"), "still live"),
        (slip("zeros"), "`set_to_none=False` they keep their memory"),
        (slip("update outside"), "the temporaries of Adam's update"),
        (slip(fused=True), "the temporaries of Adam's update"),
        slip(foreach=True),
        (made_outside, "outside `with symbolic():`"),
        (lambda make_model, make_batch: BASELINE.peak_bytes, "never called `make_model`"),
        (lambda *make: peak(*make) / 1e6, "in MB"),
        (lambda *make: peak(*make, ["batch before"]) / 2**20, "in MiB"),
    ],
    "break_even": [lambda a, b: 30.3],
    "same_flops": [
        (Recipe(), "277.7 MB > 160 MB. Its peak has activation 178.4 MB"),
        (Recipe(micro_batches=2), "does not fit"),
        (Recipe(checkpoint="layers"), "needs 1.214 times the baseline's FLOPs"),
        (Recipe(offload_activations=True), "fits, but it moves"),
    ],
    "keeps_clipping": [
        (Recipe(checkpoint="layers", micro_batches=8), "1.214 times the baseline's FLOPs"),
        (Recipe(checkpoint="layers", in_backward=True), "clipping is impossible"),
        (Recipe(micro_batches=8), "134.8 MB > 120 MB. Its peak has optimizer state 55.0 MB"),
        (Recipe(checkpoint="layers", micro_batches=8, offload_optimizer=1.0), "fits, but it moves"),
    ],
    "fifty": [
        (Recipe(**ALL_IN), "57.9 MB > 50 MB. Its peak has parameter 27.5 MB"),
        (Recipe(**LEAST), "53.9 MB > 50 MB"),
        (Recipe(micro_batches=8), "optimizer state 55.0 MB"),
    ],
}

#: What no exercise takes for a recipe, and what it is told.
NO_RECIPES = [
    ("micro_batches=4", "got a `str`"),
    (LEAST, "got a `dict`"),
    (Recipe, "got a `type`"),
    (Recipe(optimizer="sgd"), "Keep the precision"),
    (Recipe(precision="bf16"), "Keep the precision"),
    (Recipe(micro_batches=9), "cannot be estimated: micro_batches must be 1, 2"),
]

#: check -> why mutants of its solution are right as well -> the mutants
EQUIVALENT = {
    "peak_without_memory": {
        "a third step peaks as the second does: Adam's state is there": [
            "2 → 3 in `for _ in range(2):`"
        ]
    },
    "keeps_clipping": {
        "119.8 MB and still fewer FLOPs: the layer before the last needs no checkpoint either": [
            "7 → 6 in `exercises.check_keeps_clipping(Recipe(checkpoint='layers', first_blocks=7, micro_batches=8))`"
        ]
    },
    "fifty": {
        "the head is not the peak any more, whether a chunk has a token more or less": [
            f"128 → {chunk} in `exercises.check_fifty(Recipe(**least, head_chunk=128))`"
            for chunk in (127, 129)
        ]
    },
}
