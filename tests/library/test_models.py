"""Networks of the lessons, compared with the functions and modules of PyTorch."""

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
)

SIZES = {"vocabulary": 50, "hidden": 16, "heads": 2, "layers": 2, "sequence": 8}


@pytest.mark.parametrize("make", [partial(deep_mlp, 3, 8), partial(Decoder, **SIZES, tied=False)])
def test_initial_weights_depend_only_on_seed_and_layer(make):
    before = torch.get_rng_state()
    first, second, other = (make(seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert_close(first, second, rtol=0, atol=0)
    matrices = [
        value for weights in (first, other) for value in weights.values() if value.dim() > 1
    ]
    assert len({tuple(each.flatten().tolist()) for each in matrices}) == len(matrices) > 2


@pytest.mark.parametrize("causal", [False, True])
def test_standard_and_fused_attention_equal_pytorch(causal):
    q, k, v = torch.randn(3, 2, 3, 7, 4, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    assert_close(Attention(12, 3, causal=causal).standard(q, k, v), expected)
    x = torch.randn(2, 8, 16)
    standard, fused = (Attention(16, 2, causal=causal, fused=fused) for fused in (False, True))
    assert_close(fused(x), standard(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("norm_first", [False, True])
def test_decoder_layer_equals_pytorch_encoder_layer(norm_first):
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


def test_decoder_loss_equals_mean_cross_entropy_of_next_tokens():
    model, tokens = Decoder(**SIZES), random_tokens(3, 8, 50)
    logits = model(tokens[:, :-1])
    expected = (
        -sum(logits[b, s].log_softmax(0)[tokens[b, s + 1]] for b in range(3) for s in range(8)) / 24
    )
    assert_close(model.loss(tokens), expected)
    total, weight = model.loss_sum(tokens)
    assert_close(total, 24 * expected)
    assert weight == 24 and total.requires_grad


def test_dropout_has_same_distribution_as_pytorch_dropout():
    x, p = torch.ones(200_000, requires_grad=True), 0.3
    ours, theirs = Dropout(p)(x), F.dropout(x, p, training=True)
    assert set(ours.unique().tolist()) == set(theirs.unique().tolist())  # 0 and 1 / (1 - p)
    for y in (ours, theirs):
        assert (y == 0).float().mean().item() == pytest.approx(p, abs=5e-3)
    ours.sum().backward()
    assert torch.equal(x.grad, ours.detach())
    # Dropout is the identity in evaluation and at probability 0.
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0)(x) is x


@pytest.mark.parametrize("tied", [True, False])
def test_loss_stages_of_decoder_have_its_loss_and_gradients(tied):
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


def test_decoder_with_dropout_or_modified_layers_reports_random_number_use():
    dropping, changed = Decoder(**SIZES, dropout=0.1), Decoder(**SIZES)
    assert dropping.draws_random_numbers and not dropping.eval().draws_random_numbers
    assert not changed.draws_random_numbers
    changed.layers[1].register_forward_hook(lambda *_: None)
    assert changed.draws_random_numbers
