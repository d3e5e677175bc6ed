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
# On one device, the training step of lesson 01 peaks at 277.7 MB. PyTorch's `DistributedDataParallel` distributes this step over two devices, each with half of the batch. Does each device then need half of the memory?
#
# </div>
# <div lang="zh">
#
# 第 01 课的训练步在一台设备上的峰值是 277.7 MB。现在用 PyTorch 的 `DistributedDataParallel` 把这一步分到两台设备上，每台处理半个批次。每台设备需要的内存也会减半吗？
#
# </div>

# %%
from course_lib.teaching import language

language()

# %% [markdown]
# <div lang="en">
#
# **Goals** (114 minutes, in two sittings):
#
# - Predict how much memory a process holds with DDP and ZeRO 1 to 3.
# - Write the step of ZeRO 1, and a layer that gathers its weight only while the weight is used.
# - Compute how much a step communicates, and when a second machine makes the step faster.
#
# **What to know before**: lesson 01 (the peak of a step) and section 2.2 (a `torch.autograd.Function`). Here a device is a process on your CPU. The code for GPUs is the same. $\Psi$ is the number of parameters and $N$ the number of processes. MB is $10^6$ bytes.
#
# </div>
# <div lang="zh">
#
# **目标**（共 114 分钟，分两次学）
#
# - 算出使用 DDP 和 ZeRO 1 到 3 时，每个进程占用多少内存。
# - 亲手写出 ZeRO 1 的一步，再写一个只在使用时才收集权重的层。
# - 算出一步的通信量，并判断在什么情况下，加上第二台机器会更快。
#
# **预备知识**：第 01 课（一步的峰值）和 2.2 节（`torch.autograd.Function`）。在本课里，一台设备就是你的 CPU 上的一个进程，换成 GPU 时代码不变。$\Psi$ 是参数个数，$N$ 是进程数。MB 指 $10^6$ 字节。
#
# </div>

# %%
import torch

from course_lib.accumulation import split
from course_lib.checkpoint import checkpoint_blocks
from course_lib.distributed import launch, predict, task_of
from course_lib.lessons.ledger import ledger
from course_lib.lessons.lesson_08 import exercises, figures, schemes
from course_lib.memory import MemoryBudgetExceeded, MemoryMeter
from course_lib.teaching import predictions, table

# %% [markdown] slide={"en": "**Data parallelism**: every rank has the whole model, and an $N$-th of the batch.\n\nAn **all-reduce** adds up the gradients.", "zh": "**数据并行**：每个进程都有完整的模型，各处理批次的 $N$ 分之一。\n\n**all-reduce** 把梯度加起来。"}
# ## 8.1 One process per device / 每台设备一个进程
#
# <div lang="en">
#
# Each device gets its own process, called a **rank**. In **data parallelism** (DP; in PyTorch `DistributedDataParallel`, DDP) every rank has the whole model and an $N$-th of the batch. In the backward pass an **all-reduce** adds up the gradients of all ranks, so that all ranks do the same update.
#
# However we divide the work, the losses must equal those of one process. So we first run one process, with the whole batch of 8 sequences and the decoder of lesson 00. (`task.loss_sum` returns the sum of the losses and the number of tokens; `split` divides a batch, see lesson 05.)
#
# </div>
# <div lang="zh">
#
# 每台设备运行一个**进程**（rank）。**数据并行**（DP，PyTorch 里是 `DistributedDataParallel`，简称 DDP）让每个进程都持有完整的模型，各处理批次的 $N$ 分之一。反向传播时，一次 **all-reduce**（全归约）把各进程的梯度加起来，于是所有进程做的是同样的更新。
#
# 无论怎样分工，各步的损失都必须与只用一个进程时相同。因此先用一个进程算出各步的损失作为标准，解码器与第 00 课相同，批次是完整的 8 条序列。（`task.loss_sum` 返回损失之和与 token 数，`split` 切分批次，见第 05 课。）
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
# With DDP, all $N$ ranks hold the same weights, gradients and Adam's state, 16 bytes per parameter. **ZeRO** (Zero Redundancy Optimizer, Rajbhandari et al. 2020) cuts these bytes into $N$ **shards**, one per rank. ZeRO 1 shards Adam's state, ZeRO 2 also the gradients, and ZeRO 3 also the weights. PyTorch's FSDP2 implements ZeRO 3. In mixed precision, FSDP2 casts a shard to bf16 when it gathers a weight, and computes in bf16. It sums the ranks' gradients in fp32, and Adam updates the fp32 shards.
#
# </div>
# <div lang="zh">
#
# 使用 DDP 时，$N$ 个进程各存一份完全相同的权重、梯度和优化器状态，每个参数 16 字节。**ZeRO**（零冗余优化器，Rajbhandari et al. 2020）把这些数据切成 $N$ 个**分片**（shard），每个进程只存一个。ZeRO 1 切分 Adam 的状态，ZeRO 2 还切分梯度，ZeRO 3 连权重也切分。PyTorch 的 FSDP2 实现的就是 ZeRO 3。使用混合精度时，FSDP2 在收集权重时才把分片转成 bf16，并用 bf16 计算。梯度用 fp32 归约，Adam 更新的是各进程自己的 fp32 分片。
#
# </div>

# %% slide="result"
schemes.draw_stages()

# %% [markdown] slide={"en": "Whole or sharded: weights 4 bytes, gradients 4, Adam's state 8.\n\n**Type the formulas. Does bf16 change the last one?**", "zh": "权重 4 字节，梯度 4 字节，Adam 的状态 8 字节，哪些完整，哪些分片？\n\n**写出各行的公式。用 bf16 时，最后一行会变吗？**"}
# <div lang="en">
#
# **Exercise 1.** Our decoder is in fp32. Each parameter takes 4 bytes for the weight, 4 for the gradient and 8 for Adam's state. Write formulas, in `psi` (parameters) and `n` (ranks), for the bytes that each rank holds during the optimizer update. The last formula is for FSDP2 in mixed precision.
#
# </div>
# <div lang="zh">
#
# **练习 1。** 我们的解码器全部用 fp32，每个参数的权重占 4 字节，梯度占 4 字节，Adam 的状态占 8 字节。请写出优化器更新时每个进程持有的字节数，公式要对任意的 `psi`（参数个数）和 `n`（进程数）都成立。最后一个公式对应使用混合精度的 FSDP2。
#
# </div>


# %% minutes=10
def held(psi, n):  # bytes per rank
    return {"DDP": 0, "ZeRO 1": 0, "ZeRO 2": 0, "ZeRO 3": 0, "ZeRO 3, bf16": 0}


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
            "ZeRO 3, bf16": 16 * psi / n,
        }


exercises.check_held(held)
### END SOLUTION

# %% [markdown] slide={"en": "4 sequences on one device peak at 180.1 MB, without a single gradient.\n\n**Guess first.** What is the peak of a rank of DDP, ZeRO 1, FSDP2?", "zh": "一台设备处理 4 条序列，峰值 180.1 MB，此时还没有任何梯度。\n\n**先猜**：DDP、ZeRO 1、FSDP2 的一个进程，峰值各是多少？"}
# ## 8.3 Run it on two ranks / 用两个进程运行
#
# <div lang="en">
#
# This command starts the processes with `torchrun`:
#
# ```
# python -m torch.distributed.run --standalone --nproc-per-node 2 \
#     -m course_lib.distributed --mode ddp,zero1,fsdp,fsdp-bf16 --steps 2
# ```
#
# Below, `launch` runs this command and reads what the ranks print about the second step. The mode `fsdp-bf16` gives FSDP2 the policy `MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)`.
#
# **Guess first.** One device with 4 sequences peaks at 180.1 MB, at the start of the backward pass. Weights and Adam's state take 82.5 MB, everything else takes 97.6 MB, and no gradient exists yet. What is the peak of a DDP rank with 4 sequences? A ZeRO 1 rank holds 27.5 MB less of Adam's state than the DDP rank. An FSDP2 rank holds 41.3 MB less of weights and state. What are the peaks of ZeRO 1, of FSDP2, and of FSDP2 in bf16?
#
# </div>
# <div lang="zh">
#
# 下面的终端命令用 `torchrun` 启动各个进程：
#
# ```
# python -m torch.distributed.run --standalone --nproc-per-node 2 \
#     -m course_lib.distributed --mode ddp,zero1,fsdp,fsdp-bf16 --steps 2
# ```
#
# 下面的 `launch` 替我们运行这条命令，并读取各进程打印的第二步的结果。其中 `fsdp-bf16` 让 FSDP2 使用 `MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)`。
#
# **先猜**：一台设备处理 4 条序列时，峰值是 180.1 MB，出现在反向传播刚开始的时候。此时还没有任何梯度，权重和 Adam 的状态占 82.5 MB，其余占 97.6 MB。DDP 的一个进程处理 4 条序列，峰值是多少？与 DDP 的进程相比，ZeRO 1 的进程少持有 27.5 MB 的 Adam 状态，FSDP2 的进程少持有 41.3 MB 的权重和状态，两者的峰值又各是多少？如果 FSDP2 改用 bf16，峰值是多少？
#
# </div>

# %% tags=["guess"]
my_peaks = {"ddp": None, "zero1": None, "fsdp": None, "fsdp-bf16": None}  # bytes, such as 150e6

# %%
options = ["--mode", ",".join(my_peaks), "--steps", "2", "--details"]
two = {run["mode"]: run for run in launch(2, *options)}


# %%
def difference(run):  # between the losses of the ranks and those of one process
    return max(abs(a - b) for a, b in zip(run["losses"], losses, strict=False))


columns = ["`mode`", "losses within 0.00001", "losses within 0.001"]
table(columns, [(f"`{m}`", difference(r) < 1e-5, difference(r) < 1e-3) for m, r in two.items()])

# %% [markdown] slide={"en": "In fp32, all three reproduce the losses of the single process.\n\nWhat does a rank hold, and was your formula right?", "zh": "用 fp32 时，三种做法的损失都与单个进程的损失相等。\n\n那么每个进程占用多少内存？你的公式对吗？"}
# <div lang="en">
#
# In fp32, all three modes reproduce the losses of one process to within 0.00001. The last bits of the losses differ, because two ranks add numbers in another order. In bf16 a number has only 8 significant bits, and the losses agree to within 0.001. Now compare your formulas with what each rank holds during its optimizer update.
#
# </div>
# <div lang="zh">
#
# 用 fp32 时，三种做法的损失与单个进程的损失相差不到 0.00001。由于两个进程求和的顺序与单个进程不同，结果做不到逐比特相等。bf16 只有 8 位有效位，因此损失的误差要放宽到 0.001 以内。现在看优化器更新时每个进程占用多少内存，并与你的公式对照。
#
# </div>

# %% jupyter={"source_hidden": true} slide="result"
psi = 6_875_648  # the decoder's parameters
predicted = {n: held(psi, n) for n in range(1, 9)}
stage_of = {"ddp": "DDP", "zero1": "ZeRO 1", "fsdp": "ZeRO 3", "fsdp-bf16": "ZeRO 3, bf16"}
rows = []
for mode, stage in stage_of.items():
    rows.append((stage, predicted[2][stage], figures.held_by(two[mode])))
predictions(rows, unit="bytes")

# %% [markdown]
# <div lang="en">
#
# Adam also stores a step count of 4 bytes for each of 100 tensors, so DDP and FSDP2 hold 400 bytes more than predicted. ZeRO 1 differs from its prediction by 22,596 bytes, because PyTorch assigns whole tensors to ranks, and the two ranks get unequal amounts. FSDP2 cuts every tensor along its first dimension, here into equal halves. In bf16, FSDP2 holds the same number of bytes, because its shards, their gradients and Adam's state stay in fp32.
#
# </div>
# <div lang="zh">
#
# Adam 还为 100 个张量各存一个步数，每个 4 字节，所以 DDP 和 FSDP2 的实测值比预测值多 400 字节。ZeRO 1 的实测值与预测值相差 22,596 字节，因为 PyTorch 不切开张量，而是把每个张量整个分给某一个进程，两个进程分到的字节数并不相等。FSDP2 则沿第一维切开每个张量，这里正好切成两半。用 bf16 时，FSDP2 持有的字节数不变，因为分片、分片的梯度和 Adam 的状态都仍是 fp32。
#
# </div>

# %% [markdown]
# ## 8.4 Where is the peak? / 峰值在哪里？
#
# <div lang="en">
#
# Compare your guesses with the bytes live at the peak.
#
# </div>
# <div lang="zh">
#
# 下面列出你的猜测，以及峰值时内存里有什么。
#
# </div>

# %% jupyter={"source_hidden": true}
peak_of = {mode: run["taken"][0]["peak_bytes"] for mode, run in two.items()}
predictions([(f"`{mode}`", my_peaks[mode], peak) for mode, peak in peak_of.items()])

# %% jupyter={"source_hidden": true} slide="result"
at_peak = {"one device, 8 sequences": whole, "one device, 4 sequences": half}
labels = {
    "ddp": "DDP, one of 2 ranks",
    "zero1": "ZeRO 1, one of 2 ranks",
    "fsdp": "FSDP2, one of 2 ranks",
    "fsdp-bf16": "FSDP2 in bf16, one of 2 ranks",
}
at_peak |= {labels[mode]: run["taken"][0]["at_peak"] for mode, run in two.items()}
title = "At their peaks DDP and ZeRO 1 hold memory for all gradients, and FSDP2 holds none"
figures.draw_peaks(at_peak, title)

# %% [markdown]
# <div lang="en">
#
# **DDP** peaks at 207.6 MB. Although no gradient has been computed at this peak, DDP holds 27.5 MB for all gradients. This memory is in **buckets**, which DDP creates before the first step. The backward pass writes gradients into the buckets, so that one full bucket can be sent while the next one is filled. The buckets are kept between steps. (The course sets `gradient_as_bucket_view=True`. By default, gradients and buckets take separate memory.)
#
# **ZeRO 1** peaks at 180.1 MB, about the same as one device with 4 sequences. It saves 27.5 MB of Adam's state. But PyTorch's ZeRO 1 is DDP with another optimizer, so it has DDP's buckets, which take 27.5 MB. With two ranks, these amounts cancel. With four ranks, ZeRO 1 would save 41.3 MB, and the buckets would still take 27.5 MB.
#
# </div>
# <div lang="zh">
#
# **DDP** 的峰值是 207.6 MB。此时一个梯度都还没有算出来，DDP 却已经为全部梯度占用了 27.5 MB。原因是 DDP 在第一步之前就建好了**桶**（bucket），反向传播把梯度写进桶里。一个桶写满了就发送，同时继续写下一个桶。一步结束之后，桶也不释放，留给下一步用。（本课设置了 `gradient_as_bucket_view=True`。默认情况下，梯度和桶各占一块内存。）
#
# **ZeRO 1** 的峰值是 180.1 MB，与单独一台设备处理这 4 条序列时几乎一样高。ZeRO 1 确实省下了 27.5 MB 的 Adam 状态，但 PyTorch 的 ZeRO 1 只是给 DDP 换了一个优化器，所以也有 DDP 的桶，桶又占去 27.5 MB。有两个进程时，两者恰好抵消。有四个进程时，Adam 的状态能省下 41.3 MB，而桶仍占 27.5 MB。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **FSDP2** has no buckets. It sums a block's gradients over the ranks as soon as they are computed, and each rank keeps only its shard. Its peak is 66.5 MB below DDP's, but your formulas predicted only 55.0 MB.
#
# **bf16** does not change what an FSDP2 rank holds, but it lowers the peak by 43.6 MB, because the activations take half as many bytes. (The log-probabilities that the loss saves stay in fp32.)
#
# </div>
# <div lang="zh">
#
# **FSDP2** 没有桶。一个块的梯度一算完就归约，每个进程只留下自己的分片。因此 FSDP2 的峰值比 DDP 低 66.5 MB，而按你的公式，只应低 55.0 MB。
#
# 改用 **bf16** 以后，FSDP2 的每个进程持有的字节数不变，峰值却又降低 43.6 MB，因为激活值的字节数减半了。（为损失保存的对数概率仍是 fp32。）
#
# </div>

# %% [markdown]
# ## 8.5 ZeRO 1, by hand / 亲手写 ZeRO 1
#
# <div lang="en">
#
# A rank with an $N$-th of Adam's state updates an $N$-th of the weights. Before the update, it needs the sum of all ranks' gradients, but only for its shard. After the update, it needs all weights. Two **collectives**, operations that all ranks call together, provide the sum and the weights:
#
# - **reduce-scatter** adds up the tensors of all ranks, and gives rank $r$ the $r$-th shard of the sum;
# - **all-gather** gives every rank all shards, concatenated.
#
# Below, one process simulates four ranks. The collectives of `wire` take a list with one tensor per rank, and return such a list. `wire` also counts the bytes that a rank gives to collectives.
#
# </div>
# <div lang="zh">
#
# 一个进程只有 Adam 状态的 $N$ 分之一，也就只能更新权重的 $N$ 分之一。更新之前，它要先得到各进程的梯度之和，但只需要其中自己负责的那个分片。更新之后，它又需要全部权重。有两种**集合通信**（所有进程一起调用的操作）恰好做这两件事：
#
# - **reduce-scatter**（归约散射）把各进程的张量加起来，第 $r$ 个进程得到结果的第 $r$ 个分片。
# - **all-gather**（全收集）把各分片依次拼接起来，每个进程都得到拼接后的完整张量。
#
# 下面在一个进程里模拟四个进程。`wire` 的集合通信接受一个列表，列表里每个进程有一个张量，返回的也是这样的列表。`wire` 还会统计一个进程交给集合通信的字节数。
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
# **Exercise 2.** Write the step of ZeRO 1. `weights` and `gradients` are lists with one whole tensor per rank. `adams[r](shard, gradient)` returns the updated shard. Each Adam creates a state of the same length as the first shard that it gets. Return the new weights, one whole tensor per rank. The gradient of the batch is the mean of the ranks' gradients.
#
# The check compares your weights with those of unsharded Adam, and counts the bytes of state and the sent bytes.
#
# </div>
# <div lang="zh">
#
# **练习 2。** 写出 ZeRO 1 的一步。`weights` 和 `gradients` 都是列表，每个进程对应列表里的一个完整张量。`adams[r](shard, gradient)` 返回更新后的分片。每个 Adam 的状态与它第一次收到的分片一样长。整个批次的梯度是各进程梯度的平均。请返回新的权重，形式与 `weights` 相同。
#
# 检查程序会把你的结果与不分片的 Adam 比较，并统计每个进程的状态有多少字节，一共发送多少字节。
#
# </div>


# %% minutes=18
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
# Your step sends two numbers per weight, as DDP does. PyTorch's `ZeroRedundancyOptimizer` sends three numbers per weight, because DDP first all-reduces all gradients, and the optimizer then broadcasts each updated tensor.
#
# </div>
# <div lang="zh">
#
# 你写的这一步要为每个权重发送两个数，与 DDP 一样多。PyTorch 的 `ZeroRedundancyOptimizer` 为每个权重要发送三个数，因为 DDP 先对全部梯度做 all-reduce，然后优化器还要把更新好的张量逐个广播出去。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **End of the first sitting** (54 minutes). Your formulas predict what a rank holds, and you have written the step of ZeRO 1. The second sitting shards the weights as well, counts the communicated bytes, and computes when a second machine pays off.
#
# </div>
# <div lang="zh">
#
# **第一次学习到此结束**（54 分钟）。你已经能用公式算出每个进程占用多少内存，也写出了 ZeRO 1 的一步。第二次学习时，我们把权重也分片，统计各进程的通信量，再看加上第二台机器什么时候划算。
#
# </div>

# %% [markdown] slide={"en": "Shard the **weights**, too. `F.linear(x, wire.all_gather(shard))` is correct and saves no memory.\n\nWhy? **Write the layer that does.**", "zh": "**权重**也分片。`F.linear(x, wire.all_gather(shard))` 结果正确，却一点内存也没省。\n\n为什么？**写出真正省内存的层。**"}
# ## 8.6 Gather a weight only while it is used / 只在使用时才收集权重
#
# <div lang="en">
#
# In ZeRO 3, each rank holds one shard of a layer's weight. The layer gathers the whole weight, uses it and releases it. The line `F.linear(x, wire.all_gather(shard))` computes the right output, but autograd saves the whole weight, because backward needs it (lesson 01). As in lesson 02, save only the small shard, and gather the weight again in backward.
#
# **Exercise 3.** Write the layer as one rank sees it. `shard` has this rank's rows of the weight. `wire.all_gather(shard)` returns the whole weight, and `wire.reduce_scatter(tensor)` returns this rank's shard of the sum over all ranks. `forward` returns $x W^\top$. `backward` returns the gradients of `x` and `shard`, and `None` for the wire. From `forward` to `backward`, keep nothing of the weight except the shard.
#
# </div>
# <div lang="zh">
#
# 在 ZeRO 3 中，每个进程只持有每层权重的一个分片，用之前收集完整的权重，用完就释放。`F.linear(x, wire.all_gather(shard))` 的输出是对的，但完整的权重没有释放。这是因为反向传播要用到权重（第 01 课），autograd 会把整个权重保存下来。解决办法与第 02 课相同，只保存很小的分片，反向时再收集一次完整的权重。
#
# **练习 3。** 从一个进程的角度写出这一层。`shard` 是权重中属于本进程的那些行。`wire.all_gather(shard)` 返回完整的权重，`wire.reduce_scatter(tensor)` 把各进程的张量加起来，返回和中属于本进程的分片。`forward` 返回 $x W^\top$。`backward` 返回 `x` 和 `shard` 的梯度，最后一个参数的位置返回 `None`。从前向到反向，权重只能留下本进程的那个分片。
#
# </div>


# %% minutes=15
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

# %% [markdown] slide={"en": "FSDP2 does this for each block. Its root stays gathered.\n\n**How many bytes does a step communicate?**", "zh": "FSDP2 对每个块都这样做，根模块则从前向到反向都保持完整。\n\n**一步的通信量是多少字节？**"}
# ## 8.7 How much is communicated? / 通信量是多少？
#
# <div lang="en">
#
# FSDP2 works like your layer. `fully_shard(block)` gathers all weights of a block together, for forward and again for backward, and reduce-scatters the gradients. The **root** (the 557,568 parameters outside the blocks) stays gathered from forward to backward.
#
# The **communication volume** of a rank is the number of bytes that it gives to collectives. The bytes of an all-reduce count twice, those of other collectives once. In fp32, DDP's volume is $8\Psi$ bytes if the model has no buffers, which DDP would also send.
#
# **Exercise 4.** Write formulas for FSDP2's communication volume in fp32 and in bf16. In bf16, FSDP2 gathers 2 bytes per number and still reduces gradients in fp32.
#
# </div>
# <div lang="zh">
#
# FSDP2 的做法与你写的层相同。`fully_shard(block)` 把一个块的全部权重一起收集，前向收集一次，反向再收集一次，对梯度则做一次 reduce-scatter。各块之外的 557,568 个参数属于**根模块**（root），收集之后从前向一直保留到反向。
#
# 一个进程的**通信量**，是这个进程交给集合通信的字节数。all-reduce 按张量字节数的两倍计，其余的集合通信按一倍计。用 fp32 时，DDP 的通信量是 $8\Psi$ 字节（假设模型没有缓冲区，因为 DDP 也要发送缓冲区）。
#
# **练习 4。** 写出 FSDP2 的通信量，fp32 和 bf16 各写一个。用 bf16 时，FSDP2 收集的每个数占 2 字节，梯度仍以 fp32 归约。
#
# </div>


# %% minutes=6
def communicated(psi, root):
    return {"DDP": 8 * psi, "FSDP2": 0, "FSDP2, bf16": 0}  # bytes


exercises.check_sent(communicated)


# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not exercises.check_sent.accepted:

    def communicated(psi, root):
        blocks = psi - root
        gathered = 2 * blocks + root
        fsdp, bf16 = 4 * gathered + 4 * psi, 2 * gathered + 4 * psi
        return {"DDP": 8 * psi, "FSDP2": fsdp, "FSDP2, bf16": bf16}


exercises.check_sent(communicated)
### END SOLUTION

# %% jupyter={"source_hidden": true}
my_sent = communicated(psi, root=557_568)
sent = {mode: run["communicated"]["measured"] for mode, run in two.items()}
modes = {"DDP": "ddp", "FSDP2": "fsdp", "FSDP2, bf16": "fsdp-bf16"}
predictions([(name, my_sent[name], sent[mode]) for name, mode in modes.items()], unit="bytes")

# %% [markdown] slide={"en": "**Guess first.** On two ranks FSDP2's volume in fp32 is 80.3 MB per rank.\n\nHow many bytes really leave a rank?", "zh": "**先猜**：两个进程、用 fp32 时，FSDP2 的通信量是每个进程 80.3 MB。\n\n真正从一个进程发出去的有多少？"}
# <div lang="en">
#
# Your formula counts bytes given to collectives. A rank may send a different number of bytes. The table shows both numbers for two ranks. Its last three rows show collectives on one 4 MB tensor.
#
# - *Communicated* is the communication volume.
# - *In a ring* is what a rank in a ring sends, $(N-1)/N$ of the volume.
# - *Over the wire* is what the Linux kernel counted in a recorded run with gloo (`python -m course_lib.lessons.lesson_08.loopback`).
#
# </div>
# <div lang="zh">
#
# 你的公式统计的是交给集合通信的字节数。真正从一个进程发出去的字节数，未必与公式算出的相同。下表列出两个进程时的数据，最后三行各对一个 4 MB 的张量做一次集合通信。
#
# - “通信量”是交给集合通信的字节数。
# - “按环算法应发送”是通信量的 $(N-1)/N$，也就是各进程连成环时，一个进程发送的字节数。
# - “线路上实际传输”是使用 gloo 时 Linux 内核统计的字节数，这里用的是事先的记录（`python -m course_lib.lessons.lesson_08.loopback`）。
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
# DDP and ZeRO 1 send as many bytes as a ring algorithm. FSDP2 sends more, because the reduce-scatter of this build of gloo sends as much as gloo's all-reduce. In fp32, FSDP2's communication volume is 46% above DDP's, but FSDP2 sends 96% more bytes over this wire. In bf16, FSDP2's volume is 2% below DDP's, because the gathers take half the bytes. NCCL, which GPUs use, was not measured here.
#
# </div>
# <div lang="zh">
#
# DDP 和 ZeRO 1 发送的字节数与环算法一致。FSDP2 发送的字节数更多，因为这个版本的 gloo 做 reduce-scatter 时，传输的字节数与 all-reduce 相同。用 fp32 时，FSDP2 的通信量比 DDP 多 46%，在这条线路上实际传输的字节数却比 DDP 多 96%。用 bf16 时，收集的字节数减半，FSDP2 的通信量反而比 DDP 少 2%。GPU 使用 NCCL，这里没有测量它发送的字节数。
#
# </div>

# %% [markdown] slide={"en": "A device of 60 MB. One sequence, every layer checkpointed.\n\nWhere does it stop? And four devices of 40 MB, with all eight sequences?", "zh": "一台 60 MB 的设备，只处理一条序列，每层都加检查点。\n\n会停在哪里？四台 40 MB 的设备处理全部八条呢？"}
# ## 8.8 The step that no single device could take / 单台设备装不下的一步
#
# <div lang="en">
#
# A device has 60 MB, and no host memory for offloading. The step processes one sequence at a time (lesson 05), with a checkpoint around every layer (lesson 02). A meter stops the step at the first operator that would exceed 60 MB.
#
# </div>
# <div lang="zh">
#
# 一台设备有 60 MB，没有主机内存可供卸载。用第 02 课和第 05 课的方法，可以每次只算一条序列，并给每层加检查点。计量器设了 60 MB 的预算，哪个算子最先使内存超出预算，训练步就停在哪个算子。
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
# The forward and backward passes fit. Then, creating Adam's state exceeds the 60 MB. Weights, gradients and state take 110.0 MB for any batch, even in mixed precision.
#
# Now four ranks process two sequences each, with FSDP2 in bf16 (`--bf16`), in the mode `fsdp` and two variants. `fsdp-keep` keeps gathered weights from forward to backward. `fsdp-checkpoint` puts a checkpoint around each layer, with a budget of 40 MB **on every rank**.
#
# </div>
# <div lang="zh">
#
# 前向和反向都装得下，但等到 Adam 建立状态时，内存就超出了 60 MB。权重、梯度和状态共占 110.0 MB。这个数与批次大小无关，用混合精度也不会减少。
#
# 现在由四个进程各处理两条序列，都用 bf16 的 FSDP2（`--bf16`），共有三种做法，即 `fsdp` 和它的两个变体。`fsdp-keep` 把收集来的权重从前向保留到反向。`fsdp-checkpoint` 给每一层加检查点，并把**每个进程**的预算限定为 40 MB。
#
# </div>

# %%
options = ["--bf16", "--steps", "2", "--details", "--budget", "fsdp-checkpoint=40e6"]
four = launch(4, "--mode", "fsdp-keep,fsdp,fsdp-checkpoint", *options)
four = {run["mode"]: run for run in four}
rows = [(f"`{m}`", difference(run) < 1e-3) for m, run in four.items()]
table(["4 ranks in bf16", "losses within 0.001"], rows)

# %% jupyter={"source_hidden": true} slide="result"
figures.draw_budgets(alone_stopped, four["fsdp-checkpoint"], device_bytes=60_000_000)

# %% [markdown]
# <div lang="en">
#
# With 37.8 MB each (49.5 MB without checkpoints), four ranks process the whole batch. One device with 60 MB could not process even one sequence. Sharding does not reduce the activations of a rank's own sequences. Checkpointing does not reduce weights and state, so both techniques are needed here.
#
# </div>
# <div lang="zh">
#
# 四个进程各用 37.8 MB（不用检查点时是 49.5 MB），就处理了整个批次，而一台 60 MB 的设备连一条序列也处理不了。分片不能减少每个进程自己那几条序列的激活值，检查点不能减少权重和优化器状态。所以在这里，两种技术都要用。
#
# </div>

# %% [markdown]
# ## 8.9 From two ranks to four / 从两个进程到四个
#
# <div lang="en">
#
# **Guess first.** Which numbers per rank halve when two ranks become four? In the figure, lines are your formulas, and points are measurements. FSDP2 is in bf16.
#
# </div>
# <div lang="zh">
#
# **先猜**：从两个进程增加到四个，每个进程的哪些数会减半？图中的线按你的公式画出，点是实测值。FSDP2 用的是 bf16。
#
# </div>

# %% jupyter={"source_hidden": true} slide="result"
drawn = [run for run in two.values() if run["mode"] != "fsdp"]
figures.draw_ranks(predicted, [*drawn, *four.values()])

# %% [markdown]
# <div lang="en">
#
# From two ranks to four, only sharded memory halves. With any number of ranks, a DDP rank holds 110.0 MB, and a ZeRO 1 rank at least 55.0 MB. The communication volume of a rank does not change. (The hollow point shows `fsdp-keep` in bf16, PyTorch's closest equivalent of ZeRO 2.)
#
# Can the peak be predicted as well? `predict` runs one rank with symbolic tensors and a process group that sends nothing.
#
# </div>
# <div lang="zh">
#
# 从两个进程增加到四个，只有分片的部分减半。例如不论有多少个进程，DDP 的每个进程都持有 110.0 MB，ZeRO 1 的每个进程都至少持有 55.0 MB。每个进程的通信量也不变。（PyTorch 没有与 ZeRO 2 完全一致的实现，最接近的是 `fsdp-keep`，空心点是它用 bf16 时的实测值。）
#
# 峰值也能预测吗？`predict` 只运行其中一个进程，用的是符号张量，进程组也不真正发送数据。
#
# </div>


# %%
def one_rank(mode, n, **more):
    return predict(task.make_model, lambda: task.part(0, n, 0), task.loss_sum, mode, n, **more)


# %% jupyter={"source_hidden": true}
symbolic_four = {mode: one_rank(mode, 4, bf16=True) for mode in four}
rows = []
for mode, run in four.items():
    expected, taken = symbolic_four[mode], run["taken"][0]
    given_mb = round(taken["sent_bytes"] / 1e6, 1)
    rows.append((f"`{mode}`", expected.peak_bytes, taken["peak_bytes"], given_mb))
columns = ["predicted peak (bytes)", "measured peak (bytes)", "communicated (MB)"]
table(["4 ranks in bf16", *columns], rows)

# %% [markdown] slide={"en": "16 GPUs in two machines gather 1 GB of weights.\n\n**Guess first.** How many GB leave each machine?", "zh": "两台机器，共 16 块 GPU，收集 1 GB 的权重。\n\n**先猜**：每台机器要发出多少 GB？"}
# ## 8.10 When does a second machine pay? / 第二台机器什么时候划算？
#
# <div lang="en">
#
# A machine's GPUs exchange data over NVLink, but machines use slower network cards. In a ring, each rank sends only to the next. The cell below simulates one all-gather or reduce-scatter step by step, and counts the bytes that go to another machine.
#
# **Guess first.** Two machines have 8 GPUs each. All 16 GPUs gather 1 GB of weights, of which each GPU holds a sixteenth. How many GB leave each machine?
#
# </div>
# <div lang="zh">
#
# 一台机器里的 GPU 通过 NVLink 交换数据，机器之间则要通过较慢的网卡。在环里，每个进程只发送给下一个进程。下面的单元格逐步模拟一次 all-gather 或 reduce-scatter，并统计发往另一台机器的字节数。
#
# **先猜**：两台机器各有 8 块 GPU。16 块 GPU 一起收集 1 GB 的权重，每块 GPU 持有其中的十六分之一。每台机器要发出多少 GB？
#
# </div>

# %% tags=["guess"]
my_crossing = None  # bytes, such as 2e9


# %% slide="code"
def leaving(machines, gpus, given):
    """Return the bytes that leave each machine in a collective of `given` bytes in a ring."""
    ranks, out = machines * gpus, [0.0] * machines
    for _step in range(ranks - 1):
        for rank in range(ranks):  # each rank sends one chunk to the next one
            here, there = rank // gpus, (rank + 1) % ranks // gpus
            if here != there:
                out[here] += given / ranks
    return max(out)


# %% jupyter={"source_hidden": true}
predictions([("2 machines with 8 GPUs", my_crossing, leaving(2, 8, 1e9))], unit="GB")

# %% jupyter={"source_hidden": true} slide="result"
rows = [(m, g, f"{leaving(m, g, 1):.3f}") for m, g in [(2, 8), (8, 8), (2, 1), (8, 1)]]
table(["machines", "GPUs per machine", "out of each machine (GB)"], rows)

# %% [markdown]
# <div lang="en">
#
# If the 8 GPUs of a machine are neighbors in the ring, only one GPU sends to another machine. This GPU passes on $N-1$ of $N$ shards. So $(N-1)/N$ of the gathered bytes leave each machine, however many GPUs it has. NCCL makes several rings, which leave a machine through different cards. (A ring does not send the fewest bytes: each of two machines lacks only 0.5 GB of weights.)
#
# </div>
# <div lang="zh">
#
# 只要一台机器的 8 块 GPU 在环里相邻，就只有其中一块向另一台机器发送数据，这块 GPU 要转发 $N$ 个分片中的 $N-1$ 个。所以不论有多少块 GPU，每台机器发出的字节数都是收集的字节数的 $(N-1)/N$。NCCL 会建立多个环，各个环经过不同的网卡通向另一台机器。（用环发送，字节数并不是最少的。如果只有两台机器，每台其实只缺 0.5 GB 的权重。）
#
# </div>

# %% [markdown] slide={"en": "Two machines compute in half of the time, but their ring passes through network cards.\n\n**From how many tokens on are they faster?**", "zh": "两台机器的计算时间减半，但它们组成的环要经过网卡。\n\n**从多少 token 起，两台机器更快？**"}
# <div lang="en">
#
# Let one machine with $g$ GPUs train on $T$ tokens per step, in one micro-batch, with FSDP2 in bf16. Two machines divide these tokens, and their GPUs form one ring. A step computes 6 FLOPs per parameter and token (2 in forward, 4 in backward), and communicates about 8 bytes per parameter (exercise 4). Computation and communication overlap, so a step takes the longer of the two times. On one machine, computation takes longer than communication.
#
# **Exercise 5.** What is the smallest $T$ for which a step on two machines takes no longer than on one machine? Each GPU computes `rate` FLOPs per second, and `network` bytes per second leave a machine through all its cards.
#
# </div>
# <div lang="zh">
#
# 假设一台机器有 $g$ 块 GPU，用 bf16 的 FSDP2 训练，每步处理 $T$ 个 token，不分微批次。换成两台机器之后，一步处理的 token 总数不变，所有 GPU 连成一个环。一步的计算量是每个参数、每个 token 6 FLOPs（前向 2，反向 4），通信量约为每个参数 8 字节（练习 4）。通信与计算重叠，一步的用时取两者中较长的一个。如果只用一台机器，计算的时间比通信的时间长。
#
# **练习 5。** 每步至少要处理多少个 token（$T$），两台机器做一步的时间才不超过一台机器？每块 GPU 每秒计算 `rate` FLOPs，一台机器的全部网卡每秒共发出 `network` 字节。
#
# </div>


# %% minutes=8
def tokens_for_two(psi, gpus, rate, network):
    return 0  # tokens per step, of all GPUs together


exercises.check_second_machine(tokens_for_two)


# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not exercises.check_second_machine.accepted:

    def tokens_for_two(psi, gpus, rate, network):
        ranks = 2 * gpus
        traffic = 8 * psi * (ranks - 1) / ranks / network  # seconds
        one_machine_per_token = 6 * psi / (gpus * rate)
        return traffic / one_machine_per_token


exercises.check_second_machine(tokens_for_two)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# `RATES["H100"]` describes a DGX H100: 8 GPUs that send 450 GB/s to each other, and one network card of 50 GB/s per GPU. We assume 40% of the datasheet's 989 TFLOP/s in bf16. We compare the DGX with a machine with the same GPUs and only one card. All seconds are computed, not measured.
#
# </div>
# <div lang="zh">
#
# `RATES["H100"]` 描述的是 DGX H100：8 块 GPU 彼此发送数据的速率是 450 GB/s，每块 GPU 配一块 50 GB/s 的网卡。训练步的算力取 bf16 标称值 989 TFLOP/s 的 40%。作为对比的另一种机器有同样的 GPU，但只有一块网卡。这里的秒数都是算出来的，不是实测。
#
# </div>

# %% jupyter={"source_hidden": true}
from dataclasses import replace

from course_lib.budget import RATES

dgx = RATES["H100"]
one_card = replace(dgx, network_cards=1)
rate = dgx.bf16_flops * dgx.flops_share


def step_seconds(machines, tokens, rates, psi=8e9):
    ranks = 8 * machines
    compute = 6 * psi * tokens / (ranks * rate)
    traffic = 8 * psi * (ranks - 1) / ranks / rates.ring_rate(ranks)
    return max(compute, traffic)


pays = {n: tokens_for_two(8e9, 8, rate, n * 50e9) for n in (8, 1)}  # cards -> tokens

# %% jupyter={"source_hidden": true} slide="result"
from course_lib.lessons.lesson_08 import large

large.draw_machines(step_seconds, {8: dgx, 1: one_card}, pays)

# %% [markdown]
# <div lang="en">
#
# With one card per GPU, two DGX are at least as fast as one if a step has at least 9,890 tokens. At 19,780 tokens or more, they take half the time, if all communication overlaps with computation. With one card per machine, two machines need 79,120 tokens to be as fast as one. If all weights of a dense model are trained, these numbers hold for any model size, because computation and communication are proportional to it. (Below 8,205 tokens, even communication over NVLink takes longer than computation.)
#
# Does another way to split the model send fewer bytes to other machines? Take a model of 65 billion parameters on 64 GPUs in 8 machines, one sequence of 2048 tokens per GPU, in bf16. A step's computation takes 2.0 s.
#
# </div>
# <div lang="zh">
#
# 每块 GPU 配一块网卡时，每步只要有 9,890 个 token，两台 DGX 就不比一台慢。如果通信全部与计算重叠，那么只要每步有 19,780 个 token，用时就能减半。如果每台机器只有一块网卡，每步要有 79,120 个 token，两台才不比一台慢。这些数与模型的大小无关，因为只要模型是稠密的，又训练全部权重，计算和通信就都与模型的大小成正比。（少于 8,205 个 token 时，即使在一台机器之内，用 NVLink 通信也比计算慢。）
#
# 换一种切分方式，发往其他机器的字节会变少吗？假设模型有 650 亿个参数，用 8 台机器上的 64 块 GPU，每块 GPU 处理一条 2048 个 token 的序列，仍用 bf16。一步的计算要 2.0 s。
#
# </div>

# %% jupyter={"source_hidden": true} slide="result"
seventy = large.seventy_billion()  # shapes only: nothing is allocated
large.compare_splits(seventy, dgx.network_bytes)

# %% [markdown]
# <div lang="en">
#
# **HSDP** (hybrid sharded data parallelism) shards within a machine and replicates the shards between machines. Between machines, it only all-reduces gradients, in fp32. Each rank holds $16\Psi/8$ bytes, more than the 80 GB of an H100. In the last row, the 8 GPUs of a machine divide each matrix (**tensor parallelism**, section 8.16) and process 8 sequences together, while FSDP2 shards over the 8 machines. With these 8 machines and one micro-batch, HSDP and the split in the last row send 11% less to other machines than FSDP2 over all 64 GPUs. The number of network cards matters more. With one card per GPU, every row's communication takes less than the 2.0 s of computation. With one card per machine, communication takes longer. (Communication within a machine is not counted.)
#
# </div>
# <div lang="zh">
#
# **HSDP**（混合分片数据并行）只在一台机器内分片，各台机器互为副本，因此机器之间只需对梯度做 all-reduce（用 fp32）。HSDP 的每个进程要持有 $16\Psi/8$ 字节，一块 H100 只有 80 GB，装不下这么多。表中最后一行，一台机器的 8 块 GPU 分摊每个矩阵（**张量并行**，8.16 节），一起处理 8 条序列，8 台机器之间用 FSDP2 分片。用这 8 台机器、不分微批次时，无论用 HSDP 还是用最后一行的切分方式，发往其他机器的字节都只比在全部 64 块 GPU 上用 FSDP2 少 11%。影响更大的是网卡的数量。每块 GPU 配一块网卡时，每一行的通信时间都比 2.0 s 的计算时间短。每台机器只有一块网卡时，每一行的通信时间都比计算时间长。（机器之内的通信没有计入。）
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
# | bf16, reduced in fp32 | `MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)` | 8.3: 97.5 MB |
# | tensor parallelism | `parallelize_module(model, mesh, plan)` | 8.16 |
# | pipeline parallelism | `Schedule1F1B(stage, micro_batches, loss_fn=loss)` | 8.18 |
# | context parallelism | `context_parallel(mesh, buffers=…)` | no: needs two GPUs; 8.17 runs a ring of our own |
# | HSDP | `fully_shard(block, mesh=mesh)`, with a two-dimensional mesh | docs |
# | a model that no rank holds whole | `with torch.device("meta"):`, `fully_shard`, `to_empty` | docs |
# | shards on the host | `CPUOffloadPolicy()` | no: needs a GPU |
#
# The page [FSDP2 in practice](../docs/fsdp2.md) runs the lines marked *docs*. It also lists the same settings for DeepSpeed, and shows how to save and resume on another number of ranks.
#
# </div>
# <div lang="zh">
#
# | 做什么 | PyTorch | 运行 |
# |---|---|---|
# | DDP | `DistributedDataParallel(model, gradient_as_bucket_view=True)` | 8.3 |
# | ZeRO 1 | `ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)` | 8.3 |
# | ZeRO 3 | `for block in model.layers: fully_shard(block)`，然后 `fully_shard(model)` | 8.3 |
# | bf16，以 fp32 归约 | `MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)` | 8.3：97.5 MB |
# | 张量并行 | `parallelize_module(model, mesh, plan)` | 8.16 |
# | 流水线并行 | `Schedule1F1B(stage, micro_batches, loss_fn=loss)` | 8.18 |
# | 上下文并行 | `context_parallel(mesh, buffers=…)` | 否：需要两块 GPU，8.17 节运行自己写的环 |
# | HSDP | `fully_shard(block, mesh=mesh)`，mesh 有两个维度 | docs |
# | 任何进程上都没有完整权重的模型 | `with torch.device("meta"):`，`fully_shard`，`to_empty` | docs |
# | 分片放在主机内存里 | `CPUOffloadPolicy()` | 否：需要 GPU |
#
# 标有 docs 的几行在 [FSDP2 的实际用法](../docs/fsdp2.zh.md)一页中运行。那一页还列出了 DeepSpeed 里对应的设置，并说明怎样存盘，以及怎样换一个进程数继续训练。
#
# </div>

# %% [markdown]
# ## 8.12 Claims and measurements / 说法与实测
#
# <div lang="en">
#
# For the second claim, the cell compares one device with one of two FSDP2 ranks, with 4 sequences each, in fp32. The third claim is tested with DDP on one rank.
#
# </div>
# <div lang="zh">
#
# 检验第二种说法时，把单独一台设备与两个 FSDP2 进程中的一个比较，两者各处理 4 条序列，都用 fp32。第三种说法用只有一个进程的 DDP 检验。
#
# </div>

# %% jupyter={"source_hidden": true} slide="result"
spared = []
for tokens in (128, 16):
    without, with_view = (figures.ddp_peak(tokens, view=view) for view in (False, True))
    spared.append(without - with_view)
figures.claims_table(two, half, spared)

# %% [markdown]
# ## 8.13 The ledger / 账本
#
# <div lang="en">
#
# This lesson's row shows one of four FSDP2 ranks, with a quarter of the batch, in fp32. The column of bytes moved contains the rank's communication volume.
#
# </div>
# <div lang="zh">
#
# 本课在账本里的一行，记录的是四个 FSDP2 进程中的一个。这个进程处理批次的四分之一，用的是 fp32。通信量记在“搬运的字节数”一栏。
#
# </div>

# %% jupyter={"source_hidden": true} slide="result"
rank = one_rank("fsdp", 4)
ledger("08", "FSDP2, one rank of four", rank, moved_bytes=rank.sent_bytes)

# %% [markdown]
# ## 8.14 Summary / 小结
#
# <div lang="en">
#
# - Data parallelism divides the activations of a fixed batch, and ZeRO shards optimizer state, gradients and weights. In fp32, a DDP rank holds $16\Psi$ bytes, and ZeRO 1 to 3 hold $8\Psi + 8\Psi/N$, $4\Psi + 12\Psi/N$ and $16\Psi/N$.
# - DDP's buckets always take memory for all gradients, here 27.5 MB.
# - An all-reduce equals a reduce-scatter followed by an all-gather. ZeRO 1 and 2 can update between these two collectives, and then send no more than DDP. With one micro-batch in fp32, ZeRO 3 sends up to 50% more than DDP.
# - With a quarter of the batch, the peak falls from 277.7 MB to 131.3 MB. With shards, checkpoints and bf16, each of four ranks needs 37.8 MB.
# - Mixed precision does not change what an FSDP2 rank holds. It halves activations and gathered bytes.
# - In a ring, $(N-1)/N$ of the communicated bytes leave each machine if its ranks are neighbors. With bf16 FSDP2 and at least 9,890 tokens per step, two DGX H100 are at least as fast as one.
#
# **Next:** [lesson 09](09_your_own_model.ipynb), models that the course did not write.
#
# </div>
# <div lang="zh">
#
# - 批次固定时，数据并行分摊激活值。DDP 的每个进程都持有完整的权重、梯度和优化器状态，ZeRO 则把这三者分片。用 fp32 时，DDP 的每个进程持有 $16\Psi$ 字节，ZeRO 1 到 3 的每个进程依次持有 $8\Psi + 8\Psi/N$、$4\Psi + 12\Psi/N$ 和 $16\Psi/N$ 字节。
# - DDP 的桶始终按全部梯度的大小占用内存，在这里使峰值高出 27.5 MB。
# - 一次 all-reduce 等于一次 reduce-scatter 加一次 all-gather。ZeRO 1 和 2 可以在这两次集合通信之间更新权重，因此发送的字节数不比 DDP 多。用 fp32、只有一个微批次时，ZeRO 3 的通信量比 DDP 至多高出 50%。
# - 每台设备只处理批次的四分之一，峰值就从 277.7 MB 降到 131.3 MB。再加上分片、检查点和 bf16，四个进程各自只需 37.8 MB。
# - 用混合精度时，FSDP2 的每个进程持有的字节数不变，但激活值和收集权重的字节数都减半。
# - 在环里，只要一台机器的进程彼此相邻，每台机器发出的字节数就是通信量的 $(N-1)/N$。用 bf16 的 FSDP2 时，每步只要有 9,890 个 token，两台 DGX H100 就不比一台慢。
#
# **下一步**：[第 09 课](09_your_own_model.ipynb)，换成别人写的模型。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **Sources.** Rajbhandari et al. 2020, *ZeRO*, arXiv:1910.02054 (formulas, sections 5 and 7). Li et al. 2020, *PyTorch Distributed*, arXiv:2006.15704 (DDP's buckets). Zhao et al. 2023, *PyTorch FSDP*, arXiv:2304.11277 (also HSDP). PyTorch documentation: DistributedDataParallel; `fully_shard`; Tensor Parallelism. DeepSpeed documentation: *Configuration JSON*. NVIDIA: H100 datasheet; *DGX BasePOD*, Core Components (network cards); nccl-tests, `doc/PERFORMANCE.md` (rings). Jiang et al. 2024, *Mixtral of Experts*, arXiv:2401.04088 (configuration).
#
# **To read next.** Hugging Face, *The Ultra-Scale Playbook*, 2025.
#
# </div>
# <div lang="zh">
#
# **出处。** Rajbhandari et al. 2020，*ZeRO*，arXiv:1910.02054（公式，第 5、7 节）。Li et al. 2020，*PyTorch Distributed*，arXiv:2006.15704（DDP 的桶）。Zhao et al. 2023，*PyTorch FSDP*，arXiv:2304.11277（也讲 HSDP）。PyTorch 文档：DistributedDataParallel、`fully_shard`、Tensor Parallelism。DeepSpeed 文档：*Configuration JSON*。NVIDIA：H100 数据手册；*DGX BasePOD*，Core Components（网卡）；nccl-tests，`doc/PERFORMANCE.md`（环）。Jiang et al. 2024，*Mixtral of Experts*，arXiv:2401.04088（配置）。
#
# **接着读。** Hugging Face，*The Ultra-Scale Playbook*，2025。
#
# </div>

# %% [markdown]
# ## In depth / 深入
#
# <div lang="en">
#
# No other lesson needs the following sections, and each of them can be read alone.
#
# </div>
# <div lang="zh">
#
# 其他各课用不到以下各节，各节也可以单独读。
#
# </div>

# %% [markdown] slide={"en": "One sequence per rank, and it still does not fit. Data parallelism divides nothing more.\n\nWhat else can be divided?", "zh": "每个进程只剩一条序列，还是装不下。再增加数据并行的进程也没有用。\n\n还有什么可以分摊？"}
# ## 8.15 What each parallelism divides / 各种并行分摊什么
#
# <div lang="en">
#
# With data parallelism, a rank computes at least one whole sequence. If the activations of this sequence do not fit, something else has to be divided. **Tensor parallelism** (TP) divides each matrix among $t$ ranks. **Sequence parallelism** (SP) also divides the operations between the matrices. **Context parallelism** (CP) divides the sequence among $c$ ranks, and attention is computed on the divided sequence, too. **Pipeline parallelism** (PP) divides the layers among $p$ ranks. **Expert parallelism** (EP) divides the experts of a mixture-of-experts model among $e$ ranks.
#
# </div>
# <div lang="zh">
#
# 用数据并行时，每个进程至少要计算一条完整的序列。如果这条序列的激活值装不下，就要分摊别的东西。**张量并行**（TP）把每个矩阵分给 $t$ 个进程。**序列并行**（SP）把矩阵之间的运算也分摊。**上下文并行**（CP）把序列分给 $c$ 个进程，连注意力也按序列分开计算。**流水线并行**（PP）把各层分给 $p$ 个进程。**专家并行**（EP）把混合专家模型里的专家分给 $e$ 个进程。
#
# </div>

# %% slide="result"
schemes.parallelisms()

# %% [markdown] slide={"en": "Two ranks divide each matrix. Activations between matrices stay whole, or are cut, too.\n\n**Guess first**: one device peaks at 277.7 MB. And a rank?", "zh": "两个进程分摊每个矩阵。矩阵之间的激活值保持完整，或者也切开。\n\n**先猜**：一台设备的峰值是 277.7 MB，每个进程呢？"}
# ## 8.16 Tensor parallelism on two ranks / 用两个进程运行张量并行
#
# <div lang="en">
#
# A layer has two pairs of matrices. For the first matrix of a pair, each rank gets some columns of $W^\top$, and for the second, some rows. So the ranks add up their outputs only after the second matrix. In PyTorch, this plan divides the matrices:
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
# The course first reorders the rows of `qkv`, so that a rank gets the queries, keys and values of the same heads. Sequence parallelism (mode `tp-sp`) adds `SequenceParallel()` for the norms. In the next cell, two real ranks process all 8 sequences together:
#
# </div>
# <div lang="zh">
#
# 一层有两对矩阵。每一对中，第一个矩阵按 $W^\top$ 的列切开，第二个矩阵按行切开。这样，各进程乘完第二个矩阵之后，才需要把输出加起来。在 PyTorch 里这样写：
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
# 一个进程得到的 Q、K、V 必须属于相同的头，所以课程先调整了 `qkv` 各行的顺序。使用序列并行（`tp-sp`）时，还要给归一化层加上 `SequenceParallel()`。下面用两个真实的进程一起处理全部 8 条序列：
#
# </div>

# %%
runs = launch(2, script="course_lib.distributed.model_parallel")  # also for 8.17 and 8.18
tensor = [run for run in runs if run["mode"] in ("tp", "tp-sp")]
equal = [(difference(run) < 1e-5, run["gradient_difference"] < 1e-5) for run in tensor]
rows = [(f"`{run['mode']}`", *each) for run, each in zip(tensor, equal, strict=True)]
table(["`mode`", "losses equal", "gradients equal"], rows)

# %% [markdown]
# <div lang="en">
#
# Losses and gradients equal those of one process to within 0.00001. In the next cell, formulas predict the communication volume and the bytes that a rank holds. A run of one rank with symbolic tensors predicts the peak:
#
# </div>
# <div lang="zh">
#
# 损失和梯度与单个进程算出的相差不到 0.00001。下面用公式预测持有的字节数和通信量，再用符号张量运行其中一个进程，由此预测峰值：
#
# </div>

# %% slide="result"
from course_lib.lessons.lesson_08 import large

predictions(large.tensor_rows(task, tensor), unit="bytes")

# %% [markdown]
# <div lang="en">
#
# A rank peaks at 172.8 MB instead of 277.7 MB, and at 163.8 MB with sequence parallelism. Each layer has four all-reduces of $s b h$ numbers, for $b$ sequences of $s$ tokens with hidden size $h$. Sequence parallelism replaces each all-reduce by a reduce-scatter and an all-gather.
#
# What does a layer keep for backward? With $a$ attention heads, lesson 01's formula gives $16 s b h + a s^2 b$ numbers. According to Korthikanti et al. (2022), tensor parallelism divides all of these numbers except the $4 s b h$ of the norms. Sequence parallelism divides the numbers of the norms, too:
#
# </div>
# <div lang="zh">
#
# 每个进程的峰值从 277.7 MB 降到 172.8 MB，加上序列并行是 163.8 MB。每层做四次 all-reduce，每次 $s b h$ 个数，其中 $b$ 是序列的条数，$s$ 是每条序列的 token 数，$h$ 是隐藏维度。用序列并行时，每次 all-reduce 换成一次 reduce-scatter 加一次 all-gather。
#
# 每层要为反向保存多少个数？如果有 $a$ 个注意力头，按第 01 课的公式是 $16 s b h + a s^2 b$ 个数。按 Korthikanti et al.（2022）的说法，归一化层的 $4 s b h$ 个数，张量并行不能分摊，其余的都能分摊。再加上序列并行，这 $4 s b h$ 个数也能分摊：
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
# With tensor parallelism, each layer keeps exactly as many bytes as the formula predicts. With sequence parallelism, PyTorch keeps 1,048,576 bytes more per layer than predicted, because the inputs of two matrices are gathered, and autograd saves these inputs whole. According to Korthikanti et al., Megatron-LM gathers these inputs again in the backward pass.
#
# </div>
# <div lang="zh">
#
# 使用张量并行时，每层保存的字节数与公式一字节不差。但加上序列并行以后，PyTorch 每层比公式多保存 1,048,576 字节。原因是有两个矩阵的输入要先收集完整，autograd 保存的就是完整的输入。据 Korthikanti et al.，Megatron-LM 在反向时重新收集这些输入。
#
# </div>

# %% [markdown] slide={"en": "Two ranks have half of each sequence.\n\nHow does a rank attend to keys that it does not have?", "zh": "两个进程各持有每条序列的一半。\n\n本进程没有的那些键，怎样参与注意力？"}
# ## 8.17 Context parallelism on two ranks / 用两个进程运行上下文并行
#
# <div lang="en">
#
# Each rank has a part of every sequence, 64 of the 128 tokens. Only attention needs the other tokens. In **ring attention**, keys and values go around a ring of ranks. Each rank computes attention to one part of the keys at a time, and merges the results with their log-sum-exps (lesson 06). In the backward pass, keys and values go around again, together with their gradients. The two ranks that section 8.16 started have also run the following function:
#
# </div>
# <div lang="zh">
#
# 每个进程持有每条序列的一部分，即 128 个 token 中的 64 个。只有注意力需要其余的 token。**环形注意力**（ring attention）让键和值沿环传递，每个进程用 LSE 把各部分的结果合并起来，与第 06 课合并各个键块的做法相同。反向时，键和值带着各自的梯度再传一圈。8.16 节启动两个进程时，已经运行过下面的函数：
#
# </div>

# %%
import inspect

from course_lib.distributed import context_parallel

print(inspect.getsource(context_parallel.RingAttention))

# %% [markdown]
# <div lang="en">
#
# With $c$ ranks, let the keys of a layer take $m$ bytes on each rank, and the values another $m$ bytes. A rank then sends the keys and values of a layer $c-1$ times in forward and $c-1$ times in backward, and their gradients $c$ times. In addition, the gradients of the weights are all-reduced:
#
# </div>
# <div lang="zh">
#
# 设有 $c$ 个进程，每个进程在每层的键有 $m$ 字节，值也有 $m$ 字节。在每一层，每个进程在前向和反向里各把键和值发送 $c-1$ 次，还要把键和值的梯度发送 $c$ 次。此外，权重的梯度要做 all-reduce：
#
# </div>

# %% slide="result"
(ring,) = (run for run in runs if run["mode"] == "cp")
c, m, layers = 2, 8 * 64 * 256 * 4, 8  # 8 sequences of 64 tokens, hidden size 256, fp32
my_volume = layers * (2 * 2 * (c - 1) + 2 * c) * m + 8 * 6_875_648
peak = context_parallel.predict_context_parallel(
    task.make_model, lambda: task.make_batch(0), c, rank=0
)
usage = ring["taken"][0]
rows = [("`cp`: communicated", my_volume, usage["sent_bytes"])]
predictions([*rows, ("`cp`: peak", peak.peak_bytes, usage["peak_bytes"])], unit="bytes")

# %%
rows = [(ring["gradient_difference"] < 1e-5, difference(ring) < 1e-5)]
table(["gradients within 0.00001", "losses within 0.00001"], rows)

# %% [markdown]
# <div lang="en">
#
# A rank peaks at 163.5 MB. It holds all weights and Adam's state, 82.5 MB, and half of the activations, but no attention scores. Rank 0 has the first part of each sequence, and attends only to this part. Rank 1 attends to both parts.
#
# PyTorch has its own `context_parallel`, which also balances the work of the ranks. On a CPU, this function of PyTorch 2.13 raises `NotImplementedError` for causal attention, so the following lines are not run here. The course has a test for machines with two GPUs, which has not been run yet.
#
# ```
# from torch.distributed.tensor.experimental import context_parallel
#
# with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
#     F.scaled_dot_product_attention(q, k, v, is_causal=True)
# ```
#
# </div>
# <div lang="zh">
#
# 每个进程的峰值是 163.5 MB，其中有全部的权重和 Adam 的状态（82.5 MB），以及一半的激活值，没有注意力分数。每条序列切成前后两部分，进程 0 的查询只用到前一部分的键和值，进程 1 的查询则两部分都要用。
#
# PyTorch 自带的 `context_parallel` 还会平衡各进程的计算量。在 CPU 上，如果注意力带因果掩码，PyTorch 2.13 的这个函数会抛出 `NotImplementedError`，所以下面几行没有在这里运行。课程为有两块 GPU 的机器准备了一个测试，但还没有运行过。
#
# ```
# from torch.distributed.tensor.experimental import context_parallel
#
# with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
#     F.scaled_dot_product_attention(q, k, v, is_causal=True)
# ```
#
# </div>

# %% [markdown] slide={"en": "Rank 0 has the first two layers, rank 1 the last two.\n\nThe number of micro-batches doubles. **What happens to the peak of each schedule?**", "zh": "进程 0 有前两层，进程 1 有后两层。\n\n微批次增加一倍，**两种调度的峰值各会怎样？**"}
# ## 8.18 Pipeline parallelism on two ranks / 用两个进程运行流水线并行
#
# <div lang="en">
#
# Rank 0 has the embedding and the first two layers, and rank 1 has the last two layers and the head. Micro-batches of one sequence pass through both ranks. (The launch in section 8.16 also ran seven such steps. To make them short, this decoder has only 4 layers, sequences of 32 tokens and a vocabulary of 512 words.) In PyTorch, this pipeline is written as:
#
# ```
# stage = PipelineStage(my_layers, rank, ranks, device)
# schedule = Schedule1F1B(stage, micro_batches, loss_fn=mean_loss)  # or ScheduleGPipe
# schedule.step(tokens) if rank == 0 else schedule.step(target=labels)
# ```
#
# **GPipe** computes all forward passes before the first backward pass. **1F1B** alternates forward and backward passes as soon as possible. With four micro-batches, each rank computes its passes in this order:
#
# </div>
# <div lang="zh">
#
# 进程 0 有嵌入层和两个解码器层，进程 1 有两个解码器层和输出头。每个微批次是一条序列，依次经过两个进程。（8.16 节启动两个进程时，还运行了七个这样的训练步。为了省时间，这里的解码器只有 4 层，每条序列 32 个 token，词表有 512 个词。）在 PyTorch 里这样写：
#
# ```
# stage = PipelineStage(my_layers, rank, ranks, device)
# schedule = Schedule1F1B(stage, micro_batches, loss_fn=mean_loss)  # or ScheduleGPipe
# schedule.step(tokens) if rank == 0 else schedule.step(target=labels)
# ```
#
# **GPipe** 先完成所有微批次的前向，再开始反向。**1F1B** 则尽早开始反向，让前向和反向交替进行。有四个微批次时，每个进程的顺序如下：
#
# </div>

# %%
pipelines = {(r["mode"], r["micro_batches"], r["return_outputs"]): r["taken"] for r in runs[3:]}
for schedule in ("gpipe", "1f1b"):
    for rank, taken in enumerate(pipelines[schedule, 4, True]):
        print(f"{schedule:<6} rank {rank}: {' '.join(taken['order'])}")

# %% [markdown]
# <div lang="en">
#
# A micro-batch is **in flight** from its forward pass to its backward pass, and its saved activations exist for this time. GPipe has all $m$ micro-batches in flight. On rank $i$ of $p$ ranks, 1F1B has $p - i$ micro-batches in flight. So we measure the bytes of one micro-batch, and multiply them by the number of micro-batches in flight. PyTorch needs memory for three more things: a receive buffer per micro-batch, one sent tensor that 1F1B still holds, and on the last rank the outputs of all micro-batches, which `step` returns.
#
# </div>
# <div lang="zh">
#
# 一个微批次从前向开始到反向结束，都处于**在途**（in flight）状态，它保存的激活值在此期间一直存活。用 GPipe 时，全部 $m$ 个微批次都在途。用 1F1B 时，在 $p$ 个进程中编号为 $i$ 的进程上，只有 $p-i$ 个微批次在途。因此只要测出一个微批次占用的字节，再乘以在途的个数，就能算出各进程的激活值占多少内存。PyTorch 还要占三部分内存。一是每个微批次的接收缓冲区，二是用 1F1B 时一个已经发送、但尚未释放的张量，三是最后一个进程上全部微批次的输出，因为 `step` 要返回这些输出。
#
# </div>

# %%
from course_lib.distributed.pipeline import SIZES, mean_loss, part_of
from course_lib.memory import symbolic
from course_lib.models import Decoder


# %%
def one_micro_batch(rank):  # bytes held, bytes kept after forward, and the peak above those held
    with symbolic():
        part, tokens = part_of(Decoder(**SIZES), rank, 2), torch.zeros(1, 32, dtype=torch.long)
        for p in part.parameters():
            p.grad = torch.zeros_like(p)
        sent = torch.zeros(1, 32, 256, requires_grad=True)
        with MemoryMeter(part) as meter:
            held = meter.live_bytes
            output = part(tokens if rank == 0 else sent)
            loss = mean_loss(output, tokens) if rank == 1 else None
            kept = meter.live_bytes - held
            output.backward(sent.detach()) if rank == 0 else loss.backward()
    return held, kept, meter.peak_bytes - held


# %%
def predicted_peak(rank, schedule, m, outputs):
    held, kept, alone = one_micro_batch(rank)
    buffer, output = 4 * 32 * 256, 4 * 32 * 512  # bytes
    flying = m if schedule == "gpipe" else 2 - rank
    peak = held + m * buffer + (flying - 1) * kept + alone
    peak += buffer if schedule == "1f1b" else 0
    return peak + (m - flying) * (output * outputs + 4) if rank == 1 else peak  # 4: a loss


# %%
rows = []
for (schedule, m, outputs), taken in pipelines.items():
    name = f"`{schedule}`, {m}" + ("" if outputs else ", `return_outputs=False`")
    for rank in (0, 1):
        measured = taken[rank]["peak_bytes"]
        rows.append((f"{name}, {rank}", predicted_peak(rank, schedule, m, outputs), measured))
predictions(rows, unit="bytes")

# %% [markdown]
# <div lang="en">
#
# (Each row names the schedule, the number of micro-batches and the rank.) From 4 to 16 micro-batches, GPipe's peak on rank 1 grows from 20.0 MB to 35.8 MB. 1F1B's peak grows only from 16.4 MB to 17.6 MB. With `return_outputs=False`, 1F1B peaks at 16.6 MB with 16 micro-batches. The course's tests check that the gradients of all seven steps equal those of one process.
#
# Ranks are idle while the pipeline fills and drains. To compute the idle time, we assume that a forward pass takes one unit of time and a backward pass two units, and follow the recorded order of the passes:
#
# </div>
# <div lang="zh">
#
# （每一行依次是调度、微批次数和进程编号。）微批次从 4 个增加到 16 个，GPipe 在进程 1 上的峰值从 20.0 MB 升到 35.8 MB，1F1B 只从 16.4 MB 升到 17.6 MB。如果设置 `return_outputs=False`，1F1B 在 16 个微批次时的峰值是 16.6 MB。课程的测试会检查，这七步算出的梯度都与只用一个进程时算出的相等。
#
# 流水线在填满和排空的时候，会有进程空闲。假设一次前向用一个单位时间，一次反向用两个单位时间，按记录下来的顺序，可以算出空闲时间所占的比例：
#
# </div>


# %%
def idle_share(orders):
    """Return the share of the time in which the ranks wait for each other."""
    ends, clocks, todo = {}, [0] * len(orders), [list(order) for order in orders]
    while any(todo):
        for rank, passes in enumerate(todo):
            needed = passes and (passes[0], rank + (-1 if passes[0][0] == "F" else 1))
            if passes and (needed in ends or needed[1] in (-1, len(orders))):
                start = max(clocks[rank], ends.get(needed, 0))
                clocks[rank] = start + {"F": 1, "B": 2}[passes[0][0]]
                ends[passes.pop(0), rank] = clocks[rank]
    return 1 - 3 * len(orders[0]) / 2 / max(clocks)


# %% jupyter={"source_hidden": true} slide="result"
rows = []
for (schedule, m, outputs), taken in pipelines.items():
    if outputs:
        idle = idle_share([each["order"] for each in taken])
        rows.append((f"`{schedule}`", m, f"{idle:.1%}", f"{1 / (m + 1):.1%}"))
table(["schedule", "micro-batches", "idle", "(p − 1)/(m + p − 1)"], rows)

# %% [markdown]
# <div lang="en">
#
# With both schedules, a rank is idle for $(p-1)/(m+p-1)$ of the time. For a given number of ranks, only more micro-batches reduce this **bubble**. So 1F1B is not faster than GPipe, but its lower peak allows more micro-batches.
#
# </div>
# <div lang="zh">
#
# 无论哪种调度，每个进程的空闲时间都占总时间的 $(p-1)/(m+p-1)$，进程数不变时，只有增加微批次才能减少这个**气泡**（bubble）。也就是说，1F1B 并不更快，只是峰值更低，因此容得下更多的微批次。
#
# </div>

# %% [markdown]
# ## 8.19 Expert parallelism, predicted for Mixtral / 以 Mixtral 为例预测专家并行
#
# <div lang="en">
#
# In each layer of Mixtral 8x7B, a router sends every token to 2 of 8 experts, and the experts have 97% of all parameters. With expert parallelism over $e$ of 8 GPUs, a GPU computes only $8/e$ experts. Each GPU sends each of its tokens to the two experts of this token, and gets the results back. This takes one all-to-all in each direction, in forward and again in backward. FSDP2 shards all other parameters over the 8 GPUs. It also shards the experts, but only over the $8/e$ GPUs that have the same experts. The table assumes bf16, and 4096 tokens per GPU that are spread evenly over the experts:
#
# </div>
# <div lang="zh">
#
# 在 Mixtral 8x7B 的每一层里，路由器把每个 token 送给 8 个专家中的 2 个，专家占全部参数的 97%。在 8 块 GPU 中的 $e$ 块之间做专家并行时，每块 GPU 只计算 $8/e$ 个专家。每个 token 要发给对应的两个专家，结果再传回来，发出和传回各用一次 all-to-all，前向和反向都要这样做一遍。其余的参数由 FSDP2 在全部 8 块 GPU 之间分片。同一组专家由 $8/e$ 块 GPU 负责，FSDP2 只在这几块 GPU 之间给这些专家分片。下面用 bf16，每块 GPU 有 4096 个 token，并假设 token 平均分给各个专家：
#
# </div>

# %%
hidden, width, layers, experts, chosen, vocabulary = 4096, 14336, 32, 8, 2, 32000
in_experts = layers * experts * 3 * hidden * width
attention = 2 * hidden * hidden + 2 * hidden * 1024  # 8 heads of 128 for keys and values
others = layers * (attention + experts * hidden + 2 * hidden) + (2 * vocabulary + 1) * hidden

rows, tokens = [], 4096
for e in (1, 2, 4, 8):
    gathered = 8 * others + (8 * in_experts / e if e < 8 else 0)
    exchanged = layers * 4 * tokens * chosen * hidden * 2 if e > 1 else 0
    held = 16 * (in_experts + others) / 8
    rows.append((e, *(f"{count / 1e9:.1f}" for count in (held, gathered, exchanged))))
table(["e", "held per GPU (GB)", "FSDP2 communicates (GB)", "all-to-all (GB)"], rows)

# %% [markdown]
# <div lang="en">
#
# The table shows the bytes given to collectives. These bytes are computed, not measured. With $e = 8$, no expert is gathered. Instead of 361 GB of the experts' weights and gradients, each GPU then communicates 8.6 GB of activations. The bytes of the all-to-alls are proportional to the number of tokens, and reach 361 GB at 172,000 tokens per GPU. If the router prefers some experts, the GPUs of these experts get more tokens, take more memory, and make the other GPUs wait.
#
# </div>
# <div lang="zh">
#
# 表中是交给集合通信的字节数，都没有实测。$e = 8$ 时不必收集任何专家，每块 GPU 要传输的不再是专家的 361 GB 权重和梯度，而是 8.6 GB 的激活值。all-to-all 的字节数与 token 数成正比，每块 GPU 有 172,000 个 token 时也会达到 361 GB。如果路由器偏向某些专家，持有这些专家的 GPU 就会分到更多的 token，占用更多的内存，还要让其他 GPU 等待。
#
# </div>

# %% [markdown]
# ## 8.20 Micro-batches: what `no_sync` saves and costs / 微批次：`no_sync` 省什么，代价是什么
#
# <div lang="en">
#
# If a batch is divided into micro-batches (lesson 05), gradients have to be reduced (summed over all ranks) only in the last micro-batch. The other micro-batches skip the reduction with `no_sync()` (DDP) or `set_requires_gradient_sync(False)` (FSDP2). With `gradient_as_bucket_view=True` and `zero_grad(set_to_none=False)`, DDP adds up gradients in its buckets. In a prediction, the argument `in_buckets=True` stands for these two settings. The table has predictions for two ranks with two micro-batches each:
#
# </div>
# <div lang="zh">
#
# 使用微批次时（第 05 课），只有最后一个微批次需要归约梯度，也就是把各进程的梯度加起来。其余的微批次用 `no_sync()`（DDP）或 `set_requires_gradient_sync(False)`（FSDP2）跳过归约。设置 `gradient_as_bucket_view=True` 和 `zero_grad(set_to_none=False)` 之后，DDP 就在桶里累加梯度，预测时用 `in_buckets=True` 表示这两项设置。有两个进程、每个进程两个微批次时，预测如下：
#
# </div>

# %%
ways = {
    "DDP, with each micro-batch": ("ddp", {"sync": "each"}),
    "DDP, with the last one, in the buckets": ("ddp", {"in_buckets": True}),
    "FSDP2, with each micro-batch": ("fsdp", {"sync": "each"}),
    "FSDP2, with the last one": ("fsdp", {}),
}
taken = {way: one_rank(mode, 2, micro_batches=2, **more) for way, (mode, more) in ways.items()}
large.sync_table(taken)

# %% [markdown]
# <div lang="en">
#
# With two micro-batches and these settings, `no_sync()` halves DDP's communication volume and costs no memory. With only one reduction, FSDP2 communicates 17% fewer bytes, but holds 13.8 MB more, because gradients stay unsharded until the reduction.
#
# </div>
# <div lang="zh">
#
# 有两个微批次、用上述设置时，`no_sync()` 能让 DDP 的通信量减半，又不多占内存。FSDP2 少归约一次，通信量少 17%，但每个进程要多持有 13.8 MB，因为梯度在归约之前必须完整保留。
#
# </div>

# %% [markdown]
# ## 8.21 7 and 70 billion parameters / 70 亿与 700 亿个参数
#
# <div lang="en">
#
# **Exercise 6.** A model with 7 billion parameters ($7 \times 10^9$) trains on 8 GPUs in mixed precision. For each parameter, the ZeRO paper and DeepSpeed count 2 bytes for the weight, 2 for the gradient, and 12 for the fp32 weight and Adam's state. How many bytes does a rank hold with DDP, and with ZeRO 1, 2 and 3?
#
# </div>
# <div lang="zh">
#
# **练习 6。** 一个有 70 亿个参数（$7 \times 10^9$）的模型在 8 块 GPU 上用混合精度训练。按 ZeRO 论文和 DeepSpeed 的计法，每个参数的权重占 2 字节，梯度占 2 字节，fp32 权重和 Adam 的状态共占 12 字节。用 DDP 和 ZeRO 1、2、3 时，一个进程各持有多少字节？
#
# </div>

# %% minutes=7
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
# ## 8.22 On a GPU / 在 GPU 上
#
# <div lang="en">
#
# With one GPU per rank, the same command as in section 8.3 uses NCCL and offers the mode `fsdp-cpu`, which keeps shards in host memory. Compared with a CPU, only the peak can differ: according to PyTorch 2.13's code (**not measured**), the peak may also contain two gathered blocks and the gradients of one block.
#
# </div>
# <div lang="zh">
#
# 如果每个进程有一块 GPU，8.3 节的命令会使用 NCCL，还多一种模式 `fsdp-cpu`，把分片放在主机内存里。与 CPU 相比，只有峰值可能不同。根据 PyTorch 2.13 的代码（**没有实测**），峰值里可能多出两个收集好的块和一个块的梯度。
#
# </div>
