"""Run a module as on a GPU machine that has only torch, Triton, NumPy, pytest and what they need.

python tests/tools/minimal_environment.py pytest -m gpu --collect-only tests
"""

import importlib.metadata
import re
import runpy
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder

NEEDED = ("torch", "triton", "numpy", "pytest")


def packages_of(*names: str) -> set[str]:
    """Return the modules of these distributions and of all that they require."""
    waiting, visited = list(names), set()
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        try:
            required = importlib.metadata.requires(name) if name not in visited else []
        except importlib.metadata.PackageNotFoundError:
            continue
        visited.add(name)
        waiting += [
            re.match(r"[\w.-]+", line)[0] for line in required or [] if "extra ==" not in line
        ]
    found = importlib.metadata.packages_distributions().items()
    return {
        module
        for module, owners in found
        if visited & {re.sub(r"[-_.]+", "-", o).lower() for o in owners}
    }


ALL = set(importlib.metadata.packages_distributions()) - {"course_lib"}
MISSING = ALL - packages_of(*NEEDED)


class MinimalFinder(PathFinder):
    """Finder of modules that does not find the missing ones."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        missing = fullname.partition(".")[0] in MISSING
        return None if missing else PathFinder.find_spec(fullname, path, target)


if __name__ == "__main__":
    sys.meta_path = [BuiltinImporter, FrozenImporter, MinimalFinder]
    sys.path[0] = ""  # the working folder, as for `python -m`
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
