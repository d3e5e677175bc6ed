"""Lesson 06: its exercises, its claims, and attention on a GPU: standard, the framework's kernel, the course's."""

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib._torch import tensors_in
from course_lib.attention import flash_attention, standard_attention
from course_lib.teaching import Claim, Verdict, expect_number, text
from course_lib.teaching.exercises import exercise, right, wrong
from course_lib.teaching.experiments import AttentionKernels, Part, compared, experiment

#: What learners may have read.
CLAIMS = (
    Claim(
        "Flash keeps the maximum m and the sum l of each row.",
        "vectors of one number a row among what is saved",
        "The first paper's algorithm did. One is enough: their log-sum-exp.",
        outcome="partly",
    ),
    Claim(
        "In half precision everything takes two bytes.",
        "dtype of that vector for bf16 inputs",
        "Not the statistics: four bytes a row.",
        outcome="partly",
    ),
    Claim(
        "Backward does twice the FLOPs of forward.",
        "FLOPs of flash attention, backward against forward; the same for the Triton kernels",
        "Five products for two: P is computed again. The kernels do seven, so that no two write to one place.",
        outcome="fails",
    ),
    Claim(
        "Checkpointed attention saves 50 to 80 %.",
        "share of the peak saved with 1 / 3 / 6 layers, a checkpoint each",
        "It depends on how many layers there are: with one, nothing (lesson 02).",
        outcome="partly",
    ),
    Claim(
        "FlashAttention takes linear time.",
        "twice the tokens: bytes kept / FLOPs",
        "Its memory is. FLOPs stay quadratic.",
        outcome="fails",
    ),
)

# Exercises ------------------------------------------------------------------------------------------------------------

#: Operators that only move numbers or make room for them: these may have all scores before them.
_MOVES = ("_to_copy", "_unsafe_view", "cat", "clone", "constant_pad_nd", "copy_", "index", "index_select")
_MAKES = ("new_", "empty", "full", "ones", "zeros")


class _Watched(TorchDispatchMode):
    """Notes which operators compute with more than a block of the scores at once, and with which blocks, in order."""

    def __init__(self, scores: torch.Tensor, block: int) -> None:
        super().__init__()
        self.scores, self.block = scores, block
        self.too_wide: list[str] = []
        self.blocks_read: list[int] = []  # by their places in the scores

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.overloadpacket.__name__
        if not (operator.is_view or name in _MOVES or name.startswith(_MAKES)):
            for tensor in tensors_in(args):
                if tensor.numel() > len(self.scores) * self.block or max(tensor.shape, default=0) > self.block:
                    self.too_wide.append(name)
                elif tensor.untyped_storage().data_ptr() == self.scores.untyped_storage().data_ptr():
                    if [tensor.storage_offset()] != self.blocks_read[-1:]:
                        self.blocks_read.append(tensor.storage_offset())
        return operator(*args, **(kwargs or {}))


@exercise(hint="Keep a running maximum and a running sum; rescale the sum when the maximum rises.")
def check_log_sum_exp(function: Any) -> Verdict:
    """The log-sum-exp of each row over blocks of columns, for large scores too, in one pass."""
    rows, block = 4, 4
    scores = torch.linspace(-3, 3, 60).sin().view(rows, 15) * torch.tensor([[1.0], [10.0], [500.0], [1000.0]])
    given = scores.clone()
    with _Watched(given, block) as watched:
        found = function(given, block)
    if not isinstance(found, torch.Tensor) or found.numel() != rows:
        return wrong("One number a row is wanted.")
    if not found.isfinite().all():
        return wrong("Large scores overflow.")
    if not torch.allclose(found.flatten(), torch.logsumexp(scores, 1), atol=1e-4):
        return wrong("The numbers are not the log-sum-exps.")
    if watched.too_wide:
        name = watched.too_wide[0]
        return wrong(text("Right numbers, but `{name}` took more than a block at once.", name=name))
    if len(set(watched.blocks_read)) < len(watched.blocks_read):
        return wrong("Right numbers, but in a second pass: the code comes back to a block that it had left.")
    return right("Right, in blocks, and without overflow.")


@exercise(hint="p = exp(s - lse), with s = q·k / √d.")
def check_probabilities(function: Any) -> Verdict:
    """P of one head from Q, K and the log-sum-exp."""
    q, k = (torch.linspace(-2, 2, 80).view(5, 16) * factor for factor in (1.0, -1.5))
    scores = q @ k.T / 4
    lse = torch.logsumexp(scores, 1)
    found = function(q, k, lse)
    halved = function(q, k, lse + math.log(2))  # as if each row had as much again elsewhere
    if not isinstance(found, torch.Tensor) or found.shape != (5, 5):
        return wrong("A matrix (n, n) is wanted.")
    if not torch.allclose(found, scores.softmax(1), atol=1e-5):
        sums = found.sum(1)
        if torch.allclose(sums, torch.ones_like(sums), atol=1e-4):
            return wrong("Rows sum to 1, but the probabilities differ.")
        return wrong("Rows do not sum to 1.")
    if not isinstance(halved, torch.Tensor) or not torch.allclose(2 * halved, found, atol=1e-5):
        return wrong(
            "Right numbers, but they do not come from `lse`: with `lse` greater by log 2 they should be "
            "halved. Is there a softmax inside, or a sum over the row?"
        )
    return right("Right: softmax without a softmax.")


@exercise(hint="Which tensors does section 6.4 list, and how many heads has each?")
def check_grouped_bytes(answer: Any) -> Verdict:
    """Lesson 06: bytes that flash attention keeps, 32 query heads on 8, d = 128, 4096 tokens, bf16."""
    one = 4096 * 128 * 2
    right = 80 * one + 32 * 4096 * 4
    return expect_number(
        answer,
        right,
        wrong_answers={
            128 * one + 32 * 4096 * 4: "K and V have 8 heads, not 32.",
            80 * one: "The log-sum-exp is missing.",
            80 * one + 32 * 4096 * 2: "The log-sum-exp is fp32.",
            80 * one + 2 * 32 * 4096 * 4: "One number a row, not two.",
            48 * one + 32 * 4096 * 4: "The output is kept as well.",
            right / 10**6: "That is in MB. Give bytes.",
        },
        why="Q and O with 32 heads, K and V with 8, and 4 bytes a row.",
    )


# A GPU experiment -----------------------------------------------------------------------------------------------------


@experiment(
    title=(
        "Causal attention, forward and backward, in bf16: standard, the framework's fused kernel, the course's kernels"
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
def attention_forward_and_backward(device: torch.device, *, sequence: int, heads: int, head_dim: int) -> Iterator[Part]:
    """Each of the framework's fused kernels that runs here is an arm; a note names the one that it takes by itself."""
    shape = (2, heads, sequence, head_dim)
    inputs = [torch.randn(shape, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(3)]
    for x in inputs:
        x.grad = torch.zeros_like(x)
    gradient = torch.randn(shape, dtype=torch.bfloat16, device=device)

    def by(backend: SDPBackend) -> torch.Tensor:
        with sdpa_kernel(backend):  # raises an error where this one cannot run, and never takes another
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
    arms = {name: lambda forward=forward: forward().backward(gradient) for name, forward in forwards.items()}
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
