# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] slide={"en": "Eight sequences at once: 277.7 MB. One at a time: less, for not one FLOP more.\n\nHow much less? And is it the same gradient?", "zh": "八条序列一起算：277.7 MB。一次一条，占得更少，一个 FLOP 也不多。\n\n少多少？梯度还一样吗？"}
# # 5 What if the batch is split into micro-batches? (gradient accumulation) / 把批次拆成微批次呢？（梯度累积）
#
# <div lang="en">
#
# Eight sequences at once peak at 277.7 MB. If the step takes them one at a time and adds up their gradients, its peak is lower, for not one FLOP more. This is **gradient accumulation**; a piece of the batch is a **micro-batch**. Nothing seems easier than adding.
#
# Is it the same gradient? Late in 2024 Unsloth and Hugging Face wrote that their trainers' was not; Zhaofeng had seen it in 2021, and Benjamin Marie saw it again. And in bf16 you can do all of it right, and the gradient may still be off. Section 5.5 measures by how much.
#
# </div>
# <div lang="zh">
#
# 八条序列一起算，峰值是 277.7 MB。一次只算一条，再把梯度加起来，同样的一步峰值就更低，一个 FLOP 也不多。这就是**梯度累积**（gradient accumulation）；拆出来的每一份叫**微批次**（micro-batch）。做加法，看起来再容易不过了。
#
# 梯度还一样吗？2024 年秋，Unsloth 和 Hugging Face 先后撰文，说自己的训练器算出来的不一样；这个问题 Zhaofeng 在 2021 年就发现过，后来 Benjamin Marie 又发现了一次。而在 bf16 里，即使每一步都做对了，梯度也仍然可能有偏差，5.5 节会测出有多大。
#
# </div>

# %%
from course_lib.teaching import language

language()

# %% [markdown]
# <div lang="en">
#
# **Goals** (90 minutes). Predict the peak for any piece, from two runs. Say by what to divide, and what another divisor trains. Mend a training loop with five bugs. Add up in fp32 where the parameters are bf16, and say what it costs. Read the loop that several ranks run.
#
# **What to know before**: lesson 01.
#
# </div>
# <div lang="zh">
#
# **目标**（90 分钟）：测两次，就能预测任意一种拆法的峰值；说出该除以什么，除数不对时训练的又是什么；修好一个有五处错误的训练循环；参数是 bf16 时以 fp32 求和，并说出代价；读懂多个进程一起运行的循环。
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

from course_lib.lessons import lesson_05, what_you_may_have_read
from course_lib.lessons.ledger import ledger
from course_lib.memory import MemoryMeter, measure, symbolic
from course_lib.models import Decoder, random_tokens
from course_lib.teaching import predictions, table

# %% [markdown] slide={"en": "Forward and backward for one piece, then the next. `.grad` adds up by itself.\n\n**Guess first.** Half the piece: half the peak?", "zh": "做完一份的前向和反向，再做下一份；`.grad` 自己会累加。\n\n**先猜**：每份减半，峰值也减半吗？"}
# ## 5.1 Pieces, and a line / 拆成几份，画一条直线
#
# <div lang="en">
#
# Backward **adds** to `.grad`. So: forward and backward for one piece, then for the next; divide at the end, step once. Only one piece's activations are alive at a time. The decoder is that of lesson 00, the step its second one; $m$ is the number of sequences in a piece, of the eight.
#
# **Guess first:** from pieces of 4 to pieces of 2, does the peak halve? What does not care how the batch comes?
#
# </div>
# <div lang="zh">
#
# 反向把梯度**加**进 `.grad`。所以：做完一份的前向和反向，再做下一份；最后除一次，更新一次。同一时刻，存活的只有一份的激活值。解码器和训练步都与第 00 课相同（取第二步）；$m$ 是每份里的序列数，总共八条。
#
# **先猜**：每份从 4 条减到 2 条，峰值也减半吗？哪些东西与批次怎样拆无关？
#
# </div>


# %% slide="code"
def loss_sum(model, tokens):  # (b, s + 1) -> the sum of the losses, and how many there are
    logits, targets = model(tokens[:, :-1]), tokens[:, 1:].flatten()  # (b, s, v), (b · s,)
    return F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum"), len(targets)


def add_gradient(model, piece):
    loss, count = loss_sum(model, piece)
    loss.backward()
    return count


# %%
def metered_step(m):
    with symbolic():  # bytes without numbers: lesson 01
        decoder = Decoder(vocabulary=2048, hidden=256, heads=8, layers=8, sequence=128)
        tokens, adam = random_tokens(8, 128, 2048), torch.optim.Adam(decoder.parameters())
        add_gradient(decoder, tokens)
        adam.step()  # makes its state
        decoder.zero_grad()
        with MemoryMeter(decoder, adam) as meter:
            total = sum(add_gradient(decoder, piece) for piece in tokens.split(m))
            for parameter in decoder.parameters():
                parameter.grad /= total
            adam.step()
    return meter


# %% slide="result"
meters = {m: metered_step(m) for m in (4, 2)}
table(
    ["sequences per micro-batch", "peak (bytes)"],
    [(m, each.peak_bytes) for m, each in meters.items()],
)

# %% [markdown] slide={"en": "207,597,976 bytes for pieces of 4, 158,804,376 for 2.\n\n**Guess first.** For 1? And for all 8, where there is no piece before?", "zh": "每份 4 条：207,597,976 字节；2 条：158,804,376 字节。\n\n**先猜**：1 条呢？8 条一份、前面没有别的份，又如何？"}
# <div lang="en">
#
# **Exercise 1.** Two points make a line: the bytes per sequence times $m$, plus a constant. Type what the line predicts: the peak in bytes for $m = 1, 2, 4, 8$. At $m = 8$ there is a single micro-batch. Its gradients arrive while its activations are released, and at the peak, where backward begins, no gradient exists yet; one set of them is as large as the weights, 27,502,592 bytes.
#
# </div>
# <div lang="zh">
#
# **练习 1。** 两点确定一条直线，也就是每条序列的字节数乘以 $m$，再加一个常数。写出这条直线在 $m = 1, 2, 4, 8$ 时预测的峰值，以字节计。$m = 8$ 时只有一个微批次：梯度陆续产生，激活值陆续释放；峰值出现在反向刚开始时，那时一个梯度也还没有。一整套梯度与权重一样大，27,502,592 字节。
#
# </div>


# %% minutes=6
def predicted_peak(m):
    return None


lesson_05.check_peak_of_pieces(predicted_peak)


# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not lesson_05.check_peak_of_pieces.accepted:

    def predicted_peak(m):
        slope = (207_597_976 - 158_804_376) / 2
        floor = 158_804_376 - 2 * slope
        return floor + m * slope - (27_502_592 if m == 8 else 0)


lesson_05.check_peak_of_pieces(predicted_peak)
### END SOLUTION

# %% slide="result"
meters = {m: metered_step(m) for m in (8, 4, 2, 1)}
predictions([(f"m = {m}", predicted_peak(m), meters[m].peak_bytes) for m in meters], unit="bytes")

# %% [markdown] slide={"en": "277,682,584, met to the byte. The floor is 16 bytes a parameter and 408.\n\nAnd one row is 393,216 off. Whose bytes?", "zh": "277,682,584，一字节不差。下限是每个参数 16 字节，外加 408。\n\n有一行差 393,216。是谁的字节？"}
# <div lang="en">
#
# The plain step of lesson 00, met to the byte, from two runs that were not it. The floor, 110,010,776 bytes, is **16 bytes a parameter** (weights, gradients, two moments) and 408: Adam's 100 step counts, a loss and its gradient. The batch may come as it likes: they don't care.
#
# And at $m = 1$ we are 393,216 bytes short. At which moment are these two peaks?
#
# </div>
# <div lang="zh">
#
# 只用另外两次测量，就把第 00 课那一步的峰值算到一字节不差。下限 110,010,776 字节，是**每个参数 16 字节**（权重、梯度、两个矩），外加 408 字节：Adam 的 100 个步数计数，以及损失和它的梯度。批次怎样拆，都与它们无关。
#
# 而 $m = 1$ 时少算了 393,216 字节。这两个峰值各出现在什么时刻？
#
# </div>

# %% slide="result"
moments = []
for m in (2, 1):
    peak = max(meters[m].timeline, key=lambda sample: sum(sample.bytes.values()))
    moments.append((m, peak.operator, peak.bytes["activation"], peak.bytes["temporary"]))
columns = [
    "sequences per micro-batch",
    "operator at the peak",
    "activations (bytes)",
    "temporary tensors (bytes)",
]
table(columns, moments)

# %% [markdown]
# <div lang="en">
#
# Your line follows one moment: softmax's backward, two tensors of the logits' size beside the activations. All of that shrinks with $m$. At $m = 1$ it has shrunk so far that another moment is higher: the backward of the last layer, where two gradients of **weights** are not added up yet: the head's, 2.1 MB, which waits for the embedding's (they are one matrix, lesson 01), and an MLP's, 1.0 MB. Those do not shrink. As in lesson 02: a formula for one moment ends where another one is higher.
#
# </div>
# <div lang="zh">
#
# 你的直线针对的是一个时刻：softmax 的反向，激活值旁边有两个 logits 大小的张量。这些都随 $m$ 缩小。到 $m = 1$ 时缩得太多，另一个时刻便成了最高点：最后一层的反向，那时有两份**权重**的梯度还没有加进去：一份是输出头的，2.1 MB，它要等嵌入层的梯度（两者是同一个矩阵，见第 01 课）；另一份是 MLP 的，1.0 MB。它们不会缩小。与第 02 课一样：公式针对的是一个时刻，别的时刻更高时就不再成立。
#
# </div>

# %% slide="result"
lesson_05.draw_peaks(meters, predicted_peak)

# %% [markdown] slide={"en": "Lines of code beside paragraphs. Mean of each piece, mean of the means; or sums, divided once.\n\n**Guess first.** How far apart are the gradients?", "zh": "代码行与段落混在一起。先求每份的平均，再求平均的平均；或者求总和，只除一次。\n\n**先猜**：两种梯度差多少？"}
# ## 5.2 By what to divide / 该除以什么
#
# <div lang="en">
#
# Random tokens were all of one length; text isn't. The course ships its own, character by character: lines of its code and paragraphs of its prose, cut at 128, in one batch of 16. (`lesson_05.loss_sum` is the function above, and leaves padding out.)
#
# The loop that one finds everywhere takes the **mean** of each piece and divides by the number of pieces. The other one adds up sums and divides once, by all tokens. **Guess first:** how far is the first one's gradient from the second's, in pieces of one sample, and in pieces of eight?
#
# </div>
# <div lang="zh">
#
# 随机 token 都一样长，文本却不是。课程自带一份文本，逐字符处理：自己的代码行和自己的段落，最长取 128，混在一个 16 条样本的批次里。（`lesson_05.loss_sum` 与上面的函数相同，只是不计填充。）
#
# 随处可见的循环先求每份的**平均**，再除以份数。另一种循环把总和加起来，最后只除一次，除以全部 token 数。**先猜**：前一种的梯度与后一种差多少？每份一条样本时呢？每份八条时呢？
#
# </div>

# %% slide="both"
text_loss_sum = lesson_05.loss_sum
batch = lesson_05.batch(0)  # (16, 129), padded with zeros
lengths = (batch[:, 1:] != 0).sum(1).tolist()
print(lengths)


# %% slide="code"
def add_gradients(model, pieces, kind):
    total = sum(int((piece[:, 1:] != 0).sum()) for piece in pieces)
    for piece in pieces:
        loss, count = text_loss_sum(model, piece)
        divisor = count * len(pieces) if kind == "mean of means" else total
        (loss / divisor).backward()


def gradient_of(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).double()


def error(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


# %%
def mean_of_means_error(batch, size, kind="mean of means"):
    decoder = lesson_05.small_decoder()
    add_gradients(decoder, [batch], "token mean")  # all at once
    wanted = gradient_of(decoder)
    decoder.zero_grad()
    add_gradients(decoder, batch.split(size), kind)
    return error(gradient_of(decoder), wanted)


# %%
batches = [lesson_05.batch(seed) for seed in range(8)]
exact = [mean_of_means_error(batch, size, "token mean") for size in (8, 3, 1)]
off = {size: [mean_of_means_error(each, size) for each in batches] for size in (8, 4, 2, 1)}
print("token mean, in pieces of 8, 3, 1: below 1e-6:", max(exact) < 1e-6)

# %% slide="result"
lesson_05.draw_say(lengths, off)

# %% [markdown]
# <div lang="en">
#
# Sums are right to rounding, whatever the pieces. The mean of means is 15 to 25 % off in pieces of one, and from 0.1 to 10 % in pieces of eight, where lengths mix by chance. Each piece has one vote, however many tokens it has: a character of a line of 14 counts nearly seven times its share, one of a long paragraph three quarters. With equal counts both agree, so a test with equal counts finds nothing: that is how it stayed hidden.
#
# It can also be a **choice**: a mean for each answer, then over answers, as some fine-tuning by reinforcement does. Then it should not depend on how you cut the batch.
#
# </div>
# <div lang="zh">
#
# 总和的做法，不论怎样拆都只差舍入误差。平均的平均，每份一条样本时差 15% 到 25%；每份八条时，长短碰巧混在一起，差 0.1% 到 10%。每份各占一票，不论 token 多少：在一行 14 个字符的代码里，一个字符的份量将近它应占的七倍；在长段落里，只有四分之三。token 数相等时两者一致，所以用相等的 token 数来测，什么也测不出来：错误就是这样藏起来的。
#
# 这也可以是一种**选择**：先对每个回答取平均，再对各个回答取平均，有些强化学习微调就是这样做的。那样的话，结果就不该取决于你怎样拆批次。
#
# </div>

# %% [markdown] slide={"en": "Same weights at the start, same batches, another divisor.\n\n**Guess first.** Who is better on short samples? And on long ones?", "zh": "起始权重相同，批次相同，只是除数不同。\n\n**先猜**：短样本上谁更好？长样本上呢？"}
# ## 5.3 Does it train the same? / 训练出来一样吗？
#
# <div lang="en">
#
# A small decoder, AdamW, pieces of one sample; two runs that differ in the divisor alone. They are judged on text that neither has seen, on lines and on paragraphs apart: losses a character. **Guess first:** which is better on which?
#
# </div>
# <div lang="zh">
#
# 一个小解码器，用 AdamW，每份一条样本；两次训练只有除数不同。评判用的是两者都没见过的文本，代码行与段落分开，都是每个字符的损失。**先猜**：哪一种在哪里更好？
#
# </div>


# %%
def train(kind, seed, steps=20):
    decoder = lesson_05.small_decoder(seed)
    adam = torch.optim.AdamW(decoder.parameters(), lr=3e-3)
    for step in range(steps):
        add_gradients(decoder, lesson_05.batch(1000 * seed + step).split(1), kind)
        adam.step()
        decoder.zero_grad()
    return lesson_05.judged(decoder)


# %% slide="result"
(short, long), (other_short, other_long) = (train(k, 1) for k in ("token mean", "mean of means"))
recorded = lesson_05.recorded()["runs"]["1"]["token mean"][1]  # seed 1, after 20 steps
print("token mean as recorded, to 0.01:", abs(short - recorded[0]) < 0.01, end="; mean of means: ")
print("lower on short samples", other_short < short, "and higher on long ones", other_long > long)

# %% slide="result"
lesson_05.draw_training()

# %% [markdown]
# <div lang="en">
#
# The curves are recorded: `python -m course_lib.lessons.lesson_05.mean_of_means` makes them again, eight seeds, 120 steps. After 20 steps all eight agree: better on short samples, worse on long ones. After 120, short is better in 7 of 8, by 0.04 on average, and long is worse in 8 of 8, by 0.04; yet at step 100 long was worse in 5 only. So much can be said, of this text and this small network: the wrong divisor trains too, another problem, in which a character of a short sample counts more. A loss curve alone would not tell you.
#
# </div>
# <div lang="zh">
#
# 曲线是事先记录的：`python -m course_lib.lessons.lesson_05.mean_of_means` 会重做一遍，八个种子，各 120 步。20 步后八个种子一致：短样本上更好，长样本上更差。120 步后，短样本上 8 个里 7 个更好，平均低 0.04；长样本上 8 个都更差，平均高 0.04；可是在第 100 步，长样本上只有 5 个更差。对这份文本、这个小网络，能说的就这么多：除数不对也照样能训练，只是训练的是另一个问题，短样本里每个字符的份量更重。单看损失曲线，是看不出来的。
#
# </div>

# %% [markdown] slide={"en": "Nine lines, as one meets them. Five bugs.\n\nWhich lines belong to a piece, and which to a step?", "zh": "九行代码，到处都能见到这样的写法。五处错误。\n\n哪些行属于每一份，哪些属于每一步？"}
# ## 5.4 A loop with five bugs / 有五处错误的循环
#
# <div lang="en">
#
# The divisor is one of five things that go wrong in such loops. Below is one as you may meet it, with all five. Its parts: a **scaler** multiplies the loss before backward, so that small gradients survive in fp16, and divides the gradients again before the step (`scaler.unscale_(optimizer)`, once a step; `scaler.step` does it where nobody has). **Clipping** shortens the gradient of the whole batch to `max_norm`. The scheduler sets the learning rate for the next step of the optimizer. A step takes `every` pieces; an epoch need not be a multiple of that.
#
# **Exercise 2.** Mend it. Five checks look at it, each at one thing, and each is blind to the other four: equal counts where it is not about counts, no bound where it is not about clipping, and so on. Then a meter looks whether more micro-batches take more memory.
#
# </div>
# <div lang="zh">
#
# 除数只是这类循环里五处常见错误之一。下面这个循环五处都占全了，你也许见过类似的。它的各个部分：**缩放器**（scaler）在反向之前把损失放大，使很小的梯度在 fp16 里不至于变成零，更新之前再把梯度除回去（`scaler.unscale_(optimizer)`，还原缩放，每步一次；没有人做的话，`scaler.step` 自己会做）。**裁剪**把整批的梯度缩短到 `max_norm`。调度器（scheduler）为优化器的下一步设定学习率。每 `every` 份更新一次；一个 epoch 的份数不一定是它的倍数。
#
# **练习 2。** 修好它。有五项检查，每项只看一件事，对另外四件视而不见：不考 token 数的，各份的 token 数就相等；不考裁剪的，就没有上限；其余类推。最后还有计量器，看微批次增加时内存是否也增加。
#
# </div>


# %% minutes=22 slide="code"
def train_epoch(model, loss_sum, pieces, optimizer, scheduler, scaler, every, max_norm):
    for number, piece in enumerate(pieces, start=1):
        loss, count = loss_sum(model, piece)
        scaler.scale(loss / count / every).backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scheduler.step()
        if number % every == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


lesson_05.check_loop(train_epoch)


# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
if not lesson_05.check_loop.accepted:

    def train_epoch(model, loss_sum, pieces, optimizer, scheduler, scaler, every, max_norm):
        for start in range(0, len(pieces), every):
            total = 0
            for piece in pieces[start : start + every]:
                loss, count = loss_sum(model, piece)
                scaler.scale(loss).backward()
                total += count
            scaler.unscale_(optimizer)
            for parameter in model.parameters():
                parameter.grad /= total
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()


lesson_05.check_loop(train_epoch)
### END SOLUTION

# %% jupyter={"source_hidden": true} slide="result"
lesson_05.draw_order()

# %% slide="result"
lesson_05.five_bugs()

# %% [markdown]
# <div lang="en">
#
# One bug at a time: what its own check sees, and how many of the others see anything. None: each bug passes four good tests. Clip each piece and the direction is wrong; forget to unscale and the bound holds for gradients that are 1024 times too long, so nearly nothing is left of them.
#
# The library's step does all five, and more: fp16-safe sums, autocast, several ranks, and an error leaves gradients as they were.
#
# </div>
# <div lang="zh">
#
# 一次只有一处错误：专管它的那项检查看到了什么，其余四项里又有几项有反应。一项也没有：每种错误都能通过四项很好的测试。每份各自裁剪，方向就错了；忘了还原缩放，上限就用在了放大 1024 倍的梯度上，裁完几乎什么也不剩。
#
# 库里的训练步把这五件事都做了，而且不止这些：总和在 fp16 里也不溢出，支持 autocast 和多个进程，出错时梯度保持原样。
#
# </div>


# %%
from course_lib.accumulation import AccumulatedStep, split


def make_parts(seed):
    decoder = lesson_05.small_decoder(seed)
    sgd = torch.optim.SGD(decoder.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(sgd, 1, gamma=0.5)
    return decoder, sgd, scheduler, torch.amp.GradScaler("cpu", init_scale=2.0**10)


# %% slide="both"
samples = lesson_05.batch(0, samples=30)  # 15 pieces of 2, a step after 4 of them
yours, *parts = make_parts(1)
train_epoch(yours, text_loss_sum, samples.split(2), *parts, every=4, max_norm=0.5)

library, sgd, scheduler, scaler = make_parts(1)
step = AccumulatedStep(library, sgd, text_loss_sum, scaler=scaler, max_norm=0.5)
for group in samples.split(8):
    step(split(group, 2))
    scheduler.step()
both = zip(yours.parameters(), library.parameters(), strict=True)
all(torch.allclose(one, other, atol=1e-5) for one, other in both)

# %% [markdown] slide={"en": "bf16 parameters, bf16 gradients, bf16 sums: 8 bits.\n\n**Guess first.** Draw the error of the gradient, from 1 piece to 256.", "zh": "参数、梯度、梯度之和都是 bf16：8 位精度。\n\n**先猜**：从 1 份到 256 份，梯度误差怎样变？画出来。"}
# ## 5.5 The accumulator's dtype / 累加器的 dtype
#
# <div lang="en">
#
# Where parameters are bf16, gradients are bf16, and so are their sums: 8 bits of precision. **Guess first:** draw the error of the gradient against the number of pieces, from 1 to 256.
#
# **Exercise 3.** Add up in fp32 instead. A hook that is registered with `parameter.register_post_accumulate_grad_hook(hook)` is called with the parameter each time its `.grad` is complete. Return a dict that will hold, for each parameter, the sum of its gradients in fp32; no bf16 gradient may stay beside it. What does that cost, in bytes a parameter?
#
# </div>
# <div lang="zh">
#
# 参数是 bf16 时，梯度是 bf16，它们的和也是：有效精度只有 8 位。**先猜**：份数从 1 到 256，梯度的误差怎样变？画出来。
#
# **练习 3。** 改用 fp32 求和。用 `parameter.register_post_accumulate_grad_hook(hook)` 注册的钩子，每当这个参数的 `.grad` 算好，就会以该参数为输入被调用。返回一个字典，里面存放每个参数的梯度之和，以 fp32 计；旁边不许再留着 bf16 的梯度。这样做，每个参数要多少字节？
#
# </div>


# %% minutes=9
def accumulate_in_fp32(parameters):
    sums = {}  # parameter -> sum

    def add(parameter):
        pass

    return sums


lesson_05.check_fp32_sums(accumulate_in_fp32)


# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not lesson_05.check_fp32_sums.accepted:

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


lesson_05.check_fp32_sums(accumulate_in_fp32)
### END SOLUTION


# %%
def gradient_in(pieces, dtype, seed, in_fp32=False):
    model, tokens = lesson_05.rounded_decoder(seed), random_tokens(256, 16, 127, seed=seed) + 1
    model = model.to(dtype)  # its weights are bf16 numbers, whatever the dtype
    sums = accumulate_in_fp32(model.parameters()) if in_fp32 else {}
    for piece in tokens.split(256 // pieces):
        logits = model(piece[:, :-1]).flatten(0, 1)
        losses = F.cross_entropy(logits.float(), piece[:, 1:].flatten(), reduction="sum")
        (losses / (256 * 16)).backward()
    weights = [each.weight for each in model.layers.modules() if isinstance(each, nn.Linear)]
    return torch.cat([sums.get(each, each.grad).flatten().double() for each in weights])


# %%
errors = {kind: {n: [] for n in (1, 4, 16, 64, 256)} for kind in ("bf16", "fp32")}
for seed in range(4):
    wanted = gradient_in(1, torch.float64, seed)
    for kind, each in errors.items():
        for n, found in each.items():
            found.append(error(gradient_in(n, torch.bfloat16, seed, kind == "fp32"), wanted))
{kind: min(each[256]) > max(each[4]) for kind, each in errors.items()}  # 256 worse than 4?

# %% slide="result"
lesson_05.draw_sums(errors)

# %% [markdown] slide={"en": "A small gradient, added to a large bf16 sum, loses its last bits.\n\nfp32 sums: 4 bytes a parameter, 18 instead of 16.", "zh": "很小的梯度加到很大的 bf16 总和上，末尾几位就丢了。\n\nfp32 求和：每个参数 4 字节，总共 18 而不是 16。"}
# <div lang="en">
#
# The error rises with the number of micro-batches. With one micro-batch you see the error of the bf16 pass itself. With more of them, each addition in bf16 rounds as well, to 8 bits of a sum that has become large compared with the gradient that is added, and in the end this error dominates. In fp32 the curve stays flat. So the same bf16 gradients, from 256 micro-batches, end more than three times as far off as with fp32 sums, because of the accumulator alone.
#
# The figure shows the weights of the layers' Linears, 90% of the parameters. The norms, 0.6%, are left out: LayerNorm's backward on a CPU adds over all rows in bf16, so that in one micro-batch their gradients are off by 6% with two threads, and by 11% with one; in many, by less. That is a matter of this kernel.
#
# </div>
# <div lang="zh">
#
# 微批次越多，误差越大。只有一个微批次时，看到的是 bf16 前向和反向本身的误差。微批次多了以后，每次 bf16 加法也要舍入到 8 位精度，而这时总和比新加进来的梯度大得多，所以最后舍入误差占了主导。用 fp32 求和时，曲线一直是平的。因此，同样的 bf16 梯度，分成 256 个微批次时，误差是用 fp32 求和时的三倍多，这全是累加器造成的。
#
# 图中只画了各层 Linear 的权重，占参数的 90%。归一化层的参数占 0.6%，没有画：CPU 上 LayerNorm 的反向用 bf16 对所有的行求和，所以只有一个微批次时，用两个线程它们的梯度差 6%，用一个线程差 11%，微批次多了反而小些。这是那个核函数的问题。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# The price is 4 bytes per parameter for the sums instead of 2 for the gradients: 18 bytes with master weights and moments, instead of lesson 01's 16. `AccumulatedStep(…, accumulate="fp32")` does it; Megatron and DeepSpeed have switches.
#
# </div>
# <div lang="zh">
#
# 代价：存放总和每个参数要 4 字节，而梯度原来只要 2 字节。加上主权重和矩，一共 18 字节，而不是第 01 课的 16。`AccumulatedStep(…, accumulate="fp32")` 就是这样做的；Megatron 和 DeepSpeed 都有开关。
#
# </div>

# %% [markdown] slide={"en": "Two ranks, eight pieces each; backward sends all gradients, every time.\n\n**Guess first.** How many of the eight are needed?", "zh": "两个进程，各有八份；每次反向都把全部梯度发送一遍。\n\n**先猜**：八次里有几次是必要的？"}
# ## 5.6 Across ranks / 跨进程
#
# <div lang="en">
#
# Under DDP (one process, or **rank**, a device; each sees its own samples) each backward pass hands all gradients to all-reduce, which takes the mean over ranks. `no_sync` leaves that out. **Guess first:** of eight pieces, for how many is it needed? And a trap from section 5.2: if each rank divides by its own tokens, that mean is a mean of means. What must the last two lines do?
#
# </div>
# <div lang="zh">
#
# 用 DDP 时（每台设备一个进程，称为 **rank**，各自处理自己的样本），每次反向都把全部梯度交给 all-reduce，对各进程取平均。`no_sync` 可以跳过这件事。**先猜**：八份里，有几份需要同步？还有 5.2 节的陷阱：若每个进程除以自己的 token 数，这个平均就成了平均的平均。最后两行该做什么？
#
# </div>


# %% slide="code"
def step_on_a_rank(model, loss_sum, pieces, each):
    total = 0
    for number, piece in enumerate(pieces, start=1):
        with nullcontext() if each or number == len(pieces) else model.no_sync():
            loss, count = loss_sum(model, piece)
            loss.backward()
        total += count
    tokens = torch.tensor(float(total))
    dist.all_reduce(tokens)  # over all ranks
    for parameter in model.parameters():
        parameter.grad *= dist.get_world_size() / tokens  # DDP took a mean over ranks


# %% slide="result"
ranks = lesson_05.on_ranks(step_on_a_rank, micro_batches=8)  # two processes run the cell above
once = ranks["parameters"]
rows = [
    ("the last micro-batch only", once, ranks["last"]),
    ("each micro-batch", 8 * once, ranks["each"]),
]
print("equal to one process with all tokens, to 1e-5:", ranks["error"] < 1e-5)
predictions([*rows, ("`AccumulatedStep`", once, ranks["library"])], unit="bytes")

# %% [markdown]
# <div lang="en">
#
# One time of eight, and the gradient is that of one process with all tokens, though the second rank has fewer. (Bytes handed to all-reduce by one rank; lesson 08 counts what crosses the wire.) With FSDP the advice turns round: `no_sync` keeps gradients of **all** parameters on each rank until the last piece, where each would keep its own n-th. In a memory course you let it reduce each time: section 5.17.
#
# </div>
# <div lang="zh">
#
# 八次里只要一次；虽然第二个进程的 token 更少，梯度仍与单个进程处理全部 token 时相等。（这里数的是一个进程交给 all-reduce 的字节；真正在线路上传了多少，第 08 课来数。）换成 FSDP，建议就反过来了：`no_sync` 会让每个进程把**全部**参数的梯度一直留到最后一份，而本来每个进程只需留自己的 n 分之一。讲内存的课会选择每次都归约：见 5.17 节。
#
# </div>

# %% [markdown]
# ## 5.7 In your own code / 实际怎么写
#
# <div lang="en">
#
# Effective (or global) batch = micro-batch × accumulation steps × ranks.
#
# | where | not run here |
# |---|---|
# | Hugging Face | `TrainingArguments(per_device_train_batch_size=1, gradient_accumulation_steps=8)`; your own loss takes `num_items_in_batch` |
# | Accelerate | `with accelerator.accumulate(model):`; the loss is divided by the number of pieces |
# | PyTorch DDP, FSDP2 | `model.no_sync()`; `model.set_requires_gradient_sync(last)` |
# | Megatron-LM | `--micro-batch-size 1 --global-batch-size 8 --accumulate-allreduce-grads-in-fp32` |
# | DeepSpeed | `"gradient_accumulation_steps": 8`, `"data_types": {"grad_accum_dtype": "fp32"}` |
# | TRL | `SFTConfig(gradient_accumulation_steps=8)` |
#
# </div>
# <div lang="zh">
#
# 等效（全局）批次大小 = 微批次大小 × 累积步数 × 进程数。
#
# | 框架 | 写法（此处未运行） |
# |---|---|
# | Hugging Face | `TrainingArguments(per_device_train_batch_size=1, gradient_accumulation_steps=8)`；自己写的损失函数要接收 `num_items_in_batch` |
# | Accelerate | `with accelerator.accumulate(model):`；损失会除以份数 |
# | PyTorch DDP、FSDP2 | `model.no_sync()`；`model.set_requires_gradient_sync(last)` |
# | Megatron-LM | `--micro-batch-size 1 --global-batch-size 8 --accumulate-allreduce-grads-in-fp32` |
# | DeepSpeed | `"gradient_accumulation_steps": 8`、`"data_types": {"grad_accum_dtype": "fp32"}` |
# | TRL | `SFTConfig(gradient_accumulation_steps=8)` |
#
# </div>

# %% [markdown] slide={"en": "Three sentences that people meet. Hands up before each row: true, partly, or false?", "zh": "三句常见的说法。看每一行之前先举手：成立、部分成立，还是不成立？"}
# ## 5.8 Claims and measurements / 说法与实测
#
# <div lang="en">
#
# Three sentences that people meet, tried with the batches of section 5.2 and the sums of section 5.5.
#
# </div>
# <div lang="zh">
#
# 三句常见的说法，用 5.2 节的批次和 5.5 节的求和来检验。
#
# </div>

# %% slide="result"
what_you_may_have_read("05", *lesson_05.figures_of_claims(off, errors, exact))

# %% [markdown] slide={"en": "Checkpoints and pieces land within 1 MB of each other.\n\nWhat is left in both?", "zh": "检查点与拆批次，峰值相差不到 1 MB。\n\n两者剩下的是什么？"}
# ## 5.9 The ledger / 账本
#
# <div lang="en">
#
# The step of lesson 00 in eight micro-batches, as the library takes it (its list of eight losses is 28 bytes more than your loop's):
#
# </div>
# <div lang="zh">
#
# 第 00 课的训练步，用库的训练步分成八个微批次来做（它记下八个损失，比你的循环多 28 字节）：
#
# </div>

# %% slide="result"
with symbolic():
    decoder = Decoder(vocabulary=2048, hidden=256, heads=8, layers=8, sequence=128)
    tokens, adam = random_tokens(8, 128, 2048), torch.optim.Adam(decoder.parameters())
    step = AccumulatedStep(decoder, adam, loss_sum)
    row = measure(lambda: step(split(tokens, 1)), model=decoder, optimizer=adam)
ledger("05", "eight micro-batches", row)

# %% [markdown] slide={"en": "Sums of losses, divided once. One clip, one step, after unscaling.\n\nThe floor is 16 bytes a parameter; in bf16, add up in fp32.", "zh": "损失求总和，只除一次。还原缩放之后，裁剪一次，更新一次。\n\n下限是每个参数 16 字节；参数是 bf16 时，以 fp32 求和。"}
# ## 5.10 Summary / 小结
#
# <div lang="en">
#
# - The peak is a floor of 16 bytes a parameter and a slope times the piece. Only the slope's part shrinks; at the smallest pieces another moment may be the peak.
# - Add up sums of losses, divide once by all tokens of the step, over all ranks. The mean of means depends on how you cut, and trains another problem.
# - Once a step: unscale, clip, step, update, scheduler, clear. Keep the remainder.
# - Sums in bf16 drift with the number of pieces; fp32 sums do not, for 4 bytes a parameter.
# - Under DDP let only the last piece reduce (`no_sync`).
#
# **Next:** [lesson 06](06_flash_attention.ipynb) lets the operator itself forget.
#
# </div>
# <div lang="zh">
#
# - 峰值是每个参数 16 字节的下限，加上斜率乘以每份的大小。会缩小的只有斜率那一部分；每份小到极限时，峰值可能换到另一个时刻。
# - 把损失的总和加起来，只除一次，除以这一步的全部 token 数，所有进程一起算。平均的平均取决于你怎样拆，训练的是另一个问题。
# - 每步只做一次：还原缩放、裁剪、更新、缩放器更新、调度、清零。最后不满一组的，不要丢掉。
# - 以 bf16 求和，误差随份数增长；以 fp32 求和则不会，代价是每个参数 4 字节。
# - 用 DDP 时，只让最后一份归约（`no_sync`）。
#
# **下一步**：[第 06 课](06_flash_attention.ipynb)让算子自己来忘。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **Sources.** Daniel and Michael Han (Unsloth) 2024, *Bugs in LLM Training: Gradient Accumulation Fix*, unsloth.ai/blog/gradient, which names Zhaofeng (2021) and Benjamin Marie. Hugging Face 2024, *Fixing Gradient Accumulation*, huggingface.co/blog/gradient_accumulation. Accelerate documentation, *Performing gradient accumulation*. Li et al. 2020, *PyTorch Distributed*, arXiv:2006.15704 (`no_sync`). Micikevicius et al. 2018, *Mixed Precision Training*, arXiv:1710.03740 (loss scaling). Gao et al. 2021, *Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup*, arXiv:2101.06983 (GradCache). Zhang et al. 2023, *AdamA*, arXiv:2305.19982. PyTorch tutorial *How to save memory by fusing the optimizer step into the backward pass*.
#
# </div>
# <div lang="zh">
#
# **出处。** Daniel 和 Michael Han（Unsloth）2024，*Bugs in LLM Training: Gradient Accumulation Fix*，unsloth.ai/blog/gradient，文中提到 Zhaofeng（2021）和 Benjamin Marie。Hugging Face 2024，*Fixing Gradient Accumulation*，huggingface.co/blog/gradient_accumulation。Accelerate 文档 *Performing gradient accumulation*。Li et al. 2020，*PyTorch Distributed*，arXiv:2006.15704（`no_sync`）。Micikevicius et al. 2018，*Mixed Precision Training*，arXiv:1710.03740（损失缩放）。Gao et al. 2021，*Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup*，arXiv:2101.06983（GradCache）。Zhang et al. 2023，*AdamA*，arXiv:2305.19982。PyTorch 教程 *How to save memory by fusing the optimizer step into the backward pass*。
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
# ## 5.11 The more the counts differ / token 数差得越多
#
# <div lang="en">
#
# Eight pieces of four samples, of random tokens, whose counts lie between $(1 - \delta)$ and $(1 + \delta)$ times the mean: from 5 % at $\delta = 0.1$ to more than the gradient itself. (With random tokens all samples pull in unlike directions: text of one kind is milder.)
#
# </div>
# <div lang="zh">
#
# 八份随机 token，每份四条样本，token 数在平均值的 $(1 - \delta)$ 到 $(1 + \delta)$ 倍之间：$\delta = 0.1$ 时差 5%，到后来误差比梯度本身还大。（随机 token 的各条样本方向各异；同一类文本没有这么严重。）
#
# </div>


# %%
def with_spread(delta):
    batch = random_tokens(32, 64, 127, seed=3) + 1
    for piece in range(8):
        length = round(32 * (1 + delta * (2 * piece / 7 - 1)))
        batch[4 * piece : 4 * piece + 4, length + 1 :] = 0
    return batch


deltas = [0.1, 0.2, 0.4, 0.6, 0.8, 0.95]
by_delta = [mean_of_means_error(with_spread(delta), 4) for delta in deltas]
lesson_05.draw_spread(deltas, by_delta)

# %% [markdown]
# ## 5.12 Loss scaling in fp16 / fp16 的损失缩放
#
# <div lang="en">
#
# fp16's smallest number is $6 \cdot 10^{-8}$; what is below half of that becomes zero. A scaler multiplies the loss, and so every gradient, by a large number before backward. bf16 has the exponent range of fp32 and needs none of this. A thousand gradients between $10^{-11}$ and $10^{-5}$:
#
# </div>
# <div lang="zh">
#
# fp16 最小的正数是 $6 \cdot 10^{-8}$，小于它一半的都变成零。缩放器在反向之前把损失乘上一个很大的数，每个梯度也就跟着放大。bf16 的指数范围与 fp32 相同，用不着这些。取一千个梯度，在 $10^{-11}$ 到 $10^{-5}$ 之间：
#
# </div>


# %%
def vanished(dtype, scale):
    weight = torch.ones(1000, dtype=dtype, requires_grad=True)
    factors = torch.logspace(-11, -5, 1000)  # what the gradients should be
    (scale * (weight.float() * factors).sum()).backward()
    return int((weight.grad == 0).sum())


cases = {"fp16": (torch.float16, 1), "fp16, scaled by 2^16": (torch.float16, 2.0**16)}
cases["bf16"] = torch.bfloat16, 1
{name: f"{vanished(*case)} of 1000 vanish" for name, case in cases.items()}

# %% [markdown]
# <div lang="en">
#
# Sums over tokens bring a danger of their own: they are as many times larger than means as there are tokens, and fp16 ends at 65,504. So `AccumulatedStep` divides each sum by a power of two near the last step's token count, which rounds nothing, and puts it right at the end.
#
# </div>
# <div lang="zh">
#
# 对 token 求总和也有自己的危险：有多少个 token，总和就比平均大多少倍，而 fp16 最大只到 65,504。所以 `AccumulatedStep` 先把每个总和除以一个二的幂，大小接近上一步的 token 数（这样除没有舍入），最后再校正。
#
# </div>

# %% [markdown]
# ## 5.13 What counts as a step / 什么才算一步
#
# <div lang="en">
#
# If a gradient is inf or NaN, the scaler skips the step and halves its number. Then the schedule should wait, too: it counts steps of the optimizer, neither pieces nor skipped ones. `AccumulatedStep` says in `stepped` whether there was one; at $2^{127}$ there is none:
#
# </div>
# <div lang="zh">
#
# 只要有一个梯度是 inf 或 NaN，缩放器就跳过这次更新，并把缩放倍数减半。这时学习率调度也该等着：它数的是优化器的更新次数，不数微批次，也不数跳过的。`AccumulatedStep` 用 `stepped` 说明有没有更新；取 $2^{127}$ 时就没有：
#
# </div>


# %%
def scaled_step(init_scale):
    decoder, sgd, schedule, _ = make_parts(0)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    step = AccumulatedStep(decoder, sgd, text_loss_sum, scaler=scaler, max_norm=0.1)
    result = step(split(batch, 4))
    if result.stepped:
        schedule.step()
    scale = scaler.get_scale() / init_scale
    return {"stepped": result.stepped, "scale": scale, "schedule": schedule.last_epoch}


scaled_step(2.0**10), scaled_step(2.0**127)

# %% [markdown]
# <div lang="en">
#
# And before each step gradients are set to None, not to zero (`zero_grad(set_to_none=True)`, the default): zeros would take memory, 4 bytes a parameter in fp32, and Adam would still move a parameter that nothing has touched, by what its moments remember:
#
# </div>
# <div lang="zh">
#
# 每一步之前，梯度设成 None 而不是零（`zero_grad(set_to_none=True)`，即默认）：零也要占内存（fp32 每个参数 4 字节），而且 Adam 仍会凭着矩里的旧梯度，去更新一个没有参与计算的参数：
#
# </div>


# %%
def moved_without_a_gradient(set_to_none):
    weight = nn.Parameter(torch.ones(3))
    adam = torch.optim.Adam([weight], lr=0.1)
    weight.sum().backward()
    adam.step()
    adam.zero_grad(set_to_none=set_to_none)
    before = weight.detach().clone()
    adam.step()  # nothing has used the weight since
    return not torch.equal(weight, before)


{f"set_to_none={choice}": moved_without_a_gradient(choice) for choice in (True, False)}

# %% [markdown]
# ## 5.14 With autocast, and the true loss / 配合 autocast，并报出真正的损失
#
# <div lang="en">
#
# The loop of the course's sources: autocast around forward only, a step every four pieces, the loss that is printed being the mean over the tokens of all four. (The last piece's own mean is another number.)
#
# </div>
# <div lang="zh">
#
# 本课程取材的文档里的循环：autocast 只罩住前向，每四份更新一次，打印的损失是四份全部 token 的平均。（最后一份自己的平均是另一个数。）
#
# </div>

# %%
decoder, sgd, _, _ = make_parts(0)
step = AccumulatedStep(decoder, sgd, text_loss_sum, max_norm=1.0, autocast_dtype=torch.bfloat16)
reported = []
for seed in range(8):
    pieces = list(lesson_05.batch(seed).split(4))
    with torch.no_grad():
        loss, count = text_loss_sum(decoder, pieces[-1])
    reported.append((step(pieces).loss, float(loss) / count))
true, last = zip(*reported, strict=True)
away = max(abs(a - b) for a, b in zip(true, last, strict=True))
f"the last piece's mean is up to {away:.1f} away from the step's"

# %% [markdown]
# ## 5.15 BatchNorm sees pieces / BatchNorm 看见的是一份一份的数据
#
# <div lang="en">
#
# BatchNorm takes mean and variance of **what it sees**. In pieces it sees pieces, and no divisor repairs that. Layers that compute each sample by itself, such as LayerNorm, don't care:
#
# </div>
# <div lang="zh">
#
# BatchNorm 用**它看见的**样本求均值和方差。拆开之后它只看见一份，除以什么也补不回来。对各样本分别计算的层，例如 LayerNorm，则不受影响：
#
# </div>


# %%
def gradient_in_pieces(model, data, size):
    model.zero_grad()
    for piece in data.split(size):
        (model(piece).square().sum() / 32).backward()
    return gradient_of(model)


for norm in (nn.BatchNorm1d(8), nn.LayerNorm(8)):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 1)).double()
    data = torch.randn(32, 8).double()
    off = error(gradient_in_pieces(model, data, 4), gradient_in_pieces(model, data, 32))
    print(type(norm).__name__, f"{off:.0%} off" if off > 1e-9 else "equal")

# %% [markdown]
# ## 5.16 Losses that are no sum over samples / 不是逐样本求和的损失
#
# <div lang="en">
#
# A contrastive loss compares each pair with all others in the batch. In pieces there are fewer others: another loss, not another divisor. **GradCache** takes two passes: without a graph, in pieces, all embeddings; the loss on them, and its gradient for each; then each piece again, with a graph, backward from its part of that gradient. One more forward, and equal:
#
# </div>
# <div lang="zh">
#
# 对比损失要把每一对与批次里所有其他样本相比。拆开之后，“其他样本”就少了：变的不是除数，而是损失本身。**GradCache** 分两遍：第一遍不建计算图，一份一份算出全部嵌入；对它们求损失，得到每个嵌入的梯度；第二遍每份带着计算图再算一次，从属于它的那部分梯度出发做反向。多一次前向，结果相等：
#
# </div>


# %%
def contrastive(one, other):  # (n, d), (n, d): a pair a row
    one, other = F.normalize(one, dim=1), F.normalize(other, dim=1)
    return F.cross_entropy(one @ other.T / 0.1, torch.arange(len(one)))


def whole(net, x, y):
    contrastive(net(x), net(y)).backward()


def pieces_by_themselves(net, x, y):
    for one, other in zip(x.split(8), y.split(8), strict=True):
        (contrastive(net(one), net(other)) / 4).backward()


# %%
def grad_cache(net, x, y):
    with torch.no_grad():
        cached = [torch.cat([net(piece) for piece in data.split(8)]) for data in (x, y)]
    loss = contrastive(*(each.requires_grad_() for each in cached))
    loss.backward()
    for data, each in zip((x, y), cached, strict=True):
        for piece, gradient in zip(data.split(8), each.grad.split(8), strict=True):
            net(piece).backward(gradient)


# %%
torch.manual_seed(0)
net, found = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8)).double(), {}
x, y = torch.randn(2, 32, 16).double()
for run in (whole, pieces_by_themselves, grad_cache):
    net.zero_grad()
    run(net, x, y)
    found[run.__name__] = gradient_of(net)
off = {name: error(each, found["whole"]) for name, each in found.items()}
{name: f"{each:.0%} off" if each > 1e-9 else "equal" for name, each in off.items()}

# %% [markdown]
# ## 5.17 FSDP: the opposite advice / FSDP：相反的建议
#
# <div lang="en">
#
# A rank of DDP holds all gradients anyway, so leaving out the reduction costs nothing. A rank of FSDP keeps an n-th of them (lesson 08). With `no_sync`, or `set_requires_gradient_sync(False)`, it keeps them whole until the last piece: "gradient accumulation for FSDP has two flavors" (PyTorch, pull request 126166), one for traffic, one for memory. For our decoder in eight pieces, by formula; in `AccumulatedStep` it is `sync="last"` or `"each"`:
#
# </div>
# <div lang="zh">
#
# DDP 的每个进程本来就留着全部梯度，不归约也没有代价。FSDP 的每个进程只留 n 分之一（第 08 课）。用了 `no_sync` 或 `set_requires_gradient_sync(False)`，就要把全部梯度一直留到最后一份：PyTorch 的 126166 号合并请求说 FSDP 的梯度累积“有两种”，一种省通信，一种省内存。以我们的解码器、八份为例，按公式算；在 `AccumulatedStep` 里写成 `sync="last"` 或 `"each"`：
#
# </div>

# %%
rows = []
for n in (2, 4, 8):
    rows.append((n, "27.5 / 1", f"{27.5 / n:.1f} / 8"))
table(["ranks", "in the last: kept (MB) / reductions", "in each: kept (MB) / reductions"], rows)

# %% [markdown]
# ## 5.18 Steps inside backward, and AdamA / 在反向之中更新，以及 AdamA
#
# <div lang="en">
#
# The floor holds a gradient for every parameter. One can update each parameter **as soon as its gradient is ready** and drop the gradient at once. How much does that save, for one sequence and for eight?
#
# </div>
# <div lang="zh">
#
# 下限里每个参数都有一份梯度。可以让**梯度一就绪**就更新这个参数，立刻丢掉梯度。能省多少？一条序列时呢？八条时呢？
#
# </div>


# %%
def peak_with(sequences, hook=None):  # of forward and backward, with SGD where there is no hook
    with symbolic():
        decoder = Decoder(vocabulary=2048, hidden=256, heads=8, layers=8, sequence=128)
        for parameter in decoder.parameters() if hook else ():
            parameter.register_post_accumulate_grad_hook(hook)
        sgd = torch.optim.SGD(decoder.parameters(), lr=0.1)
        with MemoryMeter(decoder) as meter:
            loss_sum(decoder, random_tokens(sequences, 128, 2048))[0].backward()
            sgd.step()
    most = max(meter.series()["gradient"])
    return round(meter.peak_bytes / 1e6, 1), round(most / 1e6, 1)


@torch.no_grad()
def update(parameter):
    parameter -= 0.1 * parameter.grad
    parameter.grad = None


# %%
rows = [("after backward (1)", *peak_with(1)), ("in backward (1)", *peak_with(1, update))]
rows += [("after backward (8)", *peak_with(8)), ("in backward (8)", *peak_with(8, update))]
table(["update (sequences)", "peak (MB)", "most gradients at once (MB)"], rows)

# %% [markdown]
# <div lang="en">
#
# `.grad` holds at most 2.1 MB at once instead of 27.5. (Another 2.1 MB, the head's gradient, wait inside autograd through all of backward to be added to the embedding's.) For one sequence the peak falls less, by 6.4 MB, because it moves to the start of backward. For eight sequences it was there already, before any gradient existed, so nothing is saved. Clipping by the norm of all gradients is no longer possible: the norm is known only when all gradients have been computed, and by then most of them have already been used for an update and dropped. And with accumulation this hook would run in every micro-batch, so the second micro-batch would compute its gradient for other weights than the first. "Not compatible with gradient accumulation", say torchtune's pages.
#
# </div>
# <div lang="zh">
#
# 同一时刻 `.grad` 里至多有 2.1 MB，而不是 27.5 MB。（另有 2.1 MB 是输出头的梯度，整个反向期间都在 autograd 内部，等着与嵌入层的梯度相加。）峰值降得没有那么多：一条序列时降 6.4 MB，因为峰值移到了反向刚开始的时候；八条序列时峰值本来就在那里，那时一个梯度也还没有，所以什么也不省。按全部梯度的范数来裁剪，这时就做不到了：要等所有梯度都求出来才知道范数，而到那时，大部分梯度早已用来更新参数，随后释放了。与累积合用时，这个钩子在每个微批次里都会触发，于是第二个微批次求梯度时，权重已经与第一个微批次不同。torchtune 的文档说它“与梯度累积不兼容”。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **AdamA** does combine them: each piece's gradient goes into Adam's **moments** at once, and the weights wait. The first moment is the sum that Adam would have made. The second adds the squares of the pieces, where Adam squares their sum:
#
# </div>
# <div lang="zh">
#
# **AdamA** 却能把两者合在一起：每份的梯度立刻累加进 Adam 的两个**矩**，权重留到最后才更新。一阶矩就是 Adam 会得到的和；二阶矩加的是各份的平方，而 Adam 是先求和再平方：
#
# </div>


# %%
def moments(fold_each):
    decoder, first, second = lesson_05.small_decoder(), {}, {}

    def fold(parameter):  # Adam's moments, from zero, with its default betas
        gradient, parameter.grad = parameter.grad, None
        first[parameter] = first.get(parameter, 0) + 0.1 * gradient
        second[parameter] = second.get(parameter, 0) + 0.001 * gradient**2

    for parameter in decoder.parameters() if fold_each else ():
        parameter.register_post_accumulate_grad_hook(fold)
    add_gradients(decoder, batch.split(1), "token mean")
    for parameter in decoder.parameters() if not fold_each else ():
        fold(parameter)
    kinds = ([kind[parameter] for parameter in decoder.parameters()] for kind in (first, second))
    return [torch.cat([each.flatten() for each in kind]) for kind in kinds]


# %%
(first, second), (whole_first, whole_second) = moments(True), moments(False)
ratio = float(second.sum() / whole_second.sum())
same = error(first, whole_first) < 1e-5
f"first moments equal: {same}; sum of the second ones, of Adam's: {ratio:.1f}"

# %% [markdown]
# ## 5.19 How large should a micro-batch be? / 微批次取多大？
#
# <div lang="en">
#
# Smaller micro-batches cost no FLOPs. They can cost time: on a GPU each micro-batch launches all its kernels again, and small kernels leave parts of the GPU idle. If you have a GPU, this cell measures on it, in fp16 with a scaler and clipping. Otherwise it shows what an H200 measured. With 1 sample in each of 16 micro-batches the step takes 6.9 times as long as with all samples at once, and with 4 samples in each 1.6 times. The peaks are 2.4, 3.6 and 7.9 GB.
#
# </div>
# <div lang="zh">
#
# 微批次取得小，FLOPs 并不增加，时间却可能增加：在 GPU 上，每个微批次都要把全部核函数重新启动一遍，太小的核函数又会让一部分计算单元闲着。有 GPU 时，这个单元格会现场测量，用 fp16，带缩放器和裁剪；没有 GPU，就显示在一块 H200 上记录的数据。分成 16 个微批次、每个 1 条样本，一步要花一次全部算完的 6.9 倍时间；每个 4 条样本，是 1.6 倍。峰值分别是 2.4、3.6 和 7.9 GB。
#
# </div>

# %% tags=["nbval-ignore-output", "shows-device"]
from course_lib.lessons import on_gpu

on_gpu("05")

# %% [markdown]
# <div lang="en">
#
# **Exercise 4.** A batch of 64 sequences on our decoder, in equal pieces. What is the largest piece for a peak under 1 GB ($10^9$ bytes)?
#
# </div>
# <div lang="zh">
#
# **练习 4。** 我们的解码器，64 条序列的批次，分成一样大的份。峰值不超过 1 GB（$10^9$ 字节），每份最多几条？
#
# </div>

# %%
answer = None  # sequences
lesson_05.check_largest_piece(answer)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
fits = [m for m in (1, 2, 4, 8, 16, 32) if 110_010_776 + 24_396_800 * m <= 10**9]
lesson_05.check_largest_piece(max(fits))
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# **Exercise 5.** A piece of $m$ samples takes $5 + m$ milliseconds: 5 for launching, 1 for each sample. A step has 64 samples. Which of the pieces 1, 2, 4, 8, 16, 32, 64 is the smallest that reaches at least 80 % of the samples a second of the largest?
#
# </div>
# <div lang="zh">
#
# **练习 5。** $m$ 个样本的一份要 $5 + m$ 毫秒：5 毫秒用于启动，每个样本 1 毫秒。一步有 64 个样本。在 1、2、4、8、16、32、64 之中，每秒样本数至少达到最大一份的 80% 的，最小是哪一个？
#
# </div>

# %%
answer = None  # samples
lesson_05.check_fast_piece(answer)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
fast = [m for m in (1, 2, 4, 8, 16, 32, 64) if m / (5 + m) >= 0.8 * 64 / (5 + 64)]
lesson_05.check_fast_piece(min(fast))
### END SOLUTION

# %% [markdown]
# ## 5.20 More claims / 更多的说法
#
# <div lang="en">
#
# The first is torchtune's; the others stood in the teaching documents that this course grew from. For the second: 60 samples in pieces of 4, a step after every 4 pieces.
#
# </div>
# <div lang="zh">
#
# 第一条出自 torchtune，另外两条出自本课程取材的教学文档。第二条用 60 个样本，每份 4 个，每 4 份更新一次。
#
# </div>

# %%
stepped, pending = 0, 0
for number, piece in enumerate(torch.arange(60).split(4), start=1):
    pending += len(piece)
    if number % 4 == 0:
        stepped, pending = stepped + pending, 0
lesson_05.older_claims((stepped, 60), (meters[8].peak_bytes, meters[1].peak_bytes), ratio)
