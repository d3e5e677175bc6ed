"""Right and wrong answers to the exercises of lesson 08, with the expected messages."""

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

STAGES = ("DDP", "ZeRO 1", "ZeRO 2", "ZeRO 3")
ROWS = (*STAGES, "ZeRO 3, bf16")
HELD = (
    lambda psi, n: 16 * psi,
    lambda psi, n: 8 * psi + 8 * psi / n,
    lambda psi, n: 4 * psi + 12 * psi / n,
    lambda psi, n: 16 * psi / n,
)


def stages(*formulas):
    """An answer: bytes per rank of DDP, the stages of ZeRO, and the last one in bf16."""
    return lambda psi, n: {
        name: formula(psi, n) for name, formula in zip(ROWS, (*formulas, formulas[-1]), strict=True)
    }


def sharded(weights, gradients, adams, wire, mistake=None):
    """ZeRO 1 by hand; with `mistake`, as learners write it."""
    n = len(weights)
    if mistake == "whole state":
        sums = wire.all_reduce(gradients)
        return [adam(w, total / n) for adam, w, total in zip(adams, weights, sums, strict=True)]
    if mistake == "all-reduce":
        sums = [total.chunk(n)[rank] for rank, total in enumerate(wire.all_reduce(gradients))]
    elif mistake == "no wire":
        sums = list(sum(gradients).chunk(n))
    else:
        sums = wire.reduce_scatter(gradients)
    if mistake == "another rank's weights":
        weights = [weights[0]] * n
    shards = [w.chunk(n)[0 if mistake == "first shard" else rank] for rank, w in enumerate(weights)]
    size = {"sum": 1, "scale": n**-1}.get(mistake, n)
    updated = [adam(s, total / size) for adam, s, total in zip(adams, shards, sums, strict=True)]
    return updated if mistake == "no gather" else wire.all_gather(updated)


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


def checkpointed(x, shard, wire):
    """Checkpoint as in lesson 02; but no gradient passes through a collective."""
    return checkpoint(lambda x, shard: x @ wire.all_gather(shard).mT, x, shard, use_reentrant=False)


def divides_in_place(weights, gradients, adams, wire):
    """Right as well, and changes its arguments."""
    for gradient in gradients:
        gradient.div_(len(weights))
    return sharded(weights, gradients, adams, wire, "sum")


def changes_count(weights, gradients, adams, wire):
    """Does not use the wire, and changes its count."""
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
    "seven_billion": [{"DDP": 112e9, "ZeRO 1": 38.5e9, "ZeRO 2": 26.3e9, "ZeRO 3": 14e9}],
    "sharded_step": [sharded, lambda *given: tuple(divides_in_place(*given))],
    "gathered_linear": [linear()],
    "second_machine": [
        lambda psi, g, rate, link: (1 - 1 / (2 * g)) * 8 * psi / link / (6 * psi / rate / g)
    ],
}

#: check -> wrong answers, each alone or with a part of the expected message
WRONG = {
    "held": [
        (stages(*HELD[:3], lambda psi, n: 8 * psi), "`ZeRO 3` on 8 ranks"),  # right for two
    ],
    "sharded_step": [
        (partial(sharded, mistake="all-reduce"), "you send 3 numbers"),
        (partial(sharded, mistake="no wire"), "fewer bytes than a step needs"),
        (partial(sharded, mistake="scale"), "does not depend on the scale of the gradient"),
        (partial(sharded, mistake="first shard"), "its own shard"),
        (partial(sharded, mistake="another rank's weights"), "only `weights[r]`"),
        (partial(sharded, mistake="sum"), "sum of the gradients"),
        (partial(sharded, mistake="whole state"), "of Adam's state"),
        (partial(sharded, mistake="no gather"), "only one shard of the new weights"),
        (changes_count, "sent_bytes"),
        (lambda *given: [each.numpy() for each in sharded(*given)], "one tensor per rank"),
        (ignores_the_sums, "what `wire.reduce_scatter` returns"),
        (ignores_the_gathered, "what `wire.all_gather` returns"),
        (whole_weights, "You gave Adam 64 weights and 32 numbers"),
        (lambda *given: None, "Not answered"),
        (lambda weights, *given: weights, "any of the `adams`"),
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
    "second_machine": [
        (lambda psi, gpus, rate, network: 80_000, "4 GPUs per machine"),  # right for the first
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
