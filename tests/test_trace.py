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
    assert trace.flops == meter.flops == sum(trace.flops_by_operator().values())
    assert trace.flops == flops.get_total_flops()
    births: dict = {}
    for event in trace.events():
        births.setdefault(event.storage, event)  # later events are its end, or another category
    assert {event.kind for event in births.values()} == {"birth"}
    assert sum(event.bytes for event in births.values() if event.moment == 0) == meter.entry_bytes
    made = [event.bytes for event in births.values() if event.operator == "aten.addmm.default"]
    assert made == [256 * 128 * 4] * 6


def test_trace_knows_the_module_of_each_operator():
    model = deep_mlp(2, 8)
    with MemoryMeter(model, module_paths=True) as meter:
        model(torch.randn(4, 8)).sum().backward()
    trace = meter.trace()
    products = {"forward": [], "backward": []}
    for i, (operator, phase) in enumerate(trace.operators):
        if "mm" in str(operator):
            products[phase].append(trace.modules.get(i, ""))
    first, second = (name for name, part in model.named_modules() if isinstance(part, nn.Linear))
    # The first layer needs no gradient of its input.
    assert products == {"forward": [first, second], "backward": [second, second, first]}
    with MemoryMeter(model) as meter:
        model(torch.randn(4, 8))
    assert meter.trace().modules == {}


def test_trace_without_events_has_only_sums():
    model = deep_mlp(2, 8)
    with MemoryMeter(model) as meter:
        model(torch.randn(4, 8)).sum().backward()
    trace = meter.trace(events=False)
    assert np.array_equal(trace.live, meter.trace().live)
    with pytest.raises(
        ValueError,
        match=r"^the trace must have been made with events, got one that holds only sums",
    ):
        next(trace.events())
