"""`checkpoint_blocks` and `checkpointed_loss` against plain autograd and `MemoryMeter`."""

import copy
import pickle
import warnings
import weakref
from collections import Counter
from contextlib import nullcontext
from functools import partial

import pytest
import third_party_models
import torch
from third_party_models import sentences
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.checkpoint import CheckpointPolicy
from training_steps import no_gc

from course_lib.checkpoint import checkpoint_blocks, checkpointed_loss
from course_lib.checkpoint.blocks import names_of
from course_lib.memory import MemoryMeter
from course_lib.models import Decoder, deep_mlp, random_tokens

aten = torch.ops.aten


leaf = partial(torch.randn, dtype=torch.float64, requires_grad=True)


# ---- checkpointed_loss


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("ignore_index", [-100, 3])
@pytest.mark.parametrize(("tokens", "chunk"), [(7, 1), (7, 3), (7, 100), (0, 2)])
def test_chunked_loss_and_its_gradients_equal_cross_entropy(tokens, chunk, ignore_index, reduction):
    hidden, weight, targets = leaf(tokens, 5), leaf(11, 5), torch.randint(11, (tokens,))
    targets[:3] = ignore_index  # a whole chunk of three
    options = {"ignore_index": ignore_index, "reduction": reduction}
    loss = checkpointed_loss(hidden, weight, targets, chunk=chunk, **options)
    expected = F.cross_entropy(hidden @ weight.T, targets, **options)
    assert_close(loss, expected, equal_nan=True)
    gradients = (torch.autograd.grad(each, (hidden, weight)) for each in (loss, expected))
    assert_close(*gradients)


def test_chunked_bf16_loss_equals_float64_within_one_rounding():
    hidden, weight, targets = (
        torch.randn(4000, 8).bfloat16(),
        torch.randn(50, 8).bfloat16(),
        torch.randint(50, (4000,)),
    )
    loss = checkpointed_loss(hidden, weight, targets, chunk=10)
    exact = F.cross_entropy((hidden @ weight.T).double(), targets)
    assert loss.dtype is torch.bfloat16
    assert_close(loss.double(), exact, rtol=2**-7, atol=0)  # a unit in the last of 8 bits


# ---- checkpoint_blocks


decoder = partial(Decoder, vocabulary=40, hidden=16, heads=2, layers=3, sequence=16, dropout=0.2)
TOKENS = random_tokens(4, 12, 40)


def results_and_peak(model, context=nullcontext, batch=TOKENS):
    """Return (loss, gradients, next random number) of a step, and its peak in bytes."""
    torch.manual_seed(5)
    with context(model), MemoryMeter(model) as meter:
        loss, _ = model.loss_sum(batch)
        loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return (loss.detach(), gradients, torch.rand(1)), meter.peak_bytes


@pytest.mark.parametrize("policy", [None, [aten.addmm.default]])
@pytest.mark.parametrize(
    ("make", "batch"),
    [(decoder, TOKENS), (partial(third_party_models.Decoder, dropout=0.1), sentences())],
    ids=["decoder", "blocks with tuples and keywords"],
)
def test_checkpointed_blocks_have_identical_gradients_and_lower_peak(make, batch, policy):
    model = make()
    plain, plain_peak = results_and_peak(model, batch=batch)
    checkpoints = partial(checkpoint_blocks, blocks=None, policy=policy)
    found, peak = results_and_peak(model, checkpoints, batch)
    assert_close(found, plain, rtol=0, atol=0)
    assert peak < plain_peak
    assert not any("forward" in vars(module) for module in model.modules())
    assert results_and_peak(model, batch=batch)[1] == plain_peak


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"first": 4}, [0, 1, 2, 3]),
        ({"first": 5, "every": 2}, [1, 3]),
        ({"blocks": "layers.[135]"}, [1, 3, 5]),
        ({"blocks": ["layers.4", "layers.0"]}, [0, 4]),
    ],
)
def test_only_selected_blocks_are_recomputed_and_hooks_run_once(options, expected):
    runs, hook_calls, model = Counter(), Counter(), decoder()
    model.layers.extend(decoder().layers)
    for i, layer in enumerate(model.layers):
        layer.norm1.register_forward_hook(lambda *_, i=i: runs.update([i]))
        for kind in ("forward_pre", "forward", "full_backward"):
            count = partial(hook_calls.update, [(kind, i)])
            getattr(layer, f"register_{kind}_hook")(lambda *_, count=count: count())
    with checkpoint_blocks(model, **options) as handle:
        model.loss(TOKENS).backward()
        assert runs == {i: 2 if i in expected else 1 for i in range(6)}
        assert len(hook_calls) == hook_calls.total() == 3 * 6
        with torch.no_grad():
            model.loss(TOKENS)
    assert handle.names == tuple(f"layers.{i}" for i in expected)
    assert runs == {i: 3 if i in expected else 2 for i in range(6)}


def several(count, *modules):
    """Return a list of copies of the modules, which alternate."""
    return nn.ModuleList(copy.deepcopy(modules[i % len(modules)]) for i in range(count))


LINEAR, PAIR = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Tanh())
STACK = nn.Sequential(several(3, LINEAR), nn.ReLU())  # a module with a list inside
HEADS = {"heads": several(5, LINEAR)}
MIXED = {
    "short": several(2, PAIR, nn.TransformerEncoderLayer(2, 1, 2)),
    "layers": several(5, LINEAR, nn.Tanh()),
    "long": several(4, PAIR, nn.TransformerEncoderLayer(2, 1, 2)),
}


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (HEADS | {"a": several(3, STACK), "b": several(2, PAIR), "c": several(1, PAIR)}, "ab"),
        (HEADS | MIXED | {"a": several(1, PAIR)}, "a"),
        (HEADS | MIXED, ["long", "short"]),
        (HEADS | {"other": deep_mlp(4, 2)}, HEADS),
        ({"layers": MIXED["layers"]}, ["layers"]),
    ],
    ids=["several blocks", "one block", "blocks of two types", "linear layers", "layers of types"],
)
def test_default_blocks_are_outermost_lists_of_modules_with_same_type(parts, expected):
    model = nn.ModuleDict(parts | {"again": next(iter(parts.values()))})
    names = [f"{name}.{i}" for name in expected for i in range(len(parts[name]))]
    assert names_of(model, None) == names


def test_default_blocks_include_modules_of_nested_lists():
    assert names_of(nn.Sequential(*several(2, STACK)), None) == ["0", "1"]
    lists = nn.ModuleList([several(2, STACK), several(2, STACK)])
    assert names_of(lists, None) == ["0.0", "0.1", "1.0", "1.1"]


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: nn.Sequential(nn.Tanh(), nn.Sequential(nn.Tanh()), deep_mlp(1, 2)), "'1', '2'"),
        (lambda: nn.ModuleDict({"net": nn.Sequential(nn.Sequential(nn.Tanh()))}), "'net.0.0'"),
        (lambda: nn.ModuleDict({"a": nn.ReLU(), "b": nn.Tanh()}), "'a', 'b'"),
        (lambda: nn.Linear(3, 3), "contains no other modules"),
    ],
)
def test_model_without_module_list_is_rejected_with_suggested_block_names(make, names):
    with pytest.raises(
        ValueError, match=rf"got None, and the model has no nn.ModuleList .*{names}"
    ):
        checkpoint_blocks(make(), None)


def test_checkpointing_block_twice_raises_and_restores_forward_methods():
    model = decoder()
    with pytest.raises(ValueError, match=r"layers\.0"), checkpoint_blocks(model, "layers.[01]"):
        checkpoint_blocks(model, "layers.2").remove()
        checkpoint_blocks(model)
    assert not any("forward" in vars(layer) for layer in model.layers)


@pytest.mark.parametrize(
    ("bias", "policy", "suggested"),
    [
        (True, [aten.mm.default], "aten.addmm.default"),
        (False, [aten.addmm.default], "aten.mm.default"),
        (False, [aten.addmm.default, aten.mm.default], None),
        (True, [aten._softmax.default], None),  # only one of the two blocks runs softmax
        (True, [], None),  # nothing shall be kept
    ],
)
def test_policy_list_warns_once_if_no_block_runs_its_operators(bias, policy, suggested):
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(6, 6, bias), last) for last in (nn.Tanh(), nn.Softmax(-1)))
    )
    with (
        warnings.catch_warnings(record=True) as caught,
        checkpoint_blocks(model, "*", policy=policy),
    ):
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.randn(4, 6)).square().sum().backward()
    assert len(caught) == (suggested is not None)
    assert all(suggested in str(each.message) for each in caught)


@pytest.mark.parametrize(
    "copy_of", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_copy_of_checkpointed_model_is_independent_and_not_checkpointed(copy_of):
    model = decoder()
    handle = checkpoint_blocks(model, policy=[aten.addmm.default])
    copied = copy_of(model)
    plain, plain_peak = results_and_peak(decoder())
    found, peak = results_and_peak(copied)
    assert_close(found, plain, rtol=0, atol=0)
    assert peak == plain_peak
    nn.init.zeros_(copied.layers[0].norm1.weight)
    assert_close(results_and_peak(model)[0], plain, rtol=0, atol=0)
    assert results_and_peak(copied, checkpoint_blocks)[1] < plain_peak
    handle.remove()
    handle.remove()
    assert results_and_peak(model)[1] == plain_peak


def test_checkpointed_model_is_freed_with_its_last_reference():
    with no_gc():
        model = decoder()
        checkpoint_blocks(model)
        model.loss(TOKENS).backward()
        ref = weakref.ref(model.layers[0])
        del model
        assert ref() is None


def test_forward_patched_before_or_after_checkpointing_is_still_called():
    calls, model = [], decoder()

    def patch_forward(module, name):  # as accelerate does
        forward = module.forward
        module.forward = lambda *args: calls.append(name) or forward(*args)

    patch_forward(model.layers[0], "before")
    handle = checkpoint_blocks(model)
    patch_forward(model.layers[1], "after")
    plain, plain_peak = results_and_peak(decoder())
    assert_close(results_and_peak(model)[0], plain, rtol=0, atol=0)
    assert Counter(calls) == {"before": 2, "after": 1}
    handle.remove()
    assert results_and_peak(model)[1] == plain_peak
    assert Counter(calls) == {"before": 3, "after": 2}


# ---- policies


@pytest.mark.parametrize("value", [True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE])
def test_policy_function_saves_selected_outputs_with_identical_gradients(value):
    model, kept = decoder(), []

    def policy(context, operator, *args, **kwargs):
        keep = operator is aten.addmm.default
        kept.append(keep and not context.is_recompute)
        return value if keep else CheckpointPolicy.PREFER_RECOMPUTE

    plain, _ = results_and_peak(model)
    found, _ = results_and_peak(model, partial(checkpoint_blocks, policy=policy))
    assert_close(found, plain, rtol=0, atol=0)
    linears = [module for module in model.layers.modules() if isinstance(module, nn.Linear)]
    assert kept.count(True) == len(linears)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "must be a CheckpointPolicy or a bool, got None"),
        (1, "must be a CheckpointPolicy or a bool, got 1"),
        ("MUST_CPU_OFFLOAD", "that saves or recomputes, got MUST_CPU_OFFLOAD"),
    ],
)
def test_invalid_return_value_of_a_policy_is_rejected(value, message):
    if isinstance(value, str):
        if value not in CheckpointPolicy.__members__:
            pytest.skip("this version of torch has no such policy")
        value = CheckpointPolicy[value]
    model = decoder()
    checkpoint_blocks(model, policy=lambda *args, **kwargs: value)
    with pytest.raises((TypeError, ValueError), match=message):
        model.loss(TOKENS)


def test_policy_that_saves_rrelu_noise_is_rejected():
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.RReLU(), nn.Tanh()))
    checkpoint_blocks(model, "*", policy=[aten.rrelu_with_noise.default])
    with pytest.raises(ValueError, match="PREFER_RECOMPUTE or False, got MUST_SAVE"):
        model(torch.randn(4, 6))


def test_comparison_raises_if_saved_dropout_precedes_recomputed_dropout():
    """PyTorch draws other numbers in the recomputation after a random operator that is skipped."""

    class Block(nn.Module):
        def forward(self, x):
            kept = torch.native_dropout(x, 0.5, True)[0].sin()
            return torch.native_dropout(kept, 0.4, True)[0].exp()

    def policy(context, operator, *args, **kwargs):
        return operator is aten.native_dropout.default and args[1] == 0.5

    model, x = nn.ModuleList([Block()]), torch.linspace(-2, 2, 96).requires_grad_()
    with checkpoint_blocks(model, "0", policy=policy):
        output = model[0](x).sum()
        with pytest.raises(RuntimeError, match="recomputation of 0 differs"):
            output.backward()


def test_handle_check_raises_until_block_runs_with_gradients_enabled():
    model, x = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Tanh())), torch.ones(2, 3)
    handle = checkpoint_blocks(model, "0")
    with torch.no_grad():
        model(x)
    with pytest.raises(ValueError, match=r"blocks \('0'\) was called with gradients enabled"):
        handle.check()
    model(x)
    handle.check()


# ---- torch.func


def test_checkpointed_blocks_warn_and_run_normally_inside_torch_func():
    model, runs = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Tanh())), []
    model[0][0].register_forward_hook(lambda *_: runs.append(1))
    gradient = torch.func.vmap(torch.func.grad(lambda x: model(x).sum()))
    x = torch.linspace(-1, 1, 6).view(2, 3)
    expected = gradient(x)
    checkpoint_blocks(model, "0")
    with pytest.warns(UserWarning, match="0 runs without a checkpoint inside a transform"):
        found = gradient(x)
    assert torch.equal(found, expected) and len(runs) == 2
