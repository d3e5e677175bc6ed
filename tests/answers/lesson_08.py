"""Answers to the exercises of lesson 08: right ones, and wrong ones with what they are told."""

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

STAGES = ("DDP", "ZeRO 1", "ZeRO 2", "ZeRO 3")
HELD = (
    lambda psi, n: 16 * psi,
    lambda psi, n: 8 * psi + 8 * psi / n,
    lambda psi, n: 4 * psi + 12 * psi / n,
    lambda psi, n: 16 * psi / n,
)


def stages(*formulas):
    """An answer: bytes a rank for each of ZeRO's four, of psi and n."""
    return lambda psi, n: {
        name: formula(psi, n) for name, formula in zip(STAGES, formulas, strict=True)
    }


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


def linear(own=None, whole=None, kept=lambda tensor: tensor, results=3):
    """A Linear whose weight is cut, gathered twice, or with a mistake: in this rank's own gradient,
    the whole weight, what is kept of the input and of the shard, or the results of backward."""

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(context, x, shard, wire):
            context.wire = wire
            context.save_for_backward(kept(x), kept(shard))
            return x @ (whole or wire.all_gather)(shard).mT

        @staticmethod
        def backward(context, gradient):
            x, shard = context.saved_tensors
            of_x = gradient @ context.wire.all_gather(shard)
            of_shard = gradient.mT @ x
            of_shard = own(context.wire, of_shard) if own else context.wire.reduce_scatter(of_shard)
            return (of_x, of_shard, None)[:results]

    return Linear


class SavesSeparately(torch.autograd.Function):
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


#: check -> right answers
RIGHT = {
    "held": [lambda psi, n: {**stages(*HELD)(psi, n), "ZeRO 3": 16 * psi // n}],
    "seven_billion": [sevens(112, 38.5, 26.3, 14)],
    "sharded_step": [sharded, lambda *given: tuple(sharded(*given)), divides_in_place],
    "gathered_linear": [linear(), SavesSeparately],
    "tokens_to_hide": [lambda psi, rate, link: 12 * psi / link / (6 * psi / rate)],
}

#: check -> wrong answers, each alone or with a part of what it is told
WRONG = {
    "held": [
        (lambda psi, n: dict.fromkeys(STAGES, 0), "Not answered"),
        (lambda psi, n: dict.fromkeys(STAGES, torch.ones(2)), "one number"),
        (stages(*HELD[:3], lambda psi, n: 8 * psi), "`ZeRO 3` on 8 ranks"),  # right for two
    ],
    "seven_billion": [
        (dict.fromkeys(STAGES), "Not answered"),
        (sevens(112, 38.5, 33.25, 14), "Not yet"),
        (sevens(112e-9, 38.5, 26.25, 14), "in GB"),
        sevens(112, 38.5, 26.25, 15),
    ],
    "sharded_step": [
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
    "gathered_linear": [
        (lambda x, shard, wire: x, "Not answered"),
        (lambda x, shard, wire: (x @ wire.all_gather(shard).mT).detach(), "no graph"),
        (lambda x, shard, wire: (x @ wire.all_gather(shard).mT,), "as one tensor"),
        (linear(kept=torch.clone), "not a copy"),
        (lambda x, shard, wire: x @ wire.all_gather(shard).mT, "Save `shard` itself"),
        (checkpointed, "autograd records no collective"),
        (linear(lambda wire, g: (wire.all_reduce(g), wire.reduce_scatter(g))[1]), "You send 5"),
        (
            linear(lambda wire, g: wire.reduce_scatter(g) - wire.reduce_scatter(0 * g)),
            "only this rank's",
        ),
        (linear(lambda wire, g: (own := wire.reduce_scatter(g)) * len(own) / len(g)), "the loss"),
        (linear(lambda wire, g: g), "Your second gradient"),
        (linear(results=2), "`None` for the wire"),
        (linear(whole=lambda shard: shard), "sent nothing through"),
    ],
    "tokens_to_hide": [
        (lambda psi, rate, link: 0, "Not answered"),
        (lambda psi, rate, link: torch.ones(2), "one number"),
        (lambda psi, rate, link: 16_000, "Not yet"),  # right for the first device
    ],
    "sent": [
        (lambda psi, root: {"DDP": 8 * psi, "FSDP2": 0}, "Not answered"),
        (lambda psi, root: dict.fromkeys(("DDP", "FSDP2"), torch.ones(2)), "one number"),
    ],
}

#: check -> why mutants of its solution are right as well -> the mutants
EQUIVALENT = {
    "gathered_linear": {
        "inside a Function no graph is made that could be detached from": [
            "wire.all_gather(shard) → wire.all_gather(shard.detach())",
            "context.wire.all_gather(shard) → context.wire.all_gather(shard.detach())",
            "context.save_for_backward(x, shard) → context.save_for_backward(x.detach(), shard)",
            "context.save_for_backward(x, shard) → context.save_for_backward(x, shard.detach())",
        ]
    },
    "seven_billion": {
        "within the tolerance, a billionth": [
            f"7000000000 → {count} in `seven, n = (7000000000, 8)`"
            for count in (7000000001, 6999999999)
        ]
    },
}
