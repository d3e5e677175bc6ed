"""The networks of the lessons: their shapes, their seeds, and PyTorch's own functions as the
reference."""

from functools import partial

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


@pytest.mark.parametrize("make", [partial(deep_mlp, 3, 8), partial(Decoder, **SIZES, tied=False)])
def test_the_same_seed_gives_the_same_weights_and_another_one_others(make):
    before = torch.get_rng_state()
    first, second, other = (make(seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert_close(first, second, rtol=0, atol=0)
    matrices = [key for key, value in first.items() if value.dim() > 1]
    assert matrices
    assert all(not torch.equal(first[key], other[key]) for key in matrices)


def test_random_numbers_of_the_caller_are_untouched_also_by_an_error():
    before = torch.get_rng_state()
    random_tokens(2, 8, 50)
    with pytest.raises(ZeroDivisionError), seed_generators(3):
        torch.rand(3)
        1 / 0  # noqa: B018
    assert torch.equal(torch.get_rng_state(), before)


def test_layers_of_a_decoder_start_from_different_weights():
    matrices = [parameter for parameter in Decoder(**SIZES).parameters() if parameter.dim() > 1]
    assert len({tuple(each.flatten().tolist()) for each in matrices}) == len(matrices)


def test_shapes():
    model = deep_mlp(3, 8, activation=nn.ReLU)
    assert [type(layer) for layer in model] == [nn.Linear, nn.ReLU] * 3
    assert model[0].weight.shape == model[4].weight.shape == (8, 8)
    x = torch.randn(3, 8, 16)
    assert DecoderLayer(16, 2, feedforward=24)(x).shape == x.shape
    tokens = random_tokens(3, 8, 50)
    assert tokens.shape == (3, 9) and tokens.dtype == torch.int64
    assert tokens.min() >= 0 and tokens.max() < 50
    assert Decoder(**SIZES)(tokens[:, :5]).shape == (3, 5, 50)  # shorter than the longest is fine


@pytest.mark.parametrize("causal", [False, True])
def test_standard_attention_equals_the_frameworks_and_fused_attention_equals_it(causal):
    q, k, v = torch.randn(3, 2, 3, 7, 4, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    assert_close(Attention(12, 3, causal=causal).standard(q, k, v), expected)
    x = torch.randn(2, 8, 16)
    standard, fused = (Attention(16, 2, causal=causal, fused=fused) for fused in (False, True))
    assert_close(fused(x), standard(x), rtol=1e-5, atol=1e-6)
    tokens = random_tokens(2, 8, 50)
    losses = [Decoder(**SIZES, fused=fused).loss(tokens) for fused in (False, True)]
    assert_close(*losses, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_decoder_layer_equals_the_frameworks(norm_first):
    ours = DecoderLayer(16, 4, norm_first=norm_first)
    theirs = nn.TransformerEncoderLayer(
        16, 4, 64, dropout=0.0, activation="gelu", batch_first=True, norm_first=norm_first
    )
    with torch.no_grad():  # the parameters have the same order
        for copied, own in zip(theirs.parameters(), ours.parameters(), strict=True):
            copied.copy_(own)
    x = torch.randn(2, 6, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    assert_close(ours(x), theirs(x, src_mask=mask, is_causal=True), rtol=1e-5, atol=1e-5)


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


def test_dropout_drops_as_the_frameworks_does():
    x, p = torch.ones(200_000, requires_grad=True), 0.3
    ours, theirs = Dropout(p)(x), F.dropout(x, p, training=True)
    assert set(ours.unique().tolist()) == set(theirs.unique().tolist())  # 0 and 1 / (1 - p)
    for y in (ours, theirs):
        assert (y == 0).float().mean().item() == pytest.approx(p, abs=5e-3)
    ours.sum().backward()
    assert torch.equal(x.grad, ours.detach())
    # the identity in evaluation and at probability 0
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0)(x) is x
    assert repr(Dropout(0.5)) == "Dropout(p=0.5)"


@pytest.mark.parametrize("tied", [True, False])
def test_the_stages_of_a_decoder_compute_its_loss_and_share_its_weights(tied):
    decoder, tokens = Decoder(**SIZES, tied=tied), random_tokens(3, 8, 50)
    assert (decoder.head.weight is decoder.tokens.weight) == tied
    stages = loss_stages(decoder, tokens[:, 1:])
    assert len(stages) == 2 * 2 + 2
    parameters = list(decoder.parameters())
    assert set(map(id, stages.parameters())) == set(map(id, parameters))
    losses = stages(tokens[:, :-1]), decoder.loss(tokens)
    found, expected = (torch.autograd.grad(loss, parameters) for loss in losses)
    assert_close((losses[0], found), (losses[1], expected), rtol=0, atol=0)
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
    ("change", "blocks"), [(other_head, 2), (post_norm, 1), (hooked, 1), (patched, 1)]
)
def test_a_decoder_gives_its_loss_sum_as_stages_whatever_its_layers_are(change, blocks):
    decoder, tokens = Decoder(**SIZES), random_tokens(3, 8, 50)
    assert not decoder.draws_random_numbers
    change(decoder)
    # a layer of an unknown class may draw random numbers
    assert decoder.draws_random_numbers == (blocks == 1)
    stages, value = decoder.stages(tokens), tokens
    for stage in stages:
        value = stage(value)
    assert value == decoder.loss_sum(tokens)
    # the others are layers as they are
    assert sum(isinstance(stage, nn.Sequential) for stage in stages) == blocks


def test_a_decoder_with_dropout_draws_random_numbers_in_training_only():
    dropping = Decoder(**SIZES, dropout=0.1)
    assert dropping.draws_random_numbers and not dropping.eval().draws_random_numbers
