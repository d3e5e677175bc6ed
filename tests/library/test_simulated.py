"""Offloading on a simulated device, compared with the same program on plain tensors."""

import gc
import re
import sys
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from fp32_optimizer_reference import FP32Reference
from torch import nn

from course_lib.checkpoint import checkpoint_blocks
from course_lib.models import Decoder, deep_mlp, random_tokens
from course_lib.offload import (
    Device,
    HostStore,
    OffloadedOptimizer,
    Prefetcher,
    offload_activations,
)
from course_lib.simulated import Race, SimulatedDevice
from course_lib.simulated.race_detector import MAX_ACTORS, Event

# ---- scenarios: without a device they are the reference on plain tensors


def offloading(device, **options):
    return offload_activations(HostStore(), min_bytes=1, **options) if device else nullcontext()


def gradients(net):
    return [p.grad for p in net.parameters()]


def mlp_and_data():
    return deep_mlp(5, 32), torch.randn(32, 32)


def activations(device, checkpointed=False, **options):
    net, x = mlp_and_data()
    run = lambda x: net(x).square().sum()  # noqa: E731
    if checkpointed:
        net = Decoder(vocabulary=50, hidden=16, heads=2, layers=2, sequence=8)
        run, x = net.loss, random_tokens(2, 8, 50)
        checkpoint_blocks(net)
    for _ in range(2):
        if device:  # a graph that is dropped before backward
            with offloading(device, **options):
                dropped = run(x)
            del dropped
        with offloading(device, **options):
            loss = run(x)
        loss.backward(retain_graph=True)
        loss.backward()
    return gradients(net)


def fail(module, *_):
    raise InterruptedError


def other_stream(device):
    """Return a context manager of another stream, which waits for all work so far."""
    if device is None:
        return nullcontext
    other, earlier = partial(device.on, device.side("other")), device.event()
    with other():
        device.wait(earlier)
    return other


def two_streams(device, **options):
    """Run two networks in one offloading context, each on a stream that never joins the other."""
    nets, xs = zip(mlp_and_data(), mlp_and_data(), strict=True)
    streams = [partial(device.on, device.current()) if device else nullcontext]
    streams.append(other_stream(device))
    for _ in range(3):
        # The second stream does not wait for this operator of the first one.
        halves = [xs[0] * 1, xs[1]]
        with offloading(device, **options):
            for layers in zip(*nets, strict=True):
                for i in (0, 1):
                    with streams[i]():
                        halves[i] = layers[i](halves[i])
        for i in (0, 1):
            with streams[i]():
                halves[i].square().sum().backward()
    return [*gradients(nets[0]), *gradients(nets[1])]


def passes_that_fail(device, stream=lambda device: nullcontext):
    """Drop graphs on the first stream while their storages are copied."""
    net, x = mlp_and_data()
    on_stream = stream(device)
    for register in (net[7].register_forward_pre_hook, net[7].register_full_backward_pre_hook):
        handle, loss = register(fail), None
        with pytest.raises(InterruptedError), on_stream():
            with offloading(device):
                loss = net(x).sum()
            loss.backward()
        handle.remove()
        del loss
    with on_stream():
        net.zero_grad()
        with offloading(device):  # backward inside drops unfinished copies
            net(x).sum().backward()
    return gradients(net)


def adam(device, net, **options):
    if device is None:
        return FP32Reference(net.parameters(), torch.optim.Adam, lr=0.01, fused=True)
    return OffloadedOptimizer(net.parameters(), torch.optim.Adam, lr=0.01, **options)


def train(device, dtype=torch.float32, change=lambda p: None, **options):
    net = deep_mlp(3, 16).to(dtype)
    data = [torch.randn(8, 16).to(dtype) for _ in range(4)]
    optimizer = adam(device, net, **options)
    for step, x in enumerate(data):
        net.zero_grad(set_to_none=step < 2)
        net(x).square().sum().backward()
        for p in net.parameters():
            change(p)
        optimizer.step()
        if step == 1:  # a change outside the optimizer
            with torch.no_grad():
                for p in (*net.parameters(), *getattr(optimizer, "copies", [])):
                    p.fill_(0.25)
        if step == 2 and device:
            assert [*optimizer.held_tensors()] == []
            optimizer.load_state_dict(optimizer.state_dict())
    return [*net.parameters()]


def change_gradient(p):
    p.grad.mul_(0.5)
    p.grad.data.add_(1.0)  # unseen by autograd; Adam ignores a factor


def interrupted_steps(device):
    """Reuse the memory of gradients after steps that fail."""
    net, data = deep_mlp(3, 16), [torch.randn(8, 16) for _ in range(4)]
    optimizer = adam(device, net)
    (optimizer._base if device else optimizer.plain).register_step_pre_hook(fail)
    for x in data:
        net(x).square().sum().backward()
        with pytest.raises(InterruptedError):
            optimizer.step()
        for p in net.parameters():
            p.grad = None
        for p in net.parameters():
            torch.zeros_like(p)
    return [*net.parameters()]


def prefetched(device):
    """Prefetch from one pinned buffer that the loader fills repeatedly."""
    if device is None:
        return [torch.full((300,), 2.0 * i) for i in range(6)]
    buffer = device.pinned((300,), torch.float32)
    found = []
    for batch in Prefetcher((buffer.fill_(float(i)) for i in range(6)), device):
        found.append(batch * 2)
        del batch
        torch.empty(300).fill_(7.0)
    return found


SCENARIOS = {
    "mlp": activations,
    "mlp, 4 in flight": partial(activations, in_flight=4),
    "checkpointed decoder": partial(activations, checkpointed=True),
    **{f"two streams, prefetch {n}": partial(two_streams, prefetch=n) for n in (0, 1)},
    "failed passes": passes_that_fail,
    "failed passes on another stream": partial(passes_that_fail, stream=other_stream),
    "optimizer": train,
    "optimizer, bf16": partial(train, dtype=torch.bfloat16),
    "optimizer, no overlap": partial(train, overlap=False),
    "optimizer, gradients changed": partial(train, change=change_gradient),
    "optimizer, interrupted": interrupted_steps,
    "prefetcher": prefetched,
}


MODES = {"at once": {}, "late": {"late": True}, "early": {"early": True}}


def outcome(scenario, mode):
    """Return the tensors of a scenario on a device, and its races."""
    torch.manual_seed(0)
    gc.collect()
    with SimulatedDevice(**MODES[mode]) as device:
        found = scenario(device)
        for stream in ("compute", "other"):
            device.finish(device.side(stream).event())
        races = list(device.races)
        device.races.clear()
    return [tensor.detach() for tensor in found], races


@cache
def expected(scenario):
    torch.manual_seed(0)
    return [tensor.detach() for tensor in scenario(None)]


#: Scenarios that find each removed ordering.
SUFFICIENT = ["two streams, prefetch 1", "two streams, prefetch 0", "failed passes"]
SUFFICIENT += ["failed passes on another stream", "optimizer", "optimizer, interrupted"]
SUFFICIENT += ["prefetcher"]


@pytest.mark.parametrize(
    ("name", "mode"),
    [*((name, "late") for name in SCENARIOS), *((name, "early") for name in SUFFICIENT)],
)
def test_offload_scenarios_have_no_races_and_equal_unsimulated_results(name, mode):
    found, races = outcome(SCENARIOS[name], mode)
    assert races == []
    torch.testing.assert_close(found, expected(SCENARIOS[name]), rtol=0, atol=0)


# ---- a missing wait is reported, and changes the numbers in its mode


#: Name of a method that orders work -> a replacement that does nothing.
NOTHING = {
    "wait": lambda self, event: None,
    "finish": lambda self, event: None,
    "used": lambda self, tensor: tensor,
    "event": lambda self: Event(self.current(), 0, np.zeros(MAX_ACTORS, np.int64), 0.0),
    "on": lambda self, stream: nullcontext(),
}
ORIGINAL = {name: getattr(SimulatedDevice, name) for name in NOTHING}
#: Calls that only change the speed.
FOR_SPEED = {
    ("device.py", "copy", "on"),
    ("prefetch.py", "_load_batches", "on"),
    ("state_host.py", "step", "finish"),
}


def remove_ordering(monkeypatch, site=None):
    """Let the call at one site of the library order nothing.

    Returns:
        Set of the sites (file, function, called method, line) that are reached from then on.
    """
    reached = set()

    def called(name, self, *args):
        frame = sys._getframe(2)
        file = Path(frame.f_code.co_filename)
        here = file.name, frame.f_code.co_name, name, frame.f_lineno
        if file.parent.name == "offload" and here[:3] not in FOR_SPEED:
            reached.add(here)
        return (NOTHING if here == site else ORIGINAL)[name](self, *args)

    for name in NOTHING:
        changed = lambda *args, name=name: called(name, *args)  # noqa: E731
        monkeypatch.setattr(SimulatedDevice, name, changed)
    return reached


def is_wrong(name):
    found, races = outcome(SCENARIOS[name], "late")
    wanted = expected(SCENARIOS[name])
    return races or len(found) != len(wanted) or not all(map(torch.equal, found, wanted))


def test_each_removed_stream_synchronization_fails_at_least_one_scenario(monkeypatch):
    reached, scenarios_of = remove_ordering(monkeypatch), {}
    for name in SUFFICIENT:
        assert not is_wrong(name)
        for site in reached:
            scenarios_of.setdefault(site, []).append(name)
        reached.clear()
    assert {file for file, *_ in scenarios_of} > {"activations.py", "prefetch.py", "state_host.py"}
    for site, names in scenarios_of.items():
        remove_ordering(monkeypatch, site)
        assert any(map(is_wrong, names)), site


def assert_race(device, *words):
    """Remove the latest race, and assert that its message has these words in this order."""
    race = device.races.pop()
    assert re.search(".*".join(map(re.escape, words)), race), race


def test_operator_without_wait_reads_old_values_and_race_is_reported():
    for mode, found in (("at once", 3.0), ("late", 3.0), ("early", 1.0)):
        with SimulatedDevice(**MODES[mode]) as device:
            x = torch.ones(100)
            before = device.event()
            x.add_(2.0)
            with device.on(device.side("other")):
                device.wait(before)
                y = x * 1
                device.wait(device.side("compute").event())
                z = x * 1
            assert_race(device, "aten.mul.Tensor", "'other' reads", "aten.add_")
            device.finish(device.side("other").event())
            device.wait(device.side("other").event())
        assert torch.equal(y, torch.full((100,), found)) and torch.equal(z, torch.full((100,), 3.0))


def test_write_before_unfinished_copy_is_overwritten_and_raises_race():
    message = r"aten\.zero_.*'compute' writes.*\(H2D\) on stream 'side'"
    for mode, found in (("at once", 0.0), ("late", 5.0), ("early", 5.0)):
        with pytest.raises(Race, match=message), SimulatedDevice(**MODES[mode]) as device:
            x = torch.ones(100)
            device.copy(x, device.pinned((100,), torch.float32).fill_(5.0), "side")
            x.zero_()
        assert torch.equal(x, torch.full((100,), found))


# ---- reads by the host

# Name -> (function that reads four numbers, whether it returns a view of them).
HOST_READS = {
    "tolist": (lambda host: host.tolist(), False),
    "item": (lambda host: host[1].item(), False),
    "numpy": (lambda host: host.numpy().sum(), True),
    "repr": (repr, False),
    "from_dlpack": (lambda host: torch.from_dlpack(host).tolist(), False),
}


@pytest.mark.parametrize("name", HOST_READS)
def test_host_read_before_copy_finishes_is_reported_as_race(name):
    read, is_view = HOST_READS[name]
    right = read(torch.arange(1.0, 5.0) * 2)
    for mode in MODES:
        with SimulatedDevice(**MODES[mode]) as device:
            y = device.move(torch.arange(1.0, 5.0)) * 2
            host = device.pinned(y.shape, y.dtype)
            event = device.copy(host, y, "down")
            found = read(host)
            del device.races[1:]
            assert_race(device, "the host reads", "(D2H)", "'down'", "test_simulated.py")
            device.finish(event)
            after = read(host)
            assert device.races == []
        wrong = mode == "late" or (mode == "early" and not is_view)
        assert (found == right) == (not wrong) and after == right


def test_creating_views_of_unfinished_copy_is_not_a_race():
    with SimulatedDevice() as device:
        host = device.pinned((8, 4), torch.float32)
        event = device.copy(host[:4], torch.ones(4, 4), "down")
        views = host[0], host[:2], host.view(-1), host.detach(), host.t()
        assert not any(view.is_pinned() for view in views)  # reads no byte
        host[4:] + 1  # the other half
        assert device.races == []
        device.finish(event)


def test_printing_a_device_tensor_waits_for_the_device():
    with SimulatedDevice(late=True, flops_per_second=1.0) as device:
        x = device.move(torch.ones(2, 2))
        assert repr(x @ x) == repr(torch.full((2, 2), 2.0))
        assert device.log.host.seconds == 16.0
        event = device.copy(x, device.pinned((2, 2), torch.float32).fill_(5.0), "up")
        print(x)
        assert_race(device, "Tensor.__repr__", "'compute' reads", "(H2D) on stream 'up'")
        device.finish(event)


# ---- copies of gradients during the update


RATES = {
    "flops_per_second": 1e6,
    "bytes_per_second": 1e9,
    "down_bytes_per_second": 1e6,
    "up_bytes_per_second": 1e6,
}


@pytest.mark.parametrize("overlap", [True, False])
def test_gradient_copies_overlap_optimizer_update_only_with_overlap_option(overlap):
    with SimulatedDevice(**RATES, host_bytes_per_second=1e6) as device:
        net = deep_mlp(3, 16)
        net(torch.randn(8, 16)).square().sum().backward()
        OffloadedOptimizer(net.parameters(), torch.optim.SGD, lr=0.01, overlap=overlap).step()
    _, second, *_ = (span for span in device.spans if span.stream == "gradients")
    update = next(span for span in device.spans if "sgd" in span.name)
    assert (second.start < update.end) == overlap


# ---- the device itself


def test_host_write_before_copy_finishes_is_reported_as_race():
    with SimulatedDevice() as device:
        x, host = torch.ones(100), device.pinned((100,), torch.float32)
        event = device.copy(x, host, "side")
        torch.equal(x, x)  # the host waits for the result, but not for other streams
        assert_race(device, "aten.equal", "'compute' reads", "(H2D) on stream 'side'")
        host.zero_()
        assert_race(device, "the host writes", "(H2D) on stream 'side' has read")
        device.finish(event)
        host.zero_()


def test_race_detector_distinguishes_byte_ranges_of_one_tensor():
    with SimulatedDevice() as device:
        x, host = torch.ones(100, 64), device.pinned((50, 64), torch.float32)
        device.copy(host, x[:50], "side")
        x[50:].zero_()
        assert device.races == []
        x[49:].zero_()
        assert_race(device, "aten.zero_", "'compute' writes device memory")
        host = device.pinned((1, 64), torch.float32)
        device.copy(host[0, :5], torch.ones(5), "side")
        host[0, 5:].zero_()  # the next byte after the last one
        assert device.races == []
        host[0, 4:].zero_()
        assert_race(device, "the host writes pinned memory", "(D2H) on stream 'side' has written")


def test_race_detector_reports_memory_reused_before_copy_finishes():
    with SimulatedDevice() as device:
        first = torch.zeros(100)
        place = first.data_ptr()
        with other_stream(device)():
            kept = torch.zeros(100)  # of another pool
        host = device.pinned((100,), torch.float32)
        device.copy(host, first, "down")
        del first
        second = torch.zeros(100)
        assert second.data_ptr() == place != kept.data_ptr()
        assert_race(device, "the allocator", "'compute' hands out", "(D2H) on stream 'down'")
        with device.on(device.side("down")):
            device.used(second)
        device.copy(host, second, "down")
        del second
        torch.zeros(100)  # waits for the copy
        assert device.races == []


def test_move_copies_modules_and_containers_to_simulated_device():
    net, batch = deep_mlp(1, 8), {"x": torch.randn(4, 8), "n": 3}
    plain = net(batch["x"]).detach()
    with SimulatedDevice() as device:
        assert device.move(net) is net
        moved = device.move(batch)
        assert device.holds(moved["x"]) and not device.holds(batch["x"]) and moved["n"] == 3
        assert device.move(moved)["x"].data_ptr() == moved["x"].data_ptr()
        assert device.move(torch.ones(2, requires_grad=True)).requires_grad
        found = net(moved["x"])
        assert Device.of_tensor(found) is device and Device.of_tensor(batch["x"]) is not device
        with pytest.raises(RuntimeError, match=r"must be on the device, .* shape \(4, 8\)"):
            net(batch["x"])
        total = (found * 2 + torch.tensor(1.0)).sum().item()
    assert total == pytest.approx((plain * 2 + 1).sum().item())
    assert torch.equal(found.detach(), plain) and Device.of_tensor(found) is not device


def test_error_inside_simulated_device_is_raised_instead_of_its_races():
    with pytest.raises(ZeroDivisionError), SimulatedDevice() as device:
        target = torch.zeros(100)
        device.copy(target, device.pinned((100,), torch.float32), "side")
        target + 1
        raise ZeroDivisionError
    assert device.races and Device.of_tensor(target) is not device


def test_exhausted_memory_of_simulated_device_raises_out_of_memory():
    with SimulatedDevice(memory_bytes=4096) as device:
        kept = torch.zeros(512)
        del kept
        kept = torch.zeros(512)  # the same block
        message = r"4096 bytes, of which 2048 .* larger memory_bytes"
        with pytest.raises(torch.OutOfMemoryError, match=message):
            kept.double()
        assert device.live_bytes == 2048


def test_empty_tensor_shares_no_block_with_later_tensor():
    with SimulatedDevice() as device:
        empty = device.up(torch.empty(0))
        kept = device.up(torch.ones(4))
        del empty
        device.up(torch.zeros(4))
        assert device.holds(kept) and kept.tolist() == [1] * 4


def test_simulated_device_that_is_late_and_early_is_rejected():
    with pytest.raises(ValueError, match="late and early cannot be combined"):
        SimulatedDevice(late=True, early=True)


# ---- the clock


def test_simulated_seconds_follow_compute_and_copy_rates():
    rates = {"up_bytes_per_second": 1e5, "down_bytes_per_second": 1e4}
    with SimulatedDevice(**RATES | rates) as device:
        x = torch.zeros(50, 50)
        start = device.seconds
        host = device.pinned(x.shape, x.dtype)
        device.finish(device.copy(host, x, "down"))  # 10,000 bytes
        assert device.seconds - start == pytest.approx(1.0)
        event = device.copy(x, host, "up")  # 0.1 s, while the operator below takes 0.25 s
        y = torch.zeros(50, 50)
        y @ y  # 2 * 50^3 FLOPs
        device.wait(event)
        x.neg()
        assert device.seconds - start == pytest.approx(1.25 + 3e-5, rel=1e-6)


def test_operator_seconds_are_proportional_to_bytes_read_and_written():
    with SimulatedDevice(bytes_per_second=1.0) as device:
        x, y = torch.zeros(10, 10), torch.zeros(10, 10)
        out = torch.zeros(10, 10)
        for operator, nbytes in {
            lambda: x + y: 1200,
            lambda: x.add_(y): 1200,
            lambda: x.copy_(y): 800,
            lambda: torch.add(x, y, out=out): 1200,
            lambda: x + y[:1].expand(10, 10): 840,
            lambda: x.sum(): 404,
            lambda: x.t()[2:]: 0,
            lambda: torch._foreach_add_([x, y], [y, x]): 2400,
        }.items():
            begin = device.seconds
            operator()
            assert device.seconds - begin == nbytes


@pytest.mark.parametrize(("host", "seconds"), [({}, 0), ({"host_bytes_per_second": 14.0}, 2000)])
def test_host_optimizer_update_takes_simulated_time_only_if_rate_given(host, seconds):
    """Count 28 bytes per parameter: Adam reads four tensors and writes three."""
    with SimulatedDevice(up_bytes_per_second=4.0, down_bytes_per_second=4.0, **host) as device:
        p = nn.Parameter(torch.ones(1000))
        optimizer = OffloadedOptimizer([p], lr=0.01)
        for _ in range(2):  # the first step creates the state
            begin, first = device.seconds, len(device.spans)
            p.grad = torch.ones(1000)
            optimizer.step()
            p + 1
    spans = device.spans[first:]
    assert device.seconds - begin == pytest.approx(2000 + seconds, rel=1e-3)
    kinds = list(dict.fromkeys(span.kind for span in sorted(spans, key=lambda span: span.start)))
    assert kinds == (["down", "host", "up"] if host else ["down", "up"])
    assert any("adam" in span.name for span in spans if span.kind == "host") == bool(host)
    assert Device.of_tensor(p) is not device


def test_simulated_device_plot_has_one_row_per_stream(fresh):
    with SimulatedDevice(**RATES, host_bytes_per_second=1e6) as device:
        host, x = device.pinned((10,), torch.float32), torch.zeros(10)
        host + 1
        device.finish(device.copy(host, x.neg(), "gradients"))
        for stream in ("mine", "up"):
            device.finish(device.copy(x, host, stream))
        x.neg()
    lanes = [label.get_text() for label in device.plot().get_yticklabels()]
    assert lanes == ["compute", "to the GPU (H2D)", "gradients", "host", "mine"]


def test_simulated_device_samples_and_plot_show_live_bytes_over_time(fresh):
    with SimulatedDevice(bytes_per_second=1000.0, down_bytes_per_second=500.0) as device:
        x = torch.zeros(250)
        y = x.neg()
        del y
        x.neg()
        device.finish(device.copy(device.pinned((250,), torch.float32), x, "down"))  # two seconds
    assert device.samples == [(1.0, 1000), (3.0, 2000), (5.0, 2000)]
    assert (device.live_bytes, device.peak_bytes) == (1000, 2000)
    assert SimulatedDevice().plot().get_yticklabels() == []
    (area,) = device.plot_bytes(since=2.0).collections
    corners = {tuple(map(float, corner)) for corner in area.get_paths()[0].vertices}
    assert {(0.0, 0.001), (1.0, 0.001), (1.0, 0.002), (5.0, 0.002)} <= corners
