"""Attention that does not store its scores, only the log-sum-exp of each row.

`standard_attention` keeps the N x N probabilities for backward. `flash_attention` keeps the output
and one number per row instead, and computes the probabilities again, tile by tile, in plain torch
or in Triton. `online_softmax` shows the idea behind it, and `attention_cost` counts the FLOPs and
the bytes moved by each of them. Lesson 06 explains all of them.
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
