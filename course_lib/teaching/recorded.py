"""Figures of GPU experiments: measured now where there is a GPU, else those of a GPU that others had, else none.

A recording is `course_lib/recordings/<gpu>.json`; the folder holds nothing else.
"""

import json
import re
import subprocess
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import torch

from .experiments import Experiment, Number

FOLDER = Path(__file__).parents[1] / "recordings"


@dataclass(frozen=True)
class Figures:
    """The figures of one experiment, and where they are from.

    Attributes:
        source: "live" (measured just now), "recorded" (on another machine, or earlier), or "none".
        values: name -> number, in the order of the experiment's labels; empty if there are none.
        gpu, torch, date: of the measurement; None if there is none.
        problem: the GPU here and why it could not run the experiment; None if it could, or if there is no GPU.
    """

    source: str
    values: dict[str, Number] = field(default_factory=dict)
    gpu: str | None = None
    torch: str | None = None
    date: str | None = None
    problem: str | None = None


def figures(item: Experiment, folder: Path = FOLDER) -> Figures:
    """The figures of an experiment: measured now where there is a GPU, else from the latest recording, else none.

    Args:
        folder: where the recordings are; it need not exist.
    """
    problem = None
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_name()
        try:
            return Figures("live", item.in_order(item.run()), gpu, str(torch.__version__), _today())
        except RuntimeError as error:  # too little memory, too old for this torch: a lesson goes on, and says so
            problem = f"{gpu}: {str(error).splitlines()[0].split('. ')[0]}"
    recordings = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).glob("*.json"))]
    for recording in sorted(recordings, key=lambda each: each["date"], reverse=True):
        if values := recording["figures"].get(item.lesson, {}).get(item.name):
            origin = (recording["gpu"], recording["torch"], recording["date"])
            return Figures("recorded", item.in_order(values), *origin, problem)
    return Figures("none", problem=problem)


def record(item: Experiment, values: dict[str, Number], *, command: str, folder: Path = FOLDER) -> Path:
    """Write an experiment's figures to `folder`/<gpu>.json, with all that says where they are from.

    Figures of other experiments that the file has stay, if they were made with the same torch and driver.

    Args:
        command: what was run.

    Returns:
        The file. The same figures give the same bytes, whatever their order.
    """
    gpu = torch.cuda.get_device_name()
    path = Path(folder) / f"{re.sub(r'[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json"
    recording = {
        "gpu": gpu,
        "gpu_memory_bytes": torch.cuda.get_device_properties(0).total_memory,
        "driver": _driver(),
        "torch": str(torch.__version__),
    }
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    same_machine = recording.items() <= before.items()
    kept = before["figures"] if same_machine else {}
    found = kept | {item.lesson: kept.get(item.lesson, {}) | {item.name: values}}
    recording |= {"date": _today(), "command": command, "figures": found}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(recording, indent=2, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")
    return path


def _today() -> str:
    return date.today().isoformat()


def _driver() -> str:
    """The version of the GPU's driver; "unknown" where it does not tell."""
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        answer = []
    return answer[0] if answer else "unknown"
