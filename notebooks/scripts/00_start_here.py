# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] slide={"en": "The weights take 27.5 MB, but a training step needs 277.7 MB.\n\nHow much can you save, with the same gradients?", "zh": "权重 27.5 MB，一个训练步却要占 277.7 MB。\n\n梯度不变，能省下多少？"}
# # 0 Start here: how much memory can a training step save? / 从这里开始：一个训练步能省多少显存？
#
# <div lang="en">
#
# `CUDA out of memory` (OOM) usually means that at some point, the training step needed more memory than the GPU has. The small decoder on this page has eight layers and 27.5 MB of weights. The decoder's training step needs up to 277.7 MB of memory. This maximum is called the **peak**.
#
# If you wrap each layer in one function call, the peak falls, but every bit of the gradients stays the same. How far does the peak fall, and how much computation do these calls add? You guess both numbers, then measure them, with or without a GPU.
#
# </div>
# <div lang="zh">
#
# 训练时遇到 `CUDA out of memory`（显存不足，俗称爆显存、OOM），通常说明训练步在某一刻需要的显存超过了 GPU 的容量。本页的小解码器有八层，权重共 27.5 MB。它的训练步在内存占用最多的那一刻，要占 277.7 MB。这个最大值叫做**峰值**。
#
# 只要给每一层套上一个函数调用，峰值就会降低，而梯度的每个比特都不变。峰值能降到多少？要多做多少计算？请你先猜，再在自己的机器上测量，不需要 GPU。
#
# </div>

# %%
from course_lib.teaching import language

language()

# %% [markdown]
# <div lang="en">
#
# <span class="lab-only">The buttons above choose the language. If you clear the outputs, run the first code cell to bring the buttons back.</span>
#
# **In this lesson** (31 minutes): a first technique, a first exercise, and a choice of route through the lessons.
#
# **What to know before**: how to train a network with PyTorch, and what `loss.backward()` does.
#
# </div>
# <div lang="zh">
#
# <span class="lab-only">上面的三个按钮用来切换语言。清除输出以后，按钮会消失。重新运行第一个代码单元格，按钮就会回来。</span>
#
# **本课内容**（31 分钟）：试用第一种技术，做第一道练习，再选一条路线。
#
# **预备知识**：用 PyTorch 训练过网络，知道 `loss.backward()` 做什么。
#
# </div>

# %%
import copy

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from course_lib.lessons.ledger import ledger
from course_lib.lessons.lesson_00 import exercises, figures
from course_lib.memory import MemoryMeter
from course_lib.models import Decoder, random_tokens
from course_lib.teaching import table, timelines

# %% [markdown]
# ## 0.1 How much can checkpoints save? / 检查点能省多少显存？
#
# <div lang="en">
#
# We train a decoder on a batch of 8 sequences. During the forward pass, autograd keeps the tensors that the backward pass will need. These tensors, except the weights, are called **activations**.
#
# **Activation checkpointing**, also called gradient checkpointing or recomputation, keeps only the input of each layer. When backward reaches a layer, it runs the layer's forward pass again to recompute the layer's other activations. (These checkpoints are not files of model weights.) In PyTorch, you call `checkpoint` once per layer:
#
# </div>
# <div lang="zh">
#
# 我们用 8 条序列组成的批次训练一个解码器。前向传播时，autograd 会把反向传播要用到的张量保存下来。除权重以外，这些张量叫做**激活值**。
#
# **激活检查点**（activation checkpointing，又称梯度检查点、激活重计算，下文简称检查点）只保存每一层的输入。反向传播到某一层时，把这一层的前向再算一遍，就能重新得到其余的激活值。（这里的检查点不是存盘的模型权重文件。）在 PyTorch 里，每层调用一次 `checkpoint` 就行：
#
# </div>

# %% slide="code"
tokens = random_tokens(batch=8, sequence=128, vocabulary=2048)  # (8, 129): the last is a target
plain = Decoder(vocabulary=2048, hidden=256, heads=8, layers=8, sequence=128)


class Checkpointed(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)


def with_checkpoints(count):  # around the first `count` layers
    decoder = copy.deepcopy(plain)
    for i in range(count):
        decoder.layers[i] = Checkpointed(decoder.layers[i])
    return decoder


forgetful = with_checkpoints(8)

# %% [markdown] slide={"en": "**Guess first.** The baseline's peak is 277.7 MB, including 82.5 MB of weights and optimizer state.\n\nPeak with checkpoints? How many times the FLOPs?", "zh": "**先猜**：基线的峰值是 277.7 MB，其中 82.5 MB 是权重和优化器状态。\n\n用检查点，峰值是多少？FLOPs 是基线的几倍？"}
# <div lang="en">
#
# **Guess first.** The baseline, which is the step without any technique, has a peak of 277.7 MB. Weights and optimizer state take 82.5 MB of this peak, and checkpoints cannot reduce them. What will the peak be with checkpoints, in MB? Each layer's forward now runs twice. By what factor will the step's floating-point operations (FLOPs) grow? Write both guesses below, for example 200 and 2.0.
#
# </div>
# <div lang="zh">
#
# **先猜**：不用任何省显存技术的训练步叫做基线。基线的峰值是 277.7 MB，其中 82.5 MB 是权重和优化器状态，检查点无法减少这部分。用上检查点，峰值会是多少 MB？每一层现在要跑两次前向，所以训练步的浮点运算次数（FLOPs）会增加。FLOPs 会是基线的几倍？把两个猜测写进下一个单元格（例如 200 和 2.0），然后运行它。
#
# </div>

# %% tags=["guess"]
my_peak = None
my_flops = None

# %% [markdown]
# <div lang="en">
#
# Do the models with and without checkpoints compute the same gradients?
#
# </div>
# <div lang="zh">
#
# 先检查有无检查点的两个模型梯度是否一样：
#
# </div>


# %% slide="both"
def gradients(decoder):
    decoder.zero_grad()
    decoder.loss(tokens).backward()
    return [parameter.grad for parameter in decoder.parameters()]


both = zip(gradients(plain), gradients(forgetful), strict=True)
table(["gradients", "equal to the last bit"], [("all", all(torch.equal(a, b) for a, b in both))])


# %% [markdown]
# <div lang="en">
#
# The gradients are equal. After every operator, `MemoryMeter` counts the bytes of all **live** tensors, which are the tensors that are still in use. `MemoryMeter` also counts the step's FLOPs. Adam creates its state in the first step, so we measure the second step.
#
# </div>
# <div lang="zh">
#
# 梯度相等。现在来测量。每个算子运行之后，计量器 `MemoryMeter` 都会统计全部**存活**张量（还在使用的张量）占多少字节。计量器还统计整个训练步的 FLOPs。Adam 的状态在第一步里才建立，所以我们测量第二步。
#
# </div>


# %%
def metered(decoder):
    adam = torch.optim.Adam(decoder.parameters())
    for _ in range(2):
        decoder.zero_grad()
        with MemoryMeter(decoder, adam) as meter:
            decoder.loss(tokens).backward()
            adam.step()
    return meter


meters = {"plain": metered(plain), "checkpointed": metered(forgetful)}

# %% slide="result"
timelines(meters, title="Checkpoints lower the peak, because hardly any activations are kept")

# %% slide="result"
figures.peak_table(meters)

# %% [markdown]
# <div lang="en">
#
# Each position on the horizontal axis is one operator. In the upper timeline, the activations (green) grow until forward ends. The peak comes at the start of backward, before any weight has a gradient. In the lower timeline, each tooth of the curve is one layer, whose activations are recomputed, used and released.
#
# With checkpoints, the peak is near the end of backward, when 23.2 MB of gradients are in memory. Each tooth rises by about the same number of bytes, but starts higher than the tooth before it. The reason is that after each layer, memory holds the layer's gradients instead of its input, and these gradients are larger.
#
# </div>
# <div lang="zh">
#
# 时间线的横轴上，一格是一个算子。上图中，绿色的激活值一路增加，到前向结束为止。反向一开始，内存就达到峰值，这时权重都还没有梯度。下图曲线的每个锯齿对应一层，反向把这一层的激活值重新算出来，用完就释放。
#
# 用上检查点，峰值移到了反向快结束的时候，那一刻内存里已有 23.2 MB 的梯度。各个锯齿上升的幅度差不多，但越靠后的锯齿起点越高，因为反向每处理完一层，留下的梯度都比释放的这层输入大。
#
# </div>

# %%
baseline, checkpointed = meters.values()
rows = [
    ("peak (MB)", my_peak, checkpointed.peak_bytes / 1e6),
    ("FLOPs (baseline = 1)", my_flops, checkpointed.flops / baseline.flops),
]
shown = [(name, guess or "–", f"{measured:.2f}") for name, guess, measured in rows]
table(["", "your guess", "measured"], shown)

# %% [markdown]
# <div lang="en">
#
# The peak falls to 0.48 times the baseline's peak, and the FLOPs rise to 1.21 times the baseline's FLOPs. Why don't the FLOPs double? For each matrix product in forward, backward computes two matrix products: one for the gradient of the input, and one for the gradient of the weight. So a step needs about as many FLOPs as three forward passes, and the recomputation, a fourth pass, adds about a third.
#
# Here recomputation adds less than a third, for two reasons. First, the output head, which computes the logits, is not recomputed. Second, each layer's recomputation stops before the layer's last matrix product, because backward does not need the result of this product.
#
# In other models, recomputation can add a larger fraction. For example, it adds about a half if most weights are frozen, because a step with frozen weights costs only about as much as two forward passes.
#
# </div>
# <div lang="zh">
#
# 峰值降到基线的 0.48 倍，FLOPs 升到基线的 1.21 倍。FLOPs 为什么没有翻倍？前向每做一次矩阵乘法，反向就要做两次，一次求输入的梯度，一次求权重的梯度。因此基线一步的 FLOPs 约相当于三次前向。用检查点要多做一次前向，FLOPs 约增加三分之一。
#
# 在这个解码器上，重计算增加的 FLOPs 还不到三分之一，原因有两个。一是输出头（产生 logits 的最后一次矩阵乘法）不用重计算。二是反向用不到每一层最后一次矩阵乘法的结果，所以重计算在这次乘法之前就停下（提前终止）。
#
# 换成别的模型，重计算增加的 FLOPs 可能更多。例如冻结大部分权重时，一步的 FLOPs 原本只相当于约两次前向，再多做一次前向，就增加约一半。
#
# </div>

# %% [markdown]
# ## 0.2 How a lesson works, and a first exercise / 每一课怎么上，以及第一道练习
#
# <div lang="en">
#
# Every lesson has this order: **predict** a number, **build** the technique, check that the gradients are **equal**, and **measure**. We check the gradients before we measure, because a technique that changes the result is useless. From lesson 01 on, a table tests **claims** that you may have read elsewhere. The [glossary](GLOSSARY.md) explains terms and the letters in formulas.
#
# An **exercise** is a cell with a gap, often `None` or `0`. Fill in your answer and run the cell to check it. Below the cell, a click<span class="lab-only"> on the three dots</span> opens the solution.
#
# <span class="lab-only">Guess before you run each cell.</span> You learn most where your guess was wrong.
#
# </div>
# <div lang="zh">
#
# 每一课都按刚才的顺序进行。你先**预测**一个数，再把想法**实现**出来。测量之前先验证梯度**相等**，因为改变了结果的技术没有用处。最后才**测量**。从第 01 课起，每课还有一张表，逐条检验你可能在别处读到的**说法**。术语和公式里的字母，都可以在[术语表](GLOSSARY.md)里查到。
#
# **练习**是一个有空缺的单元格，空缺处常写着 `None` 或 `0`。填上你的答案，再运行这个单元格，程序就会检查答案。参考答案折叠在单元格下方，点一下<span class="lab-only">那三个点</span>就能展开。
#
# <span class="lab-only">请先猜，再逐个运行单元格。</span>猜错的地方，正是能学到东西的地方。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **Exercise 1.** With a checkpoint on the first layer alone, the peak is 257.7 MB. What is the peak, in MB, with checkpoints on the first four of the eight layers? An error of 1 MB is allowed.
#
# </div>
# <div lang="zh">
#
# **练习 1。** 只给第一层加检查点，峰值是 257.7 MB。如果给八层中的前四层都加检查点，峰值是多少 MB？与实测相差不超过 1 MB 就算对。
#
# </div>

# %% minutes=2
peak_with_four = None
exercises.check_half(peak_with_four)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
exercises.check_half(277.7 - 4 * (277.7 - 257.7))
### END SOLUTION

# %% slide="result"
first, half = metered(with_checkpoints(1)), metered(with_checkpoints(4))
steps = {"none": baseline, "the first": first, "the first four": half, "all eight": checkpointed}
figures.peak_table(steps, heading="layers with a checkpoint, MB at the peak")

# %% [markdown] slide={"en": "Four of eight checkpoints bring more than half of the reduction.\n\nThe step has two high points. The peak is the higher one.", "zh": "八层中只给四层加检查点，峰值的降幅就已过半。\n\n一步里有两个高点，峰值是其中较高的一个。"}
# <div lang="en">
#
# Four checkpoints already bring more than half of the reduction that eight checkpoints bring. The reason is that the memory of this step has two high points, and the peak is the higher one.
#
# - The first high point is at the start of backward. Each checkpoint lowers this point by 19.93 MB, so four checkpoints lower it from 277.7 MB to 197.9 MB. With four checkpoints, the first high point is the peak.
# - The second high point is near the end of backward. This point is at 134.0 MB with both four and eight checkpoints. With eight checkpoints, the second high point is the peak. So the last four checkpoints lower the peak by only 63.9 MB.
#
# Lesson 02 asks which layers should have checkpoints.
#
# </div>
# <div lang="zh">
#
# 只给四层加检查点，峰值的降幅就已超过八层都加时降幅的一半。原因是这一步的内存有两个高点，峰值是其中较高的一个。
#
# - 第一个高点在反向开始时。每个检查点让它降低 19.93 MB，所以加四个检查点，它就从 277.7 MB 降到 197.9 MB。加四个检查点时，峰值就是第一个高点。
# - 第二个高点在反向快结束时。无论加四个还是八个检查点，它都是 134.0 MB。加八个检查点时，峰值就是第二个高点，所以后加的四个检查点只让峰值再降低 63.9 MB。
#
# 检查点该加在哪些层上，第 02 课会讨论。
#
# </div>

# %% [markdown] slide={"en": "Most lessons use this step again.\n\nThe course's **ledger**: the peak of this step, one row per technique.", "zh": "多数课会再用到这个训练步。\n\n课程的**账本**：这个训练步的峰值，每种技术占一行。"}
# <div lang="en">
#
# Most lessons use this training step again, and add a row to the course's **ledger**. A row usually states the step's peak if only that lesson's technique is used. The first row is the baseline:
#
# </div>
# <div lang="zh">
#
# 多数课会再用到这个训练步，并在课程的**账本**上添一行，通常记下只用这一课的技术时，训练步的峰值是多少。第一行是基线：
#
# </div>

# %% slide="result"
ledger("00", "plain", baseline)

# %% [markdown]
# ## 0.3 Is your machine sufficient? / 你的机器够用吗？

# %% tags=["nbval-ignore-output", "shows-device"]
figures.about_this_machine()

# %% [markdown]
# <div lang="en">
#
# You don't need a GPU. The course counts bytes and FLOPs, which are the same on every CPU with the same PyTorch version. Some cells also show seconds, which depend on the machine.
#
# On a GPU, the tensors in memory differ in two ways. First, some operators keep different tensors for backward on a GPU. Second, the default Adam on a GPU creates one temporary tensor per weight tensor. All these temporary tensors exist at the same time, and together they are as large as all weights. The lessons say where these differences matter, and measure them if you have a GPU.
#
# If a cell raises an error, or your GPU is not found, see [Troubleshooting](../docs/installing.md#troubleshooting).
#
# </div>
# <div lang="zh">
#
# 没有 GPU 也能学。本课程统计字节数和 FLOPs，只要 PyTorch 版本相同，这两个数在任何 CPU 上都一样。有些单元格也给出运行时间，时间因机器而异。本课程在 CPU 上测量，所以统称“内存”，换到 GPU 上，指的就是显存。
#
# 在 GPU 上，内存里的张量有两点不同。一是有些算子为反向保存的张量，在 GPU 上与在 CPU 上不同。二是在 GPU 上，默认的 Adam 在更新时，会为每个权重张量建立一个同样大的临时张量。这些临时张量同时存在，合起来与全部权重一样大。只要这两点影响到结果，课里就会说明。如果你有 GPU，课里还会现场测量。
#
# 如果单元格报错，或者 PyTorch 找不到你的 GPU，请看[疑难解答](../docs/installing.zh.md#疑难解答)。
#
# </div>

# %% [markdown]
# ## 0.4 Which route / 选哪条路线

# %% slide="result"
figures.course_map()

# %% [markdown]
# <div lang="en">
#
# | You have | Take |
# |---|---|
# | an hour | this page, then sections 1.1 to 1.3 of lesson 01 |
# | a day | lessons 01 and 02, then 05 and 06 |
# | one topic | this page, lesson 01, then 02 for activation (gradient) checkpointing, 04 for offload, 05 for gradient accumulation, 06 for FlashAttention, or 08 for sharding (ZeRO, FSDP) |
# | more time | 00 to 09 in order, with the exercises |
# | a model that must fit today | the command below, then the [project](10_your_model.ipynb); if you have an error message, [CUDA out of memory: what now?](../docs/out_of_memory.md) |
#
# This command checks whether a graphics card with 24 GiB (25.8 GB) can train a decoder with 3B parameters on 4 samples of 2048 tokens. Type it in the course's folder:
#
# ```
# .venv/bin/python -m course_lib.budget --parameters 3B --sequence 2048 --batch 4 \
#   --device "RTX 4090" --quick
# ```
#
# The command needs no GPU. It adds one technique after another until the training step fits into the card's memory:
#
# | step | peak (MB) | × FLOPs | GB moved |
# |---|---:|---:|---:|
# | bf16, adam | 65,336.0 | 1.00 | 0.000 |
# | + 4 micro-batches | 54,459.5 | 1.00 | 0.000 |
# | + optimizer offloaded | 17,859.0 | 1.00 | 12.200 |
#
# With `--config config.json`, the command reads a Hugging Face model's configuration file. The [project](10_your_model.ipynb) shows how to estimate the peak of a model that you wrote yourself.
#
# </div>
# <div lang="zh">
#
# | 你有 | 路线 |
# |---|---|
# | 一小时 | 本页，然后是第 01 课的 1.1 到 1.3 节 |
# | 一天 | 第 01、02 课，然后是第 05、06 课 |
# | 一种想弄懂的技术 | 本页、第 01 课，然后是它所在的那一课：激活检查点（梯度检查点）在 02，卸载在 04，梯度累积在 05，FlashAttention 在 06，分片（ZeRO、FSDP）在 08 |
# | 更多时间 | 从 00 到 09 依次学完，并做练习 |
# | 一个今天就得装进显存的模型 | 先运行下面的命令，再做[项目](10_your_model.ipynb)。如果眼前有报错信息，请看[显存不足怎么办](../docs/out_of_memory.zh.md) |
#
# 在课程目录里输入下面的命令，就能知道一个 3B 参数的解码器能不能在 24 GiB（25.8 GB）的卡上训练。批次有 4 个样本，每个样本 2048 个 token。
#
# ```
# COURSE_LANG=zh .venv/bin/python -m course_lib.budget --parameters 3B --sequence 2048 --batch 4 \
#   --device "RTX 4090" --quick
# ```
#
# 这条命令不需要 GPU。它逐一加上各种技术，直到显存装得下训练步为止：
#
# | 训练步 | 峰值（MB） | FLOPs（基线的倍数） | 搬运（GB） |
# |---|---:|---:|---:|
# | bf16、adam | 65,336.0 | 1.00 | 0.000 |
# | + 4 个微批次 | 54,459.5 | 1.00 | 0.000 |
# | + 优化器卸载 | 17,859.0 | 1.00 | 12.200 |
#
# 加上 `--config config.json`，这条命令就改为读取 Hugging Face 模型的配置文件。如果模型是你自己写的，[项目](10_your_model.ipynb)会教你怎样对它做同样的估计。
#
# </div>

# %% [markdown] slide={"en": "277.7 MB → 134.0 MB, with equal gradients, for 1.21 times the FLOPs.\n\nNext: what were those bytes for?", "zh": "277.7 MB → 134.0 MB，梯度相等，FLOPs 是 1.21 倍。\n\n下一课：这些字节原本用在哪里？"}
# ## 0.5 Next / 下一步
#
# <div lang="en">
#
# In [lesson 01](01_memory_bottleneck.ipynb), you learn what the bytes of a training step are for, and how to predict them.
#
# **Source:** Chen et al. 2016, *Training Deep Nets with Sublinear Memory Cost*, arXiv:1604.06174.
#
# </div>
# <div lang="zh">
#
# 在[第 01 课](01_memory_bottleneck.ipynb)里，你会弄清训练步的字节都用在哪里，并学会预测字节数。
#
# **出处**：Chen et al. 2016，*Training Deep Nets with Sublinear Memory Cost*，arXiv:1604.06174。
#
# </div>
