# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] slide={"en": "8192 tokens, 12 heads: 3.2 GB of probabilities; or the output, 25 MB, and one number a row.\n\nHow can that be enough?", "zh": "8192 个 token，12 个头：3.2 GB 的概率；或者 25 MB 的输出，外加每行一个数。\n\n这怎么够？"}
# # 6 What if the operator itself forgets? (FlashAttention) / 让算子自己忘掉呢？（FlashAttention）
#
# <div lang="en">
#
# One attention layer, 8192 tokens, 12 heads of 64: standard attention keeps its probabilities for backward, 3.2 GB of them in fp32. In their place FlashAttention keeps its output, 25 MB, and 0.4 MB more: one number for each row. (Both also keep Q, K and V, 75 MB: together 3,297 MB against 101.)
#
# What is that number, and how can it be enough for dQ, dK and dV? You will write the running sum that it comes from, and the backward pass.
#
# </div>
# <div lang="zh">
#
# 一个注意力层，8192 个 token，12 个 64 维的头：标准注意力要为反向留下概率，fp32 下是 3.2 GB。FlashAttention 不留概率，只留下它的输出，25 MB，外加 0.4 MB，也就是每行一个数。（两者都还要留下 Q、K、V，共 75 MB，所以合计是 3,297 MB 对 101 MB。）
#
# 这个数是什么？凭它怎么就能算出 dQ、dK 和 dV？算出这个数的分块求和，以及反向，都由你来写。
#
# </div>

# %%
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # for section 6.7; Triton reads it when it is imported
from course_lib.teaching import language

language()

# %% [markdown]
# <div lang="en">
#
# **Goals** (90 minutes). Write softmax in one pass, and attention's backward pass without any N × N matrix. Predict what each kind keeps, computes and moves. Say what a checkpoint around attention cannot do. Write three lines of a Triton kernel.
#
# **What to know before**: lesson 01; lesson 02 for recomputation.
#
# </div>
# <div lang="zh">
#
# **目标**（90 分钟）：写出只过一遍的 softmax，以及不出现任何 N × N 矩阵的注意力反向；预测两种注意力各保存、计算、搬运多少；说出给注意力加检查点做不到什么；写出 Triton 核函数里的三行。
#
# **预备知识**：第 01 课；第 02 课中的重计算。
#
# </div>

# %%
import time
from functools import partial

from torch.nn import functional as F

from course_lib.attention import attention_cost, flash_attention, standard_attention
from course_lib.lessons import lesson_06, what_you_may_have_read
from course_lib.lessons.ledger import ledger
from course_lib.memory import MemoryMeter, attention_saved_bytes, saved_tensors, symbolic
from course_lib.memory.measurement import flop_counter
from course_lib.teaching import predictions, say, table, text

# %% [markdown] slide={"en": "Softmax of a row that you see block by block.\n\n**Write it**: what do you carry from block to block?", "zh": "一行分数，一块一块地看，怎样求 softmax？\n\n**自己写**：从一块到下一块，要带着什么走？"}
# ## 6.1 Softmax in one pass / 只过一遍的 softmax
#
# <div lang="en">
#
# Softmax needs the largest score of a row, lest `exp` overflow, and the sum. Both seem to need the whole row first. They don't: take a block of columns, keep the largest so far, $m$, and the sum so far, $\ell$, of exponentials **relative to** $m$. When a later block has a larger score, the old sum is worth less by a known factor: **online softmax**. In the end one number says it all, the **log-sum-exp** $\text{lse} = m + \log \ell$.
#
# **Exercise 1.** Write `log_sum_exp_in_blocks(scores, block)` for scores of shape (rows, n): one pass over blocks of columns. The check uses scores whose `exp` overflows, and watches which blocks you read.
#
# </div>
# <div lang="zh">
#
# softmax 需要一行里最大的分数（否则 `exp` 会溢出）和总和，看来都得先有整行。其实不必：每次取一块列，记住迄今最大的分数 $m$，以及迄今各指数项之和 $\ell$，指数项都**相对于** $m$ 来算。后面的块若有更大的分数，原来的总和就乘上一个已知的缩小因子：这就是**在线 softmax**（online softmax）。到最后，一切归结为一个数，即 **LSE**（log-sum-exp，指数和的对数）：$\text{lse} = m + \log \ell$。
#
# **练习 1。** 写出 `log_sum_exp_in_blocks(scores, block)`，分数的形状是 (rows, n)：对列分块，只过一遍。检查所用的分数，直接取 `exp` 会溢出；检查还会看你读了哪些块。
#
# </div>


# %% minutes=8
def log_sum_exp_in_blocks(scores, block):
    return None


lesson_06.check_log_sum_exp(log_sum_exp_in_blocks)

# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not lesson_06.check_log_sum_exp.accepted:

    def log_sum_exp_in_blocks(scores, block):
        largest = scores.new_full(scores.shape[:1], float("-inf"))
        total = scores.new_zeros(scores.shape[:1])
        for part in scores.split(block, dim=1):
            new = torch.maximum(largest, part.amax(1))
            total = total * (largest - new).exp() + (part - new[:, None]).exp().sum(1)
            largest = new
        return largest + total.log()


lesson_06.check_log_sum_exp(log_sum_exp_in_blocks)
### END SOLUTION

# %% jupyter={"source_hidden": true} slide="result"
torch.manual_seed(0)
scores = torch.randn(512) + torch.linspace(-2, 2, 512)
maxima = [scores[: 32 * n].max().item() for n in range(1, 17)]
sums = [(scores[: 32 * n] - m).exp().sum().item() for n, m in enumerate(maxima, 1)]
lesson_06.draw_running(maxima, sums)

# %% [markdown]
# <div lang="en">
#
# With the log-sum-exp any probability can be had again from its score: $p = e^{s - \text{lse}}$. Remember this line.
#
# </div>
# <div lang="zh">
#
# 有了 LSE，任何一个概率都可以由它的分数重新得到：$p = e^{s - \text{lse}}$。请记住这个式子。
#
# </div>

# %% [markdown] slide={"en": "The output, too, can be carried along.\n\nWhich line of the code shrinks it?", "zh": "输出也可以边走边累积。\n\n代码里哪一行把它缩小？"}
# ## 6.2 Forward, panel by panel / 前向：一块一块地走
#
# <div lang="en">
#
# The output is a weighted sum of values, and can be carried along like $\ell$: shrink what there is, add the panel's part. (A panel is a block of keys with their values.) No score outlives its panel.
#
# </div>
# <div lang="zh">
#
# 输出是 V 的加权和，可以像 $\ell$ 一样边走边累积：先把已有的缩小，再加上这一块的贡献。（这里的一块，是一组键连同它们的值。）这一块算完，里面的分数就都不必留着了。
#
# </div>


# %% slide="code"
def tiled_forward(q, k, v, block=64):  # (n, d) each: one head
    scale, o, total = q.shape[1] ** -0.5, torch.zeros_like(q), q.new_zeros(len(q), 1)
    largest = q.new_full((len(q), 1), float("-inf"))
    for start in range(0, len(k), block):
        key, value = k[start : start + block], v[start : start + block]
        scores = q @ key.T * scale  # (n, block)
        new = torch.maximum(largest, scores.amax(1, keepdim=True))
        weights, shrink = (scores - new).exp(), (largest - new).exp()
        total = total * shrink + weights.sum(1, keepdim=True)
        o = o * shrink + weights @ value
        largest = new
    return o / total, (largest + total.log())[:, 0]  # (n, d), (n,)


# %% jupyter={"source_hidden": true} slide="result"
lesson_06.draw_passes()

# %% [markdown] slide={"en": "Backward needs P. It was forgotten.\n\n**Write it**: dQ, dK, dV from Q, K, V, O and one number a row.", "zh": "反向要用 P，而 P 已经忘掉了。\n\n**自己写**：由 Q、K、V、O 和每行一个数，求 dQ、dK、dV。"}
# ## 6.3 Backward: dQ, dK, dV / 反向：dQ、dK、dV
#
# <div lang="en">
#
# Backward needs P again. It has Q, K and the log-sum-exp, so it makes P panel by panel. Then four products, as ever:
#
# $$dV = P^T dO, \quad dP = dO\,V^T, \quad dQ = dS\,K, \quad dK = dS^T Q$$
#
# and softmax's own gradient between them. Its Jacobian is $\partial p_j / \partial s_i = p_j (\delta_{ij} - p_i)$, so $dS = P \circ (dP - D)$ with $D_i = \sum_j P_{ij}\,dP_{ij}$: a sum over the **whole** row, which no panel has. But $dP_{ij} = dO_i \cdot V_j$ and $O_i = \sum_j P_{ij} V_j$, so $D_i = dO_i \cdot O_i$, known before the walk. That is what O is kept for.
#
# **Exercise 2.** Write it for one head: `backward(q, k, v, o, lse, grad_o, block)` returns dQ, dK, dV, all (n, d), `lse` is (n,). Mind the scale $1/\sqrt d$. The check compares with float64, counts FLOPs, and looks for anything N × N.
#
# </div>
# <div lang="zh">
#
# 反向还要用到 P。它手里有 Q、K 和 LSE，就一块一块地重新算出 P。然后照旧是四次矩阵乘法：
#
# $$dV = P^T dO, \quad dP = dO\,V^T, \quad dQ = dS\,K, \quad dK = dS^T Q$$
#
# 中间夹着 softmax 自己的梯度。它的雅可比矩阵是 $\partial p_j / \partial s_i = p_j (\delta_{ij} - p_i)$，所以 $dS = P \circ (dP - D)$，其中 $D_i = \sum_j P_{ij}\,dP_{ij}$：要对**整行**求和，而哪一块手里都没有整行。不过 $dP_{ij} = dO_i \cdot V_j$，$O_i = \sum_j P_{ij} V_j$，于是 $D_i = dO_i \cdot O_i$，开始走之前就知道。保存 O 就是为了它。
#
# **练习 2。** 为一个头写出 `backward(q, k, v, o, lse, grad_o, block)`，返回 dQ、dK、dV，形状都是 (n, d)，`lse` 是 (n,)。别忘了缩放因子 $1/\sqrt d$。检查会与 float64 比较，数 FLOPs，并查有没有 N × N 的张量。
#
# </div>


# %% minutes=18
def backward(q, k, v, o, lse, grad_o, block):
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


lesson_06.check_backward(backward)

# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not lesson_06.check_backward.accepted:

    def backward(q, k, v, o, lse, grad_o, block):
        scale, dots = q.shape[1] ** -0.5, (grad_o * o).sum(1, keepdim=True)  # D
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for start in range(0, len(k), block):
            panel = slice(start, start + block)
            p = (q @ k[panel].T * scale - lse[:, None]).exp()  # (n, block): P, once more
            dv[panel] = p.T @ grad_o
            ds = p * (grad_o @ v[panel].T - dots) * scale
            dq += ds @ k[panel]
            dk[panel] = ds.T @ q
        return dq, dk, dv


lesson_06.check_backward(backward)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# How exact is it? Errors against float64, beside standard attention's in fp32 (drawn, since the last digits differ between CPUs):
#
# </div>
# <div lang="zh">
#
# 有多精确？以 float64 为准的误差，与标准注意力在 fp32 下的误差画在一起（用图，因为末几位随 CPU 而不同）：
#
# </div>

# %%
q, k, v, grad_o = torch.randn(4, 1, 1, 300, 64)  # (batch, heads, n, d) each


def by_autograd(function, dtype):
    inputs = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
    o = function(*inputs)
    return [o.detach(), *torch.autograd.grad(o, inputs, grad_o.to(dtype))]


def yours():
    o, lse = tiled_forward(q[0, 0], k[0, 0], v[0, 0])
    return [o, *backward(q[0, 0], k[0, 0], v[0, 0], o, lse, grad_o[0, 0], 64)]


# %% slide="result"
exact = by_autograd(standard_attention, torch.float64)
ways = {"standard": by_autograd(standard_attention, torch.float32), "yours": yours()}
ways["the library"] = by_autograd(flash_attention, torch.float32)
errors = {}
for name, way in ways.items():
    pairs = zip(way, exact, strict=True)
    errors[name] = [((a - b).norm() / b.norm()).item() for a, b in pairs]
lesson_06.draw_errors(errors)

# %% [markdown]
# <div lang="en">
#
# All near 4e-7. Here the gradients by panels, yours and the library's, are off by 0.9 to 1.2 times what standard attention's are. The order of the sums is another one, so the last digits are too: "exact" attention is exact as a formula, not to the bit.
#
# </div>
# <div lang="zh">
#
# 都在 4e-7 上下。在这里，你写的和库里的都分块来算，梯度的误差是标准注意力的 0.9 到 1.2 倍。求和的顺序不同，末几位数字也就不同：所谓“精确”注意力，是公式上精确，并非逐位相同。
#
# </div>

# %% [markdown] slide={"en": "**Guess first.** Twice the tokens: how much more does each kind keep?", "zh": "**先猜**：token 数加倍，两种注意力各多留多少？"}
# ## 6.4 What is saved / 保存了什么
#
# <div lang="en">
#
# What does autograd hold after the forward pass? Lesson 01's list, for the library's version:
#
# **Guess first:** with twice the tokens, how much more does each kind keep?
#
# </div>
# <div lang="zh">
#
# 前向之后，autograd 手里有什么？用第 01 课的表来看库里的版本：
#
# **先猜**：token 数加倍，两种注意力各要多留多少？
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
lengths = (512, 1024, 2048, 4096, 8192)
saved = {name: [kept(way, n).total_bytes for n in lengths] for name, way in kinds.items()}
rows = []
for name in kinds:
    for n, found in zip(lengths, saved[name], strict=True):
        size = {"sequence": n, "batch": 1, "heads": 12, "head_dim": 64}
        formula = attention_saved_bytes(**size, kind=name)
        label = text("{name}, N = {n}", name=name, n=n)
        rows.append((label, sum(formula.values()), found))
predictions([rows[i] for i in (0, 4, 5, 9)], unit="bytes")

# %% slide="result"
lesson_06.draw_saved(lengths, saved)

# %% [markdown] slide={"en": "FLOPs in $N^2 d$: forward, your backward, and one in two walks.\n\nWhy would anyone walk twice?", "zh": "以 $N^2 d$ 计的 FLOPs：前向、你的反向、分两趟走的反向。\n\n为什么会有人愿意走两趟？"}
# ## 6.5 What is computed, and what is moved / 计算了什么，搬运了什么
#
# <div lang="en">
#
# Computing P again is not free. **Exercise 3.** FLOPs in units of $N^2 d$, for one head: of forward; of your backward; and of a backward in **two walks**, where one walk makes dK and dV, the other dQ, and both make S and dP for themselves.
#
# </div>
# <div lang="zh">
#
# 重新算 P 并非没有代价。**练习 3。** 一个头的 FLOPs，以 $N^2 d$ 为单位：前向；你写的反向；以及分**两趟**走的反向：一趟算 dK 和 dV，另一趟算 dQ，S 和 dP 两趟各算各的。
#
# </div>

# %% minutes=5
flops = {"forward": None, "backward": None, "two walks": None}  # N² d
lesson_06.check_flops(flops)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not lesson_06.check_flops.accepted:
    flops = {"forward": 4, "backward": 10, "two walks": 14}
lesson_06.check_flops(flops)
### END SOLUTION

# %% slide="result"
one, n, d = [x[0, 0] for x in (q, k, v)], 300, 64
with flop_counter() as forward:
    o, lse = tiled_forward(*one)
with flop_counter() as back:
    backward(*one, o, lse, grad_o[0, 0], 64)
two = attention_cost(sequence=n, head_dim=d, kind="flash", pass_="backward", walks=2)
counts = [forward.get_total_flops(), back.get_total_flops(), two.flops]
[count / (n * n * d) for count in counts]

# %% [markdown]
# <div lang="en">
#
# Two walks cost 40% more FLOPs in backward, and buy this: no two instances write to one place. With one walk many add to the same dQ at once, by atomic adds, in an order that changes from run to run. FlashAttention's authors: "not deterministic because we use atomic adds" (issue 414); only dQ is concerned (issue 988). One walk can be deterministic too, where instances wait for their turn to add. That is their `deterministic=True`: on an H100, head size 128, 8192 tokens, causal, backward takes 21% longer since pull request 1893 (in the order before it, 59%). The kernels of this library take two walks.
#
# </div>
# <div lang="zh">
#
# 走两趟，反向多 40% 的 FLOPs，换来的是：没有两个实例会写同一个地方。只走一趟时，许多实例同时往同一个 dQ 上加，用的是原子加，顺序每次运行都不同。FlashAttention 的作者说：“反向传播不是确定性的，因为我们用了原子加”（issue 414）；受影响的只有 dQ（issue 988）。只走一趟也可以是确定性的，只要各个实例按顺序等着相加。他们的 `deterministic=True` 就是这样，在 H100 上，头维度 128，8192 个 token，因果，自合并请求 1893 起反向多花 21% 的时间（用此前的顺序则多花 59%）。本库的核函数走两趟。
#
# </div>

# %% [markdown] slide={"en": "More FLOPs, and yet faster?\n\n**Guess first.** Bytes moved, beside standard attention?", "zh": "FLOPs 更多，反而更快？\n\n**先猜**：搬运的字节，与标准注意力相比？"}
# <div lang="en">
#
# More FLOPs than standard attention, and yet faster? On a GPU what counts is often bytes moved. Standard attention moves $\Theta(N d + N^2)$ numbers; flash reads K and V once for each block of queries, $\Theta(N^2 d^2 / M)$ where $M$ numbers fit on the chip. FLOPs over bytes is the **arithmetic intensity**; the **roofline** is the smaller of the compute rate and intensity times bandwidth. Counted, not measured, for blocks of 64 and 128 queries, as kernels take them:
#
# </div>
# <div lang="zh">
#
# FLOPs 比标准注意力多，反而更快？在 GPU 上，要紧的往往是搬运的字节。标准注意力搬运 $\Theta(N d + N^2)$ 个数；flash 每处理一块查询就把 K 和 V 读一遍，共 $\Theta(N^2 d^2 / M)$，$M$ 是片上存储放得下的元素个数。FLOPs 除以字节是**算术强度**；**屋顶线**（roofline）取算力与“强度乘带宽”两者中较小的。下面是数出来的，不是测出来的，查询块取核函数常用的 64 和 128：
#
# </div>

# %%
sizes = {"sequence": 4096, "head_dim": 64}
reached = {"standard": attention_cost(**sizes, kind="standard").arithmetic_intensity}
for count in (64, 128):  # queries in a block: M / (4 d), 2 bytes a number
    cost = attention_cost(**sizes, kind="flash", sram_bytes=count * 4 * 64 * 2)
    reached[text("flash, {count} queries", count=count)] = cost.arithmetic_intensity
devices = {"A100: 312 TFLOP/s, 2.0 TB/s": (312e12, 2.0e12)}
devices["H100: 989 TFLOP/s, 3.35 TB/s"] = 989e12, 3.35e12
ridges = [round(rate / bandwidth) for rate, bandwidth in devices.values()]
[round(x) for x in reached.values()], ridges

# %% jupyter={"source_hidden": true} slide="result"
lesson_06.draw_roofline(devices, reached)

# %% [markdown]
# <div lang="en">
#
# 63 and 124 FLOPs a byte lie left of both ridges, 156 and 295: by this count memory would still be the limit. What helps is the L2 cache, 40 MB on an A100: a head's K and V, 1 MB here, stay in it. If they came from memory once a head only, it would be 2,032. The truth lies between; FlashAttention-2 reports 50 to 73% of an A100's peak.
#
# </div>
# <div lang="zh">
#
# 每字节 63 和 124 FLOPs，都在两个拐点 156 和 295 的左边：照这样数，瓶颈仍是显存带宽。帮上忙的是 L2 缓存，A100 上有 40 MB：一个头的 K 和 V，这里共 1 MB，能一直留在里面。假如每个头只从显存读它们一次，就是 2,032。实际介于两者之间；FlashAttention-2 报告达到 A100 峰值算力的 50% 到 73%。
#
# </div>

# %% [markdown] slide={"en": "Standard attention behind a checkpoint forgets P as well.\n\n**Guess first.** Peak and FLOPs, beside flash?", "zh": "给标准注意力加检查点，也会忘掉 P。\n\n**先猜**：与 flash 相比，峰值和 FLOPs 如何？"}
# ## 6.6 The general tool beside the special one / 通用工具与专用工具
#
# <div lang="en">
#
# Lesson 02 has another way not to keep P: standard attention behind a checkpoint. 1024 tokens, 8 heads, three layers in a row. **Guess first:** which of the two peaks higher, and which does more FLOPs?
#
# </div>
# <div lang="zh">
#
# 第 02 课有另一种不保存 P 的办法：给标准注意力加检查点。1024 个 token，8 个头，三层相接。**先猜**：两者哪个峰值更高，哪个 FLOPs 更多？
#
# </div>

# %%
from course_lib.checkpoint import checkpoint


def checkpointed(q, k, v):
    return checkpoint(standard_attention, q, k, v, use_reentrant=False, preserve_rng_state=False)


def costs_of(layer, depth=3):
    with symbolic():
        o, k, v = inputs = [torch.empty(1, 8, 1024, 64, requires_grad=True) for _ in range(3)]
        for x in inputs:
            x.grad = torch.zeros_like(x)
        with flop_counter() as counter, MemoryMeter() as meter:
            for _ in range(depth):
                o = layer(o, k, v)
            o.sum().backward()
    return meter.peak_bytes / 1e6, counter.get_total_flops() / 1e9


# %% slide="result"
layers = {"standard": standard_attention, "checkpointed": checkpointed, "flash": flash_attention}
costs = {name: costs_of(layer) for name, layer in layers.items()}
lesson_06.draw_peaks(costs)

# %% [markdown]
# <div lang="en">
#
# Both forget P, and both compute one product again, $Q K^T$ (the checkpoint stops early): the same FLOPs. But when backward reaches a checkpointed layer, P is back whole, with its gradient and that of the scores beside it: three matrices of $N^2$ numbers a head, $3 \cdot 8 \cdot 1024^2 \cdot 4$ bytes, 101 of the 109 MB. Flash never has them. The general tool forgets between layers, the special one inside the operator.
#
# </div>
# <div lang="zh">
#
# 两者都忘掉 P，也都重做一次乘法 $Q K^T$（检查点提前停下了）：FLOPs 相同。但反向走到加了检查点的一层时，完整的 P 回来了，旁边还有它的梯度和分数的梯度：每个头三个 $N^2$ 个数的矩阵，$3 \cdot 8 \cdot 1024^2 \cdot 4$ 字节，占 109 MB 中的 101 MB。flash 从来没有这样的矩阵。通用工具在层与层之间忘，专用工具在算子里面忘。
#
# </div>

# %% [markdown] slide={"en": "The same walk as a kernel: an instance a block of queries.\n\n**Three lines are yours**: `new`, `shrink`, `o`.", "zh": "同样的走法，写成核函数：一个实例负责一块查询。\n\n**三行由你写**：`new`、`shrink`、`o`。"}
# ## 6.7 From torch to Triton / 从 torch 走到 Triton 核函数
#
# <div lang="en">
#
# On a GPU the walk is a **kernel**: a program that runs many times at once, each **instance** with its own block of queries; `tl.program_id(0)` says which. Pointers are added to numbers of rows and columns; `tl.load` takes a block of them. On a CPU Triton's interpreter runs the instances one after the other. This kernel has no masks, so 16, the block, must divide the number of tokens.
#
# Below is `tiled_forward` as a kernel, line by line; what it does with a panel stands in `fold`. **Exercise 4.** Three lines of `fold` are missing: `new`, `shrink` and `o`. (`tl.maximum`, `tl.max(x, 1)`, `tl.exp`, `tl.dot`; `x[:, None]` as in torch.)
#
# </div>
# <div lang="zh">
#
# 在 GPU 上，这样走一遍的程序是一个**核函数**（kernel）：它同时运行许多份，每个**实例**负责自己的那块查询，由 `tl.program_id(0)` 说明是哪一块。指针加上行号和列号，`tl.load` 就取来一块。在 CPU 上，由 Triton 的解释器一个接一个地运行这些实例。这个核函数没有掩码，所以 token 数必须能被块的大小 16 整除。
#
# 下面就是写成核函数的 `tiled_forward`，逐行对应；对一块做的事写在 `fold` 里。**练习 4。** `fold` 缺三行：`new`、`shrink` 和 `o`。（`tl.maximum`、`tl.max(x, 1)`、`tl.exp`、`tl.dot`；`x[:, None]` 与 torch 相同。）
#
# </div>

# %%
from types import SimpleNamespace

try:
    import triton
    import triton.language as tl

    jit = triton.jit
except ImportError:
    triton, tl, jit = None, SimpleNamespace(constexpr=int), lambda function: function
    missing = (
        "Triton is not installed here (it runs on Linux only), so you can read this section's"
        " kernels but not run them."
    )
    print(say(missing))


# %%
@jit
def tile(x, rows, D: tl.constexpr):  # where these rows of a matrix (n, D) stand
    return x + rows[:, None] * D + tl.arange(0, D)[None, :]


@jit
def fold(o, total, largest, scores, value):  # one panel, folded into what is carried along
    new = largest  # yours
    shrink = new  # yours
    weights = tl.exp(scores - new[:, None])
    o = value  # yours
    return o, total * shrink + tl.sum(weights, 1), new


# %% slide="code"
@jit
def kernel(q, k, v, out, lse, n, D: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # the queries of this instance
    query = tl.load(tile(q, rows, D))  # (BLOCK, D)
    o, total = tl.zeros((BLOCK, D), tl.float32), tl.zeros((BLOCK,), tl.float32)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, n, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        scores = tl.dot(query, tl.trans(tl.load(tile(k, keys, D)))) * D**-0.5  # (BLOCK, BLOCK)
        o, total, largest = fold(o, total, largest, scores, tl.load(tile(v, keys, D)))
    tl.store(tile(out, rows, D), o / total[:, None])
    tl.store(lse + rows, largest + tl.log(total))


# %% minutes=9
def run(q, k, v):
    if not triton:
        return None
    assert len(q) % 16 == 0, "every block must be whole"
    o, lse = torch.empty_like(q), q.new_empty(len(q))
    kernel[(len(q) // 16,)](q, k, v, o, lse, len(q), D=q.shape[1], BLOCK=16)
    return o, lse


lesson_06.check_kernel(run)

# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not lesson_06.check_kernel.accepted:

    @jit
    def fold(o, total, largest, scores, value):
        new = tl.maximum(largest, tl.max(scores, 1))
        shrink = tl.exp(largest - new)
        weights = tl.exp(scores - new[:, None])
        o = o * shrink[:, None] + tl.dot(weights, value)
        return o, total * shrink + tl.sum(weights, 1), new


lesson_06.check_kernel(run)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# The library's kernel is the same walk, with masks for edges, a causal diagonal, and `exp2` in place of `exp`. Its loop, as it stands in `course_lib.attention.kernels`:
#
# </div>
# <div lang="zh">
#
# 库里的核函数是同样的走法，只是多了边缘的掩码、因果对角线，并用 `exp2` 代替 `exp`。它的循环，照 `course_lib.attention.kernels` 中的原样：
#
# </div>

# %%
from course_lib.attention import kernels

lesson_06.loop_of(kernels.forward_kernel, "for first_k in", "largest = new_largest")

# %% [markdown]
# ## 6.8 In your own code / 实际怎么写
#
# <div lang="en">
#
# PyTorch has it all in one call. `sdpa_kernel` makes a choice loud: where that kernel cannot run, it raises.
#
# | line | here |
# |---|---|
# | `F.scaled_dot_product_attention(q, k, v, is_causal=True)` | run below |
# | `with sdpa_kernel(SDPBackend.FLASH_ATTENTION): ...` | run below |
# | `torch.nn.attention.WARN_FOR_UNFUSED_KERNELS = True` says why a kernel is not taken | not run |
# | Hugging Face: `from_pretrained(..., attn_implementation="sdpa")`, or `"flash_attention_2"` | not run |
# | `flash_attn_func(q, k, v, causal=True, deterministic=True)` | not run: needs a GPU |
#
# </div>
# <div lang="zh">
#
# 在 PyTorch 里，一次调用就全有了。`sdpa_kernel` 让选择变得明确：选中的核函数不能运行时，它会报错。
#
# | 写法 | 本课是否运行 |
# |---|---|
# | `F.scaled_dot_product_attention(q, k, v, is_causal=True)` | 下面运行 |
# | `with sdpa_kernel(SDPBackend.FLASH_ATTENTION): ...` | 下面运行 |
# | `torch.nn.attention.WARN_FOR_UNFUSED_KERNELS = True`，说出某个核函数为何没被选用 | 未运行 |
# | Hugging Face：`from_pretrained(..., attn_implementation="sdpa")`，或 `"flash_attention_2"` | 未运行 |
# | `flash_attn_func(q, k, v, causal=True, deterministic=True)` | 未运行：需要 GPU |
#
# </div>

# %%
from torch.nn.attention import SDPBackend, sdpa_kernel

with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True)
torch.allclose(flash_attention(q, k, v, causal=True), theirs, atol=1e-5)

# %% [markdown]
# ## 6.9 Claims and measurements / 说法与实测
#
# <div lang="en">
#
# Three sentences that people meet.
#
# </div>
# <div lang="zh">
#
# 三句常见的说法。
#
# </div>

# %% jupyter={"source_hidden": true} slide="result"
double = saved["flash"][1] / saved["flash"][0]
sizes = {"head_dim": 64, "kind": "flash"}
one, other = (attention_cost(sequence=n, **sizes).flops for n in (512, 1024))
backs = [attention_cost(sequence=512, **sizes, pass_="backward", walks=n).flops for n in (1, 2)]
what_you_may_have_read(
    "06",
    f"{double:.1f} × / {other / one:.1f} ×",
    "; ".join(f"{2 * back / one:.0f}" for back in backs),
    " / ".join(f"{back / one:.2f} ×" for back in backs),
)

# %% [markdown] slide={"en": "The course's step, flash alone. 128 tokens.\n\n**Guess first.** How much of 277.7 MB?", "zh": "这门课的那一步，只用 flash，128 个 token。\n\n**先猜**：277.7 MB 里能省多少？"}
# ## 6.10 The ledger / 账本
#
# <div lang="en">
#
# The course's step, with flash attention alone:
#
# </div>
# <div lang="zh">
#
# 这门课的那一步，只用 flash 注意力：
#
# </div>

# %% slide="result"
from course_lib.budget import Recipe, estimate
from course_lib.models import Decoder, random_tokens


def step(attention, sequence, batch):
    sizes = {"vocabulary": 2048, "hidden": 256, "heads": 8, "layers": 8, "sequence": sequence}
    make_batch = partial(random_tokens, batch, sequence, 2048)
    return estimate(partial(Decoder, **sizes), make_batch, Recipe(attention=attention))


ledger("06", "flash attention", step("flash", 128, 8))

# %% slide="result"
long = {kind: step(kind, 4096, 1).peak_bytes / 1e9 for kind in kinds}
[f"{name}: {peak:.2f} GB" for name, peak in long.items()]

# %% [markdown]
# <div lang="en">
#
# The honest row: at 128 tokens P is a small part of a layer, and flash saves 9% of the peak. One sequence of 4096 tokens, by estimate: 5.97 GB and 0.78. The length decides which technique is the main one.
#
# </div>
# <div lang="zh">
#
# 这一行我们照实记下：128 个 token 时，P 只占一层的一小部分，flash 只省下峰值的 9%。换成一条 4096 个 token 的序列，估计峰值从 5.97 GB 降到 0.78 GB。哪一样是主力，由长度决定。
#
# </div>

# %% [markdown] slide={"en": "One number a row gives every probability back.\n\nThe checkpoint forgets between layers, flash inside the operator.", "zh": "每行一个数，就能还原每一个概率。\n\n检查点在层与层之间忘，flash 在算子里面忘。"}
# ## 6.11 Summary / 小结
#
# <div lang="en">
#
# - Softmax can be had in one pass over blocks; one number a row, the log-sum-exp, gives every probability back.
# - dQ, dK, dV need Q, K, V, O and that number: bytes grow with $N$, FLOPs stay quadratic.
# - Backward is five products; in two walks seven, and then no two instances write to one place.
# - A checkpoint around attention forgets P as well, for the same FLOPs, but P is back whole at the peak.
# - Flash is about long sequences.
#
# **Next:** [lesson 07](07_fit_the_budget.ipynb) fits all of this into a budget.
#
# </div>
# <div lang="zh">
#
# - softmax 可以分块一遍算完；每行一个数，即 LSE，就能还原每一个概率。
# - dQ、dK、dV 只需要 Q、K、V、O 和这个数：字节与 $N$ 成正比，FLOPs 仍是平方级。
# - 反向是五次乘法；分两趟走是七次，那样没有两个实例会写同一个地方。
# - 给注意力加检查点，也忘掉 P，FLOPs 相同，但峰值时完整的 P 又回来了。
# - flash 的用处在长序列。
#
# **下一步**：[第 07 课](07_fit_the_budget.ipynb)把这一切装进一个预算。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **Sources.** Milakov and Gimelshein 2018, *Online normalizer calculation for softmax*, arXiv:1805.02867. Dao et al. 2022, *FlashAttention*, arXiv:2205.14135. Dao 2023, *FlashAttention-2*, arXiv:2307.08691. Williams et al. 2009, *Roofline*, CACM 52(4). NVIDIA's data sheets of A100 and H100, and its CUDA programming guide (163 KiB a block). FlashAttention's repository, issues 414 and 988, pull request 1893.
#
# </div>
# <div lang="zh">
#
# **出处。** Milakov 和 Gimelshein 2018，*Online normalizer calculation for softmax*，arXiv:1805.02867。Dao et al. 2022，*FlashAttention*，arXiv:2205.14135。Dao 2023，*FlashAttention-2*，arXiv:2307.08691。Williams et al. 2009，*Roofline*，CACM 52(4)。NVIDIA 的 A100 与 H100 数据手册，以及 CUDA 编程指南（每个线程块 163 KiB）。FlashAttention 代码仓库的 issue 414、988 与 pull request 1893。
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
# ## 6.12 Which tiles / 要算哪些分块
#
# <div lang="en">
#
# The library walks over blocks of queries too, and skips what nobody sees: with a causal mask, the tiles above the diagonal. Eight blocks of queries, eight of keys; the numbers are the order of the walk in forward:
#
# </div>
# <div lang="zh">
#
# 库里的版本对查询也分块，并跳过谁也看不见的部分：有因果掩码时，就是对角线以上的分块。查询分八块，键分八块，数字是前向时的计算顺序：
#
# </div>

# %% jupyter={"source_hidden": true}
lesson_06.draw_causal_tiles()

# %% [markdown]
# <div lang="en">
#
# **Exercise 5.** `tiles(queries, keys, block_q, block_k)`: how many tiles does a causal walk compute? The mask is aligned at the bottom right: the last query sees all keys. Blocks need not divide the lengths.
#
# </div>
# <div lang="zh">
#
# **练习 5。** `tiles(queries, keys, block_q, block_k)`：因果的走法要算多少个分块？掩码在右下角对齐：最后一个查询看见所有的键。块的大小不一定整除长度。
#
# </div>


# %% minutes=6
def tiles(queries, keys, block_q, block_k):
    return None


lesson_06.check_causal_tiles(tiles)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not lesson_06.check_causal_tiles.accepted:

    def tiles(queries, keys, block_q, block_k):
        count = 0
        for first in range(0, queries, block_q):
            seen = min(first + block_q, queries) + keys - queries  # by the block's last query
            count += -(-max(0, seen) // block_k)  # with fewer keys than queries it may see none
        return count


lesson_06.check_causal_tiles(tiles)
### END SOLUTION


# %%
def flops_of(function, n=512, **options):
    inputs = [torch.randn(1, 1, n, 64, requires_grad=True) for _ in range(3)]
    with flop_counter() as forward:
        o = function(*inputs, **options)
    with flop_counter() as back:
        o.sum().backward()
    return forward.get_total_flops(), back.get_total_flops()


blocks = {"block_q": 64, "block_k": 64}
whole, lower = (flops_of(flash_attention, causal=causal, **blocks) for causal in (False, True))
[part / total for part, total in zip(lower, whole, strict=True)], 36 / 64

# %% [markdown]
# ## 6.13 Saved bytes, part by part / 保存的字节，逐项
#
# <div lang="en">
#
# Saved bytes at N = 2048, part by part, of both kinds, and of the framework's own fused kernel:
#
# </div>
# <div lang="zh">
#
# N = 2048 时保存的字节，逐项列出：两种注意力，以及框架自带的融合算子：
#
# </div>

# %%
rows = []
for name in ("standard", "flash"):
    formula = attention_saved_bytes(sequence=2048, batch=1, heads=12, head_dim=64, kind=name)
    found = {}
    for row in kept(kinds[name], 2048):
        if row.shared_with is None:
            found.setdefault(row.bytes, []).append(row)
    for part, count in formula.items():
        label = text("{name}, {part}", name=name, part=part)
        rows.append((label, count, found[count].pop(0).bytes))
predictions(rows, unit="bytes")

# %%
fused = [kept(F.scaled_dot_product_attention, n).total_bytes for n in lengths]
fused == saved["flash"], [f"{count / 1e6:.1f} MB" for count in saved["flash"]]

# %% [markdown]
# <div lang="en">
#
# One number a row stands for all of P. **Exercise 6.** `probabilities(q, k, lse)`: the matrix P of one head, without softmax and without a sum over a row, from Q, K `(n, d)` and the log-sum-exp `(n)`.
#
# </div>
# <div lang="zh">
#
# 每行一个数，就能代替整个 P。**练习 6。** `probabilities(q, k, lse)`：不用 softmax，也不对行求和，由一个头的 Q、K `(n, d)` 和 LSE `(n)` 得到矩阵 P。
#
# </div>


# %% minutes=5
def probabilities(q, k, lse):
    return None


lesson_06.check_probabilities(probabilities)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not lesson_06.check_probabilities.accepted:

    def probabilities(q, k, lse):
        return (q @ k.T * q.shape[1] ** -0.5 - lse[:, None]).exp()


lesson_06.check_probabilities(probabilities)
### END SOLUTION

# %% [markdown]
# ## 6.14 The library's version / 库里的版本
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
# <div lang="en">
#
# **Exercise 7.** Grouped-query attention: 32 query heads, 8 key and value heads, $d = 128$, 4096 tokens, batch 1, bf16. How many bytes does FlashAttention keep?
#
# </div>
# <div lang="zh">
#
# **练习 7。** 分组查询注意力（GQA）：32 个查询头，8 个键值头，$d = 128$，4096 个 token，批次大小为 1，bf16。FlashAttention 留下多少字节？
#
# </div>

# %% minutes=5
answer = None  # bytes
lesson_06.check_grouped_bytes(answer)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
one_head = 4096 * 128 * 2
lesson_06.check_grouped_bytes((32 + 8 + 8 + 32) * one_head + 32 * 4096 * 4)
### END SOLUTION

# %% [markdown]
# ## 6.15 FLOPs, bytes, time / FLOPs、字节与时间
#
# <div lang="en">
#
# Counted as FlashAttention-2 walks, for one head and the 163 KiB that an A100 gives a block; "two walks" as this library's kernels do it. At 312 TFLOP/s and 2.0 TB/s, the time is at least the larger of the two:
#
# </div>
# <div lang="zh">
#
# 照 FlashAttention-2 的走法数出来，一个头，片上 163 KiB（A100 给一个线程块的上限）；“两趟”是本库核函数的走法。按 312 TFLOP/s 和 2.0 TB/s，时间至少是两者中较大的：
#
# </div>

# %%
sizes, rows = {"sequence": 4096, "head_dim": 64}, []
for name, options in {
    "standard, forward": {"kind": "standard"},
    "standard, backward": {"kind": "standard", "pass_": "backward"},
    "flash, forward": {"kind": "flash"},
    "flash, backward": {"kind": "flash", "pass_": "backward"},
    "flash, backward in two passes": {"kind": "flash", "pass_": "backward", "walks": 2},
}.items():
    cost = attention_cost(**sizes, **options)
    times = f"{1e6 * cost.flops / 312e12:.0f}; {1e6 * cost.moved_bytes / 2e12:.0f}"
    moved = round(cost.moved_bytes / 1e6, 1)
    rows.append((name, round(cost.flops / 1e9, 1), moved, round(cost.arithmetic_intensity), times))
headings = ["N = 4096, d = 64, bf16", "GFLOPs", "moved (MB)", "FLOPs per byte"]
table([*headings, "time (µs): compute; memory"], rows)

# %% [markdown]
# ## 6.16 Seconds on a CPU / CPU 上的秒数
#
# <div lang="en">
#
# Does it pay on a CPU, in seconds?
#
# </div>
# <div lang="zh">
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


layers["framework, fused"] = F.scaled_dot_product_attention
rows = [(name, *(seconds(layer, n) for n in (1024, 2048))) for name, layer in layers.items()]
table(["", "N = 1024", "N = 2048"], rows)

# %% [markdown]
# ## 6.17 Dropout by seed, other masks, an older idea / 用种子做 dropout、别的掩码、更早的思路
#
# <div lang="en">
#
# Dropout on P would need a mask of N × N. Kernels keep a **seed** instead: a counter-based generator gives each place of P its number from the seed and the place alone, in forward and again in backward. Autograd holds two numbers (the framework's CUDA kernels; on this CPU the fused one takes no dropout). In PyTorch, `dropout_p=0.1` in `F.scaled_dot_product_attention`.
#
# Other masks: `torch.nn.attention.flex_attention` takes a function of the score and its place, compiled into such a kernel; a block mask says which tiles are skipped. And the idea is older than the name: Rabe and Staats 2021 showed attention with $O(\log n)$ memory beside inputs and outputs, by the same running maximum and sum, with a checkpoint a block for its backward.
#
# </div>
# <div lang="zh">
#
# 对 P 做 dropout，本来要一个 N × N 的掩码。核函数改为保存一个**种子**：基于计数器的随机数发生器，只凭种子和位置就给出 P 上每一处的数，前向用一次，反向再用一次。autograd 手里只有两个数（框架的 CUDA 核函数如此；在这个 CPU 上，融合算子不支持 dropout）。在 PyTorch 里就是 `F.scaled_dot_product_attention` 的 `dropout_p=0.1`。
#
# 别的掩码：`torch.nn.attention.flex_attention` 接受一个关于分数及其位置的函数，编译成这样的核函数；块掩码说明哪些分块可以跳过。而这个思路比它的名字更早：Rabe 和 Staats 2021 用同样的当前最大值和总和，证明注意力除输入和输出之外只需 $O(\log n)$ 的内存，反向时每块一个检查点。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **Sources.** Rabe and Staats 2021, *Self-attention Does Not Need O(n²) Memory*, arXiv:2112.05682. Dong et al. 2024, *Flex Attention*, arXiv:2412.05496.
#
# </div>
# <div lang="zh">
#
# **出处。** Rabe 和 Staats 2021，*Self-attention Does Not Need O(n²) Memory*，arXiv:2112.05682。Dong et al. 2024，*Flex Attention*，arXiv:2412.05496。
#
# </div>

# %% [markdown]
# ## 6.18 The library's backward kernels / 库里的反向核函数
#
# <div lang="en">
#
# Backward as kernels has two walks: one keeps a block of keys and sums dK and dV over queries, the other keeps a block of queries and sums dQ over keys. The walk of the first; the products of each kernel; and all kernels, causal and not, beside the torch backend:
#
# </div>
# <div lang="zh">
#
# 反向写成核函数要走两趟：一个核函数负责一块键，对查询累加 dK 和 dV；另一个负责一块查询，对键累加 dQ。以下依次是：前者的那一趟；每个核函数的乘法次数；全部核函数运行一遍，因果与非因果，与 torch 后端相比：
#
# </div>

# %%
lesson_06.loop_of(kernels.keys_backward_kernel, "for first_q in", "key_grad = product")

# %%
import inspect

each = (kernels.forward_kernel, kernels.keys_backward_kernel, kernels.queries_backward_kernel)
products = [inspect.getsource(getattr(kernel, "fn", kernel)).count("= product(") for kernel in each]
by_kernels = sum(products[1:]) / products[0]
products, by_kernels  # backward does 3.5 times the FLOPs of forward: 14 against 4 N^2 d


# %%
device = "cuda" if torch.cuda.is_available() else "cpu"


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
# ## 6.19 Older claims / 更早的说法
#
# <div lang="en">
#
# Sentences of the teaching documents from which this course grew.
#
# </div>
# <div lang="zh">
#
# 这些说法出自本课程的前身：一份教学文档。
#
# </div>

# %%
in_bf16 = kept(flash_attention, 1024, torch.bfloat16)
vectors = [row for row in in_bf16 if len(row.shape) == 3]
ratio = sum(flops_of(flash_attention, 1024)) / sum(flops_of(flash_attention, 512))


def peak(layer, depth):
    with symbolic(), MemoryMeter() as meter:
        o, k, v = (torch.zeros(1, 8, 1024, 64, requires_grad=True) for _ in range(3))
        for _ in range(depth):
            o = layer(o, k, v)
        o.sum().backward()
    return meter.peak_bytes


savings = [1 - peak(checkpointed, depth) / peak(standard_attention, depth) for depth in (1, 3, 6)]

# %%
lesson_06.older_claims(
    f"{len(vectors)}",
    f"{vectors[0].dtype}".removeprefix("torch."),
    " / ".join(f"{100 * saving:.0f} %" for saving in savings),
    f"{saved['flash'][1] / saved['flash'][0]:.1f} × / {ratio:.1f} ×",
)

# %% [markdown]
# ## 6.20 On a GPU / 在 GPU 上
#
# <div lang="en">
#
# On a GPU `backend="auto"` selects the Triton kernels of this course. If you have a GPU, this cell measures them beside the kernels of PyTorch. Otherwise it shows what an H200 measured, forward and backward with a causal mask and 4096 tokens. The course's kernels take 1.56 ms, PyTorch's FlashAttention 2.22 ms, and cuDNN, which PyTorch chooses there, 1.29 ms. FlashAttention's allocator peak is twice its tensors' peak: its backward pass takes a workspace as large as all its tensors, partly to sum the gradient of the queries in fp32. The course's kernels need no such workspace. They add nothing up in memory, and compute 7 products in the backward pass instead of 5.
#
# </div>
# <div lang="zh">
#
# 在 GPU 上，`backend="auto"` 会选用本课程的 Triton 核函数。有 GPU 时，这个单元格会现场测量，并与 PyTorch 的几种核函数对照；没有 GPU，就显示在一块 H200 上记录的数据，前向加反向，带因果掩码，4096 个 token。本课程的核函数用 1.56 ms，PyTorch 的 FlashAttention 用 2.22 ms，而 PyTorch 在那里默认选用的 cuDNN 用 1.29 ms。FlashAttention 的分配器峰值是张量峰值的两倍：它的反向要占一块与全部张量一样大的工作区，其中一部分用来以 fp32 累加查询的梯度。本课程的核函数不需要这样的工作区：它不在显存里累加任何东西，代价是反向要算 7 次乘积，而不是 5 次。
#
# </div>

# %% tags=["nbval-ignore-output", "shows-device"]
from course_lib.lessons import on_gpu

on_gpu("06")
