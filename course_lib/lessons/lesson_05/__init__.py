"""Lesson 05: its exercises, its claims, one batch in pieces on a GPU, and two processes that reduce gradients.

`python -m course_lib.lessons.lesson_05` is one of those processes, which `ddp_bytes` starts.
"""

import gc
import json
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from course_lib.accumulation import AccumulatedStep, split
from course_lib.models import Decoder, random_tokens
from course_lib.teaching import Claim, Verdict, expect_number, text
from course_lib.teaching.exercises import exercise, right, wrong
from course_lib.teaching.experiments import TINY, Part, compared, decoder_and_tokens, experiment

#: What learners may have read.
CLAIMS = (
    Claim(
        "Divide each micro-batch's loss by their number.",
        "error of the gradient, 32 sequences in pieces of 4",
        "Right only if all have as many tokens. Add up sums, divide once.",
        outcome="partly",
    ),
    Claim(
        "The last, partial group can be ignored.",
        "samples whose gradients are never used",
        "They are lost; or, never zeroed, they join the next epoch's first step. Step on them too.",
        outcome="fails",
    ),
    Claim(
        "Accumulation saves memory in proportion.",
        "peaks for micro-batches of 32 and 1",
        "Activations do. Weights, gradients and optimizer state stay.",
        outcome="partly",
    ),
)

# Exercises ------------------------------------------------------------------------------------------------------------


@exercise(hint="Add up sums; divide by all weights once, at the end.")
def check_accumulation(function: Any) -> Verdict:
    """`accumulate(model, loss_sum, pieces)` leaves the full batch's gradient; one graph at a time."""
    weight = torch.linspace(-1, 1, 6, dtype=torch.float64)
    pieces = [torch.linspace(0, k + 1.0, 6 * k, dtype=torch.float64).view(k, 6) for k in (3, 1, 0, 4)]
    graphs: list[tuple[int, weakref.ref]] = []  # rows, and a storage that lives as long as their graph
    rows_alive = []

    def loss_sum(model, piece) -> tuple:
        output = model(piece)
        graphs.append((len(piece), weakref.ref(output.untyped_storage())))
        rows_alive.append(sum(rows for rows, storage in graphs if storage() is not None))
        return (output.sin() + 1).sum(), len(piece)

    def made() -> torch.nn.Module:
        model = torch.nn.Linear(6, 1, bias=False, dtype=torch.float64)
        with torch.no_grad():
            model.weight.copy_(weight)
        return model

    model = made()
    (loss_sum(model, torch.cat(pieces))[0] / 8).backward()
    expected, model = model.weight.grad, made()
    graphs.clear()
    rows_alive.clear()
    function(model, loss_sum, list(pieces))
    found, largest = model.weight.grad, max(map(len, pieces))
    if found is None:
        return wrong("There is no gradient in `.grad`.")
    error = float((found - expected).norm() / expected.norm())
    if not error < 1e-9:
        return wrong(text("The gradient is off by {error:.1f} %.", error=100 * error))
    if (most := max(rows_alive, default=0)) > largest:
        return wrong(
            text(
                "Right gradient, but graphs of {most} rows were alive together, and the largest piece has "
                "{largest}: this saves no memory.",
                most=most,
                largest=largest,
            ),
            hint="Forward and backward for one piece, and only then the next.",
        )
    return right("Right, a piece without tokens included.")


@exercise(hint="Two points make a line: what is its slope, and where does it begin?")
def check_largest_micro_batch(answer: Any) -> Verdict:
    """Lesson 05: the largest micro-batch under 1 GB, if 2 take 500 MB and 5 take 620 MB."""
    return expect_number(
        answer,
        14,
        wrong_answers={
            4: "That divides 1000 by 250: the floor does not grow.",
            8: "That divides 1000 by 124: the floor does not grow.",
            14.5: "Whole samples.",
            15: "15 take 1020 MB.",
            25: "You forgot the floor of 420 MB.",
        },
        why="420 MB of floor, 40 MB a sample: 14 take 980 MB.",
    )


@exercise(hint="Samples a millisecond: m / (5 + m).")
def check_fast_micro_batch(answer: Any) -> Verdict:
    """Lesson 05: the smallest power of two that reaches 80 % of the largest's samples a second, at 5 + m ms each."""
    return expect_number(
        answer,
        16,
        wrong_answers={
            8: "8 in 13 ms is 66 % of 64 in 69 ms.",
            32: "16 are enough.",
            64: "The largest reaches 100 %; a smaller one is enough.",
        },
        why="16 in 21 ms is 82 % of 64 in 69 ms.",
    )


# A GPU experiment -----------------------------------------------------------------------------------------------------


def _loss_sum(model: torch.nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, int]:
    targets = tokens[:, 1:].flatten()
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), targets, reduction="sum"), len(targets)


@experiment(
    title="A step over one batch, in pieces of 1, a quarter, and all of its samples",
    sizes={"vocabulary": 8192, "hidden": 1024, "heads": 16, "layers": 8, "sequence": 512, "batch": 16},
    small={**TINY, "batch": 4},
    arms={
        "one": "pieces of 1",
        "quarter": "a quarter each",
        "all": "all at once",
    },
)
def pieces_of_a_batch(device: torch.device, **sizes: int) -> Iterator[Part]:
    model, tokens = decoder_and_tokens(device, **sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    step = AccumulatedStep(
        model,
        optimizer,
        _loss_sum,
        scaler=torch.amp.GradScaler(device.type),
        max_norm=1.0,
        autocast_dtype=torch.float16 if device.type == "cuda" else torch.bfloat16,
    )
    pieces = {"one": 1, "quarter": len(tokens) // 4, "all": len(tokens)}
    arms = {name: lambda size=size: step(split(tokens, size)) for name, size in pieces.items()}
    yield from compared(device, arms, model=model, optimizer=optimizer)


# Two processes --------------------------------------------------------------------------------------------------------


def ddp_bytes(micro_batches: int = 8, processes: int = 2) -> tuple[int, dict[bool, int]]:
    """What one rank hands to all-reduce in a step over so many micro-batches of a small decoder, gloo on CPUs.

    Returns:
        The bytes of the parameters, and {no_sync used: bytes reduced}. With `no_sync` the step is `AccumulatedStep`'s.

    Raises:
        RuntimeError: a process failed; its last words are in the message.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "course_lib.lessons.lesson_05", folder, str(micro_batches), str(processes)]
        running = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for rank in range(processes)
        ]
        said = [process.communicate(timeout=300)[0] for process in running]
        for rank, process in enumerate(running):
            if process.returncode:
                raise RuntimeError(f"rank {rank} failed: {said[rank][-2000:]}")
        parameter_bytes, synchronised, once = json.loads((Path(folder) / "bytes.json").read_text())
    return parameter_bytes, {False: synchronised, True: once}


def _on_rank(folder: str, micro_batches: int, processes: int, rank: int) -> None:
    import torch.distributed as dist
    import torch.distributed.algorithms.ddp_comm_hooks.default_hooks as hooks
    import torch.distributed.nn.functional  # before there is a group: its functions' defaults would hold it for ever
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=processes)
    model, sent = DistributedDataParallel(Decoder(vocabulary=64, hidden=64, heads=2, layers=2, sequence=16)), []

    def counting(_, bucket):
        sent.append(bucket.buffer().nbytes)
        return hooks.allreduce_hook(None, bucket)

    model.register_comm_hook(None, counting)
    batch = random_tokens(micro_batches, 16, 64, seed=rank)

    for piece in batch.split(1):
        loss, weight = _loss_sum(model, piece)
        (loss / weight / micro_batches).backward()
    synchronised = sum(sent)
    sent.clear()
    AccumulatedStep(model, torch.optim.SGD(model.parameters(), lr=0.1), _loss_sum)(split(batch, 1))
    if rank == 0:
        figures = [sum(parameter.nbytes for parameter in model.parameters()), synchronised, sum(sent)]
        (Path(folder) / "bytes.json").write_text(json.dumps(figures))
    # Nothing may hold the group when it is destroyed: only then do gloo's threads end here. Left to the interpreter's
    # end, they now and then abort the process.
    del model
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _on_rank(sys.argv[1], *map(int, sys.argv[2:]))
