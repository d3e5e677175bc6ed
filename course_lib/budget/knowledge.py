"""Estimates and bounds of one model and batch, and the values that a search can try for it.

`extrapolate` makes a single estimate. This module stores the estimates, so that each is made once,
derives lower bounds for recipes without an estimate, and lists the candidates of each technique.
`search` decides with them which recipes to try.
"""

from __future__ import annotations

import operator
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import product
from typing import Any

from torch import nn

from course_lib.checkpoint.blocks import names_of
from course_lib.memory import symbolic
from course_lib.offload import chosen_below

from .estimate import Estimate, estimate
from .extrapolate import Composer, Composing
from .loss import has_loss_sum, mixes_samples, samples_in
from .rates import Rates
from .recipe import Recipe
from .stages import most_segments, own_stages
from .techniques import BY_FIELD, Technique
from .techniques.micro_batches import pieces_allowed

PAGES = (Recipe.page_bytes, 4 << 20, 1 << 20)
# Fields that determine the FLOPs of a step.
COMPUTED = ("attention", "checkpoint", "first_blocks", "segments", "schedule_bytes", "head_chunk")


class Estimator:
    """Estimates of one model and batch, each made once, and bounds for other recipes.

    Attributes:
        base: Recipe of a single rank. Every recipe keeps the fields in which it differs from the
            default.
        blocks: Names of the blocks to checkpoint; None for the longest list of modules of one kind.
        quick: Whether to skip candidates that take long to try and seldom pay.
        estimates: Mapping from each estimated recipe to its estimate.
    """

    def __init__(
        self,
        make_model: Callable,
        make_batch: Callable,
        base: Recipe,
        *,
        blocks: str | Sequence[str] | None = None,
        quick: bool = False,
        watch: Callable[[Recipe], None] | None = None,
        **options: Any,
    ):
        self.base = replace(base, ranks=1, shard=None, update=None) if base.ranks > 1 else base
        self.quick = quick
        self.watch = watch or (lambda recipe: None)
        self.blocks = tuple(blocks) if isinstance(blocks, list) else blocks or base.blocks
        if base.checkpoint != "none":
            self.base = replace(self.base, blocks=self.blocks)
        self.estimates: dict[Recipe, Estimate] = {}
        self._flops: dict[tuple, int] = {}
        self._confirmed: set[Recipe] = set()
        self._candidates: dict[str, Sequence[Mapping[str, Any]]] = {}
        self.composing = Composing(make_model, make_batch, self.base, **options)
        self.estimate(self.base)  # comes first because it reports errors of the model or batch

    # ---- estimates

    def estimate(self, recipe: Recipe, shown: bool = True) -> Estimate:
        """Return the estimate of a recipe, which is made at the first call.

        Args:
            recipe: Recipe to estimate.
            shown: Whether to report the recipe to the progress bar.
        """
        if recipe not in self.estimates:
            if shown:
                self.watch(recipe)
            found = self.estimates[recipe] = self._estimated(recipe)
            computed = _computed(recipe)
            self._flops[computed] = min(found.flops, self._flops.get(computed, found.flops))
        return self.estimates[recipe]

    def _estimated(self, recipe: Recipe) -> Estimate:
        if recipe.ranks > 1:
            return estimate(*self.composing.given, recipe, **self.composing.options)
        return self.composing(recipe)

    def confirms(self, best: Estimate | None) -> bool:
        """Return whether the estimate equals that of the step with all blocks.

        If it does not, all estimates are discarded, and from then on whole steps are run.
        """
        if (
            best is None
            or best.recipe.ranks > 1
            or not self.composing.composing
            or best.recipe in self._confirmed
        ):
            return True
        self.watch(best.recipe)
        if not self.composing.confirms(best):
            self.estimates, self._flops = {}, {}
            return False
        self._confirmed.add(best.recipe)
        return True

    def with_base(self, **techniques: Any) -> Estimate:
        """Return the estimate of the base with these fields changed."""
        return self.estimate(replace(self.base, **techniques))

    @cached_property
    def composer(self) -> Composer:
        return self.composing.composer_of(self.base)

    @property
    def model(self) -> nn.Module:
        return self.composer.model

    @property
    def batch(self) -> Any:
        return self.composer.batch

    @property
    def max_norm(self) -> float | None:
        return self.composer.max_norm

    # ---- Bounds that need no estimate of the recipe itself

    def held_bytes(self, recipe: Recipe) -> int:
        """Return the bytes on the device that are live throughout the step.

        These are the model and the part of the optimizer state that is not offloaded.
        """
        composer = self.composer
        below = chosen_below(self.composer.trained, recipe.offload_optimizer)
        with symbolic(composer.mode):
            state = composer.updates.of_all(recipe, below).held
        return state + self.model_bytes

    @cached_property
    def model_bytes(self) -> int:
        """Bytes of all parameters and buffers."""
        held = *self.model.parameters(), *self.model.buffers()
        return sum(tensor.nbytes for tensor in held)

    def floor_bytes(self, recipe: Recipe) -> int:
        """Return a lower bound on the peak of a recipe.

        The bound is the larger of the bytes that are live throughout and the peak of the optimizer
        step, which does not depend on what forward and backward did.
        """
        step = 0 if recipe.in_backward else self.state_of(recipe).phase_peaks["optimizer"]
        return max(self.held_bytes(recipe), step)

    def state_of(self, recipe: Recipe) -> Estimate:
        """Return the estimate of the base with the recipe's optimizer settings."""
        names = ("offload_optimizer", "in_backward", "page_bytes")
        return self.with_base(**{name: getattr(recipe, name) for name in names})

    def least_seconds(self, recipe: Recipe, rates: Rates) -> float:
        """Return a lower bound on the seconds of a step.

        It counts the fewest FLOPs that the recipe can have (`least_flops`) and, of all copies, only
        those of the optimizer state.
        """
        down, up = self.state_moved(recipe)
        least = {"flops": self.least_flops(recipe), "bytes_down": down, "bytes_up": up}
        return rates.seconds(replace(self.state_of(recipe), **least))

    def state_moved(self, recipe: Recipe) -> tuple[int, int]:
        """Return two numbers: the bytes of optimizer state copied to the lower tier, and back."""
        state, none = self.state_of(recipe), self.state_of(replace(recipe, offload_optimizer=0.0))
        return state.bytes_down - none.bytes_down, state.bytes_up - none.bytes_up

    def least_flops(self, recipe: Recipe) -> int:
        """Return a lower bound on the FLOPs of a step.

        The bound comes from an estimate with the same computation. Otherwise it comes from an
        estimate with part of the techniques, which needs no more FLOPs; without any, it is 0.
        """
        plain = replace(
            recipe,
            checkpoint="none",
            blocks=None,
            first_blocks=None,
            segments=None,
            schedule_bytes=None,
        )
        for part in (
            recipe,
            replace(recipe, head_chunk=None),
            plain,
            replace(plain, head_chunk=None),
        ):
            if (found := self.known_flops(part)) is not None:
                return found
        return 0

    def known_flops(self, recipe: Recipe) -> int | None:
        """Return the FLOPs of an estimate with the same computation; None if there is none."""
        return self._flops.get(_computed(recipe))

    def recomputed_flops(self, one: Recipe) -> int:
        """Return the FLOPs that checkpointing one block adds; 0 if they are not known.

        They do not depend on how the loss head runs.
        """
        own = replace(one, head_chunk=self.base.head_chunk)
        plain = replace(own, checkpoint="none", blocks=None, first_blocks=None)
        flops = [self.known_flops(recipe) for recipe in (own, plain)]
        return 0 if None in flops else flops[0] - flops[1]

    def moves_nothing(self, recipe: Recipe) -> bool:
        """Return whether no activation of the recipe was large enough to be offloaded."""
        return self.estimate(recipe).bytes_down == self.state_moved(recipe)[0]


class Known(Estimator):
    """Estimator with the values that can be tried for the model.

    Searches for several budgets can share it.
    """

    def options(self, name: str, *values: Any) -> tuple:
        """Return the value that the base sets for a field, or else the given values."""
        return (getattr(self.base, name),) if name in self.base.changed() else values

    @cached_property
    def pieces(self) -> tuple[int, ...]:
        """Numbers of micro-batches that can be tried."""
        model = self.composer.model
        weighed = (self.composer.loss_sum is not None or has_loss_sum(model)) and not mixes_samples(
            model
        )
        every = pieces_allowed(samples_in(self.composer.batch)) if weighed else [1]
        return self.options("micro_batches", *(sorted({1, every[-1]}) if self.quick else every))

    def pieces_for(self, recipe: Recipe) -> tuple[int, ...]:
        """Return the numbers of micro-batches for a recipe; steps in backward allow only 1."""
        return (1,) if recipe.in_backward else self.pieces

    def doublings(self, recipe: Recipe) -> list[int]:
        """Return numbers of micro-batches, each at least twice the one before, and the largest."""
        found = []
        for count in self.pieces_for(recipe):
            if not found or count >= 2 * found[-1] or count == self.pieces_for(recipe)[-1]:
                found.append(count)
        return found

    def candidates(self, field: str) -> Sequence[Mapping[str, Any]]:
        """Return the candidates of the technique with this field.

        If the base sets the technique, its setting is the only candidate.
        """
        if field not in self._candidates:
            fixed = field in self.base.changed()
            self._candidates[field] = ({},) if fixed else BY_FIELD[field].candidates(self)
        return self._candidates[field]

    def values(self, field: str) -> list[Any]:
        """Return the values of the field that are tried."""
        own = getattr(self.base, field)
        return [each.get(field, own) for each in self.candidates(field)]

    def amount(self, field: str, recipe: Recipe) -> float:
        """Return the share of a technique that a recipe uses, from 0 to 1."""
        values = self.values(field)
        place = values.index(getattr(recipe, field))
        return place / (len(values) - 1) if place and BY_FIELD[field].graded else float(place > 0)

    def amounts(self, recipe: Recipe) -> float:
        """Count the techniques that a recipe uses; a graded technique counts as a fraction."""
        return sum(self.amount(field, recipe) for field in BY_FIELD)

    def adds_to(self, recipe: Recipe, smaller: Recipe) -> bool:
        """Return whether a recipe uses all techniques of a smaller one, apart from
        micro-batches."""

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
        (`refine`). With offloaded activations, each number of micro-batches is a family of its own,
        because it decides which activations are large enough to be offloaded.
        """
        for chosen in product(*map(self.candidates, BY_FIELD)):
            try:
                family = self.family(**ChainMap(*chosen))
            except ValueError:
                continue  # two of these techniques cannot be combined
            if not family.offload_activations:
                yield replace(family, micro_batches=self.pieces_for(family)[0])
            # With "segments", only the inputs of the segments could be offloaded.
            elif family.checkpoint != "segments" or self.base.checkpoint == "segments":
                for pieces in self.doublings(family):
                    yield replace(family, micro_batches=pieces)

    def leaner(self, recipe: Recipe) -> Recipe | None:
        """Return the recipe with the attention that needs less memory; None if neither does."""
        leanest = self.leanest
        return replace(recipe, attention=leanest[0]) if leanest else None

    @cached_property
    def leanest(self) -> tuple[str | None, ...]:
        """Attention that needs no more memory than the other one, in a tuple.

        The forward and backward of the base are compared. The tuple is empty if only one attention
        is tried, or if each needs more memory than the other in one of the two phases.
        """

        def peaks(attention: str | None) -> tuple[int, int]:
            found = self.with_base(attention=attention).phase_peaks
            return found["forward"], found["backward"]

        attentions = self.values("attention")
        if len(attentions) < 2:
            return ()
        one, other = attentions
        if all(map(operator.le, peaks(one), peaks(other))):
            return (one,)
        return (other,) if all(map(operator.le, peaks(other), peaks(one))) else ()

    @cached_property
    def layers(self) -> int:
        """Number of blocks that can be checkpointed."""
        names = list(self.blocks) if isinstance(self.blocks, tuple) else self.blocks
        with suppress(ValueError):  # the model has no list of modules of one kind
            return len(names_of(self.composer.model, names))
        return 0

    @cached_property
    def segments(self) -> int:
        """Largest number of segments, in the model's own chain or else in its blocks."""
        if self.staged:
            with symbolic(self.composer.mode):
                return most_segments(self.composer.model, self.composer.batch)
        return self.layers

    def family(self, **techniques: Any) -> Recipe:
        """Return the base with these fields, the smallest pages and the fewest copies in flight.

        These pages and copies need the least memory.
        """
        recipe = replace(self.base, **techniques)
        return replace(recipe, page_bytes=self.pages_for(recipe)[-1], **self.copies_for(recipe)[0])

    def pages_for(self, recipe: Recipe) -> tuple[int, ...]:
        """Return the page sizes for the offloaded optimizer, which all cost the same.

        With steps in backward, each parameter is a page by itself, so that the size has no effect.
        """
        paged = recipe.has_pages and not recipe.in_backward
        return self.options("page_bytes", *(PAGES if paged else PAGES[:1]))

    def copies_for(self, recipe: Recipe) -> list[dict[str, int | None]]:
        """Return settings of `prefetch` and `in_flight` for offloaded activations.

        They change the cost only with the tier "host".
        """
        if not recipe.offload_activations or self.composer.tier == "file":
            return [{}]
        counts = product(self.options("prefetch", 0, 1, None), self.options("in_flight", 1, None))
        return [{"prefetch": ahead, "in_flight": down} for ahead, down in counts]

    @cached_property
    def staged(self) -> bool:
        """Whether schedules and segments run the model's own chain instead of its blocks."""
        own = own_stages(self.composer.model) is not None and self.composer.loss_sum is None
        return own and self.blocks is None

    def goes_with(self, **technique: Any) -> bool:
        """Return whether the model supports a technique.

        For example, checkpoints need blocks, and a chunked head needs a head that can run in
        chunks.
        """
        tried = partial(self.estimate, shown=False)
        if self.staged and self.base.checkpoint == "none":
            if technique.get("checkpoint") == "optimal":
                return True  # a model defines stages in order to be scheduled
            tried = self._estimated  # such a recipe is not a candidate, so it is not stored
        if "checkpoint" in technique:
            technique["blocks"] = self.blocks
        try:
            return bool(tried(replace(self.base, **technique)))
        except (TypeError, ValueError, RuntimeError):
            return False


def _computed(recipe: Recipe) -> tuple:
    """Return the fields that determine the FLOPs of a recipe's step."""
    return tuple(getattr(recipe, name) for name in COMPUTED)


class Search:
    """Search for one budget: the knowledge of the model, the budget, and the machine's rates."""

    def __init__(self, known: Known, budget: int, rates: Rates):
        self.known, self.budget, self.rates = known, budget, rates

    def fits(self, recipe: Recipe) -> bool:
        """Return whether the step of a recipe fits the budget."""
        possible = recipe.ranks > 1 or self.known.floor_bytes(recipe) <= self.budget
        return possible and self.known.estimate(recipe).peak_bytes <= self.budget

    def seconds(self, recipe: Recipe) -> float:
        """Return the cost of a recipe in seconds."""
        return self.rates.seconds(self.known.estimate(recipe))

    def most_blocks(self, one: Recipe, cheapest: float) -> int:
        """Return how many of the first blocks can be checkpointed below the cheapest cost.

        Each of several equal blocks costs as many FLOPs to recompute as the first.
        """
        known = self.known
        found = self.known.estimate(one)
        equal = known.blocks is None and len(known.composer.blocks) == known.layers
        each = known.recomputed_flops(one) if equal else 0
        return sum(
            self.rates.seconds(replace(found, flops=found.flops + more * each)) < cheapest
            for more in range(known.layers - 1)
        )

    def spare(self, recipe: Recipe) -> int:
        """Return the bytes of the budget that a recipe leaves unused."""
        return self.budget - self.known.estimate(recipe).peak_bytes

    def flops(self, recipe: Recipe) -> int:
        """Return the FLOPs of a recipe."""
        return self.known.estimate(recipe).flops

    def order(self, found: Estimate) -> tuple:
        """Return the sort key of an estimate: cost, then the rules for equal cost.

        Recipes of equal cost are ranked by fewer micro-batches, larger pages, and fewer copies in
        flight. Fewer bytes communicated and a lower peak come last.
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
