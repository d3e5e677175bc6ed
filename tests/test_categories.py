"""Categories and phases of live bytes, compared with figures worked out by hand."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from training_steps import Wraps, at_end, bytes_of, empty_gradients, mlp, one_more_sample, train

from course_lib.memory import CATEGORIES, PHASES, MemoryMeter
from course_lib.models import deep_mlp

DEPTH, WIDTH, BATCH = 3, 64, 32


WEIGHTS = DEPTH * (WIDTH * WIDTH + WIDTH) * 4


ONE = BATCH * WIDTH * 4  # one activation


def after(operator, meter):
    """category -> bytes right after the first call of an operator."""
    return next(sample.bytes for sample in meter.timeline if sample.operator == operator)


def test_after_the_forward_pass_an_mlp_holds_two_activations_a_layer():
    model, x = deep_mlp(DEPTH, WIDTH), torch.randn(BATCH, WIDTH)
    with MemoryMeter(model) as meter:
        y = model(x).sum()
    # Each GELU keeps its input, each Linear but the first keeps the GELU's output before it; the
    # last output is needed by nobody.
    assert at_end(meter)["activation"] == (2 * DEPTH - 1) * ONE
    assert at_end(meter)["parameter"] == WEIGHTS
    assert meter.live_bytes == WEIGHTS + (2 * DEPTH - 1) * ONE + y.nbytes
    del y
    assert meter.live_bytes == WEIGHTS


def test_a_batch_made_in_the_block_is_an_input_although_the_first_layer_saves_it():
    model = deep_mlp(DEPTH, WIDTH)
    with MemoryMeter(model) as meter:
        x = torch.randn(BATCH, WIDTH)
        y = model(x).sum()
    assert at_end(meter)["input"] == x.nbytes == ONE
    assert at_end(meter)["activation"] == (2 * DEPTH - 1) * ONE
    del y


def test_after_backward_gradients_weigh_as_much_as_parameters_and_no_activation_is_left():
    model, x = deep_mlp(DEPTH, WIDTH), torch.randn(BATCH, WIDTH)
    for given in (model, None):
        empty_gradients(model)
        with MemoryMeter(given) as meter:
            model(x).sum().backward()
            one_more_sample()
        expected = dict.fromkeys(CATEGORIES, 0) | {
            "gradient": WEIGHTS,
            "parameter": 0 if given is None else WEIGHTS,
        }
        assert at_end(meter) == expected


def test_adam_holds_two_moments_and_a_step_count_a_parameter():
    model, x = deep_mlp(DEPTH, WIDTH), torch.randn(BATCH, WIDTH)
    optimizer = torch.optim.Adam(model.parameters())
    # made in the block; known from the step itself
    for given in ((model, optimizer), (None, None)):
        optimizer.state.clear()
        empty_gradients(model)
        with MemoryMeter(*given) as meter:
            model(x).sum().backward()
            optimizer.step()
            one_more_sample()
        assert at_end(meter)["optimizer"] == 2 * WEIGHTS + 4 * len(list(model.parameters()))
        assert at_end(meter)["gradient"] == WEIGHTS
    with MemoryMeter(model, optimizer) as meter:  # there on entry
        assert meter.live_bytes == meter.entry_bytes == meter.peak_bytes
    assert meter.at_peak()["optimizer"] == 2 * WEIGHTS + 4 * len(list(model.parameters()))
    assert meter.entry_bytes == 4 * WEIGHTS + 4 * len(list(model.parameters()))


def test_a_model_made_in_the_block_and_not_given_is_known_by_its_leaves():
    with MemoryMeter() as meter:
        model, x = deep_mlp(DEPTH, WIDTH), torch.randn(BATCH, WIDTH)
        model(x).sum().backward()
        one_more_sample()
    expected = {"parameter": WEIGHTS, "gradient": WEIGHTS, "input": x.nbytes}
    assert at_end(meter) == dict.fromkeys(CATEGORIES, 0) | expected


def test_what_a_model_has_when_the_block_ends_is_its_own():
    model = nn.Linear(WIDTH, WIDTH)
    with MemoryMeter(model) as meter:
        model.to(torch.bfloat16)
        one_more_sample()
    assert at_end(meter)["parameter"] == bytes_of(model.parameters()) == 2 * WIDTH * (WIDTH + 1)


def test_buffers_of_a_given_model_are_buffers():
    model = nn.BatchNorm1d(16)
    with MemoryMeter(model) as meter:
        model(torch.ones(4, 16))
    assert at_end(meter)["buffer"] == bytes_of(model.buffers()) == 2 * 16 * 4 + 8
    assert at_end(meter)["parameter"] == 2 * 16 * 4


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_a_checkpoint_the_inputs_and_what_is_computed_again_are_activations(reentrant):
    layers = [
        nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU()) for _ in range(4)
    ]
    model = nn.Sequential(*layers)
    x = torch.randn(BATCH, 64, requires_grad=True)
    recomputed = []

    def look(module, inputs):
        if torch._C._current_autograd_node() is not None:
            recomputed.append(len(meter.phases()))

    layers[2][1].register_forward_pre_hook(look)
    with MemoryMeter(model) as meter:
        y = x
        for layer in layers:
            y = checkpoint(layer, y, use_reentrant=reentrant, preserve_rng_state=False)
        y.sum().backward()
        one_more_sample()
    series = meter.series()
    # The inputs of layers 1, 2 and 3 are kept (that of layer 0 is x, made before the block), the
    # last output is not.
    assert after("aten.sum.default", meter)["activation"] == 3 * ONE
    (moment,) = recomputed
    # Layer 2 is computed again, layer 3 is over: the inputs of 1 and 2, and what Linear gives GELU
    # to keep.
    assert series["activation"][moment] == 3 * ONE
    # In layer 3: three inputs, three tensors between its parts; and the loss's gradient (4 bytes),
    # which is made before the backward pass and read in it, as activations are.
    assert series["activation"].max() == 6 * ONE + 4
    assert at_end(meter)["activation"] == 0


def test_what_an_autograd_function_saves_is_an_activation():
    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x.exp()
            ctx.save_for_backward(y)
            ctx.twice = x * 2
            return y + 1

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.saved_tensors[0] * ctx.twice

    x = torch.randn(BATCH, WIDTH, requires_grad=True)
    with MemoryMeter() as meter:
        y = Keeps.apply(x)
        y.sum()
        assert at_end(meter)["activation"] == ONE  # save_for_backward: seen at once
        y.sum().backward()
    # an attribute: once backward has read it
    assert after("aten.sum.default", meter)["activation"] == 2 * ONE


def test_without_gradients_everything_is_temporary():
    model, x = deep_mlp(DEPTH, WIDTH), torch.randn(BATCH, WIDTH)
    with MemoryMeter(model) as meter, torch.no_grad():
        y = model(x)
        one_more_sample()
    assert not meter.series()["activation"].any()
    assert at_end(meter)["temporary"] == y.nbytes


def test_the_phases_are_forward_backward_and_optimizer():
    model, optimizer, step = mlp()
    with MemoryMeter(model, optimizer) as meter:
        step()
    phases = meter.phases()
    assert phases == sorted(phases, key=PHASES.index)
    assert set(phases) == set(PHASES)
    with MemoryMeter(model, optimizer) as meter:
        optimizer.step()
        with torch.no_grad():
            model(torch.ones(1, 128))  # a validation after the step
    assert meter.phases()[-1] == "forward"


def test_an_optimizer_that_steps_in_a_hook_of_backward_is_in_its_own_phase():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(BATCH, 64)
    optimizers = {p: torch.optim.Adam([p], foreach=False) for p in model.parameters()}

    def step_now(parameter):
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_now)
    with MemoryMeter(model) as meter:
        model(x).sum().backward()
    phases = [
        phase for i, phase in enumerate(meter.phases()) if i == 0 or phase != meter.phases()[i - 1]
    ]
    assert phases[:3] == ["forward", "backward", "optimizer"]
    assert phases.count("optimizer") >= 2  # between pieces of the backward pass
    assert {s.phase for s in meter.timeline if "addcdiv" in s.operator} == {"optimizer"}
    assert {s.phase for s in meter.timeline if s.operator.startswith("aten.mm")} == {"backward"}
    # they never live all at once
    assert meter.series()["gradient"].max() < bytes_of(model.parameters())


def test_an_optimizer_within_an_optimizer_does_not_end_its_phase():
    model, optimizer, step = train(deep_mlp(2, 16), torch.randn(4, 16), optimizer=Wraps)
    with MemoryMeter(model, optimizer) as meter:
        step()
        with torch.no_grad():
            model(torch.ones(1, 16))
    phases = meter.phases()
    turns = [phase for i, phase in enumerate(phases) if i == 0 or phase != phases[i - 1]]
    assert turns == ["forward", "backward", "optimizer", "forward"]
    assert {s.phase for s in meter.timeline if s.operator.startswith("aten._foreach_mul_")} == {
        "optimizer"
    }
    assert at_end(meter)["optimizer"] == bytes_of(v for v in optimizer.held_tensors())


def test_after_a_step_that_failed_the_next_one_ends_its_phase():
    model = deep_mlp(2, 16)
    optimizer = Wraps(model.parameters())
    with MemoryMeter(model, optimizer) as meter:
        model(torch.ones(1, 16)).sum().backward()
        optimizer.base.step = None  # calling it fails, within the outer step
        with pytest.raises(TypeError):
            optimizer.step()
        del optimizer.base.step
        optimizer.step()
        with torch.no_grad():
            model(torch.ones(1, 16))
    assert meter.phases()[-1] == "forward"


def test_the_closure_of_an_optimizer_is_forward_and_backward():
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = model(x).pow(2).sum()
        loss.backward()
        return loss

    with MemoryMeter(model, optimizer) as meter:
        optimizer.step(closure)
    assert set(meter.phases()) == set(PHASES)
    assert {s.phase for s in meter.timeline if s.operator == "aten.addmm.default"} == {"forward"}


def test_what_a_recomputation_reads_was_an_activation_since_the_forward_pass():
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    weight, x = nn.Parameter(torch.randn(32, 32)), torch.randn(64, 32)

    def keep_products():
        return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])

    with MemoryMeter() as meter:
        y = checkpoint(
            lambda x: (x @ weight).relu() + 1, x, use_reentrant=False, context_fn=keep_products
        )
        end_of_forward = len(meter.timeline) - 1
        y.sum().backward()
    # kept by the policy, read by the ReLU of the second run, by no gradient formula
    product = 64 * 32 * 4
    assert meter.timeline[end_of_forward].bytes["activation"] == product
