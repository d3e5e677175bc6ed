"""Command that finds the training recipes that fit a memory budget.

`python -m course_lib.budget --help` lists its options.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from course_lib._check import InfeasibleBudget
from course_lib._origin import is_rejection, message, silence_operator_log
from course_lib.adapters import BASES
from course_lib.labels import say, text, verbatim
from course_lib.labels.command import Parser, run_command, translated_error
from course_lib.labels.drawing import course_font
from course_lib.memory import CATEGORIES
from course_lib.memory.show import bytes_text
from course_lib.options import add_shared, byte_count, parameter_count, parse_name, whole_number
from course_lib.workload import Workload

from .answer import (
    OWN_PRECISION,
    Machine,
    framework_answers,
    search,
    with_spare_memory,
    workload_for,
)
from .check import compare_with_estimate
from .estimate import TIERS
from .optimizers import OPTIMIZERS
from .rates import DEVICE_NAMES, RATES, Rates, this_machine
from .recipe import Recipe
from .report import Result, nothing_fits
from .scripts import FRAMEWORKS
from .search.fit import COUNTS
from .techniques.precision import PRECISIONS
from .techniques.ranks import SHARDS
from .waterfall import TechniqueSteps, waterfall

# Value of --device for the machine on which the command runs.
THIS_MACHINE = "this"
SECONDS_BETWEEN_PROGRESS_LINES = 30
#: Maps other common names of optimizers to keys of `OPTIMIZERS`.
OPTIMIZER_NAMES = {alias: name for name, row in OPTIMIZERS.items() for alias in row.aliases}
#: Maps other common names of frameworks to keys of `FRAMEWORKS`.
FRAMEWORK_NAMES = {"transformers": "trainer", "pytorch": "torch", "fsdp": "fsdp2"}
_NO_FP16 = (
    "fp16 needs loss scaling, which no recipe has; choose bf16, whose tensors have"
    " the same number of bytes"
)
# Names of precisions that no recipe supports, each with the reason for the error message.
UNSUPPORTED_PRECISIONS = dict.fromkeys(("fp16", "float16", "half"), _NO_FP16)
HELP = """Find the recipes that train a model within a memory budget, and print the cheapest
first. Nothing is allocated or run, except with --check. The model comes from a Hugging
Face config.json or from a function, or it is the course's decoder
(course_lib.models.Decoder), whose size --parameters or --hidden and --layers set."""
EXAMPLE = """examples:
  python -m course_lib.budget --config config.json --sequence 4096 --batch 8 --budget 80GiB
  python -m course_lib.budget --model mine:make_model --batch-from mine:make_batch --budget 24GB

exit status:
  0   at least one recipe fits
  1   no recipe fits, or your own code raises an error
  2   an argument is invalid"""


def arguments() -> argparse.ArgumentParser:
    """Return the argument parser of the command `python -m course_lib.budget`."""
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
            "function that returns a batch for the model of --model; default: the attribute"
            " make_batch of the function that --model names"
        ),
    )
    parser.add_argument(
        "--parameters",
        type=parameter_count,
        help=(
            "approximate number of parameters of the decoder, such as 7B; sets --hidden and"
            " --layers if they are not given"
        ),
    )
    parser.add_argument("--hidden", type=whole_number, help="hidden size of the decoder")
    parser.add_argument("--layers", type=whole_number, help="number of layers of the decoder")
    parser.add_argument(
        "--heads",
        type=whole_number,
        help=(
            "number of attention heads of the decoder, a divisor of its hidden size; default: the"
            " largest divisor that is at most hidden / 128"
        ),
    )
    parser.add_argument(
        "--vocabulary", type=whole_number, help="vocabulary size of the decoder; default 32000"
    )
    add_shared(parser, {"--sequence": {"type": whole_number}, "--batch": {"type": whole_number}})
    parser.add_argument(
        "--budget",
        type=byte_count,
        help=(
            "memory that a step may use, such as 80GiB (2**30 bytes each) or 24GB (10**9 bytes"
            " each); default: the memory of the device that --device names"
        ),
    )
    parser.add_argument(
        "--precision",
        type=parse_name(
            [*PRECISIONS, OWN_PRECISION],
            {"bfloat16": "bf16", "float32": "fp32"},
            UNSUPPORTED_PRECISIONS,
        ),
        metavar="|".join([*PRECISIONS, OWN_PRECISION]),
        help=(
            "precision of the step. bf16 has fp32 master weights; autocast has fp32 weights and"
            " computes in bf16; bf16-only has no master weights; own keeps the dtypes of the"
            " model, for example of a model with adapters. Default: bf16; with --for trainer,"
            " first autocast and then bf16-only. With --lora, only autocast can be chosen, because"
            " --base sets the dtypes"
        ),
    )
    parser.add_argument(
        "--lora",
        type=whole_number,
        metavar="RANK",
        help=(
            "train LoRA adapters of this rank, and freeze the model; the model of --config is"
            " then built by transformers (pip install transformers peft)"
        ),
    )
    parser.add_argument(
        "--lora-targets",
        type=_split_names,
        metavar="NAMES",
        help=(
            "names of the layers that get adapters, separated by commas, or all-linear; default:"
            " the choice of peft"
        ),
    )
    parser.add_argument(
        "--base",
        choices=BASES,
        help=(
            "with --lora: format of the frozen weights; int8, nf4 and nf4-double need"
            " bitsandbytes; default bf16"
        ),
    )
    parser.add_argument(
        "--optimizer",
        type=parse_name(OPTIMIZERS, OPTIMIZER_NAMES),
        metavar="|".join(OPTIMIZERS),
        default="adam",
        help="optimizer of the step; default %(default)s, which is AdamW",
    )
    parser.add_argument(
        "--device",
        "--machine",
        type=parse_name([*RATES, THIS_MACHINE], DEVICE_NAMES),
        metavar="NAME",
        help=text(
            "device whose rates predict the seconds of a step, and whose memory is the budget if"
            " --budget is not given: {names}; or this, for this machine, which is measured."
            " Default: H100, but only for its rates",
            names=verbatim(", ".join(RATES)),
        ),
    )
    parser.add_argument(
        "--ranks",
        type=whole_number,
        help="number of devices that share the batch; all ways to shard are tried",
    )
    parser.add_argument(
        "--blocks",
        type=_split_names,
        metavar="NAMES",
        help=(
            "names of the modules to checkpoint, separated by commas; * matches the text between"
            " two dots, as in 'tower.*,decoder.layers.*'; default: the model's lists of blocks"
        ),
    )
    parser.add_argument("--shard", choices=SHARDS, help="with --ranks: try only this way to shard")
    parser.add_argument(
        "--tier",
        choices=TIERS,
        help=(
            "where offloaded tensors are stored: in a file or in host memory; default: file for a"
            " CPU, else host"
        ),
    )
    parser.add_argument(
        "--count",
        choices=COUNTS,
        help=(
            "which bytes must fit into the budget: those of tensors, or the memory that PyTorch's"
            " allocator reserves for them together with the memory that CUDA keeps (reserved);"
            " default: reserved for a GPU, else tensors"
        ),
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="search less, which is faster; the recipe that is found may not be the cheapest",
    )
    parser.add_argument(
        "--for",
        dest="framework",
        type=parse_name(FRAMEWORKS, FRAMEWORK_NAMES),
        metavar="|".join(FRAMEWORKS),
        help=(
            "search only recipes that this framework can run, and print a script for it: trainer"
            " is Hugging Face's Trainer, torch is plain PyTorch with this library, and fsdp2 is"
            " PyTorch's FSDP2; default: search all recipes"
        ),
    )
    parser.add_argument(
        "--details",
        action="store_true",
        help=(
            "also print the tensors that are live at the peak, the memory that a step occupies on"
            " a GPU, and the rates that predict the seconds, with their sources"
        ),
    )
    add_shared(parser, {"--json": {}})
    parser.add_argument(
        "--check",
        action="store_true",
        help=(
            "also run a step with the cheapest recipe on this machine, and compare its peak with"
            " the prediction"
        ),
    )
    parser.add_argument(
        "--plot",
        type=_figure_path,
        metavar="FILE",
        help=(
            "write a plot to FILE with the techniques that lead from the baseline to the best"
            " recipe (needs matplotlib)"
        ),
    )
    return parser


@silence_operator_log()
def main(argv: list[str] | None = None) -> int:
    """Run the command `python -m course_lib.budget`, and print its result.

    Args:
        argv: Arguments of the command, without the program name. None reads them from `sys.argv`.

    Returns:
        The exit status, which is 0 if a recipe fits the memory budget, and 1 if none does.

    Raises:
        SystemExit: An argument is invalid (exit status 2), or the user's code raises an error (exit
            status 1).
    """
    parser = arguments()
    given = parser.parse_args(argv)
    report: dict = {}
    machine = None
    try:
        framework = FRAMEWORKS.get(given.framework)
        model = workload_for(given, framework)
        machine = _machine(given)
        report = {
            "model": model.name,
            "batch": model.batch,
            "device": machine.name,
            "kind": machine.kind,
            "count": machine.count,
            "budget_bytes": machine.memory,
            "room_bytes": machine.step_budget_bytes,
            "framework": given.framework,
        }
        # If stderr is a terminal, `fit` shows a progress bar. If not, the command line prints lines
        # of progress, and a call of `main(argv)` from Python prints no progress.
        progress = sys.stderr.isatty() or (argv is None and _progress_printer())
        found = search(given, model, machine, progress, framework)
        answers = framework_answers(given, model, machine, found)
        result = Result(model, machine, found, answers, with_spare_memory(found, machine))
        checked = compare_with_estimate(model, found[0].recipe) if given.check else None
        if given.json:
            report |= result.as_dict() | {"check": checked and checked.as_dict()}
    except InfeasibleBudget as error:
        assert machine is not None
        if given.json:
            report |= {"fits": False, "recipes": [], "error": str(error)}
            report |= {"least_bytes": error.least_bytes, "not_tried": [*error.not_tried]}
            print(json.dumps(report, indent=1))
        else:
            print(nothing_fits(error, model, machine, framework), file=sys.stderr)
        return 1
    except Exception as error:
        sentence = say(text("error: {sentence}", sentence=translated_error(message(error))))
        parser.exit(2 if is_rejection(error) else 1, f"{sentence}\n")
    if given.json:
        print(json.dumps(report, indent=1, allow_nan=False))
    else:
        print(result.as_text(given))
        if checked:
            print(f"\n{checked}")
    if given.plot:
        _plot(parser, given, model, result.steps, machine.memory)
    return 0


def _machine(given: argparse.Namespace) -> Machine:
    """Return the machine that the options choose, with its memory budget."""
    rates, tier = _rates(given)
    kind = _device_kind(given)
    count = given.count or ("reserved" if kind == "cuda" else "tensors")
    # With count="tensors", the value of --budget does not include the memory that CUDA keeps.
    is_whole = count == "reserved" or given.budget is None
    memory = given.budget or _memory(given, rates)
    name = given.device or "H100"
    return Machine(name, rates, tier, kind, count, memory, is_whole, given.device is None)


def _progress_printer() -> Callable[[Recipe], None]:
    """Return a function that prints the progress of the search to stderr.

    The function must be called before each estimate. It prints at most one line per
    `SECONDS_BETWEEN_PROGRESS_LINES` seconds.
    """
    began = last = time.monotonic()
    count = 0

    def watch(recipe: Recipe) -> None:
        nonlocal last, count
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_PROGRESS_LINES:
            values = {"count": count, "seconds": f"{now - began:.0f}", "recipe": str(recipe)}
            progress = text("recipes estimated in {seconds} s: {count}; now: {recipe}", **values)
            print(say(progress), file=sys.stderr, flush=True)
            last = now
        count += 1

    return watch


def _rates(given: argparse.Namespace) -> tuple[Rates, str]:
    """Return the speeds of the device that --device names, and the tier for offloaded tensors.

    The default device is an H100. The tier is "host" for host memory, or "file".
    """
    if given.device == THIS_MACHINE:
        return this_machine(), given.tier or ("host" if torch.cuda.is_available() else "file")
    return RATES[given.device or "H100"], given.tier or (
        "file" if given.device == "laptop" else "host"
    )


def _memory(given: argparse.Namespace, rates: Rates) -> int:
    """Return the memory in bytes of the device that the option --device names.

    Raises:
        ValueError: The option --device is missing, or the device has no memory of its own.
    """
    if given.device is None or rates.memory_bytes is None:
        raise ValueError(
            "--budget is missing: pass a size such as 80GiB, or a device with known memory, such"
            " as --device H100"
        )
    return rates.memory_bytes


def _device_kind(given: argparse.Namespace) -> str:
    """Return the kind of the device, "cpu" or "cuda"."""
    on_cpu = given.device == "laptop" or (
        given.device == THIS_MACHINE and not torch.cuda.is_available()
    )
    return "cpu" if on_cpu else "cuda"


def _plot(
    parser, given: argparse.Namespace, model: Workload, steps: TechniqueSteps, budget: int
) -> None:
    """Draw a bar chart of the peak memory into the file that the option --plot names.

    The bars lead from the step without memory-saving techniques to the step of the cheapest recipe.
    """
    values = {"count": model.parameters(), "budget": bytes_text(budget)}
    words = {name: say(name) for name in (*CATEGORIES, "budget")} | {
        "optimizer": say(text("optimizer state"))
    }
    try:
        with course_font():
            ax = waterfall(
                steps,
                budget_bytes=budget,
                names=[say(name) for name, *_ in steps.rows()],
                labels=words,
            )
            ax.set_title(say(text("{count:,} parameters into {budget}", **values)))
            ax.figure.savefig(given.plot, dpi=120)
    except OSError as error:
        parser.error(f"--plot {given.plot!r} cannot be written ({error.strerror})")
    if not given.json:
        file = verbatim(given.plot)
        shown = text(
            "{file} shows the techniques that lead from the baseline to the best recipe", file=file
        )
        print(f"\n{say(shown)}")


def _split_names(text: str) -> list[str]:
    """Convert names that are separated by commas to a list."""
    return [name.strip() for name in text.split(",")]


def _figure_path(text: str) -> str:
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
