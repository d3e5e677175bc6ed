"""Compare activations offloaded to a file with no offload, with `save_on_cpu`, with a step that
waits for each file access, and with a step during unrelated copies."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import torch
from copies import COPIES_NOTE, copies, in_two_threads, synchronous_file
from scoreboard import COURSE, Row, compare, peak
from torch.autograd.graph import save_on_cpu

from course_lib.models import deep_mlp
from course_lib.offload import DiskStore, offload_activations

COPIES = "no offload, next to copies"


def step(net, x, context: Callable) -> None:
    net.zero_grad()
    with context():
        output = net(x).sum()
    output.backward()


def rows(rounds: int) -> Iterator[Row]:
    net, x, store = deep_mlp(16, 512), torch.randn(2048, 512), DiskStore()
    stay = {parameter.untyped_storage().data_ptr() for parameter in net.parameters()}
    contexts = {
        COURSE: lambda: offload_activations(store),
        "no offload": nullcontext,
        "save_on_cpu": save_on_cpu,
        "synchronous file": lambda: synchronous_file(stay),
    }
    arms = {name: partial(step, net, x, context) for name, context in contexts.items()}
    peaks = {name: peak(arm) for name, arm in arms.items()}
    before = store.stats.bytes_down
    arms[COURSE]()
    nbytes = store.stats.bytes_down - before
    arms[COPIES] = in_two_threads([arms["no offload"]], [copies(nbytes)])
    notes = {"save_on_cpu": "on a CPU it copies into memory of the same kind, so it saves nothing"}
    notes[COPIES] = COPIES_NOTE.format(nbytes)
    notes["synchronous file"] = "the course's bytes include tensors that are still being copied"
    work = "activations of 16 linear layers to a file"
    yield from compare(work, arms, 3 * rounds, bytes_of=peaks, notes=notes)
