"""GPU experiments of lesson 04: offloaded activations, offloaded optimizer state, pinned and pageable copies."""

from __future__ import annotations

import time

import torch
from torch.autograd.graph import save_on_cpu

from course_lib.memory import measure
from course_lib.models import Decoder, random_tokens
from course_lib.offload import OffloadedOptimizer, offload_activations

from . import experiment

SMALL = {"vocabulary": 64, "hidden": 32, "heads": 2, "layers": 2, "sequence": 16, "batch": 2}


@experiment(
    "04",
    "offloaded_activations",
    en="A decoder's forward and backward pass: plain, offloaded, and with torch's save_on_cpu",
    zh="解码器的前向与反向：普通、卸载，以及 torch 的 save_on_cpu",
    small=SMALL,
    labels={
        "plain_peak_bytes": ("plain: peak of tensors", "普通：张量峰值"),
        "plain_seconds": ("plain: time", "普通：时间"),
        "offloaded_peak_bytes": ("offloaded: peak of tensors", "卸载：张量峰值"),
        "offloaded_allocator_peak_bytes": ("offloaded: allocator's peak", "卸载：分配器峰值"),
        "offloaded_seconds": ("offloaded: time", "卸载：时间"),
        "save_on_cpu_peak_bytes": ("save_on_cpu: peak of tensors", "save_on_cpu：张量峰值"),
        "save_on_cpu_seconds": ("save_on_cpu: time", "save_on_cpu：时间"),
    },
)
def offloaded_activations(
    device: torch.device,
    *,
    vocabulary: int = 8192,
    hidden: int = 2048,
    heads: int = 16,
    layers: int = 8,
    sequence: int = 2048,
    batch: int = 4,
) -> dict[str, float]:
    sizes = {"vocabulary": vocabulary, "hidden": hidden, "heads": heads, "layers": layers, "sequence": sequence}
    model = Decoder(**sizes, fused=True).to(device)
    tokens = random_tokens(batch, sequence, vocabulary).to(device)
    contexts = {
        "plain": torch.enable_grad,
        "offloaded": lambda: offload_activations(min_bytes=1 << 10),
        "save_on_cpu": lambda: save_on_cpu(pin_memory=device.type == "cuda"),
    }

    def step(context) -> None:
        with context():
            loss = model.loss(tokens)
        loss.backward()

    figures = {}
    for name, context in contexts.items():
        found = measure(lambda context=context: step(context), model=model)
        figures[f"{name}_peak_bytes"] = found.peak_bytes
        figures[f"{name}_seconds"] = found.seconds
        if name == "offloaded":
            figures[f"{name}_allocator_peak_bytes"] = found.allocator_peak_bytes
    return figures


@experiment(
    "04",
    "offloaded_optimizer",
    en="A training step of a decoder with AdamW: its state on the device, and in host memory",
    zh="解码器用 AdamW 的一个训练步：状态在设备上，以及在主机内存里",
    small=SMALL,
    labels={
        "plain_peak_bytes": ("on the device: peak of tensors", "在设备上：张量峰值"),
        "plain_seconds": ("on the device: time", "在设备上：时间"),
        "offloaded_peak_bytes": ("in host memory: peak of tensors", "在主机内存：张量峰值"),
        "offloaded_seconds": ("in host memory: time", "在主机内存：时间"),
        "state_bytes": ("8 bytes a parameter", "每参数 8 字节"),
    },
)
def offloaded_optimizer(
    device: torch.device,
    *,
    vocabulary: int = 8192,
    hidden: int = 1024,
    heads: int = 16,
    layers: int = 8,
    sequence: int = 512,
    batch: int = 4,
) -> dict[str, float]:
    sizes = {"vocabulary": vocabulary, "hidden": hidden, "heads": heads, "layers": layers, "sequence": sequence}
    tokens = random_tokens(batch, sequence, vocabulary).to(device)
    figures = {}
    for name, kind in (("plain", torch.optim.AdamW), ("offloaded", OffloadedOptimizer)):
        model = Decoder(**sizes).to(device)
        optimizer = kind(model.parameters(), lr=1e-4)

        def step(model=model, optimizer=optimizer) -> None:
            model.loss(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()

        found = measure(step, model=model, optimizer=optimizer)
        figures[f"{name}_peak_bytes"] = found.peak_bytes
        figures[f"{name}_seconds"] = found.seconds
        figures["state_bytes"] = 8 * sum(parameter.numel() for parameter in model.parameters())
    return figures


@experiment(
    "04",
    "pinned_copies",
    en="A non-blocking copy up, from pinned and from pageable memory",
    zh="向上的非阻塞拷贝：分别来自锁页内存和可分页内存",
    small={"megabytes": 1},
    labels={
        "copied_bytes": ("copied", "拷贝"),
        "pinned_call_seconds": ("pinned: until the call returns", "锁页：到调用返回"),
        "pinned_seconds": ("pinned: until the copy is done", "锁页：到拷贝完成"),
        "pageable_call_seconds": ("pageable: until the call returns", "可分页：到调用返回"),
        "pageable_seconds": ("pageable: until the copy is done", "可分页：到拷贝完成"),
    },
)
def pinned_copies(device: torch.device, *, megabytes: int = 256) -> dict[str, float]:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    source = torch.ones(megabytes * 10**6, dtype=torch.uint8)
    sources = {"pinned": source.pin_memory() if device.type == "cuda" else source, "pageable": source}
    figures: dict[str, float] = {"copied_bytes": source.nbytes}
    for name, block in sources.items():
        for _ in range(3):  # the last one counts
            wait()
            start = time.perf_counter()
            block.to(device, non_blocking=True)
            figures[f"{name}_call_seconds"] = time.perf_counter() - start
            wait()
            figures[f"{name}_seconds"] = time.perf_counter() - start
    return figures
