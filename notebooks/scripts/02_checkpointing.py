# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] slide={"en": "One line of code: the peak falls from 277.7 to 134.0 MB.\n\nIn the decoder's eight layers alone, the line saves no memory at one of the layers. Which layer?", "zh": "一行代码，峰值从 277.7 MB 降到 134.0 MB。\n\n只看解码器的八层，有一层加上这行代码，内存一点也不省。是哪一层？"}
# # 2 What if we forget activations and compute them again? (activation checkpointing) / 把激活值忘掉，用时再算，会怎样？（激活检查点、重计算）
#
# <div lang="en">
#
# In the training step of lesson 01, the decoder's eight layers keep 168 MB of activations. One line of code makes the decoder forget these activations and compute them again in backward. The peak falls from 277.7 MB to 134.0 MB, and no bit of the gradients changes.
#
# Now take the eight layers alone, without embedding and head, and apply the line to only one layer. At one of the eight layers, the line does not reduce the peak at all. Which layer is it, and why?
#
# </div>
# <div lang="zh">
#
# 在第 01 课的训练步里，解码器的八层一共保存 168 MB 的激活值。只要加一行代码，解码器就会忘掉这些激活值，到反向时再重新计算。这样，峰值从 277.7 MB 降到 134.0 MB，而梯度与原来逐比特相等。
#
# 再把这八层单独拿出来，去掉嵌入层和输出头，只给一层加这行代码。八层里有一层，加上这行代码，峰值一点也不降。是哪一层？为什么？
#
# </div>

# %%
from course_lib.teaching import language

language()

# %% [markdown]
# <div lang="en">
#
# **Goals** (118 minutes, in two sittings):
#
# - Write a checkpoint yourself, and predict the peak of a checkpointed step.
# - Learn which blocks are worth a checkpoint.
# - Write a policy that decides what to keep, and compute the loss in chunks.
# - Apply all these techniques to a Llama from Hugging Face.
#
# **What to know before**: lesson 01 (what a layer keeps for backward, storages, and the timeline of a step).
#
# </div>
# <div lang="zh">
#
# **目标**（共 118 分钟，分两次学）
#
# - 自己写一个检查点，预测加了检查点之后训练步的峰值。
# - 学会判断哪些块值得加检查点。
# - 写一个策略来决定保留什么，并把损失分成小段计算。
# - 把这些方法用到 Hugging Face Transformers 的 Llama 上。
#
# **预备知识**：第 01 课，即一层为反向保存什么、存储区，以及训练步的时间线。
#
# </div>

# %%
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

# %% [markdown] slide={"en": "Keep only a block's **input**, and run its forward again in backward.\n\n**Guess first.** In which order do three blocks a, b, c run?", "zh": "只留一个块的**输入**，反向时把这个块的前向再跑一遍。\n\n**先猜**：三个块 a、b、c 按什么顺序运行？"}
# ## 2.1 Watch it run / 看它怎样运行
#
# <div lang="en">
#
# Autograd keeps the tensors that backward will need. **Activation checkpointing** keeps only the **input** of a block. When backward arrives at the block, the block's forward runs once more. (The technique is also called gradient checkpointing or activation recomputation. Such a checkpoint is not a file of weights.)
#
# In PyTorch you write `torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)`; section 2.3 explains `use_reentrant`. In the next cell, each block records its name when it runs. **Guess first:** in which order do three checkpointed blocks a, b and c run, in forward and in backward?
#
# </div>
# <div lang="zh">
#
# autograd 会保存反向要用的张量。**激活检查点**（activation checkpointing，又称梯度检查点、激活重计算）只保存一个块的**输入**，等反向走到这个块，再把它的前向跑一遍。下文简称检查点，与存盘的模型权重文件不是一回事。
#
# 在 PyTorch 里写作 `torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)`，其中的 `use_reentrant` 留到 2.3 节解释。在下一个单元格里，每个块运行时都会记下自己的名字。**先猜**：a、b、c 三个块都加了检查点，它们的前向和反向按什么顺序运行？
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
    x.register_hook(partial(done, name))  # called when the gradient of x is complete
    x = checkpoint(block, name, x, use_reentrant=False)
x.sum().backward()
figures.draw_order(heard)

# %% [markdown]
# <div lang="en">
#
# First, all three blocks run forward. Then backward arrives at c, runs the forward of c again, and finishes c before it goes on to b. At any time, memory holds the blocks' inputs and the activations of at most one block.
#
# </div>
# <div lang="zh">
#
# 三个块先依次做前向。接着反向来到 c，把 c 的前向再跑一遍，做完 c 的反向，才轮到 b。除了各块的输入，任何时刻内存里都至多有一个块的激活值。
#
# </div>

# %% [markdown] slide={"en": "Forward records no graph, and backward runs the block again.\n\n**Write it.** What must backward return? What may not be live in between?", "zh": "前向不建计算图，反向把块再跑一遍。\n\n**自己写**：反向该返回什么？前向与反向之间，什么不该留在内存里？"}
# ## 2.2 Write it / 自己写
#
# <div lang="en">
#
# In a `torch.autograd.Function` you write forward and backward yourself. `MyCheckpoint.apply(block, x)` runs the Function. Backward receives the gradient of the output, and returns one gradient for each argument of `forward`. You need only these tools:
#
# - `context.save_for_backward(x)` keeps a tensor, and `context.saved_tensors` returns it in backward.
# - Inside a Function, no graph is recorded. `torch.enable_grad()` turns recording on.
# - `x.detach().requires_grad_()` returns a tensor that shares the data of x and begins a new graph.
# - `torch.autograd.backward(output, gradient)` goes backward from the output through its graph, and leaves gradients in `.grad`.
#
# </div>
# <div lang="zh">
#
# 在 `torch.autograd.Function` 里，前向和反向都由你自己写。运行时调用 `MyCheckpoint.apply(block, x)`。反向收到输出的梯度，要为 `forward` 的每个输入参数各返回一个梯度。用到的工具只有这些：
#
# - `context.save_for_backward(x)` 保存一个张量，反向时从 `context.saved_tensors` 取回。
# - Function 内部不记录计算图，`torch.enable_grad()` 可以把记录打开。
# - `x.detach().requires_grad_()` 与 x 共用数据，并成为一张新计算图的起点。
# - `torch.autograd.backward(output, gradient)` 从输出开始做反向，梯度放进 `.grad`。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **Exercise 1.** Write both functions. `forward` returns the block's output and records no graph. `backward` returns two values: `None` as the gradient of `block`, and the gradient of `x`.
#
# The check compares the gradients of the input and of the weight, counts the runs of the block, and measures the live bytes between forward and backward. Then the check runs two blocks in a row.
#
# </div>
# <div lang="zh">
#
# **练习 1。** 写出这两个函数。`forward` 返回块的输出，不记录计算图。`backward` 返回两个值，第一个是 `block` 的梯度，写 `None`，第二个是 `x` 的梯度。
#
# 检查时会比较输入的梯度和权重的梯度，统计块运行的次数，并查看前向与反向之间还有多少字节存活。之后再让两个块连着运行。
#
# </div>


# %% minutes=20
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

# %% [markdown] slide={"en": "The newer mode keeps a **number** instead of each tensor, and brings the tensor back later.\n\nAre the gradients equal, in all modes?", "zh": "新模式不留张量，只给每个张量留一个**编号**，要用时再把张量找回来。\n\n各种模式下，梯度都相等吗？"}
# ## 2.3 Two modes, and which one you get / 两种模式，你得到的是哪一种
#
# <div lang="en">
#
# Your checkpoint works like PyTorch's older mode, `use_reentrant=True`, in which autograd runs inside autograd. The newer mode, `use_reentrant=False`, records the graph as usual, and takes the tensors out of the graph with the two hooks of lesson 01. In forward, the first hook replaces each saved tensor by a number. In backward, the second hook receives such a number. At its first call, the second hook runs the block again, collects the tensors that this run saves, and returns the tensor with this number. You can write this mode in section 2.13.
#
# A block's input needs a gradient if the input is an activation, but not if it is data. **Guess first:** you pass data to a block with 12 parameters, and a head follows the block. How many of the 12 parameters get a gradient with your checkpoint? How many get a gradient with PyTorch's checkpoint, if you leave out `use_reentrant`?
#
# </div>
# <div lang="zh">
#
# 你写的检查点，就是 PyTorch 的旧模式 `use_reentrant=True`。旧模式叫可重入（reentrant），因为 autograd 在 autograd 里面又运行了一次。新模式 `use_reentrant=False` 照常建立计算图，再用第 01 课的两个钩子把图里的张量取走。前向时，第一个钩子给每个张量一个编号，图里只留下编号。反向时，第二个钩子拿到编号。这个钩子第一次被调用时，会把块再跑一遍，收集这一遍保存的张量，然后凭编号找到需要的张量。这种模式也可以自己写，见 2.13 节。
#
# 如果块的输入是激活值，输入就需要梯度。如果是数据，就不需要。**先猜**：一个块有 12 个参数，输入是数据，后面接一个输出头。用你的检查点时，12 个参数里有几个能得到梯度？用 PyTorch 的检查点而不写 `use_reentrant` 时，又有几个？
#
# </div>

# %%
block, x = DecoderLayer(256, 8), torch.randn(2, 128, 256, requires_grad=True)  # (b, s, h)
uneven = torch.linspace(-1, 2, x.numel()).view_as(x)  # the gradient of the output


def gradients(output):
    x.grad = None
    block.zero_grad()
    output.backward(uneven)
    return [x.grad, *(parameter.grad for parameter in block.parameters())]


# %% slide="result"
head, data, right, rows = nn.Linear(256, 1), torch.randn(2, 128, 256), gradients(block(x)), []
ways = {f"`{mode}`": partial(checkpoint, use_reentrant=mode) for mode in (True, False)}
ways |= {"`MyCheckpoint`": MyCheckpoint.apply, "left out": checkpoint}
for name, way in ways.items():
    with own_code.recorded_warnings() as heard:
        equal = all(map(torch.equal, right, gradients(way(block, x))))
        block.zero_grad()
        head(way(block, data)).sum().backward()
    trained = sum(parameter.grad is not None for parameter in block.parameters())
    rows.append((name, equal, f"{trained} / 12", len({f"{each.message}" for each in heard})))
print(heard[0].message)  # the warning if the option is left out
table(["`use_reentrant`", "gradients equal", "trained from data", "warnings"], rows)

# %% [markdown] slide={"en": "If the input needs no gradient, the older mode trains **0 of 12** parameters.\n\nIf you leave out the option, you get the older mode.", "zh": "输入不需要梯度时，用旧模式，12 个参数里有 **0** 个得到训练。\n\n不写这个选项，用的就是旧模式。"}
# <div lang="en">
#
# If no input tensor of a Function needs a gradient, the output has no graph. Therefore the head gets gradients, but the block gets none. PyTorch's older mode warns about this, but your checkpoint gives no warning. If you leave out `use_reentrant`, PyTorch 2.13 still uses the older mode, and gives a second warning (printed above). According to this warning, such a call raises an error in version 2.9 and later, but version 2.13 raises none. Always write `use_reentrant=False`.
#
# In both modes, a block must compute the same results twice. For the second run, PyTorch restores its own random state and the `autocast` settings, so dropout draws the same mask. PyTorch does not restore Python's random state or your module's counters (section 2.16). So the second run's result may differ, and PyTorch may raise a `CheckpointError` (section 2.14).
#
# </div>
# <div lang="zh">
#
# 如果 Function 的输入张量都不需要梯度，输出就不带计算图，所以输出头照常训练，块却得不到训练。你的检查点对此毫无提示，PyTorch 的旧模式会发出警告。如果不写 `use_reentrant`，PyTorch 2.13 仍用旧模式，并且多发一条警告，已打印在上面。警告里说，从 2.9 版起，这样调用会报错，但 2.13 版其实不报错。所以一定要写 `use_reentrant=False`。
#
# 无论用哪种模式，一个块都要运行两遍，两遍的结果必须相同。PyTorch 会恢复自己的随机数状态和 `autocast` 设置，所以 dropout 的掩码不变。Python 的随机数和模块自己的计数器，PyTorch 都不会恢复（2.16 节），因此两遍的结果可能不同，这时可能抛出 `CheckpointError`（2.14 节）。
#
# </div>

# %% [markdown]
# ## 2.4 The whole decoder in one line / 一行代码，整个解码器
#
# <div lang="en">
#
# `checkpoint_blocks(model, "layers.*")` puts a checkpoint around every block whose name matches the pattern, in any model that calls its blocks as modules. As in lesson 01, we measure the second step with Adam. All gradients are released before this step, so gradients **arrive during backward**, except in section 2.17.
#
# </div>
# <div lang="zh">
#
# 只要模型把各个块当作模块来调用，`checkpoint_blocks(model, "layers.*")` 就会给名称匹配的每个块各加一个检查点。我们测量的还是第 01 课的训练步，用 Adam，取第二步。这一步开始之前，梯度已经释放，所以梯度**在反向中才陆续产生**，只有 2.17 节例外。
#
# </div>

# %%
sizes = {"vocabulary": 2048, "hidden": 256, "heads": 8, "layers": 8, "sequence": 128}
make_decoder = partial(Decoder, **sizes)
plain, forgetful = make_decoder(), make_decoder()
checkpoint_blocks(forgetful, "layers.*")
step = figures.metered_step  # lesson 01's step with Adam, under the meter
meters = {"plain": step(plain), "checkpointed": step(forgetful)}

# %% slide="result"
timelines(
    meters, title="One mountain becomes eight teeth, and the peak moves to the end of backward"
)

# %% [markdown] slide={"en": "A layer keeps 20,987,904 bytes. A checkpoint keeps its input and 5,056 bytes.\n\n**Guess first.** Peak without checkpoints: 277,682,584 bytes. With $k$ checkpoints?", "zh": "一层保存 20,987,904 字节，检查点只保存这一层的输入和 5,056 字节。\n\n**先猜**：不加检查点时，峰值是 277,682,584 字节。加 $k$ 个检查点呢？"}
# <div lang="en">
#
# Each tooth in the figure is one layer whose activations are in memory again. A checkpoint keeps the layer's input, $b s h$ numbers, and 5,056 bytes for the state of the random number generator. Without a checkpoint, a layer keeps 20,987,904 bytes (your sum in lesson 01). When backward starts, a checkpointed layer still keeps only its input and the generator's state. The step without checkpoints has its peak, 277,682,584 bytes, at this point.
#
# **Exercise 2.** The first $k$ of the eight layers have a checkpoint. What is the peak, in bytes?
#
# </div>
# <div lang="zh">
#
# 图中的每个锯齿对应一层。反向进行到这一层时，它的激活值又回到了内存里。检查点保存这一层的输入，共 $b s h$ 个数，另用 5,056 字节保存随机数发生器的状态。不加检查点时，一层保存 20,987,904 字节（第 01 课你算出的总和）。反向开始时，加了检查点的层只保存着输入和上述状态。没有检查点时，训练步的峰值 277,682,584 字节正好出现在这一刻。
#
# **练习 2。** 给八层中的前 $k$ 层加检查点，峰值是多少字节？
#
# </div>


# %% minutes=8
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
# Your formula is exact to the byte for $k = 0$ and $7$, and 16 MB too low for $k = 8$. The formula describes one point of the step, the start of backward. The eighth checkpoint lowers the memory at this point so far that the peak moves to the end of backward. At that point, one layer's activations and nearly all gradients are in memory.
#
# </div>
# <div lang="zh">
#
# $k = 0$ 和 $7$ 时，公式一字节不差，$k = 8$ 时却少算了 16 MB。公式描述的只是反向开始的那一刻。加上最后一个检查点之后，这一刻的内存降得很低，峰值就换到了反向快结束的时候，那时内存里有一层的激活值和几乎全部的梯度。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **End of the first sitting** (58 minutes). You have written a checkpoint. You have also predicted, to the byte, the peak of a decoder with up to seven checkpointed layers. The second sitting asks which layer is worth a checkpoint and what a checkpoint should keep. This sitting treats the loss as a block, and ends with a Llama from Hugging Face.
#
# </div>
# <div lang="zh">
#
# **第一次学习到此结束**（58 分钟）。你自己写出了检查点，还预测了解码器的峰值，只要加检查点的不超过七层，预测就与实测一字节不差。第二次学习讨论哪一层值得加检查点、该保留什么，再把损失也当作一个块，最后把这些方法用到 Hugging Face Transformers 的 Llama 上。
#
# </div>

# %% [markdown] slide={"en": "One checkpoint only.\n\n**Guess first.** Around which of eight layers does it save least? And in the decoder, with its head?", "zh": "只能加一个检查点。\n\n**先猜**：八层里，加在哪一层上省得最少？在带输出头的解码器里呢？"}
# ## 2.5 Which block? / 检查点加在哪一块上？
#
# <div lang="en">
#
# We place one checkpoint in each of two networks: the eight layers alone, with a mean of squares as loss, and the decoder with its head. (The decoder's peak without checkpoints is 222.7 MB, not counting Adam's 55.0 MB.)
#
# **Exercise 3.** Guess before you measure. In the eight layers alone, a checkpoint around one layer does not reduce the peak. Which layer? Does a checkpoint around the same layer reduce the decoder's peak? Write the layer's number, from 0 to 7, and `True` or `False`.
#
# </div>
# <div lang="zh">
#
# 假设只能用一个检查点。我们来看两个网络，一个只有这八层，损失是输出平方的均值，另一个是带输出头的解码器。（不加检查点，也不计 Adam 的 55.0 MB，这个解码器的峰值是 222.7 MB。）
#
# **练习 3。** 先猜，再测量。在只有八层的网络里，检查点加在哪一层上，峰值不会降低？在解码器里，给同一层加检查点，峰值会降低吗？填写层的编号（0 到 7），以及 `True`（会）或 `False`（不会）。
#
# </div>

# %% minutes=3
layer, saves_in_decoder = None, None
exercises.check_which_block((layer, saves_in_decoder))

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
exercises.check_which_block((7, True))
### END SOLUTION

# %% slide="result"
peak = figures.peak_with_checkpoint  # peak(layer) of forward and backward; None: no checkpoint
alone = {layer: peak(layer, head=False) for layer in (None, *range(8))}
whole = {layer: peak(layer) for layer in (None, *range(8))}
figures.draw_which_block(alone, whole)

# %% [markdown] slide={"en": "A checkpoint saves the bytes that, because of it, are not in memory **at the peak**.\n\nAsk when the peak is, and what is live then.", "zh": "一个检查点能省多少，要看**峰值那一刻**，有哪些字节因为它而不在内存里。\n\n先问峰值在何时，再问那一刻内存里有什么。"}
# <div lang="en">
#
# A checkpoint reduces the peak by the bytes that it removes from memory **at the peak**. Backward begins with the last layer, so this layer is recomputed while all other layers' activations are in memory. In the eight layers alone, a checkpoint around the last layer saves nothing, and costs 5,056 bytes for the random state. A checkpoint around one of layers 0 to 5 saves the layer's activations except its input. Around layer 6, a checkpoint saves 2.1 MB less, because the peak comes later. By then, memory has gained layer 7's gradients (3.2 MB) and lost one layer input (1.0 MB).
#
# In the decoder, a checkpoint around the last layer also reduces the peak, because the decoder's peak comes earlier, in the loss's backward. This peak contains three tensors as large as the logits, together 25 MB.
#
# </div>
# <div lang="zh">
#
# 一个检查点能省多少，要看**峰值那一刻**，有哪些张量因为它而不在内存里。反向从最后一层开始，所以重新计算最后一层时，其余各层的激活值都还在内存里。在只有八层的网络里，给最后一层加检查点，峰值不会降低，还要多占 5,056 字节来保存随机数发生器的状态。给第 0 到第 5 层中的一层加检查点，省下的是这一层的激活值减去它的输入。给第 6 层加检查点要少省 2.1 MB，因为峰值来得更晚，那时内存里多出第 7 层的梯度（3.2 MB），少了一份层输入（1.0 MB）。
#
# 在解码器里，给最后一层加检查点也能降低峰值，因为解码器的峰值出现得更早，是在损失的反向里。那一刻内存里有三个 logits 大小的张量，共 25 MB。
#
# </div>

# %% [markdown] slide={"en": "Keep some results, recompute the others. PyTorch asks a **policy** after each operator.\n\n**Write it.** Keep every second matrix product of the linear layers.", "zh": "保留一部分结果，其余的重新计算。每运行一个算子，PyTorch 都问一次**策略**要不要保留。\n\n**自己写一个策略**，线性层的矩阵乘积每两个保留一个。"}
# ## 2.6 A policy of your own / 自己写一个策略
#
# <div lang="en">
#
# **Selective checkpointing** keeps the results of some operators and recomputes the others. A **policy** is a function that PyTorch calls after each operator of the forward pass. The policy returns `MUST_SAVE` or `PREFER_RECOMPUTE`. The checkpoint's argument `context_fn` is a function that makes a new policy for each checkpoint. The policy below keeps the matrix products of the linear layers. A Linear calls `addmm` if it has a bias, and `mm` otherwise.
#
# </div>
# <div lang="zh">
#
# **选择性检查点**保留一部分算子的结果，其余的重新计算，由一个**策略**（policy）函数决定保留哪些结果。前向里每运行一个算子，PyTorch 就调用一次策略，策略返回 `MUST_SAVE`（保留）或 `PREFER_RECOMPUTE`（重计算）。检查点的参数 `context_fn` 是一个函数，它为每个检查点新建一个策略。下面的策略保留线性层的矩阵乘积。带偏置的 Linear 调用 `addmm`，不带偏置的 Linear 调用 `mm`。
#
# </div>

# %%
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

products = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]


def keep_products():
    def policy(context, operator, *args, **kwargs):
        kept = operator in products
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


# %% [markdown]
# <div lang="en">
#
# **Exercise 4.** Besides attention's results, torchtitan's selective mode keeps only every second matrix product. Write `every_second`, a function like `keep_products`. The new policy keeps the first, third, fifth ... matrix product of the linear layers. Count `addmm` and `mm` together, and start from one in each checkpoint.
#
# PyTorch 2.13 calls the policy only in forward. Older versions such as 2.9 call the policy again in the recomputation, with `context.is_recompute` true, so the policy must count the recomputation's products separately.
#
# </div>
# <div lang="zh">
#
# **练习 4。** torchtitan 的选择性模式保留注意力的结果，此外，每两个矩阵乘积只保留一个。请照 `keep_products` 的样子写出 `every_second`，保留线性层的第一、第三、第五……个矩阵乘积。`addmm` 和 `mm` 合在一起数，每个检查点都从一数起。
#
# PyTorch 2.13 只在前向里调用策略。较早的版本（例如 2.9）在重计算时还会再调用策略，这时 `context.is_recompute` 为真。在这些版本里，前向和重计算的乘积要分开来数。
#
# </div>


# %% minutes=8
def every_second():
    return None


exercises.check_policy(every_second)

# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not exercises.check_policy.accepted:

    def every_second():
        counted = {False: 0, True: 0}

        def policy(context, operator, *args, **kwargs):
            if operator in products:
                counted[context.is_recompute] += 1
                if counted[context.is_recompute] % 2 == 1:
                    return CheckpointPolicy.MUST_SAVE
            return CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)


exercises.check_policy(every_second)
### END SOLUTION

# %% [markdown]
# ## 2.7 Policies on one scale / 同一标尺上的几种策略
#
# <div lang="en">
#
# The same step now runs without checkpoints and with five kinds of checkpoints. **Guess first:** by what fraction does one more forward pass raise a step's FLOPs? For each matrix product in forward, backward computes two: one for the input's gradient and one for the weight's gradient.
#
# </div>
# <div lang="zh">
#
# 现在用五种加检查点的做法，把同一个训练步各运行一次，再与不用检查点的基线比较。**先猜**：多做一次前向，会让整个训练步的 FLOPs 增加几分之几？前向每做一次矩阵乘法，反向就要做两次，一次求输入的梯度，一次求权重的梯度。
#
# </div>


# %%
def decoder_with(group=1, **options):  # options of PyTorch's checkpoint
    decoder = make_decoder()
    parts = [decoder.layers[i : i + group] for i in range(0, 8, group)]
    decoder.layers = nn.ModuleList(nn.Sequential(*part) for part in parts)
    for part in decoder.layers:
        part.forward = partial(checkpoint, part.forward, use_reentrant=False, **options)
    return decoder


# %% slide="result"
ways = {"each layer": {}, "products kept": {"context_fn": keep_products}}
if exercises.check_policy.accepted:
    ways["every second product kept"] = {"context_fn": every_second}
ways |= {"two layers per checkpoint": {"group": 2}, "eight layers per checkpoint": {"group": 8}}
arms = {"plain": figures.measured_step(make_decoder)}  # peak and FLOPs of a symbolic step
arms |= {name: figures.measured_step(decoder_with, **own) for name, own in ways.items()}
figures.draw_policies(arms)

# %% [markdown] slide={"en": "If all weights are trained, another forward adds about a third to the FLOPs. Here, the step needs 1.21 times the FLOPs.\n\nAll matrix products of the linear layers kept: 2% more FLOPs. Every second one kept: 5%.", "zh": "全部权重都训练时，多一次前向，FLOPs 约增加三分之一。这里是基线的 1.21 倍。\n\n保留线性层的全部矩阵乘积，FLOPs 多 2%。每两个保留一个，多 5%。"}
# <div lang="en">
#
# If all weights are trained, one more forward pass adds about a third to the step's FLOPs. Here, a checkpoint around each layer needs only 1.21 times the baseline's FLOPs, for two reasons. First, the head is not recomputed. Second, a recomputation stops as soon as the last saved tensor exists (**early stop**), so each checkpoint skips its last matrix product. With frozen weights, another forward pass can add about half, because backward needs fewer FLOPs.
#
# </div>
# <div lang="zh">
#
# 如果全部权重都训练，多一次前向会让 FLOPs 增加约三分之一。这里每层一个检查点，FLOPs 却只是基线的 1.21 倍，原因有两个。一是输出头不用重新计算。二是最后一个要保存的张量一算出来，重计算就停止（**提前终止**），所以每个检查点都省去最后一次矩阵乘法。如果冻结了部分权重，反向的计算变少，多做的这次前向可能让 FLOPs 增加约一半。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# Keeping all matrix products of the linear layers reduces the baseline's peak by 84 MB for 2% more FLOPs. (With 2048 tokens per sequence, it costs 18% more FLOPs, because attention's own matrix products run again and are larger.) Your policy reduces the peak by 101 MB for 5% more FLOPs. If your policy kept the second and fourth of a layer's four products, the FLOPs would rise by 19%. The second product is small, and early stop skips the fourth anyway. Keeping every operator's result needs 429.8 MB, more than without checkpoints.
#
# One checkpoint around all eight layers costs the most FLOPs and reduces the peak by only 19 MB.
#
# **FLOPs are not time.** The counter counts matrix products only, but these policies also recompute GELU and softmax. Section 2.20 measures seconds.
#
# </div>
# <div lang="zh">
#
# 保留线性层的全部矩阵乘积，峰值降低 84 MB，FLOPs 只比基线多 2%。（每条序列有 2048 个 token 时要多 18%，因为注意力内部的矩阵乘法要再做一遍，序列越长，这部分越大。）你的策略让峰值降低 101 MB，FLOPs 多 5%。每层的线性层有四个矩阵乘积，如果改为保留第二和第四个，FLOPs 多 19%，因为第二个乘积较小，而第四个由于提前终止，本来就不用重新计算。如果保留每个算子的结果，就需要 429.8 MB，比不用检查点时还多。
#
# 八层合用一个检查点时，FLOPs 增加得最多，峰值却只降低 19 MB。
#
# **FLOPs 不是时间。** 计数器只统计矩阵乘法，而这些策略还要重新计算 GELU 和 softmax。2.20 节测量实际的用时。
#
# </div>

# %% [markdown] slide={"en": "1024 tokens, 32,000 words: logits of 131 MB, three times over.\n\nCut the tokens into chunks. How does the loss stay the same?", "zh": "1024 个 token，词表 32,000：logits 131 MB，而且有三份。\n\n把 token 切成小段，怎样让损失不变？"}
# ## 2.8 The loss, in chunks / 把损失分成小段计算
#
# <div lang="en">
#
# The head with its loss is a block, too, often the largest. At its peak, it needs three tensors as large as the logits. For 1024 tokens and a vocabulary of 32,000, each tensor takes 131 MB. If you divide the tokens into **chunks** and put a checkpoint around each chunk, the logits never exist as a whole.
#
# **Exercise 5.** Write this loss in about eight lines. The result must equal `F.cross_entropy(hidden @ weight.T, targets)`, even if the last chunk is shorter. `chunk` is the number of tokens per chunk. The loss is the mean over all targets except those of −100 (`ignore_index`). In fine-tuning, prompts and padding have this target.
#
# </div>
# <div lang="zh">
#
# **输出头与损失**合在一起也是一个块，而且常常是最大的一块。峰值时，它需要三个 logits 大小的张量。如果有 1024 个 token，词表为 32,000，每个这样的张量占 131 MB。只要把 token 分成**小段**（chunk），给每个小段加一个检查点，完整的 logits 就不会出现在内存里。
#
# **练习 5。** 用八行左右写出这个损失。它必须等于 `F.cross_entropy(hidden @ weight.T, targets)`，最后一个小段较短时也一样。`chunk` 是每个小段的 token 数。损失是均值，不计目标值为 −100 的 token（`ignore_index`）。微调时，提示词和填充的目标值就是 −100。
#
# </div>


# %% minutes=10
def loss_in_pieces(hidden, weight, targets, chunk):  # shapes (n, h), (v, h), (n,)
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
        return total / (targets != -100).sum()  # targets of -100 add nothing to the sum


exercises.check_loss_in_pieces(loss_in_pieces)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# With small chunks, the peak no longer comes from the logits, but from three tensors as large as the head's weight matrix (33 MB each). Section 2.17 shows two ways with only two such tensors. Fused losses such as Liger's recompute nothing, because they compute a chunk's gradients in forward.
#
# </div>
# <div lang="zh">
#
# 小段足够小时，决定峰值的不再是 logits，而是三个与输出头的权重矩阵一样大的张量，每个 33 MB。2.17 节会测量这些张量，并给出两种只需两个这样的张量的做法。Liger 等融合损失在前向里就算好了每一小段的梯度，所以不用重新计算。
#
# </div>

# %% [markdown]
# ## 2.9 In your own code / 实际怎么写
#
# <div lang="en">
#
# `own_code.llama` builds a small Llama of Hugging Face Transformers with 4 layers and hidden size 256. The vocabulary of 8,192 is 32 times the hidden size, about the ratio of Llama 3 8B. Forward and backward of 8 sequences of 128 tokens need 215.2 MB. Prompt tokens have the label −100.
#
# **Exercise 6.** Write `in_chunks`, the last row of the table below. Checkpoint the layers with `model.activation_checkpointing_enable()`, and compute the loss in chunks. `model.model(tokens).last_hidden_state` contains the hidden states before the head, `model.lm_head.weight` is the head's weight matrix, and position $t$ predicts the label of position $t + 1$. The loss and the gradients must equal the model's own, and the peak must be at most 80 MB.
#
# </div>
# <div lang="zh">
#
# `own_code.llama` 生成一个小的 Hugging Face Llama 模型，有 4 层，隐藏维度 256。词表为 8,192，是隐藏维度的 32 倍，这个倍数与 Llama 3 8B 相近。8 条序列各有 128 个 token，前向加反向需要 215.2 MB。提示词的各个 token，标签都是 −100。
#
# **练习 6。** 写出 `in_chunks`，也就是下表的最后一行。用 `model.activation_checkpointing_enable()` 给各层加检查点，并把损失分成小段计算。`model.model(tokens).last_hidden_state` 是输出头之前的隐藏状态，`model.lm_head.weight` 是输出头的权重矩阵，位置 $t$ 预测位置 $t + 1$ 的标签。损失和梯度要与模型自己算出的相同，峰值不超过 80 MB。
#
# </div>


# %% minutes=7
def in_chunks(model, tokens, labels):  # tokens and labels: (8, 128)
    return None


exercises.check_in_chunks(in_chunks)

# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not exercises.check_in_chunks.accepted:

    def in_chunks(model, tokens, labels):
        model.activation_checkpointing_enable()
        hidden = model.model(tokens).last_hidden_state[:, :-1]  # the last position predicts nothing
        targets = labels[:, 1:].flatten()
        return loss_in_pieces(hidden.flatten(0, 1), model.lm_head.weight, targets, 128)


exercises.check_in_chunks(in_chunks)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# Each line below runs on a new model. Three lines use a policy. In the `compile()` line, the compiler saves at most half as many bytes as usual. `enable()` stands for `model.activation_checkpointing_enable()`. **Guess first:** do `keep_addmm` and `keep_mm` need fewer FLOPs than `enable()`?
#
# </div>
# <div lang="zh">
#
# 下面比较几行代码，每行都用一个新的模型，有三行用了策略。`compile()` 那一行由编译器选择保存什么，最多保存平时字节数的一半。`enable()` 代表 `model.activation_checkpointing_enable()`。**先猜**：`keep_addmm` 和 `keep_mm` 用的 FLOPs 会比 `enable()` 少吗？
#
# </div>


# %%
newer, older = {"use_reentrant": False}, {"use_reentrant": True}
contexts = create_selective_checkpoint_contexts  # a list of operators is a short form of a policy
attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
keep_addmm = newer | {"context_fn": partial(contexts, [torch.ops.aten.addmm.default])}
keep_mm = newer | {"context_fn": partial(contexts, [torch.ops.aten.mm.default, attention])}
costs = {}


def run(line, enable, loss=own_code.loss_of_model):
    with own_code.recorded_warnings() as heard:
        model = own_code.llama(own_code.VOCABULARY)  # a new model with the same parameters
        enable(model)
        costs[line] = own_code.cost_of(model, own_code.llama_batch(), loss), heard


# %%
run("", lambda m: None)
run("enable()", lambda m: m.activation_checkpointing_enable())
run("enable(older)", lambda m: m.activation_checkpointing_enable(older))
name = "gradient_checkpointing_enable(gradient_checkpointing_kwargs=newer)"
run(name, lambda m: m.gradient_checkpointing_enable(gradient_checkpointing_kwargs=newer))
run("enable(keep_addmm)", lambda m: m.activation_checkpointing_enable(keep_addmm))
run("enable(keep_mm)", lambda m: m.activation_checkpointing_enable(keep_mm))
if exercises.check_policy.accepted:
    own = newer | {"context_fn": every_second}
    run("enable(own)", lambda m: m.activation_checkpointing_enable(own))
with torch._functorch.config.patch(activation_memory_budget=0.5):  # read by the compiler
    run("compile()", lambda m: m.compile(backend="aot_eager_decomp_partition"))
run("in_chunks", lambda m: None, in_chunks)
own_code.compare_costs(costs)

# %% [markdown]
# <div lang="en">
#
# `enable()` lowers the peak by 79 MB. Many scripts use the method's older name, which `transformers` 6 will remove, as a warning says. Without `use_reentrant`, `transformers` 5.23 uses the newer mode. The older mode never stops early, so it needs more FLOPs.
#
# `keep_addmm` has no effect. A Llama's Linears have no bias, so they call `mm`, and everything is recomputed without a warning. (`checkpoint_blocks` would warn.) With `keep_mm`, no matrix product is computed twice. In FLOPs, your policy lies between these two policies.
#
# The compiler's budget limits the bytes kept for backward, not the peak (lesson 03). `compile()` needs about as many FLOPs here as `enable()`, but lowers the peak less. Set outside a `with` block, the budget would hold for all later compilations. On a GPU, write `model.compile()`; its default backend needs a C++ compiler.
#
# The loss in chunks has the lowest peak, because the peak of `enable()` came mostly from the logits. Section 2.18 runs the lines for the Trainer, peft, DDP and FSDP2.
#
# </div>
# <div lang="zh">
#
# `enable()` 让峰值降低 79 MB。许多脚本里写的还是这个方法的旧名称，运行时会收到警告，说 `transformers` 6 将删除旧名称。不写 `use_reentrant` 时，`transformers` 5.23 用的是新模式。旧模式不会提前终止，所以在这里计算量更大。
#
# `keep_addmm` 不起作用，因为 Llama 的 Linear 没有偏置，调用的是 `mm`。策略一个结果也没有保留，全部都要重新计算，而且没有任何警告。（换成 `checkpoint_blocks` 就会警告。）用 `keep_mm` 时，任何矩阵乘法都只做一遍。你的策略的 FLOPs 介于这两种策略之间。
#
# 编译器的预算限制的是为反向保存的字节，不是峰值（见第 03 课）。在这里，`compile()` 的 FLOPs 与 `enable()` 差不多，峰值却降低得较少。如果不用 `with` 块来设置预算，以后的每次编译都会用这个预算。有 GPU 时写 `model.compile()`，它默认的后端需要 C++ 编译器。
#
# 把损失分成小段计算时，峰值最低，因为 `enable()` 的峰值大部分来自 logits。2.18 节会运行 Trainer、peft、DDP 和 FSDP2 的写法。
#
# </div>

# %% [markdown]
# ## 2.10 Claims and measurements / 说法与实测
#
# <div lang="en">
#
# The table tests four common claims on the step of section 2.7 and the layers of section 2.5.
#
# </div>
# <div lang="zh">
#
# 下表用 2.7 节的训练步和 2.5 节的各层，检验四种常见的说法。
#
# </div>

# %% slide="result"
figures.claims_table(arms, alone)

# %% [markdown] slide={"en": "The same step of the same decoder, one technique per row.\n\nWhat is the largest part of these 134.0 MB?", "zh": "同一个解码器的同一步，每种技术占一行。\n\n这 134.0 MB 里，最大的是哪一部分？"}
# ## 2.11 The ledger / 账本
#
# <div lang="en">
#
# The ledger gets this lesson's row:
#
# </div>
# <div lang="zh">
#
# 本课在账本里添上自己的一行：
#
# </div>

# %% slide="result"
ledger("02", "checkpoint each layer", arms["each layer"])

# %% [markdown] slide={"en": "A checkpoint saves the bytes that, because of it, are not in memory at the peak.\n\nFLOPs are not time. The loss is a block, too.", "zh": "一个检查点能省多少，要看峰值那一刻，有哪些字节因为它而不在内存里。\n\nFLOPs 不是时间。损失也是一个块。"}
# ## 2.12 Summary / 小结
#
# <div lang="en">
#
# - A checkpoint keeps a block's input and recomputes its activations in backward. Always write `use_reentrant=False`.
# - A checkpoint reduces the peak by the bytes that it removes from memory at the peak. Without a head, a checkpoint around the last layer did not reduce the peak. A formula for one point of the step fails if memory is higher at another point.
# - One more forward pass adds about a third to a step's FLOPs if all weights are trained, and less with early stop. A policy that keeps the linear layers' matrix products adds 2% here, and more with longer sequences.
# - The loss is a block, too. Computed in small chunks, it needs here two to three times the bytes of the head's weight matrix.
#
# **Next:** [lesson 03](03_sqrt_schedule.ipynb) asks which blocks to forget.
#
# </div>
# <div lang="zh">
#
# - 检查点只保存一个块的输入，到反向时再重新计算激活值。一定要写 `use_reentrant=False`。
# - 一个检查点能省多少，要看峰值那一刻，有哪些张量因为它而不在内存里。在只有若干层、没有输出头的网络里，给最后一层加检查点不会降低峰值。公式只描述一个时刻，如果别的时刻内存更高，公式给出的就不是峰值。
# - 全部权重都训练时，多做一次前向，一步的 FLOPs 约增加三分之一，有提前终止时增加得少一些。如果用策略保留线性层的矩阵乘积，FLOPs 在这里只增加 2%，序列更长时增加得更多。
# - 损失也可以看作一个块，分成小段计算。只要小段足够小，在这里，损失所需的内存就是输出头的权重矩阵的两到三倍。
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
# The two hooks of the newer mode work like this:
#
# | autograd | hook |
# |---|---|
# | forward saves `t0`, `t1`, `t2` | the first hook returns 0, 1, 2 |
# | backward asks for 2 | the second hook runs the block again, collects `t0`, `t1`, `t2`, and returns `t2` |
# | backward asks for 1 | the second hook returns `t1` |
#
# **Exercise 7.** Write the newer mode of section 2.3. `forget` returns the next number: with `numbers = count()`, `next(numbers)` is 0, 1, 2 and so on. `bring_back` runs the block again when it is called for the first time. The second run needs `torch.enable_grad()`, hooks of its own (`saved_tensors_hooks(collect, bring_back)`), and an input that requires a gradient if `x` does. The input can be `x.detach()` with a graph of its own, or `x` itself, because no backward goes through the graph of the second run.
#
# </div>
# <div lang="zh">
#
# 新模式的两个钩子这样工作：
#
# | autograd | 钩子 |
# |---|---|
# | 前向保存 `t0`、`t1`、`t2` | 第一个钩子返回 0、1、2 |
# | 反向要 2 | 第二个钩子把块再跑一遍，收集 `t0`、`t1`、`t2`，返回 `t2` |
# | 反向要 1 | 第二个钩子返回 `t1` |
#
# **练习 7。** 写出 2.3 节的新模式。`forget` 返回下一个编号。有了 `numbers = count()`，`next(numbers)` 就依次给出 0、1、2 等编号。`bring_back` 第一次被调用时，把块再跑一遍。这一遍要有 `torch.enable_grad()`，要有自己的钩子（`saved_tensors_hooks(collect, bring_back)`），还要有一个输入。如果 `x` 需要梯度，就必须保证这个输入也需要梯度。输入可以用 `x.detach()`，让它另起一张计算图，也可以直接用 `x`，因为反向不会经过第二遍的计算图。
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
from course_lib.checkpoint.readable import checkpoint as readable
from course_lib.lessons.lesson_02.modes import gaps

runs = {"MyCheckpoint": MyCheckpoint.apply, "with_hooks": with_hooks}
for name, library in {"torch": checkpoint, "course_lib": readable}.items():
    runs[name] = partial(library, use_reentrant=False)
gaps(runs)

# %% [markdown]
# <div lang="en">
#
# Until the block's backward is done, `with_hooks` keeps everything that it has recomputed. PyTorch and the course's library release each tensor after its use. The last column shows `course_lib.checkpoint.readable`, a file of about 350 lines that contains both modes in readable code.
#
# </div>
# <div lang="zh">
#
# `with_hooks` 把重新算出来的张量一直留到整个块的反向做完，而 PyTorch 和课程库每用完一个张量就释放一个。最后一列是 `course_lib.checkpoint.readable`，这个文件约有 350 行，实现了两种模式，代码便于阅读。
#
# </div>

# %% [markdown]
# ## 2.14 What to do on a `CheckpointError` / 遇到 `CheckpointError` 怎么办
#
# <div lang="en">
#
# A recomputation that differs from the first run may raise a `CheckpointError`. In each of the next five blocks, the two runs differ, because something has changed between forward and backward. `again` is true in the second run.
#
# </div>
# <div lang="zh">
#
# 重计算与第一遍不同时，可能抛出 `CheckpointError`。在下面五个块里，前向与反向之间都有某个因素变了，所以两遍的运行不同。第二遍里 `again` 为真。
#
# </div>

# %%
import random

from torch.utils.checkpoint import CheckpointError, set_checkpoint_early_stop

factor = torch.linspace(0.5, 1.5, 4)
differing = {
    "`eval()` before backward": lambda x, again: F.dropout((x * factor).exp(), training=not again),
    "a cache that grows": lambda x, again: (x * factor).repeat(1 + again).exp().sum(),
    "a slice of another length": lambda x, again: x[: 1 if again else 4].exp(),
    "a counter in the block": lambda x, again: (x * factor * (1 + again)).exp(),
    "Python's random numbers": lambda x, again: (x * factor * random.random()).exp(),
}


# %%
def gradient_of(block, **options):
    random.seed(0)
    x, runs = torch.linspace(0, 1, 4).requires_grad_(), count()
    options |= {"use_reentrant": False}
    checkpoint(lambda x: block(x, next(runs) > 0), x, **options).sum().backward()
    return x.grad


# %% [markdown]
# <div lang="en">
#
# **Read the first lines of the error.** These lines give the number of saved tensors in both runs, or the first tensor that differs. With `debug=True` the message lists all operators of both runs, each with its stack traces, over hundreds of lines. You only need the operators that differ. The hooks of the recomputation call `detach`, so we leave `detach` out of these lists. (If a library calls the checkpoint, use `set_checkpoint_debug_enabled(True)`.)
#
# </div>
# <div lang="zh">
#
# **先看错误信息的前几行**，那里写着两遍保存的张量各有几个，或者第一个不同的张量是哪个。加上 `debug=True`，信息里会列出两遍的所有算子，每个算子都带着调用栈，共有几百行，只需要看两遍不同的那些算子。重计算的钩子会调用 `detach`，所以这里不列 `detach`。（检查点由库调用时，用 `set_checkpoint_debug_enabled(True)`。）
#
# </div>

# %%
import re
from difflib import ndiff

OPERATOR = re.compile(r"^\$\d+: (.+) = torch\._ops\.aten\.(\S+?)\(.* in (\w+)\)$", re.M)
for name in ("`eval()` before backward", "a cache that grows"):
    try:
        gradient_of(differing[name], debug=True)
    except CheckpointError as error:
        print(*f"{error.__cause__}".splitlines()[:4], sep="\n")
        found = [each for each in OPERATOR.findall(f"{error}") if each[1] != "detach.default"]
    runs_of = [
        [f"{operator} → {kind}" for kind, operator, run_of in found if run_of == one]
        for one in ("original", "recompute")
    ]
    print(*(line for line in ndiff(*runs_of) if line[0] in "+-"), sep="\n", end="\n\n")

# %% [markdown]
# <div lang="en">
#
# In the first block, the four operators of dropout are missing from the second run, so the module is now in evaluation mode. In the second block, `repeat` is the first operator whose result has another shape, so look at what `repeat` reads. The later differences follow from this difference. An operator at the end may be missing only because of early stop.
#
# **`determinism_check="none"` repairs nothing.** It only skips the comparison of shapes and dtypes:
#
# </div>
# <div lang="zh">
#
# 第一个块里，第二遍少了 dropout 的四个算子，可见模块已切换到评估模式。第二个块里，从 `repeat` 起，结果的形状与第一遍不同，后面的差别都由此引起，所以要看 `repeat` 读取了什么。如果缺少的是排在末尾的算子，也可能只是由于提前终止而没有运行。
#
# **`determinism_check="none"` 什么也修不好。** 它只是不再比较形状和 dtype：
#
# </div>


# %%
def outcome(block, **options):
    random.seed(0)
    x = torch.linspace(0, 1, 4).requires_grad_()
    (expected,) = torch.autograd.grad(block(x, False).sum(), x)
    try:
        right = torch.equal(gradient_of(block, **options), expected)
    except RuntimeError as error:  # CheckpointError is a subclass
        return f"`{type(error).__name__}`"
    return "✓" if right else "wrong gradient"


rows = [(n, outcome(b), outcome(b, determinism_check="none")) for n, b in differing.items()]
table(["what has changed", "default", '`determinism_check="none"`'], rows)

# %% [markdown]
# <div lang="en">
#
# The first two blocks still raise an error. The block with the slice now gives a wrong gradient without an error, because its shorter recomputed tensor can be broadcast to the shape of the gradient. For the last two blocks, PyTorch never notices that the two runs differ, because both runs save the same number of tensors, with the same shapes. (`checkpoint_blocks` raises an error for both blocks, see section 2.16.) In all five cases the remedy is to make both runs equal:
#
# - Call `eval()` after backward.
# - Do not cache during training. Hugging Face's encoder-decoders need `use_cache=False`.
# - Pass a counter or a random number to the block as an argument, or draw the random number from PyTorch's generator. Section 2.16 has an option for the module's own state.
#
# If the second run saves more tensors than the first, early stop hides the difference. `set_checkpoint_early_stop(False)` around forward is the stricter check:
#
# </div>
# <div lang="zh">
#
# 前两个块照样报错。取切片的那个块不再报错，梯度却是错的，因为重新算出的张量虽然较短，仍可以广播成梯度的形状。最后两个块的两遍也不同，PyTorch 却始终发现不了，因为两遍保存的张量个数相同，形状也相同。（`checkpoint_blocks` 对这两个块都会报错，见 2.16 节。）五种情形的补救办法都是让两遍相同：
#
# - 反向之后再调用 `eval()`。
# - 训练时不用缓存，Hugging Face 的编码器–解码器模型要设 `use_cache=False`。
# - 把计数器或随机数作为参数传给块，随机数也可以由 PyTorch 的发生器生成。对于模块自己的状态，2.16 节有一个选项可用。
#
# 如果第二遍保存的张量比第一遍多，提前终止会掩盖这个差别。用 `set_checkpoint_early_stop(False)` 包住前向，检查更严格：
#
# </div>

# %%
longer = lambda x, again: (x * factor).exp().exp() if again else (x * factor).exp()  # noqa: E731
with set_checkpoint_early_stop(False):
    stricter = outcome(longer)
table(["early stop", "no early stop"], [(outcome(longer), stricter)])

# %% [markdown]
# ## 2.15 Selective checkpointing in fifteen lines / 十五行写出选择性检查点
#
# <div lang="en">
#
# How can a recomputation *skip* a matrix product? A dispatch mode sees every operator (lesson 01). In the first run the mode keeps the results of the chosen operators. In the second run the mode returns these results in the same order, and the operators do not run. `context_fn` returns one context per run.
#
# </div>
# <div lang="zh">
#
# 重计算怎么能**跳过**一次矩阵乘法？分发模式能看到每一个算子（第 01 课）。第一遍里，分发模式保留选中的算子的结果。第二遍里，它按同样的顺序返回这些结果，算子就不再运行。`context_fn` 返回的是两遍各自的上下文。
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
in_depth.compare_kept_outputs(gradients, block, x, kept)

# %% [markdown]
# ## 2.16 Random numbers and state / 随机数与状态
#
# <div lang="en">
#
# In the table, ✓ means that gradients, state and later random numbers are the same as in a model without checkpoints. The columns are options of `checkpoint_blocks`.
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
# With a checkpoint, BatchNorm's output is right, but its running statistics are updated twice for one batch. These statistics must not change during the recomputation:
#
# </div>
# <div lang="zh">
#
# 加了检查点，BatchNorm 的输出没有错，但同一个批次让它的滑动统计量更新了两次。因此要让统计量在重计算时保持不变：
#
# </div>

# %%
from contextlib import nullcontext


def run_twice(norm):
    return nullcontext(), in_depth.statistics_unchanged(norm)  # contexts of the two runs


in_depth.statistics_after(run_twice)

# %% [markdown]
# <div lang="en">
#
# **Exercise 8.** Write a checkpoint for blocks with dropout. The second run of each block must draw the same mask as its first run. The masks must also be equal if other random numbers are drawn before the first run or between the two runs. Later random numbers must not change. `careful_checkpoint` is a function of `block` and `x`, or a Function.
#
# </div>
# <div lang="zh">
#
# **练习 8。** 为带 dropout 的块写一个检查点。不论第一遍之前、两遍之间抽过哪些随机数，每个块的第二遍都要抽到与第一遍相同的掩码，之后的随机数也不能因此改变。`careful_checkpoint` 是以 `block` 和 `x` 为参数的函数，或者一个 Function。
#
# </div>

# %% minutes=8
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
        with torch.enable_grad(), torch.random.fork_rng():  # restores the state at the end
            torch.set_rng_state(context.state)
            output = context.block(again)
        torch.autograd.backward(output, gradient)
        return None, again.grad


exercises.check_dropout_checkpoint(Careful.apply)
### END SOLUTION

# %% [markdown]
# ## 2.17 Two sizes to choose / 两个要选的大小
#
# <div lang="en">
#
# **Layers per checkpoint.** In section 2.7, two layers per checkpoint needed more memory and more FLOPs than one layer per checkpoint. Such pairs of layers can need less memory than single layers if the gradients exist from the start. In gradient accumulation, this is the case after the first micro-batch (lesson 05). With pairs, one more layer is recomputed at a time, but only half of the inputs are kept. A layer keeps 20 times the bytes of its input. **Guess first:** from which depth on do pairs need less memory than single layers? (In this experiment, all sizes are a quarter of the decoder's.)
#
# </div>
# <div lang="zh">
#
# **每个检查点包几层。** 在 2.7 节里，两层合用一个检查点，比每层一个检查点用的内存和 FLOPs 都更多。但如果梯度从一开始就存在，例如在梯度累积（第 05 课）的第一个微批次之后，两层合用就可能更省内存。两层合用时，每次要多算一层，但只需保存一半的输入。一层保存的字节数是一份输入的 20 倍。**先猜**：从多少层起，两层合用更省内存？（下面各种尺寸都缩到解码器的四分之一。）
#
# </div>

# %%
rows = [(n, *(figures.peak_of_groups(n, size) for size in (1, 2))) for n in (8, 48)]
table(["layers", "each layer (MB)", "two layers per checkpoint (MB)"], rows)

# %% [markdown]
# <div lang="en">
#
# With 8 layers, pairs need more memory than single layers, and with 48 layers they need less. The peaks of pairs and of single layers grow linearly with the depth, and the two lines cross at 40 layers. (Here the checkpoints don't keep the random state, because `preserve_rng_state=False`. If the checkpoints keep this state, pairs need less memory from 37 layers on.) In our usual step, gradients arrive during backward, and pairs need more memory than single layers at any depth. The reason is that a layer's gradients take more memory than the layer's input, which backward releases.
#
# </div>
# <div lang="zh">
#
# 8 层时，两层合用比每层一个检查点更费内存，48 层时则更省。两个峰值都随层数线性增长，两条直线在 40 层处相交。（这里的检查点不保存随机数状态，即 `preserve_rng_state=False`。如果保存，从 37 层起两层合用就更省。）而在通常的训练步里，反向中新产生的梯度比释放的输入占得更多，所以无论有多少层，两层合用都更费内存。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **Tokens per chunk.** If one backward pass goes through all chunks, memory holds three tensors as large as the head's weight matrix (33 MB each). These tensors are the sum of the gradients so far, the gradient of the next chunk, and the new sum. The reason is that PyTorch cannot add a transposed gradient in place. If you write the logits as `(weight @ rows.T).T`, this gradient is not transposed. You can also call backward after each chunk. Then the gradient is added in place too, and no checkpoint is needed. At the end, `hidden.grad` is the gradient from which backward through the layers starts.
#
# </div>
# <div lang="zh">
#
# **每个小段几个 token。** 如果所有小段合在一次反向里，输出头的权重矩阵的梯度（33 MB）会同时有三份，即目前的累加和、下一小段的梯度，以及两者相加的结果。这是因为梯度如果是转置的矩阵，PyTorch 就不能原地累加。一种解决办法是把 logits 写成 `(weight @ rows.T).T`，这时梯度不是转置的。另一种办法是每个小段算完就做反向，这样梯度也能原地累加，而且不再需要检查点。最后得到的 `hidden.grad` 是输出头输入的梯度，前面各层的反向由此开始。
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
        (loss / counted).backward()  # releases the logits without a checkpoint
        hidden.grad[part] = rows.grad


# %% slide="result"
ways = one_backward, figures.one_backward_transposed, backward_by_chunk
sizes = (1024, 256, 128, 32) if exercises.check_loss_in_pieces.accepted else ()
rows = [(n, *(figures.head_peak(way, n) for way in ways)) for n in sizes]
table(["tokens in a chunk", "one backward", "`(weight @ rows.T).T`", "a backward per chunk"], rows)

# %% [markdown]
# <div lang="en">
#
# Peaks are in units of the head's weight matrix, 33 MB. A chunk of 1024 tokens contains all tokens. With smaller chunks, the peak with one backward pass falls to 3 matrices, but not further. The peaks in the last two columns approach their floor of 2 matrices: the accumulated gradient and the gradient of the next chunk. With one backward pass per chunk, nothing is recomputed.
#
# </div>
# <div lang="zh">
#
# 表中峰值以输出头的权重矩阵的大小（33 MB）为单位。一个小段有 1024 个 token，就等于不分小段。小段变小时，如果只做一次反向，峰值降到 3 个矩阵就不再降低。另外两种做法的峰值则趋近下限，也就是 2 个矩阵，一个是累加的梯度，另一个是下一小段的梯度。每个小段各做一次反向时，没有任何重计算。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **Exercise 9.** The loss of section 2.8 has one backward pass for all chunks, and its peak must be at most 150 MB. How many tokens can a chunk have at most, if this number is a power of 2? At the peak, memory holds three tensors as large as a chunk's logits and one gradient of the weight matrix.
#
# </div>
# <div lang="zh">
#
# **练习 9。** 2.8 节的损失对所有小段只做一次反向，它的峰值不得超过 150 MB。每个小段最多可以有多少个 token（取 2 的幂）？峰值时，内存里有三个与一个小段的 logits 一样大的张量，还有权重矩阵的一份梯度。
#
# </div>

# %% minutes=3
answer = None
exercises.check_head_chunk(answer)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
matrix, hidden_bytes = 4 * 32_000 * 256, 4 * 1024 * 256
fits = [n for n in (64, 128, 256, 512) if 3 * 4 * n * 32_000 + matrix + hidden_bytes <= 150e6]
exercises.check_head_chunk(max(fits))
### END SOLUTION

# %% [markdown]
# ## 2.18 Reentrant or not, and in other frameworks / 可重入与否，以及在其他框架里
#
# <div lang="en">
#
# ✓ means that the function ran twice and that its gradient equals the gradient without a checkpoint.
#
# </div>
# <div lang="zh">
#
# ✓ 表示函数运行了两次，而且得到的梯度与不用检查点时相等。
#
# </div>

# %%
from course_lib.lessons.lesson_02.modes import modes

answers = modes(readable)
table(["case", "reentrant", "non-reentrant"], answers)

# %%
table(["as in PyTorch"], [[answers == modes(checkpoint)]])

# %% [markdown]
# <div lang="en">
#
# `torch.func.grad` forbids hooks on saved tensors, so the non-reentrant mode fails in the last row. In the first row, no input needs a gradient, and the block's output is the loss itself. So in the reentrant mode, backward finds no graph.
#
# **peft.** With LoRA the base model is frozen, so the input of the first layer needs no gradient, as in section 2.3. Therefore, no adapter gets a gradient in the older mode. `enable_input_require_grads()` makes the embedding's output require a gradient. If the checkpoints are Hugging Face's own, `peft` 0.21 calls this method for you. If they are PyTorch's, as in FSDP scripts, you must call it yourself:
#
# </div>
# <div lang="zh">
#
# `torch.func.grad` 不允许给保存的张量挂钩子，所以非可重入模式会报错。第一行里，输入不需要梯度，块的输出又正好是损失，所以可重入模式的反向找不到计算图。
#
# **peft。** 用 LoRA 时，基础模型是冻结的，所以第一层的输入不需要梯度，与 2.3 节的情形相同。因此用旧模式时，所有适配器都得不到梯度。`enable_input_require_grads()` 让嵌入层的输出需要梯度。如果检查点是 Hugging Face 自己加的，`peft` 0.21 会替你调用这个方法。如果是 PyTorch 的检查点，例如在 FSDP 的脚本里，就要自己调用这个方法：
#
# </div>

# %%
from peft import LoraConfig, get_peft_model
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers

REENTRANT, NO_REENTRANT = wrappers.CheckpointImpl


def wrap_layers(model, mode):
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = wrappers.checkpoint_wrapper(layer, checkpoint_impl=mode)


# %%
def trained_adapters(checkpoint_layers, enable=False):
    model = own_code.llama(own_code.VOCABULARY)
    with own_code.recorded_warnings():
        checkpoint_layers(model)
        lora = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"]))
        if enable:
            lora.enable_input_require_grads()
        loss = lora(**own_code.llama_batch()).loss
    if loss.requires_grad:  # otherwise, backward raises an error
        loss.backward()
    adapters = [each for each in lora.parameters() if each.requires_grad]
    return f"{sum(each.grad is not None for each in adapters)} / {len(adapters)}"


# %%
ways = {
    "`activation_checkpointing_enable(older)`": lambda m: m.activation_checkpointing_enable(older)
}
ways["`checkpoint_wrapper`, reentrant"] = partial(wrap_layers, mode=REENTRANT)
ways["`checkpoint_wrapper`, non-reentrant"] = partial(wrap_layers, mode=NO_REENTRANT)
rows = [(name, trained_adapters(way), trained_adapters(way, True)) for name, way in ways.items()]
table(["checkpoint", "adapters trained", "with `enable_input_require_grads()`"], rows)

# %% [markdown]
# <div lang="en">
#
# **DDP** groups the gradients into buckets and communicates a bucket when all its gradients are ready. Here DDP runs with one process.
#
# </div>
# <div lang="zh">
#
# **DDP** 把梯度分成若干个桶（bucket），一个桶里的梯度都算好时，就对这个桶做通信。这里 DDP 只有一个进程。
#
# </div>

# %%
from torch import distributed
from torch.nn.parallel import DistributedDataParallel


def in_ddp(mode, **options):
    layers = [wrappers.checkpoint_wrapper(nn.Linear(4, 4), checkpoint_impl=mode) for _ in "ab"]
    network, x = nn.Sequential(*layers), torch.ones(2, 4, requires_grad=True)
    network(x).sum().backward()
    expected = [parameter.grad for parameter in network.parameters()]
    network.zero_grad()
    replica = DistributedDataParallel(network, **options)
    try:
        replica(x).sum().backward()
    except RuntimeError as error:
        return f"`{error}`".partition(".")[0] + "`"
    return all(torch.equal(p.grad, g) for p, g in zip(network.parameters(), expected, strict=True))


# %%
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
unused, static = {"find_unused_parameters": True}, {"static_graph": True}
rows = [("reentrant", "", in_ddp(REENTRANT))]
rows.append(("reentrant", "`find_unused_parameters=True`", in_ddp(REENTRANT, **unused)))
rows.append(("reentrant", "`static_graph=True`", in_ddp(REENTRANT, **static)))
rows.append(("non-reentrant", "", in_ddp(NO_REENTRANT)))
table(["checkpoint", "option", "gradients equal"], rows)

# %% [markdown]
# <div lang="en">
#
# With `find_unused_parameters=True`, the older mode raises an error. After forward, the graph of the older mode contains no parameters. So DDP assumes that the parameters are unused, and marks them as ready. Backward marks the parameters a second time, which raises the error. With `static_graph=True`, DDP learns in the first step which parameters are used. `static_graph=True` works if all steps use the same parameters.
#
# **FSDP2 and the Trainer.** Call `checkpoint_wrapper` before `fully_shard`. The Trainer has arguments for Hugging Face's own checkpoints, and the older names of these arguments still work:
#
# </div>
# <div lang="zh">
#
# 加上 `find_unused_parameters=True`，旧模式会报错。前向之后，旧模式的计算图里没有参数，DDP 以为这些参数没有用到，就把它们标记为就绪，到了反向又标记一次，于是报错。用 `static_graph=True` 时，DDP 在第一步里记下用到了哪些参数，只要每一步用到的参数相同，就能正常工作。
#
# **FSDP2 与 Trainer。** 先调用 `checkpoint_wrapper`，再调用 `fully_shard`。Trainer 可以用参数打开 Hugging Face 自己的检查点，这些参数的旧名称也还能用：
#
# </div>

# %%
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

model, mesh = own_code.llama(own_code.VOCABULARY), init_device_mesh("cpu", (1,))
wrap_layers(model, NO_REENTRANT)
for layer in [*model.model.layers, model]:
    fully_shard(layer, mesh=mesh)
model(**own_code.llama_batch()).loss.backward()
found = [parameter.grad.full_tensor() for parameter in model.parameters()]
table(["gradients equal"], [[own_code.equal_gradients(found, costs[""][0].gradients)]])

# %%
distributed.destroy_process_group()
arguments = [{}, {"activation_checkpointing": True}]
arguments.append({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": newer})
in_depth.trainer_steps(arguments)

# %% [markdown]
# <div lang="en">
#
# | framework | the same technique |
# |---|---|
# | Trainer, TRL | `TrainingArguments(activation_checkpointing=True)`, formerly `gradient_checkpointing=True`; run here |
# | peft | `model.enable_input_require_grads()` with the older mode; run here |
# | PyTorch's DDP | `static_graph=True` with the older mode; run here |
# | PyTorch's FSDP2 | `checkpoint_wrapper(layer)` before `fully_shard(layer)`; run here |
# | torchtitan | activation checkpoint mode `"full"` or `"selective"`; not run, because it needs GPUs |
# | Megatron-LM | `--recompute-granularity full --recompute-method uniform --recompute-num-layers 1`, or `--recompute-granularity selective`, which recomputes the middle of attention; not run, because it needs GPUs |
# | DeepSpeed | `deepspeed.checkpointing.checkpoint(block, x)`; not run, because the course does not install DeepSpeed |
#
# </div>
# <div lang="zh">
#
# | 框架 | 相应的写法 |
# |---|---|
# | Trainer、TRL | `TrainingArguments(activation_checkpointing=True)`，以前写作 `gradient_checkpointing=True`；在本节运行 |
# | peft | 用旧模式时，写 `model.enable_input_require_grads()`；在本节运行 |
# | PyTorch 的 DDP | 用旧模式时，写 `static_graph=True`；在本节运行 |
# | PyTorch 的 FSDP2 | 在 `fully_shard(layer)` 之前写 `checkpoint_wrapper(layer)`；在本节运行 |
# | torchtitan | 激活检查点模式 `"full"` 或 `"selective"`；没有运行，因为需要 GPU |
# | Megatron-LM | `--recompute-granularity full --recompute-method uniform --recompute-num-layers 1`，或只重计算注意力中间部分的 `--recompute-granularity selective`；没有运行，因为需要 GPU |
# | DeepSpeed | `deepspeed.checkpointing.checkpoint(block, x)`；没有运行，因为本课程不安装 DeepSpeed |
#
# </div>

# %% [markdown]
# ## 2.19 Segments, longer sequences, a training loop / 分段、更长的序列、训练循环
#
# <div lang="en">
#
# `checkpoint_sequential` divides an `nn.Sequential` into segments, and puts a checkpoint around each segment except the last. In the second cell below, an attention layer runs three times in one step. Without checkpoints, each run keeps $5 s b h + a s^2 b$ numbers, including its input of $s b h$ numbers. If each run has a checkpoint, two of the three runs keep only their inputs at the peak, and the third run keeps all its numbers. (For short sequences the peak comes later, when memory holds gradients that the formula leaves out.) In the third cell below, a post-norm layer (hidden size 512, 8 heads) is trained with Adam, once with and once without a checkpoint.
#
# </div>
# <div lang="zh">
#
# `checkpoint_sequential` 把一个 `nn.Sequential` 分成几段，除最后一段外，每段加一个检查点。在下面第二个单元格里，同一个注意力层连用三次。不加检查点时，每一次保存 $5 s b h + a s^2 b$ 个数，其中输入占 $s b h$ 个。三次调用都加检查点时，在峰值那一刻，两次调用只保存着输入，一次保存着全部的数。（序列短时，峰值出现得较晚，公式没有计入那时的梯度。）第三个单元格用 Adam 训练 post-norm（后置归一化）层，隐藏维度 512，8 个头，加与不加检查点各一次。
#
# </div>

# %%
from torch.utils.checkpoint import checkpoint_sequential

in_depth.peaks_of_segments(partial(checkpoint_sequential, use_reentrant=False))

# %%
rows = []
for s in (256, 512, 1024):  # the outputs are equal, too
    predicted = 4 * 2 * (5 * s * 128 + 4 * s**2 - s * 128)
    rows.append((f"s = {s}", predicted, in_depth.attention_saving(s)))
predictions(rows)

# %%
losses, log = in_depth.train(checkpointed=True)
without, _ = in_depth.train(checkpointed=False)
table(["log", "losses equal"], [(f"`{log[0]}`", losses == without)])

# %% [markdown]
# <div lang="en">
#
# The table tests claims that we found only in the teaching documents on which this course is based.
#
# </div>
# <div lang="zh">
#
# 下表检验更早的几种说法，这些说法只见于本课程最初依据的教学材料。
#
# </div>

# %%
from course_lib.lessons.lesson_02 import claims

claims.older_claims()

# %% [markdown]
# ## 2.20 Seconds, here and on a GPU / 秒数：本机与 GPU
#
# <div lang="en">
#
# A policy that keeps the matrix products costs few FLOPs, but it runs Python code for every operator, about 900 times per step. The second cell below measures seconds on your GPU, or shows numbers recorded on an H100 and an H200.
#
# With `keep_mm`, a Llama in bf16 computes no matrix product twice. Still, forward and backward take longer than without checkpoints: 23% longer on the H200, and 32% longer on the H100. With checkpoints and `compile()` together, forward and backward take less time than without either of them: 1% less on the H200, and 7% less on the H100.
#
# </div>
# <div lang="zh">
#
# 用策略保留矩阵乘积，FLOPs 增加很少，但每运行一个算子都要调用一次 Python，一步约 900 次。下面第二个单元格在你的 GPU 上测量。没有 GPU 时，显示 H100 和 H200 的记录。
#
# 在 bf16 的 Llama 上用 `keep_mm` 时，任何矩阵乘法都只做一遍，前向加反向却比没有检查点时慢，在 H200 上多花 23% 的时间，在 H100 上多花 32%。检查点和 `compile()` 一起用时，前向加反向比两者都不用时更快，在 H200 上少用 1% 的时间，在 H100 上少用 7%。
#
# </div>

# %% tags=["nbval-ignore-output", "shows-seconds"]
decoders = {"plain": make_decoder(), "each layer": decoder_with()}
decoders["products kept"] = decoder_with(context_fn=keep_products)
figures.seconds_beside_flops(decoders, arms)

# %% tags=["nbval-ignore-output", "shows-device"]
from course_lib.lessons import on_gpu

on_gpu("02")
