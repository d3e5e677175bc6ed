"""Values that a symbolic step knows: small tensors of integers, and masks."""

import re

import pytest
import torch
from torch import nn
from torch._subclasses import fake_tensor as _fake
from torch.nn import functional as F

from course_lib.memory import MemoryMeter, symbolic


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


def test_a_view_of_a_tensor_with_unknown_values_shares_its_storage():
    with symbolic():
        tokens = torch.zeros(4, dtype=torch.long)
        tokens[0] = torch.randn(4).argmax()
        view = tokens.view(2, 2)
        assert view.untyped_storage()._cdata == tokens.untyped_storage()._cdata
        assert tokens.unsqueeze_(0).shape == (1, 4)


def test_a_real_floating_point_tensor_is_refused():
    real = torch.ones(2)
    with symbolic(), pytest.raises(AssertionError, match=r"Found in aten\.mul\.Tensor"):
        real * 2
