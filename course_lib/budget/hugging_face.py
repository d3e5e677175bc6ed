"""Read and change the configurations of Hugging Face models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def configs_of(model: nn.Module, name: str) -> list[Any]:
    """Return the configurations of a model's modules that have an attribute `name`, each once."""
    found = [getattr(module, "config", None) for module in model.modules()]
    return list({id(config): config for config in found if hasattr(config, name)}.values())


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Turn off the cache of keys and values of Hugging Face models inside the `with` block.

    The cache speeds up the generation of text. Training does not read it.
    """
    configs = configs_of(model, "use_cache")
    before = [config.use_cache for config in configs]
    try:
        for config in configs:
            config.use_cache = False
        yield
    finally:
        for config, value in zip(configs, before, strict=True):
            config.use_cache = value
