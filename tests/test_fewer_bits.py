"""Weights in 4 bits and moments in 8 bits of lesson 07, compared with bitsandbytes."""

import pytest
import torch

from course_lib.budget import Recipe, estimate, run
from course_lib.lessons import lesson_07
from course_lib.lessons.lesson_01 import with_adapters
from course_lib.lessons.lesson_07.fewer_bits import nf4_levels
from course_lib.models import Decoder, random_tokens

bitsandbytes = pytest.importorskip("bitsandbytes")


def small_model():
    return Decoder(vocabulary=256, hidden=128, heads=4, layers=2, sequence=32)


def batch():
    return random_tokens(4, 32, 256)


def bitsandbytes_linear(linear):
    layer = bitsandbytes.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        compute_dtype=torch.float32,
        quant_type="nf4",
        compress_statistics=False,
    )
    layer.load_state_dict(linear.state_dict())
    return layer.to("cpu")  # rounds the weight


def test_four_bit_linear_equals_bitsandbytes():
    torch.manual_seed(0)
    linear = torch.nn.Linear(128, 192)
    theirs, ours = bitsandbytes_linear(linear), lesson_07.FourBitLinear(linear)
    state = theirs.weight.quant_state
    torch.testing.assert_close(torch.tensor(nf4_levels()), state.code, rtol=0, atol=2e-7)
    assert ours.codes.nbytes + ours.scales.nbytes == theirs.weight.nbytes + state.absmax.nbytes
    weight = bitsandbytes.functional.dequantize_4bit(theirs.weight, state)
    torch.testing.assert_close(ours.dequantize(torch.float32), weight)
    x = torch.randn(5, 3, 128)
    gradients = []
    for layer in (theirs, ours):
        given = x.clone().requires_grad_()
        output = layer(given)
        output.square().sum().backward()
        gradients.append((output.detach(), given.grad))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-4)


def test_zero_block_of_four_bit_linear_stays_zero():
    linear = torch.nn.Linear(64, 2)
    with torch.no_grad():
        linear.weight[0].zero_()
    layer = lesson_07.FourBitLinear(linear)
    assert layer.dequantize(torch.float32)[0].eq(0).all()
    assert layer.dequantize(torch.float32)[1].isfinite().all()


def trained(optimizer_class):
    model = small_model()
    optimizer = optimizer_class(model.parameters(), lr=1e-3)
    start = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    for _ in range(3):
        optimizer.zero_grad()
        model.loss(batch()).backward()
        optimizer.step()
    state = sum(
        tensor.nbytes
        for tensor in {
            id(tensor): tensor
            for values in optimizer.state.values()
            for tensor in values.values()
            if isinstance(tensor, torch.Tensor)
        }.values()
    )
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach() - start, state


def test_adam_in_8_bits_follows_adam_and_has_the_bytes_of_bitsandbytes():
    expected, _ = trained(torch.optim.AdamW)
    theirs, their_bytes = trained(bitsandbytes.optim.AdamW8bit)
    ours, our_bytes = trained(lesson_07.Adam8bit)
    for update in (theirs, ours):
        assert (update - expected).norm() < 0.05 * expected.norm()
    assert our_bytes == their_bytes


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_paged_adam_warns_on_a_cpu():
    parameter = torch.nn.Parameter(torch.randn(64, 64))
    parameter.grad = torch.randn(64, 64)
    with pytest.warns(UserWarning, match="Paged optimizers are not supported on CPU"):
        bitsandbytes.optim.PagedAdamW8bit([parameter]).step()


def test_steps_with_fewer_bits_are_predicted_to_the_byte():
    recipe = Recipe(precision=None, checkpoint="layers")
    for make_model in (
        lambda: small_model().bfloat16(),
        lambda: with_adapters(lesson_07.in_four_bits(small_model()), 4),
    ):
        found = estimate(make_model, batch, recipe)
        assert found.peak_bytes == run(make_model, batch, recipe).meter.peak_bytes
    in_8_bits = Recipe(optimizer="adam8bit", checkpoint="layers")
    peak = estimate(small_model, batch, in_8_bits).peak_bytes
    assert peak == run(small_model, batch, in_8_bits).meter.peak_bytes
