"""The lessons' GPU experiments, and the figures they gave on GPUs that others had.

    make gpu                          # on a machine with a GPU: its tests, then every experiment
    python -m course_lib.recordings   # the experiments alone; writes course_lib/recordings/<gpu>.json

A lesson asks for `figures("01", "monitor")`: measured now where there is a GPU, else read from a recording, else none.
Each lesson's experiments stand in `lesson_NN.py` here: functions that take a device and sizes, and return a flat dict
of numbers with their units in the names. They run on a CPU too, where what only the CUDA allocator knows is left out.
"""

from __future__ import annotations

import importlib
import json
import math
import pkgutil
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import torch

from course_lib.models import seeded

__all__ = ["UNITS", "Experiment", "Figures", "experiment", "experiments", "figures", "label_of", "record", "run"]

Number = int | float
FOLDER = Path(__file__).parent
UNITS = ("bytes", "flops", "count", "seconds", "percent")  # the last word of a figure's name; the first three are whole


@dataclass(frozen=True)
class Experiment:
    """One GPU experiment of a lesson.

    Attributes:
        function: takes `device` and sizes by keyword, returns name -> number.
        title: (English, Chinese).
        labels: name of a figure -> (English, Chinese); a `{}` stands for whatever the name has there.
        small: sizes for a run of a second on any device, as the tests make.
    """

    lesson: str
    name: str
    function: Callable[..., dict[str, Number]]
    title: tuple[str, str]
    labels: dict[str, tuple[str, str]]
    small: dict


@dataclass(frozen=True)
class Figures:
    """The figures of one experiment, and where they are from.

    Attributes:
        source: "live" (measured just now), "recorded" (on another machine, or earlier), or "none".
        values: name -> number, in the order of the experiment's labels; empty if there are none.
        gpu, torch, date: of the measurement; None if there is none.
        problem: the GPU here and why it could not run the experiment; None if it could, or if there is no GPU.
    """

    lesson: str
    name: str
    source: str
    values: dict[str, Number] = field(default_factory=dict)
    gpu: str | None = None
    torch: str | None = None
    date: str | None = None
    problem: str | None = None


_experiments: dict[tuple[str, str], Experiment] = {}


def experiment(
    lesson: str, name: str, *, en: str, zh: str, small: dict, labels: dict[str, tuple[str, str]] | None = None
) -> Callable:
    """Register the function below it as a lesson's GPU experiment; it is returned unchanged.

    Args:
        lesson: two digits.
        name, en, zh: what it is called in code, and its title in both languages.
        small, labels: as in `Experiment`.

    Raises:
        ValueError: the lesson has an experiment of that name.
    """

    def register(function: Callable[..., dict[str, Number]]) -> Callable[..., dict[str, Number]]:
        if (lesson, name) in _experiments:
            raise ValueError(f"lesson {lesson} has two experiments called {name!r}")
        _experiments[lesson, name] = Experiment(lesson, name, function, (en, zh), labels or {}, small)
        return function

    return register


def experiments(lesson: str | None = None) -> list[Experiment]:
    """The experiments of one lesson, or of all, in the order in which they are written.

    Raises:
        ValueError: the lesson has none.
    """
    for module in sorted(found.name for found in pkgutil.iter_modules([str(FOLDER)])):
        if module.startswith("lesson_"):
            importlib.import_module(f"{__name__}.{module}")
    found = [item for item in _experiments.values() if lesson in (None, item.lesson)]
    if not found:
        known = ", ".join(sorted({item.lesson for item in _experiments.values()}))
        raise ValueError(f"lesson is {lesson!r}; GPU experiments are in {known}")
    return found


def run(lesson: str, name: str, device: str | torch.device = "cuda", *, small: bool = False) -> dict[str, Number]:
    """Run one experiment, from the same random numbers every time; the generators are as they were after it.

    Args:
        small: with the sizes that the tests use.

    Returns:
        name -> number; every name ends in one of `UNITS`.

    Raises:
        ValueError: no such experiment; one of its figures has no unit, or is no finite number of its unit's kind.
    """
    chosen = _find(lesson, name)
    with seeded(0):
        values = chosen.function(torch.device(device), **(chosen.small if small else {}))
    for key, value in values.items():
        _check(f"{lesson} {name}: {key}", value)
    return values


def figures(lesson: str, name: str, *, folder: Path = FOLDER) -> Figures:
    """The figures of one experiment: measured now where there is a GPU, else from the latest recording, else none.

    Args:
        folder: where the recordings are.

    Raises:
        ValueError: no such experiment.
    """
    chosen = _find(lesson, name)
    problem = None
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_name()
        try:
            values = _in_order(run(lesson, name), chosen)
            return Figures(lesson, name, "live", values, gpu, str(torch.__version__), _today())
        except RuntimeError as error:  # too little memory, too old for this torch: a lesson goes on, and says so
            problem = f"{gpu}: {str(error).splitlines()[0].split('. ')[0]}"
    recordings = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).glob("*.json"))]
    for recording in sorted(recordings, key=lambda item: item["date"], reverse=True):
        values = recording["figures"].get(lesson, {}).get(name)
        if values:
            origin = (recording["gpu"], recording["torch"], recording["date"])
            return Figures(lesson, name, "recorded", _in_order(values, chosen), *origin, problem)
    return Figures(lesson, name, "none", problem=problem)


def record(values: dict[str, dict[str, dict[str, Number]]], *, command: str, folder: Path = FOLDER) -> Path:
    """Write the figures of this machine's GPU to `folder`/<gpu>.json, with all that says where they are from.

    Args:
        values: lesson -> experiment -> figure -> number.
        command: what was run.

    Returns:
        The file. The same figures give the same bytes, whatever their order.
    """
    gpu = torch.cuda.get_device_name()
    recording = {
        "gpu": gpu,
        "gpu_memory_bytes": torch.cuda.get_device_properties(0).total_memory,
        "driver": _driver(),
        "torch": str(torch.__version__),
        "date": _today(),
        "command": command,
        "figures": values,
    }
    path = Path(folder) / f"{re.sub(r'[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json"
    path.write_text(json.dumps(recording, indent=2, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")
    return path


def label_of(lesson: str, name: str, figure: str) -> tuple[str, str]:
    """What a figure is called in both languages; its name as `code` where nobody has said."""
    for pattern, (en, zh) in _find(lesson, name).labels.items():
        if match := _match(pattern, figure):
            return en.format(*match.groups()), zh.format(*match.groups())
    return f"`{figure}`", f"`{figure}`"


def _match(pattern: str, figure: str) -> re.Match | None:
    return re.fullmatch(re.escape(pattern).replace(r"\{\}", "(.+)"), figure)


def _in_order(values: dict[str, Number], chosen: Experiment) -> dict[str, Number]:
    """Sorted by label, then by the numbers in the name (512 before 1024): a recording is sorted by letters."""

    def place(figure: str) -> tuple[int, list[int], str]:
        places = [place for place, pattern in enumerate(chosen.labels) if _match(pattern, figure)]
        return places[0] if places else len(chosen.labels), [int(n) for n in re.findall(r"\d+", figure)], figure

    return {figure: values[figure] for figure in sorted(values, key=place)}


def _find(lesson: str, name: str) -> Experiment:
    for item in experiments(lesson):
        if item.name == name:
            return item
    known = ", ".join(item.name for item in experiments(lesson))
    raise ValueError(f"name is {name!r}; the GPU experiments of lesson {lesson} are {known}")


def _check(name: str, value: Number) -> None:
    unit = name.rpartition("_")[2]
    if unit not in UNITS:
        raise ValueError(f"{name} does not say its unit: a figure's name ends in one of {', '.join(UNITS)}")
    whole = unit in UNITS[:3]
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}; it takes a {'whole' if whole else 'finite'} number")


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
