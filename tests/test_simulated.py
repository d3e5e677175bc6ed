"""course_lib.offload on a simulated device: nothing races, and every ordering that is taken away is
missed."""

import ast
import gc
import subprocess
import sys
import threading
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from patience import HANGS_SECONDS
from torch import nn

import course_lib.checkpoint as ours
import course_lib.offload
from course_lib.accumulation import AccumulatedStep, split
from course_lib.labels import chinese
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

pytestmark = pytest.mark.usefixtures("little_to_collect")

# ---- what is done: without a device it is the reference, on plain tensors; tensors made on a
# device are the device's


def offloading(device, **options):
    return offload_activations(HostStore(), min_bytes=1, **options) if device else nullcontext()


def gradients(net):
    return [p.grad for p in net.parameters()]


def activations(device, model="mlp", retain=False, **options):
    if model == "mlp":
        net, x = deep_mlp(5, 32), torch.randn(32, 32)
    else:
        net, x = (
            Decoder(vocabulary=50, hidden=16, heads=2, layers=2, sequence=8),
            random_tokens(2, 8, 50),
        )
        if model == "checkpointed":
            ours.checkpoint_blocks(net)
    run = net.loss if isinstance(net, Decoder) else lambda x: net(x).square().sum()
    for step in range(2):
        net.zero_grad()
        if step and device:  # a graph that is dropped before backward
            with offloading(device, **options):
                dropped = run(x)
            del dropped
        with offloading(device, **options):
            loss = run(x)
        for _ in range(retain):
            loss.backward(retain_graph=True)
        loss.backward()
    return gradients(net)


def fail(module, *_):
    """A hook."""
    raise InterruptedError


def an_error_in_the_middle(device):
    net, x = deep_mlp(5, 32), torch.randn(32, 32)

    for where in (3, 7):
        handle = net[where].register_forward_pre_hook(fail)
        with pytest.raises(InterruptedError), offloading(device):
            net(x)
        handle.remove()
        handle = net[where].register_full_backward_pre_hook(fail)
        with offloading(device):
            loss = net(x).sum()
        with pytest.raises(InterruptedError):
            loss.backward()
        handle.remove()
        del loss
    net.zero_grad()
    with offloading(device):
        loss = net(x).sum()
    loss.backward()
    return gradients(net)


def two_streams(device, **options):
    """Two networks in one block, each on a stream of its own; the streams never join."""
    nets, xs = [deep_mlp(5, 32), deep_mlp(5, 32)], [torch.randn(32, 32), torch.randn(32, 32)]
    streams = [nullcontext, nullcontext]
    if device:
        streams, made = (
            [partial(device.on, stream) for stream in (device.current(), device.side("other"))],
            device.event(),
        )
        with streams[1]():
            device.wait(made)
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


def dropped_on_another_stream(device):
    """A backward pass fails while storages come up; its graph goes where another stream is
    current."""
    net, x = deep_mlp(5, 32), torch.randn(32, 32)
    other = nullcontext
    if device:
        other, made = partial(device.on, device.side("other")), device.event()
        with other():
            device.wait(made)

    handle = net[7].register_full_backward_pre_hook(fail)
    with other():
        with offloading(device):
            loss = net(x).sum()
        with pytest.raises(InterruptedError):
            loss.backward()
    handle.remove()
    del loss
    with other():
        for p in net.parameters():
            p.grad = None
        with offloading(device):
            net(x).sum().backward()
    return gradients(net)


class Copies:
    """The reference for an optimizer on the host: the plain one on fp32 copies, rounded after each
    step."""

    def __init__(self, parameters, base, **options):
        self.parameters = list(parameters)
        self.copies = [nn.Parameter(p.detach().float()) for p in self.parameters]
        self.plain = base(self.copies, **options)

    @torch.no_grad()
    def step(self):
        for p, copy in zip(self.parameters, self.copies, strict=True):
            copy.grad = p.grad.float()
        self.plain.step()
        for p, copy in zip(self.parameters, self.copies, strict=True):
            p.copy_(copy)


def adam(device, net, **options):
    if device is None:
        return Copies(net.parameters(), torch.optim.Adam, lr=0.01, fused=True)
    return OffloadedOptimizer(net.parameters(), torch.optim.Adam, lr=0.01, **options)


def train(device, dtype=torch.float32, pieces=1, keep=False, between=lambda net: None, **options):
    net, data = (
        deep_mlp(3, 16).to(dtype),
        iter([torch.randn(8, 16).to(dtype) for _ in range(4 * pieces)]),
    )
    optimizer = adam(device, net, **options)
    for step in range(4):
        for p in net.parameters():
            p.grad = p.grad.zero_() if keep and p.grad is not None else None
        for _ in range(pieces):
            net(next(data)).square().sum().backward()
        between(net)
        optimizer.step()
        if step == 1:  # set from outside: the optimizer must notice
            with torch.no_grad():
                for p in (*net.parameters(), *getattr(optimizer, "copies", [])):
                    p.fill_(0.25)
        if step == 2 and device:
            optimizer.load_state_dict(optimizer.state_dict())
    return [*net.parameters()]


def clipped(net):
    nn.utils.clip_grad_norm_(net.parameters(), 0.5, foreach=False)


def behind_autograds_back(net):
    for p in net.parameters():
        p.grad.data.add_(1.0)  # Adam would not see a factor


def all_reduced(net):
    """Added to the ones that another rank has, which is a thread."""
    store = torch.distributed.HashStore()

    def rank(index, tensors):
        group = torch.distributed.ProcessGroupGloo(
            store, index, 2, timedelta(seconds=HANGS_SECONDS)
        )
        for tensor in tensors:
            group.allreduce([tensor]).wait()

    gradients_ = gradients(net)
    other = threading.Thread(
        target=rank, args=(1, [torch.ones_like(gradient) for gradient in gradients_])
    )
    other.start()
    rank(0, gradients_)
    other.join()


def unscaled(net):
    scaler = torch.amp.GradScaler(net[0].weight.device.type, init_scale=4.0)
    scaler.scale(net[0].weight.detach().sum())
    scaler.unscale_(torch.optim.SGD(net.parameters()))


def sent_early(device, early=True, fails=False):
    """Gradients that go down during backward; where the step fails, their memory is used for
    something else."""
    net, data = deep_mlp(3, 16), [torch.randn(8, 16) for _ in range(4)]
    optimizer = adam(device, net)
    for x in data:
        with optimizer.copy_gradients_down() if device and early else nullcontext():
            net(x).square().sum().backward()
            if not fails:
                optimizer.step()
            elif not early:
                with pytest.raises(InterruptedError), interrupted(optimizer):
                    optimizer.step()
        for p in net.parameters():
            p.grad = None
        for p in net.parameters():
            torch.zeros_like(p)
    return [*net.parameters()]


@contextmanager
def interrupted(optimizer):
    """Before the first update."""

    def fail(*_):
        raise InterruptedError

    handle = getattr(optimizer, "_base", getattr(optimizer, "plain", None)).register_step_pre_hook(
        fail
    )
    yield
    handle.remove()


def accumulated(device, **options):
    net, data = deep_mlp(3, 16), [torch.randn(8, 16) for _ in range(4)]
    optimizer = adam(device, net)
    if device is None:
        optimizer = Stepped(optimizer)
    step = AccumulatedStep(
        net, optimizer, lambda model, x: (model(x).square().sum(), len(x)), **options
    )
    for x in data:
        step(split(x, 2))
    return [*net.parameters()]


class Stepped(torch.optim.SGD):
    """`Copies` in the clothes of an optimizer."""

    def __init__(self, copies):
        super().__init__(copies.parameters)
        self.step = copies.step


def prefetched(device, reuses=False):
    """From pinned batches; or from one buffer that the loader fills again and again."""
    if device is None:
        return [torch.full((300,), 2.0 * i) for i in range(6)]
    buffers = [device.pinned((300,), torch.float32) for _ in range(1 if reuses else 6)]

    def loader():
        for i in range(6):
            yield buffers[i % len(buffers)].fill_(float(i))

    found = []
    for batch in Prefetcher((x for x in loader()), device):
        found.append(batch * 2)
        del batch
        torch.empty(300).fill_(7.0)
    return found


SCENARIOS = {
    **{f"mlp, prefetch {n}": partial(activations, prefetch=n) for n in (0, 1, 3)},
    **{f"mlp, {n} in flight": partial(activations, in_flight=n) for n in (0, 1, 4)},
    "retained": partial(activations, retain=True),
    "decoder": partial(activations, model="decoder"),
    "checkpointed": partial(activations, model="checkpointed"),
    "an error in the middle": an_error_in_the_middle,
    **{f"two streams, prefetch {n}": partial(two_streams, prefetch=n) for n in (0, 1, 2)},
    "dropped on another stream": dropped_on_another_stream,
    "optimizer": train,
    "optimizer, bf16": partial(train, dtype=torch.bfloat16),
    "optimizer, one after the other": partial(train, overlap=False),
    "optimizer, gradients added up and clipped": partial(train, pieces=2, between=clipped),
    "optimizer, gradients kept": partial(train, pieces=2, keep=True),
    "optimizer, gradients changed through .data": partial(train, between=behind_autograds_back),
    "optimizer, gradients unscaled": partial(train, between=unscaled),
    "optimizer, gradients all-reduced": partial(train, between=all_reduced),
    "gradients sent early": sent_early,
    "gradients sent early, and dropped": partial(sent_early, fails=True),
    "a step that is interrupted": partial(sent_early, early=False, fails=True),
    "accumulated": accumulated,
    "accumulated and clipped": partial(accumulated, max_norm=0.5),
    "prefetcher": prefetched,
    "prefetcher, one buffer": partial(prefetched, reuses=True),
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


@pytest.mark.parametrize("mode", MODES)
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


#: What is called to put things in order -> what of the device it stands for.
ORDERING = {name: {name} for name in ("wait", "finish", "used", "event", "on")}
ORDERING |= {"finish_copies": {"wait"}, "drop_gradient_copy": {"wait"}, "ready": {"wait"}}
#: These are there for speed alone: copies beside the compute; and, if asked for, no copy beside
# the update.
FOR_SPEED = {
    ("device.py", "copy", "on"),
    ("prefetch.py", "_make", "on"),
    ("state_host.py", "step", "finish"),
}


def orderings():
    """(file, function, what is called, line) of all that orders the work of a device and the
    host."""
    for name in (
        "activations",
        "device",
        "master_weights",
        "optimizer",
        "prefetch",
        "state_host",
        "stores",
    ):
        path = Path(course_lib.offload.__file__).with_name(f"{name}.py")
        tree = ast.parse(path.read_text())
        elsewhere = {
            line
            for node in tree.body
            if node_name(node) in ("Cuda", "DiskStore")
            for line in lines_of(node)
        }
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            inside = [function.name for function in functions if call.lineno in lines_of(function)]
            site = (path.name, *inside[-1:], node_name(call.func))
            if site[-1] in ORDERING and call.lineno not in elsewhere and site not in FOR_SPEED:
                yield *site, call.lineno


def node_name(node):
    return getattr(node, "name", getattr(node, "attr", getattr(node, "id", "")))


def lines_of(node):
    return range(node.lineno, node.end_lineno + 1)


def called_from(file, line):
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_lineno == line and frame.f_code.co_filename.endswith(f"offload/{file}"):
            return True
        frame = frame.f_back
    return False


def without(monkeypatch, file, called, line):
    """Of the simulated device, what is called from there does nothing."""
    nothing = {
        "wait": lambda self, event: None,
        "finish": lambda self, event: None,
        "used": lambda self, tensor: tensor,
        "event": lambda self: Event(self.current(), 0, np.zeros(ACTORS, np.int64), 0.0),
        "on": lambda self, stream: nullcontext(),
    }
    for name in ORDERING[called]:
        dummy = nothing[name]
        original = getattr(SimulatedDevice, name)

        def call(self, *args, original=original, dummy=dummy):
            return (dummy if called_from(file, line) else original)(self, *args)

        monkeypatch.setattr(SimulatedDevice, name, call)


@pytest.mark.parametrize("site", list(orderings()), ids=lambda site: "-".join(map(str, site)))
def test_every_ordering_is_missed_where_it_is_taken_away(site, monkeypatch):
    file, _, called, line = site
    without(monkeypatch, file, called, line)
    assert any(
        is_wrong(SCENARIOS[name], mode) for name in TELLING[file] for mode in ("late", "at once")
    )


#: Of the scenarios, those that suffice for the orderings in a file.
TELLING = {
    "activations.py": ["mlp, prefetch 0", "two streams, prefetch 0", "two streams, prefetch 1"],
    "state_host.py": [
        "optimizer",
        "gradients sent early, and dropped",
        "a step that is interrupted",
    ],
    "optimizer.py": [
        "optimizer",
        "gradients sent early, and dropped",
        "a step that is interrupted",
    ],
    "prefetch.py": ["prefetcher, one buffer", "prefetcher"],
    "stores.py": [
        "mlp, prefetch 0",
        "dropped on another stream",
        "optimizer",
        "two streams, prefetch 0",
    ],
}
TELLING["activations.py"] += ["an error in the middle", "dropped on another stream"]
TELLING["stores.py"] += ["two streams, prefetch 1", "an error in the middle"]
TELLING["device.py"] = TELLING["stores.py"]


def is_wrong(scenario, mode):
    found, races = outcome(scenario, mode)
    return races or not same(found, expected(scenario))


# ---- a wait that is missing is reported, and the numbers are wrong in its mode


def used_too_soon(device, target, source, name):
    """What uses a copy does not wait for it."""
    Device.copy(device, target, source, name)
    return device.log.host.event()


def copied_too_soon(device, target, source, name):
    """The copy does not wait for what makes its source."""
    with device.on(device.side(name)):
        device.transfer(target, source)
        return device.event()


#: What is left out -> what is done instead of `Device.copy`, for copies of which name, and in
#: which modes numbers are wrong for it.
MISSING = {
    "what uses a copy up waits for it": (used_too_soon, {"up"}, ["late", "early"]),
    "a copy down is waited for before its source is let go": (used_too_soon, {"down"}, ["late"]),
    "a copy down waits for what makes its source": (copied_too_soon, {"down"}, ["early"]),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("missing", MISSING)
def test_a_missing_wait_is_reported_and_the_gradient_is_wrong_in_its_mode(
    missing, mode, monkeypatch
):
    instead, names, wrong_in = MISSING[missing]
    scenario = SCENARIOS["mlp, prefetch 1"]

    def changed(device, target, source, name):
        return (instead if name in names else Device.copy)(device, target, source, name)

    monkeypatch.setattr(SimulatedDevice, "copy", changed)
    found, races = outcome(scenario, mode)
    assert races
    assert same(found, expected(scenario)) == (mode not in wrong_in)


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
            assert (
                "aten.mul.Tensor on stream 'other' reads device memory that aten.add_"
                in device.races.pop()
            )
            device.finish(device.side("other").event())
            device.wait(device.side("other").event())
        assert torch.equal(y, torch.full((100,), found)) and torch.equal(z, torch.full((100,), 3.0))


def test_what_an_operator_writes_too_early_is_written_over():
    for mode, found in (("at once", 0.0), ("late", 5.0), ("early", 5.0)):
        with SimulatedDevice(**MODES[mode]) as device:
            x = torch.ones(100)
            event = device.copy(x, device.pinned((100,), torch.float32).fill_(5.0), "side")
            x.zero_()
            assert (
                "aten.zero_.default on stream 'compute' writes device memory that a"
                " host-to-device copy (H2D) on stream 'side'" in device.races.pop()
            )
            device.wait(event)
            device.finish(event)
        assert torch.equal(x, torch.full((100,), found))


def read_too_early(device, x, waits):
    y = x * 2
    host = device.pinned(y.shape, y.dtype)
    copied = device.copy(host, y, "down")
    if waits:
        device.finish(copied)
    return host.tolist()


def used_before_it_is_up(device, x, waits):
    host = device.pinned(x.shape, x.dtype).copy_(torch.arange(4.0))
    copied = device.copy(x, host, "up")
    if waits:
        device.wait(copied)
    y = x * 2
    back = device.pinned(y.shape, y.dtype)
    device.finish(device.copy(back, y, "down"))
    return back.tolist()


def freed_while_it_is_copied(device, x, waits):
    y = x * 2
    host = device.pinned(y.shape, y.dtype)
    copied = device.copy(host, y, "down")
    if waits:
        device.wait(copied)
    del y
    x * 100
    device.finish(copied)
    return host.tolist()


def copied_before_it_is_made(device, x, waits):
    y = x * 2
    host = device.pinned(y.shape, y.dtype)
    made = device.event()
    with device.on(device.side("down")):
        if waits:
            device.wait(made)
        device.transfer(host, y)
        device.finish(device.event())
    return host.tolist()


#: Of each, what comes out in its mode without its wait.
PROGRAMS = {
    read_too_early: ("late", [0.0, 0.0, 0.0, 0.0]),
    used_before_it_is_up: ("late", [0.0, 0.0, 0.0, 0.0]),
    freed_while_it_is_copied: ("late", [0.0, 100.0, 200.0, 300.0]),
    copied_before_it_is_made: ("early", [0.0, 0.0, 0.0, 0.0]),
}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_of_a_few_lines_is_right_with_its_wait_alone(program):
    wrong_mode, wrong = PROGRAMS[program]
    for mode in MODES:
        for waits in (True, False):
            with SimulatedDevice(**MODES[mode]) as device:
                x = (
                    torch.zeros(4)
                    if program is used_before_it_is_up
                    else device.move(torch.arange(4.0))
                )
                found, races = program(device, x, waits), len(device.races)
                device.races.clear()
            assert races == (0 if waits else 1)
            if waits:
                assert found == [0.0, 2.0, 4.0, 6.0]
            elif mode == wrong_mode:
                assert found == wrong


# ---- what the host reads


#: How the host looks at four numbers, 2, 4, 6 and 8; and whether what it got is a view, which
# shows later ones too.
LOOKS = {
    "tolist": (lambda host: host.tolist(), False),
    "item": (lambda host: host[1].item(), False),
    "numpy": (lambda host: host.numpy().sum(), True),
    "asarray": (lambda host: np.asarray(host).sum(), True),
    "repr": (repr, False),
    "print": (lambda host: print(host), None),
    "f-string": (lambda host: f"{host}", False),
    "bool": (lambda host: bool(host[1]), False),
    "index": (lambda host: host[1], None),
    "float": (lambda host: float(host[1]), False),
    "all": (lambda host: bool((host > 1).all()), False),
    "from_dlpack": (lambda host: torch.from_dlpack(host).tolist(), False),
    "iteration": (lambda host: [float(number) for number in host], False),
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
            assert (
                "on the host reads pinned memory that a device-to-host copy (D2H) on stream 'down'"
                " has written" in device.races[0]
            )
            assert "test_simulated.py" in device.races[0]
            device.races.clear()
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
        assert (
            "Tensor.__repr__ on stream 'compute' reads device memory that a host-to-device copy"
            " (H2D) on stream 'up'" in device.races.pop()
        )
        device.finish(event)


# ---- gradients that go down early


RATES = {
    "flops_per_second": 1e6,
    "bytes_per_second": 1e9,
    "down_bytes_per_second": 1e6,
    "up_bytes_per_second": 1e6,
}
HALF = {"loss_sum": lambda model, x: (model(x).square().sum(), 0.5 * len(x))}
PADDED = {"loss_sum": lambda model, x: (model(x).square().sum(), len(x) - 0.25)}


@pytest.mark.parametrize(
    ("options", "early"),
    [
        ({}, True),
        (HALF, True),
        (PADDED, False),
        ({"max_norm": 1.0}, False),
        ({"scaler": torch.amp.GradScaler("cpu", init_scale=4.0)}, False),
        ({"hook": True}, False),
    ],
    ids=[
        "as they are",
        "over a power of two",
        "over another weight",
        "clipped",
        "unscaled",
        "a hook before the step",
    ],
)
def test_gradients_go_down_during_backward_only_where_nothing_changes_them_afterwards(
    options, early
):
    options = {"loss_sum": lambda model, x: (model(x).square().sum(), len(x))} | options
    hook = options.pop("hook", False)
    with SimulatedDevice(**RATES) as device:
        net = deep_mlp(3, 16)
        optimizer = OffloadedOptimizer(net.parameters(), torch.optim.SGD, lr=0.01)
        begins = []
        if hook:
            optimizer.register_step_pre_hook(lambda *_: None)
        step = AccumulatedStep(net, optimizer, **options)
        for _ in range(2):  # in the first one the weight of the whole is not known yet
            begins.append(len(device.spans))
            step(split(torch.randn(8, 16), 4))
        last = device.spans[begins[-1] :]
    down = [span for span in last if span.name == "a device-to-host copy (D2H)"]
    backward_ends = max(span.end for span in last if span.stream == "compute" and "mm" in span.name)
    assert len(down) == len(list(net.parameters()))  # once each
    assert (min(span.start for span in down) < backward_ends) == early


@pytest.mark.parametrize("mode", ["at once", "late"])
def test_a_gradient_that_grows_after_it_went_down_goes_down_again(mode):
    """A layer in two reentrant checkpoints: backward within backward adds to its gradient twice."""

    def twice(device):
        net = deep_mlp(2, 16)
        optimizer = adam(device, net)
        for _ in range(2):
            x = torch.randn(8, 16, requires_grad=True)
            for _ in range(2):
                x = ours.checkpoint(net, x, use_reentrant=True)
            with optimizer.copy_gradients_down() if device else nullcontext():
                x.square().sum().backward()
                optimizer.step()
            for p in net.parameters():
                p.grad = None
        return [*net.parameters()]

    found, races = outcome(twice, mode)
    assert same(found, expected(twice))
    # of what is not used
    assert all(
        "that a device-to-host copy (D2H) on stream 'gradients' has read" in race for race in races
    )


# ---- the device itself


def test_what_is_never_waited_for_is_named_and_comes_out_wrong_if_it_is_late():
    for late in (False, True):
        device = SimulatedDevice(late=late)
        with (
            pytest.raises(
                Race,
                match=(
                    r"aten\.mul.* on stream 'compute' reads device memory that a host-to-device"
                    r" copy \(H2D\) on stream 'side' has written"
                ),
            ),
            device,
        ):
            target, source = torch.zeros(100), device.pinned((100,), torch.float32).fill_(3.0)
            device.copy(target, source, "side")
            found = target * 2
            device.finish(device.event())
        assert torch.equal(found, torch.full((100,), 0.0 if late else 6.0))
        assert "test_simulated.py" in device.races[0] and len(device.races) == 1


def test_the_host_has_to_wait_too_before_it_reads_and_before_it_writes():
    with SimulatedDevice() as device:
        above, below = torch.ones(100), device.pinned((100,), torch.float32)
        event = device.copy(below, above, "side")
        below + 1
        assert (
            "on the host reads pinned memory that a device-to-host copy (D2H) on stream 'side' has"
            " written" in device.races.pop()
        )
        device.finish(event)
        below + 1
        event = device.copy(above, below, "side")
        torch.equal(above, above)  # for its answer the host waits, but not for other streams
        assert (
            "aten.equal.default on stream 'compute' reads device memory that a host-to-device copy"
            " (H2D) on stream 'side'" in device.races.pop()
        )
        below.zero_()
        assert (
            "on the host writes pinned memory that a host-to-device copy (H2D) on stream 'side'"
            " has read" in device.races.pop()
        )
        device.finish(event)
        below.zero_()


def test_parts_of_a_tensor_are_told_apart():
    with SimulatedDevice() as device:
        above, below = torch.ones(100, 64), device.pinned((50, 64), torch.float32)
        device.copy(below, above[:50], "side")
        above[50:].zero_()
        assert device.races == []
        above[49:].zero_()
        assert "aten.zero_.default on stream 'compute' writes device memory" in device.races.pop()
        below = device.pinned((1, 64), torch.float32)
        device.copy(below[0, :5], torch.ones(5), "side")
        below[0, 5:].zero_()  # the byte behind the last one
        assert device.races == []
        below[0, 4:].zero_()
        assert (
            "on the host writes pinned memory that a device-to-host copy (D2H) on stream 'side' has"
            " written" in device.races.pop()
        )


def test_memory_goes_round_and_what_it_was_used_for_counts_on():
    with SimulatedDevice() as device:
        first = torch.zeros(100)
        place = first.data_ptr()
        with device.on(device.side("other")):
            device.wait(device.event())
            kept = torch.zeros(100)  # of another pool
        below = device.pinned((100,), torch.float32)
        device.copy(below, first, "down")
        del first
        second = torch.zeros(100)
        assert second.data_ptr() == place != kept.data_ptr()
        assert (
            "the allocator on stream 'compute' hands out device memory that a device-to-host copy"
            " (D2H) on stream 'down' has read" in device.races.pop()
        )
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
    peak = device.peak_bytes
    del loss
    assert peak > meter.peak_bytes


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
        with pytest.raises(
            RuntimeError,
            match=r"must be on the device, got one on the host with shape \(4, 8\); move it",
        ):
            net(batch["x"])
        assert (found * 2 + torch.tensor(1.0)).sum().item() == pytest.approx(
            (plain * 2 + 1).sum().item()
        )
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
        with pytest.raises(
            torch.OutOfMemoryError,
            match=r"device memory has 4096 bytes, of which 2048 .*; pass a larger memory_bytes",
        ):
            kept.double()
        assert device.live_bytes == 2048


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"flops_per_second": 0}, "flops_per_second must be a number above 0, got 0"),
        ({"memory_bytes": 1.5}, "memory_bytes must be a whole number of bytes, .*, got 1.5"),
        ({"seconds": 1}, "the options of a SimulatedDevice must be .*, got seconds"),
        (
            {"late": True, "early": True},
            "late and early cannot be combined: set at most one of them to True",
        ),
    ],
)
def test_bad_options_of_the_device_are_refused_by_name(options, sentence):
    with pytest.raises((TypeError, ValueError), match=f"^{sentence}"):
        SimulatedDevice(**options)


# ---- its clock


def test_times_are_those_of_the_rates():
    rates = {
        "flops_per_second": 1e6,
        "bytes_per_second": 1e9,
        "up_bytes_per_second": 1e5,
        "down_bytes_per_second": 1e4,
    }
    with SimulatedDevice(**rates) as device:
        x = torch.zeros(50, 50)
        start = device.seconds
        x @ x  # 2 * 50^3 FLOPs
        assert device.seconds - start == pytest.approx(0.25)
        start = device.seconds
        x.neg()  # 10,000 bytes read, 10,000 written
        assert device.seconds - start == pytest.approx(2e-5)
        below = device.pinned(x.shape, x.dtype)
        device.finish(device.copy(below, x, "down"))
        assert device.seconds - start == pytest.approx(2e-5 + 1.0)
        start = device.seconds
        event = device.copy(x, below, "up")  # 0.1 s, beside which something else takes 0.25 s
        device.pinned((50, 50), torch.float32)
        y = torch.zeros(50, 50)
        y @ y
        device.wait(event)
        x.neg()
        assert device.seconds - start == pytest.approx(0.25 + 4e-5, rel=1e-3)


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


def test_what_the_host_does_takes_time_if_it_is_given_a_rate():
    """Adam's update reads weight, gradient and two moments, and writes all but the gradient: 28
    bytes a parameter."""
    links = {"up_bytes_per_second": 4.0, "down_bytes_per_second": 4.0}
    for host, seconds in (({}, 0.0), ({"host_bytes_per_second": 14.0}, 2.0)):
        with SimulatedDevice(**links, **host) as device:
            p = nn.Parameter(torch.ones(1000))
            optimizer = OffloadedOptimizer([p], lr=0.01)
            for _ in range(2):  # the first step makes the state
                begin, first = device.seconds, len(device.spans)
                p.grad = torch.ones(1000)
                optimizer.step()
                p + 1
        spans = {span.stream: span for span in device.spans[first:]}
        assert device.seconds - begin == pytest.approx(2000 + 1000 * seconds, rel=1e-3)
        assert [span.kind for span in spans.values()] == (
            ["down", "host", "up"] if host else ["down", "up"]
        )
        if host:
            down, update, up = spans.values()
            assert update.stream == "host" and "adam" in update.name
            assert down.end <= update.start and update.end <= up.start
        assert Device.of_tensor(p) is not device


def step_seconds(rate, **options):
    """One step of a deep MLP whose copies go at a rate, and what is live at most."""
    torch.manual_seed(0)
    rates = {
        "flops_per_second": 1e9,
        "bytes_per_second": 1e12,
        "up_bytes_per_second": rate,
        "down_bytes_per_second": rate,
    }
    with SimulatedDevice(**rates) as device:
        net, x = deep_mlp(8, 64), torch.randn(256, 64)
        begins = device.seconds
        with offload_activations(HostStore(), min_bytes=1, **options) if options else nullcontext():
            loss = net(x).sum()
        loss.backward()
    return device.seconds - begins


def test_copies_hide_where_the_link_is_fast_enough_and_two_in_flight_hide_more_than_one():
    # A layer takes 2 * 256 * 64^2 / 1e9 s = 2.1 ms forward and keeps two tensors of 65,536 bytes.
    hides = 2 * 65_536 / 2.1e-3
    plain = step_seconds(1.0)
    assert step_seconds(8 * hides, prefetch=2, in_flight=2) < 1.05 * plain
    assert step_seconds(hides / 8, prefetch=2, in_flight=2) > 2 * plain
    for rate in (hides, 2 * hides):
        times = [step_seconds(rate, prefetch=n, in_flight=n) for n in (0, 1, 2)]
        assert times[0] > times[1] > times[2] > plain


@pytest.fixture
def drawing():
    pytest.importorskip("matplotlib").use("agg")
    yield
    import matplotlib.pyplot as plt

    plt.close("all")


def lanes_of(ax):
    """Lane -> (its colours, when it was busy)."""
    from matplotlib.colors import to_hex

    names = [label.get_text() for label in ax.get_yticklabels()]
    found = {}
    for bar in ax.collections:
        extent = bar.get_datalim(ax.transData)
        colours, times = found.setdefault(names[round((extent.y0 + extent.y1) / 2)], (set(), []))
        colours.add(to_hex(bar.get_facecolor()[0]).upper())
        times.append((round(extent.x0, 6), round(extent.x1, 6)))
    return dict(sorted(found.items(), key=lambda lane: names.index(lane[0])))


def test_a_lane_has_its_place_and_its_colour_in_every_picture(drawing):
    with SimulatedDevice(**RATES, host_bytes_per_second=1e6) as device:
        below = device.pinned((10,), torch.float32)
        below + 1
        device.finish(device.copy(below, torch.zeros(10).neg(), "gradients"))
        device.finish(device.copy(torch.zeros(10), below, "mine"))
        device.finish(device.copy(torch.zeros(10), below, "up"))
        torch.zeros(10).neg()
    lanes = lanes_of(device.plot())
    assert {lane: colours for lane, (colours, _) in lanes.items()} == {
        "compute": {LANE_COLORS["compute"]},
        "to the GPU (H2D)": {LANE_COLORS["up"]},
        "gradients": {LANE_COLORS["down"]},
        "host": {LANE_COLORS["host"]},
        "mine": {LANE_COLORS["up"]},
    }
    *_, end = (span.end for span in device.spans if span.stream == "up")
    later = lanes_of(device.plot(since=end - 1e-5))
    assert [*later] == ["compute", "to the GPU (H2D)"] and later["to the GPU (H2D)"][1] == [
        (0.0, 1e-5)
    ]


def test_colours_of_lanes_are_those_of_no_category():
    assert len({*LANE_COLORS.values()} | {*CATEGORY_COLORS.values()}) == len(LANE_COLORS) + len(
        CATEGORY_COLORS
    )


def test_the_bytes_below_are_those_that_were_live(drawing):
    with SimulatedDevice(bytes_per_second=1000.0, down_bytes_per_second=500.0) as device:
        x = torch.zeros(250)
        y = x.neg()
        del y
        x.neg()
        device.finish(device.copy(device.pinned((250,), torch.float32), x, "down"))  # two seconds
    assert device.samples == [(1.0, 1000), (3.0, 2000), (5.0, 2000)]
    ax = device.plot_bytes(since=2.0)
    (area,) = ax.collections
    corners = {tuple(map(float, corner)) for corner in area.get_paths()[0].vertices}
    assert {(0.0, 0.001), (1.0, 0.001), (1.0, 0.002), (5.0, 0.002)} <= corners


def test_pictures_of_nothing_are_empty(drawing):
    with SimulatedDevice() as device:
        assert (
            device.plot().get_yticklabels() == []
            and device.plot_bytes().get_ylabel() == "live bytes (MB)"
        )


def test_every_label_of_the_pictures_has_its_chinese(drawing):
    with SimulatedDevice(**RATES) as device:
        for name in ("down", "up", "gradients", "parameters", "batches"):
            device.finish(device.copy(device.pinned((10,), torch.float32), torch.zeros(10), name))
    lanes, live = device.plot(), device.plot_bytes()
    shown = [
        *(label.get_text() for label in lanes.get_yticklabels()),
        lanes.get_xlabel(),
        live.get_ylabel(),
    ]
    assert len(shown) == 8 and all(map(chinese, shown))


def test_the_picture_has_a_lane_for_each_stream(drawing):
    with SimulatedDevice(**RATES) as device:
        device.copy(device.pinned((10,), torch.float32), torch.zeros(10).neg(), "down")
    ax = device.plot()
    assert [label.get_text() for label in ax.get_yticklabels()] == ["compute", "to the host (D2H)"]


def test_offload_gives_the_simulated_device_on_request_and_does_not_import_it():
    program = (
        "import sys, course_lib.offload as offload\n"
        "print('course_lib.simulated' in sys.modules)\n"
        "from course_lib.offload import Race, SimulatedDevice\n"
        "from course_lib import simulated\n"
        "print(SimulatedDevice is simulated.SimulatedDevice and Race is simulated.Race)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True"], done.stderr
    with pytest.raises(AttributeError, match="has no attribute 'SimulatedDevices'"):
        _ = course_lib.offload.SimulatedDevices
