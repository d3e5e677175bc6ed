# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] slide={"en": "8192 tokens, 12 heads: keep 3.2 GB of probabilities, or 25 MB of output and one number per row.\n\nHow can that be enough?", "zh": "8192 个 token，12 个头：要么保存 3.2 GB 的概率，要么保存 25 MB 的输出，外加每行一个数。\n\n这怎么够？"}
# # 6 What if the operator itself forgets? (FlashAttention) / 让算子自己忘掉呢？（FlashAttention）
#
# <div lang="en">
#
# An attention layer processes 8192 tokens with 12 heads of 64 features. For the backward pass, standard attention keeps its probabilities, which take 3.2 GB in fp32. Flash attention instead keeps its output (25 MB) and one number per row of probabilities (0.4 MB). Both kinds also keep Q, K and V (75 MB). In total, standard attention keeps 3297 MB and flash attention 101 MB.
#
# What is the number per row, and how can it be enough to compute the gradients dQ, dK and dV?
#
# </div>
# <div lang="zh">
#
# 设一个注意力层处理 8192 个 token，有 12 个头，每个头 64 维。标准注意力要为反向保存概率，用 fp32 时占 3.2 GB。flash 注意力（论文和实现里叫 FlashAttention）不保存概率，而是保存输出（25 MB），并为概率矩阵的每一行保存一个数（0.4 MB）。两种注意力都还要保存 Q、K、V（75 MB）。这样，标准注意力一共保存 3297 MB，flash 注意力一共保存 101 MB。
#
# 每行保存的这个数是什么？为什么有了这个数，就能算出梯度 dQ、dK 和 dV？
#
# </div>

# %%
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # for section 6.6; Triton reads it when it is imported
from course_lib.lessons.lesson_06 import exercises, figures
from course_lib.teaching import language

language()

# %% [markdown]
# <div lang="en">
#
# **Goals** (120 minutes, in two sittings):
#
# - Write the forward and backward pass of attention without any N × N matrix.
# - Predict the kept bytes and the FLOPs of attention, and write three lines of a GPU kernel.
# - Merge attention results for parts of the keys, and find out which calls of PyTorch's attention keep the scores.
#
# **What to know before**: lesson 01, and recomputation from lesson 02.
#
# </div>
# <div lang="zh">
#
# **目标**（共 120 分钟，分两次学）
#
# - 写出注意力的前向和反向，其中不出现任何 N × N 矩阵。
# - 预测注意力保存多少字节、需要多少 FLOPs，并写出一个 GPU 核函数里的三行代码。
# - 把各部分键的注意力结果合并起来，并找出 PyTorch 的哪些注意力调用会保存分数。
#
# **预备知识**：第 01 课，以及第 02 课中的重计算。
#
# </div>

# %% [markdown] slide={"en": "Softmax of a row that you see block by block.\n\n**Write it**: what do you carry from block to block?", "zh": "一行分数只能一块一块地读，怎样求 softmax？\n\n**自己写**：从一块到下一块，要记住什么？"}
# ## 6.1 Softmax in one pass / 只遍历一次的 softmax
#
# <div lang="en">
#
# The softmax of a row of scores needs two numbers: the largest score, so that `exp` does not overflow, and the sum of the exponentials. To compute them, you never need the whole row at once. Read one block of columns after the other. Remember the largest score so far, $m$, and the sum so far **relative to** $m$, $\ell = \sum e^{s - m}$. If a later block has a larger score, multiply the old sum by a factor smaller than 1. This method is **online softmax**. After the last block, keep only one number per row, the **log-sum-exp** $\text{lse} = m + \log \ell$.
#
# **Exercise 1.** Write `log_sum_exp_in_blocks(scores, block)`. It reads `scores`, of shape (rows, n), only once, in blocks of columns. It returns the log-sum-exps, of shape (rows,). The check uses scores whose `exp` overflows, and records which blocks you read.
#
# </div>
# <div lang="zh">
#
# 对一行分数做 softmax，要用到其中最大的分数（否则 `exp` 会溢出）和各指数项的总和，而求这两个数都不必同时拿到整行。每次读入几列，作为一块，并记住到目前为止最大的分数 $m$，以及到目前为止**相对于** $m$ 的总和 $\ell = \sum e^{s - m}$。如果后面的块里有更大的分数，就把原来的总和乘以一个小于 1 的因子。这种算法叫**在线 softmax**（online softmax）。读完最后一块，每行只需要留下一个数，即 **LSE**（log-sum-exp，指数和的对数）：$\text{lse} = m + \log \ell$。
#
# **练习 1。** 写出 `log_sum_exp_in_blocks(scores, block)`，把各列分成块，只遍历一次。`scores` 的形状是 (rows, n)，返回每行的 LSE，形状是 (rows,)。检查所用的分数很大，如果直接取 `exp`，就会溢出。检查还会记录你读了哪些块。
#
# </div>


# %% minutes=10
def log_sum_exp_in_blocks(scores, block):
    return None


exercises.check_log_sum_exp(log_sum_exp_in_blocks)

# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not exercises.check_log_sum_exp.accepted:

    def log_sum_exp_in_blocks(scores, block):
        largest = scores.new_full(scores.shape[:1], float("-inf"))
        total = scores.new_zeros(scores.shape[:1])
        for part in scores.split(block, dim=1):
            new = torch.maximum(largest, part.amax(1))
            total = total * (largest - new).exp() + (part - new[:, None]).exp().sum(1)
            largest = new
        return largest + total.log()


exercises.check_log_sum_exp(log_sum_exp_in_blocks)
### END SOLUTION

# %% jupyter={"source_hidden": true} slide="result"
from course_lib.attention import attention_cost
from course_lib.lessons.ledger import ledger
from course_lib.memory import attention_saved_bytes
from course_lib.teaching import predictions, table, text

torch.manual_seed(0)
scores = torch.randn(512) + torch.linspace(-2, 2, 512)
maxima = [scores[: 32 * n].max().item() for n in range(1, 17)]
sums = [(scores[: 32 * n] - m).exp().sum().item() for n, m in enumerate(maxima, 1)]
figures.draw_running(maxima, sums)

# %% [markdown]
# <div lang="en">
#
# With the log-sum-exp, any probability can be computed from its score: $p = e^{s - \text{lse}}$.
#
# </div>
# <div lang="zh">
#
# 有了 LSE，任何一个概率都可以由对应的分数算出来：$p = e^{s - \text{lse}}$。
#
# </div>

# %% [markdown] slide={"en": "The chip holds a block of queries, a block of keys, and their scores: a tile.\n\n**Write it**: two loops. Which one is outside?", "zh": "片上只放得下一个查询块、一个键块和它们之间的分数，也就是一个分块（tile）。\n\n**自己写**：两层循环，哪一层在外面？"}
# ## 6.2 Forward in tiles / 分块计算前向
#
# <div lang="en">
#
# The output for one query is a weighted sum of the rows of V. Update the output like the sum $\ell$: multiply the old output by the same factor, then add the new block's contribution. Then the block's scores can be released. After the last block, divide the output by $\ell$.
#
# A GPU computes on data in a small, fast memory on the chip. For a long sequence, the scores of all n queries for one block of keys do not fit there, so the queries are cut into blocks, too. A block of queries and a **key block** (keys with their values) give one **tile** of scores, whose size does not depend on the sequence length.
#
# **Exercise 2.** Write `forward(q, k, v, block_q, block_k)` for one head. `q` is $(n_q, d)$; `k` and `v` are $(n_k, d)$. There may be more keys than queries, and block sizes need not divide $n_q$ and $n_k$. Return the output, $(n_q, d)$, and the log-sum-exps, $(n_q,)$. Divide the scores by $\sqrt d$.
#
# </div>
# <div lang="zh">
#
# 每个查询的输出是 V 各行的加权和，所以更新输出的办法与更新 $\ell$ 相同，即先把旧的输出乘以同一个因子，再加上新读入的块的贡献。一块算完之后，这一块的分数就不必保留了。读完最后一块之后，把输出除以 $\ell$。
#
# GPU 计算时，要先把数据读进芯片上很小但很快的存储。如果序列很长，片上存储就放不下全部 n 个查询对一块键的分数，因此查询也要分成块。一个查询块和一个**键块**（键连同对应的值）之间的分数，构成一个**分块**（tile），分块的大小与序列长度无关。
#
# **练习 2。** 为一个头写出 `forward(q, k, v, block_q, block_k)`。`q` 的形状是 $(n_q, d)$，`k` 和 `v` 的形状是 $(n_k, d)$。键可能比查询多，块的大小也不一定整除 $n_q$ 和 $n_k$。返回输出 $(n_q, d)$ 和各行的 LSE $(n_q,)$。分数要除以 $\sqrt d$。
#
# </div>


# %% minutes=12
def forward(q, k, v, block_q, block_k):
    return None


exercises.check_forward(forward)

# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not exercises.check_forward.accepted:

    def forward(q, k, v, block_q, block_k):
        outputs, log_sums = [], []
        for query in q.split(block_q):
            o, total = torch.zeros_like(query), query.new_zeros(len(query), 1)
            largest = query.new_full((len(query), 1), float("-inf"))
            for key, value in zip(k.split(block_k), v.split(block_k), strict=True):
                scores = query @ key.T * q.shape[1] ** -0.5  # (block_q, block_k): a tile
                new = torch.maximum(largest, scores.amax(1, keepdim=True))
                weights, shrink = (scores - new).exp(), (largest - new).exp()
                total = total * shrink + weights.sum(1, keepdim=True)
                o = o * shrink + weights @ value
                largest = new
            outputs.append(o / total)
            log_sums.append((largest + total.log())[:, 0])
        return torch.cat(outputs), torch.cat(log_sums)


exercises.check_forward(forward)
### END SOLUTION

# %% jupyter={"source_hidden": true} slide="result"
figures.draw_passes()

# %% [markdown] slide={"en": "Backward needs P, which was not kept.\n\n**Write it**: dQ, dK, dV from Q, K, V, O and one number per row.", "zh": "反向要用 P，而 P 没有保存。\n\n**自己写**：由 Q、K、V、O 和每行一个数，求 dQ、dK、dV。"}
# ## 6.3 Backward: dQ, dK, dV / 反向：dQ、dK、dV
#
# <div lang="en">
#
# From Q, K and the log-sum-exp, the backward pass computes the probabilities P again, tile by tile. Four matrix products follow:
#
# $$dV = P^T dO, \quad dP = dO\,V^T, \quad dQ = dS\,K, \quad dK = dS^T Q$$
#
# To compute $dS$ from $dP$, use the Jacobian of softmax, $\partial p_j / \partial s_i = p_j (\delta_{ij} - p_i)$. Then $dS = P \circ (dP - D)$ with $D_i = \sum_j P_{ij}\,dP_{ij}$. $D_i$ is a sum over the **whole** row, but a tile has only part of this row. Since $dP_{ij} = dO_i \cdot V_j$ and $O_i = \sum_j P_{ij} V_j$, we have $D_i = dO_i \cdot O_i$, which can be computed before the loops. This is why O is kept.
#
# **Exercise 3.** Write `backward(q, k, v, o, lse, grad_o, block_q, block_k)` for one head. It returns dQ, dK and dV. Mind the factor $1/\sqrt d$. You can compute all three gradients in one pass over the tiles, or dQ in one pass and dK and dV in another. Two passes compute the scores S and dP twice. In exchange, each iteration of an outer loop computes one whole block of a gradient, so no two iterations add to the same place.
#
# </div>
# <div lang="zh">
#
# 反向要用概率 P。由 Q、K 和 LSE 可以逐个分块重新算出 P。接下来与标准注意力一样，要做四次矩阵乘法：
#
# $$dV = P^T dO, \quad dP = dO\,V^T, \quad dQ = dS\,K, \quad dK = dS^T Q$$
#
# 从 $dP$ 到 $dS$，要用 softmax 的雅可比矩阵 $\partial p_j / \partial s_i = p_j (\delta_{ij} - p_i)$，由此得到 $dS = P \circ (dP - D)$，其中 $D_i = \sum_j P_{ij}\,dP_{ij}$。$D_i$ 要对**整行**求和，而一个分块里只有这一行的一部分。不过 $dP_{ij} = dO_i \cdot V_j$，$O_i = \sum_j P_{ij} V_j$，因此 $D_i = dO_i \cdot O_i$，在循环之前就可以算出来。这就是要保存 O 的原因。
#
# **练习 3。** 为一个头写出 `backward(q, k, v, o, lse, grad_o, block_q, block_k)`，返回 dQ、dK、dV，形状与 q、k、v 相同。别忘了因子 $1/\sqrt d$。这三个梯度可以在一次遍历里算完，也可以遍历两次，一次算 dQ，一次算 dK 和 dV。遍历两次时，分数 S 和 dP 各要算两遍。好处是外层循环的每一步都能独立算完梯度的一块，任何两步都不会累加到同一个位置。
#
# </div>


# %% minutes=25
def backward(q, k, v, o, lse, grad_o, block_q, block_k):
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


exercises.check_backward(backward)

# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not exercises.check_backward.accepted:

    def backward(q, k, v, o, lse, grad_o, block_q, block_k):
        scale, dots = q.shape[1] ** -0.5, (grad_o * o).sum(1, keepdim=True)  # D
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for i in range(0, len(q), block_q):
            rows = slice(i, i + block_q)
            for j in range(0, len(k), block_k):
                keys = slice(j, j + block_k)
                p = (q[rows] @ k[keys].T * scale - lse[rows, None]).exp()  # P again
                dv[keys] += p.T @ grad_o[rows]
                ds = p * (grad_o[rows] @ v[keys].T - dots[rows]) * scale
                dq[rows] += ds @ k[keys]
                dk[keys] += ds.T @ q[rows]
        return dq, dk, dv


exercises.check_backward(backward)
### END SOLUTION

# %% jupyter={"source_hidden": true} slide="result" tags=["nbval-ignore-output", "shows-device"]
from course_lib.attention import flash_attention, standard_attention

q, k, v, grad_o = torch.randn(4, 1, 1, 300, 64)  # (batch, heads, n, d) each


def by_autograd(function, dtype):
    inputs = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
    o = function(*inputs)
    return [o.detach(), *torch.autograd.grad(o, inputs, grad_o.to(dtype))]


def yours():
    head = q[0, 0], k[0, 0], v[0, 0]
    o, lse = forward(*head, 64, 64)
    return [o, *backward(*head, o, lse, grad_o[0, 0], 64, 64)]


exact = by_autograd(standard_attention, torch.float64)
ways = {"standard": by_autograd(standard_attention, torch.float32)}
solved = exercises.check_forward.accepted and exercises.check_backward.accepted
if solved:
    ways["yours"] = yours()
ways["the library"] = by_autograd(flash_attention, torch.float32)
rows = []
for name, way in ways.items():
    errors = [(a - b).norm() / b.norm() for a, b in zip(way, exact, strict=True)]
    rows.append((name, *(f"{1e7 * error:.1f}" for error in errors)))
table(["relative error (1e-7)", "O", "dQ", "dK", "dV"], rows)

# %% [markdown]
# <div lang="en">
#
# The table lists the errors of fp32 results, relative to float64 results, all a few times 1e-7. Tiled attention computes the same formula as standard attention, but adds in another order, so the last digits differ.
#
# </div>
# <div lang="zh">
#
# 表中列出 fp32 的结果相对于 float64 结果的误差，都是 1e-7 的几倍。分块计算时，求和的顺序与标准注意力不同，因此结果的末几位数字也不同。说 flash 注意力“精确”，是指公式没有近似，并不是指结果逐比特相同。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **End of the first sitting** (60 minutes). You have written flash attention, forward and backward, with errors like those of standard attention. The second sitting asks how many bytes and FLOPs these passes need. It turns your forward pass into a GPU kernel, uses the log-sum-exp once more, and asks when PyTorch does not use flash attention.
#
# </div>
# <div lang="zh">
#
# **第一次学习到此结束**（60 分钟）。你已经写完 flash 注意力的前向和反向，它们的误差与标准注意力相当。第二次学习先看前向和反向保存多少字节、需要多少 FLOPs，再把前向改写成 GPU 核函数，然后介绍 LSE 的另一个用处，最后看 PyTorch 什么时候不用 flash 注意力。
#
# </div>

# %% [markdown] slide={"en": "**Guess first.** Twice the tokens: how much more does each kind keep?", "zh": "**先猜**：token 数加倍，两种注意力各要多保存多少？"}
# ## 6.4 What is saved / 保存了什么
#
# <div lang="en">
#
# The next cell lists the tensors that the library's flash attention keeps for backward. **Guess first:** if the number of tokens doubles, by what factors do the kept bytes of standard attention and of flash attention grow?
#
# </div>
# <div lang="zh">
#
# 下面列出库里的 flash 注意力为反向保存的张量。**先猜**：如果 token 数加倍，标准注意力和 flash 注意力保存的字节数各变成原来的几倍？
#
# </div>

# %%
from course_lib.attention import flash_attention, standard_attention
from course_lib.memory import saved_tensors, symbolic


def kept(function, n, dtype=torch.float32):
    with symbolic():
        qkv = [torch.empty(1, 12, n, 64, dtype=dtype, requires_grad=True) for _ in range(3)]
        return saved_tensors(function, *qkv)


kept(flash_attention, 512)

# %% jupyter={"source_hidden": true} slide="result"
kinds = {"standard": standard_attention, "flash": flash_attention}
lengths = (512, 1024, 2048, 4096, 8192)
saved = {name: [kept(way, n).total_bytes for n in lengths] for name, way in kinds.items()}
figures.draw_saved(lengths, saved)

# %% jupyter={"source_hidden": true}
rows = []
for name in kinds:
    for n, found in zip(lengths, saved[name], strict=True):
        size = {"sequence": n, "batch": 1, "heads": 12, "head_dim": 64}
        formula = attention_saved_bytes(**size, kind=name)
        label = text("{name}, N = {n}", name=name, n=n)
        rows.append((label, sum(formula.values()), found))
predictions([rows[i] for i in (0, 4, 5, 9)], unit="bytes")

# %% [markdown] slide={"en": "FLOPs in $N^2 d$: forward, your backward, and a backward in two passes.\n\nWhy would anyone pass over the tiles twice?", "zh": "以 $N^2 d$ 计的 FLOPs：前向、你的反向、遍历两次的反向。\n\n为什么会有人愿意把分块遍历两次？"}
# ## 6.5 What is computed and moved / 计算了什么，搬运了什么
#
# <div lang="en">
#
# **Exercise 4.** Computing P again costs FLOPs. One head needs a multiple of $N^2 d$ FLOPs ($N$ tokens, head size $d$). Which multiple is it for forward, for backward in one pass over the tiles, and for backward in **two passes**? Each of the two passes computes S and dP.
#
# </div>
# <div lang="zh">
#
# **练习 4。** 重新计算 P 会增加 FLOPs。设有 $N$ 个 token，头维度为 $d$。以 $N^2 d$ 为单位，写出一个头在三种情形下的 FLOPs：前向，把分块遍历一次的反向，以及把分块**遍历两次**的反向。遍历两次时，每次遍历都要重新算一遍 S 和 dP。
#
# </div>

# %% minutes=5
flops = {"forward": None, "backward": None, "two passes": None}  # in N² d
exercises.check_flops(flops)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not exercises.check_flops.accepted:
    flops = {"forward": 4, "backward": 10, "two passes": 14}
exercises.check_flops(flops)
### END SOLUTION

# %% jupyter={"source_hidden": true} slide="result"
from course_lib.memory.measurement import flop_counter

one, n, d = [x[0, 0] for x in (q, k, v)], 300, 64
with flop_counter() as first:
    o, lse = forward(*one, 60, 60) if solved else (None, None)
with flop_counter() as second:
    if solved:
        backward(*one, o, lse, grad_o[0, 0], 60, 60)
two = attention_cost(sequence=n, head_dim=d, kind="flash", pass_="backward", tile_passes=2)
counts = [first.get_total_flops(), second.get_total_flops(), two.flops]
passes = ("forward", "backward", "backward in two passes")
rows = [(name, count / (n * n * d)) for name, count in zip(passes, counts, strict=True)]
table(["", "FLOPs (units of n²d)"], rows)

# %% [markdown]
# <div lang="en">
#
# In backward, two passes cost 40% more FLOPs than one pass, but their result is **deterministic** (equal in every run). With one pass, parallel programs add to the same dQ atomically, in an order that can change between runs (FlashAttention's issue 414). FlashAttention's option `deterministic=True` fixes the order, but makes backward slower. On an H100 with head size 128, 8192 tokens and a causal mask, backward takes 21% longer (pull request 1893).
#
# Flash attention needs more FLOPs than standard attention, but can be faster because it moves fewer bytes. If $M$ numbers fit on the chip, a block has about $M/(4d)$ queries. K and V are read once for each block of queries, so flash attention moves $\Theta(N^2 d^2 / M)$ numbers. Standard attention moves $\Theta(N d + N^2)$ numbers. The roofline plot in section 6.17 shows when moving bytes limits the speed.
#
# </div>
# <div lang="zh">
#
# 把分块遍历两次，反向的 FLOPs 比遍历一次多 40%，但结果是**确定的**（deterministic），也就是每次运行都完全相同。如果只遍历一次，并行的各部分就要用原子加法累加到同一个 dQ 上，每次运行的累加顺序可能不同（FlashAttention 的 issue 414）。FlashAttention 的选项 `deterministic=True` 把这个顺序固定下来，但反向会变慢。以 H100 为例，头维度是 128、序列有 8192 个 token、带因果掩码时，反向的用时增加 21%（合并请求 1893）。
#
# flash 注意力的 FLOPs 比标准注意力多，却可能更快，因为它搬运的字节更少。假设芯片上的存储放得下 $M$ 个数，那么一个查询块大约有 $M/(4d)$ 个查询。每个查询块都要把 K 和 V 读一遍，所以 flash 注意力一共搬运 $\Theta(N^2 d^2 / M)$ 个数，标准注意力则搬运 $\Theta(N d + N^2)$ 个数。6.17 节的屋顶线（roofline）图说明，搬运数据在什么情况下限制速度。
#
# </div>

# %% [markdown] slide={"en": "Your forward as a kernel: one instance per block of queries.\n\n**Three lines are yours**: `new`, `shrink`, `o`.", "zh": "把你的前向写成核函数：每个查询块一个实例。\n\n**三行由你写**：`new`、`shrink`、`o`。"}
# ## 6.6 From torch to Triton / 从 torch 到 Triton 核函数
#
# <div lang="en">
#
# On a GPU, your outer loop becomes a **kernel**, a program that runs in many parallel instances. Each **instance** computes the outputs for one block of queries, and `tl.program_id(0)` is the number of this block. `tl.load` reads rows at given addresses. On a CPU, Triton's interpreter runs one instance after the other.
#
# The block size need not divide the number of tokens. Rows past the last token are **masked**: `tl.load` returns 0 for these rows, and `tl.store` skips them. Keys past the end get the score −∞, so their weight is 0. `tl.constexpr` marks numbers that are fixed when the kernel is compiled.
#
# **Exercise 5.** The function `fold` processes one tile. Correct its lines for `new`, `shrink` and `o`, so that they compute the same values as your `forward`. Use `tl.maximum`, `tl.max(x, 1)`, `tl.exp`, `tl.dot` and `x[:, None]`.
#
# </div>
# <div lang="zh">
#
# 在 GPU 上，你的外层循环变成一个**核函数**（kernel），也就是有许多实例并行运行的程序。每个**实例**计算一个查询块的输出，块的编号是 `tl.program_id(0)`。`tl.load` 从算好的地址读入若干行。在 CPU 上，Triton 的解释器逐个运行这些实例。
#
# 块的大小不一定能整除 token 数。超出最后一个 token 的行用**掩码**处理，`tl.load` 对这些行返回 0，`tl.store` 则不写这些行。超出末尾的键，分数设为 −∞，因此权重是 0。用 `tl.constexpr` 标出的数，在编译核函数时就已经固定。
#
# **练习 5。** 函数 `fold` 处理一个分块，请改写其中计算 `new`、`shrink` 和 `o` 的三行，使这三行与你写的 `forward` 里的计算相同。要用 `tl.maximum`、`tl.max(x, 1)`、`tl.exp`、`tl.dot` 和 `x[:, None]` 来写。
#
# </div>

# %%
triton, tl, jit = exercises.triton_here()


@jit
def fold(o, total, largest, scores, value):  # one tile, added to the output and the sum
    new = largest  # yours
    shrink = new  # yours
    weights = tl.exp(scores - new[:, None])
    o = value  # yours
    return o, total * shrink + tl.sum(weights, 1), new


# %% slide="code"
@jit
def kernel(q, k, v, out, lse, n, D: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]  # the queries of this instance
    d = tl.arange(0, D)[None, :]
    query = tl.load(q + rows * D + d, mask=rows < n, other=0.0)  # (BLOCK, D)
    o, total = tl.zeros((BLOCK, D), tl.float32), tl.zeros((BLOCK,), tl.float32)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, n, BLOCK):
        keys = start + tl.arange(0, BLOCK)[:, None]
        key = tl.load(k + keys * D + d, mask=keys < n, other=0.0)
        value = tl.load(v + keys * D + d, mask=keys < n, other=0.0)
        scores = tl.where(tl.trans(keys) < n, tl.dot(query, tl.trans(key)) * D**-0.5, float("-inf"))
        o, total, largest = fold(o, total, largest, scores, value)
    tl.store(out + rows * D + d, o / total[:, None], mask=rows < n)
    tl.store(lse + rows, (largest + tl.log(total))[:, None], mask=rows < n)


# %% minutes=7
def run(q, k, v):
    o, lse = torch.empty_like(q), q.new_empty(len(q))
    if triton:
        kernel[(-(-len(q) // 16),)](q, k, v, o, lse, len(q), D=q.shape[1], BLOCK=16)
    return o, lse


exercises.check_kernel(run)

# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not exercises.check_kernel.accepted:

    @jit
    def fold(o, total, largest, scores, value):
        new = tl.maximum(largest, tl.max(scores, 1))
        shrink = tl.exp(largest - new)
        weights = tl.exp(scores - new[:, None])
        o = o * shrink[:, None] + tl.dot(weights, value)
        return o, total * shrink + tl.sum(weights, 1), new


exercises.check_kernel(run)
### END SOLUTION

# %% [markdown] slide={"en": "Attention over half of the keys gave $(o_1, \\text{lse}_1)$, over the other half $(o_2, \\text{lse}_2)$.\n\n**Write it**: attention over all keys, without Q, K or V.", "zh": "一半的键给出 $(o_1, \\text{lse}_1)$，另一半给出 $(o_2, \\text{lse}_2)$。\n\n**自己写**：不用 Q、K、V，求对全部键的注意力。"}
# ## 6.7 Two parts of the keys / 把键分成两部分
#
# <div lang="en">
#
# The log-sum-exp has a second use. Suppose attention over one part of the keys gave the output $o_1$ and $\text{lse}_1$, and attention over the other part gave $o_2$ and $\text{lse}_2$. From these four tensors you can compute attention over all keys.
#
# **Exercise 6.** Write `merge(o1, lse1, o2, lse2)`, which returns the output, of shape (n, d), and the log-sum-exps, of shape (n,), for all keys. The two parts may have different sizes, and scores may be as large as 1000. With a causal mask, some queries may see no key of one part. For this part, such a query's output is 0 and its log-sum-exp is −∞. But every query sees at least one key in total.
#
# </div>
# <div lang="zh">
#
# LSE 还有第二个用处。假设对一部分键做注意力，得到输出 $o_1$ 和 $\text{lse}_1$，再对其余的键做注意力，得到输出 $o_2$ 和 $\text{lse}_2$。有了这四个张量，就能算出对全部键做注意力的结果。
#
# **练习 6。** 写出 `merge(o1, lse1, o2, lse2)`，返回对全部键做注意力的输出 (n, d) 和各行的 LSE (n,)。两部分的大小可能不同，分数可能达到 1000。有因果掩码时，一个查询可能看不见某一部分里的任何键，这个查询在这一部分上的输出就是 0，LSE 是 −∞。不过每个查询总看得见至少一个键。
#
# </div>


# %% minutes=5
def merge(o1, lse1, o2, lse2):
    return None


exercises.check_merge(merge)

# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not exercises.check_merge.accepted:

    def merge(o1, lse1, o2, lse2):
        lse = torch.logaddexp(lse1, lse2)
        o = o1 * (lse1 - lse).exp()[:, None] + o2 * (lse2 - lse).exp()[:, None]
        return o, lse


exercises.check_merge(merge)
### END SOLUTION

# %%
from functools import reduce


def in_parts(q, k, v, count):
    parts = zip(k.chunk(count), v.chunk(count), strict=True)
    return reduce(lambda a, b: merge(*a, *b), [forward(q, *part, 64, 64) for part in parts])[0]


q1, k1, v1 = torch.randn(3, 300, 64)
if ready := exercises.check_forward.accepted and exercises.check_merge.accepted:
    o1, lse1 = forward(q1, k1, v1, 64, 64)
    decoding = in_parts(q1[-1:], k1, v1, 8)
    ring = torch.cat([in_parts(rows, k1, v1, 4) for rows in q1.chunk(4)])

# %% jupyter={"source_hidden": true} slide="result"
pairs = {}
if ready:
    pairs["one query, 8 parts of the keys"] = decoding, o1[-1:]
    pairs["4 parts of the queries and of the keys"] = ring, o1
rows = [(name, torch.allclose(*pair, atol=1e-5)) for name, pair in pairs.items()]
table(["merged results", "close to `forward`"], rows)

# %% [markdown]
# <div lang="en">
#
# The table's first row simulates **flash-decoding**. A model that generates text has one new query and many keys, so several instances each process a part of the keys. The second row simulates **ring attention** in one process. In ring attention, each device has a part of the queries, keys and values, and passes its keys and values to the next device. In lesson 08 the parts are in different processes.
#
# </div>
# <div lang="zh">
#
# 表的第一行模拟 **flash-decoding**。模型生成文字时，每次只有一个新的查询，键却很多，所以让几个实例各处理一部分键。第二行用一个进程模拟**环形注意力**（ring attention）。在环形注意力里，每台设备负责一部分查询、键和值，并把手里的键和值依次传给下一台设备。在第 08 课，各部分分别放在不同的进程里。
#
# </div>

# %% [markdown] slide={"en": "Six calls of PyTorch's attention.\n\n**Guess first.** Which one keeps the scores on this CPU? Which ones on an H200?", "zh": "六种调用 PyTorch 注意力的写法。\n\n**先猜**：哪一种在这个 CPU 上会保存分数？哪几种在 H200 上会？"}
# ## 6.8 Why is my attention not flash? / 我的注意力为什么不是 flash？
#
# <div lang="en">
#
# `F.scaled_dot_product_attention` runs one of several implementations, called **backends**. Most backends are fused kernels, but `MATH` runs separate operators and keeps the scores. If no fused kernel accepts the inputs, PyTorch falls back to `MATH` without a warning.
#
# Only one fused kernel on CUDA accepts fp32. In this kernel, a token's vector in one head must take a multiple of 16 bytes, so in fp32 the head size must be a multiple of 4.
#
# The six calls below have 8 query heads and 1024 tokens. **Guess first:** which call keeps the scores on this CPU? Which calls keep the scores on an H200 in fp32, and which in bf16?
#
# </div>
# <div lang="zh">
#
# `F.scaled_dot_product_attention` 有几种实现，称为**后端**（backend），每次调用运行其中一种。多数后端是融合算子，而 `MATH` 后端依次运行一连串单独的算子，并保存分数。如果没有一种融合算子接受输入，PyTorch 会退回到 `MATH`，但不发出警告。
#
# 在 CUDA 上，只有一种融合算子接受 fp32。这种算子要求一个 token 在一个头里的向量所占的字节数是 16 的倍数，因此用 fp32 时，头维度必须是 4 的倍数。
#
# 下面六种调用都有 8 个查询头和 1024 个 token。**先猜**：在这个 CPU 上，哪一种调用会保存分数？在 H200 上，用 fp32 时和用 bf16 时，各有哪几种调用会保存分数？
#
# </div>


# %%
from functools import partial

from torch.nn import functional as F


def call(d=64, d_v=None, kv_heads=8, dtype=torch.float32, mask=None, **options):
    shapes = (8, d), (kv_heads, d), (kv_heads, d_v or d)
    inputs = [torch.rand(1, n, 1024, size, dtype=dtype, requires_grad=True) for n, size in shapes]
    return inputs, options | ({"attn_mask": mask(dtype)} if mask else {})


calls = {
    "causal flag": partial(call, is_causal=True),
    "mask": partial(call, mask=lambda dtype: torch.zeros(1024, 1024, dtype=dtype)),
    "mask, transposed": partial(call, mask=lambda dtype: torch.zeros(1024, 1024, dtype=dtype).T),
    "dropout 0.1": partial(call, is_causal=True, dropout_p=0.1),
    "head size 63": partial(call, is_causal=True, d=63),
    "grouped queries": partial(call, is_causal=True, kv_heads=2, enable_gqa=True),
}


# %%
from course_lib.symbolic import Symbolic


def kept_by(call, **dtype):
    inputs, options = call(**dtype)
    attend = partial(F.scaled_dot_product_attention, **options)
    return round(saved_tensors(attend, *inputs).total_bytes / 1e6, 1)


with symbolic(Symbolic(kind="cuda")):  # operators and bytes as on an H200, without a GPU
    in_fp32 = {name: kept_by(call) for name, call in calls.items()}
    in_bf16 = {name: kept_by(call, dtype=torch.bfloat16) for name, call in calls.items()}


# %% jupyter={"source_hidden": true} slide="result"
def on_cpu(call):
    inputs, options = call()
    choice = torch._fused_sdp_choice(*inputs, **options)  # PyTorch's own choice
    return torch.nn.attention.SDPBackend(choice).name


rows = []
for name, each in calls.items():
    cells = []
    # the calls that no GPU has run: head size 63, and a transposed mask in bf16
    sources = (name == "head size 63", name in ("head size 63", "mask, transposed"))
    for count, source in zip((in_fp32[name], in_bf16[name]), sources, strict=True):
        cells.append(text("{count}, from source" if source else "{count}, run", count=count))
    rows.append((name, f"`{on_cpu(each)}`", kept_by(each), *cells))
headings = ["CPU: backend", "CPU: kept (MB)", "H200, fp32 (MB)", "H200, bf16 (MB)"]
table(["call", *headings], rows)

# %% [markdown]
# <div lang="en">
#
# - PyTorch also keeps an $N \times N$ **mask**, which takes $4N^2$ bytes in fp32. On CUDA, no fused kernel accepts a mask whose last dimension has a stride other than 1, such as T5's mask.
# - On CUDA, fused kernels support **dropout**. On this CPU, dropout makes PyTorch use `MATH` and keep 107 MB instead of 8.4 MB.
# - In bf16 on CUDA without a mask, PyTorch pads **head sizes** of at most 256 to a multiple of 8 (here from 63 to 64) and keeps the padded tensors. With a mask, fused kernels need head sizes divisible by 8.
# - On CUDA, **grouped-query attention** gets no fused kernel in fp32. In bf16 it gets a fused kernel, but on an A100 or RTX 4090 only without a mask.
#
# In the table, *run* means that training steps with such calls have run on an H200 with PyTorch 2.11. Their peaks agreed with the estimates. *From source* means that the number follows from the checks in the source of PyTorch 2.11 and 2.13. No GPU has confirmed this number.
#
# </div>
# <div lang="zh">
#
# - PyTorch 还会为反向保存 $N \times N$ 的**掩码**，用 fp32 时占 $4N^2$ 字节。在 CUDA 上，如果掩码最后一维的步长不是 1（例如 T5 的掩码），PyTorch 就用不上融合算子。
# - 在 CUDA 上，**dropout** 由融合算子内部完成。在这个 CPU 上，带 dropout 时 PyTorch 会退回到 `MATH`，保存 107 MB，不带 dropout 时只保存 8.4 MB。
# - 在 CUDA 上用 bf16 时，只要没有掩码，PyTorch 就把 256 以内的**头维度**填充到 8 的倍数（这里是从 63 填充到 64），再保存填充后的张量。有掩码时，头维度必须是 8 的倍数，才用得上融合算子。
# - 在 CUDA 上用 fp32 时，**分组查询注意力**用不上融合算子。用 bf16 时用得上，但在 A100 或 RTX 4090 上，只有不带掩码时才用得上。
#
# 表中“运行过”是指，含有这种调用的训练步在 H200 上用 PyTorch 2.11 运行过，测得的峰值与估计相符。“依据源码”是指，这个数由 PyTorch 2.11 和 2.13 源码里的检查函数得出，还没有在 GPU 上核对过。
#
# </div>

# %% [markdown] slide={"en": "FlashAttention-3 and 4, sliding windows, soft caps, sinks, keys of 192 and values of 128.\n\nWhich of them is still one call?", "zh": "FlashAttention-3 和 4，滑动窗口、soft cap、sink，键 192 维而值 128 维。\n\n哪些仍然只要一次调用？"}
# ## 6.9 What came after / 后来的发展
#
# <div lang="en">
#
# You have written the algorithm of FlashAttention-2. FlashAttention-3 and 4 change how a GPU computes it. In PyTorch, all three implement the same operators, so autograd keeps the same tensors.
#
# | implementation, from source | compute capability | dtypes |
# |---|---|---|
# | FlashAttention-2 | 8.0 to 12.1: A100, RTX 4090, H200, B200 | fp16, bf16 |
# | FlashAttention-3 | 9.0: H100, H200 | fp16, bf16; fp8 without a backward pass |
# | FlashAttention-4 | 9.0 and 10.0: H200, B200 | fp16, bf16 |
#
# If the package of FlashAttention-4 is installed, `torch.nn.attention.activate_flash_attention_impl("FA4")` selects it. Neither FlashAttention-3 nor 4 supports dropout. According to its paper, FlashAttention-3 is 1.5 to 2.0 times as fast as FlashAttention-2 on an H100 in fp16. From H100 to B200, the speed of matrix units grew more than the speed of units for `exp`. Therefore FlashAttention-4 computes some exponentials in software, and rescales by your `shrink` only if the maximum has grown enough.
#
# Newer models change attention itself. Which of the calls below still get a fused kernel?
#
# </div>
# <div lang="zh">
#
# 你写的是 FlashAttention-2 的算法。FlashAttention-3 和 4 沿用这个算法，改变的是它在 GPU 上的实现方式。在 PyTorch 里，这两个版本替换的是同一批算子的实现，所以 autograd 保存的张量不变。
#
# | 实现（依据源码） | 计算能力 | dtype |
# |---|---|---|
# | FlashAttention-2 | 8.0 到 12.1，如 A100、RTX 4090、H200、B200 | fp16、bf16 |
# | FlashAttention-3 | 9.0，即 H100、H200 | fp16、bf16；fp8 没有反向 |
# | FlashAttention-4 | 9.0 和 10.0，如 H200、B200 | fp16、bf16 |
#
# 装好 FlashAttention-4 的包以后，调用 `torch.nn.attention.activate_flash_attention_impl("FA4")` 就会选用 FlashAttention-4。FlashAttention-3 和 4 都不支持 dropout。据论文，在 H100 上用 fp16 计算时，FlashAttention-3 的速度是 FlashAttention-2 的 1.5 到 2.0 倍。B200 的矩阵单元比 H100 快很多，计算 `exp` 的单元却没有快这么多，因此 FlashAttention-4 改用软件计算一部分指数，并且只在最大值增大得足够多时，才乘以你写的 `shrink`。
#
# 新的模型还改动了注意力本身。下面的调用里，哪些仍然用得上融合算子？
#
# </div>


# %%
ones = torch.ones(1024, 1024)
variants = {
    "sliding window, bool mask": partial(call, mask=lambda dtype: ones.tril().triu(-127).bool()),
    "learned bias": partial(call, mask=lambda dtype: (0 * ones).to(dtype).requires_grad_()),
    "keys of 192, values of 128": partial(call, is_causal=True, d=192, d_v=128),
    "the same, values padded to 192": partial(call, is_causal=True, d=192),
}

# %% jupyter={"source_hidden": true} slide="result"
from course_lib.symbolic import Gpu
from course_lib.symbolic.cuda_kernels import Call, attention_kernel


def kernel_on_h200(call):
    inputs, options = call(dtype=torch.bfloat16)
    mask, causal = options.get("attn_mask"), "is_causal" in options
    return attention_kernel(Call(*inputs, mask, 0.0, causal, False, Gpu()))


rows = [
    (name, f"`{on_cpu(each)}`", kept_by(each), f"`{kernel_on_h200(each).upper()}_ATTENTION`")
    for name, each in variants.items()
]
headings = ["CPU: backend", "CPU: kept (MB)", "H200, bf16, from source"]
table(["call", *headings], rows)

# %% [markdown]
# <div lang="en">
#
# PyTorch converts a **bool mask** to the dtype of Q and keeps the converted mask. In fp32, the converted mask takes four times the bytes of the bool mask. On this CPU, PyTorch falls back to `MATH` for a **learned bias**. It also falls back if the values have **another head size** than the keys, as in multi-head latent attention (MLA). Padding these values with zeros halves the kept bytes. According to PyTorch's checks, the table's four calls get a fused kernel on an H200 in bf16.
#
# `F.scaled_dot_product_attention` has no argument for a **soft cap**, which limits the scores by a tanh. Section 6.10 adds one with `flex_attention`. There is also no argument for an **attention sink**. A sink adds the exponential of one more score to each softmax's denominator, but V gets no additional row. So your `merge` can add a sink as one more part of the keys. This part's output is 0, and its log-sum-exp is the sink's score.
#
# </div>
# <div lang="zh">
#
# PyTorch 把 **bool 掩码**转成 Q 的 dtype 再保存，用 fp32 时，占用的字节数是 bool 掩码本身的四倍。在这个 CPU 上，如果使用**可学习的偏置**，或者值与键的**头维度不同**（如多头潜在注意力，MLA），PyTorch 都会退回到 `MATH`。在后一种情形下，如果用零把 V 填充到键的维度，保存的字节就减少一半。按照 PyTorch 的检查函数，在 H200 上用 bf16 时，表中四种调用都用得上融合算子。
#
# `F.scaled_dot_product_attention` 没有 **soft cap**（用 tanh 限制分数的大小）的参数，6.10 节用 `flex_attention` 来实现。`F.scaled_dot_product_attention` 也没有 **attention sink** 的参数。sink 是每个 softmax 里多出的一个分数，分母要加上这个分数的指数项，但 V 并不增加一行。因此可以把 sink 看作另外一部分键，这部分的输出是 0，LSE 等于 sink 的分数，用你写的 `merge` 就能合并进去。
#
# </div>

# %%
sink = torch.ones(300)  # a learned number
if ready:
    with_sink, _ = merge(o1, lse1, torch.zeros_like(o1), sink)
inputs = torch.randn(3, 1, 8, 300, 64, requires_grad=True).unbind()


def gradients_of_attention():
    o = F.scaled_dot_product_attention(*inputs, is_causal=True)
    return torch.autograd.grad(o.square().sum(), inputs)


default = gradients_of_attention()
torch.use_deterministic_algorithms(True)
deterministic = gradients_of_attention()
torch.use_deterministic_algorithms(False)

# %% jupyter={"source_hidden": true}
pairs = zip(default, deterministic, strict=True)
rows = [("deterministic gradients, equal bit by bit", all(torch.equal(*pair) for pair in pairs))]
if ready:
    scores = torch.cat([q1 @ k1.T / 8, sink[:, None]], 1)  # the sink is one more column
    expected = scores.softmax(1)[:, :-1] @ v1
    rows.append(("sink by `merge`, close", torch.allclose(with_sink, expected, atol=1e-5)))
table(["compared", "result"], rows)

# %% [markdown]
# <div lang="en">
#
# For the attention call above, `torch.use_deterministic_algorithms(True)` changes no gradient on a CPU and raises no error. According to PyTorch's source, this setting has three effects on CUDA. FlashAttention's backward adds in a fixed order, the memory-efficient kernel does not split the keys, and cuDNN is not chosen. With `warn_only=True`, FlashAttention and the memory-efficient kernel only warn, and stay nondeterministic.
#
# </div>
# <div lang="zh">
#
# 在 CPU 上运行上面这次调用时，`torch.use_deterministic_algorithms(True)` 既不改变梯度，也不报错。在 CUDA 上，依据 PyTorch 的源码，打开这个设置以后，FlashAttention 的反向会按固定的顺序累加，memory-efficient 核函数不再把键拆开，cuDNN 则不会被选中。如果加上 `warn_only=True`，FlashAttention 和 memory-efficient 核函数只发出警告，结果仍然不确定。
#
# </div>

# %% [markdown]
# ## 6.10 In your own code / 实际怎么写
#
# <div lang="en">
#
# With `torch.compile`, `flex_attention` turns your functions for the mask and for the scores into one kernel. To avoid padding, concatenate the sequences, and pass the start of each sequence (`cu_seqlens`) to `flash_attn_varlen_func`.
#
# | line | here |
# |---|---|
# | `F.scaled_dot_product_attention(q, k, v, is_causal=True)` | run below |
# | `with sdpa_kernel(SDPBackend.FLASH_ATTENTION): ...` raises an error instead of falling back | run below |
# | `flex_attention(q, k, v, score_mod=soft_cap, block_mask=create_block_mask(...))` | run below; no backward pass on a CPU |
# | `torch.nn.attention.WARN_FOR_UNFUSED_KERNELS = True` warns why no fused kernel ran | not run: the warnings differ by version |
# | Hugging Face: `from_pretrained(..., attn_implementation="sdpa")`, or `"flash_attention_2"` | not run: needs weights |
# | `varlen_attn(...)`, `flash_attn_varlen_func(...)`, `flash_attn_func(..., deterministic=True)` | not run: needs a GPU |
#
# </div>
# <div lang="zh">
#
# 配合 `torch.compile`，`flex_attention` 把你写的掩码函数和分数函数编译成一个核函数。要避免填充，可以把各条序列首尾相接，打包成一行，再把每条序列的起始位置（`cu_seqlens`）传给 `flash_attn_varlen_func`。
#
# | 写法 | 本课是否运行 |
# |---|---|
# | `F.scaled_dot_product_attention(q, k, v, is_causal=True)` | 下面运行 |
# | `with sdpa_kernel(SDPBackend.FLASH_ATTENTION): ...`，这个后端不能运行时就报错，不会退回 | 下面运行 |
# | `flex_attention(q, k, v, score_mod=soft_cap, block_mask=create_block_mask(...))` | 下面运行；在 CPU 上没有反向 |
# | `torch.nn.attention.WARN_FOR_UNFUSED_KERNELS = True`，用警告说明为什么没有选用融合算子 | 未运行：警告随版本而不同 |
# | Hugging Face：`from_pretrained(..., attn_implementation="sdpa")`，或 `"flash_attention_2"` | 未运行：需要权重 |
# | `varlen_attn(...)`、`flash_attn_varlen_func(...)`、`flash_attn_func(..., deterministic=True)` | 未运行：需要 GPU |
#
# </div>

# %%
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask

q, k, v = torch.randn(3, 1, 4, 512, 64)
with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True)
document = torch.arange(512) // 200  # three documents, packed into one sequence


def same_document(batch, head, query, key):
    return (document[query] == document[key]) & (query >= key)


def soft_cap(score, batch, head, query, key):
    return 2 * torch.tanh(score / 2)


# %% jupyter={"source_hidden": true}
import warnings

from torch.nn.attention.flex_attention import flex_attention

block_mask = create_block_mask(same_document, None, None, 512, 512, device="cpu")
with warnings.catch_warnings(record=True) as said:
    packed = flex_attention(q, k, v, score_mod=soft_cap, block_mask=block_mask)
alone = []
for a, b in [(0, 200), (200, 400), (400, 512)]:  # cu_seqlens is [0, 200, 400, 512]
    scores = soft_cap(q[..., a:b, :] @ k[..., a:b, :].mT / 8, *4 * [None])
    hidden = torch.ones(b - a, b - a, dtype=torch.bool).triu(1)
    alone.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v[..., a:b, :])
flags = torch.allclose(flash_attention(q, k, v, causal=True), theirs, atol=1e-5)
print(*(str(each.message).splitlines()[0] for each in said))
flags, torch.allclose(torch.cat(alone, 2), packed, atol=1e-5), f"{block_mask.sparsity():.0f}%"

# %% [markdown]
# <div lang="en">
#
# With `is_causal=True`, PyTorch's result agrees with the library's. `flex_attention` gives the same result as attention on each document alone, with the same soft cap. Its block mask skips half of the tiles. The warning says that without `torch.compile`, `flex_attention` computes the whole matrix of scores.
#
# </div>
# <div lang="zh">
#
# 带 `is_causal=True` 时，PyTorch 的结果与库里的版本一致。`flex_attention` 的结果，也与逐篇文档单独计算注意力（同样带 soft cap）的结果一致。这次调用的块掩码跳过了一半的分块。输出里的警告说，如果不用 `torch.compile`，`flex_attention` 就会算出完整的分数矩阵。
#
# </div>

# %% [markdown]
# ## 6.11 Claims and measurements / 说法与实测

# %% jupyter={"source_hidden": true} slide="result"
from course_lib import memory
from course_lib.checkpoint.readable import checkpoint
from course_lib.lessons.lesson_06 import claims

checkpointed = partial(
    checkpoint, standard_attention, use_reentrant=False, preserve_rng_state=False
)


def peak(layer, depth):
    with symbolic(), memory.MemoryMeter() as meter:
        o, k, v = (torch.zeros(1, 8, 1024, 64, requires_grad=True) for _ in range(3))
        for _ in range(depth):
            o = layer(o, k, v)
        o.sum().backward()
    return meter.peak_bytes


double = saved["flash"][1] / saved["flash"][0]
sizes = {"head_dim": 64, "kind": "flash"}
single, other = (attention_cost(sequence=n, **sizes).flops for n in (512, 1024))
growth = f"{double:.1f} × / {other / single:.1f} ×"
sizes |= {"sequence": 512, "pass_": "backward"}
backs = [attention_cost(**sizes, tile_passes=n).flops for n in (1, 2)]
vectors = [row for row in kept(flash_attention, 1024, torch.bfloat16) if len(row.shape) == 3]
savings = [1 - peak(checkpointed, depth) / peak(standard_attention, depth) for depth in (1, 3, 6)]
claims.claims_table(
    growth,
    "; ".join(f"{2 * back / single:.0f}" for back in backs),
    " / ".join(f"{back / single:.2f} ×" for back in backs),
    f"{len(vectors)}",
    f"{vectors[0].dtype}".removeprefix("torch."),
    " / ".join(f"{100 * saving:.0f} %" for saving in savings),
    growth,
)

# %% [markdown] slide={"en": "The step of lesson 00 with flash attention alone, 128 tokens.\n\n**Guess first.** By how much does the peak of 277.7 MB fall?", "zh": "第 00 课的训练步，只把标准注意力换成 flash 注意力，128 个 token。\n\n**先猜**：277.7 MB 的峰值能省下多少？"}
# ## 6.12 The ledger / 账本
#
# <div lang="en">
#
# The first table's last row repeats lesson 00's training step with flash attention as the only change. The second table estimates the peak for one sequence of 4096 tokens, with each kind of attention.
#
# </div>
# <div lang="zh">
#
# 第一张表的最后一行就是第 00 课的训练步，只把标准注意力换成了 flash 注意力。第二张表把输入换成一条 4096 个 token 的序列，给出用两种注意力时峰值的估计值。
#
# </div>

# %% jupyter={"source_hidden": true} slide="result"
from course_lib.budget import Recipe, estimate
from course_lib.models import Decoder, random_tokens


def step(attention, sequence, batch):
    sizes = {"vocabulary": 2048, "hidden": 256, "heads": 8, "layers": 8, "sequence": sequence}
    make_batch = partial(random_tokens, batch, sequence, 2048)
    return estimate(partial(Decoder, **sizes), make_batch, Recipe(attention=attention))


ledger("06", "flash attention", step("flash", 128, 8))

# %% jupyter={"source_hidden": true} slide="result"
rows = [(kind, round(step(kind, 4096, 1).peak_bytes / 1e9, 2)) for kind in ("standard", "flash")]
table(["attention", "peak (GB)"], rows)

# %% [markdown]
# <div lang="en">
#
# At 128 tokens, the probabilities P are a small part of a layer's kept bytes, so flash attention reduces the peak by only 9%. With one sequence of 4096 tokens, the estimated peak falls from 5.97 GB to 0.78 GB. How much flash attention reduces the peak depends on the sequence length.
#
# </div>
# <div lang="zh">
#
# 序列只有 128 个 token 时，一层保存的字节里，P 只占一小部分，所以 flash 注意力只把峰值降低 9%。换成一条 4096 个 token 的序列，估计的峰值从 5.97 GB 降到 0.78 GB。flash 注意力能把峰值降低多少，取决于序列长度。
#
# </div>

# %% [markdown] slide={"en": "One number per row restores every probability.\n\nThis number also merges the results for parts of the keys.", "zh": "每行一个数，就能还原每一个概率。\n\n有了这个数，还能合并各部分键的结果。"}
# ## 6.13 Summary / 小结
#
# <div lang="en">
#
# - Softmax can be computed block by block, in one pass. With one number per row, the log-sum-exp, every probability can be computed from its score.
# - It is enough to keep Q, K, V, O and the log-sum-exp for backward. The kept bytes are proportional to the sequence length $N$, and the FLOPs to $N^2$.
# - Backward needs five matrix products per tile in one pass over the tiles. In two passes it needs seven, but no two instances write to the same place.
# - The outputs and log-sum-exps for parts of the keys are enough to compute attention over all keys.
# - PyTorch may fall back without a warning to a backend that keeps the scores. If the backend that you select with `sdpa_kernel` cannot run, PyTorch raises an error instead.
#
# **Next:** [lesson 07](07_fit_the_budget.ipynb) combines all techniques within a memory budget.
#
# </div>
# <div lang="zh">
#
# - softmax 可以分块计算，只遍历一次。每行只要保存一个数（LSE），就能由分数还原这一行的全部概率。
# - 反向只需要保存 Q、K、V、O 和 LSE。保存的字节与序列长度 $N$ 成正比，FLOPs 与 $N^2$ 成正比。
# - 如果只遍历一次，反向对每个分块做五次矩阵乘法。如果遍历两次，就要做七次，但任何两个实例都不会写入同一个位置。
# - 有了各部分键的输出和 LSE，就能算出对全部键做注意力的结果。
# - PyTorch 可能不加警告地退回到保存分数的后端。如果用 `sdpa_kernel` 指定一个后端，这个后端又不能运行，PyTorch 会报错，而不会退回。
#
# **下一步**：[第 07 课](07_fit_the_budget.ipynb)把这些技术结合起来，满足内存预算。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **Sources.** Milakov and Gimelshein 2018, *Online normalizer calculation for softmax*, arXiv:1805.02867. Dao et al. 2022, *FlashAttention*, arXiv:2205.14135. Dao 2023, *FlashAttention-2*, arXiv:2307.08691. Shah et al. 2024, *FlashAttention-3*, arXiv:2407.08608. Zadouri et al. 2026, *FlashAttention-4*, arXiv:2603.05451. Dao et al. 2023, *Flash-Decoding for long-context inference*, PyTorch's blog. Liu et al. 2023, *Ring Attention*, arXiv:2310.01889. Ainslie et al. 2023, *GQA*, arXiv:2305.13245. Dong et al. 2024, *Flex Attention*, arXiv:2412.05496. Williams et al. 2009, *Roofline*, CACM 52(4). NVIDIA's data sheets of A100 and H100. PyTorch's sources `sdp_utils.cpp`, `attention_backward.cu`, `_fa3.py` and `_fa4.py`. FlashAttention's repository, issue 414 and pull request 1893.
#
# </div>
# <div lang="zh">
#
# **出处。** Milakov 和 Gimelshein 2018，*Online normalizer calculation for softmax*，arXiv:1805.02867。Dao et al. 2022，*FlashAttention*，arXiv:2205.14135。Dao 2023，*FlashAttention-2*，arXiv:2307.08691。Shah et al. 2024，*FlashAttention-3*，arXiv:2407.08608。Zadouri et al. 2026，*FlashAttention-4*，arXiv:2603.05451。Dao et al. 2023，*Flash-Decoding for long-context inference*，PyTorch 博客。Liu et al. 2023，*Ring Attention*，arXiv:2310.01889。Ainslie et al. 2023，*GQA*，arXiv:2305.13245。Dong et al. 2024，*Flex Attention*，arXiv:2412.05496。Williams et al. 2009，*Roofline*，CACM 52(4)。NVIDIA 的 A100 与 H100 数据手册。PyTorch 的源文件 `sdp_utils.cpp`、`attention_backward.cu`、`_fa3.py` 和 `_fa4.py`。FlashAttention 代码仓库的 issue 414 与 pull request 1893。
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

# %% [markdown] slide={"en": "Standard attention inside a checkpoint does not keep P either.\n\n**Guess first.** How do its peak and FLOPs compare with those of flash attention?", "zh": "给标准注意力加检查点，也不会保存 P。\n\n**先猜**：与 flash 注意力相比，峰值和 FLOPs 如何？"}
# ## 6.14 The general tool and the special one / 通用工具与专用工具
#
# <div lang="en">
#
# Lesson 02 shows another way to avoid keeping the probabilities P: a checkpoint around standard attention. The comparison uses 1024 tokens, 8 heads and three layers in a row. **Guess first:** which has the higher peak, checkpointed standard attention or flash attention, and which needs more FLOPs?
#
# </div>
# <div lang="zh">
#
# 第 02 课有另一种不保存概率 P 的办法，就是给标准注意力加检查点。下面用 1024 个 token、8 个头、依次相连的三层注意力来比较。**先猜**：加了检查点的标准注意力与 flash 注意力相比，哪一种峰值更高，哪一种 FLOPs 更多？
#
# </div>

# %%
from course_lib.checkpoint.readable import checkpoint
from course_lib.memory import MemoryMeter
from course_lib.memory.measurement import flop_counter


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
no_random = {"use_reentrant": False, "preserve_rng_state": False}
checkpointed = partial(checkpoint, standard_attention, **no_random)
layers = {"standard": standard_attention, "checkpointed": checkpointed, "flash": flash_attention}
figures.draw_peaks({name: costs_of(layer) for name, layer in layers.items()})

# %% [markdown]
# <div lang="en">
#
# Neither checkpointed nor flash attention keeps P for backward. The checkpoint's recomputation stops early, so in both methods, $Q K^T$ is the only matrix product that is computed again. Therefore their FLOPs are equal. But when backward reaches a checkpointed layer, the whole matrix P is in memory again, together with the gradients of P and of the scores. These three matrices of $N^2$ numbers per head take $3 \cdot 8 \cdot 1024^2 \cdot 4$ bytes, which is 101 MB of the peak of 109 MB. Flash attention keeps only one tile of each such matrix in memory at a time. A checkpoint discards P between layers, and flash attention discards P inside the operator.
#
# </div>
# <div lang="zh">
#
# 两种方法都不保存 P。检查点的重计算会提前终止，因此两种方法都只多做一次矩阵乘法 $Q K^T$，FLOPs 也就相同。但反向进行到加了检查点的一层时，完整的 P 又出现在内存里，同时还有 P 的梯度和分数的梯度。每个头有三个这样的矩阵，每个矩阵有 $N^2$ 个数，总共 $3 \cdot 8 \cdot 1024^2 \cdot 4$ 字节，即 109 MB 峰值中的 101 MB。而 flash 注意力在任何时刻，对每个这样的矩阵都只需要一个分块。检查点在层与层之间丢弃 P，flash 注意力在算子内部丢弃 P。
#
# </div>

# %% [markdown]
# ## 6.15 Which tiles a causal mask needs / 因果掩码要算哪些分块
#
# <div lang="en">
#
# With a causal mask, the library skips the tiles above the diagonal. The numbers in the figure show the order in which forward computes the tiles.
#
# </div>
# <div lang="zh">
#
# 有因果掩码时，库里的 flash 注意力跳过对角线以上的分块。图中的数字表示前向计算各分块的顺序。
#
# </div>

# %% jupyter={"source_hidden": true}
figures.draw_causal_tiles()

# %% [markdown]
# <div lang="en">
#
# **Exercise 7.** Write `tiles(queries, keys, block_q, block_k)`, which returns the number of tiles that must be computed with a causal mask. The mask is aligned at the bottom right, so the last query sees all keys. If there are fewer keys than queries, the first queries see no key. (`is_causal=True` in PyTorch aligns at the top left.) The lengths need not be multiples of the block sizes.
#
# </div>
# <div lang="zh">
#
# **练习 7。** 写出 `tiles(queries, keys, block_q, block_k)`，返回带因果掩码时一共要计算多少个分块。掩码在右下角对齐，所以最后一个查询看得见所有的键。如果键比查询少，最前面的几个查询一个键也看不见。（PyTorch 的 `is_causal=True` 在左上角对齐。）块的大小不一定能整除长度。
#
# </div>


# %% minutes=8
def tiles(queries, keys, block_q, block_k):
    return None


exercises.check_causal_tiles(tiles)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not exercises.check_causal_tiles.accepted:

    def tiles(queries, keys, block_q, block_k):
        count = 0
        for first in range(0, queries, block_q):
            seen = min(first + block_q, queries) + keys - queries  # by the block's last query
            count += -(-max(0, seen) // block_k)  # with fewer keys than queries it may see none
        return count


exercises.check_causal_tiles(tiles)
### END SOLUTION

# %% [markdown]
# ## 6.16 Saved bytes, part by part, and with grouped queries / 逐项列出保存的字节，以及分组查询的情形
#
# <div lang="en">
#
# The table lists the bytes of each tensor that is saved for backward, for N = 2048 tokens.
#
# </div>
# <div lang="zh">
#
# 下表列出 N = 2048 个 token 时为反向保存的各个张量的字节数。
#
# </div>

# %% jupyter={"source_hidden": true}
rows = []
for name, function in kinds.items():
    formula = attention_saved_bytes(sequence=2048, batch=1, heads=12, head_dim=64, kind=name)
    found = {}
    for row in kept(function, 2048):
        if row.shared_with is None:
            found.setdefault(row.bytes, []).append(row)
    for part, count in formula.items():
        label = text("{name}, {part}", name=name, part=part)
        rows.append((label, count, found[count].pop(0).bytes))
predictions(rows, unit="bytes")

# %% [markdown]
# <div lang="en">
#
# In **grouped-query attention** (GQA), several query heads share one head of keys and values. PyTorch's argument for GQA is `enable_gqa=True`.
#
# **Exercise 8.** A layer has 32 query heads, and 8 heads of keys and values. Its head size is $d = 128$, and its input is one sequence of 4096 tokens in bf16. How many bytes does flash attention keep for backward?
#
# </div>
# <div lang="zh">
#
# 在**分组查询注意力**（GQA）里，几个查询头共用一个键值头。PyTorch 里的参数是 `enable_gqa=True`。
#
# **练习 8。** 一层有 32 个查询头、8 个键值头，头维度 $d = 128$，输入是一条 4096 个 token 的序列，数据类型是 bf16。flash 注意力要为反向保存多少字节？
#
# </div>

# %% minutes=4
answer = None  # bytes
exercises.check_grouped_bytes(answer)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
one_head = 4096 * 128 * 2
exercises.check_grouped_bytes((32 + 8 + 8 + 32) * one_head + 32 * 4096 * 4)
### END SOLUTION

# %% [markdown]
# ## 6.17 FLOPs, bytes, time / FLOPs、字节与时间
#
# <div lang="en">
#
# The table counts the FLOPs and the moved bytes of one head for N = 4096 tokens. It assumes a GPU with 163 KiB of shared memory per thread block. For backward, it compares FlashAttention-2's one pass over the tiles with this library's two passes. The time is at least the larger of compute time and memory time. Here both times are those of an A100 with 312 TFLOP/s and 2.0 TB/s. FLOPs divided by moved bytes is the **arithmetic intensity**. The **roofline** is the highest rate that a kernel can reach. It is the smaller of two numbers: the GPU's compute rate, and its bandwidth multiplied by the kernel's intensity. The figure shows computed numbers, not measurements. Flash attention appears with blocks of 64 and of 128 queries.
#
# </div>
# <div lang="zh">
#
# 下表统计 N = 4096 个 token 时一个头的 FLOPs 和搬运的字节数，假设每个线程块有 163 KiB 共享内存。反向分别按 FlashAttention-2 把分块遍历一次的做法和本库遍历两次的做法计算。时间至少是计算时间与访存时间中较长的一个，这里按 A100 的 312 TFLOP/s 和 2.0 TB/s 计算。FLOPs 除以搬运的字节数，得到**算术强度**。**屋顶线**（roofline）是核函数能达到的最高速率，等于两个数中较小的一个，一个是算力，另一个是带宽与算术强度的乘积。图里的数是计算出来的，不是实测值。图里的 flash 注意力分两种情形，查询块分别有 64 个和 128 个查询。
#
# </div>

# %% jupyter={"source_hidden": true}
figures.costs_of_both_passes(sequence=4096, head_dim=64)

# %% jupyter={"source_hidden": true}
sizes = {"sequence": 4096, "head_dim": 64}
reached = {"standard": attention_cost(**sizes, kind="standard").arithmetic_intensity}
for count in (64, 128):  # queries per block: M / (4 d), 2 bytes per number
    cost = attention_cost(**sizes, kind="flash", sram_bytes=count * 4 * 64 * 2)
    reached[text("flash, {count} queries", count=count)] = cost.arithmetic_intensity
devices = {"A100: 312 TFLOP/s, 2.0 TB/s": (312e12, 2.0e12)}
devices["H100: 989 TFLOP/s, 3.35 TB/s"] = 989e12, 3.35e12
figures.draw_roofline(devices, reached)

# %% jupyter={"source_hidden": true}
ridges = [round(rate / bandwidth) for rate, bandwidth in devices.values()]
[round(x) for x in reached.values()], ridges

# %% [markdown]
# <div lang="en">
#
# Flash attention has an intensity of 63 FLOPs per byte with blocks of 64 queries, and of 124 with blocks of 128 queries. (The table assumes larger blocks.) At the **ridge** of a roofline, the compute rate equals the bandwidth multiplied by the intensity. The ridge of an A100 is at 156 FLOPs per byte, and that of an H100 at 295. Both ridges are higher than these two intensities, so by this count, memory bandwidth would be the limit. In reality, the L2 cache reduces the reads from memory. The A100's L2 cache has 40 MB. One head's K and V take only 1 MB here, so they can stay in the cache. If K and V were read from memory only once per head, the intensity would be 2032 FLOPs per byte. According to its paper, FlashAttention-2 reaches 50% to 73% of an A100's peak compute rate.
#
# </div>
# <div lang="zh">
#
# 查询块有 64 个和 128 个查询时，flash 注意力的算术强度分别是每字节 63 和 124 FLOPs（表中的查询块更大）。在屋顶线的**拐点**，算力等于带宽与算术强度的乘积。A100 和 H100 的拐点分别是每字节 156 和 295 FLOPs，flash 注意力的这两个算术强度都更低。单看这些数，瓶颈是显存带宽。实际上，L2 缓存会减少从显存读取的次数。A100 的 L2 缓存有 40 MB，而一个头的 K 和 V 在这里共 1 MB，能一直留在缓存里。假如每个头的 K 和 V 只从显存读一次，算术强度就是每字节 2032 FLOPs。据论文，FlashAttention-2 达到了 A100 峰值算力的 50% 到 73%。
#
# </div>

# %% [markdown]
# ## 6.18 Dropout by seed, and an older idea / 用种子做 dropout，以及更早的思路
#
# <div lang="en">
#
# Dropout on P would need an N × N mask for backward. CUDA kernels keep only a **seed** instead. In forward and again in backward, a counter-based generator computes each element's random number from the seed and the element's index in P.
#
# The idea of tiled attention is older than FlashAttention. Rabe and Staats 2021 (*Self-attention Does Not Need O(n²) Memory*, arXiv:2112.05682) used the same running maximum and sum, with one checkpoint per block for backward.
#
# </div>
# <div lang="zh">
#
# 对 P 做 dropout，本来要为反向保存一个 N × N 的掩码，而 CUDA 核函数只保存一个**种子**。只要有种子和元素在 P 中的位置，基于计数器的随机数发生器就能算出这个元素的随机数，因此前向算一次，反向再算一次即可。
#
# 分块计算注意力的思路比 FlashAttention 更早。Rabe 和 Staats 2021（*Self-attention Does Not Need O(n²) Memory*，arXiv:2112.05682）就已经边读边更新最大值和总和，并给每一块加检查点，供反向时重新计算。
#
# </div>

# %% [markdown]
# ## 6.19 The library's kernels / 库里的核函数
#
# <div lang="en">
#
# The library has one kernel for forward and two kernels for backward. One backward kernel sums dK and dV over the queries, and the other sums dQ over the keys. The first cell below counts each kernel's matrix products. The second cell compares the Triton kernels' gradients with those of the torch backend for 40 tokens, without and with a causal mask.
#
# </div>
# <div lang="zh">
#
# 库里的前向用一个核函数，反向用两个核函数，其中一个沿查询累加 dK 和 dV，另一个沿键累加 dQ。下面第一个单元格统计每个核函数里有几次矩阵乘法。第二个单元格用 40 个 token，比较 Triton 核函数与 torch 后端的梯度，先不带因果掩码，再带因果掩码。
#
# </div>

# %%
import inspect

from course_lib.attention import kernels

each = (kernels.forward_kernel, kernels.keys_backward_kernel, kernels.queries_backward_kernel)
[inspect.getsource(getattr(kernel, "fn", kernel)).count("= product(") for kernel in each]

# %%
device = "cuda" if torch.cuda.is_available() else "cpu"
inputs = [torch.randn(1, 2, 40, 16, device=device, requires_grad=True) for _ in range(3)]


def gradients(backend, causal):
    o = flash_attention(*inputs, causal=causal, backend=backend, block_q=16, block_k=16)
    return torch.cat(torch.autograd.grad(o.square().sum(), inputs))


masks = (False, True) if triton else ()
[torch.allclose(gradients("triton", c), gradients("torch", c), atol=1e-4) for c in masks]

# %% [markdown]
# ## 6.20 On a GPU / 在 GPU 上
#
# <div lang="en">
#
# On a GPU, `backend="auto"` selects the Triton kernels of this course, and the cell below compares them with PyTorch's kernels. Without a GPU, the cell shows times and bytes of forward and backward, with a causal mask and 4096 tokens. These numbers were recorded on an H100 and an H200. On the H200, the course's kernels take 1.56 ms, PyTorch's FlashAttention takes 2.22 ms, and cuDNN, which PyTorch chooses on this GPU, takes 1.29 ms. FlashAttention's backward allocates a workspace; the course's kernels need no workspace.
#
# </div>
# <div lang="zh">
#
# 在 GPU 上，`backend="auto"` 会选用本课程的 Triton 核函数。如果这台机器有 GPU，下面的单元格就现场测量这些核函数，并与 PyTorch 的几种核函数对照。如果没有，就显示在 H100 和 H200 上的记录，即带因果掩码、序列长 4096 个 token 时，前向加反向的用时和字节数。在 H200 上，本课程的核函数用时 1.56 ms，PyTorch 的 FlashAttention 用时 2.22 ms，cuDNN 的核函数（PyTorch 在这块 GPU 上的默认选择）用时 1.29 ms。FlashAttention 的反向需要一块显存作为工作区，本课程的核函数不需要。
#
# </div>

# %% tags=["nbval-ignore-output", "shows-device"]
from course_lib.lessons import on_gpu

on_gpu("06")
