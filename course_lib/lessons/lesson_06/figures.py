"""Figures of lesson 06."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from course_lib.attention import attention_cost
from course_lib.labels import join_labels
from course_lib.teaching import COLORS, Table, figure, table, text
from course_lib.teaching.figures import shown_once

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colors of standard and flash attention in all figures of the lesson; the categories' colors are
# for categories.
_STANDARD, _FLASH = COLORS["predicted"], COLORS["measured"]
_KINDS = {"standard": (_STANDARD, "o"), "checkpointed": ("#57606A", "s"), "flash": (_FLASH, "D")}


def draw_running(maxima: Sequence[float], sums: Sequence[float]) -> "Figure":
    """Draw the running maximum and sum, block by block; blocks that raise the maximum are marked.

    Args:
        maxima, sums: Values after each block.
    """
    rises = [n for n in range(1, len(maxima)) if maxima[n] > maxima[n - 1]]
    alt = text(
        "{blocks} blocks. The maximum rises at the blocks {rises}.",
        blocks=len(maxima),
        rises=join_labels(map(str, rises)),
    )
    title = "Each time the maximum rises, the sum is rescaled"
    drawn, panels = figure(title, columns=2, height=2.8, alt=alt)
    for ax, values, name in zip(panels, (maxima, sums), ("maximum m", "sum ℓ"), strict=True):
        ax.plot(values, "-", color=_FLASH, alpha=0.5)
        ax.plot(
            [n for n in range(len(values)) if n not in rises],
            [v for n, v in enumerate(values) if n not in rises],
            "o",
            color=_FLASH,
            markersize=4,
        )
        ax.plot(rises, [values[n] for n in rises], "^", color="black", markersize=7)
        ax.set(xlabel=text("block"), ylabel=text(name), xticks=range(0, len(values), 3))
    panels[1].set_ylim(0, None)
    panels[0].annotate(
        text("rises"), (rises[-1], maxima[rises[-1]]), xytext=(6, -14), textcoords="offset points"
    )
    return shown_once(drawn)


def draw_passes() -> "Figure":
    """Draw both passes as tiles: forward passes over key blocks, and backward over all tiles."""
    alt = (
        "A grid of tiles: three blocks of queries and four key blocks. Forward: one block of"
        " queries passes over the key blocks and updates m, the sum and the output. Backward: each"
        " tile computes P again and adds to dQ of its row and to dK and dV of its column."
    )
    drawn, panels = figure(
        "A tile is computed, used and released, so nothing of size N × N exists",
        columns=2,
        height=3.2,
        alt=text(alt),
    )
    notes = {
        "forward": ("m, ℓ and O of a row are updated by each tile",),
        "backward": ("dQ of a row: every tile adds to it", "dK, dV of a column: every tile adds"),
    }
    names = {"forward": ("Q", "S, P"), "backward": ("Q, dO", "S, P, dS")}
    for ax, (phase, lines) in zip(panels, notes.items(), strict=True):
        ax.set_title(text(phase), loc="left")
        beside, inside = names[phase]
        for row in range(3):
            ax.add_patch(_box(0.4, row, 0.45, 0.92, facecolor="#DCE6F0"))
            for column in range(4):
                look = {"facecolor": _FLASH, "alpha": 0.8} if (row, column) == (1, 2) else {}
                ax.add_patch(_box(1 + column, row, 0.92, 0.92, **({"facecolor": "none"} | look)))
        for column in range(4):
            ax.add_patch(_box(1 + column, 3.1, 0.92, 0.4, facecolor="#DCE6F0"))
        arrow = {"arrowstyle": "->", "color": "black", "lw": 1.5}
        ax.annotate("", (5.2, 1.2), (0.95, 1.2), arrowprops=arrow)
        if phase == "backward":
            ax.annotate("", (3.15, -0.15), (3.15, 3.05), arrowprops=arrow)
        ax.text(3.5, 1.55, inside, ha="center", fontsize=8.5)
        ax.text(0.62, 1.46, beside, ha="center", va="center", rotation=90, fontsize=8.5)
        ax.text(3.0, 3.65, text("key blocks: K, V"), ha="center", fontsize=9)
        for line, note in enumerate(lines):
            ax.text(0.4, -0.6 - 0.5 * line, text(note), fontsize=9)
        ax.set(xlim=(0.2, 5.4), ylim=(-1.4, 4.1))
        ax.axis("off")
    drawn.course_larger = 1.15  # the notes of the two panels would meet
    return shown_once(drawn)


def _box(x: float, y: float, width: float, height: float, **look: object) -> object:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, edgecolor="#57606A", linewidth=1, **look)


def draw_errors(errors: Mapping[str, Sequence[float]]) -> "Figure":
    """Draw relative errors of O, dQ, dK and dV, as multiples of 1e-7.

    Args:
        errors: Name -> the four errors; "standard" is the one to compare with.
    """
    alt = text(
        "Errors of O, dQ, dK and dV: {names}.", names=join_labels([text(name) for name in errors])
    )
    drawn, ax = figure(
        "The error is at most 1.5 times that of standard attention", height=2.6, alt=alt
    )
    looks = {"standard": (_STANDARD, "o"), "yours": (_FLASH, "D"), "the library": (_FLASH, "^")}
    for place, (name, values) in enumerate(errors.items()):
        color, marker = looks[name]
        spots = [n + 0.15 * (place - 1) for n in range(len(values))]
        ax.plot(spots, [1e7 * value for value in values], marker, color=color, label=text(name))
    most = 1e7 * max(max(values) for values in errors.values())
    ax.set(ylim=(0, 1.15 * most), ylabel=text("relative error (1e-7)"))
    ax.set_xticks(range(4), ["O", "dQ", "dK", "dV"])
    ax.legend(loc="lower right", ncols=3)
    return shown_once(drawn)


def draw_saved(lengths: Sequence[int], saved: Mapping[str, Sequence[int]]) -> "Figure":
    """Draw saved bytes over the sequence length, on log axes, where the slopes are the message.

    Args:
        lengths: The values of N.
        saved: "standard" and "flash" -> bytes at each N.
    """
    ends = [
        text(
            "{name} from {first} to {last} MB",
            name=text(name),
            first=f"{v[0] / 1e6:,.1f}",
            last=f"{v[-1] / 1e6:,.1f}",
        )
        for name, v in saved.items()
    ]
    alt = text(
        "From N = {first} to {last}: {ends}.",
        first=lengths[0],
        last=lengths[-1],
        ends=join_labels(ends),
    )
    drawn, ax = figure(
        "Twice the tokens need nearly four times the bytes, or with flash only twice",
        height=3.2,
        alt=alt,
    )
    for (name, values), slope in zip(saved.items(), (2, 1), strict=True):
        color, marker = _KINDS[name]
        line = [values[-1] / 1e6 * (n / lengths[-1]) ** slope for n in lengths]
        ax.plot(lengths, line, "--", color=color, alpha=0.5, linewidth=1)
        ax.plot(lengths, [v / 1e6 for v in values], marker, color=color)
        end = (lengths[-1], values[-1] / 1e6)
        ax.annotate(
            text("{name}, slope {slope}", name=text(name), slope=slope),
            end,
            xytext=(8, -3),
            textcoords="offset points",
            color=color,
        )
    ax.set(
        xscale="log",
        yscale="log",
        xlim=(lengths[0] / 1.2, lengths[-1] * 3),
        xlabel=text("sequence length N"),
        ylabel=text("saved (MB)"),
    )
    ax.set_xticks(lengths, [str(n) for n in lengths])
    ax.xaxis.set_minor_formatter("")
    return shown_once(drawn)


def draw_roofline(
    devices: Mapping[str, tuple[float, float]], reached: Mapping[str, float]
) -> "Figure":
    """Draw what each device can reach at each arithmetic intensity, on log axes.

    Args:
        devices: Name -> (FLOP/s, bytes/s).
        reached: Kind -> FLOPs per byte.
    """
    points = join_labels(
        [
            text("{name}: {x} FLOPs per byte", name=text(name), x=round(x))
            for name, x in reached.items()
        ],
        "; ",
    )
    drawn, ax = figure(
        "The size of the block limits flash attention, and the L2 cache raises the limit",
        height=3.4,
        alt=text("{points}.", points=points),
    )
    intensities = [8 * 2 ** (n / 8) for n in range(60)]
    for (name, (rate, bandwidth)), style in zip(devices.items(), ("-", "--"), strict=True):
        roof = [min(rate, bandwidth * x) / 1e12 for x in intensities]
        ax.plot(intensities, roof, style, color="#57606A", linewidth=1)
        ax.annotate(
            name,
            (intensities[-1], roof[-1]),
            xytext=(0, 5),
            textcoords="offset points",
            ha="right",
            fontsize=8.5,
        )
        for (kind, x), marker in zip(reached.items(), "o^D", strict=True):
            color = _STANDARD if kind == "standard" else _FLASH
            y = min(rate, bandwidth * x) / 1e12
            ax.plot(x, y, marker, color=color)
            if style == "-":
                ax.annotate(
                    text(kind),
                    (x, y),
                    xytext=(6, -11),
                    textcoords="offset points",
                    color=color,
                    fontsize=8.5,
                )
    ax.set(
        xscale="log",
        yscale="log",
        xlim=(8, 1500),
        ylim=(10, 2000),
        xlabel=text("FLOPs per byte"),
        ylabel="TFLOP/s",
    )
    return shown_once(drawn)


def draw_peaks(costs: Mapping[str, tuple[float, float]]) -> "Figure":
    """Draw kinds of attention, with the peak on x and FLOPs on y.

    Args:
        costs: "standard", "checkpointed", "flash" -> (MB, GFLOPs).
    """
    ends = [
        text("{name}: {peak} MB, {flops} GFLOPs", name=text(n), peak=f"{x:.1f}", flops=f"{y:.2f}")
        for n, (x, y) in costs.items()
    ]
    title = "Checkpointed attention has the FLOPs of flash, but four times its peak"
    drawn, ax = figure(title, height=3.0, alt=text("{points}.", points=join_labels(ends, "; ")))
    for name, point in costs.items():
        color, marker = _KINDS[name]
        ax.plot(*point, marker, color=color, markersize=8)
        ax.annotate(text(name), point, xytext=(9, -4), textcoords="offset points", color=color)
    most = max(x for x, _ in costs.values())
    ax.set(
        xlim=(0, 1.25 * most),
        ylim=(0, 1.3 * max(y for _, y in costs.values())),
        xlabel=text("peak (MB)"),
        ylabel="GFLOPs",
    )
    return shown_once(drawn)


def draw_causal_tiles() -> "Figure":
    """Draw which tiles a causal pass computes, in which order, for 8 query and 8 key blocks."""
    alt = (
        "An 8 by 8 grid of tiles. Tiles on the diagonal need the mask, the 28 tiles below it do"
        " not, and those above it are skipped."
    )
    title = "A causal mask leaves 36 of 64 tiles to compute, 8 of them with the mask"
    drawn, ax = figure(title, height=3.2, width=5.0, alt=alt)
    shades = [[2.0 if i == j else 1.0 if j < i else 0.0 for j in range(8)] for i in range(8)]
    ax.imshow(shades, cmap="Oranges", vmax=4)
    for i in range(8):
        for j in range(i + 1):
            ax.text(j, i, str(i * (i + 1) // 2 + j + 1), ha="center", va="center", fontsize=8)
    ax.set(xlabel=text("key blocks"), ylabel=text("query blocks"))
    ax.grid(False)
    return shown_once(drawn)


def costs_of_both_passes(sequence: int, head_dim: int) -> Table:
    """Return a table of the FLOPs and moved bytes of one head's forward and backward passes in
    bf16, and of the least times at an A100's rates, 312 TFLOP/s and 2.0 TB/s."""
    kinds = {
        "standard, forward": {"kind": "standard"},
        "standard, backward": {"kind": "standard", "pass_": "backward"},
        "flash, forward": {"kind": "flash"},
        "flash, backward": {"kind": "flash", "pass_": "backward"},
        "flash, backward in two passes": {"kind": "flash", "pass_": "backward", "tile_passes": 2},
    }
    rows = []
    for name, options in kinds.items():
        cost = attention_cost(sequence=sequence, head_dim=head_dim, **options)
        times = f"{1e6 * cost.flops / 312e12:.0f}; {1e6 * cost.moved_bytes / 2e12:.0f}"
        moved = round(cost.moved_bytes / 1e6, 1)
        intensity = round(cost.arithmetic_intensity)
        rows.append((name, round(cost.flops / 1e9, 1), moved, intensity, times))
    heading = f"N = {sequence}, d = {head_dim}, bf16"
    columns = [heading, "GFLOPs", "moved (MB)", "FLOPs per byte", "time (µs): compute; memory"]
    return table(columns, rows)
