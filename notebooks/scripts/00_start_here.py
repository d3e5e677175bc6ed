# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] slide={"en": "27.5 MB of weights; a training step holds 277.7 MB.\n\nHow much of it can go, with the same gradients?", "zh": "权重 27.5 MB，一个训练步却要占 277.7 MB。\n\n梯度不变，能省下多少？"}
# # 0 Start here: how much memory can a training step save? / 从这里开始：一个训练步能省多少显存？
#
# <div lang="en">
#
# If your training ends in `CUDA out of memory` (OOM), one moment of the training step needed more memory than the GPU has. The small decoder on this page has eight layers and 27.5 MB of weights. At that moment, its training step needs 277.7 MB.
#
# If you wrap each of its layers in one function call, the gradients stay the same, to the last bit, and the worst moment takes less memory. How much less, and at what price? First you guess. Then you measure it on this page, on your own machine, with or without a GPU.
#
# </div>
# <div lang="zh">
#
# 训练时遇到 `CUDA out of memory`（显存不足，俗称爆显存、OOM），说明训练步在某一刻需要的显存超过了 GPU 的容量。本页的小解码器有八层，权重共 27.5 MB，它的训练步在最吃紧的那一刻要占 277.7 MB。
#
# 只要给它的每一层套上一个函数调用，最吃紧的那一刻占的内存就会变少，梯度却逐比特不变。能少多少？代价又是什么？你先猜，然后就在这一页、在自己的机器上测出来，有没有 GPU 都行。
#
# </div>

# %%
from course_lib.teaching import language

language()

# %% [markdown]
# <div lang="en">
#
# <span class="lab-only">The three buttons above choose the language of the text, the tables and the figures. They work without running anything. Clearing the outputs also removes the buttons, and running the first code cell brings them back.</span>
#
# **In this lesson** (30 minutes): a look at your machine, how a lesson works, a first technique that saves memory, and which route to take.
#
# **What to know before**: you have trained a network with PyTorch, and you know what `loss.backward()` does.
#
# </div>
# <div lang="zh">
#
# <span class="lab-only">上面的三个按钮用来切换正文、表格和图的语言，不运行代码也能用。清除输出时，这三个按钮也会消失，重新运行第一个代码单元格就会出现。</span>
#
# **本课内容**（30 分钟）：看看你的机器，了解每一课怎么上，试用第一种省内存的技术，再选一条路线。
#
# **预备知识**：用 PyTorch 训练过网络，知道 `loss.backward()` 做什么。
#
# </div>

# %%
import copy

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from course_lib.lessons.lesson_00 import about_this_machine, course_map
from course_lib.memory import MemoryMeter, measure
from course_lib.models import Decoder, random_tokens
from course_lib.teaching import category_label, table, text, timelines

# %% [markdown]
# ## 0.1 What is on this machine / 这台机器上有什么

# %% tags=["nbval-ignore-output", "shows-device"]
about_this_machine()

# %% [markdown]
# <div lang="en">
#
# You don't need a GPU. This course counts two quantities: the bytes of **live** tensors (tensors that are still in use), and the floating-point operations (FLOPs). With the same version of PyTorch, both are the same on every CPU. Some cells also show seconds, which depend on the machine that ran the cell.
#
# A GPU differs in two ways. Some of its operators keep other tensors for backward, and its default Adam makes one temporary tensor per weight, all at once, which together are as large as the weights. The lessons say where this matters, and measure it on your GPU if you have one.
#
# </div>
# <div lang="zh">
#
# 没有 GPU 也能学。本课程统计两个量：**存活**张量（还在使用、没有释放的张量）的字节数，以及浮点运算次数（FLOPs）。只要 PyTorch 版本相同，它们在任何 CPU 上都一样。有些单元格也给出运行时间，那只说明运行它的那台机器。本课程在 CPU 上测量，所以统称“内存”，换到 GPU 上，指的就是显存。
#
# GPU 有两点不同。有些算子在 GPU 上为反向保存的张量与 CPU 上不同。另外，默认的 Adam 更新时，会给每个权重同时各建一个临时张量，合起来与全部权重一样大。遇到有影响的地方，课里会说明。如果你有 GPU，还会现场测给你看。
#
# </div>

# %% [markdown]
# ## 0.2 How a lesson works / 每一课怎么上
#
# <div lang="en">
#
# Each lesson asks one question and answers it in the same order. First you **predict** a number. Then you **build** the idea in a few lines. Then we check that the gradients are **equal**, because a technique that changes the result saves nothing. Only then do we **measure**, and compare with your prediction. Near the end, a table tests **claims** that you may have read elsewhere.
#
# An **exercise** is a cell in which something is missing, often written as `None` or `0`. Fill it in and run the cell. Its last line checks the answer. The solution is folded below it, and opens on a click<span class="lab-only"> on the three dots</span>.
#
# <span class="lab-only">The lessons that `make lab` opens have no results yet, so that you can guess first. Run the cells one by one.</span> You learn most where your guess was wrong.
#
# </div>
# <div lang="zh">
#
# 每一课只问一个问题，都按同样的顺序回答。先**预测**一个数，再用几行代码把想法**实现**出来，然后验证梯度**相等**，因为改变了结果的节省不算节省。之后才**测量**，看看与你的预测差多少。临近结尾有一张表，逐条检验你可能在别处读到的**说法**。
#
# **练习**就是一个有空缺的单元格，例如写着 `None` 或 `0` 的地方。填上你的答案再运行，最后一行会检查答案。答案折叠在它下方，点一下<span class="lab-only">那三个点</span>就能展开。
#
# <span class="lab-only">`make lab` 打开的各课还没有运行结果，你可以先猜，再逐个运行单元格。</span>猜错的地方，正是能学到东西的地方。
#
# </div>

# %% slide="result"
course_map()

# %% [markdown]
# ## 0.3 How much can checkpoints save? / 检查点能省多少显存？
#
# <div lang="en">
#
# We train a decoder on a batch of 8 sequences. During the forward pass, autograd keeps the tensors that the backward pass will need. These tensors are called **activations**.
#
# **Activation checkpointing**, also called gradient checkpointing or recomputation, keeps only the input of each layer. When backward reaches a layer, it runs the layer's forward pass again to get the other activations back. (It has nothing to do with the checkpoint files that store a model's weights.) In PyTorch it is one call of `checkpoint` per layer:
#
# </div>
# <div lang="zh">
#
# 我们用 8 条序列组成的批次训练一个解码器。前向传播时，autograd 会把反向传播要用到的张量保存下来，这些张量叫做**激活值**。
#
# **激活检查点**（activation checkpointing，又称梯度检查点、激活重计算，下文简称检查点）只保存每一层的输入。反向传播到某一层时，把这一层的前向再算一遍，就能重新得到其余的激活值。（它与存盘的模型权重文件无关，只是同名。）在 PyTorch 里，每层调用一次 `checkpoint` 就行：
#
# </div>

# %% slide="code"
tokens = random_tokens(batch=8, sequence=128, vocabulary=2048)  # (8, 129), the last a target only
plain = Decoder(vocabulary=2048, hidden=256, heads=8, layers=8, sequence=128)


class Checkpointed(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)


forgetful = copy.deepcopy(plain)
forgetful.layers = nn.ModuleList(Checkpointed(layer) for layer in forgetful.layers)

# %% [markdown] slide={"en": "**Guess first.** The baseline peaks at 277.7 MB, 82.5 MB of it weights and optimizer state.\n\nPeak with checkpoints? How many times the FLOPs?", "zh": "**先猜**：基线的峰值是 277.7 MB，其中 82.5 MB 是权重和优化器状态。\n\n用检查点，峰值是多少？FLOPs 是基线的几倍？"}
# <div lang="en">
#
# **Guess first.** The baseline, which is the step without any technique, has a peak of 277.7 MB. Of these, 82.5 MB are weights and optimizer state, and checkpoints cannot reduce these. What will the peak be with checkpoints, in MB? Each layer now runs its forward pass twice: by what factor will the FLOPs of the step grow? (You could write 200 and 2.0, for example.)
#
# </div>
# <div lang="zh">
#
# **先猜**：基线是指不用任何技术的训练步，它的峰值是 277.7 MB，其中 82.5 MB 是权重和优化器状态，检查点无法减少这部分。用上检查点，峰值会是多少 MB？每一层现在要跑两次前向，那么一步的 FLOPs 会是基线的几倍？（例如可以写 200 和 2.0。）
#
# </div>

# %% tags=["guess"]
my_peak = None
my_flops = None

# %% [markdown]
# <div lang="en">
#
# Before we measure any saving, we check that both models compute the same gradients:
#
# </div>
# <div lang="zh">
#
# 测量省了多少之前，先检查两个模型算出的梯度是否一样：
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
# They are equal, bit for bit. Now we measure. `MemoryMeter` counts the bytes of all live tensors after every operator. Adam creates its state in the first step, so we look at the second one.
#
# </div>
# <div lang="zh">
#
# 两者逐比特相等。现在来测量。`MemoryMeter` 在每个算子之后统计全部存活张量的字节。Adam 的状态在第一步里才建立，所以我们看的是第二步。
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
saved = 1 - meters["checkpointed"].peak_bytes / meters["plain"].peak_bytes
title = "Checkpoints lower the peak by {saved}, because hardly any activations are kept"
timelines(meters, title=text(title, saved=f"{saved:.0%}"))

# %% slide="result"
rows = []
for kind in ("parameter", "gradient", "optimizer", "activation", "temporary"):
    there = [meter.at_peak()[kind] / 1e6 for meter in meters.values()]
    rows.append((category_label(kind), *(round(size, 1) for size in there)))
table(["at the peak (MB)", *meters], rows)

# %% [markdown]
# <div lang="en">
#
# Each position on the horizontal axis is one operator. In the upper timeline, the activations (green) grow until the forward pass ends, and shrink while backward uses them up. In the lower one, hardly any activations are kept. Backward computes the activations of one layer again, uses them and releases them, then it does the same for the next layer. Each tooth of the lower timeline is the recomputation of one layer.
#
# With checkpoints, the peak is near the end of backward, and at that moment 23.2 MB of gradients are in memory. All teeth have about the same height, but the later ones start from a higher level. For each layer, backward adds the gradients and releases the kept input, and the gradients are larger. So one of the last teeth is the highest.
#
# The meter counts bytes. `measure` runs the same step and counts its FLOPs as well.
#
# </div>
# <div lang="zh">
#
# 时间线的横轴上，一格是一个算子。上图中，绿色的激活值一路增加，到前向结束为止，然后被反向逐渐用完。下图几乎不保存激活值。反向时，先把一层的激活值重新算出来，用完就释放，再轮到下一层。下面那条时间线的每个锯齿，就是一层的重计算。
#
# 用上检查点，峰值移到了反向快结束的时候，那一刻内存里已有 23.2 MB 的梯度。各个锯齿差不多一样高，但越靠后的起点越高，因为每过一层，增加的梯度都比释放的输入大。所以最高的是最后几个锯齿之一。
#
# 计量器统计的是字节。`measure` 把同样的一步再跑一遍，同时统计 FLOPs。
#
# </div>


# %%
def step_of(decoder):
    adam = torch.optim.Adam(decoder.parameters())

    def step():
        decoder.loss(tokens).backward()
        adam.step()

    return measure(step, model=decoder, optimizer=adam, repeats=0)  # bytes and FLOPs, no seconds


before, after = step_of(plain), step_of(forgetful)
rows = [
    ("peak (MB)", my_peak, after.peak_bytes / 1e6),
    ("FLOPs (baseline = 1)", my_flops, after.flops / before.flops),
]
shown = [(name, guess or "–", f"{measured:.2f}") for name, guess, measured in rows]
table(["", "your guess", "measured"], shown)

# %% [markdown]
# <div lang="en">
#
# The peak falls to 0.48 times the baseline's, and the FLOPs rise to 1.21 times. Why don't they double? For each matrix product in forward, backward computes two: one for the gradient of the input and one for the gradient of the weight. A step therefore costs about three forward passes, and one more adds about a third.
#
# Here it adds less than a third, for two reasons. The output head (the last product, which makes the logits) is not recomputed. And a recomputation stops once it has the last tensor that backward needs, so it skips the last product of each layer.
#
# In other models it can add more: a little above a third if the first layer's input needs no gradient, and about a half if most weights are frozen, because a step then costs only about two forward passes.
#
# </div>
# <div lang="zh">
#
# 峰值降到基线的 0.48 倍，FLOPs 升到 1.21 倍。FLOPs 为什么没有翻倍？前向的每次矩阵乘法，到了反向要做两次，一次求输入的梯度，一次求权重的梯度。因此一步约相当于三次前向，多做一次约增加三分之一。
#
# 这里增加得还不到三分之一，原因有两个。输出头（产生 logits 的最后一次矩阵乘法）不用重计算。另外，重计算只要得到反向所需的最后一个张量就停下（提前终止），所以每一层都省去了最后一次矩阵乘法。
#
# 换成别的模型，增加的可能更多。如果第一层的输入不需要梯度，增加的会比三分之一略多。如果大部分权重被冻结，一步原来只相当于大约两次前向，再多做一次前向，FLOPs 就可能增加约一半。
#
# </div>

# %% [markdown] slide={"en": "Every lesson uses this step again.\n\nThe course's **ledger**: the same step, one row per technique.", "zh": "每一课都会再用到这个训练步。\n\n课程的**账本**：同样的一步，每种技术占一行。"}
# <div lang="en">
#
# Every lesson uses this decoder and this step again. Near its end, each lesson adds one row to the course's **ledger**: the same step with only that lesson's technique. Here is the first row, the baseline. Lesson 01 finds out what these bytes are for, and in lesson 02 you write a checkpoint yourself.
#
# </div>
# <div lang="zh">
#
# 这个解码器的这个训练步，每一课都会再用到。每课临近结尾时，都在课程的**账本**上添一行，记下只用这一课的技术时，同样的一步要用多少内存。下面是第一行，也就是基线。第 01 课弄清这些字节用在哪里，第 02 课由你自己写出检查点。
#
# </div>

# %% slide="result"
from course_lib.lessons.ledger import ledger

ledger("00", "plain", before)

# %% [markdown]
# ## 0.4 Which route / 选哪条路线
#
# <div lang="en">
#
# | You have | Take |
# |---|---|
# | an hour | this page, then sections 1.1 to 1.3 of lesson 01 |
# | a day | lessons 01 and 02, then 05 and 06 |
# | one topic | this page, lesson 01, then its lesson: activation checkpointing (gradient checkpointing) is 02, offload 04, gradient accumulation 05, FlashAttention 06, sharding (ZeRO, FSDP) 08 |
# | the whole course | 00 to 09 in order, with the exercises |
# | a model that must fit today | the command below, then lesson 09; if you have an error message now, [CUDA out of memory: what now?](../docs/out_of_memory.md) |
#
# The command, typed in the course's folder, asks whether a decoder with 3B parameters can be trained on 4 samples of 2048 tokens on a card of 24 GB:
#
# ```
# .venv/bin/python -m course_lib.budget --parameters 3B --sequence 2048 --batch 4 \
#   --device "RTX 4090" --quick
# ```
#
# It needs no GPU. It prints, among other things, which techniques it adds one after the other until the step fits:
#
# | step | peak (MB) | × FLOPs | GB moved |
# |---|---:|---:|---:|
# | bf16, adam | 65,336.0 | 1.00 | 0.000 |
# | + 4 micro-batches | 54,459.5 | 1.00 | 0.000 |
# | + optimizer offloaded | 17,859.0 | 1.00 | 12.200 |
#
# With `--config config.json` it reads the configuration file of a Hugging Face model instead. Lesson 09 does the same for a model in your own code.
#
# If you teach: after lesson 01, most lessons can be taught alone. Lesson 03 builds on 02, lessons 04 and 06 each use one section of 02, and 07 needs all lessons before it.
#
# </div>
# <div lang="zh">
#
# | 你有 | 路线 |
# |---|---|
# | 一小时 | 本页，然后是第 01 课的 1.1 到 1.3 节 |
# | 一天 | 第 01、02 课，然后是第 05、06 课 |
# | 一个想弄懂的题目 | 本页、第 01 课，然后是它所在的那一课：激活检查点（梯度检查点）在 02，卸载在 04，梯度累积在 05，FlashAttention 在 06，分片（ZeRO、FSDP）在 08 |
# | 足够学完全部课程的时间 | 从 00 到 09 依次学完，并做练习 |
# | 一个今天就要装下的模型 | 先运行下面的命令，再学第 09 课。如果眼前就有报错信息，请看[显存不足怎么办](../docs/out_of_memory.zh.md) |
#
# 在课程目录里输入下面的命令，就能知道 3B 参数的解码器，用 4 条 2048 个 token 的样本，能不能在 24 GB 的卡上训练：
#
# ```
# COURSE_LANG=zh .venv/bin/python -m course_lib.budget --parameters 3B --sequence 2048 --batch 4 \
#   --device "RTX 4090" --quick
# ```
#
# 它不需要 GPU。输出里有一张表，列出它逐一加上了哪些技术，直到这一步装得下为止：
#
# | 步 | 峰值（MB） | FLOPs（基线的倍数） | 搬运（GB） |
# |---|---:|---:|---:|
# | bf16、adam | 65,336.0 | 1.00 | 0.000 |
# | + 4 个微批次 | 54,459.5 | 1.00 | 0.000 |
# | + 优化器卸载 | 17,859.0 | 1.00 | 12.200 |
#
# 加上 `--config config.json`，它就改为读取 Hugging Face 模型的配置文件。如果模型是你自己写的，第 09 课会教你对它做同样的估算。
#
# 如果你是教师：学过第 01 课之后，各课大多可以单独讲。第 03 课以 02 为基础，04 和 06 各用到 02 中的一节，07 则需要前面全部各课。
#
# </div>

# %% [markdown]
# ## 0.5 Troubleshooting / 疑难解答
#
# <div lang="en">
#
# - **`NameError`.** A cell above has not run. Run all cells above it<span class="lab-only"> (*Run → Run All Above Selected Cell*)</span>.
# - **You have no GPU.** You need not do anything. Cells about GPUs show figures that were recorded on a GPU, or say that there are none.
# - **You have little memory.** Every lesson stays under 4 GB. Close other notebooks, because each one runs its own Python process.
# - **PyTorch does not find your GPU.** If `torch.version.cuda` is `None`, you have the CPU build. Install the build for your driver, as shown on the PyTorch website, and run `make lab` again.
# - <span class="lab-only">**You see both languages and no buttons.** If you have cleared the outputs, run the first code cell. Otherwise the notebook is not trusted. `make lab` trusts the course's notebooks. Elsewhere, choose "Trust Notebook" in the command palette.</span>
# - **A figure shows empty boxes.** The course ships its own font, so this should not happen. Run `make test`, which looks for such boxes.
#
# </div>
# <div lang="zh">
#
# - **出现 `NameError`。** 说明上面有单元格还没有运行。请把上面的单元格全部运行一遍<span class="lab-only">（菜单 *Run → Run All Above Selected Cell*）</span>。
# - **没有 GPU。** 什么都不用做。涉及 GPU 的单元格会显示在 GPU 上记录好的数据，没有记录的会注明。
# - **内存小。** 每一课都不超过 4 GB。请关掉其他 notebook，因为每开一个，就多运行一个 Python 进程。
# - **PyTorch 找不到 GPU。** 如果 `torch.version.cuda` 是 `None`，装的就是 CPU 版。请按 PyTorch 网站给出的命令装上与驱动匹配的版本，再运行一次 `make lab`。
# - <span class="lab-only">**两种语言同时出现，也没有按钮。** 如果清除过输出，运行第一个代码单元格即可。否则，说明这个 notebook 未被信任。`make lab` 会信任本课程的 notebook。在别处，请在命令面板里选 “Trust Notebook”。</span>
# - **图里有空方框。** 课程自带字体，不应出现这种情况。请运行 `make test`，它会检查有没有这样的方框。
#
# </div>

# %% [markdown]
# ## 0.6 The letters / 符号表
#
# <div lang="en">
#
# You don't need these letters yet. The lessons refer to this table when they use them. Most letters have one meaning in the whole course. If a lesson uses a letter in another sense, the table names the lesson:
#
# | letter | means | in lesson |
# |---|---|---|
# | $b$, $s$ | sequences in a batch, tokens in a sequence | from 01 on |
# | $h$, $a$, $d$ | hidden size, heads, size of a head: $d = h / a$ | from 01 on |
# | $v$, $L$ | words in the vocabulary, layers (or stages of a chain) | from 01 on |
# | Q, K, V, S, P, O | queries, keys, values, scores, probabilities, output of attention | from 01 on |
# | $k$ | layers with a checkpoint (02); segments (03) | 02, 03 |
# | $A$, $B$ | bytes that a stage keeps, bytes at a boundary between stages (03); $B$: bytes of one storage (04) | 03, 04 |
# | $R$ | bytes that a schedule may use | 03 |
# | $n$ | heads of keys and values | 01 |
# | $f$, $g$ | $f$: inner width of a feed-forward network (01); time of a layer's forward pass, of its backward pass (03, 04); $f$: FLOPs that are computed during a copy (08) | 01, 03, 04, 08 |
# | $c$ | slots (03); seconds of a copy (04); ranks that share a sequence (08) | 03, 04, 08 |
# | $p$ | storages that are fetched ahead (04); one probability (06); ranks that share the layers (08) | 04, 06, 08 |
# | $e$ | the stage up to which a schedule runs next (03); ranks that share the experts (08) | 03, 08 |
# | $r$ | how often a schedule runs a stage without keeping anything (03); the number of a rank, and FLOP/s (08) | 03, 08 |
# | $t$ | seconds that it takes to make a batch, and to train on it (04); ranks that share a matrix (08) | 04, 08 |
# | $m$ | sequences in a micro-batch (05); largest score so far (06); bytes of a copy (08) | 05, 06, 08 |
# | $\ell$ | sum of exponentials so far | 06 |
# | $M$ | numbers that fit into the on-chip memory | 06 |
# | $N$ | tokens in a sequence (06); ranks (08) | 06, 08 |
# | $\Psi$, $w$ | parameters; bytes per second of a link | 08 |
#
# </div>
# <div lang="zh">
#
# 这些字母现在还用不到，各课用到时会提到这张表。大多数字母在整门课里只有一个意思。有的课另有用法，表中注明了是哪一课：
#
# | 字母 | 意思 | 所在的课 |
# |---|---|---|
# | $b$、$s$ | 批次里的序列数、序列里的 token 数 | 01 起 |
# | $h$、$a$、$d$ | 隐藏维度、头数、头维度：$d = h / a$ | 01 起 |
# | $v$、$L$ | 词表大小、层数（或链的级数） | 01 起 |
# | Q、K、V、S、P、O | 注意力的查询、键、值、分数、概率、输出 | 01 起 |
# | $k$ | 加了检查点的层数（02），段数（03） | 02、03 |
# | $A$、$B$ | 一级保存的字节、边界上的字节（03），$B$ 还指一份存储区的字节（04） | 03、04 |
# | $R$ | 调度可用的字节 | 03 |
# | $n$ | 键值头的个数 | 01 |
# | $f$、$g$ | $f$ 指前馈网络的内部宽度（01），一层前向、反向的时间（03、04），$f$ 还指与拷贝同时进行的计算的 FLOPs（08） | 01、03、04、08 |
# | $c$ | 槽数（03），一次拷贝的秒数（04），分担一条序列的进程数（08） | 03、04、08 |
# | $p$ | 提前取回几份存储区（04），一个概率（06），分担各层的进程数（08） | 04、06、08 |
# | $e$ | 调度接下来要前向算到的级（03），分担各专家的进程数（08） | 03、08 |
# | $r$ | 一级被空跑（运行而什么也不保存）的次数（03），进程的编号和每秒 FLOPs（08） | 03、08 |
# | $t$ | 准备一个批次和用它训练各需的秒数（04），分担一个矩阵的进程数（08） | 04、08 |
# | $m$ | 每个微批次的序列数（05），目前最大的分数（06），一次拷贝的字节（08） | 05、06、08 |
# | $\ell$ | 目前指数的和 | 06 |
# | $M$ | 片上存储能放下的元素个数 | 06 |
# | $N$ | 序列里的 token 数（06），进程数（08） | 06、08 |
# | $\Psi$、$w$ | 参数个数，链路每秒的字节 | 08 |
#
# </div>

# %% [markdown] slide={"en": "277.7 MB → 134.0 MB, with equal gradients, for 1.21 times the FLOPs.\n\nNext: what were those bytes for?", "zh": "277.7 MB → 134.0 MB，梯度相等，FLOPs 是 1.21 倍。\n\n下一课：这些字节原本用在哪里？"}
# ## 0.7 Next / 下一步
#
# <div lang="en">
#
# Checkpoints lowered the peak from 277.7 MB to 134.0 MB, with equal gradients, for 1.21 times the FLOPs. In [lesson 01](01_memory_bottleneck.ipynb) you find out what the bytes of a training step are for, and you learn to predict them before you run it.
#
# The **source** of this technique is Chen et al. 2016, *Training Deep Nets with Sublinear Memory Cost*, arXiv:1604.06174.
#
# </div>
# <div lang="zh">
#
# 检查点把峰值从 277.7 MB 降到 134.0 MB，梯度相等，代价是 1.21 倍的 FLOPs。在[第 01 课](01_memory_bottleneck.ipynb)里，你会弄清训练步的显存都用在哪里，并学会在运行之前就预测出来。
#
# 这一技术的**出处**：Chen et al. 2016，*Training Deep Nets with Sublinear Memory Cost*，arXiv:1604.06174。
#
# </div>
