"""Answers to the exercises of lesson 02: right ones, and wrong ones with what they are told."""

import functools

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from course_lib.checkpoint import checkpoint, checkpointed_loss


def checkpoint_of(**options):
    return lambda block, x: checkpoint(block, x, use_reentrant=False, **options)


def hides(block, x):
    """Keeps everything where nobody looks, and computes nothing again."""
    kept = []
    with saved_tensors_hooks(lambda t: kept.append(t) or len(kept) - 1, lambda i: kept[i]):
        return block(x)


def runs_again_for_show(block, x):
    """Keeps everything too, and computes it again once, as a check would have it."""
    kept, runs = [], []

    def unpack(place):
        if not runs:
            runs.append(block(x.detach()))
        return kept[place]

    with saved_tensors_hooks(lambda t: kept.append(t.detach()) or len(kept) - 1, unpack):
        return block(x)


class Forgets(torch.autograd.Function):
    """Asks for the gradient of the input only: the weights get none."""

    @staticmethod
    def forward(context, block, x):
        context.block, context.x = block, x
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(context, gradient):
        x = context.x.detach().requires_grad_()
        with torch.enable_grad():
            return None, *torch.autograd.grad(context.block(x), x, gradient)


class KeepsItsGraph(Forgets):
    """Runs again on the input itself, so that its gradient arrives twice."""

    @staticmethod
    def backward(context, gradient):
        with torch.enable_grad():
            output = context.block(context.x)
        torch.autograd.backward(output, gradient)
        return None, context.x.grad.clone()


class Rewinds(torch.autograd.Function):
    """Draws the same mask again, and leaves the generator there."""

    @staticmethod
    def forward(context, block, x):
        context.block, context.x, context.state = block, x, torch.get_rng_state()
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(context, gradient):
        torch.set_rng_state(context.state)
        x = context.x.detach().requires_grad_()
        with torch.enable_grad():
            return None, *torch.autograd.grad(context.block(x), x, gradient)


def whole_loss(hidden, weight, targets, reduction="mean"):
    return F.cross_entropy(hidden @ weight.T, targets, reduction=reduction)


def in_pieces(hidden, weight, targets, chunk, forgets=True, last=None):
    total = 0.0
    for rows, answers in list(zip(hidden.split(chunk), targets.split(chunk), strict=True))[:last]:
        if forgets:
            total = total + checkpoint(whole_loss, rows, weight, answers, "sum", use_reentrant=False)
        else:
            total = total + whole_loss(rows, weight, answers, "sum")
    return total / len(targets)


def mean_of_means(hidden, weight, targets, chunk):
    parts = list(zip(hidden.split(chunk), targets.split(chunk), strict=True))
    losses = [checkpoint(whole_loss, rows, weight, answers, use_reentrant=False) for rows, answers in parts]
    return sum(losses) / len(losses)


no_checkpoints = [lambda block, x: block(x), lambda block, x: (block(x), block(x))[1], lambda block, x: x, hides]


aten = torch.ops.aten


#: check -> right answers, and wrong ones, each alone or with a part of what it is told.
ANSWERS = {
    "checkpoint": (
        [checkpoint_of(), checkpoint_of(preserve_rng_state=False)],
        [
            *no_checkpoints,
            *((runs_again_for_show, "are live"), (lambda block, x: None, "Not answered")),
            *((Forgets, "weight has no gradient"), (KeepsItsGraph.apply, "counted twice")),
        ],
    ),
    "peak_formula": (
        [lambda k: 277_682_584 - k * (20_987_904 - 1_048_576 - 5_056)],
        [
            (lambda k: 277_682_584 - k * 20_987_904, "k = 1: Not yet. Each checkpoint keeps its layer's input"),
            (lambda k: 277_682_584 - k * (20_987_904 - 1_048_576), "random number generator"),
            (lambda k: 277_682_584 - k * (20_987_904 - 5_056), "b · s · h"),
            (lambda k: 277_682_584 - k * (20_987_904 - 262_144 - 5_056), "4 bytes each"),
            (lambda k: 118_208_408, "k = 0: Not yet. Only k of the eight"),
            (lambda k: None, "Not answered"),
            *(lambda k: 277_682_584 * (8 - k) / 8, 3),
        ],
    ),
    "loss_in_pieces": (
        [in_pieces, lambda *given: checkpointed_loss(*given[:3], chunk=given[3])],
        [
            (functools.partial(in_pieces, forgets=False), "logits or log-softmax"),
            (lambda hidden, weight, targets, chunk: F.cross_entropy(hidden @ weight.T, targets), "log-softmax"),
            (lambda *given: checkpoint(whole_loss, *given[:3], use_reentrant=False), "exist whole"),
            (mean_of_means, "mean of means"),
            (lambda *given: 240 * in_pieces(*given), "is the sum"),
            (lambda *given: mean_of_means(*given) * 4 / 240, "take the sum"),
            (lambda *given: in_pieces(*given).item(), "with a graph"),
            (functools.partial(in_pieces, last=-1), "last chunk is missing"),
            (lambda *given: in_pieces(*given) + 1, "The loss is"),
            (lambda hidden, *given: in_pieces(hidden.detach(), *given), "gradient of `hidden`"),
            (lambda *given: None, "Not answered"),
        ],
    ),
    "dropout_checkpoint": (
        [checkpoint_of()],
        [
            *no_checkpoints,
            (checkpoint_of(preserve_rng_state=False), "another mask"),
            (Rewinds.apply, "random numbers afterwards"),
        ],
    ),
    "policy": (
        [[aten.bmm.default]],
        [
            *((aten.bmm.default, "list"), ([], "too much again"), ([aten.addmm.default], "keeps too much")),
            (["bmm"], "cannot be used"),
        ],
    ),
    "head_chunk": (
        [256],
        [(128, "so does 256"), (512, "Too large"), (100, "power of two"), ("256", "power of two")],
    ),
}

_NO_GRAPH = "nothing is recorded in a Function's forward anyhow"
_NO_SECOND_GRAPH = "nobody takes a gradient of the gradient"
_WHOLE_NUMBERS = "the targets are whole numbers: they have no graph"
#: check -> mutants of its solution that are right as well, and why.
EQUIVALENT = {
    "checkpoint": {
        "context.save_for_backward(x) → context.save_for_backward(x.detach())": "it is detached where it is used",
        "without `with torch.no_grad():`": _NO_GRAPH,
        "torch.no_grad → torch.enable_grad": "a Function cuts the graph of what its forward returns",
        "return block(x) → return block(x).detach()": _NO_GRAPH,
        "block(x) → block(x.detach())": _NO_GRAPH,
        "torch.autograd.backward(output, gradient) → torch.autograd.backward(output, gradient.detach())": (
            _NO_SECOND_GRAPH
        ),
    },
    "loss_in_pieces": {
        "F.cross_entropy(hidden @ weight.T, targets, reduction='sum') → "
        "F.cross_entropy(hidden @ weight.T, targets.detach(), reduction='sum')": _WHOLE_NUMBERS,
        "checkpoint(loss_of_chunk, rows, weight, answers, use_reentrant=False) → "
        "checkpoint(loss_of_chunk, rows, weight, answers.detach(), use_reentrant=False)": _WHOLE_NUMBERS,
        "len(targets) → len(targets.detach())": _WHOLE_NUMBERS,
        "True → False in `for rows, answers in zip(hidden.split(chunk), targets.split(chunk), strict=True):`": (
            "both have as many chunks"
        ),
        "False → True in `total = total + checkpoint(loss_of_chunk, rows, weight, answers, use_reentrant=False)`": (
            "the other mode gives the same gradients where the inputs need some"
        ),
    },
    "dropout_checkpoint": {
        "return MyCheckpoint.forward(context, block, x) → return MyCheckpoint.forward(context, block, x).detach()": (
            _NO_GRAPH
        ),
        "MyCheckpoint.forward(context, block, x) → MyCheckpoint.forward(context, block, x.detach())": _NO_GRAPH,
        "MyCheckpoint.backward(context, gradient) → MyCheckpoint.backward(context, gradient.detach())": (
            _NO_SECOND_GRAPH
        ),
    },
}
