"""Two processes that reduce gradients: what a step on a rank hands to all-reduce, and whether its
gradient is right.

`python -m course_lib.lessons.lesson_05.ranks` is one of those processes, which `on_ranks` starts.
"""

import gc
import inspect
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from course_lib.accumulation import AccumulatedStep, split
from course_lib.models import Decoder, random_tokens


def loss_sum(model: torch.nn.Module, tokens: Tensor) -> tuple[Tensor, int]:
    """The sum of the losses of tokens (b, s + 1), and their number; padding, 0, is left out."""
    logits, targets = model(tokens[:, :-1]), tokens[:, 1:].flatten()
    losses = functional.cross_entropy(
        logits.flatten(0, 1), targets, ignore_index=0, reduction="sum"
    )
    return losses, int((targets != 0).sum())


def on_ranks(
    step: Callable[..., Any], micro_batches: int = 8, processes: int = 2
) -> dict[str, float]:
    """A function of the reader's, run on each of some processes with DDP over gloo, on CPUs.

    Args:
        step: `step(model, loss_sum, pieces, each)` leaves the gradient of the mean over all ranks'
            tokens in `.grad`; `each` says whether every backward pass reduces, or the last one
            alone. Its source is run, with `torch`, `dist` and `nullcontext`.

    Returns:
        "parameters": their bytes; "each", "last": bytes that one rank hands to all-reduce; "error":
        of the gradient against one process with all tokens, relative; "library": the bytes of
        `AccumulatedStep`.

    Raises:
        RuntimeError: a process failed; its last words are in the message.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = inspect.cleandoc("\n" + inspect.getsource(step))
        (Path(folder) / "step.py").write_text(source, encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            __name__,
            folder,
            step.__name__,
            str(micro_batches),
            str(processes),
        ]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        running = [subprocess.Popen([*command, str(rank)], **pipes) for rank in range(processes)]
        said = [process.communicate(timeout=300)[0] for process in running]
        for rank, process in enumerate(running):
            if process.returncode:
                raise RuntimeError(f"rank {rank} failed: {said[rank][-2000:]}")
        return json.loads((Path(folder) / "bytes.json").read_text())


def _batch(micro_batches: int, rank: int) -> Tensor:
    """Tokens of one rank, of which the second has fewer: else a mean of means would be right."""
    tokens = random_tokens(micro_batches, 16, 63, seed=rank) + 1
    tokens[:, 17 - 6 * rank :] = 0
    return tokens


def _decoder() -> Decoder:
    return Decoder(vocabulary=64, hidden=64, heads=2, layers=2, sequence=16)


def _gradient(model: torch.nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def _on_rank(folder: str, name: str, micro_batches: int, processes: int, rank: int) -> None:
    from contextlib import nullcontext

    import torch.distributed as dist
    import torch.distributed.algorithms.ddp_comm_hooks.default_hooks as hooks

    # before there is a group: its functions' defaults would hold it for ever
    import torch.distributed.nn.functional
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=processes
    )
    names: dict[str, Any] = {"torch": torch, "dist": dist, "nullcontext": nullcontext}
    exec((Path(folder) / "step.py").read_text(encoding="utf-8"), names)
    model, sent = DistributedDataParallel(_decoder()), []

    def counting(_, bucket):
        sent.append(bucket.buffer().nbytes)
        return hooks.allreduce_hook(None, bucket)

    model.register_comm_hook(None, counting)
    pieces = _batch(micro_batches, rank).split(1)
    figures: dict[str, float] = {
        "parameters": sum(parameter.nbytes for parameter in model.parameters())
    }
    for how in ("each", "last"):
        sent.clear()
        model.zero_grad()
        names[name](model, loss_sum, pieces, how == "each")
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
        split(torch.cat(pieces), 1)
    )
    figures["library"] = sum(sent)
    if rank == 0:
        (Path(folder) / "bytes.json").write_text(json.dumps(figures))
    # Nothing may hold the group when it is destroyed: only then do gloo's threads end here. Left to
    # the interpreter's end, they now and then abort the process.
    names.clear()
    del model
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _on_rank(*sys.argv[1:3], *map(int, sys.argv[3:]))
