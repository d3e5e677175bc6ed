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
# If a training step ends in `CUDA out of memory` (OOM), the first question is what fills the memory. The weights of lesson 00's decoder take 27.5 MB, and a training step of it needs far more. Which bytes are these? When is each of them in memory? How many are there at the worst moment?
#
# On this page you work out the peak of this step by hand, to within a few bytes of the measurement. Then you do the same for a layer of Llama.
#
# </div>
# <div lang="zh">
#
# 训练时遇到 `CUDA out of memory`（显存不足，OOM），首先要弄清显存被什么占满了。第 00 课的解码器，权重只占 27.5 MB，一个训练步要用的内存却远不止这些。这些字节是什么？各自什么时候在内存里？最吃紧的那一刻，一共有多少？
#
# 在这一课里，你会亲手算出这个训练步的峰值，与实测只差几个字节。然后，再为 Llama 的一层做同样的计算。
#
# </div>

# %%
from course_lib.teaching import language

language()

# %% [markdown]
# <div lang="en">
#
# **Goals** (100 minutes). You name the kinds of bytes in a training step, and say when each is in memory. You complete a memory meter. You predict what a decoder layer like GPT's or Llama's saves for backward, and from this the peak of a whole step.
#
# **What to know before**: how to train a network in PyTorch. Lesson 00 shows how a lesson works, and has a table of all symbols. MB is $10^6$ bytes.
#
# </div>
# <div lang="zh">
#
# **目标**（100 分钟）：说出训练步里有哪几类字节、各自何时在内存里；补全一个内存计量器；预测 GPT 和 Llama 那样的解码器层为反向保存多少字节，由此算出整个训练步的峰值。
#
# **预备知识**：会用 PyTorch 训练网络。第 00 课讲了每一课怎么上，还有一张符号表。MB 指 $10^6$ 字节。
#
# </div>

# %%
import weakref

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
# | activations: tensors kept for backward | forward | backward has used them |
# | temporaries: all other tensors | any operator | nothing refers to them any more |
#
# The first three kinds don't depend on the data, unless gradients are sparse. Adam keeps two numbers per weight, called its two **moments**: running means of the gradient and of its square. All numbers here are fp32, which takes 4 bytes each.
#
# First count the weights, with $h = 256$. Each of the 8 layers has four matrices, $h \to 3h$, $h \to h$, $h \to 4h$ and $4h \to h$, each with a bias as long as its output, and two LayerNorms with $2h$ numbers each. Outside of the layers, the decoder has an embedding of 2048 words, an embedding of 128 positions, and a last LayerNorm. The head uses the embedding of the words as its matrix: the two are **tied**, they are one tensor.
#
# </div>
# <div lang="zh">
#
# | 种类 | 由谁产生 | 何时释放 |
# |---|---|---|
# | 参数 | 建立模型 | 删除模型时 |
# | 梯度 | 反向 | 运行 `zero_grad()` 时 |
# | 优化器状态 | 第一次 `step()` | 删除优化器时 |
# | 激活值：为反向而保存的张量 | 前向 | 反向用完它时 |
# | 临时张量：其余的张量 | 任何算子 | 不再被引用时 |
#
# 前三类与数据无关（除非梯度是稀疏的）。Adam 为每个权重保存两个数，叫做它的两个**矩**，即梯度的滑动平均和梯度平方的滑动平均。这里的数全部用 fp32，每个占 4 字节。
#
# 先数权重，$h = 256$。8 层中的每一层有四个矩阵：$h \to 3h$、$h \to h$、$h \to 4h$、$4h \to h$，每个矩阵带一个与输出等长的偏置。每层还有两个 LayerNorm，各 $2h$ 个数。8 层之外，有 2048 个词的嵌入、128 个位置的嵌入，以及最后一个 LayerNorm。输出头直接拿词的嵌入当作矩阵，也就是说，两者**绑定**（tied）为同一个张量。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **Exercise 1.** How many weights has the decoder, and how many bytes does each of the three kinds take? Fill in the four numbers (the weights as a count, the rest in bytes). If this gives a `NameError`, the imports at the top of this page have not run yet. Run all cells above it first<span class="lab-only"> (*Run → Run All Above Selected Cell*)</span>.
#
# </div>
# <div lang="zh">
#
# **练习 1。** 这个解码器有多少个权重？三类各占多少字节？填四个数（权重填个数，其余填字节数）。如果报出 `NameError`，说明本页开头的导入还没有运行，请先把上面的单元格全部运行一遍<span class="lab-only">（菜单 *Run → Run All Above Selected Cell*）</span>。
#
# </div>

# %% minutes=6
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
# Adam creates its state in the first step, so we meter the second one. The table shows the bytes that are left when it has ended.
#
# </div>
# <div lang="zh">
#
# Adam 的状态在第一步里才建立，所以我们跑两步，用计量器看第二步。表中是这一步结束时留下的字节。
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
predictions([(category_label(kind), mine[kind], left[kind]) for kind in states], unit="bytes")

# %% [markdown] slide={"en": "$4 + 4 + 8 = 16$ bytes per parameter, in fp32.\n\n7 billion parameters: 112 GB before the first activation.", "zh": "fp32：每个参数 $4 + 4 + 8 = 16$ 字节。\n\n70 亿个参数：还没算激活值，就要 112 GB。"}
# <div lang="en">
#
# The other 400 bytes: Adam also counts its steps, in 4 bytes for each of the 100 tensors.
#
# Together this is $4 + 4 + 8 = 16$ bytes per parameter. For mixed precision, three accountings are in use:
#
# | bytes per parameter | weights, gradients, the rest | used by |
# |---|---|---|
# | 16 | $2 + 2 + 12$: bf16 weight and gradient; fp32 copy of the weight (**master weight**) and two moments | ZeRO |
# | 18 | $6 + 4 + 8$: weights in both precisions, fp32 gradient, two moments | Hugging Face; Megatron, with its fp32 gradients |
# | 20 | $2 + 2 + 16$: as 16, and an fp32 copy of the gradient | Ultra-Scale Playbook |
#
# So 7 billion parameters need 112, 126 or 140 GB before the first activation, although their bf16 weights take only 14 GB. Ask which accounting a figure uses.
#
# </div>
# <div lang="zh">
#
# 实测多出 400 字节，因为 Adam 还为 100 个张量各记一个步数，每个 4 字节。
#
# 合起来是每个参数 $4 + 4 + 8 = 16$ 字节。混合精度有三种常见的计法：
#
# | 每个参数的字节 | 权重、梯度、其余 | 使用者 |
# |---|---|---|
# | 16 | $2 + 2 + 12$：bf16 的权重和梯度；fp32 的权重副本（**主权重**）和两个矩 | ZeRO |
# | 18 | $6 + 4 + 8$：两种精度的权重、fp32 的梯度、两个矩 | Hugging Face；Megatron（梯度用 fp32 时） |
# | 20 | $2 + 2 + 16$：同 16，另加一份 fp32 的梯度 | Ultra-Scale Playbook |
#
# 因此一个 70 亿参数的模型，bf16 权重虽然只有 14 GB，还没算激活值就要占 112、126 或 140 GB。看到这样的数字，先弄清用的是哪种计法。
#
# </div>

# %% [markdown] slide={"en": "How would you count the live bytes?\n\nThe bytes are in **storages**, and views share them. So look for new storages at every operator.", "zh": "怎样统计存活的字节？\n\n字节在**存储区**里，各个视图共用一份。所以在每个算子处，看有没有新的存储区。"}
# ## 1.2 A meter from nothing / 从零做一个计量器
#
# <div lang="en">
#
# The bytes of a tensor are in its **storage**, and a view shares the storage of its base. A storage is new if an operator returns it and did not get it as an argument. The meter adds the bytes of each new storage, and subtracts them when the storage is released.
#
# In PyTorch, every operator passes through the **dispatcher**. A `TorchDispatchMode` is called there instead of the operator, so it sees the arguments and the result. `exercises.storages(values)` returns the storages of all tensors in `values`, as a dictionary from address to storage. `weakref.finalize(storage, function, argument)` calls `function(argument)` when the storage is released.
#
# **Exercise 2.** One condition is missing in this meter. Replace `None`, so that it counts the new storages and no others. The check tries views, operators that work in place, operators that write into `out=`, and tensors that are released.
#
# </div>
# <div lang="zh">
#
# 张量的字节在它的**存储区**（storage）里，视图与原张量共用一个存储区。如果一个存储区由算子返回，却不在传给它的参数里，就是新的。计量器遇到新的存储区，就加上它的字节，等它释放，再减掉。
#
# PyTorch 的每个算子都要经过**分发器**（dispatcher）。`TorchDispatchMode` 在那里代替算子被调用，因此能看到参数和结果。`exercises.storages(values)` 返回 `values` 中全部张量的存储区，结果是一个字典，键是地址，值是存储区。`weakref.finalize(storage, function, argument)` 在存储区释放时调用 `function(argument)`。
#
# **练习 2。** 下面的计量器缺一个条件。请把 `None` 换掉，让它统计新的存储区，而且只统计新的。检查会试这些情形：视图、原地算子、写入 `out=` 的算子，以及会释放的张量。
#
# </div>


# %% minutes=3
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
with TinyMeter() as tiny:
    decoder.loss(tokens).backward()
decoder.zero_grad()
with MemoryMeter() as full:
    decoder.loss(tokens).backward()
table(["meter", "bytes"], [("`TinyMeter`", tiny.peak), ("`MemoryMeter`", full.peak_bytes)])

# %% [markdown] slide={"en": "A mean squared error is one number, 4 bytes.\n\n**Guess first.** Its input has 4,194,304 bytes. How many bytes does the loss keep in memory?", "zh": "均方误差是一个数，4 字节。\n\n**先猜**：它的输入有 4,194,304 字节。这个损失在内存里占多少字节？"}
# <div lang="en">
#
# The two meters agree to the byte. The library's `MemoryMeter` works in the same way, and also knows the kinds of bytes, the phases of a step and the operators. (In section 1.12 you can write the whole meter.)
#
# A storage can be larger than its tensor. The loss below is one number, and its input has 4,194,304 bytes. **Guess first**: how many bytes does the loss keep in memory?
#
# </div>
# <div lang="zh">
#
# 两个计量器一字节不差。课程库的 `MemoryMeter` 也是这样工作的，另外还能区分字节的种类和训练步的阶段，并给出算子的名字。（在 1.12 节，你可以自己写出整个计量器。）
#
# 存储区可以比张量大。下面的损失是一个数，它的输入有 4,194,304 字节。**先猜**：这个损失在内存里占多少字节？
#
# </div>

# %% slide="both"
error = F.mse_loss(torch.randn(1024, 1024, requires_grad=True), torch.zeros(1024, 1024))
table(["elements", "bytes of storage"], [(error.numel(), error.untyped_storage().nbytes())])

# %% [markdown]
# <div lang="en">
#
# This number keeps as many bytes as its input, because PyTorch writes all squared differences into the storage of the result before it takes their mean. If a training loop collects such losses in a list, each step adds 4.2 MB here. Collect `loss.item()` instead, because `loss.detach()` shares the storage and still holds all of it. On this CPU, `smooth_l1_loss`, `binary_cross_entropy` and `soft_margin_loss` behave in the same way, and `cross_entropy` does not.
#
# </div>
# <div lang="zh">
#
# 这一个数占的字节与它的输入一样多，因为 PyTorch 先把全部差的平方写进结果的存储区，再求它们的平均。如果训练循环把这样的损失收进一个列表，这里每一步都要多占 4.2 MB，应当改为收集 `loss.item()`。`loss.detach()` 不行，它共用同一个存储区，仍占着全部字节。在这里的 CPU 上，`smooth_l1_loss`、`binary_cross_entropy` 和 `soft_margin_loss` 也是这样，`cross_entropy` 则不是。
#
# </div>

# %% [markdown] slide={"en": "Weights, gradients, optimizer state: 110.0 MB. Activations: at most 178.4 MB.\n\nThe sum is 288.4 MB. Why is the measured peak 277.7 MB?", "zh": "权重、梯度、优化器状态：110.0 MB。激活值：最多 178.4 MB。\n\n加起来是 288.4 MB，实测的峰值为什么是 277.7 MB？"}
# ## 1.3 The timeline of a step / 一个训练步的时间线
#
# <div lang="en">
#
# Many online memory calculators add up weights, gradients, optimizer state and activations. The first three take 110.0 MB here, and the activations at most 178.4 MB, so the sum is 288.4 MB. But lesson 00 measured a peak of 277.7 MB:
#
# </div>
# <div lang="zh">
#
# 网上的显存计算器大多做加法，把权重、梯度、优化器状态和激活值加起来。前三项你已经知道，共 110.0 MB，这一步的激活值最多 178.4 MB，所以总和是 288.4 MB。可是第 00 课测得的峰值是 277.7 MB：
#
# </div>

# %% slide="result"
timelines({"one step": meter}, title="Activations are released before the gradients are complete")

# %% [markdown]
# <div lang="en">
#
# At the peak, no parameter has its gradient yet. The next figure shows the eight operators around the peak that change the live bytes by 1 MB or more, without the bytes that are in memory at all eight.
#
# </div>
# <div lang="zh">
#
# 峰值那一刻，还没有一个参数得到梯度。下图是峰值前后，使存活字节变化 1 MB 以上的八个算子，一直都在内存里的字节没有画出来。
#
# </div>

# %% slide="result"
figures.draw_around_the_peak(meter, unit_bytes=4 * 8 * 128 * 2048)

# %% [markdown]
# <div lang="en">
#
# The peak is at the very start of backward. At this moment three tensors of the logits' size are in memory. The result of the log-softmax is an activation (yellow until autograd has saved it, then green). Backward has computed its gradient, and from this the gradient of the logits: these two are temporaries. All other activations are still in memory. From now on, backward releases the activations of one layer after the other, and creates the gradients of its parameters.
#
# </div>
# <div lang="zh">
#
# 峰值就在反向刚开始的时候。这一刻，内存里有三个与 logits 一样大的张量。一个是 log-softmax 的结果，它是激活值（刚算出时是黄色，autograd 保存之后变成绿色）。反向先求出它的梯度，再由此求出 logits 的梯度，这两个是临时张量。其余的激活值也都还在。此后，反向一层接一层地释放激活值，同时产生参数的梯度。
#
# </div>

# %% [markdown] slide={"en": "One sequence: 110.0 MB without activations, at most 22.3 MB of activations.\n\n**Guess first.** How high is the peak, and in which phase?", "zh": "只有一条序列：激活值以外共 110.0 MB，激活值最多 22.3 MB。\n\n**先猜**：峰值是多少？在哪个阶段？"}
# <div lang="en">
#
# Now take the same step with one sequence instead of eight. Weights, gradients and optimizer state still take 110.0 MB, and the activations at most 22.3 MB.
#
# **Guess first**, in MB: what will the peak be, and how many MB of gradients are in memory at that moment? In which phase is the peak: forward, backward, or the optimizer's step?
#
# </div>
# <div lang="zh">
#
# 再来看同样的一步，不过把八条序列换成一条。权重、梯度和优化器状态仍然占 110.0 MB，激活值最多 22.3 MB。
#
# **先猜**，以 MB 计：峰值是多少？那一刻内存里有多少 MB 的梯度？峰值在哪个阶段：前向、反向，还是优化器更新时？
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
# At this peak there are no activations, so the sum of all kinds, 132.3 MB, is 16% too high. The operator is an `add`. It adds the two gradients of the tied weight: backward computes the one of the head first and the one of the embedding last. Each is as large as the weight, 2.1 MB, and so is their sum. These three tensors are in memory together with all other gradients.
#
# The place of the peak decides which technique helps. Checkpointing cannot lower this one at all.
#
# </div>
# <div lang="zh">
#
# 这个峰值里没有激活值，所以把各类相加得到的 132.3 MB 偏高 16%。正在运行的算子是 `add`。它把绑定的权重的两份梯度相加，反向最先算出输出头的那份，最后算出嵌入的那份。两份都与权重一样大（2.1 MB），它们的和也一样大。所以这一刻除了其余的全部梯度，内存里还有三个这么大的张量。
#
# 峰值在哪里，决定了什么技术管用。对这个峰值，检查点一点忙也帮不上。
#
# </div>

# %% [markdown]
# ## 1.4 What one layer keeps / 一层保存了什么
#
# <div lang="en">
#
# Which tensors are the activations? Autograd reports them through two **hooks**, which are functions that you write. It calls the first one for each tensor that it saves for backward, and the second one when backward needs this tensor. We leave out the weights, which are in memory anyway, and count each storage once:
#
# </div>
# <div lang="zh">
#
# 激活值是哪些张量？autograd 可以通过两个**钩子**（hook）告诉我们，钩子就是由你写的函数。autograd 每为反向保存一个张量，就调用第一个钩子，反向要用这个张量时，再调用第二个。权重本来就在内存里，所以略去不算，每个存储区也只数一次：
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
    loss = decoder.loss(tokens)  # as long as the loss exists, so does all that is kept
table(["storages kept", "bytes"], [(len(kept), sum(kept.values()))])

# %% [markdown] slide={"en": "Why does an operator keep a tensor? **Ask what its derivative needs.**\n\n$y = x W$: $dW = x^\\top dy$ needs $x$.\n\n$P = \\mathrm{softmax}(S)$: $dS = P \\odot (dP - \\ldots)$ needs $P$, not $S$.\n\n$y = x + z$: needs nothing.", "zh": "算子为什么要保存一个张量？**看它求导时要用什么。**\n\n$y = x W$：$dW = x^\\top dy$，要用 $x$。\n\n$P = \\mathrm{softmax}(S)$：$dS = P \\odot (dP - \\ldots)$，要用 $P$，不用 $S$。\n\n$y = x + z$：什么也不用。"}
# <div lang="en">
#
# The kept tensors take 178,413,636 bytes, the same as the activations in the timeline. *Why* does autograd keep these tensors? Ask each operator what its derivative needs:
#
# - $y = x W$: $dW = x^\top dy$ and $dx = dy\, W^\top$ need $x$ and the weight, but not $y$.
# - $P = \mathrm{softmax}(S)$: $dS = P \odot (dP - \ldots)$ needs $P$, but not $S$.
# - $y = x + z$ passes its gradient on and needs nothing. The derivative of GELU needs GELU's input. LayerNorm needs its input and two numbers per token, the mean and the reciprocal of the standard deviation.
#
# A layer consists of these eight lines, for $b$ sequences of $s$ tokens. For each sequence, $S$ and $P$ have $s \times s$ numbers in each of the $a$ heads:
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
# **Exercise 3.** How many bytes does a layer keep? Complete the function, for any $b$, $s$, $h$ and $a$. The first two rows are done: `norms` are the inputs of the two LayerNorms, and `statistics` their means and deviations. `attention` has everything from `y` to the input of `out` except P, `probabilities` has P, and `feed-forward` has everything from `z` on. Weights don't count.
#
# </div>
# <div lang="zh">
#
# 共 178,413,636 字节，与时间线上的激活值一致。可**为什么**是这些张量？逐个问算子，求导时要用什么：
#
# - $y = x W$：$dW = x^\top dy$，$dx = dy\, W^\top$，要用 $x$ 和权重，不用 $y$。
# - $P = \mathrm{softmax}(S)$：$dS = P \odot (dP - \ldots)$，要用 $P$，不用 $S$。
# - $y = x + z$ 只把梯度传下去，什么也不用。GELU 求导时要用自己的输入。LayerNorm 要用它的输入，外加每个 token 的两个数，即均值和标准差的倒数。
#
# 一层就是下面八行，$b$ 条序列，各 $s$ 个 token。每条序列、每个头各有一个 $S$ 和一个 $P$，都含 $s \times s$ 个数，头数是 $a$（$S$ 还要加上因果掩码）：
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
# **练习 3。** 这样的一层保存多少字节？请补全这个函数，让它对任意的 $b$、$s$、$h$、$a$ 都成立。前两行已经写好：`norms` 是两个 LayerNorm 的输入，`statistics` 是它们的均值和标准差倒数。其余三行由你来写：`attention` 是从 `y` 到 `out` 的输入，P 除外；`probabilities` 就是 P；`feed-forward` 是从 `z` 往后的全部。权重不算。
#
# </div>


# %% minutes=10
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
# Compare your rows with the list of `saved_tensors`. It runs a function and lists the tensors that its graph keeps for backward, with your two hooks. The last columns say which tensor of the eight lines this is, and to which of your rows it belongs. (`Addmm` is a Linear layer, and `mat1` is its input. `Bmm` is one product per sequence and head, 64 in all.)
#
# </div>
# <div lang="zh">
#
# 把你的各行与 `saved_tensors` 的清单对照。它运行一个函数，用你那两个钩子列出计算图为反向保存的张量。最后两列指出它是那八行里的哪个张量、归在你的哪一行。（`Addmm` 是线性层，`mat1` 是它的输入。`Bmm` 是每条序列、每个头各做一次的矩阵乘法，共 64 次。）
#
# </div>

# %% slide="result"
listed = saved_tensors(DecoderLayer(256, 8), torch.randn(8, 128, 256))  # 8 heads; (b, s, h)
figures.rows_of_the_formula(listed)

# %% slide="result"
one_layer = saved_by_one_layer(b=8, s=128, h=256, a=8)
predictions([("one layer", sum(one_layer.values()), listed.total_bytes)], unit="bytes")

# %% [markdown] slide={"en": "$16 s b h + a s^2 b$ elements, and $4 s b$ for the statistics. In half precision, with dropout, the same count gives\n\n$$s b h \\left(34 + 5 \\frac{a s}{h}\\right) \\text{ bytes.}$$", "zh": "$16 s b h + a s^2 b$ 个元素，统计量另计 $4 s b$。在半精度、带 dropout 时，同样的数法得到\n\n$$s b h \\left(34 + 5 \\frac{a s}{h}\\right) \\text{ 字节。}$$"}
# <div lang="en">
#
# Your formula is exact. One row of the list is marked as seen before: softmax keeps the attention probabilities P, and the product with V keeps the same storage. If you add up tensors instead of storages, you count 20% too much here.
#
# In elements, your formula is $16 s b h + a s^2 b$, and $4 s b$ for the statistics. In half precision and with dropout, the same count gives the formula of Korthikanti et al., $s b h \left(34 + 5 \frac{a s}{h}\right)$ bytes. It counts 2 bytes per element, one byte per element of three dropout masks, and 2 more bytes per element of P for P after dropout.
#
# </div>
# <div lang="zh">
#
# 你的公式一字节不差。清单里有一行标着“已见过”，因为 softmax 保存了注意力概率 P，与 V 相乘时保存的是同一个存储区。如果把张量逐个相加，而不按存储区统计，这里就会多算 20%。
#
# 按元素个数，你的公式是 $16 s b h + a s^2 b$，统计量另计 $4 s b$。在半精度、带 dropout 时，用同样的数法就得到 Korthikanti 等人的公式，即 $s b h \left(34 + 5 \frac{a s}{h}\right)$ 字节。在这个公式里，每个元素占 2 字节，三个 dropout 掩码每个元素占一字节。此外还要保存 dropout 之后的 P，每个元素再占 2 字节。
#
# </div>

# %% [markdown] slide={"en": "P has $s^2$ elements per head; the rest grows with $s$.\n\n**Guess first.** From which length on is P larger than the rest?", "zh": "P 在每个头上有 $s^2$ 个元素，其余的都与 $s$ 成正比。\n\n**先猜**：从多长开始，P 超过这一层的其余部分？"}
# ## 1.5 Long sequences / 序列变长
#
# <div lang="en">
#
# P has $s^2$ elements per head, and everything else in your formula grows with $s$. **Guess first**, in tokens: for this layer, with $h = 256$ and 8 heads, from which length on is P larger than all the rest together? (Set $a s^2 b$ equal to $16 s b h$.) The figure shows your formula as lines, and measurements as points. They were made under `symbolic()`, where tensors have shapes and no data, so that they take no memory.
#
# </div>
# <div lang="zh">
#
# P 在每个头上有 $s^2$ 个元素，公式里的其余各项都与序列长度 $s$ 成正比。**先猜**（以 token 计）：这一层 $h = 256$、8 个头，从多长开始，P 超过其余各项之和？（令 $a s^2 b$ 等于 $16 s b h$。）图中的线是你的公式，点是实测。实测是在 `symbolic()` 里做的，那里的张量只有形状、没有数据，不占内存。
#
# </div>

# %% tags=["guess"] slide="result"
my_length = None
figures.draw_lengths(saved_by_one_layer, my_length)

# %% [markdown]
# <div lang="en">
#
# The curves cross at $s = 16 h / a = 512$. This is sixteen times the size of a head, here 32. With heads of size 128, as in many large models, they cross at 2048 tokens. For longer sequences, most of a layer's activations are P, if P is kept. Lesson 06 shows how fused attention avoids this.
#
# </div>
# <div lang="zh">
#
# 两条曲线在 $s = 16 h / a = 512$ 处相交，也就是头维度（这里是 32）的十六倍。许多大模型的头维度是 128，交点就在 2048 个 token。序列更长时，只要保存 P，一层的激活值大部分就是 P。融合注意力怎样避免保存它，见第 06 课。
#
# </div>

# %% [markdown] slide={"en": "Llama's layer: RMSNorm, grouped-query attention, fused attention, SwiGLU.\n\n**Guess first.** How far off is your formula, at 128 and 2048 tokens?", "zh": "Llama 的层用 RMSNorm、分组查询注意力、融合的注意力算子和 SwiGLU。\n\n**先猜**：对这一层，在 128 和 2048 个 token 时，你的公式差多少？"}
# ## 1.6 A layer of Llama / Llama 的一层
#
# <div lang="en">
#
# Many recent models have a layer like that of Llama, which differs in four points:
#
# - **RMSNorm** divides each token by its root mean square and multiplies the result by a weight. It has no mean and no bias.
# - **Grouped-query attention** (GQA) has fewer heads for K and V than for Q: $a$ heads of queries share $n$ heads of keys and values.
# - **`scaled_dot_product_attention`** (SDPA) is one fused operator for all of attention. It keeps Q, K, V and its output and, instead of P (except with dropout on a CPU), one fp32 number per query and head, the log-sum-exp (LSE).
# - **SwiGLU** is a feed-forward network with three matrices. It multiplies two projections of inner width $f$.
#
# Here is this layer from Hugging Face's `transformers`, smaller than in Llama 3 8B but with its ratios: $f = 3.5 h$, $a = 4 n$, $h = 256$, 8 heads of queries. **Guess first**: how far off is your formula for this layer, at 128 and at 2048 tokens?
#
# </div>
# <div lang="zh">
#
# 许多新模型用的是 Llama 那样的层，它有四点不同：
#
# - **RMSNorm** 把每个 token 除以它的均方根，再乘以一个权重，没有均值，也没有偏置。
# - **分组查询注意力**（GQA）里，K 和 V 的头比 Q 少，$a$ 个查询头共用 $n$ 个键值头。
# - **`scaled_dot_product_attention`**（SDPA）用一个融合算子完成整个注意力。它保存 Q、K、V 和输出，但不保存 P，而是每个头、每个查询保存一个 fp32 数，叫做 LSE（log-sum-exp，指数和的对数）。（在 CPU 上用 dropout 时，它仍然保存 P。）
# - **SwiGLU** 是有三个矩阵的前馈（feed-forward）网络，它把两个内部宽度为 $f$ 的投影相乘。
#
# 下面就是 Hugging Face 的 `transformers` 里的这一层。它比 Llama 3 8B 的小，但 $f = 3.5 h$、$a = 4 n$ 这两个比例相同，其中 $h = 256$，有 8 个查询头。**先猜**：对这一层，在 128 和 2048 个 token 时，你的公式差多少？
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
# Your formula is too low for short sequences and more than three times too high for long ones. The comments say what each operator keeps:
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
# **Exercise 4.** Write the same five rows for this layer. `norms` has `x` and `m`, for both norms, and `statistics` the results of `rsqrt`. `probabilities` has what SDPA keeps instead of P. Leave out cos and sin, which all layers share.
#
# </div>
# <div lang="zh">
#
# 序列短时，你的公式偏低，序列长时，又是实测的三倍多。这一层由下面几行组成，每个算子都保存求导时要用的张量：
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
# **练习 4。** 仿照上一道练习，为这一层写出这五项的字节数。`norms` 是两个归一化各自的 `x` 和 `m`，`statistics` 是两次 `rsqrt` 的结果，`probabilities` 是 SDPA 代替 P 保存的数。cos 和 sin 由所有层共用，不算。
#
# </div>


# %% minutes=8
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
# The difference is cos and sin: two tables of $s \times d$ numbers, which are made once per step and shared by all layers. So your formula is exact for a layer, and it has no $s^2$ any more.
#
# Here RMSNorm keeps more than LayerNorm, although it computes less, because it consists of several operators that each keep their inputs. A formula holds only for its operators: before you trust a calculator, ask which layer it assumes.
#
# </div>
# <div lang="zh">
#
# 差的就是 cos 和 sin，即两张 $s \times d$ 的表，它们每步只建立一次，所有层共用。所以对一层来说，你的公式一字节不差，而且不再有 $s^2$ 的项。
#
# RMSNorm 的计算比 LayerNorm 少，在这里保存的却更多，因为它由几个算子组成，每个算子都要保存自己的输入。公式只对推导它的那些算子成立，所以相信一个计算器之前，先弄清它假定的是哪一种层。
#
# </div>

# %% [markdown] slide={"en": "At the peak, **three tensors** have the logits' size: one activation and two temporaries.\n\n**Guess first.** Which parts make up the whole peak?", "zh": "峰值时有**三个**与 logits 一样大的张量，一个是激活值，两个是临时张量。\n\n**先猜**：整个峰值由哪些部分相加而成？"}
# ## 1.7 The logits, and the whole peak / logits，以及整个峰值
#
# <div lang="en">
#
# Back to lesson 00's decoder. Section 1.3 has shown one part: **three tensors of the logits' size**, one activation and two temporaries. Token numbers and targets don't count: the batch existed before the meter started, and the loss has released its targets.
#
# **Exercise 5.** Fill in the four parts of the peak, in bytes. `state` existed before the step. `layers` is what the eight layers keep in total. `norm and head` is kept by the last LayerNorm and the head, apart from the logits. `logits` is everything of the logits' size.
#
# </div>
# <div lang="zh">
#
# 回到第 00 课的解码器，计算整个峰值。1.3 节的图给出了其中一部分：**三个与 logits 一样大的张量**，一个是激活值，两个是临时张量。token 编号和目标都不算，因为批次在计量器启动之前就有了，而损失在峰值之前已经释放了它的目标。
#
# **练习 5。** 填出峰值的四个部分，以字节计。`state` 是这一步开始之前就有的，`layers` 是八层一共保存的，`norm and head` 是最后一个 LayerNorm 和输出头保存的（logits 除外），`logits` 是与 logits 一样大的全部张量。
#
# </div>

# %% minutes=7
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

# %% [markdown] slide={"en": "The 8 bytes: the loss and its gradient.\n\nThree tensors of the logits' size make up 9% of the peak. With a real vocabulary?", "zh": "这 8 个字节是损失和它的梯度。\n\n三个与 logits 一样大的张量占峰值的 9%。真实的词表呢？"}
# <div lang="en">
#
# The missing 8 bytes are the loss and its gradient. With 2048 words, the three tensors of the logits' size make up 9% of this peak. Real vocabularies are larger. The last column adds up weights, gradients, optimizer state and activations, as an online memory calculator does:
#
# </div>
# <div lang="zh">
#
# 差的 8 个字节是两个数，即损失和它的梯度。词表只有 2048 个词时，三个与 logits 一样大的张量占这个峰值的 9%。真实的词表要大得多。最后一列照网上显存计算器的算法，把权重、梯度、优化器状态和激活值加起来：
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
# With 32768 words, more than half of the peak belongs to one matrix product and its loss. The sum of the kinds is 4% too high with the small vocabulary, and 28% too low with the large one. It adds gradients and activations that are never in memory together, and leaves out the temporaries. Lesson 02 computes this loss in chunks, so that the logits are never in memory as a whole.
#
# </div>
# <div lang="zh">
#
# 词表为 32768 时，峰值的一半以上属于一次矩阵乘法和它的损失。各类之和在词表小时多算 4%，词表大时却少算 28%，因为它把从不同时在内存里的梯度和激活值加在一起，又漏掉了临时张量。第 02 课会把这个损失分成小段计算，完整的 logits 就不会出现。
#
# </div>

# %% [markdown]
# ## 1.8 In your own code / 实际怎么写
#
# <div lang="en">
#
# These lines need PyTorch alone. `MemTracker` is PyTorch's own meter and runs on a CPU, as do `torch.profiler` and the hooks of section 1.4. The functions of `torch.cuda` need a GPU and are not run here.
#
# </div>
# <div lang="zh">
#
# 同样的问题，只用 PyTorch 也能回答。`MemTracker` 是 PyTorch 自带的计量器，它和 `torch.profiler`、1.4 节的钩子一样，在 CPU 上就能运行。`torch.cuda` 的函数需要 GPU，这里没有运行。
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
table(["meter", "bytes"], [("`MemTracker`", found)])  # with 8,256 bytes of tokens

# %% [markdown]
# <div lang="en">
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
# | 问题 | 写法 |
# |---|---|
# | autograd 保存了什么 | `torch.autograd.graph.saved_tensors_hooks(pack, unpack)` |
# | 按算子统计的字节，任何设备 | `torch.profiler.profile(profile_memory=True)` |
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
# We test three common claims. For the second and the third, the step runs under `torch.autocast`, with bf16 operators and fp32 weights (symbolically).
#
# </div>
# <div lang="zh">
#
# 用这个训练步检验三句常见的说法。检验后两句时，训练步在 `torch.autocast` 下运行，算子用 bf16，权重仍是 fp32，字节数用符号张量统计。
#
# </div>

# %% slide="result"
autocast, stays = figures.under_autocast(make_decoder)
figures.what_you_may_have_read(meter, autocast, stays)

# %% [markdown] slide={"en": "The same step of the same decoder, one technique per row.\n\nWhich of the parts would you reduce first?", "zh": "同一个解码器的同一步，每种技术占一行。\n\n这些部分，你会先减少哪一个？"}
# ## 1.10 The ledger / 账本
#
# <div lang="en">
#
# Every lesson adds its row to the ledger: the same step with one technique. The second table takes the baseline's peak apart, and names the lessons that reduce each part.
#
# </div>
# <div lang="zh">
#
# 每一课最后都往账本里添一行，记下同一个解码器的同一步只用一种技术时的结果。第二张表再把基线的峰值拆成各个部分，并写明哪几课来减少它。
#
# </div>

# %% slide="result"
ledger("01", "autocast, bf16", autocast)

# %% jupyter={"source_hidden": true} slide="result"
figures.parts_of_the_peak(meter, one_layer)

# %% [markdown] slide={"en": "Count storages. Activations are released as gradients are created.\n\nAsk each operator what its derivative needs, in your model.", "zh": "要按存储区统计。激活值逐渐释放，梯度才逐渐产生。\n\n对你自己的模型，也逐个问算子求导时要用什么。"}
# ## 1.11 Summary / 小结
#
# <div lang="en">
#
# - Parameters, gradients and optimizer state don't depend on the batch. With Adam, they take 16 bytes per parameter in fp32, and 16, 18 or 20 in mixed precision. Activations do depend on the batch.
# - The kinds are not in memory all at once: backward releases activations while it creates gradients. Here the peak is at the start of backward, with one sequence at its end.
# - An operator keeps what its derivative needs. Count storages, not tensors.
# - A layer like GPT's keeps $16 s b h + a s^2 b$ elements and its statistics. From $s = 16 h / a$ on, P is larger than the rest. Llama's layer with fused attention keeps no P.
# - At the start of backward, three tensors have the logits' size.
#
# **Next:** in [lesson 02](02_checkpointing.ipynb), activations are not kept but computed again.
#
# </div>
# <div lang="zh">
#
# - 参数、梯度和优化器状态与批次无关。用 Adam 时，三者在 fp32 下每个参数共占 16 字节，在混合精度下是 16、18 或 20 字节。激活值则随批次变化。
# - 各类字节并不同时在内存里，因为反向一边释放激活值，一边产生梯度。这里的峰值在反向刚开始时，如果只有一条序列，峰值就在反向的末尾。
# - 一个算子求导时要用什么，它就保存什么。要按存储区统计，不要按张量。
# - GPT 那样的层保存 $16 s b h + a s^2 b$ 个元素，外加统计量。从 $s = 16 h / a$ 起，P 比其余各项之和还大。Llama 的层用融合注意力，不保存 P。
# - 如果峰值出现在反向刚开始的时候，那一刻就有三个与 logits 一样大的张量。
#
# **下一步**：在[第 02 课](02_checkpointing.ipynb)里，激活值不再保存，而是重新计算。
#
# </div>

# %% [markdown]
# ## In depth / 深入
#
# <div lang="en">
#
# The other lessons don't need anything from here on. Each section can be read alone, and uses only names that are defined above.
#
# </div>
# <div lang="zh">
#
# 以下内容，其他各课都不会用到。各节互相独立，只用到前面正文里定义过的名字。
#
# </div>

# %% [markdown]
# ## 1.12 The whole meter / 完整的计量器
#
# <div lang="en">
#
# **Exercise 6.** Write the whole meter of section 1.2, without `exercises.storages`. `tree_leaves(values)` lists what is in nested lists, tuples and dictionaries. `tensor.untyped_storage()` is a tensor's storage, and `_cdata` is its address, which is the same for every view. The check also tries results that share a storage or don't fill it.
#
# </div>
# <div lang="zh">
#
# **练习 6。** 不用 `exercises.storages`，写出 1.2 节的整个计量器。`tree_leaves(values)` 把嵌套的列表、元组和字典里的东西列出来，`tensor.untyped_storage()` 是张量的存储区，`_cdata` 是它的地址，各个视图都一样。检查还会试几个结果共用一个存储区，或没有占满存储区的情形。
#
# </div>

# %% minutes=9
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
# ## 1.13 Depth is a line / 深度是直线
#
# <div lang="en">
#
# Each layer keeps its own tensors, so the bytes grow linearly with the number of layers. Its slope is your sum for one layer. Its intercept is what remains without any layer: the inputs of the last norm and the head, the statistics, the log-softmax, and 16,452 bytes for the token numbers, the targets and one scalar that the loss keeps.
#
# </div>
# <div lang="zh">
#
# 每一层各存各的张量，所以字节数随层数线性增长。斜率是你为一层算出的总和，截距是一层都没有时还保存的：最后一个归一化和输出头的输入、统计量、log-softmax 的结果，以及 token 编号、目标和损失保存的一个标量，共 16,452 字节。
#
# </div>

# %%
depths, saved = [2, 4, 8, 16], []
for layers in depths:
    with symbolic():
        deeper, batch = make_decoder(layers=layers), random_tokens(8, 128, 2048)
        saved.append(saved_tensors(deeper.loss, batch).total_bytes)
head = 4 * 8 * 128 * (2 * 256 + 2 + 2048) + 16_452
lines = [head + layers * sum(one_layer.values()) for layers in depths]
predictions(zip([f"L = {layers}" for layers in depths], lines, saved, strict=True), unit="bytes")

# %% [markdown]
# ## 1.14 Seven billion parameters on this laptop / 在这台电脑上算 70 亿参数
#
# <div lang="en">
#
# In `symbolic()`, a step runs all of its operators on tensors without data (PyTorch's `FakeTensorMode`), and the meter counts their bytes. So this laptop can count the step of a model with 7 billion parameters. We take the same kind of decoder in bf16, Adam with fp32 master weights that updates one parameter after the other, one sequence of 2048 tokens, and fused attention.
#
# Your formula still works if you leave out P, take 2 bytes per number, and add one fp32 number per query and head. **Guess first**, in GB: the model of 6.6 billion parameters (hidden size $h$ 4096, 32 heads, 32 layers) takes 105.3 GB at 16 bytes per parameter. What is its peak, and in which phase?
#
# </div>
# <div lang="zh">
#
# 在 `symbolic()` 里，训练步的全部算子都照常运行，只是张量没有数据（用的是 PyTorch 的 `FakeTensorMode`），计量器统计它们的字节。因此这台电脑也能算出 70 亿参数的模型一步要用多少内存。我们用同一种解码器，精度为 bf16，Adam 带 fp32 主权重、逐个参数更新，一条 2048 个 token 的序列，注意力是融合的。
#
# 你的公式仍然可用，只要去掉 P，每个数按 2 字节算，再为每个头、每个查询加一个 fp32 数。**先猜**，以 GB 计：66 亿参数的模型（隐藏维度 $h$ 为 4096、32 个头、32 层）按每个参数 16 字节占 105.3 GB。它的峰值是多少？在哪个阶段？
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
# You made your formula for a model of 7 million parameters, and it gives the 8.8 GB of activations of a model with 7 billion. But these add nothing to the peak. They are released before the last gradients are computed, and the peak comes later, in the optimizer. Apart from 16 bytes per parameter, it has only three fp32 temporaries as large as the largest parameter. In the 1 B model, the peak is still in backward, while activations are in memory.
#
# This result holds for these conditions: one sequence, and Adam in a loop over the parameters. Try `batch=8`. The largest model has never run on this machine, and yet you know its bytes operator by operator.
#
# </div>
# <div lang="zh">
#
# 你的公式是对着 700 万参数的小模型推出来的，用到 70 亿参数的模型上，照样算准了那 8.8 GB 的激活值。但它们没有增加峰值，因为最后几个梯度还没算出来，它们就已释放，而峰值要到优化器更新时才出现。按每个参数 16 字节算出的总数之外，峰值只多了三个 fp32 临时张量，每个都与最大的参数一样大。至于 1 B 的模型，峰值仍在反向，那时激活值还在内存里。
#
# 这个结论只适用于这里的条件，即一条序列、Adam 逐个参数更新。可以试试 `batch=8`。最大的模型从未在这台机器上真正运行过，它的字节却逐个算子统计清楚了。
#
# </div>

# %% [markdown]
# ## 1.15 Ways to update / Adam 的几种更新方式
#
# <div lang="en">
#
# A loop over the parameters has at most three temporaries at a time, each as large as one parameter. `foreach=True`, the default of `torch.optim.Adam` on CUDA, makes a list of temporaries, one per parameter. They are live together and take as much as all parameters: 28 GB for 7 billion in fp32, although no single one is large. `fused=True`, the default of Hugging Face's `Trainer`, needs none.
#
# </div>
# <div lang="zh">
#
# 逐个参数循环更新时，同时最多有三个临时张量，每个与一个参数一样大。`foreach=True` 是 `torch.optim.Adam` 在 CUDA 上的默认做法，它建立一列临时张量，每个参数一个，同时存活，合起来与全部参数一样大。70 亿个 fp32 参数就要 28 GB，但其中没有哪一个特别大。`fused=True` 是 Hugging Face `Trainer` 的默认做法，不需要临时张量。
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
# With one sequence, `foreach` moves the peak into the optimizer and raises it by a fifth. Four techniques need less than 16 bytes per parameter: 8-bit optimizer state (about 2 bytes per parameter instead of 8), updates inside backward (lesson 05), adapters (next section), and sharding (lesson 08).
#
# </div>
# <div lang="zh">
#
# 只有一条序列时，`foreach` 把峰值移到了优化器更新时，还抬高了五分之一。有四种技术能让每个参数不到 16 字节：8 位优化器状态（每个参数约 2 字节，而不是 8 字节）、在反向中就更新（第 05 课）、适配器（下一节），以及分片（第 08 课）。
#
# </div>

# %% [markdown]
# ## 1.16 Half precision, and adapters / 半精度与适配器
#
# <div lang="en">
#
# `torch.autocast` keeps weights, gradients and optimizer state in fp32, and makes bf16 copies of the weights in forward. Only activations shrink, and with one sequence not even these. Weights in bf16 halve everything here, but without fp32 master weights, rounding loses small updates. LoRA (Hu et al. 2021, arXiv:2106.09685) freezes each matrix and trains two thin ones next to it, so hardly any gradients and optimizer state are left. Most activations stay, except the inputs that only a frozen matrix's gradient needs.
#
# </div>
# <div lang="zh">
#
# `torch.autocast` 让权重、梯度和优化器状态留在 fp32，前向时另造一份 bf16 的权重。变小的只有激活值。如果只有一条序列，激活值这一类也不会变小。如果权重也用 bf16，这里的一切都减半，但没有 fp32 主权重，小的更新会被舍入掉。LoRA（Hu et al. 2021，arXiv:2106.09685）冻结每个矩阵，在旁边训练两个很窄的矩阵，梯度和优化器状态就所剩无几。激活值大多还在，省下的只是冻结的矩阵求自己的梯度时才要用的那些输入。
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
# **Exercise 7.** A model of 7 billion parameters is frozen in bf16. Adapters with 20 million parameters are trained with Adam, all in fp32. How many bytes do weights, gradients and optimizer state take together? (`answer`, in bytes.)
#
# </div>
# <div lang="zh">
#
# **练习 7。** 一个 70 亿参数的模型冻结不训练，权重存为 bf16。另用 Adam 训练共 2000 万个参数的适配器，全部用 fp32。权重、梯度和优化器状态共占多少字节？（`answer`，以字节计。）
#
# </div>

# %% minutes=3
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
# ## 1.17 A formula holds for its operators / 公式只对它所数的算子成立
#
# <div lang="en">
#
# The formula of Korthikanti et al. is exact for a layer with dropout, in both precisions and with the norms before (pre-norm) or after (post-norm), if the LayerNorm statistics are added. Its dropout masks take one byte per element, as on GPUs. `F.dropout` on a CPU keeps the scaling factors instead (0 or $1/(1-p)$), in the activations' own dtype, which changes the result:
#
# </div>
# <div lang="zh">
#
# 补上 LayerNorm 的统计量之后，Korthikanti 等人的公式对带 dropout 的一层分毫不差，两种精度都对，归一化在前（pre-norm）、在后（post-norm）也都对。公式里的 dropout 掩码每个元素一字节，与 GPU 上相同。CPU 上的 `F.dropout` 保存的却是缩放系数（0 或 $1/(1-p)$），dtype 与激活值相同，所以结果不同：
#
# </div>

# %%
from course_lib.memory import transformer_activation_bytes

sizes, rows = {"sequence": 512, "batch": 1, "hidden": 512, "heads": 8}, []
cases = {"pre-norm, `bfloat16`": True, "post-norm, `bfloat16`": False, "pre-norm, `float32`": True}
for name, norm_first in cases.items():
    dtype = torch.float32 if "float32" in name else torch.bfloat16
    layer = DecoderLayer(512, 8, dropout=0.1, norm_first=norm_first).to(dtype)
    kinds = {"dtype_bytes": dtype.itemsize, "statistic_bytes": dtype.itemsize}
    measured = saved_tensors(layer, torch.randn(1, 512, 512, dtype=dtype)).total_bytes
    rows.append((name, transformer_activation_bytes(**sizes, **kinds), measured))
layer = figures.with_factor_dropout(DecoderLayer(512, 8, dropout=0.1).to(torch.bfloat16))
factors = saved_tensors(layer, torch.randn(1, 512, 512, dtype=torch.bfloat16)).total_bytes
rows.append(("`F.dropout`, `bfloat16`", rows[0][1], factors))
predictions(rows, unit="bytes")

# %% [markdown]
# ## 1.18 What attention keeps / 注意力保存了什么
#
# <div lang="en">
#
# Here is attention alone, with 12 heads of size 64. It does not keep the attention scores S, because the gradient of softmax needs only P. The fused operator keeps Q, K, V, the output and one number per query and head.
#
# </div>
# <div lang="zh">
#
# 只看注意力：12 个头，头维度 64。它不保存注意力分数 S，因为 softmax 求梯度只用 P。融合核函数（融合算子）保存的是 Q、K、V、输出，以及每个头、每个查询一个数。
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
    rows.append((s, *(round(n / 1e6, 1) for n in (plain, plain + 4 * 12 * s * s, fused))))
table(["tokens", "standard (MB)", "if S were kept (MB)", "fused (MB)"], rows)

# %% [markdown]
# ## 1.19 A memory monitor / 内存监视器
#
# <div lang="en">
#
# Training scripts often print the memory after each phase. The meter has it as `live_bytes`.
#
# </div>
# <div lang="zh">
#
# 训练脚本常在每个阶段之后打印内存。计量器的 `live_bytes` 就是这个数。
#
# </div>

# %%
model, rows, marks = make_decoder(), [], []
optimizer = torch.optim.Adam(model.parameters())


def reading(meter):
    torch.empty(0)  # an operator of no bytes, at which the meter notices what was released
    marks.append(meter.moments)
    return round(meter.live_bytes / 1e6, 1)


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
headings = ["before (MB)", "forward (MB)", "backward (MB)", "step() (MB)", "zero_grad() (MB)"]
table(["step", *headings], rows)

# %% [markdown]
# <div lang="en">
#
# After forward, the first step has 55.0 MB less than all later ones, because Adam creates its state at the end of step 1. The peak is inside backward, so no reading between phases shows it.
#
# On a GPU, **allocated memory** is the live bytes, rounded up, and **reserved memory** is what the caching allocator has taken from the driver. Its rules are public, so the library applies them to the meter's trace without a GPU: reserved memory in this section and the next is **simulated**.
#
# </div>
# <div lang="zh">
#
# 前向之后，第一步比以后各步少 55.0 MB，因为 Adam 的状态在第 1 步末尾才建立。峰值在反向之中，只在阶段之间读数，就永远看不到它。
#
# 在 GPU 上，**已分配显存**是存活的字节，向上取整，**已预留显存**是缓存分配器向驱动申请来的字节。分配器的规则是公开的，所以没有 GPU，课程库也能按规则处理计量器的轨迹。也就是说，本节和下一节的已预留显存都是**模拟**的。
#
# </div>

# %%
from course_lib.lessons.lesson_01 import allocator

trace = monitor.trace()
allocator.reserved_after(trace, marks[:10])

# %% [markdown]
# <div lang="en">
#
# Allocated memory follows the live bytes, but reserved memory only rises: the allocator keeps what `zero_grad` has released. The second step reuses this memory and takes 44 MB more, because Adam's state, 55.0 MB, now takes part of it. `save_snapshot` writes one step for PyTorch's memory viewer, as `torch.cuda.memory._dump_snapshot` does on a GPU:
#
# </div>
# <div lang="zh">
#
# 已分配显存随存活的字节升降，已预留显存却只升不降，因为 `zero_grad` 释放的，分配器都留着。第二步会重新使用这些显存，但还要再申请 44 MB，因为 Adam 的状态（55.0 MB）已经占了其中一部分。`save_snapshot` 可以把一步写成 PyTorch 的显存查看器能打开的文件，与 GPU 上的 `torch.cuda.memory._dump_snapshot` 一样：
#
# </div>

# %%
allocator.draw_in_the_viewer(trace[marks[5] - 1 : marks[9]])

# %% [markdown]
# ## 1.20 Fragmentation: the same bytes, in another order / 显存碎片：同样的字节，换个顺序
#
# <div lang="en">
#
# PyTorch's *Performance Tuning Guide* warns that a short batch followed by a longer one "causes fragmentation in the caching allocator, which may result in out-of-memory errors". Its remedy is to run the longest batch once before training, forward and backward. Here we train on two batches, A of 2 × 384 tokens and B of 2 × 512, twice each, on a simulated device of 388 MiB. **Guess first**: both orders have the same peak in live bytes. Does the order matter?
#
# </div>
# <div lang="zh">
#
# PyTorch 的《Performance Tuning Guide》提醒，短批次之后若来一个更长的批次，缓存分配器会产生显存碎片，可能导致显存不足。它的办法是在训练之前，先用最长的批次做一次前向和反向。这里在模拟的 388 MiB 设备上，用两个批次各训练两次：A 是 2 × 384 个 token，B 是 2 × 512 个。**先猜**：两种顺序的存活字节峰值相同，那么顺序还要紧吗？
#
# </div>

# %%
scenes, ends = allocator.four_orders(make_decoder)
allocator.orders_on(scenes, 388 << 20)

# %%
print(allocator.replay_trace(scenes["A, B, A, B"], 388 << 20)[1].partition(" If reserved")[0])

# %% [markdown]
# <div lang="en">
#
# PyTorch asks for a segment of 20 MiB for a tensor of 8 MiB, but only 18 are free. Another 16 MiB are reserved, in holes that are too small. Adam's state makes these holes. It was allocated inside segments that had been split for batch A, and it stays there. The step fits if the state is created first, or if B runs once first. `expandable_segments` avoids the problem with one long segment per pool. (This holds for these batches and this limit.)
#
# </div>
# <div lang="zh">
#
# 要放的张量是 8 MiB，PyTorch 为它申请一个 20 MiB 的内存段，而空闲的只有 18 MiB。另有 16 MiB 已预留，却是些零碎的空当，放不下它。空当是 Adam 的状态造成的，它放进了为 A 切开的内存段里，此后一直占着。如果先建立状态，或者先用 B 跑一遍，就装得下。`expandable_segments` 让每个池只有一个长的内存段，也避免了这个问题。（这只是这两个批次、这个上限的结果。）
#
# </div>

# %%
stats = [trace[: marks[i]].allocator().memory_stats() for i in (9, 14)]
after_steps = [each["reserved_bytes.all.current"] for each in stats]
allocator.allocator_claims(scenes["A, B, A, B"], 388 << 20, ends, after_steps)

# %% [markdown]
# ## 1.21 How to compare fairly / 怎样公平地比较
#
# <div lang="en">
#
# A common method is "run plain first, then the other, and compare the growth". Here it compares a deep MLP with itself. A fair method finds no difference.
#
# </div>
# <div lang="zh">
#
# “先跑基线，再跑另一个，比较增量”是常见的做法。这里用这种做法，把一个深层 MLP 与它自己比较。公平的方法不该测出差别。
#
# </div>

# %%
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
fair = [measure(mlp_step, model=mlp, optimizer=optimizer, repeats=1).peak_bytes for _ in range(2)]
headings = ["method", "first run (bytes)", "second run (bytes)"]
table(headings, [("growth", *grown), ("`measure`", *fair)])

# %% [markdown]
# <div lang="en">
#
# Doing nothing seems to save 65%, because the first run creates Adam's state. `measure` brings every variant into the same state before it counts.
#
# </div>
# <div lang="zh">
#
# 什么都没做，却好像省了 65%，因为 Adam 的状态是在第一次运行时建立的。`measure` 先让各方处于同样的状态，再统计。
#
# </div>

# %%
from course_lib.lessons.lesson_01 import claims

qkv = [torch.randn(1, 12, 512, 64, requires_grad=True) for _ in range(3)]
attention, activations = saved_tensors(standard, *qkv), saved_tensors(mlp, x)
forward = meter.timeline[meter.phases().index("backward") - 1].live_bytes
counts = (attention.total_bytes, activations.total_bytes / x.nbytes)
claims.older_claims(grown, *counts, forward, meter.peak_bytes)

# %% [markdown]
# ## 1.22 What the meter leaves out / 计量器没有统计的部分
#
# <div lang="en">
#
# The meter counts tensors. An operator may also take **workspace**, which it uses and releases inside itself. The decoder needs hardly any, convolutions need a lot, and the amount depends on the machine.
#
# </div>
# <div lang="zh">
#
# 计量器统计的是张量。算子还可能申请**工作区**，在自己内部用完就释放。解码器几乎不用工作区，卷积却要用很多，大小因机器而异。
#
# </div>

# %% tags=["nbval-ignore-output", "shows-seconds"]
from course_lib.teaching import compare

images, first = torch.randn(8, 3, 64, 64), torch.nn.Conv2d(3, 16, 3)
convolutions = torch.nn.Sequential(first, torch.nn.ReLU(), torch.nn.Conv2d(16, 16, 3, stride=2))


def decoder_step():
    decoder.loss(tokens).backward()
    adam.step()


def convolution_step():
    convolutions(images).square().mean().backward()


variants = {"decoder": measure(decoder_step, model=decoder, optimizer=adam)}
variants["convolutions"] = measure(convolution_step, model=convolutions)
compare(variants, seconds=True, workspace=True)

# %% [markdown]
# ## 1.23 Measuring changes the result / 测量会扰动被测对象
#
# <div lang="en">
#
# If a tensor has several gradients, autograd adds each new one to the first in place. While a dispatch mode is active, it makes a new tensor for the sum instead. `MemoryMeter` knows this and counts as autograd does without a mode. `TinyMeter` does not. (The gradients of a Linear's weight are transposed views, so their sum is a new tensor in any case, as in section 1.3.) Here a weight is used four times:
#
# </div>
# <div lang="zh">
#
# 一个张量有几份梯度时，autograd 把后来的原地加到第一份上。但只要有分发模式在起作用，它就会为这个和新建一个张量。`MemoryMeter` 知道这一点，按未启用分发模式时的情形来统计，`TinyMeter` 则不知道。（Linear 的权重梯度是转置的视图，求和时无论如何都要新建张量，1.3 节就是这样。）下面的权重用了四次：
#
# </div>

# %%
x, upstream = torch.randn(64, 512), torch.randn(64, 1024)
weight = torch.randn(512, 1024, requires_grad=True)


def used_four_times():
    weight.grad = None
    sum((x @ weight * upstream).sum() for _ in range(4)).backward()


with TinyMeter() as tiny:
    used_four_times()
weight.grad = None
with MemoryMeter() as full:
    used_four_times()
allocated = measure(used_four_times, repeats=1).allocator_peak_bytes
headings = ["TinyMeter (bytes)", "MemoryMeter (bytes)", "allocator, no mode (bytes)"]
table(headings, [(tiny.peak, full.peak_bytes, allocated)])

# %% [markdown]
# ## 1.24 On a GPU / 在 GPU 上
#
# <div lang="en">
#
# On a GPU the caching allocator manages the memory and keeps its own statistics. `torch.cuda.memory_allocated` counts tensors, rounded up to 512 bytes (a large block may be up to 1 MB too big), and workspace. `memory_reserved` counts what the allocator has taken from the driver, free blocks included. `nvidia-smi` shows this and the CUDA context. Call `torch.cuda.reset_peak_memory_stats()` before the code whose peak you want to know.
#
# </div>
# <div lang="zh">
#
# 在 GPU 上，显存由缓存分配器管理，它另有一本账。`torch.cuda.memory_allocated` 计入张量（向上取整到 512 字节的整数倍，大块还可能多出至多 1 MB）和工作区；`memory_reserved` 是缓存分配器向驱动申请的总量，包括空闲块。`nvidia-smi` 显示的是这个总量加上 CUDA 上下文。要看哪一段的峰值，就在它之前调用 `torch.cuda.reset_peak_memory_stats()`。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# If you have a GPU, this cell measures on it. Otherwise it shows the figures recorded on an H100 and an H200. The bytes are the same on both. The meter's peak of the training step is 3,931.7 MB, and the allocator's is 0.8 MB higher. From the first step on, cuBLAS keeps 65 MiB: 32 MiB for the thread that runs forward, 32 MiB for the thread that runs backward, and 1 MiB for products with a bias. The context took 806 MB on the H200 after a few steps of training. The bytes that a layer saves in bf16 equal the formula of section 1.17 plus the LayerNorm statistics.
#
# </div>
# <div lang="zh">
#
# 有 GPU 时，这个单元格会现场测量；没有 GPU，就显示 H100 和 H200 的记录，两块卡测得的字节数完全相同。训练步的峰值，按计量器是 3,931.7 MB，按分配器还要高 0.8 MB。从第一步起，cuBLAS 一直占着 65 MiB：前向的线程 32 MiB，反向的线程 32 MiB，带偏置的乘积再加 1 MiB。训练几步以后，H200 上的 CUDA 上下文占了 806 MB。一层在 bf16 下保存的字节数，与 1.17 节的公式加上 LayerNorm 的统计量逐字节相等。
#
# </div>

# %% tags=["nbval-ignore-output", "shows-device"]
from course_lib.lessons import on_gpu

on_gpu("01")

# %% [markdown]
# ## 1.25 Play / 玩一玩
#
# <div lang="en">
#
# With dropout, a layer keeps $34 s b h + 5 a s^2 b$ bytes in bf16. Run the second cell and move its sliders: at what length do the terms in $s^2$ hold half of the bytes? (Compare with $34 h / 5 a$.)
#
# </div>
# <div lang="zh">
#
# 带 dropout、用 bf16 时，一层保存 $34 s b h + 5 a s^2 b$ 字节。运行第二个单元格，拖动滑块：序列多长时，含 $s^2$ 的项占到一半？（与 $34 h / 5 a$ 对照。）
#
# </div>

# %%
figures.draw_activation_bytes()

# %% tags=["nbval-ignore-output", "shows-picture"]
figures.activation_playground()

# %% [markdown]
# ## 1.26 One more exercise / 再做一道练习
#
# <div lang="en">
#
# **Exercise 8.** The decoder is trained with Adam and may use 1,300 MB. What is the largest batch of 128-token sequences? Two measurements determine a line, if both peaks are at the same place in the step (section 1.3). (`answer`: the number of sequences.)
#
# </div>
# <div lang="zh">
#
# **练习 8。** 这个解码器用 Adam 训练，限用 1,300 MB。批次最多能有多少条长度为 128 的序列？测两次就能定出一条直线，前提是两次的峰值在训练步的同一个地方（1.3 节）。（`answer`：序列条数。）
#
# </div>

# %% minutes=6
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
