"""course_lib.budget.optimizers: the table agrees with the classes that it lists."""

import gc
import sys
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

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
    (weight, other), optimizer = stepped(row)
    state = state_of(optimizer, weight)
    shared = set(map(id, state)) & set(map(id, state_of(optimizer, other)))
    assert bool(shared) == row.shares_state
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
    sizes, held = {}, set()
    for each in gc.get_objects():
        plain = type(each) in (torch.Tensor, nn.Parameter) and each.layout is torch.strided
        if plain and not each.is_nested and each.dim():
            storage = each.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            if device.holds(each):
                held.add(storage.data_ptr())
    return {address: size for address, size in sizes.items() if address not in held}


STEP = (
    partial(Decoder, vocabulary=61, hidden=32, heads=4, layers=2, sequence=24),
    partial(random_tokens, 2, 24, 61),
)


@pytest.mark.parametrize(
    ("name", "precision", "most"),
    [("adam", "fp32", 0.5), *((name, "bf16", 1.0) for name in OPTIMIZERS)],
)
def test_the_host_keeps_the_bytes_that_an_estimate_says(name, precision, most):
    (make, batch), row = STEP, OPTIMIZERS[name]
    fraction = most if row.can_offload_state else 0.0
    recipe = Recipe(precision, name, offload_optimizer=fraction)
    found = host_state_bytes(estimate(make, batch, recipe, tier="host"))
    if not row.can_offload_state:
        assert found == 0
        return
    before = host_tensors(SimulatedDevice())
    with SimulatedDevice() as device:
        model, tokens = device.move(make().to(recipe.dtype)), device.move(batch())
        options = {"lr": LR, "fraction": fraction, **row.settings}
        optimizer = OffloadedOptimizer(model.parameters(), row.base, **options)
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


@pytest.mark.parametrize(
    ("attribute", "value"),
    [("default_on_cuda", "fused"), ("updates", {"loop": {}}), ("state_tensors", -1)],
)
def test_a_row_refuses_attributes_that_contradict_each_other(attribute, value):
    with pytest.raises(ValueError, match=f"^{attribute} must"):
        replace(OPTIMIZERS["adafactor"], **{attribute: value})


def variant_that_runs(row):
    """Return the variant that a class chooses where PyTorch supports each one, as on CUDA."""
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    supported = {"return_value": ["cpu"]}
    seen = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    module = sys.modules[torch.optim.Optimizer.__module__]
    with (
        patch.object(module, "_get_foreach_kernels_supported_devices", **supported),
        patch.object(module, "_get_fused_kernels_supported_devices", **supported),
    ):
        optimizer = row.base([parameter], lr=0.1, **row.settings, **row.updates[None])
        with Recorder():
            optimizer.step()
    for variant in ("fused", "foreach"):
        if any(f"aten._{variant}_" in name for name in seen):
            return variant
    return "loop"


# bitsandbytes, whose class needs a GPU, updates one parameter after the other.
OF_PYTORCH = [name for name, row in OPTIMIZERS.items() if row.load_base is None]


@pytest.mark.parametrize("name", OF_PYTORCH)
def test_default_on_cuda_is_the_variant_that_the_class_runs(name):
    assert variant_that_runs(OPTIMIZERS[name]) == OPTIMIZERS[name].default_on_cuda


def test_wrong_default_on_cuda_is_noticed():
    """PyTorch's RMSprop runs "foreach" on CUDA, although a row could claim to have only a loop."""
    row = replace(OPTIMIZERS["lion"], base=torch.optim.RMSprop)
    assert row.default_on_cuda == "loop" and variant_that_runs(row) == "foreach"


def test_an_optimizer_has_its_own_names_arguments_for_the_trainer_and_a_place_in_the_docstring():
    names = [*OPTIMIZERS, *(alias for row in OPTIMIZERS.values() for alias in row.aliases)]
    assert len(names) == len(set(names)) and set(OPTIMIZER_ARGUMENTS) == set(OPTIMIZERS)
    assert [name for name in OPTIMIZERS if f'"{name}"' not in Recipe.__doc__] == []


# ---- formulas


def lion_by_the_formula(weights, gradients, lr, betas=(0.9, 0.99), weight_decay=0.0):
    """Algorithm 2 of arXiv:2302.06675 in float64, number by number for one tensor."""
    momentum = torch.zeros_like(weights)
    for gradient in gradients:
        direction = (betas[0] * momentum + (1 - betas[0]) * gradient).sign()
        weights = weights - lr * (direction + weight_decay * weights)
        momentum = betas[1] * momentum + (1 - betas[1]) * gradient
    return weights, momentum


@pytest.mark.parametrize("settings", [{}, {"betas": (0.5, 0.7), "weight_decay": 0.3}])
@pytest.mark.parametrize("base", [Lion, partial(OffloadedOptimizer, base=Lion)])
def test_lion_steps_as_its_formula_says(base, settings):
    """All other optimizers run the update of PyTorch or of another package."""
    draw = partial(torch.randn, dtype=torch.float64)
    starts = [draw(7, 5), draw(11)]
    gradients = [[draw(start.shape) for _ in range(6)] for start in starts]
    weights = [nn.Parameter(start.clone()) for start in starts]
    optimizer = base(weights, lr=0.02, **settings)
    for step in range(6):
        for weight, steps in zip(weights, gradients, strict=True):
            weight.grad = steps[step].clone()
        optimizer.step()
    for weight, start, steps in zip(weights, starts, gradients, strict=True):
        expected = lion_by_the_formula(start, steps, 0.02, **settings)
        found = weight.detach(), *state_of(optimizer, weight)
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


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
