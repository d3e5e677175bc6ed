# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] slide={"en": "One device: 277.7 MB. Two devices, half of the batch each: 207.6 MB.\n\nWhy not half?", "zh": "一台设备：277.7 MB。两台设备，各做半个批次：每台 207.6 MB。\n\n为什么不是一半？"}
# # 8 What changes when one device is not enough? (DDP, ZeRO, FSDP) / 一台设备不够时，会有什么不同？（数据并行、ZeRO、FSDP）
#
# <div lang="en">
#
# On one device the step of lesson 01 holds 277.7 MB. Give it to two, half of the batch each, in PyTorch's usual way: each holds 207.6 MB. That is not half. It is more than half of the batch takes on a device alone, 180.1 MB. The other 27.5 MB are for gradients, and they are taken at the very moment at which lesson 01 found none.
#
# By the end of this page four devices of 60 MB take this step together, and you have predicted what each of them holds and sends.
#
# </div>
# <div lang="zh">
#
# 第 01 课的那一步，在一台设备上要占 277.7 MB。按 PyTorch 最常用的办法交给两台，每台分半个批次：每台占 207.6 MB。这不是一半，甚至比一台设备单独做半个批次还多，那只要 180.1 MB。多出的 27.5 MB 是给梯度的，而且偏偏出现在第 01 课里一个梯度都没有的那一刻。
#
# 学完这一页，四台 60 MB 的设备会合力走完这一步，每台持有多少、发送多少，你都能预先算出来。
#
# </div>

# %%
from course_lib.teaching import language

language()

# %% [markdown]
# <div lang="en">
#
# **Goals** (75 minutes). Type what a rank holds under DDP and ZeRO 1 to 3, and meet the measurement to the byte. Write the step of ZeRO 1. Count what goes over the wire. Train a step that no device of this size could take alone.
#
# **What to know before**: lesson 01 (the peak of a step) and what a checkpoint does (lesson 02). No second device is needed: here a device is a process on your CPU, and the code for GPUs is the same. $\Psi$ is the number of parameters, $N$ the number of ranks. MB is $10^6$ bytes.
#
# </div>
# <div lang="zh">
#
# **目标**（75 分钟）：写出 DDP 和 ZeRO 1 到 3 之下每个进程持有多少，与实测对照，精确到字节；亲手写出 ZeRO 1 的一步；数清通信了多少字节；训练单台设备装不下的一步。
#
# **预备知识**：第 01 课（一步的峰值），以及检查点的作用（第 02 课）。不需要第二台设备：在这里，一台设备就是 CPU 上的一个进程，换到 GPU 上代码不变。$\Psi$ 是参数个数，$N$ 是进程（rank）数。MB 指 $10^6$ 字节。
#
# </div>

# %%
import tempfile

import torch

from course_lib.accumulation import split
from course_lib.checkpoint import checkpoint_blocks
from course_lib.distributed import launch, predict, sent_bytes, shapes_of, task_of
from course_lib.lessons import lesson_08
from course_lib.lessons.ledger import ledger
from course_lib.memory import MemoryBudgetExceeded, MemoryMeter
from course_lib.teaching import predictions, table, text

# %% [markdown] slide={"en": "**Data parallelism**: every rank has the whole model, and an $N$-th of the batch.\n\nAn **all-reduce** adds up the gradients.", "zh": "**数据并行**：每个进程都有完整的模型，各做批次的 $N$ 分之一。\n\n**all-reduce** 把梯度加起来。"}
# ## 8.1 One process a device / 每台设备一个进程
#
# <div lang="en">
#
# Each device gets a process of its own, called a **rank**. Under **data parallelism** (PyTorch's `DistributedDataParallel`, DDP) every rank has the whole model and an $N$-th of the batch. In backward an **all-reduce** adds the gradients of all ranks up, so that all take the same step.
#
# Whatever we share out below, it must train the same model. So first the losses that all must follow: one process, the whole batch of 8, the decoder of lesson 00. The meter is on; it gives the peaks to compare with.
#
# </div>
# <div lang="zh">
#
# 每台设备有自己的一个**进程**（rank）。在**数据并行**（PyTorch 的 `DistributedDataParallel`，简称 DDP）之下，每个进程都有完整的模型，各做批次的 $N$ 分之一。反向时用一次 **all-reduce**（全归约）把各个进程的梯度加起来，于是大家走的是同一步。
#
# 下面不管怎么分，训练的都必须是同一个模型。所以先算出大家都要跟上的损失：一个进程，整个批次 8 条序列，第 00 课的解码器。计量器开着，顺便量出用来比较的峰值。
#
# </div>

# %%
task = task_of()  # the decoder, and a batch of 8 sequences for each step


def alone(steps, sequences=8):
    model, losses = task.make_model(), []
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(steps):
        batch = next(split(task.make_batch(step), sequences))
        with MemoryMeter(model, adam) as meter:
            loss, tokens = task.loss_sum(model, batch)
            (loss / tokens).backward()
            adam.step()
        adam.zero_grad()
        losses.append(loss.item() / tokens.item())
    return losses, meter.at_peak()


# %% slide="result"
losses, whole = alone(steps=4)
_, half = alone(steps=2, sequences=4)
_, quarter = alone(steps=2, sequences=2)
peaks = {"8 sequences": whole, "4 sequences": half, "2 sequences": quarter}
table(["one device", "peak, bytes"], [(name, sum(peak.values())) for name, peak in peaks.items()])

# %% [markdown] slide={"en": "DDP holds 16 bytes a parameter, $N$ times over. ZeRO cuts: first Adam's state, then gradients, then weights.\n\n**Type the four formulas.**", "zh": "DDP 之下，每个参数的 16 字节存了 $N$ 遍。ZeRO 依次切开：Adam 的状态、梯度、权重。\n\n**写出四个公式。**"}
# ## 8.2 What each rank holds / 每个进程持有什么
#
# <div lang="en">
#
# Under DDP $N$ ranks hold the same 16 bytes a parameter $N$ times. **ZeRO** (Rajbhandari et al. 2020) cuts them into $N$ parts, which is called **sharding**, in three steps:
#
# | | weights | gradients | Adam's state |
# |---|---|---|---|
# | DDP | whole | whole | whole |
# | ZeRO 1 | whole | whole | cut |
# | ZeRO 2 | whole | cut | cut |
# | ZeRO 3, in PyTorch FSDP2 | cut | cut | cut |
#
# The paper's formulas are for mixed precision: $16\Psi$, $4\Psi + 12\Psi/N$, $2\Psi + 14\Psi/N$ and $16\Psi/N$ bytes. Our decoder is fp32 throughout: 4, 4 and 8 bytes a parameter.
#
# **Exercise 1.** Type the bytes of a rank in fp32, for any `psi` and `n`.
#
# </div>
# <div lang="zh">
#
# 在 DDP 之下，每个参数那 16 字节，$N$ 个进程各持有一份，一模一样。**ZeRO**（Rajbhandari et al. 2020）把它们切成 $N$ 份，这叫**分片**（sharding），分三步走：
#
# | | 权重 | 梯度 | Adam 的状态 |
# |---|---|---|---|
# | DDP | 完整 | 完整 | 完整 |
# | ZeRO 1 | 完整 | 完整 | 切开 |
# | ZeRO 2 | 完整 | 切开 | 切开 |
# | ZeRO 3，即 PyTorch 的 FSDP2 | 切开 | 切开 | 切开 |
#
# 论文的公式是针对混合精度的：$16\Psi$、$4\Psi + 12\Psi/N$、$2\Psi + 14\Psi/N$ 和 $16\Psi/N$ 字节。我们的解码器全是 fp32：每个参数 4、4、8 字节。
#
# **练习 1。** 写出 fp32 下每个进程的字节数，对任意的 `psi` 和 `n`。
#
# </div>


# %% minutes=7
def held(psi, n):
    return {"DDP": 0, "ZeRO 1": 0, "ZeRO 2": 0, "ZeRO 3": 0}  # bytes a rank, in fp32


lesson_08.check_held(held)


# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not lesson_08.check_held.accepted:

    def held(psi, n):
        return {
            "DDP": 16 * psi,
            "ZeRO 1": 8 * psi + 8 * psi / n,
            "ZeRO 2": 4 * psi + 12 * psi / n,
            "ZeRO 3": 16 * psi / n,
        }


lesson_08.check_held(held)
### END SOLUTION

# %% slide="result"
psi = 6_875_648  # the decoder's parameters
predicted = {n: held(psi, n) for n in range(1, 9)}
names = list(predicted[1])
rows = [(n, *(round(predicted[n][name] / 1e6, 1) for name in names)) for n in (1, 2, 4, 8)]
table(["ranks", *(text("{name}, MB", name=name) for name in names)], rows)

# %% [markdown] slide={"en": "`torchrun` starts a process for each device, and ends all if one fails.\n\nDo the losses agree?", "zh": "`torchrun` 为每台设备启动一个进程；一个失败，全部结束。\n\n损失一致吗？"}
# ## 8.3 Run it on two / 用两个进程跑一遍
#
# <div lang="en">
#
# In a terminal you would type this. `torchrun` starts two processes, tells each its number and where to find the other, and ends both if one fails:
#
# ```
# python -m torch.distributed.run --standalone --nproc-per-node 2 \
#     -m course_lib.distributed --mode ddp,zero1,fsdp --steps 3
# ```
#
# `launch` types it for us and reads what the ranks print. Three steps in each mode; the third is metered, as all after it would be. (`--details` adds what is live at the peak; `--save` is for section 8.17.)
#
# </div>
# <div lang="zh">
#
# 在终端里，你会敲下面这条命令。`torchrun` 启动两个进程，告诉它们各自的编号、到哪里去找对方；有一个失败，就把两个都结束掉：
#
# ```
# python -m torch.distributed.run --standalone --nproc-per-node 2 \
#     -m course_lib.distributed --mode ddp,zero1,fsdp --steps 3
# ```
#
# `launch` 替我们敲这条命令，再读取各个进程打印的结果。每种做法走三步，计量第三步，以后的各步都与它相同。（`--details` 附上峰值时存活的字节；`--save` 留给 8.17 节。）
#
# </div>

# %% slide="code"
saved = tempfile.TemporaryDirectory()
options = ["--mode", "ddp,zero1,fsdp", "--steps", "3", "--details", "--save", saved.name]
two = {run["mode"]: run for run in launch(2, *options)}


# %%
def follows(run, wanted):
    return all(abs(a - b) < 1e-5 for a, b in zip(run["losses"], wanted, strict=True))


{mode: follows(run, losses[:3]) for mode, run in two.items()}

# %% [markdown] slide={"en": "All three follow the single process.\n\nSo what does a rank hold, and was your formula right?", "zh": "三种做法都跟上了单个进程。\n\n那么每个进程持有多少？你的公式对吗？"}
# <div lang="en">
#
# All three follow the single process, to 0.00001: sums over two ranks are rounded in another order, so not to the last bit. Now what each rank holds when its optimizer steps.
#
# </div>
# <div lang="zh">
#
# 三种做法都跟得上单个进程，误差在 0.00001 以内：两个进程的求和次序不同，舍入也就不同，所以做不到逐比特相等。现在看优化器更新时，每个进程持有多少。
#
# </div>

# %% slide="result"
stage_of = {"ddp": "DDP", "zero1": "ZeRO 1", "fsdp": "ZeRO 3"}
rows = []
for mode, stage in stage_of.items():
    rows.append((stage, predicted[2][stage], lesson_08.held_by(two[mode])))
predictions(rows, unit="bytes")

# %% [markdown]
# <div lang="en">
#
# The 400 bytes again: Adam counts the steps of each of the 100 tensors, in 4 bytes. ZeRO 1 is 22,596 bytes off, for PyTorch deals out whole tensors, and the two heaps are not quite equal; here is the larger one. FSDP2 cuts every tensor along its first dimension, and both halves are equal: this decoder has no odd ones.
#
# </div>
# <div lang="zh">
#
# 又是那 400 字节：100 个张量，Adam 各记一个步数，每个 4 字节。ZeRO 1 差了 22,596 字节，因为 PyTorch 是把张量整个整个地分给各个进程，两堆不会正好相等，这里列的是较大的一堆。FSDP2 沿第一维把每个张量切开，两半相等：这个解码器没有切不匀的张量。
#
# </div>

# %% [markdown] slide={"en": "4 sequences on one device peak at 180.1 MB, without a single gradient.\n\n**Guess first.** A DDP rank with 4 sequences? An FSDP2 rank?", "zh": "一台设备做 4 条序列，峰值 180.1 MB，此刻没有一个梯度。\n\n**先猜**：DDP 的一个进程做 4 条序列呢？FSDP2 呢？"}
# ## 8.4 Where is the peak? / 峰值在哪里？
#
# <div lang="en">
#
# So much for what is held. The peak is another matter: activations come on top, and an $N$-th of the batch has an $N$-th of them, under every mode.
#
# **Guess first.** Lesson 01 found the peak at the start of backward, with all activations and not one gradient. One device with 4 sequences has 82.5 MB of weights and Adam's state, 97.6 MB of all else: 180.1 MB. What is the peak of a DDP rank with 4 sequences? Of an FSDP2 rank, which holds 41.3 MB less of weights and state?
#
# </div>
# <div lang="zh">
#
# 以上是持有的部分。峰值是另一回事：激活值还要算在上面，而批次的 $N$ 分之一，激活值也是 $N$ 分之一，哪种做法都如此。
#
# **先猜**：第 01 课发现峰值在反向刚开始时，激活值全都在，梯度一个也没有。一台设备做 4 条序列，权重和 Adam 的状态是 82.5 MB，其余 97.6 MB，共 180.1 MB。DDP 的一个进程做 4 条序列，峰值是多少？FSDP2 的进程，权重和状态少持有 41.3 MB，峰值又是多少？
#
# </div>

# %%
my_ddp_peak, my_fsdp_peak = None, None  # bytes, such as 150e6

# %%
peak_of = {mode: run["taken"][0]["peak_bytes"] for mode, run in two.items()}
guesses = [("DDP", my_ddp_peak, peak_of["ddp"]), ("FSDP2", my_fsdp_peak, peak_of["fsdp"])]
predictions(guesses)

# %% slide="result"
at_peak = {"one device, 8 sequences": whole, "one device, 4 sequences": half}
labels = {"ddp": "DDP, a rank of 2", "zero1": "ZeRO 1, a rank of 2", "fsdp": "FSDP2, a rank of 2"}
at_peak |= {labels[mode]: run["taken"][0]["at_peak"] for mode, run in two.items()}
title = "At the peak DDP holds room for all gradients; one device and FSDP2 hold none"
lesson_08.draw_peaks(at_peak, title)

# %% [markdown] slide={"en": "DDP writes gradients into **buckets**, made before the first step and never freed.\n\n“Gradients come as activations go” does not hold here.", "zh": "DDP 把梯度写进**桶**（bucket）：第一步之前建好，从不释放。\n\n“激活值释放，梯度才到来”在这里不成立。"}
# <div lang="en">
#
# 207.6 MB: at the peak DDP holds the bytes of all gradients, 27.5 MB, though none has been computed. It makes **buckets** before the first step, into which backward writes gradients, so that a full bucket can be sent while the next one fills. `zero_grad` drops the gradients, which are views of the buckets; the buckets stay. "Gradients come as activations go" (lesson 01) does not hold under DDP. ZeRO 1 has the same buckets: as many bytes as the half of Adam's state that it spares, hence 180.1 again.
#
# FSDP2 has none: it reduces a block's gradient as soon as it is whole, and keeps its own part. At the peak that saves 66.5 MB against DDP, more than the formula's 55.0 MB. The 2.2 MB beyond its half are the gathered root: embeddings, last norm and head, whose matrix is the token embedding's.
#
# </div>
# <div lang="zh">
#
# 207.6 MB：峰值时一个梯度都还没算出来，DDP 却已占着全部梯度的字节，27.5 MB。它在第一步之前就建好了**桶**（bucket），反向把梯度写进桶里，一个桶满了就发出去，同时填下一个。`zero_grad` 扔掉的梯度只是桶的视图，桶还在。“激活值释放，梯度才到来”（第 01 课），在 DDP 之下不成立。ZeRO 1 用的是同样的桶，字节数与它省下的那一半 Adam 状态一样多，所以又是 180.1。
#
# FSDP2 没有桶：一个块的梯度一算齐就归约，只留自己那一份。所以峰值时它比 DDP 省 66.5 MB，比公式给出的 55.0 MB 还多。它在自己的一半之外多持有 2.2 MB，那是收集来的根：嵌入、最后的归一化和输出头（它与 token 嵌入共用一个矩阵）。
#
# </div>

# %% [markdown] slide={"en": "**reduce-scatter**: everybody gets a part of the sum. **all-gather**: everybody gets all parts.\n\nOne after the other: an all-reduce.", "zh": "**reduce-scatter**：每个进程得到和的一份。**all-gather**：每个进程得到全部各份。\n\n先后相接，就是 all-reduce。"}
# ## 8.5 ZeRO 1, by hand / 亲手写 ZeRO 1
#
# <div lang="en">
#
# If each rank has an $N$-th of Adam's state, it can update an $N$-th of the weights. It needs the sum of all ranks' gradients for that part only, and in the end everybody needs all weights. Two **collectives**, operations that all ranks call together, do just that:
#
# - **reduce-scatter**: adds the tensors of all ranks up, and gives rank $r$ the $r$-th part of the sum;
# - **all-gather**: gives everybody all parts, one behind the other.
#
# One after the other they are an all-reduce. Here are four ranks within one process: `wire` takes a list with one tensor a rank, gives such a list, and counts what a rank sends.
#
# </div>
# <div lang="zh">
#
# 如果每个进程只有 Adam 状态的 $N$ 分之一，它就能更新权重的 $N$ 分之一。为此，它只需要全部进程的梯度之和中属于自己的那一份；最后，大家都要拿到全部权重。有两种**集合通信**（所有进程一起调用的操作）恰好做这两件事：
#
# - **reduce-scatter**（归约后分发）：把各个进程的张量加起来，第 $r$ 个进程得到和的第 $r$ 份；
# - **all-gather**（全收集）：把各份依次拼好，人手一份。
#
# 两者先后相接，就是 all-reduce。下面在一个进程里摆出四个进程：`wire` 接受一个列表，每个进程一个张量，返回同样的列表，并数出一个进程发送多少。
#
# </div>

# %% slide="both"
wire = lesson_08.Wire()
four_tensors = [torch.full((8,), float(rank)) for rank in range(4)]  # 0, 1, 2, 3
parts = wire.reduce_scatter(four_tensors)
gathered = wire.all_gather(parts)
parts[0], gathered[0], wire.sent_bytes

# %% [markdown] slide={"en": "**Write the step of ZeRO 1.**\n\nEach Adam sees its piece alone; at the end everybody has all weights.", "zh": "**写出 ZeRO 1 的一步。**\n\n每个 Adam 只看到自己的一份；最后人人都有全部权重。"}
# <div lang="en">
#
# **Exercise 2.** Write the step of ZeRO 1. `weights` and `gradients` are lists with a whole tensor a rank. `adams[r](piece, gradient)` gives the updated piece, and makes its moments as long as the first piece that it sees. Return the new weights, whole, one tensor a rank. The batch's gradient is the mean over the ranks.
#
# The check compares with Adam on one device, counts the state of each rank, and what is sent.
#
# </div>
# <div lang="zh">
#
# **练习 2。** 写出 ZeRO 1 的一步。`weights` 和 `gradients` 是列表，每个进程一个完整的张量。`adams[r](piece, gradient)` 返回更新后的那一份；它的两个矩，与它见到的第一份一样长。返回新的权重：每个进程一个完整的张量。整批的梯度是各个进程的平均。
#
# 检查会与单台设备上的 Adam 比较，并数出每个进程的状态和发送的字节。
#
# </div>


# %% minutes=14
def sharded_step(weights, gradients, adams, wire):
    return None  # the new weights: a list with one whole tensor a rank


lesson_08.check_sharded_step(sharded_step)


# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not lesson_08.check_sharded_step.accepted:

    def sharded_step(weights, gradients, adams, wire):
        n = len(weights)
        sums = wire.reduce_scatter(gradients)
        pieces = [weight.chunk(n)[rank] for rank, weight in enumerate(weights)]
        updated = [adams[rank](pieces[rank], sums[rank] / n) for rank in range(n)]
        return wire.all_gather(updated)


lesson_08.check_sharded_step(sharded_step)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# Two numbers sent for each weight, as under DDP: cutting the state is free. PyTorch's `ZeroRedundancyOptimizer` sends three. It sits behind DDP, which has reduced all gradients on all ranks already, and then broadcasts each updated tensor. (DeepSpeed began like that, too, and told in the spring of 2020 how it came from 1.5 times to 1.)
#
# </div>
# <div lang="zh">
#
# 每个权重发送两个数，与 DDP 一样：切开状态，通信量并不增加。PyTorch 的 `ZeroRedundancyOptimizer` 却要发三个：它接在 DDP 后面，而 DDP 已经在每个进程上归约了全部梯度，之后它再把更新好的张量逐个广播出去。（DeepSpeed 起初也是这样，2020 年春撰文介绍了怎样从 1.5 倍降到 1 倍。）
#
# </div>

# %% slide="result"
sent = {mode: run["communicated"]["measured"] for mode, run in two.items()}
rows = [(stage_of[mode], count, round(count / (4 * psi), 2)) for mode, count in sent.items()]
table(["2 ranks", "communicated in a step, bytes", "numbers a weight"], rows)

# %% [markdown] slide={"en": "FSDP2 gathers a block, runs it, drops it; and again in backward. Its root stays.\n\n**How many bytes in a step?**", "zh": "FSDP2 收集一个块，运行，丢掉；反向时再来一遍。根不丢。\n\n**一步之中通信多少字节？**"}
# ## 8.6 What goes over the wire / 通信多少字节
#
# <div lang="en">
#
# All counts on this page are of the whole tensors that go through a collective: an all-reduce twice its tensor, all else once. A ring of $N$ ranks sends $(N - 1)/N$ of that.
#
# FSDP2 keeps no weights between steps but its own part. It gathers a block, runs it, and drops it; for backward it gathers the block again. Each gradient is reduce-scattered. One part is not dropped: the root, 557,568 parameters outside of the blocks, since backward begins where forward ended.
#
# **Exercise 3.** Type the bytes that a rank communicates in a step, in fp32.
#
# </div>
# <div lang="zh">
#
# 这一页数的，都是集合通信所处理的完整张量的字节：all-reduce 算张量的两倍，其余算一倍。$N$ 个进程连成一个环时，实际发送其中的 $(N - 1)/N$。
#
# 除了自己那一份，FSDP2 在两步之间不留权重。它收集一个块，运行，然后丢掉；反向时再收集一次。每个梯度做一次 reduce-scatter。有一部分不丢：根，即各块之外的 557,568 个参数，因为前向在哪里结束，反向就从哪里开始。
#
# **练习 3。** 写出一步之中每个进程通信的字节数，fp32。
#
# </div>


# %% minutes=6
def communicated(psi, root):
    return {"DDP": 0, "FSDP2": 0}  # bytes


lesson_08.check_sent(communicated)


# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not lesson_08.check_sent.accepted:

    def communicated(psi, root):
        blocks = psi - root
        return {"DDP": 4 * 2 * psi, "FSDP2": 4 * (2 * blocks + root + psi)}


lesson_08.check_sent(communicated)
### END SOLUTION

# %%
my_sent = communicated(psi, root=557_568)

# %% slide="result"
rows = [("DDP", my_sent["DDP"], sent["ddp"]), ("FSDP2", my_sent["FSDP2"], sent["fsdp"])]
predictions(rows, unit="bytes")

# %% [markdown] slide={"en": "Half of the bytes held, for 46% more sent.\n\nWhen does that hide behind compute? Lesson 04's question.", "zh": "持有的字节减半，通信多 46%。\n\n什么时候能被计算掩盖？这是第 04 课的问题。"}
# <div lang="en">
#
# So each of two ranks holds half, and sends 46% more. On a GPU the gathering runs ahead of its use, in a stream of its own, and hides behind compute where the link is fast enough: the question of lesson 04, asked of a wire.
#
# </div>
# <div lang="zh">
#
# 可见两个进程时，每个进程持有一半，多发送 46%。在 GPU 上，收集在另一个流里提前进行，链路够快就能被计算掩盖：这正是第 04 课的问题，只是换成了设备之间的线路。
#
# </div>

# %% [markdown] slide={"en": "Four ranks, two sequences each.\n\n**Guess first.** Which of the numbers halve?", "zh": "四个进程，每个进程两条序列。\n\n**先猜**：哪些数会减半？"}
# ## 8.7 Four ranks / 四个进程
#
# <div lang="en">
#
# Four ranks, two sequences each. Two modes are new: `fsdp-keep`, FSDP2 that keeps the gathered weights from forward to backward, and FSDP2 with a checkpoint around each layer.
#
# **Guess first.** From two ranks to four: which of the numbers halve?
#
# </div>
# <div lang="zh">
#
# 四个进程，每个进程两条序列。新添两种做法：`fsdp-keep`，即收集来的权重从前向一直留到反向的 FSDP2；以及 FSDP2，每一层加检查点。
#
# **先猜**：从两个进程到四个，哪些数会减半？
#
# </div>

# %%
modes = "ddp,zero1,fsdp-keep,fsdp,fsdp-checkpoint"
runs = launch(4, "--mode", modes, "--steps", "2", "--details")
four = {run["mode"]: run for run in runs}  # a third step peaks as the second does
{mode: follows(run, losses[:2]) for mode, run in four.items()}

# %% slide="result"
lesson_08.draw_ranks(predicted, [*two.values(), *four.values()])

# %% [markdown] slide={"en": "What is cut falls to an $N$-th, what isn't stays.\n\nAs counted here, a rank's traffic is the same on four as on two.", "zh": "切开的降到 $N$ 分之一，没切开的不变。\n\n按这里的计法，每个进程的通信量，四个与两个时相同。"}
# <div lang="en">
#
# Lines are your formulas, points are measured; with checkpoints ZeRO 3 holds and sends the same. ZeRO 1 is PyTorch's class; your step of section 8.5 would send what DDP does. Nothing in PyTorch is just ZeRO 2. `fsdp-keep` comes near: the hollow point counts the weights that it keeps until backward, whole, beside the rank's own quarter. So it lies a quarter of the weights above the line, for the traffic of ZeRO 2, which is that of DDP.
#
# What is cut halves with each doubling. What is not cut stays: by your formulas DDP holds 110.0 MB on any number of ranks, and ZeRO 1 never falls below 55.0. As counted here, the traffic of a rank is the same on four as on two; what a ring sends goes from $1/2$ of it to $3/4$.
#
# </div>
# <div lang="zh">
#
# 线是你的公式，点是实测；ZeRO 3 加上检查点，持有的和发送的都不变。图中的 ZeRO 1 是 PyTorch 的类；你在 8.5 节写的那一步，发送的与 DDP 一样多。PyTorch 没有恰好做到 ZeRO 2 的实现，`fsdp-keep` 与它接近：空心点把留到反向的完整权重也算了进去，本进程自己的四分之一还在旁边，所以比线高出权重的四分之一；通信量则与 ZeRO 2 相同，也就是与 DDP 相同。
#
# 切开的部分，进程数每翻一倍就减半。没切开的原封不动：按你的公式，不管多少个进程，DDP 都持有 110.0 MB，ZeRO 1 永远降不到 55.0 以下。按这里的计法，每个进程的通信量，四个进程与两个进程时相同；在环上，实际发送的由它的 $1/2$ 变为 $3/4$。
#
# </div>

# %% [markdown] slide={"en": "Devices of 60 MB. One sequence, every layer checkpointed, on one of them:\n\nwhere does it stop?", "zh": "每台设备 60 MB。在一台上只做一条序列，每层都加检查点：\n\n会停在哪里？"}
# ## 8.8 The step that no single device could take / 单台设备装不下的一步
#
# <div lang="en">
#
# Suppose devices of 60 MB, with nothing beneath them to offload to. The least that lessons 02 and 05 make of this step on one of them: a single sequence, every layer checkpointed. A meter with a budget stops the operator that would pass it.
#
# </div>
# <div lang="zh">
#
# 假设每台设备只有 60 MB，也没有别处可以卸载。在一台设备上，第 02 课和第 05 课最多能做到：只做一条序列，每一层都加检查点。带预算的计量器，会拦下第一个超出预算的算子。
#
# </div>

# %% slide="both"
batch = next(split(task.make_batch(0), 1))  # a single sequence
try:
    with MemoryMeter(budget_bytes=60_000_000):
        model = task.make_model()
        adam = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        checkpoint_blocks(model, "layers.*")
        loss, tokens = task.loss_sum(model, batch)
        (loss / tokens).backward()
        adam.step()
except MemoryBudgetExceeded as stopped:
    print(stopped)

# %% [markdown]
# <div lang="en">
#
# Forward and backward fit. Then Adam makes its state, and the device is full: weights, gradients and state are 110.0 MB, whatever the batch. Without the gradients, by an update inside backward (lesson 05), they would still be 82.5 MB. Four such devices took the whole batch in section 8.7:
#
# </div>
# <div lang="zh">
#
# 前向和反向都装得下，轮到 Adam 建立状态时，设备满了：权重、梯度和状态共 110.0 MB，与批次无关。就算在反向中更新、不留梯度（第 05 课），也还有 82.5 MB。而在 8.7 节，四台这样的设备已经走完了整个批次：
#
# </div>

# %% slide="result"
rows = []
for mode, run in four.items():
    taken = run["taken"][0]
    held_mb = lesson_08.held_by(run) / 1e6
    rows.append((f"`{mode}`", round(held_mb, 1), round(taken["peak_bytes"] / 1e6, 1)))
table(["4 ranks", "held by a rank, MB", "peak, MB"], rows)

# %% [markdown] slide={"en": "Four devices of 60 MB: 47.1 MB each, with the whole batch.\n\n**And 7 billion parameters on 8 GPUs?**", "zh": "四台 60 MB 的设备做完整个批次：每台 47.1 MB。\n\n**70 亿个参数放到 8 块 GPU 上呢？**"}
# <div lang="en">
#
# 47.1 MB, with FSDP2 and a checkpoint around each layer. Each of the two does what the other cannot: sharding leaves the activations of a rank's own sequences alone, and checkpointing leaves weights and state alone. On a GPU `CPUOffloadPolicy` would move the shards to the host as well (lesson 04).
#
# **Exercise 4.** Now 7 billion parameters ($7 \times 10^9$) on 8 GPUs, in mixed precision. How many bytes does a rank hold?
#
# </div>
# <div lang="zh">
#
# 47.1 MB：FSDP2，再给每一层加检查点。两者各有所长，互不替代：分片管不到本进程自己那些序列的激活值，检查点管不到权重和状态。在 GPU 上，还可以用 `CPUOffloadPolicy` 把各个分片也挪到主机上（第 04 课）。
#
# **练习 4。** 换成 70 亿个参数（$7 \times 10^9$）、8 块 GPU、混合精度。每个进程持有多少字节？
#
# </div>

# %% minutes=5
answer = {"DDP": None, "ZeRO 1": None, "ZeRO 2": None, "ZeRO 3": None}  # bytes
lesson_08.check_seven_billion(answer)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not lesson_08.check_seven_billion.accepted:
    seven, n = 7_000_000_000, 8
    answer = {"DDP": 16 * seven, "ZeRO 1": 4 * seven + 12 * seven / n}
    answer |= {"ZeRO 2": 2 * seven + 14 * seven / n, "ZeRO 3": 16 * seven / n}

lesson_08.check_seven_billion(answer)
### END SOLUTION

# %% [markdown] slide={"en": "Reduce with every micro-batch, or with the last only?\n\n**Guess first.** It saves traffic. What does it cost?", "zh": "每个微批次都归约，还是只在最后一个归约？\n\n**先猜**：通信省了，代价是什么？"}
# ## 8.9 Micro-batches: what `no_sync` saves and costs / 微批次：`no_sync` 省什么，费什么
#
# <div lang="en">
#
# With micro-batches (lesson 05), gradients need to be reduced with the last one only: DDP's `no_sync()`, FSDP2's `set_requires_gradient_sync(False)`. That saves traffic. What does it cost?
#
# To ask, no process need be started. `predict` runs one rank's step with symbolic tensors and a process group that sends nothing, and `sent_bytes` is your formula of section 8.6 for all modes. Two ranks, two micro-batches each; the gradients reduced with each are those measured in section 8.3:
#
# </div>
# <div lang="zh">
#
# 用微批次时（第 05 课），只需在最后一个微批次归约梯度：DDP 的 `no_sync()`，FSDP2 的 `set_requires_gradient_sync(False)`。通信省下来了，代价是什么？
#
# 要回答，一个进程也不用启动。`predict` 用符号张量和一个什么都不发送的进程组，运行一个进程的一步；`sent_bytes` 就是你在 8.6 节写的公式，各种做法都能算。两个进程，每个两个微批次；每次都归约时的梯度，是 8.3 节测得的：
#
# </div>


# %% slide="result"
def one_rank(mode, n, **more):
    return predict(task.make_model, lambda: task.part(0, n, 0), task.loss_sum, mode, n, **more)


rows, shapes = [], shapes_of(task.make_model())
for mode in ("ddp", "fsdp"):
    counts = [sent_bytes(shapes, mode, 2, micro_batches=2, sync=sync) for sync in ("each", "last")]
    counts.append(two[mode]["measured"]["gradient"][0])
    counts.append(one_rank(mode, 2, micro_batches=2).at_peak["gradient"])
    rows.append((f"`{mode}`", *(round(count / 1e6, 1) for count in counts)))
headings = ["with each: sent, MB", "with the last: sent, MB"]
headings += ["with each: gradients, MB", "with the last: gradients, MB"]
table(["mode", *headings], rows)

# %% [markdown] slide={"en": "DDP: half the traffic, for a second set of gradients. FSDP2: whole gradients in place of a part.", "zh": "DDP：通信减半，多一份梯度。FSDP2：持有完整的梯度，而不是自己的一份。"}
# <div lang="en">
#
# DDP sends half, and holds a second set of gradients: pieces that are not reduced yet add up beside the buckets. FSDP2 sends 17% less and holds whole gradients in place of its part, 13.8 MB more. With more ranks that grows towards 27.5. So the advice differs: `no_sync` for DDP unless memory is short; for FSDP2 only where the wire is slow and there is room.
#
# </div>
# <div lang="zh">
#
# DDP 的通信减半，却多持有一整份梯度：还没归约的各份，在桶之外另行累加。FSDP2 少发送 17%，却要持有完整的梯度，而不是自己的一份，多出 13.8 MB；进程越多，越接近 27.5。所以建议各不相同：用 DDP 时，只要内存不紧就用 `no_sync`；用 FSDP2 时，链路慢、内存又有富余才用。
#
# </div>

# %% [markdown] slide={"en": "`torchrun` starts the ranks. `fully_shard` at each block, then at the model.", "zh": "`torchrun` 启动各个进程。先对每个块用 `fully_shard`，再对整个模型用。"}
# ## 8.10 What you type / 你会敲的代码
#
# <div lang="en">
#
# | what | PyTorch |
# |---|---|
# | start $N$ ranks | `torchrun --standalone --nproc-per-node 4 train.py` |
# | DDP | `DistributedDataParallel(model, gradient_as_bucket_view=True)` |
# | ZeRO 1 | `ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)` |
# | ZeRO 3 | `for block in model.layers: fully_shard(block)`, then `fully_shard(model)` |
# | keep from forward to backward | `fully_shard(block, reshard_after_forward=False)` |
# | bf16, reduced in fp32 | `MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)`: not run here |
# | shards on the host | `CPUOffloadPolicy()`: needs a GPU, not run here |
#
# `course_lib/distributed/modes.py` holds these lines; the runs on this page go through them. Elsewhere, not run here either: Accelerate `fsdp_version: 2`; DeepSpeed `"zero_optimization": {"stage": 3}`, in TRL and the Hugging Face Trainer by the same file; Megatron-LM `--use-distributed-optimizer`, which is ZeRO 1 with the traffic of your step.
#
# </div>
# <div lang="zh">
#
# | 做什么 | PyTorch |
# |---|---|
# | 启动 $N$ 个进程 | `torchrun --standalone --nproc-per-node 4 train.py` |
# | DDP | `DistributedDataParallel(model, gradient_as_bucket_view=True)` |
# | ZeRO 1 | `ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)` |
# | ZeRO 3 | `for block in model.layers: fully_shard(block)`，然后 `fully_shard(model)` |
# | 从前向留到反向 | `fully_shard(block, reshard_after_forward=False)` |
# | bf16，以 fp32 归约 | `MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)`：这里没有运行 |
# | 分片放在主机上 | `CPUOffloadPolicy()`：需要 GPU，这里没有运行 |
#
# 这些写法都在 `course_lib/distributed/modes.py` 里，本页的运行用的就是它们。其他框架的写法，这里也没有运行：Accelerate 的 `fsdp_version: 2`；DeepSpeed 的 `"zero_optimization": {"stage": 3}`，TRL 和 Hugging Face Trainer 用同一份配置；Megatron-LM 的 `--use-distributed-optimizer`，即 ZeRO 1，通信量与你写的那一步相同。
#
# </div>

# %% [markdown] slide={"en": "Three sentences. Hands up before each row: true, partly, or false?", "zh": "三句说法。看每一行之前先举手：对，对一部分，还是不对？"}
# ## 8.11 What you may have read / 你可能读到过的说法
#
# <div lang="en">
#
# Three sentences, each from a paper or a documentation page, tried on this step. The first: what a step communicates, on two ranks; PyTorch's class all-reduces, then broadcasts. The second: 2 sequences each; held are 110.0 MB and 27.5, and the peaks 131.3 and 75.6, since activations and gathered blocks are not cut. The third: what the option saves under DDP, in this process, a single rank.
#
# </div>
# <div lang="zh">
#
# 三句话，分别出自论文和文档，都拿这一步来检验。第一句：两个进程时，一步通信多少；PyTorch 的类先做 all-reduce，再做广播。第二句：各做 2 条序列，持有的是 110.0 MB 和 27.5，峰值是 131.3 和 75.6，因为激活值和收集来的块没有切开。第三句：就在这个进程里用 DDP（只有一个进程），这个选项省下多少。
#
# </div>

# %% slide="result"
from course_lib.lessons import what_you_may_have_read

spared = []
for tokens in (128, 16):
    without, with_view = (lesson_08.ddp_peak(tokens, view=view) for view in (False, True))
    spared.append(without - with_view)
figures = lesson_08.figures_of_claims(two, four["fsdp"], quarter, spared)
what_you_may_have_read("08", *figures)

# %% [markdown] slide={"en": "The same step, a row for one rank of four.\n\nWhat shrinks with the ranks, and what does not?", "zh": "同样的一步，这一行是四个进程中的一个。\n\n哪些随进程数变小，哪些不变？"}
# ## 8.12 The ledger / 账本
#
# <div lang="en">
#
# This lesson's row is one rank of four under FSDP2: a quarter of the batch, so a quarter of the FLOPs. What it communicates stands under bytes moved. Again a symbolic rank, and it agrees with the real one to the byte.
#
# </div>
# <div lang="zh">
#
# 本课的这一行，是 FSDP2 之下四个进程中的一个：批次的四分之一，FLOPs 也是四分之一。通信的字节记在“移动的字节”一栏。这里又是一个用符号张量算出的进程，它与真实的进程一字节不差。
#
# </div>

# %%
rank = one_rank("fsdp", 4)
predictions([("peak", rank.peak_bytes, four["fsdp"]["taken"][0]["peak_bytes"])], unit="bytes")

# %% slide="result"
ledger("08", "FSDP2, one rank of four", rank, moved_bytes=rank.sent_bytes)

# %% [markdown] slide={"en": "Data parallelism divides activations, ZeRO the rest.\n\nDDP's buckets are there at the peak; reduce-scatter and all-gather are an all-reduce.", "zh": "数据并行分掉激活值，ZeRO 分掉其余的。\n\n峰值时 DDP 的桶都在；reduce-scatter 加 all-gather 就是 all-reduce。"}
# ## 8.13 Summary / 小结
#
# <div lang="en">
#
# - Data parallelism divides the activations; ZeRO divides what data parallelism holds $N$ times. In fp32: $16\Psi$, $8\Psi + 8\Psi/N$, $4\Psi + 12\Psi/N$, $16\Psi/N$ bytes.
# - DDP's buckets take the bytes of all gradients at all times: here its peak is 27.5 MB above that of one device with the same sequences.
# - An all-reduce is a reduce-scatter and an all-gather. Between the two, each rank can update its own part: ZeRO 1 and 2 need send no more than DDP. ZeRO 3 sends half as much again, less the root.
# - Sharding and checkpoints don't replace each other: together they brought 277.7 MB to 47.1 on four ranks.
# - A symbolic rank tells all this before a machine is rented.
#
# **Next:** take a model of your own. Then read on: tensor, pipeline and context parallelism cut the layers, the depth and the sequence; ZeRO cuts none of these.
#
# </div>
# <div lang="zh">
#
# - 数据并行分掉激活值；ZeRO 分掉数据并行存了 $N$ 遍的部分。fp32 时：$16\Psi$、$8\Psi + 8\Psi/N$、$4\Psi + 12\Psi/N$、$16\Psi/N$ 字节。
# - DDP 的桶始终占着全部梯度的字节：这里，序列相同时，它的峰值比单台设备高 27.5 MB。
# - all-reduce 就是 reduce-scatter 加 all-gather。在两者之间，每个进程可以只更新自己的一份：ZeRO 1 和 2 不必比 DDP 多发送。ZeRO 3 多发送一半，根的那部分除外。
# - 分片与检查点互不替代：两者合用，四个进程把 277.7 MB 降到了 47.1。
# - 还没租机器，一个用符号张量算出的进程就能告诉你这一切。
#
# **下一步**：拿一个你自己的模型来试。然后接着读：张量并行、流水线并行和上下文并行，分别切开层、深度和序列；ZeRO 这三样都不切。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **Sources.** Rajbhandari et al. 2020, *ZeRO*, arXiv:1910.02054 (formulas, sections 5 and 7). Li et al. 2020, *PyTorch Distributed*, arXiv:2006.15704 (DDP's buckets). Zhao et al. 2023, *PyTorch FSDP*, arXiv:2304.11277. PyTorch documentation: DistributedDataParallel; *Getting Started with Fully Sharded Data Parallel (FSDP2)*. DeepSpeed, *ZeRO stage 1 with reduced communication*, 2020. All measurements: `course_lib.distributed`, in this notebook.
#
# **To read next.** Hugging Face, *The Ultra-Scale Playbook*, 2025. Narayanan et al. 2021, arXiv:2104.04473 (tensor and pipeline parallelism together).
#
# </div>
# <div lang="zh">
#
# **出处。** Rajbhandari et al. 2020，*ZeRO*，arXiv:1910.02054（公式，第 5、7 节）。Li et al. 2020，*PyTorch Distributed*，arXiv:2006.15704（DDP 的桶）。Zhao et al. 2023，*PyTorch FSDP*，arXiv:2304.11277。PyTorch 文档：DistributedDataParallel；*Getting Started with Fully Sharded Data Parallel (FSDP2)*。DeepSpeed，*ZeRO stage 1 with reduced communication*，2020。全部测量都由本 notebook 用 `course_lib.distributed` 完成。
#
# **接着读。** Hugging Face，*The Ultra-Scale Playbook*，2025。Narayanan et al. 2021，arXiv:2104.04473（张量并行与流水线并行合用）。
#
# </div>

# %% [markdown]
# ## In depth / 深入
#
# <div lang="en">
#
# Each section stands alone; it uses the names that the sections above have defined.
#
# </div>
# <div lang="zh">
#
# 各节互相独立，只用到前面正文里定义过的名字。
#
# </div>

# %% [markdown]
# ## 8.14 Keep, or gather again / 留着，还是再收集一次
#
# <div lang="en">
#
# `reshard_after_forward=False` keeps gathered blocks from forward to backward. The traffic is that of ZeRO 2, and of DDP. Between steps the weights are cut, as in ZeRO 3; at the peak they are there whole, with the rank's own part beside them: $4\Psi + 4\Psi/N$. What `fsdp` has gathered at its peak is the root and one block.
#
# </div>
# <div lang="zh">
#
# `reshard_after_forward=False` 把收集来的块从前向留到反向。通信量与 ZeRO 2 和 DDP 相同。两步之间权重是切开的，与 ZeRO 3 一样；峰值时则完整地都在，本进程的一份也还在：$4\Psi + 4\Psi/N$。`fsdp` 在峰值时收集着的，是根和一个块。
#
# </div>

# %%
rows = []
for mode in ("fsdp", "fsdp-keep"):
    taken = four[mode]["taken"][0]
    counts = taken["sent_bytes"], taken["at_peak"]["gathered"], taken["peak_bytes"]
    rows.append((f"`{mode}`", *(round(count / 1e6, 1) for count in counts)))
table(["4 ranks", "sent, MB", "gathered at the peak, MB", "peak, MB"], rows)

# %% [markdown]
# ## 8.15 What does not divide / 除不尽怎么办
#
# <div lang="en">
#
# FSDP2 cuts a tensor along its first dimension, as `torch.chunk` does: three ranks get 683, 683 and 682 rows of a matrix of 2048. Storages of weights and gradients are as long on every rank as on the first, so the last one is padded; Adam's state is not. By formula, in bytes:
#
# </div>
# <div lang="zh">
#
# FSDP2 沿第一维切开张量，与 `torch.chunk` 的切法相同：一个 2048 行的矩阵分给三个进程，各得 683、683 和 682 行。权重和梯度的存储区，每个进程都与第一个一样长，所以最后一个要补齐；Adam 的状态不补。按公式，以字节计：
#
# </div>

# %%
from course_lib.distributed import held_bytes

rows = [(rank, *each.values()) for rank, each in enumerate(held_bytes(shapes, "fsdp", 3))]
table(["rank", "weights", "gradients", "optimizer state"], rows)

# %% [markdown]
# ## 8.16 7 and 70 billion parameters / 70 亿与 700 亿个参数
#
# <div lang="en">
#
# The same two functions, for the decoders of lesson 01 on 8 and on 64 ranks, in fp32. Only shapes are needed: nothing is made. What is held by the largest of them falls to 16.2 GB on 64 ranks; it communicates 775 GB in each step, and by this count so it would on 1000.
#
# </div>
# <div lang="zh">
#
# 还是这两个函数，用于第 01 课的大解码器，8 个和 64 个进程，fp32。只用到形状，什么都不建立。最大的那个，在 64 个进程上每个只持有 16.2 GB，但每一步要通信 775 GB；按这里的计法，换成 1000 个进程也是这么多。
#
# </div>

# %%
from course_lib.memory import symbolic
from course_lib.models import Decoder

rows = []
for name, h, a, layers in (("7 B", 4096, 32, 32), ("70 B", 8192, 64, 80)):
    with symbolic():
        sizes = {"vocabulary": 32000, "hidden": h, "heads": a, "layers": layers, "sequence": 2048}
        shapes = shapes_of(Decoder(**sizes, fused=True))
    for n in (8, 64):
        held_gb = [sum(held_bytes(shapes, mode, n)[0].values()) / 1e9 for mode in ("ddp", "fsdp")]
        sent_gb = [sent_bytes(shapes, mode, n) / 1e9 for mode in ("ddp", "fsdp")]
        rows.append((name, n, *(round(count, 1) for count in (*held_gb, *sent_gb))))
headings = ["DDP holds, GB", "FSDP2 holds, GB", "DDP sends, GB", "FSDP2 sends, GB"]
table(["model", "ranks", *headings], rows)

# %% [markdown]
# ## 8.17 Saving, and resuming on another number of ranks / 存盘，换个进程数继续
#
# <div lang="en">
#
# The two ranks of section 8.3 have saved their third step. Each wrote its own part with `torch.distributed.checkpoint`; a process that reads takes what it needs from all files, by the names of the parameters. So what two ranks of FSDP2 have written, one rank of DDP can go on with, in this very process:
#
# </div>
# <div lang="zh">
#
# 8.3 节的两个进程把第三步的结果存了盘。每个进程用 `torch.distributed.checkpoint` 写出自己的一份；读取的进程按参数的名字，从各个文件里取所需的部分。所以两个 FSDP2 进程写下的，一个 DDP 进程就能接着训练，就在眼下这个进程里：
#
# </div>

# %%
went_on = lesson_08.resumed_alone(f"{saved.name}/fsdp")
saved.cleanup()
follows({"losses": went_on}, losses[3:])

# %% [markdown]
# <div lang="en">
#
# A folder gets its final name once all ranks have written. Whatever is killed before leaves a folder that ends in `.incomplete`, and `--resume` takes the last complete one. In a terminal:
#
# ```
# torchrun ... -m course_lib.distributed --mode fsdp --steps 100 --every 20 --save runs
# torchrun ... -m course_lib.distributed --mode fsdp --steps 100 --resume runs
# ```
#
# </div>
# <div lang="zh">
#
# 全部进程都写完，目录才改成正式的名字。中途被杀，留下的目录以 `.incomplete` 结尾，`--resume` 取最近一个完整的。在终端里：
#
# ```
# torchrun ... -m course_lib.distributed --mode fsdp --steps 100 --every 20 --save runs
# torchrun ... -m course_lib.distributed --mode fsdp --steps 100 --resume runs
# ```
#
# </div>

# %% [markdown]
# ## 8.18 A rank that fails / 一个进程失败了
#
# <div lang="en">
#
# A collective waits for everybody. If a rank raises an error, the others would wait for ever; so `torchrun` watches its processes, ends them all when one fails, and prints the traceback of the first under "Root Cause". For that, the command's `main` carries `@record`. What to look for: the first error, not the last; ranks that were ended by a signal are victims.
#
# A rank that hangs gives no error. The process group's timeout ends it, after 30 minutes by default with gloo and 10 with NCCL. The library's tests do all this with a real rank: one that raises, and one that stands still while it saves.
#
# </div>
# <div lang="zh">
#
# 集合通信要等所有人到齐。一个进程抛出错误，其余的会一直等下去；所以 `torchrun` 看着它的各个进程，一个失败就全部结束，并在 “Root Cause” 下打印最先出错的调用栈。为此，这个命令的 `main` 函数带有 `@record`。要找的是最先的错误，不是最后的；被信号结束的进程只是受害者。
#
# 挂住不动的进程不报错，要等进程组超时才会结束：默认 gloo 是 30 分钟，NCCL 是 10 分钟。库的测试用真实的进程做了这些：一个抛出错误，一个在存盘时停住不动。
#
# </div>

# %% [markdown]
# ## 8.19 On a GPU / 在 GPU 上
#
# <div lang="en">
#
# The same command, on a machine with a GPU a rank, takes NCCL by itself and adds `fsdp-cpu` to the modes:
#
# ```
# torchrun --standalone --nproc-per-node 2 -m course_lib.distributed \
#     --mode ddp,zero1,fsdp,fsdp-checkpoint,fsdp-bf16,fsdp-cpu
# ```
#
# Bytes held and bytes communicated are the same. The peak is not quite: FSDP2 gathers the next block while this one runs, so that one more is there. NCCL has buffers of its own, which no tensor shows. Nothing of this has been recorded for this page.
#
# </div>
# <div lang="zh">
#
# 在每个进程有一块 GPU 的机器上，同样的命令会自动选用 NCCL，还可以加上 `fsdp-cpu`：
#
# ```
# torchrun --standalone --nproc-per-node 2 -m course_lib.distributed \
#     --mode ddp,zero1,fsdp,fsdp-checkpoint,fsdp-bf16,fsdp-cpu
# ```
#
# 持有的字节和通信的字节都不变，峰值略有不同：FSDP2 在运行这一块时就收集下一块，所以多一块在内存里。NCCL 还有自己的缓冲，张量里看不到。本页没有这方面的记录。
#
# </div>
