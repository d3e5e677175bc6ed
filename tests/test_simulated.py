"""course_lib.offload on a simulated device: nothing races, and every ordering that is taken away is
missed."""

import gc
import re
import sys
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from masters import Masters
from torch import nn

from course_lib.accumulation import AccumulatedStep, split
from course_lib.checkpoint import checkpoint_blocks
from course_lib.memory import CATEGORY_COLORS, MemoryMeter
from course_lib.models import Decoder, deep_mlp, random_tokens
from course_lib.offload import (
    Device,
    HostStore,
    OffloadedOptimizer,
    Prefetcher,
    offload_activations,
)
from course_lib.simulated import Race, SimulatedDevice
from course_lib.simulated.lanes import LANE_COLORS
from course_lib.simulated.race_detector import ACTORS, Event

# ---- what is done: without a device it is the reference, on plain tensors; tensors made on a
# device are the device's


def offloading(device, **options):
    return offload_activations(HostStore(), min_bytes=1, **options) if device else nullcontext()


def gradients(net):
    return [p.grad for p in net.parameters()]


def mlp_and_data():
    return deep_mlp(5, 32), torch.randn(32, 32)


def activations(device, model="mlp", **options):
    net, x = mlp_and_data()
    run = lambda x: net(x).square().sum()  # noqa: E731
    if model != "mlp":
        net = Decoder(vocabulary=50, hidden=16, heads=2, layers=2, sequence=8)
        run, x = net.loss, random_tokens(2, 8, 50)
    if model == "checkpointed":
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
    """A hook."""
    raise InterruptedError


def other_stream(device):
    """Return what makes another stream current, after all work so far."""
    if device is None:
        return nullcontext
    other, made = partial(device.on, device.side("other")), device.event()
    with other():
        device.wait(made)
    return other


def two_streams(device, **options):
    """Two networks in one block, each on a stream of its own; the streams never join."""
    nets, xs = zip(mlp_and_data(), mlp_and_data(), strict=True)
    streams = [partial(device.on, device.current()) if device else nullcontext]
    streams.append(other_stream(device))
    for _ in range(3):
        # on the first stream, with nothing after that of which the second one knows
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
    """Their graphs are dropped where the first stream is current, while storages go down or come
    up."""
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
        with offloading(device):  # also around backward, which drops what is going down
            net(x).sum().backward()
    return gradients(net)


def adam(device, net, **options):
    if device is None:
        given = {name: options[name] for name in ("foreach", "fused") if name in options}
        return Masters(net.parameters(), torch.optim.Adam, lr=0.01, **(given or {"fused": True}))
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
        if step == 1:  # set from outside: the optimizer must notice
            with torch.no_grad():
                for p in (*net.parameters(), *getattr(optimizer, "copies", [])):
                    p.fill_(0.25)
        if step == 2 and device:
            assert [*optimizer.held_tensors()] == []
            optimizer.load_state_dict(optimizer.state_dict())
    return [*net.parameters()]


def change_gradient(p):
    p.grad.mul_(0.5)
    p.grad.data.add_(1.0)  # behind autograd's back; Adam would not see a factor


def copies_that_no_update_uses(device):
    """The memory of their gradients is used for something else after a step that fails."""
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


def accumulated(device, **options):
    net, data = deep_mlp(3, 16), [torch.randn(8, 16) for _ in range(4)]
    step = AccumulatedStep(
        net, adam(device, net), lambda model, x: (model(x).square().sum(), len(x)), **options
    )
    for x in data:
        step(split(x, 2))
    return [*net.parameters()]


def prefetched(device):
    """From one pinned buffer that the loader fills again and again."""
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
    **{f"mlp, prefetch {n}": partial(activations, prefetch=n) for n in (0, 1)},
    **{f"mlp, {n} in flight": partial(activations, in_flight=n) for n in (0, 4)},
    "decoder": partial(activations, model="decoder"),
    "checkpointed": partial(activations, model="checkpointed"),
    **{f"two streams, prefetch {n}": partial(two_streams, prefetch=n) for n in (0, 1)},
    "passes that fail": passes_that_fail,
    "passes that fail on another stream": partial(passes_that_fail, stream=other_stream),
    "optimizer": train,
    "optimizer, bf16": partial(train, dtype=torch.bfloat16),
    "optimizer, one after the other": partial(train, overlap=False),
    "optimizer, gradients changed": partial(train, change=change_gradient),
    "optimizer, foreach": partial(train, foreach=True),
    "optimizer, not fused": partial(train, fused=False),
    "a step that is interrupted": copies_that_no_update_uses,
    "accumulated": accumulated,
    "accumulated and clipped": partial(accumulated, max_norm=0.5),
    "prefetcher": prefetched,
}


MODES = {"at once": {}, "late": {"late": True}, "early": {"early": True}}


def outcome(scenario, mode):
    """What a scenario returns on a device, and the races in it."""
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


def same(found, wanted):
    return all(map(torch.equal, found, wanted)) and len(found) == len(wanted)


@pytest.mark.parametrize("mode", ["late", "early"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_races_and_all_bits_are_those_of_the_plain_program(name, mode):
    found, races = outcome(SCENARIOS[name], mode)
    assert races == []
    assert same(found, expected(SCENARIOS[name]))


@pytest.mark.gpu
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_gpu_gives_what_the_plain_program_gives(name):
    def run(device):
        torch.manual_seed(0)
        with torch.device("cuda"):
            found = SCENARIOS[name](device)
        torch.cuda.synchronize()
        return found

    # An optimizer on the host rounds otherwise than one on the GPU.
    tolerance = {"rtol": 2e-2, "atol": 1e-3} if "bf16" in name else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(run(Device.from_torch(torch.device("cuda"))), run(None), **tolerance)


# ---- every ordering is needed: what goes on with one taken away


#: Name of a method that orders work -> a replacement that does nothing.
NOTHING = {
    "wait": lambda self, event: None,
    "finish": lambda self, event: None,
    "used": lambda self, tensor: tensor,
    "event": lambda self: Event(self.current(), 0, np.zeros(ACTORS, np.int64), 0.0),
    "on": lambda self, stream: nullcontext(),
}
ORIGINAL = {name: getattr(SimulatedDevice, name) for name in NOTHING}
#: These calls only change the speed: copies during the computation and, if asked for, none during
# the update.
FOR_SPEED = {
    ("device.py", "copy", "on"),
    ("prefetch.py", "_make", "on"),
    ("state_host.py", "step", "finish"),
}
#: Scenarios that find each missing call.
SUFFICIENT = ["two streams, prefetch 1", "two streams, prefetch 0", "passes that fail"]
SUFFICIENT += ["passes that fail on another stream", "optimizer", "a step that is interrupted"]
SUFFICIENT += ["prefetcher"]


def take_away(monkeypatch, site=None):
    """Let what is called at a site of the library put nothing in order. Returns all sites (file,
    function, what is called, line) that are reached from then on."""
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
    return races or not same(found, expected(SCENARIOS[name]))


def test_every_ordering_is_missed_where_it_is_taken_away(monkeypatch):
    reached, telling = take_away(monkeypatch), {}
    for name in SUFFICIENT:
        assert not is_wrong(name)
        for site in reached:
            telling.setdefault(site, []).append(name)
        reached.clear()
    assert {file for file, *_ in telling} > {"activations.py", "prefetch.py", "state_host.py"}
    for site, names in telling.items():
        take_away(monkeypatch, site)
        assert any(map(is_wrong, names)), site


# ---- a wait that is missing is reported, and the numbers are wrong in its mode


def assert_race(device, *words):
    """Assert that the sentence of the latest race has these words in this order, and forget it."""
    race = device.races.pop()
    assert re.search(".*".join(map(re.escape, words)), race), race


def test_an_operator_that_runs_early_finds_what_was_there_before():
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


def test_what_an_operator_writes_too_early_is_written_over_and_the_race_is_raised_at_the_end():
    said = r"aten\.zero_.*'compute' writes.*\(H2D\) on stream 'side'"
    for mode, found in (("at once", 0.0), ("late", 5.0), ("early", 5.0)):
        with pytest.raises(Race, match=said), SimulatedDevice(**MODES[mode]) as device:
            x = torch.ones(100)
            device.copy(x, device.pinned((100,), torch.float32).fill_(5.0), "side")
            x.zero_()
        assert torch.equal(x, torch.full((100,), found))


# ---- what the host reads


#: How the host looks at four numbers, 2, 4, 6 and 8; and whether what it got is a view, which
# shows later ones too.
LOOKS = {
    "tolist": (lambda host: host.tolist(), False),
    "item": (lambda host: host[1].item(), False),
    "numpy": (lambda host: host.numpy().sum(), True),
    "repr": (repr, False),
    "print": (lambda host: print(host), None),
    "bool": (lambda host: bool(host[1]), False),
    "index": (lambda host: host[1], None),
    "all": (lambda host: bool((host > 1).all()), False),
    "from_dlpack": (lambda host: torch.from_dlpack(host).tolist(), False),
}


@pytest.mark.parametrize("look", LOOKS)
def test_the_host_does_not_look_at_what_a_copy_has_not_reached(look, capsys):
    how, is_view = LOOKS[look]
    right = how(torch.arange(1.0, 5.0) * 2)
    for mode in MODES:
        with SimulatedDevice(**MODES[mode]) as device:
            y = device.move(torch.arange(1.0, 5.0)) * 2
            host = device.pinned(y.shape, y.dtype)
            event = device.copy(host, y, "down")
            found = how(host)
            del device.races[1:]
            assert_race(device, "the host reads", "(D2H)", "'down'", "test_simulated.py")
            device.finish(event)
            after = how(host)
            assert device.races == []
        if is_view is not None:
            wrong = mode == "late" or (mode == "early" and not is_view)
            assert (found == right) == (not wrong) and after == right


def test_views_of_what_a_copy_has_not_reached_are_no_race():
    with SimulatedDevice() as device:
        host = device.pinned((8, 4), torch.float32)
        event = device.copy(host[:4], torch.ones(4, 4), "down")
        views = host[0], host[:2], host.view(-1), host.detach(), host.t()
        assert not any(view.is_pinned() for view in views)  # which reads no byte either
        host[4:] + 1  # the other half
        assert device.races == []
        device.finish(event)


def test_the_host_waits_for_what_it_prints_of_the_device():
    with SimulatedDevice(late=True, flops_per_second=1.0) as device:
        x = device.move(torch.ones(2, 2))
        assert repr(x @ x) == repr(torch.full((2, 2), 2.0))
        assert device.log.host.seconds == 16.0
        event = device.copy(x, device.pinned((2, 2), torch.float32).fill_(5.0), "up")
        print(x)
        assert_race(device, "Tensor.__repr__", "'compute' reads", "(H2D) on stream 'up'")
        device.finish(event)


# ---- gradients that go down during the update


RATES = {
    "flops_per_second": 1e6,
    "bytes_per_second": 1e9,
    "down_bytes_per_second": 1e6,
    "up_bytes_per_second": 1e6,
}


@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_go_down_during_the_update_of_others_if_asked_for(overlap):
    with SimulatedDevice(**RATES, host_bytes_per_second=1e6) as device:
        net = deep_mlp(3, 16)
        net(torch.randn(8, 16)).square().sum().backward()
        OffloadedOptimizer(net.parameters(), torch.optim.SGD, lr=0.01, overlap=overlap).step()
    _, second, *_ = (span for span in device.spans if span.stream == "gradients")
    update = next(span for span in device.spans if "sgd" in span.name)
    assert (second.start < update.end) == overlap


# ---- the device itself


def test_the_host_has_to_wait_before_it_writes_and_a_stream_before_it_answers_the_host():
    with SimulatedDevice() as device:
        above, below = torch.ones(100), device.pinned((100,), torch.float32)
        event = device.copy(above, below, "side")
        torch.equal(above, above)  # for its answer the host waits, but not for other streams
        assert_race(device, "aten.equal", "'compute' reads", "(H2D) on stream 'side'")
        below.zero_()
        assert_race(device, "the host writes", "(H2D) on stream 'side' has read")
        device.finish(event)
        below.zero_()


def test_parts_of_a_tensor_are_told_apart():
    with SimulatedDevice() as device:
        above, below = torch.ones(100, 64), device.pinned((50, 64), torch.float32)
        device.copy(below, above[:50], "side")
        above[50:].zero_()
        assert device.races == []
        above[49:].zero_()
        assert_race(device, "aten.zero_", "'compute' writes device memory")
        below = device.pinned((1, 64), torch.float32)
        device.copy(below[0, :5], torch.ones(5), "side")
        below[0, 5:].zero_()  # the byte behind the last one
        assert device.races == []
        below[0, 4:].zero_()
        assert_race(device, "the host writes pinned memory", "(D2H) on stream 'side' has written")


def test_reused_memory_keeps_its_earlier_accesses():
    with SimulatedDevice() as device:
        first = torch.zeros(100)
        place = first.data_ptr()
        with other_stream(device)():
            kept = torch.zeros(100)  # of another pool
        below = device.pinned((100,), torch.float32)
        device.copy(below, first, "down")
        del first
        second = torch.zeros(100)
        assert second.data_ptr() == place != kept.data_ptr()
        assert_race(device, "the allocator", "'compute' hands out", "(D2H) on stream 'down'")
        with device.on(device.side("down")):
            device.used(second)
        device.copy(below, second, "down")
        del second
        torch.zeros(100)  # not before what went on there is done
        assert device.races == []


def test_what_the_device_counts_is_what_a_meter_counts():
    with SimulatedDevice() as device:
        net, x = deep_mlp(5, 64), torch.randn(64, 64)
        before = device.live_bytes
        with MemoryMeter() as meter, offloading(device):
            loss = net(x).sum()
        assert device.live_bytes - before == meter.live_bytes > 0
        loss.backward()
    assert device.peak_bytes > meter.peak_bytes


def test_modules_and_containers_move_and_what_was_there_stays_where_it_is():
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


def test_after_an_error_nothing_is_left_and_the_error_is_the_one_raised():
    before = list(Device.guests)
    with pytest.raises(ZeroDivisionError), SimulatedDevice() as device:
        target = torch.zeros(100)
        device.copy(target, device.pinned((100,), torch.float32), "side")
        target + 1
        raise ZeroDivisionError
    assert device.races and Device.guests == before
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert torch.overrides._get_current_function_mode() is None


def test_a_memory_that_is_too_small_says_so():
    with SimulatedDevice(memory_bytes=4096) as device:
        kept = torch.zeros(512)
        del kept
        kept = torch.zeros(512)  # the same block
        said = r"4096 bytes, of which 2048 .* larger memory_bytes"
        with pytest.raises(torch.OutOfMemoryError, match=said):
            kept.double()
        assert device.live_bytes == 2048


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"flops_per_second": 0}, "flops_per_second must"),
        ({"seconds": 1}, ".* got seconds"),
        ({"late": True, "early": True}, "late and early cannot be combined"),
    ],
)
def test_bad_options_of_the_device_are_refused_by_name(options, said):
    with pytest.raises((TypeError, ValueError), match=f"^{said}"):
        SimulatedDevice(**options)


# ---- its clock


def test_times_are_those_of_the_rates():
    rates = {"up_bytes_per_second": 1e5, "down_bytes_per_second": 1e4}
    with SimulatedDevice(**RATES | rates) as device:
        x = torch.zeros(50, 50)
        start = device.seconds
        below = device.pinned(x.shape, x.dtype)
        device.finish(device.copy(below, x, "down"))  # 10,000 bytes
        assert device.seconds - start == pytest.approx(1.0)
        event = device.copy(x, below, "up")  # 0.1 s, while the operator below takes 0.25 s
        y = torch.zeros(50, 50)
        y @ y  # 2 * 50^3 FLOPs
        device.wait(event)
        x.neg()
        assert device.seconds - start == pytest.approx(1.25 + 3e-5, rel=1e-6)


def test_an_operator_takes_the_bytes_that_it_reads_and_writes():
    with SimulatedDevice(bytes_per_second=1.0) as device:
        x, y = torch.zeros(10, 10), torch.zeros(10, 10)
        out = torch.zeros(10, 10)
        for work, nbytes in {
            lambda: x + y: 1200,
            lambda: x.add_(y): 1200,
            lambda: x.zero_(): 400,
            lambda: x.copy_(y): 800,
            lambda: torch.add(x, y, out=out): 1200,
            lambda: x + y[:1].expand(10, 10): 840,
            lambda: x[:5] * 2: 400,
            lambda: x.sum(): 404,
            lambda: x.t()[2:]: 0,
            lambda: torch._foreach_add_([x, y], [y, x]): 2400,
        }.items():
            begin = device.seconds
            work()
            assert device.seconds - begin == nbytes


@pytest.mark.parametrize(("host", "seconds"), [({}, 0), ({"host_bytes_per_second": 14.0}, 2000)])
def test_what_the_host_does_takes_time_if_it_is_given_a_rate(host, seconds):
    """Adam's update reads weight, gradient and two moments, and writes all but the gradient: 28
    bytes a parameter."""
    with SimulatedDevice(up_bytes_per_second=4.0, down_bytes_per_second=4.0, **host) as device:
        p = nn.Parameter(torch.ones(1000))
        optimizer = OffloadedOptimizer([p], lr=0.01)
        for _ in range(2):  # the first step makes the state
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


@pytest.fixture
def drawing():
    pytest.importorskip("matplotlib").use("agg")
    yield
    import matplotlib.pyplot as plt

    plt.close("all")


def test_a_lane_has_its_place_and_its_colour_in_every_picture(drawing):
    from matplotlib.colors import to_hex

    with SimulatedDevice(**RATES, host_bytes_per_second=1e6) as device:
        below, above = device.pinned((10,), torch.float32), torch.zeros(10)
        below + 1
        device.finish(device.copy(below, above.neg(), "gradients"))
        for stream in ("mine", "up"):
            device.finish(device.copy(above, below, stream))
        above.neg()
    ax = device.plot()
    lanes = [label.get_text() for label in ax.get_yticklabels()]
    colours = {
        lanes[round(bar.get_datalim(ax.transData).y0 + 0.35)]: to_hex(bar.get_facecolor()[0])
        for bar in ax.collections
    }
    assert lanes == ["compute", "to the GPU (H2D)", "gradients", "host", "mine"]
    kinds = ["compute", "up", "down", "host", "up"]
    assert [colours[lane].upper() for lane in lanes] == [LANE_COLORS[kind] for kind in kinds]
    distinct = {*LANE_COLORS.values(), *CATEGORY_COLORS.values()}
    assert len(distinct) == len(LANE_COLORS) + len(CATEGORY_COLORS)
    *_, end = (span.end for span in device.spans if span.stream == "up")
    bar, *_ = device.plot(since=end - 1e-5).collections
    assert bar.get_datalim(bar.axes.transData).x1 == pytest.approx(1e-5)


def test_the_bytes_below_are_those_that_were_live(drawing):
    with SimulatedDevice(bytes_per_second=1000.0, down_bytes_per_second=500.0) as device:
        x = torch.zeros(250)
        y = x.neg()
        del y
        x.neg()
        device.finish(device.copy(device.pinned((250,), torch.float32), x, "down"))  # two seconds
    assert device.samples == [(1.0, 1000), (3.0, 2000), (5.0, 2000)]
    nothing = SimulatedDevice()
    assert nothing.plot().get_yticklabels() == []
    assert nothing.plot_bytes().get_ylabel() == "live bytes (MB)"
    ax = device.plot_bytes(since=2.0)
    (area,) = ax.collections
    corners = {tuple(map(float, corner)) for corner in area.get_paths()[0].vertices}
    assert {(0.0, 0.001), (1.0, 0.001), (1.0, 0.002), (5.0, 0.002)} <= corners
