"""Activation checkpointing of blocks, or of a chain of stages that follows a schedule.

Lessons 02 and 03 explain both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from course_lib._check import any_of, kind, must_be
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
    note_compared,
    runs_stages,
)
from .technique import Check, Recipe, Search, Technique, all_of, choice, count_or_none, fields_of

CHECKPOINTS = ("none", "selective", "layers", "segments", "optimal")
# Operators whose outputs "selective" keeps.
PRODUCTS = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]
# OF_KINDS maps a field to the values of `checkpoint` that allow it. NEEDED maps a field to the only
# value of `checkpoint` that allows it, which also requires it.
OF_KINDS = {"blocks": CHECKPOINTS[1:], "first_blocks": CHECKPOINTS[1:3]}
NEEDED = {"segments": "segments", "schedule_bytes": "optimal"}


def _blocks(name: str, value: Any) -> None:
    """Raise TypeError if a value is not a name, a tuple of names or None."""
    for each in value if isinstance(value, tuple) and value else [value]:
        kind(name, each, (str, type(None)), "a name with wildcards, a tuple of such names or None")


class Checkpoint(Technique):
    """Checkpoints around the blocks of a model, or a schedule for a chain of stages."""

    fields = fields_of(
        checkpoint=choice(*CHECKPOINTS),
        blocks=_blocks,
        first_blocks=count_or_none(1),
        segments=count_or_none(1),
        schedule_bytes=count_or_none(1),
    )
    after = ("head_chunk",)
    composable = True
    acts_on = frozenset({"activation"})

    def conflict(self, recipe: Recipe) -> str | None:
        for name, kinds in OF_KINDS.items():
            value = getattr(recipe, name)
            if value is not None and recipe.checkpoint not in kinds:
                return (
                    f"{name} must be None unless checkpoint is {any_of(map(repr, kinds))}, got"
                    f" {value!r} with checkpoint={recipe.checkpoint!r}"
                )
        for name, owner in NEEDED.items():
            if (getattr(recipe, name) is not None) != (recipe.checkpoint == owner):
                allowed = f"a number when checkpoint is {owner!r}, and None otherwise"
                actual = f"{getattr(recipe, name)} with checkpoint={recipe.checkpoint!r}"
                return must_be(name, allowed, actual)
        return None

    def refuse(self, recipe: Recipe, model: nn.Module) -> str | None:
        if recipe.checkpoint in CHAINED:
            _check_chain(model, recipe)
        elif recipe.checkpoint != "none":
            _check_blocks(model, recipe)
        return None

    def apply(
        self, recipe: Recipe, model: nn.Module, store: Any = None
    ) -> AbstractContextManager[Check]:
        return _apply_checkpoints(recipe, model)

    def words(self, recipe: Recipe) -> list[str]:
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

    def candidates(self, search: Search) -> list[Mapping[str, Any]]:
        """Return the kinds of checkpoints that the model supports.

        The candidates have the fewest segments and schedule bytes. The module `best_numbers` tries
        larger numbers later.
        """
        known = search.known
        found: list[Mapping[str, Any]] = [{"checkpoint": "none"}]
        if known.goes_with(checkpoint="layers"):
            kinds = ("layers",) if search.quick else ("selective", "layers")
            found += [{"checkpoint": name, "blocks": known.blocks} for name in kinds]
        if not search.quick and known.goes_with(checkpoint="optimal", schedule_bytes=1 << 60):
            found += [{"checkpoint": "optimal", "blocks": known.blocks, "schedule_bytes": 1}]
            if known.segments > 1:
                found += [{"checkpoint": "segments", "blocks": known.blocks, "segments": 2}]
        return found

    def not_tried(self, search: Search) -> str | None:
        known = search.known
        if known.base.checkpoint != "none" or known.uses_own_stages:
            return None
        if not known.layers:
            names = ", ".join(map(repr, names_to_choose(known.model)[:12]))
            return names and text(
                "no checkpoint was tried, because the model has no list of blocks (nn.ModuleList);"
                " name some of its modules with blocks= (--blocks in the command): {names}",
                names=verbatim(names),
            )
        if search.has_listed(self.field) and len(search.candidates(self.field)) == 1:
            reason = verbatim(known.refusal(checkpoint="layers"))
            return text(
                "no checkpoint was tried, because the step refuses it: {reason}", reason=reason
            )
        return None


@contextmanager
def _apply_checkpoints(recipe: Recipe, model: nn.Module) -> Iterator[Check]:
    """Apply the recipe's checkpoints to the model inside the `with` block."""
    checks: list[Check] = []
    with ExitStack() as stack:
        # Otherwise the loss runs the model's own chain (`course_lib.budget.stages`).
        if recipe.checkpoint in CHAINED and not runs_stages(model, recipe):
            handle = stack.enter_context(schedule_of_blocks(model, recipe))
            handle.advice = ADVICE if is_compared(model, recipe) else None
            checks.append(handle.check)
        if recipe.checkpoint in ("layers", "selective"):
            handle = stack.enter_context(checkpoints_of_blocks(model, recipe))
            handle.advice = ADVICE if is_compared(model, recipe) else None
            checks.append(handle.check)
            checks.append(
                stack.enter_context(statistics_kept(model, handle.names, recipe.checkpoint))
            )
        yield all_of(checks)
    note_compared(model, recipe)


def schedule_of_blocks(model: nn.Module, recipe: Recipe) -> ScheduledBlocks:
    """Return the context manager that runs the model's blocks by the recipe's schedule."""
    names = names_of(model, block_names(recipe))
    if recipe.checkpoint == "segments":
        return ScheduledBlocks(model, names, segments(Chain.uniform(len(names)), recipe.segments))
    schedule = partial(fastest, budget_bytes=recipe.schedule_bytes)
    return ScheduledBlocks(model, names, schedule, chains_of(model, recipe))


def checkpoints_of_blocks(model: nn.Module, recipe: Recipe) -> CheckpointedBlocks:
    """Return the context manager that checkpoints the model's blocks."""
    return checkpoint_blocks(
        model,
        block_names(recipe),
        first=recipe.first_blocks,
        policy=PRODUCTS if recipe.checkpoint == "selective" else None,
        preserve_rng_state=may_draw(model),
        preserve_module_state=True,
        compare=False,  # a step sets `advice` instead
    )


def block_names(recipe: Recipe) -> str | list[str] | None:
    """Return the recipe's `blocks`, with a tuple turned into a list."""
    return list(recipe.blocks) if isinstance(recipe.blocks, tuple) else recipe.blocks


@contextmanager
def statistics_kept(
    model: nn.Module, names: Sequence[str], checkpoint: str
) -> Iterator[Callable[[], None]]:
    """Undo the second update of running statistics that recomputation makes.

    Norms in these blocks update their running statistics in the forward pass. A checkpoint repeats
    the forward pass, but the statistics must be updated only once.

    The yielded function must be called after the forward pass. It raises ValueError if other
    buffers have changed, because the recomputed block might compute with the new values.
    """
    blocks = {name: model.get_submodule(name) for name in names}
    statistics = {buffer for block in blocks.values() for buffer in statistics_of(block)}
    instance_norms = [m for b in blocks.values() for m in b.modules() if is_instance_norm(m)]
    exempt = {*statistics, *(buffer for norm in instance_norms for buffer in norm.buffers())}
    kept: list[tuple[Tensor, Tensor]] = []

    def other_buffers() -> dict[str, tuple[int, int, int]]:
        """Return the id, version and storage of each other buffer by name.

        The version counts changes in place, and assigning to `.data` replaces the storage.
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
                    f" pass changes a buffer ({name}), because a checkpoint repeats the forward"
                    f" pass, got {checkpoint!r}"
                )
        kept.extend((buffer, buffer.clone()) for buffer in statistics)

    def put_back(*_: Any) -> None:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)
        kept.clear()

    before = other_buffers()
    # The next micro-batch must begin with the statistics that the forward pass of the previous one
    # has left, without the second update.
    hooks = [block.register_forward_pre_hook(put_back) for block in blocks.values() if statistics]
    try:
        yield keep
    finally:
        for hook in hooks:
            hook.remove()
        put_back()


def _storage_of(tensor: Tensor) -> int:
    """Return an identifier of the storage that a tensor has now."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


# ---- Checks of the model


def _check_chain(model: nn.Module, recipe: Recipe) -> None:
    """Raise ValueError if the model has fewer blocks than the recipe has segments."""
    if runs_stages(model, recipe):
        # The number of stages is not known without a batch.
        return
    count = len(names_of(model, block_names(recipe)))
    if recipe.checkpoint == "segments" and recipe.segments > count:
        raise ValueError(
            f"segments must be between 1 and {count}, the number of layers, got {recipe.segments}"
        )


def _check_blocks(model: nn.Module, recipe: Recipe) -> None:
    """Raise ValueError if a name matches several types of blocks, or if blocks are missing."""
    blocks = block_names(recipe)
    count = 0
    for name in blocks if isinstance(blocks, list) else [blocks]:
        with checkpoint_blocks(model, name) as handle:
            kinds = sorted({type(model.get_submodule(found)).__name__ for found in handle.names})
            count += len(handle.names)
            lists = {found.rpartition(".")[0] for found in handle.names}
        # With None, several lists of blocks may be found, whose types may differ.
        in_lists = all(isinstance(model.get_submodule(each), nn.ModuleList) for each in lists)
        if name is not None and len(kinds) > 1 and not in_lists:
            raise ValueError(
                "blocks must match modules of one type, or of lists (nn.ModuleList), per name, got"
                f" {name!r}, which matches {', '.join(kinds)}; pass several names"
            )
    if recipe.first_blocks is not None and recipe.first_blocks > count:
        raise ValueError(
            f"first_blocks must be between 1 and {count}, the number of blocks, got"
            f" {recipe.first_blocks}"
        )
