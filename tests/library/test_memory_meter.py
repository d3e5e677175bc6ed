"""Tests of a meter's counts: its peak against the allocator's, storages, and threads."""

import copy
import threading
from functools import partial
from itertools import accumulate

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from training_steps import (
    allocations,
    bytes_of,
    checkpointed,
    empty_gradients,
    mlp,
    one_more_sample,
    train,
)

from course_lib._torch.tensors import tensors_in
from course_lib.memory import MemoryMeter, measure
from course_lib.models import Decoder, random_tokens

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
# Bytes of Python numbers that are arguments of operators, which only the allocator counts.
SCALAR_BYTES = 16


def batch_norm_and_pooling():
    pools = nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(2)
    layers = [nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.BatchNorm2d(8), *pools]
    return train(nn.Sequential(*layers), torch.randn(8, 8, 32, 32), optimizer=SGD)


def decoder():
    model = Decoder(vocabulary=200, hidden=64, heads=4, layers=2, sequence=32, dropout=0.1)
    return train(model, random_tokens(4, 32, 200)[:, :-1], optimizer=torch.optim.AdamW)


def foreach_sgd():
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    return train(model, torch.randn(4, 256), optimizer=SGD, foreach=True)


# Steps whose operators take no workspace.
STEPS = {
    "in-place ReLU": partial(mlp, partial(nn.ReLU, inplace=True)),
    "checkpoint": partial(checkpointed, reentrant=False),
    "reentrant checkpoint": partial(checkpointed, reentrant=True),
    "decoder": decoder,
    "batch norm and pooling": batch_norm_and_pooling,
    "SGD, foreach": foreach_sgd,
}


@pytest.mark.parametrize("name", STEPS)
def test_meter_peak_equals_allocator_peak_without_workspace(name):
    model, optimizer, step = STEPS[name]()
    step()  # creates the optimizer's state
    for given in ((None, None), (model, optimizer)):
        empty_gradients(model)
        with MemoryMeter(*given) as meter:
            step()
            one_more_sample()
            live = meter.live_bytes
        total = sum(meter.series().values())
        assert total.max() == meter.peak_bytes == sum(meter.at_peak().values())
        samples = [(sample.live_bytes, sample.phase) for sample in meter.timeline]
        assert samples == list(zip(total, meter.phases(), strict=True)) and total[-1] == live
    empty_gradients(model)
    held = bytes_of([*model.parameters(), *model.buffers(), *tensors_in(optimizer.state)])
    assert 0 <= held + max(accumulate(allocations(step))) - meter.peak_bytes <= SCALAR_BYTES


OLDER = torch.ones(100)


def views_of_one_storage():
    x = torch.zeros(100)
    views = [x[:10], x.view(10, 10).t(), x.expand(5, 100), x.detach()]
    yield 400
    del x
    yield 400
    views.clear()
    yield 0


def resized_storage():
    x = torch.zeros(100)
    x.resize_(1000)
    yield 4000
    x.untyped_storage().resize_(0)
    yield 0
    x.untyped_storage().resize_(8000)
    yield 8000


def numpy_arrays():
    x = torch.from_numpy(np.zeros(1000)), torch.as_tensor(np.zeros(1000))
    yield 0
    copied = torch.tensor(np.zeros(1000))
    yield copied.nbytes
    del x
    yield copied.nbytes


def older_storage():
    first_rows = torch.empty(0).set_(OLDER.untyped_storage(), 0, (10,))
    alias = torch.empty(0).set_(OLDER.untyped_storage())
    yield 0
    copied = copy.deepcopy(OLDER)
    yield copied.nbytes
    del first_rows, alias, copied
    yield 0


@pytest.mark.parametrize(
    "operations", [views_of_one_storage, resized_storage, numpy_arrays, older_storage]
)
def test_meter_counts_each_new_storage_once(operations):
    """Compare the live bytes after each operation with those that it yields."""
    with MemoryMeter() as meter:
        counts = [(live, meter.live_bytes) for live in operations()]
    expected, found = zip(*counts, strict=True)
    assert found == expected and meter.peak_bytes >= max(found)


def test_inner_meter_counts_its_block_and_outer_meter_counts_everything():
    with MemoryMeter() as outer:
        x = torch.ones(100)
        with MemoryMeter() as inner:
            y = torch.ones(1000)
        z = torch.ones(10)
    assert inner.peak_bytes == inner.live_bytes == y.nbytes
    assert outer.peak_bytes == outer.live_bytes == x.nbytes + y.nbytes + z.nbytes


def test_meter_does_not_count_step_in_another_thread():
    (model, _, step), (other, _, other_step) = mlp(), mlp()
    with MemoryMeter(model) as alone:
        step()
    empty_gradients(model)
    thread = threading.Thread(target=other_step)
    with MemoryMeter(model) as meter:
        thread.start()
        step()
        thread.join()
    assert meter.peak_bytes == alone.peak_bytes
    assert all(parameter.grad is not None for parameter in other.parameters())


def test_meter_subtracts_storages_released_in_another_thread():
    with MemoryMeter() as meter:
        held = [torch.ones(100) for _ in range(50)]
        thread = threading.Thread(target=held.clear)
        thread.start()
        for _ in range(50):
            torch.ones(1)
        thread.join()
        assert meter.live_bytes == 0


def test_meter_rounds_storages_up_to_multiples_of_block_bytes():
    with MemoryMeter(block_bytes=512) as meter:
        tensors = torch.ones(1), torch.ones(129)
        assert meter.live_bytes == 512 + 1024
        del tensors
    assert meter.peak_bytes == 1536


@pytest.mark.parametrize("grow", [False, True], ids=["created", "resized"])
def test_storage_allocated_without_operator_appears_in_timeline(grow):
    with MemoryMeter() as meter:
        x = torch.ones(1000)
        y, storage = x * 2, x.new_empty(0).untyped_storage()
        del y
        if grow:
            storage.resize_(5056)
        else:
            storage = torch.get_rng_state().untyped_storage()
    assert storage.nbytes() == 5056
    assert meter.peak_bytes == sum(meter.at_peak().values()) == 4000 + 5056
    assert [sample.live_bytes for sample in meter.timeline] == [4000, 8000, 8000, 9056]
    assert meter.timeline[-1].operator == "(no operator)" and meter.operator_count == 3


def test_fake_tensors_of_inner_fake_tensor_mode_count_zero_bytes():
    with MemoryMeter() as meter:
        held = torch.ones(10)
        with FakeTensorMode():
            shape = torch.empty(1000, 1000)
            shape @ shape
        assert (shape + 1).shape == shape.shape
    assert meter.peak_bytes == held.nbytes
    with FakeTensorMode(), MemoryMeter() as meter:
        held = torch.ones(1000, 1000)
    assert meter.peak_bytes == held.nbytes


def test_measure_counts_and_restores_state_of_several_optimizers():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    optimizers = [torch.optim.Adam(model[0].parameters()), SGD(model[1].parameters())]

    def step():
        model(torch.ones(4, 8)).mean().backward()
        for optimizer in optimizers:
            optimizer.step()

    def state():
        return [value.clone() for each in optimizers for value in tensors_in(each.state)]

    step()
    before = state()
    found = measure(step, model=model, optimizer=iter(optimizers), repeats=0)
    assert all(map(torch.equal, before, state()))
    # Adam's moments and step counts, and momentum
    assert found.at_peak["optimizer"] == 2 * 4 * 72 + 2 * 4 + 4 * 9
