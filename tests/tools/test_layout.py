"""Test the library's structure: imports between packages."""

import ast
import importlib.util
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import library_mutants

from publish.dependencies import nodes_for_types

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "course_lib"

# package -> packages whose modules it may import, in addition to its own
BELOW_ALL = {"_batches", "_check", "_origin", "_torch", "_hugging_face_losses", "labels"}
TECHNIQUES = {"checkpoint", "schedule", "offload", "accumulation", "attention"}
CORE = {
    "symbolic",
    "memory",
    "caching_allocator",
    "models",
    "configs",
    "workload",
    "options",
    *TECHNIQUES,
    *BELOW_ALL,
}
CORE |= {"adapters", "distributed", "budget"}
ALLOWED = {
    "_batches": {"_check", "_torch"},
    "_check": set(),
    "_origin": {"_torch"},
    "_torch": {"_check"},
    "_hugging_face_losses": {"_batches", "_check", "_torch"},
    "labels": set(),
    "missing_names": {"labels"},
    "options": set(),
    "adapters": {"_check", "_torch"},
    "models": BELOW_ALL,
    "configs": {"models", *BELOW_ALL},
    "symbolic": BELOW_ALL,
    "caching_allocator": BELOW_ALL,
    "memory": {"symbolic", "caching_allocator", *BELOW_ALL},
    **{name: {"symbolic", "memory", *BELOW_ALL} for name in TECHNIQUES},
    "schedule": {"symbolic", "memory", "checkpoint", *BELOW_ALL},
    "simulated": {"offload", *BELOW_ALL},
    "workload": {"adapters", "symbolic", "models", "configs", "accumulation", *BELOW_ALL},
    "distributed": CORE - {"distributed", "budget"},
    "budget": CORE,
    "teaching": {*CORE, "simulated"},
    "lessons": {*CORE, "simulated", "teaching"},
    "publish": {*CORE, "simulated", "teaching", "lessons"},
}


def package_of(module):
    """Return `memory` for `course_lib.memory.meter`, `publish` for `publish.site`, else None."""
    first, *rest = module.split(".")
    name = first if first == "publish" else ".".join(rest[:1])
    return name if first in ("course_lib", "publish") and name in ALLOWED else None


@cache
def modules():
    """Return the tree of every module of the library and of `publish`, by name."""
    found = {}
    for path in sorted([*LIBRARY.rglob("*.py"), *(ROOT / "publish").rglob("*.py")]):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if "_assets" not in str(path) and "fonts" not in parts:  # a script that made a font
            name = ".".join(parts).removesuffix(".__init__")
            found[name] = ast.parse(path.read_text("utf-8"))
    return found


@cache
def imports(name, types=True):
    """Return (module, imported names) of every import, with `types` also those for types only."""
    tree = modules()[name]
    package = name if ROOT.joinpath(*name.split(".")).is_dir() else name.rpartition(".")[0]
    skipped = set() if types else nodes_for_types(tree)
    found = []
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (node.module or "")
            start = importlib.util.resolve_name(start, package)
            for alias in node.names:
                submodule = f"{start}.{alias.name}"
                is_module = submodule in modules()
                found.append((submodule, []) if is_module else (start, [alias.name]))
    ours = ("course_lib", "publish")
    return [(module, names) for module, names in found if module.split(".")[0] in ours]


def test_packages_import_only_allowed_packages():
    for name in modules():
        package = package_of(name)
        assert package or name == "course_lib", f"{name} belongs to no package in ALLOWED"
        reached = {package_of(module) for module, _ in imports(name)}
        assert reached <= {None, package, *ALLOWED.get(package, set())}, name


def test_imports_have_no_cycles():
    """Imports for types alone do not count, because they never run."""
    found = {name: {module for module, _ in imports(name, types=False)} for name in modules()}
    edges = {name: reached & modules().keys() for name, reached in found.items()}
    TopologicalSorter(edges).prepare()  # raises for a cycle


def test_private_names_are_not_imported_from_other_packages():
    imported = [
        f"{name} imports {part} of {module}"
        for name in modules()
        for module, names in imports(name)
        if package_of(module) != package_of(name)
        for part in [*module.split(".")[1:], *names]
        if part[:1] == "_" and part not in BELOW_ALL | {"__all__"}
    ]
    assert imported == []


def test_every_library_mutant_can_be_applied():
    counts = {
        f"{each.file}: {each.old}": (LIBRARY / each.file).read_text("utf-8").count(each.old)
        for each in library_mutants.MUTANTS
    }
    assert {name: count for name, count in counts.items() if count != 1} == {}
