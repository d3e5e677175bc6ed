"""What lesson 02 shows: measured policies, its two figures, and seconds."""

from collections.abc import Callable, Mapping
from statistics import median
from time import process_time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from course_lib.labels import listed
from course_lib.memory import MemoryMeter, symbolic
from course_lib.memory.measurement import flop_counter
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
        adam = torch.optim.Adam(decoder.parameters(), fused=True)  # one operator; no peak here is in this phase
        _give_gradients(decoder)
        adam.step()  # makes its state
        decoder.zero_grad()
        with flop_counter() as counter, MemoryMeter(decoder, adam) as meter:
            decoder.loss(tokens).backward()
            adam.step()
    return Arm(meter.peak_bytes, counter.get_total_flops())


def peak_with_gradients(decoder: Decoder) -> int:
    """Peak of forward and backward on 8 sequences, where the gradients are there from the start."""
    vocabulary, sequence = len(decoder.tokens.weight), len(decoder.positions.weight)
    tokens = random_tokens(8, sequence, vocabulary)
    _give_gradients(decoder)
    with MemoryMeter(decoder) as meter:
        decoder.loss(tokens).backward()
    return meter.peak_bytes


def _give_gradients(decoder: Decoder) -> None:
    for parameter in decoder.parameters():
        parameter.grad = torch.zeros_like(parameter)


_OTHER = "#F8C9AA"  # of what is measured, and not what the figure is about


def draw_which_block(alone: Mapping[int | None, int], whole: Mapping[int | None, int]) -> "Figure":
    """What one checkpoint saves of the peak, by the layer that it is around.

    Args:
        alone: of eight layers and a mean of squares: layer with the checkpoint, or None -> bytes; 0 and 7 among them.
        whole: the same of the decoder, with its head and loss.
    """
    networks = {"Eight layers alone": alone, "The decoder, with its head": whole}
    said = "{name}: {none} MB without a checkpoint; {first} MB less around layer 0, {last} MB less around layer 7."
    alt = [
        text(
            said,
            name=text(name),
            none=_mb(peaks[None]),
            first=_mb(peaks[None] - peaks[0]),
            last=_mb(peaks[None] - peaks[7]),
        )
        for name, peaks in networks.items()
    ]
    title = "Of eight layers alone the last saves nothing; what counts is the moment of the peak"
    drawn, panels = figure(title, columns=2, height=3.0, sharey=True, alt=listed(alt, " "))
    for ax, (name, peaks) in zip(panels, networks.items(), strict=True):
        layers = [layer for layer in peaks if layer is not None]
        saved = [(peaks[None] - peaks[layer]) / 1e6 for layer in layers]
        colors = [COLORS["measured"] if layer == 7 else _OTHER for layer in layers]
        ax.bar(layers, saved, color=colors, width=0.8)
        for layer, less in zip(layers, saved, strict=True):
            ax.text(layer, max(less, 0) + 0.4, f"{less + 0.0:.1f}".replace("-0.0", "0.0"), ha="center", fontsize=8)
        ax.set(xticks=layers, xlabel=text("layer with the checkpoint"), ylim=(-0.5, 24), xlim=(-0.6, 7.6))
        ax.set_title(text("{name}: {peak} MB", name=text(name), peak=_mb(peaks[None])))
    panels[0].set_ylabel(text("saved of the peak, MB"))
    return shown_once(drawn)


#: Where the name of each policy stands beside its point: points to the right and up, and its side.
_PLACES = {"each layer": (-8, 2, "right")}


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
    """CPU seconds of forward and backward on 4 sequences, ten turns, beside FLOPs; both against the first row."""
    tokens, seconds = random_tokens(4, 128, 2048), {name: [] for name in decoders}
    for name, decoder in 10 * list(decoders.items()):
        start = process_time()  # other programs on the machine do not count
        decoder.loss(tokens).backward()
        seconds[name].append(process_time() - start)
    first = next(iter(decoders))
    rows = []
    for name, took in seconds.items():
        ratios = sorted(one / plain for one, plain in zip(took, seconds[first], strict=True))  # turn by turn
        spread = f"{median(ratios):.2f} ({ratios[0]:.2f} – {ratios[-1]:.2f})"
        rows.append((name, round(arms[name].flops / arms[first].flops, 3), round(median(took), 2), spread))
    return table(["policy", "FLOPs of plain", "CPU seconds", "seconds of plain: median (range)"], rows)


def _mb(count: int) -> str:
    return f"{count / 1e6:.1f}"
