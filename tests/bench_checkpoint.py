"""The cost of `course_lib.checkpoint` beside that of `torch.utils.checkpoint`: time of a step, peak
bytes, hooks.

Run as a script: `python tests/bench_checkpoint.py`. Ratios of times taken in one run, in turns, so
that they carry over to other machines; the peaks are exact.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.utils.checkpoint as theirs
from torch import nn
from turns import in_turns

import course_lib.checkpoint as ours
from course_lib.memory import MemoryMeter
from course_lib.models import Decoder, random_tokens

STEP_BAR, HOOK_BAR = 1.02, 1.0
STEP_ROUNDS, HOOK_ROUNDS = 30, 3000
PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default]


def options(module, mode: str) -> dict:
    """The keyword arguments for `module.checkpoint`."""
    if mode == "selective":
        context_fn = partial(module.create_selective_checkpoint_contexts, PRODUCTS)
        return {"use_reentrant": False, "context_fn": context_fn}
    return {"use_reentrant": mode == "reentrant"}


MODES = ("reentrant", "not reentrant", "selective")


class Around(nn.Module):
    """A layer with a checkpoint around it; `module` and `options` may be exchanged between two
    steps."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer, self.module, self.options = layer, theirs, {}

    def forward(self, x):
        return self.module.checkpoint(self.layer, x, **self.options)


def decoder_step() -> tuple[nn.Module, Callable, Callable]:
    """A 12-layer decoder with a checkpoint around each layer: (model, choose(module, mode),
    step)."""
    model = Decoder(vocabulary=500, hidden=128, heads=4, layers=12, sequence=64, dropout=0.1)
    model.layers = nn.ModuleList(Around(layer) for layer in model.layers)
    tokens = random_tokens(4, 64, 500)

    def choose(module, mode):
        for layer in model.layers:
            layer.module, layer.options = module, options(module, mode)

    def step():
        model.zero_grad()
        model.loss(tokens).backward()

    return model, choose, step


def report(label: str, seconds: dict[str, list[float]], bar: float) -> None:
    medians, least = (
        {name: 1e6 * of(times) for name, times in seconds.items()}
        for of in (statistics.median, min)
    )
    ratio, ratio_least = medians["ours"] / medians["theirs"], least["ours"] / least["theirs"]
    print(
        f"{label:32}{medians['theirs']:12,.0f}{medians['ours']:12,.0f}{ratio:9.3f}{ratio_least:9.3f}"
        f"   bar {bar:.2f}: {'met' if ratio <= bar else 'missed'}"
    )


def times() -> None:
    """The step of a decoder, where the operators take most of the time, and that of a tiny MLP,
    where we do."""
    print(f"{'median us':32}{'PyTorch':>12}{'course':>12}{'ratio':>9}{'of least':>9}")
    _model, choose, step = decoder_step()
    for mode in MODES:

        def arm(module, mode=mode):
            choose(module, mode)
            step()

        arms = {"theirs": partial(arm, theirs), "ours": partial(arm, ours)}
        report(f"12-layer decoder, {mode}", in_turns(arms, STEP_ROUNDS), STEP_BAR)

    mlp = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU())
    x = torch.randn(4, 8, requires_grad=True)
    for mode in MODES:

        def tiny(module, mode=mode):
            module.checkpoint(mlp, x, **options(module, mode)).sum().backward()

        arms = {"theirs": partial(tiny, theirs), "ours": partial(tiny, ours)}
        report(f"tiny MLP, {mode}", in_turns(arms, HOOK_ROUNDS), HOOK_BAR)


def peaks() -> None:
    """The most bytes live in a step of the decoder."""
    print(f"{'peak bytes':32}{'PyTorch':>14}{'course':>14}")
    for mode in MODES:
        found = []
        for module in (theirs, ours):
            torch.manual_seed(0)
            model, choose, step = decoder_step()
            choose(module, mode)
            with MemoryMeter(model) as meter:
                step()
            found.append(meter.peak_bytes)
        verdict = "met" if found[0] == found[1] else "missed"
        print(
            f"{f'12-layer decoder, {mode}':32}{found[0]:14,}{found[1]:14,}   bar equal: {verdict}"
        )


def main() -> None:
    threads = torch.get_num_threads()
    # the steps are small, and idle threads that wait for work disturb the clock
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    try:
        print(
            f"torch.utils.checkpoint of torch {torch.__version__}, and course_lib.checkpoint, on a"
            " CPU, in turns"
        )
        times()
        print()
        peaks()
    finally:
        gc.unfreeze()
        torch.set_num_threads(threads)


if __name__ == "__main__":
    main()
