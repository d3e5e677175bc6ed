"""Lesson 07: its exercises, its claims, its pictures, and three recipes on a GPU: predicted, and as they ran."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from course_lib.budget import RATES, Estimate, Recipe, build, estimate, train_step, waterfall
from course_lib.labels import listed
from course_lib.memory import CATEGORIES, MemoryMeter
from course_lib.models import Decoder, random_tokens
from course_lib.teaching import COLORS, Claim, Table, Verdict, category_label, figure, playground, table, text
from course_lib.teaching.allocator import Allocator
from course_lib.teaching.exercises import Refused, exercise, right, wrong
from course_lib.teaching.experiments import TINY, Part, decoder_and_tokens, experiment, need_host_memory
from course_lib.teaching.figures import shown_once

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: What learners may have read.
CLAIMS = (
    Claim(
        "Accumulation always lowers the peak.",
        "checkpointed layers, then two micro-batches on top",
        "Not where activations are small already: it keeps a full set of gradients.",
        outcome="fails",
    ),
    Claim(
        "Savings add up.",
        "flash alone, checkpoints alone, both",
        "They shrink the same activations, and then something else is the peak.",
        outcome="fails",
    ),
    Claim(
        "Training 7 billion parameters with Adam takes 112 GB, 16 bytes a parameter.",
        "peak on the device, state on the host, steps in backward",
        "On one device, all at once. Somewhere the state must be, and copies take their time.",
        outcome="partly",
    ),
    Claim(
        "FlashAttention does fewer FLOPs.",
        "FLOPs of the step with flash over plain, 384 and 4096 tokens",
        "Backward computes the scores again. Fewer only where long causal sequences skip wholly masked tiles.",
        outcome="partly",
    ),
)

#: Field of a recipe -> what it says.
FIELDS = {
    "precision": "dtype of the step; `bf16` has fp32 master weights",
    "optimizer": "`adam`, `sgd`, `momentum`, `adafactor`; `adam8bit` runs where bitsandbytes is installed",
    "update": "parameters one by one (`loop`), all at once (`foreach`), in one operator (`fused`)",
    "offload_optimizer": "the fraction of the optimizer's state that lives one tier down",
    "attention": "`standard` keeps the scores' softmax, `flash` one number a row",
    "checkpoint": "what is kept of the blocks: `layers`, `selective`, `segments`, `optimal`",
    "blocks": "which blocks, by name; `None` finds them",
    "first_blocks": "so many blocks, the first ones; `None`: all",
    "segments": "how many, for `segments`",
    "schedule_bytes": "the most bytes of activations, for `optimal`",
    "offload_activations": "what is saved for backward goes one tier down",
    "min_bytes": "the smallest storage that goes down",
    "prefetch": "storages that backward fetches ahead; `None`: 1 on a CPU, 2 on CUDA",
    "in_flight": "copies down that may be under way at once; `None` likewise",
    "page_bytes": "bytes of offloaded state that are updated at once",
    "head_chunk": "tokens of the loss head at a time",
    "in_backward": "the update comes with each gradient, which then goes",
    "accumulate": "`fp32` adds up gradients of 16 bits in fp32",
    "micro_batches": "pieces of the batch",
    "ranks": "how many processes share the batch (lesson 08)",
    "shard": "how they share the rest: `ddp`, `zero1`, `zero2`, `zero3`",
}


def recipe_fields() -> Table:
    """What a recipe can say, field by field, with the plain step's value."""
    rows = [(f"`{field.name}={field.default!r}`", FIELDS[field.name]) for field in fields(Recipe)]
    return table(["field", "what it says"], rows)


# Exercises ------------------------------------------------------------------------------------------------------------


@exercise(hint="The plain step keeps the activations of 8 sequences at once. Need it?")
def check_forty_megabytes(recipe: Any) -> Verdict:
    """The small decoder within 40 MB, with no more FLOPs than plain, and nothing moved."""
    found = _that_fits(recipe, _small_decoder, _small_batch, 40_000_000)
    _moves_nothing(found)
    ratio = found.flops / estimate(_small_decoder, _small_batch, Recipe()).flops
    if ratio > 1:
        return wrong(text("It fits, but takes {ratio:.3f} times the FLOPs of the plain step.", ratio=ratio))
    message = "Right: {mb}. Pieces of the batch cost no FLOPs, and only one piece's activations are there at a time."
    return right(text(message, mb=_mb(found.peak_bytes)))


@exercise(hint="One sequence at a time is not enough: attention and layers must forget too.")
def check_fourteen_megabytes(recipe: Any) -> Verdict:
    """The small decoder within 14 MB, nothing moved."""
    found = _that_fits(recipe, _small_decoder, _small_batch, 14_000_000)
    _moves_nothing(found)
    floor = _mb(4 * found.at_peak["parameter"])
    message = "Right: {mb}. Parameters, gradients and Adam's state are {floor} of it, and no checkpoint lowers those."
    return right(text(message, mb=_mb(found.peak_bytes), floor=floor))


@exercise(
    hint=(
        "Start from your recipe for 14 MB and try `offload_optimizer` from 0 to 1. At some point, more saves nothing."
    )
)
def check_eleven_megabytes(recipe: Any) -> Verdict:
    """The small decoder within 11 MB."""
    found = _that_fits(recipe, _small_decoder, _small_batch, 11_000_000)
    message = "Right: {mb}. More of the state below gains little: each chunk of it comes up again for the update."
    return right(text(message, mb=_mb(found.peak_bytes)))


@exercise(
    hint=("The last layer is recomputed right after its forward pass. Which `checkpoint` leaves the last piece alone?")
)
def check_beats_the_lesson(recipe: Any) -> Verdict:
    """The large decoder within 270 MB, at a lower price than the lesson's recipe."""

    found, theirs = _that_fits(recipe, _large_decoder, _large_batch, 270_000_000), _of_the_lesson()
    price, yours = RATES["laptop"].seconds(theirs), RATES["laptop"].seconds(found)
    prices = f"{yours:.3f} s : {price:.3f} s"
    if yours >= price:
        return wrong(text("It fits, but is not cheaper: {prices}.", prices=prices))
    message = "Right: {mb}, {prices}. Less of the state moves."
    if found.flops < theirs.flops:
        message = (
            "Right: {mb}, {prices}. The last part runs backward right after its forward: forgetting it saves nothing."
        )
    return right(text(message, mb=_mb(found.peak_bytes), prices=prices))


@cache
def _of_the_lesson() -> Estimate:
    lesson = Recipe(attention="flash", checkpoint="layers", in_backward=True, offload_optimizer=1.0)
    return estimate(_large_decoder, _large_batch, lesson)


def _large_decoder() -> Decoder:
    return Decoder(vocabulary=8192, hidden=640, heads=40, layers=6, sequence=384)


def _large_batch() -> torch.Tensor:
    return random_tokens(2, 384, 8192)


def _small_decoder() -> Decoder:
    return Decoder(vocabulary=1024, hidden=128, heads=8, layers=2, sequence=256)


def _small_batch() -> torch.Tensor:
    return random_tokens(8, 256, 1024)


def _that_fits(recipe: Any, make_model: Callable, make_batch: Callable, budget: int) -> Estimate:
    """The estimate of a recipe that fits the budget, in fp32 with Adam."""
    if not isinstance(recipe, Recipe):
        kind = type(recipe).__name__
        raise Refused(text("A `Recipe` is wanted; this is a `{kind}`.", kind=kind))
    plain = Recipe()
    if (recipe.precision, recipe.optimizer) != (plain.precision, plain.optimizer):
        raise Refused("Precision and optimizer stay: fp32 and Adam.")
    try:
        found = estimate(make_model, make_batch, recipe)
    except Exception as error:
        raise Refused(text("It cannot be estimated: {error}.", error=error)) from None
    if found.peak_bytes > budget:
        peaks = f"{_mb(found.peak_bytes)} > {budget / 1e6:,.0f} MB"
        raise Refused(text("It does not fit: {peaks}.", peaks=peaks))
    return found


def _moves_nothing(found: Estimate) -> None:
    if found.moved_bytes:
        raise Refused(text("It fits, but moves {mb}.", mb=_mb(found.moved_bytes)))


def _mb(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


# Pictures -------------------------------------------------------------------------------------------------------------


_IN_LINES = {  # names that are too wide below a bar
    "+ state offloaded": "+ state\noffloaded",
    "micro-batches out, steps in backward": "micro-batches\nout, steps in\nbackward",
}


def waterfall_picture(
    names: Sequence[str],
    estimates: Sequence[Estimate],
    measured: Sequence[int],
    budget_bytes: int,
    *,
    title: str,
) -> "Figure":
    """From the plain step to a recipe: predicted peaks as stacked bars with their price, measured ones as points.

    Args:
        names: labels of the steps.
        estimates: of each.
        measured: peak of each, bytes.
        budget_bytes: drawn as a line.
    """
    peaks = listed(
        (
            text("{name} {peak}", name=name, peak=f"{each.peak_bytes / 1e6:,.0f}")
            for name, each in zip(names, estimates, strict=True)
        ),
        "; ",
    )
    alt = text(
        "Predicted peaks in MB: {peaks}; the budget is {budget}.", peaks=peaks, budget=f"{budget_bytes / 1e6:,.0f}"
    )
    drawn, ax = figure(title, height=4.6, alt=alt)
    shown = [_IN_LINES.get(name, name) for name in names]
    labels = {name: category_label(name) for name in CATEGORIES}
    labels |= {"measured": text("measured"), "budget": text("budget")}
    waterfall(estimates, measured=measured, budget_bytes=budget_bytes, names=shown, labels=labels, ax=ax)
    ax.grid(False)
    return shown_once(drawn)


def draw_budget(estimates: Sequence[Estimate], budget: int = 30) -> "Figure":
    """Recipes by peak and seconds, and a budget: those to its left fit, and the cheapest of them is named.

    Args:
        estimates: of `course_lib.budget.estimate`.
        budget: MB.
    """
    from matplotlib.ticker import LogLocator

    if not estimates:
        raise ValueError("estimates is empty; it takes one estimate or more")
    rates = RATES["laptop"]
    points = [(e.peak_bytes / 1e6, rates.seconds(e), e) for e in estimates]
    fitting = sorted((point for point in points if point[0] <= budget), key=lambda point: (point[1], point[0]))
    if fitting:
        seconds = f"{fitting[0][1]:.3f} s"
        title = text(
            "{budget} MB: {fitting_count} fit, the cheapest takes {seconds}",
            budget=budget,
            fitting_count=len(fitting),
            seconds=seconds,
        )
    else:
        least = min(points)[0]
        title = text("{budget} MB: none fits, the least is {least:.1f} MB", budget=budget, least=least)
    drawn, ax = figure(title, height=3.4)
    for inside, color, name in (
        (True, COLORS["measured"], text("fits")),
        (False, COLORS["input"], text("does not fit")),
    ):
        some = [point for point in points if (point[0] <= budget) == inside]
        ax.plot([x for x, *_ in some], [y for _, y, _ in some], "o" if inside else "x", color=color, label=name)
    if fitting:
        ax.set_title(text("recipe: {recipe}", recipe=str(fitting[0][2].recipe)), loc="left", fontsize=9)
        ax.plot(*fitting[0][:2], "o", markersize=13, markerfacecolor="none", markeredgecolor="black")
    ax.axvline(budget, color="black", linestyle="--", linewidth=1)
    ax.set(xscale="log", xlabel=text("peak, MB"), ylabel=text("seconds, laptop"))
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter("{x:.0f}")
    ax.xaxis.set_minor_formatter("")
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2)  # above: every corner may hold a point
    return shown_once(drawn)


def budget_playground(estimates: Sequence[Estimate]) -> None:
    """`draw_budget` behind a slider."""
    playground(
        lambda budget: draw_budget(estimates, budget),
        lambda widgets: {"budget": widgets.IntSlider(30, 10, 110, 1, description="MB", continuous_update=False)},
    )


# A GPU experiment -----------------------------------------------------------------------------------------------------

_FORGETFUL = {"precision": "bf16", "attention": "flash", "checkpoint": "layers"}
RECIPES = {
    "plain": Recipe(precision="bf16"),
    "forgetful": Recipe(**_FORGETFUL),
    "least": Recipe(**_FORGETFUL, in_backward=True, offload_optimizer=1.0),
}


@experiment(
    title="A step by three recipes: predicted, the meter's peak, the allocator's",
    sizes={"vocabulary": 32000, "hidden": 2048, "heads": 16, "layers": 24, "sequence": 2048, "batch": 4},
    small={**TINY, "heads": 1},
    arms={
        "plain": "plain",
        "forgetful": "flash, checkpoints",
        "least": "state on the host, steps in backward",
    },
)
def three_recipes(device: torch.device, *, batch: int, **sizes: int) -> Iterator[Part]:
    """On a GPU the last recipe pins some 20 GB: 14 bytes a parameter, where torch rounds blocks up to powers of two."""

    def make_batch() -> torch.Tensor:
        return random_tokens(batch, sizes["sequence"], sizes["vocabulary"])

    def make_model() -> Decoder:
        return decoder_and_tokens(device, batch=1, **sizes)[0]

    on_gpu = device.type == "cuda"
    if on_gpu:
        need_host_memory(24 * (sizes["vocabulary"] * sizes["hidden"] + 12 * sizes["layers"] * sizes["hidden"] ** 2))
    for name, recipe in RECIPES.items():
        predicted = estimate(lambda: Decoder(**sizes), make_batch, recipe, tier="host" if on_gpu else "file")
        yield {f"{name}_predicted_bytes": predicted.peak_bytes}
        allocator = Allocator(device)
        model, optimizer = build(make_model, recipe)
        tokens = make_batch().to(device)
        train_step(model, optimizer, tokens, recipe)  # makes the state
        if on_gpu:
            allocator.reset()
        with MemoryMeter(model, optimizer) as meter:
            train_step(model, optimizer, tokens, recipe)
        yield {f"{name}_peak_bytes": meter.peak_bytes}
        if on_gpu:
            yield {f"{name}_allocator_peak_bytes": allocator.peaks()["max_memory_allocated_bytes"]}
        del model, optimizer, meter
