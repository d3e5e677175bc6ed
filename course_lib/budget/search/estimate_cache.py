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
    """Cache of the estimated training steps of one model and batch.

    Several searches with different memory budgets can share a cache. If possible, an estimate is
    computed from steps with only a few of the model's blocks. Otherwise a step with all blocks is
    run.

    Attributes:
        base: Base recipe of the searches, for a single rank. If a field of the base recipe differs
            from its default, every recipe of a search has the same value in this field.
        blocks: Names of the blocks to checkpoint; None for the blocks of all lists of blocks.
        watch: Function that is called with each recipe before the recipe is estimated.
        given: Pair of the functions that create the model and the batch.
        options: Other arguments of `estimate`: `loss_sum`, `max_norm`, `split`, `tier`, `kind` and
            `gpu`.
        estimates: Mapping from each estimated recipe to its estimate.
        held: Mapping from the settings of an optimizer to the bytes that are live throughout a
            step with this optimizer (see `lower_bounds.held_bytes`).
        whole: Recipes of a single rank whose step was run with all blocks, because steps with few
            blocks were not possible.
        composes: Whether estimates may be computed from steps with few blocks. It becomes False
            after these steps have failed for the model.
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
        """Return the estimate of a recipe's step, and compute it only if it is not cached.

        Args:
            recipe: Memory-saving techniques of the step.
            shown: Whether to call `watch`, which shows the progress, before a new estimate.
        """
        if recipe not in self.estimates:
            if shown:
                self.watch(recipe)
            found = self.estimates[recipe] = self._estimate(recipe)
            computed = _fields_of_flops(recipe)
            self._flops[computed] = min(found.flops, self._flops.get(computed, found.flops))
        return self.estimates[recipe]

    def _estimate(self, recipe: Recipe) -> Estimate:
        """Estimate the training step of a recipe, without looking it up in the cache.

        If possible, the estimate is computed from steps with only a few of the model's blocks.
        Otherwise a step with all blocks is run.
        """
        composable = recipe.ranks == 1 and self.composes and can_extrapolate(recipe)
        if composable:
            with suppress(ExtrapolationError), explain_symbolic_errors():
                found = self.composer_of(recipe).estimate(recipe)
                run = partial(process_trace, *self.given, recipe, events=True, **self.options)
                return found.with_trace_function(lambda places: run(places=places)[0])
        found = estimate(*self.given, recipe, **self.options)
        if recipe.ranks == 1:  # with several ranks, `rank_trace` may have run only a few blocks
            self.whole.add(recipe)
        # If the steps with few blocks have failed, later estimates do not try such steps again.
        self.composes &= not composable
        return found

    def confirm(self, best: Estimate | None) -> bool:
        """Check an estimate that was computed from steps with a few of the model's blocks.

        The step is run with all blocks on symbolic tensors, which need no memory. If the result
        differs from the estimate, the cache is emptied, and all later estimates run all blocks.

        Args:
            best: Estimate to check, or None.

        Returns:
            Whether the estimate is right. The result is True without a check if `best` is None, has
            several ranks, was computed with all blocks, or was checked before.
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
        """Return the estimate of the base recipe with some fields changed.

        Args:
            techniques: Values of the changed fields, as keyword arguments.
        """
        return self.estimate(replace(self.base, **techniques))

    @cached_property
    def composer(self) -> BlockExtrapolator:
        """`BlockExtrapolator` for the precision of the base recipe.

        A `BlockExtrapolator` runs a training step with only a few of the model's blocks, and
        extrapolates the result to all blocks.
        """
        return self.composer_of(self.base)

    def composer_of(self, recipe: Recipe) -> BlockExtrapolator:
        """Return the `BlockExtrapolator` for the precision of a recipe.

        A `BlockExtrapolator` runs a training step with only a few of the model's blocks, and
        extrapolates the result to all blocks. One object is created per precision.
        """
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
        """Return the FLOPs of a recipe's step if they are known from the cached estimates, or None.

        The FLOPs are known if a cached estimate has the same values as `recipe` in all fields that
        can change the FLOPs of forward and backward (`FLOPS_FIELDS`). If there are several such
        estimates, the result is their lowest number of FLOPs.
        """
        return self._flops.get(_fields_of_flops(recipe))

    # ---- Techniques that the model supports

    @cached_property
    def counts_of_batch(self) -> tuple[list[int], str | None]:
        """Numbers of micro-batches into which the batch can be split, or the reason why it cannot.

        The value is a pair of a list of numbers and a text. If the batch cannot be split, the list
        is [1], and the text gives the reason. Otherwise the text is None.
        """
        # BatchNorm can raise an error for a single sample, so each micro-batch needs at least two.
        least = 1 + has_batch_norm(self.model)
        with symbolic(self.composer.mode):
            return counts_of_batch(self.batch, self.split, least)

    @cached_property
    def layers(self) -> int:
        """Number of blocks that can be checkpointed; 0 if the model has no list of blocks."""
        names = list(self.blocks) if isinstance(self.blocks, tuple) else self.blocks
        # ValueError means that the model has no list of blocks.
        with suppress(ValueError):
            return len(names_of(self.composer.model, names))
        return 0

    @cached_property
    def segments(self) -> int:
        """Largest number of segments into which the model can be divided for checkpoints.

        A segment consists of one or more of the functions that the model's method `stages` returns,
        if `uses_own_stages` is True. Otherwise it consists of one or more of the model's blocks.
        """
        if self.uses_own_stages:
            with symbolic(self.composer.mode):
                return max_segments(self.composer.model, self.composer.batch)
        return self.layers

    @cached_property
    def uses_own_stages(self) -> bool:
        """Whether segments and schedules use the model's method `stages` instead of its blocks.

        `stages` returns functions. Each takes the output of the previous one, and the last one
        returns the loss.
        """
        own = own_stages(self.composer.model) is not None and self.composer.loss_sum is None
        return own and self.blocks is None and self.base.precision != "autocast"

    def supports(self, **technique: Any) -> bool:
        """Return whether the model supports a technique.

        For example, checkpoints need a model with blocks.

        Args:
            technique: Fields of a recipe that describe the technique, such as checkpoint="layers".
        """
        return self.unsupported_reason(**technique) is None

    def unsupported_reason(self, **technique: Any) -> str | None:
        """Return the reason why the model does not support a technique, or None if it does.

        The reason is the first line of the error message of an estimate with this technique.

        Args:
            technique: Fields of a recipe that describe the technique, such as checkpoint="layers".
                All other fields are those of the base recipe.
        """
        tried = partial(self.estimate, shown=False)
        if self.uses_own_stages and self.base.checkpoint == "none":
            if technique.get("checkpoint") == "optimal":
                # A schedule needs only stages, which this model defines, so no trial is needed.
                return None
            # The recipe below is not a candidate of the search, so its estimate is not cached.
            tried = self._estimate
        if "checkpoint" in technique:
            technique["blocks"] = self.blocks
        try:
            tried(replace(self.base, **technique))
        except (TypeError, ValueError, RuntimeError) as error:
            return str(error).partition("\n")[0]
        return None


def _fields_of_flops(recipe: Recipe) -> tuple:
    """Return the values of those fields of a recipe that determine the FLOPs of its step."""
    return tuple(getattr(recipe, name) for name in FLOPS_FIELDS)
