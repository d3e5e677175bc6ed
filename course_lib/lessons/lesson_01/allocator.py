"""GPU memory that PyTorch reserves for the lesson's steps, computed by a simulated allocator."""

import pickle
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from course_lib.budget.step import make_state
from course_lib.memory import CATEGORIES, CachingAllocator, MemoryMeter, Trace, symbolic
from course_lib.models import Decoder, random_tokens
from course_lib.teaching import Table, category_label, figure, table, text
from course_lib.teaching.claims import claims_table
from course_lib.teaching.figures import category_look, phase_label, shown_once
from course_lib.teaching.marks import label_axes

from .claims import ALLOCATOR_CLAIMS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MIB = 1 << 20


def replay_trace(
    trace: Trace,
    capacity_bytes: int,
    expandable_segments: bool = False,
    emptied_at: Sequence[int] = (),
) -> tuple[CachingAllocator, str]:
    """Replay a trace's allocations and releases in a simulation of PyTorch's CUDA allocator.

    Args:
        trace: Recorded operators of a training run, with their allocations and releases.
        capacity_bytes: Memory of the simulated GPU.
        expandable_segments: Value of the allocator's setting `expandable_segments`.
        emptied_at: Places in the trace at which the allocator's cache is emptied, in ascending
            order. A place is the number of operators before it.

    Returns:
        The allocator, and the message of its out-of-memory error, or "" if memory was sufficient.
    """
    allocator = CachingAllocator(capacity_bytes, expandable_segments=expandable_segments)
    live = {}
    events, done = list(trace.allocations()), 0
    try:
        for point in (*emptied_at, len(trace)):
            until = sum(1 for _ in trace[:point].allocations())
            live, done = allocator.replay(events[done:until], live), until
            if point in emptied_at:
                allocator.empty_cache()
    except torch.OutOfMemoryError as error:
        return allocator, str(error)
    return allocator, ""


_Prepare = Callable[[Decoder, torch.optim.Optimizer], object]


def _record_training(
    make_decoder: Callable[..., Decoder], lengths: Sequence[int], prepare: _Prepare | None = None
) -> tuple[Trace, list[int]]:
    """Record the trace of a training with one step per length, on batches of two sequences.

    Args:
        make_decoder: Function that returns a decoder for a given maximal `sequence` length.
        lengths: Number of tokens of each batch's sequences, in order.
        prepare: Function that is called with model and optimizer before the training.

    Returns:
        The trace, and the number of operators that had run after each batch.
    """
    with symbolic(), MemoryMeter() as meter:
        model, ends = make_decoder(sequence=512), []
        optimizer = torch.optim.Adam(model.parameters())
        if prepare is not None:
            prepare(model, optimizer)
        for length in lengths:
            model.loss(random_tokens(2, length, 2048)).backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.empty(0)  # the meter detects released storages only at the next operator
            ends.append(meter.points)
    return meter.trace(), ends


def _longest_first(model: Decoder, optimizer: torch.optim.Optimizer) -> None:
    """Run forward and backward of the longest batch, without an optimizer step.

    PyTorch's tuning guide advises this for batches of different lengths.
    """
    model.loss(random_tokens(2, 512, 2048)).backward()
    optimizer.zero_grad()


def four_orders(make_decoder: Callable[..., Decoder]) -> tuple[dict[str, Trace], list[int]]:
    """Record four training runs on batches A (384 tokens) and B (512 tokens) in different orders.

    Args:
        make_decoder: Function that takes the largest sequence length as the keyword argument
            `sequence`, and returns a decoder.

    Returns:
        A pair. The first item is a dict from a label, such as "A, B, A, B", to the trace of a
        training run. The second item belongs to the first of these runs. It lists, for each batch,
        the number of operators that had run when the batch was finished.
    """
    short_first, ends = _record_training(make_decoder, (384, 512, 384, 512))
    scenes = {
        "A, B, A, B": short_first,
        "B, A, B, A": _record_training(make_decoder, (512, 384, 512, 384))[0],
    }
    for name, prepare in (
        ("A, B, A, B, Adam's state first", make_state),
        ("B once, then A, B, A, B", _longest_first),
    ):
        scenes[name] = _record_training(make_decoder, (384, 512, 384, 512), prepare)[0]
    return scenes, ends


def orders_on(scenes: Mapping[str, Trace], capacity_bytes: int) -> Table:
    """Return a table that shows whether each training run fits into a GPU with little memory.

    Each run is tried with and without the allocator's setting `expandable_segments`.

    Args:
        scenes: Dict from the label of a training run to its trace, as returned by `four_orders`.
        capacity_bytes: Memory of the GPU.
    """
    rows = []
    for name, scene in scenes.items():
        for expandable_segments in (False, True):
            message = replay_trace(scene, capacity_bytes, expandable_segments)[1]
            result = "out of memory" if message else "fits"
            rows.append(
                (
                    name,
                    "`expandable_segments:True`" if expandable_segments else "–",
                    scene.peak_bytes,
                    result,
                )
            )
    size = text("{capacity} MiB", capacity=capacity_bytes // MIB)
    return table(["order", "settings", "most live (bytes)", size], rows)


def wanted_bytes(trace: Trace, capacity_bytes: int) -> tuple[int, int, int]:
    """Replay a trace until GPU memory runs out, and return byte counts for the failed allocation.

    Args:
        trace: Recorded allocations and releases of a training run.
        capacity_bytes: Memory of the simulated GPU.

    Returns:
        Bytes of the tensor that did not fit, reserved bytes at that time, and reserved bytes after
        the allocator's cache was emptied.

    Raises:
        ValueError: The trace fits into `capacity_bytes`.
    """
    allocator, live = CachingAllocator(capacity_bytes), {}
    for event in trace.allocations():
        try:
            allocator.replay([event], live)
        except torch.OutOfMemoryError:
            before = _reserved_bytes(allocator)
            allocator.empty_cache()
            return event[2], before, _reserved_bytes(allocator)
    raise ValueError(
        f"trace must need more memory than capacity_bytes, got one that fits into {capacity_bytes}"
    )


def _reserved_bytes(allocator: CachingAllocator) -> int:
    return allocator.memory_stats()["reserved_bytes.all.current"]


def allocator_claims(scene: Trace, capacity_bytes: int, marks: Sequence[int]) -> Table:
    """Return a table of claims about reserved memory, each with the numbers that test it.

    Args:
        scene: Trace of a training run on four batches. With `capacity_bytes`, memory must run out.
        capacity_bytes: Memory of the simulated GPU.
        marks: For each of the four batches, the number of operators that had run when the batch was
            finished.
    """
    reserved = [_reserved_bytes(scene[:mark].allocator()) for mark in marks[1:3]]
    tensor, before, after = wanted_bytes(scene, capacity_bytes)
    message = replay_trace(scene, capacity_bytes)[1]
    tried = message.partition("Tried to allocate ")[2].partition(". ")[0]
    mended = not replay_trace(scene, capacity_bytes, emptied_at=marks)[1]
    return claims_table(
        ALLOCATOR_CLAIMS,
        text(
            "{freed:,} bytes freed when memory ran out; {fits}",
            freed=before - after,
            fits=text(
                "emptied after each batch, it fits"
                if mended
                else "emptied after each batch, it does not fit either"
            ),
        ),
        f"{reserved[0] / MIB:.1f} MiB → {reserved[1] / MIB:.1f} MiB",
        text(
            "{tensor} MiB for the tensor, {tried} requested",
            tensor=f"{tensor / MIB:.2f}",
            tried=tried,
        ),
    )


def draw_in_the_viewer(trace: Trace) -> "Figure":
    """Draw the memory of a training step in two ways, one above the other.

    The upper panel has the live bytes by category. The lower panel is like PyTorch's memory viewer:
    it draws the blocks of a memory snapshot at their addresses. A tensor that exists before the
    trace's first operator, or that this operator creates, is drawn as if it had been live before
    the step.
    """
    with tempfile.TemporaryDirectory() as folder:
        trace.save_snapshot(Path(folder, "step.pickle"))
        snapshot = pickle.loads(Path(folder, "step.pickle").read_bytes())
    title = "The live bytes of one step, and the places of the same storages in the segments"
    drawn, (above, below) = figure(title, rows=2, height=5.6)
    bottom, series = 0, trace.series()
    for name in CATEGORIES:
        if (values := series[name] / 1e6).any():
            look = {"label": category_label(name), **category_look(name)}
            above.fill_between(range(len(trace)), bottom, bottom + values, step="post", **look)
        bottom = bottom + values
    label_axes(above, "operators", "live (MB)", xlim=(0, len(trace)))
    on_entry = sum(1 for span in trace.spans or () if span.start == 0 and span.bytes)
    _draw_blocks(below, snapshot["device_traces"][0], on_entry)
    for ax in (above, below):
        ax.set_ylim(0, max(1.03 * above.get_ylim()[1], below.get_ylim()[1]))
        ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return shown_once(drawn)


#: Phase in which a block was allocated -> label and color; the first row is for blocks from before
#: the step.
_ORIGINS = {
    "held": (text("live before the step"), "#4477AA"),
    "forward": (phase_label("forward"), "#228833"),
    "backward": (phase_label("backward"), "#EE6677"),
    "optimizer": (phase_label("optimizer"), "#AA3377"),
}


def _draw_blocks(ax: "Axes", entries: Sequence[dict], on_entry: int) -> None:
    """Draw segments and the blocks in them as boxes, with time on x and addresses on y."""
    from matplotlib.collections import PolyCollection

    base = min(entry["addr"] for entry in entries)
    segments = [entry for entry in entries if entry["action"] == "segment_alloc"]
    boxes: dict[str, list] = {origin: [] for origin in _ORIGINS}
    born: dict[int, tuple[int, int, str]] = {}
    made = 0

    def outline(start: int, stop: int, address: int, size: int) -> list[tuple[float, float]]:
        low, high = (address - base) / 1e6, (address - base + size) / 1e6
        return [(start, low), (stop, low), (stop, high), (start, high)]

    for now, entry in enumerate(entries):
        if entry["action"] == "alloc":
            made += 1
            origin = "held" if made <= on_entry else entry["frames"][0]["filename"]
            born[entry["addr"]] = now, entry["size"], origin
        elif entry["action"] == "free_completed":
            start, size, origin = born.pop(entry["addr"])
            boxes[origin].append(outline(start, now, entry["addr"], size))
    for address, (start, size, origin) in born.items():
        boxes[origin].append(outline(start, len(entries), address, size))
    reserved = [outline(s["time_us"], len(entries), s["addr"], s["size"]) for s in segments]
    shown = [(reserved, text("reserved, free"), "#DDDDDD")]
    shown += [(boxes[origin], *look) for origin, look in _ORIGINS.items()]
    for found, name, color in shown:
        look = {"facecolors": color, "label": name, "linewidths": 0.2, "edgecolors": "white"}
        if found:
            ax.add_collection(PolyCollection(found, **look))
    top = max(entry["addr"] - base + entry["size"] for entry in segments) / 1e6
    label_axes(ax, "allocations and releases", "address (MB)", ylim=(0, 1.03 * top))
    ax.set_xlim(0, len(entries))
