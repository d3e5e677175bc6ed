"""What offload costs: beside the plain step, `save_on_cpu`, and a file written and read while nothing else happens.

Run as a script: `python tests/bench_offload.py`. Times are taken in one run, in turns; ratios carry over, bytes are
exact. The bars are for a GPU: at most 5 % over the plain step where the arithmetic intensity is above the threshold,
and twice as fast as `save_on_cpu(pin_memory=True)`.
"""

from __future__ import annotations

import statistics
import tempfile
from contextlib import nullcontext
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from turns import in_turns

from course_lib.memory import MemoryMeter
from course_lib.models import deep_mlp
from course_lib.offload import DiskStore, OffloadedOptimizer, offload_activations

ROUNDS, OVERHEAD_BAR, PEER_BAR = 15, 1.05, 2.0


def synchronous_file(module: nn.Module):
    """Saved tensors to a file and back, one after the other: what one writes first."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the graph
    stay = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() in stay:
            return tensor.detach()
        place = file.seek(0, 2)
        file.write(tensor.contiguous().numpy())
        return place, tensor.shape, tensor.dtype

    def unpack(packed):
        if isinstance(packed, torch.Tensor):
            return packed
        place, shape, dtype = packed
        file.seek(place)
        return torch.frombuffer(bytearray(file.read(shape.numel() * dtype.itemsize)), dtype=dtype).view(shape)

    return saved_tensors_hooks(pack, unpack)


def medians(arms: dict) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in in_turns(arms, ROUNDS).items()}


def activations(device: str) -> None:
    width, tokens, depth = (8192, 16384, 8) if device == "cuda" else (512, 2048, 16)
    net, x = deep_mlp(depth, width).to(device), torch.randn(tokens, width, device=device)
    store = None if device == "cuda" else DiskStore()
    arms = {"plain": nullcontext, "offload_activations": lambda: offload_activations(store)}
    arms["save_on_cpu"] = lambda: save_on_cpu(pin_memory=device == "cuda")
    if device == "cpu":
        arms["synchronous file"] = lambda: synchronous_file(net)

    def step(context) -> None:
        net.zero_grad()
        with context():
            output = net(x).sum()
        output.backward()

    seconds = medians({name: partial(step, context) for name, context in arms.items()})
    print(f"{depth} x (Linear({width}) + GELU), {tokens} rows, {device}")
    for name, context in arms.items():
        with MemoryMeter() as meter:
            step(context)
        print(f"{name:>20} {seconds[name]:8.3f} s {seconds[name] / seconds['plain']:6.2f} of plain "
              f"{meter.peak_bytes / 1e6:8.1f} MB")  # fmt: skip
    if store is not None:
        sync = seconds["synchronous file"] - seconds["plain"]
        hidden = 1 - (seconds["offload_activations"] - seconds["plain"]) / sync if sync > 0 else float("nan")
        print(f"{'':>20} of the synchronous file's extra time, {100 * hidden:.0f} % is hidden")
    else:
        over = seconds["offload_activations"] / seconds["plain"]
        peer = seconds["save_on_cpu"] / seconds["offload_activations"]
        print(f"over plain {over:.3f}, bar {OVERHEAD_BAR}: {'met' if over <= OVERHEAD_BAR else 'MISSED'}")
        print(f"save_on_cpu / ours {peer:.2f}, bar {PEER_BAR}: {'met' if peer >= PEER_BAR else 'MISSED'}")


def optimizer(device: str) -> None:
    models = {name: deep_mlp(12, 1024).to(device) for name in ("plain", "one by one", "overlapped")}
    makers = {
        "plain": torch.optim.AdamW,
        "one by one": lambda p: OffloadedOptimizer(p, overlap=False),
        "overlapped": OffloadedOptimizer,
    }
    optimizers = {name: makers[name](model.parameters()) for name, model in models.items()}

    def step(name) -> None:
        for parameter in models[name].parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizers[name].step()

    seconds = medians({name: partial(step, name) for name in models})
    count = sum(parameter.numel() for parameter in models["plain"].parameters())
    print(f"AdamW's step on {count / 1e6:.1f} M parameters, {device}: 8 bytes a parameter down and up each step")
    for name, taken in seconds.items():
        print(f"{name:>20} {taken:8.3f} s {taken / seconds['plain']:6.2f} of plain")


if __name__ == "__main__":
    chosen = "cuda" if torch.cuda.is_available() else "cpu"
    activations(chosen)
    optimizer(chosen)
