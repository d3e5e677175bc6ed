"""Samples and phases of a timeline, the plot of it, and the trace of a step."""

import sys
from itertools import groupby

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from training_steps import Wrapper, at_end, bytes_of, mlp, train

from course_lib.memory import CATEGORIES, PHASES, MemoryMeter
from course_lib.models import deep_mlp


def test_sample_names_its_operator_and_its_bytes():
    with MemoryMeter() as meter:
        x = torch.ones(10) + 1
    samples = [(sample.operator, sample.live_bytes) for sample in meter.timeline[0:2]]
    assert samples == [("aten.ones.default", 40), ("aten.add.Tensor", 80)]
    assert meter.timeline[-1].bytes["temporary"] == x.nbytes and hash(meter.timeline[-1])


def turns(meter):
    """Return the phases in order, each once per uninterrupted stretch."""
    return [phase for phase, _ in groupby(meter.phases())]


def phases_of(meter, operator):
    return {each.phase for each in meter.timeline if each.operator.startswith(f"aten.{operator}")}


@pytest.mark.parametrize(
    ("optimizer", "fails"), [(torch.optim.Adam, False), (Wrapper, False), (Wrapper, True)]
)
def test_optimizer_phase_ends_with_the_outermost_optimizer(optimizer, fails):
    model, optimizer, step = train(deep_mlp(2, 16), torch.randn(4, 16), optimizer=optimizer)
    with MemoryMeter(model, optimizer) as meter:
        if fails:
            optimizer.base.step = None  # calling it fails, within the outer step
            with pytest.raises(TypeError):
                step()
            del optimizer.base.step
        step()
        with torch.no_grad():
            model(torch.ones(1, 16))
    assert turns(meter)[-4:] == ["forward", "backward", "optimizer", "forward"]
    if isinstance(optimizer, Wrapper):
        assert phases_of(meter, "_foreach_mul_") == {"optimizer"}
        assert at_end(meter)["optimizer"] == bytes_of(optimizer.held_tensors())


def test_optimizer_that_steps_in_backward_has_its_own_phase():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(32, 64)
    optimizers = {p: torch.optim.Adam([p], foreach=False) for p in model.parameters()}

    def step_now(parameter):
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_now)
    with MemoryMeter(model) as meter:
        model(x).sum().backward()
    assert turns(meter)[:3] == ["forward", "backward", "optimizer"]
    assert turns(meter).count("optimizer") >= 2  # between parts of the backward pass
    assert phases_of(meter, "addcdiv") == {"optimizer"}
    assert phases_of(meter, "mm") == {"backward"}
    # The gradients are never live all at once.
    assert meter.series()["gradient"].max() < bytes_of(model.parameters())


def test_closure_of_an_optimizer_is_forward_and_backward():
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = model(x).pow(2).sum()
        loss.backward()
        return loss

    with MemoryMeter(model, optimizer) as meter:
        optimizer.step(closure)
    assert set(meter.phases()) == set(PHASES)
    assert phases_of(meter, "addmm") == {"forward"}


def test_plot_marks_the_peak():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    model, optimizer, step = mlp()
    with MemoryMeter(model, optimizer) as meter:
        step()
    _, ax = pyplot.subplots()
    assert meter.plot(ax) is ax
    pyplot.close("all")
    (moment,), (height,) = ax.lines[0].get_data()
    assert height == meter.peak_bytes / 1e6
    assert meter.timeline[moment - 1].live_bytes == meter.peak_bytes
    assert {text.get_text() for text in ax.get_legend().get_texts()} <= set(CATEGORIES)


def test_plot_without_matplotlib_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with MemoryMeter() as meter:
        torch.ones(4)
    with pytest.raises(ModuleNotFoundError, match=r"`pip install matplotlib`"):
        meter.plot()


# ---- the trace


def test_trace_has_the_figures_and_events_of_the_meter():
    model, optimizer, step = mlp()
    step()
    with MemoryMeter(model, optimizer) as meter, FlopCounterMode(display=False) as flops:
        step()
    trace = meter.trace()
    assert len(trace) == meter.operator_count + 1 and np.array_equal(trace.replay(), trace.live)
    for name, values in meter.series().items():
        assert np.array_equal(trace.series()[name][1:], values)
    assert (trace.peak_bytes, trace.at_peak()) == (meter.peak_bytes, meter.at_peak())
    assert meter.flops == trace.flops == flops.get_total_flops()
    assert trace.flops == sum(trace.flops_by_operator().values())
    births: dict = {}
    for event in trace.events():
        births.setdefault(event.storage, event)  # later events are its end, or another category
    assert {event.kind for event in births.values()} == {"birth"}
    assert sum(event.bytes for event in births.values() if event.moment == 0) == meter.entry_bytes
    made = [event.bytes for event in births.values() if event.operator == "aten.addmm.default"]
    assert made == [256 * 128 * 4] * 6
    sums = meter.trace(events=False)
    assert np.array_equal(sums.live, trace.live)
    with pytest.raises(ValueError, match=r"made with events, got"):
        next(sums.events())
