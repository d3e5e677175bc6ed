"""Tests of the simulated CUDA caching allocator against rules worked out by hand, the compiled
allocator of PyTorch, and a GPU."""

import json
import linecache
import os
import pickle
import pickletools
import random
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import real_allocator
import torch
from torch import nn
from torch.cuda import _memory_viz
from training_steps import metered

from course_lib.budget import Recipe, estimate
from course_lib.memory import Block, CachingAllocator, MemoryMeter
from course_lib.models import Decoder, random_tokens

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


def current(allocator, *names):
    """Return the current values of statistics, of all pools unless the name has a pool."""
    stats = allocator.memory_stats()
    return [stats[f"{name}.current" if "." in name else f"{name}.all.current"] for name in names]


def layout(allocator):
    """Return each segment as its pool, and its blocks as +bytes if allocated, -bytes if free."""
    return [
        [
            segment["segment_type"],
            *(
                ("-" if b["state"] == "inactive" else "+") + str(b["size"])
                for b in segment["blocks"]
            ),
        ]
        for segment in allocator.snapshot()["segments"]
    ]


def out_of_memory(allocator, size):
    with pytest.raises(torch.OutOfMemoryError) as caught:
        allocator.allocate(size)
    return str(caught.value)


# ---- rules, worked out by hand at both sides of each limit


def parse_bytes(text):
    units = {"": 1, "K": KIB, "M": MIB, "G": GIB}
    return sum(int(n) * units[unit] for n, unit in re.findall(r"([+-]?\d+)([KMG]?)", text))


def assert_stats_equal_sums_over_blocks(allocator):
    segments, stats = allocator.snapshot()["segments"], allocator.memory_stats()
    for pool in ("all", "small_pool", "large_pool"):
        inside = [each for each in segments if pool in ("all", f"{each['segment_type']}_pool")]
        blocks = [block for each in inside for block in each["blocks"]]
        allocated = [block for block in blocks if block["state"] != "inactive"]
        fixed = [each for each in inside if not each["is_expandable"]]
        split = [
            block["size"]
            for each in fixed
            for block in each["blocks"]
            if block["state"] == "inactive" and len(each["blocks"]) > 1
        ]
        expected = {
            "reserved_bytes": sum(each["total_size"] for each in inside),
            "allocated_bytes": sum(block["size"] for block in allocated),
            "requested_bytes": sum(block["requested_size"] for block in allocated),
            "allocation": len(allocated),
            "segment": len(fixed),
            "inactive_split": len(split),
            "inactive_split_bytes": sum(split),
        }
        for name, count in expected.items():
            now, *changes = (stats[f"{name}.{pool}.{x}"] for x in ("current", "allocated", "freed"))
            assert now == changes[0] - changes[1] == count


def run_steps(steps, allocator):
    """Run steps: a size is allocated, "free1" frees the second block, and "empty" releases the
    cache. After each step, compare statistics with the blocks that they count."""
    blocks = []
    for step in steps.split():
        if step == "empty":
            allocator.empty_cache()
        elif step.startswith("free"):
            allocator.free(blocks[int(step.removeprefix("free"))])
        else:
            blocks.append(allocator.allocate(parse_bytes(step)))
        assert_stats_equal_sums_over_blocks(allocator)


def parse_layout(text):
    """Return the expected result of `layout`: "|" separates segments, free blocks are in
    parentheses."""
    found = []
    for pool, *blocks in map(str.split, text.split("|") if text else ()):
        signs = ["-" if block[0] == "(" else "+" for block in blocks]
        sizes = [parse_bytes(block.strip("()")) for block in blocks]
        found.append([pool, *(f"{sign}{size}" for sign, size in zip(signs, sizes, strict=True))])
    return found


# (options of the allocator, lines "steps -> blocks afterwards")
RULES = [
    (
        {},
        """
        # zero bytes take no memory
        0 ->
        # a segment has 2 or 20 MiB, or a multiple of 2 MiB for blocks from 10 MiB on
        1 -> small 512 (2M-512)
        1M -> small 1M (1M)
        1M+1 -> large 1M+512 (19M-512)
        10M-512 -> large 10M-512 (10M+512)
        10M-511 -> large 10M
        10M+1 -> large 10M+512 (2M-512)
        1G+1 -> large 1G+512 (2M-512)
        # a block is split if 512 bytes remain, or more than 1 MiB in the large pool
        1M-512 1M -> small 1M-512 1M (512)
        5M free0 19M -> large 20M
        5M free0 19M-512 -> large 19M-512 (1M+512)
        40M free0 24M -> large 24M (16M)
        # the smallest free block that fits is used; of equal ones that of the older segment
        6M 1M+512 4M 1M+512 5M free0 free2 4M -> large (6M) 1M+512 4M 1M+512 5M (3M-1K)
        1M 1M 1M 1M free3 free0 1M -> small 1M 1M | small 1M (1M)
        512K 512K 512K 512K free2 free0 512K -> small 512K 512K (512K) 512K
        # free neighbors are merged, and each pool has its own segments
        512K 512K 512K free0 free2 free1 -> small (2M)
        512K 512K 512K free2 free1 free0 -> small (2M)
        20M free0 1M 1M -> large (20M) | small 1M 1M
        # emptying the cache releases whole segments only
        3M 3M 16M free0 free2 empty -> large (3M) 3M (14M)
        3M 3M 16M free0 free2 empty free1 empty ->
        """,
    ),
    (
        {"capacity_bytes": 40 * MIB},
        """
        # all memory can be used after the cached segments have been released
        20M 20M -> large 20M | large 20M
        16M free0 16M+512 20M -> large 16M+512 (2M-512) | large 20M
        """,
    ),
    (
        {"expandable_segments": True},
        """
        # an expandable segment grows by pages, and a block is split if 512 bytes remain
        1M 1M+512 19M-512 1M+512 -> small 1M (1M) | large 1M+512 19M-512 1M+512 (19M-512)
        # of equal free blocks the one at the lower address is used
        1M 1M 1M 1M free2 free0 1M -> small 1M 1M (1M) 1M
        # each pool has its own addresses
        1M 1M 1M 1M 1M 1M 1M 1M 1M 9M -> small 1M 1M 1M 1M 1M 1M 1M 1M 1M (1M) | large 9M (11M)
        20M-512 -> large 20M-512 (512)
        40M free0 41M -> large 41M (19M)
        # a free block inside is used before the end, which could grow
        15M 3M free0 2M -> large 2M (13M) 3M (2M)
        # whole free pages inside are released and filled again
        30M 60M 10M free1 empty -> large 30M (10M) | large (10M) 10M
        30M 60M 10M free1 empty 15M -> large 30M 15M (15M) | large (10M) 10M
        30M 15M 10M free1 empty -> large 30M (15M) 10M (5M)
        20M 20M 20M 20M free1 empty free2 empty 40M -> large 20M 40M 20M
        # pages that are mapped again are merged with free neighbors
        55M 60M free0 empty 30M -> large 30M (25M) 60M (5M)
        # a segment without mapped pages is released, and the next one has higher addresses
        60M free0 empty 1M 20M -> small 1M (1M) | large 20M
        20M 20M free0 empty free1 empty 1M 20M -> small 1M (1M) | large 20M
        """,
    ),
    (
        {"capacity_bytes": 160 * MIB, "expandable_segments": True},
        """
        # the address range is an eighth larger than the memory of the device
        20M 130M free0 25M -> large 130M 25M (5M)
        30M 55M 40M free1 60M -> large 30M (10M) | large (5M) 40M (15M) | large 60M
        """,
    ),
]


@pytest.mark.parametrize(
    ("options", "lines"), RULES, ids=[" ".join(options) or "default" for options, _ in RULES]
)
def test_allocator_places_blocks_like_pytorch_caching_allocator(options, lines):
    for line in map(str.strip, lines.strip().splitlines()):
        if not line.startswith("#"):
            steps, _, expected = line.partition("->")
            allocator = CachingAllocator(**options)
            run_steps(steps, allocator)
            assert layout(allocator) == parse_layout(expected.strip()), line


# ---- a full device


def test_out_of_memory_error_leaves_allocated_blocks_unchanged():
    allocator = CachingAllocator(30 * MIB)
    held = allocator.allocate(11 * MIB)
    message = out_of_memory(allocator, 2 * MIB)  # because it needs a segment of 20 MiB
    assert "Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 30.00 MiB" in message
    assert "18.00 MiB is free. Of the allocated memory 12.00 MiB" in message
    assert layout(allocator) == parse_layout("large 12M")
    allocator.free(held)
    allocator.allocate(20 * MIB)  # after the segment of 12 MiB has been released
    assert layout(allocator) == parse_layout("large 20M")
    counts = "num_ooms", "num_device_free", "num_alloc_retries"
    assert [allocator.memory_stats()[name] for name in counts] == [1, 1, 2]


def test_reset_peak_memory_stats_lowers_peak_to_current_bytes():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(5 * MIB))
    allocator.reset_peak_memory_stats()
    stats = allocator.memory_stats()
    assert stats["allocated_bytes.all.peak"] == 0
    assert stats["reserved_bytes.all.peak"] == 20 * MIB


# ---- invalid arguments


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda a: a.allocate(-1), ValueError, "^size_bytes must .*-1"),
        (lambda a: a.free(7), TypeError, "^block must .*7"),
        (lambda a: a.free(Block(64, 512, 1)), ValueError, "at 0x40 is of another"),
        (
            lambda a: [a.free(block) for block in [a.allocate(1)] * 2],
            ValueError,
            "once for each block",
        ),
        (
            lambda a: [a.free(block) for block in [a.allocate(0)] * 2],
            ValueError,
            "once for each block",
        ),
        (lambda a: CachingAllocator(2 * MIB - 1), ValueError, "^capacity_bytes must .* 2097152"),
        (lambda a: CachingAllocator(expandable_segments=1), TypeError, "^expandable_segments must"),
        (lambda a: a.replay([("move", 1, 2)]), ValueError, "^event 0 .* 'move'"),
        (
            lambda a: a.replay([("birth", 1, 0)] * 2),
            ValueError,
            "^event 1 allocates storage 1, .* already",
        ),
        (
            lambda a: a.replay([("release", 1, 2)]),
            ValueError,
            "^event 0 releases storage 1, .* before",
        ),
    ],
)
def test_invalid_allocator_argument_raises_and_leaves_state_unchanged(call, error, message):
    allocator = CachingAllocator()
    kept = allocator.allocate(100)
    with pytest.raises(error, match=message):
        call(allocator)
    allocator.free(kept)
    assert current(allocator, "allocated_bytes") == [0]


# ---- replays, and snapshots for PyTorch's memory viewer

LINE = {"filename": "train.py", "line": 7, "name": "forward"}
EVENTS = [
    ("birth", "weight", 30 * MIB, [LINE]),
    ("birth", "activation", 3_000_000, [LINE | {"line": 8}]),
    ("birth", "mask", 1000, [LINE | {"line": 9}]),
    ("release", "activation", 3_000_000),
    ("birth", "gradient", 30 * MIB, [LINE | {"line": 10}]),
    ("release", "mask", 1000),
]


def replay_events(**options):
    """Return an allocator that has replayed EVENTS, and its live blocks."""
    allocator = CachingAllocator(record_history=True, **options)
    return allocator, allocator.replay(EVENTS)


def test_replay_of_trace_events_allocates_and_frees_exact_bytes():
    allocator, live = replay_events()
    assert live.keys() == {"weight", "gradient"}
    assert current(allocator, "requested_bytes", "reserved_bytes") == [60 * MIB, 82 * MIB]
    assert allocator.memory_stats()["requested_bytes.all.peak"] == 60 * MIB + 1000
    allocator.replay([("release", "weight", 30 * MIB), ("birth", "weight", 5)], live)
    assert current(allocator, "requested_bytes") == [30 * MIB + 5]
    assert live["weight"].requested_bytes == 5


# The opcodes of pickle that torch/utils/viz/MemoryViz.js can read.
OPCODES = """
    APPEND APPENDS BINGET BINFLOAT BININT BININT1 BININT2 BINPUT BINUNICODE DICT EMPTY_DICT
    EMPTY_LIST EMPTY_TUPLE FRAME LIST LONG1 LONG_BINGET LONG_BINPUT MARK MEMOIZE NEWFALSE NEWTRUE
    NONE PROTO SETITEM SETITEMS SHORT_BINUNICODE STOP TUPLE TUPLE1 TUPLE2 TUPLE3
"""


@pytest.mark.parametrize("expandable", [False, True])
def test_pytorch_memory_viz_and_viewer_page_read_saved_snapshot(expandable, tmp_path):
    """Compare the file with the source of the page, which is not opened."""
    allocator, _ = replay_events(capacity_bytes=2 * GIB, expandable_segments=expandable)
    out_of_memory(allocator, 3 * GIB)
    allocator.save_snapshot(tmp_path / "step.pickle")
    written = (tmp_path / "step.pickle").read_bytes()
    snapshot = pickle.loads(written)
    assert snapshot == allocator.snapshot()
    summary = _memory_viz.segsum(snapshot)
    reserved, requested = current(allocator, "reserved_bytes", "requested_bytes")
    assert f"total_reserved: {_memory_viz.Bytes(reserved)}" in summary
    assert f"total_allocated: {_memory_viz.Bytes(requested)}" in summary
    events = _memory_viz.trace(snapshot)
    assert events.count(" = cudaMalloc(") == (0 if expandable else 4)
    assert events.count("segment_map") == (3 if expandable else 0)
    assert len(re.findall(r"\ndel (\w+) # .*\n# free completed for \1 ", events)) == 2
    flames = _memory_viz.memory(snapshot, format_flamegraph=str)
    assert f"stream_0;active_allocated;train.py:7:forward {30 * MIB}\n" in flames
    assert "Active Memory Timeline" in _memory_viz.trace_plot(snapshot)
    opcodes = {opcode.name: argument for opcode, argument, _ in pickletools.genops(written)}
    assert opcodes.keys() <= set(OPCODES.split())
    assert 2 <= opcodes["PROTO"] <= 4
    for segment in snapshot["segments"]:
        # JavaScript's numbers are exact up to here
        assert segment["address"] + segment["total_size"] < 1 << 53
    for entry in snapshot["device_traces"][0]:
        assert ("device_free" if entry["action"] == "oom" else "addr") in entry
        assert "category" not in entry  # the page fails unless a category is "unknown"


def test_allocator_history_has_frames_of_freed_segment():
    allocator = CachingAllocator(record_history=True)
    allocator.free(allocator.allocate(1, [LINE]))
    allocator.empty_cache()
    [entries] = allocator.snapshot()["device_traces"]
    assert (entries[-1]["action"], entries[-1]["frames"]) == ("segment_free", [LINE])
    assert CachingAllocator().snapshot()["device_traces"] == [[]]


# ---- snapshots of a step


def read_snapshot(path):
    """Return the bytes live at the end, their peak, and the frames of each allocation.

    `_memory_viz` of PyTorch computes the bytes at the end, too.
    """
    with path.open("rb") as file:
        snapshot = pickle.load(file)
    flames = _memory_viz.memory(snapshot, format_flamegraph=str).splitlines()
    active = [line for line in flames if ";active_allocated;" in line and "<gaps>" not in line]
    live = peak = 0
    [entries] = snapshot["device_traces"]
    for entry in entries:
        live += {"alloc": 1, "free_completed": -1}.get(entry["action"], 0) * entry["size"]
        peak = max(peak, live)
    assert live == sum(int(line.rpartition(" ")[2]) for line in active)
    return live, peak, [entry["frames"] for entry in entries if entry["action"] == "alloc"]


def test_memory_snapshot_has_size_and_source_line_of_each_allocation(tmp_path):
    model = nn.Sequential(nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, 600))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with MemoryMeter(model, optimizer, module_paths=True) as meter:
        loss = model(torch.randn(64, 600)).square().mean()
        loss.backward()
        optimizer.step()
    meter.save_snapshot(tmp_path / "step.pickle")
    live, peak, frames = read_snapshot(tmp_path / "step.pickle")
    assert (live, peak) == (meter.live_bytes, meter.peak_bytes)
    # A storage that changes its category is not allocated again.
    births = [action for action, *_ in meter.trace().allocations()].count("birth")
    spans = meter.trace().spans
    assert births == len({span.storage for span in spans}) < len(spans)
    places = [
        (*(each["name"] for each in stack), linecache.getline(__file__, stack[-1]["line"]).strip())
        for stack in frames
    ]
    test = "test_memory_snapshot_has_size_and_source_line_of_each_allocation"
    forward = "loss = model(torch.randn(64, 600)).square().mean()"
    assert ("aten.addmm.default", "0", test, forward) in places
    for layer in ("0", "2"):
        assert ("aten.mm.default", layer, test, "loss.backward()") in places
    meter = metered(lambda: model(torch.randn(3, 600)), source_lines=False)
    assert meter.trace().lines == meter.trace().modules == {}


@pytest.mark.parametrize("shard", [{}, {"ranks": 4, "shard": "zero3"}])
def test_memory_snapshot_of_estimated_step_has_peak_and_module_names(shard, tmp_path):
    make = partial(Decoder, vocabulary=100, hidden=64, heads=2, layers=3, sequence=32)
    recipe = Recipe(checkpoint="layers", **shard)
    estimated = estimate(make, partial(random_tokens, 4, 32, 100), recipe)
    estimated.trace().save_snapshot(tmp_path / "step.pickle", expandable_segments=True)
    _, peak, frames = read_snapshot(tmp_path / "step.pickle")
    assert peak == estimated.peak_bytes
    modules = {frame["name"] for each in frames for frame in each if frame["filename"] == "module"}
    assert "layers.2.feedforward.0" in modules


# ---- random steps, which PyTorch's compiled allocator runs on a CUDA runtime without a GPU

# value of PYTORCH_CUDA_ALLOC_CONF -> option `expandable_segments`
EXPANDABLE = {"": False, "expandable_segments:True": True}

LIMITS = [1, 512, 513, MIB, MIB + 1, 10 * MIB - 512, 10 * MIB, 19 * MIB - 512, 19 * MIB]
LIMITS += [20 * MIB, 24 * MIB]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    if real_allocator.missing():
        pytest.skip(real_allocator.missing())
    if real_allocator.version() == (2, 12):
        pytest.skip("torch 2.12 alone decides between chunks of one size by the age of each")
    return real_allocator.build(tmp_path_factory.mktemp("real"))


def random_steps(allocator, seed):
    """Allocate, free and empty the cache at random, with a mixture of sizes that the seed decides.
    Yield (step, message of the error or "") after each step."""
    random_numbers = random.Random(seed)
    kinds = [
        lambda: random_numbers.randrange(1, 2000),
        lambda: random_numbers.randrange(1, 2 * MIB),
        lambda: random_numbers.randrange(MIB // 2, 30 * MIB),
        lambda: random_numbers.randrange(1, 90 * MIB),
        lambda: random_numbers.choice(LIMITS),
    ]
    kinds = random_numbers.sample(kinds, random_numbers.randrange(1, 6))
    held = []
    for number in range(300):
        draw, error = random_numbers.random(), ""
        if draw < 0.01:
            step = "e"
            allocator.empty_cache()
        elif draw < 0.45 and held:
            name, block = held.pop(random_numbers.randrange(len(held)))
            step = f"f {name}"
            allocator.free(block)
        else:
            size = random_numbers.choice(kinds)()
            step = f"a {number} {size}"
            try:
                held.append((number, allocator.allocate(size)))
            except torch.OutOfMemoryError as problem:
                error = str(problem)
        yield step, error


@pytest.mark.parametrize("setting", EXPANDABLE)
@pytest.mark.parametrize(("seed", "capacity"), [(0, 64 * MIB + 1000), (5, 300 * MIB)])
def test_simulated_allocator_equals_pytorch_allocator_after_each_random_step(
    program, setting, seed, capacity
):
    allocator = CachingAllocator(
        capacity, expandable_segments=EXPANDABLE[setting], record_history=True
    )
    steps, found = [], []
    for step, error in random_steps(allocator, seed):
        # Since 2.14 PyTorch advises expandable segments only if they are not set.
        if real_allocator.version() >= (2, 14) and EXPANDABLE[setting]:
            error = error.partition(" If reserved")[0]
        steps.append(step)
        found.append((error, allocator.memory_stats(), layout(allocator)))
    expected, history = real_allocator.run(program, "\n".join(steps), capacity, setting)
    for step, ours, theirs in zip(steps, found, expected, strict=True):
        assert ours == theirs, f"{step}, on a device of {capacity} bytes"
    [entries] = allocator.snapshot()["device_traces"]
    assert [(entry["action"], entry["size"]) for entry in entries] == history


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("setting", EXPANDABLE)
def test_replay_of_decoder_training_steps_equals_gpu_allocator_statistics(setting):
    if VERSION < (2, 13) and not EXPANDABLE[setting]:
        pytest.skip("before torch 2.13, CUDA's addresses decide between blocks of one size")
    environment = os.environ | {
        "PYTORCH_CUDA_ALLOC_CONF": setting,
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [sys.executable, Path(__file__).parents[1] / "tools/gpu_allocator.py"]
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    on_gpu = json.loads(process.stdout)
    allocator = CachingAllocator(expandable_segments=EXPANDABLE[setting], record_history=True)
    kinds = {"alloc": "birth", "free_completed": "release"}
    allocator.replay(
        (kinds[action], address, size)
        for action, address, size in on_gpu["history"]
        if action in kinds
    )
    stats = allocator.memory_stats()
    assert {name: on_gpu["statistics"][name] for name in stats} == stats
    [entries] = allocator.snapshot()["device_traces"]
    assert [[entry["action"], entry["size"]] for entry in entries] == [
        [action, size] for action, _, size in on_gpu["history"] if action != "snapshot"
    ]
