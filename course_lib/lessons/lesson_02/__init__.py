"""Lesson 02: its claims, checks and figures, experiments on both modes, and a GPU experiment."""

from collections.abc import Mapping
from typing import Any

from course_lib.labels import listed
from course_lib.memory.measurement import flop_counter
from course_lib.teaching import Claim, Table, text
from course_lib.teaching.claims import what_you_may_have_read

from .checks import (
    check_checkpoint,
    check_dropout_checkpoint,
    check_head_chunk,
    check_hooks,
    check_loss_in_pieces,
    check_peak_formula,
    check_policy,
)
from .display import (
    draw_order,
    draw_policies,
    draw_which_block,
    measured_step,
    peak_with_gradients,
    seconds_beside_flops,
)
from .gpu import checkpointed_decoder
from .modes import gaps, modes
from .own_code import llama, measured_lines

__all__ = [
    "CLAIMS",
    "OLDER_CLAIMS",
    "check_checkpoint",
    "check_dropout_checkpoint",
    "check_head_chunk",
    "check_hooks",
    "check_loss_in_pieces",
    "check_peak_formula",
    "check_policy",
    "checkpointed_decoder",
    "draw_order",
    "draw_policies",
    "draw_which_block",
    "figures_of_claims",
    "flop_counter",
    "gaps",
    "llama",
    "measured_lines",
    "measured_step",
    "modes",
    "older_claims",
    "peak_with_gradients",
    "seconds_beside_flops",
]

#: Claims that learners may have read.
CLAIMS = (
    Claim(
        "Training will be about 20% slower.",
        "FLOPs of the step with a checkpoint per layer",
        "Partly: 21% more FLOPs here. Seconds were not compared.",
        outcome="partly",
        source="Hugging Face Transformers documentation, Gradient checkpointing, before 5.17",
    ),
    Claim(
        "Full recomputation makes a layer 30% more expensive, since its whole forward runs again.",
        "FLOPs of eight layers, with checkpoints and without",
        "Partly: 23% here, because early stop leaves out the last product of each layer."
        " Without early stop it is a third.",
        outcome="partly",
        source="NVIDIA Megatron Bridge documentation, Activation Recomputation, before 0.5",
    ),
    Claim(
        "Selective recomputation takes away over 90% of the overhead.",
        "recomputed FLOPs, selective compared with a checkpoint per layer",
        "Holds in FLOPs: 92%, and 89% against recomputation that stops early. Seconds were not"
        " compared.",
        outcome="partly",
        source="Korthikanti et al. 2022, abstract",
    ),
    Claim(
        "A checkpoint around one layer saves memory.",
        "peak of eight layers alone, with no checkpoint, around the first, around the last",
        "Partly: it depends on the layer. Around the last layer, or around the only one, a"
        " checkpoint saves nothing.",
        outcome="partly",
    ),
)
#: Claims found only in the teaching documents from which the course was developed.
OLDER_CLAIMS = (
    Claim(
        "Non-reentrant checkpointing brings memory from O(N) to O(1).",
        "bytes that the decoder saves with a checkpoint per layer",
        "No: one input per layer stays. It is still O(N), with a smaller slope.",
        outcome="fails",
    ),
    Claim(
        "The non-reentrant mode analyses a static graph.",
        "a function that takes a different branch in each step",
        "No: it only puts hooks on saved tensors. The gradients are equal in every step.",
        outcome="fails",
    ),
    Claim(
        "The reentrant mode is more compatible.",
        "cases that work, reentrant : non-reentrant",
        "Partly: only for functions that forbid hooks. Otherwise the non-reentrant mode is"
        " more compatible.",
        outcome="partly",
    ),
    Claim(
        "`checkpoint_sequential` on the list of Linear layers equals the network.",
        "outputs compared",
        "No: the activation functions between the Linear layers are left out.",
        outcome="fails",
    ),
    Claim(
        "With `checkpoint_sequential` in its old mode, the network still trains.",
        "three segments, an input that needs no gradient: layers with gradients",
        "Partly: only the last segment trains. There is a warning, but no error.",
        outcome="partly",
    ),
)


def figures_of_claims(variants: Mapping[str, Any], alone: Mapping[int | None, int]) -> list[str]:
    """Return the figures measured for each of `CLAIMS`.

    Args:
        variants: Name of a policy -> its result, with `flops`; "plain", "each layer" and "products
            kept" must be among them.
        alone: Layer with the checkpoint, or None -> peak in bytes of eight layers without a head.
    """
    plain, layer, kept = (variants[name].flops for name in ("plain", "each layer", "products kept"))
    head = 3 * 2 * 1024 * 256 * 2048  # products of the head, which no policy recomputes
    whole = plain + (plain - head) // 3  # each layer without early stop: one more forward of all
    peaks = " / ".join(f"{peak / 1e6:.1f}" for peak in (alone[None], alone[0], alone[7]))
    return [
        f"+{layer / plain - 1:.0%}",
        f"+{(layer - plain) / (plain - head):.0%}",
        f"−{1 - (kept - plain) / (whole - plain):.0%}; −{1 - (kept - plain) / (layer - plain):.0%}",
        text("none / first / last: {peaks} MB", peaks=peaks),
    ]


def older_claims(
    kept: Mapping[int, int],
    dynamic: tuple[int, int],
    score: tuple[int, int],
    equal: tuple[int, int],
    trained: int,
) -> Table:
    """Return the table of the claims in depth.

    Args:
        kept: Depth -> bytes saved by a checkpointed decoder.
        dynamic: Number of steps with equal gradients, and of all steps.
        score: Number of experiments that work in the reentrant mode, and in the other one.
        equal: Count of equal numbers, and of all numbers.
        trained: Number of layers with gradients, of six.
    """
    return what_you_may_have_read(
        OLDER_CLAIMS,
        listed(
            [
                text("L = {depth}: {size} MB", depth=depth, size=f"{count / 1e6:.1f}")
                for depth, count in kept.items()
            ],
            "; ",
        ),
        text("equal gradients in {n} of {all} steps", n=dynamic[0], all=dynamic[1]),
        f"{score[0]} : {score[1]}",
        text("{n} of {all} numbers are equal", n=equal[0], all=equal[1]),
        f"{trained} / 6",
    )
