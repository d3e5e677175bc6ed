"""Lesson 08: its exercises, its claims, its pictures, ranks within one process."""

from collections.abc import Mapping
from typing import Any

from course_lib.teaching import Claim, text

from .checks import check_held, check_sent, check_seven_billion, check_sharded_step
from .shown import Rank, ddp_peak, draw_peaks, draw_ranks, held_by, resumed_alone, symbolic_rank
from .wire import Adam, Wire

__all__ = [
    "CLAIMS",
    "Adam",
    "Rank",
    "Wire",
    "check_held",
    "check_sent",
    "check_seven_billion",
    "check_sharded_step",
    "ddp_peak",
    "draw_peaks",
    "draw_ranks",
    "figures_of_claims",
    "held_by",
    "resumed_alone",
    "symbolic_rank",
]

#: What learners may have read.
CLAIMS = (
    Claim(
        "Cutting the optimizer's state costs no more communication.",
        "a step of DDP, of `ZeroRedundancyOptimizer`, 2 ranks",
        "Partly: true of your step. PyTorch's class all-reduces, then broadcasts.",
        outcome="partly",
        source="ZeRO, arXiv:1910.02054, 2020",
    ),
    Claim(
        "With the parameters cut as well, memory falls in proportion to the number of ranks.",
        "FSDP2, a rank of 4, and one device, 2 sequences each",
        "Partly: what is held. Activations and gathered blocks are not cut.",
        outcome="partly",
        source="ZeRO, arXiv:1910.02054, 2020",
    ),
    Claim(
        "`gradient_as_bucket_view=True` can lower the peak by the size of all gradients.",
        "DDP with and without, 2 sequences of 128 tokens, then of 16",
        "Partly: where the peak lies at the end of backward.",
        outcome="partly",
        source="PyTorch documentation, DistributedDataParallel",
    ),
)


def figures_of_claims(
    runs: Mapping[str, Mapping[str, Any]], sharded: Mapping[str, Any], alone: Mapping[str, int], saved: tuple[int, int]
) -> list[str]:
    """What was measured for each of `CLAIMS`.

    Args:
        runs: mode -> line of `launch`, on 2 ranks.
        sharded: FSDP2 on 4 ranks.
        alone: the peak of one device with 2 sequences, by category.
        saved: bytes by which the view lowers the peak, with 128 and with 16 tokens.
    """
    sent = [runs[mode]["communicated"]["measured"] for mode in ("ddp", "zero1")]
    whole, part = held_by(runs["ddp"]), held_by(sharded)
    peaks = sum(alone.values()), sharded["taken"][0]["peak_bytes"]
    return [
        f"{sent[0] / 1e6:.1f} → {sent[1] / 1e6:.1f} MB",
        text(
            "held: {held} MB, {times}; peak: {peaks} MB, {fewer}",
            held=f"{whole / 1e6:.1f} → {part / 1e6:.1f}",
            times=f"{whole / part:.1f} ×",
            peaks=f"{peaks[0] / 1e6:.1f} → {peaks[1] / 1e6:.1f}",
            fewer=f"{peaks[0] / peaks[1]:.1f} ×",
        ),
        f"{saved[0] / 1e6:.1f} MB, {saved[1] / 1e6:.1f} MB",
    ]
