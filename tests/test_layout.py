"""The library's rooms: dependencies point one way, and no file, class or function outgrows its
screen."""

import ast
import importlib.util
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import library_mutants
import pytest

from publish.dependencies import nodes_for_types

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "course_lib"
# Statements are counted: lines are won by density, which does not help.
MOST = {ast.Module: 400, ast.ClassDef: 120, ast.FunctionDef: 50}

# A room -> the rooms whose modules it may import; its own are always allowed.
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
    # an instrument, which the library does without and what teaches may use
    "teaching": {*CORE, "simulated"},
    "lessons": {*CORE, "simulated", "teaching"},
    # a tool of the repository, made from the lessons and so above them
    "publish": {*CORE, "simulated", "teaching", "lessons"},
}


def room_of(module):
    """`course_lib.memory.meter` -> `memory`, `publish.site` -> `publish`; None for others."""
    first, *rest = module.split(".")
    name = first if first == "publish" else ".".join(rest[:1])
    return name if first in ("course_lib", "publish") and name in ALLOWED else None


@cache
def modules():
    """Name -> tree of every module of the library and of `publish`."""
    found = {}
    for path in sorted([*LIBRARY.rglob("*.py"), *(ROOT / "publish").rglob("*.py")]):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if "_assets" not in str(path) and "fonts" not in parts:  # a script that made a font
            name = ".".join(parts).removesuffix(".__init__")
            found[name] = ast.parse(path.read_text("utf-8"))
    return found


def library():
    return {name: tree for name, tree in modules().items() if name.startswith("course_lib")}


def imports(name, tree=None, types=True):
    """(module, names taken from it) of every import of the library, lazy ones and those for types
    alone included unless `types` is False."""
    tree = modules()[name] if tree is None else tree
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


def wrong_ways(name, tree=None):
    here = room_of(name)
    allowed = {None, here, *ALLOWED.get(here, set())}
    return [f"{name} -> {to}" for to, _ in imports(name, tree) if room_of(to) not in allowed]


def private_names(name, tree=None):
    """Underscored names, and modules other than those below all, that are taken from another
    room."""
    return [
        f"{name} imports {part} of {module}"
        for module, names in imports(name, tree)
        if room_of(module) != room_of(name)
        for part in [*module.split(".")[1:], *names]
        if part[:1] == "_" and part not in BELOW_ALL | {"__all__"}
    ]


def lengths(name, tree):
    """Return the functions and modules of a file that have too many statements."""
    counts = {
        node: sum(isinstance(each, ast.stmt) for each in ast.walk(node))
        for node in ast.walk(tree)
        if type(node) in MOST
    }
    longer = [node for node, count in counts.items() if count > MOST[type(node)]]
    return [f"{name}: {getattr(node, 'name', 'it')} has {counts[node]}" for node in longer]


def test_every_module_has_a_room():
    assert [name for name in modules() if name != "course_lib" and room_of(name) is None] == []


def test_dependencies_point_one_way():
    assert [problem for name in modules() for problem in wrong_ways(name)] == []


def test_formulas_and_predictions_of_ranks_do_not_import_the_training():
    package, found = "course_lib.distributed", []
    for name in ("formulas", "measurement", "modes", "prediction"):
        found += [(name, to) for to, _ in imports(f"{package}.{name}")]
    # the package itself would import any of its modules
    bad = [each for each in found if re.fullmatch(rf"{package}(\.training.*)?", each[1])]
    assert bad == [] and ("prediction", f"{package}.modes") in found


def test_no_module_reaches_itself_through_its_imports():
    """Imports for types alone do not count, because they never run."""
    found = {name: {module for module, _ in imports(name, types=False)} for name in modules()}
    edges = {name: reached & modules().keys() for name, reached in found.items()}
    TopologicalSorter(edges).prepare()  # which refuses a circle


def test_no_private_name_crosses_from_one_room_to_another():
    assert [problem for name in modules() for problem in private_names(name)] == []


@pytest.mark.parametrize(
    ("module", "source", "finds"),
    [
        ("course_lib.memory.meter", "def f():\n    import course_lib.offload", wrong_ways),
        ("course_lib.offload", "from course_lib import simulated", wrong_ways),
        (
            "course_lib.offload",
            "def __getattr__(name): from course_lib import schedule",
            wrong_ways,
        ),
        ("course_lib.teaching.gpu", "from .. import lessons", wrong_ways),
        ("course_lib.schedule", "from course_lib.memory.meter import _storages", private_names),
    ],
)
def test_an_import_that_goes_the_wrong_way_is_found(module, source, finds):
    assert finds(module, ast.parse(source))


def test_the_library_imports_pyplot_in_one_place_that_says_what_to_install():
    def imports_pyplot(tree):
        found = (each for each in ast.walk(tree) if isinstance(each, ast.Import | ast.ImportFrom))
        lines = " ".join(map(ast.unparse, found))
        return "pyplot" in lines and "labels.drawing import pyplot" not in lines

    places = {name for name, tree in modules().items() if imports_pyplot(tree)}
    figures = {"teaching", "lessons", "publish"}
    assert {name for name in places if room_of(name) not in figures} == {
        "course_lib.labels.drawing"
    }


def test_no_file_class_or_function_outgrows_its_screen():
    assert [each for name, tree in library().items() for each in lengths(name, tree)] == []


# A name says what a thing is, or what it does, and not what became of something. These are nouns,
# an operation of PyTorch, or taught in lesson 04.
NOUNS = {"Embedding", "clipping", "drawing", "heading", "tiled", "unscaling"}
NOUNS |= {"to", "on", "pinned", "used"}
PARTICIPLES = {"done", "drawn", "given", "held", "kept", "known", "made", "said", "seen", "sent"}
PARTICIPLES |= {"shown", "taken", "told", "written"}
PREPOSITIONS = {"after", "among", "at", "before", "by", "from", "in", "of", "on", "over", "to"}
PREPOSITIONS |= {"under", "with"}


def test_no_file_function_or_class_is_named_by_a_participle_or_preposition_alone():
    def is_property(node):
        return any(ast.unparse(each).endswith("property") for each in node.decorator_list)

    definitions = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef
    nodes = [node for tree in library().values() for node in ast.walk(tree)]
    defined = [each for each in nodes if isinstance(each, definitions) and not is_property(each)]
    names = {each.name.strip("_") for each in defined}
    names |= {path.stem.rpartition("_")[2] for path in LIBRARY.rglob("*.py")}
    bad = {name for name in names if re.fullmatch("[A-Za-z][a-z]*(ed|ing)", name)}
    assert bad | names & (PARTICIPLES | PREPOSITIONS) == NOUNS


def test_each_mutant_of_the_library_can_be_applied():
    counts = {
        f"{each.file}: {each.old}": (LIBRARY / each.file).read_text("utf-8").count(each.old)
        for each in library_mutants.MUTANTS
    }
    assert {name: count for name, count in counts.items() if count != 1} == {}
