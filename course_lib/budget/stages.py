"""Run the chain that a model itself defines by its method `stages(batch)`.

The checkpoints "segments" and "optimal" use this chain if the model has one. `stages(batch)`
returns a sequence of callables. The first takes the batch, and each of the others takes the output
of the previous one. The last returns (sum of losses, weight), as `loss_sum` does, where the weight
is a number or a scalar integer tensor. The outputs must have types that
`course_lib.schedule.ScheduledSequential` accepts.

Callables at the beginning that hold no parameters, for example one that takes the inputs out of a
batch, run before the chain. "segments" treats an `nn.Sequential` as one stage, whereas "optimal"
treats each of its modules as a stage.

`course_lib.models.Decoder.stages` is an example.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from course_lib._check import InfeasibleBudget
from course_lib._hugging_face_losses import takes_arguments
from course_lib._torch.modes import autocast_of
from course_lib._torch.modules import kind_of, module_signature
from course_lib._torch.symbolic import is_symbolic
from course_lib._torch.tensors import tensors_in
from course_lib.checkpoint.comparison import Comparison, FunctionWithSavedTensorCheck
from course_lib.checkpoint.repeatable import BlockState, Repeatable
from course_lib.schedule import Chain, Schedule, ScheduledSequential, optimal
from course_lib.schedule.chain import symbolic_chain
from course_lib.schedule.stages import as_modules

# This is `course_lib.budget.Recipe`, which cannot be imported here, because its techniques import
# this module.
Recipe = Any
# Values of `checkpoint` that run a chain: the model's own, or one that consists of its blocks.
CHAINED = ("segments", "optimal")
# If a subclass overrides one of these methods, inherited stages may compute something else.
LOSS_METHODS = ("forward", "loss", "loss_sum")


def own_stages(model: nn.Module) -> Callable[[Any], Sequence[Callable]] | None:
    """Return the model's method `stages`, or None.

    The result is None if the model has no such method, or if the stages no longer compute what the
    model does. This is the case if a subclass or the instance overrides the forward pass or the
    loss, or if forward hooks are registered, which would not run.
    """
    if model._forward_hooks or model._forward_pre_hooks:
        return None
    for names in (vars(model), *map(vars, type(model).__mro__)):
        if "stages" in names:
            found = model.stages
            return found if callable(found) else None
        if not names.keys().isdisjoint(LOSS_METHODS):
            return None
    return None


def runs_stages(model: nn.Module, recipe: Recipe) -> bool:
    """Return whether a step of the recipe runs the chain of the model's method `stages`.

    Otherwise the step calls the model itself, or runs a chain of the model's blocks. Under autocast
    it runs the blocks, because the stages do not call `model.forward`.
    """
    chained = recipe.checkpoint in CHAINED and recipe.precision != "autocast"
    return chained and recipe.blocks is None and own_stages(model) is not None


def staged_loss(model: nn.Module, batch: Any, recipe: Recipe) -> tuple[Tensor, float | Tensor]:
    """Run the model's own chain with the recipe's checkpoints, and return (loss sum, weight)."""
    x, stages = _split_into_stages(model, batch)
    if recipe.checkpoint == "optimal":
        schedule = fastest(chain_of_stages(model, batch, recipe), recipe.schedule_bytes)
        chain = ScheduledSequential(_unpack_sequentials(stages), schedule)
        chain.advice = ADVICE if is_compared(model, recipe) else None
        return chain(x)
    inside = len(stages) - 2
    if recipe.segments > inside:
        raise ValueError(
            f"segments must be at most {max(inside, 0)}, the number of stages that"
            f" {type(model).__name__}.stages returns between the first and the last, got"
            f" {recipe.segments}"
        )
    # Each segment of stages is wrapped in a checkpoint instead of running in a ScheduledSequential.
    # A ScheduledSequential recomputes whole stages, whereas a checkpoint stops at the last tensor
    # that backward needs, which comes before the last matrix product of a segment. With a
    # ScheduledSequential, the course's decoder would need 2% more FLOPs for 4 layers in 2 segments,
    # 7% more for 8 layers in 8 segments, and up to 3 kB more memory. Segments made of the model's
    # blocks cannot be wrapped in this way, because the model's own code calls each block.
    hidden = first = stages[0](x)
    size = inside // recipe.segments
    # Index of the first stage of the last segment, which is not recomputed.
    last = 1 + size * (recipe.segments - 1)
    for start in range(1, last, size):
        segment = nn.Sequential(*stages[start : start + size])
        name = " to ".join(f"stage {i}" for i in sorted({start, start + size - 1}))
        comparison = Comparison(name, ADVICE) if is_compared(model, recipe) else None
        function = (
            segment if comparison is None else FunctionWithSavedTensorCheck(segment, comparison)
        )
        function = Repeatable(function, BlockState(segment, comparison, statistics=True))
        hidden = function.checkpoint((hidden,), {}, preserve_rng_state=may_draw(model))
    hidden = nn.Sequential(*stages[last:-1])(hidden)
    # The first segment's input is kept until here, because `checkpoint_sequential` keeps it too.
    del first
    return stages[-1](hidden)


def max_segments(model: nn.Module, batch: Any) -> int:
    """Return the largest number of segments into which the model's own chain can be divided.

    This is the number of stages between the first and the last stage.
    """
    return len(_split_into_stages(model, batch)[1]) - 2


def _split_into_stages(model: nn.Module, batch: Any) -> tuple[Any, list[nn.Module]]:
    """Return the input of the chain and its stages."""
    name = f"{type(model).__name__}.stages"
    function = own_stages(model)
    takes_arguments(name, function, "(batch), unless the recipe names blocks", batch)
    stages = list(as_modules(list(function(batch))).values())
    while len(stages) > 1 and next(stages[0].parameters(), None) is None:
        batch = stages.pop(0)(batch)
    return batch, stages


def _unpack_sequentials(stages: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the stages, with each `nn.Sequential` replaced by its modules."""
    found: list[nn.Module] = []
    for stage in stages:
        # Hooks run only with the whole stage, so a stage with hooks is not taken apart.
        hooked = stage._forward_hooks or stage._forward_pre_hooks
        found += stage if type(stage) is nn.Sequential and not hooked else [stage]
    return found


# ---- Comparison in the first step


ADVICE = 'exclude it from checkpointing, with checkpoint="none" or other blocks'
# Maps each model to the recipes whose recomputations have been compared.
_compared: WeakKeyDictionary[nn.Module, set[Recipe]] = WeakKeyDictionary()


def is_compared(model: nn.Module, recipe: Recipe) -> bool:
    """Return whether this step compares each recomputation with the first run.

    It does in the first step of a model with a recipe, and in every symbolic step. A symbolic step
    compares no values, but if its recomputation fails, the error names an argument that changed.
    """
    return is_symbolic() or recipe not in _compared.get(model, ())


def record_comparison(model: nn.Module, recipe: Recipe) -> None:
    """Record that a step found no difference, so that later steps are not compared."""
    if not is_symbolic():
        _compared.setdefault(model, set()).add(recipe)


# ---- Schedules


# Maps each model to its measured chains.
_chains: WeakKeyDictionary[nn.Module, dict[Any, Any]] = WeakKeyDictionary()
_cached_optimal = lru_cache(64)(optimal)


def fastest(chain: Chain, budget_bytes: int) -> Schedule:
    """Return the fastest schedule whose activations take at most `budget_bytes`.

    Results are cached.

    Raises:
        InfeasibleBudget: No schedule fits. The message calls the limit schedule_bytes, after the
            recipe's field.
    """
    try:
        return _cached_optimal(chain, budget_bytes)
    except InfeasibleBudget as error:
        details = error.budget_bytes, error.least_bytes, error.reason, error.least
        raise InfeasibleBudget(*details, name="schedule_bytes") from None


def chains_of(model: nn.Module, recipe: Recipe) -> dict[Any, Chain]:
    """Return the cache of a model's measured chains, which is a dict.

    Each value of `Recipe.attention` has a cache of its own, because attention affects the costs.
    """
    return _chains.setdefault(model, {}).setdefault(recipe.attention, {})


def chain_of_stages(model: nn.Module, batch: Any, recipe: Recipe) -> Chain:
    """Return the model's own chain, measured with the recipe's attention and loss head."""

    def stages_of(probe: tuple[nn.Module, Any]) -> tuple[Sequence[nn.Module], Any]:
        for copied, module in zip(probe[0].modules(), model.modules(), strict=True):
            # `copy.deepcopy` drops the compiled call. The copy is marked as compiled again, without
            # compiling it, so that `stages` divides it into the same stages as the original.
            if copied is not module and module._compiled_call_impl is not None:
                copied._compiled_call_impl = copied._call_impl
        x, stages = _split_into_stages(*probe)
        return _unpack_sequentials(stages), x

    tensors = list(tensors_in(batch))
    compiled = tuple(module._compiled_call_impl is not None for module in model.modules())
    look = recipe.head_chunk, module_signature(model), compiled
    key = *look, *map(kind_of, tensors), *map(autocast_of, tensors)
    chains = chains_of(model, recipe)
    if key not in chains:
        chains[key] = symbolic_chain(f"the {type(model).__name__}", (model, batch), stages_of)
    return chains[key]


def may_draw(model: nn.Module) -> bool:
    """Return whether a forward pass may draw random numbers, which a checkpoint must repeat.

    A model with stages can declare by the attribute `draws_random_numbers` that it draws none. The
    attribute is ignored if `own_stages` returns None. Other models may call `F.dropout`, which
    cannot be detected here.
    """
    return own_stages(model) is None or getattr(model, "draws_random_numbers", True)
