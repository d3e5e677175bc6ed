"""The simulated CUDA caching allocator against hand-worked rules, a slow twin, PyTorch's own code,
and a GPU."""

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
from itertools import pairwise
from operator import itemgetter
from pathlib import Path

import pytest
import real_allocator
import torch
from obvious_allocator import ObviousAllocator
from torch import nn
from torch.cuda import _memory_viz

from course_lib.budget import Recipe, estimate
from course_lib.memory import Block, CachingAllocator, MemoryMeter
from course_lib.models import Decoder, random_tokens

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


def now(allocator, *names):
    figures = allocator.memory_stats()
    found = [figures[f"{name}.current" if "." in name else f"{name}.all.current"] for name in names]
    return found[0] if len(found) == 1 else found


def layout(allocator):
    """Each segment: its pool, and its blocks as +bytes if held, -bytes if free."""
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


# ---- rules, worked out by hand on both sides of their edges


def assert_every_byte_is_accounted_for(allocator):
    """The addresses do not overlap, and the figures are the sums over all blocks."""
    segments, end = allocator.snapshot()["segments"], 0
    for segment in segments:
        assert segment["address"] >= end
        end = segment["address"] + segment["total_size"]
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
        states = [block["state"] for block in segment["blocks"]]
        assert ("inactive", "inactive") not in pairwise(states)  # all that could join has
    for pool in ("all", "small_pool", "large_pool"):
        inside = [each for each in segments if pool in ("all", f"{each['segment_type']}_pool")]
        blocks = [(block, each) for each in inside for block in each["blocks"]]
        held = [block for block, _ in blocks if block["state"] != "inactive"]
        split = [
            block["size"]
            for block, each in blocks
            if block["state"] == "inactive" and len(each["blocks"]) > 1
            if not each["is_expandable"]
        ]
        expected = {
            "reserved_bytes": sum(each["total_size"] for each in inside),
            "allocated_bytes": sum(block["size"] for block in held),
            "requested_bytes": sum(block["requested_size"] for block in held),
            "allocation": len(held),
            "segment": sum(not each["is_expandable"] for each in inside),
            "inactive_split": len(split),
            "inactive_split_bytes": sum(split),
        }
        found = now(allocator, *(f"{name}.{pool}" for name in expected))
        assert found == [*expected.values()], pool


def bytes_of(text):
    """Return the bytes of a size such as "19M-512"."""
    units = {"": 1, "K": KIB, "M": MIB, "G": GIB}
    return sum(int(n) * units[unit] for n, unit in re.findall(r"([+-]?\d+)([KMG]?)", text))


def carry_out(steps, allocator):
    """Carry out steps: a size is allocated, "free1" frees the second block, and "empty" releases
    the cache. After each step all figures are compared with the blocks that they count."""
    blocks, peaks = [], {}
    for step in steps.split():
        if step == "empty":
            allocator.empty_cache()
        elif step.startswith("free"):
            allocator.free(blocks[int(step.removeprefix("free"))])
        else:
            blocks.append(allocator.allocate(bytes_of(step)))
        assert_every_byte_is_accounted_for(allocator)
        figures = allocator.memory_stats()
        for name in {name.rpartition(".")[0] for name in figures if "." in name}:
            current = figures[f"{name}.current"]
            assert figures[f"{name}.allocated"] - figures[f"{name}.freed"] == current
            peaks[name] = max(peaks.get(name, 0), current)
            assert figures[f"{name}.peak"] >= peaks[name]
    return blocks


def read_layout(text):
    """Return what `layout` should return: segments are separated by "|", free blocks are in
    brackets."""
    found = []
    for pool, *blocks in map(str.split, text.split("|") if text else ()):
        signs = ["-" if block[0] == "(" else "+" for block in blocks]
        sizes = [bytes_of(block.strip("()")) for block in blocks]
        found.append([pool, *(f"{sign}{size}" for sign, size in zip(signs, sizes, strict=True))])
    return found


# (options, lines "steps -> blocks afterwards")
RULES = [
    (
        {},
        """
        # zero bytes take no memory
        0 ->
        # a segment has 2 or 20 MiB, or from 10 on whole 2 MiB
        1 -> small 512 (2M-512)
        1M -> small 1M (1M)
        1M+1 -> large 1M+512 (19M-512)
        10M-512 -> large 10M-512 (10M+512)
        10M-511 -> large 10M
        10M+1 -> large 10M+512 (2M-512)
        1G+1 -> large 1G+512 (2M-512)
        # in the small pool 512 bytes are worth splitting off, in the large one more than 1 MiB
        1M-512 1M -> small 1M-512 1M (512)
        5M free0 19M -> large 20M
        5M free0 19M-512 -> large 19M-512 (1M+512)
        40M free0 24M -> large 24M (16M)
        # the smallest hole that fits is taken; of two the older segment's, then the lower one
        6M 1M+512 4M 1M+512 5M free0 free2 4M -> large (6M) 1M+512 4M 1M+512 5M (3M-1K)
        1M 1M 1M 1M free3 free0 1M -> small 1M 1M | small 1M (1M)
        512K 512K 512K 512K free2 free0 512K -> small 512K 512K (512K) 512K
        # what is freed joins its free neighbours, and each pool has its own segments
        512K 512K 512K free0 free2 free1 -> small (2M)
        512K 512K 512K free2 free1 free0 -> small (2M)
        20M free0 1M 1M -> large (20M) | small 1M 1M
        # emptying the cache frees whole segments only
        3M 3M 16M free0 free2 empty -> large (3M) 3M (14M)
        3M 3M 16M free0 free2 empty free1 empty ->
        """,
    ),
    (
        {"capacity_bytes": 40 * MIB},
        """
        # full to the byte, once what is cached has been released
        20M 20M -> large 20M | large 20M
        16M free0 16M+512 20M -> large 16M+512 (2M-512) | large 20M
        """,
    ),
    (
        {"expandable_segments": True},
        """
        # an expandable segment grows by pages, and 512 bytes are worth splitting off in either pool
        1M 1M+512 19M-512 1M+512 -> small 1M (1M) | large 1M+512 19M-512 1M+512 (19M-512)
        # each pool has addresses of its own
        1M 1M 1M 1M 1M 1M 1M 1M 1M 9M -> small 1M 1M 1M 1M 1M 1M 1M 1M 1M (1M) | large 9M (11M)
        20M-512 -> large 20M-512 (512)
        40M free0 41M -> large 41M (19M)
        # a hole is used before the end, which could grow
        15M 3M free0 2M -> large 2M (13M) 3M (2M)
        # free pages within it are released and filled again, but no parts of pages
        30M 60M 10M free1 empty -> large 30M (10M) | large (10M) 10M
        30M 60M 10M free1 empty 15M -> large 30M 15M (15M) | large (10M) 10M
        30M 15M 10M free1 empty -> large 30M (15M) 10M (5M)
        20M 20M 20M 20M free1 empty free2 empty 40M -> large 20M 40M 20M
        """,
    ),
    (
        {"capacity_bytes": 40 * MIB, "expandable_segments": True},
        """
        # it has an eighth more addresses than the device has memory
        20M 10M free0 25M -> large 10M 25M (5M)
        """,
    ),
]


@pytest.mark.parametrize(("options", "lines"), RULES, ids=[str(options) for options, _ in RULES])
def test_blocks_lie_where_the_rules_put_them(options, lines):
    for line in map(str.strip, lines.strip().splitlines()):
        if not line.startswith("#"):
            steps, _, expected = line.partition("->")
            allocator = CachingAllocator(**options)
            blocks = carry_out(steps, allocator)
            assert layout(allocator) == read_layout(expected.strip()), line
            for block in blocks:
                if block.allocated:
                    allocator.free(block)
            allocator.empty_cache()
            names = "reserved_bytes", "allocated_bytes", "inactive_split", "segment"
            assert not any(now(allocator, *names))


# ---- a full device


def test_out_of_memory_says_the_segments_size_and_changes_nothing_that_is_held():
    allocator = CachingAllocator(30 * MIB)
    held = allocator.allocate(11 * MIB)
    said = out_of_memory(allocator, 2 * MIB)  # which needs a segment of 20 MiB
    assert said.startswith(
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 30.00 MiB"
        " of which 18.00 MiB is free. Of the allocated memory 12.00 MiB is"
    )
    assert layout(allocator) == read_layout("large 12M")
    allocator.free(held)
    allocator.allocate(20 * MIB)  # after the segment of 12 MiB has been released
    assert layout(allocator) == read_layout("large 20M")
    counts = "num_ooms", "num_device_free", "num_alloc_retries"
    assert [allocator.memory_stats()[name] for name in counts] == [1, 1, 2]


def test_a_peak_can_be_reset():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(5 * MIB))
    allocator.reset_peak_memory_stats()
    peaks = [allocator.memory_stats()[f"{of}_bytes.all.peak"] for of in ("allocated", "reserved")]
    assert peaks == [0, 20 * MIB]


# ---- bad input


@pytest.mark.parametrize(
    ("do", "error", "said"),
    [
        (lambda a: a.allocate(-1), ValueError, "^size_bytes must .*-1"),
        (lambda a: a.allocate(1.5), TypeError, "^size_bytes must .*1.5"),
        (lambda a: a.free(7), TypeError, "^block must .*7"),
        (lambda a: a.free(Block(64, 512, 1)), ValueError, "at 0x40 was not allocated by this"),
        (lambda a: a.free(CachingAllocator().allocate(1)), ValueError, "not allocated by this"),
        (lambda a: [a.free(block) for block in [a.allocate(1)] * 2], ValueError, "freed already"),
        (lambda a: [a.free(block) for block in [a.allocate(0)] * 2], ValueError, "freed already"),
        (lambda a: CachingAllocator(2 * MIB - 1), ValueError, "^capacity_bytes must .* 2097152"),
        (lambda a: CachingAllocator(expandable_segments=1), TypeError, "^expandable_segments must"),
        (lambda a: a.replay([("move", 1, 2)]), ValueError, "^event 0 .* 'move'"),
        (lambda a: a.replay([("birth", 1, 0)] * 2), ValueError, "^event 1 .* 1, .* already"),
        (lambda a: a.replay([("release", 1, 2)]), ValueError, "^event 0 .* storage 1, .* not"),
    ],
)
def test_bad_input_is_refused_and_changes_nothing(do, error, said):
    allocator = CachingAllocator()
    kept = allocator.allocate(100)
    with pytest.raises(error, match=said):
        do(allocator)
    allocator.free(kept)
    assert now(allocator, "allocated_bytes") == 0


# ---- replayed, and written for the viewer

LINE = {"filename": "train.py", "line": 7, "name": "forward"}
EVENTS = [
    ("birth", "weight", 30 * MIB, [LINE]),
    ("birth", "activation", 3_000_000, [LINE | {"line": 8}]),
    ("birth", "mask", 1000, [LINE | {"line": 9}]),
    ("release", "activation", 3_000_000),
    ("birth", "gradient", 30 * MIB, [LINE | {"line": 10}]),
    ("release", "mask", 1000),
]


def replayed(events=EVENTS, **options):
    allocator = CachingAllocator(record_history=True, **options)
    return allocator, allocator.replay(events)


def test_a_replay_allocates_and_frees_as_the_events_say():
    allocator, live = replayed()
    assert live.keys() == {"weight", "gradient"}
    assert now(allocator, "requested_bytes", "reserved_bytes") == [60 * MIB, 82 * MIB]
    assert allocator.memory_stats()["requested_bytes.all.peak"] == 60 * MIB + 1000
    allocator.replay([("release", "weight", 30 * MIB), ("birth", "weight", 5)], live)
    assert now(allocator, "requested_bytes") == 30 * MIB + 5
    assert live["weight"].requested_bytes == 5


@pytest.mark.parametrize("expandable", [False, True])
def test_pytorchs_own_reader_finds_the_figures_in_a_saved_snapshot(expandable, tmp_path):
    allocator, _ = replayed(expandable_segments=expandable)
    allocator.save_snapshot(tmp_path / "step.pickle")
    snapshot = pickle.loads((tmp_path / "step.pickle").read_bytes())
    assert snapshot == allocator.snapshot()
    summary = _memory_viz.segsum(snapshot)
    reserved, requested = now(allocator, "reserved_bytes", "requested_bytes")
    assert f"total_reserved: {_memory_viz.Bytes(reserved)}" in summary
    assert f"total_allocated: {_memory_viz.Bytes(requested)}" in summary
    events = _memory_viz.trace(snapshot)
    assert events.count(" = cudaMalloc(") == (0 if expandable else 4)
    assert events.count("segment_map") == (3 if expandable else 0)
    assert len(re.findall(r"\ndel (\w+) # .*\n# free completed for \1 ", events)) == 2
    flames = _memory_viz.memory(snapshot, format_flamegraph=str)
    assert f"stream_0;active_allocated;train.py:7:forward {30 * MIB}\n" in flames
    assert "Active Memory Timeline" in _memory_viz.trace_plot(snapshot)


def test_a_history_has_what_was_released_large_segments_first_and_out_of_memory():
    allocator = CachingAllocator(22 * MIB, record_history=True)
    for size in (1, 2 * MIB):
        allocator.free(allocator.allocate(size, [LINE]))
    allocator.empty_cache()
    out_of_memory(allocator, 30 * MIB)
    [entries] = allocator.snapshot()["device_traces"]
    released = [
        (entry["size"], entry["frames"]) for entry in entries if entry["action"] == "segment_free"
    ]
    assert released == [(20 * MIB, [LINE]), (2 * MIB, [LINE])]
    text = _memory_viz.trace(allocator.snapshot())
    assert "raise OutOfMemoryError # 30.0MiB requested, 22.0MiB free in CUDA" in text
    assert CachingAllocator().snapshot()["device_traces"] == [[]]


# ---- a step in PyTorch's viewer


def read_back(path):
    """(bytes live at the end by PyTorch's own reader, the most live, frames of what was made)"""
    with path.open("rb") as file:
        snapshot = pickle.load(file)
    flames = _memory_viz.memory(snapshot, format_flamegraph=str).splitlines()
    held = [line for line in flames if ";active_allocated;" in line and "<gaps>" not in line]
    live = most = 0
    [entries] = snapshot["device_traces"]
    for entry in entries:
        live += {"alloc": 1, "free_completed": -1}.get(entry["action"], 0) * entry["size"]
        most = max(most, live)
    end = sum(int(line.rpartition(" ")[2]) for line in held)
    assert live == end
    return end, most, [entry["frames"] for entry in entries if entry["action"] == "alloc"]


def test_a_metered_step_opens_in_pytorchs_reader_with_the_meters_figures(tmp_path):
    model = nn.Sequential(nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, 600))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with MemoryMeter(model, optimizer, module_paths=True) as meter:
        loss = model(torch.randn(64, 600)).square().mean()
        loss.backward()
        optimizer.step()
    meter.save_snapshot(tmp_path / "step.pickle")
    end, most, frames = read_back(tmp_path / "step.pickle")
    assert (end, most) == (meter.live_bytes, meter.peak_bytes)
    # what changes its category stays where it is
    births = [what for what, *_ in meter.trace().allocations()].count("birth")
    spans = meter.trace().spans
    assert births == len({span.storage for span in spans}) < len(spans)
    told = [
        (*(each["name"] for each in stack), linecache.getline(__file__, stack[-1]["line"]).strip())
        for stack in frames
    ]
    here = "test_a_metered_step_opens_in_pytorchs_reader_with_the_meters_figures"
    forward = "loss = model(torch.randn(64, 600)).square().mean()"
    assert ("aten.addmm.default", "0", here, forward) in told
    for layer in ("0", "2"):
        assert ("aten.mm.default", layer, here, "loss.backward()") in told
    with MemoryMeter(source_lines=False) as meter:
        model(torch.randn(3, 600))
    assert meter.trace().lines == meter.trace().modules == {}


@pytest.mark.parametrize("shard", [{}, {"ranks": 4, "shard": "zero3"}])
def test_an_estimated_step_opens_in_pytorchs_reader_with_the_estimates_figures(shard, tmp_path):
    make = partial(Decoder, vocabulary=100, hidden=64, heads=2, layers=3, sequence=32)
    recipe = Recipe(checkpoint="layers", **shard)
    found = estimate(make, partial(random_tokens, 4, 32, 100), recipe)
    found.trace().save_snapshot(tmp_path / "step.pickle", expandable_segments=True)
    _, most, frames = read_back(tmp_path / "step.pickle")
    assert most == found.peak_bytes
    modules = {frame["name"] for each in frames for frame in each if frame["filename"] == "module"}
    assert "layers.2.feedforward.0" in modules


# The opcodes that the reader of pickles in torch/utils/viz/MemoryViz.js knows.
OPCODES = """
    APPEND APPENDS BINGET BINFLOAT BININT BININT1 BININT2 BINPUT BINUNICODE DICT EMPTY_DICT
    EMPTY_LIST EMPTY_TUPLE FRAME LIST LONG1 LONG_BINGET LONG_BINPUT MARK MEMOIZE NEWFALSE NEWTRUE
    NONE PROTO
    SETITEM SETITEMS SHORT_BINUNICODE STOP TUPLE TUPLE1 TUPLE2 TUPLE3
"""


def test_a_saved_snapshot_is_what_the_viewers_page_can_read(tmp_path):
    """As its source says; the page itself was not opened."""
    allocator, live = replayed(capacity_bytes=2 * GIB)
    for block in live.values():
        allocator.free(block)
    out_of_memory(allocator, 3 * GIB)
    allocator.save_snapshot(tmp_path / "step.pickle")
    written = (tmp_path / "step.pickle").read_bytes()
    opcodes = {opcode.name: argument for opcode, argument, _ in pickletools.genops(written)}
    assert opcodes.keys() <= set(OPCODES.split())
    assert 2 <= opcodes["PROTO"] <= 4
    snapshot = pickle.loads(written)
    for segment in snapshot["segments"]:
        # exact as one of JavaScript's numbers
        assert segment["address"] + segment["total_size"] < 1 << 53
    for entry in snapshot["device_traces"][0]:
        assert ("device_free" if entry["action"] == "oom" else "addr") in entry
        assert "category" not in entry  # the page stops at categories of which none is "unknown"


# ---- against PyTorch's own compiled allocator, on a CUDA runtime that only counts

EXPANDABLE = {"": False, "expandable_segments:True": True}  # setting -> option of our allocator


EDGES = [1, 512, 513, MIB, MIB + 1, 10 * MIB - 512, 10 * MIB, 19 * MIB - 512, 19 * MIB]
EDGES += [20 * MIB, 24 * MIB]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    if real_allocator.missing():
        pytest.skip(real_allocator.missing())
    if real_allocator.version() == (2, 12):
        pytest.skip("torch 2.12 alone decides between chunks of one size by the age of each")
    return real_allocator.build(tmp_path_factory.mktemp("real"))


def random_steps(allocator, seed):
    """Allocate, free and empty the cache by chance: edges, small, middling and large sizes mixed by
    the seed. Yields after each step (what was done, the error's sentence or "")."""
    chance = random.Random(seed)
    kinds = [
        lambda: chance.randrange(1, 2000),
        lambda: chance.randrange(1, 2 * MIB),
        lambda: chance.randrange(MIB // 2, 30 * MIB),
        lambda: chance.randrange(1, 90 * MIB),
        lambda: chance.choice(EDGES),
    ]
    kinds = chance.sample(kinds, chance.randrange(1, 6))
    held = []
    for number in range(300):
        draw, error = chance.random(), ""
        if draw < 0.01:
            step = "e"
            allocator.empty_cache()
        elif draw < 0.45 and held:
            name, block = held.pop(chance.randrange(len(held)))
            step = f"f {name}"
            allocator.free(block)
        else:
            size = chance.choice(kinds)()
            step = f"a {number} {size}"
            try:
                held.append((number, allocator.allocate(size)))
            except torch.OutOfMemoryError as problem:
                error = str(problem)
        yield step, error


@pytest.mark.parametrize("expandable", [False, True])
def test_every_byte_is_accounted_for_in_a_long_sequence(expandable):
    allocator = CachingAllocator(300 * MIB, expandable_segments=expandable)
    for _ in random_steps(allocator, 5):
        assert_every_byte_is_accounted_for(allocator)


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("capacity", [60 * MIB, 120 * MIB, 300 * MIB])
@pytest.mark.parametrize("seed", range(3))
def test_a_slow_and_obvious_allocator_does_the_same(expandable, capacity, seed):
    obvious = ObviousAllocator(capacity, expandable=expandable)
    allocator = CachingAllocator(capacity, expandable_segments=expandable)
    for step, error in random_steps(allocator, seed):
        what, *which = step.split()
        if what == "a":
            assert obvious.allocate(*map(int, which)) == (error == "")
        elif what == "f":
            obvious.free(*map(int, which))
        else:
            obvious.empty_cache()
        # by pools, because the twin does not know which pool has the lower addresses
        found, expected = (
            sorted(of, key=itemgetter(0)) for of in (layout(allocator), obvious.layout())
        )
        assert found == expected, step


@pytest.mark.parametrize("text", EXPANDABLE)
@pytest.mark.parametrize(("seed", "capacity"), [(0, 64 * MIB + 1000), (5, 300 * MIB)])
def test_pytorchs_compiled_allocator_does_the_same(program, text, seed, capacity):
    """At every step: the error's sentence, all statistics, and each segment's blocks; then, all
    that happened."""
    allocator = CachingAllocator(
        capacity, expandable_segments=EXPANDABLE[text], record_history=True
    )
    done, ours = [], []
    for step, error in random_steps(allocator, seed):
        done.append(step)
        ours.append((error, allocator.memory_stats(), layout(allocator)))
    theirs, history = real_allocator.run(program, "\n".join(done), capacity, text)
    # Since 2.14 the advice to set what is set already is left out.
    advised = real_allocator.version() < (2, 14) or "expandable_segments" not in text
    for number, (mine, real) in enumerate(zip(ours, theirs, strict=True)):
        if not advised:
            mine = (mine[0].partition(" If reserved")[0], *mine[1:])
        assert mine == real, f"step {number}, {done[number]}, of a device of {capacity} bytes"
    [entries] = allocator.snapshot()["device_traces"]
    assert [(entry["action"], entry["size"]) for entry in entries] == history


# ---- on a GPU


def on_a_gpu(asked, text):
    environment = os.environ | {
        "PYTORCH_CUDA_ALLOC_CONF": text,
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    command = [sys.executable, Path(__file__).with_name("gpu_allocator.py")]
    done = subprocess.run(
        command, input=json.dumps(asked), env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def decided_by_addresses(text):
    """Before 2.13 CUDA's addresses decide between free chunks of one size in two segments."""
    if VERSION < (2, 13) and "expandable_segments" not in text:
        pytest.skip(
            "before torch 2.13, addresses that CUDA alone knows decide between chunks of one size"
        )


def without_what_others_hold(text):
    """Return the message without what the device and NVML report about all processes, and without
    its advice."""
    text = text.partition(" If reserved")[0]
    return re.sub(r"GPU 0 has .*?(?=Of the allocated)", "", text)


@pytest.mark.gpu
@pytest.mark.parametrize("text", EXPANDABLE)
@pytest.mark.parametrize("seed", range(3))
def test_on_a_gpu_the_same_sequence_gives_the_same_figures_at_each_moment(text, seed):
    """The process may take about 1 GiB of the device, so that it is full now and then."""
    decided_by_addresses(text)
    total = torch.cuda.get_device_properties(0).total_memory
    fraction = GIB / total
    allocator = CachingAllocator(int(fraction * total), expandable_segments=EXPANDABLE[text])
    done, ours = [], []
    for step, error in random_steps(allocator, seed):
        done.append(step)
        ours.append((error, allocator.memory_stats()))
    found = on_a_gpu({"steps": done, "fraction": fraction}, text)
    assert found["total"] == total
    for number, ((error, figures), (said, theirs)) in enumerate(
        zip(ours, found["said"], strict=True)
    ):
        where = f"step {number}, {done[number]}"
        assert {name: theirs[name] for name in figures} == figures, where
        assert without_what_others_hold(said) == without_what_others_hold(error), where


@pytest.mark.gpu
@pytest.mark.parametrize("text", EXPANDABLE)
def test_on_a_gpu_three_steps_of_a_decoder_reserve_what_the_rules_say(text):
    """What tensors and libraries asked for is replayed; then segments come in the same order, and
    all figures agree."""
    decided_by_addresses(text)
    found = on_a_gpu({"train": True}, text)
    allocator = CachingAllocator(expandable_segments=EXPANDABLE[text], record_history=True)
    what = {"alloc": "birth", "free_completed": "release"}
    allocator.replay(
        (what[action], address, size)
        for action, address, size in found["history"]
        if action in what
    )
    figures = allocator.memory_stats()
    assert {name: found["statistics"][name] for name in figures} == figures
    [entries] = allocator.snapshot()["device_traces"]
    assert [[entry["action"], entry["size"]] for entry in entries] == [
        [action, size] for action, _, size in found["history"] if action != "snapshot"
    ]
