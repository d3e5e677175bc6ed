"""`make bench`: its statistics, its rows, and the two pages that are written from them."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def board(monkeypatch):
    """The modules `scoreboard` and `page` of benchmarks/."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)
    yield importlib.import_module("scoreboard"), importlib.import_module("page")
    for name in set(sys.modules) - before:
        if "benchmarks" in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


def test_a_row_has_the_ratio_of_medians_and_the_quartiles_of_the_rounds(board, monkeypatch):
    scoreboard, _ = board
    seconds = {"course": [2.0, 4.0, 3.0], "peer": [1.0, 1.0, 2.0]}
    monkeypatch.setattr(scoreboard, "in_turns", lambda arms, rounds: seconds)
    sizes, notes = {"course": 10, "peer": 20}, {"peer": "why"}
    [row] = scoreboard.compare("work", seconds, 3, bytes_of=sizes, notes=notes)
    assert (row.ratio, row.low, row.high) == (3.0, 1.5, 4.0)  # of 2, 4 and 1.5
    assert (row.course_bytes, row.peer_bytes, row.note) == (10, 20, "why")


def test_each_function_is_called_once_a_round_and_once_before(board):
    scoreboard, _ = board
    calls = []
    arms = {name: lambda name=name: calls.append(name) for name in ("course", "peer")}
    list(scoreboard.compare("work", arms, 2))
    assert calls == ["course", "peer", "peer", "course", "course", "peer"]


def test_every_group_of_the_page_has_rows_and_one_of_them_runs(board):
    _, page = board
    for group in page.GROUPS:
        text = (ROOT / "benchmarks" / f"{group}.py").read_text()
        assert "def rows(rounds: int) -> Iterator[Row]:" in text, group
        # A comparison with a peer is short; peers and models have files of their own.
        assert text.count("\n") <= 60 or group in ("growth", "fuzz", "faults"), group
    row = next(importlib.import_module("loss").rows(1))
    assert row.peer == "F.cross_entropy" and row.ratio > 0
    assert row.course_bytes < row.peer_bytes / 4


@pytest.mark.filterwarnings("ignore")
def test_random_cases_find_no_difference_and_an_error_counts_as_one(board):
    fuzz = importlib.import_module("fuzz")
    for check in fuzz.CHECKS[:-1]:  # test_budget_search.py has a grid of its own for `fit`
        row = fuzz.tally(check, 1 if check.cases < 100 else 5)
        assert "cases, 0 differences, at most " in row.note, row
    wrong = fuzz.Check("a", "b", lambda draw: 1 / draw.choice([0]), 1)
    assert "2 cases, 2 differences" in fuzz.tally(wrong, 2).note


FAULTS = {
    "train_step": ["allocations", "writes"],
    "AccumulatedStep, DDP": ["forward", "backward"],
    "OffloadedOptimizer on streams": ["forward", "update"],
}


def notes_of_faults(names, device="cpu"):
    """Notes of each step, by name, made in one new process as `make bench` does, since autograd
    refuses to run in a fork of one that has started its threads. Ctrl-C is enabled, because a shell
    disables it for what runs in the background."""
    code = "import faults, json, signal\n"
    code += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += f"for name in {list(names)!r}:\n"
    code += f"    notes = [row.note for row in faults.of_step(name, 1, {device!r})]\n"
    code += "    print(json.dumps([name, notes]), flush=True)\n"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return dict(map(json.loads, ran.stdout.splitlines()))


def assert_that_nothing_is_lost(notes):
    assert len(notes) >= 4 and all(note.endswith("; lost: nothing") for note in notes), notes


@pytest.fixture(scope="module")
def notes():
    return notes_of_faults(FAULTS)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks processes")
@pytest.mark.parametrize("name", FAULTS)
def test_faults_at_each_kind_of_place_lose_nothing(notes, name):
    assert_that_nothing_is_lost(notes[name])
    assert all(any(f"{kind} " in note for note in notes[name]) for kind in FAULTS[name]), notes


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    [
        "MemoryMeter",
        "checkpoint, reentrant",
        "checkpoint, not reentrant",
        "checkpoint, selective",
        "checkpoint_blocks",
        "checkpoint_blocks, autocast",
        "checkpointed_loss",
        "schedule_blocks",
        "offload_activations",
        "OffloadedOptimizer",
        "AccumulatedStep",
        "AccumulatedStep, GradScaler",
        "AccumulatedStep, DDP",
        "flash_attention",
        "train_step",
    ],
)
def test_faults_on_a_gpu_lose_nothing(name):
    assert_that_nothing_is_lost(notes_of_faults([name], "cuda")[name])


@pytest.mark.filterwarnings("ignore")
def test_a_fault_that_leaves_a_hook_and_half_a_gradient_is_noticed(board, monkeypatch):
    faults = importlib.import_module("faults")

    def leaves(folder):
        step = faults.STEPS["MemoryMeter"](folder)
        call, weight = step.call, next(step.model.parameters())

        def dirty():
            try:
                call()
            except BaseException:
                weight.grad = weight.detach().clone()
                step.model.register_forward_hook(lambda *_: None)
                raise

        step.call = dirty
        return step

    monkeypatch.setitem(faults.STEPS, "dirty", leaves)
    row = next(faults.of_step("dirty", 1))
    assert "hooks (3 times)" in row.note and "gradients (3 times)" in row.note


def test_the_stored_pages_have_every_group_and_the_same_figures(board):
    _, page = board
    names = ("scoreboard.md", "scoreboard.zh.md")
    en, zh = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in names)
    tables = [[line for line in text.splitlines() if line.startswith("|")] for text in (en, zh)]
    assert len(tables[0]) == len(tables[1]) > 60
    for english, chinese in zip(*tables, strict=True):
        figures = [sorted(re.findall(r"\d+(?:[.,]\d+)*", row)) for row in (english, chinese)]
        assert figures[0] == figures[1]
    for titles in page.GROUPS.values():
        assert f"## {titles[0]}\n" in en and f"## {titles[2]}\n" in zh
