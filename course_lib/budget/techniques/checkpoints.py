"""Technique that checkpoints the blocks of a model, or recomputes activations by a schedule.

A schedule states which blocks keep their activations. Lesson 02 explains checkpoints, and lesson 03
explains schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from course_lib._check import any_of, argument_message, kind
from course_lib.checkpoint import CheckpointedBlocks, checkpoint_blocks
from course_lib.checkpoint.blocks import names_of, names_to_choose
from course_lib.checkpoint.state import is_instance_norm, statistics_of
from course_lib.labels import text, verbatim
from course_lib.schedule import Chain, ScheduledBlocks, segments

from ..stages import (
    ADVICE,
    CHAINED,
    chains_of,
    fastest,
    is_compared,
    may_draw,
    record_comparison,
    runs_stages,
)
from .technique import (
    ForwardCheck,
    Recipe,
    RecipeSearch,
    Technique,
    at_least_or_none,
    choice,
    combine_checks,
    fields_of,
)

CHECKPOINTS = ("none", "selective", "layers", "segments", "optimal")
# Operators whose outputs are kept for backward with checkpoint="selective".
MATRIX_PRODUCTS = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]
# ALLOWED_WITH maps a field to the values of `checkpoint` that allow the field to be set.
# REQUIRED_WITH maps a field to the only value of `checkpoint` that allows the field to be set. With
# this value, the field must be set.
ALLOWED_WITH = {"blocks": CHECKPOINTS[1:], "first_blocks": CHECKPOINTS[1:3]}
REQUIRED_WITH = {"segments": "segments", "schedule_bytes": "optimal"}


def _check_block_names(name: str, value: Any) -> None:
    """Raise TypeError unless the field `blocks` is a name, a tuple of names or None."""
    for each in value if isinstance(value, tuple) and value else [value]:
        kind(name, each, (str, type(None)), "a name (wildcards allowed), a tuple of names or None")


class Checkpoint(Technique):
    """Technique that checkpoints the blocks of a model, or recomputes activations by a schedule.

    A schedule states which blocks keep their activations, and when the other blocks are recomputed.
    """

    fields = fields_of(
        checkpoint=choice(*CHECKPOINTS),
        blocks=_check_block_names,
        first_blocks=at_least_or_none(1),
        segments=at_least_or_none(1),
        schedule_bytes=at_least_or_none(1),
    )
    after = ("head_chunk",)
    composable = True
    acts_on = frozenset({"activation"})

    def conflict(self, recipe: Recipe) -> str | None:
        for name, kinds in ALLOWED_WITH.items():
            value = getattr(recipe, name)
            if value is not None and recipe.checkpoint not in kinds:
                return (
                    f"{name} must be None unless checkpoint is {any_of(map(repr, kinds))}, got"
                    f" {value!r} with checkpoint={recipe.checkpoint!r}"
                )
        for name, owner in REQUIRED_WITH.items():
            if (getattr(recipe, name) is not None) != (recipe.checkpoint == owner):
                allowed = f"a number when checkpoint is {owner!r}, and None otherwise"
                actual = f"{getattr(recipe, name)} with checkpoint={recipe.checkpoint!r}"
                return argument_message(name, allowed, actual)
        return None

    def unsupported_reason(self, recipe: Recipe, model: nn.Module) -> str | None:
        if recipe.checkpoint in CHAINED:
            _check_chain(model, recipe)
        elif recipe.checkpoint != "none":
            _check_blocks(model, recipe)
        return None

    def apply(
        self, recipe: Recipe, model: nn.Module, store: Any = None
    ) -> AbstractContextManager[ForwardCheck]:
        return _apply_checkpoints(recipe, model)

    def labels(self, recipe: Recipe) -> list[str]:
        if recipe.checkpoint == "none":
            return []
        megabytes = f"{(recipe.schedule_bytes or 0) / 1e6:,.1f}"
        words = {
            "layers": text("checkpoint layers"),
            "selective": text("checkpoint selective"),
            "segments": text("checkpoint segments {count}", count=recipe.segments),
            "optimal": text("checkpoint optimal {megabytes} MB", megabytes=megabytes),
        }[recipe.checkpoint]
        if recipe.first_blocks is not None:
            words = text("{checkpoint} first {count}", checkpoint=words, count=recipe.first_blocks)
        if recipe.blocks is not None:
            blocks = recipe.blocks if isinstance(recipe.blocks, str) else " ".join(recipe.blocks)
            words = text("{checkpoint} of {blocks}", checkpoint=words, blocks=verbatim(blocks))
        return [words]

    def candidates(self, search: RecipeSearch) -> list[Mapping[str, Any]]:
        """Return one setting for each kind of checkpoint that `course_lib.budget.fit` can try.

        Each setting is a mapping from fields of `Recipe` to values. The settings for "optimal" and
        "segments" contain placeholders, `schedule_bytes` = 1 and `segments` = 2. The module
        `best_numbers` later finds better values for these two fields.

        Args:
            search: Object of the search that `fit` runs. `search.cache` has the model, the batch
                and the base recipe (the settings that the user has fixed).
        """
        cache = search.cache
        found: list[Mapping[str, Any]] = [{"checkpoint": "none"}]
        if cache.supports(checkpoint="layers"):
            kinds = ("layers",) if search.quick else ("selective", "layers")
            found += [{"checkpoint": name, "blocks": cache.blocks} for name in kinds]
        if not search.quick and cache.supports(checkpoint="optimal", schedule_bytes=1 << 60):
            found += [{"checkpoint": "optimal", "blocks": cache.blocks, "schedule_bytes": 1}]
            if cache.segments > 1:
                found += [{"checkpoint": "segments", "blocks": cache.blocks, "segments": 2}]
        return found

    def not_tried(self, search: RecipeSearch) -> str | None:
        cache = search.cache
        if cache.base.checkpoint != "none" or cache.uses_own_stages:
            return None
        if not cache.layers:
            names = ", ".join(map(repr, names_to_choose(cache.model)[:12]))
            return names and text(
                "no checkpoint was tried, because the model has no list of blocks (nn.ModuleList);"
                " name some of its modules with blocks= (--blocks in the command): {names}",
                names=verbatim(names),
            )
        if search.has_listed(self.field) and len(search.candidates(self.field)) == 1:
            reason = verbatim(cache.unsupported_reason(checkpoint="layers"))
            return text(
                "no checkpoint was tried, because a step with checkpoints fails: {reason}",
                reason=reason,
            )
        return None


@contextmanager
def _apply_checkpoints(recipe: Recipe, model: nn.Module) -> Iterator[ForwardCheck]:
    """Apply the recipe's checkpoints to the model inside the `with` block."""
    checks: list[ForwardCheck] = []
    with ExitStack() as stack:
        # If the step runs the functions that the model's method `stages` returns, the module
        # `budget.stages` applies the checkpoints when it computes the loss.
        if recipe.checkpoint in CHAINED and not runs_stages(model, recipe):
            handle = stack.enter_context(schedule_of_blocks(model, recipe))
            handle.advice = ADVICE if is_compared(model, recipe) else None
            checks.append(handle.check)
        if recipe.checkpoint in ("layers", "selective"):
            handle = stack.enter_context(checkpoints_of_blocks(model, recipe))
            handle.advice = ADVICE if is_compared(model, recipe) else None
            checks.append(handle.check)
            checks.append(
                stack.enter_context(keep_statistics(model, handle.names, recipe.checkpoint))
            )
        yield combine_checks(checks)
    record_comparison(model, recipe)


def schedule_of_blocks(model: nn.Module, recipe: Recipe) -> ScheduledBlocks:
    """Return a context manager in which a model's blocks run by the recipe's schedule.

    The schedule decides which blocks are recomputed in backward. With checkpoint="segments", the
    schedule follows from `recipe.segments`. Otherwise it follows from `recipe.schedule_bytes`.
    """
    names = names_of(model, block_names(recipe))
    if recipe.checkpoint == "segments":
        return ScheduledBlocks(model, names, segments(Chain.uniform(len(names)), recipe.segments))
    schedule = partial(fastest, budget_bytes=recipe.schedule_bytes)
    return ScheduledBlocks(model, names, schedule, chains_of(model, recipe))


def checkpoints_of_blocks(model: nn.Module, recipe: Recipe) -> CheckpointedBlocks:
    """Return a context manager in which the blocks that `recipe.blocks` selects are checkpointed.

    With the checkpoint "selective", the outputs of the blocks' matrix products are kept instead of
    recomputed.
    """
    return checkpoint_blocks(
        model,
        block_names(recipe),
        first=recipe.first_blocks,
        policy=MATRIX_PRODUCTS if recipe.checkpoint == "selective" else None,
        preserve_rng_state=may_draw(model),
        preserve_module_state=True,
        compare=False,  # `_apply_checkpoints` turns on the comparison by setting `advice`
    )


def block_names(recipe: Recipe) -> str | list[str] | None:
    """Return `recipe.blocks`, with a tuple of names converted to a list.

    A recipe stores a tuple, but `names_of` and `checkpoint_blocks` need a list.
    """
    return list(recipe.blocks) if isinstance(recipe.blocks, tuple) else recipe.blocks


@contextmanager
def keep_statistics(
    model: nn.Module, names: Sequence[str], checkpoint: str
) -> Iterator[Callable[[], None]]:
    """Prevent checkpoints from updating the running statistics of norms twice.

    Norms such as BatchNorm update running statistics in the forward pass, and a checkpoint runs the
    forward pass of a block again. Inside this context, the second update is undone.

    The context manager yields a function, to be called after each forward pass. The function stores
    the statistics, because backward may update them again. The stored statistics are restored
    before the next forward pass and at the end of the `with` block. The function also raises
    ValueError if the forward pass has changed any other buffer, because the recomputed block might
    then compute other values.

    Args:
        model: Model with checkpointed blocks.
        names: Names of the checkpointed blocks.
        checkpoint: Value of `Recipe.checkpoint` for the error message.
    """
    blocks = {name: model.get_submodule(name) for name in names}
    statistics = {buffer for block in blocks.values() for buffer in statistics_of(block)}
    instance_norms = [m for b in blocks.values() for m in b.modules() if is_instance_norm(m)]
    exempt = {*statistics, *(buffer for norm in instance_norms for buffer in norm.buffers())}
    kept: list[tuple[Tensor, Tensor]] = []

    def other_buffers() -> dict[str, tuple[int, int, int]]:
        """Return three values per buffer, by which a change of the buffer can be detected.

        The id changes if the buffer is replaced, and the version changes if the buffer is changed
        in place. The storage changes if a tensor is assigned to the buffer's attribute `data`.
        Running statistics are left out.
        """
        found = {
            f"{name}.{key}": buffer
            for name, block in blocks.items()
            for key, buffer in block.named_buffers()
            if buffer not in exempt
        }
        return {name: (id(b), b._version, _storage_of(b)) for name, b in found.items()}

    def keep() -> None:
        for name, found in other_buffers().items():
            if found != before.get(name):
                raise ValueError(
                    "checkpoint must be 'none', 'segments' or 'optimal' for a model whose forward"
                    f" pass changes a buffer, got {checkpoint!r}: the blocks run again in backward,"
                    f" when the buffer {name} has already changed"
                )
        kept.extend((buffer, buffer.clone()) for buffer in statistics)

    def restore_statistics(*_: Any) -> None:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)
        kept.clear()

    before = other_buffers()
    # A recomputation in backward may update the statistics a second time. When the next forward
    # pass reaches a block, the statistics are set to their values after the previous forward pass.
    hooks = [
        block.register_forward_pre_hook(restore_statistics)
        for block in blocks.values()
        if statistics
    ]
    try:
        yield keep
    finally:
        for hook in hooks:
            hook.remove()
        restore_statistics()


def _storage_of(tensor: Tensor) -> int:
    """Return an identifier of the storage that a tensor has now."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


# ---- Checks of the model


def _check_chain(model: nn.Module, recipe: Recipe) -> None:
    """Raise ValueError if the recipe has more segments than the model has blocks."""
    if runs_stages(model, recipe):
        # The number of stages is not known without a batch.
        return
    count = len(names_of(model, block_names(recipe)))
    if recipe.checkpoint == "segments" and recipe.segments > count:
        raise ValueError(
            f"segments must be between 1 and {count}, the number of layers, got {recipe.segments}"
        )


def _check_blocks(model: nn.Module, recipe: Recipe) -> None:
    """Raise ValueError if `blocks` or `first_blocks` of the recipe do not suit the model.

    Each name in `blocks` must match modules of a single type, unless all matching modules are items
    of `nn.ModuleList`s. `first_blocks` must not exceed the number of blocks.
    """
    blocks = block_names(recipe)
    count = 0
    for name in blocks if isinstance(blocks, list) else [blocks]:
        with checkpoint_blocks(model, name) as handle:
            kinds = sorted({type(model.get_submodule(found)).__name__ for found in handle.names})
            count += len(handle.names)
            lists = {found.rpartition(".")[0] for found in handle.names}
        # With blocks=None, the types are not compared, because each list of blocks in a model can
        # have its own type of block.
        in_lists = all(isinstance(model.get_submodule(each), nn.ModuleList) for each in lists)
        if name is not None and len(kinds) > 1 and not in_lists:
            raise ValueError(
                f"{name!r} in blocks matches modules of several types: {', '.join(kinds)}. This is"
                " allowed only if all these modules are items of nn.ModuleLists. Replace it by"
                " names that match modules of one type each"
            )
    if recipe.first_blocks is not None and recipe.first_blocks > count:
        raise ValueError(
            f"first_blocks must be between 1 and {count}, the number of blocks, got"
            f" {recipe.first_blocks}"
        )
