"""The table of optimizers agrees with the classes, Muon with PyTorch, Lion with its formula."""

import gc
import re
import sys
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from estimate_checks import assert_measured
from torch import nn

from course_lib.budget import Recipe, build, estimate, train_step
from course_lib.budget.device import host_state_bytes
from course_lib.budget.frameworks import OPTIMIZER_ARGUMENTS
from course_lib.budget.optimizers import LR, OPTIMIZERS, Lion
from course_lib.budget.step import optimizer_of
from course_lib.memory import MemoryMeter
from course_lib.models import Decoder, random_tokens
from course_lib.offload import OffloadedOptimizer
from course_lib.simulated import SimulatedDevice

ROWS = pytest.mark.parametrize("row", OPTIMIZERS.values(), ids=OPTIMIZERS)


def after_step(row):
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
def test_optimizer_table_has_exact_state_size_and_host_update_bytes(row):
    (weight, other), optimizer = after_step(row)
    state = state_of(optimizer, weight)
    shared = set(map(id, state)) & set(map(id, state_of(optimizer, other)))
    assert bool(shared) == row.shares_state
    if not row.can_offload_state:
        assert 0 < sum(tensor.nbytes for tensor in state) < weight.nbytes + bool(row.rest)
        with pytest.raises(ValueError, match="state_tensors must be the number"):
            row.host_update_bytes  # noqa: B018
        return
    assert sum(tensor.shape == weight.shape for tensor in state) == row.state_tensors
    # Adam's step counter is not counted, because it is one number per parameter tensor.
    # The gradient is read, and all other tensors are read and written.
    written = sum(tensor.nbytes for tensor in (weight, *state) if tensor.dim())
    assert row.host_update_bytes * weight.numel() == weight.grad.nbytes + 2 * written


def host_tensors(device):
    """Return address -> bytes of the storages in host memory, except those of single numbers."""
    gc.collect()
    sizes, on_device = {}, set()
    for each in gc.get_objects():
        plain = type(each) in (torch.Tensor, nn.Parameter) and each.layout is torch.strided
        if plain and not each.is_nested and each.dim():
            storage = each.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            if device.holds(each):
                on_device.add(storage.data_ptr())
    return {address: size for address, size in sizes.items() if address not in on_device}


STEP = (
    partial(Decoder, vocabulary=61, hidden=32, heads=4, layers=2, sequence=24),
    partial(random_tokens, 2, 24, 61),
)


OFFLOADED = [name for name, row in OPTIMIZERS.items() if row.can_offload_state]


@pytest.mark.parametrize(
    ("name", "precision", "fraction"),
    [("adam", "fp32", 0.5), *((name, "bf16", 1.0) for name in OFFLOADED)],
)
def test_host_state_bytes_equal_bytes_of_tensors_in_host_memory(name, precision, fraction):
    (make, batch), row = STEP, OPTIMIZERS[name]
    recipe = Recipe(precision, name, offload_optimizer=fraction)
    found = host_state_bytes(estimate(make, batch, recipe, tier="host"))
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


def variant_that_runs(row):
    """Return the variant that a class chooses where PyTorch supports each one, as on CUDA."""
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    parameter.grad = torch.ones(4, 4)
    supported = {"return_value": ["cpu"]}
    module = sys.modules[torch.optim.Optimizer.__module__]
    with (
        patch.object(module, "_get_foreach_kernels_supported_devices", **supported),
        patch.object(module, "_get_fused_kernels_supported_devices", **supported),
    ):
        optimizer = row.base([parameter], lr=0.1, **row.settings, **row.updates[None])
        with MemoryMeter() as meter:
            optimizer.step()
    operators = " ".join(sample.operator for sample in meter.timeline)
    return next((name for name in ("fused", "foreach") if f"_{name}_" in operators), "loop")


# bitsandbytes, whose class needs a GPU, updates one parameter after the other.
OF_PYTORCH = [name for name, row in OPTIMIZERS.items() if row.load_base is None]


@pytest.mark.parametrize("name", OF_PYTORCH)
def test_default_cuda_update_in_table_equals_update_pytorch_runs(name):
    assert variant_that_runs(OPTIMIZERS[name]) == OPTIMIZERS[name].default_on_cuda


def test_every_optimizer_has_trainer_arguments_and_documentation():
    names = [*OPTIMIZERS, *(alias for row in OPTIMIZERS.values() for alias in row.aliases)]
    assert len(names) == len(set(names)) and set(OPTIMIZER_ARGUMENTS) == set(OPTIMIZERS)
    assert [name for name in OPTIMIZERS if f'"{name}"' not in Recipe.__doc__] == []


# ---- Muon for the matrices in blocks, and AdamW for the other parameters


class LanguageModel(nn.Module):
    """Model whose matrices in blocks, which Muon updates, have the shapes of embedding and head."""

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.place = nn.Embedding(3, width)
            self.norm, self.wide = nn.LayerNorm(width), nn.Linear(width, 3 * width)
            self.back = nn.Parameter(torch.randn(3 * width, width) / width)
            self.filter = nn.Parameter(torch.randn(2, 2, width))

        def forward(self, x):
            y = (self.wide(self.norm(x)).tanh() @ self.back) + self.place.weight.sum(0)
            return x + y * self.filter.sum((0, 1))

    def __init__(self, width=24, depth=6):
        super().__init__()
        self.words, self.head = nn.Embedding(3 * width, width), nn.Linear(width, 3 * width)
        self.layers = nn.ModuleList(self.Block(width) for _ in range(depth))

    def loss_sum(self, words):
        x = self.words(words)
        for layer in self.layers:
            x = layer(x)
        scores = self.head(x).flatten(0, 1)
        return nn.functional.cross_entropy(scores, words.flatten(), reduction="sum"), words.numel()


MATRICES = r"layers\.\d\.(wide\.weight|back)"


def batch_of_words():
    return torch.arange(72).view(4, 18)


def is_matrix(name):
    return re.fullmatch(MATRICES, name) is not None


@pytest.mark.parametrize("recipe", [Recipe(), Recipe(micro_batches=2), Recipe(in_backward=True)])
def test_muon_recipe_updates_like_separate_muon_and_adamw(recipe):
    def make_model():
        torch.manual_seed(1)
        return LanguageModel()

    recipe = replace(recipe, optimizer="muon")
    model, optimizer = build(make_model, recipe, lr=0.01)
    expected = make_model()
    matrices, others = (
        [p for name, p in expected.named_parameters() if is_matrix(name) is matrix]
        for matrix in (True, False)
    )
    assert (len(matrices), len(others)) == (12, 6 * 5 + 3)
    both = [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)]

    def copy_gradients(*_):
        for source, target in zip(model.parameters(), expected.parameters(), strict=True):
            if source.grad is not None:
                target.grad = source.grad.clone()

    optimizer.register_step_pre_hook(copy_gradients)
    for _ in range(3):
        train_step(model, optimizer, batch_of_words(), recipe)
        for each in both:
            each.step()
            each.zero_grad()
        torch.testing.assert_close([*model.parameters()], [*expected.parameters()], rtol=0, atol=0)
    # the state can be saved and loaded
    loaded = optimizer_of(model, recipe, lr=0.01)
    loaded.load_state_dict(optimizer.state_dict())
    assert sorted(map(len, loaded.state.values())) == [1] * 12 + [3] * 33
    train_step(model, loaded, batch_of_words(), recipe)


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(),
        Recipe("bf16", checkpoint="layers"),
        Recipe(None, update="loop", micro_batches=2),
        Recipe("bf16", in_backward=True),
    ],
    ids=str,
)
def test_estimate_with_muon_equals_measurement(recipe):
    assert_measured(LanguageModel, batch_of_words, replace(recipe, optimizer="muon"))


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_muon_recipe_updates_other_parameters_with_foreach_adamw_on_cuda(kind):
    found = estimate(LanguageModel, batch_of_words, Recipe(optimizer="muon"), kind=kind).trace()
    assert any("_foreach_lerp" in str(operator) for operator, _ in found.operators) == (
        kind == "cuda"
    )


def test_muon_rejects_unsuitable_model_and_offloaded_state():
    with pytest.raises(ValueError, match=r"^optimizer 'muon' needs two-dimensional"):
        estimate(partial(nn.Linear, 2, 2), partial(torch.ones, 1, 2), Recipe(optimizer="muon"))
    with pytest.raises(ValueError, match=r"^offload_optimizer must be 0 .*'muon', got 0\.5"):
        Recipe(optimizer="muon", offload_optimizer=0.5)


# ---- formulas


def lion_by_formula(weights, gradients, lr, betas=(0.9, 0.99), weight_decay=0.0):
    """Algorithm 2 of arXiv:2302.06675 in float64, number by number for one tensor."""
    momentum = torch.zeros_like(weights)
    for gradient in gradients:
        direction = (betas[0] * momentum + (1 - betas[0]) * gradient).sign()
        weights = weights - lr * (direction + weight_decay * weights)
        momentum = betas[1] * momentum + (1 - betas[1]) * gradient
    return weights, momentum


@pytest.mark.parametrize("settings", [{}, {"betas": (0.5, 0.7), "weight_decay": 0.3}])
@pytest.mark.parametrize("base", [Lion, partial(OffloadedOptimizer, base=Lion)])
def test_lion_updates_equal_its_formula_in_float64(base, settings):
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
        expected = lion_by_formula(start, steps, 0.02, **settings)
        found = weight.detach(), *state_of(optimizer, weight)
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


def test_lion_skips_parameters_without_gradient_and_returns_loss():
    with_gradient, without = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = Lion([with_gradient, without], weight_decay=0.5)

    def closure():
        optimizer.zero_grad()
        loss = with_gradient.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 3
    assert (with_gradient < 1).all() and (without == 1).all() and without not in optimizer.state
