"""Meters, checkpoints and training steps with `torch.compile`, against uncompiled steps."""

import warnings
from itertools import accumulate

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._prims import rng_prims
from torch.testing import assert_close
from training_steps import CountingBackend, allocations, bytes_of, empty_gradients

from course_lib.budget import Recipe, build, train_step
from course_lib.checkpoint import checkpoint_blocks
from course_lib.memory import MemoryBudgetExceeded, MemoryMeter, measure
from course_lib.memory.measurement import flop_counter
from course_lib.models import Decoder, DecoderLayer, random_tokens
from course_lib.schedule import schedule_blocks, sqrt_segments

aten = torch.ops.aten
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def reset_compiler():
    yield
    torch.compiler.reset()


class Backend(CountingBackend):
    """Backend that runs forward and backward graphs unchanged, and counts the forward graphs."""

    def __call__(self, graph, inputs):
        count = super().__call__
        compile_ = aot_autograd(
            fw_compiler=lambda graph, inputs: count(graph, inputs),
            bw_compiler=lambda graph, inputs: graph,
            partition_fn=min_cut_rematerialization_partition,
        )
        return compile_(graph, inputs)


# ---- meters


@pytest.mark.parametrize("compiled_before", [True, False])
def test_measure_runs_compiled_step_compiled_in_every_run(compiled_before):
    backend, model, x, calls = Backend(), DecoderLayer(32, 2), torch.randn(2, 4, 32), []
    function = torch.compile(model, backend=backend, fullgraph=True)

    def step():
        calls.append(1)
        function(x).sum().backward()

    if compiled_before:
        step()
    measure(step, model=model if compiled_before else None, repeats=1)
    step()
    assert (backend.compiled, backend.runs) == (1, len(calls))


def test_meter_peak_of_compiled_step_equals_allocator_peak():
    model, x = nn.Sequential(*[DecoderLayer(32, 2) for _ in range(3)]), torch.randn(8, 32, 32)
    function = torch.compile(model, backend="aot_eager_decomp_partition")
    step, eager = (lambda f=f: f(x).sum().backward() for f in (function, model))
    step()
    empty_gradients(model)
    expected = bytes_of(model.parameters()) + max(accumulate(allocations(step)))
    empty_gradients(model)
    found, plain = (measure(f, model=model, repeats=1) for f in (step, eager))
    assert found.allocator_peak_bytes == expected
    assert 0 <= found.workspace_bytes <= 64  # constants of the graph, 4 bytes each
    assert found.peak_bytes != plain.peak_bytes
    assert found.flops == plain.flops
    assert any("torch.compile" in note for note in found.notes)
    assert plain.notes == ()


def test_meter_counts_buffers_allocated_by_inductor_code(monkeypatch, tmp_path):
    # For matrix products alone Inductor generates Python, which needs no C++ compiler.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    model = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(3)])
    x, function = torch.randn(64, 32), torch.compile(model)
    allocate = torch._C._dynamo.guards._empty_strided_cpu

    def step():
        function(x).sum().backward()

    with MemoryMeter(model) as first:
        step()
    empty_gradients(model)
    found = measure(step, model=model, repeats=1)
    assert first.peak_bytes == found.peak_bytes == found.allocator_peak_bytes
    # The outputs of the first two layers are kept for backward.
    assert found.at_peak["activation"] >= 2 * x.nbytes
    assert torch._C._dynamo.guards._empty_strided_cpu is allocate
    torch.compiler.reset()
    meter = MemoryMeter(model, budget_bytes=bytes_of(model.parameters()) + x.nbytes)
    with pytest.raises(MemoryBudgetExceeded, match="compiled code"), meter:
        torch.compile(model)(x)


# ---- checkpoints and steps


def decoder():
    return Decoder(vocabulary=40, hidden=16, layers=2, heads=2, sequence=8, seed=0)


def compile_blocks(model, **options):
    for layer in model.layers:
        layer.compile(**options)


def wrap_blocks(model, **options):
    model.layers = nn.ModuleList(torch.compile(layer, **options) for layer in model.layers)


TOKENS = random_tokens(8, 8, 40)


def gradients_and_meter(model):
    """Return the gradients and the meter of the model's second step."""
    for _ in range(2):  # the first step compiles
        model.zero_grad()
        with MemoryMeter(model) as meter:
            model.loss(TOKENS).backward()
    return [p.grad for p in model.parameters()], meter


@pytest.mark.parametrize(
    ("compile_", "compiled_first", "policy"),
    [
        (nn.Module.compile, False, [aten.addmm.default]),
        (compile_blocks, False, None),
        (wrap_blocks, True, [aten.addmm.default]),
    ],
)
def test_checkpoints_lower_the_peak_of_compiled_blocks(compile_, compiled_first, policy):
    backend, model = Backend(), decoder()
    plain, _ = gradients_and_meter(decoder())
    compile_(model, backend=backend, fullgraph=True)
    _, without = gradients_and_meter(model)
    torch.compiler.reset()
    if not compiled_first:
        model = decoder()
    handle = checkpoint_blocks(model, "layers.*", policy=policy)
    if not compiled_first:
        compile_(model, backend=backend, fullgraph=True)
    runs = backend.runs
    found, meter = gradients_and_meter(model)
    handle.check()
    assert_close(found, plain)
    assert meter.ran_compiled and backend.runs > runs
    assert meter.peak_bytes < without.peak_bytes


@pytest.mark.parametrize(
    ("compile_", "recipe"),
    [
        (nn.Module.compile, Recipe(checkpoint="selective", micro_batches=2)),
        (compile_blocks, Recipe(checkpoint="segments", segments=2)),
        (wrap_blocks, Recipe(checkpoint="optimal", schedule_bytes=10**9)),
        (wrap_blocks, Recipe(offload_activations=True, min_bytes=1000)),
    ],
)
def test_train_step_of_compiled_decoder_equals_uncompiled_step(recipe, compile_):
    model, optimizer = build(decoder, Recipe())
    train_step(model, optimizer, TOKENS, Recipe())
    plain = [p.detach() for p in model.parameters()]
    backend = Backend()
    model, optimizer = build(decoder, recipe)
    compile_(model, backend=backend, fullgraph=True)
    train_step(model, optimizer, TOKENS, recipe)
    assert_close(list(model.parameters()), plain, rtol=0, atol=1e-4)
    assert backend.runs > 0


def test_train_step_warns_if_loss_of_compiled_model_runs_uncompiled():
    backend = Backend()
    model, optimizer = build(lambda: torch.compile(decoder(), backend=backend), Recipe())
    with pytest.warns(UserWarning, match=r"Decoder.loss_sum.*model.compile\(\)"):
        train_step(model, optimizer, TOKENS, Recipe())
    assert backend.runs == 0
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the step runs uncompiled")
        train_step(
            model, optimizer, TOKENS, Recipe(), loss_sum=lambda m, t: (m(t[:, :-1]).sum(), 1)
        )
    assert backend.runs == 1


def test_compiling_scheduled_blocks_with_fullgraph_raises_with_advice():
    model, tokens = decoder(), TOKENS[:, :-1]
    plain = model(tokens)
    with schedule_blocks(model, "layers.*", schedule=sqrt_segments):
        model.compile(backend=Backend(), fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="compile the blocks instead"):
            model(tokens)
        model.compile(backend=Backend())
        assert_close(model(tokens), plain)


@pytest.mark.parametrize("operator", ["run_and_save_rng_state", "run_with_rng_state"])
def test_flops_include_matrix_products_inside_random_state_wrappers(operator):
    call, a, b = getattr(rng_prims, operator), torch.randn(3, 4), torch.randn(4, 5)
    state = [torch.get_rng_state()] if operator == "run_with_rng_state" else []
    with flop_counter() as counter, MemoryMeter() as meter:
        call(*state, aten.mm.default, a, b)
    assert counter.get_total_flops() == meter.flops == 2 * 3 * 4 * 5
