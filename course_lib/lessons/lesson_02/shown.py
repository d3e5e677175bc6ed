"""What lesson 02 shows: measured policies, its two figures, and seconds."""

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from course_lib.labels import listed
from course_lib.memory import MemoryMeter, symbolic
from course_lib.models import Decoder, random_tokens
from course_lib.teaching import COLORS, Table, figure, table, text
from course_lib.teaching.figures import shown_once

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Arm(NamedTuple):
    """What a step took."""

    peak_bytes: int
    flops: int


def measured_step(make: Callable[..., Decoder], **options: Any) -> Arm:
    """A step of `make(**options)` with Adam, 8 sequences of 128 tokens, the second one; gradients come in backward."""
    with symbolic():
        decoder, tokens = make(**options), random_tokens(8, 128, 2048)
        adam = torch.optim.Adam(decoder.parameters())
        _give_gradients(decoder)
        adam.step()  # makes its state
        decoder.zero_grad()
        with MemoryMeter(decoder, adam) as meter:
            decoder.loss(tokens).backward()
            adam.step()
        with FlopCounterMode(display=False) as counter:  # it holds tensors, so in a run of its own
            decoder.loss(tokens).backward()
    return Arm(meter.peak_bytes, counter.get_total_flops())


def peak_with_gradients(make: Callable[..., Decoder], **options: Any) -> int:
    """Peak of forward and backward of `make(**options)`, whose gradients are there from the start."""
    with symbolic():
        decoder, tokens = make(**options), random_tokens(8, 128, 2048)
        _give_gradients(decoder)
        with MemoryMeter(decoder) as meter:
            decoder.loss(tokens).backward()
    return meter.peak_bytes


def _give_gradients(decoder: Decoder) -> None:
    for parameter in decoder.parameters():
        parameter.grad = torch.zeros_like(parameter)


def draw_which_block(alone: Sequence[int], whole: Sequence[int]) -> "Figure":
    """Peaks with one checkpoint, beside the peak without any, in bytes.

    Args:
        alone: of eight layers and a mean of squares: without a checkpoint, then around each layer by itself.
        whole: of the decoder, with its head and loss: without, then around layers 0 and 7.
    """
    networks = {"Eight layers alone": (alone, range(8)), "The decoder, with its head": (whole, (0, 7))}
    said = "{name}: {none} MB without a checkpoint, {first} MB around layer 0, {last} MB around layer 7."
    alt = [
        text(said, name=text(name), none=_mb(peaks[0]), first=_mb(peaks[1]), last=_mb(peaks[-1]))
        for name, (peaks, _) in networks.items()
    ]
    title = "By itself the last layer saves nothing; what counts is the moment of the peak"
    drawn, panels = figure(title, columns=2, height=3.0, sharey=True, alt=listed(alt, " "))
    for ax, (name, (peaks, layers)) in zip(panels, networks.items(), strict=True):
        plain, *one = [peak / 1e6 for peak in peaks]
        colors = [COLORS["measured"] if layer == 7 else COLORS["activation"] for layer in layers]
        ax.bar(layers, one, color=colors, width=0.8)
        ax.axhline(plain, color=COLORS["predicted"], linewidth=1, linestyle="--")
        ax.text(-0.4, plain + 3, text("none: {peak}", peak=f"{plain:.1f}"))
        for layer, peak in zip(layers, one, strict=True):
            ax.text(layer, peak - 4, f"{peak:.0f}", ha="center", va="top", color="white", fontsize=8)
        ax.set(xticks=range(8), xlabel=text("layer with the checkpoint"), ylim=(0, 260), xlim=(-0.6, 7.6))
        ax.set_title(text(name))
    panels[0].set_ylabel(text("peak, MB"))
    return shown_once(drawn)


#: Where the name of each policy stands beside its point: points to the right and up, and its side.
_PLACES = {"each layer": (-8, 2, "right"), "all but the last": (-8, -11, "right")}


def draw_policies(arms: Mapping[str, Any]) -> "Figure":
    """Peak and FLOPs of the policies (`peak_bytes`, `flops`), each against the plain step, which stands first."""
    plain = next(iter(arms.values()))
    points = {name: (arm.peak_bytes / 1e6, arm.flops / plain.flops) for name, arm in arms.items()}
    said = "{name}: {peak} MB, {times} times the FLOPs"
    alt = [text(said, name=text(name), peak=f"{x:.1f}", times=f"{y:.3f}") for name, (x, y) in points.items()]
    title = "The lower left is best, and empty; here groups lose on both axes"
    drawn, ax = figure(title, height=3.2, alt=text("{points}.", points=listed(alt, "; ")))
    ax.set(xlim=(70, 320), ylim=(0.96, 1.36), xlabel=text("peak, MB"), ylabel=text("FLOPs of plain"))
    ax.grid(True, axis="x")
    for name, point in points.items():
        x, y, side = _PLACES.get(name, (8, 4, "left"))
        ax.plot(*point, "o", color=COLORS["measured"])
        ax.annotate(text(name), point, xytext=(x, y), textcoords="offset points", ha=side)
    return shown_once(drawn)


def seconds_beside_flops(decoders: Mapping[str, Decoder], arms: Mapping[str, Any]) -> Table:
    """Seconds of forward and backward, the best of two in turns, beside FLOPs; both also against the first row."""
    tokens, seconds = random_tokens(8, 128, 2048), dict.fromkeys(decoders, float("inf"))
    for name, decoder in 2 * list(decoders.items()):
        start = perf_counter()
        decoder.loss(tokens).backward()
        seconds[name] = min(seconds[name], perf_counter() - start)
    first = next(iter(decoders))
    rows = [
        (name, round(arms[name].flops / arms[first].flops, 3), round(took, 2), round(took / seconds[first], 2))
        for name, took in seconds.items()
    ]
    return table(["policy", "FLOPs of plain", "seconds", "seconds of plain"], rows)


def _mb(count: int) -> str:
    return f"{count / 1e6:.1f}"
