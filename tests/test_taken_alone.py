"""A technique can be copied alone: into an empty folder, with the few files that it imports.

`schedule` takes `checkpoint` along.
"""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

LIBRARY = Path(__file__).parents[1] / "course_lib"

# Scripts that use one copied package.
ACCUMULATION = """
import torch
from course_lib.accumulation import AccumulatedStep, split

model, batch = torch.nn.Linear(8, 1), torch.randn(6, 8)
optimizer = torch.optim.AdamW(model.parameters())
step = AccumulatedStep(model, optimizer, lambda m, b: (m(b).square().sum(), len(b)))
before = float(model(batch).square().mean())
for _ in range(9):
    result = step(list(split(batch, 2)))
assert result.loss < before
"""
CHECKPOINT = """
import torch
from course_lib.checkpoint import checkpoint_blocks

block = lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5))
model, x = torch.nn.ModuleList([block() for _ in range(4)]), torch.randn(3, 8)
checkpoint_blocks(model, "*")
for layer in model:
    x = layer(x)
x.sum().backward()
assert all(p.grad is not None for p in model.parameters())
"""
OFFLOAD = """
import torch
from course_lib.offload import DiskStore, OffloadedOptimizer, offload_activations

model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
optimizer = OffloadedOptimizer(model.parameters(), torch.optim.AdamW, fraction=1.0)
with DiskStore() as store, offload_activations(store, min_bytes=1):
    model(torch.randn(32, 64)).square().sum().backward()
    optimizer.step()
assert store.stats.bytes_down > 0
"""
ATTENTION = """
import torch
from course_lib.attention import flash_attention

q, k, v = (torch.randn(1, 2, 32, 8, requires_grad=True) for _ in range(3))
o = flash_attention(q, k, v, causal=True)
o.sum().backward()
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
assert torch.allclose(o, expected, atol=1e-5) and q.grad is not None
"""
SCHEDULE = """
import torch
from course_lib.schedule import Chain, ScheduledSequential, Stage
from course_lib.schedule import optimal, schedule_blocks, simulate

layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(8)]
net, x = torch.nn.Sequential(*layers), torch.randn(32, 64)
expected = torch.autograd.grad(net(x).square().sum(), net.parameters())
b = x.nbytes
chain = Chain((Stage(1, 2, b, 2 * b, backward_overhead_bytes=8448),) * 8, input_bytes=b)
plan = optimal(chain, 10 * b)
assert simulate(plan, chain).peak_bytes <= 10 * b and len(plan) > 16
ScheduledSequential(net, plan)(x).square().sum().backward()
assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), expected))
with schedule_blocks(net, "*", schedule=plan):
    net(x).square().sum().backward()
assert all(torch.equal(p.grad, 2 * g) for p, g in zip(net.parameters(), expected))
"""
METER = """
import torch
from course_lib.memory import MemoryMeter

model = torch.nn.Linear(8, 4)
with MemoryMeter(model) as meter:
    model(torch.randn(2, 8)).sum().backward()
assert meter.peak_bytes > 36 * 4
print(meter)
"""
SCRIPTS = {
    "accumulation": ACCUMULATION,
    "checkpoint": CHECKPOINT,
    "offload": OFFLOAD,
    "attention": ATTENTION,
    "schedule": SCHEDULE,
    "memory.meter": METER,
}
# Most lines that a package takes along from outside; for the meter, most files and lines of all.
MOST = dict.fromkeys(SCRIPTS, 900) | {"memory.meter": (29, 5900)}


def modules():
    """Name -> path of each module."""
    found = {}
    for path in LIBRARY.rglob("*.py"):
        parts = path.relative_to(LIBRARY.parent).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def run_at_import(tree):
    """Yield the nodes that run when a module is imported."""
    waiting = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        waiting += node.orelse if for_types else ast.iter_child_nodes(node)
        yield node


def imported_by(name, paths):
    package = name if paths[name].name == "__init__.py" else name.rpartition(".")[0]
    found = {package}
    for node in run_at_import(ast.parse(paths[name].read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (node.module or "")
            start = importlib.util.resolve_name(start, package)
            found |= {start, *(f"{start}.{alias.name}" for alias in node.names)}
    return found & (paths.keys() - {"course_lib"})


def taken_along(technique):
    """Name -> path of the package's own modules and of all that they import at the top."""
    paths = modules()
    own = f"course_lib.{technique}"
    waiting = [name for name in paths if name == own or name.startswith(f"{own}.")]
    found = {}
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = paths[name]
            waiting += imported_by(name, paths)
    return found


def lines_in(paths):
    return sum(len(path.read_text("utf-8").splitlines()) for path in paths)


@pytest.mark.parametrize("technique", SCRIPTS)
def test_a_technique_takes_few_files_along(technique):
    taken = taken_along(technique)
    most = MOST[technique]
    if isinstance(most, tuple):
        assert (len(taken), lines_in(taken.values())) <= most
        return
    own = {"schedule", "checkpoint"} if technique == "schedule" else {technique}
    outside = [path for name, path in taken.items() if name.split(".")[1] not in own]
    assert lines_in(outside) <= most
    assert not {"symbolic", "memory", "labels"} & {name.split(".")[1] for name in taken}


@pytest.mark.parametrize("technique", SCRIPTS)
def test_the_docstring_says_what_to_take(technique):
    package = technique.partition(".")[0]
    docstring = ast.get_docstring(ast.parse((LIBRARY / package / "__init__.py").read_text("utf-8")))
    taken = taken_along(technique).values()
    tops = {path.relative_to(LIBRARY).parts[0] for path in taken} - {package}
    [said] = re.findall(r"together with ([^.]*(?:\.py[^.]*)*)\.", docstring)
    assert {name.rstrip("/") for name in re.findall(r"`([^`]+)`", said)} == tops


@pytest.mark.parametrize("technique", SCRIPTS)
def test_a_copied_technique_runs_without_the_rest_of_the_library(technique, tmp_path):
    for path in taken_along(technique).values():
        target = tmp_path / path.relative_to(LIBRARY.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    (tmp_path / "course_lib" / "__init__.py").touch()
    script = tmp_path / "script.py"
    script.write_text(SCRIPTS[technique], "utf-8")
    assert len(SCRIPTS[technique].strip().splitlines()) <= 20
    # -S leaves out the site's .pth files, among them that of this very library.
    paths = [str(tmp_path), *(path for path in sys.path if path.endswith("site-packages"))]
    done = subprocess.run(
        [sys.executable, "-S", str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
