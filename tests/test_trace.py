"""Traces of a step."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from training_steps import mlp

from course_lib.memory import MemoryMeter
from course_lib.models import deep_mlp


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


@pytest.mark.parametrize("paths", [False, True])
def test_trace_knows_the_module_of_each_operator_if_it_is_asked_to(paths):
    model = deep_mlp(2, 8)
    with MemoryMeter(model, module_paths=paths) as meter:
        model(torch.randn(4, 8)).sum().backward()
    trace = meter.trace()
    products = [
        (phase, trace.modules[i])
        for i, (operator, phase) in enumerate(trace.operators)
        if "mm" in str(operator) and i in trace.modules
    ]
    first, second = (name for name, part in model.named_modules() if isinstance(part, nn.Linear))
    # The first layer needs no gradient of its input.
    expected = [("forward", first), ("forward", second)]
    expected += [("backward", second), ("backward", second), ("backward", first)]
    assert products == expected if paths else trace.modules == {}


def test_trace_without_events_has_only_sums():
    with MemoryMeter() as meter:
        deep_mlp(2, 8)(torch.randn(4, 8)).sum().backward()
    trace = meter.trace(events=False)
    assert np.array_equal(trace.live, meter.trace().live)
    with pytest.raises(ValueError, match=r"made with events, got"):
        next(trace.events())
