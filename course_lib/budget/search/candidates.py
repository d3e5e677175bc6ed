"""List the candidates of each technique, and the families of recipes that a search can try."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import cached_property
from itertools import product
from typing import Any

from course_lib._batches import mixes_samples, samples_in
from course_lib.budget.estimate import Estimate
from course_lib.budget.loss import has_loss_sum
from course_lib.budget.optimizers import OPTIMIZERS
from course_lib.budget.rates import Rates
from course_lib.budget.recipe import Recipe
from course_lib.budget.scripts import Limits
from course_lib.budget.techniques import BY_FIELD, TECHNIQUES, Technique
from course_lib.budget.techniques.precision import PRECISIONS

from .estimate_cache import EstimateCache
from .lower_bounds import exceeds

PAGES = (Recipe.page_bytes, 4 << 20, 1 << 20)
ALL_RECIPES = Limits()


class Search:
    """Candidate recipes for one model and batch within a budget, and the costs of these recipes.

    Attributes:
        known: Estimates of the model and batch.
        budget: Limit in bytes.
        rates: Rates of the machine, which convert an estimate into seconds.
        quick: Whether to skip candidates that take long to try and are seldom the cheapest.
        limits: Limits that say which recipes can be run in the framework for which the search is
            made.
    """

    def __init__(
        self,
        known: EstimateCache,
        budget: int,
        rates: Rates,
        quick: bool = False,
        limits: Limits = ALL_RECIPES,
    ):
        self.known, self.budget, self.rates = known, budget, rates
        self.quick, self.limits = quick, limits
        self._candidates: dict[str, Sequence[Mapping[str, Any]]] = {}

    def within(self, budget: int) -> Search:
        """Return a copy of the search with another budget. Both searches share their estimates."""
        other = copy(self)
        other.budget = budget
        return other

    # ---- Costs

    def fits(self, recipe: Recipe) -> bool:
        """Return whether the step of a recipe fits the budget."""
        possible = recipe.ranks > 1 or not exceeds(self.known, recipe, self.budget)
        return possible and self.known.estimate(recipe).peak_bytes <= self.budget

    def seconds(self, recipe: Recipe) -> float:
        """Return the cost of a recipe in seconds."""
        return self.rates.seconds(self.known.estimate(recipe))

    def spare(self, recipe: Recipe) -> int:
        """Return the bytes of the budget that a recipe leaves unused."""
        return self.budget - self.known.estimate(recipe).peak_bytes

    def flops(self, recipe: Recipe) -> int:
        """Return the FLOPs of a recipe."""
        return self.known.estimate(recipe).flops

    def order(self, found: Estimate) -> tuple:
        """Return the key by which estimates are sorted, which begins with the cost in seconds.

        Estimates of equal cost are sorted by fewer micro-batches, then by larger pages, fewer
        copies in flight, fewer bytes communicated and a lower peak.
        """
        recipe = found.recipe
        seconds = self.rates.seconds(found)
        copies = sum(recipe.copies(found.tier)) if recipe.offload_activations else 0
        return (
            seconds,
            recipe.micro_batches,
            -recipe.page_bytes,
            copies,
            found.sent_bytes,
            found.peak_bytes,
        )

    # ---- Candidates

    def options(self, name: str, *values: Any) -> tuple:
        """Return the values of a field that can be tried.

        They are the given values, or only the base recipe's value if the base recipe sets the
        field.
        """
        return (
            (getattr(self.known.base, name),)
            if name in self.known.base.changed_fields()
            else values
        )

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Numbers of micro-batches that can be tried."""
        model, loss_sum = self.known.model, self.known.composer.loss_sum
        weighed = loss_sum is not None or has_loss_sum(model)
        if not weighed or mixes_samples(model) or self.known.base.micro_batches > 1:
            return self.options("micro_batches", 1)
        every = self.limits.even_counts(self.known.counts_of_batch[0])
        return self.options("micro_batches", *(sorted({1, every[-1]}) if self.quick else every))

    def counts_for(self, recipe: Recipe) -> tuple[int, ...]:
        """Return the numbers of micro-batches that can be tried for a recipe.

        With steps in backward, the only number is 1.
        """
        return (1,) if recipe.in_backward else self.counts

    def doublings(self, recipe: Recipe) -> list[int]:
        """Return numbers of micro-batches, each at least twice the previous one.

        The largest number is always the last one.
        """
        found = []
        for count in self.counts_for(recipe):
            if not found or count >= 2 * found[-1] or count == self.counts_for(recipe)[-1]:
                found.append(count)
        return found

    def candidates(self, field: str) -> Sequence[Mapping[str, Any]]:
        """Return the candidates of the technique with this field, as dicts of field values.

        If the base recipe sets the technique, the only candidate is an empty dict, which keeps the
        base recipe's setting.
        """
        if field not in self._candidates:
            self._candidates[field] = _candidates_of(self, field)
        return self._candidates[field]

    def has_listed(self, field: str) -> bool:
        """Return whether `candidates(field)` has already been computed."""
        return field in self._candidates

    def values(self, field: str) -> list[Any]:
        """Return the values that the search tries for the field."""
        own = getattr(self.known.base, field)
        return [each.get(field, own) for each in self.candidates(field)]

    def amount(self, field: str, recipe: Recipe) -> float:
        """Return the share of a technique that a recipe uses, from 0 to 1.

        It is the position of the recipe's value among the candidates for a graded technique, and 0
        or 1 for any other technique.
        """
        values = self.values(field)
        place = values.index(getattr(recipe, field))
        return place / (len(values) - 1) if place and BY_FIELD[field].graded else float(place > 0)

    def amounts(self, recipe: Recipe) -> float:
        """Count the techniques that a recipe uses; a graded technique counts as a fraction."""
        return sum(self.amount(field, recipe) for field in BY_FIELD)

    def adds_to(self, recipe: Recipe, smaller: Recipe) -> bool:
        """Return whether a recipe uses all techniques of the recipe `smaller`.

        A graded technique must be used to at least the same degree. The numbers of micro-batches
        may differ.
        """

        def covers(field: str, technique: Technique) -> bool:
            used = self.amount(field, smaller)
            return (
                used == 0
                or getattr(recipe, field) == getattr(smaller, field)
                or (technique.graded and self.amount(field, recipe) >= used)
            )

        return all(covers(*each) for each in BY_FIELD.items())

    def families(self) -> Iterator[Recipe]:
        """Yield one recipe for each family, that is, for each combination of techniques.

        The numbers of micro-batches, segments and schedule bytes of a family are found later
        (`best_numbers`). With offloaded activations, each number of micro-batches makes a separate
        family, because the number decides which activations are large enough to be offloaded.
        """
        for chosen in product(*map(self.candidates, BY_FIELD)):
            try:
                family = self.family(**{k: v for each in chosen for k, v in each.items()})
                self.limits.check(family)
            except ValueError:
                # Two of these techniques cannot be combined, or the framework cannot run them.
                continue
            if not family.offload_activations:
                yield replace(family, micro_batches=self.counts_for(family)[0])
            # With "segments", only the inputs of the segments could be offloaded.
            elif family.checkpoint != "segments" or self.known.base.checkpoint == "segments":
                for number in self.doublings(family):
                    yield replace(family, micro_batches=number)

    @cached_property
    def least_memory_attention(self) -> tuple[str | None, ...]:
        """Tuple with the attention that needs the least memory in both forward and backward.

        To find this attention, the steps of the base recipe with each attention are compared. The
        tuple is empty if only one attention is tried, or if one needs less memory in forward and
        the other in backward.
        """

        def peaks(attention: str | None) -> tuple[int, int]:
            found = self.known.with_base(attention=attention).phase_peaks
            return found["forward"], found["backward"]

        attentions = self.values("attention")
        if len(attentions) < 2:
            return ()
        one, other = attentions
        if all(map(operator.le, peaks(one), peaks(other))):
            return (one,)
        return (other,) if all(map(operator.le, peaks(other), peaks(one))) else ()

    def family(self, **techniques: Any) -> Recipe:
        """Return the base recipe with these fields, the smallest pages and the fewest copies.

        The page size and the numbers of copies in flight need the least memory of those that are
        tried.
        """
        recipe = replace(self.known.base, **techniques)
        return replace(recipe, page_bytes=self.pages_for(recipe)[-1], **self.copies_for(recipe)[0])

    def pages_for(self, recipe: Recipe) -> tuple[int, ...]:
        """Return the page sizes that are tried for an offloaded optimizer, which all cost the same.

        With steps in backward, each parameter is a page by itself. Then the page size has no
        effect, and only one size is returned.
        """
        paged = recipe.has_pages and not recipe.in_backward
        return self.options("page_bytes", *(PAGES if paged else PAGES[:1]))

    def copies_for(self, recipe: Recipe) -> list[dict[str, int | None]]:
        """Return the values of `prefetch` and `in_flight` that are tried, as dicts of fields.

        Without offloaded activations or with the tier "file", these fields do not change the cost.
        Then the result is a list with an empty dict, which keeps the base recipe's values.
        """
        if not recipe.offload_activations or self.known.composer.tier == "file":
            return [{}]
        ahead, down = self.options("prefetch", 0, 1, None), self.options("in_flight", 1, None)
        counts = (
            [(ahead[0], down[0]), (ahead[-1], down[-1])] if self.quick else product(ahead, down)
        )
        return [{"prefetch": ahead, "in_flight": down} for ahead, down in dict.fromkeys(counts)]


def _candidates_of(search: Search, field: str) -> Sequence[Mapping[str, Any]]:
    """Return the candidates of a technique that the framework can run, as dicts of field values."""
    base = search.known.base
    # To list candidates, recipes are estimated. A field with a single value needs no estimate.
    one = search.limits.only(field) == (getattr(base, field),)
    if one or field in base.changed_fields():
        return ({},)
    return [each for each in BY_FIELD[field].candidates(search) if search.limits.allow(**each)]


def not_tried(search: Search) -> list[str]:
    """Return one sentence per technique that could not be tried, which states the reason."""
    base = search.known.base
    # A technique that the framework excludes is not reported, because the model is not the reason.
    tried = [
        each
        for each in TECHNIQUES
        if search.limits.only(each.field) != (getattr(base, each.field),)
    ]
    return list(filter(None, (technique.not_tried(search) for technique in tried)))


def additions(search: Search, recipe: Recipe) -> list[str]:
    """Return the fields of the techniques that can be added to those of a recipe.

    The model and the batch support these techniques, and they can be combined with the recipe's own
    techniques.
    """
    trials = {field: search.candidates(field) for field in BY_FIELD} | {
        "precision": [{"precision": name} for name in PRECISIONS],
        "optimizer": [{"optimizer": name} for name in OPTIMIZERS],
        "micro_batches": [{"micro_batches": count} for count in search.counts],
        "ranks": [{"ranks": 2, "shard": "zero3"}] * ((samples_in(search.known.batch) or 1) > 1),
    }

    def goes_with(field: str, values: Mapping[str, Any]) -> bool:
        with suppress(ValueError):
            more = replace(recipe, **values)
            search.limits.check(more)
            return getattr(more, field) != getattr(recipe, field)
        return False

    unused = trials.keys() - recipe.changed_fields().keys()
    return [field for field in sorted(unused) if any(goes_with(field, v) for v in trials[field])]
