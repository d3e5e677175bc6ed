"""Convert the state of the simulated allocator to the format of PyTorch's memory viewer.

The viewer is pytorch.org/memory_viz.

Source: `torch.cuda.memory._snapshot` (its docstring), torch/csrc/cuda/Module.cpp (the fields), and
torch/utils/viz/MemoryViz.js, which reads pickles of protocols 2 to 4 made of plain values.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path

from .device_memory import Chunk
from .segments import ExpandableSegments, Segments

PROTOCOL = 4  # the highest protocol that the viewer reads
_DEFAULT_POOL = (0, 0)


def snapshot_of(segments: Segments, allocated_chunks: Iterable[Chunk]) -> dict:
    """Return a snapshot of the allocator in the form that `torch.cuda.memory._snapshot` returns.

    The snapshot differs from PyTorch's in two ways:

    - The time of an event is the event's number, because the simulation has no clock.
    - The requested bytes of a free block are 0. PyTorch may show the requested bytes of the block's
      last allocation instead.

    Args:
        segments: The reserved memory, with the history of events if it was recorded.
        allocated_chunks: The parts of the segments that contain an allocated block.
    """
    chunks = [
        *allocated_chunks,
        *(chunk for pool in (segments.small, segments.large) for *_, chunk in pool.free),
    ]
    # As in PyTorch, each contiguous mapped range of an expandable segment is listed as a segment.
    # `heads` has the first chunk of each range.
    heads = [chunk for chunk in chunks if chunk.previous is None or not chunk.previous.mapped]
    return {
        "segments": [_segment(head) for head in sorted(heads, key=lambda chunk: chunk.address)],
        "device_traces": [
            [_history_entry(time, *event) for time, event in enumerate(segments.history or ())]
        ],
        "allocator_settings": _settings(isinstance(segments, ExpandableSegments)),
        "external_annotations": [],
    }


def save_snapshot(snapshot: dict, path) -> None:
    """Write a snapshot to a file, in the format of `torch.cuda.memory._dump_snapshot`."""
    with Path(path).open("wb") as file:
        pickle.dump(snapshot, file, protocol=PROTOCOL)


def _segment(head: Chunk) -> dict:
    """Return the segment that begins with the chunk `head`, in the viewer's format."""
    blocks = []
    chunk = head
    while chunk is not None and chunk.mapped:
        blocks.append(chunk)
        chunk = chunk.next
    used = [chunk for chunk in blocks if chunk.allocated]
    return {
        "device": 0,
        "address": head.address,
        "total_size": sum(chunk.size for chunk in blocks),
        "allocated_size": sum(chunk.size for chunk in used),
        "active_size": sum(chunk.size for chunk in used),
        "requested_size": sum(chunk.requested for chunk in used),
        "stream": 0,
        "segment_type": "large" if head.pool.name == "large_pool" else "small",
        "segment_pool_id": _DEFAULT_POOL,
        "is_expandable": head.expandable,
        "frames": _copy_frames(head.segment_frames),
        "blocks": [
            {
                "address": chunk.address,
                "size": chunk.size,
                "requested_size": chunk.requested,
                "state": "active_allocated" if chunk.allocated else "inactive",
                "frames": _copy_frames(chunk.frames),
            }
            for chunk in blocks
        ],
    }


def _history_entry(time: int, action: str, address: int, size: int, frames: Sequence) -> dict:
    """Return one event of the history in the viewer's format.

    For an "oom" event, `address` is the number of free bytes on the device.
    """
    return {
        "action": action,
        "device_free" if action == "oom" else "addr": address,
        "size": size,
        "stream": 0,
        "time_us": time,
        "compile_context": "N/A",
        "user_metadata": "",
        "pool_id": _DEFAULT_POOL,
        "frames": _copy_frames(frames),
    }


def _copy_frames(frames: Sequence) -> list[dict]:
    """Return the frames of a call stack as a list of dicts, which can be pickled."""
    return [dict(frame) for frame in frames]


def _settings(expandable_segments: bool) -> dict:
    """Return the allocator's settings in the viewer's format."""
    return {
        # -1 means "no limit". PyTorch stores it as the largest size_t, which becomes -1 in a
        # snapshot.
        "max_split_size": -1,
        "garbage_collection_threshold": 0.0,
        "expandable_segments": expandable_segments,
    }
