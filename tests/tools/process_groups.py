"""Process groups of one process, and of several processes."""

import multiprocessing
import sys
import tempfile
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from timeouts import TIMEOUT_SECONDS


@contextmanager
def single_process_group():
    """Create a process group of one process, and destroy it at the end."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_ranks(ranks, function):
    """Call `function(rank)` in each process of a group; return the results, which are saved."""
    # The server imports the modules once, and has no threads. A fork of this process could inherit
    # a lock that a thread holds.
    multiprocessing.set_forkserver_preload(["torch._dynamo", "course_lib.distributed"])
    kind = "forkserver" if sys.platform == "linux" else "spawn"
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, folder, function)
        torch.multiprocessing.start_processes(_rank, arguments, nprocs=ranks, start_method=kind)
        return [torch.load(f"{folder}/rank{rank}.pt") for rank in range(ranks)]


def _rank(rank, ranks, folder, function):
    torch.set_num_threads(1)
    limit = timedelta(seconds=TIMEOUT_SECONDS)
    group = {"init_method": f"file://{folder}/group", "rank": rank, "world_size": ranks}
    dist.init_process_group("gloo", timeout=limit, **group)
    torch.save(function(rank), f"{folder}/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
