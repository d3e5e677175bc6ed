# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 7 Given a byte budget, which of all these, and how much of each? (`fit`) / 给定字节预算，该用哪几样，各用多少？（`fit`）
#
# <div lang="en">
#
# This decoder has 35 million parameters. One plain training step, on two sequences, needs 1,003 MB. You have 270.
#
# Six lessons have given you attention that forgets, checkpoints, schedules, offload and micro-batches. Each has its price. Which ones do you need, and which only look as if they help?
#
# </div>
# <div lang="zh">
#
# 这个解码器有 3500 万个参数。对两条序列做一个普通的训练步，要 1,003 MB。你只有 270 MB。
#
# 前六课里，你学到了会“忘”的注意力、检查点、调度、卸载和微批次，各有各的代价。你需要哪几样？哪几样只是看起来有用？
#
# </div>

# %%
from course_lib.teaching import language

language()

# %% [markdown]
# <div lang="en">
#
# **Goals** (90 minutes). Predict the peak of a whole training step before running it. Combine techniques, and know why their savings don't add up. Meet a budget of about a quarter of what the plain step takes. Say what a single device of 24, 80 or 141 GB can train.
#
# **What to know before**: lessons 01 to 06.
#
# </div>
# <div lang="zh">
#
# **目标**（90 分钟）：在运行之前预测整个训练步的峰值；把几种技术合起来用，并知道节省为什么不能直接相加；在只有普通一步约四分之一的预算里完成训练步；说出一台 24、80 或 141 GB 的设备能训练什么。
#
# **预备知识**：第 01 课到第 06 课。
#
# </div>

# %%
import torch

from course_lib.budget import RATES, InfeasibleBudget, Recipe, build, estimate, fit, run, train_step
from course_lib.lessons import lesson_07
from course_lib.memory import MemoryBudgetExceeded, MemoryMeter, symbolic
from course_lib.models import Decoder, random_tokens
from course_lib.teaching import predictions, table, text

BUDGET = 270_000_000  # bytes


def make_model():
    return Decoder(vocabulary=8192, hidden=640, heads=40, layers=6, sequence=384)


def make_batch():
    return random_tokens(2, 384, 8192)  # two sequences of 384 tokens


# %% [markdown]
# ## 7.1 The plain step is stopped / 普通的一步被拦下
#
# <div lang="en">
#
# A meter with `budget_bytes` stops the operator that passes the budget. Let it watch the very first step, before Adam has any state.
#
# **Guess first:** where does it stop? In the forward pass, in the backward pass, in the optimizer? Which operator?
#
# </div>
# <div lang="zh">
#
# 带 `budget_bytes` 的计量器会拦下让内存超出预算的那个算子。让它看着最初的一步，这时 Adam 还没有状态。
#
# **先猜**：它会停在哪里？前向、反向，还是优化器？是哪个算子？
#
# </div>

# %%
model, optimizer = build(make_model, Recipe())
parameters = sum(p.numel() for p in model.parameters())
try:
    with MemoryMeter(model, optimizer, budget_bytes=BUDGET) as meter:
        train_step(model, optimizer, make_batch(), Recipe())
except MemoryBudgetExceeded as stopped:
    where = f"{meter.operator_count} operators, in the {meter.phases()[-1]} pass"
    print(f"{parameters:,} parameters, {where}:\n{stopped}")

# %% [markdown]
# <div lang="en">
#
# In the forward pass, before it has got far: where the second layer multiplies queries by keys. 140 MB are parameters; 92 MB are what the first layer keeps and what the second has made so far. Another 47 MB of scores would be too many. Nothing is half done: no gradient is there, no parameter has changed. The step can be run again, with less.
#
# From the second step on it is worse. Then Adam's state is there before the first operator: parameters and state alone are 12 bytes a parameter, 420 MB, one and a half times the budget. No checkpoint will help against that.
#
# </div>
# <div lang="zh">
#
# 停在前向，而且没走多远：就停在第二层把查询与键相乘的那个算子上。140 MB 是参数，92 MB 是第一层留下的，加上第二层到此为止产生的；再要 47 MB 放分数，就超了。没有留下做了一半的东西：梯度还没有，参数也没有变。换个更省的做法，这一步还可以重来。
#
# 从第二步起就更糟了：第一个算子运行之前，Adam 的状态已经在那里。光是参数和状态，每个参数就要 12 字节，共 420 MB，是预算的一倍半。对此，再多的检查点也没有用。
#
# </div>

# %%
[p.grad for p in model.parameters() if p.grad is not None], f"{12 * parameters / 1e6:,.0f} MB"

# %% [markdown]
# ## 7.2 Run it without running it / 不运行，也能先跑一遍
#
# <div lang="en">
#
# Symbolic tensors have shapes, dtypes and storages, but no memory (lesson 01). So the step itself can tell what it takes: let it run on such tensors, under the meter. Two steps, because Adam makes its state in the first one.
#
# </div>
# <div lang="zh">
#
# 符号张量有形状、dtype 和存储区，却不占内存（第 01 课）。所以这一步要多少内存，可以让它自己说：让它在计量器下用这样的张量跑一遍。跑两步，因为 Adam 在第一步里才建立状态。
#
# </div>

# %%
with symbolic():
    shadow = make_model()
    adam = torch.optim.AdamW(shadow.parameters(), foreach=False)
    for _ in range(2):
        with MemoryMeter(shadow, adam) as meter:
            shadow.loss(make_batch()).backward()
            adam.step()
        adam.zero_grad()
f"{meter.peak_bytes:,} bytes"

# %% [markdown]
# <div lang="en">
#
# That is the idea. The library's `estimate` does the same for any **recipe**: a value that says what a training step uses. `Recipe()` is the plain step, and this is all that it can say:
#
# </div>
# <div lang="zh">
#
# 思路就是这样。库里的 `estimate` 对任何**配方**都这么做。配方是一个不可变的对象（dataclass），写明一个训练步用了哪些技术；`Recipe()` 就是普通的一步，它能写的全部内容如下：
#
# </div>

# %%
lesson_07.recipe_fields()

# %%
plain = estimate(make_model, make_batch, Recipe())
plain

# %% [markdown]
# <div lang="en">
#
# The two differ by 6,160 bytes: the batch, 2 × 385 numbers of 8 bytes, which `estimate` leaves out. The peak comes in the backward pass, at the first softmax that it meets: 15 of 140 MB of gradients are there yet, and nearly all activations still are.
#
# </div>
# <div lang="zh">
#
# 两个数差 6,160 字节：那是批次，2 × 385 个数，每个 8 字节，`estimate` 不计它。峰值出现在反向，落在它遇到的第一个 softmax 上：这时 140 MB 的梯度只有 15 MB，而激活值几乎都还在。
#
# </div>

# %% [markdown]
# ## 7.3 Equal gradients first / 先看梯度是否相等
#
# <div lang="en">
#
# Before any claim of saving: do the recipes compute the same gradient? On a smaller decoder, against the gradient in float64. With SGD and a learning rate of 1, what a step subtracts is the gradient; so it is with momentum, at the first step. That one has a state to offload: the last row is the recipe that will win.
#
# </div>
# <div lang="zh">
#
# 在说节省之前，先看各个配方算出的梯度是否相同。用一个小一些的解码器，与 float64 的梯度比较。用 SGD，学习率取 1，于是一步更新所减去的正好就是梯度；带动量时，第一步也是如此。动量有状态可以卸载：最后一行就是将要胜出的配方。
#
# </div>


# %%
def small():
    return Decoder(vocabulary=256, hidden=256, heads=4, layers=3, sequence=128)


tokens = random_tokens(8, 128, 256)
exact = small().double()
exact.loss(tokens).backward()
wanted = torch.cat([p.grad.flatten() for p in exact.parameters()])


def error(recipe):
    model, optimizer = build(small, recipe, lr=1.0)
    before = torch.cat([p.detach().flatten().double() for p in model.parameters()])
    train_step(model, optimizer, tokens, recipe)
    after = torch.cat([p.detach().flatten().double() for p in model.parameters()])
    return float((before - after - wanted).norm() / wanted.norm())


# %%
sgd, forgetful = {"optimizer": "sgd"}, {"attention": "flash", "checkpoint": "layers"}
tested = [
    Recipe(**sgd),
    Recipe(**sgd, attention="flash"),
    Recipe(**sgd, **forgetful),
    Recipe(**sgd, **forgetful, micro_batches=2),
    Recipe(**sgd, **forgetful, in_backward=True),
    Recipe(**sgd, checkpoint="selective", head_chunk=64),
    Recipe(**sgd, checkpoint="optimal", schedule_bytes=20_000_000),
    Recipe(**sgd, checkpoint="layers", offload_activations=True),
    Recipe("fp32", "momentum", **forgetful, in_backward=True, offload_optimizer=1.0),
]
rows = [(str(recipe), "✓" if error(recipe) < 1e-5 else "✗") for recipe in tested]
table(["recipe", "error below 1e-5"], rows)

# %% [markdown]
# ## 7.4 One technique at a time / 一次加一样
#
# <div lang="en">
#
# Now to the budget. Add one technique at a time: flash attention, a checkpoint for every layer, micro-batches of one sequence. Then offload Adam's state, since nothing else touches it.
#
# **Guess first:** what does each save? Write down four numbers. If the four are to be enough, they and the 270 MB must add up to 1,003 MB or more.
#
# </div>
# <div lang="zh">
#
# 现在来对付预算。一次加一样：flash 注意力，每层一个检查点，每个微批次一条序列；最后卸载 Adam 的状态，因为别的都动不了它。
#
# **先猜**：每一样各省多少？写下四个数。如果这四样就够，四个数加上 270 MB 应当不少于 1,003 MB。
#
# </div>

# %%
steps = [
    Recipe(),
    Recipe(attention="flash"),
    Recipe(**forgetful),
    Recipe(**forgetful, micro_batches=2),
    Recipe(**forgetful, micro_batches=2, offload_optimizer=1.0),
]
predicted = [plain, *(estimate(make_model, make_batch, recipe) for recipe in steps[1:])]


# %%
def measured_peak(model, optimizer, recipe, batch):
    with MemoryMeter(model, optimizer) as meter:
        train_step(model, optimizer, batch, recipe)
    return meter.peak_bytes


model, optimizer = build(make_model, Recipe(), state=True)  # Adam's state, as after a step
measured = [measured_peak(model, optimizer, recipe, make_batch()) for recipe in steps[:4]]
del model, optimizer  # the last one has an optimizer of its own
measured.append(run(make_model, make_batch, steps[4]).meter.peak_bytes)

# %%
names = ["plain", "+ flash", "+ checkpoints", "+ micro-batches", "+ state offloaded"]
peaks = [e.peak_bytes for e in predicted]
predictions(zip(names, peaks, measured, strict=True), unit="bytes")

# %% [markdown]
# <div lang="en">
#
# Predicted to the byte. But look at the fourth row: the micro-batches made it *worse*, 623 MB instead of 602.
#
# Why? With checkpoints, activations are no longer what fills the peak: parameters, gradients and state are. With one piece, each gradient appears as the activations of its layer go: a full set is there only at the very end, which is where the peak is, and by then no activation is left. With two pieces, the first one's gradients, all 140 MB of them, lie there while the second one runs, so its activations come on top of a full set.
#
# Nor do savings add up. Checkpoints alone save 295 MB, flash alone 302 MB (with 40 heads of 16 features, more and narrower than usual, P is large); both together 400.
#
# </div>
# <div lang="zh">
#
# 预测与实测一个字节也不差。但看第四行：加了微批次反而**更高**：623 MB，原来是 602 MB。
#
# 为什么？有了检查点，撑起峰值的不再是激活值，而是参数、梯度和状态。只有一份时，每算出一层的梯度，这一层的激活值也就释放了；要到最后，梯度才凑成一整套，峰值就在这里，而这时激活值已经一个不剩。分成两份，第二份运行的时候，第一份的梯度已经全在那里，共 140 MB，于是第二份的激活值要叠加在一整套梯度之上。
#
# 各样省下的也不能直接相加。单用检查点省 295 MB，单用 flash 省 302 MB（40 个头、每头 16 维，比通常的多而窄，所以 P 很大）；两样合用，只省 400 MB。
#
# </div>

# %%
alone = estimate(make_model, make_batch, Recipe(checkpoint="layers"))
[f"{(plain.peak_bytes - e.peak_bytes) / 1e6:,.0f} MB" for e in (alone, predicted[1], predicted[2])]

# %% [markdown]
# ## 7.5 Swap one, and it fits / 换掉一样，就装下了
#
# <div lang="en">
#
# With the state on the tier below, 379 MB are left, and 280 of them are parameters and gradients. So a full set of gradients must never exist. Micro-batches, as we add them up, force one to exist: pieces come together before the step. Take them back, and let the optimizer step **inside** backward instead: each parameter is updated as soon as its gradient is there, and the gradient goes (lesson 05).
#
# </div>
# <div lang="zh">
#
# 状态移到下层存储之后，还剩 379 MB，其中 280 MB 是参数和梯度。所以，绝不能让一整套梯度同时存在。而微批次照我们的做法偏偏要求它存在：更新之前，各份的梯度先要加起来。那就撤掉微批次，让优化器在反向**之中**更新：哪个参数的梯度一就绪，就更新哪个参数，梯度随即丢掉（第 05 课）。
#
# </div>

# %%
recipe = Recipe(**forgetful, in_backward=True, offload_optimizer=1.0)
predicted.append(estimate(make_model, make_batch, recipe))
within = run(make_model, make_batch, recipe, budget_bytes=BUDGET)
measured.append(within.meter.peak_bytes)
names.append("micro-batches out, steps in backward")
predictions([(names[-1], predicted[-1].peak_bytes, measured[-1])], "bytes")

# %% [markdown]
# <div lang="en">
#
# 245 MB, under a meter that would have stopped it at 270. The step that took nearly four times the budget fits, with the same gradient (the last row of 7.3). What is given up: clipping by the norm of all gradients, which is known only when all are there, a scaler that skips a step, and micro-batches. All the way, in one picture:
#
# </div>
# <div lang="zh">
#
# 245 MB，而且有计量器看着：一旦超过 270 MB，就会被拦下。原本要近四倍预算的一步，装进去了，梯度不变（7.3 节最后一行）。放弃的是：按全部梯度的范数裁剪（梯度到齐才知道范数），缩放器跳过一步的能力，还有微批次。把整个过程画在一张图里：
#
# </div>

# %% jupyter={"source_hidden": true}
title = "From 1,003 to 245 MB: flash, checkpoints, state offloaded, steps in backward"
lesson_07.waterfall_picture(names, predicted, measured, BUDGET, title=title)

# %% [markdown]
# ## 7.6 The price / 代价
#
# <div lang="en">
#
# FLOPs and bytes moved are exact. Seconds need a machine's rates, and even then they are only an estimate: as if every FLOP and every byte went at full speed, no copy overlapped with computing, and the update itself took no time. On a laptop of 100 GFLOP/s and 1 GB/s:
#
# </div>
# <div lang="zh">
#
# FLOPs 和搬运的字节数是精确的。要换算成秒，就得有机器的速率；即便如此，得到的也只是估计：假定运算和搬运都以全速进行，一先一后、互不重叠，更新本身也不花时间。以一台 100 GFLOP/s、1 GB/s 的笔记本电脑为例：
#
# </div>

# %%
laptop, rows = RATES["laptop"], []
for name, e in zip(names, predicted, strict=True):
    price = f"{e.flops / 1e12:.3f}", f"{e.moved_bytes / 1e9:.3f}", f"{laptop.seconds(e):.2f}"
    rows.append((name, *price))
table(["technique", "TFLOPs", "GB moved", "seconds at these rates"], rows)

# %% [markdown]
# <div lang="en">
#
# Flash attention takes 1% more FLOPs here, not fewer: its backward pass computes the scores again, and 384 tokens fit into a single tile (the library's are 512 × 512), so there is none that the mask lets it skip. The checkpoints cost 20%, not a third: each stops before its last product (lesson 02), and the loss head is not recomputed. Adam's state, read and written in every step, moves 0.56 GB.
#
# </div>
# <div lang="zh">
#
# 在这里，flash 注意力的 FLOPs 不是更少，而是多 1%：它在反向时要把分数再算一遍，而 384 个 token 只用一个分块（库里的分块是 512 × 512），没有哪一块能因为掩码而跳过。检查点再多花 20%，而不是三分之一：每个检查点都在最后一次乘法之前停下（第 02 课），输出头与损失也不做重计算。Adam 的状态每步读一遍写一遍，要搬 0.56 GB。
#
# </div>

# %% [markdown]
# ## 7.7 Let a search find it / 交给搜索
#
# <div lang="en">
#
# `fit` looks for recipes that fit a budget and sorts them by price: seconds, here at the laptop's rates. It does not try every combination: what holds too many bytes from the start is passed over, and so is what adds to a recipe that fits already, where adding cannot make it cheaper (on top of offloaded activations a checkpoint can); the number of micro-batches is found by bisection. To keep it quick, a smaller decoder; its plain step takes 101 MB, and the budget is 20.
#
# </div>
# <div lang="zh">
#
# `fit` 寻找装得进预算的配方，按代价排序：代价以秒计，这里用笔记本电脑的速率。它并不逐一尝试所有组合：一开始就占得太多的，跳过；在已经装得下的配方上再加东西、又不可能因此变便宜的，也跳过（在卸载了激活值的配方上再加检查点，就可能变便宜）；微批次数用二分法找。为了快些，用一个小一点的解码器：它普通的一步要 101 MB，预算是 20 MB。
#
# </div>


# %%
def make_sister():
    return Decoder(vocabulary=1024, hidden=128, heads=8, layers=2, sequence=256)


def sister_batch():
    return random_tokens(8, 256, 1024)


found = fit(make_sister, sister_batch, 20_000_000, progress=False)
found

# %% [markdown]
# <div lang="en">
#
# If no recipe fits, `fit` refuses, and the error names the least peak that it found:
#
# </div>
# <div lang="zh">
#
# 如果没有一个配方装得下，`fit` 就拒绝，错误信息会给出它找到的最低峰值：
#
# </div>

# %%
candidates = [Recipe(**forgetful, micro_batches=8, offload_optimizer=f) for f in (0.0, 0.5, 1.0)]
try:
    fit(make_sister, sister_batch, 5_000_000, recipes=candidates, progress=False)
except InfeasibleBudget as refused:
    print(refused)

# %% [markdown]
# <div lang="en">
#
# Move the budget and see which of 18 recipes fit, and which of those is the cheapest.
#
# </div>
# <div lang="zh">
#
# 改变预算，看 18 个配方里哪些装得下，其中哪个代价最小。
#
# </div>

# %%
tried = []
for attention in ("standard", "flash"):
    for checkpoint in ("none", "selective", "layers"):
        for m in (1, 4, 8):
            recipe = Recipe(attention=attention, checkpoint=checkpoint, micro_batches=m)
            tried.append(estimate(make_sister, sister_batch, recipe))

# %%
lesson_07.draw_budget(tried)

# %% tags=["nbval-ignore-output", "shows-picture"]
lesson_07.budget_playground(tried)

# %% [markdown]
# ## 7.8 Seven and seventy billion / 七十亿与七百亿
#
# <div lang="en">
#
# The same functions on models that no machine here could hold: a decoder of 7 billion parameters (6.6 billion, exactly) and one of 70 billion (64.7 billion), bf16 with fp32 master weights, Adam, one sequence of 4096 tokens. What is offloaded goes to the host's memory, and the host does the update (lesson 04): in each step the gradients go down and the parameters come up, 4 bytes a parameter; the state itself stays on the host.
#
# **Guess first:** what is the smallest device that trains the smaller one? And the larger?
#
# </div>
# <div lang="zh">
#
# 还是这些函数，换成我们手头哪台机器都装不下的模型：一个 70 亿参数的解码器（确切说是 66 亿），一个 700 亿的（647 亿），bf16 加 fp32 主权重，Adam，一条 4096 个 token 的序列。卸载的东西放进主机内存，更新也由主机来做（第 04 课）：每一步只把梯度送到主机、把参数取回设备，每个参数共 4 字节；状态本身留在主机。
#
# **先猜**：要训练小的那个，至少得用多大的设备？大的呢？
#
# </div>


# %%
def large(hidden, layers):
    heads, rest = hidden // 128, {"vocabulary": 32000, "sequence": 4096}
    return lambda: Decoder(hidden=hidden, heads=heads, layers=layers, **rest)


forgetful = {"precision": "bf16", "attention": "flash", "checkpoint": "layers"}
ways = {
    "plain": Recipe(precision="bf16"),
    "flash, checkpoints": Recipe(**forgetful),
    "+ state on the host": Recipe(**forgetful, offload_optimizer=1.0),
    "+ steps in backward": Recipe(**forgetful, offload_optimizer=1.0, in_backward=True),
}
sizes = {"7 B": large(4096, 32), "70 B": large(8192, 80)}


# %%
def one_sequence():
    return random_tokens(1, 4096, 32000)


giants = {}
for size, make in sizes.items():
    for name, way in ways.items():
        if size == "7 B" or way.in_backward:
            giants[size, name] = estimate(make, one_sequence, way, tier="host")

# %% jupyter={"source_hidden": true}
devices = {"24 GB": "RTX 4090", "80 GB": "H100", "141 GB": "H200"}  # with the bytes that they have
rows = []
for (size, name), e in giants.items():
    fitting = [device for device in devices.values() if e.peak_bytes <= RATES[device].memory_bytes]
    marks = ["✓" if device in fitting else "–" for device in devices.values()]
    price = f"{e.moved_bytes / 1e9:.0f}", f"{RATES[fitting[0]].seconds(e):.2f}, {fitting[0]}"
    rows.append((size, name, f"{e.peak_bytes / 1e9:.1f}", *marks, *price))
table(["model", "recipe", "peak, GB", *devices, "GB moved", "seconds, on the smallest"], rows)

# %% [markdown]
# <div lang="en">
#
# 7 billion parameters train on a device of 24 GB, with 79 GB of state in the host's memory and 26 GB moved in every step. 70 billion, 129 GB of parameters alone, train on one of 141 GB: 137 GB at the peak, and 777 GB of state on the host.
#
# Can, not should: practice would first train fewer parameters (LoRA) or keep a smaller state (8 bits, Adafactor). The seconds are at stated rates: 40% of the datasheet's FLOPs, four fifths of the link or more, and 28 bytes a parameter through the memory of one host processor. On the H200, two thirds of the large model's step are copies and the host's update. Nothing here counts CUDA's context, workspace, rounding or fragmentation: 137 of the device's 150.8 GB leave them 9%. A larger batch spreads the copies over more tokens; lesson 08 the bytes over more devices.
#
# </div>
# <div lang="zh">
#
# 70 亿参数的模型可以在一台 24 GB 的设备上训练：79 GB 的状态放在主机内存里，每步搬运 26 GB。700 亿参数的模型，光参数就占 129 GB，也能在一台 141 GB 的设备上训练：峰值 137 GB，另有 777 GB 的状态在主机上。
#
# 能训练，不等于该这样训练：实践中往往先减少要训练的参数（LoRA），或缩小状态（8 位、Adafactor）。秒数按注明的速率算：算力取数据手册的 40%，链路取五分之四以上，主机每更新一个参数，要在一个处理器的内存里读写 28 字节。在 H200 上，大模型的一步有三分之二的时间花在拷贝和主机的更新上。这里没有算 CUDA 上下文、工作区、取整和碎片：设备有 150.8 GB，用掉 137 GB，给它们留下 9%。批次大一些，拷贝就能摊到更多 token 上；第 08 课则把字节摊到更多设备上。
#
# </div>

# %%
last, h200 = giants["70 B", "+ steps in backward"], RATES["H200"]
waiting = 1 - h200.parts(last)["compute"] / h200.seconds(last)
left = 1 - last.peak_bytes / h200.memory_bytes
state = giants["7 B", "flash, checkpoints"].at_peak["optimizer"]
below = 6 * last.at_peak["parameter"]
f"{waiting:.0%}, {state / 1e9:.0f} GB, {below / 1e9:.0f} GB below, {left:.0%}"

# %% [markdown]
# <div lang="en">
#
# Outside a notebook the same search is a command, `python -m course_lib.budget --parameters 7e9 --sequence 4096 --batch 8 --budget 80GiB`.
#
# It prints what fits and what the best takes; `--plot out.png` draws the way there.
#
# </div>
# <div lang="zh">
#
# 在 notebook 之外，同样的搜索是一条命令：`python -m course_lib.budget --parameters 7e9 --sequence 4096 --batch 8 --budget 80GiB`。
#
# 它列出哪些配方装得下、其中最好的要占多少；`--plot out.png` 把怎样一步步走到那里画成图。
#
# </div>

# %% [markdown]
# ## 7.9 What you may have read / 你可能读到过的说法
#
# <div lang="en">
#
# Four claims, with what this lesson measured.
#
# </div>
# <div lang="zh">
#
# 四条说法，以及本课的测量结果。
#
# </div>


# %%
def make_long():  # two layers of the decoder, for sequences of 4096
    return Decoder(vocabulary=8192, hidden=640, heads=40, layers=2, sequence=4096)


def long_batch():
    return random_tokens(1, 4096, 8192)


long = [estimate(make_long, long_batch, Recipe(attention=way)) for way in ("standard", "flash")]
flops = predicted[1].flops / plain.flops, long[1].flops / long[0].flops
savings = [plain.peak_bytes - e.peak_bytes for e in (predicted[1], alone, predicted[2])]

# %% jupyter={"source_hidden": true}
from course_lib.lessons import what_you_may_have_read

seven = giants["7 B", "+ steps in backward"]
peak, moved = f"{seven.peak_bytes / 1e9:.1f} GB", f"{seven.moved_bytes / 1e9:.0f} GB"
what_you_may_have_read(
    "07",
    f"{measured[2] / 1e6:,.0f} → {measured[3] / 1e6:,.0f} MB",
    f"{savings[0] / 1e6:,.0f} + {savings[1] / 1e6:,.0f} → {savings[2] / 1e6:,.0f} MB",
    text("{peak}, {moved} moved", peak=peak, moved=moved),
    f"{flops[0]:.3f} / {flops[1]:.3f}",
)

# %% [markdown]
# ## 7.10 On a GPU / 在 GPU 上
#
# <div lang="en">
#
# There the allocator keeps its own books: it rounds up, and operators take workspace. The experiment runs three recipes and compares the estimate with what the allocator saw. If you have a GPU, this cell measures now.
#
# </div>
# <div lang="zh">
#
# 在 GPU 上，分配器有自己的账：它会向上取整，算子还要占用工作区。这个实验运行三个配方，把估计值与分配器的记录相比较。有 GPU 时，这个单元格会现场测量。
#
# </div>

# %% tags=["nbval-ignore-output", "shows-device"]
from course_lib.lessons import on_gpu

on_gpu("07")

# %% [markdown]
# ## 7.11 Exercises / 练习
#
# <div lang="en">
#
# **Exercise 1.** The smaller decoder of 7.7, 8 sequences, and 40 MB. Stay with fp32 and Adam; find a recipe that fits and takes no more FLOPs than the plain step, moving nothing. Put it into `recipe`; the check estimates it.
#
# </div>
# <div lang="zh">
#
# **练习 1。** 7.7 节的小解码器，8 条序列，40 MB。仍用 fp32 和 Adam，找一个装得下的配方，FLOPs 不多于普通的一步，也不搬运任何字节。把它写进 `recipe`，检查程序会估计它的峰值和代价。
#
# </div>

# %%
recipe = None  # Recipe(...)
lesson_07.check_forty_megabytes(recipe)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
lesson_07.check_forty_megabytes(Recipe(micro_batches=4))
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# **Exercise 2.** Now 14 MB, again without moving anything. FLOPs are free this time.
#
# </div>
# <div lang="zh">
#
# **练习 2。** 换成 14 MB，仍然不许搬运，但这次 FLOPs 不限。
#
# </div>

# %%
recipe = None  # Recipe(...)
lesson_07.check_fourteen_megabytes(recipe)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
lesson_07.check_fourteen_megabytes(Recipe(attention="flash", checkpoint="layers", micro_batches=8))
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# **Exercise 3.** And 11 MB, with anything you like. Careful: what is offloaded comes up again for the optimizer's step, and takes room there too.
#
# </div>
# <div lang="zh">
#
# **练习 3。** 再换成 11 MB，用什么都行。小心：卸载的东西在优化器更新时要回到内存里，那时也占地方。
#
# </div>

# %%
recipe = None  # Recipe(...)
lesson_07.check_eleven_megabytes(recipe)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
half = {"offload_optimizer": 0.5, "micro_batches": 8}
lesson_07.check_eleven_megabytes(Recipe(attention="flash", checkpoint="layers", **half))
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# **Exercise 4.** Beat the lesson. For the large decoder and 270 MB, 7.5 found a recipe of 0.211 TFLOPs and 0.560 GB moved. Find one that fits and costs less at the laptop's rates. (`fit` would find one; do without it first. Hint: which layer need not be computed again?)
#
# </div>
# <div lang="zh">
#
# **练习 4。** 比本课做得更好。还是那个大的解码器，预算 270 MB，7.5 节找到的配方要 0.211 TFLOPs，搬运 0.560 GB。再找一个同样装得下、而按笔记本电脑的速率算代价更小的。（用 `fit` 也能找到，先自己想想。提示：哪一层不必再算一遍？）
#
# </div>

# %%
recipe = None  # Recipe(...)
lesson_07.check_beats_the_lesson(recipe)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
cheaper = Recipe(attention="flash", checkpoint="segments", segments=6, in_backward=True, offload_optimizer=1.0)
lesson_07.check_beats_the_lesson(cheaper)
### END SOLUTION

# %% [markdown]
# ## 7.12 Summary / 小结
#
# <div lang="en">
#
# - A step's peak can be known to the byte before a single byte is taken: run the step on symbolic tensors.
# - Look at what fills the peak before you choose. Checkpoints and flash shrink activations; offload shrinks state; stepping in backward removes gradients. Parameters stay where they are with all of these; fewer bits would shrink them, or more devices share them.
# - Savings don't add up, and one can undo another: micro-batches keep a full set of gradients; and steps in backward give up clipping.
# - Every saving has a price in FLOPs or bytes moved, and a machine's rates say which is dearer.
# - What fits need not be worth it: 70 billion parameters fit on one device, and spend two thirds of each step on copies and the host's update.
#
# **Next:** lesson 08, beyond one device.
#
# </div>
# <div lang="zh">
#
# - 一步的峰值不必占用内存就能知道，精确到字节：让这一步在符号张量上跑一遍。
# - 先看是什么撑起了峰值，再做选择。检查点和 flash 缩小激活值，卸载移走状态，在反向之中更新则免去整套梯度。参数却始终留在原处：要缩小它们，得减少位数；要分摊它们，得增加设备。
# - 节省不能相加，一样还可能抵消另一样：微批次要留着一整套梯度；而在反向之中更新，就放弃了梯度裁剪。
# - 每一处节省都有代价，不是 FLOPs，就是搬运的字节；哪个更贵，由机器的速率决定。
# - 装得下不等于值得：700 亿参数装得进一台设备，但每一步有三分之二的时间花在拷贝和主机的更新上。
#
# **下一步**：第 08 课，不止一台设备。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **Sources.** The techniques' own are in lessons 01 to 06. Rates: NVIDIA's datasheets of the H100 and H200 and its Ada whitepaper, dense figures, at 40%: Grattafiori et al. 2024, *The Llama 3 Herd of Models*, arXiv:2407.21783, reached 38 to 43% on H100s; PCIe 4.0 and 5.0, 16 lanes, one direction, as nvbandwidth measures them; host memory of a desktop with two channels of DDR5-5600 and of a Xeon 8480C with eight of DDR5-4800; device memory as nvidia-smi shows it. Rajbhandari et al. 2020, *ZeRO*, arXiv:1910.02054 (16 bytes a parameter); Ren et al. 2021, *ZeRO-Offload*, arXiv:2101.06840 (optimizer on the host); Lv et al. 2023, *LOMO*, arXiv:2306.09782 (steps in backward).
#
# </div>
# <div lang="zh">
#
# **出处。** 各项技术的出处见第 01 到 06 课。速率：NVIDIA 的 H100、H200 数据手册和 Ada 白皮书，取稠密算力的 40%：Grattafiori et al. 2024，*The Llama 3 Herd of Models*，arXiv:2407.21783，在 H100 上达到 38% 到 43%；PCIe 4.0 和 5.0，16 通道，单向，取 nvbandwidth 测得的值；主机内存分别取双通道 DDR5-5600 的台式机和八通道 DDR5-4800 的 Xeon 8480C；设备内存取 nvidia-smi 显示的值。Rajbhandari et al. 2020，*ZeRO*，arXiv:1910.02054（每个参数 16 字节）；Ren et al. 2021，*ZeRO-Offload*，arXiv:2101.06840（优化器在主机上）；Lv et al. 2023，*LOMO*，arXiv:2306.09782（在反向之中更新）。
#
# </div>
