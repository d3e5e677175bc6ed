"""Measurements of checkpoint policies in lesson 02, in bytes, FLOPs and seconds, and figures."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from time import process_time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from course_lib.checkpoint import checkpoint_blocks
from course_lib.labels import join_labels
from course_lib.memory import MemoryMeter, symbolic
from course_lib.models import Decoder, random_tokens
from course_lib.teaching import COLORS, Table, claims, figure, text
from course_lib.teaching.figures import shown_once
from course_lib.teaching.marks import background, box, clauses, label_axes, note, write

from .claims import CLAIMS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class StepCost(NamedTuple):
    """Peak and FLOPs of a training step.

    Attributes:
        peak_bytes: Most bytes that are live at once.
        flops: FLOPs of the step.
    """

    peak_bytes: int
    flops: int


def measured_step(make: Callable[..., Decoder], **options: Any) -> StepCost:
    """Measure a decoder's second training step with Adam, on 8 sequences of 128 tokens.

    No gradients exist when the step begins. The step runs on symbolic tensors, which have no
    values.

    Args:
        make: Function that returns a new decoder.
        options: Arguments of `make`.
    """
    with symbolic():
        decoder, tokens = make(**options), random_tokens(8, 128, 2048)
        # A fused update is a single operator. None of the peaks here is in the optimizer step.
        adam = torch.optim.Adam(decoder.parameters(), fused=True)
        _give_gradients(decoder)
        adam.step()  # creates its state
        decoder.zero_grad()
        with MemoryMeter(decoder, adam) as meter:
            decoder.loss(tokens).backward()
            adam.step()
    return StepCost(meter.peak_bytes, meter.flops)


def metered_step(decoder: Decoder) -> MemoryMeter:
    """Run two training steps with Adam, and measure the memory of the second one.

    A step has 8 sequences of 128 tokens. No gradients exist when the second step begins.

    Args:
        decoder: Decoder to train, with a vocabulary of 2048 words.

    Returns:
        The meter that has measured the second step.
    """
    tokens = random_tokens(batch=8, sequence=128, vocabulary=2048)
    adam = torch.optim.Adam(decoder.parameters())
    _give_gradients(decoder)
    adam.step()  # creates its state
    decoder.zero_grad()
    with MemoryMeter(decoder, adam) as meter:
        decoder.loss(tokens).backward()
        adam.step()
    return meter


def head_peak(run: Callable[..., Any], chunk: int) -> float:
    """Return the peak of an output head with its loss, relative to the size of the head's weight.

    The result is the peak in bytes divided by the bytes of the weight. There are 1024 tokens, a
    hidden size of 256 and a vocabulary of 32,000 words.

    Args:
        run: Function that runs forward and backward, `run(hidden, weight, targets, chunk)`.
        chunk: Number of tokens per chunk.
    """
    with symbolic():
        hidden = torch.randn(1024, 256, requires_grad=True)
        weight = torch.nn.Parameter(torch.randn(32_000, 256))
        with MemoryMeter() as meter:
            run(hidden, weight, torch.randint(32_000, (1024,)), chunk)
    return round(meter.peak_bytes / weight.nbytes, 2)


def peak_with_checkpoint(layer: int | None, *, layers: int = 8, head: bool = True) -> int:
    """Return the peak in bytes of a forward and backward pass with a checkpoint around one layer.

    Args:
        layer: Number of the layer with the checkpoint, or None for no checkpoint.
        layers: Number of layers.
        head: Whether the network has an embedding, an output head and a loss. Otherwise the network
            consists of layers only, and its loss is the mean of the squares of the output.
    """
    with symbolic():
        decoder = Decoder(vocabulary=2048, hidden=256, heads=8, layers=layers, sequence=128)
        alone, x = torch.nn.Sequential(*decoder.layers), torch.randn(8, 128, 256)
        if layer is not None:
            checkpoint_blocks(decoder, f"layers.{layer}")
        with MemoryMeter(decoder) as meter:
            loss = decoder.loss(random_tokens(8, 128, 2048)) if head else alone(x).square().mean()
            loss.backward()
    return meter.peak_bytes


def one_backward_transposed(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> None:
    """Compute a loss in checkpointed chunks with transposed logits, and run one backward pass.

    The logits of a chunk are `(weight @ rows.T).T`. The chunk's gradient of the weight is therefore
    not a transposed view, so autograd can add the gradients of all chunks in place.

    Args:
        hidden: Output of the last layer, of shape (tokens, hidden size).
        weight: Weight of the output head, of shape (vocabulary, hidden size).
        targets: Next token of each token; -100 is ignored.
        chunk: Number of tokens per chunk.
    """

    def loss(rows: Tensor, answers: Tensor) -> Tensor:
        return cross_entropy((weight @ rows.T).T, answers, reduction="sum")

    chunks = zip(hidden.split(chunk), targets.split(chunk), strict=True)
    total = sum(checkpoint(loss, *each, use_reentrant=False) for each in chunks)
    (total / (targets != -100).sum()).backward()


def peak_of_groups(layers: int, group: int) -> float:
    """Return the peak in MB of forward and backward if each checkpoint has several layers.

    Gradients are allocated before the forward pass. Hidden size, vocabulary and sequence length are
    a quarter of those of the course's decoder, so that 48 layers run quickly.

    Args:
        layers: Number of layers.
        group: Number of layers per checkpoint.
    """
    decoder = Decoder(vocabulary=512, hidden=64, heads=8, layers=layers, sequence=32)
    parts = [decoder.layers[i : i + group] for i in range(0, layers, group)]
    decoder.layers = torch.nn.ModuleList(torch.nn.Sequential(*part) for part in parts)
    checkpoint_blocks(decoder, "layers.*", preserve_rng_state=False)
    tokens = random_tokens(8, 32, 512)
    _give_gradients(decoder)
    with MemoryMeter(decoder) as meter:
        decoder.loss(tokens).backward()
    return round(meter.peak_bytes / 1e6, 2)


def _give_gradients(decoder: Decoder) -> None:
    for parameter in decoder.parameters():
        parameter.grad = torch.zeros_like(parameter)


#: Kind of event -> text in its box, and the color of the box, as in lesson 03's schedules.
_RUNS = {
    "forward": ("forward {name}", "#224488"),
    "again": ("{name} again", "#228833"),
    "backward": ("backward {name}", "#EE6677"),
}


def draw_order(heard: Sequence[str]) -> "Figure":
    """Draw the order of forward and backward passes of checkpointed blocks, with one row per block.

    Repeated forward passes are hatched.

    Args:
        heard: Events in order. "forward a" means that block a runs. "backward a done" means that
            the gradient of block a has been computed.
    """
    events = [tuple(event.split()[:2]) for event in heard]
    names = list(dict.fromkeys(name for _, name in events))
    title = "After three forwards, backward runs each block again just before it needs it"
    drawn, ax = figure(title, height=0.6 * len(names) + 0.9)
    drawn.course_larger = 1.0  # larger words would not fit into their boxes
    started, alt = {}, []
    for time, (kind, name) in enumerate(events):
        row, again = names.index(name), kind == "forward" and name in started
        if kind == "backward":  # the checkpoint kept its input until here
            kept = {"facecolor": _RUNS["forward"][1], "alpha": 0.3, "zorder": 0.5}
            since = started[name] + 1
            box(ax, (since, row - 0.07), time - since, 0.14, **kept)
        started.setdefault(name, time)
        words, color = _RUNS["again" if again else kind]
        hatch = "///" if again else None
        look = {"facecolor": color, "edgecolor": "white", "hatch": hatch}
        box(ax, (time + 0.03, row - 0.35), 0.94, 0.7, **look)
        alt.append(text(words, name=name))
        look = {"color": "white", "fontsize": 8.5, "bbox": background(color, 1.5)}
        write(ax, time + 0.5, row, alt[-1], **look)
    write(ax, len(events) / 2, 0.12, "the input is kept", va="bottom", fontsize=8.5)
    label_axes(ax, "time", xlim=(0, len(events)), ylim=(-0.5, len(names) - 0.5), xticks=[])
    ax.set_yticks(range(len(names)), names)
    ax.grid(visible=False)
    drawn.course_alt = text("In this order: {events}.", events=join_labels(alt, "; "))
    return shown_once(drawn)


_OTHER = "#F8C9AA"  # for measurements that are not the subject of the figure
_DOTTED = {"facecolor": "white", "edgecolor": "#888888", "linestyle": ":"}
_HATCHED = {"facecolor": COLORS["measured"], "edgecolor": "white", "hatch": "///"}


def draw_which_block(alone: Mapping[int | None, int], whole: Mapping[int | None, int]) -> "Figure":
    """Draw how much a checkpoint around one layer lowers the peak, as one bar per layer.

    Args:
        alone: Peaks in bytes of eight layers without an output head, as a dict from the number of
            the checkpointed layer to the peak. The key None means no checkpoint. The keys None, 0
            and 7 are required.
        whole: Peaks of the decoder with its output head, as a dict of the same form.
    """
    networks = {"Eight layers alone": alone, "The decoder, with its head": whole}
    title = (
        "A checkpoint around the last of eight layers saves nothing, because of when the peak"
        " occurs"
    )
    description = (
        "{name}: {none} MB without a checkpoint; {first} MB less around layer 0, {last} MB less"
        " around layer 7."
    )
    drawn, panels = figure(title, columns=2, height=3.2, sharey=True)
    alt = []
    for ax, (name, peaks) in zip(panels, networks.items(), strict=True):
        none, saved = peaks[None], {n: peaks[None] - peaks[n] for n in peaks if n is not None}
        ends = {"first": _mb(saved[0]), "last": _mb(saved[7])}
        alt.append(text(description, name=name, none=_mb(none), **ends))
        for layer, less in saved.items():
            color = COLORS["measured"] if layer == 7 else _OTHER
            ax.bar(layer, less / 1e6, color=color, width=0.8)
            write(ax, layer, max(less / 1e6, 0) + 0.4, _mb(less), va="baseline", fontsize=8)
            # a checkpoint saves nothing if its layer is recomputed before the baseline's peak
            look = _HATCHED if less <= 0 else _DOTTED
            ax.bar(layer, -2.6, 0.8, -0.8, **look)
            write(ax, layer, -2.1, f"{layer}", bbox=background(look["facecolor"]))
        label_axes(ax, "layer with the checkpoint", xticks=[], ylim=(-4, 24), xlim=(-0.6, 7.6))
        ax.set_title(text("{name}: {peak} MB", name=name, peak=_mb(none)))
    panels[0].set_ylabel(text("reduction of the peak (MB)"))
    below = "dotted: not in memory when the baseline reaches its peak; hatched: recomputed by then"
    drawn.supxlabel(text(below), fontsize=9)
    drawn.course_alt = join_labels(alt, " ")
    return shown_once(drawn)


#: Name of a policy -> position of the name relative to its point, in points, and its alignment.
_PLACES = {
    "each layer": (-8, 2, "right"),
    "every second product kept": (-8, -4, "right"),
    "eight layers per checkpoint": (0, -16, "center"),
}


def draw_policies(variants: Mapping[str, Any]) -> "Figure":
    """Draw the peak and the FLOPs of checkpointing policies as points.

    The peaks are in MB. The FLOPs are relative to the first policy.

    Args:
        variants: Dict from the name of a policy to its costs, an object with `peak_bytes` and
            `flops`.
    """
    plain = next(iter(variants.values()))
    costs = {name: (v.peak_bytes / 1e6, v.flops / plain.flops) for name, v in variants.items()}
    alt = clauses(
        "{name}: {peak} MB, {times} times the FLOPs",
        [{"name": n, "peak": f"{x:.1f}", "times": f"{y:.3f}"} for n, (x, y) in costs.items()],
    )
    title = (
        "The lower left would be best, but is empty. Here groups of layers are worse on both axes"
    )
    drawn, ax = figure(title, height=3.2, alt=alt)
    label_axes(ax, "peak (MB)", "FLOPs (× baseline)", xlim=(70, 320), ylim=(0.96, 1.36))
    ax.grid(True, axis="x")
    for name, point in costs.items():
        x, y, side = _PLACES.get(name, (8, 4, "left"))
        ax.plot(*point, "o", color=COLORS["measured"])
        note(ax, name, point, (x, y), ha=side, va="baseline")
    drawn.course_larger = 1.3  # larger names would overlap the next point
    return shown_once(drawn)


def seconds_beside_flops(decoders: Mapping[str, Decoder], variants: Mapping[str, Any]) -> "Figure":
    """Draw the FLOPs and the CPU seconds of a forward and backward pass for several decoders.

    All values are relative to the first decoder. The function measures the seconds in six rounds,
    on 2 sequences.

    Args:
        decoders: Dict from the name of a checkpointing policy to a decoder that uses it.
        variants: Dict from the name of a policy to its costs, an object with `flops`.
    """
    tokens, seconds = random_tokens(2, 128, 2048), {name: [] for name in decoders}
    for name, decoder in 6 * list(decoders.items()):
        start = process_time()  # CPU time, so other programs are not counted
        decoder.loss(tokens).backward()
        seconds[name].append(process_time() - start)
    first = next(iter(decoders))
    flops = [variants[name].flops / variants[first].flops for name in decoders]
    ratios = [  # one ratio per round
        sorted(one / plain for one, plain in zip(took, seconds[first], strict=True))
        for took in seconds.values()
    ]
    return _draw_bars(list(decoders), flops, ratios)


def _draw_bars(
    names: Sequence[str], flops: Sequence[float], ratios: Sequence[Sequence[float]]
) -> "Figure":
    """Draw two bars per name: FLOPs, and the median and range of the ratios of seconds.

    The ratios of a name are in ascending order.
    """
    title = "FLOPs count matrix products only. The seconds are those of this machine"
    drawn, ax = figure(title, height=3.0)
    looks = {"ecolor": "#444444", "capsize": 3, "elinewidth": 1}
    rows, bars = [], ()
    for x, (name, f, r) in enumerate(zip(names, flops, ratios, strict=True)):
        m = median(r)
        spread = {"yerr": [[m - r[0]], [r[-1] - m]], "error_kw": looks}
        bars = (
            ax.bar(x - 0.2, f, 0.38, color="#4477AA"),
            ax.bar(x + 0.2, m, 0.38, color=COLORS["measured"], **spread),
        )
        numbers = {"flops": f, "seconds": m, "least": r[0], "most": r[-1]}
        rows.append({"name": name} | {key: f"{number:.2f}" for key, number in numbers.items()})
        for shift, key in ((-0.2, "flops"), (0.2, "seconds")):
            # at the foot of the bars, where no line shows the range
            write(ax, x + shift, 0.04, rows[-1][key], va="bottom", color="white")
    ax.set_xticks(range(len(names)), [text(name) for name in names])
    label_axes(ax, y="ratio to the baseline", ylim=(0, None))
    labels = [text("FLOPs"), text("CPU seconds (median and range of six rounds)")]
    ax.legend(bars, labels, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    alt = "{name}: {flops} times the FLOPs, {seconds} times the seconds ({least} to {most})"
    drawn.course_alt = clauses(alt, rows)
    return shown_once(drawn)


def _mb(count: int) -> str:
    return f"{round(count / 1e6, 1) + 0.0:.1f}"  # + 0.0 removes the minus of -0.0


def claims_table(variants: Mapping[str, Any], alone: Mapping[int | None, int]) -> Table:
    """Return a table of claims about checkpoints, each with the measured number that tests it.

    Args:
        variants: Dict from the name of a checkpointing policy to its costs, an object with `flops`.
            The keys "plain", "each layer" and "products kept" are required.
        alone: Peaks in bytes of eight layers without an output head, as a dict from the number of
            the checkpointed layer to the peak. The key None means no checkpoint. The keys None, 0
            and 7 are required.
    """
    plain, layer, kept = (variants[name].flops for name in ("plain", "each layer", "products kept"))
    head = 3 * 2 * 1024 * 256 * 2048  # matrix products of the head, which no policy recomputes
    whole = plain + (plain - head) // 3  # each layer without early stop: one more forward of all
    peaks = " / ".join(f"{peak / 1e6:.1f}" for peak in (alone[None], alone[0], alone[7]))
    return claims.claims_table(
        CLAIMS,
        f"+{layer / plain - 1:.0%}",
        f"+{(layer - plain) / (plain - head):.0%}",
        f"−{1 - (kept - plain) / (whole - plain):.0%}; −{1 - (kept - plain) / (layer - plain):.0%}",
        text("none / first / last: {peaks} MB", peaks=peaks),
    )
