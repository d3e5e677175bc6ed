"""Lesson 09: its claims, checks and figures, and the checks of the reader's own model."""

from course_lib.teaching import Claim
from course_lib.workload import configured

from .checks import (
    BUDGET,
    FOLDER,
    LLAMA,
    check_loss_sum,
    check_parameters,
    check_recipe,
    decoder_loss,
    has_transformers,
    model_of,
    passages,
)
from .display import draw_losses, draw_techniques, other_architectures
from .slots import check_slots, first_difference, own_model

__all__ = [
    "BUDGET",
    "CLAIMS",
    "FOLDER",
    "LLAMA",
    "check_loss_sum",
    "check_parameters",
    "check_recipe",
    "check_slots",
    "configured",
    "decoder_loss",
    "draw_losses",
    "draw_techniques",
    "first_difference",
    "has_transformers",
    "model_of",
    "other_architectures",
    "own_model",
    "passages",
]

#: Claims that learners may have read.
CLAIMS = (
    Claim(
        "With gradient checkpointing, training will be ~20% slower.",
        "FLOPs of the step with checkpoints, of plain",
        "A quarter more to compute here. Seconds depend on what else the step waits for.",
        outcome="partly",
        source="transformers documentation, Gradient checkpointing, 2026",
    ),
    Claim(
        "When training with Adam, you can expect roughly 4x the model's size.",
        "the plain step's peak, of the weights'",
        "That is weights, gradients and state. Activations come on top, and are not in the count.",
        outcome="fails",
        source="Model Memory Utility, hf-accelerate",
    ),
    Claim(
        "Flash attention lowers the peak.",
        "checkpoints; with flash on top, MB",
        "Not here: the model's own attention keeps no scores already, and tiles are tensors on a"
        " CPU.",
        outcome="fails",
    ),
)
