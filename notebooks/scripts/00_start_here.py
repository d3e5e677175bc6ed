# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 0 Start here / 从这里开始
#
# <div lang="en">
#
# Here is a small decoder: eight layers, 27.5 MB of weights. One training step of it holds 277.7 MB at its worst moment. Wrap each layer in one function call, and less than half of that will do. The gradients are the same, to the last bit.
#
# Where did the other bytes go? What did it cost? You will see both before this page ends, on your own machine, with or without a GPU.
#
# </div>
# <div lang="zh">
#
# 这里有一个小解码器：八层，权重共 27.5 MB。它的一个训练步，最吃紧的时刻要占 277.7 MB。把每一层都包进一个函数调用，同样的一步用不到一半，而梯度逐位相同。
#
# 少掉的字节去了哪里？又付出了什么代价？不等读完这一页，你就会在自己的机器上看到这两个答案，有没有 GPU 都行。
#
# </div>

# %%
from course_lib.teaching import language

language()

# %% [markdown]
# <div lang="en">
#
# The three buttons above choose the language of every page of text and every table; they work without running anything. Figures are drawn with both languages.
#
# **In this lesson** (20 minutes): what is on your machine, how a lesson works, one minute of memory, and which route to take.
#
# **What to know before**: you have trained a network with PyTorch, and you know what `loss.backward()` does.
#
# </div>
# <div lang="zh">
#
# 上面的三个按钮用来切换全部正文和表格的语言，不运行代码也能用。图里两种语言都有。
#
# **本课内容**（20 分钟）：看看你的机器，了解每一课怎么上，花一分钟看看内存，再选一条路线。
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
from course_lib.memory import CATEGORIES, MemoryMeter, measure
from course_lib.models import Decoder, random_tokens
from course_lib.teaching import compare, table, timelines

# %% [markdown]
# ## 0.1 What is on this machine / 这台机器上有什么

# %% tags=["nbval-ignore-output", "shows-device"]
about_this_machine()

# %% [markdown]
# <div lang="en">
#
# A missing GPU is no obstacle. This course counts two things that are the same on every machine: the bytes of live tensors, and the floating-point operations (FLOPs). Seconds are shown here and there, but nothing is concluded from them. Where a GPU adds something, the lesson shows it live if you have one.
#
# </div>
# <div lang="zh">
#
# 没有 GPU 不碍事。本课程数的是两样在任何机器上都一样的东西：存活张量的字节数，以及浮点运算次数（FLOPs）。运行时间偶尔也会给出，但不据此下结论。GPU 能带来新内容的地方，只要你有 GPU，课里就会现场演示。
#
# </div>

# %% [markdown]
# ## 0.2 How a lesson works / 每一课怎么上
#
# <div lang="en">
#
# Each lesson asks one question and answers it in the same order. First you **predict** a number. Then you **build** the idea in a few lines. Then the gradients are proven **equal**, because a saving that changes the result is no saving. Only then do we **measure**, with the prediction beside it. A table of **claims** puts what you may have read elsewhere to the test, and exercises check your answers.
#
# Make your guess before you run the cell. A wrong guess is where the lesson happens.
#
# </div>
# <div lang="zh">
#
# 每一课只问一个问题，都按同样的次序回答。先**预测**一个数；再用几行代码把想法**实现**出来；然后验证梯度**相等**，因为改变了结果的节省不算节省；之后才**测量**，并把预测摆在旁边。最后有一张表，逐条检验你可能在别处读到的**说法**；还有练习，会检查你的答案。
#
# 运行单元格之前先猜一个数。猜错的地方，正是能学到东西的地方。
#
# </div>

# %%
course_map()
# %% [markdown]
# ## 0.3 One minute of memory / 一分钟看内存
#
# <div lang="en">
#
# A decoder, its optimizer, and a batch of 8 sequences. While the forward pass runs, autograd keeps what the backward pass will need: these bytes are called **activations**. Checkpointing keeps only what enters each layer, and computes the rest again when backward gets there.
#
# </div>
# <div lang="zh">
#
# 一个解码器、它的优化器，以及 8 个序列组成的批次。前向传播时，autograd 会保存反向传播要用到的数据，这些字节叫做**激活值**。检查点只保存每一层的输入，等反向走到这一层时，再把其余的重新算出来。
#
# </div>

# %%
tokens = random_tokens(batch=8, sequence=128, vocabulary=2048)  # (8, 129): the last one is only predicted
plain = Decoder(vocabulary=2048, hidden=256, heads=8, layers=8, sequence=128)


class Checkpointed(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)


forgetful = copy.deepcopy(plain)
forgetful.layers = nn.ModuleList(Checkpointed(layer) for layer in forgetful.layers)

# %% [markdown]
# <div lang="en">
#
# **Guess first.** Plain, one step peaks at 277.7 MB. Of these, 82.5 MB are weights and optimizer state, which no checkpoint can touch. What will the checkpointed step peak at? And by how much does the work grow, if every layer runs forward twice?
#
# </div>
# <div lang="zh">
#
# **先猜**：普通做法的一步，峰值是 277.7 MB，其中 82.5 MB 是权重和优化器状态，检查点动不了它们。用检查点的一步，峰值会是多少？每一层都要多跑一次前向，计算量又会增加多少？
#
# </div>

# %%
my_guess_bytes = None  # the peak of the checkpointed step, such as 200e6
my_guess_flops = None  # its FLOPs in terms of the plain step's, such as 2.0

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


# %%
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
# 逐位相等。现在用计量器：它在每个算子之后数出全部存活张量的字节。优化器状态在第一步里才建立，所以计量的是第二步。
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


meters = {("plain", "普通"): metered(plain), ("checkpointed", "检查点"): metered(forgetful)}

# %%
timelines(
    meters,
    title=(
        "Checkpointing cuts the peak by half: activations go, a second forward comes",
        "检查点让峰值减半：激活值少了，前向多跑一遍",
    ),
)

# %%
table(
    [("at the peak, MB", "峰值时，MB"), ("plain", "普通"), ("checkpointed", "检查点")],
    [(category, *(round(meter.at_peak()[category] / 1e6, 1) for meter in meters.values())) for category in CATEGORIES],
)

# %% [markdown]
# <div lang="en">
#
# Read it from left to right, one operator at a time. Above, the green of the activations climbs until the forward pass ends, and melts away as backward uses them up. Below, there is hardly any green: in backward each layer's activations rise once more, are used, and go, one layer at a time. Those teeth are the recomputation.
#
# </div>
# <div lang="zh">
#
# 从左往右看，一次看一个算子。上图中，代表激活值的绿色一路爬升，到前向结束为止，随后被反向逐渐用完而消退。下图几乎没有绿色：反向时，激活值一层接一层地重新升起，用完便消失。那些锯齿就是重计算。
#
# </div>


# %%
def step_of(decoder):
    adam = torch.optim.Adam(decoder.parameters())

    def step():
        decoder.loss(tokens).backward()
        adam.step()

    return measure(step, model=decoder, optimizer=adam)


arms = {("plain", "普通"): step_of(plain), ("checkpointed", "检查点"): step_of(forgetful)}
compare(arms)

# %%
before, after = arms.values()
rows = [
    (("peak, MB", "峰值，MB"), my_guess_bytes and my_guess_bytes / 1e6, after.peak_bytes / 1e6),
    (("FLOPs, of plain", "FLOPs，与普通之比"), my_guess_flops, after.flops / before.flops),
]
headings = ["", ("your guess", "你的猜测"), ("measured", "实测")]
table(headings, [(name, "–" if guess is None else f"{guess:.2f}", f"{measured:.2f}") for name, guess, measured in rows])

# %% [markdown]
# <div lang="en">
#
# The peak falls to 0.48 of what it was, and the FLOPs rise to 1.21. Not a doubling: a backward pass costs two forward passes, so one forward more adds a third at most. Here it is less, because the head is not recomputed, and because recomputation stops as soon as the last saved tensor is back, which spares each layer its last matrix product. Lesson 01 finds out where the bytes were; lesson 02 takes the trick apart.
#
# </div>
# <div lang="zh">
#
# 峰值降到原来的 0.48 倍，FLOPs 升到 1.21 倍。并没有翻倍：一次反向的计算量等于两次前向，所以多一次前向至多增加三分之一。这里还不到，因为输出头不用重计算，而且重计算在取回最后一个保存的张量时就停下，每一层省去了最后一次矩阵乘法。第 01 课弄清这些字节原本在哪里，第 02 课把这个办法拆开来看。
#
# </div>

# %% [markdown]
# ## 0.4 Which route / 选哪条路线
#
# <div lang="en">
#
# | You have | Take |
# |---|---|
# | an hour | this page, then sections 1.1 to 1.4 of lesson 01 |
# | a day | lessons 01 and 02 whole, the summaries of the others |
# | the whole course | 00 to 08 in order, with the exercises |
# | a model that does not fit, today | lesson 01, then `course_lib` straight away |
#
# If you teach: after 01 most lessons stand alone. But 03 builds on 02, 04 and 06 use one section of it each, and 07 needs all the others. Lessons still in preparation are marked in the README.
#
# </div>
# <div lang="zh">
#
# | 你有 | 路线 |
# |---|---|
# | 一小时 | 本页，然后是第 01 课的 1.1 到 1.4 节 |
# | 一天 | 第 01、02 课全部，加上其余各课的小结 |
# | 学完整门课的时间 | 从 00 到 08 依次学完，并做练习 |
# | 一个眼下就要训练、却装不下的模型 | 第 01 课，然后直接用 `course_lib` |
#
# 如果你是教师：学过第 01 课之后，各课大多可以单独讲；不过 03 要以 02 为基础，04 和 06 各用到其中一处内容，07 则需要前面全部各课。仍在编写的课在 README 中有标注。
#
# </div>

# %% [markdown]
# ## 0.5 Troubleshooting / 疑难解答
#
# <div lang="en">
#
# - **No GPU.** Nothing to do. Cells about GPUs say so and show recorded figures where there are any.
# - **Little memory.** Every lesson stays under 4 GB. Close other notebooks: each one runs a Python of its own.
# - **A GPU that torch does not see.** `torch.version.cuda` is `None` in a CPU build: install the build for your driver, as the selector on the PyTorch site tells, then `make lab` again.
# - **Both languages at once, and no buttons.** The notebook is not trusted. `make lab` trusts the course's notebooks; elsewhere, choose "Trust Notebook" in the command palette.
# - **Empty boxes in a figure.** The course ships its font, so this should not happen: run `make test`, it looks for them.
#
# </div>
# <div lang="zh">
#
# - **没有 GPU。** 什么都不用做。涉及 GPU 的单元格会说明，有预先记录的数据就显示出来。
# - **内存小。** 每一课都不超过 4 GB。请关掉其他 notebook：每开一个，就多运行一个 Python。
# - **torch 看不到 GPU。** CPU 版 torch 的 `torch.version.cuda` 是 `None`：请按 PyTorch 网站上的选择器给出的命令，装上与驱动匹配的版本，再运行一次 `make lab`。
# - **两种语言同时出现，按钮也没有。** 说明这个 notebook 未被信任。`make lab` 会信任本课程的 notebook；在别处，请在命令面板里选 “Trust Notebook”。
# - **图里有空方框。** 课程自带字体，不应出现这种情况：请运行 `make test`，它会检查。
#
# </div>

# %% [markdown]
# ## 0.6 Next / 下一步
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
# 你看到了 277.7 MB 变成 134.0 MB，梯度相等，代价是 1.21 倍的 FLOPs。接下来，[第 01 课](01_memory_bottleneck.ipynb)追问训练步的字节去了哪里，并教你在用掉它们之前就预测出来。
#
# 这一技术的**出处**：Chen et al. 2016，*Training Deep Nets with Sublinear Memory Cost*，arXiv:1604.06174。
#
# </div>
