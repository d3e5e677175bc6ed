"""Claims that lesson 01 tests."""

from collections.abc import Sequence

from course_lib.teaching import Claim, Table, text
from course_lib.teaching.claims import what_you_may_have_read

#: Claims that learners may have read.
CLAIMS = (
    Claim(
        "Memory is weights + gradients + optimizer state + activations.",
        "the decoder's step, section 1.3",
        "Partly: the sum leaves out temporaries, and adds gradients and activations that are never"
        " in memory together. It is 4% too high here, and 28% too low with 32768 words (section"
        " 1.7).",
        outcome="partly",
        source="EleutherAI, Transformer Math 101, 2023",
    ),
    Claim(
        "16-bit precision cuts memory by half.",
        "the same step under autocast in bf16",
        "Partly: the peak is 22% lower here. Weights, gradients, optimizer state and some"
        " activations stay in fp32.",
        outcome="partly",
        source="PyTorch Lightning documentation, older edition (now of true 16-bit only)",
    ),
    Claim(
        "Mixed precision with AdamW takes 18 bytes per parameter.",
        "the same step under autocast: weights, gradients and state when it ends",
        "Partly: 16 bytes stay. The other 2 are copies of the weights in bf16, which exist only"
        " during forward and backward.",
        outcome="partly",
        source="Hugging Face documentation, GPU memory usage (6 + 8 + 4)",
    ),
)

#: Claims about reserved memory that learners may have read; an optional section tests them.
ALLOCATOR_CLAIMS = (
    Claim(
        "Emptying the cache frees memory for my model.",
        "A, B, A, B on 388 MiB: cache emptied when memory ran out, or after each batch",
        "Partly: before it reports the error, PyTorch has already emptied its cache. Emptying it"
        " after each batch helps here, because blocks are then placed elsewhere.",
        outcome="partly",
        source="PyTorch documentation, torch.cuda.empty_cache: no, but it may reduce fragmentation",
    ),
    Claim(
        "Reserved memory is leaked.",
        "the monitor's steps: memory reserved after steps 2 and 3",
        "No. The next step uses it again, and PyTorch returns it to the driver before it reports"
        " an error.",
        outcome="fails",
        source="discuss.pytorch.org, How to delete PyTorch objects correctly from memory",
    ),
    Claim(
        "“Tried to allocate 20.00 MiB”: that is the tensor's size.",
        "the tensor for which A, B, A, B ran out of memory",
        "No. It is the segment that PyTorch asked CUDA for: 20 MiB for any tensor between 1 and 10"
        " MiB.",
        outcome="fails",
        source="wording of the message; the rule is in c10/cuda/CUDACachingAllocator.cpp",
    ),
)

#: Claims found only in the teaching documents from which the course was developed.
OLDER_CLAIMS = (
    Claim(
        "Memory after the forward pass is the peak.",
        "the decoder's step, section 1.3",
        "No. Backward begins by making two more tensors of the logits' size.",
        outcome="fails",
    ),
    Claim(
        "Run plain first, then the other, and compare the growth.",
        "the same MLP twice",
        "No. The first run also creates Adam's state.",
        outcome="fails",
    ),
    Claim(
        "Standard attention keeps Q, K, V, S and P.",
        "12 heads, 512 tokens, d = 64, fp32",
        "No. S is not kept, because the gradient of softmax needs only P.",
        outcome="fails",
    ),
    Claim(
        "Each of L layers keeps one activation.",
        "20 × (Linear + GELU)",
        "No. Linear and GELU each keep their own input.",
        outcome="fails",
    ),
)


def older_claims(
    growth: Sequence[int],
    attention_bytes: int,
    activations: float,
    after_forward: int,
    peak_bytes: int,
) -> Table:
    """Return the table of the claims of the optional section.

    Args:
        growth: Bytes by which memory grew in each of two runs.
        attention_bytes: Bytes that attention kept.
        activations: Bytes of the MLP's activations divided by the bytes of its input.
        after_forward: Live bytes after the decoder's forward pass.
        peak_bytes: Peak of the decoder's step.
    """
    with_scores = attention_bytes + 4 * 12 * 512 * 512
    return what_you_may_have_read(
        OLDER_CLAIMS,
        f"{after_forward / 1e6:.1f} MB < {peak_bytes / 1e6:.1f} MB",
        f"{growth[0] / 1e6:.1f} MB → {growth[1] / 1e6:.1f} MB",
        text(
            "{kept} MB, not {all} MB",
            kept=f"{attention_bytes / 1e6:.1f}",
            all=f"{with_scores / 1e6:.1f}",
        ),
        f"{activations:g} = 2 × 20",
    )
