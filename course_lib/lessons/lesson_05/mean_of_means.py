"""Training with the mean of means, compared with the token mean: losses on short and long samples.

    python -m course_lib.lessons.lesson_05.mean_of_means   # eight seeds, a few minutes

The losses are written to `mean_of_means.json`, next to this file.

A small decoder is trained on the course's own code (short lines) and prose (long paragraphs),
character by character. The two runs of a seed start with the same weights and see the same batches,
in micro-batches of one sample. The two runs differ only in the number by which sums of losses are
divided.
"""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from course_lib.lessons.text import VOCABULARY, code, pad_texts, prose
from course_lib.models import Decoder

RECORDING = Path(__file__).with_name("mean_of_means.json")
COMMAND = "python -m course_lib.lessons.lesson_05.mean_of_means"
SAMPLES, LENGTH, STEPS, EVERY, SEEDS = 16, 128, 120, 20, 8
KINDS = ("token mean", "mean of means")


def loss_sum(model: torch.nn.Module, tokens: Tensor) -> tuple[Tensor, int]:
    """Return the sum of the losses of all predicted characters, and the number of characters.

    Padding, which has the number 0, is not counted.

    Args:
        model: Model that returns logits for characters.
        tokens: Numbers of characters, of shape (samples, s + 1).
    """
    tokens = tokens[:, : int((tokens != 0).sum(1).max())]
    logits, targets = model(tokens[:, :-1]), tokens[:, 1:].flatten()  # (b, s, v), (b · s,)
    losses = functional.cross_entropy(
        logits.flatten(0, 1), targets, ignore_index=0, reduction="sum"
    )
    return losses, int((targets != 0).sum())


def small_decoder(seed: int = 0) -> Decoder:
    """Build a small decoder with two layers that predicts characters.

    Args:
        seed: Seed of the initial weights.
    """
    return Decoder(
        vocabulary=VOCABULARY, hidden=64, heads=4, layers=2, sequence=LENGTH, seed=100 * seed
    )


def rounded_decoder(seed: int) -> Decoder:
    """Return a decoder in fp32 whose weights can be converted to bf16 without rounding.

    A small random number is added to each initial weight, so that the weights are like those after
    a few training steps.
    """
    model = Decoder(
        vocabulary=VOCABULARY, hidden=64, heads=4, layers=2, sequence=16, seed=100 * seed
    )
    generator = torch.Generator().manual_seed(seed + 7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter.bfloat16())
    return model


@cache
def _halves() -> tuple[tuple[list[str], list[str]], tuple[list[str], list[str]]]:
    """Return two pairs (code, prose) of texts: one for training, one for evaluation.

    Every sixth text is for evaluation.
    """
    short = [line for line in code() if len(line.strip()) > 5]
    long = prose()
    held_out = short[::6], long[::6]
    trained = [t for i, t in enumerate(short) if i % 6], [t for i, t in enumerate(long) if i % 6]
    return trained, held_out


def batch(seed: int, samples: int = SAMPLES) -> Tensor:
    """Draw a batch of texts: lines of code (short) and paragraphs (long), with equal probability.

    Args:
        seed: Seed of the random choice.
        samples: Number of texts.

    Returns:
        Numbers of characters, of shape (samples, length). The length is at most 129, and shorter
        texts are padded with 0.
    """
    draw, (short, long) = random.Random(seed), _halves()[0]
    texts = [draw.choice(short if draw.random() < 0.5 else long) for _ in range(samples)]
    return pad_texts(texts, LENGTH + 1)


def evaluate(model: torch.nn.Module) -> tuple[float, float]:
    """Return a model's mean losses per character on lines of code and on paragraphs.

    The first number is for 128 lines of code, the second number for 62 paragraphs. None of these
    texts is used for training.
    """
    short, long = _halves()[1]
    losses = []
    with torch.no_grad():
        for texts in (random.Random(0).sample(short, 128), long[:62]):
            loss, count = loss_sum(model, pad_texts(texts, LENGTH + 1))
            losses.append(float(loss) / count)
    return losses[0], losses[1]


def train(
    kind: str, seed: int, steps: int = STEPS, every: int = EVERY
) -> list[tuple[float, float]]:
    """Train a small decoder with gradient accumulation, and evaluate its loss at regular intervals.

    Args:
        kind: "token mean" for the mean loss over all tokens of a batch, or "mean of means" for the
            average of the micro-batches' mean losses.
        seed: Seed of the weights and of the batches.
        steps: Number of optimizer steps.
        every: Number of steps between two evaluations.

    Returns:
        Pairs (loss on lines of code, loss on paragraphs). The first pair is from before the
        training.
    """
    model = small_decoder(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found = [evaluate(model)]
    for step in range(steps):
        samples = batch(1000 * seed + step)
        total = int((samples[:, 1:] != 0).sum())
        for micro_batch in samples.split(1):
            loss, count = loss_sum(model, micro_batch)
            (loss / total if kind == "token mean" else loss / count / len(samples)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % every == 0:
            found.append(evaluate(model))
    return found


def load_record() -> dict[str, Any]:
    """Return the stored losses of training runs with two kinds of mean, and data on their origin.

    The key "runs" has a dict from the seed to a dict from the kind of mean to a list of losses.
    """
    return json.loads(RECORDING.read_text(encoding="utf-8"))


def main() -> None:
    runs = {}
    for seed in range(1, SEEDS + 1):
        curves = {kind: train(kind, seed) for kind in KINDS}
        runs[str(seed)] = {
            kind: [[round(x, 4) for x in pair] for pair in each] for kind, each in curves.items()
        }
        print(seed, {kind: each[-1] for kind, each in runs[str(seed)].items()}, flush=True)
    made = {
        "command": COMMAND,
        "torch": torch.__version__,
        "device": "CPU",
        "steps": STEPS,
        "every": EVERY,
    }
    lines = ",\n".join(f"{json.dumps(seed)}: {json.dumps(curves)}" for seed, curves in runs.items())
    RECORDING.write_text(f'{json.dumps(made)[:-1]}, "runs": {{\n{lines}\n}}}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
