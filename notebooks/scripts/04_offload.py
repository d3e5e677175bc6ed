# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] slide={"en": "Every activation goes to a lower tier until backward needs it, and nothing is computed twice.\n\nWhen does a copy cost nothing?", "zh": "每份激活值都先挪到下一级存储，反向用到时再取回，不需要重计算。\n\n拷贝什么时候没有代价？"}
# # 4 What if we move bytes to a lower tier instead? (offload) / 不忘掉，而是挪到下一级存储呢？（卸载）
#
# <div lang="en">
#
# **Offload** moves every activation of a step to a lower tier, such as the host's memory, and fetches it when backward needs it. Nothing is computed twice. A copy should add no time if it takes no longer than the computation that runs meanwhile.
#
# The figure shows recorded times of an eight-layer decoder's step on an H200. Offload lowers the peak from 11.2 GB to 4.2 GB.
#
# </div>
# <div lang="zh">
#
# 把一步里的每份激活值都移到下一级存储（例如主机内存），反向用到时再取回，不需要重计算。这种技术叫做**卸载**（offload），与“卸载软件”无关。拷贝与计算同时进行，所以，只要拷贝不比同时进行的计算更久，这一步就不应变慢。
#
# 下图显示八层解码器的一步在 H200 上用了多久，数据是事先记录的。卸载把峰值从 11.2 GB 降到 4.2 GB。
#
# </div>

# %%
from course_lib.teaching import language

language()

# %% slide="result"
from weakref import WeakKeyDictionary

import torch
from torch.autograd.graph import saved_tensors_hooks

from course_lib.lessons.lesson_04 import exercises, figures, simulation
from course_lib.models import deep_mlp
from course_lib.offload import offload_activations
from course_lib.simulated import SimulatedDevice
from course_lib.teaching import predictions, table, text

figures.draw_recorded()

# %% [markdown] slide={"en": "**Guess first.** Copies and computation run at the same time. Why does the step with offload take 33% longer?", "zh": "**先猜**：拷贝与计算同时进行，为什么加了卸载，这一步还是多花 33% 的时间？"}
# <div lang="en">
#
# **Guess first:** why does the step with offload still take 33% longer? Write down a reason. Section 4.9 tests it.
#
# **Goals** (118 minutes, in two sittings):
#
# - Write a formula for the time of a step with copies, and implement activation offload yourself.
# - Name the two operations whose order each wait fixes.
# - Decide when to combine offload with checkpoints.
# - Explain the 33%.
#
# **What to know before**: lesson 01; lesson 02 for saved-tensor hooks and checkpoints.
#
# </div>
# <div lang="zh">
#
# **先猜**：为什么加了卸载，这一步还是多花 33% 的时间？写下你的理由，4.9 节会检验它。
#
# **目标**（共 118 分钟，分两次学）
#
# - 写出一个公式，算出带拷贝的一步要多久，再从零写出激活值卸载。
# - 说出每一处等待规定了哪两个操作的先后。
# - 判断什么时候该把卸载与检查点合用。
# - 解释这 33%。
#
# **预备知识**：第 01 课，以及第 02 课里的检查点和挂在保存的张量上的钩子。
#
# </div>

# %% [markdown]
# ## 4.1 Four tiers / 四个存储层级
#
# <div lang="en">
#
# Data may be on several **tiers**: on the chip, in the device's memory, in host memory, or on a disk. A **lower tier** is farther from the arithmetic units. The figure's numbers are from an H100's data sheet and a typical server. Each bandwidth counts one direction.
#
# </div>
# <div lang="zh">
#
# 数据可以放在几个**存储层级**上：芯片上、设备内存（GPU 的显存）、主机内存、磁盘。**下一级存储**指离计算单元更远的存储层级。图中的数取自 H100 的数据手册和常见的服务器。链路的带宽按单向计。
#
# </div>

# %% slide="result"
figures.draw_tiers()

# %% [markdown] slide={"en": "989 TFLOP/s, and 63 GB/s to the host.\n\nHow many FLOPs per copied byte are enough to hide a copy?", "zh": "989 TFLOP/s，到主机 63 GB/s。\n\n每搬一个字节，至少要做多少 FLOPs，拷贝才能被掩盖？"}
# <div lang="en">
#
# A copy can hide behind the matrix products that run at the same time, if it takes no longer than these products. So the network must do enough FLOPs for each byte that it moves. The smallest sufficient number of FLOPs per byte is the machine's **threshold**: the device's FLOPs per second, divided by the link's bytes per second. The network's FLOPs per moved byte are its **arithmetic intensity** towards the lower tier. The table shows the thresholds of an H100 with 989 TFLOP/s (dense bf16):
#
# </div>
# <div lang="zh">
#
# 一次拷贝只要不比同时进行的矩阵乘法更久，就能被掩盖。所以网络每搬一个字节，至少要做一定数量的 FLOPs。这个最小数量叫做**阈值**，由机器决定，等于设备每秒的 FLOPs 除以链路每秒的字节数。网络每搬一个字节实际做多少 FLOPs，则叫做网络相对于下一级存储的**算术强度**。下表是一块 H100（稠密 bf16，989 TFLOP/s）用不同链路时的阈值。
#
# </div>

# %% slide="result"
rate = 989e12  # FLOP/s
links = {"NVMe": 7e9, "PCIe 3": 15.75e9, "PCIe 4": 31.5e9, "PCIe 5": 63e9, "NVLink-C2C": 450e9}
rows = [(name, round(rate / bandwidth)) for name, bandwidth in links.items()]
table(["link", "FLOPs per byte"], rows)

# %% [markdown]
# ## 4.2 Fetching ahead / 提前取回
#
# <div lang="en">
#
# At the threshold, computation *can* hide the copies. Does this happen in practice? A `SimulatedDevice` works like a GPU. One stream computes, one engine copies to the host (D2H in profilers), and another copies to the GPU (H2D). The device's clock counts only the FLOPs of matrix products and the bytes on the links, so GELU takes no time.
#
# The network has sixteen layers of Linear and GELU. A layer's forward takes $f$ seconds, and its backward takes $g = 2 f$. For backward, each layer keeps the inputs of Linear and of GELU, two storages of $B$ = 2.048 MB each. Copying one storage takes $c$ seconds. The link is exactly at the threshold: a layer's two copies take as long as its forward, $2 c = f$.
#
# </div>
# <div lang="zh">
#
# 达到阈值，只说明拷贝**可以**被掩盖。实际运行时，拷贝真的被掩盖了吗？`SimulatedDevice` 模仿 GPU，其中一条流做计算，一个引擎负责换出（拷贝到主机，性能分析器写作 D2H），另一个引擎负责换入（拷贝到 GPU，写作 H2D）。这个设备的时钟只计矩阵乘法的 FLOPs 和链路上的字节，所以 GELU 不花时间。
#
# 网络有十六层，每层是一个 Linear 和一个 GELU。一层的前向要 $f$ 秒，反向要 $g = 2 f$ 秒。每层为反向保存两份存储区（storage），各 $B$ = 2.048 MB，分别是 Linear 的输入和 GELU 的输入。拷贝一份存储区要 $c$ 秒。链路正好在阈值上，也就是说一层的两次拷贝与它的前向一样久（$2 c = f$）。
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


# %% [markdown] slide={"en": "Two copies take as long as a layer's forward.\n\n**Guess first.** Each storage is fetched when it is needed. How much longer is the step?", "zh": "两次拷贝与一层的前向一样久。\n\n**先猜**：轮到某个算子，才换入它要用的那份存储区。这一步会久多少？"}
# <div lang="en">
#
# Without copies the step takes 12.3 ms. Suppose that backward fetches each storage only when the next operator needs it. **Guess first:** how long does the step take with the copies?
#
# </div>
# <div lang="zh">
#
# 不拷贝时，这一步要 12.3 ms。假设反向时轮到某个算子，才开始换入它要用的那份存储区。**先猜**：加上这些拷贝，这一步要多久？
#
# </div>

# %% slide="result"
threshold = 2 * B / f  # bytes per second: two copies take as long as one layer's forward
plain = 47 * f  # 16 f + 16 g - f, because the batch needs no gradient
runs = {p: step_on_device(p, threshold) for p in (0, 1, 2)}
figures.draw_steps({0: runs[0]}, plain)

# %% [markdown] slide={"en": "When backward begins to use storage 5, the fetch of storage $5 + p$ starts.\n\nHow long is the step with $p$ = 1, 2?", "zh": "反向刚用到第 5 份存储区时，启动第 $5 + p$ 份的换入。\n\n$p$ = 1、2 时各要多久？"}
# <div lang="en">
#
# In forward, copies to the host run at the same time as matrix products. In the figure's backward, compute waits for every copy to the GPU, so each copy should start earlier. Number the storages from 0 in the order in which backward uses them. When backward begins to use storage $i$, the fetch of storage $i + p$ starts. With $p = 2$ (`prefetch=2`), the fetch of storage 7 starts when backward begins to use storage 5:
#
# </div>
# <div lang="zh">
#
# 前向时换出与矩阵乘法同时进行。上图里，反向的计算每次都要停下来等换入完成，所以换入应该早一点开始。把存储区按反向使用的顺序从 0 开始编号。反向刚用到第 $i$ 份时，启动第 $i + p$ 份的换入。例如 $p = 2$（`prefetch=2`）时，反向刚用到第 5 份，就启动第 7 份的换入。
#
# </div>

# %% slide="result"
figures.draw_steps({p: runs[p] for p in (1, 2)}, plain)

# %% [markdown]
# <div lang="en">
#
# With $p = 2$ the step takes only 1% longer than without copies. Storages 0 to $p$ stay on the device, because backward would fetch them immediately. So with $p$ = 0, 1 and 2, only 31, 30 and 29 of 32 storages are copied.
#
# **Exercise 1.** How many seconds do forward and backward take for $L$ layers and $p$ = 0, 1, 2? Now a layer's forward ($f$), its backward ($g$) or one copy ($c$) may take longest. In backward, a layer first needs GELU's storage, then the Linear's storage for its matrix products ($g$). Copies in one direction run one after the other. (Errors up to 9% are allowed, because the first and last layers are exceptions.)
#
# </div>
# <div lang="zh">
#
# $p = 2$ 时，这一步只比不拷贝时多花 1% 的时间。第 0 份到第 $p$ 份存储区留在设备上，因为即使搬走，反向一开始又要换入。所以 $p$ = 0、1、2 时，32 份存储区里分别只拷贝 31、30、29 份。
#
# **练习 1。** 写出 $L$ 层的前向加反向共要多少秒，$p$ 可以是 0、1、2。这里 $f$、$g$、$c$ 三者都可能最长。反向时，一层先要 GELU 的存储区，再要 Linear 的存储区，然后做矩阵乘法（$g$）。同一方向的拷贝一个接一个。（容许 9% 的误差，因为头几层和末几层与中间的层略有不同。）
#
# </div>


# %% minutes=14
def step_time(L, f, g, c, p):
    return None


exercises.check_step_time(step_time)


# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not exercises.check_step_time.accepted:

    def step_time(L, f, g, c, p):
        backward = {0: g + 2 * c, 1: c + max(g, c), 2: max(g, 2 * c)}[p]
        # The first layer computes no gradient of its input, which saves f.
        return L * max(f, 2 * c) + L * backward - f


exercises.check_step_time(step_time)
### END SOLUTION

# %% [markdown] slide={"en": "Two hooks: **pack** copies a storage out, **unpack** brings it back.\n\nWhat must not move? What moves once? When is it released?", "zh": "两个钩子：**pack** 把存储区换出，**unpack** 把它换入。\n\n什么不该搬？什么只搬一次？什么时候释放？"}
# ## 4.3 From nothing / 从零写起
#
# <div lang="en">
#
# An activation is freed when nothing refers to it. So a function that merely copies its input to the lower tier frees nothing (section 4.16), because autograd still keeps the input. With lesson 02's two hooks, autograd keeps only what the first hook returns. Your hooks must follow four rules:
#
# - A **parameter** never moves, because the model keeps it anyway. A Linear keeps `weight.t()`, a view of the parameter, so recognize parameters by storage.
# - A **storage** moves once, even if several operators keep it. If a storage changes in place after its move, like an input buffer that each batch overwrites, it moves again. `tensor._version` counts the changes.
# - The second hook returns the **view** that the first hook got, with its shape, stride and offset.
# - When backward no longer needs an activation, its copy in the lower tier is **released**.
#
# </div>
# <div lang="zh">
#
# 只有当一个激活值不再被任何地方引用时，它的内存才会释放。所以，一个函数如果只是把输入拷贝到下一级存储，就什么也没有释放（4.16 节），因为 autograd 仍然保存着这个输入。用了第 02 课的两个钩子，autograd 只保存第一个钩子的返回值，激活值因此得以释放。写钩子要遵守四条规则：
#
# - **参数**一律不搬，因为模型反正要留着它。Linear 保存的是参数的视图 `weight.t()`，所以要比较存储区而不是张量。
# - 一份**存储区**只搬一次，哪怕有几个算子都保存了它。上次搬走之后如果又被原地修改过，就要再搬一次。例如，每批数据都会覆盖的输入缓冲区就是这样。`tensor._version` 记着修改次数。
# - 第二个钩子必须返回第一个钩子收到的那个**视图**，形状、步长、偏移都一样。
# - 反向不再需要某个激活值时，它在下一级存储里的副本也要**释放**。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# The code uses these names:
#
# - `store` is the lower tier, `stay` is the set of storages that must not move, and `whole(tensor)` returns a tensor's whole storage as one row of numbers.
# - `room = store.put(row)` copies a row to the lower tier. `room.get()` starts copying the row back and returns a function. `room.get()()` waits for the row and returns it. When nothing refers to `room` any more, its bytes in the lower tier are freed.
# - `rooms` maps each storage to its version and its `room`. When a storage is freed, its entry disappears. (An address cannot be the key, because a later tensor may get the same address.)
#
# **Exercise 2.** Write the two hooks. `pack` gets a tensor and returns what the graph keeps instead. `unpack` gets what `pack` returned and returns the tensor, as `row.as_strided(shape, stride, offset)`, where `row` comes from the lower tier.
#
# </div>
# <div lang="zh">
#
# 代码用到的名字：
#
# - `store` 代表下一级存储，`stay` 是不能搬走的存储区的集合，`whole(tensor)` 把张量的整份存储区排成一行数。
# - `room = store.put(row)` 把一行数换出到下一级存储。`room.get()` 启动换入并返回一个函数。`room.get()()` 等换入完成，再返回这一行数。`room` 不再被引用时，它在下一级存储里占的字节随之释放。
# - `rooms` 记录每份存储区的版本和它的 `room`。存储区释放之后，对应的记录自动消失。（不能用地址作键，因为同一个地址可能再分给后来的张量。）
#
# **练习 2。** 写出两个钩子。`pack` 接收一个张量，它的返回值由计算图保存，用来代替这个张量。`unpack` 接收 `pack` 的返回值，用 `row.as_strided(shape, stride, offset)` 恢复出张量并返回，其中 `row` 是从下一级存储换入的一行数。
#
# </div>


# %% minutes=18
from course_lib.lessons.lesson_04.steps import whole


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
# **End of the first sitting** (60 minutes). You have a formula for a step's time with copies, and hooks that offload activations. The second sitting asks what can go wrong while copies run, how offload changes the decoder's peak, and why the H200's step takes 33% longer.
#
# </div>
# <div lang="zh">
#
# **第一次学习到此结束**（60 分钟）。你已经有了一个公式，能算出带拷贝的一步要多久，还写好了能卸载网络激活值的钩子。第二次学习要弄清三个问题，即拷贝进行时可能出什么错，卸载对解码器的峰值有什么影响，以及 H200 上的那一步为什么多花 33% 的时间。
#
# </div>

# %% [markdown] slide={"en": "$p$ hides the copies to the GPU.\n\nWhat hides the copies to the host?", "zh": "$p$ 掩盖的是换入。\n\n换出靠什么掩盖？"}
# ## 4.4 Copies in flight / 在途的拷贝
#
# <div lang="en">
#
# The memory of a storage is free only when its copy to the host is finished, so compute must not run far ahead of these copies. A copy is **in flight** from its start to its end. `in_flight` is the largest number of copies to the host that can be in flight while compute goes on. With `in_flight=1`, when a copy starts, compute waits until the previous copy is finished. With `in_flight=2`, the default on CUDA and in section 4.2, compute waits only for the copy before the previous copy.
#
# </div>
# <div lang="zh">
#
# 一份存储区的换出完成之后，它的内存才能释放，所以计算不能比换出超前太多。已经启动、还没有完成的拷贝叫**在途**（in flight）的拷贝。`in_flight` 规定计算继续进行时最多可以有几次换出在途。`in_flight=1` 时，每启动一次换出，计算就停下来等前一次换出完成。CUDA 上的默认值和 4.2 节用的都是 `in_flight=2`，这时计算只等上上一次换出完成。
#
# </div>

# %% slide="result"
cases = {(p, 2): run for p, run in runs.items()} | {(2, 1): step_on_device(2, threshold, 1)}
times = {case: (device.seconds - began) / plain for case, (device, began, _) in cases.items()}
above = [round((device.peak_bytes - held) / B, 2) for device, _, held in cases.values()]
rows = [(*case, round(times[case], 3), peak) for case, peak in zip(cases, above, strict=True)]
columns = ["fetched ahead, p", "copies in flight", "time (× baseline)"]
table([*columns, "peak above the start (in units of B)"], rows)

# %% [markdown]
# <div lang="en">
#
# With one copy in flight, the step takes 16% longer than without copies. Because GELU takes no time, its input and its output (which the next Linear keeps) are saved directly one after the other. When the output's copy starts, compute waits for the whole copy of the input, $c = f/2$. This happens in each of the 14 layers that copy both storages. So both settings, $p$ and `in_flight`, must be large enough.
#
# Larger settings need memory. With two copies in flight, the peak here is $(p + 4)\,B$ higher than the memory at the start. The additional bytes are the $p + 1$ storages that stay, two in flight, and one being computed.
#
# </div>
# <div lang="zh">
#
# 只允许一次换出在途时，这一步比不拷贝时多花 16% 的时间。GELU 不花时间，所以它的输入和输出几乎同时保存下来（输出由下一个 Linear 保存）。输出的换出一启动，计算就停下来等输入的换出从头到尾完成，也就是等 $c = f/2$ 那么久。有 14 层的两份存储区都要拷贝，每层都有这样一次等待。所以 $p$ 和 `in_flight` 这两项设置都要足够大。
#
# 这两项设置越大，占的内存也越多。两次换出同时在途时，这里的峰值比开始时多 $(p + 4)\,B$，包括一直留在设备上的 $p + 1$ 份存储区、换出还没有完成的两份，以及正在计算的一份。
#
# </div>

# %% [markdown] slide={"en": "A stream runs its operations in order. Nothing orders two streams.\n\nAn **event** marks a place in one stream. What must wait for the event?", "zh": "一条流按顺序执行任务，两条流之间没有先后。\n\n**事件**是一条流里的记号。谁该等它？"}
# ## 4.5 Streams and events / 流与事件
#
# <div lang="en">
#
# The host starts operations and goes on without waiting for their results. A **stream** executes its operations one after the other. Operations on two streams may run in any order, unless one stream waits for an **event** of the other. An event marks the end of all operations given to its stream so far. `device.wait(event)` makes the current stream wait for the event, and `device.finish(event)` makes the host wait. The library starts a copy on any device with this function:
#
# </div>
# <div lang="zh">
#
# 主机只管下达任务，不等结果出来就继续执行。一条**流**（stream）按顺序逐个执行交给它的任务。两条流的任务谁先谁后没有规定，除非一条流等待另一条流的**事件**（event）。事件是一个记号，标在那条流此前接到的所有任务之后。`device.wait(event)` 让当前的流等到这个记号为止，`device.finish(event)` 则让主机等。不论在哪种设备上，课程库都用下面这个函数启动一次拷贝。
#
# </div>

# %%
import inspect

print(inspect.getsource(SimulatedDevice.copy))

# %% slide="result"
figures.draw_order()

# %% [markdown]
# <div lang="en">
#
# Each wait in the figure has a reason:
#
# - **Made**, then copied to the host: the copy must not read a storage before its numbers have been computed.
# - Copied to the host, then **released**: the allocator gives released memory to the next tensor at once, so the copy must be complete before the release.
# - Copied to the host, then read by the **host** or copied back: the numbers must have arrived in host memory.
# - Copied to the GPU, then **used**: no operator may use a storage before its copy has finished.
#
# </div>
# <div lang="zh">
#
# 每一处等待都有原因：
#
# - 先**算好**，再换出：存储区里的数算好之前，拷贝不能去读。
# - 先换出，再**释放**：换出完成之前，这份存储区的内存不能释放，因为分配器会立刻把释放的内存分给下一个张量。
# - 先换出，再由**主机**读，或者再换入：数要先全部到达主机内存。
# - 先换入，再**使用**：换入完成之前，任何算子都不能使用这份存储区。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# With `torch.cuda`, write these operations as the library's `Cuda` does (`course_lib/offload/device.py`):
#
# | the library | `torch.cuda` | meaning |
# |---|---|---|
# | `device.side("down")` | `torch.cuda.Stream()` | a second stream |
# | `device.event()` | `torch.cuda.current_stream().record_event()` | mark the end of the operations so far |
# | `device.wait(event)` | `torch.cuda.current_stream().wait_event(event)` | the current stream waits |
# | `device.finish(event)` | `event.synchronize()` | the host waits |
# | `device.used(tensor)` | `tensor.record_stream(torch.cuda.current_stream())` | keep the tensor's memory until the current stream has finished with it (its cost: section 4.17) |
# | `device.pinned(shape, dtype)` | `torch.empty(shape, dtype=dtype, pin_memory=True)` | **pinned memory**: host memory that the system cannot move, so the GPU copies it without the CPU |
#
# </div>
# <div lang="zh">
#
# 直接用 `torch.cuda` 时，同样的操作写法如下。课程库的 `Cuda` 类也是这样写的（`course_lib/offload/device.py`）。
#
# | 课程库 | `torch.cuda` | 含义 |
# |---|---|---|
# | `device.side("down")` | `torch.cuda.Stream()` | 另一条流 |
# | `device.event()` | `torch.cuda.current_stream().record_event()` | 在此前的所有任务之后做记号 |
# | `device.wait(event)` | `torch.cuda.current_stream().wait_event(event)` | 当前的流等待 |
# | `device.finish(event)` | `event.synchronize()` | 主机等待 |
# | `device.used(tensor)` | `tensor.record_stream(torch.cuda.current_stream())` | 当前的流用完这个张量之前，不重新分配它的显存（代价见 4.17 节） |
# | `device.pinned(shape, dtype)` | `torch.empty(shape, dtype=dtype, pin_memory=True)` | **锁页内存**：系统不能挪动的主机内存，因此 GPU 不靠 CPU 就能拷贝 |
#
# </div>

# %% [markdown]
# ## 4.6 One wait taken away / 少了一处等待
#
# <div lang="en">
#
# If a wait is missing, the simulated device reports a **race**: two accesses to the same memory in an order that nothing determines. The numbers may still be right, but only by luck. Two modes of the device remove this luck. In mode `late` each copy runs as late as the waits allow, and in mode `early` every operation runs as early as the waits allow. The program in the figure has no wait. It makes $y = 2$, copies $y$ to the host, reuses the memory of $y$ for 100, and reads the copy on the host. At first all memory contains 0.
#
# </div>
# <div lang="zh">
#
# 如果少了一处等待，模拟设备会报告**竞争**（race），也就是有两次操作访问同一块内存，谁先谁后却没有规定。这时结果也可能是对的，但只是碰巧。设备有两种模式可以排除这种巧合。在不违反任何一处等待的前提下，`late` 让每次拷贝尽量晚执行，`early` 让所有操作尽量早执行。下图的程序一处等待也没有。它先算出 $y = 2$，把 $y$ 换出，再把 $y$ 的内存拿来存放 100，最后由主机读取换出的数。程序开始之前，各处内存里都是 0。
#
# </div>

# %% slide="result"
from course_lib.lessons.lesson_04.steps import start_to_device, start_to_host

figures.draw_modes()

# %% [markdown] slide={"en": "One wait is missing.\n\n**Guess first.** Is the gradient wrong?", "zh": "少了一处等待。\n\n**先猜**：梯度会错吗？"}
# <div lang="en">
#
# In each row of the table except the first, a network of five layers is offloaded without one of the waits. **Guess first:** in which rows is the gradient wrong?
#
# </div>
# <div lang="zh">
#
# 下表每一行都卸载一个五层的网络，除第一行外，每行都去掉一处等待。**先猜**：哪几行的梯度是错的？
#
# </div>

# %% slide="result"
simulation.without_waits()

# %% [markdown]
# <div lang="en">
#
# In the normal mode, the gradient is right in every row. Pull request 13502 of diffusers reports a missing wait, a `wait_stream` between copying weights to the GPU and using them. A minimal program without this wait gave wrong numbers in about 98% of iterations, on five GPUs of the same type. With the wait, all numbers were right.
#
# </div>
# <div lang="zh">
#
# 照常运行时，每一行的梯度都对。diffusers 的合并请求 13502 报告了这样的错误，即权重换入 GPU 之后、使用之前，少了一处 `wait_stream`。用一个最小的程序重现，在五块同一型号的 GPU 上运行，约 98% 的迭代给出错误的数，补上等待后一次也没有错。
#
# </div>


# %% [markdown]
# <div lang="en">
#
# `start_to_host(device, y)` starts a copy to the host, and `start_to_device(device, host)` starts a copy to the GPU. Both return the new tensor and the event at the copy's end.
#
# **Exercise 3.** In each function, one line is missing. Add `device.wait(copied)`, or `device.finish(copied)` where the host has to wait. The check runs all three functions in each mode, and looks for races and wrong numbers.
#
# </div>
# <div lang="zh">
#
# `start_to_host(device, y)` 启动一次换出，`start_to_device(device, host)` 启动一次换入。两个函数都返回新的张量，以及标在拷贝末尾的事件。
#
# **练习 3。** 每个函数都缺一行，请补上 `device.wait(copied)`，必须由主机等的地方则改用 `device.finish(copied)`。检查会在每种模式下运行这三个函数，既看有没有竞争，也看数值对不对。
#
# </div>


# %% minutes=12
def read(device, x):
    y = x * 2
    host, copied = start_to_host(device, y)
    return host.tolist()


def use(device, host):
    x, copied = start_to_device(device, host)
    return x * 2


def let_go(device, x):
    y = x * 2
    host, copied = start_to_host(device, y)
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
        host, copied = start_to_host(device, y)
        device.finish(copied)
        return host.tolist()

    def use(device, host):
        x, copied = start_to_device(device, host)
        device.wait(copied)
        return x * 2

    def let_go(device, x):
        y = x * 2
        host, copied = start_to_host(device, y)
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
# Without its wait, `read` makes a classic mistake. It is like reading the result of `y.to("cpu", non_blocking=True)` at once. PyTorch raises no error. The host may read numbers that were in its memory before the copy, as in the figure's modes `late` and `early`.
#
# </div>
# <div lang="zh">
#
# `read` 少了等待，这是一个经典错误，相当于调用 `y.to("cpu", non_blocking=True)` 之后马上读取结果。程序不报错，主机读到的却可能是那块内存在拷贝之前存放的数，与图中 `late` 和 `early` 两种模式一样。
#
# </div>

# %% [markdown]
# ## 4.7 The decoder: moved, forgotten, or both / 解码器：搬走、忘掉，还是都用
#
# <div lang="en">
#
# Does offload leave the gradients of the course's decoder unchanged, bit by bit? On a CPU the lower tier is a file. The cell tests your hooks and the library's `offload_activations`, which does not move storages smaller than `min_bytes`.
#
# </div>
# <div lang="zh">
#
# 比较峰值之前，先检查卸载之后课程解码器的梯度是否与原来逐比特相等。在 CPU 上，下一级存储是文件。下面检查你写的钩子和课程库的 `offload_activations`，后者不搬小于 `min_bytes` 的存储区。
#
# </div>

# %%
from contextlib import nullcontext

from course_lib.models import Decoder, random_tokens
from course_lib.offload import DiskStore

decoder = Decoder(vocabulary=2048, hidden=256, heads=8, layers=8, sequence=128)


def gradients(context):
    decoder.zero_grad()
    with context:
        loss = decoder.loss(random_tokens(batch=8, sequence=128, vocabulary=2048))
    loss.backward()
    return [parameter.grad for parameter in decoder.parameters()]


# %%
stay = {parameter.untyped_storage() for parameter in decoder.parameters()}
expected, ways = gradients(nullcontext()), {"yours": offloading(DiskStore(), stay)}
ways["the library"] = offload_activations(DiskStore(), min_bytes=1 << 17)
table(["", "equal"], [(k, all(map(torch.equal, expected, gradients(c)))) for k, c in ways.items()])

# %% [markdown] slide={"en": "The course's decoder: offload, or checkpoints, or both.\n\n**Guess first.** Which has the lowest peak? Which moves the fewest bytes?", "zh": "课程的解码器，可以卸载、用检查点，或两者合用。\n\n**先猜**：三种做法里，哪种峰值最低？哪种搬的字节最少？"}
# <div lang="en">
#
# For backward, a layer of this decoder keeps 20 times the bytes of its input. A layer with a checkpoint keeps only its input. **Guess first:** how high is the peak of a step with offload, with checkpoints, and with both?
#
# </div>
# <div lang="zh">
#
# 这个解码器的一层为反向保存的字节数，是这一层输入的 20 倍。每层加一个检查点之后，一层只保存自己的输入。**先猜**：只卸载、只用检查点、两者合用，一步的峰值各是多少？
#
# </div>

# %% slide="result"
from course_lib.lessons.lesson_04.steps import metered_step

steps = {(k, p): metered_step(k, p) for k in (False, True) for p in (None, 1)}
names = "plain", "offload", "checkpoint", "checkpoints and offload"
rows = [(n, f"{m.peak_bytes:,}", d) for n, (m, d) in zip(names, steps.values(), strict=True)]
table(["step", "peak (bytes)", "copied to the file (bytes)"], rows)

# %% jupyter={"source_hidden": true} slide="result"
from course_lib.teaching import timelines

two = {name: steps[k, 1][0] for k, name in ((False, "offload"), (True, "checkpoints and offload"))}
title = "With checkpoints a whole layer is in memory at once, and the peak is 9 MB higher"
timelines(two, title=title, panel_height=1.9)

# %% [markdown] slide={"en": "Offload: 124.8 MB. Offload and checkpoints: 134.0 MB, a **higher** peak.\n\nAt that point, moved inputs are already freed, and a whole layer is recomputed.", "zh": "只卸载，峰值 124.8 MB。再加检查点，134.0 MB，反而**更高**。\n\n峰值那一刻，搬走的输入本来就已经释放，而整整一层又重新算了出来。"}
# <div lang="en">
#
# With both techniques, the peak is 134,006,104 bytes, the same as with checkpoints alone, and 9 MB higher than with offload alone. This peak occurs near the end of backward. By then the inputs of later layers have been freed, whether or not they were moved. Backward now needs the activations of the **first** layer. Offload alone copies these activations back one by one, but a checkpoint recomputes all of them at once.
#
# When does adding offload to checkpoints lower the peak? For each layer of hidden size $h$, backward frees one input of $4 h$ bytes per token, and creates $4 \cdot 12 h^2$ bytes of gradients. So with fewer than $12 h$ tokens per step, the gradients at the end of backward are larger than the inputs at its start. The course's step has $4 h$ tokens. The table varies tokens and layers, on tensors without values (`symbolic`):
#
# </div>
# <div lang="zh">
#
# 两者合用时，峰值是 134,006,104 字节，与只用检查点时完全相同，比只卸载还高 9 MB。这个峰值出现在反向快结束时。此刻，后面各层的输入无论有没有搬走，都已经用完并释放。反向现在要用的是**第一层**的激活值。只卸载时，这些激活值逐个换入，检查点则把它们一次全部重新算出来。
#
# 那么，加了检查点之后再卸载，什么时候能降低峰值？设隐藏维度为 $h$。反向每走过一层，就释放这一层的输入（每个 token 是 $4 h$ 字节），同时产生这一层的梯度（共 $4 \cdot 12 h^2$ 字节）。因此，一步里的 token 少于 $12 h$ 个时，反向结束时的梯度比反向开始时的输入还大。课程的训练步有 $4 h$ 个 token。下面改变 token 数和层数，用没有数值的张量（`symbolic`）运行前向与反向。
#
# </div>

# %% slide="result"
from course_lib.lessons.lesson_04.steps import checkpointed_peak

rows = []
for layers, tokens_per_h in ((8, 4), (8, 16), (8, 32), (32, 4), (32, 16), (32, 32)):
    alone, both = (checkpointed_peak(layers, tokens_per_h, p) for p in (None, 1))
    peaks = (f"{peak / 1e6:.1f}" for peak in (alone, both))
    rows.append((layers, tokens_per_h, *peaks, f"{both / alone - 1:+.1%}"))
columns = ["checkpoint (MB)", "checkpoints and offload (MB)", "change"]
table(["layers", "tokens per h", *columns], rows)

# %% [markdown] slide={"en": "Both together move 1/18 of the bytes that offload alone moves.\n\nHow fast must the link be?", "zh": "合用时搬的字节是只卸载时的 1/18。\n\n链路到底要多快？"}
# <div lang="en">
#
# With 16 or 32 times $h$ tokens, adding offload to checkpoints lowers the table's peaks by 7% to 29%. The peak falls more with 32 layers than with 8. With 4 times $h$ tokens, the peak stays the same, unless most weights are frozen and have no gradients, as with LoRA. If the layers are frozen, the peak falls by 15% with 8 layers, and by 21% with 32.
#
# Another reason for the combination is the link. Offload alone moves 168.8 MB. Both together move 9.4 MB, 1/18 of these bytes. The table shows the step on the simulated device at $10^{12}$ FLOP/s, with two copies in flight. Here $p$ (storages fetched ahead) is 2 instead of 1, so one more stays on the device:
#
# </div>
# <div lang="zh">
#
# 表中一步的 token 数是 $h$ 的 16 倍或 32 倍时，加了检查点之后再卸载，峰值降低 7% 到 29%，32 层比 8 层降得更多。token 数只有 $h$ 的 4 倍时，峰值不变，除非像 LoRA 那样冻结多数权重，让这些权重没有梯度。冻结各层之后，8 层时峰值降低 15%，32 层时降低 21%。
#
# 合用的另一个理由是链路。只卸载要搬 168.8 MB，合用只搬 9.4 MB，是前者的 1/18。下表是课程的训练步在模拟设备上的结果，算力为 $10^{12}$ FLOP/s，同时有两次拷贝在途。这里的 $p$（提前取回的份数）从 1 改成 2，所以多一份存储区留在设备上。
#
# </div>

# %% slide="result"
simulation.link_table()

# %% [markdown]
# <div lang="en">
#
# If all activations move, forward does 90 FLOPs per moved byte. By the rule of section 4.1, a link of 11 GB/s is enough on this device. On that link the step still takes 14% longer than without copies (reason: section 4.9). At 17 GB/s or more, the copies add at most 5% to the step's time. At 2 GB/s, a step takes almost four times the baseline's time with offload alone, and 1.23 times with offload and checkpoints. Recomputation accounts for 0.21 of the additional 0.23.
#
# </div>
# <div lang="zh">
#
# 如果换出全部激活值，前向每搬一个字节做 90 FLOPs。按 4.1 节的规则，在这个设备上 11 GB/s 的链路已经够了。可是用这样的链路，一步仍比不拷贝时多花 14% 的时间，原因见 4.9 节。链路达到 17 GB/s 以后，拷贝最多使一步多花 5% 的时间。链路只有 2 GB/s 时，如果只卸载，一步的用时将近基线的四倍。如果卸载与检查点合用，用时是基线的 1.23 倍，多出的 0.23 倍里有 0.21 倍是重计算。
#
# </div>

# %% [markdown]
# ## 4.8 In your own code / 实际怎么写
#
# <div lang="en">
#
# PyTorch offloads saved tensors with one line, `save_on_cpu` (on a GPU, pass `pin_memory=True`). `save_on_cpu` fetches nothing ahead. On a CPU it copies nothing, because `.cpu()` of a CPU tensor returns that tensor. So the cell counts what `save_on_cpu` would copy from a GPU, namely every saved tensor:
#
# </div>
# <div lang="zh">
#
# PyTorch 里有现成的卸载钩子 `save_on_cpu`，只要一行代码（在 GPU 上加 `pin_memory=True`）。`save_on_cpu` 不会提前取回张量，在 CPU 上则什么也不拷贝，因为 CPU 张量的 `.cpu()` 返回的就是这个张量自己。所以下面统计它在 GPU 上要拷贝多少字节，也就是所有保存的张量的字节数。
#
# </div>

# %%
saved = []
gradients(saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda packed: packed))
kept = [tensor for tensor in saved if tensor.untyped_storage() not in stay]
total, activations = sum(t.nbytes for t in saved), sum(t.nbytes for t in kept)
once = sum(storage.nbytes() for storage in {t.untyped_storage() for t in kept})
parts = {"`save_on_cpu`": total, "parameters": total - activations}
parts |= {"storages saved again": activations - once, "by the four rules": once}
table(["data to move", "MB"], [(name, round(count / 1e6, 1)) for name, count in parts.items()])

# %% [markdown]
# <div lang="en">
#
# `save_on_cpu` would move 247.7 MB. By the four rules of section 4.3, only 178.4 MB need to move. The additional bytes are 27.3 MB of parameters, which the GPU keeps anyway, and 41.9 MB of storages that are moved again. Frameworks enable offload like this:
#
# </div>
# <div lang="zh">
#
# `save_on_cpu` 要搬 247.7 MB，而按 4.3 节的四条规则只要搬 178.4 MB。多搬的部分里，27.3 MB 是参数，GPU 反正要留着它们，另外 41.9 MB 是重复搬运的存储区。各框架里启用卸载的写法如下。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# | framework | line (only the first one runs here, in section 4.15) |
# |---|---|
# | Hugging Face 5.23 Trainer (in 5.17 `gradient_checkpointing`) | `TrainingArguments(activation_checkpointing=True, activation_checkpointing_kwargs={"offload": True})` |
# | TRL, torchtune | `SFTConfig(activation_offloading=True)`; `enable_activation_offloading=True` |
# | Megatron-LM | `--fine-grained-activation-offloading`; `--optimizer-cpu-offload --optimizer-offload-fraction 0.5` |
# | Transformer Engine | `get_cpu_offload_context(enabled=True, num_layers=8, model_layers=12)` |
# | FSDP2 | `fully_shard(model, offload_policy=CPUOffloadPolicy())`: parameters, gradients and optimizer state, but no activations. The CPU runs the optimizer |
# | torchao, DeepSpeed | `CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW)`; `"offload_optimizer": {"device": "cpu"}` |
# | paged optimizers (bitsandbytes) | `TrainingArguments(optim="paged_adamw_8bit")`: state in unified memory, which CUDA moves to the host only when GPU memory is full |
#
# TRL and torchtune keep up to `max_fwd_stash_size=5` tensors in flight, like `in_flight=5` in section 4.4. Section 4.18 offloads optimizer state.
#
# </div>
# <div lang="zh">
#
# | 框架 | 写法（本课只运行第一行，见 4.15 节） |
# |---|---|
# | Hugging Face 5.23 的 Trainer（5.17 里叫 `gradient_checkpointing`） | `TrainingArguments(activation_checkpointing=True, activation_checkpointing_kwargs={"offload": True})` |
# | TRL、torchtune | `SFTConfig(activation_offloading=True)`；`enable_activation_offloading=True` |
# | Megatron-LM | `--fine-grained-activation-offloading`；`--optimizer-cpu-offload --optimizer-offload-fraction 0.5` |
# | Transformer Engine | `get_cpu_offload_context(enabled=True, num_layers=8, model_layers=12)` |
# | FSDP2 | `fully_shard(model, offload_policy=CPUOffloadPolicy())`：卸载参数、梯度和优化器状态，不卸载激活值。优化器在 CPU 上运行 |
# | torchao、DeepSpeed | `CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW)`；`"offload_optimizer": {"device": "cpu"}` |
# | 分页优化器（bitsandbytes） | `TrainingArguments(optim="paged_adamw_8bit")`：状态放在统一内存里，显存满了，CUDA 才把状态移到主机 |
#
# TRL 和 torchtune 最多允许 `max_fwd_stash_size=5` 个张量在途，相当于 4.4 节的 `in_flight=5`。优化器状态的卸载见 4.18 节。
#
# </div>

# %% [markdown] slide={"en": "On the H200, the step takes 33% longer with offload, and 95% longer with `save_on_cpu`.\n\nWhat did you guess?", "zh": "在 H200 上，卸载多花 33% 的时间，`save_on_cpu` 多花 95%。\n\n你当时猜的是什么？"}
# ## 4.9 Why 33% longer? / 为什么多花 33%？
#
# <div lang="en">
#
# In the step on the H200, the decoder has eight layers, $h = 2048$, fp32 numbers, and 8,192 tokens. `count_forward` runs the forward on symbolic tensors. It counts FLOPs outside of attention, and the bytes that offload and `save_on_cpu` copy to the host. The cell adds the time of all copies to the baseline's time, as if no copy were hidden.
#
# </div>
# <div lang="zh">
#
# 回到 H200 上的那一步。解码器有八层，$h = 2048$，fp32，一步有 8,192 个 token。`count_forward` 用符号张量运行前向，统计注意力以外的 FLOPs，以及卸载和 `save_on_cpu` 各换出多少字节。下面再把全部拷贝的时间加到基线的时间上，即假设没有一次拷贝被掩盖。
#
# </div>

# %% slide="result"
from course_lib.lessons.lesson_04.gpu import recorded_on_h200

flops, moved, saved_bytes = simulation.count_forward()
h200 = recorded_on_h200()
link, step_s, rows = h200["link"], h200["plain_seconds"], []
for name, count in {"plain": 0, "offloaded": moved, "save_on_cpu": saved_bytes}.items():
    added_up = round(step_s + 2 * count / link, 3)
    rows.append((name, round(count / 1e9, 1), added_up, round(h200[f"{name}_seconds"], 3)))
table(["step", "copied to the host (GB)", "added up (s)", "recorded (s)"], rows)

# %% [markdown]
# <div lang="en">
#
# The step with `save_on_cpu` takes slightly longer than the added-up time, so none of its copies are hidden. Offload hides half of the time of its copies. Is the link too slow to hide all copies? The threshold of section 4.1 decides:
#
# </div>
# <div lang="zh">
#
# 用 `save_on_cpu` 时，实测的一步比相加的结果还略长，可见拷贝一次也没有被掩盖。卸载则掩盖了一半的拷贝时间。是不是因为链路太慢，所以掩盖不了全部拷贝？下面把算术强度与阈值比一比（4.1 节）。
#
# </div>

# %% slide="result"
rate = 3 * flops / step_s  # backward does twice the FLOPs of forward
rows = [("threshold of the H200 and its link", round(rate / link))]
table(["", "FLOPs per byte"], [*rows, ("forward of this decoder", round(flops / moved))])

# %% [markdown]
# <div lang="en">
#
# The step is almost exactly at the threshold, like the network of section 4.2. In that network, copies added only 1% to the time, with $p$ = 2 and two copies in flight. But all its storages had the same size. The figure shows two layers of this decoder on the simulated device, with the H200's FLOP/s and link:
#
# </div>
# <div lang="zh">
#
# 这一步的算术强度几乎正好等于阈值，与 4.2 节的网络一样。在那个网络里，$p$ = 2、两次拷贝在途时，这一步只比不拷贝时多花 1% 的时间。不过那个网络的存储区都一样大。下图是这个解码器的两层在模拟设备上的情形，算力和链路取 H200 的值。
#
# </div>

# %% slide="result"
decoder_runs = {n: simulation.small_decoder(rate, link, n) for n in (2, 4, 8)}
figures.draw_layers(decoder_runs[2])

# %% [markdown]
# <div lang="en">
#
# Nearly all of a layer's bytes are in storages that are 1 to 4 times as large as its input. `prefetch` and `in_flight` count storages, not bytes. When a copy to the host starts, all copies except the last two must be complete. So compute waits while a large storage is copied. Is the step faster with more storages in flight?
#
# </div>
# <div lang="zh">
#
# 一层保存的字节几乎都在少数几份大的存储区里，每份是这一层输入的 1 到 4 倍。`prefetch` 和 `in_flight` 数的是存储区的份数，不是字节。一次换出启动时，除了最近的两次，更早的换出都必须已经完成，所以遇到大的存储区，计算要等它拷贝完。允许更多份存储区在途，这一步会更快吗？
#
# </div>

# %% slide="result"
rows = []
for n, (device, began, _) in decoder_runs.items():
    time, peak = 256 * (device.seconds - began) / step_s, 256 * device.peak_bytes / 1e9
    rows.append((n, round(time, 2), round(peak, 2)))
table(["in flight, and fetched ahead", "simulated time (× baseline)", "peak (GB)"], rows)

# %% [markdown]
# <div lang="en">
#
# With two storages in flight, the simulated step takes 37% longer than the baseline. The H200's step took 33% longer. With eight storages in flight, the simulated step takes 1% longer, but needs 0.4 GB more memory. Eight storages were not tried on a GPU. Did you guess that compute waits for large storages?
#
# Another network, whose storages have equal sizes, was run on an H200 with nine settings. It has eight layers of 8,192 units. The link is twice as fast as this network requires. The table compares the recorded times (× baseline) with the simulated device's clock and your formula of exercise 1. In rows with one copy in flight, the table adds another copy ($c$) per layer to your formula.
#
# </div>
# <div lang="zh">
#
# 在途和提前取回的存储区都是两份时，模拟的一步比基线多花 37% 的时间，H200 上实际多花 33%。两者都是八份时，模拟的一步只多花 1%，代价是多占 0.4 GB 内存。八份的设置没有在 GPU 上运行过。你最初猜到计算要等大的存储区拷贝完吗？
#
# 再看另一个网络，它的各份存储区都一样大，九种设置都在 H200 上运行过。这个网络有八层，每层 8,192 个单元，链路比这个网络所需的快一倍。下表把记录的用时（基线的倍数）与模拟设备的时钟和你在练习 1 写的公式放在一起比较。在只允许一次换出在途的几行里，表中的值是你的公式的结果再加上每层一个 $c$。
#
# </div>

# %%
simulation.settings_table(step_time)

# %% [markdown]
# <div lang="en">
#
# The simulated device's clock differs from the H200 by at most 0.016 of the baseline's time. Your formula differs by at most 0.04 of that time.
#
# </div>
# <div lang="zh">
#
# 与 H200 的实测相比，模拟设备的时钟最多相差基线时间的 0.016 倍，你的公式最多相差 0.04 倍。
#
# </div>

# %% [markdown] slide={"en": "Five common claims. Hands up before each row: true, partly, or false?", "zh": "五种常见的说法。看每一行之前先举手：成立、部分成立，还是不成立？"}
# ## 4.10 Claims and measurements / 说法与实测
#
# <div lang="en">
#
# The table tests five common claims.
#
# </div>
# <div lang="zh">
#
# 下表检验五种常见的说法。
#
# </div>

# %% slide="result"
figures.claims_table(steps, times)

# %% [markdown] slide={"en": "The same step, one technique per row.\n\nCheckpoints leave a peak of 134.0 MB, and offload 124.8 MB. What fills both peaks?", "zh": "还是同样的训练步，每种技术占一行。\n\n用检查点，峰值还有 134.0 MB。用卸载，还有 124.8 MB。这两个峰值里什么最多？"}
# ## 4.11 The ledger / 账本
#
# <div lang="en">
#
# In the last row, all activations move to a file, with one storage fetched ahead.
#
# </div>
# <div lang="zh">
#
# 表的最后一行是本课的结果，全部激活值都移到文件，并提前取回一份存储区。
#
# </div>

# %% slide="result"
from course_lib.lessons.ledger import ledger

meter, down = steps[False, 1]
ledger("04", "all activations to a file", meter, flops=45_097_156_608, moved_bytes=2 * down)

# %% [markdown] slide={"en": "A copy is hidden if matrix products run meanwhile, and if it starts early enough. The operator that uses the data must wait for the copy.", "zh": "拷贝开始得够早，同时又有矩阵乘法可做，才能被掩盖。要用到这份数据的算子，必须等拷贝完成。"}
# ## 4.12 Summary / 小结
#
# <div lang="en">
#
# - A copy can hide behind computation if the FLOPs per byte reach the machine's threshold, if the copy starts early enough, and if enough copies are in flight. `prefetch` hides copies to the GPU (H2D), and `in_flight` hides copies to the host (D2H). Both settings count storages. Two storages are too few in the decoder here, because its storages differ in size.
# - The hooks move each version of a storage once, never move a parameter, and return views. `save_on_cpu` moves parameters, too, and moves a storage as often as it is saved for backward.
# - Only waits order the operations of two streams. If a wait is missing, the result is right only by luck.
# - Offload combined with checkpoints can use a far slower link than offload alone. In the decoders here, adding offload to checkpoints lowers the peak only with more than about $12 h$ tokens per step, or with frozen weights.
#
# **Next:** [lesson 05](05_gradient_accumulation.ipynb) splits the batch into micro-batches.
#
# </div>
# <div lang="zh">
#
# - 只有每搬一个字节所做的 FLOPs 达到机器的阈值，拷贝开始得够早，在途的拷贝也够多，拷贝才能被掩盖。`prefetch` 掩盖换入（H2D），`in_flight` 掩盖换出（D2H），两者数的都是存储区的份数。本课解码器的存储区大小不一，所以只设两份太少。
# - 两个钩子不搬参数，其余存储区的每个版本也只搬一次，取回时得到的仍是原来的视图。`save_on_cpu` 则连参数也搬，而且一份存储区为反向保存几次，就搬几次。
# - 流与流之间谁先谁后，只由等待来规定。少了一处等待，结果即使对，也只是碰巧。
# - 检查点与卸载合用时，链路可以比只卸载时慢得多。在本课的解码器上，只有一步里的 token 超过约 $12 h$ 个，或者权重冻结时，合用的峰值才会比只用检查点更低。
#
# **下一步**：[第 05 课](05_gradient_accumulation.ipynb)把批次拆成微批次。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **Sources.** Rhu et al. 2016, *vDNN*, arXiv:1602.08124 (offload and prefetch of activations). Rajbhandari et al. 2021, *ZeRO-Infinity*, arXiv:2104.07857 (bandwidth arithmetic). Ren et al. 2021, *ZeRO-Offload*, arXiv:2101.06840 (CPU update). PyTorch tutorial *A guide on good usage of non_blocking and pin_memory()*. PyTorch's documentation of `Tensor.record_stream`; pytorch/pytorch 147168 and pytorch/torchtitan 735 (issues about its memory); TRL's `activation_offloading.py`. huggingface/diffusers 13502, huggingface/accelerate 4175, huggingface/transformers 48444, DeepSpeed 7474 (pull requests). NVIDIA's H100 and GH200 data sheets; PCI-SIG's PCI Express specifications.
#
# </div>
# <div lang="zh">
#
# **出处。** Rhu et al. 2016，*vDNN*，arXiv:1602.08124（激活值的卸载与预取）。Rajbhandari et al. 2021，*ZeRO-Infinity*，arXiv:2104.07857（带宽估计）。Ren et al. 2021，*ZeRO-Offload*，arXiv:2101.06840（在 CPU 上更新）。PyTorch 教程 *A guide on good usage of non_blocking and pin_memory()*。PyTorch 文档 `Tensor.record_stream`；pytorch/pytorch 147168 与 pytorch/torchtitan 735（报告这个函数多占显存的 issue）；TRL 的 `activation_offloading.py`。huggingface/diffusers 13502、huggingface/accelerate 4175、huggingface/transformers 48444、DeepSpeed 7474（合并请求）。NVIDIA 的 H100 与 GH200 数据手册；PCI-SIG 的 PCI Express 规范。
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
# Take a sequence of $s = 4096$ tokens and activations of 16 bits per number. Per token, the forward of a layer with hidden size $h$ does about $24 h^2 + 2 s h$ FLOPs with a fused causal attention. For backward, the layer keeps $34 h$ bytes per token (lesson 01), or $2 h$ bytes with a checkpoint. According to the data sheets, NVLink-C2C is fast enough to hide the copies of all activations if $h \ge 2773$:
#
# </div>
# <div lang="zh">
#
# 设序列长 $s = 4096$，激活值的每个数占 16 位。用融合的因果注意力时，每个 token 在隐藏维度为 $h$ 的一层里，前向大约做 $24 h^2 + 2 s h$ 个 FLOPs。每个 token 在一层里为反向保存 $34 h$ 字节（第 01 课），加了检查点则是 $2 h$ 字节。按数据手册上的带宽，只要 $h \ge 2773$，NVLink-C2C 就足够快，全部激活值的拷贝都能被掩盖。
#
# </div>

# %%
import math

h100 = 989e12  # FLOP/s
rows = []
for name, bandwidth in links.items():
    least = [(saves * h100 / bandwidth - 2 * 4096) / 24 for saves in (34, 2)]
    rows.append((name, *(max(1, math.ceil(h)) for h in least)))
table(["smallest h at which copies hide", "34 h (data sheet)", "2 h (data sheet)"], rows)

# %%
figures.draw_threshold(h100, links)

# %% [markdown]
# ## 4.14 Your own link, and host memory / 你自己的链路，以及主机内存
#
# <div lang="en">
#
# The next cell measures the link between your GPU and the host. On a CPU, it measures how fast bytes are copied within memory and written to the system's file cache. To see the PCIe generation and width of a slow link, run `nvidia-smi --query-gpu=pcie.link.gen.current,pcie.link.width.current --format=csv` during a copy.
#
# </div>
# <div lang="zh">
#
# 下面的单元格测量你的 GPU 与主机之间的链路。在 CPU 上，它测的是内存内的拷贝，以及向系统文件缓存的写入。如果 GPU 的链路很慢，请在拷贝时运行 `nvidia-smi --query-gpu=pcie.link.gen.current,pcie.link.width.current --format=csv`，查看链路当前的 PCIe 代数和宽度。
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
# **Host memory** must hold all bytes that all GPUs of the host move. With $h = 4096$, 32 layers and one sequence of 4096 tokens, all activations take $34 \cdot 4096 \cdot 4096 \cdot 32$ bytes, 18.3 GB, and the inputs of checkpointed layers take 1.1 GB. PyTorch rounds the size of each pinned block up to the next power of two.
#
# </div>
# <div lang="zh">
#
# **主机内存**要装得下搬走的全部字节，有几块 GPU 就乘以几。设 $h = 4096$，32 层，一条 4096 个 token 的序列，全部激活值占 $34 \cdot 4096 \cdot 4096 \cdot 32$ 字节，即 18.3 GB，如果每层都加检查点，各层的输入占 1.1 GB。PyTorch 申请锁页内存时，还会把每块的大小向上取整到二的整数次幂。
#
# </div>

# %% [markdown]
# ## 4.15 With Hugging Face and torch.compile / 卸载与 Hugging Face、torch.compile 配合使用
#
# <div lang="en">
#
# Hugging Face's `offload=True` moves the inputs of its checkpoints, using `save_on_cpu` with pinned memory. Without a GPU, PyTorch's CPU build raises an error, and its CUDA build moves nothing:
#
# </div>
# <div lang="zh">
#
# Hugging Face 的 `offload=True` 用 `save_on_cpu` 和锁页内存搬走检查点的输入。没有 GPU 时，PyTorch 的 CPU 版会报错，CUDA 版则什么也不搬。
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
# The library's hooks can wrap the forward of any model, such as this Llama. Compiled code calls the hooks, too. Does the peak fall?
#
# </div>
# <div lang="zh">
#
# 课程库的钩子可以套在任何模型的前向外面，例如这个 Llama 的前向。编译过的代码同样会调用这些钩子。峰值会降低吗？
#
# </div>

# %%
from course_lib.memory import MemoryMeter


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
# If each layer of this Llama is compiled separately, offload lowers the peak. If the whole model is compiled with its loss, the model is one operator for autograd. This operator hands all its saved tensors to the hooks when forward ends, and needs all of them when backward begins, so the peak stays the same.
#
# </div>
# <div lang="zh">
#
# 逐层编译这个 Llama 时，卸载能降低峰值。整个模型连同损失一起编译时，它对 autograd 来说只是一个算子。这个算子在前向结束时才把保存的张量一起交给钩子，反向一开始又要全部换入，所以峰值不变。
#
# </div>

# %% [markdown]
# ## 4.16 A function that offloads nothing / 一个什么也没卸载的函数
#
# <div lang="en">
#
# The function below keeps a copy of an activation in the lower tier, and fetches the copy in backward. Is the gradient right? Does the function free any memory?
#
# </div>
# <div lang="zh">
#
# 下面的函数在下一级存储里留一份激活值的副本，反向时再换入。梯度对不对？这个函数有没有释放内存？
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
# The gradient is exactly doubled, because the function passes it on unchanged, and adds it again through the "restored" activation. And no memory is freed, because the next operator, `sin`, keeps the same storage. The table below tests four claims of the teaching documents on which this course is based. The first claim is about this function:
#
# </div>
# <div lang="zh">
#
# 梯度恰好翻倍，因为这个函数先把梯度原样传下去，又经过“恢复”的激活值再加上一份。而且这个函数什么内存也没有释放，因为下一个算子 `sin` 仍然保存着同一份存储区。下表检验四种说法，都出自编写本课程时最初参考的教学材料，其中第一种说的就是这个函数。
#
# </div>

# %%
import warnings

model = deep_mlp(depth=8, width=64)
adam = torch.optim.AdamW(model.parameters())
model(torch.ones(4, 64)).sum().backward()
adam.step()


def addresses():
    return [value.data_ptr() for state in adam.state.values() for value in state.values()]


before = addresses()
for state in adam.state.values():
    for value in state.values():
        value.to("cpu", copy=True)  # "offloads" the optimizer
unmoved = [a == b for a, b in zip(before, addresses(), strict=True)]


# %%
class EagerPrefetcher:
    def __init__(self, loader):
        self.loader = loader
        self.next = next(self.batches)  # loads the first batch

    def __iter__(self):
        self.batches = iter(self.loader)
        return self


try:
    EagerPrefetcher([torch.zeros(1)])
except AttributeError as error:
    missing = error.name

# %%
mask_peaks = []
for make in (nn.Transformer, lambda: nn.Transformer):
    with MemoryMeter() as meter, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make().generate_square_subsequent_mask(512)
    mask_peaks.append(meter.peak_bytes)
figures.older_claims(ratio, kept, unmoved, missing, mask_peaks)

# %% [markdown]
# ## 4.17 What yours lacks, and the price of `record_stream` / 你那个版本缺什么，以及 `record_stream` 的代价
#
# <div lang="en">
#
# Your hooks fetch nothing ahead. They also switch off autograd's check that no saved tensor was changed in place. The library raises an error if a tensor is changed before its copy is complete, as in the next cell.
#
# </div>
# <div lang="zh">
#
# 你的钩子不提前取回张量。用了这些钩子，autograd 也不再检查保存的张量有没有被原地修改。如果张量在拷贝完成之前就被修改，课程库会报错，如下所示。
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
# <div lang="en">
#
# On CUDA, a tensor's memory must not be reused while a side stream still copies the tensor (section 4.5). Two ways are safe. With `record_stream`, the memory is marked as used by the side stream, and the program can drop the tensor at once. When PyTorch's allocator gets this memory back, it records an event on the side stream. The memory can be reused only after the host finds this event complete at a later allocation. But the host starts layers long before the GPU runs them, and at that time hardly any event is complete. FSDP2, torchtune and TRL use the second way: they hold a reference to the tensor. A few tensors later, the compute stream waits for the copy's event, and the reference is dropped. So the host need not check events.
#
# </div>
# <div lang="zh">
#
# 在 CUDA 上，另一条流（拷贝流）还在拷贝一个张量时，这个张量的显存不能重新分配（4.5 节）。安全的做法有两种。第一种是 `record_stream`，它把这块显存标记为拷贝流正在使用，于是程序马上可以释放对张量的引用。PyTorch 的分配器收回这块显存时，在拷贝流上记一个事件。以后主机再分配显存时，要查到这个事件已经完成，这块显存才能重新使用。可是主机下达各层的任务远早于 GPU 执行这些任务，那时事件几乎都还没有完成。FSDP2、torchtune 和 TRL 采用第二种做法，先保留对张量的引用，等后面又拷贝了几个张量，再让计算流等待这次拷贝的事件，然后释放引用。这样不需要主机查询事件。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# The next cells give the simulated device an allocator that, at each allocation, checks which events are complete. The host runs 0, 4 or 16 layers ahead of the GPU. Each layer's output is copied to the host, and a copy takes as long as a layer's computation.
#
# </div>
# <div lang="zh">
#
# 下面给模拟设备换上一个按同样规则工作的分配器，它只在主机分配显存时查询事件是否完成。主机下达任务的进度分别比 GPU 超前 0、4、16 层。每层的输出都换出到主机，一次拷贝与一层的计算一样久。
#
# </div>

# %%
from collections import deque

from course_lib.simulated.race_detector import Arena


class PollingArena(Arena):
    host_seconds = 0.0  # simulated time of the host

    def collect(self):  # makes dropped blocks available, if their events are complete
        ready, waiting = deque(), deque()
        for block, events in self.freed:
            seen = all(event.seconds <= self.host_seconds for event in events)
            (ready if seen else waiting).append((block, events))
        self.freed = ready
        super().collect()
        self.freed = waiting


# %%
def blocks_taken(release, ahead):
    taken, ends, held = [], [0.0] * (ahead + 1), deque()
    with SimulatedDevice(flops_per_second=128, down_bytes_per_second=4) as device:
        device.memory = device.log.arenas[0] = PollingArena("device", 1 << 22)
        weight, y = (device.move(torch.zeros(64, 64)) for _ in range(2))
        for _ in range(24):
            device.memory.host_seconds = ends[-ahead - 1]  # the GPU is `ahead` layers behind
            y = y @ weight
            ends.append(device.current().seconds)
            host = device.pinned(y.shape, y.dtype)
            release(device, held, y, device.copy(host, y, "down"))
            taken.append(device.live_bytes // y.nbytes - 1)  # not counting the weight
    return taken


# %%
def with_record_stream(device, held, y, copied):
    with device.on(device.side("down")):
        device.used(y)  # y.record_stream(side stream); the caller then drops y


def with_references(device, held, y, copied):
    held.append((y, copied))
    if len(held) > 2:
        device.wait(held.popleft()[1])  # and drops the oldest output


name = "record_stream, {n} layers ahead"
taken = {text(name, n=n): blocks_taken(with_record_stream, n) for n in (0, 4, 16)}
taken["references, 16 layers ahead"] = blocks_taken(with_references, 16)
figures.draw_taken(taken)

# %% [markdown]
# <div lang="en">
#
# With `record_stream` the outputs of the layers take two blocks of memory, plus one block per layer that the host is ahead. With references the outputs take only two blocks, even if the host is 16 layers ahead. These counts come from a simulation of the rule by which PyTorch's caching allocator reuses a block. On GPUs, the issues pytorch/pytorch 147168 and pytorch/torchtitan 735 report that `record_stream` needs more memory. The library holds references, too, until the compute stream has waited for the copy.
#
# </div>
# <div lang="zh">
#
# 用 `record_stream` 时，各层的输出占两块显存，主机每超前一层，就再多占一块。保留引用时，即使主机超前 16 层，也只占两块。这些块数是模拟出来的，模拟依照 PyTorch 缓存分配器复用显存块的规则。在 GPU 上，pytorch/pytorch 147168 和 pytorch/torchtitan 735 报告了 `record_stream` 多占显存的现象。课程库也保留引用，计算流等到拷贝的事件之后才放掉。
#
# </div>

# %% [markdown]
# ## 4.18 The optimizer's state, in pages / 优化器状态，分页进出
#
# <div lang="en">
#
# Adam keeps 8 bytes of state per parameter and uses this state only once per step. `OffloadedOptimizer` keeps the state in the lower tier. On a CPU the state returns to memory in **pages**, each with the state of some parameter tensors. While one page is updated, the next page is read and the previous page is written. For the course's decoder, `OffloadedOptimizer` lowers the live bytes between two steps by 55.0 MB. **Guess first:** by how much is the peak of `step()` lower?
#
# </div>
# <div lang="zh">
#
# Adam 为每个参数保存 8 字节的状态，每步只用一次。`OffloadedOptimizer` 把状态放到下一级存储。在 CPU 上，状态分**页**换入内存，每页是若干个参数张量的状态。更新一页的同时读入下一页、写回上一页。用课程的解码器时，两步之间的存活字节少了 55.0 MB。**先猜**：`step()` 的峰值会低多少？
#
# </div>

# %%
from course_lib.lessons.lesson_04.steps import step_peak
from course_lib.offload import OffloadedOptimizer

all_above = step_peak(16, fraction=0)
measured = {mib: step_peak(mib) for mib in (1, 4, 16, 32)}
peaks = {"all the state in memory": all_above}
peaks |= {text("pages of {mib} MiB", mib=mib): measured[mib] for mib in (16, 4)}
table(["state", "peak of `step()` (MB)"], [(k, round(v / 1e6, 1)) for k, v in peaks.items()])

# %% [markdown]
# <div lang="en">
#
# With all the state in memory, the peak is 114.2 MB, and nearly half of this peak is state. With pages of 16 MiB, the default, the peak is only a tenth lower. The reason is that three pages are in memory at once, and these pages hold 50.3 MB.
#
# **Exercise 4.** All of the optimizer's state is offloaded. What is the peak of `step()`, in bytes? Weights and gradients are in memory, too. (Errors up to 6% are allowed, since a page holds the state of whole parameter tensors.)
#
# </div>
# <div lang="zh">
#
# 状态全在内存里时，峰值是 114.2 MB，其中将近一半是状态。每页 16 MiB（默认值）时，峰值却只低了十分之一。这是因为内存里同时有三页，共 50.3 MB。
#
# **练习 4。** 优化器的状态全部卸载之后，`step()` 的峰值是多少字节？权重和梯度也在内存里。（允许有 6% 的误差，因为一个参数张量的状态不会拆到两页。）
#
# </div>


# %% minutes=7
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
figures.draw_pages(peak_in_step, measured, plain=all_above)

# %% [markdown]
# <div lang="en">
#
# If the parameters are on a GPU, the CPU runs the update. For each parameter the CPU reads weight, gradient and two moments in host memory, and writes weight and moments, 28 bytes in all. At 200 GB/s the update of 7 billion parameters takes one second. `OffloadedOptimizer` can also offload only a **fraction** of the state, as Megatron-LM's hybrid optimizer does. Then the CPU updates only the parameters whose state is offloaded. The update of one parameter overlaps with copies of other parameters' gradients and weights. The weights after five steps equal those of `torch.optim.AdamW`:
#
# </div>
# <div lang="zh">
#
# 参数在 GPU 上时，更新由 CPU 来做。每更新一个参数，CPU 要从主机内存读出权重、梯度和两个矩，再写回权重和两个矩，一共读写 28 字节。按 200 GB/s 算，更新 70 亿个参数要一秒。`OffloadedOptimizer` 也可以只卸载一部分状态，由**比例**（fraction）决定，与 Megatron-LM 的混合优化器一样。这时 CPU 只更新状态已卸载的那些参数，CPU 更新一个参数的同时，其他参数的梯度和权重正在拷贝，即两者重叠（overlap）。做五步之后，权重与 `torch.optim.AdamW` 的相等：
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
halves = {mib: step_peak(mib, fraction=0.5) for mib in (16, 4)}
fractions = {"0": [all_above] * 2, "0.5": [*halves.values()], "1.0": [measured[16], measured[4]]}
rows = [(name, *(f"{peak / 1e6:.1f}" for peak in found)) for name, found in fractions.items()]
table(["fraction", *(text("pages of {mib} MiB (MB)", mib=mib) for mib in halves)], rows)

# %% [markdown]
# <div lang="en">
#
# If half of the state is offloaded in pages of 16 MiB, the peak does not fall. Three pages are in memory at the same time, and half of the state fits into three pages. Each step writes 8 bytes per offloaded parameter, and every step except the first also reads 8 bytes per offloaded parameter. (With fp32 master weights, each step writes and reads 12 bytes instead of 8.) The next cell counts these bytes for the five steps:
#
# </div>
# <div lang="zh">
#
# 只卸载一半状态、每页 16 MiB 时，峰值没有降低，因为同时有三页在内存里，而三页就装得下这一半状态。每一步都为每个卸载的参数写 8 字节，从第二步起还要读 8 字节（有 fp32 主权重时，两个 8 字节都变成 12 字节）。下面统计刚才那五步读写的字节：
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
# This script uses five techniques: prefetched batches (on a GPU from pinned memory), TF32, autocast with a GradScaler (lesson 05), clipping after unscaling, and an offloaded optimizer state. **Guess first:** by how many bytes does offloading the optimizer state lower the peak?
#
# </div>
# <div lang="zh">
#
# 这个脚本同时用了五种技术：预取批次（在 GPU 上用锁页内存），TF32，autocast 加 GradScaler（第 05 课），先还原缩放（unscale）再裁剪梯度，卸载优化器状态。**先猜**：卸载优化器状态会让峰值降低多少字节？
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
# The prefetcher makes the next batch while the current batch is used. So the time per batch is not the sum of two times, making a batch and using a batch, but only the longer time. Hardly any time is saved if making and using a batch need the same CPU core, or the GIL:
#
# </div>
# <div lang="zh">
#
# 当前批次还在使用时，预取器已在准备下一个批次，因此每个批次的时间不再是准备与使用的时间之和，而只是两者中较长的一个。如果准备批次与使用批次要抢同一个 CPU 核心，或抢 GIL，就几乎省不下时间。
#
# </div>

# %%
import time


def batches(work):
    for _ in range(10):
        work()  # makes the batch
        yield torch.zeros(1)


def seconds(work, wrap):
    start = time.perf_counter()
    for _ in wrap(batches(work)):
        work()  # uses the batch
    return round(time.perf_counter() - start, 2)


# %% tags=["nbval-ignore-output", "shows-seconds"]
cases = {"both wait 20 ms": lambda: time.sleep(0.02)}
cases["both compute in Python"] = lambda: sum(range(1_000_000))  # holds the GIL
rows = [(name, seconds(work, iter), seconds(work, Prefetcher)) for name, work in cases.items()]
table(["", "plain (s)", "prefetched (s)"], rows)

# %% [markdown]
# ## 4.20 On a GPU / 在 GPU 上
#
# <div lang="en">
#
# On CUDA the lower tier is pinned host memory. This cell measures on your GPU, or shows numbers recorded on an H100 and an H200. On the H200, `save_on_cpu` has the lowest peak, 4.11 GB. The peak of offload is 4.18 GB, because offload fetches storages ahead, and `save_on_cpu` waits for each copy. The difference is about as large as one layer's input. A non-blocking copy of 256 MB from pinned memory returns after 0.02 ms, and from pageable memory only after 28.6 ms.
#
# </div>
# <div lang="zh">
#
# 在 CUDA 上，下一级存储是主机（CPU）的锁页内存。有 GPU 时，这个单元格会现场测量。没有 GPU 时，就显示在 H100 和 H200 上记录的数据。在 H200 上，`save_on_cpu` 的峰值最低，是 4.11 GB。卸载的峰值是 4.18 GB，因为卸载会提前取回存储区，而 `save_on_cpu` 每次都要等拷贝完成。两者的差约等于一层的输入。从锁页内存“非阻塞”拷贝 256 MB，调用 0.02 ms 就返回；从可分页内存拷贝，要 28.6 ms 才返回。
#
# </div>

# %% tags=["nbval-ignore-output", "shows-device"]
from course_lib.lessons import on_gpu

on_gpu("04")
# %% [markdown]
# <div lang="en">
#
# The next cell prints the library's methods for CUDA: first `on`, which selects a stream, then the methods in the table of section 4.5:
#
# </div>
# <div lang="zh">
#
# 下面是课程库为 CUDA 写的方法，先是选择流的 `on`，然后是 4.5 节表中的各个方法。
#
# </div>

# %%
from course_lib.offload.device import Cuda

for name in ("on", "side", "event", "wait", "finish", "used", "pinned"):
    print(inspect.getsource(getattr(Cuda, name)))
