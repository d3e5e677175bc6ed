"""Compute the loss by calling the functions that a model's method `stages(batch)` returns.

A training step with checkpoint="segments" or "optimal" uses this method if the model has it. The
method returns a sequence of callables, the stages. The first stage takes the batch, and each later
stage takes the output of the previous stage. The last stage returns the pair (sum of losses,
weight). The weight is a number or a scalar integer tensor, by which the sum is divided. The outputs
must have types that `course_lib.schedule.ScheduledSequential` accepts.

Stages at the beginning that hold no parameters are never checkpointed, for example a function that
takes the inputs out of a batch. "segments" treats an `nn.Sequential` as one stage, whereas
"optimal" treats each module of an `nn.Sequential` as a stage.

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
# Values of `Recipe.checkpoint` that run a chain, a list of functions called in order. The functions
# come from the model's method `stages`, or they are the model's blocks.
CHAINED = ("segments", "optimal")
# If a subclass overrides one of these methods but inherits `stages`, the stages may compute a
# different loss.
LOSS_METHODS = ("forward", "loss", "loss_sum")


def own_stages(model: nn.Module) -> Callable[[Any], Sequence[Callable]] | None:
    """Return the model's method `stages`, or None if a training step must not use it.

    `stages(batch)` divides the computation of the loss into functions, each of which takes the
    result of the previous one (see `course_lib.models.Decoder.stages`). The result is None in these
    cases:

    - The model has no such method.
    - A subclass or the instance overrides `forward`, `loss` or `loss_sum`, but not `stages`, so the
      stages may compute another loss.
    - The model has forward hooks, which the stages would not run.
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
    """Return whether a step calls the model's method `stages` instead of the model itself.

    The result is True if all of these conditions hold:

    - The checkpoint of the recipe is "segments" or "optimal".
    - The recipe gives no names of blocks.
    - The precision is not "autocast", which needs a call of `model.forward`.
    - `own_stages(model)` is not None.

    Args:
        model: Model to train.
        recipe: Memory-saving techniques of the step.
    """
    chained = recipe.checkpoint in CHAINED and recipe.precision != "autocast"
    return chained and recipe.blocks is None and own_stages(model) is not None


def staged_loss(model: nn.Module, batch: Any, recipe: Recipe) -> tuple[Tensor, float | Tensor]:
    """Run the functions that the model's method `stages` returns, and compute the loss.

    With checkpoint="segments", the functions run one after the other. The functions up to and
    including the first one with parameters belong to no segment, and neither does the last
    function. The functions between them are divided into segments, and every segment except the
    last one is checkpointed. With checkpoint="optimal", a schedule decides which functions run
    again in backward.

    Args:
        model: Model with a method `stages`.
        batch: Batch, or one of its micro-batches.
        recipe: Memory-saving techniques of the step, with checkpoint="segments" or "optimal".

    Returns:
        The pair (sum of losses, weight), which is the result of the last function. The weight is
        the number by which the sum is divided, such as the number of tokens.
    """
    x, stages = _split_into_stages(model, batch)
    if recipe.checkpoint == "optimal":
        schedule = fastest(chain_of_stages(model, batch, recipe), recipe.schedule_bytes)
        chain = ScheduledSequential(_unpack_sequentials(stages), schedule)
        chain.advice = ADVICE if is_compared(model, recipe) else None
        return chain(x)
    inside = len(stages) - 2
    if recipe.segments > inside:
        raise ValueError(
            f"segments must be at most {max(inside, 0)}, got {recipe.segments}: so many functions"
            f" that {type(model).__name__}.stages returns can be in a segment. The functions up to"
            " the first one with parameters, and the last one, cannot. Return more functions from"
            " stages, or choose checkpoint='none'"
        )
    # Each segment of stages is wrapped in a checkpoint instead of running in a ScheduledSequential.
    # A ScheduledSequential recomputes whole stages. A checkpoint stops at the last tensor that
    # backward needs, so it does not repeat the last matrix product of a segment. With a
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
    # The first segment's input stays live until here, so that this step needs as much memory as the
    # script for this recipe. The script's `checkpoint_sequential` also keeps this input.
    del first
    return stages[-1](hidden)


def max_segments(model: nn.Module, batch: Any) -> int:
    """Return the largest number of checkpointed segments into which the model can be divided.

    The model's method `stages` returns functions that compute the loss, called stages. The first
    stage with parameters and the last stage belong to no segment. Each segment needs at least one
    of the stages between these two, so the result is the number of stages between them.
    """
    return len(_split_into_stages(model, batch)[1]) - 2


def _split_into_stages(model: nn.Module, batch: Any) -> tuple[Any, list[nn.Module]]:
    """Return the pair (input of the first stage, stages), with the stages of a model as modules.

    If the first stages have no parameters, they are run here and left out of the result.
    """
    name = f"{type(model).__name__}.stages"
    function = own_stages(model)
    otherwise = (
        "; or name the blocks in Recipe(blocks=...), which then are used instead of this method"
    )
    takes_arguments(name, function, "(batch)", batch, otherwise=otherwise)
    stages = list(as_modules(list(function(batch))).values())
    while len(stages) > 1 and next(stages[0].parameters(), None) is None:
        batch = stages.pop(0)(batch)
    return batch, stages


def _unpack_sequentials(stages: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the stages, with each `nn.Sequential` replaced by its modules."""
    found: list[nn.Module] = []
    for stage in stages:
        # The hooks of an nn.Sequential run only if it is called as a whole. An nn.Sequential with
        # hooks is therefore kept.
        hooked = stage._forward_hooks or stage._forward_pre_hooks
        found += stage if type(stage) is nn.Sequential and not hooked else [stage]
    return found


# ---- Comparison in the first step


ADVICE = (
    "do not checkpoint this block: list only other blocks in Recipe(blocks=...), or choose"
    " checkpoint='none'"
)
# Maps each model to the recipes for which a step has compared recomputations with first runs.
_compared: WeakKeyDictionary[nn.Module, set[Recipe]] = WeakKeyDictionary()


def is_compared(model: nn.Module, recipe: Recipe) -> bool:
    """Return whether a step compares each recomputation of a block with the block's first run.

    The result is True until a step of this model with this recipe has made the comparison.

    In a step on symbolic tensors, the result is always True, although these tensors have no values
    to compare. If the recomputation of a block raises an error in such a step, the error message
    then names the block and a remedy.

    Args:
        model: Model to train.
        recipe: Memory-saving techniques of the step.
    """
    return is_symbolic() or recipe not in _compared.get(model, ())


def record_comparison(model: nn.Module, recipe: Recipe) -> None:
    """Record that a step compared its recomputations with the first runs and found no difference.

    Later steps of the same model and recipe then skip the comparison. A step on symbolic tensors,
    which have no values, is not recorded.

    Args:
        model: Model of the step.
        recipe: Memory-saving techniques of the step.
    """
    if not is_symbolic():
        _compared.setdefault(model, set()).add(recipe)


# ---- Schedules


# Maps each model to its measured chains (the FLOPs and sizes of stages).
_chains: WeakKeyDictionary[nn.Module, dict[Any, Any]] = WeakKeyDictionary()
_cached_optimal = lru_cache(64)(optimal)


def fastest(chain: Chain, budget_bytes: int) -> Schedule:
    """Return the fastest schedule whose activations need at most `budget_bytes`.

    A schedule decides which activations of a chain are saved, and which are recomputed. The results
    of up to 64 calls are cached.

    Args:
        chain: FLOPs and sizes in bytes of the stages, which run one after the other.
        budget_bytes: Limit in bytes for the activations.

    Raises:
        InfeasibleBudget: No schedule fits. The message calls the limit `schedule_bytes`, because it
            is set by the field `Recipe.schedule_bytes`.
    """
    try:
        return _cached_optimal(chain, budget_bytes)
    except InfeasibleBudget as error:
        details = error.budget_bytes, error.least_bytes, error.reason, error.least
        raise InfeasibleBudget(*details, name="schedule_bytes") from None


def chains_of(model: nn.Module, recipe: Recipe) -> dict[Any, Chain]:
    """Return the dict in which the measured chains of a model are cached.

    A chain contains the FLOPs and the sizes in bytes of stages that run one after the other. These
    numbers depend on the attention implementation, so there is one dict for each value of
    `recipe.attention`.
    """
    return _chains.setdefault(model, {}).setdefault(recipe.attention, {})


def chain_of_stages(model: nn.Module, batch: Any, recipe: Recipe) -> Chain:
    """Return the FLOPs and the sizes of the stages that the model's method `stages` returns.

    The times in the chain are numbers of FLOPs, and the sizes are in bytes. Stages are measured on
    symbolic tensors, which have shapes but no values, and the result is cached. Call this function
    inside `course_lib.budget.step.apply_techniques`, which applies the recipe's attention and loss
    head to the model.

    Args:
        model: Model with a method `stages`.
        batch: Batch, or one of its micro-batches.
        recipe: Memory-saving techniques of the step.
    """

    def stages_of(probe: tuple[nn.Module, Any]) -> tuple[Sequence[nn.Module], Any]:
        for copied, module in zip(probe[0].modules(), model.modules(), strict=True):
            # `copy.deepcopy` drops the compiled call of a module. The copy is marked as compiled,
            # without compiling it, so that `stages` returns the same stages as for the original.
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
    """Return whether a forward pass can draw random numbers, which a checkpoint must repeat.

    A model can declare that it draws no random numbers, by an attribute `draws_random_numbers` that
    is False. The declaration counts only if the model has a usable method `stages` (see
    `own_stages`). For all other models the result is True, because calls of `F.dropout` cannot be
    detected here.
    """
    return own_stages(model) is None or getattr(model, "draws_random_numbers", True)
