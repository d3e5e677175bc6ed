"""Find the modules, data files and labels of the library that a lesson uses.

A lesson uses the modules that it imports, and all modules that these modules import, at their top
or inside a function. A module also counts as imported if its name is in a string, as in code that
starts another process. Imports for type checkers do not count.

A data file is used if a used module is in the file's folder, or if the folder has no module. A
label of the catalog is used if its English text is a string in the lesson or in a used module, or
if no module at all has it as a string.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

# Modules that `publish/jupyterlab/ipython_kernel_config.json` loads into each kernel.
OF_KERNEL = ("course_lib.missing_names",)


def nodes_for_types(tree: ast.AST) -> set[ast.AST]:
    """Return the nodes inside `if TYPE_CHECKING:`, which only a type checker reads."""
    guarded = [n for n in ast.walk(tree) if isinstance(n, ast.If)]
    parts = [p for n in guarded if ast.unparse(n.test) == "TYPE_CHECKING" for p in n.body]
    return {node for part in parts for node in ast.walk(part)}


def _module_names(tree: ast.AST, package: str) -> Iterator[str]:
    """Yield each module that a tree imports or has in a string, and each `module.name` imported."""
    for_types = nodes_for_types(tree)
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (node.module or "")
            start = importlib.util.resolve_name(start, package)
            yield start
            yield from (f"{start}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.partition(":")[0]
            yield f"{package}.{node.value}"


class Library:
    """The modules of `course_lib` in a project, and the modules that each of them uses."""

    def __init__(self, project: Path):
        self.project = project
        self.paths: dict[str, Path] = {}
        for path in sorted((project / "course_lib").rglob("*.py")):
            parts = path.relative_to(project).with_suffix("").parts
            self.paths[".".join(parts).removesuffix(".__init__")] = path
        self.texts = {name: path.read_text("utf-8") for name, path in self.paths.items()}

    def used_by(self, name: str) -> frozenset[str]:
        """Return the modules that a module uses directly, and the packages that contain it.

        A package also uses its module `gpu`, because `course_lib.lessons.on_gpu` imports this
        module by the lesson's number.
        """
        is_package = self.paths[name].name == "__init__.py"
        package = name if is_package else name.rpartition(".")[0]
        return self._among(_modules_in(self.texts[name], package)) | self._among(
            [package, name.rpartition(".")[0], f"{package}.gpu"]
        )

    def _among(self, names: Iterable[str]) -> frozenset[str]:
        return frozenset(names) & self.paths.keys()

    def closure(self, tree: ast.AST) -> set[str]:
        """Return all modules that a lesson's code and its kernel use, directly or indirectly."""
        found: set[str] = set()
        waiting = list(self._among([*_module_names(tree, ""), *OF_KERNEL]))
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting += self.used_by(name)
                if f"{name}.__main__" in self.paths:
                    waiting.append(f"{name}.__main__")
        return found

    def data_of(self, modules: Iterable[str]) -> list[Path]:
        """Return the data files, without the catalog of labels, that the modules use."""
        folders = {path.parent for path in self.paths.values()}
        used = {self.paths[name].parent for name in modules}
        return [
            path
            for path in sorted((self.project / "course_lib").rglob("*"))
            if path.is_file()
            and path.suffix != ".py"
            and path != self.catalog
            and not any(part.startswith((".", "__")) for part in path.parts)
            and (path.parent in used or path.parent not in folders)
        ]

    @property
    def catalog(self) -> Path:
        """Path of the catalog with the Chinese of all labels."""
        return self.project / "course_lib" / "labels" / "zh.toml"

    def labels_of(self, modules: Iterable[str], lesson: ast.AST) -> str:
        """Return the entries of the catalog that the modules or the lesson use, as JSON."""
        if not self.catalog.exists():
            return ""
        modules = set(modules)
        sections = tomllib.loads(self.catalog.read_text("utf-8"))
        errors = sections.pop("errors", {})  # only commands translate errors
        tables = (each for each in sections.values() if isinstance(each, dict))
        entries = {key: value for each in tables for key, value in each.items()}
        used = _strings(lesson).union(*(_strings_in(self.texts[name]) for name in modules))
        others = self.paths.keys() - modules
        elsewhere = set().union(*(_strings_in(self.texts[name]) for name in others)) - used
        found = {key: value for key, value in entries.items() if key not in elsewhere}
        shown = [found, errors if "course_lib.labels.command" in modules else {}]
        return json.dumps(shown, sort_keys=True)


# Several lessons, and several builds in one process, read the same files.
@cache
def _modules_in(text: str, package: str) -> frozenset[str]:
    return frozenset(_module_names(ast.parse(text), package))


@cache
def _strings_in(text: str) -> frozenset[str]:
    return _strings(ast.parse(text))


def _strings(tree: ast.AST) -> frozenset[str]:
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return frozenset(value for value in constants if isinstance(value, str))
