"""A model's own chain: what its `stages(batch)` gives, run by a recipe's schedule or segments.

A model offers it by a method `stages(batch)` beside its loss. It returns callables, of which the
first takes the batch, each other one what the one before returned, and the last returns (sum of
losses, weight), as `loss_sum` does; the weight is a number, or a tensor of whole numbers. What they
hand on is as for `course_lib.schedule.ScheduledSequential`. Callables in front that hold no
parameters, as one that takes the inputs out of a batch, run before the chain. An `nn.Sequential`
is a block: segments keep it whole, a schedule has its parts for stages.

`course_lib.models.Decoder.stages` is an example.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from course_lib._check import InfeasibleBudget
from course_lib._losses import takes_arguments
from course_lib._torch import autocast_of, kind_of, look_of, tensors_in
from course_lib.checkpoint import checkpoint_sequential
from course_lib.schedule import Chain, Schedule, ScheduledSequential, optimal
from course_lib.schedule.chain import symbolic_chain
from course_lib.schedule.stages import as_modules

Recipe = Any  # a `course_lib.budget.Recipe`, whose techniques need what is here
# checkpoints that run a chain: a model's own, or its blocks
CHAINED = ("segments", "optimal")
OWN_LOSS = ("forward", "loss", "loss_sum")


def own_stages(model: nn.Module) -> Callable[[Any], Sequence[Callable]] | None:
    """The model's `stages`; None if there are none, or they are not what the model computes any
    more: a newer forward pass or loss, of a subclass or put on the model, hides them, and so do
    forward hooks, which would not run."""
    if model._forward_hooks or model._forward_pre_hooks:
        return None
    for names in (vars(model), *map(vars, type(model).__mro__)):
        if "stages" in names:
            found = model.stages
            return found if callable(found) else None
        if not names.keys().isdisjoint(OWN_LOSS):
            return None
    return None


def runs_stages(model: nn.Module, recipe: Recipe) -> bool:
    """Whether the recipe runs the model's own chain; else it runs blocks, or no chain at all."""
    return recipe.checkpoint in CHAINED and recipe.blocks is None and own_stages(model) is not None


def staged_loss(model: nn.Module, batch: Any, recipe: Recipe) -> tuple[Tensor, float | Tensor]:
    """The sum of losses and its weight, by the model's own chain."""
    x, stages = _staged(model, batch)
    if recipe.checkpoint == "optimal":
        schedule = fastest(chain_of_stages(model, batch, recipe), recipe.schedule_bytes)
        return ScheduledSequential(_parts(stages), schedule)(x)
    inside = len(stages) - 2
    if recipe.segments > inside:
        raise ValueError(
            f"segments must be at most {max(inside, 0)}, the number of stages that"
            f" {type(model).__name__}.stages gives between the first and the last, got"
            f" {recipe.segments}"
        )
    # Not by the runner of schedules: it runs a stage to its end when it runs it again, where a
    # checkpoint stops at the last tensor that backward needs, before the last product of a segment.
    # The course's decoder would take 2 % more FLOPs with 4 layers in 2 segments, 7 % with 8 in 8,
    # and up to 3 kB more. Nor can checkpoints run the segments of blocks, which others call.
    options = {"use_reentrant": False, "preserve_rng_state": may_draw(model)}
    inner = checkpoint_sequential(stages[1:-1], recipe.segments, stages[0](x), **options)
    return stages[-1](inner)


def most_segments(model: nn.Module, batch: Any) -> int:
    """Number of segments that the model's own chain takes: all but its first stage and its last."""
    return len(_staged(model, batch)[1]) - 2


def _staged(model: nn.Module, batch: Any) -> tuple[Any, list[nn.Module]]:
    """Input of the chain, and its stages."""
    name = f"{type(model).__name__}.stages"
    function = own_stages(model)
    takes_arguments(name, function, "(batch), unless the recipe names blocks", batch)
    stages = list(as_modules(list(function(batch))).values())
    while len(stages) > 1 and next(stages[0].parameters(), None) is None:
        batch = stages.pop(0)(batch)
    return batch, stages


def _parts(stages: Sequence[nn.Module]) -> list[nn.Module]:
    found: list[nn.Module] = []
    for stage in stages:
        hooked = stage._forward_hooks or stage._forward_pre_hooks  # they run with all of it
        found += stage if type(stage) is nn.Sequential and not hooked else [stage]
    return found


# ---- schedules


_chains: WeakKeyDictionary[nn.Module, dict[Any, Any]] = WeakKeyDictionary()
_fastest = lru_cache(64)(optimal)


def fastest(chain: Chain, budget_bytes: int) -> Schedule:
    """The fastest schedule within a recipe's bytes, found once for each chain.

    Raises:
        InfeasibleBudget: no schedule fits.
    """
    try:
        return _fastest(chain, budget_bytes)
    except InfeasibleBudget as error:
        told = error.budget_bytes, error.least_bytes, error.told, error.least
        raise InfeasibleBudget(*told, name="schedule_bytes") from None


def chains_of(model: nn.Module, recipe: Recipe) -> dict[Any, Chain]:
    """Store of a model's chains, once they are measured."""
    return _chains.setdefault(model, {}).setdefault(recipe.attention, {})


def chain_of_stages(model: nn.Module, batch: Any, recipe: Recipe) -> Chain:
    """The model's own chain, with the recipe's attention and head in place."""

    def stages_of(probe: tuple[nn.Module, Any]) -> tuple[Sequence[nn.Module], Any]:
        for copied, module in zip(probe[0].modules(), model.modules(), strict=True):
            # A copy is not compiled, but it is the same stage as a module that is.
            if copied is not module and module._compiled_call_impl is not None:
                copied._compiled_call_impl = copied._call_impl
        x, stages = _staged(*probe)
        return _parts(stages), x

    tensors = list(tensors_in(batch))
    compiled = tuple(module._compiled_call_impl is not None for module in model.modules())
    look = recipe.head_chunk, look_of(model), compiled
    key = *look, *map(kind_of, tensors), *map(autocast_of, tensors)
    known = chains_of(model, recipe)
    if key not in known:
        known[key] = symbolic_chain(f"the {type(model).__name__}", (model, batch), stages_of)
    return known[key]


def may_draw(model: nn.Module) -> bool:
    """Whether a forward pass may draw random numbers, which a checkpoint must then repeat.

    A model with stages says that it does not by an attribute `draws_random_numbers`, hidden where
    they are; others may call `F.dropout`, which nobody sees from here.
    """
    return own_stages(model) is None or getattr(model, "draws_random_numbers", True)
