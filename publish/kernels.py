"""Run a notebook in a new kernel and an empty folder, with limits of time, memory and output."""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError
from nbformat import NotebookNode

from course_lib.teaching.exercises import GRADING_SEED

from . import fingerprint
from .fingerprint import MOST_OUTPUT

LIBRARY = Path(__file__).resolve().parents[1]
_ENDLESS = 10**6  # seconds
_LOOK_SECONDS = 0.5  # between two checks of the processes of a notebook
_PR_SET_CHILD_SUBREAPER = 36  # of prctl(2)
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Limits:
    """Limits of one notebook.

    Attributes:
        seconds: Limit on the CPU time of all processes of a notebook together. The same limit also
            applies to the wall-clock time during which none of these processes computes.
        gigabytes: Limit on the memory of the kernel, on that of each process that the kernel
            starts, and on the size of each file that they write. Only Linux enforces this limit.
    """

    seconds: int = 600
    gigabytes: int = 8

    def __post_init__(self) -> None:
        if self.seconds < 1 or self.gigabytes < 1:
            raise ValueError(f"limits must be positive, got {self}")


class OutOfTime(Exception):
    """Error for a notebook that computed or waited for longer than its limit."""


class TooMuchOutput(Exception):
    """Error for a notebook that printed more than `MOST_OUTPUT` characters."""


class Run(NotebookClient):
    """Client that runs all cells of a notebook in place, also those after a cell with an error.

    Raises:
        OutOfTime: The time limit was reached.
        DeadKernelError: The kernel crashed.
        TooMuchOutput: The notebook printed too much.
    """

    def __init__(
        self, notebook: NotebookNode, limits: Limits, folder: Path, seed: str = ""
    ) -> None:
        super().__init__(
            notebook,
            kernel_name="python3",  # the notebook's metadata may have another kernel
            allow_errors=True,
            timeout=None,  # `_watch` ends what takes too long
            iopub_timeout=_ENDLESS,  # four seconds are too few on a busy machine
            startup_timeout=_ENDLESS,
            # this extension slows down endless output, which the kernel would send in full
            extra_arguments=[f"--IPKernelApp.extra_extensions={fingerprint.__name__}"],
            record_timing=False,
        )
        self._limits, self._printed, self._seed = limits, 0, seed
        self._work, self._home = folder / "work", folder / "home"
        for each in (self._work, self._home):
            each.mkdir()
        self._out_of_time = ""
        self._ended = threading.Event()

    def execute(self) -> NotebookNode:  # type: ignore[override]
        """Start the kernel, run the notebook, and kill every process that the run has started."""
        adopt_orphans()
        self._before = {child.pid for child in psutil.Process().children(recursive=True)}
        try:
            return super().execute(cwd=str(self._work), env=self._environment())
        except DeadKernelError:
            if self._out_of_time:
                raise OutOfTime(self._out_of_time) from None
            if self._printed > MOST_OUTPUT:
                raise TooMuchOutput from None
            raise
        finally:
            self._ended.set()
            end_children(self._before)

    def _watch(self, kernel: psutil.Process) -> None:
        """Kill the kernel if it has computed or waited for more seconds than the limit.

        If a process is ready to run but gets no CPU on a busy machine, this time counts neither as
        computing nor as waiting.
        """
        waited, computed = 0.0, 0.0
        while not self._ended.wait(_LOOK_SECONDS):
            now, ready = _computed_seconds(self._before)
            waited += 0 if ready or now > computed else _LOOK_SECONDS
            computed = max(computed, now)
            for seconds, verb in ((computed, "computed"), (waited, "waited")):
                if seconds > self._limits.seconds:
                    self._out_of_time = (
                        f"It was stopped: it {verb} for more than {self._limits.seconds} seconds."
                    )
                    with contextlib.suppress(psutil.NoSuchProcess):
                        kernel.kill()
                    return

    async def async_start_new_kernel(self, **kwargs: Any) -> None:
        """Start the kernel with its limits. Ctrl-C then ends the grading, not only this kernel."""
        for each in (signal.SIGINT, signal.SIGTERM):  # nbclient would end this kernel alone
            asyncio.get_running_loop().remove_signal_handler(each)
        await super().async_start_new_kernel(**kwargs)
        self._limit_kernel()
        kernel = psutil.Process(self.km.provisioner.pid)
        threading.Thread(target=self._watch, args=(kernel,), daemon=True).start()

    def process_message(self, msg: dict[str, Any], cell: NotebookNode, cell_index: int) -> Any:
        """Process a message of the kernel, or kill the kernel after too much output."""
        self._printed += len(str(msg["content"]))
        if self._printed > MOST_OUTPUT:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(self.km.provisioner.pid).kill()
            return None
        return super().process_message(msg, cell, cell_index)

    def _environment(self) -> dict[str, str]:
        """Return an environment with the course's library, one thread, and a separate home."""
        paths = [str(LIBRARY), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {name: str(self._home) for name in ("HOME", "IPYTHONDIR", "TMPDIR", "MPLCONFIGDIR")}
        threads = dict.fromkeys(_ONE_THREAD, "1")
        own |= {GRADING_SEED: self._seed}
        return {**os.environ, **own, **threads, "PYTHONPATH": os.pathsep.join(paths)}

    def _limit_kernel(self) -> None:
        """Limit memory and files of the kernel before its first cell, on Linux.

        The limit is set from outside, because Python code between fork and exec (`preexec_fn`) may
        hang if this process has threads.
        """
        if not hasattr(psutil, "RLIMIT_DATA"):
            return
        most = self._limits.gigabytes * 10**9
        kernel = psutil.Process(self.km.provisioner.pid)
        kernel.rlimit(psutil.RLIMIT_DATA, (most, most))
        kernel.rlimit(psutil.RLIMIT_FSIZE, (most, most))
        kernel.rlimit(psutil.RLIMIT_CORE, (0, 0))


def adopt_orphans() -> None:
    """On Linux, make this process the parent of each descendant whose own parent has ended.

    Otherwise the parent of such a process would be process 1, and `end_children` would miss it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_children(kept: set[int]) -> None:
    """Kill all descendants of this process, except those with the kept ids, until none is left.

    The children of a killed process become children of this one (see `adopt_orphans`).
    """
    while children := [
        each for each in psutil.Process().children(recursive=True) if each.pid not in kept
    ]:
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children)


def _computed_seconds(kept: set[int]) -> tuple[float, bool]:
    """Return (CPU seconds of this process's descendants, whether one of them is ready to run).

    Processes with the kept ids are left out.
    """
    seconds, ready = 0.0, False
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if each.pid not in kept:
                times = each.cpu_times()
                seconds += times.user + times.system
                seconds += getattr(times, "children_user", 0) + getattr(times, "children_system", 0)
                ready |= each.status() in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)
    return seconds, ready
