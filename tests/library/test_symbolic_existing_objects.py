"""`estimate` with an existing model, batch and optimizer, against their next steps."""

import copy
from functools import partial

import pytest
import torch
from hugging_face_models import ARCHITECTURES
from torch import nn
from training_steps import metered

from course_lib.budget import RATES, Rates, Recipe, estimate, run, train_step
from course_lib.checkpoint import checkpoint_blocks

UNCHANGED = Recipe(precision=None, attention=None)


def squares(model, batch):
    return (model(batch[0]) - batch[1]).square().sum(), len(batch[0])


def tied():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 1))
    model[2].weight = model[0].weight
    return model


def wide():
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 1))


def one_storage():
    model, numbers = wide(), torch.randn(64 * 64 + 64)
    model[2].weight = nn.Parameter(numbers[: 64 * 64].view(64, 64).T)
    model[3].weight = nn.Parameter(numbers[64 * 64 :].view(1, 64))
    return model


def points(samples=4):
    return torch.randn(samples, 8), torch.randn(samples, 1)


def frozen_bf16():
    model = tied().bfloat16().requires_grad_(False)
    model[-1] = nn.Sequential(nn.Linear(8, 1).bfloat16())
    return model


class HalfUsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)
        self.used.weight.gain = 2.0

    def forward(self, x):
        return self.used(x) * self.used.weight.gain


class CountingSGD(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.calls = 0

    def step(self, closure=None):
        self.calls += 1
        return super().step(closure)


def penalty(model, batch):
    (gradient,) = torch.autograd.grad(model(batch[0]).sum(), batch[0], create_graph=True)
    return gradient.square().sum(), len(batch[0])


def optimizer_of(make, **options):
    return lambda model: make([p for p in model.parameters() if p.requires_grad], **options)


adamw = optimizer_of(torch.optim.AdamW)
CASES = {
    "tied weights": (tied, points, squares, optimizer_of(torch.optim.RMSprop, foreach=True)),
    "frozen, bf16": (
        frozen_bf16,
        lambda: tuple(x.bfloat16() for x in points()),
        squares,
        optimizer_of(torch.optim.SGD, momentum=0.9),
    ),
    "weights in one storage": (one_storage, points, squares, adamw),
    "speech": (*ARCHITECTURES["speech"][:2], None, adamw),
    "a layer without gradient": (HalfUsed, points, squares, adamw),
    "some parameters": (wide, points, squares, lambda m: torch.optim.AdamW(m[2:].parameters())),
    "own attributes": (wide, points, squares, optimizer_of(CountingSGD)),
    "gradient penalty": (
        wide,
        lambda: (torch.randn(4, 8, requires_grad=True), torch.randn(4, 1)),
        penalty,
        optimizer_of(torch.optim.SGD),
    ),
}


def tensors_of(model, optimizer):
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [*model.state_dict().values(), *state, *grads, torch.get_rng_state()]


@pytest.mark.parametrize("name", CASES)
def test_estimate_of_existing_model_and_optimizer_equals_measured_step(name):
    make_model, make_batch, loss_sum, make_optimizer = CASES[name]
    model, batch = make_model(), make_batch()
    optimizer = make_optimizer(model)
    estimate_of = partial(estimate, model, batch, optimizer, loss_sum=loss_sum)
    before = copy.deepcopy(tensors_of(model, optimizer))
    first = estimate_of()
    assert all(map(torch.equal, before, tensors_of(model, optimizer)))
    step = partial(train_step, model, optimizer, batch, UNCHANGED, loss_sum=loss_sum)
    step()
    meter = metered(step, model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = copy.deepcopy(tensors_of(model, optimizer))
    assert first.peak_bytes == estimate_of().peak_bytes == meter.peak_bytes
    assert first.trace().peak_bytes == first.peak_bytes
    assert all(map(torch.equal, before, tensors_of(model, optimizer)))
    assert getattr(optimizer, "calls", 2) == 2


def test_estimate_from_make_functions_equals_estimate_of_existing_objects():
    options = {"loss_sum": squares}
    functions = estimate(tied, points, torch.optim.AdamW, **options)
    existing = tied()
    assert functions == estimate(
        existing, points, torch.optim.AdamW(existing.parameters()), **options
    )
    assert str(functions.caption()).startswith("the unchanged model, AdamW")
    plain = estimate(existing, points(), **options)
    assert plain == estimate(tied, points, Recipe(), **options)
    recipe = Recipe(micro_batches=2, optimizer="sgd")
    measured = run(wide, points, recipe, **options).meter.peak_bytes
    assert estimate(wide(), points(), recipe, **options).peak_bytes == measured


def test_estimate_for_cuda_uses_pytorch_default_update():
    make = partial(estimate, wide, points, loss_sum=squares, kind="cuda")
    loop = partial(torch.optim.AdamW, foreach=False)
    for optimizer, update in ((torch.optim.AdamW, "foreach"), (loop, "loop")):
        recipe = Recipe(precision=None, attention=None, update=update)
        assert make(optimizer).peak_bytes == make(recipe).peak_bytes
    assert make(torch.optim.AdamW).peak_bytes != make(loop).peak_bytes


def test_fits_method_counts_reserved_memory_workspace_and_cuda_context():
    found = estimate(tied, points, torch.optim.AdamW, loss_sum=squares)
    on_gpu = estimate(tied, points, torch.optim.AdamW, loss_sum=squares, kind="cuda", tier="host")
    kept = RATES["A100"].context_bytes + 2 * 8320 * 1024
    needed = on_gpu.reserved_bytes() + kept
    assert found.fits("A100", needed) and not found.fits("A100", needed - 1)
    assert found.fits("RTX 4090")
    host = Rates(1e12, 1e12, 1e9, memory_bytes=found.peak_bytes)
    assert found.fits(host) and not found.fits(host, found.peak_bytes - 1)
    with pytest.raises(ValueError, match="memory_bytes must be given"):
        found.fits("laptop")
    with pytest.raises(ValueError, match="device must be one of"):
        found.fits("A1000")


def checkpointed():
    model = wide()
    checkpoint_blocks(model, ["0", "2"])
    return model


def hooked():
    model = wide()
    model[0].weight.register_hook(lambda gradient: gradient)
    return model


class ModelInClosure(nn.Module):
    """Model whose forward calls a function that refers to the model itself."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.run = lambda x: self.layer(x)

    def forward(self, x):
        return self.run(x)


def with_generator():
    model = tied()
    model.numbers = (number for number in range(3))
    return model


@pytest.mark.parametrize(
    ("make", "optimizer", "message"),
    [
        (tied, lambda model: torch.optim.AdamW(tied().parameters()), "optimizer must hold param"),
        (tied, lambda model: torch.optim.LBFGS(model.parameters()), "optimizer must have a step"),
        (tied, lambda model: "adam", "recipe must be a Recipe, got 'adam'"),
        (tied, lambda model: lambda parameters: 3, "recipe must be a Recipe, an optimizer or"),
        (with_generator, lambda model: torch.optim.AdamW, "copy.deepcopy .*pass two functions"),
        (tied, lambda model: torch.optim.Adafactor(model.parameters()), "optimizer='adafactor'"),
        (checkpointed, lambda model: torch.optim.SGD, "run by checkpoint_blocks or by a schedule"),
        (hooked, lambda model: torch.optim.SGD, "no hooks on parameters, got hooks on 0.weight"),
        (ModelInClosure, lambda model: torch.optim.AdamW, "pass a function that creates it"),
    ],
)
def test_estimate_rejects_unsupported_objects_with_advice(make, optimizer, message):
    model = make()
    with pytest.raises((TypeError, ValueError), match=message):
        estimate(model, points(), optimizer(model), loss_sum=squares)
    with pytest.raises(TypeError, match="when model is a function"):
        estimate(make, points, torch.optim.AdamW(model.parameters()), loss_sum=squares)
