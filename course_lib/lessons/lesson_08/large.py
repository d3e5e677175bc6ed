"""Tables and a figure of lesson 08 that compare ways of splitting a model between ranks."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from course_lib.budget.rates import Rates
from course_lib.distributed import (
    RankUsage,
    held_bytes,
    sent_bytes,
    shapes_of,
    task_of,
)
from course_lib.distributed.formulas import Shapes, ring_bytes
from course_lib.distributed.tensor_parallel import (
    predict_tensor_parallel,
    tensor_held_bytes,
    tensor_sent_bytes,
)
from course_lib.distributed.training.tasks import BATCH, DECODER, SEQUENCE, Task
from course_lib.labels import join_labels
from course_lib.memory import symbolic
from course_lib.models import Decoder
from course_lib.teaching import Table, figure, table, text
from course_lib.teaching.figures import shown_once
from course_lib.teaching.marks import label_axes, note, points

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MACHINES, GPUS = 8, 8  # machines, and GPUs in each of them


def seventy_billion() -> Shapes:
    """Return the shapes of the parameters of a decoder with 70 billion parameters.

    The decoder is built on symbolic tensors, so no memory is allocated.
    """
    sizes = {"vocabulary": 32000, "hidden": 8192, "heads": 64, "layers": 80, "sequence": 2048}
    with symbolic():
        return shapes_of(Decoder(**sizes, fused=True))


def compare_splits(shapes: Shapes, link: float) -> Table:
    """Return a table of three ways to split the training of a model over 64 GPUs in 8 machines.

    All three ways use FSDP2. Each row has the bytes of training state per GPU, the bytes that leave
    a machine per step, and the time that sending them takes. The sent bytes are those of FSDP2 in
    bf16. The row of tensor parallelism is slightly too low: it assumes that all parameters are
    divided, although less than 1% of this model's parameters are not.

    Args:
        shapes: Shapes of the model's parameters.
        link: Bytes per second of a network card, in each direction.
    """
    ranks = MACHINES * GPUS
    every, inside = (sum(held_bytes(shapes, "fsdp", n)[0].values()) for n in (ranks, GPUS))
    copies = 2 * sum(w.share(GPUS) * w.item_bytes for w in shapes.trained)
    # One ring passes through all GPUs, or each GPU of a machine has a ring to the other machines.
    ways = {
        "FSDP2 over 64 GPUs": (every, ring_bytes(sent_bytes(shapes, "fsdp-bf16", ranks), ranks)),
        "HSDP: FSDP2 over 8 GPUs, a copy per machine": (
            inside,
            GPUS * ring_bytes(copies, MACHINES),
        ),
        "tensor parallelism over 8 GPUs, FSDP2 over 8 machines": (
            every,
            GPUS * ring_bytes(sent_bytes(shapes, "fsdp-bf16", MACHINES) / GPUS, MACHINES),
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


def draw_machines(
    seconds: Callable[[int, float, Rates], float],
    machines: Mapping[int, Rates],
    pays: Mapping[int, float],
) -> "Figure":
    """Draw the time of a training step against its number of tokens, on one machine and on two.

    Args:
        seconds: Function of the number of machines, the number of tokens and the rates that returns
            the time in seconds.
        machines: Dict from the number of network cards per machine to the machine's rates. The keys
            are 8 and 1.
        pays: Dict from the number of network cards per machine to the smallest number of tokens at
            which two machines are as fast as one machine.
    """
    drawn, ax = figure("A second machine pays only if a step has enough tokens", width=8.2)
    most = 2.2 * max(pays.values()) or 1.0  # 1.0 if the learner has solved nothing yet
    tokens = [most * part / 400 for part in range(1, 401)]
    # label -> (machines, cards, color, place of the label)
    ways = {
        "one machine": (1, 8, "#222222", most),
        "two machines, a card per GPU": (2, 8, "#4477AA", most),
        "two machines, one card each": (2, 1, "#AA3377", most / 50),
    }
    words = []
    for name, (count, cards, color, place) in ways.items():
        ax.plot(tokens, [seconds(count, t, machines[cards]) for t in tokens], color=color)
        offset = (5, 0) if place == most else (0, 8)
        note(ax, name, (place, seconds(count, place, machines[cards])), offset, color=color)
    for cards, least in pays.items():
        least_seconds = seconds(1, least, machines[8])
        points(ax, {least: least_seconds})
        note(ax, f"{least:,.0f}", (least, least_seconds), (0, 12), ha="right")
        words.append(text("{cards}: {tokens}", tokens=f"{least:,.0f}", cards=cards))
    label_axes(ax, "tokens per step", "seconds per step", xlim=(0, most), ylim=(0, None))
    drawn.course_alt = text(
        "A step on two machines takes as long as on one at these numbers of tokens, by network"
        " cards per machine: {tokens}.",
        tokens=join_labels(words),
    )
    return shown_once(drawn)


def tensor_rows(
    task: Task, runs: Sequence[Mapping[str, Any]]
) -> list[tuple[str, float | None, float]]:
    """Return predicted and measured costs of tensor parallelism on one rank.

    The costs are bytes: training state, communication per step, and peak.

    Args:
        task: Model, batch and loss of the runs.
        runs: Results printed by `course_lib.distributed.tensor_parallel`.

    Returns:
        Rows (label, predicted bytes, measured bytes).
    """
    shapes, rows = shapes_of(task.make_model()), []
    activation = 4 * BATCH * SEQUENCE * DECODER["hidden"]
    for run in runs:
        mode, ranks, usage = run["mode"], run["ranks"], run["taken"][0]
        expected = predict_tensor_parallel(
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
    """Return the bytes of activations that one rank saves for backward in one decoder layer.

    The result is the difference between the saved bytes of a decoder with two layers and of a
    decoder with one layer. Both are estimated on symbolic tensors.

    Args:
        mode: "tp" for tensor parallelism, or "tp-sp" for tensor and sequence parallelism.
        ranks: Number of ranks.
    """
    task, sizes = task_of(), {**DECODER, "sequence": SEQUENCE}
    one, two = (
        predict_tensor_parallel(
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
    """Return a table of one rank's memory and communication with gradient accumulation.

    The rows differ in when gradients are reduced over the ranks: after each micro-batch, or only
    after the last one.

    Args:
        taken: Dict from the label of a row to the usage of one rank.
    """
    rows = []
    for way, usage in taken.items():
        counts = usage.sent_bytes, usage.at_peak["gradient"], usage.peak_bytes
        rows.append((way, *(round(count / 1e6, 1) for count in counts)))
    columns = ["communicated (MB)", "gradients at the peak (MB)", "peak (MB)"]
    return table(["gradients are reduced", *columns], rows)
