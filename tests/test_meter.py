"""Counts of a meter: its peak compared with that of the allocator, storages, and threads."""

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
    double_backward,
    empty_gradients,
    encoder,
    mlp,
    one_more_sample,
    train,
)

from course_lib._torch import tensors_in
from course_lib.memory import CATEGORIES, MemoryMeter, measure, symbolic
from course_lib.models import Decoder, random_tokens

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
# Bytes of the Python numbers that an operator takes, which only the allocator sees.
NUMBERS = 16


def batch_norm_and_pooling():
    pools = nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(2)
    layers = [nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.BatchNorm2d(8), *pools]
    return train(nn.Sequential(*layers), torch.randn(8, 8, 32, 32), optimizer=SGD)


def decoder():
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


def stepped_by_sgd(foreach):
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    return train(model, torch.randn(4, 256), optimizer=partial(SGD, foreach=foreach))


# Steps whose operators take no workspace.
STEPS = {
    "mlp": mlp,
    "in-place ReLU": partial(mlp, partial(nn.ReLU, inplace=True)),
    "encoder": encoder,
    "checkpoint": partial(encoder, reentrant=False),
    "reentrant checkpoint": partial(encoder, reentrant=True),
    "decoder": decoder,
    "batch norm and pooling": batch_norm_and_pooling,
    "in-place, views, expands": in_place_views_and_expands,
    "double backward": double_backward,
    "SGD": partial(stepped_by_sgd, foreach=False),
    "SGD, foreach": partial(stepped_by_sgd, foreach=True),
}


def checked_peak(step, *given):
    """Run a step under a meter. Return its peak, after a check that the categories add up."""
    with MemoryMeter(*given) as meter:
        step()
        one_more_sample()
        live = meter.live_bytes
    series = meter.series()
    total = sum(series.values())
    assert tuple(series) == CATEGORIES and min(map(np.min, series.values())) >= 0
    assert total.max() == meter.peak_bytes == sum(meter.at_peak().values())
    assert total[-1] == live
    assert [sample.live_bytes for sample in meter.timeline] == list(total)
    assert [sample.phase for sample in meter.timeline] == meter.phases()
    return meter.peak_bytes


@pytest.mark.parametrize("name", STEPS)
def test_meter_peak_equals_allocator_peak_without_workspace(name):
    model, optimizer, step = STEPS[name]()
    step()  # makes the optimizer's state
    empty_gradients(model)
    peak = checked_peak(step, model, optimizer)
    empty_gradients(model)
    state = tensors_in(optimizer.state) if optimizer else ()
    held = bytes_of([*model.parameters(), *model.buffers(), *state])
    assert 0 <= held + max(accumulate(allocations(step))) - peak <= NUMBERS
    empty_gradients(model)
    checked_peak(step)


def test_meter_counts_views_of_one_storage_once():
    with MemoryMeter() as meter:
        x = torch.zeros(100)
        views = [x[:10], x.view(10, 10).t(), x.expand(5, 100), x.detach()]
        assert meter.live_bytes == 400
        del x
        assert meter.live_bytes == 400
        views.clear()
        assert meter.live_bytes == 0
    assert meter.peak_bytes == 400


def test_inner_meter_counts_its_block_and_outer_meter_counts_all():
    with MemoryMeter() as outer:
        x = torch.ones(100)
        with MemoryMeter() as inner:
            y = torch.ones(1000)
        z = torch.ones(10)
    assert inner.peak_bytes == inner.live_bytes == y.nbytes
    assert outer.peak_bytes == outer.live_bytes == x.nbytes + y.nbytes + z.nbytes


def test_live_bytes_fall_when_tensors_die_after_the_block():
    with MemoryMeter() as meter:
        x = torch.ones(100)
    series = {name: values.copy() for name, values in meter.series().items()}
    assert meter.live_bytes == 400
    del x
    assert meter.live_bytes == 0
    assert all(np.array_equal(values, series[name]) for name, values in meter.series().items())


def test_resized_storage_counts_with_its_new_size_at_once():
    with MemoryMeter() as meter:
        x = torch.zeros(100)
        x.resize_(1000)
        assert meter.live_bytes == meter.peak_bytes == 4000
        x.untyped_storage().resize_(0)
        assert meter.live_bytes == 0
        x.untyped_storage().resize_(8000)
        assert meter.live_bytes == meter.peak_bytes == 8000


def test_step_in_another_thread_is_not_counted():
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


def test_storages_released_in_another_thread_leave_the_count():
    with MemoryMeter() as meter:
        held = [torch.ones(100) for _ in range(50)]
        thread = threading.Thread(target=held.clear)
        thread.start()
        for _ in range(50):
            torch.ones(1)
        thread.join()
        assert meter.live_bytes == 0


def test_memory_of_numpy_arrays_is_not_counted():
    with MemoryMeter() as meter:
        x = torch.from_numpy(np.zeros(1000)), torch.as_tensor(np.zeros(1000))
        assert meter.live_bytes == 0
        copied = torch.tensor(np.zeros(1000))
        assert meter.live_bytes == copied.nbytes
        del x
        assert meter.live_bytes == copied.nbytes


def test_storage_from_before_the_block_is_not_counted():
    x = torch.ones(1000)
    with MemoryMeter() as meter:
        again = torch.empty(0).set_(x.untyped_storage(), 0, (10,))
        another = torch.empty(0).set_(x.untyped_storage())
        assert meter.live_bytes == 0
        twin = copy.deepcopy(x)
        assert meter.live_bytes == x.nbytes
        del again, another, twin
        assert meter.live_bytes == 0


def test_block_bytes_round_each_storage_up():
    with MemoryMeter(block_bytes=512) as meter:
        tensors = torch.ones(1), torch.ones(129)
        assert meter.live_bytes == 512 + 1024
        del tensors
    assert meter.peak_bytes == 1536


@pytest.mark.parametrize("grow", [False, True], ids=["made", "resized"])
def test_storage_without_operator_has_its_own_moment(grow):
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


def test_fake_tensors_of_a_mode_inside_the_block_count_nothing():
    with MemoryMeter() as meter:
        held = torch.ones(10)
        with FakeTensorMode():
            shape = torch.empty(1000, 1000)
            shape @ shape
        assert (shape + 1).shape == shape.shape
    assert meter.peak_bytes == held.nbytes
    for mode in (symbolic(), FakeTensorMode()):
        with mode, MemoryMeter() as meter:
            held = torch.ones(1000, 1000)
        assert meter.peak_bytes == held.nbytes


def test_state_of_several_optimizers_is_counted_and_restored():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    optimizers = [torch.optim.Adam(model[0].parameters()), SGD(model[1].parameters())]

    def step():
        model(torch.ones(4, 8)).mean().backward()
        for optimizer in optimizers:
            optimizer.step()

    def state():
        return [value.clone() for each in optimizers for value in tensors_in(each.state)]

    step()
    expected = 2 * 4 * 72 + 2 * 4 + 4 * 9  # Adam's moments and step counts, and momentum
    with MemoryMeter(model, optimizers) as meter:
        step()
    assert meter.at_peak()["optimizer"] == expected
    before = state()
    found = measure(step, model=model, optimizer=iter(optimizers), repeats=0)
    assert found.at_peak["optimizer"] == expected
    assert all(map(torch.equal, before, state()))
