"""Symbolic steps against real steps: bytes, known values, and state that must not change.

`test_budget_estimate_equals_run.py` compares steps of whole models.
"""

import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from estimate_checks import assert_measured
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.nn import functional as F
from training_steps import CountingBackend

from course_lib.budget import Recipe
from course_lib.memory import MemoryMeter, symbolic
from course_lib.models import deep_mlp
from course_lib.symbolic import cast, mode


def test_truncated_normal_initialization_accepts_symbolic_weights():
    with symbolic():
        weight = nn.init.trunc_normal_(nn.Parameter(torch.empty(5, 5)), std=0.02)
        assert isinstance(weight, nn.Parameter)


def test_symbolic_step_restores_random_number_generator_state():
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
def test_compiled_model_runs_uncompiled_only_inside_symbolic_mode(loaded, monkeypatch, backend):
    if not loaded:  # the compiler is not imported yet
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


# ---- known values


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
def test_symbolic_mode_computes_real_values_of_masks_and_counters(read):
    with MemoryMeter() as real:
        expected = read()
    with symbolic(), MemoryMeter() as meter:
        assert read() == expected
    assert [(s.operator, s.live_bytes) for s in meter.timeline] == [
        (s.operator, s.live_bytes) for s in real.timeline
    ]


def test_symbolic_mask_values_are_unknown_after_write_or_if_large():
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
    "view": lambda x: x.flatten()[:1].item(),
    "copy": lambda x: (x + 1).clone().max().item(),
    "part of a changed tensor": lambda x: rates_after_adding(x.float().mean()),
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
def test_reading_symbolic_value_raises_and_names_the_operator(read):
    for make in DEPENDENT.values():
        assert READS[read](make(torch.ones(3, 4))) is not None
        unknown = pytest.raises((DataDependentOutputException, DynamicOutputShapeException))
        with symbolic(), unknown as caught:
            READS[read](make(torch.randn(3, 4)))
        assert re.search(r"aten\.\w+", str(caught.value))


def test_writing_unknown_value_makes_only_written_storage_unknown():
    with symbolic():
        places, changed = torch.randn(3, 4).argsort(-1), torch.zeros(3, 4, dtype=torch.long)
        view, copied = changed[0], changed.clone()
        assert changed.scatter_(1, places, 1) is changed and copied.sum().item() == 0
        with pytest.raises(DataDependentOutputException):
            view.max().item()
        assert changed.view(4, 3).untyped_storage()._cdata == changed.untyped_storage()._cdata
        assert F.one_hot(places, 4).shape == (3, 4, 4) and changed.unsqueeze_(0).shape == (1, 3, 4)


def test_large_integer_tensors_in_symbolic_mode_allocate_no_memory():
    with symbolic(), MemoryMeter() as meter:
        large = torch.zeros(2**40, dtype=torch.int8)
        small = torch.ones(1, dtype=torch.long)
        sums = small.expand(2**40) + 1
        more = large + small
    assert meter.peak_bytes == sum(tensor.nbytes for tensor in (large, small, sums, more))


# ---- bytes that depend on lengths

LENGTHS = (3, 5, 50, 20, 7, 1)


class Recognizer(nn.Module):
    def __init__(self, criterion):
        super().__init__()
        self.layer, self.criterion = nn.Linear(8, 11), criterion

    def loss_sum(self, batch):
        samples, labels, lengths = batch
        return self.criterion(self.layer(samples), labels, lengths), len(samples)


def sequences(lengths, steps=101):
    labels = torch.arange(len(lengths) * 50).view(-1, 50) % 10 + 1
    return torch.randn(len(lengths), steps, 8), labels, torch.tensor(lengths)


def ctc(scores, labels, lengths, *, listed=False, flat=False, **options):
    """Compute the CTC loss with labels and lengths as tensors or lists."""
    full = torch.full_like(lengths, scores.shape[1])
    labels = [row[:length] for row, length in zip(labels, lengths, strict=True)] if flat else labels
    labels = torch.cat(labels) if flat else labels
    both = [each.tolist() if listed else each for each in (full, lengths)]
    return F.ctc_loss(scores.log_softmax(-1).transpose(0, 1), labels, *both, **options).sum()


def unbatched_ctc(scores, labels, lengths):
    [row], length = scores.log_softmax(-1), lengths[0]
    return F.ctc_loss(row, labels[0, :length], torch.tensor(len(row)), length, reduction="sum")


def selected(scores, labels, lengths):
    return scores[:, :50][torch.arange(50) < lengths[:, None]].exp().sum()


def first_steps(read):
    """Return a loss of the first time steps of each sample, whose numbers `read` returns."""
    return lambda scores, labels, lengths: sum(
        row[:length].exp().sum() for row, length in zip(scores, read(lengths), strict=True)
    )


LOSSES = {
    "tensors": partial(ctc, reduction="sum"),
    "mean": partial(ctc, zero_infinity=True),
    "flat labels": partial(ctc, flat=True, reduction="sum"),
    "lists": partial(ctc, listed=True, reduction="sum"),
    "mean of lists": partial(ctc, listed=True, flat=True),
    "selected by a mask": selected,
    "tolist": first_steps(lambda lengths: lengths.tolist()),
    "numpy": first_steps(lambda lengths: lengths.numpy()),
    "item": first_steps(lambda lengths: [length.item() for length in lengths]),
    "unbatched": unbatched_ctc,
}


LOSS_CASES = [
    (name, lengths, micro_batches)
    for name in LOSSES
    for lengths, micro_batches in ((LENGTHS, 1), (LENGTHS, 3), ([1], 1), ([33], 1))
    if name != "unbatched" or len(lengths) == 1
]


@pytest.mark.parametrize(("loss", "lengths", "micro_batches"), LOSS_CASES)
def test_estimate_equals_measurement_for_length_dependent_losses(loss, lengths, micro_batches):
    recipe = Recipe(micro_batches=micro_batches)
    assert_measured(partial(Recognizer, LOSSES[loss]), partial(sequences, lengths), recipe)


# ---- conversion of modules to other dtypes


class RotaryLinear(nn.Linear):
    """Module that keeps its frequencies in fp32, as rotary embeddings do."""

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
    "cast": lambda model: cast(model, torch.bfloat16),
    "integers too": lambda model: model._apply(torch.Tensor.double),
    "channels": lambda model: model.to(memory_format=torch.channels_last),
}


def converted(convert):
    tokens, head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
    head.weight = tokens.weight.requires_grad_(False)
    others = RotaryLinear(), nn.BatchNorm1d(8), nn.Conv2d(2, 3, 3, bias=False), nn.LSTM(2, 2)
    model = nn.Sequential(tokens, head, *others)
    assert convert(model) is model and head.weight is tokens.weight
    return [
        (name, t.shape, t.stride(), t.dtype, t.requires_grad, isinstance(t, nn.Parameter))
        for name, t in (*model.named_parameters(), *model.named_buffers())
    ]


@pytest.mark.parametrize("name", CONVERSIONS)
def test_module_dtype_conversion_in_symbolic_mode_equals_real_conversion(name):
    expected = converted(CONVERSIONS[name])
    if name == "cast":
        assert expected == converted(CONVERSIONS["to"])
    with symbolic():
        assert converted(CONVERSIONS[name]) == expected


def test_symbolic_conversion_to_same_dtype_returns_same_tensors():
    with symbolic():
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        before = [*model.parameters(), *model.buffers()]
        assert model.to("cpu", torch.float32).float() is model
        after = [*model.parameters(), *model.buffers()]
    assert all(a is b for a, b in zip(after, before, strict=True))
    assert nn.Linear(2, 2).to(torch.bfloat16).weight.dtype == torch.bfloat16
