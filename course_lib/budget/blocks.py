"""Find the equal blocks of a model, and run the model with only a few of them.

`extrapolate` and `rank` estimate a deep model from runs with few blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from course_lib._torch.modules import look_of


def equal_blocks(model: nn.Module) -> nn.ModuleList | nn.Sequential:
    """Return the longest list of blocks with the same modules, tensors and settings.

    If the model has no such list, the result is an empty `nn.ModuleList`.
    """
    lists = [part for part in model.modules() if isinstance(part, (nn.ModuleList, nn.Sequential))]
    return max(
        (part for part in lists if len(set(map(look_of, part))) == 1),
        key=len,
        default=nn.ModuleList(),
    )


@contextmanager
def shorten_blocks(blocks: nn.ModuleList | nn.Sequential, count: int) -> Iterator[None]:
    """Keep only the first `count` blocks of the list inside the `with` block."""
    rest = list(blocks)[count:]
    del blocks[count:]
    try:
        yield
    finally:
        blocks.extend(rest)
