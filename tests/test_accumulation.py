"""Accumulated steps against the full batch in float64, against hand-written loops, and against the
meter."""

import copy
import functools
import math
import sys
import warnings
from collections import OrderedDict, UserDict, namedtuple
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.distributed.algorithms.ddp_comm_hooks.default_hooks as hooks
from patience import HANGS_SECONDS
from properties import given, settings, st
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from course_lib.accumulation import AccumulatedStep, split
from course_lib.checkpoint import checkpoint
from course_lib.memory import MemoryMeter, symbolic
from course_lib.models import Decoder, random_tokens, seed_generators
from course_lib.offload import OffloadedOptimizer

VOCABULARY, SEQUENCE, IGNORED = 31, 6, -100
few_examples = settings(max_examples=15, deadline=None)


# ---- a model, a batch with gaps, and what a full batch in float64 gives


def decoder(layers=2, hidden=16, **options):
    return Decoder(
        vocabulary=VOCABULARY, hidden=hidden, heads=2, layers=layers, sequence=SEQUENCE, **options
    )


def loss_sum(model, batch):
    """The cross-entropies of the targets that are not masked, summed; how many there are."""
    inputs, targets = batch
    losses = F.cross_entropy(
        model(inputs).flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED
    )
    return losses, int((targets != IGNORED).sum())


def masked_batch(kept, seed=0):
    """Tokens (samples, SEQUENCE), and targets of which the first `kept[i]` of sample i count."""
    tokens = random_tokens(len(kept), SEQUENCE, VOCABULARY, seed=seed)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].clone()
    targets[torch.arange(SEQUENCE) >= torch.tensor(kept)[:, None]] = IGNORED
    return inputs, targets


def cut(batch, sizes):
    ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return [tuple(x[start:end] for x in batch) for start, end in pairwise(ends)]


def full_batch(model, batch, loss_sum=loss_sum):
    """The mean loss of the full batch and its gradients, in float64."""
    model = copy.deepcopy(model).double()
    losses, weight = loss_sum(model, batch)
    return losses.item() / float(weight), torch.autograd.grad(
        losses / weight, list(model.parameters())
    )


@contextmanager
def used_gradients(optimizer):
    """The gradients that the optimizer steps with."""
    found = []

    def look(*_):
        found.append(
            [
                parameter.grad.clone()
                for group in optimizer.param_groups
                for parameter in group["params"]
            ]
        )

    hook = optimizer.register_step_pre_hook(look)
    yield found
    hook.remove()


def relative_error(gradients, expected):
    difference = sum(
        (a.double() - b).square().sum() for a, b in zip(gradients, expected, strict=True)
    )
    return (difference / sum(b.square().sum() for b in expected)).sqrt().item()


def run(model, micro_batches, loss_sum=loss_sum, **options):
    """One step: its result, and the gradients used."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with used_gradients(optimizer) as found:
        result = AccumulatedStep(model, optimizer, loss_sum, **options)(micro_batches)
    return result, found[0]


@pytest.fixture(autouse=True)
def clean_end():
    yield
    assert not torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()


# ---- split

Pair = namedtuple("Pair", "inputs targets")


def nested(samples):
    """A batch of every container; each tensor of it begins with its sample numbers."""

    def numbers(*shape):
        return torch.arange(samples).view(-1, *[1] * len(shape)).expand(samples, *shape)

    return {
        "tokens": numbers(3),
        "pair": Pair(numbers(), [numbers(2, 2), None]),
        "more": (numbers().float(), OrderedDict(mask=numbers(1))),
    }


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    children = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, (list, tuple))
        else ()
    )
    return [tensor for child in children for tensor in tensors(child)]


@few_examples
@given(samples=st.integers(0, 20), size=st.integers(1, 25))
def test_the_pieces_of_a_batch_are_the_batch(samples, size):
    batch = nested(samples)
    pieces = list(split(batch, size))
    assert [len(piece["tokens"]) for piece in pieces] == [
        min(size, samples - i) for i in range(0, samples, size)
    ]
    for i, whole in enumerate(tensors(batch)):
        parts = [tensors(piece)[i] for piece in pieces]
        assert_close(torch.cat(parts) if parts else whole, whole, rtol=0, atol=0)


def test_a_piece_is_built_like_the_batch():
    piece = next(split(nested(5), 2))
    assert list(piece) == ["tokens", "pair", "more"]
    assert (
        type(piece["pair"]) is Pair
        and type(piece["pair"].targets) is list
        and piece["pair"].targets[1] is None
    )
    assert type(piece["more"]) is tuple and type(piece["more"][1]) is OrderedDict
    tensor = torch.arange(6)
    assert [piece.tolist() for piece in split(tensor, 4)] == [[0, 1, 2, 3], [4, 5]]


def test_pieces_are_views_and_made_when_asked_for():
    batch = torch.randn(100, 10)
    with MemoryMeter() as made:
        pieces = split({"x": batch}, 3)
    assert len(made.timeline) == 0
    with MemoryMeter() as asked_for:
        assert next(pieces)["x"].data_ptr() == batch.data_ptr()
        assert [piece["x"]._base is batch for piece in pieces] == [True] * 33
    assert asked_for.peak_bytes == 0 and len(asked_for.timeline) > 33


@dataclass
class Output(OrderedDict):
    """As models of Hugging Face return them: a mapping and a dataclass in one."""

    logits: torch.Tensor = None
    hidden: tuple = None

    def __post_init__(self):
        self.update(logits=self.logits, hidden=self.hidden)

    def __setitem__(self, name, value):
        super().__setitem__(name, value)
        object.__setattr__(self, name, value)


@dataclass(frozen=True)
class Sample:
    tokens: torch.Tensor
    name: str = "text"


@pytest.mark.parametrize(
    ("batch", "parts"),
    [
        (UserDict(input_ids=torch.arange(5)), lambda piece: [piece["input_ids"]]),
        (Sample(torch.arange(5)), lambda piece: [piece.tokens]),
        (
            Output(torch.arange(5), (torch.arange(5),)),
            lambda piece: [piece["logits"], piece.logits, piece["hidden"][0]],
        ),
        ([{"x": Sample(torch.arange(5))}, "text"], lambda piece: [piece[0]["x"].tokens]),
    ],
    ids=["UserDict", "dataclass", "model output", "nested"],
)
def test_batches_of_other_libraries_are_split_and_stay_what_they_are(batch, parts):
    pieces = list(split(batch, 2))
    assert [[part.tolist() for part in parts(piece)] for piece in pieces] == [
        [rows] * len(parts(batch)) for rows in ([0, 1], [2, 3], [4])
    ]
    assert all(type(piece) is type(batch) for piece in pieces)
    assert all(part.tolist() == [0, 1, 2, 3, 4] for part in parts(batch))


def test_what_is_no_tensor_goes_into_every_piece():
    constants = {"max_len": 3, "names": ["a", "b"], "mask": None, "kind": torch.float32}
    pieces = list(split({"input_ids": torch.arange(4), **constants}, 3))
    assert [piece["input_ids"].tolist() for piece in pieces] == [[0, 1, 2], [3]]
    assert all(piece[name] is value for piece in pieces for name, value in constants.items())


# ---- the gradient and the loss of the full batch


@few_examples
@given(data=st.data())
def test_the_gradient_is_the_full_batchs_for_any_split_and_any_token_counts(data):
    kept = data.draw(st.lists(st.integers(0, SEQUENCE), min_size=1, max_size=9).filter(any))
    cuts = data.draw(st.sets(st.integers(1, len(kept) - 1))) if len(kept) > 1 else set()
    sizes = [end - start for start, end in pairwise([0, *sorted(cuts), len(kept)])]
    model, batch = decoder(), masked_batch(kept, seed=len(cuts))
    loss, expected = full_batch(model, batch)
    result, gradients = run(model, cut(batch, sizes))
    assert relative_error(gradients, expected) < 1e-6
    assert result.loss == pytest.approx(loss, rel=1e-6) and result.weight == sum(kept)
    assert result.grad_norm is None and result.stepped is True


def by_hand(model, micro_batches):
    """The loop that everybody writes, with the weight known at its end."""
    weight = 0
    for micro_batch in micro_batches:
        loss, count = loss_sum(model, micro_batch)
        loss.backward()
        weight += count
    for parameter in model.parameters():
        parameter.grad.mul_(1 / weight)
    return [parameter.grad for parameter in model.parameters()]


def test_the_gradient_is_that_of_a_loop_by_hand_to_the_bit_whatever_the_steps_before_weighed():
    model = decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = AccumulatedStep(model, optimizer, loss_sum)
    for kept, sizes in [
        ([3, 6, 1, 5], [3, 1]),
        ([6] * 12, [5, 7]),
        ([1, 0, 1], [1, 1, 1]),
        ([5, 6], [2]),
    ]:
        batch = masked_batch(kept)
        expected = by_hand(copy.deepcopy(model), cut(batch, sizes))
        with used_gradients(optimizer) as found:
            step(cut(batch, sizes))
        assert_close(found[0], expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "convert", [torch.tensor, lambda n: torch.tensor(n / 2), lambda n: torch.tensor(n).numpy()[()]]
)
def test_a_weight_may_be_a_number_or_a_scalar_tensor(convert):
    def converted(model, batch):
        losses, weight = loss_sum(model, batch)
        return losses, convert(weight)

    model, batch = decoder(), masked_batch([2, 5, 0, 6])
    _, expected = full_batch(model, batch, converted)
    result, gradients = run(model, cut(batch, [2, 1, 1]), converted)
    assert relative_error(gradients, expected) < 1e-6 and result.weight == convert(13)


def test_checkpointed_layers_give_the_same_gradient():
    model, batch = decoder(), masked_batch([3, 6, 1, 5, 2])
    _, expected = full_batch(model, batch)
    for layer in model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    _, gradients = run(model, split(batch, 2))
    assert relative_error(gradients, expected) < 1e-6


def halves(model):
    """The matrices of the layers, as for Muon, and all else."""
    muon = [p for name, p in model.named_parameters() if name.startswith("layers") and p.dim() == 2]
    return muon, [p for p in model.parameters() if all(p is not q for q in muon)]


def by_parameter(model, gradients):
    return dict(zip(model.parameters(), gradients, strict=True))


@pytest.mark.parametrize("scale", [None, 1024.0])
def test_a_second_optimizers_gradients_are_the_means_and_are_added_to_what_was_there(scale):
    model, batch = decoder(), masked_batch([3, 6, 1, 5])
    expected = by_parameter(model, full_batch(model, batch)[1])
    own, others = halves(model)
    model.norm.bias.requires_grad_(False)
    others[0].grad = before = torch.ones_like(others[0])
    optimizer = torch.optim.SGD(own, lr=0.1)
    scaler = scale and torch.amp.GradScaler("cpu", init_scale=scale)
    old = copy.deepcopy(model.state_dict())
    with used_gradients(optimizer) as found:
        result = AccumulatedStep(model, optimizer, loss_sum, scaler=scaler, max_norm=math.inf)(
            split(batch, 3)
        )
    assert relative_error(found[0], [expected[p] for p in own]) < 1e-6
    assert result.grad_norm == pytest.approx(
        math.sqrt(sum(expected[p].square().sum().item() for p in own)), rel=1e-5
    )
    assert all(p.grad is None for p in own) and model.norm.bias.grad is None
    assert others[0].grad is before
    before -= 1
    trained = [p for p in others if p.requires_grad]
    assert relative_error([p.grad for p in trained], [expected[p] for p in trained]) < 2e-6
    changed = {
        name for name, value in model.named_parameters() if not torch.equal(value, old[name])
    }
    assert changed == {
        name for name, value in model.named_parameters() if any(value is p for p in own)
    }


def test_several_optimizers_step_as_one_that_has_all_parameters():
    batch, weights, norms = masked_batch([3, 6, 1, 5, 2]), [], []
    for several in (False, True):
        model = decoder()
        groups = halves(model) if several else [list(model.parameters())]
        # A key's bias has no gradient but rounding, which Adam would make as large as any but for a
        # larger eps.
        optimizers = [torch.optim.AdamW(group, lr=0.01, eps=1e-3) for group in groups]
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        step = AccumulatedStep(model, optimizers, loss_sum, scaler=scaler, max_norm=0.05)
        norms.append([step(split(batch, 2)).grad_norm for _ in range(3)])
        weights.append(model.state_dict())
        assert all(p.grad is None for p in model.parameters())
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    assert_close(*weights, rtol=1e-6, atol=1e-7)


def test_of_several_optimizers_all_step_or_none_where_one_has_a_gradient_that_is_infinite():
    model, batch = decoder(), masked_batch([3, 6, 1])
    optimizers = [torch.optim.AdamW(group, lr=0.01) for group in halves(model)]
    step = AccumulatedStep(
        model, optimizers, loss_sum, scaler=torch.amp.GradScaler("cpu", init_scale=8.0)
    )
    model.norm.weight.register_hook(lambda gradient: gradient * math.inf)
    before = copy.deepcopy(model.state_dict())
    assert not step(split(batch, 2)).stepped
    assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert not any(optimizer.state for optimizer in optimizers)


def test_a_gradient_that_is_right_already_is_not_written_to():
    model, batch, versions = decoder(), masked_batch([2, 6, 4, 4]), []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: versions.append((p.grad, p.grad._version)))
    result = run(model, [batch], max_norm=math.inf)[0]  # 16 tokens: nothing to multiply with
    assert (
        result.weight == 16
        and versions
        and all(gradient._version == version for gradient, version in versions)
    )


# ---- sums in fp32


def drifting(pieces=64):
    """A bf16 model whose gradients are small beside their sum, and one sample for each piece."""
    with seed_generators(0):
        return nn.Linear(64, 64, bias=False).bfloat16(), torch.randn(pieces, 1, 64).bfloat16()


def products(model, x):
    return (model(x) * (1 + x.cos())).float().sum(), x.shape[0]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
def test_sums_in_fp32_do_not_drift(kind):
    model, pieces = drifting()
    model, pieces = model.to(kind), pieces.to(kind)
    exact = [torch.zeros(64, 64, dtype=torch.float64)]
    for x in pieces:  # each piece's own gradient is rounded once; what is added is exact
        [gradient] = torch.autograd.grad(products(model, x)[0], list(model.parameters()))
        exact[0] += gradient.double() / len(pieces)
    once = relative_error([exact[0].to(kind)], exact)
    errors = {
        way: relative_error(run(model, iter(pieces), products, accumulate=way)[1], exact)
        for way in (None, "fp32")
    }
    assert errors["fp32"] <= 1.01 * once and errors[None] > 3 * once
    _, [gradient] = run(model, iter(pieces), products, accumulate="fp32", max_norm=math.inf)
    assert gradient.dtype == kind and not model.weight._post_accumulate_grad_hooks


def test_sums_in_fp32_take_4_bytes_a_parameter_and_the_gradients_none_until_the_step():
    model, pieces = drifting(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = {}
    for way in (None, "fp32"):
        step, seen = AccumulatedStep(model, optimizer, products, accumulate=way), []
        with MemoryMeter(model, optimizer) as meter:

            def watched(meter=meter, seen=seen):
                for piece in pieces:
                    yield piece
                    seen.append(meter.live_bytes)

            start = meter.live_bytes
            step(watched())
        live[way] = [count - start for count in seen]
    count = model.weight.numel()
    assert [a - b for a, b in zip(live["fp32"], live[None], strict=True)] == [
        4 * count - 2 * count
    ] * 4


def test_sums_in_fp32_leave_other_parameters_as_they_are_and_go_after_an_error():
    model, batch = decoder(), masked_batch([3, 6, 1])
    assert all(
        map(
            torch.equal,
            *(run(decoder(), split(batch, 2), accumulate=way)[1] for way in (None, "fp32")),
        )
    )
    model, pieces = drifting(2)
    with pytest.raises(OSError):
        run(model, failing(1), lambda model, x: products(model, pieces[0]), accumulate="fp32")
    assert model.weight.grad is None and not model.weight._post_accumulate_grad_hooks


def test_micro_batches_are_asked_for_one_at_a_time():
    asked, seen = [], []

    def micro_batches():
        for i, micro_batch in enumerate(split(masked_batch([6] * 4), 1)):
            asked.append(i)
            yield micro_batch

    def watching(model, batch):
        seen.append(len(asked))
        return loss_sum(model, batch)

    run(decoder(), micro_batches(), watching)
    assert seen == [1, 2, 3, 4]


# ---- one step


class Counting(torch.amp.GradScaler):
    """A scaler that writes down what is asked of it."""

    def __init__(self, log, **options):
        super().__init__("cpu", **options)
        self.log = log

    def unscale_(self, optimizer):
        self.log.append("unscale")
        super().unscale_(optimizer)

    def step(self, optimizer):
        self.log.append("step")
        return super().step(optimizer)

    def update(self, new_scale=None):
        self.log.append("update" if new_scale is None else "reset")
        super().update(new_scale)


def test_a_call_unscales_clips_steps_and_updates_once_in_this_order(monkeypatch):
    log = []
    clip = nn.utils.clip_grads_with_norm_
    monkeypatch.setattr(
        nn.utils, "clip_grads_with_norm_", lambda *args: (log.append("clip"), clip(*args))
    )
    model = decoder()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: log.append("optimizer"))
    step = AccumulatedStep(model, optimizer, loss_sum, scaler=Counting(log), max_norm=0.05)
    for _ in range(2):
        assert step(split(masked_batch([6] * 5), 2)).stepped
        assert log == ["unscale", "clip", "step", "optimizer", "update"]
        log.clear()
    assert {state["step"].item() for state in optimizer.state.values()} == {2}


@pytest.mark.parametrize(
    ("scaler", "share"), [(None, 0.02), (2.0**10, 0.8), (None, 1e6), (2.0**10, math.inf)]
)
def test_clipping_is_the_frameworks_own_on_the_gradient_of_the_mean(scaler, share):
    model, batch = decoder(), masked_batch([3, 6, 1, 5, 2])
    reference = copy.deepcopy(model).double()
    losses, weight = loss_sum(reference, batch)
    (losses / weight).backward()
    max_norm = share * nn.utils.get_total_norm(p.grad for p in reference.parameters()).item()
    norm = nn.utils.clip_grad_norm_(reference.parameters(), max_norm).item()
    scaler = None if scaler is None else torch.amp.GradScaler("cpu", init_scale=scaler)
    result, gradients = run(model, split(batch, 2), scaler=scaler, max_norm=max_norm)
    assert (
        relative_error(gradients, [parameter.grad for parameter in reference.parameters()]) < 2e-6
    )
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)


class Rows(nn.Module):
    """An embedding, whose gradient may be sparse, and a layer with a dense gradient."""

    def __init__(self, *, sparse):
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4, sparse=sparse), nn.Linear(4, 1)

    def loss_sum(self, rows):
        return self.head(self.table(rows)).square().sum(), len(rows)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("max_norm", [0.05, math.inf])
def test_sparse_gradients_are_clipped_as_dense_ones_are(max_norm, scaled):
    # a micro-batch looks up a row several times, and so do several micro-batches
    rows = torch.tensor([[1, 1, 5], [5, 1, 2], [7, 7, 7], [2, 0, 1]])
    found = []
    for sparse in (False, True):
        with seed_generators(0):
            model = Rows(sparse=sparse)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if scaled else None
        step = AccumulatedStep(model, optimizer, Rows.loss_sum, max_norm=max_norm, scaler=scaler)
        found.append((step(split(rows, 2)).grad_norm, list(model.parameters())))
    (norm, dense), (sparse_norm, sparse) = found
    assert norm > 0.05  # it is clipped
    assert_close(sparse_norm, norm)
    assert_close(sparse, dense)


def test_gradients_from_before_are_not_used_and_not_put_back():
    model, batch = decoder(), masked_batch([3, 6])
    _, expected = full_batch(model, batch)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    assert relative_error(run(model, split(batch, 1))[1], expected) < 2e-6
    assert all(p.grad is None for p in model.parameters())


def test_a_scaled_step_is_the_plain_step():
    batch, losses = masked_batch([3, 6, 1, 5, 2]), []
    for scaler in (
        None,
        torch.amp.GradScaler("cpu", growth_interval=2),
        torch.amp.GradScaler("cpu", enabled=False),
    ):
        model = decoder()
        step = AccumulatedStep(
            model, torch.optim.SGD(model.parameters(), lr=0.5), loss_sum, scaler=scaler, max_norm=1
        )
        losses.append([step(split(batch, 2)).loss for _ in range(5)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[2] == losses[0]
    assert losses[0][-1] < 0.9 * losses[0][0]


def test_the_scale_grows_once_a_step_not_once_a_micro_batch():
    model, scaler = decoder(), torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    step = AccumulatedStep(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum, scaler=scaler
    )
    scales = []
    for _ in range(3):
        assert step(split(masked_batch([6] * 5), 1)).stepped
        scales.append(scaler.get_scale())
    assert scales == [8, 16, 32]


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_scaler_skips_is_reported_and_changes_nothing_but_the_scale(fused):
    model, batch = decoder(), masked_batch([3, 6, 1, 5, 2])
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    step = AccumulatedStep(model, optimizer, loss_sum, scaler=scaler, max_norm=1.0)
    assert step(split(batch, 2)).stepped
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    overflowing = model.norm.weight.register_hook(lambda gradient: gradient * math.inf)
    result = step(split(batch, 2))
    assert (
        result.stepped is False
        and not math.isfinite(result.grad_norm)
        and math.isfinite(result.loss)
    )
    assert_close([model.state_dict(), optimizer.state_dict()], before, rtol=0, atol=0)
    assert scaler.get_scale() == 4.0 and all(
        parameter.grad is None for parameter in model.parameters()
    )
    overflowing.remove()
    assert step(split(batch, 2)).stepped and scaler.get_scale() == 4.0
    assert not torch.equal(model.norm.weight, before[0]["norm.weight"])


def test_schedulers_count_steps_not_micro_batches():
    model = decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (1 + count))
    step = AccumulatedStep(model, optimizer, loss_sum)
    rates = []
    with warnings.catch_warnings():
        # the framework's own check that the optimizer steps before the scheduler
        warnings.simplefilter("error")
        for size in (1, 2, 5):
            step(split(masked_batch([6] * 5), size))
            scheduler.step()
            rates.append(scheduler.get_last_lr()[0])
    assert rates == [1 / 2, 1 / 3, 1 / 4]


# ---- mixed precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_surrounds_the_forward_passes_and_nothing_else(dtype):
    model, batch, dtypes = decoder(), masked_batch([3, 6, 1, 5, 2]), set()
    _, expected = full_batch(model, batch)
    hook = (
        model.layers[0]
        .feedforward[0]
        .register_forward_hook(lambda module, args, output: dtypes.add(output.dtype))
    )
    model.norm.weight.register_hook(lambda gradient: dtypes.add(torch.is_autocast_enabled("cpu")))
    scaler = torch.amp.GradScaler("cpu") if dtype == torch.float16 else None
    result, gradients = run(model, split(batch, 2), scaler=scaler, autocast_dtype=dtype)
    hook.remove()
    assert dtypes == {dtype, False} and result.stepped
    assert 1e-5 < relative_error(gradients, expected) < 2e-2
    assert {gradient.dtype for gradient in gradients} == {torch.float32}


def test_autocast_around_the_call_is_kept_where_none_is_asked_for():
    model, dtypes = decoder(), set()
    model.layers[0].feedforward[0].register_forward_hook(
        lambda module, args, output: dtypes.add(output.dtype)
    )
    with torch.autocast("cpu", torch.bfloat16):
        run(model, split(masked_batch([6] * 3), 2))
    assert dtypes == {torch.bfloat16}


def test_fp16_does_not_overflow_where_plain_sums_do():
    def squares(model, x):
        return (model(x).float() - 1.0).square().sum(), len(x)

    def fresh():
        return nn.Linear(1, 1, bias=False), torch.ones(5000, 1)

    model, x = fresh()
    nn.init.zeros_(model.weight)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    with torch.autocast("cpu", torch.float16):
        loss, _ = squares(model, x)
    scaler.scale(loss).backward()
    assert not model.weight.grad.isfinite().all()

    model.weight.grad = None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = AccumulatedStep(model, optimizer, squares, scaler=scaler, autocast_dtype=torch.float16)
    with used_gradients(optimizer) as found:
        assert step(split(x, 1000)).stepped and step(split(x, 500)).stepped
    assert [gradients[0].item() for gradients in found] == pytest.approx([-2.0, -1.6], rel=1e-2)


def test_small_gradients_vanish_in_fp16_without_a_scaler_and_that_is_warned_about():
    def tiny(model, x):
        return model(x).float().sum() * 1e-9, len(x)

    def gradient(**options):
        model = nn.Linear(4, 1, bias=False)
        return run(model, split(torch.ones(6, 4), 2), tiny, **options)[1][0]

    with pytest.warns(UserWarning, match=r"torch.float16 without a scaler.*GradScaler\('cpu'\)"):
        assert gradient(autocast_dtype=torch.float16).count_nonzero() == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_close(
            gradient(autocast_dtype=torch.bfloat16), torch.full((1, 4), 1e-9), rtol=1e-2, atol=0
        )
        scaled = gradient(autocast_dtype=torch.float16, scaler=torch.amp.GradScaler("cpu"))
    assert_close(scaled, torch.full((1, 4), 1e-9), rtol=1e-2, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_on_a_gpu_the_gradient_is_the_full_batchs(dtype):
    model, batch = decoder().cuda(), tuple(x.cuda() for x in masked_batch([3, 6, 0, 5, 2]))
    _, expected = full_batch(model, batch)
    scaler = torch.amp.GradScaler("cuda") if dtype == torch.float16 else None
    result, gradients = run(
        model, split(batch, 2), scaler=scaler, autocast_dtype=dtype, max_norm=math.inf
    )
    assert (
        relative_error(gradients, expected) < (1e-6 if dtype is None else 2e-2) and result.stepped
    )
    assert result.grad_norm == pytest.approx(
        math.sqrt(sum(g.square().sum().item() for g in expected)), rel=2e-2
    )


@pytest.mark.gpu
def test_on_a_gpu_a_skipped_step_is_reported():
    model, batch = decoder().cuda(), tuple(x.cuda() for x in masked_batch([3, 6, 0, 5, 2]))
    optimizer, scaler = (
        torch.optim.AdamW(model.parameters(), fused=True),
        torch.amp.GradScaler(init_scale=2.0**60),
    )
    step = AccumulatedStep(model, optimizer, loss_sum, scaler=scaler, autocast_dtype=torch.float16)
    before = copy.deepcopy(model.state_dict())
    assert not step(split(batch, 2)).stepped and scaler.get_scale() == 2.0**59
    assert_close(model.state_dict(), before, rtol=0, atol=0)


# ---- what is refused, and what an error leaves behind


def linear():
    with seed_generators(0):
        return nn.Linear(2, 1)


OTHER = nn.Linear(2, 1)


def test_a_disabled_scaler_is_none():
    scaler = torch.amp.GradScaler("cuda", enabled=False)  # for another device than the model's
    assert AccumulatedStep(OTHER, torch.optim.SGD(OTHER.parameters()), good, scaler=scaler)(
        [torch.ones(3, 2)]
    ).stepped


def good(model, x):
    return model(x).sum(), len(x)


def failing(after):
    yield from split(torch.ones(after, 2), 1)
    raise OSError("the disk is gone")


def wrong_in_the_second(change):
    """A loss_sum that is good but for the micro-batch of twos."""
    return lambda model, x: good(model, x) if x.max() < 2 else change(model, x)


ONES = torch.ones(3, 2)
TWOS = [ONES, 2 * ONES, ONES]
BAD_CALLS = {
    "a mean": (TWOS, lambda model, x: model(x).mean(), TypeError),
    "a loss for each sample": (TWOS, lambda model, x: (model(x), 3), TypeError),
    "a text as weight": (TWOS, lambda model, x: (model(x).sum(), "3"), TypeError),
    "a weight with gradients": (TWOS, lambda model, x: (model(x).sum(), model(x).sum()), TypeError),
    "a loss of nan": (TWOS, lambda model, x: (model(x).sum() * math.nan, 3), ValueError),
    "a weight below 0": (TWOS, lambda model, x: (model(x).sum(), torch.tensor(-3)), ValueError),
    "a weight of nan": (TWOS, lambda model, x: (model(x).sum(), math.nan), ValueError),
    "weights of 0": (TWOS[1:2], lambda model, x: (model(x).sum(), 0), ValueError),
    "another model": (TWOS[1:2], lambda model, x: (OTHER(x).sum(), 3), RuntimeError),
    "nothing": ([], good, ValueError),
    "a tensor": (ONES, good, TypeError),
    "a batch encoding": (UserDict(x=ONES), good, TypeError),
    "a pair": ((ONES, 2 * ONES), lambda model, x: (model(x).sum(), 3), TypeError),
}


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("case", BAD_CALLS)
def test_after_an_error_everything_is_as_before_the_call(case, scaled):
    micro_batches, change, error = BAD_CALLS[case]
    check_error(micro_batches, wrong_in_the_second(change), error, " must .+", scaled=scaled)


def test_micro_batches_may_come_in_any_iterable_but_a_tuple_of_tensors_which_may_be_one_batch():
    batch = masked_batch([3, 6, 1, 5])
    _, expected = full_batch(decoder(), batch)
    for pieces in (
        split(batch, 3),
        list(split(batch, 3)),
        tuple(split(batch, 3)),
        (piece for piece in split(batch, 3)),
    ):
        assert relative_error(run(decoder(), pieces)[1], expected) < 1e-6
    with pytest.raises(
        TypeError,
        match=r"^micro_batches must be several .*split.*, got a tuple of tensors, which may be",
    ):
        run(decoder(), batch)  # x and y, as a loader gives them


def check_error(micro_batches, loss_sum, error, message, *, scaled, step_error=None, max_norm=None):
    model = linear()
    model.bias.grad = torch.full_like(model.bias, 7.0)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if scaled else None
    step = AccumulatedStep(model, optimizer, loss_sum, scaler=scaler, max_norm=max_norm)
    gradient, before = model.bias.grad, copy.deepcopy(model.state_dict())
    hook = optimizer.register_step_pre_hook(step_error) if step_error else None
    with pytest.raises(error, match=message):
        step(micro_batches)
    assert model.weight.grad is None and model.bias.grad is gradient and gradient.item() == 7.0
    assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert not optimizer.state
    if scaled:
        assert scaler.get_scale() == 64.0 and scaler.state_dict()["_growth_tracker"] == 0
    if hook:
        hook.remove()
    # and the next call is as the first one would have been
    with used_gradients(optimizer) as found:
        step.loss_sum = good
        assert step([ONES, ONES]).stepped
    assert_close(found[0], [torch.ones(1, 2), torch.ones(1)])


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
def test_an_iterator_or_an_optimizer_that_raises_leaves_gradients_and_scaler_as_they_were(scaled):
    check_error(failing(2), good, OSError, "the disk is gone", scaled=scaled)

    def broken(*_):
        raise MemoryError("no room for the state")

    check_error([ONES], good, MemoryError, "no room", scaled=scaled, step_error=broken)


def test_after_an_error_the_random_numbers_go_on_as_if_nothing_had_been():
    def draws_then_fails(model, x):
        if len(x) == 1:
            raise RuntimeError("a micro-batch that fails")
        return F.dropout(model(x), 0.5).sum(), len(x)

    model = nn.Linear(3, 2)
    step = AccumulatedStep(model, torch.optim.SGD(model.parameters(), lr=0.1), draws_then_fails)
    random = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="a micro-batch that fails"):
        step([torch.ones(4, 3), torch.ones(1, 3)])
    assert torch.equal(torch.get_rng_state(), random)
    step([torch.ones(4, 3)])
    assert not torch.equal(torch.get_rng_state(), random)


def test_gradients_that_are_not_finite_are_an_error_where_they_would_be_clipped_without_a_scaler():
    def infinite(model, x):
        return (model(x) * 0).sqrt().sum(), 3

    message = "norm of the gradients must be finite for clipping, got nan; .*GradScaler"
    check_error(
        [ONES, 2 * ONES],
        wrong_in_the_second(infinite),
        RuntimeError,
        message,
        scaled=False,
        max_norm=9.0,
    )


# ---- bytes


def next_tokens(model, tokens):
    return F.cross_entropy(
        model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
    ), len(tokens)


@functools.cache
def peak_of(size, optimizer=torch.optim.AdamW):
    """Peak bytes of a step on 24 samples in micro-batches, from the second step on; bytes of the
    parameters."""
    tokens, model = (
        random_tokens(24, 32, 256),
        Decoder(vocabulary=256, hidden=32, heads=2, layers=2, sequence=32),
    )
    optimizing = optimizer(model.parameters(), lr=0.01)
    step = AccumulatedStep(model, optimizing, next_tokens, max_norm=1.0)
    step(split(tokens, size))
    with MemoryMeter(model, optimizing) as meter:
        step(split(tokens, size))
    return meter.peak_bytes, sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_peak_bytes_are_a_floor_and_so_many_bytes_a_sample_within_one_percent(optimizer):
    peaks = {size: peak_of(size, optimizer)[0] for size in (2, 5, 8, 12)}
    bytes_per_sample = (peaks[12] - peaks[2]) / 10
    floor_bytes = peaks[2] - 2 * bytes_per_sample
    for size, peak in peaks.items():
        assert floor_bytes + size * bytes_per_sample == pytest.approx(peak, rel=0.01), size


def test_the_floor_is_what_has_the_size_of_the_parameters_and_one_piece_peaks_without_gradients():
    peaks, parameter_bytes = {size: peak_of(size)[0] for size in (5, 8, 24)}, peak_of(5)[1]
    bytes_per_sample = (peaks[8] - peaks[5]) / 3
    floor_bytes = peaks[5] - 5 * bytes_per_sample
    assert floor_bytes == pytest.approx(4 * parameter_bytes, rel=0.001)
    assert floor_bytes + 24 * bytes_per_sample - peaks[24] == pytest.approx(
        parameter_bytes, rel=0.001
    )


def test_symbolic_tensors_take_the_same_peak():
    def peak():
        model, batch = decoder(), torch.zeros(8, SEQUENCE + 1, dtype=torch.long)
        optimizer = torch.optim.AdamW(model.parameters())
        step = AccumulatedStep(model, optimizer, next_tokens, max_norm=1.0)
        step(split(batch, 2))
        with MemoryMeter(model, optimizer) as meter:
            result = step(split(batch, 2))
        return meter.peak_bytes, result

    real, _ = peak()
    with symbolic():
        counted, result = peak()
    assert counted == real
    assert (
        math.isnan(result.loss)
        and math.isnan(result.grad_norm)
        and result.weight == 8
        and result.stepped
    )


# ---- what you may have read


def test_dividing_by_the_number_of_micro_batches_is_wrong_by_more_the_more_token_counts_differ():
    def mean_of_means(kept):
        model, batch = decoder(), masked_batch(kept)
        _, expected = full_batch(model, batch)
        pieces = list(split(batch, 1))
        for piece in pieces:
            losses, weight = loss_sum(model, piece)
            (losses / weight / len(pieces)).backward()
        return relative_error([parameter.grad for parameter in model.parameters()], expected)

    errors = [
        mean_of_means(kept) for kept in ([3, 3, 3, 3], [2, 3, 3, 4], [1, 2, 4, 5], [1, 1, 4, 6])
    ]
    assert errors[0] < 1e-6 < 0.05 < errors[1] < errors[2] < errors[3]


def test_a_last_group_that_is_left_out_loses_its_samples():
    batch = masked_batch([6] * 10)
    pieces = list(split(batch, 4))
    assert [len(inputs) for inputs, _ in pieces] == [4, 4, 2]
    model = decoder()
    _, expected = full_batch(model, batch)
    _, without = run(copy.deepcopy(model), pieces[:2])
    assert relative_error(without, expected) > 0.1
    result, gradients = run(model, pieces)
    assert relative_error(gradients, expected) < 1e-6 and result.weight == 60


def test_a_sixth_of_the_micro_batch_is_no_sixth_of_the_peak():
    assert peak_of(2)[0] > peak_of(12)[0] / 4


def test_batch_normalisation_sees_micro_batches():
    def squares(model, x):
        return model(x).square().sum(), len(x)

    def network():
        with seed_generators(0):
            return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    with seed_generators(1):
        x = torch.randn(12, 3)
    model = network().double()
    losses, weight = squares(model, x.double())
    expected = torch.autograd.grad(losses / weight, list(model.parameters()))
    assert relative_error(run(network(), split(x, 4), squares)[1], expected) > 0.1
    assert relative_error(run(network(), split(x, 12), squares)[1], expected) < 1e-5


# ---- DDP: one process for what it may leave behind, two for the gradients


@pytest.fixture
def process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def counting_hook(sent, bucket):
    sent.append(bucket.buffer().nbytes)
    return hooks.allreduce_hook(None, bucket)


def replicated(model, **options):
    """A DDP model, and the bytes of each bucket that it sends."""
    model, sent = DistributedDataParallel(model, **options), []
    model.register_comm_hook(sent, counting_hook)
    return model, sent


def test_ddp_sends_the_gradients_once_a_step(process_group):
    model, sent = replicated(decoder())
    run(model, split(masked_batch([6, 3, 1, 5, 2]), 2))
    assert sum(sent) == sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize(
    ("bucket_views", "in_buckets"), [(False, False), (True, False), (True, True)]
)
@pytest.mark.parametrize("case", ["a mean", "a loss of nan", "weights of 0", "nothing"])
def test_an_error_under_ddp_leaves_no_sync_closed_and_gradients_as_they_were(
    process_group, case, bucket_views, in_buckets
):
    micro_batches, change, error = BAD_CALLS[case]
    model, sent = replicated(linear(), gradient_as_bucket_view=bucket_views)
    # gradients of the caller's, in DDP's buckets, which take their places after the first pass
    for _ in range(2):
        model.zero_grad()
        good(model, 5 * ONES)[0].backward()
    step = AccumulatedStep(
        model, torch.optim.SGD(model.parameters(), lr=0.0), good, in_buckets=in_buckets
    )
    step([5 * ONES])  # from now on it keeps the buckets, where it may
    good(model, 5 * ONES)[0].backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    step.loss_sum = wrong_in_the_second(change)
    with pytest.raises(error, match=r" must .+"):
        step(micro_batches)
    assert model.require_backward_grad_sync is True and not model._forward_pre_hooks
    assert_close([parameter.grad for parameter in model.parameters()], before, rtol=0, atol=0)
    sent.clear()
    step.loss_sum = good
    assert (
        step([ONES, ONES]).loss == pytest.approx(linear()(ONES).mean().item()) and sum(sent) == 12
    )


def test_a_loss_that_goes_around_ddp_is_refused(process_group):
    model, _ = replicated(linear())
    step = AccumulatedStep(
        model, torch.optim.SGD(model.parameters()), lambda model, x: good(model.module, x)
    )
    with pytest.raises(RuntimeError, match="loss_sum did not call the DDP model"):
        step([ONES, ONES])
    assert not model._forward_pre_hooks
    both = nn.ModuleList([model, replicated(linear())[0]])
    for refused, options in ((both, {}), (model, {"accumulate": "fp32"})):
        with pytest.raises((TypeError, ValueError), match=r"^(model|accumulate) must .+, got .+"):
            AccumulatedStep(refused, torch.optim.SGD(refused.parameters()), good, **options)


def test_a_second_optimizers_gradients_survive_under_ddp(process_group):
    for bucket_views, in_buckets in ((False, False), (True, False), (True, True)):
        model, _ = replicated(decoder(), gradient_as_bucket_view=bucket_views)
        batch = masked_batch([6, 3, 1, 5, 2])
        expected = by_parameter(model, full_batch(model.module, batch)[1])
        own, others = halves(model.module)
        step = AccumulatedStep(model, torch.optim.SGD(own, lr=0.0), loss_sum, in_buckets=in_buckets)
        for times in (1, 2, 3):
            step(split(batch, 2))
            assert (
                relative_error([p.grad / times for p in others], [expected[p] for p in others])
                < 1e-6
            )


STEPS = 3
# name -> (tokens that count in each sample, the sizes of the micro-batches of rank 0 and of rank 1,
# options)
RANKS = {
    "equal": ([6] * 8, ([2, 2], [2, 2]), {}),
    "unequal tokens": ([1, 2, 1, 1, 6, 6, 5, 6], ([2, 2], [2, 2]), {}),
    "unequal micro-batches": ([3, 6, 1, 5, 2, 4, 6], ([2, 2, 1], [2]), {}),
    "a rank without tokens": ([3, 6, 0, 0], ([1, 1], [1, 1]), {}),
    "scaled and clipped": ([3, 6, 1, 5, 2], ([1, 1], [3]), {"max_norm": 0.05, "scale": 1024.0}),
    "bucket views": ([3, 6, 1, 5, 2], ([1, 1], [2, 1]), {"gradient_as_bucket_view": True}),
    "in the buckets": (
        [3, 6, 1, 5, 2],
        ([1, 1, 1], [2]),
        {"gradient_as_bucket_view": True, "in_buckets": True},
    ),
    "reduced with each": ([3, 6, 1, 5], ([1, 1], [1, 1]), {"sync": "each"}),
}


def on_rank(rank, folder):
    """What one of two processes does; everything that it finds goes into a file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/group",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=HANGS_SECONDS),
    )
    found = {}
    for name, (kept, sizes, options) in RANKS.items():
        found[name] = steps_on_rank(rank, kept, sizes, **options)
    found["overflow on one rank"] = overflow_on_rank(rank)
    found["nan on one rank"] = error_on_rank(rank)
    torch.save(found, f"{folder}/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def steps_on_rank(rank, kept, sizes, max_norm=None, scale=None, **options):
    """Gradients, results and bytes sent of three steps: a unit is known from the second on, DDP's
    last buckets, too."""
    told = {name: options.pop(name) for name in ("sync", "in_buckets") if name in options}
    (model, sent), batch = replicated(decoder(), **options), masked_batch(kept)
    pieces = cut(batch, sizes[0] + sizes[1])
    mine = pieces[len(sizes[0]) :] if rank else pieces[: len(sizes[0])]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale) if scale else None
    step = AccumulatedStep(model, optimizer, loss_sum, max_norm=max_norm, scaler=scaler, **told)
    with used_gradients(optimizer) as gradients:
        results = [step(mine) for _ in range(STEPS)]
    return {
        "gradients": gradients,
        "results": [vars(result) for result in results],
        "sent": sum(sent),
    }


def overflow_on_rank(rank):
    model, _ = replicated(linear())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    step = AccumulatedStep(model, torch.optim.SGD(model.parameters(), lr=0.1), good, scaler=scaler)
    before = copy.deepcopy(model.state_dict())
    root = wrong_in_the_second(lambda model, x: ((model(x) * 0).sqrt().sum(), 3))
    step.loss_sum = root if rank == 1 else good
    stepped = step([2 * ONES, ONES]).stepped
    return (
        stepped,
        scaler.get_scale(),
        all(torch.equal(before[name], x) for name, x in model.state_dict().items()),
    )


def error_on_rank(rank):
    model, _ = replicated(linear())
    bad = wrong_in_the_second(lambda model, x: (model(x).sum() * (math.nan if rank == 1 else 1), 3))
    step = AccumulatedStep(model, torch.optim.SGD(model.parameters(), lr=0.1), bad)
    try:
        step([ONES, 2 * ONES])
    except ValueError as error:
        clean = all(parameter.grad is None for parameter in model.parameters())
        return str(error), clean, step([ONES] * (1 + rank)).weight


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    kind = "fork" if sys.platform == "linux" else "spawn"  # a fork has imported all already
    torch.multiprocessing.start_processes(on_rank, args=(str(folder),), nprocs=2, start_method=kind)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", RANKS)
def test_two_ranks_step_as_one_process_does_on_the_whole_batch(two_ranks, name):
    kept, _, options = RANKS[name]
    model = decoder()
    loss, expected = full_batch(model, masked_batch(kept))
    norm = math.sqrt(sum(gradient.square().sum().item() for gradient in expected))
    shrunk = min(1.0, options.get("max_norm", math.inf) / norm)
    clipped = "max_norm" in options
    for rank in two_ranks:
        assert len(rank[name]["gradients"]) == STEPS
        for gradients, result in zip(rank[name]["gradients"], rank[name]["results"], strict=True):
            error = relative_error(gradients, [shrunk * gradient for gradient in expected])
            assert error < (5e-6 if clipped else 1e-6)
            assert result["loss"] == pytest.approx(loss, rel=1e-6) and result["weight"] == sum(kept)
            assert result["stepped"] and result["grad_norm"] == (
                pytest.approx(norm, rel=1e-5) if clipped else None
            )
        times = STEPS * (2 if options.get("sync") == "each" else 1)
        assert rank[name]["sent"] == times * sum(
            parameter.nbytes for parameter in model.parameters()
        )
    assert_close(two_ranks[0][name]["gradients"], two_ranks[1][name]["gradients"], rtol=0, atol=0)


def test_an_overflow_on_one_rank_is_a_skipped_step_on_both(two_ranks):
    assert [rank["overflow on one rank"] for rank in two_ranks] == [(False, 32.0, True)] * 2


def test_a_bad_loss_on_one_rank_is_an_error_on_both_and_the_next_step_works(two_ranks):
    messages, clean, weights = zip(*(rank["nan on one rank"] for rank in two_ranks), strict=True)
    assert messages[0].startswith("another rank had an invalid loss or weight")
    assert messages[1].startswith("micro-batch 1: ")
    assert clean == (True, True) and weights == (9.0, 9.0)


def test_the_optimizers_state_may_live_one_tier_down():
    weights = []
    for kind in (torch.optim.AdamW, OffloadedOptimizer):
        model = decoder()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        step = AccumulatedStep(
            model, kind(model.parameters(), lr=1e-2), loss_sum, scaler=scaler, max_norm=0.5
        )
        for seed in range(3):
            assert step(split(masked_batch([6, 3, 1, 5], seed), 2)).stepped
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    for plain, moved in zip(*weights, strict=True):
        assert torch.equal(plain, moved)
