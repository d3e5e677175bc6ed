"""Answers to the exercises of lesson 04: right ones, and wrong ones with what they are told."""

import torch
from torch.autograd.graph import saved_tensors_hooks


def keeps(copying, *, right_place=True, hold=None):
    """Hooks that keep copies in the store; `hold` keeps the tensors themselves as well."""

    def offloading(store):
        def pack(tensor):
            store.append(copying(tensor.detach()))
            if hold is not None:
                hold[len(store)] = tensor
            return len(store) - 1

        return saved_tensors_hooks(pack, lambda place: store[place if right_place else 0])

    return offloading


def copies_and_keeps(store):
    return saved_tensors_hooks(lambda t: store.append(t.detach().clone()) or t, lambda t: t)


#: check -> right answers, and wrong ones, each alone or with a part of what it is told.
ANSWERS = {
    "hiding_intensity": ([6349, 400e12 / 63e9], [6.349, (15698, "989"), 3175]),
    "what_goes_down": (
        [{0, 2}, [2, 0]],
        [
            *(({0}, "still on the device"), ({0, 1, 2}, "fewer"), ({0, 2, 4}, "must stay")),
            *((odd, "numbers from 0 to 4") for odd in ({7}, 3, {"0"}, [[1]], {True})),
            set(),
        ],
    ),
    "offloading": (
        [keeps(torch.clone)],
        [
            (lambda store: saved_tensors_hooks(lambda t: t, lambda t: t), "Nothing is in the store"),
            (keeps(lambda t: t), "not copies"),
            *((keeps(torch.clone, right_place=False), None), (keeps(torch.zeros_like), "gradient is wrong")),
            *((copies_and_keeps, "nothing is freed"), (keeps(torch.clone, hold={}), "nothing is freed")),
        ],
    ),
}

#: check -> mutants of its solution that are right as well, and why.
EQUIVALENT = {
    "what_goes_down": dict.fromkeys(
        (
            "10 → 9 in `sizes, choices = ([40, 10, 30, 20, 10], [])`",
            "30 → 31 in `sizes, choices = ([40, 10, 30, 20, 10], [])`",
            "20 → 19 in `sizes, choices = ([40, 10, 30, 20, 10], [])`",
        ),
        "40, 10 and 20 MB are 70 MB as well",
    ),
    "offloading": {"tensor.detach() → tensor": "no graph is recorded for what a hook computes"},
}
