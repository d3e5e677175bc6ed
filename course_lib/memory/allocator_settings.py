"""Settings of the caching allocator in PYTORCH_CUDA_ALLOC_CONF, checked as PyTorch checks them.

Source: c10/core/AllocatorConfig.h and .cpp, c10/cuda/CUDAAllocatorConfig.h (torch 2.13).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .._check import kind, number, whole

MIB = 1 << 20
# kMinBlockSize: every block size is a multiple of it.
MIN_BLOCK_BYTES = 512
# This is large_segment_size_ in the source, and kLargeBuffer until 2.9.
LARGE_SEGMENT_BYTES = 20 * MIB
# kRoundUpPowerOfTwoIntervals: each interval lies between two powers of two. The first one holds for
# 1 MiB and all sizes below it, the last one for 32 GiB and all sizes above it.
INTERVALS = 16


@dataclass(frozen=True)
class AllocatorSettings:
    """Settings that change which bytes are reserved.

    Args:
        max_split_size_bytes: Size from which blocks are never split, a whole number of MiB. If
            None, all blocks may be split.
        roundup_power2_divisions: Number of steps between two powers of two. Sizes are rounded up to
            the next step. It is one number for all sizes, or a mapping from MiB to numbers in which
            ">" stands for all larger sizes, as in `{64: 8, ">": 2}`.
        expandable_segments: Whether each pool has one segment that grows page by page, instead of
            many segments.
        garbage_collection_threshold: Fraction of the memory that the process may reserve. While
            more is reserved, whole cached segments that have been unused for long are released
            before a new one is requested. As in PyTorch, it acts only if `memory_fraction` is below
            1.
        max_non_split_rounding_bytes: A block that may not be split is given only to requests that
            it exceeds by less than this number of bytes, a whole number of MiB. None means 20 MiB.
        large_segment_bytes: Size of a segment for requests above 1 and below 10 MiB, a whole number
            of MiB (older versions have no such setting).
        memory_fraction: Fraction of the device that may be reserved
            (`torch.cuda.set_per_process_memory_fraction`).

    Raises:
        TypeError, ValueError: PyTorch would refuse the value.
    """

    max_split_size_bytes: int | None = None
    roundup_power2_divisions: int | Mapping[int | str, int] | None = None
    expandable_segments: bool = False
    garbage_collection_threshold: float | None = None
    max_non_split_rounding_bytes: int | None = None
    large_segment_bytes: int = LARGE_SEGMENT_BYTES
    memory_fraction: float = 1.0

    def __post_init__(self):
        _whole_mib("large_segment_bytes", self.large_segment_bytes, 11 * MIB)
        for name in ("max_split_size_bytes", "max_non_split_rounding_bytes"):
            if getattr(self, name) is not None:
                _whole_mib(name, getattr(self, name), self.large_segment_bytes)
        kind("expandable_segments", self.expandable_segments, bool, "True or False")
        number("memory_fraction", self.memory_fraction, 0, 1)
        threshold = self.garbage_collection_threshold
        if threshold is not None and not 0 < number("garbage_collection_threshold", threshold) < 1:
            raise ValueError(
                f"garbage_collection_threshold must be above 0 and below 1, got {threshold}"
            )
        object.__setattr__(self, "_divisions", _divisions(self.roundup_power2_divisions))

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """Return the settings that a value of `PYTORCH_CUDA_ALLOC_CONF` describes.

        Settings that do not change which bytes of the device are reserved, such as `backend:native`
        and those of pinned host memory, are accepted and ignored. A `UserWarning` names them.

        Example:
            >>> AllocatorSettings.parse("max_split_size_mb:128").max_split_size_bytes
            134217728

        Raises:
            ValueError: A setting is unknown, or has a value that PyTorch refuses or that this
                simulation does not follow, such as `backend:cudaMallocAsync`.
        """
        chosen = {}
        ignored = []
        text = "".join(kind("text", text, str, "a string").split())
        items = re.split(r",(?![^\[]*\])", text)  # split at commas outside brackets
        for item in filter(None, items):
            key, _, value = item.partition(":")
            if key not in _PARSERS and key not in _IGNORED:
                known = ", ".join([*_PARSERS, *_IGNORED])
                raise ValueError(
                    f"{key!r} in {text!r} is not a setting of this simulation; its settings are"
                    f" {known}"
                )
            name, parse = _PARSERS[key] if key in _PARSERS else (None, _IGNORED[key])
            try:
                parsed = parse(value)
            except (ValueError, KeyError):
                raise ValueError(f"{key} must be {_ALLOWED[parse]}, got {value!r}") from None
            if name is None:
                ignored.append(key)
            else:
                chosen[name] = parsed
        if ignored:
            warnings.warn(
                f"these settings were ignored, because they do not change which bytes of the device"
                f" are reserved: {', '.join(ignored)}",
                stacklevel=2,
            )
        return cls(**chosen)

    def round_size(self, size_bytes: int) -> int:
        """Return the size of the block for a request in bytes. PyTorch's name is `round_size`."""
        if size_bytes < MIN_BLOCK_BYTES:
            return MIN_BLOCK_BYTES
        power = size_bytes.bit_length() - 1  # 2^power <= size
        divisions = self._divisions[min(max(power - 20, 0), INTERVALS - 1)]
        if divisions > 1 and size_bytes > MIN_BLOCK_BYTES * divisions:
            return round_up(size_bytes, (1 << power) // divisions)
        return round_up(size_bytes, MIN_BLOCK_BYTES)


def round_up(size: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least `size`."""
    return -(-size // step) * step


def _whole_mib(name: str, value: int, least: int) -> None:
    if whole(name, value, least, of="bytes") % MIB:
        raise ValueError(
            f"{name} must be a whole number of MiB, such as {value // MIB * MIB}, got {value}"
        )


def _divisions(given: int | Mapping[int | str, int] | None) -> tuple[int, ...]:
    """Return the number of steps within each interval. Both 0 and 1 mean that sizes are not rounded
    to steps."""
    if given is None:
        return (0,) * INTERVALS
    if not isinstance(given, Mapping):
        return (_power_of_two("roundup_power2_divisions", given),) * INTERVALS
    steps = [0] * INTERVALS
    last = 0
    first = True
    for start, count in given.items():
        count = count and _power_of_two(f"roundup_power2_divisions[{start!r}]", count)
        if start == ">":
            steps[last + 1 :] = [count] * (INTERVALS - last - 1)
            continue
        start = _power_of_two("an interval of roundup_power2_divisions", start)
        index = min(start.bit_length() - 1, INTERVALS - 1)
        # The first interval in the mapping holds for all smaller sizes too.
        if first:
            steps[:index] = [count] * index
        steps[index] = count
        last = index
        first = False
    return tuple(steps)


def _power_of_two(name: str, value: int) -> int:
    if whole(name, value, 1) & (value - 1):
        raise ValueError(f"{name} must be a power of two, got {value}")
    return int(value)


def _mib(value: str) -> int:
    return int(value) * MIB


def _switch(value: str) -> bool:
    return {"True": True, "False": False}[value]


def _steps(value: str) -> int | dict[int | str, int]:
    if not value.startswith("["):
        return int(value)
    pairs = (pair.split(":") for pair in value.removeprefix("[").removesuffix("]").split(","))
    return {start if start == ">" else int(start): int(count) for start, count in pairs}


def _count(value: str) -> int:
    if not value.isdecimal():
        raise ValueError
    return int(value)


def _native(value: str) -> str:
    return {"native": value}[value]


def _off(value: str) -> bool:
    return {"False": False}[value]


_PARSERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "max_split_size_mb": ("max_split_size_bytes", _mib),
    "roundup_power2_divisions": ("roundup_power2_divisions", _steps),
    "expandable_segments": ("expandable_segments", _switch),
    "garbage_collection_threshold": ("garbage_collection_threshold", float),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _mib),
    "large_segment_size_mb": ("large_segment_bytes", _mib),
    "per_process_memory_fraction": ("memory_fraction", float),
}
# Settings that, with these values, do not change which bytes are reserved on the device. Settings
# with other purposes concern locks, pinned host memory and CUDA graphs, which this simulation does
# not have.
_IGNORED: dict[str, Callable[[str], Any]] = {
    "backend": _native,
    "throw_on_cudamalloc_oom": _off,
    "release_lock_on_cudamalloc": _switch,
    "release_lock_on_hipmalloc": _switch,
    "graph_capture_record_stream_reuse": _switch,
    "pinned_use_cuda_host_register": _switch,
    "pinned_use_hip_host_register": _switch,
    "pinned_use_background_threads": _switch,
    "pinned_free_catch_all": _switch,
    "pinned_num_register_threads": _count,
    "pinned_reserve_segment_size_mb": _count,
    "pinned_max_round_threshold_mb": _count,
    "pinned_max_cached_size_mb": _count,
}
_ALLOWED: dict[Callable[[str], Any], str] = {
    _mib: "a whole number of MiB",
    _switch: "True or False",
    _steps: "a power of two, or a list such as [256:1,512:2,>:4]",
    float: "a number",
    _count: "a whole number",
    _native: "native (the allocator of CUDA itself, cudaMallocAsync, reserves by other rules,"
    " which are not simulated)",
    _off: "False (with True, PyTorch raises before it calls cudaMalloc if the allocation would"
    " probably fail, which is not simulated)",
}
