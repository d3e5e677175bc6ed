"""The cost of `AccumulatedStep` beside a loop written by hand; the bytes that DDP sends with and
without `no_sync`.

Run as a script: `python tests/bench_accumulation.py`. Ratios of times taken in one run, in turns,
so that they carry over to other machines; the bytes are exact, counted in a hook that DDP calls for
each bucket.
"""

from __future__ import annotations

import gc
import statistics
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F
from turns import in_turns

from course_lib.accumulation import AccumulatedStep, split
from course_lib.lessons.lesson_05 import on_ranks
from course_lib.models import Decoder, random_tokens

BAR, ROUNDS = 1.02, 30
MICRO_BATCHES = 8


def loss_sum(model, tokens):
    targets = tokens[:, 1:]
    return (
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), targets.flatten(), reduction="sum"),
        targets.numel(),
    )


def on_a_rank(model, loss_sum, micro_batches, each):
    for number, micro_batch in enumerate(micro_batches, start=1):
        with nullcontext() if each or number == len(micro_batches) else model.no_sync():
            loss_sum(model, micro_batch)[0].backward()


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


def times() -> None:
    print(f"{'median us of a step':44}{'by hand':>12}{'course':>12}{'ratio':>9}{'of least':>9}")
    for hidden, layers, sequence in ((128, 6, 64), (32, 2, 16)):
        batch = random_tokens(MICRO_BATCHES * 2, sequence, 500)

        def arm(kind, hidden=hidden, layers=layers, sequence=sequence, batch=batch):
            model = Decoder(
                vocabulary=500, hidden=hidden, heads=4, layers=layers, sequence=sequence
            )
            optimizer = torch.optim.AdamW(model.parameters())
            if kind == "by hand":
                return lambda: by_hand(model, optimizer, batch, 2, 1.0)
            step = AccumulatedStep(model, optimizer, loss_sum, max_norm=1.0)
            return lambda: step(split(batch, 2))

        seconds = in_turns(
            {kind: arm(kind) for kind in ("by hand", "course")},
            ROUNDS if layers > 2 else 4 * ROUNDS,
        )
        medians, least = (
            {name: 1e6 * of(taken) for name, taken in seconds.items()}
            for of in (statistics.median, min)
        )
        ratio = medians["course"] / medians["by hand"]
        extra = (medians["course"] - medians["by hand"]) / MICRO_BATCHES
        bar = (
            f"bar {BAR:.2f}: {'met' if ratio <= BAR else 'missed'}"
            if layers > 2
            else "no bar: tiny operators"
        )
        label = f"decoder, {layers} layers of {hidden}, {MICRO_BATCHES} micro-batches"
        print(
            f"{label:44}{medians['by hand']:12,.0f}{medians['course']:12,.0f}{ratio:9.3f}"
            f"{least['course'] / least['by hand']:9.3f}   {extra:+.0f} us a micro-batch, {bar}"
        )


def bytes_sent() -> None:
    found = on_ranks(on_a_rank, MICRO_BATCHES)
    parameter_bytes, sent = found["parameters"], {False: found["each"], True: found["library"]}
    print(f"{'bytes a rank reduces in a step, DDP on 2':44}{'bytes':>14}{'of the parameters':>20}")
    for name, no_sync in (("by hand, without no_sync", False), ("course", True)):
        print(f"{name:44}{sent[no_sync]:14,}{sent[no_sync] / parameter_bytes:20.2f}")
    print(f"{'':44}{'':34}   bar 1.00: {'met' if sent[True] == parameter_bytes else 'missed'}")


def main() -> None:
    threads = torch.get_num_threads()
    # the steps are small, and idle threads that wait for work disturb the clock
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    try:
        print(
            f"course_lib.accumulation beside a loop by hand, torch {torch.__version__}, on a CPU,"
            " in turns"
        )
        times()
        print()
        bytes_sent()
    finally:
        gc.unfreeze()
        torch.set_num_threads(threads)


if __name__ == "__main__":
    main()
