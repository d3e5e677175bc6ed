"""The exercises of lesson 08."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from course_lib.teaching import Verdict, expect_number, text
from course_lib.teaching.exercises import Refused, exercise, not_answered, right, wrong

from .wire import Adam, Wire

PSI = 6_875_648  # parameters of the course's decoder
STAGES = ("DDP", "ZeRO 1", "ZeRO 2", "ZeRO 3")


def _held(psi: int, n: int) -> dict[str, float]:
    """Bytes a rank, all numbers in fp32."""
    counts = (16 * psi, 8 * psi + 8 * psi / n, 4 * psi + 12 * psi / n, 16 * psi / n)
    return dict(zip(STAGES, counts, strict=True))


def _mixed(psi: int, n: int) -> dict[str, float]:
    """Bytes a rank in mixed precision, as the paper has them."""
    counts = (16 * psi, 4 * psi + 12 * psi / n, 2 * psi + 14 * psi / n, 16 * psi / n)
    return dict(zip(STAGES, counts, strict=True))


@exercise(hint="Weight 4, gradient 4, Adam 8 bytes. Which of the three does the stage cut into n?")
def check_held(answer: Any) -> Verdict:
    """A function of psi and n: bytes a rank holds of weights, gradients and Adam's state, in fp32, for each stage."""
    for psi, n in ((PSI, 8), (PSI, 2), (1_000_000, 4)):  # at 2 and at 4, some slips give one number
        given = _four(answer(psi, n))
        for stage, count in _held(psi, n).items():
            slips = {count / 4: "That counts numbers; fp32 takes 4 bytes each."}
            if stage == "DDP":
                slips |= {12 * psi: "Adam keeps two numbers a weight.", 16 * psi / n: "DDP cuts nothing."}
            if stage == "ZeRO 1":
                slips |= {
                    4 * psi + 12 * psi / n: "Gradients stay whole; in the paper's formula they are half as wide.",
                    8 * psi + 4 * psi / n: "Adam keeps two numbers a weight.",
                    16 * psi / n: "Only the optimizer's state is cut.",
                }
            if stage == "ZeRO 2":
                slips |= {
                    2 * psi + 14 * psi / n: "That is the paper's, for mixed precision. All numbers are fp32 here.",
                    8 * psi + 8 * psi / n: "The gradients are cut, too.",
                    16 * psi / n: "The weights stay whole.",
                }
            if stage == "ZeRO 3":
                slips |= {4 * psi + 12 * psi / n: "The weights are cut, too."}
            _expect(given[stage], count, slips, stage, n)
    return right("Right: 16ψ, 8ψ + 8ψ/n, 4ψ + 12ψ/n and 16ψ/n.")


@exercise(hint="In mixed precision: weight 2, gradient 2, and 12 bytes for the optimizer's state.")
def check_seven_billion(answer: Any) -> Verdict:
    """Bytes a rank for 7e9 parameters in mixed precision on 8 ranks, for each stage."""
    psi, n, billion = 7 * 10**9, 8, 10**9
    fp32 = _held(psi, n)
    given = _four(answer)
    for stage, count in _mixed(psi, n).items():
        slips = {count / billion: "That is in GB. Give bytes.", count / psi: "That is a parameter's share. Give bytes."}
        if stage in ("ZeRO 1", "ZeRO 2"):
            slips[16 * psi / n] = "Not all of it is cut at this stage."
            slips[fp32[stage]] = "That is for fp32. Weights and gradients have 2 bytes a number here."
        if stage == "ZeRO 2":  # who answers this has ZeRO 1 right, so it is no slip for fp32
            slips[4 * psi + 12 * psi / n] = "The gradients are cut, too."
        if stage == "DDP":
            slips[14 * billion] = "DDP cuts nothing."
        _expect(given[stage], count, slips, stage, n)
    return right("Right: 112, 38.5, 26.25 and 14 GB. Each rank's own activations come on top.")


def _four(given: Any) -> Mapping[str, Any]:
    """The answer, if it has the four stages and is not all zeros.

    Raises:
        Refused: it has not, or it is.
    """
    if given is None or (isinstance(given, Mapping) and not any(given.values())):
        raise Refused("Not answered yet.")
    if not isinstance(given, Mapping) or set(given) != set(STAGES):
        raise Refused("A dictionary with the keys `DDP`, `ZeRO 1`, `ZeRO 2` and `ZeRO 3` is wanted.")
    return given


def _expect(given: Any, count: float, slips: Mapping[float, str], stage: str, n: int) -> None:
    verdict = expect_number(given, count, tolerance=1e-9, wrong_answers=slips)
    if not verdict:
        raise Refused(text("`{stage}` on {n} ranks: {message}", stage=stage, n=n, message=verdict.message))


# The step by hand -----------------------------------------------------------------------------------------------------


class _Watched(Adam):
    """Remembers what it was given."""

    def __call__(self, piece: Tensor, gradient: Tensor) -> Tensor:
        self.given = gradient.clone()
        return super().__call__(piece, gradient)


@exercise(hint="Four lines: reduce-scatter the gradients, cut the weights, let each Adam update its piece, all-gather.")
def check_sharded_step(answer: Any) -> Verdict:
    """`answer(weights, gradients, adams, wire)`: three steps on 2 and on 4 ranks, against Adam on the mean gradient."""
    for n in (2, 4):
        whole, alone, wire, adams = torch.linspace(-1, 1, 64), Adam(), Wire(), [_Watched() for _ in range(n)]
        weights = [whole.clone() for _ in range(n)]
        for step in range(3):
            gradients = [torch.linspace(rank, step + 2, 64).sin() for rank in range(n)]
            mean = torch.stack(gradients).mean(0)
            weights = answer(weights, gradients, adams, wire)
            if weights is None:
                return not_answered()
            _check_pieces(weights, adams, mean, n)
            _check_bytes(adams, wire, step + 1, n)
            whole = alone(whole, mean)
            if not all(torch.allclose(each, whole, atol=1e-6) for each in weights):
                return wrong("The weights are not those of Adam on the mean gradient. Has each rank got its own piece?")
            if not torch.allclose(torch.cat([adam.given for adam in adams if adam.steps]), mean, atol=1e-6):
                return wrong(
                    "Right weights, since Adam does not mind the gradient's scale: give it the mean over ranks."
                )
    return right("Right: an n-th of Adam's state a rank, and two numbers sent for each weight, as many as DDP sends.")


def _check_pieces(weights: Any, adams: list[_Watched], mean: Tensor, n: int) -> None:
    if not isinstance(weights, (list, tuple)) or len(weights) != n:
        raise Refused("A list with one tensor a rank is wanted.")
    if not any(adam.steps for adam in adams):
        raise Refused("No Adam was called.")
    if any(len(each) < len(mean) for each in weights):
        raise Refused("Each rank has only its piece of the new weights. It needs all of them for the next step.")
    given = torch.cat([adam.given for adam in adams if adam.steps])
    if len(given) == len(mean) and torch.allclose(given, n * mean, atol=1e-6):
        raise Refused("Adam gets the sum of the gradients. The batch's gradient is their mean over the ranks.")


def _check_bytes(adams: list[_Watched], wire: Wire, steps: int, n: int) -> None:
    most, share, once = max(adam.state_bytes for adam in adams), 8 * 64 // n, 2 * 4 * 64
    if most > share:
        raise Refused(
            text("A rank keeps {most} bytes of Adam's state; an n-th of it is {share}.", most=most, share=share)
        )
    if wire.sent_bytes < steps * once:
        raise Refused("Less is sent than a step takes: all must come through the wire.")
    if wire.sent_bytes > steps * once:
        raise Refused(
            text(
                "Right weights, but {sent} numbers are sent for each weight. Two are enough: who needs the whole sum?",
                sent=wire.sent_bytes // (steps * 4 * 64),
            )
        )


# What is sent ---------------------------------------------------------------------------------------------------------


@exercise(
    hint="An all-reduce counts twice. How often is a block's weight gathered, and how often its gradient scattered?"
)
def check_sent(answer: Any) -> Verdict:
    """A function of psi and root: bytes that a rank communicates in a step under DDP and under FSDP2."""
    for psi, root in ((PSI, 557_568), (1000, 100)):
        given = answer(psi, root)
        if given is None or (isinstance(given, Mapping) and not any(given.values())):
            return not_answered()
        if not isinstance(given, Mapping) or set(given) != {"DDP", "FSDP2"}:
            return wrong("A dictionary with the keys `DDP` and `FSDP2` is wanted.")
        wanted = {"DDP": 8 * psi, "FSDP2": 12 * psi - 4 * root}
        for mode, count in wanted.items():
            slips = {count / 4: "That counts numbers; fp32 takes 4 bytes each."}
            if mode == "DDP":
                slips[4 * psi] = "An all-reduce counts twice: the sum is scattered, and then gathered."
            else:
                slips |= {
                    12 * psi: "The root is gathered once: it is not dropped between forward and backward.",
                    12 * psi - 8 * root: "The root is gathered once, and its gradient scattered once.",
                    12 * psi - 12 * root: "The root is gathered once, and its gradient scattered once.",
                    8 * psi: "Blocks are gathered twice: for forward, and again for backward.",
                    8 * psi - 4 * root: "The gradients are sent, too.",
                    16 * psi - 4 * root: "Gradients are scattered; nobody gathers them.",
                }
            verdict = expect_number(given[mode], count, wrong_answers=slips)
            if not verdict:
                return wrong(text("`{kind}`: {message}", kind=mode, message=verdict.message))
    return right("Right: 2ψ numbers under DDP, 3ψ less the root under FSDP2.")
