"""A search that counts what a GPU's allocator reserves for a step, in place of its tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from course_lib._check import InfeasibleBudget
from course_lib.labels import text
from course_lib.memory.show import bytes_text

from .estimate import Estimate
from .recipe import Recipe

COUNTS = ("tensors", "reserved")


def check_count(count: str, kind: str) -> None:
    if count == "reserved" and kind != "cuda":
        raise ValueError(
            f"kind must be 'cuda' when count is 'reserved', got {kind!r}, which has no caching"
            " allocator; or pass count='tensors'"
        )


def that_reserve(budget_bytes: int, within: Callable[[int], Any]) -> Any:
    """Estimates of the recipes for whose step no more than the budget is reserved, the cheapest
    first.

    The search itself goes by tensors. Where its cheapest reserves too much, it goes again with as
    much less room, until the cheapest fits; a recipe between the two rooms may be missed.

    Args:
        within: gives the `Estimates` of the recipes whose tensors fit so many bytes.

    Raises:
        InfeasibleBudget: none was found; the least that was reserved is named, or else the least
            peak of tensors.
    """
    taken: dict[Recipe, tuple[int, Estimate]] = {}
    room = budget_bytes
    found = None
    while room > 0:
        try:
            found = within(room)
        except InfeasibleBudget:
            if found is None:  # not even its tensors fit
                raise
            break
        for each in found:
            if each.recipe not in taken:
                taken[each.recipe] = each.reserved_bytes(), each
        reserved, first = taken[found[0].recipe]
        if reserved <= budget_bytes:
            break
        room = first.peak_bytes - (reserved - budget_bytes)
    kept = [each for reserved, each in taken.values() if reserved <= budget_bytes]
    if not kept:
        least, each = min(taken.values(), key=lambda pair: pair[0])
        told = f"the least that is reserved is {bytes_text(least)}, for {each.recipe!r}"
        raise InfeasibleBudget(budget_bytes, least, told, each)
    values = {"count": len(kept), "budget": bytes_text(budget_bytes), "known": len(taken)}
    found.title = text(
        "{count} of {known} fit into {budget} by what the allocator's rules reserve", **values
    )
    found[:] = sorted(kept, key=found.rates.seconds)
    return found
