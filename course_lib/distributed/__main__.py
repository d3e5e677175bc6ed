"""Train on several ranks with torchrun, or predict what each rank would need; see `--help`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.errors import get_error_handler, record

from course_lib._batches import parts_of
from course_lib._check import any_of, positive, whole
from course_lib._origin import (
    explain_symbolic_errors,
    is_rejection,
    message,
    origin,
    silence_operator_log,
)
from course_lib.distributed.formulas import MODES, REPLICATED, SYNCS, Shapes, held_bytes, shapes_of
from course_lib.distributed.prediction import predict
from course_lib.distributed.training.loop import checkpoint_to_resume, train
from course_lib.distributed.training.tasks import Task, check_divides, task_of
from course_lib.distributed.training.torchrun import end_on_signals, process_group
from course_lib.labels import say, text, verbatim
from course_lib.labels.command import Parser, translated_error
from course_lib.memory import MemoryBudgetExceeded
from course_lib.options import add_shared, byte_count, whole_number
from course_lib.symbolic import symbolic

# A warning is printed if more than this fraction of the parameters is outside all blocks.
LARGE_ROOT_SHARE = 0.2
RANK = int(os.environ.get("RANK", 0))
HELP = """Train a model on several ranks, and print the predicted and measured bytes that
each rank held and communicated. The model is the course's decoder, one that a
config.json describes, or one that a function returns."""
MODES_HELP = """modes:
  ddp              every rank holds all weights, gradients and optimizer state
  zero1            like ddp, but Adam's state is sharded
  fsdp             FSDP2: weights, gradients and state are sharded (ZeRO 3)
  fsdp-keep        like fsdp, but gathered weights are kept until backward
  fsdp-checkpoint  like fsdp, but each block's activations are recomputed
  fsdp-bf16        like fsdp, but weights are gathered and used in bf16
  fsdp-cpu         like fsdp, but shards are in host memory; needs GPUs"""


def arguments() -> argparse.ArgumentParser:
    """Return the parser for the options of `python -m course_lib.distributed`."""
    parser = Parser(
        "python -m torch.distributed.run --standalone --nproc-per-node 2 -m course_lib.distributed",
        description=HELP,
        epilog=MODES_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.error = _exit_with_error
    parser.add_argument(
        "--mode",
        default="ddp",
        help="one or several of the modes below, separated by commas; default %(default)s",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=10,
        help="number of training steps per mode; bytes are measured in the third step; default 10",
    )
    options: dict[str, dict[str, Any]] = {"--config": {}, "--model": {}}
    options["--batch"] = {
        "type": whole_number,
        "help": (
            "number of samples per step, on all ranks together; cannot be combined with --model;"
            " default 8"
        ),
    }
    options["--sequence"] = {
        "type": whole_number,
        "help": "number of tokens per sample; cannot be combined with --model; default 128",
    }
    add_shared(parser, options)
    parser.add_argument(
        "--unequal",
        action="store_true",
        help=("use samples of unequal lengths, so that the ranks have unequal numbers of tokens"),
    )
    parser.add_argument(
        "--micro-batches",
        type=int,
        default=1,
        help="number of micro-batches into which each rank splits its batch; default %(default)s",
    )
    parser.add_argument(
        "--sync",
        choices=SYNCS,
        default="last",
        help="micro-batches after which the ranks reduce their gradients; default last",
    )
    parser.add_argument(
        "--in-buckets",
        action="store_true",
        help="accumulate gradients in DDP's buckets; only for the modes ddp and zero1",
    )
    parser.add_argument(
        "--bf16",
        action="store_true",
        help=(
            "use the precision of fsdp-bf16 also in the other fsdp modes; cannot be"
            " combined with ddp and zero1"
        ),
    )
    parser.add_argument(
        "--max-norm",
        type=float,
        metavar="NORM",
        help="clip the gradients if their norm over all ranks is larger than NORM",
    )
    parser.add_argument(
        "--blocks",
        metavar="NAMES",
        help=(
            "names of the modules that FSDP2 shards and gathers one by one, and that"
            " fsdp-checkpoint also checkpoints, separated by commas; * matches the text"
            " between two dots, as in 'tower.*,decoder.layers.*'; default: the longest list"
            " of modules of one type"
        ),
    )
    parser.add_argument(
        "--budget",
        metavar="BYTES",
        help=(
            "largest number of bytes that a rank may hold, such as 48MB; if several modes run,"
            " fsdp=48MB sets it for one of them"
        ),
    )
    parser.add_argument(
        "--save",
        metavar="DIR",
        help="write the model and the optimizer state to DIR/MODE after the last step",
    )
    parser.add_argument(
        "--every", type=int, metavar="N", help="with --save: also write after every N steps"
    )
    parser.add_argument(
        "--resume",
        metavar="DIR",
        help="continue from the last complete checkpoint that --save wrote to DIR",
    )
    parser.add_argument(
        "--backend",
        choices=("gloo", "nccl"),
        help="communication backend; default: nccl if each rank has a GPU, else gloo",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="predict the bytes for N ranks, without torchrun and without starting processes",
    )
    add_shared(parser, {"--json": {"help": "print one line of JSON for each mode"}})
    parser.add_argument(
        "--details",
        action="store_true",
        help="with --json: also print the bytes of each category at the peak of each rank",
    )
    return parser


@record  # `record` reports an error of this rank to torchrun, which ends the other ranks
@silence_operator_log()
def main() -> None:
    """Run the command: train on the ranks that torchrun has started, or predict with `--ranks`.

    An error that the user can correct is printed without a traceback, and the process ends.
    """
    end_on_signals()
    args = arguments().parse_args()
    try:
        modes = _parse_modes(args.mode)
        for name in ("steps", "micro_batches", "every", "ranks"):
            if getattr(args, name) is not None:
                whole(f"--{name.replace('_', '-')}", getattr(args, name), 1)
        _check_combinations(args)
        sizes = {name: getattr(args, name) for name in ("batch", "sequence", "unequal")}
        task = task_of(args.config, args.model, **sizes)
        options = _trainer_options(args)
        budgets = _parse_budgets(args.budget, modes)
        with symbolic():
            shapes = shapes_of(task.make_model(), options["blocks"])
        if args.ranks is not None:
            with explain_symbolic_errors():
                _predict(args, task, modes, shapes, options)
            return
        if "WORLD_SIZE" in os.environ:
            _check_sizes(task, int(os.environ["WORLD_SIZE"]), args.micro_batches)
        checkpoints = {
            mode: checkpoint_to_resume(args.resume, mode, task) if args.resume else None
            for mode in modes
        }
        group = process_group(args.backend)
        device = group.__enter__()
        if "fsdp-cpu" in modes and device.type == "cpu":
            raise ValueError(
                "--mode fsdp-cpu needs NCCL and a GPU for each rank, because it moves weights from"
                " GPU memory to host memory, got ranks on a CPU; choose another mode"
            )
    except Exception as error:
        if origin(error) is None and not isinstance(error, (TypeError, ValueError)):
            raise
        _exit_with_error(message(error), 2 if is_rejection(error) else 1)
    if RANK == 0:
        _warn_about_root(shapes, modes)
    for mode in modes:
        options |= {"save_to": args.save and Path(args.save) / mode, "every": args.every}
        options |= {"resume": checkpoints[mode], "budget_bytes": budgets.get(mode)}
        with _report_cause_first():
            run = train(task, mode, args.steps, device=device, say=_print_status, **options)
        if RANK == 0:
            print(json.dumps(run.as_dict(args.details)) if args.json else run, flush=True)
    group.__exit__(None, None, None)


@contextmanager
def _report_cause_first() -> Iterator[None]:
    """If a `with` block fails, let the rank that caused the failure report its error first.

    A rank that has only lost the connection to another rank waits for up to 20 seconds before it
    raises its error. In this time torchrun ends it because of the other rank's error. An error from
    the user's own code, or an exceeded budget, is printed without a traceback, here and in
    torchrun's report. Any other error keeps its traceback.
    """
    try:
        yield
    except Exception as error:
        # gloo raises a RuntimeError for a closed or reset connection, or a broken pipe.
        if isinstance(error, DistError) or "gloo/transport" in str(error):
            time.sleep(20)
        elif origin(error) is not None or isinstance(error, MemoryBudgetExceeded):
            reason = str(error) if isinstance(error, MemoryBudgetExceeded) else message(error)
            reason = translated_error(reason)
            _print_status(text("rank {rank}: error: {sentence}", rank=RANK, sentence=reason))
            error.add_note(reason)
            get_error_handler().record_exception(error.with_traceback(None))
            sys.exit(1)
        raise


def _parse_modes(text: str) -> list[str]:
    """Return the modes in the value of `--mode`; raise a ValueError for an unknown one."""
    modes = text.split(",")
    for mode in modes:
        if mode not in MODES:
            raise ValueError(f"--mode must be one or several of {', '.join(MODES)}, got {mode!r}")
    return modes


def _parse_budgets(budget_text: str | None, modes: list[str]) -> dict[str, int]:
    """Return the budget in bytes of each mode, from the value of `--budget`.

    "48MB" is the budget of all modes, and "fsdp=48MB" that of one mode.
    """
    budgets: dict[str, int] = {}
    for part in budget_text.split(",") if budget_text else ():
        mode, _, count = part.rpartition("=")
        try:
            budget = byte_count(count)
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"--budget {error}") from None
        if mode and mode not in modes:
            raise ValueError(
                f"--budget must be a number of bytes such as 48MB, or MODE=BYTES such as"
                f" {modes[-1]}=48MB with one of the modes {','.join(modes)}, got {budget_text!r}"
            )
        budgets |= dict.fromkeys([mode] if mode else modes, budget)
    return budgets


def _check_sizes(task: Task, ranks: int, micro_batches: int) -> None:
    """Raise an error if the batch cannot be split among the ranks and into micro-batches."""
    if task.split is None and task.samples is not None:
        check_divides(task.samples, ranks)
        each = task.samples // ranks
        if each % micro_batches:
            raise ValueError(
                f"--micro-batches must be a divisor of a rank's {each} samples, got {micro_batches}"
            )
    with symbolic():
        for part in task.parts(0, ranks):
            parts_of(part, micro_batches, task.split)


def _check_combinations(args: argparse.Namespace) -> None:
    """Raise a ValueError for options that cannot be combined."""
    if args.every and not args.save:
        raise ValueError("--every needs --save: pass the folder that checkpoints are written to")
    for name in ("save", "resume", "budget"):
        if args.ranks is not None and getattr(args, name):
            raise ValueError(
                f"--ranks cannot be combined with --{name}: with --ranks, the command only predicts"
                " one step, without starting processes"
            )
    sharded = [mode for mode in _parse_modes(args.mode) if mode not in REPLICATED]
    replicated = [mode for mode in _parse_modes(args.mode) if mode in REPLICATED]
    if args.bf16 and replicated:
        raise ValueError(
            f"--bf16 cannot be combined with --mode {replicated[0]}, only with modes that shard"
            " weights"
        )
    if args.in_buckets and sharded:
        raise ValueError(
            f"--in-buckets cannot be combined with --mode {sharded[0]}, only with"
            f" {any_of(REPLICATED)}"
        )


def _trainer_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the command's options that are arguments of `Trainer`."""
    names = ("micro_batches", "sync", "bf16", "in_buckets", "max_norm")
    if args.max_norm is not None:
        positive("--max-norm", args.max_norm)
    return {name: getattr(args, name) for name in names} | {
        "blocks": args.blocks and args.blocks.split(",")
    }


def _warn_about_root(shapes: Shapes, modes: list[str]) -> None:
    """Print a warning if a large part of a sharded model is outside all blocks."""
    share = sum(weight.numbers for weight in shapes.root) / shapes.numbers
    if share > LARGE_ROOT_SHARE and not set(modes) <= set(REPLICATED):
        largest = max(shapes.root, key=lambda weight: weight.numbers).name
        warning = text(
            "{share} of the parameters are outside all blocks (the largest is {name}). They are"
            " gathered at once and kept until their backward pass. Use `--blocks` to name the"
            " modules that are sharded one by one",
            share=f"{share:.0%}",
            name=verbatim(largest),
        )
        _print_status(warning)


def _predict(
    args: argparse.Namespace,
    task: Task,
    modes: list[str],
    shapes: Shapes,
    options: dict[str, Any],
) -> None:
    """Predict a step of each mode for `--ranks` ranks, and print the results."""
    _check_sizes(task, args.ranks, args.micro_batches)
    if "fsdp-cpu" in modes:
        raise ValueError(
            "--ranks cannot be combined with --mode fsdp-cpu: --ranks predicts with"
            " symbolic tensors, which cannot be offloaded to pinned memory"
        )
    _warn_about_root(shapes, modes)
    for mode in modes:
        start = time.perf_counter()
        held = [sum(each.values()) for each in held_bytes(shapes, mode, args.ranks)]
        rank = held.index(max(held))  # the rank with the most bytes, which is 0 except in zero1
        part = partial(task.part, 0, args.ranks, rank)
        options |= {"rank": rank, "split": task.split}
        usage = predict(task.make_model, part, task.loss_sum, mode, args.ranks, **options)
        line = {"mode": mode, "ranks": args.ranks, "predicted": usage.held}
        line |= {"peak_bytes": usage.peak_bytes, "at_peak": usage.at_peak, "flops": usage.flops}
        line["communicated"] = {"predicted": usage.sent_bytes}
        if args.json:
            print(json.dumps({**line, "seconds": time.perf_counter() - start}), flush=True)
            continue
        rows = [*usage.held.items(), ("communicated", usage.sent_bytes), ("peak", usage.peak_bytes)]
        rows += [(f"  {name}", count) for name, count in usage.at_peak.items() if count]
        print(f"{mode} on {args.ranks} ranks, predicted: bytes of the rank that holds most")
        print("\n".join(f"  {name:<18}{count:>26,}" for name, count in rows), flush=True)


def _print_status(line: str) -> None:
    print(say(line), file=sys.stderr, flush=True)


def _exit_with_error(message: str, status: int = 2) -> NoReturn:
    """Print an error once, on rank 0, and exit.

    The other ranks wait. Torchrun ends them after rank 0 has exited.
    """
    if RANK:
        time.sleep(60)
    print(
        say(text("error: {sentence}", sentence=translated_error(message))),
        file=sys.stderr,
        flush=True,
    )
    os._exit(status)


if __name__ == "__main__":
    main()
