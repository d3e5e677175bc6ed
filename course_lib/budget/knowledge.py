"""Estimates of one model and batch, each made once, and bounds that follow from them.

`extrapolate` composes an estimate from steps with few blocks. Where it cannot, the whole step is
run. `candidates` lists the recipes that a search can try.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from torch import nn

from course_lib._origin import explained
from course_lib.checkpoint.blocks import names_of
from course_lib.memory import symbolic
from course_lib.offload import chosen_below

from .estimate import Estimate, estimate
from .extrapolate import Composer, NotComposable
from .process import process_trace
from .rates import Rates
from .recipe import Recipe
from .stages import most_segments, own_stages
from .techniques import TECHNIQUES

# Fields that determine the FLOPs of a step.
COMPUTED = [field for each in TECHNIQUES if each.computes for field in each.fields]


class Known:
    """What is known so far of one model and batch: estimates, and bounds for other recipes.

    Searches for several budgets can share it.

    Attributes:
        base: Recipe of a single rank. Every recipe keeps the fields in which it differs from the
            default.
        blocks: Names of the blocks to checkpoint; None for the longest list of modules of one kind.
        given: The functions that make the model and the batch.
        options: Further arguments of `estimate`: `loss_sum`, `max_norm`, `tier` and `kind`.
        estimates: Mapping from each estimated recipe to its estimate.
        whole: Recipes that were estimated by their whole steps.
        composes: Whether estimates are composed from steps with few blocks, where possible.
    """

    def __init__(
        self,
        make_model: Callable,
        make_batch: Callable,
        base: Recipe,
        *,
        blocks: str | Sequence[str] | None = None,
        watch: Callable[[Recipe], None] | None = None,
        **options: Any,
    ):
        self.base = replace(base, ranks=1, shard=None, update=None) if base.ranks > 1 else base
        self.watch = watch or (lambda recipe: None)
        self.blocks = tuple(blocks) if isinstance(blocks, list) else blocks or base.blocks
        if base.checkpoint != "none":
            self.base = replace(self.base, blocks=self.blocks)
        self.estimates: dict[Recipe, Estimate] = {}
        self._flops: dict[tuple, int] = {}
        self._confirmed: set[Recipe] = set()
        self._composers: dict[str | None, Composer] = {}  # by precision
        self.given, self.options = (make_model, make_batch), options
        self.whole: set[Recipe] = set()
        self.composes = True
        with explained():
            self.composer_of(self.base)

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
        composable = recipe.ranks == 1 and self.composes and Composer.takes(recipe)
        if composable:
            with suppress(NotComposable), explained():
                found = self.composer_of(recipe).estimate(recipe)
                run = partial(process_trace, *self.given, recipe, events=True, **self.options)
                return found.traced_by(lambda places: run(places=places)[0])
        found = estimate(*self.given, recipe, **self.options)
        self.whole.add(recipe)
        # The model runs, but not with a part of its blocks.
        self.composes &= not composable
        return found

    def confirms(self, best: Estimate | None) -> bool:
        """Return whether the estimate equals that of the step with all blocks.

        If it does not, all estimates are discarded, and from then on whole steps are run.
        """
        if best is None or best.recipe in self.whole | self._confirmed:
            return True
        self.watch(best.recipe)
        with suppress(NotComposable):
            if self.composer_of(best.recipe).whole(best.recipe) == best:
                self._confirmed.add(best.recipe)
                return True
        self.estimates, self._flops, self.composes = {}, {}, False
        self.whole.clear()
        return False

    def with_base(self, **techniques: Any) -> Estimate:
        """Return the estimate of the base with these fields changed."""
        return self.estimate(replace(self.base, **techniques))

    @cached_property
    def composer(self) -> Composer:
        """Composer of the base's precision."""
        return self.composer_of(self.base)

    def composer_of(self, recipe: Recipe) -> Composer:
        """Return the composer for the recipe's precision."""
        if recipe.precision not in self._composers:
            base = replace(self.base, precision=recipe.precision)
            self._composers[recipe.precision] = Composer(*self.given, base, **self.options)
        return self._composers[recipe.precision]

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

    # ---- what the model supports

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
