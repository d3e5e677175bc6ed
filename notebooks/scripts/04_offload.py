# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] slide={"en": "Every activation goes to a file until backward needs it, and nothing is computed twice.\n\nWhen does a copy cost nothing?", "zh": "每份激活值都先挪进文件，反向用到时再取回，什么也不用重计算。\n\n拷贝什么时候没有代价？"}
# # 4 What if we move bytes to a lower tier instead? (offload) / 不忘掉，而是挪到下一级存储呢？（卸载）
#
# <div lang="en">
#
# Move every activation of the course's step to a file, and fetch it when backward asks for it. The peak falls, and nothing is computed twice. Does it fall further than with a checkpoint around each layer? And further still with both?
#
# And what does it cost? Suppose that each copy takes no longer than the computation that runs at the same time. Does the step then take as long as it does without copies?
#
# </div>
# <div lang="zh">
#
# 把课程训练步里的每份激活值都移到文件，反向用到时再取回，峰值就降低了，而且什么也不用重计算。这就是**卸载**（offload）：把暂时不用的数据移到下一级存储，不是“卸载软件”的卸载。它比每层一个检查点降得更多吗？两者合用，还会更低吗？
#
# 那么代价在哪里？假设链路够快，每次拷贝都不比同时进行的计算更久。这时训练步的用时，与没有拷贝时一样吗？
#
# </div>

# %%
from course_lib.teaching import language

language()

# %% [markdown]
# <div lang="en">
#
# **Goals** (100 minutes). Write a formula for the time of a step with hidden copies, and compare it with a clock. Write activation offload from nothing. Say which wait orders which two things, and how it is written in `torch.cuda`. Say what offload, checkpoints and both together do to the peak, and which link each needs.
#
# **What to know before**: lesson 01; lesson 02 for saved-tensor hooks and checkpoints.
#
# </div>
# <div lang="zh">
#
# **目标**（100 分钟）：写出拷贝被计算掩盖时一步所需的时间，并与时钟比较；从零写出激活值卸载；说出每一处等待规定了哪两件事的先后，在 `torch.cuda` 里怎么写；说出卸载、检查点以及两者合用时，峰值各会怎样，各需要多快的链路。
#
# **预备知识**：第 01 课；第 02 课里给保存的张量挂的钩子，以及检查点。
#
# </div>

# %%
import inspect
from contextlib import nullcontext
from weakref import WeakKeyDictionary

import torch
from torch.autograd.graph import saved_tensors_hooks

from course_lib.lessons.ledger import ledger
from course_lib.lessons.lesson_04 import exercises, figures, simulation
from course_lib.lessons.lesson_04.steps import metered_step, started_down, started_up, step_peak
from course_lib.memory import MemoryMeter
from course_lib.models import Decoder, deep_mlp, random_tokens
from course_lib.offload import DiskStore, OffloadedOptimizer, offload_activations
from course_lib.offload.device import Cuda
from course_lib.simulated import SimulatedDevice
from course_lib.teaching import predictions, table, text, timelines

# %% [markdown]
# ## 4.1 Four tiers / 四个存储层级
#
# <div lang="en">
#
# Data may lie on several **tiers**: on the chip, in the device's memory, in the host's, on a disk. The **lower tier** is the one farther from the arithmetic. The numbers are from an H100's data sheet and a usual server; bandwidths count one direction.
#
# </div>
# <div lang="zh">
#
# 数据可以放在几个**存储层级**上：芯片上、设备内存（在 GPU 上就是显存）、主机内存、磁盘。**下一级存储**指离计算更远的那个存储层级。图中的数取自 H100 的数据手册和常见的服务器；链路的带宽按单向计。
#
# </div>

# %% slide="result"
figures.draw_tiers()

# %% [markdown] slide={"en": "989 TFLOP/s, and 63 GB/s to the host.\n\n**Guess first.** How many FLOPs per byte does a copy need to hide?", "zh": "989 TFLOP/s，到主机 63 GB/s。\n\n**先猜**：每搬一个字节，至少要做多少 FLOPs，拷贝才能被掩盖？"}
# <div lang="en">
#
# A copy can hide behind the matrix products that run at the same time, if it takes no longer than they do. So the network must do enough FLOPs for each byte: the device's FLOPs per second divided by the link's bytes per second. This number is the machine's **threshold**. The FLOPs that the network does for each byte it moves are its **arithmetic intensity** towards the lower tier.
#
# **Guess first:** a GPU with 989 TFLOP/s (H100, dense bf16) behind PCIe 5. How many FLOPs does each byte need?
#
# </div>
# <div lang="zh">
#
# 只要一次拷贝不比同时进行的矩阵乘法更久，它就能被掩盖。所以每搬一个字节，网络至少要做一定数量的 FLOPs，也就是设备每秒的 FLOPs 除以链路每秒的字节。这个数叫**阈值**，由机器决定。网络每搬一个字节做多少 FLOPs，则是它相对于下一级存储的**算术强度**。
#
# **先猜**：一块 989 TFLOP/s 的 GPU（H100，稠密 bf16），经 PCIe 5 拷贝。每搬一个字节，至少要做多少 FLOPs？
#
# </div>

# %% slide="result"
rate = 989e12  # FLOP/s
links = {"NVMe": 7e9, "PCIe 3": 15.75e9, "PCIe 4": 31.5e9, "PCIe 5": 63e9, "NVLink-C2C": 450e9}
rows = [(name, round(rate / bandwidth)) for name, bandwidth in links.items()]
table(["link", "FLOPs per byte"], rows)

# %% [markdown]
# <div lang="en">
#
# Over PCIe 5 nearly 16,000; over the other links from 2,000 to 141,000. But a threshold says only that copies *can* hide. Do they?
#
# </div>
# <div lang="zh">
#
# 经 PCIe 5 要将近 16,000，经其余的链路要 2,000 到 141,000。但是，阈值只说拷贝**可以**被掩盖。真的被掩盖了吗？
#
# </div>

# %% [markdown]
# ## 4.2 Fetching ahead / 提前取回
#
# <div lang="en">
#
# A `SimulatedDevice` works like a GPU: one stream computes, one engine copies to the host (D2H, as profilers write), and another copies to the GPU (H2D). Operators really run here. Its clock counts only the FLOPs of matrix products and the bytes on the links, so GELU takes no time.
#
# The network has sixteen layers of Linear and GELU. A layer's forward takes $f$ seconds, its backward $g = 2 f$. It saves two storages of $B$ = 2.048 MB, the inputs of Linear and of GELU. Copying one takes $c$ seconds. The link is exactly at the threshold: a layer's two copies take as long as its forward, $2 c = f$.
#
# </div>
# <div lang="zh">
#
# `SimulatedDevice` 模仿 GPU：一条流做计算，一个引擎负责换出（D2H，性能分析器里用这个名字），另一个引擎负责换入（H2D）。算子真的在本机运行。它的时钟只计矩阵乘法的 FLOPs 和链路上的字节，所以 GELU 不花时间。
#
# 网络有十六层，每层是一个 Linear 和一个 GELU。一层的前向要 $f$ 秒，反向要 $g = 2 f$ 秒。每层保存两份存储区（storage），各 $B$ = 2.048 MB，分别是 Linear 和 GELU 的输入。拷贝一份要 $c$ 秒。链路正好在阈值上，也就是说，一层的两次拷贝与它的前向一样久，$2 c = f$。
#
# </div>

# %%
batch = torch.linspace(-1, 1, 2000 * 256).view(2000, 256)
B, f = batch.nbytes, 2 * 2000 * 256**2 / 1e12  # bytes of a storage, seconds of a layer's forward


def step_on_device(p, link, in_flight=2):
    links = {"up_bytes_per_second": link, "down_bytes_per_second": link}
    with SimulatedDevice(flops_per_second=1e12, **links) as device:
        network, x = device.move(deep_mlp(depth=16, width=256)), device.move(batch)
        for parameter in network.parameters():
            parameter.grad = torch.zeros_like(parameter)
        began, held = device.seconds, device.live_bytes
        with offload_activations(min_bytes=1 << 16, prefetch=p, in_flight=in_flight):
            loss = network(x).sum()
        loss.backward()
    return device, began, held


# %% [markdown] slide={"en": "Two copies take as long as a layer's forward.\n\n**Guess first.** Each storage is fetched when it is needed. How much longer is the step?", "zh": "两次拷贝与一层的前向一样久。\n\n**先猜**：轮到哪个算子，才取它要的那份存储区。这一步会久多少？"}
# <div lang="en">
#
# Suppose that backward fetches each storage when the operator that uses it is next. **Guess first:** without copies the step takes 12.3 ms. How long does the step take with them?
#
# </div>
# <div lang="zh">
#
# 假设反向时轮到哪个算子，才去取它要用的那份存储区。**先猜**：不拷贝时，这一步要 12.3 毫秒。加上这些拷贝，要多久？
#
# </div>

# %% slide="result"
threshold = 2 * B / f  # bytes a second: two copies in the time of one layer's forward
plain = 47 * f  # 16 f + 16 g, less the gradient of the batch, f
runs = {p: step_on_device(p, threshold) for p in (0, 1, 2)}
figures.draw_step(0, runs[0], plain)

# %% [markdown] slide={"en": "When backward begins to use storage 5, the fetch of storage $5 + p$ starts.\n\n**Guess first.** How long is the step with $p$ = 1, 2?", "zh": "反向开始使用第 5 份存储区时，启动第 $5 + p$ 份的取回。\n\n**先猜**：$p$ = 1、2 时各要多久？"}
# <div lang="en">
#
# In forward, copies to the host run next to the products. In backward, compute waits for every copy to the GPU.
#
# So let these copies start earlier. Number the storages in the order in which backward uses them. With `prefetch=2`, when backward begins to use storage 5, the fetch of storage 7 starts. In general, when backward begins to use storage $i$, the fetch of storage $i + p$ starts.
#
# **Guess first:** how long does the step take with $p = 1$, and with $p = 2$?
#
# </div>
# <div lang="zh">
#
# 前向时，换出与矩阵乘法同时进行。反向时，每一次换入，计算都要停下来等。
#
# 那就早一点开始换入。把存储区按反向使用的顺序编号。`prefetch=2` 时，反向开始使用第 5 份时，启动第 7 份的取回。一般地，反向开始使用第 $i$ 份时，启动第 $i + p$ 份的取回。
#
# **先猜**：$p = 1$ 时这一步要多久？$p = 2$ 呢？
#
# </div>

# %% slide="result"
figures.draw_step(1, runs[1], plain)

# %% slide="result"
figures.draw_step(2, runs[2], plain)

# %% [markdown]
# <div lang="en">
#
# With $p = 2$ the copies add only 1% to the time. The last $p + 1$ storages stay on the device, because backward needs them first, so 31, 30 and 29 of 32 are copied.
#
# **Exercise 1.** Type the seconds of forward and backward for $L$ layers and $p$ = 0, 1, 2. The link may now be faster or slower, so any of $f$, $g$ and $c$ may be the longest. In backward, a layer first needs GELU's storage, which takes no time, then the Linear's, for its products ($g$). Copies in one direction take turns. (Errors up to 9% are allowed, because a step's ends differ from its middle.)
#
# </div>
# <div lang="zh">
#
# $p = 2$ 时，拷贝只多花 1% 的时间。最后 $p + 1$ 份存储区不搬，留在设备上，因为反向最先用到它们。所以 $p$ = 0、1、2 时，32 份里分别拷贝 31、30、29 份。
#
# **练习 1。** 写出 $L$ 层的前向加反向要多少秒，$p$ = 0、1、2 都要对。现在链路可快可慢，所以 $f$、$g$、$c$ 之中谁最长都有可能。反向时，一层先要 GELU 的存储区（GELU 不花时间），再要 Linear 的，然后做矩阵乘法（$g$）。同一方向的拷贝一个接一个。（容许 9% 的误差，因为一步的首尾与中间略有不同。）
#
# </div>


# %% minutes=11
def step_time(L, f, g, c, p):
    return None


exercises.check_step_time(step_time)


# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not exercises.check_step_time.accepted:

    def step_time(L, f, g, c, p):
        backward = {0: g + 2 * c, 1: c + max(g, c), 2: max(g, 2 * c)}[p]
        # The first layer hands no gradient on, which saves f.
        return L * max(f, 2 * c) + L * backward - f


exercises.check_step_time(step_time)
### END SOLUTION

# %% slide="result"
clock = {(c, p): simulation.clock(16, c, p) for c in (0.25, 0.5, 1, 2) for p in (0, 1, 2)}
figures.draw_times(step_time, clock)

# %% [markdown] slide={"en": "$p$ hides the copies to the GPU.\n\n**Guess first.** Only one copy to the host may be unfinished at a time. Does forward slow down?", "zh": "$p$ 掩盖的是换入。\n\n**先猜**：如果同时只许一次换出没有完成，前向会变慢吗？"}
# ## 4.3 Copies in flight / 在途的拷贝
#
# <div lang="en">
#
# The memory of a storage is free only when its copy to the host is finished, so compute must not run far ahead of these copies. `in_flight` says how many of them may be unfinished while compute goes on. With `in_flight=1`, when the copy of storage 5 starts, compute waits until the copy of storage 4 is finished. With `in_flight=2`, compute waits only for storage 3. (The default is 2 on CUDA and 1 on a CPU. All figures above use 2.)
#
# **Guess first:** does forward take longer with `in_flight=1`?
#
# </div>
# <div lang="zh">
#
# 一份存储区的换出完成之后，它的内存才能释放，所以计算不能比换出快太多。`in_flight` 规定计算继续进行时，最多有几次换出可以还没有完成，也就是**在途**（in flight）。`in_flight=1` 时，第 5 份的换出一启动，计算就停下来，等第 4 份的换出完成。`in_flight=2` 时，只要等第 3 份完成。（默认值在 CUDA 上是 2，在 CPU 上是 1。上面各图都是 2。）
#
# **先猜**：`in_flight=1` 时，前向会变慢吗？
#
# </div>

# %% slide="result"
one_in_flight = step_on_device(2, threshold, in_flight=1)
figures.draw_forward(one_in_flight, 8 * f)

# %% slide="result"
cases = {(0, 2): runs[0], (1, 2): runs[1], (2, 2): runs[2], (2, 1): one_in_flight}
times = {case: (device.seconds - began) / plain for case, (device, began, _) in cases.items()}
above = [round((device.peak_bytes - held) / B, 2) for device, _, held in cases.values()]
rows = [(*case, round(times[case], 3), peak) for case, peak in zip(cases, above, strict=True)]
columns = ["fetched ahead, p", "copies in flight", "time (× baseline)"]
table([*columns, "peak above the start (in units of B)"], rows)

# %% [markdown]
# <div lang="en">
#
# With one copy in flight, forward takes 1.5 times as long. A layer saves its two storages one directly after the other, so in each layer compute waits for the first copy, $c = f/2$. So both settings are needed: two storages fetched ahead hide the copies to the GPU, and two copies in flight hide those to the host.
#
# The price is memory. With two copies in flight the peak here is $(p + 4)\,B$: the last $p + 1$ storages, two in flight, and one that is being computed.
#
# </div>
# <div lang="zh">
#
# 只许一次换出在途时，前向要 1.5 倍的时间。这是因为每层的两份存储区紧挨着保存，计算在每一层都要停下来，等第一次拷贝完成，也就是等 $c = f/2$ 那么久。所以两项设置缺一不可：提前取回两份，可以掩盖换入；允许两次换出同时在途，可以掩盖换出。
#
# 代价是内存。两次换出同时在途时，这里的峰值是 $(p + 4)\,B$，包括最后的 $p + 1$ 份、换出还没有完成的两份，以及正在计算的一份。
#
# </div>

# %% [markdown] slide={"en": "Two hooks: **pack** copies a storage out, **unpack** brings it back.\n\nWhat must not move? What moves once? When is it released?", "zh": "两个钩子：**pack** 把存储区换出，**unpack** 取回来。\n\n什么不该搬？什么只搬一次？什么时候释放？"}
# ## 4.4 From nothing / 从零写起
#
# <div lang="en">
#
# An activation is freed when nothing refers to it any more, neither autograd's saved tensors nor your own variables. So a function that merely copies its input to the lower tier frees nothing (section 4.16). The two hooks of lesson 02 do free it, because autograd then keeps what the first hook returns. They follow four rules:
#
# - A **parameter** never moves, because the model keeps it in any case. A Linear saves `weight.t()`, a view, so compare storages and not tensors.
# - A **storage** moves once, even if several operators save it, and once more if it is changed in place in between. `tensor._version` counts these changes.
# - The second hook returns the **view** that was saved, with its shape, stride and offset.
# - When backward no longer needs an activation, its copy in the lower tier is **released**, too.
#
# </div>
# <div lang="zh">
#
# 只有当一个激活值不再被任何地方引用时，它的内存才会释放。引用它的有 autograd 保存的张量，也可能有你自己的变量。所以，一个函数如果只是把输入拷贝到下一级存储，就什么也没有释放（4.16 节）。要靠第 02 课的两个钩子：有了它们，autograd 保存的就不再是张量，而是第一个钩子的返回值。两个钩子要遵守四条规则：
#
# - **参数**从不搬，因为模型反正要留着它。Linear 保存的是视图 `weight.t()`，所以要比较存储区，而不是比较张量。
# - 一份**存储区**只搬一次，哪怕有几个算子保存它。如果其间被原地修改过，就要再搬一次。`tensor._version` 记着修改了几次。
# - 第二个钩子返回的，必须是当初保存的那个**视图**，形状、步幅、偏移都一样。
# - 反向不再需要某个激活值时，它在下一级存储里的副本也要**释放**。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# The exercise uses these names:
#
# - `store` is the lower tier, and `stay` is the set of storages that must not move.
# - `room = store.put(row)` copies a row of numbers to the lower tier. `room.get()` starts the copy back and returns a function. Calling it, `room.get()()`, waits for the row and returns it. When nothing refers to `room` any more, its bytes in the lower tier are free again.
# - `rooms` maps each storage to its version and its room. When a storage is freed, its entry disappears. (Its address would not do as the key, because the allocator gives it to the next tensor.)
#
# **Exercise 2.** Fill in the two hooks. `pack` gets a tensor and returns what the graph keeps in its place. `unpack` gets that back and returns the tensor, by `row.as_strided(shape, stride, offset)`.
#
# </div>
# <div lang="zh">
#
# 练习里用到这些名字：
#
# - `store` 代表下一级存储，`stay` 是不许搬走的存储区的集合。
# - `room = store.put(row)` 把一行数换出到下一级存储。`room.get()` 启动换入，并返回一个函数；调用它，即 `room.get()()`，就等到这一行数取回来，并返回这一行。`room` 不再被引用时，它在下一级存储里占的字节就空出来了。
# - `rooms` 记录每份存储区的版本和它的 `room`。存储区释放之后，对应的记录会自动消失。（不能用地址作键，因为分配器会把它再分给下一个张量。）
#
# **练习 2。** 写出两个钩子。`pack` 接收一个张量，它的返回值由计算图代为保存；`unpack` 接收这个返回值，用 `row.as_strided(shape, stride, offset)` 恢复出张量并返回。
#
# </div>


# %% minutes=14
def whole(tensor):  # all of its storage, in one row
    count = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.detach().as_strided((count,), (1,), 0)


def offloading(store, stay):
    rooms = WeakKeyDictionary()  # storage → the version that was moved, and its room

    def pack(tensor):
        return tensor

    def unpack(packed):
        return packed

    return saved_tensors_hooks(pack, unpack)


exercises.check_offloading(offloading)


# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not exercises.check_offloading.accepted:

    def offloading(store, stay):
        rooms = WeakKeyDictionary()

        def pack(tensor):
            storage, version = tensor.untyped_storage(), tensor._version
            if storage in stay:
                return tensor.detach()
            if storage not in rooms or rooms[storage][0] != version:
                rooms[storage] = version, store.put(whole(tensor))
            room = rooms[storage][1]
            return room, tensor.shape, tensor.stride(), tensor.storage_offset()

        def unpack(packed):
            if isinstance(packed, torch.Tensor):
                return packed
            room, *view = packed
            return room.get()().as_strided(*view)

        return saved_tensors_hooks(pack, unpack)


exercises.check_offloading(offloading)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# Before any claim of saving: are the gradients of the course's decoder equal, bit by bit? On a CPU the lower tier is a file. The cell compares your hooks and the library's `offload_activations`. The library does not move small storages (section 4.17).
#
# </div>
# <div lang="zh">
#
# 看省了多少内存之前，先检查课程解码器的梯度是否逐比特相等。在 CPU 上，下一级存储是文件。下面比较你写的钩子和课程库的 `offload_activations`。太小的存储区，课程库不搬（4.17 节）。
#
# </div>


# %%
def make_decoder():
    return Decoder(vocabulary=2048, hidden=256, heads=8, layers=8, sequence=128)


decoder = make_decoder()


def gradients(context):
    decoder.zero_grad()
    with context:
        loss = decoder.loss(random_tokens(batch=8, sequence=128, vocabulary=2048))
    loss.backward()
    return [parameter.grad for parameter in decoder.parameters()]


# %% slide="result"
stay = {parameter.untyped_storage() for parameter in decoder.parameters()}
expected, ways = gradients(nullcontext()), {"yours": offloading(DiskStore(), stay)}
ways["the library"] = offload_activations(DiskStore(), min_bytes=1 << 17)
table(["", "equal"], [(k, all(map(torch.equal, expected, gradients(c)))) for k, c in ways.items()])

# %% [markdown] slide={"en": "A stream does its work in order. Two streams know nothing of each other.\n\nAn **event** marks a place in one. Who waits for it?", "zh": "一条流按顺序做事；两条流互不知情。\n\n**事件**是一条流里的记号。谁该等它？"}
# ## 4.5 Streams and events / 流与事件
#
# <div lang="en">
#
# The host starts operations and goes on without waiting for the results. A **stream** executes its operations one after the other. Operations on two streams may run in any order, unless one stream waits for an **event** of the other. An event marks the end of all the operations that a stream has been given so far. `device.wait(event)` makes the current stream wait for the event, and `device.finish(event)` makes the host wait for it. This is how the library starts a copy, on any device:
#
# </div>
# <div lang="zh">
#
# 主机只管下达任务，不等结果就继续往下走。一条**流**（stream）按顺序逐个执行自己的任务。两条流的任务谁先谁后没有规定，除非一条流等待另一条流的**事件**（event）。事件是一个记号，标在那条流此前接到的所有任务之后。`device.wait(event)` 让当前的流等到这个记号为止，`device.finish(event)` 则让主机等。不论在哪种设备上，课程库都这样启动一次拷贝：
#
# </div>

# %%
print(inspect.getsource(SimulatedDevice.copy))

# %% slide="result"
figures.draw_order()

# %% [markdown]
# <div lang="en">
#
# Each of these waits has a reason:
#
# - **Made**, then copied to the host: the copy must not read a storage before it has been computed.
# - Copied to the host, then **released**: the allocator gives released memory to the next tensor at once, so the copy must have read it by then.
# - Copied to the host, then read by the **host** or copied back: the numbers must have arrived.
# - Copied to the GPU, then **used**: no operator may use a storage before its copy has finished.
#
# </div>
# <div lang="zh">
#
# 每一处等待都有原因：
#
# - 先**算好**，再换出：数据还没有算好，拷贝就不能去读它。
# - 先换出，再**释放**：拷贝还没有读完，这份存储区的内存就不能释放，因为分配器会立刻把它分给下一个张量。
# - 先换出，再由**主机**读，或者再换入：数要先到齐。
# - 先换入，再**使用**：拷贝还没有完成，任何算子都不能使用这份存储区。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# With `torch.cuda` you write:
#
# | the library | `torch.cuda` | meaning |
# |---|---|---|
# | `device.side("down")` | `torch.cuda.Stream()` | a second stream |
# | `device.event()` | `torch.cuda.current_stream().record_event()` | mark the orders so far |
# | `device.wait(event)` | `torch.cuda.current_stream().wait_event(event)` | the stream waits |
# | `device.finish(event)` | `event.synchronize()` | the host waits |
# | `device.used(tensor)` | `tensor.record_stream(torch.cuda.current_stream())` | keep this memory until the stream is done with it |
# | `device.pinned(shape, dtype)` | `torch.empty(shape, dtype=dtype, pin_memory=True)` | **pinned memory**: host memory that the system cannot move, so the GPU copies it by itself |
#
# These are the library's own lines for CUDA. Section 4.21 has what a GPU measured with them:
#
# </div>
# <div lang="zh">
#
# 同样的事，用 `torch.cuda` 这样写：
#
# | 课程库 | `torch.cuda` | 含义 |
# |---|---|---|
# | `device.side("down")` | `torch.cuda.Stream()` | 另一条流 |
# | `device.event()` | `torch.cuda.current_stream().record_event()` | 在此前的任务之后做记号 |
# | `device.wait(event)` | `torch.cuda.current_stream().wait_event(event)` | 流等待 |
# | `device.finish(event)` | `event.synchronize()` | 主机等待 |
# | `device.used(tensor)` | `tensor.record_stream(torch.cuda.current_stream())` | 这条流用完之前，保留这块内存 |
# | `device.pinned(shape, dtype)` | `torch.empty(shape, dtype=dtype, pin_memory=True)` | **锁页内存**：系统不能挪动的主机内存，GPU 可以自己拷贝 |
#
# 下面是课程库为 CUDA 写的代码。在 GPU 上的实测结果见 4.21 节：
#
# </div>

# %%
for name in ("on", "side", "event", "wait", "finish", "used", "pinned"):
    print(inspect.getsource(getattr(Cuda, name)))

# %% [markdown] slide={"en": "One wait is missing.\n\n**Guess first.** Is the gradient wrong?", "zh": "少了一处等待。\n\n**先猜**：梯度会错吗？"}
# ## 4.6 One wait taken away / 少了一处等待
#
# <div lang="en">
#
# If a wait is missing, the simulated device reports a **race**: two accesses to the same memory whose order nothing determines. The numbers may still be right, but only by luck. Two modes remove this luck. `late` runs each copy as late as the waits allow, and `early` runs everything else as early as they allow. Each row of the table offloads a network of five layers without one of the waits. **Guess first:** in which rows is the gradient wrong?
#
# </div>
# <div lang="zh">
#
# 少了一处等待，模拟设备就会报告**竞争**（race），意思是有两次操作访问同一块内存，而它们的先后没有任何规定。这时结果也可能是对的，但只是碰巧。设备有两种模式可以排除这种巧合。在遵守各处等待的前提下，`late` 让每次拷贝尽量晚，`early` 让其余的操作尽量早。下表卸载一个五层的网络，每次去掉一处等待。**先猜**：哪几行的梯度是错的？
#
# </div>

# %% slide="result"
simulation.without_waits()

# %% [markdown]
# <div lang="en">
#
# In the normal mode the gradient is right in every row. In diffusers' pull request 13502, a `wait_stream` was missing between copying weights to the GPU and using them. A pure-PyTorch version gave wrong numbers in about 98% of iterations on five identical GPUs, and never with the wait.
#
# </div>
# <div lang="zh">
#
# 照常运行时，每一行的梯度都对。在 diffusers 的合并请求 13502 里，权重换入 GPU 之后、使用之前，少了一处 `wait_stream`。化简成纯 PyTorch 代码后，在同一型号的五块 GPU 上约有 98% 的迭代给出错误的数，补上等待后一次也没有。
#
# </div>


# %% [markdown]
# <div lang="en">
#
# `started_down(device, y)` starts a copy to the host, and `started_up(device, host)` a copy to the GPU. Both return the new tensor, and the event at the end of the copy.
#
# **Exercise 3.** Add the one missing line to each function: `device.wait(copied)`, or `device.finish(copied)` only where the host has to wait. The check runs all three in each mode, and looks at races and at numbers.
#
# </div>
# <div lang="zh">
#
# `started_down(device, y)` 启动一次换出，`started_up(device, host)` 启动一次换入。两者都返回新的张量，以及标在拷贝末尾的事件。
#
# **练习 3。** 给每个函数补上缺的那一行：`device.wait(copied)`；非要主机等不可的地方，才用 `device.finish(copied)`。检查会在每种模式下运行这三个函数，既看竞争，也看数值。
#
# </div>


# %% minutes=9
def read(device, x):
    y = x * 2
    host, copied = started_down(device, y)
    return host.tolist()


def use(device, host):
    x, copied = started_up(device, host)
    return x * 2


def let_go(device, x):
    y = x * 2
    host, copied = started_down(device, y)
    del y  # its memory is free ...
    z = x * 100  # ... and z gets it
    device.finish(copied)
    return host.tolist()


exercises.check_waits((read, use, let_go))

# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not exercises.check_waits.accepted:

    def read(device, x):
        y = x * 2
        host, copied = started_down(device, y)
        device.finish(copied)
        return host.tolist()

    def use(device, host):
        x, copied = started_up(device, host)
        device.wait(copied)
        return x * 2

    def let_go(device, x):
        y = x * 2
        host, copied = started_down(device, y)
        device.wait(copied)
        del y
        z = x * 100
        device.finish(copied)
        return host.tolist()


exercises.check_waits((read, use, let_go))
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# `read` shows the classic mistake: `y.to("cpu", non_blocking=True)`, read at once. No error is raised; the numbers are what the memory held before. The next cell runs it in `late` mode, with the wait and without:
#
# </div>
# <div lang="zh">
#
# `read` 少了等待，就是一个经典错误：`y.to("cpu", non_blocking=True)` 之后马上就读。程序不报任何错，读到的却是那块内存里原来的数。下面在 `late` 模式下运行，一次不等待，一次等待：
#
# </div>

# %% slide="result"
numbers_read = [simulation.read_late(waits) for waits in (False, True)]
rows = zip(("reads at once", "waits, then reads"), map("`{}`".format, numbers_read), strict=True)
table(["host", "numbers read"], rows)

# %% [markdown] slide={"en": "The course's decoder: offload, or checkpoints, or both.\n\n**Guess first.** Which of the three peaks lowest? Which moves least?", "zh": "课程的解码器，可以卸载、用检查点，或两者合用。\n\n**先猜**：三者之中谁的峰值最低？谁搬得最少？"}
# ## 4.7 The decoder: moved, forgotten, or both / 解码器：搬走、忘掉，还是都用
#
# <div lang="en">
#
# A layer of the course's decoder saves 20 times as many bytes as its input has. With a checkpoint around each layer, it saves only its input. **Guess first:** how high is the peak of a step with offload, with checkpoints, and with both?
#
# </div>
# <div lang="zh">
#
# 课程解码器的一层，保存的字节是它的输入的 20 倍。每层加一个检查点，就只保存输入。**先猜**：只卸载、只用检查点、两者合用，一步的峰值各是多少？
#
# </div>

# %% slide="result"
steps = {(k, p): metered_step(k, p) for k in (False, True) for p in (None, 1)}
names = "plain", "offload", "checkpoint", "checkpoints and offload"
rows = [(n, f"{m.peak_bytes:,}", d) for n, (m, d) in zip(names, steps.values(), strict=True)]
table(["step", "peak (bytes)", "copied to the file (bytes)"], rows)

# %% jupyter={"source_hidden": true} slide="result"
two = {name: steps[k, 1][0] for k, name in ((False, "offload"), (True, "checkpoints and offload"))}
title = "With checkpoints a whole layer is in memory at once, and the peak is 9 MB higher"
timelines(two, title=title, panel_height=1.9)

# %% [markdown] slide={"en": "124.8 MB against 134.0: with checkpoints on top the peak is **higher**.\n\nTheir inputs are gone by then, and a whole layer is back.", "zh": "124.8 MB 对 134.0 MB，再加检查点，峰值反而**更高**。\n\n峰值那一刻，被搬走的输入反正不在了；而整整一层都回来了。"}
# <div lang="en">
#
# 134,006,104 bytes. Both together peak at the same byte as checkpoints alone, and 9 MB higher than offload alone. The peak is at the end of backward. By then the inputs of the later layers have been freed, whether they were moved or not. The activations of the **first** layer are still live. Offload brings them back one tensor at a time, and a checkpoint recomputes all of them at once. A saving counts only at the moment of the peak (section 2.5).
#
# Is it a mistake, then, to use both? Together they move only 1/18 of the bytes, which pays on a slow link. And with more than about $12 h$ tokens per step (here $4 h$), moving the inputs lowers the peak. A layer's input is then larger than its gradients, which backward creates while it frees inputs. More layers add both in proportion.
#
# </div>
# <div lang="zh">
#
# 134,006,104 字节。两者合用时，峰值与只用检查点时一样，一个字节也没有少，比只卸载还高 9 MB。峰值在反向快结束时，这时后面各层的输入无论搬走过没有，都已经用完并释放。仍然存活的，是**第一层**的激活值。卸载一次只取回一个张量，检查点则把它们一次全部重新算出来。内存要在峰值那一刻省下来，才算数（2.5 节）。
#
# 那么合用就错了吗？合用时要搬的字节，是只卸载时的 1/18，链路慢的时候就很划算。一步里的 token 超过约 $12 h$ 个时（这里是 $4 h$ 个），把输入搬走还能降低峰值。这时一层的输入比它的梯度大，而反向一边产生梯度，一边释放输入。增加层数时，两者按同样的比例增加。
#
# </div>

# %%
now = (20e9, 2, False), (2e9, 2, True)  # link, p, checkpointed
simulation.decoder_table({lanes: simulation.simulated_decoder(*lanes) for lanes in now})

# %% [markdown] slide={"en": "On a link of 2 GB/s, offload alone takes almost four times as long.\n\nHow fast must the link be?", "zh": "链路为 2 GB/s 时，只卸载要花基线将近四倍的时间。\n\n链路到底要多快？"}
# <div lang="en">
#
# This is the same step on the simulated device at $10^{12}$ FLOP/s, with $p$ = 2 and two copies in flight (without Adam). On the fast link, offload alone takes almost no extra time, and checkpoints cost a fifth. On the slow link, offload alone takes almost four times as long as the plain step. With checkpoints, so few bytes move that their copies are hidden. How fast must the link be, then?
#
# </div>
# <div lang="zh">
#
# 这是同一个训练步在模拟设备上的用时，算力为 $10^{12}$ FLOP/s，$p$ = 2，同时有两次拷贝在途（不含 Adam）。链路快时，只卸载几乎不多花时间，而检查点要多花五分之一。链路慢时，只卸载要花基线将近四倍的时间；如果再加上检查点，要搬的字节就少得多，拷贝可以被计算掩盖。那么，链路到底要多快？
#
# </div>

# %% slide="result"
simulation.link_table()

# %% [markdown]
# <div lang="en">
#
# If all activations move, forward does 90 FLOPs for each byte. By the rule of section 4.1, 11 GB/s is enough on this device. On that link the step still takes 14% longer, because 90 is an average, and attention does fewer FLOPs per saved byte. From 17 GB/s on, the copies add at most 5%. If only the inputs of checkpoints move, forward does 1,792 FLOPs per byte. By the rule 0.56 GB/s is enough, and for 5% it takes 0.85 GB/s.
#
# </div>
# <div lang="zh">
#
# 全部激活值都搬时，前向每搬一个字节要计算 90 FLOPs。按 4.1 节的规则，在这台设备上 11 GB/s 的链路就够了。可是在这样的链路上，一步仍要多花 14% 的时间，因为 90 只是平均值，注意力每保存一个字节所做的 FLOPs 要少一些。从 17 GB/s 起，拷贝最多多花 5% 的时间。只搬检查点的输入时，前向每搬一个字节要计算 1,792 FLOPs。按规则 0.56 GB/s 就够，从 0.85 GB/s 起，拷贝最多多花 5% 的时间。
#
# </div>

# %% [markdown] slide={"en": "Adam's state: 8 bytes per parameter, used once per step.\n\n**Guess first.** All of it is offloaded. How high is the peak **during** `step()`?", "zh": "Adam 的状态是每个参数 8 字节，每步只用一次。\n\n**先猜**：全都卸载之后，`step()` **当中**的峰值是多少？"}
# ## 4.8 The optimizer's state, in pages / 优化器状态，分页进出
#
# <div lang="en">
#
# Adam keeps 8 bytes of state per parameter and uses them only once per step. `OffloadedOptimizer` keeps this state in the lower tier, and for fp32 weights its steps equal those of `torch.optim.AdamW` (section 4.18). On a CPU the state returns to memory in **pages**, each with the state of some parameters. While one page is updated, the next one is read and the previous one is written. Between two steps, 55.0 MB less are live. **Guess first:** by how much is the peak of `step()` lower?
#
# </div>
# <div lang="zh">
#
# Adam 为每个参数保存 8 字节的状态，每步只用一次。`OffloadedOptimizer` 把状态放到下一级存储。权重是 fp32 时，它每一步的结果都与 `torch.optim.AdamW` 相等（4.18 节）。在 CPU 上，状态分**页**换入内存，每页是若干个参数张量的状态。更新这一页的同时，读入下一页，写回上一页。步与步之间少占 55.0 MB。**先猜**：`step()` 的峰值会低多少？
#
# </div>

# %% slide="result"
peaks = {"all the state in memory": step_peak(16, fraction=0)}
peaks |= {text("pages of {mib} MiB", mib=mib): step_peak(mib) for mib in (16, 4)}
table(["state", "peak of `step()` (MB)"], [(k, round(v / 1e6, 1)) for k, v in peaks.items()])

# %% [markdown]
# <div lang="en">
#
# With pages of 16 MiB, the default, the peak is only a tenth lower, although nearly half of the 114.2 MB is state. Three pages are in memory at once, and they hold 50.3 MB. With pages of 4 MiB the peak is 67.1 MB (exercise 4 in section 4.18 asks for the formula).
#
# With a GPU, the CPU runs the update. For each parameter it reads weight, gradient and two moments in host memory, and writes weight and moments, 28 bytes in all. At 200 GB/s this takes one second for 7 billion parameters.
#
# </div>
# <div lang="zh">
#
# 每页 16 MiB（默认值）时，峰值只低了十分之一，而 114.2 MB 里将近一半是状态。这是因为内存里同时有三页，共 50.3 MB。每页 4 MiB 时，峰值是 67.1 MB（4.18 节的练习 4 会问公式）。
#
# 使用 GPU 时，更新由 CPU 来做。每个参数要在主机内存里读权重、梯度和两个矩，再写回权重和两个矩，一共读写 28 字节。按 200 GB/s 算，70 亿个参数要一秒。
#
# </div>

# %% [markdown]
# ## 4.9 In your own code / 实际怎么写
#
# <div lang="en">
#
# PyTorch has such hooks in one line, `save_on_cpu` (on a GPU with `pin_memory=True`). They fetch nothing ahead. Here they copy nothing, because `.cpu()` of a CPU tensor is that tensor. So hooks of our own count what they would copy from a GPU, which is every saved tensor:
#
# </div>
# <div lang="zh">
#
# PyTorch 里有现成的钩子 `save_on_cpu`，只要一行代码（在 GPU 上加 `pin_memory=True`）。它不会提前取回。在这里它什么也不拷贝，因为 CPU 张量的 `.cpu()` 就是它自己。所以我们自己写钩子，数一数它在 GPU 上要拷贝多少，也就是把每个保存的张量都算上：
#
# </div>

# %%
saved = []


def noted(tensor):
    saved.append(tensor)
    return tensor


gradients(saved_tensors_hooks(noted, lambda tensor: tensor))
kept = [tensor for tensor in saved if tensor.untyped_storage() not in stay]
total, activations = sum(t.nbytes for t in saved), sum(t.nbytes for t in kept)
once = sum(storage.nbytes() for storage in {t.untyped_storage() for t in kept})
parts = {"`save_on_cpu`": total, "parameters": total - activations}
parts |= {"storages saved again": activations - once, "by the four rules": once}
table(["data to move", "MB"], [(name, round(count / 1e6, 1)) for name, count in parts.items()])

# %% [markdown]
# <div lang="en">
#
# `save_on_cpu` would move 247.7 MB instead of 178.4 MB. The extra bytes are 27.3 MB of parameters, which the GPU keeps anyway, and 41.9 MB of storages moved again.
#
# Hugging Face's `offload=True` moves the inputs of its checkpoints by `save_on_cpu` with pinned memory. Without a GPU, PyTorch's CPU build raises an error, and its CUDA build moves nothing (section 4.15 uses the library):
#
# </div>
# <div lang="zh">
#
# `save_on_cpu` 要搬 247.7 MB，而按那四条规则只要 178.4 MB。多出来的部分里，27.3 MB 是参数，GPU 反正要留着它们；41.9 MB 是重复保存的存储区。
#
# Hugging Face 的 `offload=True` 用 `save_on_cpu` 和锁页内存搬走检查点的输入。没有 GPU 时，PyTorch 的 CPU 版会报错，CUDA 版则什么也不搬（4.15 节改用课程库来卸载这样的模型）：
#
# </div>

# %%
from transformers import LlamaConfig, LlamaForCausalLM

sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8, "vocab_size": 512}
llama = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **sizes))
llama.activation_checkpointing_enable(offload=True)
try:
    llama(random_tokens(8, 63, 512))  # raises in PyTorch's CPU build
except RuntimeError as error:
    assert "pin_memory=True requires a CUDA or other accelerator backend" in str(error)

# %% [markdown]
# <div lang="en">
#
# | where | not run here |
# |---|---|
# | Hugging Face 5.23 Trainer (in 5.17 `gradient_checkpointing`) | `TrainingArguments(activation_checkpointing=True, activation_checkpointing_kwargs={"offload": True})` |
# | TRL, torchtune | `get_act_offloading_ctx_manager(model, max_fwd_stash_size=5)`; `enable_activation_offloading=True` |
# | FSDP2 | `fully_shard(model, offload_policy=CPUOffloadPolicy())`: parameters, gradients and optimizer state |
# | Megatron-LM | `--fine-grained-activation-offloading`; `--optimizer-cpu-offload --optimizer-offload-fraction 0.5` |
# | Transformer Engine | `get_cpu_offload_context(enabled=True, num_layers=8, model_layers=12)` |
# | torchao, DeepSpeed | `CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW)`; `"offload_optimizer": {"device": "cpu"}` |
#
# TRL's `max_fwd_stash_size` is the `in_flight` of section 4.3.
#
# </div>
# <div lang="zh">
#
# | 框架 | 写法（此处未运行） |
# |---|---|
# | Hugging Face 5.23 的 Trainer（5.17 里叫 `gradient_checkpointing`） | `TrainingArguments(activation_checkpointing=True, activation_checkpointing_kwargs={"offload": True})` |
# | TRL、torchtune | `get_act_offloading_ctx_manager(model, max_fwd_stash_size=5)`；`enable_activation_offloading=True` |
# | FSDP2 | `fully_shard(model, offload_policy=CPUOffloadPolicy())`：参数、梯度和优化器状态 |
# | Megatron-LM | `--fine-grained-activation-offloading`；`--optimizer-cpu-offload --optimizer-offload-fraction 0.5` |
# | Transformer Engine | `get_cpu_offload_context(enabled=True, num_layers=8, model_layers=12)` |
# | torchao、DeepSpeed | `CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW)`；`"offload_optimizer": {"device": "cpu"}` |
#
# TRL 的 `max_fwd_stash_size` 就是 4.3 节的 `in_flight`。
#
# </div>

# %% [markdown] slide={"en": "Five sentences that people meet. Hands up before each row: true, partly, or false?", "zh": "五句常见的说法。看每一行之前先举手：成立、部分成立，还是不成立？"}
# ## 4.10 Claims and measurements / 说法与实测
#
# <div lang="en">
#
# These are five common claims.
#
# </div>
# <div lang="zh">
#
# 五句常见的说法。
#
# </div>

# %% slide="result"
figures.what_you_may_have_read(steps, times, numbers_read)

# %% [markdown] slide={"en": "The same step of the same decoder, one technique per row.\n\nThree unlike techniques, and what is left is nearly the same. What is it?", "zh": "同一个解码器的同一步，一种技术一行。\n\n几种技术各不相同，剩下的却差不多。剩下的是什么？"}
# ## 4.11 The ledger / 账本
#
# <div lang="en">
#
# This lesson's row moves all activations to a file and fetches one storage ahead.
#
# </div>
# <div lang="zh">
#
# 本课的这一行把全部激活值移到文件，并提前取回一个存储区。
#
# </div>

# %% slide="result"
meter, down = steps[False, 1]
ledger("04", "all activations to a file", meter, flops=45_097_156_608, moved_bytes=2 * down)

# %% [markdown] slide={"en": "A copy is hidden if products run at the same time, if it starts early enough, and if whatever uses it waits for it.", "zh": "拷贝要被掩盖，得满足三条：同时有矩阵乘法可做，开始得够早，并且用它的一方等它完成。"}
# ## 4.12 Summary / 小结
#
# <div lang="en">
#
# - A copy can hide if the FLOPs per byte reach the machine's threshold at every point of the step, and if it starts early enough. Here two storages fetched ahead hide the copies to the GPU (H2D), and two copies in flight hide those to the host (D2H). Each costs one storage.
# - The hooks move each version of a storage once, never move a parameter, and return views. `save_on_cpu` moves parameters, too, and a storage as often as it is saved.
# - Only a wait orders two streams. If one is missing, the result is right only by luck.
# - At the peak, offload holds single tensors of a layer, but a checkpoint holds the whole layer. Both together move far fewer bytes over a slower link, but here they peak higher than offload alone.
#
# **Next:** [lesson 05](05_gradient_accumulation.ipynb) splits the batch into micro-batches.
#
# </div>
# <div lang="zh">
#
# - 如果每搬一个字节所做的 FLOPs 不少于机器的阈值，而且拷贝开始得够早，拷贝就能被掩盖。这个阈值要在训练步的每一处都达到，只是平均达到还不够。在这里，提前取回两份可以掩盖换入（H2D），允许两次换出同时在途可以掩盖换出（D2H）。每多提前一份，或者每多一次在途的换出，就要多占一份存储区的内存。
# - 两个钩子让每份存储区的每个版本只搬一次，从不搬参数，取回的是原来的视图。`save_on_cpu` 则连参数也搬，而且一份存储区保存几次就搬几次。
# - 流与流之间，只有等待才规定先后。少了一处等待，结果即使对，也只是碰巧。
# - 峰值那一刻，用卸载时内存里只有一层的单个张量，用检查点时则有整整一层。合用时搬的字节少得多，链路慢一些也够用，但在这里峰值高于只用卸载。
#
# **下一步**：[第 05 课](05_gradient_accumulation.ipynb)把批次拆开来算。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **Sources.** Rhu et al. 2016, *vDNN*, arXiv:1602.08124 (offload and prefetch of activations). Rajbhandari et al. 2021, *ZeRO-Infinity*, arXiv:2104.07857 (bandwidth arithmetic). Ren et al. 2021, *ZeRO-Offload*, arXiv:2101.06840 (the update on the CPU). PyTorch tutorial *A guide on good usage of non_blocking and pin_memory()*. huggingface/diffusers 13502, huggingface/accelerate 4175, huggingface/transformers 48444, DeepSpeed 7474 (pull requests). NVIDIA's data sheets of H100 and GH200; PCI-SIG.
#
# </div>
# <div lang="zh">
#
# **出处。** Rhu et al. 2016，*vDNN*，arXiv:1602.08124（激活值的卸载与预取）。Rajbhandari et al. 2021，*ZeRO-Infinity*，arXiv:2104.07857（带宽估算）。Ren et al. 2021，*ZeRO-Offload*，arXiv:2101.06840（在 CPU 上更新）。PyTorch 教程 *A guide on good usage of non_blocking and pin_memory()*。huggingface/diffusers 13502、huggingface/accelerate 4175、huggingface/transformers 48444、DeepSpeed 7474（合并请求）。NVIDIA 的 H100 与 GH200 数据手册；PCI-SIG。
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
# ## 4.13 Which transformers reach the threshold? / 哪些 transformer 够得着阈值？
#
# <div lang="en">
#
# Take $s = 4096$ tokens in 16 bits. Per token, a layer's forward does about $24 h^2 + 2 s h$ FLOPs with a fused causal attention. It saves $34 h$ bytes (lesson 01), or $2 h$ with a checkpoint. The table gives the smallest $h$ at the data sheets' rates, and at half the FLOP/s and 80% of the bandwidth.
#
# </div>
# <div lang="zh">
#
# 设序列长 $s = 4096$，16 位精度。用融合的因果注意力时，每个 token 在一层的前向大约做 $24 h^2 + 2 s h$ 个 FLOPs，保存 $34 h$ 字节（第 01 课）；加了检查点则是 $2 h$ 字节。下表列出最小的 $h$：先按数据手册，再假设算力只达到一半，带宽只达到 80%。
#
# </div>

# %%
figures.draw_threshold(rate, links)

# %%
import math

rows = []
for name, bandwidth in links.items():
    thresholds = [share * rate / bandwidth for share in (1, 0.5 / 0.8)]  # data sheet, reached
    least = [(at * saved - 2 * 4096) / 24 for saved in (34, 2) for at in thresholds]
    rows.append((name, *(max(1, math.ceil(h)) for h in least)))
columns = ["34 h (data sheet)", "34 h (reached)", "2 h (data sheet)", "2 h (reached)"]
table(["smallest h at which copies hide", *columns], rows)

# %% [markdown]
# <div lang="en">
#
# By the data sheets, copies of all activations hide on NVLink-C2C if $h \ge 2773$.
#
# </div>
# <div lang="zh">
#
# 按数据手册，$h \ge 2773$ 时，全部激活值的拷贝在 NVLink-C2C 上能被掩盖。
#
# </div>

# %% [markdown]
# ## 4.14 Your own link, and host memory / 你自己的链路，以及主机内存
#
# <div lang="en">
#
# This cell measures your link. On a CPU it measures copies within memory, and writing to the system's file cache. If a GPU's link is slow, run `nvidia-smi --query-gpu=pcie.link.gen.current,pcie.link.width.current --format=csv` during a copy.
#
# </div>
# <div lang="zh">
#
# 这个单元格测量你的链路。在 CPU 上，它测的是内存内的拷贝，以及系统文件缓存的写入。如果 GPU 的链路很慢，请在拷贝时运行 `nvidia-smi --query-gpu=pcie.link.gen.current,pcie.link.width.current --format=csv`。
#
# </div>

# %% tags=["nbval-ignore-output", "shows-seconds"]
from torch.utils.benchmark import Timer

where = "cuda" if torch.cuda.is_available() else "cpu"
host = torch.ones(64 << 20, dtype=torch.uint8, pin_memory=where == "cuda")
there, file = host.to(where, copy=True), DiskStore().reserve(host.nbytes)
ways = {"copied to the GPU": lambda: there.copy_(host, non_blocking=True)}
ways["copied to the host"] = lambda: host.copy_(there, non_blocking=True)
ways["copied to the file"] = lambda: file.put(host).wait()
seconds = {k: Timer("copy()", globals={"copy": ways[k]}).timeit(3).median for k in ways}
table(["", "GB/s"], [(name, round(host.nbytes / s / 1e9, 1)) for name, s in seconds.items()])

# %% [markdown]
# <div lang="en">
#
# **Host memory** must hold all that moves, for each GPU. With $h = 4096$, 32 layers and one sequence of 4096 tokens, all activations take $34 \cdot 4096 \cdot 4096 \cdot 32$ bytes, 18.3 GB, and checkpointed inputs 1.1 GB. PyTorch rounds each pinned block up to a power of two.
#
# </div>
# <div lang="zh">
#
# **主机内存**要装得下搬走的一切，有几块 GPU 就乘以几。设 $h = 4096$，32 层，一条 4096 个 token 的序列，全部激活值占 $34 \cdot 4096 \cdot 4096 \cdot 32$ 字节，即 18.3 GB；检查点的输入占 1.1 GB。PyTorch 还会把每块锁页内存的大小向上取到二的幂。
#
# </div>

# %% [markdown]
# ## 4.15 With Hugging Face and torch.compile / 卸载与 Hugging Face、torch.compile 配合使用
#
# <div lang="en">
#
# The library's hooks can wrap any forward, such as a Hugging Face model's. Compiled code calls them, too. Does the peak fall?
#
# </div>
# <div lang="zh">
#
# 课程库的钩子可以套在任何前向外面，例如 Hugging Face 模型的前向。编译过的代码同样会调用它们。峰值会降低吗？
#
# </div>


# %%
def llama_peak(compiled, context):
    config = LlamaConfig(num_attention_heads=4, **sizes | {"num_hidden_layers": 4})
    model, ids = LlamaForCausalLM(config), random_tokens(8, 63, 512)
    parts = {"nothing": [], "each layer": model.model.layers, "the model": [model]}
    for module in parts[compiled]:
        module.compile(backend="aot_eager")
    model(ids, labels=ids, use_cache=False).loss.backward()
    model.zero_grad()
    with MemoryMeter(model) as meter:
        with context:
            loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
    return round(meter.peak_bytes / 1e6, 1)


# %%
rows = []
for compiled in ("nothing", "each layer", "the model"):
    ways = nullcontext(), offload_activations(DiskStore(), min_bytes=2**14)
    rows.append((compiled, *(llama_peak(compiled, way) for way in ways)))
table(["compiled", "plain, peak (MB)", "offload, peak (MB)"], rows)

# %% [markdown]
# <div lang="en">
#
# If each layer is compiled alone, offload works. Compiled whole, with its loss, the model is one operator for autograd. It hands its saved tensors to the hooks when forward ends, and needs all of them when backward begins, so the peak stays.
#
# </div>
# <div lang="zh">
#
# 逐层编译时，卸载有效。整个模型连同损失一起编译时，它对 autograd 来说只是一个算子：前向结束时才把保存的张量一起交给钩子，反向一开始又要全部取回，所以峰值不变。
#
# </div>

# %% [markdown]
# ## 4.16 A function that offloads nothing / 一个什么也没卸载的函数
#
# <div lang="en">
#
# This function keeps a copy of an activation in the lower tier, and fetches it in backward. Is the gradient right? Is anything freed?
#
# </div>
# <div lang="zh">
#
# 下面的函数在下一级存储里留一份激活值，反向时再取回来。梯度对不对？有没有释放什么？
#
# </div>


# %%
from torch import nn


class Offload(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.below = x.detach().to("cpu", copy=True)
        return x

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.below.to(gradient.device).requires_grad_()
        with torch.enable_grad():
            x.clone().backward(gradient)  # "restore" the activation's gradient
        return gradient + x.grad


# %%
from course_lib.memory import saved_tensors

first, second = nn.Linear(64, 64), nn.Linear(64, 64)
x = torch.linspace(-1, 1, 64 * 64).view(64, 64)


def loss_with(apply):
    return second(apply(first(x)).sin()).square().sum()


ways = nn.Identity(), Offload.apply
same, doubled = (torch.autograd.grad(loss_with(way), first.weight)[0] for way in ways)
ratio = (doubled / same).median().item()
kept = [saved_tensors(loss_with, way).total_bytes for way in ways]
ratio, kept

# %% [markdown]
# <div lang="en">
#
# The gradient is exactly doubled: once as it came, once through the "restored" activation. And nothing is freed, because the next operator, `sin`, saves the same storage.
#
# </div>
# <div lang="zh">
#
# 梯度恰好翻倍：一份是原样传来的，一份来自“恢复”的激活值。而且什么也没有释放，因为下一个算子 `sin` 仍然保存着同一份存储区。
#
# </div>

# %% [markdown]
# ## 4.17 What yours lacks / 你那个版本缺什么
#
# <div lang="en">
#
# Your hooks fetch nothing ahead, and they switch off autograd's check that no saved tensor was changed in place. The library raises an error if the change comes before the copy is complete, as here.
#
# </div>
# <div lang="zh">
#
# 你的钩子不提前取回张量，还让 autograd 不再检查保存的张量有没有被原地修改。如果张量在拷贝完成之前就被改动，课程库会报错，如下所示。
#
# </div>

# %%
source = torch.randn(1000, 256, requires_grad=True)
with offload_activations(DiskStore(), min_bytes=1):
    y = source * 1
    z = y.sin()
    y.add_(1)  # sin has saved y
try:
    z.sum().backward()
except RuntimeError as refused:
    print(refused)


# %% [markdown]
# ## 4.18 Pages, and a fraction of the state / 页，以及只放一部分状态
#
# <div lang="en">
#
# **Exercise 4.** All of the optimizer's state is offloaded. What is the peak of `step()`, in bytes? Weights and gradients are in memory, too. (Errors up to 6% are allowed, since pages hold the state of whole parameters.)
#
# </div>
# <div lang="zh">
#
# **练习 4。** 优化器的状态全部卸载之后，`step()` 的峰值是多少字节？权重和梯度也在内存里。（允许有 6% 的误差，因为一个参数张量的状态不会拆到两页。）
#
# </div>


# %% minutes=5
def peak_in_step(parameters, page_bytes):
    return None


exercises.check_peak_in_step(peak_in_step)


# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not exercises.check_peak_in_step.accepted:

    def peak_in_step(parameters, page_bytes):
        return 8 * parameters + min(3 * page_bytes, 8 * parameters)


exercises.check_peak_in_step(peak_in_step)
### END SOLUTION


# %%
all_above = step_peak(16, fraction=0)
measured = {mib: step_peak(mib) for mib in (1, 4, 16, 32)}
figures.draw_pages(peak_in_step, measured, plain=all_above)

# %% [markdown]
# <div lang="en">
#
# `OffloadedOptimizer` can also offload a **fraction** of the state, as Megatron-LM's hybrid optimizer does. On a GPU the CPU updates that fraction, and the update overlaps with copies. Five steps equal those of `torch.optim.AdamW`:
#
# </div>
# <div lang="zh">
#
# `OffloadedOptimizer` 也可以只卸载一部分状态，由**比例**（fraction）决定，与 Megatron-LM 的混合优化器一样。在 GPU 上，这一部分由 CPU 更新，与拷贝重叠。做五步，结果与 `torch.optim.AdamW` 相等：
#
# </div>


# %%
from torch import nn


def trained(kind, **options):
    model = deep_mlp(depth=8, width=256)
    optimizer = kind(model.parameters(), **options)
    for step in range(5):
        model(batch.roll(step, 0)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters()), optimizer


weights, _ = trained(torch.optim.AdamW)
runs = [trained(OffloadedOptimizer, fraction=fraction) for fraction in (0, 0.25, 0.5, 1)]
[all(map(torch.equal, weights, found)) for found, _ in runs]

# %%
from course_lib.lessons.lesson_04.steps import peaks_of_fractions

peaks_of_fractions(measured)

# %% [markdown]
# <div lang="en">
#
# Half of the state in pages of 16 MiB saves nothing, because three pages hold that half. Each step writes 8 bytes per offloaded parameter, and every step except the first reads 8 (12 with fp32 master weights):
#
# </div>
# <div lang="zh">
#
# 只卸载一半状态、每页 16 MiB 时，一点也不省，因为三页就装下了这一半。每一步都为每个卸载的参数写 8 字节，从第二步起还要读 8 字节（有 fp32 主权重时各是 12 字节）。上面的五步就是这样：
#
# </div>

# %%
copied, count = runs[-1][1].store.stats, sum(weight.numel() for weight in weights)
rows = [("copied to the file", 5 * 8 * count, copied.bytes_down)]
predictions([*rows, ("copied back", 4 * 8 * count, copied.bytes_up)], unit="bytes")

# %% [markdown]
# ## 4.19 A training script, and the next batch / 一个训练脚本，以及下一个批次
#
# <div lang="en">
#
# This script uses five techniques: prefetched batches (on a GPU from pinned memory), TF32, autocast with a GradScaler (lesson 05), clipping after unscaling, and an offloaded optimizer state. **Guess first:** by how many bytes does the peak fall?
#
# </div>
# <div lang="zh">
#
# 这个脚本同时用了五种技术：预取批次（在 GPU 上用锁页内存），TF32，autocast 加 GradScaler（第 05 课），先还原缩放（unscale）再裁剪梯度，卸载优化器状态。**先猜**：峰值会降低多少字节？
#
# </div>

# %%
from torch import nn

from course_lib.offload import Prefetcher

where = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if where == "cuda" else torch.bfloat16
torch.backends.cuda.matmul.fp32_precision = "tf32"
loader = [random_tokens(8, 64, 2048, seed=seed) for seed in range(3)]


# %%
def step(model, optimizer, scaler, tokens):
    with torch.autocast(where, dtype):
        loss = model.loss(tokens)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return loss.item()


# %%
def training(kind):
    model = Decoder(vocabulary=2048, hidden=128, heads=8, layers=4, sequence=64).to(where)
    optimizer, scaler = kind(model.parameters(), lr=3e-4), torch.amp.GradScaler(where)
    with MemoryMeter(model, optimizer) as meter:
        losses = [step(model, optimizer, scaler, tokens) for tokens in Prefetcher(loader, where)]
    return losses, meter.peak_bytes, sum(parameter.numel() for parameter in model.parameters())


losses, above, parameters = training(torch.optim.AdamW)
same, below, _ = training(OffloadedOptimizer)
print(losses == same)
rows = [("the peak falls by 8 bytes per parameter", 8 * parameters, above - below)]
predictions([*rows, ("peak with offloaded state", above - 8 * parameters, below)])

# %% [markdown]
# <div lang="en">
#
# The prefetcher makes the next batch while this one is used. If making a batch takes $t_1$ and using it $t_2$, each batch takes $\max(t_1, t_2)$ instead of $t_1 + t_2$. Nothing is hidden if making and using need one core, or the GIL:
#
# </div>
# <div lang="zh">
#
# 这个批次还在使用时，预取器就准备下一个。准备要 $t_1$，使用要 $t_2$，一轮就从 $t_1 + t_2$ 缩短到 $\max(t_1, t_2)$。如果准备与使用抢同一个 CPU 核心，或抢 GIL，就什么也掩盖不了：
#
# </div>


# %% tags=["nbval-ignore-output", "shows-seconds"]
from course_lib.lessons.lesson_04.steps import loops

loops()

# %% [markdown]
# ## 4.20 Older claims / 更早的说法
#
# <div lang="en">
#
# The first claim is about section 4.16's function.
#
# </div>
# <div lang="zh">
#
# 第一条说的就是 4.16 节的函数。
#
# </div>

# %%
from course_lib.lessons.lesson_04 import older

older.older_claims(ratio, kept)

# %% [markdown]
# ## 4.21 On a GPU / 在 GPU 上
#
# <div lang="en">
#
# On CUDA the lower tier is pinned host memory. This cell measures your GPU, or shows the figures recorded on an H100 and an H200. On the H200, offloading the activations lowers the peak from 11.2 GB to 4.18 GB and takes 33% longer. `save_on_cpu` takes 95% longer. Its peak is one storage lower, 4.11 GB, because it fetches nothing ahead and waits for each copy. From pinned memory a non-blocking copy returns after 0.02 ms, and from pageable memory only after 28.6 ms.
#
# </div>
# <div lang="zh">
#
# 在 CUDA 上，下一级存储是主机（CPU）的锁页内存。有 GPU 时，这个单元格会现场测量；没有 GPU，就显示在 H100 和 H200 上记录的数据。在 H200 上，卸载激活值把峰值从 11.2 GB 降到 4.18 GB，时间多 33%。`save_on_cpu` 的时间多 95%，峰值低一份存储区，是 4.11 GB，因为它不提前取回，每次拷贝都等到完成。从锁页内存“非阻塞”拷贝，调用 0.02 ms 就返回；从可换页内存拷贝，要 28.6 ms 才返回。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# Why 33%? The step moves 8.7 GB to the host. At 55 GB/s this takes 0.16 s, as long as forward, a third of 0.47 s. So the link is at the threshold, which is not enough for a decoder (section 4.7). A sixteenth of the step's sizes and FLOP/s takes 37% longer on the simulated device.
#
# For eight Linear layers of 8,192 units, the link is twice as fast as the threshold. For nine settings of `prefetch` and `in_flight`, the device had predicted 1.01 to 1.14 times the step without offload. The H200 differed by at most 0.011 (`docs/gpus.md`).
#
# </div>
# <div lang="zh">
#
# 为什么会多 33%？这一步要换出 8.7 GB。链路每秒 55 GB，所以换出要 0.16 秒，与前向一样久，因为前向是 0.47 秒的三分之一。也就是说，链路正好在阈值上，而对解码器这还不够（4.7 节）。各种大小和算力都缩到十六分之一，在模拟设备上，这一步也要多花 37% 的时间。
#
# 八层 Linear、每层 8,192 个单元的网络里，链路比阈值所要求的快一倍。对这个网络，`prefetch` 和 `in_flight` 取九种设置，模拟设备曾预测时间是不卸载的 1.01 到 1.14 倍。H200 的实测值与预测最多相差 0.011（`docs/gpus.md`）。
#
# </div>

# %% tags=["nbval-ignore-output", "shows-device"]
from course_lib.lessons import on_gpu

on_gpu("04")
