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
# Eight sequences at once peak at 277.7 MB. The step can also compute them one at a time and add up their gradients. Then its peak is lower, and it needs no more FLOPs. This is **gradient accumulation**, and each part of the batch is a **micro-batch**.
#
# Is it the same gradient? Late in 2024, Unsloth and Hugging Face wrote that their trainers did not give the whole batch's gradient. With bf16 parameters the gradient may be off even if the loop is right. Section 5.5 measures by how much.
#
# </div>
# <div lang="zh">
#
# 八条序列一起算，峰值是 277.7 MB。也可以一次只算一条，再把梯度加起来，这样峰值更低，FLOPs 也不增加。这就是**梯度累积**（gradient accumulation），批次拆出来的每一部分叫**微批次**（micro-batch）。
#
# 梯度还一样吗？2024 年秋，Unsloth 和 Hugging Face 先后撰文说，自己的训练器算出的梯度，与整个批次一起算的不一样。另外，如果参数是 bf16，循环写对了，梯度也可能有偏差。5.5 节会测出偏差有多大。
#
# </div>

# %%
from course_lib.teaching import language

language()

# %% [markdown]
# <div lang="en">
#
# **Goals** (100 minutes). Predict the peak for micro-batches of any size from two runs. Name the right divisor, and what a wrong one changes. Fix a training loop with five bugs. Sum bf16 gradients in fp32, and say what this costs. Read the loop that several processes run.
#
# **What to know before**: lesson 01.
#
# </div>
# <div lang="zh">
#
# **目标**（100 分钟）：学完本课，你只需运行两次，就能预测任意大小的微批次的峰值；能说出除数应当是什么，除数不对又有什么后果；能修好一个有五处错误的训练循环；会用 fp32 对 bf16 的梯度求和，并说出代价；能读懂多个进程一起运行的循环。
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

# %% [markdown] slide={"en": "Run forward and backward for one micro-batch, then for the next. Backward adds to `.grad`.\n\n**Guess first.** If the micro-batch is halved, is the peak?", "zh": "做完一个微批次的前向和反向，再做下一个。反向会把梯度加进 `.grad`。\n\n**先猜**：微批次减半，峰值也减半吗？"}
# ## 5.1 Micro-batches, and a line / 微批次与一条直线
#
# <div lang="en">
#
# Backward **adds** to `.grad`. So the loop runs forward and backward for one micro-batch, then for the next one. At the end it divides the gradients and updates the weights once. Only one micro-batch's activations are live at a time. The decoder and the step are those of lesson 00. Here $m$ is the number of sequences in a micro-batch, out of eight in the batch.
#
# **Guess first:** if micro-batches of 4 become micro-batches of 2, is the peak halved? Which bytes do not depend on the split?
#
# </div>
# <div lang="zh">
#
# 反向会把梯度**加**进 `.grad`。所以循环做完一个微批次的前向和反向，就接着做下一个，最后把梯度除一次，权重更新一次。同一时刻，只有一个微批次的激活值存活。解码器和训练步与第 00 课相同。$m$ 是每个微批次的序列数，整个批次共八条。
#
# **先猜**：微批次从 4 条减到 2 条，峰值也减半吗？哪些字节与怎样拆无关？
#
# </div>


# %% slide="code"
def loss_sum(model, tokens):  # (b, s + 1) -> the sum of the losses, and how many there are
    logits, targets = model(tokens[:, :-1]), tokens[:, 1:].flatten()  # (b, s, v), (b · s,)
    return F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum"), len(targets)


def add_gradient(model, micro_batch):
    loss, count = loss_sum(model, micro_batch)
    loss.backward()
    return count


# %%
def metered_step(m):
    with symbolic():  # bytes without numbers: lesson 01
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

# %% [markdown] slide={"en": "$m = 4$: 207,597,976 bytes. $m = 2$: 158,804,376 bytes.\n\n**Guess first.** The peak for $m = 1$? For $m = 8$, a single micro-batch?", "zh": "$m = 4$：207,597,976 字节。$m = 2$：158,804,376 字节。\n\n**先猜**：$m = 1$ 时的峰值是多少？$m = 8$，只有一个微批次时呢？"}
# <div lang="en">
#
# **Exercise 1.** Two points define a line: the bytes per sequence times $m$, plus a constant. Predict the peak in bytes for $m = 1, 2, 4, 8$. Use the line for $m = 1, 2, 4$. At $m = 8$ there is a single micro-batch, whose peak is at the start of backward, before any gradient exists. Then gradients are created while activations are released. One set of gradients is as large as the weights, 27,502,592 bytes.
#
# </div>
# <div lang="zh">
#
# **练习 1。** 两点确定一条直线，也就是每条序列的字节数乘以 $m$，再加一个常数。预测 $m = 1, 2, 4, 8$ 时的峰值（字节），其中 $m = 1, 2, 4$ 用这条直线。$m = 8$ 时只有一个微批次，梯度陆续产生，激活值陆续释放，峰值出现在反向刚开始时，那时一个梯度也还没有。一整套梯度与权重一样大，27,502,592 字节。
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
        return floor + m * slope - (27_502_592 if m == 8 else 0)


exercises.check_peaks(predicted_peak)
### END SOLUTION

# %% slide="result"
meters = {m: metered_step(m) for m in (8, 4, 2, 1)}
predictions([(f"m = {m}", predicted_peak(m), meters[m].peak_bytes) for m in meters], unit="bytes")

# %% [markdown]
# <div lang="en">
#
# The line predicts the peak of lesson 00 exactly, from two other runs. Its constant, 110,010,776 bytes, is the **floor**. With Adam in fp32 it consists of **16 bytes per parameter** (weights, gradients, two moments) and 408 bytes: Adam's 100 step counts, a loss and its gradient. The floor does not depend on the split.
#
# For $m = 1$ the line is 393,216 bytes too low. At which moment does each of these two peaks occur?
#
# </div>
# <div lang="zh">
#
# 只凭另外两次运行，就把第 00 课的峰值算得一字节不差。直线的常数项 110,010,776 字节就是**下限**。用 fp32 的 Adam，其中绝大部分是**每个参数 16 字节**（权重、梯度、两个矩），另外 408 字节是 Adam 的 100 个步数计数，以及损失和它的梯度。批次怎样拆，下限都不变。
#
# 而 $m = 1$ 时，直线少算了 393,216 字节。下表中的两个峰值各出现在什么时刻？
#
# </div>

# %% slide="result"
results.peak_moments({m: meters[m] for m in (2, 1)})

# %% [markdown]
# <div lang="en">
#
# Your line describes one moment: softmax's backward, where two tensors as large as the logits are live next to the activations. All of these shrink with $m$. At $m = 1$ another moment is higher, the backward of the last layer. There, two gradients of **weights** have not been added yet, and these do not shrink. The head's gradient (2.1 MB) waits for the embedding's, because both are one matrix (lesson 01). The other one (1.0 MB) belongs to an MLP. As in lesson 02, a formula for one moment fails when the peak is elsewhere.
#
# </div>
# <div lang="zh">
#
# 你的直线描述的是一个时刻，即 softmax 的反向，那时除了激活值，还有两个与 logits 一样大的张量。这些都随 $m$ 缩小。到 $m = 1$ 时，峰值换到另一个时刻，即最后一层的反向。那时有两份**权重**的梯度还没有累加进去，而它们的大小与微批次无关。一份是输出头的（2.1 MB），它要等嵌入层的梯度，因为两者是同一个矩阵（见第 01 课）。另一份是某个 MLP 的（1.0 MB）。与第 02 课一样，公式只描述一个时刻，峰值出现在别的时刻时就不再成立。
#
# </div>

# %% slide="result"
figures.draw_peaks(meters, predicted_peak)

# %% [markdown] slide={"en": "One loop takes the mean of each micro-batch's mean. The other sums all losses and divides once.\n\n**Guess first.** How far apart are the gradients?", "zh": "一种循环先求每个微批次的平均，再求平均。另一种把损失全部加起来，只除一次。\n\n**先猜**：两种梯度差多少？"}
# ## 5.2 Which divisor? / 该除以什么
#
# <div lang="en">
#
# The sequences of section 5.1 had equal lengths, unlike real text. The course's own text has lines of code and paragraphs of prose, read character by character and cut at 128. A batch has 16 such samples. (`mean_of_means.loss_sum` is the function above without the padding.)
#
# Many loops divide the **mean** loss of each micro-batch by the number of micro-batches. The other way is to add up sums and to divide once by the number of all tokens. **Guess first:** how far apart are the two gradients with one sample per micro-batch, and with eight?
#
# </div>
# <div lang="zh">
#
# 5.1 节的随机 token 长度都一样，文本却不是。课程自带一份文本，按字符处理，其中有代码行，也有成段的文字，每条最长取 128 个字符，一个批次 16 条。（`mean_of_means.loss_sum` 与上面的函数相同，只是不计填充。）
#
# 许多循环先求每个微批次的**平均**损失，再除以微批次数。另一种做法是把总和加起来，最后除一次，除以全部 token 数。**先猜**：每个微批次一条样本时，两种梯度差多少？八条时呢？
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
print("token mean, in micro-batches of 8, 3 and 1: below 1e-6:", max(exact) < 1e-6)

# %% slide="result"
figures.draw_say(lengths, off)

# %% [markdown]
# <div lang="en">
#
# Without dropout, BatchNorm (5.15) and bf16 (5.5), sums are right up to rounding, however the batch is split. The mean of means is off by 15% to 25% in micro-batches of one sample. In micro-batches of eight, which mix lengths, it is off by 0.1% to 10%. Each micro-batch has the same weight, whatever its number of tokens. A character in a line of 14 counts nearly seven times its share, and one in a long paragraph three quarters of it. With equal counts both loops agree, so such tests never found the bug.
#
# It can also be a **choice**: some reinforcement-learning fine-tuning takes a mean per answer, then a mean over answers. But then the result should not depend on the split either.
#
# </div>
# <div lang="zh">
#
# 没有 dropout 和 BatchNorm（5.15 节），也不用 bf16（5.5 节）时，求总和的做法不论怎样拆，都只差舍入误差。用平均的平均，每个微批次一条样本时，梯度差 15% 到 25%；每个微批次八条、有长有短时，差 0.1% 到 10%。原因是每个微批次权重相同，不论其中有多少 token。一行 14 个字符的代码里，一个字符的权重将近应有的七倍，而长段落里的一个字符只有应有的四分之三。token 数相等时两种循环结果一致，所以用相等的 token 数做测试，一直没有发现这个错误。
#
# 这也可以是一种**选择**：有些强化学习微调先对每个回答取平均，再对各个回答取平均。即使如此，结果也不应当取决于怎样拆批次。
#
# </div>

# %% [markdown] slide={"en": "The bug of 2024: a small Llama, labels of −100, micro-batches of two.\n\n**Guess first.** By how much is the gradient off?", "zh": "2024 年的那个错误：一个小的 Llama，标签里有 −100，每个微批次两条。\n\n**先猜**：梯度差多少？"}
# <div lang="en">
#
# **The bug of 2024.** Here it runs in the library where it was found, on the small Llama of section 2.9. In fine-tuning, the tokens of a prompt have the label −100, which the loss ignores, so the numbers of targets differ. The model returns the mean over the targets of its micro-batch, and trainers divided it by the number of micro-batches. With `num_items_in_batch`, the model divides the sum by that number instead. **Guess first:** by how much is the gradient off without it?
#
# </div>
# <div lang="zh">
#
# **2024 年的那个错误。** 下面就在发现它的库里重现它，用的是 2.9 节的小 Llama。微调时，提示词的 token 标签是 −100，损失会忽略它们，所以各样本的目标数不同。不传别的参数，模型返回的是本微批次各目标的平均损失，当时的训练器再把它除以微批次数。传入 `num_items_in_batch`，模型就把总和除以这个数。**先猜**：不传时，梯度差多少？
#
# </div>


# %%
from course_lib.lessons.lesson_02 import own_code

llama, tokens = own_code.llama(), random_tokens(8, 127, 2048)  # (8, 128)
prompts = torch.arange(0, 96, 12)  # tokens in the prompt of each sample: 0, 12, ..., 84
labels = tokens.masked_fill(torch.arange(128) < prompts[:, None], -100)
targets = (labels[:, 1:] != -100).sum()  # nothing predicts the first token


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
print(f"mean of means: {results.error(llama_gradient(2), whole):.0%} off")
print("with num_items_in_batch: below 1e-6:", results.error(counted, whole) < 1e-6)

# %% [markdown]
# <div lang="en">
#
# With these prompts and random tokens, the gradient is off by 33%. With the number of targets, only rounding is left.
#
# In `transformers` 5.23, `Trainer` does this by default. It counts the targets of a step over all micro-batches and devices (`average_tokens_across_devices=True`). It passes the number to a model whose `forward` takes extra keyword arguments, such as Llama's, or to your `compute_loss_func`. For other models it still divides by the number of micro-batches. If you override `compute_loss`, divide by that number, or set `loss_is_scaled_for_ga = False`. Otherwise a Llama's loss is not divided at all.
#
# </div>
# <div lang="zh">
#
# 在这些提示词长度和随机 token 下，梯度差 33%。传入目标数之后，就只剩舍入误差。
#
# `transformers` 5.23 的 `Trainer` 默认就是这样做的。它统计一步里所有微批次、所有设备上的目标数（`average_tokens_across_devices=True`）。如果模型的 `forward` 接受额外的关键字参数，例如 Llama，就把这个数传给模型；也可以传给你的 `compute_loss_func`。其他模型仍旧除以微批次数。如果你重写了 `compute_loss`，就要除以这个数，或者设 `loss_is_scaled_for_ga = False`，否则 Llama 的损失根本没有做除法。
#
# </div>

# %% [markdown] slide={"en": "Two runs with the same weights and batches. Only the divisor differs.\n\n**Guess first.** Which is better on short samples? On long ones?", "zh": "两次训练的起始权重相同，批次相同，只有除数不同。\n\n**先猜**：短样本上哪一种更好？长样本上呢？"}
# ## 5.3 Does it train the same? / 训练出来一样吗？
#
# <div lang="en">
#
# A small decoder is trained with AdamW in micro-batches of one sample. Each seed has two runs, with different divisors. They are judged on held-out lines and paragraphs, by the loss per character. **Guess first:** which one is better on which text?
#
# The runs of eight seeds are recorded. `python -m course_lib.lessons.lesson_05.mean_of_means` repeats them in a few minutes.
#
# </div>
# <div lang="zh">
#
# 用 AdamW 训练一个小解码器，每个微批次一条样本。同一个种子的两次训练只有除数不同。评判用的是两者都没见过的代码行和段落，看每个字符的损失。**先猜**：哪一种在哪类文本上更好？
#
# 八个种子的训练是事先做好并记录下来的。用 `python -m course_lib.lessons.lesson_05.mean_of_means` 可以重做一遍，要几分钟。
#
# </div>

# %% slide="result"
figures.draw_training()

# %% [markdown]
# <div lang="en">
#
# After 20 steps all eight seeds agree: the mean of means is better on short samples and worse on long ones. After 120 steps it is better on short samples in 7 of 8 seeds, by 0.04 on average, and worse on long ones in 8 of 8, by 0.04. But at step 100 it was worse on long samples in only 5 seeds. So for this text and this small network, the wrong divisor trains another problem, in which a character of a short sample counts more. A loss curve alone would not show this.
#
# </div>
# <div lang="zh">
#
# 20 步之后，八个种子一致：平均的平均在短样本上更好，在长样本上更差。120 步之后，短样本上 8 个种子里有 7 个更好，平均低 0.04；长样本上 8 个都更差，平均高 0.04。可是在第 100 步，只有 5 个种子在长样本上更差。所以对这份文本和这个小网络，除数不对时训练的是另一个问题，其中短样本的每个字符权重更大。单看损失曲线看不出来。
#
# </div>

# %% [markdown] slide={"en": "These nine lines have five bugs.\n\nWhich lines run for each micro-batch, and which once per step?", "zh": "这九行代码里有五处错误。\n\n哪些行每个微批次运行一次，哪些每一步运行一次？"}
# ## 5.4 A loop with five bugs / 有五处错误的循环
#
# <div lang="en">
#
# The divisor is one of five common bugs in such loops. The loop below has all five. Its parts:
#
# - A **scaler** multiplies the loss before backward, so that small gradients do not become zero in fp16. `scaler.unscale_(optimizer)` divides the gradients again, once per step. If you do not call it, `scaler.step` does so.
# - **Clipping** shortens the gradient of the whole batch to `max_norm`.
# - The **scheduler** sets the learning rate for the optimizer's next step.
# - A step takes `every` micro-batches. The last step of an epoch may have fewer.
#
# **Exercise 2.** Fix the loop. Each of five checks looks for one bug and cannot see the other four. Then a meter checks that only one micro-batch's activations are live at a time.
#
# </div>
# <div lang="zh">
#
# 除数不对，只是这类循环里五种常见错误之一。下面的循环五处都有。它由这几部分组成：
#
# - **缩放器**（scaler）在反向之前把损失放大，使很小的梯度在 fp16 里不至于变成零。`scaler.unscale_(optimizer)` 再把梯度除回去（还原缩放），每步一次。如果没有手动调用，`scaler.step` 会自己做。
# - **裁剪**把整个批次的梯度缩小，使范数不超过 `max_norm`。
# - **调度器**（scheduler）为优化器的下一步设定学习率。
# - 每 `every` 个微批次更新一次。一个 epoch 的最后一步，微批次可能不足 `every` 个。
#
# **练习 2。** 修好这个循环。五项检查各找一处错误，看不见另外四处。最后由计量器确认，同一时刻只有一个微批次的激活值存活。
#
# </div>


# %% minutes=22 slide="code"
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
            scheduler.step()
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
# In each row the loop has one bug, and only the check for it fails. So each bug passes the four other checks. If each micro-batch is clipped alone, the direction of the gradient is wrong. If the gradients are not unscaled, they are 1024 times too long when they are clipped, and almost nothing is left of them.
#
# The library's `AccumulatedStep` avoids all five bugs. It also supports autocast and several processes, and its sums do not overflow in fp16. It leaves the same weights as your loop:
#
# </div>
# <div lang="zh">
#
# 表中每一行的循环只有一处错误，只有对应的那项检查报错。也就是说，每种错误都能骗过另外四项检查。如果每个微批次各自裁剪，梯度的方向就错了。如果忘了还原缩放，裁剪时梯度就是原来的 1024 倍，裁完几乎什么也不剩。
#
# 库里的 `AccumulatedStep` 没有这五处错误。它还支持 autocast 和多个进程，总和在 fp16 里不会溢出。它得到的权重与你的循环一样：
#
# </div>

# %% slide="both"
table(["weights equal"], [[results.same_weights_as_library(train_epoch)]])

# %% [markdown] slide={"en": "Parameters, gradients and their sums are bf16, with 8 bits of precision.\n\n**Guess first.** Draw the gradient's error from 1 micro-batch to 256.", "zh": "参数、梯度、梯度之和都是 bf16，有效精度 8 位。\n\n**先猜**：从 1 个微批次到 256 个，梯度的误差怎样变？画出来。"}
# ## 5.5 The accumulator's dtype / 累加器的 dtype
#
# <div lang="en">
#
# If the parameters are bf16, the gradients are bf16, and so are their sums, with 8 bits of precision. **Guess first:** draw the error of the gradient against the number of micro-batches, from 1 to 256.
#
# **Exercise 3.** Sum in fp32 instead. A hook that is registered with `parameter.register_post_accumulate_grad_hook(hook)` is called with the parameter each time its `.grad` is complete. Return a dict that will hold the sum of each parameter's gradients in fp32. No bf16 gradient may stay in memory. How many bytes per parameter does this cost?
#
# </div>
# <div lang="zh">
#
# 参数是 bf16 时，梯度是 bf16，梯度之和也是，有效精度只有 8 位。**先猜**：微批次数从 1 到 256，梯度的误差怎样变？画出来。
#
# **练习 3。** 改用 fp32 求和。用 `parameter.register_post_accumulate_grad_hook(hook)` 注册钩子后，每当这个参数的 `.grad` 算好，PyTorch 就以它为参数调用钩子。返回一个字典，用来存放每个参数的梯度之和（fp32）。内存里不许再留着 bf16 的梯度。这样做，每个参数要多少字节？
#
# </div>


# %% minutes=9
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
def gradient_in(n, dtype, seed, in_fp32=False):  # in n micro-batches
    model, tokens = mean_of_means.rounded_decoder(seed), random_tokens(256, 16, 127, seed=seed) + 1
    model = model.to(dtype)  # its weights are bf16 numbers, whatever the dtype
    sums = accumulate_in_fp32(model.parameters()) if in_fp32 else {}
    for micro_batch in tokens.split(256 // n):
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
# The error rises with the number of micro-batches. With one micro-batch you see the error of the bf16 pass itself. With more of them, each addition also rounds the sum to 8 bits, and the sum is much larger than the added gradient. In the end this error dominates. In fp32 the curve stays flat. So with 256 micro-batches, bf16 sums have more than three times the error of fp32 sums. Only the accumulator differs.
#
# The figure covers the weights of the layers' Linears, 90% of the parameters. It leaves out the norms, 0.6%, because LayerNorm's backward on a CPU sums over all rows in bf16. With a single micro-batch, their gradients are off by 6% with two threads and 11% with one, and by less with many. This is an effect of that kernel.
#
# </div>
# <div lang="zh">
#
# 微批次越多，误差越大。只有一个微批次时，看到的是 bf16 前向和反向本身的误差。微批次多了以后，每次 bf16 加法也要舍入到 8 位精度，而这时总和比新加进来的梯度大得多，所以最后舍入误差占了主导。用 fp32 求和时，曲线一直是平的。因此，分成 256 个微批次时，误差是用 fp32 求和时的三倍多，这全是累加器造成的。
#
# 图中只画了各层 Linear 的权重，占参数的 90%。归一化层的参数占 0.6%，没有画，因为 CPU 上 LayerNorm 的反向用 bf16 对所有的行求和。只有一个微批次时，用两个线程，它们的梯度差 6%，用一个线程差 11%，微批次多了反而小些。这是那个核函数的问题。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# The price is 4 bytes per parameter instead of 2. With master weights and moments that is 18 bytes instead of 16. `AccumulatedStep(…, accumulate="fp32")` does it. At the end both exist for a moment, 20 bytes. Megatron and DeepSpeed have options for fp32 sums.
#
# </div>
# <div lang="zh">
#
# 代价是每个参数要用 4 字节存放总和，而梯度原来只要 2 字节。加上主权重和矩，一共 18 字节，而不是 16。`AccumulatedStep(…, accumulate="fp32")` 就是这样做的。最后把平均梯度从 fp32 转成 bf16 时，两份梯度会短暂并存，这一刻每个参数一共 20 字节。Megatron 和 DeepSpeed 也有用 fp32 求和的选项。
#
# </div>

# %% [markdown] slide={"en": "Two processes have eight micro-batches each, and each backward reduces all gradients.\n\n**Guess first.** How many of the eight reductions are needed?", "zh": "两个进程，各有八个微批次，每次反向都归约全部梯度。\n\n**先猜**：八次归约里，有几次是必要的？"}
# ## 5.6 Across processes / 跨进程
#
# <div lang="en">
#
# With DDP, each device has a process, called a **rank**, with its own samples. Each backward gives all gradients to **all-reduce**, which takes their mean over the ranks. `no_sync` skips this reduction. **Guess first:** how many of eight micro-batches need the reduction? If each rank divides by its own number of tokens, the mean over ranks is a mean of means again. What must the cell's last two lines do?
#
# </div>
# <div lang="zh">
#
# 用 DDP 时，每台设备有一个进程，叫做 **rank**，各自处理自己的样本。每次反向都把全部梯度交给 **all-reduce**，对各进程取平均，而 `no_sync` 可以跳过它。**先猜**：八个微批次里，有几个需要归约？如果每个进程除以自己的 token 数，对各进程取平均就又成了平均的平均。下面代码的最后两行应当怎样写？
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
# One of the eight reductions is enough. The gradient equals that of one process with all tokens, although the second rank has fewer tokens. (Lesson 08 counts the bytes that are really sent.) With FSDP the advice is the opposite, because `no_sync` keeps the gradients of **all** parameters on each rank (section 5.17).
#
# </div>
# <div lang="zh">
#
# 八次归约里只需要一次。虽然第二个进程的 token 更少，梯度仍与单个进程处理全部 token 时相等。（实际发送了多少字节，第 08 课再统计。）用 FSDP 时，建议正好相反，因为 `no_sync` 会让每个进程留着**全部**参数的梯度（见 5.17 节）。
#
# </div>

# %% [markdown]
# ## 5.7 In your own code / 实际怎么写
#
# <div lang="en">
#
# The effective (or global) batch size is micro-batch size × accumulation steps × ranks. Section 5.2 ran the first row's loss. The other rows need several devices, or packages that are not installed here.
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
# 等效（全局）批次大小 = 微批次大小 × 累积步数 × 进程数。第一行的损失在 5.2 节运行过，其余各行需要多台设备，或者这里没有安装的软件包。
#
# | 框架 | 写法 |
# |---|---|
# | Hugging Face | `TrainingArguments(per_device_train_batch_size=1, gradient_accumulation_steps=8)`；自己写的损失函数要除以 `num_items_in_batch` |
# | Accelerate | `with accelerator.accumulate(model):`；损失会除以微批次数 |
# | PyTorch DDP | 除最后一个微批次外，都用 `with model.no_sync():` |
# | FSDP2 | `model.set_requires_gradient_sync(last)`：通信少，但每个进程留着全部梯度 |
# | Megatron-LM | `--micro-batch-size 1 --global-batch-size 8 --accumulate-allreduce-grads-in-fp32` |
# | DeepSpeed | `"gradient_accumulation_steps": 8`、`"data_types": {"grad_accum_dtype": "fp32"}` |
# | TRL | `SFTConfig(gradient_accumulation_steps=8)` |
#
# </div>

# %% [markdown] slide={"en": "Three claims about gradient accumulation. Raise your hand before each row: does it hold, partly, or not?", "zh": "关于梯度累积的三句说法。看每一行之前先举手：成立、部分成立，还是不成立？"}
# ## 5.8 Claims and measurements / 说法与实测
#
# <div lang="en">
#
# The table compares three common claims with the batches of section 5.2 and the sums of section 5.5.
#
# </div>
# <div lang="zh">
#
# 下表用 5.2 节的批次和 5.5 节的求和，检验三句常见的说法。
#
# </div>

# %% slide="result"
figures.what_you_may_have_read(off, errors, exact)

# %% [markdown]
# ## 5.9 The ledger / 账本
#
# <div lang="en">
#
# The library runs the step of lesson 00 in eight micro-batches. It keeps the eight losses, 28 bytes more than your loop:
#
# </div>
# <div lang="zh">
#
# 用库的训练步，把第 00 课的那一步分成八个微批次来做。它会保留八个损失，比你的循环多 28 字节：
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
# ## 5.10 Summary / 小结
#
# <div lang="en">
#
# - In this decoder the peak is a floor plus a fixed number of bytes per sequence. In fp32 the floor is 16 bytes per trained parameter with Adam, and 8 with SGD without momentum. A single micro-batch lacks one set of gradients, unless `set_to_none=False` keeps them. With few tokens the peak may be in the optimizer (`foreach=True`), and even higher than for the whole batch (7.16).
# - Sum the losses, and divide once by the step's number of tokens on all ranks. The mean of means weighs tokens unequally.
# - Once per step: unscale, clip, step, update the scaler, step the scheduler, clear. Use a smaller last group, too.
# - The error of bf16 sums grows with the number of micro-batches. That of fp32 sums does not, and they take 4 bytes per parameter.
# - With DDP, let only the last micro-batch reduce (`no_sync`).
#
# **Next:** in [lesson 06](06_flash_attention.ipynb) the operator itself keeps less.
#
# </div>
# <div lang="zh">
#
# - 在这个解码器上，峰值等于下限，再加上每条序列固定的字节数。fp32 下，用 Adam 时下限是每个受训练的参数 16 字节，用不带动量的 SGD 时是 8 字节。只有一个微批次时，峰值里少一整套梯度，除非用 `set_to_none=False` 保留。token 很少时，峰值可能在别的时刻，例如用 `foreach=True` 时在优化器更新当中，甚至可能比整个批次一起算更高（7.16 节）。
# - 损失求总和，只除一次，除以这一步在所有进程上的全部 token 数。平均的平均给各 token 的权重不相等，还取决于怎样拆。
# - 每步各做一次：还原缩放、裁剪、优化器更新、缩放器更新、调度、清零。最后不满一组的微批次也要用上。
# - 用 bf16 求和，误差随微批次数增长。用 fp32 求和则不会，代价是每个参数 4 字节。
# - 用 DDP 时，只让最后一个微批次归约（`no_sync`）。
#
# **下一步**：在[第 06 课](06_flash_attention.ipynb)里，算子自己就少保存一些。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **Sources.** Daniel and Michael Han (Unsloth) 2024, unsloth.ai/blog/gradient, which names Zhaofeng (2021) and Benjamin Marie as earlier finders of the bug. Hugging Face 2024, *Fixing Gradient Accumulation*, huggingface.co/blog/gradient_accumulation. Accelerate documentation, *Performing gradient accumulation*. Li et al. 2020, arXiv:2006.15704 (`no_sync`). Micikevicius et al. 2018, arXiv:1710.03740 (loss scaling). Goyal et al. 2017, arXiv:1706.02677, McCandlish et al. 2018, arXiv:1812.06162, and Malladi et al. 2022, arXiv:2205.10287 (learning rates). Gao et al. 2021, arXiv:2101.06983 (GradCache). Zhang et al. 2023, arXiv:2305.19982 (AdamA). PyTorch tutorial *How to save memory by fusing the optimizer step into the backward pass*.
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

# %% [markdown]
# ## 5.11 A larger batch and the learning rate / 批次变大，学习率怎么办
#
# <div lang="en">
#
# If the global batch stays the same, so does the learning rate. A batch $k$ times as large has a less noisy gradient, so the rate is usually raised. SGD's factor is $k$, after a warmup (the **linear scaling rule** of Goyal et al. 2017, up to 8192 images). Adam's is $\sqrt{k}$, and $1 - \beta$ is multiplied by $k$ (the **square-root rule** of Malladi et al. 2022). Beyond some size, a larger batch saves few steps (McCandlish et al. 2018).
#
# </div>
# <div lang="zh">
#
# 如果全局批次不变，学习率也不必变。批次变成 $k$ 倍，梯度的噪声变小，所以通常要调高学习率。SGD 用**线性缩放规则**，学习率乘以 $k$，开头要预热（Goyal et al. 2017，批次最大到 8192 张图像）。Adam 用**平方根规则**，学习率乘以 $\sqrt{k}$，$1 - \beta$ 乘以 $k$（Malladi et al. 2022）。批次超过一定大小之后，再加大也省不了多少步数（McCandlish et al. 2018）。
#
# </div>

# %% [markdown]
# ## 5.12 Loss scaling in fp16 / fp16 的损失缩放
#
# <div lang="en">
#
# In fp16, numbers below about $3 \cdot 10^{-8}$ become zero. bf16 has the exponent range of fp32, so it needs no scaler. Here are 1000 gradients between $10^{-11}$ and $10^{-5}$:
#
# </div>
# <div lang="zh">
#
# 在 fp16 中，大约小于 $3 \cdot 10^{-8}$ 的数都变成零。bf16 的指数范围与 fp32 相同，所以不需要缩放器。下面取 1000 个梯度，在 $10^{-11}$ 到 $10^{-5}$ 之间：
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
{name: f"{vanished(*case)} of 1000 vanish" for name, case in cases.items()}

# %% [markdown]
# ## 5.13 What counts as a step / 什么才算一步
#
# <div lang="en">
#
# If a gradient is inf or NaN, the scaler skips the step and halves its scale. The scheduler should then wait too, so check `stepped`:
#
# </div>
# <div lang="zh">
#
# 只要有一个梯度是 inf 或 NaN，缩放器就跳过这次更新，并把缩放倍数减半。这时调度器也应等待，是否更新看 `stepped`：
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
# By default `zero_grad` sets None. With zeros, Adam would still move an unused parameter by its older gradients:
#
# </div>
# <div lang="zh">
#
# `zero_grad` 默认把梯度设成 None。如果设成零，Adam 仍会按旧的梯度更新一个没有参与计算的参数：
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
# Autocast covers only the forward passes. The loss to print is the mean over the tokens of all four micro-batches. The last micro-batch's mean differs:
#
# </div>
# <div lang="zh">
#
# autocast 只用于前向。应当打印的损失，是四个微批次全部 token 的平均。最后一个微批次自己的平均与它不同：
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
print("more than 0.1 apart:", abs(float(last) / count - true) > 0.1)

# %% [markdown]
# ## 5.15 BatchNorm sees one micro-batch / BatchNorm 只看见一个微批次
#
# <div lang="en">
#
# In training mode, BatchNorm takes one micro-batch's mean and variance, and no divisor repairs that. Layers that compute each sample alone, such as LayerNorm, give equal gradients:
#
# </div>
# <div lang="zh">
#
# 训练模式下，BatchNorm 只用一个微批次来求均值和方差，除数取什么也补救不了。对各样本分别计算的层，例如 LayerNorm，梯度则不变：
#
# </div>


# %%
def gradient_with(norm, size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 1)).double()
    for micro_batch in torch.randn(32, 8).double().split(size):
        (model(micro_batch).square().sum() / 32).backward()
    return results.gradient_of(model)


for norm in (nn.BatchNorm1d, nn.LayerNorm):
    difference = results.error(gradient_with(norm(8), 4), gradient_with(norm(8), 32))
    print(norm.__name__, f"{difference:.0%} off" if difference > 1e-9 else "equal")

# %% [markdown]
# ## 5.16 Losses that are not a sum over samples / 不是逐样本求和的损失
#
# <div lang="en">
#
# A contrastive loss compares each pair with all others in the batch, and a micro-batch has fewer pairs. **GradCache** first computes all embeddings without a graph, then the loss and its gradient for each embedding. Then it computes each micro-batch again, with a graph, and runs backward from that gradient:
#
# </div>
# <div lang="zh">
#
# 对比损失拿每一对样本与批次里其余各对相比，而微批次里可比的样本对更少。**GradCache** 先不建计算图，算出全部嵌入，再求损失，以及损失对每个嵌入的梯度。然后把每个微批次重计算一次，这次建立计算图，并从这些梯度开始反向：
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
# ## 5.17 FSDP: the opposite advice / FSDP：相反的建议
#
# <div lang="en">
#
# A rank of DDP holds all gradients anyway. A rank of FSDP keeps only its share (lesson 08). With `sync="last"`, `AccumulatedStep` keeps all gradients until the last micro-batch: for our decoder on 8 ranks, by formula, 27.5 MB instead of 3.4 MB, to reduce once per step instead of eight times.
#
# </div>
# <div lang="zh">
#
# DDP 的每个进程本来就留着全部梯度。FSDP 的每个进程只留自己的那一份（第 08 课）。但 `AccumulatedStep` 用了 `sync="last"`，就要把全部梯度一直留到最后一个微批次：以我们的解码器、8 个进程为例，按公式计算，要留 27.5 MB 而不是 3.4 MB，换来每步只归约一次，而不是八次。
#
# </div>

# %% [markdown]
# ## 5.18 Steps inside backward, and AdamA / 在反向之中更新，以及 AdamA
#
# <div lang="en">
#
# A hook can update each parameter **as soon as its gradient is ready** and drop the gradient at once. How much does that save, for one sequence and for eight?
#
# </div>
# <div lang="zh">
#
# 可以用钩子，**梯度一就绪**就更新这个参数，并立刻释放梯度。一条序列时能省多少？八条时呢？
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
# For one sequence the peak falls by only 6.4 MB, because it moves to the start of backward. For eight sequences it was there already, so nothing is saved. Clipping by the norm of all gradients becomes impossible. With accumulation, the second micro-batch would use other weights than the first.
#
# </div>
# <div lang="zh">
#
# 一条序列时，峰值只降低 6.4 MB，因为峰值移到了反向刚开始的时候。八条序列时，峰值本来就在反向刚开始的时候，所以一点也省不下来。这时无法按全部梯度的范数裁剪。与累积合用时，第二个微批次用的权重已经与第一个不同。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **AdamA** does combine both: its hook adds each gradient to Adam's **moments** at once, and the weights are updated at the end. The first moment equals Adam's. The second adds the squares of the gradients, whereas Adam squares their sum:
#
# </div>
# <div lang="zh">
#
# **AdamA** 能把两者合在一起：钩子把每个梯度立刻累加进 Adam 的两个**矩**，权重最后才更新。一阶矩与 Adam 的相同。二阶矩是各微批次梯度的平方之和，而 Adam 是先求和再平方：
#
# </div>

# %%
decoder, total, squares = mean_of_means.small_decoder(), 0, 0
for micro_batch in batch.split(1):
    decoder.zero_grad()
    (mean_of_means.loss_sum(decoder, micro_batch)[0] / sum(lengths)).backward()
    gradient = results.gradient_of(decoder)
    total, squares = total + gradient, squares + gradient**2
ratio = float(squares.sum() / (total**2).sum())
f"second moments: {ratio:.1f} of Adam's"

# %% [markdown]
# ## 5.19 How large should a micro-batch be? / 微批次取多大？
#
# <div lang="en">
#
# Accumulation can cost time, because small kernels leave parts of a GPU idle. This cell measures your GPU, or shows the figures recorded on an H100 and an H200. On both, a step in fp16 takes 6.9 times as long with 16 micro-batches of 1 sample as with all samples at once. So use the largest micro-batch that fits.
#
# </div>
# <div lang="zh">
#
# 梯度累积可能增加时间，因为太小的核函数会让 GPU 的一部分计算单元闲着。有 GPU 时，这个单元格现场测量，没有就显示 H100 和 H200 的记录。用 fp16 把一批分成 16 个微批次、每个 1 条样本时，这一步在两块卡上的用时都是一次全部算完的 6.9 倍。所以微批次应当取放得下的最大值。
#
# </div>

# %% tags=["nbval-ignore-output", "shows-device"]
from course_lib.lessons import on_gpu

on_gpu("05")

# %% [markdown]
# <div lang="en">
#
# **Exercise 4.** A batch of 64 sequences for our decoder is split into equal micro-batches. What is the largest micro-batch whose peak is under 1 GB ($10^9$ bytes)?
#
# </div>
# <div lang="zh">
#
# **练习 4。** 用我们的解码器，把 64 条序列的批次分成一样大的微批次。要让峰值低于 1 GB（$10^9$ 字节），每个微批次最多几条？
#
# </div>

# %%
answer = None  # sequences
exercises.check_largest_micro_batch(answer)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
fits = [m for m in (1, 2, 4, 8, 16, 32) if 110_010_776 + 24_396_800 * m <= 10**9]
exercises.check_largest_micro_batch(max(fits))
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# **Exercise 5.** A micro-batch of $m$ samples takes $5 + m$ milliseconds. Find the smallest power of two that computes at least 80% as many samples per second as $m = 64$.
#
# </div>
# <div lang="zh">
#
# **练习 5。** $m$ 个样本的微批次要 $5 + m$ 毫秒。$m$ 取二的幂，要让每秒样本数至少达到 $m = 64$ 时的 80%，$m$ 最小是多少？
#
# </div>

# %%
answer = None  # samples
exercises.check_fast_micro_batch(answer)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
fast = [m for m in (1, 2, 4, 8, 16, 32, 64) if m / (5 + m) >= 0.8 * 64 / (5 + 64)]
exercises.check_fast_micro_batch(min(fast))
### END SOLUTION

# %% [markdown]
# ## 5.20 More claims / 更多的说法

# %%
from course_lib.lessons.lesson_05 import claims

used = 60 // (4 * 4) * (4 * 4)  # samples in complete groups
claims.older_claims((used, 60), (meters[8].peak_bytes, meters[1].peak_bytes), ratio)
