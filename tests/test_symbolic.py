"""Symbolic steps take the bytes of real steps, know the values of small tensors of integers and of
masks, and change nothing outside. `test_estimate_equals_run.py` compares steps of whole models."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.nn import functional as F
from training_steps import CountingBackend

from course_lib.memory import MemoryMeter, symbolic
from course_lib.models import deep_mlp
from course_lib.symbolic import mode


def test_rows_selected_by_a_mask_or_a_stride_take_the_bytes_of_the_real_step():
    def run():
        with MemoryMeter() as meter:
            x = torch.randn(4, 6, 3, requires_grad=True)
            mask = torch.arange(24).view(4, 6) % 5 == 0
            h = (x.flatten(0, 1) * 2).view(4, 6, 3)
            h[mask] = torch.ones(3)
            h[0] = torch.zeros(3)
            h[:, 1].mul_(3)
            (h[~mask].exp().sum() + h[1].square().sum()).backward()
        return meter.peak_bytes, meter.at_peak(), meter.live_bytes

    real = run()
    with symbolic():
        assert run() == real


def test_truncated_normal_weights_can_be_symbolic():
    with symbolic():
        weight = nn.init.trunc_normal_(nn.Parameter(torch.empty(5, 5)), std=0.02)
        assert isinstance(weight, nn.Parameter)
    assert nn.init.trunc_normal_(torch.empty(500), a=-0.5, b=0.5).abs().max() <= 0.5


def test_symbolic_step_restores_the_random_number_generator():
    state = torch.get_rng_state()
    with symbolic():
        assert len(set(torch.randint(0, 10**6, (50,)).tolist())) > 1
        torch.manual_seed(3)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.fixture
def backend():
    yield CountingBackend()
    torch.compiler.reset()


@pytest.mark.parametrize("loaded", [False, True])
def test_what_is_compiled_runs_uncompiled_in_a_symbolic_step_alone(loaded, monkeypatch, backend):
    if not loaded:  # as in a process that has compiled nothing yet
        monkeypatch.setattr(mode, "sys", SimpleNamespace(modules={}))
    peaks = []
    for compiled in (False, True):
        with symbolic():
            model, x = deep_mlp(2, 32), torch.randn(64, 32)
            model = torch.compile(model, backend=backend) if compiled else model
            function = torch.compile(lambda x: x.sin(), backend=backend, fullgraph=True)
            with MemoryMeter(model) as meter:
                function(model(x)).sum().backward()
        peaks.append(meter.peak_bytes)
    assert peaks[0] == peaks[1] and backend.runs == 0
    function(torch.randn(3))
    assert backend.runs == 1


# ---- values that a step knows


def values_that_steps_read():
    tokens, mask = torch.arange(12).view(3, 4) % 5, torch.ones(3, 4, dtype=torch.long)
    counts = torch.zeros(5, dtype=torch.long)
    counts = counts.index_add_(0, tokens.flatten(), torch.ones(12, dtype=torch.long))
    masked = tokens.masked_fill(tokens == 2, -100)
    shifted = torch.cat([tokens[:, 1:], tokens.new_full((3, 1), 7)], 1)
    return [
        bool(mask.all()),
        bool((mask.cumsum(-1).diff(dim=-1) != 1).any()),
        counts.tolist(),
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


def masks_that_models_test():
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


def counters():
    count, whole = torch.tensor(0.0), torch.tensor(3)
    alias = count.view(1)
    count += 1
    count.add_(2.5)
    whole += 2
    with pytest.raises(RuntimeError, match="can't be cast"):
        whole.add_(0.5)
    return count.item(), alias.item(), (count * 2).item(), whole.item()


@pytest.mark.parametrize("read", [values_that_steps_read, masks_that_models_test, counters])
def test_known_values_and_bytes_are_those_of_a_real_step(read):
    with MemoryMeter() as real:
        expected = read()
    with symbolic(), MemoryMeter() as meter:
        assert read() == expected
    assert [(s.operator, s.live_bytes) for s in meter.timeline] == [
        (s.operator, s.live_bytes) for s in real.timeline
    ]


def test_masks_are_unknown_after_a_write_or_in_a_large_storage():
    with symbolic():
        mask = nn.Transformer.generate_square_subsequent_mask(5)
        view, huge = mask[1:], torch.full((2**40,), 1.0)[:1]
        mask.mul_(2)
        for unknown in (mask, view, huge, torch.randn(3)):
            with pytest.raises(DataDependentOutputException):
                bool((unknown == 0).all())


def rates_after_adding(value):
    rates = torch.linspace(0, 1, 4)
    part = rates[1:]
    rates.add_(value)
    return part.tolist()


READS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool((x == 0).all()),
    "nonzero": lambda x: x.nonzero(),
    "a view": lambda x: x.flatten()[:1].item(),
    "a copy": lambda x: (x + 1).clone().max().item(),
    "a part of a changed tensor": lambda x: rates_after_adding(x.float().mean()),
}
# Integers that depend on the values of scores.
DEPENDENT = {
    "argmax": lambda scores: scores.argmax(-1, keepdim=True),
    "scatter": lambda scores: torch.zeros(3, 4, dtype=torch.long).scatter_(
        1, scores.topk(2).indices, 1
    ),
    "copy": lambda scores: torch.zeros(3, 4, dtype=torch.long).copy_(scores),
    "random": lambda scores: torch.randn(3, 1).long(),
    "add": lambda scores: torch.ones(3, 1).add_(scores[:, :1]).long(),
}


@pytest.mark.parametrize("read", READS)
def test_reading_an_unknown_value_names_the_operator(read):
    for make in DEPENDENT.values():
        assert READS[read](make(torch.ones(3, 4))) is not None
        unknown = pytest.raises((DataDependentOutputException, DynamicOutputShapeException))
        with symbolic(), unknown as caught:
            READS[read](make(torch.randn(3, 4)))
        assert re.search(r"aten\.\w+", str(caught.value))


def test_unknown_value_makes_only_its_own_storage_unknown():
    with symbolic():
        places, mine = torch.randn(3, 4).argsort(-1), torch.zeros(3, 4, dtype=torch.long)
        view, other = mine[0], mine.clone()
        assert mine.scatter_(1, places, 1) is mine and other.sum().item() == 0
        with pytest.raises(DataDependentOutputException):
            view.max().item()
        assert mine.view(4, 3).untyped_storage()._cdata == mine.untyped_storage()._cdata
        assert F.one_hot(places, 4).shape == (3, 4, 4) and mine.unsqueeze_(0).shape == (1, 3, 4)


def test_large_tensors_of_integers_stay_symbolic():
    with symbolic(), MemoryMeter() as meter:
        large = torch.zeros(2**40, dtype=torch.int8)
        small = torch.ones(1, dtype=torch.long)
        sums = small.expand(2**40) + 1
        more = large + small
    assert meter.peak_bytes == sum(tensor.nbytes for tensor in (large, small, sums, more))


def test_real_floating_point_tensor_is_refused():
    real = torch.ones(2)
    with symbolic(), pytest.raises(AssertionError, match=r"Found in aten\.mul\.Tensor"):
        real * 2
