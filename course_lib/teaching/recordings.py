"""Results of GPU experiments, either measured now on a GPU or read from a stored recording.

A recording is a file `course_lib/recordings/<gpu>.json`. The folder contains nothing else.
"""

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import time
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .experiments import Experiment, Number, Run, error_summary

FOLDER = Path(__file__).parents[1] / "recordings"


@dataclass(frozen=True)
class RecordedResults:
    """Results of a GPU experiment, with information on where and when they were measured.

    Attributes:
        source: "live" for results that were measured just now, "recorded" for stored results, or
            "none" if there are no results.
        values: Dict from the name of a result to its number, in the order of the experiment's
            labels. It is empty if there are no results.
        gpu: Name of the GPU, or None if there are no results.
        torch: Version of PyTorch, or None if there are no results.
        date: Date of the measurement, or None if there are no results.
        problem: Text with the name of this machine's GPU, and the reason why the experiment failed
            on it. None if the experiment did not fail, or if this machine has no GPU.
        smaller: Sizes that had to be reduced because memory was insufficient, as a dict from the
            name of a size to its reduced value.
        notes: Dict from the name of a note to a text that states how results were measured, such as
            the name of the attention kernel that ran.
    """

    source: str
    values: dict[str, Number] = field(default_factory=dict)
    gpu: str | None = None
    torch: str | None = None
    date: str | None = None
    problem: str | None = None
    smaller: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


def recorded_results(item: Experiment, folder: Path = FOLDER) -> RecordedResults:
    """Run a GPU experiment, or read its latest recording.

    On a machine with a GPU, the experiment runs now. The recording is read if there is no GPU, or
    if the experiment fails.

    Args:
        item: The experiment.
        folder: Folder of the recordings. It need not exist.
    """
    problem = None
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_name()
        try:
            run = item.run()
        # Memory ran out, or torch is too old. The lesson shows the error and continues.
        except (RuntimeError, MemoryError) as error:
            problem = f"{gpu}: {error_summary(error)}"
        else:
            found = {"figures": run.figures, "sizes": run.sizes, "notes": run.notes}
            return _as_results(
                item, found | {"torch": str(torch.__version__), "date": _today()}, "live", gpu
            )
    stored = load_recordings(item, folder)
    return (
        replace(stored[0], problem=problem) if stored else RecordedResults("none", problem=problem)
    )


def results_of_gpus(item: Experiment, folder: Path = FOLDER) -> list[RecordedResults]:
    """Run a GPU experiment or read its latest recording, and add the recordings of other GPUs.

    Only recordings with the same sizes as the first result are added. If there is no result at all,
    the list has a single item, whose `source` is "none".

    Args:
        item: The experiment.
        folder: Folder of the recordings. It need not exist.
    """
    first = recorded_results(item, folder)
    others = [
        found
        for found in load_recordings(item, folder)
        if found.gpu != first.gpu and found.smaller == first.smaller
    ]
    return [first, *(others if first.values else [])]


def load_recordings(item: Experiment, folder: Path = FOLDER) -> list[RecordedResults]:
    """Return the stored results of an experiment on all GPUs, the latest first.

    Args:
        item: The experiment.
        folder: Folder of the recordings. It need not exist.
    """
    stored = []
    for path in sorted(Path(folder).glob("*.json")):
        recording = json.loads(path.read_text(encoding="utf-8"))
        if found := recording["experiments"].get(item.lesson, {}).get(item.name):
            stored.append(_as_results(item, found, "recorded", recording["gpu"]))
    return sorted(stored, key=lambda found: found.date, reverse=True)


def _as_results(item: Experiment, found: dict, source: str, gpu: str) -> RecordedResults:
    smaller = {
        name: value
        for name, value in _plain(found["sizes"]).items()
        if value != _plain(item.sizes).get(name)
    }
    values = item.in_order(found["figures"])
    return RecordedResults(
        source, values, gpu, found["torch"], found["date"], smaller=smaller, notes=found["notes"]
    )


def record(
    item: Experiment,
    run: Run,
    *,
    command: str,
    folder: Path = FOLDER,
    device: str = "cuda",
) -> Path:
    """Store the results of a GPU experiment in a file that is named after the GPU.

    The versions of software and the properties of the machine are stored with the results. Results
    of other experiments stay in the file.

    The file is replaced as a whole. After an interruption it is therefore either the old file or
    the new file.

    Args:
        item: The experiment.
        run: Results of the experiment, with the sizes that were used.
        command: Command that was run, which is stored with the results.
        folder: Folder of the recordings. It is created if it does not exist.
        device: "cuda", or "cpu" in tests.

    Returns:
        Path of the file. The file has the results in sorted order, so the order of the measurements
        does not matter.
    """
    gpu, total = "CPU", 0
    if torch.device(device).type == "cuda":
        gpu, total = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
    path = Path(folder) / f"{re.sub(r'[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json"
    recording = (
        json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"experiments": {}}
    )
    recording["experiments"].setdefault(item.lesson, {})[item.name] = {
        "sizes": run.sizes,
        **provenance(device),
        "figures": run.figures,
        "notes": run.notes,
        "date": _today(),
        "command": command,
    }
    recording |= {"gpu": gpu, "gpu_memory_bytes": total}
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    try:
        new.write_text(
            json.dumps(recording, indent=2, sort_keys=True, allow_nan=False) + "\n",
            encoding="utf-8",
        )
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
    return path


@cache
def provenance(device: str = "cuda") -> dict[str, Any]:
    """Return the versions of software and the properties of the machine that affect results.

    They are determined once per process.

    Args:
        device: "cuda", or "cpu" in tests.

    Returns:
        Dict with keys such as "torch", "driver" and "cpu". A value is None if it cannot be
        determined.
    """
    cuda = torch.device(device).type == "cuda"
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "driver": (
            _first_word_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
            if cuda
            else None
        ),
        "commit": _first_word_of(
            "git",
            "-C",
            str(Path(__file__).parent),
            "describe",
            "--always",
            "--dirty",
            "--abbrev=40",
        ),
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
        "link_bytes_per_second": _link(torch.device(device)) if cuda else None,
    }


def _plain(sizes: dict[str, Any]) -> dict[str, Any]:
    """Return sizes as JSON stores them: tuples become lists. Recordings contain this form."""
    return json.loads(json.dumps(sizes))


def _today() -> str:
    return date.today().isoformat()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_word_of(*command: str) -> str | None:
    """Return the first word that a program prints, or None if it fails."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=True
        ).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def _cpu() -> str:
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    return f"{found[1] if found else platform.machine()}, {os.cpu_count()} threads"


def _link(device: torch.device) -> dict[str, int]:
    """Return the bytes per second of large copies between pinned memory and the GPU.

    The result is a dict with the keys "up" (to the GPU) and "down" (from the GPU). Rates are
    rounded to three digits.
    """
    host = torch.empty(256 * 10**6, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty_like(host, device=device)
    rates = {}
    for name, target, source in (("up", on_device, host), ("down", host, on_device)):
        for _ in range(3):  # only the last copy counts
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(device)
            rates[name] = int(float(f"{host.nbytes / (time.perf_counter() - start):.3g}"))
    return rates
