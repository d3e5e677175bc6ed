"""Images for a vision transformer, runs of estimated recipes, and distances of weights."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.budget import Estimate, run
from course_lib.teaching import Table, predictions, table

# peft reads an attribute that transformers 5.23 has renamed.
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)

#: Configuration of a vision transformer with 5.5 million parameters and 100 classes
VIT = {
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 3,
    "num_labels": 100,
}


def pictures(samples: int = 8) -> dict[str, Tensor]:
    """Return random images of 224 x 224 pixels in three colors, each with a random class."""
    generator = torch.Generator().manual_seed(0)
    return {
        "pixel_values": torch.rand(samples, 3, 224, 224, generator=generator),
        "labels": torch.randint(VIT["num_labels"], (samples,), generator=generator),
    }


def run_predicted(
    make_model: Callable[[], nn.Module],
    make_batch: Callable[[], Any],
    predicted: Mapping[str, Estimate],
    *,
    guess: float | None = None,
) -> Table:
    """Run training steps whose peaks were estimated, and return a table that compares the peaks.

    Each row has the estimated and the measured peak of a step in bytes.

    Args:
        make_model: Function that returns a new model, which computes its loss itself.
        make_batch: Function that returns the batch.
        predicted: Dict from a label to the estimate of a step.
        guess: The learner's guess of the first step's peak in MB, shown in an additional row. None
            shows no guess.
    """
    rows: list[tuple[str, float | None, float]] = []
    for name, each in predicted.items():
        taken = run(make_model, make_batch, each.recipe)
        if guess is not None and not rows:
            rows.append(("your guess", guess * 1e6, taken.meter.peak_bytes))
        rows.append((name, each.peak_bytes, taken.meter.peak_bytes))
    return predictions(rows, unit="bytes")


def guesses(rows: Iterable[tuple[str, float | None, int]]) -> Table:
    """Return a table of the learner's guesses of peaks next to estimated peaks, in MB.

    Args:
        rows: Rows (label, guess in MB or None if it is missing, estimated peak in bytes).
    """
    shown = [
        (name, "–" if guess is None else f"{guess:,.1f}", f"{count / 1e6:,.1f}")
        for name, guess, count in rows
    ]
    return table(["", "your guess (MB)", "estimate (MB)"], shown)


def weights(model: nn.Module) -> Tensor:
    """Return a copy of all weights of a model as one vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def difference(found: Tensor, expected: Tensor, update: Tensor) -> str:
    """Return the relative distance of two models' weights as text.

    The result is "0" if the weights are equal, "< 0.0005" if they differ only by rounding, and "✗"
    otherwise. The exact distance is not shown, because it differs between CPUs.

    Args:
        found, expected: Weights of the two models, each as one vector.
        update: Norm by which the distance is divided, as a tensor without dimensions.
    """
    error = ((found - expected).norm() / update).item()
    return "0" if error == 0 else "< 0.0005" if error < 5e-4 else "✗"
