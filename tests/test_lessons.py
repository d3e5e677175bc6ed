"""What belongs to one lesson: its checks, its claims, its pictures, what its GPU experiments find on a CPU."""

import functools
import itertools
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from markup import spoken_problems
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from course_lib import lessons
from course_lib.attention.tiled import BLOCK
from course_lib.budget import Recipe, estimate
from course_lib.checkpoint import checkpoint, checkpointed_loss
from course_lib.distributed import held_bytes, shapes_of, task_of
from course_lib.labels import both
from course_lib.lessons import lesson_00, lesson_01, lesson_03, lesson_05, lesson_07, lesson_08
from course_lib.memory import symbolic, training_state_bytes
from course_lib.models import Decoder, random_tokens
from course_lib.schedule import (
    Backward,
    Chain,
    Forward,
    live_bytes,
    optimal,
    recursive,
    segments,
    simulate,
    sqrt_segments,
    store_all,
)
from course_lib.teaching import Verdict, category_label, language, pictures, said
from course_lib.teaching.experiments import TINY, decoder_and_tokens

ROOT = Path(__file__).parents[1]
CHECKS = {
    f"{number}.{name.removeprefix('check_')}": check
    for number in lessons.LESSONS
    for name, check in vars(lessons.lesson(number)).items()
    if name.startswith("check_")
}


pytestmark = pytest.mark.usefixtures("fresh")


class Hostile:
    """Fails at whatever is asked of it."""

    def __getattr__(self, name):
        raise RuntimeError(name)

    __eq__ = __float__ = __repr__ = __bool__ = __len__ = __hash__ = __call__ = lambda *_: 1 / 0


# Answers --------------------------------------------------------------------------------------------------------------


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
six = Chain.uniform(6, saved_bytes=2)
pyramid = lesson_03.pyramid()


def max_layers(cuts):
    return max(end - start for start, end in itertools.pairwise(cuts))


def segment_peak(cuts):
    return 100_000 + max((j + 1 + 2 * (cuts[j + 1] - cuts[j])) * 100_000 for j in range(len(cuts) - 1))


def recurrence(stages, room, slip=None):
    """Over numbers of stages, not slices; with a slip, what somebody writes who makes it."""

    def least(i, n, m):  # of stages i to n - 1
        if i == n:
            return 0
        stage, ways = stages[i], [math.inf]
        if slip == "all fits" or stage.saved_bytes + (slip != "no gradient") * stage.output_bytes <= m:
            if slip != "one alone" or n == i + 1:
                rest = least(i + 1, n, m - (slip != "all is free") * stage.saved_bytes)
                ways.append(stage.forward_time + stage.backward_time + rest)
        for e in range(i + 1, n) if slip != "keeps only" else ():
            kept = stages[e - 1].output_bytes
            right = least(e, n, m - (slip != "input is free") * kept)
            left = 0 if slip == "left out" else least(i, e, m - (slip == "stays") * kept)
            ahead = 0 if slip == "no time" else sum(stage.forward_time for stage in stages[i:e])
            ways.append(ahead + right + left)
        return min(ways)

    return least(0, len(stages), room)


RECURRENCE_SLIPS = {
    "no gradient": "gradient that comes in",
    "all fits": "never runs out of room",
    "all is free": "`saved_bytes` less",
    "input is free": "takes room",
    "stays": "is gone",
    "no time": "takes the forward times",
    "left out": "still to be done",
    "keeps only": "only ever keeps everything",
    "one alone": "last one left",
}


def keeps(copying, *, right_place=True, hold=None):
    """Hooks that keep copies in the store; `hold` keeps the tensors themselves as well."""

    def offloading(store):
        def pack(tensor):
            store.append(copying(tensor.detach()))
            if hold is not None:
                hold[len(store)] = tensor
            return len(store) - 1

        return saved_tensors_hooks(pack, lambda place: store[place if right_place else 0])

    return offloading


def copies_and_keeps(store):
    return saved_tensors_hooks(lambda t: store.append(t.detach().clone()) or t, lambda t: t)


def accumulate(model, loss_sum, pieces):
    total = 0
    for piece in pieces:
        loss, weight = loss_sum(model, piece)
        loss.backward()
        total += weight
    for parameter in model.parameters():
        parameter.grad /= total


def counts_first(model, loss_sum, pieces):
    total = sum(loss_sum(model, piece)[1] for piece in pieces)
    for piece in filter(len, pieces):
        (loss_sum(model, piece)[0] / total).backward()


def means(model, loss_sum, pieces):
    for piece in pieces:
        loss, weight = loss_sum(model, piece)
        (loss / max(weight, 1) / len(pieces)).backward()


def all_graphs_at_once(model, loss_sum, pieces):
    losses, weights = zip(*(loss_sum(model, piece) for piece in pieces), strict=True)
    (sum(losses) / sum(weights)).backward()


def in_blocks(scores, block, rescale=True, step=1):
    largest, total = scores.new_full(scores.shape[:1], float("-inf")), scores.new_zeros(scores.shape[:1])
    for part in scores.split(block, dim=1)[::step]:
        new = torch.maximum(largest, part.amax(1))
        total = total * ((largest - new).exp() if rescale else 1) + (part - new[:, None]).exp().sum(1)
        largest = new
    return largest + total.log()


def padded(scores, block):
    return in_blocks(torch.nn.functional.pad(scores, (0, -scores.shape[1] % block), value=float("-inf")), block)


def of_transposed(scores, block):
    return torch.stack([part.logsumexp(0) for part in scores.T.split(block)]).logsumexp(0)


def shifted(scores, block, largest):
    return largest + sum((part - largest[:, None]).exp().sum(1) for part in scores.split(block, dim=1)).log()


def row_by_row(scores, block):
    return torch.stack([shifted(row[None], block, row.max()[None])[0] for row in scores])


def two_passes(scores, block):
    return shifted(scores, block, torch.stack([part.amax(1) for part in scores.split(block, dim=1)]).amax(0))


def probabilities(q, k, lse):
    return (q @ k.T / q.shape[1] ** 0.5 - lse[:, None]).exp()


def normalised(q, k, lse):
    weights = probabilities(q, k, lse)
    return weights / weights.sum(1, keepdim=True)


FORGETFUL = {"attention": "flash", "checkpoint": "layers"}
LEAST = {**FORGETFUL, "micro_batches": 8}
LESSON = {"attention": "flash", "in_backward": True, "offload_optimizer": 1.0}


def state_of(parameter, gradient, optimizer):
    """Bytes a weight of each kind."""
    weights = 6_875_648
    return {"parameter": parameter * weights, "gradient": gradient * weights, "optimizer": optimizer * weights}


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
    "first piece": "its own piece",
    "sum": "sum of the gradients",
    "whole state": "of Adam's state",
    "no gather": "only its piece",
}


def layer(**changed):
    rows = {
        "norms": lambda b, s, h, a: 8 * s * b * h,
        "statistics": lambda b, s, h, a: 16 * s * b,
        "attention": lambda b, s, h, a: 20 * s * b * h,
        "probabilities": lambda b, s, h, a: 4 * a * s * s * b,
        "feed-forward": lambda b, s, h, a: 36 * s * b * h,
        **changed,
    }
    return lambda **sizes: {name: formula(**sizes) for name, formula in rows.items()}


# check -> right answers, and wrong ones, each alone or with a part of what it is told
ANSWERS = {
    "01.adapter_bytes": (
        [14_320_000_000, 14.32e9],
        [
            *(
                (112e9, "no gradient and no state"),
                (28.32e9, "bf16 here"),
                (14e9, "adapters have"),
                (32e7, "are there"),
            ),
            *((14.24e9, "four fp32 numbers"), (14.3e9, "rounding"), (14.32, "in GB"), (1, "small"), (9e99, "large")),
        ],
    ),
    "01.training_state": (
        [state_of(4, 4, 8), {**state_of(4, 4, 8), "optimizer": 55_005_584}, state_of(4.0, 4.0, 8.0)],
        [
            *((state_of(1, 4, 8), "counts numbers"), (state_of(4, 2, 8), "2 bytes"), (state_of(4, 4, 4), "keeps two")),
            *((state_of(4, 4, 12), "Master weights"), ({"parameter": 1}, "keys"), state_of(4, 4, 9)),
            *((state_of(4, 8, 8), "`gradient`: Not yet. That is two"), (state_of(4, 4, 16), "all three kinds")),
            ({**state_of(4, 4, 8), "parameter": 27.5e6}, "`parameter`: Not yet. Right but for rounding"),
            ({**state_of(4, 4, 8), "optimizer": 55}, "`optimizer`: Not yet. That is in MB"),
        ],
    ),
    "01.layer_formula": (
        [layer(), layer(attention=lambda b, s, h, a: 4 * (3 + 1 + 1) * b * s * h)],
        [
            (layer(norms=lambda b, s, h, a: 2 * s * b * h), "counts elements"),
            (layer(norms=lambda b, s, h, a: 4 * s * b * h), "two LayerNorms"),
            (layer(norms=lambda b, s, h, a: 8 * s * h), "Each of the b sequences"),
            (layer(norms=lambda b, s, h, a: 0), "still empty"),
            (layer(norms=lambda b, s, h, a: 8 * 128 * 8 * 256), "Write it with the letters"),
            (layer(statistics=lambda b, s, h, a: 8 * s * b), "Two numbers"),
            (layer(probabilities=lambda b, s, h, a: 4 * a * s * s), "Each of the b sequences"),
            (layer(probabilities=lambda b, s, h, a: 4 * s * s * b), "each head"),
            (layer(probabilities=lambda b, s, h, a: 8 * a * s * s * b), "one storage"),
            (layer(attention=lambda b, s, h, a: 16 * s * b * h), "output projection"),
            (layer(attention=lambda b, s, h, a: 28 * s * b * h), "one product"),
            (layer(attention=lambda b, s, h, a: 12 * s * b * h), "V are three"),
            (layer(attention=lambda b, s, h, a: 24 * s * b * h), "five tensors"),
            (layer(attention=lambda b, s, h, a: 10 * s * b * h), "2 bytes"),
            (layer(attention=lambda b, s, h, a: 20 * s * b * h + 4 * a * s * s * b), "row of its own"),
            (layer(**{"feed-forward": lambda b, s, h, a: 20 * s * b * h}), "4h wide"),
            (layer(**{"feed-forward": lambda b, s, h, a: 32 * s * b * h}), "own input"),
            (layer(**{"feed-forward": lambda b, s, h, a: 52 * s * b * h}), "one tensor, not two"),
            (
                layer(probabilities=lambda b, s, h, a: 4 * s * h * s * b // 32),
                "b = 3, s = 40",
            ),  # right for one size only
            (lambda b, s, h, a: 1, "five rows"),
        ],
    ),
    "01.whole_peak": (
        [277_682_576, 277_682_584, 277_682_176, 277_682_184],
        [
            *((305_185_168, "No gradient"), (260_905_360, "Backward has begun"), (269_293_968, "Three tensors")),
            *((275_577_232, "last norm"), (222_676_992, "all the time"), (130_767_248, "eight layers"), 1),
            *((286_071_184, "result only"), (277_674_384, "statistics, too"), (276_634_000, "keeps its own")),
            *((258_800_016, "Backward has begun: two tensors of the logits' size have come. The last norm"),),
            *((277.7, "in MB"), (277_700_000, "rounding")),
        ],
    ),
    "01.largest_batch": (
        [17, 17.0],
        [(16, "so does 17"), (18, "18 peaks at"), *((n, "1 to 10,000") for n in (17.5, 0, -1, "17"))],
    ),
    "01.swiglu_bytes": (
        [8_912_896],
        [8_912_897, (8.912896, "in MB"), (8_912_896 / 4, "number of elements"), (4_718_592, "gate's branch")],
    ),
    "02.checkpoint": (
        [checkpoint_of(), checkpoint_of(preserve_rng_state=False)],
        [
            *no_checkpoints,
            *((runs_again_for_show, "are live"), (lambda block, x: None, "Not answered")),
            *((Forgets, "weight has no gradient"), (KeepsItsGraph.apply, "counted twice")),
        ],
    ),
    "02.peak_formula": (
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
    "02.loss_in_pieces": (
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
    "02.dropout_checkpoint": (
        [checkpoint_of()],
        [
            *no_checkpoints,
            (checkpoint_of(preserve_rng_state=False), "another mask"),
            (Rewinds.apply, "random numbers afterwards"),
        ],
    ),
    "02.policy": (
        [[aten.bmm.default]],
        [
            *((aten.bmm.default, "list"), ([], "too much again"), ([aten.addmm.default], "keeps too much")),
            (["bmm"], "cannot be used"),
        ],
    ),
    "02.head_chunk": (
        [256],
        [(128, "so does 256"), (512, "Too large"), (100, "power of two"), ("256", "power of two")],
    ),
    "03.predicted_peak": (
        [segment_peak, lambda cuts: float(segment_peak(cuts))],
        [
            (lambda cuts: segment_peak(cuts) / 100_000, "Give bytes"),
            (lambda cuts: segment_peak(cuts) - 100_000, "One B is missing"),
            (lambda cuts: (len(cuts) + 2 * max_layers(cuts)) * 100_000, "the later ones are gone"),
            (lambda cuts: (len(cuts) + 2 * (cuts[-1] - cuts[-2])) * 100_000, "Any segment"),
            (lambda cuts: (len(cuts) + 2 * cuts[-1] / (len(cuts) - 1)) * 100_000, "Segments differ"),
            (lambda cuts: 3_100_000, "for the cuts [0, 40, 70, 90, 100] it is 8,200,000, not 3,100,000"),
            *((lambda cuts: [3_100_000], "is a `list`"), (lambda cuts: None, "Not answered"), 31),
        ],
    ),
    "03.best_count": (
        [lambda L, A, B: (L * A / B) ** 0.5, lambda L, A, B: round((L * A / B) ** 0.5)],
        [
            *((lambda L, A, B: L**0.5, "√L"), (lambda L, A, B: L * A / B, "square root")),
            *((lambda L, A, B: (L * B / A) ** 0.5, "wrong way round"), (lambda L, A, B: 14, "it gives 14")),
            *((lambda L, A, B: 2 * (L * A * B) ** 0.5, "the peak there"), (lambda L, A, B: None, "Not answered"), 14),
        ],
    ),
    "03.recurrence": (
        [recurrence, lambda stages, room: float(recurrence(stages, room))],
        [
            *((functools.partial(recurrence, slip=slip), reason) for slip, reason in RECURRENCE_SLIPS.items()),
            (lambda stages, room: None, "Not answered"),
            (lambda stages, room: sum(s.forward_time + s.backward_time for s in stages), "never runs out"),
            (lambda stages, room: 12, "4 stages with room 1"),
            (lambda stages, room: recurrence(stages, room) + (len(stages) == 5), "5 stages with room 8"),
        ],
    ),
    "03.drawn_schedule": (
        [list(segments(six, 4))],
        [
            *(([], "Not answered"), ([Forward(0, "input"), ...], "Not answered")),
            *((schedule, "too much") for schedule in (store_all(six), segments(six, 3), segments(six, 5))),
            *(([Backward(5)], "referee"), ([Forward(1, "all")], "x_1"), [3]),
        ],
    ),
    "03.beats_sqrt": (
        [optimal(pyramid, 150_000_000)],
        [
            *((sqrt_segments(pyramid), "not lower"), (optimal(pyramid, 131_000_000), "longer")),
            *(store_all(pyramid), (store_all(six), "referee"), (3, "cannot be simulated")),
        ],
    ),
    "04.hiding_intensity": ([6349, 400e12 / 63e9], [6.349, (15698, "989"), 3175]),
    "04.what_goes_down": (
        [{0, 2}, [2, 0]],
        [
            *(({0}, "still on the device"), ({0, 1, 2}, "fewer"), ({0, 2, 4}, "must stay")),
            *((odd, "numbers from 0 to 4") for odd in ({7}, 3, {"0"}, [[1]], {True})),
            set(),
        ],
    ),
    "04.offloading": (
        [keeps(torch.clone)],
        [
            (lambda store: saved_tensors_hooks(lambda t: t, lambda t: t), "Nothing is in the store"),
            (keeps(lambda t: t), "not copies"),
            *((keeps(torch.clone, right_place=False), None), (keeps(torch.zeros_like), "gradient is wrong")),
            *((copies_and_keeps, "nothing is freed"), (keeps(torch.clone, hold={}), "nothing is freed")),
        ],
    ),
    "05.accumulation": (
        [accumulate, counts_first],
        [
            *((means, "off by"), lambda model, loss_sum, pieces: accumulate(model, loss_sum, pieces[-1:])),
            (lambda *_: None, "no gradient"),
            (lambda model, loss_sum, pieces: accumulate(model, loss_sum, [torch.cat(pieces)]), "saves no memory"),
            (all_graphs_at_once, "saves no memory"),
        ],
    ),
    "05.largest_micro_batch": ([14], [8, (14.5, "Whole"), 15, (25, "floor")]),
    "05.fast_micro_batch": ([16], [8, 32, 64, "16"]),
    "06.log_sum_exp": (
        [in_blocks, padded, functools.partial(in_blocks, step=-1), of_transposed],
        [
            (lambda scores, block: shifted(scores, block, scores.amax(1)), "`amax` took more than a block"),
            (lambda scores, block: shifted(scores, block, scores.sort(1).values[:, -1]), "`sort` took more"),
            *((row_by_row, "`max` took more than a block"), (two_passes, "second pass")),
            (lambda scores, block: scores.exp().sum(1).log(), "overflow"),
            lambda scores, block: torch.logsumexp(scores, 1),
            functools.partial(in_blocks, rescale=False),
            (lambda scores, block: 3, "One number a row"),
        ],
    ),
    "06.probabilities": (
        [probabilities],
        [
            *((lambda q, k, lse: q @ k.T, "not sum to 1"), (lambda q, k, lse: (q @ k.T).softmax(1), "differ")),
            *(
                (lambda q, k, lse: lse, "matrix"),
                (lambda q, k, lse: (q @ k.T / 4).softmax(1), "do not come from `lse`"),
            ),
            (normalised, "do not come from `lse`"),
        ],
    ),
    "06.grouped_bytes": ([84_410_368], [(83_886_080, "missing"), (84_148_224, "fp32"), (84.410368, "in MB")]),
    "07.forty_megabytes": (
        [Recipe(micro_batches=4), Recipe(micro_batches=8)],
        [
            (Recipe(micro_batches=2), "does not fit: 56.2 MB > 40 MB"),
            (Recipe(attention="flash", micro_batches=4), "takes 1.033 times the FLOPs"),
            (Recipe(micro_batches=4, offload_optimizer=0.25), "fits, but moves"),
        ],
    ),
    "07.fourteen_megabytes": (
        [Recipe(**LEAST)],
        [
            (Recipe(attention="flash", micro_batches=8), "does not fit: 16.9 MB > 14 MB"),
            (Recipe(**LEAST, offload_optimizer=0.5), "fits, but moves"),
        ],
    ),
    "07.eleven_megabytes": (
        [Recipe(**LEAST, offload_optimizer=0.5), Recipe(**LEAST, offload_optimizer=1.0)],
        [(Recipe(**LEAST, offload_optimizer=0.25), "does not fit: 11.9 MB > 11 MB")],
    ),
    "07.beats_the_lesson": (
        [Recipe(**LESSON, checkpoint="segments", segments=6)],
        [
            (Recipe(**LESSON, checkpoint="layers"), "not cheaper: 2.667 s : 2.667 s"),
            (Recipe(**FORGETFUL), "does not fit"),
        ],
    ),
    "08.held": (
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
    "08.seven_billion": (
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
    "08.sharded_step": (
        [sharded, lambda *given: tuple(sharded(*given))],
        [
            *((functools.partial(sharded, slip=slip), reason) for slip, reason in SHARDED_SLIPS.items()),
            (lambda *given: None, "Not answered"),
            (lambda weights, *given: weights, "No Adam"),
            (lambda weights, *given: weights[0], "one tensor a rank"),
        ],
    ),
    "08.sent": (
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
NO_RECIPES = [
    *(("micro_batches=4", "this is a `str`"), (LEAST, "this is a `dict`"), (Recipe, "this is a `type`")),
    *((Recipe(optimizer="sgd"), "optimizer stay"), (Recipe(precision="bf16"), "optimizer stay")),
    (Recipe(micro_batches=9), "cannot be estimated: micro_batches is 9"),
]


def test_every_check_has_answers_here():
    assert ANSWERS.keys() == CHECKS.keys()


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_accepts_right_answers(name):
    for answer in ANSWERS[name][0]:
        verdict = CHECKS[name](answer)
        assert verdict and verdict.hint is None, verdict


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_refuses_wrong_answers_and_names_the_mistake_or_gives_a_hint(name):
    wrong = [*ANSWERS[name][1], *(NO_RECIPES if name.startswith("07") else ())]
    for case in wrong:
        answer, reason = case if isinstance(case, tuple) else (case, None)
        verdict = CHECKS[name](answer)
        assert not verdict and (verdict.exact or verdict.hint), (case, verdict)
        assert (reason or "") in verdict.message, verdict


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_survives_nonsense(name):
    for answer in (None, ...):
        verdict = CHECKS[name](answer)
        assert not verdict and verdict.message == "Not answered yet." and verdict.hint is None
    assert spoken_problems(verdict._repr_html_()) == []
    for answer in (Hostile(), Hostile, object(), "x", {}, [Hostile()], lambda *_: 1 / 0, float("nan"), 10**5000):
        verdict = CHECKS[name](answer)
        assert isinstance(verdict, Verdict) and not verdict and (verdict.exact or verdict.hint) and repr(verdict)


# Claims ---------------------------------------------------------------------------------------------------------------

WITH_CLAIMS = [number for number in lessons.LESSONS if lessons.claims_of(number)]


def test_every_lesson_with_an_idea_tests_claims():
    assert [number for number in lessons.LESSONS if number != "00"] == WITH_CLAIMS


@pytest.mark.parametrize("number", WITH_CLAIMS)
def test_the_table_of_claims_takes_a_figure_for_each(number):
    claims = lessons.lesson(number).CLAIMS
    figures = [f"{place} of 9" for place in range(len(claims))]
    language("both")
    shown = repr(lessons.what_you_may_have_read(number, *figures))
    words = [both(part) for each in claims for part in (each.claim, each.experiment, each.verdict)]
    assert all(en != zh and en in shown and zh in shown for en, zh in words)
    assert all(figure in shown for figure in figures)
    with pytest.raises(ValueError, match=f"there are 1 figures for {len(claims)} claims"):
        lessons.what_you_may_have_read(number, "1")


def test_a_claim_has_one_of_three_outcomes():
    with pytest.raises(ValueError, match="outcome is 'maybe'; it takes one of fails, partly, holds"):
        said.Claim("a", "b", "c", "maybe")


def test_an_unknown_lesson_is_an_error_that_names_the_known_ones():
    with pytest.raises(ValueError, match=r"lesson is '99'; it takes one of 00, 01, 02"):
        lessons.claims_of("99")


# Lesson 00 ------------------------------------------------------------------------------------------------------------


def test_this_machine_is_named_and_measured_in_both_languages():
    shown = lesson_00.about_this_machine()
    assert torch.__version__ in repr(shown) and "CPU 核心数" in shown._repr_html_()
    assert spoken_problems(shown._repr_html_()) == []


def test_figures_of_the_lessons_have_words_in_both_languages():
    chain = Chain.uniform(4)
    for drawn in (
        lesson_00.course_map(),
        lesson_01.draw_activation_bytes(),
        lesson_03.schedule_pictures(
            {"store all": store_all(chain)},
            chain,
            title="At half the bytes attention is forgotten first: as many bytes, fewer FLOPs",
        ),
    ):
        en, zh = pictures.description(drawn)
        assert not en[0].islower() and en.endswith(".") and zh.endswith("。") and not set("。，、；：") & set(en)
        assert len(en) > 80 and len(zh) > 40


# Lesson 01: on a GPU, and here ----------------------------------------------------------------------------------------


def small_run(item):
    return item.run("cpu", small=True).figures


def test_the_decoder_step_counts_the_same_peak_with_the_meter_and_with_measure():
    values = small_run(lesson_01.decoder_step)
    model, _ = decoder_and_tokens(torch.device("cpu"), **TINY)
    assert values["parameter_count"] == sum(p.numel() for p in model.parameters())
    assert values["meter_peak_bytes"] + values["workspace_bytes"] == values["allocator_peak_bytes"]
    assert values["meter_blocks_peak_bytes"] >= values["meter_peak_bytes"]
    assert values["meter_peak_bytes"] > sum(training_state_bytes(values["parameter_count"], "fp32-sgd").values())


def test_the_formula_of_korthikanti_is_met_to_the_byte():
    values = small_run(lesson_01.korthikanti)
    assert values["difference_bytes"] == 0
    assert values["saved_bytes"] == values["predicted_bytes"] > values["paper_bytes"]


def test_fused_attention_peaks_lower_than_standard_attention():
    values = small_run(lesson_01.attention_sequence)
    assert values["fused_32_tensors_bytes"] < values["standard_32_tensors_bytes"]


def test_the_monitor_sees_each_phase_take_and_give_back_what_it_should():
    values = small_run(lesson_01.monitor)
    model, _ = decoder_and_tokens(torch.device("cpu"), **TINY)
    weights = sum(p.nbytes for p in model.parameters())
    moments = 2 * weights + 4 * len(list(model.parameters()))  # and a step counter each
    assert values["step_live_bytes"] - values["backward_live_bytes"] == moments
    assert values["step_live_bytes"] - values["zero_grad_live_bytes"] == weights
    assert values["forward_live_bytes"] > values["backward_live_bytes"] > values["model_live_bytes"] >= weights


# Lesson 03: pictures --------------------------------------------------------------------------------------------------


def test_pictures_of_schedules_say_peak_and_time_and_share_one_scale():
    chain = Chain.uniform(8)
    language("en")
    plans = {"store all": store_all(chain), "recursive": recursive(chain)}
    drawn = lesson_03.schedule_pictures(plans, chain, unit="B", scale=1)
    first, its_bytes, second, _ = drawn.axes
    titles = [ax.get_title(loc="left") for ax in (first, second)]
    assert titles == ["store all · 10 B · 1.00 ×", "recursive · 6 B · 1.50 ×"]
    assert first.get_xlim() == second.get_xlim() == (0, 36)
    heights = its_bytes.patches[-1].get_data().values  # while each action runs
    assert [*heights] == [*range(2, 10), *range(10, 2, -1)] and its_bytes.get_ylim()[1] == 11


def test_the_curve_of_a_schedule_has_the_peak_that_the_referee_counts():
    for chain in (Chain.uniform(12, saved_bytes=2), pyramid):
        for schedule in (store_all(chain), recursive(chain), sqrt_segments(chain)):
            spans, cost = live_bytes(schedule, chain), simulate(schedule, chain)
            assert max(count for _, _, count in spans) == cost.peak_bytes and spans[-1][1] == cost.time
            assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))


def test_there_are_as_many_schedules_as_schroeder_numbers_and_the_referee_admits_each():
    for length, number in enumerate((1, 2, 6, 22, 90, 394), start=1):
        found = {tuple(actions) for actions in lesson_03.every_schedule(0, length - 1)}
        assert len(found) == number
        assert all(simulate(actions, Chain.uniform(length)).forward_steps >= length for actions in found)


def test_the_schedule_under_a_slider_keeps_its_budget_or_says_what_it_takes():
    language("en")
    assert lesson_03.draw_schedule(360).get_suptitle() == "A budget of 360 MB costs 0% more time"
    assert lesson_03.draw_schedule(100).get_suptitle() == "100 MB is too little: it takes 131 MB"
    title = lesson_03.draw_schedule(200).axes[0].get_title(loc="left")
    assert float(title.split(" · ")[1].removesuffix(" MB")) <= 200


# Lesson 05: two processes ---------------------------------------------------------------------------------------------


def test_two_processes_reduce_the_gradients_once_or_for_every_micro_batch():
    parameter_bytes, sent = lesson_05.ddp_bytes(micro_batches=3)
    assert sent == {True: parameter_bytes, False: 3 * parameter_bytes}


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's list of threads")
def test_a_process_leaves_no_thread_of_its_group_to_the_interpreters_end(tmp_path):
    program = (
        "import runpy, sys\nfrom pathlib import Path\n"
        f"sys.argv = ['lesson_05', {str(tmp_path)!r}, '2', '1', '0']\n"
        "runpy.run_module('course_lib.lessons.lesson_05', run_name='__main__')\n"
        "names = [(thread / 'comm').read_text().strip() for thread in Path('/proc/self/task').iterdir()]\n"
        "print([name for name in names if 'gloo' in name])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


# Lesson 07: claims and pictures ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def taken():
    """recipe -> what it takes on four layers of lesson 07's decoder; estimated once."""

    def make_model():
        return Decoder(vocabulary=8192, hidden=640, heads=40, layers=4, sequence=384)

    return functools.cache(lambda recipe: estimate(make_model, lambda: random_tokens(2, 384, 8192), recipe))


@pytest.fixture(scope="module")
def small_steps():
    """Three recipes on the smaller decoder of lesson 07, as estimates; the last one moves bytes."""

    def make_model():
        return Decoder(vocabulary=1024, hidden=128, heads=8, layers=2, sequence=256)

    flash = {"attention": "flash"}
    recipes = Recipe(), Recipe(**flash), Recipe(**flash, micro_batches=8, offload_optimizer=1.0)
    return [estimate(make_model, lambda: random_tokens(8, 256, 1024), recipe) for recipe in recipes]


def test_where_activations_are_small_a_second_micro_batch_raises_the_peak(taken):
    one, two = taken(Recipe(**FORGETFUL)), taken(Recipe(**FORGETFUL, micro_batches=2))
    assert two.peak_bytes > one.peak_bytes and two.flops == one.flops
    assert two.at_peak["gradient"] == two.at_peak["parameter"], "a full set of gradients is there"
    assert two.phase_peaks["backward"] == two.peak_bytes
    assert taken(Recipe(micro_batches=2)).peak_bytes < taken(Recipe()).peak_bytes, "it helps where they are large"


def test_the_savings_of_flash_and_checkpoints_do_not_add_up(taken):
    plain = taken(Recipe()).peak_bytes
    techniques = {"attention": "flash"}, {"checkpoint": "layers"}, FORGETFUL
    flash, checkpoints, both = (plain - taken(Recipe(**each)).peak_bytes for each in techniques)
    assert max(flash, checkpoints) < both < flash + checkpoints


def test_with_the_state_on_the_host_a_device_needs_less_than_16_bytes_a_parameter():
    def make_model():  # four of the 32 layers
        return Decoder(vocabulary=32000, hidden=4096, heads=32, layers=4, sequence=4096)

    with symbolic():
        parameters = sum(p.numel() for p in make_model().parameters())
    on_device, on_host = (
        estimate(make_model, lambda: random_tokens(1, 4096, 32000), Recipe("bf16", **FORGETFUL, **more), tier="host")
        for more in ({}, {"offload_optimizer": 1.0, "in_backward": True})
    )
    assert on_host.peak_bytes < 4 * parameters < 16 * parameters < on_device.peak_bytes
    assert on_device.at_peak["optimizer"] >= 12 * parameters and on_host.at_peak["optimizer"] == 0
    assert on_device.moved_bytes == 0 and on_host.moved_bytes == (2 + 2) * parameters  # gradients down, parameters up


def test_flash_takes_more_flops_where_no_tile_is_masked_as_a_whole_and_fewer_elsewhere(taken):
    flash = Recipe(attention="flash")
    assert BLOCK > 384 and taken(flash).flops > taken(Recipe()).flops

    def make_model():
        return Decoder(vocabulary=64, hidden=32, heads=2, layers=1, sequence=2 * BLOCK)

    ours, plain = (estimate(make_model, lambda: random_tokens(1, 2 * BLOCK, 64), r) for r in (flash, Recipe()))
    assert ours.flops < plain.flops


def test_the_three_recipes_of_the_gpu_experiment_peak_where_they_are_predicted():
    values = small_run(lesson_07.three_recipes)
    for recipe in lesson_07.RECIPES:
        assert values[f"{recipe}_peak_bytes"] == values[f"{recipe}_predicted_bytes"]
    assert values["least_peak_bytes"] < values["plain_peak_bytes"]


def test_every_field_of_a_recipe_is_explained():
    shown = lesson_07.recipe_fields()
    assert lesson_07.FIELDS.keys() == Recipe().__dict__.keys()
    assert shown.data["field"].tolist() == [f"`{name}={value!r}`" for name, value in Recipe().__dict__.items()]
    assert spoken_problems(shown._repr_html_()) == []


def test_the_way_to_a_budget_is_drawn_in_bars_as_high_as_the_estimates(small_steps, tmp_path):
    names = ["plain", "+ flash", "step"]
    measured = [each.peak_bytes + 3_000_000 for each in small_steps]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawn = lesson_07.waterfall_picture(names, small_steps, measured, 20_000_000, title="budget")
        drawn.savefig(tmp_path / "figure.png")
    (axes,) = drawn.axes
    steps = range(len(small_steps))
    tops = [max(layer[i].get_y() + layer[i].get_height() for layer in axes.containers) for i in steps]
    assert tops == pytest.approx([each.peak_bytes / 1e6 for each in small_steps])
    (points,) = [line for line in axes.lines if line.get_marker() == "D"]
    assert points.get_ydata() == pytest.approx([count / 1e6 for count in measured])
    assert [line.get_ydata()[0] for line in axes.lines if line.get_linestyle() == "--"] == [20]
    held = {category for each in small_steps for category, count in each.at_peak.items() if count}
    legend = {item.get_text() for item in axes.get_legend().get_texts()}
    assert {category_label(category) for category in held} <= legend
    en, zh = pictures.description(drawn)
    for each in small_steps:
        assert f" {each.peak_bytes / 1e6:,.0f}" in en and f" {each.peak_bytes / 1e6:,.0f}" in zh


def test_the_budget_under_a_slider_names_the_cheapest_recipe_that_fits(small_steps):
    language("en")
    for budget, fitting, cheapest in ((110, 3, 0), (80, 2, 1), (20, 1, 2)):
        drawn = lesson_07.draw_budget(small_steps, budget)
        assert drawn.get_suptitle().startswith(f"{budget} MB: {fitting} fit, the cheapest takes ")
        assert drawn.axes[0].get_title("left") == f"recipe: {small_steps[cheapest].recipe}"
        count = {line.get_label(): len(line.get_xdata()) for line in drawn.axes[0].lines}
        assert (count["fits"], count["does not fit"]) == (fitting, 3 - fitting)
    none = f"5 MB: none fits, the least is {small_steps[2].peak_bytes / 1e6:.1f} MB"
    assert lesson_07.draw_budget(small_steps, 5).get_suptitle() == none


# Lesson 08: ranks, and the claims -------------------------------------------------------------------------------------


def test_collectives_within_one_process_are_those_of_the_framework_and_count_as_it_counts():
    wire, tensors = lesson_08.Wire(), [torch.arange(8.0) + rank for rank in range(4)]
    parts = wire.reduce_scatter(tensors)
    assert torch.equal(torch.cat(parts), sum(tensors)) and wire.sent_bytes == 32
    assert all(torch.equal(each, sum(tensors)) for each in wire.all_gather(parts)) and wire.sent_bytes == 64
    assert all(torch.equal(each, sum(tensors)) for each in wire.all_reduce(tensors)) and wire.sent_bytes == 128


def test_the_adam_of_the_exercise_is_the_framework_s():
    weight, ours = torch.nn.Parameter(torch.linspace(-1, 1, 8)), lesson_08.Adam()
    adam, piece = torch.optim.Adam([weight], lr=1e-3), weight.detach().clone()
    for step in range(3):
        weight.grad = torch.linspace(-1, step, 8).sin()
        piece = ours(piece, weight.grad)
        adam.step()
        assert torch.allclose(piece, weight, atol=1e-6)
    assert ours.state_bytes == 2 * 8 * 4


def test_the_framework_s_zero_1_communicates_half_as_much_again_as_ddp():
    ddp, zero1 = (lesson_08.symbolic_rank(mode, 2).sent_bytes for mode in ("ddp", "zero1"))
    assert zero1 == 1.5 * ddp


def test_what_four_ranks_hold_is_a_quarter_and_their_peak_is_not():
    with symbolic():
        whole = sum(held_bytes(shapes_of(task_of().make_model()), "fsdp", 1)[0].values())
        part = sum(held_bytes(shapes_of(task_of().make_model()), "fsdp", 4)[0].values())
    assert part - 400 == (whole - 400) / 4
    assert lesson_08.symbolic_rank("fsdp", 4).peak_bytes > 2 * part


def test_views_of_buckets_lower_the_peak_at_the_end_of_backward_alone():
    long, short = (
        lesson_08.ddp_peak(tokens, view=False) - lesson_08.ddp_peak(tokens, view=True) for tokens in (128, 16)
    )
    assert long == 0 and 0.8 * 27_502_592 < short <= 27_502_592


def a_run(mode, ranks, held, sent):
    measured = {name: [held // 4] * ranks for name in ("parameter", "gradient")} | {"optimizer": [held // 2] * ranks}
    return {"mode": mode, "ranks": ranks, "measured": measured, "communicated": {"predicted": sent, "measured": sent}}


def test_bytes_over_ranks_are_drawn_where_they_were_measured_and_said_in_both_languages():
    lines = {n: stages(*HELD)(6_875_648, n) for n in (1, 2, 4, 8)}
    runs = [a_run(mode, n, 4_000_000 * n, 55_000_000) for mode in ("ddp", "zero1", "fsdp") for n in (2, 4)]
    assert [lesson_08.held_by(run) for run in runs[:2]] == [8_000_000, 16_000_000]
    drawn = lesson_08.draw_ranks(lines, runs)
    left, right = drawn.axes
    points = [line for line in left.lines if line.get_marker() == "o" and len(line.get_xdata())]
    assert [[*line.get_ydata()] for line in points] == [[8, 16]] * 3
    assert len([line for line in left.lines if line.get_marker() != "o"]) == 4
    assert {y for line in right.lines for y in line.get_ydata()} == {55}
    en, zh = pictures.description(drawn)
    assert "ZeRO 3 from 110.0 to 13.8 MB" in en and "ZeRO 3 从 110.0 到 13.8 MB" in zh


def test_bars_of_a_peak_are_as_long_as_it_and_hold_what_was_gathered():
    parts = dict.fromkeys(("parameter", "optimizer", "gradient", "activation", "temporary", "input"), 10_000_000)
    drawn = lesson_08.draw_peaks({"one device": {**parts, "gathered": 5_000_000}}, "peak")
    (ax,) = drawn.axes
    assert sum(patch.get_width() for patch in ax.patches) == 65
    assert {item.get_text() for item in ax.texts} == {"65.0"}
    en, zh = pictures.description(drawn)
    assert "one device: 65.0 MB" in en and "一台设备：65.0 MB" in zh


# Sliders --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("play", "arguments"),
    [
        (lesson_01.activation_playground, {"sequence": 2048, "layers": 32, "heads": 32}),
        (lesson_03.schedule_playground, {"budget": 200}),
        (lambda: lesson_07.budget_playground([1]), {"budget": 30}),
    ],
)
def test_sliders_begin_where_the_picture_does(play, arguments, monkeypatch):
    widgets = pytest.importorskip("ipywidgets")
    shown = []
    monkeypatch.setattr(widgets, "interact", lambda draw, **sliders: shown.append(sliders))
    play()
    assert {name: slider.value for name, slider in shown[0].items()} == arguments
