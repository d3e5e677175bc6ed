"""Experiments of lesson 02's optional sections.

The comparison of reentrant and non-reentrant checkpoints is in `modes.py`.
"""

import contextlib
import io
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from course_lib.checkpoint import checkpoint_blocks
from course_lib.memory import MemoryMeter
from course_lib.memory.measurement import flop_counter
from course_lib.models import Attention, DecoderLayer, deep_mlp
from course_lib.teaching import Table, table, text

from .own_code import FOR_USERS, VOCABULARY, llama, llama_batch, recorded_warnings


class _Block(nn.Module):
    """A block that multiplies its input by a factor; subclasses compute the factor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.norm = nn.Parameter(torch.ones(8)), nn.BatchNorm1d(8)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight * self.factor(x)).exp()

    def factor(self, x: Tensor) -> Any:
        raise NotImplementedError


class _Dropout(_Block):
    def factor(self, x: Tensor) -> Any:
        return F.dropout(torch.ones_like(x), 0.5)


class _PythonRandom(_Block):
    def factor(self, x: Tensor) -> Any:
        return random.random()


class _Counter(_Block):
    def factor(self, x: Tensor) -> Any:
        self.calls += 1
        return self.calls


class _GlobalVariable(_Block):
    calls_of_all = count(1)

    def factor(self, x: Tensor) -> Any:
        return next(_GlobalVariable.calls_of_all)


class _BatchNorm(_Block):
    def factor(self, x: Tensor) -> Any:
        return self.norm(x)


def repeats() -> Table:
    """Return a table that shows which random numbers and states a recomputation repeats correctly.

    There is one column for each setting of the checkpoint. ✓ means that a step with the checkpoint
    gives the same gradients, state and later random numbers as a step without a checkpoint.
    """
    cases = {
        "PyTorch's random numbers": _Dropout,
        "Python's random numbers": _PythonRandom,
        "a counter in the module": _Counter,
        "a global variable": _GlobalVariable,
        "BatchNorm's running statistics": _BatchNorm,
    }
    ways: list[dict[str, Any]] = [
        {"preserve_rng_state": False},
        {},
        {"preserve_module_state": True},
    ]
    rows = [(name, *(_repeats(case, options) for options in ways)) for name, case in cases.items()]
    names = ("`preserve_rng_state=False`", "default", "`preserve_module_state=True`")
    return table(["", *names], rows)


def _repeats(case: type[_Block], options: dict[str, Any]) -> str:
    """Return "✓" if a checkpoint with `options` changes nothing in a step, "✗", or "error"."""
    expected = _after_a_step(case)
    try:
        found = _after_a_step(case, options)
    except RuntimeError:
        return "error"
    return "✓" if all(map(torch.equal, found, expected)) else "✗"


def _after_a_step(case: type[_Block], options: dict[str, Any] | None = None) -> list[Tensor]:
    """Return the gradient, the state and the next random numbers after one step.

    With `options`, the block runs in a checkpoint with these options.
    """
    _GlobalVariable.calls_of_all = count(1)
    global_state = random.getstate()
    random.seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        block = case()
        model = nn.Sequential(block)
        if options is not None:
            checkpoint_blocks(model, "0", **options)
        try:
            model(torch.linspace(-1, 1, 32).view(4, 8)).square().sum().backward()
            drawn = torch.tensor([torch.rand(()), random.random()])
        finally:
            random.setstate(global_state)
    return [
        torch.as_tensor(block.weight.grad),
        torch.tensor(block.calls),
        *block.norm.buffers(),
        drawn,
    ]


@contextlib.contextmanager
def statistics_unchanged(norm: nn.BatchNorm1d) -> Iterator[None]:
    """Keep a BatchNorm's running statistics constant during forward passes in a `with` block."""
    momentum, tracked = norm.momentum, norm.num_batches_tracked.clone()
    norm.momentum = 0.0
    try:
        yield
    finally:
        norm.momentum = momentum
        norm.num_batches_tracked.copy_(tracked)


def attention_saving(length: int) -> int:
    """Return by how many bytes checkpoints lower the peak if an attention layer runs three times.

    The three runs follow one another: each takes the output of the previous run as its input.

    Args:
        length: Sequence length in tokens.

    Raises:
        ValueError: The outputs with and without checkpoints differ.
    """
    attention, peaks, outputs = Attention(128, 4), [], []
    for checkpointed in (False, True):
        y = torch.linspace(-1, 1, length * 128).view(1, length, 128)
        attention.zero_grad()
        with MemoryMeter() as meter:
            for _ in range(3):
                y = checkpoint(attention, y, use_reentrant=False) if checkpointed else attention(y)
            y.sum().backward()
        peaks.append(meter.peak_bytes)
        outputs.append(y.detach())
    if not torch.equal(*outputs):
        raise ValueError(
            "the outputs with and without checkpoints must be equal, but they differ, so the peaks"
            " cannot be compared"
        )
    return peaks[0] - peaks[1]


def train(checkpointed: bool) -> tuple[list[float], list[str]]:
    """Train a post-norm decoder layer for three steps with Adam, and log the loss of each step.

    Args:
        checkpointed: Whether the layer runs in a checkpoint.

    Returns:
        The losses, and the lines of the log, each with its file, function and line number.
    """
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    handler.setFormatter(
        logging.Formatter("%(filename)s, %(funcName)s, line %(lineno)d: %(message)s")
    )
    logger = logging.getLogger("lesson_02")
    logger.addHandler(handler)
    logger.level, logger.propagate = logging.INFO, False
    layer = DecoderLayer(512, 8, norm_first=False)
    adam, losses = torch.optim.Adam(layer.parameters()), []
    x = torch.linspace(-1, 1, 4 * 16 * 512).view(4, 16, 512)
    for step in (1, 2, 3):
        y = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
        loss = F.mse_loss(y, x.flip(1))
        loss.backward()
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
        logger.info("step %d: loss %.3f", step, losses[-1])
    return losses, log.getvalue().splitlines()


def compare_kept_outputs(
    gradients: Callable[[Tensor], list[Tensor]],
    block: nn.Module,
    x: Tensor,
    contexts: Mapping[str, Callable | None],
) -> Table:
    """Return a table with the FLOPs of a checkpointed block, and whether its gradients are right.

    There is one row for each `context_fn`. Gradients are right if they are equal to those of the
    block without a checkpoint.

    Args:
        gradients: Function that takes the block's output, runs backward and returns the gradients.
        block, x: Block and its input.
        contexts: Dict from the label of a row to the argument `context_fn` of PyTorch's checkpoint.
            None means that the argument is not passed.
    """
    expected, rows = gradients(block(x)), []
    for name, context in contexts.items():
        options = {} if context is None else {"context_fn": context}
        with flop_counter() as counter:
            found = gradients(checkpoint(block, x, use_reentrant=False, **options))
        equal = all(map(torch.equal, expected, found))
        rows.append((name, equal, counter.get_total_flops()))
    return table(["kept", "gradients equal", "FLOPs"], rows)


def statistics_after(contexts: Callable[[nn.BatchNorm1d], tuple]) -> Table:
    """Return a table of a BatchNorm's running statistics after one batch in a checkpoint.

    Args:
        contexts: Function that takes the BatchNorm and returns two context managers: the first for
            the forward pass, the second for the recomputation.
    """
    norm, images = nn.BatchNorm1d(4), torch.linspace(1, 2, 32).view(8, 4).requires_grad_()
    still = partial(contexts, norm)
    checkpoint(norm, images, use_reentrant=False, context_fn=still).exp().sum().backward()
    share = round(float((norm.running_mean / images.detach().mean(0)).mean()), 2)
    row = share, int(norm.num_batches_tracked)
    return table(["running mean / batch mean", "batches counted"], [row])


def peaks_of_segments(run: Callable[[nn.Module, int, Tensor], Tensor]) -> Table:
    """Return a table of the peak of 16 layers that run in 1, 2, 4 and 8 checkpointed segments.

    Args:
        run: Function that runs a network in segments, `run(network, segments, data)`, and returns
            the output.
    """
    network, data, rows = deep_mlp(depth=16, width=256), torch.randn(512, 256), []
    for segments in (1, 2, 4, 8):
        network.zero_grad()
        with MemoryMeter(network) as meter:
            output = run(network, segments, data)
            output.square().mean().backward()
        rows.append((segments, round(meter.peak_bytes / 1e6, 1)))
    return table(["segments", "peak (MB)"], rows)


def trainer_steps(settings: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of the peaks of Hugging Face's Trainer in one step, for several settings.

    Each row has the settings, the peak in MB, and the categories of warnings that were raised.

    Args:
        settings: One dict per row, with arguments of `TrainingArguments` such as
            `gradient_checkpointing`. An empty dict means no checkpoint.
    """
    from transformers import Trainer, TrainingArguments

    rows, batch = [], llama_batch()
    sequences = [dict(zip(batch, each, strict=True)) for each in zip(*batch.values(), strict=True)]
    for added in settings:
        model = llama(VOCABULARY)
        with (
            recorded_warnings() as heard,
            TemporaryDirectory() as folder,
            contextlib.redirect_stdout(io.StringIO()),
        ):
            always = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "max_steps": 1}
            options = {"per_device_train_batch_size": len(sequences), "save_strategy": "no"}
            arguments = TrainingArguments(folder, **always, **options, **added)
            trainer = Trainer(model, arguments, train_dataset=sequences)
            with MemoryMeter(model) as meter:
                trainer.train()
        line = ", ".join(f"{name}={value}" for name, value in added.items())
        kinds = sorted({each.category.__name__ for each in heard if each.category in FOR_USERS})
        label = f"`{line}`" if line else text("no checkpoint")
        rows.append((label, f"{meter.peak_bytes / 1e6:.1f}", ", ".join(f"`{k}`" for k in kinds)))
    return table(["line", "peak (MB)", "warning"], rows)
