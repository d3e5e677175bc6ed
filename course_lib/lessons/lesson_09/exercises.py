"""The exercises of lesson 09, and its Llama with the batches that it trains on."""

import json
import os
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

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
    numbers,
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
#: Configuration of Llama 3 8B
CONFIG_8B = json.loads(CONFIG_OF_LLAMA_3_8B.read_text("utf-8"))


def model_of(config: Mapping[str, Any]) -> nn.Module:
    """Build a `transformers` causal language model from a configuration, without a download.

    Each call initializes the same weights.

    Args:
        config: Dict with the fields of the configuration, including "model_type".
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


def passages(step: int, samples: int = 4, length: int = 128) -> dict[str, Tensor]:
    """Return a batch of random passages from the course's English text.

    Args:
        step: Number of the training step. It is the seed of the random choice.
        samples: Number of passages.
        length: Number of characters per passage.

    Returns:
        Dict with the keys "input_ids" and "labels", whose values are equal. They have the shape
        (samples, length), with one token per character.
    """
    whole = " ".join(corpus.prose())
    starts = torch.randint(
        len(whole) - length, (samples,), generator=torch.Generator().manual_seed(step)
    )
    rows = corpus.pad_texts([whole[start:] for start in starts.tolist()], length)
    return {"input_ids": rows, "labels": rows.clone()}


def llama_8b() -> nn.Module:
    """Build Llama 3 8B from its configuration, with random weights."""
    return model_of(CONFIG_8B)


def tokens_8b() -> dict[str, Tensor]:
    """Return a batch with one sequence of 4096 tokens, which are all 0."""
    tokens = torch.zeros(1, 4096, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


# Exercise 1: parameters from a configuration

#: A Llama whose sizes distinguish the mistakes: each mistake gives another count, and so does each
#: pair of mistakes, except for pairs that agree for all sizes. `LLAMA` does not distinguish them,
#: because a table of positions, for example, is as large as its embedding.
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
    """Return the number of parameters of a Llama, optionally with mistakes.

    Args:
        config: Dict with the fields of the model's configuration.
        mistakes: Names in `MISTAKES`. Without mistakes, the result is right.
    """
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

    A count that several mistakes give is left out, because it does not identify one of them.
    """
    count, found = parameters_of(config), defaultdict(list)
    for names in (*((name,) for name in MISTAKES), *combinations(MISTAKES, 2)):
        wrong = parameters_of(config, *names)
        fewer = combinations(names, len(names) - 1)
        if all(parameters_of(config, *some) != wrong for some in fewer):  # each mistake matters
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
    """Check the learner's function that counts the parameters of a Llama from its configuration.

    Args:
        function: Function that is called with a dict of the configuration's fields, and returns the
            number of parameters.
    """
    tied = {**UNTIED, "tie_word_embeddings": True}
    configs = (UNTIED, tied, LLAMA, CONFIG_8B)
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


# Exercise 2: a recipe for the budget

BUDGET = 200_000_000


@cache
def estimate_recipe(recipe: Recipe) -> Estimate:
    """Estimate a training step of the lesson's Llama model with the techniques in a recipe."""
    return estimate(lambda: model_of(LLAMA), lambda: passages(0), recipe)


#: The three techniques of section 9.2, which exercise 2 excludes.
THREE = Recipe(checkpoint="layers", offload_optimizer=1.0, in_backward=True)


def _techniques_of(recipe: Recipe) -> set[str]:
    """Return the names of the techniques in a recipe: its changed fields that save memory.

    Fields that only set a size, such as `page_bytes`, are left out. Each kind of checkpoint is a
    technique of its own.
    """
    sizes = {"first_blocks", "blocks", "segments", "schedule_bytes", "min_bytes", "page_bytes"}
    found = set(recipe.changed_fields()) - sizes - {"precision", "prefetch", "in_flight", "update"}
    if "checkpoint" in found:
        found = found - {"checkpoint"} | {f"checkpoint {recipe.checkpoint}"}
    # The model already uses PyTorch's attention, so this field is not a technique.
    return found - {"attention"} if recipe.attention in (None, "sdpa") else found


@exercise()
def check_recipe(recipe: Any) -> Verdict:
    """Check a recipe: the learner's choice of techniques for a training step.

    The peak may be at most 200 MB. Precision, optimizer and number of ranks must be those of the
    step without techniques.

    Args:
        recipe: The learner's `Recipe`.
    """
    say.reject_if(not isinstance(recipe, Recipe), "recipe.no_recipe")
    same = recipe.precision in (None, Recipe().precision) and recipe.optimizer == Recipe().optimizer
    say.reject_if(not same, "recipe.another_training")
    say.reject_if(recipe.ranks > 1, "recipe.several_devices")
    techniques, three = _techniques_of(recipe), _techniques_of(THREE)
    say.reject_if(techniques == three, "recipe.the_three")
    found = estimate_recipe(recipe)
    if techniques > three and found.peak_bytes >= estimate_recipe(THREE).peak_bytes:
        say.reject("recipe.saves_nothing", peak=_mb(estimate_recipe(THREE).peak_bytes))
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


# Exercise 3: QLoRA from a configuration

_PER_WEIGHT = 0.5 + 4 / 64  # NF4: half a byte, and one fp32 scale per 64 weights


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return a dict from each matrix of a layer to its numbers of outputs and inputs."""
    hidden, width = config["hidden_size"], config["intermediate_size"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    return {
        "query": (hidden, hidden),
        "key": (keys, hidden),
        "value": (keys, hidden),
        "output": (hidden, hidden),
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
    }


def _nf4_count(config: Mapping[str, Any]) -> int:
    """Return the number of weights that are quantized: those of the matrices in the layers."""
    return config["num_hidden_layers"] * sum(m * n for m, n in _shapes(config).values())


def _frozen(
    config: Mapping[str, Any], per_weight: float = _PER_WEIGHT, *more: str, rest: float = 2
) -> float:
    """Return the bytes of the frozen weights.

    Args:
        per_weight: Bytes per quantized weight.
        more: Names of tables that are quantized as well, "embedding" or "head".
        rest: Bytes per weight that is not quantized.
    """
    table = config["vocab_size"] * config["hidden_size"]
    small = _nf4_count(config) + sum(
        table for name in more if name == "embedding" or not config["tie_word_embeddings"]
    )
    return per_weight * small + rest * (parameters_of(config) - small)


def _adapter_count(config: Mapping[str, Any], rank: int, names: Sequence[str] = ()) -> int:
    """Return the number of parameters of the adapters of some matrices; by default of all."""
    shapes = _shapes(config)
    return config["num_hidden_layers"] * rank * sum(sum(shapes[name]) for name in names or shapes)


def _one_factor(config: Mapping[str, Any], rank: int) -> tuple[int, int]:
    """Return the bytes of the adapters if only one of the two thin matrices is counted."""
    pairs = zip(*_shapes(config).values(), strict=True)
    outputs, inputs = (4 * config["num_hidden_layers"] * rank * sum(side) for side in pairs)
    return outputs, inputs


def _draw_adapters(rng: random.Random) -> tuple[Mapping[str, Any], int]:
    return MappingProxyType(_draw_config(rng)), rng.randint(2, 12)


@numbers(
    {
        "no_scales": lambda config, rank: {"frozen weights": _frozen(config, 0.5)},
        "bf16_scales": lambda config, rank: {"frozen weights": _frozen(config, 0.5 + 2 / 64)},
        "bits": lambda config, rank: {"frozen weights": _frozen(config, 4 + 4 / 64)},
        "all_quantized": lambda config, rank: {
            "frozen weights": (
                _frozen(config, _PER_WEIGHT, "embedding", "head"),
                _frozen(config, rest=_PER_WEIGHT),
            )
        },
        "embedding_quantized": lambda config, rank: {
            "frozen weights": _frozen(config, _PER_WEIGHT, "embedding")
        },
        "no_rest": lambda config, rank: {"frozen weights": _frozen(config, rest=0)},
        "rest_in_fp32": lambda config, rank: {"frozen weights": _frozen(config, rest=4)},
        "in_bf16": lambda config, rank: {"frozen weights": 2 * parameters_of(config)},
        "adapters_in_bf16": lambda config, rank: {"adapters": 2 * _adapter_count(config, rank)},
        "elements": lambda config, rank: {"adapters": _adapter_count(config, rank)},
        "one_factor": lambda config, rank: {"adapters": _one_factor(config, rank)},
        "attention_only": lambda config, rank: {
            "adapters": tuple(
                4 * _adapter_count(config, rank, names)
                for names in (("query", "value"), ("query", "key", "value", "output"))
            )
        },
        "state_of_all": lambda config, rank: {
            "gradients and state": tuple(
                12 * (parameters_of(config) + more) for more in (0, _adapter_count(config, rank))
            )
        },
        "no_gradients": lambda config, rank: {
            "gradients and state": 8 * _adapter_count(config, rank)
        },
        "with_weights": lambda config, rank: {
            "gradients and state": 16 * _adapter_count(config, rank)
        },
        "state_in_bf16": lambda config, rank: {
            "gradients and state": 6 * _adapter_count(config, rank)
        },
    },
    cases=lambda: cases(
        [(MappingProxyType(UNTIED), 4), (MappingProxyType(CONFIG_8B), 8)], _draw_adapters
    ),
    # each quantized matrix also keeps the 16 values of NF4 in fp32
    also=lambda config, rank: {
        "frozen weights": _frozen(config) + 7 * 64 * config["num_hidden_layers"]
    },
    tolerance=1e-6,
    in_bytes=True,
    place="place",
)
def check_qlora_bytes(config: Mapping[str, Any], rank: int) -> dict[str, float]:
    """Check the learner's formula for the bytes that QLoRA stores between training steps.

    All matrices in the layers are quantized to NF4, and each of them has an adapter in fp32. The
    optimizer is Adam. The decorated function computes the right answer, and the decorator `numbers`
    turns it into a check.

    Args:
        config: Dict with the fields of a Llama's configuration.
        rank: Rank of the adapters.
    """
    return _bytes_of_qlora(config, rank)


def _bytes_of_qlora(config: Mapping[str, Any], rank: int) -> dict[str, float]:
    count = _adapter_count(config, rank)
    return {
        "frozen weights": _frozen(config),
        "adapters": 4 * count,
        "gradients and state": 12 * count,
    }


def _mb(count: int) -> str:
    return f"{count / 1e6:.1f}"
