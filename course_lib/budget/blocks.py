"""A model's equal blocks: which they are, and the model with few of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from course_lib._torch import look_of


def equal_blocks(model: nn.Module) -> nn.ModuleList | nn.Sequential:
    """The longest list of blocks with the same modules, tensors and settings; an empty one if there
    is none."""
    lists = [part for part in model.modules() if isinstance(part, (nn.ModuleList, nn.Sequential))]
    return max(
        (part for part in lists if len(set(map(look_of, part))) == 1),
        key=len,
        default=nn.ModuleList(),
    )


@contextmanager
def shortened(blocks: nn.ModuleList | nn.Sequential, count: int) -> Iterator[None]:
    """Cut the list, inside the block, to its first `count` blocks."""
    rest = list(blocks)[count:]
    del blocks[count:]
    try:
        yield
    finally:
        blocks.extend(rest)
