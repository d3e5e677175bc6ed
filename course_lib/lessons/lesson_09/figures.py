"""Figures of lesson 09: contents of each peak, two loss curves, and models of other kinds."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from course_lib.budget import Estimate, Recipe, estimate, run
from course_lib.configs import model_from, read_config
from course_lib.labels import join_labels
from course_lib.memory import CATEGORIES
from course_lib.models import random_tokens
from course_lib.teaching import COLORS, Table, claims, figure, predictions, table, text
from course_lib.teaching.figures import shown_once
from course_lib.teaching.marks import background, label_axes, name_rows, note, stacked_bars

from .claims import CLAIMS
from .exercises import CONFIG_OF_LLAMA_3_8B

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_techniques(found: Mapping[str, Estimate], budget_bytes: int) -> "Figure":
    """Draw the peak of each recipe as a stacked bar, with the budget as a line.

    Args:
        found: Dict from a label to an estimate.
        budget_bytes: Budget in bytes.
    """
    title = "Alone, no technique fits the budget, but the three together do"
    return _draw_peaks(found, budget_bytes, title)


def draw_lora(found: Mapping[str, Estimate], budget_bytes: int) -> "Figure":
    """Draw the peaks of a model with and without adapters as stacked bars."""
    title = "LoRA removes the optimizer state, but nearly all activations remain"
    return _draw_peaks(found, budget_bytes, title)


def _draw_peaks(found: Mapping[str, Estimate], budget_bytes: int, title: str) -> "Figure":
    peaks = {name: each.peak_bytes / 1e6 for name, each in found.items()}
    words = [text("{name} {peak} MB", name=name, peak=f"{p:.1f}") for name, p in peaks.items()]
    alt = text("Peaks: {peaks}.", peaks=join_labels(words, "; "))
    drawn, ax = figure(title, height=0.9 + 0.42 * len(found), alt=alt)
    bars = {place: each.at_peak for place, each in enumerate(found.values())}
    least = max(peaks.values()) * 1e6 / 500
    visible = [c for c in CATEGORIES if max(bar.get(c, 0) for bar in bars.values()) > least]
    stacked_bars(ax, bars, visible, 0.62)
    for place, peak in enumerate(peaks.values()):
        # the background covers the budget's line
        note(ax, f"{peak:.1f}", (peak, place), (4, 0), bbox=background("white"))
    budget = budget_bytes / 1e6
    ax.axvline(budget, color="black", linestyle="--", linewidth=1, zorder=1.5)
    note(ax, "budget", (budget, len(found) - 1), (22, 0))  # next to the last bar's number
    name_rows(ax, list(found))
    label_axes(ax, "live at the peak (MB)", xlim=(0, 1.14 * max(peaks.values())))
    drawn.legend(loc="outside lower center", ncols=5, frameon=False)
    return shown_once(drawn)


def draw_losses(losses: Mapping[str, Sequence[float]]) -> "Figure":
    """Draw the losses of the same training steps by two recipes.

    Args:
        losses: Dict from a label to the mean loss of each step. The second curve is drawn over the
            first.
    """
    (plain, first), (other, second) = losses.items()
    apart = max(abs(a - b) for a, b in zip(first, second, strict=True))
    # Rounding differs between CPUs, by some powers of ten, so a bound for all of them is shown.
    bound = 1e-5 if apart < 1e-5 else 10.0 ** math.floor(math.log10(apart) + 1)
    alt = "The two curves differ by less than {apart} over {steps} steps."
    alt = text(alt, steps=len(first), apart=f"{bound:.0e}")
    title = "The loss curve is the same with less than a third of the memory"
    drawn, ax = figure(title, height=2.9, alt=alt)
    steps = range(1, len(first) + 1)
    ax.plot(steps, first, color=COLORS["predicted"], linewidth=5, alpha=0.35, label=text(plain))
    ax.plot(steps, second, "o-", color=COLORS["measured"], markersize=4, label=text(other))
    label_axes(ax, "step", "loss per token", ylim=(0, 1.15 * max(first)))
    ax.set_xticks(steps if len(first) < 12 else [1, len(first)])
    ax.legend()
    return shown_once(drawn)


#: Kinds of models that transformers builds -> sizes, of three structures.
ARCHITECTURES: Mapping[str, Mapping[str, int]] = {
    "roformer": {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "embedding_size": 64,
    },
    "pegasus": {
        "d_model": 64,
        "encoder_layers": 3,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
    },
    "fnet": {"hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 128},
}
_VOCABULARY, _LENGTH = 97, 32


def other_architectures() -> Table:
    """Show a table of predicted and measured peaks of three small models with checkpoints."""
    import transformers

    rows = []
    for kind, sizes in ARCHITECTURES.items():
        settings = transformers.AutoConfig.for_model(
            kind, **sizes, vocab_size=_VOCABULARY, max_position_embeddings=_LENGTH
        )
        family = getattr(
            transformers,
            "AutoModelForSeq2SeqLM" if settings.is_encoder_decoder else "AutoModelForMaskedLM",
        )
        make: Callable[[], nn.Module] = partial(family.from_config, settings)
        given = make, _labelled_image, Recipe(attention=None, checkpoint="layers")
        guess, taken = estimate(*given), run(*given)
        rows.append((type(make()).__name__, guess.peak_bytes, taken.meter.peak_bytes))
    return predictions(rows, unit="bytes")


def update_in_backward() -> Table:
    """Show the peaks of 8 Llama 3 8B layers with the update after or inside backward."""
    config = {**read_config(CONFIG_OF_LLAMA_3_8B), "num_hidden_layers": 8}
    make_model = partial(model_from, config, sequence=4096)
    given = make_model, partial(random_tokens, 1, 4096, config["vocab_size"])
    rows = []
    for kind in ("cpu", "cuda"):
        recipes = [Recipe("bf16", attention="flash", in_backward=each) for each in (False, True)]
        peaks = [estimate(*given, recipe, kind=kind).peak_bytes / 1e9 for recipe in recipes]
        rows.append((f"`{kind}`", *(f"{peak:.1f}" for peak in peaks)))
    return table(["kind", "update at the end (GB)", "update in backward (GB)"], rows)


def _labelled_image() -> dict[str, Any]:
    tokens = random_tokens(4, _LENGTH, _VOCABULARY)[:, :_LENGTH].contiguous()
    return {"input_ids": tokens, "labels": tokens.clone()}


def what_you_may_have_read(plain: Estimate, kept: Estimate, flash: Estimate) -> Table:
    """Return a table of the lesson's claims, and of the numbers that test them.

    Args:
        plain: Estimate of the baseline.
        kept: Estimate with checkpoints.
        flash: Estimate with checkpoints and the course's flash attention.
    """
    return claims.what_you_may_have_read(
        CLAIMS,
        f"{kept.flops / plain.flops:.2f} ×",
        f"{plain.peak_bytes / plain.at_peak['parameter']:.2f} ×",
        f"{kept.peak_bytes / 1e6:.1f}; {flash.peak_bytes / 1e6:.1f}",
    )
