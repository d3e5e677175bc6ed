"""Compiled code under a meter, under `measure` and in a symbolic step."""

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from training_steps import at_end, empty_gradients, run_under

from course_lib.memory import MemoryBudgetExceeded, MemoryMeter, compiler, measure, symbolic
from course_lib.memory.allocator import allocator_peak, workspace_by_operator
from course_lib.memory.measurement import flop_counter


def test_a_function_compiled_with_aot_eager_counts():
    model, x = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)), torch.randn(16, 32)
    found = []
    for function in (torch.compile(model, backend="aot_eager"), model):
        function(x).sum().backward()
        empty_gradients(model)
        with MemoryMeter(model) as meter:
            function(x).sum().backward()
        found.append(at_end(meter))
        empty_gradients(model)
    torch._dynamo.reset()
    assert found[0] == found[1]


class Counting:
    """A backend that counts how often it compiles, and how often its code runs."""

    def __init__(self):
        self.compiled = self.runs = 0

    def __call__(self, graph, inputs):
        self.compiled += 1

        def run(*args):
            self.runs += 1
            return graph(*args)

        return run


def gated(layers=3):
    """Blocks for which the compiler saves less than autograd does."""

    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x):
            return x + F.gelu(self.linear(x)) * torch.sigmoid(x)

    return nn.Sequential(*[Gate() for _ in range(layers)])


@contextmanager
def looked_at_with(kind, model, step):
    """Look at a step in one of the ways in which the library looks at steps."""
    if kind == "measure":
        measure(step, model=model, repeats=1)
    elif kind == "measure without a model":
        measure(step, repeats=1)
    elif kind == "meter and counter":
        with flop_counter(), MemoryMeter(model):
            step()
    else:
        workspace_by_operator(lambda *modes: run_under(step, *modes), torch.device("cpu"))
    yield


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize(
    "kind", ["measure", "measure without a model", "meter and counter", "workspace"]
)
@pytest.mark.parametrize("first", [False, True], ids=["compiled before", "compiled by the look"])
def test_compiled_code_stays_compiled_when_looked_at(kind, fullgraph, first):
    backend, model, x = Counting(), gated(), torch.randn(8, 32)
    function = torch.compile(model, backend=backend, fullgraph=fullgraph)

    def step():
        function(x).sum().backward()

    if not first:
        step()
    with looked_at_with(kind, model, step):
        assert backend.runs > (not first)  # it ran compiled while it was looked at
    before = backend.runs
    step()
    assert (backend.compiled, backend.runs) == (1, before + 1)
    torch.compiler.reset()


@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition"])
def test_a_compiled_step_is_measured_as_its_allocator_saw_it(backend):
    model, x = gated(), torch.randn(256, 32)
    function = torch.compile(model, backend=backend)
    step, eager = (lambda f=f: f(x).sum().backward() for f in (function, model))
    step()
    empty_gradients(model)
    entry = sum(p.nbytes for p in model.parameters())
    alone = entry + allocator_peak(lambda *modes: run_under(step, *modes), torch.device("cpu"))
    empty_gradients(model)
    found, plain = (measure(f, model=model, repeats=1) for f in (step, eager))
    torch.compiler.reset()
    assert found.allocator_peak_bytes == alone
    # constants of the graph, 4 bytes each, are workspace
    assert 0 <= found.workspace_bytes <= 64
    assert found.peak_bytes != plain.peak_bytes
    assert found.flops == plain.flops
    assert any("torch.compile" in note for note in found.notes)
    assert plain.notes == ()


def test_buffers_of_generated_code_count(monkeypatch, tmp_path):
    # Matrix products alone: Inductor generates Python for them, for which it needs no compiler.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    model = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(3)])
    x = torch.randn(64, 32)
    function = torch.compile(model)
    step = lambda: function(x).sum().backward()  # noqa: E731
    allocate = torch._C._dynamo.guards._empty_strided_cpu
    with MemoryMeter(model) as first:
        step()
    empty_gradients(model)
    found = measure(step, model=model, repeats=1)
    modules = sys.modules["torch._inductor.codecache"].PyCodeCache.modules
    bound = {m.empty_strided_cpu for m in modules if hasattr(m, "empty_strided_cpu")}
    torch.compiler.reset()
    assert first.peak_bytes == found.peak_bytes == found.allocator_peak_bytes
    # the outputs of the first two layers are kept for backward
    assert found.at_peak["activation"] >= 2 * x.nbytes
    assert bound == {allocate} == {torch._C._dynamo.guards._empty_strided_cpu}
    outside = sum(p.nbytes for p in model.parameters()) + x.nbytes
    with (
        pytest.raises(MemoryBudgetExceeded, match="compiled code"),
        MemoryMeter(model, budget_bytes=outside),
    ):
        torch.compile(model)(x)
    torch.compiler.reset()


def test_a_symbolic_step_runs_compiled_modules_as_they_were_written():
    backend = Counting()

    def peak(make):
        with symbolic():
            model, x = make(), torch.randn(64, 32)
            with MemoryMeter(model) as meter:
                model(x).sum().backward()
        return meter.peak_bytes

    plain = peak(gated)
    assert peak(lambda: torch.compile(gated(), backend=backend, fullgraph=True)) == plain
    assert backend.compiled == 0
    model = torch.compile(gated(), backend=backend, fullgraph=True)
    model(torch.randn(8, 32))
    assert peak(gated) == plain
    model(torch.randn(8, 32))
    assert backend.runs == 2
    torch.compiler.reset()


@pytest.mark.parametrize("loaded", [False, True])
def test_what_is_compiled_first_in_a_symbolic_step_is_not_run_compiled(loaded, monkeypatch):
    backend = Counting()
    if not loaded:  # as in a process that has compiled nothing yet
        monkeypatch.setattr(compiler, "sys", SimpleNamespace(modules={}))
    with symbolic():
        function = torch.compile(lambda x: x.sin(), backend=backend, fullgraph=True)
        with MemoryMeter():
            function(torch.randn(3))
    assert backend.compiled == 0
    function(torch.randn(3))
    assert backend.runs == 1
    torch.compiler.reset()
