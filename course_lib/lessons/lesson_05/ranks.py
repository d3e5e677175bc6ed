"""Processes that reduce gradients, to measure bytes passed to all-reduce and gradient errors.

`on_ranks` starts this module with `python -m`. The new process is one rank, or forks all ranks.
"""

import gc
import importlib
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from course_lib._torch.modes import DYNAMO
from course_lib.accumulation import AccumulatedStep, split
from course_lib.models import Decoder, random_tokens

from .mean_of_means import loss_sum

# Modules that every rank would import otherwise. DDP imports `torch._dynamo`.
IMPORTED_ONCE = (
    DYNAMO,
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.distributed.nn.functional",
)


def _batch(micro_batches: int, rank: int) -> Tensor:
    """Return the tokens of one rank: rows of 17, 11 and 5 tokens on ranks 0, 1 and all others.

    With equal numbers of tokens a mean of means would be right.
    """
    tokens = random_tokens(micro_batches, 16, 63, seed=rank) + 1
    tokens[:, max(17 - 6 * rank, 5) :] = 0
    return tokens


def _decoder() -> Decoder:
    return Decoder(vocabulary=64, hidden=64, heads=2, layers=2, sequence=16)


def _gradient(model: torch.nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def _fork_ranks(folder: str, name: str, micro_batches: int, processes: int) -> None:
    """Fork the ranks from this process, and print the output of the first rank that failed."""
    for module in IMPORTED_ONCE:
        importlib.import_module(module)
    forked = multiprocessing.get_context("fork")
    given = folder, name, micro_batches, processes
    ranks = [
        forked.Process(target=_on_forked_rank, args=(*given, rank), name=f"rank {rank}")
        for rank in range(processes)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    for number, rank in enumerate(ranks):
        if rank.exitcode:
            sys.exit(_output_file(folder, number).read_text(encoding="utf-8"))


def _output_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"output-{rank}.txt"


def _on_forked_rank(folder: str, name: str, micro_batches: int, processes: int, rank: int) -> None:
    """Run one rank in this process, and write its output to a file of its own."""
    with _output_file(folder, rank).open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    _on_rank(folder, name, micro_batches, processes, rank)


def _on_rank(folder: str, name: str, micro_batches: int, processes: int, rank: int) -> None:
    from contextlib import nullcontext

    import torch.distributed as dist
    import torch.distributed.algorithms.ddp_comm_hooks.default_hooks as hooks

    # imported before a group exists; otherwise default arguments of its functions keep the group
    import torch.distributed.nn.functional
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=processes
    )
    names: dict[str, Any] = {"torch": torch, "dist": dist, "nullcontext": nullcontext}
    exec((Path(folder) / "step.py").read_text(encoding="utf-8"), names)
    model, sent = DistributedDataParallel(_decoder()), []

    def count_reduced(_, bucket):
        sent.append(bucket.buffer().nbytes)
        return hooks.allreduce_hook(None, bucket)

    model.register_comm_hook(None, count_reduced)
    own = _batch(micro_batches, rank).split(1)
    figures: dict[str, float] = {
        "parameters": sum(parameter.nbytes for parameter in model.parameters())
    }
    for how in ("each", "last"):
        sent.clear()
        model.zero_grad()
        names[name](model, loss_sum, own, how == "each")
        figures[how] = sum(sent)
    found = _gradient(model)
    alone = _decoder()
    loss, count = loss_sum(
        alone, torch.cat([_batch(micro_batches, other) for other in range(processes)])
    )
    (loss / count).backward()
    figures["error"] = float((found - _gradient(alone)).norm() / _gradient(alone).norm())
    sent.clear()
    AccumulatedStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum)(
        split(torch.cat(own), 1)
    )
    figures["library"] = sum(sent)
    if rank == 0:
        (Path(folder) / "bytes.json").write_text(json.dumps(figures))
    # Nothing may refer to the group when it is destroyed, because only then gloo's threads end
    # here. If they are left until the interpreter exits, they sometimes abort the process.
    names.clear()
    del model
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run = _fork_ranks if len(sys.argv) == 5 else _on_rank
    run(*sys.argv[1:3], *map(int, sys.argv[3:]))
