"""Train in one mode on the ranks of a process group, measure the first steps, save checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from course_lib.labels import text, verbatim
from course_lib.symbolic import symbolic

from ..formulas import STATE, held_bytes, sent_bytes, shapes_of
from ..measurement import RankUsage, Watch
from ..modes import Trainer
from .sharded_checkpoint import check_fits, latest_complete_checkpoint, load, save
from .tasks import Task

# Number of measured steps. The first step creates Adam's state, and the second step creates DDP's
# buckets. The third step needs the same bytes as each later step.
METERED = 3


@dataclass(frozen=True)
class Run:
    """Losses, gradient norms and measurements of a training run in one mode on all ranks.

    Attributes:
        mode: A mode of `Trainer`, such as "ddp" or "fsdp" (see `MODES`).
        ranks: Number of ranks.
        losses: Mean loss over the tokens of all ranks, one number per step.
        predicted: Bytes of parameters, gradients and optimizer state that ZeRO's formulas predict,
            with the keys "parameter", "gradient" and "optimizer". Each of the three numbers is the
            largest of all ranks.
        taken: Measured memory, communicated bytes and FLOPs of one step, as one `RankUsage` per
            rank. This step is the third of the run, or the last one of a shorter run.
        predicted_sent: Bytes per step that a rank communicates, computed by `sent_bytes`.
        norms: Norm of the gradient before clipping, one number per step. If gradients were not
            clipped, the list has None for each step.
        budget_bytes: Limit of live bytes on each rank while the model is being sharded and in the
            first 3 steps. None if no limit was set.
    """

    mode: str
    ranks: int
    losses: list[float]
    predicted: dict[str, int]
    taken: list[RankUsage]
    predicted_sent: int
    norms: list[float | None]
    budget_bytes: int | None = None

    def as_dict(self, details: bool = False) -> dict[str, Any]:
        """Return the results as a dict that can be written as JSON.

        Args:
            details: Whether to include all measurements of each rank, under the key "taken".
        """
        measured = {name: [usage.held[name] for usage in self.taken] for name in STATE}
        sent = {
            "predicted": self.predicted_sent,
            "measured": max(usage.sent_bytes for usage in self.taken),
        }
        line = {"mode": self.mode, "ranks": self.ranks, "losses": self.losses}
        line |= {"predicted": self.predicted, "measured": measured, "communicated": sent}
        if None not in self.norms:
            line["norms"] = self.norms
        if self.budget_bytes is not None:
            line["budget_bytes"] = self.budget_bytes
        return line | {"taken": [asdict(usage) for usage in self.taken]} if details else line

    def __str__(self) -> str:
        line = self.as_dict()
        rows = [(name, f"{line['predicted'][name]:,}", line["measured"][name]) for name in STATE]
        rows += [
            ("communicated", f"{self.predicted_sent:,}", [usage.sent_bytes for usage in self.taken])
        ]
        rows += [("peak", "", [usage.peak_bytes for usage in self.taken])]
        names = self.taken[0].at_peak
        rows += [
            (f"  {name}", "", values)
            for name in names
            if any(values := [t.at_peak[name] for t in self.taken])
        ]
        head = f"{self.mode} on {self.ranks} ranks: bytes"
        lines = [f"{head:<36}{'predicted':>10}   measured, rank by rank"]
        width = max(len(f"{value:,}") for *_, values in rows for value in values)
        for name, predicted, values in rows:
            lines.append(
                f"  {name:<18}{predicted:>26}   "
                + "  ".join(f"{value:>{width},}" for value in values)
            )
        return "\n".join([*lines, "  losses " + " ".join(f"{loss:.4f}" for loss in self.losses)])


def train(
    task: Task,
    mode: str,
    steps: int,
    *,
    device: torch.device | str = "cpu",
    save_to: Path | str | None = None,
    every: int | None = None,
    resume: Path | str | None = None,
    budget_bytes: int | None = None,
    say: Callable[[str], None] = lambda line: None,
    **options: Any,
) -> Run:
    """Train for `steps` steps. Every rank of the process group must call this function.

    Args:
        task: The model and its batches.
        mode: A mode of `Trainer`, such as "ddp" or "fsdp" (see `MODES`).
        steps: Number of steps that this call runs. Steps before the checkpoint `resume` are not
            counted.
        device: Device on which this rank trains.
        save_to: Folder for checkpoints of the training state. With None, no checkpoints are
            written. Otherwise, one is always written after the last step.
        every: Number of steps between two checkpoints. A checkpoint is written if the number of
            steps since the start of training, including those before `resume`, is a multiple of
            `every`. With None, there are no checkpoints before the last step.
        resume: Path of the checkpoint from which training and its step numbers continue. None
            starts from the beginning.
        budget_bytes: Limit of live bytes on each rank. The first operator that exceeds it raises an
            error. The limit applies while the model is being sharded and in the first 3 steps,
            which are measured. None for no limit.
        say: Function that is called with a line of progress after each step, on rank 0.
        options: Options of `Trainer`.

    Raises:
        MemoryBudgetExceeded: This rank exceeds `budget_bytes`.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model = task.make_model()
    losses = []
    norms = []
    shapes = shapes_of(model, options.get("blocks"))
    watch = Watch(model, device, budget_bytes=budget_bytes)
    predicted = {
        name: max(each[name] for each in held_bytes(shapes, mode, ranks)) for name in STATE
    }
    with ExitStack() as watching:
        watching.enter_context(watch)
        trainer = Trainer(mode, model, task.loss_sum, split=task.split, device=device, **options)
        start = load(Path(resume), trainer) if resume is not None else 0
        for step in range(start, start + steps):
            batch = task.part(step, ranks, rank, device)
            with watch.step(trainer) if step - start < METERED else nullcontext():
                losses.append(trainer(batch))
            norms.append(trainer.result.grad_norm)
            if step - start + 1 == min(steps, METERED):
                watching.close()
            if rank == 0:
                done = {"mode": verbatim(mode), "ranks": ranks, "step": step + 1 - start}
                done |= {"steps": steps, "loss": f"{losses[-1]:.4f}"}
                say(text("{mode} on {ranks} ranks: step {step} of {steps}, loss {loss}", **done))
            if save_to is not None and (
                step + 1 == start + steps or (every and (step + 1) % every == 0)
            ):
                save(save_to, trainer, step + 1)
    usages: list[Any] = [None] * ranks
    dist.all_gather_object(usages, watch.taken)
    counts = {"micro_batches": trainer.micro_batches, "sync": trainer.sync}
    sent = sent_bytes(shapes, mode, ranks, bf16=options.get("bf16", False), **counts)
    return Run(mode, ranks, losses, predicted, usages, sent, norms, budget_bytes)


def checkpoint_to_resume(folder: Path | str, mode: str, task: Task) -> Path:
    """Return the path of the checkpoint from which training in a mode can be resumed.

    If `folder` has a subfolder with the mode's name, the result is the last complete checkpoint in
    this subfolder. Otherwise, it is the last complete checkpoint in `folder` itself.

    Args:
        folder: Folder with checkpoints, as `train` writes them.
        mode: Name of the mode, such as "ddp".
        task: Task whose model must have the same parameters as the checkpoint.

    Raises:
        ValueError: There is no complete checkpoint, or its parameters are not those of the task's
            model.
    """
    checkpoint = latest_complete_checkpoint(
        own if (own := Path(folder) / mode).is_dir() else folder
    )
    with symbolic():
        check_fits(checkpoint, task.make_model())
    return checkpoint
