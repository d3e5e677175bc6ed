"""Search for the recipes that `python -m course_lib.budget` prints.

A recipe is a set of memory-saving techniques for a training step. The functions search for recipes
that fit the memory of a machine, and find the cheapest recipe that each framework can run. The
module `report` formats the result for printing.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from course_lib._check import InfeasibleBudget
from course_lib._origin import message
from course_lib.labels import text, verbatim
from course_lib.labels.command import translated_error
from course_lib.memory.show import bytes_text
from course_lib.symbolic import symbolic
from course_lib.workload import Workload, workload_of

from .device_memory import kept_bytes
from .estimate import Estimate
from .rates import Rates
from .recipe import Recipe
from .scripts import FRAMEWORKS, Framework
from .search.fit import Estimates, fit

# Value of --precision for the recipe with precision=None, which keeps the dtypes of the model.
OWN_PRECISION = "own"
# If the cheapest recipe leaves less than this share of the budget unused, the command also shows
# the cheapest recipe that leaves at least this share.
SPARE_SHARE = 0.05


@dataclass(frozen=True)
class Machine:
    """Device for which the command searches recipes, and the memory budget of a step on it.

    A recipe is a set of memory-saving techniques for a training step.

    Attributes:
        name: Value of the option --device, such as "H100", or "this" for the machine that runs the
            command.
        rates: Speed of the device in FLOPs and bytes per second, and the size of its memory.
        tier: Lower tier, where offloaded tensors are stored: "file", or "host" for host memory.
        kind: Kind of device, "cpu" or "cuda".
        count: Kind of bytes that is compared with the budget: "tensors" for the bytes of live
            tensors, or "reserved" for the bytes that PyTorch's allocator reserves for them.
        memory: Memory budget in bytes.
        is_whole: Whether the budget includes the memory that CUDA and cuBLAS occupy. If not,
            `memory` is a budget for tensors alone.
        is_default: Whether the option --device was left out, so that the default device is used.
    """

    name: str
    rates: Rates
    tier: str
    kind: str
    count: str
    memory: int
    is_whole: bool
    is_default: bool = False

    @property
    def kept(self) -> int:
        """Bytes of the budget that the CUDA context and the workspace of cuBLAS occupy.

        The value is 0 on a CPU, and 0 if the budget does not include this memory (see `is_whole`).
        """
        return kept_bytes(self.rates) if self.kind == "cuda" and self.is_whole else 0

    @property
    def step_budget_bytes(self) -> int:
        """Bytes of the budget that remain for the training step: `memory` minus `kept`.

        Raises:
            ValueError: `memory` is not larger than `kept`.
        """
        if self.memory <= self.kept:
            raise ValueError(
                f"--budget must be more than the {bytes_text(self.kept)} that CUDA and cuBLAS"
                f" occupy on a GPU ({self.name}), got {bytes_text(self.memory)}. Pass a larger"
                " budget, or --count tensors to count only tensors"
            )
        return self.memory - self.kept

    def bytes_taken(self, found: Estimate) -> int:
        """Return the bytes of this machine's budget that an estimated training step needs.

        If `count` is "tensors", the result is the peak of live tensor bytes. If `count` is
        "reserved", it is the largest number of bytes that PyTorch's allocator reserves. The memory
        that the CUDA context and the workspace of cuBLAS occupy (see the property `kept`) is not
        included in either case.
        """
        return found.peak_bytes if self.count == "tensors" else found.reserved_bytes()


def search(
    given: Namespace,
    model: Workload,
    machine: Machine,
    progress: bool | Callable[[Recipe], None],
    framework: Framework | None = None,
) -> Estimates:
    """Return the estimates of the recipes whose step fits the machine's budget, cheapest first.

    A recipe is a set of memory-saving techniques for a training step. Its cost is the estimated
    duration of the step.

    Args:
        given: Parsed options of the command `python -m course_lib.budget`.
        model: Model and batch of the step.
        machine: Device and its memory budget.
        progress: True to show a progress bar; or a function that is called with each recipe before
            the recipe is estimated.
        framework: Framework that must be able to run the recipes; None allows all recipes. Unless
            an option sets the precision, the precisions of the framework are tried one after the
            other until a recipe fits.

    Raises:
        InfeasibleBudget: No recipe fits. If several precisions were tried, the error reports the
            lowest peak among them.
        ValueError: The framework cannot train the model, or the options cannot be combined.
    """
    if framework is not None:
        _check_framework(given, model, machine, framework)
    failed: list[InfeasibleBudget] = []
    for base in _bases(given, model, framework):
        try:
            found = fit(
                model.make_model,
                model.make_batch,
                machine.step_budget_bytes,
                base=base,
                rates=machine.rates,
                loss_sum=model.loss_sum,
                split=model.split,
                blocks=given.blocks,
                tier=machine.tier,
                kind=machine.kind,
                gpu=machine.rates.gpu,
                count=machine.count,
                quick=given.quick,
                progress=progress,
                framework=framework and framework.name,
            )
        except InfeasibleBudget as error:
            failed.append(error)
        else:
            return found
    raise min(failed, key=lambda error: error.least_bytes or math.inf)


def _check_framework(
    given: Namespace, model: Workload, machine: Machine, framework: Framework
) -> None:
    """Raise ValueError if the framework cannot train the model with the given options."""
    if given.lora and framework.name == "fsdp2":
        raise ValueError(
            "--for fsdp2 cannot be combined with --lora; --for trainer and --for torch can run"
            " adapters on a single rank"
        )
    if given.check and framework.has_own_step:
        raise ValueError(
            f"--check cannot be combined with --for {framework.name}, because the script that --for"
            " prints runs a different training step than --check. Leave out --check, and run the"
            " printed script under course_lib.memory.MemoryMeter"
        )
    # Only ranks and shard are checked here, with a precision that every framework can run. The
    # precisions are checked during the search.
    ranks = Recipe("fp32", ranks=given.ranks or 1, shard=given.shard if given.ranks else None)
    own_tier = "host" if machine.kind == "cuda" else "file"
    if machine.tier != own_tier:
        raise ValueError(
            f"--tier must be {own_tier} for a script that trains on {machine.kind}, got"
            f" {machine.tier}: generated scripts offload to host memory on a GPU, and to a file on"
            " a CPU"
        )
    if problem := framework.conflict(ranks) or framework.unsupported_reason(model):
        raise ValueError(problem)


def lost_updates_warning(given: Namespace, found: Estimates) -> list[str]:
    """Return a warning that small parameter updates are lost by rounding, or an empty list.

    A recipe is a set of memory-saving techniques for a training step. A recipe with the precision
    "bf16-only" has no fp32 master weights, so small updates of its bf16 weights are lost. The
    warning is returned if the cheapest recipe has this precision and the user did not choose it.

    Args:
        given: Parsed options of the command.
        found: Estimates of the recipes that fit the memory budget, cheapest first.

    Returns:
        A list with one text, or an empty list.
    """
    precision = found[0].recipe.precision
    if precision != "bf16-only" or given.precision:
        return []
    return [
        text(
            "no recipe of this framework with fp32 weights fits; --precision {precision} has bf16"
            " weights only, so small updates are lost by rounding",
            precision=verbatim(precision),
        )
    ]


def _bases(given: Namespace, model: Workload, framework: Framework | None) -> list[Recipe]:
    """Return the recipes from which the searches start, one per precision to be tried.

    The options of the command set the other fields of each recipe, such as its optimizer.

    Raises:
        ValueError: Options cannot be combined.
    """
    ranks = given.ranks or 1
    if given.check and ranks > 1:
        raise ValueError(
            f"--check cannot be combined with --ranks {ranks}: --check runs a single rank."
            " To run several ranks, use python -m course_lib.distributed"
        )
    more: dict[str, Any] = {}
    if ranks > 1 or given.shard:
        more = {"ranks": ranks, "shard": given.shard}
    if given.lora and ranks > 1:
        raise ValueError(
            f"--ranks {ranks} cannot be combined with --lora: with several ranks, all parameters"
            " must have the same dtype, but adapters and frozen weights may differ"
        )
    if given.lora and given.precision not in (None, "autocast"):
        raise ValueError(
            f"--precision {given.precision} cannot be combined with --lora: adapters are in fp32,"
            " and --base sets the format of the frozen weights"
        )
    if ranks > 1 and given.optimizer != "adam":
        raise ValueError(f"--optimizer must be adam when --ranks is {ranks}, got {given.optimizer}")
    precisions: Sequence[str | None] = framework.precisions if framework else ("bf16",)
    if given.precision == OWN_PRECISION or (given.lora and not given.precision):
        precisions = (None,)
    elif given.precision:
        precisions = (given.precision,)
    return [
        Recipe(precision=each, optimizer=given.optimizer, attention=model.attention, **more)
        for each in precisions
    ]


def with_spare_memory(found: Estimates, machine: Machine) -> list[Estimate]:
    """Find the cheapest recipe that leaves 5% of the budget unused, if `found[0]` leaves less.

    A recipe is a set of memory-saving techniques for a training step, and its cost is the duration
    of the step. The unused memory is meant for needs that an estimate does not include, such as
    longer samples or other processes. The constant `SPARE_SHARE` sets the 5%.

    Args:
        found: Estimates of the recipes that fit the budget, cheapest first.
        machine: Device and its memory budget.

    Returns:
        A list with the estimate of this recipe. The recipe comes from a new search, so `found` may
        not contain it. The list is empty if `found[0]` already leaves at least 5% of the budget
        unused, or if no recipe does.
    """
    most = machine.step_budget_bytes - int(SPARE_SHARE * machine.memory)
    if machine.bytes_taken(found[0]) <= most or most < 1:
        return []
    try:
        return found.within(most)[:1]
    except InfeasibleBudget:
        return []


# ---- What each framework can run


@dataclass(frozen=True)
class FrameworkAnswer:
    """The cheapest recipe that a framework can run, or the reason why there is none.

    A recipe is a set of memory-saving techniques for a training step. Its cost is the duration of
    the step.

    Attributes:
        framework: Framework that runs the step, such as Hugging Face's Trainer.
        model: Model and batch, as the framework trains them; None if the framework cannot train
            this model.
        found: Estimates of the recipes that fit the memory budget, cheapest first; None if no
            recipe fits.
        problem: Sentence that explains why there is no recipe; empty if there is one.
    """

    framework: Framework
    model: Workload | None
    found: Estimates | None
    problem: str = ""

    @cached_property
    def script(self) -> str:
        """Source code of a script that trains the model with the cheapest recipe.

        The attribute `found` must not be None.
        """
        assert self.found is not None and self.model is not None
        return self.framework.script(self.found[0].recipe, self.model)

    def as_dict(self) -> dict[str, Any]:
        """Return the answer as a dict for the JSON output of the command.

        If a recipe fits, the keys are "recipe", "peak_bytes" and "script". Otherwise the only key
        is "problem".
        """
        if self.found is None:
            return {"problem": str(self.problem)}
        best = self.found[0]
        return {
            "recipe": best.recipe.changed_fields(),
            "peak_bytes": best.peak_bytes,
            "script": self.script,
        }


def framework_answers(
    given: Namespace, model: Workload, machine: Machine, found: Estimates
) -> list[FrameworkAnswer]:
    """Return the cheapest recipe that each framework can run, or the reason why there is none.

    A recipe is a set of memory-saving techniques, and its cost is the duration of the training
    step.

    If the option --for names a framework, the result has only the answer of this framework, which
    is always taken from `found`. Without --for, the result has one answer per framework. The answer
    with the cheapest recipe comes first, and answers without a recipe come last. Each of these
    answers is taken from `found` if three conditions hold:

    - the framework can run the cheapest recipe in `found`;
    - the framework runs the same training step as this library;
    - the option --config is not given.

    If one of the conditions does not hold, the answer comes from a new search with the option
    --quick.

    Args:
        given: Parsed options of the command.
        model: Model and batch of the step.
        machine: Device and its memory budget.
        found: Result of `search` with the same options.
    """
    if given.framework:
        return [FrameworkAnswer(FRAMEWORKS[given.framework], model, found)]
    answers = [_answer(given, machine, found, each) for each in FRAMEWORKS.values()]
    return sorted(
        answers, key=lambda each: machine.rates.seconds(each.found[0]) if each.found else math.inf
    )


def _answer(
    given: Namespace, machine: Machine, found: Estimates, framework: Framework
) -> FrameworkAnswer:
    """Return the cheapest recipe that one framework can run, or the reason why there is none.

    The recipe is taken from `found` if --config is not given and the framework can run the first
    recipe in `found`. Otherwise it comes from a new search.
    """
    own = None
    try:
        own = workload_for(given, framework)
        # With --config, the script trains the model that transformers builds. This model may need
        # more memory than the course's model, for which `found` was estimated, so a new search is
        # made.
        if given.config or not _can_run(given, own, found[0].recipe, framework):
            quick = Namespace(**vars(given) | {"quick": True})
            found = search(quick, own, machine, False, framework)
        answer = FrameworkAnswer(framework, own, found)
        _ = answer.script  # raises if a script cannot be written for this model
        return answer
    except InfeasibleBudget as error:
        problem = text("nothing was found that fits")
        if error.least_bytes is not None:
            least = bytes_text(error.least_bytes)
            problem = text("nothing was found that fits; the least found is {least}", least=least)
        return FrameworkAnswer(framework, own, None, problem)
    except ValueError as error:
        return FrameworkAnswer(framework, own, None, translated_error(message(error)))


def _can_run(given: Namespace, model: Workload, recipe: Recipe, framework: Framework) -> bool:
    """Return whether a framework can run a recipe with the training step of this library.

    The result is False for a framework with its own training step, because `recipe` was not
    estimated for that step.
    """
    precisions = [base.precision for base in _bases(given, model, framework)]
    if (
        framework.has_own_step
        or recipe.precision not in precisions
        or framework.unsupported_reason(model)
    ):
        return False
    with symbolic():
        return framework.for_model(model.make_model()).conflict(recipe) is None


def workload_for(given: Namespace, framework: Framework | None) -> Workload:
    """Return the model and the batch that the options describe, as a framework would train them.

    Args:
        given: Parsed options of the command.
        framework: Framework that trains the model; None for the step of this library.
    """
    return workload_of(Namespace(**vars(given) | {"framework": framework and framework.name}))
