"""Lesson 02: its exercises, its claims, and what checkpoints save and cost on a GPU."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from course_lib.checkpoint import checkpoint, checkpointed_loss, create_selective_checkpoint_contexts
from course_lib.memory import MemoryMeter, saved_tensors, symbolic
from course_lib.models import Decoder, random_tokens
from course_lib.teaching import Claim, Verdict
from course_lib.teaching.exercises import Refused, exercise, largest_that_fits, right, wrong
from course_lib.teaching.experiments import TINY, Number, decoder_and_tokens, experiment, measured

#: What learners may have read.
CLAIMS = (
    Claim(
        ("One checkpointed layer saves memory.", "给一层加检查点就能省内存。"),
        ("peak of one layer, and of four", "一层的峰值与四层的峰值"),
        (
            "No: while it is computed again, the whole layer is there. Several layers do.",
            "不能：重计算时，整层的激活值都在。多层才省。",
        ),
        outcome="fails",
    ),
    Claim(
        ("Non-reentrant checkpointing brings memory from O(N) to O(1).", "非可重入检查点把内存从 O(N) 降到 O(1)。"),
        ("saved bytes of a decoder, a checkpoint a layer", "解码器保存的字节，每层一个检查点"),
        (
            "No: one input a layer stays. O(N) with a smaller slope.",
            "不对：每层留下一份输入，仍是 O(N)，只是斜率更小。",
        ),
        outcome="fails",
    ),
    Claim(
        ("The non-reentrant mode analyses a static graph.", "非可重入模式要分析静态图。"),
        ("a function that takes another branch each step", "每一步走不同分支的函数"),
        ("No: it hooks saved tensors. Gradients are equal.", "不对：它只是给保存的张量挂钩子。梯度相等。"),
        outcome="fails",
    ),
    Claim(
        ("The reentrant mode is more compatible.", "可重入模式兼容性更好。"),
        ("rows that work, reentrant : non-reentrant", "正常工作的行数，可重入 : 非可重入"),
        ("The other way round, but for functions that forbid hooks.", "恰好相反，只有不许挂钩子的函数除外。"),
        outcome="partly",
    ),
    Claim(
        (
            "`checkpoint_sequential` on the list of Linear layers equals the network.",
            "对 Linear 层的列表用 `checkpoint_sequential`，结果与原来的网络相同。",
        ),
        ("outputs compared", "比较输出"),
        ("No: the activation functions between them are gone.", "不对：中间的激活函数没有了。"),
        outcome="fails",
    ),
    Claim(
        ("It trains.", "用了它，网络照样能训练。"),
        (
            "reentrant, three segments, an input that needs no gradient: layers with gradients",
            "可重入，三段，输入不需要梯度：得到梯度的层数",
        ),
        ("Only the last segment does: there is a warning, but no error.", "只有最后一段在训练：有警告，但不报错。"),
        outcome="partly",
    ),
)

# Exercises ------------------------------------------------------------------------------------------------------------


@exercise(
    hint=(
        "Forward without a graph, or with hooks that keep nothing; in backward run the block again with a graph.",
        "前向时不记录计算图，或者挂上什么也不留的钩子；反向时带着计算图再跑一遍。",
    )
)
def check_checkpoint(function: Any) -> Verdict:
    """A checkpoint `function(block, x)` of one's own: equal gradients, two runs, only the input kept."""
    weight = torch.linspace(-1, 1, 64).view(8, 8).requires_grad_()
    x = torch.linspace(0, 1, 32).view(4, 8).requires_grad_()
    runs = []

    def block(x):
        runs.append(1)
        y = x @ weight
        for _ in range(8):
            y = y.sin().tanh().exp().sub(1)
        return y

    expected = torch.autograd.grad(block(x).sum(), (x, weight))
    runs.clear()
    output = function(block, x)
    before = len(runs)
    output.sum().backward()
    found, after = (x.grad, weight.grad), len(runs)
    if any(one is None for one in found):
        return wrong("A gradient is missing.", "缺少梯度。")
    if not all(torch.allclose(one, other) for one, other in zip(found, expected, strict=True)):
        return wrong("The gradients differ from autograd's.", "梯度与 autograd 算出的不同。")
    _two_runs(before, after)
    kept = saved_tensors(lambda x: function(block, x), x).total_bytes
    if kept > 4 * x.nbytes:  # the input itself may be kept in the context, unseen
        return wrong(f"The graph still keeps {kept} bytes.", f"计算图仍保存着 {kept} 字节。")
    return right(
        "Right: equal gradients, two runs, nothing kept but the input.", "正确：梯度相等，运行两次，只留下输入。"
    )


@exercise(
    hint=(
        "See `torch.get_rng_state` and `torch.random.fork_rng`.",
        "参见 `torch.get_rng_state` 和 `torch.random.fork_rng`。",
    )
)
def check_dropout_checkpoint(function: Any) -> Verdict:
    """A checkpoint `function(block, x)` that draws the same mask again and disturbs nothing after it."""
    runs, before = [], []

    def block(x):
        runs.append(1)
        return functional.dropout(x * 1.0, 0.5)

    def after(run: Callable) -> tuple:
        x = torch.ones(1000, requires_grad=True)
        output = run(block, x)
        before.append(len(runs))
        output.sum().backward()
        return torch.equal(output == 0, x.grad == 0), torch.rand(3)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        _, expected = after(lambda block, x: block(x))
        torch.manual_seed(0)
        runs.clear()
        same, found = after(function)
    _two_runs(before[-1], len(runs))
    if not same:
        return wrong("The second run drew another mask.", "第二次运行抽到了另一个掩码。")
    if not torch.equal(found, expected):
        return wrong("The random numbers afterwards have changed.", "之后的随机数变了。")
    return right("Right: the same mask, and undisturbed random numbers.", "正确：掩码相同，之后的随机数不受影响。")


def _two_runs(before: int, after: int) -> None:
    if (before, after) != (1, 2):
        raise Refused(
            f"Runs of the block before backward: {before}, in all: {after}. It takes 1 and 2.",
            f"块在反向之前运行了 {before} 次，总共 {after} 次；应当是 1 次和 2 次。",
        )


@exercise(
    hint=(
        "Which operators do most of the FLOPs, and which of their results are large?",
        "哪些算子占了大部分 FLOPs？其中哪些算子的结果很大？",
    ),
    raised=("The policy cannot be used: {}.", "这个策略用不了：{}。"),
)
def check_policy(operators: Any) -> Verdict:
    """Operators for a selective policy to keep: a peak of 70 MB and 1.2 times the FLOPs at most."""
    if not isinstance(operators, list | tuple | set):
        return wrong("Give a list of operators.", "请给出算子的列表。")

    def loss(keep) -> torch.Tensor:
        decoder = Decoder(vocabulary=2048, hidden=256, heads=8, layers=8, sequence=128)
        tokens = random_tokens(4, 128, 2048)
        x = decoder.tokens(tokens[:, :-1]) + decoder.positions.weight
        for layer in decoder.layers:
            options = {"context_fn": lambda: create_selective_checkpoint_contexts(list(keep))}
            x = layer(x) if keep is None else checkpoint(layer, x, use_reentrant=False, **options)
        return functional.cross_entropy(decoder.head(decoder.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())

    def flops(keep) -> int:
        with symbolic(), FlopCounterMode(display=False) as counter:
            loss(keep).backward()
        return counter.get_total_flops()

    with symbolic(), MemoryMeter() as meter:
        loss(operators).backward()
    ratio = flops(operators) / flops(None)
    figures = f"{meter.peak_bytes / 1e6:.1f} MB, {ratio:.3f} ×"
    if meter.peak_bytes > 70e6:
        return wrong(f"It keeps too much: {figures}.", f"保留得太多：{figures}。")
    if ratio > 1.2:
        return wrong(f"It computes too much again: {figures}.", f"重计算太多：{figures}。")
    return right(f"Right: {figures}.", f"正确：{figures}。")


@exercise(hint=("Measure a few chunks.", "换几种每份的 token 数，测一测。"))
def check_head_chunk(answer: Any) -> Verdict:
    """The largest power of two for the loss head's chunk, for a peak of at most 150 MB."""

    def peak(chunk: int) -> int:
        with symbolic():
            hidden = torch.randn(1024, 256, requires_grad=True)
            vocabulary = torch.nn.Parameter(torch.randn(32000, 256))
            targets = torch.randint(32000, (1024,))
            with MemoryMeter() as meter:
                checkpointed_loss(hidden, vocabulary, targets, chunk=chunk).backward()
        return meter.peak_bytes

    wanted = ("A power of two from 1 to 1024 is wanted.", "需要 1 到 1024 之间的一个 2 的幂。")
    _, here, _ = largest_that_fits(answer, [2**i for i in range(11)], peak, 150_000_000, wanted)
    return right(f"Right: {here:,} bytes.", f"正确：{here:,} 字节。")


# A GPU experiment -----------------------------------------------------------------------------------------------------


@experiment(
    title=(
        "A decoder's forward and backward pass, plain and with a checkpoint a layer",
        "解码器的前向与反向：普通，以及每层一个检查点",
    ),
    sizes={"vocabulary": 32000, "hidden": 1024, "heads": 16, "layers": 12, "sequence": 1024, "batch": 4},
    small=TINY,
    arms={"plain": ("plain", "普通"), "checkpointed": ("checkpointed", "检查点")},
)
def checkpointed_decoder(device: torch.device, **sizes: int) -> dict[str, Number]:
    model, tokens = decoder_and_tokens(device, **sizes)

    def step() -> None:
        model.loss(tokens).backward()

    plain = measured("plain", step, model=model)
    for layer in model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    return plain | measured("checkpointed", step, model=model)
