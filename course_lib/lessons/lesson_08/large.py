"""Tables of lesson 08 that compare ways of splitting a model between ranks."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from course_lib.distributed import (
    CommunicationCounter,
    RankUsage,
    held_bytes,
    sent_bytes,
    shapes_of,
    task_of,
)
from course_lib.distributed.formulas import Shapes, ring_bytes
from course_lib.distributed.tensor_parallel import (
    predict_tensor,
    tensor_held_bytes,
    tensor_sent_bytes,
)
from course_lib.distributed.training.tasks import BATCH, DECODER, SEQUENCE, Task
from course_lib.memory import symbolic
from course_lib.models import Decoder
from course_lib.teaching import Table, table, text

MACHINES, GPUS = 8, 8  # machines, and GPUs in each of them


def seventy_billion() -> Shapes:
    """Return the shapes of lesson 01's decoder with 70 billion parameters; nothing is allocated."""
    sizes = {"vocabulary": 32000, "hidden": 8192, "heads": 64, "layers": 80, "sequence": 2048}
    with symbolic():
        return shapes_of(Decoder(**sizes, fused=True))


def compare_splits(shapes: Shapes, link: float) -> Table:
    """Show a table of held and sent bytes for three ways to split a model over 8 machines.

    Held bytes are per GPU, and sent bytes are between machines, both in fp32. The row of
    tensor parallelism counts every parameter as divided, although `parallelize` leaves some whole.
    These are less than 1% of this model.

    Args:
        link: Bytes per second of a network card, in each direction.
    """
    ranks = MACHINES * GPUS
    every, inside = (sum(held_bytes(shapes, "fsdp", n)[0].values()) for n in (ranks, GPUS))
    copies = 2 * sum(w.share(GPUS) * w.item_bytes for w in shapes.trained)
    # One ring passes through all GPUs, or each GPU of a machine has a ring to the other machines.
    ways = {
        "FSDP2 over 64 GPUs": (every, ring_bytes(sent_bytes(shapes, "fsdp", ranks), ranks)),
        "HSDP: FSDP2 over 8 GPUs, a copy per machine": (
            inside,
            GPUS * ring_bytes(copies, MACHINES),
        ),
        "tensor parallelism over 8 GPUs, FSDP2 over 8 machines": (
            every,
            GPUS * ring_bytes(sent_bytes(shapes, "fsdp", MACHINES) / GPUS, MACHINES),
        ),
    }
    rows = [
        (way, *(f"{count:.1f}" for count in (held / 1e9, out / 1e9, out / link, out / GPUS / link)))
        for way, (held, out) in ways.items()
    ]
    columns = [
        "held per GPU (GB)",
        "out of each machine (GB)",
        "one card per machine (s)",
        "one card per GPU (s)",
    ]
    return table(["64 GPUs in 8 machines", *columns], rows)


def tensor_rows(
    task: Task, runs: Sequence[Mapping[str, Any]]
) -> list[tuple[str, float | None, float]]:
    """Return rows (label, predicted, measured) of the costs of tensor parallelism on one rank.

    Args:
        runs: Results printed by `course_lib.distributed.tensor_parallel`.
    """
    shapes, rows = shapes_of(task.make_model()), []
    activation = 4 * BATCH * SEQUENCE * DECODER["hidden"]
    for run in runs:
        mode, ranks, usage = run["mode"], run["ranks"], run["taken"][0]
        expected = predict_tensor(
            task.make_model, partial(task.make_batch, 0), task.loss_sum, mode, ranks
        )
        counts = {
            "{mode}: held": (
                sum(tensor_held_bytes(shapes, ranks).values()),
                sum(usage["held"].values()),
            ),
            "{mode}: communicated": (
                tensor_sent_bytes(shapes, mode, activation),
                usage["sent_bytes"],
            ),
            "{mode}: peak": (expected.peak_bytes, usage["peak_bytes"]),
        }
        rows += [(text(name, mode=f"`{mode}`"), *pair) for name, pair in counts.items()]
    return rows


def kept_per_layer(mode: str, ranks: int) -> int:
    """Return the bytes of activations that one layer keeps for backward on one of several ranks.

    The result is the difference between a decoder of two layers and a decoder of one layer,
    estimated on symbolic tensors.
    """
    task, sizes = task_of(), {**DECODER, "sequence": SEQUENCE}
    one, two = (
        predict_tensor(
            partial(Decoder, **{**sizes, "layers": layers}),
            partial(task.make_batch, 0),
            task.loss_sum,
            mode,
            ranks,
        ).at_peak["activation"]
        for layers in (1, 2)
    )
    return two - one


def sync_table(taken: Mapping[str, RankUsage]) -> Table:
    """Show a table of communicated bytes and peak for ways to reduce micro-batches' gradients."""
    rows = []
    for way, usage in taken.items():
        counts = usage.sent_bytes, usage.at_peak["gradient"], usage.peak_bytes
        rows.append((way, *(round(count / 1e6, 1) for count in counts)))
    columns = ["communicated (MB)", "gradients at the peak (MB)", "peak (MB)"]
    return table(["gradients are reduced", *columns], rows)


def own_and_given(model: nn.Module) -> tuple[float, float]:
    """Return the MB of weights of this rank, one of four, and the MB that a step communicates."""
    task = task_of()
    with CommunicationCounter() as given:
        loss, tokens = task.loss_sum(model, task.part(0, 4, 0))
        (loss / tokens).backward()
    own = sum(weight.to_local().nbytes for weight in model.parameters())
    return round(own / 1e6, 1), round(given.bytes / 1e6, 1)
