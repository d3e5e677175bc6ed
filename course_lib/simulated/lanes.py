"""Plot when each stream of a simulated device was busy, and how many bytes were live."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from course_lib.labels import text
from course_lib.labels.drawing import pyplot

from .race_detector import Span

#: Maps each kind of work (`Span.kind`) to a color. No category of bytes has one of these colors in
#: other plots. The colors of "compute", "up" and "down" also differ from one another in grayscale.
LANE_COLORS = {"compute": "#004488", "down": "#997700", "up": "#EECC66", "host": "#994455"}
#: Maps each stream to the label of its lane, in the order in which the lanes are drawn.
LANE_NAMES = {
    "compute": text("compute"),
    "down": text("to the host (D2H)"),
    "up": text("to the GPU (H2D)"),
    "gradients": text("gradients"),
    "parameters": text("parameters"),
    "batches": text("batches"),
    "host": text("host"),
}


def draw_lanes(spans: Iterable[Span], ax: Any, since: float) -> Any:
    """Draw one lane per stream with a bar for each operator or copy, and return the axes.

    The streams in `LANE_NAMES` come first, in the order of that dict. The color of a bar shows the
    kind of work (`Span.kind`), whichever stream did the work.

    Args:
        spans: Operators and copies with their simulated times.
        ax: Matplotlib axes to draw on; None creates new axes.
        since: Simulated time in seconds at which the plot begins.
    """
    ax = ax or _new_axes()
    spans = [span for span in spans if span.end > since]
    order = [*LANE_NAMES, *dict.fromkeys(span.stream for span in spans)]
    lanes = sorted({span.stream for span in spans}, key=order.index)
    for span in spans:
        start = max(span.start, since)
        bar = [(start - since, span.end - start)], (lanes.index(span.stream) - 0.35, 0.7)
        ax.broken_barh(*bar, color=LANE_COLORS[span.kind], edgecolor="white", linewidth=0.3)
    ax.set_yticks(range(len(lanes)), [LANE_NAMES.get(lane, lane) for lane in lanes])
    ax.set_ylim(max(len(lanes), 1) - 0.5, -0.5)
    ax.set_xlim(left=0)
    ax.set_xlabel(text("simulated seconds"))
    return ax


def draw_bytes(samples: Iterable[tuple[float, int]], ax: Any, since: float, until: float) -> Any:
    """Draw live megabytes (10**6 bytes) over simulated time as a step plot, and return the axes.

    Args:
        samples: Pairs (simulated time in seconds, live bytes), in any order.
        ax: Matplotlib axes to draw on; None creates new axes.
        since: Simulated time in seconds at which the plot begins.
        until: Simulated time in seconds at which the plot ends.
    """
    ax = ax or _new_axes()
    # The samples are in the order in which the host called the operators. This order may differ
    # from the order of their simulated times, because streams run at the same time.
    samples = sorted(samples, key=lambda sample: sample[0])
    before = [live for seconds, live in samples if seconds <= since][-1:]
    after = [(seconds - since, live) for seconds, live in samples if seconds > since]
    after += [(until - since, samples[-1][1])] if samples else []
    seconds, live = (
        zip(*[(0.0, live) for live in before], *after, strict=True) if before or after else ((), ())
    )
    ax.fill_between(
        seconds, [nbytes / 1e6 for nbytes in live], step="post", color="#BBBBBB", linewidth=0
    )
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)
    ax.set_xlabel(text("simulated seconds"))
    ax.set_ylabel(text("live bytes (MB)"))
    return ax


def _new_axes() -> Any:
    """Return new Matplotlib axes with the size of this module's plots."""
    return pyplot().subplots(figsize=(7, 1.8), layout="constrained")[1]
