"""Claims that lesson 03 tests."""

from course_lib.teaching import Claim, Table
from course_lib.teaching.claims import what_you_may_have_read

#: Claims that learners may have read.
CLAIMS = (
    Claim(
        "O(√n) memory for n layers costs one extra forward pass.",
        "tapered segments, 25 and 100 layers",
        "Holds: with the number of layers quadrupled, the peak does not even double.",
        outcome="holds",
        source="arXiv:1604.06174",
    ),
    Claim(
        "Marking every √n-th node as a checkpoint is optimal.",
        "100 layers: 10 segments, then tapered",
        "Partly: the order of growth is right. But the best number depends on A/B, and equal"
        " segments are not the best ones.",
        outcome="partly",
        source="`gradient-checkpointing`",
    ),
    Claim(
        "Larger groups (`--recompute-num-layers`) need less memory.",
        "the decoder's activations at the peak, groups of 1 and 2",
        "Partly: a group is recomputed as a whole. Groups of two layers pay off only if L is"
        " above 2·A/B.",
        outcome="partly",
        source="`Megatron-LM`",
    ),
)

#: Claims found only in the teaching documents from which the course was developed.
OLDER_CLAIMS = (
    Claim(
        "√L segments save 1 − √L/L of the memory: 90% for 100 layers.",
        "100 × (Linear + Tanh), 10 segments",
        "No: the formula leaves out the segment that is being recomputed. With equal"
        " segments, 1 − 2/√L is saved.",
        outcome="fails",
    ),
    Claim(
        "√L segments cost 2√L/L of extra compute: 20%.",
        "FLOPs of the same network",
        "No: all segments except the last run forward again, which is nearly a third of a step.",
        outcome="fails",
    ),
    Claim(
        "Recomputing doubles the compute.",
        "FLOPs of a step, tapered segments",
        "No: it adds one forward, and a backward costs as much as two forwards.",
        outcome="fails",
    ),
    Claim(
        "Detach each segment's output and set `requires_grad`.",
        "four segments: layers that get gradients",
        "No: this cuts the graph, so only the last segment trains.",
        outcome="fails",
    ),
)


def older_claims(*measured: str) -> Table:
    """Return the table of the claims of the optional section, with the measured value of each."""
    return what_you_may_have_read(OLDER_CLAIMS, *measured)
