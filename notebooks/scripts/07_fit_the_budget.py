# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] slide={"en": "One step needs 277.7 MB. You have 60 MB, and weights with gradients alone take 55 MB.\n\nWhich techniques do you combine?", "zh": "一步要 277.7 MB。你只有 60 MB，光是权重和梯度就占 55 MB。\n\n要把哪几种技术合起来用？"}
# # 7 Given a byte budget, which of all these, and how much of each? (`fit`) / 给定字节预算，该用哪几种技术，各用到什么程度？（`fit`）
#
# <div lang="en">
#
# The training step of this course, one Adam step of a small decoder, needs 277.7 MB. You have 60 MB.
#
# The weights and the gradients alone take 55 MB. In the course's ledger, a table with one technique per row, no peak is below 124 MB. So you have to combine several techniques. In this lesson you add six techniques, one after another. Then you take one technique **out** again and look at the peak.
#
# </div>
# <div lang="zh">
#
# 本课程的训练步，也就是一个小解码器的一步 Adam，需要 277.7 MB 内存，而你只有 60 MB。
#
# 光是权重和梯度就要 55 MB。本课程的账本里，每一行只用一种技术，峰值都不低于 124 MB，所以必须把几种技术合起来用。该用哪几种？在这一课里，你要逐一加上六种技术，然后再**去掉**其中一种，看看峰值会怎样变化。
#
# </div>

# %%
from course_lib.teaching import language

language()

# %% [markdown]
# <div lang="en">
#
# **Goals** (117 minutes, in two sittings):
#
# - Estimate a step's peak memory without allocating memory.
# - Choose a technique by what fills the peak, and explain why the savings of two techniques need not add up.
# - Compute on which machines one combination of techniques is faster than another.
# - State which combinations of techniques a search can skip.
# - Write a LoRA layer, and state what LoRA saves.
#
# **What to know before**: lessons 01 to 06.
#
# </div>
# <div lang="zh">
#
# **目标**（共 117 分钟，分两次学）
#
# - 写一个函数，不实际分配内存就能估计峰值。
# - 先看峰值里什么最多，再选技术，并说明两种技术节省的内存为什么不一定能相加。
# - 给定两种技术组合，算出它们各在什么样的机器上更快。
# - 说出搜索可以跳过哪些组合。
# - 写出 LoRA 层，并说明 LoRA 省下什么。
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
from course_lib.teaching import predictions, table, timelines

BUDGET = 60_000_000  # bytes


def make_model():
    return Decoder(vocabulary=2048, hidden=256, heads=8, layers=8, sequence=128)


def make_batch():
    return random_tokens(8, 128, 2048)  # (8, 129): 128 tokens, and the one that follows each


# %% [markdown] slide={"en": "The baseline runs with a budget of 60 MB.\n\n**Guess first.** Where does it stop: forward, backward, or optimizer? In which layer?", "zh": "用 60 MB 的预算运行基线。\n\n**先猜**：这一步会停在前向、反向，还是优化器更新？在第几层？"}
# ## 7.1 Where the baseline stops / 基线停在哪里
#
# <div lang="en">
#
# A memory meter with `budget_bytes` stops the step at the operator that exceeds the budget. Run the first step of the baseline (no technique) under such a meter. Before this step, Adam has no state.
#
# **Guess first:** where does the step stop? In the forward pass, the backward pass, or the optimizer? In which of the eight layers?
#
# </div>
# <div lang="zh">
#
# 给计量器设置 `budget_bytes` 以后，哪个算子使内存超出预算，训练就停在哪个算子。下面用这样的计量器来运行基线（不用任何技术）的第一步。第一步开始时，Adam 还没有状态。
#
# **先猜**：这一步会停在哪里？是前向、反向，还是优化器更新？在八层里的哪一层？
#
# </div>

# %% tags=["guess"] slide="result"
my_phase, my_layer = None, None  # such as "forward", 8

model, adam = build(make_model, Recipe())
started = []  # one entry per layer whose forward pass has begun
for layer in model.layers:
    layer.register_forward_pre_hook(lambda *_: started.append(1))
try:
    with MemoryMeter(model, adam, budget_bytes=BUDGET) as meter:
        train_step(model, adam, make_batch(), Recipe())
except MemoryBudgetExceeded as stopped:
    print(f"{meter.operator_count} operators:\n{stopped}")

# %%
rows = [("phase", my_phase, meter.phases()[-1]), ("layer", my_layer, len(started))]
table(["", "your guess", "measured"], [(name, guess or "–", each) for name, guess, each in rows])

# %%
parameters = sum(parameter.numel() for parameter in model.parameters())
rows = [(parameters, round(12 * parameters / 1e6, 1))]
table(["parameters", "from the second step on (MB)"], rows)

# %% [markdown]
# <div lang="en">
#
# The step stops in the forward pass, in the second of eight layers, where queries are multiplied by keys. The weights take 27.5 MB, and the first layer has already saved 21 MB for backward. The model is unharmed, because no gradient exists yet and no weight has changed.
#
# The second step needs even more memory. Before its first operator runs, weights and Adam's state already take 12 bytes per parameter, 82.5 MB in total. Activation checkpointing cannot reduce these bytes.
#
# </div>
# <div lang="zh">
#
# 这一步停在前向，当时正在八层中的第二层计算查询与键的乘积。权重占 27.5 MB，第一层已经为反向保存了 21 MB。模型没有受损，因为此时还没有梯度，权重也没有改动。
#
# 从第二步起，需要的内存更多。每一步还没有运行任何算子时，权重和 Adam 的状态就已经占着内存，每个参数 12 字节，共 82.5 MB。激活检查点再多，也减少不了这一部分。
#
# </div>

# %% [markdown] slide={"en": "A device of 60 MB cannot run the step. How do you find out how much memory the step needs?\n\n**Write it** with symbolic tensors, two steps, and a meter.", "zh": "60 MB 的设备跑不完这一步，怎样知道这一步需要多少内存？\n\n**自己写**：符号张量，跑两步，用计量器测量。"}
# ## 7.2 Run the step without memory / 不占内存地跑一步
#
# <div lang="en">
#
# You want to know the peak memory of a step that does not fit into 60 MB. Symbolic tensors have shapes and storages but no memory (lesson 01), and the meter counts the bytes that real tensors would take.
#
# **Exercise 1.** Write `peak_of_step(make_model, make_batch)`. This function runs two Adam steps of the baseline on symbolic tensors and returns the peak of the **second** step, in bytes. Use `torch.optim.Adam(parameters, foreach=False)`. The model has a method `loss(batch)`.
#
# </div>
# <div lang="zh">
#
# 60 MB 的设备跑不完基线的一步，怎样知道这一步需要多少内存？符号张量有形状、有存储区，但不占内存（第 01 课），而计量器能统计出真实张量要占的字节数。
#
# **练习 1。** 写出 `peak_of_step(make_model, make_batch)`，用符号张量求出基线（优化器为 Adam）**第二步**的峰值，返回字节数。优化器用 `torch.optim.Adam(parameters, foreach=False)`，模型有 `loss(batch)` 方法。
#
# </div>


# %% minutes=12
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
            for _ in range(2):  # Adam creates its state in the first step
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
# The library's `estimate` finds the peak memory of a step for any **recipe**. A `Recipe` states which techniques a step uses, and `Recipe()` is the baseline. This lesson changes the following fields of a recipe:
#
# </div>
# <div lang="zh">
#
# 库里的 `estimate` 用同样的办法估计任何**配方**的内存峰值。配方（`Recipe`）是一个对象，写明训练步用了哪些技术，`Recipe()` 就是基线。本课会改动配方的下面这些字段：
#
# </div>

# %%
figures.recipe_fields()

# %%
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
# Your estimate may be 8,256 bytes higher than the library's. These bytes are the batch, 8 × 129 numbers of 8 bytes. The meter counts the batch if you create it after starting the meter. The library creates the batch before starting its meter.
#
# </div>
# <div lang="zh">
#
# 你的估计可能比课程库多出 8,256 字节，这就是批次的大小，共 8 × 129 个数，每个 8 字节。如果你先打开计量器，后创建批次，计量器就会把批次也统计进去。课程库是先创建批次，再打开计量器。
#
# </div>

# %% [markdown] slide={"en": "Before you compare memory: do all recipes train the same model?", "zh": "比较内存之前先问：各个配方训练出的模型一样吗？"}
# ## 7.3 Do all recipes train the same? / 各个配方训练的结果一样吗？
#
# <div lang="en">
#
# Comparing the memory of recipes makes sense only if their results are equal. With each recipe, the next cell trains a decoder of two layers for two Adam steps, and compares the weights with the baseline's. The table gives the difference of the weights, relative to the change that the baseline makes.
#
# From here on, three combinations of recipe options have names: `checkpoints`, `offloaded` and `early`.
#
# </div>
# <div lang="zh">
#
# 训练的结果相同，比较内存才有意义。下面用一个两层的解码器，按每个配方做两步 Adam，再把得到的权重与基线的权重比较。表中列出两者之差占基线两步更新量的比例。
#
# 从这里起，三组常用的配方选项各有一个名字，即 `checkpoints`、`offloaded` 和 `early`。
#
# </div>


# %%
checkpoints = {"checkpoint": "layers"}  # one checkpoint per layer
offloaded = {"offload_activations": True}  # saved tensors go to the lower tier
early = {"offload_optimizer": 1.0, "in_backward": True}  # offloaded state, updates in backward


# %% jupyter={"source_hidden": true}
def weights(recipe, steps=2):
    sizes = {"vocabulary": 256, "hidden": 256, "heads": 8, "layers": 2, "sequence": 128}
    model, optimizer = build(lambda: Decoder(**sizes), recipe)
    start = torch.cat([p.detach().flatten().double() for p in model.parameters()])
    for _ in range(steps):
        train_step(model, optimizer, random_tokens(8, 128, 256), recipe)
    return torch.cat([p.detach().flatten().double() for p in model.parameters()]), start


expected, start = weights(Recipe())


def difference(recipe):
    error = ((weights(recipe)[0] - expected).norm() / (expected - start).norm()).item()
    return "0" if error == 0 else "< 0.0005" if error < 5e-4 else "✗"


# %% jupyter={"source_hidden": true} slide="result"
tried = [checkpoints, {"micro_batches": 8}, {"attention": "flash"}, {"head_chunk": 128}]
tried += [offloaded, early, {**checkpoints, **offloaded, **early}]
rows = [(str(Recipe(**options)), difference(Recipe(**options))) for options in tried]
table(["recipe", "difference of the weights"], rows)

# %% [markdown]
# <div lang="en">
#
# Recomputation and offloading do not change a single bit of the weights. Micro-batches, flash attention and computing the output head in chunks change the order of additions. Here, this changes the update by less than 0.05%. So all recipes in the table compute the same update up to rounding, and we can compare their memory.
#
# </div>
# <div lang="zh">
#
# 用重计算和卸载时，权重连一个比特都不变。分微批次、用 flash 注意力、把输出头分成小段，都会改变求和的顺序，但在这里，更新量的变化小于 0.05%。因此可以认为，除了舍入误差，表中各个配方算出的更新都相同，它们的内存也就可以放在一起比较。
#
# </div>

# %% [markdown] slide={"en": "277.7 MB. Add checkpoints; eight micro-batches; offloaded state; small pages.\n\n**Guess first.** What is the peak after each?", "zh": "从 277.7 MB 开始，依次加上检查点、八个微批次、状态卸载、小页。\n\n**先猜**：每加一种之后，峰值各是多少？"}
# ## 7.4 One technique after another / 逐一加上各种技术
#
# <div lang="en">
#
# Now add four techniques, one after another. Put a checkpoint around every layer. Use eight micro-batches. Move Adam's state to the lower tier (host memory or disk). Last, update this state in pages (parts) of 1 MiB instead of 16 MiB.
#
# **Guess first:** the baseline's peak is 277.7 MB. What is the peak after each technique? Write down four numbers.
#
# </div>
# <div lang="zh">
#
# 现在逐一加上四种技术。先给每层加一个检查点，再把批次分成八个微批次，然后把 Adam 的状态放到下一级存储（主机内存或磁盘），最后把状态的页（一次更新的那一部分）从 16 MiB 改成 1 MiB。
#
# **先猜**：基线的峰值是 277.7 MB，每加上一种技术之后，峰值各是多少？写下四个数。
#
# </div>

# %% tags=["guess"] slide="result"
my_guesses = [None, None, None, None]  # in MB
steps = {"plain": {}, "+ checkpoints": checkpoints}
steps["+ 8 micro-batches"] = {**checkpoints, "micro_batches": 8}
steps["+ state offloaded"] = {**steps["+ 8 micro-batches"], "offload_optimizer": 1.0}
steps["+ small pages"] = {**steps["+ state offloaded"], "page_bytes": 1 << 20}
found = {name: estimate(make_model, make_batch, Recipe(**way)) for name, way in steps.items()}
figures.what_fills(found, found.values(), guesses=[277.7, *my_guesses])

# %% [markdown]
# <div lang="en">
#
# How much a technique saves depends on what fills the peak **when the technique is added**:
#
# - **Checkpoints** save 144 MB, because nearly all activations are no longer kept.
# - **Eight micro-batches** save another 17 MB. The remaining peak is mostly weights, gradients and optimizer state. These take 16 bytes per parameter, or 110 MB, and micro-batches do not reduce them.
# - **Offloading the optimizer state** saves 14 MB, although the state takes 55 MB. The peak has moved into the optimizer step, where 46.6 MB of the state are in memory again. These are three pages: one is being read, one updated, and one written back. Three full pages of 16 MiB (16.8 MB each) would take 50.3 MB. The pages are not quite full, because the state of a parameter is never split over two pages.
# - **Small pages** save 40 MB. Now only the state of two parameters, the embedding and the position table, is in memory at the peak. This state takes 4.5 MB.
#
# The peak is now 63.7 MB, 3.7 MB above the budget.
#
# </div>
# <div lang="zh">
#
# 一种技术能省下多少内存，要看**加上它的时候**峰值里什么最多。
#
# - **检查点**省下 144 MB，因为几乎所有的激活值都不再保存。
# - **八个微批次**又省下 17 MB。剩下的主要是权重、梯度和优化器状态，每个参数 16 字节，共 110 MB，微批次减少不了这些。
# - **卸载优化器状态**只省下 14 MB，尽管状态本身占 55 MB。这是因为峰值移到了优化器更新的时候，此时有 46.6 MB 的状态又回到了内存里。这是三页的大小，一页正在读入，一页正在更新，一页正在写出。一页至多 16 MiB（16.8 MB），三页装满就是 50.3 MB。这三页没有装满，因为每个参数的状态都必须完整地放在同一页里。
# - **小页**省下 40 MB。现在达到峰值时，只有嵌入和位置表这两个参数的状态还在内存里，共 4.5 MB。
#
# 现在峰值是 63.7 MB，比预算多 3.7 MB。
#
# </div>

# %% [markdown] slide={"en": "63.7 MB, of which weights and gradients take 55 MB.\n\n**Guess first.** Update inside backward, without micro-batches: is the peak 36 MB?", "zh": "还有 63.7 MB，其中权重和梯度占 55 MB。\n\n**先猜**：在反向之中更新，不用微批次，峰值会是 36 MB 吗？"}
# <div lang="en">
#
# Weights and gradients take 55 MB of the peak of 63.7 MB, and the weights must stay. So the step must never hold all gradients at once. The optimizer can update each parameter **inside** the backward pass (lesson 05) and then release its gradient. Micro-batches are then impossible, because their gradients must be added up before the update. **Guess first:** without the 27.5 MB of gradients, is the peak 36 MB?
#
# </div>
# <div lang="zh">
#
# 这 63.7 MB 中，权重和梯度占 55 MB，权重又必须留下，所以只能设法不让全部梯度同时存在。优化器可以在反向**之中**逐个更新参数（第 05 课），每更新一个参数，就释放这个参数的梯度。这样就不能再用微批次，因为各个微批次的梯度要先加起来，才能更新权重。**先猜**：省掉 27.5 MB 的梯度之后，峰值会是 36 MB 吗？
#
# </div>

# %% tags=["guess"] slide="result"
my_guess = None  # in MB
more = {"in backward, whole batch": {**checkpoints, **early}}
more["+ activations offloaded"] = {**checkpoints, **early, **offloaded}
found |= {name: estimate(make_model, make_batch, Recipe(**way)) for name, way in more.items()}
figures.what_fills(more, [found[name] for name in more], guesses=[my_guess])

# %% [markdown]
# <div lang="en">
#
# The peak is 64.2 MB, no lower than before, but now other tensors fill the peak. The gradients have been released. Without micro-batches, however, the recomputation restores the activations of a whole layer for eight sequences (21 MB). The checkpoints also keep the inputs of 7 layers. The recipe in the second row also offloads these inputs. Its peak of 57.9 MB fits into the budget.
#
# The next cell runs every recipe. A meter stops the last recipe if it exceeds 60 MB.
#
# </div>
# <div lang="zh">
#
# 峰值是 64.2 MB，并没有降低，但峰值里最多的东西变了。梯度已经释放，但不用微批次时，重计算会恢复八条序列的一整层激活值，共 21 MB。此外，检查点还保存着 7 层的输入。表中第二行的配方把这些输入也卸载到下一级存储，峰值降到 57.9 MB，装得进 60 MB 的预算。
#
# 下面把每个配方都实际运行一遍。最后一个配方的内存若超过 60 MB，计量器会让训练停下。
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
# The step fits now. Take the **checkpoints out**. Then every large activation goes to the lower tier (host memory or disk) as soon as it is computed, and nothing is computed twice.
#
# **Guess first:** without checkpoints, what is the peak?
#
# </div>
# <div lang="zh">
#
# 训练步已经装得进预算了。现在把**检查点去掉**，每个较大的激活值（为反向保存的张量）一产生就移到下一级存储（主机内存或磁盘），不再有任何重计算。
#
# **先猜**：没有检查点，峰值是多少？
#
# </div>

# %% tags=["guess"]
my_peak = None  # in MB
without = run(make_model, make_batch, Recipe(**early, **offloaded))

# %% jupyter={"source_hidden": true} slide="result"
meters = {"with checkpoints": stepped.meter, "without checkpoints": without.meter}
timelines(
    meters, title="The peak is lower without checkpoints, because only single tensors come back"
)

# %%
predictions([("without checkpoints", my_peak and my_peak * 1e6, without.meter.peak_bytes)])

# %% [markdown] slide={"en": "Lower, and nothing is recomputed, but 447.7 MB move instead of 128.9 MB.\n\n**Write it**: at how many FLOPs per byte are both equally fast?", "zh": "峰值更低，也没有重计算，但要搬运 447.7 MB，而不是 128.9 MB。\n\n**自己写**：每字节多少 FLOPs 时，两者一样快？"}
# <div lang="en">
#
# The peak is 53.9 MB, which is 4 MB lower than with checkpoints. A checkpoint restores the activations of its whole layer, 21 MB, before the first gradient of that layer is computed. Without checkpoints, offloading brings back one tensor at a time, when backward needs it. So adding checkpoints to offloading *raises* the peak here. (Without checkpoints, the peak is at the start of the backward pass, where the logits are processed.)
#
# What is the price? Without checkpoints nothing is recomputed, but the step moves 447.7 MB instead of 128.9 MB. Which recipe is faster?
#
# **Exercise 2.** Write `break_even(first, second)`. On a machine where both recipes take equally long, how many FLOPs are computed in the time needed to copy one byte? Each recipe has `flops` and `moved_bytes` (the sum of both directions). Assume that copies and computation do not overlap.
#
# </div>
# <div lang="zh">
#
# 峰值是 53.9 MB，比刚才低 4 MB。在求出某一层的第一个梯度之前，检查点要先把这一整层的激活值都恢复出来，共 21 MB。只用卸载时，反向需要哪个张量，就只取回哪个张量。因此在这里，在卸载的基础上再加检查点，峰值反而**升高**。（去掉检查点之后，峰值出现在反向刚开始、处理 logits 的时候。）
#
# 代价是什么？去掉检查点就没有重计算，但搬运的字节从 128.9 MB 增加到 447.7 MB。哪个配方更快？
#
# **练习 2。** 写出 `break_even(first, second)`。如果两个配方在某台机器上用时相同，这台机器在拷贝一个字节的时间里能做多少 FLOPs？每个配方有 `flops` 和 `moved_bytes`（往返合计），假设拷贝与计算不重叠。
#
# </div>


# %% minutes=8
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

# %%
both = ({**checkpoints, **early, **offloaded}, {**early, **offloaded})
pair = [estimate(make_model, make_batch, Recipe(**way)) for way in both]
table(["equally fast at (FLOPs per byte)"], [(round(break_even(*pair) or 0, 1),)])

# %% jupyter={"source_hidden": true} slide="result"
figures.draw_break_even(*pair, names=["with checkpoints", "without checkpoints"])

# %% [markdown]
# <div lang="en">
#
# As in lesson 04, there is a threshold: at 30.3 FLOPs per copied byte, both recipes take equally long. The `laptop` of `RATES` has 100 GFLOP/s and a disk of 1 GB/s, so it computes 100 FLOPs per copied byte. On this machine, the recipe with checkpoints is faster. On a machine with a slow processor and a fast disk, at 20 FLOPs per copied byte, the recipe without checkpoints is faster. So "Which recipe is best?" has an answer only for a given machine.
#
# </div>
# <div lang="zh">
#
# 与第 04 课一样，这里也有一个阈值。如果机器在拷贝一个字节的时间里能做 30.3 FLOPs，两个配方就一样快。`RATES` 里的 `laptop` 算力是 100 GFLOP/s，磁盘速率是 1 GB/s，拷贝一个字节的时间里能做 100 FLOPs，所以在这样的机器上，用检查点更快。如果换成处理器慢、磁盘快的机器，这段时间里只能做 20 FLOPs，那么不用检查点更快。不说明是什么机器，“哪个配方最好”就没有答案。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **End of the first sitting** (58 minutes). Your recipe fits into 60 MB, and you can compute which of two recipes is faster on a machine. In the second sitting, a search looks for recipes, and you find two more recipes yourself. Then you write a LoRA layer, because many people start with LoRA.
#
# </div>
# <div lang="zh">
#
# **第一次学习到此结束**（58 分钟）。你找到的配方已经装进 60 MB，你也会算两个配方各在什么样的机器上更快。第二次学习时，先用搜索来找配方，再由你自己找出两个配方，最后写出 LoRA 层，因为很多人省内存是从 LoRA 开始的。
#
# </div>

# %% [markdown]
# ## 7.6 The price of each technique / 每种技术的代价
#
# <div lang="en">
#
# FLOPs and moved bytes are exact. The time is only an estimate, because it depends on the machine's rates.
#
# </div>
# <div lang="zh">
#
# FLOPs 和搬运的字节数是精确统计出来的。用时还取决于机器的速率，所以只是估计值。
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
# The table does not show the following:
#
# - **Updates in backward** happen before the norm of all gradients is known. They cannot be combined with clipping by that norm, a loss scaler that skips steps, or micro-batches.
# - **Offloaded optimizer state**: if the lower tier is host memory, the host's processor does the update. It reads and writes 28 bytes per parameter in total. For all devices in `RATES` except `laptop`, estimated times include this update.
# - **Micro-batches**: a matrix product over one sequence may run at a lower rate than over eight sequences. The table assumes equal rates.
# - **Flash attention** is not used in these recipes. At 128 tokens it saves only 25 MB of 278 MB without checkpoints, and 3 MB with checkpoints. At 4096 tokens it is the first technique to use (lesson 06).
#
# </div>
# <div lang="zh">
#
# 还有几点，表里看不到：
#
# - **在反向之中更新**时，还不知道全部梯度的范数，所以不能按这个范数裁剪，也不能让损失缩放器跳过某一步。此外，这种技术不能与微批次合用。
# - **卸载优化器状态**：如果下一级存储是主机内存，更新就由主机的处理器来做，每个参数共要读写 28 字节。除 `laptop` 以外，按 `RATES` 里的设备估计出的用时都已经把这一项计算在内。
# - **微批次**：只算一条序列时，矩阵乘法的速率可能比八条序列一起算时低。表里假定两者的速率相同。
# - **flash 注意力**：表中各个配方都没有采用。序列长 128 个 token 时，单用 flash 注意力只能从 278 MB 里省下 25 MB，加在检查点之上则只省 3 MB。序列长 4096 个 token 时，flash 注意力就是首选的技术（第 06 课）。
#
# </div>

# %% [markdown] slide={"en": "A search proposes recipes, estimates them, and sorts those that fit.\n\n**Guess first.** Does it find your recipe, or a faster one?", "zh": "搜索：提出配方，估计峰值，把装得下的按用时排序。\n\n**先猜**：搜索找到的是你的配方，还是更快的配方？"}
# ## 7.7 Let a search find it / 用搜索来找
#
# <div lang="en">
#
# A search proposes recipes, estimates them, and lists those that fit, fastest first. Two lines of code filter and sort the recipes of this lesson:
#
# </div>
# <div lang="zh">
#
# 用搜索找配方分三步，先提出配方，再逐个估计内存和用时，最后把装得下的配方按用时排序。下面用两行代码筛选并排序本课试过的配方：
#
# </div>

# %%
fitting = [each for each in found.values() if each.peak_bytes <= BUDGET]
ranked = sorted((round(laptop.seconds(each), 3), str(each.recipe)) for each in fitting)
table(["time on the laptop (s)", "recipe"], ranked)

# %% slide="result"
searched = fit(make_model, make_batch, BUDGET, progress=False)
searched

# %% [markdown]
# <div lang="en">
#
# The last recipe of section 7.4 comes first in this list, with an estimated 0.676 s on the laptop. The recipe without checkpoints has the lowest peak, but comes last. `fit` has estimated 123 recipes. It skips other recipes by three rules:
#
# - Skip a recipe if its tensors already exceed the budget before the first operator or in the optimizer step alone.
# - If a recipe fits, skip recipes that add another technique to it, because these recipes cost more. There are two exceptions. With offloaded activations, a checkpoint can save time because fewer bytes are moved. Adding flash attention can reduce the FLOPs (7.18).
# - If a recipe with only one checkpoint, around the first layer, is slower than the best recipe so far, skip recipes with more checkpoints.
#
# </div>
# <div lang="zh">
#
# 第一行就是 7.4 节的最后一个配方，按笔记本电脑的速率估计，用时 0.676 秒。不用检查点的配方峰值最低，却排在最后。`fit` 估计了 123 个配方，其余的配方按三条规则跳过：
#
# - 如果第一个算子运行之前就有的张量已经超出预算，或者光是优化器更新时要用的张量就超出预算，就跳过这个配方。
# - 如果一个配方装得下，就跳过在它的基础上再加技术的配方，因为后者代价更大。例外有两个。一是激活值已经卸载时，再加检查点可以少搬运一些字节，反而可能更快。二是加上 flash 注意力以后，FLOPs 可能更少（7.18 节）。
# - 如果只给第一层加检查点就已经比目前最好的配方慢，就跳过给更多层加检查点的配方。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# `fit` finds the number of micro-batches by bisection. On twelve small models, `tests/tools/brute_force_fit.py` compares the result of `fit` with the best in a grid of recipes. All 441 results agreed.
#
# Three other tools choose among fewer options, each with an exact algorithm. For modules called in order, rotor finds the best checkpoints by dynamic programming (lesson 03). Alpa divides operators among devices by integer linear programming, and layers among pipeline stages by dynamic programming. PyTorch's compiler uses a minimum cut of the graph to decide which tensors to save for backward.
#
# If no recipe fits, `fit` raises an error that states the lowest peak that it found:
#
# </div>
# <div lang="zh">
#
# `fit` 用二分法求微批次的个数。`tests/tools/brute_force_fit.py` 在十二个小模型上，把 `fit` 的结果与网格里最好的配方作了比较，441 次搜索全部一致。
#
# 另外三种工具的搜索范围较小，用的是精确算法。rotor 用动态规划，在由若干级组成的链上找出检查点的最佳位置（第 03 课）。Alpa 用整数线性规划把算子分到各台设备，再用动态规划把各层分成流水线的级。PyTorch 的编译器求计算图的最小割，由此决定为反向保存哪些张量。
#
# 如果没有一个配方装得下，`fit` 就会报错，并写出找到的最低峰值：
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
# Now change the budget and the machine with the sliders. The estimates of 64 recipes are stored. Which recipe is the fastest of those that fit?
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
# ## 7.8 Two budgets / 两个预算
#
# <div lang="en">
#
# Find a recipe for each of two budgets. The check estimates your recipe. If the recipe does not fit, the check shows what fills the peak. Section 7.15 has a third budget, 50 MB.
#
# **Exercise 3.** Find a recipe that needs at most 160 MB, computes no more FLOPs than the baseline, and moves no bytes.
#
# </div>
# <div lang="zh">
#
# 下面请为两个预算各找一个配方。检查程序会估计你的配方要多少内存。如果装不下，还会写出峰值里什么最多。第三个预算是 50 MB（7.15 节）。
#
# **练习 3。** 找出一个配方，峰值不超过 160 MB，FLOPs 不超过基线，也不搬运任何字节。
#
# </div>

# %% minutes=7
recipe = None  # Recipe(...)
exercises.check_same_flops(recipe)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
exercises.check_same_flops(Recipe(micro_batches=4))
### END SOLUTION

# %% [markdown] slide={"en": "120 MB, nothing moved, clipping kept, at most 1.19 times the FLOPs.\n\nWhich layer's checkpoint is wasted?", "zh": "120 MB，不搬运数据，保留裁剪，FLOPs 至多 1.19 倍。\n\n哪一层的检查点是多余的？"}
# <div lang="en">
#
# **Exercise 4.** Find a recipe that needs at most 120 MB and at most 1.19 times the baseline's FLOPs, and moves no bytes. The training clips by the norm of all gradients, so all gradients must exist before the update.
#
# </div>
# <div lang="zh">
#
# **练习 4。** 找出一个配方，峰值不超过 120 MB，不搬运任何字节，FLOPs 至多是基线的 1.19 倍。训练要按全部梯度的范数裁剪，所以必须先求出全部梯度，才能更新。
#
# </div>

# %% minutes=10
recipe = None  # Recipe(...)
exercises.check_keeps_clipping(recipe)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
exercises.check_keeps_clipping(Recipe(checkpoint="layers", first_blocks=7, micro_batches=8))
### END SOLUTION

# %% [markdown] slide={"en": "LoRA trains 98,304 of 6.9 million numbers.\n\n**Write it**: the output of a layer with an adapter, without a tensor as large as W.", "zh": "LoRA 在 690 万个数中只训练 98,304 个。\n\n**自己写**：带适配器的层的输出，不产生与 W 一样大的张量。"}
# ## 7.9 Where people start: LoRA and QLoRA / 大家从这里开始：LoRA 与 QLoRA
#
# <div lang="en">
#
# Many people start with two other methods: training fewer numbers, or storing fewer bits per number (7.10). Both methods change the training, so `fit` does not propose them. The gradient of every trained number must still be right.
#
# - **LoRA** (lesson 01) freezes a matrix $W$ and trains an adapter next to it: two thin matrices, `down` (rank × inputs) and `up` (outputs × rank). A frozen weight has no gradient and no optimizer state.
# - **QLoRA** is LoRA with each frozen weight stored as a 4-bit index of one of 16 levels. Every 64 weights share an fp32 scale. A layer restores its weights only while it uses them.
#
# **Exercise 5.** Write `adapted(frozen, x, down, up)`. It returns the output of the layer `frozen` for `x`, plus `x` times the transpose of `down` times the transpose of `up`. Create no tensor as large as $W$. The gradient must also reach `x`, because adapters of earlier layers need this gradient.
#
# </div>
# <div lang="zh">
#
# 很多人省内存是从另外两种办法开始的，要么少训练一些数，要么每个数少存几位（7.10 节）。这两种办法都改变了训练，所以 `fit` 不会提出它们。但有一点不能变，凡是要训练的数，梯度都必须正确。
#
# - **LoRA**（第 01 课）冻结矩阵 $W$，只训练加在 $W$ 旁边的适配器，也就是两个很窄的矩阵：`down`（秩 × 输入）和 `up`（输出 × 秩）。冻结的权重没有梯度，也没有优化器状态。
# - **QLoRA** 还把每个冻结的权重存成 4 位的编号，对应 16 个固定数值中的一个，每 64 个权重共用一个 fp32 的缩放系数。哪一层要用到权重，就临时还原那一层的权重。
#
# **练习 5。** 写出 `adapted(frozen, x, down, up)`，返回两项之和，一项是 `frozen` 这一层的输出，另一项是 `x` 先乘 `down` 的转置，再乘 `up` 的转置。计算时不能产生与 $W$ 一样大的张量。梯度还必须传到 `x`，因为前面各层的适配器要用到这个梯度。
#
# </div>


# %% minutes=7
def adapted(frozen, x, down, up):
    return None


exercises.check_adapted_layer(adapted)

# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not exercises.check_adapted_layer.accepted:

    def adapted(frozen, x, down, up):
        return frozen(x) + x @ down.T @ up.T


exercises.check_adapted_layer(adapted)
### END SOLUTION

# %% [markdown] slide={"en": "Adam in fp32 with checkpoints: 134.0 MB.\n\n**Guess first.** LoRA in bf16? In fp32? With two micro-batches? With eight?", "zh": "fp32 的 Adam 加检查点要 134.0 MB。\n\n**先猜**：LoRA 用 bf16 要多少？用 fp32 呢？分成两个微批次呢？八个呢？"}
# <div lang="en">
#
# `with_adapters` adds LoRA adapters of rank 8 to the two projections of each attention layer. Training then updates only 98,304 of 6.9 million numbers. In the next table, LoRA in bf16 follows Adam, because most people start with this variant. All rows except the last have one checkpoint per layer. **Guess first:** Adam on all weights needs 134.0 MB. How much does LoRA need in bf16, in fp32, in fp32 with two micro-batches, and in fp32 with eight?
#
# </div>
# <div lang="zh">
#
# `with_adapters` 给每层注意力的两个投影加上秩为 8 的 LoRA 适配器，于是在 690 万个数中只训练 98,304 个。多数人一开始用的是 bf16 的 LoRA，所以在下表中，bf16 的 LoRA 紧跟在 Adam 之后。除最后一行外，各行都是每层一个检查点。**先猜**：用 Adam 训练全部权重要 134.0 MB。LoRA 用 bf16 要多少？用 fp32 呢？用 fp32 并分成两个微批次呢？分成八个呢？
#
# </div>

# %%
from dataclasses import replace

from course_lib.lessons.lesson_01.figures import with_adapters
from course_lib.lessons.lesson_07 import smaller


def lora():
    return with_adapters(make_model(), 8)


def qlora():
    return with_adapters(smaller.in_four_bits(make_model()), 8)


# %% tags=["guess"] slide="result"
my_guesses = [None, None, None, None]  # in MB
as_made = Recipe(precision=None, **checkpoints)  # keeps the dtypes of the model
variants = {
    "Adam, fp32": (make_model, Recipe(**checkpoints)),
    "LoRA, bf16": (lambda: lora().bfloat16(), as_made),
    "LoRA, fp32": (lora, as_made),
    "LoRA, fp32, 2 micro-batches": (lora, replace(as_made, micro_batches=2)),
    "LoRA, fp32, 8 micro-batches": (lora, replace(as_made, micro_batches=8)),
    "QLoRA, fp32": (qlora, as_made),
    "QLoRA, bf16": (lambda: qlora().bfloat16(), as_made),
    "LoRA, fp32, no checkpoints": (lora, Recipe(precision=None)),
}
adapters = {name: estimate(make, make_batch, way) for name, (make, way) in variants.items()}
figures.what_fills(adapters, adapters.values(), guesses=[134.0, *my_guesses])

# %% jupyter={"source_hidden": true}
rows = [
    (name, adapters[name].peak_bytes, run(make, make_batch, way).meter.peak_bytes)
    for name, (make, way) in variants.items()
    if name in ("LoRA, fp32", "LoRA, fp32, 8 micro-batches", "QLoRA, fp32")
]
predictions(rows, unit="bytes")

# %% [markdown]
# <div lang="en">
#
# All three predictions equal the measured peaks. LoRA in bf16 fits into 60 MB, but LoRA in fp32 does not. Besides the weights, the fp32 peak contains 34.6 MB of activations and temporary tensors. Micro-batches reduce these 34.6 MB, and the gradients that they add up take only 0.4 MB. QLoRA stores each weight of the layers in 0.5 + 4/64 = 0.5625 bytes, and has the same activations as LoRA.
#
# Without checkpoints, LoRA's activations take 134.9 MB, and the baseline's take 178.4 MB. LoRA keeps 24% fewer bytes here, because it does not need the inputs of frozen matrices without an adapter.
#
# The next decoder has 6.6 billion parameters. With LoRA, every linear layer has an adapter. The batch is one sequence of 4096 tokens.
#
# </div>
# <div lang="zh">
#
# 三个预测值都与实测值相等。bf16 的 LoRA 能装进 60 MB。fp32 的 LoRA 装不下，因为除了权重，峰值里还有 34.6 MB 的激活值和临时张量。分成微批次能减少这 34.6 MB，为此要累加的梯度只有 0.4 MB。在 QLoRA 里，各层的每个权重只占 0.5 + 4/64 = 0.5625 字节，激活值则与 LoRA 一样多。
#
# 不用检查点时，LoRA 的激活值是 134.9 MB，比基线的 178.4 MB 少 24%。这是因为冻结的矩阵如果没有适配器，就不必保存它的输入。
#
# 下面换成一个 66 亿参数的解码器，用 LoRA 时每个线性层都带适配器，输入是一条 4096 个 token 的序列。
#
# </div>


# %% jupyter={"source_hidden": true}
class Adapter(torch.nn.Module):
    def __init__(self, frozen, rank):
        super().__init__()
        self.frozen = frozen
        self.down = torch.nn.Parameter(torch.randn(rank, frozen.in_features) / 100)
        self.up = torch.nn.Parameter(torch.zeros(frozen.out_features, rank))  # no change at first

    def forward(self, x):
        return exercises.adapted_layer(self.frozen, x, self.down, self.up)


# %% jupyter={"source_hidden": true}
def large(hidden, layers):
    heads, rest = hidden // 128, {"vocabulary": 32000, "sequence": 4096}
    return lambda: Decoder(hidden=hidden, heads=heads, layers=layers, **rest)


def large_lora(hidden, layers, rank, rounded=lambda decoder: decoder.requires_grad_(False)):
    def make():
        frozen = rounded(large(hidden, layers)())
        return smaller.replace_linear(frozen, lambda layer: Adapter(layer, rank)).bfloat16()

    return make


def on_gpu_step(make, tokens=4096, way=None):
    way = way or Recipe(precision=None, attention="flash", **checkpoints)
    return estimate(make, lambda: random_tokens(1, tokens, 32000), way, kind="cuda")


# %% jupyter={"source_hidden": true}
on_a_card = {
    "all weights, bf16": on_gpu_step(lambda: large(4096, 32)().bfloat16()),
    "LoRA, bf16": on_gpu_step(large_lora(4096, 32, 8)),
    "QLoRA, bf16": on_gpu_step(large_lora(4096, 32, 8, smaller.in_four_bits)),
}

# %% jupyter={"source_hidden": true} slide="result"
rows = []
for name, each in on_a_card.items():
    frozen = each.at_peak["parameter"] + each.at_peak["buffer"]
    rows.append((name, f"{each.peak_bytes / 1e9:.1f}", f"{frozen / 1e9:.1f}"))
table(["variant", "peak (GB)", "weights (GB)"], rows)

# %% [markdown]
# <div lang="en">
#
# Without offloading, this decoder fits on a card of 24 GB with LoRA or QLoRA, but not if all weights are trained. Does each adapter still get the right gradient? A two-layer model is enough to check this.
#
# </div>
# <div lang="zh">
#
# 不用卸载时，这个解码器用 LoRA 或 QLoRA 训练，24 GB 的卡装得下，但训练全部权重就装不下。那么，各个适配器得到的梯度还对吗？用一个两层的模型就能看出来。
#
# </div>


# %%
def two_layers():
    return Decoder(vocabulary=2048, hidden=256, heads=8, layers=2, sequence=128)


smaller.compare_gradients(two_layers, make_batch)

# %% [markdown]
# <div lang="en">
#
# The gradients of LoRA's adapters follow from the gradient of the full matrix by the chain rule. QLoRA rounds the frozen weights with a relative error of 9%, so the model changes. QLoRA's adapters get the same gradients, up to rounding, as LoRA's adapters on the rounded weights.
#
# </div>
# <div lang="zh">
#
# LoRA 适配器的梯度，可以用链式法则由完整矩阵的梯度求出。QLoRA 把冻结的权重舍入，相对误差为 9%，因此模型变了。但只要 LoRA 也用这些舍入后的权重，除了计算中的舍入误差，两者的适配器梯度就相同。
#
# </div>

# %% [markdown] slide={"en": "Weights in bf16, without fp32 master weights.\n\n**Guess first.** At a learning rate of 0.0001, how many weights do two steps leave unchanged?", "zh": "权重只存 bf16，没有 fp32 主权重。\n\n**先猜**：学习率 0.0001 时，两步之后有多少权重没有改变？"}
# ## 7.10 Fewer bits per number / 每个数少存几位
#
# <div lang="en">
#
# - **bf16 without master weights**: weight, gradient and two moments take 2 bytes each, 8 bytes per parameter in total. With fp32 master weights, each parameter takes 16 bytes, as in fp32.
# - **8-bit Adam**: each number of a moment is stored in 1 byte, as the index of one of 256 levels. Every 256 numbers share an fp32 scale. **Paged** moments also move to host memory when GPU memory is short.
# - **Muon** keeps one moment instead of Adam's two for the matrices of the layers, in fp32.
#
# The next recipes use one checkpoint per layer:
#
# </div>
# <div lang="zh">
#
# - **不用主权重的 bf16**：权重、梯度和两个矩各 2 字节，每个参数共 8 字节。如果保留 fp32 主权重，每个参数就要 16 字节，与全部用 fp32 时相同。
# - **8 位 Adam**：两个矩里的每个数只存一个编号，对应 256 个固定数值中的一个，占 1 字节，每 256 个元素共用一个 fp32 的缩放系数。**分页**的优化器在 GPU 显存不足时，还能把这两个矩移到主机内存。
# - **Muon** 对各层的矩阵只保存一个矩，而不是像 Adam 那样保存两个，仍用 fp32。
#
# 下面各个配方仍然给每层加一个检查点：
#
# </div>

# %%
with_bits = {
    "bf16, fp32 master weights": (make_model, Recipe(precision="bf16", **checkpoints)),
    "bf16 without master weights": (lambda: make_model().bfloat16(), as_made),
    "8-bit Adam": (make_model, Recipe(optimizer="adam8bit", **checkpoints)),
    "Muon": (make_model, Recipe(optimizer="muon", **checkpoints)),
}
bits = {name: estimate(make, make_batch, way) for name, (make, way) in with_bits.items()}

# %% jupyter={"source_hidden": true}
eight = bits["8-bit Adam"]
left = {**eight.at_peak, "optimizer": 0}
bits["8-bit Adam, paged"] = replace(eight, peak_bytes=sum(left.values()), at_peak=left)
figures.what_fills(bits, bits.values())

# %% jupyter={"source_hidden": true}
from course_lib.lessons.lesson_07.fewer_bits import run_in_8_bits

in_8_bits = run_in_8_bits(make_model, make_batch, Recipe(**checkpoints))  # without bitsandbytes
runs = {"8-bit Adam": in_8_bits, "Muon": run(make_model, make_batch, with_bits["Muon"][1]).meter}
rows = [(name, bits[name].peak_bytes, each.peak_bytes) for name, each in runs.items()]
predictions(rows, unit="bytes")

# %% [markdown]
# <div lang="en">
#
# In bf16 without master weights, every number takes half as many bytes as in fp32. The row *paged* was not run, because bitsandbytes does not move moments on a CPU. This row estimates a GPU step with all moments in host memory.
#
# A bf16 number has 8 significant bits, so a change below about 0.2% of a weight is rounded away. Two methods keep such changes without fp32 weights. **Stochastic rounding** rounds up or down at random, so that the result is right on average. **Kahan summation** stores the part that rounding removes (2 more bytes per parameter, in bf16), and adds it to the next update. Each function below returns the new weights and the part for the next update.
#
# **Guess first:** at a learning rate of 0.0001, what percentage of the weights is unchanged after two steps with `nearest`?
#
# </div>
# <div lang="zh">
#
# 用 bf16 而不用主权重时，每个数占用的字节都是 fp32 的一半。“分页”这一行没有实际运行，因为在 CPU 上，bitsandbytes 并不移走两个矩。这一行是对 GPU 的估计，假定两个矩已经全部移到主机内存。
#
# bf16 只有 8 位有效二进制数字，所以如果更新量小于权重的 0.2% 左右，舍入之后就完全丢失了。有两种办法可以补救，都不需要 fp32 权重。**随机舍入**按概率向上或向下舍入，使结果的平均值等于准确值。**Kahan 求和**把舍掉的部分用 bf16 存下来，加到下一次更新里，每个参数多占 2 字节。下面每个函数都返回两个值，一个是新的权重，一个是留给下一次更新的部分。
#
# **先猜**：学习率为 0.0001 时，用 `nearest` 做两步之后，有百分之几的权重没有改变？
#
# </div>

# %% tags=["guess"] slide="result"
my_percent = None


def nearest(exact):  # rounds fp32 to bf16
    return exact.bfloat16(), 0


def stochastic(exact):  # a random number in the 16 bits that bf16 lacks
    bits = exact.view(torch.int32) + torch.randint(1 << 16, exact.shape, dtype=torch.int32)
    return (bits & -(1 << 16)).view(torch.float32).bfloat16(), 0


def kahan(exact):
    return exact.bfloat16(), (exact - exact.bfloat16()).bfloat16()


roundings = {"nearest": nearest, "stochastic": stochastic, "Kahan": kahan}
smaller.compare_roundings(two_layers, make_batch, roundings, guesses={1e-4: my_percent})

# %% [markdown]
# <div lang="en">
#
# The last three columns show how much of the update each way of rounding applies, as a percentage of the update with fp32 master weights. With `nearest`, this percentage depends on the learning rate. At a learning rate of 0.00001, 90% of the weights stay unchanged, and 13% of the update is applied. At 0.0001, these percentages are 28% and 83%. At 0.001, they are 0.06% and 99%. Stochastic rounding applies the whole update on average, with noise in each weight. Kahan summation applies the whole update, if you count the stored part. In a test of the course, 8-bit Adam changes the update of a small model by less than 5%.
#
# </div>
# <div lang="zh">
#
# 最后三列列出，用三种舍入时，加到权重上的更新各是用 fp32 主权重时的百分之几。用 `nearest` 时，结果取决于学习率。学习率为 0.00001 时，90% 的权重没有改变，更新只加上了 13%。学习率为 0.0001 时，这两个数是 28% 和 83%。学习率为 0.001 时，这两个数是 0.06% 和 99%。用随机舍入时，平均来看，更新全部加到了权重上，但每个权重都带有噪声。用 Kahan 求和时，如果算上存下来的部分，更新也全部加到了权重上。在课程的一个测试里，8 位 Adam 使一个小模型的更新量改变不到 5%。
#
# </div>

# %% [markdown]
# ## 7.11 In your own code / 实际怎么写
#
# <div lang="en">
#
# This lesson's search is also available as a command. `--config` takes the `config.json` of a model, `--lora 8 --base nf4` adds adapters to a frozen model in NF4, and `--plot out.png` draws how each technique lowers the peak:
#
# ```
# python -m course_lib.budget --hidden 256 --layers 8 --heads 8 --vocabulary 2048 --sequence 128 --batch 8 --precision fp32 --device laptop --budget 60MB
# ```
#
# Other libraries have the same techniques:
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
# | QLoRA | Hugging Face: `BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16)`, then LoRA |
# | Muon | PyTorch: `torch.optim.Muon(matrices)`, and AdamW for all other parameters |
# | stochastic rounding | torchao: `torchao.optim._AdamW(parameters, bf16_stochastic_round=True)` |
#
# </div>
# <div lang="zh">
#
# 本课的搜索也可以用一条命令来运行。`--config` 接受模型的 `config.json`，`--lora 8 --base nf4` 把模型的权重以 NF4 冻结，再加上适配器，`--plot out.png` 把峰值逐步下降的过程画成图：
#
# ```
# COURSE_LANG=zh python -m course_lib.budget --hidden 256 --layers 8 --heads 8 --vocabulary 2048 --sequence 128 --batch 8 --precision fp32 --device laptop --budget 60MB
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
# | QLoRA | Hugging Face：`BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16)`，再加 LoRA |
# | Muon | PyTorch：`torch.optim.Muon(matrices)`，其余参数用 AdamW |
# | 随机舍入 | torchao：`torchao.optim._AdamW(parameters, bf16_stochastic_round=True)` |
#
# </div>

# %% [markdown]
# ## 7.12 Claims and measurements / 说法与实测
#
# <div lang="en">
#
# The next cells test common claims on the step of this lesson. Claims about adapters are also tested on larger decoders.
#
# </div>
# <div lang="zh">
#
# 下面用本课的训练步检验几种常见的说法。检验关于适配器的说法时，还用了更大的解码器。
#
# </div>

# %% jupyter={"source_hidden": true}
alone = {"micro_batches": {"micro_batches": 8}, "offloaded": offloaded}
alone["both"] = {**checkpoints, **offloaded}
alone = {name: estimate(make_model, make_batch, Recipe(**way)) for name, way in alone.items()}
alone["checkpoints"] = found["+ checkpoints"]
all_weights = Recipe(precision="bf16", attention="flash", **checkpoints)
all_weights = on_gpu_step(large(4096, 32), way=all_weights)  # fp32 master weights
few, more = (
    on_gpu_step(large_lora(8192, layers, 64, smaller.in_four_bits), tokens=512) for layers in (4, 8)
)  # bytes grow evenly with the layers (lesson 01), so 80 layers follow from 4 and 8
peak_65 = few.peak_bytes + 19 * (more.peak_bytes - few.peak_bytes)

# %% jupyter={"source_hidden": true} slide="result"
from course_lib.lessons.lesson_07 import claims
from course_lib.teaching import text

peaks = {name: f"{each.peak_bytes / 1e6:.1f}" for name, each in alone.items()}
times = {name: f"{each.flops / plain.flops:.2f}" for name, each in alone.items()}
saved = {name: f"{(plain.peak_bytes - e.peak_bytes) / 1e6:.1f}" for name, e in alone.items()}
moved = [f"{alone[name].moved_bytes / 1e6:.1f}" for name in ("offloaded", "both")]
per_parameter = [f"{each.peak_bytes / parameters:.1f}" for each in (plain, pair[0])]
states = [each.at_peak["optimizer"] for each in (few, more)]
paged = peak_65 - (states[0] + 19 * (states[1] - states[0]))
factors = [
    (plain, adapters["LoRA, fp32, no checkpoints"]),
    (found["+ checkpoints"], adapters["LoRA, fp32"]),
    (all_weights, on_a_card["LoRA, bf16"]),
]
with symbolic():
    billions = sum(p.numel() for p in large(4096, 32)().parameters()) / 1e9
claims.main_claims(
    text(
        "{one} MB, {less} times the FLOPs; {other} MB, {more} times",
        one=peaks["micro_batches"],
        less=times["micro_batches"],
        other=peaks["checkpoints"],
        more=times["checkpoints"],
    ),
    "; ".join(per_parameter),
    f"{saved['checkpoints']}; {saved['offloaded']}; {saved['both']} MB",
    text(
        "{peaks} MB; {moved} MB moved",
        peaks=f"{peaks['offloaded']} → {peaks['both']}",
        moved=" → ".join(moved),
    ),
    f"{peak_65 / 1e9:.1f}; {paged / 1e9:.1f} GB",
    "; ".join(f"{before.peak_bytes / after.peak_bytes:.1f}" for before, after in factors),
    "; ".join(f"{each.peak_bytes / 1e9 / billions:.2f}" for each in on_a_card.values()),
)

# %% [markdown] slide={"en": "The ledger, complete for one device.", "zh": "账本：一台设备上的各行都齐了。"}
# ## 7.13 The ledger / 账本
#
# <div lang="en">
#
# Each row of the ledger shows the same step of the same decoder with at most one technique. Only the last row combines several techniques (those of 7.4).
#
# </div>
# <div lang="zh">
#
# 账本的各行都是同一个解码器的同一步。最后一行用 7.4 节的组合，其余各行至多用一种技术。
#
# </div>

# %% slide="result"
ledger(
    "07", "all offloaded, checkpoints, steps in backward", pair[0], moved_bytes=pair[0].moved_bytes
)

# %% [markdown] slide={"en": "First look at what fills the peak, then choose a technique.\n\nHere, a checkpoint on top of offloading raises the peak.", "zh": "先看峰值里什么最多，再选技术。\n\n在这里，在卸载的基础上再加检查点，峰值反而升高。"}
# ## 7.14 Summary / 小结
#
# <div lang="en">
#
# - Run a training step twice on symbolic tensors to find its peak without using memory. For most steps, this peak is exact to the byte.
# - Look at what fills the peak, then choose a technique. The savings of two techniques need not add up, because a technique can change what fills the peak.
# - Here, adding checkpoints to offloading moves fewer bytes but raises the peak, because a checkpoint restores a whole layer. On machines below 30.3 FLOPs per copied byte, the recipe without checkpoints is faster.
# - Most techniques have a price: more FLOPs, slower computation, moved bytes, no gradient clipping, or work for the host.
# - A search proposes, estimates and sorts recipes. The rules for skipping recipes must never discard the best recipe.
# - LoRA, QLoRA, 8-bit Adam, Muon and pure bf16 reduce the 16 bytes that Adam needs per parameter, and change the training.
# - Weights in bf16 lose small updates. Stochastic rounding or Kahan summation keeps these updates.
#
# **Next:** [lesson 08](08_beyond_one_gpu.ipynb) divides a step among several devices.
#
# </div>
# <div lang="zh">
#
# - 用符号张量把训练步运行两遍，不占内存就能求出峰值。对多数训练步，求出的峰值一个字节也不差。
# - 先看峰值里什么最多，再选技术。节省的内存不一定能相加，因为每用一种技术，峰值里最多的那一类都可能改变。
# - 在这里，在卸载的基础上再加检查点，搬运的字节变少，峰值却升高，因为检查点要恢复整层的激活值。如果机器在拷贝一个字节的时间里做不到 30.3 FLOPs，不用检查点就更快。
# - 多数技术都有代价，例如多算 FLOPs、运算速率变低、搬运字节、不能裁剪梯度，或者占用主机的时间。
# - 搜索就是先提出配方，再估计峰值，最后排序。只有保证不会漏掉最好配方的规则，才能用来跳过配方。
# - LoRA、QLoRA、8 位 Adam、Muon 和纯 bf16 减少的是用 Adam 训练时每个参数占用的 16 字节，训练本身也随之改变。
# - bf16 的权重会丢掉很小的更新，用随机舍入或 Kahan 求和可以保留这些更新。
#
# **下一步**：[第 08 课](08_beyond_one_gpu.ipynb)把训练步分到多台设备上。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **Sources.** Lessons 01 to 06 give the sources of their techniques. Rates: 40% of the dense numbers in NVIDIA's datasheets of the H100 and H200 and in its Ada whitepaper, because Grattafiori et al. 2024, *The Llama 3 Herd of Models*, arXiv:2407.21783, reached 38 to 43% on H100s; PCIe 4.0 and 5.0, 16 lanes, one direction, as nvbandwidth measures them; host memory of a desktop with two channels of DDR5-5600 and of a Xeon 8480C with eight of DDR5-4800; device memory as nvidia-smi shows it, and that of the H200 as PyTorch reports it.
#
# </div>
# <div lang="zh">
#
# **出处。** 各项技术的出处见第 01 到 06 课。算力出自 NVIDIA 的 H100、H200 数据手册和 Ada 白皮书，按稠密算力的 40% 计，因为 Grattafiori et al. 2024（*The Llama 3 Herd of Models*，arXiv:2407.21783）在 H100 上达到 38% 到 43%。PCIe 4.0 和 5.0 的速率取 nvbandwidth 测得的值，16 通道，单向。主机内存的速率分别取双通道 DDR5-5600 的台式机和八通道 DDR5-4800 的 Xeon 8480C 的值。设备内存的大小取 nvidia-smi 显示的值，只有 H200 取 PyTorch 报告的值。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **Sources of the techniques.** Rajbhandari et al. 2020, *ZeRO*, arXiv:1910.02054 (16 bytes per parameter); Ren et al. 2021, *ZeRO-Offload*, arXiv:2101.06840 (optimizer on the host); Lv et al. 2023, *LOMO*, arXiv:2306.09782 (updates in backward); Dettmers et al. 2022, arXiv:2110.02861 (8-bit Adam); Dettmers et al. 2023, *QLoRA*, arXiv:2305.14314 (4-bit weights, double quantization, paged optimizers); Hu et al. 2021, *LoRA*, arXiv:2106.09685; Jordan et al. 2024, *Muon*, kellerjordan.github.io/posts/muon; Zamirai et al. 2020, *Revisiting BFloat16 Training*, arXiv:2010.06192 (stochastic rounding, Kahan summation); Beaumont et al. 2019, arXiv:1911.13214 (rotor); Zheng et al. 2022, *Alpa*, arXiv:2201.12023.
#
# </div>
# <div lang="zh">
#
# **技术的出处。** Rajbhandari et al. 2020，*ZeRO*，arXiv:1910.02054（每个参数 16 字节）；Ren et al. 2021，*ZeRO-Offload*，arXiv:2101.06840（优化器在主机上）；Lv et al. 2023，*LOMO*，arXiv:2306.09782（在反向之中更新）；Dettmers et al. 2022，arXiv:2110.02861（8 位 Adam）；Dettmers et al. 2023，*QLoRA*，arXiv:2305.14314（4 位权重，双重量化，分页优化器）；Hu et al. 2021，*LoRA*，arXiv:2106.09685；Jordan et al. 2024，*Muon*，kellerjordan.github.io/posts/muon；Zamirai et al. 2020，*Revisiting BFloat16 Training*，arXiv:2010.06192（随机舍入、Kahan 求和）；Beaumont et al. 2019，arXiv:1911.13214（rotor）；Zheng et al. 2022，*Alpa*，arXiv:2201.12023。
#
# </div>

# %% [markdown]
# ## In depth / 深入
#
# <div lang="en">
#
# No other lesson needs the following sections, and each of them can be read alone.
#
# </div>
# <div lang="zh">
#
# 其他各课用不到以下各节，各节也可以单独读。
#
# </div>

# %% [markdown]
# ## 7.15 A budget of 50 MB / 预算 50 MB
#
# <div lang="en">
#
# **Exercise 6.** Find a recipe that needs at most 50 MB, with any techniques. The recipes of 7.4 and 7.5 exceed this budget.
#
# </div>
# <div lang="zh">
#
# **练习 6。** 找出一个峰值不超过 50 MB 的配方，任何技术都可以用。7.4 节和 7.5 节的配方都超出这个预算。
#
# </div>

# %% minutes=10
recipe = None  # Recipe(...)
exercises.check_fifty(recipe)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
least = {"offload_optimizer": 1.0, "in_backward": True, "offload_activations": True}
exercises.check_fifty(Recipe(**least, head_chunk=128))
### END SOLUTION

# %% [markdown]
# ## 7.16 The other fields / 其余的字段
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
# ## 7.17 Ninety-nine million parameters in 550 MB / 把 9900 万参数装进 550 MB
#
# <div lang="en">
#
# A decoder of 99 million parameters trains on two sequences of 384 tokens. Its weights take 396 MB. Does the step fit into 550 MB?
#
# </div>
# <div lang="zh">
#
# 一个 9900 万参数的解码器，用两条 384 个 token 的序列训练，权重占 396 MB。这样的一步能装进 550 MB 吗？
#
# </div>


# %%
def large_model(layers=19, sequence=384):
    return Decoder(vocabulary=8192, hidden=640, heads=40, layers=layers, sequence=sequence)


def two_sequences():
    return random_tokens(2, 384, 8192)


small = {"attention": "flash", **checkpoints}
ways = [{}, {**small, **early}, {"attention": "flash", **early, **offloaded}]
estimates = [estimate(large_model, two_sequences, Recipe(**way)) for way in ways]
rows = [(str(e.recipe), round(e.peak_bytes / 1e6), round(e.moved_bytes / 1e6)) for e in estimates]
table(["recipe", "peak (MB)", "moved (MB)"], rows)

# %% [markdown]
# <div lang="en">
#
# The second recipe fits with 521 MB, less than a fifth of the baseline's 2,793 MB. With offloaded activations instead of checkpoints, the peak is 501 MB, but the step moves 2,859 MB instead of 1,585 MB.
#
# </div>
# <div lang="zh">
#
# 第二个配方装得下，峰值 521 MB，不到基线 2,793 MB 的五分之一。如果不用检查点，改为卸载激活值，峰值是 501 MB，但搬运的字节从 1,585 MB 增加到 2,859 MB。
#
# </div>

# %% [markdown]
# ## 7.18 Seven and seventy billion parameters / 70 亿与 700 亿参数
#
# <div lang="en">
#
# Train two decoders, one with 6.6 billion and one with 64.7 billion parameters. Both use bf16 with fp32 master weights, Adam, and one sequence of 4096 tokens. The optimizer state may stay in host memory, where the host does the update (lesson 04).
#
# **Guess first:** how much memory does a device need to train the smaller model? How much does it need for the larger model?
#
# </div>
# <div lang="zh">
#
# 现在训练 66 亿和 647 亿参数的两个解码器，用 bf16，带 fp32 主权重，优化器是 Adam，输入是一条 4096 个 token 的序列。优化器状态可以留在主机内存里，由主机更新（第 04 课）。
#
# **先猜**：训练小模型，设备至少要有多少内存？训练大模型呢？
#
# </div>


# %% tags=["guess"]
my_devices = [None, None]  # such as "80 GB"


# %% jupyter={"source_hidden": true}
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
devices = {"24 GB": "RTX 4090", "80 GB": "H100", "141 GB": "H200"}  # memory -> device
rows = []
for (size, name), e in giants.items():
    fitting = [device for device in devices.values() if e.peak_bytes <= RATES[device].memory_bytes]
    marks = ["✓" if device in fitting else "–" for device in devices.values()]
    price = f"{e.moved_bytes / 1e9:.0f}", f"{RATES[fitting[0]].seconds(e):.2f}, {fitting[0]}"
    guess = my_devices[size == "70 B"] or "–"
    rows.append((size, name, f"{e.peak_bytes / 1e9:.1f}", guess, *marks, *price))
price = "GB moved", "time on the smallest (s)"
table(["model", "recipe", "peak (GB)", "your guess", *devices, *price], rows)

# %% [markdown]
# <div lang="en">
#
# The smaller model trains on a device of 24 GB, with 79 GB of state on the host and 26 GB moved per step. The larger model trains on an H200 (nominally 141 GB, in fact 150.1 GB). The peak is 137 GB, and 777 GB of state are on the host.
#
# A step that fits may still be too slow to be useful. On the H200, copies and the host's update take two thirds of the larger model's step time. The peak of 137 GB also leaves only 9% of the device's memory for CUDA's context, workspace and fragmentation. The estimated times assume 40% of the datasheet's FLOPs per second and one host processor.
#
# </div>
# <div lang="zh">
#
# 小模型能在 24 GB 的设备上训练，主机上有 79 GB 的状态，每步搬运 26 GB。大模型能在 H200 上训练（标称 141 GB，实际内存 150.1 GB），峰值 137 GB，另有 777 GB 的状态放在主机内存里。
#
# 即使装得下，也可能太慢而不实用。在 H200 上，大模型的一步有三分之二的时间花在拷贝和主机的更新上。张量用掉 137 GB，设备内存只剩 9% 留给 CUDA 上下文、工作区和碎片。这里的用时是估计值，假定达到的算力是数据手册标称值的 40%，主机只有一个处理器。
#
# </div>


# %% jupyter={"source_hidden": true}
def flops(layers, count, length, attention):
    def batch():
        return random_tokens(count, length, 8192)

    return estimate(lambda: large_model(layers, length), batch, Recipe(attention=attention)).flops


halves = [Recipe(**small, micro_batches=count) for count in (1, 2)]
halves = [estimate(lambda: large_model(6), two_sequences, each) for each in halves]
ratios = [flops(*s, "flash") / flops(*s, "standard") for s in ((6, 2, 384), (2, 1, 4096))]
seven = giants["7 B", "+ steps in backward"]
peak, moved = f"{seven.peak_bytes / 1e9:.1f} GB", f"{seven.moved_bytes / 1e9:.0f} GB"
claims.older_claims(
    f"{halves[0].peak_bytes / 1e6:,.0f} → {halves[1].peak_bytes / 1e6:,.0f} MB",
    text("{peak}, {moved} moved", peak=peak, moved=moved),
    f"{ratios[0]:.3f} / {ratios[1]:.3f}",
)

# %% [markdown]
# ## 7.19 On a GPU / 在 GPU 上
#
# <div lang="en">
#
# The next cell runs three recipes for a decoder with 1.28 billion parameters on your GPU. Without a GPU, it shows the numbers recorded on an H100 and an H200. On both GPUs, the three estimates, 45.3, 21.1 and 5.0 GB, equal the peaks that the meter measured, to the byte. The allocator's peak is 68 to 69 MB higher, because cuBLAS keeps workspaces of 65 MiB.
#
# </div>
# <div lang="zh">
#
# 下面的单元格用一个 12.8 亿参数的解码器。如果这台机器有 GPU，就现场运行三个配方。如果没有，就显示在 H100 和 H200 上测得的数据。三个估计值是 45.3、21.1 和 5.0 GB，在两块卡上都与计量器测得的峰值一字节不差。分配器的峰值要高 68 到 69 MB，因为 cuBLAS 一直占着 65 MiB 的工作区。
#
# </div>

# %% tags=["nbval-ignore-output", "shows-device"]
from course_lib.lessons import on_gpu

on_gpu("07")
