"""Recipes for Hugging Face's Trainer, and how their scripts are run and compared with `fit`."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path

import torch
from script_models import run_script
from transformers import AutoConfig, AutoModelForCausalLM

from course_lib.budget import Recipe, fit
from course_lib.budget.scripts import FRAMEWORKS
from course_lib.workload import Workload, workload_of

TRAINER = FRAMEWORKS["trainer"]
SAMPLES, LENGTH = 4, 16
# 12.6 MB in fp32
LLAMA = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 512,
    "intermediate_size": 576,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def make_frozen():
    """Return a model whose embedding and first block are frozen."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA))
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    return model


def make_batch():
    tokens = torch.randint(LLAMA["vocab_size"], (SAMPLES, LENGTH))
    return {"input_ids": tokens, "labels": tokens.clone()}


FUNCTIONS = {
    "model": "check_trainer_scripts:make_frozen",
    "batch_from": "check_trainer_scripts:make_batch",
}
#: Name of a model -> the command's options.
MODELS = {"plain": {}, "frozen layers": FUNCTIONS}
MODELS |= {f"LoRA on {base}": {"lora": 8, "base": base} for base in ("fp32", "bf16", "nf4", "int8")}
CHOICES = {
    "model": tuple(MODELS),
    "precision": ("fp32", "autocast", "bf16-only", None),
    "optimizer": ("adam", "adam fused", "sgd", "momentum", "adafactor", "lion", "adam8bit"),
    "checkpoint": ("none", "layers"),
    "micro_batches": (1, 2),
    "attention": ("standard", "eager"),
}
# The Trainer holds a few numbers: losses, norms and learning rates. An estimate holds others.
NUMBERS = 50


def valid(row: dict) -> bool:
    """Return whether a row is valid: adapters keep their own dtypes or run under autocast."""
    if row["model"].startswith("LoRA"):
        return row["precision"] in (None, "autocast")
    return row["precision"] is not None


def recipe_of(row: dict) -> Recipe:
    optimizer, _, update = row["optimizer"].partition(" ")
    others = {name: row[name] for name in ("precision", "checkpoint", "micro_batches", "attention")}
    return Recipe(optimizer=optimizer, update=update or None, **others)


@cache
def workload(model: str) -> Workload:
    """Return the workload of a model; its config.json is in the working folder."""
    names = "config model batch_from sequence batch vocabulary parameters hidden layers heads"
    given = dict.fromkeys([*names.split(), "lora", "lora_targets", "base"])
    if "model" not in MODELS[model]:
        Path("config.json").write_text(json.dumps(LLAMA), "utf-8")
        given |= {"config": "config.json", "sequence": LENGTH, "batch": SAMPLES}
    return workload_of(Namespace(**{**given, "framework": "trainer", **MODELS[model]}))


def predicted_bytes(model: str, recipes: list[Recipe]) -> dict[Recipe, int]:
    """Return the peaks that `fit` predicts for the recipes in the Trainer."""
    found = workload(model)
    options = {"recipes": recipes, "base": recipes[0], "framework": "trainer", "progress": False}
    estimates = fit(found.make_model, found.make_batch, 10**12, **options)
    return {each.recipe: each.peak_bytes for each in estimates}


def measured_bytes(script: str) -> int:
    """Run a script and return the peak of its last statement, without the batch of a step."""
    if "bitsandbytes" in sys.modules:
        # Its manager is global, and would give the embedding's fp32 state to the parameter with the
        # same index in the next optimizer.
        sys.modules["bitsandbytes"].optim.GlobalOptimManager.get_instance().initialize()
    meter, names = run_script(script)
    return meter.peak_bytes - sum(tensor.nbytes for tensor in names["batch"].values())


def all_rows() -> Iterator[dict]:
    for values in product(*CHOICES.values()):
        row = dict(zip(CHOICES, values, strict=True))
        if valid(row):
            yield row
