"""The GPU experiment of lesson 06: standard attention, PyTorch's kernels, the course's kernel."""

import warnings
from collections.abc import Callable, Iterator

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from course_lib.attention import flash_attention, standard_attention
from course_lib.teaching.experiments import AttentionKernels, Part, compare_variants, experiment


@experiment(
    title=(
        "Causal attention in bf16, forward and backward: standard, the framework's fused"
        " kernels, the course's kernels"
    ),
    sizes={"sequence": 4096, "heads": 16, "head_dim": 128},
    small={"sequence": 32, "heads": 2, "head_dim": 16},
    variants={
        "standard": "standard",
        "cudnn": "framework, cuDNN",
        "flash": "framework, FlashAttention",
        "efficient": "framework, memory-efficient",
        "course": "course",
    },
)
def attention_forward_and_backward(
    device: torch.device, *, sequence: int, heads: int, head_dim: int
) -> Iterator[Part]:
    """Measure forward and backward of causal attention with each kernel that runs on the device.

    The kernels are standard attention, PyTorch's fused kernels and the course's flash attention. A
    string in the results names the kernels that PyTorch chooses by default.
    """
    shape = (2, heads, sequence, head_dim)
    inputs = [
        torch.randn(shape, dtype=torch.bfloat16, device=device, requires_grad=True)
        for _ in range(3)
    ]
    for x in inputs:
        x.grad = torch.zeros_like(x)
    gradient = torch.randn(shape, dtype=torch.bfloat16, device=device)

    def run_backend(backend: SDPBackend) -> torch.Tensor:
        # raises an error if this backend cannot run, and never falls back to another
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(*inputs, is_causal=True)

    ours = "triton" if device.type == "cuda" else "torch"
    with AttentionKernels() as taken:
        functional.scaled_dot_product_attention(*inputs, is_causal=True)
    yield {"framework_takes": str(taken), "course_takes": ours.upper()}
    forwards = {"standard": lambda: standard_attention(*inputs, causal=True)}
    for name in ("cudnn", "flash", "efficient"):
        backend = getattr(SDPBackend, f"{name.upper()}_ATTENTION")
        if _runs(lambda backend=backend: run_backend(backend).backward(gradient)):
            forwards[name] = lambda backend=backend: run_backend(backend)
    forwards["course"] = lambda: flash_attention(*inputs, causal=True, backend=ours)
    forwards["course"]().backward(gradient)  # the first call tunes block sizes
    variants = {
        name: lambda forward=forward: forward().backward(gradient)
        for name, forward in forwards.items()
    }
    yield from compare_variants(device, variants)


def _runs(step: Callable[[], object]) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warnings say why a backend cannot run
        try:
            step()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            return False
    return True
