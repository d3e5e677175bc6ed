"""Search by the memory that a GPU's caching allocator reserves, instead of by tensor bytes.

`fit` calls this module for `count="reserved"`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from course_lib._check import InfeasibleBudget
from course_lib.budget.estimate import Estimate
from course_lib.budget.recipe import Recipe
from course_lib.labels import text
from course_lib.memory.show import bytes_text

COUNTS = ("tensors", "reserved")


def title_of(count: int, budget_bytes: int, known: int, quick: bool) -> str:
    """Return the caption of a search's result, whichever bytes it counts.

    Args:
        count: Number of recipes that fit.
        known: Number of recipes that were estimated.
    """
    title = text(
        (
            "{count} recipe fits into {budget}; {known} were estimated"
            if count == 1
            else "{count} recipes fit into {budget}; {known} were estimated"
        ),
        count=count,
        budget=bytes_text(budget_bytes),
        known=known,
    )
    if quick:
        title = text("{found}, by a quick search, which may miss cheaper ones", found=title)
    return title


def search_by_reserved(budget_bytes: int, within: Callable[[int], Any], quick: bool = False) -> Any:
    """Return the estimates of the recipes whose reserved bytes fit the budget, cheapest first.

    The search itself counts tensor bytes. If its cheapest recipe reserves too much, the search is
    repeated with a limit on tensor bytes that is lower by the excess, until the cheapest recipe
    fits. A recipe between two limits may be missed.

    Args:
        budget_bytes: Limit in bytes for the memory that the allocator reserves.
        within: Function that returns the `Estimates` that fit a limit in tensor bytes.
        quick: Whether to count the reserved bytes of only the cheapest recipe for each limit. The
            others are then left out.

    Raises:
        InfeasibleBudget: No recipe was found. The message names the fewest bytes reserved, or the
            lowest peak of tensor bytes if even the tensors of no recipe fit.
    """
    taken: dict[Recipe, tuple[int, Estimate]] = {}
    room = budget_bytes
    found = None
    while room > 0:
        try:
            found = within(room)
        except InfeasibleBudget:
            if found is None:
                # The tensors alone exceed the budget, for all recipes.
                raise
            break
        for each in found[:1] if quick else found:
            if each.recipe not in taken:
                taken[each.recipe] = each.reserved_bytes(), each
        reserved, first = taken[found[0].recipe]
        if reserved <= budget_bytes:
            break
        room = first.peak_bytes - (reserved - budget_bytes)
    kept = [each for reserved, each in taken.values() if reserved <= budget_bytes]
    if not kept:
        least, each = min(taken.values(), key=lambda pair: pair[0])
        reason = f"the least that is reserved is {bytes_text(least)}, for {each.recipe!r}"
        raise InfeasibleBudget(budget_bytes, least, reason, each)
    found.title = title_of(len(kept), budget_bytes, found.known, quick)
    found[:] = sorted(kept, key=found.rates.seconds)
    return found
