"""PyTorch's compiled caching allocator, run without a GPU on a CUDA runtime that only counts bytes.

It needs g++, the headers of CUDA (which the package triton contains), and a torch built with CUDA.
The environment variable TORCH_WITH_CUDA may name the folder of another torch than the imported one.
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
    """Return what is missing to run the allocator, or "" if nothing is."""
    if shutil.which("g++") is None:
        return "needs g++"
    if not (_torch() / "lib" / "libc10_cuda.so").exists():
        return "needs a torch built with CUDA (or TORCH_WITH_CUDA=its folder)"
    if not (_torch() / HEADER).exists():
        return "needs torch 2.11 or newer, because older allocators have another interface"
    return "" if _headers() else "needs the headers of CUDA, which the package triton contains"


def version() -> tuple[int, int]:
    found = re.search(r"__version__ = '(\d+)\.(\d+)", (_torch() / "version.py").read_text())
    return int(found[1]), int(found[2])


def build(folder: Path) -> Path:
    """Compile the program that drives the allocator, and its CUDA runtime; return its path."""
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
    # The program links the runtime first. libc10_cuda.so then uses the loaded library of that name,
    # instead of the CUDA on its own search path.
    counting = ["-Wl,--no-as-needed", folder / runtime]
    places = ["-L", _torch() / "lib", "-Wl,--allow-shlib-undefined"]
    subprocess.run(
        [*options, SOURCES / "drive.cpp", "-o", folder / "drive", *counting, *places, *libraries],
        check=True,
    )
    return folder / "drive"


# In the order of their numbers in c10/core/CachingDeviceAllocator.h.
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
    """Return (error or "", statistics, segments) after each command, and the history as a list of
    (action, bytes)."""
    environment = os.environ | {
        "CAPACITY_BYTES": str(capacity_bytes),
        "PYTORCH_CUDA_ALLOC_CONF": settings,
        "PYTORCH_ALLOC_CONF": settings,
        "LD_LIBRARY_PATH": f"{program.parent}:{_torch() / 'lib'}",
    }
    process = subprocess.run(
        [program], input=commands, env=environment, capture_output=True, text=True
    )
    if process.returncode:
        status = process.returncode
        raise RuntimeError(f"the allocator ended with {status}: {process.stderr[-2000:]}")
    *lines, history = process.stdout.splitlines()
    entries = (entry.split() for entry in history.split(";") if entry)
    return [_read(line) for line in lines], [
        (ACTIONS[int(action)], int(size)) for size, action in entries
    ]


def _read(line: str) -> tuple[str, dict, list]:
    error, statistics, segments = line.split("\t")
    pairs = (item.split("=") for item in statistics.split())
    counts = {name: int(value) for name, value in pairs}
    return error, counts, [segment.split() for segment in segments.split(";") if segment]


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
    """Return the file name under which the allocator loads the runtime, such as libcudart.so.13."""
    code = (_torch() / "lib" / "libc10_cuda.so").read_bytes()
    return re.search(rb"libcudart\.so\.[\d.]+", code)[0].decode()
