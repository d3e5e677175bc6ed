# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] slide={"en": "One device: 277.7 MB. Two devices, half of the batch each.\n\nDoes each of them take half of the bytes?", "zh": "一台设备：277.7 MB。两台设备，各做半个批次。\n\n每台占的字节也减半吗？"}
# # 8 What changes when one device is not enough? (DDP, ZeRO, FSDP) / 一台设备不够时，会有什么不同？（数据并行 DDP、ZeRO、FSDP）
#
# <div lang="en">
#
# On one device the step of lesson 01 peaks at 277.7 MB. PyTorch's `DistributedDataParallel` gives it to two devices, half of the batch to each. Does each of them then take half of the bytes? You will guess before you measure.
#
# By the end of this page four devices of 48 MB take this step together, where one of 60 is stopped. You will have predicted what each of them holds, and what it sends.
#
# </div>
# <div lang="zh">
#
# 第 01 课的那一步，在一台设备上峰值是 277.7 MB。用 PyTorch 的 `DistributedDataParallel` 把它交给两台设备，每台分半个批次。每台占的字节也会减半吗？先猜，再测量。
#
# 学完这一页，四台 48 MB 的设备会合力走完这一步，而一台 60 MB 的设备会被拦下。每台持有多少、发送多少，你都能预先算出来。
#
# </div>

# %%
from course_lib.teaching import language

language()

# %% [markdown]
# <div lang="en">
#
# **Goals** (90 minutes). Type what a rank holds under DDP and ZeRO 1 to 3, and meet the measurement to the byte. Write the step of ZeRO 1, and a layer that gathers its weight, uses it and drops it. Tell what a collective is given from what a wire carries. Say what each kind of parallelism divides, and when its traffic hides behind compute.
#
# **What to know before**: lesson 01 (the peak of a step) and section 2.2 (a `torch.autograd.Function`). No second device is needed: here a device is a process on your CPU, and the code for GPUs is the same. $\Psi$ is the number of parameters, $N$ the number of ranks. MB is $10^6$ bytes.
#
# </div>
# <div lang="zh">
#
# **目标**（90 分钟）：写出用 DDP 和 ZeRO 1 到 3 时每个进程持有多少，与实测对照，精确到字节；亲手写出 ZeRO 1 的一步，再写一个“收集权重、用完就丢”的层；分清交给集合通信的字节与线路上实际传输的字节；说出各种并行分别分摊什么，通信在什么时候能被计算掩盖。
#
# **预备知识**：第 01 课（一步的峰值）和 2.2 节（`torch.autograd.Function`）。不需要第二台设备：在这里，一台设备就是 CPU 上的一个进程，换到 GPU 上代码不变。$\Psi$ 是参数个数，$N$ 是进程（rank）数。MB 指 $10^6$ 字节。
#
# </div>

# %%
import tempfile

import torch

from course_lib.accumulation import split
from course_lib.checkpoint import checkpoint_blocks
from course_lib.distributed import launch, predict, sent_bytes, shapes_of, task_of
from course_lib.lessons import lesson_08, what_you_may_have_read
from course_lib.lessons.ledger import ledger
from course_lib.memory import MemoryBudgetExceeded, MemoryMeter, symbolic
from course_lib.models import Decoder
from course_lib.teaching import predictions, table

# %% [markdown] slide={"en": "**Data parallelism**: every rank has the whole model, and an $N$-th of the batch.\n\nAn **all-reduce** adds up the gradients.", "zh": "**数据并行**：每个进程都有完整的模型，各做批次的 $N$ 分之一。\n\n**all-reduce** 把梯度加起来。"}
# ## 8.1 One process a device / 每台设备一个进程
#
# <div lang="en">
#
# Each device gets a process of its own, called a **rank**. In **data parallelism** (PyTorch's `DistributedDataParallel`, DDP) every rank has the whole model and an $N$-th of the batch. In backward an **all-reduce** adds the gradients of all ranks up, so that all take the same step.
#
# Whatever we share out below, it must train the same model. So first the losses that all must follow: one process, the whole batch of 8, the decoder of lesson 00. The meter is on; it gives the peaks to compare with. (`task.loss_sum` returns the sum of the losses and the number of tokens; `split` is lesson 05's.)
#
# </div>
# <div lang="zh">
#
# 每台设备有自己的一个**进程**（rank）。**数据并行**（PyTorch 的 `DistributedDataParallel`，简称 DDP）里，每个进程都有完整的模型，各做批次的 $N$ 分之一。反向时用一次 **all-reduce**（全归约）把各个进程的梯度加起来，于是大家走的是同一步。
#
# 下面不管怎么分，训练的都必须是同一个模型。所以先算出后面都要与之对照的损失：一个进程，整个批次 8 条序列，第 00 课的解码器。计量器开着，顺便量出用来比较的峰值。（`task.loss_sum` 返回损失之和与 token 数；`split` 是第 05 课的。）
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


# %%
losses, whole = alone(steps=3)
_, half = alone(steps=2, sequences=4)
_, quarter = alone(steps=2, sequences=2)
peaks = {"8 sequences": whole, "4 sequences": half, "2 sequences": quarter}
table(["one device", "peak (bytes)"], [(name, sum(peak.values())) for name, peak in peaks.items()])

# %% [markdown]
# ## 8.2 What each rank holds / 每个进程持有什么
#
# <div lang="en">
#
# With DDP, $N$ ranks hold the same 16 bytes per parameter $N$ times. **ZeRO** (Zero Redundancy Optimizer, Rajbhandari et al. 2020; also ZeRO-1, ZeRO-2, ZeRO-3) cuts them into $N$ parts, which is called **sharding**, in three steps: first Adam's state, then gradients, then weights. ZeRO 3 is, in PyTorch, FSDP2.
#
# </div>
# <div lang="zh">
#
# 用 DDP 时，每个参数那 16 字节，$N$ 个进程各持有一份，一模一样。**ZeRO**（零冗余优化器，Rajbhandari et al. 2020；也写作 ZeRO-1、ZeRO-2、ZeRO-3）把它们切成 $N$ 份，这叫**分片**（sharding），分三步走：先切 Adam 的状态，再切梯度，最后切权重。ZeRO 3 在 PyTorch 里就是 FSDP2。
#
# </div>

# %% slide="result"
lesson_08.draw_stages()

# %% [markdown] slide={"en": "Whole or cut: weights 4 bytes, gradients 4, Adam's state 8.\n\n**Type the four formulas.**", "zh": "完整，还是切开：权重 4 字节，梯度 4，Adam 的状态 8。\n\n**写出四个公式。**"}
# <div lang="en">
#
# The paper's formulas are for mixed precision as Megatron-LM and DeepSpeed have it (section 8.20): $16\Psi$, $4\Psi + 12\Psi/N$, $2\Psi + 14\Psi/N$ and $16\Psi/N$ bytes. Our decoder is fp32 throughout: 4, 4 and 8 bytes per parameter.
#
# **Exercise 1.** Type the bytes of a rank in fp32, for any `psi` and `n`.
#
# </div>
# <div lang="zh">
#
# 论文的公式针对混合精度，按 Megatron-LM 和 DeepSpeed 的计法（8.20 节）：$16\Psi$、$4\Psi + 12\Psi/N$、$2\Psi + 14\Psi/N$ 和 $16\Psi/N$ 字节。我们的解码器全是 fp32：每个参数 4、4、8 字节。
#
# **练习 1。** 写出 fp32 时每个进程的字节数，对任意的 `psi` 和 `n`。
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

# %% [markdown] slide={"en": "4 sequences on one device peak at 180.1 MB, without a single gradient.\n\n**Guess first.** A DDP rank with 4 sequences? An FSDP2 rank?", "zh": "一台设备做 4 条序列，峰值 180.1 MB，此刻没有一个梯度。\n\n**先猜**：DDP 的一个进程做 4 条序列呢？FSDP2 呢？"}
# ## 8.3 Run it on two / 用两个进程跑一遍
#
# <div lang="en">
#
# In a terminal you would type this. `torchrun` starts two processes, tells each its number and where to find the other, and ends both if one fails:
#
# ```
# python -m torch.distributed.run --standalone --nproc-per-node 2 \
#     -m course_lib.distributed --mode ddp,zero1,fsdp --steps 2
# ```
#
# `launch` types it for us and reads what the ranks print. The second of two steps is told, and all after it are as it is. It takes a while, so **guess first**. At the peak there are activations, too. Lesson 01 found it at the start of backward, with all activations and not one gradient. One device with 4 sequences has 82.5 MB of weights and Adam's state, 97.6 MB of all else: 180.1 MB. What is the peak of a DDP rank with 4 sequences? Of an FSDP2 rank, which holds 41.3 MB less of weights and state?
#
# </div>
# <div lang="zh">
#
# 在终端里，你会敲下面这条命令。`torchrun` 启动两个进程，告诉它们各自的编号、到哪里去找对方；有一个失败，就把两个都结束掉：
#
# ```
# python -m torch.distributed.run --standalone --nproc-per-node 2 \
#     -m course_lib.distributed --mode ddp,zero1,fsdp --steps 2
# ```
#
# `launch` 替我们敲这条命令，再读取各个进程打印的结果。每种做法走两步，给出的是第二步，以后的各步都与它相同。运行要等一会儿，所以**先猜**：到了峰值，还要**再加上**激活值。第 01 课发现峰值在反向刚开始时，激活值全都在，梯度一个也没有。一台设备做 4 条序列，权重和 Adam 的状态是 82.5 MB，其余 97.6 MB，共 180.1 MB。DDP 的一个进程做 4 条序列，峰值是多少？FSDP2 的进程，权重和状态少持有 41.3 MB，峰值又是多少？
#
# </div>

# %%
my_ddp_peak, my_fsdp_peak = None, None  # bytes, such as 150e6

# %%
saved = tempfile.TemporaryDirectory()  # for the section on saving
options = ["--mode", "ddp,zero1,fsdp", "--steps", "2", "--details", "--save", saved.name]
two = {run["mode"]: run for run in launch(2, *options)}


# %%
def follows(run, wanted, within=1e-5):
    return all(abs(a - b) < within for a, b in zip(run["losses"], wanted, strict=True))


{mode: follows(run, losses[:2]) for mode, run in two.items()}

# %% [markdown] slide={"en": "All three follow the single process.\n\nSo what does a rank hold, and was your formula right?", "zh": "三种做法的损失都与单个进程一致。\n\n那么每个进程持有多少？你的公式对吗？"}
# <div lang="en">
#
# All three follow the single process, to 0.00001: sums over two ranks are rounded in another order, so not to the last bit. Now what each rank holds when its optimizer steps, beside your formulas.
#
# </div>
# <div lang="zh">
#
# 三种做法都跟得上单个进程，误差在 0.00001 以内：两个进程的求和顺序不同，舍入也就不同，所以做不到逐比特相等。现在看优化器更新时每个进程持有多少，与你的公式对照。
#
# </div>

# %% slide="result"
psi = 6_875_648  # the decoder's parameters
predicted = {n: held(psi, n) for n in range(1, 9)}
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
# 又是那 400 字节：100 个张量，Adam 各记一个步数，每个 4 字节。ZeRO 1 差了 22,596 字节，因为 PyTorch 是把张量整个整个地分给各个进程，两份不会正好相等，这里列的是较大的一份。FSDP2 沿第一维把每个张量切开，两半相等：这个解码器没有切不匀的张量。
#
# </div>

# %% [markdown]
# ## 8.4 Where is the peak? / 峰值在哪里？
#
# <div lang="en">
#
# Now your guesses, and what is live at the peak:
#
# </div>
# <div lang="zh">
#
# 现在看你的猜测，以及峰值时存活的都是什么：
#
# </div>

# %%
peak_of = {mode: run["taken"][0]["peak_bytes"] for mode, run in two.items()}
guesses = [("DDP", my_ddp_peak, peak_of["ddp"]), ("FSDP2", my_fsdp_peak, peak_of["fsdp"])]
predictions(guesses)

# %% jupyter={"source_hidden": true} slide="result"
at_peak = {"one device, 8 sequences": whole, "one device, 4 sequences": half}
labels = {
    "ddp": "DDP, one of 2 ranks",
    "zero1": "ZeRO 1, one of 2 ranks",
    "fsdp": "FSDP2, one of 2 ranks",
}
at_peak |= {labels[mode]: run["taken"][0]["at_peak"] for mode, run in two.items()}
title = "At its peak DDP holds memory for all gradients, while one device and FSDP2 hold none"
lesson_08.draw_peaks(at_peak, title)

# %% [markdown]
# <div lang="en">
#
# 207.6 MB: at the peak DDP holds the bytes of all gradients, 27.5 MB, though none has been computed. It makes **buckets** before the first step, into which backward writes gradients, so that a full bucket can be sent while the next one fills. `zero_grad` drops the gradients, which are views of the buckets; the buckets stay. (`gradient_as_bucket_view=True`; by default the two are separate.) "Gradients come as activations go" (lesson 01) does not hold with DDP. ZeRO 1 has the same buckets: as many bytes as the half of Adam's state that it spares, hence 180.1 again.
#
# FSDP2 has none: it reduces a block's gradient as soon as it is whole, and keeps its own part. At the peak that saves 66.5 MB against DDP, more than the formula's 55.0 MB. The 2.2 MB beyond its half are the gathered **root**: embeddings, last norm and head, whose matrix is the token embedding's.
#
# </div>
# <div lang="zh">
#
# 207.6 MB：峰值时一个梯度都还没算出来，DDP 却已占着全部梯度的字节，27.5 MB。它在第一步之前就建好了**桶**（bucket），反向把梯度写进桶里，一个桶满了就发出去，同时填下一个。`zero_grad` 扔掉的梯度只是桶的视图，桶还在。（这里设了 `gradient_as_bucket_view=True`；默认情况下两者各自独立。）“激活值释放，梯度才到来”（第 01 课），用 DDP 时不成立。ZeRO 1 用的是同样的桶，字节数与它省下的那一半 Adam 状态一样多，所以又是 180.1。
#
# FSDP2 没有桶：一个块的梯度一算齐就归约，只留自己那一份。所以峰值时它比 DDP 省 66.5 MB，比公式给出的 55.0 MB 还多。它在自己的一半之外多持有 2.2 MB，那是收集来的**根模块**（root）：嵌入、最后的归一化和输出头（它与 token 嵌入共用一个矩阵）。
#
# </div>

# %% [markdown]
# ## 8.5 ZeRO 1, by hand / 亲手写 ZeRO 1
#
# <div lang="en">
#
# A rank with an $N$-th of Adam's state can update an $N$-th of the weights. It needs the sum of all ranks' gradients for that part only, and in the end everybody needs all weights. Two **collectives**, operations that all ranks call together, do just that:
#
# - **reduce-scatter**: adds the tensors of all ranks up, and gives rank $r$ the $r$-th part of the sum;
# - **all-gather**: gives everybody all parts, one behind the other.
#
# Here are four ranks within one process: `wire` takes a list with one tensor a rank, gives such a list, and counts what a rank gives to collectives.
#
# </div>
# <div lang="zh">
#
# 每个进程既然只有 Adam 状态的 $N$ 分之一，就**只负责更新**权重的 $N$ 分之一。为此，它只需要全部进程的梯度之和中属于自己的那一份；最后，大家都要拿到全部权重。有两种**集合通信**（所有进程一起调用的操作）恰好做这两件事：
#
# - **reduce-scatter**（归约散射）：把各个进程的张量加起来，第 $r$ 个进程得到和的第 $r$ 份；
# - **all-gather**（全收集）：把各份依次拼好，人手一份。
#
# 下面在一个进程里模拟四个进程：`wire` 接受一个列表，每个进程一个张量，返回的也是这样一个列表，并数出一个进程交给集合通信多少字节。
#
# </div>

# %% slide="both"
wire = lesson_08.Wire()
parts = wire.reduce_scatter([torch.full((8,), float(rank)) for rank in range(4)])  # 0, 1, 2, 3
print(parts[0], wire.all_gather(parts)[0], wire.sent_bytes)
lesson_08.draw_collectives()

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
# **练习 2。** 写出 ZeRO 1 的一步。`weights` 和 `gradients` 是列表，每个进程一个完整的张量。`adams[r](piece, gradient)` 返回更新后的那一份；它按第一次收到的那一份的长度建立两个矩。返回新的权重：每个进程一个完整的张量。整批的梯度是各进程梯度的平均。
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
# Two numbers sent for each weight, as with DDP: cutting the state is free. PyTorch's `ZeroRedundancyOptimizer` sends three: DDP has reduced all gradients on all ranks before it, and it broadcasts each updated tensor. (DeepSpeed began like that, too.)
#
# </div>
# <div lang="zh">
#
# 每个权重发送两个数，与 DDP 一样：切开状态，通信量并不增加。PyTorch 的 `ZeroRedundancyOptimizer` 却要发三个：在它之前，DDP 已经在每个进程上归约了全部梯度，它再把更新好的张量逐个广播出去。（DeepSpeed 起初也是这样。）
#
# </div>

# %% [markdown] slide={"en": "Cut the **weights**, too. `F.linear(x, wire.all_gather(piece))` is right, and saves nothing.\n\nWhy? **Write the layer that does.**", "zh": "**权重**也切开。`F.linear(x, wire.all_gather(piece))` 算得对，却什么也没省。\n\n为什么？**写出真正省的那一层。**"}
# ## 8.6 Gather, use, drop / 收集，用完，丢掉
#
# <div lang="en">
#
# To cut the weights too, a layer gathers its weight, uses it, and drops it. `F.linear(x, wire.all_gather(piece))` computes the right thing and drops nothing: backward needs the weight (lesson 01), so autograd keeps it, whole. The way out is that of lesson 02: keep what is small, and get the rest once more.
#
# **Exercise 3.** Write it as one rank. `piece` is this rank's part of the weight's rows, and `wire` is this rank's: `all_gather(piece)` gives the whole weight, `reduce_scatter(tensor)` this rank's part of the sum over all ranks. `forward` returns $x W^\top$; `backward` returns the gradients of `x` and of `piece`, and `None` for the wire. Between the two no more than the piece may be live, and no more may be sent than it takes.
#
# </div>
# <div lang="zh">
#
# 要把权重也切开，一层就得先收集权重，用完就丢。`F.linear(x, wire.all_gather(piece))` 算得对，却什么也没丢：反向要用权重（第 01 课），autograd 就把它完整地留着。出路与第 02 课相同：只留小的，其余的再取一次。
#
# **练习 3。** 站在一个进程的位置上写。`piece` 是权重中属于本进程的那些行，`wire` 是本进程的线路：`all_gather(piece)` 返回完整的权重，`reduce_scatter(tensor)` 返回各进程之和中属于本进程的那一份。`forward` 返回 $x W^\top$；`backward` 返回 `x` 和 `piece` 的梯度，`wire` 的位置返回 `None`。前向与反向之间存活的权重不得多于 `piece`，发送的也不得多于必需。
#
# </div>


# %% minutes=12
class GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(context, x, piece, wire):  # (b, in), (out / N, in)
        context.wire = wire
        return x

    @staticmethod
    def backward(context, gradient):  # (b, out)
        return gradient, None, None


lesson_08.check_gathered_linear(GatheredLinear)


# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not lesson_08.check_gathered_linear.accepted:

    class GatheredLinear(torch.autograd.Function):
        @staticmethod
        def forward(context, x, piece, wire):
            context.wire = wire
            context.save_for_backward(x, piece)
            return x @ wire.all_gather(piece).mT

        @staticmethod
        def backward(context, gradient):
            x, piece = context.saved_tensors
            whole = context.wire.all_gather(piece)
            return gradient @ whole, context.wire.reduce_scatter(gradient.mT @ x), None


lesson_08.check_gathered_linear(GatheredLinear)
### END SOLUTION

# %% [markdown] slide={"en": "FSDP2 does so for every block. Its root stays gathered.\n\n**How many bytes in a step?**", "zh": "FSDP2 对每个块都这样做，根模块则一直收集着。\n\n**一步之中通信多少字节？**"}
# ## 8.7 What is given, and what a wire carries / 交出多少，线路上实际传输多少
#
# <div lang="en">
#
# That is FSDP2: `fully_shard(block)` does it for all weights of a block at once. One part is not dropped: the root, 557,568 parameters outside of the blocks, since backward begins where forward ended.
#
# Bytes on this page are those that a rank **gives** to collectives, of whole tensors: an all-reduce counts twice its tensor, all else once. A ring of $N$ ranks would send $(N - 1)/N$ of that.
#
# **Exercise 4.** Type the bytes that a rank gives to collectives in a step, in fp32.
#
# </div>
# <div lang="zh">
#
# 这就是 FSDP2：`fully_shard(block)` 对一个块的全部权重一起这样做。有一部分不丢：根模块，即各块之外的 557,568 个参数，因为前向在哪里结束，反向就从哪里开始。
#
# 这一页数的，是一个进程**交给**集合通信的字节，按完整的张量算：all-reduce 按张量的两倍计，其余只计一次。$N$ 个进程连成一个环时，会发送其中的 $(N - 1)/N$。
#
# **练习 4。** 按 fp32 写出一步中每个进程交给集合通信的字节数。
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

# %% slide="result"
my_sent = communicated(psi, root=557_568)
sent = {mode: run["communicated"]["measured"] for mode, run in two.items()}
rows = [("DDP", my_sent["DDP"], sent["ddp"]), ("FSDP2", my_sent["FSDP2"], sent["fsdp"])]
predictions(rows, unit="bytes")

# %% [markdown] slide={"en": "An error of 0 confirms the calls. Does it confirm the traffic?\n\n**Guess first**: 80.3 MB given on two ranks. What does a wire carry?", "zh": "误差为 0，说明调用数对了。通信量也对了吗？\n\n**先猜**：两个进程，各交出 80.3 MB，线路上实际传输了多少？"}
# <div lang="en">
#
# An error of 0, and what does it confirm? That the calls are those you counted: their arguments were added up. What the backend (here gloo) makes of a call is another matter. So count where nobody can be mistaken: the kernel's own counter of a network interface, in an empty network namespace in which only these ranks run. It takes a Linux that allows it, so here is a recording; `python -m course_lib.lessons.lesson_08.loopback` makes it anew (section 8.16). Ranks of two, with three collectives of a 4 MB tensor below:
#
# </div>
# <div lang="zh">
#
# 误差为 0，说明了什么？只说明发生的正是你数的那些调用：加起来的是调用的参数。后端（这里是 gloo）怎样执行一次调用，是另一回事。所以要到不会弄错的地方去数：在一个只有这几个进程的空网络命名空间里，读 Linux 内核自己的网卡计数。这需要系统允许（Linux），所以下面是记录；`python -m course_lib.lessons.lesson_08.loopback` 可以重新测量（8.16 节）。两个进程，最下面是对一个 4 MB 的张量做三种集合通信：
#
# </div>

# %% slide="result"
given = dict(sent)
for name, times in lesson_08.GIVEN_TIMES.items():
    given[name] = times * lesson_08.TENSOR_BYTES
rows = [(name, count, count / 2, lesson_08.RECORDED[2][name]) for name, count in given.items()]
lesson_08.draw_wire(rows, ranks=2)

# %% [markdown]
# <div lang="en">
#
# DDP and ZeRO 1 carry what a ring would. FSDP2 does not: in this build gloo's **reduce-scatter** carries as much as its all-reduce, 4.0 MB of a 4 MB tensor and not 2.0. So FSDP2 gives 46% more to collectives than DDP, and its wire carries 96% more. With NCCL on GPUs the ring's formula is the usual one; not measured here. Ask of every figure about traffic whose count it is.
#
# </div>
# <div lang="zh">
#
# DDP 和 ZeRO 1 在线路上传输的，正是环该传的。FSDP2 却不是：在这个版本里，gloo 的 **reduce-scatter** 与它的 all-reduce 传得一样多，4 MB 的张量传了 4.0 MB，而不是 2.0。所以 FSDP2 交给集合通信的比 DDP 多 46%，线路上传输的却多 96%。在 GPU 上用 NCCL 时，通常就按环的公式算；这里没有测过。看到任何通信量，都先问一句：这是谁数的？
#
# </div>

# %% [markdown] slide={"en": "A device of 60 MB. One sequence, every layer checkpointed:\n\nwhere does it stop? And four devices of 48 MB, with all eight sequences?", "zh": "一台 60 MB 的设备，只做一条序列，每层都加检查点：\n\n会停在哪里？四台 48 MB 的设备，做全部八条呢？"}
# ## 8.8 The step that no single device could take / 单台设备装不下的一步
#
# <div lang="en">
#
# Suppose devices with nothing beneath them to offload to. One has 60 MB. The least that lessons 02 and 05 make of this step on it: a single sequence, every layer checkpointed. A meter with a budget stops the operator that would pass it.
#
# </div>
# <div lang="zh">
#
# 假设设备没有下一级存储可供卸载。一台设备有 60 MB。用尽第 02 课和第 05 课的办法，这一步最小只能缩成：只做一条序列，每一层都加检查点。带预算的计量器，会拦下第一个超出预算的算子。
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
    alone_stopped = stopped
    print(stopped)

# %% [markdown]
# <div lang="en">
#
# Forward and backward fit. Then Adam makes its state, and the device is full: weights, gradients and state are 110.0 MB, whatever the batch. Without the gradients, by an update inside backward (lesson 05), they would still be 82.5 MB.
#
# Now four ranks, two sequences each, in four modes. Three are new: `fsdp-keep`, FSDP2 that keeps gathered weights from forward to backward; `fsdp-bf16`, gathered and computed in bf16; and FSDP2 with a checkpoint around each layer. This last one runs under a budget, too: 48 MB **on every rank**, from before its model is sharded to the end of the last step. An operator that would pass it ends the run.
#
# </div>
# <div lang="zh">
#
# 前向和反向都装得下，轮到 Adam 建立状态时，设备满了：权重、梯度和状态共 110.0 MB，与批次无关。就算在反向中更新、不留梯度（第 05 课），也还有 82.5 MB。
#
# 现在换成四个进程，各做两条序列，共四种做法。新添三种：`fsdp-keep`，即收集来的权重从前向一直留到反向的 FSDP2；`fsdp-bf16`，以 bf16 收集和计算；以及每一层加检查点的 FSDP2。最后这一种同样带预算：**每个进程** 48 MB，从模型分片之前一直管到最后一步结束。哪个算子会超出，运行就到此为止。
#
# </div>

# %% slide="code"
modes = "fsdp-keep,fsdp,fsdp-bf16,fsdp-checkpoint"
budget = ["--budget", "fsdp-checkpoint=48e6"]  # on each rank
runs = launch(4, "--mode", modes, "--steps", "2", "--details", *budget)
four = {run["mode"]: run for run in runs}
{name: follows(run, losses[:2], 1e-2 if "bf16" in name else 1e-5) for name, run in four.items()}

# %% slide="result"
lesson_08.draw_budgets(alone_stopped, four["fsdp-checkpoint"], device_bytes=60_000_000)

# %% [markdown]
# <div lang="en">
#
# 47.1 MB on each of four, with the whole batch, where one device of 60 MB could not take a single sequence. Each of the two does what the other cannot: sharding leaves the activations of a rank's own sequences alone, and checkpointing leaves weights and state alone.
#
# </div>
# <div lang="zh">
#
# 四个进程各 47.1 MB，做完了整个批次；而一台 60 MB 的设备连一条序列也做不了。两者各有所长，互不替代：分片管不到本进程自己那些序列的激活值，检查点管不到权重和状态。
#
# </div>

# %% [markdown]
# ## 8.9 From two ranks to four / 从两个进程到四个
#
# <div lang="en">
#
# **Guess first.** From two ranks to four: which of the numbers halve? Lines are your formulas, points are measured.
#
# </div>
# <div lang="zh">
#
# **先猜**：从两个进程到四个，哪些数会减半？线是你的公式，点是实测。
#
# </div>

# %% slide="result"
drawn = [run for run in (*two.values(), *four.values()) if run["mode"] != "fsdp-bf16"]
lesson_08.draw_ranks(predicted, drawn)

# %% [markdown]
# <div lang="en">
#
# What is cut halves with each doubling. What is not cut stays: by your formulas DDP holds 110.0 MB on any number of ranks, and ZeRO 1 never falls below 55.0. What a rank gives to collectives is the same on four as on two. Nothing in PyTorch is just ZeRO 2. `fsdp-keep` comes near: the hollow point counts the weights that it keeps until backward, whole, beside the rank's own quarter.
#
# The peak is another matter. One symbolic rank, with a process group that sends nothing, tells it before any is started; `predict` beside the four real ranks:
#
# </div>
# <div lang="zh">
#
# 切开的部分，进程数每翻一倍就减半。没切开的原封不动：按你的公式，不管多少个进程，DDP 都持有 110.0 MB，ZeRO 1 永远降不到 55.0 以下。每个进程交给集合通信的字节，四个与两个时相同。PyTorch 没有恰好做到 ZeRO 2 的实现，`fsdp-keep` 与它接近：图中的空心点，是本进程自己的四分之一，再加上一直留到反向的完整权重。
#
# 峰值是另一回事。用符号张量和一个什么都不发送的进程组，只算一个进程，一个真实的进程都不必启动，就能预先知道峰值。`predict` 与四个真实的进程对照：
#
# </div>


# %% slide="result"
def one_rank(mode, n, **more):
    return predict(task.make_model, lambda: task.part(0, n, 0), task.loss_sum, mode, n, **more)


symbolic_four = {mode: one_rank(mode, 4) for mode in four}
rows = []
for mode, run in four.items():
    expected, taken = symbolic_four[mode], run["taken"][0]
    given_mb = round(taken["sent_bytes"] / 1e6, 1)
    rows.append((f"`{mode}`", expected.peak_bytes, taken["peak_bytes"], given_mb))
table(["4 ranks", "predicted peak (bytes)", "measured peak (bytes)", "communicated (MB)"], rows)

# %% [markdown] slide={"en": "Give every rank its own two sequences, as most people do, and data parallelism divides **no** activations.\n\nWhat does?", "zh": "像多数人那样，给每个进程固定的两条序列，数据并行就**不**分摊激活值了。\n\n那么什么能分摊？"}
# ## 8.10 What each parallelism divides / 各种并行分摊什么
#
# <div lang="en">
#
# Here the ranks divide a fixed batch, so activations fall with their number. Most people keep the batch **of a rank** and let the whole batch grow: then data parallelism, with any ZeRO, divides no activations. In both cases each rank computes at least one sequence, and data parallelism cannot save more than that. If a rank needs still less memory, something else has to be divided among the ranks. In **tensor parallelism** (TP), $t$ ranks divide each matrix, and with **sequence parallelism** (SP) they also divide the operations between the matrices. In **context parallelism** (CP), $c$ ranks divide the sequence, in attention too. In **pipeline parallelism** (PP), $p$ ranks divide the layers, and in **expert parallelism** (EP), $e$ ranks divide the experts of a mixture. The table is from the papers and was not run here:
#
# </div>
# <div lang="zh">
#
# 这里各进程分的是一个固定的批次，所以进程越多，激活值越少。多数人却让**每个进程**的批次不变，总批次随之变大：这样一来，数据并行配上哪一种 ZeRO 都不分摊激活值。而且不论哪种做法，每个进程至少要算一条序列，数据并行到这里就不能再省了。如果还想让每个进程更省，就要把别的东西也分给各个进程。**张量并行**（TP）由 $t$ 个进程分摊每个矩阵，再加上**序列并行**（SP），就连矩阵之间的运算也一起分摊。**上下文并行**（CP）由 $c$ 个进程分摊序列，注意力也不例外。**流水线并行**（PP）由 $p$ 个进程分摊各层，**专家并行**（EP）由 $e$ 个进程分摊混合专家模型里的专家。下表出自论文，这里没有运行：
#
# </div>

# %% slide="result"
lesson_08.parallelisms()

# %% [markdown]
# <div lang="en">
#
# Tensor parallelism cuts the matrices. The norms, and the biases that are added after a sum over ranks, are whole on every rank. How much is "inside attention and MLP"? Your formula of lesson 01 knows: of its $16 s b h + a s^2 b$ numbers a layer, the LayerNorms' inputs and outputs, $4 s b h$, and their statistics stay whole without sequence parallelism; with it, all is divided by $t$ (Korthikanti et al. 2022).
#
# </div>
# <div lang="zh">
#
# 张量并行切开的是矩阵。归一化层的参数，以及在各进程求和之后才加上的偏置，每个进程都有完整的一份。“注意力和 MLP 内部”有多少？第 01 课的公式就能回答：每层 $16 s b h + a s^2 b$ 个数里，两个 LayerNorm 的输入和输出共 $4 s b h$，连同统计量，没有序列并行时都是完整的；有了序列并行，全部除以 $t$（Korthikanti et al. 2022）。
#
# </div>

# %% slide="result"
b, s, h, a = 8, 128, 256, 8  # this decoder; numbers of 4 bytes
norms, inside = 4 * s * b * h + 4 * s * b, 12 * s * b * h + a * s * s * b
counts = [(t, norms + inside / t, (norms + inside) / t) for t in (1, 2, 4, 8)]
rows = [(t, *(round(4 * count / 1e6, 1) for count in each)) for t, *each in counts]
table(["t", "one layer: tensor parallel (MB)", "tensor and sequence parallel (MB)"], rows)

# %% [markdown] slide={"en": "70 billion parameters on 64 GPUs give 775 GB to collectives in a step.\n\n**From how many tokens a rank does that hide behind compute?**", "zh": "700 亿个参数、64 块 GPU，一步要交给集合通信 775 GB。\n\n**每个进程要有多少个 token，通信才能被计算掩盖？**"}
# ## 8.11 Seconds / 秒数
#
# <div lang="en">
#
# Lesson 04's rule: a copy of $m$ bytes over a link of $w$ bytes a second hides behind $f$ FLOPs at $r$ a second if $m/w \le f/r$. Now the link lies between ranks. FSDP2 gives some 12 bytes per parameter (two gathers and a scatter in fp32; forget the root, and the ring's $63/64$). A step computes some 6 FLOPs for each parameter and token: 2 forward, 4 backward.
#
# **Exercise 5.** From how many tokens of a rank on does the traffic take no longer than the compute? `rate` is in FLOPs, `link` in bytes a second.
#
# </div>
# <div lang="zh">
#
# 第 04 课的规则：$m$ 字节的拷贝，链路每秒 $w$ 字节，计算 $f$ FLOPs，每秒 $r$；$m/w \le f/r$ 就能掩盖。现在链路在进程之间。FSDP2 每个参数大约交出 12 字节（fp32，收集两次，散射一次；根模块和环的 $63/64$ 都忽略）。一步中，每个参数、每个 token 大约要 6 FLOPs：前向 2，反向 4。
#
# **练习 5。** 每个进程从多少个 token 起，通信用时就不超过计算？`rate` 是每秒 FLOPs，`link` 是每秒字节。
#
# </div>


# %% minutes=5
def tokens_to_hide(psi, rate, link):
    return 0


lesson_08.check_tokens_to_hide(tokens_to_hide)


# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not lesson_08.check_tokens_to_hide.accepted:

    def tokens_to_hide(psi, rate, link):
        traffic = 12 * psi / link  # seconds
        compute_a_token = 6 * psi / rate
        return traffic / compute_a_token


lesson_08.check_tokens_to_hide(tokens_to_hide)
### END SOLUTION

# %% slide="result"
with symbolic():
    sizes = {"vocabulary": 32000, "hidden": 8192, "heads": 64, "layers": 80, "sequence": 2048}
    seventy = shapes_of(Decoder(**sizes, fused=True))  # shapes alone: nothing is made
rate, link, psi_70 = 400e12, 50e9, seventy.numbers  # FLOPs and bytes a second
traffic = {mode: sent_bytes(seventy, mode, 64) / link for mode in ("fsdp", "fsdp-bf16")}
least = tokens_to_hide(psi_70, rate, link)
lesson_08.draw_seconds(traffic, 6 * psi_70 / rate, least)

# %% [markdown]
# <div lang="en">
#
# The model cancels: $2r/w$, here 16,000 tokens a rank, for 7 billion parameters and for 70 billion. (400 TFLOP/s are two fifths of an H100's data sheet, 50 GB/s a network of 400 Gbit/s; computed, not measured.) With one sequence of 2048 tokens a step computes 2.0 s and sends for 15.5, whatever hides. Gathered in bf16: 10.3 s.
#
# </div>
# <div lang="zh">
#
# 模型约掉了：$2r/w$，这里是每个进程 16,000 个 token，70 亿个参数如此，700 亿也如此。（400 TFLOP/s 是 H100 标称值的五分之二，50 GB/s 是 400 Gbit/s 的网络；这是计算值，不是实测。）只有一条 2048 个 token 的序列时，一步要算 2.0 s，却要传 15.5 s，怎么掩盖也不够。用 bf16 收集：10.3 s。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# One remedy is called **HSDP**: shard within a machine of 8, whose links are some nine times as fast, and replicate between machines. Only the gradient of a rank's own eighth is all-reduced between machines: 65 GB instead of 775, which takes 1.3 s. The price is memory. A rank holds $16\Psi/8$ = 129 GB instead of 16.2, and that does not fit into the 80 GB of the H100 whose rate is used here. On such cards one shards over more ranks (32 GB each over 32, with gathers over the slow links), gives each rank more tokens, or also cuts the matrices (tensor parallelism). Shard as far as you must, no further. (Section 8.21 runs HSDP with 2 × 2 ranks.)
#
# </div>
# <div lang="zh">
#
# 一种对策叫 **HSDP**（混合分片数据并行）：在 8 块 GPU 的一台机器内分片，那里的链路速度约为机器之间的九倍；机器之间则复制。这样，机器之间只需对本进程那八分之一梯度做 all-reduce，共 65 GB，而不是 775 GB，用时 1.3 s。代价是内存：每个进程要持有 $16\Psi/8$ = 129 GB，而不是 16.2 GB。这里用的是 H100 的速率，而 H100 只有 80 GB，装不下。在这样的卡上，可以分到更多进程（分到 32 个时每个持有 32 GB，但收集权重要走慢的链路），可以让每个进程处理更多 token，也可以再切开矩阵（张量并行）。分片分到够用为止，不要再多。（8.21 节用 2 × 2 个进程运行 HSDP。）
#
# </div>

# %% [markdown]
# ## 8.12 In your own code / 实际怎么写
#
# <div lang="en">
#
# | what | PyTorch | run |
# |---|---|---|
# | start $N$ ranks | `torchrun --standalone --nproc-per-node 4 train.py` | 8.3, 8.8 |
# | DDP | `DistributedDataParallel(model, gradient_as_bucket_view=True)` | 8.3 |
# | ZeRO 1 | `ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)` | 8.3 |
# | ZeRO 3 | `for block in model.layers: fully_shard(block)`, then `fully_shard(model)` | 8.3 |
# | keep from forward to backward | `fully_shard(block, reshard_after_forward=False)` | 8.8 |
# | bf16, reduced in fp32 | `MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)` | 8.8: 49.5 MB |
# | HSDP | `fully_shard(block, mesh=mesh)`, with a mesh of two dimensions | 8.21 |
# | a model that is nowhere whole | `with torch.device("meta"):`, `fully_shard`, `to_empty` | 8.22 |
# | shards on the host | `CPUOffloadPolicy()` | no: needs a GPU |
#
# Elsewhere, not run here: Accelerate `fsdp_version: 2`; DeepSpeed `"zero_optimization": {"stage": 3}`, in TRL and the Hugging Face Trainer by the same file; Megatron-LM `--use-distributed-optimizer`, which is ZeRO 1 with the traffic of your step.
#
# </div>
# <div lang="zh">
#
# | 做什么 | PyTorch | 运行 |
# |---|---|---|
# | 启动 $N$ 个进程 | `torchrun --standalone --nproc-per-node 4 train.py` | 8.3、8.8 |
# | DDP | `DistributedDataParallel(model, gradient_as_bucket_view=True)` | 8.3 |
# | ZeRO 1 | `ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)` | 8.3 |
# | ZeRO 3 | `for block in model.layers: fully_shard(block)`，然后 `fully_shard(model)` | 8.3 |
# | 从前向留到反向 | `fully_shard(block, reshard_after_forward=False)` | 8.8 |
# | bf16，以 fp32 归约 | `MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)` | 8.8：49.5 MB |
# | HSDP | `fully_shard(block, mesh=mesh)`，mesh 有两个维度 | 8.21 |
# | 任何一处都没有完整的模型 | `with torch.device("meta"):`，`fully_shard`，`to_empty` | 8.22 |
# | 分片放在主机上 | `CPUOffloadPolicy()` | 否：需要 GPU |
#
# 其他框架的写法，这里没有运行：Accelerate 的 `fsdp_version: 2`；DeepSpeed 的 `"zero_optimization": {"stage": 3}`，TRL 和 Hugging Face Trainer 用同一份配置；Megatron-LM 的 `--use-distributed-optimizer`，即 ZeRO 1，通信量与你写的那一步相同。
#
# </div>

# %% [markdown]
# ## 8.13 Claims and measurements / 说法与实测
#
# <div lang="en">
#
# Three sentences, each with its source, tried on this step. First: what a rank of two gives to collectives. Second: 2 sequences each; held are 110.0 MB and 27.5, the peaks 131.3 and 75.6, since activations and gathered blocks are not cut. Third: what the option saves with DDP, on a single rank.
#
# </div>
# <div lang="zh">
#
# 三句话，都有出处，都拿这一步来检验。第一句：两个进程时，每个进程交给集合通信多少。第二句：各做 2 条序列，持有的是 110.0 MB 和 27.5，峰值是 131.3 和 75.6，因为激活值和收集来的块没有切开。第三句：用 DDP 时这个选项省下多少，只有一个进程。
#
# </div>

# %% slide="result"
spared = []
for tokens in (128, 16):
    without, with_view = (lesson_08.ddp_peak(tokens, view=view) for view in (False, True))
    spared.append(without - with_view)
figures = lesson_08.figures_of_claims(two, four["fsdp"], quarter, spared)
what_you_may_have_read("08", *figures)

# %% [markdown] slide={"en": "The same step, a row for one rank of four.\n\nWhat shrinks with the ranks, and what does not?", "zh": "同样的一步，这一行是四个进程中的一个。\n\n哪些随进程数变小，哪些不变？"}
# ## 8.14 The ledger / 账本
#
# <div lang="en">
#
# This lesson's row is one rank of four with FSDP2: a quarter of the batch, so a quarter of the FLOPs. What it gives to collectives stands under bytes moved.
#
# </div>
# <div lang="zh">
#
# 本课的这一行，是用 FSDP2 时四个进程中的一个：批次的四分之一，FLOPs 也是四分之一。交给集合通信的字节记在“移动的字节”一栏。
#
# </div>

# %% slide="result"
rank = symbolic_four["fsdp"]
ledger("08", "FSDP2, one rank of four", rank, moved_bytes=rank.sent_bytes)

# %% [markdown]
# ## 8.15 Summary / 小结
#
# <div lang="en">
#
# - Data parallelism divides the activations of a fixed batch; ZeRO divides what data parallelism holds $N$ times. In fp32: $16\Psi$, $8\Psi + 8\Psi/N$, $4\Psi + 12\Psi/N$, $16\Psi/N$ bytes.
# - DDP's buckets take the bytes of all gradients at all times: here 27.5 MB more at the peak.
# - An all-reduce is a reduce-scatter and an all-gather. Between the two, each rank can update its own part: ZeRO 1 and 2 need send no more than DDP. ZeRO 3 gathers, uses and drops, for half as much again, less the root. The backend decides what a wire carries.
# - A quarter of the batch takes 131.3 MB instead of 277.7; sharded and with checkpoints, 47.1 MB per rank of four.
# - Traffic hides behind compute from $2r/w$ tokens a rank on. A symbolic rank tells all this before a machine is rented.
#
# **Next:** take a model of your own. Tensor, pipeline and context parallelism cut the matrices, the layers and the sequence; ZeRO cuts none.
#
# </div>
# <div lang="zh">
#
# - 数据并行分摊固定批次的激活值；ZeRO 分摊数据并行存了 $N$ 遍的部分。fp32 时：$16\Psi$、$8\Psi + 8\Psi/N$、$4\Psi + 12\Psi/N$、$16\Psi/N$ 字节。
# - DDP 的桶始终占着全部梯度的字节：这里峰值高 27.5 MB。
# - all-reduce 就是 reduce-scatter 加 all-gather。在两者之间，每个进程可以只更新自己的一份：ZeRO 1 和 2 不必比 DDP 多发送。ZeRO 3 收集，用完，丢掉，交出的多一半，根模块除外。线路上实际传输多少，由后端决定。
# - 只做四分之一个批次，内存就从 277.7 MB 降到 131.3 MB；再加上分片和检查点，四个进程每个只占 47.1 MB。
# - 每个进程从 $2r/w$ 个 token 起，通信就能被计算掩盖。机器还没租，用符号张量算出一个进程，这一切就都知道了。
#
# **下一步**：拿一个你自己的模型来试。张量并行、流水线并行和上下文并行，分别切开矩阵、层和序列；ZeRO 这三样都不切。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **Sources.** Rajbhandari et al. 2020, *ZeRO*, arXiv:1910.02054 (formulas, sections 5 and 7). Li et al. 2020, *PyTorch Distributed*, arXiv:2006.15704 (DDP's buckets). Zhao et al. 2023, *PyTorch FSDP*, arXiv:2304.11277 (HSDP, too). PyTorch documentation: DistributedDataParallel; *Getting Started with Fully Sharded Data Parallel (FSDP2)*. DeepSpeed, *ZeRO stage 1 with reduced communication*, 2020. The papers in the table of section 8.10. All measurements: in this notebook, but for what is marked as recorded.
#
# **To read next.** Hugging Face, *The Ultra-Scale Playbook*, 2025. Narayanan et al. 2021, arXiv:2104.04473 (tensor and pipeline parallelism together).
#
# </div>
# <div lang="zh">
#
# **出处。** Rajbhandari et al. 2020，*ZeRO*，arXiv:1910.02054（公式，第 5、7 节）。Li et al. 2020，*PyTorch Distributed*，arXiv:2006.15704（DDP 的桶）。Zhao et al. 2023，*PyTorch FSDP*，arXiv:2304.11277（也讲 HSDP）。PyTorch 文档：DistributedDataParallel；*Getting Started with Fully Sharded Data Parallel (FSDP2)*。DeepSpeed，*ZeRO stage 1 with reduced communication*，2020。8.10 节表中的各篇论文。除注明是记录的以外，全部测量都由本 notebook 完成。
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
# ## 8.16 The wire, once more / 再看线路
#
# <div lang="en">
#
# With four ranks a ring sends three quarters of what is given; gloo's reduce-scatter again sends what its all-reduce does, 6.0 MB of 4. So FSDP2 carries 81.0 MB where a ring would carry 60.2. Recorded, with `hsdp` of section 8.21:
#
# ```
# python -m course_lib.lessons.lesson_08.loopback --ranks 4
# ```
#
# </div>
# <div lang="zh">
#
# 四个进程时，环发送所交出字节的四分之三；gloo 的 reduce-scatter 仍与它的 all-reduce 一样，4 MB 的张量传了 6.0 MB。所以环只需传 60.2 MB 的 FSDP2，线路上却传输了 81.0 MB。以下是记录，其中的 `hsdp` 见 8.21 节：
#
# ```
# python -m course_lib.lessons.lesson_08.loopback --ranks 4
# ```
#
# </div>

# %%
given = sent | {mode: run["communicated"]["measured"] for mode, run in four.items()}
given |= {name: n * lesson_08.TENSOR_BYTES for name, n in lesson_08.GIVEN_TIMES.items()}
rows = []
for name, count in lesson_08.RECORDED[4].items():
    ring = f"{given[name] * 3 / 4 / 1e6:.1f}" if name in given else "–"
    rows.append((f"`{name}`", ring, round(count / 1e6, 1)))
table(["4 ranks", "sent in a ring (MB)", "sent over the wire (MB)"], rows)

# %% [markdown]
# <div lang="en">
#
# And here and now, where this machine lets us make such a namespace: one tensor of 4 MB on two ranks. What it shows depends on the machine.
#
# </div>
# <div lang="zh">
#
# 如果这台机器允许建立这样的命名空间，现在就能测：一个 4 MB 的张量，两个进程。结果因机器而异。
#
# </div>

# %% tags=["nbval-ignore-output", "shows-device"]
from course_lib.lessons.lesson_08.loopback import carried

try:
    live = carried(2)
except RuntimeError as error:
    live = {"nothing": str(error)[:80]}
live

# %% [markdown]
# ## 8.17 Micro-batches: what `no_sync` saves and costs / 微批次：`no_sync` 省什么，费什么
#
# <div lang="en">
#
# With micro-batches (lesson 05), gradients need to be reduced with the last one only: DDP's `no_sync()`, FSDP2's `set_requires_gradient_sync(False)`. What does it cost? Two ranks, two micro-batches each, by prediction. First DDP. In the usual loop pieces that are not reduced yet add up **beside** the buckets, a second set of gradients, for half the traffic. It need not be: with `gradient_as_bucket_view=True` and `zero_grad(set_to_none=False)` gradients stay views of the buckets, and pieces add up in these. `AccumulatedStep(..., in_buckets=True)` does so:
#
# </div>
# <div lang="zh">
#
# 用微批次时（第 05 课），只需在最后一个微批次归约梯度：DDP 的 `no_sync()`，FSDP2 的 `set_requires_gradient_sync(False)`。代价是什么？两个进程，每个两个微批次，以下是预测。先看 DDP。按通常的循环，还没归约的各份在桶**之外**另行累加，多持有一整份梯度，换来通信减半。其实不必如此：设 `gradient_as_bucket_view=True` 和 `zero_grad(set_to_none=False)`，梯度就一直是桶的视图，各份直接在桶里累加。`AccumulatedStep(..., in_buckets=True)` 就是这样做的：
#
# </div>

# %%
ways = {
    "with each micro-batch": {"sync": "each"},
    "with the last micro-batch, sums outside the buckets": {},
}
ways["with the last micro-batch, sums in the buckets"] = {"in_buckets": True}
headings = ["communicated (MB)", "gradients at the peak (MB)", "peak (MB)"]


def row_of(mode, way, options):
    taken = one_rank(mode, 2, micro_batches=2, **options)
    counts = taken.sent_bytes, taken.at_peak["gradient"], taken.peak_bytes
    return way, *(round(count / 1e6, 1) for count in counts)


table(["DDP reduces gradients", *headings], [row_of("ddp", *way) for way in ways.items()])

# %% [markdown]
# <div lang="en">
#
# So for DDP the half of the traffic is free, if asked for. Real ranks say the same: `--mode ddp --micro-batches 2 --in-buckets` on two peaks at 158.8 MB, without the option at 186.3. FSDP2 has no buckets to add up in. It would hold whole gradients in place of its part:
#
# </div>
# <div lang="zh">
#
# 可见对 DDP 来说，只要这样设置，省下一半通信分文不费。真实的进程也是如此：两个进程运行 `--mode ddp --micro-batches 2 --in-buckets`，峰值 158.8 MB；不加这个选项是 186.3。FSDP2 没有桶可供累加，只能持有完整的梯度，而不是自己的一份：
#
# </div>

# %%
ways = {"with each micro-batch": {"sync": "each"}, "with the last micro-batch": {}}
table(["FSDP2 reduces gradients", *headings], [row_of("fsdp", *way) for way in ways.items()])

# %% [markdown]
# <div lang="en">
#
# It gives 17% less to collectives and holds 13.8 MB more; with more ranks that grows towards 27.5. So `no_sync` in the buckets for DDP, always; for FSDP2 only where the wire is slow and there is room.
#
# </div>
# <div lang="zh">
#
# 交给集合通信的少 17%，却多持有 13.8 MB；进程越多，越接近 27.5。所以用 DDP 时，总可以在桶里用 `no_sync`；用 FSDP2 时，链路慢、内存又有富余才用。
#
# </div>

# %% [markdown]
# ## 8.18 Keep, or gather again / 留着，还是再收集一次
#
# <div lang="en">
#
# `reshard_after_forward=False` keeps gathered blocks from forward to backward. What is given is that of ZeRO 2, and of DDP. Between steps the weights are cut, as in ZeRO 3; at the peak they are there whole, with the rank's own part beside them: $4\Psi + 4\Psi/N$. What `fsdp` has gathered at its peak is the root and one block. (A number in place of `False` keeps the weights of groups of so many ranks.)
#
# </div>
# <div lang="zh">
#
# `reshard_after_forward=False` 把收集来的块从前向留到反向。交出的字节与 ZeRO 2 和 DDP 相同。两步之间权重是切开的，与 ZeRO 3 一样；峰值时则是完整的权重，外加本进程自己的一份：$4\Psi + 4\Psi/N$。`fsdp` 峰值时收集在手的，是根模块和一个块。（把 `False` 换成一个数，就按这么多个进程一组保留权重。）
#
# </div>

# %%
rows = []
for mode in ("fsdp", "fsdp-keep"):
    taken = four[mode]["taken"][0]
    counts = taken["sent_bytes"], taken["at_peak"]["gathered"], taken["peak_bytes"]
    rows.append((f"`{mode}`", *(round(count / 1e6, 1) for count in counts)))
table(["4 ranks", "communicated (MB)", "gathered at the peak (MB)", "peak (MB)"], rows)

# %% [markdown]
# ## 8.19 What does not divide / 除不尽怎么办
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

shapes = shapes_of(task.make_model())
rows = [(rank, *each.values()) for rank, each in enumerate(held_bytes(shapes, "fsdp", 3))]
table(["rank", "weights", "gradients", "optimizer state"], rows)

# %% [markdown]
# ## 8.20 7 and 70 billion parameters / 70 亿与 700 亿个参数
#
# <div lang="en">
#
# **Exercise 6.** 7 billion parameters ($7 \times 10^9$) on 8 GPUs, in mixed precision as ZeRO's paper, Megatron-LM and DeepSpeed count it: weight 2 bytes, gradient 2, and 12 for fp32 weights and Adam's moments. How many bytes does a rank hold? (Whose count is it? With `torch.autocast`, lesson 01, weights and gradients stay fp32: `ZeroRedundancyOptimizer` then holds $8\Psi + 8\Psi/N$, 63 GB. FSDP2's bf16 policy keeps fp32 shards and gathers bf16 copies: $16\Psi/N$, too.)
#
# </div>
# <div lang="zh">
#
# **练习 6。** 70 亿个参数（$7 \times 10^9$）、8 块 GPU、混合精度，按 ZeRO 论文、Megatron-LM 和 DeepSpeed 的计法：权重 2 字节，梯度 2 字节，fp32 权重和 Adam 的两个矩共 12 字节。每个进程持有多少字节？（这是谁的计法？用第 01 课的 `torch.autocast` 时，权重和梯度都是 fp32：`ZeroRedundancyOptimizer` 要持有 $8\Psi + 8\Psi/N$，即 63 GB。FSDP2 的 bf16 策略保留 fp32 分片，收集时用 bf16：也是 $16\Psi/N$。）
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

# %% [markdown]
# <div lang="en">
#
# Now your formulas as functions, for the decoders of lesson 01 on 8 and on 64 ranks. Only shapes are needed: nothing is made. In fp32 what is held by the largest of them falls to 16.2 GB on 64 ranks; it gives 775 GB to collectives in each step, and by this count so it would on 1000. Nobody trains 70 billion parameters so: the last column gathers in bf16 and reduces in fp32.
#
# </div>
# <div lang="zh">
#
# 再用函数来算第 01 课的大解码器，8 个和 64 个进程。只用到形状，什么都不建立。用 fp32 时，最大的那个，在 64 个进程上每个只持有 16.2 GB，但每一步要交给集合通信 775 GB；按这里的计法，换成 1000 个进程也是这么多。没有人这样训练 700 亿个参数：最后一列以 bf16 收集，以 fp32 归约。
#
# </div>

# %%
rows = []
for name, h, a, layers in (("7 B", 4096, 32, 32), ("70 B", 8192, 64, 80)):
    with symbolic():
        sizes = {"vocabulary": 32000, "hidden": h, "heads": a, "layers": layers, "sequence": 2048}
        shapes = shapes_of(Decoder(**sizes, fused=True))
    for n in (8, 64):
        held_gb = [sum(held_bytes(shapes, mode, n)[0].values()) / 1e9 for mode in ("ddp", "fsdp")]
        sent_gb = [sent_bytes(shapes, mode, n) / 1e9 for mode in ("ddp", "fsdp", "fsdp-bf16")]
        rows.append((name, n, *(round(count, 1) for count in (*held_gb, *sent_gb))))
held = ["held, DDP (GB)", "held, FSDP2 (GB)"]
sent = ["communicated, DDP (GB)", "communicated, FSDP2 (GB)", "the same in bf16 (GB)"]
table(["model", "ranks", *held, *sent], rows)

# %% [markdown]
# ## 8.21 Shard here, replicate there (HSDP) / 机器内分片，机器间复制（HSDP）
#
# <div lang="en">
#
# Four ranks as two machines of two: `fully_shard` takes a mesh with two dimensions, replicates along the first and shards along the second. Here one rank of it, with a group that sends nothing, and a counter of what its collectives are given:
#
# </div>
# <div lang="zh">
#
# 把四个进程看作两台机器，每台两个：`fully_shard` 接受有两个维度的 mesh，沿第一维复制，沿第二维分片。下面只算其中一个进程，进程组什么都不发送，另有一个计数器，数出它交给集合通信多少：
#
# </div>

# %%
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from course_lib.distributed import Communicated


def sharded(model, mesh):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh, reshard_after_forward=False)


# %%
meshes, rows = {"FSDP2": (1, 4), "HSDP": (2, 2)}, []
with lesson_08.as_rank_of(4):
    for name, sizes in meshes.items():
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
        model = sharded(task.make_model(), mesh if sizes[0] > 1 else mesh["shard"])
        with Communicated() as given:
            loss, tokens = task.loss_sum(model, task.part(0, 4, 0))
            (loss / tokens).backward()
        own = sum(weight.to_local().nbytes for weight in model.parameters())
        rows.append((name, round(own / 1e6, 1), round(given.bytes / 1e6, 1)))
table(["4 ranks", "weights per rank (MB)", "communicated (MB)"], rows)

# %% [markdown]
# <div lang="en">
#
# It gives 27.5 MB more: the all-reduce of a half of the gradients, counted twice. But this alone goes between machines; all else stays within. On four real gloo ranks it trains as one process does: a loss of 7.681866 in the sixth step, as there, and 67.8 MB on the wire against 81.0 (section 8.16):
#
# ```
# python -m course_lib.lessons.lesson_08.loopback --ranks 4 --what hsdp,fsdp
# ```
#
# </div>
# <div lang="zh">
#
# 交出的多了 27.5 MB：一半梯度的 all-reduce，按两倍计。但机器之间传的只有这一项，其余都在机器之内。在四个真实的 gloo 进程上，它的训练与单个进程一致：第六步的损失同为 7.681866；线路上实际传输了 67.8 MB，而不是 81.0（8.16 节）：
#
# ```
# python -m course_lib.lessons.lesson_08.loopback --ranks 4 --what hsdp,fsdp
# ```
#
# </div>

# %% [markdown]
# ## 8.22 A model that is nowhere whole / 任何一处都没有完整的模型
#
# <div lang="en">
#
# All runs above make the whole model on every rank, and shard it then. Here that costs 29.6 MB for a moment, whatever $N$ is. The 70 billion parameters of section 8.20 would take 259 GB on every rank to be made, some 2 TB of host memory for a machine of eight. The remedy is three lines: make it on the device `meta`, which has shapes and no bytes; shard it; then give the shards their bytes, and values:
#
# </div>
# <div lang="zh">
#
# 上面的运行，都是每个进程先建立完整的模型，再来分片。这里不过是一时占用 29.6 MB，与 $N$ 无关。8.20 节的 700 亿个参数，每个进程光是建立就要 259 GB，一台八个进程的机器约需 2 TB 主机内存。办法只有三行：先在 `meta` 设备上建立，那里只有形状，没有字节；再分片；最后才给各个分片分配字节，填上数值：
#
# </div>


# %%
def made_on(device):
    with MemoryMeter() as meter:
        with torch.device(device):  # 1
            model = task.make_model()
        sharded(model, init_device_mesh("cpu", (4,)))  # 2
        if device == "meta":
            model.to_empty(device="cpu")  # 3; then values, as from a checkpoint or `init_weights`
    return f"`{device}`", meter.peak_bytes, meter.live_bytes


with lesson_08.as_rank_of(4):
    rows = [made_on(device) for device in ("cpu", "meta")]
table(["created on", "peak (bytes)", "held afterwards (bytes)"], rows)

# %% [markdown]
# <div lang="en">
#
# A quarter of the weights, and not a byte more. What `to_empty` leaves is garbage: values come from a checkpoint of section 8.24, of which each rank reads its part, or from the model's own initialisation, run on the shards.
#
# </div>
# <div lang="zh">
#
# 权重的四分之一，一个字节也不多。`to_empty` 留下的只是无意义的内容：数值要么来自 8.24 节的检查点，每个进程只读自己的一份；要么在分片上运行模型自己的初始化。
#
# </div>

# %% [markdown]
# ## 8.23 Clipping a gradient that is cut / 裁剪切开的梯度
#
# <div lang="en">
#
# The norm of a gradient is that of the whole. A rank has a piece: it sums the squares of its own, and one number, all-reduced, does the rest. Who clips by the norm of the piece clips each rank by another factor, which is no step of anything:
#
# </div>
# <div lang="zh">
#
# 梯度的范数，是完整梯度的范数。每个进程只有一份：先求自己那份的平方和，再对这一个数做 all-reduce 即可。如果按各自那份的范数裁剪，每个进程的系数都不同，走出的步子就不是任何优化器该走的：
#
# </div>

# %%
gradient = torch.linspace(-1, 3, 64).sin()
pieces = gradient.chunk(4)
squares = lesson_08.Wire().all_reduce([piece.square().sum().expand(4) for piece in pieces])
norms = [round(piece.norm().item(), 3) for piece in pieces]
print("pieces:", norms, "whole:", round(gradient.norm().item(), 3), "all-reduced:", end=" ")
print(round(squares[0][0].sqrt().item(), 3))

# %% [markdown]
# <div lang="en">
#
# `torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)` does that for FSDP2's DTensors; so does the command, which prints the norms with `--json`, equal in all modes but for rounding:
#
# ```
# torchrun ... -m course_lib.distributed --mode ddp,fsdp --max-norm 1 --json
# ```
#
# </div>
# <div lang="zh">
#
# `torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)` 会对 FSDP2 的 DTensor 这样做；命令也会，加上 `--json` 还会打印范数，除舍入外各种做法都相等：
#
# ```
# torchrun ... -m course_lib.distributed --mode ddp,fsdp --max-norm 1 --json
# ```
#
# </div>

# %% [markdown]
# ## 8.24 Saving, and resuming on another number of ranks / 存盘，换个进程数继续
#
# <div lang="en">
#
# The two ranks of section 8.3 have saved their second step. Each wrote its own part with `torch.distributed.checkpoint`; a process that reads takes what it needs from all files, by the names of the parameters. So what two ranks of FSDP2 have written, one rank of DDP can go on with, in this very process:
#
# </div>
# <div lang="zh">
#
# 8.3 节的两个进程把第二步的结果存了盘。每个进程用 `torch.distributed.checkpoint` 写出自己的一份；读取的进程按参数的名字，从各个文件里取所需的部分。所以两个 FSDP2 进程存下的状态，可以由一个 DDP 进程接着训练；下面就在当前进程里做：
#
# </div>

# %%
went_on = lesson_08.resumed_alone(f"{saved.name}/fsdp")
saved.cleanup()
follows({"losses": went_on}, losses[2:])

# %% [markdown]
# <div lang="en">
#
# A folder gets its final name once all ranks have written. Whatever is killed before leaves a folder that ends in `.incomplete`, and `--resume` takes the last complete one. (For other tools, `get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))` of `torch.distributed.checkpoint.state_dict` gathers whole tensors on rank 0; not run here.) In a terminal:
#
# ```
# torchrun ... -m course_lib.distributed --mode fsdp --steps 100 --every 20 --save runs
# torchrun ... -m course_lib.distributed --mode fsdp --steps 100 --resume runs
# ```
#
# </div>
# <div lang="zh">
#
# 全部进程都写完，目录才改成正式的名字。中途被终止，留下的目录以 `.incomplete` 结尾，`--resume` 取最近一个完整的。（要给其他工具用，`torch.distributed.checkpoint.state_dict` 里的 `get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))` 会在 0 号进程上收集完整的张量；这里没有运行。）在终端里：
#
# ```
# torchrun ... -m course_lib.distributed --mode fsdp --steps 100 --every 20 --save runs
# torchrun ... -m course_lib.distributed --mode fsdp --steps 100 --resume runs
# ```
#
# </div>

# %% [markdown]
# ## 8.25 A rank that fails / 一个进程失败了
#
# <div lang="en">
#
# A collective waits for everybody. What if one dies? Tried with two gloo processes and no `torchrun`: one raises an error, or is killed; the other, waiting in an all-reduce, gets "Connection closed by peer" within half a second, since the dead one's sockets close. So what you see first may be a victim's error. `torchrun` ends all when one fails, and prints the traceback of the first under "Root Cause"; for that, the command's `main` carries `@record`, and a rank that has lost another waits, so that the cause speaks first. Ranks that lost a connection or were ended by a signal are victims.
#
# A rank that hangs closes nothing and gives no error. The process group's timeout ends it, after 30 minutes by default with gloo and 10 with NCCL. The library's tests do it with a real rank: one that raises, and one that stands still while it saves.
#
# </div>
# <div lang="zh">
#
# 集合通信要等所有人到齐。如果有一个死了呢？用两个 gloo 进程试过，不经 `torchrun`：一个抛出错误，或者被终止；另一个正在 all-reduce 里等待，半秒之内就收到 “Connection closed by peer”，因为死掉的进程，套接字会关闭。所以最先看到的，可能只是受害者的错误。一个进程失败，`torchrun` 就全部结束，并在 “Root Cause” 下打印最先出错的调用栈；为此，这个命令的 `main` 函数带有 `@record`，而失去同伴的进程会等一等，让出错的先说。连接断开的、被信号结束的，都只是受害者。
#
# 挂住不动的进程什么也不关闭，也不报错，要等进程组超时才会结束：默认 gloo 是 30 分钟，NCCL 是 10 分钟。库的测试用真实的进程做了这些：一个抛出错误，一个在存盘时停住不动。
#
# </div>

# %% [markdown]
# ## 8.26 On a GPU / 在 GPU 上
#
# <div lang="en">
#
# The same command, on a machine with a GPU a rank, takes NCCL by itself and adds `fsdp-cpu` to the modes:
#
# ```
# torchrun --standalone --nproc-per-node 2 -m course_lib.distributed --mode ddp,zero1,fsdp,fsdp-checkpoint,fsdp-bf16,fsdp-cpu
# ```
#
# Bytes held and bytes given are the same. The peak is not quite. Read in PyTorch 2.13's code, **not measured**: a gather fills one flat buffer, which is copied out into the block's weights and lives on until the next block's copy; that block's gather runs ahead into a flat buffer of its own; and in backward the input of a reduce-scatter lives until its stream is done. So besides the block at work there may be two flat buffers, and a block's gradients: here three times 3.2 MB, for 70 billion parameters three times 3.2 GB in fp32. NCCL has buffers of its own, which no tensor shows. Nothing of this has been recorded for this page.
#
# </div>
# <div lang="zh">
#
# 在每个进程有一块 GPU 的机器上，同样的命令会自动选用 NCCL，还可以加上 `fsdp-cpu`：
#
# ```
# torchrun --standalone --nproc-per-node 2 -m course_lib.distributed --mode ddp,zero1,fsdp,fsdp-checkpoint,fsdp-bf16,fsdp-cpu
# ```
#
# 持有的字节和交出的字节都不变，峰值略有不同。以下读自 PyTorch 2.13 的代码，**没有测过**：一次收集先填满一个扁平的缓冲区，再拷贝成块的各个权重，这个缓冲区要到下一个块拷贝时才释放；下一个块的收集提前进行，又占一个扁平的缓冲区；反向时，reduce-scatter 的输入要等它的流做完才释放。所以除了正在计算的块，还可能有两个扁平的缓冲区和一个块的梯度：这里是三个 3.2 MB，700 亿个参数、fp32 时是三个 3.2 GB。NCCL 还有自己的缓冲区，张量里看不到。本页没有这方面的记录。
#
# </div>
