"""The exercises of lesson 01."""

import itertools
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from course_lib.labels import listed
from course_lib.memory import MemoryMeter, symbolic
from course_lib.models import Decoder, random_tokens
from course_lib.teaching import Verdict, expect_number, text
from course_lib.teaching.exercises import exercise, largest_that_fits, right, wrong

WEIGHTS = 6_875_648  # of the course's decoder


def _as_read_off(count: int) -> dict[float, str]:
    """The right count as it stands in a table: in MB, or rounded."""
    rounded = "Right but for rounding: multiply whole numbers, to the byte."
    return {
        **{round(count, -digits): rounded for digits in range(3, 7)},
        **{round(count / 10**6, digits): "That is in MB. Give bytes." for digits in range(7)},
    }


@exercise(hint="4 bytes a number. How many numbers of each kind does one weight have?")
def check_training_state(answer: Any) -> Verdict:
    """Bytes of parameters, gradients and Adam's state of the course's decoder, in fp32, by kind."""
    wanted = {"parameter": 4 * WEIGHTS, "gradient": 4 * WEIGHTS, "optimizer": 8 * WEIGHTS}
    if not isinstance(answer, Mapping) or set(answer) != set(wanted):
        return wrong("A dictionary with the keys `parameter`, `gradient` and `optimizer` is wanted.")
    if any(count is None for count in answer.values()):
        return wrong("Not answered yet.")
    for kind, count in wanted.items():
        reasons = {
            WEIGHTS: "That counts numbers. Each takes 4 bytes.",
            2 * WEIGHTS: "That is 2 bytes a number; here it is 4.",
            8 * WEIGHTS: "That is two numbers a weight. One is enough here.",
        }
        if kind == "optimizer":
            reasons = {
                2 * WEIGHTS: "That counts numbers. Each takes 4 bytes.",
                4 * WEIGHTS: "That is one number a weight. Adam keeps two.",
                12 * WEIGHTS: "Master weights are for weights in half precision; here the weights themselves are fp32.",
                16 * WEIGHTS: "That is all three kinds together.",
            }
        verdict = expect_number(answer[kind], count, wrong_answers={**_as_read_off(count), **reasons})
        if not verdict and not (kind == "optimizer" and answer[kind] == count + 400):
            return wrong(text("{name}: {message}", name=f"`{kind}`", message=verdict.message))
    return right("Right: one number a weight, one for its gradient, two for Adam.")


@exercise(hint="Count the elements in the list: how many tensors of that row, and how large is each in b, s, h and a?")
def check_layer_formula(answer: Any) -> Verdict:
    """A function of b, s, h, a that gives the bytes of each row, tried on sizes that tell the letters apart."""
    rows: dict[str, Callable[..., int]] = {
        "norms": lambda b, s, h, a: 8 * s * b * h,
        "statistics": lambda b, s, h, a: 16 * s * b,
        "attention": lambda b, s, h, a: 20 * s * b * h,
        "probabilities": lambda b, s, h, a: 4 * a * s * s * b,
        "feed-forward": lambda b, s, h, a: 36 * s * b * h,
    }
    shown = {"b": 8, "s": 128, "h": 256, "a": 8}  # of the list
    other = {"b": 3, "s": 40, "h": 70, "a": 5}  # tells the letters apart
    given, of_the_list = answer(**other), answer(**shown)
    if not isinstance(given, Mapping) or set(given) != set(rows):
        return wrong("The function gives a dictionary with the five rows of the table above.")
    if not any(given.values()):
        return wrong("Not answered yet.")
    for name, formula in rows.items():
        verdict = expect_number(given[name], formula(**other), wrong_answers=_slips(name, formula(**other), **other))
        fits_the_list = bool(expect_number(of_the_list[name], formula(**shown)))
        if bool(verdict) != fits_the_list:
            sizes = listed(f"{letter} = {size}" for letter, size in other.items())
            said = "{name} fits either the layer of the list or one with {sizes}, not both. Write it with the letters."
            return wrong(text(said, name=f"`{name}`", sizes=sizes))
        if not verdict:
            return wrong(text("{name}: {message}", name=f"`{name}`", message=verdict.message))
    return right("Right, for two layers of different sizes: 16sbh + as²b elements, and 4sb for the statistics.")


def _slips(row: str, count: int, *, b: int, s: int, h: int, a: int) -> dict[float, str]:
    """Wrong numbers of bytes for a row whose right one is `count`, and what went wrong."""
    one = 4 * s * b * h  # bytes of a tensor (b, s, h)
    slips: dict[float, str] = {
        0: "This row is still empty.",
        count // b: "Each of the b sequences has its own.",
        count // 2: "That is 2 bytes a number; here it is 4.",
        count // 4: "That counts elements; fp32 takes 4 bytes each.",
    }
    if row == "norms":
        slips[one] = "There are two LayerNorms."
    if row == "statistics":
        slips[count // 2] = "Two numbers a token, and two LayerNorms."
    if row == "probabilities":
        slips[count // a] = slips[count // a // b] = "There is one s × s matrix for each head."
        slips[2 * count] = "P is seen twice and is one storage."
    if row == "attention":
        slips[3 * one] = "Q, K and V are three; the inputs of the two projections are kept, too."
        slips[4 * one] = "One is missing: the input of the output projection is kept, too."
        slips[6 * one] = "One too many: the list has five tensors in this row."
        slips[7 * one] = "The projection's input is kept once: Q, K and V come out of one product."
        slips[5 * one + 4 * a * s * s * b] = "P has a row of its own."
    if row == "feed-forward":
        for width in (3, 5, 6):
            slips[width * one] = "Two tensors of it are 4h wide: GELU's input, and what the last product gets."
        slips[8 * one] = "Its own input is kept, too: h wide."
        slips[13 * one] = "GELU's output is the last product's input: one tensor, not two."
    return slips


@exercise(hint="Which of the five kinds are there when backward starts? The last exercise gave one layer.")
def check_whole_peak(answer: Any) -> Verdict:
    """The peak of the plain step of the course's decoder, added up from its parts: all but two numbers of 4 bytes."""
    layers, logits, width, statistics = 8 * 20_987_904, 4 * 8 * 128 * 2048, 4 * 8 * 128 * 256, 8 * 8 * 128
    norm = width + statistics
    exact = 12 * WEIGHTS + 400 + layers + norm + width + 3 * logits
    slips = {
        4 * WEIGHTS: "No gradient of a parameter is there yet.",
        -4 * WEIGHTS: "The weights are there all the time.",
        -8 * WEIGHTS: "Adam's state is there all the time.",
        -layers * 7 // 8: "There are eight layers.",
        -2 * logits: "Backward has begun: two tensors of the logits' size have come.",
        -logits: "Three tensors of the logits' size: one kept, two temporary.",
        logits: "The logits themselves are gone: the gradient of log-softmax needs its result only.",
        -norm - width: "The last norm's input and statistics and the head's input are kept, too.",
        -norm: "One is missing: the last norm keeps its input and statistics, and the head keeps its own input.",
        -width: "One is missing: the last norm keeps its input, and the head keeps its own.",
        -statistics: "The last norm keeps its statistics, too: two numbers a token.",
    }
    small = (0, -400, 8, -392)  # Adam's counts of steps; the loss and its gradient
    if any(expect_number(answer, exact + change) for change in small):
        answer = exact
    reasons = _as_read_off(exact)
    for change, (first, said) in itertools.product(small, slips.items()):
        reasons[exact + change + first] = said
    for change, (first, second) in itertools.product(small, itertools.combinations(slips, 2)):
        reasons.setdefault(exact + change + first + second, listed([slips[first], slips[second]], " "))
    return expect_number(
        answer,
        exact,
        wrong_answers=reasons,
        why="Weights and Adam's state, eight layers, what the head keeps, and three times the logits.",
    )


@exercise(hint="What does a frozen weight need besides itself? And a trained one?")
def check_adapter_bytes(answer: Any) -> Verdict:
    """Weights, gradients and Adam's state: 7e9 weights frozen in bf16, adapters of 2e7 trained in fp32."""
    frozen, trained = 7 * 10**9, 2 * 10**7
    exact = 2 * frozen + 16 * trained
    return expect_number(
        answer,
        exact,
        wrong_answers={
            **{
                exact / 10**9: "That is in GB. Give bytes.",
                round(exact, -8): "Right but for rounding: multiply whole numbers, to the byte.",
            },
            2 * frozen: "The adapters have weights, gradients and state, too.",
            16 * trained: "The frozen weights are there, too.",
            **dict.fromkeys(
                (16 * frozen, 16 * (frozen + trained), 14 * frozen + 16 * trained),
                "Frozen weights have no gradient and no state.",
            ),
            4 * frozen + 16 * trained: "Frozen weights are bf16 here, 2 bytes each, and have no gradient.",
            **dict.fromkeys(
                (2 * frozen + count * trained for count in (2, 4, 8, 12)),
                "A trained weight takes four fp32 numbers: itself, its gradient, and two moments.",
            ),
        },
        why="2 bytes for each frozen weight and 16 for each trained one: 14.32 GB in place of 112.",
    )


@exercise(hint="One measurement gives the part that does not grow, a second one the bytes a sequence adds.")
def check_largest_batch(answer: Any) -> Verdict:
    """The largest batch of the lesson's decoder (with Adam) whose step stays within 500 MB."""
    wanted = "A whole number from 1 to 10,000 is wanted."
    batch, here, above = largest_that_fits(answer, range(1, 10_001), _peak_with_adam, 500_000_000, wanted)
    return right(
        text(
            "Right. {batch} sequences peak at {here:,} bytes, {next} would take {above:,}.",
            **{"batch": batch, "here": here, "next": batch + 1, "above": above},
        )
    )


@cache
def _peak_with_adam(batch: int) -> int:
    with symbolic():
        model = Decoder(vocabulary=2048, hidden=256, heads=8, layers=8, sequence=128)
        adam = torch.optim.Adam(model.parameters())
        tokens = random_tokens(batch, 128, 2048)
        for _ in range(2):  # the second step has Adam's state from the start
            model.zero_grad()
            with MemoryMeter(model, adam) as meter:
                model.loss(tokens).backward()
                adam.step()
    return meter.peak_bytes


@exercise(hint="Go through the operators one by one: what does each need for its gradient?")
def check_swiglu_bytes(answer: Any) -> Verdict:
    """Lesson 01: bytes that a SwiGLU MLP (512 tokens, 256 features, 1024 inside, fp32) saves for backward."""
    tokens, hidden, inner = 512, 256, 1024
    one, wide = 4 * tokens * hidden, 4 * tokens * inner
    return expect_number(
        answer,
        one + 4 * wide,
        wrong_answers={
            2 * one + 4 * wide: "You counted the input twice. Both projections read it, but it is one storage.",
            one + 3 * wide: (
                "One tensor of the wide ones is missing: the product keeps both of its factors, SiLU keeps its input, "
                "and the last projection keeps its own input."
            ),
            4 * wide: "The input of the two projections is saved as well.",
            one + 2 * wide: "The gate's branch keeps more: SiLU keeps its input, and the product both factors.",
            one + 5 * wide: (
                "One wide tensor too many: SiLU keeps its input, the product both factors, the last layer its input."
            ),
            **_as_read_off(one + 4 * wide),
            (one + 4 * wide) // 4: "That is the number of elements. fp32 takes 4 bytes each.",
            3 * one + 4 * wide: "The output is not saved by the MLP itself.",
        },
        why="The input once, and four wide tensors: SiLU's input, both factors of the product, the product.",
    )
