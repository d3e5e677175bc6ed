"""Run a module as on a GPU machine that has only torch, Triton, NumPy, pytest and what they need.

python tests/tools/minimal_environment.py pytest -m gpu --collect-only tests
"""

import runpy
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from importlib.util import find_spec

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

NEEDED = ("torch", "triton", "numpy", "pytest")


def packages_of(requirements: Iterable[Requirement]) -> set[str]:
    """Return the names of these packages and of all that they require, as installed."""
    found, waiting = set(), list(requirements)
    for each in waiting:
        name = canonicalize_name(each.name)
        if name in found or (each.marker and not each.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        with suppress(PackageNotFoundError):  # of another platform
            waiting += map(Requirement, requires(name) or [])
    return found


def modules_of(packages: set[str]) -> set[str]:
    """Return the top-level modules of these packages."""
    owners = packages_distributions().items()
    return {module for module, names in owners if packages & set(map(canonicalize_name, names))}


if __name__ == "__main__":
    present = modules_of(packages_of(map(Requirement, NEEDED))) | {"course_lib"}
    sys.modules |= dict.fromkeys(packages_distributions().keys() - present)  # cannot be imported
    assert find_spec("torch") and not find_spec("IPython") and not find_spec("matplotlib")
    sys.path[0] = ""  # the working folder, as for `python -m`
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
