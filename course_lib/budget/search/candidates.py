"""List the candidates of each technique, and the families of recipes that a search can try.

A recipe is a set of memory-saving techniques for a training step. A candidate is a dict of values
for the fields of one technique. A family consists of the recipes with the same combination of
candidates.
"""

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
from course_lib.budget.scripts import FrameworkLimits
from course_lib.budget.techniques import BY_FIELD, TECHNIQUES, Technique
from course_lib.budget.techniques.precision import PRECISIONS

from .estimate_cache import EstimateCache
from .lower_bounds import exceeds

PAGES = (Recipe.page_bytes, 4 << 20, 1 << 20)
ALL_RECIPES = FrameworkLimits()


class RecipeSearch:
    """State of a search: the recipes that can be tried for one model and batch, and their costs.

    A recipe is a set of memory-saving techniques for a training step, and its cost is the estimated
    duration of the step. The base recipe, `cache.base`, has the settings that the user has fixed.
    All recipes of the search share these settings.

    Attributes:
        cache: Cache of estimates for this model and batch.
        budget: Limit in bytes for the peak of live tensors in a step.
        rates: Speed of the machine, from which the duration of a step is computed.
        quick: Whether to try fewer recipes. The search then takes less time, but may miss the
            cheapest recipe.
        limits: Framework that must be able to run the recipes, and the number of samples in the
            batch.
    """

    def __init__(
        self,
        cache: EstimateCache,
        budget: int,
        rates: Rates,
        quick: bool = False,
        limits: FrameworkLimits = ALL_RECIPES,
    ):
        self.cache, self.budget, self.rates = cache, budget, rates
        self.quick, self.limits = quick, limits
        self._candidates: dict[str, Sequence[Mapping[str, Any]]] = {}

    def within(self, budget: int) -> RecipeSearch:
        """Return a copy of the search with another memory budget, which uses the same cache.

        Args:
            budget: Limit in bytes for the peak of live tensors in a step.
        """
        other = copy(self)
        other.budget = budget
        return other

    # ---- Costs

    def fits(self, recipe: Recipe) -> bool:
        """Return whether the training step of a recipe fits the memory budget.

        The peak of the bytes of live tensors must be at most `budget`.
        """
        possible = recipe.ranks > 1 or not exceeds(self.cache, recipe, self.budget)
        return possible and self.cache.estimate(recipe).peak_bytes <= self.budget

    def seconds(self, recipe: Recipe) -> float:
        """Return the cost of a recipe: the estimated duration of its training step in seconds."""
        return self.rates.seconds(self.cache.estimate(recipe))

    def headroom_bytes(self, recipe: Recipe) -> int:
        """Return the bytes of the budget that a recipe's training step leaves unused.

        The number is negative if the step does not fit the budget.
        """
        return self.budget - self.cache.estimate(recipe).peak_bytes

    def flops(self, recipe: Recipe) -> int:
        """Return the FLOPs of a recipe's training step, as estimated."""
        return self.cache.estimate(recipe).flops

    def sort_key(self, found: Estimate) -> tuple:
        """Return the key by which the search sorts estimates.

        The estimates are sorted by the duration of the step. Among estimates with the same
        duration, the first is the one with the fewest micro-batches. Further ties are broken by
        a larger `page_bytes`, fewer copies of activations that run at once, fewer bytes sent to
        other ranks, and a lower peak, in this order.
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

    def allowed_values(self, name: str, *values: Any) -> tuple:
        """Return the values of a recipe's field that the search can try, as a tuple.

        If the base recipe (`cache.base`) sets the field, its value is the only one.

        Args:
            name: Name of the field.
            values: Values to try if the base recipe does not set the field.
        """
        return (
            (getattr(self.cache.base, name),)
            if name in self.cache.base.changed_fields()
            else values
        )

    @cached_property
    def micro_batch_counts(self) -> tuple[int, ...]:
        """Numbers of micro-batches that the search can try, in rising order."""
        model, loss_sum = self.cache.model, self.cache.composer.loss_sum
        weighed = loss_sum is not None or has_loss_sum(model)
        if not weighed or mixes_samples(model) or self.cache.base.micro_batches > 1:
            return self.allowed_values("micro_batches", 1)
        every = self.limits.allowed_micro_batch_counts(self.cache.counts_of_batch[0])
        return self.allowed_values(
            "micro_batches", *(sorted({1, every[-1]}) if self.quick else every)
        )

    def micro_batch_counts_for(self, recipe: Recipe) -> tuple[int, ...]:
        """Return the numbers of micro-batches to try for a recipe, in rising order.

        With `recipe.in_backward`, the only number is 1.
        """
        return (1,) if recipe.in_backward else self.micro_batch_counts

    def doublings(self, recipe: Recipe) -> list[int]:
        """Return some of the numbers of micro-batches that a recipe can use, in rising order.

        The last number in the list is the largest number that the recipe can use. Each number
        before the last one is at least twice its predecessor.
        """
        found = []
        for count in self.micro_batch_counts_for(recipe):
            if (
                not found
                or count >= 2 * found[-1]
                or count == self.micro_batch_counts_for(recipe)[-1]
            ):
                found.append(count)
        return found

    def candidates(self, field: str) -> Sequence[Mapping[str, Any]]:
        """Return the settings that the search tries for one technique.

        Args:
            field: Name of the first field of the technique, such as "checkpoint".

        Returns:
            A sequence of dicts, each with values for some fields of the technique. If the base
            recipe (`cache.base`) sets `field`, or if the framework allows only the base recipe's
            value, the sequence consists of an empty dict, which changes nothing.
        """
        if field not in self._candidates:
            self._candidates[field] = _candidates_of(self, field)
        return self._candidates[field]

    def has_listed(self, field: str) -> bool:
        """Return whether `candidates(field)` was called before, so that its result is cached."""
        return field in self._candidates

    def values(self, field: str) -> list[Any]:
        """Return the values of a field that the search tries, as a list.

        The list has one value for each dict in `candidates(field)`. If a dict does not contain the
        field, the value is that of the base recipe (`cache.base`).

        Args:
            field: Name of the first field of a technique, such as "checkpoint".
        """
        own = getattr(self.cache.base, field)
        return [each.get(field, own) for each in self.candidates(field)]

    def technique_share(self, field: str, recipe: Recipe) -> float:
        """Return how much of one technique a recipe uses, as a fraction from 0 to 1.

        For most techniques, the result is 0 or 1. A graded technique can be used to different
        degrees. An example is offloading, by the fraction of the optimizer state that is offloaded.
        For a graded technique, if the recipe's value of `field` is `values(field)[i]`, the result
        is i / (len(values(field)) - 1).

        Args:
            field: Name of the first field of the technique, such as "offload_optimizer".
            recipe: Recipe whose value of this field is used.
        """
        values = self.values(field)
        place = values.index(getattr(recipe, field))
        return place / (len(values) - 1) if place and BY_FIELD[field].graded else float(place > 0)

    def technique_count(self, recipe: Recipe) -> float:
        """Return the number of techniques that a recipe uses.

        A technique that can be used to different degrees counts as a fraction (see
        `technique_share`).
        """
        return sum(self.technique_share(field, recipe) for field in BY_FIELD)

    def uses_techniques_of(self, recipe: Recipe, smaller: Recipe) -> bool:
        """Return whether a recipe uses all techniques of another recipe.

        If a technique can be used to different degrees, such as offloading, the recipe must use it
        to at least the same degree. The numbers of micro-batches are not compared.

        Args:
            recipe: Recipe that can also use other techniques.
            smaller: Recipe whose techniques `recipe` must use.
        """

        def covers(field: str, technique: Technique) -> bool:
            used = self.technique_share(field, smaller)
            return (
                used == 0
                or getattr(recipe, field) == getattr(smaller, field)
                or (technique.graded and self.technique_share(field, recipe) >= used)
            )

        return all(covers(*each) for each in BY_FIELD.items())

    def families(self) -> Iterator[Recipe]:
        """Yield one recipe for each family, that is, for each possible combination of techniques.

        A family consists of all recipes with the same combination of techniques. The module
        `best_numbers` later chooses the best values of the fields `micro_batches`, `segments` and
        `schedule_bytes` within a family.

        A combination with offloaded activations is divided into several families, one for each
        number of micro-batches that `doublings` returns. The number of micro-batches decides which
        activations are large enough to be offloaded.
        """
        for chosen in product(*map(self.candidates, BY_FIELD)):
            try:
                family = self.family(**{k: v for each in chosen for k, v in each.items()})
                self.limits.require(family)
            except ValueError:
                # These techniques cannot be combined, or the framework cannot run this family.
                continue
            if not family.offload_activations:
                yield replace(family, micro_batches=self.micro_batch_counts_for(family)[0])
            # With checkpoint="segments", only the inputs of the segments could be offloaded.
            # Therefore this combination is tried only if the base recipe already has segments.
            elif family.checkpoint != "segments" or self.cache.base.checkpoint == "segments":
                for number in self.doublings(family):
                    yield replace(family, micro_batches=number)

    @cached_property
    def least_memory_attention(self) -> tuple[str | None, ...]:
        """Tuple with the attention implementation that needs the least memory, or an empty tuple.

        The only element is a value of `Recipe.attention`, such as "flash". The search tries at most
        two implementations, and compares their peaks in the step of the base recipe. An
        implementation needs the least memory if its peak in forward and its peak in backward are
        both at most those of the second implementation.

        The tuple is empty if each implementation has the higher peak in one of the two phases, or
        if the search tries only one implementation.
        """

        def peaks(attention: str | None) -> tuple[int, int]:
            found = self.cache.with_base(attention=attention).phase_peaks
            return found["forward"], found["backward"]

        attentions = self.values("attention")
        if len(attentions) < 2:
            return ()
        one, other = attentions
        if all(map(operator.le, peaks(one), peaks(other))):
            return (one,)
        return (other,) if all(map(operator.le, peaks(other), peaks(one))) else ()

    def family(self, **techniques: Any) -> Recipe:
        """Return a recipe with the given fields and the smallest pages and numbers of copies.

        The fields `page_bytes`, `prefetch` and `in_flight` have the smallest values that the search
        tries. All other fields that are not given have the values of the base recipe
        (`cache.base`).

        Args:
            techniques: Values of the fields that differ from the base recipe.
        """
        recipe = replace(self.cache.base, **techniques)
        return replace(recipe, page_bytes=self.pages_for(recipe)[-1], **self.copies_for(recipe)[0])

    def pages_for(self, recipe: Recipe) -> tuple[int, ...]:
        """Return the page sizes in bytes that are tried for a recipe, the largest first.

        A page is the part of an offloaded optimizer state that is updated at once. The page size
        changes the peak, but not the duration of the step. With `in_backward`, or without an
        offloaded optimizer, the page size has no effect, and only one size is returned.
        """
        paged = recipe.uses_offloaded_optimizer and not recipe.in_backward
        return self.allowed_values("page_bytes", *(PAGES if paged else PAGES[:1]))

    def copies_for(self, recipe: Recipe) -> list[dict[str, int | None]]:
        """Return dicts with the values of `prefetch` and `in_flight` to try for a recipe.

        These fields limit how many offloaded activations are copied at the same time. Without
        offloaded activations, or with the tier "file", the fields do not change the duration of the
        step. The result is then a list with an empty dict, which keeps the recipe's values.
        """
        if not recipe.offload_activations or self.cache.composer.tier == "file":
            return [{}]
        ahead, down = (
            self.allowed_values("prefetch", 0, 1, None),
            self.allowed_values("in_flight", 1, None),
        )
        counts = (
            [(ahead[0], down[0]), (ahead[-1], down[-1])] if self.quick else product(ahead, down)
        )
        return [{"prefetch": ahead, "in_flight": down} for ahead, down in dict.fromkeys(counts)]


def _candidates_of(search: RecipeSearch, field: str) -> Sequence[Mapping[str, Any]]:
    """Return the settings of a technique that the search tries and that the framework can run.

    Args:
        search: Search with the model, the batch and the framework.
        field: First field of the technique, such as "checkpoint".

    Returns:
        Dicts of values for fields of the technique. If the search cannot change the technique, the
        only dict is empty.
    """
    base = search.cache.base
    # Fields with a single possible value are handled first, because listing the candidates of a
    # field can require estimates.
    one = search.limits.only(field) == (getattr(base, field),)
    if one or field in base.changed_fields():
        return ({},)
    return [each for each in BY_FIELD[field].candidates(search) if search.limits.allow(**each)]


def not_tried(search: RecipeSearch) -> list[str]:
    """Return a sentence for each technique that could not be tried, with the reason.

    Techniques that the user's framework excludes are not mentioned.
    """
    base = search.cache.base
    # Techniques that the framework excludes are left out, because their sentences would name the
    # model or the batch as the reason.
    tried = [
        each
        for each in TECHNIQUES
        if search.limits.only(each.field) != (getattr(base, each.field),)
    ]
    return list(filter(None, (technique.not_tried(search) for technique in tried)))


def addable_techniques(search: RecipeSearch, recipe: Recipe) -> list[str]:
    """Return the names of the fields whose techniques could still be added to a recipe.

    The model and the batch support each of these techniques, and each of them can be combined with
    the techniques that the recipe already uses.

    Args:
        search: Model and batch for which recipes are searched.
        recipe: Recipe whose unused techniques are tested.
    """
    trials = {field: search.candidates(field) for field in BY_FIELD} | {
        "precision": [{"precision": name} for name in PRECISIONS],
        "optimizer": [{"optimizer": name} for name in OPTIMIZERS],
        "micro_batches": [{"micro_batches": count} for count in search.micro_batch_counts],
        "ranks": [{"ranks": 2, "shard": "zero3"}] * ((samples_in(search.cache.batch) or 1) > 1),
    }

    def can_be_added(field: str, values: Mapping[str, Any]) -> bool:
        with suppress(ValueError):
            more = replace(recipe, **values)
            search.limits.require(more)
            return getattr(more, field) != getattr(recipe, field)
        return False

    unused = trials.keys() - recipe.changed_fields().keys()
    return [field for field in sorted(unused) if any(can_be_added(field, v) for v in trials[field])]
