"""Claims that lesson 09 tests."""

from course_lib.teaching import Claim

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
