"""course_lib.budget.optimizers: the table agrees with the classes that it lists."""

import gc
import inspect
from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from torch import nn

from course_lib.budget import RATES, Recipe, estimate, fit
from course_lib.budget import __main__ as command
from course_lib.budget.device import OnDevice, host_state_bytes
from course_lib.budget.optimizers import LR, OPTIMIZERS, Lion, OptimizerRow
from course_lib.models import Decoder, random_tokens
from course_lib.offload import OffloadedOptimizer
from course_lib.simulated import SimulatedDevice

ROWS = pytest.mark.parametrize("row", OPTIMIZERS.values(), ids=OPTIMIZERS)


def stepped(row, update=None, size=64):
    """Two parameters with gradients, and the row's optimizer after a step of theirs."""
    weights = [nn.Parameter(torch.randn(size, size)) for _ in range(2)]
    for weight in weights:
        weight.grad = torch.randn(size, size)
    optimizer = row.base(weights, lr=LR, **row.updates[update], **row.settings)
    optimizer.step()
    return weights, optimizer


def state_of(optimizer, weight):
    return [value for value in optimizer.state[weight].values() if torch.is_tensor(value)]


# ---- the table


@ROWS
def test_a_row_states_the_size_of_the_state(row):
    (weight, _), optimizer = stepped(row)
    state = state_of(optimizer, weight)
    if row.can_offload_state:
        assert sum(tensor.shape == weight.shape for tensor in state) == row.state_tensors
    else:
        assert 0 < sum(tensor.nbytes for tensor in state) < weight.nbytes


@ROWS
def test_the_host_reads_gradient_weight_and_state_and_writes_all_but_the_gradient(row):
    (weight, _), optimizer = stepped(row)
    if not row.can_offload_state:
        with pytest.raises(ValueError, match="state_tensors must be a whole number"):
            row.host_update_bytes  # noqa: B018
        return
    # The step counter of Adam is one number per parameter tensor, and not counted per parameter.
    held = [weight, *(tensor for tensor in state_of(optimizer, weight) if tensor.dim())]
    written = sum(tensor.nbytes for tensor in held)
    assert row.host_update_bytes * weight.numel() == weight.grad.nbytes + 2 * written


def host_tensors(device):
    """Storages in host memory, each once, apart from single numbers such as Adam's step counter."""
    gc.collect()
    kinds = torch.Tensor, nn.Parameter
    tensors = [
        each
        for each in gc.get_objects()
        if type(each) in kinds and each.layout is torch.strided and not each.is_nested
    ]
    found = {
        each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors if each.dim()
    }
    held = {each.untyped_storage().data_ptr() for each in tensors if device.holds(each)}
    return {address: each for address, each in found.items() if address not in held}


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@ROWS
def test_the_host_keeps_the_bytes_that_an_estimate_says(row, precision):
    name = next(name for name, each in OPTIMIZERS.items() if each is row)
    make = partial(Decoder, vocabulary=61, hidden=32, heads=4, layers=2, sequence=24)
    batch = partial(random_tokens, 2, 24, 61)
    if not row.can_offload_state:
        plain = estimate(make, batch, Recipe(optimizer=name, precision=precision), tier="host")
        assert host_state_bytes(plain) == 0
        return
    recipe = Recipe(optimizer=name, precision=precision, offload_optimizer=1.0)
    before = host_tensors(SimulatedDevice())
    with SimulatedDevice() as device:
        model, tokens = device.move(make().to(recipe.dtype)), device.move(batch())
        optimizer = OffloadedOptimizer(model.parameters(), row.base, lr=LR, **row.settings)
        for _ in range(2):
            model.loss_sum(tokens)[0].backward()
            optimizer.step()
            optimizer.zero_grad()
        kept = {a: each for a, each in host_tensors(device).items() if a not in before}
        held = sum(each.nbytes() for each in kept.values())
    assert host_state_bytes(estimate(make, batch, recipe, tier="host")) == held
    assert host_state_bytes(estimate(make, batch, recipe, tier="file")) == 0


def test_the_table_for_a_gpu_shows_what_the_host_keeps_if_something_is_offloaded():
    make = partial(Decoder, vocabulary=61, hidden=32, heads=4, layers=2, sequence=24)
    batch = partial(random_tokens, 2, 24, 61)
    captions = {}
    for fraction in (0.0, 1.0):
        recipe = Recipe(precision="bf16", offload_optimizer=fraction)
        found = estimate(make, batch, recipe, tier="host", kind="cuda")
        captions[fraction] = OnDevice.from_estimate(found, "RTX 4090", None).caption()
    megabytes = f"{12 * sum(p.numel() for p in make().parameters()) / 1e6:,.1f}"
    assert captions == {
        0.0: "",
        1.0: f"the host's memory holds {megabytes} MB of optimizer state, 12 bytes per parameter",
    }


@ROWS
def test_a_row_says_whether_parameters_share_a_tensor_of_the_state(row):
    weights, optimizer = stepped(row)
    first, second = ({id(each) for each in state_of(optimizer, weight)} for weight in weights)
    assert bool(first & second) == row.shares_state


@ROWS
def test_the_class_runs_every_variant_that_the_row_has(row):
    for update in row.updates:
        (weight, _), optimizer = stepped(row, update)
        assert weight in optimizer.state or row.state_tensors == 0


@pytest.mark.parametrize("name", [field.name for field in fields(OptimizerRow)])
def test_a_row_that_lacks_an_attribute_cannot_be_made(name):
    attributes = {f.name: getattr(OPTIMIZERS["adam"], f.name) for f in fields(OptimizerRow)}
    assert OptimizerRow(**attributes) == OPTIMIZERS["adam"]
    del attributes[name]
    with pytest.raises(TypeError, match=f"'{name}'"):
        OptimizerRow(**attributes)


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("default_on_cuda", "fused", "default_on_cuda must be None, 'loop' or 'foreach', got 'fu"),
        ("updates", {"loop": {}}, r"updates must contain None, got \['loop'\]"),
        ("state_tensors", -1, "state_tensors must be a whole number, at least 0, got -1"),
    ],
)
def test_a_row_refuses_attributes_that_contradict_each_other(attribute, value, message):
    with pytest.raises(ValueError, match=message):
        replace(OPTIMIZERS["adafactor"], **{attribute: value})


def test_no_alias_is_the_name_of_an_optimizer_or_names_two():
    names = [*OPTIMIZERS, *(alias for row in OPTIMIZERS.values() for alias in row.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_docstring_of_a_recipe_names_every_optimizer(name):
    assert f'"{name}"' in inspect.getdoc(Recipe)


# ---- formulas


def lion_by_the_formula(weights, gradients, lr, betas=(0.9, 0.99), weight_decay=0.0):
    """Algorithm 2 of arXiv:2302.06675 in float64, number by number for one tensor."""
    momentum = torch.zeros_like(weights)
    for gradient in gradients:
        direction = (betas[0] * momentum + (1 - betas[0]) * gradient).sign()
        weights = weights - lr * (direction + weight_decay * weights)
        momentum = betas[1] * momentum + (1 - betas[1]) * gradient
    return weights, momentum


# Optimizer -> function (weights, gradients, lr) that returns the weights after the steps first.
FORMULAS = {"lion": lion_by_the_formula}


@ROWS
def test_an_optimizer_that_the_course_wrote_has_a_formula(row):
    """Other classes run the update of PyTorch or, as "adam8bit", that of another package."""
    in_library = row.base.__module__ == Lion.__module__ and row.load_base is None
    written_here = in_library and row.base.__bases__ == (torch.optim.Optimizer,)
    named = [name for name in FORMULAS if OPTIMIZERS[name] is row]
    assert bool(named) == written_here, "add its formula to FORMULAS"


@pytest.mark.parametrize("name", FORMULAS)
def test_an_optimizer_steps_as_its_formula_says(name):
    draw = partial(torch.randn, 7, 5, dtype=torch.float64)
    start, gradients = draw(), [draw() for _ in range(4)]
    weight, row = nn.Parameter(start.clone()), OPTIMIZERS[name]
    optimizer = row.base([weight], lr=0.02, **row.settings)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    expected, *_ = FORMULAS[name](start, gradients, lr=0.02, **row.settings)
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-13, atol=1e-13)


# ---- Lion


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.5, 0.7)], ids=str)
@pytest.mark.parametrize("offload", [False, True], ids=["memory", "file"])
def test_lion_steps_as_the_formula_says(betas, weight_decay, offload):
    settings = {"lr": 0.02, "betas": betas, "weight_decay": weight_decay}
    generator = torch.Generator().manual_seed(3)
    draw = partial(torch.randn, dtype=torch.float64, generator=generator)
    starts = [draw(7, 5), draw(11)]
    gradients = [[draw(start.shape) for _ in range(6)] for start in starts]
    weights = [nn.Parameter(start.clone()) for start in starts]
    base = OffloadedOptimizer if offload else Lion
    optimizer = base(weights, *([Lion] if offload else []), **settings)
    for step in range(6):
        for weight, steps in zip(weights, gradients, strict=True):
            weight.grad = steps[step].clone()
        optimizer.step()
    for weight, start, steps in zip(weights, starts, gradients, strict=True):
        expected, momentum = lion_by_the_formula(start, steps, **settings)
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-13, atol=1e-13)
        found = optimizer.state[weight]["momentum"]
        torch.testing.assert_close(found, momentum, rtol=1e-13, atol=1e-13)


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


SIZES = {"vocabulary": 61, "hidden": 32, "heads": 4, "layers": 3, "sequence": 24}
STEP = partial(Decoder, **SIZES), partial(random_tokens, 5, 24, 61)


@pytest.mark.parametrize(("precision", "per_parameter"), [("fp32", 4), ("bf16", 8)])
def test_the_state_of_lion_is_one_momentum_and_the_master_weight(precision, per_parameter):
    parameters = sum(p.numel() for p in STEP[0]().parameters())
    found = estimate(*STEP, Recipe(precision, "lion", checkpoint="layers", micro_batches=5))
    assert found.at_peak["optimizer"] == per_parameter * parameters


def test_fit_finds_recipes_with_lion_and_prices_its_update_on_the_host():
    base = Recipe(optimizer="lion")
    budget = estimate(*STEP, base).peak_bytes * 2 // 3
    found = fit(*STEP, budget, base=base, tier="host", quick=True, progress=False)
    assert found and all(
        each.recipe.optimizer == "lion" and each.peak_bytes <= budget for each in found
    )
    rates = RATES["H100"]
    moved = estimate(*STEP, replace(base, offload_optimizer=1.0), tier="host")
    parameters = sum(p.numel() for p in STEP[0]().parameters())
    # Five fp32 numbers per parameter: it reads the parameter, the gradient and the momentum, and
    # writes the parameter and the momentum.
    seconds = parameters * 5 * 4 / rates.host_bytes
    assert rates.parts(moved)["update"] == pytest.approx(seconds, rel=1e-12) and seconds > 0


@pytest.mark.parametrize("update", ["foreach", "fused"])
def test_a_recipe_refuses_the_variants_that_lion_does_not_have(update):
    message = f"update must be None or 'loop' when optimizer is 'lion', got '{update}'"
    with pytest.raises(ValueError, match=message):
        Recipe(optimizer="lion", update=update)


def test_the_command_accepts_lion(capsys):
    size = ["--hidden", "64", "--layers", "2", "--vocabulary", "97", "--sequence", "16"]
    options = ["--batch", "2", "--budget", "2MB", "--device", "laptop", "--quick"]
    assert command.main([*size, *options, "--optimizer", "Lion"]) == 0
    assert "lion" in capsys.readouterr().out
