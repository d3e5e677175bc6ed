"""Errors of public functions, which name the argument, the allowed values and the value.

Errors that depend on the state of an object are tested with that object.
"""

import math
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import LBFGS

from course_lib.accumulation import AccumulatedStep, split
from course_lib.attention import attention_cost, flash_attention, online_softmax, standard_attention
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
from course_lib.simulated import SimulatedDevice
from course_lib.symbolic import Gpu
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
TANH = nn.Sequential(nn.Tanh())
LINEAR, TWO = nn.Linear(2, 1), torch.ones(2)
CHAIN, ALL = Chain.uniform(3), store_all(Chain.uniform(1))
NESTED = torch.nested.nested_tensor([X[0], X[0]], layout=torch.jagged)
STRIDED_NESTED = torch.nested.nested_tensor([X[0], X[0]])
SPLIT = {"batch": TWO, "micro_batch_size": 2}
COMPLEX = [nn.Parameter(torch.ones(2, dtype=torch.complex64))]
WITH_GRADIENT = torch.ones(2, requires_grad=True)
PARAMS = {"params": [WITH_GRADIENT]}


class Sharded(nn.Linear):
    def set_requires_gradient_sync(self, wanted):
        pass


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
CLOSURE = LBFGS(LINEAR.parameters())
STEP = {"model": LINEAR, "optimizer": torch.optim.SGD(LINEAR.parameters())}
STEP |= {"loss_sum": Points.loss_sum}
FIT = {"make_model": decoder, "make_batch": tokens, "budget_bytes": 10**9, "progress": False}
ESTIMATE = {"model": decoder, "batch": tokens, "recipe": Recipe()}
RUN = {"make_model": decoder, "make_batch": tokens, "recipe": Recipe()}
LOSS = {"hidden": torch.ones(6, 5), "weight": torch.ones(7, 5), "chunk": 2}
LOSS["targets"] = torch.arange(6)
RATES = {"fp32_flops": 1, "bf16_flops": 1, "link_bytes": 1}
SOFTMAX = {"scores": torch.ones(3), "block": 2}
COST = {"sequence": 64, "head_dim": 64, "kind": "flash"}
BLOCKS = {"model": decoder()}
STAGE = {"forward_time": 1, "backward_time": 1, "output_bytes": 4, "saved_bytes": 4}
OVERHEADS = ("forward_overhead_bytes", "backward_overhead_bytes")

# (function, valid arguments, invalid values of single arguments)
INVALID_ARGUMENTS = [
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
    (split, SPLIT, {"batch": ({"a": X, "b": (TWO[:1],)}, (X, TWO.sum()), {"max_len": 3}, None)}),
    (split, SPLIT, {"batch": ({"rows": TWO, "texts": NESTED}, X.to_sparse(), STRIDED_NESTED)}),
    (split, SPLIT, {"micro_batch_size": (0, 2.0)}),
    (AccumulatedStep, STEP, {"max_norm": (0,), "autocast_dtype": (torch.float32,)}),
    (AccumulatedStep, STEP, {"accumulate": (torch.float32,), "sync": ("never",)}),
    (AccumulatedStep, STEP, {"in_buckets": (True,), "scaler": (1024.0,)}),
    (AccumulatedStep, STEP, {"model": (Sharded(2, 1),)}),
    (AccumulatedStep, STEP | {"in_backward": True}, {"max_norm": (1.0,), "accumulate": ("fp32",)}),
    (AccumulatedStep, STEP | {"in_backward": True}, {"scaler": (torch.amp.GradScaler("cpu"),)}),
    (AccumulatedStep, STEP, {"optimizer": ("SGD", [], [STEP["optimizer"]] * 2, CLOSURE)}),
    (flash_attention, QKV, {"q": (X[0, 0, 0], NESTED, X.long())}),
    (flash_attention, QKV, {"k": (X[..., :4], X[:1], X[0], X.half())}),
    (flash_attention, QKV, {"v": (X.to_sparse(), X[:, :, :5], X.to("meta"), X[:, :2])}),
    (flash_attention, dict.fromkeys("qkv", X[0]), {"k": (X[0, :2],), "v": (X,)}),
    (flash_attention, {**QKV, "causal": True}, {"is_causal": (True,)}),
    (flash_attention, QKV, {"scale": (NAN,), "attn_mask": (X,), "dropout_p": (0.1,)}),
    (flash_attention, QKV, {"backend": ("cuda",), "block_q": (0,), "block_k": (2.5,)}),
    (standard_attention, QKV, {"k": (X[:1],)}),
    (attention_cost, COST, {"kind": ("linear",), "pass_": ("both",), "sequence": (0,)}),
    (attention_cost, COST, {"heads": (1.5,), "sram_bytes": (511,), "tile_passes": (2,)}),
    (online_softmax, SOFTMAX, {"block": (0,), "scores": (torch.ones(3, dtype=torch.long),)}),
    (Recipe, {}, dict.fromkeys(("precision", "optimizer", "attention", "checkpoint"), ("fp16",))),
    (Recipe, {}, dict.fromkeys(("update", "accumulate"), ("fp16",))),
    (Recipe, {}, dict.fromkeys(("offload_activations", "in_backward"), (1,))),
    (Recipe, {}, dict.fromkeys(("prefetch", "in_flight"), (-1, 1.0, True))),
    (Recipe, {}, dict.fromkeys(("head_chunk", "micro_batches"), (0, "2"))),
    (Recipe, {}, {"offload_optimizer": (1.5, NAN, None), "page_bytes": (0, None, 2.5)}),
    (Recipe, {}, {"min_bytes": (-1,), "ranks": (0,)}),
    (Recipe, {}, {"blocks": ("layers.*",), "first_blocks": (2,)}),
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
    (Rates, RATES, {"flops_share": (1.5,), "network_cards": (0, 2.5)}),
    (Rates, RATES, {"link_share": (0,), "memory_bytes": (2.5,)}),
    (fit, FIT, {"budget_bytes": (0, "24GB"), "tier": ("disk",), "rates": ("B9000",)}),
    (fit, FIT, {"base": ("bf16",), "recipes": ([], [Recipe(), "flash"]), "loss_sum": ("mean",)}),
    (fit, FIT, {"make_model": (3,), "make_batch": (torch.ones(2, 9),)}),
    (estimate, ESTIMATE, {"model": (3,), "recipe": ("flash",)}),
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
    (OffloadedOptimizer, PARAMS, {"fraction": (1.5, "all"), "page_bytes": (0,)}),
    (OffloadedOptimizer, PARAMS, {"base": (LBFGS, Switched, nn.Linear), "store": ("/tmp",)}),
    (DiskStore, {}, {"limit_bytes": (-1,), "directory": ("",), "threads": (0,)}),
    (Prefetcher, {"loader": []}, {"loader": (3,), "depth": (0,)}),
    (samples_of, {}, {"make_batch": (LINEAR,)}),
    (SimulatedDevice, {}, {"flops_per_second": (0,)}),
    (Gpu, {}, {"capability": (9, (9.0, 0)), "torch": ("2.13",)}),
]

# (beginning of the error, call that raises it)
INVALID_CALLS = [
    ("k", lambda: flash_attention(X, X[:, :3], X[:, :3])),
    ("schedule", lambda: ScheduledSequential(TANH, [Forward(0)])),
    ("stages", lambda: ScheduledSequential(nn.Tanh(), ALL)),
    ("mask", lambda: ScheduledSequential(TANH, ALL)(TWO, mask=WITH_GRADIENT)),
    (
        "k must .* 4 heads of q, got 0 heads",
        lambda: flash_attention(X, X[:, :0], X[:, :0]),
    ),
    (
        "k must have 4 heads, the same",
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
    ("--model must be .* not a function", lambda: named_function("--model", "json:__name__")),
    ("the number of stages", lambda: Chain((), 1)),
    (r"stages\[0\]", lambda: Chain((3,), 1)),
    ("action 0", lambda: Schedule([3])),
    ("the stage of action 0", lambda: Schedule([Forward(1.0)])),
    ("keep of action 1", lambda: Schedule([Forward(0), Forward(0, "some")])),
    ("stages", lambda: Chain.profile(nn.Linear(2, 2), TWO)),
    ("stage 1", lambda: Chain.profile([nn.Tanh(), 3], TWO)),
    ("repeats", lambda: Chain.profile(TANH, TWO, repeats=0)),
    ("x", lambda: Chain.profile(TANH, 3)),
    ("mask", lambda: Chain.profile(TANH, TWO, kwargs={"mask": WITH_GRADIENT})),
    ("the result of stage 0", lambda: Chain.profile([nn.LSTM(2, 2)], torch.ones(2, 2))),
    ("a parameter", lambda: OffloadedOptimizer(COMPLEX)),
    ("each option of a Sim.* must be .*'seconds'", lambda: SimulatedDevice(seconds=1)),
    ("ranks must be 1 .* -m course_lib", lambda: train_step(LINEAR, None, TWO, Recipe(**RANKS))),
    (r"optimizer must be 'adam' \(AdamW\)", lambda: Recipe(optimizer=torch.optim.AdamW)),
    (
        "micro_batches must be 1 for a batch of 1 sample",
        lambda: estimate(Points, partial(torch.ones, 1, 3), Recipe(micro_batches=2)),
    ),
    (
        r"a tensor must have fewer than 2\*\*63 bytes",
        lambda: estimate(partial(Step, lambda x: x.repeat(1, 2**60)), points, Recipe()),
    ),
]


def name_of(row):
    return f"{row[0].__qualname__} {' '.join(row[2])}"


def assert_error_names(beginning, call):
    """Check that a call raises an error of one line, `NAME must be ALLOWED, got VALUE`, or that two
    arguments cannot be combined. `beginning` is the name or the beginning of the error."""
    if " must " not in beginning:
        beginning += r"(\[\d+\]| and \w+)?`? (must|cannot) "
    with pytest.raises((TypeError, ValueError), match=f"^`?{beginning}") as raised:
        call()
    sentence = r".* must .+, got .+|.* cannot (be combined with|both be) .+"
    assert re.fullmatch(sentence, str(raised.value))


@pytest.mark.parametrize(
    ("function", "valid", "invalid"), INVALID_ARGUMENTS, ids=map(name_of, INVALID_ARGUMENTS)
)
def test_invalid_argument_error_names_argument_and_value(function, valid, invalid):
    for name, values in invalid.items():
        for value in values:
            assert_error_names(name, partial(function, **{**valid, name: value}))


@pytest.mark.parametrize(
    ("beginning", "call"), INVALID_CALLS, ids=[beginning for beginning, _ in INVALID_CALLS]
)
def test_invalid_call_error_names_argument_and_value(beginning, call):
    assert_error_names(beginning, call)


# ---- objects of PyTorch that a technique cannot use

points = partial(torch.ones, 2, 3)
BUILT = build(Points, Recipe())


def accumulated(model, optimizer, batch):
    return AccumulatedStep(model, optimizer, Points.loss_sum)([batch])


def by_recipe(model, optimizer, batch):
    return train_step(model, optimizer, batch, Recipe(precision=None))


@pytest.mark.parametrize(
    ("step", "kind"), [(accumulated, Switched), (by_recipe, Switched), (by_recipe, LBFGS)]
)
def test_step_rejects_unusable_optimizer_before_forward(step, kind):
    """Test an optimizer in evaluation mode and one that needs a closure."""
    model, batch = Points(), points()
    with pytest.raises((TypeError, ValueError), match=r"^optimizer must .*, got a (Swit|LBFGS)"):
        step(model, kind(model.parameters()), batch)
    assert model.calls == 0
    assert step(model, Switched(model.parameters(), training=True), batch).stepped


def penalty(gradient, x):
    """Return a function of x that contains a gradient."""
    return (gradient(x) * x).sum()


def gradient_by_torch_func(x):
    return torch.func.grad(lambda x: x.sin().square().sum())(x)


def gradient_by_autograd(x):
    return torch.autograd.grad(x.sin().square().sum(), x, create_graph=True)[0]


def with_checkpoint(function, x):
    class Block(torch.nn.Module):
        def forward(self, x):
            return function(x)

    model = torch.nn.Sequential(Block())
    with checkpoint_blocks(model, "0"):
        return model(x)


def with_offload(function, x):
    with offload_activations(HostStore(), min_bytes=0):
        return function(x)


def with_saved_tensors(function, x):
    saved_tensors(function, x)
    return function(x)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (with_checkpoint, "a checkpoint"),
        (with_offload, "offload_activations"),
        (with_saved_tensors, "saved_tensors"),
    ],
)
def test_techniques_with_saved_tensor_hooks_reject_torch_func_grad(call, name):
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).requires_grad_()
    message = rf"^torch\.func\.grad.* cannot be combined with {name}, .*create_graph=True"
    with pytest.raises(RuntimeError, match=message):
        call(partial(penalty, gradient_by_torch_func), x)
    # the call that failed left no hook behind
    [plain] = torch.autograd.grad(penalty(gradient_by_torch_func, x), x)
    [found] = torch.autograd.grad(call(partial(penalty, gradient_by_autograd), x), x)
    # the derivative of x sin(2x)
    torch.testing.assert_close(found, (2 * x).sin() + 2 * x * (2 * x).cos())
    assert torch.equal(found, plain)


def test_user_errors_under_saved_tensor_hooks_are_raised_unchanged():
    def fail(x):
        raise RuntimeError("of the user")

    for call in (with_checkpoint, with_offload, with_saved_tensors):
        with pytest.raises(RuntimeError, match=r"^of the user$"):
            call(fail, torch.ones(2, requires_grad=True))


# ---- steps that run but cannot be estimated

MEASURED = r"measure the step on real tensors with course_lib\.budget\.run\(\)"
ROUTER_ADVICE = "as tokens.chunk(experts) does"
OLDER = torch.ones(3)


class Step(nn.Linear):
    """Model whose loss is a function of its layer's output."""

    def __init__(self, function):
        super().__init__(3, 3)
        self.function = function

    def loss_sum(self, points):
        return self.function(self(points)).sum(), len(points)


class SparseEmbedding(nn.Embedding):
    def loss_sum(self, points):
        return self(points.long()).sum(), len(points)


class Recurrent(nn.LSTM):
    def loss_sum(self, points):
        return self(points)[0].sum(), len(points)


def routed(x):
    """Let an expert compute its own tokens."""
    mask = x[:, 0] > 0
    result = torch.zeros_like(x)
    result[mask] = x[mask] * 2
    return result


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


class TensorSubclass(torch.Tensor):
    """A subclass of Tensor that is not a parameter."""


class SubclassBuffer(Points):
    def __init__(self):
        super().__init__()
        self.register_buffer("ones", torch.Tensor._make_subclass(TensorSubclass, torch.ones(3)))

    def loss_sum(self, points):
        return super().loss_sum(points * self.ones)


# (function that makes a model, part of the error, whether the error has advice for a router)
NOT_ESTIMATED = [
    (partial(Step, lambda x: x * x.mean().item()), "_local_scalar_dense", True),
    (partial(Step, routed), "nonzero", True),
    (partial(Step, ctc_of_scores), "_ctc_loss", False),
    (partial(Step, lambda x: (x.detach().numpy(), x)[1]), "numpy", False),
    (partial(Step, lambda x: (f"{x.mean():.2f}", x)[1]), "__format__", False),
    (partial(Step, lambda x: x * x.detach().untyped_storage()[0]), "'meta' device", False),
    (partial(Step, sampled), "set_default_validate_args", False),
    (partial(Step, lambda x: x * OLDER), "created before the estimate.* Create this", False),
    (partial(Step, doubled), "register_fake", False),
    (partial(Step, lambda x: torch.sparse.mm(x.to_sparse(), x.t())), "keep the tensor", False),
    (partial(SparseEmbedding, 3, 3, sparse=True), "sparse=False", False),
    (partial(Recurrent, 3, 3), "mkldnn", False),
    (SubclassBuffer, r"subclass TensorSubclass at .*test_argument_errors\.py, line \d+", False),
]


@pytest.mark.parametrize(
    ("make_model", "reason", "router"), NOT_ESTIMATED, ids=[row[1] for row in NOT_ESTIMATED]
)
def test_estimate_of_unsupported_step_raises_error_that_recommends_measurement(
    make_model, reason, router, monkeypatch
):
    # `torch.compile` switches this off for the whole process
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    step = make_model, points, Recipe(optimizer="sgd")
    assert run(*step).result.stepped
    with pytest.raises(ValueError, match=f"{reason}.*{MEASURED}|{MEASURED}.*{reason}") as raised:
        estimate(*step)
    assert (ROUTER_ADVICE in str(raised.value)) == router


class LazyModel(nn.Sequential):
    loss_sum = Points.loss_sum
    calls = 0

    def __init__(self):
        super().__init__(nn.Linear(3, 3), nn.LazyLinear(4))

    @classmethod
    def initialized(cls):
        model = cls()
        model(torch.ones(1, 3))
        return model


@pytest.mark.parametrize("act", [estimate, run, partial(fit, progress=False)])
def test_uninitialized_lazy_module_raises_with_advice(act):
    last = Recipe() if act in (estimate, run) else 10**6
    with pytest.raises(ValueError, match=r"^make_model must .* lazy .* nn\.Linear.*budget\.run"):
        act(LazyModel, points, last)
    assert act(Points, points, last)  # with an ordinary nn.Linear
    assert run(LazyModel.initialized, points, Recipe()).result.stepped


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "act",
    [
        lambda: estimate(Points, points, Recipe()),
        lambda: run(decoder, tokens, Recipe(checkpoint="layers")),
        lambda: fit(Points, points, 10**6, progress=False),
        lambda: by_recipe(*BUILT, points()),
        lambda: accumulated(*BUILT, points()),
    ],
    ids=["estimate", "run", "fit", "train_step", "AccumulatedStep"],
)
def test_step_under_no_grad_or_inference_mode_raises_with_cause(act, off):
    message = r"^gradients must be enabled .* torch\.no_grad|gradients are switched off"
    with off(), pytest.raises((RuntimeError, TypeError), match=message):
        act()
    act()
