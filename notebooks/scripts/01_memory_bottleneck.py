# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] slide={"en": "27.5 MB of weights. How many bytes does a step take at its peak, and for what?\n\nToday you work that out by hand.", "zh": "权重 27.5 MB。训练一步，峰值是多少字节？都用在哪里？\n\n今天，你要亲手把它算出来。"}
# # 1 Where do the bytes of a training step go? (memory analysis) / 训练步的字节去了哪里？（内存分析）
#
# <div lang="en">
#
# The weights of lesson 00's decoder take 27.5 MB. A training step of it needs far more memory than that, and it wastes none of it. Which bytes are these? When is each of them in memory? How many are there at the worst moment?
#
# By the end of this page you will have worked out the peak of this step by hand, to within a few bytes of the measurement.
#
# </div>
# <div lang="zh">
#
# 第 00 课的解码器，权重占 27.5 MB。它的一个训练步要用的内存远不止这些，而且没有哪个字节是浪费的。这些字节是什么？各自什么时候在内存里？最吃紧的那一刻，一共有多少？
#
# 学完这一页，你会亲手算出这一步的峰值，与实测只差几个字节。
#
# </div>

# %%
from course_lib.teaching import language

language()

# %% [markdown]
# <div lang="en">
#
# **Goals** (90 minutes). Name the kinds of bytes in a training step and say when each lives. Write the heart of a memory meter. Ask an operator what its derivative needs, predict from that what a decoder layer saves for backward, and with it the peak of a whole step. Count the step of a model that this machine could never run.
#
# **What to know before**: how to train a network in PyTorch. Lesson 00 shows how a lesson works, and its table says what each letter means. MB is $10^6$ bytes.
#
# </div>
# <div lang="zh">
#
# **目标**（90 分钟）：说出训练步里有哪几类字节、各自何时存活；写出内存计量器最关键的几行；逐个问算子“求导时要用什么”，由此预测一个解码器层为反向保存多少字节，进而算出整个训练步的峰值；给这台机器根本跑不动的模型算一笔账。
#
# **预备知识**：会用 PyTorch 训练网络。第 00 课讲了每一课怎么上，各个字母的含义见那里的符号表。MB 指 $10^6$ 字节。
#
# </div>

# %%
import weakref

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course_lib.lessons import lesson_01
from course_lib.lessons.ledger import ledger
from course_lib.memory import MemoryMeter, saved_tensors, symbolic
from course_lib.models import Decoder, DecoderLayer, random_tokens
from course_lib.teaching import category_label, predictions, table, timelines

# %% [markdown] slide={"en": "Parameters, gradients, optimizer state; activations; temporaries.\n\n**Guess first.** Adam, fp32: how many bytes does each of the first three take?", "zh": "参数、梯度、优化器状态；激活值；临时张量。\n\n**先猜**：用 Adam 和 fp32，前三类各占多少字节？"}
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
# The first three don't depend on the data. Adam keeps two numbers for each weight, its two **moments**: running means of its gradient and of the gradient's square. Everything is fp32, 4 bytes a number.
#
# So count the weights. A layer has four matrices, $h \to 3h$, $h \to h$, $h \to 4h$ and $4h \to h$, each with a bias as long as its output, and two LayerNorms with $2h$ numbers each. Beside the 8 layers there are the embedding of 2048 words, which the head uses too (the two are **tied**: one tensor), that of 128 positions, and a last LayerNorm. $h$ is 256.
#
# **Exercise 1.** How many weights has the decoder, and how many bytes does each of the three kinds take? Fill in the four numbers in the next cell (the weights as a count, the rest in bytes), and run it.
#
# </div>
# <div lang="zh">
#
# | 种类 | 由谁产生 | 何时消失 |
# |---|---|---|
# | 参数 | 建立模型 | 释放模型时 |
# | 梯度 | 反向 | `zero_grad()` |
# | 优化器状态 | 第一次 `step()` | 释放优化器时 |
# | 激活值：为反向而保存 | 前向 | 反向用完它时 |
# | 临时张量：其余的张量 | 任何算子 | 不再被引用时 |
#
# 前三类与数据无关。Adam 为每个权重存两个数，即两个**矩**：梯度的滑动平均，以及梯度平方的滑动平均。全部用 fp32，每个数 4 字节。
#
# 那就先数权重。每层有四个矩阵：$h \to 3h$、$h \to h$、$h \to 4h$、$4h \to h$，各带一个与输出等长的偏置；还有两个 LayerNorm，各 $2h$ 个数。8 层之外，有 2048 个词的嵌入（输出头也用它，两者**共享**同一个张量，英文叫 tied）、128 个位置的嵌入，以及最后一个 LayerNorm。$h$ 是 256。
#
# **练习 1。** 这个解码器有多少个权重？三类各占多少字节？在下一个单元格里填四个数（权重填个数，其余填字节数），再运行它。
#
# </div>

# %% minutes=6
mine = {"weights": None, "parameter": None, "gradient": None, "optimizer": None}
lesson_01.check_training_state(mine)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not lesson_01.check_training_state.accepted:
    h = 256
    layer = (3 + 1 + 4 + 4) * h**2 + (3 + 1 + 4 + 1) * h + 2 * 2 * h
    weights = 8 * layer + (2048 + 128) * h + 2 * h  # 6,875,648
    mine = {"weights": weights, "parameter": 4 * weights, "gradient": 4 * weights}
    mine["optimizer"] = 2 * 4 * weights

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
states = ("parameter", "gradient", "optimizer")
rows = [(category_label(kind), mine[kind], left[kind]) for kind in states]
predictions(rows, unit="bytes")

# %% [markdown] slide={"en": "$4 + 4 + 8 = 16$ bytes a parameter, in fp32.\n\n7 billion parameters: 112 GB before the first activation.", "zh": "fp32：每个参数 $4 + 4 + 8 = 16$ 字节。\n\n70 亿个参数：还没算激活值，就要 112 GB。"}
# <div lang="en">
#
# The 400 bytes: Adam also counts the steps, in 4 bytes for each of the 100 tensors.
#
# That is $4 + 4 + 8 = 16$ bytes a parameter. For mixed precision you will meet three accountings:
#
# | bytes a parameter | weights, gradients, the rest | whose |
# |---|---|---|
# | 16 | $2 + 2 + 12$: bf16 weight and gradient; fp32 **master weight** and two moments | ZeRO |
# | 18 | $6 + 4 + 8$: weights in both precisions, fp32 gradient, two moments | Hugging Face; Megatron, with its fp32 gradients |
# | 20 | $2 + 2 + 16$: as 16, and an fp32 copy of the gradient | Ultra-Scale Playbook |
#
# So 7 billion parameters, 14 GB of bf16 weights, need 112, 126 or 140 GB before the first activation: ask which recipe is meant. Sections 1.12 and 1.13 have some that go lower.
#
# </div>
# <div lang="zh">
#
# 多出的 400 字节：Adam 还为 100 个张量各记一个步数，每个 4 字节。
#
# 合起来是每个参数 $4 + 4 + 8 = 16$ 字节。混合精度则有三种算账的办法，你都会遇到：
#
# | 每个参数的字节 | 权重、梯度、其余 | 出自 |
# |---|---|---|
# | 16 | $2 + 2 + 12$：bf16 的权重和梯度；fp32 的**主权重**和两个矩 | ZeRO |
# | 18 | $6 + 4 + 8$：两种精度的权重、fp32 的梯度、两个矩 | Hugging Face；Megatron（梯度用 fp32 时） |
# | 20 | $2 + 2 + 16$：同 16，另加一份 fp32 的梯度 | Ultra-Scale Playbook |
#
# 因此一个 70 亿参数的模型，bf16 权重只有 14 GB，还没算激活值就要占 112、126 或 140 GB：先问清楚说的是哪种配方。1.12 节和 1.13 节有几种更低的。
#
# </div>

# %% [markdown] slide={"en": "How would you count the bytes that are alive?\n\nBytes lie in **storages**, and views share them. So watch every operator for new storages.", "zh": "怎么数出存活的字节？\n\n字节在**存储区**里，各个视图共用一份。所以守在每个算子后面，看有没有新的存储区。"}
# ## 1.2 A meter from nothing / 从零做一个计量器
#
# <div lang="en">
#
# How does the meter know? A tensor's bytes lie in its **storage**, and views share it. So stand behind every operator, look at the storages that came out and had not gone in, add their bytes, and subtract them when they die.
#
# Three tools do it. A `TorchDispatchMode` stands at the dispatcher, which every operator of PyTorch passes. `tree_leaves` takes lists, tuples and dictionaries apart. `weakref.finalize(object, function, argument)` calls `function(argument)` when the object dies. (`_cdata` is the storage's address, the same for every view; as long as the storage lives, PyTorch hands out the same object for it.)
#
# **Exercise 2.** Write the heart of it: between the operator's call and `return result`, count what is new, and see to it that it is taken off again. The check tries views, operators in place, `out=`, results that share a storage or do not fill it, and tensors that die: in each of them a meter that looks plausible goes wrong.
#
# </div>
# <div lang="zh">
#
# 计量器是怎么知道的？张量的字节在它的**存储区**（storage）里，各个视图共用一份。所以只要守在每个算子后面：凡是出来时有、进去时没有的存储区，就加上它的字节；等它释放，再减掉。
#
# 这要用到三样工具：`TorchDispatchMode` 守在**分发器**（dispatcher）处，PyTorch 的每个算子都要经过那里；`tree_leaves` 把列表、元组和字典拆开；`weakref.finalize(object, function, argument)` 在对象被回收时调用 `function(argument)`。（`_cdata` 是存储区的地址，各个视图都一样；存储区还在，PyTorch 给出的就是同一个对象。）
#
# **练习 2。** 写出最关键的几行：在调用算子之后、`return result` 之前，数出新的存储区，并安排好在它释放时减掉。检查会试这些情形：视图、原地算子、写入 `out=` 的算子、几个结果共用一个存储区或没有占满存储区，以及会释放的张量。看起来没错的计量器，往往就错在其中一种上。
#
# </div>


# %% minutes=8
def storages(values):
    return [x.untyped_storage() for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


class TinyMeter(TorchDispatchMode):
    live = peak = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        return result

    def count(self, change):
        self.live += change
        self.peak = max(self.peak, self.live)


lesson_01.check_meter(TinyMeter)


# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not lesson_01.check_meter.accepted:

    class TinyMeter(TorchDispatchMode):
        live = peak = 0

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            result = operator(*args, **(kwargs or {}))
            known = {storage._cdata for storage in storages((args, kwargs))}
            for storage in storages(result):
                if storage._cdata not in known:
                    known.add(storage._cdata)  # several results may share it
                    self.count(storage.nbytes())
                    weakref.finalize(storage, self.count, -storage.nbytes())
            return result

        def count(self, change):
            self.live += change
            self.peak = max(self.peak, self.live)


lesson_01.check_meter(TinyMeter)
### END SOLUTION


# %% slide="result"
def peak_of(meter):
    decoder.zero_grad()
    with meter:
        decoder.loss(tokens).backward()
    return meter


tiny, full = peak_of(TinyMeter()), peak_of(MemoryMeter())
difference = tiny.peak - full.peak_bytes
table(["difference of the peaks", "bytes"], [("`TinyMeter` − `MemoryMeter`", difference)])

# %% [markdown]
# <div lang="en">
#
# The two meters agree to the byte. (They were started after the weights and the optimizer's state had been made, and count neither.) The library's `MemoryMeter` works the same way and adds what these lines lack: kinds of bytes, phases, operators by name, a budget, threads, and tensors that pass no operator, as those of `torch.tensor([...])` do. A meter that watches every operator disturbs a little what it watches: section 1.20 shows where that matters.
#
# </div>
# <div lang="zh">
#
# 两个计量器一字节不差。（启动它们时，权重和优化器状态早已建立，所以都没有数进去。）课程库的 `MemoryMeter` 也是这样工作的，只是补上了这几行所缺的：字节的种类、阶段、算子的名字、预算、多线程，还有不经过算子就出现的张量，例如 `torch.tensor([...])` 建立的。守在每个算子后面的计量器，多少会扰动它所观察的东西：1.20 节会说明什么时候要当心。
#
# </div>

# %% [markdown] slide={"en": "Weights, gradients, state: 110.0 MB. Activations: 178.4 MB at most.\n\n**Guess first.** How high is the peak, and in which phase?", "zh": "权重、梯度、优化器状态：110.0 MB。激活值：最多 178.4 MB。\n\n**先猜**：峰值是多少？在哪个阶段？"}
# ## 1.3 The timeline of a step / 一个训练步的时间线
#
# <div lang="en">
#
# Calculators add up: weights, gradients, optimizer state, activations. You know the first three, 110.0 MB. The activations of this step come to 178.4 MB at most.
#
# **Guess first**, in MB: what will the peak be, and how many MB of gradients are there at that moment? In which phase is it: forward, backward, or the optimizer's step? (Lesson 00 has shown this step. Work it out without looking back.)
#
# </div>
# <div lang="zh">
#
# 网上的显存计算器都是做加法：权重、梯度、优化器状态、激活值。前三项你已经知道，共 110.0 MB；这一步的激活值最多 178.4 MB。
#
# **先猜**，以 MB 计：峰值是多少？那一刻有多少 MB 的梯度？峰值在哪个阶段：前向、反向，还是优化器更新时？（这一步在第 00 课里见过，请不要回头看，自己推算。）
#
# </div>

# %%
my_peak, my_gradients = None, None

# %% jupyter={"source_hidden": true} slide="result"
timelines({"one step": meter}, title="Gradients come as activations go: they never meet in full")

# %%
guesses = [my_peak and my_peak * 1e6, my_gradients and my_gradients * 1e6]
found = [meter.peak_bytes, meter.at_peak()["gradient"]]
predictions(zip(["peak", "gradients then"], guesses, found, strict=True))

# %% [markdown]
# <div lang="en">
#
# At the peak not one parameter has its gradient. Here are the eight operators around it that move 1 MB or more. Weights, state, and the activations that all eight hold are left out:
#
# </div>
# <div lang="zh">
#
# 峰值那一刻，还没有一个参数得到梯度。下面是峰值前后、使字节变化 1 MB 以上的八个算子。权重、优化器状态，以及八个算子时都在的激活值没有画出来：
#
# </div>

# %% slide="result"
lesson_01.draw_around_the_peak(meter, unit_bytes=4 * 8 * 128 * 2048)

# %% [markdown]
# <div lang="en">
#
# The peak lies at the very start of backward. The result of the log-softmax is kept; its gradient is made, a temporary; and from that, a second one, the gradient of the logits: three tensors of one size, while all activations are still there. From then on each layer gives back its activations and gets its gradients.
#
# So the sum of all kinds, 288.4 MB, is not the peak. With a single sequence:
#
# </div>
# <div lang="zh">
#
# 峰值就在反向刚开始的时候。log-softmax 的结果是保存着的；它的梯度刚求出来，是一个临时张量；再由它求出 logits 的梯度，又是一个：三个一样大的张量，而激活值全都还在。此后每一层交还自己的激活值，换来自己的梯度。
#
# 所以把各类相加得到的 288.4 MB 并不是峰值。只有一条序列时：
#
# </div>

# %% slide="result"
alone = make_decoder()
single = metered_step(alone, random_tokens(1, 128, 2048), torch.optim.Adam(alone.parameters()))
timelines({"1 sequence": single}, title="With one sequence the peak stands at the end of backward")

# %%
peak = max(single.timeline, key=lambda sample: sample.live_bytes)
peak.phase, peak.operator, single.peak_bytes, single.at_peak()["activation"]

# %% [markdown] slide={"en": "Where the peak is decides what helps against it.\n\nThis one lies at the end of backward, without any activation: checkpointing could not lower it.", "zh": "峰值在哪里，决定了什么办法管用。\n\n后一种峰值在反向的末尾，激活值一个也不剩：检查点帮不上忙。"}
# <div lang="en">
#
# Not one activation is left, and what runs is an `add`. What is added? The tied weight has two gradients: the head's came first, the embedding's comes last. Both are as large as the weight, 2.1 MB, and so is their sum: three tensors, where all other gradients are there already. Untied, this step would peak in the optimizer.
#
# Where the peak is decides what helps against it: checkpointing could not lower this one at all.
#
# </div>
# <div lang="zh">
#
# 激活值一个也不剩，正在运行的是 `add`。加的是什么？共享的权重有两份梯度：输出头的那份最先到，嵌入的那份最后到。两份都与权重一样大，2.1 MB，它们的和也是：其余的梯度已经全在，又多出三个张量。如果不共享，这一步的峰值就会在优化器里。
#
# 峰值在哪里，决定了什么办法管用：对这一种峰值，检查点一点忙也帮不上。
#
# </div>

# %% [markdown]
# ## 1.4 What one layer keeps / 一层保存了什么
#
# <div lang="en">
#
# The activations are the tall part. Which tensors are they? Autograd tells, through two **hooks**: functions of yours, the first called for each tensor that it saves for backward, the second when backward wants it again. Leave out the weights, which are there anyway, and count each storage once:
#
# </div>
# <div lang="zh">
#
# 图中最高的一块是激活值。它们是哪些张量？去问 autograd，用两个**钩子**（hook）：由你写的函数，autograd 每为反向保存一个张量，就调用第一个；反向要用它时，调用第二个。略去本来就在的权重，每个存储区只数一次：
#
# </div>

# %% slide="both"
weights = {parameter.untyped_storage()._cdata for parameter in decoder.parameters()}
kept = {}  # storage -> bytes


def pack(tensor):
    storage = tensor.untyped_storage()
    if storage._cdata not in weights:
        kept[storage._cdata] = storage.nbytes()
    return tensor


with saved_tensors_hooks(pack, lambda tensor: tensor):
    loss = decoder.loss(tokens)  # while it lives, so does all that is kept
len(kept), sum(kept.values())

# %% [markdown] slide={"en": "Why does an operator keep a tensor? **Ask what its derivative needs.**\n\n$y = x W$: $dW = x^\\top dy$ needs $x$.\n\n$P = \\mathrm{softmax}(S)$: $dS = P \\odot (dP - \\ldots)$ needs $P$, not $S$.\n\n$y = x + z$: needs nothing.", "zh": "算子为什么要保存一个张量？**看它求导时要用什么。**\n\n$y = x W$：$dW = x^\\top dy$，要用 $x$。\n\n$P = \\mathrm{softmax}(S)$：$dS = P \\odot (dP - \\ldots)$，要用 $P$，不用 $S$。\n\n$y = x + z$：什么也不用。"}
# <div lang="en">
#
# 178,413,636 bytes: the activations of the timeline. Now *why* these? Ask each operator what its derivative needs:
#
# - $y = x W$: $dW = x^\top dy$ and $dx = dy\, W^\top$ need $x$ and the weight, not $y$.
# - $P = \mathrm{softmax}(S)$: $dS = P \odot (dP - \ldots)$ needs $P$, not $S$.
# - $y = x + z$ passes its gradient on and needs nothing. GELU's derivative needs its input; LayerNorm's its input, and for each token the mean and the reciprocal deviation.
#
# A layer is these eight lines, for $b$ sequences of $s$ tokens; $S$ and $P$ are $s \times s$ for each of the $a$ heads:
#
# ```python
# y = norm1(x)             # LayerNorm
# q, k, v = qkv(y)         # one Linear: h → 3h
# S = q @ k.mT / d**0.5    # then the causal mask is added
# P = softmax(S)
# x = x + out(P @ v)       # Linear: h → h
# z = norm2(x)
# u = up(z)                # Linear: h → 4h
# x = x + down(gelu(u))    # Linear: 4h → h
# ```
#
# **Exercise 3.** Write what it keeps, in bytes, for any $b$, $s$, $h$ and $a$. Rows: `norms`, the LayerNorms' inputs; `statistics`, their means and deviations; `attention`, all from `y` to the input of `out` but P; `probabilities`, P; `feed-forward`, all from `z` on. Weights don't count. The check tells which row is wrong.
#
# </div>
# <div lang="zh">
#
# 178,413,636 字节，正是时间线上的激活值。可**为什么**是这些？逐个问算子，求导时要用什么：
#
# - $y = x W$：$dW = x^\top dy$，$dx = dy\, W^\top$，要用 $x$ 和权重，不用 $y$。
# - $P = \mathrm{softmax}(S)$：$dS = P \odot (dP - \ldots)$，要用 $P$，不用 $S$。
# - $y = x + z$ 只把梯度传下去，什么也不用。GELU 要用它的输入；LayerNorm 要用它的输入，外加每个 token 的均值和标准差倒数。
#
# 一层就是下面八行，$b$ 条序列，各 $s$ 个 token；$a$ 个头里，每个头的 $S$ 和 $P$ 都是 $s \times s$：
#
# ```python
# y = norm1(x)             # LayerNorm
# q, k, v = qkv(y)         # one Linear: h → 3h
# S = q @ k.mT / d**0.5    # then the causal mask is added
# P = softmax(S)
# x = x + out(P @ v)       # Linear: h → h
# z = norm2(x)
# u = up(z)                # Linear: h → 4h
# x = x + down(gelu(u))    # Linear: 4h → h
# ```
#
# **练习 3。** 对任意的 $b$、$s$、$h$、$a$，写出这一层保存的字节数。各行是：`norms`，两个 LayerNorm 的输入；`statistics`，它们的均值和标准差倒数；`attention`，从 `y` 到 `out` 的输入，P 除外；`probabilities`，即 P；`feed-forward`，从 `z` 往后的全部。权重不算。检查会指出哪一行错了。
#
# </div>


# %% minutes=16
def saved_by_one_layer(b, s, h, a):
    return dict.fromkeys(["norms", "statistics", "attention", "probabilities", "feed-forward"], 0)


lesson_01.check_layer_formula(saved_by_one_layer)


# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not lesson_01.check_layer_formula.accepted:

    def saved_by_one_layer(b, s, h, a):
        return {
            "norms": 4 * 2 * s * b * h,  # what the two LayerNorms get
            "statistics": 4 * 2 * 2 * s * b,
            "attention": 4 * 5 * s * b * h,  # y; q, k and v; P @ v
            "probabilities": 4 * a * s * s * b,
            "feed-forward": 4 * 9 * s * b * h,  # z; u and gelu(u), 4h wide each
        }


lesson_01.check_layer_formula(saved_by_one_layer)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# Now the list, from `saved_tensors`: it runs a function and lists what its graph holds for backward, your two hooks with names. The last columns say which tensor of the eight lines it is, and in which row of yours. (`Addmm` is a Linear layer, `mat1` its input. `Bmm` is a product for each sequence and head: 64 of them.)
#
# </div>
# <div lang="zh">
#
# 现在看清单。`saved_tensors` 运行一个函数，列出它的计算图为反向保存的张量：就是你那两个钩子，再加上名字。最后两列指出它是那八行里的哪个张量、归在你的哪一行。（`Addmm` 是线性层，`mat1` 是它的输入；`Bmm` 是每条序列、每个头各做一次的矩阵乘法，共 64 次。）
#
# </div>

# %% slide="result"
listed = saved_tensors(DecoderLayer(256, 8), torch.randn(8, 128, 256))  # 8 heads; (b, s, h)
lesson_01.rows_of_the_formula(listed)

# %% slide="result"
one_layer = saved_by_one_layer(b=8, s=128, h=256, a=8)
predictions([("one layer", sum(one_layer.values()), listed.total_bytes)], unit="bytes")

# %% [markdown] slide={"en": "$16 s b h + a s^2 b$ elements, and $4 s b$ for the statistics. In half precision, with dropout, it gives\n\n$$s b h \\left(34 + 5 \\frac{a s}{h}\\right) \\text{ bytes.}$$", "zh": "$16 s b h + a s^2 b$ 个元素，统计量另计 $4 s b$。在半精度、带 dropout 时，同样的数法得到\n\n$$s b h \\left(34 + 5 \\frac{a s}{h}\\right) \\text{ 字节。}$$"}
# <div lang="en">
#
# Not a byte off. One row is marked as seen before: softmax keeps the attention probabilities P, and the product with V keeps the same storage. Add up tensors instead of storages, as many scripts do, and you count 20% too much. (The causal mask keeps nothing, since it is added; filled in with `masked_fill` it keeps $s \times s$ booleans.)
#
# In elements your formula says $16 s b h + a s^2 b$, and $4 s b$ for the statistics. In half precision and with dropout the same count gives the formula of Korthikanti et al., $s b h \left(34 + 5 \frac{a s}{h}\right)$ bytes: two bytes an element, one for each element of three masks, and two more for P after its dropout. A formula holds for the operators it was counted for, and for no others (section 1.14).
#
# </div>
# <div lang="zh">
#
# 一字节不差。有一行标着“已见过”：softmax 保存了注意力概率 P，与 V 相乘时保存的是同一份存储区。许多脚本把张量逐个相加，而不按存储区来数，这里就会多算 20%。（因果掩码什么也不保存，因为它是加上去的；若用 `masked_fill` 填入，就要保存 $s \times s$ 个布尔值。）
#
# 按元素个数，你的公式是 $16 s b h + a s^2 b$，统计量另计 $4 s b$。在半精度、带 dropout 时，同样的数法就得到 Korthikanti 等人的公式：$s b h \left(34 + 5 \frac{a s}{h}\right)$ 字节：每个元素两字节，三个掩码每个元素一字节，dropout 之后的 P 再占两字节。公式只对它所数的算子成立，换了算子就不成立（见 1.14 节）。
#
# </div>

# %% [markdown] slide={"en": "Each layer keeps its own: bytes grow with depth as a line.\n\n**Guess first.** What is its slope, and what its intercept?", "zh": "每一层各存各的：字节数随深度线性增长。\n\n**先猜**：斜率是什么？截距又是什么？"}
# ## 1.5 Depth is a line, length a parabola / 深度是直线，长度是抛物线
#
# <div lang="en">
#
# Each layer keeps its own, so bytes grow with depth as a line. The slope is your sum. The intercept is what is kept with no layer at all: the last LayerNorm's input and statistics, the head's input, the log-softmax; and three small things, the token numbers that the embedding keeps (8,256 bytes), the targets (8,192), and one number of the loss (4). With symbolic tensors, which have shapes and no data, such a sweep takes a moment.
#
# </div>
# <div lang="zh">
#
# 每一层各存各的，所以字节数随深度线性增长。斜率就是你算出的总和；截距则是一层都没有时所保存的：最后一个 LayerNorm 的输入和统计量、输出头的输入、log-softmax 的结果；还有三样小的：嵌入保存的 token 编号（8,256 字节）、目标（8,192），以及损失的一个数（4）。符号张量只有形状、没有数据，用它扫一遍只要一会儿。
#
# </div>

# %% slide="result"
depths, saved = [2, 4, 8, 16], []
with symbolic():
    for layers in depths:
        deeper, batch = make_decoder(layers=layers), random_tokens(8, 128, 2048)
        saved.append(saved_tensors(deeper.loss, batch).total_bytes)
slope = (saved[-1] - saved[0]) // (depths[-1] - depths[0])
head = 4 * 8 * 128 * (2 * 256 + 2 + 2048)  # inputs of norm and head, statistics, log-softmax
rows = [("slope: one layer", sum(one_layer.values()), slope)]
rows.append(("intercept", head + 8_256 + 8_192 + 4, saved[0] - depths[0] * slope))
predictions(rows, unit="bytes")

# %% [markdown]
# <div lang="en">
#
# Length is another matter: P has $s^2$ elements a head. **Guess first**, in tokens: for this layer, $h = 256$ with 8 heads, from which length on does P outweigh all the rest together? (Set $a s^2 b$ equal to $16 s b h$.)
#
# </div>
# <div lang="zh">
#
# 长度就不同了：P 在每个头上有 $s^2$ 个元素。**先猜**（以 token 计）：这一层 $h = 256$、8 个头，从多长开始，P 超过其余各项之和？（令 $a s^2 b$ 等于 $16 s b h$。）
#
# </div>

# %%
my_length = None
lengths, layer_mb, p_mb = [128, 256, 512, 768, 1024], [], []
with symbolic():
    for s in lengths:
        rows = saved_tensors(DecoderLayer(256, 8), torch.randn(8, s, 256))
        layer_mb.append(rows.total_bytes / 1e6)
        p_mb.append(max(row.bytes for row in rows if row.operator == "SoftmaxBackward0") / 1e6)

# %% slide="result"
lesson_01.draw_lengths(lengths, layer_mb, p_mb, saved_by_one_layer, my_length)

# %% [markdown]
# <div lang="en">
#
# They cross at $s = 16 h / a = 512$: sixteen times the size of a head, here 32. Heads of 128, as in many large models, move the crossing to 2048 tokens. Beyond it attention is the memory problem, as long as P is kept. Most libraries' default, fused attention, no longer keeps it: lesson 06 shows how.
#
# </div>
# <div lang="zh">
#
# 两者在 $s = 16 h / a = 512$ 处相交：头维度（这里是 32）的十六倍。大模型的头维度多为 128，交点就移到 2048 个 token。过了交点，只要还保存 P，内存问题就是注意力问题。如今多数库默认用融合注意力，已经不保存 P 了：怎么做到的，见第 06 课。
#
# </div>

# %% [markdown] slide={"en": "The head holds **three tensors** of the logits' size: one kept, two temporary.\n\n**Guess first.** Which parts make up the whole peak?", "zh": "输出头占着**三个**与 logits 一样大的张量：一个是保存的，两个是临时的。\n\n**先猜**：整个峰值由哪些部分相加而成？"}
# ## 1.6 The logits, and the whole peak / logits，以及整个峰值
#
# <div lang="en">
#
# Now the whole peak. The picture in section 1.3 shows its last part: **three tensors of the logits' size**, one kept and two temporary. (Where a head upcasts bf16 logits to fp32, there are more.) The token numbers don't count here, since the meter takes the batch as given; and the loss has let go of its targets before the peak.
#
# **Exercise 4.** Which bytes are there at the peak? Fill in four parts, in bytes: `state`, what was there before the step began; `layers`, all eight; `norm and head`, what the last LayerNorm and the head keep, the logits aside; `logits`, everything of their size. You have every part.
#
# </div>
# <div lang="zh">
#
# 现在算整个峰值。1.3 节的图给出了最后一部分：**三个与 logits 一样大的张量**，一个是保存的，两个是临时的。（如果输出头把 bf16 的 logits 转成 fp32，还会更多。）token 编号在这里不算，因为计量器把批次当作早就有的；目标在峰值之前已被损失释放。
#
# **练习 4。** 峰值那一刻有哪些字节？填四个部分，以字节计：`state`，这一步开始之前就有的；`layers`，八层合计；`norm and head`，最后一个 LayerNorm 和输出头所保存的，logits 除外；`logits`，与它一样大的全部张量。各部分你手上都有了。
#
# </div>

# %% minutes=8
my_parts = {"state": None, "layers": None, "norm and head": None, "logits": None}
lesson_01.check_whole_peak(my_parts)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not lesson_01.check_whole_peak.accepted:
    b, s, h, v = 8, 128, 256, 2048
    my_parts = {
        "state": left["parameter"] + left["optimizer"],
        "layers": 8 * sum(one_layer.values()),
        "norm and head": 4 * s * b * h + 4 * 2 * s * b + 4 * s * b * h,
        "logits": 3 * 4 * s * b * v,
    }

lesson_01.check_whole_peak(my_parts)
### END SOLUTION

# %% slide="result"
my_sum = sum(part or 0 for part in my_parts.values())
predictions([("the whole peak", my_sum, meter.peak_bytes)], unit="bytes")

# %% [markdown] slide={"en": "The 8 bytes are the loss and its gradient.\n\nA vocabulary of 2048: logits make 9% of the peak. And a real one?", "zh": "这 8 个字节是损失和它的梯度。\n\n词表只有 2048 时，logits 占峰值的 9%。真实的词表呢？"}
# <div lang="en">
#
# The 8 bytes are the loss and its gradient: two numbers. With a vocabulary of 2048, 9% of this peak belongs to the logits. Real ones are larger. Beside the peak stands what a calculator would say, weights, gradients, state and activations added up:
#
# </div>
# <div lang="zh">
#
# 这 8 个字节是损失和它的梯度：两个数。词表只有 2048 时，logits 占峰值的 9%。真实的词表要大得多。峰值旁边列出计算器的答案，即权重、梯度、优化器状态和激活值相加：
#
# </div>

# %% slide="result"
rows = []
for vocabulary in (2048, 8192, 32768):
    with symbolic():
        model, batch = make_decoder(vocabulary=vocabulary), random_tokens(8, 128, vocabulary)
        found = metered_step(model, batch, torch.optim.Adam(model.parameters()))
    ended, most = found.timeline[-1].bytes, int(found.series()["activation"].max())
    added = sum(ended[kind] for kind in states) + most
    share = 3 * 4 * 8 * 128 * vocabulary / found.peak_bytes
    rows.append((vocabulary, found.peak_bytes / 1e6, f"{share:.0%}", added / 1e6))
headings = ["vocabulary", "peak (MB)", "three times the logits, of it", "kinds added up (MB)"]
table(headings, [(v, round(peak, 1), share, round(added, 1)) for v, peak, share, added in rows])

# %% [markdown]
# <div lang="en">
#
# With 32768 words more than half of the peak belongs to one matrix product and its loss. And adding up the kinds, 4% too much with the small vocabulary, is 28% too low with the large one: it counts gradients and activations that never meet, and leaves out the temporaries. Lesson 02 computes this loss in pieces, so that the logits never exist whole.
#
# </div>
# <div lang="zh">
#
# 词表为 32768 时，峰值的一半以上属于一次矩阵乘法和它的损失。把各类相加，词表小时多算 4%，词表大时却少算 28%：它把从不同时存在的梯度和激活值加在一起，又漏掉了临时张量。第 02 课会把这个损失分段计算，让完整的 logits 从不出现。
#
# </div>

# %% [markdown] slide={"en": "Shapes without data: no memory is taken.\n\n**Guess first.** 7 B: 105.3 GB at 16 bytes a parameter. How much do activations add?", "zh": "只有形状、没有数据：内存也不占用。\n\n**先猜**：7 B 模型，每个参数 16 字节，共 105.3 GB。激活值会让峰值再增加多少？"}
# ## 1.7 Seven billion parameters on this laptop / 在这台电脑上算 70 亿参数
#
# <div lang="en">
#
# `symbolic()` is PyTorch's `FakeTensorMode` with storages that the meter can count. Nothing is computed, no memory is taken, and every operator of the real step goes by. The recipe: bf16, Adam with fp32 master weights (one parameter after the other), one sequence of 2048 tokens, fused attention, which keeps one fp32 number a row of each head in place of P.
#
# Your formula serves again: without P, and at 2 bytes a number. **Guess first**, in GB: the model of 6.6 billion parameters ($h$ 4096, 32 heads, 32 layers) takes 105.3 GB at 16 bytes each. What is its peak, and in which phase?
#
# </div>
# <div lang="zh">
#
# `symbolic()` 就是 PyTorch 的 `FakeTensorMode`，只是计量器能数出其中的存储区。什么都不计算，内存也不占用，而真实训练步的每个算子都会走一遍。配方是：bf16，Adam 带 fp32 主权重（逐个参数更新），一条 2048 个 token 的序列，融合注意力：它不保存 P，每个头的每一行只保存一个 fp32 数。
#
# 你的公式还能再用：去掉 P，每个数 2 字节。**先猜**，以 GB 计：66 亿参数的模型（$h$ 为 4096、32 个头、32 层）按每个 16 字节占 105.3 GB。峰值是多少？在哪个阶段？
#
# </div>

# %%
my_giant_peak = None


def my_activations(h, a, layers):
    rows = saved_by_one_layer(b=1, s=2048, h=h, a=a)
    layer = (sum(rows.values()) - rows["probabilities"]) // 2 + 4 * a * 2048
    return layers * layer + 2 * 2048 * (2 * h + 2 + 32_000)  # the head, as in section 1.5


# %% slide="code"
def giant_step(hidden, heads, layers, batch=1):
    sizes = {"vocabulary": 32_000, "hidden": hidden, "heads": heads, "layers": layers}
    with symbolic(), MemoryMeter() as meter:
        model = Decoder(**sizes, sequence=2048, fused=True).bfloat16()
        adam = lesson_01.MixedAdam(model)  # fp32 master weights and moments
        tokens = random_tokens(batch, 2048, 32_000)
        model.loss(tokens).backward()
        adam.step()
    return meter


# %% slide="result"
rows = [("7 B, your guess", "–", "–", my_giant_peak or "–", "–")]
for name, shape in {"1 B": (2048, 16, 18), "7 B": (4096, 32, 32), "70 B": (8192, 64, 80)}.items():
    giant = giant_step(*shape)
    peak = max(giant.timeline, key=lambda sample: sample.live_bytes)
    counts = (my_activations(*shape), giant.series()["activation"].max(), giant.peak_bytes)
    rows.append((name, *(f"{count / 1e9:,.3f}" for count in counts), peak.phase))
table(["model", "your formula (GB)", "most activations (GB)", "peak (GB)", "peak in"], rows)

# %% [markdown] slide={"en": "The activations of the 7 B model add nothing to this peak.\n\nSo it is for a loop over parameters, and one sequence.", "zh": "7 B 模型的激活值，对这个峰值毫无影响。\n\n这是逐个参数循环更新、只有一条序列时的结论。"}
# <div lang="en">
#
# Your formula, written for a model of 7 million parameters, gives the 8.8 GB of the model of 7 billion. And they add nothing to the peak: they are gone before the last gradients have come, and the peak waits in the optimizer, above the 16 bytes by three fp32 temporaries of the largest parameter. With the small model it is the other way round.
#
# This holds for this recipe, a loop over parameters, and one sequence (try `batch=8`). No step of the largest model has ever run on this machine, and yet its bytes are counted operator by operator.
#
# </div>
# <div lang="zh">
#
# 你的公式是对着 700 万参数的小模型推出来的，用到 70 亿参数的模型上，照样算准了那 8.8 GB。而激活值对峰值毫无影响：最后几个梯度还没到，它们就已释放；峰值要到优化器里才出现，只比 16 字节的部分多三个 fp32 临时张量，大小与最大的参数相同。模型小的那一行，情形正相反。
#
# 这只是这个配方（逐个参数循环更新）、一条序列时的结论（可以试试 `batch=8`）。最大的模型从未在这台机器上真正跑过一步，它的字节却逐个算子数清了。
#
# </div>

# %% [markdown]
# ## 1.8 In your own code / 实际怎么写
#
# <div lang="en">
#
# The same questions, asked with PyTorch alone. PyTorch has a meter of its own, too, and the hooks of section 1.4; `torch.profiler` runs on any CPU (`measure` takes the allocator's figure from it); the others need a GPU and are not run here.
#
# </div>
# <div lang="zh">
#
# 同样的问题，只用 PyTorch 来问。PyTorch 自己也有一个计量器，还有 1.4 节用过的钩子；`torch.profiler` 在任何 CPU 上都能跑（`measure` 里分配器的数就取自它）；其余的需要 GPU，这里没有运行。
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

# %% [markdown]
# <div lang="en">
#
# | question | you type |
# |---|---|
# | what autograd keeps | `torch.autograd.graph.saved_tensors_hooks(pack, unpack)` |
# | bytes by operator, on any device | `torch.profiler.profile(profile_memory=True)` |
# | most bytes allocated since `torch.cuda.reset_peak_memory_stats()` | `torch.cuda.max_memory_allocated()` |
# | bytes taken from the driver, free blocks included | `torch.cuda.memory_reserved()` |
# | who allocated what, with stack traces | `torch.cuda.memory._record_memory_history()`, the step, `torch.cuda.memory._dump_snapshot("step.pickle")`, then the viewer at pytorch.org/memory_viz |
#
# </div>
# <div lang="zh">
#
# | 问题 | 写法 |
# |---|---|
# | autograd 保存了什么 | `torch.autograd.graph.saved_tensors_hooks(pack, unpack)` |
# | 按算子统计的字节，任何设备 | `torch.profiler.profile(profile_memory=True)` |
# | 自 `torch.cuda.reset_peak_memory_stats()` 以来最多分配了多少字节 | `torch.cuda.max_memory_allocated()` |
# | 向驱动要来多少字节（含空闲块） | `torch.cuda.memory_reserved()` |
# | 谁分配了什么，连同调用栈 | `torch.cuda.memory._record_memory_history()`，运行这一步，`torch.cuda.memory._dump_snapshot("step.pickle")`，再用 pytorch.org/memory_viz 查看 |
#
# </div>

# %% [markdown]
# ## 1.9 Claims and measurements / 说法与实测
#
# <div lang="en">
#
# Three sentences that people meet, each tried on this step. The second and the third are tried with `torch.autocast`: bf16 operators, fp32 weights (section 1.13 has all in bf16). We count it symbolically, because many CPUs are slow in bf16.
#
# </div>
# <div lang="zh">
#
# 三句常见的说法，都拿这一步来检验。后两句用 `torch.autocast`：算子用 bf16，权重仍是 fp32（全用 bf16 的见 1.13 节）；这里用符号张量来数，因为许多 CPU 算 bf16 很慢。
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
    with MemoryMeter(mixed, mixed_adam) as mixed_meter:
        autocast_step()

# %% slide="result"
stays = sum(mixed_meter.timeline[-1].bytes[kind] for kind in states)
added = sum(left[kind] for kind in states) + int(meter.series()["activation"].max())
what_you_may_have_read("01", *lesson_01.figures_of_claims(meter, added, autocast, stays))

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
# 每一课都以一行账结束：同一个解码器的同一步，只用一种技术。下面再把基线的峰值拆成你预测过的各个部分，并写明哪一课来对付它。
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
# - Parameters, gradients and optimizer state don't depend on the batch: 16 bytes a parameter with Adam in fp32; in mixed precision 16, 18 or 20, by the recipe. Activations do.
# - The kinds are not all there at once. Gradients come as activations go, so the peak lies where one of them is still whole: here at the start of backward, for a large model with one sequence in the optimizer.
# - Ask an operator what its derivative needs: that is what it keeps. Count storages, not tensors.
# - One layer of this decoder keeps $16 s b h + a s^2 b$ elements and its statistics. From $s = 16 h / a$ on P outweighs the rest together.
# - The head holds three tensors of the logits' size at the peak.
#
# **Next:** [lesson 02](02_checkpointing.ipynb) forgets activations and computes them again.
#
# </div>
# <div lang="zh">
#
# - 参数、梯度和优化器状态与批次无关：用 Adam 和 fp32 时每个参数 16 字节；混合精度按配方不同，是 16、18 或 20 字节。激活值则随批次变化。
# - 各类字节并非同时都在。激活值释放，梯度才陆续到来，所以峰值出现在其中一方还完整的时候：这里是反向刚开始时，而只有一条序列的大模型则是在优化器里。
# - 看一个算子求导时要用什么，它就保存什么。要数存储区，不要数张量。
# - 这个解码器的一层保存 $16 s b h + a s^2 b$ 个元素，外加统计量。从 $s = 16 h / a$ 起，P 比其余各项之和还大。
# - 峰值时，输出头占着三个与 logits 一样大的张量。
#
# **下一步**：[第 02 课](02_checkpointing.ipynb)忘掉激活值，再重新算出来。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **Sources.** Korthikanti et al. 2022, *Reducing Activation Recomputation in Large Transformer Models*, arXiv:2205.05198 (the formula). Rajbhandari et al. 2020, *ZeRO*, arXiv:1910.02054 (16 bytes a parameter); Hugging Face documentation, *GPU memory usage* (18); Hugging Face, *The Ultra-Scale Playbook*, 2025 (20). PyTorch documentation, *Understanding CUDA Memory Usage*, and its *Performance Tuning Guide*. All measurements: `course_lib.memory`, in this notebook.
#
# </div>
# <div lang="zh">
#
# **出处。** Korthikanti et al. 2022，*Reducing Activation Recomputation in Large Transformer Models*，arXiv:2205.05198（公式）。Rajbhandari et al. 2020，*ZeRO*，arXiv:1910.02054（每个参数 16 字节）；Hugging Face 文档 *GPU memory usage*（18）；Hugging Face，*The Ultra-Scale Playbook*，2025（20）。PyTorch 文档 *Understanding CUDA Memory Usage* 和 *Performance Tuning Guide*。全部测量都由本 notebook 用 `course_lib.memory` 完成。
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
# 以下内容，其他各课都不会用到。各节互相独立，只用到前面正文里定义过的名字。
#
# </div>

# %% [markdown]
# ## 1.12 Recipes of Adam / Adam 的几种配方
#
# <div lang="en">
#
# A loop over parameters needs two temporaries, each as large as the parameter at hand. `foreach=True`, the default of `torch.optim.Adam` on CUDA, treats all parameters at once and makes a temporary as large as all of them: in fp32 4 bytes a parameter more, 28 GB for 7 billion. `fused=True` needs none (Hugging Face's `Trainer` defaults to it). Here is the most that is live during `step()`:
#
# </div>
# <div lang="zh">
#
# 逐个参数循环更新时，需要两个临时张量，各与手头的那个参数张量一样大。`foreach=True` 是 `torch.optim.Adam` 在 CUDA 上的默认做法，它一次处理全部参数，要有一份与全部参数一样大的临时张量：fp32 时每个参数多 4 字节，70 亿个参数就是 28 GB。`fused=True` 一份也不需要（Hugging Face 的 `Trainer` 默认用它）。下面是 `step()` 期间最多存活的字节：
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
headings = ["Adam", "most in step() (bytes)", "of the parameters", "peak, one sequence"]
table(headings, rows)

# %% [markdown]
# <div lang="en">
#
# With one sequence, `foreach` alone moves the peak into the optimizer and raises it by a fifth. Four ways lead below 16 bytes a parameter: 8-bit optimizer states (2 bytes a parameter in place of 8), an update inside backward (no gradients kept, lesson 05), adapters (next section), and sharding (lesson 08).
#
# </div>
# <div lang="zh">
#
# 只有一条序列时，单是 `foreach` 就把峰值移到了优化器里，还抬高了五分之一。也有每个参数不到 16 字节的做法：8 位优化器状态（每个参数 2 字节，而不是 8 字节）、在反向中就更新（不保留梯度，第 05 课）、适配器（下一节），以及分片（第 08 课）。
#
# </div>

# %% [markdown]
# ## 1.13 Half precision, and adapters / 半精度与适配器
#
# <div lang="en">
#
# `torch.autocast` leaves weights, gradients and states in fp32 and makes bf16 copies of the weights in forward; only activations shrink, and not all: LayerNorm and the loss keep fp32 (on a GPU softmax does, too). Weights in bf16 halve everything, but without fp32 master weights small updates are lost to rounding. LoRA (Hu et al. 2021, arXiv:2106.09685) trains two thin matrices beside each frozen one: gradients and states all but vanish. Of the activations only one part goes: the inputs a frozen matrix would have needed for its own gradient.
#
# </div>
# <div lang="zh">
#
# `torch.autocast` 让权重、梯度和状态留在 fp32，前向时另造一份 bf16 的权重；变小的只有激活值，而且不是全部：LayerNorm 和损失的仍是 fp32（在 GPU 上，softmax 的也是）。权重也用 bf16，一切都减半，但没有 fp32 主权重，小的更新会被舍入掉。LoRA（Hu et al. 2021，arXiv:2106.09685）在每个冻结的矩阵旁训练两个很窄的矩阵：梯度和状态几乎消失。激活值只省下一部分：冻结的矩阵求自己的梯度时才要用的那些输入。
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
table(["recipe", "peak (MB)"], rows)

# %% [markdown]
# <div lang="en">
#
# **Exercise 5.** A model of 7 billion parameters is frozen in bf16, and adapters of 20 million parameters are trained with Adam, all in fp32. How many bytes do weights, gradients and state take together? (`answer`, in bytes.)
#
# </div>
# <div lang="zh">
#
# **练习 5。** 一个 70 亿参数的模型以 bf16 冻结，另用 Adam 训练 2000 万个参数的适配器，适配器全部用 fp32。权重、梯度和优化器状态共占多少字节？（`answer`，以字节计。）
#
# </div>

# %% minutes=3
answer = None
lesson_01.check_adapter_bytes(answer)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not lesson_01.check_adapter_bytes.accepted:
    frozen, trained = 7_000_000_000, 20_000_000
    answer = 2 * frozen + (4 + 4 + 8) * trained

lesson_01.check_adapter_bytes(answer)
### END SOLUTION

# %% [markdown]
# ## 1.14 A formula holds for its operators / 公式只对它所数的算子成立
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
# Attention alone, 12 heads of 64, over sequence lengths. The attention scores S are not kept: softmax needs only P for its gradient. And P is seen twice, so adding up tensors counts it twice. The fused kernel keeps Q, K, V, the output and one number a row.
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
table(["tokens", "standard (MB)", "if S were kept (MB)", "fused (MB)"], rows)

# %% [markdown]
# ## 1.16 A memory monitor / 内存监视器
#
# <div lang="en">
#
# Monitors in training scripts print a figure after each phase. The meter's `live_bytes` does it on any machine; its `moments` say where in the trace that was.
#
# </div>
# <div lang="zh">
#
# 训练脚本里的监视器会在每个阶段之后打印一个数。用计量器的 `live_bytes`，在任何机器上都能做到；`moments` 则记下那是轨迹里的哪一刻。
#
# </div>

# %%
model, rows, marks = make_decoder(), [], []
optimizer = torch.optim.Adam(model.parameters())


def reading(meter):
    torch.empty(0)  # an operator of no bytes: what has died by now is off the books
    marks.append(meter.moments)
    return meter.live_bytes / 1e6


# %%
with MemoryMeter(model, optimizer) as monitor:
    for number in (1, 2, 3):
        readings = [number, reading(monitor)]
        loss = model.loss(tokens)
        readings.append(reading(monitor))
        loss.backward()
        readings.append(reading(monitor))
        optimizer.step()
        readings.append(reading(monitor))
        optimizer.zero_grad()
        rows.append([*readings, reading(monitor)])

# %%
rounded = [[round(reading, 1) for reading in row] for row in rows]
headings = ["step", "before (MB)", "forward (MB)", "backward (MB)", "step(), MB", "zero_grad(), MB"]
table(headings, rounded)

# %% [markdown]
# <div lang="en">
#
# The same forward pass reads 55.0 MB less in the first step than ever after: Adam's state is made at the end of step 1. And no reading between phases sees the peak, which lies inside backward.
#
# </div>
# <div lang="zh">
#
# 同样的前向，第一步的读数比以后少 55.0 MB：Adam 的状态在第 1 步末尾才建立。峰值在反向之中，只在阶段之间读数，就永远看不到它。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# On a GPU such a monitor prints two more figures: **allocated memory** (live bytes, rounded up) and **reserved memory**, which the caching allocator has taken from the driver and keeps for later. Its rules are public, so they can be followed on the meter's trace without a GPU: `trace.allocated()` does it. All figures of this section and the next are **simulated**; section 1.21 has a GPU's own.
#
# </div>
# <div lang="zh">
#
# 在 GPU 上，这样的监视器还会多打印两个数：**已分配显存**（存活的字节，向上取整）和**已预留显存**，即缓存分配器向驱动要来、留着以后用的字节。它的规则是公开的，没有 GPU 也能拿计量器的轨迹照着走一遍：`trace.allocated()` 做的就是这件事。本节和下一节的数都是**模拟**的；GPU 自己的数见 1.21 节。
#
# </div>

# %%
trace, rows = monitor.trace(), []
phases = ["before", "forward", "backward", "step()", "zero_grad()"]
for i, mark in enumerate(marks[:10]):
    simulated = trace[:mark].allocated().memory_stats()
    counts = [simulated[f"{kind}_bytes.all.current"] for kind in ("allocated", "reserved")]
    live = int(trace[:mark].live_bytes[-1])
    rows.append((1 + i // 5, f"`{phases[i % 5]}`", *(round(n / 1e6, 1) for n in (live, *counts))))
table(["step", "after", "live (MB)", "allocated (MB)", "reserved (MB)"], rows)

# %% [markdown]
# <div lang="en">
#
# Allocated follows the live bytes. Reserved only rises: what `zero_grad` lets go stays with the allocator. The second step takes it from there, and asks for 44 MB more, since Adam's state now lies in between; the third asks for none. And here is a step as PyTorch's memory viewer gets it. `save_snapshot` writes what `torch.cuda.memory._dump_snapshot` writes on a GPU, with module and source line of each block: open it at pytorch.org/memory_viz. (Drawn here from the file; the page itself was not opened.)
#
# </div>
# <div lang="zh">
#
# 已分配跟着存活的字节走。已预留只升不降：`zero_grad` 放掉的，仍留在分配器手里。第二步就从那里取，另外又要了 44 MB，因为中间已经放进了 Adam 的状态；第三步一点也不再要。下面是 PyTorch 的显存查看器会拿到的一步。`save_snapshot` 写出的文件，与 GPU 上 `torch.cuda.memory._dump_snapshot` 写的一样，每块都带着模块和源代码行：可以用 pytorch.org/memory_viz 打开。（下图按这个文件画出，那个网页本身我们没有打开过。）
#
# </div>

# %%
lesson_01.draw_in_the_viewer(trace[marks[5] - 1 : marks[9]])

# %% [markdown]
# ## 1.17 The same bytes, in another order / 同样的字节，换个顺序
#
# <div lang="en">
#
# PyTorch's *Performance Tuning Guide* warns of training on batches of different lengths: a short batch that is followed by a longer one "causes fragmentation in the caching allocator, which may result in out-of-memory errors". Its remedy is to run the longest batch once before training, forward and backward, without the optimizer. Here are two batches for our decoder, A of 2 × 384 tokens and B of 2 × 512, each trained on twice, and a (simulated) device of 388 MiB. **Guess first**: the bytes at the peak are the same in either order. Does the order matter?
#
# </div>
# <div lang="zh">
#
# PyTorch 的《Performance Tuning Guide》提醒过，用长短不一的批次训练时，短批次之后若来一个更长的批次，就会让缓存分配器产生显存碎片，可能导致显存不足。它的办法是在训练之前，先用最长的批次做一次前向和反向，不运行优化器。这里给我们的解码器准备两个批次：A 是 2 × 384 个 token，B 是 2 × 512 个，各训练两次；（模拟的）设备有 388 MiB。**先猜**：两种顺序的峰值字节数相同，那么顺序还要紧吗？
#
# </div>


# %%
from course_lib.budget.step import make_state


def trained_on(*lengths, first=lambda model, optimizer: None):
    with symbolic(), MemoryMeter() as watched:
        model, ends = make_decoder(sequence=512), []
        optimizer = torch.optim.Adam(model.parameters())
        first(model, optimizer)
        for length in lengths:
            model.loss(random_tokens(2, length, 2048)).backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.empty(0)
            ends.append(watched.moments)
    return watched.trace(), ends


# %%
def rehearse(model, optimizer):  # the guide's remedy
    model.loss(random_tokens(2, 512, 2048)).backward()
    optimizer.zero_grad()


# %%
short_first, ends = trained_on(384, 512, 384, 512)
long_first, _ = trained_on(512, 384, 512, 384)
state_first, _ = trained_on(384, 512, 384, 512, first=make_state)
rehearsed, _ = trained_on(384, 512, 384, 512, first=rehearse)
scenes, rows = {"A, B, A, B": short_first, "B, A, B, A": long_first}, []
scenes |= {"A, B, A, B, Adam's state first": state_first, "B once, then A, B, A, B": rehearsed}
for name, scene in scenes.items():
    for settings in ("", "expandable_segments:True"):
        device, said = lesson_01.replayed(scene, 388 << 20, settings)
        verdict = "out of memory" if said else "fits"
        rows.append((name, f"`{settings}`" if settings else "–", scene.peak_bytes, verdict))
table(["order", "settings", "most live (bytes)", "388 MiB"], rows)

# %%
print(lesson_01.replayed(short_first, 388 << 20)[1].partition(" If reserved")[0])

# %% [markdown]
# <div lang="en">
#
# A tensor of 8 MiB was wanted. 18 MiB are free, but PyTorch asks for a segment of 20; 16 are reserved and unallocated, but in holes too small for it. Whose are they? Adam's state, made at the end of the first step, was laid into segments that were cut for A, and it stays: what is left of them can be neither used whole nor given back. Made before the first batch, it lies by itself, and the order no longer matters. The guide's remedy works here as well, because the segments are cut for B from the start. And `expandable_segments` keeps one long segment per pool, which grows page by page. (None of these is a law. Without a limit, `expandable_segments` may reserve more. Without an optimizer, these two batches need the larger device when the long one comes first.)
#
# </div>
# <div lang="zh">
#
# 当时要放的张量是 8 MiB。空闲的有 18 MiB，可 PyTorch 要的是 20 MiB 的一整段；已预留但未分配的有 16 MiB，却是些零碎的空当，放不下它。空当是怎么来的？Adam 的状态在第一步末尾建立，放进了为 A 切开的内存段里，此后一直占着，所以段里剩下的部分既不能整块用，也还不回去。在第一个批次之前就把状态建好，它自成一处，顺序也就不再要紧。那份指南的办法在这里也管用，因为各段从一开始就是为 B 切的。而 `expandable_segments` 让每个池只有一个长的内存段，一页一页地长。（这些都不是定律。不设上限时，`expandable_segments` 也可能多预留一些。如果没有优化器，这两个批次反而是长的在前时需要更大的设备。）
#
# </div>

# %%
stats = [trace[: marks[i]].allocated().memory_stats() for i in (9, 14)]
after_steps = [each["reserved_bytes.all.current"] for each in stats]
lesson_01.allocator_claims(short_first, 388 << 20, ends, after_steps)

# %% [markdown]
# <div lang="en">
#
# `nvidia-smi` shows more than is reserved: CUDA's context comes on top, 426 MiB for a process that had done nothing else (unsloth-zoo, pull request 1053, on an RTX 6000 Ada). And of what is reserved cuBLAS keeps a workspace for itself, 8 MiB a stream, 32 on Hopper (PyTorch's documentation, *CUDA semantics*), which no tensor shows and which is not simulated here.
#
# </div>
# <div lang="zh">
#
# `nvidia-smi` 显示的比已预留的还多：要加上 CUDA 上下文，一个别的什么也没做的进程是 426 MiB（unsloth-zoo 的第 1053 号合并请求，RTX 6000 Ada）。已预留的里面，cuBLAS 还占着一份工作区，每条流 8 MiB，Hopper 上 32 MiB（PyTorch 文档 *CUDA semantics*）；它不是张量，这里也没有模拟。
#
# </div>

# %% [markdown]
# ## 1.18 How to compare fairly / 怎样公平地比较
#
# <div lang="en">
#
# "Run plain first, then the other, and compare the growth." Compare a network with itself in this way; a method that can be trusted finds no difference. The network: a deep MLP, 84 MB of weights, a batch of 32.
#
# </div>
# <div lang="zh">
#
# “先跑基线，再跑另一个，比较增量。”用这个办法拿一个网络与它自己比较；靠得住的方法不该看出差别。网络是一个深层 MLP：权重 84 MB，批次大小 32。
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
table(["method", "first run (bytes)", "second run (bytes)"], rows)

# %% [markdown]
# <div lang="en">
#
# Doing nothing "saves" 65%: the first run pays for Adam's state. Where the peak lies in backward, as the decoder's does, the same mistake goes unnoticed, which makes it worse. `measure` brings every arm into the same state before it counts. (The 20 pairs of Linear and GELU keep 40 activations, not 20: each keeps its own input.)
#
# </div>
# <div lang="zh">
#
# 什么都没做，就“省”了 65%：建立 Adam 状态的开销全算在了第一次头上。如果峰值像解码器那样在反向里，同样的错误就露不了馅，这才更糟。`measure` 先让各方处于同样的状态再计数。（20 对 Linear 和 GELU 保存 40 个激活值，不是 20 个：两者各存自己的输入。）
#
# </div>

# %%
qkv = [torch.randn(1, 12, 512, 64, requires_grad=True) for _ in range(3)]
attention, activations = saved_tensors(standard, *qkv), saved_tensors(mlp, x)
forward = meter.timeline[meter.phases().index("backward") - 1].live_bytes
counts = (attention.total_bytes, activations.total_bytes / x.nbytes)
lesson_01.older_claims(growth, *counts, forward, meter.peak_bytes)

# %% [markdown]
# ## 1.19 What the meter leaves out / 计量器没有数的部分
#
# <div lang="en">
#
# The meter counts tensors. An operator may also take **workspace**, used and freed inside itself. For the decoder there is next to none. For convolutions there is a lot, and fused attention takes some (lesson 06 comes back to it); how much depends on the machine, as seconds do. `measure` always reports both, and stored outputs of this course compare tensors only.
#
# </div>
# <div lang="zh">
#
# 计量器数的是张量。算子还可能申请**工作区**，在自己内部用完就释放。解码器几乎没有工作区；卷积的工作区很大，融合注意力也有一些（第 06 课还会谈到）；大小因机器而异，与秒数一样。`measure` 总是两者都报告，而本课程对照已存的输出时只比较张量。
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
# ## 1.20 Who measures, changes / 测量会改变被测者
#
# <div lang="en">
#
# Where two gradients of one tensor meet, autograd adds the second into the first in place, if nothing else looks at the first. While any dispatch mode is active it makes a new tensor for the sum. `MemoryMeter` knows this, as it knows the formulas of `max`, `gather` and indexing, and counts as autograd alone would have done; the lines of section 1.2 don't. A Linear's weight gradient is a transposed view, and its sum is a new tensor in any case, as at the second peak of section 1.3. A weight used four times:
#
# </div>
# <div lang="zh">
#
# 同一个张量的两份梯度相遇时，只要没有别处还在用前一份，autograd 就把后一份原地加进去。而只要有分发模式在起作用，它就会为这个和新建一个张量。`MemoryMeter` 知道这一点，也知道 `max`、`gather` 和索引的求导公式，按没有模式时的情形来数；1.2 节的几行则不知道。Linear 的权重梯度是转置的视图，求和时无论如何都要新建，1.3 节的第二个峰值就是这样。一个权重用四次：
#
# </div>

# %%
from functools import partial

x, upstream = torch.randn(64, 512), torch.randn(64, 1024)
products = {"`x @ W`": (torch.matmul, torch.randn(512, 1024))}
products["`nn.Linear`"] = (F.linear, torch.randn(1024, 512))


def used_four_times(multiply, weight):
    weight.grad = None
    sum((multiply(x, weight) * upstream).sum() for _ in range(4)).backward()


# %%
rows = []
for name, (multiply, weight) in products.items():
    weight.requires_grad_()
    with TinyMeter() as tiny:
        used_four_times(multiply, weight)
    weight.grad = None
    with MemoryMeter() as full:
        used_four_times(multiply, weight)
    bare = measure(partial(used_four_times, multiply, weight), repeats=1)
    rows.append((name, tiny.peak, full.peak_bytes, bare.allocator_peak_bytes))
table(
    ["four times", "TinyMeter (bytes)", "MemoryMeter (bytes)", "allocator, no mode (bytes)"], rows
)

# %% [markdown]
# <div lang="en">
#
# The meter and the allocator agree to the byte.
#
# </div>
# <div lang="zh">
#
# 计量器与分配器一字节不差。
#
# </div>

# %% [markdown]
# ## 1.21 On a GPU / 在 GPU 上
#
# <div lang="en">
#
# On a GPU the caching allocator manages the memory and keeps its own books: `torch.cuda.memory_allocated` counts tensors, rounded up to 512 bytes (and a large block may be up to 1 MB too big), and workspace, of which cuBLAS keeps some from its first product on; `memory_reserved` is what it has taken from the driver, free blocks included. `nvidia-smi` shows that and the CUDA context. Call `torch.cuda.reset_peak_memory_stats()` before what you want the peak of. With a GPU this cell measures now; otherwise it shows a recording, or says that there is none.
#
# </div>
# <div lang="zh">
#
# 在 GPU 上，显存由缓存分配器管理，它另有一本账：`torch.cuda.memory_allocated` 计入张量（向上取整到 512 字节的整数倍，大块还可能多出至多 1 MB）和工作区，其中 cuBLAS 从第一次矩阵乘法起就一直占着一份；`memory_reserved` 是它向驱动要来的总量，包括空闲块。`nvidia-smi` 显示的是这个总量加上 CUDA 上下文。要看哪一段的峰值，就在它之前调用 `torch.cuda.reset_peak_memory_stats()`。有 GPU 时，这个单元格会现场测量；没有 GPU，就显示预先记录的数据；连记录也没有，会注明。
#
# </div>

# %% tags=["nbval-ignore-output", "shows-device"]
from course_lib.lessons import on_gpu

on_gpu("01")

# %% [markdown]
# ## 1.22 Play / 玩一玩
#
# <div lang="en">
#
# The formula with dropout, $34 s b h + 5 a s^2 b$ bytes per layer: 32 layers, hidden size 4096, 32 heads, bf16, one sequence. Run the second cell below and move its sliders: at what length does the parabola hold half of the bytes? With dropout P counts more: it is not $16 h / a$ but $34 h / 5 a$, here 870 tokens.
#
# </div>
# <div lang="zh">
#
# 带 dropout 的公式，每层 $34 s b h + 5 a s^2 b$ 字节：32 层、隐藏维度 4096、32 个头、bf16、一条序列。运行下面第二个单元格，拖动滑块：序列多长时，抛物线占到一半？带 dropout 时 P 的分量更重，所以不是 $16 h / a$，而是 $34 h / 5 a$，这里是 870 个 token。
#
# </div>

# %%
lesson_01.draw_activation_bytes()

# %% tags=["nbval-ignore-output", "shows-picture"]
lesson_01.activation_playground()

# %% [markdown]
# ## 1.23 More exercises / 更多练习
#
# <div lang="en">
#
# **Exercise 6.** The decoder, trained with Adam, may use 500 MB. What is the largest batch of 128-token sequences? Two measurements make a line, if both peaks stand at the same place (section 1.3). (`answer`: the number of sequences.)
#
# </div>
# <div lang="zh">
#
# **练习 6。** 这个解码器用 Adam 训练，限用 500 MB。批次最多能有多少条长度为 128 的序列？测两次就能定出一条直线，前提是两次的峰值在同一个地方（1.3 节）。（`answer`：序列条数。）
#
# </div>

# %% minutes=6
answer = None
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
# **Exercise 7.** Many recent models use a SwiGLU feed-forward network: `down(F.silu(gate(x)) * up(x))`. Predict the bytes that it saves for 512 tokens, 256 features and 1024 inside, in fp32. Then build it and let `saved_tensors` decide. (`answer`, in bytes.)
#
# </div>
# <div lang="zh">
#
# **练习 7。** 许多新模型使用 SwiGLU 前馈（feed-forward）网络：`down(F.silu(gate(x)) * up(x))`。输入为 512 个 token、隐藏维度 256，内部宽度为 1024，dtype 为 fp32，请预测它保存多少字节。然后把它搭出来，让 `saved_tensors` 判定。（`answer`，以字节计。）
#
# </div>

# %% minutes=6
answer = None
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
