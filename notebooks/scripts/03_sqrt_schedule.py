# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] slide={"en": "100 layers keep 200 activations. With $\\sqrt{100}$ segments the peak is 31, for one more forward pass.\n\nHow low can it go?", "zh": "100 层保存 200 份激活值。切成 $\\sqrt{100}$ 段，峰值 31 份，代价是多做一次前向。\n\n最低能到多少？"}
# # 3 Which ones should we forget? (checkpoint schedules) / 该忘掉哪些？（检查点的调度）
#
# <div lang="en">
#
# A network of 100 layers keeps 200 activations for backward, and peaks at 202. The advice since 2016: cut it into $\sqrt{100} = 10$ segments and checkpoint each. The peak falls to 31, for one more forward pass.
#
# Can one extra forward pass go lower? In section 3.3 you cut better than that. Then you write the program that finds the best schedule for any chain of layers, and see where it pays.
#
# </div>
# <div lang="zh">
#
# 一个 100 层的网络要为反向保存 200 份激活值，峰值是 202 份。2016 年以来的建议是：切成 $\sqrt{100} = 10$ 段，每段一个检查点。峰值降到 31 份，代价是多做一次前向。
#
# 同样只多做一次前向，能不能降得更多？3.3 节由你来切，切得比这更好。然后，你来写一个程序，为任意一条由层组成的链找出最好的调度，并看清它在哪里划算。
#
# </div>

# %%
from course_lib.teaching import language

language()

# %% [markdown]
# <div lang="en">
#
# **Goals** (90 minutes). Predict the peak of any segments, and type the number that is best. Find the cut that no other goes below. Read a schedule, and write the recurrence that finds the fastest one under a byte budget. Run it on the course's decoder, and say where it pays and where a loop of checkpoints does as well.
#
# **What to know before**: lesson 01's meter, and the checkpoint that you wrote in lesson 02.
#
# </div>
# <div lang="zh">
#
# **目标**（90 分钟）：预测任意分段的峰值，写出最好的段数；找出峰值最低的切法；看懂调度，写出递推式，在字节预算之内找到最快的调度；在本课程的解码器上运行它，说出它在哪里划算，又在哪里用一个循环加检查点就够了。
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

from course_lib.lessons import lesson_03, what_you_may_have_read
from course_lib.lessons.ledger import ledger
from course_lib.memory import MemoryMeter, symbolic
from course_lib.models import Decoder, deep_mlp, loss_stages, random_tokens
from course_lib.teaching import predictions, table

# %% [markdown]
# ## 3.1 How many segments? / 切成几段？
#
# <div lang="en">
#
# Up to section 3.5 the network is not the decoder but a chain of equal layers, where whole numbers can be seen: Linear and GELU, each activation of 1000 × 25 numbers. A layer keeps $A = 2B$: Linear its input, GELU its own. A **boundary** between two segments keeps one activation, $B$ = 100,000 bytes.
#
# **One convention on this page.** All that is live counts, the chain's input too. Weights, their gradients and the optimizer's state don't: they are there from the start, as from the second micro-batch on (lesson 05). Only the ledger's row, at the end, is a whole step.
#
# Segments by hand: each but the last goes behind a checkpoint. (No layer here draws random numbers, so their state, 5,056 bytes a checkpoint, need not be kept.)
#
# </div>
# <div lang="zh">
#
# 3.5 节及以前，网络不是解码器，而是一条由相同的层组成的链，这样数出来的都是整数：每层是 Linear 加 GELU，每份激活值是 1000 × 25 个数。一层保存 $A = 2B$：Linear 存自己的输入，GELU 也存自己的。段与段之间的**边界**留住一份激活值，$B$ = 100,000 字节。
#
# **全页只用一种约定。** 凡存活的都计入，链的输入也算。权重、权重的梯度和优化器状态不算：它们从一开始就在，如同从第二个微批次起的情形（第 05 课）。只有最后账本的那一行，算的是完整的一步。
#
# 手工分段：除最后一段外，每一段都加上检查点。（这里没有哪一层抽随机数，所以随机数状态不必保存，每个检查点可省 5,056 字节。）
#
# </div>

# %% slide="code"
A, B = 200_000, 100_000  # bytes a layer (Linear, GELU) keeps, bytes at a boundary
x = torch.linspace(-1, 1, 25_000).view(1000, 25)
hundred = nn.Sequential(*(deep_mlp(depth=1, width=25, seed=i) for i in range(100)))


def in_segments(layers, cuts, x):
    for start, end in pairwise(cuts[:-1]):
        x = checkpoint(layers[start:end], x, use_reentrant=False, preserve_rng_state=False)
    return layers[cuts[-2] :](x)


# %%
def gradients(run, layers, how, x):
    layers.zero_grad()
    output = run(layers, how, x)
    weights = torch.linspace(-1, 2, output.numel()).view_as(output)  # an uneven gradient comes in
    (output * weights).sum().backward()
    return [parameter.grad for parameter in layers.parameters()]


framework = partial(checkpoint_sequential, use_reentrant=False, preserve_rng_state=False)
plain = gradients(in_segments, hundred, [0, 100], x)  # one segment: nothing is checkpointed
ours = gradients(in_segments, hundred, range(0, 101, 10), x)
theirs = gradients(framework, hundred, 10, x)
all(map(torch.equal, plain, ours)), all(map(torch.equal, plain, theirs))

# %% [markdown] slide={"en": "$k B + \\frac{L}{k} A + B$ is a smooth curve.\n\n**Guess first.** Will the measured points be smooth, too?", "zh": "$k B + \\frac{L}{k} A + B$ 是一条平滑的曲线。\n\n**先猜**：测得的点也会平滑吗？"}
# <div lang="en">
#
# Now the peak over the number $k$ of segments. **Guess first.** The inputs of $k$ segments, one segment of $L/k$ layers, and the gradient that is handed on make $k B + \frac{L}{k} A + B$, a smooth curve. So the measured points will be smooth as well. Will they?
#
# (`peak_and_flops` weights the output as above: the gradient of a bare `.sum()` would be one number shown many times, not a tensor.)
#
# </div>
# <div lang="zh">
#
# 现在看峰值随段数 $k$ 的变化。**先猜**：$k$ 段的输入、一个 $L/k$ 层的段，再加正在往回传的梯度，共 $k B + \frac{L}{k} A + B$，是一条平滑的曲线。所以测得的点也会是平滑的。会吗？
#
# （`peak_and_flops` 也像上面那样给输出乘以各不相同的系数：若只用 `.sum()`，它的梯度只是一个数，显示成许多份，不是一个完整的张量。）
#
# </div>


# %% slide="result"
ks = [1, 4, 10, 14, 17, 20, 25, 26, 33, 34, 50, 51, 100]
sweep = {k: lesson_03.peak_and_flops(framework, hundred, k)[0] for k in ks}
lesson_03.draw_sweep(100, sweep, marked=(50, 51))

# %% [markdown]
# <div lang="en">
#
# They are not. `checkpoint_sequential` puts $\lfloor L/k \rfloor$ layers into each segment and **all the rest into the last one**. For $k = 51$ that is fifty segments of one layer, and one of fifty. Whichever segment is worked on is there whole, and this one has fifty layers.
#
# **Exercise 1.** With that, any cut can be predicted. Cuts are a list such as `[0, 40, 70, 100]`; `pairwise(cuts)` gives the start and the end of each segment. While segment $j$ is worked on, counted from 0, which inputs are kept, how much do its layers keep, and which gradient is there? Write the peak in bytes, from `A` and `B`.
#
# </div>
# <div lang="zh">
#
# 不会。`checkpoint_sequential` 给每段 $\lfloor L/k \rfloor$ 层，**余下的全归最后一段**。$k = 51$ 时，就是五十段各一层，最后一段五十层。轮到处理哪一段，哪一段就整段都在内存里，而这一段有五十层。
#
# **练习 1。** 知道了这一点，任何切法都可以预测。切口写成列表，例如 `[0, 40, 70, 100]`；`pairwise(cuts)` 给出每一段的起点和终点。处理第 $j$ 段（从 0 数起）时，留着哪些输入，这一段的各层保存多少，还有哪个梯度？用 `A` 和 `B` 写出峰值，以字节计。
#
# </div>


# %% minutes=10
def predicted_peak(cuts):
    return 0


lesson_03.check_predicted_peak(predicted_peak)


# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not lesson_03.check_predicted_peak.accepted:

    def predicted_peak(cuts):
        sizes = [end - start for start, end in pairwise(cuts)]
        return max((j + 1) * B + size * A for j, size in enumerate(sizes)) + B


lesson_03.check_predicted_peak(predicted_peak)
### END SOLUTION


# %% slide="result"
def framework_cuts(depth, k):
    size = depth // k
    return [*range(0, k * size, size), depth]


tried = (1, 10, 14, 50, 51)
rows = [(f"k = {k}", predicted_peak(framework_cuts(100, k)), sweep[k]) for k in tried]
predictions(rows, unit="bytes")

# %% [markdown] slide={"en": "$k B$ grows with $k$, $\\frac{L}{k} A$ falls. **Guess first.** Where is the sum least?", "zh": "$k B$ 随 $k$ 增大，$\\frac{L}{k} A$ 减小。**先猜**：两项之和在哪里最小？"}
# ## 3.2 Where √L comes from / √L 从哪里来
#
# <div lang="en">
#
# (Off by 8 bytes, the loss and its gradient.) Let all segments be equal. One part of the sum, $k B$, grows with $k$; the other, $\frac{L}{k} A$, falls.
#
# **Exercise 2.** For which number of segments $k$ is the sum least? Write it for any $L$, $A$ and $B$; it need not be whole, and if you make it whole, take the whole number whose sum is least.
#
# </div>
# <div lang="zh">
#
# （只差 8 字节，即损失和它的梯度。）设各段相等。和式的一项 $k B$ 随 $k$ 增大，另一项 $\frac{L}{k} A$ 随 $k$ 减小。
#
# **练习 2。** 段数 $k$ 取何值时，两项之和最小？对任意的 $L$、$A$、$B$ 写出来，不必是整数。若要取整，就取使总和最小的那个整数。
#
# </div>


# %% minutes=4
def best_count(L, A, B):
    return None


lesson_03.check_best_count(best_count)


# %% jupyter={"source_hidden": true} slide="both"
### BEGIN SOLUTION
if not lesson_03.check_best_count.accepted:

    def best_count(L, A, B):
        return (L * A / B) ** 0.5


lesson_03.check_best_count(best_count)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# $k^* = \sqrt{L \cdot A / B}$, and the peak there is $2 \sqrt{L A B} + B$. It is $\sqrt L$ only where a layer keeps as much as one boundary. Ours keep twice that: 14 segments, not 10. It hardly matters, since the curve is flat: 29.3 against 31. A bad remainder costs more than a bad formula: the framework's 14 segments peak at 33.
#
# </div>
# <div lang="zh">
#
# $k^* = \sqrt{L \cdot A / B}$，此处的峰值是 $2 \sqrt{L A B} + B$。只有当一层保存的恰好等于一个边界时，它才是 $\sqrt L$。这里的层保存两倍：是 14 段，不是 10 段。其实差别很小，因为曲线很平：29.3 对 31。余数分得不好，比公式选得不好更吃亏：框架的 14 段峰值是 33。
#
# </div>

# %% [markdown] slide={"en": "At the last segment all inputs are kept; at the first, only its own.\n\nHow long may the first be? **Cut 100 layers on paper.**", "zh": "处理最后一段时，所有输入都留着；处理第一段时，只有它自己的。\n\n那么第一段可以有多长？**先在纸上切 100 层。**"}
# ## 3.3 Equal segments are not the best / 各段相等并不是最好的
#
# <div lang="en">
#
# While the **last** segment is worked on, all inputs are kept. While the **first** is, all the others are gone: it may be longer. So give every segment the same $R$ bytes, not counting the gradient. The one with $j$ inputs before its own has $R - (j + 1) B$ left for its layers.
#
# Sizes fall by $B / A$ from segment to segment, as the side of a triangle does: $R / B$ segments long, $R / A$ layers high. Its area is the number of layers:
#
# $$L \approx \frac{R^2}{2 A B}, \qquad R \approx \sqrt{2 L A B}$$
#
# in place of $2 \sqrt{L A B}$: a factor of $1 / \sqrt 2$.
#
# **Exercise 3.** Sizes are whole numbers, so the formula is not yet a cut. Write `tapered(depth)`: the cuts, such as `[0, 4, 6, 7]` for 7 layers, whose peak no other cut is below. The check compares it with all cuts there are, at many depths.
#
# </div>
# <div lang="zh">
#
# 处理**最后**一段时，所有输入都留着。处理**第一**段时，其余的都已释放：所以它可以更长。那就让每一段都占到同样的 $R$ 字节（梯度另计）：自己的输入之前还有 $j$ 个输入的那一段，留给各层的是 $R - (j + 1) B$。
#
# 每往后一段，段长就减少 $B / A$，正像三角形的一条斜边：底是 $R / B$ 段，高是 $R / A$ 层，面积就是层数：
#
# $$L \approx \frac{R^2}{2 A B}, \qquad R \approx \sqrt{2 L A B}$$
#
# 而不是 $2 \sqrt{L A B}$：差一个因子 $1 / \sqrt 2$。
#
# **练习 3。** 段长是整数，所以公式还不是切法。写出 `tapered(depth)`，返回切口，例如 7 层时是 `[0, 4, 6, 7]`，要求没有别的切法峰值更低。检查会在许多深度上把它与所有切法比较。
#
# </div>


# %% minutes=10
def tapered(depth):
    return [0, depth]


lesson_03.check_tapered(tapered)


# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not lesson_03.check_tapered.accepted:

    def tapered(depth):
        for room in count(A + B, B):
            sizes = [(room - inputs * B) // A for inputs in range(1, room // B)]
            if sum(sizes) >= depth:
                return sorted({min(depth, cut) for cut in accumulate(sizes, initial=0)})


lesson_03.check_tapered(tapered)
### END SOLUTION


# %% slide="result"
def balanced(depth, k):  # the longer segments first
    return list(accumulate((depth // k + (j < depth % k) for j in range(k)), initial=0))


_, once = lesson_03.peak_and_flops(in_segments, hundred, [0, 100])
arms = {"10 equal segments": range(0, 101, 10), "17 balanced": balanced(100, 17)}
arms["tapered"], rows = tapered(100), []
for name, cuts in arms.items():
    peak, flops = lesson_03.peak_and_flops(in_segments, hundred, cuts)
    rows.append((name, predicted_peak(cuts) // B, round(peak / B, 1), round(flops / once, 3)))
table(["cut", "predicted (units of B)", "measured (units of B)", "FLOPs (× baseline)"], rows)

# %% slide="result"
lesson_03.draw_rooms({name: arms[name] for name in ("10 equal segments", "tapered")})

# %% [markdown]
# <div lang="en">
#
# From 31 to 22, for 2% more FLOPs: the last segment, which isn't run again, is shorter. The picture has a column for each segment: the layers are the triangle, hung from the top. (This cut is derived here; we have found it in no paper in this form.)
#
# Is that the limit? The library's `frontier` knows more than segments: it takes the best of every schedule that never throws away early what it has stored; you will write its rule yourself in section 3.5. A forward of a layer takes one unit of time, a backward two: 300 in all, and 99 for one more forward of all layers but the last.
#
# </div>
# <div lang="zh">
#
# 从 31 降到 22，FLOPs 只多 2%：不必重跑的最后一段变短了。图上每段一列：各层的小格就是那个三角形，只是从上边挂下来。（这个切法是在这里推出来的；我们没有在论文里见过这种形式。）
#
# 这是极限吗？库里的 `frontier` 不限于分段：只要求留下的东西一直留到用它的那次反向，在所有这样的调度里挑出最好的；它的规则，3.5 节由你来写。一层的前向用一个单位时间，反向用两个：共 300，除最后一层外再做一次前向是 99。
#
# </div>

# %% slide="both"
from course_lib.schedule import Chain, frontier

chain = Chain.uniform(100, saved_bytes=2)  # in units of B
min(cost.peak_bytes for cost in frontier(chain) if cost.time <= 300 + 99)

# %% [markdown]
# <div lang="en">
#
# 22: with one extra forward pass no such schedule of whole layers peaks lower than yours. To go lower, layers must run more than twice (section 3.15).
#
# </div>
# <div lang="zh">
#
# 22：只多做一次前向时，这类以整层为单位的调度，没有一个的峰值比你的切法更低。还要再降，就得让有些层运行不止两次（3.15 节）。
#
# </div>

# %% [markdown] slide={"en": "A schedule is a list: what runs, in which order, and what each forward keeps.\n\nThe referee counts bytes and time, and refuses.", "zh": "调度是一张清单：运行什么、按什么顺序、每次前向留下什么。\n\n裁判清点字节和时间，也会拒绝。"}
# ## 3.4 A schedule is a list / 调度就是一张清单
#
# <div lang="en">
#
# Say what runs, in which order, and what each forward keeps: **all** that its backward needs, its **input** only, or **nothing**. Such a list is a schedule. A link of the chain, here a layer, is a **stage**. `simulate` is the referee: it counts bytes, time and forwards, by the convention of section 3.1, and refuses what cannot run. Time is in units, not in seconds.
#
# </div>
# <div lang="zh">
#
# 写明运行什么、按什么顺序，以及每次前向留下什么：留下反向所需的**全部**（all），只留**输入**（input），还是什么也**不留**（nothing）。这样一张清单就是一个调度。（本课说“保存”，指一级的前向为反向存下的全部；说“留住”，指只留下一份输入。）链上的一环叫做一**级**（stage），这里就是一层。`simulate` 是裁判：它按 3.1 节的约定清点字节、时间和前向次数，并拒绝无法运行的调度。时间以单位计，不是秒。
#
# </div>

# %% slide="both"
from course_lib.schedule import Backward, Forward, simulate, store_all

three = Chain.uniform(3, saved_bytes=2)
forgetful = [Forward(0, "input"), Forward(1, "nothing"), Forward(2, "all"), Backward(2)]
forgetful += [Forward(0, "all"), Forward(1, "all"), Backward(1), Backward(0)]
simulate(store_all(three), three), simulate(forgetful, three)

# %% [markdown]
# <div lang="en">
#
# (After the fourth action it would refuse `Forward(1, "all")`: the input of stage 1 is gone.) A schedule draws itself, time to the right, stages upwards; below it, the bytes that the referee counts. Two schedules for 16 stages:
#
# </div>
# <div lang="zh">
#
# （第四个动作之后若要 `Forward(1, "all")`，它会拒绝：第 1 级的输入已经不在了。）调度会把自己画出来：向右是时间，向上是级；下方是裁判数出的字节。下面是 16 个级的两种调度：
#
# </div>

# %% slide="result"
from course_lib.schedule.rules import segmented

sixteen = Chain.uniform(16, saved_bytes=2)
plans = {"4 segments": segmented([0, 4, 8, 12, 16]), "tapered": segmented(tapered(16))}
title = "Only the last of the equal segments reaches the peak. Nearly all tapered ones do"
lesson_03.schedule_pictures(plans, sixteen, title=title, unit="B", scale=1)

# %% [markdown] slide={"en": "No rule fits an uneven chain. Keep **all** of the first stage, or **run on**, keep a later input, and come back.\n\nWrite it.", "zh": "参差不齐的链，没有现成的法则。**全部保留**第一级；或者**往前跑**，留住后面的输入，再回头。\n\n写出来。"}
# ## 3.5 The fastest schedule: write it / 最快的调度：由你来写
#
# <div lang="en">
#
# Real chains are uneven, and no rule fits them. Let $T_{i..n}(R)$ be the least time to run stages $i$ to $n$, given the input of stage $i$ (which is counted elsewhere) and $R$ more bytes, among schedules that never discard early what they keep. Stage $i$ takes $f_i$ forward and $g_i$ backward. There are two ways:
#
# - **keep all** of stage $i$, if that and the gradient that comes in fit, $A_i + B_i \le R$; do the others with $A_i$ less; then its backward: $f_i + T_{i+1..n}(R - A_i) + g_i$;
# - **run on** to a later stage $e$, keep its input, and come back to $i$ when $e$ to $n$ are done. Which forwards does that take, which two parts are then to be done, and with how many bytes each?
#
# The least of all these, over both ways and every $e$, is $T_{i..n}(R)$. (In these chains running on needs no more room than the backward that follows, so it needs no check of its own.)
#
# </div>
# <div lang="zh">
#
# 真实的链参差不齐，没有现成的法则。设 $T_{i..n}(R)$ 是第 $i$ 到第 $n$ 级的最短时间：从第 $i$ 级的输入出发（它由别处留着），除它之外还有 $R$ 字节可用，而且只考虑留下的东西不提前丢掉的调度。第 $i$ 级的前向用时 $f_i$，反向用时 $g_i$。有两种做法：
#
# - **全部保留**第 $i$ 级，只要它和传进来的梯度放得下，即 $A_i + B_i \le R$；其余各级少用 $A_i$；最后做它的反向：$f_i + T_{i+1..n}(R - A_i) + g_i$；
# - **往前跑**到后面的某一级 $e$，留住它的输入；第 $e$ 到第 $n$ 级做完之后，再回到第 $i$ 级。这要做哪些前向？接下来要做的是哪两部分，各有多少字节可用？
#
# 两种做法、每一个 $e$ 都试过，其中最小的就是 $T_{i..n}(R)$。（在这些链里，往前跑所需的字节不超过随后的反向，所以不必另外检查。）
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **Exercise 4.** Write it, in about ten lines, in place of `return None`. `stages` is a tuple: `stages[1:]` are the others, `stages[:e]` those that were passed. A stage has `forward_time`, `backward_time`, `saved_bytes` ($A_i$) and `output_bytes` ($B_i$; its output is the next one's input). Where nothing fits, the time is `inf`. The check tries four chains, with every room, against all schedules of this kind, and names the mistake that it finds.
#
# </div>
# <div lang="zh">
#
# **练习 4。** 把它写在 `return None` 的位置，大约十行。`stages` 是元组，`stages[1:]` 是其余各级，`stages[:e]` 是跑过的那些级。每一级有 `forward_time`、`backward_time`、`saved_bytes`（$A_i$）和 `output_bytes`（$B_i$；它的输出就是下一级的输入）。什么都放不下时，时间是 `inf`。检查在四条链上，对每一种可用字节数，把你的结果与所有这类调度逐一比较，并指出错在哪里。
#
# </div>


# %% minutes=25
@cache
def fastest(stages, room):
    if not stages:
        return 0
    return None


lesson_03.check_recurrence(fastest)


# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not lesson_03.check_recurrence.accepted:

    @cache
    def fastest(stages, room):
        if not stages:
            return 0
        first, best = stages[0], inf
        if first.saved_bytes + first.output_bytes <= room:
            later = fastest(stages[1:], room - first.saved_bytes)
            best = first.forward_time + later + first.backward_time
        for e in range(1, len(stages)):
            ahead = sum(stage.forward_time for stage in stages[:e])
            later = fastest(stages[e:], room - stages[e - 1].output_bytes)
            best = min(best, ahead + later + fastest(stages[:e], room))
        return best


lesson_03.check_recurrence(fastest)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# The way of running on takes the forwards $f_i + \dots + f_{e-1}$; then $T_{e..n}(R - B_{e-1})$, with the kept input beside it; then that input is gone, and stages $i$ to $e - 1$ have all of $R$ again, $T_{i..e-1}(R)$. The library's `optimal` is your recurrence for long chains: it counts what operators take while they run, too, and gives the schedule itself. Both on a pyramid, as convolutional networks are: twelve stages whose outputs shrink from 32 MB to 1.
#
# </div>
# <div lang="zh">
#
# 往前跑的做法：前向用时 $f_i + \dots + f_{e-1}$；然后是 $T_{e..n}(R - B_{e-1})$，旁边还留着那份输入；做完它就释放了，第 $i$ 到第 $e - 1$ 级又有整个 $R$ 可用，即 $T_{i..e-1}(R)$。库里的 `optimal` 就是你的递推式，只是能用于长链：它还计入算子运行时的占用，并且给出调度本身。拿一个卷积网络那样的金字塔来对照：十二个级，输出从 32 MB 缩小到 1 MB。
#
# </div>

# %% slide="result"
from course_lib.schedule import optimal

pyramid, rows = lesson_03.pyramid(), []
for budget in (140, 170, 200, 300):
    room = budget * 10**6 - pyramid.input_bytes
    library = simulate(optimal(pyramid, budget * 10**6), pyramid).time
    rows.append((budget, fastest(pyramid.stages, room), int(library)))
table(["budget (MB)", "`fastest`", "`optimal`"], rows)

# %% [markdown] slide={"en": "The decoder of lesson 01 as a chain of 18 stages.\n\n**Guess first.** For half the bytes, which stages would you forget?", "zh": "第 01 课的解码器，一条 18 级的链。\n\n**先猜**：要把字节减半，你会忘掉哪些级？"}
# ## 3.6 The course's decoder / 本课程的解码器
#
# <div lang="en">
#
# Now the decoder of lesson 01, as a chain of 18 stages: embedding, attention and feed-forward network of each layer, and the head with its loss. `Chain.profile` runs each stage forward and backward once under the meter, here on symbolic tensors. Its clock is FLOPs; the embedding multiplies nothing, so it is charged one unit for each number it writes.
#
# </div>
# <div lang="zh">
#
# 现在轮到第 01 课的解码器，它是一条 18 级的链：嵌入，各层的注意力与前馈网络，以及输出头与损失。`Chain.profile` 把每一级的前向和反向各运行一次，同时用计量器测量，这里用符号张量。时钟是 FLOPs；嵌入没有乘法，每写出一个数算一个单位。
#
# </div>


# %% slide="result"
def make_stages(**changes):
    sizes = {"vocabulary": 2048, "hidden": 256, "heads": 8, "layers": 8, "sequence": 128}
    decoder, tokens = Decoder(**{**sizes, **changes}), random_tokens(8, 128, 2048)
    return loss_stages(decoder, tokens[:, 1:]), tokens[:, :-1].contiguous()


stages, inputs = make_stages()
with symbolic():
    chain = Chain.profile(*make_stages())
lesson_03.stages_of_a_decoder(chain)

# %% [markdown]
# <div lang="en">
#
# Kept whole, the chain takes 195.2 MB: lesson 01's peak of 277.7 MB less weights and Adam's state, 82.5 MB. **Guess first:** for half of that, which stages would you forget, and how much more time does it take? (At the rows: e, embedding; a, attention; f, feed-forward; h, head.)
#
# </div>
# <div lang="zh">
#
# 全部保留时，这条链占 195.2 MB：正是第 01 课的峰值 277.7 MB 减去权重和 Adam 状态的 82.5 MB。**先猜**：要降到一半，你会忘掉哪些级，让它们的前向再跑一遍？时间多花多少？（各行的字母：e 是嵌入，a 是注意力，f 是前馈，h 是输出头。）
#
# </div>

# %%
full = simulate(store_all(chain), chain).peak_bytes
plans = {"store all": store_all(chain)}
plans |= {"half": optimal(chain, full // 2), "a quarter": optimal(chain, full // 4)}

# %% jupyter={"source_hidden": true} slide="result"
title = "With half the bytes, attention is recomputed first: it frees as many bytes for fewer FLOPs"
lesson_03.schedule_pictures(plans, chain, title=title, panel_height=2.0, rows="e" + 8 * "af" + "h")

# %% [markdown] slide={"en": "Half the bytes for 17% more time.\n\nA promise. Lesson 02 keeps it: a `no_grad` forward first, one with a graph later.", "zh": "字节减半，时间多 17%。\n\n这只是承诺。用第 02 课的办法兑现：先是 `no_grad` 的前向，以后再来一次带计算图的。"}
# <div lang="en">
#
# Half the bytes for 17% more time. Attention goes first: it keeps as much as a feed-forward network, and costs 0.671 GFLOPs to run again instead of 1.074.
#
# Simulated bytes are a promise. `ScheduledSequential` runs a schedule under autograd, by what you wrote in lesson 02. `Forward(i, "input")` is your checkpoint's forward: under `no_grad`, its input kept. `"nothing"` is the same, its input given up. `"all"` is what your backward did: the input detached, the stage run again with a graph. `Backward(i)` goes through that graph from the gradient that has arrived, and hands on the input's. (Section 3.14 does it in a dozen lines.) Gradients first, then bytes:
#
# </div>
# <div lang="zh">
#
# 字节减半，时间多 17%。先忘掉的是注意力：它保存的与前馈网络一样多，重做一次前向只要 0.671 GFLOPs，而不是 1.074。
#
# 模拟出来的字节数只是承诺。`ScheduledSequential` 让调度在 autograd 里真正跑起来，用的就是你在第 02 课写的东西：`Forward(i, "input")` 是你那个检查点的前向，在 `no_grad` 里运行，留住输入；`"nothing"` 一样，只是输入也不留；`"all"` 是你在反向里做的事：把输入 detach，带计算图再跑一遍这一级；`Backward(i)` 从传来的梯度出发，沿这张图反向走一遍，再把输入的梯度往回传。（3.14 节用十几行写出来。）先看梯度，再看字节：
#
# </div>

# %%
from course_lib.schedule import ScheduledSequential


def scheduled(layers, schedule, x):
    return ScheduledSequential(layers, schedule)(x)


plain = gradients(in_segments, stages, [0, 18], inputs)
all(map(torch.equal, plain, gradients(scheduled, stages, plans["half"], inputs)))

# %% slide="result"
cost_of = partial(lesson_03.cost_of, make_stages)  # symbolic: (peak, FLOPs) of forward and backward
half = cost_of(scheduled, plans["half"])
predictions([("half", simulate(plans["half"], chain).peak_bytes, half[0])], unit="bytes")

# %% [markdown] slide={"en": "All budgets at once: the **Pareto frontier**.\n\n**Guess first.** Is the best cut into segments far above it?", "zh": "所有预算一起看，就是**帕累托前沿**。\n\n**先猜**：最好的分段，比它高出很多吗？"}
# ## 3.7 Where does the program pay? / 程序在哪里划算？
#
# <div lang="en">
#
# As promised, to the 8 bytes of the loss. All budgets at once are the **Pareto frontier**: of the schedules that never give up early what they kept, every point that no other equals or beats in both bytes and time.
#
# A plain cut needs no program. All but its last segment run twice, so its time depends on where the last one begins, and for each such place there is a best cut. **Guess first:** how far above the frontier are these, for the decoder and for the pyramid?
#
# </div>
# <div lang="zh">
#
# 与承诺一致，只差损失的 8 字节。所有预算一起看，就是**帕累托前沿**：在“留下的东西不提前丢掉”的调度里，前沿上的每一点都不被支配，也就是说，找不到别的调度在字节和时间上都不比它差。
#
# 分段用不着程序。除最后一段外，各段都跑两遍，所以时间只取决于最后一段从哪里开始；每一个起点，都有一个最好的切法。**先猜**：它们比前沿高出多少？解码器如何，金字塔又如何？
#
# </div>

# %% slide="result"
lesson_03.draw_cuts({"the decoder, 18 stages": chain, "a pyramid, 12 stages": pyramid})

# %% [markdown] slide={"en": "Equal stages: cuts do as well. Uneven: 131 MB, not 163.\n\n**Guess first.** A checkpoint around each layer: above the frontier, or below?", "zh": "各级相近：一个循环加检查点就够。参差不齐：131 MB 对 163 MB。\n\n**先猜**：每层一个检查点，在前沿的上方还是下方？"}
# <div lang="en">
#
# On the decoder the best cuts lie on the frontier from 81 MB down, and above that they take 9% more bytes at most: where stages are nearly equal, a loop of checkpoints is as good as the program. On the pyramid no cut goes below 163 MB, whatever its time; the program goes to 131, for 1.25.
#
# **Guess first:** lesson 02's one line, a checkpoint around each layer, on that left picture: above the frontier, or below?
#
# </div>
# <div lang="zh">
#
# 在解码器上，从 81 MB 往下，最好的切法都在前沿上；再往上，最多也只多用 9% 的字节：各级相近时，一个循环加检查点就与程序一样好。在金字塔上，无论花多少时间，没有一种切法低于 163 MB；程序用 1.25 倍的时间，降到 131 MB。
#
# **先猜**：第 02 课的那一行，每层一个检查点，放到左图里，会在前沿的上方还是下方？
#
# </div>

# %%
each_layer = cost_of(in_segments, [0, *range(1, 18, 2), 18])
each_stage = cost_of(in_segments, range(19))
products = [2 * 1024 * 256 * 256, 2 * 1024 * 1024 * 256]  # FLOPs: attention's last, feed-forward's
finer = lesson_03.frontier_with_early_stop(chain, [0, *products * 8, 0])
lines = {"frontier": frontier(chain), "frontier with early stop": finer}
arms = {"optimal (run)": ({"half": half}, "o", "#228833")}
arms["checkpoints (run)"] = ({"each layer": each_layer, "each stage": each_stage}, "D", "#AA3377")

# %% jupyter={"source_hidden": true} slide="result"
title = "Lesson 02's checkpoints lie below the frontier, unless the frontier includes early stop"
lesson_03.draw_frontier(title, lines, arms, xlim=(20, 205))

# %% [markdown] slide={"en": "**A proof of optimality is a proof about a model.**\n\nEarly stop leaves out a product. Cut finer, and the frontier moves.", "zh": "**证明了最优，只是证明了在某个模型之下最优。**\n\n提前终止省去一次乘法。切得更细，前沿就会移动。"}
# <div lang="en">
#
# Far below: at a peak of 36.7 MB it takes 1.21 times the baseline's FLOPs, where whole stages take 1.31 times. A checkpoint's second run stops early (lesson 02): it leaves out the segment's last product and its output. **A proof of optimality is a proof about a model**, and this model had no half stages. Tell it: in your recurrence the last stage of `stages[:e]` is the shorter one, and nothing else changes. Cut finer, and the frontier moves: the second line.
#
# And a surprise: a checkpoint around each *stage*, twice as many, costs fewer FLOPs, 1.19, since each of them leaves out a product; for 44.1 MB it lies on the new line.
#
# The clock is FLOPs still. Softmax, GELU and LayerNorm cost nothing on it, and take time on your machine. With `Chain.profile(..., clock=True)` the same program counts seconds.
#
# </div>
# <div lang="zh">
#
# 远在下方。峰值 36.7 MB 时，FLOPs 是基线的 1.21 倍，而以整级为单位要 1.31 倍。检查点的第二遍会提前终止（第 02 课）：一段的最后一次乘法和它的输出都省了。**证明了最优，只是证明了在某个模型之下最优**，而这个模型里没有半个级。那就告诉它：在你的递推式里，`stages[:e]` 的最后一级换成较短的那个，其余不变。切得更细，前沿就会移动：这就是第二条线。
#
# 还有一个意外：给每一*级*都加检查点，数目多了一倍，FLOPs 反而更少，只要 1.19，因为每个检查点都省去一次乘法；44.1 MB，正好落在新的线上。
#
# 时钟仍是 FLOPs。softmax、GELU 和 LayerNorm 在上面不花时间，在你的机器上却要花。用 `Chain.profile(..., clock=True)`，同样的程序就以秒计。
#
# </div>

# %% [markdown]
# ## 3.8 In your own code / 实际怎么写
#
# <div lang="en">
#
# | for | you type | here |
# |---|---|---|
# | equal segments | `checkpoint_sequential(layers, k, x, use_reentrant=False)` | run, 3.1 |
# | any segments | `checkpoint(layers[i:j], x, use_reentrant=False)` in a loop | run, 3.1 |
# | a byte budget, your recurrence: rotor | `chain = rotor.Checkpointable(layers)`, `chain.measure(x)`, `chain.compute_sequence(limit)` | not run |
# | the same for any graph: Rockmate | `rockmate.Rockmate(model, x, limit)` | not run |
# | revolve, and its relatives | `checkpoint_schedules.Revolve(steps, slots)` | not run; revolve itself, 3.15 |
# | a budget for the compiler | `torch._functorch.config.activation_memory_budget = 0.5`, then `torch.compile(model)` | its graphs run, 3.16 |
# | groups of N layers, Megatron-LM | `--recompute-granularity full --recompute-method uniform --recompute-num-layers N` | the same groups run, 3.9; the flags not |
# | the first N layers of each pipeline stage, Megatron-LM | `--recompute-method block --recompute-num-layers N` | not run |
#
# </div>
# <div lang="zh">
#
# | 用途 | 代码 | 本课是否运行 |
# |---|---|---|
# | 等长的段 | `checkpoint_sequential(layers, k, x, use_reentrant=False)` | 3.1 节运行过 |
# | 任意的段 | 在循环里用 `checkpoint(layers[i:j], x, use_reentrant=False)` | 3.1 节运行过 |
# | 字节预算，也就是你的递推式：rotor | `chain = rotor.Checkpointable(layers)`，`chain.measure(x)`，`chain.compute_sequence(limit)` | 没有运行 |
# | 同样的事，任意计算图：Rockmate | `rockmate.Rockmate(model, x, limit)` | 没有运行 |
# | revolve 及其同类 | `checkpoint_schedules.Revolve(steps, slots)` | 没有运行；revolve 本身见 3.15 节 |
# | 给编译器一个预算 | `torch._functorch.config.activation_memory_budget = 0.5`，再 `torch.compile(model)` | 3.16 节运行了它的图 |
# | 每组 N 层，Megatron-LM | `--recompute-granularity full --recompute-method uniform --recompute-num-layers N` | 3.9 节运行了同样的分组；没有用这些参数运行 |
# | 每个流水线阶段（pipeline stage）的前 N 层，Megatron-LM | `--recompute-method block --recompute-num-layers N` | 没有运行 |
#
# </div>

# %% [markdown]
# ## 3.9 Claims and measurements / 说法与实测
#
# <div lang="en">
#
# Three sentences from public pages. The third is tried on the decoder: a checkpoint around each layer, and around every two.
#
# </div>
# <div lang="zh">
#
# 三句说法，都有公开出处。第三句拿解码器来检验：每层一个检查点，以及每两层一个。
#
# </div>


# %% slide="result"
def measured_peak(cuts):
    return lesson_03.peak_and_flops(in_segments, hundred[: cuts[-1]], cuts)[0]


pairs, _ = cost_of(in_segments, [0, *range(1, 18, 4), 18])  # two layers to a checkpoint
figures = lesson_03.figures_of_claims(measured_peak, tapered, (each_layer[0], pairs))
what_you_may_have_read("03", *figures)

# %% [markdown] slide={"en": "The same step as ever, one technique a row.\n\nHalf the activations: what do these 180.1 MB consist of?", "zh": "还是那一步，一种技术一行。\n\n激活值减半：这 180.1 MB 由什么组成？"}
# ## 3.10 The ledger / 账本
#
# <div lang="en">
#
# The same step as ever, with Adam, and gradients that arrive in backward; the schedule is the one for half the activations.
#
# </div>
# <div lang="zh">
#
# 还是那一步：用 Adam，梯度在反向中才到来；调度用的是激活值减半的那一个。
#
# </div>

# %% slide="result"
adam = torch.optim.Adam(stages.parameters())
adam.step()  # with the gradients of section 3.6: makes its state
stages.zero_grad()
with MemoryMeter(stages, adam) as meter:
    scheduled(stages, plans["half"], inputs).backward()
    adam.step()
ledger("03", "optimal schedule, half the activations", meter, flops=half[1])

# %% [markdown]
# <div lang="en">
#
# 97.6 MB of activations and 82.5 of weights and state. Why half, and not lesson 02's 134.0 MB? Half costs 1.17, less than lesson 02's 1.21. At 1.21 whole stages would keep 73.4 MB, twice the 36.7 of checkpoints that stop early: there, lesson 02's row is the better one.
#
# </div>
# <div lang="zh">
#
# 激活值 97.6 MB，权重和优化器状态 82.5 MB。为什么取一半，而不是第 02 课的 134.0 MB？取一半只要 1.17，比第 02 课的 1.21 便宜。若也花 1.21，以整级为单位要留 73.4 MB，是会提前终止的检查点（36.7 MB）的两倍：在那个价位上，第 02 课的那一行更好。
#
# </div>

# %% [markdown] slide={"en": "$k^* = \\sqrt{L \\cdot A / B}$; segments that get shorter go lower still.\n\nFor uneven chains, a recurrence of ten lines.", "zh": "$k^* = \\sqrt{L \\cdot A / B}$；段越往后越短，峰值更低。\n\n参差不齐的链，用十行的递推式。"}
# ## 3.11 Summary / 小结
#
# <div lang="en">
#
# - $k$ equal segments peak at about $k B + \frac{L}{k} A + B$, least at $k^* = \sqrt{L \cdot A / B}$. The framework's cut is uneven: its last segment takes the rest.
# - Segments that get shorter towards the end approach $1 / \sqrt 2$ of that as $L$ grows, still for one extra forward pass. No cut goes below them; for 100 equal layers, no schedule of whole layers that never gives up early what it kept.
# - For uneven chains a recurrence of ten lines finds the fastest of the schedules that never give up early what they kept, and it runs as predicted. (Others can be faster still: section 3.13.)
# - Where stages are nearly equal, a good cut is as good. The program pays where they differ.
# - Which schedule is optimal depends on what it may forget. A second run that stops early goes below the frontier of whole stages. Section 3.16 tries to forget single operators.
#
# **Next:** [lesson 04](04_offload.ipynb) moves bytes elsewhere instead of forgetting them.
#
# </div>
# <div lang="zh">
#
# - $k$ 个相等的段，峰值约为 $k B + \frac{L}{k} A + B$，在 $k^* = \sqrt{L \cdot A / B}$ 处最小。框架的切法并不均衡：余下的全归最后一段。
# - 让段越往后越短，随着 $L$ 增大，峰值趋近上述值的 $1 / \sqrt 2$，仍然只多做一次前向。没有别的切法更低；对 100 个相同的层，只要留下的东西不提前丢掉，以整层为单位的调度也没有更低的。
# - 对参差不齐的链，十行的递推式就能在“留下的东西不提前丢掉”的调度里找出最快的，运行起来与预测一致。（别的调度有可能更快：3.13 节。）
# - 各级相近时，好的切法就够了；参差不齐时，程序才划算。
# - 哪个调度最优，取决于允许忘掉什么。第二遍提前终止，就能降到整级的前沿以下。以单个算子为单位来忘掉会怎样，见 3.16 节。
#
# **下一步**：[第 04 课](04_offload.ipynb)不忘掉字节，而是把它们搬到别处。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **Sources.** Chen et al. 2016, *Training Deep Nets with Sublinear Memory Cost*, arXiv:1604.06174. Griewank 1992, *Achieving logarithmic growth of temporal and spatial complexity in reverse automatic differentiation*, Optimization Methods and Software 1. Griewank and Walther 2000, *Algorithm 799: revolve*, ACM TOMS 26(1). Beaumont et al. 2019, *Optimal checkpointing for heterogeneous chains*, arXiv:1911.13214: the recurrence, whose program is **rotor**. Jain et al. 2019, *Checkmate*, arXiv:1910.02653. Zhao et al. 2023, *Rockmate*, arXiv:2307.01236, and Gusak et al. 2025, *HiRemate*, ICML (PMLR 267), cut finer than stages. The package `checkpoint_schedules`, of the Firedrake project. PyTorch's `torch._functorch.partitioners`, read and run. The READMEs of cybertronai/gradient-checkpointing (2018) and NVIDIA/Megatron-LM, on GitHub (claims two and three).
#
# </div>
# <div lang="zh">
#
# **出处。** Chen et al. 2016，*Training Deep Nets with Sublinear Memory Cost*，arXiv:1604.06174。Griewank 1992，*Achieving logarithmic growth of temporal and spatial complexity in reverse automatic differentiation*，Optimization Methods and Software 1。Griewank 和 Walther 2000，*Algorithm 799: revolve*，ACM TOMS 26(1)。Beaumont et al. 2019，*Optimal checkpointing for heterogeneous chains*，arXiv:1911.13214：递推式的来源，其程序叫 **rotor**。Jain et al. 2019，*Checkmate*，arXiv:1910.02653。Zhao et al. 2023，*Rockmate*，arXiv:2307.01236，以及 Gusak et al. 2025，*HiRemate*，ICML（PMLR 267），切得比级更细。`checkpoint_schedules`，出自 Firedrake 项目的软件包。PyTorch 的 `torch._functorch.partitioners`（我们读过并运行过其源码）。GitHub 上 cybertronai/gradient-checkpointing（2018）和 NVIDIA/Megatron-LM 的 README（第二、三条说法）。
#
# </div>

# %% [markdown]
# ## In depth / 深入
#
# <div lang="en">
#
# From here on nothing is needed for the other lessons. Each section stands alone; it uses the names that the lesson has defined.
#
# </div>
# <div lang="zh">
#
# 以下内容，其他各课都不会用到。各节互相独立，只用到前面正文里定义过的名字。
#
# </div>

# %% [markdown]
# ## 3.12 Other depths / 其他深度
#
# <div lang="en">
#
# The same sweep for 16, 36 and 64 layers, with your prediction for every $k$ as a dot. And depths that are no squares: for 50 layers $\sqrt L$ lies between 7 and 8, while $k^* = \sqrt{2 \cdot 50} = 10$ divides 50.
#
# </div>
# <div lang="zh">
#
# 对 16、36 和 64 层同样扫一遍，小点是你对每个 $k$ 的预测。还有不是平方数的深度：50 层时 $\sqrt L$ 在 7 与 8 之间，而 $k^* = \sqrt{2 \cdot 50} = 10$ 能整除 50。
#
# </div>


# %%
def predicted_for(depth, k):
    return predicted_peak(framework_cuts(depth, k))


tried = {16: (2, 4, 5, 6, 8, 16), 36: (3, 6, 8, 9, 12, 13, 36), 64: (4, 8, 11, 16, 22, 64)}
sweeps = {}
for depth, ks in tried.items():
    peaks = {k: lesson_03.peak_and_flops(framework, hundred[:depth], k)[0] for k in ks}
    sweeps[depth] = peaks
lesson_03.draw_sweeps(sweeps, predicted_for)

# %%
rows = []
for k in (10, 14, 17, 20):
    peak = round(measured_peak(balanced(100, k)) / B, 1)
    rows.append((k, round(k + 200 / k + 1, 1), round(sweep[k] / B, 1), peak))
table(
    [
        "segments k",
        "the rule (units of B)",
        "`checkpoint_sequential` (units of B)",
        "balanced (units of B)",
    ],
    rows,
)

# %% [markdown]
# <div lang="en">
#
# 100 layers: 17 balanced segments go to 28, below the rule's least, 29.3. Why less than the rule? Fifteen of them have six layers, and the two shorter ones stand at the end. Other depths, with the tapered cut beside them:
#
# (One subtlety of the formula: of a segment's $2 \ell$ activations, one is the input of its first Linear. That is the boundary itself, and counted already: $2 \ell - 1$ are left. But for a moment there are two gradients, while GELU's backward makes one from the other. Together that is $\ell A + B$.)
#
# </div>
# <div lang="zh">
#
# 100 层：均衡的 17 段降到 28，比法则的最小值 29.3 还低。为什么会比法则低？其中十五段各有六层，较短的两段排在最后。再看其他深度，旁边是渐短的切法：
#
# （公式有一处细节：一段的 $2 \ell$ 份激活值里，有一份是第一个 Linear 的输入，也就是边界本身，已经算过了，所以剩下 $2 \ell - 1$ 份；不过 GELU 的反向由一个梯度算出另一个时，有一刻两个梯度并存。合起来正是 $\ell A + B$。）
#
# </div>

# %%
rows = []
for depth in (16, 36, 50, 64):
    ways = {"√L": balanced(depth, round(depth**0.5)), "tapered": tapered(depth)}
    ways["k*"] = balanced(depth, round((2 * depth) ** 0.5))
    for name, cuts in ways.items():
        measured = round(measured_peak(cuts) / B, 1)
        rows.append((depth, name, len(cuts) - 1, predicted_peak(cuts) // B, measured))
table(["L", "cut", "segments k", "predicted (units of B)", "measured (units of B)"], rows)

# %% [markdown]
# ## 3.13 Giving up early / 提前丢掉
#
# <div lang="en">
#
# Your recurrence never gives up early what it has kept. Six stages have 394 such schedules, and it finds the fastest of them. Here it is beside all 394, for an uneven chain:
#
# </div>
# <div lang="zh">
#
# 你的递推式从不提前丢掉留下的东西。六个级有 394 种这样的调度，它能找出其中最快的。拿一条参差不齐的链，与全部 394 种对照：
#
# </div>

# %%
from course_lib.schedule import Stage

sizes = [(1, 3), (4, 2), (2, 5), (5, 2), (1, 4), (3, 2)]  # forward time, bytes kept
six = Chain(tuple(Stage(time, 2 * time, 1, kept) for time, kept in sizes), input_bytes=1)
costs = [simulate(actions, six) for actions in lesson_03.every_schedule(0, 5)]
rows = []
for room in (7, 9, 11, 15, 19):
    searched = min(cost.time for cost in costs if cost.peak_bytes <= six.input_bytes + room)
    rows.append((room, fastest(six.stages, room), int(searched)))
table(["bytes besides the input", "`fastest`", "fastest of 394"], rows)

# %% [markdown]
# <div lang="en">
#
# And the schedules that do give up early: is none of them ever faster? On equal stages we have found none. But take five stages with forward times 10, 5, 5, 5, 10 (each backward 1), outputs of 2, 4, 4, 1, 4 bytes, and 3, 4, 4, 1, 4 bytes kept. Within 13 bytes `optimal` takes 80:
#
# </div>
# <div lang="zh">
#
# 那么，会提前丢掉的调度里，就没有更快的吗？各级相同时，我们没有找到。可是取这样五个级：前向用时 10、5、5、5、10（反向各 1），输出 2、4、4、1、4 字节，保存 3、4、4、1、4 字节。13 字节之内，`optimal` 用时 80：
#
# </div>

# %%
five = lesson_03.five_stages()
[*optimal(five, 13)], simulate(optimal(five, 13), five)

# %% [markdown]
# <div lang="en">
#
# **Exercise 5.** Beat it: change the list, so that it stays within 13 bytes and takes less than 80. Keep an input on the way, and give it up before its backward. Where does that save a run?
#
# </div>
# <div lang="zh">
#
# **练习 5。** 胜过它：改这张清单，使它不超过 13 字节，用时少于 80。在途中留住一份输入，又在那一级的反向之前把它丢掉。这样在哪里能少跑一遍？
#
# </div>

# %% minutes=12
actions = [*optimal(five, 13)]
lesson_03.check_gives_up_early(actions)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not lesson_03.check_gives_up_early.accepted:
    actions = [Forward(0, "input"), Forward(1, "input"), Forward(2, "nothing")]
    actions += [Forward(3, "nothing"), Forward(4, "all"), Backward(4)]
    actions += [Forward(1, "nothing"), Forward(2, "all"), Forward(3, "all")]  # x_1 is given up
    actions += [Backward(3), Backward(2)]
    actions += [Forward(0, "all"), Forward(1, "all"), Backward(1), Backward(0)]

lesson_03.check_gives_up_early(actions)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# 70: one run of stage 0 less. From $x_1$, kept on the way, stages 2 and 3 are reached without starting over; then it is given up, and its two bytes make room to keep all of both. So 70 within 13 bytes lies *below* the frontier that the library computes. Beaumont et al. say so themselves: their program finds the best **persistent** schedule, and so do ours. Does such a list run? Under autograd, on five layers of the chain:
#
# </div>
# <div lang="zh">
#
# 70：第 0 级少跑一遍。途中留住了 $x_1$，去第 2、3 级就不必从头开始；到了那里就把它丢掉，让出的两个字节，正好够把这两级全部保留。所以“13 字节、用时 70”落在库算出的前沿*下方*。Beaumont 等人自己也说明了：他们的程序找的是最好的**持久**（persistent）调度，我们的也是。这样的清单真能跑吗？在 autograd 里，用链上的五层来试：
#
# </div>

# %%
from course_lib.schedule import Schedule

early = Schedule(actions)
layers5 = hundred[:5]
plain5 = gradients(in_segments, layers5, [0, 5], x)
equal = all(map(torch.equal, plain5, gradients(scheduled, layers5, early, x)))
promised = simulate(early, Chain.profile(layers5, x)).peak_bytes
ran, _ = lesson_03.peak_and_flops(scheduled, layers5, early)
print("equal gradients:", equal)
predictions([("discarded early", promised, ran)], unit="bytes")

# %% [markdown]
# ## 3.14 The executor in a dozen lines / 十几行的执行器
#
# <div lang="en">
#
# What `ScheduledSequential` does, without its care for random numbers, buffers and autocast. Compare it with your checkpoint of lesson 02: the same `no_grad` forward, the same detached input, the same backward from the gradient that has arrived; only *when* is now the list's.
#
# </div>
# <div lang="zh">
#
# `ScheduledSequential` 做的就是下面这些，只是没有照管随机数、缓冲区和 autocast。与你在第 02 课写的检查点对照：同样的 `no_grad` 前向，同样把输入 detach，同样从传来的梯度开始反向；只有*何时*做，如今由清单决定。
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
hundred.zero_grad()
execute(hundred, segmented(tapered(100)), x, torch.linspace(-1, 2, 25_000).view(1000, 25))
mine = [parameter.grad for parameter in hundred.parameters()]
all(map(torch.equal, gradients(in_segments, hundred, [0, 100], x), mine))

# %% [markdown]
# <div lang="en">
#
# One promise is not kept to 8 bytes. For a quarter of the decoder's bytes:
#
# </div>
# <div lang="zh">
#
# 有一个承诺，误差不止 8 字节。把解码器的字节降到四分之一：
#
# </div>

# %%
promised = simulate(plans["a quarter"], chain).peak_bytes
rows = [("a quarter", promised, cost_of(scheduled, plans["a quarter"])[0])]
untied, _ = cost_of(scheduled, plans["a quarter"], tied=False)
rows.append(("a quarter, two matrices", promised, untied))
predictions(rows, unit="bytes")

# %% [markdown]
# <div lang="en">
#
# 1.06 MB above the promise. The head's matrix is the embedding's, and autograd holds the head's share of its gradient, 2.1 MB, until the embedding's share has come: so the next moment, 1.04 MB lower in the simulation, is now the highest. A chain of stages knows nothing of that. With a matrix each the error is 8 bytes. (Hence section 3.7's checkpoint around each layer lies a little above its line, too.)
#
# </div>
# <div lang="zh">
#
# 比承诺高 1.06 MB。输出头的矩阵就是嵌入的矩阵，autograd 要把输出头那一份梯度（2.1 MB）一直留到嵌入那一份算出来，于是模拟中低 1.04 MB 的下一个时刻反而成了最高。由级组成的链不知道这件事。两者各用一个矩阵时，误差就是 8 字节。（3.7 节里每层一个检查点略高于那条线，也是这个缘故。）
#
# </div>

# %% [markdown]
# ## 3.15 Forget again, and again / 一忘再忘
#
# <div lang="en">
#
# **Recursive**: keep the middle, do the right half, then the left; each half likewise. About $\log_2 L$ inputs are alive, and a stage runs $\frac12 \log_2 L$ more times on average. (Up to the pictures of this section a stage keeps one activation, $A = B$.)
#
# </div>
# <div lang="zh">
#
# **递归**：留住中点，先做右半，再做左半；每一半也照此办理。同时留着的输入约有 $\log_2 L$ 份，每一级平均多运行 $\frac12 \log_2 L$ 次。（本节到画图之前，一级只保存一份激活值，$A = B$。）
#
# </div>

# %%
from course_lib.schedule import binomial, recursive, segments

rows = []
for power in (4, 6, 8, 10):
    depth = 2**power
    links = Chain.uniform(depth)
    ways = (store_all(links), segments(links, 2 ** (power // 2)), recursive(links))
    peaks = [simulate(way, links).peak_bytes for way in ways]
    forwards = simulate(ways[-1], links).forward_steps
    rows.append((depth, *peaks, round(forwards / depth, 2), 1 + power / 2))
table(["L", "store all", "√L segments", "recursive", "forwards per stage", "predicted"], rows)

# %% [markdown]
# <div lang="en">
#
# Halving is not the best. A **slot** holds one input, and the chain's own takes one; a forward that keeps nothing for its own backward is a **run ahead**. With $c$ slots, and no stage running ahead more than $r$ times, Griewank (1992) reverses
#
# $$\beta(c, r) = \binom{c + r}{c}$$
#
# stages by a **binomial schedule**; Griewank and Walther (2000), whose program is called revolve, do it with the fewest forwards. Where to keep the next input? Try every place, with a slot less for the right part, and then the left part. It is your recurrence of section 3.5, with slots for bytes:
#
# </div>
# <div lang="zh">
#
# 对半分并不是最好的。一个**槽**（slot）存放一份输入，链自己的输入也占一个；一次前向若不留下全部，就算这一级**空跑**了一次。有 $c$ 个槽，每一级空跑不超过 $r$ 次，Griewank（1992）的调度可以反向走完
#
# $$\beta(c, r) = \binom{c + r}{c}$$
#
# 级，这叫**二项式调度**；Griewank 和 Walther（2000）的程序叫做 revolve，用的前向次数最少。下一份输入该留在哪里？每个位置都试一遍：先做右边的部分，可用的槽少一个；再做左边的部分。这就是你在 3.5 节写的递推式，只是把字节换成了槽：
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
table(["slots c", "r = 1", "r = 2", "r = 3", "β(c, r)"], rows)

# %% [markdown]
# <div lang="en">
#
# Four slots and three runs ahead reverse $\binom{7}{4} = 35$ stages. A thousand stages with 32 slots take 2.4 more forwards per stage. And with stages that keep two: three schedules of 16 that all peak at 8.
#
# </div>
# <div lang="zh">
#
# 四个槽、空跑三次，可以反向走完 $\binom{7}{4} = 35$ 级。一千个级、32 个槽，每级要多做 2.4 次前向。下面是一级保存两份时，16 个级的三种调度，峰值都是 8。
#
# </div>

# %%
round(extra_steps(1000, 32) / 1000, 2)

# %%
plans = {"recursive": recursive(sixteen), "binomial, 4 slots": binomial(16, 4)}
plans["optimal"] = optimal(sixteen, 8)
title = "The same peak in less time: late stages keep single inputs, early ones are kept whole"
lesson_03.schedule_pictures(plans, sixteen, title=title, unit="B", scale=1)

# %%
measured_chain = Chain.profile(hundred[:16], x)
rows = []
for name, plan in plans.items():
    promised = simulate(plan, measured_chain).peak_bytes
    rows.append((name, promised, lesson_03.peak_and_flops(scheduled, hundred[:16], plan)[0]))
predictions(rows, unit="bytes")

# %% [markdown]
# ## 3.16 What a compiler does by itself / 编译器自己会做什么
#
# <div lang="en">
#
# PyTorch's compiler traces forward and backward into one graph and cuts it in two: what crosses the cut is saved. Its default, 1.0, is a minimal cut that minimises run time, and may already recompute what is cheap; 0 keeps the inputs only, as one checkpoint around everything. A budget between is a share of the former. Where a more aggressive cut doesn't get there, a knapsack solver chooses (here at a half and below).
#
# We run both graphs as they are, in two ways: **holding** the saved tensors until backward returns, or **releasing** each after its last use. `torch.compile` releases, and reorders for the peak.
#
# </div>
# <div lang="zh">
#
# PyTorch 的编译器把前向和反向追踪成一张图，再切成两半：跨过切口的就是要保存的。默认值 1.0 是使运行时间最短的最小割，开销小的结果，这时可能已经改为重计算；0 只留输入，相当于整体一个检查点。中间的预算是前者的一个比例。更激进的割仍达不到时，由一个背包求解器来选（这里是一半及以下）。
#
# 我们直接运行这两张图，有两种方式：把保存的张量一直**持有**到反向返回，或者每个张量最后一次用完就**释放**。`torch.compile` 会释放，还会为降低峰值而调整顺序。
#
# </div>

# %%
import torch._functorch.config as compiler
from torch._functorch.aot_autograd import aot_module, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import Interpreter
from torch.utils.flop_counter import FlopCounterMode


class Releasing:
    _boxed_call = True  # the caller gives its list of values away

    def __init__(self, graph, examples):
        self.graph = graph

    def __call__(self, values):
        return Interpreter(self.graph).boxed_run(values)


def holding(graph, examples):
    return make_boxed_func(graph.forward)


# %%
def compiled(module, x, budget, how=Releasing):
    with compiler.patch(activation_memory_budget=budget):
        result = aot_module(module, how, how, min_cut_rematerialization_partition)
        result(x).sum().backward()  # compiles both graphs
    return result


def run_compiled(layers, graphs, x):
    return graphs(x)


def flops_of_graphs(graphs, x):
    with FlopCounterMode(display=False) as counter:
        graphs(x).sum().backward()
    return counter.get_total_flops()


# %%
from course_lib.memory import saved_tensors

layers16, rows = hundred[:16], []
_, plain = lesson_03.peak_and_flops(in_segments, layers16, [0, 16])
for budget in (1, 0.75, 0.5, 0.25, 0):
    released, held = compiled(layers16, x, budget), "–"
    saved = round(saved_tensors(released, x).total_bytes / B, 1)
    peak, _ = lesson_03.peak_and_flops(run_compiled, layers16, released)
    if 0 < budget < 1:
        graphs = compiled(layers16, x, budget, holding)
        held = round(lesson_03.peak_and_flops(run_compiled, layers16, graphs)[0] / B, 1)
    flops = round(flops_of_graphs(released, x) / plain, 2)
    rows.append((f"`{budget}`", saved, held, round(peak / B, 1), flops))

# %%
for name, cuts in (("4 segments", balanced(16, 4)), ("tapered", tapered(16))):
    peak, flops = lesson_03.peak_and_flops(in_segments, layers16, cuts)
    rows.append((name, "–", "–", round(peak / B, 1), round(flops / plain, 2)))
table(
    [
        "budget",
        "saved (units of B)",
        "peak, caller holds values (units of B)",
        "peak, caller releases values (units of B)",
        "FLOPs (× baseline)",
    ],
    rows,
)

# %% [markdown]
# <div lang="en">
#
# At 0.75 the peak falls for no FLOPs: only GELUs run again, and those count as free (they take time all the same). Then the saved bytes fall further, while the peak **rises again** to where it began. The caller is hardly to blame. (At 0 all runs again for 1.34, a little more than a third: the first layer's input needs no gradient, so its backward is one product and not two.) It is the choice: at 0.25 the solver keeps the results of the first seven Linears and nothing of the last nine layers, which then come back in one go. To the solver all sixteen are alike: so many bytes, so many FLOPs. How long a tensor lives it does not know. Print its choice, and then choose seven for it, spread evenly:
#
# </div>
# <div lang="zh">
#
# 0.75 时，峰值降低，一点 FLOPs 也不多花：重计算的只有 GELU，它们不计 FLOPs（时间还是要花的）。此后保存的字节继续减少，峰值却**又升回**起点。这几乎怪不得调用者。（0 时全部重做，是 1.34，比三分之一略多：第一层的输入不需要梯度，它的反向只有一次乘法，而不是两次。）问题在于选了什么：0.25 时，求解器留下前七个 Linear 的结果，最后九层什么也不留，于是反向一开始，这九层要一次全部恢复。在求解器看来，十六层的结果都一样：同样多的字节，同样多的 FLOPs。张量活多久，它并不知道。先把它的选择打印出来，再替它选七个，均匀分布：
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
    evenly = compiled(layers16, x, 0.25)

# %%
saved, flops = saved_tensors(evenly, x).total_bytes / B, flops_of_graphs(evenly, x) / plain
peak = lesson_03.peak_and_flops(run_compiled, layers16, evenly)[0] / B
row = ("`0.25`, seven spread evenly", round(saved, 1), round(peak, 1), round(flops, 2))
print(*chosen)
table(
    [
        "budget",
        "saved (units of B)",
        "peak, caller releases values (units of B)",
        "FLOPs (× baseline)",
    ],
    [row],
)

# %% [markdown]
# <div lang="en">
#
# The same bytes saved, the same FLOPs, and half the peak. Fewer saved bytes are not a lower peak; **which** bytes decides.
#
# Now two layers of the decoder (with a matrix of its own for the head, since this interface refuses tied weights). **Guess first:** at a budget of 0.5, is the compiler above the frontier, or below?
#
# </div>
# <div lang="zh">
#
# 保存的字节相同，FLOPs 相同，峰值只有一半。保存得更少，不等于峰值更低；要看保存的是**哪些**。
#
# 现在取解码器的两层（输出头用自己的矩阵，因为这个接口不接受共享权重）。**先猜**：预算 0.5 时，编译器会落在前沿的上方，还是下方？
#
# </div>

# %%
small, inputs = make_stages(layers=2, tied=False)
costs = {}
for budget in (0.75, 0.5, 0.25):
    small.zero_grad()
    graphs = compiled(small, inputs, budget)  # this leaves gradients, which stay
    with MemoryMeter() as meter:
        graphs(inputs).backward()
    costs[f"{budget}"] = meter.peak_bytes + inputs.nbytes, flops_of_graphs(graphs, inputs)
checkpointed = cost_of(in_segments, [0, 1, 3, 5, 6], layers=2, tied=False)
arms = {"compiler's budget": (costs, "^", "#4477AA")}
arms["checkpoints (run)"] = ({"each layer": checkpointed}, "D", "#AA3377")
lines = {"frontier": frontier(Chain.profile(small, inputs))}

# %% jupyter={"source_hidden": true}
title = "Recomputing single operators gets below the frontier of whole stages"
lesson_03.draw_frontier(title, lines, arms, xlim=(20, 75))

# %% [markdown]
# <div lang="en">
#
# Far below. It forgets single operators: attention probabilities, GELU's results, some of Q, K and V. That is lesson 02's selective checkpointing, found by a solver; softmaxes done again are free on this axis. Checkmate solves such a choice as an integer program over the graph, Rockmate (arXiv:2307.01236) cuts each block's graph so and combines the blocks by the recurrence of section 3.5, and HiRemate does it in several levels.
#
# </div>
# <div lang="zh">
#
# 远在下方。它以单个算子为单位来忘：注意力概率、GELU 的结果，还有一部分 Q、K、V。这就是第 02 课的选择性检查点，只不过由求解器找出；重做的 softmax 在这个轴上不花代价。Checkmate 把这种选择写成图上的整数规划来解；Rockmate（arXiv:2307.01236）这样切开每个块的图，再用 3.5 节的递推式把各块组合起来；HiRemate 则分好几层来做。
#
# </div>

# %% [markdown]
# ## 3.17 Traps, and older claims / 陷阱，以及更早的说法
#
# <div lang="en">
#
# Two traps of `checkpoint_sequential`, with 3 segments of a chain of six Linears and GELUs. Hand it only the Linears, as some scripts do, and it runs only those, without a word: the GELUs are gone. And in the reentrant mode a segment whose input needs no gradient trains nothing: only the last segment, which has no checkpoint, gets gradients. In PyTorch 2.13 this is still the mode that you get if you leave `use_reentrant` out, with a warning.
#
# </div>
# <div lang="zh">
#
# `checkpoint_sequential` 的两个陷阱，用六个 Linear 和 GELU 的链、3 段来看。有的脚本只把各个 Linear 列成表传给它，它照样运行、一声不响，GELU 却没有了。在可重入模式下，一个段的输入若不需要梯度，这一段就得不到训练，只有没有检查点的最后一段得到梯度。在 PyTorch 2.13 里，不写 `use_reentrant`，用的仍是这种模式，只会收到警告。
#
# </div>

# %%
import warnings

chain6 = hundred[:6]
linears = [layer[0] for layer in chain6]
same = torch.allclose(framework(linears, 3, x), chain6(x))
rows = [("a list of the Linears: is the output the same?", f"`{same}`")]

# %%
modes = {
    "reentrant: Linears that get gradients": {"use_reentrant": True},
    "`use_reentrant` left out: Linears that get gradients": {},
}
for name, option in modes.items():
    chain6.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it does warn that no input needs a gradient
        checkpoint_sequential(chain6, 3, x, **option).sum().backward()
    trained = sum(linear.weight.grad is not None for linear in linears)
    rows.append((name, f"{trained} / 6"))
table(["trap", "found"], rows)

# %% [markdown]
# <div lang="en">
#
# A segment written by hand needs no more than section 3.1 shows. One way in circulation detaches each segment's output. It is the last of four claims that stand in the teaching documents from which this course grew. The first two speak of layers that keep one activation, so they get them: Linear and Tanh.
#
# </div>
# <div lang="zh">
#
# 手写一段，照 3.1 节那样就够了。有一种流传的写法会把每一段的输出 detach。它是下面四条说法的最后一条；这四条都出自本课程的前身：一份教学文档。前两条说的是只保存一份激活值的层，那就给它们这样的层：Linear 加 Tanh。
#
# </div>

# %%
tanh = nn.Sequential(*(deep_mlp(depth=1, width=25, activation=nn.Tanh, seed=i) for i in range(100)))
peak, flops = lesson_03.peak_and_flops(in_segments, tanh, range(0, 101, 10))
plain_peak, plain_flops = lesson_03.peak_and_flops(in_segments, tanh, [0, 100])
saving, extra = 1 - peak / plain_peak, flops / plain_flops - 1
first16, value = hundred[:16], x
first16.zero_grad()
for start in (0, 4, 8):
    value = checkpoint(first16[start : start + 4], value, use_reentrant=False)
    value = value.detach().requires_grad_()
first16[12:](value).sum().backward()
trained = sum(layer[0].weight.grad is not None for layer in first16)

# %%
_, flops = lesson_03.peak_and_flops(in_segments, hundred, tapered(100))
doubled = f"{flops / once:.2f} ×"
lesson_03.older_claims(f"{saving:.0%}", f"{extra:.0%}", doubled, f"{trained} / 16")

# %% [markdown]
# ## 3.18 Play with a budget / 玩一玩预算
#
# <div lang="en">
#
# The pyramid again: early maps are large, late ones small. Move the budget, and watch what is given up first. (Needs a running kernel.)
#
# </div>
# <div lang="zh">
#
# 还是那个金字塔：前面的特征图大，后面的小。拖动预算，看看先舍弃什么。（需要正在运行的内核。）
#
# </div>

# %%
lesson_03.draw_schedule(200)

# %% tags=["nbval-ignore-output", "shows-picture"]
lesson_03.schedule_playground()

# %% [markdown]
# ## 3.19 On a GPU / 在 GPU 上
#
# <div lang="en">
#
# A schedule does not depend on the device, and `ScheduledSequential` runs on CUDA without a change. Here the cost of each stage is measured in seconds. If you have a GPU, this cell measures on it. Otherwise it shows what an H200 measured. All gradients exist from the start of the step and count in both columns. Both predictions hold up to the 8 bytes of the loss and its gradient. The schedule for half of the chain's peak takes 15% longer than the one that keeps everything, and the schedule for a quarter takes 27% longer.
#
# </div>
# <div lang="zh">
#
# 调度与设备无关，`ScheduledSequential` 不用改动就能在 CUDA 上运行，这里每一级的代价以秒计。有 GPU 时，这个单元格会现场测量；没有 GPU，就显示在一块 H200 上记录的数据。所有梯度从这一步开始时就在，预测和实测都把它们算在内。两个预测都成立，只差损失和它的梯度那 8 字节。把这条链的峰值降到一半的调度，比全部保留多花 15% 的时间；降到四分之一的，多花 27%。
#
# </div>

# %% tags=["nbval-ignore-output", "shows-device"]
from course_lib.lessons import on_gpu

on_gpu("03")

# %% [markdown]
# ## 3.20 More exercises / 更多练习
#
# <div lang="en">
#
# **Exercise 6.** Six stages, `Chain.uniform(6, saved_bytes=2)`. Draw a schedule on paper that peaks at 7 or less and needs 11 forwards or fewer, then write it down. The check has it simulated.
#
# </div>
# <div lang="zh">
#
# **练习 6。** 六个级，`Chain.uniform(6, saved_bytes=2)`。先在纸上画一个调度，峰值不超过 7，前向不超过 11 次，再把它写成清单。检查程序会模拟它。
#
# </div>

# %% minutes=6
actions = [Forward(0, "input"), Forward(1, "nothing"), ...]
lesson_03.check_drawn_schedule(actions)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not lesson_03.check_drawn_schedule.accepted:
    keeps = ["input", "nothing", "input", "nothing", "input"]  # segments of 2, 2, 1 and 1 stages
    actions = [Forward(i, keep) for i, keep in enumerate(keeps)]
    for start, end in ((5, 6), (4, 5), (2, 4), (0, 2)):
        actions += [Forward(i, "all") for i in range(start, end)]
        actions += [Backward(i) for i in reversed(range(start, end))]

lesson_03.check_drawn_schedule(actions)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# **Exercise 7.** The pyramid once more. Its $k^*$ segments peak at 163 MB, and so do all from 4 segments to 11: a cut alone doesn't help. Find a schedule that peaks lower and takes no more time, first by hand: which stages would you keep whole from the start, and which stretch would you run twice? Below, say why it peaks lower, in a sentence.
#
# </div>
# <div lang="zh">
#
# **练习 7。** 再看金字塔。按 $k^*$ 分段，峰值是 163 MB，从 4 段到 11 段也都一样：光靠切分没有用。找一个峰值更低、用时又不更多的调度，先自己动手找：哪些级从一开始就整级保留，哪一截跑两遍？再在下面用一句话说明峰值为什么更低。
#
# </div>

# %% minutes=4
schedule = None
lesson_03.check_beats_sqrt(schedule)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not lesson_03.check_beats_sqrt.accepted:
    schedule = optimal(lesson_03.pyramid(), 150_000_000)

lesson_03.check_beats_sqrt(schedule)
### END SOLUTION

# %%
why = ""
lesson_03.reason_of_the_pyramid(why)
