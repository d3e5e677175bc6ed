# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] slide={"en": "277.7 MB for one step. You have 60, and weights with gradients alone are 55.\n\nWhich techniques together? Is each still needed at the end?", "zh": "一步要 277.7 MB。你只有 60 MB，光是权重和梯度就有 55 MB。\n\n哪几种合用？合用之后，每一种都还需要吗？"}
# # 7 Given a byte budget, which of all these, and how much of each? (`fit`) / 给定字节预算，该用哪几样，各用多少？（`fit`）
#
# <div lang="en">
#
# The step of this course, one Adam step of one small decoder, takes 277.7 MB. You have 60.
#
# Its weights and gradients alone are 55. And of the ledger's rows, one technique each, none comes below 124. So it takes several at once. Which ones? In this lesson you put six together, one by one. Then you take one of them **out** again, and see what happens to the peak.
#
# </div>
# <div lang="zh">
#
# 这门课的那一步，即一个小解码器的一步 Adam，要 277.7 MB。你只有 60 MB。
#
# 光是权重和梯度就有 55 MB。账本里每行只用一种技术，没有一行低于 124 MB。所以需要同时用几种。用哪几种？在这一课里，你把六种技术逐一加上，然后**去掉**其中一种，看看峰值怎样变。
#
# </div>

# %%
from course_lib.teaching import language

language()

# %% [markdown]
# <div lang="en">
#
# **Goals** (75 minutes). Write an estimate that takes no memory. Choose a technique by what fills the peak, and say why savings don't add up. Find out which of two recipes is cheaper, and on which machine. Know what a search passes over.
#
# **What to know before**: lessons 01 to 06.
#
# </div>
# <div lang="zh">
#
# **目标**（75 分钟）：写一个不占内存的估计；看清是什么撑起了峰值，再选技术，并说出节省为什么不能相加；算出两个配方哪个更便宜、在什么样的机器上更便宜；知道搜索会跳过什么。
#
# **预备知识**：第 01 课到第 06 课。
#
# </div>

# %%
import torch

from course_lib.budget import RATES, InfeasibleBudget, Recipe, build, estimate, fit, run, train_step
from course_lib.lessons import lesson_07, what_you_may_have_read
from course_lib.lessons.ledger import ledger
from course_lib.memory import MemoryBudgetExceeded, MemoryMeter, symbolic
from course_lib.models import Decoder, random_tokens
from course_lib.teaching import predictions, table, timelines

BUDGET = 60_000_000  # bytes


def make_model():
    return Decoder(vocabulary=2048, hidden=256, heads=8, layers=8, sequence=128)


def make_batch():
    return random_tokens(8, 128, 2048)  # (8, 129): 128 tokens, and the one that follows each


# %% [markdown] slide={"en": "60 MB, and the plain step.\n\n**Guess first.** Where is it stopped: forward, backward, optimizer? In which layer?", "zh": "60 MB，基线。\n\n**先猜**：停在前向、反向，还是优化器？在第几层？"}
# ## 7.1 The plain step is stopped / 基线被拦下
#
# <div lang="en">
#
# A meter with `budget_bytes` stops the operator that passes the budget. Let it watch the very first step, before Adam has any state.
#
# **Guess first:** where does it stop? Forward, backward, or the optimizer? In which of the eight layers?
#
# </div>
# <div lang="zh">
#
# 带 `budget_bytes` 的计量器，会拦下让内存超出预算的那个算子。让它监视第一步，这时 Adam 还没有状态。
#
# **先猜**：它会停在哪里？前向、反向，还是优化器？在八层里的哪一层？
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
# In the forward pass, in the second layer of eight, where queries meet keys. 27.5 MB are weights; the first layer has kept 21 MB. Nothing is half done: no gradient is there, no weight has changed.
#
# From the second step on it is worse. Weights and Adam's state are there before the first operator, 12 bytes per parameter: 82.5 MB. No checkpoint helps against that.
#
# </div>
# <div lang="zh">
#
# 停在前向，八层里的第二层，查询与键相乘的地方。27.5 MB 是权重，第一层已经留下 21 MB。没有留下做了一半的东西：没有梯度，权重也没变。
#
# 从第二步起就更糟：第一个算子运行之前，权重和 Adam 的状态已经在那里，每个参数 12 字节，共 82.5 MB。对此，加再多检查点也没有用。
#
# </div>

# %% [markdown] slide={"en": "What does a step take that your machine cannot hold?\n\n**Write it**: two steps, symbolic tensors, a meter.", "zh": "机器装不下的一步，要占多少内存？\n\n**自己写**：两步，符号张量，一个计量器。"}
# ## 7.2 Run it without running it / 不运行，也能先跑一遍
#
# <div lang="en">
#
# Before you try recipes on a machine that cannot hold them, let the step itself tell what it takes. Symbolic tensors have shapes and storages, but no memory (lesson 01); the meter counts them all the same.
#
# **Exercise 1.** Write `peak_of_step(make_model, make_batch)`: the peak of a plain step with Adam, the **second** one, in bytes, on symbolic tensors. (`torch.optim.Adam(parameters, foreach=False)`; the model has `loss(batch)`.)
#
# </div>
# <div lang="zh">
#
# 要在装不下的机器上挑配方，得先让这一步自己说出它要多少内存。符号张量有形状、有存储区，却不占内存（第 01 课），计量器照样数它们。
#
# **练习 1。** 写出 `peak_of_step(make_model, make_batch)`：基线（Adam，取**第二步**）的峰值，以字节计，用符号张量求出。（`torch.optim.Adam(parameters, foreach=False)`；模型有 `loss(batch)`。）
#
# </div>


# %% minutes=9
def peak_of_step(make_model, make_batch):
    return None


lesson_07.check_peak_without_memory(peak_of_step)

# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not lesson_07.check_peak_without_memory.accepted:

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


lesson_07.check_peak_without_memory(peak_of_step)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# The library's `estimate` does the same for any **recipe**: a value that says what a step uses. These are the fields that this lesson turns; `Recipe()` is the plain step.
#
# </div>
# <div lang="zh">
#
# 库里的 `estimate` 对任何**配方**都这么做。配方是一个值，写明一步用了哪些技术。下面是本课要动的各项；`Recipe()` 就是基线。
#
# </div>

# %%
lesson_07.recipe_fields()

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
# Yours is 8,256 bytes higher: the batch, 8 × 129 numbers of 8 bytes, which the library leaves out. (Yours may be equal, if your batch was made before the meter.)
#
# </div>
# <div lang="zh">
#
# 你的多 8,256 字节：那是批次，8 × 129 个数，每个 8 字节，库不计它。（如果你先建批次、后开计量器，两者就相等。）
#
# </div>

# %% [markdown] slide={"en": "Before any claim of saving: do all recipes train the same?", "zh": "谈节省之前先问：各个配方训练的结果一样吗？"}
# ## 7.3 Equal first / 先看是否相等
#
# <div lang="en">
#
# Before any claim of saving: do the recipes train the same? Two Adam steps on a decoder of two layers; by how much are the weights off, in units of what the two steps have changed? The last row is the recipe that will win.
#
# </div>
# <div lang="zh">
#
# 谈节省之前先问：各个配方训练的结果一样吗？用两层的解码器走两步 Adam，看权重差了多少，以这两步的更新量为单位。最后一行是将要胜出的配方。
#
# </div>


# %%
def weights(recipe, steps=2):
    sizes = {"vocabulary": 256, "hidden": 256, "heads": 8, "layers": 2, "sequence": 128}
    model, optimizer = build(lambda: Decoder(**sizes), recipe)
    start = torch.cat([parameter.detach().flatten().double() for parameter in model.parameters()])
    for _ in range(steps):
        train_step(model, optimizer, random_tokens(8, 128, 256), recipe)
    return torch.cat([p.detach().flatten().double() for p in model.parameters()]), start


# %% slide="result"
checkpoints, offloaded = {"checkpoint": "layers"}, {"offload_activations": True}
freed = {"offload_optimizer": 1.0, "in_backward": True}
tried = [checkpoints, {"micro_batches": 8}, {"attention": "flash"}, {"head_chunk": 128}]
tried += [offloaded, freed, {**checkpoints, **offloaded, **freed}]
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
# Recomputation and offloading change no bit. Micro-batches, flash attention and a head in chunks add up in another order. On this CPU that changes the update by less than a two-thousandth. All recipes compute the same update, so their memory may be compared.
#
# </div>
# <div lang="zh">
#
# 重计算和卸载一个比特也不变。微批次、flash 注意力、把输出头分成小段，都会改变求和的顺序，在这个 CPU 上，更新量的变化不到两千分之一。所有配方算出的更新相同，它们的内存才能放在一起比较。
#
# </div>

# %% [markdown] slide={"en": "277.7 MB. Checkpoints; eight micro-batches; offloaded state; small pages.\n\n**Guess first.** The peak after each: four numbers.", "zh": "277.7 MB。检查点；八个微批次；状态卸载；小页。\n\n**先猜**：每加一样之后的峰值，四个数。"}
# ## 7.4 One at a time / 一次加一样
#
# <div lang="en">
#
# Now to the budget, one technique at a time: a checkpoint for every layer; the batch in eight micro-batches; Adam's state on the lower tier; that state in pages of 1 MiB instead of 16.
#
# **Guess first:** four numbers. What is the peak after each? Start from 277.7.
#
# </div>
# <div lang="zh">
#
# 现在来对付预算，一次加一样：每层一个检查点；批次分成八个微批次；Adam 的状态放到下一级存储；状态的页从 16 MiB 改成 1 MiB。
#
# **先猜**：四个数。每加一样之后，峰值是多少？从 277.7 开始。
#
# </div>

# %% slide="result" minutes=3
my_guesses = [None, None, None, None]  # in MB
steps = {"plain": {}, "+ checkpoints": checkpoints}
steps["+ 8 micro-batches"] = {**checkpoints, "micro_batches": 8}
steps["+ state offloaded"] = {**steps["+ 8 micro-batches"], "offload_optimizer": 1.0}
steps["+ small pages"] = {**steps["+ state offloaded"], "page_bytes": 1 << 20}
found = {name: estimate(make_model, make_batch, Recipe(**way)) for name, way in steps.items()}
lesson_07.what_fills(found, found.values())

# %% [markdown]
# <div lang="en">
#
# Each technique saves a part of what fills the peak **at that moment**:
#
# - Checkpoints: 144 MB, nearly all of the activations.
# - Eight micro-batches: 17 MB. What is left is mostly 16 bytes per parameter, 110 MB, which micro-batches do not reduce.
# - Optimizer state in the lower tier: 14 MB, not 55. The peak has moved into the optimizer's step, where 46.6 of the 55 MB are in memory again. These are three pages of 16 MiB: one is being read, one is being updated, and one is being written back.
# - Small pages: 40 MB. Only the state of the largest parameter, which has 2.1 MB itself, is in memory at once.
#
# That leaves 63.7 MB, which is 3.7 MB too much.
#
# </div>
# <div lang="zh">
#
# 每一样省下的，是**那时**撑起峰值的东西：
#
# - 检查点：144 MB，几乎全是激活值。
# - 八个微批次：17 MB。剩下的是每个参数 16 字节，共 110 MB，微批次再小也低不过它。
# - 优化器状态放到下一级存储：14 MB，而不是 55 MB。峰值移到了优化器更新的时候，55 MB 里有 46.6 MB 又回来了：三个 16 MiB 的页，一页正在取来，一页正在更新，一页正在送走。
# - 小页：40 MB。现在回来的，只是最大的那个参数的状态，参数本身 2.1 MB。
#
# 63.7 MB，还多 3.7 MB。
#
# </div>

# %% [markdown] slide={"en": "63.7 MB; 55 of it weights and gradients.\n\n**Guess first.** Steps in backward, no micro-batches: gradients gone. 36 MB?", "zh": "63.7 MB，其中 55 MB 是权重和梯度。\n\n**先猜**：在反向之中更新，不用微批次：梯度没有了。36 MB？"}
# <div lang="en">
#
# 55 of the 63.7 MB are weights and gradients, and the weights must stay. So a full set of gradients must never exist: let the optimizer step **inside** backward (lesson 05). Then micro-batches are impossible, because they add up gradients before the step. **Guess first:** with the gradients' 27.5 MB gone, is it 36 MB?
#
# </div>
# <div lang="zh">
#
# 63.7 MB 中有 55 MB 是权重和梯度，权重非留不可。那么，绝不能让一整套梯度同时存在：让优化器在反向**之中**更新（第 05 课）。这样就不能再用微批次，因为各个微批次的梯度要先加起来才更新。**先猜**：梯度的 27.5 MB 没有了，峰值会是 36 MB 吗？
#
# </div>

# %% slide="result"
more = {"in backward, whole batch": {**checkpoints, **freed}}
more["+ activations offloaded"] = {**checkpoints, **freed, **offloaded}
found |= {name: estimate(make_model, make_batch, Recipe(**way)) for name, way in more.items()}
lesson_07.what_fills(more, [found[name] for name in more])

# %% [markdown]
# <div lang="en">
#
# 64.2: nothing gained, and everything. The gradients are gone, but without micro-batches a whole layer of eight sequences comes back, 21 MB, beside 7 inputs. Only the peak is where it was; what fills it is another thing, and another technique reduces that. Move what the checkpoints keep to the lower tier, and it fits: 57.9 MB. Measured, under a meter that would stop it at 60:
#
# </div>
# <div lang="zh">
#
# 64.2 MB：好像白忙，其实什么都变了。梯度没有了；可是没有微批次，回来的就是八条序列的一整层，21 MB，旁边还有 7 份输入。峰值的高度没动，撑起它的却换了，而这一样有对付它的办法：把检查点留下的输入也移到下一级存储，就装下了，57.9 MB。在一超过 60 MB 就会拦下的计量器下实测：
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
lesson_07.waterfall_picture(list(found), list(found.values()), peaks, BUDGET, title=title)

# %% [markdown] slide={"en": "57.9 MB: it fits. Take the checkpoints **out** again.\n\n**Guess first.** The peak?", "zh": "57.9 MB，装下了。现在把检查点**拿掉**。\n\n**先猜**：峰值是多少？"}
# ## 7.5 The turn / 转折
#
# <div lang="en">
#
# It fits. Now take the **checkpoints out** again: activations go down a tier as they are made, and nothing is computed twice.
#
# **Guess first:** without checkpoints, what is the peak?
#
# </div>
# <div lang="zh">
#
# 装下了。现在把**检查点拿掉**：激活值一产生就移到下一级存储，什么也不算第二遍。
#
# **先猜**：没有检查点，峰值是多少？
#
# </div>

# %%
without = run(make_model, make_batch, Recipe(**freed, **offloaded))

# %% jupyter={"source_hidden": true} slide="result"
title = "The peak is lower without checkpoints, because only single tensors come back"
meters = {"with checkpoints": stepped.meter, "without checkpoints": without.meter}
timelines(meters, title=title)

# %% [markdown] slide={"en": "Lower, and no FLOPs twice; but 447.7 MB move instead of 128.9.\n\n**Write it**: at how many FLOPs a byte do both cost the same?", "zh": "更低，FLOPs 也不重做；但要搬 447.7 MB，而不是 128.9 MB。\n\n**自己写**：每字节多少 FLOPs 时，两者一样贵？"}
# <div lang="en">
#
# 53.9 MB, 4 less. A checkpoint brings its whole layer back before the first gradient of it is made, 20 MB at once; offload alone brings back one tensor at a time, when it is asked for. A checkpoint on top of offload *raises* the peak. (Its highest moment is the start of backward now, at the logits.)
#
# And the price? Without checkpoints no FLOP is done twice, but 447.7 MB move instead of 128.9. Which is cheaper?
#
# **Exercise 2.** Write `break_even(first, second)`: on a machine that does how many FLOPs while one byte is copied do both take equally long? Each has `flops` and `moved_bytes` (both ways); compute and copies one after the other.
#
# </div>
# <div lang="zh">
#
# 53.9 MB，少 4 MB。检查点会在求出这一层的第一个梯度之前，把整层一起恢复，一下子 20 MB；只用卸载时，取回的是一个一个张量，要用哪个取哪个。在卸载之上再加检查点，峰值反而**升高**。（现在最高的时刻是反向开始时，在 logits 那里。）
#
# 代价呢？没有检查点，一次 FLOP 也不重做，但要搬 447.7 MB，而不是 128.9 MB。哪个更便宜？
#
# **练习 2。** 写出 `break_even(first, second)`：一台机器在拷贝一个字节的时间里做多少次 FLOP，两者才一样快？两者各有 `flops` 和 `moved_bytes`（往返合计）；计算与拷贝一先一后。
#
# </div>


# %% minutes=6
def break_even(first, second):
    return None


lesson_07.check_break_even(break_even)

# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not lesson_07.check_break_even.accepted:

    def break_even(first, second):
        return (first.flops - second.flops) / (second.moved_bytes - first.moved_bytes)


lesson_07.check_break_even(break_even)
### END SOLUTION

# %% slide="result"
both = ({**checkpoints, **freed, **offloaded}, {**freed, **offloaded})
pair = [estimate(make_model, make_batch, Recipe(**way)) for way in both]
break_even(*pair)  # FLOPs a byte

# %% jupyter={"source_hidden": true} slide="result"
lesson_07.draw_break_even(*pair, names=["with checkpoints", "without checkpoints"])

# %% [markdown]
# <div lang="en">
#
# Lesson 04's threshold again. The `laptop` of `RATES`, 100 GFLOP/s beside a disk of 1 GB/s, does 100 FLOPs while it copies a byte: there the checkpoints are cheaper. A slow processor with a fast disk, 20 FLOPs a byte, is better off without. "Which recipe is best" has no answer without a machine.
#
# </div>
# <div lang="zh">
#
# 又是第 04 课的阈值。`RATES` 里的 `laptop`，100 GFLOP/s 配 1 GB/s 的磁盘，拷贝一个字节的时间能做 100 FLOPs：在它上面，用检查点更便宜。处理器慢、磁盘快的机器，每字节 20 FLOPs，就该不用。不说是哪台机器，“哪个配方最好”没有答案。
#
# </div>

# %% [markdown] slide={"en": "What did each of them cost?", "zh": "每一样花了什么代价？"}
# ## 7.6 Every price / 每一样的代价
#
# <div lang="en">
#
# FLOPs and bytes are exact; seconds need a machine's rates, and are an estimate even then.
#
# </div>
# <div lang="zh">
#
# FLOPs 和字节是精确的；秒数要有机器的速率才算得出，即便如此也只是估计。
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
# What the table does not show:
#
# - **Steps in backward** never know the norm of all gradients. So they allow no clipping by that norm, no scaler that skips a step, and no micro-batches.
# - **Optimizer state in the lower tier**: if the lower tier is a host instead of a file, the host's processor does the update, and reads and writes 28 bytes per parameter in its own memory. `RATES` includes this for real devices.
# - **Micro-batches**: a product over one sequence may run at a lower rate than one over eight. The seconds here assume the same rate.
# - **Flash attention** has not been used. At 128 tokens it saves 25 of 278 MB alone, and 3 MB under checkpoints. At 4096 tokens it is the first technique to use (lesson 06).
#
# </div>
# <div lang="zh">
#
# 表里看不到的：
#
# - **在反向之中更新**，就不知道全部梯度的范数：不能按它裁剪，缩放器不能跳过一步，也不能用微批次。
# - **优化器状态放到下一级存储**：下层若是主机而不是文件，更新由主机的处理器来做，每个参数要在主机内存里读写 28 字节。`RATES` 为真实的设备计入了这一项。
# - **微批次**：只有一条序列的矩阵乘法，速率可能低于八条的。这里的秒数假定相同。
# - **flash** 没有用上：128 个 token 时，单用它只从 278 MB 里省 25 MB，有检查点时省 3 MB。4096 个 token 时，它该排第一（第 06 课）。
#
# </div>

# %% [markdown] slide={"en": "Propose, estimate, keep what fits, sort by price.\n\n**Guess first.** Does a search find 57.9 MB, or something cheaper?", "zh": "提出、估计、留下装得下的、按代价排序。\n\n**先猜**：搜索会找到 57.9 MB 的那个，还是更便宜的？"}
# ## 7.7 Let a search find it / 交给搜索
#
# <div lang="en">
#
# You have looked for a recipe by hand. A search does three things: propose recipes, estimate them, keep those that fit and sort them by price. The last is two lines; among the nine of the story:
#
# </div>
# <div lang="zh">
#
# 刚才是手工找配方。搜索只做三件事：提出配方，逐个估计，留下装得下的并按代价排序。最后一件只要两行；先在这一课走过的九个里找：
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
# The first line is the story's recipe: 0.676 s at these rates. The turn comes last but is the lowest. `fit` has estimated 123 recipes. What it passes over, and why nothing is lost:
#
# - what holds too much before the first operator, or in the optimizer's step alone;
# - what adds to a recipe that fits already; but not on top of offloaded activations, where a checkpoint can make it *cheaper*, by moving less (you have just seen it);
# - checkpoints around the first few layers only, where already one costs more than the cheapest found.
#
# The number of micro-batches is found by bisection. `tests/brute_force_fit.py` compares it with all recipes of a grid, on twelve small models: 441 searches, no difference. If nothing fits, it refuses, with the least peak it met:
#
# </div>
# <div lang="zh">
#
# 第一行就是我们走到的配方：按这些速率 0.676 秒。转折的那个排在最后，峰值却最低。`fit` 估计了 123 个配方。它跳过什么，为什么不会漏掉：
#
# - 第一个算子之前、或者光是优化器的更新就占得太多的；
# - 在已经装得下的配方上再加东西的；但激活值已卸载时例外，再加检查点可能因为少搬而**更便宜**（刚才看到了）；
# - 只给前几层加检查点，而给一层加就已经贵过目前最便宜的。
#
# 份数用二分法找。`tests/brute_force_fit.py` 用十二个小模型，拿它与一个网格里的全部配方比较：441 次搜索，没有差别。如果没有一个装得下，它就拒绝，并给出遇到的最低峰值：
#
# </div>

# %%
try:
    those = [each.recipe for each in fitting]
    fit(make_model, make_batch, 40_000_000, recipes=those, progress=False)
except InfeasibleBudget as refused:
    print(refused)

# %% [markdown]
# <div lang="en">
#
# Now move the budget, and the machine. The estimates of 64 recipes are stored; which is the cheapest that fits?
#
# </div>
# <div lang="zh">
#
# 现在拖动预算，再换换机器。64 个配方的估计已经存好：装得下的里面，哪个最便宜？
#
# </div>

# %% slide="result"
lesson_07.draw_recipes(lesson_07.stored_estimates())

# %% tags=["nbval-ignore-output", "shows-picture"]
lesson_07.recipes_playground(lesson_07.stored_estimates())

# %% [markdown] slide={"en": "160 MB, no FLOP more, nothing moved.\n\nWhich single technique?", "zh": "160 MB，FLOPs 不多一次，什么也不搬。\n\n只用哪一样？"}
# ## 7.8 Three budgets / 三个预算
#
# <div lang="en">
#
# Three budgets for the same step. Each asks for an idea; trying at random takes longer than thinking. The check estimates your recipe, and tells what fills the peak where it does not fit.
#
# **Exercise 3.** 160 MB, not one FLOP more than the plain step, nothing moved.
#
# </div>
# <div lang="zh">
#
# 同样的一步，三个预算，各要一个想法；乱试比想清楚更费时间。检查会估计你的配方，装不下时会告诉你是什么撑起了峰值。
#
# **练习 3。** 160 MB，FLOPs 不比基线多一次，也不搬运任何字节。
#
# </div>

# %% minutes=5
recipe = None  # Recipe(...)
lesson_07.check_same_flops(recipe)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
lesson_07.check_same_flops(Recipe(micro_batches=4))
### END SOLUTION

# %% [markdown] slide={"en": "120 MB, nothing moved, clipping kept, at most 1.19 of the FLOPs.\n\nWhose checkpoint is wasted?", "zh": "120 MB，不搬运，要裁剪，FLOPs 至多 1.19 倍。\n\n哪一层的检查点是浪费？"}
# <div lang="en">
#
# **Exercise 4.** 120 MB, nothing moved, at most 1.19 times the plain FLOPs; and the run clips by the norm of all gradients, so they must all be there before the update.
#
# </div>
# <div lang="zh">
#
# **练习 4。** 120 MB，不搬运，FLOPs 至多是基线的 1.19 倍；而且训练要按全部梯度的范数裁剪，所以更新之前，梯度必须到齐。
#
# </div>

# %% minutes=8
recipe = None  # Recipe(...)
lesson_07.check_keeps_clipping(recipe)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
lesson_07.check_keeps_clipping(Recipe(checkpoint="layers", first_blocks=7, micro_batches=8))
### END SOLUTION

# %% [markdown] slide={"en": "50 MB, by any means.\n\nWhat fills the turn's peak?", "zh": "50 MB，什么办法都行。\n\n转折之后的峰值，是什么撑起来的？"}
# <div lang="en">
#
# **Exercise 5.** 50 MB, by any means. Who stops at the story's recipe does not get there.
#
# </div>
# <div lang="zh">
#
# **练习 5。** 50 MB，什么办法都行。停在课里那个配方上的人，到不了。
#
# </div>

# %% minutes=8
recipe = None  # Recipe(...)
lesson_07.check_fifty(recipe)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
least = {"offload_optimizer": 1.0, "in_backward": True, "offload_activations": True}
lesson_07.check_fifty(Recipe(**least, head_chunk=128))
### END SOLUTION

# %% [markdown]
# ## 7.9 In your own code / 实际怎么写
#
# <div lang="en">
#
# The search of this lesson, as a command; `--config` takes the `config.json` of a model, `--plot out.png` draws the way:
#
# ```
# python -m course_lib.budget --hidden 256 --layers 8 --heads 8 --vocabulary 2048 --sequence 128 --batch 8 --precision fp32 --device laptop --budget 60MB
# ```
#
# The same techniques elsewhere:
#
# | technique | not run here |
# |---|---|
# | checkpoints, micro-batches | Hugging Face: `TrainingArguments(gradient_checkpointing=True, gradient_accumulation_steps=8)` |
# | steps in backward | torchtune: `optimizer_in_bwd=True`; PyTorch: `parameter.register_post_accumulate_grad_hook(step)` |
# | offloaded state | DeepSpeed: `"offload_optimizer": {"device": "cpu"}`; torchao: `CPUOffloadOptimizer(parameters, torch.optim.AdamW)` |
# | activations below | torchtune: `enable_activation_offloading=True`; PyTorch: `torch.autograd.graph.save_on_cpu()` |
# | loss in chunks | Liger: `LigerFusedLinearCrossEntropyLoss()` |
#
# </div>
# <div lang="zh">
#
# 本课的搜索也是一条命令；`--config` 接受模型的 `config.json`，`--plot out.png` 把一路怎么走过来画成图：
#
# ```
# python -m course_lib.budget --hidden 256 --layers 8 --heads 8 --vocabulary 2048 --sequence 128 --batch 8 --precision fp32 --device laptop --budget 60MB
# ```
#
# 同样的办法，在别的框架里：
#
# | 办法 | 写法（此处未运行） |
# |---|---|
# | 检查点、微批次 | Hugging Face：`TrainingArguments(gradient_checkpointing=True, gradient_accumulation_steps=8)` |
# | 在反向之中更新 | torchtune：`optimizer_in_bwd=True`；PyTorch：`parameter.register_post_accumulate_grad_hook(step)` |
# | 状态放到下一级存储 | DeepSpeed：`"offload_optimizer": {"device": "cpu"}`；torchao：`CPUOffloadOptimizer(parameters, torch.optim.AdamW)` |
# | 激活值放到下一级存储 | torchtune：`enable_activation_offloading=True`；PyTorch：`torch.autograd.graph.save_on_cpu()` |
# | 损失分成小段 | Liger：`LigerFusedLinearCrossEntropyLoss()` |
#
# </div>

# %% [markdown]
# ## 7.10 Claims and measurements / 说法与实测
#
# <div lang="en">
#
# Four sentences that people meet, tried on this lesson's step.
#
# </div>
# <div lang="zh">
#
# 四句常见的说法，用本课的训练步来检验。
#
# </div>

# %%
alone = {"micro_batches": {"micro_batches": 8}, "offloaded": offloaded}
alone["both"] = {**checkpoints, **offloaded}
alone = {name: estimate(make_model, make_batch, Recipe(**way)) for name, way in alone.items()}
alone["checkpoints"] = found["+ checkpoints"]

# %% slide="result"
what_you_may_have_read("07", *lesson_07.figures_of_claims(plain, alone, pair[0]))

# %% [markdown] slide={"en": "The ledger, complete for one device.", "zh": "账本：一台设备上的全部各行。"}
# ## 7.11 The ledger / 账本
#
# <div lang="en">
#
# The same step of the same decoder, each technique alone, and at last all together:
#
# </div>
# <div lang="zh">
#
# 同一个解码器的同一步，每种技术单独用，最后是合用的一行：
#
# </div>

# %% slide="result"
ledger(
    "07", "all offloaded, checkpoints, steps in backward", pair[0], moved_bytes=pair[0].moved_bytes
)

# %% [markdown] slide={"en": "Look at what fills the peak, then choose.\n\nCheckpoints on top of offload: fewer bytes moved, a higher peak.", "zh": "先看是什么撑起了峰值，再选。\n\n卸载之上加检查点：搬得少，峰值高。"}
# ## 7.12 Summary / 小结
#
# <div lang="en">
#
# - A step's peak can be known to the byte before a byte is taken: run the step on symbolic tensors, twice.
# - Look at what fills the peak, then choose. Savings don't add up; the technique that did nothing yesterday may be the next one.
# - A checkpoint on top of offload moves less and peaks higher: whole layers come back. Which of the two is cheaper, the machine decides, here at 30.3 FLOPs a byte.
# - Every byte has a price: FLOPs, bytes moved, clipping, the host's time.
# - A search proposes, estimates, sorts; what it passes over must be true.
#
# **Next:** [lesson 08](08_beyond_one_gpu.ipynb), beyond one device.
#
# </div>
# <div lang="zh">
#
# - 一步的峰值，不占内存就能知道，精确到字节：让它在符号张量上跑两遍。
# - 先看是什么撑起了峰值，再做选择。节省不能相加；刚才没有用的办法，下一步也许正好用上。
# - 在卸载之上加检查点，搬得少了，峰值却更高：回来的是整层。两者哪个便宜由机器决定，这里的分界是每字节 30.3 FLOPs。
# - 每个字节都有代价：FLOPs、搬运、裁剪，还有主机的时间。
# - 搜索就是提出、估计、排序；它跳过的，必须真的可以跳过。
#
# **下一步**：[第 08 课](08_beyond_one_gpu.ipynb)，不止一台设备。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **Sources.** The techniques' own are in lessons 01 to 06. Rates: NVIDIA's datasheets of the H100 and H200 and its Ada whitepaper, dense figures, at 40%: Grattafiori et al. 2024, *The Llama 3 Herd of Models*, arXiv:2407.21783, reached 38 to 43% on H100s; PCIe 4.0 and 5.0, 16 lanes, one direction, as nvbandwidth measures them; host memory of a desktop with two channels of DDR5-5600 and of a Xeon 8480C with eight of DDR5-4800; device memory as nvidia-smi shows it. Rajbhandari et al. 2020, *ZeRO*, arXiv:1910.02054 (16 bytes per parameter); Ren et al. 2021, *ZeRO-Offload*, arXiv:2101.06840 (optimizer on the host); Lv et al. 2023, *LOMO*, arXiv:2306.09782 (steps in backward).
#
# </div>
# <div lang="zh">
#
# **出处。** 各项技术的出处见第 01 到 06 课。速率：NVIDIA 的 H100、H200 数据手册和 Ada 白皮书，取稠密算力的 40%：Grattafiori et al. 2024，*The Llama 3 Herd of Models*，arXiv:2407.21783，在 H100 上达到 38% 到 43%；PCIe 4.0 和 5.0，16 通道，单向，取 nvbandwidth 测得的值；主机内存分别取双通道 DDR5-5600 的台式机和八通道 DDR5-4800 的 Xeon 8480C；设备内存取 nvidia-smi 显示的值。Rajbhandari et al. 2020，*ZeRO*，arXiv:1910.02054（每个参数 16 字节）；Ren et al. 2021，*ZeRO-Offload*，arXiv:2101.06840（优化器在主机上）；Lv et al. 2023，*LOMO*，arXiv:2306.09782（在反向之中更新）。
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
# ## 7.13 The other fields / 其余的字段
#
# <div lang="en">
#
# `Recipe` has more fields than this lesson turned:
#
# </div>
# <div lang="zh">
#
# `Recipe` 的字段比本课动过的多：
#
# </div>

# %%
lesson_07.recipe_fields(others=True)

# %% [markdown]
# ## 7.14 Ninety-nine million into 550 MB / 九千九百万装进 550 MB
#
# <div lang="en">
#
# A decoder of 99 million parameters, two sequences of 384 tokens; its weights alone are 396 MB. The plain step takes 2,793 MB; into 550?
#
# </div>
# <div lang="zh">
#
# 一个 9900 万参数的解码器，两条 384 个 token 的序列，光是权重就有 396 MB。基线要 2,793 MB；550 MB 装得下吗？
#
# </div>


# %%
def large_model(layers=19):
    return Decoder(vocabulary=8192, hidden=640, heads=40, layers=layers, sequence=384)


def two_sequences():
    return random_tokens(2, 384, 8192)


flash = {"attention": "flash"}
ways = [{}, checkpoints, {**flash, **checkpoints}, {**flash, **checkpoints, **freed}]
ways += [{**flash, **checkpoints, **freed, **offloaded}, {**flash, **freed, **offloaded}]
large = [estimate(large_model, two_sequences, Recipe(**way)) for way in ways]
rows = [(str(e.recipe), round(e.peak_bytes / 1e6), round(e.moved_bytes / 1e6)) for e in large]
table(["recipe", "peak (MB)", "moved (MB)"], rows)

# %% [markdown]
# <div lang="en">
#
# The fourth recipe fits: 521 MB, of which 396 are weights. (With 40 heads of 16 features, more and narrower than usual, the probabilities are large: that is what flash forgets.) The turn gains nothing here: with the activations below, 501 MB with checkpoints and without. The peak is in the optimizer's step now; without checkpoints only more bytes move, 2,859 MB instead of 1,663.
#
# </div>
# <div lang="zh">
#
# 第四个配方装得下：521 MB，其中 396 MB 是权重。（40 个头、每头 16 维，比通常的多而窄，概率 P 很大，flash 忘掉的就是它。）那个转折在这里没有好处：激活值移到下一级存储之后，有没有检查点都是 501 MB。峰值已经移到优化器更新的时候；不用检查点，只是搬得更多，2,859 MB，而不是 1,663 MB。
#
# </div>

# %% [markdown]
# ## 7.15 Where two micro-batches take more than one / 两个微批次反而更多
#
# <div lang="en">
#
# The same decoder with six layers, 35 million parameters: flash and checkpoints, then two micro-batches.
#
# </div>
# <div lang="zh">
#
# 同样的解码器，只有六层，3500 万参数：flash 加检查点，再分成两个微批次。
#
# </div>

# %%
way = {**flash, **checkpoints}
cut = [Recipe(**way, micro_batches=m) for m in (1, 2)]
halves = [estimate(lambda: large_model(6), two_sequences, each) for each in cut]
lesson_07.what_fills(["1", "2"], halves)

# %% [markdown]
# <div lang="en">
#
# Both peak at the very end of backward, when no activation is left and the last gradient is computed, that of the embedding, 21 MB. With one micro-batch, all other gradients are in memory, 119 MB. With two micro-batches, all gradients of the first one are in memory, 140 MB, and the embedding's gradient of the second one is added to them. Micro-batches save memory where activations fill the peak, as on the decoder of this lesson.
#
# </div>
# <div lang="zh">
#
# 两种情况的峰值都在反向的最后：激活值一个不剩，正在算最后一个梯度，即嵌入的梯度，21 MB。只有一个微批次时，在场的是其余的梯度，119 MB。有两个微批次时，第一个的梯度已经全在那里，共 140 MB，第二个的嵌入梯度又添在旁边。占满峰值的若是激活值，微批次就能省内存，本课的解码器正是这样。
#
# </div>

# %% [markdown]
# ## 7.16 Seven and seventy billion / 七十亿与七百亿
#
# <div lang="en">
#
# The same functions on models that no machine here could hold: a decoder of 7 billion parameters (6.6 billion, exactly) and one of 70 billion (64.7 billion), bf16 with fp32 master weights, Adam, one sequence of 4096 tokens. What is offloaded goes to the host's memory, and the host does the update (lesson 04): in each step the gradients are copied to the host and the parameters to the GPU, 4 bytes per parameter in total. The state itself stays on the host.
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


small_steps = {"precision": "bf16", "attention": "flash", "checkpoint": "layers"}
ways = {
    "plain": Recipe(precision="bf16"),
    "flash, checkpoints": Recipe(**small_steps),
    "+ state on the host": Recipe(**small_steps, offload_optimizer=1.0),
    "+ steps in backward": Recipe(**small_steps, offload_optimizer=1.0, in_backward=True),
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
table(["model", "recipe", "peak (GB)", *devices, "GB moved", "time on the smallest (s)"], rows)

# %% [markdown]
# <div lang="en">
#
# 7 billion parameters train on a device of 24 GB, with 79 GB of state in the host's memory and 26 GB moved in every step. 70 billion, 129 GB of parameters alone, train on one of 141 GB: 137 GB at the peak, and 777 GB of state on the host.
#
# Can, not should: practice would first train fewer parameters (LoRA) or keep a smaller state (8 bits, Adafactor). The seconds are at stated rates: 40% of the datasheet's FLOPs, four fifths of the link or more, and 28 bytes per parameter through the memory of one host processor. On the H200, two thirds of the large model's step are copies and the host's update. Nothing here counts CUDA's context, workspace, rounding or fragmentation: 137 of the device's 150.8 GB leave them 9%. A larger batch spreads the copies over more tokens; lesson 08 the bytes over more devices.
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

# %%
from course_lib.teaching import text

long = [
    estimate(
        lambda: Decoder(vocabulary=8192, hidden=640, heads=40, layers=2, sequence=4096),
        lambda: random_tokens(1, 4096, 8192),
        Recipe(attention=way),
    )
    for way in ("standard", "flash")
]
short = estimate(lambda: large_model(6), two_sequences, Recipe())
short_flash = estimate(lambda: large_model(6), two_sequences, Recipe(**flash))

# %%
seven = giants["7 B", "+ steps in backward"]
peak, moved = f"{seven.peak_bytes / 1e9:.1f} GB", f"{seven.moved_bytes / 1e9:.0f} GB"
lesson_07.older_claims(
    f"{halves[0].peak_bytes / 1e6:,.0f} → {halves[1].peak_bytes / 1e6:,.0f} MB",
    text("{peak}, {moved} moved", peak=peak, moved=moved),
    f"{short_flash.flops / short.flops:.3f} / {long[1].flops / long[0].flops:.3f}",
)

# %% [markdown]
# ## 7.17 Fewer numbers trained, fewer remembered / 少训练一些，少记一些
#
# <div lang="en">
#
# In practice the first answer to "it does not fit" is often another: train fewer numbers, or remember less of each. Adapters (LoRA, lesson 01) freeze the weights, and what is frozen has neither gradient nor state; 8-bit Adam keeps 2 bytes of state a parameter instead of 8; Adafactor keeps a row and a column of each matrix. They are other trainings, so they stand in no list of `fit` unless `base` names them.
#
# </div>
# <div lang="zh">
#
# 实践中，遇到“装不下”，常常先走另一条路：少训练一些数，或者每个数少记一点。适配器（LoRA，第 01 课）冻结权重，冻结的部分既没有梯度，也没有状态；8 位 Adam 的状态每个参数 2 字节，而不是 8 字节；Adafactor 只为每个矩阵记一行一列。训练本身变了，所以 `fit` 不会自己列出它们，除非写在 `base` 里。
#
# </div>

# %%
rows = []
for optimizer in ("adam", "adam8bit", "adafactor", "sgd"):
    each = estimate(make_model, make_batch, Recipe(optimizer=optimizer, **checkpoints))
    state = each.at_peak.get("optimizer", 0) / parameters
    rows.append((f"`{optimizer}`", round(each.peak_bytes / 1e6, 1), round(state, 2)))
table(["`optimizer`", "peak (MB)", "state (bytes per parameter)"], rows)

# %% [markdown]
# ## 7.18 On a GPU / 在 GPU 上
#
# <div lang="en">
#
# On a GPU the allocator counts for itself: it rounds up, and operators take workspace. The experiment runs three recipes of a decoder with 1.28 billion parameters, and compares the estimate with the meter and with the allocator. If you have a GPU, this cell measures on it. Otherwise it shows what an H200 measured. All three estimates equal the meter to the byte, at 45.3, 21.1 and 5.0 GB. The allocator's peak is 68 to 69 MB higher: cuBLAS keeps workspaces of 65 MiB.
#
# </div>
# <div lang="zh">
#
# 在 GPU 上，分配器另有一本账：它会向上取整，算子还要占用工作区。这个实验用一个 12.8 亿参数的解码器运行三个配方，把估计值与计量器、与分配器的记录相比较。有 GPU 时，这个单元格会现场测量；没有 GPU，就显示在一块 H200 上记录的数据。三个估计值都与计量器逐字节相等，分别是 45.3、21.1 和 5.0 GB。分配器的峰值要高 68 到 69 MB，因为 cuBLAS 一直占着 65 MiB 的工作区。
#
# </div>

# %% tags=["nbval-ignore-output", "shows-device"]
from course_lib.lessons import on_gpu

on_gpu("07")
