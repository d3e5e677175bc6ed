"""Bytes per device, in symbolic steps and on a GPU."""

import gc
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from training_steps import at_end, bytes_of, empty_gradients

from course_lib.memory import PHASES, MemoryBudgetExceeded, MemoryMeter, measure, symbolic
from course_lib.models import Decoder, deep_mlp, random_tokens

# autograd takes its symbolic tensors without such hardware; those of "cuda" only without gradients
SECOND = "lazy"


def on_second_device(hooks, device=SECOND, optimizer=torch.optim.SGD, **options):
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


def test_what_a_step_keeps_in_host_memory_is_no_part_of_its_devices_figures():
    packed = []

    def kept_nowhere():
        def pack(tensor):
            packed.append(tensor.nbytes)
            return tensor.shape

        return saved_tensors_hooks(pack, torch.empty)

    with symbolic():
        given = on_second_device(save_on_cpu, lr=0.1, momentum=0.9)
        meter = metered(given)
        twin = on_second_device(kept_nowhere, "cpu", lr=0.1, momentum=0.9)
        packed.clear()
        alone = metered(twin)
        assert meter.peak_bytes == alone.peak_bytes
        assert meter.at_peak() == alone.at_peak()
        assert (meter.entry_bytes, meter.live_bytes) == (alone.entry_bytes, alone.live_bytes)
        assert max(sample.live_bytes for sample in meter.timeline) == meter.peak_bytes
        assert (str(meter.device), str(alone.device)) == (SECOND, "cpu")
        host = torch.device("cpu")
        assert meter.peak_bytes_by_device == {
            torch.device(SECOND): meter.peak_bytes,
            host: sum(packed),
        }
        assert alone.peak_bytes_by_device == {host: alone.peak_bytes}

        metered(given, budget_bytes=meter.peak_bytes)
        with pytest.raises(MemoryBudgetExceeded):
            metered(given, budget_bytes=meter.peak_bytes - 1)

        on_host = metered(given, device="cpu")
        assert on_host.peak_bytes == sum(packed)
        assert on_host.peak_bytes_by_device == meter.peak_bytes_by_device
        assert sum(on_host.at_peak().values()) == on_host.peak_bytes and on_host.entry_bytes == 0


def test_step_counts_that_adam_keeps_on_the_cpu_are_no_part_of_what_its_device_holds():
    with symbolic():
        model, optimizer, _ = given = on_second_device(nullcontext, optimizer=torch.optim.Adam)
        assert {state["step"].device.type for state in optimizer.state.values()} == {"cpu"}
        meter = metered(given)
        assert meter.entry_bytes == 3 * bytes_of(model.parameters())
        assert metered(given, device="cpu").entry_bytes == 4 * len(optimizer.state)


def test_the_device_is_the_cpu_until_the_first_accelerator_is_met():
    with symbolic(), MemoryMeter() as meter:
        on_cpu = torch.ones(100)
        assert meter.live_bytes == meter.peak_bytes == on_cpu.nbytes
        first = torch.ones(10, device="cuda")
        assert meter.live_bytes == meter.peak_bytes == first.nbytes
        second, state = torch.ones(1000, device="cuda:1"), torch.get_rng_state()
        second.resize_(2000)
        assert meter.live_bytes == meter.peak_bytes == first.nbytes
    # before it too, no other device's
    assert [sample.live_bytes for sample in meter.timeline] == [0, 40, 40, 40, 40]
    found = {str(device): count for device, count in meter.peak_bytes_by_device.items()}
    assert found == {
        "cpu": on_cpu.nbytes + state.nbytes,
        "cuda:0": first.nbytes,
        "cuda:1": second.nbytes,
    }
    assert str(meter.device) == "cuda:0"
    assert MemoryMeter().peak_bytes_by_device == {}


def test_the_first_tensor_of_an_accelerator_may_be_the_one_that_passes_the_budget():
    with symbolic(), MemoryMeter(budget_bytes=500):
        on_cpu = torch.ones(100)  # noqa: F841
        with pytest.raises(MemoryBudgetExceeded) as caught:
            torch.ones(200, device="cuda")
        assert (caught.value.live_bytes, caught.value.wanted_bytes) == (0, 800)
        first, more = torch.ones(75, device="cuda"), torch.ones(200)  # noqa: F841 - which the CPU's bytes do not
        with pytest.raises(MemoryBudgetExceeded) as caught:
            torch.ones(60, device="cuda")
        assert (caught.value.live_bytes, caught.value.wanted_bytes) == (300, 240)


@pytest.mark.parametrize(
    ("device", "name", "count"),
    [
        ("cpu", "cpu", 1),
        ("cpu:0", "cpu", 1),
        ("cuda", "cuda:0", 10),
        (torch.device("cuda:1"), "cuda:1", 100),
    ],
)
def test_a_device_that_is_named_is_counted_whichever_comes_first(device, name, count):
    with symbolic(), MemoryMeter(device=device) as meter:
        made = [torch.ones(n, device=d) for n, d in ((10, "cuda"), (100, "cuda:1"), (1, "cpu"))]
    assert (str(meter.device), meter.peak_bytes) == (name, 4 * count)
    assert sum(meter.peak_bytes_by_device.values()) == bytes_of(made)


def test_meta_tensors_count_where_that_device_is_named():
    def step():
        model(x).sum().backward()

    with torch.device("meta"):
        model, x = deep_mlp(4, 64), torch.ones(32, 64)
    found = measure(step, model=model, device="meta")
    assert metered((model, None, step)).peak_bytes == 0
    with symbolic():
        model, x = deep_mlp(4, 64), torch.ones(32, 64)
        alike = measure(step, model=model)
    assert (found.peak_bytes, found.at_peak, found.flops) == (
        alike.peak_bytes,
        alike.at_peak,
        alike.flops,
    )
    assert (found.device, found.allocator_peak_bytes, found.seconds, found.notes) == (
        "meta",
        None,
        None,
        (),
    )


def test_measure_counts_the_device_that_it_is_told():
    with symbolic():
        model, optimizer, step = given = on_second_device(save_on_cpu, lr=0.1)
        for options in ({}, {"device": "cpu"}):
            found, meter = (
                measure(step, model=model, optimizer=optimizer, **options),
                metered(given, **options),
            )
            assert (found.peak_bytes, found.at_peak) == (meter.peak_bytes, meter.at_peak())
            assert found.device == options.get("device", SECOND)


def gpu_decoder():
    model = Decoder(
        vocabulary=1000, hidden=256, heads=8, layers=4, sequence=128, dropout=0.1
    ).cuda()
    tokens = random_tokens(8, 128, 1000).cuda()
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        model.loss(tokens).backward()
        optimizer.step()

    return model, optimizer, step


def requested(which):
    """What programs asked of the CUDA allocator; what it hands out is up to 1 MB a block more."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]


class Requests(TorchDispatchMode):
    """The most bytes asked for and not given back at an operator's end, and the most that one held
    beyond that."""

    between = workspace = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = requested("current")
        torch.cuda.reset_peak_memory_stats()
        result = func(*args, **(kwargs or {}))
        after = requested("current")
        self.between = max(self.between, after)
        self.workspace = max(self.workspace, requested("peak") - max(before, after))
        return result


def before_a_gpu_step(model, step):
    """What is asked for then; warmed up: cuBLAS asks for workspace once a thread and keeps it, Adam
    makes its state."""
    for _ in range(2):
        empty_gradients(model)
        step()
    empty_gradients(model)
    gc.collect()
    return requested("current")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "hooks", [nullcontext, partial(save_on_cpu, pin_memory=True)], ids=["plain", "save_on_cpu"]
)
def test_on_a_gpu_the_meters_peak_is_what_was_asked_of_the_allocator(hooks):
    """Equal to the byte at operators' ends, where workspace is free again: both modes see the same
    operators, none of whose gradients meet (which a mode would add out of place, and the meter
    counts as added in place).
    """
    model, optimizer, step = on_second_device(hooks, "cuda", torch.optim.Adam)
    before = before_a_gpu_step(model, step)
    with Requests() as asked:
        step()
    empty_gradients(model)
    meter = metered((model, optimizer, step))
    assert meter.peak_bytes == asked.between - before + meter.entry_bytes
    kept = meter.peak_bytes_by_device.get(torch.device("cpu"), 0)
    # at least the layers' inputs
    assert kept == 0 if hooks is nullcontext else kept >= 4 * 32 * 64 * 4


@pytest.mark.gpu
def test_on_a_gpu_the_allocators_peak_is_within_one_operators_workspace_of_the_meters():
    """No mode is active where the allocator's peak is taken. It is never below the meter's: at each
    operator's end all that the meter counts is allocated. Nor is it above by more than an operator
    takes beyond what it found or left.
    """
    model, optimizer, step = gpu_decoder()
    before = before_a_gpu_step(model, step)
    with Requests() as asked:
        step()
    empty_gradients(model)
    meter = metered((model, optimizer, step))
    torch.cuda.reset_peak_memory_stats()
    step()
    seen = meter.entry_bytes + requested("peak") - before
    assert meter.peak_bytes <= seen <= meter.peak_bytes + asked.workspace
    assert sum(meter.at_peak().values()) == meter.peak_bytes


@pytest.mark.gpu
def test_on_a_gpu_measure_of_the_cpu_looks_at_the_cpus_allocator():
    x = torch.ones(1 << 22, device="cuda")

    def step():
        (torch.ones(1 << 18) * 2).sum()
        (x * 2).sum()

    found = measure(step, needs_gradient=False, device="cpu", repeats=1)
    assert found.peak_bytes == 2 << 20  # both of the small tensors
    assert 2 << 20 <= found.allocator_peak_bytes < x.nbytes


@pytest.mark.gpu
def test_on_a_gpu_measure_reports_the_device_and_the_allocators_figures():
    model, optimizer, step = gpu_decoder()
    before = torch.cuda.get_rng_state()
    found = measure(step, model=model, optimizer=optimizer, repeats=1)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert found.device.startswith("cuda")
    assert found.allocator_peak_bytes > 0
    assert found.workspace_bytes == found.allocator_peak_bytes - found.peak_bytes
    assert found.workspace_bytes >= 0
    assert sum(found.at_peak.values()) == found.peak_bytes
    assert found.seconds > 0


@pytest.mark.gpu
def test_on_a_gpu_the_backward_pass_of_autograds_own_thread_is_counted():
    model, optimizer, step = gpu_decoder()
    with MemoryMeter(model, optimizer) as meter:
        step()
    assert set(meter.phases()) == set(PHASES)
    assert at_end(meter)["gradient"] == at_end(meter)["parameter"] == bytes_of(model.parameters())
    total = sum(meter.series().values())
    assert total.max() == meter.peak_bytes
    assert at_end(meter)["activation"] == 0
