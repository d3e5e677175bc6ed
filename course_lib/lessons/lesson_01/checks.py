"""The exercises of lesson 01."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from course_lib.labels import listed
from course_lib.memory import MemoryMeter, symbolic
from course_lib.models import Decoder, random_tokens
from course_lib.teaching import Verdict, expect_number, text
from course_lib.teaching.exercises import (
    Refused,
    exercise,
    largest_that_fits,
    not_answered,
    right,
    wrong,
)

WEIGHTS = 6_875_648  # parameters of the course's decoder


def _as_read_off(count: int) -> dict[float, str]:
    """Return the mistake for each form of the right count in a table: in MB, or rounded."""
    rounded = "Right but for rounding: multiply whole numbers, to the byte."
    return {
        **{round(count, -digits): rounded for digits in range(3, 7)},
        **{round(count / 10**6, digits): "That is in MB. Give bytes." for digits in range(7)},
        **{round(count / 2**20, digits): "That is in MiB. Give bytes." for digits in range(7)},
    }


@exercise(
    hint=(
        (
            "Count one layer first: four matrices, their biases, two LayerNorms. Then eight, and"
            " what is beside them."
        ),
        "A layer has 12h² + 13h weights. How many numbers of each kind does one weight have?",
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
            "A dictionary with the keys `weights`, `parameter`, `gradient` and `optimizer` is"
            " wanted.",
            exact=True,
        )
    if all(count is None for count in answer.values()):
        return not_answered()
    counted = expect_number(answer["weights"], WEIGHTS, wrong_answers=_counts_of_weights())
    if not counted:
        return _of_row("weights", counted)
    for kind, count in list(wanted.items())[1:]:
        reasons = {
            WEIGHTS: "That counts numbers. Each takes 4 bytes.",
            2 * WEIGHTS: "That is 2 bytes a number; here it is 4.",
            8 * WEIGHTS: "That is two numbers a weight. One is enough here.",
        }
        if kind == "optimizer":
            reasons = {
                2 * WEIGHTS: "That counts numbers. Each takes 4 bytes.",
                4 * WEIGHTS: "That is one number a weight. Adam keeps two.",
                12 * WEIGHTS: (
                    "Master weights are for weights in half precision; here the weights themselves"
                    " are fp32."
                ),
                16 * WEIGHTS: "That is all three kinds together.",
            }
        if kind == "gradient":
            reasons[4 * 8 * WEIGHTS] = (
                "A batch has one gradient: those of its sequences are added up."
            )
        verdict = expect_number(
            answer[kind], count, wrong_answers={**_as_read_off(count), **reasons}
        )
        if not verdict and not (kind == "optimizer" and expect_number(answer[kind], count + 400)):
            return _of_row(kind, verdict)
    return right("Right: one number a weight, one for its gradient, two for Adam.")


def _counts_of_weights() -> dict[int, str]:
    """Return wrong numbers of weights, and what was forgotten."""
    h = 256
    forgotten = {
        8 * 9 * h: "Each matrix has a bias, as long as its output: 3h + h + 4h + h a layer.",
        8 * 4 * h: "Each layer has two LayerNorms, with 2h numbers each.",
        8 * 13 * h: "A layer has biases and LayerNorms, too: 13h numbers.",
        2048 * h: "The embedding of the words is there, too.",
        128 * h: "The embedding of the positions is there, too.",
        2 * h: "The last LayerNorm is there, too: 2h numbers.",
        17 * h: "You gave each LayerNorm h numbers. It has 2h: a scale and a shift.",
        16 * h: "You gave each layer's two LayerNorms h numbers. Each has 2h: a scale and a shift.",
        -2048 * h: "The head is the embedding: one tensor, counted once.",
    }
    counts = {WEIGHTS - count: message for count, message in forgotten.items()}
    for (a, first), (b, second) in itertools.combinations(forgotten.items(), 2):
        counts.setdefault(WEIGHTS - a - b, listed([first, second], " "))
    counts[4 * WEIGHTS] = "That is in bytes. How many numbers are there?"
    return counts


def _of_row(name: str, verdict: Verdict) -> Verdict:
    return replace(
        verdict, message=text("{name}: {message}", name=f"`{name}`", message=verdict.message)
    )


# Cases for the reader's meter: a name, code that runs under it, and (bytes live at the end, bytes
# at the peak).
def _a_view(held: list) -> tuple[int, int]:
    held.append(torch.empty(100).view(10, 10).t()[1:].detach())  # only the storage stays alive
    return 400, 400


def _in_place(held: list) -> tuple[int, int]:
    held.append(torch.empty(100))
    for _ in range(5):
        held[0].add_(1)
    return 400, 400


def _into_out(held: list) -> tuple[int, int]:
    held += [torch.empty(100), torch.empty(100)]
    for _ in range(5):
        torch.neg(held[0], out=held[1])
    return 800, 800


def _a_death(held: list) -> tuple[int, int]:
    x = torch.empty(100)
    for _ in range(5):
        x = x * 2  # the old tensor dies after the new one was created
    held.append(x)
    return 400, 800


def _several_results(held: list) -> tuple[int, int]:
    held += torch.empty(100).max(0)  # a value and its index, two storages; the input dies
    return 12, 412


def _one_number_of_many(held: list) -> tuple[int, int]:
    held.append(torch.empty_strided((10,), (4,)))  # every fourth of 37 numbers
    return 148, 148


def _three_results_in_one_storage(held: list) -> tuple[int, int]:
    product, bias = torch.empty(1, 5, 12), torch.empty(12)
    held += torch._transform_bias_rescale_qkv(product, bias, 2)  # Q, K and V of two heads
    return 240, 528


_METER_CASES = (
    (
        _a_view,
        (
            "A view shares its base's storage, which is not new, and lives as long as one of them"
            " does."
        ),
    ),
    (_in_place, "What an operator changes in place went in: it is not new."),
    (_into_out, "What is given as `out=` went in, too: by name, so it stands in `kwargs`."),
    (_a_death, "A tensor that dies takes its bytes with it."),
    (_several_results, "An operator may give several tensors: each storage counts."),
    (
        _one_number_of_many,
        (
            "You counted the tensor's own numbers. Its storage may be larger: count"
            " `storage.nbytes()`."
        ),
    ),
    (
        _three_results_in_one_storage,
        (
            "You counted one new storage for each of three results that share it. Count each"
            " storage once."
        ),
    ),
)


@exercise(
    hint=(
        (
            "The storages of the result that are not among those of the arguments are new. What"
            " must happen to each?"
        ),
        (
            "Collect the `_cdata` of `storages((args, kwargs))`; `self.count(storage.nbytes())` for"
            " each other one, once, and `weakref.finalize(storage, self.count, -storage.nbytes())`."
        ),
    )
)
def check_meter(answer: Any) -> Verdict:
    """Check a dispatch mode with `live` and `peak` in bytes, on cases that are easy to miss."""
    for number, (case, reason) in enumerate(_METER_CASES):
        meter, held = answer(), []
        with meter:
            live, peak = case(held)
            found = meter.live, meter.peak
        del held
        if number == 0 and found == (0, 0):
            return not_answered()
        if found != (live, peak):
            message = (
                "live {live:,} bytes, at the peak {peak:,}; it is {right:,} and {most:,}. {reason}"
            )
            values = {
                "live": found[0],
                "peak": found[1],
                "right": live,
                "most": peak,
                "reason": reason,
            }
            return wrong(text("Not yet: {case}", case=text(message, **values)), exact=True)
    return right(
        "Right: views, in place, `out=`, several results, shared storages, and tensors that die."
    )


@exercise(
    hint=(
        (
            "Go through the eight lines: what does each operator's derivative need? Its weight"
            " doesn't count."
        ),
        (
            "How many tensors does that row have, and how large is each in b, s, h and a? Multiply"
            " by 4 bytes."
        ),
    )
)
def check_layer_formula(answer: Any) -> Verdict:
    """Check a function of b, s, h and a that returns the bytes of each row.

    The sizes are such that exchanged letters give other results.
    """
    rows: dict[str, Callable[..., int]] = {
        "norms": lambda b, s, h, a: 8 * s * b * h,
        "statistics": lambda b, s, h, a: 16 * s * b,
        "attention": lambda b, s, h, a: 20 * s * b * h,
        "probabilities": lambda b, s, h, a: 4 * a * s * s * b,
        "feed-forward": lambda b, s, h, a: 36 * s * b * h,
    }
    shown = {"b": 8, "s": 128, "h": 256, "a": 8}  # the sizes of the list
    other = {"b": 3, "s": 40, "h": 70, "a": 5}  # exchanged letters give other results
    given, of_the_list = answer(**other), answer(**shown)
    if not isinstance(given, Mapping) or set(given) != set(rows):
        return wrong("The function gives a dictionary with the five rows.")
    if not any(given.values()):
        return not_answered()
    if all(expect_number(given[name], formula(**other) // 2) for name, formula in rows.items()):
        return wrong(
            "Every row is half of what it is: that is 2 bytes a number; here it is 4.", exact=True
        )
    for name, formula in rows.items():
        verdict = expect_number(
            given[name], formula(**other), wrong_answers=_mistakes(name, formula(**other), **other)
        )
        fits_the_list = bool(expect_number(of_the_list[name], formula(**shown)))
        if bool(verdict) != fits_the_list:
            sizes = listed(f"{letter} = {size}" for letter, size in other.items())
            message = (
                "{name} fits either the course's layer or one with {sizes}, not both. Write it with"
                " the letters."
            )
            return wrong(text(message, name=f"`{name}`", sizes=sizes), exact=True)
        if not verdict:
            return _of_row(name, verdict)
    return right(
        "Right, for two layers of different sizes: 16sbh + as²b elements, and 4sb for the"
        " statistics."
    )


def _mistakes(row: str, count: int, *, b: int, s: int, h: int, a: int) -> dict[float, str]:
    """Return wrong numbers of bytes for a row with `count` bytes, and the mistake of each."""
    one = 4 * s * b * h  # bytes of a tensor (b, s, h)
    mistakes: dict[float, str] = {
        0: "This row is still empty.",
        count // b: "Each of the b sequences has its own.",
        count // 2: "That is 2 bytes a number; here it is 4.",
        count // 4: "That counts elements; fp32 takes 4 bytes each.",
    }
    if row == "norms":
        mistakes[one] = "There are two LayerNorms."
        mistakes[4 * one] = (
            "Their inputs alone: what they give is what the next Linear gets, and is counted there."
        )
        mistakes[2 * one + 16 * h] = "Weights don't count: they are there anyway."
    if row == "statistics":
        mistakes[count // 2] = "Two numbers a token, and two LayerNorms."
        mistakes[16 * h] = (
            "You counted one mean and one deviation for each feature. LayerNorm has them for each"
            " token."
        )
    if row == "probabilities":
        mistakes[count // a] = mistakes[count // a // b] = (
            "There is one s × s matrix for each head."
        )
        mistakes[2 * count] = (
            "P alone, once: softmax's derivative needs no S, and the product with V shares P's"
            " storage."
        )
        mistakes[count // 2] = (
            "The mask saves nothing: the whole s × s matrix is there. Or is that 2 bytes a number?"
        )
        mistakes[2 * a * s * (s + 1) * b] = (
            "You counted the triangle that the causal mask leaves. P is stored whole, zeros"
            " included: s × s."
        )
    if row == "attention":
        mistakes[3 * one] = "Q, K and V are three; the inputs of the two projections are kept, too."
        mistakes[4 * one] = "One is missing: the input of the output projection is kept, too."
        mistakes[6 * one] = "One too many: `y`, `q`, `k`, `v` and `P @ v` are five."
        mistakes[5 * one + 4 * 4 * h * h] = "Weights don't count: they are there anyway."
        mistakes[7 * one] = (
            "The projection's input is kept once: Q, K and V come out of one product."
        )
        mistakes[5 * one + 4 * a * s * s * b] = "P has a row of its own."
    if row == "feed-forward":
        for width in (3, 5, 6):
            mistakes[width * one] = (
                "Two tensors of it are 4h wide: GELU's input, and what the last product gets."
            )
        mistakes[8 * one] = "Its own input is kept, too: h wide."
        mistakes[10 * one] = (
            "You counted what the last product returns. It is added to x, and an addition keeps"
            " nothing."
        )
        mistakes[13 * one] = "GELU's output is the last product's input: one tensor, not two."
        mistakes[9 * one + 4 * 8 * h * h] = "Weights don't count: they are there anyway."
    return mistakes


@exercise(
    hint=(
        "Which of the five kinds are there when backward starts? Exercise 3 gave one layer.",
        (
            "Weights and Adam's state; eight times your sum; two inputs (b, s, h), two numbers a"
            " token; three logits."
        ),
    )
)
def check_whole_peak(answer: Any) -> Verdict:
    """Check the parts of the baseline's peak; only two numbers of 4 bytes are left out."""
    layer, logits, width, statistics = (
        20_987_904,
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
            4 * WEIGHTS: "Adam's state is there all the time, too.",
            8 * WEIGHTS: "The weights are there all the time, too.",
            **dict.fromkeys(
                (16 * WEIGHTS, 16 * WEIGHTS + 400), "No gradient of a parameter is there yet."
            ),
        },
        "layers": {
            layer: "There are eight layers.",
            8 * (layer - 4 * 8 * 8 * 128**2): (
                "You left out P. This decoder's attention keeps it: your rows of exercise 3 have"
                " it."
            ),
        },
        "norm and head": {
            width: "The norm keeps its input and statistics, and the head keeps its own input.",
            2 * width + statistics + 2 * 4 * 256: (
                "You counted the norm's weights here. They are in `state` already."
            ),
            2 * width: "The norm keeps its statistics, too: two numbers a token.",
            width + statistics: (
                "One is missing: the norm keeps its input, and the head keeps its own."
            ),
            **dict.fromkeys(
                (2 * width + statistics + more for more in (8_256, 8_192, 8_196, 16_448, 16_452)),
                "Token numbers and targets don't count: the batch was there before, the loss has"
                " let go of them.",
            ),
            **dict.fromkeys(
                (2 * width + statistics + logits + more for more in (0, 16_452)),
                "The logits have a part of their own.",
            ),
        },
        "logits": {
            logits: "Backward has begun: two more tensors of the logits' size have come.",
            2 * logits: (
                "Three: the result of log-softmax is kept, its gradient and that of the logits are"
                " temporary."
            ),
            4 * logits: (
                "The logits themselves are gone: the gradient of log-softmax needs its result only."
            ),
        },
    }
    if not isinstance(answer, Mapping) or set(answer) != set(wanted):
        names = listed(f"`{name}`" for name in wanted)
        return wrong(text("A dictionary with the keys {names} is wanted.", names=names), exact=True)
    if all(part is None for part in answer.values()):
        return not_answered()
    close = {"state": (-400,), "logits": (8,)}  # Adam's step counts; the loss and its gradient
    for name, count in wanted.items():
        if any(expect_number(answer[name], count + change) for change in close.get(name, ())):
            continue
        verdict = expect_number(
            answer[name], count, wrong_answers={**_as_read_off(count), **mistakes[name]}
        )
        if not verdict:
            return _of_row(name, verdict)
    return right(
        "Right: weights and Adam's state, eight layers, what the head keeps, and three times the"
        " logits."
    )


@exercise(hint="What does a frozen weight need besides itself? And a trained one?")
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
            round(exact, -8): "Right but for rounding: multiply whole numbers, to the byte.",
            2 * frozen: "The adapters have weights, gradients and state, too.",
            16 * trained: "The frozen weights are there, too.",
            **dict.fromkeys(
                (16 * frozen, 16 * (frozen + trained), 14 * frozen + 16 * trained),
                "Frozen weights have no gradient and no state.",
            ),
            4 * frozen + 16 * trained: (
                "Frozen weights are bf16 here, 2 bytes each, and have no gradient."
            ),
            **dict.fromkeys(
                (2 * frozen + count * trained for count in (2, 4, 8, 12)),
                "A trained weight takes four fp32 numbers: itself, its gradient, and two moments.",
            ),
        },
        why="2 bytes for each frozen weight and 16 for each trained one: 14.32 GB in place of 112.",
    )


# Batch size that a line through other measurements gives -> the measurement that was at fault.
_LINES = {
    23: "Did you measure with one sequence? Its peak is another one, at the end of backward.",
    19: (
        "You measured first steps, which have no Adam state yet. Measure the second step of each"
        " size."
    ),
}


@exercise(
    hint=(
        (
            "Two measurements make a line: what a sequence adds, and what does not grow. Do both"
            " peaks stand at one place?"
        ),
        (
            "With one sequence the peak stands at the end of backward (section 1.3). Measure with 4"
            " and with 8."
        ),
    )
)
def check_largest_batch(answer: Any) -> Verdict:
    """Check the largest batch of the lesson's decoder with Adam within 500 MB."""
    wanted = "A whole number from 1 to 10,000 is wanted."
    for mistaken, message in _LINES.items():
        if expect_number(answer, mistaken):
            raise Refused(text("Not yet. {reason}", reason=message), exact=True)
    batch, here, above = largest_that_fits(
        answer, range(1, 10_001), _peak_with_adam, 500_000_000, wanted
    )
    return right(
        text(
            "Right. {batch} sequences peak at {here:,} bytes, {next} would take {above:,}.",
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


@exercise(hint="Go through the operators one by one: what does each need for its gradient?")
def check_swiglu_bytes(answer: Any) -> Verdict:
    """Check the bytes that a SwiGLU MLP saves for backward.

    It has 512 tokens, 256 features and 1024 inside, in fp32.
    """
    tokens, hidden, inner = 512, 256, 1024
    one, wide = 4 * tokens * hidden, 4 * tokens * inner
    return expect_number(
        answer,
        one + 4 * wide,
        wrong_answers={
            2 * one + 4 * wide: (
                "You counted the input twice. Both projections read it, but it is one storage."
            ),
            one + 3 * wide: (
                "One tensor of the wide ones is missing: the product keeps both of its factors,"
                " SiLU keeps its input, and the last projection keeps its own input."
            ),
            4 * wide: "The input of the two projections is saved as well.",
            one + 2 * wide: (
                "The gate's branch keeps more: SiLU keeps its input, and the product both factors."
            ),
            one + 5 * wide: (
                "One wide tensor too many: SiLU keeps its input, the product both factors, the last"
                " layer its input."
            ),
            **_as_read_off(one + 4 * wide),
            (one + 4 * wide) // 4: "That is the number of elements. fp32 takes 4 bytes each.",
            (one + 4 * wide) // 2: "That is 2 bytes a number; here it is 4.",
            3 * one + 4 * wide: "The output is not saved by the MLP itself.",
        },
        why=(
            "The input once, and four wide tensors: SiLU's input, both factors of the product, the"
            " product."
        ),
    )
