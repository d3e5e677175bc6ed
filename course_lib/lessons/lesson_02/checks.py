"""The exercises of lesson 02."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from course_lib.checkpoint import checkpoint_blocks, checkpointed_loss
from course_lib.memory import MemoryMeter, symbolic
from course_lib.memory.measurement import flop_counter
from course_lib.models import Decoder, random_tokens
from course_lib.teaching import Verdict, expect_number, text
from course_lib.teaching.exercises import (
    Refused,
    exercise,
    largest_that_fits,
    not_answered,
    right,
    wrong,
)

# bytes, of the course's decoder
PLAIN, LAYER, INPUT, RNG = 277_682_584, 20_987_904, 1_048_576, 5_056


@exercise(
    hint=(
        (
            "Forward: run the block, keep x. Backward: run it again with a graph, on an input of"
            " its own."
        ),
        (
            "`again = x.detach().requires_grad_()`; the block under `torch.enable_grad()`; then "
            "`torch.autograd.backward(output, gradient)`, and `again.grad` is what x gets."
        ),
    )
)
def check_checkpoint(function: Any) -> Verdict:
    """A checkpoint `function(block, x)`, or a Function of these: equal gradients, two runs, only
    the input kept."""
    _keeps_its_input_only(getattr(function, "apply", function))
    return right("Right: equal gradients, two runs, nothing kept but the input.")


@exercise(
    hint=(
        (
            "`forget` gives the next number. `bring_back` runs the block if `found` is empty, then"
            " looks the number up."
        ),
        (
            "`numbers = count()` stands outside, and `forget` returns `next(numbers)`. In"
            " `bring_back`: `with torch.enable_grad(), saved_tensors_hooks(collect, bring_back)`,"
            " run the block on `x.detach().requires_grad_(x.requires_grad)`; return"
            " `found[number]`."
        ),
    )
)
def check_hooks(function: Any) -> Verdict:
    """The same by saved-tensor hooks; also for an input that needs no gradient, where the block's
    weight needs one."""
    try:
        _keeps_its_input_only(function)
    except IndexError:
        return wrong(
            "`found` is shorter than the numbers. The second run must save what the first one"
            " saved: with a graph, under hooks that collect, on an input that requires a gradient"
            " if `x` does.",
            exact=True,
        )
    weight, data = (
        torch.linspace(-1, 1, 64).view(8, 8).requires_grad_(),
        torch.linspace(0, 1, 64).view(8, 8),
    )
    output = function(lambda x: (x @ weight).exp(), data)
    if output.requires_grad:
        output.backward(_uneven(data))
    (expected,) = torch.autograd.grad((data @ weight).exp(), weight, _uneven(data))
    if weight.grad is None or not torch.allclose(weight.grad, expected):
        return wrong(
            "Where the input needs no gradient, the block's weight still needs its own.", exact=True
        )
    return right(
        "Right: equal gradients, two runs, nothing kept but the input, which may need no gradient."
    )


def _uneven(like: Tensor) -> Tensor:
    """A gradient as a loss sends it: other at each place, of both signs."""
    return torch.linspace(-1, 2, like.numel()).view_as(like)


_RETURNED = (
    "Backward returns a gradient for each argument of forward: `None` for the block, then that of"
    " `x`."
)
# What PyTorch says of some slips, and what it means here.
_SLIPS = {
    "does not require grad": (
        "In backward there are no graphs: run the block again under `torch.enable_grad()`."
    ),
    "incorrect number of gradients": _RETURNED,
    "returned a gradient different than None": _RETURNED,
    "only for scalar outputs": (
        "Hand the gradient that has arrived to `torch.autograd.backward`, after the output."
    ),
    "unpack_hook expected to be a Tensor": (
        "`bring_back` must return a tensor: the one that the number stands for."
    ),
}


def _keeps_its_input_only(function: Callable) -> None:
    """Refuse a checkpoint whose gradients, runs, or bytes between forward and backward are not what
    they should be."""
    weight = torch.linspace(-1, 1, 64).view(8, 8).requires_grad_()
    # far larger than the state of a generator
    x = torch.linspace(0, 1, 2**15).view(-1, 8).requires_grad_()
    runs = []

    def block(x: Tensor) -> Tensor:
        runs.append(1)
        y = x @ weight
        for _ in range(8):
            y = y.sin().tanh().exp().sub(1)
        return y

    expected = torch.autograd.grad(block(x), (x, weight), _uneven(x))
    all_ones = torch.autograd.grad(block(x).sum(), (x, weight))
    runs.clear()
    with MemoryMeter() as meter:
        output = function(block, x)
        if output is None and runs:
            _refuse("It runs the block and returns nothing: the block's output is wanted.")
        if output is None or output is ...:
            raise NotImplementedError
        kept = meter.live_bytes - output.nbytes
    before = len(runs)
    if before == 0 and torch.equal(output, x):  # the cell as it came
        raise NotImplementedError
    try:
        output.backward(_uneven(x))
    except (RuntimeError, TypeError) as error:
        for said, meant in _SLIPS.items():
            if said in str(error):
                raise Refused(meant, exact=True) from None
        raise
    if (before, len(runs)) == (1, 1) and kept <= 2 * x.nbytes:
        _refuse("Backward has computed nothing again: it must run the block a second time.")
    _two_runs(before, len(runs))
    if weight.grad is None:
        _refuse(
            "The block's weight has no gradient: `torch.autograd.grad` gives only what it is asked"
            " for."
        )
    if x.grad is None:
        _refuse(
            "The input gets no gradient: the second run's must require one, and its `.grad` is what"
            " goes back."
        )
    found = (x.grad, weight.grad)
    if torch.allclose(x.grad, 2 * expected[0]):
        _refuse(
            "The gradient of the input is counted twice: the second run needs an input of its own,"
            " detached."
        )
    if all(map(torch.allclose, found, all_ones)):
        _refuse(
            "The gradient that arrives is not all ones. Go backward from it, not from the output's"
            " sum."
        )
    if not all(map(torch.allclose, found, expected)):
        raise Refused("The gradients differ from autograd's.")
    if kept > 2 * x.nbytes:  # a copy of the input may be among them
        said = "Between forward and backward {kept:,} bytes more are live; the input has {input:,}."
        raise Refused(text(said, kept=kept, input=x.nbytes))


def _refuse(message: str) -> None:
    raise Refused(message, exact=True)


def _two_runs(before: int, after: int) -> None:
    if (before, after) == (1, 1):
        _refuse("The block ran once: everything was kept, and nothing is computed again.")
    if (before, after) != (1, 2):
        raise Refused(
            text(
                "Runs of the block before backward: {before}, in all: {after}. It takes 1 and 2.",
                before=before,
                after=after,
            )
        )


@exercise(
    hint=(
        (
            "Start from the plain peak. What does a checkpointed layer no longer keep, and what"
            " does it still keep?"
        ),
        (
            "Each checkpoint takes a layer's bytes away and leaves b · s · h numbers and the"
            " generator's state."
        ),
    )
)
def check_peak_formula(answer: Any) -> Verdict:
    """A function of k: the step's peak with checkpoints around the first k layers, for k below
    8."""
    for k in (0, 1, 4, 7):
        given = answer(k)
        if given is None or given is ...:
            return not_answered()
        verdict = expect_number(
            given,
            PLAIN - k * (LAYER - INPUT - RNG),
            wrong_answers={
                PLAIN - k * LAYER: "Each checkpoint keeps its layer's input.",
                PLAIN
                - k
                * (
                    LAYER - INPUT
                ): "Each checkpoint keeps the state of the random number generator, too.",
                PLAIN
                - k * (LAYER - RNG): "Each checkpoint keeps its layer's input, b · s · h numbers.",
                PLAIN - k * (LAYER - INPUT // 4 - RNG): "The input's elements take 4 bytes each.",
                PLAIN - 8 * (LAYER - INPUT - RNG): "Only k of the eight layers have a checkpoint.",
                PLAIN + k * (LAYER - INPUT - RNG): "A checkpoint takes bytes away.",
                PLAIN
                - k * (LAYER - INPUT - RNG)
                + LAYER: "At that moment no layer has come back yet.",
                PLAIN
                - (k - 1) * (LAYER - INPUT - RNG): "At that moment no layer has come back yet.",
            },
        )
        if not verdict:
            return replace(
                verdict, message=text("For k = {k}: {message}", k=k, message=verdict.message)
            )
    return right(
        "Right for k = 0, 1, 4 and 7: each checkpoint takes away a layer's bytes and leaves its"
        " input."
    )


@exercise(
    hint=(
        (
            "A function for the summed loss of a chunk; a checkpoint around each call; add up,"
            " divide at the end."
        ),
        (
            '`hidden.split(chunk)` and `targets.split(chunk)`; `reduction="sum"`; divide by'
            " `len(targets)`."
        ),
    )
)
def check_loss_in_pieces(function: Any) -> Verdict:
    """`function(hidden, weight, targets, chunk)`: the mean loss, equal gradients, and at no time
    all the logits."""
    generator = torch.Generator().manual_seed(0)
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
            return wrong("A tensor with a graph is wanted.")
        kept = meter.live_bytes
        if not torch.allclose(loss, losses.mean(), rtol=1e-4):
            return _another_loss(float(loss.detach()), losses.detach())
        try:
            loss.backward()
        except ValueError as error:  # cross_entropy's, of a chunk's rows with another one's targets
            if "batch_size" not in f"{error}":
                raise
            said = (
                "Backward calls each chunk's function again, when the loop is over: hand it the"
                " chunk's targets too."
            )
            return wrong(said, exact=True)
    for name, tensor, gradient in zip(
        ("hidden", "weight"), (hidden, weight), expected, strict=True
    ):
        if tensor.grad is None or not torch.allclose(tensor.grad, gradient, rtol=1e-3, atol=1e-6):
            return wrong(
                text(
                    "The gradient of {name} differs from that of the plain loss.", name=f"`{name}`"
                )
            )
    sizes = {"kept": kept, "peak": meter.peak_bytes, "logits": logits}
    if kept > logits // 2:
        message = (
            "Between forward and backward {kept:,} bytes are live: each chunk keeps its logits or"
            " log-softmax."
        )
        return wrong(
            text(message, kept=kept),
            hint="Put a checkpoint around each chunk, its product included.",
        )
    with MemoryMeter() as whole:
        function(hidden, weight, targets, 240).backward()
    if whole.peak_bytes < 2 * logits:  # three tensors of their size, were all tokens one chunk
        if abs(whole.peak_bytes - meter.peak_bytes) < 0.1 * meter.peak_bytes:
            return wrong(
                "With all tokens as one `chunk` the peak is the same: is `chunk` used?", exact=True
            )
        return wrong(
            "With `chunk` = 240 there are many: it is a number of tokens, not of chunks.",
            exact=True,
        )
    if meter.peak_bytes > 1.5 * logits:
        message = (
            "At the peak {peak:,} bytes are live. All the logits have {logits:,}: they exist whole"
            " somewhere."
        )
        return wrong(text(message, peak=sizes["peak"], logits=logits))
    return right(
        text(
            "Right: {kept:,} bytes are kept and {peak:,} live at the peak, where all the logits"
            " have {logits:,}.",
            **sizes,
        )
    )


def _another_loss(loss: float, losses: Tensor) -> Verdict:
    parts = losses.split(64)
    reasons = {
        float(
            torch.stack([part.mean() for part in parts]).mean()
        ): "It is a mean of means: the last chunk is shorter, and would count for more.",
        float(losses.sum()): "It is the sum of the losses; the mean is wanted.",
        sum(float(part.mean()) for part in parts)
        / 240: 'Each chunk gives its mean: take the sum, `reduction="sum"`.',
        float(losses.sum()) / 64: "Divide by the number of all tokens, `len(targets)`.",
        float(losses.sum()) / 4: "Divide by the number of all tokens, `len(targets)`.",
        float(losses[:192].mean()): "The last chunk is missing.",
        float(losses[:192].sum() / 240): "The last chunk is missing.",
    }
    for mistaken, reason in reasons.items():
        if abs(loss - mistaken) < 1e-4 * abs(mistaken):
            return wrong(text("The loss differs: {reason}", reason=text(reason)))
    return wrong(
        text(
            "The loss is {found}; it takes {wanted}.",
            found=f"{loss:.4f}",
            wanted=f"{float(losses.mean()):.4f}",
        )
    )


@exercise(
    hint=(
        "See `torch.get_rng_state` and `torch.random.fork_rng`.",
        (
            "Forward keeps `torch.get_rng_state()`; backward sets it inside"
            " `torch.random.fork_rng()`, for the second run."
        ),
    )
)
def check_dropout_checkpoint(function: Any) -> Verdict:
    """A checkpoint `function(block, x)`, or a Function: it draws the same mask again and disturbs
    nothing after it."""
    function, runs, before = getattr(function, "apply", function), [], []

    def block(x: Tensor) -> Tensor:
        runs.append(1)
        return functional.dropout(x * 1.0, 0.5)

    def after(run: Callable) -> tuple:
        x = torch.ones(1000, requires_grad=True)
        output = run(block, x)
        before.append(len(runs))
        torch.rand(3)  # as later layers draw theirs before backward
        output.backward(_uneven(x) + 3)  # nowhere zero
        upstream = torch.where(output == 0, 0.0, 2 * (_uneven(x) + 3))
        return (
            torch.equal(output == 0, x.grad == 0),
            torch.allclose(x.grad, upstream),
            torch.rand(3),
        )

    with torch.random.fork_rng():
        torch.manual_seed(0)
        *_, expected = after(lambda block, x: block(x))
        torch.manual_seed(0)
        runs.clear()
        same, equal, found = after(function)
    _two_runs(before[-1], len(runs))
    if not same:
        return wrong("The second run drew another mask.")
    if not equal:
        return wrong(
            "The gradient that arrives is not all ones. Go backward from it, not from the output's"
            " sum.",
            exact=True,
        )
    if not torch.equal(found, expected):
        return wrong("The random numbers afterwards have changed.")
    return right("Right: the same mask, and undisturbed random numbers.")


@exercise(
    hint=(
        "Each kept result adds its bytes, times eight layers. Which results save most FLOPs for"
        " their bytes?"
    ),
    raised="The policy cannot be used: {error}.",
)
def check_policy(operators: Any) -> Verdict:
    """Operators for a selective policy to keep: 110 MB for forward and backward, and 1.2 times the
    FLOPs at most."""
    if not isinstance(operators, list | tuple | set):
        return wrong("Give a list of operators.")
    if not all(isinstance(operator, torch._ops.OpOverload) for operator in operators):
        return wrong(
            "Name each operator as the example does: `torch.ops.aten.gelu.default`.", exact=True
        )

    with symbolic():
        decoder = Decoder(vocabulary=2048, hidden=256, heads=8, layers=8, sequence=128)
        tokens = random_tokens(8, 128, 2048)
        checkpoint_blocks(decoder, "layers.*", policy=list(operators))
        with flop_counter() as counter, MemoryMeter(decoder) as meter:
            decoder.loss(tokens).backward()
    peak, flops = meter.peak_bytes, counter.get_total_flops()
    ratio = flops / 45_097_156_608
    took = {"peak": f"{peak / 1e6:.1f} MB", "times": f"{ratio:.3f} ×"}
    if peak > 110e6:
        return wrong(text("It keeps too much: {peak}, {times}.", **took))
    if ratio > 1.2:
        return wrong(text("It computes too much again: {peak}, {times}.", **took))
    # S has a·s²·b numbers, the context s·b·h
    layer = f"{4 * (8 * 8 * 128**2 + 8 * 128 * 256) / 1e6:.1f} MB"
    message = (
        "Right: {peak}, {times}. Attention's two products, the scores and the context, take {layer}"
        " a layer; the scores grow with s²."
    )
    return right(text(message, **took, layer=layer))


@exercise(
    hint=(
        "Add up what is there in a chunk's backward: three tensors of its logits' size, and"
        " gradients."
    )
)
def check_head_chunk(answer: Any) -> Verdict:
    """The largest power of two for the loss head's chunk, for a peak of at most 150 MB."""

    def peak(chunk: int) -> int:
        with symbolic():
            hidden = torch.randn(1024, 256, requires_grad=True)
            vocabulary = torch.nn.Parameter(torch.randn(32000, 256))
            targets = torch.randint(32000, (1024,))
            with MemoryMeter() as meter:
                checkpointed_loss(hidden, vocabulary, targets, chunk=chunk).backward()
        return meter.peak_bytes

    wanted = "A power of two from 1 to 1024 is wanted."
    _, here, _ = largest_that_fits(answer, [2**i for i in range(11)], peak, 150_000_000, wanted)
    return right(text("Right: {here:,} bytes.", here=here))
