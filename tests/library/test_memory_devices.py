"""Tests of bytes per device, in symbolic steps and on a GPU."""

import gc
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from training_steps import at_end, bytes_of, empty_gradients

from course_lib.memory import PHASES, MemoryBudgetExceeded, MemoryMeter, measure, symbolic
from course_lib.models import Decoder, deep_mlp, random_tokens

# Autograd runs on symbolic tensors of this device without the hardware, unlike on "cuda".
SECOND_DEVICE = "lazy"


def on_second_device(hooks, device=SECOND_DEVICE, optimizer=torch.optim.SGD, **options):
    with torch.device(device):
        model, x = deep_mlp(4, 64), torch.ones(32, 64)
    optimizer = optimizer(model.parameters(), foreach=False, **options)

    def step():
        with hooks():
            loss = model(x).sum()
        loss.backward()
        optimizer.step()

    step()
    empty_gradients(model)
    return model, optimizer, step


def metered(given, **options):
    model, optimizer, step = given
    with MemoryMeter(model, optimizer, **options) as meter:
        step()
    empty_gradients(model)
    return meter


def test_meter_of_device_excludes_tensors_in_host_memory():
    packed, host = [], torch.device("cpu")

    def drop_saved_tensors():
        def pack(tensor):
            packed.append(tensor.nbytes)
            return tensor.shape

        return saved_tensors_hooks(pack, torch.empty)

    with symbolic():
        given = on_second_device(save_on_cpu, lr=0.1, momentum=0.9)
        meter = metered(given)
        without_saved = on_second_device(drop_saved_tensors, host, lr=0.1, momentum=0.9)
        packed.clear()
        alone = metered(without_saved)
        assert meter.at_peak() == alone.at_peak()
        assert (meter.entry_bytes, meter.live_bytes) == (alone.entry_bytes, alone.live_bytes)
        assert max(sample.live_bytes for sample in meter.timeline) == meter.peak_bytes
        assert (str(meter.device), str(alone.device)) == (SECOND_DEVICE, "cpu")
        by_device = {torch.device(SECOND_DEVICE): meter.peak_bytes, host: sum(packed)}
        assert meter.peak_bytes_by_device == by_device
        assert alone.peak_bytes_by_device == {host: meter.peak_bytes}

        on_host = metered(given, device="cpu")
        assert on_host.peak_bytes == sum(on_host.at_peak().values()) == sum(packed)
        assert on_host.peak_bytes_by_device == by_device and on_host.entry_bytes == 0


def test_meter_of_device_excludes_adam_step_counters_on_cpu():
    with symbolic():
        model, optimizer, _ = given = on_second_device(nullcontext, optimizer=torch.optim.Adam)
        assert metered(given).entry_bytes == 3 * bytes_of(model.parameters())
        assert metered(given, device="cpu").entry_bytes == 4 * len(optimizer.state)


def test_meter_counts_only_first_accelerator_that_has_tensor():
    with symbolic(), MemoryMeter() as meter:
        on_cpu = torch.ones(100)
        assert meter.live_bytes == meter.peak_bytes == on_cpu.nbytes
        first = torch.ones(10, device="cuda")
        second, state = torch.ones(1000, device="cuda:1"), torch.get_rng_state()
        second.resize_(2000)
        assert meter.live_bytes == meter.peak_bytes == first.nbytes
    # Samples from before that tensor are those of its device too.
    assert [sample.live_bytes for sample in meter.timeline] == [0, 40, 40, 40, 40]
    found = {str(device): count for device, count in meter.peak_bytes_by_device.items()}
    counts = on_cpu.nbytes + state.nbytes, first.nbytes, second.nbytes
    assert found == dict(zip(("cpu", "cuda:0", "cuda:1"), counts, strict=True))
    assert str(meter.device) == "cuda:0"
    assert MemoryMeter().peak_bytes_by_device == {}


def test_memory_budget_applies_from_first_tensor_on_accelerator():
    with symbolic(), MemoryMeter(budget_bytes=500):
        held = [torch.ones(100)]
        for count, live in ((200, 0), (60, 300)):
            with pytest.raises(MemoryBudgetExceeded) as caught:
                torch.ones(count, device="cuda")
            assert (caught.value.live_bytes, caught.value.wanted_bytes) == (live, 4 * count)
            if live == 0:
                held += torch.ones(75, device="cuda"), torch.ones(200)


@pytest.mark.parametrize(
    ("device", "name", "count"),
    [("cpu:0", "cpu", 1), ("cuda", "cuda:0", 10), (torch.device("cuda:1"), "cuda:1", 100)],
)
def test_meter_counts_selected_device_despite_earlier_tensors_on_others(device, name, count):
    with symbolic(), MemoryMeter(device=device) as meter:
        tensors = [torch.ones(n, device=d) for n, d in ((10, "cuda"), (100, "cuda:1"), (1, "cpu"))]
    assert (str(meter.device), meter.peak_bytes) == (name, 4 * count)
    assert sum(meter.peak_bytes_by_device.values()) == bytes_of(tensors)


def test_measure_on_meta_device_equals_symbolic_measurement():
    def backward():
        model(x).sum().backward()

    found = []
    for context, device in ((torch.device("meta"), "meta"), (symbolic(), None)):
        with context:
            model, x = deep_mlp(4, 64), torch.ones(32, 64)
            found.append(measure(backward, model=model, device=device))
        assert (metered((model, None, backward)).peak_bytes == 0) == (device == "meta")
    assert [each.device for each in found] == ["meta", "cpu"]
    assert replace(found[0], device="cpu") == found[1] and hash(found[0])
    assert found[1].allocator_peak_bytes is found[1].workspace_bytes is found[1].seconds is None


def requested_bytes():
    """Return the bytes requested from the CUDA allocator, which rounds each block up."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


class RequestedPeak(TorchDispatchMode):
    """Mode that notes in `peak_bytes` the most bytes requested at the end of an operator."""

    peak_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.peak_bytes = max(self.peak_bytes, requested_bytes())
        return result


@pytest.mark.gpu
@pytest.mark.parametrize(
    "hooks", [nullcontext, partial(save_on_cpu, pin_memory=True)], ids=["plain", "save_on_cpu"]
)
def test_meter_peak_equals_bytes_requested_from_gpu_allocator(hooks):
    """Compare the peaks at the ends of operators, where no workspace is allocated.

    No gradients meet in this step, because a dispatch mode would add them out of place.
    """
    model, optimizer, step = given = on_second_device(hooks, "cuda", torch.optim.Adam)
    metered(given)  # allocates what stays, such as the workspace of cuBLAS
    gc.collect()
    before = requested_bytes()
    with RequestedPeak() as allocator:
        step()
    empty_gradients(model)
    meter = metered(given)
    assert meter.peak_bytes == allocator.peak_bytes - before + meter.entry_bytes
    # Autograd's own thread runs the backward pass.
    assert set(meter.phases()) == set(PHASES) and at_end(meter)["activation"] == 0
    assert at_end(meter)["gradient"] == at_end(meter)["parameter"] == bytes_of(model.parameters())
    on_cpu = meter.peak_bytes_by_device[torch.device("cpu")]
    # Adam counts steps on the CPU: 4 bytes per parameter, and a 1 that it adds to all counts.
    counts = 4 * len(optimizer.state)
    if hooks is nullcontext:
        assert counts <= on_cpu <= counts + 4
    else:  # the inputs of the layers are kept at least
        assert on_cpu >= counts + 4 * 32 * 64 * 4


@pytest.mark.gpu
def test_measure_of_cpu_ignores_gpu_allocator():
    x = torch.ones(1 << 22, device="cuda")

    def step():
        (torch.ones(1 << 18) * 2).sum()
        (x * 2).sum()

    found = measure(step, needs_gradient=False, device="cpu", repeats=1)
    assert found.peak_bytes == 2 << 20  # both of the small tensors
    assert 2 << 20 <= found.allocator_peak_bytes < x.nbytes


@pytest.mark.gpu
def test_measure_reports_peak_of_gpu_allocator():
    sizes = {"vocabulary": 1000, "hidden": 256, "heads": 8, "layers": 4, "sequence": 128}
    model, tokens = Decoder(**sizes, dropout=0.1).cuda(), random_tokens(8, 128, 1000).cuda()
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        model.loss(tokens).backward()
        optimizer.step()

    before = torch.cuda.get_rng_state()
    found = measure(step, model=model, optimizer=optimizer, repeats=1)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert found.device.startswith("cuda")
    assert 0 <= found.workspace_bytes == found.allocator_peak_bytes - found.peak_bytes
    assert sum(found.at_peak.values()) == found.peak_bytes
    assert found.seconds > 0
