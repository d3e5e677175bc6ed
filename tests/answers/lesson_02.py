"""Answers to the exercises of lesson 02: right ones, and wrong ones with what they are told."""

import functools
import itertools

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from course_lib.checkpoint import checkpoint, checkpointed_loss
from course_lib.lessons.ledger import BASELINE
from course_lib.lessons.lesson_02.checks import INPUT, LAYER, RNG

PEAK = BASELINE.peak_bytes


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


class IgnoresTheGradient(Forgets):
    """Goes backward from the sum of its output, whatever gradient has arrived."""

    @staticmethod
    def backward(context, gradient):
        again = context.x.detach().requires_grad_()
        with torch.enable_grad():
            context.block(again).sum().backward()
        return None, again.grad


class PassesOnes(IgnoresTheGradient):
    @staticmethod
    def backward(context, gradient):
        again = context.x.detach().requires_grad_()
        with torch.enable_grad():
            output = context.block(again)
        torch.autograd.backward(output, torch.ones_like(output))
        return None, again.grad


class Right(IgnoresTheGradient):
    @staticmethod
    def backward(context, gradient):
        again = context.x.detach().requires_grad_()
        with torch.enable_grad():
            output = context.block(again)
        output.backward(gradient)
        return None, again.grad


class WithoutAGraph(IgnoresTheGradient):
    @staticmethod
    def backward(context, gradient):
        again = context.x.detach().requires_grad_()
        context.block(again).backward(gradient)
        return None, again.grad


class OneReturned(Right):
    @staticmethod
    def backward(context, gradient):
        return Right.backward(context, gradient)[1]


def with_hooks(block, x, *, graph=True, own=True, once=True, needs=None, kept=False, end=False):
    """The lesson's own, with or without one of its steps."""
    numbers, found, all_kept = itertools.count(), [], []

    def forget(tensor):
        all_kept.extend([tensor.detach()] * kept)
        return next(numbers)

    def bring_back(number):
        if not found or not once:
            with (
                torch.set_grad_enabled(graph),
                saved_tensors_hooks(lambda t: found.append(t.detach()), bring_back),
            ):
                block(
                    x.detach().requires_grad_(x.requires_grad if needs is None else needs)
                    if own
                    else x
                )
        return found.pop() if end else found[number]

    with saved_tensors_hooks(forget, bring_back):
        return block(x)


class KeepsTwoMore(Right):
    """Keeps results of the block next to its input."""

    @staticmethod
    def forward(context, block, x):
        output = Forgets.forward(context, block, x)
        context.more = [output + 1, output + 2]
        return output


class OnTheClass(Right):
    """Keeps the block and its input where the next call finds them."""

    @staticmethod
    def forward(context, block, x):
        OnTheClass.block, OnTheClass.x = block, x
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(context, gradient):
        context.block, context.x = OnTheClass.block, OnTheClass.x
        return Right.backward(context, gradient)


class LetsItRunOn(Forgets):
    """Goes backward from the input itself, whose gradient comes by itself where it is a leaf."""

    @staticmethod
    def backward(context, gradient):
        with torch.enable_grad():
            context.block(context.x).backward(gradient)
        return None, None


class WeighedSum(Forgets):
    """Right too: the sum of the products with the gradient has that gradient."""

    @staticmethod
    def backward(context, gradient):
        again = context.x.detach().requires_grad_()
        with torch.enable_grad():
            (context.block(again) * gradient).sum().backward()
        return None, again.grad


class WeighedOutside(WeighedSum):
    @staticmethod
    def backward(context, gradient):
        again = context.x.detach().requires_grad_()
        with torch.enable_grad():
            output = context.block(again)
        (output.detach() * gradient).sum().backward()
        return None, again.grad


class OnlyNumbered:
    """Hooks whose numbers and tensors stand outside of the function, as in a notebook's cell."""

    def __init__(self):
        self.numbers, self.found = itertools.count(), []

    def __call__(self, block, x):
        def bring_back(number):
            if not self.found:
                with (
                    torch.enable_grad(),
                    saved_tensors_hooks(lambda t: self.found.append(t.detach()), bring_back),
                ):
                    block(x.detach().requires_grad_(x.requires_grad))
            return self.found[number]

        with saved_tensors_hooks(lambda tensor: next(self.numbers), bring_back):
            return block(x)


class Turned(Right):
    @staticmethod
    def backward(context, gradient):
        return Right.backward(context, gradient)[::-1]


class ForwardOnly(Forgets):
    """The half that somebody writes first."""

    @staticmethod
    def backward(context, gradient):
        return None, gradient


class NothingReturned(Right):
    @staticmethod
    def forward(context, block, x):
        Right.forward(context, block, x)


class FromNothing(IgnoresTheGradient):
    @staticmethod
    def backward(context, gradient):
        again = context.x.detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(context.block(again))
        return None, again.grad


class NeedsNoGradient(Forgets):
    @staticmethod
    def backward(context, gradient):
        again = context.x.detach()
        with torch.enable_grad():
            torch.autograd.backward(context.block(again), gradient)
        return None, again.grad


def number_back(block, x):
    numbers = itertools.count()
    with saved_tensors_hooks(lambda tensor: next(numbers), lambda number: number):
        return block(x)


class Seeded(Forgets):
    """Takes the generator for what its seed was: right where nothing was drawn before."""

    @staticmethod
    def forward(context, block, x):
        context.seed = torch.initial_seed()
        return Forgets.forward(context, block, x)

    @staticmethod
    def backward(context, gradient):
        x = context.x.detach().requires_grad_()
        with torch.enable_grad(), torch.random.fork_rng():
            torch.manual_seed(context.seed)
            return None, *torch.autograd.grad(context.block(x), x, gradient)


class SeedOfItsOwn(Seeded):
    """Sets a seed before both runs, so that each block draws the same mask."""

    @staticmethod
    def forward(context, block, x):
        torch.manual_seed(7)
        return Seeded.forward(context, block, x)


class DrawsItsSeed(Seeded):
    """Right in another way: each call draws a seed, and both of its runs begin with it."""

    @staticmethod
    def forward(context, block, x):
        context.block, context.x = block, x
        context.seed = int(torch.randint(2**31, ()))
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(context.seed)
            return block(x)


class StateAfterwards(Seeded):
    """Looks at the generator when the first run is over."""

    @staticmethod
    def forward(context, block, x):
        output = Forgets.forward(context, block, x)
        context.state = torch.get_rng_state()
        return output

    @staticmethod
    def backward(context, gradient):
        x = context.x.detach().requires_grad_()
        with torch.enable_grad(), torch.random.fork_rng():
            torch.set_rng_state(context.state)
            return None, *torch.autograd.grad(context.block(x), x, gradient)


class BackToTheFirstRun(StateAfterwards):
    """Puts back the state that the first run left, not the one that was there."""

    @staticmethod
    def forward(context, block, x):
        context.before = torch.get_rng_state()
        return StateAfterwards.forward(context, block, x)

    @staticmethod
    def backward(context, gradient):
        x = context.x.detach().requires_grad_()
        torch.set_rng_state(context.before)
        with torch.enable_grad():
            found = torch.autograd.grad(context.block(x), x, gradient)
        torch.set_rng_state(context.state)
        return None, *found


class OneState(Seeded):
    """Keeps the state where the next call finds it."""

    @staticmethod
    def forward(context, block, x):
        OneState.state = torch.get_rng_state()
        return Forgets.forward(context, block, x)

    @staticmethod
    def backward(context, gradient):
        context.state = OneState.state
        return StateAfterwards.backward(context, gradient)


class Careless(IgnoresTheGradient):
    """Draws the same mask, and goes backward from the sum."""

    @staticmethod
    def forward(context, block, x):
        context.state = torch.get_rng_state()
        return IgnoresTheGradient.forward(context, block, x)

    @staticmethod
    def backward(context, gradient):
        with torch.random.fork_rng():
            torch.set_rng_state(context.state)
            return IgnoresTheGradient.backward(context, gradient)


def whole_loss(hidden, weight, targets, reduction="mean"):
    return F.cross_entropy(hidden @ weight.T, targets, reduction=reduction)


def in_pieces(hidden, weight, targets, chunk, forgets=True, last=None, counts=True):
    total = 0.0
    for rows, answers in list(zip(hidden.split(chunk), targets.split(chunk), strict=True))[:last]:
        if forgets:
            total = total + checkpoint(
                whole_loss, rows, weight, answers, "sum", use_reentrant=False
            )
        else:
            total = total + whole_loss(rows, weight, answers, "sum")
    return total / ((targets != -100).sum() if counts else len(targets))


def means_times_lengths(hidden, weight, targets, chunk, counted=len):
    """Means of chunks, each with the weight of its targets, or of those that count."""
    total = 0.0
    for rows, answers in zip(hidden.split(chunk), targets.split(chunk), strict=True):
        mean = checkpoint(whole_loss, rows, weight, answers, use_reentrant=False)
        total = total + mean * counted(answers)
    return total / counted(targets)


def joined(hidden, weight, targets, chunk):
    """The loss of each token; their mean takes those that don't count for zeros."""
    losses = [
        checkpoint(whole_loss, rows, weight, answers, "none", use_reentrant=False)
        for rows, answers in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    return torch.cat(losses).mean()


class GradientsInForward(torch.autograd.Function):
    """Makes the gradients in forward, as Liger's does, for a loss that nobody scales."""

    scaled = False

    @classmethod
    def apply(cls, hidden, weight, targets, chunk):
        return super().apply(hidden, weight, targets, chunk)

    @staticmethod
    def _run(context, hidden, weight, targets, chunk):
        counted = (targets != -100).sum()
        total, gradients = 0.0, [torch.zeros_like(hidden), torch.zeros_like(weight)]
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            rows, matrix = (t.detach().requires_grad_() for t in (hidden[part], weight))
            with torch.enable_grad():
                loss = whole_loss(rows, matrix, targets[part], "sum") / counted
                loss.backward()
            total = total + loss.detach()
            gradients[0][part] = rows.grad
            gradients[1] += matrix.grad
        context.save_for_backward(*gradients)
        return total

    @staticmethod
    def forward(context, hidden, weight, targets, chunk):
        return GradientsInForward._run(context, hidden, weight, targets, chunk)

    @staticmethod
    def backward(context, gradient):
        return *context.saved_tensors, None, None


class ScaledGradientsInForward(GradientsInForward):
    @staticmethod
    def backward(context, gradient):
        return *(gradient * each for each in context.saved_tensors), None, None


def mean_of_means(hidden, weight, targets, chunk):
    parts = list(zip(hidden.split(chunk), targets.split(chunk), strict=True))
    losses = [
        checkpoint(whole_loss, rows, weight, answers, use_reentrant=False)
        for rows, answers in parts
    ]
    return sum(losses) / len(losses)


def in_so_many_pieces(hidden, weight, targets, chunk):
    """Takes the number of tokens for one of pieces."""
    return in_pieces(hidden, weight, targets, -(-len(targets) // chunk))


def of_the_last_chunk(hidden, weight, targets, chunk):
    """Each function looks its targets up when it is called: in backward, that is after the loop."""
    total = 0.0
    for rows, answers in zip(hidden.split(chunk), targets.split(chunk), strict=True):
        of_chunk = lambda rows: whole_loss(rows, weight, answers, "sum")  # noqa: B023, E731
        total = total + checkpoint(of_chunk, rows, use_reentrant=False)
    return total / len(targets)


def a_slice_for_each(hidden, weight, targets, chunk):
    """Right too: slices, and the mean by the number of targets that count, chunk by chunk."""
    total, counted = 0.0, 0
    for start in range(0, len(targets), chunk):
        part = slice(start, start + chunk)
        counted += int((targets[part] != -100).sum())
        total = total + checkpoint(
            whole_loss, hidden[part], weight, targets[part], "sum", use_reentrant=False
        )
    return total / counted


def backward_inside(hidden, weight, targets, chunk):
    loss = in_pieces(hidden, weight, targets, chunk)
    loss.backward()
    return loss.detach()


RIGHT_PEAKS = {k: PEAK - k * (LAYER - INPUT - RNG) for k in (0, 1, 4, 7)}


def right_for_four_only(k):
    """Goes through the four points of an earlier check, and bends between them."""
    return RIGHT_PEAKS[0] - k * (LAYER - INPUT - RNG) + k * (k - 1) * (k - 4) * (k - 7)


def llama_row(
    model, tokens, labels, *, layers=True, shift=1, chunk=128, loss=in_pieces, cut=False, matrix=""
):
    """The lesson's own row, with or without one of its parts."""
    if layers:
        model.activation_checkpointing_enable()
    hidden = model.model(tokens).last_hidden_state
    if shift == 1:
        hidden, labels = hidden[:, :-1], labels[:, 1:]
    if shift == -1:
        hidden, labels = hidden[:, 1:], labels[:, :-1]
    weight = getattr(model.model, matrix).weight if matrix else model.lm_head.weight
    hidden = hidden.detach() if cut else hidden
    return loss(hidden.flatten(0, 1), weight, labels.flatten(), chunk)


def llama_row_by_labels(model, tokens, labels):
    """Right too: the labels move, as `transformers` does it, and the older name of the method."""
    model.gradient_checkpointing_enable()
    hidden = model.model(input_ids=tokens)[0].reshape(-1, 256)
    targets = F.pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1)
    return a_slice_for_each(hidden, model.lm_head.weight, targets, 100)


def loss_of_llama(model, tokens, labels, _=None):
    return model(input_ids=tokens, labels=labels).loss


def every_second_layer(model, tokens, labels):
    model.activation_checkpointing_enable(every_n_layers=2)
    return llama_row(model, tokens, labels, layers=False)


def flattened_first(model, tokens, labels):
    """Lets the last token of a sequence predict the first one of the next."""
    model.activation_checkpointing_enable()
    hidden = model.model(tokens).last_hidden_state.flatten(0, 1)
    return in_pieces(hidden[:-1], model.lm_head.weight, labels.flatten()[1:], 128)


def divided_by_all(hidden, weight, targets, chunk):
    return in_pieces(hidden, weight, targets, chunk, counts=False)


def summed(hidden, weight, targets, chunk):
    return in_pieces(hidden, weight, targets, chunk) * (targets != -100).sum()


def mean_of_sequences(model, tokens, labels):
    model.activation_checkpointing_enable()
    hidden = model.model(tokens).last_hidden_state[:, :-1]
    weight = model.lm_head.weight
    rows = zip(hidden, labels[:, 1:], strict=True)
    return sum(in_pieces(one, weight, targets, 128) for one, targets in rows) / len(labels)


def divided_before_the_shift(model, tokens, labels):
    mean = llama_row(model, tokens, labels)
    return mean * (labels[:, 1:] != -100).sum() / (labels != -100).sum()


def backward_first(loss):
    loss.backward()
    return loss.detach()


no_checkpoints = [
    lambda block, x: block(x),
    lambda block, x: (block(x), block(x))[1],
    lambda block, x: x,
    hides,
]


aten = torch.ops.aten


#: check -> right answers, and wrong ones, each alone or with a part of what it is told.
ANSWERS = {
    "checkpoint": (
        [
            *(checkpoint_of(), checkpoint_of(preserve_rng_state=False), Right, Right.apply),
            *(with_hooks, WeighedSum),
        ],
        [
            *no_checkpoints,
            *(
                (IgnoresTheGradient, "as if the gradient that arrives were all ones"),
                (PassesOnes.apply, "as if the gradient that arrives were all ones"),
            ),
            *((WithoutAGraph, "`torch.enable_grad()`"), (OneReturned, "`None` for the block")),
            *(
                (Turned, "`None` for the block"),
                (ForwardOnly, "recomputed nothing"),
                (NothingReturned, "returns nothing"),
            ),
            *(
                (FromNothing, "the gradient that has arrived"),
                (NeedsNoGradient, "must require a gradient"),
            ),
            *(
                (runs_again_for_show, "but the input has only"),
                (lambda block, x: None, "Not answered"),
            ),
            *((Forgets, "weight got no gradient"), (KeepsItsGraph.apply, "counted twice")),
            *((KeepsTwoMore, "but the input has only"), (OnTheClass, "for two in a row")),
            *((LetsItRunOn, "input of its own"), (WeighedOutside, "has none")),
        ],
    ),
    "hooks": (
        [with_hooks, checkpoint_of(), functools.partial(with_hooks, own=False)],
        [
            *no_checkpoints,
            (functools.partial(with_hooks, graph=False), "has fewer tensors than were numbered"),
            (functools.partial(with_hooks, needs=False), "has fewer tensors than were numbered"),
            (number_back, "must return a tensor"),
            (functools.partial(with_hooks, once=False), "these must be 1 and 2"),
            (functools.partial(with_hooks, kept=True), "but the input has only"),
            (functools.partial(with_hooks, needs=True), "only if `x` does"),
            (functools.partial(with_hooks, end=True), "did not bring back the tensor"),
            (OnlyNumbered(), "for two in a row"),
            (Right.apply, "still needs its own"),
            (lambda block, x: None, "Not answered"),
        ],
    ),
    "peak_formula": (
        [lambda k: PEAK - k * (LAYER - INPUT - RNG)],
        [
            (
                lambda k: PEAK - k * LAYER,
                "k = 1: Not yet. You left out the inputs",
            ),
            (lambda k: PEAK - k * (LAYER - INPUT), "random number generator"),
            (lambda k: PEAK - k * (LAYER - RNG), "b · s · h"),
            (lambda k: PEAK - k * (LAYER - 262_144 - RNG), "takes 4 bytes"),
            (
                lambda k: PEAK - k * (LAYER - INPUT) + RNG * (k > 0),
                "k = 2: Not yet. You counted the generator's state only once",
            ),
            (lambda k: 118_208_408, "k = 0: Not yet. You counted a checkpoint around all eight"),
            (lambda k: PEAK + k * (LAYER - INPUT - RNG), "grows with k"),
            (
                lambda k: PEAK - k * (LAYER - INPUT - RNG) + LAYER * (k > 0),
                "no layer has been recomputed yet",
            ),
            (lambda k: None, "Not answered"),
            *(lambda k: PEAK * (8 - k) / 8, 3),
            (lambda k: (PEAK - k * (LAYER - INPUT - RNG)) / 1e6, "That is in MB"),
            (right_for_four_only, "k = 2: Not yet"),
            (lambda k: RIGHT_PEAKS.get(k, 0), "k = 2: Not yet"),
        ],
    ),
    "which_block": (
        [(7, True), [7, True], (7.0, True), (torch.tensor(7), torch.tensor(True))],
        [
            ((0, True), "recomputed last"),
            ((6, True), "not nothing"),
            ((3, False), "too small"),
            ((8, True), "numbered from 0"),
            (("last", True), "numbered from 0"),
            (("layers.7", True), "numbered from 0"),
            ((-1, True), "numbered from 0"),
            ((7, False), "in the decoder its checkpoint saves"),
            ((7, None), "second question"),
            ((7, "yes"), "two answers"),
            (7, "two answers"),
            ((None, None), "Not answered"),
        ],
    ),
    "in_chunks": (
        [llama_row, llama_row_by_labels, functools.partial(llama_row, chunk=256)],
        [
            (lambda model, tokens, labels: None, "Not answered"),
            (lambda model, tokens, labels: loss_of_llama(model, tokens, labels), "not recomputed"),
            (functools.partial(llama_row, layers=False), "not recomputed"),
            (every_second_layer, "layers are not recomputed"),
            (functools.partial(llama_row, chunk=1024), "too many logits"),
            (
                lambda model, tokens, labels: loss_of_llama(
                    model, tokens, labels, model.activation_checkpointing_enable()
                ),
                "too many logits",
            ),
            (functools.partial(llama_row, shift=0), "predicts the next token"),
            (functools.partial(llama_row, shift=-1), "wrong direction"),
            (flattened_first, "last position of a sequence"),
            (functools.partial(llama_row, loss=divided_by_all), "−100 do not count"),
            (functools.partial(llama_row, loss=summed), "Return the mean"),
            (functools.partial(llama_row, cut=True), "gradients are not those"),
            (functools.partial(llama_row, matrix="embed_tokens"), "but it must be"),
            (mean_of_sequences, "sequences' means"),
            (divided_before_the_shift, "before the shift"),
            (lambda *given: llama_row(*given).item(), "with a graph"),
            (lambda *given: backward_first(llama_row(*given)), "with a graph"),
        ],
    ),
    "loss_in_pieces": (
        [
            *(in_pieces, lambda *given: checkpointed_loss(*given[:3], chunk=given[3])),
            *(a_slice_for_each, ScaledGradientsInForward.apply),
        ],
        [
            (functools.partial(in_pieces, forgets=False), "logits or log-softmax"),
            (
                lambda hidden, weight, targets, chunk: F.cross_entropy(hidden @ weight.T, targets),
                "log-softmax",
            ),
            (
                lambda *given: checkpoint(whole_loss, *given[:3], use_reentrant=False),
                "all of them in memory",
            ),
            (lambda *given: in_pieces(*given[:3], 64), "Does your code use `chunk`"),
            (lambda *given: in_pieces(*given[:3], 120), "Does your code use `chunk`"),
            *(
                (in_so_many_pieces, "for the number of chunks"),
                (of_the_last_chunk, "Pass the chunk's targets"),
            ),
            (lambda *given: in_pieces(*given) * 240 / 64, "targets that count"),
            (lambda *given: in_pieces(*given) * 240 / 4, "targets that count"),
            *((backward_inside, "with a graph"), (mean_of_means, "mean of the chunks' means")),
            (lambda *given: 240 * in_pieces(*given), "the sum of the losses"),
            (lambda *given: mean_of_means(*given) * 4 / 240, "Add up their sums"),
            (lambda *given: in_pieces(*given).item(), "with a graph"),
            (functools.partial(in_pieces, last=-1), "left out the last chunk"),
            (lambda *given: in_pieces(*given) + 1, "Your loss is"),
            (functools.partial(in_pieces, counts=False), "−100 do not count"),
            (joined, "−100 do not count"),
            (means_times_lengths, "has no mean"),
            (
                functools.partial(means_times_lengths, counted=lambda t: (t != -100).sum()),
                "has no mean",
            ),
            (GradientsInForward.apply, "unscaled loss"),
            (lambda hidden, *given: in_pieces(hidden.detach(), *given), "gradient of `hidden`"),
            (lambda *given: None, "Not answered"),
        ],
    ),
    "dropout_checkpoint": (
        [checkpoint_of(), DrawsItsSeed, checkpoint_of(determinism_check="none")],
        [
            *no_checkpoints,
            (checkpoint_of(preserve_rng_state=False), "a different mask"),
            (Careless.apply, "as if the gradient that arrives were all ones"),
            (lambda block, x: None, "Not answered"),
            (lambda block, x: print(block(x).shape), "returns nothing"),
            (Rewinds.apply, "random numbers afterwards"),
            *((Seeded, "a different mask"), (StateAfterwards, "a different mask")),
            *((OneState, "a different mask"), (SeedOfItsOwn, "the same mask")),
            (BackToTheFirstRun, "random numbers afterwards"),
        ],
    ),
    "policy": (
        [[aten.bmm.default], frozenset({aten.bmm.default})],
        [
            *(
                (aten.bmm.default, "list"),
                ([], "recompute too much"),
                ([aten.addmm.default], "keep too much"),
            ),
            *((["bmm"], "as in the example"), ([aten.bmm], "as in the example")),
            ([aten.mm.default], "these layers never call"),
        ],
    ),
    "head_chunk": (
        [256],
        [
            (128, "256 fits as well"),
            (512, "too large"),
            (100, "power of two"),
            ("256", "power of two"),
        ],
    ),
}

_NO_GRAPH = "nothing is recorded in a Function's forward anyhow"
_NO_SECOND_GRAPH = "nobody takes a gradient of the gradient"
_WHOLE_NUMBERS = "the targets are whole numbers: they have no graph"
#: check -> mutants of its solution that are right as well, and why.
EQUIVALENT = {
    "checkpoint": {
        "context.save_for_backward(x) → context.save_for_backward(x.detach())": (
            "it is detached where it is used"
        ),
        "without `with torch.no_grad():`": _NO_GRAPH,
        "torch.no_grad → torch.enable_grad": (
            "a Function cuts the graph of what its forward returns"
        ),
        "return block(x) → return block(x).detach()": _NO_GRAPH,
        "block(x) → block(x.detach())": _NO_GRAPH,
        "torch.autograd.backward(output, gradient) → torch.autograd.backward(output, gradient.detach())": (
            _NO_SECOND_GRAPH
        ),
    },
    "hooks": {
        "tensor.detach() → tensor": "the second graph is let go of with the first one",
        "x.detach() → x": "the second run's graph is not gone through, so nothing arrives twice",
    },
    "loss_in_pieces": {
        "F.cross_entropy(hidden @ weight.T, targets, reduction='sum') → F.cross_entropy(hidden @ weight.T, targets.detach(), reduction='sum')": (
            _WHOLE_NUMBERS
        ),
        "checkpoint(loss_of_chunk, rows, weight, answers, use_reentrant=False) → checkpoint(loss_of_chunk, rows, weight, answers.detach(), use_reentrant=False)": (
            _WHOLE_NUMBERS
        ),
        "True → False in `for rows, answers in zip(hidden.split(chunk), targets.split(chunk), strict=True):`": (
            "both have as many chunks"
        ),
        "False → True in `total = total + checkpoint(loss_of_chunk, rows, weight, answers, use_reentrant=False)`": (
            "the other mode gives the same gradients where the inputs need some"
        ),
    },
    "in_chunks": {
        "128 → 127 in `return loss_in_pieces(hidden.flatten(0, 1), model.lm_head.weight, targets, 128)`": (
            "chunks may have any small size"
        ),
        "128 → 129 in `return loss_in_pieces(hidden.flatten(0, 1), model.lm_head.weight, targets, 128)`": (
            "chunks may have any small size"
        ),
        "loss_in_pieces(hidden.flatten(0, 1), model.lm_head.weight, targets, 128) → loss_in_pieces(hidden.flatten(0, 1), model.lm_head.weight, targets.detach(), 128)": (
            _WHOLE_NUMBERS
        ),
        "model.model(tokens) → model.model(tokens.detach())": _WHOLE_NUMBERS,
    },
    "dropout_checkpoint": {
        "0 → -1 in `again = context.saved_tensors[0].detach().requires_grad_()`": (
            "there is one tensor"
        ),
        "context.save_for_backward(x) → context.save_for_backward(x.detach())": (
            "it is detached where it is used"
        ),
        "without `with torch.no_grad():`": _NO_GRAPH,
        "torch.no_grad → torch.enable_grad": (
            "a Function cuts the graph of what its forward returns"
        ),
        "return block(x) → return block(x).detach()": _NO_GRAPH,
        "block(x) → block(x.detach())": _NO_GRAPH,
        "torch.autograd.backward(output, gradient) → torch.autograd.backward(output, gradient.detach())": (
            _NO_SECOND_GRAPH
        ),
    },
}
