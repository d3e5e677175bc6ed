"""Lesson 04: its exercises, its claims, and offloading on a GPU."""

import gc
import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu

from course_lib._torch import wait_for
from course_lib.offload import OffloadedOptimizer, offload_activations
from course_lib.teaching import Claim, Verdict, expect_number, text
from course_lib.teaching.exercises import exercise, right, wrong
from course_lib.teaching.experiments import (
    TINY,
    AttentionKernels,
    Part,
    compared,
    decoder_and_tokens,
    experiment,
    need_host_memory,
    peaks,
    seconds,
)

#: What learners may have read.
CLAIMS = (
    Claim(
        "An autograd function that copies its input to the CPU offloads the activation.",
        "gradient against plain; bytes in the graph without it and with it",
        "No: the next operator keeps the same storage, and this one doubles the gradient.",
        outcome="fails",
    ),
    Claim(
        '`value.to("cpu")` over `optimizer.state` offloads the optimizer.',
        "state tensors still at their old addresses",
        "No: on a GPU `.to` returns a copy (here: `copy=True`), and nobody keeps it.",
        outcome="fails",
    ),
    Claim(
        "This prefetcher works: it loads the first batch in `__init__`.",
        "what it says when it is made",
        "No: it asks an iterator that `__iter__` has yet to make.",
        outcome="fails",
    ),
    Claim(
        "Make the causal mask with `nn.Transformer().generate_square_subsequent_mask(n)`.",
        "peak of that, and of the static method alone, n = 512",
        "It makes 44 million parameters and throws them away, at every call.",
        outcome="partly",
    ),
)

# Exercises ------------------------------------------------------------------------------------------------------------


@exercise(hint="The copy takes m / w, the compute f / r.")
def check_hiding_intensity(answer: Any) -> Verdict:
    """Lesson 04: the least FLOPs a byte at which copies over PCIe 5 (63 GB/s) hide behind 400 TFLOP/s."""
    right = 400e12 / 63e9
    return expect_number(
        answer,
        right,
        tolerance=0.01,
        wrong_answers={
            1 / right: "That is bytes a FLOP.",
            right / 1000: "Mind the units: TFLOP/s and GB/s differ by a thousand.",
            right / 2: "63 GB/s is one way already.",
            2 * right: "63 GB/s is one way already.",
            989e12 / 63e9: "That is for 989 TFLOP/s.",
        },
        why="400e12 / 63e9: the rate over the bandwidth.",
    )


@exercise(hint="At least 65 MB must go. Which sum comes nearest?")
def check_what_goes_down(answer: Any) -> Verdict:
    """Which of the storages of 40, 10, 30, 20, 10 MB go down, for 45 MB on the device and the fewest bytes moved."""
    sizes, most, least = (40, 10, 30, 20, 10), 45, 70
    given = answer if isinstance(answer, set | frozenset | list | tuple) else [None]
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < len(sizes) for i in given):
        return wrong("Give a set of numbers from 0 to 4.")
    down = set(given)
    if 4 in down:
        return wrong("The last one must stay: backward needs it first.")
    moved = sum(sizes[i] for i in down)
    above = sum(sizes) - moved
    if above > most:
        return wrong(text("{above} MB are still on the device.", above=above))
    if moved > least:
        return wrong(text("It fits, but {moved} MB move; fewer are enough.", moved=moved))
    return right(text("Right: {moved} MB move, {above} MB stay.", moved=moved, above=above))


@exercise(hint="Pack appends a copy and returns its place; unpack looks there.")
def check_offloading(function: Any) -> Verdict:
    """`offloading(store)`, hooks that move what is saved into a list and let it go, with right gradients."""
    x = torch.linspace(-1, 1, 4096).view(64, 64).requires_grad_()
    saved = []  # weak references to the storages: what nobody holds any longer is gone

    def run(context: AbstractContextManager) -> torch.Tensor:
        with context:
            y = x * 2
            sine, power = y.sin(), y.t().exp()
            saved[:] = [weakref.ref(tensor.untyped_storage()) for tensor in (y, sine, power)]
            return (sine * power).sum()

    (expected,) = torch.autograd.grad(run(torch.enable_grad()), x)
    store: list = []
    out = run(function(store))
    before = len(store)
    owned = [t.untyped_storage().data_ptr() for t in store if isinstance(t, torch.Tensor)]
    gc.collect()  # the answer's own objects may refer to each other
    held = sum(storage() is not None for storage in saved)
    out.backward()
    if not before:
        return wrong("Nothing is in the store; the graph keeps everything.")
    if before < 4:
        return wrong(text("Only {before} tensors of 4 went into the store.", before=before))
    if len(owned) < before or len(set(owned)) < before:
        return wrong("The store holds the very tensors, not copies: nothing could be freed.")
    if x.grad is None or not torch.equal(x.grad, expected):
        return wrong("The gradient is wrong.")
    if held:
        return wrong(
            text(
                "There are copies in the store, but {held} of 3 storages are still held after forward: "
                "nothing is freed.",
                held=held,
            ),
            hint=_RETURN_THE_PLACE,
        )
    return right(text("Right: {before} tensors in the store, equal gradients.", before=before))


_RETURN_THE_PLACE = (
    "What `pack` returns stays in the graph: return the place in the store, and keep the tensor nowhere else."
)


# GPU experiments ------------------------------------------------------------------------------------------------------


@experiment(
    title="A decoder's forward and backward pass: plain, offloaded, and with torch's save_on_cpu",
    sizes={"vocabulary": 8192, "hidden": 2048, "heads": 16, "layers": 8, "sequence": 2048, "batch": 4},
    small=TINY,
    arms={
        "plain": "plain",
        "offloaded": "offloaded",
        "save_on_cpu": "save_on_cpu",
    },
)
def offloaded_activations(device: torch.device, **sizes: int) -> Iterator[Part]:
    """On a GPU both ways down pin host memory, some 13 GB each, as torch rounds every block up to a power of two."""
    pinned = device.type == "cuda"
    if pinned:  # a layer keeps 68 bytes in fp32 for each number that it takes; twice, and half of it for the rounding
        need_host_memory(3 * 68 * sizes["batch"] * sizes["sequence"] * sizes["hidden"] * sizes["layers"])
    model, tokens = decoder_and_tokens(device, **sizes, fused=True)

    def step(context: AbstractContextManager) -> None:
        with context:
            loss = model.loss(tokens)
        loss.backward()

    with AttentionKernels() as kernels:
        step(torch.enable_grad())
    yield {"attention": str(kernels)}
    arms = {
        "plain": lambda: step(torch.enable_grad()),
        "offloaded": lambda: step(offload_activations(min_bytes=1 << 10)),
        "save_on_cpu": lambda: step(save_on_cpu(pin_memory=pinned)),
    }
    yield from compared(device, arms, model=model)


@experiment(
    title="A training step of a decoder with AdamW: its state on the device, and in host memory",
    sizes={"vocabulary": 8192, "hidden": 1024, "heads": 16, "layers": 8, "sequence": 512, "batch": 4},
    small=TINY,
    arms={"plain": "on the device", "offloaded": "in host memory"},
    labels={"state_bytes": "8 bytes a parameter"},
)
def offloaded_optimizer(device: torch.device, **sizes: int) -> Iterator[Part]:
    """On a GPU it pins up to 16 bytes a parameter, 2 GB, and takes half a minute on a slow CPU."""
    arms = {}
    for name, kind in (("plain", torch.optim.AdamW), ("offloaded", OffloadedOptimizer)):
        model, tokens = decoder_and_tokens(device, **sizes)
        optimizer = kind(model.parameters(), lr=1e-4)

        def step(model=model, optimizer=optimizer, tokens=tokens) -> None:
            model.loss(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()

        arms[name] = step
        yield peaks(name, step, model=model, optimizer=optimizer)
    yield {"state_bytes": 8 * sum(parameter.numel() for parameter in model.parameters())}
    yield seconds(device, arms)


@experiment(
    title="A non-blocking copy up, from pinned and from pageable memory",
    sizes={"megabytes": 256},
    small={"megabytes": 1},
    labels={
        "copied_bytes": "copied",
        "pinned_call_seconds": "pinned: until the call returns",
        "pinned_seconds": "pinned: until the copy is done",
        "pageable_call_seconds": "pageable: until the call returns",
        "pageable_seconds": "pageable: until the copy is done",
    },
)
def pinned_copies(device: torch.device, *, megabytes: int) -> Iterator[Part]:
    source = torch.ones(megabytes * 10**6, dtype=torch.uint8)
    sources = {"pinned": source.pin_memory() if device.type == "cuda" else source, "pageable": source}
    values: Part = {"copied_bytes": source.nbytes}
    for name, block in sources.items():
        for _ in range(3):  # the last one counts
            wait_for(device)
            start = time.perf_counter()
            block.to(device, non_blocking=True)
            values[f"{name}_call_seconds"] = time.perf_counter() - start
            wait_for(device)
            values[f"{name}_seconds"] = time.perf_counter() - start
    yield values
