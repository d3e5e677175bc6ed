# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 4 What if we move bytes down one tier instead? (offload) / 不忘掉，而是挪到下层存储呢？（卸载）
#
# <div lang="en">
#
# Sixteen layers of Linear and GELU keep 32 activations for backward: 66 MB here. Move each of them to a file as soon as the next ones are there, and fetch it when backward asks for it: 6.4 MB. Or fetch two ahead, so that the reading can hide: 10.5 MB. With 32 layers: the same. Not one FLOP is done twice.
#
# What does that cost, and when does it cost nothing?
#
# </div>
# <div lang="zh">
#
# 十六层 Linear 加 GELU 要为反向留下 32 份激活值，这里是 66 MB。等后面的激活值出现，就把前面的挪进文件，反向用到时再读回来：内存里只剩 6.4 MB。若提前读回两份，让读取藏在计算背后，则是 10.5 MB。换成 32 层呢？还是一样。没有一个 FLOP 算了两遍。这就是**卸载**（offload）：把暂时不用的数据移到下层存储，不是“卸载软件”的卸载。
#
# 代价是什么？什么时候没有代价？
#
# </div>

# %%
from course_lib.teaching import language

language()

# %% [markdown]
# <div lang="en">
#
# **Goals** (90 minutes). Say when a copy hides behind compute, for your own device. Write activation offload from nothing, and see why a version that you may meet does nothing. Keep the optimizer's state one tier down, with steps equal to the bit (fp32, on a CPU). Know when prefetching helps.
#
# **What to know before**: lesson 01; lesson 02 for saved-tensor hooks.
#
# </div>
# <div lang="zh">
#
# **目标**（90 分钟）：针对自己的设备，说出拷贝何时能被计算掩盖；从零写出激活值卸载，并看清一个你可能遇到的版本为何毫无作用；把优化器状态放到下层存储，更新结果仍逐比特相等（fp32，CPU）；知道预取何时有用。
#
# **预备知识**：第 01 课；第 02 课里给保存的张量挂的钩子。
#
# </div>

# %%
import math
import tempfile
import time
from contextlib import nullcontext

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from course_lib.memory import MemoryMeter, saved_tensors
from course_lib.models import Decoder, deep_mlp, random_tokens
from course_lib.teaching import predictions, table, text, timelines

# %% [markdown]
# ## 4.1 When does a copy hide? / 拷贝什么时候能被掩盖？
#
# <div lang="en">
#
# A copy of $m$ bytes over a link of $w$ bytes a second takes $m / w$. Meanwhile the device computes $f$ FLOPs at $r$ a second: $f / r$. The copy hides if
#
# $$\frac{m}{w} \le \frac{f}{r} \qquad \Longleftrightarrow \qquad \frac{f}{m} \ge \frac{r}{w}$$
#
# On the right, first: FLOPs done per byte moved, a matter of the network: its **arithmetic intensity** towards the next tier. Then a threshold, a matter of the machine.
#
# **Guess first:** a GPU with 989 TFLOP/s behind PCIe 5, the link to the CPU's memory, 63 GB/s one way. (Below, NVMe is a fast SSD, NVLink-C2C a faster link.) How many FLOPs must come with each byte, to cover it?
#
# </div>
# <div lang="zh">
#
# 数据可以放在几个**存储层级**上：设备（在 GPU 上就是显存）、主机内存、磁盘；“下层存储”指离计算更远的那一层。在每秒 $w$ 字节的链路上拷贝 $m$ 字节，耗时 $m / w$。同时，设备以每秒 $r$ 个的速率计算 $f$ 个 FLOPs，耗时 $f / r$。只要
#
# $$\frac{m}{w} \le \frac{f}{r} \qquad \Longleftrightarrow \qquad \frac{f}{m} \ge \frac{r}{w}$$
#
# 拷贝就能被掩盖。右式的左边是每搬一个字节做多少 FLOPs，取决于网络：这是它相对于下层存储的**算术强度**。右边是阈值，取决于机器。
#
# **先猜**：一块 989 TFLOP/s 的 GPU，通过 PCIe 5（GPU 与 CPU 内存之间的链路）传输，单向带宽 63 GB/s。（后文的 NVMe 是高速固态硬盘，NVLink-C2C 是更快的链路。）每搬一个字节，至少要配多少 FLOPs 的计算，才盖得住它？
#
# </div>

# %%
rate = 989e12  # H100 SXM, dense bf16, from its data sheet
links = {"NVMe": 7e9, "PCIe 3": 15.75e9, "PCIe 4": 31.5e9, "PCIe 5": 63e9}  # bytes/s, one way
links["NVLink-C2C"] = 450e9
{name: round(rate / bandwidth) for name, bandwidth in links.items()}

# %% [markdown]
# <div lang="en">
#
# What does a transformer layer offer? We compare the copy down with the forward pass, for sequences of $s = 4096$; the copy up has the backward pass, which does twice the FLOPs, so down decides. Per token the forward pass does about $24 h^2 + 2 s h$ FLOPs (a fused causal attention computes half of the scores) and saves $34 h$ bytes (lesson 01, without what it does not keep). Moving everything means few FLOPs a byte. Moving only the **inputs** of checkpointed layers means $2 h$ bytes, seventeen times fewer.
#
# </div>
# <div lang="zh">
#
# 一个 transformer 层能提供多少？取序列长 $s = 4096$，拿写出的拷贝与前向相比；读回的拷贝对应反向，而反向的 FLOPs 是前向的两倍，所以关键在写出那一趟。每个 token 的前向大约做 $24 h^2 + 2 s h$ 个 FLOPs（融合的因果注意力只算一半的分数），保存 $34 h$ 字节（第 01 课的公式，减去融合注意力不保存的部分）。全部搬走，摊到每个字节上的 FLOPs 就很少。只搬检查点层的**输入**，则是 $2 h$ 字节，只有前者的十七分之一。
#
# </div>

# %%
widths = [512 * 2 ** (i / 4) for i in range(27)]
per_token = [24 * h**2 + 2 * 4096 * h for h in widths]  # FLOPs, for s = 4096

# %% jupyter={"source_hidden": true}
from course_lib.teaching import COLORS, figure

title = "Where a line is above a link, its copies hide: checkpointed inputs long before all activations"
drawn, ax = figure(title, height=3.8)
ax.set(xscale="log", yscale="log", xlim=(512, 60000), ylim=(500, 2e6), xlabel=text("hidden size h"))
ax.set(ylabel=text("FLOPs a byte"), xticks=[1024, 4096, 16384], xticklabels=["1024", "4096", "16384"])
arms = {"all that is saved, 34 h": (34, "activation"), "checkpointed inputs, 2 h": (2, "gradient")}
for name, (factor, category) in arms.items():
    intensity = [flops / (factor * h) for flops, h in zip(per_token, widths, strict=True)]
    ax.plot(widths, intensity, color=COLORS[category], label=text(name))
for name, bandwidth in links.items():
    ax.axhline(rate / bandwidth, color="#888888", linewidth=0.8, linestyle="--")
    ax.annotate(name, (30000, rate / bandwidth), xytext=(0, 2), textcoords="offset points", fontsize=8)
ax.legend(loc="upper left", fontsize=8)
None

# %% [markdown]
# <div lang="en">
#
# Where do they cross? With $c$ bytes moved per token and feature, a copy hides if $(24 h + 2 s) / c \ge r / w$. Solved for $h$, with the figures of the data sheets, and with what is reached, say half of the FLOPs and 80 % of the link:
#
# </div>
# <div lang="zh">
#
# 交点在哪里？设每个 token、每个特征要搬 $c$ 字节，$(24 h + 2 s) / c \ge r / w$ 时拷贝就能被掩盖。解出 $h$，先用数据手册的数值，再用实际能达到的水平（设为算力的一半、链路的 80%）：
#
# </div>

# %%
rows = []
for name, bandwidth in links.items():
    thresholds = [share * rate / bandwidth for share in (1, 0.5 / 0.8)]  # data sheet, reached
    least = [(r_over_w * c - 2 * 4096) / 24 for c in (34, 2) for r_over_w in thresholds]
    rows.append((name, *(math.ceil(h) if h > 0 else "any" for h in least)))
columns = ["34 h, data sheet", "34 h, reached", "2 h, data sheet", "2 h, reached"]
table(["least h that hides", *columns], rows)

# %% [markdown]
# <div lang="en">
#
# By the data sheets all activations hide on NVLink-C2C from $h = 2773$ on, checkpointed inputs on PCIe 5 from $h = 967$ on. With what is reached the threshold is five eighths: all activations then hide on PCIe 5 from $h = 13559$ on. But several GPUs share their host's memory, and a drive writes slower than it reads.
#
# And this machine? Its "device" is a CPU, the next tier a file. A write ends in the system's file cache, which is memory too, and the disk follows later: the figure varies, and the meter counts tensors, not the cache:
#
# </div>
# <div lang="zh">
#
# 按数据手册，全部激活值从 $h = 2773$ 起在 NVLink-C2C 上能被掩盖，检查点层的输入从 $h = 967$ 起在 PCIe 5 上能被掩盖。按实际水平，阈值降到八分之五：全部激活值从 $h = 13559$ 起在 PCIe 5 上也能被掩盖。不过，几块 GPU 要分享同一台主机的内存带宽，固态硬盘的写入也比读取慢。
#
# 这台机器呢？它的“设备”是 CPU，下层存储是文件。写入先到系统的文件缓存，那也是内存，随后才到磁盘：所以这个数每次都会变，而内存计量器数的是张量，不含缓存：
#
# </div>

# %% tags=["nbval-ignore-output", "shows-seconds"]
from course_lib.offload import DiskStore


def median_seconds(run, *arguments):
    times = []
    for _ in range(7):
        start = time.perf_counter()
        run(*arguments)
        times.append(time.perf_counter() - start)
    return sorted(times)[3]


block, store = torch.zeros(32 << 20, dtype=torch.uint8), DiskStore()
room, a = store.reserve(block.nbytes), torch.randn(1024, 1024)
bandwidth = block.nbytes / median_seconds(lambda: room.put(block).wait())
here = 2 * 1024**3 / median_seconds(torch.mm, a, a)
f"{here / 1e9:.0f} GFLOP/s, {bandwidth / 1e9:.1f} GB/s: {here / bandwidth:.0f} FLOP/byte"

# %% [markdown]
# ## 4.2 A function that offloads nothing / 一个什么也没卸载的函数
#
# <div lang="en">
#
# You may have met something like this. It takes an activation, keeps a copy one tier down, and in backward brings it back. Does it offload? Three questions: is the gradient right, is anything freed, what does the graph keep?
#
# </div>
# <div lang="zh">
#
# 你也许见过类似的写法：拿到激活值，在下层存储里留一份拷贝，反向时再读回来。它真的卸载了吗？三个问题：梯度对不对？有没有释放什么？计算图里还留着什么？
#
# </div>


# %%
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
first, second = nn.Linear(64, 64), nn.Linear(64, 64)
x = torch.linspace(-1, 1, 64 * 64).view(64, 64)


def loss_with(apply):
    return second(apply(first(x)).sin()).square().sum()


def gradient_with(apply):
    first.weight.grad = None
    loss_with(apply).backward()
    return first.weight.grad


ratio = (gradient_with(Offload.apply) / gradient_with(nn.Identity())).median().item()
kept = [saved_tensors(loss_with, apply).total_bytes for apply in (nn.Identity(), Offload.apply)]
ratio, kept

# %% [markdown]
# <div lang="en">
#
# The gradient is doubled, exactly: once as it came, once through the "restored" activation. And the graph keeps what it kept before: the next operator, `sin`, saves its own input, the very same storage. The copy is one **more**. An activation is not freed by copying it, but by making everyone who holds it let go. Mostly that is autograd, in its saved tensors; a variable or a list of yours that still names it holds it too.
#
# </div>
# <div lang="zh">
#
# 梯度恰好翻倍：一份是原样传来的，一份来自“恢复”的激活值。计算图里留着的和以前一样：下一个算子 `sin` 保存自己的输入，正是同一份存储区（storage）。那份拷贝是**多出来**的。拷贝并不能释放激活值；要所有持有者都不再引用它才行。持有它的主要是 autograd，即它保存的张量；你自己仍指着它的变量或列表也算。
#
# </div>

# %% [markdown]
# ## 4.3 From nothing / 从零写起
#
# <div lang="en">
#
# So offload hooks into saved tensors (lesson 02). **pack** writes the bytes to a file and keeps a note of where; **unpack** reads them. Parameters stay: they live elsewhere anyway, and moving them frees nothing. A Linear saves its weight as a view, so we recognise **storages**.
#
# </div>
# <div lang="zh">
#
# 因此，卸载要靠挂在保存的张量上的钩子（第 02 课）。**pack** 把字节写进文件，只记下位置；**unpack** 再读回来。参数留在原处：反正别处仍持有它们，搬走也释放不了什么。Linear 保存的权重是视图，所以我们认的是**存储区**。
#
# </div>


# %%
def to_file(module, file):
    stay = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() in stay:
            return tensor.detach()
        place = file.seek(0, 2)
        file.write(tensor.contiguous().numpy())
        return place, tensor.shape

    def unpack(packed):
        if isinstance(packed, torch.Tensor):
            return packed
        file.seek(packed[0])
        content = bytearray(file.read(4 * packed[1].numel()))
        return torch.frombuffer(content, dtype=torch.float32).view(packed[1])

    return saved_tensors_hooks(pack, unpack)


# %% [markdown]
# <div lang="en">
#
# Gradients first, for the tiny version and for the library's `offload_activations`, which the rest of the lesson uses.
#
# </div>
# <div lang="zh">
#
# 先看梯度：这个简易版，以及本课其余部分要用的库函数 `offload_activations`。
#
# </div>

# %%
from course_lib.offload import offload_activations

network = deep_mlp(depth=16, width=256)
batch = torch.linspace(-1, 1, 2000 * 256).view(2000, 256)
b, w = batch.nbytes, 256 * 256 * 4  # an activation, and a weight's gradient


def gradients(context):
    network.zero_grad()
    with context:
        output = network(batch)
    output.square().sum().backward()
    return [parameter.grad for parameter in network.parameters()]


file = tempfile.TemporaryFile()  # noqa: SIM115
ways = {"from nothing": to_file(network, file), "library": offload_activations(min_bytes=1 << 16)}
plain = gradients(torch.enable_grad())
{name: all(map(torch.equal, plain, gradients(context))) for name, context in ways.items()}

# %% [markdown]
# ## 4.4 What is left on the device / 设备上还剩什么
#
# <div lang="en">
#
# Now the peak. The last $p + 1$ storages stay, because backward needs them first; $p$ is `prefetch`, how many are fetched ahead; with $p = 0$ backward waits for every copy, so that none can hide. In forward two more are there: one on its way down, and the one that is being made. In backward likewise two: the gradient that comes and the one that is made; and a weight's gradient. Call a storage's bytes $b$ and that gradient's $w$ (no longer the bandwidth of section 4.1). So
#
# $$(p + 3)\,b + w$$
#
# for **any** number of layers (and a bias' gradient of 1 kB). Down go all others: $2L - (p + 1)$ storages. One of them is the batch, which you hold anyway: `keep=[batch]` would spare that copy.
#
# </div>
# <div lang="zh">
#
# 再看峰值。最后 $p + 1$ 份存储区留在设备上，因为反向最先用到它们；$p$ 即 `prefetch`，预先读回几份；$p = 0$ 时，反向每次都要等拷贝完成，什么也掩盖不了。前向时另有两份也在内存里：一份正在搬走，一份正在算。反向时同样另有两份：传来的梯度和正在算的梯度；外加一个权重的梯度。一份存储区的字节数记作 $b$，这个梯度的记作 $w$（不再是 4.1 节的带宽）。所以峰值是
#
# $$(p + 3)\,b + w$$
#
# 与层数**无关**（还有一个偏置的梯度，1 kB）。其余的都搬走：$2L - (p + 1)$ 份存储区。其中一份是批次本身，反正你也持有它：`keep=[batch]` 可以省掉这次拷贝。
#
# </div>


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
cases = {(depth, p): peak(depth, p) for depth in (8, 16, 32) for p in (0, 2)}
rows, down = [], []
for (depth, p), (found, moved) in cases.items():
    rows.append((f"L = {depth}, p = {p}", (p + 3) * b + w, found))
    down.append((f"L = {depth}, p = {p}", (2 * depth - p - 1) * b, moved))
predictions(rows)

# %%
predictions(down, unit="bytes")

# %%
contexts = {"plain": torch.enable_grad()}
contexts["offload, p = 2"] = offload_activations(min_bytes=1 << 16, prefetch=2)
meters = {}
for name, context in contexts.items():
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with MemoryMeter() as meters[name]:
        with context:
            output = network(batch).sum()
        output.backward()
timelines(meters, title="Sixteen layers, and little of them left", panel_height=1.9)

# %% [markdown]
# <div lang="en">
#
# Bytes go down, though, and up again. Checkpointing forgets instead, and pays in FLOPs. Together, only the inputs of the checkpointed layers move:
#
# </div>
# <div lang="zh">
#
# 不过，字节要搬走，再搬回来。检查点则干脆忘掉，代价是 FLOPs。两者合用，要搬的只有检查点层的输入：
#
# </div>

# %%
from course_lib.checkpoint import checkpoint


def checkpointed(x):
    for i in range(0, 32, 2):
        x = checkpoint(network[i : i + 2], x, use_reentrant=False, preserve_rng_state=False)
    return x


# %%
def one_pass(run, store, p):
    with nullcontext() if p is None else offload_activations(store, min_bytes=1 << 16, prefetch=p):
        output = run(batch).sum()
    output.backward()


def arm(run, p):
    store = DiskStore()
    with MemoryMeter() as meter:
        one_pass(run, store, p)
    down = store.stats.bytes_down
    with FlopCounterMode(display=False) as counter:  # apart: it holds tensors of its own
        one_pass(run, store, None)
    flops = counter.get_total_flops()
    return [round(value, 1) for value in (meter.peak_bytes / 1e6, down / 1e6, flops / 1e9)]


# %%
names = {"plain": (network, None), "checkpoint": (checkpointed, None)}
for p in (0, 2):
    names[text("offload, p = {p}", p=p)] = network, p
    names[text("both, p = {p}", p=p)] = checkpointed, p
columns = ["", "peak, MB", "moved down, MB", "GFLOPs"]
table(columns, [(name, *arm(*way)) for name, way in names.items()])

# %% [markdown]
# <div lang="en">
#
# Together they move half the bytes, for one more forward pass. And in seconds? With $p = 0$ no copy up can hide; with $p = 2$ it can, if a copy takes nothing from the compute. Here the same cores do both, so some of the time shows:
#
# </div>
# <div lang="zh">
#
# 合用时搬的字节减半，代价是多一次前向。用秒来看呢？$p = 0$ 时，读回的拷贝无法被掩盖；$p = 2$ 时可以，前提是拷贝不占用计算资源。这里拷贝和计算用的是同一批 CPU 核心，所以有一部分时间藏不住：
#
# </div>

# %% tags=["nbval-ignore-output", "shows-seconds"]
store, rows = DiskStore(), []
for name, p in {"plain": None, "offload, p = 0": 0, "offload, p = 2": 2}.items():
    rows.append((name, round(median_seconds(one_pass, network, store, p), 3)))
table(["", "seconds"], rows)

# %% [markdown]
# <div lang="en">
#
# GPUs have engines for copies. A `SimulatedDevice` has them too: operators run here, while its clock counts FLOPs, and bytes on the link. Our network does 64 FLOPs a byte: $2 \cdot 2000 \cdot 256^2$ for two storages of 2.048 MB. **Guess first:** at $10^{12}$ FLOP/s, with links whose threshold is 32, 64 or 128 FLOPs a byte, what hides?
#
# </div>
# <div lang="zh">
#
# GPU 有专门的拷贝引擎。`SimulatedDevice` 也有：算子在本机运行，它的时钟则计 FLOPs 和链路上的字节。我们的网络每字节做 64 FLOPs：每 $2 \cdot 2000 \cdot 256^2$ 个 FLOPs 对应两份 2.048 MB 的存储区。**先猜**：算力为 $10^{12}$ FLOP/s，链路的阈值分别为每字节 32、64、128 FLOPs，哪些拷贝能被掩盖？
#
# </div>

# %%
from course_lib.offload import SimulatedDevice


def milliseconds(threshold, p):
    links = dict.fromkeys(("up_bytes_per_second", "down_bytes_per_second"), 1e12 / threshold)
    with SimulatedDevice(flops_per_second=1e12, **links) as device:
        network, x = device.move(deep_mlp(depth=8, width=256)), device.move(batch)
        begin = device.seconds
        with nullcontext() if p is None else offload_activations(min_bytes=1 << 16, prefetch=p):
            output = network(x).sum()
        output.backward()
    return round(1000 * (device.seconds - begin), 2)


columns = ["", "plain, ms", "p = 0, ms", "p = 2, ms"]
plain = milliseconds(1, None)
rows = [(f"r / w = {at}", plain, milliseconds(at, 0), milliseconds(at, 2)) for at in (32, 64, 128)]
table(columns, rows)

# %% [markdown]
# <div lang="en">
#
# With two fetched ahead the copies hide at 32 and 64, but for 1 and 2 % at the ends; at 128 the link is too slow. With none ahead backward waits for each copy up: 17, 35 and 100 % more.
#
# </div>
# <div lang="zh">
#
# 预取两份时，阈值为 32 和 64 的拷贝都被掩盖，只在首尾露出 1% 和 2%；阈值为 128 时链路太慢。不预取时，反向要等每一次读回：分别多花 17%、35% 和 100%。
#
# </div>

# %% [markdown]
# ## 4.5 What the tiny version lacks / 简易版缺什么
#
# <div lang="en">
#
# One storage may be saved many times: as Q, K and V of one projection, or by two operators. The tiny version writes each view; the library writes each storage once, and hands back views. Here, four tensors are saved, views of two storages: the tiny version writes four. The library writes one, since the other was saved last and stays. And hooks switch off autograd's own check: change a tensor in place after it was saved, and autograd would have refused. The tiny version copies at once, so its values are those of the moment of saving. The library copies later, or not at all. If a tensor changes before its copy is complete, it refuses; here `y` has not gone yet. After that a change does no harm.
#
# </div>
# <div lang="zh">
#
# 同一份存储区可能被保存多次：例如一次投影得到的 Q、K、V，或者两个算子都保存它。简易版每个视图都写一遍；库对每份存储区只写一次，读回时再给出视图。这里保存了四个张量，是两份存储区的视图：简易版写四份；库只写一份，因为另一份最后才保存，留在原处。另外，钩子会关掉 autograd 自己的检查：张量保存之后又被原地修改，autograd 本来会拒绝。简易版当场就拷贝，所以留下的是保存那一刻的值。库要稍后才拷贝，有的根本不拷贝。张量若在拷贝完成之前改动，库就拒绝；这里 `y` 还没有搬走。拷贝完成之后再改，就没有关系了。
#
# </div>

# %%
source = torch.randn(1000, 256, requires_grad=True)


def shared(context):
    with context:
        y = source * 1
        return (y.sin() + y.cos() + y.t().exp().t().sin()).sum()


file.seek(0, 2)
before, store = file.tell(), DiskStore()
shared(to_file(nn.Linear(1, 1), file)).backward()
shared(offload_activations(store, min_bytes=1, prefetch=0)).backward()
written = {"from nothing": file.seek(0, 2) - before, "library": store.stats.bytes_down}
{**written, "one activation": source.nbytes}

# %%
with offload_activations(DiskStore(), min_bytes=1):
    y = source * 1
    z = y.sin()
    y.add_(1)  # sin has saved y
try:
    z.sum().backward()
except RuntimeError as refused:
    print(refused)

# %% [markdown]
# ## 4.6 The optimizer's state / 优化器状态
#
# <div lang="en">
#
# Adam keeps 8 bytes a parameter and uses them once a step, and not one of them in forward or backward: the best thing to move. `OffloadedOptimizer` keeps the state of a **fraction** of the elements one tier down, as Megatron-LM's hybrid optimizer does; here the largest parameters go first, there they go in their given order. On a GPU the update runs on the CPU, overlapped with copies; on a CPU the state is paged through memory from a file.
#
# Weights first: five steps, clipped, against plain AdamW.
#
# </div>
# <div lang="zh">
#
# Adam 要为每个参数记住 8 字节的状态，每一步只用一次，前向和反向都用不到：最适合搬走。`OffloadedOptimizer` 按一定的**比例**（fraction），把一部分元素的状态放到下层存储，与 Megatron-LM 的混合优化器一样；这里最大的参数优先，那里则按给定的次序。在 GPU 上，更新由 CPU 来做，与拷贝重叠；在 CPU 上，状态在文件与内存之间分页换入换出。
#
# 先看权重：五步，带梯度裁剪，与普通的 AdamW 比较。
#
# </div>

# %%
from course_lib.offload import OffloadedOptimizer


def trained(kind, **options):
    model = deep_mlp(depth=8, width=256)
    optimizer = kind(model.parameters(), **options)
    for step in range(5):
        model(batch.roll(step, 0)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


plain = trained(torch.optim.AdamW)
fractions = (0, 0.25, 0.5, 1.0)
[all(map(torch.equal, plain, trained(OffloadedOptimizer, fraction=f))) for f in fractions]

# %%
model = deep_mlp(depth=8, width=256)
elements = sum(parameter.numel() for parameter in model.parameters())


def state_above(fraction, chunk_bytes=16 << 20):  # the default: so much is in memory at once
    optimizer = OffloadedOptimizer(model.parameters(), fraction=fraction, page_bytes=chunk_bytes)
    with MemoryMeter() as meter:
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
    most = meter.peak_bytes - 4 * elements  # during a step; gradients apart
    return meter.live_bytes, most, optimizer.store.stats if fraction else None


# %%
sweep = {fraction: state_above(fraction) for fraction in fractions}


def stays(fraction):
    down, above = 0, 4 * 16  # a step count for each of 16 tensors
    for count in sorted((parameter.numel() for parameter in model.parameters()), reverse=True):
        above += 0 if down < fraction * elements else 8 * count
        down += count
    return above


rows = [(text("fraction {f}", f=f), stays(f), above) for f, (above, *_) in sweep.items()]
predictions(rows, unit="bytes")

# %%
rows = []
for f in fractions:
    sizes = *sweep[f][:2], state_above(f, chunk_bytes=1 << 19)[1]
    rows.append((f"{f}", *(f"{size / 1e6:.2f}" for size in sizes)))
columns = ["between steps, MB", "peak of a step, MB", "the same, chunks of 512 KiB"]
table(["fraction", *columns], rows)

# %%
rows = []
for f in fractions[1:]:
    below, stats = 8 * elements + 4 * 16 - stays(f), sweep[f][2]  # the state that pages
    rows.append((text("{f}: down, three steps", f=f), 3 * below, stats.bytes_down))
    rows.append((text("{f}: up, three steps", f=f), 2 * below, stats.bytes_up))
predictions(rows, unit="bytes")

# %% [markdown]
# <div lang="en">
#
# Between steps, only the step counts stay, 4 bytes for each parameter tensor. (Tensors move as wholes: two of the eight weights are 24.9 % of the elements, so three go for 0.25.) But in `step()` the state comes back, 16 MiB at a time, and ours is less: all of it is there, and at that moment offloading saves nothing. Smaller chunks lower that peak too. Offloading pays where the peak lies elsewhere, as in 4.7, or the state is many chunks. Each step writes 8 bytes a parameter and, from the second on, reads 8; with fp32 master weights for bf16 or fp16 parameters, 12.
#
# </div>
# <div lang="zh">
#
# 步与步之间，留在内存里的只有步数，每个参数张量 4 字节。（张量只能整个搬走：八个权重里的两个占全部元素的 24.9%，所以比例取 0.25 时搬走三个。）但在 `step()` 当中，状态要回到内存里，每次 16 MiB；我们的状态比这还少，于是全都在，那一刻卸载什么也没省。小段（chunk）取得小些，这个峰值也就低些。只有峰值落在别处（如 4.7 节），或者状态有许多小段，卸载才划算。每一步，每个参数写 8 字节，从第二步起再读 8 字节；若参数是 bf16 或 fp16，另有 fp32 的主权重，则是 12 字节。
#
# </div>

# %% [markdown]
# ## 4.7 A whole training script / 一个完整的训练脚本
#
# <div lang="en">
#
# A decoder with a vocabulary of 2048, a hidden size of 128, 8 heads, 4 layers, 8 sequences of 64 tokens; 1.06 million parameters (small, for many CPUs compute slowly in bf16). What training scripts promise, all of it done here: batches prefetched (on a GPU from pinned memory, which the system may not move, so that copies need not wait), TF32 allowed, autocast with a GradScaler (lesson 05 explains it), gradients clipped after unscaling, the optimizer's state one tier down. (On a CPU three parts have little to do: TF32 is for GPUs, bf16 needs no scaling, and these batches are ready at once. Under autocast the parameters stay fp32.)
#
# **Guess first:** by how many bytes does the peak of the step fall?
#
# </div>
# <div lang="zh">
#
# 一个解码器：词表 2048，隐藏维度 128，8 个头，4 层，8 条序列各 64 个 token，共 106 万个参数（规模取得小，因为许多 CPU 算 bf16 很慢）。训练脚本承诺的，这里样样兑现：批次预取（在 GPU 上则从锁页内存拷贝；系统不能挪动它，拷贝也就不必等待），允许 TF32，autocast 配 GradScaler（第 05 课解释），先还原缩放（unscale）再裁剪梯度，优化器状态放在下层存储。（在 CPU 上有三样无事可做：TF32 是给 GPU 的，bf16 不需要缩放，这些批次本来就是现成的。autocast 之下，参数仍是 fp32。）
#
# **先猜**：一步的峰值会降低多少字节？
#
# </div>

# %%
from course_lib.offload import Prefetcher

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.bfloat16
torch.backends.cuda.matmul.allow_tf32 = True
loader = [random_tokens(8, 64, 2048, seed=seed) for seed in range(3)]


def step(model, optimizer, scaler, tokens):
    with torch.autocast(device, dtype):
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
    model = Decoder(vocabulary=2048, hidden=128, heads=8, layers=4, sequence=64).to(device)
    optimizer, scaler = kind(model.parameters(), lr=3e-4), torch.amp.GradScaler(device)
    with MemoryMeter(model, optimizer) as meter:
        losses = [step(model, optimizer, scaler, tokens) for tokens in Prefetcher(loader, device)]
    return losses, meter.peak_bytes, sum(parameter.numel() for parameter in model.parameters())


losses, above, parameters = training(torch.optim.AdamW)
same, below, _ = training(OffloadedOptimizer)
print(losses == same)
rows = [("the peak falls by 8 bytes a parameter", 8 * parameters, above - below)]
predictions([*rows, ("peak with the state below", above - 8 * parameters, below)])

# %% [markdown]
# ## 4.8 The next batch / 下一个批次
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
cases["made at once"] = (lambda: None, wait)
rows = [(name, loop(*case, False), loop(*case, True)) for name, case in cases.items()]
table(["", "plain, s", "prefetched, s"], rows)

# %% [markdown]
# ## 4.9 What you may have read / 你可能读到过的说法
#
# <div lang="en">
#
# Four claims, from scripts that you may find.
#
# </div>
# <div lang="zh">
#
# 四条说法，来自你可能遇到的脚本。
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
except AttributeError as refused:
    kind, missing = type(refused).__name__, refused.name

# %%
import warnings

with warnings.catch_warnings(), MemoryMeter() as whole:
    warnings.simplefilter("ignore")
    mask = nn.Transformer().generate_square_subsequent_mask(512)
with MemoryMeter() as alone:
    nn.Transformer.generate_square_subsequent_mask(512)
whole.peak_bytes, alone.peak_bytes, mask.nbytes

# %%
from course_lib.lessons import what_you_may_have_read

what_you_may_have_read(
    "04",
    text("{ratio:.1f} ×; {before} → {after} bytes", ratio=ratio, before=kept[0], after=kept[1]),
    text("{unmoved} of {count} have not moved", unmoved=unmoved, count=len(places)),
    text("{kind}: there is no {missing} yet", kind=f"`{kind}`", missing=f"`{missing}`"),
    f"{whole.peak_bytes / 1e6:.0f} MB : {alone.peak_bytes / 1e6:.0f} MB",
)

# %% [markdown]
# ## 4.10 On a GPU / 在 GPU 上
#
# <div lang="en">
#
# On CUDA the next tier is pinned host memory, and copies run on side streams. A non-blocking copy from memory that is **not** pinned is a blocking one in disguise; the experiment times both. If you have a GPU, this cell measures now.
#
# </div>
# <div lang="zh">
#
# 在 CUDA 上，下层存储是主机（CPU）的锁页内存，拷贝在另外的流（stream）上进行。从**没有**锁页的内存做“非阻塞”拷贝，其实仍会阻塞；实验对两者计时。有 GPU 时，这个单元格会现场测量。
#
# </div>

# %% tags=["nbval-ignore-output", "shows-device"]
from course_lib.lessons import on_gpu

on_gpu("04")

# %% [markdown]
# ## 4.11 Exercises / 练习
#
# <div lang="en">
#
# **Exercise 1.** What is the least number of FLOPs a byte at which copies over PCIe 5 (63 GB/s one way) hide behind 400 TFLOP/s?
#
# </div>
# <div lang="zh">
#
# **练习 1。** 设备算力 400 TFLOP/s，经 PCIe 5（单向 63 GB/s）拷贝，每字节至少要有多少 FLOPs，拷贝才能被掩盖？
#
# </div>

# %%
from course_lib.lessons import lesson_04

answer = None  # FLOPs a byte
lesson_04.check_hiding_intensity(answer)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
lesson_04.check_hiding_intensity(400e12 / 63e9)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# **Exercise 2.** Five storages are saved, in this order, of 40, 10, 30, 20 and 10 MB. At the end of forward at most 45 MB may be on the device. Which ones (numbers from 0) go down, so that the fewest bytes move? The last one must stay.
#
# </div>
# <div lang="zh">
#
# **练习 2。** 依次保存五份存储区：40、10、30、20、10 MB。前向结束时设备上至多留 45 MB。把哪几份（从 0 编号）搬走，搬的字节最少？最后一份必须留下。
#
# </div>

# %%
answer = None  # a set of numbers
lesson_04.check_what_goes_down(answer)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
import itertools

sizes, choices = [40, 10, 30, 20, 10], []
for count in range(5):
    choices += [set(c) for c in itertools.combinations(range(4), count)]
fits = [choice for choice in choices if sum(sizes) - sum(sizes[i] for i in choice) <= 45]
lesson_04.check_what_goes_down(min(fits, key=lambda choice: sum(sizes[i] for i in choice)))
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# **Exercise 3.** Mend section 4.2: write `offloading(store)`, a context manager made of saved-tensor hooks, where `store` is a list that stands for the next tier. Everything that is saved goes into the list, the graph keeps numbers only, and gradients are right.
#
# </div>
# <div lang="zh">
#
# **练习 3。** 修好 4.2 节：用挂在保存的张量上的钩子写出上下文管理器 `offloading(store)`，其中 `store` 是一个列表，代表下层存储。凡保存的都进这个列表，计算图里只留编号，梯度要正确。
#
# </div>


# %%
def offloading(store):
    return saved_tensors_hooks(lambda tensor: tensor, lambda packed: packed)


lesson_04.check_offloading(offloading)


# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not lesson_04.check_offloading.accepted:

    def offloading(store):
        def pack(tensor):
            store.append(tensor.detach().clone())
            return len(store) - 1

        return saved_tensors_hooks(pack, lambda number: store[number])


lesson_04.check_offloading(offloading)
### END SOLUTION

# %% [markdown]
# ## 4.12 Summary / 小结
#
# <div lang="en">
#
# - A copy hides behind compute when the network does at least $r / w$ FLOPs for each byte moved. Checkpointed inputs do so on PCIe 4 and 5 at nearly all widths; all activations only in wide models, or on a faster link. And it takes fetching ahead: with $p = 0$ backward waits.
# - An activation is freed when all who hold it let go: autograd, and your own variables. A function that copies it frees nothing; saved-tensor hooks do.
# - What is left on the device does not depend on the depth: $(p + 3)\,b + w$ here.
# - Optimizer state is used once a step: 8 bytes a parameter can live one tier down with equal steps; with master weights, 12. During its step they come back in chunks.
# - A prefetcher turns $t_1 + t_2$ into $\max(t_1, t_2)$, if the two don't need the same core.
#
# **Next:** [lesson 05](05_gradient_accumulation.ipynb) lets the batch come in pieces.
#
# </div>
# <div lang="zh">
#
# - 只要网络每搬一个字节至少做 $r / w$ 个 FLOPs，拷贝就能被计算掩盖。检查点层的输入，在几乎所有隐藏维度下走 PCIe 4 或 5 就做得到；全部激活值只有在很宽的模型里，或在更快的链路上才做得到。而且要提前读回：$p = 0$ 时反向只能干等。
# - 所有持有者都不再引用，激活值才会释放：autograd，以及你自己的变量。拷贝一份的函数什么也释放不了，给保存的张量挂钩子才行。
# - 设备上剩下多少与深度无关：这里是 $(p + 3)\,b + w$。
# - 优化器状态每步只用一次：每个参数 8 字节，可以放到下层存储，更新的结果照样相等；有主权重时是 12 字节。更新时，它们一小段一小段地回到内存。
# - 预取器把 $t_1 + t_2$ 变成 $\max(t_1, t_2)$，前提是两者不抢同一个 CPU 核心。
#
# **下一步**：[第 05 课](05_gradient_accumulation.ipynb)把批次拆开来算。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **Sources.** Rajbhandari et al. 2021, *ZeRO-Infinity*, arXiv:2104.07857 (bandwidth arithmetic). Ren et al. 2021, *ZeRO-Offload*, arXiv:2101.06840 (the update on the CPU). Korthikanti et al. 2022, arXiv:2205.05198 ($34 h$). Megatron-LM's hybrid device optimizer (the fraction). NVIDIA's data sheets of H100 and GH200 (989 TFLOP/s; 900 GB/s both ways); PCI-SIG (16 lanes of PCIe 3, 4, 5). NVMe: a fast drive with four lanes of PCIe 4.
#
# </div>
# <div lang="zh">
#
# **出处。** Rajbhandari et al. 2021，*ZeRO-Infinity*，arXiv:2104.07857（带宽估算）。Ren et al. 2021，*ZeRO-Offload*，arXiv:2101.06840（在 CPU 上更新）。Korthikanti et al. 2022，arXiv:2205.05198（$34 h$）。Megatron-LM 的 hybrid device optimizer（fraction）。NVIDIA 的 H100 与 GH200 数据手册（989 TFLOP/s；双向合计 900 GB/s）；PCI-SIG（PCIe 3、4、5 的 16 条通道）。NVMe：使用四条 PCIe 4 通道的高速固态硬盘。
#
# </div>
