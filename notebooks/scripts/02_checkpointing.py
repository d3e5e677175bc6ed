# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 2 What if we forget activations and compute them again? / 把激活值忘掉，用时再算，会怎样？
#
# <div lang="en">
#
# Four decoder layers, 32 sequences of 64 tokens, 512 features: forward and backward peak at 302 MB. Checkpoint each layer and the peak is 101 MB. So far, so good. Now do the same with one layer: 88.1 MB without, 88.1 MB with.
#
# The same technique saves two thirds, and nothing. Why?
#
# </div>
# <div lang="zh">
#
# 四个解码器层，32 个 64 token 的序列，512 个特征：前向加反向的峰值是 302 MB。给每一层加上检查点，峰值变成 101 MB。到此一切顺利。现在对单独一层做同样的事：不用检查点 88.1 MB，用了还是 88.1 MB。
#
# 同一种技术，有时省下三分之二，有时什么也不省。为什么？
#
# </div>

# %%
from course_lib.teaching import language

language()

# %% [markdown]
# <div lang="en">
#
# **Goals** (90 minutes). Write both kinds of checkpoint from nothing. Say what each lacks, and see the library close each gap. Predict what a checkpointed network saves, and what it costs in FLOPs. Choose what to keep.
#
# **What to know before**: lesson 01. Saved tensors, storages, and the timeline of a step.
#
# </div>
# <div lang="zh">
#
# **目标**（90 分钟）：从零写出两种检查点；说出它们各缺什么，并看库怎样逐一补上；预测用检查点的网络能省多少字节、多花多少 FLOPs；学会选择保留什么。
#
# **预备知识**：第 01 课，即保存的张量、存储，以及一个训练步的时间线。
#
# </div>

# %%
import warnings

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from course_lib.checkpoint import checkpoint, checkpoint_sequential
from course_lib.memory import MemoryMeter, measure, saved_tensors, transformer_activation_bytes
from course_lib.models import Decoder, DecoderLayer, deep_mlp, random_tokens
from course_lib.teaching import compare, figure, predictions, table, text, timelines

# %% [markdown]
# ## 2.1 Watch it run / 看它怎样运行
#
# <div lang="en">
#
# Autograd keeps what backward will need. A checkpoint keeps the block's **input** only, and when backward arrives, runs the block's forward pass once more. A module that says when it runs makes this visible. **Guess first:** in which order do three checkpointed blocks run?
#
# </div>
# <div lang="zh">
#
# autograd 会留下反向要用的东西。检查点只留下这一块的**输入**，等反向到达时，把这一块的前向再跑一遍。让模块在运行时报一声，就能看见这个过程。**先猜**：三个用了检查点的块，会按什么次序运行？
#
# </div>


# %%
class Echo(nn.Module):
    def __init__(self, name, heard):
        super().__init__()
        self.name, self.heard, self.linear = name, heard, nn.Linear(4, 4)

    def forward(self, x):
        self.heard.append(f"forward {self.name}")
        return self.linear(x).tanh()


heard = []
y = torch.randn(2, 4, requires_grad=True)
for name in "abc":
    y = y * 1
    y.register_hook(lambda gradient, name=name: heard.append(f"backward {name} done"))
    y = checkpoint(Echo(name, heard), y, use_reentrant=False)
y.sum().backward()
" · ".join(heard)

# %% [markdown]
# <div lang="en">
#
# First the three forward passes. Then backward comes to c, runs its forward again, finishes it, and goes on to b. At any time at most one block's activations exist, besides the inputs.
#
# </div>
# <div lang="zh">
#
# 先是三次前向。然后反向走到 c，把它的前向再跑一遍，做完它的反向，再去 b。除了各块的输入，任何时刻至多只有一个块的激活值存在。
#
# </div>

# %% [markdown]
# ## 2.2 Reentrant, from nothing / 从零写可重入的检查点
#
# <div lang="en">
#
# The older way is a `torch.autograd.Function`: forward runs the block without recording a graph; backward runs it again with a graph and calls autograd inside autograd. That call is why it is named reentrant.
#
# </div>
# <div lang="zh">
#
# 较老的做法是写一个 `torch.autograd.Function`：前向时运行这个块而不记录计算图；反向时带着计算图再跑一遍，并在 autograd 里面调用 autograd。“可重入”一名由此而来。
#
# </div>


# %%
class Reentrant(torch.autograd.Function):
    @staticmethod
    def forward(context, function, x):
        context.function, context.x = function, x
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(context, gradient):
        x = context.x.detach().requires_grad_()
        with torch.enable_grad():
            output = context.function(x)
        torch.autograd.backward(output, gradient)  # autograd inside autograd
        return None, x.grad


# %% [markdown]
# ## 2.3 Non-reentrant, from nothing / 从零写非可重入的检查点
#
# <div lang="en">
#
# The newer way leaves the graph in place and replaces only what it holds. Saved-tensor hooks see every tensor that autograd wants to keep: **pack** keeps a number instead, and **unpack**, when backward asks, runs the block again and collects what that run saves, in the same order.
#
# </div>
# <div lang="zh">
#
# 较新的做法让计算图留在原处，只换掉它持有的东西。挂在“保存的张量”上的钩子能看到 autograd 想保存的每一个张量：**pack** 只留下一个编号；反向来取时，**unpack** 把这个块再跑一遍，按同样的次序收集这一遍所保存的张量。
#
# </div>


# %%
def nonreentrant(function, x):
    count, found = [0], []

    def pack(tensor):
        count[0] += 1
        return count[0] - 1

    def unpack(number):
        if not found:
            again = x.detach().requires_grad_(x.requires_grad)
            with torch.enable_grad(), saved_tensors_hooks(lambda t: found.append(t.detach()), lambda _: None):
                function(again)
        return found[number]

    with saved_tensors_hooks(pack, unpack):
        return function(x)


# %% [markdown]
# <div lang="en">
#
# Before any claim of saving: are the gradients equal, for the input and for every parameter?
#
# </div>
# <div lang="zh">
#
# 谈节省之前先问：输入和每个参数的梯度，都与不用检查点时相等吗？
#
# </div>

# %%
block = DecoderLayer(512, 8, norm_first=False)
x = torch.randn(4, 64, 512, requires_grad=True)


def gradients(run):
    block.zero_grad()
    x.grad = None
    run(block, x).square().mean().backward()
    return [x.grad, *(parameter.grad for parameter in block.parameters())]


# %%
def library(use_reentrant):
    return lambda *args, **options: checkpoint(*args, use_reentrant=use_reentrant, **options)


plain = gradients(lambda function, x: function(x))
runs = {"Reentrant": Reentrant.apply, "nonreentrant": nonreentrant}
runs |= {"library, reentrant": library(True), "library, non-reentrant": library(False)}
{name: all(map(torch.equal, plain, gradients(run))) for name, run in runs.items()}

# %% [markdown]
# ## 2.4 What it saves, and when it saves nothing / 省多少，何时什么也不省
#
# <div lang="en">
#
# Post-norm layers, as in 2017. Without checkpoints, each further layer adds all that it saves: the formula of lesson 01. With checkpoints it adds its input only, because in backward the layers come back one at a time: the peak holds $L$ inputs **and one whole layer**. For $L = 1$ nothing has been gained.
#
# Gradients exist from the start here, as in every step that doesn't drop them; else they arrive while inputs leave, and blur the picture.
#
# </div>
# <div lang="zh">
#
# 用 2017 年式的后归一化层。不用检查点时，每多一层，就增加它所保存的全部，即第 01 课的公式。用检查点时只增加它的输入，因为反向时各层是一次一层地回来的：峰值里有 $L$ 份输入，**外加完整的一层**。$L = 1$ 时什么也没赚到。
#
# 这里的梯度从一开始就在，就像不清掉梯度的训练步那样；否则一边释放输入，一边产生梯度，两者混在一起，峰值就不好解释了。
#
# </div>

# %%
batch = torch.randn(32, 64, 512)  # (b, s, h)


def stack_peak(depth, checkpointed):
    layers = nn.Sequential(*(DecoderLayer(512, 8, norm_first=False, seed=2 * i) for i in range(depth)))
    for parameter in layers.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def loss():
        y = batch
        for layer in layers:
            y = checkpoint(layer, y, use_reentrant=False) if checkpointed else layer(y)
        return y.square().mean()

    with MemoryMeter() as meter:
        loss().backward()
    return meter.peak_bytes


# %%
one_layer = transformer_activation_bytes(
    sequence=64, batch=32, hidden=512, heads=8, dtype_bytes=4, mask_bytes=0, statistic_bytes=4
)
rng_state = torch.get_rng_state().nbytes  # 5056 bytes, kept by each checkpoint for the second run
adds = {False: one_layer, True: 32 * 64 * 512 * 4 + rng_state}  # what a further layer adds
peaks = {(depth, kind): stack_peak(depth, kind) for depth in (1, 2, 4) for kind in adds}
names = {False: ("plain", "普通"), True: ("checkpointed", "检查点")}


def predicted(depth, kind):
    return None if depth == 1 else peaks[1, kind] + (depth - 1) * adds[kind]


predictions(
    [
        (tuple(f"{name} (L = {d})" for name in names[kind]), predicted(d, kind), peak)
        for (d, kind), peak in peaks.items()
    ]
)

# %% [markdown]
# <div lang="en">
#
# That was the riddle of the first paragraph. Checkpointing pays when there is something else to forget while one block is being worked on. Nor does it give "constant memory": one input a layer stays. What the graph of a decoder keeps after the forward pass, predicted from two layers on:
#
# </div>
# <div lang="zh">
#
# 这就是开头的谜底。处理一个块的时候，另有别的东西可以忘掉，检查点才划算。它也给不出“常数内存”：每层仍要留下一份输入。解码器在前向之后计算图里还留着多少，从两层起往上预测：
#
# </div>

# %%
tokens = random_tokens(batch=4, sequence=128, vocabulary=2048)
one_input = 4 * 128 * 256 * 4  # (b, s, h) in fp32


class Checkpointed(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)


# %%
def kept_bytes(depth):
    decoder = Decoder(vocabulary=2048, hidden=256, heads=8, layers=depth, sequence=128)
    decoder.layers = nn.ModuleList(Checkpointed(layer) for layer in decoder.layers)
    return saved_tensors(decoder.loss, tokens).total_bytes


kept = {depth: kept_bytes(depth) for depth in (2, 4, 8, 16)}
predictions([(f"L = {depth}", kept[2] + (depth - 2) * one_input, kept[depth]) for depth in (4, 8, 16)], unit="bytes")

# %% [markdown]
# ## 2.5 What to keep: five policies, one scale / 保留什么：五种策略，同一标尺
#
# <div lang="en">
#
# The same eight-layer decoder, five ways: plain; a checkpoint a layer; one for every two layers; **selective checkpointing**, which keeps the results of the linear layers' products and recomputes the rest; and one checkpoint around everything.
#
# </div>
# <div lang="zh">
#
# 同一个八层解码器，五种做法：普通；每层一个检查点；每两层一个；**选择性检查点**，保留线性层矩阵乘法的结果，其余的重计算；以及所有层合用一个检查点。
#
# </div>

# %%
from course_lib.checkpoint import create_selective_checkpoint_contexts

products = [torch.ops.aten.addmm.default]  # what nn.Linear calls


def keep_products():
    return create_selective_checkpoint_contexts(products)


def run_layers(policy, layers, x):
    if policy in ("plain", "layer", "selective"):
        groups = [[layer] for layer in layers]
    else:
        groups = [layers[i : i + 2] for i in range(0, 8, 2)] if policy == "two" else [layers]
    options = {"context_fn": keep_products} if policy == "selective" else {}
    for group in groups:
        part = nn.Sequential(*group)
        x = part(x) if policy == "plain" else checkpoint(part, x, use_reentrant=False, **options)
    return x


# %%
decoder = Decoder(vocabulary=2048, hidden=256, heads=8, layers=8, sequence=128)


def loss_with(policy):
    x = decoder.tokens(tokens[:, :-1]) + decoder.positions.weight  # (b, s, h)
    logits = decoder.head(decoder.norm(run_layers(policy, list(decoder.layers), x)))  # (b, s, v)
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def policy_gradients(policy):
    decoder.zero_grad()
    loss_with(policy).backward()
    return [parameter.grad for parameter in decoder.parameters()]


policies = {"plain": "普通", "layer": "每层", "two": "每两层", "selective": "选择性", "one for all": "整体一个"}
expected = policy_gradients("plain")
{policy: all(map(torch.equal, expected, policy_gradients(policy))) for policy in policies}

# %%
meters = {}
for policy, chinese in policies.items():
    decoder.zero_grad()
    with MemoryMeter(decoder) as meters[(policy, chinese)]:
        loss_with(policy).backward()
timelines(
    meters,
    title=(
        "Per layer or selective; one for all brings everything back at once",
        "每层，或选择性；整体一个则一下子全回来",
    ),
    panel_height=1.7,
)

# %%
arms = {
    (p, zh): measure(lambda p=p: loss_with(p).backward(), model=decoder, warmup=0, repeats=1)
    for p, zh in policies.items()
}
compare(arms)

# %% tags=["nbval-ignore-output", "shows-seconds"]
seconds = [
    (name, round(arm.seconds, 3), round(arm.seconds / arms["plain", "普通"].seconds, 2)) for name, arm in arms.items()
]
table(["", ("seconds", "秒"), ("of plain", "与普通之比")], seconds)

# %% [markdown]
# <div lang="en">
#
# Seconds depend on the machine; FLOPs don't, and they can be predicted. A layer's products, the last of them skipped by each checkpoint, attention's own two, and the head:
#
# </div>
# <div lang="zh">
#
# 秒数因机器而异，FLOPs 则不会，而且可以预测。要算的是：一层的乘法（每个检查点省去其中最后一次），注意力自己的两次乘法，以及输出头：
#
# </div>

# %%
rows = 4 * 128  # tokens in the batch
last_product = 2 * rows * 1024 * 256
attention = 2 * (2 * 4 * 128 * 128 * 256)
layer_flops = 2 * rows * 12 * 256**2 + attention
step_flops = 3 * (8 * layer_flops + 2 * rows * 256 * 2048)
again = {"plain": 0, "layer": 8 * (layer_flops - last_product), "two": 8 * layer_flops - 4 * last_product}
again |= {"selective": 8 * attention, "one for all": 8 * layer_flops - last_product}
flops_rows = [(name, step_flops + again[name[0]], arm.flops) for name, arm in arms.items()]
predictions(flops_rows, unit="FLOPs")

# %%
title = (
    "Per layer and selective are worth it; two and one for all lose on both axes",
    "每层与选择性值得；每两层与整体一个两头都输",
)
alt = (
    "Plain 22.5 GFLOPs and 125.1 MB; layer 27.4 and 65.9; two 28.5 and 73.2; selective 23.1 and 83.1; one for all 29.3 and 117.2.",
    "普通 22.5 GFLOPs、125.1 MB；每层 27.4、65.9；每两层 28.5、73.2；选择性 23.1、83.1；整体一个 29.3、117.2。",
)
drawn, ax = figure(title, height=3.2, alt=alt)
ax.set(xlabel="GFLOPs", xlim=(22, 30.5), ylim=(0, 140), ylabel=text("peak, MB", "峰值，MB"))
ax.grid(True, axis="x")
for (english, chinese), arm in arms.items():
    point = (arm.flops / 1e9, arm.peak_bytes / 1e6)
    ax.plot(*point, "o", color="#EE7733")
    ax.annotate(text(english, chinese), point, xytext=(7, 4), textcoords="offset points")

# %% [markdown]
# <div lang="en">
#
# Computing every layer once more is one more forward pass, a third of a step: not a doubling. It is a little less than that, because the head is not done again, and because recomputation stops once the last saved tensor is back, so each checkpoint skips its last product. Per layer: 1.21.
#
# Selective checkpointing keeps the results of the linear layers, and does only attention's two products again: 1.02, and it still saves 42 MB.
#
# Two layers together skip fewer last products and bring back twice as much: worse on both axes. One checkpoint around everything saves 8 MB: when backward starts, all eight layers come back at once.
#
# </div>
# <div lang="zh">
#
# 每一层都再算一遍，就是多一次前向，即一步的三分之一，并不是翻倍。实际还要少一点：输出头不用重做；而且取回最后一个保存的张量后，重计算就停下，每个检查点都省去最后一次乘法。每层一个检查点：1.21 倍。
#
# 选择性检查点留下线性层的结果，只重做注意力的两次乘法：1.02 倍，却仍省下 42 MB。
#
# 两层合用一个，省去的最后一次乘法更少，带回来的却多一倍：两头都输。整体只用一个检查点，只省 8 MB：反向一开始，八层的激活值就一起回来了。
#
# </div>

# %% [markdown]
# ## 2.6 What the tiny versions lack / 简易版缺什么
#
# <div lang="en">
#
# Fifteen lines give equal gradients on a friendly block. Now unfriendly ones. First randomness: with dropout, the second forward draws another mask, and the gradient belongs to a network that never ran. The test: where the output was dropped, the input's gradient must be zero, and nowhere else.
#
# </div>
# <div lang="zh">
#
# 十五行代码在听话的块上梯度相等。现在换不听话的块。首先是随机性：有 dropout 时，第二次前向抽到另一个掩码，算出的梯度属于一个从未运行过的网络。检验方法：输出被丢弃的地方，输入的梯度必须为零，别处都不为零。
#
# </div>


# %%
def same_mask(run, **options):
    x = torch.ones(1000, requires_grad=True)
    output = run(lambda x: F.dropout(x, 0.5), x, **options)
    output.sum().backward()
    return torch.equal(output == 0, x.grad == 0)


def same_autocast(run):
    seen, x, linear = [], torch.ones(2, 4, requires_grad=True), nn.Linear(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        output = run(lambda x: seen.append(linear(x).dtype) or linear(x).tanh(), x)
    output.float().sum().backward()
    return len(seen) == 2 and set(seen) == {torch.bfloat16}


# %%
def only_the_gradient_asked_for(run):
    x, weight = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    (slope,) = torch.autograd.grad(run(lambda x: (x * weight).exp().sum(), x), x)
    return torch.equal(slope, torch.ones(3).exp()) and weight.grad is None


def notices(first, second):
    def test(run):
        functions = iter((first, second, second))
        x = torch.ones(4, requires_grad=True)
        try:
            run(lambda x: next(functions)(x), x).sum().backward()
        except Exception:
            return True
        return False

    return test


# %%
def outcome(test, run):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return "yes" if test(run) else "no"
        except Exception:
            return "error"


# %%
tests = {
    ("same dropout mask", "dropout 掩码相同"): same_mask,
    ("same autocast", "autocast 相同"): same_autocast,
    ("`autograd.grad` touches nothing else", "`autograd.grad` 不碰别的梯度"): only_the_gradient_asked_for,
    ("notices another output shape", "能发现输出形状变了"): notices(torch.exp, lambda x: x[:2].exp()),
    ("notices another saved shape", "能发现所存形状变了"): notices(
        lambda x: x.exp().sum(), lambda x: x[:2].exp().sum()
    ),
    ("notices other values", "能发现数值变了"): notices(torch.exp, lambda x: (3 * x).exp()),
}
rows = [(name, *(outcome(test, run) for run in runs.values())) for name, test in tests.items()]
table([("does it", "能否做到"), *runs], rows)

# %% [markdown]
# <div lang="en">
#
# The library saves and restores the random number generators and autocast in both modes (`preserve_rng_state=False` gives that up, for speed). Asked for one gradient, the tiny reentrant version quietly adds to the weights' gradients as well; the library refuses.
#
# The last row is "no" for all: nobody compares values. A block must compute the same thing twice. Where shapes tell, the library says what was saved and what came back:
#
# </div>
# <div lang="zh">
#
# 库在两种模式下都会保存并恢复随机数发生器和 autocast（`preserve_rng_state=False` 会放弃这一点，换取速度）。只要一个梯度时，简易的可重入版会悄悄地往权重的梯度里也加上一份，库则会拒绝。
#
# 最后一行全是 “no”：谁也不比较数值。一个块必须两次都算出同样的东西。凡是形状看得出来的，库会说明当初保存了什么、回来的又是什么：
#
# </div>

# %%
from course_lib.checkpoint import CheckpointError

lengths = iter((4, 2))
x = torch.ones(4, requires_grad=True)
try:
    checkpoint(lambda x: x[: next(lengths)].exp().sum(), x, use_reentrant=False).backward()
except CheckpointError as error:
    print(str(error).splitlines()[0], *str(error).splitlines()[2:5], sep="\n")

# %%
outcome(same_mask, lambda function, x: checkpoint(function, x, use_reentrant=False, preserve_rng_state=False))

# %% [markdown]
# ## 2.7 Reentrant or not: a table of experiments / 可重入与否：一张由实验填成的表
#
# <div lang="en">
#
# Many texts call the reentrant mode "more compatible". Each row below is an experiment: "yes" means that the function ran twice, and that the gradient equals the one without a checkpoint.
#
# </div>
# <div lang="zh">
#
# 许多文章说可重入模式“兼容性更好”。下表每一行都是一个实验：“yes” 表示函数运行了两次，并且梯度与不用检查点时相等。
#
# </div>


# %%
def input_without_gradient(c, x, weight):
    c(lambda x: (x * weight).exp(), torch.ones(3)).sum().backward()
    return weight.grad


def keyword_arguments(c, x, weight):
    c(lambda x, scale: (x * scale * weight).exp(), x, scale=weight).sum().backward()
    return weight.grad


def tensors_in_a_list_only(c, x, weight):
    c(lambda pair: (pair[0] * pair[1]).exp(), [x, weight]).sum().backward()
    return x.grad


def some_inputs_only(c, x, weight):
    c(lambda x: (x * weight).exp(), x).sum().backward(inputs=[x])
    return x.grad


# %%
def second_derivative(c, x, weight):
    c(lambda x: (x * weight) ** 3, x).sum().backward(create_graph=True)
    return torch.autograd.grad(x.grad.sum(), x)[0]


def backward_twice(c, x, weight):
    loss = c(lambda x: (x * weight).exp(), x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return x.grad


def nested(c, x, weight):
    c(lambda x: c(lambda y: (y * weight).exp(), x.sin()), x).sum().backward()
    return weight.grad


def transforms_inside(c, x, weight):
    slope = torch.func.grad(lambda z: z.sin().sum())
    c(lambda x: (x * slope(x.detach())).exp(), x).sum().backward()
    return x.grad


# %%
def works(case):
    def test(mode):
        calls = []

        def counted(function, *args, **options):
            return mode(lambda *a, **o: (calls.append(1), function(*a, **o))[1], *args, **options)

        def fresh():
            return torch.tensor([0.5, 1.0, 2.0], requires_grad=True), nn.Parameter(torch.ones(3))

        expected = case(lambda function, *args, **options: function(*args, **options), *fresh())
        return torch.equal(case(counted, *fresh()), expected) and len(calls) >= 2

    return test


# %%
cases = {
    ("input needs no gradient", "输入不需要梯度"): input_without_gradient,
    ("keyword arguments", "关键字参数"): keyword_arguments,
    ("tensors only in a list", "张量只在列表里"): tensors_in_a_list_only,
    ("`backward(inputs=...)`", "`backward(inputs=...)`"): some_inputs_only,
    ("second derivative", "二阶导数"): second_derivative,
    ("backward twice", "反向两次"): backward_twice,
    ("checkpoint in checkpoint", "检查点里套检查点"): nested,
    ("`torch.func.grad` inside", "内部用 `torch.func.grad`"): transforms_inside,
}
modes = [library(True), library(False)]
answers = [(name, *(outcome(works(case), mode) for mode in modes)) for name, case in cases.items()]
table([("does it work", "能否工作"), ("reentrant", "可重入"), ("non-reentrant", "非可重入")], answers)

# %% [markdown]
# <div lang="en">
#
# The reentrant mode has one row of its own: functions that forbid saved-tensor hooks, such as `torch.func.grad`, run inside it. Five rows go to the non-reentrant mode alone, which is why this library uses it when you don't choose. It is cheaper, too: only the non-reentrant mode stops early.
#
# </div>
# <div lang="zh">
#
# 可重入模式只在一行上胜出：禁止给保存的张量挂钩子的函数，例如 `torch.func.grad`，可以在它里面运行。有五行只有非可重入模式做得到，所以你不指定时，本库就用它。它也更便宜：只有非可重入模式会提早停下。
#
# </div>


# %%
def last_steps(mode):
    ends = []
    mode(lambda x: (x.exp().mul(2), ends.append("end"))[0], torch.ones(3, requires_grad=True)).sum().backward()
    return len(ends)  # how often the function came to its end, in two runs


[last_steps(mode) for mode in modes]

# %% [markdown]
# ## 2.8 BatchNorm counts twice / BatchNorm 会统计两次
#
# <div lang="en">
#
# A block that changes a buffer in its forward pass changes it twice. BatchNorm's running statistics then move two steps for one batch. The remedy is a context for the recomputation in which they stand still.
#
# </div>
# <div lang="zh">
#
# 一个块若在前向里改动缓冲区，用了检查点就会改动两次。于是，同一个批次让 BatchNorm 的滑动统计量走了两步。补救办法是让重计算在一个使统计量保持不动的上下文里进行。
#
# </div>

# %%
from contextlib import contextmanager, nullcontext


@contextmanager
def standing_still(norm):
    momentum, count = norm.momentum, norm.num_batches_tracked.clone()
    norm.momentum = 0.0
    try:
        yield
    finally:
        norm.momentum = momentum
        norm.num_batches_tracked.copy_(count)


def statistics(run):
    norm, images = nn.BatchNorm1d(4), torch.linspace(1, 2, 32).view(8, 4).requires_grad_()
    run(norm, images).exp().sum().backward()
    return round(float((norm.running_mean / images.detach().mean(0)).mean()), 3), int(norm.num_batches_tracked)


# %%
def with_remedy(norm, x):
    return checkpoint(norm, x, use_reentrant=False, context_fn=lambda: (nullcontext(), standing_still(norm)))


ways = {
    ("plain", "普通"): lambda norm, x: norm(x),
    ("checkpointed", "检查点"): library(False),
    ("with the remedy", "加补救"): with_remedy,
}
headings = ["", ("running mean, in means of the batch", "滑动均值，以批次均值计"), ("batches counted", "计入的批次数")]
table(headings, [(name, *statistics(run)) for name, run in ways.items()])

# %% [markdown]
# ## 2.9 The loss head, in pieces / 把输出头连同损失拆开
#
# <div lang="en">
#
# Lesson 01 found three tensors of the size of the logits at the peak. The head with its loss is a block like any other: cut the tokens into chunks, checkpoint each, and the logits never exist whole. Take 1024 tokens, 256 features, a vocabulary of 32,000: logits are $1024 \cdot 32000 \cdot 4$ bytes, 131 MB.
#
# **Guess first:** the plain head peaks at three of them, 393 MB. At what does it peak in chunks of 128 tokens? And of 32?
#
# </div>
# <div lang="zh">
#
# 第 01 课发现，峰值时刻有三个 logits 大小的张量。输出头连同损失也是一个块：把 token 切成小块，每块加检查点，完整的 logits 就从不出现。取 1024 个 token、256 个特征、词表 32,000：logits 占 $1024 \cdot 32000 \cdot 4$ 字节，即 131 MB。
#
# **先猜**：普通做法的峰值是三份 logits，393 MB。每块 128 个 token 时峰值是多少？32 个呢？
#
# </div>

# %%
from course_lib.checkpoint import checkpointed_loss

hidden = torch.randn(1024, 256, requires_grad=True)  # (tokens, h)
vocabulary = nn.Parameter(torch.randn(32000, 256) * 0.02)  # (v, h)
targets = torch.randint(32000, (1024,))
heads = {1024: lambda: F.cross_entropy(hidden @ vocabulary.T, targets)}
heads |= {n: lambda n=n: checkpointed_loss(hidden, vocabulary, targets, chunk=n) for n in (512, 128, 32)}


def head_peak(loss):
    hidden.grad = vocabulary.grad = None
    with MemoryMeter() as meter:
        loss().backward()
    return meter.peak_bytes, (hidden.grad, vocabulary.grad)


# %%
results = {chunk: head_peak(loss) for chunk, loss in heads.items()}
of_vocabulary, of_hidden = vocabulary.nbytes, hidden.nbytes  # a gradient is as large as what it belongs to


def predicted_peak(chunk):
    logits = chunk * 32000 * 4
    return 3 * logits if chunk == 1024 else of_hidden + max(3 * logits + of_vocabulary, 3 * of_vocabulary)


names = {1024: ("plain", "普通")} | {n: (f"chunks of {n}", f"每块 {n} 个") for n in (512, 128, 32)}
predictions([(names[chunk], predicted_peak(chunk), peak) for chunk, (peak, _) in results.items()])

# %%
(_, reference), *others = results.values()
all(torch.allclose(a, b, rtol=1e-4, atol=1e-8) for _, found in others for a, b in zip(reference, found, strict=True))

# %% [markdown]
# <div lang="en">
#
# The gradients are equal up to rounding. Below some chunk size nothing more is gained: the floor is the gradient of the vocabulary's matrix, 33 MB, three times: what has been added up, what is to be added, and their sum. No chunk gets below these 98 MB. The price is one more product of `hidden` and the vocabulary.
#
# </div>
# <div lang="zh">
#
# 梯度在舍入误差之内相等。小到一定程度，再切也省不了：下限是词表矩阵的梯度，33 MB，共三份：已经加好的、正要加上的，以及两者之和。怎么切也低不过这 98 MB。代价是 `hidden` 与词表多乘一次。
#
# </div>

# %% [markdown]
# ## 2.10 Longer sequences / 更长的序列
#
# <div lang="en">
#
# An attention layer saves P, which grows with $s^2$; checkpointed, it saves its input. Three passes through one attention layer with shared weights: equal outputs, and the saving grows with the square once P is the larger part. At the peak one pass is there in full, with checkpoints or without. Saved is what the other two would hold, $2 (5 s b h + a s^2 b)$ elements (lesson 01), less their two inputs, which stay.
#
# </div>
# <div lang="zh">
#
# 注意力层要保存随 $s^2$ 增长的 P；用检查点时只保存输入。让同一个注意力层（共享权重）连做三遍：输出相等；P 占大头之后，省下的随平方增长。用不用检查点，峰值时都有一遍是完整的；省下的是另外两遍原本要保存的 $2 (5 s b h + a s^2 b)$ 个元素（第 01 课），减去仍要留下的两份输入。
#
# </div>

# %%
from course_lib.models import Attention

attention_layer = Attention(256, 8)


def three_passes(run, length):
    y = torch.linspace(-1, 1, length * 256).view(1, length, 256)
    with MemoryMeter() as meter:
        for _ in range(3):
            y = run(attention_layer, y)
        y.sum().backward()
    return meter.peak_bytes, y


# %%
rows, equal = [], []
for length in (256, 512, 1024):
    (peak, output), (lower, same) = (three_passes(run, length) for run in (lambda f, y: f(y), library(False)))
    predicted = 4 * 2 * (5 * length * 256 + 8 * length**2 - length * 256)
    rows.append((tuple(f"{length} {word}" for word in ("tokens", "个 token")), predicted, peak - lower))
    equal.append(torch.equal(output, same))
print(equal)
predictions(rows)

# %% [markdown]
# <div lang="en">
#
# At 256 and 512 tokens the formula promises too much. There the checkpointed peak comes one pass later: backward begins with the third pass, and when it reaches the second, the weight gradients of the third already lie there. The formula leaves them out, and they don't grow with $s$.
#
# </div>
# <div lang="zh">
#
# 256 和 512 个 token 时，公式许诺得多了些。这时检查点做法的峰值要晚一遍才到：反向从第三遍开始，轮到第二遍时，第三遍的权重梯度已经在那里了。公式没有计入它们，而它们并不随 $s$ 增长。
#
# </div>

# %% [markdown]
# ## 2.11 A training loop with a log, and a Sequential in segments / 带日志的训练循环，以及分段的 Sequential
#
# <div lang="en">
#
# Everything together: post-norm layers under checkpoints, Adam, a mean squared error, and a log that names file, function and line. The losses with and without checkpoints agree to the last bit. And for a plain `nn.Sequential` there is `checkpoint_sequential`: how many segments are best is the question of lesson 03.
#
# </div>
# <div lang="zh">
#
# 全部合在一起：加了检查点的后归一化层、Adam、均方误差，以及一份注明文件、函数和行号的日志。用与不用检查点，损失逐位一致。对普通的 `nn.Sequential`，还有 `checkpoint_sequential`：分几段最好，是第 03 课的问题。
#
# </div>

# %%
import io
import logging

log = io.StringIO()
place = "%(filename)s, %(funcName)s, line %(lineno)d"
logging.basicConfig(stream=log, level=logging.INFO, format=f"{place}: %(message)s", force=True)


def forward(layers, x, run):
    for layer in layers:
        x = run(layer, x)
    return x


# %%
def train(run, steps=3):
    layers = nn.ModuleList(DecoderLayer(64, 4, norm_first=False, seed=2 * i) for i in range(3))
    adam, x, losses = torch.optim.Adam(layers.parameters()), torch.linspace(-1, 1, 2 * 16 * 64).view(2, 16, 64), []
    for step in range(steps):
        loss = F.mse_loss(forward(layers, x, run), x.flip(1))
        loss.backward()
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
        logging.info("step %d: loss %.3f", step + 1, loss.item())
    return losses


same_losses = train(lambda layer, x: layer(x)) == train(library(False))
same_losses

# %%
[line.partition(", ")[2] for line in log.getvalue().splitlines()[-3:]]  # without the file, which here is a number

# %%
network = deep_mlp(depth=16, width=256)
images = torch.randn(512, 256)
ways = {("plain", "普通"): lambda: network(images)}
ways |= {
    (f"{k} segments", f"{k} 段"): lambda k=k: checkpoint_sequential(network, k, images, use_reentrant=False)
    for k in (2, 4, 8)
}
rows = []
for name, forward_pass in ways.items():
    network.zero_grad()
    with MemoryMeter(network) as mlp_meter:
        forward_pass().square().mean().backward()
    rows.append((name, round(mlp_meter.peak_bytes / 1e6, 1)))
table([("16 × (Linear + GELU)", "16 ×（Linear + GELU）"), ("peak, MB", "峰值，MB")], rows)

# %% [markdown]
# ## 2.12 What you may have read / 你可能读到过的说法
#
# <div lang="en">
#
# Six claims. For the last two: a network of six Linear layers with activations between them, in three segments.
#
# </div>
# <div lang="zh">
#
# 六条说法。最后两条用的网络有六个 Linear 层，层间是激活函数，分成三段。
#
# </div>

# %%
network = deep_mlp(depth=6, width=16)
data = torch.randn(4, 16)
linears = [module for module in network if isinstance(module, nn.Linear)]
skipped = checkpoint_sequential(linears, 3, data, use_reentrant=False)
equal_outputs = int((skipped == network(data)).sum())

network.zero_grad()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    checkpoint_sequential(network, 3, data, use_reentrant=True).sum().backward()
trained = sum(linear.weight.grad is not None for linear in linears)

# %%
branches = iter((torch.sin, torch.sin, torch.cos, torch.cos))


def branching(x):
    return next(branches)(x) * x


dynamic = []
for function in (torch.sin, torch.cos):
    x = torch.linspace(0, 1, 5).requires_grad_()
    (by_checkpoint,) = torch.autograd.grad(checkpoint(branching, x, use_reentrant=False).sum(), x)
    dynamic.append(torch.equal(by_checkpoint, torch.autograd.grad((function(x) * x).sum(), x)[0]))
score = [sum(row[column] == "yes" for row in answers) for column in (1, 2)]

# %%
from course_lib.lessons import what_you_may_have_read

what_you_may_have_read(
    "02",
    " / ".join(f"{peaks[depth, False] / 1e6:.1f} → {peaks[depth, True] / 1e6:.1f} MB" for depth in (1, 4)),
    f"L = 4: {kept[4] / 1e6:.1f} MB; L = 16: {kept[16] / 1e6:.1f} MB",
    (f"equal gradients in {sum(dynamic)} of {len(dynamic)} steps", f"{len(dynamic)} 步中有 {sum(dynamic)} 步梯度相等"),
    f"{score[0]} : {score[1]}",
    (f"{equal_outputs} of {skipped.numel()} numbers are equal", f"{skipped.numel()} 个数中有 {equal_outputs} 个相等"),
    f"{trained} / 6",
)

# %% [markdown]
# ## 2.13 On a GPU / 在 GPU 上
#
# <div lang="en">
#
# The same code runs on CUDA, where the state of every device's random number generator is kept as well. If you have a GPU, this cell measures now.
#
# </div>
# <div lang="zh">
#
# 同样的代码可以在 CUDA 上运行，并会保存每个设备的随机数发生器状态。有 GPU 时，这个单元格会现场测量。
#
# </div>

# %% tags=["nbval-ignore-output", "shows-device"]
from course_lib.lessons import on_gpu

on_gpu("02")

# %% [markdown]
# ## 2.14 Exercises / 练习
#
# <div lang="en">
#
# **Exercise 1.** Write `my_checkpoint(function, x)` in twelve lines, your own way. The check compares gradients, counts runs, and looks at what is saved.
#
# </div>
# <div lang="zh">
#
# **练习 1。** 用自己的办法，在十二行之内写出 `my_checkpoint(function, x)`。检查程序会比较梯度、数运行次数，并看保存了什么。
#
# </div>

# %%
from course_lib.lessons.lesson_02 import check_checkpoint, check_dropout_checkpoint, check_head_chunk, check_policy


def my_checkpoint(function, x):
    return function(x)


check_checkpoint(my_checkpoint)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
check_checkpoint(Reentrant.apply)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# **Exercise 2.** Make it right for a block with dropout: the second run must draw the same mask, and the random numbers after it must be as if it had not happened.
#
# </div>
# <div lang="zh">
#
# **练习 2。** 让它对带 dropout 的块也正确：第二次运行要抽到同样的掩码，并且之后的随机数要与没有这次运行时一样。
#
# </div>

# %%
check_dropout_checkpoint(my_checkpoint)


# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
def careful_checkpoint(function, x):
    state = torch.get_rng_state()

    def with_old_numbers(x):
        with torch.random.fork_rng(enabled=torch.is_grad_enabled()):
            if torch.is_grad_enabled():  # the second run
                torch.set_rng_state(state)
            return function(x)

    return Reentrant.apply(with_old_numbers, x)


check_dropout_checkpoint(careful_checkpoint)
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# **Exercise 3.** The decoder of section 2.5 may peak at 70 MB, forward and backward, and may do at most 1.2 times the plain FLOPs. Which operators must a selective policy keep? Give a list, such as `[torch.ops.aten.gelu.default]`.
#
# </div>
# <div lang="zh">
#
# **练习 3。** 2.5 节的解码器，前向加反向的峰值不得超过 70 MB，FLOPs 不得超过普通做法的 1.2 倍。选择性策略必须保留哪些算子？给出一个列表，例如 `[torch.ops.aten.gelu.default]`。
#
# </div>

# %%
operators = None
check_policy(operators)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
check_policy([torch.ops.aten.bmm.default])
### END SOLUTION

# %% [markdown]
# <div lang="en">
#
# **Exercise 4.** The head of section 2.9 may peak at 150 MB. What is the largest chunk, if it is a power of 2?
#
# </div>
# <div lang="zh">
#
# **练习 4。** 2.9 节的损失头，峰值不得超过 150 MB。每块最多可以有多少个 token（取 2 的幂）？
#
# </div>

# %%
answer = None  # tokens
check_head_chunk(answer)

# %% jupyter={"source_hidden": true}
### BEGIN SOLUTION
chunks = [64, 128, 256, 512, 1024]
peaks = [head_peak(lambda n=n: checkpointed_loss(hidden, vocabulary, targets, chunk=n))[0] for n in chunks]
check_head_chunk(max(n for n, peak in zip(chunks, peaks, strict=True) if peak <= 150_000_000))
### END SOLUTION

# %% [markdown]
# ## 2.15 Summary / 小结
#
# <div lang="en">
#
# - A checkpoint keeps a block's input, and its saved tensors come back in backward: the peak holds every input and one whole block.
# - It costs one more forward pass, at most a third of a step; selective checkpointing keeps the products and costs next to nothing.
# - Neither one block nor one checkpoint around everything saves much.
# - Randomness, autocast and changed buffers must be taken care of; prefer the non-reentrant mode.
# - The loss head is a block too, and often the largest.
#
# **Next:** [lesson 03](03_sqrt_schedule.ipynb) asks which blocks to forget.
#
# </div>
# <div lang="zh">
#
# - 检查点只留下一个块的输入，块里保存的张量在反向时又回来：峰值里有每一块的输入和完整的一块。
# - 代价是多一次前向，至多一步的三分之一；选择性检查点留下线性层的乘积，几乎没有代价。
# - 只有一个块，或者整体只用一个检查点，都省不了多少。
# - 随机性、autocast 和被改动的缓冲区要小心处理；优先用非可重入模式。
# - 损失头也是一个块，而且常常是最大的一块。
#
# **下一步**：[第 03 课](03_sqrt_schedule.ipynb)讨论该忘掉哪些块。
#
# </div>

# %% [markdown]
# <div lang="en">
#
# **Sources.** Chen et al. 2016, *Training Deep Nets with Sublinear Memory Cost*, arXiv:1604.06174. Korthikanti et al. 2022, *Reducing Activation Recomputation in Large Transformer Models*, arXiv:2205.05198 (selective recomputation). PyTorch documentation of `torch.utils.checkpoint`.
#
# </div>
# <div lang="zh">
#
# **出处。** Chen et al. 2016，*Training Deep Nets with Sublinear Memory Cost*，arXiv:1604.06174。Korthikanti et al. 2022，*Reducing Activation Recomputation in Large Transformer Models*，arXiv:2205.05198（选择性重计算）。PyTorch 文档中的 `torch.utils.checkpoint`。
#
# </div>
