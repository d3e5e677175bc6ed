"""Tests of the phases of a timeline, its plot, and the trace of a step."""

from itertools import groupby

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from training_steps import OuterOptimizer, at_end, bytes_of, mlp, step_in_backward, train

from course_lib.memory import CATEGORIES, PHASES, MemoryMeter
from course_lib.models import deep_mlp


def phase_order(meter):
    """Return the phases in order, without consecutive repetitions."""
    return [phase for phase, _ in groupby(meter.phases())]


def phases_of(meter, operator):
    return {each.phase for each in meter.timeline if each.operator.startswith(f"aten.{operator}")}


@pytest.mark.parametrize(
    ("optimizer", "fails"),
    [(torch.optim.Adam, False), (OuterOptimizer, False), (OuterOptimizer, True)],
)
def test_optimizer_phase_ends_when_outermost_step_returns(optimizer, fails):
    model, optimizer, step = train(deep_mlp(2, 16), torch.randn(4, 16), optimizer=optimizer)
    with MemoryMeter(model, optimizer) as meter:
        if fails:
            optimizer.base.step = None  # so that the call in the outer step fails
            with pytest.raises(TypeError):
                step()
            del optimizer.base.step
        step()
        with torch.no_grad():
            model(torch.ones(1, 16))
    assert phase_order(meter)[-4:] == ["forward", "backward", "optimizer", "forward"]
    if isinstance(optimizer, OuterOptimizer):
        assert phases_of(meter, "_foreach_mul_") == {"optimizer"}
        assert at_end(meter)["optimizer"] == bytes_of(optimizer.held_tensors())


def test_optimizer_step_in_backward_belongs_to_optimizer_phase():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(32, 64)
    step_in_backward(model, torch.optim.Adam(model.parameters(), foreach=False))
    with MemoryMeter(model) as meter:
        model(x).sum().backward()
    assert phase_order(meter)[:3] == ["forward", "backward", "optimizer"]
    assert phase_order(meter).count("optimizer") >= 2  # between parts of the backward pass
    assert phases_of(meter, "addcdiv") == {"optimizer"}
    assert phases_of(meter, "mm") == {"backward"}
    # The gradients are never live all together.
    assert meter.series()["gradient"].max() < bytes_of(model.parameters())


def test_optimizer_closure_belongs_to_forward_and_backward_phases():
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


def test_timeline_plot_marks_peak():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    model, optimizer, step = mlp()
    with MemoryMeter(model, optimizer) as meter:
        step()
    _, ax = pyplot.subplots()
    assert meter.plot(ax) is ax
    pyplot.close("all")
    (point,), (height,) = ax.lines[0].get_data()
    assert height == meter.peak_bytes / 1e6
    assert meter.timeline[point - 1].live_bytes == meter.peak_bytes
    assert {text.get_text() for text in ax.get_legend().get_texts()} <= set(CATEGORIES)


# ---- the trace


def test_trace_has_same_series_flops_and_events_as_meter():
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
        # Later events of a storage are its release, or a change of category.
        births.setdefault(event.storage, event)
    assert {event.kind for event in births.values()} == {"birth"}
    assert sum(event.bytes for event in births.values() if event.point == 0) == meter.entry_bytes
    outputs = [event.bytes for event in births.values() if event.operator == "aten.addmm.default"]
    assert outputs == [256 * 128 * 4] * 6
    sums = meter.trace(events=False)
    assert np.array_equal(sums.live, trace.live)
    with pytest.raises(ValueError, match=r"made with events, got"):
        next(sums.events())
