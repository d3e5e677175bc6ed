"""`readable.checkpoint`: gradients against plain autograd, bytes against PyTorch's checkpoint."""

import weakref
from collections import Counter, namedtuple
from contextlib import nullcontext, suppress
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.testing import assert_close
from torch.utils import checkpoint as pytorch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import CheckpointError
from training_steps import no_gc

from course_lib.checkpoint import readable
from course_lib.checkpoint.readable import checkpoint
from course_lib.memory import MemoryMeter, symbolic
from course_lib.models import DecoderLayer

aten = torch.ops.aten
PRODUCTS = [aten.mm.default, aten.addmm.default, aten.bmm.default]
both_modes = pytest.mark.parametrize(
    "use_reentrant", [True, False], ids=["reentrant", "nonreentrant"]
)
both_stops = pytest.mark.parametrize("early_stop", [True, False])


@pytest.fixture(autouse=True)
def no_mode_or_hook_left():
    """Assert that the test leaves no mode, hook or autocast behind."""
    yield
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
    assert not _get_current_dispatch_mode_stack()
    assert not _get_current_function_mode_stack()
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


class OperatorCounter(TorchDispatchMode):
    """Mode that counts operators."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def call(function, *args, **kwargs):
    return function(*args, **kwargs)


def in_turn(first, second):
    """Return a function that calls `first` in its first run and `second` in its next run."""
    functions = iter([first, second])
    return lambda x: next(functions)(x)


def sin_exp(x):
    return x.sin().exp()


# ---- gradients


PARAMETER = nn.Parameter(torch.linspace(-1, 1, 4, dtype=torch.float64))


def mixed_operators(x, y):
    """Compute with no_grad, random numbers, a parameter, in-place operators and views."""
    with torch.no_grad():
        scale = x.norm() + y.exp().sum()
    z = x * y + F.dropout(y, 0.3) * PARAMETER
    z.mul_(2)
    z = z.sigmoid_() * torch.rand_like(x)
    y = z.view(2, 2) @ y.view(2, 2).mT
    return y.reshape(4)[1:] / scale, 3, "text", None, (x.detach() * z).sin()


def gradients(run, x, y):
    """Return outputs, gradients and the next random numbers of a step."""
    leaves = [t for t in (x, y, PARAMETER) if t.requires_grad]
    for t in leaves:
        t.grad = None
    torch.manual_seed(7)
    first, *values, last = run(mixed_operators, x * 1, y)
    assert values == [3, "text", None]
    (first.square().sum() + last.square().sum()).backward()
    return first.detach(), last.detach(), [t.grad for t in leaves], torch.rand(3)


@pytest.mark.parametrize(
    "options",
    [{"use_reentrant": True}, {}, {"early_stop": False}, {"keep": PRODUCTS}],
    ids=["reentrant", "nonreentrant", "no_early_stop", "selective"],
)
def test_checkpoint_gradients_and_random_numbers_equal_autograd_and_pytorch(options):
    x = leaf(4)
    for y in (leaf(4), x, leaf(4).detach()):
        plain = gradients(call, x, y)
        mode = {"use_reentrant": options.get("use_reentrant", False)}
        for run in (partial(checkpoint, **options), partial(pytorch.checkpoint, **mode)):
            assert_close(gradients(run, x, y), plain, rtol=0, atol=0)


@both_stops
def test_second_derivatives_through_nested_checkpoints_equal_autograd(early_stop):
    run_one = partial(checkpoint, early_stop=early_stop)

    def scaled(x, scale=1.0):
        return sin_exp(x * scale).cos()

    def stacked(run, x, w):
        inner = run(lambda x: run(scaled, run(sin_exp, x), scale=w), x)
        return run(scaled, inner)

    def derivatives(function):
        first = torch.autograd.grad(function(x, w).sum(), (x, w), create_graph=True)
        return [*first, *torch.autograd.grad(sum(t.square().sum() for t in first), (x, w))]

    x, w = leaf(3), leaf(3)
    nested = partial(stacked, run_one)
    for function in (nested, partial(run_one, nested)):
        assert_close(derivatives(function), derivatives(partial(stacked, call)), rtol=0, atol=0)


@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_nested_reentrant_and_nonreentrant_checkpoints_have_exact_gradients(outer, inner):
    def run(x):
        return checkpoint(lambda x: (x.sin() * x).exp(), x * 2, use_reentrant=inner).cos()

    x = leaf(3)
    checkpoint(run, x, use_reentrant=outer).sum().backward()
    (expected,) = torch.autograd.grad((2 * x * (2 * x).sin()).exp().cos().sum(), x)
    assert_close(x.grad, expected, rtol=0, atol=0)


@both_stops
def test_autograd_grad_inside_checkpointed_function_gives_exact_gradients(early_stop):
    def function(x):
        y = x.sin()
        z = y.cos()
        (gradient,) = torch.autograd.grad(z.sum(), x, retain_graph=True)
        return x.cos() * gradient.detach(), z

    x = leaf(3)
    found = torch.autograd.grad(checkpoint(function, x, early_stop=early_stop)[0].sum(), x)
    assert_close(found, torch.autograd.grad(function(x)[0].sum(), x), rtol=0, atol=0)


def test_retained_graph_is_recomputed_in_each_backward_pass():
    runs, x = [], leaf(3)

    def function(x):
        runs.append(1)
        return x.sin().exp()

    out = checkpoint(function, x, keep=[aten.sin.default]).sum()
    for _ in range(3):
        (found,) = torch.autograd.grad(out, x, retain_graph=True)
        assert_close(found, torch.autograd.grad(sin_exp(x).sum(), x)[0], rtol=0, atol=0)
    assert len(runs) == 1 + 3


# ---- arguments

Named = namedtuple("Named", "x y")
CALLS = {  # place of the tensor -> function that returns (args, kwargs)
    "argument": lambda x: ((x,), {}),
    "tuple": lambda x: (((1, x),), {}),
    "named_tuple": lambda x: ((Named(x, 1),), {}),
    "dict_in_a_list": lambda x: (([{"x": x}],), {}),
    "keyword": lambda x: ((), {"x": x}),
    "tuple_in_a_keyword": lambda x: ((), {"pair": (x, "text")}),
}


def sine_of_tensors(*args, **kwargs):
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    return sum((x.sin().exp() for x in leaves if isinstance(x, torch.Tensor)), torch.zeros(3))


@pytest.mark.parametrize("place", CALLS)
def test_tensors_in_container_and_keyword_arguments_get_gradients(place):
    types, x = [], leaf(3)

    def function(*args, **kwargs):
        types.append([type(value) for value in (*args, *kwargs.values())])
        return sine_of_tensors(*args, **kwargs)

    args, kwargs = CALLS[place](x)
    found = torch.autograd.grad(checkpoint(function, *args, **kwargs).sum(), x)
    assert_close(found, torch.autograd.grad(x.sin().exp().sum(), x), rtol=0, atol=0)
    assert types[0] == types[1]


def test_list_argument_extended_by_function_is_not_extended_in_recomputation():
    def collecting(x, values):
        values.append(x.square())
        return (x * len(values)).exp()

    x, values = leaf(3), [torch.ones(3)]
    checkpoint(collecting, x, values).sum().backward()
    assert len(values) == 2
    assert_close(x.grad, 2 * (2 * x).exp())


@pytest.mark.parametrize("when", ["inside", "after"])
@pytest.mark.parametrize(
    ("use_reentrant", "place"), [(True, "argument"), *((False, place) for place in CALLS)]
)
def test_input_changed_in_place_before_recomputation_raises(use_reentrant, place, when):
    def function(first, *args, **kwargs):
        if when == "inside":
            x.mul_(2)
        return first.sin() * sine_of_tensors(*args, **kwargs)

    x, first = leaf(3) * 1, leaf(3)
    args, kwargs = CALLS[place](x)
    with pytest.raises(RuntimeError, match=r"inplace operation|in place"):
        out = checkpoint(function, first, *args, use_reentrant=use_reentrant, **kwargs)
        if when == "after":
            x.mul_(2)
        out.sum().backward()


def test_checkpointed_function_runs_once_under_no_grad():
    runs, x = [], leaf(3)
    with torch.no_grad():
        out = checkpoint(lambda x: runs.append(1) or x.sin(), x)
    assert len(runs) == 1 and not out.requires_grad


@pytest.mark.parametrize("options", [{"scale": 2.0}, {"keep": PRODUCTS}])
def test_reentrant_mode_rejects_keep_and_keyword_arguments(options):
    with pytest.raises(ValueError, match="with `keep` or with keyword arguments"):
        checkpoint(call, torch.sin, leaf(3), use_reentrant=True, **options)


def test_reentrant_mode_rejects_autograd_grad():
    x = leaf(3)
    out = checkpoint(torch.sin, x, use_reentrant=True).sum()
    with pytest.raises(RuntimeError, match="use_reentrant must be False"):
        torch.autograd.grad(out, x)


# ---- random numbers and autocast


@both_modes
@pytest.mark.parametrize("preserved", [True, False])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_dropout_masks_are_equal_if_random_state_is_preserved(device, preserved, use_reentrant):
    random_state = {"cpu": torch.get_rng_state, "cuda": torch.cuda.get_rng_state}[device]
    masks, x = [], torch.ones(1000, requires_grad=True, device=device)

    def function(x):
        y = F.dropout(x, 0.5)
        masks.append(y.detach() != 0)
        return y.sin() * torch.rand(1000, device=device) * F.dropout(x, 0.5)

    out = checkpoint(function, x, use_reentrant=use_reentrant, preserve_rng_state=preserved)
    torch.rand(17, device=device)  # the state changes between the two runs
    state = random_state()
    out.sum().backward()
    assert len(masks) == 2
    assert torch.equal(*masks) == torch.equal(random_state(), state) == preserved


def autocast_state():
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    )


@both_modes
@pytest.mark.parametrize("enabled, cached", [(True, True), (True, False), (False, True)])
def test_recomputation_uses_autocast_settings_of_forward_pass(use_reentrant, enabled, cached):
    states, x = [], torch.randn(4, 4, requires_grad=True)

    def function(x):
        states.append(autocast_state())
        return (x @ x).sin()

    with torch.autocast("cpu", torch.bfloat16, enabled, cached):
        out = checkpoint(function, x, use_reentrant=use_reentrant)
    with torch.autocast("cpu", torch.float16, not enabled, not cached):
        before = autocast_state()
        out.float().sum().backward()
        assert autocast_state() == before
    assert states == [(enabled, torch.bfloat16, cached)] * 2


@pytest.mark.parametrize("used_before", [True, False])
@pytest.mark.parametrize(
    "keep", [PRODUCTS, [aten._to_copy.default], lambda operator, *args, **kwargs: True]
)
def test_saving_selected_outputs_under_autocast_does_not_change_gradients(keep, used_before):
    layer, x = nn.Linear(4, 4), torch.randn(3, 4)

    def step(run):
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x) if used_before else x  # autocast caches the cast of the weight
            out = run(lambda y: layer(layer(y).float().sin()).exp(), y)
        out.float().sum().backward()
        return [p.grad for p in layer.parameters()]

    assert_close(step(partial(checkpoint, keep=keep)), step(call), rtol=0, atol=0)


# ---- early stop, differences between the runs


@pytest.mark.parametrize(("options", "count"), [({}, 1), ({"early_stop": False}, 2)])
def test_recomputation_stops_early_after_last_needed_tensor(options, count):
    with OperatorCounter() as operators:
        checkpoint(lambda x: x.sin().floor(), leaf(3), **options).sum().backward()
    assert operators.counts[aten.floor.default] == count


@both_modes
@pytest.mark.parametrize("failing_run", [1, 2])
def test_error_inside_checkpointed_function_restores_random_state(use_reentrant, failing_run):
    calls, x = [], leaf(3)

    def function(x):
        calls.append(1)
        y = F.dropout(x, 0.5).exp()
        if len(calls) == failing_run:
            raise KeyError("own error")
        return y.sin().cos()

    with pytest.raises(KeyError, match="own error"), torch.autocast("cpu"):
        out = checkpoint(function, x, use_reentrant=use_reentrant).sum()
        state = torch.get_rng_state()
        out.backward()
    assert failing_run == 1 or torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "second", [torch.sin, lambda x: x[:1].sin().exp(), lambda x: x.float().sin().exp()]
)
def test_recomputation_that_saves_different_tensors_raises_error(second):
    out = checkpoint(in_turn(sin_exp, second), leaf(3), early_stop=False)
    with pytest.raises(CheckpointError, match="save the same tensors in the forward pass"):
        out.sum().backward()


# ---- memory


@pytest.mark.parametrize("options", [{"use_reentrant": True}, {}, {"keep": [aten.exp.default]}])
def test_checkpoint_stores_only_inputs_and_frees_them_with_graph(options):
    storages = []

    def function(x, y):
        z = F.dropout(x * y, 0.5).exp()
        storages.append(weakref.ref(z.untyped_storage()))
        return checkpoint(lambda z: z.sin(), z).cos().exp()  # exp saves its own output

    with no_gc():
        for backward in (False, True):
            x, y = leaf(3), leaf(3)
            refs = [weakref.ref(x), weakref.ref(y)]
            out = checkpoint(function, x, y, **options)
            refs += [weakref.ref(out)]
            assert (storages[-1]() is None) == ("keep" not in options)
            if backward:
                out.sum().backward(retain_graph="use_reentrant" not in options)
            del out, x, y
            assert [ref() for ref in refs + storages] == [None] * len(refs + storages)
        assert len(storages) == 3


def test_recomputation_frees_tensors_that_backward_does_not_need():
    storages = []

    def function(x):
        other = (x * 2).exp()
        storages.append(weakref.ref(other.untyped_storage()))
        return x.sin().cos(), other

    with no_gc():
        out, other = checkpoint(function, leaf(3))
        del other
        out.sum().backward(retain_graph=True)
        assert [ref() for ref in storages] == [None, None]


def test_error_in_backward_pass_leaves_no_reference_cycle():
    with no_gc():
        x = leaf(3)
        ref = weakref.ref(x)
        with suppress(CheckpointError):
            checkpoint(in_turn(sin_exp, torch.sin), x).sum().backward()
        del x
        assert ref() is None


def loss_of(layers, x, module, kind):
    """Return the loss of layers that each run under a checkpoint of the module."""
    options = {"use_reentrant": kind == "reentrant"}
    if kind == "selective":
        contexts = partial(pytorch.create_selective_checkpoint_contexts, PRODUCTS)
        options |= {"keep": PRODUCTS} if module is readable else {"context_fn": contexts}
    for layer in layers:
        x = module.checkpoint(layer, x, **options)
    return x.square().mean()


@pytest.mark.parametrize("context", [nullcontext, symbolic])
@pytest.mark.parametrize("kind", ["reentrant", "nonreentrant", "selective"])
def test_checkpoint_peak_bytes_equal_pytorch_checkpoint(kind, context):
    def peak_and_live_bytes(module):
        torch.manual_seed(0)
        layers = [DecoderLayer(32, 4, dropout=0.1, seed=2 * i) for i in range(3)]
        model, x = nn.Sequential(*layers), torch.randn(2, 16, 32, requires_grad=True)
        with MemoryMeter(model) as meter:
            loss = loss_of(layers, x, module, kind)
            # recomputed tensors are freed as soon as they are used, although the graph stays
            loss.backward(retain_graph=True)
        return meter.peak_bytes, meter.live_bytes

    with context():
        assert peak_and_live_bytes(readable) == peak_and_live_bytes(pytorch)


# ---- selective checkpointing


def matrix_product(x, y):
    return torch.mm(x.cos(), y).sin().sum()


@pytest.mark.parametrize(
    ("keep", "runs"),
    [
        ([aten.mm.default], 3),
        ({aten.mm.default}, 3),
        (lambda operator, *args, **kwargs: operator is aten.mm.default, 3),
        ([], 4),
    ],
)
def test_saved_matrix_products_are_not_recomputed(keep, runs):
    x, y = leaf(4, 4), leaf(4, 4)
    expected = torch.autograd.grad(matrix_product(x, y), (x, y))
    with OperatorCounter() as operators:
        found = torch.autograd.grad(checkpoint(matrix_product, x, y, keep=keep), (x, y))
    assert operators.counts[aten.mm.default] == runs
    assert_close(found, expected, rtol=0, atol=0)


def test_saved_operator_output_changed_in_place_raises():
    def function(x):
        y = x.sin()
        y.view(3, 1).mul_(2)
        return y.cos().exp()

    out = checkpoint(function, leaf(3), keep=[aten.sin.default])
    with pytest.raises(RuntimeError, match="changed in place later"):
        out.sum().backward()


def test_random_operators_are_recomputed_even_if_selected_for_saving():
    def dropouts(x):
        kept = torch.native_dropout(x, 0.5, True)[0]
        return (torch.native_dropout(kept.sin(), 0.4, True)[0] * torch.rand_like(x)).exp()

    def gradient(run):
        torch.manual_seed(0)
        x = torch.linspace(-2, 2, 96).requires_grad_()
        return torch.autograd.grad(run(dropouts, x).sum(), x)[0]

    keep = [aten.native_dropout.default, aten.sin.default]
    assert torch.equal(gradient(partial(checkpoint, keep=keep)), gradient(call))
