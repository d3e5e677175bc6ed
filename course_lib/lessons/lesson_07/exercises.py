"""The exercises of lesson 07."""

import random
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from course_lib._torch.symbolic import is_symbolic
from course_lib.budget import Estimate, Recipe, estimate
from course_lib.labels import join_labels
from course_lib.memory import MemoryMeter, symbolic
from course_lib.models import Decoder, random_tokens
from course_lib.teaching import Verdict, category_label, phase_label, text
from course_lib.teaching.exercises import (
    Messages,
    cases,
    each,
    exercise,
    expect_number,
    not_answered,
    numbers,
)
from course_lib.teaching.exercises.probes import is_close

say = Messages(__file__)

LAYERS = 8  # of the course's decoder


def make_model() -> Decoder:
    """Build the course's decoder, with 8 layers and a hidden size of 256."""
    return Decoder(vocabulary=2048, hidden=256, heads=8, layers=LAYERS, sequence=128)


def make_batch() -> torch.Tensor:
    """Return eight sequences of 129 tokens: 128 inputs, and the token that follows them."""
    return random_tokens(8, 128, 2048)


# Exercise 1: an estimate

_Sizes = tuple[int, ...]  # vocabulary, hidden, heads, layers, sequence, batch
_SIZES = ((64, 32, 2, 3, 32, 16), (64, 64, 4, 1, 4, 1))


def _draw_sizes(rng: random.Random) -> _Sizes:
    vocabulary, layers, sequence = 8 * rng.randint(5, 12), rng.randint(2, 4), rng.randint(24, 40)
    return vocabulary, 32, 2, layers, sequence, rng.randint(8, 20)


def _decoder(sizes: _Sizes) -> Decoder:
    names = ("vocabulary", "hidden", "heads", "layers", "sequence")
    return Decoder(**dict(zip(names, sizes[:-1], strict=True)))


def _tokens(sizes: _Sizes) -> torch.Tensor:
    vocabulary, *_, sequence, batch = sizes
    return random_tokens(batch, sequence, vocabulary)


@exercise()
def check_peak_without_memory(function: Any) -> Verdict:
    """Check the learner's function that predicts a training step's peak on symbolic tensors.

    Two decoders are tried. The first has its peak in backward, the second in the optimizer step.

    Args:
        function: Function that is called as `function(make_model, make_batch)`, and returns the
            peak of the second step with Adam, in bytes.
    """
    for sizes in cases(_SIZES, _draw_sizes, count=1):
        verdict = _verdict_on_peak(function, sizes)
        if not verdict:
            return verdict
    return say.right("peak_without_memory.right")


def _verdict_on_peak(function: Any, sizes: _Sizes) -> Verdict:
    """Check the peak that `function` returns for a decoder of the given sizes."""
    answer, seen = None, []
    try:
        answer = function(
            lambda: seen.append(is_symbolic()) or _decoder(sizes), lambda: _tokens(sizes)
        )
    except Exception:
        if all(seen):  # otherwise the error occurs because the model's tensors are real
            raise
    say.reject_if(not all(seen), "peak_without_memory.outside")
    if answer is None:
        return not_answered()
    say.reject_if(not seen, "peak_without_memory.never_called")
    # The batch may be created inside the meter's block or before it, and a variable may keep the
    # batch or the loss until the optimizer step.
    inputs, loss = _tokens(sizes).nbytes, 4
    extras = [kept + more for kept in (0, -inputs, inputs) for more in (0, loss)]
    right = [_step_peak(sizes) + extra for extra in extras]
    mistakes = {
        # A fused update also creates no temporaries, so both mistakes may give this peak.
        "no_temporaries": _step_peak(sizes, update=False),
        "old_gradients": _step_peak(sizes, zero=False),
        "no_state": _step_peak(sizes, steps=1),
        "not_watched": _step_peak(sizes, watched=False),
    }
    reasons = say.reasons(
        "peak_without_memory",
        {name: tuple(peak + extra for extra in extras) for name, peak in mistakes.items()},
    )
    verdicts = [expect_number(answer, peak, wrong_answers=reasons, in_bytes=True) for peak in right]
    return max(verdicts, key=lambda verdict: (bool(verdict), verdict.exact))


@cache
def _step_peak(
    sizes: _Sizes, *, steps: int = 2, update: bool = True, zero: bool = True, watched: bool = True
) -> int:
    """Return the peak in bytes of the last of several steps with Adam.

    The default options are right; any other option introduces a mistake.
    """
    with symbolic():
        model = _decoder(sizes)
        adam = torch.optim.Adam(model.parameters(), foreach=False)
        for _ in range(steps):
            with MemoryMeter(*[model, adam] * watched) as meter:
                model.loss(_tokens(sizes)).backward()
                if update:
                    adam.step()
            if not update:
                adam.step()
            if zero:
                adam.zero_grad()
    return meter.peak_bytes


# Exercise 2: which of two recipes is faster


def _two_costs(*costs: int) -> tuple[SimpleNamespace, SimpleNamespace]:
    """Return two objects with the attributes `flops` and `moved_bytes` of an estimate.

    Args:
        costs: FLOPs and moved bytes of the first recipe, then FLOPs and moved bytes of the second.
    """
    flops, moved, other_flops, other_moved = costs
    return (
        SimpleNamespace(flops=flops, moved_bytes=moved),
        SimpleNamespace(flops=other_flops, moved_bytes=other_moved),
    )


_COSTS = (
    # The results, 29.6875 and 87.5, are not whole numbers, so that rounding is detected.
    _two_costs(54_600_000_000, 129_000_000, 45_100_000_000, 449_000_000),
    _two_costs(3_000_000_000, 40_000_000, 5_100_000_000, 16_000_000),
)


def _draw_two_costs(rng: random.Random) -> tuple[SimpleNamespace, SimpleNamespace]:
    flops, moved = rng.randrange(10**9, 10**11), rng.randrange(10**7, 10**8)
    more_flops, more_moved = rng.randrange(10**9, 10**10), rng.randrange(10**7, 10**9)
    return _two_costs(flops + more_flops, moved, flops, moved + more_moved)


@numbers(
    {
        "inverse": each(lambda ratio, *_: 1 / ratio),
        "wrong_sign": each(lambda ratio, *_: -ratio),
        "bytes_halved": each(lambda ratio, *_: 2 * ratio),
        "bytes_doubled": each(lambda ratio, *_: ratio / 2),
        "rounded": each(
            lambda ratio, *_: (int(ratio), *(round(ratio, digits) for digits in (0, 1, 2)))
        ),
        "one_recipe": lambda *recipes: tuple(one.flops / one.moved_bytes for one in recipes),
    },
    cases=lambda: cases(_COSTS, _draw_two_costs),
    tolerance=1e-6,
    place="",
)
def check_break_even(first: Any, second: Any) -> float:
    """Check the learner's formula for the machine on which two training steps are equally fast.

    The machine is described by the ratio of its compute rate to its link bandwidth, in FLOP per
    byte. The learner's function and this one return this ratio. The decorator `numbers` turns this
    function into a check.

    Args:
        first, second: Estimates of the two steps, with `flops` and `moved_bytes`.
    """
    return (first.flops - second.flops) / (second.moved_bytes - first.moved_bytes)


# Exercises 3, 4 and 6: a recipe for a budget


@exercise()
def check_same_flops(recipe: Any) -> Verdict:
    """Check a recipe: the learner's choice of techniques for a training step.

    The peak may be at most 160 MB. The FLOPs must be those of the step without techniques, and no
    bytes may be moved.

    Args:
        recipe: The learner's `Recipe`.
    """
    found = _fitting_estimate(recipe, 160_000_000, most_flops=1.0)
    return say.right("same_flops.right", mb=_mb(found.peak_bytes))


@exercise()
def check_keeps_clipping(recipe: Any) -> Verdict:
    """Check a recipe with which the gradients can be clipped.

    A recipe is the learner's choice of techniques for a training step. For clipping, the norm of
    all gradients must be known before the update. The peak may be at most 120 MB, and the FLOPs at
    most 1.19 times those of the step without techniques. No bytes may be moved.

    Args:
        recipe: The learner's `Recipe`.
    """
    in_backward = isinstance(recipe, Recipe) and recipe.in_backward
    say.reject_if(in_backward, "keeps_clipping.in_backward")
    found = _fitting_estimate(recipe, 120_000_000, most_flops=1.19)
    fewer = recipe.first_blocks is not None and recipe.first_blocks < LAYERS - 1
    return say.right(
        "keeps_clipping.right_with_fewer" if fewer else "keeps_clipping.right",
        mb=_mb(found.peak_bytes),
        ratio=_ratio(found),
    )


@exercise()
def check_fifty(recipe: Any) -> Verdict:
    """Check a recipe: the learner's choice of techniques for a training step.

    The peak may be at most 50 MB. FLOPs and moved bytes are not limited. The step must be in fp32,
    with Adam, on one rank.

    Args:
        recipe: The learner's `Recipe`.
    """
    found = _fitting_estimate(recipe, 50_000_000)
    return say.right("fifty.right", mb=_mb(found.peak_bytes))


@cache
def _estimate_recipe(recipe: Recipe) -> Estimate:
    return estimate(make_model, make_batch, recipe)


def _fitting_estimate(recipe: Any, budget: int, most_flops: float | None = None) -> Estimate:
    """Return the estimate of a recipe in fp32 with Adam that fits the budget, or reject the recipe.

    Args:
        recipe: Recipe to check.
        budget: The budget in bytes.
        most_flops: Limit on the FLOPs relative to the baseline. If given, no bytes may be moved.
    """
    if not isinstance(recipe, Recipe):
        say.reject("common.no_recipe", kind=type(recipe).__name__)
    same = (recipe.precision, recipe.optimizer, recipe.ranks) == ("fp32", "adam", 1)
    say.reject_if(not same, "common.another_training")
    try:
        found = _estimate_recipe(recipe)
    except Exception as error:
        say.reject("common.no_estimate", error=error)
    if found.peak_bytes > budget:
        counts = sorted(((count, name) for name, count in found.at_peak.items()), reverse=True)
        held = join_labels(
            text("{category} {size} MB", category=category_label(name), size=f"{count / 1e6:.1f}")
            for count, name in counts
            if count >= 500_000
        )
        say.wrong(
            "common.does_not_fit",
            peaks=f"{_mb(found.peak_bytes)} > {budget / 1e6:,.0f} MB",
            held=held,
            phase=phase_label(peak_phase(found)),
        )
    if most_flops is not None:
        say.reject_if(found.moved_bytes, "common.moves_bytes", mb=_mb(found.moved_bytes))
        if _ratio(found) > most_flops:
            say.wrong("common.too_many_flops", ratio=_ratio(found))
    return found


def peak_phase(found: Estimate) -> str:
    """Return the phase in which an estimated training step has its peak, such as "backward"."""
    return max(found.phase_peaks, key=found.phase_peaks.get)


def _ratio(found: Estimate) -> float:
    """Return an estimate's FLOPs divided by the baseline's FLOPs."""
    return found.flops / _estimate_recipe(Recipe()).flops


def _mb(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


# Exercise 5: a layer with an adapter

_LAYERS = ((6, 256, 384, 4), (5, 384, 256, 8))  # tokens, inputs, outputs, rank


_is_near = partial(is_close, rtol=1e-4, atol=1e-3)


def _draw_layer(rng: random.Random) -> tuple[int, ...]:
    return rng.randint(3, 8), 8 * rng.randint(30, 50), 8 * rng.randint(30, 50), rng.randint(2, 9)


def adapted_layer(frozen: nn.Module, x: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """Return the output of a frozen linear layer with a LoRA adapter.

    Args:
        frozen: The linear layer.
        x: Input, of shape (..., inputs).
        down, up: Matrices of the adapter, of shape (rank, inputs) and (outputs, rank).
    """
    return frozen(x) + x @ down.T @ up.T


@exercise()
def check_adapted_layer(function: Any) -> Verdict:
    """Check the learner's linear layer with a LoRA adapter.

    The gradients of `x`, `down` and `up` must be right, and no tensor as large as the frozen weight
    may be created.

    Args:
        function: Function that is called as `function(frozen, x, down, up)`, like `adapted_layer`.
    """
    for tokens, inputs, outputs, rank in cases(_LAYERS, _draw_layer, count=1):
        shapes = (2, tokens, inputs), (rank, inputs), (outputs, rank)
        given = [torch.randn(shape, requires_grad=True) for shape in shapes]
        frozen = nn.Linear(inputs, outputs).requires_grad_(False)
        wanted = adapted_layer(frozen, *given)
        parts = {"only_frozen": frozen(given[0]), "only_adapter": wanted - frozen(given[0])}
        upstream = torch.randn_like(wanted)
        with MemoryMeter() as meter:
            output = function(frozen, *given)
            if output is None:
                return not_answered()
            say.reject_if(getattr(output, "shape", None) != wanted.shape, "adapted_layer.shape")
            found = [None] * 3
            if output.requires_grad:
                found = torch.autograd.grad(output, given, upstream, allow_unused=True)
        for name, part in parts.items():
            say.reject_if(_is_near(output, part), f"adapted_layer.{name}")
        if not _is_near(output, wanted):
            say.wrong("adapted_layer.values")
        right = [
            gradient is not None and _is_near(gradient, expected)
            for gradient, expected in zip(
                found, torch.autograd.grad(wanted, given, upstream), strict=True
            )
        ]
        say.reject_if(not right[0] and all(right[1:]), "adapted_layer.no_input_gradient")
        say.reject_if(not all(right), "adapted_layer.no_gradient")
        say.reject_if(meter.peak_bytes >= frozen.weight.nbytes, "adapted_layer.merged")
    return say.right("adapted_layer.right")
