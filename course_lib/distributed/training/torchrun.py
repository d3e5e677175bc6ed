"""Start ranks with torchrun (`launch`), and join the process group in each (`process_group`)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from course_lib._torch.modes import DYNAMO
from course_lib.labels import say, text

# Modules that torchrun imports before it forks the ranks, so that not every rank has to import
# them. DTensor and fake tensors import `torch._dynamo`.
IMPORTED_ONCE = (
    "course_lib.distributed.__main__",
    DYNAMO,
    "torch.distributed.optim",
    "torch.distributed.run",
)
# Code that torchrun's process runs. It freezes the imported modules, so that no rank's garbage
# collector traverses them.
IN_LAUNCHER = """
import gc
gc.disable()
import {modules} as run
gc.freeze()
gc.enable()
run.main()
"""


@contextmanager
def process_group(backend: str | None = None):
    """Create the process group of the ranks that torchrun started, and yield this rank's device.

    With the backend "nccl" the device is a GPU, and with "gloo" it is the CPU. If all ranks are on
    one machine, all traffic stays on the loopback interface. At the end of the `with` block, the
    process group is destroyed.

    Args:
        backend: "nccl" or "gloo". By default "nccl" if there is a GPU per rank, otherwise "gloo".

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
            f"--backend nccl needs one GPU for each rank, got {count} GPUs for {local_ranks}"
            " ranks; use --backend gloo"
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
    # The group is not destroyed in a `finally` block, because after an error other ranks may not
    # respond.
    dist.destroy_process_group()


def end_on_signals() -> None:
    """Let SIGINT (Ctrl-C) and SIGTERM end this rank at once.

    A forked rank has inherited torchrun's handler of SIGTERM. A `KeyboardInterrupt` would not be
    enough, because `torch.distributed.checkpoint` catches it while a checkpoint is written.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def launch(
    ranks: int,
    *arguments: str,
    timeout: float | None = None,
    script: str = "course_lib.distributed",
) -> list[dict[str, Any]]:
    """Run a script of `course_lib` on several ranks under torchrun, and return its JSON output.

    On Linux without a GPU, torchrun imports the modules once and then forks the ranks. On other
    machines, torchrun starts each rank as a new process. With a GPU this is necessary, because CUDA
    cannot be used in a forked process. All processes have ended when this function returns or
    raises, even after Ctrl-C.

    Args:
        ranks: Number of processes on this machine.
        arguments: Arguments of the script, such as "--mode", "ddp,fsdp".
        timeout: Limit in seconds. None for no limit.
        script: Module to run. It must be in `course_lib.distributed` and print JSON lines.

    Returns:
        One dict per line of JSON that the script prints, for example one per mode.

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
        path = Path(__file__).parents[1] / f"{file}.py"
        run = ["--run-path", "--start-method", "fork", str(path)]
    command = [sys.executable, *launcher, "--standalone", "--nproc-per-node", str(ranks)]
    command += [*run, *arguments, "--json"]
    # torch.jit is disabled, because nothing here uses it.
    environment = {"OMP_NUM_THREADS": "1", "PYTORCH_JIT": "0", **os.environ}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    with subprocess.Popen(command, **pipes) as running:
        try:
            out, errors = running.communicate(timeout=timeout)
        except BaseException:
            running.terminate()  # torchrun then ends its ranks
            running.communicate()
            raise
    if running.returncode:
        raise RuntimeError(
            f"torchrun ended with exit status {running.returncode}: {_cause_of_failure(errors)}"
        )
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def _cause_of_failure(errors: str) -> str:
    """Return the cause of a failure, as found in torchrun's output on stderr."""
    prefixes = "error: ", say(text("error: {sentence}", sentence=""))
    error_lines = [line for line in errors.splitlines() if line.startswith(prefixes)]
    # torchrun writes "Root Cause" before its report of the rank that failed first.
    first = errors.rfind("Root Cause")
    report = errors[first if first >= 0 else -4000 :]
    return "\n".join(error_lines) if error_lines and "Traceback (most" not in report else report
