"""Checks of exercises in which the reader counts the bytes of a step."""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from course_lib.labels import join_labels
from course_lib.lessons.ledger import LAYER_BYTES
from course_lib.memory import MemoryMeter, symbolic
from course_lib.models import Decoder, random_tokens
from course_lib.teaching import Verdict, expect_number, text
from course_lib.teaching.exercises import (
    WrongAnswer,
    exercise,
    largest_that_fits,
    not_answered,
    right,
    wrong,
)

from .verdicts import of_row

WEIGHTS = 6_875_648  # parameters of the course's decoder
_HINT_ON_A_KIND = "How many numbers of this kind belong to one weight? Each takes 4 bytes."


def _as_read_off(count: int) -> dict[float, str]:
    """Return the mistake for each form of the right count in a table: in MB, or rounded."""
    rounded = "You rounded the right number. Multiply whole numbers, to the byte."
    return {
        **{round(count, -digits): rounded for digits in range(3, 7)},
        **{round(count / 10**6, digits): "That is in MB. Give bytes." for digits in range(7)},
        **{round(count / 2**20, digits): "That is in MiB. Give bytes." for digits in range(7)},
    }


@exercise(
    hint=(
        "Count one layer first: four matrices, their biases and two LayerNorms. What is outside of"
        " the layers?",
        "Write the rows and columns of each matrix in units of h, and add them up. A bias is as"
        " long as its matrix's output, and a LayerNorm has a scale and a shift.",
    )
)
def check_training_state(answer: Any) -> Verdict:
    """Check the decoder's number of weights, and its bytes in training with Adam."""
    wanted = {
        "weights": WEIGHTS,
        "parameter": 4 * WEIGHTS,
        "gradient": 4 * WEIGHTS,
        "optimizer": 8 * WEIGHTS,
    }
    if not isinstance(answer, Mapping) or set(answer) != set(wanted):
        return wrong(
            "Give a dictionary with the keys `weights`, `parameter`, `gradient` and `optimizer`.",
            exact=True,
        )
    if all(count is None for count in answer.values()):
        return not_answered()
    counted = expect_number(answer["weights"], WEIGHTS, wrong_answers=_counts_of_weights())
    if not counted:
        return of_row("weights", counted)
    for kind, count in list(wanted.items())[1:]:
        reasons = {
            WEIGHTS: "You counted numbers. Each takes 4 bytes.",
            2 * WEIGHTS: "You took 2 bytes per number. These are fp32 numbers of 4 bytes.",
            8 * WEIGHTS: "You counted two numbers per weight. This kind has one.",
        }
        if kind == "optimizer":
            reasons = {
                2 * WEIGHTS: "You counted numbers. Each takes 4 bytes.",
                4 * WEIGHTS: "You counted one number per weight. Adam keeps two.",
                12 * WEIGHTS: (
                    "You counted master weights, too. Only weights in half precision need them, and"
                    " these are fp32."
                ),
                16 * WEIGHTS: (
                    "You gave the sum of all three kinds. Give the optimizer state alone."
                ),
            }
        if kind == "gradient":
            reasons[4 * 8 * WEIGHTS] = (
                "You counted one gradient per sequence. Backward adds them up to one gradient."
            )
        verdict = expect_number(
            answer[kind], count, wrong_answers={**_as_read_off(count), **reasons}
        )
        if not verdict and not (kind == "optimizer" and expect_number(answer[kind], count + 400)):
            if not verdict.exact:  # the exercise's hints are about the number of weights
                verdict = replace(verdict, hint=_HINT_ON_A_KIND)
            return of_row(kind, verdict)
    return right("Right: one number per weight, one for its gradient, and two for Adam.")


def _counts_of_weights() -> dict[int, str]:
    """Return wrong numbers of weights, and what was forgotten."""
    h = 256
    forgotten = {
        8 * 9 * h: (
            "You left out the biases. Each is as long as its matrix's output: 3h + h + 4h + h"
            " per layer."
        ),
        8 * 4 * h: "You left out the layers' LayerNorms. Each layer has two, with 2h numbers each.",
        8 * 13 * h: "You left out the biases and LayerNorms of the layers, 13h numbers per layer.",
        # The vocabulary is 8h, so the embedding has 8h² weights, like one h × h matrix per layer.
        2048 * h: (
            "524,288 weights are missing. Either you left out the embedding of the words, or one"
            " h × h matrix in each of the eight layers."
        ),
        128 * h: "You left out the embedding of the positions.",
        2 * h: "You left out the last LayerNorm, 2h numbers.",
        17 * h: "You gave each LayerNorm h numbers. It has 2h: a scale and a shift.",
        16 * h: "You gave each layer's two LayerNorms h numbers. Each has 2h: a scale and a shift.",
        -2048 * h: (
            "524,288 weights are too many. The head is the embedding of the words, the same tensor."
            " If you counted it once, you have one h × h matrix too many in each layer, which has"
            " 12h² in its matrices."
        ),
    }
    counts = {WEIGHTS - count: message for count, message in forgotten.items()}
    for (a, first), (b, second) in itertools.combinations(forgotten.items(), 2):
        counts.setdefault(WEIGHTS - a - b, join_labels([first, second], " "))
    counts[4 * WEIGHTS] = "You gave bytes. How many numbers are these?"
    return counts


@exercise(
    hint=(
        (
            "Which of the five kinds are in memory when backward starts? Exercise 3 gave the"
            " bytes of one layer."
        ),
        (
            "What does the last LayerNorm keep, and what does the head keep? Cross-entropy runs"
            " log-softmax: which tensors of the logits' size has its backward made by then?"
        ),
    )
)
def check_whole_peak(answer: Any) -> Verdict:
    """Check the parts of the baseline's peak; only two numbers of 4 bytes are left out."""
    layer, logits, width, statistics = (
        LAYER_BYTES,
        4 * 8 * 128 * 2048,
        4 * 8 * 128 * 256,
        8 * 8 * 128,
    )
    wanted = {
        "state": 12 * WEIGHTS + 400,
        "layers": 8 * layer,
        "norm and head": 2 * width + statistics,
        "logits": 3 * logits,
    }
    mistakes: dict[str, dict[float, str]] = {
        "state": {
            4 * WEIGHTS: (
                "You counted the weights alone. Adam's state is in memory all the time, too."
            ),
            8 * WEIGHTS: (
                "You counted Adam's state alone. The weights are in memory all the time, too."
            ),
            **dict.fromkeys(
                (16 * WEIGHTS, 16 * WEIGHTS + 400),
                (
                    "You counted the gradients of the parameters. At the peak, none has been"
                    " computed yet."
                ),
            ),
        },
        "layers": {
            layer: "You counted one layer. The decoder has eight.",
            8 * layer + 2 * width + statistics + logits + 16_452: (
                "That is what the whole decoder keeps. Norm, head and logits have rows of their"
                " own."
            ),
            8 * (layer - 4 * 8 * 8 * 128**2): (
                "You left out P. This decoder's attention keeps it, as in exercise 3."
            ),
            8 * (layer - 2 * statistics): (
                "You left out the statistics of the layers' LayerNorms, two numbers per token for"
                " each."
            ),
        },
        "norm and head": {
            width: (
                "You counted one input. The norm keeps its input and statistics, and the head"
                " keeps its own input."
            ),
            2 * width + statistics + 2 * 4 * 256: (
                "You counted the norm's weights here. They are in `state` already."
            ),
            **dict.fromkeys(
                (3 * width, 3 * width + statistics),
                "You counted the norm's output and the head's input. They are the same tensor.",
            ),
            2 * width: "You left out the norm's statistics, two numbers per token.",
            width + statistics: (
                "You counted one of two inputs. The norm keeps its input, and the head keeps"
                " its own."
            ),
            **dict.fromkeys(
                (2 * width + statistics + more for more in (8_256, 8_192, 8_196, 16_448, 16_452)),
                "You counted token numbers or targets. The batch existed before the step, and the"
                " loss has released its targets.",
            ),
            **dict.fromkeys(
                (2 * width + statistics + logits + more for more in (0, 16_452)),
                "You counted the log-softmax here. It belongs to `logits`.",
            ),
        },
        "logits": {
            logits: (
                "You counted one tensor. Backward has already made two more of the logits' size."
            ),
            2 * logits: (
                "You counted two tensors. These are three: the result of log-softmax, its gradient,"
                " and the gradient of the logits."
            ),
            4 * logits: (
                "You counted the logits themselves. They have been released, because the gradient"
                " of log-softmax needs only its result."
            ),
        },
    }
    if not isinstance(answer, Mapping) or set(answer) != set(wanted):
        names = join_labels(f"`{name}`" for name in wanted)
        return wrong(text("Give a dictionary with the keys {names}.", names=names), exact=True)
    if all(part is None for part in answer.values()):
        return not_answered()
    close = {"state": (-400,), "logits": (8,)}  # Adam's step counts; the loss and its gradient
    for name, count in wanted.items():
        if any(expect_number(answer[name], count + change) for change in close.get(name, ())):
            continue
        verdict = expect_number(
            answer[name],
            count,
            wrong_answers={
                **_as_read_off(count),
                count // 4: "You counted elements. In fp32, each takes 4 bytes.",
                **mistakes[name],
            },
        )
        if not verdict:
            return of_row(name, verdict)
    return right(
        "Right: weights and Adam's state, eight layers, what norm and head keep, and three tensors"
        " of the logits' size."
    )


@exercise(hint="Which numbers does a frozen weight need besides itself? And a trained one?")
def check_adapter_bytes(answer: Any) -> Verdict:
    """Check the bytes of weights, gradients and Adam's state with adapters.

    7e9 weights are frozen in bf16, and adapters of 2e7 weights are trained in fp32.
    """
    frozen, trained = 7 * 10**9, 2 * 10**7
    exact = 2 * frozen + 16 * trained
    return expect_number(
        answer,
        exact,
        wrong_answers={
            exact / 10**9: "That is in GB. Give bytes.",
            round(exact, -8): "You rounded the right number. Multiply whole numbers, to the byte.",
            2 * frozen: (
                "You counted the frozen weights alone. The adapters have weights, gradients and"
                " state."
            ),
            16 * trained: "You counted the adapters alone. The frozen weights are in memory, too.",
            **dict.fromkeys(
                (16 * frozen, 16 * (frozen + trained), 14 * frozen + 16 * trained),
                (
                    "You counted gradients or state of frozen weights. They have no gradient and"
                    " no state."
                ),
            ),
            4 * frozen + 16 * trained: (
                "You took 4 bytes per frozen weight. They are bf16 here, 2 bytes each."
            ),
            **dict.fromkeys(
                (2 * frozen + count * trained for count in (2, 4, 8, 12)),
                (
                    "You took too few bytes per trained weight. It has four fp32 numbers:"
                    " itself, its gradient, and two moments."
                ),
            ),
        },
        why="2 bytes per frozen weight and 16 per trained one make 14.32 GB instead of 112.",
    )


_ONE_SEQUENCE = (
    "You seem to have measured with one sequence. Its peak is at another place, the end of"
    " backward."
)
# Batch size that a line through other measurements gives -> the measurement that was at fault.
_LINES = {
    51: _ONE_SEQUENCE,  # and with eight
    54: _ONE_SEQUENCE,  # and with four
    52: (
        "You seem to have measured first steps, which have no Adam state yet. Measure the"
        " second step of"
        " each size."
    ),
    53: (
        "You added up the kinds of section 1.3. They are not all in memory at the same time, so"
        " measure the peak."
    ),
}


@exercise(
    hint=(
        (
            "Two measurements determine a line: the bytes per sequence, and the bytes that don't"
            " grow. Are both peaks at the same place in the step?"
        ),
        (
            "Measure two sizes whose peak is at the start of backward. Their difference, divided"
            " by the number of sequences between them, is the bytes per sequence."
        ),
    )
)
def check_largest_batch(answer: Any) -> Verdict:
    """Check the largest batch of the lesson's decoder with Adam within 1,300 MB."""
    wanted = "Give a whole number from 1 to 10,000."
    for mistaken, message in _LINES.items():
        if expect_number(answer, mistaken):
            raise WrongAnswer(text("Not yet. {reason}", reason=message), exact=True)
    batch, here, above = largest_that_fits(
        answer, range(1, 10_001), _peak_with_adam, 1_300_000_000, wanted
    )
    return right(
        text(
            (
                "Right. The peak is {here:,} bytes with {batch} sequences, and {above:,} bytes"
                " with {next}."
            ),
            batch=batch,
            here=here,
            next=batch + 1,
            above=above,
        )
    )


@cache
def _peak_with_adam(batch: int) -> int:
    with symbolic():
        model = Decoder(vocabulary=2048, hidden=256, heads=8, layers=8, sequence=128)
        adam = torch.optim.Adam(model.parameters())
        tokens = random_tokens(batch, 128, 2048)
        for _ in range(2):  # in the second step Adam's state exists from the start
            model.zero_grad()
            with MemoryMeter(model, adam) as meter:
                model.loss(tokens).backward()
                adam.step()
    return meter.peak_bytes
