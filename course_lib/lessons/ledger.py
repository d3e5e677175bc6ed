"""A table of one decoder's training step, with one technique per row; every lesson adds a row.

The decoder is that of lesson 00: vocabulary 2048, hidden size 256, 8 heads, 8 layers. The step has
8 sequences of 128 tokens, in fp32 with Adam. The second step is measured, because Adam's state
exists from the start of that step. A lesson measures its own row and shows it below the rows of the
previous lessons, which are stored here. test_ledger.py measures each stored row again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from course_lib.teaching import Table
from course_lib.teaching.tables import NumberText


@dataclass(frozen=True)
class Row:
    """Costs of one training step with the technique of one lesson.

    Attributes:
        lesson: Two digits of the lesson, such as "05".
        technique: Label of the technique.
        peak_bytes: Most bytes that are live at once during the step.
        flops: FLOPs of the step.
        moved_bytes: Bytes moved to and from host memory or disk, or to and from other ranks.
    """

    lesson: str
    technique: str
    peak_bytes: int
    flops: int
    moved_bytes: int = 0


ROWS = (
    Row("00", "plain", 277_682_584, 45_097_156_608),
    Row("01", "autocast, bf16", 215_292_312, 45_097_156_608),
    Row("02", "checkpoint each layer", 134_006_104, 54_760_833_024),
    Row("03", "optimal schedule, half the activations", 180_083_096, 52_613_349_376),
    Row("04", "all activations to a file", 124_824_984, 45_097_156_608, 337_641_472),
    Row("05", "eight micro-batches", 134_800_820, 45_097_156_608),
    Row("06", "flash attention", 252_778_904, 45_634_027_520),
    Row(
        "07",
        "all offloaded, checkpoints, steps in backward",
        57_928_092,
        54_760_833_024,
        128_884_736,
    ),
    Row("08", "FSDP2, one rank of four", 75_627_440, 11_274_289_152, 80_277_504),
)
#: The step without any technique.
BASELINE = ROWS[0]
PARAMETERS = 6_875_648  # number of the decoder's parameters
LAYER_BYTES = 20_987_904  # bytes that one layer of the baseline saves for backward


def ledger(
    lesson: str, technique: str, measured: Any, *, flops: int | None = None, moved_bytes: int = 0
) -> Table:
    """Compare the training step of a lesson with the steps of all previous lessons.

    The result is a table with one row per lesson. Ratios are relative to the baseline, the step
    without any technique.

    Args:
        lesson: Two digits of the lesson, such as "05".
        technique: Label of the lesson's technique.
        measured: A `Measurement` of the step, or any object with the attributes `peak_bytes` and
            `flops`.
        flops: FLOPs of the step. By default, `measured.flops`.
        moved_bytes: Bytes moved to and from host memory or disk, or to and from other ranks.
    """
    own = Row(
        lesson,
        technique,
        measured.peak_bytes,
        measured.flops if flops is None else flops,
        moved_bytes,
    )
    return _table([*(row for row in ROWS if row.lesson < lesson), own])


def whole_ledger() -> Table:
    """Return a table that compares the training steps of all lessons."""
    return _table(ROWS)


def _table(rows: Sequence[Row]) -> Table:
    plain = BASELINE
    columns = [
        "lesson",
        "technique",
        "peak (MB)",
        "peak (× baseline)",
        "FLOPs (× baseline)",
        "bytes moved (MB)",
    ]
    shown = [
        (
            row.lesson,
            row.technique,
            NumberText(f"{row.peak_bytes / 1e6:,.1f}"),
            NumberText(f"{row.peak_bytes / plain.peak_bytes:.2f}"),
            NumberText(f"{row.flops / plain.flops:.2f}"),
            NumberText(f"{row.moved_bytes / 1e6:,.1f}" if row.moved_bytes else "–"),
        )
        for row in rows
    ]
    values = [
        (
            row.lesson,
            row.technique,
            row.peak_bytes / 1e6,
            row.peak_bytes / plain.peak_bytes,
            row.flops / plain.flops,
            row.moved_bytes / 1e6,
        )
        for row in rows
    ]
    return Table(columns, shown, values=values)
