# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] slide={"en": "Every activation goes to a file until backward needs it, and not one FLOP is done twice.\n\nWhen does a copy cost nothing?", "zh": "每份激活值都先挪进文件，反向用到时再取回，没有一个 FLOP 算两遍。\n\n拷贝什么时候没有代价？"}
# # 4 What if we move bytes to a lower tier instead? (offload) / 不忘掉，而是挪到下一级存储呢？（卸载）
#
# <div lang="en">
#
# Move every activation of the course's step to a file, and fetch it when backward asks for it. The peak falls, and not one FLOP is done twice. Does it fall further than with a checkpoint around each layer? And further still with both?
#
# So where is the price? Take a link that is just fast enough: by arithmetic, each copy takes no longer than the computation that runs at the same time. Does the step then take as long as it does without copies? When does a copy cost nothing?
#
# </div>
# <div lang="zh">
#
# 把课程这一步里的每份激活值都挪进文件，反向用到时再取回，峰值就降低了，而且没有一个 FLOP 算两遍。这就是**卸载**（offload）：把暂时不用的数据移到下一级存储，不是“卸载软件”的卸载。它比每层一个检查点降得更多吗？两者合用，还会更低吗？
#
# 那么代价在哪里？假设有一条链路刚好够快，也就是说，算起来每次拷贝都不比同时进行的计算更久。这时训练步的用时，与没有拷贝时一样吗？拷贝究竟什么时候没有代价？
#
# </div>

# %%
from course_lib.teaching import language

language()

# %% [markdown]
# <div lang="en">
#
# **Goals** (90 minutes). See a copy hide, and type the time of a step that a clock then confirms. Write activation offload from nothing. Say which wait orders which two things, and what happens without it. Say what checkpoints, offload and both together do to the peak, and why. Predict how much memory an optimizer step takes whose state is offloaded.
#
# **What to know before**: lesson 01; lesson 02 for saved-tensor hooks and checkpoints.
#
# </div>
# <div lang="zh">
#
# **目标**（90 分钟）：亲眼看见一次拷贝被掩盖，写出一步所需的时间，再由时钟来验证；从零写出激活值卸载；说出每一处等待把哪两件事排出先后，少了它会怎样；说出检查点、卸载以及两者合用时峰值各会怎样，原因是什么；预测优化器状态放到下一级存储之后，更新时还要占多少。
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

from course_lib.checkpoint import checkpoint_blocks
from course_lib.lessons import lesson_04, what_you_may_have_read
from course_lib.lessons.ledger import ledger
from course_lib.memory import MemoryMeter
from course_lib.models import Decoder, deep_mlp, random_tokens
from course_lib.offload import DiskStore, HostStore, offload_activations
from course_lib.simulated import SimulatedDevice
from course_lib.teaching import predictions, table, text, timelines

# %% [markdown]
# ## 4.1 Four tiers / 四个存储层级
#
# <div lang="en">
#
# Data may lie on several **tiers**: on the chip, in the device's memory, in the host's, on a disk. The **lower tier** is the one farther from the arithmetic. The numbers are those of an H100's data sheet and of a usual server; a link's is for one way.
#
# </div>
# <div lang="zh">
#
# 数据可以放在几个**存储层级**上：芯片上、设备内存（在 GPU 上就是显存）、主机内存、磁盘。**下一级存储**指离计算更远的那个存储层级。图中的数取自 H100 的数据手册和常见的服务器；链路的带宽按单向计。
#
# </div>

# %% slide="result"
lesson_04.draw_tiers()

# %% [markdown] slide={"en": "989 TFLOP/s, and 63 GB/s to the host.\n\n**Guess first.** How many FLOPs must come with each byte, so that its copy hides?", "zh": "989 TFLOP/s，到主机 63 GB/s。\n\n**先猜**：每搬一个字节，要配多少 FLOPs，拷贝才能被掩盖？"}
# <div lang="en">
#
# A copy can hide behind the products that run at the same time if it takes no longer than they do. So each byte must come with a number of FLOPs: the device's FLOPs per second over the link's bytes per second. That is the **threshold**, a matter of the machine. The FLOPs that the network does per byte moved are its **arithmetic intensity** towards the lower tier.
#
# **Guess first:** a GPU with 989 TFLOP/s (H100, dense bf16) behind PCIe 5. How many FLOPs must come with each byte?
#
# </div>
# <div lang="zh">
#
# 只要一次拷贝不比同时进行的矩阵乘法更久，它就能被掩盖。所以每个字节都要配上一定数量的 FLOPs：设备每秒的 FLOPs 除以链路每秒的字节。这就是**阈值**，取决于机器。网络能提供的，即每搬一个字节做多少 FLOPs，是它相对于下一级存储的**算术强度**。
#
# **先猜**：一块 989 TFLOP/s 的 GPU（H100，稠密 bf16），经 PCIe 5 拷贝。每个字节要配多少 FLOPs？
#
# </div>

# %% slide="result"
rate = 989e12  # FLOP/s
links = {"NVMe": 7e9, "PCIe 3": 15.75e9, "PCIe 4": 31.5e9, "PCIe 5": 63e9, "NVLink-C2C": 450e9}
{name: round(rate / bandwidth) for name, bandwidth in links.items()}

# %% [markdown]
# <div lang="en">
#
# Over PCIe 5 nearly 16,000; over the other links from 2,000 to 141,000. (Section 4.11 draws which widths of a transformer offer that many.) But a threshold says only that copies *can* hide. Do they?
#
# </div>
# <div lang="zh">
#
# 经 PCIe 5 要将近 16,000，经其余的链路要 2,000 到 141,000。（哪些隐藏维度的 transformer 能提供这么多，4.11 节有图。）但是，阈值只说拷贝**可以**被掩盖。真的被掩盖了吗？
#
# </div>

# %% [markdown]
# ## 4.2 Three lanes / 三条泳道
#
# <div lang="en">
#
# A `SimulatedDevice` has what GPUs have: a stream for compute, and one engine each for copies to the host (D2H, as profilers write) and to the GPU (H2D). Operators run here; its clock counts FLOPs, and bytes on the links. (GELU has no product, so it takes no time.)
#
# Sixteen times Linear and GELU, 2000 rows, 256 wide, at $10^{12}$ FLOP/s. A layer's forward takes $f$ seconds, its backward $g = 2 f$. It saves two storages of $B$ = 2.048 MB, the Linear's input and GELU's. The link is exactly at the threshold: two copies of $c$ seconds take one $f$. In backward, $p$ storages are fetched ahead (`prefetch`).
#
# </div>
# <div lang="zh">
#
# `SimulatedDevice` 具备 GPU 所具备的：一条计算流，外加两个拷贝引擎，一个管换出（D2H，性能分析器里用这个名字），一个管换入（H2D）。算子真的在本机运行；它的时钟则计 FLOPs 和链路上的字节。（GELU 没有矩阵乘法，所以不花时间。）
#
# 网络是十六层 Linear 加 GELU，2000 行，宽 256，算力 $10^{12}$ FLOP/s。一层的前向要 $f$ 秒，反向 $g = 2 f$ 秒。它保存两份存储区（storage），各 $B$ = 2.048 MB：一份是 Linear 的输入，一份是 GELU 的输入。链路正好在阈值上：两次拷贝，每次 $c$ 秒，合起来就是一个 $f$。反向时提前取回 $p$ 份（`prefetch`，预取）。
#
# </div>

# %%
batch = torch.linspace(-1, 1, 2000 * 256).view(2000, 256)
B, f = batch.nbytes, 2 * 2000 * 256**2 / 1e12  # bytes of a storage, seconds of a layer's forward


def step_on_device(p, link, in_flight=2):  # p = None: nothing is moved
    both_ways = dict.fromkeys(("up_bytes_per_second", "down_bytes_per_second"), link)
    with SimulatedDevice(flops_per_second=1e12, **both_ways) as device:
        network, x = device.move(deep_mlp(depth=16, width=256)), device.move(batch)
        for parameter in network.parameters():
            parameter.grad = torch.zeros_like(parameter)
        began, held = device.seconds, device.live_bytes
        moving = offload_activations(min_bytes=1 << 16, prefetch=p, in_flight=in_flight)
        with nullcontext() if p is None else moving:
            loss = network(x).sum()
        loss.backward()
    return device, began, held


# %% [markdown] slide={"en": "Two copies take as long as a layer's forward.\n\n**Guess first.** How much longer is the step with $p$ = 0, 1, 2?", "zh": "两次拷贝与一层的前向一样久。\n\n**先猜**：$p$ = 0、1、2 时，这一步会久多少？"}
# <div lang="en">
#
# **Guess first:** without copies the step takes 12.3 ms. How long does it take with $p$ = 0, 1, 2?
#
# </div>
# <div lang="zh">
#
# **先猜**：不拷贝时，这一步要 12.3 毫秒。$p$ = 0、1、2 时各要多久？
#
# </div>

# %% slide="result"
threshold = 2 * B / f  # bytes a second: two copies in the time of one layer's forward
runs = {p: step_on_device(p, threshold) for p in (0, 1, 2)}
lesson_04.draw_lanes(runs, plain=47 * f)  # 16 f + 16 g, less the gradient of the batch, f

# %% [markdown]
# <div lang="en">
#
# Forward is the same in all three runs: copies to the host run next to it. In backward with $p$ = 0, the lanes take turns: a fetch starts when its operator is next, and compute waits. With $p$ = 2 all copies are still made, but add almost no time.
#
# In backward, a layer first needs GELU's storage, which takes no time, then the Linear's, for the products ($g$). When backward begins to use its $i$-th storage, the fetch of number $i + p$ starts. With $p$ = 0, a storage is fetched only when it is needed. Copies on one lane take turns.
#
# **Exercise 1.** Type the seconds of forward and backward for $L$ layers, for $p$ = 0, 1, 2, from $f$, $g$ and $c$. Any of these may be the longest. The check compares with the clock on four links, and allows an error of 8%, because a step's ends differ from its middle.
#
# </div>
# <div lang="zh">
#
# 三种情形的前向都一样，换出与它并行。反向里，$p$ = 0 时两条泳道轮流忙：轮到某个算子了，才开始取它要的那份，计算只好等。$p$ = 2 时，拷贝一次也没少，却几乎不再多花时间。
#
# 反向时，一层先要 GELU 的存储区（用它不花时间），再要 Linear 的，然后做矩阵乘法（$g$）。把存储区按反向使用的顺序编号，轮到第 $i$ 份被使用时，就启动第 $i + p$ 份的取回。$p$ = 0 表示用到它自己时才去取。同一条泳道上的拷贝一个接一个。
#
# **练习 1。** 用 $f$、$g$、$c$ 写出 $L$ 层的前向加反向要多少秒，$p$ = 0、1、2 都要对；三者之中谁最长都有可能。检查会在四条链路上与时钟比较，容许 8% 的误差：一步的首尾与中间略有不同。
#
# </div>


# %% minutes=11
def step_time(L, f, g, c, p):
    return None


lesson_04.check_step_time(step_time)


# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not lesson_04.check_step_time.accepted:

    def step_time(L, f, g, c, p):
        backward = {0: g + 2 * c, 1: c + max(g, c), 2: max(g, 2 * c)}[p]
        return L * max(f, 2 * c) + L * backward - f  # the first layer hands no gradient on


lesson_04.check_step_time(step_time)
### END SOLUTION

# %% slide="result"
clock = {(c, p): lesson_04.clock(16, c, p) for c in (0.25, 0.5, 1, 2) for p in (0, 1, 2)}
lesson_04.draw_times(step_time, clock)

# %% [markdown] slide={"en": "A formula of three lines agrees with the clock to within 8%.\n\n$p$ hides the copies to the GPU. What hides those to the host?", "zh": "三行代码的公式，与模拟时钟相差不到 8%。\n\n$p$ 掩盖换入。那么换出呢？"}
# <div lang="en">
#
# The same network, sixteen layers (small ones, since only the ratio of $c$ to $f$ counts). The points lie on your lines, or a little below: nothing is copied before the first layer, and the last ones never leave.
#
# And the copies to the host? `in_flight` says how many of them may be in flight at once, by default 2 on CUDA and 1 on a CPU. At the threshold, the time relative to the step without copies, and the peak above the start of the step:
#
# </div>
# <div lang="zh">
#
# 网络还是十六层（取得小，因为只有 $c$ 与 $f$ 之比起作用）。点落在你的线上，或略低一点：第一层之前没有拷贝，最后几份从不离开。
#
# 那么换出呢？同时可以有几次换出在途（in flight），由 `in_flight` 决定，默认值在 CUDA 上是 2，在 CPU 上是 1。下表是在阈值上的结果，列出与不拷贝的一步相比的时间，以及峰值比这一步开始时多占的字节：
#
# </div>

# %% slide="result"
device, began, _ = step_on_device(None, threshold)
plain, rows, times = device.seconds - began, [], {}
for ahead, in_flight in ((0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (2, 2)):
    device, began, held = runs[ahead] if in_flight == 2 else step_on_device(ahead, threshold, 1)
    times[ahead, in_flight] = (device.seconds - began) / plain
    above = (device.peak_bytes - held) / B
    rows.append((in_flight, ahead, round(times[ahead, in_flight], 3), round(above, 2)))
columns = ["copies in flight", "fetched ahead, p", "time (× baseline)"]
table([*columns, "peak above the start (in units of B)"], rows)

# %% [markdown]
# <div lang="en">
#
# Two storages fetched ahead hide the copies to the GPU, and two copies in flight hide those to the host. Both are needed: with one copy in flight, forward alone takes 1.5 times as long, since the second of a layer's two storages must wait for the first. Hiding costs memory: one $B$ per storage fetched ahead. The depth does not matter: the peak here is $(p + 4)\,B$, with three layers as with sixteen.
#
# </div>
# <div lang="zh">
#
# 提前取回两份，换入就被掩盖。允许两次换出同时在途，换出就被掩盖。两者缺一不可。只许一次换出在途时，光前向就要 1.5 倍的时间，因为每层保存两份存储区，第二份得等第一份。掩盖是用内存换来的：每多提前取回一份，就多占一个 $B$。这与深度无关，三层和十六层一样，峰值都是 $(p + 4)\,B$。
#
# </div>

# %% [markdown] slide={"en": "Two hooks: **pack** copies a storage out, **unpack** brings it back.\n\nWhat must not move? What moves once? When is it released?", "zh": "两个钩子：**pack** 把存储区换出，**unpack** 取回来。\n\n什么不该搬？什么只搬一次？什么时候释放？"}
# ## 4.3 From nothing / 从零写起
#
# <div lang="en">
#
# An activation is freed when nothing refers to it any more, neither autograd's saved tensors nor your own variables. So a function that copies its input to the lower tier frees nothing, because the next operator saves the same storage (section 4.12). The two hooks of lesson 02 do free it, because autograd then keeps what the first hook returns. They follow four rules:
#
# - A **parameter** never moves, because the model keeps it in any case. A Linear saves `weight.t()`, a view, so compare storages and not tensors.
# - A **storage** moves once, even if several operators save it, and once more if it is changed in place in between. `tensor._version` counts these changes.
# - The second hook returns the **view** that was saved, with its shape, stride and offset.
# - When backward no longer needs an activation, its copy in the lower tier is **released**, too.
#
# </div>
# <div lang="zh">
#
# 只有当一个激活值不再被任何地方引用时，它的内存才会释放。引用它的有 autograd 保存的张量，也可能有你自己的变量。所以，一个函数如果只是把输入拷贝到下一级存储，就什么也没有释放，因为下一个算子仍然保存着同一份存储区（4.12 节）。要靠第 02 课的两个钩子：有了它们，autograd 保存的就不再是张量，而是第一个钩子的返回值。两个钩子要遵守四条规则：
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
# `store` stands for the lower tier. `whole(tensor)` returns all of the tensor's storage as one row of numbers. `room = store.put(row)` copies a row to the lower tier. `room.get()()` copies it back and returns it as a new row. When nothing refers to `room` any more, its bytes in the lower tier are free again. `rooms` maps each storage to its version and its room; when a storage is freed, its entry disappears. (The address of a storage would not do as the key, because the allocator gives a freed address to the next tensor.) `stay` is the set of storages that must not move.
#
# **Exercise 2.** Fill in the two hooks. `pack` gets a tensor and returns what the graph keeps in its place. `unpack` gets that back and returns the tensor, by `row.as_strided(shape, stride, offset)`.
#
# </div>
# <div lang="zh">
#
# `store` 代表下一级存储。`whole(tensor)` 把张量的整份存储区排成一行数。`room = store.put(row)` 把一行数换出到下一级存储，`room.get()()` 把它取回来，得到新的一行。`room` 不再被引用时，它在下一级存储里占的字节就空出来了。`rooms` 记录每份存储区的版本和它的 `room`，存储区释放之后，对应的记录会自动消失。（不能用地址作键，因为分配器会把释放了的地址再分给下一个张量。）`stay` 是不许搬走的存储区的集合。
#
# **练习 2。** 写出两个钩子。`pack` 接到一个张量，返回计算图要改存的东西；`unpack` 接到这个东西，用 `row.as_strided(shape, stride, offset)` 恢复出张量并返回。
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


lesson_04.check_offloading(offloading)


# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not lesson_04.check_offloading.accepted:

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


lesson_04.check_offloading(offloading)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# Before any claim of saving: are the gradients of the course's decoder equal, to the bit? On a CPU the lower tier is a file. Yours, and the library's `offload_activations`, which keeps the last $p + 1$ storages (backward needs them first), leaves small storages alone, and notices what is changed in place (section 4.13).
#
# </div>
# <div lang="zh">
#
# 谈节省之前先问：课程解码器的梯度逐比特相等吗？在 CPU 上，下一级存储是文件。一个是你写的，一个是库里的 `offload_activations`：后者留下最后 $p + 1$ 份（反向最先用到它们），太小的存储区不搬，还能发现原地改动（4.13 节）。
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
ways["library"] = offload_activations(DiskStore(), min_bytes=1 << 17)
{name: all(map(torch.equal, expected, gradients(context))) for name, context in ways.items()}

# %% [markdown] slide={"en": "A stream does its work in order; two streams know nothing of each other.\n\nAn **event** marks a place in one. Who waits for it?", "zh": "一条流按顺序做事；两条流互不知情。\n\n**事件**是一条流里的记号。谁该等它？"}
# ## 4.4 Streams, and one wait taken away / 流，以及少了一处等待
#
# <div lang="en">
#
# The host gives orders and goes on without waiting for results. A **stream** executes its orders one after the other. The orders of two streams may run in any order, unless one stream waits for an **event** of the other. An event marks the end of all orders that a stream has been given so far. `device.wait(event)` makes the current stream wait for it, and `device.finish(event)` makes the host wait. Below, `copy` starts a copy. `_start_copy` and `read` return a function that makes the current stream wait for that copy, and the library calls it before the copied numbers are used. Before `read` copies a storage back, it waits until the copy to the host is complete:
#
# </div>
# <div lang="zh">
#
# 主机只管下达任务，不等结果就继续往下走。一条**流**（stream）按顺序逐个执行自己的任务。两条流的任务谁先谁后没有规定，除非一条流等待另一条流的**事件**（event）。事件是一个记号，标在那条流此前接到的所有任务之后。`device.wait(event)` 让当前的流等到这个记号为止，`device.finish(event)` 则让主机等。在下面的代码里，`copy` 启动一次拷贝。`_start_copy` 和 `read` 返回一个函数，它让当前的流等待这次拷贝完成，库在使用拷来的数之前调用它。而 `read` 取回一份存储区之前，要先等换出完成：
#
# </div>

# %% slide="result"
print(inspect.getsource(SimulatedDevice.copy))

# %% slide="result"
print(inspect.getsource(HostStore._start_copy))
print(inspect.getsource(HostStore.read))

# %% slide="result"
lesson_04.draw_order()

# %% [markdown]
# <div lang="en">
#
# Each of these waits has a reason:
#
# - **Made**, then copied to the host: the copy must not read a storage before it has been computed.
# - Copied to the host, then **released**: the allocator gives released memory to the next tensor at once, so the copy must have read the storage by then.
# - Copied to the host, then read by the **host**: the host must not read numbers that have not arrived yet.
# - Copied to the GPU, then **used**: no operator may use a storage before its copy has finished.
#
# (Two more are not shown. In the lower tier, `release` waits before it gives memory to another storage. On CUDA, `record_stream` tells the allocator which stream still uses a tensor.)
#
# </div>
# <div lang="zh">
#
# 每一处等待都有原因：
#
# - 先**算好**，再换出：一份存储区还没有算好，拷贝就不能去读它。
# - 先换出，再**释放**：拷贝还没有读完，这份存储区的内存就不能释放，因为分配器会立刻把它分给下一个张量。
# - 先换出，**主机**再读：数还没有到，主机就不能去读。
# - 先换入，再**使用**：拷贝还没有完成，任何算子都不能使用这份存储区。
#
# （还有两处没有画出来。在下一级存储里，`release` 要先等待，才把一份存储区的内存让给另一份。在 CUDA 上，`record_stream` 告诉分配器，哪条流还在使用一个张量。）
#
# </div>

# %% [markdown]
# <div lang="en">
#
# If a wait is missing, the simulated device reports a **race**: two accesses to the same memory whose order nothing determines. The numbers may still be right, but only by luck. Two modes remove this luck: `late` runs each copy as late as the waits allow, and `early` runs everything else as early as they allow.
#
# </div>
# <div lang="zh">
#
# 少了其中一处会怎样？模拟设备会报告**竞争**（race），意思是有两次操作访问同一块内存，而它们的先后没有任何规定。这时结果也可能是对的，但只是碰巧。设备有两种模式可以排除这种巧合：`late` 让每次拷贝在等待所允许的范围内尽量晚，`early` 让其余的操作在等待所允许的范围内尽量早。
#
# </div>


# %%
class Hasty(HostStore):  # whatever uses a copy in one direction does not wait for it
    missing = None  # "down" or "up"

    def _start_copy(self, reservation, target, source, device, name):
        wait = super()._start_copy(reservation, target, source, device, name)
        return (lambda: None) if name == self.missing else wait


class Unordered(SimulatedDevice):  # a copy does not wait for what makes its source
    def copy(self, target, source, name):
        with self.on(self.side(name)):
            self.transfer(target, source)
            return self.event()


# %% slide="result"
lesson_04.without_waits(Hasty, Unordered)

# %% [markdown]
# <div lang="en">
#
# In the normal mode the gradient is right in every row. That is how such a mistake gets into a release. diffusers' pull request 13502 is an example: a `wait_stream` was missing where weights are copied to the GPU. Reduced to pure PyTorch, about 98% of iterations gave wrong numbers on five GPUs of one make, and none with the wait; on another machine PyTorch's CUDA sanitizer named the race. (`lesson_04.without_waits` runs five layers with `offload_activations`.) Three programs, each with one wait missing:
#
# </div>
# <div lang="zh">
#
# 照常运行时，每一行的梯度都对，这类错误就是这样混进发行版的。diffusers 的合并请求 13502 就是一例：权重换入 GPU 的地方少了一处 `wait_stream`。化简成纯 PyTorch 代码后，在同一型号的五块 GPU 上约有 98% 的迭代给出错误的数，补上等待后一次也没有；在另一台机器上，PyTorch 的 CUDA sanitizer 也指出了这处竞争。（`lesson_04.without_waits` 用 `offload_activations` 跑一个五层的网络。）下面三个程序，各少一处等待：
#
# </div>


# %%
def started_down(device, y):  # a copy to the host that is in flight, and the event of its end
    host = device.pinned(y.shape, y.dtype)
    return host, device.copy(host, y, "down")


def started_up(device, host):
    x = torch.zeros(host.shape)  # made inside the block: the device's
    return x, device.copy(x, host, "up")


# %% [markdown]
# <div lang="en">
#
# **Exercise 3.** Put the one missing line into each function: `device.wait(copied)`, or `device.finish(copied)` where the host has to wait, and nowhere else. The check runs all three in each mode, and looks at races and at numbers.
#
# </div>
# <div lang="zh">
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


lesson_04.check_waits((read, use, let_go))

# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not lesson_04.check_waits.accepted:

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


lesson_04.check_waits((read, use, let_go))
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# The first is the silent classic: `y.to("cpu", non_blocking=True)`, read at once. Nothing fails; the numbers are those that the memory had before. Here is what `late` makes of it, with the wait and without:
#
# </div>
# <div lang="zh">
#
# 第一个是经典的无声错误：`y.to("cpu", non_blocking=True)` 之后马上就读。什么也不报错，读到的却是那块内存里原来的数。看 `late` 模式下会怎样，先不等，再等：
#
# </div>

# %% slide="result"
numbers_read = [lesson_04.read_late(waits) for waits in (False, True)]
numbers_read

# %% [markdown] slide={"en": "The course's decoder: offload, or checkpoints, or both.\n\n**Guess first.** Which of the three peaks lowest? Which moves least?", "zh": "课程的解码器：卸载、检查点，或两者合用。\n\n**先猜**：三者之中谁的峰值最低？谁搬得最少？"}
# ## 4.5 The decoder: moved, forgotten, or both / 解码器：搬走、忘掉，还是都用
#
# <div lang="en">
#
# A layer of the course's decoder saves 20,987,904 bytes: 20 times the 1,048,576 of its input, and 16,384 of the norms' statistics, too small to be moved. Behind the layers come two storages as large as an input, the last norm's and the head's, and last the log-probabilities, 8,388,608. With a checkpoint around each layer, a layer saves its input alone.
#
# **Exercise 4.** How many bytes does a step copy to the lower tier, with $p$ = 0, 1, 2 storages fetched ahead? The last $p + 1$ storages stay. (`checkpointed` is True or False.)
#
# </div>
# <div lang="zh">
#
# 课程解码器的一层保存 20,987,904 字节：是它的输入 1,048,576 字节的 20 倍，外加归一化的统计量 16,384 字节（太小，不搬）。各层之后，还有两份与输入一样大，一份属于最后一个归一化，一份属于输出头；最后保存的是对数概率，8,388,608 字节。每层加一个检查点，则每层只保存它的输入。
#
# **练习 4。** 提前取回 $p$ = 0、1、2 份时，一步里要把多少字节换出到下一级存储？最后 $p + 1$ 份存储区留下。（`checkpointed` 取 True 或 False。）
#
# </div>


# %% minutes=5
def moved(p, checkpointed):
    return None


lesson_04.check_moved(moved)


# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not lesson_04.check_moved.accepted:

    def moved(p, checkpointed):
        inputs = 8 * (1 if checkpointed else 20) + 2
        return (inputs - p) * 1_048_576  # the log-probabilities are one of those that stay


lesson_04.check_moved(moved)
### END SOLUTION


# %%
def metered_step(checkpointed, p):  # the step of lesson 01; p = None: nothing is moved
    decoder, file = make_decoder(), DiskStore()
    adam, tokens = torch.optim.Adam(decoder.parameters()), random_tokens(8, 128, 2048)
    for parameter in decoder.parameters():
        parameter.grad = torch.zeros_like(parameter)
    adam.step()  # makes its state
    decoder.zero_grad()
    if checkpointed:
        checkpoint_blocks(decoder, "layers.*")
    with MemoryMeter(decoder, adam) as meter:
        with nullcontext() if p is None else offload_activations(file, min_bytes=2**17, prefetch=p):
            loss = decoder.loss(tokens)
        loss.backward()
        adam.step()
    return meter, file.stats.bytes_down


# %%
steps = {(k, p): metered_step(k, p) for k in (False, True) for p in (None, 0, 1, 2)}
names = {False: "offload, p = {p}", True: "both, p = {p}"}
rows = [(text(names[k], p=p), moved(p, k), steps[k, p][1]) for k, p in steps if p is not None]
predictions(rows, unit="bytes")

# %% [markdown]
# <div lang="en">
#
# With both, only 1/16 to 1/20 of the bytes move. **Guess first:** and the peak, with offload, with checkpoints, with both?
#
# </div>
# <div lang="zh">
#
# 合用时，搬的字节少得多，只有 1/16 到 1/20。**先猜**：峰值呢？只卸载、只用检查点、两者合用，各是多少？
#
# </div>

# %% jupyter={"source_hidden": true} slide="result"
arms = {"plain": (False, None), "offload": (False, 1)}
arms |= {"checkpoint": (True, None), "checkpoints and offload": (True, 1)}
rows = [(name, f"{steps[arm][0].peak_bytes:,}", steps[arm][1]) for name, arm in arms.items()]
table(["step", "peak (bytes)", "copied to the file (bytes)"], rows)

# %% jupyter={"source_hidden": true} slide="result"
two = {name: steps[arms[name]][0] for name in ("offload", "checkpoints and offload")}
title = "With checkpoints a whole layer is in memory at once, and the peak is 9 MB higher"
timelines(two, title=title, panel_height=1.9)

# %% [markdown] slide={"en": "124.8 MB against 134.0: with checkpoints on top the peak is **higher**.\n\nTheir inputs are gone by then, and a whole layer is back.", "zh": "124.8 MB 对 134.0 MB：再加检查点，峰值反而**更高**。\n\n峰值那一刻，被搬走的输入反正不在了；而整整一层都回来了。"}
# <div lang="en">
#
# 134,006,104 bytes: both together save not one byte more than checkpoints alone, and peak 9 MB higher than offload alone. The peak is at the end of backward, when nearly all gradients have arrived. By then the inputs of the later layers have been freed, whether they were moved or not. Still live are the activations of the **first** layer: offload brings them back one tensor at a time, and a checkpoint recomputes all of them at once. Only bytes that are absent at the peak lower it (section 2.5).
#
# Is it a mistake, then, to use both? At $p$ = 1 they move only 1/18 of the bytes, which pays on a slow link. And with more layers or longer sequences, the inputs that the checkpoints keep are a large part of the peak, so moving them lowers it. accelerate's pull request 4175 saw both cases, on GPUs.
#
# </div>
# <div lang="zh">
#
# 134,006,104 字节：两者合用，比只用检查点一个字节也没少，比只卸载高 9 MB。峰值在反向快结束时，这时梯度几乎都到齐了，后面各层的输入无论搬走过没有，都已经用完并释放。仍然存活的，是**第一层**的激活值。卸载一次只取回一个张量，检查点则把它们一次全部重新算出来。只有在峰值那一刻不在内存里的字节，才能降低峰值（2.5 节）。
#
# 那么合用就错了吗？$p$ = 1 时，合用要搬的字节只有只卸载时的 1/18，链路慢的时候就很划算。而层数更多或序列更长时，峰值里有很大一部分是检查点保存的那些输入，把它们搬走就能降低峰值。这两种情形，accelerate 的合并请求 4175 在 GPU 上都见到了。
#
# </div>

# %% slide="result"
now = (20e9, 2, False), (2e9, 2, True)  # link, p, checkpointed
lesson_04.decoder_lanes({lanes: lesson_04.simulated_decoder(*lanes) for lanes in now})

# %% [markdown]
# <div lang="en">
#
# The table shows the same step on the simulated device, at $10^{12}$ FLOP/s (without Adam, with gradients from the start, and with two copies in flight). Forward computes 84 FLOPs for each byte that it saves. The threshold is 50 FLOPs per byte at 20 GB/s, and 500 at 2 GB/s. So the link decides. On the fast one, offload alone takes almost no extra time, and checkpoints cost a fifth. On the slow one, offload alone takes almost four times as long as the plain step; with checkpoints, so few bytes move that their copies are hidden.
#
# But 84 is an average, and the bytes that attention saves come with fewer FLOPs. At 12 GB/s, where the threshold is 83, offload alone still takes 1.12 times as long as the plain step. Only below 9.3 GB/s is it slower than checkpoints alone.
#
# </div>
# <div lang="zh">
#
# 表中是同一个训练步在模拟设备上的用时，算力为 $10^{12}$ FLOP/s。（不含 Adam，梯度从一开始就存在，同时可以有两次拷贝在途，也就是两次都还没有完成。）前向每保存一个字节，平均要计算 84 FLOPs。链路为 20 GB/s 时，阈值是每字节 50 FLOPs；2 GB/s 时，阈值是 500。所以哪种办法好，取决于链路。链路快时，只卸载几乎不多花时间，而检查点要多花五分之一。链路慢时，只卸载要花基线将近四倍的时间；如果再加上检查点，要搬的字节就少得多，拷贝可以被计算掩盖。
#
# 不过 84 只是平均值，注意力保存的字节所配的 FLOPs 要少一些。链路为 12 GB/s 时，阈值是 83，可是只卸载的一步仍要花基线 1.12 倍的时间。低于 9.3 GB/s 时，它才比只用检查点更慢。
#
# </div>

# %% [markdown] slide={"en": "Adam's state: 8 bytes a parameter, used once a step.\n\n**Guess first.** All of it is offloaded. How high is the peak **during** `step()`?", "zh": "Adam 的状态：每个参数 8 字节，每步只用一次。\n\n**先猜**：全都卸载之后，`step()` **当中**的峰值是多少？"}
# ## 4.6 The optimizer's state, in pages / 优化器状态，分页进出
#
# <div lang="en">
#
# Adam keeps 8 bytes of state per parameter and uses them only once per step, so it is well suited to be moved. `OffloadedOptimizer` keeps the state in the lower tier, and its steps equal those of `torch.optim.AdamW` (section 4.15). On a CPU the state returns to memory in **pages**, each with the state of some parameters. While one page is updated, the next one is read and the previous one is written. Between two steps, 55.0 MB less are live. But during `step()` some pages are in memory, and its peak includes them.
#
# **Exercise 5.** All of the state is offloaded. What is the peak of `step()`, in bytes? The weights and the gradients are in memory, too. (An error of 6% is allowed, since pages hold the state of whole parameters.)
#
# </div>
# <div lang="zh">
#
# Adam 为每个参数保存 8 字节的状态，每步只用一次，所以最适合搬走。`OffloadedOptimizer` 把状态放到下一级存储，每一步的结果都与 `torch.optim.AdamW` 相等（4.15 节）。在 CPU 上，状态分**页**换入内存，每页是若干个参数张量的状态。更新这一页的同时，读入下一页，写回上一页。步与步之间少占 55.0 MB。可是在 `step()` 当中，有几页在内存里，它的峰值就包括这几页。
#
# **练习 5。** 状态全部卸载之后，`step()` 的峰值是多少字节？权重和梯度也在内存里。（允许有 6% 的误差，因为一个参数张量的状态不会拆到两页。）
#
# </div>


# %% minutes=5
def peak_in_step(parameters, page_bytes):
    return None


lesson_04.check_peak_in_step(peak_in_step)


# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not lesson_04.check_peak_in_step.accepted:

    def peak_in_step(parameters, page_bytes):
        return 8 * parameters + min(3 * page_bytes, 8 * parameters)


lesson_04.check_peak_in_step(peak_in_step)
### END SOLUTION


# %% slide="result"
from course_lib.offload import OffloadedOptimizer


def step_peak(mib, fraction=1.0):
    decoder = make_decoder()
    adam = OffloadedOptimizer(decoder.parameters(), fraction=fraction, page_bytes=mib << 20)
    for _ in range(2):  # the first step makes the state
        for parameter in decoder.parameters():
            parameter.grad = torch.ones_like(parameter)
        with MemoryMeter(decoder, adam) as meter:
            adam.step()
    return meter.peak_bytes


measured = {mib: step_peak(mib) for mib in (1, 4, 8, 16, 32)}
lesson_04.draw_pages(peak_in_step, measured, plain=step_peak(16, fraction=0))

# %% [markdown]
# <div lang="en">
#
# With pages of 16 MiB, the default, the peak of `step()` is 103.7 MB instead of 114.2. This saves a tenth, although nearly half of the 114.2 MB is state. With pages of 4 MiB the peak is 67.1 MB. (At 1 MiB, each of the largest parameters needs a larger page of its own, so the points leave the line.) If half of the state is offloaded, pages of 16 MiB save nothing (section 4.15). If the peak of the training step is in backward, as it is without any technique, the size of the pages does not matter.
#
# With a GPU, the CPU runs the update in host memory. For each parameter it reads weight, gradient and two moments, and writes weight and moments, 28 bytes in all. At 200 GB/s this takes one second for 7 billion parameters. No figure about the link includes this price.
#
# </div>
# <div lang="zh">
#
# 每页 16 MiB（默认值）时，`step()` 的峰值从 114.2 MB 降到 103.7 MB，只省了十分之一，而状态占了其中将近一半。每页 4 MiB 时，峰值是 67.1 MB。（每页 1 MiB 时，最大的几个参数张量要各占一页，而且超过 1 MiB，所以点偏离了线。）如果只卸载一半状态，每页 16 MiB 就一点也不省（4.15 节）。如果整个训练步的峰值在反向里，就像不用任何技术时那样，那么页多大都没有关系。
#
# 使用 GPU 时，更新由 CPU 在主机内存里做。每个参数要读权重、梯度和两个矩，再写回权重和两个矩，一共读写 28 字节。按 200 GB/s 算，70 亿个参数要一秒。这笔代价不经过链路，所以链路的数据里看不到。
#
# </div>

# %% [markdown]
# ## 4.7 In your own code / 实际怎么写
#
# <div lang="en">
#
# PyTorch has such hooks, `save_on_cpu` (on a GPU with `pin_memory=True`): one line. They fetch nothing ahead, and break two rules of section 4.3: parameters move, and a storage moves each time that it is saved. Here they copy nothing, since `.cpu()` of a tensor of the CPU is that tensor. So we count what they would carry from a GPU:
#
# </div>
# <div lang="zh">
#
# 这样的钩子 PyTorch 里就有，叫 `save_on_cpu`（在 GPU 上加 `pin_memory=True`），只要一行代码。它不会提前取回，还违反 4.3 节的两条规则：参数也搬；一份存储区保存几次就搬几次。在这里它什么也不拷贝，因为 CPU 张量的 `.cpu()` 就是它自己。所以我们来数一数，换到 GPU 上它要搬多少：
#
# </div>

# %%
saved = []


def noted(tensor):
    saved.append(tensor)
    return tensor


gradients(saved_tensors_hooks(noted, lambda tensor: tensor))
storages = {tensor.untyped_storage() for tensor in saved}
parts = {
    "`save_on_cpu`": sum(tensor.nbytes for tensor in saved),
    "parameters": sum(tensor.nbytes for tensor in saved if tensor.untyped_storage() in stay),
    "by the four rules": sum(storage.nbytes() for storage in storages - stay),
}
table(["data to move", "MB"], [(name, round(count / 1e6, 1)) for name, count in parts.items()])

# %% [markdown]
# <div lang="en">
#
# 247.7 MB instead of 178.4. Of the rest 27.3 are parameters, and 41.9 are storages that are saved again.
#
# </div>
# <div lang="zh">
#
# 要搬 247.7 MB，而按那四条规则只要 178.4 MB。多出来的，27.3 MB 是参数，41.9 MB 是重复保存的存储区。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# | where | not run here |
# |---|---|
# | Hugging Face 5.23 (in 5.17 `gradient_checkpointing`) | `TrainingArguments(activation_checkpointing=True, activation_checkpointing_kwargs={"offload": True})`: checkpoints, and their inputs by `save_on_cpu` |
# | TRL, torchtune | `get_act_offloading_ctx_manager(model, max_fwd_stash_size=5)`; `enable_activation_offloading=True` |
# | FSDP2 | `fully_shard(model, offload_policy=CPUOffloadPolicy())`: parameters, gradients and optimizer state |
# | Megatron-LM | `--fine-grained-activation-offloading`; `--optimizer-cpu-offload --optimizer-offload-fraction 0.5` |
# | Transformer Engine | `get_cpu_offload_context(enabled=True, num_layers=8, model_layers=12)` |
# | torchao, DeepSpeed | `CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW)`; `"offload_optimizer": {"device": "cpu"}` |
#
# TRL's stash is section 4.2's `in_flight`: how many copies to the host may still hold their GPU memory.
#
# </div>
# <div lang="zh">
#
# | 框架 | 写法（此处未运行） |
# |---|---|
# | Hugging Face 5.23（5.17 里叫 `gradient_checkpointing`） | `TrainingArguments(activation_checkpointing=True, activation_checkpointing_kwargs={"offload": True})`：检查点，其输入由 `save_on_cpu` 搬走 |
# | TRL、torchtune | `get_act_offloading_ctx_manager(model, max_fwd_stash_size=5)`；`enable_activation_offloading=True` |
# | FSDP2 | `fully_shard(model, offload_policy=CPUOffloadPolicy())`：参数、梯度和优化器状态 |
# | Megatron-LM | `--fine-grained-activation-offloading`；`--optimizer-cpu-offload --optimizer-offload-fraction 0.5` |
# | Transformer Engine | `get_cpu_offload_context(enabled=True, num_layers=8, model_layers=12)` |
# | torchao、DeepSpeed | `CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW)`；`"offload_optimizer": {"device": "cpu"}` |
#
# TRL 的 stash 就是 4.2 节的 `in_flight`：同时最多有几次换出可以占着显存。
#
# </div>

# %% [markdown] slide={"en": "Five sentences that people meet. Hands up before each row: true, partly, or false?", "zh": "五句常见的说法。看每一行之前先举手：成立、部分成立，还是不成立？"}
# ## 4.8 Claims and measurements / 说法与实测
#
# <div lang="en">
#
# Five sentences that people meet. Each row says what was run for it here, and what was not.
#
# </div>
# <div lang="zh">
#
# 五句常见的说法。每一行都注明：哪些在这里运行过，哪些没有。
#
# </div>

# %% slide="result"
what_you_may_have_read("04", *lesson_04.figures_of_claims(steps, times, numbers_read))

# %% [markdown] slide={"en": "The same step of the same decoder, one technique a row.\n\nThree unlike techniques, and what is left is nearly the same. What is it?", "zh": "同一个解码器的同一步，一种技术一行。\n\n几种技术各不相同，剩下的却差不多。剩下的是什么？"}
# ## 4.9 The ledger / 账本
#
# <div lang="en">
#
# The same step of the same decoder, with one technique alone. This lesson's row: all activations to a file, one fetched ahead.
#
# </div>
# <div lang="zh">
#
# 同一个解码器的同一步，只用一种技术。这是本课的一行：全部激活值放到文件里，提前取回一份。
#
# </div>

# %% slide="result"
meter, down = steps[False, 1]
ledger("04", "all activations to a file", meter, flops=45_097_156_608, moved_bytes=2 * down)

# %% [markdown] slide={"en": "A copy costs nothing if products run at the same time, if it starts early enough, and if whatever uses it waits for it.", "zh": "拷贝没有代价，要满足三条：同时有矩阵乘法可做，开始得够早，并且用它的一方等它完成。"}
# ## 4.10 Summary / 小结
#
# <div lang="en">
#
# - A copy can hide if the FLOPs that come with each byte reach the machine's threshold. It does hide if it starts early enough: two storages fetched ahead hide copies to the GPU (H2D), and two copies in flight hide those to the host (D2H). Each of them costs the memory of one storage.
# - An activation is freed when nothing refers to it. The hooks move each version of a storage once, never move a parameter, and return views.
# - Only waits determine the order of two streams. Without one, the result is right only by luck.
# - At the peak, offload has single tensors of a layer in memory, and a checkpoint the whole layer. Both together move far fewer bytes, but here they peak higher than offload alone.
# - Offloaded state returns to memory in `step()`, up to three pages at a time.
#
# **Next:** [lesson 05](05_gradient_accumulation.ipynb) splits the batch into micro-batches.
#
# </div>
# <div lang="zh">
#
# - 如果网络每个字节所配的 FLOPs 不少于机器的阈值，拷贝就可以被掩盖。要真的被掩盖，拷贝还得开始得够早。提前取回两份，可以掩盖换入（H2D）；允许两次拷贝同时在途（都还没有完成），可以掩盖换出（D2H）。每多提前一份，或者每多一次在途的拷贝，就要多占一份存储区的内存。
# - 只有当一个激活值不再被任何地方引用时，它的内存才会释放。两个钩子让每份存储区的每个版本只搬一次，从不搬参数，取回的是原来的视图。
# - 流与流之间，只有等待才规定先后。少了一处等待，结果对只是碰巧。
# - 峰值那一刻，用卸载时内存里只有一层的单个张量，用检查点时则有整整一层。合用时搬的字节少得多，但在这里峰值高于只用卸载。
# - 卸载的状态在 `step()` 当中会回到内存里，同时最多有三页。
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
# From here on nothing is needed for the other lessons. Each section stands alone; it uses the names that were defined above.
#
# </div>
# <div lang="zh">
#
# 以下内容，其他各课都不会用到。各节互相独立，只用到前面正文里定义过的名字。
#
# </div>

# %% [markdown]
# ## 4.11 Which transformers reach the threshold? / 哪些 transformer 够得着阈值？
#
# <div lang="en">
#
# Sequences of $s = 4096$, in 16 bits. Per token a layer's forward does about $24 h^2 + 2 s h$ FLOPs (a fused causal attention computes half of the scores) and saves $34 h$ bytes (lesson 01, without what it does not keep); a checkpointed one $2 h$. The copy to the GPU runs at the same time as backward, which has twice the FLOPs, so the copy to the host decides.
#
# Solved for $h$, for moving all or inputs alone: by the data sheets, and by what is reached, say half of the FLOPs and 80% of the link.
#
# </div>
# <div lang="zh">
#
# 序列长 $s = 4096$，16 位精度。每个 token，一层的前向大约做 $24 h^2 + 2 s h$ 个 FLOPs（融合的因果注意力只算一半的分数），保存 $34 h$ 字节（第 01 课，减去融合注意力不保存的部分）；加了检查点则是 $2 h$。换入与反向并行，而反向的 FLOPs 是前向的两倍，所以关键在换出。
#
# 解出 $h$，分全部搬走和只搬输入两种：先按数据手册，再按实际能达到的水平，设为算力的一半、链路的 80%。
#
# </div>

# %%
lesson_04.draw_threshold(rate, links)

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
# All activations hide on NVLink-C2C from $h = 2773$ on, checkpointed inputs on PCIe 5 from $h = 967$ on; on PCIe 4 only from $h = 2276$, by the data sheet, or 1294, as reached. With what is reached all activations hide on PCIe 5 from $h = 13559$ on.
#
# Three limits. Several GPUs share their host's memory: eight links of 63 GB/s are 504 GB/s, both ways twice that. A drive writes slower than it reads, and wears. And 34 is a layer with GELU, LayerNorm and dropout masks: without dropout ($-2$), with SwiGLU of $8h/3$ ($+5.3$, gate, up, their products) and a quarter as many heads of keys and values ($-3$) it is 34.3, nearly the same.
#
# </div>
# <div lang="zh">
#
# 全部激活值从 $h = 2773$ 起在 NVLink-C2C 上能被掩盖；检查点层的输入，PCIe 5 上从 $h = 967$ 起，PCIe 4 上要从 $h = 2276$ 起（按数据手册）或 1294 起（按实际）。按实际水平，全部激活值在 PCIe 5 上从 $h = 13559$ 起能被掩盖。
#
# 还有三个限制。几块 GPU 分享同一台主机的内存：八条 63 GB/s 的链路就是 504 GB/s，双向再乘二。固态硬盘写得比读得慢，还会磨损。而 34 这个数，对应的是 GELU、LayerNorm 和 dropout 掩码：去掉 dropout（$-2$），换成宽 $8h/3$ 的 SwiGLU（$+5.3$，门、升维及其乘积），键和值的头数减到四分之一（$-3$），是 34.3，几乎没变。
#
# </div>

# %% [markdown]
# ## 4.12 A function that offloads nothing / 一个什么也没卸载的函数
#
# <div lang="en">
#
# You may have met something like this. It takes an activation, keeps a copy on the lower tier, and in backward brings it back. Does it offload? Three questions: is the gradient right, is anything freed, what does the graph keep?
#
# </div>
# <div lang="zh">
#
# 你也许见过类似的写法：拿到激活值，在下一级存储里留一份拷贝，反向时再取回来。它真的卸载了吗？三个问题：梯度对不对？有没有释放什么？计算图里还留着什么？
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


def gradient_with(apply):
    first.weight.grad = None
    loss_with(apply).backward()
    return first.weight.grad


# %%
ratio = (gradient_with(Offload.apply) / gradient_with(nn.Identity())).median().item()
kept = [saved_tensors(loss_with, apply).total_bytes for apply in (nn.Identity(), Offload.apply)]
ratio, kept

# %% [markdown]
# <div lang="en">
#
# The gradient is doubled, exactly: once as it came, once through the "restored" activation. And the graph keeps what it kept before: the next operator, `sin`, saves its own input, the very same storage. The copy is one **more**.
#
# </div>
# <div lang="zh">
#
# 梯度恰好翻倍：一份是原样传来的，一份来自“恢复”的激活值。计算图里留着的和以前一样：下一个算子 `sin` 保存自己的输入，正是同一份存储区。那份拷贝是**多出来**的。
#
# </div>

# %% [markdown]
# ## 4.13 What yours lacks / 你那个版本缺什么
#
# <div lang="en">
#
# Yours moves everything, also the storage that backward needs next, and fetches nothing ahead. And hooks switch off autograd's own check: change a tensor in place after it was saved, and autograd would have refused. The library refuses if a tensor changes before its copy is complete; here `y` has not gone yet. After that a change does no harm.
#
# On a file, with one copy in flight, the peak is $(p + 3)\,B$ and a weight's gradient, from two layers on. All other storages are copied to the file, $2 L - (p + 1)$ in number. (The first is the batch, which you hold anyway: `keep=[batch]` would spare that copy.)
#
# </div>
# <div lang="zh">
#
# 你那个版本什么都搬，连反向马上要用的存储区也搬，而且从不提前取回。另外，钩子会关掉 autograd 自己的检查：张量保存之后又被原地修改，autograd 本来会拒绝。库会在张量的拷贝完成之前发生改动时拒绝；这里 `y` 还没有搬走。拷贝完成之后再改，就没有关系了。
#
# 用文件、只许一次拷贝在途时，从两层起，峰值都是 $(p + 3)\,B$ 加一个权重的梯度；其余的存储区都要换出，共 $2 L - (p + 1)$ 份。（第一份是批次本身，反正你也持有它：`keep=[batch]` 可以省掉这次拷贝。）
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


# %%
def peak(depth, prefetch):
    network, store = deep_mlp(depth=depth, width=256), DiskStore()
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with MemoryMeter() as meter:
        with offload_activations(store, min_bytes=1 << 16, prefetch=prefetch):
            output = network(batch).sum()
        output.backward()
    return meter.peak_bytes, store.stats.bytes_down


# %%
rows, weight = [], 256 * 256 * 4
for depth in (8, 32):
    for p in (0, 2):
        found, below = peak(depth, p)
        case = f"L = {depth}, p = {p}"
        rows.append((text("{case}: peak", case=case), (p + 3) * B + weight, found))
        rows.append((text("{case}: copied to the file", case=case), (2 * depth - p - 1) * B, below))
predictions(rows)

# %% [markdown]
# ## 4.14 On this machine / 在这台机器上
#
# <div lang="en">
#
# Here the "device" is a CPU, and the lower tier a file. A write ends in the system's file cache, which is memory too, and the disk follows later: the figure varies, and the meter counts tensors, not the cache. And the cores that copy are those that compute, so that some of the time always shows, whatever $p$ is:
#
# </div>
# <div lang="zh">
#
# 这里的“设备”是 CPU，下一级存储是文件。写入先到系统的文件缓存，那也是内存，随后才到磁盘：所以这个数每次都会变，而内存计量器数的是张量，不含缓存。而且拷贝和计算用的是同一批 CPU 核心，所以不论 $p$ 是多少，总有一部分时间藏不住：
#
# </div>

# %%
import time


def median_seconds(run, *arguments):
    times = []
    for _ in range(3):
        start = time.perf_counter()
        run(*arguments)
        times.append(time.perf_counter() - start)
    return sorted(times)[1]


def one_pass(context):
    with context:
        loss = decoder.loss(random_tokens(8, 128, 2048))
    loss.backward()


# %% tags=["nbval-ignore-output", "shows-seconds"]
block, store = torch.zeros(32 << 20, dtype=torch.uint8), DiskStore()
room, a = store.reserve(block.nbytes), torch.randn(1024, 1024)
bandwidth = block.nbytes / median_seconds(lambda: room.put(block).wait())
here = 2 * 1024**3 / median_seconds(torch.mm, a, a)
f"{here / 1e9:.0f} GFLOP/s, {bandwidth / 1e9:.1f} GB/s: {here / bandwidth:.0f} FLOP/byte"

# %% tags=["nbval-ignore-output", "shows-seconds"]
ways = {"plain": nullcontext()}
for p in (0, 2):
    ways[text("offload, p = {p}", p=p)] = offload_activations(store, min_bytes=1 << 17, prefetch=p)
rows = [(name, round(median_seconds(one_pass, context), 3)) for name, context in ways.items()]
table(["", "seconds"], rows)

# %% [markdown]
# ## 4.15 A fraction of the state / 只放一部分状态
#
# <div lang="en">
#
# `OffloadedOptimizer` keeps the state of a **fraction** of the elements on the lower tier, as Megatron-LM's hybrid optimizer does; here the largest parameters go first, there they go in their given order. On a GPU the update runs on the CPU, overlapped with copies; on a CPU the state is paged through memory from a file.
#
# The weights first, after five steps with clipped gradients, compared with `torch.optim.AdamW`.
#
# </div>
# <div lang="zh">
#
# `OffloadedOptimizer` 按一定的**比例**（fraction），把一部分元素的状态放到下一级存储，与 Megatron-LM 的混合优化器一样；这里最大的参数优先，Megatron-LM 则按给定的顺序。在 GPU 上，更新由 CPU 来做，与拷贝重叠；在 CPU 上，状态在文件与内存之间分页换入换出。
#
# 先看权重：做五步，带梯度裁剪，再与基线 `torch.optim.AdamW` 比较。
#
# </div>


# %%
def trained(kind, **options):
    model = deep_mlp(depth=8, width=256)
    optimizer = kind(model.parameters(), **options)
    for step in range(5):
        model(batch.roll(step, 0)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


fractions = (0, 0.25, 0.5, 1.0)
weights = trained(torch.optim.AdamW)
[all(map(torch.equal, weights, trained(OffloadedOptimizer, fraction=f))) for f in fractions]

# %%
sizes, all_above = (16, 4, 1), step_peak(16, fraction=0)
peaks = {0: dict.fromkeys(sizes, all_above), 0.5: {mib: step_peak(mib, 0.5) for mib in sizes}}
peaks[1.0] = measured
rows = [(f"{f}", *(f"{peaks[f][mib] / 1e6:.1f}" for mib in sizes)) for f in peaks]
columns = [text("pages of {mib} MiB", mib=mib) for mib in sizes]
table(["fraction", *columns], rows)  # peak of the decoder's step, MB

# %% [markdown]
# <div lang="en">
#
# If half of the state is offloaded in pages of 16 MiB, nothing is saved, because three such pages hold all of that half at once. The next table counts the bytes that three steps of a network with eight Linears copy to the lower tier and back. Each step writes 8 bytes per parameter and, from the second step on, reads 8 bytes per parameter. With fp32 master weights for bf16 or fp16 parameters, it is 12 bytes each. (A tensor moves as a whole. Two of the eight weights have 24.9% of the elements, so at a fraction of 0.25 three of them move.)
#
# </div>
# <div lang="zh">
#
# 如果卸载一半状态，每页 16 MiB，就一点也不省，因为三页就把这一半全部放进了内存。下表统计一个八层 Linear 的网络在三步里换出到下一级存储和换入的字节。每一步都为每个参数写 8 字节，从第二步起还要为每个参数读 8 字节。如果参数是 bf16 或 fp16，另有 fp32 的主权重，那么读和写各是 12 字节。（一个张量只能整个搬走。八个权重里的两个占全部元素的 24.9%，所以比例取 0.25 时要搬走三个。）
#
# </div>

# %%
model, found = deep_mlp(depth=8, width=256), {}
counts = sorted((parameter.numel() for parameter in model.parameters()), reverse=True)
for fraction in fractions[1:]:
    adam, below = OffloadedOptimizer(model.parameters(), fraction=fraction), 0
    for count in counts:
        below += count if below < fraction * sum(counts) else 0
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        adam.step()
    found[fraction] = 8 * below, adam.store.stats

# %%
down = "fraction {f}: copied to the file in three steps"
up, rows = "fraction {f}: copied back in three steps", []
for fraction, (state, stats) in found.items():
    rows.append((text(down, f=fraction), 3 * state, stats.bytes_down))
    rows.append((text(up, f=fraction), 2 * state, stats.bytes_up))
predictions(rows, unit="bytes")

# %% [markdown]
# ## 4.16 A whole training script / 一个完整的训练脚本
#
# <div lang="en">
#
# This script trains a decoder with a vocabulary of 2048, a hidden size of 128, 8 heads and 4 layers, on 8 sequences of 64 tokens. It has 1.06 million parameters (few, because many CPUs are slow in bf16). It uses five techniques:
#
# - It prefetches batches. On a GPU they come from pinned memory, which the system may not move, so copies need not wait.
# - It allows TF32.
# - It uses autocast with a GradScaler (lesson 05 explains it).
# - It clips the gradients after unscaling them.
# - It keeps the optimizer's state on the lower tier.
#
# On a CPU three of them have little to do: TF32 is for GPUs, bf16 needs no scaling, and these batches are ready at once. Under autocast the parameters stay fp32.
#
# **Guess first:** by how many bytes does the peak of the step fall?
#
# </div>
# <div lang="zh">
#
# 这个脚本训练一个解码器：词表 2048，隐藏维度 128，8 个头，4 层，8 条序列各 64 个 token，共 106 万个参数（规模取得小，因为许多 CPU 算 bf16 很慢）。它同时用了五种技术：
#
# - 预取批次。在 GPU 上，批次从锁页内存拷贝，系统不能挪动锁页内存，所以拷贝不必等待。
# - 允许 TF32。
# - 使用 autocast 和 GradScaler（第 05 课解释）。
# - 先还原缩放（unscale），再裁剪梯度。
# - 把优化器状态放在下一级存储。
#
# 在 CPU 上，其中三种几乎不起作用：TF32 是给 GPU 的，bf16 不需要缩放，这些批次本来就是现成的。用 autocast 时，参数仍是 fp32。
#
# **先猜**：一步的峰值会降低多少字节？
#
# </div>

# %%
from course_lib.offload import Prefetcher

where = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if where == "cuda" else torch.bfloat16
torch.backends.cuda.matmul.fp32_precision = "tf32"
loader = [random_tokens(8, 64, 2048, seed=seed) for seed in range(3)]


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
# ## 4.17 The next batch / 下一个批次
#
# <div lang="en">
#
# A prefetcher makes batch $i + 1$ while batch $i$ is used. If making takes $t_1$ and using $t_2$, a loop takes $t_1 + t_2$ without it and $\max(t_1, t_2)$ with it. So it can halve the time at best. It hides the smaller of the two, so little where one is small, and nothing where the making needs the same core (or Python's lock) as the using. Three cases, 10 batches each:
#
# </div>
# <div lang="zh">
#
# 第 $i$ 个批次还在使用时，预取器就准备第 $i + 1$ 个。准备要 $t_1$，使用要 $t_2$，不预取时一轮是 $t_1 + t_2$，预取时是 $\max(t_1, t_2)$。所以时间至多省一半。它掩盖的是两者中较小的，其中一个很小时就省不了多少；准备与使用抢同一个 CPU 核心（或 Python 的锁）时，什么也掩盖不了。三种情形，各 10 个批次：
#
# </div>


# %%
def busy():
    sum(range(1_000_000))  # 10 to 25 ms, and it holds Python's lock


def wait():
    time.sleep(0.02)


def batches(make):
    for _ in range(10):
        make()
        yield torch.zeros(1)


def loop(make, use, prefetch):
    start = time.perf_counter()
    for _ in Prefetcher(batches(make)) if prefetch else batches(make):
        use()
    return round(time.perf_counter() - start, 2)


# %% tags=["nbval-ignore-output", "shows-seconds"]
cases = {"both wait 20 ms": (wait, wait)}
cases["both compute in Python"] = (busy, busy)
cases["a batch takes no time to make"] = (lambda: None, wait)
rows = [(name, loop(*case, False), loop(*case, True)) for name, case in cases.items()]
table(["", "plain (s)", "prefetched (s)"], rows)

# %% [markdown]
# ## 4.18 Older claims / 更早的说法
#
# <div lang="en">
#
# Four claims from the teaching documents that the course grew from.
#
# </div>
# <div lang="zh">
#
# 四条说法，来自课程最初所依据的教学文档。
#
# </div>

# %%
adam = torch.optim.AdamW(model.parameters())
for parameter in model.parameters():
    parameter.grad = torch.ones_like(parameter)
adam.step()
places = [value.data_ptr() for state in adam.state.values() for value in state.values()]
for state in adam.state.values():
    for value in state.values():
        value.to("cpu", copy=True)  # "offload the optimizer"
after = [value.data_ptr() for state in adam.state.values() for value in state.values()]
unmoved = sum(here == there for here, there in zip(places, after, strict=True))


# %%
class EagerPrefetcher:
    def __init__(self, loader):
        self.loader = loader
        self.preload()

    def preload(self):
        self.next = next(self.batches)

    def __iter__(self):
        self.batches = iter(self.loader)
        return self


try:
    EagerPrefetcher(loader)
except AttributeError as error:
    refused = type(error).__name__, error.name

# %%
import warnings

with warnings.catch_warnings(), MemoryMeter() as transformer:
    warnings.simplefilter("ignore")
    mask = nn.Transformer().generate_square_subsequent_mask(512)
with MemoryMeter() as alone:
    nn.Transformer.generate_square_subsequent_mask(512)
peaks = transformer.peak_bytes, alone.peak_bytes
peaks, mask.nbytes

# %%
lesson_04.older_claims(ratio, kept, (unmoved, len(places)), refused, peaks)

# %% [markdown]
# ## 4.19 On a GPU / 在 GPU 上
#
# <div lang="en">
#
# On CUDA the lower tier is pinned host memory, and copies run on streams of their own. Pinned memory is slow to allocate, and the operating system cannot move it, so use it sparingly. A non-blocking copy from memory that is **not** pinned blocks nevertheless. If you have a GPU, this cell measures on it. Otherwise it shows what an H200 measured. From pinned memory the call returns after 0.02 ms, and 256 MB arrive after 4.7 ms. From pageable memory the call blocks for 28.6 ms. Offloading the activations takes 33% longer than keeping them, and `save_on_cpu` takes 95% longer; both lower the peak from 11.2 GB to 4.2 or 4.1. With AdamW's state in host memory the step takes 2.2 times as long, and the peak falls by the state's 877 MB.
#
# </div>
# <div lang="zh">
#
# 在 CUDA 上，下一级存储是主机（CPU）的锁页内存，拷贝在另外的流上进行。锁页内存分配得慢，系统又不能挪动它，所以不宜多用。源头若是**未**锁页的内存，“非阻塞”拷贝其实仍会阻塞。有 GPU 时，这个单元格会现场测量；没有 GPU，就显示在一块 H200 上记录的数据。源头是锁页内存时，调用 0.02 ms 就返回，256 MB 在 4.7 ms 后到齐；源头是可换页内存时，调用要阻塞 28.6 ms。卸载激活值比保留它们多花 33% 的时间，`save_on_cpu` 多花 95%；两者都把峰值从 11.2 GB 降到 4.2 或 4.1 GB。AdamW 的状态放在主机内存里，一步要花 2.2 倍的时间，峰值减少的正是状态的 877 MB。
#
# </div>

# %% tags=["nbval-ignore-output", "shows-device"]
from course_lib.lessons import on_gpu

on_gpu("04")
