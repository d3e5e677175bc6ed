"""Compare the search of `fit` with a grid of recipes that are all estimated.

    PYTHONPATH=. python tests/tools/brute_force_fit.py              # all models
    PYTHONPATH=. python tests/tools/brute_force_fit.py chain MLP    # some of them

For twelve small models, many budgets and three sets of rates, each search is compared with a grid
of at most 300 recipes. A difference is a recipe of the grid that fits and costs less than the first
recipe that `fit` returns, or that fits although `fit` finds none. The budgets are the peaks of the
recipes that are cheaper than all recipes with lower peaks. Three of the models are a part of
`make test`; all models need some minutes of one core.
"""

from __future__ import annotations

import math
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise, product
from unittest.mock import patch

import torch
from hugging_face_models import maker
from torch import nn
from torch.nn import functional as F

from course_lib._check import InfeasibleBudget
from course_lib.budget import Estimate, Rates, Recipe
from course_lib.budget.search import candidates
from course_lib.budget.search.candidates import RecipeSearch
from course_lib.budget.search.estimate_cache import EstimateCache
from course_lib.budget.search.fit import search_by_tensors
from course_lib.models import Decoder, deep_mlp, random_tokens

MOST = 300  # recipes in a grid
PAGES = (Recipe.page_bytes, 1 << 14, 1 << 11)
# Slow FLOPs, slow links, and neither: seconds add up with the tier "file", and overlap with "host".
RATES = (
    Rates(1e9, 2e9, 1e8),
    Rates(1e9, 2e9, 1e6, host_bytes=1e9),
    Rates(1e10, 2e10, 1e9, host_bytes=1e10),
)


def difference(budget: int, rates: Rates, found: Estimate | None, better: Estimate) -> str:
    """Describe the first recipe of `fit`, if there is one, and a cheaper recipe of the grid."""
    lines = [f"budget {budget:,}, link {rates.link_bytes:.0e}:"]
    for name, e in (("fit ", found), ("grid", better)):
        result = e and f"{rates.seconds(e):.6g} s, {e.peak_bytes:,} bytes, {e.recipe!r}"
        lines.append(f"  {name} {result or 'finds none'}")
    return "\n".join(lines)


# ---- models


class Chain(nn.Module):
    """Residual blocks of the given widths."""

    def __init__(self, widths: list[int]):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, w), nn.GELU(), nn.Linear(w, 16)) for w in widths
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x

    def loss_sum(self, batch):
        return F.mse_loss(self(batch), batch, reduction="sum"), len(batch)


class Convolutions(nn.Module):
    """Convolutions of decreasing resolution with batch norm."""

    def __init__(self):
        super().__init__()
        widths = (3, 8, 16, 32)
        self.stages = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ReLU())
                for a, b in pairwise(widths)
            )
        )
        self.head = nn.Linear(32, 10)

    def loss(self, batch):
        x = self.stages(batch).mean((2, 3))
        return F.cross_entropy(self.head(x), torch.zeros(len(batch), dtype=torch.long))


class Wide(nn.Module):
    """Small blocks after a large embedding with few used rows, and a layer without gradients."""

    def __init__(self):
        super().__init__()
        self.table, self.unused = nn.Embedding(3000, 16), nn.Linear(100, 100)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def loss_sum(self, batch):
        x = self.table(batch)
        for block in self.blocks:
            x = block(x).relu()
        return x.square().sum(), batch.numel()


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def squares(model: nn.Module, batch: torch.Tensor):
    return model(batch).square().sum(), len(batch)


def labelled(samples: int, tokens: int) -> dict[str, torch.Tensor]:
    ids = random_tokens(samples, tokens - 1, 97)
    return {"input_ids": ids, "labels": ids}


DECODER = {"vocabulary": 199, "hidden": 32, "heads": 4, "sequence": 24}
SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
SIZES |= {"num_hidden_layers": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}
BART = {"vocab_size": 97, "d_model": 32, "max_position_embeddings": 32, "dropout": 0.0}
for part in ("encoder", "decoder"):
    BART |= {f"{part}_layers": 2, f"{part}_attention_heads": 2, f"{part}_ffn_dim": 64}
GPT2 = {"vocab_size": 97, "n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 32}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
SMALL_OFFLOADS = Recipe(min_bytes=1000)  # offloads small activations and inputs of blocks too


@dataclass
class Case:
    """A model, its batch, and the fields and options of all its recipes."""

    make_model: Callable[[], nn.Module]
    make_batch: Callable
    base: Recipe = SMALL_OFFLOADS
    tier: str = "file"
    options: dict | None = None


CASES = {
    "chain": Case(partial(Chain, [32] * 7), partial(torch.randn, 6, 32, 16)),
    "uneven chain": Case(
        partial(Chain, [16, 256, 16, 64]), partial(torch.randn, 4, 24, 16), tier="host"
    ),
    "table": Case(Wide, lambda: torch.zeros(4, 10, dtype=torch.long), Recipe(min_bytes=500)),
    "MLP": Case(
        partial(deep_mlp, 5, 48), partial(torch.randn, 40, 48), options={"loss_sum": squares}
    ),
    "convolutions": Case(
        Convolutions, partial(torch.randn, 8, 3, 16, 16), Recipe("fp32", "momentum", min_bytes=2000)
    ),
    "decoder": Case(partial(Decoder, layers=4, **DECODER), partial(random_tokens, 4, 24, 199)),
    "deep decoder": Case(
        partial(Decoder, layers=9, **DECODER),
        partial(random_tokens, 4, 24, 199),
        Recipe("bf16", min_bytes=2000),
        "host",
    ),
    "flat decoder": Case(
        partial(Decoder, layers=2, **{**DECODER, "sequence": 96}),
        partial(random_tokens, 3, 96, 199),
        Recipe(optimizer="sgd", min_bytes=4000),
    ),
    "encoder": Case(
        encoder,
        partial(torch.randn, 6, 20, 32),
        Recipe(min_bytes=3000),
        "host",
        options={"loss_sum": squares},
    ),
    "GPT-2": Case(maker("GPT2:GPT2LMHeadModel", **GPT2), partial(labelled, 4, 24)),
    "Llama": Case(
        maker("Llama:LlamaForCausalLM", **SIZES),
        partial(labelled, 4, 24),
        Recipe(optimizer="adafactor", min_bytes=2000),
    ),
    "BART": Case(
        maker("Bart:BartForConditionalGeneration", **BART),
        partial(labelled, 4, 24),
        options={"blocks": ("model.encoder.layers.*", "model.decoder.layers.*")},
    ),
}


# ---- the grid


def schedules(cache: EstimateCache) -> list[int]:
    """Return feasible bytes for schedules; none for a model without a chain of blocks."""
    recipe = replace(cache.base, checkpoint="optimal", schedule_bytes=1, blocks=cache.blocks)
    try:
        cache.composer.schedule_cost(recipe)
    except InfeasibleBudget as error:
        return [error.least_bytes * n // 4 for n in (4, 5, 8)]
    except (TypeError, ValueError, RuntimeError):
        pass
    return []


@lru_cache  # the search does not change it
def grid(cache: EstimateCache) -> list[Recipe]:
    """Return all combinations that the search could try, shuffled."""
    search = RecipeSearch(cache, 1, RATES[0])
    layers = cache.layers
    activations: list[dict] = [{}, {"offload_activations": True}]
    if layers:
        checkpoints: list[dict] = [{"checkpoint": "selective"}, {"checkpoint": "layers"}]
        checkpoints += [{"checkpoint": "layers", "offload_activations": True}]
        checkpoints += [{"checkpoint": "layers", "first_blocks": n} for n in range(1, layers)]
        checkpoints += [{"checkpoint": "segments", "segments": n} for n in {2, layers} - {1}]
        checkpoints += [{"checkpoint": "optimal", "schedule_bytes": n} for n in schedules(cache)]
        activations += [{**each, "blocks": cache.blocks} for each in checkpoints]
    choices = {
        "attention": ("standard", "flash"),
        "head_chunk": (None, search.values("head_chunk")[-1]),
        "in_backward": (False, True),
        "offload_optimizer": search.values("offload_optimizer"),
    }
    every = []
    for *values, fields in product(*choices.values(), activations):
        recipe = replace(cache.base, **dict(zip(choices, values, strict=True)), **fields)
        counts = (
            search.doublings(recipe)
            if recipe.offload_activations
            else search.micro_batch_counts_for(recipe)
        )
        pages_matter = recipe.uses_offloaded_optimizer and not recipe.in_backward
        pages = candidates.PAGES if pages_matter else candidates.PAGES[:1]
        every += [
            replace(recipe, micro_batches=count, page_bytes=size, **copies)
            for count, size, copies in product(counts, pages, search.copies_for(recipe))
        ]
    every = list(dict.fromkeys(every))
    random.Random(0).shuffle(every)
    return every


# Inside `with small_pages():`, the search tries pages that suit small models.
small_pages = partial(patch.object, candidates, "PAGES", PAGES)


def estimated(cache: EstimateCache, most: int = MOST) -> list[Estimate]:
    """Return the estimates of the grid, without recipes that the model does not support."""
    found, unsupported = [], set()
    for recipe in grid(cache):
        kind = recipe.attention, recipe.checkpoint, recipe.head_chunk, recipe.offload_activations
        if len(found) == most:
            break
        if kind in unsupported:
            continue
        try:
            found.append(cache.estimate(recipe))
        except InfeasibleBudget:
            pass
        except (TypeError, ValueError, RuntimeError):
            unsupported.add(kind)
    return found


def frontier(estimates: Iterable[Estimate], rates: Rates) -> list[int]:
    """Return the peaks of the estimates that are cheaper than all estimates with lower peaks."""
    peaks, cheapest = [], math.inf
    for e in sorted(estimates, key=lambda e: (e.peak_bytes, rates.seconds(e))):
        if rates.seconds(e) < cheapest:
            peaks.append(e.peak_bytes)
            cheapest = rates.seconds(e)
    return peaks


def estimates_of(case: Case) -> EstimateCache:
    """Return an empty cache of estimates for the case."""
    options = {"tier": case.tier, "loss_sum": None, "max_norm": None, **(case.options or {})}
    return EstimateCache(case.make_model, case.make_batch, case.base, **options)


def compare(
    cache: EstimateCache, most: int = MOST, budgets: int | None = None
) -> tuple[int, list[str]]:
    """Search at each set of rates in the smallest `budgets`, and compare with the grid.

    Returns:
        The number of searches, and descriptions of cheaper recipes that they missed.
    """
    estimates = estimated(cache, most)
    cases = [(rates, peak) for rates in RATES for peak in frontier(estimates, rates)[:budgets]]
    differences = []
    for rates, budget in cases:
        try:
            first = search_by_tensors(RecipeSearch(cache, budget, rates), cache.base)[0]
        except InfeasibleBudget:
            first = None
        fitting = (e for e in estimates if e.peak_bytes <= budget)
        best = min(fitting, key=rates.seconds)
        if first is None or rates.seconds(best) < rates.seconds(first) * (1 - 1e-9):
            differences.append(difference(budget, rates, first, best))
        elif first.peak_bytes > budget:
            raise AssertionError(f"{first.recipe!r} takes {first.peak_bytes:,} bytes of {budget:,}")
    return len(cases), differences


def main() -> int:
    searches = differ = 0
    for name in sys.argv[1:] or CASES:
        start, cache = time.process_time(), estimates_of(CASES[name])
        with small_pages(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            count, differences = compare(cache)
        searches, differ = searches + count, differ + len(differences)
        work = f"{len(cache.estimates)} estimates, {time.process_time() - start:.0f} s"
        print(f"{name}: {count} searches, {len(differences)} differences; {work}")
        print(*differences, sep="\n", flush=True)
    print(f"{searches} searches, {differ} differences")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
