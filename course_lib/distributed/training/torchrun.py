"""Train on the ranks that torchrun has started (`train`), or start torchrun (`launch`)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from course_lib.labels import say, text, verbatim
from course_lib.symbolic import symbolic

from ..formulas import STATE, held_bytes, sent_bytes, shapes_of
from ..measurement import RankUsage, Watch
from ..modes import Trainer
from .sharded_checkpoint import check_fits, last_complete, load, save
from .tasks import Task

# Modules that every rank would import otherwise. DTensor and fake tensors import `torch._dynamo`.
IMPORTED_ONCE = (
    "course_lib.distributed.__main__",
    "torch._dynamo",
    "torch.distributed.optim",
    "torch.distributed.run",
)
# Frozen, so that no rank's garbage collector traverses the modules.
IN_LAUNCHER = """
import gc
gc.disable()
import {modules} as run
gc.freeze()
gc.enable()
run.main()
"""
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
                done = {"step": step + 1 - start, "steps": steps, "loss": f"{losses[-1]:.4f}"}
                say(
                    text(
                        "{mode} on {ranks} ranks: step {step} of {steps}, loss {loss}",
                        mode=verbatim(mode),
                        ranks=ranks,
                        **done,
                    )
                )
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


@contextmanager
def process_group(backend: str | None = None):
    """Create the group of the ranks that torchrun started, and yield this rank's device.

    The device is one GPU per rank, or the CPU. If all ranks are on one machine, all traffic stays
    on the loopback interface.

    Raises:
        ValueError: The process was not started by torchrun, or NCCL is requested without a GPU for
            each rank.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        command = (
            "python -m torch.distributed.run --standalone --nproc-per-node 2 -m"
            " course_lib.distributed"
        )
        raise ValueError(
            f"course_lib.distributed must be started by torchrun: {command}; or pass"
            " --ranks N to predict a step without starting any process"
        )
    local_rank, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks
    backend = backend or ("nccl" if enough else "gloo")
    if backend == "nccl" and not enough:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise ValueError(
            f"--backend must be 'gloo' without a GPU per rank, got 'nccl' with {count}"
            f" GPUs for {local_ranks} ranks"
        )
    if local_ranks == int(os.environ["WORLD_SIZE"]):
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if loopback else ():
            os.environ[variable] = loopback
    device = torch.device("cuda", local_rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo")
    yield device
    # not in a `finally`, because after an error other ranks may not respond
    dist.destroy_process_group()


def launch(
    ranks: int,
    *arguments: str,
    timeout: float | None = None,
    script: str = "course_lib.distributed",
) -> list[dict[str, Any]]:
    """Run the script under torchrun with `--json`, and return one dict per mode.

    On Linux without a GPU, the modules are imported once, in torchrun, which then forks the ranks.
    Otherwise torchrun starts each rank as it does in a shell, because CUDA cannot be used in a
    forked process. All processes have ended when this function returns or raises, even after
    Ctrl-C.

    Args:
        ranks: Number of processes on this machine.
        arguments: Arguments of the script, such as "--mode", "ddp,fsdp".
        timeout: Limit in seconds.
        script: Module of this package that is run.

    Raises:
        RuntimeError: The run failed. The message contains the script's error, or the end of its
            output if there is no such error.
        subprocess.TimeoutExpired: The run took longer than `timeout`.
    """
    launcher = ["-m", "torch.distributed.run"]
    run = ["-m", script]
    if sys.platform == "linux" and not torch.cuda.is_available():
        launcher = ["-c", IN_LAUNCHER.format(modules=", ".join((script, *IMPORTED_ONCE)))]
        file = "__main__" if script == "course_lib.distributed" else script.rpartition(".")[2]
        run = [
            "--run-path",
            "--start-method",
            "fork",
            str(Path(__file__).parents[1] / f"{file}.py"),
        ]
    command = [
        sys.executable,
        *launcher,
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        *run,
        *arguments,
        "--json",
    ]
    # torch.jit is disabled, because nothing here uses it
    environment = {"OMP_NUM_THREADS": "1", "PYTORCH_JIT": "0", **os.environ}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    with subprocess.Popen(command, **pipes) as running:
        try:
            out, errors = running.communicate(timeout=timeout)
        except BaseException:
            _end(running)
            raise
    if running.returncode:
        raise RuntimeError(
            f"torchrun ended with exit status {running.returncode}: {_cause(errors)}"
        )
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def _end(torchrun: subprocess.Popen) -> None:
    """Ask torchrun to end its ranks, and kill it if it has not exited in time.

    torchrun itself may wait 30 seconds for its ranks. If it is killed, each rank notices and exits.
    """
    torchrun.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            torchrun.communicate(timeout=40)
    finally:  # also after another Ctrl-C
        torchrun.kill()
        torchrun.wait()


def _cause(errors: str) -> str:
    """Return the cause of a failure from the output on stderr."""
    prefixes = "error: ", say(text("error: {sentence}", sentence=""))
    error_lines = [line for line in errors.splitlines() if line.startswith(prefixes)]
    # torchrun writes "Root Cause" before its report of the rank that failed first
    first = errors.rfind("Root Cause")
    report = errors[first if first >= 0 else -4000 :]
    return "\n".join(error_lines) if error_lines and "Traceback (most" not in report else report
