"""Claims of the documents from which the course was developed, and tests of these claims."""

import warnings
from collections.abc import Sequence

import torch
from torch import nn

from course_lib.memory import MemoryMeter
from course_lib.models import deep_mlp
from course_lib.teaching import Table, text
from course_lib.teaching.claims import what_you_may_have_read

from .claims import OLDER_CLAIMS


def older_claims(ratio: float, kept: Sequence[int]) -> Table:
    """Return the table of the optional section's claims; this module tests all but the first claim.

    Args:
        ratio: Size of the found gradient divided by the size of the right gradient.
        kept: Bytes that the graph keeps without and with the claim's function.
    """
    unmoved, count = _state_after_copies()
    kind, missing = _error_of_the_prefetcher()
    return what_you_may_have_read(
        OLDER_CLAIMS,
        text("{ratio:.1f} ×; {before} → {after} bytes", ratio=ratio, before=kept[0], after=kept[1]),
        text("{unmoved} of {count} have not moved", unmoved=unmoved, count=count),
        text("{kind}: there is no {missing} yet", kind=f"`{kind}`", missing=f"`{missing}`"),
        " : ".join(f"{peak / 1e6:.0f} MB" for peak in _peaks_of_masks()),
    )


def _state_after_copies() -> tuple[int, int]:
    """Return how many of AdamW's state tensors `.to("cpu")` does not move, and how many exist."""
    model = deep_mlp(depth=8, width=64)
    adam = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    adam.step()

    def addresses() -> list[int]:
        return [value.data_ptr() for state in adam.state.values() for value in state.values()]

    before = addresses()
    for state in adam.state.values():
        for value in state.values():
            value.to("cpu", copy=True)
    return sum(a == b for a, b in zip(before, addresses(), strict=True)), len(before)


class _EagerPrefetcher:
    """A prefetcher with the claim's bug: it loads a batch before it has an iterator."""

    def __init__(self, loader: Sequence):
        self.loader = loader
        self.preload()

    def preload(self) -> None:
        self.next = next(self.batches)

    def __iter__(self) -> "_EagerPrefetcher":
        self.batches = iter(self.loader)
        return self


def _error_of_the_prefetcher() -> tuple[str, str]:
    """Return the class of the error that the prefetcher raises, and the missing attribute."""
    try:
        _EagerPrefetcher([torch.zeros(1)])
    except AttributeError as error:
        return type(error).__name__, str(error.name)
    return "nothing", "nothing"


def _peaks_of_masks() -> tuple[int, int]:
    """Return the peak bytes of making a causal mask with and without a new Transformer."""
    with warnings.catch_warnings(), MemoryMeter() as transformer:
        warnings.simplefilter("ignore")
        nn.Transformer().generate_square_subsequent_mask(512)
    with MemoryMeter() as alone:
        nn.Transformer.generate_square_subsequent_mask(512)
    return transformer.peak_bytes, alone.peak_bytes
