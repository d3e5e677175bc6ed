"""The exercises of lesson 08."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from course_lib.memory import MemoryMeter
from course_lib.teaching import Verdict, expect_number, text
from course_lib.teaching.exercises import Refused, exercise, not_answered, right, wrong

from .wire import Adam, RankWire, Wire

PSI = 6_875_648  # parameters of the course's decoder
STAGES = ("DDP", "ZeRO 1", "ZeRO 2", "ZeRO 3")


def _held(psi: int, n: int) -> dict[str, float]:
    """Return the bytes per rank with all numbers in fp32."""
    counts = (16 * psi, 8 * psi + 8 * psi / n, 4 * psi + 12 * psi / n, 16 * psi / n)
    return dict(zip(STAGES, counts, strict=True))


def _mixed(psi: int, n: int) -> dict[str, float]:
    """Return the bytes per rank in mixed precision, as in the ZeRO paper."""
    counts = (16 * psi, 4 * psi + 12 * psi / n, 2 * psi + 14 * psi / n, 16 * psi / n)
    return dict(zip(STAGES, counts, strict=True))


@exercise(
    hint=(
        "Weight 4, gradient 4, Adam 8 bytes. Which of the three does the stage cut into n?",
        (
            "What is whole counts as it is, what is cut is divided by n: `8 * psi + 8 * psi / n`"
            " for ZeRO 1."
        ),
    )
)
def check_held(answer: Any) -> Verdict:
    """Check a function of psi and n: bytes per rank of weights, gradients and Adam's state in fp32.

    It returns one number for each stage.
    """
    for psi, n in ((PSI, 8), (PSI, 2), (1_000_000, 4)):  # at 2 and 4, some mistakes give one number
        given = _four(answer(psi, n))
        for stage, count in _held(psi, n).items():
            mistakes = {count / 4: "That counts numbers; fp32 takes 4 bytes each."}
            if stage == "DDP":
                mistakes |= {
                    12 * psi: "Adam keeps two numbers a weight.",
                    16 * psi / n: "DDP cuts nothing.",
                }
            if stage == "ZeRO 1":
                mistakes |= {
                    4 * psi + 12 * psi / n: (
                        "Gradients stay whole; in the paper's formula they are half as wide."
                    ),
                    8 * psi + 4 * psi / n: "Adam keeps two numbers a weight.",
                    16 * psi / n: "Only the optimizer's state is cut.",
                }
            if stage == "ZeRO 2":
                mistakes |= {
                    2 * psi + 14 * psi / n: (
                        "That is the paper's, for mixed precision. All numbers are fp32 here."
                    ),
                    8 * psi + 8 * psi / n: "The gradients are cut, too.",
                    16 * psi / n: "The weights stay whole.",
                }
            if stage == "ZeRO 3":
                mistakes |= {4 * psi + 12 * psi / n: "The weights are cut, too."}
            _expect(given[stage], count, mistakes, stage, n, tolerance=1e-9)
    return right("Right: 16ψ, 8ψ + 8ψ/n, 4ψ + 12ψ/n and 16ψ/n.")


@exercise(
    hint=(
        (
            "Weight 2, gradient 2, and 12 bytes for the optimizer's state. Which of the three does"
            " the stage cut?"
        ),
        "ZeRO 1: 4ψ + 12ψ/n bytes. ZeRO 2 cuts the gradients, too; ZeRO 3 cuts all.",
    )
)
def check_seven_billion(answer: Any) -> Verdict:
    """Check the bytes per rank for 7e9 parameters in mixed precision on 8 ranks, for each stage."""
    psi, n, billion = 7 * 10**9, 8, 10**9
    fp32 = _held(psi, n)
    given = _four(answer)
    for stage, count in _mixed(psi, n).items():
        mistakes = {
            count / psi: "That is a parameter's share. Give bytes.",
        }
        if stage in ("ZeRO 1", "ZeRO 2"):
            mistakes[16 * psi / n] = "Not all of it is cut at this stage."
            mistakes[fp32[stage]] = (
                "That is for fp32. Weights and gradients have 2 bytes a number here."
            )
        if stage == "ZeRO 1":
            mistakes[fp32[stage]] = (
                "So it is with autocast, which keeps weights and gradients in fp32. Here they have"
                " 2 bytes a number."
            )
        if stage == "ZeRO 2":  # ZeRO 1 was right, so this is not a mistake about fp32
            mistakes[4 * psi + 12 * psi / n] = "The gradients are cut, too."
        if stage == "DDP":
            mistakes[14 * billion] = "DDP cuts nothing."
        _expect(given[stage], count, mistakes, stage, n)
    return right("Right: 112, 38.5, 26.25 and 14 GB. Each rank's own activations come on top.")


def _four(given: Any) -> Mapping[str, Any]:
    """Return the answer if it has the four stages and is not all zeros.

    Raises:
        Refused: The answer has another form, or all numbers are zero.
    """
    if given is None or (isinstance(given, Mapping) and not any(given.values())):
        raise Refused("Not answered yet.")
    if not isinstance(given, Mapping) or set(given) != set(STAGES):
        raise Refused(
            "A dictionary with the keys `DDP`, `ZeRO 1`, `ZeRO 2` and `ZeRO 3` is wanted."
        )
    return given


def _expect(
    given: Any,
    count: float,
    mistakes: Mapping[float, str],
    stage: str,
    n: int,
    *,
    tolerance: float = 2e-3,
) -> None:
    """Refuse any number except `count`, which may be rounded to three digits."""
    verdict = expect_number(
        given, count, tolerance=tolerance, wrong_answers=mistakes, in_bytes=True
    )
    if not verdict:
        message = text(
            "`{stage}` on {n} ranks: {message}", stage=stage, n=n, message=verdict.message
        )
        raise Refused(message, exact=verdict.exact)


# The step by hand
# --------------------------------------------------------------------------------------------------


class _WireWithHiddenRank(Wire):
    """A wire to one additional rank, so that a result computed without the wire is wrong.

    That rank adds `HIDDEN_GRADIENT` to every sum, and its share of the weights shifts all gathered
    weights by `HIDDEN_WEIGHT`.
    """

    HIDDEN_GRADIENT = 0.25
    HIDDEN_WEIGHT = 0.125

    def reduce_scatter(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [piece + self.HIDDEN_GRADIENT for piece in super().reduce_scatter(tensors)]

    def all_gather(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        return [whole + self.HIDDEN_WEIGHT for whole in super().all_gather(pieces)]


class _Watched(Adam):
    """An Adam that remembers its arguments."""

    def __call__(self, piece: Tensor, gradient: Tensor) -> Tensor:
        if piece.shape != gradient.shape:
            message = (
                "Adam got {weights} weights with {gradients} numbers of a gradient: give it this"
                " rank's piece of both."
            )
            counts = {"weights": piece.numel(), "gradients": gradient.numel()}
            raise Refused(text(message, **counts), exact=True)
        self.given = gradient.clone()
        return super().__call__(piece, gradient)


@exercise(
    hint=(
        (
            "Four lines: reduce-scatter the gradients, cut the weights, let each Adam update its"
            " piece, all-gather."
        ),
        "Rank r's piece of its weight is `weights[r].chunk(n)[r]`; its gradient `sums[r] / n`.",
    )
)
def check_sharded_step(answer: Any) -> Verdict:
    """Check `answer(weights, gradients, adams, wire)`: three steps on 2 and on 4 ranks.

    They are compared with Adam on the mean gradient.
    """
    for n in (2, 4):
        whole, alone, wire, adams = (
            torch.linspace(-1, 1, 64),
            Adam(),
            _WireWithHiddenRank(),
            [_Watched() for _ in range(n)],
        )
        weights = [whole.clone() for _ in range(n)]
        for step in range(3):
            gradients = [torch.linspace(rank, step + 2, 64).sin() for rank in range(n)]
            mean = (sum(gradients) + wire.HIDDEN_GRADIENT) / n
            weights = answer(weights, gradients, adams, wire)
            if weights is None:
                return not_answered()
            _check_pieces(weights, adams, mean, n)
            _check_bytes(adams, wire, step + 1, n)
            whole = alone(whole, mean)
            _check_values(weights, adams, (whole, mean, sum(gradients) / n), wire)
            whole = whole + wire.HIDDEN_WEIGHT
    return right(
        "Right: an n-th of Adam's state a rank, and two numbers sent for each weight, as many as"
        " DDP sends."
    )


def _check_pieces(weights: Any, adams: list[_Watched], mean: Tensor, n: int) -> None:
    if not isinstance(weights, (list, tuple)) or len(weights) != n:
        raise Refused("A list with one tensor a rank is wanted.")
    if not any(adam.steps for adam in adams):
        raise Refused("No Adam was called.")
    if any(len(each) < len(mean) for each in weights):
        raise Refused(
            "Each rank has only its piece of the new weights. It needs all of them for the next"
            " step."
        )
    given = torch.cat([adam.given for adam in adams if adam.steps])
    if len(given) == len(mean) and torch.allclose(given, n * mean, atol=1e-6):
        raise Refused(
            "Adam gets the sum of the gradients. The batch's gradient is their mean over the ranks."
        )


def _check_values(
    weights: Sequence[Tensor],
    adams: list[_Watched],
    expected: tuple[Tensor, Tensor, Tensor],
    wire: _WireWithHiddenRank,
) -> None:
    """Compare the new weights, and the gradients that Adam got, with the right ones.

    Args:
        expected: Weights that Adam alone finds, before they are gathered; the mean gradient; and
            the mean gradient without the wire.
    """
    whole, mean, mean_without_wire = expected
    given = torch.cat([adam.given for adam in adams if adam.steps])
    if len(given) == len(mean) and torch.allclose(given, mean_without_wire, atol=1e-6):
        raise Refused(
            "Adam got a gradient that did not come through the wire. A rank knows its own gradient"
            " alone: use what `wire.reduce_scatter` returns.",
            exact=True,
        )
    if all(torch.allclose(each, whole, atol=1e-6) for each in weights):
        raise Refused(
            "The new weights did not come through the wire. A rank knows its own shard alone:"
            " return what `wire.all_gather` returns.",
            exact=True,
        )
    if not all(torch.allclose(each, whole + wire.HIDDEN_WEIGHT, atol=1e-6) for each in weights):
        raise Refused(
            "The weights are not those of Adam on the mean gradient. Has each rank got its own"
            " shard?"
        )
    if not torch.allclose(given, mean, atol=1e-6):
        raise Refused(
            "The weights are right, because Adam does not depend on the gradient's scale. Give it"
            " the mean over the ranks."
        )


def _check_bytes(adams: list[_Watched], wire: Wire, steps: int, n: int) -> None:
    most, share, once = max(adam.state_bytes for adam in adams), 8 * 64 // n, 2 * 4 * 64
    if most > share:
        raise Refused(
            text(
                "A rank keeps {most} bytes of Adam's state; an n-th of it is {share}.",
                most=most,
                share=share,
            )
        )
    if wire.sent_bytes < steps * once:
        raise Refused("Less is sent than a step takes: all must come through the wire.")
    if wire.sent_bytes > steps * once:
        raise Refused(
            text(
                "Right weights, but {sent} numbers are sent for each weight. Two are enough: who"
                " needs the whole sum?",
                sent=wire.sent_bytes // (steps * 4 * 64),
            )
        )


# One layer: gather, use, drop
# -----------------------------------------------------------------------------------------

# PyTorch's messages on mistakes in backward, and what they mean here.
_MISTAKES = {
    "incorrect number of gradients": (
        "Backward returns a gradient for each argument of forward: `None` for the wire."
    ),
    "invalid gradient at index 1": (
        "The second gradient is that of this rank's piece, and as long as the piece."
    ),
    "invalid gradient at index 0": "The first gradient is that of `x`, and has its shape.",
}


@exercise(
    hint=(
        (
            "Save `x` and the piece, not the whole weight. Backward gathers it again, and scatters"
            " its gradient."
        ),
        (
            "Backward: `gradient @ whole` for `x`; `wire.reduce_scatter(gradient.mT @ x)` for the"
            " piece; `None`."
        ),
    )
)
def check_gathered_linear(function: Any) -> Verdict:
    """Check a Linear `function(x, piece, wire)`, or a Function, with a sharded weight.

    It runs as rank 2 of 4 and as rank 0 of 2.
    """
    for rank, ranks in ((2, 4), (0, 2)):
        _check_gathered(getattr(function, "apply", function), rank, ranks)
    return right(
        "Right: between forward and backward an n-th of the weight is live; sent are two gathers"
        " and a scatter."
    )


def _check_gathered(function: Any, rank: int, ranks: int) -> None:
    weight = torch.linspace(-1, 1, 64 * 96).sin().view(64, 96)
    inputs = [torch.linspace(-1, 2 + each, 5 * 96).cos().view(5, 96) for each in range(ranks)]
    arriving = [torch.linspace(-2, 1 + each, 5 * 64).view(5, 64) for each in range(ranks)]
    gradients = [g.mT @ x for g, x in zip(arriving, inputs, strict=True)]
    pieces = weight.chunk(ranks)
    wire = RankWire(rank, pieces, gradients)
    x, piece = inputs[rank].clone().requires_grad_(), pieces[rank].clone().requires_grad_()
    with MemoryMeter() as meter:
        output = function(x, piece, wire)
        if output is None or output is ... or output is x or output.shape == x.shape:
            raise NotImplementedError
        kept = meter.live_bytes - output.nbytes
    _check_forward(output, inputs[rank] @ weight.mT, piece, wire, weight.nbytes)
    if kept > weight.nbytes // 2:
        message = (
            "Between forward and backward {kept:,} bytes more are live; the weight has {whole:,}:"
            " save the piece."
        )
        raise Refused(text(message, kept=kept, whole=weight.nbytes), exact=True)
    try:
        output.backward(arriving[rank])
    except RuntimeError as error:
        for message, meant in _MISTAKES.items():
            if message in str(error):
                raise Refused(meant, exact=True) from None
        raise
    _check_backward(x.grad, arriving[rank] @ weight, "x")
    total, own = sum(gradients).chunk(ranks)[rank], gradients[rank].chunk(ranks)[rank]
    mistakes = {
        "That is this rank's gradient alone. The piece's is the sum over all ranks.": own,
        "The piece's gradient is the sum over the ranks here; the mean is the loss's affair.": (
            total / ranks
        ),
    }
    _check_backward(piece.grad, total, "piece", mistakes)
    _check_traffic(wire.sent_bytes, weight.nbytes)


def _check_forward(
    output: Tensor, expected: Tensor, piece: Tensor, wire: RankWire, whole: int
) -> None:
    if wire.sent_bytes == 0:
        raise Refused(
            "Nothing went through the wire: a rank has only its piece of the weight.", exact=True
        )
    if output.shape != expected.shape or not torch.allclose(output, expected, atol=1e-4):
        raise Refused("The output is not `x` times the whole weight, transposed.")
    if not output.requires_grad:
        raise Refused("The output has no graph: backward would never be called.", exact=True)


def _check_backward(
    found: Tensor | None, expected: Tensor, name: str, mistakes: Mapping[str, Tensor] | None = None
) -> None:
    name = f"`{name}`"
    if found is None:
        raise Refused(text("{name} has no gradient.", name=name), exact=True)
    for message, mistake in (mistakes or {}).items():
        if torch.allclose(found, mistake, atol=1e-4):
            raise Refused(message, exact=True)
    if not torch.allclose(found, expected, atol=1e-3, rtol=1e-4):
        raise Refused(
            text(
                "The gradient of {name} is not what autograd gives for the whole weight.", name=name
            )
        )


def _check_traffic(sent: int, whole: int) -> None:
    if sent < 3 * whole:
        raise Refused(
            "Less was sent than two gathers and a scatter: where was the whole weight kept?",
            exact=True,
        )
    if sent > 3 * whole:
        message = (
            "{sent} numbers are sent for each weight. Three are enough: gathered twice, its"
            " gradient scattered once."
        )
        raise Refused(text(message, sent=sent // whole), exact=True)


# What is sent
# --------------------------------------------------------------------------------------------------


@exercise(
    hint=(
        (
            "An all-reduce counts twice. How often is a block's weight gathered, and how often its"
            " gradient scattered?"
        ),
        (
            "Of a block: two gathers and a scatter, 4 bytes a number each. Of the root: one gather"
            " and a scatter."
        ),
    )
)
def check_sent(answer: Any) -> Verdict:
    """Check a function of psi and root: bytes that a rank communicates per step, DDP and FSDP2."""
    for psi, root in ((PSI, 557_568), (1000, 100)):
        given = answer(psi, root)
        if given is None or (isinstance(given, Mapping) and not any(given.values())):
            return not_answered()
        if not isinstance(given, Mapping) or set(given) != {"DDP", "FSDP2"}:
            return wrong("A dictionary with the keys `DDP` and `FSDP2` is wanted.")
        wanted = {"DDP": 8 * psi, "FSDP2": 12 * psi - 4 * root}
        for mode, count in wanted.items():
            mistakes = {count / 4: "That counts numbers; fp32 takes 4 bytes each."}
            if mode == "DDP":
                mistakes[4 * psi] = (
                    "An all-reduce counts twice: the sum is scattered, and then gathered."
                )
            else:
                mistakes |= {
                    12 * psi: (
                        "The root is gathered once: it is not dropped between forward and backward."
                    ),
                    12 * psi - 8 * root: (
                        "The root is gathered once, and its gradient scattered once."
                    ),
                    12 * psi - 12 * root: (
                        "The root is gathered once, and its gradient scattered once."
                    ),
                    8 * psi: "Blocks are gathered twice: for forward, and again for backward.",
                    8 * psi - 4 * root: "The gradients are sent, too.",
                    16 * psi - 4 * root: "Gradients are scattered; nobody gathers them.",
                }
            verdict = expect_number(given[mode], count, wrong_answers=mistakes, in_bytes=True)
            if not verdict:
                message = text("`{kind}`: {message}", kind=mode, message=verdict.message)
                return wrong(message, exact=verdict.exact)
    return right("Right: 2ψ numbers under DDP, 3ψ less the root under FSDP2.")


# Seconds
# --------------------------------------------------------------------------------------------------


@exercise(
    hint=(
        (
            "Seconds of traffic: 12ψ bytes over the link. Seconds of compute: 6ψ FLOPs for each"
            " token, over the rate."
        ),
        "12ψ / link = 6ψ · tokens / rate. Solve for the tokens; what becomes of ψ?",
    )
)
def check_tokens_to_hide(answer: Any) -> Verdict:
    """Check a function of psi, rate and link: the tokens per rank that hide FSDP2's traffic."""
    for psi, rate, link in (
        (7 * 10**9, 400e12, 50e9),
        (70 * 10**9, 400e12, 50e9),
        (10**9, 900e12, 450e9),
    ):
        given = answer(psi, rate, link)
        if given is None or given is ... or given == 0:
            return not_answered()
        least = 2 * rate / link
        mistakes = {
            6 * rate / link: "Backward computes, too: 6 FLOPs for each weight and token, not 2.",
            3 * rate / link: "Forward and backward: 6 FLOPs for each weight and token, not 4.",
            rate / link / 2: "That counts numbers; a number of fp32 has 4 bytes.",
            4 / 3 * rate / link: (
                "That is DDP's traffic, 8 bytes a weight. FSDP2 gathers twice and scatters once."
            ),
            2 * link / rate: "Upside down: a fast link needs fewer tokens.",
            2 * rate / link * psi: "The weights are in both, traffic and compute: they cancel.",
        }
        verdict = expect_number(given, least, tolerance=1e-3, wrong_answers=mistakes)
        if not verdict:
            return verdict
    return right(
        "Right: 2 · rate / link, whatever the model. Half a petaflop beside a slow link takes a"
        " long batch."
    )
