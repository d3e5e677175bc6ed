"""All memory-saving techniques of a recipe, one file per technique.

`TECHNIQUES` has the order in which tables list the techniques. To add a technique, write a file
with a subclass of `Technique` and add an instance to `TECHNIQUES`. Add its fields with their
defaults to `Recipe`.
"""

from __future__ import annotations

from graphlib import TopologicalSorter

from .attention import AttentionKind
from .checkpoints import Checkpoint
from .head import ChunkedHead
from .in_backward import InBackward
from .micro_batches import MicroBatches
from .offload_activations import OffloadedActivations
from .optimizer import OffloadedState, Optimizer
from .precision import Precision
from .ranks import Ranks
from .technique import Technique

TECHNIQUES: tuple[Technique, ...] = (
    Precision(),
    Optimizer(),
    OffloadedState(),
    AttentionKind(),
    Checkpoint(),
    OffloadedActivations(),
    ChunkedHead(),
    InBackward(),
    MicroBatches(),
    Ranks(),
)

# Maps the name of each technique's first field to the technique. The search varies this field.
BY_FIELD = {each.field: each for each in TECHNIQUES}
# Techniques in the order in which they are applied to a model (see `Technique.after`). `steps_to`
# of `budget.waterfall` adds techniques to the baseline in the same order.
APPLIED = [
    BY_FIELD[field]
    for field in TopologicalSorter(
        {each.field: each.after for each in TECHNIQUES if each.after is not None}
    ).static_order()
]

__all__ = ["APPLIED", "BY_FIELD", "TECHNIQUES", "Technique"]
