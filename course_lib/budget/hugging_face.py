"""The configurations of Hugging Face models, whose attributes switch what they do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def configs_of(model: nn.Module, name: str) -> list[Any]:
    """The configurations of the modules, each once, that have such an attribute."""
    found = [getattr(module, "config", None) for module in model.modules()]
    return list({id(config): config for config in found if hasattr(config, name)}.values())


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Keep no keys and values, inside the block, for tokens to come: nothing in training reads
    them."""
    configs = configs_of(model, "use_cache")
    before = [config.use_cache for config in configs]
    try:
        for config in configs:
            config.use_cache = False
        yield
    finally:
        for config, value in zip(configs, before, strict=True):
            config.use_cache = value
