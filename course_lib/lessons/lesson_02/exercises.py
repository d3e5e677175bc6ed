"""The exercises of lesson 02."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointError

from course_lib._torch.operators import OpOverload
from course_lib.checkpoint import checkpoint_blocks, checkpointed_loss
from course_lib.lessons.ledger import BASELINE, LAYER_BYTES
from course_lib.memory import MemoryMeter, symbolic
from course_lib.models import Decoder, random_tokens
from course_lib.teaching import Verdict, expect_number, text
from course_lib.teaching.exercises import (
    WrongAnswer,
    exercise,
    largest_that_fits,
    not_answered,
    returns_none,
    right,
    seed_of,
    wrong,
)

from .own_code import VOCABULARY, Cost, cost_of, equal_gradients, llama

# The course's decoder, in bytes: what a layer saves, its input, and the state of the random number
# generator.
LAYER, INPUT, RNG = LAYER_BYTES, 1_048_576, 5_056
KEPT = INPUT + RNG  # bytes that a checkpoint keeps


@exercise(
    hint=(
        (
            "In forward, run the block and keep x. In backward, give the block its own input"
            " and run it again with a graph."
        ),
        (
            "The second run needs a graph, and an input that begins it. Where is the gradient of"
            " this input after `torch.autograd.backward`?"
        ),
    )
)
def check_checkpoint(function: Any) -> Verdict:
    """Check a checkpoint `function(block, x)`, or a Function with these arguments.

    The gradients must be equal, with two runs, and only the input may be kept.
    """
    function = getattr(function, "apply", function)
    _keeps_its_input_only(function)
    _works_in_a_network(function)
    return right(
        "Right: the gradients are equal, the block runs twice, and only the input is kept."
    )


@exercise(
    hint=(
        (
            "`forget` keeps only a number. What must have happened before `bring_back` can find a"
            " tensor by its number?"
        ),
        (
            "If `found` is empty, run the block with a graph, and with `collect` as the first hook."
            " Which input makes this run save the same tensors as the first one?"
        ),
    )
)
def check_hooks(function: Any) -> Verdict:
    """Check a checkpoint by saved-tensor hooks.

    It must also work if only the block's weight, and not its input, needs a gradient.
    """
    try:
        _keeps_its_input_only(function)
        _works_in_a_network(function)
    except IndexError:
        return wrong(
            "`found` has fewer tensors than were numbered. The second run must save the same"
            " tensors as the first. For this it needs a graph, hooks that collect, and an"
            " input that requires a gradient if `x` does.",
            exact=True,
        )
    except RuntimeError as error:
        if "shapes cannot be multiplied" in f"{error}" or "must match the size" in f"{error}":
            return wrong(
                "You did not bring back the tensor that was saved. Number n stands for the"
                " n-th tensor that the second run saves, so return `found[number]`.",
                exact=True,
            )
        raise
    weight, data = (
        torch.linspace(-1, 1, 64).view(8, 8).requires_grad_(),
        torch.linspace(0, 1, 64).view(8, 8),
    )
    output = function(lambda x: (x @ weight).exp(), data)
    try:
        if output.requires_grad:
            output.backward(_uneven_gradient(data))
    except RuntimeError:  # the second run saved other tensors, so that shapes do not match
        weight.grad = torch.full_like(weight, torch.nan)
    (expected,) = torch.autograd.grad((data @ weight).exp(), weight, _uneven_gradient(data))
    if weight.grad is None:
        return wrong(
            "The block's weight got no gradient when the input needed none. It still needs"
            " its own gradient.",
            exact=True,
        )
    if not torch.allclose(weight.grad, expected):
        return wrong(
            "If `x` needs no gradient, your second run saves different tensors than the first"
            " one. Its input may require a gradient only if `x` does:"
            " `x.detach().requires_grad_(x.requires_grad)`.",
            exact=True,
        )
    return right(
        "Right: the gradients are equal, the block runs twice, and only the input is kept. It"
        " also works if the input needs no gradient."
    )


def _uneven_gradient(like: Tensor) -> Tensor:
    """Return a gradient that differs at each place and has both signs, like that of a real loss."""
    return torch.linspace(-1, 2, like.numel()).view_as(like)


_RETURNED = (
    "Your backward returns the wrong gradients. It must return one for each argument of"
    " forward: `None` for the block, then the gradient of `x`."
)
#: Part of an error of PyTorch -> the verdict on the mistake that causes it.
_MISTAKES = {
    "does not require grad": (
        "Your second run has no graph, because backward records none. Run the block again"
        " under `torch.enable_grad()`."
    ),
    "backward through the graph a second time": (
        "Your backward went on through the graph in front of the block. Run the block again on an"
        " input of its own, `x.detach().requires_grad_()`."
    ),
    "incorrect number of gradients": _RETURNED,
    "returned a gradient different than None": _RETURNED,
    "only for scalar outputs": (
        "You called `torch.autograd.backward` with the output alone. Pass it the gradient"
        " that has arrived, too."
    ),
    "unpack_hook expected to be a Tensor": (
        "`bring_back` must return a tensor, namely the one that was saved under this number."
    ),
}


def _keeps_its_input_only(function: Callable) -> None:
    """Refuse a checkpoint with wrong gradients, runs, or bytes between forward and backward."""
    weight = torch.linspace(-1, 1, 64).view(8, 8).requires_grad_()
    # x is far larger than the state of the random number generator, which may be kept, too.
    x = torch.linspace(0, 1, 2**15).view(-1, 8).requires_grad_()
    runs = []

    def block(x: Tensor) -> Tensor:
        runs.append(torch.is_grad_enabled())
        y = x @ weight
        for _ in range(8):
            y = y.sin().tanh().exp().sub(1)
        return y

    expected = torch.autograd.grad(block(x), (x, weight), _uneven_gradient(x))
    all_ones = torch.autograd.grad(block(x).sum(), (x, weight))
    runs.clear()
    with MemoryMeter() as meter:
        output = function(block, x)
        if output is None and runs:
            _refuse("Your function runs the block and returns nothing. Return the block's output.")
        if output is None or output is ...:
            raise NotImplementedError
        kept = meter.live_bytes - output.nbytes
    before = len(runs)
    if before == 0 and torch.equal(output, x):  # the cell is unchanged
        raise NotImplementedError
    try:
        output.backward(_uneven_gradient(x))
    except (RuntimeError, TypeError) as error:
        if "does not require grad" in f"{error}" and len(runs) == 2 and runs[1]:
            _refuse(
                "Your second run has a graph, but the tensor from which you go backward has"
                " none. Compute this tensor under `torch.enable_grad()`, too, or pass the"
                " output and the gradient to `torch.autograd.backward`."
            )
        _name_the_mistake(error)
        raise
    if (before, len(runs)) == (1, 1) and kept <= 1.5 * x.nbytes:
        _refuse("Your backward recomputed nothing. It must run the block a second time.")
    _two_runs(before, len(runs))
    if weight.grad is None:
        _refuse(
            "The block's weight got no gradient, because `torch.autograd.grad` returns only"
            " the gradients that you ask for. Use `torch.autograd.backward`."
        )
    if x.grad is None:
        _refuse(
            "The input got no gradient. The input of the second run must require a gradient,"
            " and backward must return its `.grad`."
        )
    found = (x.grad, weight.grad)
    if torch.allclose(x.grad, 2 * expected[0]):
        _refuse(
            "The gradient of the input is counted twice. Give the second run its own input,"
            " detached from the graph."
        )
    if all(map(torch.allclose, found, all_ones)):
        _refuse(
            "You went backward from the output's sum, as if the gradient that arrives were"
            " all ones. Go backward from that gradient."
        )
    if not all(map(torch.allclose, found, expected)):
        raise WrongAnswer("Your gradients differ from autograd's.")
    if kept > 1.5 * x.nbytes:  # one copy of the input is allowed
        message = (
            "Between forward and backward you keep {kept:,} bytes, but the input has only"
            " {input:,}."
        )
        raise WrongAnswer(text(message, kept=kept, input=x.nbytes))


def _name_the_mistake(error: Exception) -> None:
    """Refuse with the meaning of PyTorch's error, if it is known."""
    for message, meant in _MISTAKES.items():
        if message in f"{error}":
            raise WrongAnswer(meant, exact=True) from None


def _works_in_a_network(function: Callable) -> None:
    """Refuse a checkpoint that only works for a single block.

    Here a second block follows the first one, and other operators also use its input and output.
    """
    generator = torch.Generator().manual_seed(seed_of(0))
    start, *weights = (torch.randn(8, 8, generator=generator) for _ in range(3))
    for tensor in (start, *weights):
        tensor.requires_grad_()

    def network(run: Callable) -> Tensor:
        inside = start.exp()
        first = run(lambda x: (x @ weights[0]).sin(), inside)
        return inside + first * run(lambda x: (x @ weights[1]).tanh(), first)

    gradient = _uneven_gradient(start)
    wanted = torch.autograd.grad(network(lambda block, x: block(x)), (start, *weights), gradient)
    message = (
        "Your checkpoint is right for one block, but for two in a row the gradients differ"
        " from autograd's. Keep nothing outside the call, because each block has its own"
        " input and its own tensors."
    )
    try:
        network(function).backward(gradient)
    except (RuntimeError, IndexError) as error:
        _name_the_mistake(error)
        raise WrongAnswer(message, exact=True) from None
    found = [tensor.grad for tensor in (start, *weights)]
    if not all(
        one is not None and torch.allclose(one, two) for one, two in zip(found, wanted, strict=True)
    ):
        _refuse(message)


def _refuse(message: str) -> None:
    """Refuse the answer because of one mistake that the message names exactly."""
    raise WrongAnswer(message, exact=True)


def _two_runs(before: float, after: float) -> None:
    """Refuse a checkpoint unless it runs a block once in forward and once more in backward.

    Args:
        before: Number of runs before backward.
        after: Number of runs in all.
    """
    if (before, after) == (1, 1):
        _refuse("The block ran only once. Everything was kept, and nothing was recomputed.")
    if (before, after) != (1, 2):
        raise WrongAnswer(
            text(
                "The block ran {before} time(s) before backward and {after} time(s) in all, but"
                " these must be 1 and 2.",
                before=f"{before:g}",
                after=f"{after:g}",
            )
        )


def _peak(checkpoints: int, kept: int) -> int:
    """Return the step's peak if each checkpoint keeps `kept` bytes instead of its layer's."""
    return BASELINE.peak_bytes - checkpoints * (LAYER - kept)


_RECOMPUTED = (
    "You counted one layer that has been recomputed. At the peak, no layer has been recomputed yet."
)


@exercise(
    hint=(
        (
            "Start from the baseline's peak. What does a checkpointed layer no longer keep,"
            " and what does it still keep?"
        ),
        (
            "Two things stay for each checkpoint. How many numbers has the layer's input, and how"
            " many bytes has each?"
        ),
    )
)
def check_peak_formula(answer: Any) -> Verdict:
    """Check a function of k: the step's peak with checkpoints around the first k layers, k < 8."""
    all_given = [answer(k) for k in range(8)]
    if all(given is None or given is ... for given in all_given):
        return not_answered()
    if all(expect_number(given, _peak(0, KEPT)) for given in all_given):
        return wrong(
            "Your peak is the same for every k. Each checkpoint reduces it, so use `k`.",
            exact=True,
        )
    for k, given in enumerate(all_given):
        if given is None or given is ...:
            return returns_none(f"k = {k}")
        verdict = expect_number(
            given,
            _peak(k, KEPT),
            in_bytes=True,
            wrong_answers={
                _peak(
                    k, 0
                ): "You left out the inputs. Each checkpoint keeps the input of its layer.",
                _peak(k, INPUT): (
                    "You left out the state of the random number generator. Each checkpoint keeps"
                    " it, too."
                ),
                _peak(k, RNG): (
                    "You left out the inputs. Each checkpoint keeps the input of its layer,"
                    " b · s · h numbers."
                ),
                _peak(k, INPUT // 4 + RNG): (
                    "You counted the elements of the input. Each of them takes 4 bytes."
                ),
                _peak(k, INPUT) + RNG: (
                    "You counted the generator's state only once. Each checkpoint keeps its own."
                ),
                _peak(8, KEPT): (
                    "You counted a checkpoint around all eight layers. Only k of them have one."
                ),
                _peak(-k, KEPT): "Your peak grows with k. Each checkpoint reduces it.",
                _peak(k, KEPT) + LAYER: _RECOMPUTED,
                _peak(k - 1, KEPT): _RECOMPUTED,
            },
        )
        if not verdict:
            return replace(
                verdict, message=text("For k = {k}: {message}", k=k, message=verdict.message)
            )
    return right(
        "Right for every k from 0 to 7: each checkpoint removes the bytes of a layer, and keeps"
        " its input and the generator's state."
    )


@exercise(
    hint=(
        "Backward begins with the last layer. When a layer is recomputed, which layers still have"
        " their activations in memory?",
        "Where is the peak of each network without a checkpoint, and what is recomputed before it?",
    )
)
def check_which_block(answer: Any) -> Verdict:
    """Check a pair of answers about one checkpoint.

    The first one is the layer, of eight without a head, whose checkpoint saves nothing. The second
    one says whether the checkpoint around this layer saves memory in the decoder.
    """
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        return wrong("Give two answers: a layer, and `True` or `False`.", exact=True)
    layer, saves_in_decoder = answer
    if layer is None or layer is ...:
        return not_answered()
    if isinstance(layer, str) or layer in (-1, 8):
        return wrong("Give the layer's number. The layers are numbered from 0 to 7.", exact=True)
    verdict = expect_number(
        layer,
        7,
        wrong_answers={
            0: (
                "Layer 0 is recomputed last, when the activations of all other layers have been"
                " released. Around this layer, a checkpoint saves the layer and keeps its input."
            ),
            6: (
                "When layer 6 is recomputed, the activations of layer 7 have been released."
                " Its checkpoint saves a little less than most others, but not nothing."
            ),
        },
    )
    if not verdict:
        return verdict
    if saves_in_decoder is None or saves_in_decoder is ...:
        return wrong("The layer is right. Answer the second question, too.", exact=True)
    if saves_in_decoder not in (True, False):
        return wrong("Give two answers: a layer, and `True` or `False`.", exact=True)
    if not saves_in_decoder:
        return wrong(
            "The layer is right, but in the decoder its checkpoint saves memory. The head and the"
            " loss run after the last layer, and their tensors are released before this layer is"
            " recomputed.",
            exact=True,
        )
    return right(
        "Right: of the eight layers alone, the last one is recomputed while all others are still in"
        " memory. In the decoder, the peak comes earlier, in the backward pass of the loss."
    )


@exercise(
    hint=(
        (
            "A chunk's logits must be released after its forward. Which sums of the chunks give the"
            " mean of all tokens?"
        ),
        (
            "Put the product and the loss of one chunk into a function, and a checkpoint around"
            " each call. `split` cuts a tensor into chunks, of which the last may be shorter."
        ),
    )
)
def check_loss_in_pieces(function: Any) -> Verdict:
    """Check `function(hidden, weight, targets, chunk)`, a loss computed in chunks.

    It must return the mean loss over the targets that count, with equal gradients, and must never
    hold all the logits.
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
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            return wrong("Return a tensor with a graph.", exact=True)
        kept = meter.live_bytes
        if not torch.allclose(loss, losses.mean(), rtol=1e-4):
            return _another_loss(float(loss.detach()), losses.detach())
        try:
            (3 * loss).backward()  # as if the loss were scaled, or one of several
        # cross_entropy got rows of one chunk and targets of another, or both of the last chunk
        except (ValueError, CheckpointError) as error:
            if not any(part in f"{error}" for part in ("batch_size", "different metadata")):
                raise
            verdict = (
                "Backward calls the function of each chunk again, after the loop has ended."
                " Pass the chunk's rows and targets to it as arguments."
            )
            return wrong(verdict, exact=True)
    for name, tensor, gradient in zip(
        ("hidden", "weight"), (hidden, weight), expected, strict=True
    ):
        if tensor.grad is not None and _close(tensor.grad, gradient):
            return wrong(
                "You return the gradient of an unscaled loss. Multiply it by the gradient"
                " that arrives in backward. Here the loss was multiplied by 3.",
                exact=True,
            )
        if tensor.grad is None or not _close(tensor.grad, 3 * gradient):
            return wrong(
                text(
                    "Your gradient of {name} differs from that of the whole loss computed at once.",
                    name=f"`{name}`",
                )
            )
    sizes = {"kept": kept, "peak": meter.peak_bytes, "logits": logits}
    if kept > logits // 2:
        message = (
            "Between forward and backward you keep {kept:,} bytes. Each chunk still keeps its"
            " logits or log-softmax."
        )
        return wrong(
            text(message, kept=kept),
            hint="Put a checkpoint around each chunk, and include the product that computes"
            " its logits.",
        )
    with MemoryMeter() as whole:
        function(hidden, weight, targets, 240).backward()
    # If all tokens are in one chunk, backward has three tensors of the size of all logits at once.
    if whole.peak_bytes < 2 * logits:
        if abs(whole.peak_bytes - meter.peak_bytes) < 0.1 * meter.peak_bytes:
            return wrong(
                "The peak is the same if all tokens are in one chunk. Does your code use `chunk`?",
                exact=True,
            )
        return wrong(
            "You took `chunk` for the number of chunks. It is the number of tokens in a"
            " chunk, so `chunk` = 240 must give one chunk here.",
            exact=True,
        )
    _leaves_out_ignored_targets(function, hidden.detach(), weight.detach(), targets)
    if meter.peak_bytes > 1.5 * logits:
        message = (
            "At the peak {peak:,} bytes are live, and all the logits have {logits:,}. Your"
            " code still has all of them in memory at some moment."
        )
        return wrong(text(message, peak=sizes["peak"], logits=logits))
    return right(
        text(
            "Right: you keep {kept:,} bytes, and the peak is {peak:,} bytes. All the logits"
            " would take {logits:,}.",
            **sizes,
        )
    )


def _close(one: Tensor, other: Tensor) -> bool:
    """Return whether gradients are equal up to the rounding of sums in another order."""
    return torch.allclose(one, other, rtol=1e-3, atol=1e-6)


def _leaves_out_ignored_targets(
    function: Callable, hidden: Tensor, weight: Tensor, targets: Tensor
) -> None:
    """Refuse a loss that counts targets of -100, which exist only outside one whole chunk of 64."""
    ignored = targets.clone()
    ignored[40:130] = -100
    rows = hidden.clone().requires_grad_()
    wanted = functional.cross_entropy(rows @ weight.T, ignored)
    (expected,) = torch.autograd.grad(wanted, rows)
    loss = function(rows, weight, ignored, 64)
    loss.backward()
    if torch.isnan(loss):
        _refuse(
            "Your loss is not a number, because a chunk whose targets are all −100 has no mean."
            " Take the sum of each chunk, and divide once, at the end."
        )
    if torch.allclose(loss * len(targets), wanted * (ignored != -100).sum(), rtol=1e-4):
        _refuse(
            "You divide by the number of all targets, but targets of −100 do not count."
            " Divide by `(targets != -100).sum()`."
        )
    if not torch.allclose(loss, wanted, rtol=1e-4) or not _close(rows.grad, expected):
        _refuse(
            "Your loss is wrong if some targets are −100. Leave them out of the sum and out"
            " of the number that you divide by, as `F.cross_entropy` does."
        )


_DIVIDED_BY_CHUNKS = (
    "You divided by the size or by the number of the chunks. Divide by the number of targets that"
    " count."
)


def _another_loss(loss: float, losses: Tensor) -> Verdict:
    """Return the verdict on a wrong loss of chunks of 64 tokens, with its mistake if it is known.

    Args:
        loss: The reader's loss.
        losses: Loss of each of the 240 tokens.
    """
    parts = losses.split(64)
    reasons = {
        float(
            torch.stack([part.mean() for part in parts]).mean()
        ): "You took the mean of the chunks' means. The last chunk is shorter, so its tokens"
        " count for more.",
        float(losses.sum()): "You returned the sum of the losses. Return the mean.",
        sum(float(part.mean()) for part in parts)
        / 240: 'You added up the chunks\' means. Add up their sums, with `reduction="sum"`.',
        float(losses.sum()) / 64: _DIVIDED_BY_CHUNKS,
        float(losses.sum()) / 4: _DIVIDED_BY_CHUNKS,
        float(losses[:192].mean()): "You left out the last chunk.",
        float(losses[:192].sum() / 240): "You left out the last chunk.",
    }
    for mistaken, reason in reasons.items():
        if abs(loss - mistaken) < 1e-4 * abs(mistaken):
            return wrong(text("Your loss is wrong. {reason}", reason=text(reason)), exact=True)
    return wrong(
        text(
            "Your loss is {found}, but it must be {wanted}.",
            found=f"{loss:.4f}",
            wanted=f"{float(losses.mean()):.4f}",
        )
    )


@exercise(
    hint=(
        "See `torch.get_rng_state` and `torch.random.fork_rng`.",
        (
            "Which state of the generator must the second run begin with, and which state must the"
            " generator have afterwards?"
        ),
    )
)
def check_dropout_checkpoint(function: Any) -> Verdict:
    """Check a checkpoint `function(block, x)`, or a Function, for blocks with dropout.

    It must repeat the same mask and must not change later random numbers.
    """
    function, runs = getattr(function, "apply", function), []

    def block(x: Tensor) -> Tensor:
        runs.append(1)
        return functional.dropout(x * 1.0, 0.5)

    def draw_numbers(goes_backward: bool) -> tuple[list[tuple[Tensor, Tensor]], list[int], Tensor]:
        """Return inputs and outputs of two blocks, counts of runs, and numbers drawn at the end."""
        torch.manual_seed(seed_of(0))
        torch.rand(5)  # drawn by earlier layers
        runs.clear()
        inputs = [torch.ones(1000, requires_grad=True) for _ in range(2)]
        outputs = [function(block, x) for x in inputs]
        if any(output is None or output is ... for output in outputs):
            if runs:
                _refuse(
                    "Your function runs the block and returns nothing. Return the block's output."
                )
            raise NotImplementedError
        counts = [len(runs)]
        torch.rand(3)  # drawn by later layers before backward
        if goes_backward:
            for output in reversed(outputs):
                output.backward(_uneven_gradient(output) + 3)  # zero nowhere
        counts.append(len(runs))
        return list(zip(inputs, outputs, strict=True)), counts, torch.rand(3)

    with torch.random.fork_rng():
        *_, undisturbed = draw_numbers(goes_backward=False)
        blocks, counts, found = draw_numbers(goes_backward=True)
    _two_runs(*(count / 2 for count in counts))
    for x, output in blocks:
        if not torch.equal(output == 0, x.grad == 0):
            return wrong("Your second run drew a different mask.", hint=_ANOTHER_MASK)
        upstream = torch.where(output == 0, 0.0, 2 * (_uneven_gradient(x) + 3))
        if not torch.allclose(x.grad, upstream):
            return wrong(
                "You went backward from the output's sum, as if the gradient that arrives"
                " were all ones. Go backward from that gradient.",
                exact=True,
            )
    if torch.equal(blocks[0][1], blocks[1][1]):
        return wrong(
            "You gave two blocks in a row the same mask. Keep the state that the generator"
            " has when each block begins, and do not set a seed.",
            exact=True,
        )
    if not torch.equal(found, undisturbed):
        return wrong(
            "The random numbers afterwards have changed, because your second run draws from"
            " the generator and does not restore its state. Run it inside"
            " `torch.random.fork_rng()`.",
            exact=True,
        )
    return right(
        "Right: the second run draws the same mask, and later random numbers do not change."
    )


_ANOTHER_MASK = (
    "The mask depends on the generator's state when this block begins. Keep"
    " `torch.get_rng_state()` from before the first run, one state for each call. A seed is"
    " not enough, because other layers have drawn numbers in between."
)


@exercise(
    hint=(
        "Each result that you keep adds its bytes eight times, once per layer. Which results"
        " save the most FLOPs per byte?"
    ),
    raised="Your policy cannot be used: {error}.",
)
def check_policy(operators: Any) -> Verdict:
    """Check operators whose outputs a selective policy keeps.

    The limits are 110 MB for forward and backward, and 1.2 times the FLOPs.
    """
    if not isinstance(operators, list | tuple | set | frozenset):
        return wrong("Return a list of operators.", exact=True)
    if not all(isinstance(operator, OpOverload) for operator in operators):
        return wrong(
            "Write each operator as in the example, `torch.ops.aten.gelu.default`.", exact=True
        )

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
    if any("policy keeps" in f"{each.message}" for each in heard):
        return wrong(
            "You keep an operator that these layers never call, so everything is recomputed."
            " Here `nn.Linear` has a bias and calls `addmm`, not `mm`. Section 1.4 lists the other"
            " operators.",
            exact=True,
        )
    peak, flops = meter.peak_bytes, meter.flops
    ratio = flops / BASELINE.flops
    took = {"peak": f"{peak / 1e6:.1f} MB", "times": f"{ratio:.3f}"}
    if peak > 110e6:
        return wrong(
            text(
                "You keep too much: the peak is {peak}, and the FLOPs are {times} times the"
                " baseline's.",
                **took,
            )
        )
    if ratio > 1.2:
        return wrong(
            text(
                "You recompute too much: the peak is {peak}, and the FLOPs are {times} times"
                " the baseline's.",
                **took,
            )
        )
    # The scores are a·s²·b numbers of 4 bytes, and the context is s·b·h numbers.
    layer = f"{4 * (8 * 8 * 128**2 + 8 * 128 * 256) / 1e6:.1f} MB"
    message = (
        "Right: the peak is {peak}, and the FLOPs are {times} times the baseline's. The"
        " results of attention's two products, the scores and the context, take {layer} per"
        " layer. The scores grow with s²."
    )
    return right(text(message, **took, layer=layer))


@exercise(
    hint=(
        "Add up what is in memory during a chunk's backward: three tensors of the size of its"
        " logits, and the gradients."
    )
)
def check_head_chunk(answer: Any) -> Verdict:
    """Check the largest chunk of the head's loss, a power of two, with a peak of at most 150 MB."""

    def peak(chunk: int) -> int:
        with symbolic():
            hidden = torch.randn(1024, 256, requires_grad=True)
            vocabulary = torch.nn.Parameter(torch.randn(32000, 256))
            targets = torch.randint(32000, (1024,))
            with MemoryMeter() as meter:
                checkpointed_loss(hidden, vocabulary, targets, chunk=chunk).backward()
        return meter.peak_bytes

    wanted = "Return a power of two from 1 to 1024."
    _, here, _ = largest_that_fits(answer, [2**i for i in range(11)], peak, 150_000_000, wanted)
    return right(text("Right: the peak is {here:,} bytes.", here=here))


_LIMIT = 80_000_000


@cache
def _batch(seed: int) -> dict[str, Tensor]:
    """Return 8 sequences whose prompts and paddings have different lengths.

    The last sequence has no prompt, so its first label is not -100.
    """
    tokens = random_tokens(8, 127, VOCABULARY, seed=seed)
    places, sequences = torch.arange(128), torch.arange(8)[:, None]
    ignored = (places < 9 * (7 - sequences)) | (places >= 128 - 5 * sequences)
    return {"input_ids": tokens, "labels": tokens.masked_fill(ignored, -100)}


@cache
def _expected_cost(seed: int) -> Cost:
    return cost_of(llama(VOCABULARY), _batch(seed))  # pyrefly: ignore[bad-return]


@exercise(
    hint=(
        (
            "Call `model.activation_checkpointing_enable()`. Take the hidden states from"
            " `model.model(tokens)`, and give them to your loss of section 2.8."
        ),
        (
            "Position t predicts the label of position t + 1. Which position of a sequence has no"
            " label, and which label has no position? Leave both out before you flatten."
        ),
    )
)
def check_in_chunks(function: Any) -> Verdict:
    """Check `function(model, tokens, labels)`, which returns the loss of a Llama.

    The layers must be checkpointed and the loss must be computed in chunks. Loss and gradients must
    be the model's own, and the peak of forward and backward at most 80 MB.
    """
    model, runs = llama(VOCABULARY), []
    layers = model.model.layers
    for layer in layers:
        layer.mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    seed = seed_of(0)
    _expected_cost(seed), _mistaken_losses(seed)  # computed before the meter starts

    def loss_of(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
        loss = function(model, tokens, labels)
        if loss is None or loss is ...:
            raise NotImplementedError
        if not isinstance(loss, Tensor) or not loss.requires_grad or loss.numel() != 1:
            raise WrongAnswer(
                "Return the loss, a tensor with a graph. The check calls its backward."
            )
        _refuse_another_loss(float(loss.detach()), seed)
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cost = cost_of(model, _batch(seed), loss_of)
    if not equal_gradients(cost.gradients, _expected_cost(seed).gradients):
        raise WrongAnswer(
            "Your loss is right, but the gradients are not those of the model. Do not cut the"
            " graph between the loss and the layers.",
            exact=True,
        )
    sizes = {"peak": f"{cost.peak_bytes / 1e6:.1f}"}
    if cost.peak_bytes > _LIMIT and not model.training:
        message = (
            "The layers are not recomputed, because `transformers` uses checkpoints only in"
            " training mode. Do not call `model.eval()`."
        )
        raise WrongAnswer(message, exact=True)
    if cost.peak_bytes > _LIMIT and len(runs) < 2 * len(layers):
        message = (
            "The peak is {peak} MB, because layers are not recomputed. Checkpoint all of them."
        )
        raise WrongAnswer(text(message, **sizes), exact=True)
    if cost.peak_bytes > _LIMIT:
        message = (
            "The peak is {peak} MB, because too many logits are in memory at once. Compute the loss"
            " in chunks of 128 tokens."
        )
        raise WrongAnswer(text(message, **sizes), exact=True)
    message = "Right: loss and gradients are those of the model, and the peak is {peak} MB."
    return right(text(message, **sizes))


def _refuse_another_loss(found: float, seed: int) -> None:
    """Refuse a loss that is not the model's, with the mistake if it is known."""
    wanted = _expected_cost(seed).loss
    if abs(found - wanted) <= 1e-5 * wanted:
        return
    for mistaken, reason in _mistaken_losses(seed).items():
        if abs(found - mistaken) <= 1e-5 * mistaken:
            raise WrongAnswer(text("Your loss is wrong. {reason}", reason=text(reason)), exact=True)
    message = "Your loss is {found}, but it must be {wanted}."
    raise WrongAnswer(text(message, found=f"{found:.4f}", wanted=f"{wanted:.4f}"))


@cache
def _mistaken_losses(seed: int) -> dict[float, str]:
    """Return the losses of common mistakes, with the sentence about each."""
    labels, model = _batch(seed)["labels"], llama(VOCABULARY)
    with torch.no_grad():
        logits = model(_batch(seed)["input_ids"]).logits
    counted = int((labels[:, 1:] != -100).sum())

    def mean(logits: Tensor, targets: Tensor) -> float:
        return float(nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten()))

    shifted = mean(logits[:, :-1], labels[:, 1:])
    of_rows = [mean(one[:-1], targets[1:]) for one, targets in zip(logits, labels, strict=True)]
    return {
        mean(logits, labels): (
            "A position predicts the next token. Pair the hidden states `[:, :-1]` with the labels"
            " `[:, 1:]`."
        ),
        mean(logits[:, 1:], labels[:, :-1]): (
            "You moved the labels in the wrong direction. The hidden states `[:, :-1]` predict the"
            " labels `[:, 1:]`."
        ),
        mean(logits.flatten(0, 1)[:-1], labels.flatten()[1:]): (
            "The last position of a sequence predicts nothing. Leave it out in each sequence,"
            " before you flatten."
        ),
        shifted * counted: "You returned the sum of the losses. Return the mean.",
        shifted * counted / labels.numel(): _ALL,
        shifted * counted / labels[:, 1:].numel(): _ALL,
        shifted * counted / int((labels != -100).sum()): (
            "You counted the targets before the shift. The first label of a sequence is not"
            " predicted, so it does not count."
        ),
        sum(of_rows) / len(of_rows): (
            "You took the mean of the sequences' means. Sequences with fewer targets must count"
            " for less."
        ),
    }


_ALL = (
    "You divide by the number of all targets, but targets of −100 do not count. Divide by"
    " `(targets != -100).sum()`."
)
