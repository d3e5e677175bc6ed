"""The exercises of lesson 09, and the example model for the fill-ins."""

import json
import os
import random
from collections import defaultdict
from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from course_lib.budget import Estimate, Recipe, estimate
from course_lib.labels import join_labels
from course_lib.lessons import text as corpus
from course_lib.memory import CATEGORIES
from course_lib.teaching import Verdict, category_label
from course_lib.teaching.exercises import (
    Messages,
    cases,
    exercise,
    expect_number,
    not_answered,
    returns_none,
)

say = Messages(__file__)

FOLDER = Path(__file__).parent
#: Configuration of a Llama with 31 million parameters, whose tokens are characters
LLAMA = json.loads((FOLDER / "llama.json").read_text("utf-8"))
#: Path of the configuration of Llama 3 8B
CONFIG_OF_LLAMA_3_8B = FOLDER / "llama_3_8b.json"
# The path is relative to the lesson, because the budget command prints it.
LLAMA_3_8B = os.path.relpath(CONFIG_OF_LLAMA_3_8B)
IGNORED = -100  # label of a token that is not predicted, in PyTorch and transformers


def model_of(config: Mapping[str, Any]) -> nn.Module:
    """Build the transformers model of a configuration; each call draws the same weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


def passages(step: int, samples: int = 4, length: int = 128) -> dict[str, Tensor]:
    """Return a batch of passages from the course's English text; each step has other passages.

    Returns:
        {"input_ids": tokens, one per character, of shape (samples, length), "labels": the same}.
    """
    whole = " ".join(corpus.prose())
    starts = torch.randint(
        len(whole) - length, (samples,), generator=torch.Generator().manual_seed(step)
    )
    rows = corpus.pad_texts([whole[start:] for start in starts.tolist()], length)
    return {"input_ids": rows, "labels": rows.clone()}


# Exercise 1: sum of the losses and its weight


class _PositionDependent(nn.Module):
    """A model whose logits differ at all positions, so that a shift is detected."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-2, 2, 6 * 7).sin().view(6, 7) * 3)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **_: Any) -> SimpleNamespace:
        """Return logits and, as transformers' models do, the mean loss if there are labels."""
        offsets = torch.arange(input_ids.shape[1])[:, None] * torch.linspace(0, 0.4, 7)
        logits = self.table[input_ids] + offsets
        if labels is None:
            return SimpleNamespace(logits=logits)
        pairs = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return SimpleNamespace(logits=logits, loss=F.cross_entropy(*pairs))


def _batch(tokens: list[list[int]], labeled: tuple[range, ...]) -> dict[str, Tensor]:
    """Return a batch with labels only at the given positions of each sample."""
    labels = [
        [token if i in positions else IGNORED for i, token in enumerate(row)]
        for row, positions in zip(tokens, labeled, strict=True)
    ]
    return {"input_ids": torch.tensor(tokens), "labels": torch.tensor(labels)}


_PADDED = (range(6), range(3), range(4))
_BATCHES = (
    _batch([[1, 5, 2, 4, 3, 1], [2, 2, 1, 0, 0, 0], [4, 1, 5, 3, 0, 0]], _PADDED),
    # The first sample begins with a prompt, so its first label is `IGNORED`, too.
    _batch([[0, 3, 1, 0, 2, 5], [2, 0, 4, 1, 3, 1]], (range(3, 6), range(6))),
)


def _draw_batch(rng: random.Random) -> dict[str, Tensor]:
    return _batch([[rng.randint(0, 5) for _ in range(6)] for _ in _PADDED], _PADDED)


@exercise()
def check_loss_sum(function: Any) -> Verdict:
    """Check `function(model, batch)`, which returns (sum of cross-entropies, number of terms)."""
    for batch in cases(_BATCHES, _draw_batch):
        given = deepcopy(batch)
        found = function(_PositionDependent(), given)
        if found is None:
            return not_answered()
        unchanged = given.keys() == batch.keys() and all(
            torch.equal(given[name], batch[name]) for name in batch
        )
        say.refuse_if(not unchanged, "loss_sum.changes_the_batch")
        verdict = _verdict_on_loss(found, batch)
        if not verdict:
            return verdict
    return say.right("loss_sum.right")


def _verdict_on_loss(found: Any, batch: Mapping[str, Tensor]) -> Verdict:
    """Check the sum and the number that a function returned for one batch."""
    say.refuse_if(not isinstance(found, tuple | list) or len(found) != 2, "loss_sum.pair")
    loss, weight = found
    if loss is None or weight is None:
        return not_answered()
    if not _has_gradient(loss):
        say.refuse("loss_sum.swapped" if _has_gradient(weight) else "loss_sum.no_gradient")
    several = any(isinstance(each, Tensor) and each.numel() != 1 for each in found)
    say.refuse_if(several, "loss_sum.several_numbers")
    # a new model, because the function may have changed the first one
    logits, labels = _PositionDependent()(batch["input_ids"]).logits, batch["labels"]
    before, after = logits[:, :-1], labels[:, 1:]
    total, count = _sum_of_losses(before, after), int((after != IGNORED).sum())
    mistakes = {
        "mean": (total / count, total / after.numel()),
        "not_shifted": _sum_of_losses(logits, labels),
        "other_direction": _sum_of_losses(logits[:, 1:], labels[:, :-1]),
        "inputs": _sum_of_losses(before, batch["input_ids"][:, 1:]),
        "softmax": _sum_of_losses(before.softmax(-1), after),
        "samples": _sum_of_losses(logits[:-1], labels[1:]),
        "means": sum(map(F.cross_entropy, before, after)).item(),
    }
    reasons = say.reasons("loss_sum", mistakes)
    verdict = expect_number(loss.detach(), total, wrong_answers=reasons, tolerance=1e-4)
    if not verdict:
        return verdict
    counts = {
        "counted_ignored": after.numel(),
        "counted_first": int((labels != IGNORED).sum()),
        "counted_samples": len(labels),
        "counted_one": 1,
    }
    verdict = expect_number(weight, count, wrong_answers=say.reasons("loss_sum", counts))
    return verdict if verdict or verdict.exact else say.wrong("loss_sum.another_number")


def _sum_of_losses(logits: Tensor, targets: Tensor) -> float:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


# Exercise 2: parameters from a configuration

#: A Llama whose sizes distinguish the mistakes. No two mistakes give the same count, and two pairs
#: of mistakes do so only if they do for any sizes. In `LLAMA`, for example, a table of positions is
#: as large as the embedding.
UNTIED = {
    **LLAMA,
    "vocab_size": 1000,
    "hidden_size": 480,
    "intermediate_size": 1400,
    "num_hidden_layers": 7,
    "num_attention_heads": 12,
    "num_key_value_heads": 3,
    "tie_word_embeddings": False,
}


#: Mistakes that `parameters_of` can introduce, named like their messages
MISTAKES = (
    "heads_of_keys",
    "keys_or_values",
    "size_of_a_head",
    "output",
    "gate",
    "norms",
    "one_norm",
    "last_norm",
    "layers",
    "tied",
    "head",
    "embedding",
    "positions",
)


def parameters_of(config: Mapping[str, Any], *mistakes: str) -> int:
    """Return the number of parameters of a Llama, or the wrong number that `mistakes` give."""
    hidden, width = config["hidden_size"], config["intermediate_size"]
    heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_size = 1 if "size_of_a_head" in mistakes else hidden // heads
    keys = hidden * head_size * (heads if "heads_of_keys" in mistakes else key_heads)
    attention = (1 if "output" in mistakes else 2) * hidden**2
    attention += (1 if "keys_or_values" in mistakes else 2) * keys
    network = (2 if "gate" in mistakes else 3) * hidden * width
    norms = 0 if "norms" in mistakes else hidden if "one_norm" in mistakes else 2 * hidden
    layers = 1 if "layers" in mistakes else config["num_hidden_layers"]
    last = 0 if {"norms", "last_norm"} & set(mistakes) else hidden
    tables = 1 if config["tie_word_embeddings"] else 2
    tables = 2 if "tied" in mistakes else 1 if "head" in mistakes else tables
    tables = 0 if "embedding" in mistakes else tables
    rows = tables * config["vocab_size"]
    if "positions" in mistakes:
        rows += config["max_position_embeddings"]
    return layers * (attention + network + norms) + last + rows * hidden


def _draw_config(rng: random.Random) -> dict[str, Any]:
    key_heads = rng.randint(2, 5)
    heads = key_heads * rng.randint(2, 4)
    return {
        **UNTIED,
        "vocab_size": rng.randint(500, 2000),
        "hidden_size": heads * rng.randrange(20, 60, 2),
        "intermediate_size": rng.randint(500, 2000),
        "num_hidden_layers": rng.randint(2, 9),
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "tie_word_embeddings": rng.random() < 0.5,
    }


def _reasons(config: Mapping[str, Any]) -> dict[float, str]:
    """Return a dict from wrong counts to messages, which name one or two mistakes or a wrong unit.

    A count that several mistakes give is left out, because the check cannot tell them apart.
    """
    count, found = parameters_of(config), defaultdict(list)
    for names in (*((name,) for name in MISTAKES), *combinations(MISTAKES, 2)):
        wrong = parameters_of(config, *names)
        fewer = combinations(names, len(names) - 1)
        if all(parameters_of(config, *some) != wrong for some in fewer):  # each one matters
            found[wrong].append(join_labels((say(f"parameters.{name}") for name in names), " "))
    units = {
        "small_llama": parameters_of(LLAMA),
        "in_bf16": 2 * count,
        "in_fp32": 4 * count,
        "in_adam": 16 * count,
    }
    known = {wrong: messages[0] for wrong, messages in found.items() if len(messages) == 1}
    return known | say.reasons("parameters", units)


@exercise()
def check_parameters(function: Any) -> Verdict:
    """Check `function(config)`, which returns the number of parameters of a Llama."""
    tied = {**UNTIED, "tie_word_embeddings": True}
    configs = (UNTIED, tied, LLAMA, json.loads(CONFIG_OF_LLAMA_3_8B.read_text("utf-8")))
    for config in cases(configs, _draw_config):
        answer = function({**config})  # a copy, because a function may change its argument
        if answer is None:
            if config is UNTIED and function({**LLAMA}) is None:
                return not_answered()
            return returns_none(f"`tie_word_embeddings = {config['tie_word_embeddings']}`")
        verdict = expect_number(answer, parameters_of(config), wrong_answers=_reasons(config))
        if not verdict:
            return verdict
    return say.right("parameters.right")


BUDGET = 200_000_000


@cache
def estimate_recipe(recipe: Recipe) -> Estimate:
    """Return the estimate of a step of the lesson's model and batch by a recipe."""
    return estimate(lambda: model_of(LLAMA), lambda: passages(0), recipe)


#: The three techniques of section 9.3, which exercise 3 excludes.
THREE = Recipe(checkpoint="layers", offload_optimizer=1.0, in_backward=True)


def _techniques_of(recipe: Recipe) -> set[str]:
    """Return the techniques in a recipe, which are the fields that save memory, without sizes.

    Each kind of checkpoint is a technique of its own.
    """
    sizes = {"first_blocks", "blocks", "segments", "schedule_bytes", "min_bytes", "page_bytes"}
    found = set(recipe.changed_fields()) - sizes - {"precision", "prefetch", "in_flight", "update"}
    if "checkpoint" in found:
        found = found - {"checkpoint"} | {f"checkpoint {recipe.checkpoint}"}
    # The model already uses PyTorch's attention, so this field is not a technique.
    return found - {"attention"} if recipe.attention in (None, "sdpa") else found


@exercise()
def check_recipe(recipe: Any) -> Verdict:
    """Check a recipe with a peak of at most 200 MB that trains like the baseline."""
    say.refuse_if(not isinstance(recipe, Recipe), "recipe.no_recipe")
    same = recipe.precision in (None, Recipe().precision) and recipe.optimizer == Recipe().optimizer
    say.refuse_if(not same, "recipe.another_training")
    say.refuse_if(recipe.ranks > 1, "recipe.several_devices")
    techniques, three = _techniques_of(recipe), _techniques_of(THREE)
    say.refuse_if(techniques == three, "recipe.the_three")
    found = estimate_recipe(recipe)
    if techniques > three and found.peak_bytes >= estimate_recipe(THREE).peak_bytes:
        say.refuse("recipe.saves_nothing", peak=_mb(estimate_recipe(THREE).peak_bytes))
    if found.peak_bytes > BUDGET:
        held = {name: found.at_peak.get(name, 0) for name in CATEGORIES if name != "parameter"}
        largest = max(held, key=lambda name: held[name])
        say.wrong(
            "recipe.too_much",
            peak=_mb(found.peak_bytes),
            category=category_label(largest),
            size=_mb(held[largest]),
        )
    return say.right("recipe.right", peak=_mb(found.peak_bytes))


def _mb(count: int) -> str:
    return f"{count / 1e6:.1f}"
