"""Choose memory-saving techniques, and how much of each, for a memory budget in bytes.

A `Recipe` lists the techniques that a training step uses. `estimate` computes the memory and FLOPs
of the step without real tensors, `fit` finds the recipes that fit a budget, and `train_step` runs
the step of a recipe. Lesson 07 explains them.

Example:
    >>> from course_lib.models import Decoder, random_tokens
    >>> def make_model():
    ...     return Decoder(vocabulary=1000, hidden=128, layers=2, heads=2, sequence=64)
    >>> def make_batch():
    ...     return random_tokens(4, 64, 1000)
    >>> best = fit(make_model, make_batch, 11_000_000, progress=False)[0].recipe
    >>> best.micro_batches
    4
    >>> model, optimizer = build(make_model, best)
    >>> loss = train_step(model, optimizer, make_batch(), best)
"""

from course_lib._check import InfeasibleBudget
from course_lib._hugging_face_losses import hugging_face_loss

from .estimate import Estimate, Run, estimate, run
from .rates import RATES, Rates, this_machine
from .recipe import Recipe
from .search.fit import Estimates, fit
from .step import build, train_step
from .techniques.head import chunked_head
from .waterfall import steps_to, waterfall

__all__ = [
    "RATES",
    "Estimate",
    "Estimates",
    "InfeasibleBudget",
    "Rates",
    "Recipe",
    "Run",
    "build",
    "chunked_head",
    "estimate",
    "fit",
    "hugging_face_loss",
    "run",
    "steps_to",
    "this_machine",
    "train_step",
    "waterfall",
]
