"""Answers to the exercises of lesson 07: right ones, and wrong ones with what they are told."""

import torch

from course_lib.budget import Recipe
from course_lib.lessons.ledger import BASELINE
from course_lib.memory import MemoryMeter, symbolic


def peak(
    make_model,
    make_batch,
    *,
    steps=2,
    zero=True,
    set_to_none=True,
    update=True,
    batch_before=False,
    keep_batch=False,
    keep_loss=False,
    watched=2,
    adam_class=torch.optim.Adam,
    **settings,
):
    """The peak of a step, with one mistake where an option asks for it."""
    with symbolic():
        model = make_model()
        adam = adam_class(model.parameters(), **{"foreach": False, **settings})
        for _ in range(steps):
            if zero:
                adam.zero_grad(set_to_none=set_to_none)
            early = make_batch() if batch_before else None
            with MemoryMeter(*[model, adam][:watched]) as meter:
                batch = make_batch() if early is None else early
                loss = model.loss(batch)
                if not keep_batch:
                    del batch
                loss.backward()
                if not keep_loss:
                    del loss
                if update:
                    adam.step()
            if not update:
                adam.step()
    return meter.peak_bytes


def slip(**options):
    return lambda make_model, make_batch: peak(make_model, make_batch, **options)


def made_outside(make_model, make_batch):
    model = make_model()
    return peak(lambda: model, make_batch)


LEAST = {"offload_optimizer": 1.0, "in_backward": True, "offload_activations": True}
ALL_IN = {**LEAST, "checkpoint": "layers"}

#: check -> right answers, and wrong ones, each alone or with a part of what it is told.
ANSWERS = {
    "peak_without_memory": (
        [
            peak,
            slip(batch_before=True),
            slip(steps=3),
            slip(keep_batch=True),
            slip(keep_loss=True),
            slip(keep_batch=True, keep_loss=True),
            slip(batch_before=True, keep_loss=True),
        ],
        [
            (slip(steps=1), "Adam's state is missing"),
            (slip(watched=1), "`MemoryMeter(model, adam)`"),
            (slip(watched=0), "Your meter counts neither"),
            (slip(adam_class=torch.optim.SGD), "the second step of Adam"),
            (slip(zero=False), "still live"),
            (slip(set_to_none=False), "`set_to_none=False` they keep their memory"),
            (slip(update=False), "the temporaries of Adam's update"),
            (slip(fused=True), "the temporaries of Adam's update"),
            slip(foreach=True),
            (made_outside, "outside `with symbolic():`"),
            (lambda make_model, make_batch: BASELINE.peak_bytes, "never called `make_model`"),
            (lambda *make: peak(*make) / 1e6, "in MB"),
            (lambda *make: peak(*make, batch_before=True) / 2**20, "in MiB"),
        ],
    ),
    "break_even": (
        [
            lambda a, b: (b.flops - a.flops) / (a.moved_bytes - b.moved_bytes),
            lambda a, b: abs(a.flops - b.flops) / abs(a.moved_bytes - b.moved_bytes),
        ],
        [
            (lambda a, b: (a.flops - b.flops) // (b.moved_bytes - a.moved_bytes), "rounded"),
            lambda a, b: 30.3,
            (lambda a, b: 29.6875 if a.flops > b.flops else None, "returns None for first"),
        ],
    ),
    "same_flops": (
        [Recipe(micro_batches=4), Recipe(micro_batches=8)],
        [
            (Recipe(), "277.7 MB > 160 MB. Its peak has activation 178.4 MB"),
            (Recipe(micro_batches=2), "does not fit"),
            (Recipe(checkpoint="layers"), "needs 1.214 times the baseline's FLOPs"),
            (Recipe(offload_activations=True), "fits, but it moves"),
        ],
    ),
    "keeps_clipping": (
        [
            Recipe(checkpoint="layers", first_blocks=7, micro_batches=8),
            Recipe(checkpoint="segments", segments=8, micro_batches=8),
        ],
        [
            (Recipe(checkpoint="layers", micro_batches=8), "1.214 times the baseline's FLOPs"),
            (Recipe(checkpoint="layers", in_backward=True), "clipping is impossible"),
            (Recipe(micro_batches=8), "134.8 MB > 120 MB. Its peak has optimizer state 55.0 MB"),
            (
                Recipe(checkpoint="layers", micro_batches=8, offload_optimizer=1.0),
                "fits, but it moves",
            ),
        ],
    ),
    "fifty": (
        [Recipe(**LEAST, head_chunk=128), Recipe(**LEAST, head_chunk=128, attention="flash")],
        [
            (Recipe(**ALL_IN), "57.9 MB > 50 MB. Its peak has parameter 27.5 MB"),
            (Recipe(**LEAST), "53.9 MB > 50 MB"),
            (Recipe(micro_batches=8), "optimizer state 55.0 MB"),
        ],
    ),
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

#: check -> mutants of its solution that are right as well, and why.
EQUIVALENT = {
    "peak_without_memory": {
        "2 → 3 in `for _ in range(2):`": (
            "a third step peaks as the second does: Adam's state is there"
        ),
    },
    "keeps_clipping": {
        "7 → 6 in `exercises.check_keeps_clipping(Recipe(checkpoint='layers', first_blocks=7, micro_batches=8))`": (
            "119.8 MB and still fewer FLOPs: the layer before the last needs no checkpoint either"
        ),
    },
    "fifty": {
        f"128 → {chunk} in `exercises.check_fifty(Recipe(**least, head_chunk=128))`": (
            "the head is not the peak any more, whether a chunk has a token more or less"
        )
        for chunk in (127, 129)
    },
}
