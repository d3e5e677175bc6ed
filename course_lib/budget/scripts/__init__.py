"""Write a recipe as a script for the reader's framework: the Trainer, plain PyTorch, or FSDP2."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .framework import Framework

#: Frameworks by their names.
FRAMEWORKS: Mapping[str, Framework] = MappingProxyType({})

__all__ = ["FRAMEWORKS", "Framework"]
