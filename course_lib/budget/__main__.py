"""Recipes that fit a budget, from the command line; `python -m course_lib.budget --help` says
how."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from course_lib._check import InfeasibleBudget
from course_lib._origin import is_refusal, message, unlogged
from course_lib.labels import say, text, verbatim
from course_lib.labels.command import Parser, said_error
from course_lib.labels.drawing import course_font
from course_lib.memory import CATEGORIES
from course_lib.memory.show import bytes_text
from course_lib.workload import Workload, workload_of

from .check import check
from .device import OnDevice, kept_bytes
from .estimate import TIERS, Estimate
from .rates import RATES, Rates, this_machine
from .recipe import Recipe
from .reservation import COUNTS
from .search import Estimates, fit
from .show import Way, waterfall
from .techniques.optimizer import OPTIMIZERS
from .techniques.precision import PRECISIONS
from .techniques.ranks import SHARDS

UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
THIS = "this"
HELP = """Find the recipes that train a model within a byte budget, the cheapest first. Nothing
is allocated or run, except with --check. The model comes from a Hugging Face
config.json, from a function, or is the course's decoder (course_lib.models.Decoder)
of the size that --parameters gives, or --hidden and --layers."""
EXAMPLE = """example:
  python -m course_lib.budget --config config.json --sequence 4096 --batch 8 --budget 80GiB

exit status:
  0   at least one recipe fits
  1   no recipe fits, or your own code raises an error
  2   an argument is refused"""


def bytes_from(text: str) -> int:
    """ "80GiB" -> 85899345920; 1 GB = 10**9 bytes, 1 GiB = 2**30."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    try:
        number = float(match[1])
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(
            f"must be a number of bytes such as 80GiB or 24GB, got {text!r}"
        ) from None
    if match[2].upper() not in UNITS:
        raise argparse.ArgumentTypeError(
            "the unit must be one of B, kB, MB, GB, TB, KiB, MiB, GiB, TiB, got"
            f" {match[2]!r} in {text!r}"
        )
    count = number * UNITS[match[2].upper()]
    if not 1 <= count < 1e18:
        raise argparse.ArgumentTypeError(f"must be between 1 byte and 1e18 bytes, got {text!r}")
    return int(count)


def arguments() -> argparse.ArgumentParser:
    parser = Parser(
        "python -m course_lib.budget",
        description=HELP,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="a config.json: gpt2, llama, mistral, mixtral, qwen2, qwen3; others by transformers",
    )
    parser.add_argument(
        "--model", metavar="PACKAGE:FUNCTION", help="a function that returns a model in fp32"
    )
    parser.add_argument(
        "--batch-from",
        metavar="PACKAGE:FUNCTION",
        help="returns a batch; else --model's .make_batch",
    )
    parser.add_argument(
        "--parameters", type=_number, help="about so many; sets hidden and layers if left out"
    )
    parser.add_argument("--hidden", type=_count, help="width of the decoder")
    parser.add_argument("--layers", type=_count, help="decoder layers")
    parser.add_argument(
        "--heads",
        type=_count,
        help="a divisor of hidden; if left out, the one nearest to hidden / 128 from below",
    )
    parser.add_argument(
        "--vocabulary", type=_count, help="different tokens of the decoder (default 32000)"
    )
    parser.add_argument("--sequence", type=_count, help="tokens of a sample; not with --model")
    parser.add_argument("--batch", type=_count, help="samples of a step; not with --model")
    parser.add_argument(
        "--budget",
        type=bytes_from,
        help="80GiB (2**30 each), 24GB (10**9), or bytes; else the device's memory",
    )
    parser.add_argument(
        "--precision", choices=PRECISIONS, default="bf16", help="default %(default)s"
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam")
    parser.add_argument(
        "--device",
        "--machine",
        choices=[*RATES, THIS],
        help=(
            "whose rates are used, and whose memory where no budget is given (default H100); this:"
            " measured here"
        ),
    )
    parser.add_argument(
        "--ranks", type=_count, help="devices that share the batch; each way to shard is tried"
    )
    parser.add_argument("--shard", choices=SHARDS, help="with --ranks, this one alone")
    parser.add_argument(
        "--tier", choices=TIERS, help="below: default file for a CPU, else host (memory)"
    )
    parser.add_argument(
        "--count",
        choices=COUNTS,
        default=COUNTS[0],
        help="what fits: tensors, or what a GPU's allocator reserves for them (default tensors)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="sooner; what is found may not be the cheapest"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, for other programs"
    )
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


@unlogged()
def main(argv: list[str] | None = None) -> int:
    parser = arguments()
    given = parser.parse_args(argv)
    told: dict = {}
    try:
        model = workload_of(given)
        rates, tier = _rates(given)
        device = given.device or "H100"
        kind = _kind(given)
        budget = given.budget or _budget(given, rates)
        told = {
            "model": model.name,
            "batch": model.batch,
            "device": device,
            "kind": kind,
            "budget_bytes": budget,
        }
        base = _base(given)
        options = {"loss_sum": model.loss_sum, "tier": tier, "kind": kind}
        options |= {"count": given.count, "quick": given.quick}
        options["progress"] = sys.stderr.isatty()
        found = fit(model.make_model, model.make_batch, budget, base=base, rates=rates, **options)
        way = found.way()
        checked = check(model, found[0].recipe) if given.check else None
        gpu = OnDevice.of(found[0], device, rates.memory_bytes) if kind == "cuda" else None
    except InfeasibleBudget as error:
        if given.json:
            print(
                json.dumps(
                    {**told, "recipes": [], "error": str(error), "least_bytes": error.least_bytes},
                    indent=1,
                )
            )
        else:
            print(say(_nothing_fits(error)), file=sys.stderr)
        return 1
    except Exception as error:
        sentence = say(text("error: {sentence}", sentence=said_error(message(error))))
        parser.exit(2 if is_refusal(error) else 1, f"{sentence}\n")
    if given.json:
        told |= {
            "parameters": model.parameters(),
            "rates": _plain(rates),
            "recipes": [_told(e, rates) for e in found],
        }
        told |= {"way": [_told(e, rates) for e in way], "check": checked and checked.as_dict()}
        told["on_device"] = gpu and asdict(gpu)
        print(json.dumps(told, indent=1, allow_nan=False))
    else:
        _print(given, model, rates, found, way, gpu)
        if checked:
            print(f"\n{checked}")
    if given.plot:
        _plot(parser, given, model, way, budget)
    return 0


def _nothing_fits(error: InfeasibleBudget) -> str:
    if error.least is None:
        return text(
            "nothing was found that fits into {budget}", budget=bytes_text(error.budget_bytes)
        )
    return text(
        "nothing was found that fits into {budget}; the least peak found is {least}: {recipe}",
        **{"budget": bytes_text(error.budget_bytes), "least": bytes_text(error.least_bytes)},
        **{"recipe": str(error.least.recipe)},
    )


def _base(given: argparse.Namespace) -> Recipe:
    ranks = given.ranks or 1
    if given.check and ranks > 1:
        raise ValueError(
            f"--check cannot be combined with --ranks {ranks}: it runs a single rank. To run"
            " several, use python -m course_lib.distributed"
        )
    more = {"ranks": ranks, "shard": given.shard} if ranks > 1 or given.shard else {}
    return Recipe(precision=given.precision, optimizer=given.optimizer, **more)


def _rates(given: argparse.Namespace) -> tuple[Rates, str]:
    """The rates, and what is below."""
    if given.device == THIS:
        return this_machine(), given.tier or ("host" if torch.cuda.is_available() else "file")
    return RATES[given.device or "H100"], given.tier or (
        "file" if given.device == "laptop" else "host"
    )


def _budget(given: argparse.Namespace, rates: Rates) -> int:
    """The memory of the device, if it was named and has one, without what others keep of it."""
    if given.device is None or rates.memory_bytes is None:
        raise ValueError(
            "--budget is missing: pass bytes such as 80GiB, or a --device that has memory"
            " of its own"
        )
    return rates.memory_bytes - kept_bytes(given.device)


def _kind(given: argparse.Namespace) -> str:
    """Kind of the device, as `estimate` takes it."""
    on_cpu = given.device == "laptop" or (given.device == THIS and not torch.cuda.is_available())
    return "cpu" if on_cpu else "cuda"


def _told(estimate: Estimate, rates: Rates) -> dict:
    values = {
        **asdict(estimate),
        "in_words": str(estimate.recipe),
        "seconds": rates.seconds(estimate),
    }
    return {**values, "recipe": estimate.recipe.changed(), "seconds_of": rates.parts(estimate)}


def _plain(rates: Rates) -> dict:
    """JSON has no infinity: None stands for what is left out."""
    return {name: None if value == math.inf else value for name, value in asdict(rates).items()}


def _print(
    given: argparse.Namespace,
    model: Workload,
    rates: Rates,
    found: Estimates,
    way: Way,
    gpu: OnDevice | None,
) -> None:
    best = found[0]
    device = verbatim(given.device or "H100")
    machine = {
        "device": text("this machine") if device == THIS else device,
        "source": rates.source,
    }
    shares = {"flops": rates.flops_share, "link": rates.link_share}
    parts = [
        text(
            "{model}: {count:,} parameters; {batch}",
            model=model.name,
            count=model.parameters(),
            batch=model.batch,
        ),
        found,
        text(
            "seconds at the rates of {device}, {flops:.0%} of the FLOPs and {link:.0%} of the link"
            " ({source})",
            **{**machine, **shares},
        ),
        text(
            "the cheapest: {recipe}; what is live at its peak, in {operator}:",
            recipe=verbatim(repr(best.recipe)),
            operator=verbatim(best.operator),
        ),
        best,
        text("the way there:"),
        way,
    ]
    if gpu:
        parts += [text("what one step of it holds on a GPU; the first line alone is exact:"), gpu]
    print("\n\n".join(say(part, "\n") if isinstance(part, str) else str(part) for part in parts))


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


def _picture(text: str) -> str:
    """A file that a figure can be written to; found out before a long search, not after it."""
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


def _count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 1 <= number <= 10**7:
        raise argparse.ArgumentTypeError(
            f"must be a whole number between 1 and 10,000,000, got {text!r}"
        )
    return number


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0
    if not 1e4 <= number < 1e15:
        raise argparse.ArgumentTypeError(
            f"must be a number of parameters such as 7e9, at least 1e4, got {text!r}"
        )
    return number


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
