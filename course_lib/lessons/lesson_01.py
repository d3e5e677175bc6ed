"""Lesson 01: its exercises, its claims, its slider, and the meter beside the CUDA allocator, which takes about 7 GB."""

from typing import TYPE_CHECKING, Any

import torch

from course_lib.memory import MemoryMeter, measure, saved_tensors, symbolic, transformer_activation_bytes
from course_lib.models import Attention, Decoder, DecoderLayer, random_tokens, seeded
from course_lib.teaching import COLORS, Claim, Verdict, expect_number, figure, playground, text
from course_lib.teaching.allocator import Allocator, BetweenOperators
from course_lib.teaching.exercises import exercise, largest_that_fits, right
from course_lib.teaching.experiments import TINY, Number, decoder_and_tokens, experiment
from course_lib.teaching.figures import shown_once

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: What learners may have read.
CLAIMS = (
    Claim(
        ("Memory after the forward pass is the peak.", "前向结束时的内存就是峰值。"),
        ("the lesson's decoder, section 1.3", "本课的解码器，1.3 节"),
        (
            "No. It is in backward here, and in the optimizer for the MLP.",
            "不对。这里在反向之中，MLP 则在优化器更新时。",
        ),
        outcome="fails",
    ),
    Claim(
        ("Run plain first, then the other, and compare the growth.", "先跑普通的，再跑另一个，比较增量。"),
        ("the same MLP twice", "同一个 MLP 跑两次"),
        ("No. The first run pays for Adam's state.", "不对。建立 Adam 状态的开销，算在了第一次头上。"),
        outcome="fails",
    ),
    Claim(
        ("Standard attention keeps Q, K, V, S and P.", "标准注意力保存 Q、K、V、S 和 P。"),
        ("12 heads, 512 tokens, d = 64, fp32", "12 个头、512 个 token、d = 64、fp32"),
        ("No: S is not kept. Softmax's gradient needs P only.", "不对：S 不保存。softmax 求梯度只用 P。"),
        outcome="fails",
    ),
    Claim(
        ("Each of L layers keeps one activation.", "L 层各保存一个激活值。"),
        ("20 × (Linear + GELU)", "20 ×（Linear + GELU）"),
        ("No. Linear keeps its input, GELU keeps its own.", "不对。Linear 存它的输入，GELU 也存自己的输入。"),
        outcome="fails",
    ),
)

# Exercises ------------------------------------------------------------------------------------------------------------


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


@exercise(
    hint=(
        "One measurement gives the part that does not grow, a second one the bytes a sequence adds.",
        "测一次得到不随批次变化的部分，再测一次得到每增加一个序列所增加的字节。",
    )
)
def check_largest_batch(answer: Any) -> Verdict:
    """The largest batch of the lesson's decoder (with Adam) whose step stays within 500 MB."""
    wanted = ("A whole number from 1 to 10,000 is wanted.", "需要一个 1 到 10,000 之间的整数。")
    batch, here, above = largest_that_fits(answer, range(1, 10_001), _peak_with_adam, 500_000_000, wanted)
    return right(
        f"Right. {batch} sequences peak at {here:,} bytes, {batch + 1} would take {above:,}.",
        f"正确。批次为 {batch} 时峰值是 {here:,} 字节，为 {batch + 1} 时则需要 {above:,} 字节。",
    )


def _peak_with_adam(batch: int) -> int:
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


# The slider -----------------------------------------------------------------------------------------------------------


def draw_activation_bytes(sequence: int = 2048, layers: int = 32, heads: int = 32, hidden: int = 4096) -> "Figure":
    """Predicted activation bytes of one training sequence over its length: what grows with s, and what with s².

    Args:
        sequence: marked on the curve.
        layers, heads, hidden: of the transformer; bf16, with dropout, nothing recomputed.
    """
    lengths = [256 * i for i in range(1, 33)]
    sizes = {"batch": 1, "hidden": hidden, "heads": heads, "layers": layers}

    def gigabytes(length: int, recompute: str) -> float:
        return transformer_activation_bytes(sequence=length, recompute=recompute, **sizes) / 1e9

    total = gigabytes(sequence, "none")
    share = f"{100 * (1 - gigabytes(sequence, 'selective') / total):.0f} %"
    title = (
        f"{layers} layers, {sequence} tokens: {total:,.1f} GB, of which {share} grow with s²",
        f"{layers} 层、{sequence} 个 token：{total:,.1f} GB，其中 {share} 随 s² 增长",
    )
    drawn, ax = figure(title, height=3.2)
    everything, proportional = ([gigabytes(n, kind) for n in lengths] for kind in ("none", "selective"))
    look = {"alpha": 0.75, "linewidth": 0}
    name, square_name = text("grows with s", "随 s 增长"), text("grows with s²", "随 s² 增长")
    ax.fill_between(lengths, 0, proportional, color=COLORS["activation"], label=name, **look)
    ax.fill_between(lengths, proportional, everything, color=COLORS["temporary"], label=square_name, **look)
    ax.plot(lengths, everything, color=COLORS["predicted"])
    ax.plot(sequence, total, "o", color=COLORS["predicted"])
    ax.set(xlim=(256, 8192), ylim=(0, max(everything) * 1.08), ylabel=text("activations, GB", "激活值，GB"))
    ax.set_xlabel(text("sequence length s, tokens", "序列长度 s（token 数）"))
    ax.legend(loc="upper left", reverse=True)
    return shown_once(drawn)


def activation_playground() -> None:
    """`draw_activation_bytes` behind three sliders."""
    playground(
        draw_activation_bytes,
        lambda widgets: {
            "sequence": widgets.IntSlider(2048, 256, 8192, 256, description="s", continuous_update=False),
            "layers": widgets.IntSlider(32, 1, 96, 1, description=text("layers", "层数"), continuous_update=False),
            "heads": widgets.SelectionSlider(options=[8, 16, 32, 64, 128], value=32, description=text("heads", "头数")),
        },
    )


# GPU experiments ------------------------------------------------------------------------------------------------------

_GPT = {"vocabulary": 32_000, "hidden": 768, "heads": 12, "layers": 12, "sequence": 512, "batch": 4}


@experiment(
    title=(
        "A decoder's training step with Adam: the meter beside the CUDA allocator",
        "解码器的一个训练步（Adam）：计量器与 CUDA 分配器对照",
    ),
    sizes=_GPT,
    small=TINY,
    labels={
        "parameter_count": ("parameters", "参数个数"),
        "meter_peak_bytes": ("meter: peak of live tensors", "计量器：存活张量的峰值"),
        "meter_blocks_peak_bytes": ("meter: the same in blocks of 512 bytes", "计量器：按 512 字节的块取整"),
        "allocator_peak_bytes": ("allocator: peak, workspace included", "分配器：峰值，含工作区"),
        "workspace_bytes": ("what workspace adds to the peak", "工作区使峰值增加"),
        "workspace_of_{}_bytes": ("workspace of `{}`", "`{}` 的工作区"),
        "allocated_between_operators_bytes": (
            "allocator: most between two operators, no workspace",
            "分配器：算子之间的最大值，不含工作区",
        ),
        "kept_by_libraries_bytes": ("kept by cuBLAS from step to step", "cuBLAS 跨训练步保留"),
        "max_memory_requested_bytes": ("allocator: peak as asked for", "分配器：峰值，按请求的字节计"),
        "max_memory_allocated_bytes": ("`torch.cuda.max_memory_allocated`", "`torch.cuda.max_memory_allocated`"),
        "max_memory_reserved_bytes": ("`torch.cuda.max_memory_reserved`", "`torch.cuda.max_memory_reserved`"),
        "step_flops": ("FLOPs of a step", "一步的 FLOPs"),
        "step_seconds": ("time of a step", "一步用时"),
    },
)
def decoder_step(device: torch.device, **sizes: int) -> dict[str, Number]:
    """A pre-norm decoder in fp32 with Adam, second step: what the meter, `measure` and the CUDA allocator say of it.

    `max_memory_*` are the allocator's own, above what it held before the model was made.
    `allocated_between_operators_bytes` is looked up after each operator, when its workspace is free again, without the
    tokens and what libraries keep, so that `meter_blocks_peak_bytes` can be held against it. The allocator may hand out
    up to 1 MB more than a large block needs; the meter also counts the 4 bytes a parameter that Adam keeps on the CPU.
    """
    allocator = Allocator(device)
    model, tokens = decoder_and_tokens(device, **sizes)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model.loss(tokens).backward()
        optimizer.step()

    step()  # makes the optimizer's state
    values: dict[str, Number] = {"parameter_count": sum(p.numel() for p in model.parameters())}
    for name, block in (("meter_peak_bytes", 1), ("meter_blocks_peak_bytes", 512)):
        optimizer.zero_grad()
        with MemoryMeter(model, optimizer, block_bytes=block) as meter:
            step()
        values[name] = meter.peak_bytes
    if device.type == "cuda":
        optimizer.zero_grad()
        own = [*model.parameters(), *(t for state in optimizer.state.values() for t in state.values()), tokens]
        kept = allocator.requested() - sum(tensor.nbytes for tensor in own if tensor.is_cuda)
        with BetweenOperators(allocator) as between:
            step()
        values["kept_by_libraries_bytes"] = kept
        values["allocated_between_operators_bytes"] = between.peak_bytes - kept - tokens.nbytes
        optimizer.zero_grad()
        allocator.reset()
        step()
        values |= allocator.peaks()
    optimizer.zero_grad()
    found = measure(step, model=model, optimizer=optimizer)
    values |= {"allocator_peak_bytes": found.allocator_peak_bytes, "workspace_bytes": found.workspace_bytes}
    workspace = list(found.workspace_by_operator.items())[:5]
    values |= {f"workspace_of_{operator}_bytes": count for operator, count in workspace}
    return values | {"step_flops": found.flops, "step_seconds": found.seconds}


@experiment(
    title=(
        "What a decoder layer saves in bf16: formula beside measurement",
        "解码器层在 bf16 下为反向保存的字节：公式与实测对照",
    ),
    sizes={"sequence": 1024, "batch": 4, "hidden": 1024, "heads": 16},
    small={"sequence": 32, "batch": 2, "hidden": 64, "heads": 4},
    labels={
        "saved_bytes": ("saved for backward, measured", "为反向保存，实测"),
        "predicted_bytes": ("formula with LayerNorm statistics", "公式，计入 LayerNorm 统计量"),
        "paper_bytes": ("formula of the paper, without them", "论文公式，不计统计量"),
        "difference_bytes": ("measured minus predicted", "实测减预测"),
        "statistic_bytes": ("one LayerNorm statistic", "每个 LayerNorm 统计量"),
    },
)
def korthikanti(device: torch.device, **size: int) -> dict[str, Number]:
    """Bytes that one layer with dropout saves, beside s*b*h*(34 + 5*a*s/h) and the LayerNorm statistics.

    CUDA keeps those statistics in fp32 whatever the activations' dtype; a CPU keeps them in bf16.
    """
    layer = DecoderLayer(size["hidden"], size["heads"], dropout=0.1).to(device, torch.bfloat16)
    x = torch.zeros(size["batch"], size["sequence"], size["hidden"], device=device, dtype=torch.bfloat16)
    saved = saved_tensors(layer, x)
    (statistic_bytes,) = {
        row.dtype.itemsize for row in saved if row.operator.startswith("NativeLayerNorm") and row.shape[-1] == 1
    }
    predicted = transformer_activation_bytes(**size, statistic_bytes=statistic_bytes)
    return {
        "saved_bytes": saved.total_bytes,
        "predicted_bytes": predicted,
        "difference_bytes": saved.total_bytes - predicted,
        "paper_bytes": transformer_activation_bytes(**size),
        "statistic_bytes": statistic_bytes,
    }


@experiment(
    title=(
        "Attention over sequence lengths, bf16: peak of forward and backward",
        "注意力随序列长度的变化（bf16）：前向加反向的峰值",
    ),
    sizes={"lengths": (512, 1024, 2048, 4096), "hidden": 768, "heads": 12},
    small={"lengths": (16, 32), "hidden": 32, "heads": 4},
    labels={
        f"{kind}_{{}}_{figure}_bytes": (f"{en}, N = {{}}: {figure_en}", f"{zh}，N = {{}}：{figure_zh}")
        for kind, en, zh in (("standard", "standard", "标准"), ("fused", "fused", "融合"))
        for figure, figure_en, figure_zh in (
            ("tensors", "live tensors", "存活张量"),
            ("allocator", "allocator", "分配器"),
        )
    },
)
def attention_sequence(device: torch.device, *, lengths: tuple[int, ...], hidden: int, heads: int) -> dict[str, Number]:
    """Peaks of an attention layer, standard and fused, for each sequence length N: its tensors', the allocator's."""
    values = {}
    for kind in ("standard", "fused"):
        layer = Attention(hidden, heads, fused=kind == "fused").to(device, torch.bfloat16)
        for length in lengths:
            with seeded(0):
                x = torch.randn(1, length, hidden).to(device, torch.bfloat16)
            found = measure(lambda layer=layer, x=x: layer(x).sum().backward(), model=layer)
            values[f"{kind}_{length}_tensors_bytes"] = found.peak_bytes
            values[f"{kind}_{length}_allocator_bytes"] = found.allocator_peak_bytes
    return values


@experiment(
    title=(
        "The memory monitor: live, allocated and reserved through a step",
        "内存监视器：一个训练步中的存活、已分配与已预留",
    ),
    sizes=_GPT,
    small=TINY,
    labels={
        f"{after}_{kind}_bytes": (f"after {en}: {kind_en}", f"{zh}之后：{kind_zh}")
        for after, en, zh in (
            ("model", "making the model", "建立模型"),
            ("forward", "forward", "前向"),
            ("backward", "backward", "反向"),
            ("step", "the optimizer's step", "优化器更新"),
            ("zero_grad", "zero_grad", "zero_grad "),
            ("empty_cache", "empty_cache", "empty_cache "),
        )
        for kind, kind_en, kind_zh in (
            ("live", "live", "存活"),
            ("allocated", "allocated", "已分配"),
            ("reserved", "reserved", "已预留"),
        )
    },
)
def monitor(device: torch.device, **sizes: int) -> dict[str, Number]:
    """The first training step, phase by phase: bytes of live tensors, bytes allocated, bytes reserved.

    Allocated and reserved are above what the process held before; they are the CUDA allocator's, so a CPU has none.
    """
    allocator = Allocator(device)
    values: dict[str, Number] = {}

    with MemoryMeter() as meter:

        def note(after: str) -> None:
            values[f"{after}_live_bytes"] = meter.live_bytes
            if device.type == "cuda":
                values[f"{after}_allocated_bytes"] = allocator.allocated()
                values[f"{after}_reserved_bytes"] = allocator.reserved()

        model, tokens = decoder_and_tokens(device, **sizes)
        optimizer = torch.optim.Adam(model.parameters())
        note("model")
        loss = model.loss(tokens)
        note("forward")
        loss.backward()
        note("backward")
        optimizer.step()
        note("step")
        optimizer.zero_grad()
        note("zero_grad")
        if device.type == "cuda":
            torch.cuda.empty_cache()
            note("empty_cache")
    return values
