"""Attention that forgets its scores: forward and backward in tiles, from the log-sum-exp of each
row.

`standard_attention` keeps the N x N probabilities for backward; `flash_attention` keeps the output
and one number a row instead, and computes the probabilities again, tile by tile, in plain torch or
in Triton. `online_softmax` is the idea behind it, `attention_cost` what each of them costs. Lesson
06 explains.
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
