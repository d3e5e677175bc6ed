"""Answers to the exercises of lesson 02: right ones, and wrong ones with what they are told."""

import itertools
from functools import partial

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from course_lib.checkpoint import checkpointed_loss
from course_lib.lessons.ledger import BASELINE
from course_lib.lessons.lesson_02.exercises import INPUT, LAYER, RNG

PEAK = BASELINE.peak_bytes


def checkpoint_of(**options):
    return lambda block, x: checkpoint(block, x, use_reentrant=False, **options)


# Checkpoints as Functions
# --------------------------------------------------------------------------------------------------


def run(context, block, x):
    """A right forward: it keeps the block and its input only."""
    context.block, context.x = block, x
    with torch.no_grad():
        return block(x)


def run_again(context):
    """The second run: its input, and its output with a graph."""
    again = context.x.detach().requires_grad_()
    with torch.enable_grad():
        return again, context.block(again)


def go_backward(context, gradient):
    """A right backward."""
    again, output = run_again(context)
    output.backward(gradient)
    return None, again.grad


def function(forward=run, backward=go_backward):
    """An `autograd.Function` with these halves."""
    halves = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Function", (torch.autograd.Function,), halves)


def asks_for_the_input(context, gradient):
    """Asks for the gradient of the input only: the weights get none."""
    again, output = run_again(context)
    return None, *torch.autograd.grad(output, again, gradient)


def on_the_input_itself(context, gradient):
    """Runs again on the input itself, so that its gradient arrives twice."""
    with torch.enable_grad():
        context.block(context.x).backward(gradient)
    return None, context.x.grad.clone()


def lets_it_run_on(context, gradient):
    """The gradient of the input comes by itself where it is a leaf."""
    with torch.enable_grad():
        context.block(context.x).backward(gradient)
    return None, None


def ignores_the_gradient(context, gradient):
    """Goes backward as from the sum of its output, whatever gradient has arrived."""
    again, output = run_again(context)
    output.backward(torch.ones_like(output))
    return None, again.grad


def weighed_sum(context, gradient):
    """Right too: the sum of the products with the gradient has that gradient."""
    again, output = run_again(context)
    with torch.enable_grad():
        (output * gradient).sum().backward()
    return None, again.grad


def weighed_without_a_graph(context, gradient):
    again, output = run_again(context)
    (output.detach() * gradient).sum().backward()
    return None, again.grad


def from_nothing(context, gradient):
    again, output = run_again(context)
    torch.autograd.backward(output)
    return None, again.grad


def without_a_graph(context, gradient):
    again = context.x.detach().requires_grad_()
    context.block(again).backward(gradient)
    return None, again.grad


def needs_no_gradient(context, gradient):
    again = context.x.detach()
    with torch.enable_grad():
        context.block(again).backward(gradient)
    return None, again.grad


def returns_nothing(context, block, x):
    run(context, block, x)


def keeps_two_more(context, block, x):
    """Keeps results of the block next to its input."""
    output = run(context, block, x)
    context.more = [output + 1, output + 2]
    return output


FOR_ALL = {}  # what the next call finds, too


def keeps_for_all(context, block, x):
    FOR_ALL.update(block=block, x=x)
    return run(context, block, x)


def takes_what_is_there(context, gradient):
    context.block, context.x = FOR_ALL["block"], FOR_ALL["x"]
    return go_backward(context, gradient)


# Their random numbers
# --------------------------------------------------------------------------------------------------


def keeps_the_seed(context, block, x):
    """Takes the generator for what its seed was: right where nothing was drawn before."""
    context.seed = torch.initial_seed()
    return run(context, block, x)


def sets_a_seed(context, block, x):
    """Sets a seed before both runs, so that each block draws the same mask."""
    torch.manual_seed(7)
    return keeps_the_seed(context, block, x)


def draws_its_seed(context, block, x):
    """Right in another way: each call draws a seed, and both of its runs begin with it."""
    context.seed = int(torch.randint(2**31, ()))
    with torch.random.fork_rng():
        torch.manual_seed(context.seed)
        return run(context, block, x)


def from_the_seed(context, gradient):
    with torch.random.fork_rng():
        torch.manual_seed(context.seed)
        return go_backward(context, gradient)


def keeps_the_state(context, block, x):
    context.state = torch.get_rng_state()
    return run(context, block, x)


def keeps_the_state_afterwards(context, block, x):
    """Looks at the generator when the first run is over."""
    output = run(context, block, x)
    context.state = torch.get_rng_state()
    return output


def keeps_the_state_for_all(context, block, x):
    FOR_ALL.update(state=torch.get_rng_state())
    return run(context, block, x)


def keeps_both_states(context, block, x):
    context.before = torch.get_rng_state()
    return keeps_the_state_afterwards(context, block, x)


def from_the_state(context, gradient, backward=go_backward):
    with torch.random.fork_rng():
        torch.set_rng_state(context.state)
        return backward(context, gradient)


def from_the_state_of_all(context, gradient):
    context.state = FOR_ALL["state"]
    return from_the_state(context, gradient)


def rewinds(context, gradient):
    """Draws the same mask again, and leaves the generator there."""
    torch.set_rng_state(context.state)
    return go_backward(context, gradient)


def back_to_the_first_run(context, gradient):
    """Puts back the state that the first run left, not the one that was there."""
    torch.set_rng_state(context.before)
    found = go_backward(context, gradient)
    torch.set_rng_state(context.state)
    return found


def careless(context, gradient):
    """Draws the same mask, and goes backward from the sum."""
    return from_the_state(context, gradient, ignores_the_gradient)


# Checkpoints as hooks
# --------------------------------------------------------------------------------------------------


def runs_again_for_show(block, x):
    """Keeps everything, and computes it again once, as a check would have it."""
    kept, runs = [], []

    def unpack(place):
        if not runs:
            runs.append(block(x.detach()))
        return kept[place]

    with saved_tensors_hooks(lambda t: kept.append(t.detach()) or len(kept) - 1, unpack):
        return block(x)


def with_hooks(
    block,
    x,
    *,
    graph=True,
    own=True,
    once=True,
    needs=None,
    kept=False,
    end=False,
    numbers=None,
    found=None,
):
    """The lesson's own, with or without one of its steps."""
    numbers = itertools.count() if numbers is None else numbers
    found = [] if found is None else found
    all_kept = []

    def forget(tensor):
        all_kept.extend([tensor.detach()] * kept)
        return next(numbers)

    def bring_back(number):
        if not found or not once:
            needed = x.requires_grad if needs is None else needs
            again = x.detach().requires_grad_(needed) if own else x
            collect = saved_tensors_hooks(lambda t: found.append(t.detach()), bring_back)
            with torch.set_grad_enabled(graph), collect:
                block(again)
        return found.pop() if end else found[number]

    with saved_tensors_hooks(forget, bring_back):
        return block(x)


def number_back(block, x):
    numbers = itertools.count()
    with saved_tensors_hooks(lambda tensor: next(numbers), lambda number: number):
        return block(x)


NO_CHECKPOINTS = [
    (lambda block, x: block(x), "ran only once"),
    (lambda block, x: (block(x), block(x))[1], "must be 1 and 2"),
    lambda block, x: x,
]


# The loss in chunks
# --------------------------------------------------------------------------------------------------


def whole_loss(hidden, weight, targets, reduction="mean"):
    return F.cross_entropy(hidden @ weight.T, targets, reduction=reduction)


def of_chunks(hidden, weight, targets, chunk, reduction="sum", forgets=True, last=None):
    """The losses of the chunks, one by one."""
    loss = partial(checkpoint, whole_loss, use_reentrant=False)
    pieces = list(zip(hidden.split(chunk), targets.split(chunk), strict=True))
    for rows, answers in pieces[:last]:
        yield (loss if forgets else whole_loss)(rows, weight, answers, reduction)


def in_pieces(hidden, weight, targets, chunk, counts=True, **slip):
    total = sum(of_chunks(hidden, weight, targets, chunk, **slip))
    return total / ((targets != -100).sum() if counts else len(targets))


def means_times_lengths(hidden, weight, targets, chunk):
    """Means of chunks, each with the weight of its targets."""
    means = of_chunks(hidden, weight, targets, chunk, "mean")
    lengths = map(len, targets.split(chunk))
    return sum(mean * n for mean, n in zip(means, lengths, strict=True)) / len(targets)


def mean_of_means(*given):
    return torch.stack(list(of_chunks(*given, "mean"))).mean()


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


def all_of_the_last_chunk(hidden, weight, targets, chunk):
    """Each function looks up its rows as well."""
    total = 0.0
    for rows, answers in zip(hidden.split(chunk), targets.split(chunk), strict=True):
        of_chunk = lambda: whole_loss(rows, weight, answers, "sum")  # noqa: B023, E731
        total = total + checkpoint(of_chunk, use_reentrant=False)
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


def gradients_in_forward(context, hidden, weight, targets, chunk):
    """Makes the gradients in forward, as Liger's does."""
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


def as_they_are(context, gradient):
    return *context.saved_tensors, None, None


def scaled(context, gradient):
    return *(gradient * each for each in context.saved_tensors), None, None


def backward_first(loss):
    loss.backward()
    return loss.detach()


def right_for_four_only(k):
    """Goes through the four points of an earlier check, and bends between them."""
    return PEAK - k * (LAYER - INPUT - RNG) + k * (k - 1) * (k - 4) * (k - 7)


# The loss of a Llama
# --------------------------------------------------------------------------------------------------


def llama_row(
    model, tokens, labels, *, every=1, shift=1, chunk=128, loss=in_pieces, cut=False, matrix=""
):
    """The lesson's own row, with or without one of its parts."""
    if every:
        model.activation_checkpointing_enable(every_n_layers=every)
    hidden = model.model(tokens).last_hidden_state
    if shift == 1:
        hidden, labels = hidden[:, :-1], labels[:, 1:]
    if shift == -1:
        hidden, labels = hidden[:, 1:], labels[:, :-1]
    weight = model.model.get_submodule(matrix).weight if matrix else model.lm_head.weight
    hidden = hidden.detach() if cut else hidden
    return loss(hidden.flatten(0, 1), weight, labels.flatten(), chunk)


def llama_row_by_labels(model, tokens, labels):
    """Right too: the labels move, as `transformers` does it, and the older name of the method."""
    model.gradient_checkpointing_enable()
    hidden = model.model(input_ids=tokens)[0].reshape(-1, 256)
    targets = F.pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1)
    return a_slice_for_each(hidden, model.lm_head.weight, targets, 100)


def flattened_first(model, tokens, labels):
    """Lets the last token of a sequence predict the first one of the next."""
    model.activation_checkpointing_enable()
    hidden = model.model(tokens).last_hidden_state.flatten(0, 1)
    return in_pieces(hidden[:-1], model.lm_head.weight, labels.flatten()[1:], 128)


def summed(hidden, weight, targets, chunk):
    return in_pieces(hidden, weight, targets, chunk) * (targets != -100).sum()


def mean_of_sequences(model, tokens, labels):
    losses = [llama_row(model, *row) for row in zip(tokens[:, None], labels[:, None], strict=True)]
    return sum(losses) / len(losses)


def divided_before_the_shift(model, tokens, labels):
    mean = llama_row(model, tokens, labels)
    return mean * (labels[:, 1:] != -100).sum() / (labels != -100).sum()


aten = torch.ops.aten

#: check -> right answers, and wrong ones, each alone or with a part of what it is told.
ANSWERS = {
    "checkpoint": (
        [
            checkpoint_of(),
            checkpoint_of(preserve_rng_state=False),
            function(),
            function().apply,
            with_hooks,
            function(backward=weighed_sum),
        ],
        [
            (lambda block, x: (block(x), x), "not a `tuple`"),
            *NO_CHECKPOINTS,
            (function(backward=ignores_the_gradient), "that arrives were all ones"),
            (function(backward=without_a_graph), "`torch.enable_grad()`"),
            (function(backward=lambda *given: go_backward(*given)[1]), "`None` for the block"),
            (function(backward=lambda *given: go_backward(*given)[::-1]), "`None` for the block"),
            (function(backward=lambda _, gradient: (None, gradient)), "recomputed nothing"),
            (function(returns_nothing), "returns nothing"),
            (function(backward=from_nothing), "the gradient that has arrived"),
            (function(backward=needs_no_gradient), "must require a gradient"),
            (runs_again_for_show, "but the input has only"),
            (lambda block, x: None, "Not answered"),
            (function(backward=asks_for_the_input), "weight got no gradient"),
            (function(backward=on_the_input_itself).apply, "counted twice"),
            (function(keeps_two_more), "but the input has only"),
            (function(keeps_for_all, takes_what_is_there), "for two in a row"),
            (function(backward=lets_it_run_on), "input of its own"),
            (function(backward=weighed_without_a_graph), "has none"),
        ],
    ),
    "hooks": (
        [with_hooks, checkpoint_of(), partial(with_hooks, own=False)],
        [
            *NO_CHECKPOINTS,
            (partial(with_hooks, graph=False), "has fewer tensors than were numbered"),
            (partial(with_hooks, needs=False), "has fewer tensors than were numbered"),
            (number_back, "must return a tensor"),
            (partial(with_hooks, once=False), "these must be 1 and 2"),
            (partial(with_hooks, kept=True), "but the input has only"),
            (partial(with_hooks, needs=True), "only if `x` does"),
            (partial(with_hooks, end=True), "did not bring back the tensor"),
            (partial(with_hooks, numbers=itertools.count(), found=[]), "for two in a row"),
            (function().apply, "still needs its own"),
            (lambda block, x: None, "Not answered"),
        ],
    ),
    "peak_formula": (
        [lambda k: PEAK - k * (LAYER - INPUT - RNG)],
        [
            (lambda k: PEAK, "the same for every k"),
            (lambda k: None if k else PEAK, "returns None for k = 1"),
            (lambda k: None, "Not answered"),
            lambda k: PEAK * (8 - k) / 8,
            3,
            (lambda k: (PEAK - k * (LAYER - INPUT - RNG)) / 1e6, "That is in MB"),
            (right_for_four_only, "k = 2: Not yet"),
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
            ((-1, True), "numbered from 0"),
            ((7, False), "in the decoder its checkpoint saves"),
            ((7, None), "second question"),
            ((7, "yes"), "two answers"),
            (7, "two answers"),
            ((None, None), "Not answered"),
        ],
    ),
    "in_chunks": (
        [llama_row, llama_row_by_labels, partial(llama_row, chunk=256)],
        [
            (lambda model, tokens, labels: None, "Not answered"),
            (partial(llama_row, every=0), "layers are not recomputed"),
            (partial(llama_row, every=2), "layers are not recomputed"),
            (lambda model, *given: llama_row(model.eval(), *given), "only in training mode"),
            (partial(llama_row, chunk=1024), "too many logits"),
            (partial(llama_row, shift=0), "predicts the next token"),
            (partial(llama_row, shift=-1), "wrong direction"),
            (flattened_first, "last position of a sequence"),
            (partial(llama_row, loss=partial(in_pieces, counts=False)), "−100 do not count"),
            (partial(llama_row, loss=summed), "Return the mean"),
            (partial(llama_row, cut=True), "gradients are not those"),
            (partial(llama_row, matrix="embed_tokens"), "but it must be"),
            (mean_of_sequences, "sequences' means"),
            (divided_before_the_shift, "before the shift"),
            (lambda *given: llama_row(*given).item(), "with a graph"),
            (lambda *given: backward_first(llama_row(*given)), "with a graph"),
        ],
    ),
    "loss_in_pieces": (
        [
            in_pieces,
            lambda *given: checkpointed_loss(*given[:3], chunk=given[3]),
            a_slice_for_each,
            function(gradients_in_forward, scaled).apply,
        ],
        [
            (partial(in_pieces, forgets=False), "logits or log-softmax"),
            (lambda *given: whole_loss(*given[:3]), "log-softmax"),
            (
                lambda *given: checkpoint(whole_loss, *given[:3], use_reentrant=False),
                "all of them in memory",
            ),
            (lambda *given: in_pieces(*given[:3], 64), "Does your code use `chunk`"),
            (in_so_many_pieces, "for the number of chunks"),
            (of_the_last_chunk, "Pass the chunk's rows and targets"),
            (all_of_the_last_chunk, "Pass the chunk's rows and targets"),
            (lambda *given: in_pieces(*given) * 240 / 64, "targets that count"),
            (lambda *given: in_pieces(*given) * 240 / 4, "targets that count"),
            (lambda *given: backward_first(in_pieces(*given)), "with a graph"),
            (mean_of_means, "mean of the chunks' means"),
            (lambda *given: 240 * in_pieces(*given), "the sum of the losses"),
            (lambda *given: mean_of_means(*given) * 4 / 240, "Add up their sums"),
            (lambda *given: in_pieces(*given).item(), "with a graph"),
            (partial(in_pieces, last=-1), "left out the last chunk"),
            (lambda *given: in_pieces(*given) + 1, "Your loss is"),
            (partial(in_pieces, counts=False), "−100 do not count"),
            (means_times_lengths, "has no mean"),
            (function(gradients_in_forward, as_they_are).apply, "unscaled loss"),
            (lambda hidden, *given: in_pieces(hidden.detach(), *given), "gradient of `hidden`"),
            (lambda *given: None, "Not answered"),
        ],
    ),
    "dropout_checkpoint": (
        [
            checkpoint_of(),
            function(draws_its_seed, from_the_seed),
            checkpoint_of(determinism_check="none"),
        ],
        [
            *NO_CHECKPOINTS,
            (checkpoint_of(preserve_rng_state=False), "a different mask"),
            (function(keeps_the_state, careless).apply, "that arrives were all ones"),
            (lambda block, x: None, "Not answered"),
            (function(returns_nothing), "returns nothing"),
            (function(keeps_the_state, rewinds), "random numbers afterwards"),
            (function(keeps_the_seed, from_the_seed), "a different mask"),
            (function(keeps_the_state_afterwards, from_the_state), "a different mask"),
            (function(keeps_the_state_for_all, from_the_state_of_all), "a different mask"),
            (function(sets_a_seed, from_the_seed), "the same mask"),
            (function(keeps_both_states, back_to_the_first_run), "random numbers afterwards"),
        ],
    ),
    "policy": (
        [[aten.bmm.default], frozenset({aten.bmm.default})],
        [
            (aten.bmm.default, "list"),
            ([], "recompute too much"),
            ([aten.addmm.default], "keep too much"),
            (["bmm"], "as in the example"),
            ([aten.bmm], "as in the example"),
            ([aten.mm.default], "calls `addmm`, not `mm`. Section 1.4"),
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

_WHOLE_NUMBERS = "the targets are whole numbers: they have no graph"
_NO_GRAPH = "nothing is recorded in a Function's forward anyhow"
_OF_A_FUNCTION = {
    "context.save_for_backward(x) → context.save_for_backward(x.detach())": (
        "it is detached where it is used"
    ),
    "without `with torch.no_grad():`": _NO_GRAPH,
    "torch.no_grad → torch.enable_grad": "a Function cuts the graph of what its forward returns",
    "return block(x) → return block(x).detach()": _NO_GRAPH,
    "block(x) → block(x.detach())": _NO_GRAPH,
    "torch.autograd.backward(output, gradient) → torch.autograd.backward(output, gradient.detach())": (
        "no gradient of the gradient is taken"
    ),
}
#: check -> mutants of its solution that are right as well, and why.
EQUIVALENT = {
    "checkpoint": _OF_A_FUNCTION,
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
        "0 → -1 in `again = context.saved_tensors[0].detach().requires_grad_()`": "there is one",
        **_OF_A_FUNCTION,
    },
}
