"""GPU experiments of the lessons, which are functions of a device and sizes.

An experiment yields dicts from the name of a result to a number or a string. The name of every
number ends in its unit. A string states how numbers were measured, for example which attention
kernel ran. Experiments also run on a CPU, so that tests can run them at small sizes. On a CPU, the
numbers that only the CUDA allocator provides are missing.
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

from course_lib._torch.devices import wait_for
from course_lib._torch.modes import TorchDispatchMode
from course_lib.labels import text
from course_lib.memory import measure
from course_lib.models import Decoder, random_tokens, seed_generators

from .allocator import release

Number = int | float
Part = Mapping[str, Number | str | None]
# The name of a result ends in one of these units. Results in one of the first three units are whole
# numbers.
UNITS = ("bytes", "flops", "count", "seconds", "percent")

#: Quantities measured for each variant of an experiment. A result is called `<variant>_<quantity>`,
#: and its label is "variant: quantity".
QUANTITIES = {
    "predicted_bytes": "predicted peak",
    "peak_bytes": "peak of tensors",
    "allocator_peak_bytes": "allocator's peak",
    "seconds": "time",
}
#: Sizes of a decoder whose step takes about a second on any device; tests use them.
TINY = {"vocabulary": 64, "hidden": 32, "heads": 2, "layers": 2, "sequence": 16, "batch": 2}


#: Names of the sizes that may be halved when memory runs out. The first one whose half is at least
#: the experiment's small size is halved.
HALVED = ("batch", "megabytes", "lengths", "layers", "sequence")
#: The GPU waits for this many cycles, about 20 ms, while Python queues the work that is timed.
SPIN_CYCLES = 40_000_000


@dataclass(frozen=True)
class Run:
    """Results of a GPU experiment.

    Attributes:
        figures: Dict from the name of a result, such as "peak_bytes", to its number.
        sizes: Dict from the name of a size, such as "layers", to the value with which the
            experiment ran.
        notes: Dict from the name of a note to a text that states how results were measured.
    """

    figures: dict[str, Number]
    sizes: dict[str, Any]
    notes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """A GPU experiment of a lesson.

    Attributes:
        lesson: Two digits of the lesson, such as "05".
        name: Name of the experiment.
        function: Function that takes a device, and sizes as keyword arguments. It yields dicts.
            They map the name of a result to a number, and the name of a note to a string.
        title: Title of the experiment, as a label (text with a Chinese translation).
        labels: Dict from the name of a result to its label. A name may have placeholders, such as
            {n}, that match any text. This text replaces the same placeholders in the label.
        sizes: Dict from the name of a size, such as "layers", to its value.
        small: Smaller sizes, with which the experiment takes about a second on any device.
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
    ) -> Run:
        """Run the experiment on a device, with fixed seeds of the random number generators.

        The generators are restored afterwards. If memory runs out, the experiment starts again with
        one of its sizes halved. This is the first size named in `HALVED` that can be halved without
        becoming smaller than the size in `small`.

        Args:
            device: Device on which the experiment runs.
            small: Whether to use the sizes in the attribute `small`.

        Raises:
            MemoryError: Memory is insufficient even at the smallest sizes.
            ValueError: The name of a result does not end in a unit, or the result is not a valid
                number.
        """
        device, sizes = torch.device(device), self.small if small else self.sizes
        while True:
            try:
                release(device)
                with seed_generators(0):
                    return self._run(device, sizes)
            except (MemoryError, RuntimeError) as error:
                if not _is_lack_of_memory(error):
                    raise
                problem, smaller = error_summary(error), self._next_smaller(sizes)
                if smaller is None:
                    raise MemoryError(
                        f"{device} has too little memory for the smallest size of this experiment:"
                        f" {problem}"
                    ) from None
            finally:
                release(device)
            # The next attempt starts outside the handler, because the error keeps tensors alive.
            sizes = smaller

    def _run(self, device: torch.device, sizes: dict[str, Any]) -> Run:
        figures: dict[str, Number] = {}
        notes: dict[str, str] = {}
        for part in self.function(device, **sizes):
            for name, value in part.items():
                if isinstance(value, str):
                    notes[name] = value
                else:
                    check_result(f"{self.lesson} {self.name}: {name}", value)
                    figures[name] = value
        return Run(figures, sizes, notes)

    def _next_smaller(self, sizes: dict[str, Any]) -> dict[str, Any] | None:
        """Return sizes with one of `HALVED` halved, or None if no size can be halved again."""
        for name in HALVED:
            if name in sizes:
                given = sizes[name]
                half = tuple(n // 2 for n in given) if isinstance(given, tuple) else given // 2
                if half >= self.small[name]:
                    return {**sizes, name: half}
        return None

    def label_of(self, figure: str) -> str:
        """Return the label of a result, or its name in `backquotes` if it has no label.

        Args:
            figure: Name of the result.
        """
        for pattern, words in self.labels.items():
            if match := _match(pattern, figure):
                return text(words, **match.groupdict())
        return f"`{figure}`"

    def in_order(self, values: dict[str, Number]) -> dict[str, Number]:
        """Sort results by the order of their labels, then by the numbers in their names.

        For example, "fused_512_bytes" comes before "fused_1024_bytes". Sorting is necessary because
        a recording stores its results in alphabetical order.

        Args:
            values: Dict from the name of a result to its number.
        """

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
    variants: dict[str, str] | None = None,
    labels: dict[str, str] | None = None,
) -> Callable[[Callable], Experiment]:
    """Turn a function into a GPU experiment with the same name.

    The experiment belongs to the lesson whose package defines the function.

    Args:
        title, sizes, small, labels: Attributes of `Experiment`.
        variants: Dict from the name of a variant, such as "plain", to its label. The results of
            each variant then get labels automatically. For example, the result "plain_seconds" gets
            the label "plain: time". `QUANTITIES` lists the results that get such labels.
    """
    derived = {
        f"{variant}_{quantity}": text("{variant}: {quantity}", variant=words, quantity=what)
        for variant, words in (variants or {}).items()
        for quantity, what in QUANTITIES.items()
    }

    def decorate(function: Callable[..., Iterator[Part]]) -> Experiment:
        # "04" for a function in a module of the package lesson_04
        lesson = function.__module__.rpartition("lesson_")[2][:2]
        return Experiment(
            lesson, function.__name__, function, title, {**(labels or {}), **derived}, sizes, small
        )

    return decorate


def peaks(variant: str, step: Callable[[], object], **held: object) -> Part:
    """Measure a step, and return two peaks: of live tensors, and of the CUDA allocator.

    Args:
        variant: Name of the step, such as "plain".
        step: Function that runs the step.
        held: Keyword arguments of `measure`, such as the model.

    Returns:
        Dict with the keys "<variant>_peak_bytes" and "<variant>_allocator_peak_bytes". The second
        value is None on a CPU.
    """
    found = measure(step, repeats=1, **held)
    return {
        f"{variant}_peak_bytes": found.peak_bytes,
        f"{variant}_allocator_peak_bytes": found.allocator_peak_bytes,
    }


def seconds(
    device: torch.device, variants: Mapping[str, Callable[[], object]], rounds: int = 5
) -> dict[str, Number]:
    """Measure the time of several steps, and return the median time of each step.

    Each round calls every step once. Every second round calls the steps in reverse order, so that
    no step always follows the same other step. An additional first round is a warm-up, whose times
    are not counted.

    Args:
        device: Device on which the steps run.
        variants: Dict from the name of a step, such as "plain", to a function that runs it.
        rounds: Number of counted rounds.

    Returns:
        Dict with one key "<name>_seconds" per step, whose value is the median in seconds.
    """
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    for i in range(rounds + 1):
        for variant in list(variants)[:: 1 if i % 2 else -1]:
            times[variant].append(_time_step(device, variants[variant]))
    return {f"{variant}_seconds": statistics.median(each[1:]) for variant, each in times.items()}


def compare_variants(
    device: torch.device, variants: Mapping[str, Callable[[], object]], **held: object
) -> Iterator[Part]:
    """Measure the peaks of several steps one after the other, and then the times of all steps.

    Args:
        device: Device on which the steps run.
        variants: Dict from the name of a step, such as "plain", to a function that runs it.
        held: Keyword arguments of `measure`, such as the model.

    Yields:
        The results of `peaks` for each step, and then the result of `seconds`.
    """
    for variant, step in variants.items():
        yield peaks(variant, step, **held)
    yield seconds(device, variants)


def _time_step(device: torch.device, step: Callable[[], object]) -> float:
    """Return the seconds that a step takes.

    On CUDA, the time starts when the GPU begins the step, so it excludes the time in which Python
    queues the first kernels.
    """
    wait_for(device)
    if device.type != "cuda":
        start = time.perf_counter()
        step()
        return time.perf_counter() - start
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SPIN_CYCLES)
    began.record()
    step()
    wait_for(device)  # `ended` alone would not wait for copies on other streams
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3


class AttentionKernels(TorchDispatchMode):
    """A dispatch mode that records which kernels `F.scaled_dot_product_attention` runs.

    After the `with` block, `str()` returns the names of the kernels, such as "FLASH_ATTENTION". It
    returns "MATH" if no fused kernel ran.
    """

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
    """Build a decoder and a batch of random tokens on a device.

    Args:
        device: The device.
        batch: Number of sequences.
        sizes: Arguments of `Decoder`.
    """
    with device:
        model = Decoder(**sizes)
    return model, random_tokens(batch, sizes["sequence"], sizes["vocabulary"]).to(device)


def need_host_memory(count: int) -> None:
    """Raise an error if less than `count` bytes of host memory are available.

    Call this function before memory is pinned, because the operating system may kill a process that
    pins too much. On systems other than Linux, the function does nothing.

    Raises:
        MemoryError: Less than `count` bytes are available.
    """
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.M)
    except OSError:  # not Linux
        return
    free = 1024 * int(found[1]) if found else count
    if count > free:
        raise MemoryError(
            f"pinning needs {count / 1e9:.0f} GB of host memory, but {free / 1e9:.0f} GB are free"
        )


def error_summary(error: BaseException) -> str:
    """Return an error's type and first sentence as text."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0].split('. ')[0]}"


def _is_lack_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out.

    The errors of cuBLAS and of the driver differ from those of PyTorch.
    """
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        words in str(error) for words in ("out of memory", "ALLOC_FAILED")
    )


def check_result(name: str, value: object) -> None:
    """Check the name and the value of a result of a GPU experiment.

    Raises:
        ValueError: The name does not end in a unit of `UNITS`, or the value is not a finite number.
            Values in bytes, FLOPs and counts must also be whole numbers.
    """
    unit = name.rpartition("_")[2]
    if unit not in UNITS:
        raise ValueError(
            f"the name of a result must end in its unit, one of {', '.join(UNITS)}, got {name!r}"
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
