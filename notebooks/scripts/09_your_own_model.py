# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] slide={"en": "A Llama that this course did not write. You have 200 MB for a step.\n\nWhat has to change?", "zh": "一个别人写的 Llama，训练一步只有 200 MB 可用。\n\n要改哪里，才装得下？"}
# # 9 Does it hold for other models? / 换成别的模型，还成立吗？
#
# <div lang="en">
#
# Here is a small Llama that the course did not write. For one Adam step on four passages of 128 characters, you have 200 MB. Does the step fit? If not, what has to change?
#
# A vision transformer, LoRA and Llama 3 8B follow. The [project](10_your_model.ipynb) is about your own model.
#
# </div>
# <div lang="zh">
#
# 这里有一个别人写的小 Llama。用 Adam 训练一步，批次是四段文本，每段 128 个字符，内存只有 200 MB。装得下吗？如果装不下，该改哪里？
#
# 接着看视觉 Transformer、LoRA 和 Llama 3 8B。你自己的模型留到[项目](10_your_model.ipynb)里再分析。
#
# </div>

# %%
from course_lib.teaching import language

language()

# %% [markdown]
# <div lang="en">
#
# **Goals** (82 minutes, in two sittings):
#
# - Predict the memory of a step from a model's configuration alone.
# - Choose techniques by what fills the peak, and show that they do not change the training.
# - State how much memory full training, LoRA and QLoRA of an 8B model need.
#
# **What to know before**: lesson 07.
#
# </div>
# <div lang="zh">
#
# **目标**（共 82 分钟，分两次学）
#
# - 只凭模型的配置，预测一步要多少内存。
# - 先看峰值里什么最多，再选技术，并证明训练结果不变。
# - 说出训练一个 8B 模型时，全量训练、LoRA 和 QLoRA 各要多少内存。
#
# **预备知识**：第 07 课。
#
# </div>

# %%
import torch
from transformers import ViTConfig, ViTForImageClassification

from course_lib.adapters import with_adapters
from course_lib.budget import Recipe, build, estimate, fit, run, train_step
from course_lib.budget.__main__ import main as budget_command
from course_lib.lessons.ledger import whole_ledger
from course_lib.lessons.lesson_09 import exercises, figures, practice
from course_lib.teaching import predictions, table

BUDGET = 200_000_000  # bytes

# %% [markdown] slide={"en": "**Guess first.** From nine lines of configuration: how many parameters? What is the peak of a step?", "zh": "**先猜**：只凭九行配置，有多少参数？一步的峰值是多少？"}
# ## 9.1 Predict from the configuration / 只凭配置来预测
#
# <div lang="en">
#
# You need not build a model to find out whether its step fits into memory. Nine lines of configuration describe this Llama. The batch has four passages of the course's English text, with one token per character.
#
# </div>
# <div lang="zh">
#
# 要知道装不装得下，不必先把模型建出来，因为九行配置就能描述这个 Llama。批次是四段文本，取自本课程的英文课文，每个字符是一个 token。
#
# </div>


# %% slide="code"
def make_llama():  # transformers' LlamaForCausalLM
    return exercises.model_of(exercises.LLAMA)


def llama_batch(step=0):
    return exercises.passages(step)


print(*exercises.LLAMA.items(), sep="\n")

# %% [markdown]
# <div lang="en">
#
# **Exercise 1.** Write `parameters(config)`, which returns how many parameters a Llama has.
#
# - No matrix has a bias.
# - Each layer has attention (queries, keys, values, output), a gated network of three matrices, and two norms.
# - One more norm follows the last layer.
# - The embedding and the head may be one matrix.
#
# The check also tries larger configurations.
#
# </div>
# <div lang="zh">
#
# **练习 1。** 写出 `parameters(config)`，返回一个 Llama 的参数个数。
#
# - 所有矩阵都没有偏置。
# - 每层有注意力（查询、键、值、输出）、一个由三个矩阵组成的门控网络，以及两个归一化层。
# - 最后一层之后还有一个归一化层。
# - 嵌入和输出头可能是同一个矩阵。
#
# 检查还会测试更大的配置。
#
# </div>


# %% minutes=12
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
# For each parameter, a step keeps four numbers of 4 bytes (lesson 01): the weight, its gradient, and Adam's two moments. For all parameters, these numbers take 498.3 MB. **Guess first.** By how many MB is the peak of the step higher than 498.3 MB?
#
# </div>
# <div lang="zh">
#
# 每个参数对应四个数，即权重、梯度，以及 Adam 的两个矩，各占 4 字节（第 01 课）。全部参数的这四个数共占 498.3 MB。**先猜**：一步的峰值比 498.3 MB 还要高出多少？
#
# </div>

# %% tags=["guess"] slide="result"
my_guess = None  # in MB, beyond 498.3
plain = estimate(make_llama, llama_batch, Recipe())
beyond = plain.peak_bytes - 16 * (parameters(exercises.LLAMA) or 0)
practice.guesses([("beyond 16 bytes per parameter", my_guess, beyond)])

# %% [markdown]
# <div lang="en">
#
# Does a real step need exactly the estimated memory? We run one step under a memory meter:
#
# </div>
# <div lang="zh">
#
# 真正运行一步时，需要的内存与估计一样吗？下面在计量器下运行一次。
#
# </div>

# %% slide="result"
practice.run_predicted(make_llama, llama_batch, {"plain": plain})

# %% [markdown] slide={"en": "609.1 MB. Checkpoints, four micro-batches, offloaded state, steps in backward: one of them alone.\n\n**Guess first.** Which saves most? Which saves nothing?", "zh": "峰值 609.1 MB。检查点、四个微批次、状态卸载、在反向中更新，只用其中一种。\n\n**先猜**：哪一种省得最多？哪一种等于没省？"}
# ## 9.2 What fills the peak / 峰值里有什么
#
# <div lang="en">
#
# The estimated peak is 609.1 MB, which is 110.9 MB more than the 498.3 MB of weights, gradients and Adam's state.
#
# **Guess first.** Use one technique alone: a checkpoint for each layer, four micro-batches, an optimizer state that is offloaded to a lower tier, or optimizer steps in backward. Which technique saves most? Which one saves nothing?
#
# </div>
# <div lang="zh">
#
# 估计的峰值是 609.1 MB，比权重、梯度和 Adam 状态的 498.3 MB 多 110.9 MB。
#
# **先猜**：有四种技术，即每层加一个检查点、把批次分成四个微批次、把优化器状态卸载到下一级存储，以及在反向中更新参数。如果只用其中一种，哪一种省得最多？哪一种等于没省？
#
# </div>

# %% tags=["guess"] slide="result"
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
found = {name: estimate(make_llama, llama_batch, Recipe(**way)) for name, way in ways.items()}
figures.draw_techniques(found, BUDGET)

# %% slide="result"
saved = [plain.peak_bytes - each.peak_bytes for each in found.values()]
practice.guesses(zip([*ways][1:5], my_guesses, saved[1:5], strict=True))

# %% [markdown]
# <div lang="en">
#
# Adam's state is the largest part of the peak, 249 MB, so offloading it saves most. Checkpoints, the best-known technique, save 92 MB. Updates in backward save nothing here when used alone, because the peak comes early in backward, when hardly any gradient exists yet. With checkpoints, the peak moves to the end of backward, when all gradients exist. Then releasing gradients early lowers the peak.
#
# Lesson 07 found the same rule for another model: look at what fills the peak, then choose a technique. Together, checkpoints, offloaded state and updates in backward lower the peak to 171.6 MB.
#
# </div>
# <div lang="zh">
#
# 峰值里占得最多的是 Adam 的状态，共 249 MB，所以卸载状态省得最多。检查点是最有名的技术，在这里却只省下 92 MB。单用“在反向中更新”等于没省，因为峰值出现在反向刚开始的时候，那时几乎还没有梯度。加了检查点之后，峰值移到反向的末尾，这时梯度已经全部算出，提早释放梯度才有用。
#
# 第 07 课分析另一个模型时，结论相同，即先看峰值里什么最多，再选技术。检查点、状态卸载和在反向中更新合用，峰值就降到 171.6 MB。
#
# </div>

# %% [markdown] slide={"en": "Before any claim of saving: the same steps, plain and with all three techniques.\n\n**Guess first.** The same weights, to the last bit?", "zh": "先把同样的几步做两遍，一遍作为基线，一遍三种技术全用，再谈省了多少。\n\n**先猜**：权重会逐比特相等吗？"}
# ## 9.3 Equal first / 先看是否相等
#
# <div lang="en">
#
# A saving only counts if the training stays the same. Run the same steps twice, on passages of half the length: first as the baseline, then with checkpoints, offloaded state and updates in backward. **Guess first:** are the weights of both runs equal to the last bit? In lesson 07 they were equal.
#
# </div>
# <div lang="zh">
#
# 训练结果不变，省下的内存才算数。所以把同样的几步运行两遍，一遍作为基线，一遍三种技术（检查点、状态卸载和在反向中更新）全用，两遍的文本都只取原来长度的一半。**先猜**：两遍得到的权重会逐比特相等吗？在第 07 课里是相等的。
#
# </div>


# %% slide="code"
def train(recipe, steps, length):
    model, optimizer = build(make_llama, recipe, lr=1e-3)
    start = practice.weights(model)
    for step in range(steps):
        train_step(model, optimizer, exercises.passages(step, length=length), recipe)
    end = practice.weights(model)
    return end, (end - start).norm()


# %% slide="result"
rows = []
for length, steps in ((65, 1), (64, 2)):
    expected, update = train(Recipe(), steps, length)
    lean, _ = train(Recipe(**three), steps, length)
    rows.append((4 * (length - 1), steps, practice.difference(lean, expected, update)))
table(["tokens predicted", "steps", "difference of the weights (in units of the update)"], rows)

# %% [markdown]
# <div lang="en">
#
# With 256 predicted tokens the weights are equal. With one character fewer per passage, the weights are not equal. Why? A step must divide the losses or gradients by the number of tokens. The baseline divides the gradients after backward. With updates in backward, the loss is divided before backward. 4 × 63 = 252 is not a power of 2, so the division rounds, and dividing earlier changes the last digits. 4 × 64 = 256 is a power of 2, as 1024 was in lesson 07, so the division is exact.
#
# With 252 tokens, the weights differ by less than a two-thousandth of the update (the change of the weights in training). So in these two steps on this CPU, both recipes give the same training up to rounding.
#
# </div>
# <div lang="zh">
#
# 预测 256 个 token 时，两遍得到的权重相等。如果每段文本少取一个字符，两遍的权重就不相等了。为什么？训练步要把损失之和或梯度除以 token 数。基线先做反向，最后才把各个梯度除以 token 数。在反向中更新时，要先把损失除以 token 数，再做反向。4 × 63 = 252 不是 2 的幂，做除法时要舍入，所以先除和后除得到的末几位数字不一样。4 × 64 = 256 和第 07 课的 1024 都是 2 的幂，所以没有舍入。
#
# 预测 252 个 token 时，两遍的权重相差不到更新量（训练前后权重之差）的两千分之一，所以在这个 CPU 上的这两步里，除了舍入误差，可以认为两个配方的训练结果相同。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **End of the first sitting** (36 minutes). You have predicted the peak of a new model's step. With three techniques, the training has the same result as the baseline, up to rounding. In the second sitting, you write a recipe for 200 MB. Then a vision transformer, LoRA, and a model of 8 billion parameters follow.
#
# </div>
# <div lang="zh">
#
# **第一次学习到此结束**（36 分钟）。你已经预测出新模型训练一步的峰值，也看到用上三种技术之后，除了舍入误差，训练结果仍与基线一样。第二次学习里，你要写一个配方，让峰值不超过 200 MB，再来看视觉 Transformer、LoRA 和一个有 80 亿参数的模型。
#
# </div>

# %% [markdown] slide={"en": "200 MB.\n\n**Write a recipe**, and run it under a meter that stops it at 200 MB.", "zh": "200 MB。\n\n**写一个配方**，再运行它。如果内存超过 200 MB，计量器就会让这一步停下。"}
# ## 9.4 By hand, then by search / 先自己配，再让搜索来配
#
# <div lang="en">
#
# **Exercise 2.** Write a recipe with a peak of at most 200 MB. It must not be the combination of checkpoints, offloaded state and steps in backward. Fewer checkpoints, or checkpoints of another size, do not count as another set of techniques. Still use fp32, Adam and one device. Section 7.2 of lesson 07 lists the fields of `Recipe`.
#
# </div>
# <div lang="zh">
#
# **练习 2。** 写一个峰值不超过 200 MB 的配方，但不能正好用检查点、状态卸载和在反向中更新这三种。只给一部分层加检查点，或者改变检查点的大小，都不算换了一组技术。仍用 fp32、Adam 和单台设备。`Recipe` 的字段见第 07 课 7.2 节。
#
# </div>

# %% minutes=10
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
# Run the step under a meter that would stop it at 200 MB:
#
# </div>
# <div lang="zh">
#
# 现在真正运行这一步。如果内存超过 200 MB，计量器就会让这一步停下。
#
# </div>

# %% slide="result"
recipe = recipe or Recipe(**three)
predicted = estimate(make_llama, llama_batch, recipe).peak_bytes
taken = run(make_llama, llama_batch, recipe, budget_bytes=BUDGET)
predictions([("your recipe", predicted, taken.meter.peak_bytes)], unit="bytes")

# %% [markdown] slide={"en": "**Guess first.** `fit` searches for the cheapest recipe in 200 MB.\n\nWhat can still be left out of the three?", "zh": "**先猜**：`fit` 在 200 MB 之内找代价最小的配方。\n\n那三种技术里，还有什么可以不用？"}
# <div lang="en">
#
# Which recipe within 200 MB is cheapest? Two techniques are necessary. The weights and all gradients together take 249 MB, so each gradient must be released right after its use. The optimizer state also takes 249 MB and must be offloaded. With checkpoints as the third technique, 28 MB of the 200 MB are still unused. **Guess first:** what can still be left out of this recipe?
#
# </div>
# <div lang="zh">
#
# 哪个配方代价最小？有两种技术非用不可。权重和全部梯度一共要 249 MB，所以每个梯度用完就要释放。优化器状态也要 249 MB，所以必须卸载。再加上检查点之后，200 MB 里还有 28 MB 没用上。**先猜**：这个配方里，还有什么可以省去？
#
# </div>

# %% slide="result"
forced = Recipe(attention=None, offload_optimizer=1.0, in_backward=True)
fit(make_llama, llama_batch, BUDGET, base=forced, progress=False)

# %% [markdown]
# <div lang="en">
#
# Two of the eleven checkpoints can be left out. Backward begins with the last layers, so their saved tensors are soon released, and the peak comes later. Therefore the search leaves the last two layers without checkpoints. The step then computes 0.118 TFLOPs instead of 0.123.
#
# The second recipe of the table uses a schedule to choose which activations to keep (lesson 03). The last recipe is the sample solution of exercise 2. It needs no more FLOPs than the baseline, but moves nearly twice as many bytes as any other recipe in the table. The best recipe depends on the machine, as exercise 2 of lesson 07 shows.
#
# </div>
# <div lang="zh">
#
# 十一个检查点里，有两个可以不用。反向从最后几层开始，这几层保存的张量很快就用完并释放了，而峰值在这之后才出现。所以在搜索得到的配方里，最后两层不加检查点，这样一步的计算量就从 0.123 TFLOPs 降到 0.118 TFLOPs。
#
# 表中第二个配方用调度（第 03 课）来决定保留哪些激活值。最后一个配方就是练习 2 的参考答案，FLOPs 不比基线多，但搬运的字节数将近其他各配方的两倍。哪个配方最好取决于机器，计算方法见第 07 课的练习 2。
#
# </div>

# %% [markdown] slide={"en": "A vision transformer with 5,543,716 parameters, and 8 pictures.\n\n**Guess first.** The same techniques. Which one saves most now?", "zh": "一个视觉 Transformer，有 5,543,716 个参数，每批 8 张图片。\n\n**先猜**：还是那几种技术，现在哪一种省得最多？"}
# ## 9.5 A model without text / 不处理文本的模型
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
# 不论换成什么模型，省得最多的总是同一种技术吗？下面换成一个给图片分类的视觉 Transformer（ViT）。这个 ViT 有 5,543,716 个参数，约为 Llama 的六分之一。每批有 8 张 224 × 224 像素的图片，每张切成 196 个小块，小块的作用相当于 token。
#
# **先猜**：现在哪种技术省得最多？能省多少 MB？
#
# </div>


# %%
def make_vit():
    torch.manual_seed(0)
    return ViTForImageClassification(ViTConfig(**practice.VIT))


# %% slide="result"
rows, vit = [], {}
for name, way in ways.items():
    vit[name] = estimate(make_vit, practice.pictures, Recipe(**way))
    rows.append((name, *(f"{each[name].peak_bytes / 1e6:.1f}" for each in (found, vit))))
table(["", "Llama (MB)", "ViT (MB)"], rows)

# %% [markdown]
# <div lang="en">
#
# For the ViT, checkpoints save most, 194 MB of 306 MB. Offloading the state saves only 44 MB. This model has few parameters, so three quarters of its peak are activations. The rule of 9.2 (look at what fills the peak) holds, but leads to another technique here. Are the predictions still right?
#
# </div>
# <div lang="zh">
#
# 这次省得最多的是检查点，在 306 MB 的峰值里省下 194 MB，卸载状态只省 44 MB。这个模型参数少，峰值的四分之三都是激活值。9.2 节的做法仍然适用，只是答案因模型而异。那么预测还准吗？
#
# </div>

# %% slide="result"
chosen = {name: vit[name] for name in ("plain", "checkpoints")}
practice.run_predicted(make_vit, practice.pictures, chosen)

# %% [markdown] slide={"en": "LoRA trains 2.5% of the Llama's parameters.\n\n**Guess first.** How much of the 609.1 MB does its step still take?", "zh": "LoRA 只训练 Llama 2.5% 的参数。\n\n**先猜**：全量训练一步要 609.1 MB，LoRA 的一步要多少？"}
# ## 9.6 Few trained parameters: LoRA / 只训练少量参数：LoRA
#
# <div lang="en">
#
# LoRA freezes the model's weights and adds an adapter to each matrix of the layers: two thin matrices, here of rank 8. Only the adapters are trained. They have 799,744 of 31,941,120 parameters, or 2.5%.
#
# **Guess first:** a step that trains the whole Llama takes 609.1 MB. How much does a step with LoRA take?
#
# </div>
# <div lang="zh">
#
# LoRA 把原来的权重冻结，在各层的每个矩阵旁边加一个适配器（adapter），也就是两个很窄的矩阵，这里的秩是 8。训练时只更新适配器，也就是在 31,941,120 个参数里只更新 799,744 个，占 2.5%。
#
# **先猜**：训练整个 Llama，一步要 609.1 MB。换成 LoRA 要多少？
#
# </div>


# %% slide="code"
from peft import LoraConfig, get_peft_model

adapters = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")


def make_lora():
    return get_peft_model(make_llama(), adapters)


# %% tags=["guess"] slide="result"
my_guess = None  # in MB
recipes = {"LoRA": Recipe(), "LoRA, checkpoints": Recipe(checkpoint="layers")}
peaks = {name: estimate(make_lora, llama_batch, each) for name, each in recipes.items()}
practice.run_predicted(make_lora, llama_batch, peaks, guess=my_guess)

# %% [markdown]
# <div lang="en">
#
# LoRA takes 343.4 MB, more than half of full training's memory. LoRA removes the gradients and the optimizer state of frozen weights, but the weights themselves stay. The activations stay, too, at 199.5 MB, because backward must pass through every layer to reach the adapters of the first layer. So checkpoints are the next technique, and they lower the peak to 170.1 MB. Offloading the state would save only 6.4 MB.
#
# </div>
# <div lang="zh">
#
# LoRA 的一步要 343.4 MB，比训练整个模型时的一半还多。冻结的权重不再有梯度和优化器状态，但权重本身还在。激活值也还有 199.5 MB，因为反向要经过每一层，才能到达第一层的适配器。所以接下来该用检查点，加了检查点以后，这一步的峰值降到 170.1 MB。如果改为卸载状态，只能省 6.4 MB。
#
# </div>

# %% [markdown] slide={"en": "Llama 3 8B: 128 GB at 16 bytes per parameter.\n\n**Guess first.** A step of 4096 tokens in 80 GB? In 24?", "zh": "Llama 3 8B 每个参数 16 字节，一共 128 GB。\n\n**先猜**：4096 个 token 的一步，80 GB 装得下吗？24 GB 呢？"}
# ## 9.7 Larger, by configuration alone / 更大的模型，只凭配置
#
# <div lang="en">
#
# Take Llama 3 8B from its published configuration. The step has 4096 tokens and uses bf16, fp32 master weights and Adam. At 16 bytes per parameter, weights, gradients and optimizer state take 128 GB. **Guess first:** can the whole model be trained with the host's memory and one card of 80 GB? And with a card of 24 GB? One shell command answers this:
#
# ```
# python -m course_lib.budget --config llama_3_8b.json --sequence 4096 --batch 1 --device H100 --quick
# ```
#
# </div>
# <div lang="zh">
#
# 现在换成 Llama 3 8B，尺寸取自它公开的配置，序列长 4096 个 token，用 bf16、fp32 主权重和 Adam 训练。权重、梯度和优化器状态按每个参数 16 字节计算，一共 128 GB。**先猜**：用一块 80 GB 的卡，加上主机内存，能训练整个模型吗？换成 24 GB 的卡呢？在终端里运行一行命令，就能知道答案：
#
# ```
# COURSE_LANG=zh python -m course_lib.budget --config llama_3_8b.json --sequence 4096 --batch 1 --device H100 --quick
# ```
#
# </div>

# %% slide="code"
sizes = ["--config", exercises.LLAMA_3_8B, "--sequence", "4096", "--batch", "1"]
_ = budget_command([*sizes, "--device", "H100", "--quick"])

# %% [markdown] slide={"en": "**Guess first.** Llama 3 8B by QLoRA: how many bytes are the weights in NF4? The adapters of rank 8? Their gradients and state?", "zh": "**先猜**：用 QLoRA 训练 Llama 3 8B，NF4 的权重占多少字节？秩为 8 的适配器呢？适配器的梯度和状态呢？"}
# <div lang="en">
#
# The step's tensors take 49 GB, and two fifths of the card's memory stay free, because 96.4 GB of optimizer state are in host memory. On an RTX 4090 of 25.8 GB (24 GiB), the same command finds a recipe that offloads the activations, too. The tensors of this recipe take 22.4 GB, the allocator reserves 24.4 GB, and CUDA also takes memory, so 0.8 GB remain. With `--lora 8 --base nf4`, the command searches for recipes of QLoRA, which freezes the weights in 4 bits and trains adapters.
#
# **Exercise 3.** Write `qlora_bytes(config, rank)`. It predicts how many bytes stay in memory between steps when QLoRA trains a Llama.
#
# - The matrices of the layers are quantized to NF4: 4 bits per number, and one scale in fp32 for each block of 64 numbers. All other weights stay in bf16.
# - Each matrix of the layers has an adapter in fp32: two thin matrices of rank `rank`.
# - Only the adapters have gradients and Adam's moments, in fp32.
#
# </div>
# <div lang="zh">
#
# 这一步的张量要 49 GB，卡上的显存还剩五分之二，因为 96.4 GB 的优化器状态放在主机内存里。换成 25.8 GB 的 RTX 4090（24 GiB），同一条命令找到的配方还要卸载激活值。这时张量占 22.4 GB，分配器预留 24.4 GB，再扣除 CUDA 自己占用的显存，卡上只剩 0.8 GB。加上 `--lora 8 --base nf4`，这条命令就为 QLoRA 搜索配方。QLoRA 把权重量化成 4 位并冻结，只训练适配器。
#
# **练习 3。** 写出 `qlora_bytes(config, rank)`，预测用 QLoRA 训练一个 Llama 时，有多少字节从一步到下一步始终留在内存里。
#
# - 各层的矩阵量化成 NF4，每个数占 4 位，每 64 个数一块，每块有一个 fp32 的缩放系数。其余权重仍是 bf16。
# - 各层的每个矩阵都有一个 fp32 的适配器，也就是两个秩为 `rank` 的窄矩阵。
# - 只有适配器有梯度和 Adam 的矩，都是 fp32。
#
# </div>


# %% minutes=8
def qlora_bytes(config, rank):
    return {"frozen weights": None, "adapters": None, "gradients and state": None}


exercises.check_qlora_bytes(qlora_bytes)

# %% jupyter={"source_hidden": true} slide="code"
### BEGIN SOLUTION
if not exercises.check_qlora_bytes.accepted:

    def qlora_bytes(config, rank):
        hidden, width = config["hidden_size"], config["intermediate_size"]
        keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
        shapes = [(hidden, hidden), (keys, hidden)] * 2 + [(hidden, width)] * 3
        layers = config["num_hidden_layers"]
        matrices = layers * sum(m * n for m, n in shapes)
        adapters = layers * rank * sum(m + n for m, n in shapes)
        frozen = matrices * (1 / 2 + 4 / 64) + 2 * (parameters(config) - matrices)
        return {
            "frozen weights": frozen,
            "adapters": 4 * adapters,
            "gradients and state": 12 * adapters,
        }


exercises.check_qlora_bytes(qlora_bytes)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# How much memory do full training, LoRA and QLoRA need on an RTX 4090? Full training uses the recipe that the search command found. LoRA and QLoRA need no host memory:
#
# </div>
# <div lang="zh">
#
# 在 RTX 4090 上，全量训练、LoRA 和 QLoRA 各要多少内存？全量训练用的是上面那条命令找到的配方。另外两种训练方式完全不用主机内存：
#
# </div>

# %% slide="code"
below = {"offload_optimizer": 1.0, "offload_activations": True, "in_backward": True}
ways = {"full training, offloaded": (exercises.llama_8b, Recipe("bf16", attention=None, **below))}
for name, base in {"LoRA, bf16 weights": "bf16", "LoRA, nf4 weights": "nf4"}.items():
    make = with_adapters(exercises.llama_8b, 8, targets="all-linear", base=base)
    frozen = Recipe(precision=None, attention=None, checkpoint="layers", head_chunk=512)
    ways[name] = make, frozen

# %% slide="result"
large, tokens = {}, exercises.tokens_8b
for name, (make, way) in ways.items():
    large[name] = estimate(make, tokens, way, tier="host", kind="cuda")
figures.on_a_card(large)

# %% [markdown]
# <div lang="en">
#
# Full training keeps 96.4 GB of optimizer state in host memory, and during a step up to 42.4 GB of other offloaded data. So a host with 128 GB is too small. Full training also moves 84.9 GB per step. LoRA needs no host memory and moves no data. Its frozen weights have no gradients, moments or master weights, and with checkpoints, the activations fit on the card. With NF4 (QLoRA), the weights take 10.0 GB less than in bf16.
#
# A step fits if the memory that the allocator *reserves* and CUDA's own memory fit on the GPU together. CUDA leaves 25.3 GB of the card free, and full training reserves 24.4 GB of these. If LoRA in bf16 computes the whole output head at once, it has 23.8 GB of tensors, but the allocator reserves 25.9 GB, which do not fit. So LoRA and QLoRA compute the head in chunks of 512 tokens.
#
# </div>
# <div lang="zh">
#
# 全量训练有 96.4 GB 的优化器状态常驻主机内存，一步之中临时卸载的数据最多还要 42.4 GB，所以主机只有 128 GB 内存是不够的。全量训练每一步还要搬运 84.9 GB。LoRA 既不用主机内存，也不用搬运数据。这是因为冻结的权重没有梯度、矩和主权重，而激活值用检查点就能减到装得下。把权重换成 NF4（QLoRA），权重又少占 10.0 GB。
#
# 装不装得下，要看**已预留**的显存加上 CUDA 自己占用的显存是否超过整块卡的显存。扣除 CUDA 占用的部分，卡上还有 25.3 GB，全量训练就要预留 24.4 GB。bf16 的 LoRA 如果一次算完整个输出头，张量只占 23.8 GB，但分配器要预留 25.9 GB，因此装不下。所以 LoRA 和 QLoRA 的配方都把输出头分成小段计算，每段 512 个 token。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# No GPU ran these steps. Of 169 smaller steps on an H200, 158 took exactly the estimated bytes of tensors, and the others took up to 12 kB less. Reserved memory, compared in 21 steps, was between 11% less and 9% more than predicted (`docs/exact.md`). Steps with NF4 have not been compared on a GPU. With `--device this --check`, the search command checks a step on your GPU.
#
# How far was your prediction in exercise 3 from the estimate?
#
# </div>
# <div lang="zh">
#
# 这些训练步都没有在 GPU 上运行过。在 H200 上运行过 169 个较小的训练步，其中 158 个的张量所占的字节数与估计一字节不差，其余训练步的张量最多比估计少 12 kB。在 21 个训练步上还对照了已预留的显存，实测值最多比预测值少 11%，最多多 9%（`docs/exact.md`）。用 NF4 的训练步还没有在 GPU 上对照过。如果给搜索配方的命令加上 `--device this --check`，就能在你自己的 GPU 上验证。
#
# 你在练习 3 里的预测与估计相差多少？
#
# </div>

# %% slide="result"
frozen, adapters, _ = qlora_bytes(exercises.CONFIG_8B, 8).values()
counted = large["LoRA, nf4 weights"].at_peak["parameter"]
rows = [("frozen weights and adapters", (frozen or 0) + (adapters or 0), counted)]
table(["", "your prediction (bytes)", "estimate (bytes)"], rows)

# %% [markdown]
# <div lang="en">
#
# The sample solution of `qlora_bytes` gives 14,336 bytes less than the estimate, because each of the 224 quantized matrices also keeps the 16 values of NF4 in fp32. Weights and adapters take 6.1 GB of QLoRA's peak of 9.0 GB. The adapters with their gradients and state take 0.34 GB, so a rank of 16 would hardly change the peak.
#
# </div>
# <div lang="zh">
#
# `qlora_bytes` 参考答案的结果比估计值少 14,336 字节，因为共有 224 个量化的矩阵，每个矩阵还要用 fp32 存放 NF4 的 16 个取值。QLoRA 的峰值是 9.0 GB，其中权重和适配器占 6.1 GB。适配器连同梯度和状态一共只有 0.34 GB，所以这里把秩加到 16 也没有多大影响。
#
# </div>

# %% [markdown]
# ## 9.8 Claims and measurements / 说法与实测

# %% slide="result"
flash = estimate(make_llama, llama_batch, Recipe(checkpoint="layers", attention="flash"))
figures.claims_table(plain, found["checkpoints"], flash)

# %% [markdown]
# ## 9.9 The ledger / 账本
#
# <div lang="en">
#
# Each row of the course's ledger shows the same step of one decoder with a different technique:
#
# </div>
# <div lang="zh">
#
# 账本各行是同一个解码器的同一步，只是所用的技术不同。
#
# </div>

# %% slide="result"
whole_ledger()

# %% [markdown] slide={"en": "Look at what fills the peak, choose, prove it equal, measure.\n\nThe project asks the same of your own model.", "zh": "看峰值里什么最多，选技术，证明相等，再测量。\n\n在项目里，请这样分析你自己的模型。"}
# ## 9.10 Summary / 小结
#
# <div lang="en">
#
# - The peak of a Llama's step was predicted to the byte from nine lines of configuration. The peaks of a ViT and of LoRA were also predicted to the byte, on this CPU.
# - The largest part of the peak depends on the model: optimizer state for the small Llama, activations for the ViT and for LoRA. So the best technique to start with depends on the model, too.
# - A peak of 171.6 MB instead of 609.1 MB is a saving only if the trained weights are equal.
# - Full training of an 8B model on a card of 24 GB needs up to 138.8 GB of host memory. LoRA needs no host memory, and QLoRA takes 9.0 GB on the card.
# - Reserved memory must fit on the card, with room to spare.
#
# </div>
# <div lang="zh">
#
# - 只凭九行配置，就预测出了 Llama 一步的峰值，一个字节也不差。ViT 和 LoRA 的峰值也预测得一个字节不差（都在这个 CPU 上）。
# - 峰值里什么最多，因模型而异。小 Llama 的峰值里，最多的是优化器状态，ViT 和 LoRA 的峰值里，最多的是激活值。因此，最先该用的技术也不一样。
# - 先证明权重相等，才能说峰值从 609.1 MB 降到 171.6 MB 是真的省下了内存。
# - 在 24 GB 的卡上全量训练 8B 的模型，最多要用 138.8 GB 主机内存。LoRA 不用主机内存，QLoRA 在卡上只要 9.0 GB。
# - 判断装不装得下，要看已预留的显存，并且要留有余量。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **Sources.** Touvron et al. 2023, *LLaMA*, arXiv:2302.13971, and *The Llama 3 Herd of Models*, arXiv:2407.21783 (sizes). Dosovitskiy et al. 2020, *An Image is Worth 16x16 Words*, arXiv:2010.11929. Hu et al. 2021, *LoRA*, arXiv:2106.09685. Dettmers et al. 2023, *QLoRA*, arXiv:2305.14314. Documentation of transformers, peft and Accelerate (*Model memory estimator*).
#
# **Next.** The [project](10_your_model.ipynb) is about your own model. [Other models](../docs/models.md) shows for which models estimates were checked, which parts of a recipe Hugging Face's Trainer leaves out, and how much memory generating text needs.
#
# </div>
# <div lang="zh">
#
# **出处。** Touvron et al. 2023，*LLaMA*，arXiv:2302.13971，以及 *The Llama 3 Herd of Models*，arXiv:2407.21783（尺寸）。Dosovitskiy et al. 2020，*An Image is Worth 16x16 Words*，arXiv:2010.11929。Hu et al. 2021，*LoRA*，arXiv:2106.09685。Dettmers et al. 2023，*QLoRA*，arXiv:2305.14314。transformers、peft 和 Accelerate（*Model memory estimator*）的文档。
#
# **接下来。** [项目](10_your_model.ipynb)分析你自己的模型。我们还用哪些模型核对过估计，Hugging Face 的 Trainer 会略去配方里的哪些内容，生成文本要多少内存，这些都见[其他模型](../docs/models.zh.md)。
#
# </div>

# %% [markdown]
# ## In depth / 深入
#
# <div lang="en">
#
# This section is optional.
#
# </div>
# <div lang="zh">
#
# 这一节选读。
#
# </div>

# %% [markdown]
# ## 9.11 When prediction and run differ / 预测与实测不一致时
#
# <div lang="en">
#
# Batches with padding have an `attention_mask`. With its default attention (SDPA), the transformers library drops a mask whose values are all 1. With any other mask, attention saves different tensors. Here the prediction uses a batch without padding, and the run uses a batch with 40 padding tokens:
#
# </div>
# <div lang="zh">
#
# 有填充的批次带有 `attention_mask`。使用默认的注意力实现（SDPA）时，如果掩码全是 1，transformers 会丢掉这个掩码。如果掩码不全是 1，注意力保存的张量就不同。下面故意用没有填充的批次来预测，用有 40 个填充 token 的批次来运行。
#
# </div>


# %% slide="result"
from course_lib.lessons.lesson_10.slots import first_difference


def padded(count):
    batch = exercises.passages(0)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, mask.shape[1] - count :] = 0
    return {**batch, "attention_mask": mask}


guess = estimate(make_llama, lambda: padded(0), Recipe())
taken = run(make_llama, lambda: padded(40), Recipe())
first_difference(guess.trace(), taken.meter.trace())

# %% [markdown]
# <div lang="en">
#
# If the prediction also uses the padded batch, prediction and run agree, because estimates keep the values of small integer tensors.
#
# </div>
# <div lang="zh">
#
# 如果预测时也用有填充的批次，预测与实测就一致，因为估计时会保留较小的整数张量里的数值。
#
# </div>
