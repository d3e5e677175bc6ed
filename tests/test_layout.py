"""The library's rooms: dependencies point one way, and no file, class or function outgrows its
screen."""

import ast
import importlib.util
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import library_mutants
import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "course_lib"
MOST_STATEMENTS = 400  # of a file: to write them more densely does not help
MOST_IN_A_CLASS, MOST_IN_A_FUNCTION = 120, 50

# A room -> the rooms whose modules it may import; its own are always allowed.
BELOW_ALL = {"_check", "_origin", "_torch", "_hugging_face_losses", "labels"}
TECHNIQUES = {"checkpoint", "schedule", "offload", "accumulation", "attention"}
CORE = {"symbolic", "memory", "models", "configs", "workload", "options", *TECHNIQUES, *BELOW_ALL}
CORE |= {"distributed", "budget"}
ALLOWED = {
    "_check": set(),
    "_origin": set(),
    "_torch": {"_check"},
    "_hugging_face_losses": {"_check", "_torch"},
    "labels": set(),
    "options": set(),
    "models": BELOW_ALL,
    "configs": {"models", *BELOW_ALL},
    "symbolic": BELOW_ALL,
    "memory": {"symbolic", *BELOW_ALL},
    **{name: {"symbolic", "memory", *BELOW_ALL} for name in TECHNIQUES},
    "schedule": {"symbolic", "memory", "checkpoint", *BELOW_ALL},
    "simulated": {"offload", *BELOW_ALL},
    "workload": {"symbolic", "models", "configs", "accumulation", *BELOW_ALL},
    "distributed": CORE - {"distributed", "budget"},
    "budget": CORE,
    # an instrument, which the library does without and what teaches may use
    "teaching": {*CORE, "simulated"},
    "lessons": {*CORE, "simulated", "teaching"},
    # a tool of the repository, made from the lessons and so above them
    "publish": {*CORE, "simulated", "teaching", "lessons"},
}


# The one door that opens upwards: `__getattr__` of offload, so that names of 0.1.0 stay.
LAZY_DOORS = {("course_lib.offload", "course_lib.simulated")}


def room_of(module):
    """`course_lib.memory.meter` -> `memory`, `publish.site` -> `publish`; None for others."""
    if module.split(".")[0] == "publish":
        return "publish"
    parts = module.split(".")[1:]
    names = [".".join(parts[:2]), parts[0]] if parts else []
    return (
        next((name for name in names if name in ALLOWED), None)
        if module.startswith("course_lib")
        else None
    )


@cache
def modules():
    """Name -> tree of every module of the library and of `publish`."""
    found = {}
    for path in sorted([*LIBRARY.rglob("*.py"), *(ROOT / "publish").rglob("*.py")]):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if "_assets" in str(path) or "fonts" in parts:
            continue  # scripts that made a font
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(
            path.read_text("utf-8")
        )
    return found


def imports(name, tree=None):
    """(module, names taken from it) of every import of the library, lazy ones and those for types
    alone included, but for the doors in `LAZY_DOORS`."""
    tree = modules()[name] if tree is None else tree
    behind_doors = {
        node
        for part in tree.body
        if isinstance(part, ast.FunctionDef) and part.name == "__getattr__"
        for node in ast.walk(part)
    }
    package = (
        name if (LIBRARY.parent / Path(*name.split("."))).is_dir() else name.rpartition(".")[0]
    )
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = (
                importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                if node.level
                else node.module
            )
            for alias in node.names:
                submodule = f"{start}.{alias.name}"
                if node in behind_doors and (name, submodule) in LAZY_DOORS:
                    continue
                found.append((submodule, []) if submodule in modules() else (start, [alias.name]))
    ours = ("course_lib", "publish")
    return [(module, names) for module, names in found if module.split(".")[0] in ours]


def wrong_ways(name, tree=None):
    here = room_of(name)
    return [
        f"{name} imports {module}"
        for module, _ in imports(name, tree)
        if (there := room_of(module)) is not None
        and there != here
        and there not in ALLOWED.get(here, set())
    ]


def private_names(name, tree=None):
    """Underscored names, and modules other than those below all, that are taken from another
    room."""
    here, found = room_of(name), []
    for module, names in imports(name, tree):
        if room_of(module) == here:
            continue
        parts = [*module.split(".")[1:], *names]
        found += [
            f"{name} imports {module} {names}"
            for part in parts
            if part[:1] == "_" and part not in BELOW_ALL | {"__all__"}
        ]
    return found


def circles(edges):
    """Modules that reach themselves."""

    def reached(start):
        seen, todo = set(), list(edges[start])
        while todo:
            if (module := todo.pop()) not in seen:
                seen.add(module)
                todo += edges.get(module, [])
        return seen

    return sorted(name for name in edges if name in reached(name))


def statements(node):
    return sum(isinstance(each, ast.stmt) for each in ast.walk(node))


def lengths(name, source):
    """What in a file is longer than it may be. Statements are counted, for lines are won by
    density."""
    tree, found = ast.parse(source), []
    if (count := statements(tree)) > MOST_STATEMENTS:
        found.append(f"{name}: {count} statements")
    most = {ast.ClassDef: MOST_IN_A_CLASS, ast.FunctionDef: MOST_IN_A_FUNCTION}
    for node in ast.walk(tree):
        if (count := statements(node)) > most.get(type(node), count):
            found.append(f"{name}: {node.name} has {count} statements")
    return found


def test_every_module_has_a_room():
    assert [name for name in modules() if name != "course_lib" and room_of(name) is None] == []


def test_dependencies_point_one_way():
    assert [problem for name in modules() for problem in wrong_ways(name)] == []


def test_no_module_reaches_itself_through_its_imports():
    edges = {
        name: {module for module, _ in imports(name) if module in modules()} for name in modules()
    }
    assert circles(edges) == []


def test_no_private_name_crosses_from_one_room_to_another():
    assert [problem for name in modules() for problem in private_names(name)] == []


@pytest.mark.parametrize(
    ("module", "source", "finds"),
    [
        ("course_lib.memory.meter", "from course_lib.checkpoint import checkpoint", wrong_ways),
        ("course_lib.memory.meter", "def f():\n    import course_lib.offload", wrong_ways),
        ("course_lib.symbolic.mode", "from course_lib.memory import MemoryMeter", wrong_ways),
        ("course_lib.offload", "from course_lib.schedule import Chain", wrong_ways),
        ("course_lib.offload", "from course_lib import simulated", wrong_ways),
        (
            "course_lib.offload",
            "def __getattr__(name):\n    from course_lib import schedule",
            wrong_ways,
        ),
        (
            "course_lib.memory.meter",
            "if TYPE_CHECKING:\n    from course_lib.offload import DiskStore",
            wrong_ways,
        ),
        ("course_lib.budget.search", "from course_lib.teaching import figure", wrong_ways),
        ("course_lib.budget.search", "from course_lib.simulated import Race", wrong_ways),
        ("course_lib.teaching.gpu", "from .. import lessons", wrong_ways),
        ("course_lib.schedule", "from course_lib.memory.meter import _storages", private_names),
        (
            "course_lib.lessons.lesson_01",
            "from course_lib.teaching.tables import _cell",
            private_names,
        ),
    ],
)
def test_an_import_that_goes_the_wrong_way_is_found(module, source, finds):
    assert finds(module, ast.parse(source))
    assert not finds(
        "course_lib.schedule", ast.parse("from course_lib.checkpoint import checkpoint")
    )
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]


def test_measuring_needs_neither_matplotlib_nor_ipython():
    program = (
        "import sys, course_lib.memory; print({'matplotlib', 'IPython', 'pandas'} &"
        " set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "set()"


def test_the_library_imports_pyplot_in_one_place_that_says_what_to_install():
    places = {
        name
        for name, tree in modules().items()
        if any("pyplot" in ast.unparse(each) for each in ast.walk(tree) if is_import(each))
        and room_of(name) not in {"teaching", "lessons", "publish"}
        and "labels.drawing import pyplot" not in ast.unparse(tree)
    }
    assert places == {"course_lib.labels.drawing"}


def is_import(node):
    return isinstance(node, ast.Import | ast.ImportFrom)


def test_no_file_class_or_function_outgrows_its_screen():
    files = {
        path.relative_to(ROOT).as_posix(): path.read_text("utf-8")
        for path in sorted(LIBRARY.rglob("*.py"))
    }
    assert [problem for each in files.items() for problem in lengths(*each)] == []
    assert lengths("dense.py", "; ".join(["a, b = 1, 2"] * 401)) == ["dense.py: 401 statements"]


# A file's name is what is in it, or what that does, and not what became of something; but for a
# noun that ends so, and for the name that the design gives.
NO_PARTICIPLES = {"drawing", "tiled"}
PARTICIPLES = {"done", "drawn", "given", "held", "kept", "known", "made", "said", "seen", "sent"}
PARTICIPLES |= {"shown", "taken", "told", "written"}


def test_no_file_is_named_by_a_participle():
    names = {path.stem for path in LIBRARY.rglob("*.py")}
    found = {name for name in names if name.endswith(("ed", "ing")) or name in PARTICIPLES}
    assert found == NO_PARTICIPLES


# Names of one word that are nouns, or an operation of PyTorch, or taught in lesson 04.
NOUNS = {"Embedding", "clipping", "heading", "unscaling", "to", "on", "pinned", "used"}
PREPOSITIONS = {"after", "among", "at", "before", "by", "from", "in", "of", "on", "over", "to"}
PREPOSITIONS |= {"under", "with"}


def test_no_function_or_class_is_named_by_a_participle_or_preposition_alone():
    def bare(node):
        name = node.name.strip("_")
        properties = [ast.unparse(each).endswith("property") for each in node.decorator_list]
        bad = PARTICIPLES | PREPOSITIONS
        return not any(properties) and (
            name in bad or (re.fullmatch("_*[A-Za-z][a-z]*(ed|ing)", name) is not None)
        )

    trees = (ast.parse(path.read_text("utf-8")) for path in LIBRARY.rglob("*.py"))
    definitions = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, definitions))
    assert {node.name.strip("_") for node in nodes if bare(node)} == NOUNS


def test_each_mutant_of_the_library_can_be_applied():
    library = Path(__file__).parents[1] / "course_lib"
    counts = {
        f"{mutant.file}: {mutant.old}": (library / mutant.file).read_text("utf-8").count(mutant.old)
        for mutant in library_mutants.MUTANTS
    }
    assert {name: count for name, count in counts.items() if count != 1} == {}
