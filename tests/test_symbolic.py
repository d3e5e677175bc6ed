"""Symbolic steps take the bytes of real steps, and leave everything as it was."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from training_steps import CountingBackend, Encoder, at_end, one_more_sample, train

from course_lib.memory import MemoryMeter, measure, symbolic
from course_lib.models import Decoder, deep_mlp
from course_lib.symbolic import mode


def train_a_model(make_model, *shape, dtype=None):
    def step():
        with sdpa_kernel(SDPBackend.MATH):
            x = torch.zeros(shape, dtype=dtype)
            train(make_model(), x, optimizer=torch.optim.Adam)[2]()

    return step


def decoder():
    return Decoder(vocabulary=50, hidden=32, heads=4, layers=2, sequence=16, dropout=0.1)


def rows_selected_by_a_mask():
    x = torch.randn(4, 6, 3, requires_grad=True)
    mask = torch.arange(24).view(4, 6) % 5 == 0
    h = (x.flatten(0, 1) * 2).view(4, 6, 3)
    h[mask] = torch.ones(3)
    (h[~mask].exp().sum() + h[1].square().sum()).backward()


def rows_selected_by_a_stride():
    h = (torch.randn(10, 3, requires_grad=True) * 2).view(2, 5, 3)
    h[0] = torch.zeros(3)
    h[:, 1].mul_(3)
    h.exp().sum().backward()


STEPS = {
    "decoder": train_a_model(decoder, 2, 16, dtype=torch.long),
    "checkpoint": train_a_model(partial(Encoder, reentrant=False, layers=2, hidden=32), 2, 16, 32),
    "batch norm": train_a_model(partial(nn.BatchNorm1d, 16), 8, 16),
    "mask": rows_selected_by_a_mask,
    "stride": rows_selected_by_a_stride,
}


@pytest.mark.parametrize("name", STEPS)
def test_symbolic_step_takes_the_bytes_of_the_real_step(name):
    def run():
        with MemoryMeter() as meter:
            STEPS[name]()
        return meter.peak_bytes, meter.at_peak(), meter.live_bytes

    real = run()
    with symbolic():
        assert run() == real


def test_symbolic_measurement_has_bytes_and_flops_but_no_seconds():
    found = []
    for context in (nullcontext(), symbolic()):
        with context:
            batch = torch.ones(8, 32)
            model, optimizer, step = train(deep_mlp(3, 32), batch, optimizer=torch.optim.Adam)
            found.append(measure(step, model=model, optimizer=optimizer, repeats=1))
    real, free = found
    figures = real.peak_bytes, real.flops, real.at_peak
    assert hash(real) and (free.peak_bytes, free.flops, free.at_peak) == figures
    assert (free.allocator_peak_bytes, free.workspace_bytes, free.seconds) == (None, None, None)


def test_symbolic_model_of_7_billion_parameters_takes_no_memory():
    with symbolic():
        model = nn.Sequential(*(nn.Linear(32768, 32768, bias=False) for _ in range(7)))
        with MemoryMeter(model) as meter:
            model(torch.ones(1, 32768)).sum().backward()
            one_more_sample()
    assert at_end(meter)["parameter"] == at_end(meter)["gradient"] == 4 * 7 * 32768**2


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


def test_compiled_module_runs_uncompiled_in_a_symbolic_step():
    backend = CountingBackend()
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
    torch.compiler.reset()


@pytest.mark.parametrize("loaded", [False, True])
def test_function_compiled_in_a_symbolic_step_runs_uncompiled(loaded, monkeypatch):
    backend = CountingBackend()
    if not loaded:  # as in a process that has compiled nothing yet
        monkeypatch.setattr(mode, "sys", SimpleNamespace(modules={}))
    with symbolic():
        function = torch.compile(lambda x: x.sin(), backend=backend, fullgraph=True)
        with MemoryMeter():
            function(torch.randn(3))
    assert backend.runs == 0
    function(torch.randn(3))
    assert backend.runs == 1
    torch.compiler.reset()
