"""Random models, losses and recipes for `fuzz.py`, which compares estimates with real steps, and
the search of `fit` with a grid of recipes."""

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from fuzz_cases import DIFFERENT
from torch import Tensor, nn
from torch.nn import functional as F

from course_lib._torch.steps import not_collecting
from course_lib.budget import Estimate, InfeasibleBudget, Rates, Recipe, estimate, fit, run
from course_lib.models import Decoder, random_tokens

ones, zeros = torch.ones_like, torch.zeros_like
# Name -> loss function (x, reduction) of the outputs `x`, with one row per sample.
LOSSES: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": lambda x, **r: F.cross_entropy(x, zeros(x[:, 0], dtype=torch.long), **r),
    "smoothed": lambda x, **r: F.cross_entropy(x, x.detach().softmax(1), label_smoothing=0.1, **r),
    "nll_loss": lambda x, **r: F.nll_loss(x.log_softmax(1), zeros(x[:, 0], dtype=torch.long), **r),
    "multi_margin": lambda x, **r: F.multi_margin_loss(x, zeros(x[:, 0], dtype=torch.long), **r),
    "binary": lambda x, **r: F.binary_cross_entropy(x.sigmoid(), ones(x), **r),
    "triplet": lambda x, **r: F.triplet_margin_loss(x, x.square(), x.sin(), **r),
    "cosine": lambda x, **r: F.cosine_embedding_loss(x, x.square(), ones(x[:, 0]), **r),
    "kl_div": lambda x, **r: F.kl_div(x.log_softmax(1), ones(x), **r),
} | {
    name: lambda x, name=name, **r: getattr(F, name)(x, ones(x), **r)
    for name in ("mse_loss", "l1_loss", "huber_loss", "smooth_l1_loss", "soft_margin_loss",
                 "binary_cross_entropy_with_logits", "poisson_nll_loss")
}  # fmt: skip


class Block(nn.Module):
    """A residual block of one of several kinds."""

    def __init__(self, kind: str, width: int, wide: int):
        super().__init__()
        self.kind, self.norm = kind, nn.LayerNorm(width)
        layers = {
            "gelu": [nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width)],
            "glu": [nn.Linear(width, 2 * wide), nn.GLU(), nn.Linear(wide, width, bias=False)],
            "relu": [nn.Linear(width, wide), nn.ReLU(inplace=True), nn.Linear(wide, width)],
            "dropout": [nn.Linear(width, width), nn.Dropout(0.2), nn.SiLU()],
            "attention": [nn.Linear(width, 3 * width), nn.Linear(width, width)],
        }
        self.layers = nn.ModuleList(layers[kind])

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.kind == "attention":
            q, k, v = self.layers[0](y).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            y = self.layers[1](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        else:
            for layer in self.layers:
                y = layer(y)
        return x + y


class Net(nn.Module):
    """Blocks between an embedding and a head, with a random loss and reduction."""

    def __init__(self, kinds: list[str], width: int, wide: int, loss: str, reduction: str):
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(kind, width, wide) for kind in kinds)
        self.head = nn.Linear(width, 7)
        self.loss_name, self.reduction = loss, reduction

    def loss_sum(self, tokens: Tensor) -> tuple[Tensor, int]:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        losses = LOSSES[self.loss_name](self.head(x).flatten(0, 1), reduction=self.reduction)
        return losses.sum(), len(tokens)


@dataclass(frozen=True)
class Case:
    """Functions that make a model and a batch, and their numbers of blocks and samples."""

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[], Tensor]
    samples: int
    layers: int


KINDS = ("gelu", "glu", "relu", "dropout", "attention")


def case(draw: random.Random, kinds: tuple[str, ...] = KINDS, most: int = 5) -> Case:
    """Return a random small model: the library's decoder, or blocks of several kinds."""
    samples, tokens, layers = draw.randint(1, most), draw.randint(2, 16), draw.randint(1, most)
    if draw.random() < 0.4:
        sizes = {"vocabulary": draw.randint(5, 90), "hidden": 8 * draw.randint(1, 4), "heads": 2}
        sizes |= {"layers": layers, "sequence": tokens, "tied": draw.random() < 0.5}
        words = sizes["vocabulary"]
        return Case(
            lambda: Decoder(**sizes), lambda: random_tokens(samples, tokens, words), samples, layers
        )
    chosen = [draw.choice(kinds)] * layers
    if draw.random() < 0.4:
        chosen = [draw.choice(kinds) for _ in range(layers)]
    options = 4 * draw.randint(1, 8), draw.randint(4, 64), draw.choice(list(LOSSES))
    reduction = draw.choice(("sum", "mean", "none"))
    return Case(
        lambda: Net(chosen, *options, reduction),
        lambda: random_tokens(samples, tokens - 1, 11),
        samples,
        layers,
    )


def recipe(draw: random.Random, case: Case) -> Recipe:
    """Return a random recipe whose fields can be combined."""
    while True:
        keep = draw.choice(("none", "layers", "first", "selective", "segments", "optimal"))
        fields: dict = {"checkpoint": keep}
        if keep == "first":
            fields = {"checkpoint": "layers", "first_blocks": draw.randint(1, case.layers)}
        elif keep == "segments":
            fields["segments"] = draw.randint(1, case.layers)
        elif keep == "optimal":
            fields["schedule_bytes"] = 1
        for name, values in {
            "precision": ("fp32", "bf16", None),
            "optimizer": ("adam", "sgd", "momentum", "adafactor", "lion"),
            "update": (None, "loop", "foreach", "fused"),
            "offload_optimizer": (0.0, 0.0, 0.5, 1.0),
            "page_bytes": (Recipe.page_bytes, 1 << 12),
            "attention": ("standard", "flash", None),
            "in_backward": (False, False, True),
            "accumulate": (None, None, "fp32"),
            "micro_batches": tuple(range(1, case.samples + 1)),
            "head_chunk": (None, None, 7),
        }.items():
            fields[name] = draw.choice(values)
        if draw.random() < 0.3:
            fields |= {"offload_activations": True, "min_bytes": draw.choice((0, 256, 1000))}
        with suppress(ValueError):
            return Recipe(**fields)


def with_schedule_bytes(draw: random.Random, case: Case, tried: Recipe) -> Recipe:
    """Return the recipe; if it has a schedule, give it a random sufficient number of bytes."""
    if tried.checkpoint == "optimal":
        try:
            estimate(case.make_model, case.make_batch, tried)
        except InfeasibleBudget as error:
            return replace(tried, schedule_bytes=int(draw.uniform(1, 2) * error.least_bytes) + 1)
    return tried


def estimate_error(draw: random.Random) -> float:
    """Return the difference in bytes of an estimate's peak from the step's; infinite if only other
    fields differ."""
    tried = case(draw)
    given = tried.make_model, tried.make_batch
    while True:  # until the model allows the random recipe
        chosen = recipe(draw, tried)
        try:
            chosen = with_schedule_bytes(draw, tried, chosen)
            guess = estimate(*given, chosen)
        except (TypeError, ValueError, RuntimeError) as error:
            if runs_for_real(given, chosen):
                raise AssertionError(f"estimate rejects {chosen!r}, which runs") from error
            continue
        break
    with not_collecting():
        real = run(*given, chosen)
    taken = Estimate.from_trace(real.meter.trace(), chosen, "file")
    if guess.peak_bytes != taken.peak_bytes:
        return abs(guess.peak_bytes - taken.peak_bytes)
    moved = real.traffic.bytes_down, real.traffic.bytes_up
    same = (guess.bytes_down, guess.bytes_up) == moved and guess.at_peak == taken.at_peak
    return 0.0 if same and guess.flops == taken.flops else DIFFERENT


def runs_for_real(given: tuple, chosen: Recipe) -> bool:
    """Return whether a real step runs for a recipe that the estimate has rejected."""
    try:
        run(*given, chosen)
    except (TypeError, ValueError, RuntimeError):
        return False
    return True


def fit_error(draw: random.Random) -> float:
    """Return the largest fraction, of four budgets, by which the cheapest fitting recipe of a grid
    costs less than that of `fit`."""
    tried = case(draw, KINDS[:2], most=2)
    given = tried.make_model, tried.make_batch
    rates = Rates(10 ** draw.uniform(8, 11), 10 ** draw.uniform(8, 11), 10 ** draw.uniform(6, 10))
    base, grid = Recipe(attention=None, min_bytes=draw.choice((0, 1000))), []
    for _ in range(16):
        # fields that a search does not choose, so they are as in the base
        fixed = ("precision", "optimizer", "update", "attention", "accumulate", "page_bytes")
        fixed += ("min_bytes", "head_chunk")
        drawn = replace(recipe(draw, tried), **{name: getattr(base, name) for name in fixed})
        with suppress(TypeError, ValueError):
            grid.append(estimate(*given, with_schedule_bytes(draw, tried, drawn)))
    cheapest = min(grid, key=rates.seconds)
    search = fit(*given, cheapest.peak_bytes, base=base, rates=rates, tier="file", progress=False)
    lost = 0.0
    for budget in draw.sample(sorted(e.peak_bytes for e in grid), min(4, len(grid))):
        best = min((e for e in grid if e.peak_bytes <= budget), key=rates.seconds)
        try:
            found = search.within(budget)[0]
        except InfeasibleBudget:
            return DIFFERENT
        if found.peak_bytes > budget:
            return DIFFERENT
        lost = max(lost, rates.seconds(found) / rates.seconds(best) - 1)
    if run(*given, found.recipe).meter.peak_bytes != found.peak_bytes:
        return DIFFERENT
    return lost
