"""A model's equal blocks: which they are, and the model with few of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import NoneType
from typing import Any

from torch import nn

NUMBERED = re.compile("idx|index|layer|number")  # attributes that say which block it is


def equal_blocks(model: nn.Module) -> nn.ModuleList | nn.Sequential:
    """The longest list of blocks with the same modules, tensors and settings; an empty one if there
    is none."""
    lists = [part for part in model.modules() if isinstance(part, (nn.ModuleList, nn.Sequential))]
    return max(
        (part for part in lists if len(set(map(look, part))) == 1),
        key=len,
        default=nn.ModuleList(),
    )


def look(block: nn.Module) -> tuple:
    """What decides how a block runs."""
    tensors = (*block.named_parameters(), *block.named_buffers())
    return (
        *((name, type(part), *_settings(part)) for name, part in block.named_modules()),
        *((name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in tensors),
    )


def _settings(part: nn.Module) -> list[tuple[str, Any]]:
    """What a module's own attributes say of how it runs, as where one layer of two has a sliding
    window.

    Layers may be numbered, and dropped at rates that differ, as long as none is zero.
    """

    def told(name: str, value: Any) -> Any:
        if type(value) is int and NUMBERED.search(name):
            return int
        return value == 0 if type(value) is float else value

    simple = (str, int, float, NoneType)
    return [
        (name, told(name, value)) for name, value in vars(part).items() if isinstance(value, simple)
    ]


@contextmanager
def shortened(blocks: nn.ModuleList | nn.Sequential, count: int) -> Iterator[None]:
    """Inside, the list has its first `count` blocks only."""
    rest = list(blocks)[count:]
    del blocks[count:]
    try:
        yield
    finally:
        blocks.extend(rest)
