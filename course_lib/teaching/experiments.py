"""The lessons' GPU experiments: functions of a device and sizes that yield flat dicts of numbers,
each once measured.

Every number's name ends in its unit; a string says how they were measured (which attention kernel
ran). The functions run on a CPU too, where what only the CUDA allocator knows is left out: so tests
run them, at small sizes.
"""

import math
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib._torch import wait_for
from course_lib.labels import text
from course_lib.memory import measure
from course_lib.models import Decoder, random_tokens, seeded

from .allocator import release

Number = int | float
Part = Mapping[str, Number | str | None]
# the last word of a figure's name; the first three are whole
UNITS = ("bytes", "flops", "count", "seconds", "percent")

#: What is measured of an arm: the figure is called `<arm>_<quantity>`, its label is "arm:
#: quantity".
QUANTITIES = {
    "predicted_bytes": "predicted peak",
    "peak_bytes": "peak of tensors",
    "allocator_peak_bytes": "allocator's peak",
    "seconds": "time",
}
#: A decoder whose step takes a second on any device, for the tests.
TINY = {"vocabulary": 64, "hidden": 32, "heads": 2, "layers": 2, "sequence": 16, "batch": 2}


#: What is halved where there is no room, the first of these that is above its small size.
HALVED = ("batch", "megabytes", "lengths", "layers", "sequence")
#: The GPU spins for so long, 20 ms or so, while Python queues up what is timed.
SPIN_CYCLES = 40_000_000


@dataclass(frozen=True)
class Run:
    """Findings of an experiment so far.

    Attributes:
        figures: name -> number.
        sizes: what it was run with.
        notes: name -> what else there is to know of the figures.
    """

    figures: dict[str, Number]
    sizes: dict[str, Any]
    notes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """One GPU experiment of a lesson.

    Attributes:
        function: takes a device, and sizes by keyword; yields name -> number, or string.
        title: a label.
        labels: name of a figure -> its label; a placeholder in the name is whatever stands there,
            and in the label too.
        sizes, small: what it is run with; small ones take a second on any device.
    """

    lesson: str
    name: str
    function: Callable[..., Iterator[Part]]
    title: str
    labels: dict[str, str]
    sizes: dict[str, Any]
    small: dict[str, Any]

    def run(
        self,
        device: str | torch.device = "cuda",
        *,
        small: bool = False,
        found: Callable[[Run], object] | None = None,
    ) -> Run:
        """Figures of an experiment, from the same random numbers every time; the generators are as
        they were after it.

        Where there is no room for it, it starts again with half the batch, then with fewer layers,
        then shorter.

        Args:
            found: called with all that has been found whenever there is more of it.

        Raises:
            MemoryError: there is no room for it at any size.
            ValueError: one of the figures has no unit, or is no finite number of its unit's kind.
        """
        device, sizes = torch.device(device), self.small if small else self.sizes
        while True:
            try:
                release(device)
                with seeded(0):
                    for run in self._parts(device, sizes):
                        if found is not None:
                            found(run)
                return run
            except (MemoryError, RuntimeError) as error:
                if not _is_lack_of_memory(error):
                    raise
                problem, less = in_short(error), self._less(sizes)
                if less is None:
                    raise MemoryError(f"there is no room for it at any size ({problem})") from None
            finally:
                release(device)
            # here, because the error in hand above holds the tensors of the failed attempt
            sizes = less

    def _parts(self, device: torch.device, sizes: dict[str, Any]) -> Iterator[Run]:
        figures: dict[str, Number] = {}
        notes: dict[str, str] = {}
        for part in self.function(device, **sizes):
            for name, value in part.items():
                if isinstance(value, str):
                    notes[name] = value
                else:
                    check_figure(f"{self.lesson} {self.name}: {name}", value)
                    figures[name] = value
            yield Run(dict(figures), sizes, dict(notes))

    def _less(self, sizes: dict[str, Any]) -> dict[str, Any] | None:
        """The next smaller sizes; None if they are small."""
        for name in HALVED:
            if name in sizes:
                given = sizes[name]
                half = tuple(n // 2 for n in given) if isinstance(given, tuple) else given // 2
                if half >= self.small[name]:
                    return {**sizes, name: half}
        return None

    def label_of(self, figure: str) -> str:
        """Label of a figure; its name as `code` where nobody has said."""
        for pattern, words in self.labels.items():
            if match := _match(pattern, figure):
                return text(words, **match.groupdict())
        return f"`{figure}`"

    def in_order(self, values: dict[str, Number]) -> dict[str, Number]:
        """Sorted by label, then by the numbers in the name (512 before 1024): a recording is sorted
        by letters."""

        def place(figure: str) -> tuple[int, list[int], str]:
            places = [place for place, pattern in enumerate(self.labels) if _match(pattern, figure)]
            return (
                places[0] if places else len(self.labels),
                [int(n) for n in re.findall(r"\d+", figure)],
                figure,
            )

        return {figure: values[figure] for figure in sorted(values, key=place)}


def experiment(
    *,
    title: str,
    sizes: dict,
    small: dict,
    arms: dict[str, str] | None = None,
    labels: dict[str, str] | None = None,
) -> Callable[[Callable], Experiment]:
    """Make the function below it a GPU experiment of the lesson in whose module it stands, under
    its own name.

    Args:
        title, sizes, small, labels: as in `Experiment`.
        arms: name -> label of each arm, for labels of its `QUANTITIES`.
    """
    derived = {
        f"{arm}_{quantity}": text("{arm}: {quantity}", arm=words, quantity=what)
        for arm, words in (arms or {}).items()
        for quantity, what in QUANTITIES.items()
    }

    def made(function: Callable[..., Iterator[Part]]) -> Experiment:
        lesson = function.__module__.rpartition("lesson_")[2][:2]  # of a package's part, too
        return Experiment(
            lesson, function.__name__, function, title, {**(labels or {}), **derived}, sizes, small
        )

    return made


def peaks(arm: str, step: Callable[[], object], **held: object) -> Part:
    """The peaks of one arm, as `measure(step)` finds them, whose keyword arguments may follow."""
    found = measure(step, repeats=1, **held)
    return {
        f"{arm}_peak_bytes": found.peak_bytes,
        f"{arm}_allocator_peak_bytes": found.allocator_peak_bytes,
    }


def seconds(
    device: torch.device, arms: Mapping[str, Callable[[], object]], rounds: int = 5
) -> dict[str, Number]:
    """The median seconds of each arm: in turns, a call of each in every round, from either end; the
    first warms up."""
    taken: dict[str, list[float]] = {arm: [] for arm in arms}
    for i in range(rounds + 1):
        for arm in list(arms)[:: 1 if i % 2 else -1]:
            taken[arm].append(_clocked(device, arms[arm]))
    return {f"{arm}_seconds": statistics.median(times[1:]) for arm, times in taken.items()}


def compared(
    device: torch.device, arms: Mapping[str, Callable[[], object]], **held: object
) -> Iterator[Part]:
    """The `peaks` of each arm, one after the other, and then the `seconds` of all."""
    for arm, step in arms.items():
        yield peaks(arm, step, **held)
    yield seconds(device, arms)


def _clocked(device: torch.device, step: Callable[[], object]) -> float:
    """Seconds of a step; on CUDA from when the GPU begins, so that Python is not timed where it
    runs ahead."""
    wait_for(device)
    if device.type != "cuda":
        start = time.perf_counter()
        step()
        return time.perf_counter() - start
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SPIN_CYCLES)
    began.record()
    step()
    wait_for(device)  # for copies in other streams as well
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3


class AttentionKernels(TorchDispatchMode):
    """Kernels that `F.scaled_dot_product_attention` has run inside the block: `str()` of it names
    them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, None] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if match := re.fullmatch(
            r"aten::_scaled_dot_product_(\w+_attention)(_for_cpu)?", func.name()
        ):
            self.seen[match[1].upper()] = None
        return func(*args, **(kwargs or {}))

    def __str__(self) -> str:
        return ", ".join(self.seen) or "MATH"


def decoder_and_tokens(
    device: torch.device, *, batch: int, **sizes: Any
) -> tuple[Decoder, torch.Tensor]:
    """A decoder and the tokens of one step, made on the device."""
    with device:
        model = Decoder(**sizes)
    return model, random_tokens(batch, sizes["sequence"], sizes["vocabulary"]).to(device)


def need_host_memory(count: int) -> None:
    """Refuse to pin so many bytes where there are not as many: the system would end the process
    instead.

    Raises:
        MemoryError: as said.
    """
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.M)
    except OSError:  # not Linux
        return
    free = 1024 * int(found[1]) if found else count
    if count > free:
        raise MemoryError(
            f"it pins {count / 1e9:.0f} GB of host memory, of which {free / 1e9:.0f} GB are free"
        )


def in_short(error: BaseException) -> str:
    """An error's first sentence, with its kind."""
    said = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {said[0].split('. ')[0]}"


def _is_lack_of_memory(error: BaseException) -> bool:
    """True also of what cuBLAS, and the driver for pinned memory, say in other words."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        words in str(error) for words in ("out of memory", "ALLOC_FAILED")
    )


def check_figure(name: str, value: object) -> None:
    """Refuse a figure whose name says no unit, or whose value is no finite number of its kind.

    Raises:
        ValueError: as said.
    """
    unit = name.rpartition("_")[2]
    if unit not in UNITS:
        raise ValueError(
            f"the name of a figure must end in its unit, one of {', '.join(UNITS)}, got {name!r}"
        )
    whole = unit in UNITS[:3]
    if (
        isinstance(value, bool)
        or not isinstance(value, int if whole else Number)
        or not math.isfinite(value)
    ):
        raise ValueError(f"{name} must be a {'whole' if whole else 'finite'} number, got {value!r}")


def _match(pattern: str, figure: str) -> re.Match | None:
    return re.fullmatch(re.sub(r"\\{(\w+)\\}", r"(?P<\1>.+)", re.escape(pattern)), figure)
