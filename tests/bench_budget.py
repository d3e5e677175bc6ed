"""How long an estimate takes, beside PyTorch's own memory tracker on the same symbolic step.

The tracker (torch.distributed._tools.mem_tracker) follows modules and categories of memory as the
meter does, and needs the step, its recipe and its schedule to be written by hand; here it sees the
plain step, forward and backward.
"""

from __future__ import annotations

import resource
import statistics

import torch
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from turns import in_turns

from course_lib.budget import Recipe, estimate
from course_lib.memory import MemoryMeter
from course_lib.models import Decoder, random_tokens

ROUNDS = 3
LEAST = {
    "precision": "bf16",
    "attention": "flash",
    "checkpoint": "layers",
    "in_backward": True,
    "offload_optimizer": 1.0,
    "head_chunk": 512,
}


def large(hidden: int, layers: int, sequence: int = 4096):
    sizes = {
        "vocabulary": 32_000,
        "hidden": hidden,
        "heads": hidden // 128,
        "layers": layers,
        "sequence": sequence,
    }
    return lambda: Decoder(**sizes), lambda: random_tokens(1, sequence, 32_000)


def meters() -> None:
    make_model, make_batch = large(2048, 16, 1024)
    peaks: dict[str, int] = {}

    def meter() -> None:
        with FakeTensorMode():
            model, batch = make_model(), make_batch()
            with MemoryMeter(model) as found:
                model.loss(batch).backward()
        peaks["course"] = found.peak_bytes

    def tracker() -> None:
        with FakeTensorMode():
            model, batch = make_model(), make_batch()
            found = MemTracker()
            found.track_external(model)
            with found:
                model.loss(batch).backward()
        peaks["tracker"] = max(at["Total"] for at in found.get_tracker_snapshot("peak").values())

    seconds = {
        name: statistics.median(values)
        for name, values in in_turns({"tracker": tracker, "course": meter}, ROUNDS).items()
    }
    print("forward and backward, 16 layers of 2048, 1024 tokens, symbolic")
    for name, taken in seconds.items():
        print(
            f"{name:>10} {taken:8.2f} s {taken / seconds['tracker']:6.2f} of the tracker's"
            f" {peaks[name]:16,} bytes"
        )


def estimates() -> None:
    print("\nestimates of whole steps, on a CPU")
    for size, shape, bar in (("7 B", (4096, 32), 20), ("70 B", (8192, 80), 120)):
        make_model, make_batch = large(*shape)
        for recipe in (Recipe(precision="bf16"), Recipe(**LEAST)):
            found = {}

            def once(
                recipe=recipe, make_model=make_model, make_batch=make_batch, found=found
            ) -> None:
                found["estimate"] = estimate(make_model, make_batch, recipe, tier="host")

            [taken] = in_turns({"estimate": once}, 1)["estimate"]
            verdict = "met" if taken < bar else "missed"
            peak = f"{found['estimate'].peak_bytes / 1e9:9.2f} GB"
            print(f"{size:>5} {taken:6.1f} s, bar {bar} s: {verdict}   {peak}   {recipe}")
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"memory of this process, at the most: {used / 2**30:.2f} GiB, bar 4 GiB:"
        f" {'met' if used < 2**32 else 'missed'}"
    )


def main() -> None:
    print(f"course_lib.budget, torch {torch.__version__}, in turns")
    meters()
    estimates()


if __name__ == "__main__":
    main()
