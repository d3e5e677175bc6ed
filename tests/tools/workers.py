"""Number of worker processes of the tests, and the order in which the workers start files.

    python tests/tools/workers.py  # print the number for this machine

`make test WORKERS=4` overrides the number. The results of the tests do not depend on it, because
all tests of a file run in one worker, in the order of the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import seconds

# Peak of a worker with the processes that it starts, resident pages added up: 3.0 GB for notebook
# 08 (with the pages that its ranks share), 2.4 GB for 09, 2.1 GB for 02, 1.2 GB for 03 and 07.
WORKER_BYTES = 3 * 10**9
GPU_WORKER_BYTES = 5 * 10**9
MOST_GPU_WORKERS = 8
# Files that need more than 2 GB. They run one after the other.
HEAVY = ("notebooks/02", "notebooks/08", "notebooks/09")


def worker_count(cores: int, memory_bytes: int, gpu_bytes: int | None = None) -> int:
    """Return how many workers fit, at least one.

    Args:
        cores: Cores that this process may use.
        memory_bytes: Memory that this process may use.
        gpu_bytes: Memory of the GPU that the workers share, or None without a GPU.
    """
    count = min(cores, memory_bytes // WORKER_BYTES)
    if gpu_bytes is not None:
        count = min(count, MOST_GPU_WORKERS, gpu_bytes // GPU_WORKER_BYTES)
    return max(1, count)


def available_cores(root: Path = Path("/")) -> int:
    """Return the number of cores, within the affinity of the process and the quota of its
    cgroups."""
    affinity = getattr(os, "sched_getaffinity", None)  # macOS has none
    counts = [len(affinity(0)) if affinity else os.cpu_count() or 1]
    for folder in _cgroups(root):
        quota, period = (_words(folder / "cpu.max") or ["max", "1"])[:2]  # version 2
        if old := _words(folder / "cpu.cfs_quota_us"):  # version 1, -1 without a quota
            quota, period = old[0], _words(folder / "cpu.cfs_period_us")[0]
        if quota.isdigit():
            counts.append(int(quota) // int(period))
    return max(1, min(counts))


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes of memory that are available, within the limits of the cgroups."""
    words = _words(root / "proc/meminfo")
    if "MemAvailable:" in words:
        sizes = [1024 * int(words[words.index("MemAvailable:") + 1])]
    else:  # macOS
        sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for folder in _cgroups(root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            sizes += [int(word) for word in _words(folder / name) if word.isdigit()]
    return min(sizes)


def _words(path: Path) -> list[str]:
    return path.read_text("utf-8").split() if path.is_file() else []


def _cgroups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's cgroups, and of those that contain them."""
    file = root / "proc/self/cgroup"
    for line in file.read_text("utf-8").splitlines() if file.is_file() else []:
        _, controllers, path = line.split(":", 2)
        base = root / "sys/fs/cgroup" / controllers
        own = base / path.lstrip("/")
        yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(base))


def scope_of(test: str) -> str:
    """Return the unit of work that a test belongs to: its file, or all heavy files together."""
    file = test.split("::")[0]
    return "heavy" if file.startswith(HEAVY) else file


def start_order(file: str, table: Mapping[str, float]) -> tuple:
    """Return a sort key that starts the unit with the most seconds first.

    A file that the table does not have is taken to be of medium length.
    """
    unit = scope_of(file)
    total = sum(n for name, n in table.items() if "::" not in name and scope_of(name) == unit)
    own = table.get(file, seconds.UNKNOWN_SECONDS)
    return -(total or seconds.UNKNOWN_SECONDS), unit, -own, file


# The hooks of pytest, which tests/conftest.py imports
# --------------------------------------------------------------------------------------------------


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest files first, so that all workers finish at about the same time."""
    table = seconds.read()
    files = {item.nodeid.partition("::")[0] for item in items}
    order = {file: start_order(file, table) for file in files}
    items.sort(key=lambda item: order[item.nodeid.partition("::")[0]])


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist this hook does not exist
def pytest_xdist_auto_num_workers() -> int:
    """Return the number of workers for `-n auto`."""
    import torch

    gpu = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    return worker_count(available_cores(), available_memory(), gpu)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With --dist=loadscope, let one worker run all tests of a file, and all heavy files."""
    if config.getvalue("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class FileScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    return FileScheduling(config, log)


if __name__ == "__main__":
    print(worker_count(available_cores(), available_memory()))
