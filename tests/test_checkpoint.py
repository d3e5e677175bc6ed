"""Checkpointing against plain autograd, against `torch.utils.checkpoint`, and against the meter."""

import copy
import gc
import inspect
import pickle
import warnings
import weakref
from collections import Counter, namedtuple
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial

import foreign_models
import pytest
import torch
import torch.utils.checkpoint as reference
from foreign_models import sentences
from torch import distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import _get_current_function_mode_stack
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import course_lib.checkpoint as ours
from course_lib._torch import tensors_in
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
from course_lib.checkpoint.blocks import names_of
from course_lib.memory import MemoryMeter, symbolic
from course_lib.models import Decoder, DecoderLayer, deep_mlp, random_tokens

aten = torch.ops.aten
both_modes = pytest.mark.parametrize(
    "use_reentrant", [True, False], ids=["reentrant", "not reentrant"]
)
both_stops = pytest.mark.parametrize("early_stop", [True, False])
not_reentrant = partial(checkpoint, use_reentrant=False)


@pytest.fixture(autouse=True)
def clean_end():
    """No test may leave a mode, a hook or an autocast behind."""
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


def plainly(function, *args, **kwargs):
    return function(*args, **kwargs)


def selective(policy, **options):
    return {
        "context_fn": partial(create_selective_checkpoint_contexts, policy, **options),
        "use_reentrant": False,
    }


# ---- the same outputs and gradients as plain autograd and as PyTorch's own checkpoint

PARAMETER = nn.Parameter(torch.linspace(-1, 1, 4, dtype=torch.float64))


def of_many_kinds(x, y):
    """Has a part without gradients, random numbers, a parameter, changes in place, and views."""
    with torch.no_grad():
        scale = x.norm() + y.exp().sum()
    z = x * y + F.dropout(y, 0.3) * PARAMETER
    z.mul_(2)
    z = z.sigmoid_() * torch.rand_like(x)
    product = z.view(2, 2) @ y.view(2, 2).mT
    return product.reshape(4)[1:] / scale, 3, "text", None, (x.detach() * z).sin()


def gradients(run, x, y):
    """Outputs, gradients and the next random numbers after a forward and a backward pass."""
    leaves = [t for t in (x, y, PARAMETER) if t.requires_grad]
    for t in leaves:
        t.grad = None
    torch.manual_seed(7)
    first, *values, last = run(of_many_kinds, x * 1, y)
    assert values == [3, "text", None]
    (first.square().sum() + last.square().sum()).backward()
    return first.detach(), last.detach(), [t.grad for t in leaves], torch.rand(3)


@both_modes
def test_outputs_gradients_and_random_numbers_are_those_of_autograd_and_of_pytorch(use_reentrant):
    x = leaf(4)
    for y in (leaf(4), x, leaf(4).detach()):
        plain = gradients(plainly, x, y)
        for module in (ours, reference):
            found = gradients(partial(module.checkpoint, use_reentrant=use_reentrant), x, y)
            assert_close(found, plain, rtol=0, atol=0)


@both_modes
def test_any_splitting_of_a_stack_gives_the_plain_gradients(use_reentrant):
    model, x = deep_mlp(3, 3).double(), leaf(2, 3)
    leaves, run = [x, *model.parameters()], partial(checkpoint_sequential, model, input=x)
    expected = torch.autograd.grad(model(x).sum(), leaves)
    for segments in range(1, len(model) + 1):
        for t in leaves:
            t.grad = None
        run(segments, use_reentrant=use_reentrant).sum().backward()
        assert_close([t.grad for t in leaves], list(expected), rtol=0, atol=0)


def test_all_segments_but_the_last_are_run_twice():
    runs = Counter()
    layers = [lambda x, i=i: runs.update([i]) or x.sin() for i in range(7)]
    checkpoint_sequential(layers, 3, leaf(3), use_reentrant=False).sum().backward()
    assert runs == {0: 2, 1: 2, 2: 2, 3: 2, 4: 1, 5: 1, 6: 1}


def test_left_out_use_reentrant_means_false_and_warns_with_the_line_of_the_call():
    x = leaf(3)
    with pytest.warns(UserWarning, match="use_reentrant") as caught:
        outputs = checkpoint(torch.sin, x), checkpoint_sequential([torch.sin, torch.cos], 2, x)
    assert [each.filename for each in caught] == [__file__] * 2
    for output in outputs:
        assert torch.autograd.grad(output.sum(), x)  # which the reentrant mode cannot


def test_public_names_and_arguments_are_pytorchs():
    assert set(reference.__all__) < set(ours.__all__)
    for name in ("checkpoint", "checkpoint_sequential", "create_selective_checkpoint_contexts"):
        mine, theirs = (inspect.signature(getattr(m, name)).parameters for m in (ours, reference))
        # torch.utils.checkpoint has no such arguments before torch 2.14
        assert set(mine) - set(theirs) <= {"preserve_rng_state", "respect_saved_tensors_hooks"}
        assert [(p, mine[p].kind) for p in theirs] == [(p, q.kind) for p, q in theirs.items()]


def test_without_a_function_it_is_a_decorator_of_methods_and_modules():
    decorated, x, runs = checkpoint(use_reentrant=False), leaf(3), []

    class Block:
        @decorated
        def scaled(self, x, debug):  # an argument with the name of an option
            runs.append(self)
            return debug * x.sin()

    Block().scaled(x, debug=2.0).sum().backward()
    assert_close(x.grad, 2 * x.cos())
    assert len(runs) == 2  # the second time for backward
    assert Block.scaled.__name__ == "scaled"
    assert torch.equal(decorated(nn.Tanh())(x), x.tanh())
    with pytest.raises(ValueError, match="scale"):
        checkpoint(use_reentrant=False, scale=1)


# ---- random numbers, autocast, devices


@both_modes
@pytest.mark.parametrize("preserved", [True, False])
@pytest.mark.parametrize(
    ("device", "argument_on"),
    [
        ("cpu", "cpu"),
        pytest.param("cuda", "cuda", marks=pytest.mark.gpu),
        pytest.param("cuda", "cpu", marks=pytest.mark.gpu),
    ],
)
def test_dropout_masks_are_equal_in_forward_pass_and_recomputation_if_random_state_is_preserved(
    device, argument_on, preserved, use_reentrant
):
    if device == "cuda":
        torch.cuda.init()
    random_state = {"cpu": torch.get_rng_state, "cuda": torch.cuda.get_rng_state}[device]
    masks, x = [], torch.ones(1000, requires_grad=True, device=argument_on)

    def function(x):
        y = F.dropout(x.to(device), 0.5)
        masks.append(y.detach() != 0)
        return y.sin() * torch.rand(1000, device=device) * F.dropout(x, 0.5).to(device)

    out = checkpoint(function, x, use_reentrant=use_reentrant, preserve_rng_state=preserved)
    torch.rand(17, device=device)  # others draw numbers between the two runs
    state = random_state()
    out.sum().backward()
    assert len(masks) == 2
    assert torch.equal(*masks) == torch.equal(random_state(), state) == preserved


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


def _surroundings():
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.empty(0).device.type,
    )


@both_modes
@pytest.mark.parametrize("enabled, cached", [(True, True), (True, False), (False, True)])
def test_autocast_and_default_device_in_the_recomputation_are_those_of_the_forward_pass(
    use_reentrant, enabled, cached
):
    seen, x = [], torch.randn(4, 4, requires_grad=True)

    def function(x):
        seen.append(_surroundings())
        return (x @ x).sin()

    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16, enabled, cached):
        out = checkpoint(function, x, use_reentrant=use_reentrant)
    assert out.dtype is (torch.bfloat16 if enabled else torch.float32)
    with torch.device("cpu"), torch.autocast("cpu", torch.float16, not enabled, not cached):
        before = _surroundings()
        out.float().sum().backward()
        assert _surroundings() == before
    assert seen == [(enabled, torch.bfloat16, cached, "meta")] * 2


@pytest.mark.parametrize("used_before", [True, False])
@pytest.mark.parametrize("saved", [True, False])
def test_selective_checkpoint_shares_weights_with_autocast_cache(saved, used_before):
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)

    def function(x):
        return first(second(first(x).relu())).sin()

    def step(run):
        x = torch.ones(4, 8, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            y = run(function, first(x) if used_before else x).float().sum()
            y = y + first(x).float().sum()
        # after autocast has emptied its cache
        return torch.autograd.grad(y, [x, *first.parameters(), *second.parameters()])

    found = step(partial(checkpoint, **selective(lambda *_, **__: saved)))
    assert all(map(torch.equal, step(plainly), found))


@both_modes
def test_statistics_passed_to_instance_norm_change_once(use_reentrant):
    def step(run):
        mean, variance = torch.zeros(3), torch.ones(3)
        x = torch.linspace(-1, 2, 24).view(2, 3, 4).requires_grad_()
        run(F.instance_norm, x, mean, variance).pow(3).sum().backward()
        return x.grad, mean, variance

    plain = step(plainly)
    found = step(partial(checkpoint, use_reentrant=use_reentrant))
    assert all(map(torch.equal, plain, found))
    assert not plain[1].equal(torch.zeros(3))


def noise_written_after_it_was_saved(x):
    y = F.rrelu(x * 2, training=True)
    return y.exp() * y


def dropouts(x):
    kept = torch.native_dropout(x, 0.5, True)[0]
    return (torch.native_dropout(kept.sin(), 0.4, True)[0] * torch.rand_like(x)).exp()


def first_dropout(context, op, *args, **kwargs):
    return op is aten.native_dropout.default and args[1] == 0.5


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (noise_written_after_it_was_saved, {}),
        (noise_written_after_it_was_saved, selective([aten.rrelu_with_noise.default])),
        (dropouts, selective(first_dropout)),
    ],
    ids=["noise", "kept noise", "after a kept dropout"],
)
def test_random_numbers_of_a_recomputation_are_those_of_the_forward_pass(function, options):
    def slopes(run):
        torch.manual_seed(0)
        x = torch.linspace(-2, 2, 96).requires_grad_()
        return torch.autograd.grad(run(function, x).sum(), x)[0]

    plain = slopes(plainly)
    assert torch.equal(slopes(partial(not_reentrant, **options)), plain)
    assert len(plain.unique()) > 20  # they depend on the random numbers


# ---- ways to go backward


def test_a_saved_tensor_is_recomputed_each_time_it_is_looked_at_outside_of_backward_and_not_kept():
    runs = []

    def function(x):
        y = x.exp()
        runs.append(weakref.ref(y.untyped_storage()))
        return y.exp().sum()

    with no_gc():
        x = leaf(5)
        out = not_reentrant(function, x)
        for _ in range(2):
            assert_close(out.grad_fn.next_functions[0][0]._saved_result, x.exp().exp())
        assert [ref() for ref in runs] == [None] * 3
    out.backward()
    assert len(runs) == 4
    with pytest.raises(RuntimeError, match=r"second time|already been freed"):
        out.backward()


def test_saved_tensors_read_twice_in_one_backward_are_an_error_that_says_so():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            with pytest.raises(CheckpointError, match="once"):
                ctx.saved_tensors  # noqa: B018
            return grad * x

    x = leaf(3)
    not_reentrant(lambda x: Twice.apply(x.sin()), x).sum().backward()
    assert_close(x.grad, x.sin() * x.cos())


@both_stops
@pytest.mark.parametrize("again", [True, False])
def test_backward_inside_the_function_works(again, early_stop):
    def function(x):
        y = x.sin()
        z = y.cos()
        (slope,) = torch.autograd.grad(z.sum(), x, retain_graph=again)
        return x.cos() * slope.detach(), z

    x = leaf(3)
    found = torch.autograd.grad(not_reentrant(function, x, early_stop=early_stop)[0].sum(), x)
    assert_close(found, torch.autograd.grad(function(x)[0].sum(), x))


@both_stops
def test_checkpoints_in_checkpoints_give_the_plain_gradients_to_second_order(early_stop):
    def scaled(x, scale=1.0):
        return sin_exp(x * scale).cos()

    def stacked(run, x, w):  # with two children, and a keyword
        inner = run(lambda x: run(scaled, run(sin_exp, x), scale=w), x)
        return run(scaled, inner)

    def slopes(function):
        first = torch.autograd.grad(function(x, w).sum(), (x, w), create_graph=True)
        return [*first, *torch.autograd.grad(sum(t.square().sum() for t in first), (x, w))]

    x, w = leaf(3), leaf(3)
    nested = partial(stacked, not_reentrant)
    with set_checkpoint_early_stop(early_stop):
        for function in (nested, partial(not_reentrant, nested)):
            assert_close(slopes(function), slopes(partial(stacked, plainly)))


@pytest.mark.filterwarnings("ignore")  # inside a reentrant forward pass nothing requires gradients
@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_modes_may_be_nested_in_one_another(outer, inner):
    def run(x):
        return checkpoint(lambda x: (x.sin() * x).exp(), x * 2, use_reentrant=inner).cos()

    x = leaf(3)
    checkpoint(run, x, use_reentrant=outer).sum().backward()
    (expected,) = torch.autograd.grad((2 * x * (2 * x).sin()).exp().cos().sum(), x)
    assert_close(x.grad, expected)


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


# ---- early stop, errors inside


@pytest.mark.parametrize(
    ("contexts", "options", "stops"),
    [
        ([], {}, True),
        ([], {"early_stop": False}, False),
        ([False], {}, False),
        ([True], {"early_stop": False}, True),
        ([False, True], {}, True),
    ],
)
def test_recomputation_stops_when_it_has_what_it_needs_if_early_stop_is_enabled(
    contexts, options, stops
):
    with ExitStack() as stack, Operators() as operators:
        for enabled in contexts:
            stack.enter_context(set_checkpoint_early_stop(enabled))
        out = not_reentrant(lambda x: x.sin().floor(), leaf(3), **options)
        out.sum().backward()
    assert operators.counts[aten.floor.default] == (1 if stops else 2)


@both_modes
@pytest.mark.parametrize("failing_run", [1, 2])
def test_after_an_error_inside_the_function_everything_is_as_it_was(use_reentrant, failing_run):
    calls, x = [], leaf(3)

    def function(x):
        calls.append(1)
        y = F.dropout(x, 0.5).exp()
        if len(calls) == failing_run:
            raise KeyError("mine")
        return y.sin().cos()

    with pytest.raises(KeyError, match="mine"), torch.autocast("cpu"):
        out = checkpoint(function, x, use_reentrant=use_reentrant).sum()
        state = torch.get_rng_state()
        out.backward()
    assert failing_run == 1 or torch.equal(torch.get_rng_state(), state)


# ---- determinism check


def changing(first, second):
    functions = iter([first, second])
    return lambda x: next(functions)(x)


def sin_exp(x):
    return x.sin().exp()


def sin_exp_cos(x):
    return sin_exp(x).cos()


@pytest.mark.parametrize(
    ("first", "second", "options", "before", "after"),
    [
        (sin_exp_cos, sin_exp, {}, ": 3", ": 2"),
        (sin_exp_cos, sin_exp, {"early_stop": False}, ": 3", ": 2"),
        (sin_exp, sin_exp_cos, {"early_stop": False}, ": 2", "torch.Size([3])"),
        (torch.exp, lambda x: x[:2].exp(), {}, "torch.Size([3])", "torch.Size([2])"),
        (torch.exp, lambda x: x.float().exp(), {}, "torch.float64", "torch.float32"),
        (torch.exp, lambda x: x.to("meta").exp(), {}, "type='cpu'", "type='meta'"),
        (sin_exp_cos, torch.tan, {"debug": True}, "aten.cos.default(float64[3])", "aten.tan."),
    ],
)
def test_an_error_shows_what_differs_in_the_recomputation(first, second, options, before, after):
    out = not_reentrant(changing(first, second), leaf(3), **options).sum()
    with pytest.raises(CheckpointError) as caught:
        out.backward()
    said = str(caught.value)
    assert 0 <= said.find(before) < said.rfind(after)
    assert (__file__ in said) == ("debug" in options)


def test_debug_may_be_switched_on_around_the_forward_pass():
    with set_checkpoint_debug_enabled(True):
        out = not_reentrant(changing(sin_exp, torch.tan), leaf(3))
    with pytest.raises(CheckpointError, match=r"aten\.exp\.default"):
        out.sum().backward()


@pytest.mark.parametrize(
    ("change", "shown"), [(lambda x: x[:2].exp(), "shape"), (lambda x: (x, x), "returned 2")]
)
def test_other_outputs_in_a_reentrant_recomputation_are_an_error(change, shown):
    out = checkpoint(changing(torch.exp, change), leaf(3), use_reentrant=True).sum()
    with pytest.raises(RuntimeError, match=shown):
        out.backward()


# ---- what the function is given


@dataclass
class Pair:
    x: torch.Tensor
    note: str = "a note"


Named = namedtuple("Named", "x y")
WAYS = {  # where the tensor is -> function that returns (args, kwargs)
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


@both_modes
@pytest.mark.parametrize("before", [[], [["text"]]], ids=str)
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
    with pytest.raises(RuntimeError, match="doubled_in_place"):
        out.sum().backward()


@both_modes
def test_running_statistics_of_batch_norm_advance_twice_as_in_pytorch(use_reentrant):
    norm, x = nn.BatchNorm1d(4), torch.linspace(0, 1, 12).view(3, 4).requires_grad_()
    checkpoint(norm, x, use_reentrant=use_reentrant, early_stop=False).sum().backward()
    assert_close(norm.running_mean, (1 - 0.9**2) * x.mean(0))


# ---- memory


@pytest.mark.parametrize(
    "options",
    [{"use_reentrant": True}, {"use_reentrant": False}, selective([aten.exp.default])],
    ids=["reentrant", "not reentrant", "selective"],
)
def test_only_outermost_inputs_are_kept_and_nothing_once_the_graph_is_gone(options):
    kept = []

    def function(x, y):
        z = F.dropout(x * y, 0.5).exp()
        kept.append(weakref.ref(z.untyped_storage()))
        return not_reentrant(lambda z: z.sin(), z).cos().exp()  # exp saves its own output

    with no_gc():
        for backward in (False, True):
            x, y = leaf(3), leaf(3)
            refs = [weakref.ref(x), weakref.ref(y)]
            out = checkpoint(function, x, y, **options)
            refs += [weakref.ref(out)]
            assert (kept[-1]() is None) == ("context_fn" not in options)
            if backward:
                out.sum().backward(retain_graph=not options["use_reentrant"])
            del out, x, y
            assert [ref() for ref in refs + kept] == [None] * len(refs + kept)
        assert len(kept) == 3


def test_a_recomputation_does_not_keep_tensors_that_nothing_will_read():
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
        gone = weakref.ref(x)
        with suppress(CheckpointError):
            not_reentrant(changing(sin_exp, torch.sin), x).sum().backward()
        del x
        assert gone() is None


HOWS = ["reentrant", "not reentrant", "selective"]


def loss_of(layers, x, module, how):
    """The loss of layers that each run under a checkpoint of the module."""
    options = {"use_reentrant": how == "reentrant"}
    if how == "selective":
        products = [aten.mm.default, aten.addmm.default, aten.bmm.default]
        options["context_fn"] = partial(module.create_selective_checkpoint_contexts, products)
    for layer in layers:
        x = module.checkpoint(layer, x, **options)
    return x.square().mean()


@pytest.mark.parametrize("how", HOWS)
def test_peak_bytes_equal_those_of_pytorch_and_of_a_symbolic_step_to_the_byte(how):
    def bytes_taken(module):
        torch.manual_seed(0)
        layers = [DecoderLayer(32, 4, dropout=0.1, seed=2 * i) for i in range(3)]
        model, x = nn.Sequential(*layers), torch.randn(2, 16, 32, requires_grad=True)
        with MemoryMeter(model) as meter:
            loss = loss_of(layers, x, module, how)
            # what is recomputed is freed as soon as it is used, although the graph stays
            loss.backward(retain_graph=True)
        return meter.peak_bytes, meter.live_bytes

    found = bytes_taken(ours)
    assert found == bytes_taken(reference)
    with symbolic():
        assert bytes_taken(ours) == found


@pytest.mark.gpu
@pytest.mark.parametrize("how", HOWS)
def test_cuda_allocator_peaks_equal_those_of_pytorch(how):
    def peak(module):
        torch.manual_seed(0)
        layers = [DecoderLayer(128, 4, dropout=0.1, seed=2 * i).cuda() for i in range(3)]
        x = torch.randn(4, 128, 128, requires_grad=True, device="cuda")
        for _ in range(2):
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_stats()["requested_bytes.all.current"]
            loss_of(layers, x, module, how).backward()
        return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before

    assert peak(ours) == peak(reference)


# ---- selective checkpointing


def keep(*operators, policy=CheckpointPolicy.MUST_SAVE):
    return lambda context, op, *args, **kwargs: (
        policy if op in operators else CheckpointPolicy.PREFER_RECOMPUTE
    )


def product(x, y):
    return torch.mm(x.cos(), y).sin().sum()


@pytest.mark.parametrize("respected", [True, False])
@pytest.mark.parametrize("nested", [False, True])
def test_what_a_policy_keeps_goes_through_the_hooks_around_it_where_that_is_asked(
    respected, nested
):
    """The product, (2, 3), is kept; what goes in is an input of the checkpoint."""

    def pack(tensor):
        packed.append(tuple(tensor.shape))
        return tensor.numpy(force=True)

    run = partial(
        checkpoint, product, respect_saved_tensors_hooks=respected, **selective([aten.mm.default])
    )
    packed, x, y = [], leaf(2, 4), leaf(4, 3)
    expected = torch.autograd.grad(product(x, y), (x, y))
    with saved_tensors_hooks(pack, torch.from_numpy):
        out = not_reentrant(run, x, y) if nested else run(x, y)
    assert packed.count((2, 3)) == respected
    assert all(map(torch.equal, torch.autograd.grad(out, (x, y)), expected))


def test_hooks_that_refer_to_a_checkpoint_output_are_freed_with_it():
    def pack(tensor):
        return tensor

    x, gone = leaf(3), weakref.ref(pack)
    with no_gc():
        with saved_tensors_hooks(pack, torch.clone):
            pack.graph = checkpoint(x.sin, use_reentrant=False)  # no argument that the hooks keep
        del pack
        assert gone() is None


@pytest.mark.parametrize("name", CheckpointPolicy.__members__)
def test_a_policy_decides_what_is_computed_again(name):
    x, y = leaf(4, 4), leaf(4, 4)
    expected = torch.autograd.grad(product(x, y), (x, y))
    saves = not name.endswith("RECOMPUTE")
    policies = [keep(aten.mm.default, policy=CheckpointPolicy[name])]
    policies += [[aten.mm.default], lambda c, op, *_: op is aten.mm.default] if saves else [[]]
    for policy in policies:
        with Operators() as operators:
            out = checkpoint(product, x, y, **selective(policy))
            found = torch.autograd.grad(out, (x, y))
        assert operators.counts[aten.mm.default] == (3 if saves else 4)
        assert_close(found, expected, rtol=0, atol=0)


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


def test_a_policy_is_asked_once_an_operator_and_may_have_a_state():
    asked, x = [], leaf(3)

    def every_other(context, op, *args, **kwargs):
        asked.append((op, context.op_output.shape, context.is_recompute))
        return len(asked) % 2 == 0

    with Operators() as operators:
        out = checkpoint(lambda x: x.sin().sin().sin().sin().cos(), x, **selective(every_other))
        out.sum().backward()
    assert asked == [(op.default, (3,), False) for op in (*[aten.sin] * 4, aten.cos)]
    # cos's gradient is a sine; two of four are recomputed
    assert operators.counts[aten.sin.default] - 1 == 4 + 2


def test_a_change_in_place_of_what_was_kept_is_an_error_unless_allowed():
    def function(x):
        y = x.sin()
        y.view(3, 1).mul_(2)
        return y.cos().exp()

    x, policy = leaf(3), [aten.sin.default]
    out = checkpoint(function, x, **selective(policy))
    with pytest.raises(RuntimeError, match="mutated"):
        out.sum().backward()
    options = selective(policy, allow_cache_entry_mutation=True)
    checkpoint(function, x, **options).sum().backward()


def test_a_policy_allows_one_backward_pass_and_no_other_operator_in_the_recomputation():
    options = selective([aten.sin.default])
    out = checkpoint(sin_exp, leaf(3), **options).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        out.backward()
    out = checkpoint(changing(sin_exp, torch.tan), leaf(3), **options).sum()
    with pytest.raises(RuntimeError, match=r"aten\.tan"):
        out.backward()


# ---- the loss in chunks


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("ignore_index", [-100, 3])
@pytest.mark.parametrize(("tokens", "chunk"), [(7, 1), (7, 3), (7, 100), (0, 2)])
def test_the_loss_in_chunks_is_cross_entropy_with_its_gradients(
    tokens, chunk, ignore_index, reduction
):
    hidden, weight, targets = leaf(tokens, 5), leaf(11, 5), torch.randint(11, (tokens,))
    targets[:3] = ignore_index  # a whole chunk of three
    options = {"ignore_index": ignore_index, "reduction": reduction}
    found = checkpointed_loss(hidden, weight, targets, chunk=chunk, **options)
    expected = F.cross_entropy(hidden @ weight.T, targets, **options)
    assert_close(found, expected, equal_nan=True)
    slopes = (torch.autograd.grad(loss, (hidden, weight)) for loss in (found, expected))
    assert_close(*slopes)


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


# ---- with other parts of PyTorch


@pytest.mark.filterwarnings("ignore")
def test_compiled_code_may_call_a_checkpoint_and_its_backward_pass():
    block, x = DecoderLayer(16, 2), torch.randn(2, 5, 16)

    @torch.compile(backend="aot_eager")
    def step(x):
        not_reentrant(block, x * 2).cos().sum().backward()

    torch.compiler.reset()
    step(x)
    expected = torch.autograd.grad(block(x * 2).cos().sum(), block.parameters())
    assert_close([p.grad for p in block.parameters()], list(expected))


@pytest.mark.filterwarnings("ignore:checkpoint. inside a transform")
def test_inside_transforms_the_function_is_run_as_it_is():
    x, w = leaf(3, 2), leaf(2)
    run = torch.func.vmap(
        lambda x: not_reentrant(lambda x, pair: (x * pair[0]).sin().exp(), x, (w, "text"))
    )
    assert_close(
        torch.autograd.grad(run(x).sum(), (x, w)),
        torch.autograd.grad((x * w).sin().exp().sum(), (x, w)),
    )


TWO = nullcontext(), nullcontext()


def called(function=torch.sin, **options):
    return lambda module: module.checkpoint(function, leaf(3), **options)


REFUSED = [  # call that a module of checkpoints refuses, name in the error
    (called(use_reentrant=True, scale=1), "scale"),
    (called(use_reentrant=True, debug=True), "debug"),
    (called(use_reentrant=True, context_fn=lambda: TWO), "context_fn"),
    (called(use_reentrant=False, debug=True, context_fn=lambda: TWO), "context_fn"),
    (called(use_reentrant=False, determinism_check="all"), "determinism_check"),
    (
        lambda m: torch.autograd.grad(
            m.checkpoint(torch.sin, x := leaf(3), use_reentrant=True).sum(), x
        ),
        "use_reentrant",
    ),
    (
        lambda m: called(torch.Tensor.detach, use_reentrant=True)(m).sum().backward(),
        "requires_grad",
    ),
    (
        lambda m: m.checkpoint_sequential([torch.sin], 1, leaf(3), use_reentrant=False, debug=True),
        "debug",
    ),
    (lambda m: m.create_selective_checkpoint_contexts([aten.sin]), "OpOverload"),
    (lambda m: m.create_selective_checkpoint_contexts(2), "policy"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("call", "named"), REFUSED)
def test_what_pytorch_refuses_is_refused_with_an_error_of_the_same_type(call, named):
    with pytest.raises((TypeError, ValueError, RuntimeError)) as theirs:
        call(reference)
    with pytest.raises(theirs.type, match=named):
        call(ours)


def test_context_that_suppresses_an_error_is_rejected_and_leaves_no_hooks():
    """PyTorch's checkpoint raises this error from torch 2.13 on, and leaves its hooks before."""
    contexts = suppress(ZeroDivisionError), nullcontext()
    call = called(lambda x: x / (1 // 0), use_reentrant=False, context_fn=lambda: contexts)
    with pytest.raises(RuntimeError, match="context_fn"):
        call(ours)


# ---- the blocks of any model


def decoder():
    return Decoder(vocabulary=40, hidden=16, heads=2, layers=3, sequence=16, dropout=0.2)


TOKENS = random_tokens(4, 12, 40)


def trained(model, around=nullcontext, batch=TOKENS):
    """The loss, the gradients and the next random number; and the bytes at the peak."""
    torch.manual_seed(5)
    with around(model), MemoryMeter(model) as meter:
        loss, _ = model.loss_sum(batch)
        loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return (loss.detach(), gradients, torch.rand(1)), meter.peak_bytes


@pytest.mark.parametrize("policy", [None, [aten.addmm.default]])
@pytest.mark.parametrize(
    ("make", "batch"),
    [(decoder, TOKENS), (partial(foreign_models.Decoder, dropout=0.1), sentences())],
    ids=["decoder", "with tuples and keywords"],
)
def test_checkpointed_blocks_give_the_gradients_of_the_plain_model_in_fewer_bytes(
    make, batch, policy
):
    model = make()
    plain, plain_peak = trained(model, batch=batch)
    around = partial(checkpoint_blocks, blocks=None, policy=policy)
    found, peak = trained(model, around, batch)
    assert_close(found, plain, rtol=0, atol=0)
    assert peak < plain_peak
    assert not any("forward" in vars(module) for module in model.modules())
    assert trained(model, batch=batch)[1] == plain_peak


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
def test_blocks_are_chosen_by_name_and_number_and_these_run_twice(options, expected):
    runs, once, model = Counter(), Counter(), decoder()
    model.layers.extend(decoder().layers)
    for i, layer in enumerate(model.layers):
        layer.norm1.register_forward_hook(lambda *_, i=i: runs.update([i]))
        for kind in ("forward_pre", "forward", "full_backward"):
            note = partial(once.update, [(kind, i)])
            getattr(layer, f"register_{kind}_hook")(lambda *_, note=note: note())
    with checkpoint_blocks(model, **options) as handle:
        model.loss(TOKENS).backward()
    assert handle.names == tuple(f"layers.{i}" for i in expected)
    assert runs == {i: 2 if i in expected else 1 for i in range(6)}
    assert len(once) == once.total() == 3 * 6  # hooks on a block


def test_every_list_of_like_modules_is_found_but_not_those_inside_their_modules():
    def linears(count):
        return [nn.Linear(2, 2) for _ in range(count)]

    def stack(depth):  # of modules with a list inside
        return nn.ModuleList(
            nn.Sequential(nn.ModuleList(linears(3)), nn.ReLU()) for _ in range(depth)
        )

    parts = {"encoder": stack(3), "decoder": nn.ModuleList(deep_mlp(2, 2) for _ in range(2))}
    parts |= {"one": stack(1), "heads": nn.ModuleList(linears(5)), "other": deep_mlp(4, 2)}
    model = nn.ModuleDict({**parts, "again": parts["encoder"]})
    with checkpoint_blocks(model, None, first=4) as handle:
        assert handle.names == ("encoder.0", "encoder.1", "encoder.2", "decoder.0")
    assert checkpoint_blocks(model, None).names == (*handle.names, "decoder.1")
    assert checkpoint_blocks(nn.Sequential(*stack(2)), None).names == ("0", "1")
    lists = nn.ModuleList(stack(2) for _ in range(2))
    assert checkpoint_blocks(lists, None).names == ("0.0", "0.1", "1.0", "1.1")
    parts["one"] = nn.ModuleList([nn.Sequential(*linears(3))])
    # without a longer list of blocks: a list of one block, or single layers
    for names in (("one", "heads", "other"), ("heads", "other")):
        alone = checkpoint_blocks(nn.ModuleDict({name: parts[name] for name in names}), None)
        assert alone.names == tuple(f"{names[0]}.{i}" for i in range(len(parts[names[0]])))


def test_lists_of_several_types_are_blocks_only_without_larger_modules_of_one_type():
    def two(count, *more):
        """Return a list of modules of two types, which have modules inside."""
        kinds = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.TransformerEncoderLayer(2, 1, 2)
        return nn.ModuleList([*(copy.deepcopy(kinds[i % 2]) for i in range(count)), *more])

    single = nn.ModuleList([nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2), nn.Tanh(), nn.Tanh()])
    parts = {"a": two(2), "b": two(4), "c": single, "d": nn.Sequential(*two(3)), "e": two(1)}
    heads = {"heads": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])}
    layers = {"layers": nn.ModuleList([nn.Sequential(nn.Tanh(), nn.ReLU()) for _ in range(2)])}
    rest = nn.ModuleDict({name: parts[name] for name in "abcd"})
    longest = [*(f"b.{i}" for i in range(4)), "a.0", "a.1"]
    assert names_of(rest, None) == names_of(nn.ModuleDict({**rest, **heads}), None) == longest
    assert names_of(nn.ModuleDict({**rest, **layers}), None) == ["layers.0", "layers.1"]
    assert names_of(nn.ModuleDict(parts), None) == ["e.0"]  # a list of one type
    assert len(names_of(nn.ModuleDict({"c": single}), None)) == 5


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: nn.Sequential(nn.Tanh(), nn.Sequential(nn.Tanh()), deep_mlp(1, 2)), "'1', '2'"),
        (lambda: nn.ModuleDict({"net": nn.Sequential(nn.Sequential(nn.Tanh()))}), "'net.0.0'"),
        (lambda: nn.ModuleDict({"a": nn.ReLU(), "b": nn.Tanh()}), "'a', 'b'"),
        (lambda: nn.Linear(3, 3), "contains no other modules"),
    ],
)
def test_a_model_without_lists_is_refused_with_names_to_choose(make, names):
    with pytest.raises(ValueError, match=rf"without a list of blocks .*, got None; .*{names}"):
        checkpoint_blocks(make(), None)


@pytest.mark.parametrize(("blocks", "shown"), [("foo.*", r"got 'foo"), (None, "got None")])
def test_a_model_without_blocks_is_refused(blocks, shown):
    with pytest.raises(ValueError, match=shown):
        checkpoint_blocks(nn.Linear(3, 3), blocks)


def test_blocks_are_checkpointed_once_and_restored_after_an_error():
    model = decoder()
    with pytest.raises(ValueError, match=r"layers\.0"), checkpoint_blocks(model, "layers.[01]"):
        checkpoint_blocks(model, "layers.2").remove()
        checkpoint_blocks(model)
    assert not any("forward" in vars(layer) for layer in model.layers)


def test_a_block_may_have_an_argument_named_like_an_option_and_runs_once_without_gradients():
    class Block(nn.Linear):
        def forward(self, x, *, debug):
            debug.append(x)
            return super().forward(x).sin()

    model, seen, x = nn.Sequential(Block(2, 2), Block(2, 2)), [], torch.ones(2)
    with checkpoint_blocks(model, None):
        model[0](x, debug=seen).sum().backward()
        with torch.no_grad():
            model[0](x, debug=seen)
    assert len(seen) == 2 and all(each is x for each in seen)


@pytest.mark.parametrize(
    ("bias", "policy", "ran"),
    [
        (True, [aten.mm.default], "aten.addmm.default"),
        (False, [aten.addmm.default], "aten.mm.default"),
        (False, [aten.addmm.default, aten.mm.default], None),
        (True, [aten._softmax.default], None),  # only one of the two blocks runs softmax
        (True, [], None),  # nothing is kept on purpose
    ],
)
def test_a_policy_list_warns_once_if_no_block_runs_its_operators(bias, policy, ran):
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(6, 6, bias), last) for last in (nn.Tanh(), nn.Softmax(-1)))
    )
    with (
        warnings.catch_warnings(record=True) as heard,
        checkpoint_blocks(model, "*", policy=policy),
    ):
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.randn(4, 6)).square().sum().backward()
    assert len(heard) == (ran is not None)
    assert all(ran in str(each.message) for each in heard)


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["deepcopy", "pickle"],
)
def test_a_copy_of_a_checkpointed_model_is_a_plain_model_of_its_own(copied):
    model = decoder()
    handle = checkpoint_blocks(model, policy=[aten.addmm.default])
    twin = copied(model)
    plain, plain_peak = trained(decoder())
    found, peak = trained(twin)
    assert_close(found, plain, rtol=0, atol=0)
    assert peak == plain_peak
    nn.init.zeros_(twin.layers[0].norm1.weight)
    assert_close(trained(model)[0], plain, rtol=0, atol=0)
    assert trained(twin, checkpoint_blocks)[1] < plain_peak
    handle.remove()
    handle.remove()
    assert trained(model)[1] == plain_peak


def test_a_checkpointed_model_dies_with_its_last_reference():
    with no_gc():
        model = decoder()
        checkpoint_blocks(model)
        model.loss(TOKENS).backward()
        ref = weakref.ref(model.layers[0])
        del model
        assert ref() is None


def test_a_forward_that_others_replaced_before_or_after_goes_on_working():
    calls, model = [], decoder()

    def noted(module, what):  # as accelerate does
        inner = module.forward
        module.forward = lambda *args: calls.append(what) or inner(*args)

    noted(model.layers[0], "before")
    handle = checkpoint_blocks(model)
    noted(model.layers[1], "after")
    plain, plain_peak = trained(decoder())
    assert_close(trained(model)[0], plain, rtol=0, atol=0)
    assert Counter(calls) == {"before": 2, "after": 1}
    handle.remove()
    assert trained(model)[1] == plain_peak


def test_checkpointed_blocks_of_a_parallel_model_get_the_plain_gradients():
    def gradients(model):
        torch.manual_seed(5)
        model(TOKENS).square().mean().backward()
        return [p.grad for p in model.parameters()]

    runs, model = [], decoder()
    model.layers[0].norm1.register_forward_hook(lambda *_: runs.append(1))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel = DistributedDataParallel(model)
        with checkpoint_blocks(parallel, "module.layers.*"):
            found = gradients(parallel)
    finally:
        dist.destroy_process_group()
    assert_close(found, gradients(decoder()))
    assert len(runs) == 2  # the second time for backward
