"""PyTorch's own caching allocator, run without a GPU: its compiled code, on a CUDA runtime that
only counts.

What it takes: a torch built with CUDA (it need not be the one that is imported: name its folder in
TORCH_WITH_CUDA), the headers of CUDA (Triton brings them along) and g++.
"""

import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import torch

SOURCES = Path(__file__).with_name("real_allocator")
HEADER = "include/c10/cuda/PeerToPeerAccess.h"  # of torch


def missing() -> str:
    """What is needed and not there; nothing if all is."""
    if shutil.which("g++") is None:
        return "needs g++"
    if not (_torch() / "lib" / "libc10_cuda.so").exists():
        return "needs a torch built with CUDA (or TORCH_WITH_CUDA=its folder)"
    if not (_torch() / HEADER).exists():
        return "needs torch 2.11 or newer, whose allocator is called in this way"
    return "" if _headers() else "needs the headers of CUDA, which Triton brings along"


def version() -> tuple[int, int]:
    found = re.search(r"__version__ = '(\d+)\.(\d+)", (_torch() / "version.py").read_text())
    return int(found[1]), int(found[2])


def build(folder: Path) -> Path:
    """The program that drives the allocator, and beside it the runtime that it is run on."""
    runtime = _name_of_runtime()
    (folder / "versions").write_text(f"{runtime} {{ global: *; }};\n")
    options = ["g++", "-std=c++20", "-O1", "-w", "-I", _torch() / "include", "-I", _headers()]
    library = ["-shared", "-fPIC", f"-Wl,-soname,{runtime},--version-script={folder / 'versions'}"]
    subprocess.run(
        [*options, *library, SOURCES / "cuda_without_device.cpp", "-o", folder / runtime],
        check=True,
    )
    if "init_p2p_access_cache" in (_torch() / HEADER).read_text():
        options.append("-DHAS_P2P_CACHE")
    libraries = [f"-l:{name}" for name in ("libc10_cuda.so", "libc10.so")]
    # The program asks for the runtime itself, and first: what libc10_cuda.so asks for by the same
    # name is there then, whatever CUDA lies on the path that is written into it.
    counting = ["-Wl,--no-as-needed", folder / runtime]
    places = ["-L", _torch() / "lib", "-Wl,--allow-shlib-undefined"]
    subprocess.run(
        [*options, SOURCES / "drive.cpp", "-o", folder / "drive", *counting, *places, *libraries],
        check=True,
    )
    return folder / "drive"


# As numbered in c10/core/CachingDeviceAllocator.h.
ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "snapshot",
    "oom",
)


def run(
    program: Path, commands: str, capacity_bytes: int, settings: str = ""
) -> tuple[list[tuple[str, dict, list]], list[tuple[str, int]]]:
    """After each command: the error's sentence or "", the statistics, the segments.
    And the history: (action, bytes)."""
    environment = os.environ | {
        "CAPACITY_BYTES": str(capacity_bytes),
        "PYTORCH_CUDA_ALLOC_CONF": settings,
        "PYTORCH_ALLOC_CONF": settings,
        "LD_LIBRARY_PATH": f"{program.parent}:{_torch() / 'lib'}",
    }
    done = subprocess.run(
        [program], input=commands, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"the allocator ended with {done.returncode}: {done.stderr[-2000:]}")
    *lines, history = done.stdout.splitlines()
    entries = (entry.split() for entry in history.split(";") if entry)
    return [_read(line) for line in lines], [
        (ACTIONS[int(action)], int(size)) for size, action in entries
    ]


def _read(line: str) -> tuple[str, dict, list]:
    error, statistics, segments = line.split("\t")
    figures = {name: int(value) for name, value in (item.split("=") for item in statistics.split())}
    return error, figures, [segment.split() for segment in segments.split(";") if segment]


def _torch() -> Path:
    return Path(os.environ.get("TORCH_WITH_CUDA") or Path(torch.__file__).parent)


@cache
def _headers() -> Path | None:
    try:
        import triton
    except ImportError:
        return None
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    return folder if (folder / "cuda_runtime_api.h").exists() else None


def _name_of_runtime() -> str:
    """As the allocator asks for it: libcudart.so.13."""
    code = (_torch() / "lib" / "libc10_cuda.so").read_bytes()
    start = code.index(b"libcudart.so.")
    return code[start : code.index(b"\0", start)].decode()
