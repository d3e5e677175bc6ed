"""Command that finds the recipes that fit a budget; see `python -m course_lib.budget --help`."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from course_lib._check import InfeasibleBudget
from course_lib._check import kind as of_kind
from course_lib._origin import is_refusal, message, silence_operator_log
from course_lib.adapters import BASES
from course_lib.checkpoint.blocks import names_of
from course_lib.distributed.formulas import ring_bytes
from course_lib.labels import say, text, verbatim
from course_lib.labels.command import Parser, run_command, translated_error
from course_lib.labels.drawing import course_font
from course_lib.memory import CATEGORIES
from course_lib.memory.show import Table, bytes_text
from course_lib.options import add_shared, byte_count, parameter_count, parse_name, whole_number
from course_lib.symbolic import symbolic
from course_lib.workload import Workload, named_function, workload_of

from .check import check
from .device import EstimatesOnDevice, OnDevice
from .device_memory import kept_bytes
from .estimate import TIERS, Estimate
from .optimizers import OPTIMIZERS
from .rates import DEVICE_NAMES, RATES, Rates, this_machine
from .recipe import Recipe
from .reservation import COUNTS
from .search import Estimates, fit
from .show import Way, waterfall
from .techniques import TECHNIQUES
from .techniques.precision import PRECISIONS
from .techniques.ranks import SHARDS

THIS = "this"
# Value of --precision that stands for None in a recipe.
OWN = "own"
# Share of the budget. If the cheapest recipe leaves less of it unused, one that leaves more is
# shown as well.
SPARE = 0.05
SECONDS_BETWEEN_LINES = 30
#: Maps other common names of optimizers to keys of `OPTIMIZERS`.
OPTIMIZER_NAMES = {alias: name for name, row in OPTIMIZERS.items() for alias in row.aliases}
_NO_FP16 = (
    "fp16 needs loss scaling, which no recipe has, and its tensors have as many bytes as those of"
    " bf16"
)
NO_PRECISION = dict.fromkeys(("fp16", "float16", "half"), _NO_FP16)
HELP = """Find the recipes that train a model within a byte budget, the cheapest first. Nothing
is allocated or run, except with --check. The model comes from a Hugging Face
config.json, from a function, or is the course's decoder (course_lib.models.Decoder)
of the size that --parameters gives, or --hidden and --layers."""
EXAMPLE = """examples:
  python -m course_lib.budget --config config.json --sequence 4096 --batch 8 --budget 80GiB
  python -m course_lib.budget --model mine:make_model --batch-from mine:make_batch --budget 24GB

exit status:
  0   at least one recipe fits
  1   no recipe fits, or your own code raises an error
  2   an argument is refused"""


def arguments() -> argparse.ArgumentParser:
    parser = Parser(
        "python -m course_lib.budget",
        description=HELP,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_shared(parser, {"--config": {}, "--model": {}})
    parser.add_argument(
        "--batch-from",
        metavar="PACKAGE:FUNCTION",
        help=(
            "function that returns a batch; only with --model (default: the attribute make_batch of"
            " that function)"
        ),
    )
    parser.add_argument(
        "--parameters",
        type=parameter_count,
        help="of the decoder, about, such as 7B; sets hidden and layers if left out",
    )
    parser.add_argument("--hidden", type=whole_number, help="width of the decoder")
    parser.add_argument("--layers", type=whole_number, help="decoder layers")
    parser.add_argument(
        "--heads",
        type=whole_number,
        help="a divisor of hidden; if left out, the one nearest to hidden / 128 from below",
    )
    parser.add_argument(
        "--vocabulary", type=whole_number, help="different tokens of the decoder (default 32000)"
    )
    add_shared(parser, {"--sequence": {"type": whole_number}, "--batch": {"type": whole_number}})
    parser.add_argument(
        "--budget",
        type=byte_count,
        help=(
            "80GiB (2**30 bytes each) or 24GB (10**9 bytes each); default the memory of the"
            " --device"
        ),
    )
    parser.add_argument(
        "--precision",
        type=parse_name([*PRECISIONS, OWN], {"bfloat16": "bf16", "float32": "fp32"}, NO_PRECISION),
        metavar="|".join([*PRECISIONS, OWN]),
        help=(
            "default bf16, with fp32 master weights; autocast has fp32 weights and computes in"
            " bf16; bf16-only has no master weights; own keeps the dtypes of the model, for example"
            " of one with adapters; with --lora only autocast, because --base decides"
        ),
    )
    parser.add_argument(
        "--lora",
        type=whole_number,
        metavar="RANK",
        help=(
            "train LoRA adapters of this rank on a frozen model; a --config is built by"
            " transformers (pip install transformers peft)"
        ),
    )
    parser.add_argument(
        "--lora-targets",
        type=_names,
        metavar="NAMES",
        help="layers with adapters, separated by commas, or all-linear; default peft's choice",
    )
    parser.add_argument(
        "--base",
        choices=BASES,
        help=(
            "with --lora: format of the frozen weights, of which int8 and nf4 need bitsandbytes"
            " (default bf16)"
        ),
    )
    parser.add_argument(
        "--optimizer",
        type=parse_name(OPTIMIZERS, OPTIMIZER_NAMES),
        metavar="|".join(OPTIMIZERS),
        default="adam",
        help="default %(default)s, which is AdamW",
    )
    parser.add_argument(
        "--device",
        "--machine",
        type=_device,
        metavar="NAME",
        help=text(
            "machine whose rates are used, and whose memory where no budget is given: {names}; or"
            " this, which is measured; or PACKAGE:FUNCTION, which returns the Rates of your own"
            " device (default H100, for its rates alone)",
            names=verbatim(", ".join(RATES)),
        ),
    )
    parser.add_argument(
        "--ranks",
        type=whole_number,
        help="devices that share the batch; each way to shard is tried",
    )
    parser.add_argument(
        "--blocks",
        type=_names,
        metavar="NAMES",
        help=(
            "modules to checkpoint, separated by commas; * matches the text between two dots, as in"
            " 'tower.*,decoder.layers.*'; default the model's lists of blocks"
        ),
    )
    parser.add_argument("--shard", choices=SHARDS, help="with --ranks, this one alone")
    parser.add_argument(
        "--tier",
        choices=TIERS,
        help="where offloaded tensors go: default file for a CPU, else host (memory)",
    )
    parser.add_argument(
        "--count",
        choices=COUNTS,
        help=(
            "what must fit: tensors, or what PyTorch's allocator reserves for them together with"
            " what CUDA keeps (default reserved on a GPU, else tensors)"
        ),
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="search less and sooner; what is found may not be the cheapest",
    )
    add_shared(parser, {"--json": {}})
    parser.add_argument(
        "--check", action="store_true", help="take the cheapest step for real on this machine"
    )
    parser.add_argument(
        "--plot",
        type=_picture,
        metavar="FILE",
        help="draw the way to the best recipe (needs matplotlib)",
    )
    return parser


@silence_operator_log()
def main(argv: list[str] | None = None) -> int:
    parser = arguments()
    given = parser.parse_args(argv)
    report: dict = {}
    try:
        model = workload_of(given)
        rates, tier = _rates(given)
        device = given.device or "H100"
        kind = _kind(given, rates)
        count = given.count or ("reserved" if kind == "cuda" else "tensors")
        memory = given.budget or _memory(given, rates)
        # A budget for tensors alone does not include the memory that CUDA keeps.
        whole_memory = count == "reserved" or given.budget is None
        kept = kept_bytes(rates) if kind == "cuda" and whole_memory else 0
        room = memory - kept
        report = {
            "model": model.name,
            "batch": model.batch,
            "device": device,
            "kind": kind,
            "count": count,
            "budget_bytes": memory,
            "room_bytes": room,
        }
        if room < 1:
            raise ValueError(
                f"--budget must be more than the {bytes_text(kept)} that CUDA and cuBLAS keep on a"
                f" GPU ({device}), got {bytes_text(memory)}; or pass --count tensors, to count"
                " tensors alone"
            )
        base = _base(given, model)
        options = {"loss_sum": model.loss_sum, "split": model.split, "tier": tier, "kind": kind}
        options |= {"gpu": rates.gpu, "count": count, "quick": given.quick}
        options["blocks"] = given.blocks
        # If `main` is called from Python, as in a notebook, it prints no progress.
        options["progress"] = sys.stderr.isatty() or (argv is None and _lines_of_progress())
        found = fit(model.make_model, model.make_batch, room, base=base, rates=rates, **options)
        way = found.way()
        leaner = _with_spare_memory(found, memory, room, count)
        checked = check(model, found[0].recipe) if given.check else None
        gpu = (
            OnDevice.from_estimate(found[0], rates, memory if whole_memory else None)
            if kind == "cuda"
            else None
        )
    except InfeasibleBudget as error:
        if given.json:
            report |= {"recipes": [], "error": str(error), "least_bytes": error.least_bytes}
            report["not_tried"] = [*error.not_tried]
            print(json.dumps(report, indent=1))
        else:
            print(_nothing_fits(error, model, report), file=sys.stderr)
        return 1
    except Exception as error:
        sentence = say(text("error: {sentence}", sentence=translated_error(message(error))))
        parser.exit(2 if is_refusal(error) else 1, f"{sentence}\n")
    if given.json:
        report |= {
            "parameters": model.parameters(),
            "rates": _plain(rates),
            "recipes": [_as_json(e, rates, kind) for e in found],
            "leaner": [_as_json(e, rates, kind) for e in leaner],
            "not_tried": [*found.not_tried],
        }
        report |= {"way": [_as_json(e, rates) for e in way], "check": checked and checked.as_dict()}
        report["on_device"] = gpu and asdict(gpu)
        report["training_arguments"] = (
            found[0].recipe.as_training_arguments(model.samples).arguments
        )
        print(json.dumps(report, indent=1, allow_nan=False))
    else:
        _print(given, model, rates, found, leaner, way, gpu, report)
        if checked:
            print(f"\n{checked}")
    if given.plot:
        _plot(parser, given, model, way, memory)
    return 0


def _with_spare_memory(found: Estimates, memory: int, room: int, count: str) -> list[Estimate]:
    """Return the cheapest recipe that leaves spare memory, as a list of at most one estimate.

    The list is empty if the cheapest recipe overall already leaves a share of `SPARE`, or if no
    recipe does. The spare memory covers what an estimate does not include, such as longer samples
    or other processes.
    """

    def bytes_taken(each: Estimate) -> int:
        return each.peak_bytes if count == "tensors" else each.reserved_bytes()

    most = room - int(SPARE * memory)
    if bytes_taken(found[0]) <= most or most < 1:
        return []
    try:
        others = found.within(most)
    except InfeasibleBudget:
        return []
    return [each for each in others if each not in found][:1]


def _lines_of_progress() -> Callable[[Recipe], None]:
    """Return a function that prints progress to stderr; it must be called before each estimate.

    It prints at most one line per `SECONDS_BETWEEN_LINES` seconds.
    """
    began = last = time.monotonic()
    count = 0

    def watch(recipe: Recipe) -> None:
        nonlocal last, count
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_LINES:
            values = {"count": count, "seconds": f"{now - began:.0f}", "recipe": str(recipe)}
            progress = text("recipes estimated in {seconds} s: {count}; now: {recipe}", **values)
            print(say(progress), file=sys.stderr, flush=True)
            last = now
        count += 1

    return watch


def _set_aside(report: Mapping[str, Any]) -> list[str]:
    """Return a sentence on the part of the budget that CUDA keeps, as a list of at most one."""
    memory, room = report["budget_bytes"], report["room_bytes"]
    if room == memory:
        return []
    values = {"kept": memory - room, "memory": memory, "room": room}
    return [
        text(
            "CUDA's context and cuBLAS keep {kept} of the {memory}, so {room} are left for the"
            " step",
            **{name: bytes_text(value) for name, value in values.items()},
        )
    ]


def _nothing_fits(error: InfeasibleBudget, model: Workload, report: Mapping[str, Any]) -> str:
    """Return the message of a search without a result.

    It shows the recipe with the lowest peak, the bytes that are live at this peak by category, and
    the techniques that act on the largest category.
    """
    budget = bytes_text(error.budget_bytes)
    if error.least is None:
        return say(text("nothing was found that fits into {budget}", budget=budget))
    least = error.least
    parts = [
        _heading(model),
        text(
            "nothing was found that fits into {budget}; the least found is {least}: {recipe}",
            budget=budget,
            least=bytes_text(error.least_bytes),
            recipe=str(least.recipe),
        ),
        *_set_aside(report),
        text("what is live at its peak, in {operator}:", operator=verbatim(least.operator)),
        least,
        *error.not_tried,
        _advice(least, error.additions),
    ]
    return _paragraphs(parts)


def _heading(model: Workload) -> str:
    return text(
        "{model}: {count:,} parameters; {batch}",
        model=model.name,
        count=model.parameters(),
        batch=model.batch,
    )


def _paragraphs(parts: Iterable[str | Table]) -> str:
    """Join labels, in the reader's language, and tables, with an empty line between them."""
    return "\n\n".join(say(part, "\n") if isinstance(part, str) else str(part) for part in parts)


def _advice(least: Estimate, additions: Collection[str]) -> str:
    """Return a sentence with the techniques that make the largest category of the peak smaller.

    Args:
        least: Estimate of the recipe with the lowest peak.
        additions: Fields of the techniques that model and batch allow in addition to this recipe.
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
        "the largest category is {category}, and this recipe already uses every technique that"
        " reduces it; to save more, take a smaller batch, shorter samples, fewer trained parameters"
        " or more ranks",
        category=category,
    )


def _base(given: argparse.Namespace, model: Workload) -> Recipe:
    ranks = given.ranks or 1
    if given.check and ranks > 1:
        raise ValueError(
            f"--check cannot be combined with --ranks {ranks}: it runs a single rank. To run"
            " several, use python -m course_lib.distributed"
        )
    more = {"ranks": ranks, "shard": given.shard} if ranks > 1 or given.shard else {}
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
    default = None if given.lora else "bf16"
    return Recipe(
        precision=None if given.precision == OWN else given.precision or default,
        optimizer=given.optimizer,
        attention=model.attention,
        **more,
    )


def _rates(given: argparse.Namespace) -> tuple[Rates, str]:
    """Return the rates of the machine, and its lower tier."""
    if given.device == THIS:
        return this_machine(), given.tier or ("host" if torch.cuda.is_available() else "file")
    if ":" in (given.device or ""):
        own = named_function("--device", given.device)()
        return of_kind(
            "--device", own, Rates, "a function that returns Rates"
        ), given.tier or "host"
    return RATES[given.device or "H100"], given.tier or (
        "file" if given.device == "laptop" else "host"
    )


def _memory(given: argparse.Namespace, rates: Rates) -> int:
    """Return the memory of the device named by --device in bytes.

    Raises:
        ValueError: No device was named, or it has no memory of its own.
    """
    if given.device is None or rates.memory_bytes is None:
        raise ValueError(
            "--budget is missing: pass bytes such as 80GiB, or a --device that has memory"
            " of its own"
        )
    return rates.memory_bytes


def _device(name: str) -> str:
    """Return the name of a device in `RATES`, THIS, or the name of a function unchanged."""
    return name if ":" in name else parse_name([*RATES, THIS], DEVICE_NAMES)(name)


def _kind(given: argparse.Namespace, rates: Rates) -> str:
    """Return the kind of the device, "cpu" or "cuda"; the user's own is a GPU if it says which."""
    if ":" in (given.device or ""):
        return "cuda" if rates.gpu else "cpu"
    on_cpu = given.device == "laptop" or (given.device == THIS and not torch.cuda.is_available())
    return "cpu" if on_cpu else "cuda"


def _as_json(estimate: Estimate, rates: Rates, kind: str = "cpu") -> dict:
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


def _plain(rates: Rates) -> dict:
    """Return the rates as a dict in which None replaces infinity, which JSON does not have."""
    return {name: None if value == math.inf else value for name, value in asdict(rates).items()}


def _print(
    given: argparse.Namespace,
    model: Workload,
    rates: Rates,
    found: Estimates,
    leaner: Sequence[Estimate],
    way: Way,
    gpu: OnDevice | None,
    report: Mapping[str, Any],
) -> None:
    best = found[0]
    name = given.device or "H100"
    device: str = verbatim(name)
    if given.device is None:
        device = text("{device}, as no --device is given", device=device)
    elif name == THIS:
        device = text("this machine")
    machine = {"device": device, "source": rates.source}
    room, count = report["room_bytes"], report["count"]

    def table(estimates: Sequence[Estimate], title: str) -> Table:
        if gpu is None:
            return Estimates(estimates, rates, title)
        return EstimatesOnDevice(estimates, rates, room, count, title)

    shares = {"flops": rates.flops_share, "link": rates.link_share}
    parts = [
        _heading(model),
        table(found, found.title),
        *found.not_tried,
        *_set_aside(report),
        text(
            "the seconds assume that a step reaches {flops:.0%} of the FLOPs per second of {device}"
            " and {link:.0%} of its link; sources:\n- {source}",
            **{**machine, **shares},
        ),
        *_between_machines(best, rates),
        text(
            "the cheapest: {recipe}; what is live at its peak, in {operator}:",
            recipe=verbatim(repr(best.recipe)),
            operator=verbatim(best.operator),
        ),
        best,
        text("the way there:"),
        way,
    ]
    if leaner:
        explanation = text(
            "the cheapest leaves less than {share:.0%} of the budget; this one leaves more:",
            share=SPARE,
        )
        parts += [explanation, table(leaner, "")]
    if gpu:
        parts += [text("what one step of the cheapest holds on a GPU:"), gpu]
    print(_paragraphs([*parts, *_to_paste(found, model, given.blocks)]))


def _between_machines(found: Estimate, rates: Rates) -> list[str]:
    """Return a sentence about the network, if the ranks need several machines and it is counted."""
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


def _to_paste(found: Estimates, model: Workload, blocks: Sequence[str] | None = None) -> list[str]:
    """Return the cheapest recipe as lines for other training code, each after a heading."""
    recipe = found[0].recipe
    lines = recipe.as_training_arguments(model.samples)
    parts: list[str] = [text("the cheapest as arguments of Hugging Face's Trainer:")]
    parts.append(verbatim(lines))
    if lines.recipe != recipe:
        peak = bytes_text(found.estimate(lines.recipe).peak_bytes)
        parts.append(text("with these arguments alone, a step takes about {peak}", peak=peak))
    if recipe.shard in ("zero2", "zero3"):
        code = verbatim(recipe.as_fsdp2(_blocks_of(model, blocks)))
        parts += [text("and as lines for FSDP2, in each process that torchrun starts:"), code]
    return parts


def _blocks_of(model: Workload, blocks: Sequence[str] | None) -> list[str]:
    """Return the names of the blocks of the model that the user trains."""
    if model.block_list is not None and blocks is None:
        return [f"{model.block_list}.0"]
    with symbolic():
        return names_of(model.make_model(), blocks)


def _plot(parser, given: argparse.Namespace, model: Workload, way: Way, budget: int) -> None:
    values = {"count": model.parameters(), "budget": bytes_text(budget)}
    words = {name: say(name) for name in (*CATEGORIES, "budget")} | {
        "optimizer": say(text("optimizer state"))
    }
    try:
        with course_font():
            ax = waterfall(
                way, budget_bytes=budget, names=[say(name) for name, *_ in way.rows()], labels=words
            )
            ax.set_title(say(text("{count:,} parameters into {budget}", **values)))
            ax.figure.savefig(given.plot, dpi=120)
    except OSError as error:
        parser.error(f"--plot {given.plot!r} cannot be written ({error.strerror})")
    if not given.json:
        file = verbatim(given.plot)
        print(f"\n{say(text('{file} shows the way from the plain step', file=file))}")


def _names(text: str) -> list[str]:
    """Convert names that are separated by commas to a list."""
    return [name.strip() for name in text.split(",")]


def _picture(text: str) -> str:
    """Check that a figure can be written to this path, and return the path.

    The check runs before the search, because the search may be long.

    Raises:
        argparse.ArgumentTypeError: The figure cannot be written.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise argparse.ArgumentTypeError("needs matplotlib, which is not installed") from None
    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    path = Path(text)
    if path.suffix.removeprefix(".").lower() not in kinds:
        raise argparse.ArgumentTypeError(
            f"the file's extension must be one of {', '.join(kinds)}, got {text!r}"
        )
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file, got the folder {text!r}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be in a folder that exists, got {text!r}")
    return text


if __name__ == "__main__":
    run_command(main)
