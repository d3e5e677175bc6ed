"""Lesson 07: its exercises, its claims, its pictures, and three recipes on a GPU: predicted, and as they ran."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from course_lib.budget import RATES, Estimate, Recipe, build, estimate, train_step, waterfall
from course_lib.memory import CATEGORIES, MemoryMeter
from course_lib.models import Decoder, random_tokens
from course_lib.teaching import COLORS, Claim, Verdict, category_label, figure, playground, text
from course_lib.teaching.exercises import Refused, exercise, right, wrong
from course_lib.teaching.experiments import TINY, Number, experiment
from course_lib.teaching.figures import shown_once
from course_lib.teaching.languages import label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: What learners may have read.
CLAIMS = (
    Claim(
        ("Accumulation always lowers the peak.", "梯度累积总能降低峰值。"),
        ("checkpointed layers, then two micro-batches on top", "每层一个检查点，再加两个微批次"),
        (
            "Not where activations are small already: it keeps a full set of gradients.",
            "激活值本来就很小时则不然：它要留着一整套梯度。",
        ),
        outcome="fails",
    ),
    Claim(
        ("Savings add up.", "节省可以相加。"),
        ("flash alone, checkpoints alone, both", "单用 flash、单用检查点、两样合用"),
        (
            "They shrink the same activations, and then something else is the peak.",
            "两者缩小的是同样的激活值，之后撑起峰值的就是别的了。",
        ),
        outcome="fails",
    ),
    Claim(
        (
            "Training 7 billion parameters with Adam takes 112 GB, 16 bytes a parameter.",
            "用 Adam 训练 70 亿参数要 112 GB，每个参数 16 字节。",
        ),
        ("peak on the device, state on the host, steps in backward", "设备上的峰值，状态在主机，反向中更新"),
        (
            "On one device, all at once. Somewhere the state must be, and copies take their time.",
            "这是全放在一台设备上的数。状态总得放在某处，拷贝也要花时间。",
        ),
        outcome="partly",
    ),
    Claim(
        ("FlashAttention does fewer FLOPs.", "FlashAttention 的 FLOPs 更少。"),
        (
            "FLOPs of the step with flash over plain, 384 tokens",
            "384 个 token，用 flash 的一步与普通一步的 FLOPs 之比",
        ),
        (
            "Backward computes the scores again. It saves bytes moved, and the work of wholly masked tiles.",
            "反向要把分数再算一遍。它省的是搬运的字节；至于计算，只有整块都被遮住的分块才能跳过。",
        ),
        outcome="fails",
    ),
)

# Exercises ------------------------------------------------------------------------------------------------------------


@exercise(
    hint=(
        "The plain step keeps the activations of 8 sequences at once. Need it?",
        "普通的一步同时留着 8 个序列的激活值。有必要吗？",
    )
)
def check_forty_megabytes(recipe: Any) -> Verdict:
    """The small decoder within 40 MB, with no more FLOPs than plain, and nothing moved."""
    found = _that_fits(recipe, _small_decoder, _small_batch, 40_000_000)
    _moves_nothing(found)
    ratio = found.flops / estimate(_small_decoder, _small_batch, Recipe()).flops
    if ratio > 1:
        return wrong(
            f"It fits, but takes {ratio:.3f} times the FLOPs of the plain step.",
            f"装得下，但 FLOPs 是普通一步的 {ratio:.3f} 倍。",
        )
    return right(f"Right: {_mb(found.peak_bytes)}.", f"正确：{_mb(found.peak_bytes)}。")


@exercise(
    hint=(
        "One sequence at a time is not enough: attention and layers must forget too.",
        "一次一个序列还不够：注意力和各层也得忘掉一些。",
    )
)
def check_fourteen_megabytes(recipe: Any) -> Verdict:
    """The small decoder within 14 MB, nothing moved."""
    found = _that_fits(recipe, _small_decoder, _small_batch, 14_000_000)
    _moves_nothing(found)
    return right(f"Right: {_mb(found.peak_bytes)}.", f"正确：{_mb(found.peak_bytes)}。")


@exercise(
    hint=(
        "Start from your recipe for 14 MB and try `offload_optimizer` from 0 to 1. At some point, more saves nothing.",
        "从 14 MB 的配方出发，把 `offload_optimizer` 从 0 试到 1。到了某一点，再多也不省。",
    )
)
def check_eleven_megabytes(recipe: Any) -> Verdict:
    """The small decoder within 11 MB."""
    found = _that_fits(recipe, _small_decoder, _small_batch, 11_000_000)
    return right(f"Right: {_mb(found.peak_bytes)}.", f"正确：{_mb(found.peak_bytes)}。")


@exercise(
    hint=(
        "The last layer is recomputed right after its forward pass. Which `checkpoint` leaves the last piece alone?",
        "最后一层刚做完前向就要再算一遍。哪一种 `checkpoint` 让最后一段不必再算？",
    )
)
def check_beats_the_lesson(recipe: Any) -> Verdict:
    """The large decoder within 550 MB, at a lower price than the lesson's recipe."""

    def make_model() -> Decoder:
        return Decoder(vocabulary=8192, hidden=640, heads=40, layers=19, sequence=384)

    def make_batch() -> torch.Tensor:
        return random_tokens(2, 384, 8192)

    found = _that_fits(recipe, make_model, make_batch, 550_000_000)
    lesson = Recipe(attention="flash", checkpoint="layers", in_backward=True, offload_optimizer=1.0)
    price = RATES["laptop"].seconds(estimate(make_model, make_batch, lesson))
    yours = RATES["laptop"].seconds(found)
    prices = f"{yours:.3f} s : {price:.3f} s"
    if yours >= price:
        return wrong(f"It fits, but is not cheaper: {prices}.", f"装得下，但并不更便宜：{prices}。")
    return right(f"Right: {_mb(found.peak_bytes)}, {prices}.", f"正确：{_mb(found.peak_bytes)}, {prices}。")


def _small_decoder() -> Decoder:
    return Decoder(vocabulary=1024, hidden=128, heads=8, layers=2, sequence=256)


def _small_batch() -> torch.Tensor:
    return random_tokens(8, 256, 1024)


def _that_fits(recipe: Any, make_model: Callable, make_batch: Callable, budget: int) -> Estimate:
    """The estimate of a recipe that fits the budget, in fp32 with Adam."""
    if not isinstance(recipe, Recipe):
        kind = type(recipe).__name__
        raise Refused(f"A `Recipe` is wanted; this is a `{kind}`.", f"需要一个 `Recipe`，这里是 `{kind}`。")
    plain = Recipe()
    if (recipe.precision, recipe.optimizer) != (plain.precision, plain.optimizer):
        raise Refused("Precision and optimizer stay: fp32 and Adam.", "精度和优化器不许变：fp32 和 Adam。")
    try:
        found = estimate(make_model, make_batch, recipe)
    except Exception as error:
        raise Refused(f"It cannot be estimated: {error}.", f"无法估计：{error}。") from None
    if found.peak_bytes > budget:
        peaks = f"{_mb(found.peak_bytes)} > {budget / 1e6:,.0f} MB"
        raise Refused(f"It does not fit: {peaks}.", f"装不下：{peaks}。")
    return found


def _moves_nothing(found: Estimate) -> None:
    if found.moved_bytes:
        raise Refused(f"It fits, but moves {_mb(found.moved_bytes)}.", f"装得下，但搬运了 {_mb(found.moved_bytes)}。")


def _mb(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


# Pictures -------------------------------------------------------------------------------------------------------------


def waterfall_picture(
    names: Sequence[str | tuple[str, str]],
    estimates: Sequence[Estimate],
    measured: Sequence[int],
    budget_bytes: int,
    *,
    title: tuple[str, str] | str,
) -> "Figure":
    """From the plain step to a recipe: predicted peaks as stacked bars with their price, measured ones as points.

    Args:
        names: of the steps.
        estimates: of each.
        measured: peak of each, bytes.
        budget_bytes: drawn as a line.
    """
    drawn, ax = figure(title, height=4.6)
    labels = {name: category_label(name) for name in CATEGORIES}
    labels |= {"measured": text("measured", "实测"), "budget": text("budget", "预算")}
    shown = [label(name, separator="\n") for name in names]
    waterfall(estimates, measured=measured, budget_bytes=budget_bytes, names=shown, labels=labels, ax=ax)
    ax.grid(False)
    peaks = [f"{estimate.peak_bytes / 1e6:,.0f}" for estimate in estimates]
    pairs = [(name, name) if isinstance(name, str) else name for name in names]
    drawn.course_alt = (
        "Predicted peaks in MB: "
        + ", ".join(f"{en} {peak}" for (en, _), peak in zip(pairs, peaks, strict=True))
        + f"; the budget is {budget_bytes / 1e6:,.0f}.",
        "各步的峰值（MB，预测值）："
        + "，".join(f"{zh} {peak}" for (_, zh), peak in zip(pairs, peaks, strict=True))
        + f"；预算为 {budget_bytes / 1e6:,.0f}。",
    )
    return shown_once(drawn)


def draw_budget(estimates: Sequence[Estimate], budget: int = 30) -> "Figure":
    """Recipes by peak and seconds, and a budget: those to its left fit, and the cheapest of them is named.

    Args:
        estimates: of `course_lib.budget.estimate`.
        budget: MB.
    """
    from matplotlib.ticker import LogLocator

    if not estimates:
        raise ValueError("estimates is empty; it takes one estimate or more")
    rates = RATES["laptop"]
    points = [(e.peak_bytes / 1e6, rates.seconds(e), e) for e in estimates]
    fitting = sorted((point for point in points if point[0] <= budget), key=lambda point: (point[1], point[0]))
    if fitting:
        seconds = f"{fitting[0][1]:.3f} s"
        title = (
            f"{budget} MB: {len(fitting)} fit, the cheapest takes {seconds}",
            f"{budget} MB：装得下 {len(fitting)} 个，最便宜的要 {seconds}",
        )
    else:
        least = min(points)[0]
        title = (
            f"{budget} MB: none fits, the least is {least:.1f} MB",
            f"{budget} MB：都装不下，最小的也要 {least:.1f} MB",
        )
    drawn, ax = figure(title, height=3.4)
    for inside, color, name in (
        (True, COLORS["measured"], text("fits", "装得下")),
        (False, COLORS["input"], text("does not fit", "装不下")),
    ):
        some = [point for point in points if (point[0] <= budget) == inside]
        ax.plot([x for x, *_ in some], [y for _, y, _ in some], "o" if inside else "x", color=color, label=name)
    if fitting:
        ax.set_title(str(fitting[0][2].recipe), loc="left", fontsize=9)
        ax.plot(*fitting[0][:2], "o", markersize=13, markerfacecolor="none", markeredgecolor="black")
    ax.axvline(budget, color="black", linestyle="--", linewidth=1)
    ax.set(xscale="log", xlabel=text("peak, MB", "峰值，MB"), ylabel=text("seconds, laptop", "秒，笔记本电脑"))
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter("{x:.0f}")
    ax.xaxis.set_minor_formatter("")
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2)  # above: every corner may hold a point
    return shown_once(drawn)


def budget_playground(estimates: Sequence[Estimate]) -> None:
    """`draw_budget` behind a slider."""
    playground(
        lambda budget: draw_budget(estimates, budget),
        lambda widgets: {"budget": widgets.IntSlider(30, 10, 110, 1, description="MB", continuous_update=False)},
    )


# A GPU experiment -----------------------------------------------------------------------------------------------------

_FORGETFUL = {"precision": "bf16", "attention": "flash", "checkpoint": "layers"}
RECIPES = {
    "plain": Recipe(precision="bf16"),
    "forgetful": Recipe(**_FORGETFUL),
    "least": Recipe(**_FORGETFUL, in_backward=True, offload_optimizer=1.0),
}


@experiment(
    title=(
        "A step by three recipes: predicted, the meter's peak, the allocator's",
        "三个配方各做一步：预测、计量器的峰值、分配器的峰值",
    ),
    sizes={"vocabulary": 32000, "hidden": 2048, "heads": 16, "layers": 24, "sequence": 2048, "batch": 4},
    small={**TINY, "heads": 1},
    arms={
        "plain": ("plain", "普通"),
        "forgetful": ("flash, checkpoints", "flash、检查点"),
        "least": ("state on the host, steps in backward", "状态在主机，反向中更新"),
    },
)
def three_recipes(device: torch.device, *, batch: int, **sizes: int) -> dict[str, Number]:
    def make_batch() -> torch.Tensor:
        return random_tokens(batch, sizes["sequence"], sizes["vocabulary"])

    values: dict[str, Number] = {}
    for name, recipe in RECIPES.items():
        tier = "host" if device.type == "cuda" else "file"
        predicted = estimate(lambda: Decoder(**sizes), make_batch, recipe, tier=tier)
        values[f"{name}_predicted_bytes"] = predicted.peak_bytes
        model, optimizer = build(lambda: Decoder(**sizes).to(device), recipe)
        tokens = make_batch().to(device)
        train_step(model, optimizer, tokens, recipe)  # makes the state
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        with MemoryMeter(model, optimizer) as meter:
            train_step(model, optimizer, tokens, recipe)
        values[f"{name}_peak_bytes"] = meter.peak_bytes
        if device.type == "cuda":
            values[f"{name}_allocator_peak_bytes"] = torch.cuda.max_memory_allocated(device)
        del model, optimizer, meter
    return values
