"""Format the result of `python -m course_lib.budget`: the answer, a script, and tables."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from course_lib._check import InfeasibleBudget
from course_lib.checkpoint.blocks import names_of
from course_lib.distributed.formulas import ring_bytes
from course_lib.labels import join_labels, say, text, verbatim
from course_lib.memory.show import Table, bytes_text
from course_lib.symbolic import symbolic
from course_lib.workload import Workload

from .answer import SPARE_SHARE, FrameworkAnswer, Machine, lost_updates_warning
from .device import EstimatesOnGpu, GpuMemory, host_state_bytes
from .estimate import Estimate
from .rates import Rates
from .scripts import FRAMEWORKS, Framework
from .search.fit import Estimates
from .techniques import TECHNIQUES
from .waterfall import TechniqueSteps


class PerFramework(Table):
    """Table with a row per framework: its cheapest recipe, or the reason why none fits.

    A recipe is a set of memory-saving techniques for a training step, and its cost is the duration
    of the step.

    Args:
        answers: Answers of the frameworks, one per row.
    """

    columns = (verbatim("--for"), "peak (MB)", "the cheapest recipe, or why there is none")

    def __init__(self, answers: Sequence[FrameworkAnswer]):
        self.answers = answers

    def rows(self) -> list[Sequence]:
        return [
            (
                verbatim(each.framework.name),
                f"{each.found[0].peak_bytes / 1e6:,.1f}" if each.found else "",
                str(each.found[0].recipe) if each.found else each.problem,
            )
            for each in self.answers
        ]


@dataclass(frozen=True)
class Result:
    """Result of the command `python -m course_lib.budget`, if at least one recipe fits the budget.

    A recipe is a set of memory-saving techniques for a training step, and its cost is the duration
    of the step.

    Attributes:
        model: Model and batch of the step.
        machine: Device and its memory budget.
        found: Estimates of the recipes that fit the budget, cheapest first.
        answers: The cheapest recipe of each framework, or the reason why there is none.
        leaner: Result of `with_spare_memory`: a list with the estimate of the cheapest recipe that
            leaves at least 5% of the budget unused. Empty if `found[0]` already leaves 5%, or if no
            recipe does.
    """

    model: Workload
    machine: Machine
    found: Estimates
    answers: Sequence[FrameworkAnswer]
    leaner: Sequence[Estimate]

    @cached_property
    def steps(self) -> TechniqueSteps:
        """List of estimated training steps, each with one more technique than the step before.

        The first step is the baseline, which has the precision and the optimizer of the cheapest
        recipe, but none of its techniques. The last step uses all techniques of this recipe.
        """
        return self.found.steps_from_baseline()

    @cached_property
    def on_gpu(self) -> GpuMemory | None:
        """Table of the GPU memory that a step of the cheapest recipe needs; None for a CPU."""
        machine = self.machine
        if machine.kind != "cuda":
            return None
        memory = machine.memory if machine.is_whole else None
        return GpuMemory.from_estimate(self.found[0], machine.rates, memory)

    def as_text(self, given: Namespace) -> str:
        """Return the text that the command prints: an answer of three lines, a script, and tables.

        Args:
            given: Parsed options of the command. With --details, more tables are included.
        """
        parts = [
            _join_lines(
                [
                    *answer_lines(self.found[0], self.machine),
                    *lost_updates_warning(given, self.found),
                ]
            ),
            *self._script(),
            *self._tables(),
            *(self._details(given) if given.details else [_DETAILS_HINT]),
        ]
        return _paragraphs(parts)

    def _script(self) -> list[str]:
        """Return a training script with a heading, and a table of what each framework can run.

        The script is for the framework whose recipe is the cheapest. It is left out if no framework
        can run a recipe. The table is left out if there is only one framework.
        """
        parts = []
        best = self.answers[0]
        if best.found is not None:
            heading = text(
                "a script for {framework}, with {recipe}, {peak} at the peak:",
                framework=best.framework.title,
                recipe=str(best.found[0].recipe),
                peak=bytes_text(best.found[0].peak_bytes),
            )
            parts += [heading, verbatim(best.script)]
        if len(self.answers) > 1:
            parts += [text("what each framework can run:"), PerFramework(self.answers)]
        return parts

    def _tables(self) -> list[str | Table]:
        """Return a table of the recipes that fit, and a table of `steps`, with labels.

        If `leaner` is not empty, a table of it follows.
        """
        parts: list[str | Table] = [
            _heading(self.model),
            self._table(self.found, self.found.title),
            *self.found.not_tried,
            *_kept_memory_note(self.machine),
            text("from the baseline to the cheapest recipe:"),
            self.steps,
        ]
        if self.leaner:
            explanation = text(
                "the cheapest recipe leaves less than {share:.0%} of the budget; this one leaves"
                " more:",
                share=SPARE_SHARE,
            )
            parts += [explanation, self._table(self.leaner, "")]
        return parts

    def _table(self, estimates: Sequence[Estimate], title: str) -> Table:
        """Return a table of estimates, with additional columns if the device is a GPU."""
        machine = self.machine
        if machine.kind != "cuda":
            return Estimates(estimates, machine.rates, title)
        return EstimatesOnGpu(
            estimates, machine.rates, machine.step_budget_bytes, machine.count, title
        )

    def _details(self, given: Namespace) -> list[str | Table]:
        """Return the labels and tables that the option --details adds."""
        best, rates = self.found[0], self.machine.rates
        parts: list[str | Table] = [
            text(
                "the seconds assume that a step reaches {flops:.0%} of the FLOPs per second of"
                " {device} and {link:.0%} of its link; sources:\n- {source}",
                device=_device_label(self.machine),
                source=rates.source,
                flops=rates.flops_share,
                link=rates.link_share,
            ),
            *_network_note(best, rates),
            text(
                "the cheapest recipe: {recipe}; what is live at its peak, in {operator}:",
                recipe=verbatim(repr(best.recipe)),
                operator=verbatim(best.operator),
            ),
            best,
        ]
        if self.on_gpu:
            parts += [text("GPU memory of a step of the cheapest recipe:"), self.on_gpu]
        if given.framework or (
            given.model and FRAMEWORKS["trainer"].unsupported_reason(self.model)
        ):
            return parts
        return [*parts, *_code_to_paste(self.found, self.model, given.blocks)]

    def as_dict(self) -> dict[str, Any]:
        """Return the result as a dict for the command's JSON output."""
        rates, kind = self.machine.rates, self.machine.kind
        best = self.found[0]
        return {
            "fits": True,
            "left_bytes": self.machine.step_budget_bytes - self.machine.bytes_taken(best),
            "host_state_bytes": host_state_bytes(best),
            "parameters": self.model.parameters(),
            "rates": _rates_as_json(rates),
            "recipes": [_estimate_as_json(e, rates, kind) for e in self.found],
            "leaner": [_estimate_as_json(e, rates, kind) for e in self.leaner],
            "not_tried": [*self.found.not_tried],
            "way": [_estimate_as_json(e, rates) for e in self.steps],
            "on_device": self.on_gpu and asdict(self.on_gpu),
            "training_arguments": (best.recipe.as_training_arguments(self.model.samples).arguments),
            "frameworks": {each.framework.name: each.as_dict() for each in self.answers},
        }


_DETAILS_HINT = text(
    "more: --details shows what is live at the peak, and the sources of the seconds"
)


# ---- The answer in three lines


def answer_lines(best: Estimate, machine: Machine) -> list[str]:
    """Return the first three lines of the command's output if a recipe fits the budget.

    The first line says that the step fits, and how many bytes it needs. The second line says how
    much memory is left. The third line says what the step stores in host memory, or writes to
    files.

    Args:
        best: Estimate of the step of the cheapest recipe.
        machine: Device and its memory budget.
    """
    needed = machine.bytes_taken(best) + machine.kept
    first = text(
        "it fits: a step of the cheapest recipe takes {needed} of {memory} ({device})",
        needed=_bytes_label(needed),
        memory=_bytes_label(machine.memory),
        device=_device_label(machine),
    )
    left = machine.memory - needed
    share = left / machine.memory
    second = text("left: {left}, {share:.0%} of the memory", left=_bytes_label(left), share=share)
    return [first, second, _storage_label(best)]


def _storage_label(best: Estimate) -> str:
    """Return a label that says what the step stores in host memory, or writes to files."""
    if best.tier == "file":
        if not best.bytes_down and not best.bytes_up:
            return text("in files: nothing")
        moved = {"down": _bytes_label(best.bytes_down), "up": _bytes_label(best.bytes_up)}
        return text("in files: a step writes {down} and reads {up}", **moved)
    state = host_state_bytes(best)
    parts = []
    if state:
        each = state // best.host_parameters
        parts.append(
            text(
                "{state} of optimizer state, {count} bytes per parameter",
                state=_bytes_label(state),
                count=each,
            )
        )
    if best.recipe.offload_activations:
        parts.append(text("at most {moved} of activations", moved=_bytes_label(best.bytes_down)))
    if not parts:
        return text("in host memory: nothing")
    return text("in host memory: {parts}", parts=join_labels(parts))


def _bytes_label(count: int) -> str:
    """Return a label of a number of bytes, such as "17.9 GB", where 1 GB is 10**9 bytes."""
    for size, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= size:
            return verbatim(f"{count / size:,.1f} {unit}")
    return text("{count:,} bytes", count=count)


def _device_label(machine: Machine) -> str:
    """Return a label that names the device of the machine."""
    device: str = verbatim(machine.name)
    if machine.name == "this":
        return text("this machine")
    if machine.is_default:
        return text("computed for {device}, the default of --device", device=device)
    return device


def _join_lines(labels: Iterable[str]) -> str:
    """Join labels in the user's language, with one label per line."""
    return verbatim("\n".join(map(say, labels)))


# ---- Nothing fits


def nothing_fits(
    error: InfeasibleBudget, model: Workload, machine: Machine, framework: Framework | None
) -> str:
    """Return the message that the command prints if no recipe fits the budget.

    The message says how many bytes are missing for the recipe with the lowest peak. For this
    recipe, it lists the live bytes at the peak by category of memory, such as "activation". It also
    lists techniques that the recipe does not use and that reduce the largest category.

    Args:
        error: Error of the search, with the estimate of the recipe with the lowest peak.
        model: Model and batch of the step.
        machine: Device and its memory budget.
        framework: Framework to which the search was limited; None for no limit.
    """
    budget = bytes_text(error.budget_bytes)
    if error.least is None:
        return say(text("nothing was found that fits into {budget}", budget=budget))
    least = error.least
    missing = machine.bytes_taken(least) - machine.step_budget_bytes
    answer = [
        text(
            "nothing was found that fits into {budget}; the least found is {least}: {recipe}",
            budget=budget,
            least=bytes_text(error.least_bytes),
            recipe=str(least.recipe),
        ),
        text("missing: {missing}", missing=_bytes_label(missing)),
        _storage_label(least),
    ]
    parts = [_join_lines(answer)]
    if framework is not None:
        parts.append(
            text(
                "only recipes that {framework} can run were tried; without --for, all are tried",
                framework=framework.title,
            )
        )
    parts += [
        _heading(model),
        *_kept_memory_note(machine),
        text("what is live at its peak, in {operator}:", operator=verbatim(least.operator)),
        least,
        *error.not_tried,
        _advice(least, error.additions),
    ]
    return _paragraphs(parts)


def _advice(least: Estimate, additions: Collection[str]) -> str:
    """Return a sentence that names unused techniques for reducing the peak's largest category.

    Args:
        least: Estimate of the recipe with the lowest peak.
        additions: Fields of `Recipe` whose techniques can be added to this recipe.
    """
    largest = max(least.at_peak, key=lambda name: least.at_peak[name])
    changed = least.recipe.changed_fields()
    unused = [
        "micro_batches" if "micro_batches" in technique.fields else technique.field
        for technique in TECHNIQUES
        if largest in technique.acts_on and not changed.keys() & technique.fields.keys()
    ]
    unused = [field for field in unused if field in additions]
    category = text("optimizer state" if largest == "optimizer" else largest)
    if unused:
        return text(
            "the largest category is {category}; techniques that reduce it and that this recipe"
            " does not use, as fields of Recipe: {fields}",
            category=category,
            fields=verbatim(", ".join(unused)),
        )
    return text(
        "the largest category is {category}, and no other technique that reduces it is allowed"
        " here; to save more, take a smaller batch, shorter samples, fewer trained parameters or"
        " more ranks",
        category=category,
    )


# ---- Parts


def _heading(model: Workload) -> str:
    """Return a label with the model, its number of parameters, and the batch."""
    return text(
        "{model}: {count:,} parameters; {batch}",
        model=model.name,
        count=model.parameters(),
        batch=model.batch,
    )


def _paragraphs(parts: Iterable[str | Table]) -> str:
    """Join labels and tables into one text in the user's language, separated by empty lines."""
    return "\n\n".join(say(part, "\n") if isinstance(part, str) else str(part) for part in parts)


def _kept_memory_note(machine: Machine) -> list[str]:
    """Return a sentence about the memory that CUDA keeps, as a list of at most one label.

    The list is empty if the budget includes no such memory.
    """
    if not machine.kept:
        return []
    values = {"kept": machine.kept, "memory": machine.memory, "room": machine.step_budget_bytes}
    return [
        text(
            "CUDA's context and cuBLAS keep {kept} of the {memory}, so {room} are left for the"
            " step",
            **{name: bytes_text(value) for name, value in values.items()},
        )
    ]


def _network_note(found: Estimate, rates: Rates) -> list[str]:
    """Return a sentence about the network between machines, as a list of at most one label.

    The list is empty if all ranks run on one machine, or if the speed of the network is not known.
    """
    ranks = found.recipe.ranks
    if ranks <= rates.peers or rates.network_bytes == math.inf:
        return []
    sentence = text(
        "the seconds assume machines of {peers} devices, whose network cards together carry"
        " {rate:g} GB/s in each direction; per step, {sent} leave each of the {machines} machines,"
        " and the same number enters it",
        peers=rates.peers,
        rate=rates.network_cards * rates.network_bytes / 1e9,
        sent=bytes_text(round(ring_bytes(found.sent_bytes, ranks))),
        machines=-(-ranks // rates.peers),
    )
    return [sentence]


def _code_to_paste(
    found: Estimates, model: Workload, blocks: Sequence[str] | None = None
) -> list[str]:
    """Return the cheapest recipe as code for the Trainer and, if the recipe shards, for FSDP2.

    The result is a list of labels, in which a heading comes before each block of code.
    """
    recipe = found[0].recipe
    lines = recipe.as_training_arguments(model.samples)
    parts: list[str] = [text("the cheapest recipe as arguments of Hugging Face's Trainer:")]
    parts.append(verbatim(lines))
    if lines.recipe != recipe:
        peak = bytes_text(found.estimate(lines.recipe).peak_bytes)
        parts.append(text("with these arguments alone, a step takes about {peak}", peak=peak))
    if recipe.shard in ("zero2", "zero3"):
        code = verbatim(recipe.as_fsdp2(_blocks_of(model, blocks)))
        parts += [text("and as lines for FSDP2, in each process that torchrun starts:"), code]
    return parts


def _blocks_of(model: Workload, blocks: Sequence[str] | None) -> list[str]:
    """Return the names of the blocks (repeated layers) in the model that the user trains.

    If the command got a config.json, the user trains a model of transformers. Its blocks have other
    names than those of `model.make_model`. The result is then only the name of its first block.
    This name, such as "model.layers.0", contains the name of the list of blocks.
    """
    if model.block_list is not None and blocks is None:
        return [f"{model.block_list}.0"]
    with symbolic():
        return names_of(model.make_model(), blocks)


def _estimate_as_json(estimate: Estimate, rates: Rates, kind: str = "cpu") -> dict:
    """Return an estimate as a dict for the JSON output of the command."""
    values = {
        **asdict(estimate),
        "in_words": str(estimate.recipe),
        "seconds": rates.seconds(estimate),
    }
    if kind == "cuda":
        values["reserved_bytes"] = estimate.reserved_bytes()
    return {
        **values,
        "recipe": estimate.recipe.changed_fields(),
        "seconds_of": rates.parts(estimate),
    }


def _rates_as_json(rates: Rates) -> dict:
    """Return rates as a dict for JSON. None replaces infinity, which JSON does not have."""
    return {name: None if value == math.inf else value for name, value in asdict(rates).items()}
