"""The lessons' GPU experiments: functions of a device and sizes that return a flat dict of numbers.

Every number's name ends in its unit. The functions run on a CPU too, where what only the CUDA allocator knows is left
out: so tests run them, at small sizes.
"""

import gc
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from course_lib.memory import measure
from course_lib.models import Decoder, random_tokens, seeded

Number = int | float
Pair = tuple[str, str]
UNITS = ("bytes", "flops", "count", "seconds", "percent")  # the last word of a figure's name; the first three are whole

#: What is measured of an arm: the figure is called `<arm>_<quantity>`, its label is "arm: quantity".
QUANTITIES = {
    "predicted_bytes": ("predicted peak", "预测峰值"),
    "peak_bytes": ("peak of tensors", "张量峰值"),
    "allocator_peak_bytes": ("allocator's peak", "分配器峰值"),
    "seconds": ("time", "时间"),
}
#: A decoder whose step takes a second on any device, for the tests.
TINY = {"vocabulary": 64, "hidden": 32, "heads": 2, "layers": 2, "sequence": 16, "batch": 2}


@dataclass(frozen=True)
class Experiment:
    """One GPU experiment of a lesson.

    Attributes:
        function: takes a device, and sizes by keyword; returns name -> number.
        title: (English, Chinese).
        labels: name of a figure -> (English, Chinese); a `{}` stands for whatever the name has there.
        sizes, small: what it is run with; small ones take a second on any device.
    """

    lesson: str
    name: str
    function: Callable[..., dict[str, Number]]
    title: Pair
    labels: dict[str, Pair]
    sizes: dict[str, Any]
    small: dict[str, Any]

    def run(self, device: str | torch.device = "cuda", *, small: bool = False) -> dict[str, Number]:
        """Its figures, from the same random numbers every time; the generators are as they were after it.

        Raises:
            ValueError: one of the figures has no unit, or is no finite number of its unit's kind.
        """
        with seeded(0):
            values = self.function(torch.device(device), **(self.small if small else self.sizes))
        for name, value in values.items():
            check_figure(f"{self.lesson} {self.name}: {name}", value)
        return values

    def label_of(self, figure: str) -> Pair:
        """What a figure is called in both languages; its name as `code` where nobody has said."""
        for pattern, (en, zh) in self.labels.items():
            if match := _match(pattern, figure):
                return en.format(*match.groups()), zh.format(*match.groups())
        return f"`{figure}`", f"`{figure}`"

    def in_order(self, values: dict[str, Number]) -> dict[str, Number]:
        """Sorted by label, then by the numbers in the name (512 before 1024): a recording is sorted by letters."""

        def place(figure: str) -> tuple[int, list[int], str]:
            places = [place for place, pattern in enumerate(self.labels) if _match(pattern, figure)]
            return places[0] if places else len(self.labels), [int(n) for n in re.findall(r"\d+", figure)], figure

        return {figure: values[figure] for figure in sorted(values, key=place)}


def experiment(
    *, title: Pair, sizes: dict, small: dict, arms: dict[str, Pair] | None = None, labels: dict[str, Pair] | None = None
) -> Callable[[Callable], Experiment]:
    """Make the function below it a GPU experiment of the lesson in whose module it stands, under its own name.

    Args:
        title, sizes, small, labels: as in `Experiment`.
        arms: name -> (English, Chinese) of each arm, for labels of its `QUANTITIES`.
    """
    derived = {
        f"{arm}_{quantity}": (f"{en}: {what[0]}", f"{zh}：{what[1]}")
        for arm, (en, zh) in (arms or {}).items()
        for quantity, what in QUANTITIES.items()
    }

    def made(function: Callable[..., dict[str, Number]]) -> Experiment:
        lesson = function.__module__[-2:]
        return Experiment(lesson, function.__name__, function, title, {**(labels or {}), **derived}, sizes, small)

    return made


def measured(arm: str, step: Callable[[], object], **held: object) -> dict[str, Number]:
    """The figures of one arm: `measure(step)`, whose keyword arguments may follow."""
    found = measure(step, **held)
    return {
        f"{arm}_peak_bytes": found.peak_bytes,
        f"{arm}_allocator_peak_bytes": found.allocator_peak_bytes,
        f"{arm}_seconds": found.seconds,
    }


def decoder_and_tokens(device: torch.device, *, batch: int, **sizes: Any) -> tuple[Decoder, torch.Tensor]:
    """A decoder and the tokens of one step, on the device."""
    model = Decoder(**sizes).to(device)
    tokens = random_tokens(batch, sizes["sequence"], sizes["vocabulary"]).to(device)
    gc.collect()  # the parameters' CPU twins, where modules refer to each other
    return model, tokens


def check_figure(name: str, value: object) -> None:
    """Refuse a figure whose name says no unit, or whose value is no finite number of its kind.

    Raises:
        ValueError: as said.
    """
    unit = name.rpartition("_")[2]
    if unit not in UNITS:
        raise ValueError(f"{name} does not say its unit: a figure's name ends in one of {', '.join(UNITS)}")
    whole = unit in UNITS[:3]
    if isinstance(value, bool) or not isinstance(value, int if whole else Number) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}; it takes a {'whole' if whole else 'finite'} number")


def _match(pattern: str, figure: str) -> re.Match | None:
    return re.fullmatch(re.escape(pattern).replace(r"\{\}", "(.+)"), figure)
