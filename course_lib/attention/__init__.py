"""Attention that saves one log-sum-exp per row for backward instead of the N x N probabilities.

`standard_attention` keeps the N x N probabilities for backward, for comparison. `flash_attention`
keeps the output and one log-sum-exp per row, and recomputes the probabilities tile by tile, in
plain torch or in Triton. `online_softmax` is the softmax over blocks of columns that makes this
possible. `attention_cost` counts the FLOPs of both kinds of attention and the bytes that they move.
Lesson 06 explains all of these functions.

To use this package alone, copy it together with `_check.py` and `_torch/`.
"""

from .costs import AttentionCost, attention_cost
from .flash import flash_attention, standard_attention
from .tiled import online_softmax

__all__ = [
    "AttentionCost",
    "attention_cost",
    "flash_attention",
    "online_softmax",
    "standard_attention",
]
