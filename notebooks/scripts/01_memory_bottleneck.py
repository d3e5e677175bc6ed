# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] slide={"en": "27.5 MB of weights, and one step holds 277,682,584 bytes. Nobody has wasted anything.\n\nToday you predict that number by hand.", "zh": "权重 27.5 MB，训练一步却要占 277,682,584 字节，没有哪个字节是浪费的。\n\n今天，你要亲手把这个数算出来。"}
# # 1 Where do the bytes of a training step go? / 训练步的字节去了哪里？
#
# <div lang="en">
#
# The decoder of lesson 00 weighs 27.5 MB, and one training step of it holds 277.7 MB: ten times as much. Nobody has wasted anything.
#
# By the end of this page you will have predicted those 277,682,584 bytes by hand, and you will know which 8 of them you missed.
#
# </div>
# <div lang="zh">
#
# 第 00 课的解码器，权重只有 27.5 MB，一个训练步却要占 277.7 MB，是权重的十倍。没有哪个字节是浪费的。
#
# 学完这一页，你会亲手算出这 277,682,584 字节，而且知道自己漏掉的是哪 8 个字节。
#
# </div>

# %%
from course_lib.teaching import language

language()

# %% [markdown]
# <div lang="en">
#
# **Goals** (75 minutes). Name the kinds of bytes in a training step and say when each lives. Build a memory meter in fifteen lines. Predict what a decoder layer saves for backward, and with it the peak of a whole step. Count the step of a model that this machine could never run.
#
# **What to know before**: how to train a network in PyTorch. Lesson 00 shows how a lesson works, and its table says what each letter means. MB is $10^6$ bytes.
#
# </div>
# <div lang="zh">
#
# **目标**（75 分钟）：说出训练步里有哪几类字节、各自何时存活；用十五行代码做一个内存计量器；预测一个解码器层为反向保存多少字节，进而算出整个训练步的峰值；给这台机器根本跑不动的模型算一笔账。
#
# **预备知识**：会用 PyTorch 训练网络。第 00 课讲了每一课怎么上，各个字母的含义见那里的符号表。MB 指 $10^6$ 字节。
#
# </div>

# %%
import weakref

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course_lib.lessons import lesson_01
from course_lib.lessons.ledger import ledger
from course_lib.memory import MemoryMeter, saved_tensors, symbolic
from course_lib.models import Decoder, DecoderLayer, random_tokens
from course_lib.teaching import predictions, table, timelines

# %% [markdown] slide={"en": "Parameters, gradients, optimizer state; activations; temporaries.\n\n**Guess first.** Adam, fp32, 6,875,648 weights: how many bytes has each of the first three?", "zh": "参数、梯度、优化器状态；激活值；临时张量。\n\n**先猜**：用 Adam 和 fp32，6,875,648 个权重，前三类各有多少字节？"}
# ## 1.1 Five kinds of bytes / 五类字节
#
# <div lang="en">
#
# | kind | made by | gone when |
# |---|---|---|
# | parameters | building the model | the model goes |
# | gradients | backward | `zero_grad()` |
# | optimizer state | the first `step()` | the optimizer goes |
# | activations: kept for backward | forward | backward has used them |
# | temporaries: all other tensors | any operator | nothing needs them any more |
#
# The first three don't depend on the data. Adam keeps two numbers for each weight, its two **moments**: running means of its gradient and of the gradient's square. This decoder has 6,875,648 weights, and everything is fp32, 4 bytes a number.
#
# **Exercise 1.** How many bytes has each of the three kinds? Type them into the next cell, and run it.
#
# </div>
# <div lang="zh">
#
# | 种类 | 由谁产生 | 何时消失 |
# |---|---|---|
# | 参数 | 建立模型 | 模型消失时 |
# | 梯度 | 反向 | `zero_grad()` |
# | 优化器状态 | 第一次 `step()` | 优化器消失时 |
# | 激活值：为反向而保存 | 前向 | 反向用完它时 |
# | 临时张量：其余的张量 | 任何算子 | 不再有人需要时 |
#
# 前三类与数据无关。Adam 为每个权重存两个数，即两个**矩**：梯度的滑动平均，以及梯度平方的滑动平均。这个解码器有 6,875,648 个权重，全部用 fp32，每个数 4 字节。
#
# **练习 1。** 这三类各有多少字节？填进下一个单元格，再运行它。
#
# </div>

# %% minutes=5
mine = {"parameter": None, "gradient": None, "optimizer": None}  # bytes
lesson_01.check_training_state(mine)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not lesson_01.check_training_state.accepted:
    weights = 6_875_648
    mine = {"parameter": 4 * weights, "gradient": 4 * weights, "optimizer": 2 * 4 * weights}

lesson_01.check_training_state(mine)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# Now measure. Two steps, because the first one makes the optimizer's state; the second is metered, and we look at what is left when it ends.
#
# </div>
# <div lang="zh">
#
# 现在来测量。跑两步：优化器状态在第一步里才建立，所以计量第二步，看它结束时留下了什么。
#
# </div>


# %%
def make_decoder(**changes):
    sizes = {"vocabulary": 2048, "hidden": 256, "heads": 8, "layers": 8, "sequence": 128}
    return Decoder(**{**sizes, **changes})


def metered_step(decoder, tokens, adam):
    for _ in range(2):
        decoder.zero_grad()
        with MemoryMeter(decoder, adam) as meter:
            decoder.loss(tokens).backward()
            adam.step()
    return meter


# %% slide="result"
decoder, tokens = make_decoder(), random_tokens(batch=8, sequence=128, vocabulary=2048)  # (8, 129)
adam = torch.optim.Adam(decoder.parameters())
meter = metered_step(decoder, tokens, adam)
left = meter.timeline[-1].bytes  # when the step has ended
predictions([(kind, mine[kind], left[kind]) for kind in mine], unit="bytes")

# %% [markdown] slide={"en": "$4 + 4 + 8 = 16$ bytes a parameter, in fp32; mixed precision with master weights ends at 16 too.\n\n7 billion parameters: 112 GB before the first activation.", "zh": "fp32：每个参数 $4 + 4 + 8 = 16$ 字节；带主权重的混合精度也是 16。\n\n70 亿个参数：还没算激活值，就要 112 GB。"}
# <div lang="en">
#
# The 400 bytes: Adam also counts the steps, in 4 bytes for each of the 100 tensors.
#
# That is $4 + 4 + 8 = 16$ bytes a parameter. Mixed precision as large models are trained with it ends at 16 too: weight and gradient in bf16, 2 bytes each, and in the optimizer an fp32 copy of the weight (its **master weight**) and two moments, $2 + 2 + 12$. So a model of 7 billion parameters, 14 GB of bf16 weights, needs 112 GB with this recipe before the first activation. Other recipes split it otherwise, and some go lower (sections 1.12 and 1.13).
#
# </div>
# <div lang="zh">
#
# 多出的 400 字节：Adam 还为 100 个张量各记一个步数，每个 4 字节。
#
# 合起来是每个参数 $4 + 4 + 8 = 16$ 字节。训练大模型时常用的混合精度也是 16 字节：权重和梯度用 bf16，各 2 字节；优化器里有权重的一份 fp32 副本（**主权重**）和两个矩，即 $2 + 2 + 12$。因此一个 70 亿参数的模型，bf16 权重只有 14 GB，按这个配方还没算激活值就要占 112 GB。别的配方分法不同，有的更低（见 1.12 节和 1.13 节）。
#
# </div>

# %% [markdown] slide={"en": "How would you count the bytes that are alive?\n\nBytes lie in **storages**, and views share them. So watch every operator for new storages.", "zh": "怎么数出存活的字节？\n\n字节在**存储区**里，各个视图共用一份。所以守在每个算子后面，看有没有新的存储区。"}
# ## 1.2 A meter from nothing / 从零做一个计量器
#
# <div lang="en">
#
# How does the meter know? A tensor's bytes lie in its **storage**, and views share it. So stand behind every operator, look at the storages that came out and had not gone in, add their bytes, and subtract them when they die.
#
# Three tools do it. A `TorchDispatchMode` stands at the dispatcher, which every operator of PyTorch passes. `tree_leaves` takes lists and tuples apart. `weakref.finalize` calls a function when an object dies. (`_cdata` is the storage's address, the same for every view; as long as the storage lives, PyTorch hands out the same object for it.)
#
# </div>
# <div lang="zh">
#
# 计量器是怎么知道的？张量的字节在它的**存储区**（storage）里，各个视图共用一份。所以只要守在每个算子后面：凡是出来时有、进去时没有的存储区，就加上它的字节；等它释放，再减掉。
#
# 这要用到三样工具：`TorchDispatchMode` 守在**分发器**（dispatcher）处，PyTorch 的每个算子都要经过那里；`tree_leaves` 把列表和元组拆开；`weakref.finalize` 在对象被回收时调用一个函数。（`_cdata` 是存储区的地址，各个视图都一样；存储区还在，PyTorch 给出的就是同一个对象。）
#
# </div>


# %% slide="code"
def storages(values):
    return [x.untyped_storage() for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


class TinyMeter(TorchDispatchMode):
    live = peak = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        known = {storage._cdata for storage in storages(args)}
        for storage in storages(result):
            if storage._cdata not in known:
                self.count(storage.nbytes())
                weakref.finalize(storage, self.count, -storage.nbytes())
        return result

    def count(self, change):
        self.live += change
        self.peak = max(self.peak, self.live)


# %% slide="result"
def peak_of(meter):
    decoder.zero_grad()
    with meter:
        decoder.loss(tokens).backward()
    return meter


tiny, full = peak_of(TinyMeter()), peak_of(MemoryMeter())
table(["meter", "peak, bytes"], [("TinyMeter", tiny.peak), ("MemoryMeter", full.peak_bytes)])

# %% [markdown]
# <div lang="en">
#
# Equal to the byte (and without weights and state, 82.5 MB, which were there before). The library's `MemoryMeter` works the same way and adds what these lines lack: kinds of bytes, phases, operators by name, a budget, threads. One thing to remember for later: a meter that stands behind every operator is not wholly out of the way. Section 1.19 shows where that matters.
#
# </div>
# <div lang="zh">
#
# 一字节不差（不含权重和优化器状态的 82.5 MB，它们早就在了）。课程库的 `MemoryMeter` 也是这样工作的，只是补上了这几行所缺的：字节的种类、阶段、算子的名字、预算、多线程。有一点先记下：守在每个算子后面的计量器，并非毫无影响。1.19 节会说明什么时候要当心。
#
# </div>

# %% [markdown] slide={"en": "Weights, gradients, state: 110.0 MB. Activations: 178.4 MB at most.\n\n**Guess first.** How high is the peak, and in which phase?", "zh": "权重、梯度、优化器状态：110.0 MB。激活值：最多 178.4 MB。\n\n**先猜**：峰值是多少？在哪个阶段？"}
# ## 1.3 The timeline of a step / 一个训练步的时间线
#
# <div lang="en">
#
# Calculators add up: weights, gradients, optimizer state, activations. You know the first three, 110.0 MB. The activations of this step come to 178.4 MB at most.
#
# **Guess first.** What will the peak be, and in which phase: forward, backward, or the optimizer's step? At the peak, how many bytes of gradients are there?
#
# </div>
# <div lang="zh">
#
# 网上的显存计算器都是做加法：权重、梯度、优化器状态、激活值。前三项你已经知道，共 110.0 MB；这一步的激活值最多 178.4 MB。
#
# **先猜**：峰值是多少？在哪个阶段：前向、反向，还是优化器更新时？峰值那一刻，有多少字节的梯度？
#
# </div>

# %%
my_peak, my_gradients = None, None  # bytes, such as 300e6

# %% slide="result"
timelines({"one step": meter}, title="Gradients come as activations go: they never meet in full")

# %% slide="result"
then = meter.at_peak()["gradient"]
predictions([("peak", my_peak, meter.peak_bytes), ("gradients then", my_gradients, then)])


# %% slide="result"
def where_is_the_peak(meter):
    peak = max(meter.timeline, key=lambda sample: sample.live_bytes)
    return peak.phase, peak.operator, meter.at_peak()["activation"]


where_is_the_peak(meter)

# %% [markdown] slide={"en": "At the peak: no gradients yet, all activations still. So the sum of all kinds is not the peak.\n\nAnd with a single sequence?", "zh": "峰值那一刻，梯度还没有，激活值全都在。所以各类相加并不是峰值。\n\n只有一条序列时呢？"}
# <div lang="en">
#
# At the peak not one parameter has its gradient. It lies at the very start of backward, where the gradient of the logits is made, a temporary: all activations are still there. From then on each layer gives back its activations and gets its gradients.
#
# So the sum of all kinds, 288.4 MB, is not the peak, and its error depends on the batch. With a single sequence:
#
# </div>
# <div lang="zh">
#
# 峰值那一刻，还没有一个参数得到梯度。峰值就在反向刚开始、求 logits 的梯度（一个临时张量）的时候：激活值全都还在。此后每一层交还自己的激活值，换来自己的梯度。
#
# 所以把各类相加得到的 288.4 MB 并不是峰值，误差有多大还要看批次。只有一条序列时：
#
# </div>

# %% slide="result"
alone = make_decoder()
single = metered_step(alone, random_tokens(1, 128, 2048), torch.optim.Adam(alone.parameters()))
rows = []
for name, found in {"8 sequences": meter, "1 sequence": single}.items():
    added = sum(left[kind] for kind in mine) + int(found.series()["activation"].max())
    rows.append((name, added, found.peak_bytes))
predictions(rows)

# %%
where_is_the_peak(single)

# %% [markdown] slide={"en": "Where the peak is decides what helps against it.\n\nThis one lies at the end of backward, without any activation: checkpointing could not lower it.", "zh": "峰值在哪里，决定了什么办法管用。\n\n后一种峰值在反向的末尾，激活值一个也不剩：检查点帮不上忙。"}
# <div lang="en">
#
# 16% too much. This peak lies in backward as well, but at its end: not one activation is left. Where the peak is decides what helps against it: checkpointing could not lower this second one at all.
#
# </div>
# <div lang="zh">
#
# 多算了 16%。这时的峰值也在反向里，却在末尾：激活值一个也不剩。峰值在哪里，决定了什么办法管用：对后一种峰值，检查点一点忙也帮不上。
#
# </div>

# %% [markdown] slide={"en": "Which tensors does one layer keep for backward?\n\nAsk each operator: what does your derivative need?", "zh": "一层为反向保存哪些张量？\n\n逐个问算子：你求导时要用什么？"}
# ## 1.4 What one layer keeps / 一层保存了什么
#
# <div lang="en">
#
# The activations are the tall part. Which tensors are they? `saved_tensors` runs a function and lists what its graph holds for backward. Here is one layer of the decoder; the last column names the row of the formula that you are about to write. (`Addmm` is a Linear layer, `mat1` its input. `Bmm` is a product for each sequence and head: 64 of them.)
#
# </div>
# <div lang="zh">
#
# 图中最高的一块是激活值。它们是哪些张量？`saved_tensors` 运行一个函数，列出它的计算图为反向保存的张量。下面是解码器的一层，最后一列是公式里的哪一行；公式马上由你来写。（`Addmm` 是线性层，`mat1` 是它的输入；`Bmm` 是每条序列、每个头各做一次的矩阵乘法，共 64 次。）
#
# </div>

# %% slide="result"
kept = saved_tensors(DecoderLayer(256, 8), torch.randn(8, 128, 256))  # 8 heads; (b, s, h)
lesson_01.rows_of_the_formula(kept)

# %% [markdown] slide={"en": "Softmax keeps P, and the product with V keeps the same storage. Add up tensors, and you count 20% too much.\n\n**Now write the formula.**", "zh": "softmax 保存了 P，与 V 相乘时保存的是同一份存储区。逐个张量相加，就会多算 20%。\n\n**现在，写出公式。**"}
# <div lang="en">
#
# One row is marked as seen before: softmax keeps the attention probabilities P, and the product with V keeps the same storage. Add up tensors instead of storages, as many scripts do, and you count 20% too much. (The causal mask keeps nothing here, since it is added to the scores; filled in with `masked_fill` it keeps $s \times s$ booleans.)
#
# **Exercise 2.** Write the formula: bytes of each row, in fp32, for any batch $b$, sequence $s$, hidden size $h$ and heads $a$. The check tells which row is wrong.
#
# </div>
# <div lang="zh">
#
# 有一行标着“已见过”：softmax 保存了注意力概率 P，与 V 相乘时保存的是同一份存储区。许多脚本把张量逐个相加，而不按存储区来数，这里就会多算 20%。（因果掩码在这里什么也不保存，因为它是加到分数上的；若用 `masked_fill` 填入，就要保存 $s \times s$ 个布尔值。）
#
# **练习 2。** 写出公式：对任意的批次 $b$、序列长度 $s$、隐藏维度 $h$ 和头数 $a$，每一行在 fp32 下占多少字节。检查会指出哪一行错了。
#
# </div>


# %% slide="code" minutes=16
def saved_by_one_layer(b, s, h, a):
    return {
        "norms": 0,  # what the two LayerNorms get
        "statistics": 0,  # of the two LayerNorms: a mean and a reciprocal deviation each token
        "attention": 0,  # input of the projection; Q, K and V; input of the output projection
        "probabilities": 0,  # P, after softmax
        "feed-forward": 0,  # its input, GELU's input, the last product's input
    }


lesson_01.check_layer_formula(saved_by_one_layer)


# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not lesson_01.check_layer_formula.accepted:

    def saved_by_one_layer(b, s, h, a):
        return {
            "norms": 4 * 2 * s * b * h,
            "statistics": 4 * 2 * 2 * s * b,
            "attention": 4 * 5 * s * b * h,
            "probabilities": 4 * a * s * s * b,
            "feed-forward": 4 * 9 * s * b * h,
        }


lesson_01.check_layer_formula(saved_by_one_layer)
### END SOLUTION

# %% slide="result"
one_layer = saved_by_one_layer(b=8, s=128, h=256, a=8)
predictions([("one layer", sum(one_layer.values()), kept.total_bytes)], unit="bytes")

# %% [markdown] slide={"en": "$16 s b h + a s^2 b$ elements, and $4 s b$ for the statistics. In half precision, with dropout, it gives\n\n$$s b h \\left(34 + 5 \\frac{a s}{h}\\right) \\text{ bytes.}$$\n\nA formula holds for the operators it was counted for.", "zh": "$16 s b h + a s^2 b$ 个元素，统计量另计 $4 s b$。在半精度、带 dropout 时，同样的数法得到\n\n$$s b h \\left(34 + 5 \\frac{a s}{h}\\right) \\text{ 字节。}$$\n\n公式只对它所针对的算子成立。"}
# <div lang="en">
#
# Not a byte off. In elements your formula says $16 s b h + a s^2 b$, and $4 s b$ for the statistics. In half precision and with dropout the same count gives the formula of Korthikanti et al., $s b h \left(34 + 5 \frac{a s}{h}\right)$ bytes: two bytes an element, one for each element of three masks, and two more for P after its dropout. A formula holds for the operators it was counted for, and for no others (section 1.14).
#
# </div>
# <div lang="zh">
#
# 一字节不差。按元素个数，你的公式是 $16 s b h + a s^2 b$，统计量另计 $4 s b$。在半精度、带 dropout 时，同样的数法就得到 Korthikanti 等人的公式：$s b h \left(34 + 5 \frac{a s}{h}\right)$ 字节：每个元素两字节，三个掩码每个元素一字节，dropout 之后的 P 再占两字节。公式只对它所针对的算子成立，换了算子就不成立（见 1.14 节）。
#
# </div>

# %% [markdown] slide={"en": "Each layer keeps its own: bytes grow with depth as a line.\n\n**Guess first.** What is its slope, and what its intercept?", "zh": "每一层各存各的：字节数随深度线性增长。\n\n**先猜**：斜率是什么？截距又是什么？"}
# ## 1.5 Depth is a line, length a parabola / 深度是直线，长度是抛物线
#
# <div lang="en">
#
# Your formula is for one layer, and each layer keeps its own: bytes grow with depth as a line. The slope is your sum; the intercept is what the head and its loss keep. With symbolic tensors, which have shapes and no data, such a sweep takes a moment.
#
# </div>
# <div lang="zh">
#
# 你的公式针对一层，而每一层各存各的：字节数随深度线性增长。斜率就是你算出的总和，截距是输出头及其损失所保存的。符号张量只有形状、没有数据，用它扫一遍只要一会儿。
#
# </div>

# %% slide="result"
depths, saved = [2, 4, 8, 16], []
with symbolic():
    for layers in depths:
        deeper, batch = make_decoder(layers=layers), random_tokens(8, 128, 2048)
        saved.append(saved_tensors(deeper.loss, batch).total_bytes)
slope = (saved[-1] - saved[0]) // (depths[-1] - depths[0])
intercept = saved[0] - slope * depths[0]
rows = [("slope: one layer", sum(one_layer.values()), slope), ("intercept", None, intercept)]
predictions(rows, unit="bytes")

# %% [markdown] slide={"en": "Length: P has $s^2$ elements a head.\n\n**Guess first.** $h = 256$, 8 heads: from which length on does P outweigh all the rest?", "zh": "长度：P 在每个头上有 $s^2$ 个元素。\n\n**先猜**：$h = 256$、8 个头，从多长开始，P 比其余全部还大？"}
# <div lang="en">
#
# Length is another matter: P has $s^2$ elements a head. **Guess first.** For this layer, $h = 256$ with 8 heads, from which length on does P outweigh all the rest? (Set $a s^2 b$ equal to $16 s b h$.)
#
# </div>
# <div lang="zh">
#
# 长度就不同了：P 在每个头上有 $s^2$ 个元素。**先猜**：这一层 $h = 256$、8 个头，从多长开始，P 比其余全部还大？（令 $a s^2 b$ 等于 $16 s b h$。）
#
# </div>

# %%
my_length = None  # tokens
lengths, layer_mb, p_mb = [128, 256, 512, 768, 1024], [], []
with symbolic():
    for s in lengths:
        rows = saved_tensors(DecoderLayer(256, 8), torch.randn(8, s, 256))
        layer_mb.append(rows.total_bytes / 1e6)
        p_mb.append(max(row.bytes for row in rows if row.operator == "SoftmaxBackward0") / 1e6)

# %% slide="result"
lesson_01.draw_lengths(lengths, layer_mb, p_mb, saved_by_one_layer, my_length)

# %% [markdown] slide={"en": "They cross at $s = 16 h / a = 512$. With heads of 128, at 2048.\n\nBeyond it, attention is the memory problem.", "zh": "两者在 $s = 16 h / a = 512$ 处相交；头维度为 128 时，在 2048 处。\n\n过了交点，内存问题就是注意力问题。"}
# <div lang="en">
#
# They cross at $s = 16 h / a = 512$: sixteen times the size of a head, here 32. Heads of 128, as in many large models, move the crossing to 2048 tokens. Beyond it, attention is the memory problem. Lesson 06 makes P vanish.
#
# </div>
# <div lang="zh">
#
# 两者在 $s = 16 h / a = 512$ 处相交：头维度（这里是 32）的十六倍。大模型的头维度多为 128，交点就移到 2048 个 token。过了交点，内存问题就是注意力问题。第 06 课会让 P 消失。
#
# </div>

# %% [markdown] slide={"en": "The head holds **three tensors** of the logits' size: one kept, two temporary.\n\n**Guess first.** Which parts make up the whole peak?", "zh": "输出头占着**三个**与 logits 一样大的张量：一个是保存的，两个是临时的。\n\n**先猜**：整个峰值由哪些部分相加而成？"}
# ## 1.6 The logits, and the whole peak / logits，以及整个峰值
#
# <div lang="en">
#
# One part is missing: the head. It makes logits, one number for every word of the vocabulary at every position. The loss keeps the result of their log-softmax. The logits themselves are gone by then. At the start of backward the gradient of the log-softmax is made, and from that the gradient of the logits: **three tensors of one size**, one kept and two temporary. (Where a head upcasts bf16 logits to fp32, there are more.)
#
# The head keeps little else: the last LayerNorm's input and statistics, and the head's own input.
#
# **Exercise 3.** Add up the whole peak of the step, in bytes: what is there at the start of backward? You have every part.
#
# </div>
# <div lang="zh">
#
# 还差一部分：输出头。它产生 logits，每个位置对词表里的每个词各有一个数。损失只保存 log-softmax 的结果，logits 本身随即释放。反向一开始，先求出 log-softmax 的梯度，再由它算出 logits 的梯度：**三个一样大的张量**，一个是保存的，两个是临时的。（如果输出头把 bf16 的 logits 转成 fp32，还会更多。）
#
# 除此之外，这里保存的很少：最后一个 LayerNorm 的输入和统计量，以及输出头自己的输入。
#
# **练习 3。** 算出这一步的整个峰值，以字节计：反向刚开始时有哪些字节？把各部分加起来，你手上都有了。
#
# </div>

# %% minutes=10
my_sum = None  # bytes
lesson_01.check_whole_peak(my_sum)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not lesson_01.check_whole_peak.accepted:
    b, s, h, v = 8, 128, 256, 2048
    logits = 4 * s * b * v
    norm, head = 4 * s * b * h + 4 * 2 * s * b, 4 * s * b * h  # inputs, and the norm's statistics
    state = left["parameter"] + left["optimizer"]
    my_sum = state + 8 * sum(one_layer.values()) + norm + head + 3 * logits

lesson_01.check_whole_peak(my_sum)
### END SOLUTION

# %% slide="result"
predictions([("the whole peak", my_sum, meter.peak_bytes)], unit="bytes")

# %% [markdown] slide={"en": "The 8 bytes are the loss and its gradient.\n\nA vocabulary of 2048: logits make 9% of the peak. And a real one?", "zh": "这 8 个字节是损失和它的梯度。\n\n词表只有 2048 时，logits 占峰值的 9%。真实的词表呢？"}
# <div lang="en">
#
# The 8 bytes are the loss and its gradient: two numbers. With a vocabulary of 2048, 9% of this peak belongs to the logits. Real ones are larger:
#
# </div>
# <div lang="zh">
#
# 这 8 个字节是损失和它的梯度：两个数。词表只有 2048 时，logits 占峰值的 9%。真实的词表要大得多：
#
# </div>

# %% slide="result"
rows = []
for vocabulary in (2048, 8192, 32768):
    with symbolic():
        model = make_decoder(vocabulary=vocabulary)
        with MemoryMeter(model) as found:
            model.loss(random_tokens(8, 128, vocabulary)).backward()
    logits, peak = 4 * 8 * 128 * vocabulary, found.peak_bytes
    sizes = [round(count / 1e6, 1) for count in (peak, logits)]
    rows.append((vocabulary, *sizes, f"{3 * logits / peak:.0%}"))
headings = ["vocabulary", "peak without optimizer, MB", "logits, MB", "three of them, of the peak"]
table(headings, rows)

# %% [markdown]
# <div lang="en">
#
# With 32768 words nearly two thirds of the peak belong to one matrix product and its loss, and the eight layers share the rest with the weights. Lesson 02 computes this loss in pieces, so that the logits never exist whole.
#
# </div>
# <div lang="zh">
#
# 词表为 32768 时，峰值的将近三分之二属于一次矩阵乘法和它的损失，余下的才归八层和权重。第 02 课会把这个损失分段计算，让完整的 logits 从不出现。
#
# </div>

# %% [markdown] slide={"en": "Shapes without data: no memory is taken.\n\n**Guess first.** 7 B model: 105.3 GB at 16 bytes a parameter, activations 8.8 GB. The peak?", "zh": "只有形状、没有数据：内存也不占用。\n\n**先猜**：7 B 模型，每个参数 16 字节，共 105.3 GB；激活值 8.8 GB。峰值是多少？"}
# ## 1.7 Seven billion parameters on this laptop / 在这台电脑上算 70 亿参数
#
# <div lang="en">
#
# `symbolic()` is PyTorch's `FakeTensorMode` with storages that the meter can count. Nothing is computed, no memory is taken, and every operator of the real step goes by. The recipe here: mixed-precision Adam, one sequence of 2048 tokens, fused attention (`F.scaled_dot_product_attention`, which does not keep P).
#
# **Guess first.** With 6.6 billion parameters at 16 bytes each, 105.3 GB, and 8.8 GB of activations at most: what is the peak, and in which phase?
#
# </div>
# <div lang="zh">
#
# `symbolic()` 就是 PyTorch 的 `FakeTensorMode`，只是计量器能数出其中的存储区。什么都不计算，内存也不占用，而真实训练步的每个算子都会走一遍。这里的配方是：混合精度的 Adam，一条 2048 个 token 的序列，融合注意力（`F.scaled_dot_product_attention`，它不保存 P）。
#
# **先猜**：66 亿个参数，每个 16 字节，共 105.3 GB；激活值最多 8.8 GB。峰值是多少？在哪个阶段？
#
# </div>

# %%
my_giant_peak = None  # of 7 B, in bytes, such as 114e9
shapes = {"1 B": (2048, 16, 18), "7 B": (4096, 32, 32), "70 B": (8192, 64, 80)}  # h, a, layers
giants = {name: lesson_01.mixed_precision_step(*shape) for name, shape in shapes.items()}

# %% slide="result"
rows = []
for name, giant in giants.items():
    counts = (16 * giant.parameters, giant.most_activation_bytes, giant.peak_bytes)
    rows.append((name, *(round(count / 1e9, 1) for count in counts), giant.phase))
table(["model", "16 bytes a parameter, GB", "most activations, GB", "peak, GB", "peak in"], rows)

# %%
predictions([("7 B", my_giant_peak, giants["7 B"].peak_bytes)], unit="GB")

# %% [markdown] slide={"en": "The activations of the 7 B model add nothing to this peak.\n\nSo it is for a loop over parameters, and one sequence.", "zh": "7 B 模型的激活值，对这个峰值毫无影响。\n\n这是逐个参数循环更新、只有一条序列时的结论。"}
# <div lang="en">
#
# The activations of the 7 B model add nothing to the peak: they are gone before the last gradients have come, and the peak waits in the optimizer, above the 16 bytes by three fp32 temporaries of the largest parameter. With the small model it is the other way round.
#
# This holds for this recipe, a loop over parameters, and one sequence. No step of the largest model has ever run on this machine, and yet its bytes are counted operator by operator.
#
# </div>
# <div lang="zh">
#
# 7 B 模型的激活值对峰值毫无影响：最后几个梯度还没到，它们就已释放；峰值要到优化器里才出现，只比 16 字节的部分多三个 fp32 临时张量，大小与最大的参数相同。模型小的那一行，情形正相反。
#
# 这只是这个配方（逐个参数循环更新）、一条序列时的结论。最大的模型从未在这台机器上真正跑过一步，它的字节却逐个算子数清了。
#
# </div>

# %% [markdown] slide={"en": "The same questions, asked with PyTorch alone.", "zh": "同样的问题，只用 PyTorch 来问。"}
# ## 1.8 What you type / 你会敲的代码
#
# <div lang="en">
#
# The same questions, asked with PyTorch alone. The first two run anywhere, the second through **hooks**, functions of yours that autograd calls for each tensor it saves; the others need a GPU and are not run here (section 1.20 measures them where there is one).
#
# </div>
# <div lang="zh">
#
# 同样的问题，只用 PyTorch 来问。前两种在哪里都能跑，第二种用的是**钩子**（hook）：由你写、autograd 每保存一个张量就调用一次的函数；其余的需要 GPU，这里没有运行（有 GPU 时，1.20 节会测量）。
#
# </div>

# %% slide="both"
from torch.distributed._tools.mem_tracker import MemTracker

decoder.zero_grad()
tracker = MemTracker()
tracker.track_external(decoder, adam)
with tracker:
    decoder.loss(tokens).backward()
    adam.step()
tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]  # with 8,256 bytes of tokens

# %%
packed = []


def pack(tensor):
    packed.append(tensor.nbytes)
    return tensor


with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
    decoder.loss(tokens)
len(packed), sum(packed)  # tensors, not storages, and the parameters among them

# %% [markdown]
# <div lang="en">
#
# | question | on a GPU |
# |---|---|
# | most bytes allocated so far | `torch.cuda.max_memory_allocated()` |
# | bytes taken from the driver, free blocks included | `torch.cuda.memory_reserved()` |
# | who allocated what, with stack traces | `torch.cuda.memory._record_memory_history()`, the step, `torch.cuda.memory._dump_snapshot("step.pickle")`, then the viewer at pytorch.org/memory_viz |
# | bytes by operator | `torch.profiler.profile(profile_memory=True)` |
#
# </div>
# <div lang="zh">
#
# | 问题 | 在 GPU 上 |
# |---|---|
# | 迄今最多分配了多少字节 | `torch.cuda.max_memory_allocated()` |
# | 向驱动要来多少字节（含空闲块） | `torch.cuda.memory_reserved()` |
# | 谁分配了什么，连同调用栈 | `torch.cuda.memory._record_memory_history()`，运行这一步，`torch.cuda.memory._dump_snapshot("step.pickle")`，再用 pytorch.org/memory_viz 查看 |
# | 按算子统计的字节 | `torch.profiler.profile(profile_memory=True)` |
#
# </div>

# %% [markdown] slide={"en": "Three sentences that people meet. Hands up before each row: true, partly, or false?", "zh": "三句常见的说法。看每一行之前先举手：对，对一部分，还是不对？"}
# ## 1.9 What you may have read / 你可能读到过的说法
#
# <div lang="en">
#
# Three sentences that people meet, each tried on this step. For the second: mixed precision, that is `torch.autocast` in bf16, the weights in fp32 (section 1.13 has all in bf16); symbolically, since many CPUs are slow in bf16.
#
# </div>
# <div lang="zh">
#
# 三句常见的说法，都拿这一步来检验。第二句用混合精度，即 bf16 的 `torch.autocast`，权重仍是 fp32（全用 bf16 的见 1.13 节）；这里用符号张量来数，因为许多 CPU 算 bf16 很慢。
#
# </div>

# %%
from course_lib.lessons import what_you_may_have_read
from course_lib.memory import measure

with symbolic():
    mixed, batch = make_decoder(), random_tokens(8, 128, 2048)
    mixed_adam = torch.optim.Adam(mixed.parameters())

    def autocast_step():
        with torch.autocast("cpu", torch.bfloat16):
            loss = mixed.loss(batch)
        loss.backward()
        mixed_adam.step()

    autocast = measure(autocast_step, model=mixed, optimizer=mixed_adam)

# %% slide="result"
forward = meter.timeline[meter.phases().index("backward") - 1].live_bytes
added = sum(left[kind] for kind in mine) + int(meter.series()["activation"].max())
what_you_may_have_read("01", *lesson_01.figures_of_claims(meter, added, autocast, forward))

# %% [markdown] slide={"en": "The same step of the same decoder, one technique a row.\n\nWhich of the parts would you attack first?", "zh": "同一个解码器的同一步，一种技术一行。\n\n这些部分，你先对付哪一个？"}
# ## 1.10 The ledger / 账本
#
# <div lang="en">
#
# Every lesson ends with its row: the same step of the same decoder, with one technique alone. And here is the peak of the plain step once more, cut into the parts that you have predicted, with the lesson that goes for each.
#
# </div>
# <div lang="zh">
#
# 每一课都以一行账结束：同一个解码器的同一步，只用一种技术。下面再把普通一步的峰值拆成你预测过的各个部分，并写明哪一课来对付它。
#
# </div>

# %% slide="result"
ledger("01", "autocast, bf16", autocast)

# %% jupyter={"source_hidden": true} slide="result"
lesson_01.parts_of_the_peak(meter, one_layer)

# %% [markdown] slide={"en": "Count storages. Gradients come as activations go.\n\nA layer keeps $16 s b h + a s^2 b$ elements; the head holds three tensors of the logits' size.", "zh": "要数存储区。激活值释放，梯度才到来。\n\n一层保存 $16 s b h + a s^2 b$ 个元素，输出头占着三个与 logits 一样大的张量。"}
# ## 1.11 Summary / 小结
#
# <div lang="en">
#
# - Parameters, gradients and optimizer state don't depend on the batch: 16 bytes a parameter with Adam, in fp32 and in the mixed precision of large models. Activations do.
# - The kinds are not all there at once. Gradients come as activations go, so the peak lies where one of them is still whole: here at the start of backward, for a large model with one sequence in the optimizer.
# - Count storages, not tensors.
# - One layer of this decoder keeps $16 s b h + a s^2 b$ elements and its statistics. P outweighs the rest from $s = 16 h / a$ on.
# - The head holds three tensors of the logits' size at the peak.
#
# **Next:** [lesson 02](02_checkpointing.ipynb) forgets activations and computes them again.
#
# </div>
# <div lang="zh">
#
# - 参数、梯度和优化器状态与批次无关：用 Adam 时每个参数 16 字节，fp32 如此，大模型常用的混合精度也如此。激活值则随批次变化。
# - 各类字节并非同时都在。激活值释放，梯度才陆续到来，所以峰值出现在其中一方还完整的时候：这里是反向刚开始时，而只有一条序列的大模型则是在优化器里。
# - 要数存储区，不要数张量。
# - 这个解码器的一层保存 $16 s b h + a s^2 b$ 个元素，外加统计量。从 $s = 16 h / a$ 起，P 比其余的都大。
# - 峰值时，输出头占着三个与 logits 一样大的张量。
#
# **下一步**：[第 02 课](02_checkpointing.ipynb)忘掉激活值，再重新算出来。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **Sources.** Korthikanti et al. 2022, *Reducing Activation Recomputation in Large Transformer Models*, arXiv:2205.05198 (the formula). Rajbhandari et al. 2020, *ZeRO*, arXiv:1910.02054 (16 bytes a parameter). PyTorch documentation, *Understanding CUDA Memory Usage*. All measurements: `course_lib.memory`, in this notebook.
#
# </div>
# <div lang="zh">
#
# **出处。** Korthikanti et al. 2022，*Reducing Activation Recomputation in Large Transformer Models*，arXiv:2205.05198（公式）。Rajbhandari et al. 2020，*ZeRO*，arXiv:1910.02054（每个参数 16 字节）。PyTorch 文档 *Understanding CUDA Memory Usage*。全部测量都由本 notebook 用 `course_lib.memory` 完成。
#
# </div>

# %% [markdown]
# ## In depth / 深入
#
# <div lang="en">
#
# From here on nothing is needed for the other lessons. Each section stands alone; it uses the names that the sections above have defined.
#
# </div>
# <div lang="zh">
#
# 以下内容学其他课时都用不到。各节互相独立，只用到前面正文里定义过的名字。
#
# </div>

# %% [markdown]
# ## 1.12 Recipes of Adam / Adam 的几种配方
#
# <div lang="en">
#
# A loop over parameters needs temporaries as large as one parameter. `foreach=True`, PyTorch's default on CUDA, treats all parameters at once and makes a temporary as large as all of them: in fp32 4 bytes a parameter more, 28 GB for 7 billion. `fused=True` needs none. Here is the most that is live during `step()`:
#
# </div>
# <div lang="zh">
#
# 逐个参数循环更新时，临时张量只有一个参数那么大。`foreach=True` 是 PyTorch 在 CUDA 上的默认做法，它一次处理全部参数，要有一份与全部参数一样大的临时张量：fp32 时每个参数多 4 字节，70 亿个参数就是 28 GB。`fused=True` 一份也不要。下面是 `step()` 期间最多存活的字节：
#
# </div>

# %%
rows = []
for name in ("loop", "foreach", "fused"):
    model = make_decoder()
    chosen = {} if name == "loop" else {name: True}
    update = torch.optim.Adam(model.parameters(), **chosen)
    found = metered_step(model, random_tokens(1, 128, 2048), update)
    in_step = max(sample.live_bytes for sample in found.timeline if sample.phase == "optimizer")
    rows.append((name, in_step, round(in_step / (4 * 6_875_648), 2), found.peak_bytes))
headings = ["Adam", "most in step(), bytes", "of the parameters", "peak, one sequence"]
table(headings, rows)

# %% [markdown]
# <div lang="en">
#
# With one sequence, `foreach` alone moves the peak into the optimizer and raises it by a fifth. Lower than 16 bytes a parameter go: 8-bit states (2 bytes in place of 8), an update inside backward (no gradients kept, lesson 05), adapters (next section), and sharding (lesson 08).
#
# </div>
# <div lang="zh">
#
# 只有一条序列时，单是 `foreach` 就把峰值移到了优化器里，还抬高了五分之一。也有每个参数不到 16 字节的做法：8 位的状态（2 字节代替 8 字节）、在反向中就更新（不保留梯度，第 05 课）、适配器（下一节），以及分片（第 08 课）。
#
# </div>

# %% [markdown]
# ## 1.13 Half precision, and adapters / 半精度与适配器
#
# <div lang="en">
#
# `torch.autocast` leaves weights, gradients and states in fp32 and makes bf16 copies of the weights in forward; only activations shrink, and not all: LayerNorm and the loss keep fp32 (on a GPU softmax does, too). Weights in bf16 halve everything, but without fp32 master weights small updates are lost to rounding. LoRA (Hu et al. 2021, arXiv:2106.09685) trains two thin matrices beside each frozen one: gradients and states all but vanish, and of the activations only what frozen matrices would need for their own gradients.
#
# </div>
# <div lang="zh">
#
# `torch.autocast` 让权重、梯度和状态留在 fp32，前向时另造一份 bf16 的权重；变小的只有激活值，而且不是全部：LayerNorm 和损失的仍是 fp32（在 GPU 上，softmax 的也是）。权重也用 bf16，一切都减半，但没有 fp32 主权重，小的更新会被舍入掉。LoRA（Hu et al. 2021，arXiv:2106.09685）在每个冻结的矩阵旁训练两个很窄的矩阵：梯度和状态几乎消失，激活值则只省下冻结矩阵为求自己的梯度才需要的那部分。
#
# </div>

# %%
from course_lib.memory import cast

with symbolic():  # many CPUs are slow in bf16
    model, batch = cast(make_decoder(), torch.bfloat16), random_tokens(8, 128, 2048)
    all_bf16 = metered_step(model, batch, torch.optim.Adam(model.parameters()))
model = lesson_01.with_adapters(make_decoder(), rank=8)
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
adapters = metered_step(model, tokens, torch.optim.Adam(trained))
arms = {"plain": meter, "autocast, bf16": autocast, "all bf16, no master weights": all_bf16}
arms["LoRA, rank 8, on attention"] = adapters
rows = [(name, round(arm.peak_bytes / 1e6, 1)) for name, arm in arms.items()]
table(["recipe", "peak, MB"], rows)

# %% [markdown]
# <div lang="en">
#
# **Exercise 4.** A model of 7 billion parameters is frozen in bf16, and adapters of 20 million parameters are trained with Adam, all in fp32. How many bytes do weights, gradients and state take together?
#
# </div>
# <div lang="zh">
#
# **练习 4。** 一个 70 亿参数的模型以 bf16 冻结，另用 Adam 训练 2000 万个参数的适配器，适配器全部用 fp32。权重、梯度和优化器状态共占多少字节？
#
# </div>

# %% minutes=3
answer = None  # bytes
lesson_01.check_adapter_bytes(answer)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not lesson_01.check_adapter_bytes.accepted:
    frozen, trained = 7_000_000_000, 20_000_000
    answer = 2 * frozen + (4 + 4 + 8) * trained

lesson_01.check_adapter_bytes(answer)
### END SOLUTION

# %% [markdown]
# ## 1.14 A formula holds for its operators / 公式只管它那些算子
#
# <div lang="en">
#
# The formula of Korthikanti et al. against a layer with dropout, in bf16 and fp32, with the norms before (pre-norm) and after (post-norm). They leave out the LayerNorm statistics; with them it is exact. The statistics are bf16 on this CPU for a bf16 layer, and fp32 on a GPU.
#
# </div>
# <div lang="zh">
#
# 拿 Korthikanti 等人的公式，对照带 dropout 的一层：bf16 和 fp32，归一化在前（pre-norm）和在后（post-norm）。他们略去了 LayerNorm 的统计量，补上之后分毫不差。bf16 的层，统计量在这里的 CPU 上是 bf16，在 GPU 上是 fp32。
#
# </div>

# %%
from course_lib.memory import transformer_activation_bytes

sizes, rows = {"sequence": 512, "batch": 1, "hidden": 512, "heads": 8}, []
arms = {"pre-norm, `bfloat16`": True, "post-norm, `bfloat16`": False, "pre-norm, `float32`": True}
for name, norm_first in arms.items():
    dtype = torch.float32 if "float32" in name else torch.bfloat16
    layer = DecoderLayer(512, 8, dropout=0.1, norm_first=norm_first).to(dtype)
    measured = saved_tensors(layer, torch.randn(1, 512, 512, dtype=dtype)).total_bytes
    width = dtype.itemsize
    predicted = transformer_activation_bytes(**sizes, dtype_bytes=width, statistic_bytes=width)
    rows.append((name, predicted, measured))
predictions(rows, unit="bytes")

# %% [markdown]
# <div lang="en">
#
# This layer's dropout is `native_dropout`, whose mask takes one byte an element, as on GPUs. On a CPU `F.dropout` keeps ready-made factors instead, in the activations' own dtype:
#
# </div>
# <div lang="zh">
#
# 这一层的 dropout 用的是 `native_dropout`，掩码每个元素一字节，与 GPU 上相同。CPU 上的 `F.dropout` 则保存算好的系数，dtype 与激活值相同：
#
# </div>


# %%
class FactorDropout(torch.nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.1)


layer = DecoderLayer(512, 8, dropout=0.1).to(torch.bfloat16)
attention = layer.attention
attention.drop_probabilities = attention.drop_output = layer.feedforward[3] = FactorDropout()
factors = saved_tensors(layer, torch.randn(1, 512, 512, dtype=torch.bfloat16)).total_bytes
booleans = transformer_activation_bytes(**sizes, statistic_bytes=2)
predicted = transformer_activation_bytes(**sizes, mask_bytes=2, statistic_bytes=2)
rows = [("one byte a mask's element", booleans, factors), ("two bytes", predicted, factors)]
predictions(rows, unit="bytes")

# %% [markdown]
# ## 1.15 What attention keeps / 注意力保存了什么
#
# <div lang="en">
#
# Attention alone, 12 heads of 64, over sequence lengths. The attention scores S are not kept: softmax needs only P for its gradient. And P is seen twice, so who adds up tensors counts it twice. The fused kernel keeps Q, K, V, the output and one number a row.
#
# </div>
# <div lang="zh">
#
# 只看注意力：12 个头，头维度 64，改变序列长度。注意力分数 S 并不保存：softmax 求梯度只用到 P。P 会出现两次，逐个张量相加就会把它算两遍。融合核函数保存的是 Q、K、V、输出，以及每行一个数。
#
# </div>


# %%
def standard(q, k, v):
    return (q @ k.mT * 64**-0.5).softmax(dim=-1) @ v


rows = []
for s in (512, 1024, 2048, 4096):
    with symbolic():
        qkv = [torch.randn(1, 12, s, 64, requires_grad=True) for _ in range(3)]
        plain = saved_tensors(standard, *qkv).total_bytes
        fused = saved_tensors(F.scaled_dot_product_attention, *qkv).total_bytes
    with_scores = plain + 4 * 12 * s * s
    rows.append((s, *(round(count / 1e6, 1) for count in (plain, with_scores, fused))))
table(["tokens", "standard, MB", "if S were kept, MB", "fused, MB"], rows)

# %% [markdown]
# ## 1.16 A memory monitor / 内存监视器
#
# <div lang="en">
#
# Monitors in training scripts print a figure after each phase. The meter's `live_bytes` does it on any machine.
#
# </div>
# <div lang="zh">
#
# 训练脚本里的监视器会在每个阶段之后打印一个数。用计量器的 `live_bytes`，在任何机器上都能做到。
#
# </div>

# %%
model, rows = make_decoder(), []
optimizer = torch.optim.Adam(model.parameters())
with MemoryMeter(model, optimizer) as monitor:
    for number in (1, 2, 3):
        readings = [number, monitor.live_bytes / 1e6]
        loss = model.loss(tokens)
        readings.append(monitor.live_bytes / 1e6)
        loss.backward()
        readings.append(monitor.live_bytes / 1e6)
        optimizer.step()
        readings.append(monitor.live_bytes / 1e6)
        optimizer.zero_grad()
        rows.append([*readings, monitor.live_bytes / 1e6])

# %%
rounded = [[round(reading, 1) for reading in row] for row in rows]
headings = ["step", "before, MB", "forward, MB", "backward, MB", "step(), MB", "zero_grad(), MB"]
table(headings, rounded)

# %% [markdown]
# <div lang="en">
#
# The same forward pass reads 55.0 MB less in the first step than ever after: Adam's state is made at the end of step 1. And no reading between phases sees the peak, which lies inside backward.
#
# </div>
# <div lang="zh">
#
# 同样的前向，第一步的读数比以后少 55.0 MB：Adam 的状态在第 1 步末尾才建立。峰值在反向之中，在阶段之间读数永远看不到它。
#
# </div>

# %% [markdown]
# ## 1.17 How to compare fairly / 怎样公平地比较
#
# <div lang="en">
#
# "Run plain first, then the other, and compare the growth." Compare a network with itself in this way; a method that can be trusted finds no difference. The network: a deep MLP, 84 MB of weights, a batch of 32.
#
# </div>
# <div lang="zh">
#
# “先跑普通的，再跑另一个，比较增量。”用这个办法拿一个网络与它自己比较；靠得住的方法不该看出差别。网络是一个深层 MLP：权重 84 MB，批次大小 32。
#
# </div>

# %%
from course_lib.models import deep_mlp

mlp, x = deep_mlp(depth=20, width=1024), torch.randn(32, 1024)
optimizer = torch.optim.Adam(mlp.parameters())


def mlp_step():
    mlp(x).square().mean().backward()
    optimizer.step()


# %%
growth = []
for _ in range(2):
    mlp.zero_grad()
    with MemoryMeter(mlp, optimizer) as found:
        before = found.live_bytes
        mlp_step()
    growth.append(found.peak_bytes - before)
fair = [measure(mlp_step, model=mlp, optimizer=optimizer, repeats=1).peak_bytes for _ in range(2)]
rows = [("growth", *growth), ("`measure`", *fair)]
table(["method", "first run, bytes", "second run, bytes"], rows)

# %% [markdown]
# <div lang="en">
#
# Doing nothing "saves" 65%: the first run pays for Adam's state. Where the peak lies in backward, as the decoder's does, the same mistake goes unnoticed, which makes it worse. `measure` brings every arm into the same state before it counts. (The 20 pairs of Linear and GELU keep 40 activations, not 20: each keeps its own input.)
#
# </div>
# <div lang="zh">
#
# 什么都没做，就“省”了 65%：建立 Adam 状态的开销全算在了第一次头上。如果峰值像解码器那样在反向里，同样的错误就不会露馅，反而更糟。`measure` 先让各方处于同样的状态再计数。（20 对 Linear 和 GELU 保存 40 个激活值，不是 20 个：两者各存自己的输入。）
#
# </div>

# %%
qkv = [torch.randn(1, 12, 512, 64, requires_grad=True) for _ in range(3)]
attention, activations = saved_tensors(standard, *qkv), saved_tensors(mlp, x)
lesson_01.older_claims(growth, attention.total_bytes, activations.total_bytes / x.nbytes)

# %% [markdown]
# ## 1.18 What the meter leaves out / 计量器没有数的部分
#
# <div lang="en">
#
# The meter counts tensors. An operator may also take **workspace**, used and freed inside itself. For the decoder there is next to none. For convolutions there is a lot, and how much depends on the machine; so do seconds. `measure` always reports both, and stored outputs of this course compare tensors only.
#
# </div>
# <div lang="zh">
#
# 计量器数的是张量。算子还可能申请**工作区**，在自己内部用完就释放。解码器几乎没有工作区；卷积的工作区则很大，大小因机器而异，秒数也是如此。`measure` 总是两者都报告，而本课程对照已存的输出时只比较张量。
#
# </div>

# %%
images = torch.randn(8, 3, 64, 64)
layers = [torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Conv2d(16, 16, 3, stride=2)]
convolutions = torch.nn.Sequential(*layers)


def decoder_step():
    decoder.loss(tokens).backward()
    adam.step()


def convolution_step():
    convolutions(images).square().mean().backward()


arms = {
    "decoder": measure(decoder_step, model=decoder, optimizer=adam),
    "convolutions": measure(convolution_step, model=convolutions),
}

# %% tags=["nbval-ignore-output", "shows-seconds"]
from course_lib.teaching import compare

compare(arms, seconds=True, workspace=True)

# %% [markdown]
# ## 1.19 Who measures, changes / 测量会改变被测者
#
# <div lang="en">
#
# Where two gradients of one tensor meet, autograd adds the second into the first, in place. While any dispatch mode is active it makes a new tensor for the sum. `MemoryMeter` knows this and counts as autograd alone would have done; the fifteen lines of section 1.2 don't. A weight used four times:
#
# </div>
# <div lang="zh">
#
# 同一个张量的两份梯度相遇时，autograd 会把后一份原地加进前一份。而只要有分发模式在起作用，它就会为这个和新建一个张量。`MemoryMeter` 知道这一点，按没有模式时的情形来数；1.2 节的十五行则不知道。一个权重用四次：
#
# </div>

# %%
weight, x = torch.randn(512, 1024, requires_grad=True), torch.randn(64, 512)


def shared_weight():
    weight.grad = None
    sum((x @ weight).sum() for _ in range(4)).backward()


with TinyMeter() as tiny:
    shared_weight()
weight.grad = None
with MemoryMeter() as full:
    shared_weight()
allocator = measure(shared_weight, repeats=1).allocator_peak_bytes
rows = [("TinyMeter", tiny.peak), ("MemoryMeter", full.peak_bytes)]
table(["meter", "peak, bytes"], [*rows, ("allocator, no mode", allocator)])

# %% [markdown]
# <div lang="en">
#
# The allocator is nearer to `MemoryMeter`; what it has more is workspace of a matrix product (section 1.18).
#
# </div>
# <div lang="zh">
#
# 分配器的数更接近 `MemoryMeter`；多出来的是矩阵乘法的工作区（见 1.18 节）。
#
# </div>

# %% [markdown]
# ## 1.20 On a GPU / 在 GPU 上
#
# <div lang="en">
#
# On a GPU the caching allocator manages the memory and keeps its own books: `torch.cuda.memory_allocated` counts tensors, rounded up to 512 bytes, and workspace; `memory_reserved` is what it has taken from the driver, free blocks included. With a GPU this cell measures now; otherwise it shows a recording, or says that there is none.
#
# </div>
# <div lang="zh">
#
# 在 GPU 上，显存由缓存分配器管理，它另有一本账：`torch.cuda.memory_allocated` 计入张量（向上取整到 512 字节的整数倍）和工作区；`memory_reserved` 是它向驱动要来的总量，包括空闲块。有 GPU 时，这个单元格会现场测量；没有 GPU，就显示预先记录的数据；连记录也没有，会注明。
#
# </div>

# %% tags=["nbval-ignore-output", "shows-device"]
from course_lib.lessons import on_gpu

on_gpu("01")

# %% [markdown]
# ## 1.21 Play / 玩一玩
#
# <div lang="en">
#
# The formula with dropout, $34 s b h + 5 a s^2 b$ bytes a layer: 32 layers, hidden size 4096, bf16, one sequence. Run the second cell below and move its sliders: at what length does the parabola hold half of the bytes? With dropout P counts more, so it is not $16 h / a$.
#
# </div>
# <div lang="zh">
#
# 带 dropout 的公式，每层 $34 s b h + 5 a s^2 b$ 字节：32 层、隐藏维度 4096、bf16、一条序列。运行下面第二个单元格，拖动滑块：序列多长时，抛物线占到一半？带 dropout 时 P 的分量更重，所以不是 $16 h / a$。
#
# </div>

# %%
lesson_01.draw_activation_bytes()

# %% tags=["nbval-ignore-output", "shows-picture"]
lesson_01.activation_playground()

# %% [markdown]
# ## 1.22 More exercises / 更多练习
#
# <div lang="en">
#
# **Exercise 5.** The decoder, trained with Adam, may use 500 MB. What is the largest batch of 128-token sequences? Two measurements are enough: one for what doesn't grow, one for what a sequence adds.
#
# </div>
# <div lang="zh">
#
# **练习 5。** 这个解码器用 Adam 训练，限用 500 MB。批次最多能有多少条长度为 128 的序列？测两次就够：一次得出不随批次增长的部分，一次得出每多一条序列增加多少。
#
# </div>

# %% minutes=6
answer = None  # sequences
lesson_01.check_largest_batch(answer)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not lesson_01.check_largest_batch.accepted:
    peaks = []
    for size in (4, 8):
        with symbolic():
            model, batch = make_decoder(), random_tokens(size, 128, 2048)
            found = metered_step(model, batch, torch.optim.Adam(model.parameters()))
        peaks.append(found.peak_bytes)
    each = (peaks[1] - peaks[0]) // 4
    answer = 4 + (500_000_000 - peaks[0]) // each

lesson_01.check_largest_batch(answer)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# **Exercise 6.** Many recent models use a SwiGLU feed-forward network: `down(F.silu(gate(x)) * up(x))`. Predict the bytes that it saves for 512 tokens, 256 features and 1024 inside, in fp32. Then build it and let `saved_tensors` decide.
#
# </div>
# <div lang="zh">
#
# **练习 6。** 许多新模型使用 SwiGLU 前馈（feed-forward）网络：`down(F.silu(gate(x)) * up(x))`。输入为 512 个 token、隐藏维度 256，内部宽度为 1024，dtype 为 fp32，请预测它保存多少字节。然后把它搭出来，让 `saved_tensors` 判定。
#
# </div>

# %% minutes=6
answer = None  # bytes
lesson_01.check_swiglu_bytes(answer)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not lesson_01.check_swiglu_bytes.accepted:
    # x once; and, 1024 wide: SiLU's input, the product's two factors, the last projection's input.
    answer = 4 * 512 * (256 + 4 * 1024)
    gate, up, down = (torch.nn.Linear(*shape) for shape in ((256, 1024), (256, 1024), (1024, 256)))
    swiglu = saved_tensors(lambda x: down(F.silu(gate(x)) * up(x)), torch.randn(512, 256))
    assert swiglu.total_bytes == answer

lesson_01.check_swiglu_bytes(answer)
### END SOLUTION
