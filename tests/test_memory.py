"""The meter against the allocator, `saved_tensors` against hooks, and the formulas against both."""

import copy
import gc
import os
import pickle
import random
import re
import subprocess
import sys
import threading
import weakref
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from patience import HANGS_SECONDS
from torch import nn
from torch._functorch import config as functorch
from torch._subclasses import fake_tensor as _fake
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from course_lib._torch import tensors_in
from course_lib.checkpoint import checkpoint as readable_checkpoint
from course_lib.checkpoint import checkpoint_blocks
from course_lib.memory import (
    CATEGORIES,
    PHASES,
    MemoryBudgetExceeded,
    MemoryMeter,
    attention_saved_bytes,
    cast,
    compiler,
    measure,
    saved_tensors,
    symbolic,
    training_state_bytes,
    transformer_activation_bytes,
)
from course_lib.memory.allocator import allocator_peak, workspace_by_operator
from course_lib.memory.categories import CategoryTracker
from course_lib.memory.growth import Growth, Irregular
from course_lib.memory.measurement import flop_counter
from course_lib.memory.storages import storages_of
from course_lib.models import Decoder, DecoderLayer, Dropout, deep_mlp, random_tokens

os.environ.setdefault("KINETO_LOG_LEVEL", "99")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """So that no workspace depends on the number of cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def same_random_numbers():
    torch.manual_seed(0)
    gc.freeze()  # what is there need not be looked through before each of measure's runs


# ---- workloads: each makes (model, optimizer, step)


def square_mean(y):
    return (y**2).mean()


def train(model, x, loss=square_mean, optimizer=None, **options):
    optimizer = optimizer and optimizer(model.parameters(), **options)

    def step():
        loss(model(x)).backward()
        if optimizer is not None:
            optimizer.step()

    return model, optimizer, step


def mlp(activation=nn.GELU):
    layers = [layer for _ in range(6) for layer in (nn.Linear(128, 128), activation())]
    return train(nn.Sequential(*layers), torch.randn(256, 128), optimizer=torch.optim.Adam)


class Stack(nn.Module):
    """Post-norm or pre-norm layers of PyTorch's own, each under a checkpoint or not."""

    def __init__(self, *, norm_first, reentrant=None, layers=3, hidden=128):
        super().__init__()
        self.reentrant = reentrant
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                hidden, 4, 4 * hidden, dropout=0.1, batch_first=True, norm_first=norm_first
            )
            for _ in range(layers)
        )

    def forward(self, x):
        for layer in self.layers:
            x = (
                layer(x)
                if self.reentrant is None
                else checkpoint(layer, x, use_reentrant=self.reentrant)
            )
        return x


def decoder(norm_first, reentrant):
    x = torch.randn(8, 64, 128, requires_grad=bool(reentrant))
    model, optimizer, plain = train(
        Stack(norm_first=norm_first, reentrant=reentrant), x, optimizer=torch.optim.Adam
    )

    def step():
        with sdpa_kernel(SDPBackend.MATH):
            plain()
        x.grad = None

    return model, optimizer, step


def batch_norm_and_pooling():
    layers = [
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.BatchNorm2d(8),
        nn.AvgPool2d(2),
        nn.AdaptiveAvgPool2d(2),
    ]
    options = {"optimizer": torch.optim.SGD, "lr": 0.1, "momentum": 0.9}
    return train(nn.Sequential(*layers), torch.randn(8, 8, 32, 32), **options)


class TiedLanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.hidden = nn.Embedding(1000, 64), nn.Linear(64, 64)
        self.head = nn.Linear(64, 1000, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        return self.head(F.gelu(self.hidden(self.tokens(tokens))))


def tied_language_model():
    tokens, target = torch.randint(1000, (4, 64)), torch.randint(1000, (256,))
    return train(
        TiedLanguageModel(),
        tokens,
        lambda logits: F.cross_entropy(logits.view(-1, 1000), target),
        optimizer=torch.optim.Adam,
    )


def own_decoder():
    model = Decoder(vocabulary=200, hidden=64, heads=4, layers=2, sequence=32, dropout=0.1)
    return train(model, random_tokens(4, 32, 200)[:, :-1], optimizer=torch.optim.AdamW)


def in_place_views_and_expands():
    model, x = nn.Linear(128, 128), torch.randn(64, 128)

    def step():
        y = model(x).view(64, 8, 16).transpose(1, 2).expand(4, 64, 16, 8) * 2
        y += 1
        y.mul_(y.detach() + 1)
        y[0].add_(1)
        y.sum().backward()

    return model, None, step


def double_backward():
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 1))
    x = torch.randn(256, 64, requires_grad=True)

    def step():
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        ((slope.norm(dim=1) - 1) ** 2).mean().backward()
        x.grad = None

    return model, None, step


def optimizer_step(kind, **options):
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    return train(model, torch.randn(4, 256), optimizer=kind, lr=0.1, **options)


NO_WORKSPACE = {
    "mlp": mlp,
    "mlp, in-place ReLU": lambda: mlp(lambda: nn.ReLU(inplace=True)),
    "post-norm": lambda: decoder(False, None),
    "post-norm, checkpoint": lambda: decoder(False, False),
    "post-norm, reentrant checkpoint": lambda: decoder(False, True),
    "pre-norm": lambda: decoder(True, None),
    "this library's decoder": own_decoder,
    "batch norm and pooling": batch_norm_and_pooling,
    "embedding, tied head, cross-entropy": tied_language_model,
    "in-place, views, expands": in_place_views_and_expands,
    "double backward": double_backward,
    "NAdam, one by one": lambda: optimizer_step(torch.optim.NAdam, foreach=False),
    "NAdam, foreach": lambda: optimizer_step(torch.optim.NAdam, foreach=True),
    "SGD, one by one": lambda: optimizer_step(torch.optim.SGD, foreach=False, momentum=0.9),
    "SGD, foreach": lambda: optimizer_step(torch.optim.SGD, foreach=True, momentum=0.9),
}
# What the allocator sees and no operator makes: the numbers of an optimizer's Python scalars, and
# under a checkpoint one state of the random number generator, while it is put back.
EXACT = {"mlp", "mlp, in-place ReLU", "post-norm", "pre-norm", "batch norm and pooling"}
EXACT |= {
    "embedding, tied head, cross-entropy",
    "double backward",
    "SGD, one by one",
    "SGD, foreach",
}


class LSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(32, 32, 2)

    def forward(self, x):
        return self.lstm(x)[0]


def convolutions():
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3))
    return train(model, torch.randn(4, 3, 32, 32))


WORKSPACE = {
    "convolutions": (convolutions, "aten.convolution"),
    "LSTM": (lambda: train(LSTM(), torch.randn(16, 8, 32)), "aten.mkldnn_rnn_layer"),
}


def allocations(step):
    """The independent oracle: bytes of each allocation (+) and release (-), in order, as the
    allocator reports them."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()
    events = enumerate(profile.profiler.kineto_results.events())
    changes = sorted(
        (event.start_ns(), i, event.nbytes()) for i, event in events if event.name() == "[memory]"
    )
    return [change for _, _, change in changes]


def empty_gradients(model):
    for parameter in model.parameters():
        parameter.grad = None


def one_more_sample():
    """A sample tells what was live when its operator returned; what died after the last one shows
    in the next."""
    torch.empty(0)


def bytes_of(tensors):
    return sum(tensor.nbytes for tensor in tensors)


# ---- the meter and the allocator


@pytest.mark.parametrize("name", NO_WORKSPACE)
def test_the_meters_peak_is_the_allocators_where_operators_take_no_workspace(name):
    model, optimizer, step = NO_WORKSPACE[name]()
    step()  # the optimizer's state is made
    empty_gradients(model)
    with MemoryMeter(model, optimizer) as meter:
        step()
    empty_gradients(model)
    held = bytes_of(model.parameters()) + bytes_of(model.buffers())
    if optimizer is not None:
        held += sum(
            bytes_of(v for v in state.values() if torch.is_tensor(v))
            for state in optimizer.state.values()
        )
    seen = held + max(accumulate(allocations(step)))
    assert meter.peak_bytes == pytest.approx(seen, rel=1e-3)
    assert meter.peak_bytes <= seen
    if name in EXACT:
        assert meter.peak_bytes == seen


@pytest.mark.parametrize("name", ["post-norm, checkpoint", "double backward"])
def test_measure_reports_the_allocators_peak(name):
    model, optimizer, step = NO_WORKSPACE[name]()
    found = measure(step, model=model, optimizer=optimizer, repeats=1)
    assert found.peak_bytes == pytest.approx(found.allocator_peak_bytes, rel=1e-3)
    assert found.workspace_bytes == found.allocator_peak_bytes - found.peak_bytes
    assert sum(found.at_peak.values()) == found.peak_bytes
    assert found.device == "cpu"
    assert found.seconds > 0


@pytest.mark.parametrize("name", WORKSPACE)
def test_workspace_is_what_the_allocator_sees_above_the_tensors(name):
    make, operator = WORKSPACE[name]
    model, optimizer, step = make()
    found = measure(step, model=model, optimizer=optimizer, repeats=1)
    assert 0 <= found.workspace_bytes == found.allocator_peak_bytes - found.peak_bytes
    if torch.backends.mkldnn.is_available():
        assert any(name.startswith(operator) for name in found.workspace_by_operator)
    taken = list(found.workspace_by_operator.values())
    assert taken == sorted(taken, reverse=True)
    assert all(count > 0 for count in taken)


@pytest.mark.parametrize("name", NO_WORKSPACE)
def test_categories_sum_to_the_live_bytes_at_every_sample(name):
    model, optimizer, step = NO_WORKSPACE[name]()
    for given in ((model, optimizer), (None, None)):
        empty_gradients(model)
        with MemoryMeter(*given) as meter:
            step()
            one_more_sample()
            live = meter.live_bytes
        series = meter.series()
        assert tuple(series) == CATEGORIES
        total = sum(series.values())
        assert min(values.min() for values in series.values()) >= 0
        assert total.max() == meter.peak_bytes == sum(meter.at_peak().values())
        assert total[-1] == live
        assert [sample.live_bytes for sample in meter.timeline] == list(total)
        assert [sample.phase for sample in meter.timeline] == meter.phases()


# ---- symbolic


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


def looked_at():
    """Values that steps look at, of tensors made in as many ways as they are."""
    tokens, mask = torch.arange(12).view(3, 4) % 5, torch.ones(3, 4, dtype=torch.long)
    late = torch.zeros(5, dtype=torch.long).index_add_(
        0, tokens.flatten(), torch.ones(12, dtype=torch.long)
    )
    masked = tokens.masked_fill(tokens == 2, -100)
    shifted = torch.cat([tokens[:, 1:], tokens.new_full((3, 1), 7)], 1)
    return [
        bool(mask.all()),
        bool((mask.cumsum(-1).diff(dim=-1) != 1).any()),
        late.tolist(),
        (masked != -100).sum().item(),
        masked.nonzero().tolist(),
        torch.unique(shifted).shape,
        torch.tensor([3, 1]).argmax().item(),
        bool(torch.ones(3, 4).to(torch.bool).all()),
        torch.zeros(3, 4).long().sum().item(),
        [x.item() for x in torch.linspace(0, 0.3, 4)],
        [x.item() for part in torch.linspace(0, 0.3, 6).split([2, 4]) for x in part],
        bool(torch.rand([]) < 0.0),
        (masked != -100).float().shape,
        torch.empty(2, dtype=torch.long).fill_(3).shape,
    ]


def test_small_tensors_of_whole_numbers_have_their_values_in_a_symbolic_step():
    with MemoryMeter() as real:
        expected = looked_at()
    with symbolic(), MemoryMeter() as meter:
        assert looked_at() == expected
    assert [(s.operator, s.live_bytes) for s in meter.timeline] == [
        (s.operator, s.live_bytes) for s in real.timeline
    ]


LOOKS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool((x == 0).all()),
    "nonzero": lambda x: x.nonzero(),
    "a view": lambda x: x.flatten()[:1].item(),
    "a copy": lambda x: (x + 1).clone().max().item(),
    "a part of what was written to": lambda x: rates_written_to(x.float().mean()),
}


def test_rates_of_dropped_layers_are_known_by_stages():
    with symbolic():
        rates = torch.linspace(0, 0.5, 6)
        assert [rate for part in rates.split([2, 4]) for rate in part.tolist()] == pytest.approx(
            [i / 10 for i in range(6)]
        )


def rates_written_to(value):
    rates = torch.linspace(0, 1, 4)
    part = rates[1:]
    rates.add_(value)
    return part.tolist()


@pytest.mark.parametrize("look", LOOKS)
def test_what_depends_on_symbolic_values_is_unknown_and_who_looks_is_told_the_operator(look):
    def counts(scores, zeros):
        return zeros.scatter_(1, scores.topk(2).indices, 1)

    for make in (
        lambda scores: scores.argmax(-1, keepdim=True),
        lambda scores: counts(scores, torch.zeros(3, 4, dtype=torch.long)),
        lambda scores: torch.zeros(3, 4, dtype=torch.long).copy_(scores),
        lambda scores: torch.randn(3, 1).long(),
        lambda scores: torch.ones(3, 1).add_(scores[:, :1]).long(),
    ):
        assert LOOKS[look](make(torch.ones(3, 4))) is not None
        with (
            symbolic(),
            pytest.raises(
                (_fake.DataDependentOutputException, _fake.DynamicOutputShapeException)
            ) as told,
        ):
            LOOKS[look](make(torch.randn(3, 4)))
        assert re.search(r"aten\.\w+", str(told.value))


def test_an_unknown_value_does_not_take_others_with_it_and_its_tensor_stays_itself():
    with symbolic():
        places, mine = torch.randn(3, 4).argsort(-1), torch.zeros(3, 4, dtype=torch.long)
        view, other = mine[0], mine.clone()
        assert mine.scatter_(1, places, 1) is mine and other.sum().item() == 0
        with pytest.raises(_fake.DataDependentOutputException):
            view.max().item()
        assert F.one_hot(places, 4).shape == (3, 4, 4) and mine[None].shape == (1, 3, 4)


def masks():
    """What is asked of floating masks, whole and in part."""
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    low = torch.tril(torch.full((2, 4, 4), -1e9, dtype=torch.float64)).transpose(1, 2)[1, 1:]
    return [
        bool((causal == nn.Transformer.generate_square_subsequent_mask(5)).all()),
        bool((causal == torch.zeros(5, 5)).all()),
        causal.isinf().tolist(),
        (low.bfloat16() < 0).tolist(),
        low.bool().tolist(),
        low.clone()[:, 2:].ne(torch.zeros(1, dtype=torch.float64)).tolist(),
        torch.full((2,), 1.5).view(torch.int32).ne(0x3FC00000).any().item(),
    ]


def test_masks_of_zeros_and_infinity_are_known_until_they_are_written_to():
    with MemoryMeter() as real:
        expected = masks()
    with symbolic(), MemoryMeter() as meter:
        assert masks() == expected
        mask = nn.Transformer.generate_square_subsequent_mask(5)
        view, huge = mask[1:], torch.full((2**40,), 1.0)[:1]
        mask.mul_(2)
        for unknown in (mask, view, huge, torch.randn(3)):
            with pytest.raises(_fake.DataDependentOutputException):
                bool((unknown == 0).all())
    steps = [(s.operator, s.live_bytes) for s in real.timeline]
    assert [(s.operator, s.live_bytes) for s in meter.timeline][: len(steps)] == steps


def test_large_tensors_of_whole_numbers_stay_symbolic():
    with symbolic(), MemoryMeter() as meter:
        large = torch.zeros(2**40, dtype=torch.int8)
        small = torch.ones(1, dtype=torch.long)
        sums = small.expand(2**40) + 1
        more = large + small
    assert meter.peak_bytes == sum(tensor.nbytes for tensor in (large, small, sums, more))


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


# ---- categories, against figures worked out by hand

DEPTH, WIDTH, BATCH = 3, 64, 32
WEIGHTS = DEPTH * (WIDTH * WIDTH + WIDTH) * 4
ONE = BATCH * WIDTH * 4  # one activation


def at_end(meter):
    return {name: int(values[-1]) for name, values in meter.series().items()}


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


def test_a_storage_with_many_views_counts_once():
    with MemoryMeter() as meter:
        x = torch.zeros(100)
        views = [x[:10], x.view(10, 10).t(), x.expand(5, 100), x.detach()]
        assert meter.live_bytes == 400
        del x
        assert meter.live_bytes == 400
        views.clear()
        assert meter.live_bytes == 0
    assert meter.peak_bytes == 400


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


class Wraps(torch.optim.Optimizer):
    """Another optimizer does its step, between work of its own; its state is there and shows here
    as nothing."""

    def __init__(self, params, base=torch.optim.Adam):
        super().__init__(params, {"lr": 0.1})
        self.base = base(self.param_groups[0]["params"], lr=0.1, foreach=False)

    @torch.no_grad()
    def step(self, closure=None):
        copies = [p.detach().clone() for p in self.param_groups[0]["params"]]
        self.base.step()
        torch._foreach_mul_(copies, 2.0)

    def held_tensors(self):
        return (v for state in self.base.state.values() for v in state.values())

    def state_dict(self):
        return self.base.state_dict()

    def load_state_dict(self, content):
        self.base.load_state_dict(content)


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


def test_a_sample_names_its_operator_and_the_timeline_can_be_sliced():
    with MemoryMeter() as meter:
        x = torch.ones(10) + 1
    assert [sample.operator for sample in meter.timeline] == [
        "aten.ones.default",
        "aten.add.Tensor",
    ]
    assert meter.timeline[-1].bytes["temporary"] == x.nbytes and hash(meter.timeline[-1])
    assert [sample.live_bytes for sample in meter.timeline[0:2]] == [40, 80]


# ---- what a dispatch mode changes: gradients that meet


def shared_weight(uses):
    weight, x = nn.Parameter(torch.randn(64, 64) / 8), torch.randn(16, 64)

    def step():
        y = x
        for _ in range(uses):
            y = torch.tanh(y @ weight)
        y.sum().backward()

    return [weight], step


def rnn():
    inner, outer = (nn.Parameter(torch.randn(64, 64) / 8) for _ in range(2))
    xs = torch.randn(6, 8, 64)

    def step():
        h = torch.zeros(8, 64)
        for x in xs:
            h = torch.tanh(x @ inner + h @ outer)
        h.sum().backward()

    return [inner, outer], step


def uses_of(function):
    """A parameter of which `function` makes something, in which gradients meet or are added
    otherwise."""

    def make():
        weight = nn.Parameter(torch.randn(64, 64))

        def step():
            used = weight * 2
            made = function(used)  # both stay, so that the peak is where gradients meet
            made.sum().backward()

        return [weight], step

    return make


class AddsGradients(torch.autograd.Function):
    """Its formula's own sum, out of place, takes a tensor more than a gradient that meets
    another."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + gradient * 2


def with_hook(y):
    y.register_hook(lambda gradient: gradient + gradient * 2)
    return y * 3


def with_kept_gradient(y):
    y.retain_grad()
    return y.exp() + y.tanh() + y.sin()


MEETINGS = {
    "a weight four times": lambda: shared_weight(4),
    "an RNN": rnn,
    "a product with itself": uses_of(lambda y: y * y),
    "a product of a sum with itself": uses_of(lambda y: (z := y + y) * z),
    "attention to itself": uses_of(lambda y: (y @ y.mT).softmax(-1) @ y),
    "views": uses_of(lambda y: y[:32].exp().sum() + y[32:].exp().sum() + y.t().tanh().sum()),
    "an expanded tensor": uses_of(lambda y: (y + y[0]) * y[0]),
    "a formula that adds": uses_of(lambda y: AddsGradients.apply(y) * 3),
    "a formula that adds, in C++": uses_of(lambda y: torch.stack(torch.var_mean(y, 0)).exp()),
    "a hook that adds": uses_of(with_hook),
    "a gradient that is kept": uses_of(with_kept_gradient),
    "double backward": uses_of(
        lambda y: (
            torch.autograd.grad((y.tanh() ** 3).sum(), y, create_graph=True)[0] ** 2 + y.tanh()
        )
    ),
    "the largest": uses_of(lambda y: y.max(-1)[0]),
    "the median": uses_of(lambda y: y.median(-1)[0]),
    "the largest two": uses_of(lambda y: y.topk(2)[0].exp()),
    "sorted": uses_of(lambda y: y.sort()[0].exp()),
    "gathered": uses_of(lambda y: y.gather(1, torch.zeros(64, 1, dtype=torch.long))),
    "places": uses_of(lambda y: y[torch.arange(64), torch.arange(64)]),
    "rows": uses_of(lambda y: y.index_select(0, torch.arange(64))),
    "taken": uses_of(lambda y: y.take(torch.arange(64))),
    "by a mask": uses_of(lambda y: y.masked_select(y > 0)),
    "layers, whose gradients meet in views": lambda: shared_layer(4),
}


def shared_layer(uses):
    layer, x = nn.Linear(64, 64), torch.randn(16, 64)

    def step():
        y = x
        for _ in range(uses):
            y = torch.tanh(layer(y))
        y.sum().backward()

    return list(layer.parameters()), step


@pytest.mark.parametrize("name", MEETINGS)
def test_gradients_that_meet_are_counted_as_autograd_alone_adds_them(name):
    leaves, step = MEETINGS[name]()
    step()
    gradients = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    with MemoryMeter() as meter:
        step()
        one_more_sample()
    assert all(
        torch.equal(leaf.grad, gradient) for leaf, gradient in zip(leaves, gradients, strict=True)
    )
    for leaf in leaves:
        leaf.grad = None
    scalars = 16  # bytes of Python numbers that operators take
    assert 0 <= max(accumulate(allocations(step))) - meter.peak_bytes <= scalars
    assert sum(meter.series().values()).max() == meter.peak_bytes
    assert at_end(meter) == dict.fromkeys(CATEGORIES, 0) | {"gradient": bytes_of(leaves)}


class _Keeping(TorchDispatchMode):
    """Holds what operators are given."""

    def __enter__(self):
        self.held = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.held += [value for value in args if isinstance(value, torch.Tensor)]
        return func(*args, **(kwargs or {}))


def test_a_gradient_that_met_another_and_is_kept_by_somebody_counts_on():
    x = torch.ones(1000, requires_grad=True)
    with MemoryMeter() as meter, _Keeping() as keeping:
        y = x * 2
        (y.sin() + y.cos()).sum().backward()
        there = {tensor.untyped_storage() for tensor in (*keeping.held, x.grad)}
        there.remove(x.untyped_storage())
        assert meter.live_bytes == sum(storage.nbytes() for storage in there)


class _SumsInBackward(torch.autograd.Function):
    """Whose backward lets go of each tensor as soon as the next one is made."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        value = gradient * 2
        value = value + 1
        value = value.exp()
        return value.sin()


def test_the_meter_keeps_nothing_alive_of_a_function_that_adds_in_backward():
    x = torch.ones(1000, requires_grad=True)
    with MemoryMeter() as meter:
        _SumsInBackward.apply(x).sum().backward()
    exp = next(sample for sample in meter.timeline if sample.operator == "aten.exp.default")
    # the loss and its gradient, what was added, and its exponential
    assert exp.live_bytes == 4 * (1 + 1000 + 1000 + 1)


def test_a_symbolic_steps_gradients_meet_in_the_same_bytes():
    found = []
    for context in (nullcontext(), symbolic()):
        with context:
            _, step = shared_weight(4)
            with MemoryMeter() as outer, MemoryMeter() as inner:
                step()
        found += [outer.peak_bytes, inner.peak_bytes]
    assert found == [found[0]] * 4


def test_a_budget_does_not_count_what_autograd_alone_would_not_take():
    leaves, step = shared_weight(4)
    with MemoryMeter() as meter:
        step()
    leaves[0].grad = None
    with MemoryMeter(budget_bytes=meter.peak_bytes):
        step()


def test_a_peak_above_the_allocators_is_explained():
    weight = nn.Parameter(torch.randn(256, 256))
    found = measure(lambda: (weight * 2).prod(1).sum().backward(), repeats=1)
    assert found.workspace_bytes == found.allocator_peak_bytes - found.peak_bytes < -4 * 256 * 255
    assert (
        f"the meter counts {-found.workspace_bytes:,} bytes more than the allocator"
        in found.caption()
    )
    assert measure(lambda: (weight * 2).exp().sum().backward(), repeats=1).notes == ()


def test_the_runs_for_the_allocator_and_for_the_clock_are_under_no_mode():
    weight, depths = nn.Parameter(torch.randn(8, 8)), []

    def step():
        profiled = torch.autograd.profiler._is_profiler_enabled
        depths.append(
            (profiled, len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()))
        )
        (weight * 2).sum().backward()

    measure(step, repeats=3)
    assert (True, 0) in depths
    assert depths[-3:] == [(False, 0)] * 3  # nor those for the clock


def test_workspace_on_cuda_is_what_the_allocator_held_within_an_operator(monkeypatch):
    held = {"current": 500, "peak": 500}

    class Products(TorchDispatchMode):
        """Each takes 700 bytes and leaves 400; other operators free 100 that were there before."""

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            product = func is torch.ops.aten.mm.default
            held["peak"] = max(held["peak"], held["current"] + (700 if product else 0))
            held["current"] += 400 if product else -100
            return func(*args, **(kwargs or {}))

    def nested(device):
        return {"allocated_bytes": {"all": dict(held)}}

    def run(mode):
        with Products(), mode:
            (torch.ones(2, 2) @ torch.ones(2, 2)).relu()

    monkeypatch.setattr(torch.cuda, "memory_stats", None)  # too slow to be asked at each operator
    monkeypatch.setattr(torch.cuda.memory, "memory_stats", None)
    monkeypatch.setattr(torch.cuda.memory, "memory_stats_as_nested_dict", nested)
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda device: held.update(peak=held["current"])
    )
    assert workspace_by_operator(run, torch.device("cuda")) == {"aten.mm.default": 300}


# ---- the meter changes nothing


def test_autograd_still_notices_a_change_in_place():
    x = torch.ones(4, requires_grad=True)
    with MemoryMeter(), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y = x.exp()
        y.add_(1)
        y.sum().backward()


def test_function_transforms_work():
    x = torch.randn(3, 4)

    def run():
        return torch.func.vmap(torch.func.grad(lambda v: (v**3).sum()))(x)

    with MemoryMeter() as meter:
        found = run()
    assert_close(found, run(), rtol=0, atol=0)
    assert meter.peak_bytes > 0


@pytest.mark.parametrize("name", ["post-norm, checkpoint", "post-norm, reentrant checkpoint"])
def test_gradients_are_the_same_to_the_bit(name):
    model, _, step = NO_WORKSPACE[name]()
    start, found = copy.deepcopy(model.state_dict()), []
    for context in (nullcontext(), MemoryMeter(model)):
        model.load_state_dict(start)
        empty_gradients(model)
        torch.manual_seed(1)
        with context:
            step()
        found.append([p.grad for p in model.parameters()])
    for plain, metered in zip(*found, strict=True):
        assert torch.equal(plain, metered)


def test_a_checkpoint_is_computed_again_once_and_only_in_backward():
    layer, calls = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)), []
    layer.register_forward_pre_hook(
        lambda *_: calls.append(torch._C._current_autograd_node() is not None)
    )
    x = torch.randn(4, 16)
    with MemoryMeter(layer) as meter:
        y = checkpoint(layer, x, use_reentrant=False)
        z = y * 2 + y
        assert meter.live_bytes and meter.at_peak() and len(meter.timeline) > 0
        z.sum()
        assert calls == [False]
        z.sum().backward()
    assert calls == [False, True]


def test_no_tensor_is_kept_alive():
    model, x = nn.Linear(8, 8), torch.randn(8, 8, requires_grad=True)
    with MemoryMeter():
        y = model(x.exp())
        y.sum().backward()
        held = [
            weakref.ref(tensor.untyped_storage())
            for tensor in (y, x.grad, model.weight, torch.ones(3))
        ]
        x.grad = None
        del y, model
        torch.ones(1)
        assert [storage() for storage in held] == [None] * 4


def test_a_meter_that_is_done_lets_go_of_model_and_optimizer():
    model, optimizer, step = mlp()
    with MemoryMeter(model, optimizer) as meter:
        step()
    gone = [weakref.ref(model[0].weight), weakref.ref(optimizer), weakref.ref(model)]
    held = meter.live_bytes
    del model, optimizer, step
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3
    assert held > 0 == meter.live_bytes
    assert sum(meter.at_peak().values()) == meter.peak_bytes


def test_reading_the_live_bytes_changes_no_category():
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, reading):
            ctx.kept, ctx.reading = x * 2, reading
            return x.sum()

        @staticmethod
        def backward(ctx, gradient):
            found = gradient * ctx.kept
            if ctx.reading:
                assert meter.live_bytes and meter.series() and meter.at_peak()
            return found * 3, None

    found = []
    for reading in (False, True):
        with MemoryMeter() as meter:
            Reads.apply(torch.ones(1000, requires_grad=True), reading).backward()
        found.append([list(values) for values in meter.series().values()])
    assert found[0] == found[1]


@pytest.mark.parametrize("swap", [False, True])
def test_a_model_can_be_moved_in_the_block(swap):
    model = deep_mlp(2, 16)
    before = bytes_of(model.parameters())
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        with MemoryMeter(model) as meter:
            model(torch.ones(1, 16)).sum().backward()
            empty_gradients(model)
            model.to(torch.float64)
            model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
            assert meter.live_bytes == 2 * before
            model(torch.ones(1, 16, dtype=torch.float64))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert at_end(meter)["parameter"] == meter.live_bytes == 2 * before


# ---- robustness


def test_meters_nest():
    with MemoryMeter() as outer:
        x = torch.ones(100)
        with MemoryMeter() as inner:
            y = torch.ones(1000)
        z = torch.ones(10)
    assert inner.peak_bytes == inner.live_bytes == y.nbytes
    assert outer.peak_bytes == outer.live_bytes == x.nbytes + y.nbytes + z.nbytes
    model, optimizer, step = mlp()
    step()
    with MemoryMeter(model, optimizer) as outer, MemoryMeter(model, optimizer) as inner:
        step()
    assert outer.peak_bytes == inner.peak_bytes
    assert outer.at_peak() == inner.at_peak()


def test_a_meter_is_entered_once():
    meter = MemoryMeter()
    with (
        meter,
        pytest.raises(RuntimeError, match=r"has been entered already \(active\); make a new one"),
        meter,
    ):
        pass
    with pytest.raises(RuntimeError, match=r"has been entered already \(closed\)"), meter:
        pass


@contextmanager
def everything_undone_afterwards():
    from torch.optim import optimizer

    def state():
        hooks = optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks
        modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        return torch.get_rng_state, *map(len, hooks), len(modes), dict(vars(torch.UntypedStorage))

    before = state()
    yield
    assert state() == before


def test_an_exception_in_the_block_undoes_everything():
    with everything_undone_afterwards():
        with pytest.raises(ZeroDivisionError), MemoryMeter() as meter:
            state, x = torch.get_rng_state(), torch.ones(10)
            assert meter.live_bytes == meter.peak_bytes == state.nbytes + x.nbytes
            1 / 0  # noqa: B018
        later = MemoryMeter()
        with MemoryMeter(), later:
            pass
    assert meter.live_bytes == state.nbytes + x.nbytes
    del x
    assert meter.live_bytes == state.nbytes


def test_tensors_that_outlive_the_block_are_taken_off_when_they_die():
    with MemoryMeter() as meter:
        x = torch.ones(100)
    assert meter.live_bytes == 400
    series = {name: values.copy() for name, values in meter.series().items()}
    del x
    assert meter.live_bytes == 0
    for name, values in meter.series().items():
        assert np.array_equal(values, series[name])  # the record of the block does not change


def test_a_storage_that_is_resized_counts_with_its_new_size_at_once():
    with MemoryMeter() as meter:
        x = torch.zeros(100)
        x.resize_(1000)
        assert meter.live_bytes == meter.peak_bytes == 4000
        x.untyped_storage().resize_(0)
        assert meter.live_bytes == 0
        x.untyped_storage().resize_(8000)
        assert meter.live_bytes == meter.peak_bytes == 8000


def test_a_thread_of_ones_own_is_not_counted_and_does_no_harm():
    (model, _, step), (other, _, other_step) = mlp(), mlp()
    with MemoryMeter(model) as alone:
        step()
    empty_gradients(model)
    thread = threading.Thread(target=other_step)
    with MemoryMeter(model) as meter:
        thread.start()
        step()
        thread.join()
    assert meter.at_peak()["gradient"] == alone.at_peak()["gradient"]
    assert all(parameter.grad is not None for parameter in other.parameters())


def test_storages_that_die_in_another_thread_are_taken_off():
    with MemoryMeter() as meter:
        held = [torch.ones(100) for _ in range(50)]
        thread = threading.Thread(target=held.clear)
        thread.start()
        for _ in range(50):
            torch.ones(1)
        thread.join()
        assert meter.live_bytes == 0


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_tensors_count_with_their_indices_and_values():
    with MemoryMeter() as meter:
        coo = torch.eye(8).to_sparse()
        assert meter.live_bytes == coo._indices().nbytes + coo._values().nbytes == 8 * 2 * 8 + 8 * 4
        del coo
        csr = torch.eye(8).to_sparse_csr()
        parts = csr.crow_indices(), csr.col_indices(), csr.values()
        assert meter.live_bytes == sum(part.untyped_storage().nbytes() for part in parts)
    embedding = nn.Embedding(100, 4, sparse=True)
    with MemoryMeter(embedding) as meter:
        embedding(torch.tensor([1, 2, 3])).sum().backward()
        one_more_sample()
    assert at_end(meter)["gradient"] == 3 * 8 + 3 * 4 * 4


@pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN"
)
def test_an_opaque_tensor_is_a_clear_error_after_which_everything_is_undone():
    refused = pytest.raises(NotImplementedError, match=r"cannot see .* with layout torch\._mkldnn")
    with everything_undone_afterwards(), refused, MemoryMeter():
        torch.randn(4, 4).to_mkldnn()


@contextmanager
def exit_fails(monkeypatch):
    def fail(self):
        raise KeyError("injected")

    monkeypatch.setattr(CategoryTracker, "finish", fail)
    yield
    monkeypatch.undo()


class Watched(torch.autograd.Function):
    """An identity whose node can be referred to weakly, unlike those of operators."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_a_meter_whose_exit_fails_is_closed_and_holds_nothing(monkeypatch):
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    adam = torch.optim.Adam(model.parameters())
    meter = MemoryMeter(model, adam)
    with (
        everything_undone_afterwards(),
        exit_fails(monkeypatch),
        pytest.raises(KeyError, match="injected"),
        meter,
    ):
        y = Watched.apply(model(x))
        node = weakref.ref(y.grad_fn)
    assert (meter.model, meter.optimizers) == (None, ())
    gone = weakref.ref(model), weakref.ref(adam), weakref.ref(y)
    del model, adam, y
    gc.collect()
    assert [ref() for ref in (*gone, node)] == [None] * 4
    with pytest.raises(RuntimeError, match="entered already"), meter:
        pass
    assert meter.peak_bytes > 0


def test_the_error_of_the_block_is_seen_where_the_exit_fails_too(monkeypatch):
    with (
        everything_undone_afterwards(),
        exit_fails(monkeypatch),
        pytest.raises(ValueError, match="own") as raised,
        MemoryMeter(),
    ):
        torch.ones(3)
        raise ValueError("own")
    assert raised.value.__notes__ == ["MemoryMeter could not close its records: 'injected'"]


def nested(layout):
    rows = [torch.randn(length, 16) for length in (30, 20, 14)]
    return lambda **options: torch.nested.nested_tensor(rows, layout=layout, **options), rows


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.parametrize("leaf", [False, True], ids=["data", "leaf"])
def test_a_step_on_nested_tensors_takes_what_the_allocator_saw(layout, leaf):
    made, _ = nested(layout)
    layer = nn.Linear(16, 16, bias=False)

    def step():
        x = made(requires_grad=leaf)
        y = layer(x * x + x)
        y.to_padded_tensor(0.0).square().sum().backward()

    step()
    layer.zero_grad()
    seen = allocator_peak(lambda *modes: run_under(step, *modes), torch.device("cpu"))
    layer.zero_grad()
    with MemoryMeter() as meter:
        step()
    assert meter.peak_bytes == seen > 4 * 64 * 16 * 4


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_jagged_step_takes_the_packed_one_and_its_offsets():
    made, rows = nested(torch.jagged)
    layer = nn.Linear(16, 16)

    def jagged():
        layer(made()).sin().values().square().sum().backward()

    def packed():
        layer(torch.cat(rows)).sin().square().sum().backward()

    found, dense = (measure(step, model=layer, repeats=1) for step in (jagged, packed))
    offsets = made().offsets().nbytes
    assert offsets == 4 * 8
    assert found.peak_bytes == found.allocator_peak_bytes == dense.peak_bytes + offsets
    kept = saved_tensors(lambda x: layer(x).sin(), made())
    dense_kept = saved_tensors(lambda x: layer(x).sin(), torch.cat(rows))
    assert kept.total_bytes == dense_kept.total_bytes + offsets


def without_flattening():
    from torch.masked import masked_tensor

    return masked_tensor(torch.ones(4, 4), torch.eye(4) > 0)


def per_channel(bits):
    scales, zeros = torch.ones(64, dtype=torch.float64), torch.zeros(64, dtype=torch.int64)
    return torch.quantize_per_channel(torch.randn(64, 64), scales, zeros, 0, bits)


def compressed(layout, *block):
    ends, indices, values = torch.tensor([0, 2, 4]), torch.tensor([0, 1] * 2), torch.ones(4, *block)
    return torch.sparse_compressed_tensor(ends, indices, values, layout=layout)


# what a tensor holds on a CPU -> a closed form of its bytes
HELD = {
    "complex": (lambda: torch.randn(4, 4, dtype=torch.complex64).conj(), 128),
    "coo": (lambda: torch.ones(4, 4).to_sparse(), 16 * (2 * 8 + 4)),
    "csr": (lambda: compressed(torch.sparse_csr), (3 + 4) * 8 + 4 * 4),
    "csc": (lambda: compressed(torch.sparse_csc), (3 + 4) * 8 + 4 * 4),
    "bsr": (lambda: compressed(torch.sparse_bsr, 2, 2), (3 + 4) * 8 + 16 * 4),
    "bsc": (lambda: compressed(torch.sparse_bsc, 2, 2), (3 + 4) * 8 + 16 * 4),
    "jagged": (lambda: nested(torch.jagged)[0](), 64 * 16 * 4 + 4 * 8),
    "nested": (lambda: nested(torch.strided)[0](), 64 * 16 * 4 + 3 * (2 + 2 + 1) * 8),
    "masked": (without_flattening, 16 * 4 + 16),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(8), 0.1, 0, torch.qint8), 8),
    "quantized per channel": (lambda: per_channel(torch.qint8), 64 * 64 + 64 * (8 + 8)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HELD)
def test_a_tensor_of_each_layout_is_counted_with_all_that_it_holds(name):
    make, expected = HELD[name]
    held = {storage._cdata: storage.nbytes() for storage in storages_of(make())}
    assert sum(held.values()) == expected


@pytest.mark.filterwarnings("ignore")
def test_a_wrapper_that_names_no_tensor_is_a_clear_error():
    class Opaque(torch.Tensor):
        __slots__ = ("inner",)

        @staticmethod
        def __new__(cls):
            return torch.Tensor._make_wrapper_subclass(cls, (2,))

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError

    with pytest.raises(NotImplementedError, match=r"bytes of a Opaque: give its class .*flatten"):
        storages_of(Opaque())


def test_the_inner_tensors_of_a_wrapper_subclass_count():
    two = pytest.importorskip("torch.testing._internal.two_tensor")
    with MemoryMeter() as meter:
        x = two.TwoTensor(torch.ones(100), torch.ones(100))
        y = x * 2
        assert meter.live_bytes == 1600
        del x, y
        assert meter.live_bytes == 0
    assert [sample.operator for sample in meter.timeline] == ["aten.ones.default"] * 2 + [
        "aten.mul.Tensor"
    ] * 2
    parameter = nn.Parameter(two.TwoTensor(torch.ones(100), torch.ones(100)))
    model = nn.Module()
    model.weight = parameter
    with MemoryMeter(model) as meter:
        (parameter * 2).sum().backward()
    assert meter.entry_bytes == 800
    assert at_end(meter)["gradient"] > 0


def test_a_function_compiled_with_aot_eager_counts():
    model, x = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)), torch.randn(16, 32)
    found = []
    for function in (torch.compile(model, backend="aot_eager"), model):
        function(x).sum().backward()
        empty_gradients(model)
        with MemoryMeter(model) as meter:
            function(x).sum().backward()
        found.append(at_end(meter))
        empty_gradients(model)
    torch._dynamo.reset()
    assert found[0] == found[1]


# ---- compiled code


class Counting:
    """A backend that counts how often it compiles, and how often its code runs."""

    def __init__(self):
        self.compiled = self.runs = 0

    def __call__(self, graph, inputs):
        self.compiled += 1

        def run(*args):
            self.runs += 1
            return graph(*args)

        return run


def gated(layers=3):
    """Blocks for which the compiler saves less than autograd does."""

    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x):
            return x + F.gelu(self.linear(x)) * torch.sigmoid(x)

    return nn.Sequential(*[Gate() for _ in range(layers)])


@contextmanager
def looked_at_with(kind, model, step):
    """Look at a step in one of the ways in which the library looks at steps."""
    if kind == "measure":
        measure(step, model=model, repeats=1)
    elif kind == "measure without a model":
        measure(step, repeats=1)
    elif kind == "meter and counter":
        with flop_counter(), MemoryMeter(model):
            step()
    else:
        workspace_by_operator(lambda *modes: run_under(step, *modes), torch.device("cpu"))
    yield


def run_under(step, *contexts):
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        step()


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize(
    "kind", ["measure", "measure without a model", "meter and counter", "workspace"]
)
@pytest.mark.parametrize("first", [False, True], ids=["compiled before", "compiled by the look"])
def test_compiled_code_stays_compiled_when_looked_at(kind, fullgraph, first):
    backend, model, x = Counting(), gated(), torch.randn(8, 32)
    function = torch.compile(model, backend=backend, fullgraph=fullgraph)

    def step():
        function(x).sum().backward()

    if not first:
        step()
    with looked_at_with(kind, model, step):
        assert backend.runs > (not first)  # it ran compiled while it was looked at
    before = backend.runs
    step()
    assert (backend.compiled, backend.runs) == (1, before + 1)
    torch.compiler.reset()


@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition"])
def test_a_compiled_step_is_measured_as_its_allocator_saw_it(backend):
    model, x = gated(), torch.randn(256, 32)
    function = torch.compile(model, backend=backend)
    step, eager = (lambda f=f: f(x).sum().backward() for f in (function, model))
    step()
    empty_gradients(model)
    entry = sum(p.nbytes for p in model.parameters())
    alone = entry + allocator_peak(lambda *modes: run_under(step, *modes), torch.device("cpu"))
    empty_gradients(model)
    found, plain = (measure(f, model=model, repeats=1) for f in (step, eager))
    torch.compiler.reset()
    assert found.allocator_peak_bytes == alone
    # constants of the graph, 4 bytes each, are workspace
    assert 0 <= found.workspace_bytes <= 64
    assert found.peak_bytes != plain.peak_bytes
    assert found.flops == plain.flops
    assert any("torch.compile" in note for note in found.notes)
    assert plain.notes == ()


def test_buffers_of_generated_code_count(monkeypatch, tmp_path):
    # Matrix products alone: Inductor generates Python for them, for which it needs no compiler.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    model = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(3)])
    x = torch.randn(64, 32)
    function = torch.compile(model)
    step = lambda: function(x).sum().backward()  # noqa: E731
    allocate = torch._C._dynamo.guards._empty_strided_cpu
    with MemoryMeter(model) as first:
        step()
    empty_gradients(model)
    found = measure(step, model=model, repeats=1)
    modules = sys.modules["torch._inductor.codecache"].PyCodeCache.modules
    bound = {m.empty_strided_cpu for m in modules if hasattr(m, "empty_strided_cpu")}
    torch.compiler.reset()
    assert first.peak_bytes == found.peak_bytes == found.allocator_peak_bytes
    # the outputs of the first two layers are kept for backward
    assert found.at_peak["activation"] >= 2 * x.nbytes
    assert bound == {allocate} == {torch._C._dynamo.guards._empty_strided_cpu}
    outside = sum(p.nbytes for p in model.parameters()) + x.nbytes
    with (
        pytest.raises(MemoryBudgetExceeded, match="compiled code"),
        MemoryMeter(model, budget_bytes=outside),
    ):
        torch.compile(model)(x)
    torch.compiler.reset()


def test_a_symbolic_step_runs_compiled_modules_as_they_were_written():
    backend = Counting()

    def peak(make):
        with symbolic():
            model, x = make(), torch.randn(64, 32)
            with MemoryMeter(model) as meter:
                model(x).sum().backward()
        return meter.peak_bytes

    plain = peak(gated)
    assert peak(lambda: torch.compile(gated(), backend=backend, fullgraph=True)) == plain
    assert backend.compiled == 0
    model = torch.compile(gated(), backend=backend, fullgraph=True)
    model(torch.randn(8, 32))
    assert peak(gated) == plain
    model(torch.randn(8, 32))
    assert backend.runs == 2
    torch.compiler.reset()


@pytest.mark.parametrize("loaded", [False, True])
def test_what_is_compiled_first_in_a_symbolic_step_is_not_run_compiled(loaded, monkeypatch):
    backend = Counting()
    if not loaded:  # as in a process that has compiled nothing yet
        monkeypatch.setattr(compiler, "sys", SimpleNamespace(modules={}))
    with symbolic():
        function = torch.compile(lambda x: x.sin(), backend=backend, fullgraph=True)
        with MemoryMeter():
            function(torch.randn(3))
    assert backend.compiled == 0
    function(torch.randn(3))
    assert backend.runs == 1
    torch.compiler.reset()


def test_memory_that_no_operator_makes_is_not_counted():
    with MemoryMeter() as meter:
        x = torch.from_numpy(np.zeros(1000))
        y = torch.as_tensor(np.zeros(1000))
        assert meter.live_bytes == 0
        z = torch.tensor(np.zeros(1000))
        assert meter.live_bytes == z.nbytes
        del x, y
        assert meter.live_bytes == z.nbytes


def test_a_storage_that_was_there_is_not_new_under_another_tensor():
    x = torch.ones(1000)
    with MemoryMeter() as meter:
        again = torch.empty(0).set_(x.untyped_storage(), 0, (10,))
        another = torch.empty(0).set_(x.untyped_storage())
        assert meter.live_bytes == 0
        twin = copy.deepcopy(x)
        assert meter.live_bytes == x.nbytes
        del again, another, twin
        assert meter.live_bytes == 0
    assert "clone" not in vars(torch.UntypedStorage)


def test_tensors_on_the_meta_device_take_no_bytes():
    model = nn.Linear(1000, 1000, device="meta")
    with MemoryMeter(model) as meter:
        (model(torch.empty(8, 1000, device="meta")) * 2).sum().backward()
    assert meter.peak_bytes == 0


@pytest.fixture
def one_process():
    dist = pytest.importorskip("torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_fully_sharded_model_is_measured_as_the_allocator_sees_it(one_process):
    from torch.distributed.fsdp import fully_shard

    model, x = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4))), torch.randn(8, 128)
    held = bytes_of(model.parameters())
    for layer in model:
        fully_shard(layer, mesh=one_process)
    fully_shard(model, mesh=one_process)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)

    def step():
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    with MemoryMeter(model, optimizer) as meter:
        entered = meter.at_peak()
        step()
    assert entered["parameter"] == held and entered["optimizer"] == 2 * held + 4 * 8
    seen = meter.entry_bytes + max(accumulate(allocations(step)))
    assert meter.peak_bytes == pytest.approx(seen, rel=0.02)
    found = measure(step, model=model, optimizer=optimizer, repeats=1)
    assert found.peak_bytes <= found.allocator_peak_bytes and found.notes == ()
    assert saved_tensors(model, x).total_bytes > 0


def test_blocks_are_rounded_up():
    with MemoryMeter(block_bytes=512) as meter:
        x, y = torch.ones(1), torch.ones(129)
        assert meter.live_bytes == 512 + 1024
        del x, y
    assert meter.peak_bytes == 1536


# ---- devices


# autograd takes its symbolic tensors without such hardware; those of "cuda" only without gradients
SECOND = "lazy"


def on_second_device(hooks, device=SECOND, optimizer=torch.optim.SGD, **options):
    with torch.device(device):
        model, x = deep_mlp(4, 64), torch.ones(32, 64)
    optimizer = optimizer(model.parameters(), foreach=False, **options)

    def step():
        with hooks():
            loss = model(x).sum()
        loss.backward()
        optimizer.step()

    step()
    empty_gradients(model)
    return model, optimizer, step


def metered(given, **options):
    model, optimizer, step = given
    with MemoryMeter(model, optimizer, **options) as meter:
        step()
    empty_gradients(model)
    return meter


def test_what_a_step_keeps_in_host_memory_is_no_part_of_its_devices_figures():
    packed = []

    def kept_nowhere():
        def pack(tensor):
            packed.append(tensor.nbytes)
            return tensor.shape

        return saved_tensors_hooks(pack, torch.empty)

    with symbolic():
        given = on_second_device(save_on_cpu, lr=0.1, momentum=0.9)
        meter = metered(given)
        twin = on_second_device(kept_nowhere, "cpu", lr=0.1, momentum=0.9)
        packed.clear()
        alone = metered(twin)
        assert meter.peak_bytes == alone.peak_bytes
        assert meter.at_peak() == alone.at_peak()
        assert (meter.entry_bytes, meter.live_bytes) == (alone.entry_bytes, alone.live_bytes)
        assert max(sample.live_bytes for sample in meter.timeline) == meter.peak_bytes
        assert (str(meter.device), str(alone.device)) == (SECOND, "cpu")
        host = torch.device("cpu")
        assert meter.peak_bytes_by_device == {
            torch.device(SECOND): meter.peak_bytes,
            host: sum(packed),
        }
        assert alone.peak_bytes_by_device == {host: alone.peak_bytes}

        metered(given, budget_bytes=meter.peak_bytes)
        with pytest.raises(MemoryBudgetExceeded):
            metered(given, budget_bytes=meter.peak_bytes - 1)

        on_host = metered(given, device="cpu")
        assert on_host.peak_bytes == sum(packed)
        assert on_host.peak_bytes_by_device == meter.peak_bytes_by_device
        assert sum(on_host.at_peak().values()) == on_host.peak_bytes and on_host.entry_bytes == 0


def test_step_counts_that_adam_keeps_on_the_cpu_are_no_part_of_what_its_device_holds():
    with symbolic():
        model, optimizer, _ = given = on_second_device(nullcontext, optimizer=torch.optim.Adam)
        assert {state["step"].device.type for state in optimizer.state.values()} == {"cpu"}
        meter = metered(given)
        assert meter.entry_bytes == 3 * bytes_of(model.parameters())
        assert metered(given, device="cpu").entry_bytes == 4 * len(optimizer.state)


def test_the_device_is_the_cpu_until_the_first_accelerator_is_met():
    with symbolic(), MemoryMeter() as meter:
        on_cpu = torch.ones(100)
        assert meter.live_bytes == meter.peak_bytes == on_cpu.nbytes
        first = torch.ones(10, device="cuda")
        assert meter.live_bytes == meter.peak_bytes == first.nbytes
        second, state = torch.ones(1000, device="cuda:1"), torch.get_rng_state()
        second.resize_(2000)
        assert meter.live_bytes == meter.peak_bytes == first.nbytes
    # before it too, no other device's
    assert [sample.live_bytes for sample in meter.timeline] == [0, 40, 40, 40, 40]
    found = {str(device): count for device, count in meter.peak_bytes_by_device.items()}
    assert found == {
        "cpu": on_cpu.nbytes + state.nbytes,
        "cuda:0": first.nbytes,
        "cuda:1": second.nbytes,
    }
    assert str(meter.device) == "cuda:0"
    assert MemoryMeter().peak_bytes_by_device == {}


def test_the_first_tensor_of_an_accelerator_may_be_the_one_that_passes_the_budget():
    with symbolic(), MemoryMeter(budget_bytes=500):
        on_cpu = torch.ones(100)  # noqa: F841
        with pytest.raises(MemoryBudgetExceeded) as caught:
            torch.ones(200, device="cuda")
        assert (caught.value.live_bytes, caught.value.wanted_bytes) == (0, 800)
        first, more = torch.ones(75, device="cuda"), torch.ones(200)  # noqa: F841 - which the CPU's bytes do not
        with pytest.raises(MemoryBudgetExceeded) as caught:
            torch.ones(60, device="cuda")
        assert (caught.value.live_bytes, caught.value.wanted_bytes) == (300, 240)


@pytest.mark.parametrize(
    ("device", "name", "count"),
    [
        ("cpu", "cpu", 1),
        ("cpu:0", "cpu", 1),
        ("cuda", "cuda:0", 10),
        (torch.device("cuda:1"), "cuda:1", 100),
    ],
)
def test_a_device_that_is_named_is_counted_whichever_comes_first(device, name, count):
    with symbolic(), MemoryMeter(device=device) as meter:
        made = [torch.ones(n, device=d) for n, d in ((10, "cuda"), (100, "cuda:1"), (1, "cpu"))]
    assert (str(meter.device), meter.peak_bytes) == (name, 4 * count)
    assert sum(meter.peak_bytes_by_device.values()) == bytes_of(made)


def test_meta_tensors_count_where_that_device_is_named():
    def step():
        model(x).sum().backward()

    with torch.device("meta"):
        model, x = deep_mlp(4, 64), torch.ones(32, 64)
    found = measure(step, model=model, device="meta")
    assert metered((model, None, step)).peak_bytes == 0
    with symbolic():
        model, x = deep_mlp(4, 64), torch.ones(32, 64)
        alike = measure(step, model=model)
    assert (found.peak_bytes, found.at_peak, found.flops) == (
        alike.peak_bytes,
        alike.at_peak,
        alike.flops,
    )
    assert (found.device, found.allocator_peak_bytes, found.seconds, found.notes) == (
        "meta",
        None,
        None,
        (),
    )


def test_measure_counts_the_device_that_it_is_told():
    with symbolic():
        model, optimizer, step = given = on_second_device(save_on_cpu, lr=0.1)
        for options in ({}, {"device": "cpu"}):
            found, meter = (
                measure(step, model=model, optimizer=optimizer, **options),
                metered(given, **options),
            )
            assert (found.peak_bytes, found.at_peak) == (meter.peak_bytes, meter.at_peak())
            assert found.device == options.get("device", SECOND)


# ---- the budget


def fresh_step():
    model, x = deep_mlp(3, 32), torch.ones(16, 32)
    return train(model, x, optimizer=torch.optim.Adam, foreach=False)


@pytest.mark.parametrize("phase", PHASES)
def test_the_operator_that_takes_live_bytes_over_the_budget_raises(phase):
    model, optimizer, step = fresh_step()
    with MemoryMeter(model, optimizer) as free:
        step()
    live = [free.entry_bytes] + [sample.live_bytes for sample in free.timeline]
    highest = list(accumulate(live, max))
    moments = [
        i for i in range(1, len(live)) if live[i] > highest[i - 1] and free.phases()[i - 1] == phase
    ]
    for moment in (moments[0], moments[-1]):
        model, optimizer, step = fresh_step()
        meter = MemoryMeter(model, optimizer, budget_bytes=live[moment] - 1)
        with everything_undone_afterwards(), pytest.raises(MemoryBudgetExceeded) as caught, meter:
            step()
        error = caught.value
        assert error.operator == free.timeline[moment - 1].operator
        assert error.live_bytes + error.wanted_bytes == live[moment] == meter.peak_bytes
        assert error.budget_bytes == live[moment] - 1 >= error.live_bytes
        assert meter.phases()[-1] == phase
        for part in (
            error.operator,
            f"{error.wanted_bytes:,}",
            f"{error.live_bytes:,}",
            f"{error.budget_bytes:,}",
        ):
            assert part in str(error)
    model, optimizer, step = fresh_step()
    with MemoryMeter(model, optimizer, budget_bytes=free.peak_bytes) as meter:
        step()
    assert meter.peak_bytes == free.peak_bytes


def test_after_the_error_the_same_model_trains_on_with_the_right_gradients():
    model, x = deep_mlp(3, 32), torch.ones(16, 32)
    with MemoryMeter(model) as free:
        square_mean(model(x)).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    empty_gradients(model)
    with MemoryMeter(model, budget_bytes=free.peak_bytes - 1):
        with pytest.raises(MemoryBudgetExceeded):
            square_mean(model(x)).backward()
        empty_gradients(model)
        model(x[:1])  # in the same block too
    square_mean(model(x)).backward()
    assert all(
        torch.equal(p.grad, gradient)
        for p, gradient in zip(model.parameters(), expected, strict=True)
    )


def test_what_the_refused_operator_made_is_gone():
    with MemoryMeter(budget_bytes=1000) as meter:
        x = torch.ones(10)
        with pytest.raises(MemoryBudgetExceeded) as caught:
            torch.ones(1000)
        assert meter.live_bytes == caught.value.live_bytes == x.nbytes
        assert caught.value.wanted_bytes == 4000


def test_a_budget_below_what_the_model_holds_raises_on_entry():
    model = nn.Linear(16, 16)
    held = bytes_of(model.parameters())
    meter = MemoryMeter(model, budget_bytes=held - 1)
    with (
        everything_undone_afterwards(),
        pytest.raises(MemoryBudgetExceeded, match="on entry") as caught,
        meter,
    ):
        pytest.fail("the block ran")
    assert (caught.value.live_bytes, caught.value.wanted_bytes) == (0, held)
    with MemoryMeter(model, budget_bytes=held):
        pass


def test_the_error_survives_pickling():
    error = pickle.loads(pickle.dumps(MemoryBudgetExceeded("aten.mm.default", 1, 2, 3)))
    assert (error.operator, error.live_bytes, error.wanted_bytes, error.budget_bytes) == (
        "aten.mm.default",
        1,
        2,
        3,
    )


# ---- measure


class Restless(nn.Module):
    """Changes everything that a step can change."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        random.random(), np.random.rand()
        return self.last(F.dropout(self.norm(self.first(x)), 0.5))


def state_of(model, optimizer):
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    randoms = torch.get_rng_state(), random.getstate(), np.random.get_state()
    return *state, *randoms


def assert_same_state(model, optimizer, before):
    weights, state, of_torch, of_python, of_numpy = state_of(model, optimizer)
    assert_close(weights, before[0], rtol=0, atol=0)
    assert state["param_groups"] == before[1]["param_groups"]
    assert_close(state["state"], before[1]["state"], rtol=0, atol=0)
    assert torch.equal(of_torch, before[2])
    assert of_python == before[3]
    assert np.array_equal(of_numpy[1], before[4][1]) and of_numpy[2:] == before[4][2:]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("stepped", [False, True])
def test_measure_leaves_everything_as_it_was(stepped, fails):
    model, x = Restless(), torch.randn(4, 8)
    optimizer = torch.optim.Adam(model.parameters())
    runs = []

    def step():
        model(x).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model.first.weight.mul_(0.5)
        model.last.weight.data.add_(1)  # counts no version on
        optimizer.param_groups[0]["lr"] *= 0.5
        runs.append(1)
        if fails and len(runs) == 3:
            raise ZeroDivisionError

    if stepped:
        step()
    gradients = {parameter: torch.randn_like(parameter) for parameter in model.parameters()}
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
    held = {parameter: parameter.grad.clone() for parameter in gradients}
    buffers = dict(model.named_buffers())
    moments = [value for state in optimizer.state.values() for value in state.values()]
    before = state_of(model, optimizer)
    runs.clear()
    if fails:
        with pytest.raises(ZeroDivisionError):
            measure(step, model=model, optimizer=optimizer, repeats=1)
    else:
        assert measure(step, model=model, optimizer=optimizer, repeats=1).changed_parameters == 0
    assert_same_state(model, optimizer, before)
    for parameter, gradient in gradients.items():
        assert parameter.grad is gradient
        assert torch.equal(gradient, held[parameter])
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    after = [value for state in optimizer.state.values() for value in state.values()]
    assert all(a is b for a, b in zip(moments, after, strict=True))


def optimizers_with_state_elsewhere():
    from course_lib.offload import OffloadedOptimizer

    return {
        "in another optimizer": Wraps,
        "in a file": lambda parameters: OffloadedOptimizer(parameters, lr=0.1),
    }


@pytest.mark.parametrize(("stepped", "warmup"), [(False, 0), (True, 1)])
@pytest.mark.parametrize("kind", optimizers_with_state_elsewhere())
def test_measure_leaves_the_state_of_an_optimizer_that_keeps_it_elsewhere(kind, stepped, warmup):
    model = deep_mlp(2, 16)
    optimizer = optimizers_with_state_elsewhere()[kind](model.parameters())

    def step():
        square_mean(model(torch.ones(4, 16))).backward()
        optimizer.step()

    if stepped:
        step()
    before = copy.deepcopy(optimizer.state_dict())
    weights = copy.deepcopy(model.state_dict())
    found = measure(step, model=model, optimizer=optimizer, repeats=1, warmup=warmup)
    assert_close(model.state_dict(), weights, rtol=0, atol=0)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert_close(after["state"], before["state"], rtol=0, atol=0)
    assert found.changed_parameters == 0 and found.notes == ()


def test_measure_warms_up_until_two_runs_take_the_same():
    x, runs = nn.Parameter(torch.randn(64, 64)), []

    def step():
        runs.append(1)
        (x.repeat(max(1, 4 - len(runs)), 1) * 2).sum().backward()

    found = measure(step, repeats=1)
    assert found.workspace_bytes >= 0
    assert found.peak_bytes == measure(step, repeats=1).peak_bytes
    assert found.notes == ()


def test_a_step_that_never_takes_the_same_twice_is_noted():
    x, runs = nn.Parameter(torch.randn(8, 8)), []

    def step():
        runs.append(1)
        (x.repeat(len(runs), 1) * 2).sum().backward()

    found = measure(step, repeats=1)
    assert len(runs) < 12
    assert "no two runs took the same" in str(found)


def test_a_distributed_model_is_measured_with_its_buckets_as_they_stay(one_process):
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    )
    x = torch.randn(8, 64)
    found = measure(lambda: model(x).sum().backward(), model=model, repeats=1)
    assert 0 <= found.workspace_bytes < 0.01 * found.peak_bytes and found.notes == ()


def test_a_leaf_that_the_step_makes_is_not_kept_alive_by_measure():
    made = []

    def step():
        assert all(leaf() is None for leaf in made)
        x = torch.ones(8, requires_grad=True)
        made.append(weakref.ref(x))
        (x * 2).sum().backward()

    measure(step, repeats=1)


def test_without_a_model_measure_puts_gradients_back_and_says_what_changed():
    model, x = deep_mlp(2, 16), torch.randn(4, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradient = model[0].weight.grad = torch.ones(16, 16)

    def backward():
        model(x).sum().backward()

    def step():
        backward()
        optimizer.step()

    found = measure(backward, repeats=1)
    assert found.changed_parameters == 0
    assert "changed" not in str(found)
    found = measure(step, repeats=1)
    assert found.changed_parameters == 4
    assert "the step changed 4 parameters" in str(found)
    assert model[0].weight.grad is gradient and torch.equal(gradient, torch.ones(16, 16))
    assert model[0].bias.grad is None


class _Kernel(torch.autograd.Function):
    """As one that calls a kernel of its own: no operator meets its input."""

    @staticmethod
    def forward(ctx, x):
        return torch.ones(x.shape)

    @staticmethod
    def backward(ctx, gradient):
        return torch.ones(gradient.shape)


def test_without_a_model_gradients_are_put_back_of_leaves_that_no_operator_meets():
    x = torch.randn(4, requires_grad=True)
    before = x.grad = torch.zeros(4)
    found = []

    def step():
        _Kernel.apply(x).sum().backward()
        found.append(x.grad.tolist())

    measure(step, repeats=1)
    assert x.grad is before and before.tolist() == [0] * 4
    assert all(gradient == [1] * 4 for gradient in found)


@pytest.mark.parametrize("warmup", [0, 1])
def test_warmup_0_measures_the_first_step_ever(warmup):
    def make():
        # its peak is in the optimizer's step
        return optimizer_step(torch.optim.Adam, foreach=False)

    model, optimizer, step = make()
    found = measure(step, model=model, optimizer=optimizer, warmup=warmup, repeats=1)
    assert found.at_peak["parameter"] == bytes_of(model.parameters())
    # in its run it's a first step too
    assert found.peak_bytes == pytest.approx(found.allocator_peak_bytes, rel=1e-5)
    assert found.workspace_bytes >= 0
    model, optimizer, step = make()
    with MemoryMeter(model, optimizer) as first:
        step()
    if warmup == 0:
        assert found.peak_bytes == first.peak_bytes
        assert found.at_peak == first.at_peak()


@pytest.mark.parametrize("enabled", [False, True])
def test_measure_leaves_garbage_collection_as_it_was(enabled):
    model, was = nn.Linear(4, 4), gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        measure(lambda: model(torch.ones(1, 4)).sum().backward(), repeats=1)
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was else gc.disable)()


@pytest.mark.parametrize("keys", [4, 2, 1])
def test_the_flops_of_attention_do_not_depend_on_how_many_heads_share_their_keys(keys):
    q, k, v = (torch.ones(2, heads, 8, 16, requires_grad=True) for heads in (4, keys, keys))
    with MemoryMeter() as meter:
        F.scaled_dot_product_attention(q, k, v, enable_gqa=True).sum().backward()
    assert meter.flops == 7 * 2 * (2 * 4 * 8 * 8 * 16)  # products of matrices, 2 and 5 of them


def test_the_flops_of_an_mlp_are_those_of_its_matrix_products():
    depth, width, batch = 4, 32, 8
    model, x = deep_mlp(depth, width), torch.randn(batch, width)
    found = measure(lambda: model(x).sum().backward(), model=model, repeats=1)
    # 2*b*n*n forward, as many for the weight's gradient, and for the input's, which the first layer
    # does not need.
    assert found.flops == (3 * depth - 1) * 2 * batch * width * width
    forward = measure(lambda: model(x).sum(), model=model, repeats=1, needs_gradient=False)
    assert forward.flops == depth * 2 * batch * width * width


def test_a_step_that_leaves_no_gradient_is_an_error():
    with pytest.raises(
        ValueError, match=r"^step must call backward\(\) .*, got one without a backward pass"
    ):
        measure(lambda: nn.Linear(2, 2)(torch.ones(1, 2)), repeats=1)


# ---- "Run plain first, then the other, and compare"


def test_measure_finds_the_same_whichever_arm_comes_first():
    def measured(order):
        model, x = deep_mlp(6, 64), torch.randn(64, 64)
        optimizer = torch.optim.Adam(model.parameters())

        def step(forward):
            square_mean(forward(x)).backward()
            optimizer.step()

        arms = {"plain": model, "forgetful": lambda x: checkpoint(model, x, use_reentrant=False)}
        found = {
            n: measure(lambda n=n: step(arms[n]), model=model, optimizer=optimizer, repeats=1)
            for n in order
        }
        return {name: replace(one, seconds=0) for name, one in found.items()}

    assert measured(["plain", "forgetful"]) == measured(["forgetful", "plain"])


# ---- saved_tensors


def count_packs(function, *args, hidden=()):
    """The independent oracle: (bytes of every packed tensor, bytes of their storages counted
    once)."""
    hidden = {tensor.untyped_storage().data_ptr() for tensor in hidden}
    packed, held = 0, {}

    def pack(tensor):
        nonlocal packed
        address = tensor.untyped_storage().data_ptr()
        if address not in hidden:
            packed += tensor.nbytes
            held[address] = tensor.untyped_storage()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function(*args)
    total = sum(storage.nbytes() for storage in held.values())
    del result
    return packed, total


def test_each_layer_keeps_two_activations():
    model, x = deep_mlp(2, 8), torch.randn(4, 8)
    rows = [
        (row.operator, row.argument, row.shape, row.dtype, row.bytes, row.shared_with)
        for row in saved_tensors(model, x)
    ]
    one = ((4, 8), torch.float32, 128, None)
    assert rows == [("AddmmBackward0", "mat1", *one), ("GeluBackward0", "self", *one)] * 2
    for depth in (2, 5, 9):
        assert saved_tensors(deep_mlp(depth, 8), x).total_bytes == 2 * depth * x.nbytes


def models_to_save():
    return {
        "mlp": (deep_mlp(3, 16), (4, 16)),
        "layer": (DecoderLayer(16, 2, dropout=0.1), (2, 4, 16)),
        "layer, no dropout": (DecoderLayer(16, 2, norm_first=False), (2, 4, 16)),
        "fused": (DecoderLayer(16, 2, fused=True), (2, 4, 16)),
        "batch norm": (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()), (4, 8)),
    }


@pytest.mark.parametrize("name", models_to_save())
def test_saved_bytes_are_those_that_hooks_count(name):
    model, shape = models_to_save()[name]
    x = torch.randn(shape)
    found = saved_tensors(model, x)
    torch.manual_seed(0)
    packed, total = count_packs(model, x, hidden=[*model.parameters(), *model.buffers()])
    assert (found.packed_bytes, found.total_bytes) == (packed, total)
    assert sum(row.bytes for row in found if row.shared_with is None) == found.total_bytes
    everything = saved_tensors(model, x, parameters=True)
    assert (everything.packed_bytes, everything.total_bytes) == count_packs(model, x)


def test_a_storage_that_several_operators_save_counts_once():
    x = torch.randn(4, 8)
    projections = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    found = saved_tensors(lambda x: [project(x) for project in projections], x)
    assert [row.shared_with for row in found] == [None, 0, 0]
    assert (found.total_bytes, found.packed_bytes) == (x.nbytes, 3 * x.nbytes)


def test_parameters_are_told_by_storage():
    x = torch.randn(4, 8, requires_grad=True)
    layer = nn.Linear(8, 8)
    assert [row.argument for row in saved_tensors(layer, x)] == ["mat1"]
    rows = saved_tensors(layer, x, parameters=True)
    assert [(row.argument, row.bytes) for row in rows] == [
        ("mat1", x.nbytes),
        ("mat2", layer.weight.nbytes),
    ]
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    # frozen: only its weight is saved, for the input's gradient
    assert list(saved_tensors(layer, x)) == []
    assert saved_tensors(layer, x, parameters=True).total_bytes == layer.weight.nbytes


model_in_a_global = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval()


def test_buffers_of_modules_are_not_listed_however_the_function_comes_by_them():
    x, model = torch.randn(4, 8), model_in_a_global
    ways = [model, lambda x: model(x), lambda x: model_in_a_global(x), model.forward]
    totals = [saved_tensors(way, x).total_bytes for way in ways]
    assert totals == [totals[0]] * len(ways)
    assert {row.argument for row in saved_tensors(model, x) if row.bytes} == {"mat1", "input"}
    listed = saved_tensors(model, x, parameters=True)
    assert {"running_mean", "running_var"} <= {row.argument for row in listed}
    assert listed.total_bytes > totals[0]


def test_what_is_given_as_an_argument_is_listed_even_if_it_is_a_parameter():
    weight = nn.Parameter(torch.randn(8))
    assert saved_tensors(lambda w: (w**2).sum(), weight).total_bytes == weight.nbytes
    assert saved_tensors(lambda: (weight**2).sum()).total_bytes == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_keeps_its_input_as_the_formula_says(reentrant):
    layer, x = DecoderLayer(32, 4, dropout=0.1), torch.randn(2, 16, 32, requires_grad=True)
    found = saved_tensors(lambda x: checkpoint(layer, x, use_reentrant=reentrant), x)
    rows = [row for row in found if row.bytes]  # torch 2.9: and an empty one
    assert [(row.shape, row.bytes) for row in rows] == [(x.shape, x.nbytes)]
    shape = {"sequence": 16, "batch": 2, "hidden": 32, "heads": 4}
    assert found.total_bytes == transformer_activation_bytes(
        **shape, recompute="full", dtype_bytes=4
    )


def test_an_autograd_function_lists_what_it_saves_for_backward():
    class Exponential(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x.exp()
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.saved_tensors[0]

    (row,) = saved_tensors(Exponential.apply, torch.ones(3, requires_grad=True))
    assert (row.operator, row.argument, row.bytes) == ("ExponentialBackward", "saved_tensors", 12)


def test_a_view_counts_with_the_storage_that_it_keeps_alive():
    x = torch.randn(100, 100, requires_grad=True)
    (row,) = saved_tensors(lambda x: x[0].exp().sum() + (x[1] ** 2).sum(), x)[1:]
    assert (row.shape, row.bytes) == ((100,), x.nbytes)


def test_an_in_place_change_of_a_view_is_listed():
    def function(x):
        y = x * 2
        y[0].mul_(x[0])
        return y

    x = torch.randn(4, 8, requires_grad=True)
    found = saved_tensors(function, x)
    assert (found.packed_bytes, found.total_bytes) == count_packs(function, x)
    assert found.total_bytes > 0


def test_what_the_result_does_not_need_is_not_listed():
    def function(x):
        x.exp()  # its graph dies at once
        return x.tanh()

    assert [row.operator for row in saved_tensors(function, torch.ones(3, requires_grad=True))] == [
        "TanhBackward0"
    ]


def test_saved_tensors_keeps_nothing_alive():
    x, results = torch.ones(3, requires_grad=True), []

    def function(x):
        y = x.exp().softmax(0).tanh()  # each saves its own result
        results.append(weakref.ref(y.untyped_storage()))
        return y

    with MemoryMeter() as meter:
        saved_tensors(function, x)
        assert results[0]() is None
        assert meter.live_bytes == 0


@dataclass
class Output:
    loss: torch.Tensor
    states: tuple


def test_keyword_arguments_are_listed_and_outputs_in_dataclasses_are_followed():
    def function(scale, *, x, parts):
        return Output(loss=(x**2).sum() * scale, states=(parts["y"].exp(),))

    x, y = torch.ones(3, requires_grad=True), nn.Parameter(torch.ones(5))
    found = saved_tensors(function, 2.0, x=x, parts={"y": y})
    assert {(row.operator, row.shape) for row in found} == {
        ("PowBackward0", (3,)),
        ("ExpBackward0", (5,)),
    }
    found = saved_tensors(lambda x: {"a": [x.exp()], "b": (x.tanh(), 3)}, x)
    assert {row.operator for row in found} == {"ExpBackward0", "TanhBackward0"}
    (row,) = saved_tensors(lambda parts: (parts["y"] ** 2).sum(), parts={"y": y})
    assert row.bytes == y.nbytes  # a parameter, but given


def test_saved_tensors_says_what_is_wrong():
    with pytest.raises(ValueError, match="nothing that requires a gradient"):
        saved_tensors(lambda x: x * 2, torch.ones(3))
    with pytest.raises(
        TypeError, match="function must be a module or a function that returns tensors, got 3"
    ):
        saved_tensors(3)
    hooks = len(torch.nn.modules.module._global_forward_pre_hooks)
    with pytest.raises(ZeroDivisionError):
        saved_tensors(lambda: 1 / 0)
    assert len(torch.nn.modules.module._global_forward_pre_hooks) == hooks
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


# ---- formulas


def test_mixed_precision_adam_takes_16_bytes_a_parameter():
    assert training_state_bytes(1, "mixed-adam") == {"parameter": 2, "gradient": 2, "optimizer": 12}
    totals = {name: sum(training_state_bytes(7_000_000_000, name).values()) for name in RECIPES}
    assert totals == {name: 7_000_000_000 * each for name, each in RECIPES.items()}
    assert training_state_bytes(7e9, "fp32-adam") == training_state_bytes(
        7_000_000_000, "fp32-adam"
    )


RECIPES = {"fp32-sgd": 8, "fp32-momentum": 12, "fp32-adam": 16, "mixed-adam": 16}


@pytest.mark.parametrize(
    ("recipe", "make"),
    [
        ("fp32-momentum", lambda p: torch.optim.SGD(p, momentum=0.9)),
        ("fp32-adam", torch.optim.Adam),
    ],
)
def test_a_recipes_bytes_are_those_that_the_meter_finds(recipe, make):
    model, optimizer, step = train(deep_mlp(2, 32), torch.ones(1, 32), optimizer=make)
    with MemoryMeter(model, optimizer) as meter:
        step()
    expected = training_state_bytes(sum(p.numel() for p in model.parameters()), recipe)
    expected["optimizer"] += 4 * 4 if recipe == "fp32-adam" else 0  # Adam's step counts
    assert {name: at_end(meter)[name] for name in expected} == expected


def layer_saves(s, b, h, a, dtype, **options):
    layer = DecoderLayer(h, a, **options).to(dtype)
    return saved_tensors(layer, torch.randn(b, s, h, dtype=dtype)).total_bytes


def test_a_layers_formula_is_exact_for_any_shape():
    hypothesis = pytest.importorskip("hypothesis")
    shapes = hypothesis.strategies

    @hypothesis.settings(max_examples=20, deadline=None, derandomize=True, database=None)
    @hypothesis.given(
        s=shapes.integers(2, 12),
        b=shapes.integers(1, 3),
        a=shapes.integers(1, 4),
        per_head=shapes.integers(2, 6),
        dtype=shapes.sampled_from([torch.float32, torch.bfloat16]),
        norm_first=shapes.booleans(),
        dropout=shapes.sampled_from([0.0, 0.1]),
    )
    def exact(s, b, a, per_head, dtype, norm_first, dropout):
        h = a * per_head
        expected = transformer_activation_bytes(
            sequence=s,
            batch=b,
            hidden=h,
            heads=a,
            dtype_bytes=dtype.itemsize,
            mask_bytes=1 if dropout else 0,
            statistic_bytes=dtype.itemsize,
        )
        assert layer_saves(s, b, h, a, dtype, norm_first=norm_first, dropout=dropout) == expected

    exact()


def test_the_formula_is_that_of_the_paper():
    for s, b, h, a in ((2048, 4, 4096, 32), (1024, 1, 768, 12), (128, 2, 64, 1)):
        shape = {"sequence": s, "batch": b, "hidden": h, "heads": a}
        assert transformer_activation_bytes(**shape) == s * b * h * 34 + 5 * a * s * s * b
        assert transformer_activation_bytes(**shape, recompute="selective") == 34 * s * b * h
        assert transformer_activation_bytes(**shape, recompute="full") == 2 * s * b * h
        for recompute in ("none", "selective", "full"):
            one = transformer_activation_bytes(**shape, recompute=recompute)
            assert transformer_activation_bytes(**shape, layers=7, recompute=recompute) == 7 * one


def test_masks_in_the_activations_dtype_cost_an_eighth_more(monkeypatch):
    s, b, h, a = 512, 1, 512, 8
    native = layer_saves(s, b, h, a, torch.bfloat16, dropout=0.1)
    monkeypatch.setattr(Dropout, "forward", lambda self, x: F.dropout(x, self.p, self.training))
    wide = layer_saves(s, b, h, a, torch.bfloat16, dropout=0.1)
    shape = {"sequence": s, "batch": b, "hidden": h, "heads": a}
    assert (
        native
        == transformer_activation_bytes(**shape, statistic_bytes=2)
        == s * b * h * (34 + 5 * 8) + 8 * s * b
    )
    assert wide == transformer_activation_bytes(**shape, statistic_bytes=2, mask_bytes=2)
    assert wide / native - 1 == pytest.approx(0.1351, abs=1e-4)


def standard_core(q, k, v):
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(dim=-1) @ v


def heads_of(batch, heads, sequence, head_dim, kv_heads=None):
    q = torch.randn(batch, heads, sequence, head_dim, requires_grad=True)
    k, v = (
        torch.randn(batch, kv_heads or heads, sequence, head_dim, requires_grad=True)
        for _ in range(2)
    )
    return q, k, v


def test_standard_attention_keeps_q_k_v_and_p_but_not_s():
    shape = {"sequence": 512, "batch": 1, "heads": 12, "head_dim": 64}
    q, k, v = heads_of(1, 12, 512, 64)
    found = saved_tensors(standard_core, q, k, v)
    expected = attention_saved_bytes(**shape)
    assert expected == {"q": 1_572_864, "k": 1_572_864, "v": 1_572_864, "p": 12_582_912}
    assert found.total_bytes == sum(expected.values()) == 17_301_504
    # P, and no S
    assert sum(row.shape == (1, 12, 512, 512) for row in found if row.shared_with is None) == 1


def test_fused_attention_keeps_no_probabilities():
    shape = {"sequence": 512, "batch": 1, "heads": 12, "head_dim": 64, "kind": "flash"}
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        found = saved_tensors(F.scaled_dot_product_attention, *heads_of(1, 12, 512, 64))
    expected = attention_saved_bytes(**shape)
    assert found.total_bytes == sum(expected.values()) == 6_316_032
    assert attention_saved_bytes(**shape, dtype_bytes=2)["lse"] == expected["lse"]  # in fp32
    assert {row.argument: row.bytes for row in found} == {
        "query": expected["q"],
        "key": expected["k"],
        "value": expected["v"],
        "output": expected["o"],
        "logsumexp": expected["lse"],
    }


def test_grouped_query_attention_keeps_fewer_keys_and_values():
    expected = attention_saved_bytes(
        sequence=64, batch=2, heads=8, head_dim=16, kv_heads=2, kind="flash"
    )
    assert expected["k"] == expected["v"] == expected["q"] // 4
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        found = saved_tensors(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
            *heads_of(2, 8, 64, 16, 2),
        )
    assert found.total_bytes == sum(expected.values())
    standard = attention_saved_bytes(sequence=64, batch=2, heads=8, head_dim=16, kv_heads=2)
    assert standard == {"q": 65_536, "k": 16_384, "v": 16_384, "p": 2 * 8 * 64 * 64 * 4}


# ---- showing


def test_the_library_imports_nothing_that_draws_and_works_without():
    code = """
import sys
from course_lib.memory import measure, saved_tensors
from course_lib.models import deep_mlp
extras = ("matplotlib", "IPython", "pandas", "course_lib.teaching")
print(*(name for name in extras if name in sys.modules))
sys.modules.update(dict.fromkeys(extras))  # importing them fails from here on
import torch
model, x = deep_mlp(2, 8), torch.ones(4, 8)
table = saved_tensors(model, x)
print("<table" in table._repr_html_(), "4 saved tensors, 512 bytes" in str(table))
found = measure(lambda: model(x).sum().backward(), model=model, repeats=1)
print("<table" in found._repr_html_(), "peak of live tensors" in repr(found))
"""
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=HANGS_SECONDS,
        check=True,
    )
    assert found.stdout.split() == ["True"] * 4


def test_the_plot_marks_the_peak():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    model, optimizer, step = mlp()
    with MemoryMeter(model, optimizer) as meter:
        step()
    ax = meter.plot()
    try:
        (mark,) = ax.lines
        (moment,), (height,) = mark.get_data()
        assert height == meter.peak_bytes / 1e6
        assert meter.timeline[moment - 1].live_bytes == meter.peak_bytes
        assert [text.get_text() for text in ax.texts] == [f"{meter.peak_bytes / 1e6:,.2f} MB"]
        assert {text.get_text() for text in ax.get_legend().get_texts()} <= set(CATEGORIES)
        assert (ax.get_xlabel(), ax.get_ylabel()) == ("operators", "live MB")
        _, other = plt.subplots()
        assert meter.plot(other) is other
    finally:
        plt.close("all")


def test_plot_without_matplotlib_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with MemoryMeter() as meter:
        torch.ones(4)
    with pytest.raises(ModuleNotFoundError, match=r"`pip install matplotlib`.* extra `plot`"):
        meter.plot()


# ---- on a GPU


def gpu_decoder():
    model = Decoder(
        vocabulary=1000, hidden=256, heads=8, layers=4, sequence=128, dropout=0.1
    ).cuda()
    tokens = random_tokens(8, 128, 1000).cuda()
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        model.loss(tokens).backward()
        optimizer.step()

    return model, optimizer, step


def requested(which):
    """What programs asked of the CUDA allocator; what it hands out is up to 1 MB a block more."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]


class Requests(TorchDispatchMode):
    """The most bytes asked for and not given back at an operator's end, and the most that one held
    beyond that."""

    between = workspace = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = requested("current")
        torch.cuda.reset_peak_memory_stats()
        result = func(*args, **(kwargs or {}))
        after = requested("current")
        self.between = max(self.between, after)
        self.workspace = max(self.workspace, requested("peak") - max(before, after))
        return result


def before_a_gpu_step(model, step):
    """What is asked for then; warmed up: cuBLAS asks for workspace once a thread and keeps it, Adam
    makes its state."""
    for _ in range(2):
        empty_gradients(model)
        step()
    empty_gradients(model)
    gc.collect()
    return requested("current")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "hooks", [nullcontext, partial(save_on_cpu, pin_memory=True)], ids=["plain", "save_on_cpu"]
)
def test_on_a_gpu_the_meters_peak_is_what_was_asked_of_the_allocator(hooks):
    """Equal to the byte at operators' ends, where workspace is free again: both modes see the same
    operators, none of whose gradients meet (which a mode would add out of place, and the meter
    counts as added in place).
    """
    model, optimizer, step = on_second_device(hooks, "cuda", torch.optim.Adam)
    before = before_a_gpu_step(model, step)
    with Requests() as asked:
        step()
    empty_gradients(model)
    meter = metered((model, optimizer, step))
    assert meter.peak_bytes == asked.between - before + meter.entry_bytes
    kept = meter.peak_bytes_by_device.get(torch.device("cpu"), 0)
    # at least the layers' inputs
    assert kept == 0 if hooks is nullcontext else kept >= 4 * 32 * 64 * 4


@pytest.mark.gpu
def test_on_a_gpu_the_allocators_peak_is_within_one_operators_workspace_of_the_meters():
    """No mode is active where the allocator's peak is taken. It is never below the meter's: at each
    operator's end all that the meter counts is allocated. Nor is it above by more than an operator
    takes beyond what it found or left.
    """
    model, optimizer, step = gpu_decoder()
    before = before_a_gpu_step(model, step)
    with Requests() as asked:
        step()
    empty_gradients(model)
    meter = metered((model, optimizer, step))
    torch.cuda.reset_peak_memory_stats()
    step()
    seen = meter.entry_bytes + requested("peak") - before
    assert meter.peak_bytes <= seen <= meter.peak_bytes + asked.workspace
    assert sum(meter.at_peak().values()) == meter.peak_bytes


@pytest.mark.gpu
def test_on_a_gpu_measure_of_the_cpu_looks_at_the_cpus_allocator():
    x = torch.ones(1 << 22, device="cuda")

    def step():
        (torch.ones(1 << 18) * 2).sum()
        (x * 2).sum()

    found = measure(step, needs_gradient=False, device="cpu", repeats=1)
    assert found.peak_bytes == 2 << 20  # both of the small tensors
    assert 2 << 20 <= found.allocator_peak_bytes < x.nbytes


@pytest.mark.gpu
def test_on_a_gpu_measure_reports_the_device_and_the_allocators_figures():
    model, optimizer, step = gpu_decoder()
    before = torch.cuda.get_rng_state()
    found = measure(step, model=model, optimizer=optimizer, repeats=1)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert found.device.startswith("cuda")
    assert found.allocator_peak_bytes > 0
    assert found.workspace_bytes == found.allocator_peak_bytes - found.peak_bytes
    assert found.workspace_bytes >= 0
    assert sum(found.at_peak.values()) == found.peak_bytes
    assert found.seconds > 0


@pytest.mark.gpu
def test_on_a_gpu_the_backward_pass_of_autograds_own_thread_is_counted():
    model, optimizer, step = gpu_decoder()
    with MemoryMeter(model, optimizer) as meter:
        step()
    assert set(meter.phases()) == set(PHASES)
    assert at_end(meter)["gradient"] == at_end(meter)["parameter"] == bytes_of(model.parameters())
    total = sum(meter.series().values())
    assert total.max() == meter.peak_bytes
    assert at_end(meter)["activation"] == 0


@pytest.mark.parametrize("size", [1_000, 10_000, 100_000])
def test_what_was_made_before_a_run_and_dies_in_it_does_not_lower_the_allocators_peak(size):
    x = torch.randn(size, requires_grad=True)

    def step():
        # frees what the last run has made; some such blocks an earlier profile has seen being made
        x.grad = None
        (x * 2).sum().backward()

    for _ in range(6):  # which ones, addresses decide
        found = measure(step, model=nn.Linear(2, 2), repeats=1)
        assert found.peak_bytes <= found.allocator_peak_bytes <= found.peak_bytes + 64


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


def test_what_no_operator_made_has_a_moment_of_its_own_where_another_has_died():
    for grow in (False, True):
        with MemoryMeter() as meter:
            x = torch.ones(1000)
            y, empty = x * 2, x.new_empty(0).untyped_storage()
            del y
            if grow:
                empty.resize_(5056)
            else:
                empty = torch.get_rng_state().untyped_storage()
        assert (
            meter.peak_bytes
            == sum(meter.at_peak().values())
            == x.nbytes + empty.nbytes()
            == 4000 + 5056
        )
        assert [sample.live_bytes for sample in meter.timeline] == [4000, 8000, 8000, 9056]
        assert meter.timeline[-1].operator == "(no operator)" and meter.operator_count == 3


# ---- what symbolic operators make is remembered


def _outlines(function, *shapes, **options):
    """What an operator makes of such tensors, and in whose storage it lies."""
    given = [torch.empty(shape, **options) for shape in shapes]
    made = function(*given)
    found = []
    for tensor in made if isinstance(made, (tuple, list)) else [made]:
        storage = tensor.untyped_storage()
        lies_in = [i for i, x in enumerate(given) if x.untyped_storage()._cdata == storage._cdata]
        same = [i for i, x in enumerate(given) if x is tensor]
        look = (
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset(),
            tensor.dtype,
            tensor.device,
            tensor._is_view(),
        )
        kinds = torch._C._dispatch_keys(tensor), tensor.requires_grad, set(vars(tensor))
        found.append((*look, storage.nbytes(), lies_in, same, *kinds))
    return found


OUTLINED = {
    "a product": lambda x, y: x @ y.T,
    "a view of a part": lambda x, y: x[1:, 2:].T,
    "a view of a transpose": lambda x, y: x.T[1:],
    "in place": lambda x, y: x.add_(y),
    "in place of a part": lambda x, y: x[1:].mul_(2),
    "whole numbers": lambda x, y: x.long() + 1,
    "a number": lambda x, y: x.long() + 1.0,
    "a truth value": lambda x, y: x.long() + True,
    "several": lambda x, y: torch.native_layer_norm(x, [6], None, None, 1e-5),
    "parts": lambda x, y: x.split(2),
    "parts without a storage of the input": lambda x, y: (x + y).unbind(),
    "a list": lambda x, y: torch.cat([x, y, x.T.contiguous().T]),
    "strides kept": lambda x, y: (x.T + y.T).relu(),
    "expanded": lambda x, y: x[:1].expand(5, 6),
    "by the default dtype": lambda x, y: x.long() / 2,
    "resized": lambda x, y: x.resize_(2, 3),
    "transposed in place": lambda x, y: x.t_(),
    "out": lambda x, y: torch.mul(x, 2, out=y),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OUTLINED)
def test_what_is_remembered_of_an_operator_is_what_the_framework_makes_of_it(name, dtype):
    function = OUTLINED[name]
    with _fake.FakeTensorMode():
        expected = _outlines(function, (4, 6), (4, 6), dtype=dtype)
    with symbolic():
        assert [_outlines(function, (4, 6), (4, 6), dtype=dtype) for _ in range(3)] == [
            expected
        ] * 3


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_what_is_remembered_has_no_address_just_as_what_is_made_first(allowed):
    found = []
    with functorch.patch(fake_tensor_allow_unsafe_data_ptr_access=allowed), symbolic():
        x = torch.empty(3)
        for _ in range(3):
            try:
                found.append((x * 2).data_ptr())
            except RuntimeError:
                found.append("refused")
    assert found == [0 if allowed else "refused"] * 3


def test_what_is_remembered_is_told_apart_by_all_that_decides_it():
    for dtype in (torch.float32, torch.float64):
        before = torch.get_default_dtype()
        try:
            torch.set_default_dtype(dtype)
            with symbolic():
                assert (torch.empty(5, dtype=torch.int64).relu() / 2).dtype == dtype
        finally:
            torch.set_default_dtype(before)
    with symbolic():
        x = torch.empty(5)
        for _ in range(2):
            assert not x[1:].is_inference() and not (x + 1).is_inference()
            with torch.inference_mode():
                assert not x[1:].is_inference() and (x + 1).is_inference()


# ---- at the edges


def gradient_penalty(layers, run):
    """A step with double backward: each layer by `run(layer, x)`."""
    x = y = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
    for layer in layers:
        y = run(layer, y)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (y.mean() + (gradient.norm(dim=1) - 1).square().mean()).backward()
    return [parameter.grad.clone() for parameter in layers.parameters()]


@pytest.mark.parametrize("through", [checkpoint, readable_checkpoint], ids=["torch", "course_lib"])
def test_double_backward_through_checkpoints_runs_under_a_meter_as_without(through):
    layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
    expected = gradient_penalty(layers, lambda layer, x: layer(x))
    layers.zero_grad()
    with MemoryMeter(layers) as meter:
        found = gradient_penalty(layers, lambda layer, x: through(layer, x, use_reentrant=False))
    assert all(map(torch.equal, found, expected)) and meter.at_peak()["gradient"] <= 4 * 2 * 72


def test_fake_tensors_that_only_find_shapes_inside_a_block_count_nothing():
    with MemoryMeter() as meter:
        held = torch.ones(10)
        with _fake.FakeTensorMode():
            shape = torch.empty(1000, 1000)
            _ = shape @ shape
        assert (shape + 1).shape == shape.shape
    assert meter.peak_bytes == held.nbytes
    with symbolic(), MemoryMeter() as meter:  # those of a symbolic step do
        held = torch.ones(1000, 1000)
    assert meter.peak_bytes == held.nbytes
    with _fake.FakeTensorMode(), MemoryMeter() as meter:
        held = torch.ones(1000, 1000)
    assert meter.peak_bytes == held.nbytes


def test_several_optimizers_have_their_state_counted_and_put_back():
    makes, judges = nn.Linear(8, 8), nn.Linear(8, 1)
    model = nn.ModuleList([makes, judges])
    optimizers = [
        torch.optim.Adam(makes.parameters()),
        torch.optim.SGD(judges.parameters(), momentum=0.9),
    ]

    def step():
        judges(makes(torch.ones(4, 8))).mean().backward()
        for optimizer in optimizers:
            optimizer.step()

    step()
    state = 2 * 4 * 72 + 2 * 4 + 4 * 9  # two moments and two counts of Adam's, momentum
    with MemoryMeter(model, optimizers) as meter:
        step()
    assert meter.at_peak()["optimizer"] == state
    before = [value.clone() for optimizer in optimizers for value in tensors_in(optimizer.state)]
    assert (
        measure(step, model=model, optimizer=iter(optimizers), repeats=0).at_peak["optimizer"]
        == state
    )
    after = [value for optimizer in optimizers for value in tensors_in(optimizer.state)]
    assert all(map(torch.equal, before, after))
    with pytest.raises(
        TypeError,
        match=r"optimizer must be a torch.optim.Optimizer, several of them or None, got 3",
    ):
        MemoryMeter(model, [optimizers[0], 3])


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


# ---- the trace of a step


def trace_of(layers, *, checkpointed=False, batches=1, **options):
    """Forward and backward of a decoder on symbolic tensors, from its second micro-batch on with
    gradients there."""
    with symbolic():
        model = Decoder(vocabulary=97, hidden=16, heads=2, layers=layers, sequence=12)
        with (
            MemoryMeter(model, **options) as meter,
            checkpoint_blocks(model) if checkpointed else nullcontext(),
        ):
            for _ in range(batches):
                model.loss(random_tokens(3, 12, 97)).backward()
    return meter.trace()


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("batches", [1, 2])
def test_a_step_grown_from_two_blocks_and_three_is_that_of_eight_and_so_are_its_storages(
    checkpointed, batches
):
    few, more, whole = (trace_of(n, checkpointed=checkpointed, batches=batches) for n in (2, 3, 8))
    grown = Growth(few, more).trace(6)
    assert grown.operators == whole.operators
    assert np.array_equal(grown.live, whole.live) and np.array_equal(grown.replayed(), whole.live)
    assert (grown.flops, grown.peak_bytes, grown.at_peak()) == (
        whole.flops,
        whole.peak_bytes,
        whole.at_peak(),
    )
    assert len({span.storage for span in grown.spans}) == len(
        {span.storage for span in whole.spans}
    )
    lives = [
        sorted((s.start, s.stop, s.bytes, s.category) for s in trace.spans)
        for trace in (grown, whole)
    ]
    assert lives[0] == lives[1]


def test_a_step_does_not_grow_where_its_passes_differ_by_no_block():
    with pytest.raises(Irregular):
        Growth(trace_of(2), trace_of(2, batches=2))


def test_a_trace_replayed_is_what_the_meter_counted_operator_by_operator():
    model, optimizer, step = mlp()
    step()
    with MemoryMeter(model, optimizer) as meter, FlopCounterMode(display=False) as flops:
        step()
    trace = meter.trace()
    assert len(trace) == meter.operator_count + 1 and np.array_equal(trace.replayed(), trace.live)
    for name, values in meter.series().items():
        assert np.array_equal(trace.series()[name][1:], values)
    assert (trace.peak_bytes, trace.at_peak()) == (meter.peak_bytes, meter.at_peak())
    assert (
        trace.flops
        == meter.flops
        == flops.get_total_flops()
        == sum(trace.flops_by_operator().values())
    )
    births: dict = {}
    for event in trace.events():
        births.setdefault(event.storage, event)  # what follows is its end, or another category
    assert {event.kind for event in births.values()} == {"birth"}
    assert sum(event.bytes for event in births.values() if event.moment == 0) == meter.entry_bytes
    made = [event.bytes for event in births.values() if event.operator == "aten.addmm.default"]
    assert made == [256 * 128 * 4] * 6


def test_each_moment_of_a_trace_knows_its_module_forward_and_backward():
    with MemoryMeter(model := deep_mlp(2, 8), module_paths=True) as meter:
        model(torch.randn(4, 8)).sum().backward()
    trace = meter.trace()
    products = [
        (trace.modules.get(i, ""), phase)
        for i, (op, phase) in enumerate(trace.operators)
        if "mm" in str(op)
    ]
    linear = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    assert [name for name, phase in products if phase == "forward"] == linear
    # The first one's input needs no gradient.
    backward = [name for name in linear[::-1] for _ in range(1 if name == linear[0] else 2)]
    assert [name for name, phase in products if phase == "backward"] == backward
    with MemoryMeter(model) as meter:
        model(torch.randn(4, 8))
    assert meter.trace().modules == {}


def test_a_trace_without_events_says_so_and_tells_the_rest():
    with MemoryMeter(model := deep_mlp(2, 8)) as meter:
        model(torch.randn(4, 8)).sum().backward()
    trace = meter.trace(events=False)
    assert np.array_equal(trace.live, meter.trace().live)
    with pytest.raises(ValueError, match=r"^spans must be those of a trace [^\n]*, got None; "):
        next(trace.events())
