"""Write a training script with the memory-saving techniques of a recipe.

The script is for one of three frameworks: Hugging Face's Trainer, plain PyTorch, or FSDP2.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .framework import Framework, FrameworkLimits
from .fsdp2 import Fsdp2
from .plain import Plain
from .trainer import Trainer

#: Maps the name of each framework, such as "trainer", to the framework.
FRAMEWORKS: Mapping[str, Framework] = MappingProxyType(
    {each.name: each for each in (Trainer(), Plain(), Fsdp2())}
)

__all__ = ["FRAMEWORKS", "Framework", "FrameworkLimits"]
