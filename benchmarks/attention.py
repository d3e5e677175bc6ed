"""Time of forward and backward, and peak bytes besides inputs, output and gradients, of flash
attention in PyTorch operators, the math kernel and the fused kernel.

Flex attention is not compared, because it has no backward pass on a CPU."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack

import torch
from scoreboard import COURSE, Row, compare
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from course_lib.attention import flash_attention
from course_lib.memory.allocator import allocator_peak

HEADS, HEAD_DIM = 4, 64


def math_attention(q, k, v):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v)


ARMS = {
    COURSE: lambda q, k, v: flash_attention(q, k, v, backend="torch"),
    "math kernel": math_attention,
    "fused kernel": F.scaled_dot_product_attention,
}
NOTES = {
    "fused kernel": "one C++ kernel; the course's tiles are a loop of PyTorch operators",
}


def step(attention: Callable, tensors: list[torch.Tensor]) -> Callable[[], object]:
    *qkv, grad_o = tensors
    return lambda: torch.autograd.grad(attention(*qkv), qkv, grad_o)


def peak(call: Callable[[], object], tensors: list[torch.Tensor]) -> int:
    def under(*contexts: AbstractContextManager) -> None:
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            call()

    # The allocator's events include memory that the fused kernel allocates inside its operator.
    return allocator_peak(under, torch.device("cpu")) - 4 * tensors[0].nbytes


def rows(rounds: int) -> Iterator[Row]:
    for n in (1024, 2048):
        torch.manual_seed(0)
        tensors = [torch.randn(1, HEADS, n, HEAD_DIM, requires_grad=i < 3) for i in range(4)]
        arms = {name: step(attention, tensors) for name, attention in ARMS.items()}
        peaks = {name: peak(call, tensors) for name, call in arms.items()}
        work = f"attention over {n:,} tokens, forward and backward"
        yield from compare(work, arms, rounds, bytes_of=peaks, notes=NOTES)
        yield Row(work, "flex attention", note="no backward pass on a CPU")
