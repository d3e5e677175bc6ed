"""Lesson 09: its claims, checks and figures, and the checks of the reader's own model."""

from course_lib.teaching import Claim

from .exercises import (
    BUDGET,
    FOLDER,
    LLAMA,
    LLAMA_3_8B,
    check_loss_sum,
    check_parameters,
    check_recipe,
    model_of,
    passages,
)
from .figures import (
    draw_lora,
    draw_losses,
    draw_techniques,
    other_architectures,
    update_in_backward,
)
from .practice import (
    VIT,
    difference,
    figures_of_claims,
    peak_in_trainer,
    pictures,
    run_predicted,
    weights,
)
from .slots import check_slots, first_difference, own_model

__all__ = [
    "BUDGET",
    "CLAIMS",
    "FOLDER",
    "LLAMA",
    "LLAMA_3_8B",
    "VIT",
    "check_loss_sum",
    "check_parameters",
    "check_recipe",
    "check_slots",
    "difference",
    "draw_lora",
    "draw_losses",
    "draw_techniques",
    "figures_of_claims",
    "first_difference",
    "model_of",
    "other_architectures",
    "own_model",
    "passages",
    "peak_in_trainer",
    "pictures",
    "run_predicted",
    "update_in_backward",
    "weights",
]

#: Claims that learners may have read.
CLAIMS = (
    Claim(
        "With gradient checkpointing, training will be ~20% slower.",
        "FLOPs with checkpoints relative to the baseline",
        (
            "Partly: here a quarter more is computed. The time depends on what else the step waits"
            " for."
        ),
        outcome="partly",
        source="transformers documentation, Gradient checkpointing, 2026",
    ),
    Claim(
        "When training with Adam, you can expect roughly 4x the model's size.",
        "peak of the baseline relative to the weights",
        (
            "No: this counts weights, gradients and optimizer state. Activations are not included"
            " and are added to it."
        ),
        outcome="fails",
        source="Model Memory Utility, hf-accelerate",
    ),
    Claim(
        "Flash attention lowers the peak.",
        "checkpoints; checkpoints and flash (MB)",
        (
            "Not here: the model's own attention keeps no scores either, and on a CPU the tiles of"
            " flash attention are tensors."
        ),
        outcome="fails",
    ),
)
