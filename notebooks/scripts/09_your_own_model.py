# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] slide={"en": "A Llama that this course did not write. You have 200 MB for a step.\n\nDoes all this hold for it, too?", "zh": "这里有一个别人写的 Llama，训练一步只有 200 MB 可用。\n\n换成这样的模型，前面学的还成立吗？"}
# # 9 Does it hold for your own model? / 换成你自己的模型，还成立吗？
#
# <div lang="en">
#
# Here is a small Llama that the course did not write. For one Adam step on four passages of 128 characters you have 200 MB. Does the step fit, and if not, what has to change?
#
# This page is a project. It has three blanks: a model, a batch, a loss. They come filled, so that everything runs at once; what you found on the course's decoder is tried on a model that the course did not write. Then you empty them and put in your own.
#
# </div>
# <div lang="zh">
#
# 这里有一个小 Llama，是别人写的。你有 200 MB 内存，要用四段 128 个字符的文本做一步 Adam。装得下吗？如果装不下，要改什么？
#
# 这一页是一个项目。它有三个空位：模型、批次、损失。一开始都填好了，可以马上运行：你在课程的解码器上得到的结论，要在一个不是这门课写的模型上再检验一遍。然后把空位清空，填上你自己的。
#
# </div>

# %%
from course_lib.teaching import language

language()

# %% [markdown]
# <div lang="en">
#
# **Goals** (70 minutes). Give any model to the tools of this course, and know what is wrong if they don't take it. Predict a step from a configuration alone. Choose techniques by what fills the peak, and show that they train the same. Hand in your own model with its numbers.
#
# **What to know before**: lesson 07.
#
# </div>
# <div lang="zh">
#
# **目标**（70 分钟）：把任何模型交给这门课的工具，行不通时知道问题出在哪里；只凭一份配置预测一步要多少内存；看清是什么撑起峰值，再选办法，并证明训练结果不变；最后交上你自己的模型和它的数。
#
# **预备知识**：第 07 课。
#
# </div>

# %%
import json

import torch
from torch.nn import functional as F

from course_lib.budget import Recipe, build, estimate, fit, run, train_step
from course_lib.budget.__main__ import main as budget_command
from course_lib.lessons import lesson_09, what_you_may_have_read
from course_lib.lessons.ledger import whole_ledger
from course_lib.teaching import predictions, table

BUDGET = 200_000_000  # bytes
STEPS = 3  # set 200, and it is minutes

# %% [markdown]
# ## 9.1 Three blanks / 三个空位
#
# <div lang="en">
#
# Each blank is a function. `make_model()` returns a new model in fp32; `make_batch(step)` the batch of that step, as tensors, alone or in tuples and dictionaries; `loss_sum(model, batch)` the sum of the losses and their number (lesson 05 said why a mean will not do). Filled:
#
# </div>
# <div lang="zh">
#
# 每个空位是一个函数。`make_model()` 返回一个新的 fp32 模型；`make_batch(step)` 返回那一步的批次，可以是张量，也可以是装着张量的元组或字典；`loss_sum(model, batch)` 返回损失之和与损失的个数（为什么不能用平均值，见第 05 课）。填好是这样：
#
# </div>


# %% slide="code"
def make_model():  # transformers' LlamaForCausalLM, from a configuration of nine lines
    return lesson_09.model_of(lesson_09.LLAMA)


def make_batch(step=0):  # four passages of the course's own English, a character a token
    return lesson_09.passages(step)


print(type(make_model()).__name__, json.dumps(lesson_09.LLAMA, indent=1))
{name: tuple(tensor.shape) for name, tensor in make_batch().items()}

# %% [markdown]
# <div lang="en">
#
# (If the first line says `Decoder`, transformers is missing: `pip install transformers`. Until then the course's decoder stands in, and the numbers are others.)
#
# **Exercise 1.** The third blank is yours. A label of −100 is not predicted, and the logits at a place predict the *next* token. `model(batch["input_ids"]).logits` has the shape (batch, tokens, vocabulary).
#
# </div>
# <div lang="zh">
#
# （如果第一行显示 `Decoder`，说明没有安装 transformers：`pip install transformers`。装好之前由课程的解码器顶替，数值会不同。）
#
# **练习 1。** 第三个空位由你来填。标签为 −100 的不预测；某个位置的 logits 预测的是**下一个** token。`model(batch["input_ids"]).logits` 的形状是（批次，token，词表）。
#
# </div>


# %% minutes=8
def loss_sum(model, batch):
    return None  # the sum of the losses, and how many there are


lesson_09.check_loss_sum(loss_sum)

# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not lesson_09.check_loss_sum.accepted:

    def loss_sum(model, batch):
        logits = model(batch["input_ids"]).logits[:, :-1]
        targets = batch["labels"][:, 1:]
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return losses, (targets != -100).sum()


lesson_09.check_loss_sum(loss_sum)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# transformers' own loss does the same (micro-batches are weighed by their labels), so that its models may leave the third blank empty.
#
# </div>
# <div lang="zh">
#
# transformers 自带的损失做的是同一件事（各份按标签数加权），所以它的模型可以让第三个空位空着。
#
# </div>


# %% [markdown] slide={"en": "**Guess first.** From nine lines of configuration: how many parameters? What is the peak of a step?", "zh": "**先猜**：只凭九行配置，有多少参数？一步的峰值是多少？"}
# ## 9.2 Predict from the configuration / 只凭配置来预测
#
# <div lang="en">
#
# Nobody builds a model to find out that it does not fit. Start from the nine lines.
#
# **Exercise 2.** `parameters(config)`: how many does a Llama have? Matrices without biases; each layer has attention (its queries, keys, values and output), a gated network (three matrices) and two norms; one norm comes last; embedding and head may be one matrix. It is tried on larger ones too.
#
# </div>
# <div lang="zh">
#
# 没有谁会先把模型建出来，再发现装不下。就从这九行开始。
#
# **练习 2。** `parameters(config)`：一个 Llama 有多少参数？矩阵都没有偏置；每层有注意力（查询、键、值、输出）、一个门控网络（三个矩阵）和两个归一化；最后还有一个归一化；嵌入和输出头可能是同一个矩阵。检查时也会用更大的配置来试。
#
# </div>


# %% minutes=9
def parameters(config):
    return None


lesson_09.check_parameters(parameters)

# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not lesson_09.check_parameters.accepted:

    def parameters(config):
        hidden, width = config["hidden_size"], config["intermediate_size"]
        head = hidden // config["num_attention_heads"]
        keys = hidden * head * config["num_key_value_heads"]
        layer = 2 * hidden**2 + 2 * keys + 3 * hidden * width + 2 * hidden
        tables = 1 if config["tie_word_embeddings"] else 2
        tables *= config["vocab_size"] * hidden
        return config["num_hidden_layers"] * layer + hidden + tables


lesson_09.check_parameters(parameters)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# Four numbers a parameter, of 4 bytes each (lesson 01): weight, gradient and Adam's two. **Guess first:** that is 498.3 MB. How much more does the step take?
#
# </div>
# <div lang="zh">
#
# 每个参数四个数，各 4 字节（第 01 课）：权重、梯度，以及 Adam 的两个矩。**先猜**：这是 498.3 MB。一步总共还要多占多少？
#
# </div>

# %% slide="result"
own_loss = None if lesson_09.has_transformers() else lesson_09.decoder_loss
options = {"loss_sum": own_loss}
plain = estimate(make_model, make_batch, Recipe(), **options)
count = parameters(lesson_09.LLAMA) or 0
rows = [("16 bytes per parameter", 16 * count), ("estimate for the step", plain.peak_bytes)]
table(["", "bytes"], rows)

# %% [markdown]
# <div lang="en">
#
# Does a real step need what was predicted? `own_model` tries all three blanks: it builds the model, predicts a step, runs it and compares the two, and says what is wrong.
#
# </div>
# <div lang="zh">
#
# 真的走一步，与预测的一样吗？`own_model` 把三个空位都试一遍：先建模型，再预测一步，然后真的走一步，对照两者，有什么不对就说出来。
#
# </div>

# %% slide="result" minutes=1
lesson_09.own_model(make_model, make_batch, own_loss)

# %% [markdown] slide={"en": "609.1 MB. Checkpoints, four micro-batches, offloaded state, steps in backward: one of them alone.\n\n**Guess first.** Which saves most? Which saves nothing?", "zh": "609.1 MB。检查点、四个微批次、状态卸载、在反向中更新，只用其中一样。\n\n**先猜**：哪一样省得最多？哪一样等于没省？"}
# ## 9.3 What fills the peak / 峰值是什么撑起来的
#
# <div lang="en">
#
# 609.1 MB: more by 110.8, and still far from 498.3 plus activations. At the peak, early in backward, the gradients are not there yet.
#
# **Guess first:** take one technique alone: a checkpoint for each layer, four micro-batches, the state on the lower tier, steps in backward. Which saves most? Which saves nothing?
#
# </div>
# <div lang="zh">
#
# 609.1 MB：多出 110.8 MB，却远小于 498.3 MB 再加上激活值。峰值出现在反向刚开始的时候，那时梯度还没有。
#
# **先猜**：只用一样办法：每层一个检查点、批次拆成四个微批次、状态放到下一级存储、在反向中更新。哪一样省得最多？哪一样等于没省？
#
# </div>

# %% slide="result" minutes=3
my_guesses = [None, None, None, None]  # in MB
ways = {
    "plain": {},
    "checkpoints": {"checkpoint": "layers"},
    "4 micro-batches": {"micro_batches": 4},
}
ways |= {"state offloaded": {"offload_optimizer": 1.0}, "steps in backward": {"in_backward": True}}
three = {"checkpoint": "layers", "offload_optimizer": 1.0, "in_backward": True}
ways["all three"] = three
found = {
    name: estimate(make_model, make_batch, Recipe(**way), **options) for name, way in ways.items()
}
lesson_09.draw_techniques(found, BUDGET)

# %% [markdown]
# <div lang="en">
#
# The largest part is Adam's state, 249 MB, so that moving it saves most; checkpoints, the technique that everybody knows, save 92. Steps in backward save nothing, alone: the gradients that they free were not there at the peak. With checkpoints the peak moves to the end of backward, where they are; only then does it pay.
#
# That is the lesson of 07 once more, on a model that 07 never saw: look, then choose. Three techniques, one for each part, and 171.6 MB.
#
# </div>
# <div lang="zh">
#
# 最大的一块是 Adam 的状态，249 MB，所以把它移走省得最多；人人都知道的检查点只省 92 MB。单用“在反向中更新”等于没省：它放掉的梯度，在峰值那一刻本来就不在。加了检查点，峰值移到反向的末尾，梯度都在那里，这时它才有用。
#
# 这正是第 07 课的结论，换了一个第 07 课没见过的模型：先看，再选。三样办法，各对付一块，降到 171.6 MB。
#
# </div>

# %% [markdown] slide={"en": "Before any claim of saving: the same steps, plain and with all three techniques.\n\n**Guess first.** The same weights, to the last bit?", "zh": "谈节省之前：同样的几步，一边什么都不用，一边三样全用。\n\n**先猜**：权重会逐比特相等吗？"}
# ## 9.4 Equal first / 先看是否相等
#
# <div lang="en">
#
# Before any claim of saving: the same steps, from the same start, on the same passages (half as long, since these run for real), plain and with all three techniques. **Guess first:** are the weights the same, to the last bit? In lesson 07 they were.
#
# </div>
# <div lang="zh">
#
# 谈节省之前：从同样的起点、用同样的文本（只取一半长，因为这几步要真的跑）走同样的几步，一边什么都不用，一边三样全用。**先猜**：权重会逐比特相等吗？第 07 课里是相等的。
#
# </div>


# %% slide="code"
def train(recipe, steps, length):
    model, optimizer = build(make_model, recipe, lr=1e-3)
    start, losses = weights(model), []
    for step in range(steps):
        batch = lesson_09.passages(step, length=length)
        losses.append(float(train_step(model, optimizer, batch, recipe, **options).loss))
    return weights(model), losses, (weights(model) - start).norm()


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).double()


# %% slide="result"
rows, losses = [], {}
for length, steps in ((64, STEPS), (65, 1)):
    expected, losses["plain"], update = train(Recipe(), steps, length)
    lean, losses["all three"], _ = train(Recipe(**three), steps, length)
    error = ((lean - expected).norm() / update).item()
    shown = "0" if error == 0 else "< 0.0005" if error < 5e-4 else "✗"
    rows.append((4 * (length - 1), steps, shown))
    if steps == STEPS:
        curves = dict(losses)
table(["tokens predicted", "steps", "difference of the weights (in units of the update)"], rows)

# %% [markdown]
# <div lang="en">
#
# Not this time, and then, with one character more in each passage, yes. Why? A step divides the summed loss by the number of tokens. Plain, the gradients are divided at the end; with steps in backward there is no end, so that the loss is divided before. 4 × 63 = 252 is no power of 2: division rounds, here or there, and the last digits differ. 4 × 64 = 256 is one, as 1024 was in lesson 07, and nothing is rounded. What is left is less than a two-thousandth of the update: on this CPU both train the same. The losses of the first row, one over the other:
#
# </div>
# <div lang="zh">
#
# 这一次不相等；每段文本多取一个字符，又相等了。为什么？一步要把损失之和除以 token 数。基线在最后才除各个梯度；在反向中更新，没有“最后”可言，只好先除损失。4 × 63 = 252 不是 2 的幂，除法要舍入，先除后除，末几位就不同。4 × 64 = 256 是 2 的幂，第 07 课的 1024 也是，所以不舍入。剩下的差别不到更新量的两千分之一：在这个 CPU 上，两者训练的结果一样。把第一行的损失画在一起：
#
# </div>

# %% slide="result"
lesson_09.draw_losses(curves)

# %% [markdown] slide={"en": "200 MB.\n\n**Write a recipe**, and run it under a meter that stops it at 200 MB.", "zh": "200 MB。\n\n**写一个配方**，在超过 200 MB 就会拦下的计量器下运行。"}
# ## 9.5 By hand, then by search / 先自己配，再让搜索来配
#
# <div lang="en">
#
# **Exercise 3.** Write a recipe for 200 MB that uses another set of techniques than the three above, and keeps fp32 and Adam. (`Recipe`'s fields: lesson 07, section 7.2. Each try is an estimate, half a second.)
#
# </div>
# <div lang="zh">
#
# **练习 3。** 为 200 MB 写一个配方，所用的技术不能正好是上面那三种；fp32 和 Adam 不变。（`Recipe` 有哪些字段，见第 07 课 7.2 节。每试一次就是一次估计，半秒钟。）
#
# </div>

# %% minutes=8
recipe = None  # Recipe(...)
lesson_09.check_recipe(recipe)

# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not lesson_09.check_recipe.accepted:
    below = {"offload_optimizer": 1.0, "offload_activations": True}
    recipe = Recipe(in_backward=True, **below)
lesson_09.check_recipe(recipe)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# Predicted beside measured, under a meter that would stop the step at 200 MB:
#
# </div>
# <div lang="zh">
#
# 预测与实测并列；超过 200 MB，计量器就会把这一步拦下：
#
# </div>

# %% slide="result"
recipe = recipe or Recipe(**three)
predicted = estimate(make_model, make_batch, recipe, **options).peak_bytes
taken = run(make_model, make_batch, recipe, budget_bytes=BUDGET, **options)
predictions([("your recipe", predicted, taken.meter.peak_bytes)], unit="bytes")

# %% [markdown] slide={"en": "**Guess first.** `fit` searches for the cheapest recipe in 200 MB.\n\nWhat can still be left out of the three?", "zh": "**先猜**：`fit` 在 200 MB 之内找最便宜的配方。\n\n那三样里，还能省掉什么？"}
# <div lang="en">
#
# Which recipe is the cheapest? Two techniques are necessary. The weights and all gradients together take 249 MB, and so does the state, so each gradient must be released as soon as it has been used, and the state must be offloaded. That leaves the activations. With all three techniques, 28 of the 200 MB are still unused. **Guess first:** what can still be left out?
#
# </div>
# <div lang="zh">
#
# 哪个配方最便宜？有两种技术非用不可，因为权重加全部梯度是 249 MB，状态也是 249 MB。所以每个梯度用完就要释放，状态必须卸载。剩下的是激活值。三种技术全用时，200 MB 里还有 28 MB 没用上。**先猜**：还能省掉什么？
#
# </div>

# %% slide="result"
forced = Recipe(attention=None, offload_optimizer=1.0, in_backward=True)
fit(make_model, make_batch, BUDGET, base=forced, progress=False, **options)

# %% [markdown]
# <div lang="en">
#
# Two of the eleven checkpoints can be left out. The backward pass begins with the last layers, so what they keep is soon released, and the peak comes later. That is why the search leaves the last two layers without checkpoints. The step then takes 0.118 TFLOPs; with checkpoints on all eleven layers it takes 0.123. (transformers has an option of this kind, `every_n_layers`, but it spreads the checkpoints over all layers; lesson 02 said what that costs.) The second recipe chooses what to keep by a schedule (lesson 03). The last one is the solution of exercise 3: it needs no more FLOPs than the plain step, but moves nearly twice as many bytes as the others. Which recipe is best depends on the machine: see the break-even of lesson 07.
#
# </div>
# <div lang="zh">
#
# 十一个检查点里，还能省掉两个。反向从最后几层开始，它们保存的东西很快就用完并释放了，而峰值来得更晚。所以搜索让最后两层不设检查点，这样一步需要 0.118 TFLOPs；如果十一层都设检查点，就要 0.123 TFLOPs。（transformers 也有一个类似的参数 `every_n_layers`，不过它把检查点分散到所有的层，这样做的代价第 02 课说过。）第二行按调度来选择保留什么（第 03 课）。最后一行就是练习 3 的答案，FLOPs 不比基线多，搬运的字节却是其他几行的将近两倍。哪个配方最好要看机器，见第 07 课的平衡点。
#
# </div>

# %% [markdown] slide={"en": "Llama 3 8B: 128 GB at 16 bytes per parameter.\n\n**Guess first.** A step of 4096 tokens in 80 GB? In 24?", "zh": "Llama 3 8B：每个参数 16 字节，就是 128 GB。\n\n**先猜**：4096 个 token 的一步，80 GB 装得下吗？24 GB 呢？"}
# ## 9.6 Larger, by configuration alone / 更大的模型，只凭配置
#
# <div lang="en">
#
# Nothing above took the size of the model into account. Here is Llama 3 8B, from its published configuration: 4096 tokens, bf16 with fp32 master weights, Adam. 16 bytes per parameter are 128 GB. **Guess first:** can it be trained on one card of 80 GB, with the host's memory below? On one of 24?
#
# In a shell it is one line:
#
# ```
# python -m course_lib.budget --config llama_3_8b.json --sequence 4096 --batch 1 --device H100 --quick
# ```
#
# </div>
# <div lang="zh">
#
# 上面所做的一切，都与模型大小无关。下面是 Llama 3 8B，取自它公开的配置：4096 个 token，bf16，主权重 fp32，Adam。每个参数 16 字节，就是 128 GB。**先猜**：下层是主机内存，一块 80 GB 的卡能训练它吗？24 GB 的呢？
#
# 在终端里只要一行：
#
# ```
# python -m course_lib.budget --config llama_3_8b.json --sequence 4096 --batch 1 --device H100 --quick
# ```
#
# </div>

# %% slide="code" minutes=3
config = str(lesson_09.FOLDER / "llama_3_8b.json")
sizes = ["--config", config, "--sequence", "4096", "--batch", "1"]
budget_command([*sizes, "--device", "H100", "--quick"])

# %% [markdown]
# <div lang="en">
#
# 49 GB, and two fifths of the card remain: PyTorch's attention keeps no scores, and the optimizer's state goes to the host. The same line with other devices, and with another configuration:
#
# | model | device, GB | recipe | tensors, GB | reserved, GB | moved, GB |
# |---|---|---|---|---|---|
# | Llama 3 8B | H100, 85.5 | state offloaded | 49.0 | 50.3 | 32.1 |
# | Llama 3 8B | RTX 4090, 25.8 | state and activations offloaded, steps in backward | 22.4 | 24.4 | 85.1 |
# | Mixtral 8x7B | H200, 150.1 | state offloaded, checkpoints, steps in backward | 98.7 | 102.9 | 186.8 |
#
# The first column of bytes counts the tensors. The second column is what PyTorch's allocator would reserve for them by its rules (lesson 01, in depth). It must fit, with what CUDA keeps for itself. On the RTX 4090 only 0.8 GB are left. Where less than 5% is left, the command shows another recipe: with the head in chunks of 512 tokens, 4.1 GB are left. How far can you trust these columns? No GPU ran these steps. Of 165 smaller steps on an H200, 153 took the estimated bytes of tensors exactly, and the other estimates, except one, were at most 12 kB too high. The allocator reserved up to 9% more than predicted (`docs/gpus.md`).
#
# </div>
# <div lang="zh">
#
# 49 GB，卡上还剩五分之二：PyTorch 的注意力不保存分数，优化器状态放到了主机上。同一行命令，换几种设备，再换一份配置：
#
# | 模型 | 设备（GB） | 配方 | 张量（GB） | 已预留（GB） | 搬运（GB） |
# |---|---|---|---|---|---|
# | Llama 3 8B | H100，85.5 | 状态卸载 | 49.0 | 50.3 | 32.1 |
# | Llama 3 8B | RTX 4090，25.8 | 状态和激活值卸载，在反向中更新 | 22.4 | 24.4 | 85.1 |
# | Mixtral 8x7B | H200，150.1 | 状态卸载，检查点，在反向中更新 | 98.7 | 102.9 | 186.8 |
#
# 前一列字节统计的是张量。后一列是 PyTorch 的分配器按它的规则要为它们预留多少（第 01 课，深入）。要装得下的是后一列，再加上 CUDA 自己占用的部分。RTX 4090 上只剩 0.8 GB。剩下的不到 5% 时，命令会再给出一种配方：输出头按 512 个 token 一小段来算，就剩 4.1 GB。这两列有多可信？表里的这些训练步没有在 GPU 上运行过。在一块 H200 上运行过 165 个较小的训练步，其中 153 个的张量与估计逐字节相等，其余的估计除一个以外最多偏高 12 kB；分配器预留的最多比预测多 9%（`docs/gpus.md`）。
#
# </div>

# %% [markdown]
# ## 9.7 On your GPU / 在你的 GPU 上
#
# <div lang="en">
#
# On a machine with a GPU, `--device this --check` measures the machine's rates, searches for its memory, takes the cheapest recipe's step for real and prints predicted, measured and the allocator's peak:
#
# ```
# python -m course_lib.budget --config llama.json --sequence 256 --batch 4 --device this --check
# ```
#
# The exact number is that of tensors. On top a GPU has three things of its own: what the caching allocator rounds up and keeps, workspace that libraries keep, and the CUDA context. The command says where its figure for each comes from; none was measured here.
#
# </div>
# <div lang="zh">
#
# 在有 GPU 的机器上，`--device this --check` 会测出这台机器的速率，按它的内存来搜索，把最便宜的配方真的走一步，并打印预测值、实测值和分配器的峰值：
#
# ```
# python -m course_lib.budget --config llama.json --sequence 256 --batch 4 --device this --check
# ```
#
# 精确的那个数只数张量。GPU 上还有它自己的三样：缓存分配器取整和留着不还的部分、各个库占用的工作区，以及 CUDA 上下文。这三样的数各从哪里来，命令都有说明；在这里都没有测过。
#
# </div>

# %% [markdown]
# ## 9.8 In your own code / 实际怎么写
#
# <div lang="en">
#
# The blanks are the arguments of `estimate`, `run` and `fit`; in your own training loop it is two lines:
#
# | | |
# |---|---|
# | run here | `model, optimizer = build(make_model, recipe)`; `train_step(model, optimizer, batch, recipe)` |
# | run here | `estimate(make_model, make_batch, recipe).peak_bytes` |
# | not run | `TrainingArguments(gradient_checkpointing=True)`; `model.gradient_checkpointing_enable()` (transformers) |
# | not run | `accelerate estimate-memory NAME` counts the weights, and for Adam in fp32 four times their bytes; it counts no activations |
#
# </div>
# <div lang="zh">
#
# 三个空位就是 `estimate`、`run` 和 `fit` 的参数；在你自己的训练循环里只有两行：
#
# | | |
# |---|---|
# | 本课运行过 | `model, optimizer = build(make_model, recipe)`；`train_step(model, optimizer, batch, recipe)` |
# | 本课运行过 | `estimate(make_model, make_batch, recipe).peak_bytes` |
# | 没有运行 | `TrainingArguments(gradient_checkpointing=True)`；`model.gradient_checkpointing_enable()`（transformers） |
# | 没有运行 | `accelerate estimate-memory NAME` 只统计权重，fp32 下用 Adam 训练按权重字节的四倍计算，不计激活值 |
#
# </div>

# %% [markdown]
# ## 9.9 Claims and measurements / 说法与实测

# %% slide="result"
both = {"checkpoint": "layers", "attention": "flash"}
flash = estimate(make_model, make_batch, Recipe(**both), **options)
model_bytes = plain.at_peak["parameter"]
kept = found["checkpoints"]
what_you_may_have_read(
    "09",
    f"{kept.flops / plain.flops:.2f} ×",
    f"{plain.peak_bytes / model_bytes:.2f} ×",
    f"{kept.peak_bytes / 1e6:.1f}; {flash.peak_bytes / 1e6:.1f}",
)

# %% [markdown]
# ## 9.10 Hand in / 交作业
#
# <div lang="en">
#
# Empty the blanks and fill in your own: a model that you train or mean to train, its batch, its loss. Run the page again, and hand in this sheet. 20 points: the prediction equals the measurement, or the difference is explained (6); techniques chosen by what fills the peak (6); prices named (4); equal losses or weights shown (2); one guess that was wrong, reported (2).
#
# | | yours |
# |---|---|
# | model, parameters, budget | |
# | plain: predicted, measured, difference in bytes | |
# | what filled the peak | |
# | recipe; predicted, measured, difference | |
# | what fills the peak now | |
# | each technique taken or left, and why (a sentence each) | |
# | FLOPs, bytes moved, seconds a step: plain and yours | |
# | equal, or off by how much | |
# | one thing that I guessed wrong | |
#
# </div>
# <div lang="zh">
#
# 清空三个空位，填上你自己的：一个你正在训练或打算训练的模型，它的批次，它的损失。把这一页重新跑一遍，交上这张表。满分 20 分：预测等于实测，或者说清了差在哪里（6 分）；看清是什么撑起峰值再选办法（6 分）；说出代价（4 分）；证明损失或权重相等（2 分）；报告一个猜错的数（2 分）。
#
# | | 你的 |
# |---|---|
# | 模型、参数数目、预算 | |
# | 基线：预测、实测、相差多少字节 | |
# | 峰值是什么撑起来的 | |
# | 配方；预测、实测、相差 | |
# | 现在峰值是什么撑起来的 | |
# | 每样办法用或不用，为什么（各一句） | |
# | FLOPs、搬运的字节、每步秒数：基线的和你的 | |
# | 相等，或者差多少 | |
# | 我猜错的一件事 | |
#
# </div>

# %% minutes=8 slide="code"
model_slot = None  # your make_model
batch_slot = None  # your make_batch(step)
loss_slot = None  # your loss_sum(model, batch), or None for the model's own
lesson_09.own_model(model_slot, batch_slot, loss_slot)

# %% [markdown]
# ## 9.11 The ledger / 账本
#
# <div lang="en">
#
# One step of one decoder, through the whole course:
#
# </div>
# <div lang="zh">
#
# 同一个解码器的同一步，贯穿整门课：
#
# </div>

# %% slide="result"
whole_ledger()

# %% [markdown] slide={"en": "Three blanks, one sheet: put in your own model.\n\nLook at what fills the peak, choose, prove it equal, measure.", "zh": "三个空位，一张表：换上你自己的模型。\n\n看清是什么撑起峰值，选办法，证明相等，再测量。"}
# ## 9.12 Summary / 小结
#
# <div lang="en">
#
# - The step of a model that the course did not write was predicted to the byte from nine lines of configuration, and measured on this CPU.
# - Its largest part was Adam's state: look before you choose. A technique that frees what is not there saves nothing, or even costs.
# - Equal weights first; then 171.6 MB instead of 609.1, and the search leaves two checkpoints out.
# - A configuration and a device are enough to know how 8 billion parameters fit into 80 GB, or into 24, and what it costs.
#
# **Sources.** Touvron et al. 2023, *LLaMA*, arXiv:2302.13971, and *The Llama 3 Herd of Models*, arXiv:2407.21783 (sizes). Jiang et al. 2024, *Mixtral of Experts*, arXiv:2401.04088. transformers' documentation, *Gradient checkpointing*. Accelerate's documentation, *Model memory estimator*.
#
# **Next.** Your own model.
#
# </div>
# <div lang="zh">
#
# - 一个不是这门课写的模型，只凭九行配置，就把它的一步预测到了字节，并在这个 CPU 上实测验证。
# - 它最大的一块是 Adam 的状态：先看，再选。放掉本来就不在的东西，等于没省，有时还更费。
# - 先证明权重相等；然后是 171.6 MB，而不是 609.1 MB，搜索还省掉了两个检查点。
# - 一份配置、一种设备，就能知道 80 亿参数怎样装进 80 GB 或 24 GB，以及代价是什么。
#
# **出处。** Touvron et al. 2023，*LLaMA*，arXiv:2302.13971，以及 *The Llama 3 Herd of Models*，arXiv:2407.21783（尺寸）。Jiang et al. 2024，*Mixtral of Experts*，arXiv:2401.04088。transformers 文档 *Gradient checkpointing*。Accelerate 文档 *Model memory estimator*。
#
# **接下来。** 你自己的模型。
#
# </div>

# %% [markdown]
# ## In depth / 深入
#
# <div lang="en">
#
# Optional sections; each stands alone.
#
# </div>
# <div lang="zh">
#
# 以下各节选读，彼此独立。
#
# </div>

# %% [markdown]
# ## 9.13 Three other architectures / 另外三种结构
#
# <div lang="en">
#
# An encoder, an encoder with a decoder, and a network without attention, each with its own lists of blocks; predicted beside measured, with a checkpoint around every block:
#
# </div>
# <div lang="zh">
#
# 一个编码器、一个编码器加解码器、一个没有注意力的网络，各有各的块列表。每一块都加检查点，预测与实测并列：
#
# </div>

# %% slide="result"
lesson_09.other_architectures()

# %% [markdown]
# ## 9.14 A mask that is not all ones / 不全是 1 的掩码
#
# <div lang="en">
#
# Batches with padding come with an `attention_mask`. transformers drops a mask in which all is 1, and keeps any other; then the step takes another way, and attention saves other tensors. Symbolic tensors of whole numbers have their values here (up to 4 MiB), so that the estimate goes the same way:
#
# </div>
# <div lang="zh">
#
# 有填充的批次带着 `attention_mask`。掩码全是 1，transformers 就把它丢掉；不全是 1，就留下，这时走的是另一条路，注意力保存的张量也不同。这里，整数的符号张量是有值的（不超过 4 MiB），所以估计也走同一条路：
#
# </div>


# %% slide="result"
def with_mask(padding):
    batch = lesson_09.passages(0)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, mask.shape[1] - padding :] = 0
    return {**batch, "attention_mask": mask}


if lesson_09.has_transformers():
    guess = estimate(make_model, lambda: with_mask(0), Recipe())
    rows = [("no padding", guess.peak_bytes, plain.peak_bytes)]
    guess = estimate(make_model, lambda: with_mask(40), Recipe())
    taken = run(make_model, lambda: with_mask(40), Recipe())
    rows.append(("40 of 512 tokens", guess.peak_bytes, taken.meter.peak_bytes))
predictions(rows, unit="bytes") if lesson_09.has_transformers() else "transformers is not installed"

# %% [markdown]
# ## 9.15 A technique that raises the peak / 升高峰值的办法
#
# <div lang="en">
#
# In 9.3 steps in backward saved nothing, alone. On Llama 3 8B they can even cost. Updated one parameter after the other, as Adam's loop on a CPU does it, and all at once, as on a GPU by default:
#
# </div>
# <div lang="zh">
#
# 在 9.3 节，单用“在反向中更新”等于没省。在 Llama 3 8B 上，它甚至更费。一个参数一个参数地更新（CPU 上 Adam 的循环），和一次全部更新（GPU 上的默认做法）：
#
# </div>

# %% slide="result"
large = lesson_09.configured(config, 4096)
rows = []
for kind in ("cpu", "cuda"):
    recipes = [Recipe("bf16", attention="flash", in_backward=inside) for inside in (False, True)]
    given = large.make_model, lambda: large.make_batch(1)
    peaks = [estimate(*given, each, kind=kind).peak_bytes / 1e9 for each in recipes]
    rows.append((f"`{kind}`", *(f"{peak:.1f}" for peak in peaks)))
table(["kind", "update at the end (GB)", "update in backward (GB)"], rows)

# %% [markdown]
# <div lang="en">
#
# The first gradient of all is the head's, 128256 × 4096 numbers in 16 bits: 1.05 GB. Without steps in backward it waits; with them it is stepped at once, while nearly all activations are still there. The loop makes two temporaries in fp32 for it, 2.1 GB each, and these come at the worst moment; `foreach` makes one, and stays below the peak of the loss. An update takes memory too. As in 9.3, the technique pays where the peak is elsewhere: with the state gone, or with checkpoints.
#
# </div>
# <div lang="zh">
#
# 最先得到的是输出头的梯度：128256 × 4096 个 16 位的数，1.05 GB。如果不在反向中更新，它就一直留着；如果在反向中更新，它一算出来就立刻用来更新输出头，而这时几乎所有激活值都还在。循环要为它建两个 fp32 的临时张量，各 2.1 GB，偏偏赶上最坏的时刻；`foreach` 只建一个，低于损失那里的峰值。更新本身也要内存。与 9.3 节一样，峰值在别处时，这个办法才有用：状态移走之后，或者加了检查点。
#
# </div>

# %% [markdown]
# ## 9.16 What was compared / 比较过哪些
#
# <div lang="en">
#
# `tests/sweep_models.py` builds small models of every type that transformers 5.23 has, 804 of them, and compares the estimated peak with the run, plain and with checkpoints. 216 types could be built here without a batch of their own kind; of 540 steps 521 were equal to the byte, none differed, and 19 were refused with a sentence (models that look at values of their data, for example). `tests/bench_models.py` has models of other libraries beside them.
#
# </div>
# <div lang="zh">
#
# `tests/sweep_models.py` 为 transformers 5.23 的每一种模型（共 804 种）建一个小模型，基线和加检查点的一步，都比较估计的峰值与实际运行的峰值。其中 216 种不需要特别的批次，在这里建得出来；540 步里 521 步逐字节相等，没有一步不等，19 步被拒绝，并各有一句说明（例如模型要看数据的值）。`tests/bench_models.py` 里还有别的库的模型。
#
# </div>
