"""State of the simulated caching allocator in the form that PyTorch's memory viewer reads:
pytorch.org/memory_viz.

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


def snapshot_of(of: Segments, handed_out: Iterable[Chunk]) -> dict:
    """Return the current segments, and the recorded events if there are any.

    Times are counts of events, because nothing takes time in the simulation. A free block has no
    requested bytes, whereas PyTorch may leave those of the block's last allocation.
    """
    chunks = [*handed_out, *(chunk for pool in (of.small, of.large) for *_, chunk in pool.free)]
    # Each contiguous mapped range of an expandable segment is listed as a segment.
    heads = [chunk for chunk in chunks if chunk.before is None or not chunk.before.mapped]
    return {
        "segments": [_segment(head) for head in sorted(heads, key=lambda chunk: chunk.address)],
        "device_traces": [[_entry(time, *event) for time, event in enumerate(of.history or ())]],
        "allocator_settings": _settings(isinstance(of, ExpandableSegments)),
        "external_annotations": [],
    }


def save_snapshot(snapshot: dict, path) -> None:
    """Write the snapshot as `torch.cuda.memory._dump_snapshot` does."""
    with Path(path).open("wb") as file:
        pickle.dump(snapshot, file, protocol=PROTOCOL)


def _segment(head: Chunk) -> dict:
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
        "frames": _frames(head.segment_frames),
        "blocks": [
            {
                "address": chunk.address,
                "size": chunk.size,
                "requested_size": chunk.requested,
                "state": "active_allocated" if chunk.allocated else "inactive",
                "frames": _frames(chunk.frames),
            }
            for chunk in blocks
        ],
    }


def _entry(time: int, action: str, address: int, size: int, frames: Sequence) -> dict:
    return {
        "action": action,
        "device_free" if action == "oom" else "addr": address,
        "size": size,
        "stream": 0,
        "time_us": time,
        "compile_context": "N/A",
        "user_metadata": "",
        "pool_id": _DEFAULT_POOL,
        "frames": _frames(frames),
    }


def _frames(frames: Sequence) -> list[dict]:
    return [dict(frame) for frame in frames]


def _settings(expandable_segments: bool) -> dict:
    return {
        # PyTorch stores "no limit" as the largest size_t, which becomes -1.
        "max_split_size": -1,
        "garbage_collection_threshold": 0.0,
        "expandable_segments": expandable_segments,
    }
