"""Figures of lesson 06."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from course_lib.attention import attention_cost
from course_lib.labels import join_labels
from course_lib.teaching import COLORS, Table, figure, table, text
from course_lib.teaching.figures import shown_once
from course_lib.teaching.marks import arrow, box, clauses, label_axes, note, points, write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colors of standard and flash attention in all figures of the lesson; the categories' colors are
# for categories.
_STANDARD, _FLASH = COLORS["predicted"], COLORS["measured"]
_KINDS = {"standard": (_STANDARD, "o"), "checkpointed": ("#57606A", "s"), "flash": (_FLASH, "D")}


def draw_running(maxima: Sequence[float], sums: Sequence[float]) -> "Figure":
    """Draw an online softmax's running maximum and running sum after each block.

    Blocks that raise the maximum are marked.

    Args:
        maxima, sums: Maximum and sum after each block.
    """
    rises = [n for n in range(1, len(maxima)) if maxima[n] > maxima[n - 1]]
    alt = "{blocks} blocks. The maximum rises at the blocks {rises}."
    alt = text(alt, blocks=len(maxima), rises=join_labels(map(str, rises)))
    title = "Each time the maximum rises, the sum is rescaled"
    drawn, panels = figure(title, columns=2, height=2.8, alt=alt)
    for ax, values, name in zip(panels, (maxima, sums), ("maximum m", "sum ℓ"), strict=True):
        ax.plot(values, "-", color=_FLASH, alpha=0.5)
        steady = {n: value for n, value in enumerate(values) if n not in rises}
        points(ax, steady, color=_FLASH, markersize=4)
        points(ax, {n: values[n] for n in rises}, "^", color="black", markersize=7)
        label_axes(ax, "block", name, xticks=range(0, len(values), 3))
    panels[1].set_ylim(0, None)
    note(panels[0], "rises", (rises[-1], maxima[rises[-1]]), (6, -14), va="baseline")
    return shown_once(drawn)


#: Phase -> the block at the left of a tile, the tile, and notes on what the tiles update.
_PASSES = {
    "forward": ("Q", "S, P", ("m, ℓ and O of a row are updated by each tile",)),
    "backward": (
        "Q, dO",
        "S, P, dS",
        ("dQ of a row: every tile adds to it", "dK, dV of a column: every tile adds"),
    ),
}


def draw_passes() -> "Figure":
    """Draw the order in which flash attention computes its tiles, in forward and in backward."""
    alt = (
        "A grid of tiles: three blocks of queries and four key blocks. Forward: one block of"
        " queries passes over the key blocks and updates m, the sum and the output. Backward: each"
        " tile computes P again and adds to dQ of its row and to dK and dV of its column."
    )
    title = "A tile is computed, used and released, so nothing of size N × N exists"
    drawn, panels = figure(title, columns=2, height=3.2, alt=text(alt))
    edge = {"edgecolor": "#57606A", "linewidth": 1}
    block, tile = edge | {"facecolor": "#DCE6F0"}, edge | {"facecolor": "none"}
    current = edge | {"facecolor": _FLASH, "alpha": 0.8}
    line = {"color": "black", "lw": 1.5}
    for ax, (phase, (beside, inside, notes)) in zip(panels, _PASSES.items(), strict=True):
        ax.set_title(text(phase), loc="left")
        for row in range(3):
            box(ax, (0.4, row), 0.45, 0.92, **block)
            for column in range(4):
                look = current if (row, column) == (1, 2) else tile
                box(ax, (1 + column, row), 0.92, 0.92, **look)
        for column in range(4):
            box(ax, (1 + column, 3.1), 0.92, 0.4, **block)
        arrow(ax, (0.95, 1.2), (5.2, 1.2), **line)
        if phase == "backward":
            arrow(ax, (3.15, 3.05), (3.15, -0.15), **line)
        write(ax, 3.5, 1.55, inside, va="baseline", fontsize=8.5)
        write(ax, 0.62, 1.46, beside, rotation=90, fontsize=8.5)
        write(ax, 3.0, 3.65, "key blocks: K, V", va="baseline", fontsize=9)
        for number, words in enumerate(notes):
            write(ax, 0.4, -0.6 - 0.5 * number, words, ha="left", va="baseline", fontsize=9)
        ax.set(xlim=(0.2, 5.4), ylim=(-1.4, 4.1))
        ax.axis("off")
    drawn.course_larger = 1.15  # the notes of the two panels would meet
    return shown_once(drawn)


def draw_saved(lengths: Sequence[int], saved: Mapping[str, Sequence[int]]) -> "Figure":
    """Draw the bytes that attention saves for backward against the sequence length, on log axes.

    Args:
        lengths: Sequence lengths N.
        saved: Dict from "standard" and "flash" to the saved bytes at each sequence length.
    """
    title = "Twice the tokens need nearly four times the bytes, or with flash only twice"
    drawn, ax = figure(title, height=3.2)
    ends, last = [], lengths[-1]
    for (name, values), slope in zip(saved.items(), (2, 1), strict=True):
        (color, marker), end = _KINDS[name], values[-1] / 1e6
        line = {n: end * (n / last) ** slope for n in lengths}
        points(ax, line, "--", color=color, alpha=0.5, linewidth=1)
        points(ax, dict(zip(lengths, values, strict=True)), marker, unit=1e6, color=color)
        words = text("{name}, slope {slope}", name=name, slope=slope)
        note(ax, words, (last, end), (8, -3), va="baseline", color=color)
        numbers = {"first": f"{values[0] / 1e6:,.1f}", "last": f"{end:,.1f}"}
        ends.append(text("{name} from {first} to {last} MB", name=name, **numbers))
    ax.set(xscale="log", yscale="log", xlim=(lengths[0] / 1.2, last * 3))
    label_axes(ax, "sequence length N", "saved (MB)", ticks=lengths)
    alt = "From N = {first} to {last}: {ends}."
    drawn.course_alt = text(alt, first=lengths[0], last=last, ends=join_labels(ends))
    return shown_once(drawn)


def draw_roofline(
    devices: Mapping[str, tuple[float, float]], reached: Mapping[str, float]
) -> "Figure":
    """Draw rooflines: the FLOP/s that a device can reach against the arithmetic intensity.

    Both axes are logarithmic. There is one roofline per device.

    Args:
        devices: Dict from the name of a device to (peak FLOP/s, memory bandwidth in bytes per
            second).
        reached: Dict from a kind of attention to its FLOPs per byte. Each kind is marked on each
            roofline.
    """
    rows = [{"name": name, "x": round(x)} for name, x in reached.items()]
    title = "The size of the block limits flash attention, and the L2 cache raises the limit"
    drawn, ax = figure(title, height=3.4, alt=clauses("{name}: {x} FLOPs per byte", rows))
    intensities = [8 * 2 ** (n / 8) for n in range(60)]
    for (name, (rate, bandwidth)), style in zip(devices.items(), ("-", "--"), strict=True):
        roof = {x: min(rate, bandwidth * x) for x in (*intensities, *reached.values())}
        line = {x: roof[x] for x in intensities}
        points(ax, line, style, unit=1e12, color="#57606A", linewidth=1)
        end = (intensities[-1], roof[intensities[-1]] / 1e12)
        note(ax, name, end, (0, 5), ha="right", va="baseline", fontsize=8.5)
        for (kind, x), marker in zip(reached.items(), "o^D", strict=True):
            color = _STANDARD if kind == "standard" else _FLASH
            points(ax, {x: roof[x]}, marker, unit=1e12, color=color)
            if style == "-":
                look = {"va": "baseline", "color": color, "fontsize": 8.5}
                note(ax, kind, (x, roof[x] / 1e12), (6, -11), **look)
    ax.set(xscale="log", yscale="log", xlim=(8, 1500), ylim=(10, 2000))
    label_axes(ax, "FLOPs per byte", "TFLOP/s")
    return shown_once(drawn)


def draw_peaks(costs: Mapping[str, tuple[float, float]]) -> "Figure":
    """Draw three kinds of attention as points: peak on the x axis, FLOPs on the y axis.

    Args:
        costs: Dict from "standard", "checkpointed" and "flash" to (peak in MB, GFLOPs).
    """
    rows = [{"name": n, "peak": f"{x:.1f}", "flops": f"{y:.2f}"} for n, (x, y) in costs.items()]
    title = "Checkpointed attention has the FLOPs of flash, but four times its peak"
    alt = clauses("{name}: {peak} MB, {flops} GFLOPs", rows)
    drawn, ax = figure(title, height=3.0, alt=alt)
    for name, point in costs.items():
        color, marker = _KINDS[name]
        ax.plot(*point, marker, color=color, markersize=8)
        note(ax, name, point, (9, -4), va="baseline", color=color)
    x, y = (max(numbers) for numbers in zip(*costs.values(), strict=True))
    label_axes(ax, "peak (MB)", "GFLOPs", xlim=(0, 1.25 * x), ylim=(0, 1.3 * y))
    return shown_once(drawn)


def draw_causal_tiles() -> "Figure":
    """Draw the tiles that causal attention computes, for 8 query blocks and 8 key blocks.

    Each tile has its number in the order of computation.
    """
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
            write(ax, j, i, str(i * (i + 1) // 2 + j + 1), fontsize=8)
    label_axes(ax, "key blocks", "query blocks")
    ax.grid(False)
    return shown_once(drawn)


def costs_of_both_passes(sequence: int, head_dim: int) -> Table:
    """Return a table of FLOPs, moved bytes and times of attention for one head in bf16.

    There is one row for each pass, forward or backward, of standard and of flash attention. The
    times are two lower bounds on an A100: for computation at 312 TFLOP/s, and for memory traffic at
    2.0 TB/s.

    Args:
        sequence: Sequence length.
        head_dim: Head size.
    """
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
