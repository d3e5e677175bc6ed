"""Tests of the categories of live bytes, compared with numbers worked out by hand."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from training_steps import (
    OuterOptimizer,
    at_end,
    bytes_of,
    empty_gradients,
    one_more_sample,
    step_in_backward,
)

from course_lib._torch.tensors import tensors_in
from course_lib.memory import CATEGORIES, MemoryMeter, categories
from course_lib.memory.storages import held_by
from course_lib.models import deep_mlp
from course_lib.offload import OffloadedOptimizer

DEPTH, WIDTH, BATCH = 3, 64, 32
WEIGHTS = DEPTH * (WIDTH * WIDTH + WIDTH) * 4
ADAM = 2 * WEIGHTS + 4 * 2 * DEPTH  # two moments, and a step count per parameter
ONE = BATCH * WIDTH * 4  # one activation


def only(**expected):
    return dict.fromkeys(CATEGORIES, 0) | expected


def batch():
    return torch.randn(BATCH, WIDTH)


def after(operator, meter):
    """Return the bytes per category right after the first call of an operator."""
    return next(sample.bytes for sample in meter.timeline if sample.operator == operator)


def test_forward_of_mlp_stores_two_activations_per_layer():
    model = deep_mlp(DEPTH, WIDTH)
    with MemoryMeter(model) as meter:
        x = batch()
        y = model(x).sum()
    # Each GELU keeps its input. Each Linear except the first keeps the output of the GELU before
    # it. The first Linear keeps the batch, which stays an input.
    kept = (2 * DEPTH - 1) * ONE
    found = at_end(meter)
    assert (found["parameter"], found["input"], found["activation"]) == (WEIGHTS, ONE, kept)
    assert meter.live_bytes == WEIGHTS + ONE + kept + y.nbytes
    del y
    assert meter.live_bytes == WEIGHTS + ONE


def test_parameters_created_inside_meter_count_as_parameters():
    with MemoryMeter() as meter:
        model, x = deep_mlp(DEPTH, WIDTH), batch()
        model(x).sum().backward()
        one_more_sample()
    assert at_end(meter) == only(parameter=WEIGHTS, gradient=WEIGHTS, input=x.nbytes)


def test_state_created_by_adam_counts_as_optimizer_state():
    model, x = deep_mlp(DEPTH, WIDTH), batch()
    optimizer = torch.optim.Adam(model.parameters())
    for given, held in (((model, optimizer), WEIGHTS), ((None, None), 0)):
        optimizer.state.clear()
        empty_gradients(model)
        with MemoryMeter(*given) as meter:
            model(x).sum().backward()
            optimizer.step()
            one_more_sample()
        assert at_end(meter) == only(optimizer=ADAM, gradient=WEIGHTS, parameter=held)
    with MemoryMeter(model, optimizer) as meter:
        assert meter.live_bytes == meter.entry_bytes == meter.peak_bytes
    assert meter.at_peak() == only(optimizer=ADAM, gradient=WEIGHTS, parameter=WEIGHTS)


OPTIMIZERS = {
    "state created by steps": torch.optim.AdamW,
    "state created by constructor": torch.optim.Adagrad,
    "state in another optimizer": OuterOptimizer,
    "state in a file": OffloadedOptimizer,
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_state_created_by_step_in_backward_counts_as_optimizer_state(make):
    model = deep_mlp(DEPTH, WIDTH).to(torch.bfloat16)
    with MemoryMeter(model) as meter:
        optimizer = make(list(model.parameters()))
        step_in_backward(model, optimizer)
        for _ in range(2):
            model(batch().to(torch.bfloat16)).sum().backward()
            one_more_sample()
            has_own_state = hasattr(optimizer, "held_tensors")
            state = list(optimizer.held_tensors() if has_own_state else tensors_in(optimizer.state))
            assert meter.series()["optimizer"][-1] == bytes_of(state) > 0
            del state
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_meter_visits_each_optimizer_state_tensor_at_most_three_times(monkeypatch):
    visited = []

    def counted(*args, **kwargs):
        for tensor in held_by(*args, **kwargs):
            visited.append(tensor)
            yield tensor

    monkeypatch.setattr(categories, "held_by", counted)
    model = deep_mlp(8, 8).to(torch.bfloat16)
    optimizer = OffloadedOptimizer(model.parameters(), fraction=0.5)
    step_in_backward(model, optimizer)
    model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
    visited.clear()
    with MemoryMeter(model, optimizer):
        model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
    held = len(list(optimizer.held_tensors()))
    assert held <= len(visited) <= 3 * held


def test_outputs_under_no_grad_count_as_temporary():
    model, x = deep_mlp(DEPTH, WIDTH), batch()
    with MemoryMeter(model) as meter, torch.no_grad():
        y = model(x)
        one_more_sample()
    assert not meter.series()["activation"].any()
    assert at_end(meter)["temporary"] == y.nbytes


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_inputs_and_recomputed_tensors_count_as_activations(reentrant):
    layers = [nn.Sequential(*deep_mlp(2, WIDTH)) for _ in range(4)]
    points = []  # of the trace, where the second half of layer 2 is recomputed

    def note_point(module, inputs):
        if torch._C._current_autograd_node() is not None:
            points.append(len(meter.phases()))

    layers[2][1].register_forward_pre_hook(note_point)
    x = batch().requires_grad_()
    with MemoryMeter(nn.Sequential(*layers)) as meter:
        y = x
        for layer in layers:
            y = checkpoint(layer, y, use_reentrant=reentrant, preserve_rng_state=False)
        y.sum().backward()
        one_more_sample()
    # The inputs of layers 1, 2 and 3 are kept. The input of layer 0 is older than the block, and
    # nothing needs the last output.
    assert after("aten.sum.default", meter)["activation"] == 3 * ONE
    activations = meter.series()["activation"]
    # Layer 3 is finished and layer 2 is recomputed: the inputs of layers 1 and 2, and the tensor
    # that the GELU keeps.
    assert list(activations[points]) == [3 * ONE]
    # In layer 3: three inputs, three tensors between its parts, and the gradient of the loss.
    assert activations.max() == 6 * ONE + 4
    assert activations[-1] == 0


def test_output_saved_by_selective_checkpoint_counts_as_activation():
    weight, x = nn.Parameter(torch.randn(32, 32)), torch.randn(64, 32)

    def keep_products():
        return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])

    def block(x):
        return (x @ weight).relu() + 1

    with MemoryMeter() as meter:
        y = checkpoint(block, x, use_reentrant=False, context_fn=keep_products)
        end_of_forward = len(meter.timeline) - 1
        y.sum().backward()
    # The policy keeps the matrix product. Only the ReLU of the recomputation reads it.
    assert meter.timeline[end_of_forward].bytes["activation"] == 64 * 32 * 4


def test_tensors_saved_by_autograd_function_count_as_activations():
    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x.exp()
            ctx.save_for_backward(y)
            ctx.twice = x * 2
            return y + 1

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.saved_tensors[0] * ctx.twice

    x = batch().requires_grad_()
    with MemoryMeter() as meter:
        loss = Exp.apply(x).sum()
        assert at_end(meter)["activation"] == ONE  # saved by save_for_backward
        loss.backward()
    # The meter finds the attribute of ctx when backward reads it.
    assert after("aten.sum.default", meter)["activation"] == 2 * ONE
