"""Answers to the exercises of lesson 04: right ones, and wrong ones with what they are told."""

from functools import partial
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy
import torch
from torch.autograd.graph import saved_tensors_hooks

# The time of a step
# --------------------------------------------------------------------------------------------------


def step_time(L, f, g, c, p):
    backward = {0: g + 2 * c, 1: c + max(g, c), 2: max(g, 2 * c)}[p]
    return L * max(f, 2 * c) + L * backward - f


def but_backward(wrong):
    """Another time of a layer's backward for some p, of (g, c)."""

    def time(L, f, g, c, p):
        backward = {0: g + 2 * c, 1: c + max(g, c), 2: max(g, 2 * c)} | {
            each: formula(g, c) for each, formula in wrong.items()
        }
        return L * max(f, 2 * c) + L * backward[p] - f

    return time


def with_the_ends(L, f, g, c, p):
    """In a loop, with what the last layer need not fetch."""
    seconds = (L - 1) * max(f, 2 * c) + f
    for layer in range(L):
        up = 2 * c if layer else max(2 - p - 1, 0) * c
        seconds += max(g, up) if p == 2 else g + up if p == 0 else max(g, up / 2) + up / 2
    return numpy.float64(seconds - f)


# Hooks
# --------------------------------------------------------------------------------------------------


def whole(tensor):
    count = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.detach().as_strided((count,), (1,), 0)


def hooks(
    key=lambda storage: storage,
    known=WeakKeyDictionary,
    moves=lambda storage, stay: storage not in stay,
    view=lambda row, *view: row.as_strided(*view),
    hold=None,
    versions=True,
):
    """The right hooks, except for what is given instead."""

    def offloading(store, stay):
        rooms = known()

        def pack(tensor):
            storage = tensor.untyped_storage()
            if not moves(storage, stay):
                return tensor.detach()
            room = None if rooms is None else rooms.get(key(storage))
            if room is None or (versions and room.version != tensor._version):
                room = store.put(whole(tensor))
                room.version = tensor._version
                if rooms is not None:
                    rooms[key(storage)] = room
            if hold is not None:
                hold.append(tensor)
            return room, tensor.shape, tensor.stride(), tensor.storage_offset()

        def unpack(packed):
            if isinstance(packed, torch.Tensor):
                return packed
            room, *place = packed
            return view(room.get()(), *place)

        return saved_tensors_hooks(pack, unpack)

    return offloading


class Handle:
    """The room and the view in an object of one's own."""

    def __init__(self, room, tensor):
        self.room, self.like = room, (tensor.size(), tensor.stride(), tensor.storage_offset())

    def tensor(self):
        return torch.as_strided(self.room.get()(), *self.like)


def with_handles(store, stay):
    rooms = WeakKeyDictionary()

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage in stay:
            return tensor
        version = tensor._version
        known = rooms.setdefault(storage, {})
        if version not in known:
            known[version] = store.put(whole(tensor))
        return Handle(known[version], tensor)

    return saved_tensors_hooks(
        pack, lambda packed: packed.tensor() if isinstance(packed, Handle) else packed
    )


def moves_what_needs_a_gradient(store, stay):
    """Leaves masks and batches where they are."""
    known = hooks()(store, stay)
    return saved_tensors_hooks(
        lambda tensor: known.pack_hook(tensor) if tensor.requires_grad else tensor,
        lambda packed: known.unpack_hook(packed),
    )


def elsewhere(store, stay):
    """Moves everything into a list of its own."""
    kept = []
    return saved_tensors_hooks(
        lambda t: kept.append(t.detach().clone()) or len(kept) - 1, lambda i: kept[i]
    )


def copies_back_at_once(store, stay):
    """Calls `room.get()` in `pack`, so that the data are in memory again during forward."""
    known = hooks()(store, stay)

    def pack(tensor):
        packed = known.pack_hook(tensor)
        return packed if isinstance(packed, torch.Tensor) else (packed[0].get(), *packed[1:])

    def unpack(packed):
        return packed if isinstance(packed, torch.Tensor) else packed[0]().as_strided(*packed[1:])

    return saved_tensors_hooks(pack, unpack)


# Waits
# --------------------------------------------------------------------------------------------------


def read(device, x, wait="finish"):
    y = x * 2
    host = device.pinned(y.shape, y.dtype)
    copied = device.copy(host, y, "down")
    if wait:
        getattr(device, wait)(copied)
    return host.tolist()


def use(device, host, wait="wait"):
    x = torch.zeros(host.shape)
    copied = device.copy(x, host, "up")
    if wait:
        getattr(device, wait)(copied)
    return x * 2


def let_go(device, x, wait="wait", keeps=False, again=True):
    y = x * 2
    host = device.pinned(y.shape, y.dtype)
    copied = device.copy(host, y, "down")
    if wait:
        getattr(device, wait)(copied)
    if not keeps:
        del y
    if again:
        z = x * 100  # noqa: F841
    device.finish(copied)
    return host.tolist()


def waits_twice(device, x):
    y = x * 2
    host = device.pinned(y.shape, y.dtype)
    copied = device.copy(host, y, "down")
    device.wait(copied)
    device.finish(copied)
    return host.tolist()


def returns_the_tensor(device, x):
    y = x * 2
    host = device.pinned(y.shape, y.dtype)
    device.finish(device.copy(host, y, "down"))
    return host


def finishes_before_the_next_tensor(device, x):
    y = x * 2
    host = device.pinned(y.shape, y.dtype)
    device.finish(device.copy(host, y, "down"))
    del y
    z = x * 100  # noqa: F841
    return host.tolist()


def never_finishes(device, x):
    y = x * 2
    host = device.pinned(y.shape, y.dtype)
    device.wait(device.copy(host, y, "down"))
    del y
    z = x * 100  # noqa: F841
    return host.tolist()


def without_a_copy(device, x):
    return (x * 2).tolist()


def three(*, first=read, second=use, third=let_go):
    return first, second, third


def bare(program):
    return partial(program, wait=None)


# Pages
# -----------------------------------------------------------------------------------------------


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
        ],
        [
            (lambda L, f, g, c, p: L * (f + g), "left out the copies"),
            (lambda L, f, g, c, p: max(L * (f + g), 4 * L * c), "ready at once"),
            (lambda L, f, g, c, p: L * max(f, 2 * c) + L * max(g, 2 * c), "the time of p = 2"),
            (lambda L, f, g, c, p: L * max(f, 2 * c) + L * (g + 2 * c), "the time of p = 0"),
            (
                lambda L, f, g, c, p: L * max(f, c) + L * (g + c if p == 0 else max(g, c)),
                "one storage per layer",
            ),
            (
                lambda L, f, g, c, p: step_time(L, f, g, c, p) + L * min(f, 2 * c),
                "added the copies",
            ),
            (lambda L, f, g, c, p: step_time(L, f, f, c, p), "took f for"),
            (lambda L, f, g, c, p: step_time(L, f, g, c, p) - L * max(f, 2 * c), "backward alone"),
            (lambda L, f, g, c, p: step_time(L, f, 2 * f, c, p), "took 2 f"),
            (but_backward({1: lambda g, c: g + c}), "the shorter one"),
            (but_backward({2: lambda g, c: g}), "On a slow link"),
            (but_backward({1: lambda g, c: g + c, 2: lambda g, c: g}), "On a slow link"),
            (lambda L, f, g, c, p: L * (f + g + (2 - p) * c), "On a slow link"),
            (
                lambda L, f, g, c, p: step_time(L, f, g, c, p) + L * (f - max(f, 2 * c)),
                "On a slow link",
            ),
            (but_backward({2: lambda g, c: max(g, c)}), "one after the other"),
            (
                lambda L, f, g, c, p: L * (max(f, 2 * c) + (g + c if p == 0 else max(g, c))),
                "In backward you counted one copy",
            ),
            (
                lambda L, f, g, c, p: step_time(L, f, g, c, p) if p == 0 else None,
                "p = 1: your function returned nothing",
            ),
            (but_backward({1: lambda g, c: max(g, 2 * c)}), "Only one of them does"),
            (but_backward({1: lambda g, c: g + 2 * c}), "wait for both copies"),
            (but_backward({0: lambda g, c: c + max(g, c)}), "waits for both copies"),
            (
                lambda L, f, g, c, p: step_time(L, f, g, c, p) - L * max(f, 2 * c) + L * max(f, c),
                "In forward you counted one copy",
            ),
            (lambda L, f, g, c, p: step_time(L, f, g, c, p) / L, "one layer"),
            (lambda L, f, g, c, p: 1000 * step_time(L, f, g, c, p), "milliseconds"),
            (lambda L, f, g, c, p: 1.5 * step_time(L, f, g, c, p), "L = 16"),
            (lambda L, f, g, c, p: "soon", "Expected one number"),
        ],
    ),
    "offloading": (
        [hooks(), with_handles],
        [
            (elsewhere, "moved nothing into the store"),
            (copies_back_at_once, "copied back during forward"),
            (lambda store, stay: (store, stay), "got a `tuple`"),
            (hooks(moves=lambda storage, stay: True), "moved a parameter"),
            (hooks(known=lambda: None), "even if it is saved twice"),
            (hooks(key=lambda storage: storage.data_ptr(), known=WeakValueDictionary), _ADDRESS),
            (hooks(key=lambda storage: storage.data_ptr(), known=dict), _ADDRESS),
            (hooks(versions=False), "changed in place"),
            (moves_what_needs_a_gradient, "still held"),
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
            (three(first=bare(read)), "before the copy is complete"),
            (three(second=bare(use)), "has not written"),
            (three(third=bare(let_go)), "still reads it"),
            (three(first=partial(read, wait="wait")), "before the copy is complete"),
            (three(second=partial(use, wait="finish")), "the host waits"),
            (three(third=partial(let_go, wait="finish")), "the host waits"),
            (three(third=partial(let_go, wait=None, keeps=True)), "reuses its memory"),
            (three(third=partial(let_go, wait=None, again=False)), "reuses its memory"),
            (three(first=without_a_copy), "nothing is copied"),
            (three(first=waits_twice), "the compute stream waits as well"),
            (three(first=returns_the_tensor), "a list of numbers"),
            (three(first=lambda device, x: print(end="")), "`read`: it returns nothing"),
            (three(third=finishes_before_the_next_tensor), "the host waits"),
            (three(third=never_finishes), "The host reads before"),
            (three(second=lambda device, host: use(device, host) * 2), "numbers are wrong"),
            (read, "three functions"),
        ],
    ),
    "peak_in_step": (
        [peak_in_step, lambda n, page: min(16 * n, 8 * n + 3 * page)],
        [
            (lambda n, page: 8 * n + page, "You counted one page"),
            (lambda n, page: 8 * n + 2 * page, "You counted two pages"),
            (lambda n, page: 8 * n + min(page, 8 * n), "You counted one page"),
            (lambda n, page: 8 * n + min(2 * page, 8 * n), "You counted two pages"),
            (lambda n, page: 8 * n + 3 * page, "For large pages"),
            (lambda n, page: 8 * n + min(3, -(-8 * n // page)) * page, "For large pages"),
            (lambda n, page: 8 * n + 3 * min(page, 8 * n), "For large pages"),
            (lambda n, page: 4 * n + min(3 * page, 8 * n), "Besides the pages"),
            (lambda n, page: min(3 * page, 8 * n), "the state alone"),
            (lambda n, page: 16 * n, "all of the state"),
            (lambda n, page: 8 * n + min(3 * page, 4 * n), "only one of Adam's"),
            (lambda n, page: 8 * n, "left out the state"),
            (lambda n, page: peak_in_step(n, page) / 1e6, "in MB"),
            (lambda n, page: peak_in_step(n, page) / 2**30, "in GiB"),
        ],
    ),
}

#: check -> mutants of its solution that are right as well, and why.
EQUIVALENT = {
    "offloading": dict.fromkeys(
        (
            "whole(tensor) → whole(tensor.detach())",
            "return tensor.detach() → return tensor.detach().detach()",
            "tensor.detach() → tensor",
            "return packed → return packed.detach()",
            (
                "return room.get()().as_strided(*view) → return"
                " room.get()().as_strided(*view).detach()"
            ),
        ),
        "no graph is recorded for what a hook computes",
    ),
    "waits": dict.fromkeys(
        ("x * 100 → x / 100", "100 → 101 in `z = x * 100`", "100 → 99 in `z = x * 100`"),
        "what z holds is of no account: it only takes the memory",
    ),
}
