"""The exercises of lesson 02."""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointError

from course_lib._torch.operators import OpOverload
from course_lib.checkpoint import checkpoint_blocks, checkpointed_loss
from course_lib.labels import verbatim
from course_lib.lessons.ledger import BASELINE, LAYER_BYTES
from course_lib.memory import MemoryMeter, symbolic
from course_lib.models import Decoder, random_tokens
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
    refuse_mistakes,
    run_forward,
    uneven_gradient,
)

from .own_code import VOCABULARY, Cost, cost_of, equal_gradients, llama

say = Messages(__file__)

# Checkpoints as programs

#: Part of an error of PyTorch -> the message on the mistake that causes it.
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
    """Check a checkpoint: `function(block, x)`, or an `autograd.Function` called in the same way.

    The checkpoint must not change the gradients and must run the block twice. Only the input may be
    kept between forward and backward.
    """
    function = getattr(function, "apply", function)
    _keeps_its_input_only(function)
    _works_in_a_network(function)
    return say.right("checkpoint.right")


@exercise(
    errors=_ERRORS
    | dict.fromkeys(("shapes cannot be multiplied", "must match the size"), "hooks.another_tensor")
)
def check_hooks(function: Any) -> Verdict:
    """Check `function(block, x)`, a checkpoint that is made with saved-tensor hooks.

    The checkpoint must also work if the block's weight needs a gradient and its input does not.
    """
    try:
        _keeps_its_input_only(function)
        _works_in_a_network(function)
    except IndexError:
        say.refuse("hooks.found_too_few")
    weight = torch.linspace(-1, 1, 64).view(8, 8).requires_grad_()
    data = torch.linspace(0, 1, 64).view(8, 8)
    output = function(lambda x: (x @ weight).exp(), data)
    try:
        if output.requires_grad:
            output.backward(uneven_gradient(data))
    except RuntimeError:  # the second run saved different tensors, so shapes do not match
        weight.grad = torch.full_like(weight, torch.nan)
    (expected,) = torch.autograd.grad((data @ weight).exp(), weight, uneven_gradient(data))
    say.refuse_if(weight.grad is None, "hooks.no_weight_gradient")
    say.refuse_if(not is_close(weight.grad, expected), "hooks.requires_too_much")
    return say.right("hooks.right")


def _keeps_its_input_only(function: Callable) -> None:
    """Reject a checkpoint with wrong gradients, a wrong number of runs, or too many kept bytes."""
    weight = torch.linspace(-1, 1, 64).view(8, 8).requires_grad_()
    # The state of the random number generator may be kept, too. It is far smaller than x.
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
        say.refuse_if(again, "common.cut_graph")
        raise
    nothing_kept = (before, len(runs)) == (1, 1) and kept <= 1.5 * x.nbytes
    say.refuse_if(nothing_kept, "common.recomputed_nothing")
    _two_runs(before, len(runs))
    say.refuse_if(weight.grad is None, "common.no_weight_gradient")
    say.refuse_if(x.grad is None, "common.no_input_gradient")
    say.refuse_if(is_close(x.grad, 2 * wanted[0]), "common.input_twice")
    refuse_mistakes(say, [x.grad, weight.grad], {"common.ones": [*all_ones]})
    if not is_close([x.grad, weight.grad], wanted):
        say.wrong("common.gradients")
    if kept > 1.5 * x.nbytes:  # one copy of the input is allowed
        say.wrong("common.kept", kept=kept, input=x.nbytes)


def _forward(function: Callable, block: Callable, x: Tensor, runs: list) -> tuple[Tensor, int]:
    """Run the forward of a checkpoint; return its output, and the bytes it keeps besides that."""
    try:
        output, kept = run_forward(function, block, x)
    except NotImplementedError:
        say.refuse_if(runs, "common.returns_nothing")
        raise
    kind = verbatim(type(output).__name__)
    say.refuse_if(not isinstance(output, Tensor), "common.no_tensor", kind=kind)
    return output, kept


def _works_in_a_network(function: Callable) -> None:
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
        say.refuse("common.two_in_a_row")
    found = [tensor.grad for tensor in tensors[:3]]
    say.refuse_if(not is_close(found, wanted), "common.two_in_a_row")


def _two_runs(before: float, after: float) -> None:
    """Reject a checkpoint unless the block runs once in forward and once in backward.

    Args:
        before: Number of runs before backward.
        after: Number of runs in forward and backward together.
    """
    say.refuse_if((before, after) == (1, 1), "common.ran_once")
    if (before, after) != (1, 2):
        say.wrong("common.runs", before=f"{before:g}", after=f"{after:g}")


@exercise()
def check_dropout_checkpoint(function: Any) -> Verdict:
    """Check a checkpoint `function(block, x)`, or an `autograd.Function`, for blocks with dropout.

    The checkpoint must repeat the same mask and must not change later random numbers.
    """
    function, runs = getattr(function, "apply", function), []

    def block(x: Tensor) -> Tensor:
        runs.append(1)
        return functional.dropout(x * 1.0, 0.5)

    def draw_numbers(goes_backward: bool) -> tuple[list[tuple[Tensor, Tensor]], list[int], Tensor]:
        """Return a list of (input, output) of two blocks, run counts, and final random numbers.

        The run counts are those after forward and after backward. The final random numbers show
        whether the generator is in the right state.
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
    _two_runs(*(count / 2 for count in counts))
    for x, output in blocks:
        if not torch.equal(output == 0, x.grad == 0):
            say.wrong("dropout_checkpoint.another_mask", hint="dropout_checkpoint.state")
        upstream = torch.where(output == 0, 0.0, 2 * (uneven_gradient(x) + 3))
        say.refuse_if(not is_close(x.grad, upstream), "common.ones")
    say.refuse_if(torch.equal(blocks[0][1], blocks[1][1]), "dropout_checkpoint.same_mask")
    say.refuse_if(not torch.equal(found, undisturbed), "dropout_checkpoint.changed")
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
    """Check `function(k)`: the step's peak with checkpoints around the first k layers, k < 8."""
    return _peak(k)


@exercise()
def check_which_block(answer: Any) -> Verdict:
    """Check a pair of answers about a checkpoint around one layer.

    The first answer is the number of the layer whose checkpoint saves nothing, in eight layers
    without an output head. The second answer is whether a checkpoint around this layer saves memory
    in the decoder, which has a head.
    """
    two = isinstance(answer, tuple | list) and len(answer) == 2
    say.refuse_if(not two, "which_block.two_answers")
    layer, saves_in_decoder = answer
    if layer is None or layer is ...:
        return not_answered()
    say.refuse_if(isinstance(layer, str) or layer in (-1, 8), "which_block.number")
    mistakes = {0.0: say("which_block.first"), 6.0: say("which_block.last_but_one")}
    verdict = expect_number(layer, 7, wrong_answers=mistakes)
    if not verdict:
        return verdict
    unanswered = saves_in_decoder is None or saves_in_decoder is ...
    say.refuse_if(unanswered, "which_block.second")
    say.refuse_if(saves_in_decoder not in (True, False), "which_block.two_answers")
    say.refuse_if(not saves_in_decoder, "which_block.saves")
    return say.right("which_block.right")


@exercise()
def check_policy(operators: Any) -> Verdict:
    """Check the operators whose outputs a selective checkpoint keeps.

    The peak of forward and backward must be at most 110 MB, and the FLOPs at most 1.2 times the
    FLOPs without a checkpoint.
    """
    say.refuse_if(not isinstance(operators, list | tuple | set | frozenset), "policy.list")
    proper = all(isinstance(operator, OpOverload) for operator in operators)
    say.refuse_if(not proper, "policy.operators")
    with symbolic():
        decoder = Decoder(vocabulary=2048, hidden=256, heads=8, layers=8, sequence=128)
        tokens = random_tokens(8, 128, 2048)
        checkpoint_blocks(decoder, "layers.*", policy=list(operators))
        with (
            warnings.catch_warnings(record=True) as heard,
            MemoryMeter(decoder) as meter,
        ):
            warnings.simplefilter("always")
            decoder.loss(tokens).backward()
    never = any("policy keeps" in f"{each.message}" for each in heard)
    say.refuse_if(never, "policy.never_called")
    ratio = meter.flops / BASELINE.flops
    took = {"peak": f"{meter.peak_bytes / 1e6:.1f} MB", "times": f"{ratio:.3f}"}
    if meter.peak_bytes > 110e6:
        say.wrong("policy.too_much", **took)
    if ratio > 1.2:
        say.wrong("policy.too_little", **took)
    # The scores are a·s²·b numbers of 4 bytes, and the context is s·b·h numbers.
    layer = f"{4 * (8 * 8 * 128**2 + 8 * 128 * 256) / 1e6:.1f} MB"
    return say.right("policy.right", **took, layer=layer)


@largest([2**i for i in range(11)], budget_bytes=150_000_000)
def check_head_chunk(chunk: int) -> int:
    """Check the largest chunk of the head's loss whose peak is at most 150 MB, a power of two."""
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
    """Check `function(hidden, weight, targets, chunk)`, which returns a loss computed in chunks.

    The function must return the mean loss over the targets that are not ignored. The gradients must
    be those of `cross_entropy`, and the logits must never all be live at once.
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
        say.refuse_if(not with_graph, "loss_in_pieces.no_graph")
        kept = meter.live_bytes
        _is_the_loss(loss, float(losses.detach().mean()), _other_losses(losses.detach()), rtol=1e-4)
        try:
            (3 * loss).backward()  # as if the loss were scaled, or added to other losses
        # `cross_entropy` got rows of one chunk and targets of another, or the last chunk twice
        except (ValueError, CheckpointError) as error:
            if not any(part in f"{error}" for part in ("batch_size", "different metadata")):
                raise
            say.refuse("loss_in_pieces.late_binding")
    for name, tensor, gradient in zip(
        ("hidden", "weight"), (hidden, weight), expected, strict=True
    ):
        say.refuse_if(is_close(tensor.grad, gradient, **_ROUNDING), "loss_in_pieces.unscaled")
        if not is_close(tensor.grad, 3 * gradient, **_ROUNDING):
            say.wrong("loss_in_pieces.gradient", name=f"`{name}`")
    if kept > logits // 2:
        say.wrong("loss_in_pieces.kept", kept=kept, hint="loss_in_pieces.with_the_product")
    with MemoryMeter() as whole:
        function(hidden, weight, targets, 240).backward()
    # With all tokens in one chunk, three tensors as large as all logits are live in backward.
    if whole.peak_bytes < 2 * logits:
        alike = is_close(whole.peak_bytes, meter.peak_bytes, rtol=0.1)
        say.refuse(f"loss_in_pieces.{'one_chunk' if alike else 'count_of_chunks'}")
    _leaves_out_ignored_targets(function, hidden.detach(), weight.detach(), targets)
    sizes = {"peak": meter.peak_bytes, "logits": logits}
    if meter.peak_bytes > 1.5 * logits:
        say.wrong("loss_in_pieces.peak", **sizes)
    return say.right("loss_in_pieces.right", kept=kept, **sizes)


def _is_the_loss(loss: Tensor, wanted: float, mistakes: dict[str, Any], rtol: float) -> None:
    """Reject a loss that is not `wanted`; the message names the mistake if it is known."""
    found = float(loss.detach())
    if is_close(found, wanted, rtol=rtol):
        return
    refuse_mistakes(say, found, mistakes, within="common.wrong_loss", rtol=rtol)
    say.wrong("common.loss", found=f"{found:.4f}", wanted=f"{wanted:.4f}")


def _other_losses(losses: Tensor) -> dict[str, Any]:
    """Return a dict from mistakes to wrong losses, for the losses of 240 tokens in chunks of 64."""
    means, total = [float(part.mean()) for part in losses.split(64)], float(losses.sum())
    return {
        "loss_in_pieces.mean_of_means": sum(means) / 4,
        "common.sum": total,
        "loss_in_pieces.sum_of_means": sum(means) / 240,
        "loss_in_pieces.by_chunks": (total / 64, total / 4),
        "loss_in_pieces.last_chunk": (float(losses[:192].mean()), float(losses[:192].sum()) / 240),
    }


def _leaves_out_ignored_targets(
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
    say.refuse_if(torch.isnan(loss), "loss_in_pieces.nan")
    of_all = wanted * (ignored != -100).sum() / len(targets)
    say.refuse_if(is_close(loss, of_all, rtol=1e-4), "common.all_targets")
    right = is_close(loss, wanted, rtol=1e-4) and is_close(rows.grad, expected, **_ROUNDING)
    say.refuse_if(not right, "loss_in_pieces.ignored")


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
    """Check `function(model, tokens, labels)`, which returns the loss of a Llama.

    The layers must be checkpointed and the loss must be computed in chunks. Loss and gradients must
    equal the model's own. The peak of forward and backward must be at most 80 MB.
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
        _is_the_loss(loss, expected.loss, mistakes, rtol=1e-5)
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cost = cost_of(model, _batch(seed), loss_of)
    equal = equal_gradients(cost.gradients, expected.gradients)
    say.refuse_if(not equal, "in_chunks.gradients")
    peak = f"{cost.peak_bytes / 1e6:.1f}"
    if cost.peak_bytes > 80_000_000:
        say.refuse_if(not model.training, "in_chunks.eval")
        say.refuse_if(len(runs) < 2 * len(layers), "in_chunks.layers", peak=peak)
        say.refuse("in_chunks.logits", peak=peak)
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
