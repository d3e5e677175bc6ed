"""Splitting of batches, compared with autograd on the full batch, and errors that name a key."""

import warnings
from collections import UserDict, namedtuple
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from course_lib._batches import parts_of, samples_in
from course_lib.accumulation import AccumulatedStep, split
from course_lib.budget import Recipe, build, estimate, fit, run, train_step
from course_lib.budget.__main__ import main
from course_lib.budget.check import compare_with_estimate
from course_lib.budget.rates import RATES
from course_lib.budget.search.candidates import RecipeSearch
from course_lib.budget.search.estimate_cache import EstimateCache
from course_lib.budget.search.fit import InfeasibleBudget
from course_lib.budget.techniques.micro_batches import counts_by_split, counts_of_batch
from course_lib.distributed.prediction import predict
from course_lib.distributed.training.tasks import task_of
from course_lib.workload import Workload, samples_of

WIDTH, CLASSES = 8, 3
assert_close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-6)
Pair = namedtuple("Pair", "x y")


@dataclass
class Item:
    x: Any
    y: Any


class Net(nn.Module):
    """Three blocks and a head; `read` turns a batch into (inputs, labels as Python integers)."""

    def __init__(self, read):
        super().__init__()
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.layers = nn.Sequential(*blocks)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.read = read

    def forward(self, x):
        return self.head(self.layers(x))

    def loss_sum(self, batch):
        x, labels = self.read(batch)
        scores = self(x)
        assert len(scores) == len(labels)
        losses = [F.cross_entropy(s, torch.tensor(int(c))) for s, c in zip(scores, labels)]  # noqa: B905
        return torch.stack(losses).sum(), len(losses)


def inputs(samples=4):
    return torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(1))


def gradients(net, batch, recipe=None, **options):
    """Return the gradients of a step, which equal SGD's update with learning rate 1."""
    recipe = recipe or Recipe()
    model, optimizer = build(net, replace(recipe, optimizer="sgd"), lr=1.0)
    before = [p.detach().clone() for p in model.parameters()]
    train_step(model, optimizer, batch, replace(recipe, optimizer="sgd"), **options)
    return [a - b.detach() for a, b in zip(before, model.parameters(), strict=True)]


def full_gradients(net, batch, loss_sum=Net.loss_sum):
    """Return gradients of the mean loss of the full batch, by autograd."""
    model = net()
    total, weight = loss_sum(model, batch)
    return torch.autograd.grad(total / weight, list(model.parameters()))


# ---- batches that are split

LABELS = [0, 1, 2, 0, 1, 2, 1]
KINDS = {
    "array of labels": (lambda x, y: {"x": x, "y": np.array(y)}, lambda b: (b["x"], b["y"])),
    "array of strings": (lambda x, y: Pair(x, np.array(list(map(str, y)))), lambda b: (b.x, b.y)),
    "array of objects": (
        lambda x, y: {"x": x, "more": [Item(None, np.array(y, dtype=object))]},
        lambda b: (b["x"], b["more"][0].y),
    ),
    "only arrays": (lambda x, y: Item(x.numpy(), np.array(y)), lambda b: (torch.tensor(b.x), b.y)),
    "nested dict with a list of dicts": (
        lambda x, y: {"in": {"x": x}, "out": [{"y": torch.tensor(y)}, {"name": "a"}]},
        lambda b: (b["in"]["x"], b["out"][0]["y"].tolist()),
    ),
    "mapping": (lambda x, y: UserDict(x=x, y=np.array(y)), lambda b: (b["x"], b["y"])),
}


@pytest.mark.parametrize(("make", "read"), KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("samples", [1, 2, 5, 7])
def test_micro_batch_gradients_equal_full_batch_for_each_batch_type(make, read, samples):
    batch = make(inputs(samples), LABELS[:samples])
    assert samples_in(batch) == samples

    def net():
        return Net(read)

    expected = full_gradients(net, batch)
    for count in {1, min(samples, 2), samples}:
        assert_close(gradients(net, batch, Recipe(micro_batches=count)), expected)


# ---- batches that cannot be split

REJECTED = {
    "list": (lambda x, y: {"x": x, "y": y}, r"^batch\['y'\] must .*, got a list with one value"),
    "list in a tuple": (lambda x, y: Item(x, (y,)), r"^batch\.y\[0\] must .*, got a list with"),
    "range": (
        lambda x, y: {"x": x, "y": range(len(y))},
        r"^batch\['y'\] must .*, got a range with",
    ),
    "array of another length": (
        lambda x, y: {"x": x, "y": np.arange(3)},
        r"batch\['x'\] with 4 samples and batch\['y'\] with 3 samples",
    ),
    "array without dimensions": (
        lambda x, y: {"x": x, "t": np.array(0.5)},
        r"batch\['x'\] with 4 samples and batch\['t'\] without dimensions",
    ),
    "boxes": (
        lambda x, y: {"x": x, "y": [{"boxes": torch.rand(n + 4, 4)} for n in range(4)]},
        r"batch\['x'\] with 4 samples and batch\['y'\]\[1\]\['boxes'\] with 5 samples",
    ),
    "sparse": (
        lambda x, y: {"x": x.to_sparse()},
        r"dense tensors .*, got a tensor .* in batch\['x'\]",
    ),
    "no tensor": (
        lambda x, y: y,
        "a container of tensors .*, got a list, which contains",
    ),
    "object": (
        lambda x, y: SimpleNamespace(x=x),
        "got a SimpleNamespace, which contains",
    ),
}


def by_inputs(model, batch):
    return model(inputs()).square().sum(), 4


net = partial(Net, None)


@pytest.mark.parametrize(("make", "place"), REJECTED.values(), ids=REJECTED)
def test_unsplittable_batch_raises_error_naming_its_key(make, place):
    def make_batch():
        return make(inputs(), LABELS[:4])

    two, options = Recipe(micro_batches=2), {"loss_sum": by_inputs}
    model, optimizer = build(net, Recipe())
    assert train_step(model, optimizer, make_batch(), Recipe(), **options).weight == 4
    if place != REJECTED["sparse"][1]:  # symbolic tensors are dense
        measured = run(net, make_batch, Recipe(), **options).meter.peak_bytes
        assert estimate(net, make_batch, Recipe(), **options).peak_bytes == measured
        with pytest.raises((TypeError, ValueError), match=place):
            estimate(net, make_batch, two, **options)
    for attempt in (
        lambda: run(net, make_batch, two, **options),
        lambda: train_step(model, optimizer, make_batch(), two, **options),
    ):
        with pytest.raises((TypeError, ValueError), match=place) as raised:
            attempt()
        assert "pass a function split(batch, parts)" in str(raised.value)


@pytest.mark.parametrize("kind", ["list", "array of another length", "no tensor"])
def test_fit_tries_one_micro_batch_if_batch_cannot_be_split(kind):
    def make_batch():
        return REJECTED[kind][0](inputs(), LABELS[:4])

    options = {"loss_sum": by_inputs, "quick": True, "progress": False}
    found = fit(net, make_batch, 10**9, **options)
    assert {each.recipe.micro_batches for each in found} == {1}
    assert "only one micro-batch was tried: batch" in str(found)
    with pytest.raises(InfeasibleBudget, match="only one micro-batch was tried: batch"):
        fit(net, make_batch, 1, **options)


KEPT = {
    "list of another length": [1, 2, 3],
    "string of that length": "abcd",
    "named tuple": namedtuple("Size", "a b c d")(1, 2, 3, 4),
    "dict of that length": {1: 1, 2: 2, 3: 3, 4: 4},
    "NumPy scalar": np.float32(3),
    "object": SimpleNamespace(y=[1, 2, 3, 4]),
}


@pytest.mark.parametrize("value", KEPT.values(), ids=KEPT)
def test_split_repeats_values_without_sample_dimension_in_every_micro_batch(value):
    parts = list(split({"x": inputs(), "more": value}, 3))
    assert [part["more"] for part in parts] == [value, value]
    assert all(part["more"] is value for part in parts)


# ---- split, the user's function


def documents(lengths=(3, 2, 4, 1, 5, 1)):
    """Return sequences packed into one, as for variable-length attention."""
    return {"x": inputs(sum(lengths)), "lengths": list(lengths), "t": torch.ones(())}


def documents_split(batch, parts):
    lengths = batch["lengths"]
    if parts > len(lengths):
        raise IndexError("there are fewer documents")
    own = [part.tolist() for part in np.array_split(lengths, parts)]
    rows = batch["x"].split([sum(each) for each in own])
    return [{**batch, "x": x, "lengths": each} for x, each in zip(rows, own, strict=True)]


def by_document(model, batch):
    """Return the squares of each document's mean, which depend on where documents begin."""
    rows = model(batch["x"] * batch["t"]).split(batch["lengths"])
    return torch.stack([each.mean(0) for each in rows]).square().sum(), len(rows)


BY_DOCUMENT = {"loss_sum": by_document, "split": documents_split}


@pytest.mark.parametrize("count", [1, 2, 3, 6])
@pytest.mark.parametrize("checkpoint", ["none", "layers"])
def test_gradient_with_custom_split_function_equals_full_batch(count, checkpoint):
    expected = full_gradients(net, documents(), by_document)
    recipe = Recipe(micro_batches=count, checkpoint=checkpoint)
    assert_close(gradients(net, documents(), recipe, **BY_DOCUMENT), expected)


def by_documents(count, lengths=(3, 2, 4, 1, 5, 1)):
    return partial(documents, lengths), count, BY_DOCUMENT


def by_patches():
    """Return micro-batches of one image each, with different numbers of patches."""
    patches = (2, 40, 3, 4)
    options = {"loss_sum": squares, "split": lambda batch, parts: batch.split(patches)}
    return lambda: inputs(sum(patches)), 4, options


def by_arrays():
    """Return micro-batches whose arrays decide how often the model runs."""

    def loss(model, batch):
        for _ in range(int(batch["n"][0])):
            out = model(batch["x"])
        return out.square().sum(), len(batch["x"])

    return lambda: {"x": inputs(4), "n": np.array([1, 3, 1, 1])}, 4, {"loss_sum": loss}


@pytest.mark.parametrize(
    "make",
    [
        *(partial(by_documents, count) for count in (2, 3, 6)),
        partial(by_documents, 3, (2, 2, 2, 2, 2, 2)),
        by_patches,
        by_arrays,
    ],
)
def test_estimate_with_custom_split_function_equals_measurement(make):
    make_batch, count, options = make()
    recipe = Recipe(micro_batches=count)
    predicted = estimate(net, make_batch, recipe, **options)
    measured = run(net, make_batch, recipe, **options).meter
    assert (predicted.peak_bytes, predicted.flops) == (measured.peak_bytes, measured.flops)


def test_fit_doubles_micro_batch_count_of_custom_split_function():
    base, tried = Recipe(checkpoint="layers"), []
    whole = estimate(net, documents, base, **BY_DOCUMENT).peak_bytes
    best = fit(net, documents, whole - 1, base=base, progress=tried.append, **BY_DOCUMENT)[0]
    assert {each.micro_batches for each in tried} == {1, 2, 4} and best.recipe.micro_batches > 1
    measured = run(net, documents, best.recipe, **BY_DOCUMENT).meter.peak_bytes
    assert measured == best.peak_bytes < whole


def with_empty_parts(batch, parts):
    """Split by `torch.tensor_split`, whose last parts may be empty."""
    return [{**batch, "x": x} for x in batch["x"].tensor_split(parts)]


@pytest.mark.parametrize(
    ("samples", "cut", "counts"),
    [
        (5, with_empty_parts, [1, 2, 4]),
        (1, with_empty_parts, [1]),
        (4, lambda batch, parts: [batch] * parts, [1]),
        (8, lambda batch, parts: [{"x": batch["x"][: max(2, 8 // parts)]}] * parts, [1, 2, 4]),
        (8, lambda batch, parts: with_empty_parts(batch, min(parts, 2)), [1, 2]),
    ],
)
def test_tried_micro_batch_counts_end_when_parts_stop_shrinking(samples, cut, counts):
    batch = {"x": inputs(samples), "t": torch.ones(())}
    assert counts_by_split(batch, cut) == counts
    assert (counts_of_batch(batch, cut)[1] is None) == (len(counts) > 1)


def test_fit_raises_error_of_custom_split_function_unchanged():
    def broken(batch, parts):
        raise KeyError("no such column")

    with pytest.raises(KeyError, match="no such column"):
        fit(net, documents, 10**9, loss_sum=by_document, split=broken, progress=False)


@pytest.mark.parametrize(
    ("result", "actual"),
    [
        (lambda batch, parts: [batch] * 3, "got a list of 3"),
        (lambda batch, parts: batch, "got a dict"),
        (lambda batch, parts: None, "got None"),
    ],
)
def test_custom_split_function_must_return_list_of_batches(result, actual):
    must = r"split\(batch, 2\) must return a list of 2 batches, "
    with pytest.raises((TypeError, ValueError), match=must + actual):
        gradients(net, documents(), Recipe(micro_batches=2), loss_sum=by_document, split=result)
    assert parts_of(3, 1, result) == [3]  # a single part is not cut


# ---- the commands and several ranks


def make_split_net():
    return net()


make_split_net.make_batch = documents
make_split_net.loss_sum = by_document
make_split_net.split = documents_split


def test_command_uses_split_attribute_of_model_function(capsys):
    arguments = ["--budget", "1GB", "--count", "tensors", "--quick", "--device", "laptop"]
    assert main(["--model", f"{__name__}:make_split_net", *arguments]) == 0
    out = capsys.readouterr().out
    assert "a batch whose number of samples is not known" in out
    assert "only one micro-batch" not in out


def test_compare_with_estimate_uses_custom_split_function_of_workload():
    assert samples_of(documents) is None
    fields = documents, by_document, "net", "documents"
    workload = Workload(make_split_net, *fields, samples=None, split=documents_split)
    found = compare_with_estimate(workload, Recipe(micro_batches=4))
    assert found.measured_bytes == found.predicted_bytes


def test_custom_split_function_divides_batch_among_ranks():
    task = task_of(model=f"{__name__}:make_split_net")
    assert task.samples is None
    assert [len(task.part(0, 2, rank)["lengths"]) for rank in range(2)] == [3, 3]


def test_estimate_for_ranks_uses_rank_with_largest_peak():
    recipe = Recipe(ranks=2, shard="ddp", micro_batches=3)
    found, mirrored, even = (
        estimate(net, partial(documents, lengths), recipe, **BY_DOCUMENT).peak_bytes
        for lengths in ((1, 1, 1, 5, 5, 5), (5, 5, 5, 1, 1, 1), (3, 3, 3, 3, 3, 3))
    )
    assert found == mirrored > even

    def share():
        return documents_split(documents((1, 1, 1, 5, 5, 5)), 2)[1]

    prediction = predict(net, share, by_document, "ddp", 2, micro_batches=3, split=documents_split)
    assert found == prediction.peak_bytes
    best = fit(net, documents, found * 2, base=Recipe(ranks=2), progress=False, **BY_DOCUMENT)
    assert best[0].recipe.ranks == 2


# ---- BatchNorm


def normed(allowed=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1))
    if allowed:
        model.batch_norm_per_micro_batch = True
    return model


def squares(model, x):
    return model(x).square().sum(), len(x)


def warnings_of(model, sizes, steps=2):
    step = AccumulatedStep(model, torch.optim.SGD(model.parameters(), lr=0.1), squares)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            step(list(inputs(6).split(sizes)))
    return [each for each in caught if "BatchNorm" in str(each.message)]


def test_accumulated_step_warns_once_about_batch_norm():
    [only] = warnings_of(normed(), 2)
    assert only.category is UserWarning and only.filename == __file__
    assert "batch_norm_per_micro_batch = True" in str(only.message)
    assert len(warnings_of(normed(), 2)) == 1  # again for another AccumulatedStep
    assert warnings_of(normed(), 6) == []  # one micro-batch
    assert warnings_of(normed().eval(), 2) == []
    assert warnings_of(nn.Linear(WIDTH, 1), 2) == []
    assert warnings_of(normed(allowed=True), 2) == []
    assert warnings_of(nn.Sequential(normed(allowed=True)), 2) == []  # as in a wrapper


def test_batch_norm_rejects_micro_batches_unless_explicitly_allowed():
    recipe = Recipe(optimizer="sgd", micro_batches=3)
    with pytest.raises(ValueError, match=r"model\.batch_norm_per_micro_batch = True"):
        estimate(normed, inputs, recipe, loss_sum=squares)

    allowed = partial(normed, allowed=True)
    predicted = estimate(allowed, lambda: inputs(6), recipe, loss_sum=squares)
    measured = run(allowed, lambda: inputs(6), recipe, loss_sum=squares)
    assert predicted.peak_bytes == measured.meter.peak_bytes
    model = allowed()
    total = sum(squares(model, x)[0] for x in inputs(6).split(2))
    expected = torch.autograd.grad(total / 6, list(model.parameters()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = gradients(allowed, inputs(6), recipe, loss_sum=squares)
    assert_close(found, expected)


@pytest.mark.parametrize(("samples", "counts"), [(6, [1, 2, 3]), (7, [1, 2]), (3, [1])])
def test_fit_avoids_single_sample_micro_batches_with_batch_norm(samples, counts):
    def counts_for(make):
        options = {"loss_sum": squares, "tier": "file"}
        cache = EstimateCache(make, lambda: inputs(samples), Recipe(), **options)
        return list(RecipeSearch(cache, 10**9, RATES["laptop"]).micro_batch_counts)

    assert counts_for(lambda: normed(allowed=True)) == counts
    assert counts_for(normed) == [1]
    assert counts_for(lambda: normed().eval())[-1] == samples
