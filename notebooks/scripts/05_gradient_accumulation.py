# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] slide={"en": "Eight sequences at once peak at 277.7 MB. One at a time, the peak is lower.\n\nHow much lower? And is it the same gradient?", "zh": "八条序列一起算，峰值是 277.7 MB。一次只算一条，峰值更低。\n\n低多少？梯度还一样吗？"}
# # 5 What if the batch is split into micro-batches? (gradient accumulation) / 把批次拆成微批次呢？（梯度累积）
#
# <div lang="en">
#
# If lesson 00's step computes all eight sequences at once, its peak is 277.7 MB. The step can also compute one sequence at a time and add up the gradients. Then its peak is lower, with no more FLOPs. This is **gradient accumulation**, and each part of the batch is a **micro-batch**.
#
# Is the result the gradient of the whole batch? In autumn 2024, Unsloth and Hugging Face wrote that their trainers computed a different gradient. With bf16 parameters, the gradient may be off even if the loop is right (section 5.5).
#
# </div>
# <div lang="zh">
#
# 第 00 课的训练步把八条序列一起算，峰值是 277.7 MB。它也可以一次只算一条序列，再把各条的梯度加起来。这样峰值更低，FLOPs 也不增加。这就是**梯度累积**（gradient accumulation），从批次中拆出的每一部分叫**微批次**（micro-batch）。
#
# 这样算出的梯度，与整个批次一起算的一样吗？2024 年秋，Unsloth 和 Hugging Face 先后撰文指出，自己的训练器做梯度累积时算错了梯度。另外，如果参数是 bf16，即使循环写对了，梯度也可能有偏差（5.5 节）。
#
# </div>

# %%
from course_lib.teaching import language

language()

# %% [markdown]
# <div lang="en">
#
# **Goals** (110 minutes, in two sittings):
#
# - Predict the peak from two measurements, and explain where the prediction fails.
# - Name the right divisor of the loss, and say what a wrong divisor changes.
# - Fix a training loop with five bugs.
# - Sum bf16 gradients in fp32, and say what this costs.
# - Read a loop that several processes run.
#
# **What to know before**: lesson 01.
#
# </div>
# <div lang="zh">
#
# **目标**（共 110 分钟，分两次学）
#
# - 由两次测量预测不同微批次大小下的峰值，并解释预测在什么情况下不成立。
# - 说出损失应当除以什么，以及除数不对会有什么后果。
# - 修好一个有五处错误的训练循环。
# - 用 fp32 对 bf16 的梯度求和，并说出要多占多少字节。
# - 读懂在多个进程上运行的训练循环。
#
# **预备知识**：第 01 课。
#
# </div>

# %%
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from course_lib.accumulation import AccumulatedStep, split
from course_lib.lessons.ledger import ledger
from course_lib.lessons.lesson_05 import exercises, figures, results
from course_lib.memory import MemoryMeter, measure, symbolic
from course_lib.models import Decoder, random_tokens
from course_lib.teaching import predictions, table

# %% [markdown] slide={"en": "Run forward and backward for one micro-batch, then for the next. Backward adds to `.grad`.\n\n**Guess first.** Does half the micro-batch give half the peak?", "zh": "做完一个微批次的前向和反向，再做下一个。反向会把梯度加进 `.grad`。\n\n**先猜**：微批次减半，峰值也减半吗？"}
# ## 5.1 Micro-batches, and a line / 微批次与一条直线
#
# <div lang="en">
#
# Backward **adds** each gradient to `.grad`. So a loop can run forward and backward for each micro-batch in turn, then divide the gradients by the batch's number of tokens, and update the weights once. Only one micro-batch's activations are live at a time. The decoder and the step are those of lesson 00. A micro-batch has $m$ of the batch's eight sequences.
#
# **Guess first:** if each micro-batch has 2 sequences instead of 4, is the peak halved? Which bytes do not depend on $m$?
#
# </div>
# <div lang="zh">
#
# 反向会把算出的梯度**加**进 `.grad`。因此，循环可以逐个处理微批次，对每个微批次做一次前向和一次反向，最后把累加的梯度除以 token 总数，再更新一次权重。同一时刻，只有一个微批次的激活值存活。解码器和训练步与第 00 课相同。整个批次有八条序列，$m$ 是每个微批次的序列数。
#
# **先猜**：每个微批次从 4 条序列减到 2 条，峰值也减半吗？哪些字节与 $m$ 无关？
#
# </div>


# %% slide="code"
def loss_sum(model, tokens):  # (b, s + 1) -> sum and number of the losses
    logits, targets = model(tokens[:, :-1]), tokens[:, 1:].flatten()  # (b, s, v), (b · s,)
    return F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum"), len(targets)


def add_gradient(model, micro_batch):
    loss, count = loss_sum(model, micro_batch)
    loss.backward()
    return count


# %%
def metered_step(m):
    with symbolic():  # counts bytes and allocates nothing (lesson 01)
        decoder = Decoder(vocabulary=2048, hidden=256, heads=8, layers=8, sequence=128)
        tokens, adam = random_tokens(8, 128, 2048), torch.optim.Adam(decoder.parameters())
        add_gradient(decoder, tokens)
        adam.step()  # creates its state
        decoder.zero_grad()
        with MemoryMeter(decoder, adam) as meter:
            total = sum(add_gradient(decoder, micro_batch) for micro_batch in tokens.split(m))
            for parameter in (p for p in decoder.parameters() if p.grad is not None):
                parameter.grad /= total
            adam.step()
    return meter


# %% slide="result"
columns = ["sequences per micro-batch", "peak (bytes)"]
table(columns, [(m, metered_step(m).peak_bytes) for m in (4, 2)])

# %% [markdown] slide={"en": "$m = 4$: 207,597,976 bytes. $m = 2$: 158,804,376 bytes.\n\n**Guess first.** A line through these two points: for which $m$ is it wrong?", "zh": "$m = 4$：207,597,976 字节。$m = 2$：158,804,376 字节。\n\n**先猜**：过这两点的直线，在哪个 $m$ 上不准？"}
# <div lang="en">
#
# **Exercise 1.** The two measured peaks define a line: the bytes per sequence times $m$, plus a constant. With this line, predict the peak in bytes for $m = 1, 2, 4, 8$. At $m = 8$ the whole batch is one micro-batch. For which sizes will the line be wrong?
#
# </div>
# <div lang="zh">
#
# **练习 1。** 假设峰值等于每条序列的字节数乘以 $m$，再加一个常数，那么由上面两个实测的峰值就能确定一条直线。请用这条直线预测 $m = 1, 2, 4, 8$ 时的峰值（字节）。$m = 8$ 时，整个批次就是一个微批次。这四个预测值里，哪几个会与实测值不符？
#
# </div>


# %% minutes=6
def predicted_peak(m):
    return None


exercises.check_peaks(predicted_peak)


# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not exercises.check_peaks.accepted:

    def predicted_peak(m):
        slope = (207_597_976 - 158_804_376) / 2
        floor = 158_804_376 - 2 * slope
        return floor + m * slope


exercises.check_peaks(predicted_peak)
### END SOLUTION

# %% slide="result"
meters = {m: metered_step(m) for m in (8, 4, 2, 1)}
predictions([(f"m = {m}", predicted_peak(m), meters[m].peak_bytes) for m in meters], unit="bytes")

# %% [markdown]
# <div lang="en">
#
# The line's constant, 110,010,776 bytes, is the **floor**, which is the same for every split of the batch. With Adam in fp32, it consists of **16 bytes per parameter** (weights, gradients, two moments) and 408 bytes for Adam's 100 step counts, a loss and its gradient.
#
# For $m = 8$ the line is 27,502,592 bytes too high, and for $m = 1$ it is 393,216 bytes too low. At which point of the step does each peak occur?
#
# </div>
# <div lang="zh">
#
# 直线的常数项是 110,010,776 字节，这就是峰值的**下限**。不论批次怎样拆，下限都不变。用 fp32 的 Adam 时，下限的绝大部分是**每个参数 16 字节**（权重、梯度，以及 Adam 的两个矩）。另外 408 字节是 Adam 的 100 个步数、一个损失和它的梯度。
#
# $m = 8$ 时，预测的峰值比实测高 27,502,592 字节；$m = 1$ 时，预测比实测低 393,216 字节。各种微批次大小下，峰值各出现在训练步的什么时刻？
#
# </div>

# %% slide="result"
results.peak_compositions({m: meters[m] for m in (8, 2, 1)})

# %% [markdown]
# <div lang="en">
#
# Your line describes one point of the step, softmax's backward. There, the activations, the gradients of earlier micro-batches and two tensors as large as the logits are live. With $m = 8$ the peak is at the same operator, but no earlier micro-batch has left its gradients in memory. Such gradients would be as large as the weights.
#
# The activations and these two tensors shrink with $m$, so at $m = 1$ the peak is elsewhere, in the backward of the last layer. There, the gradients of two **weight tensors** are not yet added to `.grad`, and these gradients do not shrink with $m$. One of them, the output head's gradient (2.1 MB), waits for the embedding's gradient, because both layers share one matrix (lesson 01). The other (1.0 MB) belongs to an MLP. As in lesson 02, a formula for one point fails when the peak is elsewhere.
#
# </div>
# <div lang="zh">
#
# 你的直线只描述训练步里的一个时刻，即 softmax 的反向。此时内存里有激活值、前面各微批次累加的梯度，以及两个与 logits 一样大的张量。$m = 8$ 时，峰值也出现在这一时刻。但这时整个批次就是唯一的微批次，前面没有累加的梯度，所以峰值里少了全部参数的梯度，这些梯度与权重一样大。
#
# 激活值和那两个张量都随 $m$ 缩小，所以到 $m = 1$ 时，峰值移到了另一个时刻，即最后一层的反向。此时有两个**权重张量**的梯度还没有加进 `.grad`，而这两个梯度的大小与 $m$ 无关。一个是输出头的梯度（2.1 MB）。输出头与嵌入层共用一个矩阵（见第 01 课），所以 autograd 要留着这个梯度，等算出嵌入层的梯度再相加。另一个是某个 MLP 的梯度（1.0 MB）。与第 02 课一样，公式只描述一个时刻，如果峰值出现在别的时刻，公式就不成立。
#
# </div>

# %% slide="result"
figures.draw_peaks(meters, predicted_peak)

# %% [markdown] slide={"en": "Llama 3 8B, with a checkpoint per layer. A micro-batch is one sequence of 8192 tokens.\n\nWhich tensors are the largest at the peak?", "zh": "Llama 3 8B，每层加检查点。一个微批次是一条 8192 个 token 的序列。\n\n峰值时哪些张量最大？"}
# <div lang="en">
#
# Our vocabulary has 2048 words, but that of Llama 3 8B has 128,256. The next cell measures a model of Llama's shape on symbolic tensors, with bf16 weights and a checkpoint per layer. Each of the two micro-batches is **one sequence** of 8192 tokens. Apart from weights and gradients, which tensors are largest at the peak?
#
# </div>
# <div lang="zh">
#
# 我们的词表只有 2048 个词，Llama 3 8B 的词表有 128,256 个。下面的单元格用符号张量测量一个形状与 Llama 3 8B 相同的模型，权重是 bf16，每层都加了检查点。一步有两个微批次，每个都只有**一条**序列，长 8192 个 token。除了权重和梯度，峰值时哪些张量最大？
#
# </div>

# %%
from transformers import LlamaConfig, LlamaForCausalLM

shape = {"vocab_size": 128_256, "intermediate_size": 14_336, "num_key_value_heads": 8}
with symbolic():
    model = LlamaForCausalLM(LlamaConfig(**shape)).bfloat16().train()  # 32 layers, h = 4096
    model.activation_checkpointing_enable()
    with MemoryMeter(model) as meter:
        for sequence in random_tokens(2, 8191, 128_256).split(1):  # 8192 tokens each
            model(input_ids=sequence, labels=sequence, use_cache=False).loss.backward()

# %% slide="result"
results.largest_at_peak(meter)

# %% [markdown]
# <div lang="en">
#
# Three fp32 tensors take 12.6 GB of the table's 15.0 GB: the log-softmax, its gradient, and the gradient of the logits. A single sequence cannot be split into micro-batches. Lesson 02's loss in chunks reduces these tensors, because it splits the tokens. Lesson 07 combines this loss with gradient accumulation.
#
# </div>
# <div lang="zh">
#
# 最大的三个张量都是 fp32，分别是 log-softmax 的结果、这个结果的梯度，以及 logits 的梯度。表中合计 15.0 GB，这三个张量就占了 12.6 GB。微批次最小就是一条序列，不能拆得更细了。第 02 课按 token 把损失分成小段计算，就能缩小这三个张量。第 07 课把损失分段与梯度累积合在一起用。
#
# </div>

# %% [markdown] slide={"en": "One loop takes the mean of the micro-batches' means. The other sums all losses and divides once.\n\n**Guess first.** How far apart are the gradients?", "zh": "一种循环先求每个微批次的平均，再求这些平均的平均。另一种把损失全部加起来，只除一次。\n\n**先猜**：两种梯度差多少？"}
# ## 5.2 Which divisor? / 该除以什么
#
# <div lang="en">
#
# The sequences of section 5.1 had equal lengths, unlike real text. Here a sample is a line of code or a paragraph from the course, cut at 128 characters. Each character is a token. A batch has 16 samples. (`mean_of_means.loss_sum` is the `loss_sum` above, but ignores padding.)
#
# Many loops divide the **mean** loss of each micro-batch by the number of micro-batches. The result is a mean of means. Other loops sum all losses and divide once by the batch's number of tokens. **Guess first:** how far apart are the two loops' gradients with one sample per micro-batch, and with eight samples?
#
# </div>
# <div lang="zh">
#
# 5.1 节的随机序列长度都一样，真实文本却长短不一。这一节用课程自带的文本，一个样本是一行代码或一段文字，最多取 128 个字符，每个字符是一个 token。一个批次有 16 个样本。（`mean_of_means.loss_sum` 与 5.1 节的 `loss_sum` 相同，只是不计填充。）
#
# 许多循环先求每个微批次的**平均**损失，再除以微批次数，得到的是“平均的平均”。另一种做法是把全部损失加起来，最后除以全部 token 数，只除一次。**先猜**：每个微批次只有一个样本时，两种做法算出的梯度相差多少？有八个样本时呢？
#
# </div>

# %% slide="both"
from course_lib.lessons.lesson_05 import mean_of_means

batch = mean_of_means.batch(0)  # (16, 129), padded with zeros
lengths = (batch[:, 1:] != 0).sum(1).tolist()


# %% slide="code"
def add_gradients(model, micro_batches, kind):
    total = sum(int((micro_batch[:, 1:] != 0).sum()) for micro_batch in micro_batches)
    for micro_batch in micro_batches:
        loss, count = mean_of_means.loss_sum(model, micro_batch)
        divisor = count * len(micro_batches) if kind == "mean of means" else total
        (loss / divisor).backward()


# %%
def error_of(kind, batch, size):
    decoder = mean_of_means.small_decoder()
    add_gradients(decoder, [batch], "token mean")  # all at once
    wanted = results.gradient_of(decoder)
    decoder.zero_grad()
    add_gradients(decoder, batch.split(size), kind)
    return results.error(results.gradient_of(decoder), wanted)


# %%
batches = [mean_of_means.batch(seed) for seed in range(8)]
exact = [error_of("token mean", batch, size) for size in (8, 3, 1)]
off = {m: [error_of("mean of means", each, m) for each in batches] for m in (8, 4, 2, 1)}
table(["token mean, in micro-batches of 8, 3 and 1: error below 1e-6"], [[max(exact) < 1e-6]])

# %% slide="result"
figures.draw_say(lengths, off)

# %% [markdown]
# <div lang="en">
#
# If the losses are summed, the gradient is right except for rounding, however the batch is split. (Exceptions are dropout, BatchNorm (5.15) and bf16 (5.5).) Here, with one sample per micro-batch, the gradient of the mean of means is off by 15% to 25%. With eight samples of mixed lengths, it is off by 0.1% to 10%. The reason is that all micro-batches count equally, whatever their lengths. With one sample per micro-batch, a character in a 14-character line has nearly seven times its proper weight. A character in a long paragraph has three quarters of its proper weight. If the micro-batches have equal token counts, both loops agree. Tests with such data cannot find this bug.
#
# A mean of means can also be a **choice**. Some reinforcement-learning fine-tuning methods average the loss within each answer, then over the answers. Even then, the result should not depend on the split into micro-batches.
#
# </div>
# <div lang="zh">
#
# 如果没有 dropout 和 BatchNorm（5.15 节），也不用 bf16（5.5 节），那么只要对损失求总和，不论批次怎样拆，梯度就只有舍入误差。求平均的平均则不同。在这里，每个微批次只有一个样本时，梯度的误差是 15% 到 25%。有八个长短不一的样本时，误差是 0.1% 到 10%。原因是，不论微批次里有多少 token，每个微批次在平均里所占的比重都一样。以每个微批次一个样本为例，在只有 14 个字符的一行代码里，每个字符的比重接近应有比重的七倍。在长段落里，每个字符的比重只有应有比重的四分之三。如果各微批次的 token 数相等，两种循环的结果就一致，所以用这样的数据做测试发现不了这个错误。
#
# 求平均的平均也可能是有意的**选择**。有些强化学习微调方法先在每个回答内取平均，再对各个回答取平均。即使如此，批次怎样拆也不应当影响结果。
#
# </div>

# %% [markdown] slide={"en": "The bug of 2024: a small Llama, labels of −100, micro-batches of two.\n\n**Guess first.** By how much is the gradient off?", "zh": "2024 年的那个错误：一个小的 Llama，标签里有 −100，每个微批次两条。\n\n**先猜**：梯度差多少？"}
# <div lang="en">
#
# **The bug of 2024.** The next cells reproduce this bug with `transformers`, where it was found, on the small Llama of section 2.9. In fine-tuning, prompt tokens have the label −100, which the loss ignores, so samples differ in their number of targets (counted tokens). By default, the model returns the mean loss of a micro-batch's targets, and trainers divided this mean by the number of micro-batches. If you pass `num_items_in_batch`, the number of targets in the batch, the model divides the summed loss by this number instead. **Guess first:** by how much is the gradient off without `num_items_in_batch`?
#
# </div>
# <div lang="zh">
#
# **2024 年的那个错误。** 下面用当年出错的库 `transformers` 重现这个错误，模型是 2.9 节的小 Llama。微调时，提示词各 token 的标签是 −100，计算损失时会忽略这些 token，所以各样本的目标数（计入损失的 token 数）不同。默认情况下，模型返回一个微批次里各目标的平均损失，当时的训练器再把这个平均损失除以微批次数。如果传入 `num_items_in_batch`，也就是整个批次的目标数，模型就改为把微批次的损失总和除以这个目标数。**先猜**：不传 `num_items_in_batch` 时，梯度的误差有多大？
#
# </div>


# %%
from course_lib.lessons.lesson_02 import own_code

llama, tokens = own_code.llama(), random_tokens(8, 127, 2048)  # (8, 128)
prompts = torch.arange(0, 96, 12)  # tokens in the prompt of each sample: 0, 12, ..., 84
labels = tokens.masked_fill(torch.arange(128) < prompts[:, None], -100)
targets = (labels[:, 1:] != -100).sum()  # no position predicts the first token


# %% slide="code"
def llama_gradient(size, **options):
    llama.zero_grad()
    for ids, wanted in zip(tokens.split(size), labels.split(size), strict=True):
        loss = llama(input_ids=ids, labels=wanted, **options).loss
        (loss if options else loss * size / 8).backward()
    return results.gradient_of(llama)


# %% slide="result"
whole = llama_gradient(8)
counted = llama_gradient(2, num_items_in_batch=targets)
found = {"mean of means": llama_gradient(2), "`num_items_in_batch`": counted}
errors = {name: results.error(gradient, whole) for name, gradient in found.items()}
rows = [(name, f"{error:.0%}", error < 1e-6) for name, error in errors.items()]
table(["", "error of the gradient", "below 1e-6"], rows)

# %% [markdown]
# <div lang="en">
#
# With these prompts and random tokens, the gradient is off by 33%. With `num_items_in_batch`, only rounding errors are left.
#
# By default, the `Trainer` of `transformers` 5.23 counts a step's targets over all micro-batches and devices (`average_tokens_across_devices=True`). The `Trainer` passes this number to a model whose `forward` takes extra keyword arguments, as Llama's does, or to your `compute_loss_func`. Otherwise, the `Trainer` still divides the loss by the number of micro-batches. If you override `compute_loss`, divide the summed loss by `num_items_in_batch`, or set `loss_is_scaled_for_ga = False`. If you do neither, Llama's loss is not divided at all. Packing documents changes the number of targets (section 5.11).
#
# </div>
# <div lang="zh">
#
# 按这里的提示词长度和随机 token，梯度的误差是 33%。传入 `num_items_in_batch` 之后，就只剩舍入误差。
#
# `transformers` 5.23 的 `Trainer` 默认会统计一步里所有微批次、所有设备上的目标数（`average_tokens_across_devices=True`）。如果模型的 `forward` 接受额外的关键字参数（Llama 就接受），`Trainer` 会把目标数传给模型。如果你提供了 `compute_loss_func`，`Trainer` 也会把目标数传给它。在其他情况下，`Trainer` 仍旧把损失除以微批次数。如果你重写了 `compute_loss`，要把损失总和除以 `num_items_in_batch`，或者设 `loss_is_scaled_for_ga = False`。如果这两件事都不做，Llama 的损失总和就不会除以任何数。把文档打包（packing）也会改变目标数（5.11 节）。
#
# </div>

# %% [markdown] slide={"en": "Two processes have eight micro-batches each, and each backward reduces all gradients.\n\n**Guess first.** How many of the eight reductions are needed?", "zh": "两个进程，各有八个微批次，每次反向都归约全部梯度。\n\n**先猜**：八次归约里，有几次是必要的？"}
# ## 5.3 Across processes / 跨进程
#
# <div lang="en">
#
# With DDP, each device runs a process, called a **rank**, on its own samples. Each backward gives all gradients to **all-reduce**, which replaces them by their mean over the ranks. `no_sync` skips this reduction. **Guess first:** how many of a rank's eight micro-batches need the reduction? If each rank divides by its own number of tokens, the mean over ranks is a mean of means again. To avoid this, what must the last two lines below do?
#
# </div>
# <div lang="zh">
#
# 用 DDP 时，每台设备运行一个进程（**rank**），每个进程处理自己的样本。每次反向都把全部梯度交给 **all-reduce** 归约，也就是对各进程的梯度取平均。`no_sync` 可以跳过这次归约。**先猜**：每个进程有八个微批次，其中几个需要归约梯度？如果每个进程先把梯度除以自己的 token 数，再对各进程取平均，得到的又是平均的平均。为避免这一点，下面代码的最后两行要做什么？
#
# </div>


# %% slide="code"
def step_on_a_rank(model, loss_sum, micro_batches, each):
    total = 0
    for number, micro_batch in enumerate(micro_batches, start=1):
        with nullcontext() if each or number == len(micro_batches) else model.no_sync():
            loss, count = loss_sum(model, micro_batch)
            loss.backward()
        total += count
    tokens = torch.tensor(float(total))
    dist.all_reduce(tokens)  # the sum over all ranks
    for parameter in (p for p in model.parameters() if p.grad is not None):
        parameter.grad *= dist.get_world_size() / tokens  # DDP has taken a mean over ranks


# %% slide="result"
ranks = results.on_ranks(step_on_a_rank, micro_batches=8)  # two processes run the cell above
table(["equal to one process with all tokens, to 1e-5"], [[ranks["error"] < 1e-5]])

# %% slide="result"
results.bytes_reduced(ranks, micro_batches=8)

# %% [markdown]
# <div lang="en">
#
# One of the eight reductions is enough. The gradient equals the gradient of one process with all tokens, although the second rank has fewer tokens. (Lesson 08 counts the bytes sent.) With FSDP, reduce in each micro-batch, because without a reduction each rank keeps **all** gradients. For our decoder on 8 ranks, each rank would keep 27.5 MB of gradients instead of 3.4 MB.
#
# </div>
# <div lang="zh">
#
# 八次归约里只需要一次。虽然第二个进程的 token 更少，归约后的梯度仍与单个进程用全部 token 算出的相等。（实际发送了多少字节，第 08 课再统计。）用 FSDP 时正好相反，建议每个微批次都归约。这是因为在 FSDP 里，每个进程归约之后只需保留自己那一份梯度，不归约就要保留**全部**梯度。以我们的解码器为例，如果分到 8 个进程上，按公式计算，每个进程归约后只保留 3.4 MB 的梯度，不归约则要保留 27.5 MB。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **End of the first sitting** (50 minutes). Your loop has a lower peak, and computes the gradient of the whole batch, on one or two processes. The second sitting asks what else goes wrong in such loops, and how inexact bf16 sums are.
#
# </div>
# <div lang="zh">
#
# **第一次学习到此结束**（50 分钟）。你写的循环降低了峰值，而且不论用一个进程还是两个进程，算出的梯度都与整个批次一起算时相同。第二次学习要回答两个问题：这样的循环还可能错在哪里？用 bf16 求和，误差有多大？
#
# </div>

# %% [markdown] slide={"en": "These nine lines have five bugs.\n\nWhich lines run for each micro-batch, and which once per step?", "zh": "这九行代码里有五处错误。\n\n哪些行每个微批次运行一次，哪些每一步运行一次？"}
# ## 5.4 A loop with five bugs / 有五处错误的循环
#
# <div lang="en">
#
# The loop below contains five common bugs, among them a wrong divisor. Its parts:
#
# - A **scaler** multiplies the loss by a factor before backward, so that small gradients do not become zero in fp16. `scaler.unscale_(optimizer)` divides the gradients by the same factor. Without this call, `scaler.step` divides them.
# - **Clipping** scales the whole batch's gradient down if its norm exceeds `max_norm`.
# - The **scheduler** sets the learning rate for the optimizer's next step.
# - `every` is the number of micro-batches per optimizer step. An epoch's last step may have fewer micro-batches.
#
# **Exercise 2.** Fix the loop. Each of five checks looks for one bug. Then a meter checks that only one micro-batch's activations are live at a time.
#
# </div>
# <div lang="zh">
#
# 下面的循环里有五处常见的错误，其中一处是除数不对。循环的各个部分如下：
#
# - **缩放器**（scaler）在反向之前把损失乘以一个倍数，使很小的梯度在 fp16 里不会变成零。`scaler.unscale_(optimizer)` 再把梯度除以同一个倍数（还原缩放）。如果没有调用这个方法，`scaler.step` 会自己做这次除法。
# - **裁剪**把整个批次的梯度按比例缩小，使梯度的范数不超过 `max_norm`。
# - **调度器**（scheduler）为优化器的下一步设定学习率。
# - 每处理 `every` 个微批次，优化器更新一次。一个 epoch 的最后一步，微批次可能不足 `every` 个。
#
# **练习 2。** 修好这个循环。五项检查各查一处错误。最后由计量器确认，同一时刻只有一个微批次的激活值存活。
#
# </div>


# %% minutes=28 slide="code"
def train_epoch(model, loss_sum, micro_batches, optimizer, scheduler, scaler, every, max_norm):
    for number, micro_batch in enumerate(micro_batches, start=1):
        loss, count = loss_sum(model, micro_batch)
        scaler.scale(loss / count / every).backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scheduler.step()
        if number % every == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


exercises.check_loop(train_epoch)


# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not exercises.check_loop.accepted:

    def train_epoch(model, loss_sum, micro_batches, optimizer, scheduler, scaler, every, max_norm):
        for start in range(0, len(micro_batches), every):
            total = 0
            for micro_batch in micro_batches[start : start + every]:
                loss, count = loss_sum(model, micro_batch)
                scaler.scale(loss).backward()
                total += count
            scaler.unscale_(optimizer)
            for parameter in (p for p in model.parameters() if p.grad is not None):
                parameter.grad /= total
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()  # section 5.13: it should wait if the scaler has skipped the step
            optimizer.zero_grad()


exercises.check_loop(train_epoch)
### END SOLUTION

# %% jupyter={"source_hidden": true} slide="result"
figures.draw_order()

# %% slide="result"
figures.five_bugs()

# %% [markdown]
# <div lang="en">
#
# In each row the loop has one bug, and only the check for this bug fails. If each micro-batch is clipped alone, the summed gradient has a wrong direction. Without unscaling, the gradients are 1024 times too large before they are clipped to `max_norm`. Then `scaler.step` divides them by 1024, and almost nothing is left.
#
# The library's `AccumulatedStep` avoids all five bugs, and its weights equal your loop's.
#
# </div>
# <div lang="zh">
#
# 表中每一行的循环各有一处错误，也只有对应的那项检查报错。如果先裁剪各微批次的梯度再相加，总梯度的方向就错了。如果忘了还原缩放，裁剪前的梯度就是真实梯度的 1024 倍，裁剪会把它的范数缩小到 `max_norm`。随后 `scaler.step` 再把梯度除以 1024，梯度就几乎变成零。
#
# 库里的 `AccumulatedStep` 没有这五处错误，更新后的权重与你的循环得到的相同。
#
# </div>

# %% slide="both"
table(["weights equal"], [[results.same_weights_as_library(train_epoch)]])

# %% [markdown] slide={"en": "Parameters, gradients and their sums are bf16, with 8 bits of precision.\n\n**Guess first.** Draw the gradient's error from 1 micro-batch to 256.", "zh": "参数、梯度、梯度之和都是 bf16，有效精度 8 位。\n\n**先猜**：从 1 个微批次到 256 个，梯度的误差怎样变？画出来。"}
# ## 5.5 The accumulator's dtype / 累加器的 dtype
#
# <div lang="en">
#
# With bf16 parameters, the gradients and their sums are bf16, too, with 8 bits of precision. **Guess first:** draw the gradient's error against the number of micro-batches, from 1 to 256.
#
# **Exercise 3.** Sum the gradients in fp32 instead. After `parameter.register_post_accumulate_grad_hook(hook)`, PyTorch calls `hook(parameter)` each time the parameter's `.grad` is complete. Return a dict that will hold each parameter's sum in fp32. The hook must release the bf16 gradient.
#
# </div>
# <div lang="zh">
#
# 参数是 bf16 时，各微批次的梯度和梯度之和也都是 bf16，有效精度只有 8 位。**先猜**：微批次数从 1 到 256，梯度的误差怎样变？画出来。
#
# **练习 3。** 改用 fp32 对梯度求和。用 `parameter.register_post_accumulate_grad_hook(hook)` 注册钩子后，每当这个参数的 `.grad` 算好，PyTorch 就调用 `hook(parameter)`。请返回一个字典，用来存放每个参数的梯度之和（fp32）。钩子还要释放 bf16 的梯度。
#
# </div>


# %% minutes=12
def accumulate_in_fp32(parameters):
    sums = {}  # parameter -> sum

    def add(parameter):
        pass

    return sums


exercises.check_fp32_sums(accumulate_in_fp32)


# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not exercises.check_fp32_sums.accepted:

    def accumulate_in_fp32(parameters):
        sums = {}

        def add(parameter):
            gradient, parameter.grad = parameter.grad, None
            if parameter in sums:
                sums[parameter] += gradient
            else:
                sums[parameter] = gradient.float()

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(add)
        return sums


exercises.check_fp32_sums(accumulate_in_fp32)
### END SOLUTION


# %%
def gradient_in(n, dtype, seed, in_fp32=False):  # the batch's gradient in n micro-batches
    model = mean_of_means.rounded_decoder(seed).to(dtype)  # all its weights are bf16 numbers
    sums = accumulate_in_fp32(model.parameters()) if in_fp32 else {}
    for micro_batch in (random_tokens(256, 16, 127, seed=seed) + 1).split(256 // n):
        logits = model(micro_batch[:, :-1]).flatten(0, 1)
        losses = F.cross_entropy(logits.float(), micro_batch[:, 1:].flatten(), reduction="sum")
        (losses / (256 * 16)).backward()
    weights = [each.weight for each in model.layers.modules() if isinstance(each, nn.Linear)]
    return torch.cat([sums.get(each, each.grad).flatten().double() for each in weights])


# %% slide="result"
errors = results.errors_of_sums(gradient_in)  # two seeds, compared with float64
figures.draw_sums(errors)

# %% [markdown]
# <div lang="en">
#
# With bf16 sums, the error rises with the number of micro-batches. With one micro-batch, the error comes from forward and backward in bf16. With more micro-batches, each addition also rounds the sum to 8 bits, and loses part of the much smaller added gradient.
#
# The plot covers the layers' Linear weight tensors, which hold 90% of the decoder's parameters. Most other parameters are embeddings, and only 0.6% of all parameters belong to LayerNorms. With one micro-batch, the LayerNorms' gradients are off by 6% with two threads and 11% with one thread, because their backward on a CPU sums over all rows in bf16.
#
# </div>
# <div lang="zh">
#
# 用 bf16 求和时，微批次越多，误差越大。只有一个微批次时，误差全部来自用 bf16 计算的前向和反向。微批次多了以后，每做一次加法，还要把总和舍入到 8 位精度。这时总和比新加进来的梯度大得多，舍入就会丢掉新梯度的一部分。
#
# 图中只画了各层 Linear 权重张量的梯度误差，这些权重占全部参数的 90%。其余的参数大部分属于嵌入层，LayerNorm 的参数只占全部参数的 0.6%。只有一个微批次时，LayerNorm 的梯度误差与线程数有关，两个线程是 6%，一个线程是 11%。这是因为在 CPU 上，LayerNorm 的反向用 bf16 对所有行求和。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# An fp32 sum takes 4 bytes per parameter, and a bf16 gradient takes 2 bytes. Including weight, master weight and moments, a parameter takes 18 bytes instead of 16. `AccumulatedStep(…, accumulate="fp32")` sums in fp32. While it casts the mean gradient to bf16, this gradient exists in both dtypes, and a parameter takes 20 bytes.
#
# </div>
# <div lang="zh">
#
# 用 fp32 求和的代价是，每个参数要用 4 字节存放梯度之和，而 bf16 的梯度只要 2 字节。连同权重、主权重和矩，每个参数占用的字节从 16 增加到 18。`AccumulatedStep(…, accumulate="fp32")` 就用 fp32 求和。最后要把平均梯度转成 bf16，转换前和转换后的梯度会短暂并存，这时每个参数一共占 20 字节。
#
# </div>

# %% [markdown]
# ## 5.6 In your own code / 实际怎么写
#
# <div lang="en">
#
# The effective (or global) batch size is micro-batch size × accumulation steps × ranks. Only the loss of the table's first row was run (section 5.2).
#
# | where | what to write |
# |---|---|
# | Hugging Face | `TrainingArguments(per_device_train_batch_size=1, gradient_accumulation_steps=8)`; a loss of your own divides by `num_items_in_batch` |
# | Accelerate | `with accelerator.accumulate(model):`; the loss is divided by the number of micro-batches |
# | PyTorch DDP | `with model.no_sync():` for all micro-batches except the last |
# | FSDP2 | `model.set_requires_gradient_sync(last)` sends less, but keeps all gradients on each rank |
# | Megatron-LM | `--micro-batch-size 1 --global-batch-size 8 --accumulate-allreduce-grads-in-fp32` |
# | DeepSpeed | `"gradient_accumulation_steps": 8`, `"data_types": {"grad_accum_dtype": "fp32"}` |
# | TRL | `SFTConfig(gradient_accumulation_steps=8)` |
#
# </div>
# <div lang="zh">
#
# 等效（全局）批次大小 = 微批次大小 × 累积步数 × 进程数。表中第一行的损失计算在 5.2 节运行过，其余各行没有在本课运行。
#
# | 框架 | 写法 |
# |---|---|
# | Hugging Face | `TrainingArguments(per_device_train_batch_size=1, gradient_accumulation_steps=8)`；自己写的损失函数要除以 `num_items_in_batch` |
# | Accelerate | `with accelerator.accumulate(model):`；损失会除以微批次数 |
# | PyTorch DDP | 除最后一个微批次外，都用 `with model.no_sync():` |
# | FSDP2 | `model.set_requires_gradient_sync(last)`：通信少，但每个进程都保留全部梯度 |
# | Megatron-LM | `--micro-batch-size 1 --global-batch-size 8 --accumulate-allreduce-grads-in-fp32` |
# | DeepSpeed | `"gradient_accumulation_steps": 8`、`"data_types": {"grad_accum_dtype": "fp32"}` |
# | TRL | `SFTConfig(gradient_accumulation_steps=8)` |
#
# </div>

# %% [markdown] slide={"en": "Five claims about gradient accumulation. Raise your hand before each row: does it hold, partly, or not?", "zh": "关于梯度累积的五句说法。看每一行之前先举手：成立、部分成立，还是不成立？"}
# ## 5.7 Claims and measurements / 说法与实测
#
# <div lang="en">
#
# The table tests five claims.
#
# </div>
# <div lang="zh">
#
# 下表检验五句说法。
#
# </div>

# %% slide="result"
figures.claims_table(off, errors, exact, meters)

# %% [markdown]
# ## 5.8 The ledger / 账本
#
# <div lang="en">
#
# `AccumulatedStep` runs lesson 00's step in eight micro-batches. It keeps the eight losses, so it needs 28 more bytes than your loop:
#
# </div>
# <div lang="zh">
#
# 下面用库里的 `AccumulatedStep`，把第 00 课的那一步分成八个微批次来做。`AccumulatedStep` 会保留八个损失，因此比你的循环多占 28 字节：
#
# </div>

# %% slide="result"
with symbolic():
    decoder = Decoder(vocabulary=2048, hidden=256, heads=8, layers=8, sequence=128)
    tokens, adam = random_tokens(8, 128, 2048), torch.optim.Adam(decoder.parameters())
    step = AccumulatedStep(decoder, adam, loss_sum)
    row = measure(lambda: step(split(tokens, 1)), model=decoder, optimizer=adam)
ledger("05", "eight micro-batches", row)

# %% [markdown] slide={"en": "Sum the losses and divide once. Unscale, clip and update once per step.\n\nThe floor is 16 bytes per parameter. Sum bf16 gradients in fp32.", "zh": "损失求总和，只除一次。每步还原缩放、裁剪、更新各一次。\n\n下限是每个参数 16 字节。bf16 的梯度用 fp32 求和。"}
# ## 5.9 Summary / 小结
#
# <div lang="en">
#
# - In this decoder the peak is a floor plus a fixed number of bytes per sequence in a micro-batch. In fp32 the floor is 16 bytes per trained parameter with Adam, and 8 bytes with SGD without momentum. With a single micro-batch the peak contains no parameter gradients, unless the previous step's gradients stay in memory (`set_to_none=False`). With few tokens the peak may be in the optimizer step (`foreach=True`), and exceed the peak without accumulation (7.16). With a large vocabulary, the logits of one sequence may be most of the activations.
# - Sum the losses, and divide once by the step's number of tokens, counted over all ranks.
# - Once per step: unscale, clip, step the optimizer, update the scaler, step the scheduler, clear gradients.
# - The error of bf16 sums grows with the number of micro-batches. Sums in fp32 avoid this, and take 4 bytes per parameter.
# - With DDP, reduce the gradients only in the last micro-batch (`no_sync`).
#
# **Next:** in [lesson 06](06_flash_attention.ipynb) attention itself keeps fewer bytes.
#
# </div>
# <div lang="zh">
#
# - 在这个解码器上，峰值等于下限加上微批次里各条序列占用的字节，每条序列占用的字节数是固定的。fp32 下，用 Adam 时下限是每个参与训练的参数 16 字节，用不带动量的 SGD 时是 8 字节。只有一个微批次时，峰值里没有参数的梯度，除非设 `set_to_none=False`，把上一步的梯度张量留在内存里。token 很少时，峰值可能出现在优化器更新当中（`foreach=True`），甚至可能比整个批次一起算的峰值更高（7.16 节）。词表很大时，一条序列的 logits 可能占激活值的大部分。
# - 对损失求总和，最后只除一次，除数是这一步在所有进程上的 token 总数。
# - 每步各做一次：还原缩放、裁剪、优化器更新、缩放器更新、调度器更新、梯度清零。
# - 用 bf16 求和，误差随微批次数增长。用 fp32 求和，误差不会增长，但每个参数的梯度之和要占 4 字节。
# - 用 DDP 时，只在最后一个微批次归约梯度（`no_sync`）。
#
# **下一步**：在[第 06 课](06_flash_attention.ipynb)里，我们改写注意力算子，让它自己少保存一些字节。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **Sources.** Daniel and Michael Han (Unsloth) 2024, unsloth.ai/blog/gradient, which names Zhaofeng (2021) and Benjamin Marie as earlier finders. Hugging Face 2024, *Fixing Gradient Accumulation*, huggingface.co/blog/gradient_accumulation. Accelerate documentation, *Performing gradient accumulation*. Li et al. 2020, arXiv:2006.15704 (`no_sync`). Micikevicius et al. 2018, arXiv:1710.03740 (loss scaling). Goyal et al. 2017, arXiv:1706.02677, McCandlish et al. 2018, arXiv:1812.06162, and Malladi et al. 2022, arXiv:2205.10287 (learning rates). Gao et al. 2021, arXiv:2101.06983 (GradCache). Zhang et al. 2023, arXiv:2305.19982 (AdamA). PyTorch tutorial *How to save memory by fusing the optimizer step into the backward pass*.
#
# </div>
# <div lang="zh">
#
# **出处。** Daniel 和 Michael Han（Unsloth）2024，unsloth.ai/blog/gradient，文中说 Zhaofeng（2021）和 Benjamin Marie 更早发现了这个错误。Hugging Face 2024，*Fixing Gradient Accumulation*，huggingface.co/blog/gradient_accumulation。Accelerate 文档 *Performing gradient accumulation*。Li et al. 2020，arXiv:2006.15704（`no_sync`）。Micikevicius et al. 2018，arXiv:1710.03740（损失缩放）。Goyal et al. 2017，arXiv:1706.02677；McCandlish et al. 2018，arXiv:1812.06162；Malladi et al. 2022，arXiv:2205.10287（学习率）。Gao et al. 2021，arXiv:2101.06983（GradCache）。Zhang et al. 2023，arXiv:2305.19982（AdamA）。PyTorch 教程 *How to save memory by fusing the optimizer step into the backward pass*。
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

# %% [markdown] slide={"en": "Two runs with the same initial weights and batches. Only the divisor differs.\n\n**Guess first.** Which is better on short samples? On long ones?", "zh": "两次训练的起始权重相同，批次相同，只有除数不同。\n\n**先猜**：短样本上哪一种更好？长样本上呢？"}
# ## 5.10 Does it train the same? / 训练出来一样吗？
#
# <div lang="en">
#
# A small decoder is trained with AdamW in micro-batches of one sample. Each seed has two runs, which differ only in the divisor: token mean or mean of means. We compare their losses per character on lines of code and on paragraphs that were not used in training. **Guess first:** which divisor is better on lines of code, and which is better on paragraphs?
#
# The runs of eight seeds were recorded in advance. `python -m course_lib.lessons.lesson_05.mean_of_means` repeats them in a few minutes.
#
# </div>
# <div lang="zh">
#
# 下面用 AdamW 训练一个小解码器，每个微批次一个样本。每个种子训练两次，两次只有除数不同，一次对全部 token 求平均，一次求平均的平均。评估用的是训练中没有出现过的代码行和段落，比较的是每个字符的损失。**先猜**：在代码行上，哪一种除数更好？在段落上呢？
#
# 八个种子的训练结果已经事先记录好。用 `python -m course_lib.lessons.lesson_05.mean_of_means` 可以重新训练一遍，要几分钟。
#
# </div>

# %% slide="result"
figures.draw_training()

# %% [markdown]
# <div lang="en">
#
# After 20 steps, training with the mean of means is better on short samples and worse on long samples, in all eight seeds. After 120 steps, its loss on short samples is lower in 7 of 8 seeds, by 0.04 on average. Its loss on long samples is higher in all 8 seeds, also by 0.04 on average. But at step 100, the loss on long samples was higher in only 5 seeds. So for this text and this small network, training with the wrong divisor minimizes another objective, in which a character of a short sample has a larger weight. A loss curve alone would not show this difference.
#
# </div>
# <div lang="zh">
#
# 20 步之后，八个种子的结果一致，都是“平均的平均”在短样本上更好，在长样本上更差。120 步之后，用“平均的平均”训练，在短样本上，8 个种子里有 7 个的损失更低，平均低 0.04。在长样本上，8 个种子的损失都更高，平均高 0.04。不过在第 100 步，只有 5 个种子在长样本上更差。所以对这份文本和这个小网络来说，除数一错，训练的目标就变了，短样本里的每个字符所占的比重更大。单看损失曲线，看不出这个区别。
#
# </div>

# %% [markdown]
# ## 5.11 Packed sequences / 打包的序列
#
# <div lang="en">
#
# **Packing** puts several documents into one row, so that no padding is computed. Packing also changes which tokens are targets. Here the 16 samples of section 5.2 form two micro-batches. The samples are either padded, or packed in one of three ways. The losses are summed and divided by `num_items_in_batch`, the number of targets:
#
# </div>
# <div lang="zh">
#
# **打包**（packing）把几篇文档放进同一行，这样就不必计算填充的部分，但目标 token 也会随之改变。下面把 5.2 节的 16 个样本分成两个微批次，用四种方法各算一次梯度，一种填充，三种打包。每次都先对损失求和，再除以 `num_items_in_batch`，也就是目标数：
#
# </div>

# %%
from transformers import DataCollatorWithFlattening

documents = [row[row != 0] for row in batch]  # without padding
collator = DataCollatorWithFlattening(return_tensors="pt")


def padded(documents):  # one row per document
    labels = nn.utils.rnn.pad_sequence(documents, batch_first=True, padding_value=-100)
    return {"input_ids": labels.clamp(min=0), "labels": labels}


def packed(documents):  # one row
    row = torch.cat(documents)[None]
    return {"input_ids": row, "labels": row}


def packed_with_labels(documents):  # the first token of a document is not a target
    labels = [each.where(torch.arange(len(each)) > 0, -100) for each in documents]
    return packed(documents) | {"labels": torch.cat(labels)[None]}


def packed_by_collator(documents):
    return collator([{"input_ids": each.tolist()} for each in documents])


# %%
def targets_and_gradient(collate):
    micro_batches = [collate(documents[:8]), collate(documents[8:])]
    count = sum((each["labels"][:, 1:] != -100).sum() for each in micro_batches)
    llama.zero_grad()
    for each in micro_batches:
        llama(**each, num_items_in_batch=count).loss.backward()
    return int(count), results.gradient_of(llama)


_, wanted = targets_and_gradient(padded)
rows = []
for collate in (padded, packed, packed_with_labels, packed_by_collator):
    count, found = targets_and_gradient(collate)
    error = results.error(found, wanted)
    shown = f"{error:.0%}" if error > 1e-6 else "equal"
    rows.append((f"`{collate.__name__}`", count, shown))
table(["", "targets", "error of the gradient"], rows)

# %% [markdown]
# <div lang="en">
#
# Packing adds 14 targets, because the last token of a document now predicts the next document's first token. The label −100 removes these targets. But the tokens still attend to earlier documents in their row, so the gradient of this untrained Llama remains far off. `DataCollatorWithFlattening` also returns position numbers that start at 0 in each document. With these numbers, `transformers` 5.23 separates the documents in its attention (sdpa here), and the gradient equals the gradient of the padded batch. Packing changes the targets, so count them after packing.
#
# </div>
# <div lang="zh">
#
# 打包之后多出 14 个目标，因为一篇文档的最后一个 token 现在要预测下一篇的第一个 token。把标签设成 −100，就能去掉这些目标。可是计算注意力时，token 仍会用到同一行里前面的文档，所以这个未经训练的 Llama 的梯度误差还是很大。`DataCollatorWithFlattening` 还会返回位置编号，每篇文档都从 0 开始编号。`transformers` 5.23 的注意力（这里是 sdpa）根据这些编号把各篇文档分开计算，梯度就与填充时相等。打包会改变目标，因此目标数要在打包之后再统计。
#
# </div>

# %% [markdown]
# ## 5.12 How large should a micro-batch be, and a batch? / 微批次取多大，批次取多大？
#
# <div lang="en">
#
# Accumulation can cost time, because small kernels leave parts of a GPU idle. The next cell measures your GPU, or shows the numbers recorded on an H100 and an H200. On both GPUs, a step in fp16 takes 6.9 times as long with 16 micro-batches of 1 sample as with all 16 samples at once.
#
# </div>
# <div lang="zh">
#
# 核函数每次处理的数据太少时，GPU 的一部分计算单元会闲着，因此梯度累积可能增加用时。如果这台机器有 GPU，下面的单元格就现场测量。如果没有，就显示在 H100 和 H200 上的记录。用 fp16 时，如果把批次分成 16 个微批次，每个只有 1 个样本，那么在 H100 和 H200 上，这一步的用时都是一次算完整个批次所需时间的 6.9 倍。
#
# </div>

# %% tags=["nbval-ignore-output", "shows-device"]
from course_lib.lessons import on_gpu

on_gpu("05")

# %% [markdown]
# <div lang="en">
#
# On the H200 a micro-batch of 1, 4 or 16 samples takes 14.9, 14.3 or 34.7 ms. These times are within 3% of a rule: **a micro-batch takes 14.6 ms, or 2.17 ms per sample, whichever is longer**. As in section 5.1, the line through the peaks of 1 and 4 samples fails for all 16 samples at once. It predicts 438.7 MB too much, which is the size of all gradients.
#
# **Exercise 4.** The recorded peaks are 2,370,539,600 bytes with 1 sample per micro-batch and 3,562,995,744 bytes with 4 samples. A batch of 64 samples is split into equal micro-batches, and `budget` is in bytes. Among the sizes whose peak is within the budget, choose the size with the fastest step. Among equally fast sizes, choose the smallest. Also return the peak and the step's time for this size. Assume that the line through the two recorded peaks and the rule for the time hold for all sizes.
#
# </div>
# <div lang="zh">
#
# 在 H200 上，一个微批次有 1、4、16 个样本时，分别用时 14.9、14.3、34.7 ms。这些用时都符合一条简单的规律（误差不到 3%），即**一个微批次的用时是 14.6 ms，或者是样本数乘以 2.17 ms，取较长的一个**。峰值的情形与 5.1 节相同。过 1 个样本和 4 个样本的两个峰值画一条直线，用来预测 16 个样本一次算完时的峰值，结果比实测高 438.7 MB，正好等于全部梯度的大小。
#
# **练习 4。** 每个微批次 1 个样本时，记录的峰值是 2,370,539,600 字节；4 个样本时是 3,562,995,744 字节。现在把 64 个样本的批次分成一样大的微批次。给定预算 `budget`（字节），请在峰值不超过预算的微批次大小中，选出使这一步用时最短的一种。如果有几种一样快，就选最小的。还要返回这种大小对应的峰值和这一步的用时。假设不论微批次多大，峰值都在过上面两点的直线上，用时都符合上一段的规律。
#
# </div>


# %%
sizes = 1, 2, 4, 8, 16, 32, 64  # samples per micro-batch


def choose(budget):
    return {"samples": None, "bytes": None, "milliseconds": None}


exercises.check_micro_batch(choose)


# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not exercises.check_micro_batch.accepted:

    def choose(budget):
        slope = (3_562_995_744 - 2_370_539_600) / 3
        peak = {m: 2_370_539_600 + (m - 1) * slope for m in sizes}
        time = {m: 64 / m * max(14.6, 2.17 * m) for m in sizes}
        best = min((m for m in sizes if peak[m] <= budget), key=time.get)  # ties: the smallest
        return {"samples": best, "bytes": peak[best], "milliseconds": time[best]}


exercises.check_micro_batch(choose)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# The size of the **batch** is another question, because it changes the training. If the global batch keeps its size, the learning rate can stay the same. A batch $k$ times as large has a less noisy gradient, so the learning rate is usually raised. With SGD, the **linear scaling rule** of Goyal et al. 2017 multiplies the rate by $k$, for batches of up to 8192 images. A warmup raises the rate gradually to this value. With Adam, the **square-root rule** of Malladi et al. 2022 multiplies the rate by $\sqrt{k}$, multiplies $1 - \beta$ by $k$, and divides ε by $\sqrt{k}$. Beyond some size, a larger batch hardly reduces the number of steps (McCandlish et al. 2018).
#
# </div>
# <div lang="zh">
#
# **批次**取多大是另一个问题，因为批次的大小会改变训练。如果全局批次不变，学习率也不必变。如果批次增大到 $k$ 倍，梯度的噪声会变小，所以通常要调高学习率。用 SGD 时按**线性缩放规则**，把学习率乘以 $k$，并在训练开头预热，让学习率逐渐升到这个值（Goyal et al. 2017，批次最大到 8192 张图像）。用 Adam 时按**平方根规则**，把学习率乘以 $\sqrt{k}$，$1 - \beta$ 乘以 $k$，ε 除以 $\sqrt{k}$（Malladi et al. 2022）。批次超过一定大小之后，再加大批次，训练需要的步数也少不了多少（McCandlish et al. 2018）。
#
# </div>

# %% [markdown]
# ## 5.13 Loss scaling, skipped steps, and `zero_grad` / 损失缩放、跳过的更新与 `zero_grad`
#
# <div lang="en">
#
# In fp16, numbers below about $3 \cdot 10^{-8}$ become zero. bf16 has the exponent range of fp32, so a bf16 gradient needs no scaler. The next cell counts the zeros among 1000 gradients between $10^{-11}$ and $10^{-5}$:
#
# </div>
# <div lang="zh">
#
# 在 fp16 中，小于约 $3 \cdot 10^{-8}$ 的数都变成零。bf16 的指数范围与 fp32 相同，所以 bf16 的梯度不需要缩放器。下面取 1000 个梯度，大小在 $10^{-11}$ 到 $10^{-5}$ 之间，数一数其中有几个变成零：
#
# </div>


# %%
def vanished(dtype, scale):
    weight = torch.ones(1000, dtype=dtype, requires_grad=True)
    factors = torch.logspace(-11, -5, 1000)  # the exact gradients
    (scale * (weight.float() * factors).sum()).backward()
    return int((weight.grad == 0).sum())


cases = {"fp16": (torch.float16, 1), "fp16, scaled by 2^16": (torch.float16, 2.0**16)}
cases["bf16"] = torch.bfloat16, 1
rows = [(name, vanished(*case)) for name, case in cases.items()]
table(["dtype", "zeros among 1000"], rows)

# %% [markdown]
# <div lang="en">
#
# If a gradient is inf or NaN, the scaler skips the optimizer step and halves its scale. Then the scheduler should not step either. The attribute `stepped` of `AccumulatedStep`'s result says whether the optimizer stepped:
#
# </div>
# <div lang="zh">
#
# 只要有一个梯度是 inf 或 NaN，缩放器就跳过这次优化器更新，并把缩放倍数减半。这时调度器也不应更新学习率。`AccumulatedStep` 返回值的 `stepped` 说明这次有没有更新权重：
#
# </div>

# %%
decoder, sgd, _, _ = results.training_parts(0)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
step = AccumulatedStep(decoder, sgd, mean_of_means.loss_sum, scaler=scaler, max_norm=0.1)
{"stepped": step(split(batch, 4)).stepped, "scale": scaler.get_scale() / 2.0**127}

# %% [markdown]
# <div lang="en">
#
# By default `zero_grad` sets each `.grad` to None. If it set each `.grad` to zero instead, Adam would still move an unused parameter, because its moments contain older gradients:
#
# </div>
# <div lang="zh">
#
# `zero_grad` 默认把各个 `.grad` 设成 None。如果设成零，即使一个参数没有参与计算，Adam 仍会更新这个参数，因为两个矩里还有以前的梯度：
#
# </div>


# %%
def moves_without_gradient(set_to_none):
    weight = nn.Parameter(torch.ones(3))
    adam = torch.optim.Adam([weight], lr=0.1)
    weight.sum().backward()
    adam.step()
    adam.zero_grad(set_to_none=set_to_none)
    before = weight.detach().clone()
    adam.step()
    return not torch.equal(weight, before)


{f"set_to_none={choice}": moves_without_gradient(choice) for choice in (True, False)}

# %% [markdown]
# ## 5.14 With autocast, and the true loss / 配合 autocast，并报出真正的损失
#
# <div lang="en">
#
# Autocast covers only the forward passes. The loss to print is the mean over all tokens of the step's four micro-batches. The mean of the last micro-batch alone is a different number:
#
# </div>
# <div lang="zh">
#
# autocast 只用于前向。打印的损失应当是这一步四个微批次里全部 token 的平均损失。如果只对最后一个微批次求平均，得到的是另一个数：
#
# </div>

# %%
decoder, sgd, _, _ = results.training_parts(0)
step = AccumulatedStep(
    decoder, sgd, mean_of_means.loss_sum, max_norm=1.0, autocast_dtype=torch.bfloat16
)
for each in batches:
    with torch.no_grad():
        last, count = mean_of_means.loss_sum(decoder, each[-4:])
    true = step(split(each, 4)).loss
table(["the two losses differ by more than 0.1"], [[abs(float(last) / count - true) > 0.1]])

# %% [markdown]
# ## 5.15 BatchNorm sees one micro-batch / BatchNorm 只看见一个微批次
#
# <div lang="en">
#
# In training mode, BatchNorm uses the mean and variance of one micro-batch, and no divisor of the loss corrects this. Layers that compute each sample alone, such as LayerNorm, give the gradient of the whole batch:
#
# </div>
# <div lang="zh">
#
# 训练模式下，BatchNorm 只用一个微批次来求均值和方差，梯度因此与整个批次一起算时不同，把损失除以什么数都无法纠正。如果一层对各个样本分别计算（例如 LayerNorm），梯度就与整个批次一起算时相同：
#
# </div>


# %%
def gradient_with(norm, size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 1)).double()
    for micro_batch in torch.randn(32, 8).double().split(size):
        (model(micro_batch).square().sum() / 32).backward()
    return results.gradient_of(model)


rows = []
for norm in (nn.BatchNorm1d, nn.LayerNorm):
    error = results.error(gradient_with(norm(8), 4), gradient_with(norm(8), 32))
    rows.append((f"`{norm.__name__}`", f"{error:.0%}" if error > 1e-9 else "equal"))
table(["", "error of the gradient"], rows)

# %% [markdown]
# ## 5.16 Losses that are not a sum over samples / 不是逐样本求和的损失
#
# <div lang="en">
#
# A contrastive loss compares each pair of embeddings with all other pairs in the batch. A micro-batch has fewer pairs to compare with. **GradCache** first computes all embeddings without a graph, then the loss and its gradient with respect to each embedding. Then it computes each micro-batch's embeddings again, with a graph and the same dropout masks, and runs backward from the embeddings' gradients. (The network below has no dropout.)
#
# </div>
# <div lang="zh">
#
# 对比损失要把每一对样本与批次里其余各对比较，而微批次里可供比较的样本对更少。**GradCache** 先不建计算图，算出全部嵌入，再求损失，以及损失对每个嵌入的梯度。然后逐个微批次重计算嵌入，这次建立计算图，并使用与第一次相同的 dropout 掩码，最后从嵌入的梯度开始反向传播。（下面的网络没有 dropout。）
#
# </div>


# %%
def contrastive(one, other):  # (n, d), (n, d): one pair per row
    one, other = F.normalize(one, dim=1), F.normalize(other, dim=1)
    return F.cross_entropy(one @ other.T / 0.1, torch.arange(len(one)))


def by_size(net, x, y, size):
    for one, other in zip(x.split(size), y.split(size), strict=True):
        (contrastive(net(one), net(other)) * size / len(x)).backward()


# %%
def grad_cache(net, x, y, size):
    with torch.no_grad():
        cached = [torch.cat([net(each) for each in data.split(size)]) for data in (x, y)]
    contrastive(*(each.requires_grad_() for each in cached)).backward()
    for data, embeddings in zip((x, y), cached, strict=True):
        for each, gradient in zip(data.split(size), embeddings.grad.split(size), strict=True):
            net(each).backward(gradient)


# %%
results.errors_of_pairs(by_size, grad_cache)

# %% [markdown]
# ## 5.17 Steps inside backward, and AdamA / 在反向之中更新，以及 AdamA
#
# <div lang="en">
#
# A hook can update each parameter **as soon as its gradient is ready** and release the gradient at once. By how much does this lower the peak with one sequence, and by how much with eight sequences?
#
# </div>
# <div lang="zh">
#
# 有了钩子，**梯度一就绪**就可以更新对应的参数，并立刻释放梯度。用一条序列时，峰值会降低多少？用八条序列时呢？
#
# </div>


# %%
@torch.no_grad()
def update(parameter):
    parameter -= 0.1 * parameter.grad
    parameter.grad = None


def peak_with(sequences, hook=None):  # of forward, backward and SGD; the hook replaces SGD
    with symbolic():
        decoder = Decoder(vocabulary=2048, hidden=256, heads=8, layers=8, sequence=128)
        for parameter in decoder.parameters() if hook else ():
            parameter.register_post_accumulate_grad_hook(hook)
        with MemoryMeter(decoder) as meter:
            add_gradient(decoder, random_tokens(sequences, 128, 2048))
            torch.optim.SGD(decoder.parameters(), lr=0.1).step()
    return [round(each / 1e6, 1) for each in (meter.peak_bytes, max(meter.series()["gradient"]))]


# %%
rows = [("after backward (1)", *peak_with(1)), ("in backward (1)", *peak_with(1, update))]
rows += [("after backward (8)", *peak_with(8)), ("in backward (8)", *peak_with(8, update))]
table(["update (sequences)", "peak (MB)", "most gradients at once (MB)"], rows)

# %% [markdown]
# <div lang="en">
#
# With one sequence the peak falls by only 6.4 MB, because it moves to the start of backward. With eight sequences the peak was already at the start of backward, so the hook does not lower it. The hook also has two limits. Clipping by the norm of all gradients becomes impossible. And with accumulation, the second micro-batch would use other weights than the first micro-batch.
#
# </div>
# <div lang="zh">
#
# 用一条序列时，峰值只降低 6.4 MB，因为峰值移到了反向刚开始的时候。用八条序列时，峰值本来就在反向刚开始的时候，所以一点也没有降低。这种钩子还有两个限制。一是无法按全部梯度的范数裁剪。二是与梯度累积合用时，第二个微批次用的权重与第一个微批次不同。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **AdamA** combines accumulation with a hook that runs as soon as a gradient is ready. The hook adds each gradient to Adam's **moments** immediately, and the weights are updated at the end of the step. The first moment equals Adam's first moment. The second moment adds the squares of the micro-batches' gradients, whereas Adam squares the sum of the gradients:
#
# </div>
# <div lang="zh">
#
# **AdamA** 也用这样的钩子，却可以与梯度累积合用。每算出一个梯度，钩子就立刻把这个梯度加进 Adam 的两个**矩**，到这一步的最后才更新权重。一阶矩与 Adam 的相同。二阶矩不同，AdamA 累加各微批次梯度的平方，而 Adam 先对梯度求和再平方：
#
# </div>

# %%
from course_lib.lessons.lesson_05 import claims

decoder, total, squares = mean_of_means.small_decoder(), 0, 0
for micro_batch in batch.split(1):
    decoder.zero_grad()
    (mean_of_means.loss_sum(decoder, micro_batch)[0] / sum(lengths)).backward()
    gradient = results.gradient_of(decoder)
    total, squares = total + gradient, squares + gradient**2
claims.older_claims(f"{squares.sum() / (total**2).sum():.1f}")
