"""Test the benchmarks: statistics, and injected faults."""

import importlib
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def board(monkeypatch):
    """The module `scoreboard` of benchmarks/."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)
    yield importlib.import_module("scoreboard")
    for name in set(sys.modules) - before:
        if "benchmarks" in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


def test_compare_returns_median_ratio_and_quartiles_of_benchmark_rounds(board, monkeypatch):
    seconds = {"course": [2.0, 4.0, 3.0], "peer": [1.0, 1.0, 2.0]}
    monkeypatch.setattr(board, "in_turns", lambda arms, rounds: seconds)
    sizes, notes = {"course": 10, "peer": 20}, {"peer": "why"}
    [row] = board.compare("work", seconds, 3, bytes_of=sizes, notes=notes)
    assert (row.ratio, row.low, row.high) == (3.0, 1.5, 4.0)  # of 2, 4 and 1.5
    assert (row.course_bytes, row.peer_bytes, row.note) == (10, 20, "why")


def test_compare_alternates_benchmarked_functions_after_one_warmup_call(board):
    calls = []
    functions = {name: partial(calls.append, name) for name in ("course", "peer")}
    list(board.compare("work", functions, 2))
    assert calls == ["course", "peer", "peer", "course", "course", "peer"]


@pytest.mark.filterwarnings("ignore")
def test_fuzz_checks_find_no_differences_and_count_exceptions_as_differences(board):
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
    """Return the notes of each step by name, from a new process.

    Autograd cannot run in a fork of a process that has started its threads. Ctrl-C is enabled,
    because a shell disables it for background processes.
    """
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


def assert_nothing_is_lost(notes):
    assert len(notes) >= 4 and all(note.endswith("; lost: nothing") for note in notes), notes


@pytest.fixture(scope="module")
def notes():
    return notes_of_faults(FAULTS)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks processes")
@pytest.mark.parametrize("name", FAULTS)
def test_step_restores_all_state_after_injected_exceptions(notes, name):
    assert_nothing_is_lost(notes[name])
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
def test_step_on_gpu_restores_all_state_after_injected_exceptions(name):
    assert_nothing_is_lost(notes_of_faults([name], "cuda")[name])


@pytest.mark.filterwarnings("ignore")
def test_fault_injection_reports_leaked_hook_and_leftover_gradient(board, monkeypatch):
    faults = importlib.import_module("faults")

    def step_that_leaks(folder):
        step = faults.STEPS["MemoryMeter"](folder)
        call, weight = step.call, next(step.model.parameters())

        def call_and_leak():
            try:
                call()
            except BaseException:
                weight.grad = weight.detach().clone()
                step.model.register_forward_hook(lambda *_: None)
                raise

        step.call = call_and_leak
        return step

    monkeypatch.setitem(faults.STEPS, "leaks", step_that_leaks)
    row = next(faults.of_step("leaks", 1))
    assert "hooks (3 times)" in row.note and "gradients (3 times)" in row.note
