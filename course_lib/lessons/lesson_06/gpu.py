"""The GPU experiment of lesson 06: standard attention, the framework's kernels, the course's."""

import warnings
from collections.abc import Callable, Iterator

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from course_lib.attention import flash_attention, standard_attention
from course_lib.teaching.experiments import AttentionKernels, Part, compared, experiment


@experiment(
    title=(
        "Causal attention, forward and backward, in bf16: standard, the framework's fused kernel,"
        " the course's kernels"
    ),
    sizes={"sequence": 4096, "heads": 16, "head_dim": 128},
    small={"sequence": 32, "heads": 2, "head_dim": 16},
    arms={
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
    """Each of the framework's fused kernels that runs here is an arm; a note names the one that it
    takes by itself."""
    shape = (2, heads, sequence, head_dim)
    inputs = [
        torch.randn(shape, dtype=torch.bfloat16, device=device, requires_grad=True)
        for _ in range(3)
    ]
    for x in inputs:
        x.grad = torch.zeros_like(x)
    gradient = torch.randn(shape, dtype=torch.bfloat16, device=device)

    def by(backend: SDPBackend) -> torch.Tensor:
        # raises an error where this one cannot run, and never takes another
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(*inputs, is_causal=True)

    ours = "triton" if device.type == "cuda" else "torch"
    with AttentionKernels() as taken:
        functional.scaled_dot_product_attention(*inputs, is_causal=True)
    yield {"framework_takes": str(taken), "course_takes": ours.upper()}
    forwards = {"standard": lambda: standard_attention(*inputs, causal=True)}
    for name in ("cudnn", "flash", "efficient"):
        backend = getattr(SDPBackend, f"{name.upper()}_ATTENTION")
        if _runs(lambda backend=backend: by(backend).backward(gradient)):
            forwards[name] = lambda backend=backend: by(backend)
    forwards["course"] = lambda: flash_attention(*inputs, causal=True, backend=ours)
    forwards["course"]().backward(gradient)  # block sizes are tuned in the first call
    arms = {
        name: lambda forward=forward: forward().backward(gradient)
        for name, forward in forwards.items()
    }
    yield from compared(device, arms)


def _runs(step: Callable[[], object]) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # why it does not
        try:
            step()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            return False
    return True
