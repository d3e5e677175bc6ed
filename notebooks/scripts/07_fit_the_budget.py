# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] slide={"en": "One step needs 277.7 MB. You have 60 MB, and weights with gradients alone take 55.\n\nWhich techniques do you combine?", "zh": "一步要 277.7 MB。你只有 60 MB，光是权重和梯度就占 55 MB。\n\n要把哪几种技术合起来用？"}
# # 7 Given a byte budget, which of all these, and how much of each? (`fit`) / 给定字节预算，该用哪几种技术，各用到什么程度？（`fit`）
#
# <div lang="en">
#
# The training step of this course, one Adam step of a small decoder, needs 277.7 MB. You have 60 MB.
#
# The weights and the gradients alone take 55 MB. The ledger has one row for each technique, and no row is below 124 MB. So you have to combine several techniques. Which ones? In this lesson you add six of them, one after another. Then you take one of them **out** again and look at the peak.
#
# </div>
# <div lang="zh">
#
# 本课程的训练步，也就是一个小解码器的一步 Adam，需要 277.7 MB 内存，而你只有 60 MB。
#
# 光是权重和梯度就要 55 MB。账本里的每一行只用一种技术，没有一行低于 124 MB，所以必须把几种技术合起来用。该用哪几种？这一课里，你逐一加上六种技术，然后再**去掉**其中一种，看看峰值会怎样变化。
#
# </div>

# %%
from course_lib.teaching import language

language()

# %% [markdown]
# <div lang="en">
#
# **Goals** (98 minutes). Write an estimate that needs no memory. Choose a technique by what fills the peak, and explain why savings need not add up. Compute which of two recipes is faster, and on which machine. State which recipes a search may skip.
#
# **What to know before**: lessons 01 to 06.
#
# </div>
# <div lang="zh">
#
# **目标**（98 分钟）：写一个函数，不占内存就能估计峰值；先看峰值里什么最多，再选技术，并说清节省的内存为什么不一定能相加；算出两个配方在什么样的机器上哪个更快；说出搜索可以跳过哪些配方。
#
# **预备知识**：第 01 课到第 06 课。
#
# </div>

# %%
import torch

from course_lib.budget import RATES, InfeasibleBudget, Recipe, build, estimate, fit, run, train_step
from course_lib.lessons.ledger import ledger
from course_lib.lessons.lesson_07 import exercises, figures, grid
from course_lib.memory import MemoryBudgetExceeded, MemoryMeter, symbolic
from course_lib.models import Decoder, random_tokens
from course_lib.teaching import predictions, table

BUDGET = 60_000_000  # bytes


def make_model():
    return Decoder(vocabulary=2048, hidden=256, heads=8, layers=8, sequence=128)


def make_batch():
    return random_tokens(8, 128, 2048)  # (8, 129): 128 tokens, and the one that follows each


# %% [markdown] slide={"en": "The baseline runs with a budget of 60 MB.\n\n**Guess first.** Where does it stop: forward, backward, or optimizer? In which layer?", "zh": "用 60 MB 的预算运行基线。\n\n**先猜**：它停在前向、反向，还是优化器更新？在第几层？"}
# ## 7.1 Where the baseline stops / 基线停在哪里
#
# <div lang="en">
#
# A meter with `budget_bytes` stops the step at the operator that exceeds the budget. Run the very first step of the baseline under such a meter. Adam has no state yet.
#
# **Guess first:** where does the step stop? In the forward pass, in the backward pass, or in the optimizer? In which of the eight layers?
#
# </div>
# <div lang="zh">
#
# 给计量器设了 `budget_bytes`，哪个算子让内存超出预算，训练就停在哪个算子。用这样的计量器运行基线的第一步，这时 Adam 还没有状态。
#
# **先猜**：这一步会停在哪里？是前向、反向，还是优化器更新？在八层里的哪一层？
#
# </div>

# %% slide="result"
model, adam = build(make_model, Recipe())
try:
    with MemoryMeter(model, adam, budget_bytes=BUDGET) as meter:
        train_step(model, adam, make_batch(), Recipe())
except MemoryBudgetExceeded as stopped:
    print(f"{meter.operator_count} operators, {meter.phases()[-1]}:\n{stopped}")
parameters = sum(parameter.numel() for parameter in model.parameters())
f"{parameters:,} parameters; {12 * parameters / 1e6:.1f} MB from the second step on"

# %% [markdown]
# <div lang="en">
#
# It stops in the forward pass, in the second of eight layers, where queries are multiplied by keys. The weights take 27.5 MB, and the first layer has already saved 21 MB. The model is unharmed, because no gradient exists yet and no weight has changed.
#
# From the second step on it is worse. Weights and Adam's state exist before the first operator runs. They take 12 bytes per parameter, 82.5 MB in total. No checkpoint can reduce that.
#
# </div>
# <div lang="zh">
#
# 它停在前向，在八层中的第二层，正要做查询与键的乘法。权重占 27.5 MB，第一层已经保存了 21 MB。模型没有受损，因为此时还没有梯度，权重也没有改动。
#
# 从第二步起，情况更糟。第一个算子运行之前，权重和 Adam 的状态就已经在内存里了，每个参数 12 字节，共 82.5 MB。检查点再多，也减少不了这一部分。
#
# </div>

# %% [markdown] slide={"en": "How much memory does a step need that your machine cannot run?\n\n**Write it** with symbolic tensors, two steps, and a meter.", "zh": "一个训练步，你的机器跑不动，怎样知道它需要多少内存？\n\n**自己写**：符号张量，跑两步，用计量器测量。"}
# ## 7.2 Run the step without memory / 不占内存地跑一步
#
# <div lang="en">
#
# You want to compare recipes on a machine that cannot run them. Symbolic tensors have shapes and storages but no memory (lesson 01), and the meter counts their bytes as usual.
#
# **Exercise 1.** Write `peak_of_step(make_model, make_batch)`. Using symbolic tensors, it returns the peak in bytes of the **second** step of the baseline with Adam. Use `torch.optim.Adam(parameters, foreach=False)`. The model has a method `loss(batch)`.
#
# </div>
# <div lang="zh">
#
# 现在要在一台跑不动这些配方的机器上比较它们。符号张量有形状、有存储区，但不占内存（第 01 课），计量器照样能统计它们的字节数。
#
# **练习 1。** 写出 `peak_of_step(make_model, make_batch)`：用符号张量求出基线（优化器为 Adam）**第二步**的峰值，返回字节数。优化器用 `torch.optim.Adam(parameters, foreach=False)`，模型有 `loss(batch)` 方法。
#
# </div>


# %% minutes=9
def peak_of_step(make_model, make_batch):
    return None


exercises.check_peak_without_memory(peak_of_step)

# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not exercises.check_peak_without_memory.accepted:

    def peak_of_step(make_model, make_batch):
        with symbolic():
            model = make_model()
            adam = torch.optim.Adam(model.parameters(), foreach=False)
            for _ in range(2):  # Adam makes its state in the first
                adam.zero_grad()
                with MemoryMeter(model, adam) as meter:
                    model.loss(make_batch()).backward()
                    adam.step()
        return meter.peak_bytes


exercises.check_peak_without_memory(peak_of_step)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# The library's `estimate` does the same for any **recipe**. A `Recipe` states which techniques a step uses, and `Recipe()` is the baseline. This lesson changes these fields:
#
# </div>
# <div lang="zh">
#
# 库里的 `estimate` 用同样的办法估计任何**配方**的内存。配方（`Recipe`）是一个对象，写明训练步用了哪些技术，`Recipe()` 就是基线。本课会改动下面这些字段：
#
# </div>

# %%
figures.recipe_fields()

# %% slide="result"
plain = estimate(make_model, make_batch, Recipe())
rows = [
    ("your estimate", peak_of_step(make_model, make_batch)),
    ("the library's", plain.peak_bytes),
    ("run for real", run(make_model, make_batch, Recipe()).meter.peak_bytes),
]
table(["", "bytes"], rows)

# %% [markdown]
# <div lang="en">
#
# Your estimate may be 8,256 bytes higher. These bytes are the batch, 8 × 129 numbers of 8 bytes, which counts if you create it after the meter has started. The library creates it before the meter starts.
#
# </div>
# <div lang="zh">
#
# 你的估计可能多出 8,256 字节，那是批次，共 8 × 129 个数，每个 8 字节。如果你在打开计量器之后才创建批次，它就会被统计进去，而库是在打开计量器之前创建的。
#
# </div>

# %% [markdown] slide={"en": "Before you compare memory: do all recipes train the same model?", "zh": "比较内存之前先问：各个配方训练出的模型一样吗？"}
# ## 7.3 Do all recipes train the same? / 各个配方训练的结果一样吗？
#
# <div lang="en">
#
# Memory may only be compared if the training is the same. The next cell trains a decoder of two layers for two Adam steps with each recipe. It compares the weights with those of the baseline. The difference is given as a fraction of the baseline's update.
#
# Three combinations have a name from here on: `checkpoints`, `offloaded` and `early`.
#
# </div>
# <div lang="zh">
#
# 训练的结果相同，比较内存才有意义。下面用一个两层的解码器，按每个配方做两步 Adam，再与基线的权重比较，差别以这两步的更新量为单位。
#
# 从这里起，给三组常用的选项各起一个名字：`checkpoints`、`offloaded` 和 `early`。
#
# </div>


# %%
checkpoints = {"checkpoint": "layers"}  # one checkpoint per layer
offloaded = {"offload_activations": True}  # saved tensors go to the lower tier
early = {"offload_optimizer": 1.0, "in_backward": True}  # offloaded state, updates in backward


def weights(recipe, steps=2):
    sizes = {"vocabulary": 256, "hidden": 256, "heads": 8, "layers": 2, "sequence": 128}
    model, optimizer = build(lambda: Decoder(**sizes), recipe)
    start = torch.cat([p.detach().flatten().double() for p in model.parameters()])
    for _ in range(steps):
        train_step(model, optimizer, random_tokens(8, 128, 256), recipe)
    return torch.cat([p.detach().flatten().double() for p in model.parameters()]), start


# %% slide="result"
tried = [checkpoints, {"micro_batches": 8}, {"attention": "flash"}, {"head_chunk": 128}]
tried += [offloaded, early, {**checkpoints, **offloaded, **early}]
expected, start = weights(Recipe())
rows = []
for options in tried:
    error = ((weights(Recipe(**options))[0] - expected).norm() / (expected - start).norm()).item()
    shown = "0" if error == 0 else "< 0.0005" if error < 5e-4 else "✗"
    rows.append((str(Recipe(**options)), shown))
table(["recipe", "difference of the weights"], rows)

# %% [markdown]
# <div lang="en">
#
# Recomputation and offloading do not change a single bit. Micro-batches, flash attention and a head in chunks add numbers in another order, which changes the update here by less than 0.05%. So all recipes compute the same update, and their memory may be compared.
#
# </div>
# <div lang="zh">
#
# 重计算和卸载连一个比特都不改变。微批次、flash 注意力和把输出头分成小段会改变求和的顺序，在这里更新量的变化小于 0.05%。因此所有配方算出的更新都相同，可以放在一起比较内存。
#
# </div>

# %% [markdown] slide={"en": "277.7 MB. Add checkpoints; eight micro-batches; offloaded state; small pages.\n\n**Guess first.** What is the peak after each?", "zh": "从 277.7 MB 开始，依次加上检查点、八个微批次、状态卸载、小页。\n\n**先猜**：每加一种之后，峰值各是多少？"}
# ## 7.4 One technique after another / 逐一加上各种技术
#
# <div lang="en">
#
# Now add the techniques one after another: a checkpoint for every layer; eight micro-batches; Adam's state in the lower tier (host memory or disk); and pages of 1 MiB instead of 16 MiB for that state.
#
# **Guess first:** the baseline's peak is 277.7 MB. What is the peak after each of the four? Write down four numbers.
#
# </div>
# <div lang="zh">
#
# 现在逐一加上各种技术：先给每层一个检查点，再把批次分成八个微批次，再把 Adam 的状态放到下一级存储（主机内存或磁盘），最后把状态的页从 16 MiB 改成 1 MiB。
#
# **先猜**：基线的峰值是 277.7 MB，每加一种之后，峰值各是多少？写下四个数。
#
# </div>

# %% tags=["guess"] slide="result" minutes=3
my_guesses = [None, None, None, None]  # in MB
steps = {"plain": {}, "+ checkpoints": checkpoints}
steps["+ 8 micro-batches"] = {**checkpoints, "micro_batches": 8}
steps["+ state offloaded"] = {**steps["+ 8 micro-batches"], "offload_optimizer": 1.0}
steps["+ small pages"] = {**steps["+ state offloaded"], "page_bytes": 1 << 20}
found = {name: estimate(make_model, make_batch, Recipe(**way)) for name, way in steps.items()}
figures.what_fills(found, found.values())

# %% [markdown]
# <div lang="en">
#
# Each technique reduces only what fills the peak **at that point**:
#
# - **Checkpoints** save 144 MB, because nearly all activations are no longer kept.
# - **Eight micro-batches** save another 17 MB. What remains is mostly weights, gradients and optimizer state, 16 bytes per parameter or 110 MB, which micro-batches do not reduce.
# - **Offloading the optimizer state** saves 14 MB, although the state takes 55 MB. The peak has moved into the optimizer step, where 46.6 MB of the state are in memory again. These are three pages: one is being read, one updated, and one written back. A page holds whole parameters, here at most 16 MiB (16.8 MB), so these three hold less than 50.3 MB.
# - **Small pages** save 40 MB. Now only the state of two parameters, embedding and positions, is in memory at the peak, 4.5 MB.
#
# That leaves 63.7 MB, which is 3.7 MB too much.
#
# </div>
# <div lang="zh">
#
# 每种技术能减少的，只是**当时**占满峰值的那些东西：
#
# - **检查点**省下 144 MB，因为几乎所有的激活值都不再保存。
# - **八个微批次**又省下 17 MB。剩下的主要是权重、梯度和优化器状态，每个参数 16 字节，共 110 MB，微批次减少不了这些。
# - **卸载优化器状态**只省下 14 MB，尽管状态本身占 55 MB。这是因为峰值移到了优化器更新的时候，此时有 46.6 MB 的状态又回到了内存里，也就是三页：一页正在读入，一页正在更新，一页正在写出。一页只装完整的参数，在这里至多 16 MiB（16.8 MB），所以这三页不到 50.3 MB。
# - **小页**省下 40 MB。现在到峰值时，内存里只有嵌入和位置表这两个参数的状态，共 4.5 MB。
#
# 峰值还有 63.7 MB，比预算多 3.7 MB。
#
# </div>

# %% [markdown] slide={"en": "63.7 MB, of which weights and gradients take 55.\n\n**Guess first.** Update inside backward, without micro-batches: is it 36 MB?", "zh": "还有 63.7 MB，其中权重和梯度占 55 MB。\n\n**先猜**：在反向之中更新，不用微批次，峰值会是 36 MB 吗？"}
# <div lang="en">
#
# Of the 63.7 MB, weights and gradients take 55 MB, and the weights must stay. So the gradients must never all exist at once. The optimizer can update each parameter **inside** the backward pass (lesson 05) and release its gradient. This rules out micro-batches, which add up gradients before the update. **Guess first:** without the 27.5 MB of gradients, is the peak 36 MB?
#
# </div>
# <div lang="zh">
#
# 这 63.7 MB 中，权重和梯度占 55 MB，而权重必须留下。所以不能让全部梯度同时存在：优化器可以在反向**之中**逐个更新参数（第 05 课），随即释放它的梯度。这样就不能再用微批次，因为各个微批次的梯度要加起来才能更新。**先猜**：省掉 27.5 MB 的梯度之后，峰值会是 36 MB 吗？
#
# </div>

# %% slide="result"
more = {"in backward, whole batch": {**checkpoints, **early}}
more["+ activations offloaded"] = {**checkpoints, **early, **offloaded}
found |= {name: estimate(make_model, make_batch, Recipe(**way)) for name, way in more.items()}
figures.what_fills(more, [found[name] for name in more])

# %% [markdown]
# <div lang="en">
#
# The peak is 64.2 MB, no lower than before, but something else fills it. The gradients are gone. Without micro-batches, however, the recomputation restores a whole layer for eight sequences (21 MB), in addition to the inputs of 7 layers. These activations can be reduced further: offload what the checkpoints keep. The second row is 57.9 MB, and it fits.
#
# The next cell runs every recipe for real. A meter stops the last one if it exceeds 60 MB.
#
# </div>
# <div lang="zh">
#
# 峰值是 64.2 MB，并没有降低，但占满峰值的东西变了。梯度已经释放，但不用微批次时，重计算会恢复八条序列的一整层激活值，共 21 MB，此外还有 7 层的输入。激活值还有办法减少：把检查点保存的输入也卸载到下一级存储。这就是表中第二行，57.9 MB，装得下了。
#
# 下面把每个配方都真实地运行一遍。最后一个配方的内存若超过 60 MB，计量器会让训练停下。
#
# </div>

# %%
ways = {**steps, **more}
limits = {"+ activations offloaded": BUDGET}
measured = {}
for name, way in ways.items():
    stepped = run(make_model, make_batch, Recipe(**way), budget_bytes=limits.get(name))
    measured[name] = stepped.meter.peak_bytes
predictions([(name, found[name].peak_bytes, measured[name]) for name in ways], unit="bytes")

# %% jupyter={"source_hidden": true} slide="result"
title = "From 277.7 to 57.9 MB, each technique changes what fills the peak"
peaks = list(measured.values())
figures.waterfall_picture(list(found), list(found.values()), peaks, BUDGET, title=title)

# %% [markdown] slide={"en": "57.9 MB: it fits. Now take the checkpoints **out** again.\n\n**Guess first.** What is the peak?", "zh": "57.9 MB，装得下了。现在把检查点**去掉**。\n\n**先猜**：峰值是多少？"}
# ## 7.5 Take the checkpoints out / 去掉检查点
#
# <div lang="en">
#
# It fits. Now take the **checkpoints out** again. Every saved tensor goes to the lower tier as soon as it is made, and nothing is computed twice.
#
# **Guess first:** without checkpoints, what is the peak?
#
# </div>
# <div lang="zh">
#
# 装得下了。现在把**检查点去掉**：为反向保存的张量一产生就移到下一级存储，不再有任何重计算。
#
# **先猜**：没有检查点，峰值是多少？
#
# </div>

# %%
without = run(make_model, make_batch, Recipe(**early, **offloaded))

# %% jupyter={"source_hidden": true} slide="result"
figures.both_timelines(stepped.meter, without.meter)

# %% [markdown] slide={"en": "Lower, and nothing is recomputed, but 447.7 MB move instead of 128.9.\n\n**Write it**: at how many FLOPs per byte are both equally fast?", "zh": "峰值更低，也没有重计算，但要搬运 447.7 MB，而不是 128.9 MB。\n\n**自己写**：每字节多少 FLOPs 时，两者一样快？"}
# <div lang="en">
#
# The peak is 53.9 MB, which is 4 MB lower. A checkpoint restores the activations of its whole layer, 21 MB, before the first gradient of that layer is computed. Offloading alone brings back one tensor at a time, when backward needs it. So a checkpoint on top of offloading *raises* the peak here. (The peak is now at the start of backward, at the logits.)
#
# What is the price? Without checkpoints nothing is recomputed, but 447.7 MB move instead of 128.9 MB. Which recipe is faster?
#
# **Exercise 2.** Write `break_even(first, second)`. If both recipes take equally long, how many FLOPs does the machine do in the time of one copied byte? Each recipe has `flops` and `moved_bytes` (both directions). Copies and computation do not overlap.
#
# </div>
# <div lang="zh">
#
# 峰值是 53.9 MB，低了 4 MB。检查点会在求出某一层的第一个梯度之前，把这一整层的激活值都恢复出来，共 21 MB。只用卸载时，反向需要哪个张量，才取回哪个张量。因此在这里，卸载之上再加检查点，峰值反而**升高**。（现在峰值出现在反向刚开始、处理 logits 的时候。）
#
# 代价是什么？去掉检查点就没有重计算，但要搬运 447.7 MB，而不是 128.9 MB。哪个配方更快？
#
# **练习 2。** 写出 `break_even(first, second)`：如果两个配方用时相同，那么机器拷贝一个字节的时间里能做多少 FLOPs？每个配方有 `flops` 和 `moved_bytes`（往返合计），拷贝与计算不重叠。
#
# </div>


# %% minutes=6
def break_even(first, second):
    return None


exercises.check_break_even(break_even)

# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not exercises.check_break_even.accepted:

    def break_even(first, second):
        return (first.flops - second.flops) / (second.moved_bytes - first.moved_bytes)


exercises.check_break_even(break_even)
### END SOLUTION

# %% slide="result"
both = ({**checkpoints, **early, **offloaded}, {**early, **offloaded})
pair = [estimate(make_model, make_batch, Recipe(**way)) for way in both]
table(["equally fast at (FLOPs per byte)"], [(round(break_even(*pair) or 0, 1),)])

# %% jupyter={"source_hidden": true} slide="result"
figures.draw_break_even(*pair, names=["with checkpoints", "without checkpoints"])

# %% [markdown]
# <div lang="en">
#
# This is the threshold of lesson 04 again. The `laptop` of `RATES` has 100 GFLOP/s and a disk of 1 GB/s, so it does 100 FLOPs in the time of one copied byte. There, the recipe with checkpoints is faster. With 20 FLOPs per byte, on a slow processor with a fast disk, the other one is faster. Without a machine, "Which recipe is best?" has no answer.
#
# </div>
# <div lang="zh">
#
# 这又是第 04 课的阈值。`RATES` 里的 `laptop` 算力是 100 GFLOP/s，磁盘是 1 GB/s，拷贝一个字节的时间能做 100 FLOPs，所以在它上面用检查点更快。如果处理器慢而磁盘快，每字节只有 20 FLOPs，不用检查点就更快。不说明是什么机器，“哪个配方最好”就没有答案。
#
# </div>

# %% [markdown] slide={"en": "What did each technique cost?", "zh": "每种技术的代价是什么？"}
# ## 7.6 The price of each technique / 每种技术的代价
#
# <div lang="en">
#
# FLOPs and moved bytes are counted exactly. The time also depends on the machine's rates, so it is only an estimate.
#
# </div>
# <div lang="zh">
#
# FLOPs 和搬运的字节是精确统计出来的。用时还取决于机器的速率，所以只是估计。
#
# </div>

# %% slide="result"
found["without checkpoints"] = pair[1]
laptop, rows = RATES["laptop"], []
for name, each in found.items():
    ratio, moved = f"{each.flops / plain.flops:.2f}", f"{each.moved_bytes / 1e6:.1f}"
    rows.append((name, f"{each.peak_bytes / 1e6:.1f}", ratio, moved, f"{laptop.seconds(each):.2f}"))
table(["step", "peak (MB)", "FLOPs (× baseline)", "moved (MB)", "time on the laptop (s)"], rows)

# %% [markdown]
# <div lang="en">
#
# The table does not show everything:
#
# - **Updates in backward** happen before the norm of all gradients is known. They exclude clipping by that norm, a scaler that skips steps, and micro-batches.
# - **Offloaded optimizer state**: if the lower tier is host memory, the host's processor does the update. It reads and writes 28 bytes per parameter. `RATES` includes this for real devices.
# - **Micro-batches**: a matrix product over one sequence may run at a lower rate than one over eight. The table assumes the same rate.
# - **Flash attention** is not used. At 128 tokens it saves only 25 of 278 MB alone, and 3 MB with checkpoints. At 4096 tokens it is the first technique to use (lesson 06).
#
# </div>
# <div lang="zh">
#
# 还有一些代价，表里看不到：
#
# - **在反向之中更新**时，全部梯度的范数还不知道，所以不能按这个范数裁剪，缩放器不能跳过某一步，也不能用微批次。
# - **卸载优化器状态**：如果下一级存储是主机内存，更新就由主机的处理器来做，每个参数要读写 28 字节。对真实的设备，`RATES` 已经计入这一项。
# - **微批次**：一条序列的矩阵乘法，速率可能低于八条序列的。表里假定速率相同。
# - **flash 注意力**没有用上。序列长 128 个 token 时，单独使用只能从 278 MB 里省 25 MB，有检查点时只省 3 MB。到了 4096 个 token，它是首选的技术（第 06 课）。
#
# </div>

# %% [markdown] slide={"en": "A search proposes recipes, estimates them, and sorts those that fit.\n\n**Guess first.** Does it find your recipe, or a faster one?", "zh": "搜索：提出配方，估计峰值，把装得下的按用时排序。\n\n**先猜**：它找到的是你的配方，还是更快的？"}
# ## 7.7 Let a search find it / 用搜索来找
#
# <div lang="en">
#
# You have looked for a recipe by hand. A search does three things. It proposes recipes, it estimates each of them, and it sorts those that fit by time. Sorting takes two lines. Apply it to the recipes of this lesson first:
#
# </div>
# <div lang="zh">
#
# 刚才是手工找配方。搜索要做三件事：提出配方，逐个估计内存和用时，再把装得下的按用时排序。排序只要两行代码，先用在本课试过的配方上：
#
# </div>

# %%
fitting = [each for each in found.values() if each.peak_bytes <= BUDGET]
[str(each.recipe) for each in sorted(fitting, key=laptop.seconds)]

# %% slide="result"
searched = fit(make_model, make_batch, BUDGET, progress=False)
searched

# %% [markdown]
# <div lang="en">
#
# The first line is the recipe of 7.4, with 0.676 s at these rates. The recipe without checkpoints has the lowest peak, but it comes last. `fit` has estimated 123 recipes. It skips the others by three rules:
#
# - Skip a recipe if the tensors that exist before the first operator, or those of the optimizer step alone, exceed the budget. Fewer activations would not help then.
# - If a recipe fits, skip those that add another technique to it, because they cost more. There are two exceptions. With offloaded activations, a checkpoint can save time because fewer bytes move. Flash attention can need fewer FLOPs (7.17).
# - For checkpoints around the first $k$ layers: if $k=1$ already costs more than the best recipe so far, skip every larger $k$.
#
# </div>
# <div lang="zh">
#
# 第一行就是 7.4 节的配方，按这些速率是 0.676 秒。不用检查点的配方峰值最低，却排在最后。`fit` 估计了 123 个配方，其余的按三条规则跳过：
#
# - 第一个算子运行之前的张量，或者单是优化器更新时的张量，如果已经超出预算，就跳过这个配方，因为减少激活值已经无济于事。
# - 一个配方装得下时，跳过在它上面再加技术的配方，因为代价会更大。例外有两个。激活值已卸载时，再加检查点可以少搬运一些字节，反而可能更快。flash 注意力的 FLOPs 可能更少（7.17 节）。
# - 对只给前 $k$ 层加检查点的配方，如果 $k=1$ 时就已经比目前最好的配方慢，就跳过更大的 $k$。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# Bisection finds the number of micro-batches. `tests/brute_force_fit.py` compares `fit` with all recipes of a grid on twelve small models: 441 searches gave no difference. If no recipe fits, `fit` raises an error that states the lowest peak:
#
# </div>
# <div lang="zh">
#
# 微批次的个数用二分法找。`tests/brute_force_fit.py` 在十二个小模型上，把 `fit` 与网格里的全部配方作了比较，441 次搜索没有一次不同。如果没有配方装得下，`fit` 会报错，并写出找到的最低峰值：
#
# </div>

# %% jupyter={"source_hidden": true}
try:
    those = [each.recipe for each in fitting]
    fit(make_model, make_batch, 40_000_000, recipes=those, progress=False)
except InfeasibleBudget as refused:
    print(refused)

# %% [markdown]
# <div lang="en">
#
# Now change the budget and the machine. The estimates of 64 recipes are stored. Which one is the fastest that fits?
#
# </div>
# <div lang="zh">
#
# 现在拖动滑块，改变预算和机器。这里存有 64 个配方的估计，装得下的配方里哪个最快？
#
# </div>

# %% slide="result"
figures.draw_recipes(grid.stored_estimates())

# %% tags=["nbval-ignore-output", "shows-picture"]
figures.recipes_playground(grid.stored_estimates())

# %% [markdown] slide={"en": "160 MB, no extra FLOPs, nothing offloaded.\n\nWhich single technique is enough?", "zh": "160 MB，FLOPs 不增加，也不搬运数据。\n\n只用哪一种技术就够了？"}
# ## 7.8 Three budgets / 三个预算
#
# <div lang="en">
#
# Find a recipe for each of three budgets. Each one needs an idea, and thinking is faster than trying at random. The check estimates your recipe. If it does not fit, the check shows what fills the peak.
#
# **Exercise 3.** At most 160 MB, no more FLOPs than the baseline, and no bytes moved.
#
# </div>
# <div lang="zh">
#
# 下面给三个预算各找一个配方。每个预算都要先想好再动手，这比乱试更快。检查会估计你的配方要多少内存，装不下时会写出峰值由什么占满。
#
# **练习 3。** 峰值不超过 160 MB，FLOPs 不得超过基线，也不能搬运任何字节。
#
# </div>

# %% minutes=5
recipe = None  # Recipe(...)
exercises.check_same_flops(recipe)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
exercises.check_same_flops(Recipe(micro_batches=4))
### END SOLUTION

# %% [markdown] slide={"en": "120 MB, nothing moved, clipping kept, at most 1.19 times the FLOPs.\n\nWhich layer's checkpoint is wasted?", "zh": "120 MB，不搬运数据，保留裁剪，FLOPs 至多 1.19 倍。\n\n哪一层的检查点是多余的？"}
# <div lang="en">
#
# **Exercise 4.** At most 120 MB, no bytes moved, and at most 1.19 times the baseline's FLOPs. The training clips by the norm of all gradients, so all of them must exist before the update.
#
# </div>
# <div lang="zh">
#
# **练习 4。** 峰值不超过 120 MB，不搬运任何字节，FLOPs 至多是基线的 1.19 倍。训练要按全部梯度的范数裁剪，所以更新之前，全部梯度必须都已求出。
#
# </div>

# %% minutes=8
recipe = None  # Recipe(...)
exercises.check_keeps_clipping(recipe)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
exercises.check_keeps_clipping(Recipe(checkpoint="layers", first_blocks=7, micro_batches=8))
### END SOLUTION

# %% [markdown] slide={"en": "50 MB, by any means.\n\nWhat fills the peak of the recipe without checkpoints?", "zh": "50 MB，什么办法都行。\n\n去掉检查点的配方，峰值由什么占满？"}
# <div lang="en">
#
# **Exercise 5.** Find a recipe that needs at most 50 MB, with any techniques. The recipes above are not enough.
#
# </div>
# <div lang="zh">
#
# **练习 5。** 峰值不超过 50 MB，什么办法都行。只用前面的配方是不够的。
#
# </div>

# %% minutes=8
recipe = None  # Recipe(...)
exercises.check_fifty(recipe)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
least = {"offload_optimizer": 1.0, "in_backward": True, "offload_activations": True}
exercises.check_fifty(Recipe(**least, head_chunk=128))
### END SOLUTION

# %% [markdown] slide={"en": "LoRA, QLoRA, 8-bit Adam, bf16: what most people try first.\n\n**Guess first.** Which of them fits into 60 MB?", "zh": "LoRA、QLoRA、8 位 Adam、bf16：很多人最先试的是这些。\n\n**先猜**：哪一种能装进 60 MB？"}
# ## 7.9 What people try first / 大家最先试的办法
#
# <div lang="en">
#
# Many people first do something else when a step does not fit. They train fewer numbers, or store fewer bits per number. The result is another training, so `fit` does not propose it.
#
# - **bf16 without master weights**: weight, gradient and two moments take 2 bytes each, 8 bytes per parameter in total. With fp32 master weights it is 16 bytes, as in fp32.
# - **8-bit Adam**: each moment is the index of one of 256 levels, 1 byte, and 256 elements share an fp32 scale. **Paged** moments may also move to the host while GPU memory is short.
# - **LoRA** (lesson 01): the weights are frozen, so they have no gradients and no optimizer state. Only four thin matrices per layer are trained.
# - **QLoRA**: a frozen weight is the index of one of 16 levels, 4 bits, and 64 weights share an fp32 scale. Each layer rebuilds its weight when it needs it.
#
# </div>
# <div lang="zh">
#
# 训练步装不下时，很多人先用的是另一类办法：少训练一些数，或者每个数少存几位。这样得到的是另一种训练，所以 `fit` 不会提出这些办法。
#
# - **不用主权重的 bf16**：权重、梯度和两个矩各 2 字节，每个参数共 8 字节。如果保留 fp32 主权重，就是 16 字节，与 fp32 相同。
# - **8 位 Adam**：两个矩里的每个数只存一个编号，表示 256 个数值级别中的一个，占 1 字节，每 256 个元素共用一个 fp32 的缩放因子。**分页**的优化器在 GPU 显存不足时，还能把这两个矩移到主机内存。
# - **LoRA**（第 01 课）：权重被冻结，因此没有梯度，也没有优化器状态。训练的只是每层四个很窄的矩阵。
# - **QLoRA**：冻结的权重只存 16 个数值级别中的一个编号，占 4 位，每 64 个权重共用一个 fp32 的缩放因子。哪一层要用权重，就临时还原哪一层的。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# Every row below has one checkpoint per layer and the whole batch. With Adam in fp32 the peak is then 134.0 MB. **Guess first:** which rows are below 60 MB?
#
# </div>
# <div lang="zh">
#
# 下表各行都是每层一个检查点、整个批次一起算。这时用 fp32 的 Adam，峰值是 134.0 MB。**先猜**：哪几行会低于 60 MB？
#
# </div>

# %%
from dataclasses import replace

from course_lib.lessons.lesson_01.figures import with_adapters
from course_lib.lessons.lesson_07.smaller import compare_smaller, in_four_bits, what_stays_right

as_made = Recipe(precision=None, **checkpoints)  # keeps the dtypes of the model
smaller = {
    "Adam, fp32": (make_model, Recipe(**checkpoints)),
    "bf16, fp32 master weights": (make_model, Recipe(precision="bf16", **checkpoints)),
    "bf16 without master weights": (lambda: make_model().bfloat16(), as_made),
    "8-bit Adam": (make_model, Recipe(optimizer="adam8bit", **checkpoints)),
    "LoRA": (lambda: with_adapters(make_model(), 8), as_made),
    "QLoRA": (lambda: with_adapters(in_four_bits(make_model()), 8), as_made),
}

# %% slide="result"
compare_smaller(smaller, make_batch)

# %% [markdown]
# <div lang="en">
#
# Every prediction equals the run. In this table only QLoRA fits. It needs 41.7 MB and moves no data. It stores the weights of the layers in 0.5 + 4/64 = 0.5625 bytes each. For 7 billion weights that is 3.9 GB instead of 28 GB in fp32.
#
# The row *paged* is an estimate for a GPU that moves all moments away. On a CPU bitsandbytes warns "Paged optimizers are not supported on CPU" and does not move them.
#
# Does each of them still compute the right update? A model with two layers is enough to see it.
#
# </div>
# <div lang="zh">
#
# 预测与实际运行全都相等。这张表里只有 QLoRA 装得下，峰值 41.7 MB，而且不搬运任何数据。各层的权重每个只占 0.5 + 4/64 = 0.5625 字节，70 亿个权重就是 3.9 GB，而用 fp32 要 28 GB。
#
# “分页”一行没有运行，是对 GPU 的估计，假定两个矩全部移走了。在 CPU 上，bitsandbytes 会警告“Paged optimizers are not supported on CPU”，两个矩并不会移走。
#
# 那么，这些办法训练的结果还对吗？用一个两层的模型就能看出来。
#
# </div>


# %% slide="result"
def two_layers():
    return Decoder(vocabulary=2048, hidden=256, heads=8, layers=2, sequence=128)


what_stays_right(two_layers, make_batch)

# %% [markdown]
# <div lang="en">
#
# - **bf16 without master weights** loses most of the update at a learning rate of 0.00001. At 0.0001, 28% of the weights stay unchanged. A bf16 number has 8 significant bits, so a change below about 0.2% of a weight is rounded away.
# - **8-bit Adam** changes the update by about 1%.
# - **LoRA** trains 98,304 of 6.9 million numbers. Their gradients follow from the full gradient by the chain rule.
# - **QLoRA** rounds the frozen weights by 9%. Its adapters then get exactly the gradients that LoRA computes on the rounded weights.
#
# The first of the next tables has no checkpoints. The second adds this lesson's micro-batches to LoRA.
#
# </div>
# <div lang="zh">
#
# - **不用主权重的 bf16**，学习率为 0.00001 时会丢掉大部分更新，为 0.0001 时有 28% 的权重不变。bf16 只有 8 位有效二进制数字，变化不到权重的 0.2% 左右，就会被舍入掉。
# - **8 位 Adam** 使更新量改变约 1%。
# - **LoRA** 在 690 万个数中只训练 98,304 个，它们的梯度可以用链式法则由完整的梯度求出。
# - **QLoRA** 把冻结的权重舍入，误差为 9%。在舍入后的权重上，适配器得到的梯度与 LoRA 算出的完全相同。
#
# 下面第一张表不用检查点，第二张表给 LoRA 加上本课的微批次。
#
# </div>

# %% jupyter={"source_hidden": true} slide="result"
rows = []
for name, (make, way) in smaller.items():
    held = estimate(make, make_batch, replace(way, checkpoint="none")).at_peak
    rows.append((name, f"{held['activation'] / 1e6:.1f}"))
table(["variant", "activations without checkpoints (MB)"], rows)

# %% jupyter={"source_hidden": true} slide="result"
halved = smaller["LoRA"][0], make_batch, replace(as_made, micro_batches=2)
lora = estimate(*halved).peak_bytes, run(*halved).meter.peak_bytes
predictions([("LoRA, 2 micro-batches", *lora)], unit="bytes")

# %% [markdown]
# <div lang="en">
#
# In bf16 this decoder's activations take half the bytes. With LoRA and QLoRA they take 24% fewer bytes here, because the inputs of the frozen matrices that have no adapter need not be kept. 8-bit Adam leaves them as they are. With checkpoints and two micro-batches, LoRA needs 46.4 MB and fits, too.
#
# </div>
# <div lang="zh">
#
# 用 bf16 时，这个解码器的激活值字节数减半。用 LoRA 和 QLoRA 时，这里减少 24%，因为没有适配器的冻结矩阵，不必保存它们的输入。8 位 Adam 不改变激活值。加上检查点和两个微批次，LoRA 的峰值是 46.4 MB，也装得下。
#
# </div>

# %% [markdown]
# ## 7.10 In your own code / 实际怎么写
#
# <div lang="en">
#
# This search is also available as a command. `--config` takes the `config.json` of a model, and `--plot out.png` draws how the peak falls:
#
# ```
# python -m course_lib.budget --hidden 256 --layers 8 --heads 8 --vocabulary 2048 --sequence 128 --batch 8 --precision fp32 --device laptop --budget 60MB
# ```
#
# The same techniques in other libraries:
#
# | technique | not run here |
# |---|---|
# | checkpoints, micro-batches | Hugging Face: `TrainingArguments(activation_checkpointing=True, per_device_train_batch_size=1, gradient_accumulation_steps=8)` |
# | updates in backward | torchtune: `optimizer_in_bwd=True`; PyTorch: `parameter.register_post_accumulate_grad_hook(step)` |
# | offloaded state | DeepSpeed: `"offload_optimizer": {"device": "cpu"}`; torchao: `CPUOffloadOptimizer(parameters, torch.optim.AdamW)` |
# | offloaded activations | torchtune: `enable_activation_offloading=True`; PyTorch: `torch.autograd.graph.save_on_cpu()` |
# | loss in chunks | Liger: `LigerFusedLinearCrossEntropyLoss()` |
# | 8-bit Adam, paged | bitsandbytes: `AdamW8bit(parameters)`, `PagedAdamW8bit(parameters)` |
# | LoRA | peft: `get_peft_model(model, LoraConfig(r=8, target_modules=["qkv", "out"]))`; for a language model of transformers `target_modules="all-linear"` |
# | QLoRA | Hugging Face: `BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)`, then LoRA |
#
# </div>
# <div lang="zh">
#
# 本课的搜索也是一条命令。`--config` 接受模型的 `config.json`，`--plot out.png` 把峰值逐步下降的过程画成图：
#
# ```
# python -m course_lib.budget --hidden 256 --layers 8 --heads 8 --vocabulary 2048 --sequence 128 --batch 8 --precision fp32 --device laptop --budget 60MB
# ```
#
# 同样的技术，在其他库里这样写：
#
# | 技术 | 写法（此处未运行） |
# |---|---|
# | 检查点、微批次 | Hugging Face：`TrainingArguments(activation_checkpointing=True, per_device_train_batch_size=1, gradient_accumulation_steps=8)` |
# | 在反向之中更新 | torchtune：`optimizer_in_bwd=True`；PyTorch：`parameter.register_post_accumulate_grad_hook(step)` |
# | 卸载优化器状态 | DeepSpeed：`"offload_optimizer": {"device": "cpu"}`；torchao：`CPUOffloadOptimizer(parameters, torch.optim.AdamW)` |
# | 卸载激活值 | torchtune：`enable_activation_offloading=True`；PyTorch：`torch.autograd.graph.save_on_cpu()` |
# | 损失分成小段 | Liger：`LigerFusedLinearCrossEntropyLoss()` |
# | 8 位 Adam、分页 | bitsandbytes：`AdamW8bit(parameters)`、`PagedAdamW8bit(parameters)` |
# | LoRA | peft：`get_peft_model(model, LoraConfig(r=8, target_modules=["qkv", "out"]))`；transformers 的语言模型可以写 `target_modules="all-linear"` |
# | QLoRA | Hugging Face：`BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)`，再加 LoRA |
#
# </div>

# %% [markdown]
# ## 7.11 Claims and measurements / 说法与实测
#
# <div lang="en">
#
# These four claims are common. The next cells test them on the step of this lesson.
#
# </div>
# <div lang="zh">
#
# 下面是四种常见的说法，用本课的训练步来检验。
#
# </div>

# %% jupyter={"source_hidden": true}
alone = {"micro_batches": {"micro_batches": 8}, "offloaded": offloaded}
alone["both"] = {**checkpoints, **offloaded}
alone = {name: estimate(make_model, make_batch, Recipe(**way)) for name, way in alone.items()}
alone["checkpoints"] = found["+ checkpoints"]

# %% jupyter={"source_hidden": true} slide="result"
figures.what_you_may_have_read(plain, alone, pair[0])

# %% [markdown] slide={"en": "The ledger, complete for one device.", "zh": "账本：一台设备上的各行都齐了。"}
# ## 7.12 The ledger / 账本
#
# <div lang="en">
#
# The ledger shows the same step of the same decoder with each technique alone. The last row has the combination of 7.4.
#
# </div>
# <div lang="zh">
#
# 账本里都是同一个解码器的同一步，每行单独用一种技术，最后一行是 7.4 节的组合。
#
# </div>

# %% slide="result"
ledger(
    "07", "all offloaded, checkpoints, steps in backward", pair[0], moved_bytes=pair[0].moved_bytes
)

# %% [markdown] slide={"en": "First look at what fills the peak, then choose a technique.\n\nHere, a checkpoint on top of offloading raises the peak.", "zh": "先看峰值里什么最多，再选技术。\n\n在这里，卸载之上再加检查点，峰值反而升高。"}
# ## 7.13 Summary / 小结
#
# <div lang="en">
#
# - You can know the peak of most steps to the byte without using memory: run the step twice on symbolic tensors.
# - Look at what fills the peak, then choose a technique. Savings need not add up, because a technique can change what fills the peak.
# - Here, a checkpoint on top of offloading moves fewer bytes and raises the peak, because it restores whole layers. Below 30.3 FLOPs per byte, the recipe without checkpoints is faster.
# - Most techniques have a price: FLOPs, a lower rate, moved bytes, clipping, or the host's time.
# - A search proposes, estimates and sorts. It may skip a recipe only by a rule that cannot discard the best one.
# - LoRA, QLoRA, 8-bit Adam and pure bf16 reduce the 16 bytes per parameter and change the training.
#
# **Next:** [lesson 08](08_beyond_one_gpu.ipynb), beyond one device.
#
# </div>
# <div lang="zh">
#
# - 不占内存，也能精确到字节地知道多数训练步的峰值：在符号张量上把这一步运行两遍。
# - 先看峰值里什么最多，再选技术。节省的内存不一定能相加，因为每用一种技术，峰值里最多的那一类都可能改变。
# - 在这里，卸载之上再加检查点，搬运的字节变少，峰值却升高，因为检查点恢复的是整层的激活值。每字节不到 30.3 FLOPs 时，不用检查点更快。
# - 多数技术都有代价，例如多算 FLOPs、运算速率变低、搬运字节、不能裁剪梯度，或者占用主机的时间。
# - 搜索就是提出配方、估计峰值、再排序。只有在规则保证不会漏掉最好的配方时，才可以跳过。
# - LoRA、QLoRA、8 位 Adam 和纯 bf16 减少的是每个参数 16 字节的那一部分，训练本身也随之改变。
#
# **下一步**：[第 08 课](08_beyond_one_gpu.ipynb)，不止一台设备。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **Sources.** Lessons 01 to 06 give the sources of their techniques. Rates: NVIDIA's datasheets of the H100 and H200 and its Ada whitepaper, dense figures, at 40%, because Grattafiori et al. 2024, *The Llama 3 Herd of Models*, arXiv:2407.21783, reached 38 to 43% on H100s; PCIe 4.0 and 5.0, 16 lanes, one direction, as nvbandwidth measures them; host memory of a desktop with two channels of DDR5-5600 and of a Xeon 8480C with eight of DDR5-4800; device memory as nvidia-smi shows it, and that of the H200 as PyTorch reports it. Rajbhandari et al. 2020, *ZeRO*, arXiv:1910.02054 (16 bytes per parameter); Ren et al. 2021, *ZeRO-Offload*, arXiv:2101.06840 (optimizer on the host); Lv et al. 2023, *LOMO*, arXiv:2306.09782 (updates in backward); Dettmers et al. 2022, arXiv:2110.02861 (8-bit Adam); Dettmers et al. 2023, *QLoRA*, arXiv:2305.14314 (4-bit weights, paged optimizers).
#
# </div>
# <div lang="zh">
#
# **出处。** 各项技术的出处见第 01 到 06 课。速率：NVIDIA 的 H100、H200 数据手册和 Ada 白皮书，取稠密算力的 40%，因为 Grattafiori et al. 2024，*The Llama 3 Herd of Models*，arXiv:2407.21783，在 H100 上达到 38% 到 43%；PCIe 4.0 和 5.0，16 通道，单向，取 nvbandwidth 测得的值；主机内存分别取双通道 DDR5-5600 的台式机和八通道 DDR5-4800 的 Xeon 8480C；设备内存取 nvidia-smi 显示的值，H200 的取 PyTorch 报告的值。Rajbhandari et al. 2020，*ZeRO*，arXiv:1910.02054（每个参数 16 字节）；Ren et al. 2021，*ZeRO-Offload*，arXiv:2101.06840（优化器在主机上）；Lv et al. 2023，*LOMO*，arXiv:2306.09782（在反向之中更新）；Dettmers et al. 2022，arXiv:2110.02861（8 位 Adam）；Dettmers et al. 2023，*QLoRA*，arXiv:2305.14314（4 位权重，分页优化器）。
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
# ## 7.14 The other fields / 其余的字段
#
# <div lang="en">
#
# `Recipe` has more fields:
#
# </div>
# <div lang="zh">
#
# `Recipe` 还有一些字段：
#
# </div>

# %%
figures.recipe_fields(others=True)

# %% [markdown]
# ## 7.15 Ninety-nine million parameters in 550 MB / 把 9900 万参数装进 550 MB
#
# <div lang="en">
#
# A decoder of 99 million parameters trains on two sequences of 384 tokens. Its weights take 396 MB, the baseline 2,793 MB. Does it fit into 550 MB?
#
# </div>
# <div lang="zh">
#
# 一个 9900 万参数的解码器，用两条 384 个 token 的序列训练。它的权重占 396 MB，基线要 2,793 MB。能装进 550 MB 吗？
#
# </div>


# %%
def large_model(layers=19, sequence=384):
    return Decoder(vocabulary=8192, hidden=640, heads=40, layers=layers, sequence=sequence)


def two_sequences():
    return random_tokens(2, 384, 8192)


small = {"attention": "flash", **checkpoints}
ways = [{}, small, {**small, **early}, {**small, **early, **offloaded}]
ways.append({"attention": "flash", **early, **offloaded})
large = [estimate(large_model, two_sequences, Recipe(**way)) for way in ways]
rows = [(str(e.recipe), round(e.peak_bytes / 1e6), round(e.moved_bytes / 1e6)) for e in large]
table(["recipe", "peak (MB)", "moved (MB)"], rows)

# %% [markdown]
# <div lang="en">
#
# The third recipe fits with 521 MB. With offloaded activations the peak is 501 MB, with checkpoints or without, because it is now in the optimizer step. Here, taking the checkpoints out only moves more bytes, 2,859 MB instead of 1,663 MB.
#
# </div>
# <div lang="zh">
#
# 第三个配方装得下，峰值 521 MB。再把激活值卸载，有没有检查点都是 501 MB，因为峰值已经移到优化器更新的时候。所以在这里去掉检查点没有好处，搬运的字节反而从 1,663 MB 增加到 2,859 MB。
#
# </div>

# %% [markdown]
# ## 7.16 Two micro-batches with a higher peak than one / 两个微批次，峰值反而更高
#
# <div lang="en">
#
# The same decoder with six layers has 35 million parameters. It uses flash attention and checkpoints, first with one micro-batch, then with two.
#
# </div>
# <div lang="zh">
#
# 同样的解码器，只取六层，有 3500 万参数，用 flash 注意力和检查点，先用一个微批次，再用两个。
#
# </div>

# %%
cut = [Recipe(**small, micro_batches=m) for m in (1, 2)]
halves = [estimate(lambda: large_model(6), two_sequences, each) for each in cut]
figures.what_fills(["1", "2"], halves)

# %% [markdown]
# <div lang="en">
#
# Both peaks are at the end of backward, where the last gradient is computed, the embedding's 21 MB. With one micro-batch, all other gradients exist, 119 MB. With two micro-batches, all gradients of the first are held (140 MB), and the embedding gradient of the second is added. Micro-batches help only if they take more activations from the peak than they add gradients to it.
#
# </div>
# <div lang="zh">
#
# 两个峰值都出现在反向快结束、正在求最后一个梯度的时候，也就是嵌入的梯度，21 MB。只用一个微批次时，内存里还有其他参数的梯度，共 119 MB。用两个微批次时，第一个微批次的全部梯度都还在，共 140 MB，此外还要加上第二个微批次的嵌入梯度。只有当峰值里减少的激活值多于增加的梯度时，分成微批次才有用。
#
# </div>

# %% [markdown]
# ## 7.17 Seven and seventy billion parameters / 70 亿与 700 亿参数
#
# <div lang="en">
#
# Now train decoders with 6.6 billion and 64.7 billion parameters in bf16 with fp32 master weights, Adam, and one sequence of 4096 tokens. The state stays in host memory, where the host updates it (lesson 04).
#
# **Guess first:** what is the smallest device that trains the smaller model? And the larger one?
#
# </div>
# <div lang="zh">
#
# 换成 66 亿和 647 亿参数的解码器，bf16 加 fp32 主权重，用 Adam，一条 4096 个 token 的序列。优化器状态留在主机内存里，由主机更新（第 04 课）。
#
# **先猜**：训练小模型，至少要多大的设备？大模型呢？
#
# </div>


# %%
def large(hidden, layers):
    heads, rest = hidden // 128, {"vocabulary": 32000, "sequence": 4096}
    return lambda: Decoder(hidden=hidden, heads=heads, layers=layers, **rest)


def one_sequence():
    return random_tokens(1, 4096, 32000)


all_in = Recipe(precision="bf16", **small, **early)
ways = {"flash, checkpoints": Recipe(precision="bf16", **small), "+ steps in backward": all_in}
giants = {
    ("7 B", name): estimate(large(4096, 32), one_sequence, way, tier="host")
    for name, way in ways.items()
}
giants["70 B", "+ steps in backward"] = estimate(large(8192, 80), one_sequence, all_in, tier="host")

# %% jupyter={"source_hidden": true}
devices = {"24 GB": "RTX 4090", "80 GB": "H100", "141 GB": "H200"}  # with the bytes that they have
rows = []
for (size, name), e in giants.items():
    fitting = [device for device in devices.values() if e.peak_bytes <= RATES[device].memory_bytes]
    marks = ["✓" if device in fitting else "–" for device in devices.values()]
    price = f"{e.moved_bytes / 1e9:.0f}", f"{RATES[fitting[0]].seconds(e):.2f}, {fitting[0]}"
    rows.append((size, name, f"{e.peak_bytes / 1e9:.1f}", *marks, *price))
table(["model", "recipe", "peak (GB)", *devices, "GB moved", "time on the smallest (s)"], rows)

# %% [markdown]
# <div lang="en">
#
# The smaller model trains on a device of 24 GB, with 79 GB of state on the host and 26 GB moved per step. The larger one trains on a device of 141 GB: its peak is 137 GB, with 777 GB of state on the host.
#
# A step that fits is not always sensible. On the H200, two thirds of the large model's step are copies and the host's update. The 137 GB also leave only 9% of the device's 150.1 GB for CUDA's context, workspace and fragmentation. The times assume 40% of the datasheet's FLOPs per second and one host processor.
#
# </div>
# <div lang="zh">
#
# 小模型能在 24 GB 的设备上训练，主机上有 79 GB 的状态，每步搬运 26 GB。大模型能在 141 GB 的设备上训练，峰值 137 GB，另有 777 GB 的状态放在主机内存里。
#
# 装得下，不等于值得这样训练。在 H200 上，大模型的一步有三分之二的时间花在拷贝和主机的更新上。设备共有 150.1 GB，用掉 137 GB，只剩 9% 留给 CUDA 上下文、工作区和碎片。用时假定算力为数据手册的 40%，主机只用一个处理器。
#
# </div>

# %%
from course_lib.lessons.lesson_07 import claims
from course_lib.teaching import text


def flops(layers, count, length, attention):
    def batch():
        return random_tokens(count, length, 8192)

    return estimate(lambda: large_model(layers, length), batch, Recipe(attention=attention)).flops


ratios = [flops(*s, "flash") / flops(*s, "standard") for s in ((6, 2, 384), (2, 1, 4096))]
seven = giants["7 B", "+ steps in backward"]
peak, moved = f"{seven.peak_bytes / 1e9:.1f} GB", f"{seven.moved_bytes / 1e9:.0f} GB"
claims.older_claims(
    f"{halves[0].peak_bytes / 1e6:,.0f} → {halves[1].peak_bytes / 1e6:,.0f} MB",
    text("{peak}, {moved} moved", peak=peak, moved=moved),
    f"{ratios[0]:.3f} / {ratios[1]:.3f}",
)

# %% [markdown]
# ## 7.18 On a GPU / 在 GPU 上
#
# <div lang="en">
#
# This cell runs three recipes of a decoder with 1.28 billion parameters on your GPU, or shows the figures recorded on an H100 and an H200. On both, the three estimates, 45.3, 21.1 and 5.0 GB, equal the peaks that the meter measured, to the byte. The allocator's peak is 68 to 69 MB higher, because cuBLAS keeps workspaces of 65 MiB.
#
# </div>
# <div lang="zh">
#
# 有 GPU 时，下面的单元格用一个 12.8 亿参数的解码器现场运行三个配方；没有 GPU，就显示在 H100 和 H200 上测得的数据。三个估计值是 45.3、21.1 和 5.0 GB，在两块卡上都与计量器逐字节相等。分配器的峰值要高 68 到 69 MB，因为 cuBLAS 一直占着 65 MiB 的工作区。
#
# </div>

# %% tags=["nbval-ignore-output", "shows-device"]
from course_lib.lessons import on_gpu

on_gpu("07")
