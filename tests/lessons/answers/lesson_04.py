"""Right and wrong answers to the exercises of lesson 04, with the expected messages."""

from functools import partial
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from course_lib.lessons.lesson_04.exercises import check_step_time
from course_lib.lessons.lesson_04.simulation import clock
from course_lib.offload import offload_activations

step_time = check_step_time.right_answer()

# Hooks
# --------------------------------------------------------------------------------------------------


def flat_storage(tensor):
    count = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.detach().as_strided((count,), (1,), 0)


def hooks(
    table=WeakKeyDictionary, key=None, view=torch.as_strided, moves=None, versions=True, early=False
):
    """The right hooks, or hooks with a mistake in an argument.

    The arguments are the table of stored copies, the key of a storage in it, the view of a row,
    whether a tensor moves, whether a changed tensor moves again, and whether it returns early."""

    def offloading(store, stay):
        copies = table()

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage in stay if moves is None else not moves(tensor, storage in stay):
                return tensor.detach()
            name = key(storage) if key else storage
            room = None if copies is None else copies.get(name)
            if room is None or (versions and room.version != tensor._version):
                room = store.put(flat_storage(tensor))
                room.version = tensor._version
                if copies is not None:
                    copies[name] = room
            fetch = room.get() if early else lambda: room.get()()
            layout = tensor.shape, tensor.stride(), tensor.storage_offset()
            return lambda: view(fetch(), *layout)

        return saved_tensors_hooks(pack, lambda packed: packed() if callable(packed) else packed)

    return offloading


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


def release(device, x, waits=("wait",), keeps=False):
    y = x * 2
    host = device.pinned(y.shape, y.dtype)
    copied = device.copy(host, y, "down")
    wait_for(device, copied, waits)
    if not keeps:
        del y
    z = x * 100  # noqa: F841
    device.finish(copied)
    return host.tolist()


def functions(*, first=read, second=use, third=release):
    return first, second, third


#: check -> right answers
RIGHT = {
    "step_time": [lambda *case: step_time(*case) + case[1]],
    "offloading": [
        hooks(),
        lambda store, stay: offload_activations(store, min_bytes=1, prefetch=1),
    ],
    "waits": [functions(), [read, use, release]],
    "peak_in_step": [lambda n, page: min(16 * n, 8 * n + 3 * page)],
}

#: check -> wrong answers, each alone or with a part of the expected message
WRONG = {
    "step_time": [
        (lambda *case: 1.5 * step_time(*case), "L = 16"),
        (lambda L, f, g, c, p: clock(L, c / f, p) * f, "operators. Type a formula"),
    ],
    "offloading": [
        (hooks(early=True), "copied back during forward"),
        (lambda store, stay: (store, stay), "got a `tuple`"),
        (lambda store, stay: save_on_cpu(), "moved nothing into the store"),
        (hooks(moves=lambda tensor, stays: True), "moved a parameter"),
        (hooks(table=lambda: None), "even if it is saved twice"),
        (hooks(WeakValueDictionary, lambda storage: storage.data_ptr()), "its address is given"),
        (hooks(versions=False), "changed in place"),
        (hooks(moves=lambda tensor, stays: tensor.requires_grad and not stays), "still held"),
        (hooks(view=lambda row, shape, *_: row[: shape.numel()].view(shape)), "must restore the"),
    ],
    "waits": [
        (functions(first=partial(read, waits=())), "before the copy is complete"),
        (functions(second=partial(use, waits=())), "has not written"),
        (functions(third=partial(release, waits=())), "still reads it"),
        (functions(second=partial(use, waits=["finish"])), "the host waits"),
        (functions(third=partial(release, waits=(), keeps=True)), "reuses its memory"),
        (functions(first=lambda device, x: (x * 2).tolist()), "nothing is copied"),
        (functions(first=partial(read, waits=["wait", "finish"])), "compute stream waits as well"),
        (functions(first=partial(read, result=lambda y, host: host.clone())), "a list of numbers"),
        (functions(first=lambda device, x: print(end="")), "`read`: it returns nothing"),
        (functions(first=partial(read, waits=(), result=lambda y, _: y.tolist())), "Read the copy"),
        (functions(second=lambda device, host: use(device, host) * 2), "numbers are wrong"),
        (read, "three functions"),
    ],
}

#: check -> why mutants of its solution are right as well -> the mutants
EQUIVALENT = {
    "step_time": {
        "the ends of a step are within the tolerance, which simulations of the text need": [
            "L * max(f, 2 * c) + L * backward - f → L * max(f, 2 * c) + L * backward + f"
        ]
    },
    "offloading": {
        "no graph is recorded for what a hook computes": [
            "whole(tensor) → whole(tensor.detach())",
            "return tensor.detach() → return tensor.detach().detach()",
            "tensor.detach() → tensor",
            "return packed → return packed.detach()",
            "return room.get()().as_strided(*view) → return room.get()().as_strided(*view).detach()",
        ]
    },
    "waits": {
        "what z holds is of no account: it only takes the memory": [
            "x * 100 → x / 100",
            "100 → 101 in `z = x * 100`",
            "100 → 99 in `z = x * 100`",
        ]
    },
}
