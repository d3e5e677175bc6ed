"""The exercises of lesson 01."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from course_lib.memory import MemoryMeter, symbolic
from course_lib.models import Decoder, random_tokens
from course_lib.teaching import Verdict, expect_number, text
from course_lib.teaching.exercises import exercise, largest_that_fits, right, wrong

WEIGHTS = 6_875_648  # of the course's decoder


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
        }
        if kind == "optimizer":
            reasons = {
                2 * WEIGHTS: "That counts numbers. Each takes 4 bytes.",
                4 * WEIGHTS: "That is one number a weight. Adam keeps two.",
                12 * WEIGHTS: "Master weights are for weights in half precision; here the weights themselves are fp32.",
            }
        verdict = expect_number(answer[kind], count, wrong_answers=reasons)
        if not verdict and not (kind == "optimizer" and answer[kind] == count + 400):
            return wrong(text("`{kind}`: {message}", kind=kind, message=verdict.message))
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
    for sizes in ({"b": 8, "s": 128, "h": 256, "a": 8}, {"b": 3, "s": 40, "h": 64, "a": 4}):
        given = answer(**sizes)
        if not isinstance(given, Mapping) or set(given) != set(rows):
            return wrong("The function gives a dictionary with the five rows of the table above.")
        if not any(given.values()):
            return wrong("Not answered yet.")
        for name, formula in rows.items():
            verdict = expect_number(given[name], formula(**sizes), wrong_answers=_slips(name, formula(**sizes), sizes))
            if not verdict:
                shown = ", ".join(f"{letter} = {size}" for letter, size in sizes.items())
                return wrong(text("`{row}`, at {sizes}: {message}", row=name, sizes=shown, message=verdict.message))
    return right("Right, for two layers of different sizes: 16sbh + as²b elements, and 4sb for the statistics.")


def _slips(row: str, count: int, sizes: Mapping[str, int]) -> dict[float, str]:
    slips: dict[float, str] = {count // 4: "That counts elements; fp32 takes 4 bytes each."}
    if row == "probabilities":
        slips[2 * count] = "P is seen twice and is one storage."
        slips[count // sizes["a"]] = "There is one s × s matrix for each head."
    if row == "attention":
        slips[count * 4 // 5] = "One is missing: the input of the output projection is kept, too."
        slips[count * 7 // 5] = "The projection's input is kept once: Q, K and V come out of one product."
    if row == "feed-forward":
        slips[count * 5 // 9] = "Two tensors of it are 4h wide: GELU's input, and what the last product gets."
        slips[count * 8 // 9] = "Its own input is kept, too: h wide."
    if row in ("norms", "statistics"):
        slips[count // 2] = (
            "There are two LayerNorms." if row == "norms" else "Two numbers a token, and two LayerNorms."
        )
    return slips


def check_whole_peak(answer: Any) -> Verdict:
    """The peak of the plain step of the course's decoder, added up from its parts: all but two numbers of 4 bytes."""
    layers, head, logits = 8 * 20_987_904, 2 * 4 * 8 * 128 * 256 + 8 * 8 * 128, 4 * 8 * 128 * 2048
    state = 12 * WEIGHTS + 400
    exact = state + layers + head + 3 * logits
    if isinstance(answer, int) and answer in (exact - 400, exact + 8):
        answer = exact  # without the step counts of Adam; with the loss and its gradient
    return expect_number(
        answer,
        exact,
        wrong_answers={
            exact + 4 * WEIGHTS: "No gradient of a parameter is there yet.",
            exact - 2 * logits: "Backward has begun: two tensors of the logits' size have come.",
            exact - logits: "Three tensors of the logits' size: one kept, two temporary.",
            exact - head: "The last norm's input and statistics and the head's input are kept, too.",
            exact - 8 * WEIGHTS - 400: "Adam's state is there all the time.",
            exact - 7 * 20_987_904: "There are eight layers.",
        },
        why="Weights and Adam's state, eight layers, what the head keeps, and three times the logits.",
        hint="Which of the five kinds are there when backward starts? The last exercise gave one layer.",
    )


def check_optimizer_bytes(answer: Any) -> Verdict:
    """Bytes that mixed-precision Adam keeps as optimizer state, master weights included, for 7e9 parameters."""
    billion = 10**9
    return expect_number(
        answer,
        84 * billion,
        wrong_answers={
            84: "That is in GB. Give bytes.",
            84 * 2**30: "That is 84 GiB; GB means 10⁹ bytes here.",
            12: "That is per parameter. There are 7 billion.",
            56 * billion: "Those are the two moments. The fp32 master weights are kept by the optimizer as well.",
            112 * billion: (
                "That is all 16 bytes a parameter; the bf16 weight (2) and its gradient (2) are not the optimizer's."
            ),
            28 * billion: "That is one fp32 number a parameter. The optimizer keeps three.",
        },
        why="Master weight, first and second moment: 3 × 4 = 12 bytes for each of 7 billion parameters, 84 GB.",
        hint="How many fp32 numbers does the optimizer keep for each parameter, and what is each of them for?",
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
            one + 5 * wide: (
                "One wide tensor too many: SiLU keeps its input, the product both factors, the last layer its input."
            ),
            (one + 4 * wide) / 10**6: "That is in MB. Give bytes.",
            (one + 4 * wide) // 4: "That is the number of elements. fp32 takes 4 bytes each.",
            3 * one + 4 * wide: "The output is not saved by the MLP itself.",
        },
        why="The input once, and four wide tensors: SiLU's input, both factors of the product, the product.",
        hint="Go through the operators one by one: what does each need for its gradient?",
    )
