"""What belongs to one lesson: its claims, its pictures, what its GPU experiments find on a CPU."""

import collections
import contextlib
import functools
import heapq
import itertools
import json
import math
import os
import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from statistics import mean, median

import numpy as np
import pytest
import torch
from answers.lesson_08 import HELD, stages
from markup import spoken_problems
from torch import nn
from torch.utils.checkpoint import checkpoint

from course_lib import lessons
from course_lib._torch import is_symbolic
from course_lib.attention.tiled import BLOCK
from course_lib.budget import Recipe, estimate
from course_lib.distributed import held_bytes, sent_bytes, shapes_of, task_of
from course_lib.labels import in_both_languages
from course_lib.lessons import (
    lesson_00,
    lesson_01,
    lesson_02,
    lesson_03,
    lesson_04,
    lesson_05,
    lesson_06,
    lesson_07,
    lesson_08,
    lesson_09,
    text,
)
from course_lib.lessons.lesson_02.display import _draw_bars
from course_lib.lessons.lesson_03.cuts import least_peak
from course_lib.lessons.lesson_05 import mean_of_means
from course_lib.lessons.lesson_05.bugs import PLANTED, correct_loop
from course_lib.lessons.lesson_05.checks import FIVE
from course_lib.lessons.lesson_05.display import differences
from course_lib.lessons.lesson_07.checks import make_batch, make_model
from course_lib.lessons.lesson_08 import loopback
from course_lib.memory import (
    MemoryBudgetExceeded,
    Trace,
    symbolic,
    training_state_bytes,
)
from course_lib.models import Decoder, deep_mlp, loss_stages, random_tokens
from course_lib.offload import HostStore, offload_activations
from course_lib.schedule import (
    Backward,
    Chain,
    Forward,
    IllegalSchedule,
    Stage,
    frontier,
    live_bytes,
    recursive,
    simulate,
    sqrt_segments,
    store_all,
)
from course_lib.schedule.actions import _Simulation
from course_lib.schedule.rules import segment_schedule
from course_lib.simulated import SimulatedDevice
from course_lib.teaching import category_label, claims, language, pictures
from course_lib.teaching.experiments import TINY, decoder_and_tokens

ROOT = Path(__file__).parents[1]


pytestmark = pytest.mark.usefixtures("fresh")


# Claims
# --------------------------------------------------------------------------------------------------

WITH_CLAIMS = [number for number in lessons.LESSONS if lessons.claims_of(number)]


def test_every_lesson_with_an_idea_tests_claims():
    assert [number for number in lessons.LESSONS if number != "00"] == WITH_CLAIMS


@pytest.mark.parametrize("number", WITH_CLAIMS)
def test_the_table_of_claims_takes_a_figure_for_each(number):
    claims = lessons.lesson(number).CLAIMS
    figures = [f"{place} of 9" for place in range(len(claims))]
    language("both")
    shown = repr(lessons.what_you_may_have_read(number, *figures))
    words = [
        in_both_languages(part)
        for each in claims
        for part in (each.claim, each.experiment, each.verdict)
    ]
    assert all(en != zh and en in shown and zh in shown for en, zh in words)
    assert all(figure in shown for figure in figures)
    with pytest.raises(ValueError, match=f"one figure per claim, {len(claims)} in all, got 1"):
        lessons.what_you_may_have_read(number, "1")


def test_a_claim_has_one_of_three_outcomes():
    with pytest.raises(
        ValueError, match=r"outcome must be one of fails, partly, holds, .*got 'maybe'"
    ):
        claims.Claim("a", "b", "c", "maybe")


def test_an_unknown_lesson_is_an_error_that_names_the_known_ones():
    with pytest.raises(ValueError, match=r"lesson must be one of 00, 01, 02.*, got '99'"):
        lessons.claims_of("99")


# Lesson 00
# --------------------------------------------------------------------------------------------------


def test_this_machine_is_named_and_measured_in_both_languages():
    shown = lesson_00.about_this_machine()
    assert torch.__version__ in repr(shown) and "CPU 核心数" in shown._repr_html_()
    assert spoken_problems(shown._repr_html_()) == []


def test_figures_of_the_lessons_have_words_in_both_languages():
    chain = Chain.uniform(4)
    for drawn in (
        lesson_00.course_map(),
        lesson_01.draw_activation_bytes(),
        lesson_03.schedule_pictures(
            {"store all": store_all(chain)},
            chain,
            title="From 50 to 51 segments the peak nearly triples",
        ),
    ):
        en, zh = pictures.description(drawn)
        assert (
            not en[0].islower()
            and en.endswith(".")
            and zh.endswith("。")
            and not set("。，、；：") & set(en)
        )
        assert len(en) > 80 and len(zh) > 40


# Lesson 01: on a GPU, and here
# ----------------------------------------------------------------------------------------


def small_run(item):
    return item.run("cpu", small=True).figures


def test_the_decoder_step_counts_the_same_peak_with_the_meter_and_with_measure():
    values = small_run(lesson_01.decoder_step)
    model, _ = decoder_and_tokens(torch.device("cpu"), **TINY)
    assert values["parameter_count"] == sum(p.numel() for p in model.parameters())
    assert values["meter_peak_bytes"] + values["workspace_bytes"] == values["allocator_peak_bytes"]
    assert values["meter_blocks_peak_bytes"] >= values["meter_peak_bytes"]
    assert values["meter_peak_bytes"] > sum(
        training_state_bytes(values["parameter_count"], "fp32-sgd").values()
    )


def test_the_formula_of_korthikanti_is_met_to_the_byte():
    values = small_run(lesson_01.korthikanti)
    assert values["difference_bytes"] == 0
    assert values["saved_bytes"] == values["predicted_bytes"] > values["paper_bytes"]


def test_fused_attention_peaks_lower_than_standard_attention():
    values = small_run(lesson_01.attention_sequence)
    assert values["fused_32_tensors_bytes"] < values["standard_32_tensors_bytes"]


def test_the_monitor_sees_each_phase_take_and_give_back_what_it_should():
    values = small_run(lesson_01.monitor)
    model, _ = decoder_and_tokens(torch.device("cpu"), **TINY)
    weights = sum(p.nbytes for p in model.parameters())
    moments = 2 * weights + 4 * len(list(model.parameters()))  # and a step counter each
    assert values["step_live_bytes"] - values["backward_live_bytes"] == moments
    assert values["step_live_bytes"] - values["zero_grad_live_bytes"] == weights
    assert (
        values["forward_live_bytes"]
        > values["backward_live_bytes"]
        > values["model_live_bytes"]
        >= weights
    )


# Lesson 03: pictures
# --------------------------------------------------------------------------------------------------


def test_the_order_of_runs_is_drawn_as_it_was_heard_and_runs_done_again_are_hatched():
    heard, x = [], torch.ones(3, requires_grad=True)
    for name in "ab":
        x.register_hook(lambda _, name=name: heard.append(f"backward {name} done"))
        x = checkpoint(
            lambda x, name=name: heard.append(f"forward {name}") or x.exp(), x, use_reentrant=False
        )
    x.sum().backward()
    language("en")
    drawn = lesson_02.draw_order(heard)
    (ax,) = drawn.axes
    hatched = {(patch.get_x(), patch.get_y()) for patch in ax.patches if patch.get_hatch()}
    again = {i for i, event in enumerate(heard) if event in heard[:i]}
    assert {round(x - 0.03) for x, _ in hatched} == again == {2, 4}
    wanted = "forward a; forward b; b again; backward b; a again; backward a"
    assert pictures.description(drawn)[0].endswith(f"In this order: {wanted}.")


def test_seconds_are_drawn_as_high_as_their_median_with_whiskers_from_the_least_to_the_most():
    drawn = _draw_bars(["plain", "each layer"], [1, 1.21], [[1, 1, 1], [1.1, 1.2, 1.5]])
    (ax,) = drawn.axes
    assert [bar.get_height() for bar in ax.patches] == [1, 1.21, 1, 1.2]
    (whiskers,) = ax.collections
    assert [[round(y, 9) for _, y in line] for line in whiskers.get_segments()] == [
        [1, 1],
        [1.1, 1.5],
    ]


@pytest.mark.parametrize("cuts", [[*range(0, 101, 10)], [0, 40, 70, 90, 100]])
def test_the_rooms_of_segments_are_as_high_as_the_referee_counts_and_have_a_box_a_layer(cuts):
    drawn = lesson_03.draw_rooms({"4 segments": cuts, "tapered": [0, 60, 90, 100]})
    boxes = [bar for bar in drawn.axes[0].patches if bar.get_y() > 0]
    top = max(bar.get_y() + bar.get_height() for bar in boxes)
    chain = Chain.uniform(100, saved_bytes=2)
    assert (len(boxes), top) == (100, simulate(segment_schedule(cuts), chain).peak_bytes)


def test_pictures_of_schedules_say_peak_and_time_and_share_one_scale():
    chain = Chain.uniform(8)
    language("en")
    plans = {"store all": store_all(chain), "recursive": recursive(chain)}
    drawn = lesson_03.schedule_pictures(plans, chain, unit="B", scale=1)
    first, second, its_bytes, _ = drawn.axes
    titles = [ax.get_title(loc="left") for ax in (first, second)]
    assert titles == ["store all · 10 B · 1.00 ×", "recursive · 6 B · 1.50 ×"]
    assert first.get_xlim() == second.get_xlim() == (0, 36)
    heights = its_bytes.patches[-1].get_data().values  # while each action runs
    assert [*heights] == [*range(2, 10), *range(10, 2, -1)] and its_bytes.get_ylim()[1] == 11


def test_the_curve_of_a_schedule_has_the_peak_that_the_referee_counts():
    for chain in (Chain.uniform(12, saved_bytes=2), lesson_03.pyramid()):
        for schedule in (store_all(chain), recursive(chain), sqrt_segments(chain)):
            spans, cost = live_bytes(schedule, chain), simulate(schedule, chain)
            assert (
                max(count for _, _, count in spans) == cost.peak_bytes and spans[-1][1] == cost.time
            )
            assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))


def test_there_are_as_many_schedules_as_schroeder_numbers_and_the_referee_admits_each():
    for length, number in enumerate((1, 2, 6, 22, 90, 394), start=1):
        found = {tuple(actions) for actions in lesson_03.every_schedule(0, length - 1)}
        assert len(found) == number
        assert all(
            simulate(actions, Chain.uniform(length)).forward_steps >= length for actions in found
        )


# Lesson 03: what it says of cuts and frontiers
# ------------------------------------------------------------------------


def all_cuts(depth):
    for inner in itertools.product((False, True), repeat=depth - 1):
        yield [0, *(i for i, cut in enumerate(inner, start=1) if cut), depth]


def test_no_cut_peaks_below_the_least_peak_that_the_check_of_tapered_cuts_knows():
    def peak(cuts):
        return 100_000 * (
            1 + max(j + 1 + 2 * (b - a) for j, (a, b) in enumerate(itertools.pairwise(cuts)))
        )

    assert [least_peak(n) for n in range(1, 12)] == [
        min(map(peak, all_cuts(n))) for n in range(1, 12)
    ]


def uneven_chain():
    sizes = [
        (3, 6, 4, 9, 2, 1),
        (1, 2, 5, 5, 7, 0),
        (4, 8, 1, 6, 0, 5),
        (2, 4, 3, 3, 1, 1),
        (5, 9, 2, 8, 3, 2),
    ]
    return Chain(tuple(Stage(*each) for each in sizes), 2)


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
    assert [(cost.peak_bytes, cost.time) for cost in found] == [
        (c.peak_bytes, c.time) for c in frontier(chain)
    ]


def test_checkpoints_that_stop_early_lie_on_the_frontier_with_early_stop_and_below_the_other():
    def stages(layers=3):
        decoder = Decoder(
            vocabulary=512, hidden=64, heads=4, layers=layers, sequence=32, tied=False
        )
        tokens = random_tokens(4, 32, 512)
        return loss_stages(decoder, tokens[:, 1:]), tokens[:, :-1].contiguous()

    def in_segments(layers, cuts, x):
        for start, end in itertools.pairwise(cuts[:-1]):
            x = checkpoint(layers[start:end], x, use_reentrant=False, preserve_rng_state=False)
        return layers[cuts[-2] :](x)

    with symbolic():
        chain = Chain.profile(*stages())
    left_out = [0, *[2 * 128 * 64 * 64, 2 * 128 * 256 * 64] * 3, 0]
    finer = lesson_03.frontier_with_early_stop(chain, left_out, step_bytes=1024)
    below = []
    for cuts in [*all_cuts(8)][4::12]:
        peak, flops = lesson_03.cost_of(stages, in_segments, cuts)
        within = [cost.time for cost in finer if cost.peak_bytes <= peak]
        # the embedding is charged for
        assert not within or flops + chain.stages[0].forward_time * 3 >= min(within)
        below.append(
            flops < min((c.time for c in frontier(chain) if c.peak_bytes <= peak), default=math.inf)
        )
    assert sum(below) >= 3


def least_time(chain, budget):
    """Of all schedules, also of those that give up early what they kept: a search over the
    referee's states."""
    start = _Simulation(chain)
    waiting = [
        (0.0, 0, frozenset(start.inputs), frozenset(), start.next_backward, start.live_bytes)
    ]
    seen, number = set(), 0
    while waiting:
        time, _, inputs, saved, due, live = heapq.heappop(waiting)
        if due < 0:
            return time
        if (inputs, saved, due) in seen:
            continue
        seen.add((inputs, saved, due))
        runs = [Forward(i, keep) for i in range(due + 1) for keep in ("all", "input", "nothing")]
        for action in [*runs, Backward(due)]:
            referee = _Simulation(chain)
            referee.inputs, referee.saved, referee.next_backward, referee.live_bytes = (
                set(inputs),
                set(saved),
                due,
                live,
            )
            with contextlib.suppress(IllegalSchedule):
                referee.run_action(action)
                if referee.during_bytes <= budget:
                    number += 1
                    state = (
                        frozenset(referee.inputs),
                        frozenset(referee.saved),
                        referee.next_backward,
                    )
                    heapq.heappush(
                        waiting, (time + referee.times[-1], number, *state, referee.live_bytes)
                    )
    return math.inf


def test_giving_up_early_is_faster_on_the_five_stages_and_on_equal_ones_never():
    five = lesson_03.five_stages()
    persistent = [simulate(actions, five) for actions in lesson_03.every_schedule(0, 4)]
    assert (
        min(cost.time for cost in persistent if cost.peak_bytes <= 13)
        == 80
        > least_time(five, 13)
        == 70
    )
    for equal in (Chain.uniform(5), Chain.uniform(5, saved_bytes=2)):
        assert all(least_time(equal, cost.peak_bytes) == cost.time for cost in frontier(equal))


# Lesson 04
# --------------------------------------------------------------------------------------------------


def test_what_was_recorded_of_the_decoder_on_the_simulated_device_comes_again():
    for lanes in ((11.16e9, 2, False), (0.85e9, 2, True)):  # two of nine, which take as long each
        found, recorded = lesson_04.simulated_decoder(*lanes), lesson_04.RECORDED[lanes]
        assert found.above_bytes == recorded.above_bytes
        assert found.seconds == pytest.approx(recorded.seconds, rel=1e-4)


def test_the_table_of_links_has_the_thresholds_of_the_bytes_that_move():
    data = lesson_04.link_table().data
    variants = [data[column].tolist() for column in data.columns[1:]]
    assert [found[:3] for found in variants] == [["167.8", "90", "11"], ["8.4", "1,792", "0.56"]]
    assert all(float(found[3]) > 1.05 for found in variants)


def test_the_peaks_of_an_optimizers_step_that_its_check_knows_are_measured():
    for mib in (4, 16):  # the others would take as long, and show no more
        assert lesson_04.step_peak(mib) == lesson_04.STEP_PEAKS[mib]


def test_the_clock_is_that_of_a_larger_chain_with_the_same_ratios():
    rows, width, flops = 64, 24, 1e9
    forward = 2 * rows * width**2 / flops
    for copy, p in ((0.5, 0), (2, 1)):
        links = dict.fromkeys(
            ("up_bytes_per_second", "down_bytes_per_second"), 4 * rows * width / (copy * forward)
        )
        with SimulatedDevice(flops_per_second=flops, **links) as device:
            network, x = device.move(deep_mlp(16, width)), device.move(torch.ones(rows, width))
            began = device.seconds
            with offload_activations(HostStore(), min_bytes=1, prefetch=p):
                loss = network(x).sum()
            loss.backward()
        assert (device.seconds - began) / forward == pytest.approx(lesson_04.clock(16, copy, p))


def test_each_wait_is_found_missing_in_its_mode_alone():
    rows = lesson_04.without_waits().data.values.tolist()
    assert [marks for _, _, *marks in rows] == [
        ["✓", "✓", "✓"],
        ["✓", "✓", "✗"],
        ["✓", "✗", "✓"],
        ["✓", "✗", "✗"],
    ]
    assert [races > 0 for _, races, *_ in rows] == [False, True, True, True]
    assert lesson_04.read_late(False) == [0.0] * 4 and lesson_04.read_late(True) == [
        0.0,
        2.0,
        4.0,
        6.0,
    ]


# Lesson 05: two processes
# ---------------------------------------------------------------------------------------------


# a mean of means: each rank divides by its own tokens
def no_division_over_ranks(model, loss_sum, micro_batches, each):
    total = 0
    for number, micro_batch in enumerate(micro_batches, start=1):
        with nullcontext() if each or number == len(micro_batches) else model.no_sync():
            loss, count = loss_sum(model, micro_batch)
            loss.backward()
        total += count
    for parameter in model.parameters():
        parameter.grad /= total


def test_two_processes_reduce_the_gradients_once_or_for_every_micro_batch_and_see_a_wrong_divisor():
    found = lesson_05.on_ranks(no_division_over_ranks, micro_batches=3)
    once = found["parameters"]
    assert (found["last"], found["library"], found["each"]) == (once, once, 3 * once)
    assert 0.05 < found["error"] < 1


STEP = """def step(model, loss_sum, micro_batches, each):
    for micro_batch in micro_batches:
        loss_sum(model, micro_batch)[0].backward()
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's list of threads")
def test_a_process_leaves_no_thread_of_its_group_to_the_interpreters_end(tmp_path):
    program = (
        f"import runpy, sys\nfrom pathlib import Path\nsys.argv = ['ranks', {str(tmp_path)!r},"
        f" 'step', '2', '1', '0']\nPath({str(tmp_path)!r},"
        f" 'step.py').write_text({STEP!r})\nrunpy.run_module('course_lib.lessons.lesson_05.ranks',"
        " run_name='__main__')\nnames = [(thread / 'comm').read_text().strip() for thread in"
        " Path('/proc/self/task').iterdir()]\nprint([name for name in names if 'gloo' in name])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


# Lesson 05: its text, its five checks, its recording
# ------------------------------------------------------------------


def test_the_text_has_short_lines_and_long_paragraphs_as_characters_without_padding_in_them():
    short, long = text.code(), text.prose()
    assert len(short) > 2000 and len(long) > 300
    assert median(map(len, short)) < 50 < 128 < mean(map(len, long))
    tokens = text.pad_texts(["ab", "abcd"], most=3)
    assert tokens.tolist() == [[97, 98, 0], [97, 98, 99]]
    assert all(character for line in short + long for character in line.encode("ascii"))
    folder = Path(text.__file__).parent
    for name, licence in (("prose", "CC-BY-4.0"), ("code", "Apache-2.0")):
        assert f"SPDX-License-Identifier: {licence}" in (folder / f"LICENSE.{name}.txt").read_text()


def test_each_planted_bug_is_seen_by_its_own_check_and_by_no_other():
    seen = {
        bug: [name for name, check in FIVE.items() if check(loop)] for bug, loop in PLANTED.items()
    }
    assert seen == {bug: [bug] for bug in FIVE}
    assert [name for name, check in FIVE.items() if check(correct_loop)] == []


def test_a_loop_leaves_the_librarys_weights_only_without_a_bug():
    assert lesson_05.same_weights_as_library(correct_loop)
    assert [bug for bug, loop in PLANTED.items() if lesson_05.same_weights_as_library(loop)] == []


def test_a_recorded_run_is_made_again_by_its_script():
    runs = lesson_05.load_record()["runs"]
    found = mean_of_means.train("mean of means", seed=2, steps=20)
    assert torch.allclose(
        torch.tensor(found), torch.tensor(runs["2"]["mean of means"][:2]), atol=0.01
    )


def test_what_the_lesson_says_of_the_recorded_seeds_is_what_they_show():
    runs = list(differences(lesson_05.load_record()["runs"]).values())
    assert len(runs) == 8

    def better_and_worse(step):
        looks = [run[step // 20] for run in runs]
        return sum(short < 0 for short, _ in looks), sum(long > 0 for _, long in looks)

    assert [better_and_worse(step) for step in (20, 100, 120)] == [(8, 8), (7, 5), (7, 8)]
    short, long = zip(*(run[-1] for run in runs), strict=True)
    assert (round(mean(short), 2), round(mean(long), 2)) == (-0.04, 0.04)


def test_the_mean_of_means_is_wrong_on_the_text_and_right_on_equal_counts():
    def gradient(micro_batches, mean_of_means):
        model = lesson_05.small_decoder()
        total = sum(int((micro_batch[:, 1:] != 0).sum()) for micro_batch in micro_batches)
        for micro_batch in micro_batches:
            loss, count = lesson_05.loss_sum(model, micro_batch)
            (loss / (count * len(micro_batches) if mean_of_means else total)).backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    def error(batch):
        whole = gradient([batch], False)
        return float((gradient(batch.split(1), True) - whole).norm() / whole.norm())

    assert all(0.145 < error(lesson_05.batch(seed)) < 0.255 for seed in range(3))
    assert error(random_tokens(4, 32, 127) + 1) < 1e-5


# Lesson 07: claims and pictures
# ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def taken():
    """recipe -> what it takes on four layers of lesson 07's decoder; estimated once."""

    def make_model():
        return Decoder(vocabulary=8192, hidden=640, heads=40, layers=4, sequence=384)

    return functools.cache(
        lambda recipe: estimate(make_model, lambda: random_tokens(2, 384, 8192), recipe)
    )


FORGETFUL = {"attention": "flash", "checkpoint": "layers"}


@pytest.fixture(scope="module")
def small_steps():
    """Three recipes on the smaller decoder of lesson 07, as estimates; the last one moves bytes."""

    def make_model():
        return Decoder(vocabulary=1024, hidden=128, heads=8, layers=2, sequence=256)

    flash = {"attention": "flash"}
    recipes = Recipe(), Recipe(**flash), Recipe(**flash, micro_batches=8, offload_optimizer=1.0)
    return [estimate(make_model, lambda: random_tokens(8, 256, 1024), recipe) for recipe in recipes]


# Lesson 06
# --------------------------------------------------------------------------------------------------


def points_of(ax):
    return [tuple(xy) for line in ax.lines for xy in zip(*line.get_data(), strict=True)]


def test_the_running_maximum_is_marked_where_it_rises_and_nowhere_else():
    drawn = lesson_06.draw_running([1.0, 1.0, 3.0, 3.0, 4.0], [1.0, 2.0, 1.2, 2.2, 1.9])
    for ax, heights in zip(drawn.axes, ([3.0, 4.0], [1.2, 1.9]), strict=True):
        (rises,) = [line for line in ax.lines if line.get_marker() == "^"]
        assert list(rises.get_xdata()) == [2, 4] and list(rises.get_ydata()) == heights


def test_errors_are_drawn_as_multiples_of_1e_7_beside_each_other():
    errors = {"standard": [4e-7, 3e-7, 2e-7, 1e-7], "yours": [5e-7, 4e-7, 3e-7, 2e-7]}
    (ax,) = lesson_06.draw_errors(errors).axes
    assert [list(line.get_ydata()) for line in ax.lines] == [
        pytest.approx([1e7 * error for error in each]) for each in errors.values()
    ]
    assert ax.get_ylim()[0] == 0


def test_saved_bytes_lie_on_a_line_of_slope_two_and_one_of_slope_one():
    lengths = [512, 1024, 2048]
    saved = {"standard": [n * n for n in lengths], "flash": [64 * n for n in lengths]}
    (ax,) = lesson_06.draw_saved(lengths, saved).axes
    drawn = [list(line.get_ydata()) for line in ax.lines]
    for line, dots, values in zip(drawn[::2], drawn[1::2], saved.values(), strict=True):
        assert line == pytest.approx(dots) and dots == pytest.approx([v / 1e6 for v in values])


MARKS = [
    *((20.0, 40.0), (60.0, 120.0), (400.0, 312.0)),
    *((20.0, 20.0), (60.0, 60.0), (400.0, 100.0)),
]


def test_a_kind_of_attention_stands_under_the_roof_at_what_it_reaches():
    devices = {"A": (312e12, 2e12), "B": (100e12, 1e12)}
    reached = {"standard": 20.0, "flash": 60.0, "larger blocks": 400.0}
    (ax,) = lesson_06.draw_roofline(devices, reached).axes
    marks = [points for points in points_of(ax) if points in MARKS]
    assert marks == MARKS


def test_peaks_and_flops_of_attention_are_drawn_from_zero():
    costs = {"standard": (150.0, 16.0), "checkpointed": (109.1, 22.5), "flash": (26.3, 22.5)}
    (ax,) = lesson_06.draw_peaks(costs).axes
    assert points_of(ax) == list(costs.values())
    assert ax.get_xlim()[0] == ax.get_ylim()[0] == 0


def test_a_causal_walk_is_drawn_with_the_tiles_that_a_mask_leaves():
    (ax,) = lesson_06.draw_causal_tiles().axes
    seen = torch.ones(512, 512, dtype=torch.bool).tril()
    tiles = [
        (j, i)
        for i, rows in enumerate(seen.split(64))
        for j, tile in enumerate(rows.split(64, 1))
        if tile.any()
    ]
    assert [item.get_position() for item in ax.texts] == tiles
    assert [item.get_text() for item in ax.texts] == [str(n + 1) for n in range(len(tiles))]


def test_where_activations_are_small_a_second_micro_batch_raises_the_peak(taken):
    one, two = taken(Recipe(**FORGETFUL)), taken(Recipe(**FORGETFUL, micro_batches=2))
    assert two.peak_bytes > one.peak_bytes and two.flops == one.flops
    assert two.at_peak["gradient"] == two.at_peak["parameter"], "a full set of gradients is there"
    assert two.phase_peaks["backward"] == two.peak_bytes
    assert taken(Recipe(micro_batches=2)).peak_bytes < taken(Recipe()).peak_bytes, (
        "it helps where they are large"
    )


@pytest.fixture(scope="module")
def stored():
    """What stands in the lesson of the course's decoder, by the recipe."""
    return {each.recipe: each for each in lesson_07.stored_estimates()}


def test_savings_do_not_add_up_and_a_checkpoint_raises_the_peak_of_offloaded_activations(stored):
    plain, offloaded = stored[Recipe()], stored[Recipe(offload_activations=True)]
    checkpoints, both = (
        stored[Recipe(checkpoint="layers", offload_activations=below)] for below in (False, True)
    )
    saved = [plain.peak_bytes - each.peak_bytes for each in (checkpoints, offloaded, both)]
    assert saved[2] < saved[1] < saved[0] + saved[1], "both save less than offload alone"
    assert both.moved_bytes * 15 < offloaded.moved_bytes and both.flops > offloaded.flops


def test_pieces_peak_where_checkpoints_do_and_take_no_flops(stored):
    pieces, checkpoints = stored[Recipe(micro_batches=8)], stored[Recipe(checkpoint="layers")]
    assert pieces.peak_bytes == pytest.approx(checkpoints.peak_bytes, rel=0.01)
    assert pieces.flops == stored[Recipe()].flops < checkpoints.flops


def test_with_the_state_on_the_host_a_device_needs_less_than_16_bytes_a_parameter():
    def make_model():  # four of the 32 layers
        return Decoder(vocabulary=32000, hidden=4096, heads=32, layers=4, sequence=4096)

    with symbolic():
        parameters = sum(p.numel() for p in make_model().parameters())
    on_device, on_host = (
        estimate(
            make_model,
            lambda: random_tokens(1, 4096, 32000),
            Recipe("bf16", **FORGETFUL, **more),
            tier="host",
        )
        for more in ({}, {"offload_optimizer": 1.0, "in_backward": True})
    )
    assert on_host.peak_bytes < 4 * parameters < 16 * parameters < on_device.peak_bytes
    assert on_device.at_peak["optimizer"] >= 12 * parameters and on_host.at_peak["optimizer"] == 0
    # gradients down, parameters up
    assert on_device.moved_bytes == 0 and on_host.moved_bytes == (2 + 2) * parameters


def test_flash_takes_more_flops_where_no_tile_is_masked_as_a_whole_and_fewer_elsewhere(taken):
    flash = Recipe(attention="flash")
    assert BLOCK > 384 and taken(flash).flops > taken(Recipe()).flops

    def make_model():
        return Decoder(vocabulary=64, hidden=32, heads=2, layers=1, sequence=2 * BLOCK)

    ours, plain = (
        estimate(make_model, lambda: random_tokens(1, 2 * BLOCK, 64), r) for r in (flash, Recipe())
    )
    assert ours.flops < plain.flops


def test_the_three_recipes_of_the_gpu_experiment_peak_where_they_are_predicted():
    values = small_run(lesson_07.three_recipes)
    for recipe in lesson_07.RECIPES:
        assert values[f"{recipe}_peak_bytes"] == values[f"{recipe}_predicted_bytes"]
    assert values["least_peak_bytes"] < values["plain_peak_bytes"]


def test_every_field_of_a_recipe_is_explained_in_one_of_two_tables():
    tables = [lesson_07.recipe_fields(), lesson_07.recipe_fields(others=True)]
    assert lesson_07.FIELDS.keys() == Recipe().__dict__.keys()
    shown = [field for each in tables for field in each.data["field"]]
    assert sorted(shown) == sorted(
        f"`{name}={value!r}`" for name, value in Recipe().__dict__.items()
    )
    assert [spoken_problems(each._repr_html_()) for each in tables] == [[], []]


def test_stored_estimates_are_those_that_the_library_makes():
    stored = lesson_07.stored_estimates()
    assert len({each.recipe for each in stored}) == len(stored)
    for each in stored[5::23]:
        found = estimate(make_model, make_batch, each.recipe)
        assert (found.peak_bytes, found.flops, found.moved_bytes) == each[1:]


def test_what_fills_a_peak_is_told_by_category_with_its_phase(small_steps):
    shown = lesson_07.what_fills(["plain", "step", "budget"], small_steps)
    assert shown.data["peak (MB)"].tolist() == [
        f"{each.peak_bytes / 1e6:.1f}" for each in small_steps
    ]
    assert set(shown.data["phase"]) <= {"forward", "backward", "optimizer"}


def test_two_recipes_cost_the_same_where_their_lines_cross():
    one, other = (
        each
        for each in lesson_07.stored_estimates()
        if each.recipe.offload_activations
        and each.recipe.in_backward
        and each.recipe.offload_optimizer
        if each.recipe.attention == "standard"
    )
    drawn = lesson_07.draw_break_even(one, other, ["without", "with checkpoints"])
    (mark,) = [line for line in drawn.axes[0].lines if len(set(line.get_xdata())) == 1]
    equal = mark.get_xdata()[0]
    assert one.flops + equal * one.moved_bytes == pytest.approx(
        other.flops + equal * other.moved_bytes
    )


def test_the_way_to_a_budget_is_drawn_in_bars_as_high_as_the_estimates(small_steps, tmp_path):
    names = ["plain", "+ flash", "step"]
    measured = [each.peak_bytes + 3_000_000 for each in small_steps]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawn = lesson_07.waterfall_picture(
            names, small_steps, measured, 20_000_000, title="budget"
        )
        drawn.savefig(tmp_path / "figure.png")
    (axes,) = drawn.axes
    steps = range(len(small_steps))
    tops = [
        max(layer[i].get_y() + layer[i].get_height() for layer in axes.containers) for i in steps
    ]
    assert tops == pytest.approx([each.peak_bytes / 1e6 for each in small_steps])
    (points,) = [line for line in axes.lines if line.get_marker() == "D"]
    assert points.get_ydata() == pytest.approx([count / 1e6 for count in measured])
    assert [line.get_ydata()[0] for line in axes.lines if line.get_linestyle() == "--"] == [20]
    held = {category for each in small_steps for category, count in each.at_peak.items() if count}
    legend = {item.get_text() for item in axes.get_legend().get_texts()}
    assert {category_label(category) for category in held} <= legend
    en, zh = pictures.description(drawn)
    for each in small_steps:
        assert f" {each.peak_bytes / 1e6:,.0f}" in en and f" {each.peak_bytes / 1e6:,.0f}" in zh


def test_recipes_under_two_sliders_name_the_cheapest_that_fits_on_that_machine():
    language("en")
    points = lesson_07.stored_estimates()
    named = {}
    for intensity in (20, 100):
        drawn = lesson_07.draw_recipes(points, 60, intensity)
        fitting = [each for each in points if each.peak_bytes <= 60e6]
        cheapest = min(fitting, key=lambda each: each.flops + intensity * each.moved_bytes)
        assert drawn.get_suptitle().startswith(
            f"60 MB, {intensity} FLOP per byte: {len(fitting)} recipes fit"
        )
        named[intensity] = drawn.axes[0].get_title("left")
        assert named[intensity] == f"recipe: {cheapest.recipe}"
        assert sum(len(line.get_xdata()) for line in drawn.axes[0].lines) >= len(points)
    assert named[20] != named[100]
    least = min(each.peak_bytes for each in points) / 1e6
    assert (
        lesson_07.draw_recipes(points, 5).get_suptitle()
        == f"No recipe fits into 5 MB, the smallest needs {least:.1f} MB"
    )


# Lesson 08: ranks, and the claims
# -------------------------------------------------------------------------------------


def test_collectives_within_one_process_are_those_of_the_framework_and_count_as_it_counts():
    wire, tensors = lesson_08.Wire(), [torch.arange(8.0) + rank for rank in range(4)]
    parts = wire.reduce_scatter(tensors)
    assert torch.equal(torch.cat(parts), sum(tensors)) and wire.sent_bytes == 32
    assert (
        all(torch.equal(each, sum(tensors)) for each in wire.all_gather(parts))
        and wire.sent_bytes == 64
    )
    assert (
        all(torch.equal(each, sum(tensors)) for each in wire.all_reduce(tensors))
        and wire.sent_bytes == 128
    )


def test_a_rank_s_own_wire_gives_what_lists_of_all_ranks_give():
    shards, gradients = (
        torch.arange(24.0).view(8, 3).chunk(4),
        [torch.full((8, 3), float(r)).cos() for r in range(4)],
    )
    everyone = lesson_08.Wire()
    sums, whole = everyone.reduce_scatter(gradients), everyone.all_gather(shards)[0]
    for rank in range(4):
        wire = lesson_08.RankWire(rank, shards, gradients)
        assert torch.equal(wire.all_gather(shards[rank]), whole)
        assert torch.allclose(wire.reduce_scatter(gradients[rank]), sums[rank])
        assert wire.sent_bytes == everyone.sent_bytes == 2 * 96
        assert (
            torch.allclose(wire.all_reduce(gradients[rank]), sum(gradients))
            and wire.sent_bytes == 4 * 96
        )
        with pytest.raises(ValueError, match="shard must be this rank's"):
            wire.all_gather(whole)
        with pytest.raises(
            ValueError, match=r"tensor must be the whole gradient on every rank, .*, got shape"
        ):
            wire.reduce_scatter(shards[rank])


def test_nobody_writes_the_count_of_a_wire():
    for wire in (
        lesson_08.Wire(),
        lesson_08.RankWire(0, [torch.ones(1)], [torch.ones(1), torch.ones(1)]),
    ):
        with pytest.raises(AttributeError):
            wire.sent_bytes += 1


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_recorded_wire_carried_what_a_ring_would_but_for_reduce_scatters(ranks):
    recorded, shapes = lesson_08.RECORDED[ranks], shapes_of(task_of().make_model())
    ring = {
        mode: (ranks - 1) / ranks * sent_bytes(shapes, mode, ranks)
        for mode in ("ddp", "zero1", "fsdp")
    }
    # once more: gloo sends the whole sum of it
    scattered = (ranks - 1) / ranks * 4 * shapes.numbers
    close = functools.partial(pytest.approx, rel=5e-3)
    assert recorded["ddp"] == close(ring["ddp"]) and recorded["zero1"] == close(ring["zero1"])
    assert recorded["fsdp"] == close(ring["fsdp"] + scattered)
    assert recorded["reduce_scatter"] == close(recorded["all_reduce"])
    assert recorded["all_gather"] == close((ranks - 1) / ranks * lesson_08.TENSOR_BYTES)


def test_an_empty_network_namespace_counts_an_all_gather():
    try:
        found = loopback.bytes_sent(2, ["all_gather"])
    except RuntimeError as error:
        pytest.skip(f"{error}"[:200])
    assert found["all_gather"] == pytest.approx(lesson_08.TENSOR_BYTES / 2, rel=0.02)


def test_where_no_namespace_can_be_made_it_says_so(monkeypatch):
    monkeypatch.setattr(loopback, "_EMPTY", ["no such program"])
    with pytest.raises(RuntimeError, match="no empty network namespace can be made here"):
        loopback.bytes_sent(2)


def test_the_adam_of_the_exercise_is_the_framework_s():
    weight, ours = torch.nn.Parameter(torch.linspace(-1, 1, 8)), lesson_08.Adam()
    adam, piece = torch.optim.Adam([weight], lr=1e-3), weight.detach().clone()
    for step in range(3):
        weight.grad = torch.linspace(-1, step, 8).sin()
        piece = ours(piece, weight.grad)
        adam.step()
        assert torch.allclose(piece, weight, atol=1e-6)
    assert ours.state_bytes == 2 * 8 * 4


def test_the_framework_s_zero_1_communicates_half_as_much_again_as_ddp():
    ddp, zero1 = (lesson_08.symbolic_rank(mode, 2).sent_bytes for mode in ("ddp", "zero1"))
    assert zero1 == 1.5 * ddp


def test_what_four_ranks_hold_is_a_quarter_and_their_peak_is_not():
    with symbolic():
        whole = sum(held_bytes(shapes_of(task_of().make_model()), "fsdp", 1)[0].values())
        part = sum(held_bytes(shapes_of(task_of().make_model()), "fsdp", 4)[0].values())
    assert part - 400 == (whole - 400) / 4
    assert lesson_08.symbolic_rank("fsdp", 4).peak_bytes > 2 * part


def test_views_of_buckets_lower_the_peak_at_the_end_of_backward_alone():
    long, short = (
        lesson_08.ddp_peak(tokens, view=False) - lesson_08.ddp_peak(tokens, view=True)
        for tokens in (128, 16)
    )
    assert long == 0 and 0.8 * 27_502_592 < short <= 27_502_592


def a_run(mode, ranks, held, sent):
    measured = {name: [held // 4] * ranks for name in ("parameter", "gradient")} | {
        "optimizer": [held // 2] * ranks
    }
    return {
        "mode": mode,
        "ranks": ranks,
        "measured": measured,
        "communicated": {"predicted": sent, "measured": sent},
    }


def test_bytes_over_ranks_are_drawn_where_they_were_measured_and_said_in_both_languages():
    lines = {n: stages(*HELD)(6_875_648, n) for n in (1, 2, 4, 8)}
    runs = [
        a_run(mode, n, 4_000_000 * n, 55_000_000)
        for mode in ("ddp", "zero1", "fsdp")
        for n in (2, 4)
    ]
    assert [lesson_08.held_by(run) for run in runs[:2]] == [8_000_000, 16_000_000]
    drawn = lesson_08.draw_ranks(lines, runs)
    left, right = drawn.axes
    points = [line for line in left.lines if line.get_marker() == "o" and len(line.get_xdata())]
    assert [[*line.get_ydata()] for line in points] == [[8, 16]] * 3
    assert len([line for line in left.lines if line.get_marker() != "o"]) == 4
    assert {y for line in right.lines for y in line.get_ydata()} == {55}
    en, zh = pictures.description(drawn)
    assert "ZeRO 3 from 110.0 to 13.8 MB" in en and "ZeRO 3 从 110.0 到 13.8 MB" in zh


def test_bars_of_a_peak_are_as_long_as_it_and_hold_what_was_gathered():
    parts = dict.fromkeys(
        ("parameter", "optimizer", "gradient", "activation", "temporary", "input"), 10_000_000
    )
    drawn = lesson_08.draw_peaks({"one device": {**parts, "gathered": 5_000_000}}, "peak")
    (ax,) = drawn.axes
    assert sum(patch.get_width() for patch in ax.patches) == 65
    assert {item.get_text() for item in ax.texts} == {"65.0"}
    en, zh = pictures.description(drawn)
    assert "one device: 65.0 MB" in en and "一台设备：65.0 MB" in zh


def test_a_device_that_was_stopped_stands_over_ranks_that_kept_within_their_budget():
    run = {"budget_bytes": 48_000_000, "taken": [{"peak_bytes": 47_000_000}] * 2}
    drawn = lesson_08.draw_budgets(
        MemoryBudgetExceeded("mm", 59_000_000, 2_000_000, 60_000_000), run, 60_000_000
    )
    (ax,) = drawn.axes
    assert [patch.get_width() for patch in ax.patches] == [59, 2, 47, 47]
    assert [line.get_xdata()[0] for line in ax.lines] == [60, 48]
    en, zh = pictures.description(drawn)
    assert "needs 61.0 MB" in en and "61.0 MB 时被拦下" in zh


def test_traffic_and_compute_meet_at_the_point_that_is_drawn():
    drawn = lesson_08.draw_seconds({"fsdp": 12.0, "fsdp-bf16": 8.0}, 1e-3, 12_000)
    (ax,) = drawn.axes
    (point,) = (line for line in ax.lines if line.get_marker() == "o")
    assert (*point.get_xdata(), *point.get_ydata()) == (12_000, 12)
    assert "From 12,000 tokens on" in pictures.description(drawn)[0]


def test_pictures_of_who_holds_what_fill_what_is_held():
    filled = []
    for ax in lesson_08.draw_stages().axes:
        filled.append(sum(p.get_width() for p in ax.patches if p.get_facecolor()[3] > 0) / 4)
    assert filled == [16, 10, 7, 4]  # bytes a parameter of one of four ranks, in fp32
    counts = [
        sum(p.get_facecolor()[3] > 0 for p in ax.patches)
        for ax in lesson_08.draw_collectives().axes
    ]
    assert counts == [16, 4, 16]


# Sliders
# --------------------------------------------------------------------------------------------------


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


# Lesson 09
# --------------------------------------------------------------------------------------------------


def small_decoder():
    return Decoder(vocabulary=32, hidden=16, heads=2, layers=3, sequence=8)


def small_batch(step):
    return random_tokens(4, 8, 32, seed=step)


def mean_as_a_sum(model, batch):
    return model.loss(batch), batch[:, 1:].numel()


class WithoutBlocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(32, 8), nn.Linear(8, 32)

    def loss_sum(self, tokens):
        logits = self.out(self.table(tokens[:, :-1]))
        total = nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
        )
        return total, tokens[:, 1:].numel()


class LooksAtRealTokens(WithoutBlocks):
    """A model whose step runs one operator more on real values, and takes more memory for it."""

    def loss_sum(self, tokens):
        if not is_symbolic(self.out.weight):
            tokens.tile(1000)
        return super().loss_sum(tokens)


@pytest.mark.parametrize(
    ("slots", "told"),
    [
        (
            (LooksAtRealTokens, small_batch),
            "`model`: `aten.slice.Tensor` was predicted, but `aten.repeat.default` ran.",
        ),
        ((small_decoder, small_batch), "3 blocks from `layers.0` on"),
        ((WithoutBlocks, small_batch), "No list of equal blocks"),
        ((lambda: None, small_batch), "Not answered yet"),
        ((small_decoder, small_batch, lambda model, batch: None), "Not answered yet"),
        ((lambda: nn.ReLU(), small_batch), "trainable parameters"),
        ((functools.cache(small_decoder), small_batch), "the same model twice"),
        ((small_decoder, lambda step: 3), "must return one tensor"),
        ((small_decoder, lambda step: small_batch(0)), "the same batch for steps 0 and 1"),
        (
            (small_decoder, lambda step: random_tokens(4, 8, 40, seed=step) + 30),
            "the embedding has only",
        ),
        (
            (small_decoder, lambda step: (small_batch(step), torch.ones(3))),
            "different numbers of samples",
        ),
        ((small_decoder, small_batch, mean_as_a_sum), "The sums that"),
        (
            (small_decoder, small_batch, lambda m, b: (m.loss_sum(b)[0], 1)),
            "The weights that",
        ),
        ((small_decoder, small_batch, lambda m, b: m.loss(b)), "must return a pair"),
        ((small_decoder(), small_batch), "`make_model` must be a function, got a `Decoder`"),
        ((small_decoder, {}), "`make_batch` must be a function, got a `dict`"),
        ((small_decoder, small_batch, 3), "`loss_sum` must be a function, got a `int`"),
        ((lambda: small_decoder().bfloat16(), small_batch), "a model in fp32"),
        (
            (
                small_decoder,
                small_batch,
                lambda m, b: (m.loss_sum(b)[0], np.int64(m.loss_sum(b)[1])),
            ),
            "3 blocks from `layers.0` on",
        ),
        (
            (lambda: nn.Sequential(nn.Linear(8, 8)), lambda s: torch.rand(4, 8) + s),
            "write `loss_sum`",
        ),
    ],
)
def test_what_is_wrong_with_a_slot_is_said(slots, told):
    assert told in lesson_09.check_slots(*slots).message


def test_the_first_operator_that_holds_other_bytes_is_named():
    def trace(*live):
        operators = [("entry", "forward"), ("mm", "forward"), ("sum", "backward")]
        return Trace(operators[: len(live)], np.array([[count] for count in live]))

    told = lesson_09.first_difference(trace(8, 16, 32), trace(8, 24, 40))
    assert (
        "operator 1 on, in `model`: after `mm`, 16 live bytes were predicted, but 24 were" in told
    )
    assert "the same 1 operators" in lesson_09.first_difference(trace(8, 16), trace(8, 16, 32))


def test_passages_are_the_courses_text_and_others_at_each_step():
    first, second = (lesson_09.passages(step) for step in (0, 1))
    assert first["input_ids"].shape == (4, 128) and torch.equal(*first.values())
    assert not torch.equal(first["input_ids"], second["input_ids"])
    assert int(first["input_ids"].min()) > 0 and int(first["input_ids"].max()) < 128
    whole = " ".join(text.prose())
    assert "".join(map(chr, first["input_ids"][0].tolist())) in whole


def test_parameters_by_hand_are_those_of_the_models():
    from transformers import AutoConfig, AutoModelForCausalLM

    from course_lib.lessons.lesson_09.checks import parameters_of

    for name in ("llama.json", "llama_3_8b.json"):
        config = json.loads((lesson_09.FOLDER / name).read_text("utf-8"))
        with symbolic():
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        assert parameters_of(config) == sum(p.numel() for p in model.parameters())


def test_bars_of_levers_end_where_the_peaks_are_and_curves_lie_on_their_losses():
    batch = functools.partial(small_batch, 0)
    found = {
        name: estimate(small_decoder, batch, recipe)
        for name, recipe in {"plain": Recipe(), "checkpoints": Recipe(checkpoint="layers")}.items()
    }
    (ax,) = lesson_09.draw_techniques(found, 10_000).axes
    peaks = {f"{each.peak_bytes / 1e6:.1f}" for each in found.values()}
    assert {item.get_text() for item in ax.texts} == {*peaks, "budget"}
    losses = {"plain": [3.0, 2.5, 2.0], "all three": [3.0, 2.5, 2.1]}
    (ax,) = lesson_09.draw_losses(losses).axes
    assert [list(line.get_ydata()) for line in ax.lines] == list(losses.values())


def test_a_line_that_changes_the_gradients_is_refused():
    pytest.importorskip("transformers")
    from course_lib.lessons.lesson_02 import own_code

    lines = ("", "model.lm_head.weight.data.mul_(2)")
    with pytest.raises(ValueError, match=r"gradients equal up to rounding, got 'model\.lm_head"):
        own_code.measured_lines(lines=lines)
