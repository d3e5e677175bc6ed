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
# Eight layers keep 168 MB of activations in the step of lesson 01. One line makes the decoder forget them and compute them again: the peak falls from 277.7 to 134.0 MB, the gradients are equal to the last bit, and it costs a fifth more FLOPs.
#
# Now take the eight layers by themselves, and put the same line around one of them only. For one of the eight, this saves nothing at all. Which one is it, and why?
#
# </div>
# <div lang="zh">
#
# 在第 01 课的训练步里，八层保存了 168 MB 的激活值。加一行代码，解码器就把它们忘掉，用时再算：峰值从 277.7 MB 降到 134.0 MB，梯度逐比特相等，代价是多五分之一的 FLOPs。
#
# 再把这八层单独拿出来，只给其中一层加上同一行代码。加在某一层上，什么也省不下来。是哪一层？为什么？
#
# </div>

# %%
from course_lib.teaching import language

language()

# %% [markdown]
# <div lang="en">
#
# **Goals** (90 minutes). Write a checkpoint yourself, in both of PyTorch's modes. Predict the peak of a checkpointed step, and find where your formula ends. Say which block is worth a checkpoint and which is not. Choose what to keep, by bytes and by FLOPs. Take the loss in chunks, so that the logits never exist whole.
#
# **What to know before**: lesson 01. What a layer saves, storages, and the timeline of a step.
#
# </div>
# <div lang="zh">
#
# **目标**（90 分钟）：自己写一个检查点，PyTorch 的两种模式都写；预测加了检查点之后一步的峰值，并找出公式在哪里失效；说出给哪一块加检查点划算、给哪一块不划算；按字节和 FLOPs 选择保留什么；把损失分成小段计算，让完整的 logits 从不出现。
#
# **预备知识**：第 01 课，即一层保存什么、存储区，以及一个训练步的时间线。
#
# </div>

# %%
from functools import partial
from itertools import count

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from course_lib.lessons import lesson_02, what_you_may_have_read
from course_lib.lessons.ledger import ledger
from course_lib.memory import MemoryMeter, symbolic
from course_lib.models import Decoder, DecoderLayer, random_tokens
from course_lib.teaching import predictions, table, timelines

# %% [markdown] slide={"en": "Keep a block's **input** only; run its forward again in backward.\n\n**Guess first.** In which order do three blocks a, b, c run?", "zh": "只留一个块的**输入**，反向时把前向再跑一遍。\n\n**先猜**：三个块 a、b、c 按什么顺序运行？"}
# ## 2.1 Watch it run / 看它怎样运行
#
# <div lang="en">
#
# Autograd keeps what backward will need. **Activation checkpointing** (also gradient checkpointing or activation recomputation; not a file of weights; from here on, a checkpoint) keeps a block's **input** only. When backward arrives at the block, its forward pass runs once more.
#
# In PyTorch that is `torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)`; section 2.3 shows why the option belongs to it. Let each block announce when it runs. **Guess first:** in which order do three checkpointed blocks a, b, c run, forward and backward?
#
# </div>
# <div lang="zh">
#
# autograd 会留下反向要用的东西。**激活检查点**（activation checkpointing，又称梯度检查点、激活重计算；不是指存盘的模型权重；下文简称检查点）只留下一个块的**输入**。反向走到这个块时，把它的前向再跑一遍。
#
# 在 PyTorch 里就是 `torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)`，为什么要写这个选项，见 2.3 节。让块在运行时报一声，就能看见这个过程。**先猜**：三个加了检查点的块 a、b、c，前向和反向按什么顺序运行？
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
    x = checkpoint(block, name, x, use_reentrant=False)  # the newer mode: section 2.3
x.sum().backward()
lesson_02.draw_order(heard)

# %% [markdown]
# <div lang="en">
#
# First three forward passes. Then backward comes to c, runs its forward again, finishes it, and goes on to b. Besides the inputs, only one block's activations exist at a time. (But c had only just run. Is its checkpoint good for anything? Section 2.5.)
#
# </div>
# <div lang="zh">
#
# 先是三次前向。然后反向走到 c，把它的前向再跑一遍，做完它的反向，再去 b。除了各块的输入，任何时刻只有一个块的激活值存在。（可是 c 刚刚才跑过，给它加检查点有用吗？见 2.5 节。）
#
# </div>

# %% [markdown] slide={"en": "Forward without a graph; backward runs the block again.\n\n**Write it.** What must backward return, and what may not be live in between?", "zh": "前向不建计算图，反向把块再跑一遍。\n\n**自己写**：反向该返回什么？两者之间，什么不该存活？"}
# ## 2.2 Write it / 自己写
#
# <div lang="en">
#
# A `torch.autograd.Function` is a forward and a backward of your own. `MyCheckpoint.apply(block, x)` runs it; backward gets the output's gradient and returns one for each argument of `forward`. Five tools: `torch.no_grad()` (inside `forward` gradients are off already: it is there for the reader's eyes), `torch.enable_grad()`, `context.save_for_backward(x)` with `context.saved_tensors`, `x.detach().requires_grad_()`, and `torch.autograd.backward(output, gradient)`, which goes through a graph, from the gradient that has arrived, and leaves gradients in `.grad`.
#
# **Exercise 1.** Fill in the two functions: `forward` returns the block's output, without a graph; `backward` returns `None` for `block`, which has no gradient, and the gradient of `x`. The check runs a block whose activations are large, compares the gradients of its input and of its weight, counts the runs, and looks at the bytes that are live between forward and backward. Then it runs two blocks in a row, as a network does.
#
# </div>
# <div lang="zh">
#
# 在 `torch.autograd.Function` 里，前向和反向都由你来写。用 `MyCheckpoint.apply(block, x)` 来运行；反向拿到输出的梯度，要为 `forward` 的每个输入（实参）各返回一个梯度。工具有五样：`torch.no_grad()`（在 Function 的 `forward` 里梯度本来就关着，写上只为读起来清楚）、`torch.enable_grad()`、`context.save_for_backward(x)` 和与之配对的 `context.saved_tensors`、`x.detach().requires_grad_()`，以及 `torch.autograd.backward(output, gradient)`，它从传来的梯度出发，沿计算图反向走一遍，把梯度放进 `.grad`。
#
# **练习 1。** 写出这两个函数：`forward` 返回块的输出，不建计算图；`backward` 为 `block` 返回 `None`（它没有梯度），并返回 `x` 的梯度。检查会运行一个激活值很大的块，比较它的输入和权重的梯度，数运行次数，并看前向与反向之间还有多少字节存活。然后像真正的网络那样，让两个块连着运行。
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


lesson_02.check_checkpoint(MyCheckpoint)


# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not lesson_02.check_checkpoint.accepted:

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


lesson_02.check_checkpoint(MyCheckpoint)
### END SOLUTION

# %% [markdown] slide={"en": "Leave the graph where it is. One hook keeps a **number** in place of each tensor; the other brings the tensor back.\n\nHow?", "zh": "计算图留在原处。一个钩子只留下**编号**，另一个把张量找回来。\n\n怎么找？"}
# ## 2.3 The other way: leave the graph, take what it holds / 另一种写法：留下计算图，拿走它持有的东西
#
# <div lang="en">
#
# Yours is PyTorch's older mode, `use_reentrant=True`: autograd runs inside autograd. The newer one leaves the graph in place and takes out what it holds, by the two hooks of lesson 01. In forward, the first hook keeps a number in place of each tensor. In backward, the second hook is given that number back; when it is asked for the first time, it runs the block again, with another pair of hooks that collects what this run saves. Both runs save in the same order, so the number finds its tensor.
#
# ```text
# forward    saves      t0  t1  t2      forget      → 0  1  2
# backward   asks for           2       bring_back  → run again, collect t0 t1 t2; return found[2]
#            asks for        1          bring_back  → return found[1]
# ```
#
# **Exercise 2.** Fill in `forget` and `bring_back`. (`numbers = count()`, and `next(numbers)` is 0, 1, 2 …) The second run needs a graph (`torch.enable_grad()`), hooks of its own (`saved_tensors_hooks(collect, bring_back)`), and an input of its own (`x.detach()`, which requires a gradient if `x` does: else that run would save less).
#
# </div>
# <div lang="zh">
#
# 你写的是 PyTorch 较老的模式 `use_reentrant=True`（可重入）：在 autograd 里面运行 autograd。较新的模式让计算图留在原处，只拿走它持有的东西，用的就是第 01 课的两个钩子。前向时，第一个钩子用编号代替每个张量。反向时，第二个钩子拿到编号；第一次来要时，它把块再跑一遍，另挂一对钩子，收集这一遍所保存的张量。两遍保存的顺序相同，所以凭编号就能找到张量。
#
# ```text
# forward    saves      t0  t1  t2      forget      → 0  1  2
# backward   asks for           2       bring_back  → run again, collect t0 t1 t2; return found[2]
#            asks for        1          bring_back  → return found[1]
# ```
#
# **练习 2。** 写出 `forget` 和 `bring_back`。（`numbers = count()`，`next(numbers)` 依次是 0、1、2 …）第二遍要有计算图（`torch.enable_grad()`）、自己的钩子（`saved_tensors_hooks(collect, bring_back)`），还要有自己的输入（`x.detach()`；`x` 需要梯度时它也要需要，否则这一遍保存的就少了）。
#
# </div>


# %% minutes=10
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


lesson_02.check_hooks(with_hooks)


# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not lesson_02.check_hooks.accepted:

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


lesson_02.check_hooks(with_hooks)
### END SOLUTION

# %% [markdown] slide={"en": "Before any claim of saving: are all gradients equal?\n\nFour checkpoints, one decoder layer.", "zh": "谈节省之前先问：梯度都相等吗？\n\n四种检查点，同一个解码器层。"}
# <div lang="en">
#
# Before any claim of saving: are the gradients equal, for the input and for every parameter? (The gradient that arrives is uneven, as a loss's is.) Four checkpoints on one decoder layer: your two, PyTorch's, and `course_lib.checkpoint`, which has the same names and arguments as `torch.utils.checkpoint` and is written to be read. You can exchange one for the other, under `torch.compile` too: there the library's function hands over to PyTorch's, which the compiler puts into its graph.
#
# </div>
# <div lang="zh">
#
# 谈节省之前先问：输入和每个参数的梯度都相等吗？（传来的梯度并不均匀，与真实的损失一样。）拿四种检查点来跑一个解码器层：你写的两个、PyTorch 的，以及 `course_lib.checkpoint`。后者的名字和参数都与 `torch.utils.checkpoint` 相同，只是写得便于阅读。两者可以互换，在 `torch.compile` 里也可以，因为课程库的函数在那里会改用 PyTorch 的检查点，由编译器放进计算图。
#
# </div>

# %%
from course_lib.checkpoint import checkpoint as readable
from course_lib.checkpoint import checkpoint_blocks

block, x = DecoderLayer(256, 8), torch.randn(2, 128, 256, requires_grad=True)  # (b, s, h)


uneven = torch.linspace(-1, 2, x.numel()).view_as(x)  # the gradient that arrives


def gradients(output):
    x.grad = None
    block.zero_grad()
    output.backward(uneven)
    return [x.grad, *(parameter.grad for parameter in block.parameters())]


# %% slide="result"
runs = {"MyCheckpoint": MyCheckpoint.apply, "with_hooks": with_hooks}
for name, library in {"torch": checkpoint, "course_lib": readable}.items():
    runs[name] = partial(library, use_reentrant=False)
expected = gradients(block(x))
{name: all(map(torch.equal, expected, gradients(run(block, x)))) for name, run in runs.items()}

# %% [markdown]
# <div lang="en">
#
# Now a block whose input needs no gradient, as data do. Its parameters need theirs all the same:
#
# </div>
# <div lang="zh">
#
# 再看一种情形：块的输入不需要梯度，数据就是如此。可它的参数仍然需要：
#
# </div>

# %% slide="result"
head, data, trained = nn.Linear(256, 1), torch.randn(2, 128, 256), {}
for name, run in runs.items():
    block.zero_grad()
    head(run(block, data)).sum().backward()
    trained[name] = sum(parameter.grad is not None for parameter in block.parameters())
trained  # parameters with a gradient, of 12

# %% [markdown] slide={"en": "The input needs no gradient: the older mode trains **0 of 12** parameters, without an error.\n\nThat is why `use_reentrant=False` exists.", "zh": "输入不需要梯度：旧模式 12 个参数训练了 **0** 个，也不报错。\n\n`use_reentrant=False` 就是为此而来。"}
# <div lang="en">
#
# `MyCheckpoint` trains 0 of 12 parameters: a Function none of whose tensors needs a gradient gives an output without a graph. The head behind it trains, the block does not, and nothing is reported. This is the trap of the older mode, and why `use_reentrant=False` exists. PyTorch's older mode falls into it as well, and warns. Which mode do you get from PyTorch if you leave the option out?
#
# </div>
# <div lang="zh">
#
# 用 `MyCheckpoint` 时，12 个参数中有 0 个得到梯度，因为 Function 的输入张量若都不需要梯度，输出就没有计算图。后面的输出头照样训练，这个块却没有，也没有任何提示。这就是旧模式的陷阱，也是 `use_reentrant=False` 的由来。PyTorch 的旧模式也会掉进这个陷阱，但会发出警告。如果不写这个选项，PyTorch 用的是哪一种模式？
#
# </div>

# %%
import warnings

rows, said = [], {}
options = {"left out": {}, "`True`": {"use_reentrant": True}, "`False`": {"use_reentrant": False}}
for name, option in options.items():
    block.zero_grad()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        head(checkpoint(block, data, **option)).sum().backward()
    trained = sum(parameter.grad is not None for parameter in block.parameters())
    said[name] = [f"{each.message}" for each in heard]
    rows.append((name, trained, len(heard)))
table(["`use_reentrant`", "parameters with a gradient (of 12)", "warnings"], rows)

# %%
print(*said["left out"], sep="\n")

# %% [markdown]
# <div lang="en">
#
# Left out, the option is still `True` in this version of PyTorch, 2.13. The first warning says so, and announces an error for 2.9 that has not come. So always write `use_reentrant=False`. (The library's `checkpoint` takes the option left out for `False`.)
#
# Both of yours have other gaps: with dropout they would draw another mask, and one keeps more than it should. Section 2.13 puts all four to the test.
#
# </div>
# <div lang="zh">
#
# 在这个版本（2.13）的 PyTorch 里，不写这个选项，用的仍是 `True`。第一条警告说的就是这件事，它预告的“从 2.9 起会报错”至今没有实现。所以一定要写上 `use_reentrant=False`。（课程库的 `checkpoint` 不写时就是 `False`。）
#
# 你写的两个还有别的缺口：有 dropout 时，它们会抽到另一个掩码，其中一个还保存得太多。2.13 节会逐项检验这四种。
#
# </div>

# %% [markdown]
# ## 2.4 The whole decoder in one line / 一行代码，整个解码器
#
# <div lang="en">
#
# `checkpoint_blocks(model, "layers.*")` puts a checkpoint around every block whose name fits, in any model that calls its blocks as modules. (A cache that a block fills would be filled twice, which ends in a `CheckpointError`: train encoder-decoders of Hugging Face with `use_cache=False`.) The step is that of lesson 01: Adam, the second step, and gradients that are gone when it begins, so that they **arrive during backward**. Every number below uses this convention; only section 2.7 breaks it, on purpose.
#
# </div>
# <div lang="zh">
#
# `checkpoint_blocks(model, "layers.*")` 给模型里名称匹配的每个块各加一个检查点，只要模型是把这些块当作模块来调用的。（块若往缓存里写东西，就会写两遍，以 `CheckpointError` 告终，所以训练 Hugging Face 的编码器–解码器模型时要设 `use_cache=False`。）训练步与第 01 课相同：Adam，取第二步；开始时梯度已清空，**到反向中才陆续产生**。以下各数都按这个约定；只有 2.7 节有意不按。
#
# </div>


# %%
def make_decoder(**changes):
    sizes = {"vocabulary": 2048, "hidden": 256, "heads": 8, "layers": 8, "sequence": 128}
    return Decoder(**{**sizes, **changes})


def metered_step(decoder):
    tokens = random_tokens(batch=8, sequence=128, vocabulary=2048)  # (8, 129)
    adam = torch.optim.Adam(decoder.parameters())
    for parameter in decoder.parameters():
        parameter.grad = torch.zeros_like(parameter)
    adam.step()  # makes its state
    decoder.zero_grad()
    with MemoryMeter(decoder, adam) as meter:
        decoder.loss(tokens).backward()
        adam.step()
    return meter


# %%
plain, forgetful = make_decoder(), make_decoder()
checkpoint_blocks(forgetful, "layers.*")
meters = {"plain": metered_step(plain), "checkpointed": metered_step(forgetful)}
all(map(torch.equal, plain.parameters(), forgetful.parameters()))  # weights after the step

# %% slide="result"
timelines(
    meters, title="One mountain becomes eight teeth, and the peak moves to the end of backward"
)

# %% [markdown] slide={"en": "A layer keeps 20,987,904 bytes; a checkpoint keeps its input and 5,056.\n\n**Guess first.** From 277,682,584 bytes, with $k$ checkpoints?", "zh": "一层保存 20,987,904 字节；一个检查点留下这一层的输入和 5,056 字节。\n\n**先猜**：原来 277,682,584 字节，加 $k$ 个检查点呢？"}
# <div lang="en">
#
# Each tooth is one layer that has come back. Now predict. A checkpoint keeps its layer's input, $b s h$ numbers, and the state of the random number generator, 5,056 bytes, for a second run with the same dropout. The rest of the layer's 20,987,904 bytes (your sum in lesson 01) is gone when backward starts, and that is when the plain step peaks, at 277,682,584 bytes.
#
# **Exercise 3.** With checkpoints around the first $k$ of the eight layers: what is the peak, in bytes?
#
# </div>
# <div lang="zh">
#
# 每个齿就是一层，刚刚重新算出来。现在来预测。检查点留下这一层的输入，即 $b s h$ 个数，外加随机数发生器的状态 5,056 字节，好让第二遍抽到同样的 dropout。这一层一共 20,987,904 字节（第 01 课你算出的总和），其余的在反向开始时都不在了；而基线的峰值 277,682,584 字节正出现在那一刻。
#
# **练习 3。** 八层里前 $k$ 层加检查点，峰值是多少字节？
#
# </div>


# %% minutes=6
def predicted_peak(k):
    return None


lesson_02.check_peak_formula(predicted_peak)


# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not lesson_02.check_peak_formula.accepted:

    def predicted_peak(k):
        one_input = 4 * 8 * 128 * 256
        return 277_682_584 - k * (20_987_904 - one_input - 5_056)


lesson_02.check_peak_formula(predicted_peak)
### END SOLUTION

# %% slide="result"
peaks = {0: meters["plain"].peak_bytes, 8: meters["checkpointed"].peak_bytes}
seven = make_decoder()
checkpoint_blocks(seven, "layers.*", first=7)
peaks[7] = metered_step(seven).peak_bytes
predictions([(f"k = {k}", predicted_peak(k), peaks[k]) for k in (0, 7, 8)], unit="bytes")

# %% [markdown]
# <div lang="en">
#
# Exact to the byte, until the last row: 16 MB are missing. Your formula follows one moment, the start of backward. The last checkpoint lowers it so far that another moment stands higher: the end of backward, where a single layer is back in full, and nearly all gradients have arrived.
#
# </div>
# <div lang="zh">
#
# 一字节不差，除了最后一行：差 16 MB。你的公式盯住的是一个时刻，即反向开始时。最后一个检查点把这一刻压得太低，于是另一个时刻成了最高点：反向快结束时，内存里只剩一层的激活值，梯度却几乎都有了。
#
# </div>

# %% [markdown] slide={"en": "One checkpoint only.\n\n**Guess first.** Around which of eight layers does it save least? And in the decoder, with its head?", "zh": "只能加一个检查点。\n\n**先猜**：八层里，给哪一层加省得最少？带输出头的解码器呢？"}
# ## 2.5 Which block? / 给哪一块？
#
# <div lang="en">
#
# If there is room for one checkpoint only: around which of the eight layers? Two networks: the eight layers alone, with a mean of squares as loss; and the decoder with its head. Forward and backward, without an optimizer (the decoder: 222.7 MB, that is 277.7 less Adam's 55.0).
#
# **Guess first:** in each of the two, which layer saves the least?
#
# </div>
# <div lang="zh">
#
# 如果只加一个检查点，该给八层里的哪一层？看两个网络：一个只有这八层，以平方的均值作损失；另一个是带输出头的解码器。只做前向和反向，没有优化器（解码器是 222.7 MB，即 277.7 减去 Adam 的 55.0）。
#
# **先猜**：两者里各是哪一层省得最少？
#
# </div>


# %%
def peak_of(layer, layers=8, head=True):  # with a checkpoint around that layer, or None
    with symbolic():
        decoder, tokens = make_decoder(layers=layers), random_tokens(8, 128, 2048)
        alone, x = nn.Sequential(*decoder.layers), torch.randn(8, 128, 256)
        if layer is not None:
            checkpoint_blocks(decoder, f"layers.{layer}")
        with MemoryMeter(decoder) as meter:
            (decoder.loss(tokens) if head else alone(x).square().mean()).backward()
    return meter.peak_bytes


# %%
alone = {layer: peak_of(layer, head=False) for layer in (None, *range(8))}
whole = {layer: peak_of(layer) for layer in (None, *range(8))}
one = {layer: peak_of(layer, layers=1, head=False) for layer in (None, 0)}

# %% slide="result"
lesson_02.draw_which_block(alone, whole)

# %%
saved = [alone[None] - alone[0], alone[None] - alone[7], one[None] - one[0]]
rows = zip(["layer 0", "layer 7", "the only layer"], saved, strict=True)
table(["checkpoint around", "saves (bytes)"], rows)

# %% [markdown] slide={"en": "A checkpoint saves what is absent **at the peak**.\n\nAsk first when the peak is, then what is alive at that moment.", "zh": "检查点省下的，是**峰值那一刻**不在的东西。\n\n先问峰值在何时，再问那一刻有什么。"}
# <div lang="en">
#
# A checkpoint saves what is absent **at the peak**. Backward begins with the last layer, so that layer comes back while all others are still there: alone, it saves nothing, and costs 5,056 bytes for the generator's state. The only layer of a network is its last one. For layers 0 to 5 you save the layer and pay for its input. (Layer 6 saves 2 MB less: when it comes back, the last layer's gradients have arrived.)
#
# In the decoder even the last layer saves: the peak was not its own. Three tensors of the logits' size, 25 MB, stood there before it came back. Ask first when the peak is, then what is alive at that moment.
#
# </div>
# <div lang="zh">
#
# 检查点省下的，是**峰值那一刻**不在的东西。反向从最后一层开始，它重新算出来时，其余各层都还在：八层单独成网络时，给它加检查点什么也省不了，反而多 5,056 字节的发生器状态。只有一层的网络，那一层就是最后一层。给第 0 到第 5 层中的某一层加，省下的是“这一层的字节减去它的输入”。（第 6 层少省 2 MB：它重新算出来时，最后一层的梯度已经在内存里了。）
#
# 在解码器里，给最后一层加也能省：峰值本来就不是它造成的。在它重新算出来之前的那一刻，内存里有三个 logits 大小的张量，共 25 MB。先问峰值在何时，再问那一刻有什么。
#
# </div>

# %% [markdown]
# ## 2.6 What to keep: policies on one scale / 保留什么：同一标尺上的几种策略
#
# <div lang="en">
#
# Five ways to run the same step. **Selective checkpointing** keeps the results of some operators and computes the rest again; here it keeps the products of the linear layers. A Linear with a bias calls `addmm`, one without calls `mm`. **Guess first:** what share of a whole step's FLOPs is one more forward pass? Backward makes two products for each one of forward, for the gradient of the input and for that of the weight.
#
# </div>
# <div lang="zh">
#
# 同一步的五种做法。**选择性检查点**保留一部分算子的结果，其余的再算一遍；这里保留的是线性层的乘积。带偏置的 Linear 调用 `addmm`，不带偏置的调用 `mm`。**先猜**：多做的一次前向，占整个训练步 FLOPs 的几分之几？前向的每一次乘法，反向要做两次：一次求输入的梯度，一次求权重的梯度。
#
# </div>


# %%
def decoder_with(group=1, decoder=None, **options):
    decoder = decoder or make_decoder()
    each = list(decoder.layers)
    parts = (each[i : i + group] for i in range(0, len(each), group))
    decoder.layers = nn.ModuleList(nn.Sequential(*part) for part in parts)
    checkpoint_blocks(decoder, "layers.*", **options)
    return decoder


# %% slide="result"
# nn.Linear with a bias calls the first of these, without a bias the second.
products = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]
measured = lesson_02.measured_step  # symbolic: its peak, and the FLOPs of forward and backward
ways = {"each layer": {}, "products kept": {"policy": products}}
ways |= {"two layers per checkpoint": {"group": 2}, "eight layers per checkpoint": {"group": 8}}
arms = {"plain": measured(make_decoder)}
arms |= {name: measured(decoder_with, **options) for name, options in ways.items()}
lesson_02.draw_policies(arms)

# %% [markdown] slide={"en": "One forward more, all weights trained: about a third. Here: 1.21.\n\nProducts kept: 84 MB saved, for almost no FLOPs. And in seconds?", "zh": "全部权重都训练，多一次前向约增加三分之一；这里是 1.21 倍。\n\n保留乘积：省 84 MB，几乎不花 FLOPs。秒数呢？"}
# <div lang="en">
#
# One more forward pass is about a third of a step if all weights are trained: a little more where the first layer has no gradient to hand on; freeze weights and backward shrinks, and the extra pass can be half a step. It is 1.21 here: the head is not done again, and recomputation stops when the last saved tensor is back (**early stop**), so that each checkpoint skips its last product.
#
# (Leave out the last layer's checkpoint, as section 2.4 did: 4 MB more, for an eighth less of the extra work.) Keeping the products saves 84 MB and costs almost no FLOPs. With one checkpoint around all eight layers, all of them are recomputed at once: this costs the most FLOPs and saves only 19 MB. And in seconds?
#
# </div>
# <div lang="zh">
#
# 全部权重都训练时，多一次前向约是一步的三分之一：第一层不必往前传梯度时略多一点；冻结一部分权重，反向变短，多出的这一遍最多可到二分之一。这里是 1.21 倍：输出头不用重做；而且重计算一算出最后一个要保存的张量就停下（**提前终止**），每个检查点都省去最后一次乘法。
#
# （像 2.4 节那样不给最后一层加：只多 4 MB，额外的计算少八分之一。）保留乘积省下 84 MB，几乎不多花 FLOPs。八层合用一个检查点时，八层要同时重新算出来，FLOPs 最多，却只省 19 MB。那么秒数呢？
#
# </div>

# %% slide="result" tags=["nbval-ignore-output", "shows-seconds"]
decoders = {"plain": make_decoder(), "each layer": decoder_with()}
decoders["products kept"] = decoder_with(policy=products)
lesson_02.seconds_beside_flops(decoders, arms)

# %% [markdown]
# <div lang="en">
#
# The seconds are this machine's, for four sequences: ten turns, the median and the range. **FLOPs are not time.** The counter counts matrix products only. This policy does GELU and softmax again, that is `erf` and `exp`, which count as nothing, and it asks Python about every operator, some 900 times per step. So the FLOPs say how much less is multiplied, and not which way is faster. Measure that on the machine that you train on; this step has not run on a GPU. The work that this policy does again also grows with the length, since attention's own two products grow with $s^2$.
#
# </div>
# <div lang="zh">
#
# 秒数只代表这台机器，算的是四条序列：轮流跑十遍，给出中位数和范围。**FLOPs 不是时间。** 计数器只数矩阵乘法，而这个策略重做的是 GELU 和 softmax，也就是 `erf` 和 `exp`，它们都不计入。另外，这个策略每遇到一个算子都要问一次 Python，一步约 900 次。所以 FLOPs 只说明少做了多少乘法，并不说明哪一种更快。哪种更快，要在你训练用的机器上测；这一步还没有在 GPU 上运行过。序列变长时，这个策略重做的计算也会增加，因为注意力自己的两次乘法随 $s^2$ 增长。
#
# </div>

# %% [markdown] slide={"en": "Two layers per checkpoint were worse on both axes. A rule?\n\n**Guess first.** With gradients from the start, from which depth do pairs save more?", "zh": "两层合用一个检查点，两项都更差。总是这样吗？\n\n**先猜**：如果梯度一开始就在，多深以后两层合用更省？"}
# ## 2.7 Groups, if gradients exist from the start / 梯度一开始就在时的分组
#
# <div lang="en">
#
# Two layers per checkpoint were worse on both axes. Is that a rule? If gradients exist from the start, as in the later micro-batches of accumulation (lesson 05), the peak stays at the last layers, and the calculation is simple: a pair recomputes one more layer at a time, and saves the inputs of half the layers. 20 inputs are one layer. **Guess first:** from which depth on do pairs save more? (So that 48 layers run in a moment, all is a quarter as large here: 512 words, hidden size 64, 32 tokens.)
#
# </div>
# <div lang="zh">
#
# 两层合用一个检查点，内存和计算量两项都更差。这是规律吗？如果梯度从一开始就在，例如累积梯度时后面的微批次（第 05 课），峰值就一直留在最后几层，账也很好算：两层合用时，同时多恢复一层，但少存一半的输入。一层相当于 20 份输入。**先猜**：从多深开始，两层合用更省？（为了让 48 层很快跑完，这里一切都缩到四分之一：词表 512，隐藏维度 64，32 个 token。）
#
# </div>


# %% slide="result"
def peak_of_groups(layers, group):
    decoder = make_decoder(vocabulary=512, hidden=64, sequence=32, layers=layers)
    decoder = decoder_with(group, decoder, preserve_rng_state=False)
    return round(lesson_02.peak_with_gradients(decoder) / 1e6, 2)


rows = [(layers, peak_of_groups(layers, 1), peak_of_groups(layers, 2)) for layers in (8, 48)]
table(["layers", "each layer", "two layers per checkpoint"], rows)  # peaks, MB

# %% [markdown]
# <div lang="en">
#
# Pairs take more with 8 layers and less with 48; the two straight lines cross at 40. That is so *with this convention*. Where gradients arrive during backward, as in our step, they take more room than the inputs that leave, and pairs lose at any depth here. How to cut a deep network best is the question of lesson 03.
#
# </div>
# <div lang="zh">
#
# 8 层时成对更费，48 层时成对更省；两条直线在 40 层处相交。不过这只是**按这种约定**。像我们的训练步那样，梯度在反向中才产生，新增的梯度比省下的输入还大，那么在这里无论多深，成对都不划算。深层网络怎样切最好，是第 03 课的问题。
#
# </div>

# %% [markdown] slide={"en": "1024 tokens, 32,000 words: logits of 131 MB, three times over.\n\nCut the tokens into chunks. How does the loss stay the same?", "zh": "1024 个 token，词表 32,000：logits 131 MB，而且有三份。\n\n把 token 切成小段，怎样让损失不变？"}
# ## 2.8 The loss, in chunks / 把损失分成小段计算
#
# <div lang="en">
#
# The head with its loss is a block too, and often the largest: three tensors of the logits' size at the peak. Take 1024 tokens and a vocabulary of 32,000: logits of 131 MB. Cut the tokens into **chunks**, with a checkpoint each: then the logits never exist whole.
#
# **Exercise 4.** Write it, in about eight lines: the same loss as `F.cross_entropy(hidden @ weight.T, targets)`, whatever the size of the last chunk; `chunk` is a number of tokens. The loss is the mean over the targets that count. A target of −100 does not count (`ignore_index`): fine-tuning gives it to the tokens of the prompt and to padding.
#
# </div>
# <div lang="zh">
#
# 输出头与损失合在一起也是一个块，而且常常是最大的：峰值时有三个 logits 大小的张量。取 1024 个 token、词表 32,000，logits 就有 131 MB。把 token 切成**小段**（chunk），每段加一个检查点，完整的 logits 就从不出现。
#
# **练习 4。** 用八行左右写出来：损失要与 `F.cross_entropy(hidden @ weight.T, targets)` 相同，不论最后一小段有多长；`chunk` 是每小段的 token 数。损失是对计入的目标取均值。值为 −100 的目标不计入（`ignore_index`），微调时提示词和填充的 token 就用这个值。
#
# </div>


# %% minutes=8
def loss_in_pieces(hidden, weight, targets, chunk):  # (n, h), (v, h), (n,)
    return None


lesson_02.check_loss_in_pieces(loss_in_pieces)


# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not lesson_02.check_loss_in_pieces.accepted:

    def loss_of_chunk(hidden, weight, targets):
        return F.cross_entropy(hidden @ weight.T, targets, reduction="sum")

    def loss_in_pieces(hidden, weight, targets, chunk):
        total = 0
        for rows, answers in zip(hidden.split(chunk), targets.split(chunk), strict=True):
            total = total + checkpoint(loss_of_chunk, rows, weight, answers, use_reentrant=False)
        return total / (targets != -100).sum()  # the others add nothing to the sum


lesson_02.check_loss_in_pieces(loss_in_pieces)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# In one backward pass over all chunks, the gradient of the vocabulary's matrix, 33 MB, exists three times: what has been added up, what is to be added, and their sum. Here that is a floor, three times the matrix, because the gradient of a transposed matrix cannot be added in place (stored as $h \times v$, it would be 2.16). But why wait? Go backward after each chunk, and its gradient is added in place. (The layers below then go on from `hidden.grad`.)
#
# </div>
# <div lang="zh">
#
# 各小段合在一次反向里，词表矩阵的梯度（33 MB）会有三份：已经加好的、正要加上的，以及两者之和。在这里，这就是下限：矩阵的三倍，因为转置矩阵的梯度无法原地累加（若按 $h \times v$ 存放，就是 2.16 倍）。可是何必等？每个小段做完就反向，梯度便原地累加。（前面的各层再从 `hidden.grad` 接着反向。）
#
# </div>


# %% slide="code"
def one_backward(hidden, weight, targets, chunk):
    loss_in_pieces(hidden, weight, targets, chunk).backward()


def backward_by_chunk(hidden, weight, targets, chunk):
    hidden.grad, counted = torch.zeros_like(hidden), (targets != -100).sum()
    for start in range(0, len(targets), chunk):
        part = slice(start, start + chunk)
        rows = hidden.detach()[part].requires_grad_()
        loss = F.cross_entropy(rows @ weight.T, targets[part], reduction="sum")
        (loss / counted).backward()  # no checkpoint: the logits are gone then
        hidden.grad[part] = rows.grad


# %%
def head_peak(run, chunk):
    with symbolic():
        hidden = torch.randn(1024, 256, requires_grad=True)
        weight = nn.Parameter(torch.randn(32_000, 256))
        with MemoryMeter() as meter:
            run(hidden, weight, torch.randint(32_000, (1024,)), chunk)
    return meter.peak_bytes / weight.nbytes


# %% slide="result"
ways = one_backward, backward_by_chunk
sizes = (1024, 256, 128, 32) if lesson_02.check_loss_in_pieces.accepted else ()
rows = [(n, *(round(head_peak(way, n), 2) for way in ways)) for n in sizes]
table(
    ["tokens in a chunk", "one backward for the whole loss", "a backward per chunk"], rows
)  # peaks, of the matrix

# %% [markdown]
# <div lang="en">
#
# One chunk is the whole head: 12 times the matrix, 393 MB. Down the table the chunks get smaller: the first column stops at 3, the second goes on toward 2, the sum and what is to be added, and computes nothing twice: no checkpoint is left in it. That is how fused losses do it, such as Liger's: they make the gradient already in the forward pass.
#
# </div>
# <div lang="zh">
#
# 只有一段，就是不分段：矩阵的 12 倍，393 MB。越往下，每小段的 token 越少：第一列停在 3；第二列继续降向 2，即加好的和正要加上的；而且什么也不用算两遍，里面已经没有检查点了。Liger 之类的融合损失就是这样做的：在前向里就把梯度算好。
#
# </div>

# %% [markdown]
# ## 2.9 In your own code / 实际怎么写
#
# <div lang="en">
#
# You probably train a model of Hugging Face. Here is a small Llama from a configuration, with nothing to download: 4 layers, hidden size 256, 8 query heads and 4 key-value heads (`lesson_02.llama`). The first 32 labels of each sequence are −100, as for a prompt in fine-tuning.
#
# </div>
# <div lang="zh">
#
# 你训练的，多半是 Hugging Face 的模型。下面用一份配置造一个小的 Llama，不必下载任何东西：4 层，隐藏维度 256，8 个查询头，4 个键值头（`lesson_02.llama`）。每条序列的前 32 个标签是 −100，就像微调时的提示词。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# Each line below is run on a new copy of this model, and then forward and backward are measured. Two of the lines keep results: `keep_addmm` lists `aten.addmm` alone, `keep_mm` lists `aten.mm` and the attention operator. The last line lets the compiler choose what to keep, with half of its usual activations as the budget.
#
# **Guess first:** which line has the lowest peak, and which of the two lists saves FLOPs?
#
# </div>
# <div lang="zh">
#
# 下面的每一行，都在这个模型的一份新副本上运行，然后测量一次前向加反向。其中两行会保留一部分结果：`keep_addmm` 只列出 `aten.addmm`，`keep_mm` 列出 `aten.mm` 和注意力算子。最后一行让编译器自己选择保留什么，预算是它平常所留激活值的一半。
#
# **先猜**：哪一行的峰值最低？两份列表里，哪一份能省 FLOPs？
#
# </div>

# %% slide="result"
from torch.utils.checkpoint import create_selective_checkpoint_contexts as contexts

attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
keep_addmm = partial(contexts, [torch.ops.aten.addmm.default])
keep_mm = partial(contexts, [torch.ops.aten.mm.default, attention])
torch._functorch.config.activation_memory_budget = 0.5  # read by the compiler alone
lesson_02.measured_lines(keep_addmm=keep_addmm, keep_mm=keep_mm)

# %% [markdown]
# <div lang="en">
#
# One line more than halves the peak. It has an older name, which still works; its warning says that it will be removed in `transformers` 6. The older mode computes more, because it does not stop early, and it keeps a little more. Left out, `use_reentrant` is `False` in a model of `transformers` 5.23, but `True` in PyTorch's own `checkpoint`, as section 2.3 showed.
#
# `keep_addmm` changes nothing. A Llama's Linears have no bias, so they call `mm`; no operator on the list runs, and every layer is computed again. PyTorch does not say so (`checkpoint_blocks` warns). With `mm` and attention on the list, no product runs twice, and the peak is still 35 MB lower.
#
# The compiler was given a budget: 0 computes everything again, 1 is its default. On a GPU the line is `model.compile()`, whose backend needs a C++ compiler. Lesson 03 uses this budget. None of these lines touches the logits; section 2.8 does.
#
# </div>
# <div lang="zh">
#
# 一行代码就让峰值降到一半以下。它有一个旧名称，仍然能用，但警告说，`transformers` 6 会把它删去。较老的模式算得更多，因为它不会提前终止，留下的也略多一点。不写 `use_reentrant` 时，`transformers` 5.23 的模型用 `False`，PyTorch 自己的 `checkpoint` 用 `True`（见 2.3 节）。
#
# `keep_addmm` 什么也没有改变。Llama 的 Linear 没有偏置，调用的是 `mm`，列表里的算子一个也没有遇到，每一层都要重新计算一遍，PyTorch 对此没有提示（`checkpoint_blocks` 会发出警告）。列表里写上 `mm` 和注意力，就没有一次乘法要做两遍，峰值仍然低 35 MB。
#
# 编译器得到的是一个预算：0 表示全部重新计算，1 是它的默认值。在 GPU 上，这一行就是 `model.compile()`，它的后端需要 C++ 编译器。第 03 课还会讲到这个预算。这些写法都没有触及 logits，那要靠 2.8 节的损失。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# | where | the same, not run here |
# |---|---|
# | Trainer, TRL | `TrainingArguments(activation_checkpointing=True)` |
# | PyTorch, each layer | `checkpoint(layer, x, use_reentrant=False)`; with FSDP2, `checkpoint_wrapper(layer)` before `fully_shard` |
# | torchtitan | activation checkpoint mode `"full"` or `"selective"` in the training configuration |
# | Megatron-LM | `--recompute-granularity full --recompute-method uniform --recompute-num-layers 1`; or `--recompute-granularity selective` |
# | DeepSpeed | `deepspeed.checkpointing.checkpoint(block, x)` |
#
# Megatron's "selective" computes the middle of attention again, from the scores to the context, and keeps the rest: another choice than section 2.6's.
#
# </div>
# <div lang="zh">
#
# | 框架 | 同样的做法（此处未运行） |
# |---|---|
# | Trainer、TRL | `TrainingArguments(activation_checkpointing=True)` |
# | PyTorch，逐层 | `checkpoint(layer, x, use_reentrant=False)`；使用 FSDP2 时，在 `fully_shard` 之前写 `checkpoint_wrapper(layer)` |
# | torchtitan | 训练配置里的激活检查点模式 `"full"` 或 `"selective"` |
# | Megatron-LM | `--recompute-granularity full --recompute-method uniform --recompute-num-layers 1`；或 `--recompute-granularity selective` |
# | DeepSpeed | `deepspeed.checkpointing.checkpoint(block, x)` |
#
# Megatron 的 “selective” 只重计算注意力的中间部分（从分数到上下文），其余保留，与 2.6 节的选法不同。
#
# </div>

# %% [markdown]
# ## 2.10 Claims and measurements / 说法与实测
#
# <div lang="en">
#
# Four sentences that people meet, tried on the step of section 2.6 and on the layers of section 2.5.
#
# </div>
# <div lang="zh">
#
# 四句常见的说法，用 2.6 节的训练步和 2.5 节的各层来检验。
#
# </div>

# %% slide="result"
what_you_may_have_read("02", *lesson_02.figures_of_claims(arms, alone))

# %% [markdown] slide={"en": "The same step of the same decoder, one technique a row.\n\nWhat is the largest part of these 134.0 MB?", "zh": "同一个解码器的同一步，一种技术一行。\n\n这 134.0 MB 里，最大的是哪一部分？"}
# ## 2.11 The ledger / 账本
#
# <div lang="en">
#
# The same step of the same decoder, with one technique alone. This lesson's row:
#
# </div>
# <div lang="zh">
#
# 同一个解码器的同一步，只用一种技术。这是本课的一行：
#
# </div>

# %% slide="result"
ledger("02", "checkpoint each layer", arms["each layer"])

# %% [markdown] slide={"en": "Keep the input, compute the rest again: it saves what is absent at the peak.\n\nFLOPs are not time. The loss is a block, too.", "zh": "留下输入，其余再算：省下的是峰值那一刻不在的东西。\n\nFLOPs 不是时间。损失也是一个块。"}
# ## 2.12 Summary / 小结
#
# <div lang="en">
#
# - A checkpoint keeps a block's input and computes its activations again in backward. Gradients are equal.
# - It saves what is absent at the peak. Of layers alone, without a head, the last one's checkpoint saves nothing; nearly any other saves the layer and pays for its input. A formula for one moment ends where another moment is higher.
# - One more forward pass is about a third of a step if all weights are trained; early stop makes it less. Keeping the products of the linear layers costs next to no FLOPs here, but FLOPs are not time.
# - Whether groups of layers pay depends on depth, and on gradients: arriving, or there.
# - The loss is a block, too: in chunks, with backward after each, it needs little more than twice the gradient of its matrix.
#
# **Next:** [lesson 03](03_sqrt_schedule.ipynb) asks which blocks to forget.
#
# </div>
# <div lang="zh">
#
# - 检查点只留下一个块的输入，激活值到反向时再算一遍，梯度相等。
# - 省下的，是峰值那一刻不在的东西。只有这些层、没有输出头时，给最后一层加检查点，什么也不省；给别的层加，省下的几乎都是“一层的字节减去它的输入”。公式针对的是一个时刻，别的时刻更高时就不再成立。
# - 全部权重都训练时，多一次前向约是一步的三分之一，提前终止还能再少一点。保留线性层的乘积，在这里几乎不多花 FLOPs，但 FLOPs 不是时间。
# - 几层合成一个检查点是否划算，取决于深度，也取决于梯度是陆续产生，还是一开始就在。
# - 损失也是一个块：切成小段、每段做完就反向，所需内存只比词表矩阵梯度的两倍多一点。
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
# From here on nothing is needed for the other lessons. Each section stands alone; it uses the names that were defined above.
#
# </div>
# <div lang="zh">
#
# 以下内容，其他各课都不会用到。各节互相独立，只用到前面正文里定义过的名字。
#
# </div>

# %% [markdown]
# ## 2.13 What the short versions lack / 短短几行还缺什么
#
# <div lang="en">
#
# The four checkpoints of section 2.3 on unfriendly blocks; the experiments stand in `course_lib.lessons.lesson_02.modes`. This course is about memory, so look at the first row: the version with hooks keeps all that came back until the whole block is done, the libraries let each tensor go once it has been used.
#
# </div>
# <div lang="zh">
#
# 拿 2.3 节的四种检查点来跑几个不规矩的块；实验代码在 `course_lib.lessons.lesson_02.modes`。这是一门讲内存的课，所以先看第一行：带钩子的那个版本，会把重新算出来的张量全部留到整个块做完；两个库则是用完一个放掉一个。
#
# </div>

# %%
lesson_02.gaps(runs)

# %% [markdown]
# <div lang="en">
#
# Without the generator's state, dropout draws another mask, and the gradient belongs to a network that never ran. Autocast must be the same in the second run. Asked for one gradient, `MyCheckpoint` quietly adds to the weights' as well.
#
# The `save_for_backward` of `MyCheckpoint` notices an input that was changed in place; `with_hooks` keeps the tensor itself and returns a wrong gradient without a word. A saved tensor of another shape may broadcast: then only a comparison of shapes finds it. The last row is ✗ for all: nobody compares values. A block must compute the same thing twice.
#
# </div>
# <div lang="zh">
#
# 不保存发生器的状态，dropout 就会抽到另一个掩码，算出的梯度属于一个从未运行过的网络。第二遍的 autocast 也必须相同。只求一个梯度时，`MyCheckpoint` 会悄悄往权重的梯度里也加上一份。
#
# `MyCheckpoint` 里的 `save_for_backward` 能发现输入被原地改动；`with_hooks` 持有的是张量本身，会一声不响地返回错误的梯度。保存的张量换了形状，可能恰好可以广播，只有核对形状才能发现。最后一行全是 ✗：谁也不比较数值。一个块必须两遍都算出同样的东西。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# The error that people meet most with checkpoints says that the second run saved other tensors than the first. There are two usual causes. The block looks at something that has changed since: a counter, a flag, a random number that PyTorch does not restore. Or the second run happens in another state, such as under another `torch.autocast`. Here a block looks at a counter:
#
# </div>
# <div lang="zh">
#
# 使用检查点时最常见的错误，说的是第二次运行保存的张量与第一次不同。常见的原因有两个。一是块读取了某个已经改变的东西，例如计数器、开关，或者 PyTorch 不会恢复的随机数。二是第二次运行时的状态不同，例如处在另一个 `torch.autocast` 里。下面的块读取了一个计数器：
#
# </div>

# %%
calls = count()


def block(x):
    return x.sin().exp() if next(calls) == 0 else x.sin()


try:
    checkpoint(block, torch.ones(4, requires_grad=True), use_reentrant=False).sum().backward()
except torch.utils.checkpoint.CheckpointError as error:
    print(str(error).splitlines()[0])

# %% [markdown]
# ## 2.14 Reentrant or not: a table of experiments / 可重入与否：一张由实验填成的表
#
# <div lang="en">
#
# Many texts call the reentrant mode "more compatible". In each row ✓ means that the function ran twice, and that the gradient equals the one without a checkpoint. With `torch.utils.checkpoint` in place of the library's the answers are the same. In the first row the block's output is the loss itself, so backward finds no graph and raises; in section 2.3 a head came after the block, and the block was left out without an error.
#
# </div>
# <div lang="zh">
#
# 许多文章说可重入模式“兼容性更好”。每一行的 ✓ 表示函数运行了两次，并且梯度与不用检查点时相等。把库换成 `torch.utils.checkpoint`，答案也一样。第一行里，块的输出就是损失，反向找不到计算图，于是报错。2.3 节里块后面还有输出头，所以不报错，只是这个块得不到梯度。
#
# </div>

# %%
answers = lesson_02.modes(readable)
table(["case", "reentrant", "non-reentrant"], answers)

# %%
all(a == b for a, b in zip(answers, lesson_02.modes(checkpoint), strict=True))

# %% [markdown]
# <div lang="en">
#
# The reentrant mode has one row of its own: functions that forbid saved-tensor hooks, such as `torch.func.grad`, run inside it. Five rows go to the other mode alone. It is cheaper, too, since only the non-reentrant mode stops early.
#
# </div>
# <div lang="zh">
#
# 可重入模式只在一行上胜出：像 `torch.func.grad` 这样不允许给保存的张量挂钩子的函数，可以在它里面运行。有五行只有另一种模式做得到。它的开销也更小，因为只有非可重入模式会提前终止。
#
# </div>

# %% [markdown]
# ## 2.15 Selective checkpointing in fifteen lines / 十五行写出选择性检查点
#
# <div lang="en">
#
# How can a second run *skip* a product? A dispatch mode stands behind every operator (lesson 01). In the first run it keeps the results of the chosen operators; in the second it hands them out again, in the same order, and the operator does not run. A pair of contexts, one for each run, is what `context_fn` wants:
#
# </div>
# <div lang="zh">
#
# 第二遍怎么能**跳过**一次乘法？分发模式守在每个算子后面（第 01 课）。第一遍里，它把选中的算子的结果留下；第二遍里，按同样的顺序交出来，算子本身不再运行。`context_fn` 要的就是一对上下文，每遍一个：
#
# </div>


# %%
from torch.utils._python_dispatch import TorchDispatchMode


class Keep(TorchDispatchMode):
    def __init__(self, operators, kept, second):
        super().__init__()
        self.operators, self.kept, self.second = operators, kept, second

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator in self.operators and self.second:
            return self.kept.pop(0)
        result = operator(*args, **(kwargs or {}))
        if operator in self.operators:
            self.kept.append(result.detach())
        return result


# %%
def selective(operators):
    kept = []
    return Keep(operators, kept, second=False), Keep(operators, kept, second=True)


def nullcontexts():
    return selective([])


contexts, rows = {"none kept": nullcontexts, "products kept": partial(selective, products)}, []
block, x = DecoderLayer(256, 8), torch.randn(2, 128, 256, requires_grad=True)
expected = gradients(block(x))
for name, context_fn in contexts.items():
    with lesson_02.flop_counter() as counter:
        found = gradients(checkpoint(block, x, use_reentrant=False, context_fn=context_fn))
    equal = all(map(torch.equal, expected, found))
    rows.append((name, "✓" if equal else "✗", round(counter.get_total_flops() / 1e9, 3)))
table(["", "gradients equal", "GFLOPs"], rows)

# %% [markdown]
# <div lang="en">
#
# The library's version, and PyTorch's `create_selective_checkpoint_contexts`, add what these lines lack: policies that decide case by case, results that were changed in place, and random numbers.
#
# </div>
# <div lang="zh">
#
# 课程库的版本和 PyTorch 的 `create_selective_checkpoint_contexts` 补上了这几行所缺的：逐例决定的策略、被原地改动的结果，以及随机数。
#
# </div>

# %% [markdown]
# ## 2.16 Randomness, and BatchNorm counts twice / 随机性，以及 BatchNorm 统计两次
#
# <div lang="en">
#
# `preserve_rng_state=False` leaves out the generators' state, for speed; autocast is restored all the same. Where the output was dropped, the input's gradient must be zero, and nowhere else.
#
# A block that changes a buffer changes it twice: BatchNorm's running statistics move two steps for one batch. The remedy is a context for the recomputation in which they stand still.
#
# </div>
# <div lang="zh">
#
# `preserve_rng_state=False` 不保存发生器的状态，以换取速度；autocast 照样会恢复。检验方法：输出被丢弃的地方，输入的梯度必须为零，别处都不为零。
#
# 一个块若改动缓冲区，就会改动两次：同一个批次让 BatchNorm 的滑动统计量走了两步。补救办法是让重计算在一个使统计量保持不动的上下文里进行。
#
# </div>

# %%
same = {}
for preserve in (True, False):
    x = torch.ones(1000, requires_grad=True)
    output = checkpoint(nn.Dropout(0.5), x, use_reentrant=False, preserve_rng_state=preserve)
    output.sum().backward()
    same[preserve] = torch.equal(output == 0, x.grad == 0)
same

# %%
from contextlib import contextmanager, nullcontext


@contextmanager
def standing_still(norm):
    momentum, count = norm.momentum, norm.num_batches_tracked.clone()
    norm.momentum = 0.0
    try:
        yield
    finally:
        norm.momentum = momentum
        norm.num_batches_tracked.copy_(count)


# %%
def plainly(norm, images):
    return norm(images)


def checkpointed(norm, images):
    return checkpoint(norm, images, use_reentrant=False)


def with_remedy(norm, images):
    def contexts():
        return nullcontext(), standing_still(norm)  # for the first run, for the second

    return checkpoint(norm, images, use_reentrant=False, context_fn=contexts)


# %%
rows = []
ways = {"plain": plainly, "checkpointed": checkpointed, "with the fix": with_remedy}
for name, run in ways.items():
    norm, images = nn.BatchNorm1d(4), torch.linspace(1, 2, 32).view(8, 4).requires_grad_()
    run(norm, images).exp().sum().backward()
    mean = norm.running_mean / images.detach().mean(0)
    rows.append((name, round(float(mean.mean()), 3), int(norm.num_batches_tracked)))
table(["", "running mean (in units of the batch's mean)", "batches counted"], rows)

# %% [markdown]
# ## 2.17 Attention over longer sequences / 更长序列上的注意力
#
# <div lang="en">
#
# One attention layer, used three times with the same weights: equal outputs with and without checkpoints, and a saving that grows with the square once P is the larger part. Predicted is what two of the three passes would hold, $2 (5 s b h + a s^2 b)$ elements, less their inputs, which stay. With short sequences the peak comes later, when there are weight gradients, and these the formula leaves out.
#
# </div>
# <div lang="zh">
#
# 同一个注意力层，用同样的权重连做三遍：用不用检查点，输出相等；P 占大头之后，省下的字节随长度的平方增长。预测的是三遍中两遍原本要保存的 $2 (5 s b h + a s^2 b)$ 个元素，减去仍要留下的输入。序列短时，峰值来得晚一些：那时已经有了权重的梯度，公式没有计入它们。
#
# </div>

# %%
from course_lib.models import Attention

attention = Attention(128, 4)


def three_passes(length, checkpointed):
    y = torch.linspace(-1, 1, length * 128).view(1, length, 128)  # (b, s, h)
    attention.zero_grad()
    with MemoryMeter() as meter:
        for _ in range(3):
            y = checkpoint(attention, y, use_reentrant=False) if checkpointed else attention(y)
        y.sum().backward()
    return meter.peak_bytes, y


# %%
rows, equal = [], []
for length in (256, 512, 1024):
    (peak, output), (lower, again) = three_passes(length, False), three_passes(length, True)
    predicted = 4 * 2 * (5 * length * 128 + 4 * length**2 - length * 128)
    rows.append((f"s = {length}", predicted, peak - lower))
    equal.append(torch.equal(output, again))
print(equal)
predictions(rows)

# %% [markdown]
# ## 2.18 A training loop with its log / 带日志的训练循环
#
# <div lang="en">
#
# A post-norm layer, as in 2017, behind a checkpoint: model size 512, 8 heads, a feed-forward network four times as wide, Adam, a mean squared error, and a log that names file, function and line. With and without the checkpoint the losses agree to the last bit.
#
# </div>
# <div lang="zh">
#
# 一个加了检查点的 post-norm（后置归一化）层，2017 年的样式：模型维度 512，8 个头，前馈（feed-forward）网络的宽度是模型维度的四倍，用 Adam 和均方误差，日志注明文件、函数和行号。用与不用检查点，损失逐比特一致。
#
# </div>

# %%
import io
import logging

log = io.StringIO()
place = "%(filename)s, %(funcName)s, line %(lineno)d"
logging.basicConfig(stream=log, level=logging.INFO, format=f"{place}: %(message)s", force=True)


# %%
def train(checkpointed):
    layer = DecoderLayer(512, 8, norm_first=False)
    adam, losses = torch.optim.Adam(layer.parameters()), []
    x = torch.linspace(-1, 1, 4 * 16 * 512).view(4, 16, 512)  # (b, s, h)
    for step in (1, 2, 3):
        y = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
        loss = F.mse_loss(y, x.flip(1))
        loss.backward()
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
        logging.info("step %d: loss %.3f", step, losses[-1])
    return losses


# %%
losses, without = train(checkpointed=True), train(checkpointed=False)
losses == without, [f"{loss:.3f}" for loss in losses]

# %%
[line.partition(", ")[2] for line in log.getvalue().splitlines()[:3]]  # the file is a number here

# %% [markdown]
# ## 2.19 `checkpoint_sequential`, and older claims / `checkpoint_sequential`，以及更早的说法
#
# <div lang="en">
#
# For an `nn.Sequential`, PyTorch has `checkpoint_sequential`. It cuts the network into segments and puts a checkpoint around each of them except the last. How many segments are best is the question of lesson 03.
#
# </div>
# <div lang="zh">
#
# 对 `nn.Sequential`，PyTorch 有现成的 `checkpoint_sequential`。它把网络切成几段，除最后一段外各加一个检查点。切几段最好，是第 03 课的问题。
#
# </div>

# %%
from torch.utils.checkpoint import checkpoint_sequential

from course_lib.models import deep_mlp

network, data, rows = deep_mlp(depth=16, width=256), torch.randn(512, 256), []
for segments in (1, 2, 4, 8):
    network.zero_grad()
    with MemoryMeter(network) as meter:
        output = checkpoint_sequential(network, segments, data, use_reentrant=False)
        output.square().mean().backward()
    rows.append((segments, round(meter.peak_bytes / 1e6, 1)))
table(["segments", "peak (MB)"], rows)

# %% [markdown]
# <div lang="en">
#
# It has two traps. Hand it only the Linear layers, and it runs only those: the GELUs are gone. In the reentrant mode, which is the one that PyTorch takes if `use_reentrant` is left out, and with an input that needs no gradient, as data do, the checkpointed segments are cut off: they get no gradients, with a warning and no error.
#
# </div>
# <div lang="zh">
#
# 它有两个陷阱。只把各个 Linear 列成表交给它，它就只运行这些：GELU 都没有了。用可重入模式（不写 `use_reentrant` 时，PyTorch 用的就是它）、输入又不需要梯度（数据就是如此），加了检查点的各段便与计算图断开，得不到梯度，只有警告，不报错。
#
# </div>

# %%
network, data = deep_mlp(depth=6, width=16), torch.randn(4, 16)
linears = [module for module in network if isinstance(module, nn.Linear)]
skipped = checkpoint_sequential(linears, 3, data, use_reentrant=False)
equal_numbers = int((skipped == network(data)).sum())
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    checkpoint_sequential(network, 3, data).sum().backward()  # use_reentrant left out
trained = sum(linear.weight.grad is not None for linear in linears)


# %%
def gradient_of(function, checkpointed):
    x, branches = torch.linspace(0, 1, 5).requires_grad_(), [torch.sin, torch.cos]

    def block(x):
        return branches[function](x) * x  # another branch each step

    output = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
    return torch.autograd.grad(output.sum(), x)[0]


dynamic = sum(torch.equal(gradient_of(i, True), gradient_of(i, False)) for i in (0, 1))

# %%
from course_lib.memory import saved_tensors

kept = {}
for layers in (4, 16):
    with symbolic():
        decoder, tokens = decoder_with(1, make_decoder(layers=layers)), random_tokens(8, 128, 2048)
        kept[layers] = saved_tensors(decoder.loss, tokens).total_bytes
answers = lesson_02.modes(readable)
score = [sum(row[column] == "✓" for row in answers) for column in (1, 2)]
lesson_02.older_claims(kept, (dynamic, 2), score, (equal_numbers, skipped.numel()), trained)

# %% [markdown]
# ## 2.20 On a GPU / 在 GPU 上
#
# <div lang="en">
#
# The same code runs on CUDA, where the random number generators of the current device and of the inputs' devices are kept as well. If you have a GPU, this cell measures on it. Otherwise it shows what an H200 measured: with a checkpoint around each layer the peak falls from 8,790 to 2,548 MB, and forward and backward take 24% longer.
#
# </div>
# <div lang="zh">
#
# 同样的代码可以在 CUDA 上运行，还会保存当前设备和各输入所在设备的随机数发生器状态。有 GPU 时，这个单元格会现场测量；没有 GPU，就显示在一块 H200 上记录的数据：每层都设检查点，峰值从 8,790 MB 降到 2,548 MB，前向加反向多花 24% 的时间。
#
# </div>

# %% tags=["nbval-ignore-output", "shows-device"]
from course_lib.lessons import on_gpu

on_gpu("02")

# %% [markdown]
# ## 2.21 More exercises / 更多练习
#
# <div lang="en">
#
# **Exercise 5.** Make a checkpoint that is right for blocks with dropout, several in a row: the second run of a block draws the same mask as its first, whatever was drawn before and in between, and the random numbers after it are as if it had not happened. (`careful_checkpoint`: a function of `block` and `x`, or a Function.)
#
# </div>
# <div lang="zh">
#
# **练习 5。** 写一个对带 dropout 的块也正确的检查点，几个块连用也要正确：不论之前和中间抽过什么数，每个块的第二遍都抽到与第一遍同样的掩码，并且之后的随机数要与没有这一遍时一样。（`careful_checkpoint`：以 `block` 和 `x` 为参数的函数，或一个 Function。）
#
# </div>

# %% minutes=6
careful_checkpoint = None
lesson_02.check_dropout_checkpoint(careful_checkpoint)


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


lesson_02.check_dropout_checkpoint(Careful.apply)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# **Exercise 6.** Forward and backward of the decoder, without an optimizer, may peak at 110 MB (222.7 MB plain) and do at most 1.2 times the FLOPs. Which operators must a selective policy keep? Predict before you try: the head's moment has 63.2 MB with nothing kept, and each kept result adds eight times its bytes. (`operators`: a list, such as `[torch.ops.aten.gelu.default]`.)
#
# </div>
# <div lang="zh">
#
# **练习 6。** 解码器的前向加反向，不带优化器，峰值不得超过 110 MB（基线 222.7 MB），FLOPs 不得超过 1.2 倍。选择性策略必须保留哪些算子？先预测再试：什么都不保留时，输出头那一刻有 63.2 MB，每保留一种结果，就加上它的字节数的八倍。（`operators`：一个列表，例如 `[torch.ops.aten.gelu.default]`。）
#
# </div>

# %% minutes=4
operators = None
lesson_02.check_policy(operators)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
lesson_02.check_policy([torch.ops.aten.bmm.default])
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# **Exercise 7.** The loss of section 2.8, in one backward over all chunks, may peak at 150 MB. What is the largest chunk, if it is a power of 2? Three tensors of a chunk's logits and one gradient of the matrix are there at once.
#
# </div>
# <div lang="zh">
#
# **练习 7。** 2.8 节的损失，各小段合在一次反向里，峰值不得超过 150 MB。每小段最多可以有多少个 token（取 2 的幂）？同时存在的，是一小段的三份 logits 和一份矩阵的梯度。
#
# </div>

# %% minutes=2
answer = None
lesson_02.check_head_chunk(answer)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
matrix, hidden_bytes = 4 * 32_000 * 256, 4 * 1024 * 256
fits = [n for n in (64, 128, 256, 512) if 3 * 4 * n * 32_000 + matrix + hidden_bytes <= 150e6]
lesson_02.check_head_chunk(max(fits))
### END SOLUTION
