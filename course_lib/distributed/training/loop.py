"""Train one mode on the ranks of a process group, measure the first steps, and save checkpoints."""

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
from .sharded_checkpoint import check_fits, last_complete, load, save
from .tasks import Task

# Number of metered steps. The first creates Adam's state and the second DDP's buckets, so the third
# is like all later ones.
METERED = 3


@dataclass(frozen=True)
class Run:
    """Result of one mode on all ranks; bytes are those of the last metered step.

    Attributes:
        losses: Mean loss over the tokens of all ranks, per step.
        norms: Norm of its gradient before clipping, per step; None if it was not clipped.
        budget_bytes: Limit of live bytes on each rank, from before its model was sharded; None if
            no limit was set.
        predicted: Category of `STATE` -> most bytes that a rank holds, by ZeRO's formulas.
        taken: Measurements of each rank.
        predicted_sent: Bytes that a rank communicates, by formula.
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
    """Train for `steps` steps; every rank of the process group calls this.

    Args:
        save_to: Folder for checkpoints, written after each `every` steps and after the last.
        resume: Checkpoint to continue from; steps are numbered on from its own.
        budget_bytes: Limit of live bytes on each rank. An operator that would exceed it does not
            run. It applies while steps are metered, that is to the first 3.
        say: Function that is called with a line of progress after each step, on rank 0.
        options: Options of `Trainer`.

    Raises:
        MemoryBudgetExceeded: On a rank that would exceed `budget_bytes`.
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
    sent = sent_bytes(shapes, mode, ranks, micro_batches=trainer.micro_batches, sync=trainer.sync)
    return Run(mode, ranks, losses, predicted, usages, sent, norms, budget_bytes)


def checkpoint_to_resume(folder: Path | str, mode: str, task: Task) -> Path:
    """Return the checkpoint to resume from.

    It is the last complete one in the mode's subfolder of the folder, or else in the folder itself.

    Raises:
        ValueError: The folder has no complete checkpoint, or the checkpoint is of another model.
    """
    checkpoint = last_complete(own if (own := Path(folder) / mode).is_dir() else folder)
    with symbolic():
        check_fits(checkpoint, task.make_model())
    return checkpoint
