"""Given a budget in bytes: which of all the techniques, and how much of each.

A `Recipe` says what a training step uses, `estimate` what it takes, without taking it, `fit` which recipes a budget
allows, and `train_step` runs one. Lesson 07 explains.
"""

from .estimating import RATES, Estimate, Rates, Run, estimate, run
from .recipe import Recipe
from .search import Estimates, InfeasibleBudget, fit
from .show import steps_to, waterfall
from .step import build, train_step

__all__ = [
    "RATES",
    "Estimate",
    "Estimates",
    "InfeasibleBudget",
    "Rates",
    "Recipe",
    "Run",
    "build",
    "estimate",
    "fit",
    "run",
    "steps_to",
    "train_step",
    "waterfall",
]
