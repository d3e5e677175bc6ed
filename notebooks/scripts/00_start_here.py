# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] slide={"en": "27.5 MB of weights; a training step holds 277.7 MB.\n\nHow much of it can go, with the same gradients?", "zh": "权重 27.5 MB，一个训练步却要占 277.7 MB。\n\n梯度不变，能省下多少？"}
# # 0 Start here / 从这里开始
#
# <div lang="en">
#
# Here is a small decoder: eight layers, 27.5 MB of weights. One training step of it holds 277.7 MB at its worst moment. On a GPU that is too small, that moment ends in `CUDA out of memory`.
#
# Wrap each layer in one function call, and the gradients stay the same, to the last bit. How much of the 277.7 MB can go, and what does it cost? You will guess, and see, before this page ends, on your own machine, with or without a GPU.
#
# </div>
# <div lang="zh">
#
# 这里有一个小解码器：八层，权重共 27.5 MB。它的一个训练步，最吃紧的时刻要占 277.7 MB。GPU 的显存不够时，训练就会在这一刻以 `CUDA out of memory`（显存不足，俗称爆显存、OOM）告终。
#
# 给每一层套上一个函数调用，梯度逐比特不变。277.7 MB 里能省下多少？代价又是什么？你先猜；读完这一页，就能在自己的机器上看到答案，有没有 GPU 都行。
#
# </div>

# %%
from course_lib.teaching import language

language()

# %% [markdown]
# <div lang="en">
#
# The three buttons above choose the language of every page of text and every table; they work without running anything. So do the figures: each comes in both.
#
# **In this lesson** (25 minutes): what is on your machine, how a lesson works, one minute of memory, and which route to take.
#
# **What to know before**: you have trained a network with PyTorch, and you know what `loss.backward()` does.
#
# </div>
# <div lang="zh">
#
# 上面的三个按钮用来切换全部正文和表格的语言，不运行代码也能用。图也随之切换：每张图都有中英文两个版本。
#
# **本课内容**（25 分钟）：看看你的机器，了解每一课怎么上，花一分钟看看内存，再选一条路线。
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
# A missing GPU is no obstacle. This course counts two things that are the same on every CPU with this version of PyTorch: the bytes of **live** tensors, those that are still in use, and the floating-point operations (FLOPs). Seconds are shown here and there. They belong to the machine that ran the cell, and no lesson draws a conclusion from them. A GPU differs in places: some of its operators keep other tensors for backward, and its default Adam makes one more temporary, as large as all the weights. The lessons say where, and show it live if you have one.
#
# </div>
# <div lang="zh">
#
# 没有 GPU 不碍事。本课程统计两个量：**存活**张量（还在使用、没有释放的张量）的字节数，以及浮点运算次数（FLOPs）。只要 PyTorch 版本相同，它们在任何 CPU 上都一样。运行时间偶尔也会给出，它只说明运行那个单元格的机器，各课都不据此下结论。本课程在 CPU 上测量，所以统称“内存”；换到 GPU 上，指的就是显存。GPU 上有些地方不同：有些算子为反向保存的张量不一样，默认的 Adam 还要多用一份与全部权重一样大的临时张量。遇到这种地方，课里会说明；如果你有 GPU，还会现场测给你看。
#
# </div>

# %% [markdown]
# ## 0.2 How a lesson works / 每一课怎么上
#
# <div lang="en">
#
# Each lesson asks one question and answers it in the same order. First you **predict** a number. Then you **build** the idea in a few lines. Then the gradients are shown to be **equal**, because a saving that changes the result is no saving. Only then do we **measure**, with the prediction beside it. A table of **claims** puts what you may have read elsewhere to the test.
#
# An **exercise** is a cell with `None` or `0` in it. Put your answer there and run the cell: the check below says what is wrong with it. The solution is folded under it: click on the three dots.
#
# The notebooks are stored with their results. To guess honestly, choose *Edit → Clear Outputs of All Cells* first, then run cell by cell. A wrong guess is where the lesson happens.
#
# </div>
# <div lang="zh">
#
# 每一课只问一个问题，都按同样的顺序回答。先**预测**一个数；再用几行代码把想法**实现**出来；然后验证梯度**相等**，因为改变了结果的节省不算节省；之后才**测量**，并把预测摆在旁边。临近结尾有一张表，逐条检验你可能在别处读到的**说法**。
#
# **练习**就是一个写着 `None` 或 `0` 的单元格：填上你的答案再运行，下面的检查会告诉你错在哪里。答案折叠在它下方，点那三个点就能展开。
#
# notebook 里存着运行结果。想真正自己猜，请先用菜单 *Edit → Clear Outputs of All Cells* 清掉结果，再逐个运行单元格。猜错的地方，正是能学到东西的地方。
#
# </div>

# %% slide="result"
course_map()

# %% [markdown]
# ## 0.3 One minute of memory / 一分钟看内存
#
# <div lang="en">
#
# A decoder, its optimizer, and a batch of 8 sequences. While the forward pass runs, autograd keeps the tensors that the backward pass will need: they are called **activations**. **Activation checkpointing** (also called gradient checkpointing or recomputation; not the weights that are saved to disk) keeps only what enters each layer, and computes the rest again when backward gets there.
#
# </div>
# <div lang="zh">
#
# 一个解码器、它的优化器，以及 8 条序列组成的批次。前向传播时，autograd 会把反向传播要用到的张量保存下来，它们叫做**激活值**。**激活检查点**（activation checkpointing，又称梯度检查点、激活重计算；不是指存盘的模型权重；下文简称检查点）只保存每一层的输入，等反向走到这一层时，再把其余的重新算出来。
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

# %% [markdown] slide={"en": "**Guess first.** Plain: 277.7 MB, of which 82.5 MB are weights and state.\n\nHow high is the peak with checkpoints? How much more work?", "zh": "**先猜**：基线 277.7 MB，其中 82.5 MB 是权重和优化器状态。\n\n用检查点，峰值是多少？计算量增加多少？"}
# <div lang="en">
#
# **Guess first.** Plain, one step peaks at 277.7 MB. Of these, 82.5 MB are weights and optimizer state, which no checkpoint can touch. What will the checkpointed step peak at, in MB? And how many times the work of plain will it be, if every layer runs forward twice? (Such as 200 and 2.0.)
#
# </div>
# <div lang="zh">
#
# **先猜**：基线（不用任何技术的一步）的峰值是 277.7 MB，其中 82.5 MB 是权重和优化器状态，检查点动不了它们。用检查点的一步，峰值会是多少 MB？每一层都要多跑一次前向，计算量会是基线的几倍？（例如 200 和 2.0。）
#
# </div>

# %%
my_peak = None
my_flops = None

# %% [markdown]
# <div lang="en">
#
# Before any claim of saving: do both compute the same gradients?
#
# </div>
# <div lang="zh">
#
# 谈节省之前先问：两者算出的梯度一样吗？
#
# </div>


# %% slide="both"
def gradients(decoder):
    decoder.zero_grad()
    decoder.loss(tokens).backward()
    return [parameter.grad for parameter in decoder.parameters()]


all(torch.equal(a, b) for a, b in zip(gradients(plain), gradients(forgetful), strict=True))


# %% [markdown]
# <div lang="en">
#
# Equal, bit by bit. Now the meter: it counts the bytes of all live tensors after every operator. The first step makes the optimizer's state, so the second one is metered.
#
# </div>
# <div lang="zh">
#
# 逐比特相等。现在用计量器：它在每个算子之后数出全部存活张量的字节。优化器状态在第一步里才建立，所以计量的是第二步。
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
title = "Checkpoints lower the peak by {saved}: fewer activations, a second forward pass"
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
# Read it from left to right, one operator at a time. Above, the green of the activations climbs until the forward pass ends, and melts away as backward uses them up. Below, there is hardly any green: in backward each layer's activations rise once more, are used, and go, one layer at a time. Those teeth are the recomputation. The peak has moved to the right, and that is why there are 23.2 MB of gradients at it: the teeth are alike, but each stands on the gradients that have come so far, which grow faster than the kept inputs go. So one of the last is the highest.
#
# The meter gives bytes. `measure` runs the same step once more and counts its FLOPs, too.
#
# </div>
# <div lang="zh">
#
# 从左往右看，一次看一个算子。上图中，代表激活值的绿色一路爬升，到前向结束为止，随后被反向逐渐用完而消退。下图几乎没有绿色：反向时，激活值一层接一层地重新升起，用完便消失。那些锯齿就是重计算。峰值移到了右边，所以那一刻已有 23.2 MB 的梯度：各个齿一样高，却都立在已经求出的梯度之上，而梯度增加得比保存的输入减少得快，于是最后几个齿里有一个最高。
#
# 计量器给出的是字节。`measure` 把同样的一步再跑一遍，连 FLOPs 也一起数。
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
    ("FLOPs, of plain", my_flops, after.flops / before.flops),
]
shown = [(name, guess or "–", f"{measured:.2f}") for name, guess, measured in rows]
table(["", "your guess", "measured"], shown)

# %% [markdown]
# <div lang="en">
#
# The peak falls to 0.48 of what it was, and the FLOPs rise to 1.21. Not a doubling: for each product in forward, backward makes two, one for the gradient of the input and one for the gradient of the weight. A step is about three forwards, so one more adds about a third, as long as all weights are trained. It adds a little more where the first layer's input needs no gradient, because that layer then has only one product in backward. It adds up to about a half where most weights are frozen, because a step is then nearer to two forwards.
#
# Here it is less than a third, because the head (the last product, which makes the logits) is not recomputed, and because recomputation stops as soon as the last tensor to be saved is there, which spares each layer its last product.
#
# </div>
# <div lang="zh">
#
# 峰值降到原来的 0.48 倍，FLOPs 升到 1.21 倍。并没有翻倍：前向里的每次矩阵乘法，反向要做两次，一次求输入的梯度，一次求权重的梯度。一步约相当于三次前向，所以只要全部权重都参与训练，多一次前向约增加三分之一。如果第一层的输入不需要梯度，这一层的反向只有一次乘法，增加的就略多一些。如果大部分权重被冻结，一步更接近两次前向，增加的最多约为一半。
#
# 这里还不到三分之一，因为输出头（产生 logits 的最后一次矩阵乘法）不用重计算，而且重计算一算出最后一个要保存的张量就停下（提前停），每一层都省去了最后一次矩阵乘法。
#
# </div>

# %% [markdown] slide={"en": "This step comes back in every lesson.\n\nThe course's **ledger**: the same step, one technique a row.", "zh": "这一步，每一课都会再用到。\n\n课程的**账本**：同样的一步，一种技术一行。"}
# <div lang="en">
#
# This step, with this decoder, comes back in every lesson. Each ends with one row in the course's **ledger**: the same step with that lesson's technique alone. Here is the first row. Lesson 01 finds out where its bytes are; lesson 02 takes the trick apart.
#
# </div>
# <div lang="zh">
#
# 这个解码器的这一步，每一课都会再用到。每课的最后都在课程的**账本**上添一行：同样的一步，只用这一课的技术。下面是第一行。第 01 课弄清这些字节在哪里，第 02 课把检查点拆开来看。
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
# | a model that does not fit, today | [CUDA out of memory: what now?](../docs/out_of_memory.md), then the command `python -m course_lib.budget`; for a model in your own code, adapt `examples/your_model.py` in the course's folder; after that “In your own code” in lesson 02, and `fit` in lesson 07 |
#
# If you teach: after 01 most lessons stand alone. But 03 builds on 02, 04 and 06 use one section of it each, and 07 needs all the others.
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
# | 一个眼下就要训练、却装不下的模型 | 先看[显存不足怎么办](../docs/out_of_memory.zh.md)，再运行 `python -m course_lib.budget`；如果模型是自己写的，就仿照课程目录里的 `examples/your_model.py`，换成你的模型；接着看第 02 课的“实际怎么写”，最后用第 07 课的 `fit` |
#
# 如果你是教师：学过第 01 课之后，各课大多可以单独讲；不过 03 要以 02 为基础，04 和 06 各用到 02 中的一节，07 则需要前面全部各课。
#
# </div>

# %% [markdown]
# ## 0.5 Troubleshooting / 疑难解答
#
# <div lang="en">
#
# - **`NameError`.** A cell above has not run: choose *Run → Run All Above Selected Cell*.
# - **No GPU.** Nothing to do. Cells about GPUs say so and show recorded figures where there are any.
# - **Little memory.** Every lesson stays under 4 GB. Close other notebooks: each one runs a Python of its own.
# - **A GPU that torch does not see.** `torch.version.cuda` is `None` in a CPU build: install the build for your driver, as the selector on the PyTorch site tells, then `make lab` again.
# - **Both languages at once, and no buttons.** The notebook is not trusted. `make lab` trusts the course's notebooks; elsewhere, choose "Trust Notebook" in the command palette.
# - **Empty boxes in a figure.** The course ships its font, so this should not happen: run `make test`, it looks for them.
#
# </div>
# <div lang="zh">
#
# - **出现 `NameError`。** 上面有单元格还没有运行：选菜单 *Run → Run All Above Selected Cell*。
# - **没有 GPU。** 什么都不用做。涉及 GPU 的单元格会说明，有预先记录的数据就显示出来。
# - **内存小。** 每一课都不超过 4 GB。请关掉其他 notebook：每开一个，就多运行一个 Python。
# - **torch 看不到 GPU。** CPU 版 torch 的 `torch.version.cuda` 是 `None`：请按 PyTorch 网站上的选择器给出的命令，装上与驱动匹配的版本，再运行一次 `make lab`。
# - **两种语言同时出现，按钮也没有。** 说明这个 notebook 未被信任。`make lab` 会信任本课程的 notebook；在别处，请在命令面板里选 “Trust Notebook”。
# - **图里有空方框。** 课程自带字体，不应出现这种情况：请运行 `make test`，它会检查。
#
# </div>

# %% [markdown]
# ## 0.6 The letters / 符号表
#
# <div lang="en">
#
# You need none of these letters yet; the lessons send you back here. Most of them mean one thing in the whole course. Where a lesson uses a letter in another sense, the table says in which lesson:
#
# | letter | means | in lesson |
# |---|---|---|
# | $b$, $s$ | sequences in a batch, tokens in a sequence | from 01 on |
# | $h$, $a$, $d$ | hidden size, heads, size of a head: $d = h / a$ | from 01 on |
# | $v$, $L$ | words in the vocabulary, layers (or stages of a chain) | from 01 on |
# | Q, K, V, S, P, O | queries, keys, values, scores, probabilities, output of attention | from 01 on |
# | $k$ | layers with a checkpoint (02); segments (03) | 02, 03 |
# | $A$, $B$ | bytes that a stage keeps, bytes at a boundary (03); $B$: bytes of one storage (04) | 03, 04 |
# | $R$ | bytes of room | 03 |
# | $f$, $g$ | time of a layer's forward, of its backward (03, 04); $f$: FLOPs of the work beside a copy (08) | 03, 04, 08 |
# | $c$ | slots (03); seconds of a copy (04); ranks that share a sequence (08) | 03, 04, 08 |
# | $p$ | storages that are fetched ahead (04); one probability (06); ranks that share the layers (08) | 04, 06, 08 |
# | $e$ | the stage that a schedule runs on to (03); ranks that share the experts (08) | 03, 08 |
# | $r$ | runs ahead of one stage (03); the number of a rank, and FLOP/s (08) | 03, 08 |
# | $t$ | seconds of making a batch and of using it (04); ranks that share a matrix (08) | 04, 08 |
# | $m$ | sequences in a micro-batch (05); largest score so far (06); bytes of a copy (08) | 05, 06, 08 |
# | $\ell$ | layers in a segment (03); sum of exponentials so far (06) | 03, 06 |
# | $M$ | numbers that fit on the chip | 06 |
# | $N$ | tokens in a sequence (06); ranks (08) | 06, 08 |
# | $\Psi$, $w$ | parameters; bytes per second of a link | 08 |
#
# </div>
# <div lang="zh">
#
# 这些字母现在还用不到，各课会请你回来查。大多数字母在整门课里只有一个意思。有的课另有用法，表中注明了是哪一课：
#
# | 字母 | 意思 | 所在的课 |
# |---|---|---|
# | $b$、$s$ | 批次里的序列数、序列里的 token 数 | 01 起 |
# | $h$、$a$、$d$ | 隐藏维度、头数、头维度：$d = h / a$ | 01 起 |
# | $v$、$L$ | 词表大小、层数（或链的级数） | 01 起 |
# | Q、K、V、S、P、O | 注意力的查询、键、值、分数、概率、输出 | 01 起 |
# | $k$ | 加了检查点的层数（02），段数（03） | 02、03 |
# | $A$、$B$ | 一级保存的字节、边界上的字节（03），$B$ 还指一份存储区的字节（04） | 03、04 |
# | $R$ | 可用的字节 | 03 |
# | $f$、$g$ | 一层前向、反向的时间（03、04），$f$ 还指与拷贝同时进行的计算的 FLOPs（08） | 03、04、08 |
# | $c$ | 槽数（03），一次拷贝的秒数（04），分担一条序列的进程数（08） | 03、04、08 |
# | $p$ | 提前取回几份存储区（04），一个概率（06），分担各层的进程数（08） | 04、06、08 |
# | $e$ | 调度往前跑到的级（03），分担各专家的进程数（08） | 03、08 |
# | $r$ | 一级空跑的次数（03），进程的编号和每秒 FLOPs（08） | 03、08 |
# | $t$ | 准备一个批次和使用它的秒数（04），分担一个矩阵的进程数（08） | 04、08 |
# | $m$ | 每个微批次的序列数（05），目前最大的分数（06），一次拷贝的字节（08） | 05、06、08 |
# | $\ell$ | 一段的层数（03），目前指数的和（06） | 03、06 |
# | $M$ | 片上存储能放下的元素个数 | 06 |
# | $N$ | 序列里的 token 数（06），进程数（08） | 06、08 |
# | $\Psi$、$w$ | 参数个数，链路每秒的字节 | 08 |
#
# </div>

# %% [markdown] slide={"en": "277.7 MB → 134.0 MB, with equal gradients, for 1.21 times the FLOPs.\n\nNext: where were those bytes?", "zh": "277.7 MB → 134.0 MB，梯度相等，FLOPs 是 1.21 倍。\n\n下一课：这些字节原本在哪里？"}
# ## 0.7 Next / 下一步
#
# <div lang="en">
#
# You have seen 277.7 MB become 134.0 MB, with equal gradients, for 1.21 times the FLOPs. Next: [lesson 01](01_memory_bottleneck.ipynb) asks where the bytes of a training step go, and learns to predict them before they are spent.
#
# **Source** of the technique: Chen et al. 2016, *Training Deep Nets with Sublinear Memory Cost*, arXiv:1604.06174.
#
# </div>
# <div lang="zh">
#
# 你看到了 277.7 MB 变成 134.0 MB，梯度相等，代价是 1.21 倍的 FLOPs。接下来，[第 01 课](01_memory_bottleneck.ipynb)追问训练步的字节去了哪里，并教你在运行之前就把它们预测出来。
#
# 这一技术的**出处**：Chen et al. 2016，*Training Deep Nets with Sublinear Memory Cost*，arXiv:1604.06174。
#
# </div>
