"""The exercises of lesson 08."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from course_lib.lessons.ledger import PARAMETERS as PSI
from course_lib.teaching import Verdict, expect_number
from course_lib.teaching.exercises import Messages, cases, draw_case, each, exercise, numbers
from course_lib.teaching.exercises.probes import is_close, reject_mistakes, run_forward

from .wire import Adam, RankWire, Wire

say = Messages(__file__)

# Bytes per rank


def _draw_ranks(rng: random.Random) -> tuple[int, int]:
    n = rng.randint(3, 12)
    return n * rng.randrange(10**5, 10**7), n


@numbers(
    {
        "elements": each(lambda count, psi, n: count / 4),
        "all_ranks": each(lambda count, psi, n: n * count),
        "three_numbers": lambda psi, n: {"DDP": 12 * psi},
        "ddp_sharded": lambda psi, n: {"DDP": 16 * psi / n},
        "gradients_first": lambda psi, n: dict.fromkeys(
            ("ZeRO 1", "ZeRO 2"), 12 * psi + 4 * psi / n
        ),
        "no_gradients": lambda psi, n: {
            "ZeRO 1": 4 * psi + 8 * psi / n,
            "ZeRO 2": 4 * psi + 8 * psi / n,
            "ZeRO 3": 12 * psi / n,
        },
        "zero_2": lambda psi, n: {"ZeRO 1": 4 * psi + 12 * psi / n},
        "one_moment": lambda psi, n: {"ZeRO 1": 8 * psi + 4 * psi / n},
        "everything": lambda psi, n: {"ZeRO 1": 16 * psi / n},
        "mixed_precision": lambda psi, n: {"ZeRO 2": 2 * psi + 14 * psi / n},
        "whole_gradients": lambda psi, n: {"ZeRO 2": 8 * psi + 8 * psi / n},
        "sharded_weights": lambda psi, n: {"ZeRO 2": 16 * psi / n},
        "whole_weights": lambda psi, n: dict.fromkeys(
            ("ZeRO 3", "ZeRO 3, bf16"), 4 * psi + 12 * psi / n
        ),
        "all_in_bf16": lambda psi, n: {"ZeRO 3, bf16": 8 * psi / n},
        "twelve_bytes": lambda psi, n: {"ZeRO 3, bf16": 12 * psi / n},
        "bf16_weights": lambda psi, n: {"ZeRO 3, bf16": 14 * psi / n},
        "bf16_copy": lambda psi, n: {
            "ZeRO 3, bf16": (18 * psi / n, 16 * psi / n + 2 * psi, 14 * psi / n + 2 * psi)
        },
    },
    # with n = 2 or n = 4 alone, some mistakes give the right number
    cases=lambda: cases([(PSI, 8), (PSI, 2), (1_000_000, 4)], _draw_ranks),
    tolerance=1e-9,
    in_bytes=True,
    place="place",
    blank=(None, ..., 0),
)
def check_held(psi: int, n: int) -> dict[str, float]:
    """Check the learner's formulas for the bytes of training state that a rank stores with ZeRO.

    There is one formula for each stage of ZeRO. The training state consists of weights, gradients
    and Adam's state in fp32. With mixed precision, FSDP2 (stage 3) stores its shards in fp32, too.
    The decorated function computes the right answer, and the decorator `numbers` turns it into a
    check.

    Args:
        psi: Number of parameters.
        n: Number of ranks.
    """
    return {
        "DDP": 16 * psi,
        "ZeRO 1": 8 * psi + 8 * psi / n,
        "ZeRO 2": 4 * psi + 12 * psi / n,
        "ZeRO 3": 16 * psi / n,
        "ZeRO 3, bf16": 16 * psi / n,
    }


@numbers(
    {
        "per_parameter": each(lambda count: count / 7e9),
        "all_ranks": each(lambda count: 8 * count),
        "ddp_sharded": {"DDP": 14e9},
        "everything": {"ZeRO 1": 14e9, "ZeRO 2": 14e9},
        "as_autocast": {"ZeRO 1": 63e9},
        "zero_2": {"ZeRO 1": 26.25e9},
        # at ZeRO 2 this number shows unsharded gradients, because the answer for ZeRO 1 was right
        "whole_gradients": {"ZeRO 2": 38.5e9},
        "whole_weights": {"ZeRO 3": 26.25e9},
    },
    tolerance=2e-3,  # for a number that is rounded to three digits
    in_bytes=True,
    place="place",
)
def check_seven_billion() -> dict[str, float]:
    """Check the learner's numbers of bytes of training state per rank, for each stage of ZeRO.

    The model has 7e9 parameters and is trained in mixed precision on 8 ranks. The decorated
    function computes the right bytes, in a dict with the keys "DDP", "ZeRO 1", "ZeRO 2" and "ZeRO
    3". The decorator `numbers` makes it a check, which compares the learner's dict with this dict.
    """
    psi, n = 7e9, 8
    return {
        "DDP": 16 * psi,
        "ZeRO 1": 4 * psi + 12 * psi / n,
        "ZeRO 2": 2 * psi + 14 * psi / n,
        "ZeRO 3": 16 * psi / n,
    }


# The step by hand


class _WireWithHiddenRank(Wire):
    """A wire with an additional rank, so that answers that do not use the wire are wrong.

    The additional rank adds `HIDDEN_GRADIENT` to every sum, and shifts all gathered weights by
    `HIDDEN_WEIGHT`.
    """

    HIDDEN_GRADIENT = 0.25
    HIDDEN_WEIGHT = 0.125

    def reduce_scatter(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [shard + self.HIDDEN_GRADIENT for shard in super().reduce_scatter(tensors)]

    def all_gather(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return [whole + self.HIDDEN_WEIGHT for whole in super().all_gather(shards)]


class _RecordingAdam(Adam):
    """An Adam optimizer that records the arguments of its last call."""

    def __call__(self, shard: Tensor, gradient: Tensor) -> Tensor:
        counts = {"weights": shard.numel(), "gradients": gradient.numel()}
        unequal = shard.shape != gradient.shape
        say.reject_if(unequal, "sharded_step.unequal_shards", **counts)
        self.shard, self.given = shard.clone(), gradient.clone()
        return super().__call__(shard, gradient)


@exercise()
def check_sharded_step(answer: Any) -> Verdict:
    """Check the learner's sharded optimizer step for data parallelism.

    Each rank updates a shard of the weights. The step runs on 2 and on 4 ranks within one process.
    After each of three steps, the weights must be those of Adam with the mean gradient.

    Args:
        answer: Function that is called as `answer(weights, gradients, adams, wire)`. The first
            three arguments are lists with one item per rank. `wire` has the collectives. The
            function returns a list with the new weights of each rank.
    """
    for n in (2, 4):
        _reject_unless_adam(answer, n)
    return say.right("sharded_step.right")


def _reject_unless_adam(answer: Any, n: int) -> None:
    """Reject a sharded step on n ranks if one of three steps differs from Adam.

    Raises:
        NotImplementedError: The answer returns nothing, as the unchanged cell does.
        WrongAnswer: A step differs from Adam on the mean gradient.
    """
    whole = torch.linspace(-1, draw_case(1.0, _draw_end), 64)
    alone, wire, adams = Adam(), _WireWithHiddenRank(), [_RecordingAdam() for _ in range(n)]
    weights = [whole.clone() for _ in range(n)]
    for step in range(3):
        gradients = [torch.linspace(rank, step + 2, 64).sin() for rank in range(n)]
        held = _as_held(weights)
        # the learner's function may change its arguments in place
        copies = [[tensor.clone() for tensor in tensors] for tensors in (held, gradients)]
        weights = answer(*copies, adams, wire)
        if weights is None:
            raise NotImplementedError
        _reject_wrong_form(weights, adams, n)
        given = torch.cat([adam.given for adam in adams if adam.steps])
        without_wire = sum(gradients) / n
        mean = without_wire + wire.HIDDEN_GRADIENT / n
        divided = without_wire + wire.HIDDEN_GRADIENT
        if is_close(given, divided, atol=1e-6):
            mean = divided  # each rank divided its gradient, except the additional rank
        say.reject_if(is_close(given, n * mean, atol=1e-6), "sharded_step.sum")
        for rank, adam in enumerate(adams):
            elsewhere = held[(rank + 1) % n].chunk(n)[rank]
            taken = adam.steps and torch.equal(adam.shard, elsewhere)
            say.reject_if(taken, "sharded_step.another_rank")
        _reject_wrong_bytes(adams, wire, step + 1, n)
        whole = alone(whole, mean)
        used_no_wire = is_close(given, without_wire, atol=1e-6)
        say.reject_if(used_no_wire, "sharded_step.gradient_without_wire")
        gathered_nothing = is_close(weights, [whole] * n, atol=1e-6)
        say.reject_if(gathered_nothing, "sharded_step.weights_without_wire")
        whole = whole + wire.HIDDEN_WEIGHT
        if not is_close(weights, [whole] * n, atol=1e-6):
            say.wrong("sharded_step.weights")
        say.reject_if(not is_close(given, mean, atol=1e-6), "sharded_step.scale")


def _draw_end(rng: random.Random) -> float:
    return rng.uniform(0.8, 1.2)


def _as_held(weights: Sequence[Tensor]) -> list[Tensor]:
    """Return one copy of the weights per rank, changed in the last bit outside the rank's shard.

    Only rank r has the exact values of shard r. The check can therefore detect whether an updated
    shard was computed from the copy of a wrong rank.
    """
    held = []
    for rank, whole in enumerate(weights):
        shards = list(whole.nextafter(torch.tensor(torch.inf)).chunk(len(weights)))
        shards[rank] = whole.chunk(len(weights))[rank]
        held.append(torch.cat(shards))
    return held


def _reject_wrong_form(weights: Any, adams: list[_RecordingAdam], n: int) -> None:
    """Reject weights that are not n tensors of 64 numbers, and answers that did not call Adam."""
    listed = isinstance(weights, list | tuple) and len(weights) == n
    proper = listed and all(isinstance(each, Tensor) for each in weights)
    say.reject_if(not proper, "sharded_step.list")
    say.reject_if(not any(adam.steps for adam in adams), "sharded_step.no_adam")
    say.reject_if(any(len(each) < 64 for each in weights), "sharded_step.one_shard")


def _reject_wrong_bytes(adams: list[_RecordingAdam], wire: Wire, steps: int, n: int) -> None:
    """Reject Adam state above 1/n per rank, and traffic that is not two numbers per weight."""
    most, share, once = max(adam.state_bytes for adam in adams), 8 * 64 // n, 2 * 4 * 64
    if most > share:
        say.wrong("sharded_step.state", most=most, share=share)
    if wire.sent_bytes < steps * once:
        say.wrong("sharded_step.sent_less")
    sent = wire.sent_bytes // (steps * 4 * 64)
    say.reject_if(wire.sent_bytes > steps * once, "sharded_step.sent_more", sent=sent)


# One layer: gather the weight, use it, release it

#: Part of a PyTorch error in backward -> key of the message on the mistake that causes the error.
_ERRORS = {
    "incorrect number of gradients": "gathered_linear.number_of_gradients",
    "invalid gradient at index 1": "gathered_linear.shape_of_second",
    "invalid gradient at index 0": "gathered_linear.shape_of_first",
}


@exercise(errors=_ERRORS)
def check_gathered_linear(function: Any) -> Verdict:
    """Check the learner's linear layer whose weight is sharded over several ranks.

    The layer must gather the weight for forward, release it, and gather it again for backward. The
    layer is tried as rank 2 of 4 ranks, and as rank 0 of 2 ranks.

    Args:
        function: Function that is called as `function(x, shard, wire)`, or an `autograd.Function`
            whose `apply` is called in this way. `wire` has the collectives.
    """
    for rank, ranks in ((2, 4), (0, 2)):
        _reject_unless_linear(getattr(function, "apply", function), rank, ranks)
    return say.right("gathered_linear.right")


def _reject_unless_linear(function: Any, rank: int, ranks: int) -> None:
    """Reject a function that differs from a sharded Linear in output, gradients or traffic.

    Raises:
        NotImplementedError: The function returns nothing or `x`, as the unchanged cell does.
        WrongAnswer: Output, gradients or traffic are wrong.
    """
    weight = torch.linspace(-1, draw_case(1.0, _draw_end), 64 * 96).sin().view(64, 96)
    inputs = [torch.linspace(-1, 2 + each, 5 * 96).cos().view(5, 96) for each in range(ranks)]
    arriving = [torch.linspace(-2, 1 + each, 5 * 64).view(5, 64) for each in range(ranks)]
    gradients = [g.mT @ x for g, x in zip(arriving, inputs, strict=True)]
    shards = weight.chunk(ranks)
    wire = RankWire(rank, shards, gradients)
    x, shard = inputs[rank].clone().requires_grad_(), shards[rank].clone().requires_grad_()
    output, kept = run_forward(function, x, shard, wire)
    say.reject_if(not isinstance(output, Tensor), "gathered_linear.one_tensor")
    if output.shape == x.shape:
        raise NotImplementedError
    say.reject_if(wire.sent_bytes == 0, "gathered_linear.sent_nothing")
    if not is_close(output, inputs[rank] @ weight.mT, atol=1e-4):
        say.wrong("gathered_linear.output")
    say.reject_if(not output.requires_grad, "gathered_linear.no_graph")
    whole = weight.nbytes
    say.reject_if(kept > whole // 2, "gathered_linear.kept", kept=kept, whole=whole)
    output.backward(arriving[rank])
    say.reject_if(x.grad is None, "gathered_linear.no_gradient_of_x")
    _reject_wrong_gradient(x.grad, arriving[rank] @ weight, "`x`")
    say.reject_if(shard.grad is None, "gathered_linear.no_gradient_of_shard")
    total, own = sum(gradients).chunk(ranks)[rank], gradients[rank].chunk(ranks)[rank]
    mistakes = {"gathered_linear.own_gradient": own, "gathered_linear.mean": total / ranks}
    reject_mistakes(say, shard.grad, mistakes, atol=1e-4)
    _reject_wrong_gradient(shard.grad, total, "`shard`")
    sent = wire.sent_bytes
    say.reject_if(sent < 3 * whole, "gathered_linear.sent_less")
    say.reject_if(sent > 3 * whole, "gathered_linear.sent_more", sent=sent // whole)


def _reject_wrong_gradient(found: Tensor, wanted: Tensor, name: str) -> None:
    if not is_close(found, wanted, atol=1e-3, rtol=1e-4):
        say.wrong("gathered_linear.gradient", name=name)


# Communicated bytes


def _draw_root(rng: random.Random) -> tuple[int, int]:
    root = rng.randrange(100, 10**5)
    return 10 * root + rng.randrange(10**6), root


def _is_unchanged(given: Any, psi: int, root: int) -> bool:
    """Return whether `given` has the results of the unchanged cell."""
    rows = given if isinstance(given, Mapping) else {}
    unchanged = {"DDP": 8 * psi, "FSDP2": 0, "FSDP2, bf16": 0}
    return all(expect_number(rows.get(row), count) for row, count in unchanged.items())


@numbers(
    {
        "elements": each(lambda count, psi, root: count / 4),
        "one_collective": lambda psi, root: {"DDP": 4 * psi},
        "root_twice": lambda psi, root: {"FSDP2": 12 * psi, "FSDP2, bf16": 8 * psi},
        "no_root": lambda psi, root: {
            "FSDP2": (12 * psi - 8 * root, 12 * psi - 12 * root),
            "FSDP2, bf16": (8 * psi - 4 * root, 8 * psi - 6 * root, 8 * psi - 8 * root),
        },
        "blocks_once": lambda psi, root: {"FSDP2": 8 * psi, "FSDP2, bf16": 6 * psi},
        "no_gradients": lambda psi, root: {
            "FSDP2": 8 * psi - 4 * root,
            "FSDP2, bf16": 4 * psi - 2 * root,
        },
        "gathered_gradients": lambda psi, root: {
            "FSDP2": 16 * psi - 4 * root,
            "FSDP2, bf16": 12 * psi - 2 * root,
        },
        "gradients_in_bf16": lambda psi, root: {"FSDP2, bf16": 6 * psi - 2 * root},
        "gathers_in_fp32": lambda psi, root: {"FSDP2, bf16": 12 * psi - 4 * root},
    },
    cases=lambda: cases([(PSI, 557_568), (1000, 100)], _draw_root),
    in_bytes=True,
    place="place",
    blank=_is_unchanged,
)
def check_sent(psi: int, root: int) -> dict[str, int]:
    """Check the learner's formulas for the bytes that a rank communicates per training step.

    There is one formula for each of DDP, FSDP2, and FSDP2 in bf16. The decorated function computes
    the right answer, and the decorator `numbers` turns it into a check.

    Args:
        psi: Number of all parameters.
        root: Number of parameters outside the layers, which FSDP2 gathers only once.
    """
    return {
        "DDP": 8 * psi,
        "FSDP2": 12 * psi - 4 * root,
        "FSDP2, bf16": 8 * psi - 2 * root,
    }


# The second machine


def _draw_machine(rng: random.Random) -> tuple[int, int, float, float]:
    gpus = rng.randint(3, 12)
    return rng.randint(1, 90) * 10**9, gpus, rng.randint(1, 9) * 1e14, rng.randint(20, 500) * 1e9


_MACHINES = [(8 * 10**9, 8, 400e12, 50e9), (70 * 10**9, 4, 400e12, 50e9), (10**9, 6, 9e14, 4e11)]


def _break_even_tokens(factor: Callable[[int], float]) -> Callable[[int, int, float, float], float]:
    """Return a function (psi, gpus, rate, network) -> `factor(gpus) * rate / network` tokens."""
    return lambda psi, gpus, rate, network: factor(gpus) * rate / network


@numbers(
    {
        "no_ring": _break_even_tokens(lambda g: 4 / 3 * g),
        "ring_of_one": _break_even_tokens(lambda g: 4 / 3 * (g - 1)),
        "each_gpu": _break_even_tokens(lambda g: g * (2 * g - 1) * 2 / 3),
        "per_gpu": _break_even_tokens(lambda g: (2 * g - 1) * 2 / 3 / g),
        "half_the_time": _break_even_tokens(lambda g: (2 * g - 1) * 4 / 3),
        "forward_alone": _break_even_tokens(lambda g: (2 * g - 1) * 2),
        "twelve_or_four": _break_even_tokens(lambda g: 2 * g - 1),
        "six_bytes": _break_even_tokens(lambda g: (2 * g - 1) / 2),
        "four_bytes": _break_even_tokens(lambda g: (2 * g - 1) / 3),
        "upside_down": lambda psi, gpus, rate, network: (2 * gpus - 1) * 2 / 3 * network / rate,
        "with_psi": lambda psi, gpus, rate, network: (2 * gpus - 1) * 2 / 3 * rate / network * psi,
    },
    cases=lambda: cases(_MACHINES, _draw_machine),
    tolerance=1e-3,
    place="place",
    blank=(None, ..., 0),
)
def check_second_machine(psi: int, gpus: int, rate: float, network: float) -> float:
    """Check the learner's formula for the least number of tokens with which a second machine helps.

    With this number of tokens per step, a step of FSDP2 in bf16 takes equally long on one machine
    and on two machines. The decorated function computes the right answer, and the decorator
    `numbers` turns it into a check.

    Args:
        psi: Number of parameters. The answer does not depend on it.
        gpus: Number of GPUs per machine.
        rate: FLOP/s per GPU.
        network: Bytes per second between the machines.
    """
    return (2 * gpus - 1) * 2 / 3 * rate / network
