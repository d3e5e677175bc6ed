"""Two processes under DistributedDataParallel, started from a notebook: how many bytes they reduce in a step."""

import gc
import json
import subprocess
import sys
import tempfile
from pathlib import Path


def ddp_bytes(micro_batches: int = 8, processes: int = 2) -> tuple[int, dict[bool, int]]:
    """What one rank hands to all-reduce in a step over so many micro-batches of a small decoder, gloo on CPUs.

    Returns:
        The bytes of the parameters, and {no_sync used: bytes reduced}. With `no_sync` the step is `AccumulatedStep`'s.

    Raises:
        RuntimeError: a process failed; its last words are in the message.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "course_lib.teaching.workers", folder, str(micro_batches), str(processes)]
        running = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for rank in range(processes)
        ]
        said = [process.communicate(timeout=300)[0] for process in running]
        for rank, process in enumerate(running):
            if process.returncode:
                raise RuntimeError(f"rank {rank} failed: {said[rank][-2000:]}")
        parameter_bytes, synchronised, once = json.loads((Path(folder) / "bytes.json").read_text())
    return parameter_bytes, {False: synchronised, True: once}


def _on_rank(folder: str, micro_batches: int, processes: int, rank: int) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.algorithms.ddp_comm_hooks.default_hooks as hooks
    import torch.distributed.nn.functional  # before there is a group: its functions' defaults would hold it for ever
    from torch.nn import functional
    from torch.nn.parallel import DistributedDataParallel

    from course_lib.accumulation import AccumulatedStep, split
    from course_lib.models import Decoder, random_tokens

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=processes)
    model, sent = DistributedDataParallel(Decoder(vocabulary=64, hidden=64, heads=2, layers=2, sequence=16)), []

    def counting(_, bucket):
        sent.append(bucket.buffer().nbytes)
        return hooks.allreduce_hook(None, bucket)

    model.register_comm_hook(None, counting)
    batch = random_tokens(micro_batches, 16, 64, seed=rank)

    def loss_sum(model, tokens):
        targets = tokens[:, 1:].flatten()
        return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), targets, reduction="sum"), len(targets)

    for piece in batch.split(1):
        loss, weight = loss_sum(model, piece)
        (loss / weight / micro_batches).backward()
    synchronised = sum(sent)
    sent.clear()
    AccumulatedStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum)(split(batch, 1))
    if rank == 0:
        figures = [sum(parameter.nbytes for parameter in model.parameters()), synchronised, sum(sent)]
        (Path(folder) / "bytes.json").write_text(json.dumps(figures))
    # Nothing may hold the group when it is destroyed: only then do gloo's threads end here. Left to the interpreter's
    # end, they now and then abort the process.
    del model
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _on_rank(sys.argv[1], *map(int, sys.argv[2:]))
