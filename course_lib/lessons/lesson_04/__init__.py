"""Lesson 04: its claims, checks and figures, steps on the simulated device, and GPU experiments."""

from collections.abc import Mapping, Sequence
from typing import Any

from course_lib.teaching import Claim, text

from .exercises import (
    STEP_PEAKS,
    check_offloading,
    check_peak_in_step,
    check_step_time,
    check_waits,
)
from .figures import (
    draw_forward,
    draw_order,
    draw_pages,
    draw_step,
    draw_threshold,
    draw_tiers,
    draw_times,
)
from .gpu import offloaded_activations, offloaded_optimizer, pinned_copies
from .older import OLDER_CLAIMS, older_claims
from .simulation import (
    RECORDED,
    Lanes,
    clock,
    decoder_table,
    link_table,
    read_late,
    simulated_decoder,
    without_waits,
)
from .steps import loops, metered_step, peaks_of_fractions, started_down, started_up, step_peak

__all__ = [
    "CLAIMS",
    "OLDER_CLAIMS",
    "RECORDED",
    "STEP_PEAKS",
    "Lanes",
    "check_offloading",
    "check_peak_in_step",
    "check_step_time",
    "check_waits",
    "clock",
    "decoder_table",
    "draw_forward",
    "draw_order",
    "draw_pages",
    "draw_step",
    "draw_threshold",
    "draw_tiers",
    "draw_times",
    "figures_of_claims",
    "link_table",
    "loops",
    "metered_step",
    "offloaded_activations",
    "offloaded_optimizer",
    "older_claims",
    "peaks_of_fractions",
    "pinned_copies",
    "read_late",
    "simulated_decoder",
    "started_down",
    "started_up",
    "step_peak",
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
        " 1 / 2; recorded on a GPU (section 4.21): PyTorch's `save_on_cpu`",
        "Holds: `save_on_cpu` fetches nothing ahead, and on an H200 the step takes 1.95 times"
        " the baseline. With two storages fetched ahead, the simulated step takes 1% longer.",
        outcome="holds",
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
        " / ".join(f"{times[p, 2]:.2f}" for p in (0, 1, 2)) + "; 1.95",
        " / ".join(f"{each:.2f}" for each in decoder),
        " / ".join(f"{[round(number) for number in numbers]}" for numbers in read),
        text("28 bytes; 2 bytes of gradient, 2 of weight (bf16)"),
    ]
