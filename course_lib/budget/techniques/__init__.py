"""All ways of saving memory that a recipe names, a file each, in the order in which a table names
them.

To add one, write a file with a `Technique` and add its row here; its fields, with their defaults,
stand in `Recipe`.
"""

from __future__ import annotations

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

# By the field that tells what is tried of each.
BY_FIELD = {each.field: each for each in TECHNIQUES}
# As they are put on a model, and added one by one on the way from the plain step to a recipe.
BY_PLACE = sorted(
    (each for each in TECHNIQUES if each.place is not None), key=lambda each: each.place or 0
)

__all__ = ["BY_FIELD", "BY_PLACE", "TECHNIQUES", "Technique"]
