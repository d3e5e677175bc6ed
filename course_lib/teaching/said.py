"""What learners may have read: the claims that the lessons test, each with its experiment and verdict.

The measured figures are not here: each lesson measures them and hands them in. A test repeats every experiment.
"""

from .tables import Table, claims

_CLAIMS = {
    "01": (
        (
            ("Memory after the forward pass is the peak.", "前向结束时的内存就是峰值。"),
            ("the lesson's decoder, section 1.3", "本课的解码器，1.3 节"),
            (
                "No. It is in backward here, and in the optimizer for the MLP.",
                "不对。这里在反向之中，MLP 则在优化器更新时。",
            ),
        ),
        (
            ("Run plain first, then the other, and compare the growth.", "先跑普通的，再跑另一个，比较增量。"),
            ("the same MLP twice", "同一个 MLP 跑两次"),
            ("No. The first run pays for Adam's state.", "不对。建立 Adam 状态的开销，算在了第一次头上。"),
        ),
        (
            ("Standard attention keeps Q, K, V, S and P.", "标准注意力保存 Q、K、V、S 和 P。"),
            ("12 heads, 512 tokens, d = 64, fp32", "12 个头、512 个 token、d = 64、fp32"),
            ("No: S is not kept. Softmax's gradient needs P only.", "不对：S 不保存。softmax 求梯度只用 P。"),
        ),
        (
            ("Each of L layers keeps one activation.", "L 层各保存一个激活值。"),
            ("20 × (Linear + GELU)", "20 ×（Linear + GELU）"),
            ("No. Linear keeps its input, GELU keeps its own.", "不对。Linear 存它的输入，GELU 也存自己的输入。"),
        ),
    ),
}


def what_you_may_have_read(lesson: str, *measured: str) -> Table:
    """The table of a lesson's claims, with what the lesson has measured for each.

    Raises:
        ValueError: there are not as many measured figures as claims.
    """
    if len(measured) != len(_CLAIMS[lesson]):
        raise ValueError(f"{len(measured)} figures for lesson {lesson}, which tests {len(_CLAIMS[lesson])} claims")
    return claims(
        (claim, experiment, figure, verdict)
        for (claim, experiment, verdict), figure in zip(_CLAIMS[lesson], measured, strict=True)
    )
