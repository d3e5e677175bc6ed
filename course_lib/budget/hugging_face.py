"""Read and change the configurations of Hugging Face models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def configs_of(model: nn.Module, name: str) -> list[Any]:
    """Return the Hugging Face configurations in a model that have a given attribute.

    A configuration is the attribute `config` of a module. If several modules share one
    configuration, the list contains it once.

    Args:
        model: Model whose modules are searched, including the model itself.
        name: Name of the attribute that the configurations must have.
    """
    found = [getattr(module, "config", None) for module in model.modules()]
    return list({id(config): config for config in found if hasattr(config, name)}.values())


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Turn off the key-value cache of Hugging Face models inside the `with` block.

    The cache speeds up text generation, and training does not read it. Afterwards, the setting
    `use_cache` of each configuration in the model is restored.
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
