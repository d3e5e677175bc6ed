"""The exercises of lesson 05, one of which is a loop with five planted bugs."""

import itertools
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from course_lib.labels import join_labels
from course_lib.lessons.ledger import BASELINE
from course_lib.memory import MemoryMeter
from course_lib.teaching import Verdict, expect_number, text
from course_lib.teaching.exercises import (
    WrongAnswer,
    exercise,
    not_answered,
    returns_none,
    right,
    seed_of,
    wrong,
)

#: Bytes of the course's decoder: weights, bytes per sequence, and the part that does not depend on
#: the micro-batch.
WEIGHTS, SLOPE, FLOOR = 27_502_592, 24_396_800, 110_010_776
#: Measured peak for micro-batches of one sequence, which is not on the line.
MEASURED_ALONE = 134_800_792


@exercise(
    hint=(
        "Two points define a line. How many bytes does each sequence add, and how many remain"
        " at zero sequences?",
        (
            "The two runs differ by two sequences. Which of weights, gradients and moments does"
            " the peak for m = 8 lack?"
        ),
    )
)
def check_peaks(answer: Any) -> Verdict:
    """Check a function of m, the sequences in a micro-batch: the peak of a step over eight.

    It is checked for m = 1, 2, 4 and 8. For m = 1 the line and the measured peak are both right.
    """
    for m in (4, 2, 1, 8):
        given = answer(m)
        if given is None or given is ...:
            return not_answered() if m == 4 else returns_none(f"`m = {m}`")
        whole = FLOOR + 8 * SLOPE
        mistakes = {
            FLOOR - WEIGHTS + m * SLOPE: (
                "You left out the gradients. Those of the earlier micro-batches are in memory"
                " when the next micro-batch peaks."
            ),
            m * SLOPE: (
                "You counted only what grows with m. Weights, gradients and optimizer state"
                " take the same memory however the batch is split."
            ),
            WEIGHTS + m * SLOPE: (
                "You left out the gradients and the optimizer state. They are in memory, too."
            ),
            158_804_376 + 2 * m * SLOPE: (
                "You started at the peak for m = 2. The line starts at m = 0, and the"
                " difference between the two runs is for two sequences."
            ),
            158_804_376 + (m - 2) * 2 * SLOPE: (
                "You did not halve the difference between the two runs. It is for two sequences."
            ),
            **dict.fromkeys(
                (BASELINE.peak_bytes * m / 8, 207_597_976 * m / 4, 158_804_376 * m / 2),
                "The peak does not fall in proportion to m, because part of it is not activations.",
            ),
            # lines through m = 8, where the peak has no gradients
            207_597_976 + (m - 4) * 17_521_152: (
                "You drew the line through m = 8. That is a single micro-batch, whose peak has"
                " no gradients, so it is not on the line."
            ),
            158_804_376 + (m - 2) * 118_878_208 / 6: (
                "You drew the line through m = 8. That is a single micro-batch, whose peak has"
                " no gradients, so it is not on the line."
            ),
        }
        if m == 8:
            mistakes = {
                whole: (
                    "You counted the gradients. With a single micro-batch no gradient exists"
                    " yet at the peak, because gradients are made while activations are freed."
                )
            }
            mistakes |= {
                whole - 2 * WEIGHTS: (
                    "Your peak lacks two sets of gradients. The real one lacks a single set."
                )
            }
        if m == 1 and expect_number(given, MEASURED_ALONE, tolerance=1e-9):
            continue
        verdict = expect_number(
            given,
            FLOOR + m * SLOPE - (WEIGHTS if m == 8 else 0),
            tolerance=1e-9,  # a fitted line, such as `numpy.polyfit`'s, is not exact
            wrong_answers=mistakes,
            in_bytes=True,
        )
        if not verdict:
            return replace(
                verdict, message=text("For m = {m}: {message}", m=m, message=verdict.message)
            )
    return right(
        "Right: 24,396,800 bytes per sequence on a floor of 110,010,776 bytes. A single"
        " micro-batch peaks without gradients."
    )


# The loop with five planted bugs ------------------------------------------------------------------


class _EpochRecord(NamedTuple):
    """Record of an epoch of a loop."""

    gradients: list[Tensor]  # at each step of the optimizer
    rates: list[int]  # number of scheduler steps before each optimizer step
    scheduled: int  # number of scheduler steps in total
    arriving: list[float]  # gradients at the loss sums, the loss scale included


class _TwoWeights(nn.Module):
    """A weighted sum of the features, (..., n) -> (...).

    Its weights are two parameters, so that the norm of both differs from the norm of each.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(features // 2))
        self.second = nn.Parameter(torch.ones(features - features // 2))

    def forward(self, x: Tensor) -> Tensor:
        half = len(self.first)
        return x[..., :half] @ self.first + x[..., half:] @ self.second


class _Recorder(torch.optim.SGD):
    """Records the gradients of each step, and changes no parameter."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.0)
        self.record = _EpochRecord([], [], 0, [])
        self.scheduler: Any = None

    def step(self, closure: Any = None) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        if any(gradient is None for gradient in gradients):
            raise WrongAnswer(
                "You let the optimizer step when a parameter has no gradient.", exact=True
            )
        self.record.gradients.append(torch.cat([gradient.flatten() for gradient in gradients]))
        self.record.rates.append(self.scheduler.last_epoch)


# The beginnings of PyTorch's errors on wrong use of a scaler -> what is wrong with the loop.
_MISTAKES = {
    "unscale_() has already been called": (
        "You called `unscale_` more than once in a step. Call it once, after the last micro-batch."
    ),
    "step() has already been called": (
        "Call `scaler.update()` once after each step of the optimizer."
    ),
    "unscale_() is being called after step": (
        "You called `unscale_` after `scaler.step`, without `scaler.update()` in between. In each"
        " step, call `unscale_` first, then `scaler.step`, then `scaler.update()`."
    ),
    "_scale is None": "Pass the loss through `scaler.scale` before you call `backward`.",
    "No inf checks were recorded": (
        "When you called `scaler.step`, no parameter had a gradient. Call `backward` for each"
        " micro-batch, and clear the gradients only after the step."
    ),
}


def _epoch(
    loop: Callable,
    micro_batches: list[Tensor],
    every: int,
    max_norm: float = math.inf,
    scale: float = 1.0,
    model: nn.Module | None = None,
) -> _EpochRecord:
    """Run an epoch of a reader's loop over micro-batches (samples, tokens, features).

    The loss is linear in the features, unless another `model` is given.
    """
    model = _TwoWeights(micro_batches[0].shape[-1]) if model is None else model
    optimizer = _Recorder(model)
    scheduler = optimizer.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)

    def loss_sum(model: nn.Module, micro_batch: Tensor) -> tuple[Tensor, int]:
        loss = model(micro_batch).sum()
        if loss.requires_grad:  # false if the loop only counts tokens
            loss.register_hook(lambda gradient: optimizer.record.arriving.append(float(gradient)))
        return loss, micro_batch.shape[0] * micro_batch.shape[1]

    with warnings.catch_warnings():
        # PyTorch warns if a scheduler steps before its optimizer; the check itself reports that
        warnings.simplefilter("ignore")
        try:
            loop(model, loss_sum, micro_batches, optimizer, scheduler, scaler, every, max_norm)
        except (AssertionError, RuntimeError) as error:
            for message, meant in _MISTAKES.items():
                if message in str(error):
                    raise WrongAnswer(meant, exact=True) from None
            raise
    if not optimizer.record.gradients:
        raise WrongAnswer("Your loop never lets the optimizer step.", exact=True)
    return optimizer.record._replace(scheduled=scheduler.last_epoch)


def _micro_batches(*tokens: int, seed: int = 0) -> list[Tensor]:
    """Return micro-batches of two samples with the given numbers of tokens, (2, tokens, 8)."""
    generator = torch.Generator().manual_seed(seed_of(seed))
    return [torch.randn(2, each, 8, generator=generator) for each in tokens]


def _mean(micro_batches: list[Tensor]) -> Tensor:
    """Return the gradient of the mean over the tokens of these micro-batches."""
    return torch.cat([micro_batch.flatten(0, 1) for micro_batch in micro_batches]).mean(0)


def _relative_error(found: Tensor, wanted: Tensor) -> float:
    """Return the norm of the difference relative to the norm of the right gradient."""
    return float((found - wanted).norm() / wanted.norm())


def divisor(loop: Callable) -> str | None:
    """Test micro-batches with unequal token counts, without clipping, scale and schedule."""
    micro_batches = _micro_batches(1, 6, 2, 9, 3)
    found = _epoch(loop, micro_batches, 2).gradients
    groups = (micro_batches[:2], micro_batches[2:4], micro_batches[4:])
    counts = [
        sum(micro_batch.shape[0] * micro_batch.shape[1] for micro_batch in group)
        for group in groups
    ]
    # If the loop drops the incomplete last group, `zip` ends early, and another check reports it.
    for step, (gradient, group) in enumerate(zip(found, groups, strict=False)):
        if (off := _relative_error(gradient, _mean(group))) < 1e-4:
            continue
        if step == 2:
            return text(
                "divisor: the last group has only one micro-batch, and its gradient is off by"
                " {off}",
                off=f"{off:.0%}",
            )
        if step == 1:
            own, before = _mean(group), _mean(groups[0])
            if _relative_error(gradient, own * counts[1] / sum(counts[:2])) < 1e-4:
                return "divisor: the tokens of the first step are counted again in the second step"
            # the sums of both steps, divided by the second's tokens, or each by its own
            kept = (before / counts[1] + own, before + own)
            if any(_relative_error(gradient, each) < 1e-4 for each in kept):
                return (
                    "divisor: the first step is right, but the second also has the gradients of"
                    " the first, which were not cleared"
                )
            return text(
                "divisor: the first step is right, but the second has a gradient that is off by"
                " {off}",
                off=f"{off:.0%}",
            )
        samples = sum(map(len, group))
        if _relative_error(gradient, _mean(group) * counts[0] / samples) < 1e-4:
            return "divisor: the loss is divided by samples, although it is a sum over tokens"
        if _relative_error(gradient, _mean(group) * counts[0]) < 1e-4:
            return "divisor: the loss is not divided, so the gradient is a sum over the tokens"
        return text("divisor: the gradient of the first step is off by {off}", off=f"{off:.0%}")
    return None


def clipping(loop: Callable) -> str | None:
    """Test micro-batches of equal counts whose gradients point in different directions.

    The loss scale is 1. The direction of the update is compared, then its length.
    """
    micro_batches = _micro_batches(4, 4, 4, 4, seed=1)
    found, wanted = _epoch(loop, micro_batches, 4, max_norm=0.01).gradients[0], _mean(micro_batches)
    off = _relative_error(found / found.norm(), wanted / wanted.norm())
    if off > 1e-3:
        return text(
            "clipping: the first update points in another direction (off by {off})",
            off=f"{off:.0%}",
        )
    times = float(found.norm()) / 0.01
    if not 0.99 < times < 1.01:
        return text(
            "clipping: the update is {times} times as long as the bound `max_norm`",
            times=f"{times:.2g}",
        )
    return None


def schedule(loop: Callable) -> str | None:
    """Test equal counts in full groups: how often the scheduler steps, and when."""
    record = _epoch(loop, _micro_batches(4, 4, 4, 4), 2)
    steps = len(record.gradients)
    if record.scheduled != steps:
        counted = {"n": record.scheduled, "steps": steps}
        return text("scheduler: {n} steps, but the optimizer took {steps}", **counted)
    if record.rates != [*range(steps)]:
        return "scheduler: it steps before the optimizer, so the first learning rate is never used"
    return None


def remainder(loop: Callable) -> str | None:
    """Test five micro-batches in groups of two, each with its own feature: which reach a step."""
    micro_batches = [torch.eye(5)[i].expand(2, 4, 5).contiguous() for i in range(5)]
    found = _epoch(loop, micro_batches, 2).gradients
    used = int(sum(gradient != 0 for gradient in found).bool().sum())
    if used < 5 or len(found) != 3:
        return text(
            "remainder: {used} of 5 micro-batches were used in {steps} steps, but all 5 must be"
            " used in 3 steps",
            used=used,
            steps=len(found),
        )
    return None


def unscaling(loop: Callable) -> str | None:
    """Test the length of a clipped update with a loss scale of 1024 against that with 1."""
    records = [
        _epoch(loop, _micro_batches(4, 4, seed=2), 2, max_norm=0.01, scale=scale)
        for scale in (1024.0, 1.0)
    ]
    if min(records[0].arriving, default=0.0) < 2:
        return "scale: the loss does not always go through the scaler"
    scaled, plain = (float(record.gradients[0].norm()) for record in records)
    if not 0.99 < scaled / plain < 1.01:
        return text(
            "scale: with a loss scale of 1024 the update is {times} times as long as with 1",
            times=f"{scaled / plain:.2g}",
        )
    return None


def _grows_by(loop: Callable) -> int:
    """Return by how many bytes the peak of a step with eight micro-batches exceeds that with two.

    A loop that runs backward after each forward holds the activations of one micro-batch at a time,
    so its peak does not depend on their number.
    """
    peaks = []
    for count in (2, 8):
        model, micro_batches = (
            nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 1)),
            _micro_batches(*[16] * count),
        )
        with MemoryMeter(model) as meter:
            _epoch(loop, micro_batches, count, model=model)
        peaks.append(meter.peak_bytes)
    return peaks[1] - peaks[0]


def _updates_with_infinity(loop: Callable) -> bool:
    """Return whether the optimizer steps although the scaled gradient is infinite.

    The loss is 0, because features of both signs cancel, so a loop may check that it is finite.
    """
    features = torch.tensor([1e38, -1e38] * 4).expand(2, 4, 8)
    try:
        _epoch(loop, [features.contiguous()], 1, scale=2.0**20)
    except (WrongAnswer, RuntimeError):  # no step, or clipping with `error_if_nonfinite` raised
        return False
    return True


#: Bytes of one micro-batch's activations in `_grows_by`: two samples of 16 tokens, 64 numbers each
_ACTIVATIONS = 2 * 16 * 64 * 4

#: Name of a planted bug -> the check that detects it, and none of the other four.
FIVE: Mapping[str, Callable[[Callable], str | None]] = {
    "mean of means": divisor,
    "clipped per micro-batch": clipping,
    "scheduled per micro-batch": schedule,
    "remainder dropped": remainder,
    "not unscaled": unscaling,
}


@exercise(
    hint=(
        (
            "Which of these lines must run for each micro-batch, and which once per step? When"
            " is a group of micro-batches complete?"
        ),
        (
            "Write down the order of the lines that run once per step. Which gradient must"
            " clipping see, and which learning rate must the optimizer see?"
        ),
    )
)
def check_loop(function: Any) -> Verdict:
    """Check `train_epoch`, a loop over one epoch, for five bugs and for its peak memory.

    Its parameters are model, loss_sum, micro_batches, optimizer, scheduler, scaler, every and
    max_norm.
    """
    found = [
        symptom for symptom in (check(function) for check in FIVE.values()) if symptom is not None
    ]
    if found:
        return wrong(
            text(
                "{n} of 5 bugs fixed. Remaining: {found}.",
                n=5 - len(found),
                found=join_labels(found, "; "),
            )
        )
    if _updates_with_infinity(function):
        return wrong(
            "All five are fixed, but the optimizer steps although a gradient is infinite. Call"
            " `scaler.step(optimizer)`, which skips this step.",
            exact=True,
        )
    more = _grows_by(function)
    if more > 5 * _ACTIVATIONS:
        return wrong(
            "All five are fixed, but nothing is saved: the activations of all micro-batches are"
            " live at once. Run backward for each one before the forward of the next one.",
            exact=True,
        )
    if more > _ACTIVATIONS // 8:
        return wrong(
            text(
                "All five are fixed, but the peak grows by {more:,} bytes from two micro-batches"
                " to eight. Keep nothing of a micro-batch except what backward adds to `.grad`.",
                more=more,
            ),
            exact=True,
        )
    return right("Right: all five are fixed, and one micro-batch's activations are live at a time.")


# The accumulator's dtype --------------------------------------------------------------------------


@exercise(
    hint=(
        (
            "A hook is called when the gradient of a parameter is complete. In the hook, take"
            " the gradient out of `.grad` and add it in fp32."
        ),
        (
            "What must `.grad` be when the hook returns? What does the hook do the first time,"
            " when the dict has no sum for this parameter? Who registers it?"
        ),
    )
)
def check_fp32_sums(function: Any) -> Verdict:
    """Check `accumulate_in_fp32(parameters)`: parameter -> sum of its gradients in fp32.

    The sums must take 4 bytes per number, and nothing else may be kept.
    """
    generator = torch.Generator().manual_seed(seed_of(0))
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 16, bias=False)).bfloat16()
    data = [torch.randn(32, 64, generator=generator).bfloat16() for _ in range(24)]

    def gradients(x: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(model(x).square().sum(), list(model.parameters())))

    each = [gradients(x) for x in data]
    exact = [sum(g.float() for g in of_one) for of_one in zip(*each, strict=True)]
    so_far = [list(itertools.accumulate(of_one)) for of_one in zip(*each, strict=True)]
    narrow = [of_one[-1] for of_one in so_far]  # the sums that `.grad` would have
    with MemoryMeter() as meter:
        sums = function(model.parameters())
        if sums is ...:
            return not_answered()
        for x in data:
            model(x).square().sum().backward()
        kept = meter.live_bytes
    if not isinstance(sums, Mapping):
        return wrong(
            "Return a dict that maps each parameter to the sum of its gradients.", exact=True
        )
    parameters = list(model.parameters())
    if not sums:
        if _adds_nothing(function):  # the cell is unchanged
            return not_answered()
        return wrong(
            "Your dict stays empty, because no hook was called. Register your function for each"
            " parameter.",
            exact=True,
        )
    having = sum(any(key is parameter for key in sums) for parameter in parameters)
    if not having:
        return wrong("The keys of your dict must be the parameters themselves.", exact=True)
    if having < 3:
        return wrong(text("Only {n} of 3 parameters have a sum.", n=having))
    found = [sums[parameter] for parameter in parameters]
    if not all(isinstance(one, Tensor) for one in found):
        return wrong("Keep one tensor per parameter: the sum of its gradients.", exact=True)
    if any(one.dtype != torch.float32 for one in found):
        kinds = {str(one.dtype).removeprefix("torch.") for one in found}
        return wrong(
            text("The sums must be fp32, but yours are {kind}.", kind=join_labels(sorted(kinds))),
            exact=True,
        )
    if not any(one.any() for one in found):
        return wrong(
            "Your sums stay zero, because no hook was called. Register your function for each"
            " parameter. If you go through `parameters` twice, make a list of it first, because"
            " it is an iterator.",
            exact=True,
        )
    if _all_close(found, [g.float() for g in narrow]):
        return wrong(
            "You added the gradients in bf16 and converted the sum to fp32. That is too late,"
            " because the low bits are already lost.",
            exact=True,
        )
    if _all_close(found, [sum(g.float() for g in of_one) for of_one in so_far]):
        return wrong(
            "You add `.grad` but do not clear it, so it still holds the earlier micro-batches,"
            " and they are added again. Set it to None in the hook.",
            exact=True,
        )
    if _all_close(found, [g.float() for g in each[-1]]):
        return wrong(
            "You kept only the gradient of the last micro-batch. Add up those of all"
            " micro-batches.",
            exact=True,
        )
    if not _all_close(found, exact):
        return wrong("Your sums differ from the sums of the micro-batches' gradients.")
    if any(parameter.grad is not None for parameter in parameters) or kept > sum(
        g.nbytes for g in exact
    ):
        numbers = {"kept": kept / sum(p.numel() for p in parameters)}
        return wrong(
            text(
                "The sums are right, but {kept:.0f} bytes per parameter are live. Four are enough.",
                **numbers,
            )
        )
    return right(
        "Right: the sums are in fp32, at 4 bytes per parameter, and no bf16 gradient stays in"
        " memory."
    )


def _adds_nothing(function: Any) -> bool:
    """Return whether a function, and the hook in it, are still the cell's original.

    Neither uses an attribute or a name.
    """
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return not any(each.co_names for each in (code, *inner))


def _all_close(found: list[Tensor], wanted: list[Tensor]) -> bool:
    pairs = zip(found, wanted, strict=True)
    return all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in pairs)


# In depth -----------------------------------------------------------------------------------------


@exercise(
    hint=(
        "Which bytes does the line of exercise 1 have at m = 0, and how many bytes remain for the"
        " sequences?"
    )
)
def check_largest_micro_batch(answer: Any) -> Verdict:
    """Check the largest micro-batch of a batch of 64 under 1 GB, among those that divide 64."""
    return expect_number(
        answer,
        32,
        wrong_answers={
            36: "36 sequences would fit, but 36 does not divide 64.",
            40: (
                "You divided all of the 10^9 bytes by the bytes per sequence. First subtract"
                " the floor, which does not shrink."
            ),
            64: "The whole batch at once peaks at 1.64 GB.",
            16: "16 sequences fit, but twice as many also fit.",
        },
        why=(
            "110.0 MB plus 32 times 24.4 MB is 890.7 MB. All 64 sequences at once would take"
            " 1,643.9 MB."
        ),
    )


@exercise(hint="How many samples per millisecond does a micro-batch of m samples reach?")
def check_fast_micro_batch(answer: Any) -> Verdict:
    """Check the smallest m = 2**k with 80% of the rate of m = 64; m samples take 5 + m ms."""
    return expect_number(
        answer,
        16,
        wrong_answers={
            8: (
                "Micro-batches of 8 samples in 13 ms reach only 66% of the rate of 64 samples"
                " in 69 ms."
            ),
            32: "32 reaches 80%, but 16 is enough for that.",
            64: "The largest micro-batch reaches 100%. A smaller one is enough for 80%.",
        },
        why="16 samples in 21 ms reach 82% of the rate of 64 samples in 69 ms.",
    )
