# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] slide={"en": "27.5 MB of weights. How many bytes does a training step take at its peak, and for what?\n\nToday you work that out by hand.", "zh": "权重 27.5 MB。一个训练步的峰值是多少字节？都用在哪里？\n\n今天，你要亲手把它算出来。"}
# # 1 Where does the memory of a training step go? (memory analysis) / 一个训练步的显存用在了哪里？（显存占用分析）
#
# <div lang="en">
#
# If a training step ends in `CUDA out of memory` (OOM), first find out what fills the memory. The weights of lesson 00's decoder take 27.5 MB, and its training step needs far more. What are the step's bytes for, when is each byte in memory, and how many bytes are in memory at the peak? On this page you compute this peak by hand, to within a few bytes of the measurement.
#
# </div>
# <div lang="zh">
#
# 训练时遇到 `CUDA out of memory`（显存不足，OOM），首先要弄清显存被什么占满了。第 00 课的解码器，权重只占 27.5 MB，训练步要用的内存却远不止于此。训练步的字节用来做什么？各自什么时候在内存里？峰值时一共有多少？在这一课里，你会亲手算出这个训练步的峰值，算出的结果与实测只差几个字节。
#
# </div>

# %%
from course_lib.teaching import language

language()

# %% [markdown]
# <div lang="en">
#
# **Goals** (109 minutes, in two sittings):
#
# - Name the kinds of bytes in a training step, and say when each kind is in memory.
# - Complete a memory meter.
# - Predict how many bytes a decoder layer like GPT's or Llama's keeps for backward, and then the peak of a whole step.
#
# **What to know before**: how to train a network in PyTorch. Lesson 00 shows how a lesson works, and the [glossary](GLOSSARY.md) has a table of all symbols. MB is $10^6$ bytes.
#
# </div>
# <div lang="zh">
#
# **目标**（共 109 分钟，分两次学）
#
# - 说出训练步里有哪几类字节，每一类何时在内存里。
# - 补全一个内存计量器。
# - 预测 GPT 和 Llama 那样的解码器层为反向保存多少字节，再由此算出整个训练步的峰值。
#
# **预备知识**：会用 PyTorch 训练网络。第 00 课讲了每一课怎么上，[术语表](GLOSSARY.md)里有一张符号表。MB 指 $10^6$ 字节。
#
# </div>

# %%
import weakref
from functools import partial

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib.lessons.ledger import ledger
from course_lib.lessons.lesson_01 import exercises, figures
from course_lib.memory import MemoryMeter, saved_tensors, symbolic
from course_lib.models import Decoder, DecoderLayer, random_tokens
from course_lib.teaching import category_label, predictions, table, timelines

# %% [markdown] slide={"en": "Parameters, gradients, optimizer state; activations; temporaries.\n\n**Guess first.** With Adam in fp32, how many bytes does each of the first three take?", "zh": "参数、梯度、优化器状态、激活值、临时张量。\n\n**先猜**：用 Adam 和 fp32，前三类各占多少字节？"}
# ## 1.1 Five kinds of bytes / 五类字节
#
# <div lang="en">
#
# | kind | created by | released when |
# |---|---|---|
# | parameters | building the model | the model is deleted |
# | gradients | backward | `zero_grad()` runs |
# | optimizer state | the first `step()` | the optimizer is deleted |
# | activations: other tensors kept for backward | forward | backward has used them |
# | temporaries: all other tensors | any operator | nothing refers to them any more |
#
# The bytes of the first three kinds don't depend on the data, unless gradients are sparse. For each weight, Adam keeps two **moments**, the running means of the gradient and of its square. All numbers here are fp32, with 4 bytes per number.
#
# First count the weights, with hidden size $h = 256$. Each of the 8 layers has four matrices: $h \to 3h$, $h \to h$, $h \to 4h$ and $4h \to h$. Each matrix has a bias as long as the matrix's output. Each layer also has two LayerNorms with $2h$ numbers each. Outside the layers, the decoder has one embedding of $h$ numbers for each of the 2048 words and each of the 128 positions, and a last LayerNorm. The output head is **tied** to the word embedding: both use the same tensor.
#
# </div>
# <div lang="zh">
#
# | 种类 | 由谁产生 | 何时释放 |
# |---|---|---|
# | 参数 | 建立模型 | 删除模型时 |
# | 梯度 | 反向 | 运行 `zero_grad()` 时 |
# | 优化器状态 | 第一次 `step()` | 删除优化器时 |
# | 激活值：为反向保存的其他张量 | 前向 | 反向用完它时 |
# | 临时张量：其余的张量 | 任何算子 | 不再被引用时 |
#
# 前三类的字节数与数据无关（除非梯度是稀疏的）。Adam 为每个权重保存两个数，即梯度的滑动平均和梯度平方的滑动平均，称为两个**矩**。这里的数全部用 fp32，每个数占 4 字节。
#
# 先数权重，隐藏维度 $h = 256$。8 层中的每一层有四个矩阵：$h \to 3h$、$h \to h$、$h \to 4h$、$4h \to h$，每个矩阵带一个与输出等长的偏置。每层还有两个 LayerNorm，各含 $2h$ 个数。8 层之外，还有最后一个 LayerNorm，以及 2048 个词和 128 个位置的嵌入，每个嵌入有 $h$ 个数。输出头与词嵌入**绑定**（tied），也就是说，两者共用同一个张量。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **Exercise 1.** How many weights does the decoder have, and how many bytes do parameters, gradients and optimizer state take? Fill in the number of weights (`weights`) and the bytes of the other three entries. If the cell raises a `NameError`, run all cells above it first<span class="lab-only"> (*Run → Run All Above Selected Cell*)</span>.
#
# </div>
# <div lang="zh">
#
# **练习 1。** 这个解码器有多少个权重？参数、梯度和优化器状态各占多少字节？`weights` 填权重的个数，其余三项填字节数。如果报错 `NameError`，请先把上面的单元格全部运行一遍<span class="lab-only">（菜单 *Run → Run All Above Selected Cell*）</span>。
#
# </div>

# %% minutes=8
mine = {"weights": None, "parameter": None, "gradient": None, "optimizer": None}
exercises.check_training_state(mine)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not exercises.check_training_state.accepted:
    h = 256
    layer = (3 + 1 + 4 + 4) * h**2 + (3 + 1 + 4 + 1) * h + 2 * 2 * h
    weights = 8 * layer + (2048 + 128) * h + 2 * h  # 6,875,648
    mine = {"weights": weights, "parameter": 4 * weights, "gradient": 4 * weights}
    mine["optimizer"] = 2 * 4 * weights

exercises.check_training_state(mine)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# Adam creates its state in the first step. The table shows the bytes in memory after the second step.
#
# </div>
# <div lang="zh">
#
# Adam 的状态在第一步里才建立，所以我们跑两步，测量第二步。下表是第二步结束时留在内存里的字节数。
#
# </div>


# %%
make_decoder = partial(Decoder, vocabulary=2048, hidden=256, heads=8, layers=8, sequence=128)


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
left = meter.timeline[-1].bytes  # bytes by kind, at the end of the step
states = ("parameter", "gradient", "optimizer")
predictions([(category_label(kind), mine[kind], left[kind]) for kind in states], unit="bytes")

# %% [markdown] slide={"en": "$4 + 4 + 8 = 16$ bytes per parameter, in fp32.\n\n7 billion parameters: 112 GB before the first activation.", "zh": "fp32：每个参数 $4 + 4 + 8 = 16$ 字节。\n\n70 亿个参数：还没算激活值，就要 112 GB。"}
# <div lang="en">
#
# The measured optimizer state is 400 bytes larger than the two moments, because Adam also keeps a step counter of 4 bytes for each of the 100 weight tensors.
#
# In fp32, parameters, gradients and optimizer state take $4 + 4 + 8 = 16$ bytes per parameter. In mixed precision, these bytes are counted in three ways:
#
# | bytes per parameter | weights, gradients, the rest | used by |
# |---|---|---|
# | 16 | $2 + 2 + 12$: bf16 weight and gradient; fp32 copy of the weight (**master weight**) and two moments | ZeRO; Ultra-Scale Playbook |
# | 18 | $6 + 4 + 8$: weights in both precisions, fp32 gradient, two moments | Hugging Face; Megatron, with its fp32 gradients |
# | 20 | $2 + 2 + 16$: as for 16, plus an fp32 copy of the gradient | Ultra-Scale Playbook, with gradients accumulated in fp32 |
#
# Counted in these three ways, a model of 7 billion parameters needs 112, 126 or 140 GB before the first activation. Its bf16 weights alone take only 14 GB. If you read such a number, ask which way of counting was used.
#
# </div>
# <div lang="zh">
#
# 优化器状态的实测值比两个矩多 400 字节，因为 Adam 还为 100 个权重张量各记一个步数，每个步数占 4 字节。
#
# 在 fp32 下，参数、梯度和优化器状态合起来，每个参数占 $4 + 4 + 8 = 16$ 字节。混合精度下，每个参数的字节数有三种常见的计法：
#
# | 每个参数的字节数 | 权重、梯度、其余 | 使用者 |
# |---|---|---|
# | 16 | $2 + 2 + 12$：bf16 的权重和梯度；fp32 的权重副本（**主权重**）和两个矩 | ZeRO；Ultra-Scale Playbook |
# | 18 | $6 + 4 + 8$：两种精度的权重、fp32 的梯度、两个矩 | Hugging Face；Megatron（梯度用 fp32 时） |
# | 20 | $2 + 2 + 16$：与 16 字节那一行相同，另加一份 fp32 的梯度 | Ultra-Scale Playbook（用 fp32 累积梯度时） |
#
# 以 70 亿参数的模型为例，bf16 权重只有 14 GB，可是还没算激活值，按这三种计法就分别要占 112、126 和 140 GB。看到这样的数字，要先弄清它用的是哪种计法。
#
# </div>

# %% [markdown] slide={"en": "How would you count the live bytes?\n\nThe bytes are in **storages**, and views share them. So look for new storages at every operator.", "zh": "怎样统计存活的字节？\n\n字节在**存储区**里，各个视图共用一个存储区。所以每运行一个算子，都要看有没有新的存储区。"}
# ## 1.2 A meter from nothing / 从零做一个计量器
#
# <div lang="en">
#
# The bytes of a tensor are in its **storage**, and a view shares the storage of the original tensor. A storage is new if an operator returns it but did not receive it as an argument. The meter adds the bytes of each new storage, and subtracts them when the storage is released.
#
# In PyTorch, every operator passes through the **dispatcher**. If a `TorchDispatchMode` is active, the dispatcher calls the mode, and the mode calls the operator. So the mode sees each operator's arguments and result. `exercises.storages(values)` returns the storages of all tensors in `values`, as a dictionary from address to storage. `weakref.finalize(storage, function, argument)` calls `function(argument)` when the storage is released.
#
# **Exercise 2.** One condition is missing in this meter. Replace `None`, so that the meter counts only new storages. The check tries views, in-place operators, operators that write into `out=`, and tensors that are released.
#
# </div>
# <div lang="zh">
#
# 张量的字节在它的**存储区**（storage）里，视图与原张量共用一个存储区。算子返回的存储区，如果不属于传入的任何一个张量，就是新的。计量器遇到新的存储区，就加上它的字节，等存储区释放时再减掉。
#
# PyTorch 的每个算子都要经过**分发器**（dispatcher）。如果启用了 `TorchDispatchMode`，分发器就改为调用这个模式，再由模式去调用算子，因此模式能看到算子的输入和结果。`exercises.storages(values)` 返回一个字典，列出 `values` 中全部张量的存储区，键是地址，值是存储区。`weakref.finalize(storage, function, argument)` 在存储区释放时调用 `function(argument)`。
#
# **练习 2。** 下面的计量器缺一个条件。请把 `None` 换掉，让计量器只统计新的存储区。检查会试四种情形，即视图、原地算子、写入 `out=` 的算子，以及中途释放的张量。
#
# </div>


# %% minutes=4
class TinyMeter(TorchDispatchMode):
    live = peak = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        given = exercises.storages((args, kwargs))
        for address, storage in exercises.storages(result).items():
            if None:  # the condition: is this storage new?
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self.release, storage.nbytes())
        return result

    def release(self, nbytes):
        self.live -= nbytes


exercises.check_new_storages(TinyMeter)


# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not exercises.check_new_storages.accepted:

    class TinyMeter(TorchDispatchMode):
        live = peak = 0

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            result = operator(*args, **(kwargs or {}))
            given = exercises.storages((args, kwargs))
            for address, storage in exercises.storages(result).items():
                if address not in given:
                    self.live += storage.nbytes()
                    self.peak = max(self.peak, self.live)
                    weakref.finalize(storage, self.release, storage.nbytes())
            return result

        def release(self, nbytes):
            self.live -= nbytes


exercises.check_new_storages(TinyMeter)
### END SOLUTION

# %% slide="both"
decoder.zero_grad()
with MemoryMeter() as full, TinyMeter() as tiny:
    decoder.loss(tokens).backward()
table(["meter", "bytes"], [("`TinyMeter`", tiny.peak), ("`MemoryMeter`", full.peak_bytes)])

# %% [markdown] slide={"en": "A mean squared error is one number.\n\n**Guess first.** Its input has 4,194,304 bytes. How many bytes does the loss keep in memory? And `loss.detach()`?", "zh": "均方误差是一个数。\n\n**先猜**：它的输入有 4,194,304 字节。这个损失在内存里占多少字节？`loss.detach()` 呢？"}
# <div lang="en">
#
# The two meters agree to the byte. The library's `MemoryMeter` also records the kinds of bytes, the phases of a step and the operators. (Section 1.12 shows the whole meter, and what a meter leaves out.)
#
# The loss below is one number, which needs 4 bytes. The input of the loss has 4,194,304 bytes. **Guess first**: how many bytes does the loss keep in memory, and how many does `loss.detach()` keep?
#
# </div>
# <div lang="zh">
#
# 两个计量器的结果一字节不差。课程库的 `MemoryMeter` 还能区分字节的种类和训练步的阶段，并给出算子的名字。（完整的计量器见 1.12 节，那里也说明计量器没有统计什么。）
#
# 下面的损失是一个数，本身只需要 4 字节，它的输入却有 4,194,304 字节。**先猜**：这个损失在内存里占多少字节？`loss.detach()` 呢？
#
# </div>

# %% slide="both"
error = F.mse_loss(torch.randn(1024, 1024, requires_grad=True), torch.zeros(1024, 1024))
numbers = {"loss": error, "detach": error.detach(), "detach and clone": error.detach().clone()}
rows = [(f"`{name}`", x.numel(), x.untyped_storage().nbytes()) for name, x in numbers.items()]
table(["tensor", "elements", "bytes of storage"], rows)

# %% [markdown]
# <div lang="en">
#
# This loss keeps a storage as large as its input, because PyTorch writes all squared differences into the storage of the result before it takes their mean. A training loop that collects such losses in a list keeps 4.2 MB more per step. `loss.detach()` shares the storage, so it still keeps all 4,194,304 bytes. Collect `loss.item()` or `loss.detach().clone()` instead. On this CPU, `smooth_l1_loss`, `binary_cross_entropy` and `soft_margin_loss` also keep a storage as large as their input, even with `reduction="sum"`, but `cross_entropy` does not.
#
# </div>
# <div lang="zh">
#
# 这个损失只有一个数，占的字节却与它的输入一样多，因为 PyTorch 先把每个差的平方写进结果的存储区，再求平均。如果训练循环把这样的损失收进一个列表，每一步就要多占 4.2 MB。换成 `loss.detach()` 也没有用，因为它与损失共用同一个存储区，仍占着全部 4,194,304 字节。应当收集 `loss.item()` 或 `loss.detach().clone()`。在这里的 CPU 上，`smooth_l1_loss`、`binary_cross_entropy` 和 `soft_margin_loss` 也保留与输入一样大的存储区（用 `reduction="sum"` 时也一样），`cross_entropy` 则不会。
#
# </div>

# %% [markdown] slide={"en": "Weights, gradients, optimizer state: 110.0 MB. Activations: at most 178.4 MB.\n\nThe sum is 288.4 MB. Why is the measured peak 277.7 MB?", "zh": "权重、梯度、优化器状态：110.0 MB。激活值：最多 178.4 MB。\n\n加起来是 288.4 MB，实测的峰值为什么是 277.7 MB？"}
# ## 1.3 The timeline of a step / 一个训练步的时间线
#
# <div lang="en">
#
# Many online memory calculators add up weights, gradients, optimizer state and activations. Here weights, gradients and optimizer state take 110.0 MB, and activations at most 178.4 MB. The sum is 288.4 MB, but the measured peak is 277.7 MB:
#
# </div>
# <div lang="zh">
#
# 网上的显存计算器大多做加法，把权重、梯度、优化器状态和激活值加起来。这里的权重、梯度和优化器状态共 110.0 MB，激活值最多 178.4 MB，总和是 288.4 MB。可是实测的峰值只有 277.7 MB：
#
# </div>

# %% slide="result"
timelines({"one step": meter}, title="Activations are released before the gradients are complete")

# %% [markdown]
# <div lang="en">
#
# At the peak, no parameter has a gradient yet. The next figure shows eight operators around the peak. Each of these operators changes the live bytes by 1 MB or more. Bytes that stay in memory during all eight operators are not drawn.
#
# </div>
# <div lang="zh">
#
# 峰值那一刻，还没有一个参数得到梯度。下图画出峰值前后的八个算子，每个算子都使存活字节变化 1 MB 以上。运行这八个算子时一直留在内存里的字节没有画出来。
#
# </div>

# %% slide="result"
figures.draw_around_the_peak(meter, unit_bytes=4 * 8 * 128 * 2048)

# %% [markdown]
# <div lang="en">
#
# The peak is at the start of backward, when three tensors of the logits' size are in memory. The first tensor, the result of the log-softmax, is an activation. (In the figure, this tensor is yellow until autograd has saved it, and then green.) The second tensor is the gradient of this result, and the third tensor is the gradient of the logits. Both gradients are temporaries. All other activations are still in memory. After the peak, backward goes from layer to layer. In each layer, backward releases the activations and creates the gradients.
#
# With a vocabulary of 2048 words, these three tensors make up 9% of the peak. Real vocabularies are larger. (In the next cell, `symbolic()` makes **symbolic** tensors, which have shapes but no data.)
#
# </div>
# <div lang="zh">
#
# 峰值在反向刚开始的时候。这一刻，内存里有三个与 logits 一样大的张量。第一个是 log-softmax 的结果，它是激活值（在图中，刚算出时是黄色，autograd 保存之后变成绿色）。反向先求出这个结果的梯度，再由此求出 logits 的梯度，这两个梯度是临时张量。其余的激活值也都还在内存里。峰值之后，反向一层接一层地释放激活值，同时产生参数的梯度。
#
# 词表只有 2048 个词时，这三个张量占峰值的 9%，而真实的词表要大得多。（下一个单元格在 `symbolic()` 里建立的是**符号张量**，只有形状，没有数据，所以不占内存。）
#
# </div>

# %% slide="result"
rows = []
for vocabulary in (2048, 8192, 32768):
    with symbolic():
        model, batch = make_decoder(vocabulary=vocabulary), random_tokens(8, 128, vocabulary)
        found = metered_step(model, batch, torch.optim.Adam(model.parameters()))
    rows.append((vocabulary, *figures.peak_and_sum(found, 3 * 4 * 8 * 128 * vocabulary)))
table(["vocabulary", "peak (MB)", "share of the logits", "kinds added up (MB)"], rows)

# %% [markdown]
# <div lang="en">
#
# With 2048 words, the sum of weights, gradients, optimizer state and activations is 4% above the peak. With 32768 words, this sum is 28% below the peak. The sum is wrong because it adds gradients and activations that are never in memory together, and leaves out the temporaries. With 32768 words, the three tensors of the logits' size take more than half of the peak. (Lesson 02 computes the loss in chunks, which makes these tensors smaller.)
#
# </div>
# <div lang="zh">
#
# 词表为 2048 时，权重、梯度、优化器状态和激活值之和比峰值多 4%。词表为 32768 时，这个和却比峰值少 28%。这是因为求和时漏掉了临时张量，又把梯度与激活值加在一起，而这些梯度和激活值绝不会同时在内存里。词表为 32768 时，那三个与 logits 一样大的张量占峰值的一半以上。（第 02 课把损失分成小段计算，这些张量就会变小。）
#
# </div>

# %% [markdown] slide={"en": "One sequence: 110.0 MB without activations, at most 22.3 MB of activations.\n\n**Guess first.** How high is the peak, and in which phase?", "zh": "只有一条序列：激活值以外共 110.0 MB，激活值最多 22.3 MB。\n\n**先猜**：峰值是多少？在哪个阶段？"}
# <div lang="en">
#
# Now take the same step with one sequence instead of eight. Weights, gradients and optimizer state still take 110.0 MB, and the activations take at most 22.3 MB. **Guess first**, in MB: what will the peak be, and how many MB of gradients are in memory at that point? In which phase is the peak: forward, backward, or the optimizer's step?
#
# </div>
# <div lang="zh">
#
# 再来看同一个训练步，只把八条序列换成一条。权重、梯度和优化器状态仍然占 110.0 MB，激活值最多占 22.3 MB。
#
# **先猜**：峰值是多少 MB？那一刻内存里有多少 MB 的梯度？峰值在哪个阶段：前向、反向，还是优化器更新？
#
# </div>

# %% tags=["guess"]
my_peak, my_gradients = None, None

# %%
alone = make_decoder()
single = metered_step(alone, random_tokens(1, 128, 2048), torch.optim.Adam(alone.parameters()))

# %% jupyter={"source_hidden": true} slide="result"
timelines({"1 sequence": single}, title="With one sequence, the peak is at the end of backward")

# %% slide="result"
guesses = [my_peak and my_peak * 1e6, my_gradients and my_gradients * 1e6]
found = [single.peak_bytes, single.at_peak()["gradient"]]
predictions(zip(["peak", "gradients then"], guesses, found, strict=True))

# %%
peak = max(single.timeline, key=lambda sample: sample.live_bytes)
peak.phase, peak.operator, single.at_peak()["activation"]

# %% [markdown]
# <div lang="en">
#
# At this peak, no activations are in memory. So the sum of weights, gradients, optimizer state and activations, 132.3 MB, is 16% higher than the peak. The operator at the peak, `add`, adds the two gradients of the tied weight tensor. Backward computes the head's gradient first and the embedding's gradient last. Each of the two gradients takes 2.1 MB, and their sum takes another 2.1 MB. These three tensors are in memory together with all other gradients.
#
# Whether a technique lowers a peak depends on when the peak occurs. Checkpoints cannot lower this peak, because it contains no activations.
#
# </div>
# <div lang="zh">
#
# 这个峰值里没有激活值，所以权重、梯度、优化器状态和激活值之和 132.3 MB 比峰值高 16%。峰值时运行的算子是 `add`，它把绑定的权重张量的两个梯度相加。反向最先算出输出头那一份梯度，最后才算出词嵌入那一份。两个梯度都与权重张量一样大（2.1 MB），它们的和也一样大。所以这一刻除了其余的全部梯度，内存里还有三个这么大的张量。
#
# 什么技术能降低峰值，取决于峰值在哪里。检查点完全不能降低这个峰值，因为其中没有激活值。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# Which tensors are the activations? Autograd reports the activations to two **hooks**, functions that you write. Autograd calls the first hook for each tensor that it saves for backward, and the second hook when backward needs this tensor. We leave out the weights, which are in memory anyway, and count each storage once:
#
# </div>
# <div lang="zh">
#
# 激活值是哪些张量？autograd 可以通过两个**钩子**（hook）告诉我们。钩子是由你编写、由 autograd 调用的函数。autograd 每为反向保存一个张量，就调用第一个钩子。反向要用这个张量时，autograd 再调用第二个钩子。权重本来就在内存里，所以不算，每个存储区也只数一次：
#
# </div>

# %% slide="both"
weights = {parameter.untyped_storage()._cdata for parameter in decoder.parameters()}
kept = {}  # address of a storage -> bytes


def pack(tensor):
    storage = tensor.untyped_storage()
    if storage._cdata not in weights:
        kept[storage._cdata] = storage.nbytes()
    return tensor


with saved_tensors_hooks(pack, lambda tensor: tensor):
    loss = decoder.loss(tokens)  # the saved tensors exist as long as the loss exists
table(["storages kept", "bytes"], [(len(kept), sum(kept.values()))])

# %% [markdown]
# <div lang="en">
#
# These 178,413,636 bytes consist of the timeline's activations and 8,256 bytes of token IDs.
#
# </div>
# <div lang="zh">
#
# 这 178,413,636 字节，除去 token 编号的 8,256 字节，就是时间线上的激活值。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **End of the first sitting** (50 minutes). You can now measure the bytes of each kind in a step, and find the operator at the peak and the tensors that autograd keeps. The second sitting asks *why* autograd keeps these tensors. Then you compute the whole peak by hand.
#
# </div>
# <div lang="zh">
#
# **第一次学习到此结束**（50 分钟）。现在你能测量一个训练步，知道各类字节有多少、峰值时在运行哪个算子、autograd 保存了什么。第二次要弄清 autograd **为什么**保存这些张量，最后亲手算出整个峰值。
#
# </div>

# %% [markdown] slide={"en": "Why does an operator keep a tensor? **Ask what its derivative needs.**\n\n$y = x W$: $dW = x^\\top dy$ needs $x$.\n\n$P = \\mathrm{softmax}(S)$: $dS = P \\odot (dP - \\ldots)$ needs $P$, not $S$.\n\n$y = x + z$: needs nothing.", "zh": "算子为什么要保存一个张量？**看它求导时要用什么。**\n\n$y = x W$：$dW = x^\\top dy$，要用 $x$。\n\n$P = \\mathrm{softmax}(S)$：$dS = P \\odot (dP - \\ldots)$，要用 $P$，不用 $S$。\n\n$y = x + z$：什么也不用。"}
# ## 1.4 What one layer keeps / 一层保存了什么
#
# <div lang="en">
#
# *Why* does autograd keep the activations? For each operator, ask what its derivative needs:
#
# - $y = x W$: $dW = x^\top dy$ and $dx = dy\, W^\top$ need $x$ and the weight matrix, but not $y$.
# - $P = \mathrm{softmax}(S)$: $dS = P \odot (dP - \ldots)$ needs $P$, but not $S$.
# - $y = x + z$ passes on the gradient unchanged and needs no tensor, even if $z$ is a mask. Division by a plain number, as in `/ d**0.5`, keeps no tensor either. (Division by a tensor that needs a gradient keeps both inputs.)
# - The derivative of GELU needs GELU's input. LayerNorm needs its input and two statistics per token, the mean and the reciprocal of the standard deviation.
#
# </div>
# <div lang="zh">
#
# autograd **为什么**保存激活值？对每个算子都问一问，它求导时要用什么：
#
# - $y = x W$：$dW = x^\top dy$ 和 $dx = dy\, W^\top$ 要用 $x$ 和权重矩阵，不用 $y$。
# - $P = \mathrm{softmax}(S)$：$dS = P \odot (dP - \ldots)$，要用 $P$，不用 $S$。
# - $y = x + z$ 只把梯度传下去，不用任何张量，$z$ 是掩码时也不用。除以一个普通的数（例如 `/ d**0.5`）同样不保存张量。（如果除数是要求梯度的张量，那么被除数和除数都要保存。）
# - GELU 求导时要用自己的输入。LayerNorm 要用它的输入，外加每个 token 的两个数，一个是均值，一个是标准差的倒数。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# A decoder layer runs these eight lines. The input is $b$ sequences of $s$ tokens. The layer has $a$ heads. Per sequence and head, the attention scores $S$ and the probabilities $P$ have $s \times s$ numbers each:
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
# **Exercise 3.** How many bytes does a layer keep? Complete the function, for any $b$, $s$, $h$ and $a$. The rows `norms` (the inputs of the two LayerNorms) and `statistics` (their means and reciprocal deviations) are already filled in. `attention` counts the tensors that are kept from `y` to the input of `out`, except P. `probabilities` counts P. `feed-forward` counts the tensors that are kept from `z` on. Weights don't count.
#
# </div>
# <div lang="zh">
#
# 一个解码器层就是下面八行代码，输入是 $b$ 条序列，每条 $s$ 个 token。共有 $a$ 个头，每条序列的每个头各有一组注意力分数 $S$ 和注意力概率 $P$，都含 $s \times s$ 个数（$S$ 算出后还要加上因果掩码）：
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
# **练习 3。** 一层保存多少字节？请补全这个函数，让它对任意的 $b$、$s$、$h$、$a$ 都成立。前两行已经写好：`norms` 是两个 LayerNorm 的输入，`statistics` 是它们的均值和标准差倒数。其余三行由你来写。`attention` 统计从 `y` 起、到 `out` 这个线性层的输入为止所保存的张量，但不含 P。`probabilities` 统计 P。`feed-forward` 统计从 `z` 起所保存的全部张量。权重不算。
#
# </div>


# %% minutes=13
def saved_by_one_layer(b, s, h, a):
    return {
        "norms": 4 * 2 * b * s * h,  # 4 bytes for each of two inputs (b, s, h)
        "statistics": 4 * 2 * 2 * b * s,  # two norms, two numbers per token
        "attention": 0,
        "probabilities": 0,
        "feed-forward": 0,
    }


exercises.check_layer_formula(saved_by_one_layer)


# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not exercises.check_layer_formula.accepted:

    def saved_by_one_layer(b, s, h, a):
        return {
            "norms": 4 * 2 * b * s * h,
            "statistics": 4 * 2 * 2 * b * s,
            "attention": 4 * 5 * b * s * h,  # y; q, k and v; P @ v
            "probabilities": 4 * a * s * s * b,
            "feed-forward": 4 * 9 * b * s * h,  # z; u and gelu(u), 4h wide each
        }


exercises.check_layer_formula(saved_by_one_layer)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# Compare your rows with the list below. The function `saved_tensors` makes this list with the two hooks of section 1.3. The last two columns name each tensor and your row that counts it. (`Addmm` is a Linear layer, and `mat1` is its input. `Bmm` is one matrix product per sequence and head, 64 in all.)
#
# </div>
# <div lang="zh">
#
# 请把你写的各行与下面的清单对照。清单由 `saved_tensors` 列出，它用的也是 1.3 节的两个钩子。最后两列写明每个张量是八行代码里的哪一个，归在你的哪一行。（`Addmm` 是线性层，`mat1` 是它的输入。`Bmm` 是每条序列、每个头各做一次的矩阵乘法，共 64 次。）
#
# </div>

# %% slide="result"
listed = saved_tensors(DecoderLayer(256, 8), torch.randn(8, 128, 256))  # 8 heads; (b, s, h)
figures.formula_rows(listed)

# %% slide="result"
one_layer = saved_by_one_layer(b=8, s=128, h=256, a=8)
predictions([("one layer", sum(one_layer.values()), listed.total_bytes)], unit="bytes")

# %% [markdown] slide={"en": "Your formula is exact.\n\nIn elements: $16 s b h + a s^2 b$, plus $4 s b$ for the statistics.", "zh": "你的公式一字节不差。\n\n按元素个数是 $16 s b h + a s^2 b$，统计量另计 $4 s b$。"}
# <div lang="en">
#
# Your formula is exact. Counted in elements, the formula is $16 s b h + a s^2 b$, plus $4 s b$ for the statistics. (In section 1.14, the same count gives the formula of Korthikanti et al. for half precision with dropout.)
#
# One row of the list is marked as seen before, because softmax and the matrix product with V both keep the storage of P. If you added up tensors instead of storages, the sum would be 20% too high.
#
# </div>
# <div lang="zh">
#
# 你的公式一字节不差。按元素个数计算，它是 $16 s b h + a s^2 b$，统计量另计 $4 s b$。（换成半精度、带 dropout 的层，用这种方法数出来的就是 Korthikanti 等人的公式，见 1.14 节。）
#
# 清单里有一行标着“已见过”，因为 softmax 保存了注意力概率 P，P 与 V 的乘法又保存了同一个存储区。如果把张量逐个相加，而不按存储区统计，这里就会多算 20%。
#
# </div>

# %% [markdown] slide={"en": "P has $s^2$ elements per head. The rest is proportional to $s$.\n\n**Guess first.** Above which length is P larger than the rest?", "zh": "P 在每个头上有 $s^2$ 个元素，其余的都与 $s$ 成正比。\n\n**先猜**：序列长度超过多少，P 就大于这一层的其余部分？"}
# ## 1.5 Long sequences / 序列变长
#
# <div lang="en">
#
# P has $s^2$ elements per sequence and head, and every other term of your formula is proportional to $s$. This layer has $h = 256$ and 8 heads. **Guess first**, in tokens: above which length is P larger than all other terms together? (Set $a s^2 b$ equal to $16 s b h$.) In the figure, the lines show your formula, and the points show measurements.
#
# </div>
# <div lang="zh">
#
# 每条序列的 P 在每个头上有 $s^2$ 个元素，公式里的其余各项都与序列长度 $s$ 成正比。**先猜**（以 token 计）：这一层 $h = 256$、8 个头，序列长度超过多少，P 就大于其余各项之和？（令 $a s^2 b$ 等于 $16 s b h$。）图中的线由你的公式算出，点是实测值。
#
# </div>

# %% tags=["guess"] slide="result"
my_length = None
figures.draw_lengths(saved_by_one_layer, my_length)

# %% [markdown]
# <div lang="en">
#
# The line of P crosses the line of all other terms at $s = 16 h / a = 512$. This is sixteen times the head size, which is 32 here. With heads of size 128, as in many large models, the lines cross at 2048 tokens. In longer sequences, P makes up most of a layer's activations, if P is kept.
#
# </div>
# <div lang="zh">
#
# P 与其余各项的两条线在 $s = 16 h / a = 512$ 处相交，这个长度是头维度（这里是 32）的十六倍。许多大模型的头维度是 128，交点就在 2048 个 token。序列更长时，如果保存 P，P 就占一层激活值的大部分。
#
# </div>

# %% [markdown] slide={"en": "Llama's layer: RMSNorm, grouped-query attention, fused attention, SwiGLU.\n\n**Guess first.** How far off is your formula, at 128 and 2048 tokens?", "zh": "Llama 的层用 RMSNorm、分组查询注意力、融合的注意力算子和 SwiGLU。\n\n**先猜**：对这一层，在 128 和 2048 个 token 时，你的公式差多少？"}
# ## 1.6 A layer of Llama / Llama 的一层
#
# <div lang="en">
#
# Many recent models have a layer like Llama's, which differs from GPT's layer in four points:
#
# - **RMSNorm** divides each token's numbers by their root mean square, and uses no mean or bias.
# - In **grouped-query attention** (GQA), $a$ heads of queries share $n$ heads of keys and values.
# - **`scaled_dot_product_attention`** (SDPA) is one fused operator for all of attention (lesson 06). SDPA keeps Q, K, V and its output. Instead of P, SDPA keeps one fp32 number per query and head, the log-sum-exp (LSE). (With dropout on a CPU, SDPA keeps P.)
# - **SwiGLU** is a feed-forward network with three matrices. SwiGLU multiplies two projections of width $f$ elementwise.
#
# The next cell takes this layer from Hugging Face's `transformers`. The layer has the ratios of Llama 3 8B, $f = 3.5 h$ and $a = 4 n$, but smaller sizes, $h = 256$ and $a = 8$. **Guess first**: how far off is your formula for this layer, at 128 and at 2048 tokens?
#
# </div>
# <div lang="zh">
#
# 许多新模型用的是 Llama 那样的层，它与 GPT 的层有四点不同：
#
# - **RMSNorm** 把每个 token 除以它的均方根，没有均值，也没有偏置。
# - **分组查询注意力**（GQA）里，K 和 V 的头比 Q 少，$a$ 个查询头共用 $n$ 个键值头。
# - **`scaled_dot_product_attention`**（SDPA）用一个融合算子完成整个注意力（第 06 课）。它保存 Q、K、V 和输出，不保存 P，而是为每个头的每个查询保存一个 fp32 数，叫做 LSE（log-sum-exp，指数和的对数）。（在 CPU 上用 dropout 时，它仍然保存 P。）
# - **SwiGLU** 是有三个矩阵的前馈（feed-forward）网络，它把两个宽度为 $f$ 的投影逐元素相乘。
#
# 下面就是 Hugging Face 的 `transformers` 里的这一层。它比 Llama 3 8B 的小，但 $f = 3.5 h$、$a = 4 n$ 这两个比例相同，其中 $h = 256$，$a = 8$。**先猜**：对这一层，在 128 和 2048 个 token 时，你的公式差多少？
#
# </div>

# %% slide="result"
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
config = LlamaConfig(hidden_size=256, intermediate_size=896, **heads, attn_implementation="sdpa")


def kept_by_llama(s):
    with symbolic():
        layer, x = LlamaDecoderLayer(config, 0), torch.randn(8, s, 256, requires_grad=True)
        angles = LlamaRotaryEmbedding(config)(x, torch.arange(s)[None])  # cos and sin
        return saved_tensors(layer, x, position_embeddings=angles).total_bytes


measured = {128: kept_by_llama(128), 2048: kept_by_llama(2048)}
gpt = {s: sum(saved_by_one_layer(8, s, 256, 8).values()) for s in measured}
predictions([(f"s = {s}", gpt[s], measured[s]) for s in measured], unit="bytes")

# %% [markdown]
# <div lang="en">
#
# Your formula is 11% too low for 128 tokens. For 2048 tokens, the formula gives more than three times the measured bytes. Llama's layer consists of these lines:
#
# ```python
# m = x * rsqrt(mean(x**2))     # RMSNorm: keeps x, and the result of rsqrt
# y = m * weight1               # the weight's gradient needs m
# q, k, v = q_proj(y), k_proj(y), v_proj(y)   # h → a·d, n·d, n·d
# q, k = rotate(q), rotate(k)   # by the position; keeps only cos and sin
# x = x + out(sdpa(q, k, v))    # Linear: h → h
# m = x * rsqrt(mean(x**2))
# z = m * weight2
# x = x + down(silu(gate(z)) * up(z))         # h → f twice, then f → h
# ```
#
# **Exercise 4.** Write the five rows of exercise 3 for this layer. `norms` counts `x` and `m` of both norms. `statistics` counts the results of `rsqrt`. `probabilities` counts the numbers that SDPA keeps instead of P. Leave out cos and sin, which all layers share.
#
# </div>
# <div lang="zh">
#
# 128 个 token 时，公式的结果比实测低 11%。2048 个 token 时，公式的结果却是实测的三倍多。这一层由下面几行组成：
#
# ```python
# m = x * rsqrt(mean(x**2))     # RMSNorm: keeps x, and the result of rsqrt
# y = m * weight1               # the weight's gradient needs m
# q, k, v = q_proj(y), k_proj(y), v_proj(y)   # h → a·d, n·d, n·d
# q, k = rotate(q), rotate(k)   # by the position; keeps only cos and sin
# x = x + out(sdpa(q, k, v))    # Linear: h → h
# m = x * rsqrt(mean(x**2))
# z = m * weight2
# x = x + down(silu(gate(z)) * up(z))         # h → f twice, then f → h
# ```
#
# **练习 4。** 仿照练习 3，为这一层写出同样的五行。`norms` 统计两个归一化各自的 `x` 和 `m`，`statistics` 统计两次 `rsqrt` 的结果，`probabilities` 统计 SDPA 为代替 P 而保存的数。cos 和 sin 由所有层共用，不算。
#
# </div>


# %% minutes=10
def saved_by_llama_layer(b, s, h, a, n, f):
    rows = saved_by_one_layer(b, s, h, a)  # replace each row: rows["norms"] = ...
    return rows


exercises.check_llama_formula(saved_by_llama_layer)


# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not exercises.check_llama_formula.accepted:

    def saved_by_llama_layer(b, s, h, a, n, f):
        return {
            "norms": 4 * 2 * 2 * b * s * h,  # x and m, twice
            "statistics": 4 * 2 * b * s,
            "attention": 4 * b * s * (3 * h + 2 * n * h // a),  # y, q, the output; k and v
            "probabilities": 4 * a * s * b,  # one number per query and head
            "feed-forward": 4 * b * s * (h + 4 * f),  # z; gate(z), its silu, up(z), their product
        }


exercises.check_llama_formula(saved_by_llama_layer)
### END SOLUTION

# %% slide="result"
llama = {s: sum(saved_by_llama_layer(8, s, 256, 8, 2, 896).values()) for s in measured}
predictions([(f"s = {s}", llama[s], measured[s]) for s in measured], unit="bytes")

# %% [markdown]
# <div lang="en">
#
# The missing bytes are cos and sin, two tables of $s \times d$ numbers. So your formula is exact for the layer itself, and it no longer has an $s^2$ term.
#
# RMSNorm computes less than LayerNorm, but here it keeps more bytes, because each of its several operators keeps its own tensors. A formula holds only for the operators that it counts. Before you trust a memory calculator, ask which layer it assumes.
#
# </div>
# <div lang="zh">
#
# 少算的字节就是 cos 和 sin 这两张 $s \times d$ 的表。所以只看一层自己保存的字节，你的公式一字节不差，而且不再有 $s^2$ 的项。
#
# RMSNorm 的计算比 LayerNorm 少，在这里保存的字节却更多，因为它由几个算子组成，每个算子都要保存自己求导所需的张量。公式从哪些算子推出来，就只对哪些算子成立。用网上的显存计算器之前，先弄清它假定的是哪一种层。
#
# </div>

# %% [markdown] slide={"en": "At the peak, **three tensors** have the logits' size: one activation and two temporaries.\n\n**Guess first.** Which parts make up the whole peak?", "zh": "峰值时有**三个**与 logits 一样大的张量，一个是激活值，两个是临时张量。\n\n**先猜**：整个峰值由哪些部分相加而成？"}
# ## 1.7 The whole peak / 整个峰值
#
# <div lang="en">
#
# Section 1.3 showed one part of the peak of lesson 00's decoder: **three tensors of the logits' size**, one activation and two temporaries. Token IDs and targets do not count. The batch existed before the meter started, and the loss released its own copy of the targets before the peak.
#
# **Exercise 5.** Fill in the four parts of the peak, in bytes. `state` is the bytes that existed before the step, and `layers` is what the eight layers keep in total. `norm and head` is what the last LayerNorm and the head keep, except the logits. `logits` is all tensors of the logits' size.
#
# </div>
# <div lang="zh">
#
# 1.3 节的图已经画出第 00 课解码器峰值的一部分，即**三个与 logits 一样大的张量**，一个是激活值，两个是临时张量。token 编号和目标都不算，因为批次在计量器启动之前就已存在，损失保存的目标在峰值之前也已释放。
#
# **练习 5。** 填出峰值的四个部分，以字节计。`state` 是训练步开始之前内存里就有的字节。`layers` 是八层一共保存的字节。`norm and head` 是最后一个 LayerNorm 和输出头保存的字节（logits 除外）。`logits` 是与 logits 一样大的全部张量的字节。
#
# </div>

# %% minutes=9
my_parts = {"state": None, "layers": None, "norm and head": None, "logits": None}
exercises.check_whole_peak(my_parts)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not exercises.check_whole_peak.accepted:
    b, s, h, v = 8, 128, 256, 2048
    my_parts = {
        "state": left["parameter"] + left["optimizer"],
        "layers": 8 * sum(one_layer.values()),
        "norm and head": 4 * s * b * h + 4 * 2 * s * b + 4 * s * b * h,
        "logits": 3 * 4 * s * b * v,
    }

exercises.check_whole_peak(my_parts)
### END SOLUTION

# %% slide="result"
my_sum = sum(part or 0 for part in my_parts.values())
predictions([("the whole peak", my_sum, meter.peak_bytes)], unit="bytes")

# %% [markdown] slide={"en": "The 8 bytes: the loss and its gradient.\n\nEvery other byte of the peak has a name, and a reason.", "zh": "这 8 个字节是损失和它的梯度。\n\n峰值里的其他每个字节，都说得出是什么、为什么在。"}
# <div lang="en">
#
# The missing 8 bytes are the loss and its gradient. You have computed the peak by hand, and you know what every byte is for.
#
# </div>
# <div lang="zh">
#
# 少算的 8 个字节是两个数，即损失和它的梯度。你已经亲手算出了整个峰值，而且每个字节都说得出是什么。
#
# </div>

# %% [markdown]
# ## 1.8 In your own code / 实际怎么写
#
# <div lang="en">
#
# `MemTracker` is PyTorch's own meter. Like `torch.profiler` and the hooks, it also runs on a CPU.
#
# </div>
# <div lang="zh">
#
# `MemTracker` 是 PyTorch 自带的计量器，它和 `torch.profiler`、钩子一样，在 CPU 上就能运行。
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
found = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
table(["meter", "bytes"], [("`MemTracker`", found), ("`MemoryMeter`", meter.peak_bytes)])

# %% [markdown]
# <div lang="en">
#
# `MemTracker` also counts the 8,256 bytes of the tokens. The functions of `torch.cuda` need a GPU and are not run here.
#
# | question | your code |
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
# `MemTracker` 多出 8,256 字节，因为它也统计了 token。`torch.cuda` 的函数需要 GPU，这里没有运行。
#
# | 问题 | 写法 |
# |---|---|
# | autograd 保存了什么 | `torch.autograd.graph.saved_tensors_hooks(pack, unpack)` |
# | 按算子统计的字节（任何设备都可用） | `torch.profiler.profile(profile_memory=True)` |
# | 自 `torch.cuda.reset_peak_memory_stats()` 以来最多分配了多少字节 | `torch.cuda.max_memory_allocated()` |
# | 向驱动申请了多少字节（含空闲块） | `torch.cuda.memory_reserved()` |
# | 谁分配了什么，连同调用栈 | `torch.cuda.memory._record_memory_history()`，运行这一步，`torch.cuda.memory._dump_snapshot("step.pickle")`，再用 pytorch.org/memory_viz 查看 |
#
# </div>

# %% [markdown]
# ## 1.9 Claims and measurements / 说法与实测
#
# <div lang="en">
#
# We test three common claims on the decoder's training step. For the second and third claim, the step runs under `torch.autocast`, with bf16 operators and fp32 weights.
#
# </div>
# <div lang="zh">
#
# 下面用这个训练步检验三种常见的说法。检验后两种时，训练步在 `torch.autocast` 下运行，算子用 bf16，权重仍是 fp32。
#
# </div>

# %% slide="result"
autocast, stays = figures.under_autocast(make_decoder)
figures.claims_table(meter, autocast, stays)

# %% [markdown] slide={"en": "The same step of the same decoder, one technique per row.\n\nWhich of the parts would you reduce first?", "zh": "同一个解码器的同一步，每种技术占一行。\n\n峰值分成几个部分，你会先减少哪一个？"}
# ## 1.10 The ledger / 账本
#
# <div lang="en">
#
# The ledger gets its second row. The second table below names the lessons that reduce each part of the baseline's peak.
#
# </div>
# <div lang="zh">
#
# 本课在账本里添上第二行。下面第二张表把基线的峰值分成几个部分，并写明每个部分由哪几课来减少。
#
# </div>

# %% slide="result"
ledger("01", "autocast, bf16", autocast)

# %% jupyter={"source_hidden": true} slide="result"
figures.parts_of_the_peak(meter, one_layer)

# %% [markdown] slide={"en": "Count storages. Activations are released as gradients are created.\n\nIn your own model, too, ask what each operator's derivative needs.", "zh": "要按存储区统计。反向一边释放激活值，一边产生梯度。\n\n换成你自己的模型，也要逐个看算子求导时要用什么。"}
# ## 1.11 Summary / 小结
#
# <div lang="en">
#
# - With Adam, parameters, gradients and optimizer state take 16 bytes per parameter in fp32, and 16, 18 or 20 bytes in mixed precision. Only activations and temporaries depend on the batch.
# - The five kinds of bytes are not all in memory together, because backward releases activations while it creates gradients. In this decoder, the peak is at the start of backward, with three tensors of the logits' size. With one sequence, the peak is at the end of backward.
# - An operator keeps the tensors that its derivative needs. Count storages, not tensors.
# - A layer like GPT's keeps $16 s b h + a s^2 b$ elements and its statistics. If $s > 16 h / a$, the attention probabilities P are larger than all other terms together. Llama's layer with fused attention keeps no P.
#
# **Next:** in [lesson 02](02_checkpointing.ipynb), activations are computed again instead of kept.
#
# </div>
# <div lang="zh">
#
# - 用 Adam 时，参数、梯度和优化器状态在 fp32 下每个参数共占 16 字节，在混合精度下是 16、18 或 20 字节。随批次变化的只有激活值和临时张量。
# - 五类字节不会全部同时在内存里，因为反向一边释放激活值，一边产生梯度。在这个解码器里，峰值在反向刚开始时，那一刻有三个与 logits 一样大的张量。如果只有一条序列，这个解码器的峰值就在反向的末尾。
# - 一个算子求导时要用什么张量，它就保存什么张量。统计字节要按存储区，不要按张量。
# - GPT 那样的层保存 $16 s b h + a s^2 b$ 个元素，外加统计量。如果 $s > 16 h / a$，注意力概率 P 就大于其余各项之和。Llama 的层用融合注意力，不保存 P。
#
# **下一步**：在[第 02 课](02_checkpointing.ipynb)里，激活值不再保存，而是重新计算。
#
# </div>

# %% [markdown]
# ## In depth / 深入
#
# <div lang="en">
#
# The other lessons don't need the sections below. You can read each of these sections alone. Each section uses only names that are defined above this line.
#
# </div>
# <div lang="zh">
#
# 以下内容，其他各课都不会用到。各节互相独立，只用到前面正文里定义过的名字。
#
# </div>

# %% [markdown]
# ## 1.12 The whole meter, and what it leaves out / 完整的计量器，以及它没有统计的部分
#
# <div lang="en">
#
# **Exercise 6.** Write the whole meter of section 1.2, without `exercises.storages`. `tree_leaves(values)` lists the elements of nested lists, tuples and dictionaries. `tensor.untyped_storage()` is a tensor's storage, and `_cdata` is the storage's address, which is the same for every view. The check also tries results that share a storage, and a result that does not fill its storage.
#
# </div>
# <div lang="zh">
#
# **练习 6。** 不用 `exercises.storages`，写出 1.2 节的整个计量器。`tree_leaves(values)` 把嵌套的列表、元组和字典里的元素全部列出来，`tensor.untyped_storage()` 是张量的存储区，`_cdata` 是存储区的地址，同一存储区的各个视图都给出同样的地址。检查还会试两种情形，一种是多个结果共用一个存储区，另一种是结果没有占满它的存储区。
#
# </div>

# %% minutes=12
from torch.utils._pytree import tree_leaves


class WholeMeter(TorchDispatchMode):
    live = peak = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        return result


exercises.check_meter(WholeMeter)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not exercises.check_meter.accepted:

    class WholeMeter(TorchDispatchMode):
        live = peak = 0

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            result = operator(*args, **(kwargs or {}))
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            known = {x.untyped_storage()._cdata for x in tensors}
            for x in tree_leaves(result):
                storage = x.untyped_storage() if isinstance(x, torch.Tensor) else None
                if storage is not None and storage._cdata not in known:
                    known.add(storage._cdata)  # several results may share it
                    self.count(storage.nbytes())
                    weakref.finalize(storage, self.count, -storage.nbytes())
            return result

        def count(self, change):
            self.live += change
            self.peak = max(self.peak, self.live)


exercises.check_meter(WholeMeter)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# A meter's byte count can differ from the allocator's for two reasons:
#
# - An operator may allocate **workspace**, and release it before it returns. Convolutions may need a large workspace, and its size depends on the machine.
# - **Measuring changes the result.** If a tensor receives several gradients, autograd adds each new gradient to the first one in place. While a dispatch mode is active, autograd makes a new tensor for the sum instead. `MemoryMeter` corrects for this tensor, and counts as if no mode were active. `TinyMeter` does not correct for it. (The gradients of a Linear's weight are transposed views, so their sum is a new tensor in any case, as in section 1.3.)
#
# `measure` runs the same function twice. The first run is under the meter. During the second run, no dispatch mode is active, and `measure` reads the CPU allocator's peak.
#
# </div>
# <div lang="zh">
#
# 计量器的结果可能与分配器的不同，原因有两个：
#
# - 算子运行时可能还要申请**工作区**，返回之前就会释放。卷积可能要用很大的工作区，大小因机器而异。
# - **测量会扰动被测对象**。一个张量收到几个梯度时，autograd 把后来的每个梯度原地加到第一个梯度上。但只要有分发模式在起作用，autograd 就会新建一个张量来存放相加的结果。`MemoryMeter` 会作修正，按未启用分发模式时的情形来统计，`TinyMeter` 则不作修正。（Linear 的权重梯度是转置的视图，求和时无论如何都要新建张量，例如 1.3 节的峰值处。）
#
# `measure` 把同一个函数运行两次。第一次用计量器，第二次不启用任何分发模式，只读取 CPU 分配器的峰值。
#
# </div>

# %%
from course_lib.memory import measure

weight = torch.randn(512, 1024, requires_grad=True)
x, upstream, images = torch.randn(64, 512), torch.randn(64, 1024), torch.randn(8, 3, 64, 64)
first, last = torch.nn.Conv2d(3, 16, 3), torch.nn.Conv2d(16, 16, 3, stride=2)
convolutions = torch.nn.Sequential(first, torch.nn.ReLU(), last)


def weight_used_four_times():
    weight.grad = None
    sum((x @ weight * upstream).sum() for _ in range(4)).backward()


def two_convolutions():
    convolutions.zero_grad()
    convolutions(images).square().mean().backward()


# %% tags=["nbval-ignore-output", "shows-device"]
rows = []
for step in (weight_used_four_times, two_convolutions):
    with TinyMeter() as tiny:
        step()
    found = measure(step, repeats=1)
    rows.append((f"`{step.__name__}`", tiny.peak, found.peak_bytes, found.allocator_peak_bytes))
headings = ["TinyMeter (bytes)", "MemoryMeter (bytes)", "allocator, no mode (bytes)"]
table(["step", *headings], rows)

# %% [markdown]
# ## 1.13 Larger models, counted without data / 不用数据，统计更大的模型
#
# <div lang="en">
#
# In `symbolic()`, a step runs all of its operators on tensors without data (PyTorch's `FakeTensorMode`), and the meter counts the bytes that these tensors would take. First we add layers. Each layer keeps its own tensors, so the kept bytes grow linearly with the number of layers. The slope of this line is your sum for one layer. The intercept is what a decoder without layers would keep: the inputs of the last norm and the head, the statistics, and the log-softmax. The intercept also contains 16,452 bytes for the token IDs, the targets and one scalar that the loss keeps.
#
# </div>
# <div lang="zh">
#
# 在 `symbolic()` 里，训练步的全部算子都照常运行，只是张量没有数据（用的是 PyTorch 的 `FakeTensorMode`），计量器统计这些张量本应占用的字节。先增加层数。每一层各存各的张量，所以保存的字节数随层数线性增长。这条直线的斜率是你为一层算出的总和，截距是一层都没有时也要保存的字节，包括最后一个归一化和输出头的输入、统计量、log-softmax 的结果，还有 token 编号、目标和损失保存的一个标量，最后这三项共 16,452 字节。
#
# </div>

# %%
rows, head = [], 4 * 8 * 128 * (2 * 256 + 2 + 2048) + 16_452
for layers in (2, 4, 8, 16):
    with symbolic():
        deeper, batch = make_decoder(layers=layers), random_tokens(8, 128, 2048)
        saved = saved_tensors(deeper.loss, batch).total_bytes
    rows.append((f"L = {layers}", head + layers * sum(one_layer.values()), saved))
predictions(rows, unit="bytes")

# %% [markdown]
# <div lang="en">
#
# So this computer can also count the bytes that a model with 6.6 billion parameters needs for a step. We take the same kind of decoder in bf16, with fused attention, and one sequence of 2048 tokens. Adam keeps fp32 master weights and updates one parameter tensor after the other. Your formula still works if you leave out P, take 2 bytes per number, and add one fp32 number per query and head.
#
# At 16 bytes per parameter, the weights, gradients and optimizer state of this model (hidden size $h$ 4096, 32 heads, 32 layers) take 105.3 GB. **Guess first**: what is the model's peak, in GB, and in which phase? (The table calls this model 7 B.)
#
# </div>
# <div lang="zh">
#
# 因此这台电脑也能算出 66 亿参数的模型训练一步要用多少内存。我们用同一种解码器，精度为 bf16，注意力用融合算子，输入是一条 2048 个 token 的序列。Adam 带 fp32 主权重，逐个参数张量更新。你的公式仍然可用，只要去掉 P，每个数按 2 字节算，再为每个头的每个查询加一个 fp32 数。
#
# 这个模型的隐藏维度 $h$ 为 4096，有 32 个头、32 层，按每个参数 16 字节计算，权重、梯度和优化器状态共占 105.3 GB。**先猜**：它的峰值是多少 GB？在哪个阶段？（表里把这个模型写作 7 B。）
#
# </div>

# %% tags=["guess"]
my_giant_peak = None


def my_activations(h, a, layers):
    rows = saved_by_one_layer(b=1, s=2048, h=h, a=a)
    layer = (sum(rows.values()) - rows["probabilities"]) // 2 + 4 * a * 2048
    return layers * layer + 2 * 2048 * (2 * h + 2 + 32_000)  # the norm, the head and the logits


# %%
def giant_step(hidden, heads, layers, batch=1):
    sizes = {"vocabulary": 32_000, "hidden": hidden, "heads": heads, "layers": layers}
    with symbolic(), MemoryMeter() as meter:
        model = Decoder(**sizes, sequence=2048, fused=True).bfloat16()
        adam = figures.MixedAdam(model)  # fp32 master weights and moments
        model.loss(random_tokens(batch, 2048, 32_000)).backward()
        adam.step()
    return meter


# %%
rows = [("7 B, your guess", "–", "–", my_giant_peak or "–", "–")]
for name, shape in {"1 B": (2048, 16, 18), "7 B": (4096, 32, 32), "70 B": (8192, 64, 80)}.items():
    giant = giant_step(*shape)
    peak = max(giant.timeline, key=lambda sample: sample.live_bytes)
    counts = (my_activations(*shape), giant.series()["activation"].max(), giant.peak_bytes)
    rows.append((name, *(f"{count / 1e9:,.3f}" for count in counts), peak.phase))
table(["model", "your formula (GB)", "most activations (GB)", "peak (GB)", "peak in"], rows)

# %% [markdown]
# <div lang="en">
#
# You derived your formula from a model of 6.9 million parameters, and it also gives the 8.8 GB of activations of a model with 6.6 billion parameters. But these activations add nothing to the peak. The activations are released before the last gradients are computed, and the peak comes later, in the optimizer's step. Apart from 16 bytes per parameter, the peak contains only three fp32 temporaries, each as large as the largest parameter tensor. In the 1 B model, the peak is still in backward, while activations are in memory. (These results hold for one sequence, and for Adam in a loop over the parameters. Try `batch=8`.)
#
# **Exercise 7.** Lesson 00's decoder is trained with Adam, and the peak of its step must be at most 1,300 MB. What is the largest batch of 128-token sequences? Two measurements determine a line, if both peaks are at the same place in the step (section 1.3). (`answer`: number of sequences.)
#
# </div>
# <div lang="zh">
#
# 你的公式是从 690 万参数的小模型推出来的，用到 66 亿参数的模型上，照样算准了那 8.8 GB 的激活值。但这些激活值没有增加峰值，因为最后几个梯度还没算出来，激活值就已释放，而峰值要到优化器更新时才出现。除了每个参数的 16 字节，峰值里只多了三个 fp32 临时张量，每个都与最大的参数张量一样大。表里写作 1 B 的模型则不同，它的峰值仍在反向，那时激活值还在内存里。（这些结论只适用于一条序列、Adam 逐个参数更新的情形。可以试试 `batch=8`。）
#
# **练习 7。** 第 00 课的解码器用 Adam 训练，训练步的峰值不得超过 1,300 MB。批次最多能有多少条长度为 128 的序列？测两次就能定出一条直线，前提是两次的峰值出现在训练步的同一时刻（1.3 节）。（`answer`：序列条数。）
#
# </div>

# %% minutes=8
answer = None
exercises.check_largest_batch(answer)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not exercises.check_largest_batch.accepted:
    peaks = []
    for size in (4, 8):
        with symbolic():
            model, batch = make_decoder(), random_tokens(size, 128, 2048)
            found = metered_step(model, batch, torch.optim.Adam(model.parameters()))
        peaks.append(found.peak_bytes)
    each = (peaks[1] - peaks[0]) // 4
    answer = 4 + (1_300_000_000 - peaks[0]) // each

exercises.check_largest_batch(answer)
### END SOLUTION

# %% [markdown]
# ## 1.14 Ways to update, half precision, and adapters / 更新方式、半精度与适配器
#
# <div lang="en">
#
# If Adam updates the parameters in a loop, at most three temporaries exist at once, each as large as one parameter tensor. `foreach=True`, the default of `torch.optim.Adam` on CUDA, makes a list of temporaries, one per parameter tensor. These temporaries are live together and take as much memory as all parameters, which is 28 GB for 7 billion parameters in fp32. `fused=True`, the default of Hugging Face's `Trainer`, needs no temporaries.
#
# </div>
# <div lang="zh">
#
# Adam 逐个参数循环更新时，同时最多有三个临时张量，每个与一个参数张量一样大。`foreach=True` 是 `torch.optim.Adam` 在 CUDA 上的默认做法，更新时为每个参数张量建立一个临时张量。这些临时张量同时存活，合起来与全部参数一样大，70 亿个 fp32 参数就要 28 GB。`fused=True` 是 Hugging Face `Trainer` 的默认做法，不需要临时张量。
#
# </div>

# %%
rows = []
for name in ("loop", "foreach", "fused"):
    model = make_decoder()
    update = torch.optim.Adam(model.parameters(), **({} if name == "loop" else {name: True}))
    found = metered_step(model, random_tokens(1, 128, 2048), update)
    in_step = max(sample.live_bytes for sample in found.timeline if sample.phase == "optimizer")
    rows.append((name, in_step, round(in_step / (4 * 6_875_648), 2), found.peak_bytes))
table(["Adam", "most in step() (bytes)", "of the parameters", "peak, one sequence"], rows)

# %% [markdown]
# <div lang="en">
#
# With one sequence, `foreach` moves the peak into the optimizer's step and raises it by a fifth.
#
# `torch.autocast` keeps weights, gradients and optimizer state in fp32, and makes bf16 copies of the weights in forward. Under `torch.autocast`, only activations can shrink, and with one sequence they do not shrink. If the weights are in bf16 too, all bytes are halved here. But without fp32 master weights, rounding removes small updates. LoRA (Hu et al. 2021, arXiv:2106.09685) freezes all weights, and trains **adapters**, pairs of thin matrices next to chosen layers. Here we choose the two Linears of each layer's attention. Because only adapters are trained, hardly any gradients and optimizer state remain. Most activations are still kept. Only Linears without an adapter no longer keep their inputs, because such an input is needed only for the gradient of the Linear's weight.
#
# </div>
# <div lang="zh">
#
# 只有一条序列时，如果用 `foreach`，峰值会移到优化器更新的时候，并且升高五分之一。
#
# 用 `torch.autocast` 时，权重、梯度和优化器状态仍是 fp32，前向时另外建立权重的 bf16 副本。变小的只有激活值。如果只有一条序列，连激活值也不会变小。如果权重也用 bf16，这里的字节全部减半，但没有 fp32 主权重，小的更新会被舍入掉。LoRA（Hu et al. 2021，arXiv:2106.09685）冻结全部权重，在选定的层旁边各加一个**适配器**，也就是两个很窄的矩阵，只训练适配器。这里选的是每个注意力的两个线性层。因此梯度和优化器状态所剩无几。激活值大多仍要保存，只有没加适配器的线性层不再保存输入，因为这些输入只在求权重梯度时才用得到。
#
# </div>

# %%
from course_lib.memory import cast

with symbolic():  # many CPUs are slow in bf16
    model, batch = cast(make_decoder(), torch.bfloat16), random_tokens(8, 128, 2048)
    all_bf16 = metered_step(model, batch, torch.optim.Adam(model.parameters()))
model = figures.with_adapters(make_decoder(), rank=8)
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
adapters = metered_step(model, tokens, torch.optim.Adam(trained))
variants = {"plain": meter, "autocast, bf16": autocast, "all bf16, no master weights": all_bf16}
variants["LoRA, rank 8, on attention"] = adapters
table(["variant", "peak (MB)"], [(k, round(v.peak_bytes / 1e6, 1)) for k, v in variants.items()])

# %% [markdown]
# <div lang="en">
#
# In half precision and with dropout, the count of section 1.4 gives the formula of Korthikanti et al. (2022): $s b h \left(34 + 5 \frac{a s}{h}\right)$ bytes per layer. This formula counts 2 bytes per element, three dropout masks of one byte per element, and P after dropout as well. The formula leaves out the LayerNorm statistics, which take another $8 s b$ bytes in bf16 on a CPU. (On a GPU, dropout keeps such masks. On a CPU, `F.dropout` instead keeps factors in the activations' dtype, so a layer keeps more bytes.)
#
# </div>
# <div lang="zh">
#
# 对半精度、带 dropout 的层，用 1.4 节的方法数出来的就是 Korthikanti 等人（2022）的公式，即每层 $s b h \left(34 + 5 \frac{a s}{h}\right)$ 字节。在这个公式里，每个元素占 2 字节，三个 dropout 掩码每个元素占一字节，dropout 之后的 P 也要保存。公式略去了 LayerNorm 的统计量，在 CPU 上用 bf16 时，它们另占 $8 s b$ 字节。（公式里的掩码与 GPU 上的相同。CPU 上的 `F.dropout` 保存的却是缩放系数，dtype 与激活值相同，所以保存得更多。）
#
# </div>

# %%
rows = []
for b, s, h, a in ((8, 128, 256, 8), (1, 512, 512, 8)):
    layer, x = DecoderLayer(h, a, dropout=0.1).bfloat16(), torch.randn(b, s, h).bfloat16()
    paper = 34 * s * b * h + 5 * a * s * s * b
    rows.append((f"s = {s}, h = {h}", paper + 8 * s * b, saved_tensors(layer, x).total_bytes))
predictions(rows, unit="bytes")

# %% [markdown]
# <div lang="en">
#
# **Exercise 8.** All 7 billion parameters of a model are frozen and stored in bf16. Adapters with 20 million parameters are trained with Adam, all in fp32. How many bytes do weights, gradients and optimizer state take together? (`answer`, in bytes.)
#
# </div>
# <div lang="zh">
#
# **练习 8。** 一个模型的 70 亿个参数全部冻结，存为 bf16。另用 Adam 训练共 2000 万个参数的适配器，全部用 fp32。权重、梯度和优化器状态共占多少字节？（`answer`，以字节计。）
#
# </div>

# %% minutes=4
answer = None
exercises.check_adapter_bytes(answer)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not exercises.check_adapter_bytes.accepted:
    frozen, trained = 7_000_000_000, 20_000_000
    answer = 2 * frozen + (4 + 4 + 8) * trained

exercises.check_adapter_bytes(answer)
### END SOLUTION

# %% [markdown]
# ## 1.15 A memory monitor / 内存监视器
#
# <div lang="en">
#
# Training scripts often print the memory after each phase. On a GPU, **allocated memory** is the live bytes, with each tensor rounded up, mostly to a multiple of 512 bytes. **Reserved memory** is the memory that the caching allocator has taken from the driver. The allocator's rules are public, so the library can apply them to the meter's trace even without a GPU. Reserved memory in this section and the next is therefore **simulated**.
#
# </div>
# <div lang="zh">
#
# 训练脚本常在每个阶段之后打印内存。在 GPU 上，**已分配显存**是存活的字节，每个张量都要向上取整，通常取到 512 字节的整数倍。**已预留显存**是缓存分配器向驱动申请来的显存。分配器的规则是公开的，所以即使没有 GPU，课程库也能按这些规则处理计量器的轨迹。也就是说，本节和下一节的已预留显存都是**模拟**的。
#
# </div>

# %%
model, marks = make_decoder(), []
optimizer = torch.optim.Adam(model.parameters())


def read(phase):
    torch.empty(0)  # allocates nothing, but at each operator the meter notices released tensors
    marks.append((phase, monitor.points, monitor.live_bytes))


# %%
with MemoryMeter(model, optimizer) as monitor:
    for _ in range(3):
        read("before")
        loss = model.loss(tokens)
        read("forward")
        loss.backward()
        read("backward")
        optimizer.step()
        read("step()")
        optimizer.zero_grad()
        read("zero_grad()")

# %%
trace, rows = monitor.trace(), []
for number, (phase, point, live) in enumerate(marks[:10]):
    stats = trace[:point].allocator().memory_stats()
    counts = (live, stats["allocated_bytes.all.current"], stats["reserved_bytes.all.current"])
    rows.append((1 + number // 5, f"`{phase}`", *(round(count / 1e6, 1) for count in counts)))
table(["step", "after", "live (MB)", "allocated (MB)", "reserved (MB)"], rows)

# %% [markdown]
# <div lang="en">
#
# After forward, the first step has 55.0 MB less in memory than the second step, because Adam creates its state at the end of step 1. The peak is inside backward, so no reading between phases shows it. Allocated memory follows the live bytes, but reserved memory only rises, because the allocator keeps the memory that `zero_grad` has released. In the second step, Adam's state occupies part of this memory. The rest of this memory is not enough for the step, so the allocator reserves another 44 MB.
#
# `save_snapshot` writes the trace of one step to a file for PyTorch's memory viewer, as `torch.cuda.memory._dump_snapshot` does on a GPU:
#
# </div>
# <div lang="zh">
#
# 前向之后，第一步的存活字节比第二步少 55.0 MB，因为 Adam 的状态在第 1 步末尾才建立。峰值出现在反向当中，如果只在阶段之间读数，就永远看不到它。已分配显存随存活的字节升降，已预留显存却只升不降，因为 `zero_grad` 释放的显存由分配器留着，并不还给驱动。第二步会重新使用这些显存，但还要再申请 44 MB，因为 Adam 的状态已经占了其中一部分。
#
# `save_snapshot` 可以把一步的内存记录存成文件，供 PyTorch 的显存查看器打开，作用与 GPU 上的 `torch.cuda.memory._dump_snapshot` 一样：
#
# </div>

# %%
from course_lib.lessons.lesson_01 import allocator

allocator.draw_in_the_viewer(trace[marks[5][1] - 1 : marks[9][1]])

# %% [markdown]
# ## 1.16 Fragmentation: the same bytes, in another order / 显存碎片：同样的字节，换个顺序
#
# <div lang="en">
#
# PyTorch's *Performance Tuning Guide* warns that a short batch followed by a longer batch "causes fragmentation in the caching allocator, which may result in out-of-memory errors". The guide advises you to run forward and backward once on the longest batch before training. Here we train on a simulated device of 388 MiB, twice on each of two batches. Batch A has 2 × 384 tokens, and batch B has 2 × 512 tokens. **Guess first**: the orders A, B, A, B and B, A, B, A have the same peak in live bytes. Does the order decide whether training fits on the device?
#
# </div>
# <div lang="zh">
#
# PyTorch 的《Performance Tuning Guide》提醒，短批次之后若来一个更长的批次，缓存分配器会产生显存碎片，可能导致显存不足。这份指南给出的办法是在训练之前，先用最长的批次做一次前向和反向。这里在模拟的 388 MiB 设备上，用两个批次各训练两次：A 是 2 × 384 个 token，B 是 2 × 512 个。**先猜**：A、B、A、B 和 B、A、B、A 这两种顺序，存活字节的峰值相同。顺序还有影响吗？
#
# </div>

# %%
from course_lib.lessons.lesson_01 import allocator

scenes, ends = allocator.four_orders(make_decoder)
allocator.orders_on(scenes, 388 << 20)

# %%
print(allocator.replay_trace(scenes["A, B, A, B"], 388 << 20)[1].partition(" If reserved")[0])

# %% [markdown]
# <div lang="en">
#
# When the error occurs, PyTorch needs 8 MiB for a tensor. It asks the driver for a segment (one contiguous range) of 20 MiB, but the device has only 18 MiB free. Another 16 MiB are reserved but unused, in holes that are too small for the tensor. Adam's state causes these holes. The state was allocated inside segments that had been split for batch A, and it stays there. The step fits if Adam's state is created before the first batch, or if B runs once before A. `expandable_segments` avoids the problem with one long segment per pool. (These results hold for these two batches and this limit.)
#
# </div>
# <div lang="zh">
#
# 报错时，PyTorch 要为一个 8 MiB 的张量申请 20 MiB 的内存段，设备上却只剩 18 MiB 空闲。另有 16 MiB 已预留却闲置，分成零碎的空隙，放不下这个张量。空隙是 Adam 的状态造成的。这些状态放在为批次 A 切开的内存段里，此后一直占着。如果先建立 Adam 的状态，或者先用 B 跑一遍，训练步就装得下。`expandable_segments` 让每个内存池只用一个很长的内存段，也能避免这个问题。（这只是这两个批次、这个上限的结果。）
#
# </div>

# %%
allocator.allocator_claims(scenes["A, B, A, B"], 388 << 20, ends)

# %% [markdown]
# ## 1.17 More claims, and a fair comparison / 更多说法，以及公平的比较
#
# <div lang="en">
#
# To compare a technique with the baseline, a common method runs the baseline first, then the technique, and compares how much memory grows in each run. Here this method compares a deep MLP with itself. A fair method should find no difference.
#
# </div>
# <div lang="zh">
#
# 要比较两种技术，常见的做法是“先跑基线，再跑另一种技术，比较增量”。这里照这种做法，把一个深层 MLP 与它自己比较。如果做法是公平的，就不该测出差别。
#
# </div>

# %%
from course_lib.lessons.lesson_01 import claims
from course_lib.memory import measure
from course_lib.models import deep_mlp

mlp, x = deep_mlp(depth=20, width=1024), torch.randn(32, 1024)
optimizer = torch.optim.Adam(mlp.parameters())


def mlp_step():
    mlp(x).square().mean().backward()
    optimizer.step()


# %%
grown = []
for _ in range(2):
    mlp.zero_grad()
    with MemoryMeter(mlp, optimizer) as found:
        before = found.live_bytes
        mlp_step()
    grown.append(found.peak_bytes - before)
fair = [measure(mlp_step, model=mlp, optimizer=optimizer, repeats=0).peak_bytes for _ in range(2)]

# %% [markdown]
# <div lang="en">
#
# The next table measures attention alone, with 12 heads of size 64. The fused operator keeps Q, K, V, its output and one number per query and head. Which tensors does standard attention keep? The second table below tests a claim about these tensors.
#
# </div>
# <div lang="zh">
#
# 下表只看注意力：12 个头，头维度 64。融合算子保存的是 Q、K、V、它的输出，以及每个头的每个查询一个数。标准注意力保存哪些张量？下面第二张表检验关于这些张量的一种说法。
#
# </div>


# %%
def standard(q, k, v):
    return (q @ k.mT * 64**-0.5).softmax(dim=-1) @ v


kept = {}
for s in (512, 1024, 2048, 4096):
    with symbolic():
        qkv = [torch.randn(1, 12, s, 64, requires_grad=True) for _ in range(3)]
        both = (standard, F.scaled_dot_product_attention)
        kept[s] = [saved_tensors(attention, *qkv).total_bytes for attention in both]
rows = [(s, *(round(count / 1e6, 1) for count in counts)) for s, counts in kept.items()]
table(["tokens", "standard (MB)", "fused (MB)"], rows)

# %%
forward = meter.timeline[meter.phases().index("backward") - 1].live_bytes
inputs = saved_tensors(mlp, x).total_bytes / x.nbytes
claims.older_claims(grown, fair, kept[512][0], inputs, (forward, meter.peak_bytes))

# %% [markdown]
# ## 1.18 On a GPU / 在 GPU 上
#
# <div lang="en">
#
# On a GPU the caching allocator keeps its own statistics. `torch.cuda.memory_allocated` counts tensors and workspace. This function rounds each tensor up to a multiple of 512 bytes, and a large block may be up to 1 MB larger than its tensor. `memory_reserved` counts what the allocator has taken from the driver, including free blocks. `nvidia-smi` shows this memory plus the CUDA context.
#
# </div>
# <div lang="zh">
#
# 在 GPU 上，缓存分配器有自己的统计。`torch.cuda.memory_allocated` 统计张量和工作区，每个张量向上取整到 512 字节的整数倍，大块还可能多出至多 1 MB。`memory_reserved` 是缓存分配器向驱动申请的总量，包括空闲块。`nvidia-smi` 显示的是这个总量加上 CUDA 上下文。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# The next cell trains a larger decoder on your GPU, or shows the numbers recorded on an H100 and an H200. The bytes are the same on both GPUs. The meter's peak of the training step is 3,931.7 MB, and the allocator's peak is 0.8 MB higher. From the first step on, cuBLAS keeps 65 MiB allocated. The thread that runs forward and the thread that runs backward use 32 MiB each, and matrix products with a bias use 1 MiB. The CUDA context took 806 MB on the H200 after a few steps of training. The bytes that a layer keeps in bf16 equal the formula of section 1.14 plus the LayerNorm statistics.
#
# </div>
# <div lang="zh">
#
# 下一个单元格训练一个更大的解码器。没有 GPU 时，就显示 H100 和 H200 的记录，两块卡的字节数完全相同。训练步的峰值按计量器是 3,931.7 MB，分配器报告的还要高 0.8 MB。从第一步起，cuBLAS 一直占着 65 MiB：前向的线程占 32 MiB，反向的线程占 32 MiB，带偏置的矩阵乘法再占 1 MiB。训练几步以后，H200 上的 CUDA 上下文占了 806 MB。一层在 bf16 下保存的字节数，恰好等于 1.14 节的公式加上 LayerNorm 的统计量。
#
# </div>

# %% tags=["nbval-ignore-output", "shows-device"]
from course_lib.lessons import on_gpu

on_gpu("01")

# %% [markdown]
# <div lang="en">
#
# **Sources.** Korthikanti et al. 2022, *Reducing Activation Recomputation in Large Transformer Models*, arXiv:2205.05198 (the formula). Rajbhandari et al. 2020, *ZeRO*, arXiv:1910.02054 (16 bytes per parameter); Hugging Face documentation, *GPU memory usage* (18); Hugging Face, *The Ultra-Scale Playbook*, 2025 (20). PyTorch documentation, *Understanding CUDA Memory Usage*, and its *Performance Tuning Guide*. All measurements were made with `course_lib.memory` in this notebook.
#
# </div>
# <div lang="zh">
#
# **出处。** Korthikanti et al. 2022，*Reducing Activation Recomputation in Large Transformer Models*，arXiv:2205.05198（公式）。Rajbhandari et al. 2020，*ZeRO*，arXiv:1910.02054（每个参数 16 字节）；Hugging Face 文档 *GPU memory usage*（18）；Hugging Face，*The Ultra-Scale Playbook*，2025（20）。PyTorch 文档 *Understanding CUDA Memory Usage* 和 *Performance Tuning Guide*。全部测量都由本 notebook 用 `course_lib.memory` 完成。
#
# </div>
