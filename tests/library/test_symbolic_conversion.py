"""Conversion of symbolic modules to other dtypes, against real modules."""

import pytest
import torch
from torch import nn

from course_lib.symbolic import cast, symbolic


class TiedModel(nn.Module):
    """Model with a shared frozen weight and buffers."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.tokens.weight.requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)


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
    "double": lambda model: model.double().float(),
    "integers too": lambda model: model._apply(torch.Tensor.double),
    "channels": lambda model: model.to(memory_format=torch.channels_last),
}


def converted(convert):
    """Return the attributes of the tensors of a converted model."""
    model = nn.Sequential(
        TiedModel(), RotaryLinear(), nn.Conv2d(2, 3, 3, bias=False), nn.LSTM(2, 2)
    )
    assert convert(model) is model
    assert model[0].head.weight is model[0].tokens.weight
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
