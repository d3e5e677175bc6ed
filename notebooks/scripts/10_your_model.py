# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 10 Project: your model / 项目：你的模型
#
# <div lang="en">
#
# How much memory does a training step of *your* model need, and how much can you save without changing the gradients? In this project you find out, for a model that you train or want to train. You complete four fill-ins (a few lines of code each) and run eight sections. The code of the sections fills in a sheet, which you hand in.
#
# The fill-ins already contain a small model, so you can run everything. Read the project through once, then replace the small model with yours. If your model does not meet a requirement of the course's library, the section with this requirement prints a message. The other sections still run.
#
# </div>
# <div lang="zh">
#
# **你的**模型，一个训练步要多少内存？在梯度不变的前提下，最低能降到多少？在这个项目里，请用一个你正在训练或打算训练的模型来回答这两个问题。先做好四处填空（都是几行代码），再依次运行八节的代码。各节会把结果填进同一张表，最后交上这张表。
#
# 四处填空里事先放了一个小模型，打开就能运行。请先从头到尾看一遍，再换成你自己的模型。如果你的模型不符合课程库的某项要求，有这项要求的那一节会用一句话说明，其余各节照样运行。
#
# </div>

# %%
from course_lib.teaching import language

language()

# %% [markdown]
# <div lang="en">
#
# **Goals** (60 to 180 minutes):
#
# - Predict how much memory a step of your own model needs, and check the prediction.
# - Say what fills the peak.
# - Prove that the gradients are equal.
# - Make the step fit into a budget, and use the result in your training code.
#
# **What to know before**: lesson 07, and lesson 09 if your model comes from Hugging Face.
#
# </div>
# <div lang="zh">
#
# **目标**（60 到 180 分钟）
#
# - 预测你自己的模型一步要多少内存，并检验这个预测。
# - 说出峰值里什么最多。
# - 证明梯度相等。
# - 让这一步满足预算，再把结果用到你的训练代码里。
#
# **预备知识**：第 07 课。如果你的模型出自 Hugging Face，还要先学第 09 课。
#
# </div>

# %%
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from course_lib.budget import Recipe, estimate, fit, run
from course_lib.lessons.lesson_10 import slots
from course_lib.lessons.lesson_10.project import Sheet

# %% [markdown]
# ## 10.1 Four fill-ins / 四处填空
#
# <div lang="en">
#
# - `make_model()` returns a new model in fp32, with the same weights in each call.
# - `make_batch(step)` returns the batch of a step: one tensor, or tensors in tuples and dictionaries.
# - `loss_sum(model, batch)` returns the sum of the losses and their number. Lesson 05 showed why a mean is not enough. Write `loss_sum = None` for a Hugging Face model that computes its own loss.
# - `BUDGET` is the largest number of bytes that the step is allowed to take. The cell below the fill-ins prints the baseline's peak. Begin with a budget of a third of this peak.
#
# Begin with a small version of your model, whose step takes less than half of this machine's memory. For this, use fewer layers or a smaller batch. In the larger model, each technique saves the same kind of memory, such as activations.
#
# </div>
# <div lang="zh">
#
# - `make_model()` 返回一个新的 fp32 模型，每次调用权重都相同。
# - `make_batch(step)` 返回这一步的批次，可以是张量，也可以是装着张量的元组或字典。
# - `loss_sum(model, batch)` 返回损失之和，以及损失的个数。第 05 课讲过为什么只返回平均值还不够。如果用的是 Hugging Face 模型，并且模型自己会计算损失，就写 `loss_sum = None`。
# - `BUDGET` 是这一步最多可以占用的字节数。填空下面的单元格会打印基线的峰值，可以先把预算设成这个峰值的三分之一。
#
# 请先减少层数或减小批次，把你的模型改小，使一步占用的内存不到这台机器的一半。以后换回原来的大模型，每种技术省下的仍是同一类内存（例如激活值）。
#
# </div>


# %% tags=["fill-in"]
class Block(nn.Module):  # mixes along the 64 patches, then along their 192 features
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(192), nn.LayerNorm(192)
        self.patches = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self.features = nn.Sequential(nn.Linear(192, 768), nn.GELU(), nn.Linear(768, 192))

    def forward(self, x):
        x = x + self.patches(self.first(x).transpose(1, 2)).transpose(1, 2)
        return x + self.features(self.second(x))


# %% tags=["fill-in"]
class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.start, self.head = nn.Linear(48, 192), nn.Linear(192, 10)
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x):
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_model():
    torch.manual_seed(0)
    return Mixer()


# %% tags=["fill-in"]
def make_batch(step=0):  # 32 pictures of 64 patches with 48 numbers, and a class for each patch
    generator = torch.Generator().manual_seed(step)
    pictures = torch.rand(32, 64, 48, generator=generator)
    return pictures, torch.randint(10, (32, 64), generator=generator)


def loss_sum(model, batch):
    pictures, classes = batch
    losses = F.cross_entropy(model(pictures).flatten(0, 1), classes.flatten(), reduction="sum")
    return losses, classes.numel()


BUDGET = 30_000_000  # bytes

# %% [markdown]
# <div lang="en">
#
# The next cell checks the first three fill-ins. Does each call return a new model? Do the losses of single samples add up to the loss of the batch? Is the baseline's peak predicted to the byte? If the check finds a problem, you can go on, but solve the problem before you hand in the sheet.
#
# </div>
# <div lang="zh">
#
# 下面检查前三处填空，看每次调用是否返回新的模型，逐个样本的损失加起来是否等于整个批次的损失，以及基线的峰值是否预测得一个字节也不差。如果检查指出了问题，你可以继续往下做，但请在上交之前解决这个问题。
#
# </div>

# %%
slots.verdict_on(make_model, make_batch, loss_sum)

# %% [markdown]
# ## 10.2 Predict, then run / 先预测，再运行
#
# <div lang="en">
#
# **Guess first:** how many MB will a step of the baseline take (your unchanged model, trained with Adam)? Count the parameters, and think of what the layers keep for backward. The cells below estimate the step without allocating memory, and then run it under a meter. If the estimate and the measurement differ, please report this together with the model.
#
# </div>
# <div lang="zh">
#
# **先猜**：基线（你的模型不作改动，用 Adam 训练）的一步会占多少 MB？请数一数参数，再想想各层要为反向保存什么。随后的单元格先估计这一步（估计不占内存），再在计量器下真正运行这一步。如果估计值与实测值不一样，请把结果连同模型一起告诉我们。
#
# </div>

# %% tags=["guess"]
my_peak = None  # in MB

# %%
AS_IT_IS = Recipe(precision=None, attention=None)  # your model unchanged, trained with Adam
sheet = Sheet(make_model, make_batch, loss_sum, BUDGET)
predict = partial(estimate, make_model, make_batch, loss_sum=loss_sum)  # a function of a recipe
with sheet.part("10.2"):
    sheet.plain = predict(AS_IT_IS)
    sheet.measured = run(make_model, make_batch, AS_IT_IS, loss_sum=loss_sum).meter
    sheet.show_guess(my_peak)

# %% [markdown]
# ## 10.3 What fills the peak? / 峰值里什么最多？
#
# <div lang="en">
#
# Look at the largest category of memory in the first table before you read the second table. Which technique reduces this category? The second table estimates each technique alone. For a technique that your model does not allow, the last column states the reason.
#
# </div>
# <div lang="zh">
#
# 读第二张表之前，先看第一张表里哪一类内存最多，再想想哪种技术能减少这一类内存。第二张表列出单独使用每种技术时的估计值。如果你的模型不能用某种技术，最后一列会写明原因。
#
# </div>

# %%
with sheet.part("10.3"):
    sheet.show(sheet.plain)
    sheet.alone = []
    for recipe in sheet.techniques():
        with sheet.attempt(recipe):
            sheet.alone.append(predict(recipe))
    sheet.show_savings()

# %% [markdown]
# ## 10.4 Are the gradients equal? / 梯度相等吗？
#
# <div lang="en">
#
# A saving counts only if the gradients are equal. With each technique, one step runs on the batch of step 0, and its gradients are compared with those of the baseline. The error is the norm of the difference, divided by the norm of the baseline's gradients. Recomputation and offloading must give an error of 0. Micro-batches add gradients in another order, so the last digits may differ.
#
# </div>
# <div lang="zh">
#
# 梯度相等，省下的内存才算数。每种技术都用第 0 步的批次运行一步，再把得到的梯度与基线的梯度相比。误差等于两者之差的范数除以基线梯度的范数。重计算和卸载的误差应当是 0。用微批次时，求和的顺序不同，所以梯度的最后几位数字可能有差别。
#
# </div>

# %%
with sheet.part("10.4"):
    sheet.errors = {each.recipe: sheet.gradient_error(each.recipe) for each in sheet.alone}
    sheet.show_errors(sheet.errors)

# %% [markdown]
# ## 10.5 The cheapest recipe within the budget / 预算之内代价最小的配方
#
# <div lang="en">
#
# `fit` searches for recipes that fit into the budget, and lists the cheapest recipe first. The caption of the table also states which techniques could not be tried for your model, and why. With `quick=True` the search takes less time, but may miss the cheapest recipe. Take the first recipe, or write your own recipe with the fields of section 7.2, for example `sheet.recipe = Recipe(precision=None, attention=None, micro_batches=2)`.
#
# </div>
# <div lang="zh">
#
# `fit` 搜索满足预算的配方，代价最小的排在最前。表的标题还会写明哪些技术没能用在你的模型上，以及为什么。加上 `quick=True`，搜索会快一些，但可能错过代价最小的配方。可以采用第一个配方，也可以用 7.2 节的字段自己写一个，例如 `sheet.recipe = Recipe(precision=None, attention=None, micro_batches=2)`。
#
# </div>

# %%
with sheet.part("10.5"):
    sheet.budget_bytes = BUDGET
    options = {"loss_sum": loss_sum, "base": AS_IT_IS, "progress": False}
    sheet.found = fit(make_model, make_batch, BUDGET, **options)
    sheet.recipe = sheet.found[0].recipe  # or Recipe(...), a recipe of your own
    sheet.show(sheet.found)

# %% [markdown]
# ## 10.6 Run it / 运行它
#
# <div lang="en">
#
# A memory meter stops the step at the first operator that exceeds the budget. The gradients of your recipe are also compared with those of the baseline.
#
# </div>
# <div lang="zh">
#
# 如果有算子使内存超出预算，计量器就让这一步停在这个算子。这里也会比较这个配方的梯度与基线的梯度。
#
# </div>

# %%
with sheet.part("10.6"):
    sheet.reduced = predict(sheet.recipe)
    options = {"loss_sum": loss_sum, "budget_bytes": BUDGET}
    sheet.taken = run(make_model, make_batch, sheet.recipe, **options).meter
    sheet.error = sheet.gradient_error(sheet.recipe)
    sheet.show_run()

# %% [markdown]
# ## 10.7 In your own code / 实际怎么写
#
# <div lang="en">
#
# If `framework` is "torch", the next cell prints a training loop that uses the course's library. With "trainer", it prints the arguments of Hugging Face's Trainer. With "fsdp2", it prints the lines for PyTorch's FSDP2. Comments in the printed code state which parts of the recipe your framework does not support.
#
# </div>
# <div lang="zh">
#
# 把下一个单元格里的 `framework` 写成 "torch"，会打印一个使用课程库的训练循环，写成 "trainer"，会打印 Hugging Face Trainer 的参数，写成 "fsdp2"，会打印 PyTorch FSDP2 的代码。如果框架不支持配方的某一部分，代码的注释会说明。
#
# </div>

# %%
framework = "torch"
with sheet.part("10.7"):
    print(sheet.lines(framework))

# %% [markdown]
# ## 10.8 Hand in / 交作业
#
# <div lang="en">
#
# The code fills in the sheet, except for two rows that you write yourself. One row states why this recipe uses these techniques and no others. The other row describes one of your guesses that was wrong.
#
# </div>
# <div lang="zh">
#
# 这张表由代码填写，只有两行要你自己写。一行写这个配方为什么用这几种技术，而不用别的技术，另一行写你猜错的一件事。
#
# </div>

# %% tags=["fill-in"]
why = ""
wrong_guess = ""

# %%
sheet.hand_in(why, wrong_guess)
