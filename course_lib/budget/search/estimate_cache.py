"""Make and store the estimates of one model and batch.

The module `extrapolation` composes an estimate from steps with few blocks. If an estimate cannot be
composed, `estimate` runs the step with all blocks.
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
from course_lib.budget.stages import max_segments, own_stages
from course_lib.budget.techniques import TECHNIQUES
from course_lib.budget.techniques.micro_batches import counts_of_batch
from course_lib.budget.traces.process_trace import process_trace
from course_lib.checkpoint.blocks import names_of
from course_lib.symbolic import symbolic

from .extrapolation import BlockExtrapolator, ExtrapolationError, can_extrapolate

# Fields that determine the FLOPs of a step.
FLOPS_FIELDS = [field for each in TECHNIQUES if each.computes for field in each.fields]


class EstimateCache:
    """Cache of the estimates of one model and batch.

    Searches for several budgets can share a cache.

    Attributes:
        base: Base recipe of the search, for a single rank. The fields in which the base recipe
            differs from the baseline are the same in every recipe of the search.
        blocks: Names of the blocks to checkpoint; None for all lists of blocks.
        watch: Function that is called with each recipe before it is estimated.
        given: The functions that make the model and the batch.
        options: Further arguments of `estimate`: `loss_sum`, `max_norm`, `split`, `tier`, `kind`
            and `gpu`.
        estimates: Mapping from each estimated recipe to its estimate.
        held: Mapping from optimizer settings to the result of `lower_bounds.held_bytes`.
        whole: Recipes of a single rank whose estimates could not be composed, so that the step ran
            with all blocks.
        composes: Whether estimates may be composed from steps with few blocks. It becomes False
            when this has failed for the model.
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
        """Return the estimate of a recipe, which is computed only once.

        Args:
            recipe: Recipe to estimate.
            shown: Whether to call `watch` before a new estimate.
        """
        if recipe not in self.estimates:
            if shown:
                self.watch(recipe)
            found = self.estimates[recipe] = self._estimate(recipe)
            computed = _fields_of_flops(recipe)
            self._flops[computed] = min(found.flops, self._flops.get(computed, found.flops))
        return self.estimates[recipe]

    def _estimate(self, recipe: Recipe) -> Estimate:
        """Compute an estimate from steps with few blocks if possible, and else with all blocks."""
        composable = recipe.ranks == 1 and self.composes and can_extrapolate(recipe)
        if composable:
            with suppress(ExtrapolationError), explain_symbolic_errors():
                found = self.composer_of(recipe).estimate(recipe)
                run = partial(process_trace, *self.given, recipe, events=True, **self.options)
                return found.with_trace_function(lambda places: run(places=places)[0])
        found = estimate(*self.given, recipe, **self.options)
        if recipe.ranks == 1:  # `rank_trace` shortens the steps of several ranks itself
            self.whole.add(recipe)
        # The recipe could have been composed, but the steps with few blocks have failed. Later
        # estimates do not try them again.
        self.composes &= not composable
        return found

    def confirm(self, best: Estimate | None) -> bool:
        """Return whether a composed estimate agrees with the step that runs all blocks.

        If they differ, all stored estimates are discarded, and later estimates run all blocks. The
        result is True without a check if `best` is None, has several ranks, was made with all
        blocks, or was confirmed before.
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
        """Return the fewest FLOPs of stored estimates with the same values of `FLOPS_FIELDS`.

        These fields determine the FLOPs of a step. If no such estimate is stored, the result is
        None.
        """
        return self._flops.get(_fields_of_flops(recipe))

    # ---- Techniques that the model supports

    @cached_property
    def counts_of_batch(self) -> tuple[list[int], str | None]:
        """Numbers of micro-batches into which the batch can be split, and a text or None.

        If the batch cannot be split, the text states the reason.
        """
        # BatchNorm may raise an error for a single sample.
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
        """Largest number of segments into which the model can be divided for checkpoints.

        Segments consist of the model's own stages if `uses_own_stages` is true, and otherwise of
        the model's blocks.
        """
        if self.uses_own_stages:
            with symbolic(self.composer.mode):
                return max_segments(self.composer.model, self.composer.batch)
        return self.layers

    @cached_property
    def uses_own_stages(self) -> bool:
        """Whether schedules and segments run the model's own chain instead of its blocks."""
        own = own_stages(self.composer.model) is not None and self.composer.loss_sum is None
        return own and self.blocks is None and self.base.precision != "autocast"

    def supports(self, **technique: Any) -> bool:
        """Return whether the model supports a technique, given as fields of a recipe.

        For example, checkpoints need blocks, and a chunked head needs a head that can run in
        chunks.
        """
        return self.unsupported_reason(**technique) is None

    def unsupported_reason(self, **technique: Any) -> str | None:
        """Return the reason why the model does not support a technique, or None if it does.

        The technique is given as fields of a recipe. The reason is the first line of the error that
        an estimate of the base recipe with these fields raises.
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
    """Return the values of the fields that determine the FLOPs of a recipe's step."""
    return tuple(getattr(recipe, name) for name in FLOPS_FIELDS)
