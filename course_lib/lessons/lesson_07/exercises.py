"""The exercises of lesson 07."""

import random
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from course_lib._torch import is_symbolic
from course_lib.budget import Estimate, Recipe, estimate
from course_lib.labels import join_labels
from course_lib.memory import MemoryMeter, symbolic
from course_lib.models import Decoder, random_tokens
from course_lib.teaching import Verdict, category_label, phase_label, text
from course_lib.teaching.exercises import (
    WrongAnswer,
    cases,
    exercise,
    expect_number,
    not_answered,
    right,
    wrong,
)

LAYERS = 8  # of the course's decoder


def make_model() -> Decoder:
    """Build the course's decoder."""
    return Decoder(vocabulary=2048, hidden=256, heads=8, layers=LAYERS, sequence=128)


def make_batch() -> torch.Tensor:
    """Return eight sequences of 128 tokens, with the token that follows each."""
    return random_tokens(8, 128, 2048)


# Exercise 1: an estimate
# ----------------------------------------------------------------------------------------------


@exercise(
    hint=(
        (
            "The peak of a step has parameters, Adam's state, gradients and activations. Which of"
            " them does your meter count?"
        ),
        (
            "Adam has no state before its first step. A meter counts tensors that are older than"
            " itself only if you pass it their model and optimizer."
        ),
    )
)
def check_peak_without_memory(function: Any) -> Verdict:
    """Check `function(make_model, make_batch)`: the second step's peak, found on symbolic tensors.

    One network peaks in backward, the other in the optimizer step, so the whole step must be
    measured.
    """
    decoders = (((64, 32, 2, 3, 32), 16), ((64, 64, 4, 1, 4), 1))
    for sizes, batch in cases(decoders, _draw_decoder, count=1):
        vocabulary, hidden, heads, layers, sequence = sizes
        shape = {
            "vocabulary": vocabulary,
            "hidden": hidden,
            "heads": heads,
            "layers": layers,
            "sequence": sequence,
        }
        seen = []
        try:
            answer = function(
                lambda shape=shape, seen=seen: seen.append(is_symbolic()) or Decoder(**shape),
                lambda shape=shape, batch=batch: random_tokens(
                    batch, shape["sequence"], shape["vocabulary"]
                ),
            )
        except Exception:
            if all(seen):
                raise
        if not all(seen):  # an error, if there was one, is a consequence
            return wrong(
                "You called `make_model` outside `with symbolic():`, so the model takes memory.",
                exact=True,
            )
        if answer is None:
            return not_answered()
        if not seen:
            message = "You never called `make_model`. Measure the model that it returns."
            return wrong(message, exact=True)
        peaks, mistakes = _peaks(shape, batch)
        for peak in peaks:
            verdict = expect_number(answer, peak, wrong_answers=mistakes, in_bytes=True)
            if verdict or verdict.exact:
                break
        if not verdict:
            return verdict
    return right(
        "Right for both models: one peaks in backward, the other in the optimizer step. Neither"
        " took any memory."
    )


def _draw_decoder(rng: random.Random) -> tuple[tuple[int, ...], int]:
    return (8 * rng.randint(5, 12), 32, 2, rng.randint(2, 4), rng.randint(24, 40)), rng.randint(
        8, 20
    )


def _inputs(shape: dict[str, int], batch: int) -> int:
    """Return the bytes of the batch."""
    return 8 * batch * (shape["sequence"] + 1)


def _peaks(shape: dict[str, int], batch: int) -> tuple[list[int], dict[float, str]]:
    """Return the peaks of the second step that are right, and those that mistakes give.

    The batch may be created inside the meter's block or before it, and a variable may keep the
    batch or the loss until the optimizer step.
    """
    whole = _step_peak(shape, batch)
    inside = {
        # A fused update creates no temporaries either, so both mistakes may give this peak.
        _step_peak(shape, batch, update=False): (
            "You left out the temporaries of Adam's update. Call `adam.step()` inside the"
            " meter's block, and create Adam with `foreach=False` and without `fused=True`."
        ),
        _step_peak(shape, batch, zero=False): (
            "In your second step, the gradients of the first one are still live. Release them"
            " with `adam.zero_grad()`. With `set_to_none=False` they keep their memory."
        ),
        _step_peak(shape, batch, steps=1): (
            "Adam's state is missing. The first step of Adam creates it, so measure the second step"
            " of Adam, with `MemoryMeter(model, adam)`."
        ),
        _step_peak(shape, batch, watched=False): (
            "Your meter counts neither parameters nor Adam's state, because they are older than the"
            " meter. Create it with `MemoryMeter(model, adam)`."
        ),
    }
    inputs = _inputs(shape, batch)
    extras = [kept + loss for kept in (0, -inputs, inputs) for loss in (0, _LOSS_BYTES)]
    peaks = [whole + extra for extra in extras]
    return peaks, {
        peak + extra: reason
        for extra in extras
        for peak, reason in inside.items()
        if peak + extra not in peaks
    }


_LOSS_BYTES = 4  # one fp32 number


@cache
def _measure_peak(
    items: tuple, batch: int, steps: int, update: bool, zero: bool, watched: bool
) -> int:
    shape = dict(items)
    with symbolic():
        model = Decoder(**shape)
        adam = torch.optim.Adam(model.parameters(), foreach=False)
        for _ in range(steps):
            with MemoryMeter(*[model, adam] * watched) as meter:
                model.loss(random_tokens(batch, shape["sequence"], shape["vocabulary"])).backward()
                if update:
                    adam.step()
            if not update:
                adam.step()
            if zero:
                adam.zero_grad()
    return meter.peak_bytes


def _step_peak(
    shape: dict[str, int],
    batch: int,
    *,
    steps: int = 2,
    update: bool = True,
    zero: bool = True,
    watched: bool = True,
) -> int:
    return _measure_peak(tuple(shape.items()), batch, steps, update, zero, watched)


# Exercise 2: which of two is cheaper
# ----------------------------------------------------------------------------------

_PAIRS = (  # (FLOPs, bytes moved) of one step by two recipes
    # The results, 29.6875 and 87.5, are not whole numbers, so that rounding is detected.
    ((54_600_000_000, 129_000_000), (45_100_000_000, 449_000_000)),
    ((3_000_000_000, 40_000_000), (5_100_000_000, 16_000_000)),
)


def _draw_pair(rng: random.Random) -> tuple[tuple[int, int], tuple[int, int]]:
    flops, moved = rng.randrange(10**9, 10**11), rng.randrange(10**7, 10**8)
    return (
        (flops + rng.randrange(10**9, 10**10), moved),
        (flops, moved + rng.randrange(10**7, 10**9)),
    )


@exercise(
    hint=(
        (
            "One recipe takes more FLOPs, and the other moves more bytes. How many additional"
            " FLOPs does it take to move one byte less?"
        ),
        (
            "The time of a recipe is its FLOPs divided by the rate, plus its moved bytes divided by"
            " the link. Write this down for both recipes, and set the two equal."
        ),
    )
)
def check_break_even(function: Any) -> Verdict:
    """Check `function(first, second)`: the FLOP per byte at which both recipes are equally fast."""
    for one, other in cases(_PAIRS, _draw_pair):
        first, second = (
            SimpleNamespace(flops=flops, moved_bytes=moved) for flops, moved in (one, other)
        )
        expected = (first.flops - second.flops) / (second.moved_bytes - first.moved_bytes)
        mistakes = {
            1 / expected: "You returned bytes per FLOP. Return FLOP per byte.",
            -expected: (
                "Your result has the wrong sign. The recipe with more FLOPs moves fewer bytes,"
                " so the ratio is positive."
            ),
            2 * expected: (
                "Your result is twice as large as it should be. `moved_bytes` already counts"
                " both directions, so do not divide it by 2."
            ),
            expected / 2: (
                "Your result is half as large as it should be. `moved_bytes` already counts"
                " both directions, so do not multiply it by 2."
            ),
            **dict.fromkeys(
                (int(expected), *(round(expected, digits) for digits in (0, 1, 2))),
                "You rounded the result. Return the quotient itself.",
            ),
            first.flops / first.moved_bytes: (
                "You returned the FLOPs per byte of one recipe. Use the differences between the"
                " two recipes."
            ),
            second.flops / second.moved_bytes: (
                "You returned the FLOPs per byte of one recipe. Use the differences between the"
                " two recipes."
            ),
        }
        verdict = expect_number(
            function(first, second), expected, tolerance=1e-6, wrong_answers=mistakes
        )
        if not verdict:
            return verdict
    return right(
        "Right: below this number the recipe that moves more bytes is faster, above it the one"
        " that computes more."
    )


# Exercises 3 to 5: a recipe for a budget
# ------------------------------------------------------------------------------


@exercise(
    hint=(
        "FLOPs may not grow, so nothing may be computed twice. What else makes activations"
        " smaller?",
        "Activations grow with the number of samples that are computed at a time. How many samples"
        " are few enough?",
    )
)
def check_same_flops(recipe: Any) -> Verdict:
    """Check a recipe for 160 MB with the baseline's FLOPs and nothing moved."""
    found = _fitting_estimate(recipe, 160_000_000)
    _refuse_moves(found)
    _refuse_flops_above(found, 1.0)
    message = (
        "Right: {mb}. Micro-batches cost no FLOPs, and only one micro-batch's activations are"
        " live at a time."
    )
    return right(text(message, mb=_mb(found.peak_bytes)))


@exercise(
    hint=(
        (
            "Parameters, gradients and optimizer state take 110 of the 120 MB. What makes the"
            " rest small enough?"
        ),
        (
            "With a checkpoint for each layer, a step takes 1.214 times the baseline's FLOPs."
            " Around which layer does a checkpoint free nothing?"
        ),
    )
)
def check_keeps_clipping(recipe: Any) -> Verdict:
    """Check a recipe for 120 MB with at most 1.19 times the baseline's FLOPs and nothing moved.

    The norm of all gradients must be known before the update.
    """
    if isinstance(recipe, Recipe) and recipe.in_backward:
        return wrong(
            "You update in backward, before the norm of all gradients is known, so clipping is"
            " impossible.",
            exact=True,
        )
    found = _fitting_estimate(recipe, 120_000_000)
    _refuse_moves(found)
    _refuse_flops_above(found, 1.19)
    message = (
        "Right: {mb} at {ratio:.3f} times the FLOPs. A checkpoint around the last layer would free"
        " nothing, because that layer's backward follows its forward at once."
    )
    values = {"mb": _mb(found.peak_bytes), "ratio": found.flops / _baseline().flops}
    if recipe.first_blocks is not None and recipe.first_blocks < LAYERS - 1:
        message = (
            "Right: {mb} at {ratio:.3f} times the FLOPs. A checkpoint around the last layer would"
            " free nothing. The activations of the other layers without a checkpoint still fit"
            " into the budget."
        )
    return right(text(message, **values))


@exercise(
    hint=(
        (
            "Look at the peak of the recipe without checkpoints in section 7.5. It has 27.5 MB"
            " of parameters. What are the next 16.8 MB?"
        ),
        (
            "Together with most of the activations, they are three tensors of the logits' size."
            " Lesson 02 made these tensors smaller."
        ),
    )
)
def check_fifty(recipe: Any) -> Verdict:
    """Check a recipe for 50 MB, by any means."""
    found = _fitting_estimate(recipe, 50_000_000)
    message = (
        "Right: {mb}. Single tensors come back instead of whole layers, and the logits are"
        " computed in chunks."
    )
    return right(text(message, mb=_mb(found.peak_bytes)))


@cache
def _baseline() -> Estimate:
    return estimate(make_model, make_batch, Recipe())


@cache
def _estimate_recipe(recipe: Recipe) -> Estimate:
    return estimate(make_model, make_batch, recipe)


def _fitting_estimate(recipe: Any, budget: int) -> Estimate:
    """Return the estimate of a recipe that fits the budget, in fp32 with Adam.

    A recipe that does not fit is refused with the contents of its peak.
    """
    if not isinstance(recipe, Recipe):
        kind = type(recipe).__name__
        raise WrongAnswer(text("Expected a `Recipe`, got a `{kind}`.", kind=kind), exact=True)
    if (recipe.precision, recipe.optimizer, recipe.ranks) != ("fp32", "adam", 1):
        raise WrongAnswer(
            "Keep the precision, the optimizer and the single device: fp32, Adam and one rank.",
            exact=True,
        )
    try:
        found = _estimate_recipe(recipe)
    except Exception as error:
        raise WrongAnswer(
            text("Your recipe cannot be estimated: {error}.", error=error), exact=True
        ) from None
    if found.peak_bytes > budget:
        peaks = f"{_mb(found.peak_bytes)} > {budget / 1e6:,.0f} MB"
        raise WrongAnswer(
            text(
                "Your recipe does not fit: {peaks}. Its peak has {held}.",
                peaks=peaks,
                held=filled_by(found),
            )
        )
    return found


def filled_by(found: Estimate) -> str:
    """List the categories at a peak, the largest first, and name the phase.

    Categories below half a megabyte are left out.
    """
    held = sorted(
        ((count, name) for name, count in found.at_peak.items() if count >= 500_000), reverse=True
    )
    parts = [
        text("{category} {size} MB", category=category_label(name), size=f"{count / 1e6:.1f}")
        for count, name in held
    ]
    return text(
        "{parts}, in the {phase} phase",
        parts=join_labels(parts),
        phase=phase_label(peak_phase(found)),
    )


def peak_phase(found: Estimate) -> str:
    """Return the phase of a step in which its peak is."""
    return max(found.phase_peaks, key=found.phase_peaks.get)


def _refuse_moves(found: Estimate) -> None:
    if found.moved_bytes:
        raise WrongAnswer(
            text(
                "Your recipe fits, but it moves {mb} to and from the lower tier. Nothing may be"
                " moved here.",
                mb=_mb(found.moved_bytes),
            ),
            exact=True,
        )


def _refuse_flops_above(found: Estimate, limit: float) -> None:
    ratio = found.flops / _baseline().flops
    if ratio > limit:
        raise WrongAnswer(
            text(
                "Your recipe fits, but needs {ratio:.3f} times the baseline's FLOPs.",
                ratio=ratio,
            )
        )


def _mb(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
