"""The exercises of lesson 01: bytes of a step, formulas of a layer, and memory meters."""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from course_lib._torch.tensors import tree_leaves
from course_lib.labels import join_labels, verbatim
from course_lib.lessons.ledger import LAYER_BYTES
from course_lib.memory import MemoryMeter, symbolic
from course_lib.models import Decoder, random_tokens
from course_lib.teaching import Verdict, expect_number, text
from course_lib.teaching.exercises import (
    WrongAnswer,
    cases,
    draw_case,
    exercise,
    largest_that_fits,
    not_answered,
    right,
    wrong,
)


def of_row(name: str, verdict: Verdict) -> Verdict:
    """Put the name of a row before the message of its verdict."""
    return replace(
        verdict, message=text("{name}: {message}", name=f"`{name}`", message=verdict.message)
    )


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


_TWO_BYTES = "You took 2 bytes per number. These are fp32 numbers of 4 bytes."
_WEIGHTS = "You counted weights, too. They are in memory anyway, so leave them out."
_HALF = "Each of your rows is half of the right one. You took 2 bytes per number, but fp32 takes 4."

Formula = Callable[..., int]


def _gpt_rows() -> dict[str, Formula]:
    return {
        "norms": lambda b, s, h, a: 8 * s * b * h,
        "statistics": lambda b, s, h, a: 16 * s * b,
        "attention": lambda b, s, h, a: 20 * s * b * h,
        "probabilities": lambda b, s, h, a: 4 * a * s * s * b,
        "feed-forward": lambda b, s, h, a: 36 * s * b * h,
    }


def _llama_rows() -> dict[str, Formula]:
    return {
        "norms": lambda b, s, h, a, n, f: 16 * s * b * h,
        "statistics": lambda b, s, h, a, n, f: 8 * s * b,
        "attention": lambda b, s, h, a, n, f: 4 * s * b * (3 * h + 2 * n * h // a),
        "probabilities": lambda b, s, h, a, n, f: 4 * a * s * b,
        "feed-forward": lambda b, s, h, a, n, f: 4 * s * b * (h + 4 * f),
    }


# The sizes of the list in the lesson, and other ones, for which exchanged letters give other
# results.
Sizes = dict[str, int]
_GPT_SIZES = {"b": 8, "s": 128, "h": 256, "a": 8}, {"b": 7, "s": 44, "h": 70, "a": 5}
_LLAMA_SIZES = (
    {**_GPT_SIZES[0], "n": 2, "f": 896},
    {"b": 3, "s": 44, "h": 70, "a": 10, "n": 2, "f": 50},
)


def _draw_gpt(rng: random.Random) -> Sizes:
    a = rng.randint(3, 9)
    return {"b": rng.randint(2, 9), "s": rng.randint(20, 60), "h": a * rng.randint(5, 15), "a": a}


def _draw_llama(rng: random.Random) -> Sizes:
    n = rng.randint(2, 4)
    a = n * rng.randint(2, 5)
    return {**_draw_gpt(rng), "h": a * rng.randint(5, 15), "a": a, "n": n, "f": rng.randint(20, 90)}


@exercise(
    hint=(
        "Go through the eight lines: what does the derivative of each operator need, apart from its"
        " weight?",
        "How many tensors does this row have, and how many numbers has each, in b, s, h and a?"
        " Multiply by 4 bytes.",
    )
)
def check_layer_formula(answer: Any) -> Verdict:
    """Check a function of b, s, h and a that returns the bytes of each row."""
    given = answer(**_GPT_SIZES[1])
    open_rows = ("attention", "probabilities", "feed-forward")
    if isinstance(given, Mapping) and not any(given.get(row, 1) for row in open_rows):
        return not_answered()
    return _verdict_on_formula(
        answer,
        _gpt_rows(),
        (_GPT_SIZES[0], cases(_GPT_SIZES[1:], _draw_gpt)),
        _gpt_mistakes,
        "Right, for two layers of different sizes: 16sbh + as²b elements, and 4sb for the"
        " statistics.",
    )


@exercise(
    hint=(
        "Go through the lines of this layer: what does the derivative of each operator need, apart"
        " from its weight?",
        "How many tensors does this row have, and how many numbers has each, in b, s, h, a,"
        " n and f? Multiply by 4 bytes.",
    )
)
def check_llama_formula(answer: Any) -> Verdict:
    """Check a function of b, s, h, a, n and f that returns the bytes of each row."""
    sizes = _LLAMA_SIZES[1]
    given = answer(**sizes)
    gpt = {row: f(**{k: sizes[k] for k in "bsha"}) for row, f in _gpt_rows().items()}
    # Rows of exercise 3 that are still 0 are passed on by the stub.
    if isinstance(given, Mapping) and all(given.get(row, 1) in (0, gpt[row]) for row in gpt):
        return not_answered()
    return _verdict_on_formula(
        answer,
        _llama_rows(),
        (_LLAMA_SIZES[0], cases(_LLAMA_SIZES[1:], _draw_llama)),
        _llama_mistakes,
        "Right, for two layers of different sizes: no term grows with s², and K, V and the"
        " feed-forward network have sizes of their own.",
    )


def _verdict_on_formula(
    answer: Any,
    rows: Mapping[str, Formula],
    sizes: tuple[Sizes, Sequence[Sizes]],
    mistakes_of: Callable[..., dict[float, str]],
    praise: str,
) -> Verdict:
    """Return the verdict on the first wrong row of the first layer that has one, or the praise."""
    shown, others = sizes
    for other in others:
        verdict = _verdict_on_layer(answer, rows, shown, other, mistakes_of)
        if verdict is not None:
            return verdict
    return right(praise)


def _verdict_on_layer(
    answer: Any,
    rows: Mapping[str, Formula],
    shown: Sizes,
    other: Sizes,
    mistakes_of: Callable[..., dict[float, str]],
) -> Verdict | None:
    given, of_the_list = answer(**other), answer(**shown)
    if not isinstance(given, Mapping) or set(given) != set(rows):
        names = join_labels(f"`{name}`" for name in rows)
        return wrong(text("Return a dictionary with the keys {names}.", names=names), exact=True)
    if all(expect_number(given[name], formula(**other) // 2) for name, formula in rows.items()):
        return wrong(_HALF, exact=True)
    for name, formula in rows.items():
        count = formula(**other)
        verdict = expect_number(given[name], count, wrong_answers=mistakes_of(name, count, **other))
        fits_the_list = bool(expect_number(of_the_list[name], formula(**shown)))
        if bool(verdict) != fits_the_list:
            sizes_in_words = join_labels(f"{letter} = {size}" for letter, size in other.items())
            message = (
                "{name} is right for the lesson's layer, but not for one with {sizes}. Use"
                " {letters} instead of the lesson's numbers."
                if fits_the_list
                else "{name} is right for a layer with {sizes}, but not for the lesson's layer. Use"
                " {letters} instead of numbers."
            )
            return wrong(
                text(message, name=f"`{name}`", sizes=sizes_in_words, letters=join_labels(other)),
                exact=True,
            )
        if not verdict:
            return of_row(name, verdict)
    return None


def _any_row(count: int, b: int) -> dict[float, str]:
    return {
        0: "This row is still empty.",
        count // b: "You counted one sequence. Each of the b sequences has its own numbers.",
        count // 2: _TWO_BYTES,
        count // 4: "You counted elements. In fp32, each takes 4 bytes.",
    }


def _gpt_mistakes(row: str, count: int, *, b: int, s: int, h: int, a: int) -> dict[float, str]:
    """Return wrong numbers of bytes for a row with `count` bytes, and the mistake of each."""
    one = 4 * s * b * h  # bytes of a tensor (b, s, h)
    mistakes = _any_row(count, b)
    if row == "norms":
        mistakes[one] = "You counted one LayerNorm. The layer has two."
        mistakes[4 * one] = (
            "You counted the norms' outputs, too. Each is the input of the next Linear, and is"
            " counted in that row."
        )
        mistakes[2 * one + 16 * h] = _WEIGHTS
    if row == "statistics":
        mistakes[count // 2] = (
            "You counted half of them. Each of the two LayerNorms keeps two numbers per token."
        )
        mistakes[16 * h] = (
            "You counted one mean and one deviation for each feature. LayerNorm has them for each"
            " token."
        )
    if row == "probabilities":
        mistakes[count // a] = mistakes[count // a // b] = (
            "You counted one s × s matrix. Each head has its own."
        )
        mistakes[4 * h * s * s * b] = (
            "You multiplied by h. P has one s × s matrix for each of the a heads."
        )
        mistakes[2 * count] = (
            "You counted two matrices. Only P is kept: the derivative of softmax needs no S,"
            " and the"
            " product with V keeps the same storage as softmax."
        )
        mistakes[count // 2] = (
            "You counted half of P. Either you left out what the mask sets to zero, which is stored"
            " like the rest, or you took 2 bytes per number."
        )
        mistakes[2 * a * s * (s + 1) * b] = (
            "You counted the triangle that the causal mask leaves. P is stored whole, zeros"
            " included: s × s."
        )
    if row == "attention":
        mistakes[3 * one] = (
            "You counted Q, K and V. The inputs of the two projections are kept, too."
        )
        mistakes[4 * one] = (
            "You left out one of five tensors. The inputs of both projections are kept, `y` and"
            " `P @ v`."
        )
        mistakes |= dict.fromkeys(
            (count * a, (2 + 3 * a) * one, (1 + 4 * a) * one),
            "You multiplied by a. The a heads share the h numbers, h / a each.",
        )
        mistakes[6 * one] = (
            "You counted one tensor too many. `y`, `q`, `k`, `v` and `P @ v` are five."
        )
        mistakes[5 * one + 4 * 4 * h * h] = _WEIGHTS
        mistakes[7 * one] = (
            "You counted the projection's input three times. Q, K and V come from one"
            " product, which"
            " keeps its input once."
        )
        mistakes[5 * one + 4 * a * s * s * b] = "You counted P here. P has its own row."
    if row == "feed-forward":
        for width in (3, 5, 6):
            mistakes[width * one] = (
                "You took a wrong width. Two of the tensors are 4h wide: the inputs of GELU and of"
                " the last product."
            )
        mistakes[8 * one] = "You left out the network's own input, which is h wide."
        mistakes[10 * one] = (
            "You counted what the last product returns. It is added to x, and an addition keeps"
            " nothing."
        )
        mistakes[13 * one] = (
            "You counted a tensor twice. The output of GELU is the input of the last product."
        )
        mistakes[9 * one + 4 * 8 * h * h] = _WEIGHTS
    return mistakes


def _llama_mistakes(
    row: str, count: int, *, b: int, s: int, h: int, a: int, n: int, f: int
) -> dict[float, str]:
    """Return wrong numbers of bytes for a row with `count` bytes, and the mistake of each."""
    token = 4 * s * b  # bytes of one number per token
    mistakes = _any_row(count, b)
    old_row = _gpt_rows()[row](b=b, s=s, h=h, a=a)
    mistakes[old_row] = "Which operators has this layer instead?"
    if row == "norms":
        mistakes[2 * token * h] = (
            "You counted one tensor per norm. RMSNorm keeps two: `x`, and `m`, which the"
            " gradient of"
            " its weight needs."
        )
        mistakes[6 * token * h] = (
            "You counted three tensors per norm. The result of a norm is the input of the next"
            " Linear, and is counted in that row."
        )
        mistakes[4 * token * h + 8 * h] = _WEIGHTS
    if row == "statistics":
        mistakes[token] = "You counted one norm. The layer has two."
        mistakes[4 * token] = (
            "You counted two numbers per token and norm. RMSNorm has no mean, so it keeps one."
        )
    if row == "attention":
        kv = n * h // a
        mistakes[token * 5 * h] = (
            "You gave K and V as many heads as Q. They have n heads, so each is n · h / a wide."
        )
        mistakes[token * (3 * h + kv)] = "You counted one of K and V. Both are kept."
        mistakes[token * (2 * h + 2 * kv)] = (
            "You left out one of three tensors that are h wide: `y`, `q` and the output of SDPA."
        )
        mistakes[token * (5 * h + 2 * kv)] = (
            "You counted `y` three times. The three projections read the same storage."
        )
        mistakes[token * (4 * h + 2 * kv)] = (
            "You counted one tensor too many. The output of SDPA is also the input of the last"
            " projection, and a rotation keeps neither of its tensors."
        )
        mistakes[token * (4 * h + 3 * kv)] = (
            "You counted `q` and `k` both before and after the rotation. The rotation keeps only"
            " cos and sin."
        )
        mistakes[token * (3 * h + 2 * n)] = (
            "You counted heads as numbers. K and V have n heads with h / a numbers each."
        )
    if row == "probabilities":
        mistakes[4 * a * s * s * b] = (
            "You counted P. SDPA does not keep it. It keeps one number per query and head."
        )
        mistakes[token] = "You counted one number per query. Each head has its own."
        mistakes[4 * n * s * b] = (
            "You counted the heads of K and V. There is one number per query and head of Q."
        )
    if row == "feed-forward":
        mistakes[4 * token * f] = "You left out the network's own input, which is h wide."
        mistakes[token * (2 * h + 4 * f)] = (
            "You counted the input twice. Both projections read the same storage."
        )
        mistakes[token * (h + 3 * f)] = (
            "You left out one of four wide tensors. SiLU keeps its input, the product keeps both"
            " factors, and the last Linear keeps its input."
        )
        mistakes[token * (h + 2 * f)] = (
            "You left out two of four wide tensors. SiLU keeps its input, the product keeps both"
            " factors, and the last Linear keeps its input."
        )
        mistakes[token * (h + 5 * f)] = (
            "You counted one wide tensor too many. The output of SiLU is a factor of the product."
        )
        mistakes[token * (h + 4 * f) + 12 * h * f] = _WEIGHTS
    mistakes[old_row] = text(
        "This is still the row of the other layer. {reason}", reason=mistakes[old_row]
    )
    return mistakes


def storages(values: Any) -> dict[int, torch.UntypedStorage]:
    """Return the storages of all tensors in nested values, by address."""
    tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
    found = [tensor.untyped_storage() for tensor in tensors]
    return {storage._cdata: storage for storage in found}


@dataclass(frozen=True)
class _Case:
    """Code that runs under the reader's meter; what it creates stays alive until the meter is read.

    Attributes:
        code: Statements in one line, because messages show them.
        live, peak: Right bytes at the end, and at the peak.
        before: Code that runs before the meter starts.
    """

    code: str
    live: int
    peak: int
    before: str = ""


_NEW = _Case("x = torch.empty(100)", 400, 400)
# Only the storage stays alive, not the tensor that was created first.
_A_VIEW = _Case("x = torch.empty(100).view(10, 10).t()[1:].detach()", 400, 400)
_A_VIEW_OF_OLD = _Case("y = x.view(10, 10)", 0, 0, before="x = torch.empty(100)")
_CHANGED = _Case("x = torch.empty(100); x.add_(1); x.add_(1)", 400, 400)
_INTO_OUT = _Case("x, y = torch.empty(100), torch.empty(100); torch.neg(x, out=y)", 800, 800)
# The old tensor is released after the new one was created.
_REPLACED = _Case("x = torch.empty(100); x = x * 2; x = x * 2", 400, 800)
# A value and its index have two storages. The input is released.
_TWO_RESULTS = _Case("value, index = torch.empty(100).max(0)", 12, 412)
_EVERY_FOURTH = _Case("x = torch.empty_strided((10,), (4,))", 148, 148)
_QKV = _Case(
    "q, k, v = torch._transform_bias_rescale_qkv(torch.empty(1, 5, 12), torch.empty(12), 2)",
    240,
    528,
)
# So many storages are released that some of the new ones certainly get an old address.
_USED_AGAIN = _Case(
    "x = [torch.empty(100) for _ in range(300)]; del x; x = [torch.empty(100) for _ in range(300)]",
    120_000,
    120_000,
)

_VIEW = (
    "You counted the storage of a view as new. A view shares the storage of its base, which stays"
    " in memory as long as one of them exists."
)
_KEYS = join_labels([_VIEW, "The keys of `given` are addresses, so compare `address`."], " ")
_OLD = (
    "You counted a view of a tensor that existed before the meter started. Its storage was passed"
    " as an argument, so it is not new."
)
_IN_PLACE = (
    "You counted a tensor that an operator changed in place. It was an argument, so its storage is"
    " not new."
)
_OUT = (
    "You counted the tensor that was given as `out=`. It was passed as a keyword argument, so"
    " its storage is in `kwargs` and not new."
)
_RELEASED = (
    "You kept counting tensors that were released. When a storage is released, subtract its bytes."
)
_SEVERAL = (
    "You counted one result of an operator that returns several tensors. Count the storage of each."
)
_TENSOR_GONE = (
    "You stopped counting a storage that is still alive. A tensor can be released before its"
    " storage, which a view still uses, so attach the finalizer to the storage."
)
_OWN = (
    "You counted the bytes of the tensor's own numbers. Its storage can be larger, so count"
    " `storage.nbytes()`."
)
_SHARED = (
    "You counted one new storage for each of three results that share it. Count each storage once."
)
_METER: tuple[tuple[_Case, str], ...] = (
    (_A_VIEW, _VIEW),
    (_CHANGED, _IN_PLACE),
    (_INTO_OUT, _OUT),
    (_A_VIEW_OF_OLD, _OLD),
    (_REPLACED, _RELEASED),
    (_TWO_RESULTS, _SEVERAL),
    (_EVERY_FOURTH, _OWN),
    (_QKV, _SHARED),
)
# The first case that differs is shown. In a meter with a wrong condition, a storage that is left
# out or counted twice is the only possible mistake.
_CONDITION: tuple[tuple[_Case, str], ...] = (
    (_A_VIEW, _KEYS),
    (_CHANGED, _IN_PLACE),
    (_INTO_OUT, _OUT),
    (_A_VIEW_OF_OLD, _OLD),
    (
        _REPLACED,
        "You left out the result of `x * 2`. Its storage is new, although the operator also has an"
        " argument.",
    ),
    (_TWO_RESULTS, "You left out a result of an operator that returns several tensors."),
)


def _draw_cases(rng: random.Random) -> tuple[tuple[_Case, str], ...]:
    """Return new, viewed and released storages of a drawn size."""
    n = rng.randint(200, 900)
    code = f"x = torch.empty({n}); y = x.view(-1, 1); z = x * 2; w = x + z; del w"
    return ((_Case(code, 8 * n, 12 * n), _RELEASED),)


def _counts(meter: Any, case: _Case) -> tuple[int, int]:
    """Run a case under a meter; return its live bytes and its peak."""
    names: dict[str, Any] = {"torch": torch}
    exec(case.before, names)
    with meter:
        exec(case.code, names)
        return meter.live, meter.peak


def _verdict_on_meter(answer: Any, cases: tuple[tuple[_Case, str], ...], praise: str) -> Verdict:
    """Return the verdict on the first case in which the meter is wrong, or the praise."""
    # This case comes first. A meter that remembers all addresses would fail any other one by
    # chance. Such a meter misses some new storages, and the other mistakes don't.
    live, peak = _counts(answer(), _USED_AGAIN)
    if peak > 0 and 0 <= live < _USED_AGAIN.live:
        reason = "An address can be used again after its storage is released."
        return _differs(_USED_AGAIN, live, peak, reason)
    for case, reason in (*cases, *draw_case((), _draw_cases)):
        live, peak = _counts(answer(), case)
        if (live, peak) != (case.live, case.peak):
            if case is _A_VIEW and live < case.live:
                reason = _TENSOR_GONE
            return _differs(case, live, peak, reason)
    return right(praise)


def _differs(case: _Case, live: int, peak: int, reason: str) -> Verdict:
    message = text(
        "Not yet. With `{code}`, your meter counts {live:,} live bytes and a peak of {peak:,}, but"
        " {right:,} and {most:,} are right. {reason}",
        code=verbatim(case.code),
        live=live,
        peak=peak,
        right=case.live,
        most=case.peak,
        reason=reason,
    )
    return wrong(message, exact=True)


@exercise(
    hint=(
        "`given` has the storages of the arguments, by address. Which addresses are new?",
        "A view and a result in place use a storage of an argument. Look up the `address` of the"
        " result.",
    )
)
def check_new_storages(answer: Any) -> Verdict:
    """Check a meter whose condition for a new storage is the reader's."""
    new, view = _counts(answer(), _NEW), _counts(answer(), _A_VIEW)
    if new == view == (0, 0):
        return not_answered()
    if new == (0, 0):
        return wrong(
            "You counted the storages of the arguments. Count the others, which are new.",
            exact=True,
        )
    return _verdict_on_meter(
        answer, _CONDITION, "Right. A storage is new if it is not among those of the arguments."
    )


@exercise(
    hint=(
        "A storage of the result is new if it is not among those of the arguments. What must"
        " happen to each new one?",
        "Look at every result, and at each of its storages once. Which change of `live` belongs to"
        " the moment when a storage is released, and who calls you then?",
    )
)
def check_meter(answer: Any) -> Verdict:
    """Check a dispatch mode with `live` and `peak` in bytes, on cases that are easy to miss."""
    if _counts(answer(), _A_VIEW) == (0, 0):
        return not_answered()
    return _verdict_on_meter(
        answer,
        _METER,
        "Right: views, operators in place, `out=`, several results, shared storages and released"
        " tensors are all counted correctly.",
    )
