"""Claims, pictures, checks and recordings of single lessons.

`make test` also runs the notebooks and compares their tables, claims and descriptions of figures.
"""

import collections
import functools
import inspect
import itertools
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from answers.lesson_08 import HELD, stages
from torch import nn

from course_lib._torch.symbolic import is_symbolic
from course_lib.attention import kernels
from course_lib.budget import Recipe, estimate
from course_lib.distributed import sent_bytes, shapes_of, task_of
from course_lib.labels import chinese
from course_lib.lessons.lesson_02 import own_code
from course_lib.lessons.lesson_02.figures import _draw_bars
from course_lib.lessons.lesson_03 import exercises as exercises_03
from course_lib.lessons.lesson_03 import figures as figures_03
from course_lib.lessons.lesson_03 import frontiers as frontiers_03
from course_lib.lessons.lesson_03.exercises import least_peak
from course_lib.lessons.lesson_03.figures import live_bytes
from course_lib.lessons.lesson_04 import exercises as exercises_04
from course_lib.lessons.lesson_04 import gpu as gpu_04
from course_lib.lessons.lesson_04 import simulation as simulation_04
from course_lib.lessons.lesson_04 import steps as steps_04
from course_lib.lessons.lesson_05 import mean_of_means, ranks
from course_lib.lessons.lesson_05 import results as results_05
from course_lib.lessons.lesson_05.bugs import PLANTED, correct_loop
from course_lib.lessons.lesson_06 import exercises as exercises_06
from course_lib.lessons.lesson_06 import figures as figures_06
from course_lib.lessons.lesson_07 import figures as figures_07
from course_lib.lessons.lesson_07 import grid as grid_07
from course_lib.lessons.lesson_07.exercises import make_batch, make_model
from course_lib.lessons.lesson_08 import figures as figures_08
from course_lib.lessons.lesson_08 import large as large_08
from course_lib.lessons.lesson_08 import loopback
from course_lib.lessons.lesson_08 import schemes as schemes_08
from course_lib.lessons.lesson_08 import wire as wire_08
from course_lib.lessons.lesson_09 import figures as figures_09
from course_lib.lessons.lesson_10 import slots as slots_10
from course_lib.memory import MemoryBudgetExceeded, Trace
from course_lib.models import Decoder, deep_mlp, random_tokens
from course_lib.offload import HostStore, offload_activations
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
from course_lib.teaching.recordings import FOLDER

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.usefixtures("fresh")


# Pictures
# --------------------------------------------------------------------------------------------------


def draw_runs():
    measured = {
        "parameter": [3_000_000] * 2,
        "gradient": [3_000_000] * 2,
        "optimizer": [6_000_000] * 2,
    }
    run = {
        "mode": "zero1",
        "ranks": 2,
        "measured": measured,
        "communicated": {"predicted": 55_000_000, "measured": 55_000_000},
    }
    return figures_08.draw_ranks({n: stages(*HELD)(6_875_648, n) for n in (1, 8)}, [run])


STOPPED = MemoryBudgetExceeded("mm", 59_000_000, 2_000_000, 60_000_000)
WITHIN = {"budget_bytes": 48_000_000, "taken": [{"peak_bytes": 47_000_000}] * 2}
PARTS = ("parameter", "optimizer", "gradient", "activation", "temporary", "input")
PEAK = dict.fromkeys(PARTS, 10_000_000) | {"gathered": 5_000_000}


@functools.cache
def small_estimate():
    return estimate(small_decoder, functools.partial(small_batch, 0), Recipe())


CUTS = [0, 40, 70, 90, 100]
COSTS = {"standard": (150.0, 16.0), "checkpointed": (109.1, 22.5), "flash": (26.3, 22.5)}


#: picture -> (function that draws it, numbers that it must show)
PICTURES = {
    "checkpoint costs": (
        lambda: _draw_bars(["plain", "each layer"], [1, 1.21], [[1, 1, 1], [1.1, 1.2, 1.5]]),
        [1, 1.21, 1.2, 1.1, 1.5],
    ),
    "segments": (
        lambda: figures_03.draw_budgets({"4 segments": CUTS, "tapered": CUTS}),
        [simulate(segment_schedule(CUTS), Chain.uniform(100, saved_bytes=2)).peak_bytes],
    ),
    "online softmax": (
        lambda: figures_06.draw_running([1.0, 1.0, 3.0], [1.0, 2.5, 1.2]),
        [3.0, 2.5, 1.2],
    ),
    "saved bytes": (
        lambda: figures_06.draw_saved([512, 1024], {"standard": [2**20, 2**22], "flash": [8, 16]}),
        [1.048576, 4.194304, 8e-6, 16e-6],
    ),
    "roofline": (
        lambda: figures_06.draw_roofline(
            {"A": (312e12, 2e12), "B": (100e12, 1e12)}, {"a": 20.0, "b": 60.0, "c": 400.0}
        ),
        [40, 120, 312, 20, 60, 100],
    ),
    "attention peaks": (lambda: figures_06.draw_peaks(COSTS), [*itertools.chain(*COSTS.values())]),
    "waterfall": (
        lambda: figures_07.waterfall_picture(
            ["plain"], [small_estimate()], [3_000_000], 200_000, title="budget"
        ),
        [3, 0.2, small_estimate],
    ),
    "ranks": (draw_runs, [110, 13.75, 12, 55]),
    "rank peaks": (lambda: figures_08.draw_peaks({"one device": PEAK}, "peak"), [10, 15, 65]),
    "budgets": (
        lambda: figures_08.draw_budgets(STOPPED, WITHIN, 60_000_000),
        [59, 2, 47, 60, 48],
    ),
    "machines": (
        lambda: large_08.draw_machines(
            lambda machines, tokens, _: tokens / machines, dict.fromkeys((8, 1)), {8: 9, 1: 70}
        ),
        [9, 70, 154, 77],
    ),
    "techniques": (
        lambda: figures_09.draw_techniques({"plain": small_estimate()}, 10_000),
        [0.01, small_estimate],
    ),
}


@pytest.mark.parametrize(("draw", "numbers"), PICTURES.values(), ids=PICTURES)
def test_lesson_plot_shows_expected_numbers(draw, numbers):
    shown = []
    for ax in draw().axes:
        for line in ax.lines:
            shown += [*line.get_xdata(), *line.get_ydata()]
        for bar in ax.patches:
            shown += [
                bar.get_width(),
                bar.get_x() + bar.get_width(),
                bar.get_height(),
                bar.get_y() + bar.get_height(),
            ]
        shown += [
            y for each in ax.collections for path in each.get_paths() for _, y in path.vertices
        ]
    wanted = [each().peak_bytes / 1e6 if callable(each) else each for each in numbers]
    assert [n for n in wanted if not np.isclose(np.array(shown, float), n, rtol=2e-3).any()] == []


def test_sharding_plots_fill_area_proportional_to_bytes_per_rank():
    def widths(ax):
        return [patch.get_width() for patch in ax.patches if patch.get_facecolor()[3] > 0]

    assert [sum(widths(ax)) for ax in schemes_08.draw_stages().axes] == [64, 40, 28, 16]
    assert [len(widths(ax)) for ax in schemes_08.draw_collectives().axes] == [16, 4, 16]


def test_recipe_plot_names_cheapest_fitting_recipe():
    points, named = grid_07.stored_estimates(), set()
    for intensity in (20, 100):
        fitting = [each for each in points if each.peak_bytes <= 60e6]
        cheapest = min(fitting, key=lambda each: each.flops + intensity * each.moved_bytes)
        drawn = figures_07.draw_recipes(points, 60, intensity)
        assert drawn.axes[0].get_title("left") == f"recipe: {cheapest.recipe}"
        named.add(cheapest.recipe)
    assert len(named) == 2
    assert "No recipe fits" in figures_07.draw_recipes(points, 5).get_suptitle()


# Lessons 02 and 03
# --------------------------------------------------------------------------------------------------


def test_measurement_of_code_lines_rejects_line_that_changes_gradients(monkeypatch):
    pytest.importorskip("transformers")
    one = {name: each[:1] for name, each in own_code.llama_batch().items()}
    monkeypatch.setattr(own_code, "llama_batch", lambda: one)
    lines = ("", "model.lm_head.weight.data.mul_(2)")
    with pytest.raises(ValueError, match=r"but 'model\.lm_head"):
        own_code.measured_lines(lines=lines)


def uneven_chain():
    sizes = [(3, 6, 4, 9, 2, 1), (1, 2, 5, 5, 7, 0), (4, 8, 1, 6, 0, 5), (2, 4, 3, 3, 1, 1)]
    return Chain(tuple(Stage(*each) for each in [*sizes, (5, 9, 2, 8, 3, 2)]), 2)


def all_cuts(depth):
    for inner in itertools.product((False, True), repeat=depth - 1):
        yield [0, *(i for i, cut in enumerate(inner, start=1) if cut), depth]


def test_schedule_memory_curve_has_peak_and_duration_of_simulation():
    for chain in (Chain.uniform(12, saved_bytes=2), exercises_03.pyramid()):
        for schedule in (store_all(chain), recursive(chain), sqrt_segments(chain)):
            spans, cost = live_bytes(schedule, chain), simulate(schedule, chain)
            assert max(count for _, _, count in spans) == cost.peak_bytes
            assert spans[-1][1] == cost.time
            assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))


def test_number_of_valid_schedules_equals_schroeder_numbers():
    for length, number in enumerate((1, 2, 6, 22, 90), start=1):
        found = {tuple(actions) for actions in exercises_03.every_schedule(0, length - 1)}
        costs = [simulate(actions, Chain.uniform(length)) for actions in found]
        assert len(costs) == number and all(cost.forward_steps >= length for cost in costs)


def test_least_peak_of_segmented_chain_equals_minimum_over_all_segmentations():
    for depth in range(1, 10):
        chain = Chain.uniform(depth, saved_bytes=2)
        peaks = [simulate(segment_schedule(cuts), chain).peak_bytes for cuts in all_cuts(depth)]
        assert least_peak(depth) == 100_000 * min(peaks)


def test_best_segmentation_per_last_boundary_equals_exhaustive_search():
    for chain in (uneven_chain(), exercises_03.pyramid()):
        by_last = collections.defaultdict(list)
        for cuts in all_cuts(len(chain)):
            by_last[cuts[-2]].append(simulate(segment_schedule(cuts), chain))
        wanted = [
            (min(c.peak_bytes for c in by_last[k]), by_last[k][0].time) for k in range(len(chain))
        ]
        assert [(cost.peak_bytes, cost.time) for cost in frontiers_03.best_cuts(chain)] == wanted


def test_pareto_frontier_with_zero_early_stop_savings_equals_standard_frontier():
    chain = uneven_chain()
    found = frontiers_03.frontier_with_early_stop(chain, [0] * 5, step_bytes=1)
    wanted = [(cost.peak_bytes, cost.time) for cost in frontier(chain)]
    assert [(cost.peak_bytes, cost.time) for cost in found] == wanted


# Lesson 04
# --------------------------------------------------------------------------------------------------


def test_simulated_decoder_step_takes_recorded_seconds():
    lanes = 0.85e9, 2, True  # one of nine
    found = simulation_04.decoder_seconds(*lanes)
    assert found == pytest.approx(simulation_04.RECORDED[lanes], rel=1e-4)


def test_stored_peak_of_optimizer_step_equals_measured_peak():
    assert steps_04.step_peak(16) == exercises_04.STEP_PEAKS[16]


@pytest.mark.parametrize(("copy", "p"), [(0.5, 0), (2, 1)])
def test_offload_time_formula_equals_simulated_device_time(copy, p):
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
    assert (device.seconds - began) / forward == pytest.approx(simulation_04.clock(16, copy, p))


@pytest.mark.parametrize(("layers", "change"), [(8, -0.149), (32, -0.211)])
def test_offloading_checkpoint_inputs_lowers_peak_of_frozen_layers(layers, change):
    """Section 4.7: 15% and 21% with 4 tokens per hidden unit."""
    alone, both = (steps_04.checkpointed_peak(layers, 4, p, frozen=True) for p in (None, 1))
    assert both / alone - 1 == pytest.approx(change, abs=0.001)


def test_simulated_small_step_takes_the_times_recorded_on_h200():
    """Section 4.9: the recorded step, and a step of a sixteenth of all sizes."""
    recorded = gpu_04.recorded_on_h200()
    plain, link = recorded["plain_seconds"], recorded["link"]
    assert round(recorded["offloaded_seconds"] / plain, 2) == 1.33
    assert round(recorded["save_on_cpu_seconds"] / plain, 2) == 1.95
    flops, moved, saved = simulation_04.count_forward()
    rate = 3 * flops / plain
    assert (round(rate / link), round(flops / moved)) == (791, 793)
    assert plain + 2 * saved / link == pytest.approx(recorded["save_on_cpu_seconds"], rel=0.04)
    for ahead, time in ((2, 1.37), (8, 1.01)):
        device, began, _ = simulation_04.small_decoder(rate, link, ahead)
        assert 256 * (device.seconds - began) / plain == pytest.approx(time, abs=0.005)


def test_h200_settings_equal_table_of_gpu_page():
    page = (FOLDER.parents[1] / "docs" / "gpus.md").read_text("utf-8")
    rows = re.findall(r"^\| ([123]) \|((?: [\d.]+, [\d.]+ \|){3})$", page, re.M)
    found = {
        (int(in_flight), p): float(pair.split(",")[1])
        for in_flight, pairs in rows
        for p, pair in enumerate(pairs.strip(" |").split("|"), start=1)
    }
    assert found == simulation_04.ON_H200


# Lesson 05
# --------------------------------------------------------------------------------------------------


def no_division(model, loss_sum, micro_batches, each):
    for number, micro_batch in enumerate(micro_batches, start=1):
        with nullcontext() if each or number == len(micro_batches) else model.no_sync():
            loss_sum(model, micro_batch)[0].backward()


def test_rank_results_report_reduced_bytes_and_error_of_undivided_gradients():
    found = results_05.on_ranks(no_division, micro_batches=3)
    once = found["parameters"]
    assert (found["last"], found["library"], found["each"]) == (once, once, 3 * once)
    # the ranks have 48 and 30 tokens, and DDP divides the sum of their gradients by 2
    assert found["error"] == pytest.approx(78 / 2 - 1, rel=1e-4)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks processes")
def test_forked_ranks_error_contains_only_output_of_first_failed_rank(capfd, monkeypatch, tmp_path):
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
def test_finished_rank_leaves_no_process_group_threads_running(tmp_path):
    (tmp_path / "step.py").write_text(inspect.getsource(no_division))
    done = subprocess.run(
        [sys.executable, "-c", THREADS_AT_THE_END, tmp_path],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_correct_accumulation_loop_matches_library_weights_but_buggy_loops_differ():
    assert results_05.same_weights_as_library(correct_loop)
    assert [bug for bug, loop in PLANTED.items() if results_05.same_weights_as_library(loop)] == []


def test_training_script_reproduces_first_recorded_losses():
    recorded = mean_of_means.load_record()["runs"]["2"]["mean of means"]
    found = mean_of_means.train("mean of means", seed=2, steps=20)
    torch.testing.assert_close(found, recorded[:2], atol=0.01, rtol=0)


# Lesson 07
# --------------------------------------------------------------------------------------------------


def test_every_recipe_field_has_explanation_in_both_languages():
    assert figures_07.FIELDS.keys() == Recipe().__dict__.keys()
    assert [name for name, words in figures_07.FIELDS.items() if chinese(words) is None] == []


def test_stored_estimates_equal_library_estimates():
    stored = grid_07.stored_estimates()
    assert len({each.recipe for each in stored}) == len(stored)
    for each in stored[5::40]:
        found = estimate(make_model, make_batch, each.recipe)
        assert (found.peak_bytes, found.flops, found.moved_bytes) == each[1:]


# Lesson 08
# --------------------------------------------------------------------------------------------------


def test_simulated_collectives_return_correct_tensors_and_count_sent_bytes():
    wire, tensors = wire_08.Wire(), [torch.arange(8.0) + rank for rank in range(4)]
    parts = wire.reduce_scatter(tensors)
    assert torch.equal(torch.cat(parts), sum(tensors)) and wire.sent_bytes == 32
    assert all(torch.equal(each, sum(tensors)) for each in wire.all_gather(parts))
    assert wire.sent_bytes == 64
    assert all(torch.equal(each, sum(tensors)) for each in wire.all_reduce(tensors))
    assert wire.sent_bytes == 128
    with pytest.raises(AttributeError):
        wire.sent_bytes += 1


def test_collectives_of_one_simulated_rank_equal_those_of_all_ranks():
    shards = torch.arange(24.0).view(8, 3).chunk(4)
    gradients = [torch.full((8, 3), float(r)).cos() for r in range(4)]
    everyone = wire_08.Wire()
    sums, whole = everyone.reduce_scatter(gradients), everyone.all_gather(shards)[0]
    for rank in range(4):
        wire = wire_08.RankWire(rank, shards, gradients)
        assert torch.equal(wire.all_gather(shards[rank]), whole)
        assert torch.allclose(wire.reduce_scatter(gradients[rank]), sums[rank])
        assert wire.sent_bytes == everyone.sent_bytes
        with pytest.raises(ValueError, match="shard must be the shard of this rank"):
            wire.all_gather(whole)
        with pytest.raises(ValueError, match="tensor must be the whole gradient"):
            wire.reduce_scatter(shards[rank])
        assert torch.allclose(wire.all_reduce(gradients[rank]), sum(gradients))
        assert wire.sent_bytes == 2 * everyone.sent_bytes


@pytest.mark.parametrize("ranks", [2, 4])
def test_recorded_traffic_equals_ring_formula_except_for_gloo_reduce_scatter(ranks):
    recorded, shapes = wire_08.RECORDED[ranks], shapes_of(task_of().make_model())
    share, close = (ranks - 1) / ranks, functools.partial(pytest.approx, rel=5e-3)
    for mode in ("ddp", "zero1", "fsdp"):
        # with fsdp once more: gloo sends the whole sum of a reduce-scatter
        scattered = 4 * shapes.numbers if mode == "fsdp" else 0
        assert recorded[mode] == close(share * (sent_bytes(shapes, mode, ranks) + scattered))
    assert recorded["reduce_scatter"] == close(recorded["all_reduce"])
    assert recorded["all_gather"] == close(share * wire_08.TENSOR_BYTES)


def test_traffic_reported_by_compare_splits_equals_simulated_ring_communication():
    shapes, gpus = large_08.seventy_billion(), range(64)
    across = [[gpus[first::8], 8] for first in range(8)]  # one GPU of each machine
    splits = [
        ([[gpus, 1]], sent_bytes(shapes, "fsdp-bf16", 64)),
        (across, 2 * shapes.updated_bytes),
        (across, sent_bytes(shapes, "fsdp-bf16", 8)),
    ]
    found = large_08.compare_splits(shapes, 50e9).data.iloc[:, 2:].values.tolist()
    for row, (rings, nbytes) in zip(found, splits, strict=True):
        out = collections.Counter()
        for ring, parts in rings:
            for _ in ring[1:]:  # steps, in each of which every GPU sends a chunk to the next one
                for sender, receiver in zip(ring, (*ring[1:], ring[0]), strict=True):
                    if sender // 8 != receiver // 8:
                        out[sender // 8] += nbytes / parts / len(ring)
        assert len(set(map(round, out.values()))) == 1 and len(out) == 8
        seconds = out[0] / 50e9
        assert row == [f"{value:.1f}" for value in (out[0] / 1e9, seconds, seconds / 8)]


def test_all_gather_in_network_namespace_sends_expected_bytes_per_rank():
    try:
        found = loopback.bytes_sent(2, ["all_gather"])
    except RuntimeError as error:
        pytest.skip(f"{error}"[:200])
    assert found["all_gather"] == pytest.approx(wire_08.TENSOR_BYTES / 2, rel=0.02)


def test_measuring_sent_bytes_without_network_namespace_raises(monkeypatch, tmp_path):
    forbidden = tmp_path / "forbidden"
    forbidden.touch(mode=0o644)
    for program in ("no such program", str(forbidden)):
        monkeypatch.setattr(loopback, "_EMPTY", [program])
        with pytest.raises(RuntimeError, match="network namespace"):
            loopback.bytes_sent(2)


@pytest.mark.parametrize(("interpreted", "gpu"), [(False, False), (True, False), (False, True)])
def test_triton_without_gpu_or_interpreter_mode_raises_with_restart_advice(
    monkeypatch, interpreted, gpu
):
    pytest.importorskip("triton")
    monkeypatch.setattr(kernels, "INTERPRETED", interpreted)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    if interpreted or gpu:
        assert exercises_06.triton_here()[0].__name__ == "triton"
    else:
        with pytest.raises(RuntimeError, match=r"(?s)restart the kernel.*请重启内核"):
            exercises_06.triton_here()


@pytest.mark.parametrize(("new", "correct"), [("largest", False), ("tl.maximum(largest)", None)])
def test_kernel_check_without_triton_rejects_only_unfilled_stubs(monkeypatch, new, correct):
    monkeypatch.setitem(sys.modules, "triton", None)
    source = f"def fold(largest): return tl.exp({new})\ndef run(q, k, v): return q, q[:, 0]"
    exec(source, cell := {"tl": None})
    assert exercises_06.check_kernel(cell["run"]).correct is correct


def test_adam_of_exercise_equals_torch_adam():
    weight, ours = torch.nn.Parameter(torch.linspace(-1, 1, 8)), wire_08.Adam()
    adam, shard = torch.optim.Adam([weight], lr=1e-3), weight.detach().clone()
    for step in range(3):
        weight.grad = torch.linspace(-1, step, 8).sin()
        shard = ours(shard, weight.grad)
        adam.step()
        assert torch.allclose(shard, weight, atol=1e-6)
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


def loss_with_extra_operator_on_values(model, tokens):
    """Run one more operator on real values, which takes more memory."""
    if not is_symbolic(model[1].weight):
        tokens.tile(1000)
    return sum_of_losses(model, tokens)


@pytest.mark.parametrize(
    ("fill_ins", "message"),
    [
        (
            {"make_model": table_and_head, "loss_sum": loss_with_extra_operator_on_values},
            "`aten.slice.Tensor` was predicted",
        ),
        ({}, "3 blocks from `layers.0` on"),
        ({"make_model": table_and_head, "loss_sum": sum_of_losses}, "No list of equal blocks"),
        ({"make_model": lambda: None}, "Not answered yet"),
        ({"make_model": lambda: nn.ReLU()}, "trainable parameters"),
        ({"make_model": functools.cache(small_decoder)}, "the same model twice"),
        ({"make_batch": lambda step: 3}, "must return one tensor"),
        ({"make_batch": lambda step: small_batch(0)}, "the same batch for steps 0 and 1"),
        ({"make_batch": lambda step: small_batch(step) + 30}, "the embedding has only"),
        (
            {"loss_sum": lambda m, b: m.loss_sum(b) if m.loss(b).item() > 0 else None},
            "reads the values of a tensor",
        ),
        ({"loss_sum": lambda m, b: (m.loss(b), b[:, 1:].numel())}, "The sums that"),
        ({"loss_sum": lambda m, b: (m.loss_sum(b)[0], 1)}, "The weights that"),
        ({"loss_sum": lambda m, b: m.loss(b)}, "must return a pair"),
        ({"make_model": small_decoder()}, "`make_model` must be a function"),
        ({"make_model": lambda: small_decoder().bfloat16()}, "a model in fp32"),
        (
            {"make_model": lambda: nn.Linear(8, 8), "make_batch": lambda step: torch.rand(4, 8)},
            "write `loss_sum`",
        ),
    ],
)
def test_project_verdict_names_problem_in_learner_functions(fill_ins, message):
    arguments = {"make_model": small_decoder, "make_batch": small_batch} | fill_ins
    assert message in slots_10.verdict_on(*arguments.values()).message


def test_message_names_first_operator_whose_predicted_live_bytes_are_wrong():
    def trace(*live):
        operators = [("entry", "forward"), ("mm", "forward"), ("sum", "backward")]
        return Trace(operators[: len(live)], np.array([[count] for count in live]))

    message = slots_10.first_difference(trace(8, 16, 32), trace(8, 24, 40))
    assert "`mm`, 16 live bytes were predicted, but 24 were" in message
    assert "the same 1 operators" in slots_10.first_difference(trace(8, 16), trace(8, 16, 32))
