"""The cost of `AccumulatedStep` beside a loop written by hand; the bytes that DDP sends with and without `no_sync`.

Run as a script: `python tests/bench_accumulation.py`. Ratios of times taken in one run, in turns, so that they carry
over to other machines; the bytes are exact, counted in a hook that DDP calls for each bucket.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.algorithms.ddp_comm_hooks.default_hooks as hooks
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from course_lib.accumulation import AccumulatedStep, split
from course_lib.models import Decoder, random_tokens

BAR, ROUNDS = 1.02, 30
MICRO_BATCHES = 8


def loss_sum(model, tokens):
    targets = tokens[:, 1:]
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def by_hand(model, optimizer, batch, size, max_norm):
    """The same step, written down once more: sums, their weight, one clip, one step."""
    optimizer.zero_grad()
    total, weight = 0.0, 0
    for micro_batch in batch.split(size):
        loss, count = loss_sum(model, micro_batch)
        loss.backward()
        total, weight = total + loss.detach(), weight + count
    for parameter in model.parameters():
        parameter.grad.div_(weight)
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return total.item() / weight


def in_turns(arms: dict, rounds: int) -> dict[str, list[float]]:
    """Seconds of each arm, a call of each in every round, the order turned round from one round to the next."""
    seconds = {name: [] for name in arms}
    for run in arms.values():
        run()  # warm up
    for i in range(rounds):
        for name in list(arms) if i % 2 else list(arms)[::-1]:
            start = time.perf_counter()
            arms[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def times() -> None:
    print(f"{'median us of a step':44}{'by hand':>12}{'course':>12}{'ratio':>9}{'of least':>9}")
    for hidden, layers, sequence in ((128, 6, 64), (32, 2, 16)):
        batch = random_tokens(MICRO_BATCHES * 2, sequence, 500)

        def arm(kind, hidden=hidden, layers=layers, sequence=sequence, batch=batch):
            model = Decoder(vocabulary=500, hidden=hidden, heads=4, layers=layers, sequence=sequence)
            optimizer = torch.optim.AdamW(model.parameters())
            if kind == "by hand":
                return lambda: by_hand(model, optimizer, batch, 2, 1.0)
            step = AccumulatedStep(model, optimizer, loss_sum, max_norm=1.0)
            return lambda: step(split(batch, 2))

        seconds = in_turns({kind: arm(kind) for kind in ("by hand", "course")}, ROUNDS if layers > 2 else 4 * ROUNDS)
        medians, least = ({name: 1e6 * of(taken) for name, taken in seconds.items()} for of in (statistics.median, min))
        ratio = medians["course"] / medians["by hand"]
        extra = (medians["course"] - medians["by hand"]) / MICRO_BATCHES
        bar = f"bar {BAR:.2f}: {'met' if ratio <= BAR else 'missed'}" if layers > 2 else "no bar: tiny operators"
        label = f"decoder, {layers} layers of {hidden}, {MICRO_BATCHES} micro-batches"
        print(
            f"{label:44}{medians['by hand']:12,.0f}{medians['course']:12,.0f}{ratio:9.3f}"
            f"{least['course'] / least['by hand']:9.3f}   {extra:+.0f} us a micro-batch, {bar}"
        )


def on_rank(rank: int, folder: str) -> None:
    """Bytes that one of two processes sends in a step: one that synchronises every backward pass, and ours."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    model = Decoder(vocabulary=500, hidden=128, heads=4, layers=6, sequence=64)
    parameter_bytes, sent = sum(parameter.nbytes for parameter in model.parameters()), []
    replica = DistributedDataParallel(model)
    replica.register_comm_hook(
        None, lambda _, bucket: sent.append(bucket.buffer().nbytes) or hooks.allreduce_hook(None, bucket)
    )
    optimizer, batch = torch.optim.AdamW(replica.parameters()), random_tokens(MICRO_BATCHES * 2, 64, 500, seed=rank)
    found = {}
    by_hand(replica, optimizer, batch, 2, 1.0)
    found["by hand, without no_sync"] = sum(sent)
    sent.clear()
    AccumulatedStep(replica, optimizer, loss_sum, max_norm=1.0)(split(batch, 2))
    found["course"] = sum(sent)
    if rank == 0:
        torch.save((parameter_bytes, found), f"{folder}/bytes.pt")
    dist.barrier()
    dist.destroy_process_group()


def bytes_sent() -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(on_rank, args=(folder,), nprocs=2)
        parameter_bytes, found = torch.load(Path(folder) / "bytes.pt")
    print(f"{'bytes a rank reduces in a step, DDP on 2':44}{'bytes':>14}{'of the parameters':>20}")
    for name, count in found.items():
        print(f"{name:44}{count:14,}{count / parameter_bytes:20.2f}")
    verdict = "met" if found["course"] == parameter_bytes else "missed"
    print(f"{'':44}{'':34}   bar 1.00: {verdict}")


def main() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the steps are small, and idle threads that wait for work disturb the clock
    gc.collect()
    gc.freeze()
    try:
        print(f"course_lib.accumulation beside a loop by hand, torch {torch.__version__}, on a CPU, in turns")
        times()
        print()
        bytes_sent()
    finally:
        gc.unfreeze()
        torch.set_num_threads(threads)


if __name__ == "__main__":
    main()
