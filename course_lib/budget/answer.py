"""What `python -m course_lib.budget` searches: a model, a machine, and recipes of a framework.

`report` prints the result.
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

# Value of --precision that stands for None in a recipe.
OWN = "own"
# Share of the budget. If the cheapest recipe leaves less of it unused, one that leaves more is
# shown as well.
SPARE = 0.05


@dataclass(frozen=True)
class Machine:
    """The machine of a step, and the memory that the step must fit into.

    Attributes:
        name: Name of the device.
        rates: Rates of the device.
        tier: Lower tier, as in `fit`.
        kind: "cpu" or "cuda".
        count: Quantity that must fit, as in `fit`.
        memory: Budget in bytes.
        is_whole: Whether the budget includes the memory that CUDA keeps.
        is_default: Whether no device was named.
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
        """Bytes of the budget that CUDA and cuBLAS keep."""
        return kept_bytes(self.rates) if self.kind == "cuda" and self.is_whole else 0

    @property
    def room(self) -> int:
        """Bytes of the budget that are left for the step.

        Raises:
            ValueError: None are left.
        """
        if self.memory <= self.kept:
            raise ValueError(
                f"--budget must be more than the {bytes_text(self.kept)} that CUDA and cuBLAS keep"
                f" on a GPU ({self.name}), got {bytes_text(self.memory)}; or pass --count tensors,"
                " to count tensors alone"
            )
        return self.memory - self.kept

    def bytes_taken(self, found: Estimate) -> int:
        """Return the bytes of the budget that a step takes, without those that CUDA keeps."""
        return found.peak_bytes if self.count == "tensors" else found.reserved_bytes()


def search(
    given: Namespace,
    model: Workload,
    machine: Machine,
    progress: bool | Callable[[Recipe], None],
    framework: Framework | None = None,
) -> Estimates:
    """Return the recipes that fit, among those that a framework can run if one is given.

    The precisions of the framework are tried in their order, until a recipe fits.

    Args:
        given: Options of the command.

    Raises:
        InfeasibleBudget: No recipe fits. The error is that of the precision with the lowest peak.
        ValueError: The framework cannot train the model, or cannot express what is given.
    """
    if framework is not None:
        _check_framework(given, model, machine, framework)
    failed: list[InfeasibleBudget] = []
    for base in _bases(given, model, framework):
        try:
            found = fit(
                model.make_model,
                model.make_batch,
                machine.room,
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
    """Raise ValueError if the framework cannot train the model, or not with these options."""
    if given.lora and framework.name == "fsdp2":
        raise ValueError(
            "--for fsdp2 cannot be combined with --lora; --for trainer and --for torch can run"
            " adapters on a single rank"
        )
    if given.check and framework.has_own_step:
        raise ValueError(
            f"--check cannot be combined with --for {framework.name}, whose step is another one;"
            " run the printed script under course_lib.memory.MemoryMeter"
        )
    # The number of ranks comes first, because it decides which precisions there are.
    ranks = Recipe("fp32", ranks=given.ranks or 1, shard=given.shard if given.ranks else None)
    own_tier = "host" if machine.kind == "cuda" else "file"
    if machine.tier != own_tier:
        raise ValueError(
            f"--tier must be {own_tier} for a script, which offloads to a file on a CPU and to host"
            f" memory on a GPU, got {machine.tier}"
        )
    if problem := framework.conflict(ranks) or framework.refuse(model):
        raise ValueError(problem)


def lost_updates(given: Namespace, found: Estimates) -> list[str]:
    """Return a sentence if only recipes without fp32 weights fit, as a list of at most one."""
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
    """Return the recipe with the fields that the options set, for each precision to be tried.

    Raises:
        ValueError: Options cannot be combined.
    """
    ranks = given.ranks or 1
    if given.check and ranks > 1:
        raise ValueError(
            f"--check cannot be combined with --ranks {ranks}: it runs a single rank. To run"
            " several, use python -m course_lib.distributed"
        )
    more: dict[str, Any] = {}
    if ranks > 1 or given.shard:
        more = {"ranks": ranks, "shard": given.shard}
    if given.lora and ranks > 1:
        raise ValueError(
            f"--ranks {ranks} cannot be combined with --lora: steps of several ranks are estimated"
            " in one dtype only"
        )
    if given.lora and given.precision not in (None, "autocast"):
        raise ValueError(
            f"--precision {given.precision} cannot be combined with --lora: adapters are in fp32,"
            " and --base sets the format of the frozen weights"
        )
    if ranks > 1 and given.optimizer != "adam":
        raise ValueError(f"--optimizer must be adam when --ranks is {ranks}, got {given.optimizer}")
    precisions: Sequence[str | None] = framework.precisions if framework else ("bf16",)
    if given.precision == OWN or (given.lora and not given.precision):
        precisions = (None,)
    elif given.precision:
        precisions = (given.precision,)
    return [
        Recipe(precision=each, optimizer=given.optimizer, attention=model.attention, **more)
        for each in precisions
    ]


def with_spare_memory(found: Estimates, machine: Machine) -> list[Estimate]:
    """Return the cheapest recipe that leaves spare memory, as a list of at most one estimate.

    The list is empty if the cheapest recipe overall already leaves a share of `SPARE`, or if no
    recipe does. The spare memory covers what an estimate does not include, such as longer samples
    or other processes.
    """
    most = machine.room - int(SPARE * machine.memory)
    if machine.bytes_taken(found[0]) <= most or most < 1:
        return []
    try:
        others = found.within(most)
    except InfeasibleBudget:
        return []
    return [each for each in others if each not in found][:1]


# ---- What each framework can run


@dataclass(frozen=True)
class ForFramework:
    """The cheapest recipe that a framework can run, or the reason why there is none.

    Attributes:
        framework: The framework.
        model: Model and batch, as the framework trains them; None if it cannot train the model.
        found: The recipes that fit; None if none does.
        problem: Sentence on why none does; empty if one does.
    """

    framework: Framework
    model: Workload | None
    found: Estimates | None
    problem: str = ""

    @cached_property
    def script(self) -> str:
        """Script of the cheapest recipe; only if a recipe fits."""
        assert self.found is not None and self.model is not None
        return self.framework.script(self.found[0].recipe, self.model)

    def as_dict(self) -> dict[str, Any]:
        """Return the answer for JSON."""
        if self.found is None:
            return {"problem": str(self.problem)}
        best = self.found[0]
        return {
            "recipe": best.recipe.changed_fields(),
            "peak_bytes": best.peak_bytes,
            "script": self.script,
        }


def for_each_framework(
    given: Namespace, model: Workload, machine: Machine, found: Estimates
) -> list[ForFramework]:
    """Return the answer of each framework, the one whose recipe is the cheapest first.

    The searches for frameworks are quick ones.

    Args:
        given: Options of the command. If they name a framework, its answer is the only one.
        found: Recipes that fit, of the given framework or of the search among all.
    """
    if given.framework:
        return [ForFramework(FRAMEWORKS[given.framework], model, found)]
    answers = [_answer(given, machine, found, each) for each in FRAMEWORKS.values()]
    return sorted(
        answers, key=lambda each: machine.rates.seconds(each.found[0]) if each.found else math.inf
    )


def _answer(
    given: Namespace, machine: Machine, found: Estimates, framework: Framework
) -> ForFramework:
    own = None
    try:
        own = workload_for(given, framework)
        # A script trains a config's model as transformers builds it.
        if given.config or not _can_run(given, own, found[0].recipe, framework):
            quick = Namespace(**vars(given) | {"quick": True})
            found = search(quick, own, machine, False, framework)
        answer = ForFramework(framework, own, found)
        _ = answer.script  # raises if a script cannot be written for this model
        return answer
    except InfeasibleBudget as error:
        problem = text("nothing was found that fits")
        if error.least_bytes is not None:
            least = bytes_text(error.least_bytes)
            problem = text("nothing was found that fits; the least found is {least}", least=least)
        return ForFramework(framework, own, None, problem)
    except ValueError as error:
        return ForFramework(framework, own, None, translated_error(message(error)))


def _can_run(given: Namespace, model: Workload, recipe: Recipe, framework: Framework) -> bool:
    """Return whether a recipe of the search among all is one of a framework's, at the same cost."""
    precisions = [base.precision for base in _bases(given, model, framework)]
    if framework.has_own_step or recipe.precision not in precisions or framework.refuse(model):
        return False
    with symbolic():
        return framework.for_model(model.make_model()).conflict(recipe) is None


def workload_for(given: Namespace, framework: Framework | None) -> Workload:
    """Return the workload of the options, with a model that the framework trains."""
    return workload_of(Namespace(**vars(given) | {"framework": framework and framework.name}))
