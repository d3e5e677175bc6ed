"""The precisions "autocast" and "bf16-only" of a recipe.

`test_frameworks.py` compares "autocast" with Hugging Face's Trainer."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from measured import assert_measured, feasible
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.testing import assert_close

from course_lib.adapters import with_adapters
from course_lib.budget import RATES, Recipe, build, estimate, fit, train_step
from course_lib.budget.techniques.head import head_of
from course_lib.memory import MemoryMeter, symbolic
from course_lib.models import Decoder, random_tokens
from course_lib.symbolic import Symbolic
from course_lib.symbolic.cuda_autocast import CudaCasts

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

AUTOCAST, ONLY = Recipe("autocast"), Recipe("bf16-only")
decoder = partial(Decoder, vocabulary=61, hidden=32, heads=4, layers=6, sequence=24)
tokens = partial(random_tokens, 5, 24, 61)
LLAMA = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama():
    config = transformers.AutoConfig.for_model(**LLAMA)
    return transformers.AutoModelForCausalLM.from_config(config)


def frozen():
    model = llama()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[:1].requires_grad_(False)
    return model


def rows():
    ids = torch.randint(97, (5, 16), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}


MODELS = {
    "decoder": (decoder, tokens),
    "llama": (llama, rows),
    "frozen": (frozen, rows),
    "adapters on fp32": (lambda: with_adapters(llama, 4, base="fp32")(), rows),
    "adapters on bf16": (lambda: with_adapters(llama, 4, base="bf16")(), rows),
}
DOWN = {"offload_activations": True, "min_bytes": 1000}
CHUNKS = {"head_chunk": 7, "micro_batches": 2}


@pytest.mark.parametrize(
    ("name", "precision", "fields"),
    [
        ("decoder", "autocast", {"checkpoint": "layers", "attention": "flash", **CHUNKS}),
        ("decoder", "autocast", {"checkpoint": "segments", "segments": 2}),
        ("decoder", "bf16-only", {"attention": "flash", "micro_batches": 2, **DOWN}),
        ("llama", "autocast", {"checkpoint": "layers", "micro_batches": 2}),
        ("llama", "autocast", {"attention": "flash", **DOWN}),
        ("frozen", "autocast", {"optimizer": "momentum", "update": "foreach", **CHUNKS}),
        ("adapters on fp32", "autocast", {"checkpoint": "layers"}),
        ("adapters on bf16", "autocast", {"checkpoint": "selective", "in_backward": True}),
    ],
)
def test_estimate_equals_run_under_autocast_and_without_master_weights(name, precision, fields):
    if "adapters" in name:
        pytest.importorskip("peft", reason="peft is not installed")
    make_model, make_batch = MODELS[name]
    recipe = feasible(make_model, make_batch, Recipe(precision, **fields))
    assert_measured(make_model, make_batch, recipe)


def test_autocast_step_equals_one_written_by_hand():
    torch.manual_seed(0)
    model, optimizer = build(decoder, AUTOCAST, lr=0.0, state=True)
    batch, seen = tokens(), []
    optimizer.register_step_pre_hook(lambda *_: seen.append([p.grad for p in model.parameters()]))

    def loss_sum():
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch[:, :-1])
        targets = batch[:, 1:].flatten()
        return F.cross_entropy(logits.float().flatten(0, 1), targets, reduction="sum")

    with MemoryMeter(model, optimizer) as meter:
        loss_sum().backward()
    torch._foreach_div_([p.grad for p in model.parameters()], 5 * 24)
    optimizer.step()
    model.zero_grad()
    train_step(model, optimizer, batch, AUTOCAST)
    by_hand, found = seen
    for mine, theirs in zip(found, by_hand, strict=True):
        assert mine.dtype == torch.float32
        assert_close(mine, theirs)
    backward = estimate(decoder, tokens, AUTOCAST).phase_peaks["backward"]
    assert meter.trace().phase_peaks()["backward"] == backward
    assert "forward" not in vars(model)


def test_head_in_chunks_computes_in_bf16_under_autocast():
    """The decoder computes its loss after `model.forward` has returned."""
    recipe, seen = Recipe("autocast", head_chunk=7), []
    model, optimizer = build(decoder, recipe)
    head = head_of(model, 7)
    forward = head.forward

    def with_dtype(hidden):
        logits = forward(hidden)
        seen.append(logits.dtype)
        return logits

    head.forward = with_dtype
    train_step(model, optimizer, tokens(), recipe)
    assert len(seen) == 2 * -(-5 * 24 // 7) and set(seen) == {torch.bfloat16}


def test_only_bf16_has_bf16_weights_gradients_and_state():
    model, optimizer = build(decoder, ONLY, state=True)
    count = sum(p.numel() for p in model.parameters())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    states = [x for state in optimizer.state.values() for x in state.values() if x.dim()]
    assert {x.dtype for x in states} == {torch.bfloat16}
    at_peak = estimate(decoder, tokens, ONLY).at_peak
    assert at_peak["parameter"] == 2 * count
    assert 4 * count <= at_peak["optimizer"] < 4 * count + 8 * len(optimizer.state)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"precision": "autocast", "ranks": 2}, "'fp32' or 'bf16' when ranks is 2, got 'autocast'"),
        ({"precision": "bf16-only", "ranks": 2}, "when ranks is 2, got 'bf16-only'"),
        ({"precision": "bf16-only", "offload_optimizer": 0.5}, "offload_optimizer must be 0 when"),
        ({"precision": "fp16"}, "'autocast', 'bf16-only' or None, got 'fp16'"),
    ],
)
def test_recipes_that_cannot_be_combined_raise(fields, words):
    with pytest.raises(ValueError, match=words):
        Recipe(**fields)


class Bypass(nn.Linear):
    """Model whose loss does not call its forward pass."""

    def loss(self, x):
        return F.linear(x, self.weight).square().mean()


def test_autocast_raises_for_a_loss_that_bypasses_the_forward_pass():
    with pytest.raises(ValueError, match="does not call its forward pass"):
        estimate(partial(Bypass, 4, 4), partial(torch.ones, 2, 4), AUTOCAST)


def test_autocast_keeps_the_dtypes_of_frozen_weights_only():
    narrow = build(lambda: decoder().bfloat16(), AUTOCAST)[0]
    assert {p.dtype for p in narrow.parameters()} == {torch.float32}
    base = build(lambda: frozen().bfloat16(), AUTOCAST)[0]
    assert {p.dtype for p in base.parameters()} == {torch.bfloat16}


def test_search_under_autocast_finds_recipes_that_equal_estimates():
    few = partial(decoder, layers=2)
    budget = int(0.8 * estimate(few, tokens, AUTOCAST).peak_bytes)
    for found in list(fit(few, tokens, budget, base=AUTOCAST, quick=True, progress=False))[:2]:
        again = estimate(few, tokens, found.recipe)
        assert again == found and found.peak_bytes <= budget


def test_trainer_gets_bf16_and_no_sentence_for_autocast():
    lines = AUTOCAST.as_training_arguments(8)
    assert lines.arguments["bf16"] is True and lines.differences == ()
    assert Recipe("bf16").as_training_arguments(8).recipe == AUTOCAST
    lines = ONLY.as_training_arguments(8)
    assert "bf16" not in lines.arguments and lines.recipe == ONLY
    assert ["dtype=torch.bfloat16" in str(each) for each in lines.differences] == [True]


def test_products_under_autocast_run_at_the_rate_of_bf16():
    small = partial(decoder, layers=1)
    fp32, autocast = (estimate(small, tokens, Recipe(each)) for each in ("fp32", "autocast"))
    rates = RATES["A100"]
    assert autocast.flops == fp32.flops
    ratio = rates.parts(fp32)["compute"] / rates.parts(autocast)["compute"]
    assert ratio == pytest.approx(rates.bf16_flops / rates.fp32_flops)


NARROW = torch.randn(4, 8, 16, dtype=torch.bfloat16)
STATISTICS = torch.zeros(8), torch.ones(8)
ONES, GROUPED = torch.ones(8), torch.zeros(4, 2)
SHAPE = (4, 8, 16, 2)
NORMS = {
    "native_layer_norm": ([16], torch.ones(16), None, 1e-5),
    "native_group_norm": (ONES, ONES, *SHAPE, 1e-5),
    "native_group_norm_backward": (NARROW, GROUPED, GROUPED, ONES, *SHAPE, [True] * 3),
    "native_batch_norm": (None, None, *STATISTICS, True, 0.1, 1e-5),
    "_batch_norm_with_update": (ONES, ONES, *STATISTICS, 0.1, 1e-5),
}


@pytest.mark.parametrize("name", NORMS)
def test_symbolic_norms_of_narrow_inputs_have_the_dtypes_of_real_ones(name):
    def run(copy):
        given = [copy(x) if isinstance(x, torch.Tensor) else x for x in (NARROW, *NORMS[name])]
        return [(x.dtype, x.shape) for x in getattr(torch.ops.aten, name).default(*given)]

    with symbolic():
        found = run(lambda x: torch.empty(x.shape, dtype=x.dtype))
    assert found == run(torch.clone)


# ---- CUDA


def labels(x):
    return torch.zeros(8, dtype=torch.long, device=x.device)


FUNCTIONS = {
    # in fp32 on CUDA
    "exp": torch.exp,
    "pow": lambda x: x**2,
    "power of 2": lambda x: 2**x,
    "1 / x": lambda x: 1 / x,
    "square": torch.square,
    "rsqrt": torch.rsqrt,
    "softplus": F.softplus,
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "rms_norm": lambda x: F.rms_norm(x, (8,)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "softmax": lambda x: F.softmax(x, -1),
    "Tensor.softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "cross_entropy": lambda x: F.cross_entropy(x, labels(x)),
    "nll_loss": lambda x: F.nll_loss(x, labels(x)),
    "mse_loss": lambda x: F.mse_loss(x, x),
    "huber_loss": lambda x: F.huber_loss(x, x),
    "kl_div": lambda x: F.kl_div(x, x, reduction="sum"),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x),
    "normalize": F.normalize,
    "logsumexp": lambda x: x.logsumexp(-1),
    "sum": torch.sum,
    "sum of rows": lambda x: x.sum(1),
    "prod": lambda x: x.prod(0),
    "cumsum": lambda x: x.cumsum(0),
    "norm": torch.norm,
    "vector_norm": torch.linalg.vector_norm,
    "matrix_norm": torch.linalg.matrix_norm,
    "cdist": lambda x: torch.cdist(x, x),
    # in bf16, or in the dtype of the input
    "linear": lambda x: F.linear(x, x),
    "matmul": lambda x: x @ x,
    "gelu": F.gelu,
    "silu": F.silu,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "sqrt": torch.sqrt,
    "sin": torch.sin,
    "mean": torch.mean,
    "var": torch.var,
    "add": lambda x: x + x,
    "embedding": lambda x: F.embedding(labels(x), x),
    "softmax with a dtype": lambda x: F.softmax(x, -1, dtype=torch.float64),
}


@contextmanager
def cuda_autocast():
    """Switch on PyTorch's autocast for CUDA, which torch.autocast does only if there is a GPU."""
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.clear_autocast_cache()


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_functions_under_cuda_autocast_return_the_dtype_of_pytorch(name, dtype):
    with FakeTensorMode(), cuda_autocast():
        there = FUNCTIONS[name](torch.empty(8, 8, device="cuda", dtype=dtype))
    with symbolic(Symbolic("cuda")), torch.autocast("cpu", torch.bfloat16), CudaCasts():
        here = FUNCTIONS[name](torch.empty(8, 8, dtype=dtype))
    assert here.dtype == there.dtype


def test_attention_under_cuda_autocast_runs_a_kernel_for_bf16():
    with symbolic(Symbolic("cuda")), torch.autocast("cpu", torch.bfloat16), CudaCasts():
        q = torch.empty(1, 2, 16, 64, requires_grad=True)
        out = F.scaled_dot_product_attention(q, q, q, torch.zeros(16, 16))
    assert out.dtype == torch.bfloat16 and "Cudnn" in type(out.grad_fn).__name__


def test_estimate_for_cuda_equals_its_extrapolation_and_keeps_norms_in_fp32():
    on_cpu, on_cuda = (estimate(decoder, tokens, AUTOCAST, kind=kind) for kind in ("cpu", "cuda"))
    recipe = Recipe("autocast", checkpoint="layers")
    [found] = fit(decoder, tokens, 1 << 40, recipes=[recipe], kind="cuda", progress=False)
    assert found == estimate(decoder, tokens, recipe, kind="cuda")
    assert on_cuda.at_peak["activation"] > on_cpu.at_peak["activation"]
