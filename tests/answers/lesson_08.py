"""Answers to the exercises of lesson 08: right ones, and wrong ones with what they are told."""

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

STAGES = ("DDP", "ZeRO 1", "ZeRO 2", "ZeRO 3")


def stages(*formulas):
    """An answer: bytes a rank for each of ZeRO's four, of psi and n."""
    return lambda psi, n: {
        name: formula(psi, n) for name, formula in zip(STAGES, formulas, strict=True)
    }


def but(place, formula):
    """The right formulas, but for one of them."""
    return stages(*(formula if i == place else right for i, right in enumerate(HELD)))


HELD = (
    lambda psi, n: 16 * psi,
    lambda psi, n: 8 * psi + 8 * psi / n,
    lambda psi, n: 4 * psi + 12 * psi / n,
    lambda psi, n: 16 * psi / n,
)


def sevens(*billions):
    return {name: count * 10**9 for name, count in zip(STAGES, billions, strict=True)}


def sharded(weights, gradients, adams, wire, slip=None):
    """ZeRO 1 by hand; with a slip, what somebody writes who makes it."""
    n = len(weights)
    if slip == "whole state":
        sums = wire.all_reduce(gradients)
        return [adam(w, total / n) for adam, w, total in zip(adams, weights, sums, strict=True)]
    if slip == "all-reduce":
        sums = [total.chunk(n)[rank] for rank, total in enumerate(wire.all_reduce(gradients))]
    elif slip == "no wire":
        sums = list(sum(gradients).chunk(n))
    else:
        sums = wire.reduce_scatter(gradients)
    if slip == "another rank's weights":
        weights = [weights[0]] * n
    shards = [w.chunk(n)[0 if slip == "first shard" else rank] for rank, w in enumerate(weights)]
    size = {"sum": 1, "scale": n**-1}.get(slip, n)
    updated = [adam(s, total / size) for adam, s, total in zip(adams, shards, sums, strict=True)]
    return updated if slip == "no gather" else wire.all_gather(updated)


class Gathered(torch.autograd.Function):
    """A Linear whose weight is cut, gathered twice."""

    @staticmethod
    def forward(context, x, shard, wire):
        context.wire = wire
        context.save_for_backward(x, shard)
        return x @ wire.all_gather(shard).mT

    @staticmethod
    def gradient_of(wire, gradient):
        return wire.reduce_scatter(gradient)

    @classmethod
    def backward(cls, context, gradient):
        x, shard = context.saved_tensors
        whole = context.wire.all_gather(shard)
        return gradient @ whole, cls.gradient_of(context.wire, gradient.mT @ x), None


class KeepsACopy(Gathered):
    """Saves a copy of the shard, which is half of the weight on two ranks."""

    @staticmethod
    def forward(context, x, shard, wire):
        context.wire = wire
        context.save_for_backward(x.clone(), shard.clone())
        return x @ wire.all_gather(shard).mT


class AllReduces(Gathered):
    @staticmethod
    def gradient_of(wire, gradient):
        wire.all_reduce(gradient)
        return wire.reduce_scatter(gradient)  # to know which shard is ours


class AloneInTheWorld(Gathered):
    """Takes the gradients of the others away again."""

    @staticmethod
    def gradient_of(wire, gradient):
        return wire.reduce_scatter(gradient) - wire.reduce_scatter(torch.zeros_like(gradient))


class Averages(Gathered):
    @staticmethod
    def gradient_of(wire, gradient):
        own = wire.reduce_scatter(gradient)
        return own * len(own) / len(gradient)


class WholeGradient(Gathered):
    @staticmethod
    def gradient_of(wire, gradient):
        return gradient


class ForgetsTheWire(Gathered):
    @classmethod
    def backward(cls, context, gradient):
        return Gathered.backward(context, gradient)[:2]


class UsesItsShard(Gathered):
    @staticmethod
    def forward(context, x, shard, wire):
        return x @ shard.mT


class SavesSeparately(Gathered):
    """Right, and written another way."""

    @staticmethod
    def forward(context, x, shard, wire):
        context.wire, context.x, context.shard = wire, x, shard
        return torch.einsum("bi,oi->bo", x, wire.all_gather(shard))

    @staticmethod
    def backward(context, gradient):
        own = context.wire.reduce_scatter(torch.einsum("bo,bi->oi", gradient, context.x))
        return torch.matmul(gradient, context.wire.all_gather(context.shard)), own, None


def checkpointed(x, shard, wire):
    """What saved memory in lesson 02; but no gradient passes through a collective."""
    return checkpoint(lambda x, shard: x @ wire.all_gather(shard).mT, x, shard, use_reentrant=False)


def divides_first(weights, gradients, adams, wire):
    """Right as well: each rank divides its gradient before the sum."""
    means = [gradient / len(weights) for gradient in gradients]
    return sharded(weights, means, adams, wire, "sum")


def divides_in_place(weights, gradients, adams, wire):
    """Right as well, and changes its arguments."""
    for gradient in gradients:
        gradient.div_(len(weights))
    return sharded(weights, gradients, adams, wire, "sum")


def cheats(weights, gradients, adams, wire):
    """Never uses the wire, and says that it did."""
    new = sharded(weights, gradients, adams, wire, "no wire")
    wire.sent_bytes += 512
    return new


def whole_weights(weights, gradients, adams, wire):
    sums = wire.reduce_scatter(gradients)
    return wire.all_gather([adam(*each) for adam, *each in zip(adams, weights, sums, strict=True)])


def ignores_the_sums(weights, gradients, adams, wire):
    """Calls the collective, and averages what no single rank has."""
    wire.reduce_scatter(gradients)
    return sharded(weights, gradients, adams, wire, "no wire")


def ignores_the_gathered(weights, gradients, adams, wire):
    """Calls the collective, and puts the weights together from what no single rank has."""
    updated = sharded(weights, gradients, adams, wire, "no gather")
    wire.all_gather(updated)
    return [torch.cat(updated) for _ in weights]


def sent(formula):
    """The right bytes of DDP, and those of FSDP2 by a formula of psi and root."""
    return lambda psi, root: {"DDP": 8 * psi, "FSDP2": formula(psi, root)}


#: check -> right answers, and wrong ones, each alone or with a part of what it is told.
ANSWERS = {
    "held": (
        [stages(*HELD), lambda psi, n: {**stages(*HELD)(psi, n), "ZeRO 3": 16 * psi // n}],
        [
            (lambda psi, n: dict.fromkeys(STAGES, 0), "Not answered"),
            (lambda psi, n: dict.fromkeys(STAGES, torch.ones(2)), "one number"),
            (lambda psi, n: 16 * psi, "keys"),
            (stages(*(lambda psi, n, f=f: n * f(psi, n) for f in HELD)), "all ranks together"),
            (but(1, lambda psi, n: 12 * psi + 4 * psi / n), "sharded the gradients"),
            (but(1, lambda psi, n: 4 * psi + 8 * psi / n), "left out the gradients"),
            (but(2, lambda psi, n: 12 * psi + 4 * psi / n), "sharded the gradients"),
            (but(2, lambda psi, n: 4 * psi + 8 * psi / n), "left out the gradients"),
            (but(3, lambda psi, n: 12 * psi / n), "left out the gradients"),
            (but(0, lambda psi, n: 4 * psi), "You counted numbers"),
            (but(0, lambda psi, n: 16 * psi / 1e6), "in MB"),
            (but(2, lambda psi, n: (4 * psi + 12 * psi / n) / 2**20), "in MiB"),
            (but(1, lambda psi, n: 4 * psi + 12 * psi / n), "does not shard the gradients"),
            (but(1, lambda psi, n: 8 * psi + 4 * psi / n), "Adam keeps two"),
            (but(1, lambda psi, n: 16 * psi / n), "shards only the optimizer state"),
            (but(2, lambda psi, n: 2 * psi + 14 * psi / n), "mixed precision"),
            (but(2, lambda psi, n: 8 * psi + 8 * psi / n), "left the gradients whole"),
            (but(2, lambda psi, n: 16 * psi / n), "ZeRO 2 keeps them whole"),
            (but(3, lambda psi, n: 4 * psi + 12 * psi / n), "left the weights whole"),
            (but(3, lambda psi, n: 8 * psi), "`ZeRO 3` on 8 ranks"),  # right for two alone
            (but(0, lambda psi, n: 16 * psi / n), "does not shard anything"),
            (but(0, lambda psi, n: 12 * psi), "three numbers per parameter"),
        ],
    ),
    "seven_billion": (
        [sevens(112, 38.5, 26.25, 14), sevens(112, 38.5, 26.3, 14)],
        [
            (dict.fromkeys(STAGES), "Not answered"),
            ({"DDP": 112e9}, "keys"),
            (sevens(14, 38.5, 26.25, 14), "does not shard anything"),
            (sevens(896, 308, 210, 112), "all ranks together"),
            (sevens(112, 26.25, 26.25, 14), "does not shard the gradients"),
            (sevens(112, 38.5, 26.25, 26.25), "left the weights whole"),
            (sevens(112, 14, 26.25, 14), "does not shard everything"),
            (sevens(112, 63, 38.5, 14), "as autocast keeps them"),
            (sevens(112, 38.5, 33.25, 14), "Not yet"),
            (sevens(112, 38.5, 38.5, 14), "left the gradients whole"),
            (sevens(112e-9, 38.5, 26.25, 14), "in GB"),
            (sevens(112 / 2**30, 38.5, 26.25, 14), "in GiB"),
            (sevens(112, 38.5, 26.25, 2e-9), "bytes per parameter"),
            sevens(112, 38.5, 26.25, 15),
        ],
    ),
    "sharded_step": (
        [sharded, lambda *given: tuple(sharded(*given)), divides_first, divides_in_place],
        [
            (partial(sharded, slip="all-reduce"), "you send 3 numbers"),
            (partial(sharded, slip="no wire"), "fewer bytes than a step needs"),
            (partial(sharded, slip="scale"), "does not depend on the scale of the gradient"),
            (partial(sharded, slip="first shard"), "its own shard"),
            (partial(sharded, slip="another rank's weights"), "only `weights[r]`"),
            (partial(sharded, slip="sum"), "sum of the gradients"),
            (partial(sharded, slip="whole state"), "of Adam's state"),
            (partial(sharded, slip="no gather"), "only one shard of the new weights"),
            (cheats, "sent_bytes"),
            (lambda *given: [each.numpy() for each in sharded(*given)], "one tensor per rank"),
            (lambda weights, *given: [None for _ in weights], "one tensor per rank"),
            (ignores_the_sums, "what `wire.reduce_scatter` returns"),
            (ignores_the_gathered, "what `wire.all_gather` returns"),
            (whole_weights, "You gave Adam 64 weights and 32 numbers"),
            (lambda *given: None, "Not answered"),
            (lambda weights, *given: weights, "any of the `adams`"),
            (lambda weights, *given: weights[0], "one tensor per rank"),
        ],
    ),
    "gathered_linear": (
        [Gathered, SavesSeparately],
        [
            (lambda x, shard, wire: x, "Not answered"),
            (lambda x, shard, wire: (x @ wire.all_gather(shard).mT).detach(), "no graph"),
            (lambda x, shard, wire: (x @ wire.all_gather(shard).mT,), "as one tensor"),
            (KeepsACopy, "not a copy"),
            (lambda x, shard, wire: x @ wire.all_gather(shard).mT, "Save `shard` itself"),
            (checkpointed, "autograd records no collective"),
            (AllReduces, "You send 5 numbers"),
            (AloneInTheWorld, "only this rank's gradient"),
            (Averages, "averaging belongs in the loss"),
            (WholeGradient, "Your second gradient"),
            (ForgetsTheWire, "`None` for the wire"),
            (UsesItsShard, "sent nothing through"),
        ],
    ),
    "tokens_to_hide": (
        [
            lambda psi, rate, link: 2 * rate / link,
            lambda psi, rate, link: 12 * psi / link / (6 * psi / rate),
        ],
        [
            (lambda psi, rate, link: 0, "Not answered"),
            (lambda psi, rate, link: torch.ones(2), "one number"),
            (lambda psi, rate, link: 6 * rate / link, "counted only forward"),
            (lambda psi, rate, link: 3 * rate / link, "together take 6"),
            (lambda psi, rate, link: 12 * rate / link, "left out the 6 FLOPs"),
            (lambda psi, rate, link: rate / link, "communicates 12 bytes"),
            (lambda psi, rate, link: 16 * rate / link, "counted bits"),
            (lambda psi, rate, link: rate / link / 2, "counted the numbers that are sent"),
            (lambda psi, rate, link: 4 / 3 * rate / link, "DDP's communication volume"),
            (lambda psi, rate, link: 2 * link / rate, "upside down"),
            (lambda psi, rate, link: 2 * rate / link * psi, "cancel"),
            (lambda psi, rate, link: 16_000, "Not yet"),
        ],
    ),
    "sent": (
        [sent(lambda psi, root: 12 * psi - 4 * root)],
        [
            (lambda psi, root: {"DDP": 0, "FSDP2": 0}, "Not answered"),
            (sent(lambda psi, root: 0), "Not answered"),
            (lambda psi, root: 8 * psi, "keys"),
            (lambda psi, root: {"DDP": torch.ones(2), "FSDP2": torch.ones(2)}, "one number"),
            (sent(lambda psi, root: torch.ones(2)), "one number"),
            (lambda psi, root: {"DDP": 2 * psi, "FSDP2": 0}, "You counted numbers"),
            (lambda psi, root: {"DDP": 8 * psi / 1e6, "FSDP2": 0}, "in MB"),
            (lambda psi, root: {"DDP": 4 * psi, "FSDP2": 0}, "counts twice"),
            (sent(lambda psi, root: 12 * psi), "gathered only once"),
            (sent(lambda psi, root: 12 * psi - 8 * root), "left out the root"),
            (sent(lambda psi, root: 8 * psi), "gathered twice"),
            (sent(lambda psi, root: 8 * psi - 4 * root), "left out the gradients"),
            (sent(lambda psi, root: 16 * psi - 4 * root), "only scattered"),
        ],
    ),
}

_BILLIONTH = "within the tolerance, a billionth"
#: check -> mutants of its solution that are right as well, and why.
EQUIVALENT = {
    "gathered_linear": dict.fromkeys(
        (
            "wire.all_gather(shard) → wire.all_gather(shard.detach())",
            "context.wire.all_gather(shard) → context.wire.all_gather(shard.detach())",
            "context.save_for_backward(x, shard) → context.save_for_backward(x.detach(), shard)",
            "context.save_for_backward(x, shard) → context.save_for_backward(x, shard.detach())",
        ),
        "inside a Function no graph is made that could be detached from",
    ),
    "seven_billion": {
        "7000000000 → 7000000001 in `seven, n = (7000000000, 8)`": _BILLIONTH,
        "7000000000 → 6999999999 in `seven, n = (7000000000, 8)`": _BILLIONTH,
    },
}
