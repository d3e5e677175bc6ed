"""Run a notebook in a new kernel and an empty folder, with limits of time, memory and output."""

import asyncio
import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError
from nbformat import NotebookNode

from . import fingerprint
from .fingerprint import MOST_OUTPUT

LIBRARY = Path(__file__).resolve().parents[1]
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Limits:
    """Limits of one notebook.

    Attributes:
        seconds: Wall-clock time for all cells together.
        gigabytes: Memory of the kernel, and of each process that it starts. Only Linux enforces it.
    """

    seconds: int = 600
    gigabytes: int = 8

    def __post_init__(self) -> None:
        if self.seconds < 1 or self.gigabytes < 1:
            raise ValueError(f"limits must be positive, got {self}")


class TooMuchOutput(Exception):
    """A notebook printed more than any lesson prints."""


class Run(NotebookClient):
    """Client that runs all cells of a notebook in place, also those below a cell that raises.

    Raises:
        CellTimeoutError: The time limit was reached.
        DeadKernelError: The kernel crashed.
        TooMuchOutput: The notebook printed too much.
    """

    def __init__(self, notebook: NotebookNode, limits: Limits, folder: Path) -> None:
        super().__init__(
            notebook,
            kernel_name="python3",  # the notebook may name another one
            allow_errors=True,
            timeout_func=self._seconds_left,
            startup_timeout=max(120, limits.seconds),
            # the kernel sends its output five times per second, however large it is
            extra_arguments=[f"--IPKernelApp.extra_extensions={fingerprint.__name__}"],
            record_timing=False,
        )
        self._limits, self._printed = limits, 0
        self._work, self._home = folder / "work", folder / "home"
        for each in (self._work, self._home):
            each.mkdir()
        self._end = time.monotonic() + limits.seconds

    def _seconds_left(self, cell: NotebookNode) -> int:
        """Return the seconds that a cell may run, and set the same limit for its output.

        Output that arrives after `iopub_timeout` is lost. The four seconds that nbclient allows are
        too few on a busy machine.
        """
        left = max(1, int(self._end - time.monotonic()))
        self.iopub_timeout = left
        return left

    def execute(self) -> NotebookNode:  # type: ignore[override]
        """Start the kernel, run the notebook, and end every process that this started."""
        before = {child.pid for child in psutil.Process().children(recursive=True)}
        try:
            return super().execute(cwd=str(self._work), env=self._environment())
        except DeadKernelError:
            if self._printed > MOST_OUTPUT:
                raise TooMuchOutput from None
            raise
        finally:
            for child in psutil.Process().children(recursive=True):
                if child.pid not in before:
                    child.kill()

    async def async_start_new_kernel(self, **kwargs: Any) -> None:
        """Start the kernel and then the clock, and let Ctrl-C end more than this notebook."""
        for each in (signal.SIGINT, signal.SIGTERM):  # nbclient would end this kernel alone
            asyncio.get_running_loop().remove_signal_handler(each)
        await super().async_start_new_kernel(**kwargs)
        self._limit_memory()
        self._end = time.monotonic() + self._limits.seconds

    def process_message(self, msg: dict[str, Any], cell: NotebookNode, cell_index: int) -> Any:
        """Process an output, or kill the kernel after too many: a cell cannot be stopped."""
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
        return {**os.environ, **own, **threads, "PYTHONPATH": os.pathsep.join(paths)}

    def _limit_memory(self) -> None:
        """Limit the kernel's memory before its first cell, on Linux.

        The limit is set from outside, because Python code between fork and exec (`preexec_fn`) may
        hang if this process has threads.
        """
        if not hasattr(psutil, "RLIMIT_DATA"):
            return
        most = self._limits.gigabytes * 10**9
        kernel = psutil.Process(self.km.provisioner.pid)
        kernel.rlimit(psutil.RLIMIT_DATA, (most, most))
        kernel.rlimit(psutil.RLIMIT_CORE, (0, 0))
