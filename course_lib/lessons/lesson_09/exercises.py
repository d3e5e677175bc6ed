"""The exercises of lesson 09, and the model that is given for the fill-ins."""

import json
import os
import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cache
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from course_lib.budget import Estimate, Recipe, estimate
from course_lib.lessons import text as corpus
from course_lib.memory import CATEGORIES
from course_lib.teaching import Verdict, category_label, text
from course_lib.teaching.exercises import (
    cases,
    exercise,
    expect_number,
    not_answered,
    returns_none,
    right,
    wrong,
)

FOLDER = Path(__file__).parent
#: A Llama of 31 million parameters, whose tokens are characters
LLAMA = json.loads((FOLDER / "llama.json").read_text("utf-8"))
#: Path of the configuration of Llama 3 8B
CONFIG_OF_LLAMA_3_8B = FOLDER / "llama_3_8b.json"
# As seen from the lesson, because the budget command prints it.
LLAMA_3_8B = os.path.relpath(CONFIG_OF_LLAMA_3_8B)
IGNORED = -100  # label of a token that is not predicted, in PyTorch and transformers


def model_of(config: Mapping[str, Any]) -> nn.Module:
    """Build transformers' model of a configuration, with the same weights each time."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


def passages(step: int, samples: int = 4, length: int = 128) -> dict[str, Tensor]:
    """Return passages of the course's own English, different in each step, as characters.

    Returns:
        {"input_ids": (samples, length), "labels": the same}.
    """
    whole = " ".join(corpus.prose())
    starts = torch.randint(
        len(whole) - length, (samples,), generator=torch.Generator().manual_seed(step)
    )
    rows = corpus.pad_texts([whole[start:] for start in starts.tolist()], length)
    return {"input_ids": rows, "labels": rows.clone()}


# Exercise 1: a loss with its weight
# --------------------------------------------------------------------------------------------------


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


def _padded_batch() -> dict[str, Tensor]:
    tokens = torch.tensor([[1, 5, 2, 4, 3, 1], [2, 2, 1, 0, 0, 0], [4, 1, 5, 3, 0, 0]])
    labels = tokens.clone()
    labels[1, 3:], labels[2, 4:] = IGNORED, IGNORED
    return {"input_ids": tokens, "labels": labels}


def _prompted_batch() -> dict[str, Tensor]:
    """Return a batch whose prompt is not predicted, so that its first label is `IGNORED`, too."""
    tokens = torch.tensor([[0, 3, 1, 0, 2, 5], [2, 0, 4, 1, 3, 1]])
    labels = tokens.clone()
    labels[0, :3] = IGNORED
    return {"input_ids": tokens, "labels": labels}


def _draw_batch(rng: random.Random) -> Callable[[], dict[str, Tensor]]:
    """Return a function that returns the padded batch with other tokens."""
    tokens, labels = _padded_batch().values()
    rows = [[rng.randint(0, 5) for _ in row] for row in tokens]
    drawn = torch.tensor(rows)
    return lambda: {
        "input_ids": drawn.clone(),
        "labels": torch.where(labels == IGNORED, labels, drawn),
    }


@exercise(
    hint=(
        "Which label does the first position predict, and which labels are not predicted?",
        (
            "Drop the last logits and the first labels, so that both have the same length."
            " `cross_entropy` can skip a label and add up the losses of the others."
        ),
    )
)
def check_loss_sum(function: Any) -> Verdict:
    """Check `function(model, batch)`: the sum and the number of the tokens' cross-entropies."""
    for make_batch in cases((_padded_batch, _prompted_batch), _draw_batch):
        verdict = _loss_verdict(function, make_batch)
        if not verdict:
            return verdict
    return right("Right: ten tokens are predicted here.")


def _loss_verdict(function: Any, make_batch: Callable[[], dict[str, Tensor]]) -> Verdict:
    """Check the sum and the number that the function returns for one batch."""
    model, batch, given = _PositionDependent(), make_batch(), make_batch()
    found = function(model, given)
    if found is None:
        return not_answered()
    if given.keys() != batch.keys() or not all(
        torch.equal(given[key], batch[key]) for key in batch
    ):
        return wrong(
            "Your function changes the batch. Work on a copy, because the batch is used again.",
            exact=True,
        )
    if not isinstance(found, tuple | list) or len(found) != 2:
        return wrong("Return a pair: the sum of the losses and their number.", exact=True)
    loss, weight = found
    if loss is None or weight is None:
        return not_answered()
    if not _has_gradient(loss):
        return wrong(
            "You swapped the two. Return the sum first, then the number."
            if _has_gradient(weight)
            else "Your sum has no gradient. Return a tensor that is neither detached nor a Python"
            " number.",
            exact=True,
        )
    if any(isinstance(each, Tensor) and each.numel() != 1 for each in (loss, weight)):
        return wrong(
            "The sum and the number must be one number each. Add up the tokens.", exact=True
        )
    # another model, because the function may have changed this one
    logits, labels = _PositionDependent()(batch["input_ids"]).logits, batch["labels"]
    each = F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none"
    )  # 0 for an ignored label
    unshifted = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    backward_shift = F.cross_entropy(
        logits[:, 1:].flatten(0, 1), labels[:, :-1].flatten(), reduction="sum"
    )
    inputs = F.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten(), reduction="sum"
    )
    softmax = F.cross_entropy(
        logits[:, :-1].softmax(-1).flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
    )
    samples = F.cross_entropy(logits[:-1].flatten(0, 1), labels[1:].flatten(), reduction="sum")
    predicted = labels[:, 1:] != IGNORED
    means = (each.view_as(predicted).sum(1) / predicted.sum(1)).sum()
    count, total = int(predicted.sum()), each.sum().item()
    mistakes = {
        total / count: (
            "You returned a mean. It cannot be added to the mean of another micro-batch, so"
            " return the sum."
        ),
        total / each.numel(): (
            "You returned a mean. It cannot be added to the mean of another micro-batch, so"
            " return the sum."
        ),
        unshifted.item(): (
            "You compared each position with its own token. It predicts the token after it, so"
            " shift the labels by one."
        ),
        backward_shift.item(): (
            "You shifted the labels in the wrong direction. Each position predicts the token"
            " after it, not the one before."
        ),
        inputs.item(): (
            "You used `input_ids` as labels, so padding is predicted, too. Use"
            " `batch['labels']`, where padding is −100."
        ),
        softmax.item(): (
            "You applied softmax before `cross_entropy`, which applies it itself. Pass the logits."
        ),
        samples.item(): (
            "You shifted along the samples. Shift along the tokens, the second dimension."
        ),
        means.item(): (
            "You added up one mean per sample. Add up the losses of all predicted tokens."
        ),
    }
    verdict = expect_number(loss.detach(), total, wrong_answers=mistakes, tolerance=1e-4)
    if not verdict:
        return verdict
    counted = {
        each.numel(): (
            "The sum is right, but you counted the labels of -100. They are not predicted."
        ),
        int((labels != IGNORED).sum()): (
            "The sum is right, but you counted the first token of each sample. It is not predicted."
        ),
        len(labels): (
            "The sum is right, but you counted samples. The sum is over tokens, not over samples."
        ),
        1: (
            "The sum is right, but your weight is 1. The weight must be the number of tokens"
            " that are predicted."
        ),
    }
    verdict = expect_number(weight, count, wrong_answers=counted)
    if verdict or verdict.exact:
        return verdict
    return wrong("The sum is right, but your number is not that of the predicted tokens.")


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


# Exercise 2: parameters from a configuration
# --------------------------------------------------------------------------------------------------

_PARAMETER_MISTAKES = {
    "keys": (
        "You gave keys and values as many heads as queries. They have fewer, namely"
        " `num_key_value_heads`."
    ),
    "gate": (
        "You counted two matrices in the network after attention. It has three: gate, up and down."
    ),
    "output": (
        "You left out the output matrix of attention. Attention has four matrices: query, key,"
        " value and output."
    ),
    "norms": (
        "You left out norms. Each layer has two norms of `hidden_size` numbers, and one more"
        " norm follows the last layer."
    ),
    "one norm": (
        "You left out norms. Each layer has two norms of `hidden_size` numbers, and one more"
        " norm follows the last layer."
    ),
    "positions": (
        "You counted a table of positions. A Llama has none, because it rotates queries and"
        " keys instead, without parameters."
    ),
    "last norm": "You left out the norm after the last layer.",
    "tied": (
        "You counted the embedding and the head as two matrices. If `tie_word_embeddings` is"
        " true, they are one matrix."
    ),
    "head": (
        "You left out the matrix of the head. If `tie_word_embeddings` is false, the head has a"
        " matrix of its own."
    ),
    "layers": "You counted one layer. The model has `num_hidden_layers` layers.",
    "values": "You counted keys or values. They have a matrix each.",
    "head size": (
        "You gave each head of keys and values one number. It has `hidden_size /"
        " num_attention_heads` numbers."
    ),
    "tables": "You left out the embedding. Its matrix has parameters, too.",
}


#: A Llama for which no two mistakes give the same count, and pairs only where they do for any
#: sizes. In `LLAMA` a table of positions is as large as the embedding, for example.
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


def parameters_of(config: Mapping[str, Any], *mistakes: str) -> int:
    """Return the number of a Llama's parameters, or the result of the named mistakes."""
    hidden, width = config["hidden_size"], config["intermediate_size"]
    heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_size = 1 if "head size" in mistakes else hidden // heads
    keys = hidden * head_size * (heads if "keys" in mistakes else key_heads)
    attention = (1 if "output" in mistakes else 2) * hidden**2
    attention += (1 if "values" in mistakes else 2) * keys
    network = (2 if "gate" in mistakes else 3) * hidden * width
    norms = 0 if "norms" in mistakes else hidden if "one norm" in mistakes else 2 * hidden
    layers = 1 if "layers" in mistakes else config["num_hidden_layers"]
    last = 0 if {"norms", "last norm"} & set(mistakes) else hidden
    tables = 1 if config["tie_word_embeddings"] else 2
    tables = 2 if "tied" in mistakes else 1 if "head" in mistakes else tables
    tables = 0 if "tables" in mistakes else tables
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


def _parameter_mistakes(config: Mapping[str, Any]) -> dict[float, str]:
    """Return wrong count -> what went wrong, for one mistake and for two at once.

    A count that different mistakes give is left out, because the check cannot tell which it was.
    """
    count = parameters_of(config)
    single = {mistake: parameters_of(config, mistake) for mistake in _PARAMETER_MISTAKES}
    reasons: defaultdict[float, set[str]] = defaultdict(set)
    for mistake, reason in _PARAMETER_MISTAKES.items():
        reasons[single[mistake]].add(reason)
    for (one, a), (other, b) in combinations(_PARAMETER_MISTAKES.items(), 2):
        both = parameters_of(config, one, other)
        if a != b and both not in (single[one], single[other]):  # each of them changes the count
            reasons[both].add(text("{first} {second}", first=a, second=b))
    found = {number: min(named) for number, named in reasons.items() if len(named) == 1}
    found |= {
        parameters_of(LLAMA): (
            "You gave the number for the small Llama. Compute it from `config`, which also has"
            " other sizes."
        ),
        2 * count: "You gave the bytes in bf16. Give the number of parameters.",
        4 * count: "You gave the bytes in fp32. Give the number of parameters.",
        16 * count: "You gave the bytes of Adam's step in fp32. Give the number of parameters.",
    }
    found.pop(count, None)
    return found


@exercise(
    hint=(
        "Write down the shape of each matrix of one layer. Keys and values have fewer heads than"
        " queries.",
        (
            "A head has `hidden_size / num_attention_heads` numbers. Which parameters does the"
            " model have only once, outside its layers?"
        ),
    )
)
def check_parameters(function: Any) -> Verdict:
    """Check `function(config)`, the number of a Llama's parameters, for four configurations."""
    tied = {**UNTIED, "tie_word_embeddings": True}
    configs = (UNTIED, tied, LLAMA, json.loads(CONFIG_OF_LLAMA_3_8B.read_text("utf-8")))
    for config in cases(configs, _draw_config):
        answer = function({**config})  # a copy, because a function may change its argument
        if answer is None:
            if config is UNTIED and function({**LLAMA}) is None:
                return not_answered()
            return returns_none(f"`tie_word_embeddings = {config['tie_word_embeddings']}`")
        verdict = expect_number(
            answer, parameters_of(config), wrong_answers=_parameter_mistakes(config)
        )
        if not verdict:
            return verdict
    return right("Right: 31,141,376 here, and 8,030,261,248 for Llama 3 8B.")


# Exercise 3: a recipe for 200 MB
# --------------------------------------------------------------------------------------------------

BUDGET = 200_000_000


@cache
def estimate_recipe(recipe: Recipe) -> Estimate:
    """Estimate a step of the lesson's model and batch."""
    return estimate(lambda: model_of(LLAMA), lambda: passages(0), recipe)


#: The three techniques of section 9.3, which exercise 3 excludes.
THREE = Recipe(checkpoint="layers", offload_optimizer=1.0, in_backward=True)


def _techniques_of(recipe: Recipe) -> set[str]:
    """Return the recipe's fields that save memory, without those that only give sizes.

    Each kind of checkpoint is a technique of its own.
    """
    sizes = {"first_blocks", "blocks", "segments", "schedule_bytes", "min_bytes", "page_bytes"}
    found = set(recipe.changed_fields()) - sizes - {"precision", "prefetch", "in_flight", "update"}
    if "checkpoint" in found:
        found = found - {"checkpoint"} | {f"checkpoint {recipe.checkpoint}"}
    # The model calls PyTorch's attention without being asked to.
    return found - {"attention"} if recipe.attention in (None, "sdpa") else found


@exercise(
    hint=(
        "What fills the peak, and which technique reduces it? Then look again, because now"
        " something else fills the peak.",
        (
            "The state takes 249 MB, the activations 222 MB and the gradients 125 MB. Each of them"
            " needs its own technique."
        ),
    )
)
def check_recipe(recipe: Any) -> Verdict:
    """Check a recipe whose step stays within 200 MB and trains like the baseline."""
    if not isinstance(recipe, Recipe):
        return wrong("Pass a `Recipe` to this check.", exact=True)
    plain = Recipe()
    if (recipe.precision, recipe.optimizer) not in {
        (plain.precision, plain.optimizer),
        (None, plain.optimizer),
    }:
        return wrong(
            "Your recipe changes the precision or the optimizer, so it trains differently. Keep"
            " fp32 and Adam.",
            exact=True,
        )
    if recipe.ranks > 1:
        return wrong("Your recipe uses several devices. Only one is available.", exact=True)
    if _techniques_of(recipe) == _techniques_of(THREE):
        return wrong(
            "You used exactly the three techniques of section 9.3. Find a recipe with another set.",
            exact=True,
        )
    found = estimate_recipe(recipe)
    if _techniques_of(recipe) > _techniques_of(THREE) and found.peak_bytes >= (
        peak := estimate_recipe(THREE).peak_bytes
    ):
        return wrong(
            text(
                "You added something to the three techniques of section 9.3 that saves nothing,"
                " because they alone peak at {peak} MB. Find a recipe with another set.",
                peak=f"{peak / 1e6:.1f}",
            ),
            exact=True,
        )
    if found.peak_bytes <= BUDGET:
        return right(text("Right: {peak} MB.", peak=f"{found.peak_bytes / 1e6:.1f}"))
    largest = max(
        (name for name in CATEGORIES if name != "parameter"),
        key=lambda name: found.at_peak.get(name, 0),
    )
    return wrong(
        text(
            "Your recipe peaks at {peak} MB. Apart from the parameters, the largest part of it"
            " is {category} with {size} MB.",
            peak=f"{found.peak_bytes / 1e6:.1f}",
            category=category_label(largest),
            size=f"{found.at_peak[largest] / 1e6:.1f}",
        )
    )
