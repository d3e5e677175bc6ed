"""Checkpointing against plain autograd, against `torch.utils.checkpoint`, and against the meter."""

import copy
import gc
import inspect
import pickle
import warnings
import weakref
from collections import Counter, namedtuple
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.utils.checkpoint as reference
from torch import distributed as dist
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import _get_current_function_mode_stack
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import course_lib.checkpoint as ours
from course_lib._torch import map_tensors, tensors_in
from course_lib.budget import Recipe, build, train_step
from course_lib.checkpoint import (
    CheckpointError,
    CheckpointPolicy,
    checkpoint,
    checkpoint_blocks,
    checkpoint_sequential,
    checkpointed_loss,
    create_selective_checkpoint_contexts,
    set_checkpoint_debug_enabled,
    set_checkpoint_early_stop,
)
from course_lib.memory import MemoryMeter, symbolic
from course_lib.models import Decoder, DecoderLayer, deep_mlp, random_tokens

aten = torch.ops.aten
both_modes = pytest.mark.parametrize(
    "use_reentrant", [True, False], ids=["reentrant", "not reentrant"]
)
both_stops = pytest.mark.parametrize("early_stop", [True, False])
not_reentrant = partial(checkpoint, use_reentrant=False)


@pytest.fixture(autouse=True)
def clean_start_and_clean_end():
    """The same random numbers for each test; and none may leave a mode, a hook or an autocast
    behind."""
    torch.manual_seed(0)
    yield
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
    assert not _get_current_dispatch_mode_stack()
    assert not _get_current_function_mode_stack()
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert ours.nonreentrant.overrides == {"early_stop": None, "debug": None}


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@contextmanager
def no_gc():
    """Inside the block only reference counts free."""
    not_reentrant(torch.sin, leaf(1))  # the first call loads the compiler, and that leaves a cycle
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Operators(TorchDispatchMode):
    """Counts operators."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


class Cube(torch.autograd.Function):
    """x**3, with what it needs saved by hand: an input, and an intermediate."""

    @staticmethod
    def forward(ctx, x):
        square = x * x
        ctx.save_for_backward(x, square)
        return square * x

    @staticmethod
    def backward(ctx, grad):
        _x, square = ctx.saved_tensors
        return 3 * square * grad


# ---- the same outputs and gradients as plain autograd and as PyTorch's own checkpoint

PARAMETER = torch.nn.Parameter(
    torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
)


def same_tensor_twice(x, y):
    return (x * y).exp()


def nested_outputs(x, y):
    z = (x * y).tanh()
    return z, 3, "text", None, z.sin()


def detached_inside(x, y):
    return (x * y.detach()).sin() * x.detach().cos()


def parameter_inside(x, y):
    return (x * PARAMETER).sin() + y * PARAMETER


def in_place_on_its_own(x, y):
    z = x * y
    z.mul_(2)
    return z.sigmoid_().sin()


def views(x, y):
    return (x.view(2, 2) @ y.view(2, 2).mT).reshape(4)[1:].sin()


def drops(x, y):
    return F.dropout(x * y, 0.5).sin() + torch.rand_like(x) * x + F.dropout(y, 0.3).exp()


def custom_function(x, y):
    return Cube.apply(x * y).sin()


def no_gradient_inside(x, y):
    with torch.no_grad():
        scale = x.norm() + y.exp().sum()
    return (x * y).sin() / scale


CASES = [
    same_tensor_twice,
    nested_outputs,
    detached_inside,
    parameter_inside,
    in_place_on_its_own,
    views,
    drops,
    custom_function,
    no_gradient_inside,
]


def gradients(function, x, y, run):
    """Outputs, gradients and the next random number after a forward and a backward pass from the
    same seed."""
    leaves = [t for t in (x, y, PARAMETER) if t.requires_grad]
    for t in leaves:
        t.grad = None
    torch.manual_seed(7)
    out = run(function, x * 1, y)
    tensors = [
        t for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, torch.Tensor)
    ]
    sum((t * t).sum() for t in tensors).backward()
    return [t.detach() for t in tensors], [t.grad for t in leaves], torch.rand(3)


@both_modes
@pytest.mark.parametrize("function", CASES)
def test_outputs_gradients_and_random_numbers_are_those_of_autograd_and_of_pytorch(
    function, use_reentrant
):
    x, options = leaf(4), {"use_reentrant": use_reentrant}
    for y in (leaf(4), x, leaf(4).detach()):
        plain = gradients(function, x, y, lambda f, *args: f(*args))
        found = gradients(function, x, y, partial(checkpoint, **options))
        theirs = gradients(function, x, y, partial(reference.checkpoint, **options))
        assert_close(found, plain, rtol=0, atol=0)
        assert_close(found, theirs, rtol=0, atol=0)


@both_modes
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_any_splitting_of_any_stack_gives_the_plain_gradients(depth, use_reentrant):
    model, x = deep_mlp(depth, 3).double(), leaf(2, 3)
    expected = torch.autograd.grad(model(x).sum(), (x, *model.parameters()))
    for segments in range(1, len(model) + 1):
        x.grad = None
        model.zero_grad()
        checkpoint_sequential(
            list(model), segments, x, use_reentrant=use_reentrant
        ).sum().backward()
        assert_close(
            [x.grad, *(p.grad for p in model.parameters())], list(expected), rtol=0, atol=0
        )


def test_left_out_use_reentrant_means_false_and_warns_as_pytorch_does():
    x = leaf(3)
    with pytest.warns(
        UserWarning, match="the use_reentrant parameter should be passed explicitly"
    ) as caught:
        out = checkpoint(torch.sin, x)
    assert caught[0].filename == __file__
    assert torch.autograd.grad(out.sum(), x)  # which the reentrant mode cannot
    with pytest.warns(
        UserWarning, match=r"checkpoint_sequential: the use_reentrant parameter should"
    ) as caught:
        out = checkpoint_sequential([torch.sin, torch.cos], 2, x)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint(torch.sin, x, use_reentrant=False)


FROM_TORCH_2_14 = {"preserve_rng_state", "respect_saved_tensors_hooks"}
newest = pytest.mark.skipif(
    "preserve_rng_state" not in inspect.signature(reference.checkpoint).parameters,
    reason="torch.utils.checkpoint has no such arguments before torch 2.14",
)


def test_public_names_arguments_and_defaults_are_pytorchs():
    assert set(reference.__all__) < set(ours.__all__)
    for name in (
        "checkpoint",
        "checkpoint_sequential",
        "create_selective_checkpoint_contexts",
        "set_device_states",
    ):
        mine, theirs = (inspect.signature(getattr(m, name)).parameters for m in (ours, reference))
        more = [p for p in mine if p not in theirs]
        assert set(more) <= (FROM_TORCH_2_14 if name == "checkpoint" else set())
        assert [p for p in mine if p not in more] == list(theirs)
        assert all(mine[p].kind is inspect.Parameter.KEYWORD_ONLY for p in more)
        for p, q in ((mine[p], q) for p, q in theirs.items()):
            assert p.kind == q.kind
            # from torch 2.14 on the function may be left out
            assert p.default == q.default or callable(p.default) or p.name == "function"
    assert {p.name: p.value for p in reference.CheckpointPolicy}.items() <= {
        p.name: p.value for p in CheckpointPolicy
    }.items()


BOTH = [pytest.param(ours, id="ours"), pytest.param(reference, id="pytorchs", marks=newest)]


@pytest.mark.parametrize("module", BOTH)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_without_a_function_it_is_a_decorator_of_functions_modules_and_methods(
    module, use_reentrant
):
    decorated = module.checkpoint(use_reentrant=use_reentrant, preserve_rng_state=False)
    layer, runs = nn.Linear(3, 3).double(), []

    class Block:
        @decorated
        def __call__(self, x):
            runs.append(self)
            return layer(x).sin()

    x = leaf(3)
    expected = torch.autograd.grad(layer(x).sin().sum(), x)[0]
    for function in (Block(), lambda x: decorated(layer)(x).sin()):
        x.grad = None
        function(x).sum().backward()
        assert torch.equal(x.grad, expected)
    assert decorated(sin_exp).__name__ == "sin_exp"
    assert len(runs) == 2  # the second time for backward


@pytest.mark.parametrize("module", BOTH)
def test_a_decorated_function_has_its_own_arguments_whatever_they_are_called(module):
    @module.checkpoint(use_reentrant=False)
    def scaled(x, debug):
        return debug * x.sin()

    assert torch.equal(scaled(torch.ones(3), debug=2.0), 2.0 * torch.ones(3).sin())
    with pytest.raises(ValueError, match=r"^Unexpected keyword arguments: scale$"):
        module.checkpoint(use_reentrant=False, scale=1)


# ---- random numbers, autocast, devices


@both_modes
@pytest.mark.parametrize("preserved", [True, False])
def test_dropout_masks_are_equal_in_forward_pass_and_recomputation_unless_told(
    use_reentrant, preserved
):
    masks, x = [], torch.ones(1000, requires_grad=True)

    def function(x):
        y = F.dropout(x, 0.5)
        masks.append(y.detach() != 0)
        return y.sin() * torch.rand(1000)

    out = checkpoint(function, x, use_reentrant=use_reentrant, preserve_rng_state=preserved)
    torch.rand(17)  # others draw numbers between the two runs
    state = torch.get_rng_state()
    out.sum().backward()
    assert len(masks) == 2
    assert torch.equal(*masks) == torch.equal(torch.get_rng_state(), state) == preserved


class GroupedAttention(nn.Module):
    """Attention of 4 heads; each pair of them shares its keys and values."""

    def __init__(self):
        super().__init__()
        self.queries, self.shared = nn.Linear(64, 64), nn.Linear(64, 32)

    def forward(self, x):
        q, kv = (
            part(x).unflatten(-1, (-1, 16)).transpose(1, 2) for part in (self.queries, self.shared)
        )
        o = F.scaled_dot_product_attention(q, kv, kv, is_causal=True, enable_gqa=True)
        return x + o.transpose(1, 2).flatten(2)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("checkpoint", ["layers", "selective"])
def test_blocks_whose_attention_saves_an_unset_seed_are_recomputed_on_a_gpu(precision, checkpoint):
    def weights(**fields):
        # other values in the memory that the kernels leave as it is
        torch.randint(1 << 40, (1 << 16,), device="cuda")
        torch.manual_seed(0)
        recipe = Recipe(precision=precision, optimizer="sgd", **fields)
        model, optimizer = build(
            lambda: nn.Sequential(*(GroupedAttention() for _ in range(3))).cuda(), recipe
        )
        for batch in torch.randn(2, 2, 128, 64, device="cuda", dtype=recipe.dtype):
            train_step(model, optimizer, batch, recipe, loss_sum=squares)
        return list(model.parameters())

    def squares(model, x):
        return model(x).square().sum(), x.numel()

    assert_close(weights(checkpoint=checkpoint), weights())


@pytest.mark.gpu
@both_modes
@pytest.mark.parametrize("argument_on", ["cuda", "cpu"])
def test_dropout_masks_on_cuda_are_equal_wherever_the_argument_is(use_reentrant, argument_on):
    torch.cuda.init()
    masks, x = [], torch.ones(1000, requires_grad=True, device=argument_on)

    def function(x):
        y = F.dropout(x.to("cuda"), 0.5)
        masks.append(y.detach() != 0)
        return y.sin() * torch.rand(1000, device="cuda") * F.dropout(x, 0.5).to("cuda")

    out = checkpoint(function, x, use_reentrant=use_reentrant)
    torch.rand(17, device="cuda")
    before = torch.cuda.get_rng_state()
    out.sum().backward()
    assert torch.equal(*masks)
    assert torch.equal(torch.cuda.get_rng_state(), before)


def _autocast_seen(device):
    return (
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
        torch.is_autocast_cache_enabled(),
    )


@both_modes
@pytest.mark.parametrize("enabled, cached", [(True, True), (True, False), (False, True)])
def test_autocast_in_the_recomputation_is_that_of_the_forward_pass(use_reentrant, enabled, cached):
    seen, x = [], torch.randn(4, 4, requires_grad=True)

    def function(x):
        seen.append(_autocast_seen("cpu"))
        return (x @ x).sin()

    with torch.autocast("cpu", enabled=enabled, dtype=torch.bfloat16, cache_enabled=cached):
        out = checkpoint(function, x, use_reentrant=use_reentrant)
    assert out.dtype is (torch.bfloat16 if enabled else torch.float32)
    with torch.autocast("cpu", enabled=not enabled, dtype=torch.float16, cache_enabled=not cached):
        out.float().sum().backward()
        assert _autocast_seen("cpu") == (not enabled, torch.float16, not cached)
    assert seen[0] == seen[1] == (enabled, torch.bfloat16, cached)


@pytest.mark.parametrize("used_before", [True, False])
@pytest.mark.parametrize(
    "policy",
    [
        [aten.addmm.default],
        [aten.addmm.default, aten._to_copy.default],
        lambda *_, **__: CheckpointPolicy.MUST_SAVE,
        lambda *_, **__: CheckpointPolicy.MUST_RECOMPUTE,
    ],
    ids=["products", "products and casts", "all", "none"],
)
def test_selective_checkpoint_shares_weights_with_autocast_cache(policy, used_before):
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)

    def function(x):
        return first(second(first(x).relu())).sin()

    def step(run):
        x = torch.ones(4, 8, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            y = run(first(x) if used_before else x).float().sum() + first(x).float().sum()
        y.backward()  # after autocast has emptied its cache
        found = [x.grad, *(p.grad for module in (first, second) for p in module.parameters())]
        first.zero_grad(), second.zero_grad()
        return found

    contexts = partial(create_selective_checkpoint_contexts, policy)
    selective = step(lambda x: not_reentrant(function, x, context_fn=contexts))
    assert all(map(torch.equal, step(function), selective))


@both_modes
@pytest.mark.parametrize("named", [True, False])
def test_statistics_passed_to_instance_norm_change_once(use_reentrant, named):
    if use_reentrant and named:
        pytest.skip("the reentrant mode passes no keywords on")

    def step(run):
        mean, variance = torch.zeros(3), torch.ones(3)
        x = torch.linspace(-1, 2, 24).view(2, 3, 4).requires_grad_()
        names = "running_mean", "running_var"
        statistics = dict(zip(names, (mean, variance), strict=True))
        y = (
            run(F.instance_norm, x, **statistics)
            if named
            else run(F.instance_norm, x, *statistics.values())
        )
        y.pow(3).sum().backward()
        return x.grad, mean, variance

    plain = step(lambda function, *args, **kwargs: function(*args, **kwargs))
    found = step(partial(checkpoint, use_reentrant=use_reentrant))
    assert all(map(torch.equal, plain, found))
    assert not plain[1].equal(torch.zeros(3))


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("policy", [None, True, False])
def test_noise_that_rrelu_writes_after_saving_it_is_recomputed(policy, last):
    def function(x):
        y = F.rrelu(x * 2, training=True)
        return y if last else y.exp() * y

    def step(run):
        torch.manual_seed(0)
        x = torch.linspace(-2, 2, 96).requires_grad_()
        run(function, x).sum().backward()
        return x.grad

    options = {}
    if policy is not None:
        contexts = partial(create_selective_checkpoint_contexts, lambda *_, **__: policy)
        options = {"context_fn": contexts}
    plain = step(lambda function, x: function(x))
    assert torch.equal(step(partial(not_reentrant, **options)), plain)
    assert len(plain.unique()) > 40  # one slope of its own for each negative value


@both_modes
def test_the_default_device_in_the_recomputation_is_that_of_the_forward_pass(use_reentrant):
    seen, x = [], leaf(3)

    def function(x):
        seen.append(torch.empty(0).device.type)
        return x.sin()

    with torch.device("meta"):
        out = checkpoint(function, x, use_reentrant=use_reentrant)
        with torch.device("cpu"):
            out.sum().backward()
        assert torch.empty(0).device.type == "meta"
    assert seen == ["meta", "meta"]
    assert torch.empty(0).device.type == "cpu"


# ---- ways to go backward


def test_without_reentry_autograd_grad_second_backward_and_retain_graph_work():
    x, runs = leaf(3), []

    def function(x):
        runs.append(1)
        return x.sin().exp()

    out = not_reentrant(function, x).sum()
    first = torch.autograd.grad(out, x, retain_graph=True)
    second = torch.autograd.grad(out, x, retain_graph=True)
    out.backward()
    assert_close(first[0], x.cos() * x.sin().exp())
    assert_close(first, second)
    assert_close(first[0], x.grad)
    assert len(runs) == 4
    with pytest.raises(RuntimeError, match=r"second time|already been freed"):
        out.backward()


def test_a_saved_tensor_is_recomputed_each_time_it_is_looked_at_outside_of_backward_and_not_kept():
    made, runs = [], []

    def function(x):
        runs.append(1)
        for _ in range(4):
            x = x.exp()
            made.append(weakref.ref(x.untyped_storage()))
        return x.sum()

    with no_gc():
        x = leaf(5)
        out = not_reentrant(function, x)
        made.clear()
        for _ in range(2):
            assert_close(out.grad_fn.next_functions[0][0]._saved_result, x.exp().exp().exp().exp())
        assert len(runs) == 3
        assert len(made) == 2 * 3  # the last one stops the recomputation
        assert not any(ref() for ref in made)
    out.backward()
    assert len(runs) == 4


def test_saved_tensors_read_twice_in_one_backward_are_an_error_that_says_so():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            with pytest.raises(CheckpointError, match="already unpacked once"):
                ctx.saved_tensors  # noqa: B018
            return grad * x

    x = leaf(3)
    not_reentrant(lambda x: Twice.apply(x.sin()), x).sum().backward()
    assert_close(x.grad, x.sin() * x.cos())


@both_stops
def test_backward_inside_the_function_works(early_stop):
    def function(x, again):
        y = x.sin()
        z = y.cos()
        (slope,) = torch.autograd.grad(z.sum(), x, retain_graph=again)
        return x.cos() * slope.detach(), z

    for again in (True, False):
        x = leaf(3)
        with set_checkpoint_early_stop(early_stop):
            found = torch.autograd.grad(not_reentrant(function, x, again)[0].sum(), x)
        assert_close(found, torch.autograd.grad(function(x, again)[0].sum(), x))


@both_stops
def test_checkpoints_in_checkpoints_give_the_plain_gradients_to_second_order(early_stop):
    def f(x):
        return x.sin().exp().sin()

    def g(x, scale=1.0):
        return (x * scale).cos().sin().exp()

    def plain(x, w):
        return g(g(f(x), scale=w))

    def nested(x, w):
        # two children, kwargs
        inner = not_reentrant(lambda x: not_reentrant(g, not_reentrant(f, x), scale=w), x)
        return not_reentrant(g, inner)

    def slopes(run):
        first = torch.autograd.grad(run(x, w).sum(), (x, w), create_graph=True)
        return [*first, *torch.autograd.grad(sum(t.square().sum() for t in first), (x, w))]

    x, w = leaf(3), leaf(3)
    with set_checkpoint_early_stop(early_stop):
        assert_close(slopes(nested), slopes(plain))
        assert_close(slopes(partial(not_reentrant, nested)), slopes(plain))


@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_modes_may_be_nested_in_one_another(outer, inner):
    def run(x):
        with warnings.catch_warnings():
            # inside a reentrant forward pass nothing requires gradients
            warnings.simplefilter("ignore")
            return checkpoint(lambda x: (x.sin() * x).exp(), x * 2, use_reentrant=inner).cos()

    x = leaf(3)
    checkpoint(run, x, use_reentrant=outer).sum().backward()
    (expected,) = torch.autograd.grad((2 * x * (2 * x).sin()).exp().cos().sum(), x)
    assert_close(x.grad, expected)


def test_a_nested_checkpoint_keeps_only_the_outermost_input():
    kept = []

    def block(x):
        y = x.exp()
        kept.append(weakref.ref(y.untyped_storage()))
        return not_reentrant(lambda y: y.sin().cos(), y).sin()

    with no_gc():
        out = not_reentrant(block, leaf(4))
        assert kept[0]() is None
    out.sum().backward()


def test_inputs_go_through_the_hooks_of_an_enclosing_save_on_cpu_and_kwargs_as_well():
    packed, x, y = [], leaf(3), leaf(3)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        out = not_reentrant(lambda x, y: (x * y).exp(), x, y=y)
    assert [t.data_ptr() for t in packed] == [x.data_ptr(), y.data_ptr()]
    with save_on_cpu():
        z = x * 1
        z.add_(0)
        outs = [
            not_reentrant(lambda z, y: (z * y).exp(), z, y),
            checkpoint(lambda z, y: (z * y).exp(), z, y, use_reentrant=True),
        ]
    for result in (out, *outs):
        x.grad = None
        result.sum().backward(retain_graph=True)
        assert_close(x.grad, y * (x * y).exp())


@pytest.mark.skipif(not hasattr(ours, "GraphExecGroup"), reason="torch has it from 2.10 on")
def test_under_a_graph_exec_group_two_backward_passes_share_one_recomputation():
    runs, x = [], leaf(3)

    def function(x):
        runs.append(1)
        return x.sin().cos(), x.exp()

    a, b = not_reentrant(function, x)
    with ours.GraphExecGroup():
        a.sum().backward()
        b.sum().backward()
    assert len(runs) == 2
    assert_close(x.grad, -x.sin().sin() * x.cos() + x.exp())


# ---- early stop, errors inside, contexts


def test_recomputation_stops_when_it_has_what_it_needs():
    def clones(runs, **options):
        def function(x):
            y = x.sin().cos()
            runs.append(1)
            return y.clone()

        return checkpoint(function, leaf(3), use_reentrant=False, **options)

    for outer, options, expected in [
        (None, {}, 1),
        (None, {"early_stop": False}, 2),
        (False, {"early_stop": True}, 2),
        (True, {"early_stop": False}, 1),
    ]:
        runs = []
        with set_checkpoint_early_stop(outer) if outer is not None else nullcontext():
            out = clones(runs, **options)
        out.sum().backward()
        assert len(runs) == expected
    with set_checkpoint_early_stop(False), set_checkpoint_early_stop(True):
        out = clones(runs := [])
    out.sum().backward()
    assert len(runs) == 1


@both_modes
@pytest.mark.parametrize("when", ["forward", "recomputation"])
def test_after_an_error_inside_the_function_everything_is_as_it_was(use_reentrant, when):
    calls, x = [], leaf(3)

    def function(x):
        calls.append(1)
        y = F.dropout(x, 0.5).exp()
        if len(calls) == (1 if when == "forward" else 2):
            raise KeyError("mine")
        return y.sin().cos()

    def failing():
        with torch.autocast("cpu"):
            out = checkpoint(function, x, use_reentrant=use_reentrant)
        state = torch.get_rng_state()
        try:
            out.sum().backward()
        finally:
            assert torch.equal(torch.get_rng_state(), state)

    with pytest.raises(KeyError, match="mine"):
        failing()
    assert not torch.is_autocast_enabled("cpu")
    y = x.exp()
    assert y.grad_fn._saved_result.data_ptr() == y.data_ptr()  # no hook is left
    # and it works the next time
    checkpoint(function, x, use_reentrant=use_reentrant).sum().backward()


def test_context_fn_gives_each_run_its_context():
    seen, x = [], leaf(3)

    @contextmanager
    def noted(name):
        seen.append(f"enter {name}")
        yield
        seen.append(f"leave {name}")

    out = not_reentrant(
        lambda x: x.sin().cos(), x, context_fn=lambda: (noted("forward"), noted("recompute"))
    )
    assert seen == ["enter forward", "leave forward"]
    out.sum().backward()
    assert seen[2:] == ["enter recompute", "leave recompute"]
    assert_close(x.grad, -x.sin().sin() * x.cos())
    assert ours.noop_context_fn() is not None


# ---- determinism check


def changing(first, second):
    calls = []

    def function(x):
        calls.append(1)
        return first(x) if len(calls) == 1 else second(x)

    return function


@both_stops
def test_fewer_saved_tensors_in_the_recomputation_are_an_error(early_stop):
    function = changing(lambda x: x.sin().cos().exp(), lambda x: x.sin().cos())
    out = not_reentrant(function, leaf(3), early_stop=early_stop)
    with pytest.raises(
        CheckpointError, match=r"A different number of tensors was saved[^$]*forward: 3[^$]*: 2"
    ):
        out.sum().backward()


def test_more_saved_tensors_in_the_recomputation_are_an_error_where_it_runs_that_far():
    def out(**options):
        return not_reentrant(
            changing(lambda x: x.sin().cos(), lambda x: x.sin().cos().exp()), leaf(3), **options
        ).sum()

    with pytest.raises(CheckpointError, match="trying to save more tensors during recomputation"):
        out(early_stop=False).backward()
    out().backward()  # as in PyTorch, what comes after the last needed tensor is not run


@pytest.mark.parametrize(
    "change, shown",
    [
        (lambda x: x[:2], ["torch.Size([3])", "torch.Size([2])"]),
        (lambda x: x.float(), ["torch.float64", "torch.float32"]),
        (lambda x: x.to("meta"), ["device(type='cpu')", "device(type='meta')"]),
    ],
)
def test_other_metadata_in_the_recomputation_are_shown_beside_the_saved(change, shown):
    function = changing(lambda x: (x * 1).exp(), lambda x: change(x * 1).exp())
    out = not_reentrant(function, leaf(3)).sum()
    with pytest.raises(CheckpointError, match="different metadata") as caught:
        out.backward()
    text = str(caught.value)
    before, after = (
        text[text.index(name) :].splitlines()[0]
        for name in ("saved metadata", "recomputed metadata")
    )
    assert shown[0] in before
    assert shown[1] in after
    assert "tensor at position 0" in text
    assert "debug=True" in text


@pytest.mark.parametrize("how", ["argument", "context"])
def test_debug_lists_the_operators_of_both_runs_with_their_places(how):
    function = changing(lambda x: x.sin().cos().exp(), lambda x: x.sin().tanh())
    with set_checkpoint_debug_enabled(True) if how == "context" else nullcontext():
        out = not_reentrant(function, leaf(3), debug=how == "argument")
    with pytest.raises(CheckpointError, match="you passed `debug=True` to checkpoint") as caught:
        out.sum().backward()
    forward, recomputation = str(caught.value).split("Operations executed during recomputation")
    assert "aten.cos.default(float64[3]) -> float64[3]" in forward
    assert "aten.tanh.default" in recomputation
    assert "aten.cos.default" not in recomputation
    assert __file__ in forward
    assert __file__ in recomputation


def test_other_outputs_in_a_reentrant_recomputation_are_an_error():
    for change, shown in (
        (lambda x: x[:2].exp(), r"Mismatch in shape"),
        (lambda x: (x, x), "1 values[^$]* 2"),
    ):
        out = checkpoint(changing(torch.exp, change), leaf(3), use_reentrant=True).sum()
        with pytest.raises(RuntimeError, match=shown):
            out.backward()


# ---- what the function is given


@dataclass
class Pair:
    x: torch.Tensor
    note: str = "a note"


Named = namedtuple("Named", "x y")
WAYS = {  # how a tensor may get in -> (args, kwargs), and how the function finds it
    "argument": lambda x: ((x,), {}),
    "tuple": lambda x: (((1, x),), {}),
    "named tuple": lambda x: ((Named(x, 1),), {}),
    "dict in a list": lambda x: (([{"x": x}],), {}),
    "dataclass": lambda x: ((Pair(x),), {}),
    "keyword": lambda x: ((), {"x": x}),
    "tuple in a keyword": lambda x: ((), {"pair": (x, "text")}),
    "values and indices": lambda x: ((torch.sort(x),), {}),
}


def sine_of_what_is_inside(*args, **kwargs):
    return sum(
        (x.sin().exp() for x in tensors_in((args, kwargs)) if x.is_floating_point()), torch.zeros(3)
    )


@pytest.mark.parametrize("way", WAYS)
def test_tensors_anywhere_in_the_arguments_get_gradients_in_containers_of_the_same_types(way):
    types, x = [], leaf(3)

    def function(*args, **kwargs):
        types.append([type(value) for value in (*args, *kwargs.values())])
        return sine_of_what_is_inside(*args, **kwargs)

    args, kwargs = WAYS[way](x)
    found = torch.autograd.grad(not_reentrant(function, *args, **kwargs).sum(), x)
    assert_close(found, torch.autograd.grad(x.sin().exp().sum(), x), rtol=0, atol=0)
    assert types[0] == types[1]


def test_nested_arguments_pass_through_the_reentrant_mode_too():
    a, b = leaf(3), leaf(3).detach()
    out, rest = checkpoint(
        lambda a, pair: ((a * pair[0]).exp(), pair[1]), a, (b, "text"), use_reentrant=True
    )
    assert rest == "text"
    out.sum().backward()
    assert_close(a.grad, b * (a * b).exp())


@both_modes
@pytest.mark.parametrize("before", [[], ["text"], [[]]], ids=str)
def test_what_the_function_puts_into_a_list_or_dict_is_there_once_and_not_when_it_runs_again(
    before, use_reentrant
):
    def collecting(x, losses, known):
        losses.append(x.square().sum())
        known["sine"] = known.get("sine", constant).sin()
        return x * known["sine"]

    x, constant, losses, known = leaf(3), torch.ones(3), list(before), {}
    y = checkpoint(collecting, x, losses, known, use_reentrant=use_reentrant)
    y = checkpoint(collecting, y, losses, known, use_reentrant=use_reentrant).sum()
    for _ in range(1 if use_reentrant else 2):
        x.grad = None
        y.backward(retain_graph=not use_reentrant)
        assert_close(x.grad, constant.sin().double() * constant.sin().sin())
    assert len(losses) == len(before) + 2


@pytest.mark.parametrize("when", ["inside", "after"])
@pytest.mark.parametrize(
    "use_reentrant, way",
    [(mode, way) for mode in (True, False) for way in WAYS if not (mode and "keyword" in way)],
)
def test_a_tensor_changed_in_place_is_an_error_that_names_the_function_wherever_it_was(
    use_reentrant, way, when
):
    def doubled_in_place(first, *args, **kwargs):
        for x in tensors_in((args, kwargs) if when == "inside" else ()):
            x.mul_(2)
        return first.sin() * sine_of_what_is_inside(*args, **kwargs)

    x, first = leaf(3) * 1, leaf(3)
    args, kwargs = WAYS[way](x)
    out = checkpoint(doubled_in_place, first, *args, use_reentrant=use_reentrant, **kwargs)
    for tensor in tensors_in((args, kwargs) if when == "after" else ()):
        tensor.mul_(2)
    state = torch.get_rng_state()
    with pytest.raises(
        RuntimeError, match=r"doubled_in_place has been modified by an inplace operation.*clone"
    ):
        out.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)


@both_modes
def test_running_statistics_are_those_of_pytorch_which_advance_twice(use_reentrant):
    def statistics(run):
        norm = nn.BatchNorm1d(4)
        run(norm, torch.linspace(0, 1, 12).view(3, 4).requires_grad_()).sum().backward()
        return norm.running_mean, norm.running_var, norm.num_batches_tracked

    found = statistics(
        partial(
            checkpoint,
            use_reentrant=use_reentrant,
            **({} if use_reentrant else {"early_stop": False}),
        )
    )
    assert found[2] == 2
    assert_close(
        found, statistics(partial(reference.checkpoint, use_reentrant=True)), rtol=0, atol=0
    )


# ---- memory


@both_modes
def test_no_cycle_keeps_anything_alive_once_the_graph_is_gone(use_reentrant):
    kept = []

    def function(x, y):
        z = F.dropout(x * y, 0.5).exp()
        kept.append(weakref.ref(z.untyped_storage()))
        return not_reentrant(lambda z: z.sin(), z).cos().exp()  # exp saves its own output

    with no_gc():
        for backward in (False, True):
            x, y = leaf(3), leaf(3)
            refs = [weakref.ref(x), weakref.ref(y)]
            out = checkpoint(function, x, y, use_reentrant=use_reentrant)
            refs += [weakref.ref(out)]
            if backward:
                out.sum().backward(retain_graph=not use_reentrant)
            del out, x, y
            assert [ref() for ref in refs + kept] == [None] * len(refs + kept)
        assert len(kept) == 3


def test_what_nobody_will_read_any_more_is_not_kept_when_recomputed():
    made = []

    def function(x):
        other = (x * 2).exp()
        made.append(weakref.ref(other.untyped_storage()))
        return x.sin().cos(), other

    with no_gc():
        out, other = not_reentrant(function, leaf(3))
        del other
        out.sum().backward(retain_graph=True)
        assert [ref() for ref in made] == [None, None]


def test_no_cycle_is_left_by_an_error():
    with no_gc():
        x = leaf(3)
        ref = weakref.ref(x)
        out = not_reentrant(changing(lambda x: x.sin().cos(), lambda x: x.sin()), x)
        with suppress(CheckpointError):
            out.sum().backward()
        del out, x
        assert ref() is None


def test_recomputed_tensors_are_freed_as_soon_as_they_are_used():
    alive, storages, x = [], [], leaf(3)

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            alive.append(sum(ref() is not None for ref in storages))
            return grad

    def function(x):
        storages.clear()
        for _ in range(4):
            x = x.exp()
            storages.append(weakref.ref(x.untyped_storage()))
            x = Note.apply(x)
        return x

    with no_gc():
        out = not_reentrant(function, x).sum()
        assert not any(ref() for ref in storages)
        out.backward(retain_graph=True)
    assert alive == [0, 3, 2, 1]  # each exp frees its own
    assert not any(ref() for ref in storages)


def _peak(module, how):
    torch.manual_seed(0)
    layers = [DecoderLayer(32, 4, dropout=0.1, seed=2 * i) for i in range(3)]
    model, x = nn.Sequential(*layers), torch.randn(2, 16, 32, requires_grad=True)
    options = {"use_reentrant": how == "reentrant"}
    if how == "selective":
        products = [aten.mm.default, aten.addmm.default, aten.bmm.default]
        options["context_fn"] = partial(module.create_selective_checkpoint_contexts, products)
    with MemoryMeter(model) as meter:
        y = x
        for layer in layers:
            y = module.checkpoint(layer, y, **options)
        y.square().mean().backward()
    return meter.peak_bytes, meter.live_bytes


@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "selective"])
def test_peak_bytes_equal_those_of_pytorch_to_the_byte(how):
    assert _peak(ours, how) == _peak(reference, how)


@both_modes
def test_a_symbolic_step_peaks_where_the_real_one_does(use_reentrant):
    def peak():
        model, x = deep_mlp(4, 32), torch.randn(8, 32, requires_grad=True)
        with MemoryMeter(model) as meter:
            checkpoint_sequential(model, 2, x, use_reentrant=use_reentrant).sum().backward()
        return meter.peak_bytes

    real = peak()
    with symbolic():
        assert peak() == real


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "selective"])
def test_cuda_allocator_peaks_equal_those_of_pytorch(how):
    def peak(module):
        torch.manual_seed(0)
        layers = [DecoderLayer(128, 4, dropout=0.1, seed=2 * i).cuda() for i in range(3)]
        x = torch.randn(4, 128, 128, requires_grad=True, device="cuda")
        options = {"use_reentrant": how == "reentrant"}
        if how == "selective":
            options["context_fn"] = partial(
                module.create_selective_checkpoint_contexts, [aten.addmm.default]
            )
        for _ in range(2):
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_stats()["requested_bytes.all.current"]
            y = x
            for layer in layers:
                y = module.checkpoint(layer, y, **options)
            y.square().mean().backward()
            del y
        return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before

    assert peak(ours) == peak(reference)


# ---- selective checkpointing


def selective(policy, **options):
    return {
        "context_fn": partial(create_selective_checkpoint_contexts, policy, **options),
        "use_reentrant": False,
    }


def keep(*operators, policy=CheckpointPolicy.MUST_SAVE):
    return lambda context, op, *args, **kwargs: (
        policy if op in operators else CheckpointPolicy.PREFER_RECOMPUTE
    )


def product(x, y):
    return torch.mm(x.cos(), y).sin().sum()


@pytest.mark.parametrize("module", BOTH)
@pytest.mark.parametrize("respected", [True, False])
@pytest.mark.parametrize("nested", [False, True])
def test_what_a_policy_keeps_goes_through_the_hooks_around_it_where_that_is_asked(
    module, respected, nested
):
    """The product, (2, 3), is kept; what goes in is an input of the checkpoint."""

    def pack(tensor):
        packed.append(tuple(tensor.shape))
        return tensor.numpy(force=True)

    def inner(x, y):
        options = {**selective([aten.mm.default]), "respect_saved_tensors_hooks": respected}
        contexts = partial(module.create_selective_checkpoint_contexts, [aten.mm.default])
        return module.checkpoint(product, x, y, **options | {"context_fn": contexts})

    def outer(x, y):
        return module.checkpoint(inner, x, y, use_reentrant=False) if nested else inner(x, y)

    packed, x, y = [], leaf(2, 4), leaf(4, 3)
    expected = torch.autograd.grad(product(x, y), (x, y))
    with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
        out = outer(x, y)
    assert packed.count((2, 3)) == respected
    assert all(map(torch.equal, torch.autograd.grad(out, (x, y)), expected))


def test_hooks_that_hold_what_a_checkpoint_returned_go_with_it():
    class Hooks:
        def pack(self, tensor):
            return tensor

    hooks, x = Hooks(), leaf(3)
    gone = weakref.ref(hooks)
    with no_gc():
        with torch.autograd.graph.saved_tensors_hooks(hooks.pack, torch.clone):
            out = checkpoint(x.sin, use_reentrant=False)  # else the hooks have its input
        hooks.graph = out
        del hooks, out
        assert gone() is None


@pytest.mark.parametrize(
    "policy, products",
    [
        ([aten.mm.default], 3),
        (keep(aten.mm.default), 3),
        (keep(aten.mm.default, policy=CheckpointPolicy.PREFER_SAVE), 3),
        # torch 2.9 has neither
        *(
            (keep(aten.mm.default, policy=CheckpointPolicy[name]), 3)
            for name in ("MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD")
            if name in CheckpointPolicy.__members__
        ),
        (keep(aten.mm.default, policy=reference.CheckpointPolicy.MUST_SAVE), 3),
        (lambda context, op, *args, **kwargs: op is aten.mm.default, 3),
        (keep(aten.mm.default, policy=CheckpointPolicy.MUST_RECOMPUTE), 4),
        (keep(aten.mm.default, policy=CheckpointPolicy.PREFER_RECOMPUTE), 4),
        (lambda context, op, *args, **kwargs: CheckpointPolicy.MUST_SAVE, 3),
    ],
)
def test_a_policy_decides_what_is_computed_again(policy, products):
    x, y = leaf(4, 4), leaf(4, 4)
    with Operators() as operators:
        checkpoint(product, x, y, **selective(policy)).backward()
    assert operators.counts[aten.mm.default] == products
    assert_close((x.grad, y.grad), torch.autograd.grad(product(x, y), (x, y)), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(
    "MUST_CPU_OFFLOAD" not in CheckpointPolicy.__members__, reason="this torch has no such policy"
)
def test_cpu_offload_takes_the_bytes_off_the_gpu_and_brings_them_back():
    def run(policy):
        x = torch.randn(512, 512, device="cuda", requires_grad=True)
        torch.mm(x, x)  # cuBLAS takes its workspace, and keeps it
        with Operators() as operators:
            before = torch.cuda.memory_allocated()
            out = checkpoint(
                lambda x: torch.mm(x, x).sin().sum(),
                x,
                **selective(keep(aten.mm.default, policy=policy)),
            )
            kept = torch.cuda.memory_allocated() - before
            out.backward()
        return kept, operators.counts[aten.mm.default], x

    saved, products, x = run(CheckpointPolicy.MUST_SAVE)
    offloaded, products_offloaded, x = run(CheckpointPolicy.MUST_CPU_OFFLOAD)
    assert products == products_offloaded == 3
    assert saved - offloaded == 512 * 512 * 4
    assert_close(x.grad, torch.autograd.grad(torch.mm(x, x).sin().sum(), x)[0])


def test_random_numbers_after_a_kept_random_operator_are_those_of_the_forward_pass():
    def function(x):
        kept = torch.native_dropout(x, 0.5, True)[0]
        return (torch.native_dropout(kept.sin(), 0.4, True)[0] * torch.rand_like(x)).exp().sum()

    def only_the_first():
        seen = []
        return lambda c, op, *args, **kwargs: (
            op is aten.native_dropout.default and not seen and not seen.append(1)
        )

    x = leaf(50)
    torch.manual_seed(5)
    found = torch.autograd.grad(checkpoint(function, x, **selective(only_the_first())), x)
    torch.manual_seed(5)
    assert_close(found, torch.autograd.grad(function(x), x), rtol=0, atol=0)


def test_a_policy_is_asked_once_an_operator_and_may_have_a_state():
    asked = []

    class EveryOther:
        def __call__(self, context, op, *args, **kwargs):
            assert context.is_recompute is False
            asked.append((op, context.op_output.shape))
            return len(asked) % 2 == 0

    x = leaf(3)
    with Operators() as operators:
        checkpoint(
            lambda x: x.sin().sin().sin().sin().cos(), x, **selective(EveryOther())
        ).sum().backward()
    assert asked == [(aten.sin.default, (3,))] * 4 + [(aten.cos.default, (3,))]
    # cos's gradient is a sine; two of four are recomputed
    assert operators.counts[aten.sin.default] - 1 == 4 + 2


def test_operators_with_several_outputs_other_outputs_and_views_can_be_kept():
    def function(x):
        deviation, mean = torch.var_mean(x.view(2, 3), dim=1)
        return (deviation * mean * x.view(2, 3).mT.sum()).sin() * x.new_empty(x.stride(0)).dim()

    x = leaf(6)
    everything = lambda context, op, *args, **kwargs: True  # noqa: E731
    for policy in ([aten.var_mean.correction], [aten.view.default, aten.transpose.int], everything):
        found = torch.autograd.grad(checkpoint(function, x, **selective(policy)).sum(), x)
        assert_close(found, torch.autograd.grad(function(x).sum(), x))


class AnswersForItsShape(torch.Tensor):
    """A tensor around another one whose shape is asked by an operator."""

    @staticmethod
    def __new__(cls, inner):
        shape, strides, rest = (
            inner.size(),
            inner.stride(),
            (None, None, inner.dtype, inner.layout, inner.device),
        )
        return torch.Tensor._make_wrapper_subclass(
            cls, shape, strides, *rest, False, inner.requires_grad, "sizes"
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        result = func(*map_tensors(lambda x: getattr(x, "inner", x), args), **(kwargs or {}))
        return map_tensors(cls, result)


def test_a_policy_is_not_asked_about_shapes_which_the_two_runs_do_not_ask_equally_often():
    asked = set()
    policy = lambda context, op, *args, **kwargs: bool(asked.add(op)) or op is aten.sym_size.default  # noqa: E731
    x = AnswersForItsShape(torch.randn(4, 3, requires_grad=True))
    checkpoint(
        lambda x: (x * x.sum()).view(-1).view(4, 3).exp(), x, **selective(policy)
    ).sum().backward()
    assert asked <= {aten.sum.default, aten.mul.Tensor, aten.view.default, aten.exp.default}


@pytest.mark.parametrize("view", [False, True])
def test_a_change_in_place_of_what_was_kept_is_an_error_unless_allowed(view):
    def function(x):
        y = x.sin()
        (y.view(3, 1) if view else y).mul_(2)
        return y.cos().exp()

    x = leaf(3)
    out = checkpoint(function, x, **selective([aten.sin.default]))
    with pytest.raises(RuntimeError, match="has been mutated"):
        out.sum().backward()
    checkpoint(
        function, x, **selective([aten.sin.default], allow_cache_entry_mutation=True)
    ).sum().backward()


def test_what_was_kept_is_freed_when_used_and_with_the_graph():
    kept = []

    def function(x):
        y = x.sin()
        kept.append(weakref.ref(y.untyped_storage()))
        return y.cos().exp().sum()

    with no_gc():
        for backward in (False, True):
            out = checkpoint(function, leaf(3), **selective([aten.sin.default]))
            assert kept[0]() is not None
            if backward:
                out.backward(retain_graph=True)
            else:
                del out
            assert kept.pop(0)() is None
            kept.clear()


# ---- sequences


def test_all_segments_but_the_last_are_run_twice():
    runs, x = Counter(), leaf(3)

    def layer(i):
        return lambda x: runs.update([i]) or x.sin()

    checkpoint_sequential([layer(i) for i in range(7)], 3, x, use_reentrant=False).sum().backward()
    assert runs == {0: 2, 1: 2, 2: 2, 3: 2, 4: 1, 5: 1, 6: 1}


# ---- the loss in chunks


def loss_case(tokens=7, h=5, v=11, ignored=()):
    hidden, weight, targets = leaf(tokens, h), leaf(v, h), torch.randint(v, (tokens,))
    targets[list(ignored)] = -100
    return hidden, weight, targets


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("ignored", [(), (0, 1, 2), (3, 6)])
def test_the_loss_in_chunks_is_cross_entropy_with_its_gradients(chunk, ignored, reduction):
    hidden, weight, targets = loss_case(ignored=ignored)
    found = checkpointed_loss(hidden, weight, targets, chunk=chunk, reduction=reduction)
    expected = F.cross_entropy(hidden @ weight.T, targets, reduction=reduction)
    assert_close(found, expected)
    leaves = (hidden, weight)
    assert_close(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves))


def test_the_loss_in_chunks_takes_another_ignore_index_and_no_tokens():
    hidden, weight, targets = loss_case()
    assert_close(
        checkpointed_loss(hidden, weight, targets, chunk=2, ignore_index=int(targets[0])),
        F.cross_entropy(hidden @ weight.T, targets, ignore_index=int(targets[0])),
    )
    for reduction in ("mean", "sum"):
        none = hidden[:0], weight, targets[:0]
        expected = F.cross_entropy(none[0] @ weight.T, none[2], reduction=reduction)
        assert_close(
            checkpointed_loss(*none, chunk=2, reduction=reduction), expected, equal_nan=True
        )


def test_the_loss_in_chunks_of_low_precision_is_as_near_to_the_exact_one_as_the_precision_allows():
    hidden, weight, targets = (
        torch.randn(4000, 8).bfloat16(),
        torch.randn(50, 8).bfloat16(),
        torch.randint(50, (4000,)),
    )
    found = checkpointed_loss(hidden, weight, targets, chunk=10)
    exact = F.cross_entropy((hidden @ weight.T).double(), targets)
    assert found.dtype is torch.bfloat16
    assert_close(found.double(), exact, rtol=2**-7, atol=0)  # a unit in the last of 8 bits


def test_the_logits_never_exist_whole():
    tokens, v, chunk = 256, 1000, 32
    hidden, weight = (
        torch.randn(tokens, 8, requires_grad=True),
        torch.randn(v, 8, requires_grad=True),
    )
    targets = torch.randint(v, (tokens,))

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else (out,):
                self.numel = max(self.numel, t.numel() if isinstance(t, torch.Tensor) else 0)
            return out

    with Largest() as largest, MemoryMeter() as meter:
        checkpointed_loss(hidden, weight, targets, chunk=chunk).backward()
    assert largest.numel == chunk * v
    with MemoryMeter() as plain:
        F.cross_entropy(hidden @ weight.T, targets).backward()
    assert plain.peak_bytes > 2 * tokens * v * 4
    assert meter.peak_bytes < 4 * chunk * v * 4


# ---- with other parts of PyTorch


def compiled(function, backend="aot_eager"):
    torch.compiler.reset()
    return torch.compile(function, backend=backend)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backward", ["outside", "inside"])
def test_compiled_code_may_call_a_checkpoint(backward):
    block, x = DecoderLayer(16, 2), torch.randn(2, 5, 16)

    def step(x):
        loss = not_reentrant(block, x * 2).cos().sum()
        return loss.backward() if backward == "inside" else loss

    loss = compiled(step)(x)
    if backward == "outside":
        loss.backward()
    expected = torch.autograd.grad(block(x * 2).cos().sum(), block.parameters())
    assert_close([p.grad for p in block.parameters()], list(expected))


def test_compiled_functions_are_compiled_under_a_policy_too():
    graphs, x = [], leaf(3)
    inner = compiled(
        lambda x: x.sin().cos(), lambda graph, inputs: graphs.append(graph) or graph.forward
    )
    found = torch.autograd.grad(
        checkpoint(lambda x: inner(x).exp(), x, **selective([aten.sin.default])).sum(), x
    )
    assert_close(found, torch.autograd.grad(x.sin().cos().exp().sum(), x))
    assert len(graphs) == 1


@pytest.mark.filterwarnings("ignore:checkpoint. inside a transform")
def test_inside_transforms_the_function_is_run_as_it_is():
    x, w = leaf(3, 2), leaf(2)
    run = torch.func.vmap(
        lambda x: not_reentrant(lambda x, pair: (x * pair[0]).sin().exp(), x, (w, "text"))
    )
    assert torch.equal(torch.func.vmap(partial(not_reentrant, torch.sin))(x), x.sin())
    assert_close(
        torch.autograd.grad(run(x).sum(), (x, w)),
        torch.autograd.grad((x * w).sin().exp().sum(), (x, w)),
    )


PYTORCHS_ERRORS = {  # what raises, there and here: (module) -> anything
    "reentrant with a keyword": lambda m: m.checkpoint(
        torch.sin, leaf(3), use_reentrant=True, scale=1
    ),
    "reentrant with debug": lambda m: m.checkpoint(
        torch.sin, leaf(3), use_reentrant=True, debug=True
    ),
    "reentrant with a context": lambda m: m.checkpoint(
        torch.sin, leaf(3), use_reentrant=True, context_fn=two_contexts
    ),
    "reentrant with autograd.grad": lambda m: torch.autograd.grad(
        m.checkpoint(torch.sin, x := leaf(3), use_reentrant=True).sum(), x
    ),
    "reentrant without a gradient": lambda m: (
        m.checkpoint(torch.Tensor.detach, leaf(3), use_reentrant=True).sum().backward()
    ),
    "debug with a context": lambda m: m.checkpoint(
        torch.sin, leaf(3), use_reentrant=False, debug=True, context_fn=two_contexts
    ),
    "another determinism check": lambda m: m.checkpoint(
        torch.sin, leaf(3), use_reentrant=False, determinism_check="all"
    ),
    "an error that the context swallows": lambda m: m.checkpoint(
        raises, leaf(3), use_reentrant=False, context_fn=lambda: (suppress(KeyError), nullcontext())
    ),
    "a sequence without an input": lambda m: m.checkpoint_sequential([torch.sin], 1),
    "a sequence with debug": lambda m: m.checkpoint_sequential(
        [torch.sin], 1, leaf(3), use_reentrant=False, debug=True
    ),
    "operators that are none": lambda m: m.create_selective_checkpoint_contexts([2]),
    "operators without overloads": lambda m: m.create_selective_checkpoint_contexts([aten.sin]),
    "a policy that is none": lambda m: m.create_selective_checkpoint_contexts(2),
    "a policy's second backward pass": lambda m: [
        out := m.checkpoint(
            sin_exp, leaf(3), use_reentrant=False, context_fn=keeps(m, aten.sin.default)
        ).sum(),
        out.backward(retain_graph=True),
        out.backward(),
    ],
    "a policy with another operator": lambda m: (
        m.checkpoint(
            changing(sin_exp, torch.tan),
            leaf(3),
            use_reentrant=False,
            context_fn=keeps(m, aten.sin.default),
        )
        .sum()
        .backward()
    ),
}


def two_contexts():
    return nullcontext(), nullcontext()


def sin_exp(x):
    return x.sin().exp()


def raises(x):
    raise KeyError("mine")


def keeps(module, *operators):
    return partial(module.create_selective_checkpoint_contexts, list(operators))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", PYTORCHS_ERRORS)
def test_what_is_an_error_in_pytorch_is_one_here_and_begins_alike(case):
    messages = []
    for module in (ours, reference):
        with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
            PYTORCHS_ERRORS[case](module)
        # as torch 2.14 puts it, which has a third argument for one mode only
        said = str(caught.value).replace("`context_fn` or `debug`", "`context_fn`, `debug`, or")
        messages.append((caught.type, " ".join(said.split()[:4])))
    assert messages[0] == messages[1]


# ---- the blocks of any model


def decoder(**options):
    return Decoder(vocabulary=40, hidden=16, heads=2, layers=3, sequence=16, dropout=0.2, **options)


@dataclass
class Output:
    hidden: torch.Tensor
    loss: torch.Tensor


class Adapted(nn.Module):
    """A frozen linear layer and a trained change of low rank."""

    def __init__(self, base):
        super().__init__()
        self.base, self.down, self.up = (
            base.requires_grad_(False),
            nn.Linear(16, 2),
            nn.Linear(2, 16),
        )

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    """Takes and returns what Hugging Face's layers do, with an argument that has the name of an
    option."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.drop = (
            nn.BatchNorm1d(16),
            Adapted(nn.Linear(16, 16)),
            nn.Dropout(0.1),
        )

    def forward(self, hidden, mask=None, *, position_embeddings, cache=None, debug=False):
        cos, sin = position_embeddings
        if cache is not None:
            cache.append(hidden)
        out = self.linear(self.norm(hidden) * cos + hidden.tanh() * sin)
        return hidden + self.drop(out).exp() * mask["mask"], debug


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.ModuleDict({"blocks": nn.ModuleList(Block() for _ in range(4))})
        self.embed, self.head = nn.Embedding(40, 16), nn.Linear(16, 40, bias=False)
        self.head.weight = self.embed.weight  # tied

    def forward(self, tokens, cache=None):
        x = self.embed(tokens)
        positions = torch.ones(16).cos(), torch.ones(16).sin()
        for block in self.body["blocks"]:
            x, debug = block(
                x,
                mask={"mask": 0.5 * torch.ones(16)},
                position_embeddings=positions,
                cache=cache,
                debug=True,
            )
            assert debug
        return Output(x, F.cross_entropy(self.head(x), tokens))


def stack():
    return nn.Sequential(*(deep_mlp(3, 16, seed=i) for i in range(3)))


MODELS = {
    "decoder": (decoder, "layers.*", lambda model: model.loss(random_tokens(4, 12, 40))),
    "network like Hugging Face's": (
        Net,
        "body.blocks.*",
        lambda model: model(torch.arange(40).repeat(50)).loss,
    ),
    "stack": (stack, None, lambda model: model(torch.ones(500, 16)).sum()),
}


def trained(name, model, around=nullcontext, wrap=lambda model: model):
    """The loss, the gradients, the names in the state dict, the next random number; and the bytes
    at the peak."""
    torch.manual_seed(5)
    with around(model), MemoryMeter(model) as meter:
        loss = MODELS[name][2](wrap(model))
        loss.backward()
    gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad()
    names = dict.fromkeys(model.state_dict(), 0)
    return (loss.detach(), gradients, names, torch.rand(1)), meter.peak_bytes


@pytest.mark.parametrize("policy", [None, [aten.addmm.default]])
@pytest.mark.parametrize("name", MODELS)
def test_checkpointed_blocks_give_the_gradients_of_the_plain_model_in_fewer_bytes(name, policy):
    model, blocks = MODELS[name][0](), MODELS[name][1]
    plain, plain_peak = trained(name, model)
    found, peak = trained(
        name, model, lambda model: checkpoint_blocks(model, blocks, policy=policy)
    )
    assert_close(found, plain, rtol=0, atol=0)
    assert peak < plain_peak
    assert not any("forward" in vars(module) for module in model.modules())
    assert trained(name, model)[1] == plain_peak


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"every": 2}, [1, 3, 5]),
        ({"first": 4}, [0, 1, 2, 3]),
        ({"first": 3, "every": 2}, [1]),
        ({"first": 100}, [0, 1, 2, 3, 4, 5]),
        ({"blocks": "layers.[135]"}, [1, 3, 5]),
        ({"blocks": ["layers.4", "layers.0"]}, [0, 4]),
        ({"blocks": None}, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_blocks_are_chosen_by_name_and_number_and_these_run_twice(options, expected):
    runs, model = Counter(), decoder()
    model.layers.extend(decoder().layers)
    for i, layer in enumerate(model.layers):
        layer.norm1.register_forward_hook(lambda *_, i=i: runs.update([i]))
    with checkpoint_blocks(model, **options) as handle:
        model.loss(random_tokens(2, 8, 40)).backward()
    assert handle.names == tuple(f"layers.{i}" for i in expected)
    assert runs == {i: 2 if i in expected else 1 for i in range(6)}


class Experts(nn.Module):
    """A block with a list inside."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(9))

    def forward(self, x):
        return sum(expert(x) for expert in self.experts)


def test_every_list_of_like_modules_is_found_but_not_those_inside_their_modules():
    def stack(kind, depth):
        return nn.ModuleList(kind() for _ in range(depth))

    def small():
        return deep_mlp(2, 2)

    parts = {"encoder": stack(Experts, 3), "decoder": stack(small, 2), "one": stack(Experts, 1)}
    parts |= {"heads": stack(partial(nn.Linear, 2, 2), 5), "other": deep_mlp(4, 2)}
    model = nn.ModuleDict({**parts, "again": parts["encoder"]})
    names = checkpoint_blocks(model, None).names
    assert names == ("encoder.0", "encoder.1", "encoder.2", "decoder.0", "decoder.1")
    assert checkpoint_blocks(nn.Sequential(*stack(Experts, 2)), None).names == ("0", "1")
    parts["one"] = nn.ModuleList(
        [nn.Sequential(nn.Linear(2, 2), *stack(partial(nn.Linear, 2, 2), 2))]
    )
    # one block, or single layers, where there is no more
    for names in (("one", "heads", "other"), ("heads", "other")):
        alone = checkpoint_blocks(nn.ModuleDict({name: parts[name] for name in names}), None)
        assert alone.names == tuple(f"{names[0]}.{i}" for i in range(len(parts[names[0]])))


def test_a_list_of_lists_is_no_list_of_blocks():
    stages = nn.ModuleList(nn.ModuleList(Experts() for _ in range(2)) for _ in range(2))
    assert checkpoint_blocks(stages, None).names == ("0.0", "0.1", "1.0", "1.1")


def test_the_first_blocks_are_counted_through_the_lists_and_an_encoder_and_a_decoder_both_forget():
    model = nn.Transformer(16, 2, 3, 2, 32, dropout=0.0, batch_first=True)
    source, target = torch.randn(4, 8, 16), torch.randn(4, 6, 16)

    def stepped(**options):
        model.zero_grad()
        with (
            checkpoint_blocks(model, None, **options) if options else nullcontext(),
            MemoryMeter() as meter,
        ):
            model(source, target).square().sum().backward()
        return [p.grad.clone() for p in model.parameters()], meter.peak_bytes

    with checkpoint_blocks(model, None, first=4) as handle:
        assert handle.names[-2:] == ("encoder.layers.2", "decoder.layers.0")
    (plain, all_kept), (few, less), (found, least) = stepped(), stepped(first=3), stepped(every=1)
    assert least < less < all_kept
    assert_close(found, plain)
    assert_close(few, plain)


@pytest.mark.parametrize("blocks", [["h.*", "blocks.*"], "layers"])  # nobody calls a ModuleList
def test_names_that_do_not_exist_are_an_error_that_tells_some_that_do(blocks):
    with pytest.raises(
        ValueError, match=r"^blocks must match .*, got .*; the model has .*'layers\.0'"
    ):
        checkpoint_blocks(decoder(), blocks)


def test_blocks_of_a_model_without_submodules_are_refused():
    with pytest.raises(
        ValueError,
        match=r"^blocks must match the name of a module that is called, got 'foo\.\*'; a Linear"
        r" contains no other modules$",
    ):
        checkpoint_blocks(nn.Linear(3, 3), "foo.*")


def test_a_model_without_a_list_of_like_modules_is_refused():
    with pytest.raises(ValueError, match="without a list of modules of one type, got None"):
        checkpoint_blocks(nn.Linear(2, 2), None)


def test_blocks_are_checkpointed_once():
    model = decoder()
    with checkpoint_blocks(model, "layers.[01]"):
        with pytest.raises(
            ValueError,
            match=r"blocks must be modules that are not checkpointed yet, got layers\.0, layers\.1",
        ):
            checkpoint_blocks(model)
        checkpoint_blocks(model, "layers.2").remove()
    assert not any("forward" in vars(layer) for layer in model.layers)


def test_hooks_on_a_block_run_once_a_forward_pass_and_once_a_backward_pass():
    seen, model = Counter(), decoder()
    for name in ("forward_pre", "forward", "full_backward"):
        getattr(model.layers[1], f"register_{name}_hook")(lambda *_, name=name: seen.update([name]))
    with checkpoint_blocks(model):
        model.loss(random_tokens(2, 8, 40)).backward()
    assert seen == {"forward_pre": 1, "forward": 1, "full_backward": 1}


def test_without_gradients_blocks_are_run_as_they_are_with_caches_filled_once():
    model, cache = Net().eval(), []
    with checkpoint_blocks(model, None), torch.no_grad():
        out = model(torch.arange(40), cache=cache)
    assert len(cache) == 4
    assert torch.equal(out.loss, model(torch.arange(40)).loss)


def linears(bias):
    blocks = (nn.Sequential(nn.Linear(6, 6, bias=bias), nn.Tanh()) for _ in range(3))
    return nn.Sequential(*blocks)


@pytest.mark.parametrize(
    ("bias", "policy", "kept"),
    [
        (True, [aten.addmm.default], True),
        (False, [aten.mm.default], True),
        (False, [aten.addmm.default, aten.mm.default], True),
        (False, [aten.addmm.default], False),
        (True, [aten.mm.default], False),
        (False, [], True),  # nothing is kept on purpose
    ],
)
def test_a_list_that_meets_none_of_its_operators_warns_once(bias, policy, kept):
    model, x = linears(bias), torch.randn(4, 6)
    with (
        warnings.catch_warnings(record=True) as heard,
        checkpoint_blocks(model, "*", policy=policy),
    ):
        warnings.simplefilter("always")
        for _ in range(2):
            model(x).sum().backward()
    found = [f"{each.message}" for each in heard if "policy" in f"{each.message}"]
    ran = "torch.ops.aten.addmm.default" if bias else "torch.ops.aten.mm.default"
    assert len(found) == (0 if kept else 1)
    assert kept or f"that were run: {ran}." in found[0]


def test_a_list_may_name_operators_of_some_blocks_only():
    model, x = nn.Sequential(*linears(True)[:2], nn.Tanh(), nn.Softmax(-1)), torch.randn(4, 6)
    with (
        warnings.catch_warnings(),
        checkpoint_blocks(model, "*", policy=[aten._softmax.default]),
    ):
        warnings.simplefilter("error")
        model(x).square().sum().backward()


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["deepcopy", "pickle"],
)
def test_a_copy_of_a_checkpointed_model_is_a_plain_model_of_its_own(copied):
    model = decoder()
    handle = checkpoint_blocks(model, policy=[aten.addmm.default])
    twin = copied(model)
    plain, plain_peak = trained("decoder", decoder())
    found, peak = trained("decoder", twin)
    assert_close(found, plain, rtol=0, atol=0)
    assert peak == plain_peak
    nn.init.zeros_(twin.norm.weight)
    nn.init.zeros_(twin.layers[0].norm1.weight)
    assert_close(trained("decoder", model)[0], plain, rtol=0, atol=0)
    assert trained("decoder", twin, checkpoint_blocks)[1] < plain_peak
    handle.remove()
    handle.remove()
    assert trained("decoder", model)[1] == plain_peak


def test_a_checkpointed_model_dies_with_its_last_reference():
    with no_gc():
        model = decoder()
        checkpoint_blocks(model)
        model.loss(random_tokens(2, 8, 40)).backward()
        ref = weakref.ref(model.layers[0])
        del model
        assert ref() is None


def test_after_an_error_the_blocks_are_as_they_were():
    model = decoder()
    with pytest.raises(IndexError), checkpoint_blocks(model):
        model(torch.full((1, 4), 40))
    assert not any("forward" in vars(layer) for layer in model.layers)


def test_a_forward_that_others_replaced_before_or_after_goes_on_working():
    calls, model = [], decoder()

    def noted(module, what):  # as accelerate does
        inner = module.forward
        module.forward = lambda *args: calls.append(what) or inner(*args)

    noted(model.layers[0], "before")
    handle = checkpoint_blocks(model)
    noted(model.layers[1], "after")
    plain, _ = trained("decoder", decoder())
    assert_close(trained("decoder", model)[0], plain, rtol=0, atol=0)
    assert Counter(calls) == {"before": 2, "after": 1}
    handle.remove()
    assert trained("decoder", model)[1] == trained("decoder", decoder())[1]


@pytest.mark.filterwarnings("ignore")
def test_blocks_of_a_compiled_and_of_a_parallel_model_train_alike():
    plain, _ = trained("decoder", decoder())
    model = decoder()
    found, _ = trained(
        "decoder",
        model,
        checkpoint_blocks,
        lambda model: SimpleNamespace(loss=compiled(model.loss)),
    )
    assert_close(found, plain)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel = DistributedDataParallel(model)
        with checkpoint_blocks(parallel, "module.layers.*"):
            torch.manual_seed(5)
            tokens = random_tokens(4, 12, 40)
            F.cross_entropy(
                parallel(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
            ).backward()
        assert_close({name: p.grad for name, p in model.named_parameters()}, plain[1])
    finally:
        dist.destroy_process_group()


# ---- what you may have read: the claims of lesson 02


def test_one_checkpointed_layer_saves_nothing_and_four_do():
    x = torch.randn(4, 16, 64)

    def peak(depth, checkpointed):
        layers = nn.ModuleList(
            DecoderLayer(64, 4, norm_first=False, seed=2 * i) for i in range(depth)
        )
        for parameter in layers.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with MemoryMeter() as meter:
            y = x
            for layer in layers:
                y = checkpoint(layer, y, use_reentrant=False) if checkpointed else layer(y)
            y.square().mean().backward()
        return meter.peak_bytes

    rng_state = torch.get_rng_state().nbytes
    assert abs(peak(1, True) - peak(1, False)) <= 2 * rng_state
    assert peak(4, True) < 0.5 * peak(4, False)
    # one input a layer: O(L), with a small slope
    assert peak(4, True) - peak(1, True) == 3 * (x.nbytes + rng_state)


def test_a_function_may_take_another_branch_in_every_step():
    x = torch.linspace(0, 1, 5).requires_grad_()
    for branch in (torch.sin, torch.cos):
        (found,) = torch.autograd.grad(
            checkpoint(lambda x, f=branch: f(x) * x, x, use_reentrant=False).sum(), x
        )
        (expected,) = torch.autograd.grad((branch(x) * x).sum(), x)
        assert torch.equal(found, expected)


def test_checkpoint_sequential_on_the_linear_layers_alone_is_another_network():
    network, x = deep_mlp(depth=6, width=16), torch.randn(4, 16)
    linears = [module for module in network if isinstance(module, nn.Linear)]
    assert torch.equal(checkpoint_sequential(network, 3, x, use_reentrant=False), network(x))
    assert not torch.allclose(checkpoint_sequential(linears, 3, x, use_reentrant=False), network(x))


@pytest.mark.filterwarnings("ignore")
def test_in_reentrant_segments_only_the_last_one_trains_if_the_input_needs_no_gradient():
    for reentrant, expected in ((True, 2), (False, 6)):
        network = deep_mlp(depth=6, width=16)
        checkpoint_sequential(
            network, 3, torch.randn(4, 16), use_reentrant=reentrant
        ).sum().backward()
        linears = [module for module in network if isinstance(module, nn.Linear)]
        assert sum(linear.weight.grad is not None for linear in linears) == expected
