"""A search's knowledge of one model and batch: its estimates, each made once, and bounds that
follow from them."""

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
# Fields on which a step's FLOPs depend.
COMPUTED = ("attention", "checkpoint", "first_blocks", "segments", "schedule_bytes", "head_chunk")


class Estimator:
    """The estimates of one model and batch, each made once, and bounds for recipes that were not
    estimated.

    Attributes:
        base: one rank's recipe, whose fields other than the default every recipe keeps.
        blocks: what is checkpointed; None for the longest list of like modules.
        quick: leave out what takes long to try and seldom pays.
        estimates: recipe -> its estimate, of all that were made.
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
        self.estimate(self.base)  # first of all, since it says what is wrong with model or batch

    # ---- estimates

    def estimate(self, recipe: Recipe, shown: bool = True) -> Estimate:
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
        """Whether the whole step takes what was estimated; if not, all is forgotten, and whole
        steps are run."""
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
        """Estimate of the base with these fields."""
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

    # ---- bounds, without an estimate of the recipe itself

    def held_bytes(self, recipe: Recipe) -> int:
        """The model and what of the optimizer's state is on the device, which are there throughout
        the step."""
        composer = self.composer
        below = chosen_below(self.composer.trained, recipe.offload_optimizer)
        with symbolic(composer.mode):
            state = composer.updates.of_all(recipe, below).held
        return state + self.model_bytes

    @cached_property
    def model_bytes(self) -> int:
        """Parameters and buffers."""
        held = *self.model.parameters(), *self.model.buffers()
        return sum(tensor.nbytes for tensor in held)

    def floor_bytes(self, recipe: Recipe) -> int:
        """The least that a step by the recipe takes: what is held, and the optimizer's step, which
        takes the same whatever forward and backward did."""
        step = 0 if recipe.in_backward else self.state_of(recipe).phase_peaks["optimizer"]
        return max(self.held_bytes(recipe), step)

    def state_of(self, recipe: Recipe) -> Estimate:
        """The step by the base, with the recipe's optimizer."""
        names = ("offload_optimizer", "in_backward", "page_bytes")
        return self.with_base(**{name: getattr(recipe, name) for name in names})

    def least_seconds(self, recipe: Recipe, rates: Rates) -> float:
        """Seconds that a step takes at least: FLOPs as without offloaded activations, and of what
        is moved the optimizer's state alone."""
        down, up = self.state_moved(recipe)
        least = {"flops": self.least_flops(recipe), "bytes_down": down, "bytes_up": up}
        return rates.seconds(replace(self.state_of(recipe), **least))

    def state_moved(self, recipe: Recipe) -> tuple[int, int]:
        """Bytes of the optimizer's state that go down in a step, and up."""
        state, none = self.state_of(recipe), self.state_of(replace(recipe, offload_optimizer=0.0))
        return state.bytes_down - none.bytes_down, state.bytes_up - none.bytes_up

    def least_flops(self, recipe: Recipe) -> int:
        """FLOPs of an estimate with the same to compute, else of one with part of it, which takes
        no more."""
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
        """FLOPs of an estimate with the same to compute; None if there is none."""
        return self._flops.get(_computed(recipe))

    def recomputed_flops(self, one: Recipe) -> int:
        """FLOPs of one block's checkpoint, whatever the head; 0 where they are not known."""
        own = replace(one, head_chunk=self.base.head_chunk)
        plain = replace(own, checkpoint="none", blocks=None, first_blocks=None)
        flops = [self.known_flops(recipe) for recipe in (own, plain)]
        return 0 if None in flops else flops[0] - flops[1]

    def moves_nothing(self, recipe: Recipe) -> bool:
        """Whether no activation was large enough to go down."""
        return self.estimate(recipe).bytes_down == self.state_moved(recipe)[0]


class Known(Estimator):
    """An estimator, and what can be tried of the model: searches for several budgets can share
    it."""

    def options(self, name: str, *values: Any) -> tuple:
        """Values that a field can have: what the base sets, else these."""
        return (getattr(self.base, name),) if name in self.base.changed() else values

    @cached_property
    def pieces(self) -> tuple[int, ...]:
        """Numbers of micro-batches."""
        model = self.composer.model
        weighed = (self.composer.loss_sum is not None or has_loss_sum(model)) and not mixes_samples(
            model
        )
        every = pieces_allowed(samples_in(self.composer.batch)) if weighed else [1]
        return self.options("micro_batches", *(sorted({1, every[-1]}) if self.quick else every))

    def pieces_for(self, recipe: Recipe) -> tuple[int, ...]:
        """Numbers of micro-batches; steps in backward take one."""
        return (1,) if recipe.in_backward else self.pieces

    def doublings(self, recipe: Recipe) -> list[int]:
        """Numbers of micro-batches: the most, and from one on those that are at least twice the one
        before."""
        found = []
        for count in self.pieces_for(recipe):
            if not found or count >= 2 * found[-1] or count == self.pieces_for(recipe)[-1]:
                found.append(count)
        return found

    def candidates(self, field: str) -> Sequence[Mapping[str, Any]]:
        """Candidates of the technique with this field: what the base sets, else what it proposes
        itself."""
        if field not in self._candidates:
            fixed = field in self.base.changed()
            self._candidates[field] = ({},) if fixed else BY_FIELD[field].candidates(self)
        return self._candidates[field]

    def values(self, field: str) -> list[Any]:
        """The field's values that are tried."""
        own = getattr(self.base, field)
        return [each.get(field, own) for each in self.candidates(field)]

    def amount(self, field: str, recipe: Recipe) -> float:
        """The share of a technique that a recipe uses, from 0 to 1."""
        values = self.values(field)
        place = values.index(getattr(recipe, field))
        return place / (len(values) - 1) if place and BY_FIELD[field].graded else float(place > 0)

    def amounts(self, recipe: Recipe) -> float:
        """Amount that a recipe adds to the plain step, in techniques."""
        return sum(self.amount(field, recipe) for field in BY_FIELD)

    def adds_to(self, recipe: Recipe, smaller: Recipe) -> bool:
        """Whether a recipe uses all that the smaller one uses, micro-batches aside."""

        def covers(field: str, technique: Technique) -> bool:
            used = self.amount(field, smaller)
            return (
                used == 0
                or getattr(recipe, field) == getattr(smaller, field)
                or (technique.graded and self.amount(field, recipe) >= used)
            )

        return all(covers(*each) for each in BY_FIELD.items())

    def families(self) -> Iterator[Recipe]:
        """One recipe for each combination of techniques; how many micro-batches, segments and
        schedule bytes is found later.

        What goes down depends on the micro-batches: with offloaded activations each number is a
        combination of its own, from one to the next twice as many.
        """
        for chosen in product(*map(self.candidates, BY_FIELD)):
            try:
                family = self.family(**ChainMap(*chosen))
            except ValueError:
                continue  # two techniques that do not go together
            if not family.offload_activations:
                yield replace(family, micro_batches=self.pieces_for(family)[0])
            # of segments only their inputs would go down
            elif family.checkpoint != "segments" or self.base.checkpoint == "segments":
                for pieces in self.doublings(family):
                    yield replace(family, micro_batches=pieces)

    def leaner(self, recipe: Recipe) -> Recipe | None:
        """The recipe with the attention that takes less, as far as that is known of the base."""
        leanest = self.leanest
        return replace(recipe, attention=leanest[0]) if leanest else None

    @cached_property
    def leanest(self) -> tuple[str | None, ...]:
        """The attention with which both forward and backward take less than with the other; none
        where there is no such."""

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
        with suppress(ValueError):  # without a list of like modules
            return len(names_of(self.composer.model, names))
        return 0

    @cached_property
    def segments(self) -> int:
        """The most segments: of the model's own chain, or of the blocks."""
        if self.staged:
            with symbolic(self.composer.mode):
                return most_segments(self.composer.model, self.composer.batch)
        return self.layers

    def family(self, **techniques: Any) -> Recipe:
        """The base with these; and with the smallest pages and fewest copies under way, which take
        the least."""
        recipe = replace(self.base, **techniques)
        return replace(recipe, page_bytes=self.pages_for(recipe)[-1], **self.copies_for(recipe)[0])

    def pages_for(self, recipe: Recipe) -> tuple[int, ...]:
        """Page sizes of the offloaded optimizer, all of one price; in backward each parameter is a
        page by itself."""
        paged = recipe.has_pages and not recipe.in_backward
        return self.options("page_bytes", *(PAGES if paged else PAGES[:1]))

    def copies_for(self, recipe: Recipe) -> list[dict[str, int | None]]:
        """Numbers of activations' copies under way; only with the host below they have a price."""
        if not recipe.offload_activations or self.composer.tier == "file":
            return [{}]
        counts = product(self.options("prefetch", 0, 1, None), self.options("in_flight", 1, None))
        return [{"prefetch": ahead, "in_flight": down} for ahead, down in counts]

    @cached_property
    def staged(self) -> bool:
        """Whether a chain that is run is the model's own."""
        own = own_stages(self.composer.model) is not None and self.composer.loss_sum is None
        return own and self.blocks is None

    def goes_with(self, **technique: Any) -> bool:
        """Whether the model has blocks to be checkpointed, a head that runs in chunks, attention
        that can be flash."""
        tried = partial(self.estimate, shown=False)
        if self.staged and self.base.checkpoint == "none":
            if technique.get("checkpoint") == "optimal":
                return True  # which is what its stages are for
            tried = self._estimated  # of which none is a candidate
        if "checkpoint" in technique:
            technique["blocks"] = self.blocks
        try:
            return bool(tried(replace(self.base, **technique)))
        except (TypeError, ValueError, RuntimeError):
            return False


def _computed(recipe: Recipe) -> tuple:
    return tuple(getattr(recipe, name) for name in COMPUTED)


class Search:
    """A search: what is known of the model, a budget, and the rates that say what is cheap."""

    def __init__(self, known: Known, budget: int, rates: Rates):
        self.known, self.budget, self.rates = known, budget, rates

    def fits(self, recipe: Recipe) -> bool:
        possible = recipe.ranks > 1 or self.known.floor_bytes(recipe) <= self.budget
        return possible and self.known.estimate(recipe).peak_bytes <= self.budget

    def seconds(self, recipe: Recipe) -> float:
        return self.rates.seconds(self.known.estimate(recipe))

    def most_blocks(self, one: Recipe, cheapest: float) -> int:
        """The most of the first blocks that can be checkpointed at a lower cost than the cheapest;
        equal blocks are each computed again for as many FLOPs as the first."""
        known = self.known
        found = self.known.estimate(one)
        equal = known.blocks is None and len(known.composer.blocks) == known.layers
        each = known.recomputed_flops(one) if equal else 0
        return sum(
            self.rates.seconds(replace(found, flops=found.flops + more * each)) < cheapest
            for more in range(known.layers - 1)
        )

    def spare(self, recipe: Recipe) -> int:
        """Bytes that are left of the budget."""
        return self.budget - self.known.estimate(recipe).peak_bytes

    def flops(self, recipe: Recipe) -> int:
        return self.known.estimate(recipe).flops

    def order(self, found: Estimate) -> tuple:
        """The cheapest first; of equal price the one of fewer micro-batches, larger pages, fewer
        copies under way."""
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
