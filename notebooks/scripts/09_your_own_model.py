# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] slide={"en": "A Llama that this course did not write. You have 200 MB for a step.\n\nWhat has to change?", "zh": "一个别人写的 Llama，训练一步只有 200 MB 可用。\n\n要改哪里，才装得下？"}
# # 9 Does it hold for your own model? / 换成你自己的模型，还成立吗？
#
# <div lang="en">
#
# Here is a small Llama that the course did not write. For one Adam step on four passages of 128 characters, you have 200 MB. Does the step fit? If not, what has to change?
#
# This lesson is a project with three fill-ins: a model, a batch and a loss. They come filled in, so everything runs at once. At the end you replace them with your own.
#
# </div>
# <div lang="zh">
#
# 这里有一个别人写的小 Llama。要用四段 128 个字符的文本做一步 Adam，内存只有 200 MB。装得下吗？如果装不下，该改哪里？
#
# 这一课是一个项目，有三处填空：模型、批次和损失。它们事先已经填好，打开就能运行。到最后，请你换上自己的。
#
# </div>

# %%
from course_lib.teaching import language

language()

# %% [markdown]
# <div lang="en">
#
# **Goals** (100 minutes). Give any model to the tools of this course, and diagnose what is wrong if they reject it. Predict a step from a configuration alone. Choose techniques by what fills the peak, and show that they train the same. Carry the result over to your own training code. Hand in your own model with its numbers.
#
# **What to know before**: lesson 07.
#
# </div>
# <div lang="zh">
#
# **目标**（100 分钟）：把任何模型交给这门课的工具，如果工具不接受，能查出原因；只凭一份配置，预测一步要多少内存；先看峰值里什么最多，再选技术，并证明训练结果不变；把得到的结果搬进自己的训练代码；最后交上自己的模型和它的数据。
#
# **预备知识**：第 07 课。
#
# </div>

# %%
import torch
from torch.nn import functional as F
from transformers import ViTConfig, ViTForImageClassification

from course_lib.budget import Recipe, build, estimate, fit, run, train_step
from course_lib.budget.__main__ import main as budget_command
from course_lib.lessons.ledger import whole_ledger
from course_lib.lessons.lesson_09 import exercises, figures, practice
from course_lib.teaching import predictions, table

BUDGET = 200_000_000  # bytes
STEPS = 2  # 200 steps take minutes

# %% [markdown]
# ## 9.1 Three fill-ins / 三处填空
#
# <div lang="en">
#
# Each fill-in is a function:
#
# - `make_model()` returns a new model in fp32.
# - `make_batch(step)` returns the batch of a step: tensors, alone or in tuples and dictionaries.
# - `loss_sum(model, batch)` returns the sum of the losses and their number. Lesson 05 showed why a mean is not enough.
#
# </div>
# <div lang="zh">
#
# 每处填空都是一个函数：
#
# - `make_model()` 返回一个新的 fp32 模型。
# - `make_batch(step)` 返回那一步的批次，可以是张量，也可以是装着张量的元组或字典。
# - `loss_sum(model, batch)` 返回损失之和，以及损失的个数。为什么只给平均值不够，第 05 课讲过。
#
# </div>


# %% tags=["fill-in"] slide="code"
def make_model():  # transformers' LlamaForCausalLM, from a configuration of nine lines
    return exercises.model_of(exercises.LLAMA)


def make_batch(step=0):  # four passages of the course's own English, one token per character
    return exercises.passages(step)


print(type(make_model()).__name__, *exercises.LLAMA.items(), sep="\n")
{name: tuple(tensor.shape) for name, tensor in make_batch().items()}

# %% [markdown]
# <div lang="en">
#
# **Exercise 1.** Write the third fill-in. `model(batch["input_ids"]).logits` has the shape (batch, tokens, vocabulary). The logits at a position predict the *next* token, and a label of −100 is not predicted.
#
# </div>
# <div lang="zh">
#
# **练习 1。** 写出第三处填空。`model(batch["input_ids"]).logits` 的形状是（批次，token，词表）。某个位置的 logits 预测的是**下一个** token；标签为 −100 的位置不预测。
#
# </div>


# %% minutes=8
def loss_sum(model, batch):
    return None  # the sum of the losses, and how many there are


exercises.check_loss_sum(loss_sum)

# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not exercises.check_loss_sum.accepted:

    def loss_sum(model, batch):
        logits = model(batch["input_ids"]).logits[:, :-1]
        targets = batch["labels"][:, 1:]
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return losses, (targets != -100).sum()


exercises.check_loss_sum(loss_sum)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# Models of transformers compute this loss themselves, and the course weights their micro-batches by the number of labels. For such a model you can leave out the third fill-in.
#
# </div>
# <div lang="zh">
#
# transformers 的模型自己就会算这个损失，本课程按标签数给它的各个微批次加权。所以用这样的模型时，第三处可以不填。
#
# </div>


# %% [markdown] slide={"en": "**Guess first.** From nine lines of configuration: how many parameters? What is the peak of a step?", "zh": "**先猜**：只凭九行配置，有多少参数？一步的峰值是多少？"}
# ## 9.2 Predict from the configuration / 只凭配置来预测
#
# <div lang="en">
#
# You need not build a model to find out whether it fits. Start from the nine lines.
#
# **Exercise 2.** Write `parameters(config)`: how many parameters does a Llama have?
#
# - No matrix has a bias.
# - Each layer has attention (queries, keys, values, output), a gated network of three matrices, and two norms.
# - One more norm follows the last layer.
# - The embedding and the head may be one matrix.
#
# The check tries larger configurations, too.
#
# </div>
# <div lang="zh">
#
# 要知道装不装得下，不必先把模型建出来。就从这九行开始。
#
# **练习 2。** 写出 `parameters(config)`：一个 Llama 有多少参数？
#
# - 所有矩阵都没有偏置。
# - 每层有注意力（查询、键、值、输出）、一个由三个矩阵组成的门控网络，以及两个归一化。
# - 最后一层之后还有一个归一化。
# - 嵌入和输出头可能是同一个矩阵。
#
# 检查你的答案时，还会用更大的配置再试。
#
# </div>


# %% minutes=9
def parameters(config):
    return None


exercises.check_parameters(parameters)

# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not exercises.check_parameters.accepted:

    def parameters(config):
        hidden, width = config["hidden_size"], config["intermediate_size"]
        head = hidden // config["num_attention_heads"]
        keys = hidden * head * config["num_key_value_heads"]
        layer = 2 * hidden**2 + 2 * keys + 3 * hidden * width + 2 * hidden
        tables = 1 if config["tie_word_embeddings"] else 2
        tables *= config["vocab_size"] * hidden
        return config["num_hidden_layers"] * layer + hidden + tables


exercises.check_parameters(parameters)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# Each parameter has four numbers of 4 bytes (lesson 01): the weight, its gradient, and Adam's two moments. Together they take 498.3 MB. **Guess first.** How much more does the step take?
#
# </div>
# <div lang="zh">
#
# 每个参数有四个数，各 4 字节（第 01 课）：权重、梯度，以及 Adam 的两个矩。合起来是 498.3 MB。**先猜**：除此之外，一步的峰值还要多出多少 MB？
#
# </div>

# %% slide="result"
plain = estimate(make_model, make_batch, Recipe())
count = parameters(exercises.LLAMA) or 0
rows = [("16 bytes per parameter", 16 * count), ("estimate for the step", plain.peak_bytes)]
table(["", "bytes"], rows)

# %% [markdown]
# <div lang="en">
#
# Does a real step need as much memory as predicted? `own_model` tests all three fill-ins: it builds the model, predicts a step, runs it and compares both. If they differ, it names the first operator that differs.
#
# </div>
# <div lang="zh">
#
# 真正运行一步，与预测一样吗？`own_model` 会检验全部三处填空：建立模型，预测一步，再真正运行这一步，把两者对照。如果不一样，它会指出从哪个算子开始不同。
#
# </div>

# %% slide="result" minutes=1
from course_lib.lessons.lesson_09 import slots

slots.own_model(make_model, make_batch, None)

# %% [markdown] slide={"en": "609.1 MB. Checkpoints, four micro-batches, offloaded state, steps in backward: one of them alone.\n\n**Guess first.** Which saves most? Which saves nothing?", "zh": "609.1 MB。检查点、四个微批次、状态卸载、在反向中更新，只用其中一种。\n\n**先猜**：哪一种省得最多？哪一种等于没省？"}
# ## 9.3 What fills the peak / 峰值里有什么
#
# <div lang="en">
#
# The estimate is 609.1 MB, which is 110.8 MB more than 498.3 MB.
#
# **Guess first:** use one technique alone: a checkpoint for each layer, four micro-batches, an optimizer state that is offloaded to a lower tier, or optimizer steps in backward. Which one saves most? Which one saves nothing?
#
# </div>
# <div lang="zh">
#
# 估计值是 609.1 MB，比 498.3 MB 多 110.8 MB。
#
# **先猜**：每层一个检查点，批次分成四个微批次，优化器状态卸载到下一级存储，在反向中更新参数。如果只用其中一种，哪一种省得最多？哪一种等于没省？
#
# </div>

# %% tags=["guess"] slide="result" minutes=3
my_guesses = [None, None, None, None]  # in MB
ways = {
    "plain": {},
    "checkpoints": {"checkpoint": "layers"},
    "4 micro-batches": {"micro_batches": 4},
    "state offloaded": {"offload_optimizer": 1.0},
    "steps in backward": {"in_backward": True},
}
three = {"checkpoint": "layers", "offload_optimizer": 1.0, "in_backward": True}
ways["all three"] = three
found = {name: estimate(make_model, make_batch, Recipe(**way)) for name, way in ways.items()}
figures.draw_techniques(found, BUDGET)

# %% [markdown]
# <div lang="en">
#
# Adam's state is the largest part, 249 MB, so offloading it saves most. Checkpoints, the technique that everybody knows, save 92 MB. Steps in backward save nothing here when they are used alone, because the peak comes early in backward, when hardly any gradient exists yet. With checkpoints the peak moves to the end of backward, when all gradients exist, and then it pays to release them early.
#
# Lesson 07 found the same for another model: look at what fills the peak, then choose. Three techniques, each for one part, bring the step down to 171.6 MB.
#
# </div>
# <div lang="zh">
#
# 占得最多的是 Adam 的状态，249 MB，所以卸载它省得最多。人人都知道的检查点只省 92 MB。在这里，单用“在反向中更新”等于没省，因为峰值出现在反向刚开始的时候，那时几乎还没有梯度。加了检查点之后，峰值移到反向的末尾，这时梯度已经全部算出，提早释放它们才有用。
#
# 第 07 课用另一个模型，也得到了同样的结论：先看峰值里什么最多，再选技术。三种技术各管一部分，把这一步降到 171.6 MB。
#
# </div>

# %% [markdown] slide={"en": "Before any claim of saving: the same steps, plain and with all three techniques.\n\n**Guess first.** The same weights, to the last bit?", "zh": "谈节省之前，把同样的几步做两遍，一遍作为基线，一遍三种技术全用。\n\n**先猜**：权重会逐比特相等吗？"}
# ## 9.4 Equal first / 先看是否相等
#
# <div lang="en">
#
# A saving only counts if the model still trains the same. So run the same steps twice on passages half as long: as the baseline, and with all three techniques. **Guess first:** are the weights equal to the last bit? In lesson 07 they were equal.
#
# </div>
# <div lang="zh">
#
# 省下内存，还要训练结果不变才算数。所以把同样的几步运行两遍，文本只取一半长，一遍作为基线，一遍三种技术全用。**先猜**：权重会逐比特相等吗？第 07 课里是相等的。
#
# </div>


# %% slide="code"
def train(recipe, steps, length):
    model, optimizer = build(make_model, recipe, lr=1e-3)
    start, losses = practice.weights(model), []
    for step in range(steps):
        batch = exercises.passages(step, length=length)
        losses.append(float(train_step(model, optimizer, batch, recipe).loss))
    end = practice.weights(model)
    return end, losses, (end - start).norm()


# %% slide="result"
rows, losses = [], {}
for length, steps in ((65, 1), (64, STEPS)):
    expected, losses["plain"], update = train(Recipe(), steps, length)
    lean, losses["all three"], _ = train(Recipe(**three), steps, length)
    rows.append((4 * (length - 1), steps, practice.difference(lean, expected, update)))
table(["tokens predicted", "steps", "difference of the weights (in units of the update)"], rows)

# %% [markdown]
# <div lang="en">
#
# With 256 predicted tokens the weights are equal. With one character fewer per passage, they are not. Why? A step divides the summed loss by the number of tokens. The baseline divides the gradients at the end. The step with updates in backward divides the loss first. 4 × 63 = 252 is not a power of 2, so the division rounds, and the order changes the last digits. 4 × 64 = 256 is a power of 2, as 1024 was in lesson 07, and nothing is rounded.
#
# The remaining difference is less than a two-thousandth of the update. On this CPU, both versions train equally well. Here are the losses of the second row, drawn over each other:
#
# </div>
# <div lang="zh">
#
# 预测 256 个 token 时，权重相等；每段文本少取一个字符，就不相等了。为什么？一步要把损失之和除以 token 数。基线到最后才去除各个梯度；在反向中更新，则是先除损失。4 × 63 = 252 不是 2 的幂，除法要舍入，先除和后除的末几位就不一样。4 × 64 = 256 是 2 的幂，第 07 课的 1024 也是，所以没有舍入。
#
# 剩下的差别不到更新量的两千分之一，在这个 CPU 上，两者的训练结果一样。下面把第二行的损失画在一起：
#
# </div>

# %% slide="result"
figures.draw_losses(losses)

# %% [markdown] slide={"en": "200 MB.\n\n**Write a recipe**, and run it under a meter that stops it at 200 MB.", "zh": "200 MB。\n\n**写一个配方**，再运行它；超过 200 MB，计量器就会拦下。"}
# ## 9.5 By hand, then by search / 先自己配，再让搜索来配
#
# <div lang="en">
#
# **Exercise 3.** Write a recipe for 200 MB that uses another set of techniques than the three above, and keeps fp32 and Adam. Section 7.2 of lesson 07 lists the fields of `Recipe`. Each try takes about half a second.
#
# </div>
# <div lang="zh">
#
# **练习 3。** 为 200 MB 写一个配方，不能正好用上面那三种技术，fp32 和 Adam 不变。`Recipe` 有哪些字段，见第 07 课 7.2 节。每试一次大约半秒钟。
#
# </div>

# %% minutes=8
recipe = None  # Recipe(...)
exercises.check_recipe(recipe)

# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not exercises.check_recipe.accepted:
    below = {"offload_optimizer": 1.0, "offload_activations": True}
    recipe = Recipe(in_backward=True, **below)
exercises.check_recipe(recipe)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# Now run the step under a meter that would stop it at 200 MB:
#
# </div>
# <div lang="zh">
#
# 现在真正运行这一步，超过 200 MB，计量器就会把它拦下：
#
# </div>

# %% slide="result"
recipe = recipe or Recipe(**three)
predicted = estimate(make_model, make_batch, recipe).peak_bytes
taken = run(make_model, make_batch, recipe, budget_bytes=BUDGET)
predictions([("your recipe", predicted, taken.meter.peak_bytes)], unit="bytes")

# %% [markdown] slide={"en": "**Guess first.** `fit` searches for the cheapest recipe in 200 MB.\n\nWhat can still be left out of the three?", "zh": "**先猜**：`fit` 在 200 MB 之内找最便宜的配方。\n\n那三种技术里，还有什么可以不用？"}
# <div lang="en">
#
# Which recipe is the cheapest? Two techniques are necessary. The weights and all gradients together take 249 MB, so each gradient must be released as soon as it has been used. The state also takes 249 MB and must be offloaded. That leaves the activations. With all three techniques, 28 of the 200 MB are still unused. **Guess first:** what can still be left out?
#
# </div>
# <div lang="zh">
#
# 哪个配方最便宜？有两种技术非用不可，因为权重加全部梯度是 249 MB，状态也是 249 MB。所以每个梯度用完就要释放，状态必须卸载。剩下的是激活值。三种技术全用时，200 MB 里还有 28 MB 没用上。**先猜**：三种技术里，还有什么可以省去？
#
# </div>

# %% slide="result"
forced = Recipe(attention=None, offload_optimizer=1.0, in_backward=True)
fit(make_model, make_batch, BUDGET, base=forced, progress=False)

# %% [markdown]
# <div lang="en">
#
# Two of the eleven checkpoints can be left out. Backward begins with the last layers, so what they save is soon released, and the peak comes later. That is why the search leaves the last two layers without checkpoints. The step then takes 0.118 TFLOPs instead of 0.123.
#
# The second recipe chooses by a schedule what to keep (lesson 03). The last one is the solution of exercise 3. It needs no more FLOPs than the plain step, but moves nearly twice as many bytes as the others. Which recipe is best depends on the machine; see the break-even of lesson 07.
#
# </div>
# <div lang="zh">
#
# 十一个检查点里，有两个可以不用。反向从最后几层开始，它们保存的东西很快就用完并释放了，而峰值来得更晚。所以搜索让最后两层不设检查点，这样一步需要 0.118 TFLOPs，而不是 0.123 TFLOPs。
#
# 第二个配方用调度（第 03 课）来决定保留哪些激活值。最后一个就是练习 3 的答案，FLOPs 不比基线多，搬运的字节却是其他几个的将近两倍。哪个配方最好要看机器，见第 07 课的平衡点。
#
# </div>

# %% [markdown] slide={"en": "A vision transformer with 5,543,716 parameters, and 8 pictures.\n\n**Guess first.** The same techniques. Which one saves most now?", "zh": "一个视觉 Transformer，有 5,543,716 个参数，每批 8 张图片。\n\n**先猜**：还是那几种技术，现在哪一种省得最多？"}
# ## 9.6 A model without text / 不处理文本的模型
#
# <div lang="en">
#
# Does the same technique always save most? Take a vision transformer (ViT), which classifies images. It has 5,543,716 parameters, about a sixth of the Llama's. Its batch has 8 pictures of 224 × 224 pixels, each cut into 196 patches, which play the role of tokens.
#
# **Guess first:** which technique saves most now, and how many MB?
#
# </div>
# <div lang="zh">
#
# 省得最多的总是同一种技术吗？换一个视觉 Transformer（ViT）来看，它的任务是给图片分类。它有 5,543,716 个参数，约为 Llama 的六分之一；每批 8 张 224 × 224 像素的图片，每张切成 196 个小块，作用相当于 token。
#
# **先猜**：现在哪种技术省得最多？能省多少 MB？
#
# </div>


# %%
def make_vit():
    torch.manual_seed(0)
    return ViTForImageClassification(ViTConfig(**practice.VIT))


# %% slide="result" minutes=1
rows, vit = [], {}
for name, way in ways.items():
    vit[name] = estimate(make_vit, practice.pictures, Recipe(**way))
    rows.append((name, *(f"{each[name].peak_bytes / 1e6:.1f}" for each in (found, vit))))
table(["", "Llama (MB)", "ViT (MB)"], rows)

# %% [markdown]
# <div lang="en">
#
# The order is reversed: checkpoints save 194 of 306 MB, and offloading the state saves 44. This model has few parameters, so three quarters of its peak are activations. The rule of 9.3 holds, and its answer differs from model to model. Do the predictions hold, too?
#
# </div>
# <div lang="zh">
#
# 顺序反过来了：检查点从 306 MB 里省下 194 MB，卸载状态只省 44 MB。这个模型参数少，峰值的四分之三都是激活值。9.3 节的做法仍然适用，只是答案因模型而异。那么预测还准吗？
#
# </div>

# %% slide="result"
chosen = {name: vit[name] for name in ("plain", "checkpoints")}
practice.run_predicted(make_vit, practice.pictures, chosen)

# %% [markdown] slide={"en": "LoRA trains 2.5% of the Llama's parameters.\n\n**Guess first.** How much of the 609.1 MB does its step still take?", "zh": "LoRA 只训练 Llama 2.5% 的参数。\n\n**先猜**：609.1 MB 里，它的一步还要占多少？"}
# ## 9.7 Few trained parameters: LoRA / 只训练少量参数：LoRA
#
# <div lang="en">
#
# Many people do not train a whole model. LoRA freezes its weights and adds an adapter to each matrix of the layers: two thin matrices, here of rank 8. Only the adapters are trained: 799,744 of 31,941,120 parameters, or 2.5%.
#
# **Guess first:** the whole Llama's step takes 609.1 MB. How much does the step of LoRA take?
#
# </div>
# <div lang="zh">
#
# 很多人并不训练整个模型。LoRA 把原来的权重冻结，在各层的每个矩阵旁边加一个适配器（adapter），也就是两个很窄的矩阵，这里的秩是 8。训练的只有适配器，在 31,941,120 个参数里占 799,744 个，即 2.5%。
#
# **先猜**：训练整个 Llama，一步要 609.1 MB。换成 LoRA 要多少？
#
# </div>


# %% slide="code"
from peft import LoraConfig, get_peft_model

adapters = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")


def make_lora():
    return get_peft_model(make_model(), adapters)


# %% slide="result" minutes=1
recipes = {"LoRA": Recipe(), "LoRA, checkpoints": Recipe(checkpoint="layers")}
peaks = {name: estimate(make_lora, make_batch, each) for name, each in recipes.items()}
practice.run_predicted(make_lora, make_batch, peaks)

# %% slide="result"
figures.draw_lora({"plain": plain, **peaks}, BUDGET)

# %% [markdown]
# <div lang="en">
#
# LoRA takes 343.4 MB, more than half. It removes the gradients and states of frozen weights, but the weights themselves stay, and so do 199.5 MB of activations. Backward must still pass through every layer to reach the adapters of the first one. So checkpoints are the next technique, and bring the step to 170.1 MB. Offloading the state would save only 6.4 MB.
#
# </div>
# <div lang="zh">
#
# LoRA 的一步要 343.4 MB，超过训练整个模型时的一半。冻结的权重不再有梯度和优化器状态，但权重本身还在，激活值也还有 199.5 MB：反向要到达第一层的适配器，仍然得经过每一层。所以接下来该用检查点，用了之后，这一步降到 170.1 MB。卸载状态的话，只能省 6.4 MB。
#
# </div>

# %% [markdown] slide={"en": "Llama 3 8B: 128 GB at 16 bytes per parameter.\n\n**Guess first.** A step of 4096 tokens in 80 GB? In 24?", "zh": "Llama 3 8B 每个参数 16 字节，就是 128 GB。\n\n**先猜**：4096 个 token 的一步，80 GB 装得下吗？24 GB 呢？"}
# ## 9.8 Larger, by configuration alone / 更大的模型，只凭配置
#
# <div lang="en">
#
# Here is Llama 3 8B from its published configuration, with 4096 tokens, bf16, fp32 master weights and Adam. 16 bytes per parameter are 128 GB. **Guess first:** can it be trained on one card of 80 GB, or of 24 GB, together with the host's memory? One shell command answers this:
#
# ```
# python -m course_lib.budget --config llama_3_8b.json --sequence 4096 --batch 1 --device H100 --quick
# ```
#
# </div>
# <div lang="zh">
#
# 现在换成 Llama 3 8B，用它公开的配置：4096 个 token，bf16，fp32 主权重，Adam。每个参数 16 字节，就是 128 GB。**先猜**：一块 80 GB 的卡，加上主机内存，能训练它吗？24 GB 的卡呢？在终端里只要一行：
#
# ```
# python -m course_lib.budget --config llama_3_8b.json --sequence 4096 --batch 1 --device H100 --quick
# ```
#
# </div>

# %% slide="code" minutes=3
sizes = ["--config", exercises.LLAMA_3_8B, "--sequence", "4096", "--batch", "1"]
_ = budget_command([*sizes, "--device", "H100", "--quick"])

# %% [markdown]
# <div lang="en">
#
# The step takes 49 GB, and two fifths of the card's memory remain. The optimizer state is in the host's memory. For another device or model, the same line gives:
#
# | model | device (GB) | recipe | tensors (GB) | reserved (GB) | moved (GB) |
# |---|---|---|---|---|---|
# | Llama 3 8B | H100, 85.5 | state offloaded | 49.0 | 50.3 | 32.1 |
# | Llama 3 8B | RTX 4090, 25.8 | state and activations offloaded, steps in backward | 22.4 | 24.4 | 85.1 |
# | Mixtral 8x7B | H200, 150.1 | state offloaded, checkpoints, steps in backward | 98.7 | 102.9 | 186.8 |
#
# A step fits if its *reserved* memory fits, together with what CUDA keeps for itself. On the RTX 4090, only 0.8 GB are left. If less than 5% is left, the command shows another recipe: with the head in chunks of 512 tokens, 4.1 GB are left. No GPU ran these steps. Of 169 smaller steps on an H200, 158 took exactly the estimated bytes of tensors, and the others up to 12 kB less. In 21 steps the allocator reserved from 11% less to 9% more than predicted (`docs/exact.md`). To check a step on your own GPU, add `--device this --check`. `--for trainer` prints a script for the Trainer.
#
# </div>
# <div lang="zh">
#
# 这一步要 49 GB，卡上还剩五分之二。优化器状态放在主机内存里。同一行命令，换成别的设备或别的模型，结果是：
#
# | 模型 | 设备（GB） | 配方 | 张量（GB） | 已预留（GB） | 搬运（GB） |
# |---|---|---|---|---|---|
# | Llama 3 8B | H100，85.5 | 状态卸载 | 49.0 | 50.3 | 32.1 |
# | Llama 3 8B | RTX 4090，25.8 | 状态和激活值卸载，在反向中更新 | 22.4 | 24.4 | 85.1 |
# | Mixtral 8x7B | H200，150.1 | 状态卸载，检查点，在反向中更新 | 98.7 | 102.9 | 186.8 |
#
# 装不装得下，要看**已预留**的显存，再加上 CUDA 自己占用的部分。RTX 4090 上只剩 0.8 GB。如果剩下的不到 5%，命令会再给出一种配方：输出头分小段计算，每段 512 个 token，这样还剩 4.1 GB。表里的训练步没有在 GPU 上运行过。在 H200 上运行过 169 个较小的训练步，其中 158 个的张量与估计逐字节相等，其余的最多少 12 kB。在 21 个训练步里，分配器预留的显存比预测最多少 11%，最多多 9%（`docs/exact.md`）。要在自己的 GPU 上验证，就加上 `--device this --check`。加上 `--for trainer`，就打印用于 Trainer 的脚本。
#
# </div>

# %% [markdown] slide={"en": "Your recipe takes 171.6 MB. You train with Hugging Face's Trainer.\n\n**Guess first.** How many MB there?", "zh": "配方只要 171.6 MB。改用 Hugging Face 的 Trainer 来训练。\n\n**先猜**：那里要多少 MB？"}
# ## 9.9 In your own code / 实际怎么写
#
# <div lang="en">
#
# Your own loop can call `build` and `train_step`, as `train` does in 9.4. `as_training_arguments` converts a recipe to arguments of Hugging Face's Trainer.
#
# **Guess first:** the recipe of 9.3 with all three techniques takes 171.6 MB. How many MB does a step take in the Trainer?
#
# </div>
# <div lang="zh">
#
# 自己写的循环可以像 9.4 节的 `train` 那样，调用 `build` 和 `train_step`。如果用 Hugging Face 的 Trainer，`as_training_arguments` 可以把配方写成它的参数。
#
# **先猜**：9.3 节三种技术全用的配方要 171.6 MB。放到 Trainer 里，一步要多少 MB？
#
# </div>

# %%
lines = Recipe(**three).as_training_arguments(samples=4)
lines

# %% slide="result" minutes=1
peak = practice.peak_in_trainer(make_model(), lines.arguments)
expected = estimate(make_model, make_batch, lines.recipe).peak_bytes
predictions([("Trainer", expected, peak)], unit="bytes")

# %% [markdown]
# <div lang="en">
#
# The Trainer takes 517.2 MB. Its arguments support only one of the three techniques, checkpoints. `lines.recipe` contains only what the Trainer supports, so its estimate says in advance what to expect. The Trainer takes 8,204 bytes more than this estimate, as much as one more batch (8,192 bytes) and three fp32 numbers.
#
# For several GPUs, `as_fsdp2` writes the lines for PyTorch's FSDP2. A test of the course runs them, in one process on a CPU:
#
# </div>
# <div lang="zh">
#
# 要 517.2 MB。三种技术里，Trainer 的参数只支持检查点这一种。`lines.recipe` 是去掉另外两种技术的配方，用它作估计，就能预先知道结果。Trainer 比估计多占 8,204 字节，相当于多一个批次（8,192 字节），再加三个 fp32 的数。
#
# 有多块 GPU 时，`as_fsdp2` 会写出 PyTorch FSDP2 的代码。本课程有一项测试会运行这几行，用的是 CPU 上的一个进程：
#
# </div>

# %% slide="code"
sharded = Recipe("bf16", checkpoint="layers", ranks=8, shard="zero3")
print(sharded.as_fsdp2(["model.layers.0"]))

# %% [markdown] slide={"en": "Training is over; the model generates text. No gradients, no state, nothing saved for backward.\n\n**Guess first.** What still grows with each token?", "zh": "训练结束，模型开始生成文本。没有梯度，没有状态，也不为反向保存什么。\n\n**先猜**：还有什么随 token 增多而增长？"}
# ## 9.10 After training: the key-value cache / 训练之后：键值缓存
#
# <div lang="en">
#
# With full attention, each new token of a generated text attends to all earlier ones. So the model keeps their keys and values, in every layer: the key-value cache. With $L$ layers, $a_{kv}$ key-value heads of $d$ numbers, $b$ sequences of $s$ tokens, and $w$ bytes per number, the bytes of the cache are
#
# $$2 \cdot L \cdot a_{kv} \cdot d \cdot b \cdot s \cdot w$$
#
# **Guess first:** how many MB is the cache for the small Llama and its four passages of 128 tokens?
#
# </div>
# <div lang="zh">
#
# 生成文本时，如果用的是全注意力（不是滑动窗口），每个新 token 都要关注前面所有的 token，所以每一层都要留着它们的键和值，这就是键值缓存（key-value cache）。设有 $L$ 层，每层 $a_{kv}$ 个键值头，每个头 $d$ 个数，共 $b$ 条序列，每条 $s$ 个 token，每个数 $w$ 字节，那么缓存的字节数是
#
# $$2 \cdot L \cdot a_{kv} \cdot d \cdot b \cdot s \cdot w$$
#
# **先猜**：对小 Llama 和它的四段 128 个 token，这是多少 MB？
#
# </div>


# %% slide="code"
def cache_bytes(config, sequences, tokens, width):
    head = config["hidden_size"] // config["num_attention_heads"]
    numbers = config["num_hidden_layers"] * config["num_key_value_heads"] * head
    return 2 * numbers * sequences * tokens * width


# %% slide="result"
model, tokens = make_model().eval(), make_batch()["input_ids"]
with torch.no_grad():
    layers = model(tokens, use_cache=True).past_key_values.layers
held = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
predictions([("cache", cache_bytes(exercises.LLAMA, *tokens.shape, 4), held)], unit="bytes")

# %% [markdown]
# <div lang="en">
#
# 5.8 MB, next to 124.6 MB of weights. For Llama 3 8B in bf16 the formula gives 131,072 bytes per token, so one sequence of 8192 tokens takes 1.07 GB. With 32 key-value heads instead of 8, it would take 4.29 GB. Grouped-query attention makes this cache smaller.
#
# </div>
# <div lang="zh">
#
# 缓存占 5.8 MB，而权重占 124.6 MB。对 bf16 的 Llama 3 8B，按公式每个 token 要 131,072 字节，一个 8192 个 token 的序列就是 1.07 GB。如果键值头是 32 个而不是 8 个，就要 4.29 GB。可见分组查询注意力（GQA）能缩小这个缓存。
#
# </div>

# %% [markdown]
# ## 9.11 Claims and measurements / 说法与实测

# %% slide="result"
flash = estimate(make_model, make_batch, Recipe(checkpoint="layers", attention="flash"))
figures.what_you_may_have_read(plain, found["checkpoints"], flash)

# %% [markdown]
# ## 9.12 Hand in / 交作业
#
# <div lang="en">
#
# Replace the three fill-ins by your own: a model that you train or want to train, its batch and loss. Run the lesson again, and hand in this sheet. It gives 20 points: the prediction equals the measurement, or the difference is explained (6); each technique is chosen by what fills the peak (6); its cost is stated (4); equal losses or weights are shown (2); one wrong guess is reported (2).
#
# | | yours |
# |---|---|
# | model, parameters, budget | |
# | plain: predicted, measured, difference in bytes | |
# | what fills the peak | |
# | recipe: predicted, measured, difference in bytes | |
# | what fills the peak now | |
# | each technique used or not used, and why (one sentence each) | |
# | FLOPs, bytes moved, seconds per step: plain and yours | |
# | equal, or the size of the difference | |
# | one thing that I guessed wrong | |
#
# </div>
# <div lang="zh">
#
# 把三处填空换成你自己的：一个你正在训练或打算训练的模型，它的批次和损失。把这一课重新运行一遍，然后交上这张表。满分 20 分：预测等于实测，或说清差在哪里（6 分）；每种技术都是看过峰值之后选的（6 分）；写出代价（4 分）；证明损失或权重相等（2 分）；报告一次猜错（2 分）。
#
# | | 你的 |
# |---|---|
# | 模型、参数个数、预算 | |
# | 基线：预测、实测、相差的字节数 | |
# | 峰值里什么最多 | |
# | 配方：预测、实测、相差的字节数 | |
# | 现在峰值里什么最多 | |
# | 每种技术用或不用，为什么（各一句） | |
# | FLOPs、搬运的字节数、每步秒数：基线的和你的 | |
# | 相等，或者相差多少 | |
# | 我猜错的一件事 | |
#
# </div>

# %% tags=["fill-in"] minutes=8 slide="code"
model_slot = None  # your make_model
batch_slot = None  # your make_batch(step)
loss_slot = None  # your loss_sum(model, batch), or None for the model's own
slots.own_model(model_slot, batch_slot, loss_slot)

# %% [markdown]
# ## 9.13 The ledger / 账本
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

# %% [markdown] slide={"en": "Three fill-ins, one sheet: put in your own model.\n\nLook at what fills the peak, choose, prove it equal, measure.", "zh": "三处填空，一张表，换上你自己的模型。\n\n看峰值里什么最多，选技术，证明相等，再测量。"}
# ## 9.14 Summary / 小结
#
# <div lang="en">
#
# - The step of a Llama was predicted to the byte from nine lines of configuration. So were the steps of a ViT and of LoRA, on this CPU.
# - The largest part of the peak differs: optimizer state for the small Llama, activations for the ViT and for LoRA. So does the best first technique.
# - Without equal weights, 171.6 MB instead of 609.1 MB proves nothing.
# - A recipe can be written as lines for the Trainer or FSDP2. Read what they lack.
# - Reserved memory must fit, with room to spare.
#
# **Sources.** Touvron et al. 2023, *LLaMA*, arXiv:2302.13971, and *The Llama 3 Herd of Models*, arXiv:2407.21783 (sizes). Jiang et al. 2024, *Mixtral of Experts*, arXiv:2401.04088. Dosovitskiy et al. 2020, *An Image is Worth 16x16 Words*, arXiv:2010.11929. Hu et al. 2021, *LoRA*, arXiv:2106.09685. Documentation of transformers, peft and Accelerate (*Model memory estimator*).
#
# **Next.** Your own model.
#
# </div>
# <div lang="zh">
#
# - 只凭九行配置，就预测出了 Llama 一步的峰值，一个字节也不差。ViT 和 LoRA 的一步也是如此（都在这个 CPU 上）。
# - 峰值里什么最多，因模型而异：小 Llama 是优化器状态，ViT 和 LoRA 是激活值。因此，最先该用的技术也不一样。
# - 先证明权重相等，从 609.1 MB 降到 171.6 MB 才算真正省下了内存。
# - 配方可以写成 Trainer 或 FSDP2 的代码。注意这些代码缺少配方里的哪些技术。
# - 要装得下的是已预留的显存，并且要留有余量。
#
# **出处。** Touvron et al. 2023，*LLaMA*，arXiv:2302.13971，以及 *The Llama 3 Herd of Models*，arXiv:2407.21783（尺寸）。Jiang et al. 2024，*Mixtral of Experts*，arXiv:2401.04088。Dosovitskiy et al. 2020，*An Image is Worth 16x16 Words*，arXiv:2010.11929。Hu et al. 2021，*LoRA*，arXiv:2106.09685。transformers、peft 和 Accelerate（*Model memory estimator*）的文档。
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
# ## 9.15 When prediction and run differ / 预测与实测不一致时
#
# <div lang="en">
#
# Batches with padding have an `attention_mask`. With its default attention (SDPA), transformers drops a mask that is all 1. With any other mask, attention saves other tensors. Here the prediction has no padding, and the run has 40 padded tokens:
#
# </div>
# <div lang="zh">
#
# 有填充的批次带着 `attention_mask`。如果掩码全是 1，transformers 在使用默认的注意力实现（SDPA）时会丢掉它。如果掩码不全是 1，注意力保存的张量就不同。下面故意在没有填充的批次上预测，在有 40 个填充 token 的批次上运行：
#
# </div>


# %% slide="result"
def padded(count):
    batch = exercises.passages(0)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, mask.shape[1] - count :] = 0
    return {**batch, "attention_mask": mask}


guess = estimate(make_model, lambda: padded(0), Recipe())
taken = run(make_model, lambda: padded(40), Recipe())
slots.first_difference(guess.trace(), taken.meter.trace())

# %% [markdown]
# <div lang="en">
#
# A prediction with the padded batch equals the run, because estimates keep the values of small integer tensors.
#
# </div>
# <div lang="zh">
#
# 如果也在有填充的批次上预测，两者就一致，因为估计会保留较小的整数张量里的数值。
#
# </div>

# %% [markdown]
# ## 9.16 Three other architectures / 另外三种结构
#
# <div lang="en">
#
# These are an encoder, an encoder with a decoder, and a network without attention, with a checkpoint around every block:
#
# </div>
# <div lang="zh">
#
# 下面是一个编码器、一个编码器-解码器，还有一个没有注意力的网络，每个块都加检查点：
#
# </div>

# %% slide="result"
figures.other_architectures()

# %% [markdown]
# ## 9.17 A technique that raises the peak / 反而升高峰值的技术
#
# <div lang="en">
#
# Steps in backward saved nothing in 9.3. With Llama 3 8B (8 of its 32 layers), they even raise the peak if Adam updates one parameter at a time, as on a CPU. GPUs update all parameters at once by default:
#
# </div>
# <div lang="zh">
#
# 在 9.3 节，“在反向中更新”等于没省。用在 Llama 3 8B 上（这里取 32 层里的 8 层），如果 Adam 像在 CPU 上那样逐个更新参数，峰值甚至会升高。在 GPU 上，默认是一次全部更新：
#
# </div>

# %% slide="result"
figures.update_in_backward()

# %% [markdown]
# <div lang="en">
#
# The head's gradient comes first, and its update needs two fp32 temporaries of 2.1 GB while nearly all activations are live. `foreach` needs only one, so the peak stays at the loss.
#
# </div>
# <div lang="zh">
#
# 最先算出的是输出头的梯度，更新它要两个 2.1 GB 的 fp32 临时张量，而这时几乎所有激活值都还存活。用 `foreach` 只要一个，峰值就仍在损失那里。
#
# </div>

# %% [markdown]
# ## 9.18 What was compared / 比较过哪些模型
#
# <div lang="en">
#
# `tests/sweep_models.py` builds small models of every type in transformers 5.23 (804). 216 could be built without a special batch. They ran 540 steps: 521 peaked at the estimate to the byte, none differed, and 19 were refused with a reason.
#
# </div>
# <div lang="zh">
#
# `tests/sweep_models.py` 为 transformers 5.23 的每一种模型（共 804 种）建一个小模型。其中 216 种不需要特别的批次。它们的 540 个训练步里，521 个的峰值与估计逐字节相等，没有一个不等，另外 19 个被拒绝，并说明了原因。
#
# </div>
