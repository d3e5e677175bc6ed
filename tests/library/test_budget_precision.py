"""The precisions "autocast" and "bf16-only" of a recipe.

`test_budget_scripts_trainer.py` compares "autocast" with Hugging Face's Trainer."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from estimate_checks import assert_measured, feasible
from hugging_face_models import LLAMA, text
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.testing import assert_close

from course_lib.adapters import with_adapters
from course_lib.budget import Recipe, build, estimate, fit, train_step
from course_lib.memory import symbolic
from course_lib.models import Decoder, random_tokens
from course_lib.symbolic import Symbolic
from course_lib.symbolic.cuda_autocast import CudaCasts

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

AUTOCAST, ONLY = Recipe("autocast"), Recipe("bf16-only")
decoder = partial(Decoder, vocabulary=61, hidden=32, heads=4, layers=6, sequence=24)
tokens = partial(random_tokens, 5, 24, 61)


def frozen():
    model = LLAMA()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[:1].requires_grad_(False)
    return model


class Norms(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GroupNorm(2, 8))

    def loss_sum(self, x):
        return self(x).square().sum(), len(x)


rows = partial(text, "none", 5)
MODELS = {
    "decoder": (partial(decoder, layers=3), tokens),
    "llama": (LLAMA, rows),
    "frozen": (frozen, rows),
    "norms": (Norms, partial(torch.randn, 4, 3, 8, 8)),
    "adapters on fp32": (lambda: with_adapters(LLAMA, 4, base="fp32")(), rows),
    "adapters on bf16": (lambda: with_adapters(LLAMA, 4, base="bf16")(), rows),
}
OFFLOAD = {"offload_activations": True, "min_bytes": 1000}
CHUNKS = {"head_chunk": 7, "micro_batches": 2}


@pytest.mark.parametrize(
    ("name", "precision", "fields"),
    [
        ("decoder", "autocast", {"checkpoint": "layers", "attention": "flash", **CHUNKS}),
        ("decoder", "autocast", {"checkpoint": "segments", "segments": 2}),
        ("decoder", "bf16-only", {"attention": "flash", "micro_batches": 2, **OFFLOAD}),
        ("llama", "autocast", {"attention": "flash", **OFFLOAD}),
        ("frozen", "autocast", {"optimizer": "momentum", "update": "foreach", **CHUNKS}),
        ("norms", "autocast", {}),
        ("adapters on fp32", "autocast", {"checkpoint": "layers"}),
        ("adapters on bf16", "autocast", {"checkpoint": "selective", "in_backward": True}),
    ],
)
def test_estimate_equals_measurement_for_autocast_and_pure_bf16(name, precision, fields):
    if "adapters" in name:
        pytest.importorskip("peft", reason="peft is not installed")
    make_model, make_batch = MODELS[name]
    recipe = feasible(make_model, make_batch, Recipe(precision, **fields))
    assert_measured(make_model, make_batch, recipe, extrapolated=True)


def test_autocast_step_equals_handwritten_autocast():
    torch.manual_seed(0)
    model, optimizer = build(decoder, AUTOCAST, lr=0.0, state=True)
    batch, steps = tokens(), []
    optimizer.register_step_pre_hook(lambda *_: steps.append([p.grad for p in model.parameters()]))

    def loss_sum():
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch[:, :-1])
        targets = batch[:, 1:].flatten()
        return F.cross_entropy(logits.float().flatten(0, 1), targets, reduction="sum")

    loss_sum().backward()
    torch._foreach_div_([p.grad for p in model.parameters()], 5 * 24)
    optimizer.step()
    model.zero_grad()
    train_step(model, optimizer, batch, AUTOCAST)
    handwritten, found = steps
    assert {gradient.dtype for gradient in found} == {torch.float32}
    assert_close(found, handwritten)
    assert "forward" not in vars(model)


def test_bf16_only_recipe_stores_weights_and_optimizer_state_in_bf16():
    model, optimizer = build(decoder, ONLY, state=True)
    states = [x for state in optimizer.state.values() for x in state.values() if x.dim()]
    assert {x.dtype for x in (*model.parameters(), *states)} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"precision": "autocast", "ranks": 2}, "'fp32' or 'bf16' when ranks is 2, got 'autocast'"),
        ({"precision": "bf16-only", "ranks": 2}, "when ranks is 2, got 'bf16-only'"),
        ({"precision": "bf16-only", "offload_optimizer": 0.5}, "offload_optimizer must be 0 when"),
        ({"precision": "fp16"}, "'autocast', 'bf16-only' or None, got 'fp16'"),
    ],
)
def test_recipe_rejects_invalid_precision_combinations(fields, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**fields)


class Bypass(nn.Linear):
    def loss(self, x):
        return F.linear(x, self.weight).square().mean()


def test_autocast_rejects_loss_that_bypasses_forward():
    with pytest.raises(ValueError, match=r"but the loss of .* without such a call"):
        estimate(partial(Bypass, 4, 4), partial(torch.ones, 2, 4), AUTOCAST)


def test_autocast_recipe_preserves_dtype_of_model_with_frozen_weights():
    for make, dtype in ((decoder, torch.float32), (frozen, torch.bfloat16)):
        model, _ = build(lambda make=make: make().bfloat16(), AUTOCAST)
        assert {p.dtype for p in model.parameters()} == {dtype}


# ---- CUDA


def labels(x):
    return torch.zeros(8, dtype=torch.long, device=x.device)


FUNCTIONS = {
    # these use fp32 on CUDA, or bf16, or the dtype of the input
    **{name: getattr(torch, name) for name in ("exp", "square", "rsqrt", "sum", "norm", "sqrt")},
    **{name: getattr(F, name) for name in ["softplus", "normalize", "gelu", "silu"]},
    "pow": lambda x: x**2,
    "power of 2": lambda x: 2**x,
    "1 / x": lambda x: 1 / x,
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
    "logsumexp": lambda x: x.logsumexp(-1),
    "sum of rows": lambda x: x.sum(1),
    "prod": lambda x: x.prod(0),
    "cumsum": lambda x: x.cumsum(0),
    "vector_norm": torch.linalg.vector_norm,
    "matrix_norm": torch.linalg.matrix_norm,
    "cdist": lambda x: torch.cdist(x, x),
    "linear": lambda x: F.linear(x, x),
    "matmul": lambda x: x @ x,
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
def test_emulated_cuda_autocast_returns_same_dtypes_as_pytorch(name, dtype):
    with FakeTensorMode(), cuda_autocast():
        expected = FUNCTIONS[name](torch.empty(8, 8, device="cuda", dtype=dtype))
    with symbolic(Symbolic("cuda")), torch.autocast("cpu", torch.bfloat16), CudaCasts():
        found = FUNCTIONS[name](torch.empty(8, 8, dtype=dtype))
    assert found.dtype == expected.dtype


def test_attention_under_emulated_cuda_autocast_selects_bf16_cudnn_kernel():
    with symbolic(Symbolic("cuda")), torch.autocast("cpu", torch.bfloat16), CudaCasts():
        q = torch.empty(1, 2, 16, 64, requires_grad=True)
        out = F.scaled_dot_product_attention(q, q, q, torch.zeros(16, 16))
    assert out.dtype == torch.bfloat16 and "Cudnn" in type(out.grad_fn).__name__


def test_extrapolated_autocast_estimate_for_cuda_equals_estimate_of_all_blocks():
    on_cpu, on_cuda = (estimate(decoder, tokens, AUTOCAST, kind=kind) for kind in ("cpu", "cuda"))
    recipe = Recipe("autocast", checkpoint="layers")
    [found] = fit(decoder, tokens, 1 << 40, recipes=[recipe], kind="cuda", progress=False)
    assert found == estimate(decoder, tokens, recipe, kind="cuda")
    assert on_cuda.at_peak["activation"] > on_cpu.at_peak["activation"]
