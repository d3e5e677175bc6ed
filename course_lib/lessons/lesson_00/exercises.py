"""The exercise of lesson 00."""

from functools import cache

import torch

from course_lib.checkpoint import checkpoint_blocks
from course_lib.lessons.ledger import ROWS
from course_lib.memory import MemoryMeter, symbolic
from course_lib.models import Decoder, random_tokens
from course_lib.teaching.exercises import numbers, throughout

# Peaks of the step in MB, without checkpoints and with a checkpoint around each layer
_NONE, _ALL = (
    row.peak_bytes / 1e6 for row in ROWS if row.technique in ("plain", "checkpoint each layer")
)
_STATE = 82.5  # weights and optimizer state, in MB
_ACTIVATIONS = 178.4  # at the peak of the step without checkpoints, in MB


@cache
def _peak_with_half() -> float:
    """Return the step's peak in MB with checkpoints around the first four layers."""
    with symbolic():
        decoder = Decoder(vocabulary=2048, hidden=256, heads=8, layers=8, sequence=128)
        checkpoint_blocks(decoder, "layers.*", first=4)
        tokens, adam = random_tokens(8, 128, 2048), torch.optim.Adam(decoder.parameters())
        for _ in range(2):  # Adam's state exists from the second step on
            decoder.zero_grad()
            with MemoryMeter(decoder, adam) as meter:
                decoder.loss(tokens).backward()
                adam.step()
    return meter.peak_bytes / 1e6


@numbers(
    {
        "mean": (_NONE + _ALL) / 2,
        "last": throughout(205.3, tolerance=5e-4),  # differs from the mean by less than 1 MB
        "same": _NONE,
        "half": _NONE / 2,
        "all": _ALL,
        "halved": (_NONE - _ACTIVATIONS / 2, (_NONE + _STATE) / 2),
        "one": lambda: _NONE - (_NONE - _peak_with_half()) / 4,
        "first_twice": lambda: _NONE - (_NONE - _peak_with_half()) * 5 / 4,
        "eight": lambda: _NONE - 2 * (_NONE - _peak_with_half()),
        "saved": lambda: _NONE - _peak_with_half(),
        "gradients": lambda: _peak_with_half() + 23.2,
        "bytes": lambda: 1e6 * _peak_with_half(),
    },
    tolerance=0.005,  # 1 MB
)
def check_half() -> float:
    """Check the learner's prediction of a training step's peak in MB.

    In this step, the first four of the decoder's eight layers have checkpoints. The decorated
    function computes the right answer, and the decorator `numbers` turns it into a check.
    """
    return _peak_with_half()
