"""course_lib.budget.optimizers: the table agrees with the classes that it lists."""

from dataclasses import fields, replace

import pytest
import torch
from torch import nn

from course_lib.budget.optimizers import LR, OPTIMIZERS, OptimizerRow

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
