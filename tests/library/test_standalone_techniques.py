"""A technique can be copied alone, together with the modules of the library that it imports."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

LIBRARY = Path(__file__).parents[2] / "course_lib"

# Scripts that use one copied package.
ACCUMULATION = """
import torch
from course_lib.accumulation import AccumulatedStep, split

model, batch = torch.nn.Linear(8, 1), torch.randn(6, 8)
optimizer = torch.optim.AdamW(model.parameters())
step = AccumulatedStep(model, optimizer, lambda m, b: (m(b).square().sum(), len(b)))
assert step(list(split(batch, 2))).stepped
"""
CHECKPOINT = """
import torch
from course_lib.checkpoint import checkpoint_blocks

model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
checkpoint_blocks(model, "*")
model(torch.randn(3, 8)).sum().backward()
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
flash_attention(q, k, v, causal=True).sum().backward()
assert q.grad is not None
"""
SCHEDULE = """
import torch
from course_lib.schedule import Chain, ScheduledSequential, optimal, schedule_blocks

net, x = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8))), torch.randn(32, 64)
plan = optimal(Chain.uniform(8), 6)
ScheduledSequential(net, plan)(x).sum().backward()
with schedule_blocks(net, "*", schedule=plan):
    net(x).sum().backward()
assert len(plan) > 16 and all(p.grad is not None for p in net.parameters())
"""
METER = """
import torch
from course_lib.memory import MemoryMeter

model = torch.nn.Linear(8, 4)
with MemoryMeter(model) as meter:
    model(torch.randn(2, 8)).sum().backward()
assert meter.peak_bytes > 36 * 4
"""
SCRIPTS = {
    "accumulation": ACCUMULATION,
    "checkpoint": CHECKPOINT,
    "offload": OFFLOAD,
    "attention": ATTENTION,
    "schedule": SCHEDULE,
    "memory": METER,
}


# Run each script with only the copy of its technique, then import all modules of its package. One
# process does this for all techniques, and imports torch once.
RUN_COPIES = """
import importlib, pkgutil, runpy, sys

for folder in sys.argv[1:]:
    for name in [name for name in sys.modules if name.partition(".")[0] == "course_lib"]:
        del sys.modules[name]
    sys.path.insert(0, folder)
    package = folder.rpartition("/")[2]
    runpy.run_path(f"{folder}/script.py")
    assert sys.modules["course_lib"].__file__.startswith(folder)
    paths = [] if package == "memory" else [f"{folder}/course_lib/{package}"]
    for module in pkgutil.walk_packages(paths, f"course_lib.{package}."):
        importlib.import_module(module.name)
    sys.path.remove(folder)
    print("ran", package)
"""


def test_technique_runs_with_only_modules_named_in_its_docstring(tmp_path):
    for technique, script in SCRIPTS.items():
        source = LIBRARY / technique / "__init__.py"
        docstring = ast.get_docstring(ast.parse(source.read_text("utf-8")))
        [names] = re.findall(r"together with ([^.]*(?:\.py[^.]*)*)\.", docstring)
        copy = tmp_path / technique / "course_lib"
        copy.mkdir(parents=True)
        (copy / "__init__.py").touch()
        (copy.parent / "script.py").write_text(script, "utf-8")
        for name in (technique, *re.findall(r"`([^`]+)`", names)):
            path = LIBRARY / name
            (shutil.copytree if path.is_dir() else shutil.copy)(path, copy / name)
    # -S ignores .pth files, one of which adds the complete library.
    paths = [path for path in sys.path if path.endswith("site-packages")]
    done = subprocess.run(
        [sys.executable, "-S", "-c", RUN_COPIES, *(str(tmp_path / name) for name in SCRIPTS)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    ran = [line for line in done.stdout.splitlines() if line.startswith("ran ")]
    assert ran == [f"ran {name}" for name in SCRIPTS]
