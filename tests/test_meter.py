"""Counts of a meter: its peak compared with that of the allocator, storages, and threads."""

import copy
import threading
from itertools import accumulate

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import fake_tensor as _fake
from training_steps import (
    NO_WORKSPACE,
    allocations,
    bytes_of,
    empty_gradients,
    mlp,
    one_more_sample,
)

from course_lib._torch import tensors_in
from course_lib.memory import CATEGORIES, MemoryMeter, measure, symbolic

# What the allocator sees and no operator makes: the numbers of an optimizer's Python scalars, and
# under a checkpoint one state of the random number generator, while it is put back.
EXACT = {"mlp", "mlp, in-place ReLU", "post-norm", "pre-norm", "batch norm and pooling"}


EXACT |= {
    "embedding, tied head, cross-entropy",
    "double backward",
    "SGD, one by one",
    "SGD, foreach",
}


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


def test_blocks_are_rounded_up():
    with MemoryMeter(block_bytes=512) as meter:
        x, y = torch.ones(1), torch.ones(129)
        assert meter.live_bytes == 512 + 1024
        del x, y
    assert meter.peak_bytes == 1536


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
