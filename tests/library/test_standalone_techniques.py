"""A technique can be copied alone, together with the modules of the library that it imports."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


# Import every module of each technique, and print the files of the library that this loads.
IMPORTS = """
import importlib, json, pkgutil, sys

found = {}
for technique in sys.argv[1:]:
    for name in [name for name in sys.modules if name.partition(".")[0] == "course_lib"]:
        del sys.modules[name]
    package = importlib.import_module(f"course_lib.{technique}")
    for module in pkgutil.walk_packages(getattr(package, "__path__", ()), f"{package.__name__}."):
        importlib.import_module(module.name)
    loaded = [each for name, each in sys.modules.items() if name.startswith("course_lib.")]
    found[technique] = [each.__file__ for each in loaded]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def files():
    """Return, for each technique, the paths of its modules and of all that they import."""
    command = [sys.executable, "-c", IMPORTS, *SCRIPTS]
    output = subprocess.run(command, cwd=LIBRARY.parent, capture_output=True, check=True).stdout
    return {name: list(map(Path, paths)) for name, paths in json.loads(output).items()}


@pytest.mark.parametrize("technique", SCRIPTS)
def test_package_docstring_names_modules_required_for_standalone_copy(technique, files):
    package = technique.partition(".")[0]
    docstring = ast.get_docstring(ast.parse((LIBRARY / package / "__init__.py").read_text("utf-8")))
    tops = {path.relative_to(LIBRARY).parts[0] for path in files[technique]} - {package}
    [names] = re.findall(r"together with ([^.]*(?:\.py[^.]*)*)\.", docstring)
    assert {name.rstrip("/") for name in re.findall(r"`([^`]+)`", names)} == tops
    assert package == "memory" or not {"symbolic", "memory", "labels"} & tops


# Run each script with only the copy of its technique, in one process, which imports torch once.
RUN_COPIES = """
import runpy, sys

for folder in sys.argv[1:]:
    for name in [name for name in sys.modules if name.partition(".")[0] == "course_lib"]:
        del sys.modules[name]
    sys.path.insert(0, folder)
    runpy.run_path(f"{folder}/script.py")
    assert sys.modules["course_lib"].__file__.startswith(folder)
    sys.path.remove(folder)
    print("ran", folder)
"""


def test_copied_technique_runs_without_other_packages_of_library(files, tmp_path):
    folders = {name: tmp_path / name for name in SCRIPTS}
    for technique, folder in folders.items():
        for path in files[technique]:
            target = folder / path.relative_to(LIBRARY.parent)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
        (folder / "course_lib" / "__init__.py").touch()
        (folder / "script.py").write_text(SCRIPTS[technique], "utf-8")
    # -S ignores .pth files, one of which adds the complete library.
    paths = [path for path in sys.path if path.endswith("site-packages")]
    done = subprocess.run(
        [sys.executable, "-S", "-c", RUN_COPIES, *map(str, folders.values())],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    ran = [line for line in done.stdout.splitlines() if line.startswith("ran ")]
    assert ran == [f"ran {folder}" for folder in folders.values()]


@pytest.mark.parametrize("technique", SCRIPTS)
def test_technique_depends_on_at_most_900_lines_of_other_packages(technique, files):
    packages = {technique.partition(".")[0]} | (
        {"checkpoint"} if technique == "schedule" else set()
    )
    others = [p for p in files[technique] if p.relative_to(LIBRARY).parts[0] not in packages]
    limit = 5_900 if technique == "memory.meter" else 900
    assert sum(len(path.read_text("utf-8").splitlines()) for path in others) <= limit
