"""GPU experiments of lesson 06: the course's Triton kernels, the framework's flash kernel, standard attention."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from course_lib.attention import flash_attention, standard_attention
from course_lib.memory import measure

from . import experiment


@experiment(
    "06",
    "attention_forward_and_backward",
    en="Causal attention, forward and backward, in bf16: standard, the framework's fused kernel, the course's kernels",
    zh="因果注意力的前向与反向，bf16：标准、框架的融合核、本课程的核函数",
    small={"sequence": 32, "heads": 2, "head_dim": 16},
    labels={
        "standard_peak_bytes": ("standard: peak of tensors", "标准：张量峰值"),
        "standard_seconds": ("standard: time", "标准：时间"),
        "framework_peak_bytes": ("framework: peak of tensors", "框架：张量峰值"),
        "framework_seconds": ("framework: time", "框架：时间"),
        "course_peak_bytes": ("course: peak of tensors", "本课程：张量峰值"),
        "course_seconds": ("course: time", "本课程：时间"),
    },
)
def attention_forward_and_backward(
    device: torch.device, *, sequence: int = 4096, heads: int = 16, head_dim: int = 128, batch: int = 2
) -> dict[str, float]:
    shape = (batch, heads, sequence, head_dim)
    inputs = [torch.randn(shape, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(3)]
    for x in inputs:
        x.grad = torch.zeros_like(x)
    gradient = torch.randn(shape, dtype=torch.bfloat16, device=device)

    def framework(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    arms = {
        "standard": lambda q, k, v: standard_attention(q, k, v, causal=True),
        "framework": framework,
        "course": lambda q, k, v: flash_attention(q, k, v, causal=True),
    }
    figures = {}
    for name, attention in arms.items():
        attention(*inputs).backward(gradient)  # block sizes are tuned in the first call
        found = measure(lambda attention=attention: attention(*inputs).backward(gradient))
        figures[f"{name}_peak_bytes"] = found.peak_bytes
        figures[f"{name}_seconds"] = found.seconds
    return figures
