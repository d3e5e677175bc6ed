"""Write a recipe as a script for a framework: Hugging Face's Trainer, plain PyTorch, or FSDP2."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .framework import Framework, FrameworkLimits
from .fsdp2 import Fsdp2
from .plain import Plain
from .trainer import Trainer

#: Frameworks by their names.
FRAMEWORKS: Mapping[str, Framework] = MappingProxyType(
    {each.name: each for each in (Trainer(), Plain(), Fsdp2())}
)

__all__ = ["FRAMEWORKS", "Framework", "FrameworkLimits"]
