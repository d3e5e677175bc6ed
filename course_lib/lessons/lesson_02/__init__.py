"""Lesson 02: its claims, checks and figures, experiments on both modes, and a GPU experiment."""

from course_lib.memory.measurement import flop_counter

from .claims import CLAIMS, OLDER_CLAIMS, figures_of_claims, older_claims
from .exercises import (
    check_checkpoint,
    check_dropout_checkpoint,
    check_head_chunk,
    check_hooks,
    check_in_chunks,
    check_loss_in_pieces,
    check_peak_formula,
    check_policy,
    check_which_block,
)
from .figures import (
    draw_order,
    draw_policies,
    draw_which_block,
    head_peak,
    measured_step,
    metered_step,
    one_backward_transposed,
    peak_of_groups,
    peak_with_checkpoint,
    seconds_beside_flops,
)
from .gpu import checkpointed_decoder
from .in_depth import (
    attention_saving,
    compare_kept,
    peaks_of_segments,
    repeats,
    statistics_after,
    statistics_unchanged,
    train,
)
from .modes import gaps, modes
from .own_code import llama, measured_lines

__all__ = [
    "CLAIMS",
    "OLDER_CLAIMS",
    "attention_saving",
    "check_checkpoint",
    "check_dropout_checkpoint",
    "check_head_chunk",
    "check_hooks",
    "check_in_chunks",
    "check_loss_in_pieces",
    "check_peak_formula",
    "check_policy",
    "check_which_block",
    "checkpointed_decoder",
    "compare_kept",
    "draw_order",
    "draw_policies",
    "draw_which_block",
    "figures_of_claims",
    "flop_counter",
    "gaps",
    "head_peak",
    "llama",
    "measured_lines",
    "measured_step",
    "metered_step",
    "modes",
    "older_claims",
    "one_backward_transposed",
    "peak_of_groups",
    "peak_with_checkpoint",
    "peaks_of_segments",
    "repeats",
    "seconds_beside_flops",
    "statistics_after",
    "statistics_unchanged",
    "train",
]
