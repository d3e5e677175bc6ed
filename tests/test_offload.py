"""course_lib.offload: what goes down comes back the same, nothing leaks, and steps equal the plain
optimizer's."""

import copy
import dataclasses
import gc
import itertools
import os
import signal
import sys
import threading
import time
from collections import UserDict
from contextlib import nullcontext

import pytest
import torch
from patience import HANGS_SECONDS
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import course_lib.checkpoint as ours
from course_lib.memory import MemoryMeter, measure, symbolic
from course_lib.models import Decoder, deep_mlp, random_tokens
from course_lib.offload import (
    Device,
    DiskStore,
    HostStore,
    OffloadedOptimizer,
    Prefetcher,
    Store,
    StoreFull,
    SymbolicStore,
    activations,
    offload_activations,
)

pytestmark = [
    pytest.mark.usefixtures("little_to_collect"),
    pytest.mark.filterwarnings("ignore:no activation was moved"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def gradients(module, run, x):
    module.zero_grad()
    x = x.detach().clone().requires_grad_(x.is_floating_point() or x.is_complex())
    run(x).sum().backward()
    return [x.grad, *(p.grad for p in module.parameters())]


def assert_same_bits(left, right):
    for a, b in zip(left, right, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


def offloaded(module, **options):
    def run(x):
        with offload_activations(min_bytes=1, **options):
            return module(x)

    return run


def test_storage_that_rrelu_writes_after_its_copy_is_refused():
    x = torch.linspace(-2, 2, 96)

    def run(x):
        torch.manual_seed(0)
        return nn.functional.rrelu(x * 2, training=True)

    plain = gradients(nn.Module(), run, x)

    def step(prefetch):
        options = {"min_bytes": 0, "prefetch": prefetch, "in_flight": 0}

        def moved(x):
            with offload_activations(HostStore(), **options):
                return run(x)

        return gradients(nn.Module(), moved, x)

    assert_same_bits(step(prefetch=1), plain)
    with pytest.raises(
        RuntimeError, match=r"^RreluWithNoise.*wrote only after it had been offloaded"
    ):
        step(prefetch=0)


class Views(nn.Module):
    """Saves views of every kind: a square transpose, a slice, overlapping windows, an expanded row,
    a permutation."""

    def forward(self, x):
        y = x * 2
        square = y[:8, :8].t() * y[:8, :8].exp()
        windows = y.flatten().unfold(0, 5, 2) * y.flatten().unfold(0, 5, 2).sin()
        row = y[0].expand(8, -1) * y[1].expand(8, -1).cos()
        permuted = y.view(2, -1, 3, 4).permute(3, 0, 2, 1).sin() * y.view(2, -1, 3, 4).permute(
            3, 0, 2, 1
        )
        return square.sum() + windows.square().sum() + row.sum() + permuted.sum()


class Squared(nn.Module):
    """Saves a view that is conjugated lazily."""

    def forward(self, x):
        return torch.view_as_real(x.conj() * x)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4)
        self.linear = parametrizations.weight_norm(nn.Linear(8, 8))

    def forward(self, x):
        return self.linear(self.norm(self.conv(x)).relu()).softmax(-1).log()


def models():
    torch.manual_seed(0)
    yield "mlp", deep_mlp(6, 16), torch.randn(8, 16)
    yield "views", Views(), torch.randn(12, 12)
    yield "normed", Normed(), torch.randn(5, 4, 8)
    yield (
        "decoder",
        Decoder(vocabulary=50, hidden=16, heads=2, layers=2, sequence=8),
        torch.randint(50, (3, 8)),
    )
    yield "half", deep_mlp(3, 16).to(torch.bfloat16), torch.randn(8, 16, dtype=torch.bfloat16)
    yield (
        "complex",
        nn.Sequential(nn.Linear(8, 8, dtype=torch.complex64)),
        torch.randn(4, 8, dtype=torch.complex64),
    )


class Memory(Store):
    """A store of one's own."""

    def write(self, room, data):
        room.place = data.clone()
        return lambda: None

    def read(self, room, data):
        data.copy_(room.place)
        return lambda: None


# ---- activations


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize(
    "index", range(6), ids=["mlp", "views", "normed", "decoder", "half", "complex"]
)
def test_gradients_are_those_of_the_plain_module_to_the_bit(index, prefetch, device):
    _, module, x = list(models())[index]
    module, x = module.to(device), x.to(device)
    if x.is_complex():
        module = nn.Sequential(module, Squared())
    # a convolution may add up in any order
    with torch.backends.cudnn.flags(deterministic=True, allow_tf32=False):
        expected = gradients(module, module, x)
        for store in (DiskStore(), HostStore(), None):
            assert_same_bits(
                expected, gradients(module, offloaded(module, store=store, prefetch=prefetch), x)
            )


@pytest.mark.parametrize("make", [DiskStore, HostStore])
def test_a_storage_goes_down_once_however_many_views_of_it_are_saved(make):
    store, x = make(), torch.randn(64, 64, requires_grad=True)
    with offload_activations(store, min_bytes=100, prefetch=0):
        y = x * 2
        parts = [y[:32] * y[32:], y.t() @ y, y.sin(), y.cos()]
        z = sum(part.sum() for part in parts)
        (z * torch.ones(64, 64, requires_grad=True).sin().sum()).backward()
    assert store.stats.shared >= 4
    assert store.stats.bytes_down % y.nbytes == 0 and store.stats.bytes_down <= 5 * y.nbytes


def test_parameters_and_buffers_stay_where_they_are_also_behind_views_and_parametrizations():
    module = nn.Sequential(
        nn.Linear(32, 32), nn.BatchNorm1d(32), parametrizations.weight_norm(nn.Linear(32, 32))
    )
    module.eval()
    parametrize.register_parametrization(module[0], "bias", nn.Identity())
    store, seen = DiskStore(), set()
    write = store.write
    store.write = lambda room, data: (seen.add(data.data_ptr()), write(room, data))[1]
    with offload_activations(store, min_bytes=1, prefetch=0):
        module(torch.randn(4, 32)).square().sum().backward()
    assert seen
    assert not seen & {tensor.data_ptr() for tensor in [*module.parameters(), *module.buffers()]}


def test_what_is_kept_or_small_or_saved_last_stays():
    x = torch.randn(64, 64, requires_grad=True)

    def down(keep=(), min_bytes=1, prefetch=0):
        store = DiskStore()
        inner = x * 1
        with offload_activations(
            store, min_bytes=min_bytes, prefetch=prefetch, keep=[inner] if keep else ()
        ):
            out = (inner.sin().sin().sin()).sum()
        out.backward()
        return store.stats.bytes_down // x.nbytes

    assert down() == 2 and down(keep=True) == 1  # three are saved, the last one stays
    assert down(prefetch=1) == 1 and down(prefetch=5) == 0
    assert down(min_bytes=x.nbytes) == 2 and down(min_bytes=x.nbytes + 1) == 0
    weight, store = torch.randn(64, 64), DiskStore()
    with offload_activations(store, min_bytes=1, prefetch=0, keep=weight):
        (x * 1).sin().mul(weight).cos().mul(weight).sum().backward()
    # the input of sin; the weight is neither down nor among the last
    assert store.stats.bytes_down == x.nbytes


def test_a_graph_may_be_walked_through_several_times_and_differentiated_twice():
    net, x = deep_mlp(4, 16), torch.randn(8, 16, requires_grad=True)
    expected = torch.autograd.grad(net(x).sum(), x)[0]
    store = DiskStore()
    with offload_activations(store, min_bytes=1, prefetch=1):
        out = net(x).sum()
    for _ in range(3):
        assert torch.equal(torch.autograd.grad(out, x, retain_graph=True)[0], expected)

    def twice(context):
        with context:
            y = (x.sin() * x).tanh().sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    assert torch.equal(twice(nullcontext()), twice(offload_activations(DiskStore(), min_bytes=1)))
    del out
    assert store.used_bytes == 0


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_what_a_backward_pass_saves_again_while_it_is_here_is_known_for_what_it_is(prefetch):
    """A gradient penalty; symbolic tensors, which have no other storage, say what moves."""

    def moved(store):
        net, x = deep_mlp(4, 16), torch.ones(8, 16)

        def loss(x):
            x = x.detach().requires_grad_()
            y = net(x).tanh().tanh().sum(1)
            [gradient] = torch.autograd.grad(y.sum(), x, create_graph=True)
            return y.mean() + (gradient.norm(dim=1) - 1).square().mean()

        def under(x):
            with offload_activations(store, min_bytes=1, prefetch=prefetch):
                return loss(x)

        found = gradients(net, under, x)
        if not torch._guards.detect_fake_mode():
            assert_same_bits(gradients(net, loss, x), found)
        assert store.used_bytes == 0
        return copy.copy(store.stats)

    with DiskStore() as store:
        real = moved(store)
    with symbolic():
        assert moved(SymbolicStore()) == real
    assert real.bytes_down > 0 and real.shared > 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_stay_and_a_tensor_that_cannot_be_packed_leaves_nothing_behind(monkeypatch):
    weight, store, printed = torch.randn(64, 64, requires_grad=True), DiskStore(), []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)

    def padded(context):
        weight.grad = None
        with context:
            nested = torch.nested.as_nested_tensor([weight[:20] * 1, weight[:30] * 1]).sin()
            out = torch.nested.to_padded_tensor(nested, 0.0).sin().sin().sum()
        out.backward()
        return weight.grad

    offload = offload_activations(store, min_bytes=1, prefetch=0)
    assert torch.equal(padded(nullcontext()), padded(offload))
    assert store.stats.bytes_down > 0 == store.used_bytes
    with monkeypatch.context() as patched, pytest.raises(InterruptedError), offload:
        patched.setattr(torch.Tensor, "is_conj", lambda _: (_ for _ in ()).throw(InterruptedError))
        (weight * 1).sin()
    gc.collect()
    assert printed == [] and store.used_bytes == 0


@pytest.mark.parametrize(
    ("module", "use_reentrant"), [(ours, False), (ours, True), (torch.utils.checkpoint, False)]
)
def test_inputs_of_checkpointed_blocks_go_down(module, use_reentrant):
    net, x = deep_mlp(8, 64), torch.randn(256, 64, requires_grad=True)
    blocks = [net[i : i + 4] for i in range(0, 16, 4)]

    def run(x):
        for block in blocks:
            x = module.checkpoint(block, x, use_reentrant=use_reentrant)
        return x

    expected, store = gradients(net, net, x), DiskStore()

    def with_offload(x):
        with offload_activations(store, min_bytes=1, prefetch=0):
            return run(x)

    assert_same_bits(expected, gradients(net, with_offload, x))
    # of the inputs of four blocks: not the caller's, not the last
    assert store.stats.bytes_down >= 2 * x.nbytes
    assert store.used_bytes == 0


def test_a_batch_that_is_a_slice_does_not_take_the_data_set_along():
    data, net, store = torch.randn(64, 32, 256), deep_mlp(4, 256), DiskStore()
    with offload_activations(store, min_bytes=1024, prefetch=0):
        loss = net(data[:1]).sum()
    loss.backward()
    activation = data[:1].nbytes
    # of eight inputs: neither the batch nor the last one
    assert store.stats.bytes_down == 6 * activation
    assert_same_bits(
        gradients(net, net, data[:1]), gradients(net, offloaded(net, prefetch=0), data[:1])
    )


def test_views_that_together_are_their_storage_go_down_as_one():
    x, store = torch.randn(64, 96, requires_grad=True), DiskStore()
    with offload_activations(store, min_bytes=1, prefetch=0):
        q, k, v = (x * 1).chunk(3, dim=-1)  # each a third, with gaps
        attended = (q @ k.t()).softmax(-1) @ v
        out = attended.sin().sin().sin().sum()
    moved = store.stats.bytes_down
    out.backward()
    # q, k, v; probabilities; two inputs of sin
    assert moved == x.nbytes + 64 * 64 * 4 + 2 * 64 * 32 * 4
    assert store.used_bytes == 0


def test_part_of_a_storage_that_is_repeated_does_not_count_as_the_whole():
    data, store = torch.randn(8, 64), DiskStore()
    scale = torch.ones(64, requires_grad=True)
    with offload_activations(store, min_bytes=1, prefetch=0):
        out = (scale * data[0].expand(8, 64)).sum() + (scale.sin() * 2).sin().sin().sum()
    out.backward()
    assert 0 < store.stats.bytes_down < data.nbytes


def test_leaves_that_require_gradients_stay_also_if_they_are_no_parameters():
    leaf, store = torch.randn(64, 64, requires_grad=True), DiskStore()
    with offload_activations(store, min_bytes=1, prefetch=0):
        out = leaf.sin() + leaf.t().cos() + leaf.view(-1).exp().view(64, 64).detach() * leaf
        last = out.sin().sum()
    last.backward()
    assert store.stats.bytes_down == leaf.nbytes  # what exp gave; the input of the last sin stays


def test_a_storage_whose_first_graph_is_gone_can_be_saved_again():
    x, store = torch.randn(64, 64, requires_grad=True), DiskStore()
    with offload_activations(store, min_bytes=1, prefetch=0):
        y = x * 1
        for function in (torch.sin, torch.cos):
            out = None  # the first graph goes here
            out = function(y).sin().sin().sum()
    out.backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.cos().sin().sin().sum(), x)[0])
    assert store.used_bytes == 0


def test_what_a_node_reads_twice_comes_up_once():
    class Cubed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, gradient):
            (first,), (second,) = ctx.saved_tensors, ctx.saved_tensors
            return 3 * gradient * first * second

    store, x = DiskStore(), torch.randn(64, 64, requires_grad=True)
    with offload_activations(store, min_bytes=1, prefetch=0):
        y = x * 1
        for _ in range(4):
            y = Cubed.apply(y)
    y.sum().backward(retain_graph=True)
    assert store.stats.bytes_up == store.stats.bytes_down == 3 * x.nbytes
    y.sum().backward()
    assert store.stats.bytes_up == 6 * x.nbytes


def test_compiled_code_fetches_what_it_saved_once():
    store, net = (
        DiskStore(),
        torch.compile(nn.Sequential(deep_mlp(2, 16), nn.Linear(16, 16)), backend="aot_eager"),
    )
    with offload_activations(store, min_bytes=1, prefetch=0):
        out = net(torch.randn(32, 16)).sin().sin().sum()
    out.backward()
    assert store.stats.bytes_up == store.stats.bytes_down > 0


@pytest.mark.parametrize("in_flight", [0, 3])
def test_as_many_copies_are_under_way_as_asked_for(in_flight):
    class Slow(Memory):
        """Counts copies down that are not waited for yet."""

        under_way = most = 0

        def write(self, room, data):
            super().write(room, data)
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            return lambda: setattr(self, "under_way", self.under_way - 1)

    store, net, x = Slow(), deep_mlp(6, 16), torch.randn(8, 16)
    run = offloaded(net, store=store, prefetch=0, in_flight=in_flight)
    assert_same_bits(gradients(net, net, x), gradients(net, run, x))  # with a store of one's own
    assert store.most == in_flight + 1 and store.under_way == 0 and store.used_bytes == 0


@pytest.mark.filterwarnings("error")
def test_a_block_in_which_nothing_is_large_enough_warns_once():
    x, large = torch.ones(8, requires_grad=True), torch.ones(1 << 19, requires_grad=True)
    context = offload_activations(DiskStore())
    with pytest.warns(UserWarning, match=r"saved has 32 bytes, and min_bytes is 1048576"), context:
        (x * 1).sin()
    with context:
        (x * 1).sin()
    # large enough; nothing; what stays anyway
    for saved in (lambda: (large * 1).sin(), lambda: None, lambda: x * x):
        with offload_activations(DiskStore()):
            saved()


def test_the_peak_falls_by_what_goes_down():
    net, x = deep_mlp(16, 64), torch.randn(4096, 64)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with MemoryMeter() as plain:
        net(x).sum().backward()
    peaks = []
    for prefetch in (0, 1, 2):
        with MemoryMeter() as meter:
            offloaded(net, prefetch=prefetch)(x).sum().backward()
        peaks.append(meter.peak_bytes)
    assert plain.peak_bytes > 32 * x.nbytes
    assert peaks[0] < 6 * x.nbytes and peaks[2] < 8.5 * x.nbytes
    assert peaks == sorted(peaks)


def test_what_has_come_up_goes_again_although_the_graph_is_retained():
    net, x = deep_mlp(8, 64), torch.randn(4096, 64)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with MemoryMeter() as meter:
        out = offloaded(net, prefetch=1)(x).sum()
        out.backward(retain_graph=True)
        assert meter.live_bytes < 4 * x.nbytes
        out.backward()
    assert meter.peak_bytes < 7 * x.nbytes


def test_nothing_leaks_when_a_graph_is_dropped_or_a_pass_fails():
    store, net, x = DiskStore(), deep_mlp(6, 16), torch.randn(8, 16)
    hooks = len(torch.nn.modules.module._global_forward_pre_hooks)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ZeroDivisionError

    def forward_fails():
        with offload_activations(store, min_bytes=1):
            net(x)
            raise ZeroDivisionError

    def backward_fails():
        with offload_activations(store, min_bytes=1):
            out = net[6:](Fails.apply(net[:6](x))).sum()
        out.backward()

    for fails in (forward_fails, backward_fails):
        with pytest.raises(ZeroDivisionError):
            fails()
        gc.collect()
        assert store.used_bytes == 0
        assert len(torch.nn.modules.module._global_forward_pre_hooks) == hooks
    with offload_activations(store, min_bytes=1):
        net(x)
    gc.collect()
    assert store.used_bytes == 0
    before = store.stats.bytes_down
    net(x)  # outside
    assert store.stats.bytes_down == before


def finishes(work):
    """Whether `work` ends, in a thread that may be left behind if it does not."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(HANGS_SECONDS)
    return not thread.is_alive()


def test_a_graph_that_the_collector_drops_while_its_storage_is_written_is_no_deadlock(monkeypatch):
    write, store, done = os.pwrite, DiskStore(), []
    monkeypatch.setattr(os, "pwrite", lambda *args: (gc.collect(0), write(*args))[1])

    def work():
        for _ in range(2):
            with offload_activations(store, min_bytes=1, prefetch=0):
                y = torch.ones(64, 64, requires_grad=True) * 1
                for _ in range(6):
                    y = y.sin()
                    cycle = [y.cos()]
                    cycle.append(cycle)
                    del cycle
            y.sum().backward()
        done.append(True)

    assert finishes(work) and done


def test_dropping_a_graph_starts_no_thread_and_waits_for_nobody_who_has_the_lock(monkeypatch):
    store, x = DiskStore(), torch.ones(64, 64, requires_grad=True)
    with offload_activations(store, min_bytes=1, prefetch=0) as context:
        region = context._entered[-1][0]
        graphs = [(x * 1).sin().sin().sin() for _ in range(2)]
    monkeypatch.setattr(threading.Thread, "start", None)
    with region.guard:  # as another thread, or this one inside the region, may have it
        graphs.clear()
        assert store.used_bytes > 0
    assert store.used_bytes == 0


def test_a_context_can_be_entered_inside_itself_and_again():
    net, x, store = deep_mlp(6, 16), torch.randn(8, 16), DiskStore()
    context = offload_activations(store, min_bytes=1)

    def run(x):
        with context:
            y = net[:6](x)
            with context:
                return net[6:](y)

    expected = gradients(net, net, x)
    for _ in range(2):
        assert_same_bits(expected, gradients(net, run, x))
    assert store.used_bytes == 0


def test_a_change_in_place_is_an_error_and_never_a_wrong_gradient():
    for prefetch in (0, 3):  # on its way or below, and still here
        x = torch.ones(64, requires_grad=True)
        with offload_activations(DiskStore(), min_bytes=1, prefetch=prefetch):
            y = x * 1
            z = y.sin()
            y.add_(1)
            out = z.sin().sin().sum()
        with pytest.raises(RuntimeError, match=r"shape \(64,\).*changed in place"):
            out.backward()
    small = torch.ones(4, requires_grad=True)
    with offload_activations(DiskStore()):
        y = small * 1
        z = y.sin()
        y.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        z.sum().backward()


def test_a_tensor_saved_again_after_a_change_is_another_one():
    x, store = torch.ones(64, requires_grad=True), DiskStore()
    with offload_activations(store, min_bytes=1, prefetch=0):
        y = x * 1
        before = y.sin()
        y.add_(1)
        after = y.sin()
        more = after.cos().cos()
    more.sum().backward()
    y = torch.full((64,), 2.0)
    assert torch.allclose(x.grad, y.sin().cos().sin() * y.sin().sin() * y.cos())
    with pytest.raises(RuntimeError, match="changed in place"):
        before.sum().backward()


def test_a_full_tier_is_a_clear_error_and_what_was_saved_is_intact():
    net, x = deep_mlp(6, 64), torch.randn(64, 64, requires_grad=True)
    store = DiskStore(limit_bytes=3 * x.nbytes)
    with pytest.raises(StoreFull, match=f"{x.nbytes} more .* limit_bytes is {3 * x.nbytes}"):
        offloaded(net, store=store)(x)
    gc.collect()
    assert store.used_bytes == 0
    expected = gradients(net[:4], net[:4], x)
    assert_same_bits(expected, gradients(net[:4], offloaded(net[:4], store=store), x))
    half = DiskStore(limit_bytes=x.nbytes)
    with offload_activations(half, min_bytes=1, prefetch=0):
        y = (x * 1).sin()
        early = y.sin()
        with pytest.raises(StoreFull):
            early.sin().sin().sin()
    early.sum().backward()
    assert torch.allclose(x.grad, x.detach().sin().cos() * x.detach().cos())


def test_a_write_that_fails_is_an_error_and_the_tensor_stays(monkeypatch):
    store, x = DiskStore(), torch.randn(64, 64, requires_grad=True)

    def broken(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(store, "_write", broken)
    with (
        pytest.raises(OSError, match="Input/output"),
        offload_activations(store, min_bytes=1, prefetch=0),
    ):
        out = (x * 1).sin().sin().sum()
    out.backward()
    assert x.grad is not None
    assert store.used_bytes == 0


# The arrows of the diagram at the top of offload/activations.py.
ARROWS = {
    (None, "PARTIAL"),
    ("PARTIAL", "ON_DEVICE"),
    ("ON_DEVICE", "GOING_DOWN"),
    ("GOING_DOWN", "ON_DEVICE"),
    ("GOING_DOWN", "OFFLOADED"),
    ("OFFLOADED", "COMING_UP"),
    ("COMING_UP", "OFFLOADED"),
    *(
        (state, "FREED")
        for state in ("PARTIAL", "ON_DEVICE", "GOING_DOWN", "OFFLOADED", "COMING_UP")
    ),
}


def test_a_saved_storage_takes_every_arrow_of_its_diagram_and_no_other(monkeypatch):
    taken, stored = set(), activations._SavedStorage

    class Watched(stored):
        def __setattr__(self, name, value):
            if name == "state":
                before = vars(self).get("state")
                taken.add((before and before.name, value.name))
            super().__setattr__(name, value)

    monkeypatch.setattr(activations, "_SavedStorage", Watched)
    x = torch.ones(64, 8, requires_grad=True)
    store = DiskStore()
    with offload_activations(store, min_bytes=1, prefetch=1, in_flight=2):
        y = (x * 1).sin().sin().sin().sin()
        part = (x * 1)[:4].sin()  # of a storage that stays PARTIAL
        (x * 1).sin().sin().sin().sin()  # a graph that nobody keeps
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    part.sum().backward()
    with offload_activations(store, min_bytes=1, prefetch=0):
        z = (x * 1).sin().sin()
    del z  # OFFLOADED
    monkeypatch.setattr(store, "_write", lambda *_: 1 / 0)
    with (
        pytest.raises(ZeroDivisionError),
        offload_activations(store, min_bytes=1, prefetch=0),
    ):
        y = (x * 1).sin().sin()
    y.sum().backward()
    assert taken == ARROWS
    assert store.used_bytes == 0


@pytest.mark.gpu
def test_pinned_memory_and_streams_are_used_again():
    store, net = HostStore(), deep_mlp(8, 256).cuda()
    x = torch.randn(1024, 256, device="cuda")
    device = Device.of_tensor(x)

    def run():
        for _ in range(3):
            offloaded(net, store=store)(x).sum().backward()
            torch.cuda.synchronize()
        return (
            device.side("down"),
            device.side("up"),
            torch.cuda.host_memory_stats()["allocated_bytes.current"],
        )

    assert run() == run()
    assert store.used_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointed", [False, True])
def test_many_steps_on_a_device_stay_equal_to_plain_ones(checkpointed):
    """Views whose storage is shared, under pressure: what a missing wait or an early release would
    spoil."""
    torch.manual_seed(0)
    model = Decoder(vocabulary=500, hidden=256, heads=4, layers=6, sequence=128).cuda()
    tokens = random_tokens(8, 128, 500).cuda()
    model.loss(tokens).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    if checkpointed:
        for layer in model.layers:
            layer.forward = (
                lambda inner: lambda x: ours.checkpoint(inner, x, use_reentrant=False)
            )(layer.forward)
    for _ in range(10):
        model.zero_grad()
        with offload_activations(min_bytes=1):
            loss = model.loss(tokens)
        loss.backward()
        for parameter, wanted in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-4, atol=1e-6)


# ---- the file


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int8]
)
def test_a_store_gives_back_every_byte(dtype):
    tensor = (torch.randn(33, 7) * 50).to(dtype).t()
    for store in (DiskStore(), HostStore()):
        room = store.put(tensor)
        room.wait()
        again = room.get()()
        assert torch.equal(again, tensor) and again.stride() == tensor.stride()
        assert store.stats.bytes_down == store.stats.bytes_up == store.used_bytes == tensor.nbytes


def test_a_slow_write_is_waited_for_before_its_room_is_read(monkeypatch):
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *args: (time.sleep(0.1), write(*args))[1])
    data = torch.arange(64)
    assert torch.equal(DiskStore(threads=2).put(data).get()(), data)


def blocks(store):
    return os.fstat(store._file.fileno()).st_blocks


def test_room_is_used_again_and_the_end_of_the_file_is_given_back_once_it_is_half():
    store = DiskStore()
    rooms = [store.reserve(1 << 20) for _ in range(4)]
    assert blocks(store) * 512 >= 4 << 20
    rooms[1].free()
    assert store.used_bytes == 3 << 20 and store.file_bytes == 4 << 20
    again = store.reserve(1 << 20)
    assert again.place == 1 << 20 and store.file_bytes == 4 << 20
    rooms[3].free()
    assert store.file_bytes == 4 << 20  # a little of the end is kept
    rooms[2].free()
    assert store.file_bytes == 2 << 20 and blocks(store) * 512 < 4 << 20
    for room in (rooms[0], again, again):
        room.free()
    assert (store.used_bytes, store.file_bytes, blocks(store)) == (0, 0, 0)


def test_a_file_that_holds_a_state_does_not_grow_with_batches_of_other_sizes():
    store = DiskStore()
    state = store.reserve(1 << 12)
    for nbytes in range(1000, 2000, 50):
        activations = [store.reserve(nbytes) for _ in range(8)]
        while activations:
            activations.pop()
        assert store.file_bytes <= 2 * state.nbytes + 8 * nbytes


def test_a_step_leaves_nothing_in_the_file():
    store, net, x = DiskStore(), deep_mlp(6, 64), torch.randn(1024, 64)
    offloaded(net, store=store)(x).sum().backward()
    assert store.stats.bytes_down > 0 and (store.file_bytes, blocks(store)) == (0, 0)


def test_a_room_that_is_dropped_is_free():
    store = DiskStore()
    room = store.put(torch.ones(100))
    room.wait()
    del room
    assert store.used_bytes == store.file_bytes == 0


def test_what_is_dropped_while_another_thread_has_the_store_is_free_once_one_asks():
    store = DiskStore()
    room, held, dropped = store.reserve(100), threading.Event(), threading.Event()

    def another():
        with store.guard:
            held.set()
            dropped.wait(HANGS_SECONDS)

    thread = threading.Thread(target=another)
    thread.start()
    held.wait(HANGS_SECONDS)
    del room
    dropped.set()
    assert store.used_bytes == 0
    thread.join()


def test_many_threads_write_and_read_their_own_bytes():
    store, right = DiskStore(threads=4), []

    def work(number):
        data = torch.full((10_000,), number, dtype=torch.uint8)
        for _ in range(20):
            room = store.put(data)
            right.append(torch.equal(room.get()(), data))
            room.free()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 160 and store.used_bytes == 0


def test_the_file_has_no_name_that_could_outlive_the_process(tmp_path):
    with DiskStore(tmp_path) as store:
        store.put(torch.zeros(4096)).wait()
        assert list(tmp_path.iterdir()) == []


def test_a_closed_store_says_so(tmp_path):
    with DiskStore(tmp_path) as store:
        room = store.put(torch.zeros(8))
    for use in (lambda: store.reserve(1), room.get, lambda: room.put(torch.zeros(8))):
        with pytest.raises(ValueError, match="this DiskStore is closed; make a new one"):
            use()


# ---- the optimizer

BASES = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01}),  # has a state as soon as it is made
    "adamw, fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
}


def network(dtype=torch.float32, device="cpu"):
    return deep_mlp(3, 16).to(dtype).to(device)


def batches(count, dtype=torch.float32, device="cpu"):
    torch.manual_seed(1)
    return [torch.randn(8, 16, device=device).to(dtype) for _ in range(count)]


class Masters:
    """The reference for low precision: the plain optimizer on fp32 copies, rounded after each
    step."""

    def __init__(self, parameters, base, **options):
        self.parameters = list(parameters)
        self.copies = [nn.Parameter(p.detach().float()) for p in self.parameters]
        self.plain = base(self.copies, **options)

    def step(self):
        for p, master in zip(self.parameters, self.copies, strict=True):
            master.grad = None if p.grad is None else p.grad.float()
        self.plain.step()
        self.give()

    def give(self):
        """After an interruption: the parameters take what their copies are by then."""
        with torch.no_grad():
            for p, master in zip(self.parameters, self.copies, strict=True):
                p.copy_(master)

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None


def train(net, optimizer, data, between=lambda net: None):
    for x in data:
        optimizer.zero_grad()
        net(x).square().sum().backward()
        between(net)
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("base", "fraction", "overlap"),  # every pair of two of them
    [(base, f, (i + j) % 2 > 0) for i, base in enumerate(BASES) for j, f in enumerate((0, 0.4, 1))],
)
def test_fp32_steps_are_those_of_the_plain_optimizer(base, fraction, overlap, device):
    kind, options = BASES[base]
    plain, moved = network(device=device), network(device=device)
    expected = train(plain, kind(plain.parameters(), **options), batches(6, device=device))
    optimizer = OffloadedOptimizer(
        moved.parameters(), kind, fraction=fraction, overlap=overlap, **options
    )
    found = train(moved, optimizer, batches(6, device=device))
    if device == "cpu":
        assert_same_bits(expected, found)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fraction", [0, 0.5, 1.0])
@pytest.mark.parametrize("base", ["sgd", "momentum", "adamw", "adagrad"])
def test_low_precision_steps_are_those_of_fp32_masters(base, fraction, dtype):
    kind, options = BASES[base]
    plain, moved = network(dtype), network(dtype)
    expected = train(plain, Masters(plain.parameters(), kind, **options), batches(6, dtype))
    found = train(
        moved,
        OffloadedOptimizer(moved.parameters(), kind, fraction=fraction, **options),
        batches(6, dtype),
    )
    assert_same_bits(expected, found)


@pytest.mark.parametrize("chunk", [1, 3000])
def test_pages_of_any_size_give_the_same(chunk):
    plain, moved = network(), network()
    expected = train(plain, torch.optim.Adam(plain.parameters()), batches(4))
    optimizer = OffloadedOptimizer(moved.parameters(), torch.optim.Adam, page_bytes=chunk)
    assert_same_bits(expected, train(moved, optimizer, batches(4)))


@pytest.mark.parametrize(("page", "parameters"), [(1, 1), (2, 1), (4, 2), (7, 3)])
def test_a_step_holds_three_pages_of_so_many_bytes_or_of_a_parameter_that_has_more(
    page, parameters
):
    net = nn.ParameterList(torch.ones(64, 64) for _ in range(18))
    state = 2 * net[0].nbytes  # Adam's, of each parameter
    optimizer = OffloadedOptimizer(net, page_bytes=page * state // 2, foreach=False)
    for _ in range(2):
        for p in net:
            p.grad = torch.ones_like(p)
        with MemoryMeter(net, optimizer) as meter:
            optimizer.step()
    held = 4 * len(net)  # step counts stay
    assert meter.at_peak()["optimizer"] == held + 3 * parameters * state


@pytest.mark.parametrize("device", DEVICES)
def test_clipping_accumulation_and_missing_gradients_count(device):
    def clip(net):
        for p in net[2].parameters():
            p.grad = None  # no gradient, no update
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)

    def accumulate(net, optimizer):
        data = batches(6, device=device)
        for first, second in zip(data[::2], data[1::2], strict=True):
            optimizer.zero_grad()
            net(first).square().sum().backward()
            net(second).square().sum().backward()
            clip(net)
            optimizer.step()
        return [p.detach().clone() for p in net.parameters()]

    plain, moved = network(device=device), network(device=device)
    before = moved[2].weight.clone()
    expected = accumulate(plain, torch.optim.Adam(plain.parameters(), lr=0.01))
    found = accumulate(moved, OffloadedOptimizer(moved.parameters(), torch.optim.Adam, lr=0.01))
    rtol, atol = (0, 0) if device == "cpu" else (1e-4, 1e-6)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
    assert torch.equal(moved[2].weight, before)


def test_groups_schedulers_and_added_groups_count():
    def run(net, make):
        optimizer = make(
            [{"params": net[0].parameters(), "lr": 0.1}, {"params": net[2].parameters()}]
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        train(net, optimizer, batches(2))
        scheduler.step()
        optimizer.add_param_group({"params": net[4].parameters(), "lr": 0.05, "weight_decay": 0.2})
        return train(net, optimizer, batches(3))

    plain, moved = network(), network()
    expected = run(plain, lambda groups: torch.optim.AdamW(groups, lr=0.01))
    assert_same_bits(expected, run(moved, lambda groups: OffloadedOptimizer(groups, lr=0.01)))


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_set_from_outside_win(dtype, counted):
    def between(net, optimizer):
        train(net, optimizer, batches(2, dtype))
        with torch.no_grad():
            for p in [*net.parameters(), *getattr(optimizer, "copies", ())]:
                (p if counted else p.data).fill_(0.25)
        return train(net, optimizer, batches(2, dtype))

    plain, moved = network(dtype), network(dtype)
    reference = Masters(plain.parameters(), torch.optim.Adam, lr=0.01)
    optimizer = OffloadedOptimizer(moved.parameters(), torch.optim.Adam, lr=0.01)
    assert_same_bits(between(plain, reference), between(moved, optimizer))


@pytest.mark.parametrize("base", ["momentum", "adamw"])
def test_states_can_be_exchanged_with_the_plain_optimizer_both_ways(base):
    kind, options = BASES[base]
    first = network()
    plain = kind(first.parameters(), **options)
    train(first, plain, batches(3))
    second = copy.deepcopy(first)
    moved = OffloadedOptimizer(second.parameters(), kind, **options)
    moved.load_state_dict(plain.state_dict())
    third = copy.deepcopy(first)
    back = kind(third.parameters(), **options)
    written = moved.state_dict()
    assert set(written) == {"state", "param_groups"}
    assert_same_state(written["state"], plain.state_dict()["state"])
    back.load_state_dict(written)
    expected = train(first, plain, batches(3))
    assert_same_bits(expected, train(second, moved, batches(3)))
    assert_same_bits(expected, train(third, back, batches(3)))


def snapshot(net, optimizer):
    return copy.deepcopy([list(net.parameters()), optimizer.state_dict()])


def assert_same_state(left, right):
    torch.testing.assert_close(left, right, rtol=0, atol=0, check_stride=False)


KINDS = [
    (dtype, fraction) for dtype in (torch.float32, torch.bfloat16) for fraction in (0.0, 0.5, 1.0)
]


@pytest.mark.parametrize(("dtype", "fraction"), KINDS)
def test_state_is_what_the_plain_optimizer_would_hold(dtype, fraction):
    plain, moved = network(dtype), network(dtype)
    reference = Masters(plain.parameters(), torch.optim.Adam, lr=0.01)
    optimizer = OffloadedOptimizer(moved.parameters(), torch.optim.Adam, fraction=fraction, lr=0.01)
    assert not optimizer.state and len(optimizer.state) == 0
    train(plain, reference, batches(2, dtype))
    train(moved, optimizer, batches(2, dtype))
    assert list(optimizer.state) == list(moved.parameters())
    for p, master in zip(moved.parameters(), reference.copies, strict=True):
        wanted = dict(reference.plain.state[master])
        if dtype != torch.float32:
            wanted["master"] = master.detach()
        assert_same_state(dict(optimizer.state[p]), wanted)
    assert object() not in optimizer.state
    with pytest.raises(KeyError):
        optimizer.state[nn.Parameter(torch.ones(1))]


@pytest.mark.parametrize("base", ["sgd", "adam"])
@pytest.mark.parametrize(("dtype", "fraction"), KINDS)
def test_a_state_that_is_loaded_from_itself_or_put_back_is_the_same_to_the_bit(
    dtype, fraction, base
):
    kind, options = BASES[base]
    net = network(dtype)
    optimizer = OffloadedOptimizer(net.parameters(), kind, fraction=fraction, **options)
    train(net, optimizer, batches(3, dtype))
    before = snapshot(net, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    assert_same_state(snapshot(net, optimizer), before)
    kept = copy.deepcopy(dict(optimizer.state))
    optimizer.state.clear()
    assert not optimizer.state and optimizer.state_dict()["state"] == {}
    optimizer.state.update(zip(net.parameters(), kept.values(), strict=False))
    assert_same_state(snapshot(net, optimizer), before)
    other = copy.deepcopy(net)
    resumed = OffloadedOptimizer(other.parameters(), kind, fraction=1 - fraction, lr=0.5)
    resumed.load_state_dict(before[1])
    assert_same_bits(
        train(net, optimizer, batches(2, dtype)), train(other, resumed, batches(2, dtype))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("base", ["adam", "adamw"])
def test_pytorchs_distributed_checkpoint_reads_the_state_and_leaves_it_alone(base, dtype):
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    kind, options = BASES[base]
    net = network(dtype)
    optimizer = OffloadedOptimizer(net.parameters(), kind, **options)
    train(net, optimizer, batches(1, dtype))
    optimizer.zero_grad()
    before = snapshot(net, optimizer)
    written = get_optimizer_state_dict(net, optimizer)
    assert_same_state(snapshot(net, optimizer), before)
    assert set(written["state"]) == {name for name, _ in net.named_parameters()}
    other = copy.deepcopy(net)
    fresh = OffloadedOptimizer(other.parameters(), kind, **options)
    set_optimizer_state_dict(other, fresh, copy.deepcopy(written))
    assert_same_state(fresh.state_dict()["state"], before[1]["state"])


@pytest.mark.parametrize(("dtype", "fraction"), [(torch.float32, 1.0), (torch.bfloat16, 0.5)])
def test_measuring_a_step_leaves_model_and_state_as_they_were(dtype, fraction):
    net, x = network(dtype), batches(1, dtype)[0]
    optimizer = OffloadedOptimizer(net.parameters(), torch.optim.Adam, fraction=fraction, lr=0.01)

    def step():
        net(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    before = snapshot(net, optimizer)
    measure(step, model=net, optimizer=optimizer)
    assert_same_state(snapshot(net, optimizer), before)


@pytest.mark.parametrize("chunk", [1, 3000, 16 << 20])
@pytest.mark.parametrize(("dtype", "fraction"), KINDS)
def test_a_step_that_is_interrupted_leaves_the_state_that_the_base_left(dtype, fraction, chunk):
    class Interrupted(torch.optim.Optimizer):
        """Momentum by hand, which raises once when its `countdown` is over, in the middle of a
        parameter."""

        countdown = 10**9

        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr})

        def step(self):
            with torch.no_grad():
                for p in [
                    p for group in self.param_groups for p in group["params"] if p.grad is not None
                ]:
                    state = self.state[p]
                    state["step"] = state.get("step", torch.tensor(0.0)) + 1
                    mean = state.setdefault("mean", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                    Interrupted.countdown -= 1
                    if not Interrupted.countdown:
                        raise KeyboardInterrupt
                    p.sub_(self.param_groups[0]["lr"] * mean)

    def run(make):
        net, found = network(dtype), []
        optimizer = make(net.parameters())
        train(net, optimizer, batches(2, dtype))
        Interrupted.countdown = 3  # of six parameters
        with pytest.raises(KeyboardInterrupt):
            train(net, optimizer, batches(1, dtype))
        inner = optimizer.plain if isinstance(optimizer, Masters) else optimizer
        found += [float(state["step"]) for state in inner.state.values()]
        if isinstance(optimizer, Masters):
            optimizer.give()
        return [
            *train(net, optimizer, batches(2, dtype)),
            *(state["mean"] for state in inner.state.values()),
            found,
        ]

    options = {"fraction": fraction, "page_bytes": chunk, "lr": 0.01}
    expected = run(lambda parameters: Masters(parameters, Interrupted, lr=0.01))
    found = run(lambda parameters: OffloadedOptimizer(parameters, Interrupted, **options))
    if fraction in (0.0, 1.0):  # else those above are stepped before those below
        assert found.pop() == expected.pop() == [3.0, 3.0, 3.0, 2.0, 2.0, 2.0]
        assert_same_bits(found, expected)
    else:
        assert sorted(found[-1]) == sorted(expected[-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_may_be_changed_after_backward_behind_autograds_back(dtype):
    """As GradScaler, collectives and `.data` do, none of which counts a version on."""

    def between(net):
        for p in net.parameters():
            p.grad.data.add_(1.0)  # Adam would not see a factor

    plain, moved = network(dtype), network(dtype)
    expected = train(
        plain, Masters(plain.parameters(), torch.optim.Adam, lr=0.01), batches(3, dtype), between
    )
    found = train(
        moved,
        OffloadedOptimizer(moved.parameters(), torch.optim.Adam, lr=0.01),
        batches(3, dtype),
        between,
    )
    assert_same_bits(expected, found)


class Apart(Device):
    """A device in the books alone: its memory counts as another than the host's, and copies are
    done at once."""

    has_own_memory, ahead = True, 2


@pytest.mark.parametrize(
    ("given", "taken"),
    [({}, True), ({"foreach": False}, True), ({"foreach": True}, False), ({"fused": False}, False)],
)
def test_the_update_on_the_host_is_fused_unless_another_way_is_asked_for(given, taken, monkeypatch):
    monkeypatch.setattr(Device, "of_tensor", staticmethod(lambda tensor: Apart(tensor.device)))
    plain, moved = network(), network()
    expected = train(
        plain,
        torch.optim.Adam(plain.parameters(), **({"fused": True} if taken else given)),
        batches(3),
    )
    assert_same_bits(
        expected,
        train(moved, OffloadedOptimizer(moved.parameters(), torch.optim.Adam, **given), batches(3)),
    )


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_on_the_host_gives_the_steps_of_fp32_masters(dtype, overlap, monkeypatch):
    monkeypatch.setattr(Device, "of_tensor", staticmethod(lambda tensor: Apart(tensor.device)))

    def run(net, optimizer, masters=()):
        train(net, optimizer, batches(2, dtype))
        with torch.no_grad():
            for p in (*net[0].parameters(), *masters[:2]):
                p.fill_(0.25)  # counted: the optimizer must notice
        return train(net, optimizer, batches(2, dtype))

    plain, moved = network(dtype), network(dtype)
    reference = Masters(plain.parameters(), torch.optim.Adam, lr=0.01, fused=True)
    optimizer = OffloadedOptimizer(moved.parameters(), torch.optim.Adam, lr=0.01, overlap=overlap)
    assert_same_bits(run(plain, reference, reference.copies), run(moved, optimizer))
    assert list(optimizer.held_tensors()) == []
    before = snapshot(moved, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    assert_same_state(snapshot(moved, optimizer), before)
    expected = train(plain, reference, batches(1, dtype))
    assert_same_bits(expected, train(moved, optimizer, batches(1, dtype)))


@pytest.mark.parametrize("store", [Memory(), HostStore()])
def test_the_store_of_an_optimizer_may_be_ones_own(store):
    plain, moved = network(), network()
    expected = train(plain, torch.optim.Adam(plain.parameters()), batches(3))
    optimizer = OffloadedOptimizer(moved.parameters(), torch.optim.Adam, store=store)
    assert_same_bits(expected, train(moved, optimizer, batches(3)))
    assert store.used_bytes == 8 * sum(p.numel() for p in moved.parameters())


def test_an_optimizer_that_is_dropped_gives_its_rooms_back_without_the_garbage_collector():
    store, net = DiskStore(), network()
    optimizer = OffloadedOptimizer(net.parameters(), torch.optim.Adam, store=store)
    train(net, optimizer, batches(1))
    assert store.used_bytes > 0
    gc.disable()
    try:
        del optimizer
        assert store.used_bytes == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_of_a_parameter_changed_in_part_from_outside_the_rest_keeps_its_fp32_weights(fraction):
    p = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = OffloadedOptimizer([p], torch.optim.SGD, lr=2**-12, fraction=fraction)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert p.tolist() == [1, 1]  # bf16 has no number between 1 and 1 - 2 ** -8
    with torch.no_grad():
        p[0] = 3
    p.grad.zero_()
    optimizer.step()
    assert optimizer.state[p]["master"].tolist() == [3, 1 - 2**-12]


def test_a_closure_computes_the_loss_anew_and_its_value_is_returned():
    p = nn.Parameter(torch.ones(2))
    optimizer = OffloadedOptimizer([p], torch.optim.SGD, lr=0.25)

    def closure():
        p.grad = None
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 2 and optimizer.step(closure) == 0.5


@pytest.mark.parametrize(
    ("fraction", "prefetch", "dtype"),
    [(0.0, 0, torch.bfloat16), (0.5, 1, torch.bfloat16), (1.0, 2, torch.float32)],
)
def test_a_symbolic_store_counts_what_a_file_counts(fraction, prefetch, dtype):
    def moved(store):
        # symbolic ones cannot be cast
        layers = [(nn.Linear(64, 64, dtype=dtype), nn.GELU()) for _ in range(6)]
        net, x = nn.Sequential(*itertools.chain(*layers)), torch.randn(128, 64, dtype=dtype)
        optimizer = OffloadedOptimizer(net.parameters(), fraction=fraction, store=store, lr=0.1)
        found = []
        for _ in range(3):
            with offload_activations(store, min_bytes=1, prefetch=prefetch, keep=[net]):
                loss = net(x).square().sum()
            loss.backward()
            with MemoryMeter(net, optimizer) as meter:
                optimizer.step()
                optimizer.zero_grad()
            found.append(
                (copy.copy(store.stats), store.used_bytes, meter.entry_bytes, meter.peak_bytes)
            )
        return found

    with DiskStore() as store:
        real = moved(store)
    with symbolic():
        guess = moved(SymbolicStore())
    assert guess == real
    assert real[-1][0].bytes_down > 0 and real[-1][0].bytes_up > 0


def test_a_symbolic_step_offloads_to_a_symbolic_store_of_its_own():
    with symbolic():
        net, x = deep_mlp(3, 512), torch.randn(1024, 512)
        optimizer = OffloadedOptimizer(net.parameters(), lr=0.1)
        with offload_activations(keep=[net]):
            loss = net(x).sum()
        loss.backward()
        optimizer.step()
    assert type(optimizer.store) is SymbolicStore
    assert optimizer.store.stats.bytes_down == 8 * sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_a_meter_counts_masters_and_state_that_stay(fraction, dtype):
    net = deep_mlp(4, 64).to(dtype)
    optimizer = OffloadedOptimizer(net.parameters(), fraction=fraction, lr=0.1)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()
    with MemoryMeter(net, optimizer) as meter:
        pass
    each, wanted = (
        8 if dtype == torch.float32 else 12,
        fraction * sum(p.numel() for p in net.parameters()),
    )
    stays = 0
    for p in sorted(net.parameters(), key=lambda p: -p.numel()):
        # a step count stays of every parameter
        stays += 4 + (each * p.numel() if wanted <= 0 else 0)
        wanted -= p.numel()
    assert meter.at_peak()["optimizer"] == stays
    state = each * sum(p.numel() for p in net.parameters()) + 4 * len(list(net.parameters()))
    assert optimizer.store.used_bytes == state - stays
    assert meter.at_peak()["parameter"] == sum(p.nbytes for p in net.parameters())


def test_gradients_of_masters_that_stay_are_made_a_page_at_a_time():
    net = deep_mlp(24, 64).to(torch.bfloat16)
    largest = 4 * 64 * 64
    options = {"page_bytes": 3 * largest, "lr": 0.1, "foreach": False}
    optimizer = OffloadedOptimizer(net.parameters(), fraction=0.0, **options)
    for _ in range(2):
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        with MemoryMeter(net, optimizer) as meter:
            optimizer.step()
    held = meter.entry_bytes
    # Of a page the gradients; of one parameter, what the update makes: numerator, denominator,
    # rounded copies.
    assert held + 2 * largest < meter.peak_bytes <= held + 3 * largest + 3 * largest
    assert meter.peak_bytes < held + 4 * sum(p.numel() for p in net.parameters()) / 3


@pytest.mark.parametrize(
    ("broken", "match"), [(StoreFull, "limit_bytes is 3000"), (ValueError, "is closed")]
)
def test_a_store_that_is_full_or_closed_stops_a_step_before_anything_changes(broken, match):
    net, store = network(), DiskStore(limit_bytes=3000)
    before = [p.detach().clone() for p in net.parameters()]
    optimizer = OffloadedOptimizer(net.parameters(), fraction=0.5, store=store)
    if broken is ValueError:
        store.close()
    with pytest.raises(broken, match=match):
        train(net, optimizer, batches(1))
    assert_same_bits(before, list(net.parameters()))
    assert store.used_bytes == 0


def test_a_full_disk_stops_a_load_before_anything_changes():
    source = network()
    plain = torch.optim.AdamW(source.parameters(), lr=5.0)
    train(source, plain, batches(1))
    optimizer = OffloadedOptimizer(
        network().parameters(), lr=0.1, store=DiskStore(limit_bytes=3000)
    )
    with pytest.raises(StoreFull):
        optimizer.load_state_dict(plain.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.1 and optimizer.state_dict()["state"] == {}
    assert optimizer.store.used_bytes == 0


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("chunk", [1, 16 << 20])
def test_a_write_that_fails_once_loses_no_state(monkeypatch, chunk, overlap):
    plain, moved = network(), network()
    adam = torch.optim.Adam(plain.parameters())
    options = {"overlap": overlap, "page_bytes": chunk}
    optimizer = OffloadedOptimizer(moved.parameters(), torch.optim.Adam, **options)
    train(plain, adam, batches(2))
    train(moved, optimizer, batches(1))
    with monkeypatch.context() as patched:
        patched.setattr(
            os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        )
        with pytest.raises(OSError, match="No space left"):
            train(moved, optimizer, batches(2)[1:])
    assert_same_bits(train(plain, adam, batches(2)), train(moved, optimizer, batches(2)))


def test_an_optimizer_that_is_dropped_gives_its_room_back_and_cannot_be_copied():
    store = DiskStore()
    for _ in range(2):
        net = network()
        optimizer = OffloadedOptimizer(net.parameters(), store=store)
        train(net, optimizer, batches(1))
        with pytest.raises(TypeError, match="cannot be copied or pickled; use its state_dict"):
            copy.deepcopy(optimizer)
        assert store.used_bytes == 8 * sum(p.numel() for p in net.parameters())
        del optimizer
        gc.collect()
        assert store.used_bytes == 0


def test_a_store_that_is_dropped_closes_its_file():
    store = DiskStore()
    file, room = store._file, store.put(torch.ones(100))
    room.wait()
    del store, room
    gc.collect()
    assert file.closed


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks a process")
@pytest.mark.filterwarnings("ignore:This process")
def test_a_forked_process_has_a_default_store_of_its_own():
    def run():
        x = torch.ones(512, 512, requires_grad=True)
        with offload_activations(prefetch=0):
            y = (x * 1).sin().sin().sin().sum()
        y.backward()

    run()
    shared = DiskStore()
    child = os.fork()
    if child == 0:
        try:
            run()
            shared.reserve(1)
        except ValueError as refused:
            os._exit(7 if "forked" in str(refused) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks a process")
@pytest.mark.filterwarnings("ignore:This process")
def test_a_forked_process_that_frees_a_reservation_leaves_the_file_as_it_is():
    x = torch.arange(1000.0)
    with DiskStore() as store:
        reservation = store.put(x)
        reservation.wait()
        child = os.fork()
        if child == 0:
            reservation.free()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(reservation.get()(), x)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks a process")
@pytest.mark.filterwarnings("ignore:This process")
def test_a_forked_process_does_not_wait_for_a_copy_of_its_parent(monkeypatch):
    may_write, write = threading.Event(), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *given: (may_write.wait(), write(*given))[1])
    with DiskStore() as store:
        reservation = store.put(torch.arange(1000.0))
        child = os.fork()
        if child == 0:
            signal.alarm(HANGS_SECONDS)  # ends a child that waits forever
            try:
                reservation.wait()
            except ValueError as refused:
                os._exit(7 if "forked" in str(refused) else 1)
            finally:
                os._exit(2)
        may_write.set()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


# ---- the next batch


@pytest.mark.parametrize("device", DEVICES)
def test_a_prefetcher_gives_every_batch_once_in_order_and_again(device):
    made = [{"x": torch.full((2,), i), "more": [torch.ones(i + 1), ("name", i)]} for i in range(5)]
    prefetcher = Prefetcher(made, device)
    assert len(prefetcher) == 5
    for _ in range(2):
        found = list(prefetcher)
        assert [int(batch["x"][0]) for batch in found] == list(range(5))
        assert all(batch["x"].device.type == device for batch in found)
        assert [batch["more"][1] for batch in found] == [("name", i) for i in range(5)]
    assert list(Prefetcher([], device)) == []


def test_an_error_in_the_loader_comes_where_its_batch_would_have_come():
    def loader():
        yield torch.ones(1)
        raise ZeroDivisionError("in the loader")

    class Loader:
        def __iter__(self):
            return loader()

    batches = iter(Prefetcher(Loader()))
    assert next(batches) == 1
    with pytest.raises(ZeroDivisionError, match="in the loader"):
        next(batches)


def test_leaving_the_loop_early_stops_the_thread():
    for _ in Prefetcher(map(torch.tensor, itertools.count()), depth=2):
        break
    gc.collect()
    for thread in [thread for thread in threading.enumerate() if thread.name == "prefetcher"]:
        thread.join(HANGS_SECONDS)
        assert not thread.is_alive()


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    name: str = "sample"


class Movable:
    """As a packed sequence or a graph is: no container, but it can be moved."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        return Movable(self.x.to(device))


@pytest.mark.parametrize(
    ("make", "tensor_of"),
    [
        (lambda x: UserDict(input_ids=x, length=3), lambda batch: batch["input_ids"]),
        (Sample, lambda batch: batch.x),
        (lambda x: (x, {"inner": [Sample(x)]}), lambda batch: batch[1]["inner"][0].x),
        (Movable, lambda batch: batch.x),
    ],
    ids=["mapping", "dataclass", "nested", "movable"],
)
def test_batches_of_every_shape_are_moved(make, tensor_of):
    batch = make(torch.ones(2))
    (found,) = Prefetcher([batch], "meta")
    assert tensor_of(found).device.type == "meta" and type(found) is type(batch)
    assert tensor_of(batch).device.type == "cpu"


@pytest.mark.parametrize("batch", [None, 3, {"x": [1, 2]}, "text"])
def test_a_batch_without_tensors_is_refused_where_it_comes(batch):
    batches = iter(Prefetcher([torch.ones(1), batch]))
    assert next(batches) == 1
    with pytest.raises(TypeError, match=r"^a batch of the loader must be .*, got .+"):
        next(batches)


def test_ctrl_c_does_not_wait_for_a_loader_that_does():
    go = threading.Event()

    class Loader:
        def __iter__(self):
            go.wait(HANGS_SECONDS)
            yield torch.ones(1)

    def interrupt():
        while "prefetcher" not in [thread.name for thread in threading.enumerate()]:
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    # a worker of the tests ignores it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            next(iter(Prefetcher(Loader())))
        assert not go.is_set()
        # left behind, for the loader to end
        assert "prefetcher" in [thread.name for thread in threading.enumerate()]
    finally:
        signal.signal(signal.SIGINT, before)
        go.set()


def test_the_next_batch_is_made_while_this_one_is_used():
    made, go = [], threading.Event()

    class Loader:
        def __iter__(self):
            for i in range(3):
                made.append(i)
                if i == 1:
                    go.set()
                yield torch.tensor(i)

    for number, _ in enumerate(Prefetcher(Loader())):
        if number == 0:
            assert go.wait(HANGS_SECONDS)  # the second is made although nobody has asked for it
    assert made == [0, 1, 2]


# ---- bad input


def test_a_sparse_gradient_is_refused_before_anything_changes():
    table, linear = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4)
    optimizer = OffloadedOptimizer(
        [*linear.parameters(), *table.parameters()], torch.optim.SGD, lr=0.1
    )
    linear(table(torch.tensor([1, 2]))).sum().backward()
    before = linear.weight.clone()
    with pytest.raises(
        TypeError, match=r"must be real and dense, got a sparse tensor of shape \(10, 4\)$"
    ):
        optimizer.step()
    assert torch.equal(linear.weight, before)


def test_the_file_is_made_where_the_environment_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert DiskStore().directory == str(tmp_path)


def test_the_peak_of_a_training_step_falls_by_eight_bytes_a_parameter():
    peaks, losses = [], []
    for kind in (torch.optim.AdamW, OffloadedOptimizer):
        model = Decoder(vocabulary=500, hidden=64, heads=4, layers=3, sequence=32)
        optimizer, tokens = kind(model.parameters(), lr=1e-3), random_tokens(16, 32, 500)
        with MemoryMeter(model, optimizer) as meter:
            for _ in range(3):
                loss = model.loss(tokens)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        peaks.append(meter.peak_bytes)
        losses.append(loss.item())
    count = sum(p.numel() for p in model.parameters())
    assert losses[0] == losses[1]
    assert peaks[0] - peaks[1] == pytest.approx(8 * count, rel=0.01)
