"""Offloading on a GPU: activations, optimizer state, and copies from pinned and pageable memory."""

import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch.autograd.graph import save_on_cpu

from course_lib._torch.devices import wait_for
from course_lib.offload import OffloadedOptimizer, offload_activations
from course_lib.teaching.experiments import (
    TINY,
    AttentionKernels,
    Part,
    compare_variants,
    decoder_and_tokens,
    experiment,
    need_host_memory,
    peaks,
    seconds,
)
from course_lib.teaching.recordings import FOLDER


@experiment(
    title="A decoder's forward and backward pass: plain, offloaded, and with torch's save_on_cpu",
    sizes={
        "vocabulary": 8192,
        "hidden": 2048,
        "heads": 16,
        "layers": 8,
        "sequence": 2048,
        "batch": 4,
    },
    small=TINY,
    variants={
        "plain": "plain",
        "offloaded": "offloaded",
        "save_on_cpu": "save_on_cpu",
    },
)
def offloaded_activations(device: torch.device, **sizes: int) -> Iterator[Part]:
    """Measure a decoder's forward and backward pass with and without offloaded activations.

    Activations are offloaded by `offload_activations`, and in another variant by PyTorch's
    `save_on_cpu`. On a GPU, each of these two variants pins about 13 GB of host memory, because
    PyTorch rounds every block up to a power of two.
    """
    pinned = device.type == "cuda"
    # In fp32 a layer saves 68 bytes per element of its input. Pinned memory holds these bytes
    # twice, and rounding up adds at most half of that.
    if pinned:
        need_host_memory(
            3 * 68 * sizes["batch"] * sizes["sequence"] * sizes["hidden"] * sizes["layers"]
        )
    model, tokens = decoder_and_tokens(device, **sizes, fused=True)

    def step(context: AbstractContextManager) -> None:
        with context:
            loss = model.loss(tokens)
        loss.backward()

    with AttentionKernels() as kernels:
        step(torch.enable_grad())
    yield {"attention": str(kernels)}
    variants = {
        "plain": lambda: step(torch.enable_grad()),
        "offloaded": lambda: step(offload_activations(min_bytes=1 << 10)),
        "save_on_cpu": lambda: step(save_on_cpu(pin_memory=pinned)),
    }
    yield from compare_variants(device, variants, model=model)


def recorded_on_h200() -> dict[str, float]:
    """Return the recorded results of the experiment `offloaded_activations` on an H200.

    Returns:
        Dict from the name of a result to its number. The additional key "link" has the measured
        bandwidth of copies to the host, in bytes per second.
    """
    recording = json.loads((FOLDER / "nvidia-h200.json").read_text(encoding="utf-8"))
    found = recording["experiments"]["04"]["offloaded_activations"]
    return found["figures"] | {"link": found["link_bytes_per_second"]["down"]}


@experiment(
    title="A training step of a decoder with AdamW: its state on the device, and in host memory",
    sizes={
        "vocabulary": 8192,
        "hidden": 1024,
        "heads": 16,
        "layers": 8,
        "sequence": 512,
        "batch": 4,
    },
    small=TINY,
    variants={"plain": "on the device", "offloaded": "in host memory"},
    labels={"state_bytes": "8 bytes per parameter"},
)
def offloaded_optimizer(device: torch.device, **sizes: int) -> Iterator[Part]:
    """Measure a decoder's training step with AdamW's state on the device and in host memory.

    On a GPU this experiment pins at most 16 bytes of host memory per parameter, 2 GB in total. With
    a slow CPU it takes half a minute.
    """
    variants = {}
    for name, kind in (("plain", torch.optim.AdamW), ("offloaded", OffloadedOptimizer)):
        model, tokens = decoder_and_tokens(device, **sizes)
        optimizer = kind(model.parameters(), lr=1e-4)

        def step(model=model, optimizer=optimizer, tokens=tokens) -> None:
            model.loss(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()

        variants[name] = step
        yield peaks(name, step, model=model, optimizer=optimizer)
    yield {"state_bytes": 8 * sum(parameter.numel() for parameter in model.parameters())}
    yield seconds(device, variants)


@experiment(
    title="A non-blocking copy to the GPU (H2D), from pinned and from pageable memory",
    sizes={"megabytes": 256},
    small={"megabytes": 1},
    labels={
        "copied_bytes": "copied",
        "pinned_call_seconds": "pinned: until the call returns",
        "pinned_seconds": "pinned: until the copy is done",
        "pageable_call_seconds": "pageable: until the call returns",
        "pageable_seconds": "pageable: until the copy is done",
    },
)
def pinned_copies(device: torch.device, *, megabytes: int) -> Iterator[Part]:
    source = torch.ones(megabytes * 10**6, dtype=torch.uint8)
    sources = {
        "pinned": source.pin_memory() if device.type == "cuda" else source,
        "pageable": source,
    }
    values: Part = {"copied_bytes": source.nbytes}
    for name, block in sources.items():
        for _ in range(3):  # only the last run is measured
            wait_for(device)
            start = time.perf_counter()
            block.to(device, non_blocking=True)
            values[f"{name}_call_seconds"] = time.perf_counter() - start
            wait_for(device)
            values[f"{name}_seconds"] = time.perf_counter() - start
    yield values
