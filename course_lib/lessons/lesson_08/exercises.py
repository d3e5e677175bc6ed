"""The exercises of lesson 08."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from course_lib.lessons.ledger import PARAMETERS as PSI
from course_lib.memory import MemoryMeter
from course_lib.teaching import Verdict, expect_number, text
from course_lib.teaching.exercises import (
    WrongAnswer,
    cases,
    draw_case,
    exercise,
    not_answered,
    right,
    wrong,
)

from .wire import Adam, RankWire, Wire

STAGES = ("DDP", "ZeRO 1", "ZeRO 2", "ZeRO 3")


def _bytes_in_fp32(psi: int, n: int) -> dict[str, float]:
    """Return the bytes per rank with all numbers in fp32."""
    counts = (16 * psi, 8 * psi + 8 * psi / n, 4 * psi + 12 * psi / n, 16 * psi / n)
    return dict(zip(STAGES, counts, strict=True))


def _bytes_in_mixed_precision(psi: int, n: int) -> dict[str, float]:
    """Return the bytes per rank in mixed precision, as in the ZeRO paper."""
    counts = (16 * psi, 4 * psi + 12 * psi / n, 2 * psi + 14 * psi / n, 16 * psi / n)
    return dict(zip(STAGES, counts, strict=True))


def _blank(value: Any) -> bool:
    """Return whether this value, which may be an array, stands for no answer."""
    return value is None or value is ... or (isinstance(value, int | float) and value == 0)


@exercise(
    hint=(
        "Each parameter takes 4 bytes for the weight, 4 for the gradient and 8 for Adam's"
        " state. Which of the three does the stage cut into n shards?",
        (
            "Add up the bytes of the parts that stay whole, and the bytes of the sharded parts"
            " divided by n."
        ),
    )
)
def check_held(answer: Any) -> Verdict:
    """Check a function of psi and n: bytes per rank of weights, gradients and Adam's state in fp32.

    It returns one number for each stage.
    """
    # with n = 2 or n = 4 alone, some mistakes give the right number
    for psi, n in cases(((PSI, 8), (PSI, 2), (1_000_000, 4)), _draw_ranks):
        given = _four_stages(answer(psi, n))
        for stage, count in _bytes_in_fp32(psi, n).items():
            mistakes = {count / 4: "You counted numbers. Each fp32 number takes 4 bytes."}
            mistakes |= _mistakes_of_any(count, n)
            if stage == "DDP":
                mistakes |= {
                    12 * psi: (
                        "You counted three numbers per parameter. There are four: the weight, its"
                        " gradient and two of Adam's."
                    ),
                    16 * psi / n: "You divided by n. DDP does not shard anything.",
                }
            if stage == "ZeRO 1":
                mistakes |= {
                    12 * psi + 4 * psi / n: _OTHER_SHARD,
                    4 * psi + 8 * psi / n: _NO_GRADIENTS,
                    4 * psi + 12 * psi / n: (
                        "You counted ZeRO 2, or used the paper's formula, in which each"
                        " gradient takes 2 bytes. Here it takes 4 bytes, and ZeRO 1 does not"
                        " shard the gradients."
                    ),
                    8 * psi
                    + 4
                    * psi
                    / n: "You counted one number of Adam's state per weight. Adam keeps two.",
                    16
                    * psi
                    / n: "You divided everything by n. ZeRO 1 shards only the optimizer state.",
                }
            if stage == "ZeRO 2":
                mistakes |= {
                    12 * psi + 4 * psi / n: _OTHER_SHARD,
                    4 * psi + 8 * psi / n: _NO_GRADIENTS,
                    2 * psi + 14 * psi / n: (
                        "You used the paper's formula for mixed precision. Here all numbers are"
                        " fp32."
                    ),
                    8 * psi
                    + 8 * psi / n: "You left the gradients whole. This stage shards them, too.",
                    16 * psi / n: "You divided the weights by n, too. ZeRO 2 keeps them whole.",
                }
            if stage == "ZeRO 3":
                mistakes |= {
                    12 * psi / n: _NO_GRADIENTS,
                    4 * psi + 12 * psi / n: "You left the weights whole. ZeRO 3 shards them, too.",
                }
            _expect(given[stage], count, mistakes, stage, n, tolerance=1e-9)
    return right("Right: 16ψ, 8ψ + 8ψ/n, 4ψ + 12ψ/n and 16ψ/n bytes.")


@exercise(
    hint=(
        (
            "Each parameter takes 2 bytes for the weight, 2 for the gradient and 12 for the"
            " optimizer state. Which of the three does the stage shard?"
        ),
        (
            "ZeRO 1 shards only the optimizer state. Which part does each further stage shard in"
            " addition?"
        ),
    )
)
def check_seven_billion(answer: Any) -> Verdict:
    """Check the bytes per rank for 7e9 parameters in mixed precision on 8 ranks, for each stage."""
    psi, n, billion = 7 * 10**9, 8, 10**9
    fp32 = _bytes_in_fp32(psi, n)
    given = _four_stages(answer)
    for stage, count in _bytes_in_mixed_precision(psi, n).items():
        mistakes = {
            count / psi: "You gave the bytes per parameter. Give the bytes of all parameters.",
        } | _mistakes_of_any(count, n)
        if stage in ("ZeRO 1", "ZeRO 2"):
            mistakes[16 * psi / n] = (
                "You divided everything by n. This stage does not shard everything."
            )
            mistakes[fp32[stage]] = (
                "You counted weights and gradients in fp32. Here they take 2 bytes per number."
            )
        if stage == "ZeRO 1":
            mistakes[fp32[stage]] = (
                "You counted weights and gradients in fp32, as autocast keeps them. Here they"
                " take 2 bytes per number."
            )
            mistakes[2 * psi + 14 * psi / n] = (
                "You counted ZeRO 2. ZeRO 1 does not shard the gradients."
            )
        if stage == "ZeRO 3":
            mistakes[2 * psi + 14 * psi / n] = (
                "You left the weights whole. ZeRO 3 shards them, too."
            )
        # At ZeRO 2 this number means whole gradients, because the answer for ZeRO 1 was right.
        if stage == "ZeRO 2":
            mistakes[4 * psi + 12 * psi / n] = (
                "You left the gradients whole. This stage shards them, too."
            )
        if stage == "DDP":
            mistakes[14 * billion] = "You divided by n. DDP does not shard anything."
        _expect(given[stage], count, mistakes, stage, n)
    return right(
        "Right: 112, 38.5, 26.25 and 14 GB. The activations of each rank are added to these."
    )


def _draw_ranks(rng: random.Random) -> tuple[int, int]:
    n = rng.randint(3, 12)
    return n * rng.randrange(10**5, 10**7), n


def _four_stages(given: Any) -> Mapping[str, Any]:
    """Return the answer if it has the four stages and is not all zeros.

    Raises:
        WrongAnswer: The answer has another form, or all numbers are zero.
    """
    if _blank(given) or (isinstance(given, Mapping) and all(map(_blank, given.values()))):
        raise WrongAnswer("Not answered yet.")
    if not isinstance(given, Mapping) or set(given) != set(STAGES):
        raise WrongAnswer(
            "Give a dictionary with the keys `DDP`, `ZeRO 1`, `ZeRO 2` and `ZeRO 3`.", exact=True
        )
    return given


_OTHER_SHARD = "You sharded the gradients and left Adam's state whole. ZeRO shards the state first."
_NO_GRADIENTS = "You left out the gradients. Each rank holds them, too."


def _mistakes_of_any(count: float, n: int) -> dict[float, str]:
    """Return the wrong numbers that are possible for each stage."""
    return {n * count: "You counted all ranks together. Give the bytes of one rank."}


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
        raise WrongAnswer(message, exact=verdict.exact)


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
        return [shard + self.HIDDEN_GRADIENT for shard in super().reduce_scatter(tensors)]

    def all_gather(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return [whole + self.HIDDEN_WEIGHT for whole in super().all_gather(shards)]


class _RecordingAdam(Adam):
    """An Adam that remembers its last arguments."""

    def __call__(self, shard: Tensor, gradient: Tensor) -> Tensor:
        if shard.shape != gradient.shape:
            message = (
                "You gave Adam {weights} weights and {gradients} numbers of a gradient. Give it"
                " this rank's shard of both."
            )
            counts = {"weights": shard.numel(), "gradients": gradient.numel()}
            raise WrongAnswer(text(message, **counts), exact=True)
        self.shard, self.given = shard.clone(), gradient.clone()
        return super().__call__(shard, gradient)


@exercise(
    hint=(
        (
            "Each rank has the gradient of its own samples. What must it get from the others before"
            " it can update its shard, and what before the next step?"
        ),
        (
            "For its shard, a rank needs only a shard of the gradients' sum, which a reduce-scatter"
            " returns. Which collective gives each rank all weights again?"
        ),
    )
)
def check_sharded_step(answer: Any) -> Verdict:
    """Check `answer(weights, gradients, adams, wire)`: three steps on 2 and on 4 ranks.

    They are compared with Adam on the mean gradient.
    """
    for n in (2, 4):
        whole, alone, wire, adams = (
            torch.linspace(-1, draw_case(1.0, _draw_end), 64),
            Adam(),
            _WireWithHiddenRank(),
            [_RecordingAdam() for _ in range(n)],
        )
        weights = [whole.clone() for _ in range(n)]
        for step in range(3):
            gradients = [torch.linspace(rank, step + 2, 64).sin() for rank in range(n)]
            mean = (sum(gradients) + wire.HIDDEN_GRADIENT) / n
            held = _as_held(weights)
            # an answer may change its arguments in place
            copies = [[each.clone() for each in tensors] for tensors in (held, gradients)]
            weights = answer(*copies, adams, wire)
            if weights is None:
                return not_answered()
            if _close(divided := sum(gradients) / n + wire.HIDDEN_GRADIENT, adams):
                mean = divided  # each rank divided its gradient, and the additional one did not
            _check_shards(weights, adams, mean, n)
            _check_sources(held, adams)
            _check_bytes(adams, wire, step + 1, n)
            whole = alone(whole, mean)
            _check_values(weights, adams, (whole, mean, sum(gradients) / n), wire)
            whole = whole + wire.HIDDEN_WEIGHT
    return right(
        "Right: each rank keeps 1/n of Adam's state, and two numbers are sent per weight, which"
        " is as many as DDP sends."
    )


def _draw_end(rng: random.Random) -> float:
    return rng.uniform(0.8, 1.2)


def _as_held(weights: Sequence[Tensor]) -> list[Tensor]:
    """Return the weights of each rank, which differ in the last bit outside its own shard.

    So the check can tell whether rank r used its own shard or the same shard of another rank.
    """
    held = []
    for rank, whole in enumerate(weights):
        shards = list(whole.nextafter(torch.tensor(torch.inf)).chunk(len(weights)))
        shards[rank] = whole.chunk(len(weights))[rank]
        held.append(torch.cat(shards))
    return held


def _check_sources(held: Sequence[Tensor], adams: list[_RecordingAdam]) -> None:
    """Refuse an answer in which a rank reads its shard from another rank's weights."""
    n = len(held)
    for rank, adam in enumerate(adams):
        elsewhere = held[(rank + 1) % n].chunk(n)[rank]
        if adam.steps and torch.equal(adam.shard, elsewhere):
            raise WrongAnswer(
                "You took a shard from another rank's weights. Rank r can read only `weights[r]`.",
                exact=True,
            )


def _close(gradient: Tensor, adams: list[_RecordingAdam]) -> bool:
    """Return whether the shards that the Adams got make up this gradient."""
    given = [adam.given for adam in adams if adam.steps]
    return sum(map(len, given)) == len(gradient) and torch.allclose(
        torch.cat(given), gradient, atol=1e-6
    )


def _check_shards(weights: Any, adams: list[_RecordingAdam], mean: Tensor, n: int) -> None:
    if not isinstance(weights, (list, tuple)) or len(weights) != n:
        raise WrongAnswer("Return a list with one tensor per rank.", exact=True)
    if not all(isinstance(each, Tensor) for each in weights):
        raise WrongAnswer("Return a list with one tensor per rank.", exact=True)
    if not any(adam.steps for adam in adams):
        raise WrongAnswer("You did not call any of the `adams`.", exact=True)
    if any(len(each) < len(mean) for each in weights):
        raise WrongAnswer(
            "You returned only one shard of the new weights for each rank. Each rank needs all"
            " weights for the next step.",
            exact=True,
        )
    given = torch.cat([adam.given for adam in adams if adam.steps])
    if len(given) == len(mean) and torch.allclose(given, n * mean, atol=1e-6):
        raise WrongAnswer(
            "You gave Adam the sum of the gradients. The gradient of the batch is their mean"
            " over the ranks.",
            exact=True,
        )


def _check_values(
    weights: Sequence[Tensor],
    adams: list[_RecordingAdam],
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
        raise WrongAnswer(
            "You gave Adam a gradient that did not come through the wire. A rank has only its"
            " own gradient, so use what `wire.reduce_scatter` returns.",
            exact=True,
        )
    if all(torch.allclose(each, whole, atol=1e-6) for each in weights):
        raise WrongAnswer(
            "Your new weights did not come through the wire. A rank has only its own shard, so"
            " return what `wire.all_gather` returns.",
            exact=True,
        )
    if not all(torch.allclose(each, whole + wire.HIDDEN_WEIGHT, atol=1e-6) for each in weights):
        raise WrongAnswer(
            "Your weights differ from those that Adam computes with the mean gradient. Does"
            " each rank use its own shard?"
        )
    if not torch.allclose(given, mean, atol=1e-6):
        raise WrongAnswer(
            "The weights are right only because Adam does not depend on the scale of the"
            " gradient. Give it the mean over the ranks.",
            exact=True,
        )


def _check_bytes(adams: list[_RecordingAdam], wire: Wire, steps: int, n: int) -> None:
    most, share, once = max(adam.state_bytes for adam in adams), 8 * 64 // n, 2 * 4 * 64
    if most > share:
        raise WrongAnswer(
            text(
                "One rank keeps {most} bytes of Adam's state. It should keep 1/n of the state,"
                " which is {share} bytes.",
                most=most,
                share=share,
            )
        )
    if wire.sent_bytes < steps * once:
        raise WrongAnswer(
            "You send fewer bytes than a step needs. All gradients and weights of other ranks"
            " must come through the wire."
        )
    if wire.sent_bytes > steps * once:
        raise WrongAnswer(
            text(
                "The weights are right, but you send {sent} numbers per weight. Two are enough,"
                " because no rank needs the whole sum.",
                sent=wire.sent_bytes // (steps * 4 * 64),
            ),
            exact=True,
        )


# One layer: gather, use, drop
# -----------------------------------------------------------------------------------------

# The beginnings of PyTorch's errors in backward -> what is wrong with the reader's function.
_BACKWARD_ERRORS = {
    "incorrect number of gradients": (
        "Your backward returns the wrong number of gradients. Return one for each argument of"
        " forward, and `None` for the wire."
    ),
    "invalid gradient at index 1": (
        "Your second gradient has the wrong shape. It is the gradient of `shard`, so it must"
        " have the shape of `shard`."
    ),
    "invalid gradient at index 0": (
        "Your first gradient has the wrong shape. It is the gradient of `x`, so it must have"
        " the shape of `x`."
    ),
}


@exercise(
    hint=(
        ("The whole weight may not be kept until backward. What may be kept instead?"),
        (
            "Backward needs the whole weight for the gradient of `x`, so gather it again. Which"
            " collective adds up the weight's gradients of all ranks and returns only a shard?"
        ),
    )
)
def check_gathered_linear(function: Any) -> Verdict:
    """Check a Linear `function(x, shard, wire)`, or a Function, with a sharded weight.

    It runs as rank 2 of 4 and as rank 0 of 2.
    """
    for rank, ranks in ((2, 4), (0, 2)):
        _check_gathered(getattr(function, "apply", function), rank, ranks)
    return right(
        "Right: between forward and backward only 1/n of the weight is live. Two gathers and"
        " one scatter are sent."
    )


def _check_gathered(function: Any, rank: int, ranks: int) -> None:
    weight = torch.linspace(-1, draw_case(1.0, _draw_end), 64 * 96).sin().view(64, 96)
    inputs = [torch.linspace(-1, 2 + each, 5 * 96).cos().view(5, 96) for each in range(ranks)]
    arriving = [torch.linspace(-2, 1 + each, 5 * 64).view(5, 64) for each in range(ranks)]
    gradients = [g.mT @ x for g, x in zip(arriving, inputs, strict=True)]
    shards = weight.chunk(ranks)
    wire = RankWire(rank, shards, gradients)
    x, shard = inputs[rank].clone().requires_grad_(), shards[rank].clone().requires_grad_()
    with MemoryMeter() as meter:
        output = function(x, shard, wire)
        if output is None or output is ... or output is x:
            raise NotImplementedError
        if not isinstance(output, Tensor):
            raise WrongAnswer("Return the output as one tensor.", exact=True)
        if output.shape == x.shape:
            raise NotImplementedError
        kept = meter.live_bytes - output.nbytes
    _check_forward(output, inputs[rank] @ weight.mT, shard, wire, weight.nbytes)
    if kept > weight.nbytes // 2:
        message = (
            "Between forward and backward you keep {kept:,} more bytes, and the whole weight"
            " has {whole:,}. Save `shard` itself, not a copy or the whole weight."
        )
        raise WrongAnswer(text(message, kept=kept, whole=weight.nbytes), exact=True)
    try:
        output.backward(arriving[rank])
    except RuntimeError as error:
        for message, meant in _BACKWARD_ERRORS.items():
            if message in str(error):
                raise WrongAnswer(meant, exact=True) from None
        raise
    _check_backward(x.grad, arriving[rank] @ weight, "x")
    total, own = sum(gradients).chunk(ranks)[rank], gradients[rank].chunk(ranks)[rank]
    mistakes = {
        (
            "You returned only this rank's gradient for `shard`. It must be the sum over all ranks."
        ): own,
        (
            "You returned the mean over the ranks for `shard`. Here it must be the sum, because"
            " averaging belongs in the loss."
        ): (total / ranks),
    }
    _check_backward(shard.grad, total, "shard", mistakes)
    _check_traffic(wire.sent_bytes, weight.nbytes)


def _check_forward(
    output: Tensor, expected: Tensor, shard: Tensor, wire: RankWire, whole: int
) -> None:
    if wire.sent_bytes == 0:
        raise WrongAnswer(
            "You sent nothing through the wire. A rank has only its shard of the weight, so"
            " gather the rest.",
            exact=True,
        )
    if output.shape != expected.shape or not torch.allclose(output, expected, atol=1e-4):
        raise WrongAnswer("Your output is not `x` times the transpose of the whole weight.")
    if not output.requires_grad:
        raise WrongAnswer(
            "Your output has no graph, so backward would never be called.", exact=True
        )


def _check_backward(
    found: Tensor | None, expected: Tensor, name: str, mistakes: Mapping[str, Tensor] | None = None
) -> None:
    if found is None and name == "shard":
        raise WrongAnswer(
            "`shard` has no gradient, because autograd records no collective. Write a"
            " `torch.autograd.Function` whose backward returns this gradient.",
            exact=True,
        )
    name = f"`{name}`"
    if found is None:
        raise WrongAnswer(text("{name} has no gradient.", name=name), exact=True)
    for message, mistake in (mistakes or {}).items():
        if torch.allclose(found, mistake, atol=1e-4):
            raise WrongAnswer(message, exact=True)
    if not torch.allclose(found, expected, atol=1e-3, rtol=1e-4):
        raise WrongAnswer(
            text(
                "Your gradient of {name} differs from what autograd computes with the whole"
                " weight.",
                name=name,
            )
        )


def _check_traffic(sent: int, whole: int) -> None:
    if sent < 3 * whole:
        raise WrongAnswer(
            "You sent less than two gathers and one scatter. Where did you keep the whole weight?",
            exact=True,
        )
    if sent > 3 * whole:
        message = (
            "You send {sent} numbers per weight. Three are enough, because the weight is"
            " gathered twice and its gradient is scattered once."
        )
        raise WrongAnswer(text(message, sent=sent // whole), exact=True)


# What is sent
# --------------------------------------------------------------------------------------------------


def _draw_root(rng: random.Random) -> tuple[int, int]:
    root = rng.randrange(100, 10**5)
    return 10 * root + rng.randrange(10**6), root


def _draw_device(rng: random.Random) -> tuple[int, float, float]:
    return rng.randint(1, 90) * 10**9, rng.randint(100, 1000) * 1e12, rng.randint(20, 500) * 1e9


@exercise(
    hint=(
        (
            "An all-reduce counts twice. How often is the weight of a block gathered, and how"
            " often is its gradient scattered?"
        ),
        (
            "A block's weight is used in forward and in backward, and released in between. The"
            " root's weight is kept from forward to backward."
        ),
    )
)
def check_sent(answer: Any) -> Verdict:
    """Check a function of psi and root: bytes that a rank communicates per step, DDP and FSDP2."""
    for psi, root in cases(((PSI, 557_568), (1000, 100)), _draw_root):
        given = answer(psi, root)
        if _blank(given) or (isinstance(given, Mapping) and all(map(_blank, given.values()))):
            return not_answered()
        if not isinstance(given, Mapping) or set(given) != {"DDP", "FSDP2"}:
            return wrong("Give a dictionary with the keys `DDP` and `FSDP2`.", exact=True)
        if _blank(given["FSDP2"]) and expect_number(given["DDP"], 8 * psi):
            return not_answered()  # the function as it was given
        expected = {"DDP": 8 * psi, "FSDP2": 12 * psi - 4 * root}
        for mode, count in expected.items():
            mistakes = {count / 4: "You counted numbers. Each fp32 number takes 4 bytes."}
            if mode == "DDP":
                mistakes[4 * psi] = (
                    "You counted an all-reduce once. It counts twice, because the sum is"
                    " scattered and then gathered."
                )
            else:
                mistakes |= {
                    12 * psi: (
                        "You gathered the root twice. It is gathered only once, because it is"
                        " kept from forward to backward."
                    ),
                    12 * psi - 8 * root: (
                        "You left out the root, or a part of it. It is gathered once, and its"
                        " gradient is scattered once."
                    ),
                    12 * psi - 12 * root: (
                        "You left out the root, or a part of it. It is gathered once, and its"
                        " gradient is scattered once."
                    ),
                    8 * psi: (
                        "You gathered the blocks once. They are gathered twice, for forward and"
                        " again for backward."
                    ),
                    8 * psi - 4 * root: "You left out the gradients. They are sent, too.",
                    16 * psi
                    - 4 * root: "You gathered the gradients as well. They are only scattered.",
                }
            verdict = expect_number(given[mode], count, wrong_answers=mistakes, in_bytes=True)
            if not verdict:
                message = text("`{kind}`: {message}", kind=mode, message=verdict.message)
                return wrong(message, exact=verdict.exact)
    return right("Right: 2ψ numbers with DDP, and 3ψ minus the root with FSDP2.")


# Seconds
# --------------------------------------------------------------------------------------------------


@exercise(
    hint=(
        (
            "How many seconds does a rank communicate per step, and how many seconds does it"
            " compute per token?"
        ),
        (
            "FSDP2 communicates 12 bytes per weight. A step computes 6 FLOPs per weight and token."
            " Convert both to seconds, and set them equal."
        ),
    )
)
def check_tokens_to_hide(answer: Any) -> Verdict:
    """Check a function of psi, rate and link: the tokens per rank that hide FSDP2's traffic."""
    devices = (
        (7 * 10**9, 400e12, 50e9),
        (70 * 10**9, 400e12, 50e9),
        (10**9, 900e12, 450e9),
    )
    for psi, rate, link in cases(devices, _draw_device):
        given = answer(psi, rate, link)
        if _blank(given):
            return not_answered()
        least = 2 * rate / link
        mistakes = {
            6 * rate / link: (
                "You counted only forward, with 2 FLOPs per weight and token. With backward it"
                " is 6."
            ),
            12 * rate / link: "You left out the 6 FLOPs per weight and token.",
            rate / link: ("You counted 6 bytes per weight. In fp32, FSDP2 communicates 12 bytes."),
            16 * rate / link: "You counted bits. The link is in bytes per second.",
            3 * rate / link: (
                "You counted 4 FLOPs per weight and token. Forward and backward together take 6."
            ),
            rate / link / 2: (
                "You counted the numbers that are sent. Each fp32 number takes 4 bytes."
            ),
            4 / 3 * rate / link: (
                "You used DDP's communication volume, 8 bytes per weight. FSDP2 gathers twice"
                " and scatters once, which is 12 bytes."
            ),
            2 * link / rate: "Your fraction is upside down. A faster link needs fewer tokens.",
            2 * rate / link * psi: (
                "You kept ψ in the result. Both communication and compute are proportional to"
                " ψ, so it cancels."
            ),
        }
        verdict = expect_number(given, least, tolerance=1e-3, wrong_answers=mistakes)
        if not verdict:
            return verdict
    return right(
        "Right: 2 · rate / link, for any model. A fast device with a slow link needs many"
        " tokens per step."
    )
