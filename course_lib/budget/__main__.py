"""What fits a budget, from the command line; `python -m course_lib.budget --help` says how."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from course_lib._check import InfeasibleBudget
from course_lib.memory import symbolic
from course_lib.memory.show import bytes_text
from course_lib.models import Decoder, random_tokens

from .estimating import RATES, TIERS, estimate
from .recipe import OPTIMIZERS, PRECISIONS, Recipe
from .search import fit
from .show import steps_to, waterfall

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
HEAD_DIM = 128


def bytes_from(text: str) -> int:
    """ "80GiB" -> 85899345920; 1 GB = 10**9 bytes, 1 GiB = 2**30."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    try:
        number = float(match[1])
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes; it takes one like 80GiB or 24GB") from None
    if match[2].upper() not in UNITS:
        raise argparse.ArgumentTypeError(
            f"{match[2]!r} in {text!r} is no unit; it takes one of B, kB, MB, GB, TB, KiB, MiB, GiB, TiB"
        )
    count = number * UNITS[match[2].upper()]
    if not 1 <= count < 1e18:
        raise argparse.ArgumentTypeError(f"{text!r} is no budget; it takes from 1 byte to 1e18 bytes")
    return int(count)


def shape_of(parameters: float, vocabulary: int) -> tuple[int, int]:
    """hidden and layers of a decoder with about so many parameters: v h, 12 h^2 a layer, a layer for each 128 of h."""

    def count(hidden: int, layers: int) -> int:
        return vocabulary * hidden + 12 * layers * hidden**2

    hidden = HEAD_DIM
    while count(hidden + HEAD_DIM, hidden // HEAD_DIM + 1) <= parameters:
        hidden += HEAD_DIM
    # The number of layers is whole, so the width next to this one may come nearer.
    shapes = [(h, max(1, round((parameters - vocabulary * h) / (12 * h**2)))) for h in (hidden, hidden + HEAD_DIM)]
    return min(shapes, key=lambda shape: abs(count(*shape) - parameters))


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m course_lib.budget",
        description="Which recipes train the course's decoder (course_lib.models.Decoder) within a byte budget, the "
        "cheapest first; nothing is taken or run. A size is --parameters, or --hidden and --layers.",
        epilog="Example: python -m course_lib.budget --parameters 7e9 --sequence 4096 --batch 8 --budget 80GiB "
        "(a tight budget like this one takes some minutes)",
    )
    parser.add_argument("--parameters", type=_number, help="about so many; sets hidden and layers if left out")
    parser.add_argument("--hidden", type=_count, help="width of the decoder")
    parser.add_argument("--layers", type=_count, help="decoder layers")
    parser.add_argument(
        "--heads", type=_count, help="a divisor of hidden; if left out, the one nearest to hidden / 128 from below"
    )
    parser.add_argument("--vocabulary", type=_count, default=32_000, help="different tokens (default %(default)s)")
    parser.add_argument("--sequence", type=_count, required=True, help="tokens of a sample")
    parser.add_argument("--batch", type=_count, required=True, help="samples of a step")
    parser.add_argument("--budget", type=bytes_from, required=True, help="80GiB (2**30 each), 24GB (10**9), or bytes")
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16", help="default %(default)s")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam")
    parser.add_argument("--machine", choices=RATES, default="H100", help="whose rates are used (default %(default)s)")
    parser.add_argument("--tier", choices=TIERS, help="below: default file for the laptop, else host (memory)")
    parser.add_argument(
        "--plot", type=_picture, metavar="FILE", help="draw the way to the best recipe (needs matplotlib)"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = arguments()
    given = parser.parse_args(argv)
    hidden, layers = given.hidden, given.layers
    if given.parameters is not None:
        wanted = shape_of(given.parameters, given.vocabulary)
        hidden, layers = hidden or wanted[0], layers or wanted[1]
    if not hidden or not layers:
        parser.error("the size is missing; it takes --parameters, or --hidden and --layers")
    most = max(1, hidden // HEAD_DIM)
    heads = given.heads or max(count for count in range(1, most + 1) if hidden % count == 0)

    def make_model() -> Decoder:
        sizes = {"vocabulary": given.vocabulary, "hidden": hidden, "layers": layers, "heads": heads}
        return Decoder(**sizes, sequence=given.sequence)

    def make_batch():
        return random_tokens(given.batch, given.sequence, given.vocabulary)

    rates, base = RATES[given.machine], Recipe(precision=given.precision, optimizer=given.optimizer)
    try:
        found = fit(make_model, make_batch, given.budget, base=base, rates=given.machine, tier=given.tier)
        best = found[0]
    except InfeasibleBudget as error:
        print(f"{error}", file=sys.stderr)
        return 1
    except (ValueError, RuntimeError) as error:  # also of a size that no tensor can have
        parser.error(str(error).splitlines()[0])
    with symbolic():
        count = sum(p.numel() for p in make_model().parameters())
    print(
        f"a decoder of {count / 1e6:,.1f} million parameters: hidden {hidden}, {layers} layers, {heads} heads, "
        f"vocabulary {given.vocabulary}; {given.batch} samples of {given.sequence} tokens\n"
        f"seconds at {given.machine}'s rates, the best possible ({rates.source})\n"
    )
    print(found)
    print(f"\nthe cheapest: {best.recipe!r}\nwhat is live at its peak, in {best.operator}:\n")
    print(best)
    if given.plot:
        steps = [estimate(make_model, make_batch, step, tier=best.tier) for step in steps_to(best.recipe)]
        ax = waterfall(steps, budget_bytes=given.budget)
        ax.set_title(f"{count / 1e6:,.1f} million parameters into {bytes_text(given.budget)}")
        try:
            ax.figure.savefig(given.plot, dpi=120)
        except OSError as error:
            parser.error(f"--plot {given.plot!r} cannot be written ({error.strerror})")
        print(f"\n{given.plot} shows the way from the plain step")
    return 0


def _picture(text: str) -> str:
    """A file that a figure can be written to; found out before a long search, not after it."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise argparse.ArgumentTypeError("a plot takes matplotlib, which is not installed") from None
    kinds, path = sorted(FigureCanvasBase.get_supported_filetypes()), Path(text)
    if path.suffix.removeprefix(".").lower() not in kinds:
        raise argparse.ArgumentTypeError(f"{text!r} is no kind of picture; it takes one of {', '.join(kinds)}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; it takes a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is in a folder that does not exist; it takes one that does")
    return text


def _count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 1 <= number <= 10**7:
        raise argparse.ArgumentTypeError(f"{text!r} is no count; it takes a whole number from 1 to 10,000,000")
    return number


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0
    if not 1e4 <= number < 1e15:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of parameters; it takes one like 7e9, from 1e4 on")
    return number


if __name__ == "__main__":
    sys.exit(main())
