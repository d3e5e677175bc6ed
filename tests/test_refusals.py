"""Errors of the library: one sentence with the argument, what is allowed and what it got. A table
over its public functions.

Errors that depend on an object's state are tested with that object.
"""

import ast
import math
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import LBFGS

from course_lib import _check
from course_lib.accumulation import AccumulatedStep, split
from course_lib.attention import (
    attention_cost,
    flash_attention,
    online_softmax,
    standard_attention,
)
from course_lib.budget import Rates, Recipe, build, estimate, fit, run, train_step
from course_lib.checkpoint import checkpoint_blocks, checkpointed_loss
from course_lib.memory import (
    MemoryMeter,
    attention_saved_bytes,
    measure,
    saved_tensors,
    training_state_bytes,
    transformer_activation_bytes,
)
from course_lib.models import Attention, Decoder, DecoderLayer, deep_mlp, random_tokens
from course_lib.offload import (
    DiskStore,
    HostStore,
    OffloadedOptimizer,
    Prefetcher,
    offload_activations,
)
from course_lib.schedule import (
    Chain,
    Forward,
    Schedule,
    ScheduledSequential,
    Stage,
    binomial,
    optimal,
    segments,
    simulate,
    store_all,
)
from course_lib.workload import named_function, samples_of

SIZES = {"vocabulary": 50, "hidden": 16, "heads": 4, "layers": 3, "sequence": 8}
LAYER = {"sequence": 16, "batch": 2, "hidden": 32, "heads": 4}
HEADS = {"sequence": 16, "batch": 2, "heads": 4, "head_dim": 8}
STATE = {"parameters": 1, "recipe": "fp32-sgd"}
SEGMENTS = {"checkpoint": "segments", "segments": 2}
SELECTIVE = {"checkpoint": "selective"}
RANKS = {"ranks": 4, "shard": "ddp"}
OPTIMAL = {"checkpoint": "optimal", "schedule_bytes": 2}
X, NAN = torch.ones(2, 4, 6, 8), math.nan
QKV = {"q": X, "k": X, "v": X}
ONE = nn.Sequential(nn.Tanh())
LINEAR, TWO = nn.Linear(2, 1), torch.ones(2)
CHAIN, ALL = Chain.uniform(3), store_all(Chain.uniform(1))
NESTED = torch.nested.nested_tensor([X[0], X[0]], layout=torch.jagged)
COMPLEX = [nn.Parameter(torch.ones(2, dtype=torch.complex64))]
TRACKED = torch.ones(2, requires_grad=True)
PARAMS = {"params": [TRACKED]}


class Sharded(nn.Linear):
    def set_requires_gradient_sync(self, wanted):
        pass


class NeedsClosure(torch.optim.SGD):
    def step(self, closure):
        return super().step(closure)


class Switched(torch.optim.SGD):
    """An optimizer with a mode, as schedule-free ones have, which steps in training only."""

    def __init__(self, params, lr=0.1, *, training=False):
        super().__init__(params, lr)
        for group in self.param_groups:
            group["train_mode"] = training

    def train(self):
        raise NotImplementedError

    eval = train


class Points(nn.Linear):
    """A model with a loss of its own, whose forward passes are counted."""

    def __init__(self):
        super().__init__(3, 1)
        self.calls = 0

    def loss_sum(self, points):
        self.calls += 1
        return self(points).square().sum(), len(points)


decoder, tokens = partial(Decoder, **SIZES), partial(random_tokens, 2, 8, 50)
WITH_CLOSURE = [kind(LINEAR.parameters()) for kind in (LBFGS, NeedsClosure)]
STEP = {"model": LINEAR, "optimizer": torch.optim.SGD(LINEAR.parameters())}
STEP |= {"loss_sum": Points.loss_sum}
FIT = {"make_model": decoder, "make_batch": tokens, "budget_bytes": 10**9, "progress": False}
RUN = {"make_model": decoder, "make_batch": tokens, "recipe": Recipe()}
LOSS = {"hidden": torch.ones(6, 5), "weight": torch.ones(7, 5), "chunk": 2}
LOSS["targets"] = torch.arange(6)
RATES = {"fp32_flops": 1, "bf16_flops": 1, "link_bytes": 1}
SOFTMAX = {"scores": torch.ones(3), "block": 2}
COST = {"sequence": 64, "head_dim": 64, "kind": "flash"}
BLOCKS = {"model": decoder()}
STAGE = {"forward_time": 1, "backward_time": 1, "output_bytes": 4, "saved_bytes": 4}
OVERHEADS = ("forward_overhead_bytes", "backward_overhead_bytes")

# function, arguments that it accepts, and for each argument the values that it refuses
ONE_BY_ONE = [
    (MemoryMeter, {}, {"budget_bytes": (-1, 0, 1.5, True, "1 GB"), "block_bytes": (0,)}),
    (MemoryMeter, {}, {"model": ([1],), "optimizer": (LINEAR,), "device": (0, True, ["cpu"])}),
    (measure, {"step": print}, {"step": (3,), "model": ("m",), "optimizer": ("adam",)}),
    (measure, {"step": print}, {"warmup": (-1, 0.5), "repeats": (-1, True)}),
    (saved_tensors, {}, {"function": (3,)}),
    (transformer_activation_bytes, LAYER, {"heads": (5, True), "layers": (0,), "batch": (-2,)}),
    (transformer_activation_bytes, LAYER, {"sequence": (1.5,), "hidden": ("64", NAN)}),
    (transformer_activation_bytes, LAYER, {"mask_bytes": (-1,), "recompute": ("x",)}),
    (attention_saved_bytes, HEADS, {"kv_heads": (0, 3), "head_dim": (0,), "kind": ("fast",)}),
    (training_state_bytes, STATE, {"parameters": (0, None, math.inf), "recipe": ("adam",)}),
    (checkpointed_loss, LOSS, {"chunk": (1.5,), "reduction": ("none",), "hidden": (X[0],)}),
    (checkpoint_blocks, BLOCKS, {"model": (torch.sin,), "every": (4,), "first": (0,)}),
    (checkpoint_blocks, BLOCKS, {"blocks": (3, "layers", ["h.*", "blocks.*"])}),
    (
        split,
        {"batch": TWO, "micro_batch_size": 2},
        {
            "batch": (
                {"a": torch.ones(4), "b": (torch.ones(3),)},
                (torch.ones(4), torch.tensor(1.0)),
                {"rows": torch.ones(2), "texts": NESTED},
                torch.nested.nested_tensor([X[0], X[0]]),
                X.to_sparse(),
                {"max_len": 3},
                None,
            ),
            "micro_batch_size": (0, 2.0),
        },
    ),
    (AccumulatedStep, STEP, {"max_norm": (0,), "autocast_dtype": (torch.float32,)}),
    (AccumulatedStep, STEP, {"accumulate": (torch.float32,), "sync": ("never",)}),
    (AccumulatedStep, STEP, {"in_buckets": (True,), "scaler": (1024.0,)}),
    (AccumulatedStep, STEP, {"model": (Sharded(2, 1),)}),
    (AccumulatedStep, STEP | {"in_backward": True}, {"max_norm": (1.0,), "accumulate": ("fp32",)}),
    (AccumulatedStep, STEP | {"in_backward": True}, {"scaler": (torch.amp.GradScaler("cpu"),)}),
    (AccumulatedStep, STEP, {"optimizer": ("SGD", [], [STEP["optimizer"]] * 2, *WITH_CLOSURE)}),
    (
        flash_attention,
        QKV,
        {
            "q": (X[0, 0, 0], NESTED, X.long()),
            "k": (X[..., :4], X[:1], X[0], X.half()),
            "v": (X.to_sparse(), X[:, :, :5], X.to("meta"), X[:, :2]),
        },
    ),
    (flash_attention, dict.fromkeys("qkv", X[0]), {"k": (X[0, :2],), "v": (X,)}),
    (flash_attention, {**QKV, "causal": True}, {"is_causal": (True,)}),
    (flash_attention, QKV, {"scale": (NAN,), "attn_mask": (X,), "dropout_p": (0.1,)}),
    (flash_attention, QKV, {"backend": ("cuda",), "block_q": (0,), "block_k": (2.5,)}),
    (standard_attention, QKV, {"k": (X[:1],)}),
    (attention_cost, COST, {"kind": ("linear",), "pass_": ("both",), "sequence": (0,)}),
    (attention_cost, COST, {"heads": (1.5,), "sram_bytes": (511,), "tile_passes": (2,)}),
    (online_softmax, SOFTMAX, {"block": (0,), "scores": (torch.ones(3, dtype=torch.long),)}),
    (
        Recipe,
        {},
        {
            **dict.fromkeys(("precision", "optimizer", "attention", "checkpoint"), ("fp16",)),
            **dict.fromkeys(("update", "accumulate"), ("fp16",)),
            **dict.fromkeys(("offload_activations", "in_backward"), (1,)),
            **dict.fromkeys(("prefetch", "in_flight"), (-1, 1.0, True)),
            **dict.fromkeys(("head_chunk", "micro_batches"), (0, "2")),
            "offload_optimizer": (1.5, NAN, None),
            "min_bytes": (-1,),
            "page_bytes": (0, None, 2.5),
            "blocks": ("layers.*",),
            "first_blocks": (2,),
            "ranks": (0,),
        },
    ),
    (Recipe, {"micro_batches": 2}, {"micro_batches": (None,), "in_backward": (True,)}),
    (Recipe, SEGMENTS, {"segments": (0, None, 2.0), "schedule_bytes": (2,)}),
    (Recipe, OPTIMAL, {"schedule_bytes": (-3, None), "offload_activations": (True,)}),
    (Recipe, {"checkpoint": "layers"}, {"segments": (2,), "blocks": (3, ())}),
    (Recipe, SELECTIVE, {"offload_activations": (True,), "first_blocks": (0,)}),
    (Recipe, {}, {"shard": ("zero3",)}),
    (Recipe, RANKS, {"shard": ("zero4",), "update": ("foreach",), "in_backward": (True,)}),
    (Recipe, RANKS, {"head_chunk": (8,)}),
    (Recipe, {"in_backward": True}, {"accumulate": ("fp32",)}),
    (Recipe, {"optimizer": "adafactor"}, {"update": ("fused",), "offload_optimizer": (0.5,)}),
    (Recipe, {"optimizer": "adam8bit"}, {"update": ("foreach",)}),
    (Rates, RATES, {"fp32_flops": (0,), "link_bytes": ("fast",), "host_bytes": (-1,)}),
    (
        Rates,
        RATES,
        {
            "flops_share": (1.5,),
            "network_cards": (0, 2.5),
            "link_share": (0,),
            "memory_bytes": (2.5,),
        },
    ),
    (
        fit,
        FIT,
        {
            "budget_bytes": (0, "24GB"),
            "tier": ("disk",),
            "rates": ("B9000",),
            "base": ("bf16",),
            "recipes": ([], [Recipe(), "flash"]),
            "make_model": (3,),
            "make_batch": (torch.ones(2, 9),),
            "loss_sum": ("mean",),
        },
    ),
    (
        estimate,
        {"model": decoder, "batch": tokens, "recipe": Recipe()},
        {"model": (3,), "recipe": ("flash",)},
    ),
    (run, RUN, {"make_model": (3,), "make_batch": (TWO,), "recipe": ("flash",), "store": ("x",)}),
    (build, {"make_model": decoder, "recipe": Recipe()}, {"recipe": (None,)}),
    (build, {"make_model": decoder, "recipe": Recipe()}, {"make_model": (decoder(),)}),
    (deep_mlp, {"depth": 2, "width": 8}, {"depth": (0, 2.5)}),
    (Attention, {"hidden": 16}, {"heads": (3, True)}),
    (DecoderLayer, {"hidden": 16, "heads": 2}, {"feedforward": (0,)}),
    (Decoder, SIZES, {"layers": (0,), "vocabulary": ("50",)}),
    (random_tokens, {"batch": 1, "sequence": 8, "vocabulary": 50}, {"batch": (0,)}),
    (Stage, STAGE, {"forward_time": (-1,), "backward_time": (NAN,), "output_bytes": (0,)}),
    (Stage, STAGE, {"saved_bytes": (3,), **dict.fromkeys(OVERHEADS, (-1,))}),
    (Chain, {"stages": CHAIN.stages, "input_bytes": 1}, {"input_bytes": (0,)}),
    (Chain.uniform, {"length": 3}, {"length": (0,)}),
    (segments, {"chain": CHAIN}, {"count": (4,)}),
    (binomial, {"length": 5, "slots": 1}, {"slots": (0,), "length": (5.0,)}),
    (optimal, {"chain": CHAIN, "budget_bytes": 9}, {"budget_bytes": (5.5,), "chain": ([1],)}),
    (simulate, {"schedule": []}, {"chain": (3,)}),
    (offload_activations, {}, {"store": ("/tmp",), "min_bytes": (-1,), "keep": (["x"],)}),
    (offload_activations, {}, {"prefetch": (1.5,), "in_flight": (-1,)}),
    (
        OffloadedOptimizer,
        PARAMS,
        {"fraction": (1.5, "all"), "page_bytes": (0,), "store": ("/tmp",)},
    ),
    (OffloadedOptimizer, PARAMS, {"base": (LBFGS, NeedsClosure, Switched, nn.Linear)}),
    (DiskStore, {}, {"limit_bytes": (-1,), "directory": ("",), "threads": (0,)}),
    (Prefetcher, {"loader": []}, {"loader": (3,), "depth": (0,)}),
    (samples_of, {}, {"make_batch": (LINEAR,)}),
]

# Errors that do not begin with the argument's name.
OTHERWISE = [
    ("k", lambda: flash_attention(X, X[:, :3], X[:, :3])),
    ("schedule", lambda: ScheduledSequential(ONE, [Forward(0)])),
    ("stages", lambda: ScheduledSequential(nn.Tanh(), ALL)),
    ("mask", lambda: ScheduledSequential(ONE, ALL)(TWO, mask=TRACKED)),
    (
        "k must have a number of heads that divides q's 4, got 0 heads",
        lambda: flash_attention(X, X[:, :0], X[:, :0]),
    ),
    (
        r"k must have as many heads as q, 4 \(or pass enable_gqa=True\), got 2 heads",
        lambda: flash_attention(X, X[:, :2], X[:, :2], enable_gqa=False),
    ),
    ("tokens", lambda: decoder()(torch.zeros(1, 9, dtype=torch.long))),
    ("batch", lambda: estimate(decoder, lambda: 3, Recipe(micro_batches=2))),
    ("model", lambda: estimate(lambda: decoder().to("meta"), tokens, Recipe())),
    ("batch", lambda: estimate(decoder, lambda: tokens().to("meta"), Recipe())),
    ("model", lambda: run(lambda: decoder().to("meta"), tokens, Recipe())),
    ("batch", lambda: run(decoder, lambda: tokens().to("meta"), Recipe())),
    ("batch must contain .* without samples", lambda: samples_of(lambda: torch.empty(0, 3))),
    ("--model must be .* without a function", lambda: named_function("--model", "json")),
    ("--model must be .* is not found", lambda: named_function("--model", "json:absent")),
    ("--model must be .* is 'json'", lambda: named_function("--model", "json:__name__")),
    ("the number of stages", lambda: Chain((), 1)),
    (r"stages\[0\]", lambda: Chain((3,), 1)),
    ("action 0", lambda: Schedule([3])),
    ("the stage of action 0", lambda: Schedule([Forward(1.0)])),
    ("keep of action 1", lambda: Schedule([Forward(0), Forward(0, "some")])),
    ("stages", lambda: Chain.profile(nn.Linear(2, 2), TWO)),
    ("stage 1", lambda: Chain.profile([nn.Tanh(), 3], TWO)),
    ("repeats", lambda: Chain.profile(ONE, TWO, repeats=0)),
    ("x", lambda: Chain.profile(ONE, 3)),
    ("mask", lambda: Chain.profile(ONE, TWO, kwargs={"mask": TRACKED})),
    ("what stage 0 returns", lambda: Chain.profile([nn.LSTM(2, 2)], torch.ones(2, 2))),
    ("a parameter", lambda: OffloadedOptimizer(COMPLEX)),
    (
        "ranks must be 1 .* python -m course_lib.distributed",
        lambda: train_step(LINEAR, None, TWO, Recipe(**RANKS)),
    ),
    # what each check says that all of them share
    ("x must be a whole number, got 1.5", lambda: _check.whole("x", 1.5)),
    ("x must be a whole number, at least 1, got 0", lambda: _check.whole("x", 0, least=1)),
    ("x must be a whole number, at most 8, got 9", lambda: _check.whole("x", 9, most=8)),
    (
        "x must be a whole number of bytes between 1 and 8, got 9",
        lambda: _check.whole("x", 9, 1, 8, of="bytes"),
    ),
    ("x must be a finite number, got nan", lambda: _check.number("x", NAN)),
    ("x must be a number above 0, got '1'", lambda: _check.positive("x", "1")),
    ("x must be 'a' or None, got 1", lambda: _check.one_of("x", 1, ("a", None))),
    (
        r"x must be 0, 1 or 2, got a Tensor of shape \(2, 4, 6, 8\) and torch.float32",
        lambda: _check.one_of("x", X, (0, 1, 2)),
    ),
    ("x must be callable, got a", lambda: _check.function("x", LINEAR.bias, "callable")),
]


def name_of(row):
    return f"{row[0].__qualname__} {' '.join(row[2])}"


@pytest.mark.parametrize(("function", "good", "bad"), ONE_BY_ONE, ids=map(name_of, ONE_BY_ONE))
def test_an_argument_that_is_refused_is_named_with_what_it_got_and_what_it_takes(
    function, good, bad
):
    for name, values in bad.items():
        for value in values:
            with pytest.raises((TypeError, ValueError)) as told:
                function(**{**good, name: value})
            assert fits(name, str(told.value)), (name, value, str(told.value))


@pytest.mark.parametrize(("name", "call"), OTHERWISE, ids=[name for name, _ in OTHERWISE])
def test_what_is_refused_is_named_with_what_it_got_and_what_it_takes(name, call):
    with pytest.raises((TypeError, ValueError)) as told:
        call()
    assert fits(name, str(told.value)), str(told.value)


def fits(name, sentence):
    """Whether one line says `NAME must be ALLOWED, got VALUE`, or that two arguments exclude each
    other; a name that goes on is the sentence's beginning."""
    begins = name if " must " in name else rf"{name}(\[\d+\]| and \w+)? (must|cannot) "
    return re.match(begins, sentence) and re.fullmatch(
        r"[^\n]* must [^\n]+, got [^\n]+|[^\n]* cannot (be combined with|both be) [^\n]+", sentence
    )


# ---- PyTorch's objects that a technique cannot use

points = partial(torch.ones, 2, 3)
BUILT = build(Points, Recipe())


def accumulated(model, optimizer, batch):
    return AccumulatedStep(model, optimizer, Points.loss_sum)([batch])


def by_recipe(model, optimizer, batch):
    return train_step(model, optimizer, batch, Recipe(precision=None))


@pytest.mark.parametrize(
    ("step", "kind"), [(accumulated, Switched), (by_recipe, Switched), (by_recipe, LBFGS)]
)
def test_an_optimizer_in_evaluation_mode_or_with_a_closure_is_refused_before_the_step(step, kind):
    model, points = Points(), torch.ones(2, 3)
    with pytest.raises((TypeError, ValueError), match=r"^optimizer must .*, got a (Swit|LBFGS)"):
        step(model, kind(model.parameters()), points)
    assert model.calls == 0
    assert step(model, Switched(model.parameters(), training=True), points).stepped


def penalty(gradient, x):
    """A function of x in which a gradient is taken."""
    return (gradient(x) * x).sum()


def by_torch_func(x):
    return torch.func.grad(lambda x: x.sin().square().sum())(x)


def by_autograd(x):
    return torch.autograd.grad(x.sin().square().sum(), x, create_graph=True)[0]


def checkpointed(function, x):
    class Block(torch.nn.Module):
        def forward(self, x):
            return function(x)

    model = torch.nn.Sequential(Block())
    with checkpoint_blocks(model, "0"):
        return model(x)


def offloaded(function, x):
    with offload_activations(HostStore(), min_bytes=0):
        return function(x)


def listed(function, x):
    saved_tensors(function, x)
    return function(x)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (checkpointed, "a checkpoint"),
        (offloaded, "offload_activations"),
        (listed, "saved_tensors"),
    ],
)
def test_torch_func_inside_hooks_is_refused_and_the_advice_works(call, name):
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).requires_grad_()
    refusal = rf"^torch\.func\.grad.* cannot be combined with {name}, .*create_graph=True"
    with pytest.raises(RuntimeError, match=refusal):
        call(partial(penalty, by_torch_func), x)
    # nothing of the refused call stays
    [plain] = torch.autograd.grad(penalty(by_torch_func, x), x)
    [found] = torch.autograd.grad(call(partial(penalty, by_autograd), x), x)
    # the derivative of x sin(2x)
    torch.testing.assert_close(found, (2 * x).sin() + 2 * x * (2 * x).cos())
    assert torch.equal(found, plain)


def test_offloading_refuses_to_begin_inside_torch_func_and_leaves_no_hook():
    hooks = len(torch.nn.modules.module._global_forward_pre_hooks)
    with pytest.raises(RuntimeError, match=r"cannot be combined with offload_activations, because"):
        torch.func.grad(partial(offloaded, lambda x: x.sin().sum()))(torch.ones(2))
    assert len(torch.nn.modules.module._global_forward_pre_hooks) == hooks


def test_other_errors_inside_hooks_stay_as_they_are():
    def fail(x):
        raise RuntimeError("of the user")

    for call in (checkpointed, offloaded, listed):
        with pytest.raises(RuntimeError, match=r"^of the user$"):
            call(fail, torch.ones(2, requires_grad=True))


# ---- steps that run and cannot be estimated

MEASURED = r"measure the step on real tensors with course_lib\.budget\.run\(\)"
ROUTER = "as tokens.chunk(experts) does"
KEPT = torch.ones(3)


class Step(nn.Linear):
    """A layer whose loss is a function of its output."""

    def __init__(self, function):
        super().__init__(3, 3)
        self.function = function

    def loss_sum(self, points):
        return self.function(self(points)).sum(), len(points)


class OfNumPy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(x.detach().numpy() * 2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Indexed(nn.Embedding):
    """An embedding with a sparse gradient."""

    def loss_sum(self, points):
        return self(points.long()).sum(), len(points)


class Recurrent(nn.LSTM):
    def loss_sum(self, points):
        return self(points)[0].sum(), len(points)


def routed(x, *, asks):
    """Let two experts compute their own tokens."""
    found = torch.zeros_like(x)
    for mask in (x[:, 0] > 0, x[:, 0] <= 0):
        if not asks or mask.any():
            found[mask] = x[mask] * 2
    return found


def sampled(x):
    return x + torch.distributions.Normal(x, torch.ones_like(x)).mean


def ctc_of_scores(x):
    """Compute a CTC loss whose lengths depend on the scores."""
    lengths = x.detach().argmax(-1).clamp(1, 1)[:1]
    scores = x.log_softmax(-1)[:, None]
    return F.ctc_loss(scores, torch.ones(1, 1).long(), torch.tensor([2]), lengths)


@torch.library.custom_op("course_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


doubled.register_autograd(lambda ctx, gradient: gradient * 2)

# (function that makes a model, part of the refusal, whether a router is mentioned)
UNKNOWN = [
    (partial(Step, lambda x: x * x.mean().item()), "_local_scalar_dense", True),
    (partial(Step, partial(routed, asks=True)), "_local_scalar_dense", True),
    (partial(Step, partial(routed, asks=False)), "nonzero", True),
    (partial(Step, ctc_of_scores), "_ctc_loss", False),
    (partial(Step, OfNumPy.apply), "numpy", False),
    (partial(Step, lambda x: (f"{x.mean():.2f}", x)[1]), "__format__", False),
    (partial(Step, lambda x: x * x.detach().untyped_storage()[0]), "'meta' device", False),
    (partial(Step, sampled), "set_default_validate_args", False),
    (partial(Step, lambda x: x * KEPT), "created earlier .* Create it inside", False),
    (partial(Step, doubled), "register_fake", False),
    (partial(Step, lambda x: torch.sparse.mm(x.to_sparse(), x.t())), "keep the tensor", False),
    (partial(Indexed, 3, 3, sparse=True), "sparse=False", False),
    (partial(Recurrent, 3, 3), "mkldnn", False),
]


@pytest.mark.parametrize(("make_model", "told", "router"), UNKNOWN, ids=[row[1] for row in UNKNOWN])
def test_an_estimate_of_a_step_that_runs_says_how_to_measure_it(
    make_model, told, router, monkeypatch
):
    # `torch.compile` switches this off for the whole process
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    step = make_model, partial(torch.ones, 2, 3), Recipe(optimizer="sgd")
    assert run(*step).result.stepped
    with pytest.raises(ValueError, match=f"{told}.*{MEASURED}|{MEASURED}.*{told}") as raised:
        estimate(*step)
    assert (ROUTER in str(raised.value)) == router


class Lazy(nn.Sequential):
    loss_sum = Points.loss_sum
    calls = 0


def lazy():
    return Lazy(nn.Linear(3, 3), nn.LazyLinear(4))


def called_once():
    model = lazy()
    model(torch.ones(1, 3))
    return model


@pytest.mark.parametrize("act", [estimate, run, partial(fit, progress=False)])
def test_the_advice_for_a_lazy_module_works(act):
    make_batch = partial(torch.ones, 2, 3)
    last = Recipe() if act in (estimate, run) else 10**6
    with pytest.raises(ValueError, match=rf"^make_model must .* lazy .* nn\.Linear.*{MEASURED}"):
        act(lazy, make_batch, last)
    assert act(Points, make_batch, last)  # the layer has its sizes
    assert run(called_once, make_batch, Recipe()).result.stepped


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "act",
    [
        lambda: estimate(Points, points, Recipe()),
        lambda: run(decoder, tokens, Recipe(checkpoint="layers")),
        lambda: fit(Points, points, 10**6, progress=False),
        lambda: by_recipe(*BUILT, points()),
    ],
    ids=["estimate", "run", "fit", "train_step"],
)
def test_a_step_without_gradients_is_refused_and_names_the_cause(act, off):
    with off(), pytest.raises(RuntimeError, match=r"^gradients must be enabled .* torch\.no_grad"):
        act()
    act()


def test_an_accumulated_step_without_gradients_names_the_cause():
    with torch.no_grad(), pytest.raises(TypeError, match=r"gradients are switched off"):
        accumulated(*BUILT, points())
    assert accumulated(*BUILT, points()).stepped


def test_a_tensor_of_too_many_bytes_is_refused_with_its_shape():
    with pytest.raises(ValueError, match=r"^a tensor must have fewer than 2\*\*63 bytes, got one"):
        estimate(partial(Step, lambda x: x.repeat(1, 2**60)), points, Recipe())


@pytest.mark.parametrize("value", ["adamw", "AdamW", torch.optim.AdamW])
def test_an_unknown_optimizer_is_told_which_one_is_adamw(value):
    with pytest.raises(ValueError, match=r"^optimizer must be 'adam' \(AdamW\), .*, got .*[Ww]'?$"):
        Recipe(optimizer=value)


def test_one_sample_allows_one_micro_batch():
    with pytest.raises(ValueError, match=r"must be 1 for a batch of 1 sample, got 2$"):
        estimate(Points, partial(torch.ones, 1, 3), Recipe(micro_batches=2))


class Tagged(torch.Tensor):
    """A subclass of Tensor that is not a parameter."""


class Kept(Points):
    """A layer whose buffer is of another class than PyTorch's."""

    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.Tensor._make_subclass(Tagged, torch.ones(3)))

    def loss_sum(self, points):
        return super().loss_sum(points * self.kept)


def test_an_estimate_refuses_a_tensor_of_another_class_that_run_measures():
    make_batch, recipe = partial(torch.ones, 2, 3), Recipe()
    refusal = rf"^make_model must .*, got Tagged at .*test_refusals\.py, line \d+, .* {MEASURED}"
    with pytest.raises(ValueError, match=refusal):
        estimate(Kept, make_batch, recipe)
    assert run(Kept, make_batch, recipe).result.stepped


# ---- the sentences of all errors

PACKAGE = Path(_check.__file__).parent
# "It takes 1 to 3" and "--a comes with --b" were understood as their opposite; "there is no" is
# right.
FORBIDDEN = re.compile(r"\bit takes\b|\bcomes? with\b|(?<!there )\bis no ", re.IGNORECASE)


def forbidden(source):
    """The strings with a forbidden phrase, but docstrings. Functions that return an error's
    sentence, or put it together, count wherever they are, so all strings of a module are looked at.
    """
    nodes = list(ast.walk(ast.parse(source)))
    bare = {node.value for node in nodes if isinstance(node, ast.Expr)}
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and node not in bare]
    return [text for text in texts if isinstance(text, str) and FORBIDDEN.search(text)]


def test_no_error_or_warning_has_a_phrase_that_misleads():
    built = """raise ValueError(f"{x} is no number; it" f" takes {y}, there is no other")"""
    assert forbidden(built) == [" is no number; it takes "]
    # The strings of lessons are verdicts on answers, too.
    paths = [path for path in PACKAGE.rglob("*.py") if "lesson_" not in path.parent.name]
    found = {path: forbidden(path.read_text("utf-8")) for path in paths}
    assert len(found) > 100 and not any(found.values()), found
