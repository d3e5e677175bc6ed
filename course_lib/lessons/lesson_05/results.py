"""Measurements of lesson 05 whose code is not shown in the notebook."""

import inspect
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.accumulation import AccumulatedStep, split
from course_lib.labels import verbatim
from course_lib.models import Decoder
from course_lib.teaching import Table, predictions, table, text

from . import ranks
from .mean_of_means import batch, loss_sum, small_decoder

COUNTS = (1, 4, 16, 64, 256)  # numbers of micro-batches in `errors_of_sums`


def peak_compositions(meters: Mapping[int, Any]) -> Table:
    """Return a table of the peak of a step with micro-batches of several sizes.

    Each row has the operator at which the peak occurs, and the bytes of gradients, activations and
    temporary tensors at the peak.

    Args:
        meters: Dict from the number of sequences per micro-batch to the meter that measured the
            step.
    """
    kinds, rows = ("gradient", "activation", "temporary"), []
    for m, meter in meters.items():
        peak = meter.at_peak()
        rows.append((m, meter.trace(events=False).peak_operator, *(peak[kind] for kind in kinds)))
    columns = ["sequences per micro-batch", "operator at the peak", "gradients (bytes)"]
    return table([*columns, "activations (bytes)", "temporary tensors (bytes)"], rows)


def largest_at_peak(meter: Any) -> Table:
    """Return a table of the four largest activations and temporary tensors at a step's peak, in GB.

    The last row is the sum of all activations and temporary tensors at the peak.

    Args:
        meter: Meter that has measured the step.
    """
    trace = meter.trace()
    made = {span.storage: trace.operators[span.start][0] for span in reversed(trace.spans)}
    kinds, point = ("activation", "temporary"), trace.peak_index
    live = [span for span in trace.spans if span.start <= point < span.stop]
    found = [(str(made[span.storage]), span.bytes) for span in live if span.category in kinds]
    rows = [(verbatim(name), size) for name, size in sorted(found, key=lambda row: -row[1])[:4]]
    everything = text("all {n} activations and temporary tensors", n=len(found))
    rows.append((everything, sum(size for _, size in found)))
    return table(["made by", "size (GB)"], [(name, f"{size / 1e9:.1f}") for name, size in rows])


def training_parts(seed: int) -> tuple[Decoder, Any, Any, torch.amp.GradScaler]:
    """Return the parts of a training run: decoder, SGD optimizer, scheduler and gradient scaler.

    The scheduler halves the learning rate at each step. The scale of the gradient scaler is 1024.
    """
    decoder = small_decoder(seed)
    sgd = torch.optim.SGD(decoder.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(sgd, 1, gamma=0.5)
    return decoder, sgd, scheduler, torch.amp.GradScaler("cpu", init_scale=2.0**10)


def same_weights_as_library(train_epoch: Callable[..., None]) -> bool:
    """Return whether a training loop gives the same weights as the library's `AccumulatedStep`.

    Differences by rounding are ignored. The epoch has 15 micro-batches of 2 samples, and an
    optimizer step after every 4 micro-batches.

    Args:
        train_epoch: The learner's loop over one epoch.
    """
    samples = batch(0, samples=30)
    model, *parts = training_parts(1)
    train_epoch(model, loss_sum, samples.split(2), *parts, every=4, max_norm=0.5)
    library, sgd, scheduler, scaler = training_parts(1)
    step = AccumulatedStep(library, sgd, loss_sum, scaler=scaler, max_norm=0.5)
    for group in samples.split(8):
        step(split(group, 2))
        scheduler.step()
    both = zip(model.parameters(), library.parameters(), strict=True)
    return all(torch.allclose(one, other, atol=1e-5) for one, other in both)


def gradient_of(model: torch.nn.Module) -> Tensor:
    """Return the gradients of all parameters of a model, as one vector in float64."""
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).double()


def error(found: Tensor, wanted: Tensor) -> float:
    """Return the relative error of a gradient: norm(found - wanted) / norm(wanted).

    Args:
        found: Gradient as a vector.
        wanted: Right gradient as a vector.
    """
    return float((found - wanted).norm() / wanted.norm())


def errors_of_sums(gradient_in: Callable[..., Tensor]) -> dict[str, dict[int, list[float]]]:
    """Measure relative errors of accumulated bf16 gradients, with sums in bf16 and in fp32.

    The right gradients are computed in float64 with a single micro-batch.

    Args:
        gradient_in: Function that takes (number of micro-batches, dtype of the model, seed, whether
            to add in fp32) and returns the gradient as a vector.

    Returns:
        Dict from the dtype of the sums, "bf16" or "fp32", to an inner dict. The inner dict maps the
        number of micro-batches to a list of errors, one for each of two seeds.
    """
    errors: dict[str, dict[int, list[float]]] = {
        kind: {n: [] for n in COUNTS} for kind in ("bf16", "fp32")
    }
    for seed in range(2):
        wanted = gradient_in(1, torch.float64, seed)
        for kind, each in errors.items():
            for n, found in each.items():
                found.append(error(gradient_in(n, torch.bfloat16, seed, kind == "fp32"), wanted))
    return errors


def bytes_reduced(figures: Mapping[str, float], micro_batches: int) -> Table:
    """Return a table of the measured and predicted bytes that a rank passes to all-reduce.

    Args:
        figures: Result of `on_ranks`.
        micro_batches: Number of micro-batches per rank.
    """
    once = figures["parameters"]
    rows = [
        ("the last micro-batch only", once, figures["last"]),
        ("each micro-batch", micro_batches * once, figures["each"]),
        ("`AccumulatedStep`", once, figures["library"]),
    ]
    return predictions(rows, unit="bytes")


def errors_of_pairs(by_size: Callable[..., None], grad_cache: Callable[..., None]) -> Table:
    """Return a table of gradient errors of two ways to compute a contrastive loss in micro-batches.

    There are 32 pairs, in micro-batches of 8. Errors are relative to the gradient of all 32 pairs
    at once, in float64.

    Args:
        by_size, grad_cache: Functions that are called as `function(net, x, y, size)`, with the
            number of pairs per micro-batch. They leave the gradients in the parameters of `net`.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8)).double()
    x, y = torch.randn(2, 32, 16).double()

    def gradient(run: Callable[..., None], size: int) -> Tensor:
        net.zero_grad()
        run(net, x, y, size)
        return gradient_of(net)

    wanted = gradient(by_size, 32)
    errors = [error(gradient(run, 8), wanted) for run in (by_size, grad_cache)]
    shown = [f"{each:.0%}" if each > 1e-9 else text("below 1e-9") for each in errors]
    return table(
        ["8 pairs at a time", "error of the gradient"],
        [("`by_size`", shown[0]), ("`grad_cache`", shown[1])],
    )


def on_ranks(
    step: Callable[..., Any], micro_batches: int = 8, processes: int = 2
) -> dict[str, float]:
    """Run the learner's step with DDP on CPU processes; return its communication and its error.

    The processes (ranks) communicate over gloo. On Linux without a GPU, one process imports the
    modules and forks the ranks. Otherwise each rank is a new process, because CUDA cannot be used
    in a forked process.

    Args:
        step: Function that is called as `step(model, loss_sum, micro_batches, each)`. It leaves the
            gradient of the mean loss over the tokens of all ranks in `.grad`. If `each` is true,
            every backward pass reduces the gradients. Otherwise only the last backward pass does.
            The processes receive the source code of the function. It may use only `torch`, `dist`
            and `nullcontext` from outside the function.
        micro_batches: Number of micro-batches per rank.
        processes: Number of ranks.

    Returns:
        A dict with these keys. "parameters" is the bytes of all parameters. "each" is the bytes
        that one rank passes to all-reduce if every backward pass reduces gradients, and "last" is
        these bytes if only the last backward pass reduces them. "error" is the relative error of
        the gradient, compared with one process that has all tokens. "library" is the bytes that
        `AccumulatedStep` passes to all-reduce.

    Raises:
        RuntimeError: A process failed; the message has the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = inspect.cleandoc("\n" + inspect.getsource(step))
        (Path(folder) / "step.py").write_text(source, encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            ranks.__name__,
            folder,
            step.__name__,
            str(micro_batches),
            str(processes),
        ]
        forks = sys.platform == "linux" and not torch.cuda.is_available()
        commands = [command] if forks else [[*command, str(rank)] for rank in range(processes)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        running = [subprocess.Popen(each, **pipes) for each in commands]
        outputs = [process.communicate(timeout=300)[0] for process in running]
        for number, process in enumerate(running):
            if process.returncode:
                failed = "a rank" if forks else f"rank {number}"
                raise RuntimeError(f"{failed} failed: {outputs[number][-2000:]}")
        return json.loads((Path(folder) / "bytes.json").read_text())
