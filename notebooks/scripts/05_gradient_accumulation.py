# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 5 What if the batch comes in pieces? (gradient accumulation) / 把批次拆开来算呢？（梯度累积）
#
# <div lang="en">
#
# A step on 32 sequences peaks at 91 MB. In pieces of one sequence, **micro-batches**, added up, the same step peaks at 16 MB: the same gradient, the same number of FLOPs. This is **gradient accumulation**. Nothing seems easier than adding.
#
# And yet a widely used training library had it wrong until late 2024 (see the sources). Where is the trap?
#
# </div>
# <div lang="zh">
#
# 对 32 条序列做一步，峰值 91 MB。拆成一次一条序列的**微批次**（micro-batch）来算，再把梯度加起来，同样的一步峰值只有 16 MB：梯度相同，FLOPs 也相同。这就是**梯度累积**（gradient accumulation）。做加法，看起来再容易不过了。
#
# 然而，一个广为使用的训练库直到 2024 年底还算错（见出处）。陷阱在哪里？
#
# </div>

# %%
from course_lib.teaching import language

language()

# %% [markdown]
# <div lang="en">
#
# **Goals** (75 minutes). Accumulate gradients that equal the full batch's, whatever the pieces. Predict the peak for any micro-batch, and say what does not shrink. Get the order right: scale, unscale, clip, step. Know why updating inside backward does not go together with it.
#
# **What to know before**: lesson 01.
#
# </div>
# <div lang="zh">
#
# **目标**（75 分钟）：不论怎样拆，累积出的梯度都与整批的相等；预测任意微批次的峰值，说出什么不会缩小；把次序做对：放大、还原缩放、裁剪、更新；知道为什么在反向之中更新不能与累积合用。
#
# **预备知识**：第 01 课。
#
# </div>

# %%
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from course_lib.lessons import lesson_05
from course_lib.memory import MemoryMeter
from course_lib.models import Decoder, random_tokens, seeded
from course_lib.teaching import predictions, table

# %% [markdown]
# ## 5.1 Samples of unequal lengths / 长短不一的样本
#
# <div lang="en">
#
# Sequences in a batch are rarely of one length. Ours have between 4 and 64 tokens, padded with zeros. That will matter.
#
# A loss comes in two parts: the **sum** over tokens, and how many there are, the **weight**.
#
# </div>
# <div lang="zh">
#
# 一个批次里的序列很少一样长。我们的序列有 4 到 64 个 token，用零补齐。这一点后面很要紧。
#
# 损失分成两部分：各 token 损失的**总和**，以及 token 的个数，即**权重**（这里的“权重”只是 token 数，与模型权重无关）。
#
# </div>

# %%
samples = random_tokens(32, 64, 127, seed=1) + 1  # (b, s + 1), numbers from 1 to 127
with seeded(2):
    lengths = torch.randint(4, 65, (32,))
samples[torch.arange(65) > lengths[:, None]] = 0  # padding


def decoder(hidden=64, layers=2):
    return Decoder(vocabulary=128, hidden=hidden, heads=4, layers=layers, sequence=64)


def loss_sum(model, tokens):
    logits, targets = model(tokens[:, :-1]), tokens[:, 1:].flatten()  # (b, s, v), (b · s,)
    losses = F.cross_entropy(logits.flatten(0, 1), targets, ignore_index=0, reduction="sum")
    return losses, int((targets != 0).sum())


# %% [markdown]
# ## 5.2 Two loops / 两种循环
#
# <div lang="en">
#
# The loop that one finds everywhere: take the mean of each micro-batch, divide by the number of micro-batches, add up. And another one: add up sums, divide once, at the end, by all tokens.
#
# **Guess first:** 32 sequences, in 8 micro-batches of 4. How far from the full batch's gradient is each?
#
# </div>
# <div lang="zh">
#
# 随处可见的循环：每个微批次取平均，除以微批次的个数，再加起来。另一种循环：把总和加起来，最后只除一次，除以全部 token 数。
#
# **先猜**：32 条序列，分成 8 个微批次，每个 4 条。它们与整批的梯度各差多少？
#
# </div>


# %%
def full(model, batch):
    loss, weight = loss_sum(model, batch)
    (loss / weight).backward()


def mean_of_means(model, batch, size):
    pieces = batch.split(size)
    for piece in pieces:
        loss, weight = loss_sum(model, piece)
        (loss / weight / len(pieces)).backward()


# %%
def sum_of_sums(model, batch, size):
    total = 0
    for piece in batch.split(size):
        loss, weight = loss_sum(model, piece)
        loss.backward()
        total += weight
    for parameter in model.parameters():
        parameter.grad /= total


# %%
def gradient(run, *args, dtype=torch.float32):
    model = decoder().to(dtype)
    run(model, *args)
    return torch.cat([parameter.grad.flatten().double() for parameter in model.parameters()])


# %%
def error(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


# %%
batch = samples
exact = gradient(full, batch, dtype=torch.float64)
errors = {"full": error(gradient(full, batch), exact)}
for run in (mean_of_means, sum_of_sums):
    errors[run.__name__] = error(gradient(run, batch, 4), exact)
for name, value in errors.items():
    print(name, f"{100 * value:.0f} %" if value > 1e-3 else f"below 1e-6: {value < 1e-6}")

# %% [markdown]
# <div lang="en">
#
# Against the full batch in float64: the sums are right to rounding, better than $10^{-6}$. The mean of means is wrong by 27 %. Each micro-batch's mean has the same say, however few tokens it has; a token in a short piece counts more than one in a long piece. With equal counts both agree, so a test with equal counts finds nothing. (27 % is for random tokens and an untrained model; what it is for yours depends on how much the counts differ.)
#
# The error grows with the spread of the token counts. Take eight pieces with counts between $(1 - \delta)$ and $(1 + \delta)$ times the mean:
#
# </div>
# <div lang="zh">
#
# 与 float64 的整批相比：总和的做法只差舍入误差，小于 $10^{-6}$。平均的平均则差了 27%。不论 token 多少，每个微批次的平均都占同样的份量；于是短的一份里，每个 token 的份量就比长的一份里更重。token 数相等时两者一致，所以用相等的 token 数来测，什么也测不出来。（27% 是随机 token、未经训练的模型；你的情形如何，取决于 token 数差多少。）
#
# 误差随 token 数的离散程度增大。取八份，token 数在平均值的 $(1 - \delta)$ 到 $(1 + \delta)$ 倍之间：
#
# </div>


# %%
def with_spread(delta):
    batch = random_tokens(32, 64, 127, seed=3) + 1
    for piece in range(8):
        length = round(32 * (1 + delta * (2 * piece / 7 - 1)))
        batch[4 * piece : 4 * piece + 4, length + 1 :] = 0
    return batch


deltas, by_delta = [0, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95], {mean_of_means: [], sum_of_sums: []}
for delta in deltas:
    spread = with_spread(delta)
    right = gradient(full, spread, dtype=torch.float64)
    for run, found in by_delta.items():
        found.append(error(gradient(run, spread, 4), right))
max(by_delta[sum_of_sums]) < 1e-6, [f"{100 * value:.0f} %" for value in by_delta[mean_of_means][1:]]

# %% jupyter={"source_hidden": true}
from course_lib.teaching import COLORS, figure, text

alt = (
    "Mean of means: the error grows with the spread, from 5 % at δ = 0.1 to 143 % at 0.95; sum of "
    "sums stays below 1e-6."
)
title = "The more the counts differ, the more wrong is dividing by the number of micro-batches"
drawn, ax = figure(title, height=3.4, alt=alt)
ax.set(ylim=(-0.05, 1.5), xlabel=text("spread of token counts δ"))
ax.set(ylabel=text("error of the gradient"))
names = {mean_of_means: "mean of means", sum_of_sums: "sum of sums: below 1e-6"}
for (run, name), color, style in zip(names.items(), ("gradient", "activation"), ("o-", "s--"), strict=True):
    ax.plot(deltas, by_delta[run], style, color=COLORS[color], label=text(name))
ax.legend(loc="upper left")
None

# %% [markdown]
# ## 5.3 The library's step / 库里的训练步
#
# <div lang="en">
#
# `AccumulatedStep` is the second loop with all that belongs to it: one clip and one optimizer step, a scaler, autocast, the true mean loss, `no_sync` under DDP; and an error leaves gradients as they were. If no layer mixes samples, nothing is drawn at random and gradients are fp32, the gradient is the full batch's, whatever the pieces:
#
# </div>
# <div lang="zh">
#
# `AccumulatedStep` 就是第二种循环，外加应有的一切：只裁剪一次、优化器只更新一次、缩放器、autocast、真正的平均损失、DDP 下的 `no_sync`；出错时，梯度保持原样。只要各样本的计算互不影响（没有 BatchNorm 那样跨样本的层），不抽随机数，梯度又是 fp32，那么不论怎样拆，得到的都是整批的梯度：
#
# </div>

# %%
from course_lib.accumulation import AccumulatedStep, split


def by_library(batch, size, dtype=torch.float32, accumulate=None):
    model = decoder().to(dtype)
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.0), []

    def keep(*_):  # before the step clears them
        seen.extend(parameter.grad.flatten() for parameter in model.parameters())

    optimizer.register_step_pre_hook(keep)
    result = AccumulatedStep(model, optimizer, loss_sum, accumulate=accumulate)(split(batch, size))
    return torch.cat(seen).double(), result


# %%
within = [error(by_library(batch, size)[0], exact) < 1e-6 for size in (1, 3, 4, 7, 32)]
within, by_library(batch, 7)[1].weight == int((batch[:, 1:] != 0).sum())

# %% [markdown]
# <div lang="en">
#
# With parameters in bf16, gradients are bf16 too, and so are their sums: 8 bits of precision, to which ever smaller pieces are added. `accumulate="fp32"` adds up in fp32, for 4 bytes a parameter instead of 2. 256 sequences of 16 tokens, errors in %:
#
# </div>
# <div lang="zh">
#
# 参数是 bf16 时，梯度是 bf16，它们的和也是：有效精度只有 8 位，加上去的每一份却越来越小。`accumulate="fp32"` 则以 fp32 求和，每个参数占 4 字节而不是 2 字节。256 条序列，每条 16 个 token，误差以 % 计：
#
# </div>

# %%
many = random_tokens(256, 16, 127, seed=3) + 1
wanted, rows = gradient(full, many, dtype=torch.float64), []
for name, accumulate in (("sums in bf16", None), ("sums in fp32", "fp32")):
    found = [by_library(many, size, torch.bfloat16, accumulate)[0] for size in (16, 1)]
    rows.append((name, *(f"{100 * error(one, wanted):.1g}" for one in found)))
table(["", "16 pieces", "256 pieces"], rows)

# %% [markdown]
# ## 5.4 What shrinks, and what doesn't / 什么会缩小，什么不会
#
# <div lang="en">
#
# One micro-batch is alive at a time. So the peak $P(m)$ is a floor $P_0$ plus so many bytes a sample:
#
# $$P(m) = P_0 + m \cdot a$$
#
# Weights, gradients and optimizer state are nearly all of the floor: they don't care how the batch comes. Measure two sizes, predict the others. One case is different: a single piece. There the gradients arrive while activations leave, so a set of gradients, 3.3 MB, is not yet there at the peak.
#
# </div>
# <div lang="zh">
#
# 同一时刻，内存里只有一个微批次。所以峰值 $P(m)$ 是一个下限 $P_0$，加上每个样本若干字节：
#
# $$P(m) = P_0 + m \cdot a$$
#
# 权重、梯度和优化器状态几乎就是整个下限：批次怎样拆，都与它们无关。测两种大小，预测其余的。有一种情形不同：只有一份。这时梯度陆续产生，激活值陆续释放，所以峰值时刻还没有那一整套梯度，即 3.3 MB。
#
# </div>


# %%
def step_meter(size):
    model = decoder(hidden=128, layers=4)
    optimizer = torch.optim.AdamW(model.parameters())
    step = AccumulatedStep(model, optimizer, loss_sum)
    step(split(batch, size))  # Adam's state exists from the second step on
    with MemoryMeter(model, optimizer) as meter:
        step(split(batch, size))
    return meter


# %%
meters = {size: step_meter(size) for size in (1, 2, 4, 8, 16, 32)}
peaks = {size: meter.peak_bytes for size, meter in meters.items()}
slope = (peaks[8] - peaks[4]) / 4
floor = peaks[4] - 4 * slope
gradient_bytes = sum(parameter.nbytes for parameter in decoder(hidden=128, layers=4).parameters())
predicted = {size: floor + slope * size for size in peaks}
predicted[32] -= gradient_bytes
names = {4: "m = 4, measured first", 8: "m = 8, measured first"}
predictions([(names.get(m, f"m = {m}"), predicted[m], peak) for m, peak in peaks.items()])

# %% jupyter={"source_hidden": true}
from course_lib.teaching import category_label, category_look

alt = "Peaks of 15.9, 18.5, 23.5, 33.6, 53.9 and 91.0 MB for m from 1 to 32; what grows is nearly all activations."
drawn, ax = figure("Activations shrink with the micro-batch; the floor stays", height=3.6, alt=alt)
bottom = [0.0] * len(meters)
for part in ("parameter", "optimizer", "gradient", "activation", "temporary"):
    stack = [meter.at_peak()[part] / 1e6 for meter in meters.values()]
    ax.bar(range(6), stack, bottom=bottom, width=0.6, label=category_label(part), **category_look(part))
    bottom = [below + more for below, more in zip(bottom, stack, strict=True)]
line = [value / 1e6 for value in predicted.values()]
ax.plot(range(6), line, color=COLORS["predicted"], label=text("predicted"))
ax.set_xticks(range(6), [str(size) for size in meters])
ax.set(xlabel=text("m, doubled each time"), ylabel=text("peak, MB"), ylim=(0, 100))
ax.legend(fontsize=8)
None


# %%
def step_flops(size):
    model = decoder(hidden=128, layers=4)
    step = AccumulatedStep(model, torch.optim.AdamW(model.parameters()), loss_sum)
    with FlopCounterMode(display=False) as counter:  # apart: it holds tensors of its own
        step(split(batch, size))
    return counter.get_total_flops()


rows, flops = [], {m: step_flops(m) for m in (32, 1)}
for m in flops:
    rows.append((f"m = {m}", round(peaks[m] / 1e6, 1), f"{floor / peaks[m]:.0%}", flops[m] / 1e9))
print(f"floor {floor / 1e6:.2f} MB; peaks {peaks[32] / peaks[1]:.1f} to 1", end="; ")
print(f"FLOPs equal: {flops[32] == flops[1]}")
table(["", "peak, MB", "floor / peak", "GFLOPs"], rows)

# %% [markdown]
# <div lang="en">
#
# From 32 to 1 the micro-batch shrinks 32 times, the peak 5.7 times. "In proportion" it does not fall: at $m = 1$ the floor is 84 % of the peak.
#
# </div>
# <div lang="zh">
#
# 微批次从 32 降到 1，相差 32 倍，峰值只差 5.7 倍。峰值并不“成比例”下降：$m = 1$ 时，下限占峰值的 84%。
#
# </div>

# %% [markdown]
# ## 5.5 Does it train the same? / 训练出来一样吗？
#
# <div lang="en">
#
# A real run, on text that is at hand: this repository's LICENSE, character by character, cut at random into samples of 4 to 65 characters. Forty steps of AdamW, sixteen samples a step, three ways: the full batch; pieces of one sample, accumulated; pieces of one sample, the mean of their means.
#
# </div>
# <div lang="zh">
#
# 真正训练一次，文本就用手边的：本仓库的 LICENSE，逐字符处理，随机切成 4 到 65 个字符长的样本。用 AdamW 训练四十步，每步十六个样本，三种做法：整批；每份一个样本，累积；每份一个样本，取平均的平均。
#
# </div>

# %%
places = map(Path, ("LICENSE", "../LICENSE", "../../LICENSE"))
licence = next(path for path in places if path.exists()).read_text(encoding="utf-8")
characters = torch.tensor([ord(c) for c in " ".join(licence.split())])
with seeded(5):
    lengths = torch.randint(4, 66, (len(characters) // 35,))
pieces = characters.split([*lengths.tolist(), len(characters) - int(lengths.sum())])[:-1]
texts = nn.utils.rnn.pad_sequence(pieces, batch_first=True)  # (samples, 65), padded with zeros


def plain_step(model, optimizer, batch):
    with torch.no_grad():
        loss, weight = loss_sum(model, batch)
    optimizer.zero_grad()
    mean_of_means(model, batch, 1)
    optimizer.step()
    return float(loss / weight)


# %% tags=["nbval-ignore-output", "shows-seconds"]
from tqdm.auto import tqdm


def train(kind, steps=40):
    model, losses = decoder(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    accumulated = AccumulatedStep(model, optimizer, loss_sum)
    for step in tqdm(range(steps), desc=kind):
        samples = texts[torch.arange(16 * step, 16 * step + 16) % len(texts)]
        if kind == "mean of means":
            losses.append(plain_step(model, optimizer, samples))
        else:
            losses.append(accumulated(split(samples, 16 if kind == "full batch" else 1)).loss)
    return losses


runs = {kind: train(kind) for kind in ("full batch", "accumulated", "mean of means")}

# %%
away = {}
for kind, losses in runs.items():
    away[kind] = [abs(a - b) for a, b in zip(losses, runs["full batch"], strict=True)]
print({f"{kind}, within 1e-3": max(away[kind]) < 1e-3 for kind in ("accumulated", "mean of means")})
first = [texts[at : at + 16] for at in range(0, 128, 16)]
off = [error(gradient(mean_of_means, one, 1), gradient(full, one)) for one in first]
span = f"{100 * min(off):.0f} to {100 * max(off):.0f} %"
f"gradient of the first 8 batches, before training: off by {span}"

# %% jupyter={"source_hidden": true}
title = "Accumulated follows the full batch to rounding; the mean of means is another run"
drawn, (left, right) = figure(title, columns=2, height=3.2)
for kind, color in zip(runs, ("predicted", "activation", "gradient"), strict=True):
    left.plot(runs[kind], color=COLORS[color], label=text(kind))
    right.plot(away[kind], color=COLORS[color])
left.set(xlabel=text("step"), ylabel=text("loss"))
right.set(yscale="log", ylim=(1e-9, 1), xlabel=text("step"), ylabel=text("away from the full batch"))
left.legend(fontsize=8)
None

# %% [markdown]
# <div lang="en">
#
# The mean of means begins with gradients that are off by 11 to 31 %. On the left the curves are close all the same: the wrong one trains too, only another problem, in which a token of a short sample counts more. That is how such a bug stays hidden. (The full batch is not on the right: from itself it differs by exactly 0, which a logarithmic axis cannot show.)
#
# </div>
# <div lang="zh">
#
# “平均的平均”一开始，梯度就差了 11% 到 31%。左图里几条曲线却仍然很接近：错的那种也在训练，只是训练的是另一个问题，短样本里每个 token 的权重更大。这类错误就是这样藏起来的。（右图里没有整批：它与自己之差恰好为 0，对数坐标画不出来。）
#
# </div>

# %% [markdown]
# ## 5.6 What is done once / 只做一次的事
#
# <div lang="en">
#
# A **scaler** multiplies the loss by a large number before backward, so that small gradients survive in fp16, and divides the gradients again before the step: **unscaling**. If one of them is inf or NaN, it skips the step and lowers the number. fp16's smallest number is $6 \cdot 10^{-8}$; what is below half of that becomes zero. bf16 has the exponent range of fp32, and needs none of this.
#
# Clipping belongs after the last micro-batch and after unscaling. Clip each piece instead, and every piece is cut to the bound; their mean is shorter, since they point in different directions, and large pieces lose their say.
#
# </div>
# <div lang="zh">
#
# **缩放器**在反向之前把损失乘上一个很大的数，使很小的梯度在 fp16 里不至于变成零；更新之前再把梯度除回去，这叫**还原缩放**（unscale）。只要有一个梯度是 inf 或 NaN，它就跳过这次更新，并调低那个数。fp16 最小的正数是 $6 \cdot 10^{-8}$，小于它一半的都变成零。bf16 的指数范围与 fp32 相同，用不着这些。
#
# 裁剪要放在最后一个微批次之后，还原缩放之后。若每份各自裁剪，每份都被裁到上限；它们方向各异，平均之后就更短，而且大的份失去了应有的份量。
#
# </div>


# %%
def clipped_per_piece(model, batch, size):
    kept = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for piece in batch.split(size):
        model.zero_grad()
        full(model, piece)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        torch._foreach_add_(kept, [parameter.grad for parameter in model.parameters()])
    for so_far, parameter in zip(kept, model.parameters(), strict=True):
        parameter.grad = so_far / len(batch.split(size))


each = gradient(clipped_per_piece, batch, 4)
right = exact * min(1, 0.1 / float(exact.norm()))
off = 100 * error(each, right)
f"norm {float(each.norm()):.3f} instead of {float(right.norm()):.3f}; error {off:.0f} %"


# %%
def vanished(dtype, scale):
    weight = torch.ones(1000, dtype=dtype, requires_grad=True)
    factors = torch.logspace(-11, -5, 1000)  # what the gradients should be
    (scale * (weight.float() * factors).sum()).backward()
    return int((weight.grad == 0).sum())


cases = {"fp16": (torch.float16, 1), "fp16, scaled by 2^16": (torch.float16, 2.0**16)}
cases["bf16"] = torch.bfloat16, 1
{name: f"{vanished(*case)} of 1000 vanish" for name, case in cases.items()}


# %%
def scaled_step(init_scale):
    model, scaler = decoder(), torch.amp.GradScaler("cpu", init_scale=init_scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step = AccumulatedStep(model, optimizer, loss_sum, scaler=scaler, max_norm=0.1)
    result = step(split(batch, 4))
    if result.stepped:  # a scheduler counts steps: neither micro-batches nor skipped ones
        schedule.step()
    scale = scaler.get_scale() / init_scale
    return {"stepped": result.stepped, "scale": scale, "schedule": schedule.last_epoch}


scaled_step(2.0**16), scaled_step(2.0**127)

# %% [markdown]
# <div lang="en">
#
# At $2^{127}$ the gradients overflow: no step, half the scale, and the schedule waits. Before each step gradients are set to None, not to zero (`zero_grad(set_to_none=True)`, the default): a zero would take memory, and Adam would still move a parameter that nothing has touched.
#
# What a micro-batch cannot know: BatchNorm takes mean and variance of **what it sees**. In pieces it sees pieces, and no division repairs that. Layers that compute each sample by itself, such as LayerNorm, don't care.
#
# </div>
# <div lang="zh">
#
# 取 $2^{127}$ 时梯度溢出：不更新，缩放减半，学习率调度也等着。每一步之前，梯度设成 None 而不是零（`zero_grad(set_to_none=True)`，即默认）：零要占内存，而且 Adam 仍会更新一个没有参与计算的参数。
#
# 有一件事微批次无从知道：BatchNorm 用**它看见的**样本求均值和方差。拆开之后它只看见一份，怎样除也补不回来。对各样本分别计算的层，例如 LayerNorm，则不受影响。
#
# </div>


# %%
def gradient_in_pieces(model, data, size):
    model.zero_grad()
    for piece in data.split(size):
        (model(piece).square().sum() / 32).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


for norm in (nn.BatchNorm1d(8), nn.LayerNorm(8)):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 1)).double()
    data = torch.randn(32, 8).double()
    off = error(gradient_in_pieces(model, data, 4), gradient_in_pieces(model, data, 32))
    print(type(norm).__name__, f"{off:.0e}" if off > 1e-9 else "equal")

# %% [markdown]
# ## 5.7 Gradients that never pile up / 不堆积的梯度
#
# <div lang="en">
#
# The floor holds a gradient for every parameter. One can update each parameter **as soon as its gradient is ready**, inside backward, and drop the gradient at once: then only a few gradients are alive. How much does that save, and can it be combined with accumulation?
#
# </div>
# <div lang="zh">
#
# 下限里每个参数都有一份梯度。可以在反向之中，**梯度一就绪**就更新这个参数，立刻丢掉梯度：这样，同时存活的梯度只有少数几份。能省多少？能与累积合用吗？
#
# </div>


# %%
def step_in_backward(model):
    optimizers = {weight: torch.optim.SGD([weight], lr=0.1) for weight in model.parameters()}

    def update(parameter):
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(update)


# %%
def trained_meter(in_backward, size):
    model = decoder(hidden=128, layers=4)
    if in_backward:
        step_in_backward(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with MemoryMeter(model) as meter:
        loss, weight = loss_sum(model, batch[:size])
        (loss / weight).backward()
        if not in_backward:
            optimizer.step()
    return meter, list(model.parameters())


# %%
(after, plain), (during, same) = trained_meter(False, 1), trained_meter(True, 1)
print(all(map(torch.equal, plain, same)), sum(parameter.nbytes for parameter in plain))
arms = {"after backward, m = 1": after, "in backward, m = 1": during}
arms["after backward, m = 8"] = trained_meter(False, 8)[0]
arms["in backward, m = 8"] = trained_meter(True, 8)[0]
rows = []
for name, meter in arms.items():
    most = max(meter.series()["gradient"])
    rows.append((name, round(meter.peak_bytes / 1e6, 2), round(most / 1e6, 2)))
table(["", "peak, MB", "most gradients at once, MB"], rows)

# %% [markdown]
# <div lang="en">
#
# The same weights, and at most 0.26 MB of gradients at a time instead of 3.27. The peak falls less, from 6.77 to 6.13 MB, and with 8 sequences not at all: it then lies where backward begins, before the gradients are there.
#
# With accumulation this hook fires at every micro-batch: the first would already move the weights, and the second would compute its gradient elsewhere. (AdamA adds each gradient to Adam's moments instead and drops it, and the weights wait.) One clip over all gradients is out too: its norm is known only when all are there.
#
# </div>
# <div lang="zh">
#
# 权重相同，同时存在的梯度至多 0.26 MB，而不是 3.27 MB。峰值降得没有那么多，从 6.77 到 6.13 MB；有 8 条序列时根本不降：那时峰值落在反向刚开始的时候，梯度还没有产生。
#
# 与累积合用时，这个钩子在每个微批次都会触发：第一个微批次就已经改动了权重，第二个便对着另一组权重求梯度。（AdamA 则把每份梯度直接累加到 Adam 的两个矩里，随即丢掉，权重留到最后更新。）对全部梯度一起裁剪也不行：梯度都到齐了，才知道范数。
#
# </div>

# %% [markdown]
# ## 5.8 Two processes / 两个进程
#
# <div lang="en">
#
# Under DDP (one process, or **rank**, a device; each sees its own samples) each backward pass sends all gradients. With 8 micro-batches that is 8 times, of which 7 are for nothing: `no_sync` skips them. Two processes on this machine, counting the bytes of each bucket that is reduced:
#
# </div>
# <div lang="zh">
#
# 在 DDP 下（每台设备一个进程，称为 **rank**，各自处理自己的样本），每次反向都要发送全部梯度。8 个微批次就发 8 次，其中 7 次是多余的：`no_sync` 可以跳过。在这台机器上开两个进程，数一数每个被归约的桶（bucket）有多少字节：
#
# </div>

# %%
parameter_bytes, sent = lesson_05.ddp_bytes(micro_batches=8)
rows = [("no_sync, AccumulatedStep", parameter_bytes, sent[True])]
rows.append(("synchronising each", 8 * parameter_bytes, sent[False]))
predictions(rows, unit="bytes")

# %% [markdown]
# <div lang="en">
#
# Across ranks the same trap waits. If each rank divides by its own tokens, DDP takes a mean of means. `AccumulatedStep` keeps sums, counts the tokens of all ranks, and multiplies by the number of ranks over all tokens; the library's tests compare two processes with one on the whole batch.
#
# </div>
# <div lang="zh">
#
# 跨进程（rank）时，同样的陷阱也在等着。若每个进程除以自己的 token 数，DDP 求的就是平均的平均。`AccumulatedStep` 保留总和，统计所有进程的 token 数，再乘以“进程数 ÷ 全部进程的 token 总数”；库的测试把两个进程与单进程处理整批做了比较。
#
# </div>

# %% [markdown]
# ## 5.9 What you may have read / 你可能读到过的说法
#
# <div lang="en">
#
# Three claims. For the second: 60 samples in micro-batches of 4, a step after every 4 of them.
#
# </div>
# <div lang="zh">
#
# 三条说法。第二条：60 个样本，每个微批次 4 个，每 4 个微批次更新一次。
#
# </div>

# %%
counted, pending = 0, 0
for number, piece in enumerate(torch.arange(60).split(4)):
    pending += len(piece)
    if (number + 1) % 4 == 0:
        counted, pending = counted + pending, 0
lost = pending

# %%
from course_lib.lessons import what_you_may_have_read

what_you_may_have_read(
    "05",
    f"{100 * errors['mean_of_means']:.0f} %",
    f"{lost} / 60",
    f"32 → 1: {peaks[32] / 1e6:.0f} → {peaks[1] / 1e6:.0f} MB, 1/{peaks[32] / peaks[1]:.1f}",
)

# %% [markdown]
# ## 5.10 On a GPU / 在 GPU 上
#
# <div lang="en">
#
# On a device small micro-batches can leave units idle; the experiment measures how much. It takes the same batch in pieces of different sizes, with fp16, a scaler and clipping. If you have a GPU, this cell measures now.
#
# </div>
# <div lang="zh">
#
# 在设备上，微批次太小，计算单元就可能闲着。影响有多大？这个实验把同一个批次拆成大小不同的份来测，带 fp16、缩放器和裁剪。有 GPU 时，这个单元格会现场测量。
#
# </div>

# %% tags=["nbval-ignore-output", "shows-device"]
from course_lib.lessons import on_gpu

on_gpu("05")

# %% [markdown]
# ## 5.11 Exercises / 练习
#
# <div lang="en">
#
# **Exercise 1.** This loop has a normalisation bug that equal batches hide. Mend it: `accumulate(model, loss_sum, pieces)` leaves the full batch's gradient in `.grad`, and only one piece's graph is alive at a time. The check uses pieces of unequal weights, one of them zero.
#
# </div>
# <div lang="zh">
#
# **练习 1。** 这个循环的归一化有错，各份大小相等时看不出来。修好它：`accumulate(model, loss_sum, pieces)` 要在 `.grad` 里留下整批的梯度，并且每一时刻只有一份的计算图存活。检查用的各份权重不等，其中一份为零。
#
# </div>


# %%
def accumulate(model, loss_sum, pieces):
    for piece in pieces:
        loss, weight = loss_sum(model, piece)
        (loss / max(weight, 1) / len(pieces)).backward()


lesson_05.check_accumulation(accumulate)


# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not lesson_05.check_accumulation.accepted:

    def accumulate(model, loss_sum, pieces):
        total = 0
        for piece in pieces:
            loss, weight = loss_sum(model, piece)
            loss.backward()
            total += weight
        for parameter in model.parameters():
            parameter.grad /= total


lesson_05.check_accumulation(accumulate)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# **Exercise 2.** A step peaks at 500 MB with micro-batches of 2 and at 620 MB with micro-batches of 5. What is the largest micro-batch under 1 GB ($10^9$ bytes)?
#
# </div>
# <div lang="zh">
#
# **练习 2。** 微批次为 2 时一步的峰值是 500 MB，为 5 时是 620 MB。峰值不超过 1 GB（$10^9$ 字节），微批次最大是多少？
#
# </div>

# %%
answer = None  # samples
lesson_05.check_largest_micro_batch(answer)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
slope = (620 - 500) // (5 - 2)
lesson_05.check_largest_micro_batch((1000 - (500 - 2 * slope)) // slope)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# **Exercise 3.** A micro-batch of $m$ samples takes $5 + m$ milliseconds: 5 for launching, 1 for each sample. A step has 64 samples. Which of the micro-batches 1, 2, 4, 8, 16, 32, 64 is the smallest that reaches at least 80 % of the samples a second of the largest?
#
# </div>
# <div lang="zh">
#
# **练习 3。** $m$ 个样本的微批次要 $5 + m$ 毫秒：5 毫秒用于启动，每个样本 1 毫秒。一步有 64 个样本。在 1、2、4、8、16、32、64 这些微批次之中，每秒样本数至少达到最大微批次的 80% 的，最小是哪一个？
#
# </div>

# %%
answer = None  # samples
lesson_05.check_fast_micro_batch(answer)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
fast = [m for m in (1, 2, 4, 8, 16, 32, 64) if m / (5 + m) >= 0.8 * 64 / (5 + 64)]
lesson_05.check_fast_micro_batch(min(fast))
### END SOLUTION

# %% [markdown]
# ## 5.12 Summary / 小结
#
# <div lang="en">
#
# - Add up sums of losses, in fp32, divide once by all tokens. The mean of means is wrong wherever counts differ.
# - The peak is a floor plus a slope times the micro-batch. Weights, gradients and optimizer state don't shrink.
# - Clip once, after unscaling; step once; update the scaler once; keep the remainder.
# - BatchNorm sees pieces. Updating inside backward frees gradients, and excludes adding them up first.
# - Under DDP let only the last micro-batch synchronise (`no_sync`), and count tokens over all ranks.
#
# **Next:** [lesson 06](06_flash_attention.ipynb) lets the operator itself forget.
#
# </div>
# <div lang="zh">
#
# - 把损失的总和加起来，梯度以 fp32 求和，只除一次，除以全部 token 数。只要 token 数不等，平均的平均就是错的。
# - 峰值是下限加上斜率乘以微批次。权重、梯度和优化器状态不会缩小。
# - 还原缩放之后，只裁剪一次；优化器只更新一次；缩放器只更新一次；最后不满一组的，不要丢掉。
# - BatchNorm 看见的是一份一份的数据。在反向之中更新，可以及时释放梯度，但就不能先把梯度加起来了。
# - 在 DDP 下，只让最后一个微批次同步（`no_sync`），token 数要对所有进程统计。
#
# **下一步**：[第 06 课](06_flash_attention.ipynb)让算子自己来忘。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **Sources.** Hugging Face 2024, *Fixing Gradient Accumulation*, huggingface.co/blog/gradient_accumulation. Li et al. 2020, *PyTorch Distributed*, arXiv:2006.15704 (`no_sync`). Micikevicius et al. 2018, *Mixed Precision Training*, arXiv:1710.03740 (loss scaling). Zhang et al. 2023, *AdamA*, arXiv:2305.19982. PyTorch tutorial *How to save memory by fusing the optimizer step into the backward pass*.
#
# </div>
# <div lang="zh">
#
# **出处。** Hugging Face 2024，*Fixing Gradient Accumulation*，huggingface.co/blog/gradient_accumulation。Li et al. 2020，*PyTorch Distributed*，arXiv:2006.15704（`no_sync`）。Micikevicius et al. 2018，*Mixed Precision Training*，arXiv:1710.03740（损失缩放）。Zhang et al. 2023，*AdamA*，arXiv:2305.19982。PyTorch 教程 *How to save memory by fusing the optimizer step into the backward pass*。
#
# </div>
