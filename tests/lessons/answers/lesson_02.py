"""Right and wrong answers to the exercises of lesson 02, with the expected messages."""

import collections
import itertools
from functools import partial
from types import SimpleNamespace

import torch
from torch import get_rng_state, set_rng_state
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from course_lib.lessons.lesson_02.exercises import check_peak_formula

peak = check_peak_formula.right_answer()


def checkpoint_of(**options):
    return lambda block, x: checkpoint(block, x, use_reentrant=False, **options)


# Checkpoints as Functions
# --------------------------------------------------------------------------------------------------

SHARED = SimpleNamespace()  # the next call replaces its attributes


def itself(context):
    return context


def run(context, block, x, state_of=itself):
    """A right forward pass, which keeps only the block and its input, in `state_of(context)`."""
    context = state_of(context)
    context.block, context.x = block, x
    with torch.no_grad():
        return block(x)


def second_run(
    differentiate=torch.autograd.backward,
    state_of=itself,
    graph=True,
    needs=True,
    own=True,
    gradient_of=lambda x: x.grad,
):
    """A right backward pass, or one with a mistake.

    `differentiate` gets the output of the second run and the gradient that has arrived. The run may
    have no graph, or an input that `needs` no gradient or is not its `own`."""

    def backward(context, gradient):
        context = state_of(context)
        x = context.x.detach().requires_grad_(needs) if own else context.x
        with torch.set_grad_enabled(graph):
            differentiate(context.block(x), gradient)
        return None, gradient_of(x)

    return backward


right_backward = second_run()


def function(backward=right_backward, forward=run):
    """An `autograd.Function` with these halves."""
    halves = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Function", (torch.autograd.Function,), halves)


def differentiates_input_only(context, gradient):
    """Computes the gradient of the input only, so that the weights get none."""
    x = context.x.detach().requires_grad_()
    with torch.enable_grad():
        return None, *torch.autograd.grad(context.block(x), x, gradient)


def ignores_the_gradient(output, gradient):
    """Differentiates the sum of the output, whatever gradient has arrived."""
    output.sum().backward()


def returns_nothing(context, block, x):
    run(context, block, x)


# Their random numbers
# --------------------------------------------------------------------------------------------------


def dropout(read=get_rng_state, restore=set_rng_state, backward_pass=right_backward, fork=True):
    """A Function that draws the same mask twice, or one with a mistake.

    It reads a state or a seed of the generator before the first run, and restores it before
    `backward_pass` runs again. With `fork`, the generator then has its previous state."""

    def forward(context, block, x):
        context.state = read()
        return run(context, block, x)

    def backward(context, gradient):
        with torch.random.fork_rng(enabled=fork):
            restore(context.state)
            return backward_pass(context, gradient)

    return function(backward, forward)


# Checkpoints as hooks
# --------------------------------------------------------------------------------------------------


def with_hooks(block, x, graph=True, own=True, needs=None, kept=False, end=False, shared=None):
    """The solution of the lesson, with or without one of its steps."""
    numbers, found = shared or (itertools.count(), [])
    all_kept = []

    def forget(tensor):
        all_kept.extend([tensor.detach()] * kept)
        return next(numbers)

    def bring_back(number):
        if not found:
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


def in_pieces(hidden, weight, targets, chunk, counts=True, **options):
    total = sum(of_chunks(hidden, weight, targets, chunk, **options))
    return total / ((targets != -100).sum() if counts else len(targets))


def means_times_lengths(hidden, weight, targets, chunk):
    """Means of chunks, each with the weight of its targets."""
    means = of_chunks(hidden, weight, targets, chunk, "mean")
    lengths = map(len, targets.split(chunk))
    return sum(mean * n for mean, n in zip(means, lengths, strict=True)) / len(targets)


def mean_of_means(*given):
    return torch.stack(list(of_chunks(*given, "mean"))).mean()


def of_the_last_chunk(hidden, weight, targets, chunk):
    """Each function looks up its targets when it is called: in backward, after the loop has ended."""
    total = 0.0
    for rows, answers in zip(hidden.split(chunk), targets.split(chunk), strict=True):
        loss = lambda rows: whole_loss(rows, weight, answers, "sum")  # noqa: B023, E731
        total = total + checkpoint(loss, rows, use_reentrant=False)
    return total / len(targets)


def gradients_in_forward(context, hidden, weight, targets, chunk):
    """Makes the gradients in forward, as Liger's does."""
    inputs = [tensor.detach().requires_grad_() for tensor in (hidden, weight)]
    with torch.enable_grad():
        loss = in_pieces(*inputs, targets, chunk)
        context.save_for_backward(*torch.autograd.grad(loss, inputs))
    return loss.detach()


def unscaled(context, gradient):
    return *context.saved_tensors, None, None


def scaled(context, gradient):
    return *(gradient * each for each in context.saved_tensors), None, None


# The loss of a Llama
# --------------------------------------------------------------------------------------------------


def llama_row(
    model, tokens, labels, every=1, flat=False, shift=1, chunk=128, loss=in_pieces, head="lm_head"
):
    """The solution of the lesson, with or without one of its parts."""
    if every:
        model.activation_checkpointing_enable(every_n_layers=every)
    hidden = model.model(tokens).last_hidden_state
    if flat:  # the last token of a sequence predicts the first one of the next
        hidden, labels = hidden.flatten(0, 1)[None], labels.flatten()[None]
    if shift == 1:
        hidden, labels = hidden[:, :-1], labels[:, 1:]
    if shift == -1:
        hidden, labels = hidden[:, 1:], labels[:, :-1]
    weight = model.get_submodule(head).weight
    return loss(hidden.flatten(0, 1), weight, labels.flatten(), chunk)


def mean_of_sequences(model, tokens, labels):
    losses = [llama_row(model, *row) for row in zip(tokens[:, None], labels[:, None], strict=True)]
    return sum(losses) / len(losses)


def divided_before_the_shift(model, tokens, labels):
    mean = llama_row(model, tokens, labels)
    return mean * (labels[:, 1:] != -100).sum() / (labels != -100).sum()


# A policy
# --------------------------------------------------------------------------------------------------

aten = torch.ops.aten
LINEAR = aten.addmm.default, aten.mm.default


def every_second(
    operators=LINEAR,
    first=1,
    shared=None,
    rest=CheckpointPolicy.PREFER_RECOMPUTE,
    key=lambda *_: None,
):
    """A right `context_fn`, or one with a mistake. It counts `operators` separately by
    `key(context, operator)`, in the `shared` counter if there is one."""

    def make_contexts():
        counted = collections.Counter() if shared is None else shared

        def policy(context, operator, *args, **kwargs):
            if operator in operators:
                counted[key(context, operator)] += 1
                if counted[key(context, operator)] % 2 == first:
                    return CheckpointPolicy.MUST_SAVE
            return rest

        return create_selective_checkpoint_contexts(policy)

    return make_contexts


def keeps_always(*operators):
    return lambda: create_selective_checkpoint_contexts([*operators])


#: check -> right answers
RIGHT = {
    "checkpoint": [checkpoint_of(), function(), with_hooks],
    "hooks": [with_hooks, checkpoint_of()],
    "which_block": [(7, True), (torch.tensor(7), torch.tensor(True))],
    "in_chunks": [llama_row],
    "loss_in_pieces": [in_pieces, function(scaled, gradients_in_forward).apply],
    "dropout_checkpoint": [checkpoint_of(), dropout().apply],
    "policy": [
        every_second(key=lambda context, _: context.is_recompute),
        every_second(),  # PyTorch 2.13 asks the policy in forward alone
    ],
    "head_chunk": [256],
}

#: check -> wrong answers, each alone or with a part of the expected message
WRONG = {
    "checkpoint": [
        *NO_CHECKPOINTS,
        (function(second_run(ignores_the_gradient)), "that arrives were all ones"),
        (function(second_run(graph=False)), "`torch.enable_grad()`"),
        (function(lambda *given: right_backward(*given)[1]), "`None` for the block"),
        (function(lambda _, gradient: (None, gradient)), "recomputed nothing"),
        (lambda block, x: (block(x), x), "not a `tuple`"),
        (function(forward=returns_nothing), "returns nothing"),
        (
            function(second_run(lambda output, _: torch.autograd.backward(output))),
            "that has arrived",
        ),
        (function(second_run(needs=False)), "must require a gradient"),
        (partial(with_hooks, kept=True), "but the input has only"),
        (lambda block, x: None, "Not answered"),
        (function(differentiates_input_only), "weight got no gradient"),
        (
            function(second_run(own=False, gradient_of=lambda x: x.grad.clone())).apply,
            "counted twice",
        ),
        (
            function(
                second_run(state_of=lambda _: SHARED), partial(run, state_of=lambda _: SHARED)
            ),
            "two in a row",
        ),
        (function(second_run(own=False, gradient_of=lambda x: None)), "input of its own"),
        (
            function(second_run(lambda y, gradient: (y.detach() * gradient).sum().backward())),
            "has none",
        ),
    ],
    "hooks": [
        *NO_CHECKPOINTS,
        (partial(with_hooks, graph=False), "has fewer tensors than were numbered"),
        (number_back, "must return a tensor"),
        (partial(with_hooks, kept=True), "but the input has only"),
        (partial(with_hooks, needs=True), "only if `x` does"),
        (partial(with_hooks, end=True), "did not bring back the tensor"),
        (partial(with_hooks, shared=(itertools.count(), [])), "for two in a row"),
        (function().apply, "still needs its own"),
        (lambda block, x: None, "Not answered"),
    ],
    "peak_formula": [
        lambda k: peak(0) * (8 - k) / 8,
        # bends between four points
        (lambda k: peak(k) + k * (k - 1) * (k - 4) * (k - 7), "k = 2: Not yet"),
    ],
    "which_block": [
        ((0, True), "recomputed last"),
        ((6, True), "not nothing"),
        ((3, False), "too small"),
        ((8, True), "numbered from 0"),
        ((7, False), "in the decoder its checkpoint saves"),
        ((7, None), "second question"),
        ((7, "yes"), "two answers"),
        (7, "two answers"),
        ((None, None), "Not answered"),
    ],
    "in_chunks": [
        (lambda model, tokens, labels: None, "Not answered"),
        (partial(llama_row, every=0), "layers are not recomputed"),
        (lambda model, *given: llama_row(model.eval(), *given), "only in training mode"),
        (partial(llama_row, chunk=1024), "too many logits"),
        (partial(llama_row, shift=0), "predicts the next token"),
        (partial(llama_row, shift=-1), "wrong direction"),
        (partial(llama_row, flat=True), "last position of a sequence"),
        (partial(llama_row, loss=partial(in_pieces, counts=False)), "−100 do not count"),
        (lambda *given: llama_row(*given) * (given[2][:, 1:] != -100).sum(), "Return the mean"),
        (partial(llama_row, loss=lambda h, *given: in_pieces(h.detach(), *given)), "gradients are"),
        (partial(llama_row, head="model.embed_tokens"), "but it must be"),
        (mean_of_sequences, "sequences' means"),
        (divided_before_the_shift, "before the shift"),
        (lambda *given: llama_row(*given).item(), "with a graph"),
    ],
    "loss_in_pieces": [
        (partial(in_pieces, forgets=False), "logits or log-softmax"),
        (lambda *given: checkpoint(whole_loss, *given[:3], use_reentrant=False), "all of them"),
        (lambda *given: in_pieces(*given[:3], 64), "Does your code use `chunk`"),
        (lambda *given: in_pieces(*given[:3], -(-len(given[2]) // given[3])), "number of chunks"),
        (of_the_last_chunk, "Pass the chunk's rows and targets"),
        (lambda *given: in_pieces(*given) * 240 / 64, "targets that count"),
        (mean_of_means, "mean of the chunks' means"),
        (lambda *given: 240 * in_pieces(*given), "the sum of the losses"),
        (lambda *given: mean_of_means(*given) * 4 / 240, "Add up their sums"),
        (lambda *given: in_pieces(*given).item(), "with a graph"),
        (partial(in_pieces, last=-1), "left out the last chunk"),
        (lambda *given: in_pieces(*given) + 1, "Your loss is"),
        (partial(in_pieces, counts=False), "−100 do not count"),
        (means_times_lengths, "has no mean"),
        (function(unscaled, gradients_in_forward).apply, "unscaled loss"),
        (lambda hidden, *given: in_pieces(hidden.detach(), *given), "gradient of `hidden`"),
        (lambda *given: None, "Not answered"),
    ],
    "dropout_checkpoint": [
        *NO_CHECKPOINTS,
        (checkpoint_of(preserve_rng_state=False), "a different mask"),
        (
            dropout(backward_pass=second_run(ignores_the_gradient)).apply,
            "that arrives were all ones",
        ),
        (lambda block, x: None, "Not answered"),
        (function(forward=returns_nothing), "returns nothing"),
        (dropout(fork=False), "random numbers afterwards"),
        (dropout(lambda: torch.manual_seed(7).initial_seed(), torch.manual_seed), "the same mask"),
    ],
    "policy": [
        (lambda: None, "Not answered"),
        (lambda: create_selective_checkpoint_contexts, "Return the pair"),
        (every_second(operators=()), "no result at all"),
        (every_second(rest=CheckpointPolicy.MUST_SAVE), "not matrix products of linear layers"),
        (keeps_always(*LINEAR), "Keep every second one"),
        (keeps_always(*LINEAR, aten.bmm.default), "even those of attention"),
        (every_second(first=0), "Keep the first and the third"),
        (every_second(shared=collections.Counter()), "counts on from the first one"),
        (every_second(operators=LINEAR[1:]), "You count `mm` alone"),
        (every_second(operators=LINEAR[:1]), "You count `addmm` alone"),
        (every_second(operators=(*LINEAR, aten.bmm.default)), "They are `bmm`"),
        (every_second(operators=(*LINEAR, aten.bmm.default), first=0), "you keep number 2, 4, 6"),
        (every_second(key=lambda _, operator: operator), "Count them together"),
        (lambda context, operator: True, "missing 2 required"),
    ],
    "head_chunk": [
        (128, "256 fits as well"),
        (512, "too large"),
        ("256", "power of two"),
    ],
}

_WHOLE_NUMBERS = "tokens and targets are whole numbers: they have no graph"
_OF_A_FUNCTION = {
    "it is detached where it is used": [
        "context.save_for_backward(x) → context.save_for_backward(x.detach())"
    ],
    "nothing is recorded in a Function's forward, whose result has no graph of its own": [
        "without `with torch.no_grad():`",
        "torch.no_grad → torch.enable_grad",
        "return block(x) → return block(x).detach()",
        "block(x) → block(x.detach())",
    ],
    "no gradient of the gradient is taken": [
        "torch.autograd.backward(output, gradient) → torch.autograd.backward(output, gradient.detach())"
    ],
}
_HEAD = "loss_in_pieces(hidden.flatten(0, 1), model.lm_head.weight, targets"
#: check -> why mutants of its solution are right as well -> the mutants
EQUIVALENT = {
    "checkpoint": _OF_A_FUNCTION,
    "hooks": {
        "the second graph is released with the first one": ["tensor.detach() → tensor"],
        "the second run's graph is not differentiated, so no gradient is added twice": [
            "x.detach() → x"
        ],
    },
    "policy": {
        "PyTorch 2.13 asks the policy in forward alone, so this count is never read": [
            "0 → -1 in `counted = {False: 0, True: 0}` (2)",
            "0 → 1 in `counted = {False: 0, True: 0}` (2)",
            "True → False in `counted = {False: 0, True: 0}`",
        ],
        "counting downwards changes no parity": [
            "counted[context.is_recompute] += 1 → counted[context.is_recompute] -= 1"
        ],
        "PyTorch recomputes where the policy returns None": [
            "without `return CheckpointPolicy.PREFER_RECOMPUTE`"
        ],
    },
    "loss_in_pieces": {
        _WHOLE_NUMBERS: [
            "F.cross_entropy(hidden @ weight.T, targets, reduction='sum') → F.cross_entropy(hidden @ weight.T, targets.detach(), reduction='sum')",
            "checkpoint(loss_of_chunk, rows, weight, answers, use_reentrant=False) → checkpoint(loss_of_chunk, rows, weight, answers.detach(), use_reentrant=False)",
        ],
        "both have as many chunks": [
            "True → False in `for rows, answers in zip(hidden.split(chunk), targets.split(chunk), strict=True):`"
        ],
        "the other mode gives the same gradients where the inputs need some": [
            "False → True in `total = total + checkpoint(loss_of_chunk, rows, weight, answers, use_reentrant=False)`"
        ],
    },
    "in_chunks": {
        "chunks may have any small size": [
            f"128 → {size} in `return {_HEAD}, 128)`" for size in (127, 129)
        ],
        _WHOLE_NUMBERS: [
            f"{_HEAD}, 128) → {_HEAD}.detach(), 128)",
            "model.model(tokens) → model.model(tokens.detach())",
        ],
    },
    "dropout_checkpoint": _OF_A_FUNCTION
    | {"there is one": ["0 → -1 in `again = context.saved_tensors[0].detach().requires_grad_()`"]},
}
