"""Functions that all benchmarks use: rows, alternating calls, and ratios of medians.

A row compares one technique of `course_lib` with one peer on the same work. Its ratio is the median
time of the course's calls divided by the median time of the peer's. Its spread is the first and the
third quartile of the ratios of the single rounds.
"""

from __future__ import annotations

import gc
import importlib.util
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from turns import in_turns

from course_lib.memory import MemoryMeter

COURSE = "course"


@dataclass(frozen=True)
class Row:
    """A row of the scoreboard: one comparison of the course with a peer.

    Attributes:
        work: Work that both do, for example "a step of a decoder with 12 layers".
        peer: Name of the peer.
        ratio: Median time of the course divided by that of the peer; None if there is none.
        low, high: Quartiles of the ratio over the rounds.
        course_bytes, peer_bytes: Peak bytes, predicted bytes or bytes sent; None if not measured.
        note: Another remark, for example why a peer did not run or why it is faster.
        points: Pairs of a size and the CPU seconds for it, in rows about growth.
    """

    work: str
    peer: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    course_bytes: int | None = None
    peer_bytes: int | None = None
    note: str = ""
    points: tuple[tuple[int, float], ...] = ()


def compare(
    work: str,
    arms: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    bytes_of: Mapping[str, int] | None = None,
    notes: Mapping[str, str] | None = None,
) -> Iterator[Row]:
    """Yield a row for each peer of `arms`; the function named "course" is compared with it.

    Args:
        work: Description of the work that every function does.
        arms: Dict from "course" or a peer's name to a function that does the work once.
        rounds: Number of timed calls of each function.
        bytes_of: Dict from "course" or a peer's name to the bytes in the rows.
        notes: Dict from a peer's name to the note in its row.
    """
    sizes, notes = bytes_of or {}, notes or {}
    gc.collect()
    seconds = in_turns(arms, rounds)
    course = seconds[COURSE]
    for peer in (name for name in arms if name != COURSE):
        ratios = [ours / theirs for ours, theirs in zip(course, seconds[peer], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4) if rounds > 1 else ratios * 3
        ratio = statistics.median(course) / statistics.median(seconds[peer])
        sized = (sizes.get(COURSE), sizes.get(peer))
        yield Row(work, peer, ratio, low, high, *sized, notes.get(peer, ""))


def peak(step: Callable[[], object]) -> int:
    """Return the peak of live bytes in the second call of `step`."""
    step()
    with MemoryMeter() as meter:
        step()
    return meter.peak_bytes


def installed(*modules: str) -> bool:
    """Return whether all these modules can be imported."""
    return all(importlib.util.find_spec(module) is not None for module in modules)


def missing(work: str, peer: str) -> Row:
    """Return a row that says that a peer is not installed."""
    return Row(work, peer, note="not installed")


@contextmanager
def one_thread() -> Iterator[None]:
    """Make PyTorch use one thread, because idle threads slow down short steps."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
