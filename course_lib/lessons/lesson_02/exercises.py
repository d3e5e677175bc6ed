"""The exercises of lesson 02."""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointError,
    checkpoint,
    noop_context_fn,
)

from course_lib.checkpoint import checkpointed_loss
from course_lib.labels import verbatim
from course_lib.lessons.ledger import BASELINE, LAYER_BYTES
from course_lib.memory import MemoryMeter, symbolic
from course_lib.models import random_tokens
from course_lib.teaching import Verdict, expect_number
from course_lib.teaching.exercises import (
    Messages,
    exercise,
    largest,
    not_answered,
    numbers,
    seed_of,
    throughout,
)
from course_lib.teaching.exercises.probes import (
    is_close,
    reject_mistakes,
    run_forward,
    uneven_gradient,
)

from .own_code import VOCABULARY, Cost, cost_of, equal_gradients, llama

say = Messages(__file__)

# Checkpoints as programs

#: Part of a PyTorch error message -> key of the message on the mistake that causes the error.
_ERRORS = {
    "does not require grad": "common.no_graph",
    "backward through the graph a second time": "common.through_the_graph",
    "incorrect number of gradients": "common.wrong_count",
    "returned a gradient different than None": "common.wrong_count",
    "only for scalar outputs": "common.output_alone",
    "unpack_hook expected to be a Tensor": "hooks.no_tensor",
}


@exercise(errors=_ERRORS)
def check_checkpoint(function: Any) -> Verdict:
    """Check the learner's implementation of activation checkpointing.

    The checkpoint must not change the gradients. It must run the block twice, in forward and in
    backward, and may keep only the block's input in between.

    Args:
        function: Function that is called as `function(block, x)`, or an `autograd.Function` whose
            `apply` is called in this way.
    """
    function = getattr(function, "apply", function)
    _reject_wrong_recomputation(function)
    _reject_failure_in_network(function)
    return say.right("checkpoint.right")


@exercise(
    errors=_ERRORS
    | dict.fromkeys(("shapes cannot be multiplied", "must match the size"), "hooks.another_tensor")
)
def check_hooks(function: Any) -> Verdict:
    """Check the learner's activation checkpointing, which is implemented with saved-tensor hooks.

    The checkpoint must also work if the block's weight requires a gradient and the input does not.

    Args:
        function: Function that is called as `function(block, x)`, and returns the block's output.
    """
    try:
        _reject_wrong_recomputation(function)
        _reject_failure_in_network(function)
    except IndexError:
        say.reject("hooks.found_too_few")
    weight = torch.linspace(-1, 1, 64).view(8, 8).requires_grad_()
    data = torch.linspace(0, 1, 64).view(8, 8)
    output = function(lambda x: (x @ weight).exp(), data)
    try:
        if output.requires_grad:
            output.backward(uneven_gradient(data))
    except RuntimeError:  # the second run saved different tensors, so shapes do not match
        weight.grad = torch.full_like(weight, torch.nan)
    (expected,) = torch.autograd.grad((data @ weight).exp(), weight, uneven_gradient(data))
    say.reject_if(weight.grad is None, "hooks.no_weight_gradient")
    say.reject_if(not is_close(weight.grad, expected), "hooks.requires_too_much")
    return say.right("hooks.right")


def _reject_wrong_recomputation(function: Callable) -> None:
    """Reject a checkpoint with wrong gradients, a wrong number of runs, or too many kept bytes."""
    weight = torch.linspace(-1, 1, 64).view(8, 8).requires_grad_()
    # A checkpoint may also keep the random number generator's state, which is far smaller than x.
    x = torch.linspace(0, 1, 2**15).view(-1, 8).requires_grad_()
    runs = []

    def block(x: Tensor) -> Tensor:
        runs.append(torch.is_grad_enabled())
        y = x @ weight
        for _ in range(8):
            y = y.sin().tanh().exp().sub(1)
        return y

    wanted = torch.autograd.grad(block(x), (x, weight), uneven_gradient(x))
    all_ones = torch.autograd.grad(block(x).sum(), (x, weight))
    runs.clear()
    output, kept = _forward(function, block, x, runs)
    before = len(runs)
    if before == 0 and torch.equal(output, x):  # the cell is unchanged
        raise NotImplementedError
    try:
        output.backward(uneven_gradient(x))
    except RuntimeError as error:
        again = "does not require grad" in f"{error}" and len(runs) == 2 and runs[1]
        say.reject_if(again, "common.cut_graph")
        raise
    nothing_kept = (before, len(runs)) == (1, 1) and kept <= 1.5 * x.nbytes
    say.reject_if(nothing_kept, "common.recomputed_nothing")
    _reject_wrong_run_counts(before, len(runs))
    say.reject_if(weight.grad is None, "common.no_weight_gradient")
    say.reject_if(x.grad is None, "common.no_input_gradient")
    say.reject_if(is_close(x.grad, 2 * wanted[0]), "common.input_twice")
    reject_mistakes(say, [x.grad, weight.grad], {"common.ones": [*all_ones]})
    if not is_close([x.grad, weight.grad], wanted):
        say.wrong("common.gradients")
    if kept > 1.5 * x.nbytes:  # one copy of the input is allowed
        say.wrong("common.kept", kept=kept, input=x.nbytes)


def _forward(function: Callable, block: Callable, x: Tensor, runs: list) -> tuple[Tensor, int]:
    """Run the forward of a checkpoint; return its output, and the bytes kept besides the output."""
    try:
        output, kept = run_forward(function, block, x)
    except NotImplementedError:
        say.reject_if(runs, "common.returns_nothing")
        raise
    kind = verbatim(type(output).__name__)
    say.reject_if(not isinstance(output, Tensor), "common.no_tensor", kind=kind)
    return output, kept


def _reject_failure_in_network(function: Callable) -> None:
    """Reject a checkpoint that works for a single block but not in a network.

    In the test, a second block follows the first block, and other operators also use the first
    block's input and output.
    """
    generator = torch.Generator().manual_seed(seed_of(0))
    tensors = [torch.randn(8, 8, generator=generator).requires_grad_() for _ in range(4)]
    start, *weights = tensors[:3]

    def network(run: Callable) -> Tensor:
        inside = start.exp()
        first = run(lambda x: (x @ weights[0]).sin(), inside)
        return inside + first * run(lambda x: (x @ weights[1]).tanh(), first)

    gradient = uneven_gradient(start)
    wanted = torch.autograd.grad(network(lambda block, x: block(x)), tensors[:3], gradient)
    try:
        network(function).backward(gradient)
    except (RuntimeError, IndexError) as error:
        if any(part in f"{error}" for part in _ERRORS):
            raise
        say.reject("common.two_in_a_row")
    found = [tensor.grad for tensor in tensors[:3]]
    say.reject_if(not is_close(found, wanted), "common.two_in_a_row")


def _reject_wrong_run_counts(before: float, after: float) -> None:
    """Reject a checkpoint unless the block runs once in forward and once in backward.

    Args:
        before: Number of runs before backward.
        after: Number of runs in forward and backward together.
    """
    say.reject_if((before, after) == (1, 1), "common.ran_once")
    if (before, after) != (1, 2):
        say.wrong("common.runs", before=f"{before:g}", after=f"{after:g}")


@exercise()
def check_dropout_checkpoint(function: Any) -> Verdict:
    """Check the learner's activation checkpointing for blocks with dropout.

    The recomputation must draw the same mask as the forward pass, and must not change random
    numbers that are drawn later.

    Args:
        function: Function that is called as `function(block, x)`, or an `autograd.Function` whose
            `apply` is called in this way.
    """
    function, runs = getattr(function, "apply", function), []

    def block(x: Tensor) -> Tensor:
        runs.append(1)
        return functional.dropout(x * 1.0, 0.5)

    def draw_numbers(goes_backward: bool) -> tuple[list[tuple[Tensor, Tensor]], list[int], Tensor]:
        """Run the block twice, and return the tuple (pairs, run counts, final random numbers).

        `pairs` is a list with one pair (input, output) per run. The run counts are the numbers of
        runs after forward and after backward. The final random numbers show whether the generator
        is in the right state.
        """
        torch.manual_seed(seed_of(0))
        torch.rand(5)  # drawn by earlier layers
        runs.clear()
        inputs = [torch.ones(1000, requires_grad=True) for _ in range(2)]
        outputs = [_forward(function, block, x, runs)[0] for x in inputs]
        counts = [len(runs)]
        torch.rand(3)  # drawn by later layers before backward
        if goes_backward:
            for output in reversed(outputs):
                output.backward(uneven_gradient(output) + 3)  # no element is zero
        counts.append(len(runs))
        return list(zip(inputs, outputs, strict=True)), counts, torch.rand(3)

    with torch.random.fork_rng():
        *_, undisturbed = draw_numbers(goes_backward=False)
        blocks, counts, found = draw_numbers(goes_backward=True)
    _reject_wrong_run_counts(*(count / 2 for count in counts))
    for x, output in blocks:
        if not torch.equal(output == 0, x.grad == 0):
            say.wrong("dropout_checkpoint.another_mask", hint="dropout_checkpoint.state")
        upstream = torch.where(output == 0, 0.0, 2 * (uneven_gradient(x) + 3))
        say.reject_if(not is_close(x.grad, upstream), "common.ones")
    say.reject_if(torch.equal(blocks[0][1], blocks[1][1]), "dropout_checkpoint.same_mask")
    say.reject_if(not torch.equal(found, undisturbed), "dropout_checkpoint.changed")
    return say.right("dropout_checkpoint.right")


# Bytes

# The course's decoder, in bytes: what a layer saves, its input, and the state of the random number
# generator.
LAYER, INPUT, RNG = LAYER_BYTES, 1_048_576, 5_056
KEPT = INPUT + RNG  # bytes that a checkpoint keeps


def _peak(checkpoints: int, kept: int = KEPT) -> int:
    """Return the step's peak in bytes if each checkpoint keeps only `kept` bytes of its layer."""
    return BASELINE.peak_bytes - checkpoints * (LAYER - kept)


@numbers(
    {
        "same": throughout(lambda k: _peak(0)),
        "no_inputs": lambda k: _peak(k, 0),
        "no_generator": lambda k: _peak(k, INPUT),
        "generator_alone": lambda k: _peak(k, RNG),
        "elements": lambda k: _peak(k, INPUT // 4 + RNG),
        "one_generator": lambda k: _peak(k, INPUT) + RNG,
        "all_eight": lambda k: _peak(8),
        "grows": lambda k: _peak(-k),
        "recomputed": lambda k: (_peak(k) + LAYER, _peak(k - 1)),
    },
    cases=range(8),
    in_bytes=True,
)
def check_peak_formula(k: int) -> int:
    """Check the learner's formula for a training step's peak if k layers have checkpoints.

    The decorated function computes the right answer in bytes, and the decorator `numbers` turns it
    into a check.

    Args:
        k: Number of layers with a checkpoint, from 0 to 7. They are the first k of the decoder's
            eight layers.
    """
    return _peak(k)


@exercise()
def check_which_block(answer: Any) -> Verdict:
    """Check two answers about a checkpoint around one of eight layers.

    Args:
        answer: Pair of answers. The first answer is the number of a layer: the one whose checkpoint
            saves no memory if the network has no output head. The second answer is whether a
            checkpoint around the same layer saves memory in the decoder, which has an output head.
    """
    two = isinstance(answer, tuple | list) and len(answer) == 2
    say.reject_if(not two, "which_block.two_answers")
    layer, saves_in_decoder = answer
    if layer is None or layer is ...:
        return not_answered()
    say.reject_if(isinstance(layer, str) or layer in (-1, 8), "which_block.number")
    mistakes = {0.0: say("which_block.first"), 6.0: say("which_block.last_but_one")}
    verdict = expect_number(layer, 7, wrong_answers=mistakes)
    if not verdict:
        return verdict
    unanswered = saves_in_decoder is None or saves_in_decoder is ...
    say.reject_if(unanswered, "which_block.second")
    say.reject_if(saves_in_decoder not in (True, False), "which_block.two_answers")
    say.reject_if(not saves_in_decoder, "which_block.saves")
    return say.right("which_block.right")


#: Rows and columns of the input of each test block, and bytes of the smallest matrix product
_ROWS, _COLUMNS, _SMALLEST = 16, 8, 4096
#: Operators of two test blocks: `addmm`, `mm`, and `bmm`, which only attention calls
_BLOCKS = (("addmm", "mm", "bmm", "addmm", "mm", "addmm"), ("mm", "addmm", "addmm"))


@exercise()
def check_policy(make_contexts: Any) -> Verdict:
    """Check a policy for selective checkpointing that keeps every second matrix product.

    In each checkpoint, the policy must keep the first, third, fifth ... matrix product of linear
    layers, and recompute all other operators.

    Args:
        make_contexts: Function that is passed to PyTorch's `checkpoint` as `context_fn`.
    """
    contexts = make_contexts()
    if contexts is None or contexts is ...:
        return not_answered()
    two = isinstance(contexts, tuple) and len(contexts) == 2
    say.reject_if(not two, "policy.contexts")
    plain, nothing = _run_test_blocks(None), _run_test_blocks(noop_context_fn)
    found = _run_test_blocks(make_contexts)
    kept = []
    for one, other in zip(found.live_bytes, nothing.live_bytes, strict=True):
        say.reject_if((one - other) % _SMALLEST, "policy.other_operators")
        kept.append([i for i in range(6) if (one - other) // _SMALLEST >> i & 1])
    for name, choose in _CHOICES.items():
        say.reject_if(kept == [choose(block) for block in _BLOCKS], f"policy.{name}")
    first, second = (_every_second(block) for block in _BLOCKS)
    say.reject_if(kept[0] == first and kept[1] != second, "policy.counts_on")
    if kept != [first, second]:
        numbers = ", ".join(f"{i + 1}" for i in kept[0]) or "–"
        say.wrong("policy.kept", kept=numbers, wanted=", ".join(f"{i + 1}" for i in first))
    say.reject_if(not is_close(found.gradients, plain.gradients), "common.gradients")
    wanted = nothing.flops - sum(2 * _ROWS * _COLUMNS * 64 * 2**i for i in first + second)
    say.reject_if(found.flops > wanted, "policy.recomputed")
    share = (found.flops - plain.flops) / (nothing.flops - plain.flops)
    return say.right("policy.right", share=f"{share:.0%}")


class _BlockCosts(NamedTuple):
    """Bytes that are live after each test block, FLOPs of forward and backward, and gradients."""

    live_bytes: list[int]
    flops: int
    gradients: list[Tensor]


def _run_test_blocks(context_fn: Callable | None) -> _BlockCosts:
    """Run the test blocks in a row, each in a checkpoint if `context_fn` is not None."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_ROWS, _COLUMNS, generator=generator).requires_grad_()
    weights = [
        [torch.randn(8, 64 * 2**i, generator=generator).requires_grad_() for i in range(len(block))]
        for block in _BLOCKS
    ]

    def run(x: Tensor, operators: tuple[str, ...], weights: list[Tensor]) -> Tensor:
        for operator, weight in zip(operators, weights, strict=True):
            if operator == "bmm":
                y = torch.bmm(x[None], weight[None])[0]
            else:
                y = torch.addmm(weight[0], x, weight) if operator == "addmm" else x @ weight
            x = y[:, :_COLUMNS].sin()
        return x

    live, y = [], x
    with MemoryMeter() as meter:
        for block in zip(_BLOCKS, weights, strict=True):
            before = meter.live_bytes
            if context_fn is None:
                y = run(y, *block)
            else:
                y = checkpoint(run, y, *block, use_reentrant=False, context_fn=context_fn)
            live.append(meter.live_bytes - before)
        y.backward(uneven_gradient(y))
    return _BlockCosts(live, meter.flops, [each.grad for each in (x, *weights[0], *weights[1])])


def _positions(block: tuple[str, ...], *operators: str) -> list[int]:
    return [i for i, operator in enumerate(block) if operator in operators]


def _every_second(block: tuple[str, ...], start: int = 0) -> list[int]:
    return _positions(block, "addmm", "mm")[start::2]


#: Mistake -> function that takes a test block and returns the results that it would keep
_CHOICES: dict[str, Callable[[tuple[str, ...]], list[int]]] = {
    "nothing": lambda block: [],
    "all_products": lambda block: _positions(block, "addmm", "mm"),
    "all_three": lambda block: list(range(len(block))),
    "from_the_second": lambda block: _every_second(block, 1),
    "attention": lambda block: list(range(len(block)))[::2],
    "mm_alone": lambda block: _positions(block, "mm")[::2],
    "addmm_alone": lambda block: _positions(block, "addmm")[::2],
    "separately": lambda block: sorted(
        _positions(block, "mm")[::2] + _positions(block, "addmm")[::2]
    ),
}


@largest([2**i for i in range(11)], budget_bytes=150_000_000)
def check_head_chunk(chunk: int) -> int:
    """Check the learner's answer: the largest chunk with which the loss needs at most 150 MB.

    The loss of 1024 tokens, with a vocabulary of 32,000 words, is computed in chunks of tokens. The
    size of a chunk must be a power of two. The decorated function returns the peak in bytes for a
    chunk size, and the decorator `largest` turns it into a check.
    """
    with symbolic():
        hidden = torch.randn(1024, 256, requires_grad=True)
        vocabulary = torch.nn.Parameter(torch.randn(32000, 256))
        targets = torch.randint(32000, (1024,))
        with MemoryMeter() as meter:
            checkpointed_loss(hidden, vocabulary, targets, chunk=chunk).backward()
    return meter.peak_bytes


# Losses in chunks

#: Tolerance of gradients, because sums in another order round differently
_ROUNDING = {"rtol": 1e-3, "atol": 1e-6}


@exercise()
def check_loss_in_pieces(function: Any) -> Verdict:
    """Check the learner's function that computes the cross-entropy loss in chunks of tokens.

    The function must return the mean loss over the targets that are not ignored. The gradients must
    be those of `cross_entropy`, and the logits of all chunks must never be live at the same time.

    Args:
        function: Function that is called as `function(hidden, weight, targets, chunk)`, with the
            chunk size in tokens.
    """
    generator = torch.Generator().manual_seed(seed_of(0))
    hidden = torch.randn(240, 32, generator=generator, requires_grad=True)
    weight = torch.randn(2000, 32, generator=generator, requires_grad=True)
    targets = torch.randint(2000, (240,), generator=generator)
    losses = functional.cross_entropy(hidden @ weight.T, targets, reduction="none")
    expected = torch.autograd.grad(losses.mean(), (hidden, weight))
    logits = 4 * 240 * 2000
    with MemoryMeter() as meter:
        loss = function(hidden, weight, targets, 64)
        if loss is None or loss is ...:
            return not_answered()
        with_graph = isinstance(loss, Tensor) and loss.requires_grad
        say.reject_if(not with_graph, "loss_in_pieces.no_graph")
        kept = meter.live_bytes
        _reject_wrong_loss(
            loss, float(losses.detach().mean()), _losses_of_mistakes(losses.detach()), rtol=1e-4
        )
        try:
            (3 * loss).backward()  # as if the loss were scaled, or added to other losses
        # `cross_entropy` got rows and targets of different chunks, or the last chunk came twice
        except (ValueError, CheckpointError) as error:
            if not any(part in f"{error}" for part in ("batch_size", "different metadata")):
                raise
            say.reject("loss_in_pieces.late_binding")
    for name, tensor, gradient in zip(
        ("hidden", "weight"), (hidden, weight), expected, strict=True
    ):
        say.reject_if(is_close(tensor.grad, gradient, **_ROUNDING), "loss_in_pieces.unscaled")
        if not is_close(tensor.grad, 3 * gradient, **_ROUNDING):
            say.wrong("loss_in_pieces.gradient", name=f"`{name}`")
    if kept > logits // 2:
        say.wrong("loss_in_pieces.kept", kept=kept, hint="loss_in_pieces.with_the_product")
    with MemoryMeter() as whole:
        function(hidden, weight, targets, 240).backward()
    # With all tokens in one chunk, three tensors as large as all logits are live in backward.
    if whole.peak_bytes < 2 * logits:
        alike = is_close(whole.peak_bytes, meter.peak_bytes, rtol=0.1)
        say.reject(f"loss_in_pieces.{'one_chunk' if alike else 'count_of_chunks'}")
    _reject_counted_ignored_targets(function, hidden.detach(), weight.detach(), targets)
    sizes = {"peak": meter.peak_bytes, "logits": logits}
    if meter.peak_bytes > 1.5 * logits:
        say.wrong("loss_in_pieces.peak", **sizes)
    return say.right("loss_in_pieces.right", kept=kept, **sizes)


def _reject_wrong_loss(loss: Tensor, wanted: float, mistakes: dict[str, Any], rtol: float) -> None:
    """Reject a loss that is not `wanted`; the message names the mistake if it is known."""
    found = float(loss.detach())
    if is_close(found, wanted, rtol=rtol):
        return
    reject_mistakes(say, found, mistakes, within="common.wrong_loss", rtol=rtol)
    say.wrong("common.loss", found=f"{found:.4f}", wanted=f"{wanted:.4f}")


def _losses_of_mistakes(losses: Tensor) -> dict[str, Any]:
    """Return a dict from mistakes to wrong mean losses of 240 tokens in chunks of 64."""
    means, total = [float(part.mean()) for part in losses.split(64)], float(losses.sum())
    return {
        "loss_in_pieces.mean_of_means": sum(means) / 4,
        "common.sum": total,
        "loss_in_pieces.sum_of_means": sum(means) / 240,
        "loss_in_pieces.by_chunks": (total / 64, total / 4),
        "loss_in_pieces.last_chunk": (float(losses[:192].mean()), float(losses[:192].sum()) / 240),
    }


def _reject_counted_ignored_targets(
    function: Callable, hidden: Tensor, weight: Tensor, targets: Tensor
) -> None:
    """Reject a loss whose value or gradient is wrong when some targets are ignored (-100).

    The case has one chunk of 64 in which all targets are ignored.
    """
    ignored = targets.clone()
    ignored[40:130] = -100
    rows = hidden.clone().requires_grad_()
    wanted = functional.cross_entropy(rows @ weight.T, ignored)
    (expected,) = torch.autograd.grad(wanted, rows)
    loss = function(rows, weight, ignored, 64)
    loss.backward()
    say.reject_if(torch.isnan(loss), "loss_in_pieces.nan")
    of_all = wanted * (ignored != -100).sum() / len(targets)
    say.reject_if(is_close(loss, of_all, rtol=1e-4), "common.all_targets")
    right = is_close(loss, wanted, rtol=1e-4) and is_close(rows.grad, expected, **_ROUNDING)
    say.reject_if(not right, "loss_in_pieces.ignored")


@cache
def _batch(seed: int) -> dict[str, Tensor]:
    """Return 8 sequences whose prompts and paddings have different lengths.

    The last sequence has no prompt, so the first label of that sequence is not -100.
    """
    tokens = random_tokens(8, 127, VOCABULARY, seed=seed)
    places, sequences = torch.arange(128), torch.arange(8)[:, None]
    ignored = (places < 9 * (7 - sequences)) | (places >= 128 - 5 * sequences)
    return {"input_ids": tokens, "labels": tokens.masked_fill(ignored, -100)}


@cache
def _expected_cost(seed: int) -> Cost:
    return cost_of(llama(VOCABULARY), _batch(seed))  # pyrefly: ignore[bad-return]


@exercise()
def check_in_chunks(function: Any) -> Verdict:
    """Check the learner's memory-saving loss of a Llama model.

    The layers must be checkpointed, and the loss must be computed in chunks. Loss and gradients
    must be equal to those of the unchanged model. The peak of forward and backward must be at most
    80 MB.

    Args:
        function: Function that is called as `function(model, tokens, labels)`, and returns the
            loss.
    """
    model, runs = llama(VOCABULARY), []
    layers = model.model.layers
    for layer in layers:
        layer.mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    seed = seed_of(0)
    expected, mistakes = _expected_cost(seed), _mistaken_losses(seed)  # before the meter starts

    def loss_of(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
        loss = function(model, tokens, labels)
        if loss is None or loss is ...:
            raise NotImplementedError
        if not isinstance(loss, Tensor) or not loss.requires_grad or loss.numel() != 1:
            say.wrong("in_chunks.no_graph")
        _reject_wrong_loss(loss, expected.loss, mistakes, rtol=1e-5)
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cost = cost_of(model, _batch(seed), loss_of)
    equal = equal_gradients(cost.gradients, expected.gradients)
    say.reject_if(not equal, "in_chunks.gradients")
    peak = f"{cost.peak_bytes / 1e6:.1f}"
    if cost.peak_bytes > 80_000_000:
        say.reject_if(not model.training, "in_chunks.eval")
        say.reject_if(len(runs) < 2 * len(layers), "in_chunks.layers", peak=peak)
        say.reject("in_chunks.logits", peak=peak)
    return say.right("in_chunks.right", peak=peak)


@cache
def _mistaken_losses(seed: int) -> dict[str, Any]:
    """Return a dict from mistakes to the wrong losses that they give."""
    labels, model = _batch(seed)["labels"], llama(VOCABULARY)
    with torch.no_grad():
        logits = model(_batch(seed)["input_ids"]).logits
    counted = int((labels[:, 1:] != -100).sum())

    def mean(logits: Tensor, targets: Tensor) -> float:
        return float(functional.cross_entropy(logits.flatten(0, -2), targets.flatten()))

    total = mean(logits[:, :-1], labels[:, 1:]) * counted
    of_rows = [mean(one[:-1], targets[1:]) for one, targets in zip(logits, labels, strict=True)]
    return {
        "in_chunks.not_shifted": mean(logits, labels),
        "in_chunks.other_direction": mean(logits[:, 1:], labels[:, :-1]),
        "in_chunks.across": mean(logits.flatten(0, 1)[:-1], labels.flatten()[1:]),
        "common.sum": total,
        "common.all_targets": (total / labels.numel(), total / labels[:, 1:].numel()),
        "in_chunks.before_shift": total / int((labels != -100).sum()),
        "in_chunks.mean_of_means": sum(of_rows) / len(of_rows),
    }
