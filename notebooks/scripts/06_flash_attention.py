# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 6 What if the operator itself forgets? (FlashAttention) / 让算子自己忘掉呢？（FlashAttention）
#
# <div lang="en">
#
# One attention layer, 8192 tokens, 12 heads of 64: standard attention keeps its probabilities for backward, 3.2 GB of them in fp32. FlashAttention keeps its output, 25 MB, and 0.4 MB more: one number for each row. Its gradients are about as exact.
#
# What is that number, and how can it be enough?
#
# </div>
# <div lang="zh">
#
# 一个注意力层，8192 个 token，12 个 64 维的头：标准注意力要为反向留下概率，fp32 下是 3.2 GB。FlashAttention 留下它的输出，25 MB，外加 0.4 MB：每行一个数。它的梯度差不多同样精确。
#
# 这个数是什么？它凭什么就够了？
#
# </div>

# %%
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # for section 6.8; Triton reads it when it is imported
from course_lib.teaching import language

language()

# %% [markdown]
# <div lang="en">
#
# **Goals** (90 minutes). Write softmax in one pass over blocks; attention over tiles, forward and backward, from nothing. Predict what each kind saves, to the byte, and what it computes and moves. Compare the special tool with the general one, checkpointing. Read a Triton kernel.
#
# **What to know before**: lesson 01; lesson 02 for recomputation.
#
# </div>
# <div lang="zh">
#
# **目标**（90 分钟）：写出分块、只过一遍的 softmax；从零写出按分块计算的注意力，前向与反向；预测两种注意力各保存多少字节，做到一字节不差，并预测它们的计算量和搬运量；把这件专用工具与通用工具（检查点）作比较；读懂一个 Triton 核函数。
#
# **预备知识**：第 01 课；第 02 课中的重计算。
#
# </div>

# %%
import time

from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from course_lib.lessons import lesson_06
from course_lib.memory import MemoryMeter, attention_saved_bytes, saved_tensors, symbolic
from course_lib.teaching import predictions, say, table, text

# %% [markdown]
# ## 6.1 Softmax in one pass / 只过一遍的 softmax
#
# <div lang="en">
#
# Softmax needs the largest score of a row, lest `exp` overflow, and the sum. Both seem to need the whole row first. They don't: take a block of columns, keep the largest so far, $m$, and the sum so far, $\ell$, of exponentials **relative to** $m$. When a later block has a larger score, the old sum is worth less by a known factor. This is **online softmax**:
#
# $$\ell \leftarrow \ell \, e^{m - m'} + \sum_j e^{s_j - m'}$$
#
# </div>
# <div lang="zh">
#
# softmax 需要一行里最大的分数（否则 `exp` 会溢出）和总和，看来都得先有整行。其实不必：每次取一块列，记住迄今最大的分数 $m$，以及迄今各指数项之和 $\ell$，指数项都**相对于** $m$ 来算。后面的块若有更大的分数，原来的总和就乘上一个已知的缩小因子。这就是**在线 softmax**（online softmax）：
#
# $$\ell \leftarrow \ell \, e^{m - m'} + \sum_j e^{s_j - m'}$$
#
# </div>


# %%
def running(scores, block):
    largest, total = torch.tensor(float("-inf")), torch.tensor(0.0)
    for part in scores.split(block):
        new = torch.maximum(largest, part.max())
        total = total * (largest - new).exp() + (part - new).exp().sum()
        largest = new
        yield float(largest), float(total)


torch.manual_seed(0)
scores = torch.randn(512) + torch.linspace(-2, 2, 512)
equal = []
for large in (scores, 200 * scores):
    *_, (largest, total) = running(large, 32)
    lse = largest + torch.tensor(total).log()
    equal.append(torch.allclose((large - lse).exp(), torch.softmax(large, 0)))
equal, bool((200 * scores).exp().isinf().any())

# %% [markdown]
# <div lang="en">
#
# Equal to `torch.softmax`, for scores 200 times as large as well, whose `exp` overflows. And in the end one number says it all: $m + \log \ell$, the **log-sum-exp**. With it any probability can be had again from its score: $p = e^{s - \text{lse}}$. Remember this line.
#
# </div>
# <div lang="zh">
#
# 与 `torch.softmax` 相等；分数放大 200 倍、直接取 `exp` 会溢出时，也相等。到最后，一切都归结为一个数：$m + \log \ell$，即 **LSE**（log-sum-exp，指数和的对数）。有了它，任何一个概率都可以由它的分数重新得到：$p = e^{s - \text{lse}}$。请记住这个式子。
#
# </div>

# %% jupyter={"source_hidden": true}
from course_lib.teaching import COLORS, figure

steps = list(running(scores, 32))
title = "The maximum climbs; each time it does, the sum is rescaled"
drawn, (left, right) = figure(title, columns=2, height=3.0)
left.plot([m for m, _ in steps], "o-", color=COLORS["measured"], markersize=3)
right.plot([total for _, total in steps], "o-", color=COLORS["activation"], markersize=3)
left.set(xlabel=text("block"), ylabel=text("maximum m"))
right.set(xlabel=text("block"), ylabel=text("sum ℓ"), ylim=(0, None))
None

# %% [markdown]
# ## 6.2 Attention over tiles, from nothing / 从零写出按分块计算的注意力
#
# <div lang="en">
#
# The output is a weighted sum of values, and it can be carried along like $\ell$: shrink what there is, add the block's part. So no score outlives its tile.
#
# Backward needs the probabilities again. It has Q, K and the log-sum-exp, so it makes them, tile by tile. With $dP = dO\,V^T$, softmax's gradient is $dS = P \circ (dP - D)$, where $D_i = \sum_j P_{ij}\,dP_{ij}$: a sum over the whole row, which a tile does not have. But $dP_{ij} = dO_i \cdot V_j$ and $O_i = \sum_j P_{ij} V_j$, so that sum is $dO_i \cdot O_i$, and $D = \text{rowsum}(dO \circ O)$ is known before the walk. That is what O is kept for.
#
# </div>
# <div lang="zh">
#
# 输出是 V 的加权和，可以像 $\ell$ 一样边走边累积：先把已有的缩小，再加上这一块的贡献。所以，一个分块算完，里面的分数就都不必留着了。
#
# 反向还要用到概率。它手里有 Q、K 和 LSE，就逐块重新算出概率。记 $dP = dO\,V^T$，softmax 的梯度是 $dS = P \circ (dP - D)$，其中 $D_i = \sum_j P_{ij}\,dP_{ij}$：要对整行求和，而一个分块手里没有整行。不过 $dP_{ij} = dO_i \cdot V_j$，而 $O_i = \sum_j P_{ij} V_j$，这个和就是 $dO_i \cdot O_i$，所以 $D = \text{rowsum}(dO \circ O)$ 在开始逐块计算之前就能算出。保存 O 就是为了它。
#
# </div>


# %%
def tiled_forward(q, k, v, block=64):  # (n, d) each: one head
    o, total = torch.zeros_like(q), q.new_zeros(len(q), 1)
    largest = q.new_full((len(q), 1), float("-inf"))
    for start in range(0, len(k), block):
        key, value = k[start : start + block], v[start : start + block]
        scores = q @ key.T * q.shape[1] ** -0.5  # (n, block)
        new = torch.maximum(largest, scores.amax(1, keepdim=True))
        weights, shrink = (scores - new).exp(), (largest - new).exp()
        total = total * shrink + weights.sum(1, keepdim=True)
        o = o * shrink + weights @ value
        largest = new
    return o / total, largest + total.log()


# %%
def tiled_backward(q, k, v, o, lse, grad_o, block=64):
    scale, dots = q.shape[1] ** -0.5, (grad_o * o).sum(1, keepdim=True)
    grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for start in range(0, len(k), block):
        part = slice(start, start + block)
        weights = (q @ k[part].T * scale - lse).exp()  # (n, block): P, once more
        grad_v[part] = weights.T @ grad_o
        grad_scores = weights * (grad_o @ v[part].T - dots) * scale
        grad_q += grad_scores @ k[part]
        grad_k[part] = grad_scores.T @ q
    return grad_q, grad_k, grad_v


# %% [markdown]
# <div lang="en">
#
# Are the gradients right? Against autograd in float64, no error is twice standard attention's in float32:
#
# </div>
# <div lang="zh">
#
# 梯度对吗？以 float64 的 autograd 为准，没有一个误差达到标准注意力在 float32 下的两倍：
#
# </div>

# %%
from course_lib.attention import flash_attention, standard_attention

q, k, v, grad_o = torch.randn(4, 1, 1, 300, 64)  # (batch, heads, n, d) each


def by_autograd(function, dtype):
    inputs = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
    o = function(*inputs)
    return [o.detach(), *torch.autograd.grad(o, inputs, grad_o.to(dtype))]


def from_nothing():
    o, lse = tiled_forward(q[0, 0], k[0, 0], v[0, 0])
    return [o, *tiled_backward(q[0, 0], k[0, 0], v[0, 0], o, lse, grad_o[0, 0])]


# %%
exact = by_autograd(standard_attention, torch.float64)
ways = {"standard": by_autograd(standard_attention, torch.float32), "from nothing": from_nothing()}
ways["library"] = by_autograd(flash_attention, torch.float32)
errors = {}
for name, way in ways.items():
    errors[name] = [float((a - b).norm() / b.norm()) for a, b in zip(way, exact, strict=True)]
for name in ("from nothing", "library"):
    pairs = zip(errors[name], errors["standard"], strict=True)
    print(name, [error < 2 * other for error, other in pairs])

# %% [markdown]
# ## 6.3 Which tiles / 要算哪些分块
#
# <div lang="en">
#
# The library walks over blocks of queries too, and skips what nobody sees: with a causal mask, the tiles above the diagonal. Eight blocks of queries, eight of keys:
#
# </div>
# <div lang="zh">
#
# 库里的版本对查询也分块，并跳过谁也看不见的部分：有因果掩码时，就是对角线以上的分块。查询分八块，键分八块：
#
# </div>

# %% jupyter={"source_hidden": true}
title = "Causal: 36 of 64 tiles are computed, 8 of them with a mask"
alt = "An 8 by 8 grid: the diagonal needs a mask, the 28 tiles below it none, those above are skipped."
drawn, ax = figure(title, height=3.2, width=5.0, alt=alt)
kinds = torch.tensor([[2.0 if i == j else 1.0 if j < i else 0.0 for j in range(8)] for i in range(8)])
ax.imshow(kinds, cmap="Greens", vmax=3)
for i in range(8):
    for j in range(i + 1):
        ax.text(j, i, str(i * (i + 1) // 2 + j + 1), ha="center", va="center", fontsize=8)
ax.set(xlabel=text("blocks of keys"), ylabel=text("blocks of queries"))
ax.grid(False)
None

# %% [markdown]
# <div lang="en">
#
# The numbers are the order of the walk in forward. Does the library really skip the rest? The FLOPs say so, in forward and backward: 36/64 of those without a mask.
#
# </div>
# <div lang="zh">
#
# 数字表示前向时的计算次序。库真的跳过了其余的吗？FLOPs 可以作证，前向与反向都是不加掩码时的 36/64。
#
# </div>


# %%
def flops(function, n=512, **options):
    inputs = [torch.randn(1, 1, n, 64, requires_grad=True) for _ in range(3)]
    with FlopCounterMode(display=False) as forward:
        o = function(*inputs, **options)
    with FlopCounterMode(display=False) as backward:
        o.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


blocks = {"block_q": 64, "block_k": 64}
whole, lower = flops(flash_attention, **blocks), flops(flash_attention, causal=True, **blocks)
[part / total for part, total in zip(lower, whole, strict=True)], 36 / 64

# %% [markdown]
# ## 6.4 What is saved / 保存了什么
#
# <div lang="en">
#
# What does autograd hold after the forward pass? Lesson 01's table, for both kinds, and for the framework's own fused kernel.
#
# **Guess first:** with twice the tokens, how much more does each keep?
#
# </div>
# <div lang="zh">
#
# 前向之后，autograd 手里有什么？用第 01 课的表来看两种注意力，以及框架自带的融合算子。
#
# **先猜**：token 数加倍，它们各要多留多少？
#
# </div>


# %%
def kept(function, sequence, dtype=torch.float32, heads=12):
    size = (1, heads, sequence, 64)
    with symbolic():
        inputs = [torch.empty(size, dtype=dtype, requires_grad=True) for _ in range(3)]
        return saved_tensors(function, *inputs)


kept(flash_attention, 512)

# %%
kinds = {"standard": standard_attention, "flash": flash_attention}
kinds["framework, fused"] = F.scaled_dot_product_attention
lengths, saved, rows = (512, 1024, 2048, 4096, 8192), {}, []
for name, function in kinds.items():
    kind = "standard" if name == "standard" else "flash"
    for n in lengths:
        formula = attention_saved_bytes(sequence=n, batch=1, heads=12, head_dim=64, kind=kind)
        saved[name, n] = kept(function, n).total_bytes
        label = text("{name}, N = {n}", name=name, n=n)
        rows.append((label, sum(formula.values()), saved[name, n]))
predictions([row for row in rows if "512" in row[0] or "8192" in row[0]], unit="bytes")

# %%
all(predicted == found for _, predicted, found in rows)

# %% jupyter={"source_hidden": true}
from course_lib.teaching import category_look

title = "Twice the tokens: nearly four times the bytes, or just twice"
alt = "From N = 512 to 8192: standard from 17.3 to 3,296.7 MB, flash from 6.3 to 101.1 MB."
drawn, ax = figure(title, height=3.2, alt=alt)
for number, (name, part) in enumerate((("standard", "gradient"), ("flash", "activation"))):
    heights, places = [saved[name, n] / 1e6 for n in lengths], [i + 0.38 * number for i in range(5)]
    bars = ax.bar(places, heights, width=0.36, label=text(name), **category_look(part))
    ax.bar_label(bars, [f"{height:,.0f}" for height in heights], fontsize=7)
ax.set_xticks([i + 0.19 for i in range(5)], [str(n) for n in lengths])
ax.set(yscale="log", xlabel=text("sequence length N"), ylabel=text("saved, MB"), ylim=(3, 2e4))
ax.legend(loc="upper left")
None

# %%
rows = []
for name in ("standard", "flash"):
    formula = attention_saved_bytes(sequence=2048, batch=1, heads=12, head_dim=64, kind=name)
    found = [row.bytes for row in kept(kinds[name], 2048) if row.shared_with is None]
    for part, measured in zip(sorted(formula, key=formula.get), sorted(found), strict=True):
        rows.append((text("{name}, {part}", name=name, part=part), formula[part], measured))
predictions(rows, unit="bytes")

# %% [markdown]
# ## 6.5 What is computed, and what is moved / 计算了什么，搬运了什么
#
# <div lang="en">
#
# Computing P again is not free: backward does five products of $2 N^2 d$ FLOPs instead of four. So forward $4 N^2 d$ a head, backward $10 N^2 d$ instead of $8 N^2 d$ (the kernels of 6.8 do seven products, and there you see why). Counted:
#
# </div>
# <div lang="zh">
#
# 重新算 P 并非没有代价：反向要做五次 $2 N^2 d$ FLOPs 的乘法，而不是四次。所以每个头前向 $4 N^2 d$，反向 $10 N^2 d$ 而不是 $8 N^2 d$（6.8 节的核函数要做七次乘法，原因到那里再看）。数一数：
#
# </div>


# %%
unit = 512**2 * 64
standard, flash = flops(standard_attention), flops(flash_attention)
rows = [("standard, forward", 4 * unit, standard[0]), ("standard, backward", 8 * unit, standard[1])]
rows += [("flash, forward", 4 * unit, flash[0]), ("flash, backward", 10 * unit, flash[1])]
predictions(rows, unit="MFLOPs")

# %% [markdown]
# <div lang="en">
#
# More FLOPs, and yet faster? On a GPU what counts is often bytes moved between its memory and the chip. Standard attention moves $\Theta(N d + N^2)$ numbers. Flash reads K and V once for each block of queries that fits on the chip, $\Theta(N^2 d^2 / M)$ where $M$ numbers fit: still quadratic, but a fraction. FLOPs over bytes is the **arithmetic intensity**, and the **roofline** says what a device can do with it at most: the smaller of its compute rate and intensity times bandwidth. Counted as FlashAttention-2 walks, not measured, for one head and 192 KiB on chip:
#
# </div>
# <div lang="zh">
#
# FLOPs 更多，反而更快？在 GPU 上，要紧的往往是显存与片上 SRAM 之间搬运的字节。标准注意力搬运 $\Theta(N d + N^2)$ 个数。flash 把查询切成片上放得下的块，每处理一块就把 K 和 V 各读一遍：$\Theta(N^2 d^2 / M)$，$M$ 是片上存储（SRAM）能放下的元素个数；仍是平方级，但只是一小部分。FLOPs 除以字节是**算术强度**；**屋顶线**（roofline）说明设备用它至多能做到多少：取算力与“强度乘带宽”两者中较小的。下表按 FlashAttention-2 的走法数出来，不是测出来的，一个头，片上 192 KiB：
#
# </div>

# %%
from course_lib.attention import attention_cost

costs, rows = {}, []
for kind in ("standard", "flash"):
    for pass_ in ("forward", "backward"):
        cost = attention_cost(sequence=4096, head_dim=64, kind=kind, pass_=pass_)
        moved, intensity = round(cost.moved_bytes / 1e6, 1), round(cost.arithmetic_intensity)
        rows.append((f"{kind}, {pass_}", round(cost.flops / 1e9, 2), moved, intensity))
        costs[kind, pass_] = cost
table(["N = 4096, d = 64, bf16", "GFLOPs", "MB moved", "FLOPs a byte"], rows)

# %%
devices = {"A100: 312 TFLOP/s, 2.0 TB/s": (312e12, 2.0e12)}
devices["H100: 989 TFLOP/s, 3.35 TB/s"] = 989e12, 3.35e12
ridges = {name: round(rate / bandwidth) for name, (rate, bandwidth) in devices.items()}
reached = {"standard": round(costs["standard", "forward"].arithmetic_intensity)}  # FLOPs a byte
for count in (128, 384):  # queries in a block: M / (4 d), 2 bytes a number
    sram = count * 4 * 64 * 2
    cost = attention_cost(sequence=4096, head_dim=64, kind="flash", sram_bytes=sram)
    reached[text("flash, {count} queries", count=count)] = round(cost.arithmetic_intensity)
reached, ridges

# %% jupyter={"source_hidden": true}
drawn, ax = figure("What each could reach at most: the block decides how far flash gets", height=3.4)
intensities = [2 ** (i / 4) for i in range(0, 57)]
for (name, (rate, bandwidth)), style in zip(devices.items(), ("-", "--"), strict=True):
    ax.plot(intensities, [min(rate, bandwidth * x) / 1e12 for x in intensities], style, color="#555555", label=name)
    for (kind, x), color, marker in zip(reached.items(), ("gradient", "activation", "activation"), "ovs", strict=True):
        shown = text(kind) if style == "-" else None
        ax.plot(x, min(rate, bandwidth * x) / 1e12, marker, color=COLORS[color], label=shown)
ax.set(xscale="log", yscale="log", xlabel=text("FLOPs a byte"), ylabel="TFLOP/s")
ax.legend(fontsize=8)
None

# %% [markdown]
# <div lang="en">
#
# 192 KiB hold 384 queries, but an A100 gives a block 163 KiB at most, and kernels take some 128 queries: 124 FLOPs a byte, left of both ridges. What helps them is the L2 cache, 40 MB on an A100: a head's K and V, 1 MB here, stay there. FlashAttention-2 reports 50 to 73 % of an A100's peak.
#
# </div>
# <div lang="zh">
#
# 192 KiB 放得下 384 个查询，但 A100 上一个线程块（block）至多用 163 KiB，核函数一般取 128 个左右：每字节 124 FLOPs，在两个拐点的左边。好在还有 L2 缓存，A100 上是 40 MB：这里一个头的 K 和 V 共 1 MB，能一直留在其中。FlashAttention-2 报告的结果是 A100 峰值算力的 50% 到 73%。
#
# </div>

# %% [markdown]
# ## 6.6 The general tool beside the special one / 通用工具与专用工具
#
# <div lang="en">
#
# Lesson 02 has another way not to keep P: put standard attention behind a checkpoint. What does each keep, at what does a forward and backward pass peak, and what does it compute? 1024 tokens, 8 heads, three layers in a row:
#
# </div>
# <div lang="zh">
#
# 第 02 课有另一种不保存 P 的办法：把标准注意力放进检查点。它们各留多少？前向加反向的峰值是多少？要算多少？1024 个 token，8 个头，三层相接：
#
# </div>

# %%
from course_lib.checkpoint import checkpoint

inputs = [torch.randn(1, 8, 1024, 64, requires_grad=True) for _ in range(3)]
for x in inputs:
    x.grad = torch.zeros_like(x)


def stack(layer):
    o, k, v = inputs
    for _ in range(3):
        o = layer(o, k, v)
    return o.sum()


def checkpointed(q, k, v):
    return checkpoint(standard_attention, q, k, v, use_reentrant=False, preserve_rng_state=False)


# %%
def costs_of(layer):
    with MemoryMeter() as meter:
        stack(layer).backward()
    with FlopCounterMode(display=False) as counter:
        stack(layer).backward()
    held = saved_tensors(stack, layer).total_bytes
    done = round(counter.get_total_flops() / 1e9, 2) or "–"
    return round(held / 1e6, 1), round(meter.peak_bytes / 1e6, 1), done


layers = {"standard": standard_attention, "checkpointed": checkpointed}
layers |= {"flash": flash_attention, "framework, fused": F.scaled_dot_product_attention}
rows = [(name, *costs_of(layer)) for name, layer in layers.items()]
table(["", "held after forward, MB", "peak, MB", "GFLOPs"], rows)

# %% [markdown]
# <div lang="en">
#
# Both forget P, and both hold little after forward (Q, K and V, 6.3 MB, were there before and are not counted). But when backward reaches a checkpointed layer, P is back, and the gradients of P and of the scores beside it: three matrices of $N^2$ numbers a head, $3 \cdot 8 \cdot 1024^2 \cdot 4$ bytes, 101 of the 107 MB. Flash never has them. In FLOPs they cost the same: each does one product again, $Q K^T$ (the checkpoint stops early). The framework's kernel works in memory of its own, which the meter does not see, and the counter does not know it.
#
# Does it pay on a CPU, in seconds?
#
# </div>
# <div lang="zh">
#
# 两者都忘掉了 P，前向之后都只持有很少（Q、K、V 共 6.3 MB，事先就在，不计）。但反向走到一个检查点层时，P 回来了，旁边还有 P 的梯度和分数的梯度：每个头三个 $N^2$ 个数的矩阵，共 $3 \cdot 8 \cdot 1024^2 \cdot 4$ 字节，占 107 MB 中的 101 MB。flash 从来没有这样的矩阵。FLOPs 上两者相同：都重做一次乘法 $Q K^T$（检查点提前停下了）。框架的融合算子在自己的内存里工作，内存计量器看不见，计数器也不认识它。
#
# 用秒来看，在 CPU 上划算吗？
#
# </div>


# %% tags=["nbval-ignore-output", "shows-seconds"]
def seconds(function, n):
    q, k, v = (torch.randn(1, 4, n, 64, requires_grad=True) for _ in range(3))
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        function(q, k, v).sum().backward()
        taken.append(time.perf_counter() - start)
    return round(min(taken), 3)


rows = []
for name, layer in layers.items():
    rows.append((name, *(seconds(layer, n) for n in (1024, 2048))))
table(["", "N = 1024", "N = 2048"], rows)

# %% [markdown]
# ## 6.7 The library's version / 库里的版本
#
# <div lang="en">
#
# `flash_attention` takes what real models need: causal masks, queries and keys of different numbers, grouped-query attention (GQA: several query heads share one key and value head), bf16 and fp16 with sums in fp32, rows that see nothing. The causal mask is aligned at the bottom right: the last query sees all keys, and with fewer keys than queries the first ones see none (`is_causal=True` aligns at the top left, as the framework's does). With 8 query heads on 2 key heads, beside the framework; then 6 queries on 4 keys:
#
# </div>
# <div lang="zh">
#
# `flash_attention` 支持真实模型所需的种种情形：因果掩码、数目不同的查询与键、分组查询注意力（GQA，几个查询头共用一个键值头）、bf16 与 fp16（求和用 fp32），以及什么也看不见的行。因果掩码在右下角对齐：最后一个查询看见所有的键；键比查询少时，最前面的查询什么也看不见（`is_causal=True` 与框架一样，在左上角对齐）。8 个查询头共用 2 个键值头，与框架相比；然后是 6 个查询对 4 个键：
#
# </div>

# %%
q, (k, v) = torch.randn(2, 8, 100, 64), torch.randn(2, 2, 2, 100, 64)  # 8 heads, and 2
ours = flash_attention(q, k, v, causal=True)
theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
more, (k, v) = torch.randn(1, 1, 6, 16), torch.randn(2, 1, 1, 4, 16)  # 6 queries, 4 keys
sees = flash_attention(more, k, v, causal=True)[0, 0].abs().sum(1).gt(0)
torch.allclose(ours, theirs, atol=1e-5), sees.tolist()  # the first two see nothing

# %% [markdown]
# ## 6.8 Reading a Triton kernel / 读一个 Triton 核函数
#
# <div lang="en">
#
# On a GPU the tile walk is a **kernel**: a program that runs many times at once, each **instance** with its own block of queries. `tl.program_id` says which. On a CPU Triton's interpreter runs the instances one after the other, and so we can look at what each instance holds. Here it counts the keys that its queries see:
#
# </div>
# <div lang="zh">
#
# 在 GPU 上，这样逐个分块走一遍的程序是一个**核函数**（kernel）：它同时运行许多份，每个**实例**负责自己的那块查询，由 `tl.program_id` 说明是哪一块。在 CPU 上，由 Triton 的解释器一个接一个地运行这些实例，于是可以看看每个实例手里有什么。这里它数一数自己的查询看见几个键：
#
# </div>

# %%
try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
    missing = "No Triton here (it is for Linux only): this section's kernels can be read, not run."
    print(say(missing))

# %%
if triton:

    @triton.jit
    def look(q, k, seen, N: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
        rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # the queries of this instance
        query = tl.load(q + rows[:, None] * D + tl.arange(0, D)[None, :])  # (BLOCK, D)
        count = tl.zeros((BLOCK,), tl.int32)
        for first in range(0, tl.program_id(0) * BLOCK + BLOCK, BLOCK):  # up to the diagonal
            keys = first + tl.arange(0, BLOCK)
            key = tl.load(k + keys[:, None] * D + tl.arange(0, D)[None, :])
            visible = keys[None, :] <= rows[:, None]
            scores = tl.where(visible, tl.dot(query, tl.trans(key)), float("-inf"))
            count += tl.sum((scores > float("-inf")).to(tl.int32), 1)
        tl.store(seen + rows, count)


# %%
device = "cuda" if torch.cuda.is_available() else "cpu"
q, k = torch.randn(2, 64, 16, device=device)
seen = torch.zeros(64, dtype=torch.int32, device=device)
if triton:
    look[(4,)](q, k, seen, N=64, D=16, BLOCK=16)
# Keys seen by the first and the last query of each instance:
seen.view(4, 16)[:, [0, 15]].tolist() if triton else None

# %% [markdown]
# <div lang="en">
#
# Four instances; the first query of the first sees one key, the last of the last 64. Now the library's forward kernel, the part inside the walk. Compare it with `tiled_forward`: scores, mask, new maximum, weights, shrink, sum, output. `exp2` stands for `exp`, with $\log_2 e$ folded into the scale. `EDGE` is false for tiles that every row sees whole, and true for the rest, where the keys past each row's `last` are masked.
#
# </div>
# <div lang="zh">
#
# 四个实例；第一个实例的第一个查询看见一个键，最后一个实例的最后一个查询看见 64 个。再看库里的前向核函数，只看循环之内的部分。与 `tiled_forward` 对照：分数、掩码、新的最大值、权重、缩小、求和、输出。`exp2` 代替了 `exp`，$\log_2 e$ 已并入缩放因子。若一个分块对每一行都整块可见，`EDGE` 为假；否则为真，此时每一行把自己 `last` 之后的键掩去。
#
# </div>

# %%
import inspect

from course_lib.attention import kernels


def loop(kernel, first, last):
    source = inspect.getsource(getattr(kernel, "fn", kernel)).splitlines()
    start = next(i for i, line in enumerate(source) if first in line)
    end = next(i for i, line in enumerate(source) if last in line)
    indent = len(source[start]) - len(source[start].lstrip())
    print("\n".join(line[indent:] for line in source[start : end + 1]))


loop(kernels.forward_kernel, "for first_k in", "largest = new_largest")

# %% [markdown]
# <div lang="en">
#
# Backward has two walks: one kernel keeps a block of keys and sums dK and dV over queries, the other keeps a block of queries and sums dQ over keys. So no two instances write to the same place, and the sums are the same each time. The price: both make S and dP, so that there are seven products and not five. FlashAttention-2 does five, and adds to dQ from many instances (atomically). The walk over queries, the heart of the first; the products of each kernel; and all kernels, causal and not, beside the torch backend:
#
# </div>
# <div lang="zh">
#
# 反向要走两趟：一个核函数负责一块键，对查询累加 dK 和 dV；另一个负责一块查询，对键累加 dQ。这样，没有两个实例会写同一个地方，每次求和的结果也相同。代价是两边都要算 S 和 dP：乘法是七次，而不是五次。FlashAttention-2 只做五次，但许多实例要往同一个 dQ 上加（原子操作）。以下依次是：前者的核心，即对查询走的那一趟；每个核函数的乘法次数；全部核函数运行一遍，因果与非因果，与 torch 后端相比：
#
# </div>

# %%
loop(kernels.keys_backward_kernel, "for first_q in", "key_grad = product")

# %%
each = (kernels.forward_kernel, kernels.keys_backward_kernel, kernels.queries_backward_kernel)
products = [inspect.getsource(getattr(kernel, "fn", kernel)).count("= product(") for kernel in each]
by_kernels = sum(products[1:]) / products[0]
products, by_kernels  # backward does 3.5 times the FLOPs of forward: 14 against 4 N^2 d


# %%
def with_gradients(backend, causal):
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, 40, 16, device=device, requires_grad=True) for _ in range(3)]
    o = flash_attention(*inputs, causal=causal, backend=backend, block_q=16, block_k=16)
    return [o.detach(), *torch.autograd.grad(o.square().sum(), inputs)]


pairs = []
for causal in (False, True) if triton else ():
    ours, theirs = with_gradients("triton", causal), with_gradients("torch", causal)
    pairs += zip(ours, theirs, strict=True)
[torch.allclose(a, b, atol=1e-4) for a, b in pairs]

# %% [markdown]
# ## 6.9 What you may have read / 你可能读到过的说法
#
# <div lang="en">
#
# Five claims about FlashAttention and checkpointed attention.
#
# </div>
# <div lang="zh">
#
# 关于 FlashAttention 和带检查点的注意力，五条说法。
#
# </div>

# %%
in_bf16 = kept(flash_attention, 1024, torch.bfloat16)
vectors = [row for row in in_bf16 if len(row.shape) == 3]
bytes_ratio = kept(flash_attention, 1024).total_bytes / kept(flash_attention, 512).total_bytes
flops_ratio = sum(flops(flash_attention, 1024)) / sum(flops(flash_attention, 512))


def peak(layer, depth):
    with symbolic(), MemoryMeter() as meter:
        o, k, v = (torch.zeros(1, 8, 1024, 64, requires_grad=True) for _ in range(3))
        for _ in range(depth):
            o = layer(o, k, v)
        o.sum().backward()
    return meter.peak_bytes


savings = [1 - peak(checkpointed, depth) / peak(standard_attention, depth) for depth in (1, 3, 6)]

# %%
from course_lib.lessons import what_you_may_have_read

what_you_may_have_read(
    "06",
    f"{len(vectors)}",
    f"{vectors[0].dtype}".removeprefix("torch."),
    f"{flash[1] / flash[0]:.2f} × / {by_kernels:.2f} ×",
    " / ".join(f"{100 * saving:.0f} %" for saving in savings),
    f"{bytes_ratio:.1f} × / {flops_ratio:.1f} ×",
)

# %% [markdown]
# ## 6.10 On a GPU / 在 GPU 上
#
# <div lang="en">
#
# There `backend="auto"` takes the Triton kernels, with block sizes tuned at the first call. If you have a GPU, this cell measures them beside the framework's flash kernel.
#
# </div>
# <div lang="zh">
#
# 在 GPU 上，`backend="auto"` 会选用 Triton 核函数，并在第一次调用时调优分块的大小。如果你有 GPU，这个单元格会实测它们，并与框架的 flash 核函数对照。
#
# </div>

# %% tags=["nbval-ignore-output", "shows-device"]
from course_lib.lessons import on_gpu

on_gpu("06")

# %% [markdown]
# ## 6.11 Exercises / 练习
#
# <div lang="en">
#
# **Exercise 1.** Write `log_sum_exp_in_blocks(scores, block)` for scores of shape (rows, n): one pass over blocks of columns, large scores allowed. Return the log-sum-exp of each row.
#
# </div>
# <div lang="zh">
#
# **练习 1。** 写出 `log_sum_exp_in_blocks(scores, block)`，分数的形状是 (rows, n)：对列分块，只过一遍，分数可以很大。返回每一行的 LSE。
#
# </div>


# %%
def log_sum_exp_in_blocks(scores, block):
    return scores.exp().sum(1).log()


lesson_06.check_log_sum_exp(log_sum_exp_in_blocks)


# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not lesson_06.check_log_sum_exp.accepted:

    def log_sum_exp_in_blocks(scores, block):
        largest, total = scores.new_full(scores.shape[:1], float("-inf")), scores.new_zeros(scores.shape[:1])
        for part in scores.split(block, dim=1):
            new = torch.maximum(largest, part.amax(1))
            total = total * (largest - new).exp() + (part - new[:, None]).exp().sum(1)
            largest = new
        return largest + total.log()


lesson_06.check_log_sum_exp(log_sum_exp_in_blocks)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# **Exercise 2.** Write `probabilities(q, k, lse)`: the matrix P of one head, without softmax, from Q, K (n, d) and the log-sum-exp (n).
#
# </div>
# <div lang="zh">
#
# **练习 2。** 写出 `probabilities(q, k, lse)`：不用 softmax，由一个头的 Q、K (n, d) 和 LSE (n) 得到矩阵 P。
#
# </div>


# %%
def probabilities(q, k, lse):
    return q @ k.T


lesson_06.check_probabilities(probabilities)


# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not lesson_06.check_probabilities.accepted:

    def probabilities(q, k, lse):
        return (q @ k.T * q.shape[1] ** -0.5 - lse[:, None]).exp()


lesson_06.check_probabilities(probabilities)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# **Exercise 3.** Grouped-query attention: 32 query heads, 8 key and value heads, $d = 128$, 4096 tokens, batch 1, bf16. How many bytes does FlashAttention keep?
#
# </div>
# <div lang="zh">
#
# **练习 3。** 分组查询注意力（GQA）：32 个查询头，8 个键值头，$d = 128$，4096 个 token，批次大小为 1，bf16。FlashAttention 留下多少字节？
#
# </div>

# %%
answer = None  # bytes
lesson_06.check_grouped_bytes(answer)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
one_head = 4096 * 128 * 2
lesson_06.check_grouped_bytes((32 + 8 + 8 + 32) * one_head + 32 * 4096 * 4)
### END SOLUTION

# %% [markdown]
# ## 6.12 Summary / 小结
#
# <div lang="en">
#
# - Softmax can be had in one pass over blocks: a running maximum and a running sum. Their log-sum-exp gives every probability back.
# - FlashAttention keeps Q, K, V, O and one fp32 number a row: bytes grow with $N$, not $N^2$.
# - FLOPs stay quadratic, and backward does 2.5 times the forward (3.5 times, where no two instances write to one place); what falls is bytes moved.
# - A checkpoint around standard attention forgets P as well, but P is back at the peak.
#
# **Next:** [lesson 07](07_fit_the_budget.ipynb) fits all of this into a budget.
#
# </div>
# <div lang="zh">
#
# - softmax 可以分块一遍算完：一个当前最大值，一个当前总和。由它们得到的 LSE，能还原每一个概率。
# - FlashAttention 留下 Q、K、V、O，以及每行一个 fp32 数：字节随 $N$ 增长，而不是随 $N^2$ 增长。
# - FLOPs 仍是平方级，反向是前向的 2.5 倍（要让任何两个实例都不写同一处，则是 3.5 倍）；减少的是搬运的字节。
# - 给标准注意力套上检查点，也会忘掉 P，但峰值时 P 又回来了。
#
# **下一步**：[第 07 课](07_fit_the_budget.ipynb)把这一切装进一个预算。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **Sources.** Milakov and Gimelshein 2018, *Online normalizer calculation for softmax*, arXiv:1805.02867. Dao et al. 2022, *FlashAttention*, arXiv:2205.14135. Dao 2023, *FlashAttention-2*, arXiv:2307.08691. Williams et al. 2009, *Roofline*, CACM 52(4). NVIDIA's data sheets of A100 and H100, and its CUDA programming guide (163 KiB a block).
#
# </div>
# <div lang="zh">
#
# **出处。** Milakov and Gimelshein 2018，*Online normalizer calculation for softmax*，arXiv:1805.02867。Dao et al. 2022，*FlashAttention*，arXiv:2205.14135。Dao 2023，*FlashAttention-2*，arXiv:2307.08691。Williams et al. 2009，*Roofline*，CACM 52(4)。NVIDIA 的 A100 与 H100 数据手册，以及 CUDA 编程指南（每个线程块 163 KiB）。
#
# </div>
