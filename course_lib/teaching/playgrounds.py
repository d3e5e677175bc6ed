"""Formulas with sliders: things to play with where playing teaches."""

from typing import TYPE_CHECKING

from .figures import COLORS, figure, shown_once
from .languages import text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

    from course_lib.budget import Estimate


def _widgets_and_display():
    """The module ipywidgets and IPython's `display`; without Jupyter a line that says so, and None."""
    try:
        import ipywidgets
        from IPython.display import display
    except ImportError:
        print(text("The sliders need JupyterLab.", "滑块需要在 JupyterLab 中使用。"))
        return None
    return ipywidgets, display


def draw_activation_bytes(sequence: int = 2048, layers: int = 32, heads: int = 32, hidden: int = 4096) -> "Figure":
    """Predicted activation bytes of one training sequence over its length: what grows with s, and what with s².

    Args:
        sequence: marked on the curve.
        layers, heads, hidden: of the transformer; bf16, with dropout, nothing recomputed.
    """
    from course_lib.memory import transformer_activation_bytes

    lengths = [256 * i for i in range(1, 33)]
    sizes = {"batch": 1, "hidden": hidden, "heads": heads, "layers": layers}

    def gigabytes(length: int, recompute: str) -> float:
        return transformer_activation_bytes(sequence=length, recompute=recompute, **sizes) / 1e9

    total, linear = gigabytes(sequence, "none"), gigabytes(sequence, "selective")
    share = f"{100 * (1 - linear / total):.0f} %"
    title = (
        f"{layers} layers, {sequence} tokens: {total:,.1f} GB, of which {share} grow with s²",
        f"{layers} 层、{sequence} 个 token：{total:,.1f} GB，其中 {share} 随 s² 增长",
    )
    drawn, ax = figure(title, height=3.2)
    everything, proportional = ([gigabytes(n, kind) for n in lengths] for kind in ("none", "selective"))
    bands = (
        (0, proportional, "activation", text("grows with s", "随 s 增长")),
        (proportional, everything, "temporary", text("grows with s²", "随 s² 增长")),
    )
    for lower, upper, category, name in bands:
        ax.fill_between(lengths, lower, upper, color=COLORS[category], alpha=0.75, linewidth=0, label=name)
    ax.plot(lengths, everything, color=COLORS["predicted"])
    ax.plot(sequence, total, "o", color=COLORS["predicted"])
    ax.set(xlim=(256, 8192), ylim=(0, max(everything) * 1.08))
    ax.set(
        xlabel=text("sequence length s, tokens", "序列长度 s（token 数）"), ylabel=text("activations, GB", "激活值，GB")
    )
    ax.legend(loc="upper left", reverse=True)
    return shown_once(drawn)


def activation_playground():
    """`draw_activation_bytes` behind three sliders; needs a running kernel. Without Jupyter it says so in a line."""
    if not (found := _widgets_and_display()):
        return
    widgets, display = found

    def draw(sequence: int, layers: int, heads: int) -> None:
        display(draw_activation_bytes(sequence, layers, heads))

    layers_name = text("layers", "层数", separator=" ")
    widgets.interact(
        draw,
        sequence=widgets.IntSlider(2048, 256, 8192, 256, description="s", continuous_update=False),
        layers=widgets.IntSlider(32, 1, 96, 1, description=layers_name, continuous_update=False),
        heads=widgets.SelectionSlider(options=[8, 16, 32, 64, 128], value=32, description=text("heads", "头数")),
    )


def draw_schedule(budget: int = 200) -> "Figure":
    """The fastest schedule of a chain of twelve uneven stages under a budget, drawn; or what it would need.

    Args:
        budget: MB.
    """
    from course_lib.schedule import InfeasibleBudget, frontier, optimal, simulate

    from .exercises import pyramid
    from .figures import schedule_pictures

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


def draw_budget(estimates: "Sequence[Estimate]", budget: int = 30) -> "Figure":
    """Recipes by peak and seconds, and a budget: those to its left fit, and the cheapest of them is named.

    Args:
        estimates: of `course_lib.budget.estimate`.
        budget: MB.
    """
    from matplotlib.ticker import LogLocator

    from course_lib.budget import RATES

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


def budget_playground(estimates: "Sequence[Estimate]"):
    """`draw_budget` behind a slider; needs a running kernel. Without Jupyter it says so in a line."""
    if not (found := _widgets_and_display()):
        return
    widgets, display = found

    def draw(budget: int) -> None:
        display(draw_budget(estimates, budget))

    widgets.interact(draw, budget=widgets.IntSlider(30, 10, 110, 1, description="MB", continuous_update=False))


def schedule_playground():
    """`draw_schedule` behind a slider for the budget; needs a running kernel. Without Jupyter it says so in a line."""
    if not (found := _widgets_and_display()):
        return
    widgets, display = found

    def draw(budget: int) -> None:
        display(draw_schedule(budget))

    widgets.interact(
        draw,
        budget=widgets.IntSlider(200, 100, 360, 5, description=text("MB", "兆字节"), continuous_update=False),
    )
