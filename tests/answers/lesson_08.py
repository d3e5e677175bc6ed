"""Answers to the exercises of lesson 08: right ones, and wrong ones with what they are told."""

import functools

STAGES = ("DDP", "ZeRO 1", "ZeRO 2", "ZeRO 3")


def stages(*formulas):
    """An answer: bytes a rank for each of ZeRO's four, of psi and n."""
    return lambda psi, n: {name: formula(psi, n) for name, formula in zip(STAGES, formulas, strict=True)}


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
    if slip == "all-reduce":
        sums = [total.chunk(n)[rank] for rank, total in enumerate(wire.all_reduce(gradients))]
    elif slip == "scale":
        sums = [total * n**2 for total in wire.reduce_scatter(gradients)]
    elif slip == "no wire":
        sums = list(sum(gradients).chunk(n))
    else:
        sums = wire.reduce_scatter(gradients)
    pieces = [weight.chunk(n)[0 if slip == "first piece" else rank] for rank, weight in enumerate(weights)]
    size = 1 if slip == "sum" else n
    if slip == "whole state":
        return [
            adam(weight, total / n)
            for adam, weight, total in zip(adams, weights, wire.all_reduce(gradients), strict=True)
        ]
    updated = [adam(piece, total / size) for adam, piece, total in zip(adams, pieces, sums, strict=True)]
    return updated if slip == "no gather" else wire.all_gather(updated)


SHARDED_SLIPS = {
    "all-reduce": "3 numbers are sent",
    "no wire": "Less is sent",
    "scale": "does not mind the gradient's scale",
    "first piece": "its own piece",
    "sum": "sum of the gradients",
    "whole state": "of Adam's state",
    "no gather": "only its piece",
}


#: check -> right answers, and wrong ones, each alone or with a part of what it is told.
ANSWERS = {
    "held": (
        [stages(*HELD), lambda psi, n: {**stages(*HELD)(psi, n), "ZeRO 3": 16 * psi // n}],
        [
            (lambda psi, n: dict.fromkeys(STAGES, 0), "Not answered"),
            (lambda psi, n: 16 * psi, "keys"),
            (but(0, lambda psi, n: 4 * psi), "counts numbers"),
            (but(1, lambda psi, n: 4 * psi + 12 * psi / n), "Gradients stay whole"),
            (but(1, lambda psi, n: 8 * psi + 4 * psi / n), "two numbers"),
            (but(1, lambda psi, n: 16 * psi / n), "Only the optimizer's state"),
            (but(2, lambda psi, n: 2 * psi + 14 * psi / n), "mixed precision"),
            (but(2, lambda psi, n: 8 * psi + 8 * psi / n), "gradients are cut"),
            (but(2, lambda psi, n: 16 * psi / n), "weights stay whole"),
            (but(3, lambda psi, n: 4 * psi + 12 * psi / n), "weights are cut"),
            (but(3, lambda psi, n: 8 * psi), "`ZeRO 3` on 8 ranks"),  # right for two alone
            *((but(0, lambda psi, n: 16 * psi / n), "cuts nothing"), (but(0, lambda psi, n: 12 * psi), "two numbers")),
        ],
    ),
    "seven_billion": (
        [sevens(112, 38.5, 26.25, 14)],
        [
            ({name: None for name in STAGES}, "Not answered"),
            ({"DDP": 112e9}, "keys"),
            (sevens(14, 38.5, 26.25, 14), "cuts nothing"),
            (sevens(112, 14, 26.25, 14), "Not all of it is cut"),
            (sevens(112, 63, 38.5, 14), "for fp32"),
            (sevens(112, 38.5, 38.5, 14), "gradients are cut"),
            (sevens(112e-9, 38.5, 26.25, 14), "in GB"),
            (sevens(112, 38.5, 26.25, 2e-9), "parameter's share"),
            sevens(112, 38.5, 26.25, 15),
        ],
    ),
    "sharded_step": (
        [sharded, lambda *given: tuple(sharded(*given))],
        [
            *((functools.partial(sharded, slip=slip), reason) for slip, reason in SHARDED_SLIPS.items()),
            (lambda *given: None, "Not answered"),
            (lambda weights, *given: weights, "No Adam"),
            (lambda weights, *given: weights[0], "one tensor a rank"),
        ],
    ),
    "sent": (
        [lambda psi, root: {"DDP": 8 * psi, "FSDP2": 12 * psi - 4 * root}],
        [
            (lambda psi, root: {"DDP": 0, "FSDP2": 0}, "Not answered"),
            (lambda psi, root: 8 * psi, "keys"),
            (lambda psi, root: {"DDP": 2 * psi, "FSDP2": 0}, "counts numbers"),
            (lambda psi, root: {"DDP": 4 * psi, "FSDP2": 0}, "counts twice"),
            *(
                (lambda psi, root, f=formula: {"DDP": 8 * psi, "FSDP2": f(psi, root)}, reason)
                for formula, reason in (
                    (lambda psi, root: 12 * psi, "gathered once: it is not dropped"),
                    (lambda psi, root: 12 * psi - 8 * root, "scattered once"),
                    (lambda psi, root: 12 * psi - 12 * root, "scattered once"),
                    (lambda psi, root: 8 * psi, "gathered twice"),
                    (lambda psi, root: 8 * psi - 4 * root, "gradients are sent"),
                    (lambda psi, root: 16 * psi - 4 * root, "nobody gathers"),
                )
            ),
        ],
    ),
}

_BILLIONTH = "within the tolerance, a billionth"
#: check -> mutants of its solution that are right as well, and why.
EQUIVALENT = {
    "seven_billion": {
        "7000000000 → 7000000001 in `seven, n = (7000000000, 8)`": _BILLIONTH,
        "7000000000 → 6999999999 in `seven, n = (7000000000, 8)`": _BILLIONTH,
    },
}
