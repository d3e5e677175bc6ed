"""Symbolic steps take the bytes of real steps, and change nothing outside. The steps of whole
models are compared in `test_estimate_equals_run.py`."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from training_steps import CountingBackend

from course_lib.memory import MemoryMeter, symbolic
from course_lib.models import deep_mlp
from course_lib.symbolic import mode


def test_rows_selected_by_a_mask_or_a_stride_take_the_bytes_of_the_real_step():
    def run():
        with MemoryMeter() as meter:
            x = torch.randn(4, 6, 3, requires_grad=True)
            mask = torch.arange(24).view(4, 6) % 5 == 0
            h = (x.flatten(0, 1) * 2).view(4, 6, 3)
            h[mask] = torch.ones(3)
            h[0] = torch.zeros(3)
            h[:, 1].mul_(3)
            (h[~mask].exp().sum() + h[1].square().sum()).backward()
        return meter.peak_bytes, meter.at_peak(), meter.live_bytes

    real = run()
    with symbolic():
        assert run() == real


def test_truncated_normal_weights_can_be_symbolic():
    with symbolic():
        weight = nn.init.trunc_normal_(nn.Parameter(torch.empty(5, 5)), std=0.02)
        assert isinstance(weight, nn.Parameter)
    assert nn.init.trunc_normal_(torch.empty(500), a=-0.5, b=0.5).abs().max() <= 0.5


def test_symbolic_step_restores_the_random_number_generator():
    state = torch.get_rng_state()
    with symbolic():
        assert len(set(torch.randint(0, 10**6, (50,)).tolist())) > 1
        torch.manual_seed(3)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.fixture
def backend():
    yield CountingBackend()
    torch.compiler.reset()


def test_module_compiled_before_runs_uncompiled_in_a_symbolic_step(backend):
    compiled = torch.compile(deep_mlp(2, 32), backend=backend, fullgraph=True)
    compiled(torch.randn(8, 32))
    peaks = []
    for make in (deep_mlp, lambda *sizes: torch.compile(deep_mlp(*sizes), backend=backend)):
        with symbolic():
            model, x = make(2, 32), torch.randn(64, 32)
            with MemoryMeter(model) as meter:
                model(x).sum().backward()
        peaks.append(meter.peak_bytes)
    assert peaks[0] == peaks[1] and backend.runs == 1
    compiled(torch.randn(8, 32))
    assert backend.runs == 2


@pytest.mark.parametrize("loaded", [False, True])
def test_function_compiled_in_a_symbolic_step_runs_uncompiled(loaded, monkeypatch, backend):
    if not loaded:  # as in a process that has compiled nothing yet
        monkeypatch.setattr(mode, "sys", SimpleNamespace(modules={}))
    with symbolic():
        function = torch.compile(lambda x: x.sin(), backend=backend, fullgraph=True)
        with MemoryMeter():
            function(torch.randn(3))
    assert backend.runs == 0
    function(torch.randn(3))
    assert backend.runs == 1
