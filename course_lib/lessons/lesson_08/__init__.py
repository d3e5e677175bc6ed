"""Lesson 08: its claims, checks and figures, and ranks within one process."""

from collections.abc import Mapping
from typing import Any

from course_lib.teaching import Claim, text

from .exercises import (
    check_gathered_linear,
    check_held,
    check_sent,
    check_seven_billion,
    check_sharded_step,
    check_tokens_to_hide,
)
from .figures import (
    as_rank_of,
    ddp_peak,
    draw_budgets,
    draw_peaks,
    draw_ranks,
    draw_seconds,
    held_by,
    resumed_alone,
    symbolic_rank,
)
from .large import (
    compare_splits,
    kept_per_layer,
    own_and_given,
    seventy_billion,
    sync_table,
    tensor_rows,
)
from .schemes import draw_collectives, draw_stages, parallelisms
from .wire import GIVEN_TIMES, RECORDED, TENSOR_BYTES, Adam, RankWire, Wire

__all__ = [
    "CLAIMS",
    "GIVEN_TIMES",
    "RECORDED",
    "TENSOR_BYTES",
    "Adam",
    "RankWire",
    "Wire",
    "as_rank_of",
    "check_gathered_linear",
    "check_held",
    "check_sent",
    "check_seven_billion",
    "check_sharded_step",
    "check_tokens_to_hide",
    "compare_splits",
    "ddp_peak",
    "draw_budgets",
    "draw_collectives",
    "draw_peaks",
    "draw_ranks",
    "draw_seconds",
    "draw_stages",
    "figures_of_claims",
    "held_by",
    "kept_per_layer",
    "own_and_given",
    "parallelisms",
    "resumed_alone",
    "seventy_billion",
    "symbolic_rank",
    "sync_table",
    "tensor_rows",
]

#: Claims that learners may have read.
CLAIMS = (
    Claim(
        "Cutting the optimizer's state costs no more communication.",
        "communicated by DDP → by `ZeroRedundancyOptimizer`",
        "Partly: this holds for your step, but PyTorch's class sends more.",
        outcome="partly",
        source="ZeRO, arXiv:1910.02054",
    ),
    Claim(
        "With the parameters cut too, memory falls in proportion to the ranks.",
        "one device, and one of 4 ranks with FSDP2",
        "Partly: this holds for the bytes held between steps, but not for the peak.",
        outcome="partly",
        source="ZeRO, arXiv:1910.02054",
    ),
    Claim(
        "`gradient_as_bucket_view` can lower the peak by all gradients' size.",
        "peak lowered by, with 2 sequences of 128 / 16 tokens",
        "Partly: this holds if the peak is at the end of backward.",
        outcome="partly",
        source="PyTorch documentation, DDP",
    ),
)


def figures_of_claims(
    runs: Mapping[str, Mapping[str, Any]],
    sharded: Mapping[str, Any],
    alone: Mapping[str, int],
    saved: tuple[int, int],
) -> list[str]:
    """Return the figures measured for each of `CLAIMS`.

    Args:
        runs: Mode -> line of `launch`, on 2 ranks.
        sharded: Line of FSDP2 on 4 ranks.
        alone: Category -> bytes at the peak of one device with 2 sequences.
        saved: Bytes by which the bucket view lowers the peak, with 128 and with 16 tokens.
    """
    sent = [runs[mode]["communicated"]["measured"] for mode in ("ddp", "zero1")]
    whole, part = held_by(runs["ddp"]), held_by(sharded)
    peaks = sum(alone.values()), sharded["taken"][0]["peak_bytes"]
    return [
        f"{sent[0] / 1e6:.1f} → {sent[1] / 1e6:.1f} MB",
        text(
            "held {times}, peak {fewer}",
            times=f"÷ {whole / part:.1f}",
            fewer=f"÷ {peaks[0] / peaks[1]:.1f}",
        ),
        f"{saved[0] / 1e6:.1f} / {saved[1] / 1e6:.1f} MB",
    ]
