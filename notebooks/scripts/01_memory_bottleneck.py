# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 1 Where do the bytes of a training step go? / 训练步的字节去了哪里？
#
# <div lang="en">
#
# A model with 7 billion parameters weighs 14 GB in bf16. It fits on a 24 GB card, with 10 GB to spare. To train it, a step needs 112 GB, however small the batch. Nobody has wasted anything.
#
# Where do the other 98 GB come from? And what does a larger batch add?
#
# </div>
# <div lang="zh">
#
# 一个 70 亿参数的模型，用 bf16 存放要占 14 GB，24 GB 的显卡装得下，还剩 10 GB。可要训练它，批次再小，一步也要占 112 GB，而且没有哪个字节是浪费的。
#
# 另外的 98 GB 从哪里来？批次变大又要添多少？
#
# </div>

# %%
from course_lib.teaching import language

language()

# %% [markdown]
# <div lang="en">
#
# **Goals** (90 minutes). Name the kinds of bytes in a training step and say when each lives. Build a memory meter in fifteen lines. Predict, to the byte, what a transformer layer saves for backward. Know which popular rules about memory are wrong.
#
# **What to know before**: how to train a network in PyTorch. Lesson 00 shows how a lesson works. MB means $10^6$ bytes, MiB $2^{20}$.
#
# </div>
# <div lang="zh">
#
# **目标**（90 分钟）：说出训练步里有哪几种字节、各自何时存活；用十五行代码做一个内存计量器；预测一层 transformer 为反向保存多少字节，做到一字节不差；分清关于内存的流行说法里哪些是错的。
#
# **预备知识**：会用 PyTorch 训练网络。第 00 课讲了每一课怎么上。MB 指 $10^6$ 字节，MiB 指 $2^{20}$ 字节。
#
# </div>

# %%
import weakref

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# %% [markdown]
# ## 1.1 What no batch changes / 与批次无关的字节
#
# <div lang="en">
#
# Three kinds of bytes don't depend on the data: **parameters**, their **gradients**, and the **optimizer state**. Mixed-precision Adam keeps the weight and its gradient in bf16, 2 bytes each, and three fp32 numbers in the optimizer: the master weight and two moments, 4 bytes each.
#
# That makes $2 + 2 + 4 + 4 + 4 = 16$ bytes a parameter. Plain fp32 Adam takes 16 as well, split differently: mixed precision saves nothing here. It pays off in activations and in speed.
#
# </div>
# <div lang="zh">
#
# 有三种字节与数据无关：**参数**、它们的**梯度**，以及**优化器状态**。混合精度的 Adam 用 bf16 存权重和梯度，各 2 字节；优化器里还有三个 fp32 数：主权重和一阶、二阶两个矩，各 4 字节。
#
# 一共是每个参数 $2 + 2 + 4 + 4 + 4 = 16$ 字节。全 fp32 的 Adam 也是 16 字节，只是分法不同：混合精度在这里一点也不省，它的好处在激活值和速度上。
#
# </div>
# %%
from course_lib.memory import MemoryMeter, measure, saved_tensors, symbolic, training_state_bytes
from course_lib.models import Decoder, DecoderLayer, deep_mlp, random_tokens
from course_lib.teaching import figure, predicted_and_measured, predictions, table, text, timelines

rows = []
for recipe in ("fp32-sgd", "fp32-adam", "mixed-adam"):
    state = training_state_bytes(7_000_000_000, recipe)
    rows.append((recipe, *(count // 10**9 for count in state.values()), sum(state.values()) // 10**9))
headings = [("recipe", "配方"), ("parameters, GB", "参数，GB"), ("gradients, GB", "梯度，GB")]
table([*headings, ("optimizer, GB", "优化器，GB"), ("sum, GB", "合计，GB")], rows)

# %% [markdown]
# <div lang="en">
#
# Check it on something that fits. This decoder has 4.2 million parameters; it is the one that this lesson watches. Two steps of fp32 Adam, then look at what is left.
#
# </div>
# <div lang="zh">
#
# 拿一个装得下的模型验证一下。这个解码器有 420 万个参数，本课观察的就是它。用 fp32 的 Adam 训练两步，看看留下了什么。
#
# </div>


# %%
def make_decoder(**changes):
    return Decoder(**{"vocabulary": 4096, "hidden": 256, "heads": 8, "layers": 4, "sequence": 128, **changes})


def train_step(decoder, adam, tokens):
    decoder.zero_grad()
    decoder.loss(tokens).backward()
    adam.step()


decoder, tokens = make_decoder(), random_tokens(batch=4, sequence=128, vocabulary=4096)  # tokens (4, 129)
adam = torch.optim.Adam(decoder.parameters())
for _ in range(2):
    with MemoryMeter(decoder, adam) as meter:
        train_step(decoder, adam, tokens)

# %%
count = sum(parameter.numel() for parameter in decoder.parameters())
expected, left = training_state_bytes(count, "fp32-adam"), meter.timeline[-1].bytes
predictions([(name, expected[name], left[name]) for name in expected], unit="bytes")

# %% [markdown]
# <div lang="en">
#
# Exact, but for the optimizer's 208 bytes: Adam also counts the steps, in 4 bytes for each of the 52 tensors.
#
# All 16 are there at once from the end of backward until the gradients are dropped; between steps it is 12. These bytes don't depend on the batch. Everything else does.
#
# </div>
# <div lang="zh">
#
# 分毫不差，只有优化器多出 208 字节：Adam 还要为 52 个张量各记一个步数，每个 4 字节。
#
# 从反向结束到梯度被清掉，这 16 字节同时都在；两步之间是 12 字节。这些字节与批次无关，其余的都有关。
#
# </div>

# %% [markdown]
# ## 1.2 A meter from nothing / 从零做一个计量器
#
# <div lang="en">
#
# A tensor's bytes live in its **storage**; views share it. So: after every operator, look at the outputs, count each storage not seen before, and notice when it dies. PyTorch lets us stand at the dispatcher, and Python's `weakref.finalize` tells of deaths.
#
# What the operator got as an input is not new, even when an output is a view of it.
#
# </div>
# <div lang="zh">
#
# 张量的字节在它的**存储**里，各个视图共用一份。因此：在每个算子之后看它的输出，遇到没见过的存储就计入，并留意它何时消亡。PyTorch 允许我们守在分发器（dispatcher）处，Python 的 `weakref.finalize` 会在存储消亡时发出通知。
#
# 算子的输入不算新的，哪怕输出是它的视图。
#
# </div>


# %%
class TinyMeter(TorchDispatchMode):
    live = peak = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        known = {storage._cdata for storage in storages(args)}
        result = operator(*args, **(kwargs or {}))
        for storage in storages(result):
            if storage._cdata not in known:
                known.add(storage._cdata)
                self.count(storage.nbytes())
                weakref.finalize(storage, self.count, -storage.nbytes())
        return result

    def count(self, change):
        self.live += change
        self.peak = max(self.peak, self.live)


# %%
def storages(values):
    return [value.untyped_storage() for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


decoder.zero_grad()
with TinyMeter() as tiny:
    decoder.loss(tokens).backward()
decoder.zero_grad()
with MemoryMeter() as full:
    decoder.loss(tokens).backward()
table(
    [("meter", "计量器"), ("peak, bytes", "峰值，字节")], [("TinyMeter", tiny.peak), ("MemoryMeter", full.peak_bytes)]
)

# %% [markdown]
# <div lang="en">
#
# Fifteen lines count to the byte. `MemoryMeter` agrees, and adds what they lack: which bytes are activations and which are gradients, which phase and operator made them, a budget, sparse tensors, threads, errors. It is also careful about something else: it installs no hooks in autograd, so what is measured behaves as it would unmeasured.
#
# </div>
# <div lang="zh">
#
# 十五行代码就能数得一字节不差。`MemoryMeter` 的结果与之一致，并补上了那十五行所缺的：区分激活值与梯度，指明由哪个阶段、哪个算子产生，还有预算、稀疏张量、多线程和错误处理。它还有一处讲究：不在 autograd 里装任何钩子，因此程序被测时与不测时行为相同。
#
# </div>

# %% [markdown]
# ## 1.3 The timeline of a step / 一个训练步的时间线
#
# <div lang="en">
#
# | kind of bytes | made by | gone when |
# |---|---|---|
# | parameters | building the model | the model goes |
# | gradients | backward | `zero_grad()` |
# | optimizer state | the first `step()` | the optimizer goes |
# | activations: saved for backward | forward | backward has used them |
# | temporaries: all other tensors | any operator | nothing needs them any more |
#
# Buffers of modules and the batch itself are counted apart. **Guess first.** At most, how many bytes of this decoder's step are alive at once, and in which phase: forward, backward, or the optimizer's step?
#
# </div>
# <div lang="zh">
#
# | 字节的种类 | 由谁产生 | 何时消失 |
# |---|---|---|
# | 参数 | 建立模型 | 模型消失时 |
# | 梯度 | 反向 | `zero_grad()` |
# | 优化器状态 | 第一次 `step()` | 优化器消失时 |
# | 激活值：为反向保存 | 前向 | 反向用完它时 |
# | 临时张量：其余的张量 | 任何算子 | 不再有人需要时 |
#
# 模块的缓冲区和批次本身另计。**先猜**：这个解码器走一步，最多同时有多少字节存活？在哪个阶段：前向、反向，还是优化器更新时？
#
# </div>

# %%
my_guess_bytes = None  # such as 90e6

# %%
timelines(
    {("decoder, 4 sequences", "解码器，4 个序列"): meter},
    title=("The peak is in backward, 17 MB above the end of forward", "峰值在反向之中，比前向结束时高 17 MB"),
)

# %%
phases = meter.phases()
after_forward = meter.timeline[phases.index("backward") - 1]
peak = max(meter.timeline, key=lambda sample: sample.live_bytes)
(after_forward.live_bytes, peak.live_bytes, peak.phase, peak.operator)

# %%
predictions([(("your guess", "你的猜测"), my_guess_bytes, meter.peak_bytes)])

# %% [markdown]
# <div lang="en">
#
# After the forward pass 102.3 MB are live; the peak is 119.1 MB, in backward, at `aten._log_softmax_backward_data.default`: there the gradient of the logits is made, out of the gradient of the log-probabilities. Each of the two takes 8.4 MB, and nearly all activations are still alive.
#
# Where the peak is depends on the model. Watch another one: a deep MLP, 84 MB of weights and a batch of only 32.
#
# </div>
# <div lang="zh">
#
# 前向结束时，存活的张量有 102.3 MB；峰值为 119.1 MB，出现在反向的 `aten._log_softmax_backward_data.default`：这里由对数概率的梯度算出 logits 的梯度，两者各占 8.4 MB，而激活值几乎都还活着。
#
# 峰值在哪里因模型而异。再看一个：深层 MLP，权重 84 MB，批次大小只有 32。
#
# </div>

# %%
mlp, x = deep_mlp(depth=20, width=1024), torch.randn(32, 1024)
mlp_adam = torch.optim.Adam(mlp.parameters())


def mlp_step():
    mlp.zero_grad()
    mlp(x).square().mean().backward()
    mlp_adam.step()


with MemoryMeter(mlp, mlp_adam) as first_step:
    mlp_step()
timelines(
    {("deep MLP, first step", "深层 MLP，第一步"): first_step},
    title=("With a small batch the peak is in the optimizer", "批次小的时候，峰值在优化器里"),
)

# %%
int(first_step.series()["activation"].max()), first_step.at_peak()["activation"]

# %% [markdown]
# <div lang="en">
#
# The activations are a thin strip, 5.2 MB at most, and at the peak there are none: the optimizer's state, made in this first step, towers over everything. Checkpointing could not lower this peak by a byte. Measure first.
#
# </div>
# <div lang="zh">
#
# 激活值只是薄薄一条，最多 5.2 MB，到峰值时刻一点也没有了：第一步里建立的优化器状态压倒一切。检查点不可能让这个峰值降低一个字节。所以要先测量。
#
# </div>

# %% [markdown]
# ## 1.4 What autograd keeps, operator by operator / 逐个算子看 autograd 保存了什么
#
# <div lang="en">
#
# Between forward and backward, activations dominate. Which tensors are they? `saved_tensors` runs a function and lists what its graph holds. One decoder layer, 2 sequences of 128 tokens, 512 features, 8 heads, with separate projections for Q, K and V (and no causal mask, which saves nothing):
#
# </div>
# <div lang="zh">
#
# 在前向与反向之间，激活值占大头。它们是哪些张量？`saved_tensors` 运行一个函数，列出它的计算图持有哪些张量。下面是一个解码器层，2 个 128 token 的序列、512 个特征、8 个头，Q、K、V 各用各的投影（没有因果掩码，它什么也不保存）：
#
# </div>


# %%
class SeparateAttention(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(hidden, hidden) for _ in range(4))

    def forward(self, x):  # (b, s, h)
        b, s, h = x.shape
        q, k, v = (f(x).view(b, s, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        p = (q @ k.mT * q.shape[-1] ** -0.5).softmax(dim=-1)  # (b, heads, s, s)
        return self.out((p @ v).transpose(1, 2).reshape(b, s, h))


# %%
layer, batch = DecoderLayer(512, 8), torch.randn(2, 128, 512)
layer.attention = SeparateAttention(512, 8)
kept = saved_tensors(layer, batch)
kept

# %% [markdown]
# <div lang="en">
#
# Look at the last column. The normalised input is saved three times, once by each projection, and it is one storage. The probabilities P are saved by softmax and by the product with V. Add up every saved tensor, as many scripts do, and you count 22 % too much here; count storages.
#
# And one kind of row is missing on purpose: the weights. A Linear layer saves its weight too, not the parameter itself but a view, `weight.t()`. It costs nothing, since the parameter lives anyway. A script that tells parameters by their type misses the view:
#
# </div>
# <div lang="zh">
#
# 看最后一列。归一化后的输入被三个投影各保存了一次，其实是同一份存储；概率 P 也存了两次：softmax 存一次，与 V 相乘时再存一次。像许多脚本那样把每个保存的张量都加起来，这里会多算 22 %；应该按存储来数。
#
# 有一类行是特意不列的：权重。Linear 也会保存权重，但存的不是参数本身，而是视图 `weight.t()`。它不另占内存，因为参数本来就一直存活。按类型辨认参数的脚本，认不出这个视图：
#
# </div>

# %%
linear = nn.Linear(4, 4)
view = linear(torch.randn(2, 4, requires_grad=True)).grad_fn._saved_mat2
type(view).__name__, view._base is linear.weight

# %%
with_weights = saved_tensors(layer, batch, parameters=True)
table(
    [("what is added up", "加的是什么"), ("bytes", "字节"), ("against storages", "与按存储计数之比")],
    [
        (name, count, round(count / kept.total_bytes, 3))
        for name, count in [
            (("storages, once each", "存储，各计一次"), kept.total_bytes),
            (("saved tensors, one by one", "保存的张量，逐个相加"), kept.packed_bytes),
            (("the same, parameters with them", "同上，连同参数"), with_weights.packed_bytes),
        ]
    ],
)

# %% [markdown]
# ## 1.5 A formula, exact to the byte / 精确到字节的公式
#
# <div lang="en">
#
# Read such a list for one layer with sequence $s$, batch $b$, hidden size $h$ and $a$ heads, and count what is kept, in half precision and with dropout:
#
# | kept | elements | bytes |
# |---|---|---|
# | input of Q, K, V; Q, K, V; input of the output projection | $5 s b h$ | $10 s b h$ |
# | inputs of the two LayerNorms | $2 s b h$ | $4 s b h$ |
# | feed-forward: input, GELU's input, last product's input | $9 s b h$ | $18 s b h$ |
# | two dropout masks, one byte an element | $2 s b h$ | $2 s b h$ |
# | P, its mask, P after dropout | $3 a s^2 b$ | $5 a s^2 b$ |
#
# </div>
# <div lang="zh">
#
# 设一层的序列长度为 $s$、批次大小为 $b$、隐藏维度为 $h$、头数为 $a$。照着这样的清单，数一数它在半精度、带 dropout 时保存了什么：
#
# | 保存的张量 | 元素 | 字节 |
# |---|---|---|
# | Q、K、V 的输入；Q、K、V；输出投影的输入 | $5 s b h$ | $10 s b h$ |
# | 两个 LayerNorm 的输入 | $2 s b h$ | $4 s b h$ |
# | 前馈（feed-forward）网络：输入、GELU 的输入、最后一次乘法的输入 | $9 s b h$ | $18 s b h$ |
# | 两个 dropout 掩码，每个元素一字节 | $2 s b h$ | $2 s b h$ |
# | P、它的掩码、dropout 之后的 P | $3 a s^2 b$ | $5 a s^2 b$ |
#
# </div>

# %% [markdown]
# <div lang="en">
#
# The sum is the formula of Korthikanti et al.:
#
# $$s b h \left(34 + 5 \frac{a s}{h}\right)$$
#
# They leave out the LayerNorm statistics as small. Put them back: two norms keep a mean and a reciprocal deviation each, 2 bytes a number on this CPU, $8 s b$ in all. **Guess:** how close will a measurement come?
#
# </div>
# <div lang="zh">
#
# 加起来就是 Korthikanti 等人的公式：
#
# $$s b h \left(34 + 5 \frac{a s}{h}\right)$$
#
# LayerNorm 的统计量很小，他们略去了。把它们加回来：两个 LayerNorm 各存均值和标准差的倒数，在这里的 CPU 上每个数 2 字节，共 $8 s b$。**猜一猜：** 实测会与它相差多少？
#
# </div>

# %%
from course_lib.memory import attention_saved_bytes, transformer_activation_bytes

sizes = {"sequence": 512, "batch": 1, "hidden": 512, "heads": 8}
rows = []
for dtype, norm_first in [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, True)]:
    layer = DecoderLayer(512, 8, dropout=0.1, norm_first=norm_first).to(dtype)
    measured = saved_tensors(layer, torch.randn(1, 512, 512, dtype=dtype)).total_bytes
    width = dtype.itemsize
    predicted = transformer_activation_bytes(**sizes, dtype_bytes=width, statistic_bytes=width)
    rows.append((f"{'pre' if norm_first else 'post'}-norm, {str(dtype)[6:]}", predicted, measured))
predictions(rows, unit="bytes")

# %% [markdown]
# <div lang="en">
#
# Not a byte off. This layer calls `native_dropout`, which keeps its mask as booleans, one byte an element, as GPUs do. On a CPU `F.dropout` does something else: it keeps a mask of ready-made factors in the activations' own dtype.
#
# </div>
# <div lang="zh">
#
# 一字节不差。这一层用的是 `native_dropout`，掩码以布尔值保存，每个元素一字节，与 GPU 上相同。CPU 上的 `F.dropout` 则不同：它的掩码存的是算好的系数，dtype 与激活值相同。
#
# </div>


# %%
class FactorDropout(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.1)


layer = DecoderLayer(512, 8, dropout=0.1).to(torch.bfloat16)
boolean = saved_tensors(layer, torch.randn(1, 512, 512, dtype=torch.bfloat16)).total_bytes
layer.attention.drop_probabilities = layer.attention.drop_output = layer.feedforward[3] = FactorDropout()
factors = saved_tensors(layer, torch.randn(1, 512, 512, dtype=torch.bfloat16)).total_bytes
predicted = transformer_activation_bytes(**sizes, mask_bytes=2, statistic_bytes=2)
predictions([("F.dropout, bfloat16", predicted, factors)], unit="bytes")

# %%
f"{factors / boolean - 1:.1%}"

# %% [markdown]
# <div lang="en">
#
# 13.5 % more, for the same distribution of outputs. A formula is exact for the operators it was written for, and for no others.
#
# </div>
# <div lang="zh">
#
# 输出的分布完全相同，却多了 13.5 %。公式只对它所针对的那些算子精确，换成别的算子就不再成立。
#
# </div>

# %% [markdown]
# ## 1.6 Depth: a straight line / 深度：一条直线
#
# <div lang="en">
#
# Every layer saves its own activations, so the bytes grow as $O(L)$. A line has a slope and an intercept: the slope is the formula for one layer, here without dropout. What will the intercept be?
#
# </div>
# <div lang="zh">
#
# 每一层都保存自己的激活值，因此字节数按 $O(L)$ 增长。一条直线有斜率和截距：斜率就是单层的公式，这里不带 dropout。截距会是什么？
#
# </div>

# %%
depths = np.array([2, 4, 6, 8, 10, 12, 14, 16])
saved = np.array([saved_tensors(make_decoder(layers=int(depth)).loss, tokens).total_bytes for depth in depths])
slope, intercept = np.polyfit(depths, saved, 1)
per_layer = transformer_activation_bytes(
    sequence=128, batch=4, hidden=256, heads=8, dtype_bytes=4, mask_bytes=0, statistic_bytes=4
)

# %%
log_probabilities = 4 * 128 * 4096 * 4  # of 4 × 128 tokens over 4096 words, fp32
norm_and_head = 2 * (4 * 128 * 256 * 4) + 2 * (4 * 128 * 4)  # their inputs, and the norm's statistics
token_numbers = 4 * 129 * 8 + 4 * 128 * 8 + 4  # int64; inputs and targets, and the loss's total weight
base = log_probabilities + norm_and_head + token_numbers
predictions(
    [
        (("slope: one layer", "斜率：一层"), per_layer, round(slope)),
        (("intercept", "截距"), base, round(intercept)),
    ],
    unit="bytes",
)

# %%
drawn, ax = figure(("Every layer adds the same bytes", "每一层增加同样多的字节"), height=3.0)
line = base + per_layer * depths
ax.set(xlabel=text("layers L", "层数 L"), ylabel=text("saved, MB", "保存，MB"), xlim=(0, 17.5), ylim=(0, 190))
predicted_and_measured(ax, depths, line / 1e6, saved / 1e6, ("decoder", "解码器"))

# %% [markdown]
# <div lang="en">
#
# Neither has any error. The intercept, 9.4 MB, is the price of having a head: 8.4 MB of it are the log-probabilities of a vocabulary of 4096. Almost a layer's worth of bytes, for one matrix product.
#
# </div>
# <div lang="zh">
#
# 两者都毫无误差。截距 9.4 MB 是输出头的代价：其中 8.4 MB 是词表为 4096 时的对数概率。一次矩阵乘法，占的字节就快赶上一层。
#
# </div>

# %% [markdown]
# ## 1.7 Sequence length: a parabola / 序列长度：一条抛物线
#
# <div lang="en">
#
# The probabilities P are an $s \times s$ matrix a head. Without dropout and in one dtype, the rest of the layer saves $16 s b h$ elements and P saves $a s^2 b$. They are equal where $s = 16 h / a$: sixteen times the size of a head, 1024 tokens for heads of 64. Symbolic tensors have no data, so this runs in a moment:
#
# </div>
# <div lang="zh">
#
# 概率 P 在每个头上都是 $s \times s$ 的矩阵。不带 dropout、只用一种 dtype 时，一层的其余部分保存 $16 s b h$ 个元素，P 保存 $a s^2 b$ 个。两者在 $s = 16 h / a$ 时相等：即头维度的十六倍，头维度为 64 时就是 1024 个 token。符号张量不含数据，所以下面一眨眼就跑完：
#
# </div>

# %%
lengths = [512, 1024, 2048, 4096]
standard, p, fused = [], [], []
with symbolic():
    for length in lengths:
        rows = saved_tensors(DecoderLayer(512, 8), torch.randn(1, length, 512))
        standard.append(rows.total_bytes / 1e6)
        p.append(next(row.bytes for row in rows if row.operator == "SoftmaxBackward0") / 1e6)
        fused.append(saved_tensors(DecoderLayer(512, 8, fused=True), torch.randn(1, length, 512)).total_bytes / 1e6)

# %%
headings = [("tokens", "token 数"), ("layer, MB", "一层，MB"), ("P, MB", "P，MB"), ("P's share", "P 占比")]
shown = [
    (n, round(s, 1), round(x, 1), f"{x / s:.0%}", round(f, 1))
    for n, s, x, f in zip(lengths, standard, p, fused, strict=True)
]
table([*headings, ("with the fused kernel, MB", "用融合核，MB")], shown)

# %% [markdown]
# <div lang="en">
#
# The last column is the same layer with the framework's fused attention, which never keeps P. Are its gradients the same? Equal up to rounding, not bit by bit, because it adds in another order:
#
# </div>
# <div lang="zh">
#
# 最后一列是同一层换用框架的融合注意力，它从不保存 P。梯度还一样吗？在舍入误差之内相等，但不是逐位相等，因为它的相加次序不同：
#
# </div>


# %%
def layer_gradients(fused):
    layer = DecoderLayer(512, 8, fused=fused)
    layer(torch.linspace(-1, 1, 256 * 512).view(1, 256, 512)).square().mean().backward()
    return [parameter.grad for parameter in layer.parameters()]


pairs = zip(layer_gradients(True), layer_gradients(False), strict=True)
all(torch.allclose(one, other, rtol=1e-4, atol=1e-7) for one, other in pairs)

# %%
core = {"batch": 1, "hidden": 512, "heads": 8, "dtype_bytes": 4, "mask_bytes": 0, "statistic_bytes": 4}


def rest(length):
    return transformer_activation_bytes(sequence=length, recompute="selective", **core) / 1e6


def probabilities(length):
    return attention_saved_bytes(sequence=length, batch=1, heads=8, head_dim=64)["p"] / 1e6


# %%
drawn, ax = figure(("P overtakes all the rest at 1024 tokens", "到 1024 个 token，P 就超过了其余全部"), height=3.2)
ax.set(xlim=(0, 4900), xlabel=text("sequence length, tokens", "序列长度（token 数）"))
ax.set(ylabel=text("saved by one layer, MB", "一层保存，MB"))
ax.axvline(1024, color="#888888", linewidth=0.8, linestyle="--")
ax.plot(lengths, fused, "o", markersize=11, markerfacecolor="none", color="#228833")
without_p = [whole - part for whole, part in zip(standard, p, strict=True)]
predicted_and_measured(ax, lengths, rest, without_p, ("the rest; ring: fused", "其余；圈：融合"), color="#228833")
predicted_and_measured(ax, lengths, probabilities, p, ("P alone", "仅 P"), color="#AA9922")
predicted_and_measured(ax, lengths, lambda n: rest(n) + probabilities(n), standard, ("standard", "标准"))

# %% [markdown]
# <div lang="en">
#
# At 4096 tokens P alone is 536.9 MB of a layer's 671.2 MB. The rings sit on the straight line of the rest: with the fused kernel P is gone, for one fp32 number a row. Lesson 06 builds it.
#
# </div>
# <div lang="zh">
#
# 到 4096 个 token 时，一层的 671.2 MB 里光 P 就占 536.9 MB。圆圈正落在“其余”的直线上：用融合核，P 没有了，代价只是每行一个 fp32 数。第 06 课会动手实现它。
#
# </div>

# %% [markdown]
# ## 1.8 Vocabulary: the largest tensors of all / 词表：最大的张量
#
# <div lang="en">
#
# The last matrix product makes logits: one number for every word of the vocabulary, at every position. The loss keeps their log-softmax; backward makes the gradient of that, and from it the gradient of the logits. Three tensors of one size, and at the peak all three are alive.
#
# </div>
# <div lang="zh">
#
# 最后一次矩阵乘法产生 logits：每个位置对词表里的每个词各有一个数。损失会保存它的 log-softmax；反向先求出后者的梯度，再由它算出 logits 的梯度。三个张量一样大，在峰值时刻同时存活。
#
# </div>

# %%
rows = []
for vocabulary in (1000, 8000, 32000):
    with symbolic():
        model = make_decoder(vocabulary=vocabulary, sequence=256)
        with MemoryMeter(model) as vocabulary_meter:
            model.loss(random_tokens(4, 256, vocabulary)).backward()
    logits = 4 * 256 * vocabulary * 4
    peak_bytes = vocabulary_meter.peak_bytes
    rows.append((vocabulary, round(peak_bytes / 1e6, 1), round(logits / 1e6, 1), f"{3 * logits / peak_bytes:.0%}"))
table(
    [("vocabulary", "词表"), ("peak, MB", "峰值，MB"), ("logits, MB", "logits，MB"), ("three of them", "三份占峰值")],
    rows,
)

# %% [markdown]
# <div lang="en">
#
# This is forward and backward alone, 256 tokens a sequence, without an optimizer. With 32000 words, 73 % of the peak belongs to the head of a network that has four layers below it. Lesson 02 computes this loss in chunks, so that the logits never exist whole.
#
# </div>
# <div lang="zh">
#
# 这里只有前向和反向，每个序列 256 个 token，没有优化器。词表为 32000 时，峰值的 73 % 属于输出头，而它下面还有四层网络。第 02 课会把这个损失分块计算，让完整的 logits 从不出现。
#
# </div>

# %% [markdown]
# ## 1.9 Seven billion parameters on a laptop / 笔记本电脑上的 70 亿参数
#
# <div lang="en">
#
# Inside `symbolic()`, tensors have shapes and storages but no memory, and the meter still counts. So here is the real step of a model of 7 billion parameters: bf16 weights, fp32 master weights, Adam, one sequence of 2048 tokens, fused attention.
#
# </div>
# <div lang="zh">
#
# 在 `symbolic()` 里，张量有形状、有存储，却不占内存，而计量器照样计数。于是，下面就是一个 70 亿参数模型的真实一步：bf16 权重、fp32 主权重、Adam、一个 2048 token 的序列、融合注意力。
#
# </div>


# %%
class MixedAdam:
    def __init__(self, model):
        self.pairs = [(p, torch.optim.Adam([p.detach().float()])) for p in model.parameters()]  # fp32 master weights

    @torch.no_grad()
    def step(self):
        for parameter, adam in self.pairs:
            (master,) = adam.param_groups[0]["params"]
            master.grad = parameter.grad.float()
            adam.step()
            parameter.copy_(master)
            master.grad = None


# %%
def symbolic_steps(hidden, heads, layers):
    torch.set_default_dtype(torch.bfloat16)
    with symbolic(), MemoryMeter() as meter:
        model = Decoder(vocabulary=32000, hidden=hidden, heads=heads, layers=layers, sequence=2048, fused=True)
        optimizer, tokens = MixedAdam(model), random_tokens(1, 2048, 32000)
        for _ in range(2):  # the second step has the optimizer's state from the start
            model.zero_grad()
            model.loss(tokens).backward()
            optimizer.step()
    torch.set_default_dtype(torch.float32)
    return sum(parameter.numel() for parameter in model.parameters()), meter


shapes = {"1 B": (2048, 16, 18), "7 B": (4096, 32, 32), "70 B": (8192, 64, 80)}  # hidden, heads, layers
giants = {name: symbolic_steps(*shape) for name, shape in shapes.items()}

# %%
rows = []
for name, (parameters, giant) in giants.items():
    state = sum(training_state_bytes(parameters, "mixed-adam").values())
    most_activations = int(giant.series()["activation"].max())
    phase = max(giant.timeline, key=lambda sample: sample.live_bytes).phase
    figures = (round(count / 1e9, 1) for count in (parameters, state, most_activations, giant.peak_bytes))
    rows.append((name, *figures, phase))
headings = [("model", "模型"), ("parameters, 10⁹", "参数，10⁹"), ("16 bytes each, GB", "每个参数 16 字节，GB")]
headings += [("most activations, GB", "激活值最多时，GB"), ("peak, GB", "峰值，GB"), ("peak in", "峰值所在")]
table(headings, rows)

# %% [markdown]
# <div lang="en">
#
# 16 bytes a parameter are the floor, as the opening said (the shape called 7 B has 6.6 billion parameters). Here comes the surprise: with one sequence, the peak of the two larger models is hardly above that floor. The 8.8 GB of activations of the 7 B model are there before the gradients have come; they leave as the gradients arrive, and the peak waits in the optimizer. For a small model, or more sequences, activations win again.
#
# No step of the largest model has ever run on this machine, and yet its bytes are counted operator by operator.
#
# </div>
# <div lang="zh">
#
# 正如开头所说，每个参数 16 字节是下限（名为 7 B 的这个形状有 66 亿个参数）。出人意料的是，只有一个序列时，两个较大模型的峰值比这个下限高不了多少。7 B 模型的 8.8 GB 激活值出现时，梯度还没有来；梯度陆续到来，激活值也陆续释放，峰值要到优化器里才出现。模型小一些，或者序列多一些，激活值又会占上风。
#
# 最大的模型从未在这台机器上真正跑过一步，它的字节却逐个算子数清了。
#
# </div>

# %% [markdown]
# ## 1.10 Watching a loop / 盯住训练循环
#
# <div lang="en">
#
# Monitors in training scripts print a figure after each phase. With the meter's `live_bytes` that works on any machine. Before the first step nothing has been made yet; note how it differs from the others, and when the gradients go.
#
# </div>
# <div lang="zh">
#
# 训练脚本里的监视器会在每个阶段之后打印一个数。用计量器的 `live_bytes`，在任何机器上都能做到。第一步之前什么都还没有产生；留意它与后面几步的不同，以及梯度何时消失。
#
# </div>

# %%
model, rows = make_decoder(), []
optimizer = torch.optim.Adam(model.parameters())
with MemoryMeter(model, optimizer) as monitor:
    for number in (1, 2, 3):
        readings = [monitor.live_bytes]
        loss = model.loss(tokens)
        readings.append(monitor.live_bytes)
        loss.backward()
        readings.append(monitor.live_bytes)
        optimizer.step()
        readings.append(monitor.live_bytes)
        optimizer.zero_grad()
        rows.append([number, *(round(reading / 1e6, 1) for reading in (*readings, monitor.live_bytes))])

# %%
headings = [("step", "步"), ("before, MB", "之前，MB"), ("forward, MB", "前向，MB"), ("backward, MB", "反向，MB")]
table([*headings, "step(), MB", "zero_grad(), MB"], rows)

# %%
f"peak: {monitor.peak_bytes:,} bytes"

# %% [markdown]
# <div lang="en">
#
# The same forward pass reads 68.4 MB in the first step and 102.3 MB ever after: the 33.9 MB between them are Adam's state, made at the end of step 1. After backward the activations are gone and the gradients have come. A reading between phases never sees the peak of 119.1 MB: it lies inside backward.
#
# </div>
# <div lang="zh">
#
# 同样的前向，第一步读数是 68.4 MB，以后都是 102.3 MB：相差的 33.9 MB 是 Adam 的状态，在第 1 步末尾才建立。反向之后激活值没了，梯度来了。在阶段之间读数，永远看不到 119.1 MB 的峰值：它在反向之中。
#
# </div>

# %% [markdown]
# ## 1.11 What the meter leaves out / 计量器没有数的部分
#
# <div lang="en">
#
# The meter counts tensors. An operator may also allocate **workspace**, used and freed inside itself. For the decoder there is next to none. For convolutions there is a lot, and how much depends on the machine: on this table seconds and workspace differ from one computer to the next, peaks of tensors and FLOPs don't. That is why stored outputs of this course compare tensors, and why `measure` always reports both.
#
# </div>
# <div lang="zh">
#
# 计量器数的是张量。算子还可能申请**工作区**，在自己内部用完就释放。解码器几乎没有工作区；卷积的工作区则很大，而且大小因机器而异：下表中，秒数和工作区换一台机器就不同，张量峰值和 FLOPs 则不变。因此本课程对照已存的输出时只比较张量，而 `measure` 总是两者都报告。
#
# </div>

# %%
images = torch.randn(8, 3, 64, 64)
convolutions = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2))
arms = {
    ("decoder", "解码器"): measure(lambda: train_step(decoder, adam, tokens), model=decoder, optimizer=adam),
    ("convolutions", "卷积"): measure(lambda: convolutions(images).square().mean().backward(), model=convolutions),
}

# %% tags=["nbval-ignore-output", "shows-seconds"]
megabytes = ("peak_bytes", "allocator_peak_bytes", "workspace_bytes")
rows = [
    (name, *(round(getattr(arm, field) / 1e6, 2) for field in megabytes), round(arm.seconds, 4))
    for name, arm in arms.items()
]
headings = [
    "",
    ("tensors' peak, MB", "张量峰值，MB"),
    ("allocator's, MB", "分配器峰值，MB"),
    ("workspace, MB", "工作区，MB"),
]
table([*headings, ("seconds", "秒")], rows)

# %% [markdown]
# ## 1.12 What you may have read / 你可能读到过的说法
#
# <div lang="en">
#
# Four common claims, each with its experiment. The first has been settled in section 1.3. For the second: compare a network with itself. Any honest method must find no difference.
#
# </div>
# <div lang="zh">
#
# 四条常见的说法，各有实验。第一条在 1.3 节已经有了答案。第二条：拿一个网络与它自己比较，任何诚实的方法都不应当看出差别。
#
# </div>


# %%
def naive_growth(step, network, optimizer):
    with MemoryMeter(network, optimizer) as meter:
        before = meter.live_bytes
        step()
    network.zero_grad()
    return meter.peak_bytes - before


# %%
def naive_and_fair(loss, network):
    optimizer = torch.optim.Adam(network.parameters())

    def step():
        loss().backward()
        optimizer.step()

    naive = [naive_growth(step, network, optimizer) for _ in range(2)]
    fair = [measure(step, model=network, optimizer=optimizer, repeats=1).peak_bytes for _ in range(2)]
    return naive, fair


# %%
twin_mlp, twin_decoder = deep_mlp(depth=20, width=1024), make_decoder()
naive_mlp, fair_mlp = naive_and_fair(lambda: twin_mlp(x).square().mean(), twin_mlp)
naive_decoder, fair_decoder = naive_and_fair(lambda: twin_decoder.loss(tokens), twin_decoder)
headings = ["", ("growth, first run, MB", "第一次增量，MB"), ("second run, MB", "第二次，MB"), ("“saved”", "“省了”")]
rows = []
for name, runs in (
    (("MLP with itself", "MLP 与自己"), naive_mlp),
    (("decoder with itself", "解码器与自己"), naive_decoder),
):
    rows.append((name, *(round(growth / 1e6, 1) for growth in runs), f"{1 - runs[1] / runs[0]:.0%}"))
table(headings, rows)

# %%
fair_mlp[0] == fair_mlp[1], fair_decoder[0] == fair_decoder[1]  # `measure` finds no difference

# %%
from course_lib.lessons import what_you_may_have_read

q, k, v = (torch.randn(1, 12, 512, 64, requires_grad=True) for _ in range(3))
attention = saved_tensors(lambda q, k, v: (q @ k.mT * 64**-0.5).softmax(dim=-1) @ v, q, k, v).total_bytes
with_scores = sum(attention_saved_bytes(sequence=512, batch=1, heads=12, head_dim=64).values()) + 12 * 512 * 512 * 4
activations = saved_tensors(mlp, x).total_bytes / (32 * 1024 * 4)
what_you_may_have_read(
    "01",
    f"{after_forward.live_bytes / 1e6:.1f} MB < {peak.live_bytes / 1e6:.1f} MB",
    f"{naive_mlp[0] / 1e6:.1f} MB → {naive_mlp[1] / 1e6:.1f} MB",
    (
        f"{attention / 1e6:.1f} MB, not {with_scores / 1e6:.1f} MB",
        f"{attention / 1e6:.1f} MB，不是 {with_scores / 1e6:.1f} MB",
    ),
    f"{activations:g} = 2 × 20",
)

# %% [markdown]
# <div lang="en">
#
# The second row deserves a second look. A network compared with itself seems to save 65 % by doing nothing, because its peak is in the optimizer. The decoder's peak is in backward, and the same mistake goes unpunished: 0 %. A method that is right only sometimes is the worst kind.
#
# </div>
# <div lang="zh">
#
# 第二行值得再看一眼。一个网络与自己相比，什么都没做就“省”了 65 %，因为它的峰值在优化器里。解码器的峰值在反向里，同样的错误却没有受罚：0 %。时对时错的方法最害人。
#
# </div>

# %% [markdown]
# ## 1.13 On a GPU / 在 GPU 上
#
# <div lang="en">
#
# On a GPU the caching allocator keeps its own books: `torch.cuda.memory_allocated` counts tensors, rounded up to 512 bytes, and workspace; `memory_reserved` is what it has taken from the driver, free blocks included. If you have a GPU this cell measures now; otherwise it shows a recording, or says that there is none.
#
# </div>
# <div lang="zh">
#
# 在 GPU 上，缓存分配器另有一本账：`torch.cuda.memory_allocated` 计入张量（向上取整到 512 字节的整数倍）和工作区；`memory_reserved` 是它向驱动要来的总量，包括空闲块。有 GPU 时，这个单元格会现场测量；没有 GPU，就显示预先记录的数据；连记录也没有，会注明。
#
# </div>

# %% tags=["nbval-ignore-output", "shows-device"]
from course_lib.lessons import on_gpu

on_gpu("01")

# %% [markdown]
# ## 1.14 Play / 玩一玩
#
# <div lang="en">
#
# A model of 32 layers and 4096 features in bf16, with one training sequence. Move the sliders (they need a running kernel): at what length does the parabola hold half of the bytes? What do more heads do?
#
# </div>
# <div lang="zh">
#
# 一个 32 层、4096 个特征的 bf16 模型，一个训练序列。拖动滑块（需要正在运行的内核）：序列多长时，抛物线占到一半？头数增加又会怎样？
#
# </div>

# %%
from course_lib.lessons.lesson_01 import activation_playground, draw_activation_bytes

draw_activation_bytes()

# %% tags=["nbval-ignore-output", "shows-picture"]
activation_playground()

# %% [markdown]
# ## 1.15 Exercises / 练习
#
# <div lang="en">
#
# **Exercise 1.** How many bytes of optimizer state does mixed-precision Adam keep for 7 billion parameters, the master weights included?
#
# </div>
# <div lang="zh">
#
# **练习 1。** 对 70 亿个参数，混合精度的 Adam 要保存多少字节的优化器状态（含主权重）？
#
# </div>

# %%
from course_lib.lessons.lesson_01 import check_largest_batch, check_optimizer_bytes, check_swiglu_bytes

answer = None  # bytes
check_optimizer_bytes(answer)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
answer = 7_000_000_000 * (4 + 4 + 4)
check_optimizer_bytes(answer)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# **Exercise 2.** The lesson's decoder, trained with Adam, may use 500 MB. What is the largest batch of 128-token sequences? Two measurements are enough: one for what doesn't grow, one for what a sequence adds.
#
# </div>
# <div lang="zh">
#
# **练习 2。** 本课的解码器用 Adam 训练，限用 500 MB。批次最多能有多少个 128 token 的序列？测两次就够：一次得出不随批次增长的部分，一次得出每多一个序列增加多少。
#
# </div>

# %%
answer = None  # sequences
check_largest_batch(answer)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
peaks = []
for size in (4, 8):
    with symbolic():
        model = make_decoder()
        optimizer = torch.optim.Adam(model.parameters())
        sequences = random_tokens(size, 128, 4096)
        train_step(model, optimizer, sequences)
        with MemoryMeter(model, optimizer) as batch_meter:
            train_step(model, optimizer, sequences)
    peaks.append(batch_meter.peak_bytes)
each = (peaks[1] - peaks[0]) // 4
answer = 4 + (500_000_000 - peaks[0]) // each
check_largest_batch(answer)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# **Exercise 3.** Many recent models use a SwiGLU feed-forward network: `down(F.silu(gate(x)) * up(x))`. Predict the bytes that it saves for 512 tokens, 256 features and 1024 inside, in fp32. Then build it and let `saved_tensors` decide.
#
# </div>
# <div lang="zh">
#
# **练习 3。** 许多新模型使用 SwiGLU 前馈（feed-forward）网络：`down(F.silu(gate(x)) * up(x))`。输入为 512 个 token、256 个特征，内部宽度为 1024，dtype 为 fp32，请预测它保存多少字节。然后把它搭出来，让 `saved_tensors` 判定。
#
# </div>

# %%
answer = None  # bytes
check_swiglu_bytes(answer)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
# x once; and, 1024 wide: SiLU's input, the product's two factors, the last projection's input.
answer = 4 * 512 * (256 + 4 * 1024)
gate, up, down = nn.Linear(256, 1024), nn.Linear(256, 1024), nn.Linear(1024, 256)
swiglu = saved_tensors(lambda x: down(F.silu(gate(x)) * up(x)), torch.randn(512, 256))
assert swiglu.total_bytes == answer
check_swiglu_bytes(answer)
### END SOLUTION

# %% [markdown]
# ## 1.16 Summary / 小结
#
# <div lang="en">
#
# - A step with Adam holds 16 bytes a parameter whatever the batch, in fp32 as in mixed precision; activations come on top and scale with the batch.
# - Count storages, not tensors; leave parameters out by storage, not by type.
# - In half precision and with dropout, one transformer layer saves $s b h (34 + 5 a s / h)$ bytes and $8 s b$ for its norms: exact for the operators it was written for.
# - Activations grow with depth in a line, with sequence length in a parabola; the logits may outweigh both.
# - The peak need not be where the forward pass ends. Measure both arms in the same state.
#
# **Next:** lesson 02 forgets activations and computes them again.
#
# </div>
# <div lang="zh">
#
# - 用 Adam 走一步，不论批次大小，每个参数都要占 16 字节，fp32 与混合精度都是如此；激活值另算，随批次增长。
# - 要数存储，不要数张量；排除参数要按存储，不要按类型。
# - 半精度、带 dropout 的一层 transformer 保存 $s b h (34 + 5 a s / h)$ 字节，归一化另加 $8 s b$：对它所针对的算子精确无误。
# - 激活值随深度呈直线增长，随序列长度呈抛物线增长；logits 可能比两者都大。
# - 峰值不一定在前向结束时。对比的两边要在相同的状态下测量。
#
# **下一步**：[第 02 课](02_checkpointing.ipynb)忘掉激活值，再重新算出来。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **Sources.** Korthikanti et al. 2022, *Reducing Activation Recomputation in Large Transformer Models*, arXiv:2205.05198 (the formula). Rajbhandari et al. 2020, *ZeRO*, arXiv:1910.02054 (16 bytes a parameter). PyTorch documentation of `torch.utils._python_dispatch`, `torch.autograd.graph` and the CUDA caching allocator. All measurements: `course_lib.memory`, in this notebook.
#
# </div>
# <div lang="zh">
#
# **出处。** Korthikanti et al. 2022，*Reducing Activation Recomputation in Large Transformer Models*，arXiv:2205.05198（公式）。Rajbhandari et al. 2020，*ZeRO*，arXiv:1910.02054（每个参数 16 字节）。PyTorch 文档中的 `torch.utils._python_dispatch`、`torch.autograd.graph` 和 CUDA 缓存分配器。全部测量都由本 notebook 用 `course_lib.memory` 完成。
#
# </div>
