# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] slide={"en": "Eight layers keep 168 MB. One line: 277.7 MB become 134.0.\n\nEight layers by themselves: around one of them, it saves nothing. Which one?", "zh": "八层保存 168 MB。一行代码，277.7 MB 变成 134.0 MB。\n\n只有这八层时，把它加在其中一层上，什么也不省。是哪一层？"}
# # 2 What if we forget activations and compute them again? (activation checkpointing) / 把激活值忘掉，用时再算，会怎样？（激活检查点、重计算）
#
# <div lang="en">
#
# In the step of lesson 01, eight layers keep 168 MB of activations. One line makes the decoder forget them and compute them again. The peak falls from 277.7 to 134.0 MB, and the gradients are equal to the last bit.
#
# Now take the eight layers alone, without embedding and head, and put the same line around one layer only. Around one of the eight, it saves nothing at all. Which one is it, and why?
#
# </div>
# <div lang="zh">
#
# 在第 01 课的训练步里，八层一共保存 168 MB 的激活值。只要加一行代码，解码器就会忘掉这些激活值，用到时再重新计算。峰值从 277.7 MB 降到 134.0 MB，梯度逐比特相等。
#
# 再把这八层单独拿出来，不要嵌入层和输出头，只给其中一层加上同一行代码。其中有一层，加了检查点，内存却一点也没有省下来。这是哪一层？为什么？
#
# </div>

# %%
from course_lib.teaching import language

language()

# %% [markdown]
# <div lang="en">
#
# **Goals** (100 minutes). You write a checkpoint yourself, and predict the peak of a checkpointed step. You learn which blocks are worth a checkpoint and what to keep, and compute the loss in chunks. At the end you do all this to a Llama of Hugging Face.
#
# **What to know before**: lesson 01, that is, what a layer saves, storages, and the timeline of a step.
#
# </div>
# <div lang="zh">
#
# **目标**（100 分钟）：自己写一个检查点，预测加了检查点之后训练步的峰值；学会判断哪些块值得加检查点，该保留什么；把损失分成小段计算；最后把这些用到 Hugging Face 的 Llama 上。
#
# **预备知识**：第 01 课，即一层保存什么、存储区，以及训练步的时间线。
#
# </div>

# %%
import warnings
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from course_lib.checkpoint import checkpoint_blocks
from course_lib.lessons.ledger import ledger
from course_lib.lessons.lesson_02 import exercises, figures, own_code
from course_lib.models import Decoder, DecoderLayer
from course_lib.teaching import predictions, table, timelines

# %% [markdown] slide={"en": "Keep a block's **input** only; run its forward again in backward.\n\n**Guess first.** In which order do three blocks a, b, c run?", "zh": "只留一个块的**输入**，反向时把前向再跑一遍。\n\n**先猜**：三个块 a、b、c 按什么顺序运行？"}
# ## 2.1 Watch it run / 看它怎样运行
#
# <div lang="en">
#
# Autograd keeps what backward will need. **Activation checkpointing** keeps only the **input** of a block. When backward arrives at the block, its forward pass runs once more. (It is also called gradient checkpointing or activation recomputation, and is not a file of weights.)
#
# In PyTorch you write `torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)`; section 2.3 explains the option. Each block reports when it runs. **Guess first:** in which order do three checkpointed blocks a, b and c run, forward and backward?
#
# </div>
# <div lang="zh">
#
# autograd 会保存反向要用的一切。**激活检查点**（activation checkpointing，又称梯度检查点、激活重计算）只保存一个块的**输入**，等反向走到这个块，再把它的前向跑一遍。下文简称检查点，它与存盘的模型权重无关。
#
# 在 PyTorch 里写作 `torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)`，其中的选项留到 2.3 节解释。下面让每个块在运行时报告一声。**先猜**：a、b、c 三个块都加了检查点，它们的前向和反向按什么顺序运行？
#
# </div>

# %%
heard, x = [], torch.randn(4, requires_grad=True)


def block(name, x):
    heard.append(f"forward {name}")
    return x.sin().exp()


def done(name, gradient):
    heard.append(f"backward {name} done")


# %% slide="both"
for name in ("a", "b", "c"):
    x.register_hook(partial(done, name))  # called when the gradient of x has come
    x = checkpoint(block, name, x, use_reentrant=False)
x.sum().backward()
figures.draw_order(heard)

# %% [markdown]
# <div lang="en">
#
# First there are three forward passes. Then backward arrives at c, runs its forward again, and finishes c before it goes on to b. Apart from the inputs, only one block's activations are in memory at a time.
#
# </div>
# <div lang="zh">
#
# 先是三次前向。接着反向来到 c，把它的前向再跑一遍，做完 c 的反向，才轮到 b。除了各块的输入，任何时刻内存里都只有一个块的激活值。
#
# </div>

# %% [markdown] slide={"en": "Forward without a graph; backward runs the block again.\n\n**Write it.** What must backward return, and what may not be live in between?", "zh": "前向不建计算图，反向把块再跑一遍。\n\n**自己写**：反向该返回什么？两者之间，什么不该存活？"}
# ## 2.2 Write it / 自己写
#
# <div lang="en">
#
# In a `torch.autograd.Function` you write forward and backward yourself. `MyCheckpoint.apply(block, x)` runs it. Backward receives the gradient of the output, and returns one gradient for each argument of `forward`. These tools are enough:
#
# - `context.save_for_backward(x)` keeps a tensor, and `context.saved_tensors` returns it in backward.
# - Inside a Function, no graph is recorded. `torch.enable_grad()` turns recording on.
# - `x.detach().requires_grad_()` shares the data of x and begins a new graph.
# - `torch.autograd.backward(output, gradient)` goes backward through that graph, and leaves gradients in `.grad`.
#
# </div>
# <div lang="zh">
#
# 在 `torch.autograd.Function` 里，前向和反向都由你自己写。运行时调用 `MyCheckpoint.apply(block, x)`。反向收到输出的梯度，要为 `forward` 的每个参数各返回一个梯度。用到的工具只有这些：
#
# - `context.save_for_backward(x)` 保存一个张量，反向时从 `context.saved_tensors` 取回。
# - Function 内部不记录计算图，`torch.enable_grad()` 把记录打开。
# - `x.detach().requires_grad_()` 与 x 共用数据，并成为一张新计算图的起点。
# - `torch.autograd.backward(output, gradient)` 沿这张图做反向，梯度放进 `.grad`。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **Exercise 1.** Write both functions. `forward` returns the block's output and records no graph. `backward` returns two values: `None`, since `block` has no gradient, and `x`'s gradient.
#
# The check compares the gradients of the input and of the weight, counts the runs, and looks at the bytes that are live between forward and backward. Then it runs two blocks in a row.
#
# </div>
# <div lang="zh">
#
# **练习 1。** 写出这两个函数。`forward` 返回块的输出，不记录计算图。`backward` 要返回两个值：`block` 没有梯度，返回 `None`；然后是 `x` 的梯度。
#
# 检查时会比较输入和权重的梯度，统计块运行的次数，并查看前向与反向之间还有多少字节存活。之后再让两个块连着运行。
#
# </div>


# %% minutes=16
class MyCheckpoint(torch.autograd.Function):
    @staticmethod
    def forward(context, block, x):
        context.block = block
        return x

    @staticmethod
    def backward(context, gradient):
        return None, gradient


exercises.check_checkpoint(MyCheckpoint)

# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not exercises.check_checkpoint.accepted:

    class MyCheckpoint(torch.autograd.Function):
        @staticmethod
        def forward(context, block, x):
            context.block = block
            context.save_for_backward(x)
            with torch.no_grad():
                return block(x)

        @staticmethod
        def backward(context, gradient):
            (x,) = context.saved_tensors
            again = x.detach().requires_grad_()
            with torch.enable_grad():
                output = context.block(again)
            torch.autograd.backward(output, gradient)  # autograd inside autograd
            return None, again.grad


exercises.check_checkpoint(MyCheckpoint)
### END SOLUTION

# %% [markdown] slide={"en": "The newer mode keeps a **number** in place of each tensor, and brings the tensor back later.\n\nAre the gradients equal, in all modes?", "zh": "较新的模式给每个张量留下**编号**，以后再找回来。\n\n各种模式下，梯度都相等吗？"}
# ## 2.3 Two modes, and which one you get / 两种模式，你得到的是哪一种
#
# <div lang="en">
#
# Your checkpoint is PyTorch's older mode, `use_reentrant=True`: autograd runs inside autograd. The newer mode, `use_reentrant=False`, records the graph as usual, and takes the tensors out of it by the two hooks of lesson 01. In forward, the first hook keeps a number in place of each tensor. In backward, the second hook gets the number back. At its first call it runs the block again and collects what this run saves:
#
# ```text
# forward    saves      t0  t1  t2      first hook    → 0  1  2
# backward   asks for           2       second hook   → run again, collect t0 t1 t2; return t2
#            asks for        1          second hook   → return t1
# ```
#
# You can write this mode in section 2.13. First compare gradients: yours, PyTorch's, and those of `course_lib.checkpoint.readable`, a file of 350 lines with both modes that is written to be read.
#
# </div>
# <div lang="zh">
#
# 你写的检查点，就是 PyTorch 较老的模式 `use_reentrant=True`。它叫可重入（reentrant），因为 autograd 在 autograd 里面又运行了一次。较新的模式 `use_reentrant=False` 照常建立计算图，再用第 01 课的两个钩子把图里的张量取走。前向时，第一个钩子给每个张量一个编号，只留下编号。反向时，第二个钩子拿到编号。它第一次被调用时，把块再跑一遍，收集这一遍保存的张量，凭编号就能找到要的那个：
#
# ```text
# forward    saves      t0  t1  t2      first hook    → 0  1  2
# backward   asks for           2       second hook   → run again, collect t0 t1 t2; return t2
#            asks for        1          second hook   → return t1
# ```
#
# 这种模式也可以自己写，见 2.13 节。先比较梯度。除了你写的和 PyTorch 的，还有 `course_lib.checkpoint.readable`，这个文件共 350 行，实现了两种模式，代码写得便于阅读。
#
# </div>

# %%
from course_lib.checkpoint.readable import checkpoint as readable

block, x = DecoderLayer(256, 8), torch.randn(2, 128, 256, requires_grad=True)  # (b, s, h)
uneven = torch.linspace(-1, 2, x.numel()).view_as(x)  # the gradient that arrives


def gradients(output):
    x.grad = None
    block.zero_grad()
    output.backward(uneven)
    return [x.grad, *(parameter.grad for parameter in block.parameters())]


# %% slide="result"
runs, right = {"MyCheckpoint": MyCheckpoint.apply}, gradients(block(x))
for name, library in {"torch": checkpoint, "course_lib": readable}.items():
    runs[name] = partial(library, use_reentrant=False)
rows = [(f"`{n}`", all(map(torch.equal, right, gradients(r(block, x))))) for n, r in runs.items()]
table(["checkpoint", "gradients equal"], rows)

# %% [markdown]
# <div lang="en">
#
# Data need no gradient. Pass them to the block, and add a head after it. **Guess first:** how many of the block's 12 parameters get a gradient, with your checkpoint, and with PyTorch's if you leave out `use_reentrant`?
#
# </div>
# <div lang="zh">
#
# 激活值需要梯度，数据却不需要。现在把不需要梯度的数据输入这个块，后面再接一个输出头。**先猜**：块的 12 个参数里，有几个能得到梯度？用你的检查点时是几个？用 PyTorch 的检查点而不写 `use_reentrant` 时呢？
#
# </div>

# %% slide="result"
head, data, rows = nn.Linear(256, 1), torch.randn(2, 128, 256), []
ways = {f"`{mode}`": partial(checkpoint, use_reentrant=mode) for mode in (True, False)}
ways |= {"`MyCheckpoint`": MyCheckpoint.apply, "left out": checkpoint}
for name, run in ways.items():
    block.zero_grad()
    with warnings.catch_warnings(record=True, action="always") as heard:
        head(run(block, data)).sum().backward()
    trained = sum(parameter.grad is not None for parameter in block.parameters())
    rows.append((name, trained, len(heard)))
print(heard[0].message)  # of the option left out
table(["`use_reentrant`", "parameters with a gradient (of 12)", "warnings"], rows)

# %% [markdown] slide={"en": "The input needs no gradient: the older mode trains **0 of 12** parameters.\n\nLeave the option out, and you get the older mode.", "zh": "输入不需要梯度：旧模式 12 个参数训练了 **0** 个。\n\n不写这个选项，用的就是旧模式。"}
# <div lang="en">
#
# A Function whose tensors all need no gradient returns an output without a graph. So the head trains and the block does not. Your checkpoint reports nothing, and PyTorch's older mode warns. If you leave the option out, PyTorch 2.13 still uses the older mode. It gives one more warning, printed above, which announces an error for version 2.9 that has not come. Therefore always write `use_reentrant=False`.
#
# In both modes, a block must compute the same thing twice. PyTorch repeats its own random numbers and `autocast`, so dropout draws the same mask. It does not repeat Python's random numbers or a counter of your module (section 2.16). The error that may follow is `CheckpointError` (section 2.13).
#
# </div>
# <div lang="zh">
#
# 如果 Function 的输入张量都不需要梯度，输出就不带计算图，于是输出头照常训练，这个块却得不到训练。你的检查点对此毫无提示，PyTorch 的旧模式会发出警告。在 PyTorch 2.13 里，不写这个选项，用的仍然是旧模式，并且多一条警告（上面打印的就是），其中预告 2.9 版起会报错，但这至今没有实现。所以一定要写 `use_reentrant=False`。
#
# 无论哪种模式，一个块两遍都要算出同样的结果。PyTorch 会重现自己的随机数和 `autocast`，所以 dropout 的掩码不变。Python 的随机数和模块自己的计数器则不会（2.16 节），由此可能引起 `CheckpointError`（2.13 节）。
#
# </div>

# %% [markdown]
# ## 2.4 The whole decoder in one line / 一行代码，整个解码器
#
# <div lang="en">
#
# `checkpoint_blocks(model, "layers.*")` puts a checkpoint around every block whose name matches, in any model that calls its blocks as modules. The step is that of lesson 01, the second step with Adam. Gradients are released before it, so they **arrive during backward**. Only section 2.7 changes this.
#
# </div>
# <div lang="zh">
#
# `checkpoint_blocks(model, "layers.*")` 给名称匹配的每个块各加一个检查点，只要模型把这些块当作模块来调用。训练步与第 01 课相同，用 Adam，取第二步。开始之前梯度已经释放，所以梯度**在反向中才陆续产生**，只有 2.7 节不是这样。
#
# </div>

# %%
sizes = {"vocabulary": 2048, "hidden": 256, "heads": 8, "layers": 8, "sequence": 128}
make_decoder = partial(Decoder, **sizes)
plain, forgetful = make_decoder(), make_decoder()
checkpoint_blocks(forgetful, "layers.*")
step = figures.metered_step  # lesson 01's step with Adam, under the meter
meters = {"plain": step(plain), "checkpointed": step(forgetful)}
table(["weights equal"], [[all(map(torch.equal, plain.parameters(), forgetful.parameters()))]])

# %% slide="result"
timelines(
    meters, title="One mountain becomes eight teeth, and the peak moves to the end of backward"
)

# %% [markdown] slide={"en": "A layer keeps 20,987,904 bytes; a checkpoint keeps its input and 5,056.\n\n**Guess first.** From 277,682,584 bytes, with $k$ checkpoints?", "zh": "一层保存 20,987,904 字节；一个检查点留下这一层的输入和 5,056 字节。\n\n**先猜**：原来 277,682,584 字节，加 $k$ 个检查点呢？"}
# <div lang="en">
#
# Each tooth is one layer whose activations are in memory again. A checkpoint keeps the layer's input, $b s h$ numbers, and 5,056 bytes for the state of the random number generator. The rest of the layer's 20,987,904 bytes (your sum in lesson 01) is not in memory when backward starts. At that moment the step without checkpoints has its peak, 277,682,584 bytes.
#
# **Exercise 2.** The first $k$ of the eight layers have a checkpoint. What is the peak, in bytes?
#
# </div>
# <div lang="zh">
#
# 图中每个齿，都是一层的激活值重新回到了内存里。检查点保存这一层的输入，共 $b s h$ 个数，另有 5,056 字节是随机数发生器的状态。一层原有 20,987,904 字节（第 01 课你算出的总和），反向开始时其余部分都已不在内存里。没有检查点时，训练步的峰值 277,682,584 字节正好出现在这一刻。
#
# **练习 2。** 给八层中的前 $k$ 层加检查点，峰值是多少字节？
#
# </div>


# %% minutes=6
def predicted_peak(k):
    return None


exercises.check_peak_formula(predicted_peak)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not exercises.check_peak_formula.accepted:

    def predicted_peak(k):
        one_input = 4 * 8 * 128 * 256
        return 277_682_584 - k * (20_987_904 - one_input - 5_056)


exercises.check_peak_formula(predicted_peak)
### END SOLUTION

# %% slide="result"
checkpoint_blocks(seven := make_decoder(), "layers.*", first=7)
peaks = {0: meters["plain"].peak_bytes, 7: step(seven).peak_bytes}
peaks[8] = meters["checkpointed"].peak_bytes
predictions([(f"k = {k}", predicted_peak(k), peak) for k, peak in peaks.items()], unit="bytes")

# %% [markdown]
# <div lang="en">
#
# The formula is exact to the byte for $k = 0$ and $7$, and 16 MB too low for $k = 8$. It describes one moment, the start of backward. The eighth checkpoint lowers it so far that the peak moves to the end of backward, when one layer's activations and nearly all gradients are in memory.
#
# </div>
# <div lang="zh">
#
# $k = 0$ 和 $7$ 时一字节不差，$k = 8$ 时却少算了 16 MB。公式描述的只是反向开始的那一刻。加上最后一个检查点之后，这一刻的内存降得很低，峰值就换到了反向快结束的时候，那时内存里有一层的激活值和几乎全部的梯度。
#
# </div>

# %% [markdown] slide={"en": "One checkpoint only.\n\n**Guess first.** Around which of eight layers does it save least? And in the decoder, with its head?", "zh": "只能加一个检查点。\n\n**先猜**：八层里，给哪一层加省得最少？带输出头的解码器呢？"}
# ## 2.5 Which block? / 给哪一块？
#
# <div lang="en">
#
# You may use one checkpoint only. Take two networks: the eight layers alone, with a mean of squares as loss, and the decoder with its head. Without an optimizer the decoder needs 222.7 MB, which is 277.7 less Adam's 55.0.
#
# **Exercise 3.** Guess before you measure. Around which of the eight layers alone does a checkpoint save nothing? And does a checkpoint around the same layer save memory in the decoder? Write the layer's number, from 0 to 7, and `True` or `False`.
#
# </div>
# <div lang="zh">
#
# 假如只能用一个检查点，我们看两个网络。一个只有这八层，损失取输出平方的均值；另一个是带输出头的解码器。不带优化器时，解码器需要 222.7 MB，即 277.7 减去 Adam 的 55.0。
#
# **练习 3。** 先猜，再测量。在只有八层的网络里，检查点加在哪一层上什么也不省？在解码器里，给同一层加检查点，能省内存吗？填写层的编号（0 到 7），以及 `True`（能）或 `False`（不能）。
#
# </div>

# %% minutes=2
layer, saves_in_decoder = None, None
exercises.check_which_block((layer, saves_in_decoder))

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
exercises.check_which_block((7, True))
### END SOLUTION

# %% slide="result"
peak = figures.peak_with_checkpoint  # of forward and backward; around no layer if it is None
alone = {layer: peak(layer, head=False) for layer in (None, *range(8))}
whole = {layer: peak(layer) for layer in (None, *range(8))}
figures.draw_which_block(alone, whole)

# %%
table(["saved around the last of the layers alone (bytes)"], [[alone[None] - alone[7]]])

# %% [markdown] slide={"en": "A checkpoint saves what is absent **at the peak**.\n\nAsk first when the peak is, then what is alive at that moment.", "zh": "检查点省下的，是**峰值那一刻**不在的东西。\n\n先问峰值在何时，再问那一刻有什么。"}
# <div lang="en">
#
# A checkpoint saves what is not in memory **at the peak**. Backward begins with the last layer, so that layer is recomputed while the activations of all others are still in memory. In the eight layers alone, its checkpoint saves nothing, and costs 5,056 bytes for the generator's state. Around layers 0 to 5, it saves the layer except its input. Around layer 6 the peak is later: layer 7's activations are gone, and its gradients exist. So it saves 2.1 MB less (3.2 MB of gradients instead of a 1.0 MB input).
#
# In the decoder, even the last layer's checkpoint saves memory, because the peak comes earlier, during the backward pass of the loss. Three tensors as large as the logits (25 MB) are in memory then. First ask when the peak occurs, then what is in memory.
#
# </div>
# <div lang="zh">
#
# 检查点省下的，是**峰值那一刻**不在内存里的东西。反向从最后一层开始，所以这一层重新算出来时，其余各层的激活值都还在内存里。在只有八层的网络里，给它加检查点什么也省不了，还要多占 5,056 字节来保存随机数发生器的状态。给第 0 到第 5 层中的一层加，省下的是这一层的激活值减去它的输入。给第 6 层加检查点，峰值来得更晚，那时第 7 层的激活值已经释放，梯度却已产生。所以少省 2.1 MB（要减去的是 3.2 MB 的梯度，而不是 1.0 MB 的输入）。
#
# 在解码器里，给最后一层加检查点也能省内存，因为峰值出现得更早，在损失的反向那里。那一刻有三个 logits 大小的张量，共 25 MB。所以要先问峰值在什么时候，再问那一刻内存里有什么。
#
# </div>

# %% [markdown]
# ## 2.6 What to keep: policies on one scale / 保留什么：同一标尺上的几种策略
#
# <div lang="en">
#
# The same step can be run in five ways. **Selective checkpointing** keeps the results of some operators and recomputes the others. Here it keeps the products of the linear layers. A Linear with a bias calls `addmm`, and one without a bias calls `mm`. **Guess first:** what share of a step's FLOPs is one more forward pass? For each product of forward, backward computes two, for the gradients of the input and of the weight.
#
# </div>
# <div lang="zh">
#
# 同一个训练步，用五种做法各运行一次。**选择性检查点**保留一部分算子的结果，其余的重新计算，这里保留的是线性层的乘积。带偏置的 Linear 调用 `addmm`，不带偏置的调用 `mm`。**先猜**：多做一次前向，会增加整个训练步几分之几的 FLOPs？提示：前向每做一次乘法，反向就要做两次，一次求输入的梯度，一次求权重的梯度。
#
# </div>


# %%
def decoder_with(group=1, **options):
    decoder = make_decoder()
    parts = [decoder.layers[i : i + group] for i in range(0, 8, group)]
    decoder.layers = nn.ModuleList(nn.Sequential(*part) for part in parts)
    checkpoint_blocks(decoder, "layers.*", **options)
    return decoder


# %% slide="result"
products = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]
measured = figures.measured_step  # symbolic: its peak, and the FLOPs of forward and backward
ways = {"each layer": {}, "products kept": {"policy": products}}
ways |= {"two layers per checkpoint": {"group": 2}, "eight layers per checkpoint": {"group": 8}}
arms = {"plain": measured(make_decoder)}
arms |= {name: measured(decoder_with, **options) for name, options in ways.items()}
figures.draw_policies(arms)

# %% [markdown] slide={"en": "One forward more, all weights trained: about a third. Here: 1.21.\n\nProducts kept: 84 MB saved, for 2% more FLOPs.", "zh": "全部权重都训练，多一次前向约增加三分之一；这里是 1.21 倍。\n\n保留乘积：省 84 MB，FLOPs 多 2%。"}
# <div lang="en">
#
# If all weights are trained, one more forward pass adds about a third. Here, checkpoints around each layer cost 1.21 times the FLOPs, because the head is not recomputed, and recomputation stops as soon as the last saved tensor exists (**early stop**), so each checkpoint skips its last product. With frozen weights backward does less, and the additional pass can add about half of the step's FLOPs.
#
# Keeping the products saves 84 MB and costs 2% more FLOPs. (With 2048 tokens per sequence it costs 18%, because the products inside attention run again.) One checkpoint around all eight layers costs the most FLOPs and saves only 19 MB. Leaving out the last layer's checkpoint needs 4 MB more, and saves an eighth of the additional FLOPs.
#
# **FLOPs are not time.** The counter counts matrix products only, while this policy also recomputes GELU and softmax. Seconds follow in section 2.20.
#
# </div>
# <div lang="zh">
#
# 如果全部权重都训练，多一次前向约增加三分之一。这里每层一个检查点，FLOPs 却只是 1.21 倍，原因有两个：输出头不用重新计算；最后一个要保存的张量一算出来，重计算就停止（**提前终止**），所以每个检查点都省去最后一次乘法。如果冻结了部分权重，反向的计算变少，多做的这次前向可能让 FLOPs 增加约一半。
#
# 保留乘积省下 84 MB，FLOPs 只多 2%。（每条序列有 2048 个 token 时要多 18%，因为注意力内部的乘法要再做一遍。）八层合用一个检查点时，八层要一起重新计算，FLOPs 增加得最多，却只省 19 MB。实际使用时，最后一层可以不加检查点，内存只多 4 MB，增加的 FLOPs 少八分之一。
#
# **FLOPs 不是时间。** 计数器只统计矩阵乘法，而这个策略还要重新计算 GELU 和 softmax。秒数见 2.20 节。
#
# </div>

# %% [markdown] slide={"en": "Two layers per checkpoint were worse on both axes. A rule?\n\n**Guess first.** With gradients from the start, from which depth do pairs save more?", "zh": "两层合用一个检查点，两项都更差。总是这样吗？\n\n**先猜**：如果梯度一开始就在，多深以后两层合用更省？"}
# ## 2.7 Groups, if gradients exist from the start / 梯度一开始就在时的分组
#
# <div lang="en">
#
# Two layers per checkpoint needed more memory and more FLOPs. This need not be so if gradients exist from the start, as in the later micro-batches of gradient accumulation (lesson 05). A pair recomputes one more layer at a time, and keeps half of the inputs. A layer saves as many bytes as 20 inputs. **Guess first:** from which depth on do pairs need less memory? (All sizes are a quarter of the decoder's.)
#
# </div>
# <div lang="zh">
#
# 两层合用一个检查点，内存和 FLOPs 都更多。但如果梯度从一开始就存在，例如梯度累积（第 05 课）中后面的微批次，结论就不一定了。两层合用时，每次要多恢复一层，但只需保存一半的输入。一层的激活值相当于 20 份输入。**先猜**：从多少层起，两层合用更省内存？（下面各种尺寸都缩到解码器的四分之一。）
#
# </div>

# %% slide="result"
rows = [(n, *(figures.peak_of_groups(n, size) for size in (1, 2))) for n in (8, 48)]
table(["layers", "each layer (MB)", "two layers per checkpoint (MB)"], rows)

# %% [markdown]
# <div lang="en">
#
# Pairs of layers need more memory with 8 layers and less with 48. Both peaks are linear in the depth, and the lines cross at 40 layers. (Here `preserve_rng_state=False`. With the random state, pairs win from 37 layers on.) In our usual step, pairs need more at any depth here: the gradients that arrive take more memory than the inputs that are released.
#
# </div>
# <div lang="zh">
#
# 8 层时，两层合用更费内存；48 层时更省。两个峰值都随层数线性增长，两条直线在 40 层处相交。（这里的检查点不保存随机数状态，即 `preserve_rng_state=False`。如果保存，从 37 层起两层合用就更省。）而在通常的训练步里，梯度在反向中陆续产生，新产生的梯度比释放的输入占得更多，所以在这里无论多少层，两层合用都更费。
#
# </div>

# %% [markdown] slide={"en": "1024 tokens, 32,000 words: logits of 131 MB, three times over.\n\nCut the tokens into chunks. How does the loss stay the same?", "zh": "1024 个 token，词表 32,000：logits 131 MB，而且有三份。\n\n把 token 切成小段，怎样让损失不变？"}
# ## 2.8 The loss, in chunks / 把损失分成小段计算
#
# <div lang="en">
#
# The head with its loss is a block, too, and often the largest one. At the peak it needs three tensors as large as the logits. For 1024 tokens and a vocabulary of 32,000, these take 131 MB each. Divide the tokens into **chunks** and put a checkpoint around each, and the logits never exist whole.
#
# **Exercise 4.** Write this loss in about eight lines. It must equal `F.cross_entropy(hidden @ weight.T, targets)`, also if the last chunk is shorter. `chunk` is a number of tokens. The loss is the mean over the targets that count. A target of −100 does not count (`ignore_index`). In fine-tuning, prompts and padding have this target.
#
# </div>
# <div lang="zh">
#
# **输出头与损失**合在一起也是一个块，而且常常是最大的一块。峰值时，它需要三个 logits 大小的张量。如果有 1024 个 token，词表为 32,000，logits 就占 131 MB。把 token 分成**小段**（chunk），每个小段加一个检查点，完整的 logits 就不会出现。
#
# **练习 4。** 用八行左右写出这个损失。它必须等于 `F.cross_entropy(hidden @ weight.T, targets)`，最后一个小段较短时也一样。`chunk` 是每个小段的 token 数。损失是所有计入的目标的均值。值为 −100 的目标不计入（`ignore_index`），微调时，提示词和填充的 token 就用这个值。
#
# </div>


# %% minutes=8
def loss_in_pieces(hidden, weight, targets, chunk):  # (n, h), (v, h), (n,)
    return None


exercises.check_loss_in_pieces(loss_in_pieces)

# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not exercises.check_loss_in_pieces.accepted:

    def loss_of_chunk(hidden, weight, targets):
        return F.cross_entropy(hidden @ weight.T, targets, reduction="sum")

    def loss_in_pieces(hidden, weight, targets, chunk):
        total = 0
        for rows, answers in zip(hidden.split(chunk), targets.split(chunk), strict=True):
            total = total + checkpoint(loss_of_chunk, rows, weight, answers, use_reentrant=False)
        return total / (targets != -100).sum()  # the others add nothing to the sum


exercises.check_loss_in_pieces(loss_in_pieces)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# If one backward pass goes through all chunks, the gradient of the vocabulary's matrix (33 MB) exists three times: the sum so far, the gradient of the next chunk, and their new sum. PyTorch cannot add the gradient of a transposed matrix in place. Write the logits as `(weight @ rows.T).T`, and the gradient is not transposed. Or call backward after each chunk: the gradient is added in place, too, and no checkpoint is needed. Backward through the layers continues from `hidden.grad`.
#
# </div>
# <div lang="zh">
#
# 如果所有小段合在一次反向里，词表矩阵的梯度（33 MB）会同时有三份，即目前的累加和、下一小段的梯度，以及两者相加的结果，因为 PyTorch 不能原地累加转置矩阵的梯度。如果把 logits 写成 `(weight @ rows.T).T`，这个梯度就不是转置的。另一种做法是每个小段算完就做反向，这样梯度也能原地累加，而且不再需要检查点。前面各层的反向再从 `hidden.grad` 继续。
#
# </div>


# %% slide="code"
def one_backward(*given):
    loss_in_pieces(*given).backward()


def backward_by_chunk(hidden, weight, targets, chunk):
    hidden.grad, counted = torch.zeros_like(hidden), (targets != -100).sum()
    for start in range(0, len(targets), chunk):
        part = slice(start, start + chunk)
        rows = hidden.detach()[part].requires_grad_()
        loss = F.cross_entropy(rows @ weight.T, targets[part], reduction="sum")
        (loss / counted).backward()  # no checkpoint: the logits are gone then
        hidden.grad[part] = rows.grad


# %% slide="result"
ways = one_backward, figures.one_backward_transposed, backward_by_chunk
sizes = (1024, 256, 128, 32) if exercises.check_loss_in_pieces.accepted else ()
rows = [(n, *(figures.head_peak(way, n) for way in ways)) for n in sizes]
table(["tokens in a chunk", "one backward", "`(weight @ rows.T).T`", "a backward per chunk"], rows)

# %% [markdown]
# <div lang="en">
#
# Peaks are in units of the matrix, 33 MB. A chunk of 1024 tokens is the whole head. With smaller chunks the first column stays at 3. The other two approach their floor, 2 (the accumulated gradient and the next chunk's), and in the last one nothing is recomputed. Fused losses such as Liger's do this already in forward.
#
# </div>
# <div lang="zh">
#
# 表中峰值以词表矩阵的大小（33 MB）为单位。一个小段有 1024 个 token，就等于不分段。小段变小时，第一列停在 3，另外两列继续降向下限 2，也就是目前的梯度和下一小段的梯度。最后一列的做法没有任何计算要做两遍。Liger 等融合损失就是这样做的，而且在前向里就算好了梯度。
#
# </div>

# %% [markdown]
# ## 2.9 In your own code / 实际怎么写
#
# <div lang="en">
#
# You probably train a model of Hugging Face. `own_code.llama` makes a small Llama from a configuration: 4 layers, hidden size 256, 8 query heads, 4 key-value heads. The vocabulary of 8,192 is 32 times the hidden size, about as in Llama 3 8B. Forward and backward of 8 sequences of 128 tokens need 215.2 MB. Prompts and padding have the label −100.
#
# **Exercise 5.** Fill in the last row of the table below. Checkpoint the layers by `model.activation_checkpointing_enable()`, and take the loss in chunks. `model.model(tokens).last_hidden_state` has the hidden states before the head, `model.lm_head.weight` is its matrix, and position $t$ predicts the label of position $t + 1$. The loss and the gradients must be the model's own, and the peak at most 80 MB.
#
# </div>
# <div lang="zh">
#
# 你训练的很可能是 Hugging Face 的模型。`own_code.llama` 用一份配置生成一个小的 Llama，有 4 层，隐藏维度 256，8 个查询头，4 个键值头。词表为 8,192，是隐藏维度的 32 倍，与 Llama 3 8B 相近。8 条各 128 个 token 的序列，前向加反向需要 215.2 MB。提示词和填充的 token，标签是 −100。
#
# **练习 5。** 填写下表的最后一行。用 `model.activation_checkpointing_enable()` 给各层加检查点，损失分成小段计算。`model.model(tokens).last_hidden_state` 是输出头之前的隐藏状态，`model.lm_head.weight` 是输出头的矩阵，位置 $t$ 预测位置 $t + 1$ 的标签。损失和梯度要与模型自己算出的相同，峰值不超过 80 MB。
#
# </div>


# %% minutes=5
def in_chunks(model, tokens, labels):  # both (8, 128)
    return None


exercises.check_in_chunks(in_chunks)

# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not exercises.check_in_chunks.accepted:

    def in_chunks(model, tokens, labels):
        model.activation_checkpointing_enable()
        hidden = model.model(tokens).last_hidden_state[:, :-1]  # the last predicts nothing
        targets = labels[:, 1:].flatten()
        return loss_in_pieces(hidden.flatten(0, 1), model.lm_head.weight, targets, 128)


exercises.check_in_chunks(in_chunks)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# Each line runs on a new model. Two of them keep the results of listed operators, and the compiler chooses what to keep within a budget, half of its usual bytes. **Guess first:** which of the two lists saves FLOPs?
#
# </div>
# <div lang="zh">
#
# 每一行代码都在一个新的模型上运行。其中两行保留列表里的算子的结果，编译器则在预算之内自己选择保留什么，预算是它平时保留字节数的一半。**先猜**：这两份列表，哪一份能省 FLOPs？
#
# </div>

# %%
from torch.utils.checkpoint import create_selective_checkpoint_contexts as contexts


def keep(*operators):
    return {"use_reentrant": False, "context_fn": partial(contexts, list(operators))}


attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
keep_addmm = keep(torch.ops.aten.addmm.default)
keep_mm, older = keep(torch.ops.aten.mm.default, attention), {"use_reentrant": True}
torch._functorch.config.activation_memory_budget = 0.5  # read by the compiler alone
own_code.measured_lines(in_chunks, keep_addmm=keep_addmm, keep_mm=keep_mm, older=older)

# %% [markdown]
# <div lang="en">
#
# The first line lowers the peak by 79 MB. Its older name still works, and warns that `transformers` 6 will remove it. Without `use_reentrant`, `transformers` 5.23 takes the newer mode. The older one never stops early, so it computes more here.
#
# `keep_addmm` changes nothing. A Llama's Linears have no bias, so they call `mm`, and everything is recomputed without a warning. (`checkpoint_blocks` warns.) With `keep_mm`, no product is computed twice.
#
# The compiler's budget limits what is saved for backward, not the peak. Here it costs about as many FLOPs as the first line and saves less. On a GPU, write `model.compile()`; its default backend needs a C++ compiler. Lesson 03 returns to this budget.
#
# Your row has the lowest peak, because most of the first line's peak was the logits.
#
# </div>
# <div lang="zh">
#
# 第一种写法让峰值降低 79 MB。它的旧名称还能用，但会警告说 `transformers` 6 将删除它。不写 `use_reentrant` 时，`transformers` 5.23 用的是较新的模式。较老的模式不会提前终止，所以在这里算得更多。
#
# `keep_addmm` 什么也没有改变，因为 Llama 的 Linear 没有偏置，调用的是 `mm`，结果全部都要重新计算，而且没有警告。（`checkpoint_blocks` 会警告。）用 `keep_mm` 时，没有一次乘法要做两遍。
#
# 编译器的预算限制的是为反向保存的字节，不是峰值。在这里，它的 FLOPs 与第一种写法差不多，省下的内存却更少。有 GPU 时写 `model.compile()` 即可，它默认的后端需要 C++ 编译器。第 03 课还会用到这个预算。
#
# 你填的那一行峰值最低，因为第一种写法的峰值大部分来自 logits。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# | where | the same, not run here |
# |---|---|
# | Trainer, TRL | `TrainingArguments(activation_checkpointing=True)` |
# | PyTorch with FSDP2 | `checkpoint_wrapper(layer)` before `fully_shard` |
# | torchtitan | activation checkpoint mode `"full"` or `"selective"` in the training configuration |
# | Megatron-LM | `--recompute-granularity full --recompute-method uniform --recompute-num-layers 1`, or `--recompute-granularity selective`, which recomputes the middle of attention |
# | DeepSpeed | `deepspeed.checkpointing.checkpoint(block, x)` |
#
# </div>
# <div lang="zh">
#
# | 框架 | 同样的做法（此处未运行） |
# |---|---|
# | Trainer、TRL | `TrainingArguments(activation_checkpointing=True)` |
# | PyTorch 与 FSDP2 | 在 `fully_shard` 之前写 `checkpoint_wrapper(layer)` |
# | torchtitan | 训练配置里的激活检查点模式 `"full"` 或 `"selective"` |
# | Megatron-LM | `--recompute-granularity full --recompute-method uniform --recompute-num-layers 1`，或只重计算注意力中间部分的 `--recompute-granularity selective` |
# | DeepSpeed | `deepspeed.checkpointing.checkpoint(block, x)` |
#
# </div>

# %% [markdown]
# ## 2.10 Claims and measurements / 说法与实测
#
# <div lang="en">
#
# Here are four common claims, tested on the step of section 2.6 and the layers of section 2.5.
#
# </div>
# <div lang="zh">
#
# 下面是四种常见的说法，用 2.6 节的训练步和 2.5 节的各层来检验。
#
# </div>

# %% slide="result"
figures.what_you_may_have_read(arms, alone)

# %% [markdown] slide={"en": "The same step of the same decoder, one technique a row.\n\nWhat is the largest part of these 134.0 MB?", "zh": "同一个解码器的同一步，一种技术一行。\n\n这 134.0 MB 里，最大的是哪一部分？"}
# ## 2.11 The ledger / 账本
#
# <div lang="en">
#
# This lesson adds its row to the ledger:
#
# </div>
# <div lang="zh">
#
# 本课在账本里添上自己的一行：
#
# </div>

# %% slide="result"
ledger("02", "checkpoint each layer", arms["each layer"])

# %% [markdown] slide={"en": "Keep the input, compute the rest again: it saves what is absent at the peak.\n\nFLOPs are not time. The loss is a block, too.", "zh": "留下输入，其余再算：省下的是峰值那一刻不在的东西。\n\nFLOPs 不是时间。损失也是一个块。"}
# ## 2.12 Summary / 小结
#
# <div lang="en">
#
# - A checkpoint keeps the input of a block and recomputes its activations in backward. Always write `use_reentrant=False`.
# - It saves what is not in memory at the peak. Without a head, the last layer's checkpoint saves nothing. A formula for one moment fails where another moment is higher.
# - One more forward pass adds about a third of a step's FLOPs if all weights are trained, and less with early stop. Keeping the linear layers' products costs 2% here, and more with longer sequences.
# - Whether groups of layers save memory depends on the depth, and on whether gradients exist from the start.
# - The loss is a block, too. In small chunks, it needs two to three times its matrix here.
#
# **Next:** [lesson 03](03_sqrt_schedule.ipynb) asks which blocks to forget.
#
# </div>
# <div lang="zh">
#
# - 检查点只保存一个块的输入，到反向时再重新计算激活值。一定要写 `use_reentrant=False`。
# - 省下的是峰值那一刻不在内存里的东西。只有若干层的网络，给最后一层加检查点什么也不省。公式描述一个时刻，别的时刻更高时，它就不再成立。
# - 全部权重都训练时，多做一次前向，一步的 FLOPs 约增加三分之一，有提前终止时少一些。如果保留线性层的乘积，FLOPs 在这里只增加 2%，序列更长时增加得更多。
# - 几层合用一个检查点是否更省，取决于层数，也取决于梯度是否一开始就存在。
# - 损失也可以看作一个块，分成小段计算。只要小段足够小，它在这里所需的内存就是词表矩阵的两到三倍。
#
# **下一步**：[第 03 课](03_sqrt_schedule.ipynb)讨论该忘掉哪些块。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **Sources.** Chen et al. 2016, *Training Deep Nets with Sublinear Memory Cost*, arXiv:1604.06174. Korthikanti et al. 2022, *Reducing Activation Recomputation in Large Transformer Models*, arXiv:2205.05198 (selective recomputation). Hsu et al. 2024, *Liger Kernel*, arXiv:2410.10989, and Wijmans et al. 2024, *Cut Your Losses in Large-Vocabulary Language Models*, arXiv:2411.09009 (the loss in chunks). PyTorch documentation of `torch.utils.checkpoint`.
#
# </div>
# <div lang="zh">
#
# **出处。** Chen et al. 2016，*Training Deep Nets with Sublinear Memory Cost*，arXiv:1604.06174。Korthikanti et al. 2022，*Reducing Activation Recomputation in Large Transformer Models*，arXiv:2205.05198（选择性重计算）。Hsu et al. 2024，*Liger Kernel*，arXiv:2410.10989，以及 Wijmans et al. 2024，*Cut Your Losses in Large-Vocabulary Language Models*，arXiv:2411.09009（损失分成小段计算）。PyTorch 文档中的 `torch.utils.checkpoint`。
#
# </div>

# %% [markdown]
# ## In depth / 深入
#
# <div lang="en">
#
# No other lesson needs these sections, and each can be read alone.
#
# </div>
# <div lang="zh">
#
# 其他各课用不到以下各节，各节也可以单独读。
#
# </div>

# %% [markdown]
# ## 2.13 The newer mode, and what short versions lack / 新模式，以及简短的写法还缺什么
#
# <div lang="en">
#
# **Exercise 6.** Write the newer mode of section 2.3. `forget` returns the next number: with `numbers = count()`, `next(numbers)` is 0, 1, 2 and so on. `bring_back` runs the block again when it is called for the first time. That run needs `torch.enable_grad()`, hooks of its own (`saved_tensors_hooks(collect, bring_back)`), and an input that requires a gradient if `x` does: `x.detach()` with a graph of its own, or `x` itself, because nothing goes backward through the second run's graph.
#
# </div>
# <div lang="zh">
#
# **练习 6。** 写出 2.3 节的新模式。`forget` 返回下一个编号：`numbers = count()` 之后，`next(numbers)` 依次是 0、1、2 等等。`bring_back` 第一次被调用时，把块再跑一遍。这一遍要有 `torch.enable_grad()`，要有自己的钩子（`saved_tensors_hooks(collect, bring_back)`），还要有一个输入，`x` 需要梯度时，它也要需要梯度。可以用另起一张图的 `x.detach()`，也可以直接用 `x`，因为不会有反向沿第二遍的图走。
#
# </div>

# %% minutes=10
from itertools import count

from torch.autograd.graph import saved_tensors_hooks


def with_hooks(block, x):
    found = []

    def collect(tensor):
        found.append(tensor.detach())

    def forget(tensor):
        return tensor

    def bring_back(number):
        return number

    with saved_tensors_hooks(forget, bring_back):
        return block(x)


exercises.check_hooks(with_hooks)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not exercises.check_hooks.accepted:

    def with_hooks(block, x):
        numbers, found = count(), []

        def collect(tensor):
            found.append(tensor.detach())

        def forget(tensor):
            return next(numbers)

        def bring_back(number):
            if not found:
                with torch.enable_grad(), saved_tensors_hooks(collect, bring_back):
                    block(x.detach().requires_grad_(x.requires_grad))
            return found[number]

        with saved_tensors_hooks(forget, bring_back):
            return block(x)


exercises.check_hooks(with_hooks)
### END SOLUTION

# %%
from course_lib.lessons.lesson_02.modes import gaps

runs = {"MyCheckpoint": MyCheckpoint.apply, "with_hooks": with_hooks, **runs}
gaps(runs)

# %% [markdown]
# <div lang="en">
#
# `with_hooks` keeps everything that it has recomputed until the block is done. The libraries release each tensor after its use.
#
# If the recomputation saves fewer tensors than the first run, or tensors of another shape or dtype, PyTorch raises a `CheckpointError`. It does not notice other numbers in tensors of the same shape, and then the gradients are wrong. The block may read something that has changed since, such as a counter or a cache (Hugging Face's encoder-decoders need `use_cache=False`). Or the module was changed between forward and backward, for example by `eval()`:
#
# </div>
# <div lang="zh">
#
# `with_hooks` 把重新算出来的张量一直留到整个块做完，两个库则是用完一个就释放一个。
#
# 如果重计算时保存的张量比第一遍少，或者形状、dtype 不同，PyTorch 会抛出 `CheckpointError`。如果张量的形状相同，只是数值不同，PyTorch 发现不了，算出的梯度就是错的。重计算与第一遍不同，可能是因为块读取的某个状态已经变了，例如计数器或缓存（训练 Hugging Face 的编码器–解码器模型时要设 `use_cache=False`）。也可能是前向与反向之间改动了模块，例如调用了 `eval()`：
#
# </div>

# %%
calls, module = count(), nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
causes = {"eval": module, "counter": lambda x: x.sin().exp() if next(calls) == 0 else x.sin()}
for cause, run in causes.items():
    output = checkpoint(run, torch.ones(4, requires_grad=True), use_reentrant=False)
    module.eval()
    try:
        output.sum().backward()
    except torch.utils.checkpoint.CheckpointError as error:
        print(f"{cause}:", str(error).splitlines()[0])

# %% [markdown]
# ## 2.14 Reentrant or not: a table of experiments / 可重入与否：一张由实验填成的表
#
# <div lang="en">
#
# ✓ means that the function ran twice and that the gradient equals the one without a checkpoint.
#
# </div>
# <div lang="zh">
#
# ✓ 表示函数运行了两次，而且梯度与不用检查点时相等。
#
# </div>

# %%
from course_lib.lessons.lesson_02.modes import modes

answers = modes(readable)
print("as in PyTorch:", answers == modes(checkpoint))
table(["case", "reentrant", "non-reentrant"], answers)

# %% [markdown]
# <div lang="en">
#
# `torch.func.grad` forbids hooks on saved tensors, so the non-reentrant mode fails. In the first row the block's output is the loss, so backward finds no graph.
#
# </div>
# <div lang="zh">
#
# `torch.func.grad` 不允许给保存的张量挂钩子，所以非可重入模式会报错。第一行里，块的输出就是损失，因此反向找不到计算图。
#
# </div>

# %% [markdown]
# ## 2.15 Selective checkpointing in fifteen lines / 十五行写出选择性检查点
#
# <div lang="en">
#
# How can a recomputation *skip* a product? A dispatch mode sees every operator (lesson 01). In the first run it keeps the results of the chosen operators. In the second run it returns them in the same order, and the operators do not run. `context_fn` returns both contexts.
#
# </div>
# <div lang="zh">
#
# 重计算怎么能**跳过**一次乘法？分发模式能看到每一个算子（第 01 课）。第一遍里，它保留选中的算子的结果。第二遍里，它按同样的顺序交出这些结果，算子不再运行。`context_fn` 返回的就是两遍各自的上下文。
#
# </div>

# %%
from torch.utils._python_dispatch import TorchDispatchMode


class Keep(TorchDispatchMode):
    def __init__(self, kept, second):
        super().__init__()
        self.kept, self.second = kept, second

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator in products and self.second:
            return self.kept.pop(0)
        result = operator(*args, **(kwargs or {}))
        if operator in products:
            self.kept.append(result.detach())
        return result


# %%
from course_lib.lessons.lesson_02 import in_depth


def selective():
    kept = []
    return Keep(kept, second=False), Keep(kept, second=True)


block = DecoderLayer(256, 8)
kept = {"none kept": None, "products kept": selective}
in_depth.compare_kept(gradients, block, x, kept)

# %% [markdown]
# ## 2.16 Random numbers and state / 随机数与状态
#
# <div lang="en">
#
# ✓ means that gradients, state and later random numbers are those of a model without checkpoints. The columns are options of `checkpoint_blocks`.
#
# </div>
# <div lang="zh">
#
# 表中的 ✓ 表示，梯度、状态和之后的随机数都与没有检查点的模型相同。各列是 `checkpoint_blocks` 的选项。
#
# </div>

# %%
in_depth.repeats()

# %% [markdown]
# <div lang="en">
#
# BatchNorm's output is right, but its running statistics move twice for one batch. They must not change during the recomputation:
#
# </div>
# <div lang="zh">
#
# BatchNorm 的输出没有错，但同一个批次让它的滑动统计量更新了两次。补救的办法，是让统计量在重计算时保持不变：
#
# </div>

# %%
from contextlib import nullcontext


def run_twice(norm):
    return nullcontext(), in_depth.statistics_unchanged(norm)  # for the first run, for the second


in_depth.statistics_after(run_twice)

# %% [markdown]
# ## 2.17 Attention over longer sequences / 更长序列上的注意力
#
# <div lang="en">
#
# An attention layer is used three times. Two of the three passes save $2 (5 s b h + a s^2 b)$ numbers, and the checkpoints keep their inputs. For short sequences the peak comes later, with gradients that the formula leaves out.
#
# </div>
# <div lang="zh">
#
# 同一个注意力层连用三次。其中两次原本要保存 $2 (5 s b h + a s^2 b)$ 个数，检查点只保存它们的输入。序列短时，峰值出现得较晚，公式没有计入那时的梯度。
#
# </div>

# %%
rows = []
for s in (256, 512, 1024):  # the outputs are equal, too
    predicted = 4 * 2 * (5 * s * 128 + 4 * s**2 - s * 128)
    rows.append((f"s = {s}", predicted, in_depth.attention_saving(s)))
predictions(rows)

# %% [markdown]
# ## 2.18 A training loop with its log / 带日志的训练循环
#
# <div lang="en">
#
# A post-norm layer (model size 512, 8 heads) is trained with Adam, with and without a checkpoint.
#
# </div>
# <div lang="zh">
#
# 一个 post-norm（后置归一化）层，模型维度 512，8 个头，用 Adam 训练，加检查点，或者不加。
#
# </div>

# %%
losses, log = in_depth.train(checkpointed=True)
without, _ = in_depth.train(checkpointed=False)
table(["log", "losses equal"], [(f"`{log[0]}`", losses == without)])

# %% [markdown]
# ## 2.19 `checkpoint_sequential`, and older claims / `checkpoint_sequential`，以及更早的说法
#
# <div lang="en">
#
# `checkpoint_sequential` divides an `nn.Sequential` into segments, and puts a checkpoint around each segment except the last.
#
# </div>
# <div lang="zh">
#
# `checkpoint_sequential` 把一个 `nn.Sequential` 分成几段，除最后一段外，每段加一个检查点。
#
# </div>

# %%
from torch.utils.checkpoint import checkpoint_sequential

in_depth.peaks_of_segments(partial(checkpoint_sequential, use_reentrant=False))

# %%
from course_lib.lessons.lesson_02 import claims

claims.older_claims()

# %% [markdown]
# ## 2.20 Seconds, here and on a GPU / 秒数：本机与 GPU
#
# <div lang="en">
#
# Keeping the products costs few FLOPs, but Python is called for every operator, about 900 times per step. The second cell measures on your GPU, or shows the figures recorded on an H100 and an H200.
#
# With `keep_mm`, a Llama in bf16 computes no matrix product twice. Still, forward and backward take 23% longer than without checkpoints on the H200, and 32% longer on the H100. With the checkpoints and `compile()` together, they take 1% less time than with neither on the H200, and 7% less on the H100.
#
# </div>
# <div lang="zh">
#
# 保留乘积只多用很少的 FLOPs，但每遇到一个算子都要调用一次 Python，一步约 900 次。第二个单元格在你的 GPU 上测量；没有 GPU，就显示 H100 和 H200 的记录。
#
# 训练一个 bf16 的 Llama，用 `keep_mm` 时，没有一次矩阵乘法要做两遍，前向加反向却比没有检查点时慢：在 H200 上多花 23% 的时间，在 H100 上多花 32%。检查点和 `compile()` 一起用时，比两样都不用还略快，在 H200 上少用 1% 的时间，在 H100 上少用 7%。
#
# </div>

# %% tags=["nbval-ignore-output", "shows-seconds"]
decoders = {"plain": make_decoder(), "each layer": decoder_with()}
decoders["products kept"] = decoder_with(policy=products)
figures.seconds_beside_flops(decoders, arms)

# %% tags=["nbval-ignore-output", "shows-device"]
from course_lib.lessons import on_gpu

on_gpu("02")

# %% [markdown]
# ## 2.21 More exercises / 更多练习
#
# <div lang="en">
#
# **Exercise 7.** Write a checkpoint for blocks with dropout. The second run of each block must draw the mask of its first run, whatever else was drawn before and in between. Later random numbers must not change. `careful_checkpoint` is a function of `block` and `x`, or a Function.
#
# </div>
# <div lang="zh">
#
# **练习 7。** 为带 dropout 的块写一个检查点。不论之前和中间抽过什么数，每个块的第二遍都要抽到与第一遍相同的掩码，之后的随机数也不能改变。`careful_checkpoint` 是以 `block` 和 `x` 为参数的函数，或者一个 Function。
#
# </div>

# %% minutes=6
careful_checkpoint = None
exercises.check_dropout_checkpoint(careful_checkpoint)


# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
class Careful(torch.autograd.Function):
    @staticmethod
    def forward(context, block, x):
        context.block, context.state = block, torch.get_rng_state()
        context.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(context, gradient):
        again = context.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), torch.random.fork_rng():  # puts the state back at the end
            torch.set_rng_state(context.state)
            output = context.block(again)
        torch.autograd.backward(output, gradient)
        return None, again.grad


exercises.check_dropout_checkpoint(Careful.apply)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# **Exercise 8.** Forward and backward of the decoder may need at most 110 MB and 1.2 times the FLOPs. Which operators must a selective policy keep? With nothing kept, 63.2 MB are in memory during the backward pass of the loss. There each kept result adds its bytes eight times. `operators` is a list such as `[torch.ops.aten.gelu.default]`.
#
# </div>
# <div lang="zh">
#
# **练习 8。** 解码器的前向加反向，峰值不得超过 110 MB，FLOPs 不得超过 1.2 倍。选择性策略必须保留哪些算子？什么都不保留时，损失做反向的那一刻，内存里有 63.2 MB。每保留一种结果，这一刻就要加上它的字节数的八倍。`operators` 是一个列表，例如 `[torch.ops.aten.gelu.default]`。
#
# </div>

# %% minutes=4
operators = None
exercises.check_policy(operators)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
exercises.check_policy([torch.ops.aten.bmm.default])
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# **Exercise 9.** The loss of section 2.8, with one backward for the whole loss, may peak at 150 MB. What is the largest chunk that is a power of 2? Three tensors of a chunk's logits and one gradient of the matrix are in memory at once.
#
# </div>
# <div lang="zh">
#
# **练习 9。** 2.8 节的损失，各小段合在一次反向里，峰值不得超过 150 MB。每个小段最多可以有多少个 token（取 2 的幂）？同时在内存里的，是一小段的三份 logits 和一份矩阵的梯度。
#
# </div>

# %% minutes=2
answer = None
exercises.check_head_chunk(answer)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
matrix, hidden_bytes = 4 * 32_000 * 256, 4 * 1024 * 256
fits = [n for n in (64, 128, 256, 512) if 3 * 4 * n * 32_000 + matrix + hidden_bytes <= 150e6]
exercises.check_head_chunk(max(fits))
### END SOLUTION
