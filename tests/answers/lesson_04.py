"""Answers to the exercises of lesson 04: right ones, and wrong ones with what they are told."""

from functools import partial
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from course_lib.lessons.lesson_04.simulation import clock
from course_lib.offload import offload_activations

# The time of a step
# --------------------------------------------------------------------------------------------------


def step_time(L, f, g, c, p):
    backward = {0: g + 2 * c, 1: c + max(g, c), 2: max(g, 2 * c)}
    return L * max(f, 2 * c) + L * backward[p] - f


def with_the_ends(L, f, g, c, p):
    """In a loop, with what the last layer need not fetch."""
    seconds = (L - 1) * max(f, 2 * c) + f
    for layer in range(L):
        up = 2 * c if layer else max(2 - p - 1, 0) * c
        seconds += max(g, up) if p == 2 else g + up if p == 0 else max(g, up / 2) + up / 2
    return numpy.float64(seconds - f)


def event_simulation(L, f, g, c, p, stay=None):
    """Run every copy and product in turn; the last `stay` storages (default: p + 1) never move."""
    stay, now, lane, down = p + 1 if stay is None else stay, 0.0, 0.0, []
    for storage in range(2 * L):  # the input of Linear, the product, then the input of GELU
        now += f * (storage % 2)
        if storage >= stay:
            lane = max(lane, now) + c
            down.append(lane)
            now = max([now, *down[:-2]])
    now = lane = max([now, *down])
    arrives = dict.fromkeys(range(stay), 0.0)
    for storage in range(2 * L):
        for ahead in range(storage, min(storage + p + 1, 2 * L)):
            if ahead not in arrives:
                lane = arrives[ahead] = max(lane, now) + c
        now = max(now, arrives[storage]) + g * (storage % 2)
    return now - f


def runs_the_clock(L, f, g, c, p):
    return clock(L, c / f, p) * f


# Hooks
# --------------------------------------------------------------------------------------------------


def whole(tensor):
    count = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.detach().as_strided((count,), (1,), 0)


def hooks(
    key=lambda storage: storage,
    known=WeakKeyDictionary,
    moves=lambda tensor, stay: tensor.untyped_storage() not in stay,
    view=lambda row, *view: row.as_strided(*view),
    hold=None,
    versions=True,
    early=False,
):
    """The right hooks, except for what is given instead."""

    def offloading(store, stay):
        rooms = known()

        def pack(tensor):
            storage = tensor.untyped_storage()
            if not moves(tensor, stay):
                return tensor.detach()
            room = None if rooms is None else rooms.get(key(storage))
            if room is None or (versions and room.version != tensor._version):
                room = store.put(whole(tensor))
                room.version = tensor._version
                if rooms is not None:
                    rooms[key(storage)] = room
            if hold is not None:
                hold.append(tensor)
            fetch = room.get() if early else lambda: room.get()()
            return fetch, tensor.shape, tensor.stride(), tensor.storage_offset()

        def unpack(packed):
            if isinstance(packed, torch.Tensor):
                return packed
            fetch, *place = packed
            return view(fetch(), *place)

        return saved_tensors_hooks(pack, unpack)

    return offloading


def with_closures(store, stay):
    """Right in another way: `pack` returns a function, and a version has a room of its own."""
    rooms = WeakKeyDictionary()

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage in stay:
            return tensor
        known, version = rooms.setdefault(storage, {}), tensor._version
        if version not in known:
            known[version] = store.put(whole(tensor))
        room, view = known[version], (tensor.size(), tensor.stride(), tensor.storage_offset())
        return lambda: torch.as_strided(room.get()(), *view)

    return saved_tensors_hooks(pack, lambda packed: packed() if callable(packed) else packed)


def library(prefetch):
    return lambda store, stay: offload_activations(store, min_bytes=1, prefetch=prefetch)


def elsewhere(store, stay):
    """Moves everything into a list of its own."""
    kept = []
    return saved_tensors_hooks(
        lambda t: kept.append(t.detach().clone()) or len(kept) - 1, lambda i: kept[i]
    )


# Waits
# --------------------------------------------------------------------------------------------------


def wait_for(device, copied, waits):
    for wait in waits:
        {"finish": device.finish, "wait": device.wait}[wait](copied)


def read(device, x, waits=("finish",), result=lambda y, host: host.tolist()):
    y = x * 2
    host = device.pinned(y.shape, y.dtype)
    wait_for(device, device.copy(host, y, "down"), waits)
    return result(y, host)


def use(device, host, waits=("wait",)):
    x = torch.zeros(host.shape)
    wait_for(device, device.copy(x, host, "up"), waits)
    return x * 2


def let_go(device, x, waits=("wait",), keeps=False, again=True, at_the_end=("finish",)):
    y = x * 2
    host = device.pinned(y.shape, y.dtype)
    copied = device.copy(host, y, "down")
    wait_for(device, copied, waits)
    if not keeps:
        del y
    if again:
        z = x * 100  # noqa: F841
    wait_for(device, copied, at_the_end)
    return host.tolist()


def three(*, first=read, second=use, third=let_go):
    return first, second, third


# Pages
# --------------------------------------------------------------------------------------------------


def peak_in_step(parameters, page_bytes):
    return 8 * parameters + min(3 * page_bytes, 8 * parameters)


_ADDRESS = "its address is given to another one"

#: check -> right answers, and wrong ones, each alone or with a part of what it is told.
ANSWERS = {
    "step_time": (
        [
            step_time,
            lambda *case: step_time(*case) + case[1],
            lambda *case: torch.tensor(step_time(*case)),
            with_the_ends,
            event_simulation,
            partial(event_simulation, stay=0),  # as if all storages were copied
        ],
        [
            (lambda *case: None if case[-1] else step_time(*case), "returns None for L = 16"),
            (lambda *case: 1.5 * step_time(*case), "L = 16"),
            (runs_the_clock, "operators. Type a formula"),
            (lambda *case: "soon", "Expected one number"),
        ],
    ),
    "offloading": (
        [hooks(), with_closures, library(0), library(1)],
        [
            (elsewhere, "moved nothing into the store"),
            (hooks(early=True), "copied back during forward"),
            (lambda store, stay: (store, stay), "got a `tuple`"),
            (lambda store, stay: None, "got a `NoneType`"),
            (lambda store, stay: save_on_cpu(), "moved nothing into the store"),
            (hooks(moves=lambda tensor, stay: True), "moved a parameter"),
            (hooks(known=lambda: None), "even if it is saved twice"),
            (hooks(key=lambda storage: storage.data_ptr(), known=WeakValueDictionary), _ADDRESS),
            (hooks(key=lambda storage: storage.data_ptr(), known=dict), _ADDRESS),
            (hooks(versions=False), "changed in place"),
            (
                hooks(
                    moves=lambda one, stay: one.requires_grad and one.untyped_storage() not in stay
                ),
                "still held",
            ),
            (hooks(known=dict), "still held"),
            (
                hooks(view=lambda row, shape, *_: row[: shape.numel()].view(shape)),
                "must restore the view",
            ),
            (
                hooks(view=lambda row, shape, stride, offset: row.as_strided(shape, stride)),
                "must restore the view",
            ),
            (hooks(hold=[]), "still held"),
        ],
    ),
    "waits": (
        [three(), [read, use, let_go]],
        [
            (three(first=partial(read, waits=())), "before the copy is complete"),
            (three(second=partial(use, waits=())), "has not written"),
            (three(third=partial(let_go, waits=())), "still reads it"),
            (three(first=partial(read, waits=["wait"])), "before the copy is complete"),
            (three(second=partial(use, waits=["finish"])), "the host waits"),
            (three(third=partial(let_go, waits=["finish"])), "the host waits"),
            (three(third=partial(let_go, waits=(), keeps=True)), "reuses its memory"),
            (three(third=partial(let_go, waits=(), again=False)), "reuses its memory"),
            (three(first=lambda device, x: (x * 2).tolist()), "nothing is copied"),
            (three(first=partial(read, waits=["wait", "finish"])), "compute stream waits as well"),
            (three(first=partial(read, result=lambda y, host: host.clone())), "a list of numbers"),
            (three(first=lambda device, x: print(end="")), "`read`: it returns nothing"),
            (
                three(first=partial(read, waits=(), result=lambda y, host: y.tolist())),
                "Read the copy, `host`",
            ),
            (
                three(third=partial(let_go, waits=["finish"], at_the_end=())),
                "the host waits",
            ),
            (three(third=partial(let_go, at_the_end=())), "The host reads before"),
            (three(second=lambda device, host: use(device, host) * 2), "numbers are wrong"),
            (read, "three functions"),
        ],
    ),
    "peak_in_step": (
        [peak_in_step, lambda n, page: min(16 * n, 8 * n + 3 * page)],
        [
            (lambda n, page: 8 * n + min(2 * page, 8 * n), "You counted two pages"),
            (lambda n, page: peak_in_step(n, page) / 1e6, "in MB"),
            (lambda n, page: peak_in_step(n, page) / 2**30, "in GiB"),
        ],
    ),
}

#: check -> mutants of its solution that are right as well, and why.
EQUIVALENT = {
    "step_time": {
        "L * max(f, 2 * c) + L * backward - f → L * max(f, 2 * c) + L * backward + f": (
            "the ends of a step are within the tolerance, which simulations of the text need"
        )
    },
    "offloading": dict.fromkeys(
        (
            "whole(tensor) → whole(tensor.detach())",
            "return tensor.detach() → return tensor.detach().detach()",
            "tensor.detach() → tensor",
            "return packed → return packed.detach()",
            "return room.get()().as_strided(*view) → return room.get()().as_strided(*view).detach()",
        ),
        "no graph is recorded for what a hook computes",
    ),
    "waits": dict.fromkeys(
        ("x * 100 → x / 100", "100 → 101 in `z = x * 100`", "100 → 99 in `z = x * 100`"),
        "what z holds is of no account: it only takes the memory",
    ),
}
