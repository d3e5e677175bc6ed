"""Symbolic steps take the bytes of real ones. Symbolic modules are converted as real ones."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from training_steps import Stack, TiedLanguageModel, at_end, one_more_sample, train

from course_lib.memory import MemoryMeter, cast, measure, symbolic
from course_lib.models import Decoder, deep_mlp

SYMBOLIC = {
    "decoder": (
        lambda: Decoder(vocabulary=50, hidden=32, heads=4, layers=2, sequence=16, dropout=0.1),
        lambda: torch.zeros(2, 16, dtype=torch.long),
    ),
    "post-norm, checkpoint": (
        lambda: Stack(norm_first=False, reentrant=False, layers=2, hidden=32),
        lambda: torch.ones(2, 16, 32),
    ),
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)),
        lambda: torch.ones(8, 16),
    ),
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_a_symbolic_step_has_the_same_peak_and_the_same_categories(name):
    def run():
        make_model, make_batch = SYMBOLIC[name]
        with sdpa_kernel(SDPBackend.MATH):
            model, optimizer, step = train(make_model(), make_batch(), optimizer=torch.optim.Adam)
            with MemoryMeter(model, optimizer) as meter:
                step()
        return meter.peak_bytes, meter.at_peak(), meter.live_bytes

    real = run()
    with symbolic():
        assert run() == real


def test_a_symbolic_model_of_seven_billion_parameters_takes_no_memory():
    with symbolic():
        model = nn.Sequential(*(nn.Linear(32768, 32768, bias=False) for _ in range(7)))
        with MemoryMeter(model) as meter:
            model(torch.ones(1, 32768)).sum().backward()
            one_more_sample()
    parameters = 7 * 32768**2
    assert at_end(meter)["parameter"] == at_end(meter)["gradient"] == 4 * parameters


class HalfTied(TiedLanguageModel):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.tokens.weight.requires_grad_(False)


@pytest.mark.parametrize("context", [nullcontext, symbolic])
def test_cast_converts_as_the_modules_own_method_does(context):
    expected = HalfTied().to(torch.bfloat16).state_dict()
    with context():
        model = HalfTied()
        assert cast(model, torch.bfloat16) is model
        found = model.state_dict()
        assert {n: (v.shape, v.dtype) for n, v in found.items()} == {
            n: (v.shape, v.dtype) for n, v in expected.items()
        }
        assert model.head.weight is model.tokens.weight and isinstance(
            model.head.weight, nn.Parameter
        )
        assert not model.head.weight.requires_grad and model.hidden.weight.requires_grad


def test_a_symbolic_module_that_is_as_asked_stays_as_it_is():
    with symbolic():
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        before = [*model.parameters(), *model.buffers()]
        assert model.to("cpu", torch.float32).float() is model
        assert all(
            a is b for a, b in zip([*model.parameters(), *model.buffers()], before, strict=True)
        )
    assert nn.Linear(2, 2).to(torch.bfloat16).weight.dtype == torch.bfloat16


class Keeping(nn.Linear):
    """A module that has its own way to be converted, as rotary embeddings have that keep their
    frequencies in fp32."""

    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("frequencies", torch.ones(3))

    def _apply(self, function, recurse=True):
        kept = self.frequencies
        super()._apply(function, recurse)
        self.frequencies = kept
        return self


CONVERSIONS = {
    "to": lambda model: model.to(torch.bfloat16),
    "half": lambda model: model.half(),
    "double": lambda model: model.double().float(),
    "all": lambda model: model._apply(torch.Tensor.double),  # whole numbers too
    "channels": lambda model: model.to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_a_symbolic_module_is_converted_as_for_real(convert):
    def made():
        model = nn.Sequential(HalfTied(), Keeping(), nn.Conv2d(2, 3, 3, bias=False), nn.LSTM(2, 2))
        found = convert(model)
        tensors = [*found.named_parameters(), *found.named_buffers()]
        assert model[0].head.weight is model[0].tokens.weight and found is model
        return [
            (name, t.shape, t.stride(), t.dtype, t.requires_grad, isinstance(t, nn.Parameter))
            for name, t in tensors
        ]

    expected = made()
    with symbolic():
        assert made() == expected


def test_measure_of_a_symbolic_step_has_bytes_and_flops_and_no_seconds():
    found = []
    for context in (nullcontext(), symbolic()):
        with context:
            model, optimizer, step = train(
                deep_mlp(3, 32), torch.ones(8, 32), optimizer=torch.optim.Adam
            )
            found.append(measure(step, model=model, optimizer=optimizer, repeats=1))
    real, free = found
    assert hash(real) and (free.peak_bytes, free.flops, free.at_peak) == (
        real.peak_bytes,
        real.flops,
        real.at_peak,
    )
    assert (free.allocator_peak_bytes, free.workspace_bytes, free.seconds) == (None, None, None)


def test_random_numbers_are_as_if_there_had_been_no_symbolic_step():
    state = torch.get_rng_state()
    with symbolic():
        assert len(set(torch.randint(0, 10**6, (50,)).tolist())) > 1
        torch.manual_seed(3)
    assert torch.equal(torch.get_rng_state(), state)


def rows_by_a_mask():
    x = torch.randn(4, 6, 3, requires_grad=True)
    mask = torch.arange(24).view(4, 6) % 5 == 0
    h = (x.flatten(0, 1) * 2).view(4, 6, 3)
    h[mask] = torch.ones(3)
    (h[~mask].exp().sum() + h[1].square().sum()).backward()


def rows_by_a_step():
    h = (torch.randn(10, 3, requires_grad=True) * 2).view(2, 5, 3)
    h[0] = torch.zeros(3)
    h[:, 1].mul_(3)
    h.exp().sum().backward()


def norm_before_a_pool():
    x = torch.randn(4, 16, 32, requires_grad=True)
    x = nn.LayerNorm(32)(x + nn.Linear(32, 32)(x.exp())).transpose(1, 2)
    F.adaptive_avg_pool1d(x, 1).square().sum().backward()


@pytest.mark.parametrize(
    "step", [rows_by_a_mask, rows_by_a_step, norm_before_a_pool], ids=lambda f: f.__name__
)
def test_a_symbolic_step_takes_what_the_real_one_takes_where_values_or_strides_matter(step):
    with MemoryMeter() as real:
        step()
    with symbolic(), MemoryMeter() as meter:
        step()
    assert (meter.peak_bytes, meter.at_peak(), meter.live_bytes) == (
        real.peak_bytes,
        real.at_peak(),
        real.live_bytes,
    )


def test_weights_that_are_drawn_again_until_they_are_within_bounds_can_be_symbolic():
    with symbolic():
        weight = nn.init.trunc_normal_(nn.Parameter(torch.empty(5, 5)), std=0.02)
        assert isinstance(weight, nn.Parameter)
    assert nn.init.trunc_normal_(torch.empty(500), a=-0.5, b=0.5).abs().max() <= 0.5


@pytest.mark.parametrize("mode", ["linear", "bilinear", "bicubic", "trilinear"])
def test_what_pytorch_takes_apart_is_symbolic_in_all_its_parts(mode):
    dimensions = {"linear": 1, "trilinear": 3}.get(mode, 2)

    def step():
        x = torch.ones(2, 3, *[6] * dimensions, requires_grad=True)
        with MemoryMeter() as meter:
            F.interpolate(x * 2, scale_factor=2, mode=mode).square().mean().backward()
        return meter.peak_bytes

    with symbolic():
        found = step()
    assert found == step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_symbolic_bag_of_embeddings_takes_what_a_real_one_takes(mode, dtype):
    def step():
        with MemoryMeter() as meter:
            bags = nn.EmbeddingBag(20, 16, mode=mode).to(dtype)
            bags(torch.zeros(8, 5, dtype=torch.int64)).square().mean().backward()
        return meter.peak_bytes

    with symbolic():
        found = step()
    assert found == step()
