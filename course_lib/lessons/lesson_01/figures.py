"""Tables and figures of lesson 01, an Adam for bf16, and LoRA adapters."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from course_lib.memory import (
    MemoryMeter,
    SavedTensors,
    saved_tensors,
    symbolic,
)
from course_lib.models import Decoder, DecoderLayer, random_tokens
from course_lib.teaching import (
    COLORS,
    Table,
    claims,
    figure,
    predicted_and_measured,
    table,
    text,
)
from course_lib.teaching.figures import shown_once
from course_lib.teaching.marks import label_axes, note, stacked_bars, write
from course_lib.teaching.tables import NumberText

from .claims import CLAIMS
from .exercises import WEIGHTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_P, _REST = "#009988", "#555555"  # P, which grows with s², and all other activations

_ROWS = {  # (operator, argument or width of the last dimension) -> row of the formula
    "NativeLayerNormBackward0": {
        "input": "`norms`",
        "result1": "`statistics`",
        "result2": "`statistics`",
    },
    "SoftmaxBackward0": {"result": "`probabilities`"},
    "GeluBackward0": {"self": "`feed-forward`"},
}


# Names of the saved tensors in the lesson's eight lines of a layer, in the order of the list.
_TENSORS = ("x", "", "", "y", "k.mT", "q", "P", "v", "P", "P @ v", "x", "", "", "z", "u", "gelu(u)")


def formula_rows(kept: SavedTensors) -> Table:
    """Return a table of the 16 tensors that a decoder layer saves for backward.

    Each row has the operator that saves the tensor, the tensor's shape, its bytes, and its name in
    the lesson's code. The last column is the term of the lesson's memory formula that counts the
    tensor, such as "attention".

    Args:
        kept: Result of `saved_tensors` for the layer.
    """
    shown, after_attention = [], False
    for row, tensor in zip(kept, _TENSORS, strict=True):
        name = _ROWS.get(row.operator, {}).get(row.argument, "`attention`")
        after_attention |= name == "`norms`" and bool(shown)
        if name == "`attention`" and after_attention:
            name = "`feed-forward`"
        if row.shared_with is not None:
            name, count = (
                text("seen before, in row {number}", number=row.shared_with),
                NumberText("–"),
            )
        else:
            count = NumberText(f"{row.bytes:,}")
        shape = " × ".join(map(str, row.shape))
        code = f"`{tensor}`" if tensor else "–"
        shown.append(
            (len(shown), f"`{row.operator}`", f"`{row.argument}`", shape, count, code, name)
        )
    return table(
        ["#", "operator", "argument", "shape", "bytes", "tensor", "row of the formula"], shown
    )


def parts_of_the_peak(meter: MemoryMeter, one_layer: Mapping[str, int]) -> Table:
    """Return a table of the parts of a training step's peak, in bytes.

    Each row also has the numbers of the lessons whose techniques reduce this part.

    Args:
        meter: Meter that has measured the decoder's step.
        one_layer: Dict from the kind of tensor, such as "attention", to the bytes that one layer
            saves for backward.
    """
    peak, p, logits = meter.at_peak(), one_layer["probabilities"], 4 * 8 * 128 * 2048
    layers = 8 * sum(one_layer.values())
    parts = [
        ("parameters", peak["parameter"], "08"),
        ("optimizer state", peak["optimizer"], "04, 08"),
        ("eight layers without P", layers - 8 * p, "02, 03, 04, 05"),
        ("P of eight layers", 8 * p, "02, 05, 06"),
        ("three tensors of the logits' size", 3 * logits, "02, 05"),
        ("last norm, and the head's input", peak["activation"] - layers - logits, "02, 05"),
        ("loss and its gradient", peak["temporary"] - 2 * logits, "–"),
    ]
    return table(
        ["part of the peak", "bytes", "lesson"],
        [*parts, ("peak", sum(part[1] for part in parts), "")],
    )


def draw_around_the_peak(meter: MemoryMeter, unit_bytes: int, operators: int = 8) -> "Figure":
    """Draw live activations and temporary tensors at the operators around a training step's peak.

    Activations that stay live during all of these operators are left out.

    Args:
        meter: Meter that has measured the step.
        unit_bytes: Size of one of the tensors that form the peak. Lines are drawn at one, two and
            three times this size.
        operators: Number of operators to show. Operators that change the live bytes by less than an
            eighth of `unit_bytes` are skipped.
    """
    steps = list(meter.timeline)
    peak = max(range(len(steps)), key=lambda i: steps[i].live_bytes)
    changes = [after.live_bytes - before.live_bytes for before, after in pairwise(steps)]
    moved = [i for i, change in enumerate(changes, 1) if abs(change) >= unit_bytes // 8]
    first = max(0, moved.index(peak) - operators // 2)
    chosen = [steps[i] for i in moved[first : first + operators]]

    drawn, ax = figure("At the peak, three tensors have the logits' size", height=3.0)
    floor = min(step.bytes["activation"] for step in chosen)
    bars = {
        n: {**step.bytes, "activation": step.bytes["activation"] - floor}
        for n, step in enumerate(chosen)
    }
    ends = stacked_bars(ax, bars, ("activation", "temporary"), 0.8, upright=True)
    for height in (unit_bytes / 1e6, 2 * unit_bytes / 1e6, 3 * unit_bytes / 1e6):
        ax.axhline(height, color="#888888", linewidth=0.8, linestyle="--", zorder=0)
    at, size = chosen.index(steps[peak]), f"{meter.peak_bytes / 1e6:.1f}"
    words = text("peak: {size} MB", size=size)
    note(ax, words, (at, ends[at]), (0, 4), ha="center", va="baseline", fontsize=9)
    names = [step.operator.rpartition(".")[0] for step in chosen]
    ax.set_xticks(range(len(chosen)), names, rotation=28, ha="right", fontsize=8)
    label_axes(ax, y="other live bytes (MB)", ylim=(0, 1.18 * max(ends)))
    ax.legend(loc="upper left")
    return shown_once(drawn)


def _saved_at(length: int) -> tuple[float, float]:
    """Return the MB that a decoder layer saves, and the MB of its attention probabilities P."""
    with symbolic():
        kept = saved_tensors(DecoderLayer(256, 8), torch.randn(8, length, 256))
    p = max(row.bytes for row in kept if row.operator == "SoftmaxBackward0")
    return kept.total_bytes / 1e6, p / 1e6


def draw_lengths(formula: Callable[..., Mapping[str, int]], guess: float | None = None) -> "Figure":
    """Draw the bytes that a decoder layer saves for backward against the sequence length.

    The lines are computed by the learner's formula. The points are measured.

    Args:
        formula: Function of batch size, sequence length, hidden size and number of heads. It
            returns a dict from the kind of tensor, such as "probabilities", to bytes.
        guess: The learner's guess of the sequence length above which the attention probabilities
            need more bytes than all other saved tensors. None draws no guess.
    """
    lengths = (128, 256, 512, 768, 1024)
    layer_mb, p_mb = zip(*map(_saved_at, lengths), strict=True)
    drawn, ax = figure("From 512 tokens on, P is larger than all the rest", height=3.2)
    top = 1.08 * layer_mb[-1]
    label_axes(ax, "sequence length s (tokens)", "saved by one layer (MB)", ylim=(0, top))
    ax.set_xlim(0, 1.17 * lengths[-1])
    marks = {512: "16 h / a"} if guess is None else {512: "16 h / a", guess: "your guess"}
    for number, (length, name) in enumerate(marks.items()):
        ax.axvline(length, color="#888888", linewidth=0.8, linestyle=("--", ":")[number])
        look = {"ha": "left", "va": "top", "color": "#555555"}
        write(ax, length + 6, (0.97 - 0.09 * number) * top, name, **look)

    def predict(length: int, *, p: bool, rest: bool) -> float:
        rows = formula(8, length, 256, 8)
        return sum(rows[row] for row in rows if (p if row == "probabilities" else rest)) / 1e6

    rest_mb = [layer - part for layer, part in zip(layer_mb, p_mb, strict=True)]
    for measured, name, color, p, rest in (
        (layer_mb, "the layer", COLORS["measured"], True, True),
        (p_mb, "P", _P, True, False),
        (rest_mb, "the rest", _REST, False, True),
    ):
        line = partial(predict, p=p, rest=rest)
        predicted_and_measured(ax, lengths, line, measured, name, color=color)
    return shown_once(drawn)


def peak_and_sum(meter: MemoryMeter, logits_bytes: int) -> tuple[float, str, float]:
    """Return a training step's peak, the logits' share of it, and a naive estimate of the peak.

    Args:
        meter: Meter that has measured the step.
        logits_bytes: Sum of the bytes of all tensors that are live at the peak and as large as the
            logits.

    Returns:
        The peak in MB, the share as text such as "30%", and the estimate `sum_of_kinds` in MB.
    """
    share = f"{logits_bytes / meter.peak_bytes:.0%}"
    return round(meter.peak_bytes / 1e6, 1), share, round(sum_of_kinds(meter) / 1e6, 1)


def sum_of_kinds(meter: MemoryMeter) -> int:
    """Return a naive estimate of a training step's peak, in bytes: the sum of four kinds of memory.

    The sum adds the most bytes of activations during the step to the bytes of weights, gradients
    and optimizer state after the step. These bytes are not all live at the same time.
    """
    return _state_bytes(meter) + int(meter.series()["activation"].max())


def _state_bytes(meter: MemoryMeter) -> int:
    """Return the bytes of weights, gradients and optimizer state after a step."""
    return sum(meter.timeline[-1].bytes[kind] for kind in ("parameter", "gradient", "optimizer"))


def under_autocast(make_decoder: Callable[[], Decoder]) -> tuple[MemoryMeter, int]:
    """Measure a training step under autocast in bf16.

    Many CPUs are slow in bf16, so the step runs on symbolic tensors, which have shapes but no
    values.

    Args:
        make_decoder: Function that returns a new decoder.

    Returns:
        The meter that has measured the step, and the bytes of weights, gradients and optimizer
        state after the step.
    """
    with symbolic():
        decoder, tokens = make_decoder(), random_tokens(8, 128, 2048)
        adam = torch.optim.Adam(decoder.parameters())
        for _ in range(2):  # Adam creates its state in the first step
            decoder.zero_grad()
            with MemoryMeter(decoder, adam) as meter:
                with torch.autocast("cpu", torch.bfloat16):
                    loss = decoder.loss(tokens)
                loss.backward()
                adam.step()
    return meter, _state_bytes(meter)


class MixedAdam:
    """Adam for a model in bf16, with master weights and moments in fp32.

    The update converts one gradient at a time to fp32, so that at most one fp32 gradient exists.
    """

    def __init__(self, model: nn.Module):
        self.pairs = [(p, torch.optim.Adam([p.detach().float()])) for p in model.parameters()]
        for _, adam in self.pairs:  # creates the state before the first step
            (master,) = adam.param_groups[0]["params"]
            moments = {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
            adam.state[master] = {"step": torch.tensor(1.0, dtype=torch.float32), **moments}

    @torch.no_grad()
    def step(self) -> None:
        for parameter, adam in self.pairs:
            (master,) = adam.param_groups[0]["params"]
            master.grad = parameter.grad.float()
            adam.step()
            parameter.copy_(master)
            master.grad = None


class _Adapter(nn.Module):
    """A frozen Linear plus a trained matrix product of two thin matrices (LoRA).

    Source: Hu et al. 2021, arXiv:2106.09685.
    """

    def __init__(self, frozen: nn.Linear, rank: int):
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


def with_adapters(decoder: Decoder, rank: int) -> Decoder:
    """Freeze a decoder, and add LoRA adapters to the two linear layers of each attention module.

    Args:
        decoder: The decoder, which is changed and returned.
        rank: Rank of the adapters.
    """
    decoder.requires_grad_(False)
    for layer in decoder.layers:
        layer.attention.qkv = _Adapter(layer.attention.qkv, rank)
        layer.attention.out = _Adapter(layer.attention.out, rank)
    return decoder


def claims_table(meter: MemoryMeter, autocast: MemoryMeter, stays: int) -> Table:
    """Return a table of claims about training memory, each with the number that tests it.

    Args:
        meter: Meter that has measured the baseline's step.
        autocast: Meter that has measured the same step with autocast.
        stays: Bytes of weights, gradients and optimizer state after the step with autocast.
    """
    added = sum_of_kinds(meter)
    peak = f"{meter.peak_bytes / 1e6:.1f} MB"
    return claims.claims_table(
        CLAIMS,
        text("{sum} against {peak}", sum=f"{added / 1e6:.1f} MB", peak=peak),
        f"{peak} → {autocast.peak_bytes / 1e6:.1f} MB",
        text("{count} bytes per parameter", count=f"{stays / WEIGHTS:.1f}"),
    )
