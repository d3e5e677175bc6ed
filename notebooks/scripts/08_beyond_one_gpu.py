# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] slide={"en": "One device: 277.7 MB. Two devices, half of the batch each.\n\nDoes each of them take half of the bytes?", "zh": "一台设备：277.7 MB。两台设备，各做半个批次。\n\n每台占用的内存也减半吗？"}
# # 8 What changes when one device is not enough? (DDP, ZeRO, FSDP) / 一台设备不够时，会有什么不同？（数据并行 DDP、ZeRO、FSDP）
#
# <div lang="en">
#
# On one device the step of lesson 01 peaks at 277.7 MB. PyTorch's `DistributedDataParallel` distributes it over two devices, with half of the batch on each. Does each device then need half of the memory?
#
# </div>
# <div lang="zh">
#
# 第 01 课的那一步，在一台设备上峰值是 277.7 MB。现在用 PyTorch 的 `DistributedDataParallel` 把它分到两台设备上，每台处理半个批次。每台设备需要的内存也会减半吗？
#
# </div>

# %%
from course_lib.teaching import language

language()

# %% [markdown]
# <div lang="en">
#
# **Goals** (90 minutes). Predict to the byte what a process holds under DDP and ZeRO 1 to 3. Write the step of ZeRO 1, and a layer that gathers its weight only while it is used. Compute how much a step communicates, and when computation hides the communication.
#
# **What to know before**: lesson 01 (the peak of a step) and section 2.2 (a `torch.autograd.Function`). Here a device is a process on your CPU. The code for GPUs is the same. $\Psi$ is the number of parameters and $N$ the number of processes. MB is $10^6$ bytes.
#
# </div>
# <div lang="zh">
#
# **目标**（90 分钟）：算出使用 DDP 和 ZeRO 1 到 3 时每个进程持有多少内存，精确到字节；亲手写出 ZeRO 1 的一步，再写一个只在使用时才收集权重的层；算出一步的通信量，以及通信在什么条件下能被计算掩盖。
#
# **预备知识**：第 01 课（一步的峰值）和 2.2 节（`torch.autograd.Function`）。这里的一台设备就是你的 CPU 上的一个进程，换到 GPU 上代码不变。$\Psi$ 是参数个数，$N$ 是进程数。MB 指 $10^6$ 字节。
#
# </div>

# %%
import tempfile

import torch

from course_lib.accumulation import split
from course_lib.checkpoint import checkpoint_blocks
from course_lib.distributed import launch, predict, sent_bytes, task_of
from course_lib.lessons.ledger import ledger
from course_lib.lessons.lesson_08 import exercises, figures, schemes
from course_lib.memory import MemoryBudgetExceeded, MemoryMeter
from course_lib.teaching import predictions, table

# %% [markdown] slide={"en": "**Data parallelism**: every rank has the whole model, and an $N$-th of the batch.\n\nAn **all-reduce** adds up the gradients.", "zh": "**数据并行**：每个进程都有完整的模型，各处理批次的 $N$ 分之一。\n\n**all-reduce** 把梯度加起来。"}
# ## 8.1 One process per device / 每台设备一个进程
#
# <div lang="en">
#
# Each device gets its own process, called a **rank**. In **data parallelism** (DP; in PyTorch `DistributedDataParallel`, DDP) every rank has the whole model and an $N$-th of the batch. In the backward pass an **all-reduce** adds up the gradients of all ranks, so that all of them take the same step.
#
# However we divide the work, the losses must stay those of one process. So we compute these first, with the whole batch of 8 sequences and the decoder of lesson 00. (`task.loss_sum` returns the sum of the losses and the number of tokens; `split` is from lesson 05.)
#
# </div>
# <div lang="zh">
#
# 每台设备由一个**进程**（rank）负责。**数据并行**（DP，PyTorch 里是 `DistributedDataParallel`，简称 DDP）让每个进程都持有完整的模型，各处理批次的 $N$ 分之一。反向传播时，一次 **all-reduce**（全归约）把各进程的梯度加起来，于是所有进程做的是同样的更新。
#
# 无论怎样分工，损失都必须与单个进程相同。因此先用一个进程、整个批次 8 条序列和第 00 课的解码器，算出这些损失。（`task.loss_sum` 返回损失之和与 token 数，`split` 来自第 05 课。）
#
# </div>

# %%
task = task_of()  # the decoder, and a batch of 8 sequences for each step


def take_step(model, adam, batch):
    loss, tokens = task.loss_sum(model, batch)
    (loss / tokens).backward()
    adam.step()
    return loss.item() / tokens.item()


def alone(steps, sequences=8):
    model, losses = task.make_model(), []
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(steps):
        batch = next(split(task.make_batch(step), sequences))
        with MemoryMeter(model, adam) as meter:
            losses.append(take_step(model, adam, batch))
        adam.zero_grad()
    return losses, meter.at_peak()


# %%
losses, whole = alone(steps=3)

# %% jupyter={"source_hidden": true}
half, quarter = (alone(2, sequences)[1] for sequences in (4, 2))
peaks = {"8 sequences": whole, "4 sequences": half, "2 sequences": quarter}
table(["one device", "peak (bytes)"], [(name, sum(peak.values())) for name, peak in peaks.items()])

# %% [markdown]
# ## 8.2 What each rank holds / 每个进程持有什么
#
# <div lang="en">
#
# With DDP, each of $N$ ranks holds the same 16 bytes per parameter. **ZeRO** (Zero Redundancy Optimizer, Rajbhandari et al. 2020) cuts them into $N$ **shards**, one per rank. ZeRO 1 shards Adam's state, ZeRO 2 also the gradients, and ZeRO 3 also the weights. PyTorch's FSDP2 is ZeRO 3.
#
# </div>
# <div lang="zh">
#
# 使用 DDP 时，$N$ 个进程各存一份完全相同的内容，每个参数 16 字节。**ZeRO**（零冗余优化器，Rajbhandari et al. 2020）把它们切成 $N$ 片，每个进程只存一片，这叫**分片**（shard）。ZeRO 1 切分 Adam 的状态，ZeRO 2 再切分梯度，ZeRO 3 连权重也切分。PyTorch 的 FSDP2 就是 ZeRO 3。
#
# </div>

# %% slide="result"
schemes.draw_stages()

# %% [markdown] slide={"en": "Whole or sharded: weights 4 bytes, gradients 4, Adam's state 8.\n\n**Type the four formulas.**", "zh": "完整，还是分片：权重 4 字节，梯度 4，Adam 的状态 8。\n\n**写出四个公式。**"}
# <div lang="en">
#
# **Exercise 1.** Our decoder is in fp32: 4 bytes per parameter for the weight, 4 for the gradient and 8 for Adam's state. Type the bytes per rank, for any `psi` and `n`. (Section 8.19 has the formulas for mixed precision.)
#
# </div>
# <div lang="zh">
#
# **练习 1。** 我们的解码器全部用 fp32，每个参数的权重占 4 字节，梯度占 4 字节，Adam 的状态占 8 字节。请写出每个进程持有的字节数，对任意的 `psi` 和 `n` 都成立。（混合精度的公式见 8.19 节。）
#
# </div>


# %% minutes=7
def held(psi, n):
    return {"DDP": 0, "ZeRO 1": 0, "ZeRO 2": 0, "ZeRO 3": 0}  # bytes per rank, in fp32


exercises.check_held(held)


# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not exercises.check_held.accepted:

    def held(psi, n):
        return {
            "DDP": 16 * psi,
            "ZeRO 1": 8 * psi + 8 * psi / n,
            "ZeRO 2": 4 * psi + 12 * psi / n,
            "ZeRO 3": 16 * psi / n,
        }


exercises.check_held(held)
### END SOLUTION

# %% [markdown] slide={"en": "4 sequences on one device peak at 180.1 MB, without a single gradient.\n\n**Guess first.** A DDP rank with 4 sequences? An FSDP2 rank?", "zh": "一台设备处理 4 条序列，峰值 180.1 MB，此刻没有一个梯度。\n\n**先猜**：DDP 的一个进程处理 4 条序列呢？FSDP2 呢？"}
# ## 8.3 Run it on two ranks / 用两个进程运行
#
# <div lang="en">
#
# In a terminal, `torchrun` starts the processes:
#
# ```
# python -m torch.distributed.run --standalone --nproc-per-node 2 \
#     -m course_lib.distributed --mode ddp,zero1,fsdp --steps 2
# ```
#
# Below, `launch` runs this command and reads what the ranks print about the second step.
#
# **Guess first.** One device with 4 sequences peaks at the start of the backward pass, with 82.5 MB of weights and Adam's state, 97.6 MB of everything else and not one gradient: 180.1 MB. What is the peak of a DDP rank with 4 sequences, and of an FSDP2 rank, which holds 41.3 MB less weights and state?
#
# </div>
# <div lang="zh">
#
# 在终端里，`torchrun` 负责启动各个进程：
#
# ```
# python -m torch.distributed.run --standalone --nproc-per-node 2 \
#     -m course_lib.distributed --mode ddp,zero1,fsdp --steps 2
# ```
#
# 下面的 `launch` 替我们运行这条命令，并读取各进程打印的第二步的结果。
#
# **先猜**：一台设备处理 4 条序列，峰值出现在反向传播刚开始的时候，此时权重和 Adam 的状态占 82.5 MB，其余占 97.6 MB，一个梯度也没有，合计 180.1 MB。DDP 的一个进程处理 4 条序列，峰值是多少？FSDP2 的进程少持有 41.3 MB 的权重和状态，它的峰值又是多少？
#
# </div>

# %% tags=["guess"]
my_ddp_peak, my_fsdp_peak = None, None  # bytes, such as 150e6

# %%
saved = tempfile.TemporaryDirectory()  # for the section on saving
options = ["--mode", "ddp,zero1,fsdp", "--steps", "2", "--details", "--save", saved.name]
two = {run["mode"]: run for run in launch(2, *options)}


# %%
def follows(run, wanted, within=1e-5):
    return all(abs(a - b) < within for a, b in zip(run["losses"], wanted, strict=True))


table(["`mode`", "losses equal"], [(f"`{m}`", follows(run, losses[:2])) for m, run in two.items()])

# %% [markdown] slide={"en": "All three reproduce the losses of the single process.\n\nWhat does a rank hold, and was your formula right?", "zh": "三种做法都重现了单个进程的损失。\n\n那么每个进程持有多少？你的公式对吗？"}
# <div lang="en">
#
# All three reproduce the losses of one process to 0.00001. Their last bits differ, because two ranks add in another order. Now compare your formulas with what each rank holds when its optimizer steps.
#
# </div>
# <div lang="zh">
#
# 三种做法都重现了单个进程的损失，误差在 0.00001 以内。由于两个进程求和的顺序不同，结果做不到逐比特相等。现在看优化器更新时每个进程持有多少内存，并与你的公式对照。
#
# </div>

# %% jupyter={"source_hidden": true} slide="result"
psi = 6_875_648  # the decoder's parameters
predicted = {n: held(psi, n) for n in range(1, 9)}
stage_of = {"ddp": "DDP", "zero1": "ZeRO 1", "fsdp": "ZeRO 3"}
rows = []
for mode, stage in stage_of.items():
    rows.append((stage, predicted[2][stage], figures.held_by(two[mode])))
predictions(rows, unit="bytes")

# %% [markdown]
# <div lang="en">
#
# Adam also stores a step count of 4 bytes for each of 100 tensors, which makes 400 bytes. ZeRO 1 differs by 22,596 bytes, because PyTorch assigns whole tensors to ranks and the two shares are not quite equal. FSDP2 cuts every tensor along its first dimension, here into equal halves.
#
# </div>
# <div lang="zh">
#
# Adam 还为 100 个张量各存一个步数，每个 4 字节，所以相差 400 字节。ZeRO 1 相差 22,596 字节，因为 PyTorch 把张量整个分配给某一个进程，两个进程分到的不会正好相等。FSDP2 则沿第一维切开每个张量，在这里正好切成两半。
#
# </div>

# %% [markdown]
# ## 8.4 Where is the peak? / 峰值在哪里？
#
# <div lang="en">
#
# Here are your guesses, and what is live at the peak.
#
# </div>
# <div lang="zh">
#
# 下面是你的猜测，以及峰值时内存里有什么。
#
# </div>

# %% jupyter={"source_hidden": true}
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
figures.draw_peaks(at_peak, title)

# %% [markdown]
# <div lang="en">
#
# **DDP** peaks at 207.6 MB. Although no gradient has been computed yet, it holds memory for all of them, 27.5 MB. DDP creates **buckets** before the first step. The backward pass writes gradients into them, so that one full bucket can be sent while the next one is filled. The buckets are kept between steps. (The course sets `gradient_as_bucket_view=True`. By default, gradients and buckets are separate.) **ZeRO 1** has the same buckets, which on two ranks cancel its saving.
#
# **FSDP2** has no buckets. It reduces a block's gradients as soon as they are computed, and each rank keeps only its shard. Its peak is 66.5 MB below DDP's. Your formulas predicted only 55.0 MB.
#
# </div>
# <div lang="zh">
#
# **DDP** 的峰值是 207.6 MB。此时一个梯度都还没有算出来，它却已经为全部梯度占用了 27.5 MB。原因是 DDP 在第一步之前就建好了**桶**（bucket），反向传播把梯度写进桶里，一个桶满了就发送，同时填下一个，而且两步之间也不释放。（本课设置了 `gradient_as_bucket_view=True`；默认情况下，梯度和桶各占一块内存。）**ZeRO 1** 也有这些桶，在两个进程上，它们占用的内存恰好抵消了省下的内存。
#
# **FSDP2** 没有桶。一个块的梯度一算完就归约，进程只留下自己的分片。因此它的峰值比 DDP 低 66.5 MB，而按你的公式只应低 55.0 MB。
#
# </div>

# %% [markdown]
# ## 8.5 ZeRO 1, by hand / 亲手写 ZeRO 1
#
# <div lang="en">
#
# A rank with an $N$-th of Adam's state updates an $N$-th of the weights. It needs the sum of all ranks' gradients for this shard only, and afterwards all weights. Two **collectives**, operations that all ranks call together, do this:
#
# - **reduce-scatter** adds up the tensors of all ranks, and gives rank $r$ the $r$-th shard of the sum;
# - **all-gather** gives every rank all shards, concatenated.
#
# Here are four ranks in one process. `wire` takes a list with one tensor per rank, returns such a list, and counts the bytes that a rank gives to collectives.
#
# </div>
# <div lang="zh">
#
# 一个进程只有 Adam 状态的 $N$ 分之一，也就只更新权重的 $N$ 分之一。各进程的梯度加起来以后，它只需要自己负责的那个分片，而更新之后又需要全部权重。有两种**集合通信**（所有进程一起调用的操作）恰好做这两件事：
#
# - **reduce-scatter**（归约散射）把各进程的张量加起来，第 $r$ 个进程得到和的第 $r$ 个分片；
# - **all-gather**（全收集）把各分片依次拼接，每个进程都得到全部。
#
# 下面在一个进程里模拟四个进程。`wire` 接受一个列表，其中每个进程一个张量，返回同样形式的列表，并统计一个进程交给集合通信的字节数。
#
# </div>

# %% slide="both"
from course_lib.lessons.lesson_08.wire import Wire

wire = Wire()
tensors = [torch.full((8,), float(rank)) for rank in range(4)]  # 0, 1, 2, 3
shards = wire.reduce_scatter(tensors)
first, gathered = shards[0].tolist(), wire.all_gather(shards)[0].tolist()
table(["rank 0's shard", "gathered", "sent (bytes)"], [[first, gathered, wire.sent_bytes]])

# %% slide="result"
schemes.draw_collectives()

# %% [markdown] slide={"en": "**Write the step of ZeRO 1.**\n\nEach Adam sees only its shard. At the end every rank has all weights.", "zh": "**写出 ZeRO 1 的一步。**\n\n每个 Adam 只看到自己的分片，最后每个进程都有全部权重。"}
# <div lang="en">
#
# **Exercise 2.** Write the step of ZeRO 1. `weights` and `gradients` are lists with one whole tensor per rank. `adams[r](shard, gradient)` returns the updated shard. Its state is as long as the first shard that it gets. Return the new weights, one whole tensor per rank. The gradient of the batch is the mean over the ranks.
#
# The check compares with Adam, and counts state and bytes sent.
#
# </div>
# <div lang="zh">
#
# **练习 2。** 写出 ZeRO 1 的一步。`weights` 和 `gradients` 是列表，每个进程一个完整的张量。`adams[r](shard, gradient)` 返回更新后的分片，它的状态与第一次收到的分片一样长。请返回新的权重，每个进程一个完整的张量。整个批次的梯度是各进程梯度的平均。
#
# 检查程序会与 Adam 比较，并统计每个进程的状态和发送的字节数。
#
# </div>


# %% minutes=14
def sharded_step(weights, gradients, adams, wire):
    return None  # the new weights: a list with one whole tensor per rank


exercises.check_sharded_step(sharded_step)


# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not exercises.check_sharded_step.accepted:

    def sharded_step(weights, gradients, adams, wire):
        n = len(weights)
        sums = wire.reduce_scatter(gradients)
        shards = [weight.chunk(n)[rank] for rank, weight in enumerate(weights)]
        updated = [adams[rank](shards[rank], sums[rank] / n) for rank in range(n)]
        return wire.all_gather(updated)


exercises.check_sharded_step(sharded_step)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# Your step sends two numbers per weight, as DDP does. PyTorch's `ZeroRedundancyOptimizer` sends three, because DDP first all-reduces all gradients, and the optimizer then broadcasts each updated tensor.
#
# </div>
# <div lang="zh">
#
# 你写的这一步，每个权重发送两个数，与 DDP 一样多。PyTorch 的 `ZeroRedundancyOptimizer` 要发送三个数，因为 DDP 先对全部梯度做 all-reduce，然后优化器还要把更新好的张量逐个广播出去。
#
# </div>

# %% [markdown] slide={"en": "Shard the **weights**, too. `F.linear(x, wire.all_gather(shard))` is correct and saves no memory.\n\nWhy? **Write the layer that does.**", "zh": "**权重**也分片。`F.linear(x, wire.all_gather(shard))` 结果正确，却一点内存也没省。\n\n为什么？**写出真正省内存的层。**"}
# ## 8.6 Gather a weight only while it is used / 只在使用时才收集权重
#
# <div lang="en">
#
# In ZeRO 3 a layer holds one shard of its weight. It gathers the whole weight, uses it and releases it. The line `F.linear(x, wire.all_gather(shard))` computes the right output but releases nothing. The backward pass needs the weight (lesson 01), so autograd saves it whole. The remedy is that of lesson 02: save only the small shard, and gather the weight again.
#
# **Exercise 3.** Write the layer as one rank sees it. `shard` has this rank's rows of the weight. `wire.all_gather(shard)` returns the whole weight, and `wire.reduce_scatter(tensor)` returns this rank's shard of the sum over all ranks. `forward` returns $x W^\top$. `backward` returns the gradients of `x` and `shard`, and `None` for the wire. Between the two, only the shard of the weight may be live.
#
# </div>
# <div lang="zh">
#
# 在 ZeRO 3 中，一层只持有权重的一个分片，用之前收集完整的权重，用完就释放。`F.linear(x, wire.all_gather(shard))` 的输出是对的，却什么也没有释放，因为反向传播要用到权重（第 01 课），autograd 会把它完整地保存下来。解决办法与第 02 课相同，只保存小的，其余的再取一次。
#
# **练习 3。** 站在一个进程的角度写出这一层。`shard` 是权重中属于本进程的那些行。`wire.all_gather(shard)` 返回完整的权重，`wire.reduce_scatter(tensor)` 返回各进程之和中属于本进程的那一片。`forward` 返回 $x W^\top$；`backward` 返回 `x` 和 `shard` 的梯度，最后一个参数的位置返回 `None`。在前向与反向之间，内存里只能留下本进程的那个权重分片。
#
# </div>


# %% minutes=12
class GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(context, x, shard, wire):  # (b, in), (out / N, in)
        context.wire = wire
        return x

    @staticmethod
    def backward(context, gradient):  # (b, out)
        return gradient, None, None


exercises.check_gathered_linear(GatheredLinear)


# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not exercises.check_gathered_linear.accepted:

    class GatheredLinear(torch.autograd.Function):
        @staticmethod
        def forward(context, x, shard, wire):
            context.wire = wire
            context.save_for_backward(x, shard)
            return x @ wire.all_gather(shard).mT

        @staticmethod
        def backward(context, gradient):
            x, shard = context.saved_tensors
            whole = context.wire.all_gather(shard)
            return gradient @ whole, context.wire.reduce_scatter(gradient.mT @ x), None


exercises.check_gathered_linear(GatheredLinear)
### END SOLUTION

# %% [markdown] slide={"en": "FSDP2 does this for each block. Its root stays gathered.\n\n**How many bytes does a step communicate?**", "zh": "FSDP2 对每个块都这样做，根模块则一直保持完整。\n\n**一步的通信量是多少字节？**"}
# ## 8.7 How much is communicated? / 通信量是多少？
#
# <div lang="en">
#
# FSDP2 works like your layer. `fully_shard(block)` gathers all weights of a block together, for the forward pass and again for the backward pass, and reduce-scatters the gradients. The **root**, the 557,568 parameters outside the blocks, is kept from forward to backward.
#
# The **communication volume** of a rank is the bytes that it gives to collectives. An all-reduce counts its tensor's bytes twice, and every other collective once. In fp32, DDP's volume is $8\Psi$ bytes for a model without buffers, which DDP would send as well.
#
# **Exercise 4.** Write FSDP2's volume as a formula.
#
# </div>
# <div lang="zh">
#
# FSDP2 的做法与你写的层相同。`fully_shard(block)` 一次收集一个块的全部权重，前向收集一次，反向再收集一次，梯度则做一次 reduce-scatter。各块之外的 557,568 个参数属于**根模块**（root），收集之后从前向一直保留到反向。
#
# 一个进程的**通信量**，是它交给集合通信的字节数。all-reduce 按张量的两倍计，其余的集合通信只计一次。用 fp32 时，如果模型没有缓冲区（有的话也要发送），DDP 的通信量是 $8\Psi$ 字节。
#
# **练习 4。** 写出 FSDP2 的通信量。
#
# </div>


# %% minutes=4
def communicated(psi, root):
    return {"DDP": 8 * psi, "FSDP2": 0}  # bytes


exercises.check_sent(communicated)


# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not exercises.check_sent.accepted:

    def communicated(psi, root):
        blocks = psi - root
        return {"DDP": 8 * psi, "FSDP2": 4 * (2 * blocks + root + psi)}


exercises.check_sent(communicated)
### END SOLUTION

# %% jupyter={"source_hidden": true} slide="result"
my_sent = communicated(psi, root=557_568)
sent = {mode: run["communicated"]["measured"] for mode, run in two.items()}
rows = [("DDP", my_sent["DDP"], sent["ddp"]), ("FSDP2", my_sent["FSDP2"], sent["fsdp"])]
predictions(rows, unit="bytes")

# %% [markdown] slide={"en": "**Guess first.** On two ranks FSDP2's volume is 80.3 MB per rank.\n\nHow many bytes really leave a rank?", "zh": "**先猜**：两个进程时，FSDP2 的通信量是每个进程 80.3 MB。\n\n真正从一个进程发出去的有多少？"}
# <div lang="en">
#
# Your formula counts bytes given to collectives. The bytes that leave a rank are another quantity. The table shows them for two ranks, and its last rows use one tensor of 4 MB.
#
# - *Communicated* is the volume.
# - *In a ring* is $(N-1)/N$ of it, which is what ranks in a ring send.
# - *Over the wire* is what the Linux kernel counted in a recorded run with gloo (`python -m course_lib.lessons.lesson_08.loopback`).
#
# </div>
# <div lang="zh">
#
# 你的公式统计的是交给集合通信的字节数。真正从一个进程发出去的有多少字节，是另一个问题。下表给出两个进程时的答案，最后几行是对一个 4 MB 的张量做一次集合通信。
#
# - “通信量”就是上面所说的通信量。
# - “按环算法应发送”是通信量的 $(N-1)/N$，即各进程连成环时发送的字节数。
# - “线路上实际传输”是使用 gloo 时 Linux 内核统计的字节数，这里是记录（`python -m course_lib.lessons.lesson_08.loopback`）。
#
# </div>

# %% jupyter={"source_hidden": true} slide="result"
from course_lib.lessons.lesson_08.wire import GIVEN_TIMES, RECORDED, TENSOR_BYTES

given = dict(sent)
for name, times in GIVEN_TIMES.items():
    given[name] = times * TENSOR_BYTES
rows = []
for name, count in given.items():
    counts = count, count / 2, RECORDED[2][name]
    rows.append((f"`{name}`", *(round(each / 1e6, 1) for each in counts)))
columns = ["communicated (MB)", "sent in a ring (MB)", "sent over the wire (MB)"]
table(["2 ranks", *columns], rows)

# %% [markdown]
# <div lang="en">
#
# DDP and ZeRO 1 send as many bytes as a ring algorithm. FSDP2 sends more, because the reduce-scatter of this build of gloo sends as much as its all-reduce. So FSDP2's volume is 46% above DDP's, and it sends 96% more over this wire. NCCL, which GPUs use, was not measured here.
#
# </div>
# <div lang="zh">
#
# DDP 和 ZeRO 1 发送的与环算法一致。FSDP2 发送得更多，因为这个版本的 gloo 做 reduce-scatter 时，传输量与 all-reduce 相同。因此 FSDP2 的通信量比 DDP 多 46%，在这条线路上的实际传输则多 96%。GPU 使用的 NCCL 在这里没有测量。
#
# </div>

# %% [markdown] slide={"en": "A device of 60 MB. One sequence, every layer checkpointed.\n\nWhere does it stop? And four devices of 48 MB, with all eight sequences?", "zh": "一台 60 MB 的设备，只处理一条序列，每层都加检查点。\n\n会停在哪里？四台 48 MB 的设备处理全部八条呢？"}
# ## 8.8 The step that no single device could take / 单台设备装不下的一步
#
# <div lang="en">
#
# A device has 60 MB, and no host memory to offload to. With the techniques of lessons 02 and 05, the step can process one sequence at a time, with a checkpoint around every layer. A meter with a budget stops it at the first operator that would exceed the budget.
#
# </div>
# <div lang="zh">
#
# 一台设备有 60 MB，没有主机内存可供卸载。用第 02 课和第 05 课的方法，这一步可以每次只算一条序列，并给每层加检查点。带预算的计量器会在第一个超出预算的算子处报错。
#
# </div>

# %% slide="both"
batch = next(split(task.make_batch(0), 1))  # a single sequence
try:
    with MemoryMeter(budget_bytes=60_000_000):
        model = task.make_model()
        adam = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        checkpoint_blocks(model, "layers.*")
        take_step(model, adam, batch)
except MemoryBudgetExceeded as stopped:
    alone_stopped = stopped
    print(stopped)

# %% [markdown]
# <div lang="en">
#
# The forward and backward passes fit. Then Adam creates its state and memory runs out. Weights, gradients and state take 110.0 MB, whatever the batch.
#
# Now four ranks take two sequences each, in four modes. `fsdp-keep` keeps gathered weights from forward to backward. `fsdp-bf16` gathers and computes in bf16. `fsdp-checkpoint` puts a checkpoint around each layer, and it runs under a budget of 48 MB **on every rank**.
#
# </div>
# <div lang="zh">
#
# 前向和反向都装得下，等到 Adam 建立状态时，内存就不够了。权重、梯度和状态共占 110.0 MB，与批次大小无关。
#
# 现在由四个进程各处理两条序列，共四种做法。`fsdp-keep` 把收集来的权重从前向保留到反向，`fsdp-bf16` 用 bf16 收集和计算，`fsdp-checkpoint` 给每一层加检查点，并且限定**每个进程**的预算是 48 MB。
#
# </div>

# %% slide="code"
modes = "fsdp-keep,fsdp,fsdp-bf16,fsdp-checkpoint"
options = ["--steps", "2", "--details", "--budget", "fsdp-checkpoint=48e6"]
four = {run["mode"]: run for run in launch(4, "--mode", modes, *options)}
within = {"fsdp-bf16": 1e-2}
rows = [(f"`{m}`", follows(run, losses[:2], within.get(m, 1e-5))) for m, run in four.items()]
table(["`mode`", "losses equal"], rows)

# %% jupyter={"source_hidden": true} slide="result"
figures.draw_budgets(alone_stopped, four["fsdp-checkpoint"], device_bytes=60_000_000)

# %% [markdown]
# <div lang="en">
#
# Four ranks process the whole batch with 47.1 MB each, where one device with 60 MB could not process one sequence. Sharding does not reduce the activations of a rank's own sequences, and checkpointing does not reduce weights and state. Together they reduce all of these.
#
# </div>
# <div lang="zh">
#
# 四个进程各用 47.1 MB，处理完了整个批次，而一台 60 MB 的设备连一条序列也处理不了。分片不减少本进程那些序列的激活值，检查点不减少权重和优化器状态，合在一起就两样都减少。
#
# </div>

# %% [markdown]
# ## 8.9 From two ranks to four / 从两个进程到四个
#
# <div lang="en">
#
# **Guess first.** Which numbers halve when two ranks become four? Lines are your formulas, points are measurements.
#
# </div>
# <div lang="zh">
#
# **先猜**：从两个进程增加到四个，哪些数会减半？图中的线是你的公式，点是实测。
#
# </div>

# %% jupyter={"source_hidden": true} slide="result"
drawn = [run for run in (*two.values(), *four.values()) if run["mode"] != "fsdp-bf16"]
figures.draw_ranks(predicted, drawn)

# %% [markdown]
# <div lang="en">
#
# From two ranks to four, sharded memory halves. All other parts stay the same: DDP holds 110.0 MB on any number of ranks, and ZeRO 1 never less than 55.0 MB. The communication volume of a rank does not change. (The hollow point is `fsdp-keep`, because PyTorch has no exact ZeRO 2.)
#
# Can the peak be predicted as well? `predict` runs one rank with symbolic tensors and a process group that sends nothing.
#
# </div>
# <div lang="zh">
#
# 分片的部分减半，没有分片的部分不变：不论多少个进程，DDP 都持有 110.0 MB，ZeRO 1 也永远不少于 55.0 MB。每个进程的通信量也不变。（PyTorch 没有与 ZeRO 2 完全一致的实现，所以空心点是 `fsdp-keep`。）
#
# 峰值也能预测吗？`predict` 用符号张量和一个什么都不发送的进程组，只运行其中一个进程。
#
# </div>


# %%
def one_rank(mode, n, **more):
    return predict(task.make_model, lambda: task.part(0, n, 0), task.loss_sum, mode, n, **more)


# %% jupyter={"source_hidden": true} slide="result"
symbolic_four = {mode: one_rank(mode, 4) for mode in four}
rows = []
for mode, run in four.items():
    expected, taken = symbolic_four[mode], run["taken"][0]
    given_mb = round(taken["sent_bytes"] / 1e6, 1)
    rows.append((f"`{mode}`", expected.peak_bytes, taken["peak_bytes"], given_mb))
table(["4 ranks", "predicted peak (bytes)", "measured peak (bytes)", "communicated (MB)"], rows)

# %% [markdown] slide={"en": "70 billion parameters on 64 GPUs: FSDP2 communicates 775 GB per step and rank.\n\n**How many tokens per rank hide it?**", "zh": "700 亿个参数，64 块 GPU：FSDP2 每步每个进程的通信量是 775 GB。\n\n**每个进程要有多少 token 才能掩盖它？**"}
# ## 8.10 Seconds / 秒数
#
# <div lang="en">
#
# Lesson 04's rule: $f$ FLOPs at a rate $r$ hide a transfer of $m$ bytes with bandwidth $w$ if $m/w \le f/r$. FSDP2 in fp32 communicates some 12 bytes per parameter (without the root's exception). A step computes some 6 FLOPs per parameter and token: 2 in the forward pass, 4 in the backward pass.
#
# **Exercise 5.** At least how many tokens must each rank process for computation to take as long as communication? `rate` is in FLOPs per second, `link` in bytes per second.
#
# </div>
# <div lang="zh">
#
# 第 04 课的规则是：以算力 $r$ 计算 $f$ FLOPs，能掩盖以带宽 $w$ 传输 $m$ 字节的条件是 $m/w \le f/r$。用 fp32 时，FSDP2 每个参数的通信量约为 12 字节（不考虑根模块的例外）。一步的计算量约为每个参数、每个 token 6 FLOPs，前向 2，反向 4。
#
# **练习 5。** 每个进程至少有多少个 token 时，计算用时才不少于通信用时？`rate` 的单位是 FLOPs 每秒，`link` 的单位是字节每秒。
#
# </div>


# %% minutes=5
def tokens_to_hide(psi, rate, link):
    return 0


exercises.check_tokens_to_hide(tokens_to_hide)


# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not exercises.check_tokens_to_hide.accepted:

    def tokens_to_hide(psi, rate, link):
        traffic = 12 * psi / link  # seconds
        compute_per_token = 6 * psi / rate
        return traffic / compute_per_token


exercises.check_tokens_to_hide(tokens_to_hide)
### END SOLUTION

# %% jupyter={"source_hidden": true} slide="result"
from course_lib.lessons.lesson_08 import large

seventy = large.seventy_billion()  # shapes only: nothing is allocated
rate, link, psi_70 = 200e12, 50e9, seventy.numbers  # FLOPs and bytes per second
traffic = {"fsdp": sent_bytes(seventy, "fsdp", 64) / link}
least = tokens_to_hide(psi_70, rate, link)
figures.draw_seconds(traffic, 6 * psi_70 / rate, least)

# %% [markdown]
# <div lang="en">
#
# The size of the model cancels, and $2r/w$ remains. At 200 TFLOP/s (two fifths of an H100's datasheet for fp32 matrices that are multiplied in TF32) and 50 GB/s (a network card of 400 Gbit/s) these are 8,000 tokens per rank. All seconds here are computed, not measured. With one sequence of 2048 tokens, 70 billion parameters take 4.0 s to compute and 15.5 s to communicate, if each machine has one such card. How can 64 GPUs in 8 machines do better?
#
# </div>
# <div lang="zh">
#
# 模型的大小在式中约掉了，只剩下 $2r/w$。fp32 矩阵用 TF32 相乘，取 200 TFLOP/s（H100 的 TF32 标称值的五分之二），网络取 50 GB/s（一块 400 Gbit/s 的网卡），$2r/w$ 就等于每个进程 8,000 个 token。这里的秒数都是算出来的，不是实测。假如每台机器只有一块这样的网卡，那么只有一条 2048 个 token 的序列时，700 亿个参数的计算要 4.0 s，通信要 15.5 s。8 台机器上的 64 块 GPU，怎样才能更快？
#
# </div>

# %% jupyter={"source_hidden": true} slide="result"
large.compare_splits(seventy, link)

# %% [markdown]
# <div lang="en">
#
# In a ring over 64 GPUs, each link carries 63/64 of the 775 GB, and a single link leaves each machine. With **FSDP2**, a gather brings the weights into a machine once, not once per GPU. **HSDP** shards within a machine and replicates between machines. It communicates least between machines, but each rank holds $16\Psi/8$, more than the 80 GB of an H100.
#
# In the last row, the 8 GPUs of a machine divide each matrix (**tensor parallelism**, section 8.16) and process 8 sequences together, while FSDP2 shards over the 8 machines. Each GPU gathers only an eighth of the weights, but a machine still gathers 678 GB instead of 763. The number of network cards makes the greater difference: with one per GPU, as in a DGX H100, the 4.0 s of computation hide the communication of every row. (The table does not count the communication within a machine.)
#
# </div>
# <div lang="zh">
#
# 在 64 块 GPU 组成的环里，每条链路传输 775 GB 的 63/64，而离开每台机器的链路只有一条。因此用 **FSDP2** 时，每次收集只让权重进入一台机器一次，而不是每块 GPU 一次。**HSDP**（混合分片数据并行）在一台机器内分片，在机器之间复制。它在机器之间的通信最少，但每个进程要持有 $16\Psi/8$，而一块 H100 只有 80 GB，装不下。
#
# 最后一行里，一台机器的 8 块 GPU 分摊每个矩阵（**张量并行**，8.16 节），一起处理 8 条序列，8 台机器之间则用 FSDP2 分片。每块 GPU 只收集八分之一的权重，但整台机器仍然几乎要收集全部权重，是 678 GB，而不是 763 GB。差别更大的是网卡的数量：像 DGX H100 那样每块 GPU 配一块网卡时，4.0 s 的计算能掩盖每一行的通信。（机器之内的通信，表中没有计入。）
#
# </div>

# %% [markdown]
# ## 8.11 In your own code / 实际怎么写
#
# <div lang="en">
#
# | what | PyTorch | run |
# |---|---|---|
# | DDP | `DistributedDataParallel(model, gradient_as_bucket_view=True)` | 8.3 |
# | ZeRO 1 | `ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)` | 8.3 |
# | ZeRO 3 | `for block in model.layers: fully_shard(block)`, then `fully_shard(model)` | 8.3 |
# | bf16, reduced in fp32 | `MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)` | 8.8: 49.5 MB |
# | tensor parallelism | `parallelize_module(model, mesh, plan)` | 8.16 |
# | HSDP | `fully_shard(block, mesh=mesh)`, with a mesh of two dimensions | 8.20 |
# | a model that is nowhere whole | `with torch.device("meta"):`, `fully_shard`, `to_empty` | 8.21 |
# | shards on the host | `CPUOffloadPolicy()` | no: needs a GPU |
#
# Section 8.17 lists the same settings for DeepSpeed.
#
# </div>
# <div lang="zh">
#
# | 做什么 | PyTorch | 运行 |
# |---|---|---|
# | DDP | `DistributedDataParallel(model, gradient_as_bucket_view=True)` | 8.3 |
# | ZeRO 1 | `ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)` | 8.3 |
# | ZeRO 3 | `for block in model.layers: fully_shard(block)`，然后 `fully_shard(model)` | 8.3 |
# | bf16，以 fp32 归约 | `MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)` | 8.8：49.5 MB |
# | 张量并行 | `parallelize_module(model, mesh, plan)` | 8.16 |
# | HSDP | `fully_shard(block, mesh=mesh)`，mesh 有两个维度 | 8.20 |
# | 在任何进程上都不完整的模型 | `with torch.device("meta"):`，`fully_shard`，`to_empty` | 8.21 |
# | 分片放在主机内存里 | `CPUOffloadPolicy()` | 否：需要 GPU |
#
# DeepSpeed 里对应的设置见 8.17 节。
#
# </div>

# %% [markdown]
# ## 8.12 Claims and measurements / 说法与实测
#
# <div lang="en">
#
# Below, the second statement compares one device with one rank of four, with 2 sequences each. The third uses DDP on a single rank.
#
# </div>
# <div lang="zh">
#
# 下表的第二种说法比较一台设备与四个进程中的一个，各处理 2 条序列；第三种用只有一个进程的 DDP 检验。
#
# </div>

# %% jupyter={"source_hidden": true} slide="result"
spared = []
for tokens in (128, 16):
    without, with_view = (figures.ddp_peak(tokens, view=view) for view in (False, True))
    spared.append(without - with_view)
figures.what_you_may_have_read(two, four["fsdp"], quarter, spared)

# %% [markdown] slide={"en": "The same step, a row for one rank of four.\n\nWhat shrinks with the ranks, and what does not?", "zh": "同样的一步，这一行是四个进程中的一个。\n\n哪些随进程数变小，哪些不变？"}
# ## 8.13 The ledger / 账本
#
# <div lang="en">
#
# This lesson's row is one rank of four with FSDP2, which processes a quarter of the batch. Its communication volume is in the column of bytes moved.
#
# </div>
# <div lang="zh">
#
# 本课的这一行记录四个 FSDP2 进程中的一个，它处理批次的四分之一。通信量记在“移动的字节”一栏。
#
# </div>

# %% jupyter={"source_hidden": true} slide="result"
rank = symbolic_four["fsdp"]
ledger("08", "FSDP2, one rank of four", rank, moved_bytes=rank.sent_bytes)

# %% [markdown]
# ## 8.14 Summary / 小结
#
# <div lang="en">
#
# - Data parallelism divides the activations of a fixed batch. ZeRO shards what each rank of DDP holds whole. In fp32 a rank holds $16\Psi$, $8\Psi + 8\Psi/N$, $4\Psi + 12\Psi/N$ or $16\Psi/N$ bytes.
# - DDP's buckets take memory for all gradients all the time, here 27.5 MB at the peak.
# - An all-reduce is a reduce-scatter and an all-gather. ZeRO 1 and 2 can update between the two and then send no more than DDP (PyTorch's ZeRO 1 sends half more). ZeRO 3 gathers weights twice per micro-batch. With a single one, it sends up to half more.
# - A quarter of the batch takes 131.3 MB instead of 277.7 MB. With shards and checkpoints, a rank of four needs 47.1 MB.
# - In fp32, about $2r/w$ tokens per rank are enough to hide FSDP2's communication.
#
# **Next:** [lesson 09](09_your_own_model.ipynb), a model of your own.
#
# </div>
# <div lang="zh">
#
# - 批次固定时，数据并行分摊激活值。DDP 的每个进程都完整持有权重、梯度和优化器状态，ZeRO 则把它们分片。用 fp32 时，每个进程持有 $16\Psi$、$8\Psi + 8\Psi/N$、$4\Psi + 12\Psi/N$ 或 $16\Psi/N$ 字节。
# - DDP 的桶始终为全部梯度占用内存，这里使峰值高出 27.5 MB。
# - 一次 all-reduce 等于一次 reduce-scatter 加一次 all-gather。ZeRO 1 和 2 可以在两者之间更新权重，这时发送的不比 DDP 多（PyTorch 的 ZeRO 1 多一半）。ZeRO 3 在每个微批次里收集两次权重。只有一个微批次时，它的通信量比 DDP 至多高出一半。
# - 只处理四分之一个批次，峰值就从 277.7 MB 降到 131.3 MB。再加上分片和检查点，四个进程各只需 47.1 MB。
# - 用 fp32 时，每个进程只要有大约 $2r/w$ 个 token，就足以用计算掩盖 FSDP2 的通信。
#
# **下一步**：[第 09 课](09_your_own_model.ipynb)，用你自己的模型。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **Sources.** Rajbhandari et al. 2020, *ZeRO*, arXiv:1910.02054 (formulas, sections 5 and 7). Li et al. 2020, *PyTorch Distributed*, arXiv:2006.15704 (DDP's buckets). Zhao et al. 2023, *PyTorch FSDP*, arXiv:2304.11277 (also HSDP). PyTorch documentation: DistributedDataParallel; `fully_shard`; Tensor Parallelism. DeepSpeed documentation: *Configuration JSON*. NVIDIA: H100 datasheet; *DGX BasePOD*, Core Components (network cards); nccl-tests, `doc/PERFORMANCE.md` (rings).
#
# **To read next.** Hugging Face, *The Ultra-Scale Playbook*, 2025.
#
# </div>
# <div lang="zh">
#
# **出处。** Rajbhandari et al. 2020，*ZeRO*，arXiv:1910.02054（公式，第 5、7 节）。Li et al. 2020，*PyTorch Distributed*，arXiv:2006.15704（DDP 的桶）。Zhao et al. 2023，*PyTorch FSDP*，arXiv:2304.11277（也讲 HSDP）。PyTorch 文档：DistributedDataParallel、`fully_shard`、Tensor Parallelism。DeepSpeed 文档：*Configuration JSON*。NVIDIA：H100 数据手册；*DGX BasePOD*，Core Components（网卡）；nccl-tests，`doc/PERFORMANCE.md`（环）。
#
# **接着读。** Hugging Face，*The Ultra-Scale Playbook*，2025。
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

# %% [markdown] slide={"en": "One sequence per rank, and it still does not fit. Data parallelism divides nothing more.\n\nWhat else can be divided?", "zh": "每个进程只剩一条序列，还是装不下，数据并行已经无能为力。\n\n还有什么可以分摊？"}
# ## 8.15 What each parallelism divides / 各种并行分摊什么
#
# <div lang="en">
#
# With data parallelism, a rank computes at least one whole sequence. If its activations don't fit, something else has to be divided. **Tensor parallelism** (TP) divides each matrix among $t$ ranks. **Sequence parallelism** (SP) also divides the operations between the matrices. **Context parallelism** (CP) divides the sequence among $c$ ranks, in attention too. **Pipeline parallelism** (PP) divides the layers among $p$ ranks. **Expert parallelism** (EP) divides the experts of a mixture among $e$ ranks.
#
# </div>
# <div lang="zh">
#
# 用数据并行时，每个进程至少要计算一条完整的序列。如果它的激活值装不下，就要分摊别的东西。**张量并行**（TP）把每个矩阵分给 $t$ 个进程。**序列并行**（SP）把矩阵之间的运算也分摊。**上下文并行**（CP）把序列分给 $c$ 个进程，连注意力也按序列分摊。**流水线并行**（PP）把各层分给 $p$ 个进程。**专家并行**（EP）把混合专家模型里的专家分给 $e$ 个进程。
#
# </div>

# %% slide="result"
schemes.parallelisms()

# %% [markdown] slide={"en": "Two ranks divide each matrix. Activations between matrices stay whole, or are cut, too.\n\n**Guess first**: one device peaks at 277.7 MB. And a rank?", "zh": "两个进程分摊每个矩阵。矩阵之间的激活值保持完整，或者也切开。\n\n**先猜**：一台设备的峰值是 277.7 MB，每个进程呢？"}
# ## 8.16 Tensor parallelism on two ranks / 用两个进程运行张量并行
#
# <div lang="en">
#
# A layer has two pairs of matrices. A pair's first matrix is cut into columns of $W^\top$, its second into rows. The ranks add up their outputs only after the second one. In PyTorch:
#
# ```
# parallelize_module(model, mesh, {
#     "layers.*.attention.qkv": ColwiseParallel(),
#     "layers.*.attention.out": RowwiseParallel(),
#     "layers.*.feedforward.0": ColwiseParallel(),
#     "layers.*.feedforward.2": RowwiseParallel(),
# })
# ```
#
# The course first reorders the rows of `qkv`, so that a rank gets the queries, keys and values of the same heads. Sequence parallelism (mode `tp-sp`) adds `SequenceParallel()` for the norms. Two real ranks process all 8 sequences:
#
# </div>
# <div lang="zh">
#
# 一层有两对矩阵，每一对中，第一个按 $W^\top$ 的列切，第二个按行切。只有在第二个矩阵之后，各进程才需要把输出加起来。在 PyTorch 里这样写：
#
# ```
# parallelize_module(model, mesh, {
#     "layers.*.attention.qkv": ColwiseParallel(),
#     "layers.*.attention.out": RowwiseParallel(),
#     "layers.*.feedforward.0": ColwiseParallel(),
#     "layers.*.feedforward.2": RowwiseParallel(),
# })
# ```
#
# 一个进程得到的 Q、K、V 必须属于同一些头，所以课程先调整了 `qkv` 各行的顺序。使用序列并行时（`tp-sp`），再为归一化层加上 `SequenceParallel()`。两个真实的进程一起处理全部 8 条序列：
#
# </div>

# %%
tensor = launch(2, script="course_lib.distributed.tensor_parallel")
equal = [(follows(run, losses[:2]), run["gradient_difference"] < 1e-5) for run in tensor]
rows = [(f"`{run['mode']}`", *each) for run, each in zip(tensor, equal, strict=True)]
table(["`mode`", "losses equal", "gradients equal"], rows)

# %% [markdown]
# <div lang="en">
#
# Losses and gradients equal those of one process. Formulas predict the held bytes and the communication volume, and a symbolic rank predicts the peak:
#
# </div>
# <div lang="zh">
#
# 损失和梯度都与单个进程相等。持有的字节数和通信量由公式预测，峰值则用符号张量运行其中一个进程来预测：
#
# </div>

# %% slide="result"
from course_lib.lessons.lesson_08 import large

predictions(large.tensor_rows(task, tensor), unit="bytes")

# %% [markdown]
# <div lang="en">
#
# A rank peaks at 172.8 MB instead of 277.7 MB, and at 163.8 MB with sequence parallelism. Each layer has four all-reduces of $s b h$ numbers, or as many pairs of a reduce-scatter and an all-gather.
#
# What does a layer keep for backward? Lesson 01's formula gives $16 s b h + a s^2 b$ numbers. According to Korthikanti et al. (2022), tensor parallelism divides all except the norms' $4 s b h$, and sequence parallelism divides everything:
#
# </div>
# <div lang="zh">
#
# 每个进程的峰值从 277.7 MB 降到 172.8 MB，加上序列并行是 163.8 MB。每层做四次 all-reduce，每次 $s b h$ 个数。用序列并行时，每次 all-reduce 换成一次 reduce-scatter 加一次 all-gather。
#
# 每层要为反向保存多少？第 01 课的公式是 $16 s b h + a s^2 b$ 个数。按 Korthikanti et al.（2022）的说法，除了归一化层的 $4 s b h$，张量并行分摊其余全部，序列并行则连这部分也分摊：
#
# </div>

# %%
b, s, h, a = 8, 128, 256, 8  # this decoder; numbers of 4 bytes
norms, inside = 4 * s * b * h + 4 * s * b, 12 * s * b * h + a * s * s * b
paper = {"tp": 4 * (norms + inside / 2), "tp-sp": 4 * (norms + inside) / 2}
kept = {mode: large.kept_per_layer(mode, ranks=2) for mode in paper}
predictions([(f"`{mode}`", paper[mode], kept[mode]) for mode in paper], unit="bytes")

# %% [markdown]
# <div lang="en">
#
# Tensor parallelism agrees with the formula to the byte. With sequence parallelism, PyTorch keeps 1,048,576 bytes more per layer, because the inputs of two matrices are gathered, and autograd saves them whole. According to the paper, Megatron-LM gathers these inputs again in the backward pass.
#
# </div>
# <div lang="zh">
#
# 张量并行与公式一字节不差。加上序列并行时，PyTorch 每层却多保存 1,048,576 字节。原因是两个矩阵的输入要先收集，而 autograd 保存的是收集后的完整输入。据论文所说，Megatron-LM 在反向时重新收集这些输入。
#
# </div>

# %% [markdown]
# ## 8.17 FSDP2 and DeepSpeed, setting by setting / FSDP2 与 DeepSpeed 的设置对照
#
# <div lang="en">
#
# DeepSpeed's settings are from its documentation and were not run. All except the last two are keys of `zero_optimization`.
#
# | meaning | FSDP2 | DeepSpeed |
# |---|---|---|
# | shard only Adam's state | `ZeroRedundancyOptimizer` with DDP | `"stage": 1` |
# | also the gradients | – | `"stage": 2` |
# | also the weights | `fully_shard(block)` | `"stage": 3` |
# | what is gathered together | the module given to `fully_shard` | `stage3_max_live_parameters`, by default 1e9 numbers |
# | keep from forward to backward | `reshard_after_forward=False` | `stage3_max_reuse_distance`, by default 1e9 numbers |
# | keep a copy within a machine of 8 | `reshard_after_forward=8` | `zero_hpz_partition_size: 8` |
# | gather ahead | `set_modules_to_forward_prefetch` | `stage3_prefetch_bucket_size` |
# | small weights stay whole | – | `stage3_param_persistence_threshold`, by default 1e5 numbers |
# | offload to the host | `CPUOffloadPolicy()` | `offload_optimizer`, `offload_param` |
# | bf16 with fp32 master weights | `MixedPrecisionPolicy`; the shards stay fp32 | `bf16` |
# | clip by the norm of the whole gradient | `clip_grad_norm_` | `gradient_clipping` |
#
# </div>
# <div lang="zh">
#
# DeepSpeed 的设置出自它的文档，这里没有运行。只有最后两行不是 `zero_optimization` 里的键。
#
# | 含义 | FSDP2 | DeepSpeed |
# |---|---|---|
# | 只切分 Adam 的状态 | `ZeroRedundancyOptimizer` 加 DDP | `"stage": 1` |
# | 梯度也切分 | – | `"stage": 2` |
# | 权重也切分 | `fully_shard(block)` | `"stage": 3` |
# | 一次收集多少 | 传给 `fully_shard` 的模块 | `stage3_max_live_parameters`，默认 1e9 个数 |
# | 从前向保留到反向 | `reshard_after_forward=False` | `stage3_max_reuse_distance`，默认 1e9 个数 |
# | 在 8 块 GPU 的机器内留一份 | `reshard_after_forward=8` | `zero_hpz_partition_size: 8` |
# | 提前收集 | `set_modules_to_forward_prefetch` | `stage3_prefetch_bucket_size` |
# | 小的权重不切 | – | `stage3_param_persistence_threshold`，默认 1e5 个数 |
# | 卸载到主机内存 | `CPUOffloadPolicy()` | `offload_optimizer`、`offload_param` |
# | bf16，fp32 主权重 | `MixedPrecisionPolicy`，分片仍是 fp32 | `bf16` |
# | 按完整梯度的范数裁剪 | `clip_grad_norm_` | `gradient_clipping` |
#
# </div>

# %% [markdown]
# ## 8.18 Micro-batches: what `no_sync` saves and costs / 微批次：`no_sync` 省什么，代价是什么
#
# <div lang="en">
#
# Only the last micro-batch (lesson 05) must reduce gradients. The others use `no_sync()` (DDP) or `set_requires_gradient_sync(False)` (FSDP2). In DDP's usual loop, gradients not yet reduced are accumulated **outside** the buckets. With `zero_grad(set_to_none=False)` they stay in the buckets (`in_buckets=True`). FSDP2 must hold whole gradients. Here are predictions for two ranks with two micro-batches each:
#
# </div>
# <div lang="zh">
#
# 使用微批次时（第 05 课），只有最后一个微批次需要归约梯度，DDP 用 `no_sync()`，FSDP2 用 `set_requires_gradient_sync(False)`。按 DDP 的通常写法，尚未归约的梯度在桶**之外**累加；设置 `zero_grad(set_to_none=False)` 后，它们就留在桶里（`in_buckets=True`）。FSDP2 则必须持有完整的梯度。下面是对两个进程、各两个微批次的预测：
#
# </div>

# %%
ways = {
    "DDP, with each micro-batch": ("ddp", {"sync": "each"}),
    "DDP, with the last one, outside the buckets": ("ddp", {}),
    "DDP, with the last one, in the buckets": ("ddp", {"in_buckets": True}),
    "FSDP2, with each micro-batch": ("fsdp", {"sync": "each"}),
    "FSDP2, with the last one": ("fsdp", {}),
}
taken = {way: one_rank(mode, 2, micro_batches=2, **more) for way, (mode, more) in ways.items()}
large.sync_table(taken)

# %% [markdown]
# <div lang="en">
#
# For DDP, accumulation in the buckets halves the volume and costs no memory. FSDP2 communicates 17% less and holds 13.8 MB more.
#
# </div>
# <div lang="zh">
#
# 对 DDP 来说，在桶里累加能让通信量减半，又不多占内存。FSDP2 的通信量少 17%，却要多持有 13.8 MB。
#
# </div>

# %% [markdown]
# ## 8.19 7 and 70 billion parameters / 70 亿与 700 亿个参数
#
# <div lang="en">
#
# **Exercise 6.** 7 billion parameters ($7 \times 10^9$) on 8 GPUs, in mixed precision as the ZeRO paper and DeepSpeed count it: 2 bytes for the weight, 2 for the gradient, and 12 for fp32 weights and Adam's state. How many bytes does a rank hold?
#
# </div>
# <div lang="zh">
#
# **练习 6。** 70 亿个参数（$7 \times 10^9$）、8 块 GPU，混合精度，按 ZeRO 论文和 DeepSpeed 的计法，权重 2 字节，梯度 2 字节，fp32 权重和 Adam 的状态共 12 字节。每个进程持有多少字节？
#
# </div>

# %% minutes=5
answer = {"DDP": None, "ZeRO 1": None, "ZeRO 2": None, "ZeRO 3": None}  # bytes
exercises.check_seven_billion(answer)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not exercises.check_seven_billion.accepted:
    seven, n = 7_000_000_000, 8
    answer = {"DDP": 16 * seven, "ZeRO 1": 4 * seven + 12 * seven / n}
    answer |= {"ZeRO 2": 2 * seven + 14 * seven / n, "ZeRO 3": 16 * seven / n}

exercises.check_seven_billion(answer)
### END SOLUTION

# %% [markdown]
# ## 8.20 HSDP, run / 运行 HSDP
#
# <div lang="en">
#
# Four ranks act as two machines. `fully_shard` gets a mesh of two dimensions, replicates along the first and shards along the second. Here is one rank:
#
# </div>
# <div lang="zh">
#
# 把四个进程看作两台机器，每台两个。`fully_shard` 接受一个有两个维度的 mesh，沿第一维复制，沿第二维分片。下面只运行其中一个进程：
#
# </div>

# %%
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def sharded(model, mesh):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh, reshard_after_forward=False)


with figures.as_rank_of(4):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    hsdp = large.own_and_given(sharded(task.make_model(), mesh))
    fsdp = large.own_and_given(sharded(task.make_model(), init_device_mesh("cpu", (4,))))
columns = ["4 ranks", "weights per rank (MB)", "communicated (MB)"]
table(columns, [("FSDP2", *fsdp), ("HSDP", *hsdp)])

# %% [markdown]
# <div lang="en">
#
# HSDP communicates 27.5 MB more, because it all-reduces half of the gradients. Only this all-reduce goes between machines. In a recorded run on four real gloo ranks, a rank sends 67.8 MB over the wire instead of FSDP2's 81.0 MB.
#
# </div>
# <div lang="zh">
#
# HSDP 的通信量多 27.5 MB，也就是对一半的梯度做 all-reduce。机器之间传输的只有这一项。用四个真实的 gloo 进程运行时，记录到每个进程在线路上实际传输 67.8 MB，而 FSDP2 要传输 81.0 MB。
#
# </div>

# %% [markdown]
# ## 8.21 A model that is nowhere whole / 在任何进程上都不完整的模型
#
# <div lang="en">
#
# So far every rank first builds the whole model, which would take 259 GB for 70 billion parameters. Three lines avoid it: build the model on the device `meta`, where tensors have shapes and no bytes, shard it, then allocate the shards.
#
# </div>
# <div lang="zh">
#
# 前面每个进程都先建立完整的模型，700 亿个参数时光这一步就要 259 GB。用三行代码可以避免：先在 `meta` 设备上建立模型，那里的张量只有形状，不占内存；再分片；最后才给各个分片分配内存。
#
# </div>


# %%
def made_on(device):
    with MemoryMeter() as meter:
        with torch.device(device):  # 1
            model = task.make_model()
        sharded(model, init_device_mesh("cpu", (4,)))  # 2
        if device == "meta":
            model.to_empty(device="cpu")  # 3; then load or initialize the values
    return f"`{device}`", meter.peak_bytes, meter.live_bytes


with figures.as_rank_of(4):
    rows = [made_on(device) for device in ("cpu", "meta")]
table(["created on", "peak (bytes)", "held afterwards (bytes)"], rows)

# %% [markdown]
# ## 8.22 Saving, and resuming on another number of ranks / 存盘，换个进程数继续训练
#
# <div lang="en">
#
# The two ranks of section 8.3 saved their second step (`--save`) with `torch.distributed.checkpoint`. A process that reads takes what it needs from the files of all ranks. So one rank of DDP can continue (`--resume`) what two ranks of FSDP2 have saved:
#
# </div>
# <div lang="zh">
#
# 8.3 节的两个进程已经用 `torch.distributed.checkpoint` 把第二步的结果存盘（`--save`）。读取的进程从各个进程写的文件里取出需要的部分。因此一个 DDP 进程能从两个 FSDP2 进程存下的状态接着训练（`--resume`）：
#
# </div>

# %%
went_on = figures.resumed_alone(f"{saved.name}/fsdp")
saved.cleanup()
table(["losses equal"], [[follows({"losses": went_on}, losses[2:])]])

# %% [markdown]
# ## 8.23 A rank that fails / 一个进程失败时
#
# <div lang="en">
#
# If one rank fails, a rank waiting in an all-reduce gets "Connection closed by peer". `torchrun` prints the error of the first failed rank under "Root Cause". A rank that hangs gives no error until the timeout of the process group, by default 30 minutes with gloo and 10 with NCCL.
#
# </div>
# <div lang="zh">
#
# 如果一个进程失败，正在 all-reduce 中等待的另一个进程就会收到 “Connection closed by peer”。`torchrun` 把最先失败的进程的错误打印在 “Root Cause” 下。停住不动的进程则不报错，要等进程组超时，默认 gloo 是 30 分钟，NCCL 是 10 分钟。
#
# </div>

# %% [markdown]
# ## 8.24 On a GPU / 在 GPU 上
#
# <div lang="en">
#
# With one GPU per rank, the same command uses NCCL and offers the mode `fsdp-cpu`. Only the peak may differ: according to PyTorch 2.13's code (**not measured**), two more gathered blocks and one block's gradients may be live.
#
# </div>
# <div lang="zh">
#
# 在每个进程有一块 GPU 的机器上，同样的命令会使用 NCCL，还可以选择 `fsdp-cpu`。只有峰值可能不同：根据 PyTorch 2.13 的代码（**没有实测**），还可能多出两个收集好的块和一个块的梯度。
#
# </div>
