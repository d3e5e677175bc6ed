"""Claims that lesson 08 tests."""

from course_lib.teaching import Claim

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
