"""Train on several ranks, by torchrun; or predict what each would take, without. `--help` says
how."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.errors import get_error_handler, record

from course_lib._check import any_of, positive, whole
from course_lib._origin import explained, is_refusal, message, origin, unlogged
from course_lib.distributed.formulas import MODES, REPLICATED, SYNCS, Shapes, held_bytes, shapes_of
from course_lib.distributed.prediction import predict
from course_lib.distributed.tasks import Task, check_divides, task_of
from course_lib.distributed.torchrun import process_group, resumed, train
from course_lib.labels import say, text, verbatim
from course_lib.labels.command import Parser, said_error
from course_lib.memory import MemoryBudgetExceeded, symbolic
from course_lib.options import add_shared, byte_count, whole_number

MUCH = 0.2  # of the parameters, in no block
RANK = int(os.environ.get("RANK", 0))
HELP = """Train a model on several ranks: the course's decoder, that of a config.json, or
a function's. Prints what each rank held, predicted and measured, and what it
communicated."""
MODES_HELP = """modes:
  ddp              every rank holds all
  zero1            ddp, Adam's state cut
  fsdp             FSDP2: weights, gradients and state cut (ZeRO 3)
  fsdp-keep        fsdp, gathered weights kept from forward to backward
  fsdp-checkpoint  fsdp, activations of each block computed again
  fsdp-bf16        fsdp, gathered and computed in bf16
  fsdp-cpu         fsdp, shards in host memory; takes GPUs"""


def arguments() -> argparse.ArgumentParser:
    parser = Parser(
        "python -m torch.distributed.run --standalone --nproc-per-node 2 -m course_lib.distributed",
        description=HELP,
        epilog=MODES_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.error = _refuse
    parser.add_argument(
        "--mode", default="ddp", help="one, or several with commas between; default %(default)s"
    )
    parser.add_argument(
        "--steps", type=int, default=10, help="of each mode; bytes are the third's; default 10"
    )
    options: dict[str, dict[str, Any]] = {"--config": {}, "--model": {}}
    options["--batch"] = {
        "type": whole_number,
        "help": "samples of a step, on all ranks together; not with --model; default 8",
    }
    options["--sequence"] = {
        "type": whole_number,
        "help": "tokens of a sample; not with --model; default 128",
    }
    add_shared(parser, options)
    parser.add_argument(
        "--unequal",
        action="store_true",
        help="samples, and so ranks, with unequal numbers of tokens",
    )
    parser.add_argument(
        "--micro-batches", type=int, default=1, help="pieces of a rank's batch; default %(default)s"
    )
    parser.add_argument(
        "--sync",
        choices=SYNCS,
        default="last",
        help="with which gradients are reduced; default last",
    )
    parser.add_argument(
        "--in-buckets",
        action="store_true",
        help="ddp and zero1 add micro-batches up in DDP's buckets",
    )
    parser.add_argument(
        "--max-norm", type=float, metavar="NORM", help="clip the gradient of all ranks to it"
    )
    parser.add_argument(
        "--blocks",
        metavar="NAMES",
        help=(
            "what fsdp cuts, gathers and checkpoints one by one, with commas between and * for a"
            " part between dots: 'tower.*,decoder.layers.*'; default the longest list of like"
            " modules"
        ),
    )
    parser.add_argument(
        "--budget",
        metavar="BYTES",
        help="stop a rank that would hold more, such as 48MB; fsdp=48MB for one mode of several",
    )
    parser.add_argument(
        "--wrapper", action="store_true", help="fsdp-checkpoint by PyTorch's checkpoint_wrapper"
    )
    parser.add_argument(
        "--save", metavar="DIR", help="write the model and its state at the end, in DIR/MODE"
    )
    parser.add_argument(
        "--every", type=int, metavar="N", help="with --save: and after each N steps"
    )
    parser.add_argument(
        "--resume", metavar="DIR", help="go on from what --save DIR wrote last, complete"
    )
    parser.add_argument(
        "--backend",
        choices=("gloo", "nccl"),
        help="default nccl with a GPU for each rank, else gloo",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="predict for N ranks, without torchrun, and start none",
    )
    add_shared(parser, {"--json": {"help": "print one line of JSON for each mode"}})
    parser.add_argument(
        "--details", action="store_true", help="with --json: what was live at each rank's peak, too"
    )
    return parser


@record  # a traceback goes to torchrun, which ends the other ranks
@unlogged()
def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun's own, where it has forked this rank
    given = arguments().parse_args()
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    try:
        modes = _modes(given.mode)
        for name in ("steps", "micro_batches", "every", "ranks"):
            if getattr(given, name) is not None:
                whole(f"--{name.replace('_', '-')}", getattr(given, name), 1)
        _check_together(given)
        task = task_of(
            given.config,
            given.model,
            batch=given.batch,
            sequence=given.sequence,
            unequal=given.unequal,
        )
        options = _options(given)
        budgets = _budgets(given.budget, modes)
        with symbolic():
            shapes = shapes_of(task.make_model(), options["blocks"])
        if given.ranks is not None:
            with explained():
                _predict(given, task, modes, shapes, options)
            return
        if "WORLD_SIZE" in os.environ:
            _check_sizes(task, int(os.environ["WORLD_SIZE"]), given.micro_batches)
        checkpoints = {
            mode: resumed(given.resume, mode, task) if given.resume else None for mode in modes
        }
        group = process_group(given.backend)
        device = group.__enter__()
        if "fsdp-cpu" in modes and device.type == "cpu":
            raise ValueError(
                "--mode must not be fsdp-cpu without NCCL and a GPU per rank, got 'fsdp-cpu'"
                " on a CPU, which has nothing to offload from"
            )
    except Exception as error:
        if origin(error) is None and not isinstance(error, (TypeError, ValueError)):
            raise
        _refuse(message(error), 2 if is_refusal(error) else 1)
    if RANK == 0:
        _say_root(shapes, modes)
    for mode in modes:
        options |= {
            "save_to": given.save and Path(given.save) / mode,
            "every": given.every,
            "device": device,
        }
        with _after_the_culprit():
            bounds = {"resume": checkpoints[mode], "budget_bytes": budgets.get(mode)}
            run = train(task, mode, given.steps, say=_tell, **bounds, **options)
        if RANK == 0:
            print(json.dumps(run.as_dict(given.details)) if given.json else run, flush=True)
    group.__exit__(None, None, None)


@contextmanager
def _after_the_culprit() -> Iterator[None]:
    """A rank that has lost another waits: torchrun ends it when the other has failed, whose error
    is the cause.

    What the user's own code raises is said in two lines, here and in torchrun's report, and so is a
    budget that was passed; all else has its traceback.
    """
    try:
        yield
    except Exception as error:
        # closed, reset, a broken pipe, ...
        if isinstance(error, DistError) or "gloo/transport" in str(error):
            time.sleep(20)
        elif origin(error) is not None or isinstance(error, MemoryBudgetExceeded):
            told = str(error) if isinstance(error, MemoryBudgetExceeded) else message(error)
            print(f"rank {RANK}: error: {told}", file=sys.stderr, flush=True)
            error.add_note(told)
            get_error_handler().record_exception(error.with_traceback(None))
            sys.exit(1)
        raise


def _modes(text: str) -> list[str]:
    modes = text.split(",")
    for mode in modes:
        if mode not in MODES:
            raise ValueError(f"--mode must be one or several of {', '.join(MODES)}, got {mode!r}")
    return modes


def _budgets(given: str | None, modes: list[str]) -> dict[str, int]:
    """Mode -> bytes, of '48MB' for all modes, or of 'fsdp=48MB' for that one."""
    budgets: dict[str, int] = {}
    for part in given.split(",") if given else ():
        mode, _, count = part.rpartition("=")
        try:
            budget = byte_count(count)
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"--budget {error}") from None
        if mode and mode not in modes:
            allowed = f"bytes such as 48MB, or {modes[-1]}=48MB with one of --mode"
            raise ValueError(f"--budget must be {allowed} {','.join(modes)}, got {given!r}")
        budgets |= dict.fromkeys([mode] if mode else modes, budget)
    return budgets


def _check_sizes(task: Task, ranks: int, micro_batches: int) -> None:
    check_divides(task.samples, ranks)
    each = task.samples // ranks
    if each % micro_batches:
        raise ValueError(
            f"--micro-batches must be a divisor of a rank's {each} samples, got {micro_batches}"
        )


def _check_together(given: argparse.Namespace) -> None:
    if given.every and not given.save:
        raise ValueError("--every needs --save: pass the folder that checkpoints are written to")
    for name in ("save", "resume", "budget"):
        if given.ranks is not None and getattr(given, name):
            raise ValueError(
                f"--ranks cannot be combined with --{name}: it predicts one step and starts no"
                " processes"
            )
    sharded = [mode for mode in _modes(given.mode) if mode not in REPLICATED]
    if given.in_buckets and sharded:
        raise ValueError(
            f"--in-buckets cannot be combined with --mode {sharded[0]}, only with"
            f" {any_of(REPLICATED)}"
        )


def _options(given: argparse.Namespace) -> dict[str, Any]:
    """Options of the `Trainer`."""
    names = ("micro_batches", "sync", "wrapper", "in_buckets", "max_norm")
    if given.max_norm is not None:
        positive("--max-norm", given.max_norm)
    return {name: getattr(given, name) for name in names} | {
        "blocks": given.blocks and given.blocks.split(",")
    }


def _say_root(shapes: Shapes, modes: list[str]) -> None:
    """Warn, on stderr, where much of a sharded model is never cut into blocks."""
    whole = sum(weight.numbers for weight in shapes.root) / shapes.numbers
    if whole > MUCH and not set(modes) <= set(REPLICATED):
        largest = max(shapes.root, key=lambda weight: weight.numbers).name
        told = text(
            "{share} of the parameters are in no block, the largest {name}: all of them are"
            " gathered at once, and kept until their backward pass; `--blocks` names what is cut"
            " one by one",
            share=f"{whole:.0%}",
            name=verbatim(largest),
        )
        _tell(told)


def _predict(
    given: argparse.Namespace, task: Task, modes: list[str], shapes: Shapes, options: dict[str, Any]
) -> None:
    _check_sizes(task, given.ranks, given.micro_batches)
    if "fsdp-cpu" in modes:
        raise ValueError(
            "--ranks cannot be combined with --mode fsdp-cpu: symbolic tensors have no"
            " pinned memory to offload to"
        )
    _say_root(shapes, modes)
    for mode in modes:
        began = time.perf_counter()
        held = [sum(each.values()) for each in held_bytes(shapes, mode, given.ranks)]
        rank = held.index(max(held))  # the first, but for zero1
        part = partial(task.part, 0, given.ranks, rank)
        taken = predict(
            task.make_model, part, task.loss_sum, mode, given.ranks, rank=rank, **options
        )
        told = {
            "mode": mode,
            "ranks": given.ranks,
            "predicted": taken.held,
            "peak_bytes": taken.peak_bytes,
        }
        told |= {
            "at_peak": taken.at_peak,
            "flops": taken.flops,
            "communicated": {"predicted": taken.sent_bytes},
        }
        if given.json:
            print(json.dumps({**told, "seconds": time.perf_counter() - began}), flush=True)
            continue
        rows = [*taken.held.items(), ("communicated", taken.sent_bytes), ("peak", taken.peak_bytes)]
        rows += [(f"  {name}", count) for name, count in taken.at_peak.items() if count]
        print(f"{mode} on {given.ranks} ranks, predicted: bytes of the rank that holds most")
        print("\n".join(f"  {name:<18}{count:>26,}" for name, count in rows), flush=True)


def _tell(line: str) -> None:
    print(say(line), file=sys.stderr, flush=True)


def _refuse(message: str, status: int = 2) -> NoReturn:
    """Say it once, on rank 0; the others wait until torchrun ends them, which it does when the
    first has ended."""
    if RANK:
        time.sleep(60)
    print(say(text("error: {sentence}", sentence=said_error(message))), file=sys.stderr, flush=True)
    os._exit(status)


def end_with(parent: int) -> None:
    """A rank whose torchrun was killed ends too."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        os._exit(130)  # torchrun says it
