"""course_lib.budget.optimizers: the table agrees with the classes that it lists."""

import gc
import inspect
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from course_lib.budget import Recipe, estimate
from course_lib.budget.device import OnDevice, host_state_bytes
from course_lib.budget.frameworks import OPTIMIZER_ARGUMENTS
from course_lib.budget.optimizers import LR, OPTIMIZERS, Lion
from course_lib.models import Decoder, random_tokens
from course_lib.offload import OffloadedOptimizer
from course_lib.simulated import SimulatedDevice

ROWS = pytest.mark.parametrize("row", OPTIMIZERS.values(), ids=OPTIMIZERS)


def stepped(row):
    """Return two parameters with gradients, and the row's optimizer after a step."""
    weights = [nn.Parameter(torch.randn(64, 64)) for _ in range(2)]
    for weight in weights:
        weight.grad = torch.randn(64, 64)
    optimizer = row.base(weights, lr=LR, **row.updates[None], **row.settings)
    optimizer.step()
    return weights, optimizer


def state_of(optimizer, weight):
    return [value for value in optimizer.state[weight].values() if torch.is_tensor(value)]


# ---- the table


@ROWS
def test_a_row_states_the_size_of_the_state_and_what_the_host_reads_and_writes(row):
    (weight, _), optimizer = stepped(row)
    state = state_of(optimizer, weight)
    if not row.can_offload_state:
        assert 0 < sum(tensor.nbytes for tensor in state) < weight.nbytes
        with pytest.raises(ValueError, match="state_tensors must be a whole number"):
            row.host_update_bytes  # noqa: B018
        return
    assert sum(tensor.shape == weight.shape for tensor in state) == row.state_tensors
    # The step counter of Adam is one number per parameter tensor, and not counted per parameter.
    # The gradient is read, and all else is read and written.
    written = sum(tensor.nbytes for tensor in (weight, *state) if tensor.dim())
    assert row.host_update_bytes * weight.numel() == weight.grad.nbytes + 2 * written


def host_tensors(device):
    """Storages in host memory, each once, apart from single numbers such as Adam's step counter."""
    gc.collect()
    tensors = [
        each
        for each in gc.get_objects()
        if type(each) in (torch.Tensor, nn.Parameter)
        and each.layout is torch.strided
        and not each.is_nested
    ]
    storages = {each.untyped_storage().data_ptr(): each for each in tensors if each.dim()}
    held = {each.untyped_storage().data_ptr() for each in tensors if device.holds(each)}
    return {
        address: each.untyped_storage().nbytes()
        for address, each in storages.items()
        if address not in held
    }


STEP = (
    partial(Decoder, vocabulary=61, hidden=32, heads=4, layers=2, sequence=24),
    partial(random_tokens, 2, 24, 61),
)


@pytest.mark.parametrize(
    ("name", "precision"), [("adam", "fp32"), *((name, "bf16") for name in OPTIMIZERS)]
)
def test_the_host_keeps_the_bytes_that_an_estimate_says(name, precision):
    (make, batch), row = STEP, OPTIMIZERS[name]
    recipe = Recipe(precision, name, offload_optimizer=float(row.can_offload_state))
    found = host_state_bytes(estimate(make, batch, recipe, tier="host"))
    if not row.can_offload_state:
        assert found == 0
        return
    before = host_tensors(SimulatedDevice())
    with SimulatedDevice() as device:
        model, tokens = device.move(make().to(recipe.dtype)), device.move(batch())
        optimizer = OffloadedOptimizer(model.parameters(), row.base, lr=LR, **row.settings)
        for _ in range(2):
            model.loss_sum(tokens)[0].backward()
            optimizer.step()
            optimizer.zero_grad()
        kept = host_tensors(device)
    assert found == sum(size for address, size in kept.items() if address not in before)
    assert host_state_bytes(estimate(make, batch, recipe, tier="file")) == 0


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_the_table_for_a_gpu_shows_what_the_host_keeps_if_something_is_offloaded(fraction):
    recipe = Recipe(precision="bf16", offload_optimizer=fraction)
    found = estimate(*STEP, recipe, tier="host", kind="cuda")
    caption = OnDevice.from_estimate(found, "RTX 4090", None).caption()
    megabytes = f"{12 * sum(p.numel() for p in STEP[0]().parameters()) / 1e6:,.1f} MB"
    assert (megabytes in caption and "12 bytes" in caption) if fraction else caption == ""


@ROWS
def test_a_row_says_whether_parameters_share_a_tensor_of_the_state(row):
    weights, optimizer = stepped(row)
    first, second = ({id(each) for each in state_of(optimizer, weight)} for weight in weights)
    assert bool(first & second) == row.shares_state


@pytest.mark.parametrize(
    ("attribute", "value"),
    [("default_on_cuda", "fused"), ("updates", {"loop": {}}), ("state_tensors", -1)],
)
def test_a_row_refuses_attributes_that_contradict_each_other(attribute, value):
    with pytest.raises(ValueError, match=f"^{attribute} must"):
        replace(OPTIMIZERS["adafactor"], **{attribute: value})


def test_no_alias_names_two_optimizers_and_the_docstring_of_a_recipe_names_each():
    names = [*OPTIMIZERS, *(alias for row in OPTIMIZERS.values() for alias in row.aliases)]
    assert len(names) == len(set(names))
    document = inspect.getdoc(Recipe)
    missing = [name for name in OPTIMIZERS if f'"{name}"' not in document]
    assert missing == [], "the docstring of Recipe must name these optimizers"


def test_each_optimizer_has_arguments_for_the_trainer():
    assert set(OPTIMIZER_ARGUMENTS) == set(OPTIMIZERS)


# ---- formulas


def lion_by_the_formula(weights, gradients, lr, betas=(0.9, 0.99), weight_decay=0.0):
    """Algorithm 2 of arXiv:2302.06675 in float64, number by number for one tensor."""
    momentum = torch.zeros_like(weights)
    for gradient in gradients:
        direction = (betas[0] * momentum + (1 - betas[0]) * gradient).sign()
        weights = weights - lr * (direction + weight_decay * weights)
        momentum = betas[1] * momentum + (1 - betas[1]) * gradient
    return weights, momentum


# Optimizer -> function (weights, gradients, lr) that returns the weights after the steps, and then
# the tensors of the state.
FORMULAS = {"lion": lion_by_the_formula}


@ROWS
def test_an_optimizer_that_the_course_wrote_has_a_formula(row):
    """Other classes run the update of PyTorch or, as "adam8bit", that of another package."""
    in_library = row.base.__module__ == Lion.__module__ and row.load_base is None
    written_here = in_library and row.base.__bases__ == (torch.optim.Optimizer,)
    named = [name for name in FORMULAS if OPTIMIZERS[name] is row]
    assert bool(named) == written_here, "add its formula to FORMULAS"


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, OPTIMIZERS[name].settings) for name in FORMULAS),
        ("lion", {"betas": (0.5, 0.7), "weight_decay": 0.3}),
    ],
)
@pytest.mark.parametrize("offload", [False, True], ids=["memory", "file"])
def test_an_optimizer_steps_as_its_formula_says(name, settings, offload):
    draw, base = partial(torch.randn, dtype=torch.float64), OPTIMIZERS[name].base
    starts = [draw(7, 5), draw(11)]
    gradients = [[draw(start.shape) for _ in range(6)] for start in starts]
    weights = [nn.Parameter(start.clone()) for start in starts]
    options = {"lr": 0.02, **settings}
    optimizer = (
        OffloadedOptimizer(weights, base, **options) if offload else base(weights, **options)
    )
    for step in range(6):
        for weight, steps in zip(weights, gradients, strict=True):
            weight.grad = steps[step].clone()
        optimizer.step()
    for weight, start, steps in zip(weights, starts, gradients, strict=True):
        expected, *state = FORMULAS[name](start, steps, **options)
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-13, atol=1e-13)
        found = state_of(optimizer, weight)
        torch.testing.assert_close(found, state, rtol=1e-13, atol=1e-13)


def test_lion_leaves_parameters_without_a_gradient_and_returns_the_loss():
    with_gradient, without = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = Lion([with_gradient, without], weight_decay=0.5)

    def closure():
        optimizer.zero_grad()
        loss = with_gradient.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 3
    assert (with_gradient < 1).all() and (without == 1).all() and without not in optimizer.state
