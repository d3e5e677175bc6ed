# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 3 Which ones should we forget? / 该忘掉哪些？
#
# <div lang="en">
#
# A network of 100 layers keeps 200 activations for backward. The advice since 2016: cut it into $\sqrt{100} = 10$ segments and checkpoint each. The peak falls from 201 activations to 30, for one more forward pass.
#
# Can one extra forward pass go lower? By the end of section 3.3 it does, to 21.
#
# </div>
# <div lang="zh">
#
# 一个 100 层的网络要为反向留下 200 份激活值。2016 年以来的建议是：切成 $\sqrt{100} = 10$ 段，每段一个检查点。峰值从 201 份激活值降到 30 份，代价是多做一次前向。
#
# 同样只多做一次前向，能不能降得更多？到 3.3 节末尾能降到 21 份。
#
# </div>

# %%
from course_lib.teaching import language

language()

# %% [markdown]
# <div lang="en">
#
# **Goals** (90 minutes). Derive the √L rule, and say when it is not the best. Read and write schedules. Predict the peak of any schedule to within a few bytes. Find the cheapest schedule for a real decoder under a byte budget, run it, and know what a compiler does differently.
#
# **What to know before**: lessons 01 and 02.
#
# </div>
# <div lang="zh">
#
# **目标**（90 分钟）：推导 √L 法则，并说出它何时不是最好的；会读、会写调度；预测任意调度的峰值，只差几个字节；在给定的字节预算内，为一个真实的解码器找出代价最小的调度并运行它；知道编译器的做法有何不同。
#
# **预备知识**：第 01、02 课。
#
# </div>

# %%
import itertools
from functools import cache

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from course_lib.checkpoint import checkpoint, checkpoint_sequential, set_checkpoint_early_stop
from course_lib.lessons.lesson_03 import schedule_pictures
from course_lib.memory import MemoryMeter, saved_tensors
from course_lib.models import Decoder, deep_mlp, loss_stages, random_tokens
from course_lib.teaching import COLORS, figure, predictions, table, text

# %% [markdown]
# ## 3.1 Every number of segments / 把每一种段数都试一遍
#
# <div lang="en">
#
# A layer here is Linear and GELU. It saves two activations: GELU keeps its input, and what comes out is the next layer's input. An activation has 1000 × 25 numbers, 100,000 bytes. Call that $b$: what it costs to keep one **boundary** between segments. A layer saves $s = 2b$.
#
# A segment by hand: every part but the last goes behind a checkpoint.
#
# </div>
# <div lang="zh">
#
# 这里的一层是 Linear 加 GELU，它保存两份激活值：GELU 留下自己的输入，而输出又是下一层的输入。一份激活值有 1000 × 25 个数，即 100,000 字节，记作 $b$：这就是在段与段之间保留一个**边界**的代价。一层保存 $s = 2b$。
#
# 手工分段：除最后一段外，每一段都加上检查点。
#
# </div>

# %%
b = 100_000  # bytes of one activation
x, ones = torch.linspace(-1, 1, 25_000).view(1000, 25), torch.ones(1000, 25)


def network(depth):
    modules = deep_mlp(depth=depth, width=25)
    return nn.Sequential(*(nn.Sequential(*pair) for pair in zip(modules[::2], modules[1::2], strict=True)))


def in_segments(layers, cuts, x):
    *firsts, last = itertools.pairwise(cuts)
    for start, end in firsts:
        x = checkpoint(layers[start:end], x, use_reentrant=False, preserve_rng_state=False)
    return layers[slice(*last)](x)


def by_framework(layers, count, x):
    return checkpoint_sequential(layers, count, x, use_reentrant=False, preserve_rng_state=False)


# %% [markdown]
# <div lang="en">
#
# Gradients first: plain, ten segments by hand, and ten by `checkpoint_sequential`.
#
# </div>
# <div lang="zh">
#
# 先看梯度：普通做法、手工分十段、用 `checkpoint_sequential` 分十段。
#
# </div>

# %%
hundred = network(100)


def gradients(run):
    hundred.zero_grad()
    run(x).square().sum().backward()
    return [parameter.grad for parameter in hundred.parameters()]


plain = gradients(hundred)
runs = {"by hand": lambda x: in_segments(hundred, range(0, 101, 10), x)}
runs["checkpoint_sequential"] = lambda x: by_framework(hundred, 10, x)
{name: all(map(torch.equal, plain, gradients(run))) for name, run in runs.items()}

# %% [markdown]
# <div lang="en">
#
# Now the peak for every number $k$ of segments. **Guess first:** $k - 1$ boundaries, the gradient that is passed on, and one segment of $L/k$ layers make $k\,b + (L/k)\,s$, a smooth curve, so the points will be smooth as well. Will they?
#
# </div>
# <div lang="zh">
#
# 现在对每一个段数 $k$ 测峰值。**先猜**：$k - 1$ 个边界、正在往回传的梯度，再加一个 $L/k$ 层的段，共 $k\,b + (L/k)\,s$，是一条平滑的曲线，所以测得的点也会是平滑的。会吗？
#
# </div>


# %%
def peak_of(run, layers):
    for parameter in layers.parameters():
        parameter.grad = torch.zeros_like(parameter)  # there from the start, as in lesson 02
    with MemoryMeter() as meter:
        (run(x) * ones).sum().backward()
    return meter.peak_bytes


networks = {depth: network(depth) for depth in (16, 36, 64, 100)}
sweep = {
    (depth, k): peak_of(lambda x, k=k, layers=layers: by_framework(layers, k, x), layers)
    for depth, layers in networks.items()
    for k in range(1, depth + 1)
}

# %%
drawn, axes = figure(
    ("The rule is a smooth curve; the measured peaks are a saw", "法则是平滑曲线，实测峰值却是锯齿"),
    rows=2,
    columns=2,
    height=4.6,
)
for ax, depth in zip(axes.flat, networks, strict=True):
    ks = range(1, depth + 1)
    ax.plot(ks, [k + 2 * depth / k for k in ks], color=COLORS["predicted"], alpha=0.6)
    ax.plot(ks, [sweep[depth, k] / b for k in ks], ".", color=COLORS["measured"])
    ax.set(
        title=f"L = {depth}", ylim=(0, 2.1 * depth), xlabel=text("segments k", "段数 k"), ylabel=text("peak", "峰值")
    )
drawn.supylabel(text("in activations b", "以激活值 b 计"), fontsize=8)
None

# %% [markdown]
# <div lang="en">
#
# They are not. With 100 layers and $k = 51$ the peak is 151, nearly three times that of $k = 50$. `checkpoint_sequential` puts $\lfloor L/k \rfloor$ layers into each segment and **all the rest into the last one**: for $k = 51$ fifty segments of one layer, and one of fifty. Whichever segment is worked on is there whole, and this one has fifty layers.
#
# With that the peak can be predicted. While segment $j$ is worked on, counted from 0, there are $j$ boundaries, all that its $m_j$ layers save, and the gradient that is passed on: $\max_j (j\,b + m_j\,s) + b$.
#
# </div>
# <div lang="zh">
#
# 不会。100 层、$k = 51$ 时峰值是 151，将近 $k = 50$ 时的三倍。`checkpoint_sequential` 给每段 $\lfloor L/k \rfloor$ 层，**余下的全归最后一段**：$k = 51$ 时有五十段各一层，最后一段五十层。最后一段不加检查点，所以整段都留在内存里。
#
# 知道了这一点，峰值就可以预测。处理第 $j$ 段（从 0 数起）时，内存里有 $j$ 个边界、这一段 $m_j$ 层所保存的一切，以及正在往回传的梯度：$\max_j (j\,b + m_j\,s) + b$。
#
# </div>


# %%
def predicted_peak(cuts):
    return max(j * b + (end - start) * 2 * b for j, (start, end) in enumerate(itertools.pairwise(cuts))) + b


def framework_cuts(depth, k):
    size = depth // k
    return [*range(0, k * size, size), depth]


shown = [(64, 8), (64, 16), (100, 10), (100, 14), (100, 20), (100, 50), (100, 51)]
rows = [(f"L = {L}, k = {k}", predicted_peak(framework_cuts(L, k)), sweep[L, k]) for L, k in shown]
predictions(rows, unit="b", scale=b)

# %%
worst = max(abs(peak / predicted_peak(framework_cuts(L, k)) - 1) for (L, k), peak in sweep.items())
f"{len(sweep)} peaks, largest error {100 * worst:.3f} %"

# %% [markdown]
# ## 3.2 Where √L comes from / √L 从哪里来
#
# <div lang="en">
#
# Let the segments be equal. The peak is about $k\,b + \frac{L}{k}\,s$. The first part grows with $k$, the second falls; the sum is least where both are equal:
#
# $$k^* = \sqrt{L \cdot s / b}, \qquad \text{peak} \approx 2\sqrt{L \cdot s \cdot b}$$
#
# For $s = b$ that is $\sqrt{L}$. Our layers save two, so $k^* = \sqrt{200} = 14$. How much does that matter? The curve is flat: $k = 10$ and $k = 20$ both give 30, and 14 gives 28.3. Balanced cuts, the longer segments first:
#
# </div>
# <div lang="zh">
#
# 设各段相等，峰值约为 $k\,b + \frac{L}{k}\,s$。前一项随 $k$ 增大，后一项减小，两项相等时和最小：
#
# $$k^* = \sqrt{L \cdot s / b}, \qquad \text{peak} \approx 2\sqrt{L \cdot s \cdot b}$$
#
# $s = b$ 时就是 $\sqrt{L}$。我们的层保存两份，所以 $k^* = \sqrt{200} = 14$。差别有多大？曲线很平：$k = 10$ 与 $k = 20$ 都是 30，14 是 28.3。下面用均衡的切法，较长的段在前：
#
# </div>


# %%
with_fifty = dict(sorted((networks | {50: network(50)}).items()))  # 50 is no perfect square


def balanced(depth, k):
    sizes = [depth // k + (j < depth % k) for j in range(k)]
    return list(itertools.accumulate(sizes, initial=0))


def cut_peak(depth, cuts):
    layers = with_fifty[depth]
    return peak_of(lambda x: in_segments(layers, cuts, x), layers)


rows = []
for depth in with_fifty:
    for k in sorted({round(depth**0.5), round((2 * depth) ** 0.5), 2 * round(depth**0.5)}):
        name, cuts = f"L = {depth}, k = {k}", balanced(depth, k)
        rule = (f"{name} (rule: {k + 2 * depth / k:.1f})", f"{name}（法则：{k + 2 * depth / k:.1f}）")
        rows.append((rule, predicted_peak(cuts), cut_peak(depth, cuts)))
predictions(rows, unit="b", scale=b)

# %% [markdown]
# <div lang="en">
#
# The balanced cut has no such teeth: with $k = 14$ `checkpoint_sequential` needs 32, the balanced cut 28. And the rule is a little pessimistic where $k$ does not divide $L$: for 16 layers in 6 segments it says 11.3, and 10 is measured. Why less? The longer segments stand in front here, where fewer boundaries are alive.
#
# With 50 layers $\sqrt{L}$ lies between 7 and 8, and no $k$ equals it. Seven segments, one of 8 layers and six of 7, peak at 21. But $k^* = \sqrt{2 \cdot 50} = 10$ divides 50, and gives 20, as the rule says.
#
# </div>
# <div lang="zh">
#
# 均衡的切法没有这样的锯齿：$k = 14$ 时 `checkpoint_sequential` 需要 32，均衡的切法需要 28。$k$ 不能整除 $L$ 时，法则还略嫌悲观：16 层分 6 段，它给出 11.3，实测是 10。为什么更少？这里较长的段排在前面，那时存活的边界较少。
#
# 层数是 50 时，$\sqrt{L}$ 在 7 与 8 之间，没有哪个 $k$ 与它相等。分 7 段，一段 8 层、其余六段各 7 层，峰值是 21。但 $k^* = \sqrt{2 \cdot 50} = 10$ 能整除 50，峰值是 20，与法则一致。
#
# </div>

# %% [markdown]
# ## 3.3 Equal segments are not the best / 各段相等并不是最好的
#
# <div lang="en">
#
# That is worth following up. While the **last** segment is worked on, all boundaries are kept. While the **first** is, all the others are gone. So the first may be longer. Let every segment reach the same peak $P$: the one with $j$ boundaries before it gets $(P - j b)/s$ layers. Sizes fall by one step every $s/b$ segments, and
#
# $$L \approx \sum_j \frac{P - j b}{s} \approx \frac{P^2}{2 s b}, \qquad P \approx \sqrt{2 \cdot L \cdot s \cdot b}$$
#
# instead of $2\sqrt{L \cdot s \cdot b}$: $1/\sqrt 2$ of it. **Guess first:** of 100 layers, how many go into the first segment, and how many into the last?
#
# </div>
# <div lang="zh">
#
# 这一点值得深究。处理**最后**一段时，所有边界都保留着；处理**第一**段时，其余边界都已释放。所以第一段可以更长。让每一段都达到同一个峰值 $P$：前面有 $j$ 个边界的那一段分到 $(P - j b)/s$ 层。每过 $s/b$ 段，段长减一，并且
#
# $$L \approx \sum_j \frac{P - j b}{s} \approx \frac{P^2}{2 s b}, \qquad P \approx \sqrt{2 \cdot L \cdot s \cdot b}$$
#
# 而不是 $2\sqrt{L \cdot s \cdot b}$：只有它的 $1/\sqrt 2$。**先猜**：100 层里，第一段分到几层，最后一段几层？
#
# </div>


# %%
def tapered(depth, s=2):  # s and the peak in units of b
    for peak in itertools.count(1):
        sizes = [(peak - j) // s for j in range(peak)]
        if sum(sizes) >= depth:
            cuts = [min(depth, cut) for cut in itertools.accumulate(sizes, initial=0)]
            return sorted(set(cuts))


[end - start for start, end in itertools.pairwise(tapered(100))]

# %%
rows = []
for depth in with_fifty:
    cuts = tapered(depth)
    rule = (2 * 2 * depth) ** 0.5  # sqrt(2 L s b) in units of b
    name = f"L = {depth}, k = {len(cuts) - 1}"
    names = (f"{name} (√(2·L·s·b): {rule:.3g})", f"{name}（√(2·L·s·b)：{rule:.3g}）")
    rows.append((names, predicted_peak(cuts), cut_peak(depth, cuts)))
predictions(rows, unit="b", scale=b)


# %%
def flops_of(run):
    with FlopCounterMode(display=False) as counter:
        run(x).sum().backward()
    return counter.get_total_flops()


once = flops_of(hundred)
best = min(range(1, 101), key=lambda k: predicted_peak(balanced(100, k)))
ways = {
    ("10 segments, by the framework", "框架的 10 段"): lambda x: by_framework(hundred, 10, x),
    (f"{best} balanced, the best of them", f"均衡 {best} 段，其中最好的"): lambda x: in_segments(
        hundred, balanced(100, best), x
    ),
    ("19 tapered", "渐短 19 段"): lambda x: in_segments(hundred, tapered(100), x),
}
# %%
arms = {name: (peak_of(way, hundred) / b, flops_of(way) / once) for name, way in ways.items()}
table(
    ["", ("peak, b", "峰值，b"), ("FLOPs of plain", "FLOPs，与普通之比")],
    [(name, round(peak, 1), round(flops, 3)) for name, (peak, flops) in arms.items()],
)

# %% [markdown]
# <div lang="en">
#
# From 30 to 21, for 2 % more FLOPs: the last segment, which is not recomputed, is shorter. (The measured peaks are one above $P$: the gradient. For 50 layers $P$ is 15, the root rounded up.) This is as far as one extra forward pass goes with segments. To go lower, layers must run more than twice.
#
# </div>
# <div lang="zh">
#
# 从 30 降到 21，FLOPs 多 2 %：不用重计算的最后一段变短了。（实测峰值比 $P$ 多一份：梯度。50 层时 $P$ 是 15，即根号的值向上取整。）只多做一次前向，靠分段最多走到这里。要再往下，就得让有些层运行不止两次。
#
# </div>

# %% [markdown]
# ## 3.4 A schedule is a list / 调度就是一张清单
#
# <div lang="en">
#
# Say what runs, in which order, and what each forward keeps: **all** that its backward needs, its **input** only, or **nothing**. Such a list is a schedule, and `simulate` is its referee: it counts bytes, time and forward steps, and refuses what cannot run. From here on the input counts as well, one $b$ more than before, and a backward takes as long as two forwards. A link of the chain, here a layer, is a **stage**. Three stages that save two units each:
#
# </div>
# <div lang="zh">
#
# 写明运行什么、按什么次序，以及每次前向留下什么：留下反向所需的**全部**（all），只留**输入**（input），还是什么也**不留**（nothing）。这样一张清单就是一个调度，`simulate` 是裁判：它清点字节、时间和前向次数，并拒绝无法运行的调度。从这里起，输入也计入，比前面多一个 $b$；一次反向的时间等于两次前向。链上的一环叫做一**级**，这里就是一层。下面是三个级，每级保存两个单位：
#
# </div>

# %%
from course_lib.schedule import Backward, Chain, Forward, IllegalSchedule, simulate, store_all

three = Chain.uniform(3, saved_bytes=2)
forgetful = [Forward(0, "input"), Forward(1, "nothing"), Forward(2, "all"), Backward(2)]
forgetful += [Forward(0, "all"), Forward(1, "all"), Backward(1), Backward(0)]
simulate(store_all(three), three), simulate(forgetful, three)

# %%
try:
    simulate([*forgetful[:4], Forward(1, "all"), Backward(1)], three)
except IllegalSchedule as refused:
    print(refused)

# %% [markdown]
# <div lang="en">
#
# A schedule draws itself: time to the right, stages upwards. Behind what runs stands what is kept: green where all is kept, $2b$; blue for an input, $b$. The gradient on its way is not drawn. Sixteen stages, five schedules:
#
# </div>
# <div lang="zh">
#
# 调度会把自己画出来：向右是时间，向上是级。底色是留着的东西：全部保留处是绿色，即 $2b$；只留输入处是蓝色，即 $b$。正在往回传的梯度没有画出。十六个级，五种调度：
#
# </div>

# %%
from course_lib.schedule import binomial, optimal, recursive, segments

sixteen = Chain.uniform(16, saved_bytes=2)
five = {
    ("store all", "全部保留"): store_all(sixteen),
    ("4 segments", "4 段"): segments(sixteen, 4),
    ("recursive", "递归"): recursive(sixteen),
    ("binomial, 4 slots", "二项式，4 个槽"): binomial(16, 4),
    ("optimal within 8 b", "8 b 之内最优"): optimal(sixteen, 8),
}
title = ("Fewer bytes cost more time; how much depends on the schedule", "字节越少，时间越长；长多少，要看调度")
schedule_pictures(five, sixteen, title=title, unit="b", scale=1)

# %% [markdown]
# <div lang="en">
#
# The last three all peak at 8, and take 1.67, 1.56 and 1.48 times as long as storing all. The best one mixes: single inputs high up, whole segments further down, where fewer inputs are alive.
#
# </div>
# <div lang="zh">
#
# 后三种的峰值都是 8，时间分别是全部保留时的 1.67、1.56 和 1.48 倍。最好的那种是混合的：高处只留单份输入；往下存活的输入少了，就整段保留。
#
# </div>

# %% [markdown]
# ## 3.5 Forget again, and again / 一忘再忘
#
# <div lang="en">
#
# **Recursive**: keep the middle, do the right half, then the left; each half likewise. About $\log_2 L$ inputs are alive, and a stage runs $\frac12 \log_2 L$ more times on average: the first one $\log_2 L$ more, the last one none. (Here a layer saves one, $s = b$.)
#
# </div>
# <div lang="zh">
#
# **递归**：留住中点，先做右半，再做左半；每一半也照此办理。同时留着的输入约有 $\log_2 L$ 份，每一级平均多运行 $\frac12 \log_2 L$ 次：第一级多 $\log_2 L$ 次，最后一级一次也不多。（这里一层只保存一份，$s = b$。）
#
# </div>

# %%
rows = []
for power in (4, 6, 8, 10):
    depth = 2**power
    chain = Chain.uniform(depth)
    cost = simulate(recursive(chain), chain)
    peaks = [simulate(rule, chain).peak_bytes for rule in (store_all(chain), segments(chain, 2 ** (power // 2)))]
    rows.append((depth, *peaks, cost.peak_bytes))
    rows[-1] += (round(cost.forward_steps / depth, 2), 1 + power / 2)
headings = ["L", ("store all", "全部保留"), ("√L", "√L"), ("recursive", "递归")]
table([*headings, ("forwards a stage", "每级前向次数"), ("predicted", "预测")], rows)

# %% [markdown]
# <div lang="en">
#
# Halving is not the best, as the picture shows. A **slot** holds one input, and the chain's own takes one; a stage **runs ahead** when its forward does not keep all. With $s$ slots (in this section $s$ counts slots, no longer bytes), and no stage running ahead more than $r$ times, Griewank and Walther reverse
#
# $$\beta(s, r) = \binom{s + r}{s}$$
#
# stages, and they prove that no schedule reverses more. Where to keep the next input? Try every place, with a slot less for the right part, and then the left part:
#
# </div>
# <div lang="zh">
#
# 图上已经看到，对半分并不是最好的。一个**槽**存放一份输入，链自己的输入也占一个；一次前向若不留下全部，就算这一级**提前运行**。有 $s$ 个槽（本节里的 $s$ 是槽数，不再是字节数），每一级提前运行不超过 $r$ 次，Griewank 与 Walther 的调度可以反向走完
#
# $$\beta(s, r) = \binom{s + r}{s}$$
#
# 级，并且证明了没有哪个调度能走得更多。下一份输入该留在哪里？每个位置都试一遍：先做右边的部分，可用的槽少一个；再做左边的部分：
#
# </div>


# %%
@cache
def fewest_extra(length, slots):
    if length == 1:
        return 0
    if slots == 1:
        return length * (length - 1) // 2
    return min(
        split + fewest_extra(length - split, slots - 1) + fewest_extra(split, slots) for split in range(1, length)
    )


def extra_steps(length, slots):
    return sum(isinstance(action, Forward) for action in binomial(length, slots)) - length


all(fewest_extra(length, slots) == extra_steps(length, slots) for slots in range(1, 7) for length in range(1, 85))

# %%
from collections import Counter
from math import comb


def most_repeats(length, slots):
    ahead = [a.stage for a in binomial(length, slots) if isinstance(a, Forward) and a.keep != "all"]
    return max(Counter(ahead).values(), default=0)


def reached(s, r):
    return max(length for length in range(1, 50) if most_repeats(length, s) <= r)


# %%
headings = [("slots s", "槽数 s"), "r = 1", "r = 2", "r = 3"]
print(all(reached(s, r) == comb(s + r, s) for s in range(1, 5) for r in (1, 2, 3)))
table(headings, [(s, *(reached(s, r) for r in (1, 2, 3))) for s in range(1, 5)])

# %% [markdown]
# <div lang="en">
#
# Four slots and three repeats reverse $\binom{7}{4} = 35$ stages; 1000 stages with 32 slots need only 2.4 extra forwards a stage:
#
# </div>
# <div lang="zh">
#
# 四个槽、重复三次，可以反向走完 $\binom{7}{4} = 35$ 级；1000 级、32 个槽，每级只需多做 2.4 次前向：
#
# </div>

# %%
round(extra_steps(1000, 32) / 1000, 2)

# %% [markdown]
# ## 3.6 Run them / 真的跑起来
#
# <div lang="en">
#
# Simulated bytes are a promise. `ScheduledSequential` runs any legal schedule under real autograd. Gradients first, then bytes. The chain is **measured**, stage by stage, with the meter; its schedules are simulated, then run whole.
#
# </div>
# <div lang="zh">
#
# 模拟出来的字节数只是承诺。`ScheduledSequential` 用真正的 autograd 运行任何合法的调度。先看梯度，再看字节。链由计量器逐级**实测**得出；它的各个调度先模拟，再整个运行。
#
# </div>

# %%
from course_lib.schedule import ScheduledSequential

layers = networks[16]
scheduled = {name: ScheduledSequential(layers, schedule) for name, schedule in five.items()}


def layer_gradients(run):
    layers.zero_grad()
    run(x).square().sum().backward()
    return [parameter.grad for parameter in layers.parameters()]


plain = layer_gradients(layers)
[all(map(torch.equal, plain, layer_gradients(run))) for run in scheduled.values()]

# %%
measured_chain = Chain.profile(layers, x)
rows = []
for name, schedule in five.items():
    predicted = simulate(schedule, measured_chain).peak_bytes
    rows.append((name, predicted, peak_of(scheduled[name], layers) + x.nbytes))  # the input is part of the chain
predictions(rows, unit="bytes")

# %% [markdown]
# <div lang="en">
#
# Off by 8 bytes: the loss, which is no stage, and its gradient. And each peak is the one of section 3.4, to the byte, although in a real backward the old gradient and the new one are alive together for a moment, and weight gradients are made beside them. They find room: a stage's output and the gradient that came in are given up after their last use. So the four segments peak at 13 b, the 12 b of section 3.2 and the input.
#
# </div>
# <div lang="zh">
#
# 相差 8 字节：那是不属于任何一级的损失及其梯度。而且每个峰值都与 3.4 节的一字节不差，尽管真实的反向中，旧的梯度与新的梯度有一刻同时存活，旁边还要算出权重梯度。它们有地方放：一级的输出和传进来的梯度，最后一次用完就释放。所以四段的峰值是 13 b，即 3.2 节的 12 b 加上输入。
#
# </div>

# %% [markdown]
# ## 3.7 A real chain is uneven / 真实的链参差不齐
#
# <div lang="en">
#
# A decoder as a chain: embedding, the attention and the MLP of each of eight layers, and the head with its loss. The stages differ in what they save, what they take while they run, and what they cost. Time is counted in FLOPs (for the embedding, which has no products, in elements).
#
# </div>
# <div lang="zh">
#
# 把解码器看成一条链：嵌入，八层各自的注意力与 MLP，以及输出头连同损失。各级保存多少、运行时占用多少、代价多大，都不相同。时间以 FLOPs 计（嵌入没有矩阵乘法，按元素个数计）。
#
# </div>

# %%
decoder = Decoder(vocabulary=2048, hidden=128, heads=4, layers=8, sequence=256, tied=False)
tokens = random_tokens(batch=4, sequence=256, vocabulary=2048)
stages, inputs = loss_stages(decoder, tokens[:, 1:]), tokens[:, :-1].contiguous()
chain = Chain.profile(stages, inputs)
# %%
kinds = {0: ("embedding", "嵌入"), 1: ("attention", "注意力"), 2: ("MLP", "MLP"), 17: ("head", "输出头")}
columns = [
    "",
    ("output, MB", "输出，MB"),
    ("saves, MB", "保存，MB"),
    ("its backward takes, MB", "反向另占，MB"),
    "GFLOPs",
]
rows = []
for i, name in kinds.items():
    stage = chain.stages[i]
    sizes = (stage.output_bytes, stage.saved_bytes, stage.backward_overhead_bytes)
    rows.append((name, *(round(size / 1e6, 2) for size in sizes), round(stage.forward_time / 1e9, 3)))
table(columns, rows)

# %% [markdown]
# <div lang="en">
#
# Storing all takes 127 MB. For a budget, `optimal` finds the fastest schedule among all that keep what they keep until its backward, by dynamic programming over bytes: it decides for each stretch of stages whether to keep the first stage's everything, or to run on and keep an input further up. Three budgets:
#
# </div>
# <div lang="zh">
#
# 全部保留要 127 MB。给定预算，`optimal` 以字节数为变量做动态规划，在“凡留下的都保留到其反向为止”的所有调度中找出最快的：对每一截连续的级，它要么留下第一级的全部，要么往前跑，在更高处留一份输入。三个预算：
#
# </div>

# %%
budgets = (100_000_000, 50_000_000, 30_000_000)
plans = {f"{budget // 10**6} MB": optimal(chain, budget) for budget in budgets}
title = (
    "The smaller the budget, the more is forgotten; the head always runs once",
    "预算越小，忘得越多；输出头始终只算一次",
)
schedule_pictures(plans, chain, title=title, panel_height=1.7)

# %%
plain_loss = stages(inputs)
plain_loss.backward()
expected = [parameter.grad for parameter in stages.parameters()]


def run_plan(plan):
    stages.zero_grad()
    loss = ScheduledSequential(stages, plan)(inputs)
    loss.backward()
    return torch.equal(loss, plain_loss) and all(map(torch.equal, expected, (p.grad for p in stages.parameters())))


[run_plan(plan) for plan in plans.values()]


# %%
def cost_of(run):
    for parameter in stages.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with MemoryMeter() as meter:
        run(inputs).backward()
    with FlopCounterMode(display=False) as counter:
        run(inputs).backward()
    return meter.peak_bytes + inputs.nbytes, counter.get_total_flops()


executed = {name: cost_of(ScheduledSequential(stages, plan)) for name, plan in plans.items()}
promised = {name: simulate(plan, chain) for name, plan in plans.items()}
predictions([(name, promised[name].peak_bytes, peak) for name, (peak, _) in executed.items()])

# %%
predictions([(name, promised[name].time, flops) for name, (_, flops) in executed.items()], unit="GFLOPs")

# %% [markdown]
# <div lang="en">
#
# Every peak is within its budget and where it was promised. And all budgets at once: the **Pareto frontier**, exact, with every point that no other equals or beats on both axes. No schedule of whole stages that keeps what it keeps until its backward lies below.
#
# </div>
# <div lang="zh">
#
# 每个峰值都在预算之内，也与承诺的一致。所有预算一起看，就是**帕累托前沿**：它是精确的，凡是没有别的点在两个轴上都不逊于它的点，都在其中。以整级为单位、凡留下的都保留到其反向为止的调度，没有一个在它下方。
#
# </div>

# %%
from course_lib.schedule import frontier

points = frontier(chain)
fastest = points[-1].time
f"{len(points)} points, from {points[0].peak_bytes / 1e6:.1f} MB ({points[0].time / fastest:.2f} ×) to {points[-1].peak_bytes / 1e6:.1f} MB"

# %%
rows = []
for count in (2, 3, 4, 6, 9):
    cost = simulate(segments(chain, count), chain)
    lower = min(point.peak_bytes for point in points if point.time <= cost.time)
    less = f"{100 * (1 - lower / cost.peak_bytes):.1f} %"
    rows.append((count, round(cost.peak_bytes / 1e6, 1), round(lower / 1e6, 1), less))
headings = [("segments, cut for the least peak", "段数（按峰值最小来切）"), ("peak, MB", "峰值，MB")]
table([*headings, ("optimal, in no more time", "最优，时间不更长"), ("less", "少")], rows)

# %% [markdown]
# ## 3.8 What a compiler does by itself / 编译器自己会做什么
#
# <div lang="en">
#
# PyTorch's compiler traces forward and backward into one graph and cuts it in two: what crosses the cut is saved. Its `activation_memory_budget` says how much may cross, 1 for all, 0 for the inputs only; within it, a knapsack solver minimises what is computed again. We run both graphs as they are, without generating code.
#
# The backward graph can be run in two ways: **holding** its arguments, the saved tensors, until it returns, as a plain Python call does; or **releasing** each after its last use.
#
# </div>
# <div lang="zh">
#
# PyTorch 的编译器把前向和反向追踪成一张图，再切成两半：跨过切口的就是要保存的。`activation_memory_budget` 规定多少可以跨过去，1 是全部，0 是只有输入；在此之内，由一个背包求解器使重计算量最小。我们不生成代码，直接运行这两张图。
#
# 反向图有两种运行方式：像普通的 Python 调用那样，把实参（即保存的张量）一直**拿着**，直到返回；或者每个张量最后一次用完就**放手**。
#
# </div>

# %%
import torch._functorch.config as compiler
from torch._functorch.aot_autograd import aot_module, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import Interpreter


def holding(graph, _):
    return make_boxed_func(graph.forward)


def releasing(graph, _):
    def run(values):
        return Interpreter(graph).boxed_run(values)

    run._boxed_call = True  # the caller gives its list of values away
    return run


# %%
def compiled(module, x, budget, how=releasing):
    kept = []

    def forward_graph(graph, examples):
        kept.extend(str(node) for node in graph.graph.output_node().args[0])
        return how(graph, examples)

    with compiler.patch(activation_memory_budget=budget):
        result = aot_module(module, forward_graph, how, min_cut_rematerialization_partition)
        result(x).sum().backward()  # compiles both graphs
    result.kept = kept
    return result


# %%
sixteen_layers, rows, kept = networks[16], [], {}
for budget in (1, 0.75, 0.5, 0.25, 0):
    held = compiled(sixteen_layers, x, budget, holding)
    released = compiled(sixteen_layers, x, budget)
    kept[budget] = released.kept
    saved = saved_tensors(released, x).total_bytes / b
    peaks = [round(peak_of(run, sixteen_layers) / b, 1) for run in (held, released)]
    rows.append((f"budget {budget}", round(saved, 1), *peaks, round(flops_of(released) / flops_of(sixteen_layers), 2)))
for name, cuts in ((("4 segments", "4 段"), balanced(16, 4)), (("tapered", "渐短"), tapered(16))):
    by_hand = lambda x, cuts=cuts: in_segments(sixteen_layers, cuts, x)  # noqa: E731
    peak, saved = peak_of(by_hand, sixteen_layers) / b, saved_tensors(by_hand, x).total_bytes / b
    rows.append((name, round(saved, 1), "–", round(peak, 1), round(flops_of(by_hand) / flops_of(sixteen_layers), 2)))
headings = ["", ("saved, b", "保存，b"), ("peak, holding", "峰值，拿着"), ("peak, releasing", "峰值，放手")]
headings.append(("FLOPs of plain", "FLOPs，与普通之比"))
table(headings, rows)

# %%
[name for name in kept[0.25] if "addmm" in name or "gelu" in name]

# %% [markdown]
# <div lang="en">
#
# At 0.75 the peak falls from 33 to 18 for no FLOPs: only GELUs are computed again, and those count as free (they take time all the same). Then saved bytes fall further, to 1, while the peak **rises again to 33**. The caller is hardly to blame: releasing saves up to 2.4 at large budgets and nothing at small ones. It is the choice: at 0.25 the solver keeps the results of the first seven Linears and nothing of the last nine layers. Before the first backward step those are computed again in one go, and all are there at once. To the solver all sixteen are alike: so many bytes, so many FLOPs. How long a tensor lives it does not know. What if seven are chosen for it, spread evenly?
#
# </div>
# <div lang="zh">
#
# 0.75 时，峰值从 33 降到 18，一点 FLOPs 也不多花：重计算的只有 GELU，它们不计 FLOPs（时间还是要花的）。此后保存的字节继续降到 1，峰值却**又升回 33**。这几乎怪不得调用者：预算大时放手最多省 2.4 份，预算小时一份也不省。问题在于选了什么：0.25 时，求解器留下前七个 Linear 的结果，最后九层什么也不留。于是在反向的第一步之前，这些层要一口气重计算，同时全部在场。在求解器看来，十六个都一样：同样多的字节，同样多的 FLOPs。张量活多久，它并不知道。如果替它选好七个，均匀分布呢？
#
# </div>


# %%
from unittest import mock


def spread(sizes, flops, most):
    keep = list(range(1, len(sizes), 2))[:7]
    return 0.0, keep, [i for i in range(len(sizes)) if i not in keep]


with mock.patch("torch._functorch.partitioners.dp_knapsack", spread):  # the compiler's solver
    evenly = compiled(sixteen_layers, x, 0.25)
saved, flops = saved_tensors(evenly, x).total_bytes, flops_of(evenly) / flops_of(sixteen_layers)
name = ("budget 0.25, seven spread evenly", "budget 0.25，均匀分布的七个")
table(
    headings[:2] + headings[3:],
    [(name, round(saved / b, 1), round(peak_of(evenly, sixteen_layers) / b, 1), round(flops, 2))],
)

# %% [markdown]
# <div lang="en">
#
# The same bytes saved, the same FLOPs, and half the peak. Fewer saved bytes are not a lower peak; **which** bytes decides.
#
# Now the decoder. **Guess first:** are the compiler's points above the frontier of section 3.7, or below?
#
# </div>
# <div lang="zh">
#
# 保存的字节相同，FLOPs 相同，峰值只有一半。保存得更少，不等于峰值更低；要看保存的是**哪些**。
#
# 现在轮到解码器。**先猜**：编译器的点会落在 3.7 节前沿的上方，还是下方？
#
# </div>

# %%
compiled_stages = {budget: compiled(stages, inputs, budget) for budget in (0.8, 0.5, 0.3, 0)}
by_compiler = {budget: cost_of(run) for budget, run in compiled_stages.items()}
counts = (2, 3, 6, 9, 18)
by_checkpoints = {count: cost_of(lambda x, k=count: by_framework(stages, k, x)) for count in counts}
with set_checkpoint_early_stop(False):
    whole_stages = {count: cost_of(lambda x, k=count: by_framework(stages, k, x)) for count in counts}
plain_flops = cost_of(stages)[1]

# %%
arms = {
    ("optimal, run", "最优，实际运行"): (executed, "o", "#228833"),
    ("segments, early stop off", "分段，不提前停"): (whole_stages, "s", "#4477AA"),
    ("segments, early stop on", "分段，提前停"): (by_checkpoints, "D", "#66CCEE"),
    ("compiler's budget", "编译器的预算"): (by_compiler, "^", "#AA3377"),
}

# %%
title = (
    "Whole stages end at the frontier; who forgets single operators can go below it",
    "以整级为单位，前沿就是尽头；以算子为单位，可以到它下面去",
)
drawn, ax = figure(title, height=4.0)
line = [(point.peak_bytes / 1e6, point.time / fastest) for point in points]
ax.step(*zip(*line, strict=True), where="post", color=COLORS["predicted"], label=text("frontier", "前沿"))
for (english, chinese), (costs, marker, color) in arms.items():
    across, up = zip(*((peak / 1e6, flops / plain_flops) for peak, flops in costs.values()), strict=True)
    ax.plot(across, up, marker, color=color, label=text(english, chinese))
ax.set(xlim=(20, 132), ylim=(0.98, 1.6), xlabel=text("peak, MB", "峰值，MB"))
ax.set(ylabel=text("FLOPs of plain", "FLOPs，与普通之比"))
ax.legend()
None


# %%
def kept_by(run):
    shapes = [tuple(row.shape) for row in saved_tensors(run, inputs)]
    probabilities = shapes.count((4, 4, 256, 256))  # (batch, heads, s, s)
    vectors = shapes.count((16, 256, 32)) + shapes.count((16, 32, 256))  # heads of Q, K, V; some transposed
    return len(shapes), probabilities, vectors, shapes.count((1024, 512))  # the last: (batch · s, 4 h)


headings = ["", ("peak, MB", "峰值，MB"), ("FLOPs of plain", "FLOPs，与普通之比"), ("saved tensors", "保存的张量")]
headings += [("probabilities of 8", "概率（共 8）"), ("Q, K, V of 24", "Q、K、V（共 24）")]
headings.append(("GELU inputs of 8", "GELU 输入（共 8）"))
costs = {f"budget {budget}": (*by_compiler[budget], *kept_by(run)) for budget, run in compiled_stages.items()}
costs["optimal, 50 MB", "最优，50 MB"] = (*executed["50 MB"], *("–" * 4))
rows = [(name, round(cost[0] / 1e6, 1), round(cost[1] / plain_flops, 2), *cost[2:]) for name, cost in costs.items()]
table(headings, rows)

# %% [markdown]
# <div lang="en">
#
# The frontier holds for whole stages: with early stop off, the framework's segments lie on it or above. With early stop (lesson 02) each checkpoint leaves out its last product, and gets below.
#
# The compiler gets far below (its graphs release here): 1.12 instead of 1.22 near 50 MB. It forgets single operators: at 0.5 seven of the eight attention probabilities, for 3 % more FLOPs; at 0.3 all eight and 18 of the 24 Q, K and V, but only two of the eight inputs of GELU. That is lesson 02's selective checkpointing, found by a solver. FLOPs count products only, so softmaxes done again are free on this axis. At budget 0 all is back at once: 127 MB, for a third more FLOPs.
#
# So: a proof of optimality is a proof about a model. Cut finer, and the frontier moves.
#
# </div>
# <div lang="zh">
#
# 前沿对整级成立：不提前停时，框架的分段恰好落在线上，或在它上方。提前停（第 02 课）使每个检查点省去最后一次乘法，于是落到它下方。
#
# 编译器低得多（这里它的图是放手的）：50 MB 附近是 1.12，而不是 1.22。它以单个算子为单位来忘：0.5 时忘掉八份注意力概率中的七份，FLOPs 多 3 %；0.3 时八份全忘，24 份 Q、K、V 忘掉 18 份，GELU 的八份输入却只忘掉两份。这就是第 02 课的选择性检查点，只不过由求解器找出。FLOPs 只计乘法，所以重做的 softmax 在这个轴上不花代价。预算 0 时，一切同时回来：127 MB，FLOPs 还多三分之一。
#
# 所以，证明了最优，只是证明了在某个模型之下最优。切得更细，前沿就会移动。
#
# </div>

# %% [markdown]
# ## 3.9 Play with a budget / 玩一玩预算
#
# <div lang="en">
#
# Twelve stages of a convolution pyramid: early maps are large, late ones small. Move the budget, and watch what is given up first. (Needs a running kernel.)
#
# </div>
# <div lang="zh">
#
# 一个卷积金字塔的十二级：前面的特征图大，后面的小。拖动预算，看看先舍弃什么。（需要正在运行的内核。）
#
# </div>

# %%
from course_lib.lessons.lesson_03 import draw_schedule, schedule_playground

draw_schedule(200)

# %% tags=["nbval-ignore-output", "shows-picture"]
schedule_playground()

# %% [markdown]
# ## 3.10 What you may have read / 你可能读到过的说法
#
# <div lang="en">
#
# Five claims. The first two speak of layers that save one activation, so they get them: Linear and Tanh, $s = b$.
#
# </div>
# <div lang="zh">
#
# 五条说法。前两条说的是只保存一份激活值的层，那就给它们这样的层：Linear 加 Tanh，$s = b$。
#
# </div>

# %%
tanh = deep_mlp(depth=100, width=25, activation=nn.Tanh)
tanh = nn.Sequential(*(nn.Sequential(*pair) for pair in zip(tanh[::2], tanh[1::2], strict=True)))
kept_all, ten = peak_of(tanh, tanh), peak_of(lambda x: by_framework(tanh, 10, x), tanh)
saving = f"{100 * (1 - ten / kept_all):.0f} %"
extra = flops_of(lambda x: by_framework(tanh, 10, x)) / flops_of(tanh) - 1


# %%
value, layers = x, networks[16]
layers.zero_grad()
for start in (0, 4, 8):
    value = checkpoint(layers[start : start + 4], value, use_reentrant=False).detach().requires_grad_()
layers[12:](value).sum().backward()
trained = sum(layer[0].weight.grad is not None for layer in layers)

# %%
from course_lib.lessons import what_you_may_have_read

what_you_may_have_read(
    "03",
    saving,
    f"{100 * extra:.0f} %",
    f"{flops_of(lambda x: in_segments(hundred, tapered(100), x)) / once:.2f} ×",
    f"{sweep[100, 10] / b:.0f} b → {cut_peak(100, tapered(100)) / b:.0f} b",
    f"{trained} / 16",
)

# %% [markdown]
# ## 3.11 On a GPU / 在 GPU 上
#
# <div lang="en">
#
# Schedules know nothing of devices, and `ScheduledSequential` runs on CUDA as it is. With `Chain.profile(module, x, clock=True)` times are seconds. If you have a GPU, this cell measures now.
#
# </div>
# <div lang="zh">
#
# 调度与设备无关，`ScheduledSequential` 可以直接在 CUDA 上运行。用 `Chain.profile(module, x, clock=True)`，时间以秒计。有 GPU 时，这个单元格会现场测量。
#
# </div>

# %% tags=["nbval-ignore-output", "shows-device"]
from course_lib.lessons import on_gpu

on_gpu("03")

# %% [markdown]
# ## 3.12 Exercises / 练习
#
# <div lang="en">
#
# **Exercise 1.** 64 layers, each of which saves nine times as much as one boundary. How many equal segments are best?
#
# </div>
# <div lang="zh">
#
# **练习 1。** 64 层，每层保存的是一个边界的九倍。分成几个相等的段最好？
#
# </div>

# %%
from course_lib.lessons.lesson_03 import check_beats_sqrt, check_drawn_schedule, check_segment_count, pyramid

answer = None  # segments
check_segment_count(answer)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
check_segment_count((64 * 9) ** 0.5)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# **Exercise 2.** Six stages, `Chain.uniform(6, saved_bytes=2)`. Draw a schedule on paper that peaks at 7 or less and needs 11 forwards or fewer, then write it down. The check has it simulated.
#
# </div>
# <div lang="zh">
#
# **练习 2。** 六级，`Chain.uniform(6, saved_bytes=2)`。先在纸上画一个调度，峰值不超过 7，前向不超过 11 次，再把它写成清单。检查程序会模拟它。
#
# </div>

# %%
actions = [Forward(0, "input"), Forward(1, "nothing"), ...]
check_drawn_schedule(actions)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
keeps = ["input", "nothing", "input", "nothing", "input"]  # segments of 2, 2, 1 and 1 stages
actions = [Forward(i, keep) for i, keep in enumerate(keeps)]
for start, end in ((5, 6), (4, 5), (2, 4), (0, 2)):
    actions += [Forward(i, "all") for i in range(start, end)]
    actions += [Backward(i) for i in reversed(range(start, end))]
check_drawn_schedule(actions)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# **Exercise 3.** The chain of section 3.9 is `pyramid()`. Its √(L·s/b) segments peak at 163 MB. Find a schedule that peaks lower and takes no more time.
#
# </div>
# <div lang="zh">
#
# **练习 3。** 3.9 节的链是 `pyramid()`。按 √(L·s/b) 分段，峰值是 163 MB。找一个峰值更低、用时又不更多的调度。
#
# </div>

# %%
schedule = None
check_beats_sqrt(schedule)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
check_beats_sqrt(optimal(pyramid(), 150_000_000))
### END SOLUTION

# %% [markdown]
# ## 3.13 Summary / 小结
#
# <div lang="en">
#
# - $k$ equal segments peak at about $k\,b + (L/k)\,s$, least at $k^* = \sqrt{L \cdot s / b}$. The framework's cut is uneven: its last segment takes the rest.
# - Segments that get shorter towards the end approach $1/\sqrt 2$ of that as $L$ grows, still for one extra forward pass.
# - Recursion goes down to $\log L$; binomial schedules need the fewest forwards for so many slots.
# - For uneven chains, dynamic programming finds the best schedule of whole stages, and it runs as predicted.
# - A compiler forgets single operators. It goes lower where operators differ, and its peak rises again where its budget gets small.
#
# **Next:** [lesson 04](04_offload.ipynb) moves bytes elsewhere instead of forgetting them.
#
# </div>
# <div lang="zh">
#
# - $k$ 个相等的段，峰值约为 $k\,b + (L/k)\,s$，在 $k^* = \sqrt{L \cdot s / b}$ 处最小。框架的切法并不均衡：余下的全归最后一段。
# - 越往后越短的段，随 $L$ 增大趋近它的 $1/\sqrt 2$，仍然只多做一次前向。
# - 递归可以降到 $\log L$；槽数给定时，二项式调度的前向次数最少。
# - 对参差不齐的链，动态规划找出以整级为单位的最好调度，运行起来与预测一致。
# - 编译器以算子为单位来忘。算子差别大时它降得更低；预算变得很小时，它的峰值又会升高。
#
# **下一步**：[第 04 课](04_offload.ipynb)不忘掉字节，而是把它们搬到别处。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **Sources.** Chen et al. 2016, *Training Deep Nets with Sublinear Memory Cost*, arXiv:1604.06174. Griewank and Walther 2000, *Algorithm 799: revolve*, ACM TOMS 26(1). Beaumont et al., *Optimal checkpointing for heterogeneous chains: how to train deep neural networks with limited memory*, arXiv:1911.13214. PyTorch's `torch._functorch.partitioners`, read and run.
#
# </div>
# <div lang="zh">
#
# **出处。** Chen et al. 2016，*Training Deep Nets with Sublinear Memory Cost*，arXiv:1604.06174。Griewank and Walther 2000，*Algorithm 799: revolve*，ACM TOMS 26(1)。Beaumont et al.，*Optimal checkpointing for heterogeneous chains: how to train deep neural networks with limited memory*，arXiv:1911.13214。PyTorch 的 `torch._functorch.partitioners`，读过并运行过。
#
# </div>
