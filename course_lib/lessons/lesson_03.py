"""Lesson 03: its exercises, its claims, its pictures of schedules, and schedules of a decoder run on a GPU."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from course_lib.models import loss_stages
from course_lib.schedule import COLORS as KEEP_COLORS
from course_lib.schedule import (
    Chain,
    Cost,
    IllegalSchedule,
    InfeasibleBudget,
    Schedule,
    ScheduledSequential,
    Stage,
    frontier,
    optimal,
    simulate,
    sqrt_segments,
    store_all,
)
from course_lib.teaching import Claim, Verdict, expect_number, figure, playground, text
from course_lib.teaching.exercises import Refused, exercise, not_answered, right, wrong
from course_lib.teaching.experiments import TINY, Number, decoder_and_tokens, experiment, measured
from course_lib.teaching.figures import shown_once
from course_lib.teaching.languages import label, parts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: What learners may have read.
CLAIMS = (
    Claim(
        (
            "√L segments save 1 − √L/L of the memory: 90 % for 100 layers.",
            "√L 段省下 1 − √L/L 的内存：100 层省 90 %。",
        ),
        ("100 × (Linear + Tanh), 10 segments", "100 ×（Linear + Tanh），10 段"),
        (
            "No: it forgets the segment that is being worked on. 1 − 2/√L with equal ones.",
            "不对：忘了正在处理的那一段。各段相等时是 1 − 2/√L。",
        ),
        outcome="fails",
    ),
    Claim(
        ("They cost 2√L/L of extra compute: 20 %.", "√L 段要多花 2√L/L 的计算：20 %。"),
        ("FLOPs of the same", "同一网络的 FLOPs"),
        (
            "No: all but the last segment runs forward again, nearly a third of a step.",
            "不对：除最后一段外都要再做一次前向，将近一步的三分之一。",
        ),
        outcome="fails",
    ),
    Claim(
        ("Recomputing doubles the compute.", "重计算使计算量翻倍。"),
        ("FLOPs of a step, tapered segments", "一步的 FLOPs，渐短的段"),
        ("No: one forward more, and backward is twice a forward.", "不对：只多一次前向，而反向是前向的两倍。"),
        outcome="fails",
    ),
    Claim(
        ("√L equal segments are optimal.", "√L 个相等的段是最优的。"),
        ("100 × (Linear + GELU), 10 segments → tapered", "100 ×（Linear + GELU），10 段 → 渐短的段"),
        ("No: early segments may be longer, for 2 % more FLOPs.", "不对：前面的段可以更长，FLOPs 只多 2 %。"),
        outcome="fails",
    ),
    Claim(
        (
            "Detach each segment's output and set `requires_grad`.",
            "把每一段的输出 detach，再设 `requires_grad`。",
        ),
        ("four segments: layers that get gradients", "四段：得到梯度的层数"),
        ("It cuts the graph: only the last segment trains.", "这会切断计算图：只有最后一段在训练。"),
        outcome="fails",
    ),
)

# Exercises ------------------------------------------------------------------------------------------------------------


def check_segment_count(answer: Any) -> Verdict:
    """Lesson 03: the best number of equal segments for 64 layers that save nine times a boundary each."""
    return expect_number(
        answer,
        24,
        tolerance=1e-9,
        wrong_answers={
            8: (
                "That is √L, right only where a layer saves as much as one boundary.",
                "这是 √L，只有每层保存的恰好等于一个边界时才对。",
            ),
            64 * 9: ("Take the square root.", "还要开平方。"),
            8 / 3: ("s and b are the wrong way round.", "s 与 b 放反了。"),
        },
        why=(
            "24 boundaries, and 64/24 layers of nine each: 24 b + 24 b.",
            "24 个边界，加上一段的 64/24 层、每层九份：24 b + 24 b。",
        ),
        hint=("The peak is k·b + (L/k)·s. Where are both parts equal?", "峰值是 k·b + (L/k)·s。两项何时相等？"),
    )


@exercise(
    hint=(
        "Four segments whose sizes get shorter: keep what enters each, then work from the last to the first.",
        "分四段，越来越短：留下每一段的输入，再从最后一段做到第一段。",
    )
)
def check_drawn_schedule(actions: Any) -> Verdict:
    """A schedule for `Chain.uniform(6, saved_bytes=2)` with a peak of at most 7 and at most 11 forwards."""
    if isinstance(actions, list | tuple) and (... in actions or not actions):
        return not_answered()
    cost = _simulated(actions, Chain.uniform(6, saved_bytes=2))
    en = f"a peak of {cost.peak_bytes} and {cost.forward_steps} forwards"
    zh = f"峰值 {cost.peak_bytes}，前向 {cost.forward_steps} 次"
    if cost.peak_bytes <= 7 and cost.forward_steps <= 11:
        return right(f"Right: {en}.", f"正确：{zh}。")
    return wrong(f"Legal, but too much: {en}.", f"合法，但超出了限制：{zh}。")


def pyramid() -> Chain:
    """Twelve stages as in a convolution pyramid: maps shrink while channels grow; the head is small."""
    sizes = [32, 32, 32, 16, 16, 16, 8, 8, 8, 4, 4, 1]  # MB of each stage's output
    return Chain(tuple(Stage(4, 8, size * 10**6, 2 * size * 10**6) for size in sizes), 3 * 10**6)


@exercise(
    hint=(
        "`optimal` takes a budget. Which one is a little below 163 MB?",
        "`optimal` 接受一个预算。取多少才略低于 163 MB？",
    )
)
def check_beats_sqrt(schedule: Any) -> Verdict:
    """A schedule for `pyramid()` with a lower peak than `sqrt_segments`, in no more time."""
    chain = pyramid()
    rule, cost = simulate(sqrt_segments(chain), chain), _simulated(schedule, chain)
    peaks = f"{cost.peak_bytes / 1e6:g} MB, {cost.time:g} : {rule.peak_bytes / 1e6:g} MB, {rule.time:g}"
    if cost.peak_bytes >= rule.peak_bytes:
        return wrong(f"The peak is not lower: {peaks}.", f"峰值并没有降低：{peaks}。")
    if cost.time > rule.time:
        return wrong(f"It takes longer: {peaks}.", f"时间更长：{peaks}。")
    return right(f"Right: {peaks}.", f"正确：{peaks}。")


def _simulated(actions: Any, chain: Chain) -> Cost:
    try:
        return simulate(Schedule(actions), chain)
    except IllegalSchedule as refused:
        raise Refused(f"The referee says: {refused}.", f"裁判说：{refused}。") from None
    except Exception as error:
        raise Refused(f"It cannot be simulated: {error!r}.", f"无法模拟：{error!r}。") from None


# Pictures -------------------------------------------------------------------------------------------------------------


def schedule_pictures(
    schedules: Mapping[str | tuple[str, str], Schedule],
    chain: Chain,
    *,
    title: tuple[str, str] | str | None = None,
    unit: str = "MB",
    scale: float = 1e6,
    panel_height: float = 1.25,
) -> "Figure":
    """Schedules for one chain, one below the other on one scale: time to the right, stages upwards.

    Args:
        schedules: name -> schedule.
        chain: what they are for; times are drawn in units of its `store_all`.
        unit, scale: of the peak, and how many bytes make one.

    Returns:
        The figure; each panel is headed by the name, the peak and the time.
    """
    from matplotlib.patches import Patch

    fastest = simulate(store_all(chain), chain).time
    costs = {name: simulate(schedule, chain) for name, schedule in schedules.items()}
    longest = max(cost.time for cost in costs.values())
    drawn, axes = figure(
        title, rows=len(schedules), height=1.3 + panel_height * len(schedules), sharex=True, sharey=True
    )
    panels = [axes] if len(schedules) == 1 else list(axes)
    for ax, (name, schedule) in zip(panels, schedules.items(), strict=True):
        schedule.plot(ax, chain=chain)
        ax.get_legend().remove()
        cost = costs[name]
        ax.set_title(f"{label(name)} · {cost.peak_bytes / scale:.4g} {unit} · {cost.time / fastest:.2f} ×", fontsize=9)
        ax.set(xlabel="", ylabel=text("stage", "级"), xlim=(0, longest))
        ax.grid(False)
    ticks = [fastest * i / 2 for i in range(int(2 * longest / fastest) + 1)]
    panels[-1].set_xticks(ticks, [f"{tick / fastest:g}" for tick in ticks])
    panels[-1].set_xlabel(text("time, in steps that store all", "时间，以全部保留的一步为单位"))
    names = {
        "all": ("forward, keeps all", "前向，全留"),
        "input": ("keeps its input", "只留输入"),
        "nothing": ("keeps nothing", "什么也不留"),
        "backward": ("backward", "反向"),
    }
    heads = [parts(ax.get_title("left")) for ax in panels]
    drawn.course_alt = (
        f"What runs and what is kept, over time and stages. Peak and time of each: {'; '.join(en for en, _ in heads)}.",
        f"横轴是时间，纵轴是级，画出运行的和留着的。各调度的峰值与时间：{'；'.join(zh for _, zh in heads)}。",
    )
    handles = [Patch(color=KEEP_COLORS[kind], label=label(words)) for kind, words in names.items()]
    drawn.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8)
    return shown_once(drawn)


def draw_schedule(budget: int = 200) -> "Figure":
    """The fastest schedule of a chain of twelve uneven stages under a budget, drawn; or what it would need.

    Args:
        budget: MB.
    """
    chain = pyramid()
    try:
        schedule = optimal(chain, budget * 10**6)
    except InfeasibleBudget as refused:
        schedule, least = optimal(chain, refused.least_bytes), refused.least_bytes / 1e6
        title = (f"{budget} MB is too little: it takes {least:g} MB", f"{budget} MB 不够：至少要 {least:g} MB")
    else:
        cost = simulate(schedule, chain)
        extra = cost.time / frontier(chain)[-1].time - 1
        title = (
            f"A budget of {budget} MB costs {100 * extra:.0f} % more time",
            f"预算 {budget} MB，时间多花 {100 * extra:.0f} %",
        )
    return schedule_pictures({("optimal", "最优"): schedule}, chain, title=title, panel_height=2.2)


def schedule_playground() -> None:
    """`draw_schedule` behind a slider for the budget."""
    playground(
        draw_schedule,
        lambda widgets: {
            "budget": widgets.IntSlider(200, 100, 360, 5, description=text("MB", "兆字节"), continuous_update=False)
        },
    )


# A GPU experiment -----------------------------------------------------------------------------------------------------


@experiment(
    title=(
        "A decoder's forward and backward pass under half and a quarter of the peak that storing all takes",
        "解码器的前向与反向，预算为全部保留时峰值的二分之一和四分之一",
    ),
    sizes={"vocabulary": 8192, "hidden": 1024, "heads": 16, "layers": 12, "sequence": 1024, "batch": 4},
    small={**TINY, "layers": 4},
    arms={"plain": ("store all", "全部保留"), "half": ("half", "二分之一"), "quarter": ("a quarter", "四分之一")},
)
def scheduled_decoder(device: torch.device, **sizes: int) -> dict[str, Number]:
    model, tokens = decoder_and_tokens(device, **sizes, tied=False)
    stages = loss_stages(model, tokens[:, 1:])
    x = tokens[:, :-1].contiguous()
    for parameter in stages.parameters():
        parameter.grad = torch.zeros_like(parameter)
    values = measured("plain", lambda: stages(x).backward())
    chain = Chain.profile(stages, x, clock=True)
    points = frontier(chain)
    for name, part in (("half", 2), ("quarter", 4)):
        # What fits in the part, or the nearest that there is.
        schedule = optimal(chain, max(points[-1].peak_bytes // part, points[0].peak_bytes))
        run = ScheduledSequential(stages, schedule)
        values[f"{name}_predicted_bytes"] = simulate(schedule, chain).peak_bytes - x.nbytes  # x is there before
        values |= measured(name, lambda run=run: run(x).backward())
    return values
