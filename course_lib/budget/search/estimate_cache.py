"""Make and store the estimates of one model and batch.

`extrapolation` composes an estimate from steps with few blocks. If a step cannot be composed, all
blocks are run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from torch import nn

from course_lib._batches import Split, has_batch_norm
from course_lib._origin import explain_symbolic_errors
from course_lib.budget.estimate import Estimate, estimate
from course_lib.budget.recipe import Recipe
from course_lib.budget.stages import most_segments, own_stages
from course_lib.budget.techniques import TECHNIQUES
from course_lib.budget.techniques.micro_batches import counts_of_batch
from course_lib.budget.traces.process_trace import process_trace
from course_lib.checkpoint.blocks import names_of
from course_lib.symbolic import symbolic

from .extrapolation import BlockExtrapolator, NotComposable

# Fields that determine the FLOPs of a step.
COMPUTED = [field for each in TECHNIQUES if each.computes for field in each.fields]


class EstimateCache:
    """Estimates that have been made for one model and batch.

    Searches for several budgets can share one cache.

    Attributes:
        base: Base recipe of the search, for a single rank. The fields in which the base recipe
            differs from the baseline are the same in every recipe of the search.
        blocks: Names of the blocks to checkpoint; None for all lists of blocks.
        given: The functions that make the model and the batch.
        options: Further arguments of `estimate`: `loss_sum`, `max_norm`, `split`, `tier`, `kind`
            and `gpu`.
        estimates: Mapping from each estimated recipe to its estimate.
        held: Mapping from optimizer settings to the bytes that `lower_bounds.held_bytes` returns.
        whole: Recipes of a single rank for which `estimate` ran all blocks, because their steps
            cannot be composed.
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
        self.held: dict[tuple, int] = {}
        self._flops: dict[tuple, int] = {}
        self._confirmed: set[Recipe] = set()
        # Maps each precision to its `BlockExtrapolator`.
        self._composers: dict[str | None, BlockExtrapolator] = {}
        self.given, self.options = (make_model, make_batch), options
        self.whole: set[Recipe] = set()
        self.composes = True
        with explain_symbolic_errors():
            self.composer_of(self.base)

    # ---- Estimates

    def estimate(self, recipe: Recipe, shown: bool = True) -> Estimate:
        """Return the estimate of a recipe. The first call computes it, and later calls reuse it.

        Args:
            recipe: Recipe to estimate.
            shown: Whether to report the recipe to the progress bar.
        """
        if recipe not in self.estimates:
            if shown:
                self.watch(recipe)
            found = self.estimates[recipe] = self._estimate(recipe)
            computed = _fields_of_flops(recipe)
            self._flops[computed] = min(found.flops, self._flops.get(computed, found.flops))
        return self.estimates[recipe]

    def _estimate(self, recipe: Recipe) -> Estimate:
        composable = recipe.ranks == 1 and self.composes and BlockExtrapolator.takes(recipe)
        if composable:
            with suppress(NotComposable), explain_symbolic_errors():
                found = self.composer_of(recipe).estimate(recipe)
                run = partial(process_trace, *self.given, recipe, events=True, **self.options)
                return found.traced_by(lambda places: run(places=places)[0])
        found = estimate(*self.given, recipe, **self.options)
        if recipe.ranks == 1:  # `rank_trace` shortens the steps of several ranks itself
            self.whole.add(recipe)
        # Only the whole step could run, so later estimates are not composed from steps with few
        # blocks.
        self.composes &= not composable
        return found

    def confirms(self, best: Estimate | None) -> bool:
        """Return whether an estimate equals the estimate of the step with all blocks.

        If the two differ, all stored estimates are discarded, and later estimates run all blocks.
        The step is not run if `best` is None, has several ranks, was made with all blocks, or was
        confirmed before. Then the result is True.
        """
        if best is None or best.recipe.ranks > 1:
            return True
        if best.recipe in self.whole or best.recipe in self._confirmed:
            return True
        self.watch(best.recipe)
        # The step with all blocks may raise an error although the steps with few blocks ran.
        with suppress(TypeError, ValueError, RuntimeError):
            options = best.recipe, best.tier, best.host_parameters, best.kind
            if Estimate.from_trace(best.events(), *options) == best:
                self._confirmed.add(best.recipe)
                return True
        self.estimates, self._flops, self.composes = {}, {}, False
        self.whole.clear()
        return False

    def with_base(self, **techniques: Any) -> Estimate:
        """Return the estimate of the base recipe with these fields changed."""
        return self.estimate(replace(self.base, **techniques))

    @cached_property
    def composer(self) -> BlockExtrapolator:
        """`BlockExtrapolator` for the precision of the base recipe."""
        return self.composer_of(self.base)

    def composer_of(self, recipe: Recipe) -> BlockExtrapolator:
        """Return the `BlockExtrapolator` for the recipe's precision."""
        if recipe.precision not in self._composers:
            base = replace(self.base, precision=recipe.precision)
            self._composers[recipe.precision] = BlockExtrapolator(*self.given, base, **self.options)
        return self._composers[recipe.precision]

    @property
    def model(self) -> nn.Module:
        return self.composer.model

    @property
    def batch(self) -> Any:
        return self.composer.batch

    @property
    def split(self) -> Split | None:
        return self.composer.split

    @property
    def max_norm(self) -> float | None:
        return self.composer.max_norm

    def known_flops(self, recipe: Recipe) -> int | None:
        """Return the fewest FLOPs of the estimates with the recipe's values in `COMPUTED`, or None.

        `COMPUTED` has the fields that determine the FLOPs of a step. The result is None if there is
        no such estimate.
        """
        return self._flops.get(_fields_of_flops(recipe))

    # ---- Techniques that the model supports

    @cached_property
    def counts_of_batch(self) -> tuple[list[int], str | None]:
        """Numbers of micro-batches that can be tried, and a reason, as a pair.

        The reason is a label if the batch allows only one number, and otherwise None.
        """
        # BatchNorm may have no statistics of a single sample.
        least = 1 + has_batch_norm(self.model)
        with symbolic(self.composer.mode):
            return counts_of_batch(self.batch, self.split, least)

    @cached_property
    def layers(self) -> int:
        """Number of blocks that can be checkpointed."""
        names = list(self.blocks) if isinstance(self.blocks, tuple) else self.blocks
        # ValueError means that the model has no list of blocks.
        with suppress(ValueError):
            return len(names_of(self.composer.model, names))
        return 0

    @cached_property
    def segments(self) -> int:
        """Largest number of segments that can be formed.

        Segments consist of the model's own stages if `uses_own_stages` is true, and otherwise of
        the model's blocks.
        """
        if self.uses_own_stages:
            with symbolic(self.composer.mode):
                return most_segments(self.composer.model, self.composer.batch)
        return self.layers

    @cached_property
    def uses_own_stages(self) -> bool:
        """Whether schedules and segments run the model's own chain instead of its blocks."""
        own = own_stages(self.composer.model) is not None and self.composer.loss_sum is None
        return own and self.blocks is None and self.base.precision != "autocast"

    def goes_with(self, **technique: Any) -> bool:
        """Return whether the model supports a technique, given as fields of a recipe.

        For example, checkpoints need blocks, and a chunked head needs a head that can run in
        chunks.
        """
        return self.refusal(**technique) is None

    def refusal(self, **technique: Any) -> str | None:
        """Return the first line of the error that the base recipe with a technique raises, or None.

        The result is None if the model supports the technique.
        """
        tried = partial(self.estimate, shown=False)
        if self.uses_own_stages and self.base.checkpoint == "none":
            if technique.get("checkpoint") == "optimal":
                # A schedule needs only stages, which this model defines, so no trial is needed.
                return None
            # This recipe is not a candidate, so its estimate is not stored.
            tried = self._estimate
        if "checkpoint" in technique:
            technique["blocks"] = self.blocks
        try:
            tried(replace(self.base, **technique))
        except (TypeError, ValueError, RuntimeError) as error:
            return str(error).partition("\n")[0]
        return None


def _fields_of_flops(recipe: Recipe) -> tuple:
    """Return the fields that determine the FLOPs of a recipe's step."""
    return tuple(getattr(recipe, name) for name in COMPUTED)
