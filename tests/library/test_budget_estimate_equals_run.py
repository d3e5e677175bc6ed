"""Estimates equal runs, whose bytes and FLOPs the meter counts, for many models and recipes."""

from dataclasses import replace
from functools import partial

import pytest
import third_party_models as foreign
import torch
from estimate_checks import assert_measured, feasible
from hugging_face_models import ARCHITECTURES, LLAMA, PAIR, SHARED, SPECIAL, T5, maker, padded, text
from image_models import BODIES, Image, images
from test_budget_combinations import MODELS, OPTION_PAIRS, TABLE
from test_configs import GPT_2, LLAMA_3_8B, MIXTRAL, QWEN_3_8B, QWEN_25_HALF_B, small
from third_party_models import sentences
from torch import nn

from course_lib.budget import Recipe
from course_lib.budget.search.extrapolation import MANY
from course_lib.configs import model_from
from course_lib.memory import cast
from course_lib.models import Decoder, random_tokens

SMALL = {"offload_activations": True, "min_bytes": 256}
DOWN = {"offload_activations": True, "min_bytes": 1000}
LAYERS = Recipe(checkpoint="layers")
SEGMENTS = Recipe(checkpoint="segments", segments=2)
OPTIMAL = Recipe(checkpoint="optimal", schedule_bytes=1)  # `feasible` gives more
BF16 = Recipe(precision="bf16")


# ---- models


class Critic(nn.Module):
    """Model with a gradient penalty, which needs second derivatives. Its loss is a mean."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))
        )

    def loss(self, x):
        x = x.detach().requires_grad_()
        scores = self.layers(x).sum(1)
        (gradient,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        return scores.mean() + (gradient.norm(dim=1) - 1).square().mean()


class Graph(nn.Module):
    """Graph network that removes edges from a node to itself."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, edges):
            edges = edges[:, (edges[0] != edges[1]).nonzero().flatten()]
            return x.index_add(0, edges[1], self.linear(x)[edges[0]].tanh())

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(3))

    def loss_sum(self, batch):
        x = batch["x"]
        for layer in self.layers:
            x = layer(x, batch["edges"].t())
        return x.square().sum(), len(x)


def graph():
    ends = torch.arange(20)
    return {"x": torch.randn(20, 8), "edges": torch.stack([ends, ends // 2 * 2], 1)}


class Tables(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        for dtype in (torch.bfloat16, torch.float64, torch.int64):
            self.register_buffer(
                f"of_{dtype.itemsize}_{dtype.is_floating_point}", torch.zeros(5000, dtype=dtype)
            )

    def loss_sum(self, x):
        return self(x).square().sum(), len(x)


def decoder_in_bf16():
    return cast(foreign.Decoder(), torch.bfloat16)


# ---- the table: models and their batches, and the recipes in which they are run

tokens, four = partial(random_tokens, 5, 12, 67), partial(random_tokens, 4, 32, 97)
deep = partial(Decoder, vocabulary=67, hidden=16, heads=2, layers=MANY + 2, sequence=12)
large = partial(Decoder, vocabulary=16000, hidden=512, heads=8, layers=2, sequence=64)
large_batch = partial(random_tokens, 2, 64, 16000)
answered = partial(text, answer=12)
transformer = partial(foreign.Translator, foreign.causal_mask)
EAGER = {"attn_implementation": "eager"}
BART = partial(maker, "Bart:BartForConditionalGeneration", **{**PAIR, **SPECIAL})
CHUNKED = Recipe(precision="bf16", attention="flash", checkpoint="selective", head_chunk=16)
PAGED = Recipe(in_backward=True, offload_optimizer=1.0)
HEAD = Recipe(checkpoint="layers", head_chunk=16, micro_batches=2)
FLASH = [Recipe(attention="flash"), Recipe(attention="flash", in_backward=True)]
UNTIED = {**QWEN_25_HALF_B, "tie_word_embeddings": False}  # as the larger Qwen2.5
CONFIGS = [(LLAMA_3_8B, [CHUNKED]), (UNTIED, [PAGED]), (QWEN_3_8B, [CHUNKED])]
CONFIGS += [(GPT_2, [PAGED]), (MIXTRAL, [CHUNKED, PAGED])]
NORMALIZED = [Recipe(), Recipe(checkpoint="segments", segments=4, in_backward=True)]
TWO, FOUR = replace(SEGMENTS, micro_batches=2), replace(SEGMENTS, micro_batches=4)
# Two recipes for each architecture, in turn; `OPTION_PAIRS` has every pair of techniques.
IN_TURN = [
    [Recipe(), TWO],
    [Recipe("bf16", in_backward=True), replace(OPTIMAL, optimizer="sgd", in_backward=True)],
    [Recipe(optimizer="sgd", micro_batches=2), TWO],
    [Recipe(offload_optimizer=1.0, offload_activations=True, min_bytes=512), OPTIMAL],
    [Recipe("bf16", checkpoint="layers", head_chunk=8), TWO],
]
NO_CHAIN = [Recipe(offload_optimizer=1.0, **SMALL), Recipe("bf16", checkpoint="layers")]


def checkpointing(use_reentrant):
    model = LLAMA()
    # transformers 5.17 has only the older name
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": use_reentrant})
    return model.train()


def of_architecture(i, name):
    return NO_CHAIN if name.startswith("encoder and decoder") else IN_TURN[i % len(IN_TURN)]


ROWS = {
    # The loss is a mean, and the backward of its penalty runs in the forward pass.
    "gradient penalty": (
        *(Critic, partial(torch.ones, 8, 16)),
        [
            Recipe(precision="bf16", offload_optimizer=1.0, in_backward=True),
            *(Recipe(**SMALL), Recipe(**SMALL, prefetch=0, in_flight=2)),
            *(Recipe(**SMALL, prefetch=3), LAYERS, replace(LAYERS, **SMALL)),
        ],
    ),
    # The values of indices, which are checkpointed and copied, decide the sizes of other tensors.
    "graph": (Graph, graph, [LAYERS, replace(LAYERS, offload_activations=True, min_bytes=8)]),
    # `cast` converts some of the buffers.
    "buffers": (Tables, partial(torch.randn, 6, 8), [Recipe(), BF16]),
    # A model in bf16 has no master weights if the precision is None.
    "made in bf16": (decoder_in_bf16, sentences, [Recipe(precision=None), BF16]),
    # Segments keep the states of random generators.
    "dropout modules": (partial(foreign.Encoder, dropout=0.2), sentences, [SEGMENTS]),
    "dropout functions": (partial(foreign.Decoder, dropout=0.2), sentences, [SEGMENTS]),
    "fused": (partial(deep, layers=2, dropout=0.1, fused=True), tokens, [Recipe(attention=None)]),
    # Blocks change their buffers, which are restored before a recomputation.
    "spectral norm": (partial(foreign.averaged, "spectral norm"), foreign.point, NORMALIZED),
    "average": (partial(foreign.averaged, "average"), foreign.point, NORMALIZED),
    "batch norm": (
        *(partial(foreign.averaged, "batch norm"), foreign.point),
        [*NORMALIZED, LAYERS, Recipe(checkpoint="selective")],
    ),
    # PyTorch's transformer compares its mask with a causal one.
    "transformer": (transformer, partial(torch.randn, 2, 6, 16), [Recipe(), BF16]),
    # Labels are shifted, not shifted, or one per sample.
    **{
        f"labels, {make.args[0]}": (
            *(make, partial(foreign.labelled, make)),
            [Recipe(micro_batches=6), Recipe(in_backward=True), replace(LAYERS, micro_batches=2)],
        )
        for make in foreign.KINDS
    },
    # The model offers its own chain.
    "stages": (
        *(foreign.Tower, sentences),
        [
            *(OPTIMAL, replace(OPTIMAL, head_chunk=9, micro_batches=2), Recipe(head_chunk=9)),
            *(replace(OPTIMAL, in_backward=True), replace(SEGMENTS, head_chunk=9)),
            replace(SEGMENTS, segments=3, **DOWN),
        ],
    ),
    "stages with dropout": (
        *(partial(foreign.Tower, dropout=0.4), sentences),
        [OPTIMAL, replace(SEGMENTS, segments=3, **DOWN)],
    ),
    # A search runs only a few of the blocks.
    "many blocks": (
        *(deep, tokens),
        [
            Recipe(precision="bf16", checkpoint="layers", first_blocks=3, attention="flash"),
            Recipe(checkpoint="layers", micro_batches=3, offload_optimizer=0.5, **DOWN),
            Recipe(in_backward=True, offload_optimizer=0.5, head_chunk=7, checkpoint="selective"),
            Recipe(checkpoint="segments", segments=MANY + 2, micro_batches=3),
        ],
    ),
    "13 million parameters": (large, large_batch, [replace(SEGMENTS, optimizer="sgd", **DOWN)]),
    # Models of a config.json differ in biases, norms of queries, experts and positions.
    **{
        f"config of {config['model_type']}": (
            *(partial(model_from, small(config), sequence=32), four),
            recipes,
        )
        for config, recipes in CONFIGS
    },
    **{
        name: (*model, of_architecture(i, name))
        for i, (name, model) in enumerate(ARCHITECTURES.items())
    },
    # The attention keeps its scores.
    "Llama, eager": (maker("Llama:LlamaForCausalLM", **SHARED, **EAGER), text, [HEAD]),
    "T5, eager": (maker("T5:T5ForConditionalGeneration", **T5, **EAGER), text, [HEAD]),
    # The model drops a mask of ones, and keeps one with zeros.
    "Llama without a mask": (LLAMA, partial(text, "none"), [Recipe()]),
    "Llama, padded": (LLAMA, partial(text, "padded"), [Recipe()]),
    "BART, padded": (BART(), partial(text, "padded", answer=12), [Recipe()]),
    # A micro-batch that keeps its mask needs other bytes than those that drop it.
    "first is padded": (LLAMA, partial(padded, 0), [Recipe(micro_batches=4)]),
    "second is padded": (LLAMA, partial(padded, 1), [FOUR]),
    "last is padded": (LLAMA, partial(padded, 3), [FOUR]),
    # Encoder and decoder have different lengths.
    "uneven BART": (BART(decoder_layers=3), answered, [replace(PAGED, checkpoint="selective")]),
    # The model checkpoints its own layers.
    "own checkpoints": (partial(checkpointing, False), text, FLASH),
    "own reentrant checkpoints": (partial(checkpointing, True), text, FLASH),
}
EACH_ROW = [
    (name, make_model, make_batch, recipe)
    for name, (make_model, make_batch, recipes) in ROWS.items()
    for recipe in recipes
]
# The cases that were measured on a GPU.
CASES = [*((name, *MODELS[name], recipe) for name, recipe in TABLE), *EACH_ROW]

# Cases that were not measured on a GPU.
unet = partial(Image, BODIES["U-Net"])
ON_A_CPU = [
    # The strides of dimensions of size 1 decide the memory format of what follows.
    ("U-Net", unet, partial(images, 1), Recipe()),
    ("U-Net, channels last", unet, partial(images, 1, channels_last=True), BF16),
    ("U-Net, frozen", partial(unet, frozen=True), partial(images, 3), Recipe(micro_batches=3)),
    ("one pixel", partial(Image, BODIES["attention"]), partial(images, 1, 1), Recipe()),
    # Micro-batches of one of the four samples; `TABLE` has such recipes of plain decoders.
    *(
        (f"{name}, one sample each", *ARCHITECTURES[name], Recipe(micro_batches=4))
        for name in ("encoder and decoder, relative positions", "state space")
    ),
]


def change_view(h, mask):
    view = h[:, :-2]
    view[mask[:, :-2]] = 3.0
    return view, h


def change_base(h, mask):
    view = h[:, :-2]
    h.mul_(2)
    return view, h


def change_other_view(h, mask):
    early, late = h[:, 2:].transpose(0, 1), h.permute(2, 0, 1)
    late[0] = 3
    return early.exp(), late.add_(1)


class ChangedInPlace(nn.Module):
    """Model that changes a result, or a view of it, in place by `change`."""

    def __init__(self, change):
        super().__init__()
        self.change = change
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 640)

    def loss_sum(self, batch):
        view, base = self.change(self.first(batch[0]), batch[1])
        last = self.last(view.reshape(-1, 64))
        return last.float().square().sum() + base.float().sum(), 1


def masked_points(samples):
    points, mask = torch.randn(samples, 30, 64), torch.zeros(samples, 30, dtype=torch.bool)
    mask[:, 1:3] = True
    return points, mask


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("change", [change_view, change_base, change_other_view])
def test_estimate_equals_measurement_for_views_changed_in_place(change, samples):
    assert_measured(partial(ChangedInPlace, change), partial(masked_points, samples), Recipe())


def options_of(make_batch):
    return {"loss_sum": foreign.cube} if make_batch is foreign.point else {}


# Cases, and whether their estimates must also equal the extrapolated ones, as for all pairs of
# options and the first recipe of each row. `test_budget_search` extrapolates the steps of many
# blocks.
TESTED = [((name, *MODELS[name], recipe), True) for name, recipe in OPTION_PAIRS]
for i, (name, (make_model, make_batch, recipes)) in enumerate(ROWS.items()):
    # all recipes of an architecture are run only on a GPU
    chosen = [recipes[i % 2]] if name in ARCHITECTURES else recipes
    for recipe in chosen if name != "many blocks" else ():
        TESTED.append(((name, make_model, make_batch, recipe), recipe is chosen[0]))
TESTED += [(case, False) for case in ON_A_CPU]


@pytest.mark.filterwarnings("ignore:no activation was moved")
@pytest.mark.parametrize(
    ("case", "extrapolated"),
    TESTED,
    ids=[f"{name}: {recipe!r}" for (name, _, _, recipe), _ in TESTED],
)
def test_estimate_equals_measurement_for_each_model_and_recipe(case, extrapolated):
    _, make_model, make_batch, recipe = case
    recipe = feasible(make_model, make_batch, recipe)
    options = {"extrapolated": extrapolated, **options_of(make_batch)}
    assert_measured(make_model, make_batch, recipe, **options)
