"""Run a module as on a GPU machine as it is: with torch, Triton, NumPy, pytest, what they need, and
nothing else.

python tests/bare.py pytest -m gpu --collect-only tests
"""

import importlib.metadata
import re
import runpy
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder

NEEDED = ("torch", "triton", "numpy", "pytest")


def packages_of(*names: str) -> set[str]:
    """What can be imported from these distributions and from all that they require."""
    waiting, seen = list(names), set()
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        try:
            required = importlib.metadata.requires(name) if name not in seen else []
        except importlib.metadata.PackageNotFoundError:
            continue
        seen.add(name)
        waiting += [
            re.match(r"[\w.-]+", line)[0] for line in required or [] if "extra ==" not in line
        ]
    found = importlib.metadata.packages_distributions().items()
    return {
        module
        for module, owners in found
        if seen & {re.sub(r"[-_.]+", "-", o).lower() for o in owners}
    }


ALL = set(importlib.metadata.packages_distributions()) - {"course_lib"}
MISSING = ALL - packages_of(*NEEDED)


class Bare(PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        missing = fullname.partition(".")[0] in MISSING
        return None if missing else PathFinder.find_spec(fullname, path, target)


if __name__ == "__main__":
    sys.meta_path = [BuiltinImporter, FrozenImporter, Bare]
    sys.path[0] = ""  # where it was started, as for `python -m`
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
