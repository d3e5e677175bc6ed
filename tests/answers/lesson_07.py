"""Answers to the exercises of lesson 07: right ones, and wrong ones with what they are told."""

from course_lib.budget import Recipe

FORGETFUL = {"attention": "flash", "checkpoint": "layers"}


LEAST = {**FORGETFUL, "micro_batches": 8}


LESSON = {"attention": "flash", "in_backward": True, "offload_optimizer": 1.0}


#: check -> right answers, and wrong ones, each alone or with a part of what it is told.
ANSWERS = {
    "forty_megabytes": (
        [Recipe(micro_batches=4), Recipe(micro_batches=8)],
        [
            (Recipe(micro_batches=2), "does not fit: 56.2 MB > 40 MB"),
            (Recipe(attention="flash", micro_batches=4), "takes 1.033 times the FLOPs"),
            (Recipe(micro_batches=4, offload_optimizer=0.25), "fits, but moves"),
        ],
    ),
    "fourteen_megabytes": (
        [Recipe(**LEAST)],
        [
            (Recipe(attention="flash", micro_batches=8), "does not fit: 16.9 MB > 14 MB"),
            (Recipe(**LEAST, offload_optimizer=0.5), "fits, but moves"),
        ],
    ),
    "eleven_megabytes": (
        [Recipe(**LEAST, offload_optimizer=0.5), Recipe(**LEAST, offload_optimizer=1.0)],
        [(Recipe(**LEAST, offload_optimizer=0.25), "does not fit: 11.9 MB > 11 MB")],
    ),
    "beats_the_lesson": (
        [Recipe(**LESSON, checkpoint="segments", segments=6)],
        [
            (Recipe(**LESSON, checkpoint="layers"), "not cheaper: 2.667 s : 2.667 s"),
            (Recipe(**FORGETFUL), "does not fit"),
        ],
    ),
}

#: What no exercise takes for a recipe, and what it is told.
NO_RECIPES = [
    *(("micro_batches=4", "this is a `str`"), (LEAST, "this is a `dict`"), (Recipe, "this is a `type`")),
    *((Recipe(optimizer="sgd"), "optimizer stay"), (Recipe(precision="bf16"), "optimizer stay")),
    (Recipe(micro_batches=9), "cannot be estimated: micro_batches is 9"),
]

#: check -> mutants of its solution that are right as well, and why.
EQUIVALENT = {
    "eleven_megabytes": {
        "0.5 → 1.0 in `half = {'offload_optimizer': 0.5, 'micro_batches': 8}`": "all of it fits as well"
    },
}
