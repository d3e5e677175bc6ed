# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] slide={"en": "Your model has $n$ equal layers, and its activations do not fit.\n\nWhich of them should be recomputed, and in which groups?", "zh": "你的模型有 $n$ 个相同的层，激活值放不下。\n\n哪些层该重计算，几层合成一组？"}
# # 3 Which ones should we forget? (checkpoint schedules) / 该忘掉哪些？（检查点的调度）
#
# <div lang="en">
#
# Your transformer has 8, 32 or 80 equal layers, and its activations do not fit into memory. You can put a checkpoint around each layer or around groups of layers, keep some results and recompute the others, or leave the choice to the compiler. Which of these pays for your model?
#
# This lesson measures them side by side, and explains the result with two numbers that you can measure on your own model. Then you cut chains of small layers, and write a search for chains whose layers differ.
#
# </div>
# <div lang="zh">
#
# 你的 Transformer 有 8 层、32 层或 80 层，每层都相同，而激活值放不进内存。你可以每层加一个检查点，也可以几层合成一组；可以保留一部分结果、重计算其余的，也可以让编译器去选。对你的模型，哪一种划算？
#
# 本课先把它们放在一起实测，再用两个数来解释结果，这两个数在你自己的模型上也能测出来。然后，你要亲手切分由小层组成的链，并写一个搜索，用来处理各层不一样的链。
#
# </div>

# %%
from course_lib.teaching import language

language()

# %% [markdown]
# <div lang="en">
#
# **Goals** (90 minutes). Decide which of six ways pays for a model of equal layers. Predict the peak of any segments, and find the cut with the lowest one. Give the compiler a memory budget, and check the result. Write the recurrence that finds the fastest schedule within a number of bytes, and say where it pays.
#
# **What to know before**: lesson 01's meter, and the checkpoint that you wrote in lesson 02.
#
# </div>
# <div lang="zh">
#
# **目标**（90 分钟）：对各层相同的模型，判断六种做法中哪一种划算；预测任意分段的峰值，找出峰值最低的切法；给编译器一个内存预算，并检查它拿这个预算做了什么；写出递推式，在给定的字节数之内找到最快的调度，并说出它在哪里划算。
#
# **预备知识**：第 01 课的计量器，以及你在第 02 课写的检查点。
#
# </div>

# %%
from functools import cache, partial
from itertools import accumulate, count, pairwise
from math import inf

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from course_lib.lessons.lesson_03 import exercises, figures, own_model
from course_lib.memory import MemoryMeter, symbolic
from course_lib.models import Decoder, deep_mlp, loss_stages, random_tokens
from course_lib.teaching import predictions, table

# %% [markdown]
# ## 3.1 Which of these pays? / 哪一种划算？
#
# <div lang="en">
#
# The course's decoder runs forward and backward in six ways, with 8 layers and with 48:
#
# - **no checkpoint**: everything is kept;
# - **each layer**: one checkpoint per layer, and one around the embedding;
# - **two layers per checkpoint**;
# - **products kept**: a selective checkpoint per layer, which keeps the results of the linear layers;
# - **loss in chunks**: lesson 02's loss, 128 tokens at a time, and no checkpoint elsewhere;
# - **compiler's budget**: `torch.compile` chooses what to keep, half of its usual activations.
#
# **One convention holds on this page.** All live activations count, including the model's input. Weights, gradients and optimizer state exist from the start and do not count, as from the second micro-batch on (lesson 05). Only the ledger shows a whole step.
#
# </div>
# <div lang="zh">
#
# 本课程的解码器做一次前向和反向，分别用六种做法，8 层和 48 层各测一遍：
#
# - **不用检查点**：全部保留；
# - **每层一个检查点**：嵌入也有一个；
# - **两层合用一个检查点**；
# - **保留乘积**：每层一个选择性检查点，保留线性层的结果；
# - **损失分小段**：第 02 课的损失，每个小段（chunk）128 个 token，其余部分不用检查点；
# - **编译器的预算**：由 `torch.compile` 选择保留什么，预算是它平常所留激活值的一半。
#
# **全页只用一种约定。** 所有存活的激活值都计入，包括模型的输入。权重、梯度和优化器状态不计入，因为它们从一开始就在，就像从第二个微批次起的情形（第 05 课）。只有最后的账本统计完整的一步。
#
# </div>


# %%
def make_stages(**changes):  # embedding, attention and feed-forward of each layer, head with loss
    sizes = {"vocabulary": 2048, "hidden": 256, "heads": 8, "layers": 8, "sequence": 128}
    decoder, tokens = Decoder(**{**sizes, **changes}), random_tokens(8, 128, 2048)
    return loss_stages(decoder, tokens[:, 1:]), tokens[:, :-1].contiguous()


import torch._functorch.config as compiler
from torch.utils.checkpoint import create_selective_checkpoint_contexts as contexts


# %% slide="code"
def in_segments(layers, cuts, x, **options):
    options = {"use_reentrant": False, "preserve_rng_state": False, **options}
    for start, end in pairwise(cuts[:-1]):
        x = checkpoint(layers[start:end], x, **options)
    return layers[cuts[-2] :](x)  # the last segment needs no checkpoint


# %%
def compiled(module, x, budget):
    torch.compiler.reset()  # forgets the graphs of another budget
    with compiler.patch(activation_memory_budget=budget):
        run = torch.compile(module, backend="aot_eager_decomp_partition")
        run(x).sum().backward()  # the first call compiles, and leaves gradients
    return run


# %% [markdown] slide={"en": "None, each layer, pairs, products kept, loss in chunks, compiler.\n\n**Guess first.** Which peaks lowest with 8 layers, and with 48?", "zh": "不用、每层、两层一组、保留乘积、损失分成小段、编译器。\n\n**先猜**：8 层时哪种峰值最低？48 层时呢？"}
# <div lang="en">
#
# `figures.cost_of` measures peak and FLOPs on symbolic tensors, which take no memory. The compiled decoder needs real ones, and runs with 8 layers only.
#
# **Guess first.** Which way has the lowest peak with 8 layers, and which with 48? Which of them add less than 5% to the FLOPs?
#
# </div>
# <div lang="zh">
#
# `figures.cost_of` 在符号张量上测量峰值和 FLOPs，符号张量不占内存。编译后的解码器要用真实的张量，因此只跑 8 层。
#
# **先猜**：8 层时，哪种做法的峰值最低？48 层时又是哪种？哪几种做法多花的 FLOPs 不到 5%？
#
# </div>


# %% slide="result"
def ways(n):
    each, pairs = ([0, *range(1, 2 * n, step), 2 * n + 1, 2 * n + 2] for step in (2, 4))
    keeping = partial(contexts, [torch.ops.aten.addmm.default, torch.ops.aten.mm.default])
    whole, cost = [0, 2 * n + 2], partial(figures.cost_of, make_stages, layers=n)
    found = {"no checkpoint": cost(in_segments, whole), "each layer": cost(in_segments, each)}
    found["two layers per checkpoint"] = cost(in_segments, pairs)
    found["products kept"] = cost(partial(in_segments, context_fn=keeping), each)
    found["loss in chunks"] = cost(own_model.with_chunked_loss, 128)
    return found


eight, deep = ways(8), ways(48)

# %% slide="result"
stages, inputs = make_stages()
run = compiled(stages, inputs, 0.5)
with MemoryMeter() as meter:
    run(inputs).backward()
eight["compiler's budget, 0.5"] = meter.peak_bytes + inputs.nbytes, meter.flops
own_model.decision_table({8: eight, 48: deep})

# %% [markdown]
# <div lang="en">
#
# With 8 layers, a checkpoint around **each layer** has the lowest peak: 36.7 MB instead of 195.2, for 1.21 times the FLOPs. With 48 layers **pairs** have the lowest peak. Products kept and the compiler's budget save nearly half for about 2% more FLOPs. The loss in chunks saves 18 MB at both depths, because a model has only one loss.
#
# Why does the order change? Let a layer keep $A$ bytes for its backward, and let its input take $B$ bytes. With $L$ layers in groups of $g$, the inputs of $L / g$ groups are kept, and one group is recomputed as a whole: $\frac{L}{g} B + g A$. Pairs save $\frac{L}{2} B$ of inputs and add one more $A$. So pairs need less memory **from $L = 2 A / B$ layers on**. In this decoder $A$ is 20 times $B$, so that is 40 layers.
#
# And in models that people train? Here is one layer of two of them, in bf16, for a sequence of 4096 tokens:
#
# </div>
# <div lang="zh">
#
# 8 层时，**每层一个检查点**的峰值最低：从 195.2 MB 降到 36.7 MB，FLOPs 是基线的 1.21 倍。48 层时，峰值最低的变成**两层合用一个**。保留乘积和编译器的预算只多花约 2% 的 FLOPs，却省下将近一半。损失分小段在两种深度下都省 18 MB，因为一个模型只有一个损失。
#
# 为什么名次变了？设一层为自己的反向保存 $A$ 字节，它的输入占 $B$ 字节。$L$ 层按每组 $g$ 层划分，要保留 $L / g$ 组的输入，并一次重计算一整组，内存共 $\frac{L}{g} B + g A$。两层一组时，输入少留 $\frac{L}{2} B$，重计算的那一组却多出一个 $A$。所以**从 $L = 2 A / B$ 层起**，两层一组才划算。在这个解码器里，$A$ 是 $B$ 的 20 倍，因此是从 40 层起。
#
# 那么大家真正训练的模型呢？下面是其中两个模型的各一层，用 bf16，输入一条 4096 个 token 的序列：
#
# </div>

# %% slide="both"
rows = []
models = {"Llama 3 8B": (32, 4096, 14336, 32), "Llama 3 70B": (80, 8192, 28672, 64)}
for name, (depth, *sizes) in models.items():
    kept, its_input, gradients = own_model.llama_layer_bytes(*sizes, tokens=4096)
    in_mb = (round(size / 1e6, 1) for size in (kept, its_input, gradients))
    rows.append((name, depth, *in_mb, round(2 * kept / its_input)))
table(["model", "layers", "A (MB)", "B (MB)", "a layer's gradients (MB)", "2A/B"], rows)

# %% [markdown]
# <div lang="en">
#
# Pairs would pay from about 49 layers on in both models. The 8B model has 32. The 70B model has 80, so pairs pay for it, if its gradients exist before backward, as on this page, or are sharded (lesson 08).
#
# In other steps the gradients arrive during backward. Here a layer's gradients take far more than its input, so the peak is at the end of backward. By then the inputs are released, and no groups have a lower peak than a checkpoint around each layer, however deep the model is. Measure a layer of your own model, and this table decides:
#
# | your model | what to do |
# |---|---|
# | a transformer with fewer than $2 A / B$ layers, or with gradients that arrive during backward and take more than $B$ per layer | a checkpoint around each layer |
# | the same, and FLOPs are scarce | keep the products if $s$ is not much larger than $h$, or give the compiler a budget (section 3.5) |
# | more layers, with gradients that exist before backward, are sharded, or take much less than $B$ per layer | groups of layers: sections 3.2 to 3.4 find the best ones |
# | a large vocabulary | the loss in chunks, in addition |
# | layers that differ, and a number of bytes to stay within | a search: sections 3.6 and 3.7 |
#
# </div>
# <div lang="zh">
#
# 在这两个模型里，两层一组都要从大约 49 层起才划算。8B 只有 32 层。70B 有 80 层，所以两层一组划算，但前提是梯度在反向之前就已存在（本页就是这样），或者梯度是分片的（第 08 课）。
#
# 在其他训练步里，梯度在反向中陆续产生。这里一层的梯度远大于它的输入，所以峰值在反向快结束时，那时各组的输入都已释放。因此无论多少层，任何分组的峰值都不会低于每层一个检查点。对你自己的模型，也测一层，再按下表决定：
#
# | 你的模型 | 怎么做 |
# |---|---|
# | Transformer，少于 $2 A / B$ 层，或者梯度在反向中产生、每层的梯度又大于 $B$ | 每层一个检查点 |
# | 同上，但不想多花 FLOPs | $s$ 不比 $h$ 大很多时保留乘积，或者给编译器一个预算（3.5 节） |
# | 层数更多，而且梯度在反向之前就已存在，或是分片的，或每层的梯度远小于 $B$ | 几层合成一组，3.2 至 3.4 节找出最好的分法 |
# | 词表很大 | 再加上损失分小段 |
# | 各层不一样，又必须不超过某个字节数 | 搜索，见 3.6 和 3.7 节 |
#
# </div>

# %% [markdown]
# ## 3.2 How many segments? / 切成几段？
#
# <div lang="en">
#
# Where layers keep little, groups save memory even with few layers. A group is called a **segment**. From here to section 3.5 the network is a chain of 100 equal layers, Linear and GELU, with activations of 1000 × 25 numbers. A layer keeps $A = 2B$, because Linear and GELU each save their input. A boundary between segments keeps $B$ = 100,000 bytes.
#
# `checkpoint_sequential` cuts such a network into $k$ segments, and puts a checkpoint around each except the last. Are the gradients equal?
#
# </div>
# <div lang="zh">
#
# 每层保存得很少时，不必很深，分组就划算了。这样的一组叫做一**段**。从这里到 3.5 节，网络是一条由 100 个相同的层组成的链，每层是 Linear 加 GELU，激活值是 1000 × 25 个数。Linear 和 GELU 各保存自己的输入，所以一层保存 $A = 2B$。两段之间的边界留住一份激活值，$B$ = 100,000 字节。
#
# `checkpoint_sequential` 把这样的网络切成 $k$ 段，除最后一段外各加一个检查点。梯度相等吗？
#
# </div>


# %% slide="code"
A, B = 200_000, 100_000  # bytes that a layer keeps, bytes at a boundary
x = torch.linspace(-1, 1, 25_000).view(1000, 25)
hundred = nn.Sequential(*(deep_mlp(depth=1, width=25, seed=i) for i in range(100)))
framework = partial(checkpoint_sequential, use_reentrant=False, preserve_rng_state=False)
plain, tenths = (in_segments, [0, 100]), (framework, 10)  # one segment has no checkpoint
table(["gradients equal"], [[figures.equal_gradients(hundred, x, plain, tenths)]])

# %% [markdown] slide={"en": "$k B + \\frac{L}{k} A + B$ is a smooth curve.\n\n**Guess first.** Will the measured points be smooth, too?", "zh": "$k B + \\frac{L}{k} A + B$ 是一条平滑的曲线。\n\n**先猜**：测得的点也会连成平滑的曲线吗？"}
# <div lang="en">
#
# How does the peak depend on the number $k$ of segments? The inputs of $k$ segments, one segment of $L/k$ layers, and the gradient that is handed on make $k B + \frac{L}{k} A + B$, which is a smooth curve. **Guess first:** will the measured points be smooth, too?
#
# </div>
# <div lang="zh">
#
# 峰值随段数 $k$ 怎样变化？$k$ 段的输入、一个 $L/k$ 层的段，再加正在往回传的梯度，共 $k B + \frac{L}{k} A + B$，这是一条平滑的曲线。**先猜**：测得的点也会连成平滑的曲线吗？
#
# </div>


# %% slide="result"
ks = [1, 4, 10, 14, 17, 20, 25, 26, 33, 34, 50, 51, 100]
sweep = {k: figures.peak_and_flops(framework, hundred, k)[0] for k in ks}
figures.draw_sweep(100, sweep, marked=(50, 51))

# %% [markdown]
# <div lang="en">
#
# They are not. `checkpoint_sequential` puts $\lfloor L/k \rfloor$ layers into each segment and **all the rest into the last one**. For $k = 51$ there are fifty segments of one layer, and the last segment has fifty layers. A segment whose backward runs is in memory as a whole.
#
# **Exercise 1.** Cuts are a list such as `[0, 40, 70, 100]`, and `pairwise(cuts)` gives the start and the end of each segment. Segment $j$, counted from 0, runs backward. Which inputs are still kept, how much do its layers keep, and which gradient exists? Return the peak in bytes, from `A` and `B`.
#
# </div>
# <div lang="zh">
#
# 并不平滑。`checkpoint_sequential` 给每段 $\lfloor L/k \rfloor$ 层，**余下的全归最后一段**。$k = 51$ 时，有五十段各一层，最后一段却有五十层。一段做反向时，整段的激活值都在内存里。
#
# **练习 1。** 切口写成列表，例如 `[0, 40, 70, 100]`，`pairwise(cuts)` 给出每一段的起点和终点。第 $j$ 段（从 0 数起）做反向时，还留着哪些输入，这一段的各层保存多少，又有哪个梯度存在？用 `A` 和 `B` 算出峰值，返回字节数。
#
# </div>


# %% minutes=10
def predicted_peak(cuts):
    return 0


exercises.check_predicted_peak(predicted_peak)


# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not exercises.check_predicted_peak.accepted:

    def predicted_peak(cuts):
        sizes = [end - start for start, end in pairwise(cuts)]
        return max((j + 1) * B + size * A for j, size in enumerate(sizes)) + B


exercises.check_predicted_peak(predicted_peak)
### END SOLUTION


# %% jupyter={"source_hidden": true} slide="result"
def framework_cuts(depth, k):
    size = depth // k
    return [*range(0, k * size, size), depth]


tried = (1, 10, 14, 50, 51)
rows = [(f"k = {k}", predicted_peak(framework_cuts(100, k)), sweep[k]) for k in tried]
predictions(rows, unit="bytes")

# %% [markdown] slide={"en": "$k B$ grows with $k$, $\\frac{L}{k} A$ falls. **Guess first.** Where is the sum least?", "zh": "$k B$ 随 $k$ 增大，$\\frac{L}{k} A$ 减小。**先猜**：两项之和在哪里最小？"}
# ## 3.3 Where √L comes from / √L 从哪里来
#
# <div lang="en">
#
# The 8 bytes between prediction and measurement are the loss and its gradient. Now let all segments be equal. One part of the sum, $k B$, grows with $k$. The other part, $\frac{L}{k} A$, falls.
#
# **Exercise 2.** For which number of segments $k$ is the sum least? Write it for any $L$, $A$ and $B$. It need not be a whole number. If you round, take the whole number whose sum is least, which is not always the next lower one.
#
# </div>
# <div lang="zh">
#
# 预测与实测之间相差 8 字节，就是损失和它的梯度。现在设各段相等。和式的一项 $k B$ 随 $k$ 增大，另一项 $\frac{L}{k} A$ 随 $k$ 减小。
#
# **练习 2。** 段数 $k$ 取何值时，两项之和最小？请写成对任意的 $L$、$A$、$B$ 都成立的公式，结果不必是整数。若要取整，就取使总和最小的那个整数，它不一定是向下取整的结果。
#
# </div>


# %% minutes=4
def best_count(L, A, B):
    return None


exercises.check_best_count(best_count)


# %% jupyter={"source_hidden": true} slide="both"
### BEGIN SOLUTION
if not exercises.check_best_count.accepted:

    def best_count(L, A, B):
        return (L * A / B) ** 0.5


exercises.check_best_count(best_count)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# $k^* = \sqrt{L \cdot A / B}$, where the peak is $2 \sqrt{L A B} + B$. The well-known $\sqrt L$ is right only where a layer keeps as much as one boundary. Our layers keep twice that, so 14 segments are best, not 10. It hardly matters here, because the curve is flat there: 29.3 instead of 31, in units of $B$. An uneven remainder costs more: with 14 segments, `checkpoint_sequential` peaks at 33.
#
# For 32 layers of Llama 3 8B, $k^* = \sqrt{32 \cdot 24.6} = 28$. That is nearly one segment per layer.
#
# </div>
# <div lang="zh">
#
# $k^* = \sqrt{L \cdot A / B}$，此处的峰值是 $2 \sqrt{L A B} + B$。常说的 $\sqrt L$，只有当一层保存的恰好等于一个边界时才对。这里的层保存两倍，所以最好的段数是 14，不是 10。不过在这里差别很小，因为曲线在最低点附近很平：以 $B$ 为单位，29.3 对 31。余数分得不均匀，影响反而更大：`checkpoint_sequential` 也分 14 段，峰值却是 33。
#
# 对 Llama 3 8B 的 32 层，$k^* = \sqrt{32 \cdot 24.6} = 28$，几乎就是一层一段。
#
# </div>

# %% [markdown] slide={"en": "At the last segment all inputs are kept; at the first, only its own.\n\nHow long may the first be? **Cut 100 layers on paper.**", "zh": "处理最后一段时，所有输入都留着；处理第一段时，只有它自己的。\n\n那么第一段可以有多长？**先在纸上切 100 层。**"}
# ## 3.4 Equal segments are not the best / 各段相等并不是最好的
#
# <div lang="en">
#
# While the **last** segment runs backward, all inputs are kept. While the **first** one does, all the others have been released, so the first may be longer. So give every segment the same $R$ bytes, not counting the gradient. A segment with $j$ inputs before its own has $R - (j + 1) B$ left for its layers.
#
# The sizes fall by $B / A$ from segment to segment, like the columns of a triangle that is $R / B$ segments long and $R / A$ layers high. Its area is the number of layers:
#
# $$L \approx \frac{R^2}{2 A B}, \qquad R \approx \sqrt{2 L A B}$$
#
# This is $1 / \sqrt 2$ of the $2 \sqrt{L A B}$ of equal segments.
#
# **Exercise 3.** Sizes are whole numbers, so the formula is not yet a cut. Write `tapered(depth)`, which returns the cuts, such as `[0, 4, 6, 7]` for 7 layers. No other cut may have a lower peak. The check compares yours with all cuts, at many depths.
#
# </div>
# <div lang="zh">
#
# **最后**一段做反向时，所有输入都留着。**第一**段做反向时，其余的都已释放，所以它可以更长。那就让每一段都占同样的 $R$ 字节（梯度另计）。设某一段之前还留着 $j$ 份输入，那么留给这一段各层的是 $R - (j + 1) B$ 字节。
#
# 每往后一段，段长就减少 $B / A$，各段像一个三角形里的一列列：底是 $R / B$ 段，高是 $R / A$ 层，面积就是层数：
#
# $$L \approx \frac{R^2}{2 A B}, \qquad R \approx \sqrt{2 L A B}$$
#
# 只有等分时 $2 \sqrt{L A B}$ 的 $1 / \sqrt 2$。
#
# **练习 3。** 段长必须是整数，所以公式还不能直接用作切法。写出 `tapered(depth)`，返回切口，例如 7 层时是 `[0, 4, 6, 7]`，要求没有别的切法峰值更低。检查会在许多深度上，把你的切法与所有切法比较。
#
# </div>


# %% minutes=10
def tapered(depth):
    return [0, depth]


exercises.check_tapered(tapered)


# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not exercises.check_tapered.accepted:

    def tapered(depth):
        for room in count(A + B, B):
            sizes = [(room - inputs * B) // A for inputs in range(1, room // B)]
            if sum(sizes) >= depth:
                return sorted({min(depth, cut) for cut in accumulate(sizes, initial=0)})


exercises.check_tapered(tapered)
### END SOLUTION


# %% jupyter={"source_hidden": true} slide="result"
def balanced(depth, k):  # the longer segments first
    return list(accumulate((depth // k + (j < depth % k) for j in range(k)), initial=0))


_, once = figures.peak_and_flops(in_segments, hundred, [0, 100])
arms = {"10 equal segments": range(0, 101, 10), "17 balanced": balanced(100, 17)}
arms["tapered"], rows = tapered(100), []
for name, cuts in arms.items():
    peak, flops = figures.peak_and_flops(in_segments, hundred, cuts)
    rows.append((name, predicted_peak(cuts) // B, round(peak / B, 1), round(flops / once, 3)))
table(["cut", "predicted (units of B)", "measured (units of B)", "FLOPs (× baseline)"], rows)

# %% jupyter={"source_hidden": true} slide="result"
figures.draw_rooms({name: arms[name] for name in ("10 equal segments", "tapered")})

# %% [markdown]
# <div lang="en">
#
# The peak falls from 31 to 22, for 2% more FLOPs, because the last segment, which does not run again, is shorter. In the picture, the layers of the tapered cut form the triangle. This cut is derived here; we have found it in no paper in this form.
#
# For these layers and one extra forward pass, no other schedule of whole layers that discards nothing early is better. A schedule that looks inside the layers is (section 3.12).
#
# </div>
# <div lang="zh">
#
# 峰值从 31 降到 22，FLOPs 只多 2%，因为不必重跑的最后一段变短了。图上，渐短的切法里各层正好排成那个三角形。这个切法是在这里推出来的，我们没有在论文里见过这种形式。
#
# 对这些层，只多做一次前向时，在以整层为单位、不提前丢掉的调度里，没有更好的。深入到层内的调度，则可以更好（3.12 节）。
#
# </div>

# %% [markdown] slide={"en": "`activation_memory_budget`: 1 is the compiler's default, 0 saves only the inputs.\n\n**Guess first.** The saved bytes fall with it. Does the peak?", "zh": "`activation_memory_budget`：1 是编译器的默认值，0 只保存输入。\n\n**先猜**：保存的字节随它减少。峰值呢？"}
# ## 3.5 A budget for the compiler / 给编译器一个预算
#
# <div lang="en">
#
# `torch.compile` traces forward and backward as one graph and cuts it in two. The results that cross the cut are saved, and backward computes the others again. `activation_memory_budget` limits what is saved. Its default, 1, minimizes the run time. With 0, only the inputs are saved, as with one checkpoint around everything. A number between them allows the inputs, and this share of what 1 saves in addition to them.
#
# `compiled`, in section 3.1, has the lines to paste. Its backend runs the two graphs with PyTorch's usual kernels. On a GPU you leave `backend` out: the default one generates kernels, needs a C++ compiler, and reorders operators to lower the peak. That is not run here.
#
# **Guess first.** On the first 16 layers of our chain the saved bytes fall with the budget. Does the peak?
#
# </div>
# <div lang="zh">
#
# `torch.compile` 把前向和反向追踪成一张图，再切成两半。跨过切口的结果要保存，其余的在反向里重新计算。`activation_memory_budget` 限制保存多少。默认值 1 使运行时间最短。0 只保存输入，相当于整体只用一个检查点。取两者之间的数时，可以保存输入，再加上 1 在输入之外所保存字节的这个比例。
#
# 3.1 节的 `compiled` 就是可以直接抄的写法。其中的后端用 PyTorch 平常的核函数来运行这两张图。在 GPU 上不必写 `backend`；默认的后端会生成核函数，需要 C++ 编译器，还会调整算子的顺序以降低峰值，这里没有运行。
#
# **先猜**：在这条链的前 16 层上，保存的字节随预算减少。峰值也会随之降低吗？
#
# </div>

# %% slide="result"
layers16, budgets = hundred[:16], {f"`{budget}`": budget for budget in (1, 0.75, 0.5, 0.25, 0)}
own_model.budget_table(compiled, layers16, x, budgets)

# %% [markdown]
# <div lang="en">
#
# At 0.75 the peak falls for no FLOPs: only GELUs run again, and FLOPs count only matrix products. Then the saved bytes fall further, and the peak **rises**: at 0 it is far above the peak with everything kept. The solver that chooses knows how many bytes each result takes and how many FLOPs it costs. It does not know how long a recomputed result lives. At 0.25 the first seven Linears' results are kept and nothing of the last nine layers, so backward begins with recomputing these nine at once. Section 3.16 shows that, and halves the peak.
#
# On our decoder, 0.5 was a good choice: a peak of 105.9 MB for 1.02 times the FLOPs. So start with 0.5, and measure the peak of your model, because fewer saved bytes are not a lower peak. Four segments of the same 16 layers peak at 13 (section 3.12).
#
# </div>
# <div lang="zh">
#
# 预算 0.75 时峰值降低，而 FLOPs 不变，因为重计算的只有 GELU，而 FLOPs 只计矩阵乘法。再往下，保存的字节继续减少，峰值却**升高**，到 0 时远高于全部保留时的峰值。负责选择的求解器知道每个结果占多少字节、重计算要多少 FLOPs，却不知道重计算出来的结果会存活多久。预算 0.25 时，它留下前七个 Linear 的结果，最后九层什么也不留，于是反向一开始就要把这九层一起恢复。3.16 节会看到这一点，并把峰值减半。
#
# 在解码器上，0.5 是个好选择：峰值 105.9 MB，FLOPs 是基线的 1.02 倍。所以不妨从 0.5 开始，并在你的模型上实测峰值，因为保存的字节更少，不等于峰值更低。同样这 16 层，切成四段，峰值是 13（3.12 节）。
#
# </div>

# %% [markdown] slide={"en": "The stages differ. Keep **all** of the first one, or **run on**, keep a later input, and come back.\n\nWhich is faster?", "zh": "各级不一样。**全部保留**第一级；或者**往前跑**，留住后面的输入，再回头。\n\n哪样更快？"}
# ## 3.6 Stages that differ: write the search / 各级不同：写一个搜索
#
# <div lang="en">
#
# In many networks the layers differ, and then no formula gives the best cut. A **stage** is one link of a chain, such as a layer. A **schedule** is a list of what runs, in which order, and what each forward keeps: `"all"` that its backward needs, its `"input"` only, or `"nothing"`. `simulate` counts the bytes and the time of a list, and refuses one that cannot run.
#
# </div>
# <div lang="zh">
#
# 许多网络的各级并不相同，这时没有公式能给出最好的切法。**级**（stage）是链上的一环，例如一层。**调度**是一张清单，写明运行什么、按什么顺序，以及每次前向留下什么：反向所需的全部（`"all"`），只留输入（`"input"`），或者什么也不留（`"nothing"`）。`simulate` 统计一张清单的字节和时间，无法运行的清单它会拒绝。
#
# </div>

# %% slide="both"
from course_lib.schedule import Backward, Chain, Forward, simulate, store_all

three = Chain.uniform(3, saved_bytes=2)
again = [Forward(0, "input"), Forward(1, "nothing"), Forward(2, "all"), Backward(2)]
again += [Forward(0, "all"), Forward(1, "all"), Backward(1), Backward(0)]
ways = {"all stages saved": store_all(three), "the first two run again": again}
costs = {name: simulate(way, three) for name, way in ways.items()}
table(["schedule", "peak", "time"], [(name, c.peak_bytes, c.time) for name, c in costs.items()])

# %% [markdown]
# <div lang="en">
#
# The second list runs stages 0 and 1 twice, for a lower peak.
#
# Let $T_{i..n}(R)$ be the least time for stages $i$ to $n$, within $R$ bytes, not counting the input of stage $i$. Only schedules that never discard early what they keep count, and no output may be larger than the one before it. (Then a forward has room wherever its backward has.) Stage $i$ keeps $A_i$ bytes, its output takes $B_i$, its forward takes the time $f_i$ and its backward $g_i$. There are two ways to begin:
#
# - **Keep all** of stage $i$. This needs $A_i + B_i \le R$, with the gradient that comes in. The time is $f_i + T_{i+1..n}(R - A_i) + g_i$.
# - **Run on** to a later stage $e$, keep its input, and come back to $i$ when stages $e$ to $n$ are done. Which forwards does that take, which two parts remain, and how many bytes does each of them have?
#
# The least of these times, over both ways and every $e$, is $T_{i..n}(R)$.
#
# </div>
# <div lang="zh">
#
# 第二张清单让第 0、1 级运行两遍，换来更低的峰值。
#
# 设 $T_{i..n}(R)$ 是第 $i$ 到第 $n$ 级的最短时间：第 $i$ 级的输入已经有了（算在别处），除它之外还有 $R$ 字节可用，而且只考虑留下的东西不提前丢掉的调度。我们还假设每一级的输出都不大于前一级的输出（这样，一级的反向放得下，它的前向就放得下，不必另外检查）。第 $i$ 级保存 $A_i$ 字节，输出占 $B_i$ 字节，前向用时 $f_i$，反向用时 $g_i$。开头有两种做法：
#
# - **全部保留**第 $i$ 级。连同传进来的梯度，要求 $A_i + B_i \le R$。时间是 $f_i + T_{i+1..n}(R - A_i) + g_i$。
# - **往前跑**到后面的某一级 $e$，留住它的输入；第 $e$ 到第 $n$ 级做完之后，再回到第 $i$ 级。这要做哪些前向？剩下哪两部分，各有多少字节可用？
#
# 两种做法、每一个 $e$ 都试过，其中最短的时间就是 $T_{i..n}(R)$。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **Exercise 4.** The first way and the minimum are written. Write the second way, the time of running on to stage `e`. `stages` is a tuple that begins with stage $i$: `stages[:e]` are passed, and `stages[e:]` come later. A stage has `forward_time`, `saved_bytes` ($A_i$) and `output_bytes` ($B_i$). Its output is the input of the next one. The check tries all schedules of this kind on four such chains.
#
# </div>
# <div lang="zh">
#
# **练习 4。** 第一种做法和取最小值的代码已经写好，请写第二种做法，也就是往前跑到第 `e` 级所用的时间。`stages` 是元组，第一级就是 $i$，所以 `stages[:e]` 是跑过的级，`stages[e:]` 是后面的级。每一级有 `forward_time`、`saved_bytes`（$A_i$）和 `output_bytes`（$B_i$），它的输出就是下一级的输入。检查会在四条这样的链上试遍所有这类调度，与你的时间比较。
#
# </div>


# %% minutes=12
def run_on(stages, e, room):
    return inf


@cache
def fastest(stages, room):
    if not stages:
        return 0
    first, times = stages[0], [run_on(stages, e, room) for e in range(1, len(stages))]
    if first.saved_bytes + first.output_bytes <= room:  # keep all of the first stage
        later = fastest(stages[1:], room - first.saved_bytes)
        times.append(first.forward_time + later + first.backward_time)
    return min(times, default=inf)


exercises.check_recurrence(fastest)


# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not exercises.check_recurrence.accepted:

    def run_on(stages, e, room):
        ahead = sum(stage.forward_time for stage in stages[:e])
        later = fastest(stages[e:], room - stages[e - 1].output_bytes)
        return ahead + later + fastest(stages[:e], room)

    @cache
    def fastest(stages, room):
        if not stages:
            return 0
        first = stages[0]
        times = [run_on(stages, e, room) for e in range(1, len(stages))]
        if first.saved_bytes + first.output_bytes <= room:  # keep all of the first stage
            later = fastest(stages[1:], room - first.saved_bytes)
            times.append(first.forward_time + later + first.backward_time)
        return min(times, default=inf)


exercises.check_recurrence(fastest)
### END SOLUTION

# %% [markdown] slide={"en": "A checkpoint around each layer costs no search.\n\n**Guess first.** How much better is the fastest schedule, on the decoder and on a pyramid?", "zh": "每层一个检查点，用不着搜索。\n\n**先猜**：最快的调度比它好多少？在解码器上、在金字塔上各是多少？"}
# ## 3.7 Where does the search pay? / 搜索在哪里划算？
#
# <div lang="en">
#
# Running on takes the forwards $f_i + \dots + f_{e-1}$. Then stages $e$ to $n$ have $R - B_{e-1}$ bytes, because the kept input takes the rest. After that the input is released, so stages $i$ to $e - 1$ have all of $R$ again.
#
# The library's `optimal` is your recurrence for long chains, and returns the schedule itself. It also checks that each forward has room, so outputs may grow. `frontier` gives all budgets at once, the **Pareto frontier**: no schedule of this kind equals or beats one of its points in both bytes and time.
#
# Two chains are tried: our decoder, 18 stages that `Chain.profile` measures, and a pyramid of 12 stages whose outputs shrink from 32 MB to 1, as in a convolutional network. **Guess first:** how far above the frontier are the best cuts?
#
# </div>
# <div lang="zh">
#
# 往前跑的这段前向总用时 $f_i + \dots + f_{e-1}$。然后第 $e$ 到第 $n$ 级有 $R - B_{e-1}$ 字节可用，因为留住的那份输入要占一部分。做完之后这份输入就释放了，所以第 $i$ 到第 $e - 1$ 级又可以用全部的 $R$。
#
# 库里的 `optimal` 就是你的递推式，只是能用于长链，并且给出调度本身。它还检查每次前向是否放得下，所以输出可以变大。`frontier` 一次算出所有预算，也就是**帕累托前沿**：前沿上的每一点都不被支配，这类调度里找不到另一个，字节和时间都不比它差。
#
# 这里有两条链：一条是本课程的解码器，18 级，字节和 FLOPs 由 `Chain.profile` 测出；另一条是 12 级的金字塔，像卷积网络那样，输出从 32 MB 缩小到 1 MB。**先猜**：最好的切法比前沿高出多少？
#
# </div>

# %% slide="result"
from course_lib.lessons.lesson_03 import frontiers

with symbolic():
    chain = Chain.profile(*make_stages())
chains = {"the decoder, 18 stages": chain, "a pyramid, 12 stages": exercises.pyramid()}
frontiers.draw_cuts(chains)

# %% [markdown]
# <div lang="en">
#
# On the decoder the best cuts lie on the frontier from 81 MB down, and above that they take at most 9% more bytes. So where stages are nearly equal, a loop of checkpoints is as good as the search, down to the lowest peak of cuts, 35 MB. Only the search goes below that, to 27 MB for 1.68 times the time. On the pyramid no cut goes below 163 MB. The search goes down to 131 MB, for 1.25 times the time.
#
# `ScheduledSequential` runs a schedule under autograd, with the parts of lesson 02's checkpoint (section 3.14). For half of the decoder's bytes, are the gradients equal, and is the peak as simulated?
#
# </div>
# <div lang="zh">
#
# 在解码器上，从 81 MB 往下，最好的切法都在前沿上；再往上，最多也只多用 9% 的字节。也就是说，各级相近时，只要预算不低于 35 MB（切法能达到的最低峰值），用一个循环加检查点就与搜索一样好。要降到 35 MB 以下，只能靠搜索：它用 1.68 倍的时间降到 27 MB。在金字塔上，没有一种切法低于 163 MB，而搜索用 1.25 倍的时间，降到 131 MB。
#
# `ScheduledSequential` 用第 02 课那个检查点的各个部分，让调度在 autograd 里真正运行（3.14 节）。把解码器的字节减半，梯度相等吗？峰值与模拟的一样吗？
#
# </div>

# %% jupyter={"source_hidden": true} slide="result"
from IPython.display import display

from course_lib.schedule import ScheduledSequential, frontier, optimal


def scheduled(layers, schedule, x):
    return ScheduledSequential(layers, schedule)(x)


cost_of = partial(figures.cost_of, make_stages)
halved = optimal(chain, simulate(store_all(chain), chain).peak_bytes // 2)
half = cost_of(scheduled, halved)
plain = in_segments, [0, 18]
equal = figures.equal_gradients(stages, inputs, plain, (scheduled, halved))
display(table(["gradients equal"], [[equal]]))
predictions([("half", simulate(halved, chain).peak_bytes, half[0])], unit="bytes")

# %% [markdown] slide={"en": "The schedule for half the bytes takes 1.17 times the FLOPs.\n\n**Guess first.** Where are the ways of section 3.1: above the frontier, or below?", "zh": "字节减半的调度，FLOPs 是基线的 1.17 倍。\n\n**先猜**：3.1 节的各种做法，在前沿的上方还是下方？"}
# <div lang="en">
#
# The gradients are equal, and the peak differs by 8 bytes only. Half the bytes cost 1.17 times the FLOPs.
#
# **Guess first:** are the ways of section 3.1 above the decoder's frontier, or below?
#
# </div>
# <div lang="zh">
#
# 梯度相等，峰值与模拟的只差 8 字节。字节减半时，FLOPs 是基线的 1.17 倍。
#
# **先猜**：3.1 节的各种做法，在解码器的前沿上方还是下方？
#
# </div>

# %% jupyter={"source_hidden": true} slide="result"
products = [2 * 1024 * 256 * 256, 2 * 1024 * 1024 * 256]  # FLOPs: attention's last, feed-forward's
finer = frontiers.frontier_with_early_stop(chain, [0, *products * 8, 0])
lines = {"frontier": frontier(chain), "frontier with early stop": finer}
arms = {"optimal (run)": ({"half": half}, "o", "#228833")}
names = ("each layer", "two layers per checkpoint", "products kept")
arms["checkpoints (run)"] = ({name: eight[name] for name in names}, "D", "#AA3377")
arms["compiler's budget, 0.5"] = ({0.5: eight["compiler's budget, 0.5"]}, "^", "#4477AA")
title = "Products kept and the compiler's budget lie below both frontiers of whole stages"
frontiers.draw_frontier(title, lines, arms, xlim=(20, 205))

# %% [markdown] slide={"en": "**A proof of optimality is a proof about a model.**\n\nHere the model had whole stages only. Which choices did it leave out?", "zh": "**证明了最优，只是证明了在某个模型之下最优。**\n\n这里的模型只有整级。它漏掉了哪些选择？"}
# <div lang="en">
#
# Pairs lie on the frontier, and the other ways lie below it. A checkpoint's second run stops early (lesson 02): it leaves out the segment's last product and its output. So a checkpoint around each layer takes 36.7 MB for 1.21 times the FLOPs, where whole stages take 1.31 times. A search that may stop early, too, finds the second frontier. The compiler's budget and keeping products lie below both frontiers: they recompute single operators instead of whole stages.
#
# **A proof of optimality is a proof about a model**, and this model had whole stages only. For a transformer the choice within a layer matters more than the choice among layers. The search pays where stages differ by much, as in the pyramid.
#
# </div>
# <div lang="zh">
#
# 两层合用一个检查点落在前沿上，其余几种都在前沿下方。检查点的第二遍会提前终止（第 02 课），一段的最后一次乘法和它的输出都省了。所以每层一个检查点时，峰值 36.7 MB，FLOPs 是基线的 1.21 倍；若以整级为单位，要 1.31 倍。搜索若也允许提前终止，得到的就是第二条线。保留乘积和编译器的预算比第二条线还低，因为它们重计算的是单个算子，而“级”描述不了单个算子。
#
# **证明了最优，只是证明了在某个模型之下最优**，而这个模型里只有整级。对 Transformer 来说，一层之内怎么选，比在各层之间怎么选更重要。各级相差很大时，例如金字塔，搜索才划算。
#
# </div>

# %% [markdown]
# ## 3.8 In your own code / 实际怎么写
#
# <div lang="en">
#
# | for | line | here |
# |---|---|---|
# | each layer, Hugging Face | `model.activation_checkpointing_enable()` | run, lesson 02 |
# | every second layer, Hugging Face | `model.activation_checkpointing_enable(every_n_layers=2)` | run, below |
# | equal segments | `checkpoint_sequential(layers, k, x, use_reentrant=False)` | run, 3.2 |
# | any segments | `checkpoint(layers[i:j], x, use_reentrant=False)` in a loop | run, 3.1 |
# | a budget for the compiler | `torch._functorch.config.activation_memory_budget = 0.5`, then `torch.compile(model)` | run, 3.5, with another backend |
# | the same, torchtitan | activation checkpoint mode `"memory_budget"` | not run |
# | a byte budget, your recurrence: rotor | `chain = rotor.Checkpointable(layers)`, `chain.measure(x)`, `chain.compute_sequence(limit)` | not run |
# | the same for any graph: Rockmate | `rockmate.Rockmate(model, x, limit)` | not run |
# | revolve, and its relatives | `checkpoint_schedules.Revolve(steps, slots)` | not run; revolve itself, 3.15 |
# | groups of N layers, Megatron-LM | `--recompute-granularity full --recompute-method uniform --recompute-num-layers N` | the same groups run, 3.1; the flags not |
# | the first N layers of each pipeline stage, Megatron-LM | `--recompute-method block --recompute-num-layers N` | not run |
#
# </div>
# <div lang="zh">
#
# | 用途 | 代码 | 本课是否运行 |
# |---|---|---|
# | 每层一个，Hugging Face | `model.activation_checkpointing_enable()` | 第 02 课运行过 |
# | 每隔一层一个，Hugging Face | `model.activation_checkpointing_enable(every_n_layers=2)` | 下面运行 |
# | 等长的段 | `checkpoint_sequential(layers, k, x, use_reentrant=False)` | 3.2 节运行过 |
# | 任意的段 | 在循环里用 `checkpoint(layers[i:j], x, use_reentrant=False)` | 3.1 节运行过 |
# | 给编译器一个预算 | `torch._functorch.config.activation_memory_budget = 0.5`，再 `torch.compile(model)` | 3.5 节用另一个后端运行过 |
# | 同样的事，torchtitan | 激活检查点模式 `"memory_budget"` | 没有运行 |
# | 字节预算，也就是你的递推式：rotor | `chain = rotor.Checkpointable(layers)`，`chain.measure(x)`，`chain.compute_sequence(limit)` | 没有运行 |
# | 同样的事，任意计算图：Rockmate | `rockmate.Rockmate(model, x, limit)` | 没有运行 |
# | revolve 及其同类 | `checkpoint_schedules.Revolve(steps, slots)` | 没有运行；revolve 本身见 3.15 节 |
# | 每组 N 层，Megatron-LM | `--recompute-granularity full --recompute-method uniform --recompute-num-layers N` | 3.1 节运行了同样的分组；没有用这些参数运行 |
# | 每个流水线阶段（pipeline stage）的前 N 层，Megatron-LM | `--recompute-method block --recompute-num-layers N` | 没有运行 |
#
# </div>

# %% jupyter={"source_hidden": true} slide="result"
from course_lib.lessons.lesson_02 import own_code

lines = ["", "model.activation_checkpointing_enable()"]
lines.append("model.activation_checkpointing_enable(every_n_layers=2)")
own_code.measured_lines(lines=lines)

# %% [markdown]
# ## 3.9 Claims and measurements / 说法与实测
#
# <div lang="en">
#
# The last line above checkpoints every second layer and keeps all of the others, so it lies between the two other rows.
#
# Three sentences from public pages follow.
#
# </div>
# <div lang="zh">
#
# 上面最后一种写法每隔一层加一个检查点，其余各层全部保留，所以结果落在另外两行之间。
#
# 下面是三句说法，都有公开出处。
#
# </div>


# %% jupyter={"source_hidden": true} slide="result"
def measured_peak(cuts):
    return figures.peak_and_flops(in_segments, hundred[: cuts[-1]], cuts)[0]


groups = [eight[name][0] for name in ("each layer", "two layers per checkpoint")]
figures.what_you_may_have_read(measured_peak, tapered, groups)

# %% [markdown] slide={"en": "The same step as ever, one technique per row.\n\nHalf the activations: what do these 180.1 MB consist of?", "zh": "还是那一步，一种技术一行。\n\n激活值减半：这 180.1 MB 由什么组成？"}
# ## 3.10 The ledger / 账本
#
# <div lang="en">
#
# This is the same step as in the other lessons, with Adam, and the schedule for half of the activations. Gradients arrive during backward.
#
# </div>
# <div lang="zh">
#
# 与其他各课同样的一步：用 Adam，调度是激活值减半的那一个，梯度在反向中才产生。
#
# </div>

# %% jupyter={"source_hidden": true} slide="result"
from course_lib.lessons.ledger import ledger

adam = torch.optim.Adam(stages.parameters())
adam.step()  # with the gradients of section 3.7: makes its state
stages.zero_grad()
with MemoryMeter(stages, adam) as meter:
    scheduled(stages, halved, inputs).backward()
    adam.step()
ledger("03", "optimal schedule, half the activations", meter, flops=half[1])

# %% [markdown]
# <div lang="en">
#
# The peak consists of 97.6 MB of activations and 82.5 MB of weights and optimizer state. Lesson 02's row has fewer bytes, 134.0 MB, for 1.21 times the FLOPs instead of 1.17.
#
# </div>
# <div lang="zh">
#
# 峰值由 97.6 MB 的激活值和 82.5 MB 的权重与优化器状态组成。第 02 课那一行的峰值更低，是 134.0 MB，而 FLOPs 是基线的 1.21 倍，这里是 1.17 倍。
#
# </div>

# %% [markdown] slide={"en": "Fewer than $2 A / B$ equal layers: a checkpoint around each.\n\nMore, and gradients exist: $k^* = \\sqrt{L \\cdot A / B}$, tapered. Different: search.", "zh": "相同的层少于 $2 A / B$ 个，就每层一个检查点。\n\n更多，而且梯度已经存在，就分成 $k^* = \\sqrt{L \\cdot A / B}$ 段，越往后越短。各不相同就搜索。"}
# ## 3.11 Summary / 小结
#
# <div lang="en">
#
# - Measure $A$, what a layer keeps, and $B$, what its input takes. Up to $2 A / B$ equal layers, a checkpoint around each layer has the lowest peak of equal groups, as in Llama 3 8B. If gradients arrive during backward and take more than $B$ per layer, this holds at any depth.
# - If FLOPs are scarce, keep products or give the compiler a budget. Here both save nearly half for 2%. Measure the peak, not the saved bytes.
# - For many layers that keep little, $k^* = \sqrt{L \cdot A / B}$ equal segments are best. If they get shorter towards the end, the peak approaches $1 / \sqrt 2$ of that.
# - Where stages differ, a recurrence finds the fastest schedule of whole stages among those that never discard early what they keep. Others can be faster (section 3.13).
# - A proof of optimality is a proof about a model. Here, recomputing single operators gets below the frontier.
#
# **Next:** [lesson 04](04_offload.ipynb) moves bytes elsewhere instead of forgetting them.
#
# </div>
# <div lang="zh">
#
# - 先测 $A$（一层保存多少）和 $B$（它的输入占多少）。相同的层不超过 $2 A / B$ 个时，在等长的分组里，每层一个检查点峰值最低，Llama 3 8B 就是这样。如果梯度在反向中产生，而且每层的梯度大于 $B$，那么无论多少层都是如此。
# - 不想多花 FLOPs，就保留乘积，或者给编译器一个预算。在这里，两者都只多花 2% 的 FLOPs，省下将近一半。要测的是峰值，不是保存的字节。
# - 层很多、每层保存得很少时，等分成 $k^* = \sqrt{L \cdot A / B}$ 段。若让各段越往后越短，峰值会趋近等分时的 $1 / \sqrt 2$。
# - 各级不一样时，递推式能在以整级为单位、“留下的东西不提前丢掉”的调度里找出最快的。别的调度有可能更快（3.13 节）。
# - 证明了最优，只是证明了在某个模型之下最优。在这里，以单个算子为单位来重计算的做法落在前沿下方。
#
# **下一步**：[第 04 课](04_offload.ipynb)不忘掉字节，而是把它们搬到别处。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **Sources.** Chen et al. 2016, *Training Deep Nets with Sublinear Memory Cost*, arXiv:1604.06174. Griewank 1992, *Achieving logarithmic growth of temporal and spatial complexity in reverse automatic differentiation*, Optimization Methods and Software 1. Griewank and Walther 2000, *Algorithm 799: revolve*, ACM TOMS 26(1). Beaumont et al. 2019, *Optimal checkpointing for heterogeneous chains*, arXiv:1911.13214: the recurrence, whose program is **rotor**. Jain et al. 2019, *Checkmate*, arXiv:1910.02653. Zhao et al. 2023, *Rockmate*, arXiv:2307.01236, and Gusak et al. 2025, *HiRemate*, ICML (PMLR 267), schedule units smaller than stages. The package `checkpoint_schedules`, of the Firedrake project. PyTorch's `torch._functorch.partitioners`, read and run. The READMEs of cybertronai/gradient-checkpointing (2018) and NVIDIA/Megatron-LM, on GitHub (claims two and three).
#
# </div>
# <div lang="zh">
#
# **出处。** Chen et al. 2016，*Training Deep Nets with Sublinear Memory Cost*，arXiv:1604.06174。Griewank 1992，*Achieving logarithmic growth of temporal and spatial complexity in reverse automatic differentiation*，Optimization Methods and Software 1。Griewank 和 Walther 2000，*Algorithm 799: revolve*，ACM TOMS 26(1)。Beaumont et al. 2019，*Optimal checkpointing for heterogeneous chains*，arXiv:1911.13214：递推式的来源，其程序叫 **rotor**。Jain et al. 2019，*Checkmate*，arXiv:1910.02653。Zhao et al. 2023，*Rockmate*，arXiv:2307.01236，以及 Gusak et al. 2025，*HiRemate*，ICML（PMLR 267），调度的单位比级更小。`checkpoint_schedules`，出自 Firedrake 项目的软件包。PyTorch 的 `torch._functorch.partitioners`（我们读过并运行过其源码）。GitHub 上 cybertronai/gradient-checkpointing（2018）和 NVIDIA/Megatron-LM 的 README（第二、三条说法）。
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
# ## 3.12 Other depths / 其他深度
#
# <div lang="en">
#
# Here is the same sweep for 16, 36 and 64 layers, with your prediction for every $k$ as a dot. The table adds 50 layers, which is not a square: $k^* = \sqrt{2 \cdot 50} = 10$ divides it.
#
# </div>
# <div lang="zh">
#
# 对 16、36 和 64 层同样扫一遍，图中的小点是你对每个 $k$ 的预测。表里还有 50 层，它不是平方数，而 $k^* = \sqrt{2 \cdot 50} = 10$ 能整除它。
#
# </div>


# %% jupyter={"source_hidden": true}
from course_lib.lessons.lesson_03 import in_depth


def predicted_for(depth, k):
    return predicted_peak(framework_cuts(depth, k))


in_depth.draw_other_depths(framework, hundred, predicted_for)

# %% jupyter={"source_hidden": true}
in_depth.compare_cuts(balanced, tapered, predicted_peak, measured_peak)

# %% [markdown]
# <div lang="en">
#
# Does any schedule of section 3.6's kind peak lower in the time of the tapered cut? A forward of a layer takes 1 and a backward 2, so 300 in all. One more forward of all layers except the last adds 99.
#
# </div>
# <div lang="zh">
#
# 在 3.6 节的那类调度里，有没有一种用时与渐短的切法相同，峰值更低？一层的前向用时 1，反向用时 2，共 300；除最后一层外再做一次前向，多用 99。
#
# </div>

# %%
from course_lib.schedule import frontier, optimal

links = Chain.uniform(100, saved_bytes=2)  # in units of B
min(cost.peak_bytes for cost in frontier(links) if cost.time <= 300 + 99)

# %% [markdown]
# <div lang="en">
#
# None does. To go below 22 with whole layers, some of them must run more than twice (section 3.15). But a layer has two operators. Keep only what each Linear returns, and let each GELU run once more, together with the next Linear, which early stop skips. Then a layer keeps $A = B$, and the segments are tapered for that:
#
# </div>
# <div lang="zh">
#
# 没有。以整层为单位，要降到 22 以下，就得让有些层运行不止两次（3.15 节）。但一层里有两个算子。只保留每个 Linear 的输出，让每个 GELU 与下一个 Linear 一起再运行一次，而提前终止会省去这个 Linear。这样一层只保存 $A = B$，各段再按这个比例越往后越短：
#
# </div>


# %%
class KeptLinears(nn.Sequential):
    def forward(self, x):
        first, *others, last = [module for layer in self for module in layer]
        x = first(x)
        for pair in zip(others[::2], others[1::2], strict=True):  # a GELU and the next Linear
            x = checkpoint(nn.Sequential(*pair), x, use_reentrant=False, preserve_rng_state=False)
        return last(x)


inside, shorter = KeptLinears(*hundred), accumulate(range(14, 0, -1), initial=0)
ways, rows = {"tapered": (hundred, tapered(100))}, []
ways["tapered, inside the layers"] = inside, sorted({min(100, cut) for cut in shorter})
for name, (layers, cuts) in ways.items():
    equal = figures.equal_gradients(layers, x, (in_segments, [0, 100]), (in_segments, cuts))
    peak, flops = figures.peak_and_flops(in_segments, layers, cuts)
    rows.append((name, equal, round(peak / B, 1), flops))
table(["cut", "gradients equal", "measured (units of B)", "FLOPs"], rows)

# %% [markdown]
# <div lang="en">
#
# The peak falls to 17, for the same FLOPs and equal gradients. The FLOPs count only matrix products, and each of them runs as often as before. So 22 is the best of a model of whole layers.
#
# </div>
# <div lang="zh">
#
# 峰值降到 17，FLOPs 相同，梯度相等。FLOPs 只计矩阵乘法，而每次乘法运行的次数都没有变。所以 22 只是以整层为单位的模型里最好的。
#
# </div>

# %% [markdown]
# ## 3.13 Giving up early / 提前丢掉
#
# <div lang="en">
#
# Can a schedule that discards early be faster? We have found none on equal stages. But take five stages with forward times 10, 5, 5, 5, 10 (each backward 1), outputs of 2, 4, 4, 1, 4 bytes, and 3, 4, 4, 1, 4 bytes kept. Within 13 bytes `optimal` takes 80:
#
# </div>
# <div lang="zh">
#
# 会提前丢掉的调度里，有没有更快的？各级相同时，我们没有找到。可是取这样五个级：前向用时 10、5、5、5、10（反向各 1），输出 2、4、4、1、4 字节，保存 3、4、4、1、4 字节。13 字节之内，`optimal` 用时 80：
#
# </div>

# %%
five = exercises.five_stages()
[*optimal(five, 13)], simulate(optimal(five, 13), five)

# %% [markdown]
# <div lang="en">
#
# **Exercise 5.** Change the list so that it stays within 13 bytes and takes less than 80. Keep an input on the way, and release it before its backward. Where does that save a run?
#
# </div>
# <div lang="zh">
#
# **练习 5。** 修改这张清单，使它不超过 13 字节，用时少于 80。请在往前跑的途中留住一份输入，并在那一级的反向之前释放它。这样在哪里能少跑一遍？
#
# </div>

# %% minutes=12
actions = [*optimal(five, 13)]
exercises.check_gives_up_early(actions)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not exercises.check_gives_up_early.accepted:
    actions = [Forward(0, "input"), Forward(1, "input"), Forward(2, "nothing")]
    actions += [Forward(3, "nothing"), Forward(4, "all"), Backward(4)]
    actions += [Forward(1, "nothing"), Forward(2, "all"), Forward(3, "all")]  # x_1 is released
    actions += [Backward(3), Backward(2)]
    actions += [Forward(0, "all"), Forward(1, "all"), Backward(1), Backward(0)]

exercises.check_gives_up_early(actions)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# It takes 70, because stage 0 runs once less. Stages 2 and 3 are reached from $x_1$, which is then released, so that all of both stages fits. This lies *below* the frontier that the library computes. Like the program of Beaumont et al., it finds the best **persistent** schedule.
#
# </div>
# <div lang="zh">
#
# 用时 70，因为第 0 级少跑了一遍。去第 2、3 级是从 $x_1$ 出发的，然后 $x_1$ 就释放了，于是这两级可以全部保留。它落在库算出的前沿*下方*。库与 Beaumont 等人的程序一样，找的是最好的**持久**（persistent）调度。
#
# </div>

# %%
from course_lib.schedule import Schedule
from course_lib.schedule import ScheduledSequential as Scheduled


def scheduled(layers, schedule, x):
    return Scheduled(layers, schedule)(x)


early, layers5 = Schedule(actions), hundred[:5]
print(figures.equal_gradients(layers5, x, (in_segments, [0, 5]), (scheduled, early)))
promised = simulate(early, Chain.profile(layers5, x)).peak_bytes
ran, _ = figures.peak_and_flops(scheduled, layers5, early)
predictions([("discarded early", promised, ran)], unit="bytes")

# %% [markdown]
# ## 3.14 The executor in a dozen lines / 十几行的执行器
#
# <div lang="en">
#
# `ScheduledSequential` does the following, and also takes care of random numbers, buffers and autocast.
#
# </div>
# <div lang="zh">
#
# `ScheduledSequential` 做的就是下面这些，此外还照管随机数、缓冲区和 autocast。
#
# </div>


# %%
def execute(stages, schedule, x, gradient):
    inputs, outputs = {0: x}, {}
    for action in schedule:
        i = action.stage
        if isinstance(action, Backward):
            outputs.pop(i).backward(gradient)
            gradient = inputs.pop(i).grad
        elif action.keep == "all":
            inputs[i] = inputs[i].detach().requires_grad_()
            outputs[i] = stages[i](inputs[i])
            inputs[i + 1] = outputs[i].detach()
        else:
            with torch.no_grad():
                inputs[i + 1] = stages[i](inputs[i] if action.keep == "input" else inputs.pop(i))


# %%
from course_lib.schedule.rules import segment_schedule

hundred.zero_grad()
execute(hundred, segment_schedule(tapered(100)), x, torch.linspace(-1, 2, 25_000).view(1000, 25))
mine = [parameter.grad for parameter in hundred.parameters()]
equal = all(map(torch.equal, figures.gradients(in_segments, hundred, [0, 100], x), mine))
table(["gradients equal"], [[equal]])

# %% [markdown]
# <div lang="en">
#
# For a quarter of the decoder's bytes, the error is more than 8 bytes:
#
# </div>
# <div lang="zh">
#
# 把解码器的字节降到四分之一时，误差不止 8 字节：
#
# </div>

# %%
cost_of = partial(figures.cost_of, make_stages)
quarter = optimal(chain, simulate(store_all(chain), chain).peak_bytes // 4)
promised = simulate(quarter, chain).peak_bytes
rows = [("a quarter", promised, cost_of(scheduled, quarter)[0])]
untied, _ = cost_of(scheduled, quarter, tied=False)
rows.append(("a quarter, two matrices", promised, untied))
predictions(rows, unit="bytes")

# %% [markdown]
# <div lang="en">
#
# The head shares its matrix with the embedding, and autograd holds the head's part of the gradient, 2.1 MB, until the embedding's part has come. A chain of stages does not describe that.
#
# </div>
# <div lang="zh">
#
# 输出头与嵌入共用一个矩阵，autograd 要把输出头那一份梯度（2.1 MB）一直留到嵌入那一份算出来，而由级组成的链描述不了这件事。
#
# </div>

# %% [markdown]
# ## 3.15 Forget again, and again / 一忘再忘
#
# <div lang="en">
#
# **Recursive**: keep the middle, do the right half, then the left, and treat each half in the same way. About $\log_2 L$ inputs are live, and a stage runs $\frac12 \log_2 L$ more times on average. Up to the picture, a stage of this section keeps one activation, $A = B$.
#
# </div>
# <div lang="zh">
#
# **递归**：留住中点，先做右半，再做左半，每一半也照此办理。同时留着的输入约有 $\log_2 L$ 份，每一级平均多运行 $\frac12 \log_2 L$ 次。本节到画图之前，一级只保存一份激活值，即 $A = B$。
#
# </div>

# %%
from course_lib.schedule import binomial, recursive, segments

rows = []
for power in (4, 6, 8, 10):
    depth = 2**power
    links = Chain.uniform(depth)
    plans = (store_all(links), segments(links, 2 ** (power // 2)), recursive(links))
    peaks = [simulate(plan, links).peak_bytes for plan in plans]
    forwards = simulate(plans[-1], links).forward_steps
    rows.append((depth, *peaks, round(forwards / depth, 2), 1 + power / 2))
table(["L", "store all", "√L segments", "recursive", "forwards per stage", "predicted"], rows)

# %% [markdown]
# <div lang="en">
#
# A **slot** holds one input, and the chain's own input takes one. A forward that does not keep all is a **run ahead**. With $c$ slots, and no stage running ahead more than $r$ times, Griewank (1992) reverses
#
# $$\beta(c, r) = \binom{c + r}{c}$$
#
# stages by a **binomial schedule**. Griewank and Walther (2000), whose program is called revolve, do it with the fewest forwards. Where should the next input be kept? Every place is tried, with one slot less for the right part. It is your recurrence of section 3.6, with slots instead of bytes:
#
# </div>
# <div lang="zh">
#
# 一个**槽**（slot）存放一份输入，链自己的输入也占一个。一次前向若没有全部保留，就算这一级**空跑**了一次。有 $c$ 个槽，每一级空跑不超过 $r$ 次，Griewank（1992）的调度可以反向走完
#
# $$\beta(c, r) = \binom{c + r}{c}$$
#
# 级，这叫**二项式调度**。Griewank 和 Walther（2000）的程序叫做 revolve，用的前向次数最少。下一份输入该留在哪里？每个位置都试一遍，右边的部分可用的槽少一个。这就是你在 3.6 节写的递推式，只是把字节换成了槽：
#
# </div>


# %%
@cache
def fewest_extra(length, slots):
    if length == 1:
        return 0
    if slots == 1:
        return length * (length - 1) // 2
    places = range(1, length)
    return min(e + fewest_extra(length - e, slots - 1) + fewest_extra(e, slots) for e in places)


def extra_steps(length, slots):
    return sum(isinstance(action, Forward) for action in binomial(length, slots)) - length


cases = [(length, slots) for slots in range(1, 7) for length in range(1, 60)]
all(fewest_extra(*case) == extra_steps(*case) for case in cases)

# %%
from collections import Counter
from math import comb


def most_repeats(length, slots):
    ahead = [a.stage for a in binomial(length, slots) if isinstance(a, Forward) and a.keep != "all"]
    return max(Counter(ahead).values(), default=0)


rows = []
for c in range(1, 5):
    reached = [max(n for n in range(1, 40) if most_repeats(n, c) <= r) for r in (1, 2, 3)]
    rows.append((c, *reached, [comb(c + r, c) for r in (1, 2, 3)]))
print(round(extra_steps(1000, 32) / 1000, 2))
table(["slots c", "r = 1", "r = 2", "r = 3", "β(c, r)"], rows)

# %% [markdown]
# <div lang="en">
#
# Four slots and three runs ahead reverse $\binom{7}{4} = 35$ stages. A thousand stages with 32 slots take 2.4 more forwards per stage.
#
# The picture shows three schedules of 16 stages that keep two activations each, and all three peak at 8. Time runs to the right, and stage 0 is the lowest row. Each dark box is an action: a green one is a forward that keeps all, a blue one keeps its input, a gray one keeps nothing, and a red one is a backward. The pale band to the right of a box lasts as long as its tensors are kept.
#
# </div>
# <div lang="zh">
#
# 四个槽、空跑三次，可以反向走完 $\binom{7}{4} = 35$ 级。如果有一千个级、32 个槽，每级要多做 2.4 次前向。
#
# 图上是 16 个级的三种调度，每级保存两份激活值，三种的峰值都是 8。时间从左到右，最下面一行是第 0 级。深色的格子是动作：绿色是全部保留的前向，蓝色是只留输入的前向，灰色是什么也不留的前向，红色是反向。格子右边的浅色带表示这些张量留到什么时候。
#
# </div>

# %%
sixteen = Chain.uniform(16, saved_bytes=2)
plans = {"recursive": recursive(sixteen), "binomial, 4 slots": binomial(16, 4)}
plans["optimal"] = optimal(sixteen, 8)
title = "The same peak in less time: late stages keep single inputs, early ones are kept whole"
figures.schedule_pictures(plans, sixteen, title=title, unit="B", scale=1)

# %%
measured_chain = Chain.profile(hundred[:16], x)
rows = []
for name, plan in plans.items():
    promised = simulate(plan, measured_chain).peak_bytes
    rows.append((name, promised, figures.peak_and_flops(scheduled, hundred[:16], plan)[0]))
predictions(rows, unit="bytes")

# %% [markdown]
# ## 3.16 Which results the compiler keeps / 编译器留下了哪些结果
#
# <div lang="en">
#
# In section 3.5 the peak rose while the saved bytes fell. Where a minimal cut of the graph does not meet the budget, a knapsack solver chooses, here at a half and below. Below, its choice is printed, and then replaced: seven of the sixteen Linears, spread evenly.
#
# </div>
# <div lang="zh">
#
# 3.5 节里，保存的字节减少，峰值却升高了。图上的最小割达不到预算时，由一个背包求解器来选，在这里是一半及以下。下面先打印它的选择，再换成另一种：从十六个 Linear 里均匀地选七个。
#
# </div>


# %%
from unittest import mock

from torch._functorch.partitioners import dp_knapsack

chosen = []


def spread(sizes, flops, most):
    chosen.append(dp_knapsack(sizes, flops, most)[1])  # what the solver itself would keep
    keep = list(range(1, len(sizes), 2))[:7]
    return 0.0, keep, [i for i in range(len(sizes)) if i not in keep]


with mock.patch("torch._functorch.partitioners.dp_knapsack", spread):  # the compiler's solver
    evenly = own_model.budget_table(compiled, layers16, x, {"`0.25`, seven spread evenly": 0.25})
print(*chosen)
evenly

# %% [markdown]
# <div lang="en">
#
# The spread choice saves the same bytes for the same FLOPs as the first seven, and has half the peak. The solver sees bytes and FLOPs, which are alike for all sixteen. **Which** results are kept decides.
#
# Checkmate solves such a choice as an integer program over the graph. Rockmate (arXiv:2307.01236) treats the graph of each block in this way, and combines the blocks by the recurrence of section 3.6. HiRemate repeats these two steps on several levels.
#
# </div>
# <div lang="zh">
#
# 均匀选出的七个，与前七个相比，保存的字节相同，FLOPs 也相同，峰值却只有一半。求解器看到的只有字节和 FLOPs，而十六个结果的字节和 FLOPs 都一样。关键在于留下的是**哪些**结果。
#
# Checkmate 把这种选择写成图上的整数规划来解。Rockmate（arXiv:2307.01236）用同样的办法处理每个块的图，再用 3.6 节的递推式把各块组合起来。HiRemate 在几个层次上重复这两步。
#
# </div>

# %% [markdown]
# ## 3.17 Traps, and older claims / 陷阱，以及更早的说法
#
# <div lang="en">
#
# `checkpoint_sequential` has two traps, shown with 3 segments of six Linears and GELUs. Given a list of the Linears only, it runs these without a warning, and the GELUs are gone. In the reentrant mode a segment whose input needs no gradient does not train, so only the last segment, which has no checkpoint, gets gradients.
#
# </div>
# <div lang="zh">
#
# `checkpoint_sequential` 有两个陷阱，用六个 Linear 和 GELU、3 段来看。只把各个 Linear 列成表传给它，它照样运行，没有任何警告，GELU 却没有了。在可重入模式下，一个段的输入若不需要梯度，这一段就得不到训练，只有没有检查点的最后一段得到梯度。
#
# </div>

# %%
import warnings

chain6 = hundred[:6]
linears = [layer[0] for layer in chain6]
same = torch.allclose(framework(linears, 3, x), chain6(x))
rows = [("a list of the Linears: is the output the same?", f"`{same}`")]
modes = {"reentrant: Linears that get gradients": {"use_reentrant": True}}
modes["`use_reentrant` left out: Linears that get gradients"] = {}
for name, option in modes.items():
    chain6.zero_grad()
    with warnings.catch_warnings(action="ignore"):  # "no input needs a gradient"
        checkpoint_sequential(chain6, 3, x, **option).sum().backward()
    trained = sum(linear.weight.grad is not None for linear in linears)
    rows.append((name, f"{trained} / 6"))
table(["trap", "found"], rows)

# %% [markdown]
# <div lang="en">
#
# These four claims stood in the teaching documents from which this course grew. The first two are about layers that keep one activation, such as Linear and Tanh.
#
# </div>
# <div lang="zh">
#
# 下面是四条说法，都出自本课程的前身，即几份教学文档。前两条说的是只保存一份激活值的层，例如 Linear 加 Tanh。
#
# </div>

# %%
from course_lib.lessons.lesson_03 import claims, in_depth

measured = in_depth.figures_of_older_claims(in_segments, hundred, tapered(100))
claims.older_claims(*measured)

# %% [markdown]
# ## 3.18 On a GPU / 在 GPU 上
#
# <div lang="en">
#
# `ScheduledSequential` runs on CUDA without a change. Here each stage's cost is in seconds. Without a GPU, the cell shows the figures recorded on an H100 and an H200. Each predicted peak is within 8 bytes of the measured one. The schedules get a half and a quarter of the memory that keeping everything takes, not counting the weights' gradients. With a half the step takes 15% longer on the H200 and 16% on the H100; with a quarter it takes 27% longer on both. For a quarter, the two GPUs get different schedules, because their stages take different times.
#
# </div>
# <div lang="zh">
#
# `ScheduledSequential` 不用改动就能在 CUDA 上运行，这里每一级的代价以秒计。没有 GPU 时，显示的是 H100 和 H200 的记录。预测的峰值与实测都只差 8 字节。不计权重的梯度，调度可用的内存分别是全部保留时的一半和四分之一。限制在一半时，这一步在 H200 上多花 15% 的时间，在 H100 上多花 16%；限制在四分之一时，在两块卡上都多花 27%。这时两块卡得到的调度不同，因为各级的用时不同。
#
# </div>

# %% tags=["nbval-ignore-output", "shows-device"]
from course_lib.lessons import on_gpu

on_gpu("03")

# %% [markdown]
# ## 3.19 More exercises / 更多练习
#
# <div lang="en">
#
# **Exercise 6.** Six stages, `Chain.uniform(6, saved_bytes=2)`. Draw a schedule on paper that peaks at 7 or less and needs 11 forwards or fewer, then write it down. The check simulates it.
#
# </div>
# <div lang="zh">
#
# **练习 6。** 六个级，`Chain.uniform(6, saved_bytes=2)`。先在纸上画一个调度，峰值不超过 7，前向不超过 11 次，再把它写成清单。检查程序会模拟它。
#
# </div>

# %% minutes=6
actions = [Forward(0, "input"), Forward(1, "nothing"), ...]
exercises.check_drawn_schedule(actions)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not exercises.check_drawn_schedule.accepted:
    keeps = ["input", "nothing", "input", "nothing", "input"]  # segments of 2, 2, 1 and 1 stages
    actions = [Forward(i, keep) for i, keep in enumerate(keeps)]
    for start, end in ((5, 6), (4, 5), (2, 4), (0, 2)):
        actions += [Forward(i, "all") for i in range(start, end)]
        actions += [Backward(i) for i in reversed(range(start, end))]

exercises.check_drawn_schedule(actions)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# **Exercise 7.** Write `plan(first, stages, room)`, which returns the list of actions that takes the time of `fastest`; `first` is the number of its first stage in the chain. The check simulates your list for the chains of exercise 4, and for the pyramid within 150 MB, where all cuts need 163.
#
# </div>
# <div lang="zh">
#
# **练习 7。** 写出 `plan(first, stages, room)`，返回用时等于 `fastest` 的动作清单；`first` 是其中第一级在链上的编号。检查会在练习 4 的几条链上模拟你的清单，再加上 150 MB 之内的金字塔，而在金字塔上，任何切法都要 163 MB。
#
# </div>


# %% minutes=15
def plan(first, stages, room):
    return []


exercises.check_plan(plan)


# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not exercises.check_plan.accepted:

    def plan(first, stages, room):
        if not stages:
            return []
        for e in range(1, len(stages)):
            if run_on(stages, e, room) == fastest(stages, room):
                ahead = [Forward(first + i, "nothing") for i in range(1, e)]
                later = plan(first + e, stages[e:], room - stages[e - 1].output_bytes)
                earlier = plan(first, stages[:e], room)
                return [Forward(first, "input"), *ahead, *later, *earlier]
        rest = plan(first + 1, stages[1:], room - stages[0].saved_bytes)
        return [Forward(first, "all"), *rest, Backward(first)]


exercises.check_plan(plan)
### END SOLUTION
