# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] slide={"en": "A checkpoint around each layer: the usual choice.\n\n**Can anything beat it?**", "zh": "每层一个检查点，是最常见的选择。\n\n**有什么能胜过它吗？**"}
# # 3 Which ones should we forget? (checkpoint schedules) / 该忘掉哪些？（检查点的调度）
#
# <div lang="en">
#
# In lesson 02 you put a checkpoint around each layer of the course's decoder. **Can any other plan beat these checkpoints?** Layers could share a checkpoint. A checkpoint could keep some results. The compiler could choose what to keep, and a search could look for the best plan.
#
# This lesson measures all these plans on one model, and explains the result with two numbers that you can measure on your model. Then come networks for which another plan is best.
#
# </div>
# <div lang="zh">
#
# 第 02 课里，你给本课程解码器的每一层都加了一个检查点。**有没有比这更好的做法？** 可以让几层合用一个检查点，可以让检查点保留一部分结果，可以让编译器来选择保留什么，也可以写一个搜索，找出最好的方案。
#
# 本课先在同一个模型上把这些做法全部实测一遍，再用两个数来解释结果，这两个数在你自己的模型上也能测出来。然后再看另外几种网络，对它们来说，最好的做法并不是每层一个检查点。
#
# </div>

# %%
from course_lib.teaching import language

language()

# %% [markdown]
# <div lang="en">
#
# **Goals** (120 minutes, in two sittings):
#
# - Decide from two numbers whether another plan beats a checkpoint around each layer of your model.
# - Predict the peak for any division into segments, and write the division with the lowest peak.
# - Give the compiler a memory budget, and check its result.
# - Write the recurrence that finds the fastest schedule within a limit of bytes, and then get below the lowest peak of such schedules.
#
# **What to know before**: lesson 01's meter, and the checkpoint of lesson 02.
#
# </div>
# <div lang="zh">
#
# **目标**（共 120 分钟，分两次学）
#
# - 用两个数判断，你的模型有没有比每层一个检查点更好的做法。
# - 预测任意分段的峰值，写出峰值最低的切法。
# - 给编译器一个内存预算，并检查结果。
# - 写出递推式，在给定的字节数之内找到最快的调度，再设法让峰值低于这些调度能达到的最低峰值。
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
from torch.utils.checkpoint import create_selective_checkpoint_contexts as contexts

from course_lib.lessons.lesson_03 import exercises, figures, own_model
from course_lib.memory import MemoryMeter, symbolic
from course_lib.models import deep_mlp
from course_lib.teaching import predictions, table

# %% [markdown]
# ## 3.1 What beats a checkpoint around each layer? / 什么能胜过每层一个检查点？
#
# <div lang="en">
#
# A chain is a network whose **stages** run in order. The course's decoder is a chain of 18 stages: the embedding, two stages for each of the 8 layers, and the head with the loss. Cuts divide the chain into segments. Each segment except the last gets a checkpoint. (The checkpoint around the embedding does not change the peak.)
#
# </div>
# <div lang="zh">
#
# **级**（stage）是链上的一环。本课程的解码器是一条 18 级的链，即嵌入、8 层中每层的两级，以及最后的输出头与损失。切口把链分成几段，除最后一段外，每段加一个检查点。（嵌入外面的检查点不会改变峰值。）
#
# </div>


# %%
def in_segments(layers, cuts, x, **options):
    options = {"use_reentrant": False, "preserve_rng_state": False, **options}
    for start, end in pairwise(cuts[:-1]):
        x = checkpoint(layers[start:end], x, **options)
    return layers[cuts[-2] :](x)


def layer_cuts(n, group=1):  # embedding, groups of layers (two stages per layer), head
    return [0, *range(1, 2 * n + 1, 2 * group), 2 * n + 1, 2 * n + 2]


print(layer_cuts(8), layer_cuts(8, group=2), sep="\n")

# %% [markdown] slide={"en": "No checkpoint, each layer, pairs of layers, products kept, loss in chunks, compiler.\n\n**Guess first.** Which peak is lowest with 8 layers? With 48?", "zh": "不用检查点、每层一个、两层一组、保留乘积、损失分成小段、编译器的预算。\n\n**先猜**：8 层时哪种峰值最低？48 层时呢？"}
# <div lang="en">
#
# We compare a checkpoint around **each layer** with five other ways:
#
# - **No checkpoint.**
# - **Two layers per checkpoint.**
# - **Products kept:** a selective checkpoint per layer keeps the results of the linear layers.
# - **Loss in chunks:** lesson 02's loss, 128 tokens at a time, and no checkpoint elsewhere.
# - **Compiler's budget:** `torch.compile` chooses what to keep, up to half of the bytes that it usually keeps (section 3.5). The compiler needs real tensors, so we compile only 8 layers. The other ways use symbolic tensors.
#
# **On this page**, a peak counts all live activations, including the model's input. Weights, gradients and optimizer state are not counted. They exist before forward begins, as in every micro-batch after the first (lesson 05).
#
# **Guess first.** Which way has the lowest peak with 8 layers, and which with 48 layers? With 8 layers, which ways add less than 5% to the FLOPs of a step without checkpoints?
#
# </div>
# <div lang="zh">
#
# 除了**每层一个检查点**，还要比较五种做法，每种都做一次前向和一次反向：
#
# - **不用检查点**。
# - **两层合用一个检查点**。
# - **保留乘积**：每层加一个选择性检查点，保留线性层的结果。
# - **损失分小段**：用第 02 课的损失，每个小段（chunk）128 个 token，其余部分不用检查点。
# - **编译器的预算**：由 `torch.compile` 选择保留什么，预算是它平常保留的激活值的一半（3.5 节）。编译器要用真实的张量，所以这种做法只测 8 层，其余做法都用符号张量。
#
# **本课的峰值都这样统计。** 所有存活的激活值都计入，包括模型的输入。权重、梯度和优化器状态不计入，因为本课假设这三者在前向之前就已存在。做梯度累积时，从第二个微批次起正是这种情况（第 05 课）。
#
# **先猜**：8 层时，哪种做法的峰值最低？48 层时又是哪种？8 层时，与不用检查点相比，哪几种做法多花的 FLOPs 不到 5%？
#
# </div>


# %% slide="result"
def ways(n):
    cost = partial(figures.cost_of, own_model.decoder_stages, layers=n)  # (peak, FLOPs)
    keep = partial(contexts, [torch.ops.aten.addmm.default, torch.ops.aten.mm.default])
    return {
        "no checkpoint": cost(in_segments, [0, 2 * n + 2]),
        "each layer": cost(in_segments, layer_cuts(n)),
        "two layers per checkpoint": cost(in_segments, layer_cuts(n, group=2)),
        "products kept": cost(partial(in_segments, context_fn=keep), layer_cuts(n)),
        "loss in chunks": cost(own_model.with_chunked_loss, 128),
    }


eight, deep = ways(8), ways(48)
eight["compiler's budget, 0.5"] = own_model.compiled_cost(0.5)
own_model.draw_ways({8: eight, 48: deep})

# %% [markdown]
# <div lang="en">
#
# With 8 layers, a checkpoint around **each layer** has the lowest peak: 36.7 MB, instead of 195.2 MB without a checkpoint, for 1.21 times the FLOPs. Three ways add only about 2% to the FLOPs. Two of these ways, products kept and the compiler's budget, lower the peak by nearly half. The loss in chunks lowers the peak by 18 MB at both depths, because the logits do not grow with depth. With 48 layers, **two layers per checkpoint** have the lowest peak.
#
# </div>
# <div lang="zh">
#
# 8 层时，峰值最低的是**每层一个检查点**，峰值从 195.2 MB 降到 36.7 MB，FLOPs 是不用检查点时的 1.21 倍。有三种做法只多花约 2% 的 FLOPs，其中保留乘积和编译器的预算让峰值降低了将近一半。损失分小段在两种深度下都让峰值降低 18 MB，因为它只缩小 logits，而 logits 的大小与模型的深度无关。48 层时，峰值最低的变成**两层合用一个检查点**。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# Why are pairs of layers better in the deeper model? Let a layer keep $A$ bytes for its backward, and its input take $B$ bytes. With $L$ layers in groups of $g$, the step keeps the inputs of $L / g$ groups, and recomputes one whole group. This takes $\frac{L}{g} B + g A$ bytes. Pairs keep $\frac{L}{2} B$ fewer bytes for inputs than single layers, but $A$ more bytes for the recomputed group. So pairs need less memory **from $L = 2 A / B$ layers on**. In this decoder $A$ is 20 times $B$, which gives 40 layers.
#
# The table shows one layer of each of two models, in bf16, for 4096 tokens:
#
# </div>
# <div lang="zh">
#
# 为什么模型变深以后，两层一组反而更好？设一层为自己的反向保存 $A$ 字节，它的输入占 $B$ 字节。把 $L$ 层按每组 $g$ 层划分，就要保留 $L / g$ 组的输入，并重计算一整组，一共占 $\frac{L}{g} B + g A$ 字节。与每层一组相比，两层一组保留的输入少 $\frac{L}{2} B$，重计算的那一组却多出一个 $A$。所以**从 $L = 2 A / B$ 层起**，两层一组更省内存。在这个解码器里，$A$ 是 $B$ 的 20 倍，因此是从 40 层起。
#
# 下表取两个实际的模型，各看其中一层，精度为 bf16，输入是一条 4096 个 token 的序列：
#
# </div>

# %% jupyter={"source_hidden": true} slide="result"
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
# In both models, pairs of layers save memory from about 49 layers on. (In the 8B model, a layer keeps 825 MB, including 134 MB for float32 copies in norms. Fused norms make no such copies, so pairs need fewer layers.) The 8B model has only 32 layers, too few for pairs. The 70B model has 80 layers, so pairs lower the peak if the gradients exist before backward, as on this page, or are sharded (lesson 08).
#
# In other training steps the gradients arrive during backward. In these two models a layer's gradients take far more bytes than its input, so the peak is at the end of backward, after the inputs are released. Grouping does not lower this peak.
#
# </div>
# <div lang="zh">
#
# 在这两个模型里，两层一组都要从大约 49 层起才更省内存。（8B 模型的一层保存 825 MB，其中 134 MB 是 Hugging Face 的归一化留下的 float32 副本。改用融合的归一化就没有这些副本，更少的层就够了。）8B 模型只有 32 层，两层一组不划算。70B 模型有 80 层，所以，如果梯度在反向之前就已存在（本课就是这样），或者是分片的（第 08 课），两层一组就能降低峰值。
#
# 在其他训练步里，梯度在反向中陆续产生。这两个模型里，一层的梯度都远大于它的输入，所以峰值出现在反向快结束时。那时各组的输入都已释放，因此分组并不能降低峰值。
#
# </div>

# %% [markdown]
# ## 3.2 How many segments? / 切成几段？
#
# <div lang="en">
#
# If each layer keeps few bytes, groups of layers save memory even in shallow networks. Such a group is a **segment**. Up to section 3.5, the network is a chain of 100 equal layers, each a Linear and a GELU, with activations of 1000 × 25 numbers. A boundary between segments keeps one activation, $B$ = 100,000 bytes. A layer keeps $A = 2B$, because the Linear and the GELU each keep their input.
#
# `checkpoint_sequential` cuts such a network into $k$ segments, and puts a checkpoint around each segment except the last. Do the gradients stay the same?
#
# </div>
# <div lang="zh">
#
# 如果每层保存的字节很少，那么层数不多时，分组也能省内存。这样的一组叫做一**段**。从这里到 3.5 节，网络都是同一条链，由 100 个相同的层组成。每层是 Linear 加 GELU，激活值是 1000 × 25 个数。两段之间的边界要保存一份激活值，即 $B$ = 100,000 字节。Linear 和 GELU 各保存自己的输入，所以一层保存 $A = 2B$。
#
# `checkpoint_sequential` 把这样的网络切成 $k$ 段，除最后一段外，每段加一个检查点。这样算出的梯度与不切时相等吗？
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
# How does the peak depend on the number $k$ of segments? The inputs of $k$ segments take $k B$. The $L/k$ layers of one segment add $\frac{L}{k} A - B$, because the first layer's input is the segment's input, which is counted already. Backward adds the gradients of one layer's output and input, together $2 B$. The sum $k B + \frac{L}{k} A + B$ is a smooth curve. **Guess first:** will the measured points be smooth, too?
#
# </div>
# <div lang="zh">
#
# 峰值随段数 $k$ 怎样变化？$k$ 段的输入占 $k B$。做反向的那一段有 $L/k$ 层，这些层还要保存 $\frac{L}{k} A - B$，因为第一层的输入就是这一段的输入，已经计入 $k B$。反向中还有两份梯度，一份是某一层的输出的梯度，另一份是这一层的输入的梯度，共 $2 B$。三项之和 $k B + \frac{L}{k} A + B$ 是一条平滑的曲线。**先猜**：测得的点也会连成平滑的曲线吗？
#
# </div>


# %% slide="result"
ks = [1, 4, 10, 14, 17, 20, 25, 26, 33, 34, 50, 51, 100]
sweep = {k: figures.peak_and_flops(framework, hundred, k)[0] for k in ks}
figures.draw_sweep(100, sweep, marked=(50, 51))

# %% [markdown]
# <div lang="en">
#
# The points do not form a smooth curve. `checkpoint_sequential` puts $\lfloor L/k \rfloor$ layers into each segment except the last, and **all remaining layers into the last**. For $k = 51$, fifty segments have one layer each, and the last segment has fifty. While a segment runs backward, the activations of all its layers are in memory.
#
# **Exercise 1.** Cuts form a list such as `[0, 40, 70, 100]`. While segment $j$ (counted from 0) runs backward, which segments' inputs are kept, how many bytes do its layers keep, and which gradients exist? Count every tensor once. Return the peak in bytes, from `A` and `B`.
#
# </div>
# <div lang="zh">
#
# 测得的点没有连成平滑的曲线。`checkpoint_sequential` 给其他各段都是 $\lfloor L/k \rfloor$ 层，**余下的全归最后一段**。$k = 51$ 时，有五十段各一层，最后一段却有五十层。一段做反向时，整段的激活值都在内存里。
#
# **练习 1。** 切口写成列表，例如 `[0, 40, 70, 100]`。第 $j$ 段（从 0 数起）做反向时，还保留着哪几段的输入？这一段的各层保存多少字节？内存里还有哪些梯度？每个张量只算一次。用 `A` 和 `B` 算出峰值，返回字节数。
#
# </div>


# %% minutes=10
def predicted_peak(cuts):
    sizes = [end - start for start, end in pairwise(cuts)]
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
# The measured peaks are 8 bytes above the predictions, which leave out the loss and its gradient. In the peak formula for equal segments, $k B$ grows with $k$, and $\frac{L}{k} A$ falls.
#
# **Exercise 2.** For which number of segments $k$ is the sum of these two terms least? Write a formula for any $L$, $A$ and $B$. The result may be fractional, or rounded to the whole number with the smaller sum.
#
# </div>
# <div lang="zh">
#
# 实测比预测多 8 字节，因为预测没有计入损失和它的梯度。现在假设各段一样长。峰值公式中的 $k B$ 随 $k$ 增大，$\frac{L}{k} A$ 随 $k$ 减小。
#
# **练习 2。** 段数 $k$ 取何值时，这两项之和最小？请写成对任意的 $L$、$A$、$B$ 都成立的公式，结果不必是整数。如果要取整，就取使总和较小的那个整数。
#
# </div>


# %% minutes=5
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
# The sum is least for $k^* = \sqrt{L \cdot A / B}$, where the peak is $2 \sqrt{L A B} + B$. The well-known $\sqrt L$ is right only if $A = B$. Here $A = 2B$, so 14 segments are best, not 10. The formula's peak with 14 segments is $29.3 B$. With 10 segments it is only a little higher, $31 B$, because the curve is flat near its minimum. But `checkpoint_sequential` with 14 segments peaks at $33 B$, because its last segment is longer.
#
# For the 32 layers of Llama 3 8B, $k^* = \sqrt{32 \cdot 24.6} = 28$, nearly one segment per layer.
#
# </div>
# <div lang="zh">
#
# 段数为 $k^* = \sqrt{L \cdot A / B}$ 时，两项之和最小，此时的峰值是 $2 \sqrt{L A B} + B$。常说的 $\sqrt L$，只有当 $A = B$ 时才对。这里 $A = 2B$，所以最好的段数是 14，不是 10。按公式，分 14 段时峰值是 $29.3 B$，分 10 段时是 $31 B$，差别很小，因为曲线在最低点附近很平。但 `checkpoint_sequential` 分 14 段时，峰值是 $33 B$，因为最后一段更长。
#
# 对 Llama 3 8B 的 32 层，$k^* = \sqrt{32 \cdot 24.6} = 28$，几乎就是一层一段。
#
# </div>

# %% [markdown] slide={"en": "At the last segment all inputs are kept; at the first, only its own.\n\nHow long may the first be? **Cut 100 layers on paper.**", "zh": "最后一段做反向时，各段的输入都留着。第一段做反向时，只留着它自己的输入。\n\n那么第一段可以有多长？**先在纸上切 100 层。**"}
# ## 3.4 Equal segments are not the best / 各段相等并不是最好的
#
# <div lang="en">
#
# While the **last** segment runs backward, the inputs of all segments are kept. While the **first** segment runs backward, all other inputs have been released, so the first segment can be longer. Let every segment need the same $R$ bytes, not counting the last term $B$ of section 3.2's sum. A segment that follows $j$ others has $R - (j + 1) B$ bytes left for its layers.
#
# Each segment has $B / A$ fewer layers than the segment before it. Drawn as columns, the segments form a triangle that is $R / B$ segments long and $R / A$ layers high. The triangle's area is the number of layers:
#
# $$L \approx \frac{R^2}{2 A B}, \qquad R \approx \sqrt{2 L A B}$$
#
# Equal segments need $2 \sqrt{L A B}$, and $R$ is $1 / \sqrt 2$ times that.
#
# **Exercise 3.** The formula gives fractional segment sizes, but segments have whole numbers of layers. Write `tapered(depth, kept)`, where a layer keeps `kept` times the bytes of a boundary, $A$ = `kept` · $B$. `tapered` returns cuts, such as `[0, 4, 6, 7]` for segments of 4, 2 and 1 layers. Your cuts must have the lowest possible peak.
#
# </div>
# <div lang="zh">
#
# **最后**一段做反向时，各段的输入都还保留着。**第一**段做反向时，其他各段的输入都已释放，所以第一段可以更长。因此，我们让每一段做反向时都占同样的 $R$ 字节（不计 3.2 节公式末尾的 $B$）。如果某一段之前还保留着 $j$ 份输入，那么留给这一段各层的是 $R - (j + 1) B$ 字节。
#
# 每往后一段，段长就减少 $B / A$ 层。把每一段的各层画成一列，各列就排成一个三角形，底边长 $R / B$ 段，高 $R / A$ 层，三角形的面积就是层数：
#
# $$L \approx \frac{R^2}{2 A B}, \qquad R \approx \sqrt{2 L A B}$$
#
# 等分时需要 $2 \sqrt{L A B}$，而 $R$ 只有这个值的 $1 / \sqrt 2$。
#
# **练习 3。** 公式给出的段长带有小数，而一段的层数必须是整数。写出 `tapered(depth, kept)`，其中一层保存的字节是一个边界的 `kept` 倍，即 $A$ = `kept` · $B$。`tapered` 返回切口，例如 `[0, 4, 6, 7]` 表示各段有 4、2、1 层。要求任何切法的峰值都不比你的更低。
#
# </div>


# %% minutes=13
def tapered(depth, kept=2):
    return [0, depth]


exercises.check_tapered(tapered)


# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not exercises.check_tapered.accepted:

    def tapered(depth, kept=2):
        for room in count(kept + 1):  # in units of B
            sizes = [(room - inputs) // kept for inputs in range(1, room)]
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
figures.draw_budgets({name: arms[name] for name in ("10 equal segments", "tapered")})

# %% [markdown]
# <div lang="en">
#
# The tapered cut lowers the peak from $31 B$ to $22 B$. The FLOPs grow by 2%, because only the last segment does not run forward again, and this segment is shorter. In the picture, the layers of the tapered cut form the triangle. We derived this cut, and found it in no paper.
#
# </div>
# <div lang="zh">
#
# 峰值从 $31 B$ 降到 $22 B$。FLOPs 增加 2%，因为最后一段变短了，而只有最后一段不必再做一遍前向。在图上，渐短切法的各层正好排成那个三角形。这种切法是我们推导出来的，没有在论文里见过。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **End of the first sitting** (60 minutes). You can predict the peak for any segments, and your `tapered` finds the best cuts of equal layers. In the second sitting, you compare such cuts with a compiler and with your own search, and finally get below $22 B$.
#
# </div>
# <div lang="zh">
#
# **第一次学习到此结束**（60 分钟）。现在，你能预测任意分段的峰值，你的 `tapered` 也能在各层相同时找到最好的切法。在第二次学习里，你要把编译器和自己写的搜索分别与这种切法比较，最后再把峰值降到 $22 B$ 以下。
#
# </div>

# %% [markdown] slide={"en": "The compiler's default budget is 1, and 0 saves only the inputs.\n\n**Guess first.** The saved bytes fall with the budget. Does the peak?", "zh": "编译器的预算默认是 1。预算为 0 时，只保存输入。\n\n**先猜**：预算越小，保存的字节越少。峰值也会降低吗？"}
# ## 3.5 A budget for the compiler / 给编译器一个预算
#
# <div lang="en">
#
# `torch.compile` traces forward and backward as one graph and cuts the graph in two. The results that cross the cut are saved, and backward computes the other results again. A **budget**, a number between 0 and 1, limits the saved bytes. The default, 1, minimizes the run time. With 0, only the graph's inputs are saved, as with one checkpoint around everything. With 0.5, the compiler saves the inputs and at most half of the other bytes that it saves with 1.
#
# Torch 2.13 has a prototype context manager for the budget. The context must cover the whole forward pass of a compiled graph (section 3.16). Section 3.1 used the older private setting, `torch._functorch.config.activation_memory_budget`.
#
# </div>
# <div lang="zh">
#
# `torch.compile` 把前向和反向追踪成一张图，再切成两半。跨过切口的结果要保存，其余的结果在反向里重新计算。**预算**是 0 到 1 之间的一个比例，限制保存的字节。默认值是 1，此时运行时间最短。预算为 0 时只保存图的输入，相当于给整个模型加一个检查点。预算为 0.5 时，除了输入，还可以保存其他结果，但这些结果的字节数至多是预算为 1 时的一半。
#
# torch 2.13 有一个上下文管理器可以设置预算，目前还是原型。这个上下文必须包住一张编译图的整个前向（3.16 节）。3.1 节用的是更早的私有设置 `torch._functorch.config.activation_memory_budget`。
#
# </div>


# %% slide="code"
def in_region(module, x, budget):
    def forward(x):
        with torch.autograd.graph.region_activation_memory_budget(budget):
            return module(x)

    torch.compiler.reset()  # discards graphs compiled for other budgets
    run = torch.compile(forward, backend="aot_eager")
    run(x).sum().backward()  # the first call compiles and creates gradients
    return run


# %% [markdown]
# <div lang="en">
#
# The backend `aot_eager` runs both graphs with PyTorch's usual kernels. On a GPU, omit `backend`. The default backend generates kernels, and reorders operators to lower the peak (not run here).
#
# **Guess first.** On the first 16 layers of our chain the saved bytes fall with the budget. Does the peak fall, too?
#
# </div>
# <div lang="zh">
#
# `aot_eager` 后端用 PyTorch 平常的核函数来运行这两张图。在 GPU 上不必写 `backend`，默认的后端会生成核函数，还会调整算子的顺序以降低峰值（这里没有运行）。
#
# **先猜**：在我们这条链的前 16 层上，预算越小，保存的字节越少。峰值也会随之降低吗？
#
# </div>

# %% slide="result"
layers16, tried = hundred[:16], {f"`{b}`": (in_region, b) for b in (1, 0.75, 0.5, 0.25, 0)}
tried["`0.25`, private setting"] = own_model.compile_privately, 0.25
own_model.budget_table(layers16, x, tried)

# %% [markdown]
# <div lang="en">
#
# The context manager and the private setting agree. At a budget of 0.75 the peak falls and the FLOPs do not grow, because only GELUs run again, and FLOPs count only matrix products. With smaller budgets the saved bytes fall further, but the peak **rises**: at 0 it is as high as with everything kept. The compiler's solver considers the bytes of each result and the FLOPs to recompute it, but not how long a recomputed result stays in memory. At 0.25, the solver keeps the results of the first seven Linears and nothing of the last nine layers. So backward begins by recomputing these nine layers at once. Section 3.16 halves the peak with another choice.
#
# On our decoder, a budget of 0.5 worked well. So start with 0.5, and measure your model's peak, because fewer saved bytes do not mean a lower peak. Checkpointed in four segments, the same 16 layers peak at $13 B$ (section 3.13).
#
# </div>
# <div lang="zh">
#
# 改用私有设置，得到的数相同。预算为 0.75 时，峰值降低，FLOPs 却不变，因为重计算的只有 GELU，而 FLOPs 只计矩阵乘法。预算再小一些，保存的字节继续减少，峰值却**升高**，预算为 0 时与全部保留时一样高。负责选择的求解器会考虑每个结果占多少字节、重计算要多少 FLOPs，却不考虑重计算出来的结果会在内存里留多久。预算为 0.25 时，求解器保留前七个 Linear 的结果，最后九层什么也不保留，于是反向一开始就要把这九层一起重计算。3.16 节会展示求解器的选择，并把峰值减半。
#
# 在解码器上，预算 0.5 是个好选择。换成你的模型，不妨也从 0.5 开始，但一定要实测峰值，因为保存的字节少，不等于峰值低。这 16 层如果切成四段，再加检查点，峰值是 $13 B$（3.13 节）。
#
# </div>

# %% [markdown] slide={"en": "The stages differ. Keep **all** of the first one, or **run on**, keep a later input, and come back.\n\nWhich is faster?", "zh": "各级不同。是**全部保留**第一级，还是**往前跑**，保留后面某一级的输入，再回头？\n\n哪种更快？"}
# ## 3.6 Stages that differ: write the search / 各级不同：写一个搜索
#
# <div lang="en">
#
# In many networks the stages differ, and none of our formulas gives the best cuts. A **schedule** is a list of forwards and backwards in the order in which they run. It also says what each forward keeps: `"all"` that its backward needs, its `"input"` only, or `"nothing"`. `simulate` counts the bytes and the time of a schedule, and rejects a schedule that cannot run.
#
# </div>
# <div lang="zh">
#
# 许多网络的各级并不相同，这时前面的公式都给不出最好的切法。**调度**是一张清单，按运行的顺序列出各次前向和反向，并写明每次前向保留什么。一次前向可以保留反向所需的全部（`"all"`），可以只保留输入（`"input"`），也可以什么都不保留（`"nothing"`）。`simulate` 统计一个调度的字节和时间，如果调度无法运行，就会报错。
#
# </div>

# %% slide="both"
from course_lib.schedule import Backward, Chain, Forward, simulate, store_all

three = Chain.uniform(3, saved_bytes=2)
again = [Forward(0, "input"), Forward(1, "nothing"), Forward(2, "all"), Backward(2)]
again += [Forward(0, "all"), Forward(1, "all"), Backward(1), Backward(0)]
lists = {"all stages saved": store_all(three), "the first two run again": again}
costs = {name: simulate(actions, three) for name, actions in lists.items()}
table(["schedule", "peak", "time"], [(name, c.peak_bytes, c.time) for name, c in costs.items()])

# %% [markdown]
# <div lang="en">
#
# The second schedule runs stages 0 and 1 forward twice to lower the peak.
#
# Let $T_{i..n}(R)$ be the least time for forward and backward of stages $i$ to $n$ within $R$ bytes. The input of stage $i$ exists already and is not counted. We assume that schedules never discard a kept tensor before the backward that needs it, and that no output is larger than the previous stage's output. Stage $i$ keeps $A_i$ bytes, its output takes $B_i$ bytes, its forward takes time $f_i$, and its backward takes time $g_i$. A schedule can begin in two ways:
#
# - **Keep all** of stage $i$. These $A_i$ bytes and the output's gradient must fit: $A_i + B_i \le R$. The time is $f_i + T_{i+1..n}(R - A_i) + g_i$.
# - **Run on** to a later stage $e$, keep its input, and come back to $i$ when stages $e$ to $n$ are done. This needs the forwards of stages $i$ to $e - 1$. Which two parts remain, and how many bytes can each part use?
#
# The least of these times, over both ways and every $e$, is $T_{i..n}(R)$.
#
# </div>
# <div lang="zh">
#
# 第二个调度让第 0、1 级的前向运行两遍，换来更低的峰值。
#
# 设 $T_{i..n}(R)$ 是在 $R$ 字节之内，做完第 $i$ 到第 $n$ 级的前向和反向所需的最短时间。此时第 $i$ 级的输入已经存在，不计入 $R$。我们假设，调度保留的每个张量都一直留到反向用完它为止，并且每一级的输出都不大于前一级的输出。第 $i$ 级保存 $A_i$ 字节，输出占 $B_i$ 字节，前向用时 $f_i$，反向用时 $g_i$。调度的开头有两种做法：
#
# - **全部保留**第 $i$ 级。这 $A_i$ 字节与输出的梯度必须同时放得下，即 $A_i + B_i \le R$。用时是 $f_i + T_{i+1..n}(R - A_i) + g_i$。
# - **往前跑**到后面的某一级 $e$，保留第 $e$ 级的输入，等第 $e$ 到第 $n$ 级做完之后，再回到第 $i$ 级。往前跑要做第 $i$ 到第 $e - 1$ 级的前向。这之后还剩哪两部分要做？每一部分有多少字节可用？
#
# 把两种做法和每一个 $e$ 都试过，其中最短的时间就是 $T_{i..n}(R)$。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **Exercise 4.** The code computes the first way's time and the minimum. For the second way, which runs on to stage `e`, write the times of the two remaining parts. `stages` is a tuple that begins with stage $i$: `stages[:e]` have run forward, and `stages[e:]` come later. A stage has `forward_time`, `saved_bytes` ($A_i$) and `output_bytes` ($B_i$). A stage's output is the next stage's input. On four chains, the check compares your times with the best of all such schedules.
#
# </div>
# <div lang="zh">
#
# **练习 4。** 第一种做法和取最小值的代码已经写好。第二种做法往前跑到第 `e` 级，请写出剩下的两部分各要多少时间。`stages` 是一个元组，从第 $i$ 级开始，所以 `stages[:e]` 是已经做过前向的级，`stages[e:]` 是后面的级。每一级有 `forward_time`、`saved_bytes`（$A_i$）和 `output_bytes`（$B_i$），它的输出就是下一级的输入。检查会在四条链上穷举所有这类调度，把最短的时间与你的结果比较。
#
# </div>


# %% minutes=10
def run_on(stages, e, room):
    ahead = sum(stage.forward_time for stage in stages[:e])
    later, earlier = inf, inf
    return ahead + later + earlier


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
        earlier = fastest(stages[:e], room)
        return ahead + later + earlier

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

# %% [markdown]
# ## 3.7 Where does the search pay? / 搜索在哪里划算？
#
# <div lang="en">
#
# While stages $e$ to $n$ run, the kept input takes $B_{e-1}$ of the $R$ bytes. Then this input is released, so stages $i$ to $e - 1$ can use all of $R$ again.
#
# The library's `optimal` applies your recurrence to long chains, and returns the schedule itself. `optimal` also checks that each forward fits into the remaining bytes, so it handles chains in which a stage's output is larger than its input. `ScheduledSequential` runs a schedule under autograd (section 3.14). Here the limit is half of the decoder's peak without checkpoints. Are the gradients equal, and is the peak as simulated?
#
# </div>
# <div lang="zh">
#
# 做第 $e$ 到第 $n$ 级时，保留的那份输入要占去 $R$ 中的 $B_{e-1}$ 字节。做完之后，这份输入就释放了，所以第 $i$ 到第 $e - 1$ 级又可以用全部的 $R$。
#
# 库里的 `optimal` 就是你的递推式，但它能用于长链，并且返回调度本身。它还检查每次前向时剩余的字节够不够用，所以即使有的级输出比输入大，也能处理。`ScheduledSequential` 在 autograd 里运行一个调度（3.14 节）。下面把解码器的峰值限制在不用检查点时的一半。梯度还相等吗？峰值与模拟的一样吗？
#
# </div>

# %% slide="result"
from course_lib.lessons.lesson_03 import frontiers
from course_lib.schedule import ScheduledSequential, frontier, optimal


def scheduled(layers, schedule, x):
    return ScheduledSequential(layers, schedule)(x)


with symbolic():
    chain = Chain.profile(*own_model.decoder_stages())
halved = optimal(chain, simulate(store_all(chain), chain).peak_bytes // 2)
half = figures.cost_of(own_model.decoder_stages, scheduled, halved)
stages, inputs = own_model.decoder_stages()
runs = (in_segments, [0, 18]), (scheduled, halved)
equal = figures.equal_gradients(stages, inputs, *runs)
table(["gradients equal"], [[equal]])

# %% slide="result"
predictions([("half", simulate(halved, chain).peak_bytes, half[0])], unit="bytes")

# %% [markdown] slide={"en": "The schedule for half the bytes takes 1.17 times the FLOPs.\n\n**Guess first.** Are the checkpoints and the compiler's budget of section 3.1 above the frontier, or below it?", "zh": "字节减半的调度，FLOPs 是基线的 1.17 倍。\n\n**先猜**：3.1 节的各种检查点和编译器的预算，在前沿的上方还是下方？"}
# <div lang="en">
#
# The gradients are equal, and the measured peak is 8 bytes above the simulated peak. With half the bytes, the step takes 1.17 times the baseline's FLOPs. `frontier` finds the best schedules for all budgets. These schedules form the **Pareto frontier**: no schedule of this kind beats one of them in both bytes and time.
#
# **Guess first:** are the checkpoints and the compiler's budget of section 3.1 above the decoder's frontier, or below it?
#
# </div>
# <div lang="zh">
#
# 梯度相等，实测的峰值比模拟的多 8 字节。字节减半时，FLOPs 是基线的 1.17 倍。`frontier` 一次算出各种预算下最快的调度，它们构成**帕累托前沿**。这类调度里，如果一个调度用的字节比前沿上的某一点少，用时就一定比那一点多。
#
# **先猜**：3.1 节的各种检查点和编译器的预算，在解码器的前沿的上方还是下方？
#
# </div>

# %% jupyter={"source_hidden": true} slide="result"
products = [2 * 1024 * 256 * 256, 2 * 1024 * 1024 * 256]  # FLOPs of each stage's last product
finer = frontiers.frontier_with_early_stop(chain, [0, *products * 8, 0])
lines = {"frontier": frontier(chain), "frontier with early stop": finer}
arms = {"optimal (run)": ({"half": half}, "o", "#228833")}
names = ("each layer", "two layers per checkpoint", "products kept")
arms["checkpoints (run)"] = ({name: eight[name] for name in names}, "D", "#AA3377")
arms["compiler's budget, 0.5"] = ({0.5: eight["compiler's budget, 0.5"]}, "^", "#4477AA")
title = "Products kept and the compiler's budget lie below both frontiers of whole stages"
frontiers.draw_frontier(title, lines, arms, xlim=(20, 205))

# %% [markdown] slide={"en": "On the decoder the search loses against the compiler.\n\nAnd on a pyramid, whose stages shrink from 32 to 1 MB?", "zh": "在解码器上，搜索输给了编译器。\n\n那么在金字塔上呢？它的各级从 32 MB 缩小到 1 MB。"}
# <div lang="en">
#
# **On this transformer the search loses.** At a peak of 104.9 MB, the compiler's budget takes 1.02 times the baseline's FLOPs, and the search takes 1.16 times. The compiler and "products kept" recompute single operators, but the search recomputes whole stages. Even a checkpoint around each layer lies below the frontier. Such checkpoints take 1.21 times the FLOPs. At the same peak the search takes 1.31 times, because a checkpoint's recomputation stops early (lesson 02) and skips each segment's last matrix product. A search that can also stop early finds the second frontier.
#
# Now take a pyramid, a chain of 12 stages whose outputs shrink from 32 MB to 1 MB, as in a convolutional network.
#
# </div>
# <div lang="zh">
#
# **在这个 Transformer 上，搜索输给了编译器。** 峰值为 104.9 MB 时，用编译器的预算，FLOPs 只有基线的 1.02 倍，用搜索却要 1.16 倍。这是因为编译器和“保留乘积”能重计算单个算子，而搜索只能重计算整个级。就连每层一个检查点也在前沿下方。它只要 1.21 倍的 FLOPs，而峰值相同时，前沿要 1.31 倍。这是因为检查点的重计算会提前终止（第 02 课），每段都省去最后一次矩阵乘法。如果允许搜索也提前终止，得到的就是图上的第二条前沿。
#
# 再看一座“金字塔”，也就是一条 12 级的链，像卷积网络那样，各级的输出从 32 MB 缩小到 1 MB。
#
# </div>

# %% slide="result"
frontiers.draw_cuts({"the decoder, 18 stages": chain, "a pyramid, 12 stages": exercises.pyramid()})

# %% [markdown]
# <div lang="en">
#
# **On the pyramid the search wins.** No cuts of the pyramid need less than 163 MB. The search reaches 131 MB, for 1.25 times the baseline's time. On the decoder, at peaks below 81 MB, the best cuts lie on the frontier. Above 81 MB, they need at most 9% more bytes than the search. So a loop of checkpoints can replace the search down to 35 MB. Only the search gets lower, to 27 MB, for 1.68 times the baseline's time.
#
# </div>
# <div lang="zh">
#
# **在金字塔上，搜索赢了。** 任何切法都至少要 163 MB，而搜索能把峰值降到 131 MB，时间是基线的 1.25 倍。在解码器上，峰值低于 81 MB 时，最好的切法就在前沿上，高于 81 MB 时，也最多比搜索多用 9% 的字节。所以，只要峰值不低于 35 MB，在循环里加检查点就能代替搜索。要降到更低，才用得着搜索，它能降到 27 MB，时间是基线的 1.68 倍。
#
# </div>

# %% [markdown] slide={"en": "For 100 layers and one extra forward pass, 22 B is optimal in the search.\n\n**Now beat it.**", "zh": "根据搜索，100 层、只多做一次前向时，22 B 就是最优。\n\n**现在请胜过它。**"}
# ## 3.8 Now beat 22 / 现在请胜过 22
#
# <div lang="en">
#
# In the 100 layers of Linear and GELU, your tapered cut peaks at $22 B$. Does any schedule of section 3.6's kind have a lower peak in the same time? If a layer's forward takes 1 unit of time and its backward 2 units, the step takes 300 units without checkpoints. The tapered cut takes 399 units, because 99 layers run forward twice.
#
# </div>
# <div lang="zh">
#
# 用你的渐短切法，100 层 Linear 加 GELU 的峰值是 $22 B$。在 3.6 节的那类调度里，有没有一种调度与渐短切法用时相同，峰值却更低？设一层的前向用时 1，反向用时 2，那么不用检查点时，一步共用时 300。渐短切法有 99 层的前向要做两遍，所以用时 399。
#
# </div>

# %%
links = Chain.uniform(100, saved_bytes=2)  # in units of B
min(cost.peak_bytes for cost in frontier(links) if cost.time <= 300 + 99)

# %% [markdown]
# <div lang="en">
#
# No. Among these schedules **$22 B$ is optimal**. But this holds only if a schedule treats each layer as one stage.
#
# **Exercise 5.** Get below $22 B$ with checkpoints inside the segments. `inside` runs the layers of one segment, and each layer is a pair of Linear and GELU. How can a layer keep $B$ instead of $2 B$ without additional matrix products? Which cuts are then the best? In `inside`, pass `use_reentrant=False, preserve_rng_state=False` to `checkpoint`, because `options` is local to `nested`. The gradients must be equal, and each Linear must run forward at most twice. The check also tries a shorter and narrower chain.
#
# </div>
# <div lang="zh">
#
# 没有。在这类调度里，**$22 B$ 就是最优**。不过，这个最优有一个前提，即调度把一层当作一级。
#
# **练习 5。** 请在段内再加检查点，把峰值降到 $22 B$ 以下。`inside` 运行一段里的各层，每一层是一对 Linear 和 GELU。怎样才能既不多做矩阵乘法，又让一层只保存 $B$ 而不是 $2B$？这时最好的切法又是什么？`options` 是 `nested` 的局部变量，所以在 `inside` 里调用 `checkpoint` 时，要自己传入 `use_reentrant=False, preserve_rng_state=False`。梯度必须相等，每个 Linear 的前向最多运行两次。检查还会换一条更短、更窄的链再试。
#
# </div>


# %% minutes=15
def inside(layers, x):
    return layers(x)


def nested(layers, x):
    cuts, options = [0, len(layers)], {"use_reentrant": False, "preserve_rng_state": False}
    for start, end in pairwise(cuts[:-1]):
        x = checkpoint(inside, layers[start:end], x, **options)
    return inside(layers[cuts[-2] :], x)


exercises.check_nested(nested)


# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not exercises.check_nested.accepted:

    def inside(layers, x):
        options = {"use_reentrant": False, "preserve_rng_state": False}
        first, *others, last = [operator for layer in layers for operator in layer]
        x = first(x)
        for gelu, linear in zip(others[::2], others[1::2], strict=True):
            x = checkpoint(nn.Sequential(gelu, linear), x, **options)
        return last(x)

    def nested(layers, x):
        cuts, options = tapered(len(layers), 1), {"use_reentrant": False}
        for start, end in pairwise(cuts[:-1]):
            x = checkpoint(inside, layers[start:end], x, preserve_rng_state=False, **options)
        return inside(layers[cuts[-2] :], x)


exercises.check_nested(nested)
### END SOLUTION

# %% jupyter={"source_hidden": true} slide="result"
rows = []
for name, (run, how) in {"tapered": (in_segments, tapered(100)), "nested": (None, None)}.items():
    run = run or (lambda layers, _, x: nested(layers, x))
    equal = figures.equal_gradients(hundred, x, (in_segments, [0, 100]), (run, how))
    peak, flops = figures.peak_and_flops(run, hundred, how)
    rows.append((name, equal, round(peak / B, 2), round(flops / once, 3)))
table(["cut", "gradients equal", "measured (units of B)", "FLOPs (× baseline)"], rows)

# %% [markdown] slide={"en": "**A proof of optimality holds only under its assumptions.**\n\n22 B was optimal for whole layers. Nested checkpoints: 17 B, at the same FLOPs.", "zh": "**最优性的证明只在它的假设之下成立。**\n\n以整层为单位，22 B 是最优。嵌套的检查点：17 B，FLOPs 相同。"}
# <div lang="en">
#
# The peak falls to $17.03 B$ at the same 1.331 times the baseline's FLOPs, and the gradients are equal to the last bit. Each inner checkpoint contains a GELU and the next Linear. The checkpoint keeps only its input, the output of the Linear before the GELU, so a layer keeps $1 B$. In backward only the GELU runs again, because early stop skips the Linear, so no matrix product is added. The best cuts give the first segment 14 layers and the last segment 1.
#
# **A proof of optimality holds only under its assumptions.** The proof for $22 B$ considers only whole layers.
#
# </div>
# <div lang="zh">
#
# 峰值降到 $17.03 B$，FLOPs 同样是基线的 1.331 倍，梯度逐比特相等。每个内层检查点包住一个 GELU 和下一个 Linear，只保存 GELU 的输入，也就是前一个 Linear 的输出，所以每层保存 $1 B$。反向时只有 GELU 再运行一次，因为提前终止省去了 Linear，所以没有多出矩阵乘法。最好的切法里，第一段有 14 层，最后一段只有 1 层。
#
# **最优性的证明只在它的假设之下成立。** 证明 $22 B$ 最优时，假设了调度以整层为单位。
#
# </div>

# %% [markdown]
# ## 3.9 In your own code / 实际怎么写
#
# <div lang="en">
#
# | purpose | code | run? |
# |---|---|---|
# | each layer, Hugging Face | `model.activation_checkpointing_enable()` | run, lesson 02 |
# | every second layer, Hugging Face | `model.activation_checkpointing_enable(every_n_layers=2)` | run, below |
# | equal segments | `checkpoint_sequential(layers, k, x, use_reentrant=False)` | run, 3.2 |
# | any segments | `checkpoint(layers[i:j], x, use_reentrant=False)` in a loop | run, 3.1 |
# | a budget for the compiler | `with torch.autograd.graph.region_activation_memory_budget(0.5):` in the compiled function | run, 3.5, with another backend |
# | the same, by the older private setting | `torch._functorch.config.activation_memory_budget = 0.5`, then `torch.compile(model)` | run, 3.5, with another backend |
# | the same, torchtitan | activation checkpoint mode `"memory_budget"` | not run |
# | a byte budget, your recurrence: rotor | `chain = rotor.Checkpointable(layers)`, `chain.measure(x)`, `chain.compute_sequence(limit)` | not run |
# | the same for any graph: Rockmate | `rockmate.Rockmate(model, x, limit)` | not run |
# | revolve, and its relatives | `checkpoint_schedules.Revolve(steps, slots)` | not run; revolve itself, 3.15 |
# | groups of N layers, Megatron-LM | `--recompute-granularity full --recompute-method uniform --recompute-num-layers N` | flags not run; the same groups run, 3.1 |
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
# | 给编译器一个预算 | 在被编译的函数里写 `with torch.autograd.graph.region_activation_memory_budget(0.5):` | 3.5 节用另一个后端运行过 |
# | 同上，改用更早的私有设置 | `torch._functorch.config.activation_memory_budget = 0.5`，再 `torch.compile(model)` | 3.5 节用另一个后端运行过 |
# | 同上，torchtitan | 激活检查点模式 `"memory_budget"` | 没有运行 |
# | 字节预算，也就是你的递推式：rotor | `chain = rotor.Checkpointable(layers)`，`chain.measure(x)`，`chain.compute_sequence(limit)` | 没有运行 |
# | 同上，用于任意计算图：Rockmate | `rockmate.Rockmate(model, x, limit)` | 没有运行 |
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
# <div lang="en">
#
# In the last row, only every second layer has a checkpoint, so the numbers lie between those of the other rows.
#
# </div>
# <div lang="zh">
#
# 最后一行的写法每隔一层加一个检查点，其余各层的激活值全部保留，所以它的结果落在另外两行之间。
#
# </div>

# %% [markdown]
# ## 3.10 Claims and measurements / 说法与实测
#
# <div lang="en">
#
# The next table tests three claims from public pages.
#
# </div>
# <div lang="zh">
#
# 下表检验三种说法，它们都出自公开的网页。
#
# </div>


# %% jupyter={"source_hidden": true} slide="result"
def measured_peak(cuts):
    return figures.peak_and_flops(in_segments, hundred[: cuts[-1]], cuts)[0]


groups = [eight[name][0] for name in ("each layer", "two layers per checkpoint")]
figures.claims_table(measured_peak, tapered, groups)

# %% [markdown] slide={"en": "The same step as ever, one technique per row.\n\nWith half the activations, what do these 180.1 MB consist of?", "zh": "还是同一个训练步，每种技术占一行。\n\n激活值减半以后，这 180.1 MB 由什么组成？"}
# ## 3.11 The ledger / 账本
#
# <div lang="en">
#
# The ledger shows the step of the other lessons, with Adam and section 3.7's schedule for half of the activations. The step's gradients arrive during backward.
#
# </div>
# <div lang="zh">
#
# 账本里的训练步与其他各课相同，用 Adam，梯度在反向中陆续产生，用 3.7 节激活值减半的调度。
#
# </div>

# %% jupyter={"source_hidden": true} slide="result"
from course_lib.lessons.ledger import ledger

adam = torch.optim.Adam(stages.parameters())
adam.step()  # creates the state, from the gradients of section 3.7
stages.zero_grad()
with MemoryMeter(stages, adam) as meter:
    scheduled(stages, halved, inputs).backward()
    adam.step()
ledger("03", "optimal schedule, half the activations", meter, flops=half[1])

# %% [markdown]
# <div lang="en">
#
# The peak consists of 97.6 MB of activations and 82.5 MB of weights and optimizer state. Lesson 02's row has a lower peak, 134.0 MB, but takes 1.21 instead of 1.17 times the baseline's FLOPs.
#
# </div>
# <div lang="zh">
#
# 峰值由 97.6 MB 的激活值和 82.5 MB 的权重与优化器状态组成。第 02 课那一行的峰值只有 134.0 MB，代价是 FLOPs 为基线的 1.21 倍，而本课这一行是 1.17 倍。
#
# </div>

# %% [markdown] slide={"en": "Fewer than $2 A / B$ equal layers: one checkpoint each.\n\nMore, and gradients exist: tapered segments. Stages differ: search. Single operators: compiler, nested checkpoints.", "zh": "相同的层少于 $2 A / B$ 个，就每层一个检查点。\n\n层数更多，而且梯度已经存在，就用渐短的段。各级不同，就用搜索。要细到算子，就用编译器或嵌套的检查点。"}
# ## 3.12 Summary / 小结
#
# <div lang="en">
#
# Measure $A$, the bytes that a layer keeps, and $B$, the bytes of its input. Then choose from this table:
#
# | your model | what to do |
# |---|---|
# | a transformer with fewer than $2 A / B$ layers, or with gradients that arrive during backward and take more than $B$ per layer | a checkpoint around each layer |
# | the same, but FLOPs are scarce | keep the matrix products unless the sequence length $s$ far exceeds the hidden size $h$, or give the compiler a budget, and measure the peak |
# | more layers, with gradients that exist before backward, are sharded, or take much less than $B$ per layer | groups of layers: $k^* = \sqrt{L \cdot A / B}$ equal groups, or tapered groups, whose peak approaches $1 / \sqrt 2$ of the peak of equal groups |
# | a large vocabulary | the loss in chunks, in addition |
# | stages that differ much, and a limit in bytes | the recurrence: the fastest schedule of whole stages that discards nothing early |
#
# This lesson's optima hold only for schedules of whole stages. Nested checkpoints beat such an optimum on our chain, and the compiler beat one on the decoder.
#
# **Next:** [lesson 04](04_offload.ipynb) moves bytes elsewhere instead of forgetting them.
#
# </div>
# <div lang="zh">
#
# 先测出 $A$（一层保存的字节）和 $B$（它的输入占的字节），再从下表中选择做法：
#
# | 你的模型 | 怎么做 |
# |---|---|
# | Transformer，少于 $2 A / B$ 层，或者梯度在反向中产生、每层的梯度又大于 $B$ | 每层一个检查点 |
# | 同上，但不想多花 FLOPs | 序列长度 $s$ 不比隐藏维度 $h$ 大很多时，保留矩阵乘积，或者给编译器一个预算，并实测峰值 |
# | 层数更多，而且梯度在反向之前就已存在，或者是分片的，或者每层的梯度远小于 $B$ | 几层合成一组，可以等分成 $k^* = \sqrt{L \cdot A / B}$ 组；如果让各组渐短，峰值会趋近等分时的 $1 / \sqrt 2$ |
# | 词表很大 | 再加上损失分小段 |
# | 各级相差很大，又有字节数的上限 | 递推式：在以整级为单位、保留的张量不提前丢弃的调度里，找出最快的调度 |
#
# 本课说的最优，都只在以整级为单位的调度中成立。在我们的链上，嵌套的检查点峰值更低。在解码器上，编译器的预算也胜过这样的调度。
#
# **下一步**：[第 04 课](04_offload.ipynb)不忘掉字节，而是把它们搬到别处。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **Sources.** Chen et al. 2016, *Training Deep Nets with Sublinear Memory Cost*, arXiv:1604.06174. Griewank 1992, *Achieving logarithmic growth of temporal and spatial complexity in reverse automatic differentiation*, Optimization Methods and Software 1. Griewank and Walther 2000, *Algorithm 799: revolve*, ACM TOMS 26(1). Gruslys et al. 2016, *Memory-Efficient Backpropagation Through Time*, arXiv:1606.03401. Beaumont et al. 2019, *Optimal checkpointing for heterogeneous chains*, arXiv:1911.13214: the recurrence, whose program is **rotor**. Jain et al. 2019, *Checkmate*, arXiv:1910.02653. Zhao et al. 2023, *Rockmate*, arXiv:2307.01236, and Gusak et al. 2025, *HiRemate*, ICML (PMLR 267): their units are smaller than stages. Kirisame et al. 2021, *Dynamic Tensor Rematerialization* (DTR), arXiv:2006.09616, decides while the program runs. PyTorch's [article](https://pytorch.org/blog/activation-checkpointing-techniques/) *Current and New Activation Checkpointing Techniques* (2025). The package `checkpoint_schedules`, of the Firedrake project. PyTorch's `torch._functorch.partitioners`, read and run. The READMEs of cybertronai/gradient-checkpointing (2018) and NVIDIA/Megatron-LM (claims two and three).
#
# </div>
# <div lang="zh">
#
# **出处。** Chen et al. 2016，*Training Deep Nets with Sublinear Memory Cost*，arXiv:1604.06174。Griewank 1992，*Achieving logarithmic growth of temporal and spatial complexity in reverse automatic differentiation*，Optimization Methods and Software 1。Griewank 和 Walther 2000，*Algorithm 799: revolve*，ACM TOMS 26(1)。Gruslys et al. 2016，*Memory-Efficient Backpropagation Through Time*，arXiv:1606.03401。Beaumont et al. 2019，*Optimal checkpointing for heterogeneous chains*，arXiv:1911.13214：递推式的来源，其程序叫 **rotor**。Jain et al. 2019，*Checkmate*，arXiv:1910.02653。Zhao et al. 2023，*Rockmate*，arXiv:2307.01236，以及 Gusak et al. 2025，*HiRemate*，ICML（PMLR 267），调度的单位比级更小。Kirisame et al. 2021，*Dynamic Tensor Rematerialization*（DTR），arXiv:2006.09616，在程序运行时才决定重计算哪些结果。PyTorch 的[文章](https://pytorch.org/blog/activation-checkpointing-techniques/) *Current and New Activation Checkpointing Techniques*（2025）。`checkpoint_schedules`，出自 Firedrake 项目的软件包。PyTorch 的 `torch._functorch.partitioners`（我们读过并运行过其源码）。GitHub 上 cybertronai/gradient-checkpointing（2018）和 NVIDIA/Megatron-LM 的 README（第二、三条说法）。
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
# ## 3.13 Other depths, and giving up early / 其他深度，以及提前丢掉
#
# <div lang="en">
#
# The picture repeats the measurements of section 3.2 for 16, 36 and 64 layers. The dots are your predictions for every $k$. The table adds 50 layers. This number is not a square, but $k^* = \sqrt{2 \cdot 50} = 10$ divides it.
#
# </div>
# <div lang="zh">
#
# 下图对 16、36 和 64 层做与 3.2 节同样的测量，图中的小点是你对每个 $k$ 的预测。表里还有 50 层，50 不是平方数，但能被 $k^* = \sqrt{2 \cdot 50} = 10$ 整除。
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
# Some schedules discard a kept result before the backward that needs it. Can such a schedule be faster? On equal stages, we have found no faster schedule. But take five stages whose forwards take 10, 5, 5, 5, 10 units of time, and whose backwards take 1 unit each. Their outputs have 2, 4, 4, 1, 4 bytes, and the stages keep 3, 4, 4, 1, 4 bytes. (Some outputs are larger than the previous stage's output, so `optimal` must check that each forward fits.) Within 13 bytes, the schedule of `optimal` takes 80 units of time:
#
# </div>
# <div lang="zh">
#
# 有些调度在反向用到之前就丢弃已保存的结果。这样的调度会更快吗？各级相同时，我们没有找到更快的。可是，请看一条五级的链，各级前向用时 10、5、5、5、10，反向各用时 1，输出占 2、4、4、1、4 字节，保存 3、4、4、1、4 字节。（有的级输出比前一级大，所以 `optimal` 要检查每次前向放不放得下。）在 13 字节之内，`optimal` 给出的调度用时 80：
#
# </div>

# %%
five = exercises.five_stages()
[*optimal(five, 13)], simulate(optimal(five, 13), five)

# %% [markdown]
# <div lang="en">
#
# **Exercise 6.** Change the list of actions so that it stays within 13 bytes and takes less than 80 units of time. Keep one stage's input while running on, and release this input before that stage's backward. Which stage then runs forward one time less?
#
# </div>
# <div lang="zh">
#
# **练习 6。** 修改这张清单，使它不超过 13 字节，用时少于 80。请在往前跑的途中保留某一级的输入，并在做这一级的反向之前就释放这份输入。这样一来，哪一级的前向可以少跑一遍？
#
# </div>

# %% minutes=15
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
# The new schedule takes 70 units of time, because stage 0 runs forward one time less. The second forward to stages 2 and 3 starts from $x_1$, the input of stage 1. Then $x_1$ is released, so everything that stages 2 and 3 keep fits within the limit. This schedule lies *below* the library's frontier. The reason is that the library, like the program of Beaumont et al., considers only **persistent** schedules, which discard nothing early.
#
# </div>
# <div lang="zh">
#
# 新的调度用时 70，因为第 0 级少跑了一遍。再次前向到第 2、3 级时，从 $x_1$（第 1 级的输入）出发，用完就释放，于是这两级要保存的张量全都放得下。这个调度落在库算出的前沿*下方*，因为库与 Beaumont 等人的程序一样，只考虑**持久**（persistent）的调度，即什么也不提前丢弃的调度。
#
# </div>

# %%
from course_lib.schedule import Schedule

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
# `ScheduledSequential` does what the function below does, and also takes care of random numbers, buffers and autocast.
#
# </div>
# <div lang="zh">
#
# `ScheduledSequential` 的核心就是下面这个函数，此外还要处理随机数、缓冲区和 autocast。
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
# ## 3.15 Forget again, and again / 一忘再忘
#
# <div lang="en">
#
# A **recursive** schedule keeps the input of the middle stage. The schedule runs the later half of the chain, then the earlier half, and divides each half the same way. About $\log_2 L$ inputs are live at once, and a stage runs forward $\frac12 \log_2 L$ additional times on average. Until the picture below, we assume that each stage keeps one activation, $A = B$.
#
# </div>
# <div lang="zh">
#
# **递归**调度保留链正中那一级的输入，先做后一半，再做前一半，每一半再同样对分。同时存活的输入约有 $\log_2 L$ 份，每一级的前向平均多运行 $\frac12 \log_2 L$ 次。在下图之前，都假设每一级只保存一份激活值，即 $A = B$。
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
# A **slot** is memory for one kept input, and the chain's own input takes one slot. A forward that does not keep all that its backward needs is a **run ahead**. If there are $c$ slots, and no stage runs ahead more than $r$ times, a **binomial schedule** (Griewank 1992) can run backward through
#
# $$\beta(c, r) = \binom{c + r}{c}$$
#
# stages. The program of Griewank and Walther (2000), called revolve, finds such a schedule with the fewest forwards. Which stage's input should be kept next? The recurrence below tries every stage. The chosen stage and all later stages then have one slot less. This is your recurrence of section 3.6, with slots instead of bytes:
#
# </div>
# <div lang="zh">
#
# 一个**槽**（slot）存放一份输入，链自己的输入也占一个槽。一次前向如果没有保留反向所需的全部，就算这一级**往前跑**（run ahead）了一次。如果有 $c$ 个槽，每一级往前跑不超过 $r$ 次，那么**二项式调度**（Griewank 1992）能做完
#
# $$\beta(c, r) = \binom{c + r}{c}$$
#
# 级的反向。Griewank 和 Walther（2000）的程序叫做 revolve，它找到的二项式调度前向次数最少。下一份输入该在哪一级保留？递推式把每一级都试一遍。在某一级保留输入，链就从这一级的开头分成前后两段。做后一段时，这份输入一直占着一个槽，所以后一段能用的槽少一个。这就是你在 3.6 节写的递推式，只是把字节换成了槽：
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
# With four slots and three runs ahead per stage, a schedule can run backward through $\binom{7}{4} = 35$ stages. With 1000 stages and 32 slots, a stage runs forward 2.4 more times on average than when all is kept.
#
# The picture shows three schedules for 16 stages. Each stage keeps two activations. All three schedules peak at $8 B$. Time runs to the right, and stage 0 is the lowest row. Each dark box is an action: a forward that keeps all (green), only its input (blue) or nothing (gray), or a backward (red). The pale band to the right of a box lasts as long as its tensors are kept.
#
# </div>
# <div lang="zh">
#
# 用四个槽，每级最多往前跑三次，就能完成 $\binom{7}{4} = 35$ 级的反向。如果有 1000 级、32 个槽，与全部保留时相比，每级平均要多做 2.4 次前向。
#
# 下图是 16 级的三种调度，每级保存两份激活值，峰值都是 $8 B$。时间从左到右，最下面一行是第 0 级。深色的格子是动作：绿色是全部保留的前向，蓝色是只保留输入的前向，灰色是什么也不保留的前向，红色是反向。格子右边的浅色带表示这些张量保留到什么时候。
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
# ## 3.16 Which results the compiler keeps, and older claims / 编译器留下了哪些结果，以及更早的说法
#
# <div lang="en">
#
# In section 3.5, small compiler budgets lowered the saved bytes but raised the peak. If a minimal cut of the graph does not meet the budget, as with budgets 0.5 and 0.25, a knapsack solver chooses the results to keep. The cell prints the solver's choice for 0.25. Then the cell compiles with another choice, the results of seven evenly spaced Linears out of the sixteen.
#
# </div>
# <div lang="zh">
#
# 3.5 节里，保存的字节减少，峰值却升高了。如果图的最小割满足不了预算（这里是预算为 0.5 和 0.25 时），编译器就用一个背包求解器来选择保留哪些结果。下面先打印求解器在预算为 0.25 时的选择，再换一种选择来编译，即从十六个 Linear 里均匀选七个，保留其结果。
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
    evenly = own_model.budget_table(layers16, x, {"`0.25`, seven spread evenly": (in_region, 0.25)})
print(*chosen)
evenly

# %% [markdown]
# <div lang="en">
#
# The seven evenly spaced results take as many bytes and cost as many FLOPs as the solver's first seven, but the peak is half as high. The solver sees only bytes and FLOPs, which are the same for all sixteen results. The peak depends on **which** results are kept.
#
# Checkmate formulates such a choice as an integer program over the graph. Rockmate (arXiv:2307.01236) solves such a program for the graph of each block, and combines the blocks by the recurrence of section 3.6. HiRemate repeats these two steps, program and recurrence, on several levels.
#
# </div>
# <div lang="zh">
#
# 均匀选出的七个结果，与求解器选的前七个结果相比，字节数和 FLOPs 都相同，峰值却只有一半。求解器只考虑字节和 FLOPs，而十六个结果的字节和 FLOPs 都一样。峰值取决于保留的是**哪些**结果。
#
# Checkmate 把这种选择写成图上的整数规划来解。Rockmate（arXiv:2307.01236）用同样的办法处理每个块的图，再用 3.6 节的递推式把各块组合起来。HiRemate 在几个层次上重复这两步。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# The context manager of section 3.5 must cover the whole forward pass of a graph, so a model with two budgets needs two graphs. Outside of the compiler, the context manager raises an error:
#
# </div>
# <div lang="zh">
#
# 3.5 节的上下文管理器必须包住一张图的整个前向，所以要用两个预算，就要有两张图。在编译器之外使用这个上下文管理器则会报错：
#
# </div>


# %%
def two_budgets(x, apart=True):
    with torch.autograd.graph.region_activation_memory_budget(0.5):
        x = layers16[:2](x)
    if not apart:
        return layers16[2:4](x)  # this half has no budget
    torch._dynamo.graph_break()
    with torch.autograd.graph.region_activation_memory_budget(1.0):
        return layers16[2:4](x)


compiled = torch.compile(two_budgets, backend="aot_eager")
runs = {"not compiled": two_budgets, "half of a graph": partial(compiled, apart=False)}
own_model.outcomes({**runs, "two graphs, two budgets": compiled}, x)

# %% [markdown]
# <div lang="en">
#
# `checkpoint_sequential` has two traps, shown on a network of six pairs of Linear and GELU, cut into 3 segments. First, if you pass a list of the Linears only, the function runs without the GELUs and gives no warning. Second, in the reentrant mode a segment whose input needs no gradient does not train, and its output needs no gradient either. So only the last segment, which has no checkpoint, gets gradients.
#
# </div>
# <div lang="zh">
#
# `checkpoint_sequential` 有两个陷阱，下面把六个 Linear 加 GELU 分成 3 段来演示。第一，如果只把各个 Linear 放进一个列表传给它，它照样运行，没有任何警告，但 GELU 没有运行。第二，在可重入模式下，一段的输入如果不需要梯度，这一段就得不到训练，输出也不需要梯度，所以只有不加检查点的最后一段得到梯度。
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
# The next table tests four claims from the teaching documents from which this course grew. The first two are about layers that keep one activation, such as Linear and Tanh.
#
# </div>
# <div lang="zh">
#
# 下表检验四种说法，都出自本课程最初依据的教学材料。前两种说的是只保存一份激活值的层，例如 Linear 加 Tanh。
#
# </div>

# %%
from course_lib.lessons.lesson_03 import claims, in_depth

measured = in_depth.figures_of_older_claims(in_segments, hundred, tapered(100))
claims.older_claims(*measured)

# %% [markdown]
# ## 3.17 On a GPU / 在 GPU 上
#
# <div lang="en">
#
# `ScheduledSequential` runs on CUDA without a change. In this section, a stage's cost is in seconds. Without a GPU, the cell shows the numbers recorded on an H100 and an H200. Each measured peak is 8 bytes above the predicted peak. The two schedules are limited to half and to a quarter of the memory that keeping everything takes. Neither limit counts the weights' gradients. With half of the memory, the step takes 15% longer on the H200 and 16% longer on the H100. With a quarter, it takes 27% longer on both GPUs. The two GPUs get different schedules for a quarter of the memory, because the same stage takes different times on them.
#
# </div>
# <div lang="zh">
#
# `ScheduledSequential` 不用改动就能在 CUDA 上运行，这里每一级的代价以秒计。没有 GPU 时，单元格显示 H100 和 H200 的记录。实测的峰值都比预测的多 8 字节。两个调度可用的显存分别是全部保留时的一半和四分之一（都不计权重的梯度）。显存限制在一半时，训练步在 H200 上多花 15% 的时间，在 H100 上多花 16%；限制在四分之一时，在两块卡上都多花 27%。后一种限制下，两块卡得到的调度不同，因为同一级在两块卡上的用时不同。
#
# </div>

# %% tags=["nbval-ignore-output", "shows-device"]
from course_lib.lessons import on_gpu

on_gpu("03")

# %% [markdown]
# ## 3.18 More exercises / 更多练习
#
# <div lang="en">
#
# **Exercise 7.** Take six stages, `Chain.uniform(6, saved_bytes=2)`. On paper, draw a schedule that peaks at 7 bytes or less and needs at most 11 forwards. Then write the schedule as a list. The check simulates your list.
#
# </div>
# <div lang="zh">
#
# **练习 7。** 链有六级，即 `Chain.uniform(6, saved_bytes=2)`。先在纸上画一个调度，峰值不超过 7 字节，前向不超过 11 次，再把它写成清单。检查程序会模拟它。
#
# </div>

# %% minutes=8
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
# **Exercise 8.** Write `plan(first, stages, room)`, which returns a list of actions. The total time of the actions must equal the result of `fastest`. `first` is the index of `stages[0]` in the whole chain. The check simulates your lists for the chains of exercise 4, and for the pyramid with a limit of 150 MB. No cuts of the pyramid need less than 163 MB.
#
# </div>
# <div lang="zh">
#
# **练习 8。** 写出 `plan(first, stages, room)`，返回一张动作清单，清单的用时要等于 `fastest` 算出的值。`first` 是 `stages[0]` 在整条链上的编号。检查会在练习 4 的几条链上模拟你的清单，也会在金字塔上以 150 MB 为限来模拟。金字塔的任何切法都至少要 163 MB。
#
# </div>


# %% minutes=19
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
