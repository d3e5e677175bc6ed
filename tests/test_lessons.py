"""Claims, pictures, checks and recordings of single lessons.

`make test` also runs the notebooks and compares their tables, figures in words and claims.
"""

import collections
import functools
import inspect
import itertools
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from answers.lesson_08 import HELD, stages
from torch import nn

from course_lib import lessons
from course_lib._torch import is_symbolic
from course_lib.attention import kernels
from course_lib.budget import Recipe, estimate
from course_lib.checkpoint import checkpoint_blocks
from course_lib.distributed import sent_bytes, shapes_of, task_of
from course_lib.labels import chinese
from course_lib.lessons import (
    lesson_01,
    lesson_03,
    lesson_04,
    lesson_05,
    lesson_06,
    lesson_07,
    lesson_08,
    lesson_09,
    text,
)
from course_lib.lessons.lesson_02 import own_code
from course_lib.lessons.lesson_02.figures import _draw_bars
from course_lib.lessons.lesson_03.cuts import least_peak
from course_lib.lessons.lesson_03.figures import live_bytes
from course_lib.lessons.lesson_05 import mean_of_means, ranks
from course_lib.lessons.lesson_05.bugs import PLANTED, correct_loop
from course_lib.lessons.lesson_07.exercises import make_batch, make_model
from course_lib.lessons.lesson_08 import loopback
from course_lib.lessons.lesson_09.exercises import parameters_of
from course_lib.memory import MemoryBudgetExceeded, MemoryMeter, Trace, symbolic
from course_lib.models import Decoder, deep_mlp, random_tokens
from course_lib.offload import DiskStore, HostStore, offload_activations
from course_lib.schedule import (
    Chain,
    Stage,
    frontier,
    recursive,
    simulate,
    sqrt_segments,
    store_all,
)
from course_lib.schedule.rules import segment_schedule
from course_lib.simulated import SimulatedDevice
from course_lib.teaching import claims
from course_lib.teaching.recordings import FOLDER

ROOT = Path(__file__).parents[1]


pytestmark = pytest.mark.usefixtures("fresh")


def test_every_lesson_with_an_idea_tests_claims():
    with_claims = [number for number in lessons.LESSONS if lessons.claims_of(number)]
    assert with_claims == [number for number in lessons.LESSONS if number != "00"]


def test_a_claim_has_a_known_outcome_and_one_figure():
    with pytest.raises(ValueError, match=r"outcome .*'maybe'"):
        claims.Claim("a", "b", "c", "maybe")
    with pytest.raises(ValueError, match=r"figure.* got 1"):
        lessons.what_you_may_have_read("01", "1")


# Pictures
# --------------------------------------------------------------------------------------------------


def draw_runs():
    measured = {"parameter": [3_000_000] * 2, "gradient": [3_000_000] * 2}
    measured["optimizer"] = [6_000_000] * 2
    run = {"mode": "zero1", "ranks": 2, "measured": measured}
    run["communicated"] = {"predicted": 55_000_000, "measured": 55_000_000}
    return lesson_08.draw_ranks({n: stages(*HELD)(6_875_648, n) for n in (1, 8)}, [run])


STOPPED = MemoryBudgetExceeded("mm", 59_000_000, 2_000_000, 60_000_000)
WITHIN = {"budget_bytes": 48_000_000, "taken": [{"peak_bytes": 47_000_000}] * 2}
PARTS = ("parameter", "optimizer", "gradient", "activation", "temporary", "input")
PEAK = dict.fromkeys(PARTS, 10_000_000) | {"gathered": 5_000_000}


@functools.cache
def small_estimate():
    return estimate(small_decoder, functools.partial(small_batch, 0), Recipe())


CUTS = [0, 40, 70, 90, 100]
COSTS = {"standard": (150.0, 16.0), "checkpointed": (109.1, 22.5), "flash": (26.3, 22.5)}


@pytest.mark.parametrize(
    ("draw", "numbers"),
    [
        (
            lambda: _draw_bars(["plain", "each layer"], [1, 1.21], [[1, 1, 1], [1.1, 1.2, 1.5]]),
            [1, 1.21, 1.2, 1.1, 1.5],
        ),
        (
            lambda: lesson_03.draw_rooms({"4 segments": CUTS, "tapered": CUTS}),
            [simulate(segment_schedule(CUTS), Chain.uniform(100, saved_bytes=2)).peak_bytes],
        ),
        (lambda: lesson_06.draw_running([1.0, 1.0, 3.0], [1.0, 2.5, 1.2]), [3.0, 2.5, 1.2]),
        (lambda: lesson_06.draw_errors({"standard": [4e-7, 3e-7, 2e-7, 1e-7]}), [4, 3, 2, 1]),
        (
            lambda: lesson_06.draw_saved(
                [512, 1024], {"standard": [2**20, 2**22], "flash": [8, 16]}
            ),
            [1.048576, 4.194304, 8e-6, 16e-6],
        ),
        (
            lambda: lesson_06.draw_roofline(
                {"A": (312e12, 2e12), "B": (100e12, 1e12)}, {"a": 20.0, "b": 60.0, "c": 400.0}
            ),
            [40, 120, 312, 20, 60, 100],
        ),
        (lambda: lesson_06.draw_peaks(COSTS), [*itertools.chain(*COSTS.values())]),
        (
            lambda: lesson_07.waterfall_picture(
                ["plain"], [small_estimate()], [3_000_000], 200_000, title="budget"
            ),
            [3, 0.2, small_estimate],
        ),
        (draw_runs, [110, 13.75, 12, 55]),
        (lambda: lesson_08.draw_peaks({"one device": PEAK}, "peak"), [10, 15, 65]),
        (lambda: lesson_08.draw_budgets(STOPPED, WITHIN, 60_000_000), [59, 2, 47, 60, 48]),
        (
            lambda: lesson_08.draw_seconds({"fsdp": 12.0, "fsdp-bf16": 8.0}, 1e-3, 12_000),
            [12_000, 12, 8],
        ),
        (
            lambda: lesson_09.draw_techniques({"plain": small_estimate()}, 10_000),
            [0.01, small_estimate],
        ),
        (
            lambda: lesson_09.draw_losses({"plain": [3.0, 2.5], "all three": [3.0, 2.1]}),
            [3.0, 2.5, 2.1],
        ),
    ],
)
def test_a_picture_shows_its_numbers(draw, numbers):
    shown = []
    for ax in draw().axes:
        for line in ax.lines:
            shown += [*line.get_xdata(), *line.get_ydata()]
        for bar in ax.patches:
            shown += [bar.get_width(), bar.get_x() + bar.get_width()]
            shown += [bar.get_height(), bar.get_y() + bar.get_height()]
        shown += [
            y for each in ax.collections for path in each.get_paths() for _, y in path.vertices
        ]
    wanted = [each().peak_bytes / 1e6 if callable(each) else each for each in numbers]
    assert [n for n in wanted if not np.isclose(np.array(shown, float), n, rtol=2e-3).any()] == []


def test_pictures_of_who_holds_what_fill_what_is_held():
    def widths(ax):
        return [patch.get_width() for patch in ax.patches if patch.get_facecolor()[3] > 0]

    assert [sum(widths(ax)) for ax in lesson_08.draw_stages().axes] == [64, 40, 28, 16]
    assert [len(widths(ax)) for ax in lesson_08.draw_collectives().axes] == [16, 4, 16]


def test_recipes_under_two_sliders_name_the_cheapest_that_fits_on_that_machine():
    points, named = lesson_07.stored_estimates(), set()
    for intensity in (20, 100):
        fitting = [each for each in points if each.peak_bytes <= 60e6]
        cheapest = min(fitting, key=lambda each: each.flops + intensity * each.moved_bytes)
        drawn = lesson_07.draw_recipes(points, 60, intensity)
        assert drawn.axes[0].get_title("left") == f"recipe: {cheapest.recipe}"
        named.add(cheapest.recipe)
    assert len(named) == 2
    assert "No recipe fits" in lesson_07.draw_recipes(points, 5).get_suptitle()


@pytest.mark.parametrize(
    ("play", "arguments"),
    [
        (lesson_01.activation_playground, {"sequence": 2048, "layers": 32, "heads": 32}),
        (lambda: lesson_07.recipes_playground([1]), {"budget": 60, "intensity": 100}),
    ],
)
def test_sliders_begin_where_the_picture_does(play, arguments, monkeypatch):
    widgets = pytest.importorskip("ipywidgets")
    shown = []
    monkeypatch.setattr(widgets, "interact", lambda draw, **sliders: shown.append(sliders))
    play()
    assert {name: slider.value for name, slider in shown[0].items()} == arguments


# Lessons 02 and 03
# --------------------------------------------------------------------------------------------------


def test_a_line_that_changes_the_gradients_is_refused():
    pytest.importorskip("transformers")
    lines = ("", "model.lm_head.weight.data.mul_(2)")
    with pytest.raises(ValueError, match=r"got 'model\.lm_head"):
        own_code.measured_lines(lines=lines)


def uneven_chain():
    sizes = [(3, 6, 4, 9, 2, 1), (1, 2, 5, 5, 7, 0), (4, 8, 1, 6, 0, 5), (2, 4, 3, 3, 1, 1)]
    return Chain(tuple(Stage(*each) for each in [*sizes, (5, 9, 2, 8, 3, 2)]), 2)


def all_cuts(depth):
    for inner in itertools.product((False, True), repeat=depth - 1):
        yield [0, *(i for i, cut in enumerate(inner, start=1) if cut), depth]


def test_the_curve_of_a_schedule_has_the_peak_that_the_referee_counts():
    for chain in (Chain.uniform(12, saved_bytes=2), lesson_03.pyramid()):
        for schedule in (store_all(chain), recursive(chain), sqrt_segments(chain)):
            spans, cost = live_bytes(schedule, chain), simulate(schedule, chain)
            assert max(count for _, _, count in spans) == cost.peak_bytes
            assert spans[-1][1] == cost.time
            assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))


def test_there_are_as_many_schedules_as_schroeder_numbers_and_the_referee_admits_each():
    for length, number in enumerate((1, 2, 6, 22, 90), start=1):
        found = {tuple(actions) for actions in lesson_03.every_schedule(0, length - 1)}
        costs = [simulate(actions, Chain.uniform(length)) for actions in found]
        assert len(costs) == number and all(cost.forward_steps >= length for cost in costs)


def test_no_cut_peaks_below_the_least_peak_that_the_check_of_tapered_cuts_knows():
    for depth in range(1, 10):
        chain = Chain.uniform(depth, saved_bytes=2)
        peaks = [simulate(segment_schedule(cuts), chain).peak_bytes for cuts in all_cuts(depth)]
        assert least_peak(depth) == 100_000 * min(peaks)


def test_the_best_cut_for_each_start_of_the_last_segment_is_the_best_of_all_cuts():
    for chain in (uneven_chain(), lesson_03.pyramid()):
        by_last = collections.defaultdict(list)
        for cuts in all_cuts(len(chain)):
            by_last[cuts[-2]].append(simulate(segment_schedule(cuts), chain))
        wanted = [
            (min(c.peak_bytes for c in by_last[k]), by_last[k][0].time) for k in range(len(chain))
        ]
        assert [(cost.peak_bytes, cost.time) for cost in lesson_03.best_cuts(chain)] == wanted


def test_the_frontier_with_early_stop_is_the_frontier_where_nothing_is_left_out():
    chain = uneven_chain()
    found = lesson_03.frontier_with_early_stop(chain, [0] * 5, step_bytes=1)
    wanted = [(cost.peak_bytes, cost.time) for cost in frontier(chain)]
    assert [(cost.peak_bytes, cost.time) for cost in found] == wanted


# Lesson 04
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [(11.16e9, 2, False), (0.85e9, 2, True)])  # two of nine
def test_what_was_recorded_of_the_decoder_on_the_simulated_device_comes_again(lanes):
    found, recorded = lesson_04.simulated_decoder(*lanes), lesson_04.RECORDED[lanes]
    assert found.above_bytes == recorded.above_bytes
    assert found.seconds == pytest.approx(recorded.seconds, rel=1e-4)


def test_a_peak_of_an_optimizers_step_that_its_check_knows_is_measured():
    assert lesson_04.step_peak(16) == lesson_04.STEP_PEAKS[16]


@pytest.mark.parametrize(("copy", "p"), [(0.5, 0), (2, 1)])
def test_the_clock_is_that_of_a_larger_chain_with_the_same_ratios(copy, p):
    rows, width, flops = 64, 24, 1e9
    forward = 2 * rows * width**2 / flops
    links = ("up_bytes_per_second", "down_bytes_per_second")
    rates = dict.fromkeys(links, 4 * rows * width / (copy * forward))
    with SimulatedDevice(flops_per_second=flops, **rates) as device:
        network, x = device.move(deep_mlp(16, width)), device.move(torch.ones(rows, width))
        began = device.seconds
        with offload_activations(HostStore(), min_bytes=1, prefetch=p):
            loss = network(x).sum()
        loss.backward()
    assert (device.seconds - began) / forward == pytest.approx(lesson_04.clock(16, copy, p))


def test_offload_copies_all_storages_except_the_last_ones():
    """Section 4.2: 31, 30 and 29 of 32 storages for p = 0, 1 and 2."""
    x, copied = torch.ones(64, 16), []
    for p in (0, 1, 2):
        with offload_activations(store := HostStore(), min_bytes=1, prefetch=p):
            deep_mlp(16, 16)(x.clone()).sum().backward()
        copied.append(store.stats.bytes_down // x.nbytes)
    assert copied == [31, 30, 29]


@pytest.mark.parametrize(("layers", "batch"), [(8, 8), (16, 8), (8, 64)])
def test_offloaded_inputs_of_checkpoints_lower_the_peak_of_many_tokens_only(layers, batch):
    """Section 4.7, with 4 and with 32 tokens per hidden unit; the limit is about 12."""
    peaks = []
    for context in (nullcontext(), offload_activations(DiskStore(), min_bytes=1024, prefetch=1)):
        decoder = Decoder(vocabulary=256, hidden=64, heads=4, layers=layers, sequence=32)
        checkpoint_blocks(decoder, "layers.*")
        with MemoryMeter(decoder) as meter:
            with context:
                loss = decoder.loss(random_tokens(batch, 32, 256))
            loss.backward()
        peaks.append(meter.peak_bytes)
    assert peaks[0] == peaks[1] if batch == 8 else peaks[1] < 0.93 * peaks[0]


def test_the_recorded_gpu_step_is_at_the_threshold_of_its_link():
    """Section 4.21: a step of a sixteenth of all sizes, at the recorded link and rate."""
    recorded = json.loads((FOLDER / "nvidia-h200.json").read_text())
    recorded = recorded["experiments"]["04"]["offloaded_activations"]
    seconds = {key: value for key, value in recorded["figures"].items() if "seconds" in key}
    plain = seconds["plain_seconds"]
    assert round(seconds["offloaded_seconds"] / plain, 2) == 1.33
    assert round(seconds["save_on_cpu_seconds"] / plain, 2) == 1.95
    link, found = recorded["link_bytes_per_second"]["down"], []
    assert link == 55.2e9
    for context in (nullcontext(), offload_activations(store := HostStore(), min_bytes=1024)):
        rates = dict.fromkeys(("up_bytes_per_second", "down_bytes_per_second"), link)
        with SimulatedDevice(flops_per_second=43.66e12 / 16, **rates) as device:
            decoder = Decoder(
                vocabulary=512, hidden=128, heads=16, layers=8, sequence=128, fused=True
            )
            decoder, tokens = device.move(decoder), device.move(random_tokens(4, 128, 512))
            began = device.seconds
            with context:
                loss = decoder.loss(tokens)
            forward = device.seconds - began
            loss.backward()
        found.append((256 * (device.seconds - began), 256 * forward))
    assert found[0] == pytest.approx((plain, plain / 3), rel=0.01)
    assert round(found[1][0] / found[0][0], 2) == 1.37
    assert round(256 * store.stats.bytes_down / 1e9, 1) == 8.7
    assert 8.7e9 / link == pytest.approx(plain / 3, rel=0.01)


# Lesson 05
# --------------------------------------------------------------------------------------------------


def no_division(model, loss_sum, micro_batches, each):
    for number, micro_batch in enumerate(micro_batches, start=1):
        with nullcontext() if each or number == len(micro_batches) else model.no_sync():
            loss_sum(model, micro_batch)[0].backward()


def test_on_ranks_counts_reduced_bytes_and_the_gradient_error():
    found = lesson_05.on_ranks(no_division, micro_batches=3)
    once = found["parameters"]
    assert (found["last"], found["library"], found["each"]) == (once, once, 3 * once)
    # the ranks have 48 and 30 tokens, and DDP divides the sum of their gradients by 2
    assert found["error"] == pytest.approx(78 / 2 - 1, rel=1e-4)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks processes")
def test_forked_ranks_report_the_output_of_the_first_that_failed(capfd, monkeypatch, tmp_path):
    def fail(folder, name, micro_batches, processes, rank):
        if rank:
            raise ArithmeticError(f"{rank} gives up")

    monkeypatch.setattr(ranks, "_on_rank", fail)
    with capfd.disabled(), pytest.raises(SystemExit) as end:
        ranks._fork_ranks(str(tmp_path), "step", 1, 3)
    output = str(end.value)
    assert "Process rank 1:" in output and "1 gives up" in output and "rank 2" not in output


THREADS_AT_THE_END = """
import runpy, sys
from pathlib import Path
sys.argv = ['ranks', sys.argv[1], 'no_division', '2', '1', '0']
runpy.run_module('course_lib.lessons.lesson_05.ranks', run_name='__main__')
names = [(thread / 'comm').read_text() for thread in Path('/proc/self/task').iterdir()]
print([name for name in names if 'gloo' in name])
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's list of threads")
def test_a_process_leaves_no_thread_of_its_group_to_the_interpreters_end(tmp_path):
    (tmp_path / "step.py").write_text(inspect.getsource(no_division))
    done = subprocess.run(
        [sys.executable, "-c", THREADS_AT_THE_END, tmp_path],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_the_text_is_ascii_without_padding_in_it_and_has_its_licences():
    assert 0 not in "".join(text.code() + text.prose()).encode("ascii")
    assert text.pad_texts(["ab", "abcd"], most=3).tolist() == [[97, 98, 0], [97, 98, 99]]
    for name, licence in (("prose", "CC-BY-4.0"), ("code", "Apache-2.0")):
        file = Path(text.__file__).with_name(f"LICENSE.{name}.txt")
        assert f"SPDX-License-Identifier: {licence}" in file.read_text()


def test_a_loop_leaves_the_librarys_weights_only_without_a_bug():
    assert lesson_05.same_weights_as_library(correct_loop)
    assert [bug for bug, loop in PLANTED.items() if lesson_05.same_weights_as_library(loop)] == []


def test_a_recorded_run_is_made_again_by_its_script():
    recorded = lesson_05.load_record()["runs"]["2"]["mean of means"]
    found = mean_of_means.train("mean of means", seed=2, steps=20)
    torch.testing.assert_close(found, recorded[:2], atol=0.01, rtol=0)


# Lesson 07
# --------------------------------------------------------------------------------------------------


def test_every_field_of_a_recipe_is_explained():
    assert lesson_07.FIELDS.keys() == Recipe().__dict__.keys()
    assert [name for name, said in lesson_07.FIELDS.items() if chinese(said) is None] == []


def test_stored_estimates_are_those_that_the_library_makes():
    stored = lesson_07.stored_estimates()
    assert len({each.recipe for each in stored}) == len(stored)
    for each in stored[5::40]:
        found = estimate(make_model, make_batch, each.recipe)
        assert (found.peak_bytes, found.flops, found.moved_bytes) == each[1:]


# Lesson 08
# --------------------------------------------------------------------------------------------------


def test_collectives_within_one_process_are_those_of_the_framework_and_count_as_it_counts():
    wire, tensors = lesson_08.Wire(), [torch.arange(8.0) + rank for rank in range(4)]
    parts = wire.reduce_scatter(tensors)
    assert torch.equal(torch.cat(parts), sum(tensors)) and wire.sent_bytes == 32
    assert all(torch.equal(each, sum(tensors)) for each in wire.all_gather(parts))
    assert wire.sent_bytes == 64
    assert all(torch.equal(each, sum(tensors)) for each in wire.all_reduce(tensors))
    assert wire.sent_bytes == 128
    with pytest.raises(AttributeError):
        wire.sent_bytes += 1


def test_a_rank_s_own_wire_gives_what_lists_of_all_ranks_give():
    shards = torch.arange(24.0).view(8, 3).chunk(4)
    gradients = [torch.full((8, 3), float(r)).cos() for r in range(4)]
    everyone = lesson_08.Wire()
    sums, whole = everyone.reduce_scatter(gradients), everyone.all_gather(shards)[0]
    for rank in range(4):
        wire = lesson_08.RankWire(rank, shards, gradients)
        assert torch.equal(wire.all_gather(shards[rank]), whole)
        assert torch.allclose(wire.reduce_scatter(gradients[rank]), sums[rank])
        assert wire.sent_bytes == everyone.sent_bytes
        with pytest.raises(ValueError, match="shard must be this rank's"):
            wire.all_gather(whole)
        with pytest.raises(ValueError, match="tensor must be the whole gradient"):
            wire.reduce_scatter(shards[rank])
        assert torch.allclose(wire.all_reduce(gradients[rank]), sum(gradients))
        assert wire.sent_bytes == 2 * everyone.sent_bytes


@pytest.mark.parametrize("ranks", [2, 4])
def test_recorded_bytes_are_those_of_a_ring_except_for_reduce_scatter(ranks):
    recorded, shapes = lesson_08.RECORDED[ranks], shapes_of(task_of().make_model())
    share, close = (ranks - 1) / ranks, functools.partial(pytest.approx, rel=5e-3)
    for mode in ("ddp", "zero1", "fsdp"):
        # with fsdp once more: gloo sends the whole sum of a reduce-scatter
        scattered = 4 * shapes.numbers if mode == "fsdp" else 0
        assert recorded[mode] == close(share * (sent_bytes(shapes, mode, ranks) + scattered))
    assert recorded["reduce_scatter"] == close(recorded["all_reduce"])
    assert recorded["all_gather"] == close(share * lesson_08.TENSOR_BYTES)


def test_splits_send_out_of_a_machine_what_rings_send_step_by_step():
    shapes, gpus = lesson_08.seventy_billion(), range(64)
    across = [[gpus[first::8], 8] for first in range(8)]  # one GPU of each machine
    ways = [
        ([[gpus, 1]], sent_bytes(shapes, "fsdp", 64)),
        (across, 2 * shapes.updated_bytes),
        (across, sent_bytes(shapes, "fsdp", 8)),
    ]
    found = lesson_08.compare_splits(shapes, 50e9).data.iloc[:, 2:].values.tolist()
    for row, (rings, given) in zip(found, ways, strict=True):
        out = collections.Counter()
        for ring, parts in rings:
            for _ in ring[1:]:  # steps, in each of which every GPU sends a chunk to the next one
                for sender, receiver in zip(ring, (*ring[1:], ring[0]), strict=True):
                    if sender // 8 != receiver // 8:
                        out[sender // 8] += given / parts / len(ring)
        assert len(set(map(round, out.values()))) == 1 and len(out) == 8
        seconds = out[0] / 50e9
        assert row == [f"{value:.1f}" for value in (out[0] / 1e9, seconds, seconds / 8)]


def test_an_empty_network_namespace_counts_an_all_gather():
    try:
        found = loopback.bytes_sent(2, ["all_gather"])
    except RuntimeError as error:
        pytest.skip(f"{error}"[:200])
    assert found["all_gather"] == pytest.approx(lesson_08.TENSOR_BYTES / 2, rel=0.02)


def test_where_no_namespace_can_be_made_it_says_so(monkeypatch, tmp_path):
    forbidden = tmp_path / "forbidden"
    forbidden.touch(mode=0o644)
    for program in ("no such program", str(forbidden)):
        monkeypatch.setattr(loopback, "_EMPTY", [program])
        with pytest.raises(RuntimeError, match="network namespace"):
            loopback.bytes_sent(2)


@pytest.mark.parametrize(("interpreted", "gpu"), [(False, False), (True, False), (False, True)])
def test_compiled_triton_without_gpu_says_to_restart_the_kernel(monkeypatch, interpreted, gpu):
    pytest.importorskip("triton")
    monkeypatch.setattr(kernels, "INTERPRETED", interpreted)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    if interpreted or gpu:
        assert lesson_06.triton_here()[0].__name__ == "triton"
    else:
        with pytest.raises(RuntimeError, match=r"(?s)restart the kernel.*请重启内核"):
            lesson_06.triton_here()


@pytest.mark.parametrize(("new", "correct"), [("largest", False), ("tl.maximum(largest)", None)])
def test_kernel_check_without_triton_judges_no_answer_except_a_stub(monkeypatch, new, correct):
    monkeypatch.setitem(sys.modules, "triton", None)
    source = f"def fold(largest): return tl.exp({new})\ndef run(q, k, v): return q, q[:, 0]"
    exec(source, cell := {"tl": None})
    assert lesson_06.check_kernel(cell["run"]).correct is correct


def test_the_adam_of_the_exercise_is_the_framework_s():
    weight, ours = torch.nn.Parameter(torch.linspace(-1, 1, 8)), lesson_08.Adam()
    adam, piece = torch.optim.Adam([weight], lr=1e-3), weight.detach().clone()
    for step in range(3):
        weight.grad = torch.linspace(-1, step, 8).sin()
        piece = ours(piece, weight.grad)
        adam.step()
        assert torch.allclose(piece, weight, atol=1e-6)
    assert ours.state_bytes == 2 * 8 * 4


# Lesson 09
# --------------------------------------------------------------------------------------------------


def small_decoder():
    return Decoder(vocabulary=32, hidden=16, heads=2, layers=3, sequence=8)


def small_batch(step):
    return random_tokens(4, 8, 32, seed=step)


def table_and_head():
    return nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 32))


def sum_of_losses(model, tokens):
    logits, targets = model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
    return nn.functional.cross_entropy(logits, targets, reduction="sum"), targets.numel()


def looks_at_real_tokens(model, tokens):
    """Runs one operator more on real values, and takes more memory for it."""
    if not is_symbolic(model[1].weight):
        tokens.tile(1000)
    return sum_of_losses(model, tokens)


def weight_of_numpy(model, batch):
    total, weight = model.loss_sum(batch)
    return total, np.int64(weight)


@pytest.mark.parametrize(
    ("slots", "told"),
    [
        (
            {"make_model": table_and_head, "loss_sum": looks_at_real_tokens},
            "`aten.slice.Tensor` was predicted",
        ),
        ({}, "3 blocks from `layers.0` on"),
        ({"loss_sum": weight_of_numpy}, "3 blocks from `layers.0` on"),
        ({"make_model": table_and_head, "loss_sum": sum_of_losses}, "No list of equal blocks"),
        ({"make_model": lambda: None}, "Not answered yet"),
        ({"loss_sum": lambda model, batch: None}, "Not answered yet"),
        ({"make_model": lambda: nn.ReLU()}, "trainable parameters"),
        ({"make_model": functools.cache(small_decoder)}, "the same model twice"),
        ({"make_batch": lambda step: 3}, "must return one tensor"),
        ({"make_batch": lambda step: small_batch(0)}, "the same batch for steps 0 and 1"),
        ({"make_batch": lambda step: small_batch(step) + 30}, "the embedding has only"),
        ({"make_batch": lambda step: (small_batch(step), torch.ones(3))}, "different numbers of"),
        ({"loss_sum": lambda m, b: (m.loss(b), b[:, 1:].numel())}, "The sums that"),
        ({"loss_sum": lambda m, b: (m.loss_sum(b)[0], 1)}, "The weights that"),
        ({"loss_sum": lambda m, b: m.loss(b)}, "must return a pair"),
        ({"make_model": small_decoder()}, "`make_model` must be a function"),
        ({"make_batch": {}}, "`make_batch` must be a function"),
        ({"loss_sum": 3}, "`loss_sum` must be a function"),
        ({"make_model": lambda: small_decoder().bfloat16()}, "a model in fp32"),
        (
            {"make_model": lambda: nn.Linear(8, 8), "make_batch": lambda step: torch.rand(4, 8)},
            "write `loss_sum`",
        ),
    ],
)
def test_what_is_wrong_with_a_slot_is_said(slots, told):
    given = {"make_model": small_decoder, "make_batch": small_batch} | slots
    assert told in lesson_09.check_slots(*given.values()).message


def test_the_first_operator_that_holds_other_bytes_is_named():
    def trace(*live):
        operators = [("entry", "forward"), ("mm", "forward"), ("sum", "backward")]
        return Trace(operators[: len(live)], np.array([[count] for count in live]))

    told = lesson_09.first_difference(trace(8, 16, 32), trace(8, 24, 40))
    assert "`mm`, 16 live bytes were predicted, but 24 were" in told
    assert "the same 1 operators" in lesson_09.first_difference(trace(8, 16), trace(8, 16, 32))


@pytest.mark.parametrize("name", ["llama.json", "llama_3_8b.json"])
def test_parameters_by_hand_are_those_of_the_models(name):
    transformers = pytest.importorskip("transformers")
    config = json.loads((lesson_09.FOLDER / name).read_text("utf-8"))
    with symbolic():
        config_of_model = transformers.AutoConfig.for_model(**config)
        model = transformers.AutoModelForCausalLM.from_config(config_of_model)
    assert parameters_of(config) == sum(p.numel() for p in model.parameters())
