"""Lesson 04: its claims, checks and figures, steps on the simulated device, and GPU experiments."""

from collections.abc import Mapping, Sequence
from typing import Any

from course_lib.teaching import Claim, Table, text
from course_lib.teaching.claims import what_you_may_have_read

from .checks import (
    STEP_PEAKS,
    check_moved,
    check_offloading,
    check_peak_in_step,
    check_step_time,
    check_waits,
)
from .display import draw_lanes, draw_order, draw_pages, draw_threshold, draw_tiers, draw_times
from .gpu import offloaded_activations, offloaded_optimizer, pinned_copies
from .simulation import (
    RECORDED,
    Lanes,
    clock,
    decoder_lanes,
    read_late,
    simulated_decoder,
    without_waits,
)

__all__ = [
    "CLAIMS",
    "OLDER_CLAIMS",
    "RECORDED",
    "STEP_PEAKS",
    "Lanes",
    "check_moved",
    "check_offloading",
    "check_peak_in_step",
    "check_step_time",
    "check_waits",
    "clock",
    "decoder_lanes",
    "draw_lanes",
    "draw_order",
    "draw_pages",
    "draw_threshold",
    "draw_tiers",
    "draw_times",
    "figures_of_claims",
    "offloaded_activations",
    "offloaded_optimizer",
    "older_claims",
    "pinned_copies",
    "read_late",
    "simulated_decoder",
    "without_waits",
]

#: Claims that learners may have read; each says whether it was tested here.
CLAIMS = (
    Claim(
        "Activation offloading should be used alongside activation checkpointing.",
        "run: peak of the decoder's step and bytes copied to the file, offload alone / with"
        " checkpoints, p = 1",
        "Partly: only 1/18 of the bytes are moved. But here the peak is 9 MB higher, because"
        " a whole layer is in memory at once.",
        outcome="partly",
        source="torchtune documentation, Memory Optimization Overview",
    ),
    Claim(
        "PyTorch's own activation offloading lets GPUs idle while activations are fetched back.",
        "run on the simulated device: time at the threshold relative to the baseline, p = 0 /"
        " 1 / 2; PyTorch's own on a GPU: not run",
        "Partly: without fetching ahead, the step takes a third longer. With two storages"
        " fetched ahead, it takes only 1% longer.",
        outcome="partly",
        source="Amazon SageMaker documentation, Activation offloading",
    ),
    Claim(
        "Offloading is faster than recomputation when the link between CPU and GPU is fast enough.",
        "run on the simulated device: the decoder's time relative to the baseline,"
        " checkpoints / offload at 20 GB/s / at 2 GB/s, p = 2",
        "Holds: here a link of 9.3 GB/s is fast enough, with two storages fetched ahead."
        " Nearly all copies are hidden only on a faster link, such as 20 GB/s.",
        outcome="holds",
        source="NVIDIA Transformer Engine documentation, CPU Offloading",
    ),
    Claim(
        "`non_blocking=True` makes a copy asynchronous, so it is safe to use everywhere.",
        "run on the simulated device: the host reads at once / after it has waited; pageable"
        " memory: not run",
        "No: after a copy to the host (D2H) has started, the host must wait before it reads."
        " And only copies from or to pinned memory are asynchronous.",
        outcome="fails",
        source="the mistake that PyTorch's guide to non_blocking and pin_memory warns of",
    ),
    Claim(
        "In ZeRO-Offload significant time is spent on CPUAdam.",
        "not run: bytes per parameter through host memory, and over the link each way",
        "Holds, by the bytes: the update reads and writes far more bytes than the link carries.",
        outcome="holds",
        source="DeepSpeed, pull request 7474",
    ),
)
#: Claims found only in the teaching documents from which the course was developed.
OLDER_CLAIMS = (
    Claim(
        "An autograd function that copies its input to the CPU offloads the activation.",
        "gradient relative to the baseline; bytes in the graph without the function and with it",
        "No: the next operator keeps the same storage, and the function doubles the gradient.",
        outcome="fails",
    ),
    Claim(
        '`value.to("cpu")` over `optimizer.state` offloads the optimizer.',
        "state tensors still at their old addresses",
        "No: on a GPU `.to` returns a copy (here: `copy=True`), and the code throws it away.",
        outcome="fails",
    ),
    Claim(
        "This prefetcher works: it loads the first batch in `__init__`.",
        "error when it is created",
        "No: it uses an iterator that `__iter__` has not created yet.",
        outcome="fails",
    ),
    Claim(
        "Make the causal mask with the method of a new `nn.Transformer()`.",
        "peak with it, and with the static method alone, n = 512",
        "Partly: the mask is right, but every call creates 44 million parameters and throws"
        " them away.",
        outcome="partly",
    ),
)


def figures_of_claims(
    steps: Mapping[tuple[bool, int | None], tuple[Any, int]],
    times: Mapping[tuple[int, int], float],
    read: Sequence[list[float]],
) -> list[str]:
    """Return the figures found for each of `CLAIMS`.

    Args:
        steps: (checkpointed, p) -> a step's meter and its bytes copied down; those for p = 1 are
            shown.
        times: (p, in flight) -> time at the threshold relative to the baseline; those with two in
            flight are shown.
        read: Numbers that the host read immediately, and after waiting.
    """
    (alone, down), (both, less) = steps[False, 1], steps[True, 1]
    plain = RECORDED[None, 0, False].seconds
    decoder = [
        RECORDED[key].seconds / plain
        for key in ((None, 0, True), (20e9, 2, False), (2e9, 2, False))
    ]
    return [
        text(
            "{alone} / {both} MB; {down} / {less} MB copied to the file",
            alone=f"{alone.peak_bytes / 1e6:.1f}",
            both=f"{both.peak_bytes / 1e6:.1f}",
            down=f"{down / 1e6:.1f}",
            less=f"{less / 1e6:.1f}",
        ),
        " / ".join(f"{times[p, 2]:.2f}" for p in (0, 1, 2)),
        " / ".join(f"{each:.2f}" for each in decoder),
        " / ".join(f"{[round(number) for number in numbers]}" for numbers in read),
        text("28 bytes; 2 bytes of gradient, 2 of weight (bf16)"),
    ]


def older_claims(
    ratio: float,
    kept: Sequence[int],
    unmoved: tuple[int, int],
    refused: tuple[str, str],
    masks: Sequence[int],
) -> Table:
    """Return the table of the claims in depth.

    Args:
        ratio: Gradient relative to the right one.
        kept: Bytes in the graph, without the function and with it.
        unmoved: Number of state tensors that have not moved, and of all state tensors.
        refused: Class of the error, and the attribute that is missing.
        masks: Peaks in bytes, of the whole Transformer and of the static method.
    """
    return what_you_may_have_read(
        OLDER_CLAIMS,
        text("{ratio:.1f} ×; {before} → {after} bytes", ratio=ratio, before=kept[0], after=kept[1]),
        text("{unmoved} of {count} have not moved", unmoved=unmoved[0], count=unmoved[1]),
        text(
            "{kind}: there is no {missing} yet", kind=f"`{refused[0]}`", missing=f"`{refused[1]}`"
        ),
        " : ".join(f"{peak / 1e6:.0f} MB" for peak in masks),
    )
