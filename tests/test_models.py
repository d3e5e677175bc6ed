"""The networks of the lessons: their shapes, their seeds, and PyTorch's own functions as the
reference."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from course_lib.models import (
    Attention,
    Decoder,
    DecoderLayer,
    Dropout,
    deep_mlp,
    loss_stages,
    random_tokens,
    seed_generators,
)

SIZES = {"vocabulary": 50, "hidden": 16, "heads": 2, "layers": 2, "sequence": 8}

MAKERS = {
    "deep_mlp": lambda seed: deep_mlp(3, 8, seed=seed),
    "Attention": lambda seed: Attention(16, 2, seed=seed),
    "DecoderLayer": lambda seed: DecoderLayer(16, 2, seed=seed),
    "Decoder": lambda seed: Decoder(**SIZES, seed=seed),
    "Decoder, untied": lambda seed: Decoder(**SIZES, tied=False, seed=seed),
}


@pytest.mark.parametrize("name", MAKERS)
def test_the_same_seed_gives_the_same_weights_and_another_one_others(name):
    first, second, other = (MAKERS[name](seed).state_dict() for seed in (1, 1, 2))
    assert_close(first, second, rtol=0, atol=0)
    matrices = [key for key, value in first.items() if value.dim() > 1]
    assert matrices
    assert all(not torch.equal(first[key], other[key]) for key in matrices)


@pytest.mark.parametrize("name", [*MAKERS, "random_tokens", "seed_generators"])
def test_random_numbers_of_the_caller_are_untouched(name):
    before = torch.get_rng_state()
    if name == "random_tokens":
        random_tokens(2, 8, 50)
    elif name == "seed_generators":
        with pytest.raises(ZeroDivisionError), seed_generators(3):
            torch.rand(3)
            1 / 0  # noqa: B018
    else:
        MAKERS[name](0)
    assert torch.equal(torch.get_rng_state(), before)


def test_layers_of_a_decoder_start_from_different_weights():
    model = Decoder(**SIZES)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    for i, first in enumerate(matrices):
        assert not any(
            first.shape == other.shape and torch.equal(first, other) for other in matrices[i + 1 :]
        )


def test_shapes():
    x = torch.randn(3, 8, 16)
    assert deep_mlp(2, 16)(x[:, 0]).shape == (3, 16)
    assert Attention(16, 2)(x).shape == x.shape
    assert DecoderLayer(16, 2)(x).shape == x.shape
    assert DecoderLayer(16, 2, feedforward=24, norm_first=False)(x).shape == x.shape
    tokens = random_tokens(3, 8, 50)
    assert tokens.shape == (3, 9)
    assert tokens.dtype == torch.int64
    assert tokens.min() >= 0 and tokens.max() < 50
    model = Decoder(**SIZES)
    assert model(tokens[:, :-1]).shape == (3, 8, 50)
    assert model(tokens[:, :5]).shape == (3, 5, 50)  # shorter than the longest is fine
    assert model.loss(tokens).shape == ()


def test_a_deep_mlp_has_as_many_pairs_of_layers_as_asked_for():
    model = deep_mlp(3, 8, activation=nn.ReLU)
    assert [type(layer) for layer in model] == [nn.Linear, nn.ReLU] * 3
    assert sum(p.numel() for p in model.parameters()) == 3 * (8 * 8 + 8)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_standard_attention_equals_the_frameworks(causal, dtype):
    q, k, v = (torch.randn(2, 3, 7, 4, dtype=dtype, requires_grad=True) for _ in range(3))
    model = Attention(12, 3, causal=causal)
    found, expected = (
        model.standard(q, k, v),
        F.scaled_dot_product_attention(q, k, v, is_causal=causal),
    )
    assert found.dtype == dtype
    assert_close(found, expected, rtol=1e-5, atol=1e-6)
    weights = torch.randn_like(found)
    for ours, theirs in zip(
        torch.autograd.grad((found * weights).sum(), (q, k, v)),
        torch.autograd.grad((expected * weights).sum(), (q, k, v)),
        strict=True,
    ):
        assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_fused_attention_equals_standard_attention(causal):
    x = torch.randn(2, 8, 16)
    standard, fused = (Attention(16, 2, causal=causal, fused=fused) for fused in (False, True))
    assert_close(fused(x), standard(x), rtol=1e-5, atol=1e-6)
    tokens = random_tokens(2, 8, 50)
    losses = [Decoder(**SIZES, fused=fused).loss(tokens) for fused in (False, True)]
    assert_close(*losses, rtol=1e-5, atol=1e-6)


def test_attention_equals_multi_head_attention_of_the_framework():
    ours, theirs = Attention(16, 4), nn.MultiheadAttention(16, 4, batch_first=True)
    theirs.load_state_dict(
        {
            "in_proj_weight": ours.qkv.weight,
            "in_proj_bias": ours.qkv.bias,
            "out_proj.weight": ours.out.weight,
            "out_proj.bias": ours.out.bias,
        }
    )
    x = torch.randn(2, 5, 16)
    assert_close(ours(x), theirs(x, x, x, need_weights=False)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_decoder_layer_equals_the_frameworks(norm_first):
    ours = DecoderLayer(16, 4, norm_first=norm_first)
    theirs = nn.TransformerEncoderLayer(
        16, 4, 64, dropout=0.0, activation="gelu", batch_first=True, norm_first=norm_first
    )
    names = {
        "self_attn.in_proj_weight": "attention.qkv.weight",
        "self_attn.in_proj_bias": "attention.qkv.bias",
        "self_attn.out_proj.weight": "attention.out.weight",
        "self_attn.out_proj.bias": "attention.out.bias",
        "linear1.weight": "feedforward.0.weight",
        "linear1.bias": "feedforward.0.bias",
        "linear2.weight": "feedforward.2.weight",
        "linear2.bias": "feedforward.2.bias",
        **{f"norm{i}.{kind}": f"norm{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")},
    }
    theirs.load_state_dict({name: ours.state_dict()[own] for name, own in names.items()})
    x = torch.randn(2, 6, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    assert_close(ours(x), theirs(x, src_mask=mask, is_causal=True), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_a_position_sees_nothing_that_stands_after_it(fused):
    model = Decoder(**SIZES, fused=fused)
    tokens = random_tokens(1, 7, 50)
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 50
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5], after[:, 5])


def test_a_tied_head_is_the_embedding():
    tied, untied = Decoder(**SIZES), Decoder(**SIZES, tied=False)
    assert tied.head.weight is tied.tokens.weight
    count = [sum(p.numel() for p in model.parameters()) for model in (tied, untied)]
    assert count[1] - count[0] == 50 * 16


def test_the_loss_is_the_mean_cross_entropy_of_the_next_tokens():
    model, tokens = Decoder(**SIZES), random_tokens(3, 8, 50)
    logits = model(tokens[:, :-1])
    expected = (
        -sum(logits[b, s].log_softmax(0)[tokens[b, s + 1]] for b in range(3) for s in range(8)) / 24
    )
    assert_close(model.loss(tokens), expected)
    total, weight = model.loss_sum(tokens)
    assert_close(total, 24 * expected)
    assert weight == 24 and total.requires_grad


def test_every_parameter_gets_a_gradient():
    for tied in (False, True):
        model = Decoder(**SIZES, tied=tied, dropout=0.1)
        model.loss(random_tokens(2, 8, 50)).backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_dropout_drops_as_the_frameworks_does():
    x, p = torch.ones(200_000), 0.3
    with seed_generators(0):
        ours = Dropout(p)(x)
    with seed_generators(1):
        theirs = F.dropout(x, p, training=True)
    assert set(ours.unique().tolist()) == set(theirs.unique().tolist())  # 0 and 1 / (1 - p)
    for y in (ours, theirs):
        assert (y == 0).float().mean().item() == pytest.approx(p, abs=5e-3)
        assert y.mean().item() == pytest.approx(1, abs=5e-3)


def test_dropout_is_the_identity_in_evaluation_and_at_probability_0():
    x = torch.randn(10)
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0)(x) is x
    assert repr(Dropout(0.5)) == "Dropout(p=0.5)"


def test_dropout_passes_gradients_through_what_it_kept():
    x = torch.ones(1000, requires_grad=True)
    y = Dropout(0.5)(x)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


@pytest.mark.parametrize("tied", [True, False])
def test_the_stages_of_a_decoder_compute_its_loss_and_share_its_weights(tied):
    decoder, tokens = Decoder(**SIZES, tied=tied), random_tokens(3, 8, 50)
    stages = loss_stages(decoder, tokens[:, 1:])
    assert len(stages) == 2 * 2 + 2
    assert set(map(id, stages.parameters())) == set(map(id, decoder.parameters()))
    loss = stages(tokens[:, :-1])
    assert torch.equal(loss, decoder.loss(tokens))
    expected = torch.autograd.grad(decoder.loss(tokens), list(decoder.parameters()))
    for found, wanted in zip(
        torch.autograd.grad(loss, list(decoder.parameters())), expected, strict=True
    ):
        assert torch.equal(found, wanted)
    other = random_tokens(3, 8, 50, seed=1)
    stages[-1].targets = other[:, 1:]
    assert torch.equal(stages(other[:, :-1]), decoder.loss(other))


def post_norm(decoder):
    decoder.layers[1] = DecoderLayer(16, 2, norm_first=False)


def hooked(decoder):
    decoder.layers[1].register_forward_hook(lambda module, inputs, output: 2 * output)


def patched(decoder):
    layer = decoder.layers[1]
    layer.forward = lambda x: 3 * DecoderLayer.forward(layer, x)


def other_head(decoder):
    decoder.head = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 50))


@pytest.mark.parametrize(
    ("change", "blocks"),
    [(lambda decoder: None, 2), (other_head, 2), (post_norm, 1), (hooked, 1), (patched, 1)],
)
def test_a_decoder_gives_its_loss_sum_as_stages_whatever_its_layers_are(change, blocks):
    decoder, tokens = Decoder(**SIZES), random_tokens(3, 8, 50)
    change(decoder)
    stages, value = decoder.stages(tokens), tokens
    for stage in stages:
        value = stage(value)
    assert value == decoder.loss_sum(tokens)
    # the others are layers as they are
    assert sum(isinstance(stage, nn.Sequential) for stage in stages) == blocks


def test_a_decoder_says_whether_it_may_draw_random_numbers():
    dropping = Decoder(**SIZES, dropout=0.1)
    assert dropping.draws_random_numbers and not dropping.eval().draws_random_numbers
    decoder = Decoder(**SIZES)
    assert not decoder.draws_random_numbers
    hooked(decoder)
    assert decoder.draws_random_numbers
