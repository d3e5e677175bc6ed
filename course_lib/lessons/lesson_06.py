"""Lesson 06: its exercises, its claims, and attention on a GPU: standard, the framework's kernel, the course's."""

import math
from typing import Any

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib._torch import tensors_in
from course_lib.attention import flash_attention, standard_attention
from course_lib.teaching import Claim, Verdict, expect_number
from course_lib.teaching.exercises import exercise, right, wrong
from course_lib.teaching.experiments import Number, experiment, measured

#: What learners may have read.
CLAIMS = (
    Claim(
        ("Flash keeps the maximum m and the sum l of each row.", "Flash 为每一行保存最大值 m 和总和 l。"),
        ("vectors of one number a row among what is saved", "所保存的张量里，每行一个数的向量有几个"),
        (
            "The first paper's algorithm did. One is enough: their log-sum-exp.",
            "第一篇论文的算法是这样。一个就够了：两者合成的对数求和指数。",
        ),
        outcome="partly",
    ),
    Claim(
        ("In half precision everything takes two bytes.", "半精度下，一切都是两个字节。"),
        ("dtype of that vector for bf16 inputs", "输入为 bf16 时这个向量的 dtype"),
        ("Not the statistics: four bytes a row.", "统计量不是：每行四个字节。"),
        outcome="partly",
    ),
    Claim(
        ("Backward does twice the FLOPs of forward.", "反向的 FLOPs 是前向的两倍。"),
        ("FLOPs of flash attention, backward against forward", "flash 注意力的 FLOPs，反向与前向之比"),
        ("Five products instead of two: P is computed again.", "五次乘法对两次：P 要再算一遍。"),
        outcome="fails",
    ),
    Claim(
        ("Checkpointed attention saves 50 to 80 %.", "给注意力加检查点，能省 50 到 80 %。"),
        (
            "share of the peak saved with 1 / 3 / 6 layers, a checkpoint each",
            "1 / 3 / 6 层、每层一个检查点时，峰值省下的比例",
        ),
        (
            "It depends on how many layers there are: with one, nothing (lesson 02).",
            "取决于有几层：只有一层时，什么也不省（第 02 课）。",
        ),
        outcome="partly",
    ),
    Claim(
        ("FlashAttention takes linear time.", "FlashAttention 的时间是线性的。"),
        ("twice the tokens: bytes kept / FLOPs", "token 数加倍：保存的字节 / FLOPs"),
        ("Its memory is. FLOPs stay quadratic.", "线性的是内存。FLOPs 仍是平方级。"),
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


@exercise(
    hint=(
        "Keep a running maximum and a running sum; rescale the sum when the maximum rises.",
        "记住当前最大值和当前总和；最大值上升时，把总和重新缩放。",
    )
)
def check_log_sum_exp(function: Any) -> Verdict:
    """The log-sum-exp of each row over blocks of columns, for large scores too, in one pass."""
    rows, block = 4, 4
    scores = torch.linspace(-3, 3, 60).sin().view(rows, 15) * torch.tensor([[1.0], [10.0], [500.0], [1000.0]])
    given = scores.clone()
    with _Watched(given, block) as watched:
        found = function(given, block)
    if not isinstance(found, torch.Tensor) or found.numel() != rows:
        return wrong("One number a row is wanted.", "每一行应返回一个数。")
    if not found.isfinite().all():
        return wrong("Large scores overflow.", "分数大时溢出了。")
    if not torch.allclose(found.flatten(), torch.logsumexp(scores, 1), atol=1e-4):
        return wrong("The numbers are not the log-sum-exps.", "这些数不是对数求和指数。")
    if watched.too_wide:
        name = watched.too_wide[0]
        return wrong(
            f"Right numbers, but `{name}` took more than a block at once.", f"数是对的，但 `{name}` 一次取的不止一块。"
        )
    if len(set(watched.blocks_read)) < len(watched.blocks_read):
        return wrong(
            "Right numbers, but in a second pass: the code comes back to a block that it had left.",
            "数是对的，但多过了一遍：离开一块之后，又回头去取它。",
        )
    return right("Right, in blocks, and without overflow.", "正确，分块计算，也不溢出。")


@exercise(hint=("p = exp(s - lse), with s = q·k / √d.", "p = exp(s - lse)，其中 s = q·k / √d。"))
def check_probabilities(function: Any) -> Verdict:
    """P of one head from Q, K and the log-sum-exp."""
    q, k = (torch.linspace(-2, 2, 80).view(5, 16) * factor for factor in (1.0, -1.5))
    scores = q @ k.T / 4
    lse = torch.logsumexp(scores, 1)
    found = function(q, k, lse)
    halved = function(q, k, lse + math.log(2))  # as if each row had as much again elsewhere
    if not isinstance(found, torch.Tensor) or found.shape != (5, 5):
        return wrong("A matrix (n, n) is wanted.", "需要一个 (n, n) 的矩阵。")
    if not torch.allclose(found, scores.softmax(1), atol=1e-5):
        sums = found.sum(1)
        if torch.allclose(sums, torch.ones_like(sums), atol=1e-4):
            return wrong("Rows sum to 1, but the probabilities differ.", "每行和为 1，但概率不对。")
        return wrong("Rows do not sum to 1.", "每行的和不是 1。")
    if not isinstance(halved, torch.Tensor) or not torch.allclose(2 * halved, found, atol=1e-5):
        return wrong(
            "Right numbers, but they do not come from `lse`: with `lse` greater by log 2 they should be halved. "
            "Is there a softmax inside, or a sum over the row?",
            "数是对的，但不是由 `lse` 得来的：`lse` 增加 log 2，它们应当减半。"
            "里面是不是用了 softmax，或者又对整行求了和？",
        )
    return right("Right: softmax without a softmax.", "正确：不用 softmax 的 softmax。")


def check_grouped_bytes(answer: Any) -> Verdict:
    """Lesson 06: bytes that flash attention keeps, 32 query heads on 8, d = 128, 4096 tokens, bf16."""
    one = 4096 * 128 * 2
    right = 80 * one + 32 * 4096 * 4
    return expect_number(
        answer,
        right,
        wrong_answers={
            128 * one + 32 * 4096 * 4: ("K and V have 8 heads, not 32.", "K 和 V 有 8 个头，不是 32 个。"),
            80 * one: ("The log-sum-exp is missing.", "漏了对数求和指数。"),
            80 * one + 32 * 4096 * 2: ("The log-sum-exp is fp32.", "对数求和指数是 fp32。"),
            80 * one + 2 * 32 * 4096 * 4: ("One number a row, not two.", "每行一个数，不是两个。"),
            48 * one + 32 * 4096 * 4: ("The output is kept as well.", "输出也要保存。"),
            right / 10**6: ("That is in MB. Give bytes.", "这是以 MB 为单位的数，请给出字节数。"),
        },
        why=(
            "Q and O with 32 heads, K and V with 8, and 4 bytes a row.",
            "Q 和 O 有 32 个头，K 和 V 有 8 个，再加每行 4 字节。",
        ),
        hint=(
            "Which tensors does section 6.4 list, and how many heads has each?",
            "6.4 节列出了哪些张量？各有几个头？",
        ),
    )


# A GPU experiment -----------------------------------------------------------------------------------------------------


@experiment(
    title=(
        "Causal attention, forward and backward, in bf16: standard, the framework's fused kernel, the course's kernels",
        "因果注意力的前向与反向，bf16：标准、框架的融合核、本课程的核函数",
    ),
    sizes={"sequence": 4096, "heads": 16, "head_dim": 128},
    small={"sequence": 32, "heads": 2, "head_dim": 16},
    arms={"standard": ("standard", "标准"), "framework": ("framework", "框架"), "course": ("course", "本课程")},
)
def attention_forward_and_backward(
    device: torch.device, *, sequence: int, heads: int, head_dim: int
) -> dict[str, Number]:
    shape = (2, heads, sequence, head_dim)
    inputs = [torch.randn(shape, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(3)]
    for x in inputs:
        x.grad = torch.zeros_like(x)
    gradient = torch.randn(shape, dtype=torch.bfloat16, device=device)
    arms = {
        "standard": lambda: standard_attention(*inputs, causal=True),
        "framework": lambda: functional.scaled_dot_product_attention(*inputs, is_causal=True),
        "course": lambda: flash_attention(*inputs, causal=True),
    }
    values: dict[str, Number] = {}
    for name, attention in arms.items():
        attention().backward(gradient)  # block sizes are tuned in the first call
        values |= measured(name, lambda attention=attention: attention().backward(gradient))
    return values
