"""Traces of a step."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from training_steps import mlp

from course_lib.memory import MemoryMeter
from course_lib.models import deep_mlp


def test_a_trace_replayed_is_what_the_meter_counted_operator_by_operator():
    model, optimizer, step = mlp()
    step()
    with MemoryMeter(model, optimizer) as meter, FlopCounterMode(display=False) as flops:
        step()
    trace = meter.trace()
    assert len(trace) == meter.operator_count + 1 and np.array_equal(trace.replayed(), trace.live)
    for name, values in meter.series().items():
        assert np.array_equal(trace.series()[name][1:], values)
    assert (trace.peak_bytes, trace.at_peak()) == (meter.peak_bytes, meter.at_peak())
    assert (
        trace.flops
        == meter.flops
        == flops.get_total_flops()
        == sum(trace.flops_by_operator().values())
    )
    births: dict = {}
    for event in trace.events():
        births.setdefault(event.storage, event)  # what follows is its end, or another category
    assert {event.kind for event in births.values()} == {"birth"}
    assert sum(event.bytes for event in births.values() if event.moment == 0) == meter.entry_bytes
    made = [event.bytes for event in births.values() if event.operator == "aten.addmm.default"]
    assert made == [256 * 128 * 4] * 6


def test_each_moment_of_a_trace_knows_its_module_forward_and_backward():
    with MemoryMeter(model := deep_mlp(2, 8), module_paths=True) as meter:
        model(torch.randn(4, 8)).sum().backward()
    trace = meter.trace()
    products = [
        (trace.modules.get(i, ""), phase)
        for i, (op, phase) in enumerate(trace.operators)
        if "mm" in str(op)
    ]
    linear = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    assert [name for name, phase in products if phase == "forward"] == linear
    # The first one's input needs no gradient.
    backward = [name for name in linear[::-1] for _ in range(1 if name == linear[0] else 2)]
    assert [name for name, phase in products if phase == "backward"] == backward
    with MemoryMeter(model) as meter:
        model(torch.randn(4, 8))
    assert meter.trace().modules == {}


def test_a_trace_without_events_says_so_and_tells_the_rest():
    with MemoryMeter(model := deep_mlp(2, 8)) as meter:
        model(torch.randn(4, 8)).sum().backward()
    trace = meter.trace(events=False)
    assert np.array_equal(trace.live, meter.trace().live)
    with pytest.raises(ValueError, match=r"^spans must be those of a trace [^\n]*, got None; "):
        next(trace.events())
