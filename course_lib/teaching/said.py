"""What learners may have read: the claims that the lessons test, each with its experiment and verdict.

The measured figures are not here: each lesson measures them and hands them in. A test repeats every experiment.
"""

from .tables import Table, Words, claims

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
    "02": (
        (
            ("One checkpointed layer saves memory.", "给一层加检查点就能省内存。"),
            ("peak of one layer, and of four", "一层的峰值与四层的峰值"),
            (
                "No: while it is computed again, the whole layer is there. Several layers do.",
                "不能：重计算时，整层的激活值都在。多层才省。",
            ),
        ),
        (
            ("Non-reentrant checkpointing brings memory from O(N) to O(1).", "非可重入检查点把内存从 O(N) 降到 O(1)。"),
            ("saved bytes of a decoder, a checkpoint a layer", "解码器保存的字节，每层一个检查点"),
            (
                "No: one input a layer stays. O(N) with a smaller slope.",
                "不对：每层留下一份输入，仍是 O(N)，只是斜率更小。",
            ),
        ),
        (
            ("The non-reentrant mode analyses a static graph.", "非可重入模式要分析静态图。"),
            ("a function that takes another branch each step", "每一步走不同分支的函数"),
            ("No: it hooks saved tensors. Gradients are equal.", "不对：它只是给保存的张量挂钩子。梯度相等。"),
        ),
        (
            ("The reentrant mode is more compatible.", "可重入模式兼容性更好。"),
            ("rows that work, reentrant : non-reentrant", "正常工作的行数，可重入 : 非可重入"),
            ("The other way round, but for functions that forbid hooks.", "恰好相反，只有不许挂钩子的函数除外。"),
        ),
        (
            (
                "`checkpoint_sequential` on the list of Linear layers equals the network.",
                "对 Linear 层的列表用 `checkpoint_sequential`，结果与原来的网络相同。",
            ),
            ("outputs compared", "比较输出"),
            ("No: the activation functions between them are gone.", "不对：中间的激活函数没有了。"),
        ),
        (
            ("It trains.", "用了它，网络照样能训练。"),
            (
                "reentrant, three segments, an input that needs no gradient: layers with gradients",
                "可重入，三段，输入不需要梯度：得到梯度的层数",
            ),
            ("Only the last segment does: there is a warning, but no error.", "只有最后一段在训练：有警告，但不报错。"),
        ),
    ),
    "03": (
        (
            (
                "√L segments save 1 − √L/L of the memory: 90 % for 100 layers.",
                "√L 段省下 1 − √L/L 的内存：100 层省 90 %。",
            ),
            ("100 × (Linear + Tanh), 10 segments", "100 ×（Linear + Tanh），10 段"),
            (
                "No: it forgets the segment that is being worked on. 1 − 2/√L with equal ones.",
                "不对：忘了正在处理的那一段。各段相等时是 1 − 2/√L。",
            ),
        ),
        (
            ("They cost 2√L/L of extra compute: 20 %.", "√L 段要多花 2√L/L 的计算：20 %。"),
            ("FLOPs of the same", "同一网络的 FLOPs"),
            (
                "No: all but the last segment runs forward again, nearly a third of a step.",
                "不对：除最后一段外都要再做一次前向，将近一步的三分之一。",
            ),
        ),
        (
            ("Recomputing doubles the compute.", "重计算使计算量翻倍。"),
            ("FLOPs of a step, tapered segments", "一步的 FLOPs，渐短的段"),
            ("No: one forward more, and backward is twice a forward.", "不对：只多一次前向，而反向是前向的两倍。"),
        ),
        (
            ("√L equal segments are optimal.", "√L 个相等的段是最优的。"),
            ("100 × (Linear + GELU), 10 segments → tapered", "100 ×（Linear + GELU），10 段 → 渐短的段"),
            ("No: early segments may be longer, for 2 % more FLOPs.", "不对：前面的段可以更长，FLOPs 只多 2 %。"),
        ),
        (
            (
                "Detach each segment's output and set `requires_grad`.",
                "把每一段的输出 detach，再设 `requires_grad`。",
            ),
            ("four segments: layers that get gradients", "四段：得到梯度的层数"),
            ("It cuts the graph: only the last segment trains.", "这会切断计算图：只有最后一段在训练。"),
        ),
    ),
    "04": (
        (
            (
                "An autograd function that copies its input to the CPU offloads the activation.",
                "用 autograd 函数把输入拷贝到 CPU，就卸载了激活值。",
            ),
            (
                "gradient against plain; bytes in the graph without it and with it",
                "梯度与普通做法之比；不用它和用它时计算图里的字节",
            ),
            (
                "No: the next operator keeps the same storage, and this one doubles the gradient.",
                "不对：下一个算子仍持有同一份存储，这个函数还使梯度翻倍。",
            ),
        ),
        (
            (
                '`value.to("cpu")` over `optimizer.state` offloads the optimizer.',
                '对 `optimizer.state` 里的值逐个调用 `value.to("cpu")`，就卸载了优化器。',
            ),
            ("state tensors still at their old addresses", "状态张量是否都还在原来的地址"),
            (
                "No: on a GPU `.to` returns a copy (here: `copy=True`), and nobody keeps it.",
                "不对：在 GPU 上 `.to` 返回一份拷贝（这里用 `copy=True`），却没有谁留住它。",
            ),
        ),
        (
            (
                "This prefetcher works: it loads the first batch in `__init__`.",
                "这个预取器能用：它在 `__init__` 里就加载第一个批次。",
            ),
            ("what it says when it is made", "创建时的报错"),
            (
                "No: it asks an iterator that `__iter__` has yet to make.",
                "不对：它要用的迭代器，`__iter__` 还没有创建。",
            ),
        ),
        (
            (
                "Make the causal mask with `nn.Transformer().generate_square_subsequent_mask(n)`.",
                "用 `nn.Transformer().generate_square_subsequent_mask(n)` 生成因果掩码。",
            ),
            ("peak of that, and of the static method alone, n = 512", "它的峰值，以及只用静态方法的峰值，n = 512"),
            (
                "It makes 44 million parameters and throws them away, at every call.",
                "每次调用都会造出 4400 万个参数再扔掉。",
            ),
        ),
    ),
    "05": (
        (
            ("Divide each micro-batch's loss by their number.", "把每个微批次的损失除以微批次的个数。"),
            ("error of the gradient, 32 sequences in pieces of 4", "梯度的误差，32 个序列，每份 4 个"),
            (
                "Right only if all have as many tokens. Add up sums, divide once.",
                "只有 token 数都相等时才对。应把总和加起来，只除一次。",
            ),
        ),
        (
            ("The last, partial group can be ignored.", "最后不满一组的可以不管。"),
            ("samples whose gradients are never used", "梯度从未用上的样本数"),
            (
                "They are lost; or, never zeroed, they join the next epoch's first step. Step on them too.",
                "它们丢了；若不清零，就混进下一个 epoch 的第一步。也要用它们更新一次。",
            ),
        ),
        (
            ("Accumulation saves memory in proportion.", "累积按比例节省内存。"),
            ("peaks for micro-batches of 32 and 1", "微批次为 32 与 1 时的峰值"),
            (
                "Activations do. Weights, gradients and optimizer state stay.",
                "激活值是这样。权重、梯度和优化器状态不变。",
            ),
        ),
    ),
    "06": (
        (
            ("Flash keeps the maximum m and the sum l of each row.", "Flash 为每一行保存最大值 m 和总和 l。"),
            ("vectors of one number a row among what is saved", "所保存的张量里，每行一个数的向量有几个"),
            (
                "The first paper's algorithm did. One is enough: their log-sum-exp.",
                "第一篇论文的算法是这样。一个就够了：两者合成的对数求和指数。",
            ),
        ),
        (
            ("In half precision everything takes two bytes.", "半精度下，一切都是两个字节。"),
            ("dtype of that vector for bf16 inputs", "输入为 bf16 时这个向量的 dtype"),
            ("Not the statistics: four bytes a row.", "统计量不是：每行四个字节。"),
        ),
        (
            ("Backward does twice the FLOPs of forward.", "反向的 FLOPs 是前向的两倍。"),
            ("FLOPs of flash attention, backward against forward", "flash 注意力的 FLOPs，反向与前向之比"),
            ("Five products instead of two: P is computed again.", "五次乘法对两次：P 要再算一遍。"),
        ),
        (
            ("Checkpointed attention saves 50 to 80 %.", "给注意力加检查点，能省 50 到 80 %。"),
            (
                "share of the peak saved with 1 / 3 / 6 layers, a checkpoint each",
                "1 / 3 / 6 层、每层一个检查点时，峰值省下的比例",
            ),
            (
                "It depends on how many layers there are: with one, nothing (lesson 02).",
                "取决于有几层：只有一层时，什么也不省（第 02 课）。",
            ),
        ),
        (
            ("FlashAttention takes linear time.", "FlashAttention 的时间是线性的。"),
            ("twice the tokens: bytes kept / FLOPs", "token 数加倍：保存的字节 / FLOPs"),
            ("Its memory is. FLOPs stay quadratic.", "线性的是内存。FLOPs 仍是平方级。"),
        ),
    ),
    "07": (
        (
            ("Accumulation always lowers the peak.", "梯度累积总能降低峰值。"),
            ("checkpointed layers, then two micro-batches on top", "每层一个检查点，再加两个微批次"),
            (
                "Not where activations are small already: it keeps a full set of gradients.",
                "激活值本来就很小时则不然：它要留着一整套梯度。",
            ),
        ),
        (
            ("Savings add up.", "节省可以相加。"),
            ("flash alone, checkpoints alone, both", "单用 flash、单用检查点、两样合用"),
            (
                "They shrink the same activations, and then something else is the peak.",
                "两者缩小的是同样的激活值，之后撑起峰值的就是别的了。",
            ),
        ),
        (
            (
                "Training 7 billion parameters with Adam takes 112 GB, 16 bytes a parameter.",
                "用 Adam 训练 70 亿参数要 112 GB，每个参数 16 字节。",
            ),
            ("peak on the device, state on the host, steps in backward", "设备上的峰值，状态在主机，反向中更新"),
            (
                "On one device, all at once. Somewhere the state must be, and copies take their time.",
                "这是全放在一台设备上的数。状态总得放在某处，拷贝也要花时间。",
            ),
        ),
        (
            ("FlashAttention does fewer FLOPs.", "FlashAttention 的 FLOPs 更少。"),
            (
                "FLOPs of the step with flash over plain, 384 tokens",
                "384 个 token，用 flash 的一步与普通一步的 FLOPs 之比",
            ),
            (
                "Backward computes the scores again. It saves bytes moved, and the work of wholly masked tiles.",
                "反向要把分数再算一遍。它省的是搬运的字节；至于计算，只有整块都被遮住的分块才能跳过。",
            ),
        ),
    ),
}


OUTCOMES = ("fails", "partly", "holds")
# What became of each claim, in order. One that is right in some cases, or at a price it does not name, holds partly.
_OUTCOMES = {
    "01": ("fails", "fails", "fails", "fails"),
    "02": ("fails", "fails", "fails", "partly", "fails", "partly"),
    "03": ("fails", "fails", "fails", "fails", "fails"),
    "04": ("fails", "fails", "fails", "partly"),
    "05": ("partly", "fails", "partly"),
    "06": ("partly", "partly", "fails", "partly", "fails"),
    "07": ("fails", "fails", "partly", "fails"),
}


def outcomes(lesson: str) -> tuple[str, ...]:
    """For each claim of a lesson one of `OUTCOMES`.

    Raises:
        ValueError: there are not as many outcomes as claims.
    """
    found = _OUTCOMES.get(lesson, ())
    if len(found) != len(_CLAIMS[lesson]):
        raise ValueError(f"{len(found)} outcomes for lesson {lesson}, which tests {len(_CLAIMS[lesson])} claims")
    return found


def what_you_may_have_read(lesson: str, *measured: Words) -> Table:
    """The table of a lesson's claims, with what the lesson has measured for each: a string, or an (en, zh) pair.

    Raises:
        ValueError: there are not as many measured figures as claims.
    """
    if len(measured) != len(_CLAIMS[lesson]):
        raise ValueError(f"{len(measured)} figures for lesson {lesson}, which tests {len(_CLAIMS[lesson])} claims")
    return claims(
        (claim, experiment, figure, verdict)
        for (claim, experiment, verdict), figure in zip(_CLAIMS[lesson], measured, strict=True)
    )
