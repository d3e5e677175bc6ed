"""Offloading of activations and optimizer state, compared bit for bit with steps without it."""

import copy
import gc
import itertools
import multiprocessing
import os
import sys
import threading
import time
from collections import UserDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from fp32_optimizer_reference import FP32Reference
from timeouts import TIMEOUT_SECONDS
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from training_steps import no_gc

from course_lib.checkpoint import checkpoint_blocks, readable
from course_lib.memory import MemoryMeter, symbolic
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
    offload_activations,
)

pytestmark = pytest.mark.filterwarnings("ignore:no activation was moved")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
assert_same = partial(torch.testing.assert_close, rtol=0, atol=0)


@pytest.fixture
def store():
    """A store that must be empty after the test."""
    store = DiskStore()
    yield store
    gc.collect()
    store.close()  # waits for copies under way, whose space is free only then
    assert (store.used_bytes, store._end) == (0, 0)


@pytest.fixture
def leaf():
    return torch.randn(64, 64, requires_grad=True)


def gradients(module, run, x):
    module.zero_grad()
    x = x.detach().clone().requires_grad_(x.is_floating_point() or x.is_complex())
    run(x).sum().backward()
    return [x.grad, *(p.grad for p in module.parameters())]


def offload(store=None, **options):
    """Offload every saved tensor, except those that `options` exclude."""
    return offload_activations(store, **{"min_bytes": 1, "prefetch": 0, **options})


def offloaded(run, store=None, **options):
    def inside(x):
        with offload(store, **options):
            return run(x)

    return inside


class Views(nn.Module):
    """Saves views of every kind: a square transpose, a slice, overlapping windows, an expanded row,
    a permutation."""

    def forward(self, x):
        y = x * 2
        square = y[:8, :8].t() * y[:8, :8].exp()
        windows = y.flatten().unfold(0, 5, 2) * y.flatten().unfold(0, 5, 2).sin()
        row = y[0].expand(8, -1) * y[1].expand(8, -1).cos()
        permuted = y.view(2, -1, 3, 4).permute(3, 0, 2, 1)
        return square.sum() + windows.square().sum() + row.sum() + (permuted.sin() * permuted).sum()


class Squared(nn.Module):
    """Saves a view that is conjugated lazily."""

    def forward(self, x):
        return torch.view_as_real(x.conj() * x)


decoder = partial(Decoder, vocabulary=50, hidden=16, heads=2, layers=2, sequence=8)
COMPLEX = {"dtype": torch.complex64}
# Name -> (function that returns a module, function that returns its input).
MODELS = {
    "views": (Views, lambda: torch.randn(12, 12)),
    "decoder": (decoder, lambda: torch.randint(50, (3, 8))),
    "complex": (
        lambda: nn.Sequential(nn.Linear(8, 8, **COMPLEX), Squared()),
        lambda: torch.randn(4, 8, **COMPLEX),
    ),
}


class UserStore(Store):
    """A user-defined store that counts its unfinished copies."""

    unfinished = most = 0

    def write(self, reservation, data):
        reservation.place = data.clone()
        self.unfinished += 1
        self.most = max(self.most, self.unfinished)
        return lambda: setattr(self, "unfinished", self.unfinished - 1)

    def read(self, reservation, data):
        data.copy_(reservation.place)
        return lambda: None


# ---- activations


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("name", MODELS)
def test_offloaded_gradients_equal_gradients_without_offload_bit_for_bit(name, prefetch, device):
    make_module, make_input = MODELS[name]
    module, x = make_module().to(device), make_input().to(device)
    expected = gradients(module, module, x)
    for store in (DiskStore(), HostStore(), None):
        assert_same(expected, gradients(module, offloaded(module, store, prefetch=prefetch), x))


@pytest.mark.parametrize("prefetch", [0, 1])
def test_offload_rejects_saved_noise_of_rrelu_in_training(prefetch):
    def run(x):
        return nn.functional.rrelu(x * 2, training=True).exp().exp()

    run = offloaded(run, HostStore(), prefetch=prefetch, in_flight=0)
    with pytest.raises(RuntimeError, match=r"^rrelu in training mode cannot run inside offload"):
        gradients(nn.Module(), run, torch.linspace(-2, 2, 96))


def test_activation_offload_never_writes_parameters_or_buffers_to_store():
    module = nn.Sequential(
        nn.Linear(32, 32), nn.BatchNorm1d(32), parametrizations.weight_norm(nn.Linear(32, 32))
    )
    module.eval()
    parametrize.register_parametrization(module[0], "bias", nn.Identity())
    store, written = DiskStore(), set()
    write = store.write
    store.write = lambda place, data: (written.add(data.data_ptr()), write(place, data))[1]
    with offload(store):
        module(torch.randn(4, 32)).square().sum().backward()
    assert written
    assert not written & {tensor.data_ptr() for tensor in [*module.parameters(), *module.buffers()]}


X = 64 * 64 * 4  # bytes of the leaf
WEIGHT, DATA, SCALE = torch.ones(64, 64), torch.ones(8, 64, 64), torch.ones(64, requires_grad=True)


def three_sines(x):
    return (x * 1).sin().sin().sin().sum()


def views(x):
    y = x * 1
    return (y.sin() + y.t().sin() + y[:, :4].cos().sum()).sin().sum()


def attention(x):
    q, k = (x * 1).chunk(2, dim=-1)  # each a half, with gaps
    return (q @ k.t()).softmax(-1).sin().sin().sum()


def nested(x):
    parts = torch.nested.as_nested_tensor([x[:20] * 1, x[:30] * 1]).sin()
    return torch.nested.to_padded_tensor(parts, 0.0).sin().sin().sum()


def saved_again(x):
    y = x * 1
    for function in (torch.sin, torch.cos):
        out = None  # drops the first graph
        out = function(y).sin().sin().sum()
    return out


# Case -> (function of the leaf, options, bytes that are offloaded).
KEPT_CASES = {
    "last two with prefetch=1": (three_sines, {"prefetch": 1}, X),
    "last of three tensors of min_bytes": (three_sines, {"min_bytes": X}, 2 * X),
    "smaller than min_bytes": (three_sines, {"min_bytes": X + 1}, 0),
    "tensor in keep": (
        lambda x: (x * 1).sin().mul(WEIGHT).cos().mul(WEIGHT).sum(),
        {"keep": WEIGHT},
        X,
    ),
    "slice of a data set": (lambda x: (DATA[:1] * x).sin().sin().sum(), {}, X),
    "nested tensor": (nested, {}, (20 + 30 + 2 * 30) * 64 * 4),
    "last of each graph": (saved_again, {}, 4 * X),
    "no view of an offloaded tensor": (views, {}, X),
    "no view of two halves": (attention, {}, 2 * X),
    "expanded row": (
        lambda x: (SCALE * WEIGHT[0].expand(64, 64)).sum() + (SCALE * 1).sin().sin().sum() + x,
        {},
        SCALE.nbytes,
    ),
    "leaf and its views": (
        lambda x: (x.sin() + x.t().cos() + x.view(-1).exp().view(64, 64).detach() * x).sin().sum(),
        {},
        X,  # the output of exp
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", KEPT_CASES)
def test_offload_writes_expected_bytes_for_excluded_or_small_tensors(name, store, leaf):
    run, options, expected = KEPT_CASES[name]
    found = gradients(nn.Module(), offloaded(run, store, **options), leaf)
    assert_same(found, gradients(nn.Module(), run, leaf))
    assert store.stats.bytes_down == expected


@pytest.mark.parametrize("prefetch", [0, 2])
def test_tensors_saved_twice_in_double_backward_are_offloaded_once(prefetch):
    """Compare a gradient penalty with autograd, and its bytes with a symbolic run."""

    def moved(store):
        net, x = deep_mlp(4, 16), torch.ones(8, 16)

        def loss(x):
            x = x.detach().requires_grad_()
            y = net(x).tanh().tanh().sum(1)
            [gradient] = torch.autograd.grad(y.sum(), x, create_graph=True)
            return y.mean() + (gradient.norm(dim=1) - 1).square().mean()

        found = gradients(net, offloaded(loss, store, prefetch=prefetch), x)
        if not torch._guards.detect_fake_mode():
            assert_same(gradients(net, loss, x), found)
        assert store.used_bytes == 0
        return copy.copy(store.stats)

    real = moved(DiskStore())
    with symbolic():
        assert moved(SymbolicStore()) == real
    assert real.bytes_down > 0 and real.shared > 0


def test_error_while_packing_a_tensor_frees_the_store(monkeypatch, store, leaf):
    printed = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    with monkeypatch.context() as patched, pytest.raises(InterruptedError), offload(store):
        patched.setattr(torch.Tensor, "is_conj", lambda _: (_ for _ in ()).throw(InterruptedError))
        (leaf * 1).sin()
    gc.collect()
    assert printed == []


@pytest.mark.parametrize(
    ("module", "use_reentrant"),
    [(readable, False), (readable, True), (torch.utils.checkpoint, False)],
)
def test_offload_writes_inputs_of_checkpointed_blocks_to_store(module, use_reentrant, store):
    net, x = deep_mlp(8, 16), torch.randn(64, 16)

    def run(x):
        for i in range(0, 16, 4):
            x = module.checkpoint(net[i : i + 4], x, use_reentrant=use_reentrant)
        return x

    assert_same(gradients(net, net, x), gradients(net, offloaded(run, store), x))
    # Two of four inputs: the first belongs to the caller, the last stays.
    assert store.stats.bytes_down >= 2 * x.nbytes


@pytest.mark.parametrize("in_flight", [0, 3])
def test_in_flight_option_limits_number_of_unfinished_copies(in_flight):
    store, net, x = UserStore(), deep_mlp(6, 16), torch.randn(8, 16)
    run = offloaded(net, store, in_flight=in_flight)
    assert_same(gradients(net, net, x), gradients(net, run, x))
    assert store.most == in_flight + 1 and store.unfinished == 0 and store.used_bytes == 0


@pytest.mark.filterwarnings("error")
def test_offload_context_without_large_tensors_warns_once():
    x, large = torch.ones(8, requires_grad=True), torch.ones(1 << 19, requires_grad=True)
    context = offload_activations(DiskStore())
    with pytest.warns(UserWarning, match=r"32 bytes, less than min_bytes = 1048576"), context:
        (x * 1).sin()
    with context:
        (x * 1).sin()
    # A large tensor, no tensor, and a leaf, which stays anyway.
    for saved in (lambda: (large * 1).sin(), lambda: None, lambda: x * x):
        with offload_activations(DiskStore()):
            saved()


def test_offload_lowers_peak_by_offloaded_bytes_and_prefetch_raises_it():
    net, x = deep_mlp(8, 64), torch.randn(4096, 64)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    peaks = []
    for prefetch in (0, 1, 2):
        with MemoryMeter() as meter:
            out = offloaded(net, prefetch=prefetch)(x).sum()
            out.backward(retain_graph=True)
            assert meter.live_bytes < (3 + prefetch) * x.nbytes
            out.backward()
            del out
        peaks.append(meter.peak_bytes)
    with MemoryMeter() as plain:
        net(x).sum().backward()
    assert plain.peak_bytes > 15 * x.nbytes
    assert peaks[0] < 6 * x.nbytes and peaks[1] < 7 * x.nbytes and peaks[2] < 8.5 * x.nbytes
    assert peaks == sorted(peaks)


@pytest.mark.parametrize(
    "register", [None, "register_forward_pre_hook", "register_full_backward_pre_hook"]
)
def test_deleted_graph_or_failed_pass_frees_store_and_hooks(register, store):
    net, x = deep_mlp(6, 16), torch.randn(8, 16, requires_grad=True)
    hooks = len(torch.nn.modules.module._global_forward_pre_hooks)
    if register:
        getattr(net[6], register)(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) if register else nullcontext():
        out = offloaded(net, store)(x).sum()
        if register:
            out.backward()
    out = None
    gc.collect()
    assert store.used_bytes == 0
    assert len(torch.nn.modules.module._global_forward_pre_hooks) == hooks
    before = store.stats.bytes_down
    net[:6](x)  # outside
    assert store.stats.bytes_down == before > 0


def test_deleting_graph_starts_no_thread_and_acquires_no_lock(monkeypatch, store, leaf):
    """Drop a graph while a lock is held, because the collector may run in any thread."""
    with offload(store) as context:
        region = context._entered[-1][0]
        graphs = [(leaf * 1).sin().sin().sin() for _ in range(2)]
    reservation, used_bytes = store.reserve(100), store.used_bytes
    assert used_bytes > 100
    monkeypatch.setattr(threading.Thread, "start", None)
    with region.lock:
        graphs.clear()
        assert store.used_bytes == used_bytes
    assert store.used_bytes == 100
    with store.lock:
        del reservation
    assert store.used_bytes == 0


def test_offload_context_can_be_nested_and_entered_again(store):
    net, x = deep_mlp(6, 16), torch.randn(8, 16)
    context = offload(store, prefetch=1)

    def run(x):
        with context:
            y = net[:6](x)
            with context:
                return net[6:](y)

    expected = gradients(net, net, x)
    for _ in range(2):
        assert_same(expected, gradients(net, run, x))


@pytest.mark.parametrize("options", [{}, {"prefetch": 3}, {"min_bytes": 1 << 20}])
def test_changing_offloaded_tensor_in_place_raises_in_backward(options, store):
    x = torch.ones(64, requires_grad=True)
    with offload(store, **options):
        y = x * 1
        before = y.sin()
        y.add_(1)
        after = y.sin().cos().cos()
    after.sum().backward()
    y = torch.full((64,), 2.0)
    assert torch.allclose(x.grad, y.sin().cos().sin() * y.sin().sin() * y.cos())
    with pytest.raises(RuntimeError, match=r"shape \(64,\).*changed in place"):
        before.sum().backward()


def test_full_offload_store_raises_and_preserves_earlier_tensors(leaf):
    with offload(DiskStore(limit_bytes=X)):
        early = (leaf * 1).sin().sin()
        with pytest.raises(StoreFull, match=f"{X} more .* limit_bytes is {X}"):
            early.sin().sin().sin()
    early.sum().backward()
    assert torch.allclose(leaf.grad, leaf.detach().sin().cos() * leaf.detach().cos())


def test_failed_offload_write_raises_and_leaves_tensor_in_memory(monkeypatch, store, leaf):
    monkeypatch.setattr(store, "_write", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), offload(store):
        y = (leaf * 1).sin().sin()
    y.sum().backward()
    assert torch.allclose(leaf.grad, leaf.detach().sin().cos() * leaf.detach().cos())


@pytest.mark.gpu
def test_gpu_offload_reuses_pinned_memory_and_streams():
    store, net = HostStore(), deep_mlp(8, 256).cuda()
    x = torch.randn(1024, 256, device="cuda")
    device = Device.of_tensor(x)

    def run():
        for _ in range(3):
            offloaded(net, store, prefetch=None)(x).sum().backward()
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
def test_offloaded_gradients_on_gpu_equal_baseline_over_many_steps(checkpointed):
    """Repeat a step that a missing wait or an early release would spoil."""
    torch.manual_seed(0)
    model = Decoder(vocabulary=500, hidden=256, heads=4, layers=6, sequence=128).cuda()
    tokens = random_tokens(8, 128, 500).cuda()
    model.loss(tokens).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    if checkpointed:
        checkpoint_blocks(model)
    for _ in range(10):
        model.zero_grad()
        with offload_activations(min_bytes=1):
            loss = model.loss(tokens)
        loss.backward()
        found = [parameter.grad for parameter in model.parameters()]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


# ---- the file


@pytest.mark.parametrize("make", [DiskStore, HostStore])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex64])
def test_store_returns_correct_bytes_after_slow_write(make, dtype, monkeypatch):
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *args: (time.sleep(0.02), write(*args))[1])
    store, tensor = make(), (torch.randn(33, 7) * 50).to(dtype).t()
    reservation = store.put(tensor)
    found = reservation.get()()
    assert torch.equal(found, tensor) and found.stride() == tensor.stride()
    assert store.stats.bytes_down == store.stats.bytes_up == store.used_bytes == tensor.nbytes


def test_disk_store_reuses_and_merges_freed_space(store):
    parts = [store.reserve(1 << 20) for _ in range(4)]
    parts[1].free()
    assert store.used_bytes == 3 << 20 and store.file_bytes == 4 << 20
    parts[1] = store.reserve(1 << 20)
    assert parts[1].place == 1 << 20
    for part in (parts[2], parts[3], parts[3]):
        part.free()
    larger = store.reserve(3 << 20)  # two adjacent free parts, and one more
    assert larger.place == 2 << 20 and store.file_bytes == 5 << 20
    if hasattr(os, "posix_fallocate"):
        assert os.fstat(store._file.fileno()).st_blocks * 512 >= 5 << 20


def test_disk_store_uses_tmpdir_and_closes_its_file(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with DiskStore() as closed:
        reservation = closed.put(torch.zeros(4096))
        reservation.wait()
        assert closed.directory == str(tmp_path)
        assert list(tmp_path.iterdir()) == []  # a name could outlive the process
    for use in (lambda: closed.reserve(1), reservation.get):
        with pytest.raises(ValueError, match="closed"):
            use()
    dropped = DiskStore()
    file, reservation = dropped._file, dropped.put(torch.ones(100))
    reservation.wait()
    del dropped, reservation
    gc.collect()
    assert file.closed


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks a process")
@pytest.mark.filterwarnings("ignore:This process")
def test_forked_process_must_not_use_store_of_its_parent(store):
    def reserve():
        with pytest.raises(ValueError, match="forked"):
            store.reserve(1)

    process = multiprocessing.get_context("fork").Process(target=reserve)
    process.start()
    process.join(TIMEOUT_SECONDS)
    assert process.exitcode == 0


def test_threads_sharing_store_read_the_bytes_they_wrote(store):
    def same(number):
        data = torch.full((10_000,), number, dtype=torch.uint8)
        return all(torch.equal(store.put(data).get()(), data) for _ in range(20))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(same, range(8)))


# ---- the optimizer

BASES = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01}),  # has state before its first step
    "adamw, fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
}


def network(dtype=torch.float32, device="cpu"):
    return deep_mlp(3, 16).to(dtype).to(device)


def count(net):
    return sum(p.numel() for p in net.parameters())


def train(net, optimizer, steps=4, between=lambda net: None):
    torch.manual_seed(1)
    like = net[0].weight
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(8, 16, device=like.device).to(like.dtype)).square().sum().backward()
        between(net)
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


def assert_same_steps(run=train, base="adam", dtype=torch.float32, device="cpu", **options):
    """Assert that a run with an offloaded optimizer equals one with the fp32 reference."""
    kind, given = BASES[base]
    plain, moved = network(dtype, device), network(dtype, device)
    reference = FP32Reference(plain.parameters(), kind, **given)
    expected = run(plain, reference)
    optimizer = OffloadedOptimizer(moved.parameters(), kind, **given, **options)
    found = run(moved, optimizer)
    if device == "cpu":
        assert_same(expected, found)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    return moved, optimizer, reference


def clip_some(net):
    for p in net[2].parameters():
        p.grad = None  # no gradient, no update
    nn.utils.clip_grad_norm_(net.parameters(), 0.5)


PAGES = [1, 3000, 16 << 20]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("base", "fraction", "overlap", "page"),
    [(base, (0.4, 0.0, 0.4, 1.0)[i % 4], i % 2 > 0, PAGES[i % 3]) for i, base in enumerate(BASES)],
)
def test_offloaded_fp32_steps_equal_steps_of_base_optimizer(base, fraction, overlap, page, device):
    options = {"fraction": fraction, "overlap": overlap, "page_bytes": page}
    run = partial(train, between=clip_some)
    net, *_ = assert_same_steps(run, base, device=device, **options)
    assert torch.equal(net[2].weight, network(device=device)[2].weight)


@pytest.mark.parametrize(
    ("page", "parameters", "overlap"), [(1, 1, True), (2, 1, False), (4, 2, True), (7, 3, False)]
)
def test_offloaded_step_reuses_memory_of_at_most_three_pages(
    monkeypatch, page, parameters, overlap
):
    new, allocate = [], DiskStore.memory_for
    monkeypatch.setattr(DiskStore, "memory_for", lambda *args: new.append(1) or allocate(*args))
    net = nn.ParameterList(torch.ones(64, 64) for _ in range(18))
    state = 2 * net[0].nbytes  # Adam's, of each parameter
    options = {"page_bytes": page * state // 2, "overlap": overlap, "foreach": False}
    meter = second_step(net, OffloadedOptimizer(net, **options))
    at_once = parameters * (3 if overlap else 1)
    assert meter.at_peak()["optimizer"] == 4 * len(net) + at_once * state  # step counts stay
    assert len(new) == 2 * at_once


def test_offloaded_state_referenced_by_base_optimizer_is_not_overwritten():
    kept = []

    class KeepsReferences(torch.optim.Adam):
        def step(self):
            super().step()
            tensors = [t for state in self.state.values() for t in state.values() if t.ndim]
            kept.extend((t, t.clone()) for t in tensors)

    net = nn.ParameterList(torch.ones(64, 64) for _ in range(5))
    second_step(net, OffloadedOptimizer(net, KeepsReferences, page_bytes=1))
    assert len(kept) > 20 and all(torch.equal(t, then) for t, then in kept)


def second_step(net, optimizer):
    """Return the meter of a step with existing optimizer state."""
    for _ in range(2):
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        with MemoryMeter(net, optimizer) as meter:
            optimizer.step()
    return meter


@pytest.mark.parametrize(("fraction", "counted"), [(0.0, True), (1.0, True), (1.0, False)])
def test_changing_part_of_parameter_preserves_remaining_fp32_weights(fraction, counted):
    p = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = OffloadedOptimizer([p], torch.optim.SGD, lr=2**-12, fraction=fraction)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert p.tolist() == [1, 1]  # bf16 has no number between 1 and 1 - 2 ** -8
    with torch.no_grad():
        (p if counted else p.data)[0] = 3
    p.grad.zero_()
    optimizer.step()
    assert optimizer.state[p]["master"].tolist() == [3, 1 - 2**-12]


@pytest.mark.parametrize("kind", [UserStore, HostStore])
def test_offloaded_optimizer_accepts_user_defined_store(kind):
    store = kind()
    net, _optimizer, _ = assert_same_steps(store=store)
    assert store.used_bytes == 8 * count(net)


def test_offloaded_optimizer_supports_parameter_groups_and_learning_rate_schedulers():
    found = []
    for kind in (torch.optim.AdamW, OffloadedOptimizer):
        net = network()
        first, second, third = ({"params": net[i].parameters()} for i in (0, 2, 4))
        optimizer = kind([first | {"lr": 0.1}, second], lr=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        train(net, optimizer)
        scheduler.step()
        optimizer.add_param_group(third | {"lr": 0.05, "weight_decay": 0.2})
        found.append(train(net, optimizer))
    assert_same(*found)


def snapshot(net, optimizer):
    return copy.deepcopy([list(net.parameters()), optimizer.state_dict()])


@pytest.mark.parametrize(
    ("base", "dtype", "fraction"),
    [
        (base, dtype, fraction)
        for i, base in enumerate(("sgd", "momentum", "adamw", "adagrad"))
        for j, fraction in enumerate((0.0, 0.5, 1.0))
        for dtype in (torch.float32, (torch.bfloat16, torch.float16)[(i + j) % 2])
    ],
)
def test_offloaded_steps_and_reloaded_state_equal_fp32_reference(base, dtype, fraction):
    net, optimizer, reference = assert_same_steps(base=base, dtype=dtype, fraction=fraction)
    wanted = reference.plain.state_dict()
    if dtype != torch.float32:
        for i, master in enumerate(reference.copies):
            wanted["state"].setdefault(i, {})["master"] = master.detach()
    assert_same(optimizer.state_dict(), wanted)
    before = snapshot(net, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    assert_same(snapshot(net, optimizer), before)
    kept = copy.deepcopy(dict(optimizer.state))
    optimizer.state.clear()
    assert optimizer.state.get(net[0].weight) is None and optimizer.state_dict()["state"] == {}
    optimizer.state.update(zip(net.parameters(), kept.values(), strict=False))
    assert_same(snapshot(net, optimizer), before)
    other = copy.deepcopy(net)
    resumed = OffloadedOptimizer(other.parameters(), BASES[base][0], fraction=1 - fraction, lr=0.5)
    resumed.load_state_dict(wanted)
    assert_same(train(net, optimizer), train(other, resumed))


@pytest.mark.parametrize(("base", "dtype"), [("adam", torch.bfloat16), ("adamw", torch.float32)])
def test_distributed_checkpoint_reads_and_restores_offloaded_state(base, dtype):
    from torch.distributed.checkpoint import state_dict as dcp

    net, optimizer, _ = assert_same_steps(base=base, dtype=dtype)
    optimizer.zero_grad()
    before = snapshot(net, optimizer)
    written = dcp.get_optimizer_state_dict(net, optimizer)
    assert_same(snapshot(net, optimizer), before)
    assert set(written["state"]) == {name for name, _ in net.named_parameters()}
    kind, options = BASES[base]
    other = copy.deepcopy(net)
    fresh = OffloadedOptimizer(other.parameters(), kind, **options)
    dcp.set_optimizer_state_dict(other, fresh, copy.deepcopy(written))
    assert_same(fresh.state_dict()["state"], before[1]["state"])


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize(
    ("dtype", "fraction"), [(torch.float32, 1.0), (torch.bfloat16, 0.0), (torch.bfloat16, 1.0)]
)
def test_interrupted_offloaded_step_preserves_state_of_base_optimizer(
    monkeypatch, dtype, fraction, page
):
    def run(net, optimizer):
        train(net, optimizer)
        update, calls = torch.Tensor.addcdiv_, itertools.count()

        def interrupted(*args, **options):
            if next(calls) == 2:  # of six parameters; Adam has changed its state before
                raise KeyboardInterrupt
            return update(*args, **options)

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(torch.Tensor, "addcdiv_", interrupted)
            train(net, optimizer)
        states = getattr(optimizer, "plain", optimizer).state
        assert [float(state["step"]) for state in states.values()] == [5.0] * 3 + [4.0] * 3
        getattr(optimizer, "write_copies", lambda: None)()
        return [*train(net, optimizer), *(state["exp_avg"] for state in states.values())]

    assert_same_steps(run, "adam", dtype, fraction=fraction, page_bytes=page)


def test_offloaded_step_calls_closure_and_returns_its_loss():
    p = nn.Parameter(torch.ones(2))
    optimizer = OffloadedOptimizer([p], torch.optim.SGD, lr=0.25)

    def closure():
        optimizer.zero_grad()
        p.square().sum().backward()
        return p.detach().square().sum()

    assert optimizer.step(closure) == 2 and optimizer.step(closure) == 0.5


def test_offloaded_step_in_symbolic_mode_uses_symbolic_store():
    with symbolic():
        net, x = deep_mlp(3, 512), torch.randn(1024, 512)
        optimizer = OffloadedOptimizer(net.parameters(), lr=0.1)
        with offload_activations(keep=[net]):
            loss = net(x).sum()
        loss.backward()
        optimizer.step()
    assert type(optimizer.store) is SymbolicStore
    assert optimizer.store.stats.bytes_down == 8 * count(net)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_meter_counts_fp32_weights_and_state_not_offloaded(dtype, fraction):
    net = deep_mlp(4, 64).to(dtype)
    optimizer = OffloadedOptimizer(net.parameters(), fraction=fraction, lr=0.1)
    second_step(net, optimizer)
    optimizer.zero_grad()
    with MemoryMeter(net, optimizer) as meter:
        pass
    each, wanted = 8 if dtype == torch.float32 else 12, fraction * count(net)
    stays = 0
    for p in sorted(net.parameters(), key=lambda p: -p.numel()):
        # The step count of every parameter stays.
        stays += 4 + (each * p.numel() if wanted <= 0 else 0)
        wanted -= p.numel()
    assert meter.at_peak()["optimizer"] == stays
    assert optimizer.store.used_bytes == each * count(net) + 4 * len([*net.parameters()]) - stays
    assert meter.at_peak()["parameter"] == sum(p.nbytes for p in net.parameters())


def test_offloaded_step_creates_fp32_gradients_one_page_at_a_time():
    net = deep_mlp(24, 64).to(torch.bfloat16)
    largest = 4 * 64 * 64
    options = {"page_bytes": 3 * largest, "lr": 0.1, "foreach": False}
    optimizer = OffloadedOptimizer(net.parameters(), fraction=0.0, **options)
    meter = second_step(net, optimizer)
    held = meter.entry_bytes
    # The gradients of a page; numerator, denominator and rounded copy of one parameter.
    assert held + 2 * largest < meter.peak_bytes <= held + 3 * largest + 3 * largest
    assert meter.peak_bytes < held + 4 * count(net) / 3


@pytest.mark.parametrize("broken", [StoreFull, ValueError])
def test_step_and_load_with_full_store_raise_without_changes(broken):
    net, store = network(), DiskStore(limit_bytes=3000)
    optimizer = OffloadedOptimizer(net.parameters(), fraction=0.5, store=store, lr=0.1)
    if broken is ValueError:
        store.close()
    with pytest.raises(broken, match=r"limit_bytes is 3000|closed"):
        train(net, optimizer)
    assert_same(list(network().parameters()), list(net.parameters()))
    source = network()
    plain = torch.optim.AdamW(source.parameters(), lr=5.0)
    train(source, plain)
    with pytest.raises(broken):
        optimizer.load_state_dict(plain.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.1 and optimizer.state_dict()["state"] == {}
    assert store.used_bytes == 0


@pytest.mark.parametrize(("page", "overlap"), [(1, True), (16 << 20, False)])
def test_failed_page_write_loses_no_optimizer_state(monkeypatch, page, overlap):
    def fails(*_):
        raise OSError(28, "No space left on device")

    def run(net, optimizer):
        train(net, optimizer)
        raises = nullcontext()
        if isinstance(optimizer, OffloadedOptimizer):
            raises = pytest.raises(OSError, match="No space")
        with monkeypatch.context() as patched, raises:
            patched.setattr(os, "pwrite", fails)
            train(net, optimizer, steps=1)
        return train(net, optimizer)

    assert_same_steps(run, overlap=overlap, page_bytes=page)


def test_deleted_offloaded_optimizer_frees_store_and_deepcopy_is_rejected(store):
    net = network()
    optimizer = OffloadedOptimizer(net.parameters(), store=store)
    train(net, optimizer)
    with pytest.raises(TypeError, match="use its state_dict"):
        copy.deepcopy(optimizer)
    assert store.used_bytes == 8 * count(net)
    with no_gc():
        del optimizer
        assert store.used_bytes == 0


def test_offloaded_step_rejects_sparse_gradient_before_changing_any_weight():
    table, linear = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4)
    parameters = [*linear.parameters(), *table.parameters()]
    optimizer = OffloadedOptimizer(parameters, torch.optim.SGD, lr=0.1)
    linear(table(torch.tensor([1, 2]))).sum().backward()
    before = linear.weight.clone()
    with pytest.raises(TypeError, match=r"sparse tensor of shape \(10, 4\)$"):
        optimizer.step()
    assert torch.equal(linear.weight, before)


# ---- the next batch


@pytest.mark.parametrize("device", [*DEVICES, "meta"])
def test_prefetcher_yields_every_batch_in_order_when_iterated_twice(device):
    batches = [UserDict(more=[torch.ones(2), number], name="batch") for number in range(5)]
    prefetcher = Prefetcher(batches, device)
    assert len(prefetcher) == 5
    for _ in range(2):
        found = list(prefetcher)
        assert [batch["more"][1] for batch in found] == list(range(5))
        assert all(batch["more"][0].device.type == device for batch in found)
        assert all(type(batch) is UserDict and batch["name"] == "batch" for batch in found)
    assert all(batch["more"][0].device.type == "cpu" for batch in batches)
    assert list(Prefetcher([], device)) == []
    [module] = Prefetcher([nn.Linear(2, 2)], device)  # moved by its method `to`
    assert module.weight.device.type == device


@pytest.mark.parametrize("make", [lambda: 1 / 0, lambda: {"x": [1, 2]}])
def test_prefetcher_raises_loader_error_after_preceding_batches(make):
    def loader():
        yield torch.ones(1)
        yield make()

    batches = iter(Prefetcher(loader()))
    assert next(batches) == 1
    message = r"division|^a batch of the loader must contain .*, got"
    with pytest.raises((ZeroDivisionError, TypeError), match=message):
        next(batches)


def prefetcher_threads():
    return [thread for thread in threading.enumerate() if thread.name == "prefetcher"]


def test_interrupted_loop_does_not_wait_for_blocked_loader():
    go = threading.Event()

    def loader():
        yield torch.ones(1)
        go.wait(TIMEOUT_SECONDS)

    batches = iter(Prefetcher(loader()))
    next(batches)
    batches.close()  # runs the same code as an exception, such as KeyboardInterrupt
    # The thread ends with its loader, and a program that ends does not wait for it.
    assert [thread.daemon for thread in prefetcher_threads()] == [True]
    go.set()


def test_prefetcher_loads_batches_ahead_and_stops_after_break():
    loaded, go = [], threading.Event()

    def loader():
        for i in itertools.count():
            loaded.append(i)
            if i == 1:
                go.set()
            yield torch.tensor(i)

    for _ in Prefetcher(loader()):
        assert go.wait(TIMEOUT_SECONDS)  # the second batch is loaded ahead
        break
    gc.collect()
    for thread in prefetcher_threads():
        thread.join(TIMEOUT_SECONDS)
        assert not thread.is_alive()
    assert len(loaded) <= 3
