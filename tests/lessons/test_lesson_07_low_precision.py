"""Weights in 4 bits and Adam's moments in 8 bits of lesson 07, compared with bitsandbytes."""

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from course_lib._torch.tensors import tensors_in
from course_lib.budget import Recipe, estimate, run
from course_lib.lessons.lesson_01.figures import with_adapters
from course_lib.lessons.lesson_07.fewer_bits import Adam8bit, FourBitLinear, nf4_levels
from course_lib.lessons.lesson_07.smaller import in_four_bits
from course_lib.models import Decoder, random_tokens


@pytest.fixture(scope="module")
def bitsandbytes():
    """Return the package, whose import takes two seconds because it loads torch's compiler."""
    return pytest.importorskip("bitsandbytes")


def small_model():
    return Decoder(vocabulary=256, hidden=128, heads=4, layers=2, sequence=32)


def batch():
    return random_tokens(4, 32, 256)


def test_four_bit_linear_layer_equals_bitsandbytes_linear4bit(bitsandbytes):
    linear = torch.nn.Linear(128, 192)
    theirs = bitsandbytes.nn.Linear4bit(128, 192, quant_type="nf4", compress_statistics=False)
    theirs.load_state_dict(linear.state_dict())
    theirs, ours = theirs.to("cpu"), FourBitLinear(linear)  # rounds the weight
    state = theirs.weight.quant_state
    torch.testing.assert_close(torch.tensor(nf4_levels()), state.code, rtol=0, atol=2e-7)
    assert ours.codes.nbytes + ours.scales.nbytes == theirs.weight.nbytes + state.absmax.nbytes
    weight = bitsandbytes.functional.dequantize_4bit(theirs.weight, state)
    torch.testing.assert_close(ours.dequantize(torch.float32), weight)
    results, x = [], torch.randn(5, 3, 128, requires_grad=True)
    for layer in (theirs, ours):
        output = layer(x)
        results.append((output.detach(), *torch.autograd.grad(output.square().sum(), x)))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_all_zero_block_of_four_bit_linear_dequantizes_to_zero():
    linear = torch.nn.Linear(64, 2)
    linear.weight.data[0] = 0
    weight = FourBitLinear(linear).dequantize(torch.float32)
    assert weight[0].eq(0).all() and weight[1].isfinite().all()


def trained(optimizer_class):
    """Return the change of the parameters in three steps and the bytes of the optimizer state."""
    model = small_model()
    optimizer = optimizer_class(model.parameters(), lr=1e-3)
    start = parameters_to_vector(model.parameters()).detach()
    for _ in range(3):
        optimizer.zero_grad()
        model.loss(batch()).backward()
        optimizer.step()
    state = {id(tensor): tensor.nbytes for tensor in tensors_in(optimizer.state)}
    return parameters_to_vector(model.parameters()).detach() - start, sum(state.values())


def test_adam_8bit_updates_like_adam_with_state_bytes_of_bitsandbytes(bitsandbytes):
    expected, _ = trained(torch.optim.AdamW)
    theirs, their_bytes = trained(bitsandbytes.optim.AdamW8bit)
    ours, our_bytes = trained(Adam8bit)
    for update in (theirs, ours):
        assert (update - expected).norm() < 0.05 * expected.norm()
    assert our_bytes == their_bytes


def test_estimate_of_four_bit_model_with_adapters_equals_measurement():
    def make_model():
        return with_adapters(in_four_bits(small_model()), 4)

    recipe = Recipe(checkpoint="layers", precision=None)
    peak = estimate(make_model, batch, recipe).peak_bytes
    assert peak == run(make_model, batch, recipe).meter.peak_bytes
