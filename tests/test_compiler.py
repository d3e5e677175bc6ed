"""Compiled code under a meter and under `measure`."""

import sys
from itertools import accumulate

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from training_steps import CountingBackend, allocations, bytes_of, empty_gradients

from course_lib.memory import MemoryBudgetExceeded, MemoryMeter, measure


@pytest.fixture(autouse=True)
def compiled_anew():
    yield
    torch.compiler.reset()


class Gate(nn.Module):
    """Block for which the compiler saves less than autograd does."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        return x + F.gelu(self.linear(x)) * torch.sigmoid(x)


@pytest.mark.parametrize("compiled_before", [True, False])
def test_compiled_step_runs_compiled_in_all_runs_of_measure(compiled_before):
    backend, model, x, calls = CountingBackend(), Gate(), torch.randn(8, 32), []
    function = torch.compile(model, backend=backend, fullgraph=True)

    def step():
        calls.append(1)
        function(x).sum().backward()

    if compiled_before:
        step()
    measure(step, model=model if compiled_before else None, repeats=1)
    step()
    assert (backend.compiled, backend.runs) == (1, len(calls))


def test_compiled_step_takes_the_bytes_of_the_allocator():
    model, x = nn.Sequential(*[Gate() for _ in range(3)]), torch.randn(256, 32)
    function = torch.compile(model, backend="aot_eager_decomp_partition")
    step, eager = (lambda f=f: f(x).sum().backward() for f in (function, model))
    step()
    empty_gradients(model)
    alone = bytes_of(model.parameters()) + max(accumulate(allocations(step)))
    empty_gradients(model)
    found, plain = (measure(f, model=model, repeats=1) for f in (step, eager))
    assert found.allocator_peak_bytes == alone
    assert 0 <= found.workspace_bytes <= 64  # constants of the graph, 4 bytes each
    assert found.peak_bytes != plain.peak_bytes
    assert found.flops == plain.flops
    assert any("torch.compile" in note for note in found.notes)
    assert plain.notes == ()


def test_buffers_of_generated_code_are_counted(monkeypatch, tmp_path):
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
    modules = sys.modules["torch._inductor.codecache"].PyCodeCache.modules
    bound = {m.empty_strided_cpu for m in modules if hasattr(m, "empty_strided_cpu")}
    assert bound == {allocate} == {torch._C._dynamo.guards._empty_strided_cpu}
    torch.compiler.reset()
    meter = MemoryMeter(model, budget_bytes=bytes_of(model.parameters()) + x.nbytes)
    with pytest.raises(MemoryBudgetExceeded, match="compiled code"), meter:
        torch.compile(model)(x)
