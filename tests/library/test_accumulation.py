"""Accumulated steps, compared with the full batch in float64 and with plain loops."""

import copy
import math
from collections import UserDict
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from itertools import chain

import pytest
import torch
import torch.distributed.algorithms.ddp_comm_hooks.default_hooks as hooks
from hypothesis_settings import given, settings, st
from process_groups import run_ranks
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from course_lib.accumulation import AccumulatedStep, split
from course_lib.memory import MemoryMeter
from course_lib.models import Decoder, random_tokens, seed_generators
from course_lib.offload import OffloadedOptimizer

VOCABULARY, SEQUENCE, IGNORED = 31, 6, -100
few_examples = settings(max_examples=15, deadline=None)


# ---- a model, a batch with ignored targets, and its gradient in float64


decoder = partial(Decoder, vocabulary=VOCABULARY, hidden=16, heads=2, layers=2, sequence=SEQUENCE)


def loss_sum(model, batch):
    """Return the sum of the cross-entropies of unmasked targets, and their number."""
    inputs, targets = batch
    losses = F.cross_entropy(
        model(inputs).flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED
    )
    return losses, (targets != IGNORED).sum()


def masked_batch(kept, seed=0):
    """Return tokens, and targets of which the first `kept[i]` of sample i are unmasked."""
    tokens = random_tokens(len(kept), SEQUENCE, VOCABULARY, seed=seed)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].clone()
    targets[torch.arange(SEQUENCE) >= torch.tensor(kept)[:, None]] = IGNORED
    return inputs, targets


def split_by_sizes(batch, sizes):
    return list(zip(*(x.split(sizes) for x in batch), strict=True))


def full_batch(model, batch):
    """Return the mean loss of the full batch and its gradients, in float64."""
    model = copy.deepcopy(model).double()
    losses, weight = loss_sum(model, batch)
    gradients = torch.autograd.grad(losses / weight, list(model.parameters()))
    return losses.item() / weight.item(), gradients


@contextmanager
def used_gradients(optimizer):
    """Record the gradients that the optimizer steps with."""
    found = []
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    hook = optimizer.register_step_pre_hook(
        lambda *_: found.append([p.grad.clone() for p in parameters])
    )
    yield found
    hook.remove()


def norm_of(gradients):
    return math.sqrt(sum(gradient.square().sum().item() for gradient in gradients))


def relative_error(gradients, expected):
    differences = [a.double() - b for a, b in zip(gradients, expected, strict=True)]
    return norm_of(differences) / norm_of(expected)


def stepper(model, loss_sum=loss_sum, lr=0.1, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return AccumulatedStep(model, optimizer, loss_sum, **options)


def run(model, micro_batches, loss_sum=loss_sum, **options):
    """Return the result of one step, and the gradients that it used."""
    step = stepper(model, loss_sum, **options)
    with used_gradients(step.optimizer) as found:
        result = step(micro_batches)
    return result, found[0]


# ---- split


def test_split_yields_micro_batches_as_views_without_copies():
    batch = torch.randn(100, 10)
    with MemoryMeter() as meter:
        assert [each["x"]._base is batch for each in split({"x": batch}, 3)] == [True] * 34
    assert meter.peak_bytes == 0


def test_split_returns_micro_batches_of_same_hugging_face_class():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    x = torch.arange(5)
    batch = outputs.BaseModelOutput(last_hidden_state=x, hidden_states=(x,))
    for found, rows in zip(split(batch, 2), ([0, 1], [2, 3], [4]), strict=True):
        assert type(found) is type(batch)
        assert found.last_hidden_state.tolist() == found["hidden_states"][0].tolist() == rows
    assert list(split(x[:0], 2)) == []


# ---- the gradient and the loss of the full batch

# Micro-batches, as lists of the numbers of unmasked tokens of their samples.
MICRO_BATCHES = st.lists(st.lists(st.integers(0, SEQUENCE), min_size=1, max_size=4), max_size=4)
MICRO_BATCHES = MICRO_BATCHES.filter(lambda counts: any(map(any, counts)))


@few_examples
@given(counts=MICRO_BATCHES, before=st.integers(0, SEQUENCE))
def test_accumulated_gradient_equals_full_batch_gradient_for_any_token_counts(counts, before):
    kept, sizes = list(chain.from_iterable(counts)), list(map(len, counts))
    model, batch = decoder(), masked_batch(kept, seed=len(counts))
    loss, expected = full_batch(model, batch)
    step = stepper(model, lr=0.0)
    if before:
        step([masked_batch([before] * 3)])
    with used_gradients(step.optimizer) as found:
        result = step(split_by_sizes(batch, sizes))
    _, fresh = run(decoder(), split_by_sizes(batch, sizes))
    assert_close(found[0], fresh, rtol=0, atol=0)  # for any weight of the earlier step
    assert relative_error(fresh, expected) < 1e-6
    assert result.loss == pytest.approx(loss, rel=1e-6) and result.weight == sum(kept)
    assert result.grad_norm is None and result.stepped is True


def halves(model):
    """Return the matrices of the layers, as for Muon, and all other parameters."""
    muon = [p for name, p in model.named_parameters() if name.startswith("layers") and p.dim() == 2]
    return muon, [p for p in model.parameters() if all(p is not q for q in muon)]


def by_parameter(model, gradients):
    return dict(zip(model.parameters(), gradients, strict=True))


@pytest.mark.parametrize("scale", [None, 1024.0])
def test_accumulated_step_ignores_stale_gradients_but_accumulates_other_optimizers_gradients(scale):
    model, batch = decoder(), masked_batch([3, 6, 1, 5])
    expected = by_parameter(model, full_batch(model, batch)[1])
    own, others = halves(model)
    model.norm.bias.requires_grad_(False)
    own[0].grad, others[0].grad = torch.ones_like(own[0]), torch.ones_like(others[0])
    before, old = others[0].grad, copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(own, lr=0.1)
    scaler = scale and torch.amp.GradScaler("cpu", init_scale=scale)
    step = AccumulatedStep(model, optimizer, loss_sum, scaler=scaler, max_norm=math.inf)
    with used_gradients(optimizer) as found:
        norm = step(split(batch, 3)).grad_norm
    assert relative_error(found[0], [expected[p] for p in own]) < 1e-6
    assert norm == pytest.approx(norm_of(expected[p] for p in own), rel=1e-5)
    assert all(p.grad is None for p in [*own, model.norm.bias]) and others[0].grad is before
    before -= 1
    trained = [p for p in others if p.requires_grad]
    assert relative_error([p.grad for p in trained], [expected[p] for p in trained]) < 2e-6
    for name, p in model.named_parameters():
        assert torch.equal(p, old[name]) != any(p is each for each in own)


def test_several_or_offloaded_optimizers_update_weights_like_single_optimizer():
    batch, weights, norms = masked_batch([3, 6, 1, 5, 2]), [], []
    for kind, several in ((torch.optim.AdamW, False), (OffloadedOptimizer, False), (None, True)):
        model = decoder()
        groups = halves(model) if several else [list(model.parameters())]
        # The gradient of a key's bias is rounding noise, which Adam scales up unless eps is large.
        optimizers = [(kind or torch.optim.AdamW)(group, lr=0.01, eps=1e-3) for group in groups]
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        step = AccumulatedStep(model, optimizers, loss_sum, scaler=scaler, max_norm=0.05)
        norms.append([step(split(batch, 2)).grad_norm for _ in range(3)])
        weights.append(model.state_dict())
        states = [state for each in optimizers for state in each.state.values()]
        assert {state["step"].item() for state in states} == {3}
        assert all(p.grad is None for p in model.parameters())
    assert norms[0] == norms[1] == pytest.approx(norms[2], rel=1e-6)
    assert_close(weights[1], weights[0], rtol=0, atol=0)
    assert_close(weights[2], weights[0], rtol=1e-6, atol=1e-7)


# ---- sums in fp32


def drifting(micro_batches=64):
    """Return a bf16 model with gradients far below their sum, and one sample per micro-batch."""
    with seed_generators(0):
        model, x = nn.Linear(64, 64, bias=False), torch.randn(micro_batches, 1, 64)
    return model.bfloat16(), x.bfloat16()


def weighted_outputs(model, x):
    return (model(x) * (1 + x.cos())).float().sum(), x.shape[0]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
def test_fp32_accumulation_avoids_rounding_drift_and_removes_hooks_after_error(kind):
    model, samples = (x.to(kind) for x in drifting())
    exact = torch.zeros(64, 64, dtype=torch.float64)
    for x in samples:  # each gradient is rounded once, and the sum is exact
        [gradient] = torch.autograd.grad(weighted_outputs(model, x)[0], list(model.parameters()))
        exact += gradient.double() / len(samples)
    once = relative_error([exact.to(kind)], [exact])
    _, drifted = run(model, iter(samples), weighted_outputs)
    _, found = run(model, iter(samples), weighted_outputs, accumulate="fp32", max_norm=math.inf)
    assert relative_error(found, [exact]) <= 1.01 * once < relative_error(drifted, [exact]) / 3
    assert found[0].dtype == kind
    with pytest.raises(OSError):
        run(model, failing(), lambda *_: weighted_outputs(model, samples[0]), accumulate="fp32")
    assert model.weight.grad is None and not model.weight._post_accumulate_grad_hooks


def test_fp32_accumulation_uses_4_bytes_per_parameter():
    model, micro_batches = drifting(4)

    def live(accumulate):
        found, step = [], stepper(model, weighted_outputs, accumulate=accumulate)
        with MemoryMeter(model, step.optimizer) as meter:
            # Record the live bytes when the step takes the next micro-batch.
            step(found.append(meter.live_bytes) or each for each in micro_batches)
        return found[1:]

    more = [a - b for a, b in zip(live("fp32"), live(None), strict=True)]
    assert more == [(4 - 2) * model.weight.numel()] * 3


# ---- steps in backward


class Tied(nn.Module):
    """A model with tied weights, a frozen and an unused parameter, and one of another optimizer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.hidden, self.unused, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.hidden.bias.requires_grad_(False)
        self.optimized = [p for p in self.parameters() if p is not self.norm.bias]

    def forward(self, x):
        return self.head(self.norm(torch.tanh(self.hidden(self.embedding(x)))))


def tied():
    with seed_generators(0):
        return Tied(), random_tokens(7, 1, 11)


def token_losses(model, tokens):
    losses = F.cross_entropy(model(tokens[:, 0]), tokens[:, 1], reduction="sum")
    return losses, Fraction(len(tokens))


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
        lambda parameters: OffloadedOptimizer(parameters, torch.optim.AdamW, lr=0.1),
        lambda parameters: [torch.optim.AdamW([p], lr=0.1) for p in parameters],
    ],
    ids=["SGD", "AdamW", "offloaded", "several"],
)
def test_optimizer_step_in_backward_updates_weights_like_step_after_backward(make):
    (model, tokens), (plain, _) = tied(), tied()
    expected = make(plain.optimized)
    expected = expected if isinstance(expected, list) else [expected]
    step = AccumulatedStep(model, make(model.optimized), token_losses, in_backward=True)
    model.hidden.weight.grad = torch.ones(8, 8)  # of an earlier backward pass
    for _ in range(3):
        loss = F.cross_entropy(plain(tokens[:, 0]), tokens[:, 1])
        loss.backward()
        for optimizer in expected:
            optimizer.step()
            optimizer.zero_grad()
        result = step(iter([tokens]))
        assert result.loss == pytest.approx(loss.item(), rel=1e-6) and result.weight == 7
        assert result.grad_norm is None and result.stepped is True
        assert all(p.grad is None for p in model.optimized)
        assert_close(model.norm.bias.grad, plain.norm.bias.grad)
    assert_close(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)
    assert torch.equal(model.unused.weight, tied()[0].unused.weight)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_optimizer_step_in_backward_stores_one_gradient_at_a_time():
    with seed_generators(0):
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    peaks = []
    for in_backward in (False, True):
        step = AccumulatedStep(model, optimizer, weighted_outputs, in_backward=in_backward)
        with MemoryMeter(model, optimizer) as meter:
            step([torch.ones(1, 64)])
        peaks.append(meter.peak_bytes)
    # Activations and their gradients take fewer bytes than one weight.
    assert peaks[0] - peaks[1] == pytest.approx(7 * 64 * 64 * 4, abs=64 * 64)


@pytest.mark.parametrize(
    ("micro_batches", "loss_sum", "error", "message"),
    [
        (2, token_losses, ValueError, r"^micro_batches must contain only 1 .* got 2$"),
        (1, lambda model, x: (model(x).sum() * math.nan, 7), ValueError, "loss must be finite"),
        (1, lambda model, x: (OTHER.weight.sum(), 7), RuntimeError, "optimizer got a gradient"),
        (1, token_losses, ZeroDivisionError, None),
    ],
    ids=["two", "nan", "no gradient", "hook"],
)
def test_error_during_step_in_backward_removes_hooks_and_restores_gradients(
    micro_batches, loss_sum, error, message
):
    model, tokens = tied()
    model.norm.bias.grad = other = torch.full((8,), 3.0)
    model.norm.weight.grad = own = torch.full((8,), 5.0)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.optimized, lr=0.1)
    step = AccumulatedStep(model, optimizer, loss_sum, in_backward=True)
    fails = error is ZeroDivisionError
    model.hidden.weight.register_hook(lambda _: 1 / 0 if fails else None)
    with pytest.raises(error, match=message):
        step([tokens] * micro_batches)
    assert model.norm.bias.grad is other and model.norm.weight.grad is own
    assert own.eq(5.0).all() and other.eq(3.0).all()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    if fails:
        # The gradient of the norm was complete before the error.
        assert not torch.equal(model.norm.weight, before["norm.weight"])
        before["norm.weight"] = model.norm.weight.detach()
    assert_close(model.state_dict(), before, rtol=0, atol=0)


# ---- one step


@pytest.mark.parametrize(
    ("scale", "share"), [(None, 0.02), (2.0**10, 0.8), (None, 1e6), (2.0**10, math.inf)]
)
def test_gradient_clipping_equals_pytorch_clipping_of_mean_gradient(scale, share):
    model, batch = decoder(), masked_batch([3, 6, 1, 5, 2])
    reference = copy.deepcopy(model).double()
    for p, gradient in by_parameter(reference, full_batch(model, batch)[1]).items():
        p.grad = gradient
    max_norm = share * norm_of(p.grad for p in reference.parameters())
    norm = nn.utils.clip_grad_norm_(reference.parameters(), max_norm).item()
    scaler = scale and torch.amp.GradScaler("cpu", init_scale=scale)
    result, gradients = run(model, split(batch, 2), scaler=scaler, max_norm=max_norm)
    assert relative_error(gradients, [p.grad for p in reference.parameters()]) < 2e-6
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)


def test_clipping_of_sparse_gradients_raises_and_restores_gradients():
    model = nn.Embedding(4, 2, sparse=True)
    step = AccumulatedStep(
        model, torch.optim.SGD(model.parameters()), lambda m, x: (m(x).sum(), 1), max_norm=1.0
    )
    with pytest.raises(TypeError, match=r"^max_norm must be None for sparse gradients, got 1\.0$"):
        step([torch.tensor([1, 2])])
    assert model.weight.grad is None


def test_loss_scale_grows_once_per_step_and_never_when_disabled():
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    step = stepper(linear(), summed_output, scaler=scaler)
    assert all(step([ONES] * 3).stepped for _ in range(5)) and scaler.get_scale() == 4.0 * 2**2
    disabled = torch.amp.GradScaler("cuda", enabled=False)  # for another device than the model's
    assert stepper(linear(), summed_output, scaler=disabled)([ONES]).stepped


@pytest.mark.parametrize(("several", "fused"), [(False, False), (False, True), (True, False)])
def test_step_skipped_by_grad_scaler_changes_only_loss_scale(several, fused):
    model, batch = decoder(), masked_batch([3, 6, 1, 5, 2])
    groups = halves(model) if several else [list(model.parameters())]
    optimizers = [torch.optim.AdamW(group, fused=fused) for group in groups]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    step = AccumulatedStep(model, optimizers, loss_sum, scaler=scaler, max_norm=1.0)
    assert step(split(batch, 2)).stepped
    before = copy.deepcopy([each.state_dict() for each in (model, *optimizers)])
    overflowing = model.norm.weight.register_hook(lambda gradient: gradient * math.inf)
    result = step(split(batch, 2))
    assert result.stepped is False and math.isfinite(result.loss)
    assert not math.isfinite(result.grad_norm)
    found = [each.state_dict() for each in (model, *optimizers)]
    assert_close(found, before, rtol=0, atol=0)
    assert scaler.get_scale() == 4.0 and all(p.grad is None for p in model.parameters())
    overflowing.remove()
    assert step(split(batch, 2)).stepped and scaler.get_scale() == 4.0
    assert not torch.equal(model.norm.weight, before[0]["norm.weight"])


# ---- mixed precision


@pytest.mark.parametrize(
    ("inside", "outside"), [(torch.bfloat16, None), (torch.float16, None), (None, torch.bfloat16)]
)
def test_accumulated_step_applies_autocast_only_to_forward_passes(inside, outside):
    model, batch, dtypes = decoder(), masked_batch([3, 6, 1, 5, 2]), set()
    _, expected = full_batch(model, batch)
    layer = model.layers[0].feedforward[0]
    hook = layer.register_forward_hook(lambda module, args, output: dtypes.add(output.dtype))
    model.norm.weight.register_hook(lambda gradient: dtypes.add(torch.is_autocast_enabled("cpu")))
    scaler = torch.amp.GradScaler("cpu") if inside == torch.float16 else None
    with torch.autocast("cpu", outside, enabled=outside is not None):
        result, gradients = run(model, split(batch, 2), scaler=scaler, autocast_dtype=inside)
    hook.remove()
    assert dtypes == {inside or outside, outside is not None} and result.stepped
    assert 1e-5 < relative_error(gradients, expected) < 2e-2
    assert {gradient.dtype for gradient in gradients} == {torch.float32}


def test_fp16_gradient_sums_with_loss_scaling_do_not_overflow():
    def distances(model, x):
        return (model(x).float() - 1.0).square().sum(), len(x)

    model, x = nn.Linear(1, 1, bias=False), torch.ones(5000, 1)
    nn.init.zeros_(model.weight)
    # A gradient times the scale, 2 * 1000 * 2**14, exceeds the largest number of fp16.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    step = stepper(model, distances, scaler=scaler, autocast_dtype=torch.float16)
    with used_gradients(step.optimizer) as found:
        assert step(split(x, 1000)).stepped and step(split(x, 500)).stepped
    assert [gradients[0].item() for gradients in found] == pytest.approx([-2.0, -1.6], rel=1e-2)


def test_fp16_accumulation_without_grad_scaler_warns():
    with pytest.warns(UserWarning, match="GradScaler"):
        stepper(linear(), autocast_dtype=torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_accumulated_gradient_on_gpu_equals_full_batch_gradient(dtype):
    model, batch = decoder().cuda(), tuple(x.cuda() for x in masked_batch([3, 6, 0, 5, 2]))
    _, expected = full_batch(model, batch)
    options = {"autocast_dtype": dtype, "max_norm": math.inf}
    if dtype == torch.float16:
        options["scaler"] = torch.amp.GradScaler("cuda")
    result, gradients = run(model, split(batch, 2), **options)
    assert relative_error(gradients, expected) < (1e-6 if dtype is None else 2e-2)
    assert result.stepped and result.grad_norm == pytest.approx(norm_of(expected), rel=2e-2)


# ---- errors, and the state after them


def linear():
    with seed_generators(0):
        return nn.Linear(2, 1)


OTHER = nn.Linear(2, 1)


def summed_output(model, x):
    return model(x).sum(), len(x)


def failing():
    yield from split(torch.ones(2, 2), 1)
    raise OSError("the disk is broken")


def wrong_in_the_second(change):
    """Return a loss_sum that draws random numbers, and uses `change` for a batch of twos."""

    def loss_sum(model, x):
        torch.rand(1)
        return summed_output(model, x) if x.max() < 2 else change(model, x)

    return loss_sum


def root_of_zero(model, x):
    """Return a finite loss with gradients of NaN."""
    return (model(x) * 0).sqrt().sum(), 3


ONES = torch.ones(3, 2)
TWOS = [ONES, 2 * ONES, ONES]
BAD_CALLS = {
    "mean loss": (TWOS, lambda model, x: model(x).mean(), TypeError),
    "loss per sample": (TWOS, lambda model, x: (model(x), 3), TypeError),
    "weight with gradient": (TWOS, lambda model, x: (model(x).sum(), model(x).sum()), TypeError),
    "loss of nan": (TWOS, lambda model, x: (model(x).sum() * math.nan, 3), ValueError),
    "weight below 0": (TWOS, lambda model, x: (model(x).sum(), torch.tensor(-3)), ValueError),
    "weights of 0": (TWOS[1:2], lambda model, x: (model(x).sum(), 0), ValueError),
    "other model": (TWOS[1:2], lambda model, x: (OTHER(x).sum(), 3), RuntimeError),
    "no micro-batch": ([], summed_output, ValueError),
    "tensor": (ONES, summed_output, TypeError),
    "mapping": (UserDict(x=ONES), summed_output, TypeError),
    "pair": ((ONES, 2 * ONES), lambda model, x: (model(x).sum(), 3), TypeError),
    "gradients of nan": (TWOS, root_of_zero, RuntimeError),
    "failing iterator": (failing, summed_output, OSError),
    "failing optimizer": ([ONES], summed_output, ZeroDivisionError),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_error_in_accumulated_step_restores_gradients_scaler_and_random_state(case):
    micro_batches, change, error = BAD_CALLS[case]
    model, loss_sum = linear(), wrong_in_the_second(change)
    model.bias.grad = torch.full_like(model.bias, 7.0)
    optimizer = torch.optim.AdamW(model.parameters())
    # A scaler would skip the step where gradients are NaN.
    scaled = case != "gradients of nan"
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scaled)
    step = AccumulatedStep(model, optimizer, loss_sum, scaler=scaler, max_norm=9.0)
    gradient, before = model.bias.grad, copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    hook = optimizer.register_step_pre_hook(lambda *_: 1 / (error is not ZeroDivisionError))
    with pytest.raises(error, match=r" must |is broken|division"):
        step(micro_batches() if callable(micro_batches) else micro_batches)
    hook.remove()
    assert model.weight.grad is None and model.bias.grad is gradient and gradient.item() == 7.0
    assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert not optimizer.state and torch.equal(torch.get_rng_state(), random)
    if scaled:
        assert scaler.get_scale() == 64.0 and scaler.state_dict()["_growth_tracker"] == 0
    # The next call equals a first call.
    with used_gradients(optimizer) as found:
        assert step([ONES, ONES]).stepped
    assert_close(found[0], [torch.ones(1, 2), torch.ones(1)])
    assert not torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([], r"^optimizer must be .* that have parameters, got a list without"),
        ([[0, 1], [1]], r"^optimizer must contain each parameter only once, got a list .*twice"),
    ],
)
def test_step_rejects_optimizers_with_no_or_shared_parameters(groups, message):
    model = linear()
    parameters = list(model.parameters())
    optimizers = [torch.optim.SGD([parameters[i] for i in group]) for group in groups]
    with pytest.raises(ValueError, match=message):
        AccumulatedStep(model, optimizers, summed_output)


# ---- DDP: one process for the state after errors, two for the gradients


def replicated(model, **options):
    """Return a DDP model, and a list of the bytes of each bucket that it sends."""
    model, sent = DistributedDataParallel(model, **options), []

    def counted(_, bucket):
        sent.append(bucket.buffer().nbytes)
        return hooks.allreduce_hook(None, bucket)

    model.register_comm_hook(None, counted)
    return model, sent


BUCKETS = pytest.mark.parametrize(
    ("bucket_views", "in_buckets"), [(False, False), (True, False), (True, True)]
)


@BUCKETS
@pytest.mark.parametrize("case", ["mean loss", "loss of nan", "no micro-batch"])
def test_error_in_ddp_step_restores_gradients_and_hooks(
    one_process, case, bucket_views, in_buckets
):
    micro_batches, change, error = BAD_CALLS[case]
    model, sent = replicated(linear(), gradient_as_bucket_view=bucket_views)
    # The caller's gradients are in DDP's buckets, which are rebuilt after the first pass.
    for _ in range(2):
        model.zero_grad()
        summed_output(model, 5 * ONES)[0].backward()
    step = stepper(model, wrong_in_the_second(change), lr=0.0, in_buckets=in_buckets)
    step([ONES])  # from now on it keeps the buckets if `in_buckets`
    summed_output(model, 5 * ONES)[0].backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    with pytest.raises(error, match=r" must .+"):
        step(micro_batches)
    assert model.require_backward_grad_sync is True and not model._forward_pre_hooks
    assert_close([parameter.grad for parameter in model.parameters()], before, rtol=0, atol=0)
    sent.clear()
    loss = step([ONES, ONES]).loss
    assert loss == pytest.approx(linear()(ONES).mean().item()) and sum(sent) == 12


def test_ddp_step_rejects_loss_bypassing_ddp_model_and_unsupported_options(one_process):
    model, _ = replicated(linear())
    with pytest.raises(RuntimeError, match="did not call the DDP model"):
        stepper(model, lambda model, x: summed_output(model.module, x))([ONES, ONES])
    assert not model._forward_pre_hooks
    with pytest.raises(TypeError, match=r"^model must .+, got .+"):
        stepper(nn.ModuleList([model, replicated(linear())[0]]))
    with pytest.raises(ValueError, match=r"^accumulate must .+, got .+"):
        stepper(model, accumulate="fp32")
    with pytest.raises(ValueError, match=r"^in_backward must be False for a DDP .+, got True"):
        stepper(model, in_backward=True)


@BUCKETS
def test_ddp_step_accumulates_gradients_of_other_optimizers(one_process, bucket_views, in_buckets):
    model, _ = replicated(decoder(), gradient_as_bucket_view=bucket_views)
    batch = masked_batch([6, 3, 1, 5, 2])
    expected = by_parameter(model, full_batch(model.module, batch)[1])
    own, others = halves(model.module)
    step = AccumulatedStep(model, torch.optim.SGD(own, lr=0.0), loss_sum, in_buckets=in_buckets)
    for times in (1, 2, 3):
        step(split(batch, 2))
        found = [p.grad / times for p in others]
        assert relative_error(found, [expected[p] for p in others]) < 1e-6


STEPS = 3
# Name -> (unmasked tokens of each sample, sizes of the micro-batches of ranks 0 and 1, options).
RANKS = {
    "unequal micro-batches": ([3, 6, 1, 5, 2, 4, 6], ([2, 2, 1], [2]), {}),
    "a rank without tokens": ([3, 6, 0, 0], ([1, 1], [1, 1]), {}),
    "scaled and clipped": ([3, 6, 1, 5, 2], ([1, 1], [3]), {"max_norm": 0.05, "scale": 1024.0}),
    "in the buckets": (
        [3, 6, 1, 5, 2],
        ([1, 1, 1], [2]),
        {"gradient_as_bucket_view": True, "in_buckets": True},
    ),
    "reduced with each": ([3, 6, 1, 5], ([1, 1], [1, 1]), {"sync": "each"}),
}


def on_rank(rank):
    """Run all cases on one of two processes, and return their results."""
    steps = {name: steps_on_rank(rank, *case[:2], **case[2]) for name, case in RANKS.items()}
    return {**steps, "errors": errors_on_rank(rank)}


def steps_on_rank(rank, kept, sizes, scale=None, gradient_as_bucket_view=False, **options):
    """Return gradients, results and bytes sent of three steps; the first one rebuilds buckets."""
    model, sent = replicated(decoder(), gradient_as_bucket_view=gradient_as_bucket_view)
    micro_batches = split_by_sizes(masked_batch(kept), sizes[0] + sizes[1])
    own = micro_batches[len(sizes[0]) :] if rank else micro_batches[: len(sizes[0])]
    scaler = scale and torch.amp.GradScaler("cpu", init_scale=scale)
    step = stepper(model, lr=0.0, scaler=scaler, **options)
    with used_gradients(step.optimizer) as gradients:
        results = [vars(step(own)) for _ in range(STEPS)]
    return {"gradients": gradients, "results": results, "sent": sum(sent)}


def errors_on_rank(rank):
    """Return the error of a loss of NaN on one rank, and the state after it and an overflow."""
    model, _ = replicated(linear())
    before = copy.deepcopy(list(model.parameters()))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    step = stepper(
        model, wrong_in_the_second(root_of_zero if rank else summed_output), scaler=scaler
    )
    stepped = step([2 * ONES, ONES]).stepped
    bad = wrong_in_the_second(lambda model, x: (model(x).sum() * (math.nan if rank else 1), 3))
    step = stepper(model, bad)
    with pytest.raises(ValueError) as error:
        step([ONES, 2 * ONES])
    same = all(map(torch.equal, before, model.parameters()))
    clean = all(parameter.grad is None for parameter in model.parameters())
    weight = step([ONES] * (1 + rank)).weight
    return str(error.value), (stepped, scaler.get_scale(), same, clean, weight)


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(2, on_rank)


@pytest.mark.parametrize("name", RANKS)
def test_two_ranks_update_weights_like_one_process_on_full_batch(two_ranks, name):
    kept, _, options = RANKS[name]
    model = decoder()
    loss, expected = full_batch(model, masked_batch(kept))
    norm, clipped = norm_of(expected), "max_norm" in options
    shrunk = min(1.0, options.get("max_norm", math.inf) / norm)
    whole_bytes = sum(parameter.nbytes for parameter in model.parameters())
    for rank in two_ranks:
        found = rank[name]
        for gradients, result in zip(found["gradients"], found["results"], strict=True):
            error = relative_error(gradients, [shrunk * gradient for gradient in expected])
            assert error < (5e-6 if clipped else 1e-6)
            assert result["loss"] == pytest.approx(loss, rel=1e-6) and result["weight"] == sum(kept)
            measured = pytest.approx(norm, rel=1e-5) if clipped else None
            assert result["stepped"] and result["grad_norm"] == measured
        times = STEPS * (2 if options.get("sync") == "each" else 1)
        assert found["sent"] == times * whole_bytes
    assert_close(two_ranks[0][name]["gradients"], two_ranks[1][name]["gradients"], rtol=0, atol=0)


def test_error_on_one_rank_stops_step_on_both_ranks(two_ranks):
    messages, left = zip(*(rank["errors"] for rank in two_ranks), strict=True)
    assert "another rank" in messages[0] and "micro-batch 1" in messages[1]
    assert left == ((False, 32.0, True, True, 9.0),) * 2
