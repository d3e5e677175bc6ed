"""Checks for the exercises: right or wrong, why, and a hint. They never raise, whatever the answer is."""

import gc
import math
import numbers
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from .languages import label, label_html

Pair = tuple[str, str]
_COLORS = {True: "#228833", False: "#EE7733"}


@dataclass(frozen=True)
class Verdict:
    """What a check says about an answer; it shows itself, and is true if the answer is right."""

    correct: bool
    message: Pair  # (English, Chinese)
    hint: Pair | None = None

    def __bool__(self) -> bool:
        return self.correct

    def __repr__(self) -> str:
        parts = [self._marked()] if self.hint is None else [self._marked(), self._labelled_hint()]
        return "\n".join(label(part, separator="\n") for part in parts)

    def _repr_html_(self) -> str:
        parts = [f"<div>{label_html(self._marked())}</div>"]
        if self.hint is not None:
            parts.append(f'<div style="opacity: 0.8; margin-top: 0.4em">{label_html(self._labelled_hint())}</div>')
        look = f"border-left: 4px solid {_COLORS[self.correct]}; padding: 0.3em 0.8em; max-width: 50em"
        return f'<div class="course-verdict" style="{look}">{"".join(parts)}</div>'

    def _marked(self) -> Pair:
        mark = "✓" if self.correct else "✗"
        return f"{mark} {self.message[0]}", f"{mark} {self.message[1]}"

    def _labelled_hint(self) -> Pair:
        assert self.hint is not None
        return f"Hint: {self.hint[0]}", f"提示：{self.hint[1]}"


def expect_number(
    answer: Any,
    right: float,
    *,
    tolerance: float = 0.0,
    wrong_answers: Mapping[float, Pair] | None = None,
    why: Pair | None = None,
    hint: Pair | None = None,
) -> Verdict:
    """Check a number. Never raises for any answer.

    Args:
        answer: a number of any kind, a tensor with one element included; `None` and `...` mean not answered yet.
        right: the right answer.
        tolerance: relative, for the right answer and the wrong ones.
        wrong_answers: wrong number -> what went wrong, (English, Chinese).
        why: why the right answer is right; shown only with it.
        hint: shown with a wrong answer.
    """
    if answer is None or answer is ...:
        return Verdict(False, ("Not answered yet.", "还没有作答。"), hint)
    number = _number(answer)
    if number is None:
        kind = type(answer).__name__
        message = (f"One number is wanted; this is a `{kind}`.", f"需要一个数，这里得到的是 `{kind}`。")
        return Verdict(False, message, hint)
    if _close(number, right, tolerance):
        return Verdict(True, ("Right.", "正确。") if why is None else (f"Right. {why[0]}", f"正确。{why[1]}"))
    for wrong, reason in (wrong_answers or {}).items():
        if _close(number, wrong, tolerance):
            return Verdict(False, (f"Not yet. {reason[0]}", f"还不对。{reason[1]}"), hint)
    if number < right:
        return Verdict(False, ("Not yet: too small.", "还不对：太小了。"), hint)
    return Verdict(False, ("Not yet: too large.", "还不对：太大了。"), hint)


def _number(answer: Any) -> Fraction | float | None:
    """The answer as a number that can be compared without overflow, or None. Infinity stays a float."""
    try:
        if hasattr(answer, "item"):  # a tensor or an array with one element, or one of numpy's numbers
            answer = answer.item()
        if isinstance(answer, bool) or not isinstance(answer, (numbers.Real, Decimal)):
            return None
        if isinstance(answer, numbers.Rational):
            return Fraction(answer.numerator, answer.denominator)
        answer = float(answer)
        if math.isnan(answer):
            return None
        return answer if math.isinf(answer) else Fraction(answer)
    except Exception:  # whatever the answer's own methods do, the reader gets a verdict
        return None


def _close(number: Fraction | float, wanted: float, tolerance: float) -> bool:
    if isinstance(number, float):  # infinite
        return False
    return abs(number - Fraction(wanted)) <= Fraction(tolerance) * abs(Fraction(wanted))


# Lesson 01 ------------------------------------------------------------------------------------------------------------


def check_optimizer_bytes(answer: Any) -> Verdict:
    """Bytes that mixed-precision Adam keeps as optimizer state, master weights included, for 7e9 parameters."""
    billion = 10**9
    return expect_number(
        answer,
        84 * billion,
        wrong_answers={
            84: ("That is in GB. Give bytes.", "这是以 GB 为单位的数，请给出字节数。"),
            84 * 2**30: ("That is 84 GiB; GB means 10⁹ bytes here.", "这是 84 GiB；这里的 GB 指 10⁹ 字节。"),
            12: ("That is per parameter. There are 7 billion.", "这是每个参数的字节数，模型有 70 亿个参数。"),
            56 * billion: (
                "Those are the two moments. The fp32 master weights are kept by the optimizer as well.",
                "这只是一阶、二阶两个矩。优化器还保存一份 fp32 主权重。",
            ),
            112 * billion: (
                "That is all 16 bytes a parameter; the bf16 weight (2) and its gradient (2) are not the optimizer's.",
                "这是每个参数的全部 16 字节：其中 bf16 权重的 2 字节和梯度的 2 字节不属于优化器。",
            ),
            28 * billion: (
                "That is one fp32 number a parameter. The optimizer keeps three.",
                "这相当于每个参数只存一个 fp32 数，而优化器存了三个。",
            ),
        },
        why=(
            "Master weight, first and second moment: 3 × 4 = 12 bytes for each of 7 billion parameters, 84 GB.",
            "主权重、一阶矩、二阶矩：每个参数 3 × 4 = 12 字节，70 亿个参数共 84 GB。",
        ),
        hint=(
            "How many fp32 numbers does the optimizer keep for each parameter, and what is each of them for?",
            "优化器为每个参数保存几个 fp32 数？各有什么用？",
        ),
    )


def check_largest_batch(answer: Any) -> Verdict:
    """Lesson 01: the largest batch of the lesson's decoder (with Adam) whose step stays within 500 MB."""
    from course_lib.memory import MemoryMeter, symbolic
    from course_lib.models import Decoder, random_tokens

    budget = 500_000_000

    def peak(batch: int) -> int:
        import torch

        with symbolic():
            model = Decoder(vocabulary=4096, hidden=256, heads=8, layers=4, sequence=128)
            adam = torch.optim.Adam(model.parameters())
            tokens = random_tokens(batch, 128, 4096)
            for _ in range(2):  # the second step has Adam's state from the start
                model.zero_grad()
                with MemoryMeter(model, adam) as meter:
                    model.loss(tokens).backward()
                    adam.step()
        return meter.peak_bytes

    number = _number(answer)
    if number is None:
        hint = (
            "One measurement gives the part that does not grow, a second one the bytes a sequence adds.",
            "测一次得到不随批次变化的部分，再测一次得到每增加一个序列所增加的字节。",
        )
        return expect_number(answer, 0, hint=hint)
    if isinstance(number, float) or number != int(number) or not 1 <= number <= 10_000:
        return Verdict(False, ("A whole number from 1 to 10,000 is wanted.", "需要一个 1 到 10,000 之间的整数。"))
    batch = int(number)
    here, above = peak(batch), peak(batch + 1)
    if here > budget:
        message = (
            f"Too many: a batch of {batch} peaks at {here:,} bytes.",
            f"太多：批次为 {batch} 时峰值是 {here:,} 字节。",
        )
        return Verdict(
            False, message, ("Where is the peak: in which phase, in which operator?", "峰值在哪个阶段、哪个算子？")
        )
    if above <= budget:
        message = (
            f"It fits, at {here:,} bytes, but so does {batch + 1}, at {above:,}.",
            f"装得下，峰值 {here:,} 字节；但批次为 {batch + 1} 也装得下，峰值 {above:,} 字节。",
        )
        return Verdict(False, message, ("How many bytes does one more sequence add?", "每多一个序列增加多少字节？"))
    return Verdict(
        True,
        (
            f"Right. {batch} sequences peak at {here:,} bytes, {batch + 1} would take {above:,}.",
            f"正确。批次为 {batch} 时峰值是 {here:,} 字节，为 {batch + 1} 时则需要 {above:,} 字节。",
        ),
    )


def check_swiglu_bytes(answer: Any) -> Verdict:
    """Lesson 01: bytes that a SwiGLU MLP (512 tokens, 256 features, 1024 inside, fp32) saves for backward."""
    tokens, hidden, inner = 512, 256, 1024
    one, wide = 4 * tokens * hidden, 4 * tokens * inner
    return expect_number(
        answer,
        one + 4 * wide,
        wrong_answers={
            2 * one + 4 * wide: (
                "You counted the input twice. Both projections read it, but it is one storage.",
                "输入算了两次。两个投影都读它，但它只是一份存储。",
            ),
            one + 3 * wide: (
                "One tensor of the wide ones is missing: the product keeps both of its factors, SiLU keeps its input, "
                "and the last projection keeps its own input.",
                "少了一个宽张量：乘法保存两个因子，SiLU 保存自己的输入，最后的投影也保存自己的输入。",
            ),
            4 * wide: ("The input of the two projections is saved as well.", "两个投影的输入也会被保存。"),
            one + 5 * wide: (
                "One wide tensor too many: SiLU keeps its input, the product both factors, the last layer its input.",
                "宽张量多算了一个：SiLU 保存它的输入，乘法保存两个因子，最后的投影保存它的输入。",
            ),
            (one + 4 * wide) / 10**6: ("That is in MB. Give bytes.", "这是以 MB 为单位的数，请给出字节数。"),
            (one + 4 * wide) // 4: (
                "That is the number of elements. fp32 takes 4 bytes each.",
                "这是元素个数，fp32 每个占 4 字节。",
            ),
            3 * one + 4 * wide: ("The output is not saved by the MLP itself.", "MLP 自身不保存输出。"),
        },
        why=(
            "The input once, and four wide tensors: SiLU's input, both factors of the product, the product.",
            "输入一份，宽张量四个：SiLU 的输入、乘法的两个因子、乘积本身。",
        ),
        hint=(
            "Go through the operators one by one: what does each need for its gradient?",
            "逐个算子地想：它求梯度时需要什么？",
        ),
    )


# Lesson 02 ------------------------------------------------------------------------------------------------------------


def check_checkpoint(function: Any) -> Verdict:
    """Lesson 02: a checkpoint `function(block, x)` of one's own: equal gradients, two runs, only the input kept."""
    import torch

    from course_lib.memory import saved_tensors

    weight = torch.linspace(-1, 1, 64).view(8, 8).requires_grad_()
    x = torch.linspace(0, 1, 32).view(4, 8).requires_grad_()
    runs = []

    def block(x):
        runs.append(1)
        y = x @ weight
        for _ in range(8):
            y = y.sin().tanh().exp().sub(1)
        return y

    hint = (
        "Forward without a graph, or with hooks that keep nothing; in backward run the block again with a graph.",
        "前向时不记录计算图，或者挂上什么也不留的钩子；反向时带着计算图再跑一遍。",
    )
    try:
        expected = torch.autograd.grad(block(x).sum(), (x, weight))
        runs.clear()
        output = function(block, x)
        before = len(runs)
        output.sum().backward()
        found, after = (x.grad, weight.grad), len(runs)
        if any(one is None for one in found):
            return Verdict(False, ("A gradient is missing.", "缺少梯度。"), hint)
        if not all(torch.allclose(one, other) for one, other in zip(found, expected, strict=True)):
            return Verdict(False, ("The gradients differ from autograd's.", "梯度与 autograd 算出的不同。"), hint)
        if (before, after) != (1, 2):
            message = (
                f"Runs of the block before backward: {before}, in all: {after}. It takes 1 and 2.",
                f"块在反向之前运行了 {before} 次，总共 {after} 次；应当是 1 次和 2 次。",
            )
            return Verdict(False, message, hint)
        kept = saved_tensors(lambda x: function(block, x), x).total_bytes
        if kept > 4 * x.nbytes:  # the input itself may be kept in the context, unseen
            return Verdict(False, (f"The graph still keeps {kept} bytes.", f"计算图仍保存着 {kept} 字节。"), hint)
    except Exception as error:
        return Verdict(False, (f"It raised {error!r}.", f"它抛出了 {error!r}。"), hint)
    return Verdict(
        True,
        ("Right: equal gradients, two runs, nothing kept but the input.", "正确：梯度相等，运行两次，只留下输入。"),
    )


def check_dropout_checkpoint(function: Any) -> Verdict:
    """Lesson 02: a checkpoint `function(block, x)` that draws the same mask again and disturbs nothing after it."""
    import torch
    from torch.nn import functional

    hint = (
        "See `torch.get_rng_state` and `torch.random.fork_rng`.",
        "参见 `torch.get_rng_state` 和 `torch.random.fork_rng`。",
    )
    runs, before = [], []

    def block(x):
        runs.append(1)
        return functional.dropout(x * 1.0, 0.5)

    def after(run) -> tuple:
        x = torch.ones(1000, requires_grad=True)
        output = run(block, x)
        before.append(len(runs))
        output.sum().backward()
        return torch.equal(output == 0, x.grad == 0), torch.rand(3)

    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            _, expected = after(lambda block, x: block(x))
            torch.manual_seed(0)
            runs.clear()
            same, found = after(function)
    except Exception as error:
        return Verdict(False, (f"It raised {error!r}.", f"它抛出了 {error!r}。"), hint)
    if (before[-1], len(runs)) != (1, 2):
        message = (
            f"Runs of the block before backward: {before[-1]}, in all: {len(runs)}. It takes 1 and 2.",
            f"块在反向之前运行了 {before[-1]} 次，总共 {len(runs)} 次；应当是 1 次和 2 次。",
        )
        return Verdict(False, message, hint)
    if not same:
        return Verdict(False, ("The second run drew another mask.", "第二次运行抽到了另一个掩码。"), hint)
    if not torch.equal(found, expected):
        return Verdict(False, ("The random numbers afterwards have changed.", "之后的随机数变了。"), hint)
    return Verdict(
        True, ("Right: the same mask, and undisturbed random numbers.", "正确：掩码相同，之后的随机数不受影响。")
    )


def check_policy(operators: Any) -> Verdict:
    """Lesson 02: operators for a selective policy to keep: a peak of 70 MB and 1.2 times the FLOPs at most."""
    from torch.nn import functional
    from torch.utils.flop_counter import FlopCounterMode

    from course_lib.checkpoint import checkpoint, create_selective_checkpoint_contexts
    from course_lib.memory import MemoryMeter, symbolic
    from course_lib.models import Decoder, random_tokens

    hint = (
        "Which operators do most of the FLOPs, and which of their results are large?",
        "哪些算子占了大部分 FLOPs？其中哪些算子的结果很大？",
    )
    if operators is None or operators is ...:
        return Verdict(False, ("Not answered yet.", "还没有作答。"), hint)
    if not isinstance(operators, list | tuple | set):
        return Verdict(False, ("Give a list of operators.", "请给出算子的列表。"), hint)

    def loss(keep):
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

    try:
        with symbolic(), MemoryMeter() as meter:
            loss(operators).backward()
        ratio = flops(operators) / flops(None)
    except Exception as error:
        return Verdict(False, (f"The policy cannot be used: {error!r}.", f"这个策略用不了：{error!r}。"), hint)
    figures = f"{meter.peak_bytes / 1e6:.1f} MB, {ratio:.3f} ×"
    if meter.peak_bytes > 70e6:
        return Verdict(False, (f"It keeps too much: {figures}.", f"保留得太多：{figures}。"), hint)
    if ratio > 1.2:
        return Verdict(False, (f"It computes too much again: {figures}.", f"重计算太多：{figures}。"), hint)
    return Verdict(True, (f"Right: {figures}.", f"正确：{figures}。"))


def check_head_chunk(answer: Any) -> Verdict:
    """Lesson 02: the largest power of two for the loss head's chunk, for a peak of at most 150 MB."""
    import torch

    from course_lib.checkpoint import checkpointed_loss
    from course_lib.memory import MemoryMeter, symbolic

    budget = 150_000_000
    number = _number(answer)
    if number is None:
        return expect_number(answer, 0, hint=("Measure a few chunks.", "换几种每份的 token 数，测一测。"))
    if isinstance(number, float) or number != int(number) or int(number) not in [2**i for i in range(11)]:
        return Verdict(False, ("A power of two from 1 to 1024 is wanted.", "需要 1 到 1024 之间的一个 2 的幂。"))

    def peak(chunk: int) -> int:
        with symbolic():
            hidden = torch.randn(1024, 256, requires_grad=True)
            vocabulary = torch.nn.Parameter(torch.randn(32000, 256))
            targets = torch.randint(32000, (1024,))
            with MemoryMeter() as meter:
                checkpointed_loss(hidden, vocabulary, targets, chunk=chunk).backward()
        return meter.peak_bytes

    chunk = int(number)
    here = peak(chunk)
    if here > budget:
        return Verdict(False, (f"Too large: {here:,} bytes.", f"太大：峰值 {here:,} 字节。"))
    if chunk < 1024 and peak(2 * chunk) <= budget:
        return Verdict(
            False,
            (
                f"It fits, at {here:,} bytes, but so does twice as much.",
                f"装得下，峰值 {here:,} 字节；但加倍也装得下。",
            ),
        )
    return Verdict(True, (f"Right: {here:,} bytes.", f"正确：{here:,} 字节。"))


# Lesson 03 ------------------------------------------------------------------------------------------------------------


def check_segment_count(answer: Any) -> Verdict:
    """Lesson 03: the best number of equal segments for 64 layers that save nine times a boundary each."""
    return expect_number(
        answer,
        24,
        wrong_answers={
            8: (
                "That is √L, right only where a layer saves as much as one boundary.",
                "这是 √L，只有每层保存的恰好等于一个边界时才对。",
            ),
            64 * 9: ("Take the square root.", "还要开平方。"),
            Fraction(8, 3): ("s and b are the wrong way round.", "s 与 b 放反了。"),
        },
        why=(
            "24 boundaries, and 64/24 layers of nine each: 24 b + 24 b.",
            "24 个边界，加上一段的 64/24 层、每层九份：24 b + 24 b。",
        ),
        hint=("The peak is k·b + (L/k)·s. Where are both parts equal?", "峰值是 k·b + (L/k)·s。两项何时相等？"),
    )


def check_drawn_schedule(actions: Any) -> Verdict:
    """Lesson 03: a schedule for `Chain.uniform(6, saved_bytes=2)` with a peak of at most 7 and at most 11 forwards."""
    from course_lib.schedule import Chain, IllegalSchedule, Schedule, simulate

    hint = (
        "Four segments whose sizes get shorter: keep what enters each, then work from the last to the first.",
        "分四段，越来越短：留下每一段的输入，再从最后一段做到第一段。",
    )
    if actions is None or actions is ... or (isinstance(actions, list | tuple) and (... in actions or not actions)):
        return Verdict(False, ("Not answered yet.", "还没有作答。"), hint)
    try:
        cost = simulate(Schedule(actions), Chain.uniform(6, saved_bytes=2))
    except IllegalSchedule as refused:
        return Verdict(False, (f"The referee says: {refused}.", f"裁判说：{refused}。"), hint)
    except Exception as error:
        return Verdict(False, (f"It cannot be simulated: {error!r}.", f"无法模拟：{error!r}。"), hint)
    found = (
        f"a peak of {cost.peak_bytes} and {cost.forward_steps} forwards",
        f"峰值 {cost.peak_bytes}，前向 {cost.forward_steps} 次",
    )
    right = cost.peak_bytes <= 7 and cost.forward_steps <= 11
    verdict = ("Right", "正确") if right else ("Legal, but too much", "合法，但超出了限制")
    return Verdict(right, (f"{verdict[0]}: {found[0]}.", f"{verdict[1]}：{found[1]}。"), None if right else hint)


def pyramid() -> Any:
    """A `Chain` of twelve stages as in a convolution pyramid: maps shrink while channels grow; the head is small."""
    from course_lib.schedule import Chain, Stage

    sizes = [32, 32, 32, 16, 16, 16, 8, 8, 8, 4, 4, 1]  # MB of each stage's output
    return Chain(tuple(Stage(4, 8, size * 10**6, 2 * size * 10**6) for size in sizes), 3 * 10**6)


def check_beats_sqrt(schedule: Any) -> Verdict:
    """Lesson 03: a schedule for `pyramid()` with a lower peak than `sqrt_segments`, in no more time."""
    from course_lib.schedule import IllegalSchedule, Schedule, simulate, sqrt_segments

    hint = (
        "`optimal` takes a budget. Which one is a little below 163 MB?",
        "`optimal` 接受一个预算。取多少才略低于 163 MB？",
    )
    if schedule is None or schedule is ...:
        return Verdict(False, ("Not answered yet.", "还没有作答。"), hint)
    chain = pyramid()
    rule = simulate(sqrt_segments(chain), chain)
    try:
        cost = simulate(Schedule(schedule), chain)
    except IllegalSchedule as refused:
        return Verdict(False, (f"The referee says: {refused}.", f"裁判说：{refused}。"), hint)
    except Exception as error:
        return Verdict(False, (f"It cannot be simulated: {error!r}.", f"无法模拟：{error!r}。"), hint)
    peaks = f"{cost.peak_bytes / 1e6:g} MB, {cost.time:g} : {rule.peak_bytes / 1e6:g} MB, {rule.time:g}"
    if cost.peak_bytes >= rule.peak_bytes:
        return Verdict(False, (f"The peak is not lower: {peaks}.", f"峰值并没有降低：{peaks}。"), hint)
    if cost.time > rule.time:
        return Verdict(False, (f"It takes longer: {peaks}.", f"时间更长：{peaks}。"), hint)
    return Verdict(True, (f"Right: {peaks}.", f"正确：{peaks}。"))


# Lesson 04 ------------------------------------------------------------------------------------------------------------


def check_hiding_intensity(answer: Any) -> Verdict:
    """Lesson 04: the least FLOPs a byte at which copies over PCIe 5 (63 GB/s) hide behind 400 TFLOP/s."""
    right = 400e12 / 63e9
    return expect_number(
        answer,
        right,
        tolerance=0.01,
        wrong_answers={
            1 / right: ("That is bytes a FLOP.", "这是每 FLOP 的字节数。"),
            right / 1000: (
                "Mind the units: TFLOP/s and GB/s differ by a thousand.",
                "注意单位：TFLOP/s 与 GB/s 差一千倍。",
            ),
            right / 2: ("63 GB/s is one way already.", "63 GB/s 已经是单向带宽。"),
            2 * right: ("63 GB/s is one way already.", "63 GB/s 已经是单向带宽。"),
            989e12 / 63e9: ("That is for 989 TFLOP/s.", "这是 989 TFLOP/s 时的值。"),
        },
        why=("400e12 / 63e9: the rate over the bandwidth.", "400e12 / 63e9：算力除以带宽。"),
        hint=("The copy takes m / w, the compute f / r.", "拷贝需要 m / w，计算需要 f / r。"),
    )


def check_what_goes_down(answer: Any) -> Verdict:
    """Lesson 04: which of the storages of 40, 10, 30, 20, 10 MB go down, for 45 MB above and the fewest bytes moved."""
    sizes, most, least = (40, 10, 30, 20, 10), 45, 70
    hint = ("At least 65 MB must go. Which sum comes nearest?", "至少要搬走 65 MB。哪几份加起来最接近？")
    if answer is None or answer is ...:
        return Verdict(False, ("Not answered yet.", "还没有作答。"), hint)
    try:
        down = set(answer)
        valid = all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < len(sizes) for i in down)
    except TypeError:
        valid = False
    if not valid:
        return Verdict(False, ("Give a set of numbers from 0 to 4.", "请给出由 0 到 4 的编号组成的集合。"), hint)
    if 4 in down:
        return Verdict(
            False, ("The last one must stay: backward needs it first.", "最后一份必须留下：反向最先用到它。"), hint
        )
    moved = sum(sizes[i] for i in down)
    above = sum(sizes) - moved
    if above > most:
        return Verdict(False, (f"{above} MB are still above.", f"上面还有 {above} MB。"), hint)
    if moved > least:
        return Verdict(
            False, (f"It fits, but {moved} MB move; fewer are enough.", f"装得下，但搬了 {moved} MB，可以更少。"), hint
        )
    return Verdict(True, (f"Right: {moved} MB move, {above} MB stay.", f"正确：搬走 {moved} MB，留下 {above} MB。"))


def check_offloading(function: Any) -> Verdict:
    """Lesson 04: `offloading(store)`, hooks that move what is saved into a list and let it go, with right gradients."""
    import torch

    hint = (
        "Pack appends a copy and returns its place; unpack looks there.",
        "pack 追加一份拷贝，返回它的位置；unpack 到那里去取。",
    )
    x = torch.linspace(-1, 1, 4096).view(64, 64).requires_grad_()
    saved = []  # weak references to the storages: what nobody holds any longer is gone

    def run(context) -> Any:
        with context:
            y = x * 2
            left, right = y.sin(), y.t().exp()
            saved[:] = [weakref.ref(tensor.untyped_storage()) for tensor in (y, left, right)]
            return (left * right).sum()

    try:
        (expected,) = torch.autograd.grad(run(torch.enable_grad()), x)
        store: list = []
        out = run(function(store))
        before = len(store)
        owned = [t.untyped_storage().data_ptr() for t in store if isinstance(t, torch.Tensor)]
        copied = len(owned) == before and len(set(owned)) == before
        gc.collect()  # the answer's own objects may refer to each other
        held = sum(storage() is not None for storage in saved)
        out.backward()
    except Exception as error:
        return Verdict(False, (f"It raised {error!r}.", f"它抛出了 {error!r}。"), hint)
    if not before:
        return Verdict(
            False,
            ("Nothing is in the store; the graph keeps everything.", "store 里什么也没有，全留在计算图里。"),
            hint,
        )
    if before < 4:
        return Verdict(
            False, (f"Only {before} tensors of 4 went into the store.", f"4 个张量中只有 {before} 个进了 store。"), hint
        )
    if not copied:
        message = (
            "The store holds the very tensors, not copies: nothing could be freed.",
            "store 里是原来的张量，不是拷贝：什么也释放不了。",
        )
        return Verdict(False, message, hint)
    if x.grad is None or not torch.equal(x.grad, expected):
        return Verdict(False, ("The gradient is wrong.", "梯度不对。"), hint)
    if held:
        message = (
            f"There are copies in the store, but {held} of 3 storages are still held after forward: nothing is freed.",
            f"store 里有拷贝，但前向之后 3 份存储中仍有 {held} 份被持有：什么也没有释放。",
        )
        numbers_only = (
            "What `pack` returns stays in the graph: return the place in the store, and keep the tensor nowhere else.",
            "`pack` 返回什么，计算图就留下什么：只返回它在 store 里的位置，别处也不要留着这个张量。",
        )
        return Verdict(False, message, numbers_only)
    return Verdict(
        True, (f"Right: {before} tensors below, and the same gradient.", f"正确：{before} 个张量在下一级，梯度相同。")
    )


# Lesson 05 ------------------------------------------------------------------------------------------------------------


def check_accumulation(function: Any) -> Verdict:
    """Lesson 05: `accumulate(model, loss_sum, pieces)` leaves the full batch's gradient; one graph at a time."""
    import torch

    hint = ("Add up sums; divide by all weights once, at the end.", "把总和加起来，最后只除一次，除以权重之和。")
    weight = torch.linspace(-1, 1, 6, dtype=torch.float64)
    pieces = [torch.linspace(0, k + 1.0, 6 * k, dtype=torch.float64).view(k, 6) for k in (3, 1, 0, 4)]

    graphs: list[tuple[int, weakref.ref]] = []  # rows, and a storage that lives as long as their graph
    most_rows = [0]

    def loss_sum(model, piece) -> tuple:
        output = model(piece)
        graphs.append((len(piece), weakref.ref(output.untyped_storage())))
        most_rows[0] = max(most_rows[0], sum(rows for rows, storage in graphs if storage() is not None))
        return (output.sin() + 1).sum(), len(piece)

    def made() -> Any:
        model = torch.nn.Linear(6, 1, bias=False, dtype=torch.float64)
        with torch.no_grad():
            model.weight.copy_(weight)
        return model

    model = made()
    (loss_sum(model, torch.cat(pieces))[0] / 8).backward()
    expected, model = model.weight.grad, made()
    graphs.clear()
    most_rows[0] = 0
    try:
        function(model, loss_sum, list(pieces))
        found = model.weight.grad
    except Exception as error:
        return Verdict(False, (f"It raised {error!r}.", f"它抛出了 {error!r}。"), hint)
    if found is None:
        return Verdict(False, ("There is no gradient in `.grad`.", "`.grad` 里没有梯度。"), hint)
    error = float((found - expected).norm() / expected.norm())
    if not error < 1e-9:
        message = (f"The gradient is off by {100 * error:.1f} %.", f"梯度差了 {100 * error:.1f} %。")
        return Verdict(False, message, hint)
    largest = max(map(len, pieces))
    if most_rows[0] > largest:
        message = (
            f"Right gradient, but graphs of {most_rows[0]} rows were alive together, and the largest piece has "
            f"{largest}: this saves no memory.",
            f"梯度正确，但同时存活的计算图共有 {most_rows[0]} 行，而最大的一份只有 {largest} 行：这样不省内存。",
        )
        in_turn = (
            "Forward and backward for one piece, and only then the next.",
            "一份做完前向和反向，再做下一份。",
        )
        return Verdict(False, message, in_turn)
    return Verdict(True, ("Right, a piece without tokens included.", "正确，没有 token 的那一份也算对了。"))


def check_largest_micro_batch(answer: Any) -> Verdict:
    """Lesson 05: the largest micro-batch under 1 GB, if 2 take 500 MB and 5 take 620 MB."""
    return expect_number(
        answer,
        14,
        wrong_answers={
            4: ("That divides 1000 by 250: the floor does not grow.", "这是 1000 除以 250：下限不会增大。"),
            8: ("That divides 1000 by 124: the floor does not grow.", "这是 1000 除以 124：下限不会增大。"),
            14.5: ("Whole samples.", "样本数要取整数。"),
            15: ("15 take 1020 MB.", "15 个要 1020 MB。"),
            25: ("You forgot the floor of 420 MB.", "忘了 420 MB 的下限。"),
        },
        why=("420 MB of floor, 40 MB a sample: 14 take 980 MB.", "下限 420 MB，每个样本 40 MB：14 个要 980 MB。"),
        hint=(
            "Two points make a line: what is its slope, and where does it begin?",
            "两点定一条直线：斜率是多少，从哪里开始？",
        ),
    )


def check_fast_micro_batch(answer: Any) -> Verdict:
    """Lesson 05: the smallest power of two that reaches 80 % of the largest's samples a second, at 5 + m ms each."""
    return expect_number(
        answer,
        16,
        wrong_answers={
            8: ("8 in 13 ms is 66 % of 64 in 69 ms.", "13 毫秒 8 个，速度是 69 毫秒 64 个的 66 %。"),
            32: ("16 are enough.", "16 就够了。"),
            64: ("The largest reaches 100 %; a smaller one is enough.", "最大的是 100 %，更小的就够了。"),
        },
        why=("16 in 21 ms is 82 % of 64 in 69 ms.", "21 毫秒 16 个，速度是 69 毫秒 64 个的 82 %。"),
        hint=("Samples a millisecond: m / (5 + m).", "每毫秒样本数：m / (5 + m)。"),
    )


# Lesson 06 ------------------------------------------------------------------------------------------------------------


#: Operators that only move numbers or make room for them: these may have all scores before them.
_MOVES = ("_to_copy", "_unsafe_view", "cat", "clone", "constant_pad_nd", "copy_", "index", "index_select")
_MAKES = ("new_", "empty", "full", "ones", "zeros")


def check_log_sum_exp(function: Any) -> Verdict:
    """Lesson 06: the log-sum-exp of each row over blocks of columns, for large scores too, in one pass."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    hint = (
        "Keep a running maximum and a running sum; rescale the sum when the maximum rises.",
        "记住当前最大值和当前总和；最大值上升时，把总和重新缩放。",
    )
    rows, block = 4, 4
    scores = torch.linspace(-3, 3, 60).sin().view(rows, 15) * torch.tensor([[1.0], [10.0], [500.0], [1000.0]])
    given = scores.clone()
    too_wide: list[str] = []
    blocks_read: list[int] = []  # by their places in the scores, in the order in which they were computed with

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            name = operator.overloadpacket.__name__
            if not (operator.is_view or name in _MOVES or name.startswith(_MAKES)):
                flat = [item for arg in args for item in (arg if isinstance(arg, list | tuple) else [arg])]
                for tensor in (item for item in flat if isinstance(item, torch.Tensor)):
                    if tensor.numel() > rows * block or max(tensor.shape, default=0) > block:
                        too_wide.append(name)
                    elif tensor.untyped_storage().data_ptr() == given.untyped_storage().data_ptr():
                        if [tensor.storage_offset()] != blocks_read[-1:]:
                            blocks_read.append(tensor.storage_offset())
            return operator(*args, **(kwargs or {}))

    try:
        with Watched():
            found = function(given, block)
    except Exception as error:
        return Verdict(False, (f"It raised {error!r}.", f"它抛出了 {error!r}。"), hint)
    if not isinstance(found, torch.Tensor) or found.numel() != rows:
        return Verdict(False, ("One number a row is wanted.", "每一行应返回一个数。"), hint)
    if not found.isfinite().all():
        return Verdict(False, ("Large scores overflow.", "分数大时溢出了。"), hint)
    if not torch.allclose(found.flatten(), torch.logsumexp(scores, 1), atol=1e-4):
        return Verdict(False, ("The numbers are not the log-sum-exps.", "这些数不是对数求和指数。"), hint)
    if too_wide:
        message = (
            f"Right numbers, but `{too_wide[0]}` took more than a block at once.",
            f"数是对的，但 `{too_wide[0]}` 一次取的不止一块。",
        )
        return Verdict(False, message, hint)
    if len(set(blocks_read)) < len(blocks_read):
        message = (
            "Right numbers, but in a second pass: the code comes back to a block that it had left.",
            "数是对的，但多过了一遍：离开一块之后，又回头去取它。",
        )
        return Verdict(False, message, hint)
    return Verdict(True, ("Right, in blocks, and without overflow.", "正确，分块计算，也不溢出。"))


def check_probabilities(function: Any) -> Verdict:
    """Lesson 06: P of one head from Q, K and the log-sum-exp."""
    import torch

    hint = ("p = exp(s - lse), with s = q·k / √d.", "p = exp(s - lse)，其中 s = q·k / √d。")
    q, k = (torch.linspace(-2, 2, 80).view(5, 16) * factor for factor in (1.0, -1.5))
    scores = q @ k.T / 4
    lse = torch.logsumexp(scores, 1)
    try:
        found = function(q, k, lse)
        halved = function(q, k, lse + math.log(2))  # as if each row had as much again elsewhere
    except Exception as error:
        return Verdict(False, (f"It raised {error!r}.", f"它抛出了 {error!r}。"), hint)
    if not isinstance(found, torch.Tensor) or found.shape != (5, 5):
        return Verdict(False, ("A matrix (n, n) is wanted.", "需要一个 (n, n) 的矩阵。"), hint)
    if not torch.allclose(found, scores.softmax(1), atol=1e-5):
        sums = found.sum(1)
        if torch.allclose(sums, torch.ones_like(sums), atol=1e-4):
            return Verdict(False, ("Rows sum to 1, but the probabilities differ.", "每行和为 1，但概率不对。"), hint)
        return Verdict(False, ("Rows do not sum to 1.", "每行的和不是 1。"), hint)
    if not isinstance(halved, torch.Tensor) or not torch.allclose(2 * halved, found, atol=1e-5):
        message = (
            "Right numbers, but they do not come from `lse`: with `lse` greater by log 2 they should be halved. "
            "Is there a softmax inside, or a sum over the row?",
            "数是对的，但不是由 `lse` 得来的：`lse` 增加 log 2，它们应当减半。"
            "里面是不是用了 softmax，或者又对整行求了和？",
        )
        return Verdict(False, message, hint)
    return Verdict(True, ("Right: softmax without a softmax.", "正确：不用 softmax 的 softmax。"))


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


# Everything public in here, so that a new check needs no second entry elsewhere.


# Lesson 07 ------------------------------------------------------------------------------------------------------------


def check_forty_megabytes(recipe: Any) -> Verdict:
    """Lesson 07: the small decoder within 40 MB, with no more FLOPs than plain, and nothing moved."""
    hint = (
        "The plain step keeps the activations of 8 sequences at once. Need it?",
        "普通的一步同时留着 8 个序列的激活值。有必要吗？",
    )
    return _check_recipe(recipe, 40_000_000, hint, most_flops=1.0, moves=False)


def check_fourteen_megabytes(recipe: Any) -> Verdict:
    """Lesson 07: the small decoder within 14 MB, nothing moved."""
    hint = (
        "One sequence at a time is not enough: attention and layers must forget too.",
        "一次一个序列还不够：注意力和各层也得忘掉一些。",
    )
    return _check_recipe(recipe, 14_000_000, hint, moves=False)


def check_eleven_megabytes(recipe: Any) -> Verdict:
    """Lesson 07: the small decoder within 11 MB."""
    hint = (
        "Start from your recipe for 14 MB and try `offload_optimizer` from 0 to 1. At some point, more saves nothing.",
        "从 14 MB 的配方出发，把 `offload_optimizer` 从 0 试到 1。到了某一点，再多也不省。",
    )
    return _check_recipe(recipe, 11_000_000, hint)


def check_beats_the_lesson(recipe: Any) -> Verdict:
    """Lesson 07: the large decoder within 550 MB, at a lower price than the lesson's recipe."""
    from course_lib.budget import RATES, Recipe, estimate
    from course_lib.models import Decoder, random_tokens

    def make_model():
        return Decoder(vocabulary=8192, hidden=640, heads=40, layers=19, sequence=384)

    hint = (
        "The last layer is recomputed right after its forward pass. Which `checkpoint` leaves the last piece alone?",
        "最后一层刚做完前向就要再算一遍。哪一种 `checkpoint` 让最后一段不必再算？",
    )
    verdict, found = _estimated(recipe, make_model, lambda: random_tokens(2, 384, 8192), 550_000_000, hint)
    if found is None:
        return verdict
    lesson = Recipe(attention="flash", checkpoint="layers", in_backward=True, offload_optimizer=1.0)
    price = RATES["laptop"].seconds(estimate(make_model, lambda: random_tokens(2, 384, 8192), lesson))
    yours = RATES["laptop"].seconds(found)
    prices = f"{yours:.3f} s : {price:.3f} s"
    if yours >= price:
        return Verdict(False, (f"It fits, but is not cheaper: {prices}.", f"装得下，但并不更便宜：{prices}。"), hint)
    peak = f"{found.peak_bytes / 1e6:,.1f} MB, {prices}"
    return Verdict(True, (f"Right: {peak}.", f"正确：{peak}。"))


def _check_recipe(
    recipe: Any, budget: int, hint: Pair, *, most_flops: float | None = None, moves: bool = True
) -> Verdict:
    """Whether the small decoder of lesson 07 fits the budget by this recipe, in fp32 with Adam."""
    from course_lib.budget import Recipe, estimate
    from course_lib.models import Decoder, random_tokens

    def make_model():
        return Decoder(vocabulary=1024, hidden=128, heads=8, layers=2, sequence=256)

    def make_batch():
        return random_tokens(8, 256, 1024)

    verdict, found = _estimated(recipe, make_model, make_batch, budget, hint)
    if found is None:
        return verdict
    if not moves and found.moved_bytes:
        moved = f"{found.moved_bytes / 1e6:,.1f} MB"
        return Verdict(False, (f"It fits, but moves {moved}.", f"装得下，但搬运了 {moved}。"), hint)
    if most_flops is not None:
        ratio = found.flops / estimate(make_model, make_batch, Recipe()).flops
        if ratio > most_flops:
            message = (
                f"It fits, but takes {ratio:.3f} times the FLOPs of the plain step.",
                f"装得下，但 FLOPs 是普通一步的 {ratio:.3f} 倍。",
            )
            return Verdict(False, message, hint)
    peak = f"{found.peak_bytes / 1e6:,.1f} MB"
    return Verdict(True, (f"Right: {peak}.", f"正确：{peak}。"))


def _estimated(recipe: Any, make_model: Any, make_batch: Any, budget: int, hint: Pair) -> tuple[Verdict, Any]:
    """The estimate of a recipe that fits, or None and a verdict that says why there is none."""
    from course_lib.budget import Recipe, estimate

    if recipe is None or recipe is ...:
        return Verdict(False, ("Not answered yet.", "还没有作答。"), hint), None
    if not isinstance(recipe, Recipe):
        kind = type(recipe).__name__
        return Verdict(
            False, (f"A `Recipe` is wanted; this is a `{kind}`.", f"需要一个 `Recipe`，这里是 `{kind}`。"), hint
        ), None
    plain = Recipe()
    if (recipe.precision, recipe.optimizer) != (plain.precision, plain.optimizer):
        message = "Precision and optimizer stay: fp32 and Adam.", "精度和优化器不许变：fp32 和 Adam。"
        return Verdict(False, message, hint), None
    try:
        found = estimate(make_model, make_batch, recipe)
    except Exception as error:
        return Verdict(False, (f"It cannot be estimated: {error}.", f"无法估计：{error}。"), hint), None
    if found.peak_bytes > budget:
        peaks = f"{found.peak_bytes / 1e6:,.1f} MB > {budget / 1e6:,.0f} MB"
        return Verdict(False, (f"It does not fit: {peaks}.", f"装不下：{peaks}。"), hint), None
    return Verdict(True, ("", "")), found


__all__ = ["Verdict", "expect_number", *sorted(name for name in globals() if name.startswith("check_"))]
