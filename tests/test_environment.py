"""The three files that say what to install do not contradict each other, nor the environment that runs."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML comes with JupyterLab")
Requirement = pytest.importorskip("packaging.requirements").Requirement
Version = pytest.importorskip("packaging.version").Version

ROOT = Path(__file__).parents[1]
CONDA_NAMES = {"pytorch": "torch", "matplotlib-base": "matplotlib"}
ELSEWHERE = {"pip", "python"}  # conda installs these, pip does not


def plain(name):
    """A package's name as package tools compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_requirements(pyproject):
    """All requirements of the library and of its extras."""
    project = tomllib.loads(pyproject)["project"]
    groups = [project["dependencies"], *project.get("optional-dependencies", {}).values()]
    return [Requirement(text) for group in groups for text in group]


def read_pins(constraints):
    """Package -> its one line in constraints.txt."""
    lines = (line.split("#")[0].strip() for line in constraints.splitlines())
    return {plain(pin.name): pin for pin in (Requirement(line) for line in lines if line)}


def pinned_version(pin):
    (specifier,) = pin.specifier
    return specifier.version


def bad_pins(pins):
    """Lines of constraints.txt that do not name one public version."""
    return [
        f"{pin}: not one exact version without a local label"
        for pin in pins.values()
        if not re.fullmatch(r"==[0-9][0-9a-z.]*", str(pin.specifier))
    ]


def unpinned(requirements, pins):
    return [f"{r.name} has no line in constraints.txt" for r in requirements if plain(r.name) not in pins]


def out_of_range(requirements, pins):
    return [
        f"{pins[plain(r.name)]} is outside of pyproject.toml's {r}"
        for r in requirements
        if plain(r.name) in pins and not r.specifier.contains(pinned_version(pins[plain(r.name)]), prereleases=True)
    ]


def markers_that_differ(requirements, pins):
    """A pin for fewer platforms than the requirement would leave some of them with any version."""
    return [
        f"{pins[plain(r.name)]} and pyproject.toml's {r} are for different platforms"
        for r in requirements
        if plain(r.name) in pins and str(pins[plain(r.name)].marker) != str(r.marker)
    ]


def conda_problems(environment, requirements, pins, requires_python):
    """Where environment.yml says something else than the other two files."""
    entries = yaml.safe_load(environment)["dependencies"]
    pip_lines = [line for entry in entries if isinstance(entry, dict) for line in entry["pip"]]
    by_pip = {plain(Requirement(line).name) for line in pip_lines if not line.startswith("-")}
    conda = {}
    for entry in (Requirement(entry) for entry in entries if isinstance(entry, str)):
        conda[CONDA_NAMES.get(plain(entry.name), plain(entry.name))] = entry

    problems = []
    if set(str(conda["python"].specifier).split(",")) != set(requires_python.split(",")):
        problems.append(f"{conda['python']}, but pyproject.toml asks for {requires_python}")
    for name, entry in conda.items():
        if name in ELSEWHERE:
            continue
        if name not in pins:
            problems.append(f"{entry} has no line in constraints.txt")
        elif str(entry.specifier) != str(pins[name].specifier):
            problems.append(f"{entry}, but constraints.txt has {pins[name]}")
    for line in ("-c constraints.txt", "-e .[course,test]"):
        if line not in pip_lines:
            problems.append(f"the pip section lacks {line!r}")
    for requirement in requirements:
        if requirement.marker is None and plain(requirement.name) not in {*conda, *by_pip}:
            problems.append(f"{requirement.name} is missing")
    return problems


def running_problems(requirements, pins, version_of=importlib.metadata.version):
    """Direct dependencies whose installed version is not the pinned one; a local label such as +cpu may differ."""
    problems = []
    for requirement in requirements:
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        try:
            installed = Version(version_of(requirement.name)).public
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"{requirement.name} is not installed")
            continue
        pin = pins.get(plain(requirement.name))
        if pin is None or installed != pinned_version(pin):
            problems.append(f"{requirement.name} {installed} is installed, constraints.txt has {pin}")
    return problems


# --- the course's own files ---

PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
REQUIREMENTS = read_requirements(PYPROJECT)
PINS = read_pins((ROOT / "constraints.txt").read_text(encoding="utf-8"))


def test_every_line_of_the_constraints_is_one_exact_version():
    assert bad_pins(PINS) == []


def test_every_dependency_is_pinned():
    assert unpinned(REQUIREMENTS, PINS) == []


def test_every_pin_is_in_range_and_for_the_same_platforms():
    assert out_of_range(REQUIREMENTS, PINS) == []
    assert markers_that_differ(REQUIREMENTS, PINS) == []


def test_torch_and_triton_are_the_pair_that_belongs_together():
    assert str(PINS["torch"]) == "torch==2.13.0"
    assert str(PINS["triton"]) == 'triton==3.7.1; sys_platform == "linux"'


def test_the_conda_environment_agrees():
    requires_python = tomllib.loads(PYPROJECT)["project"]["requires-python"]
    environment = (ROOT / "environment.yml").read_text(encoding="utf-8")
    assert conda_problems(environment, REQUIREMENTS, PINS, requires_python) == []


def test_the_running_environment_agrees():
    assert running_problems(REQUIREMENTS, PINS) == []


# --- each check rejects a small bad example, and accepts a good one ---

SMALL = read_requirements('[project]\ndependencies = ["torch>=2.9"]\noptional-dependencies.test = ["pytest>=8,<10"]')
GOOD = read_pins("# a comment\ntorch==2.13.0\npytest==9.2.0\n")
CONDA = """
dependencies:
  ["python>=3.11,<3.14", pip, pytorch==2.13.0, pytest==9.2.0, pip: [-c constraints.txt, "-e .[course,test]"]]
"""


@pytest.mark.parametrize("line", ["torch>=2.13.0", "torch==2.13.0+cpu", "torch==2.13.*", "torch"])
def test_a_line_that_is_no_exact_version_is_found(line):
    assert bad_pins(read_pins(line)) and not bad_pins(GOOD)


def test_a_missing_pin_is_found():
    assert unpinned(SMALL, read_pins("torch==2.13.0")) == ["pytest has no line in constraints.txt"]
    assert not unpinned(SMALL, GOOD)


@pytest.mark.parametrize("pins", ["torch==2.8.0", "pytest==10.0.0"])
def test_a_pin_outside_of_its_range_is_found(pins):
    assert out_of_range(SMALL, read_pins(pins)) and not out_of_range(SMALL, GOOD)


def test_a_pin_for_fewer_platforms_is_found():
    assert markers_that_differ(SMALL, read_pins('torch==2.13.0; sys_platform == "linux"'))
    assert not markers_that_differ(SMALL, GOOD)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("pytorch==2.13.0", "pytorch==2.12.0"),
        ("pytest==9.2.0", "pytest>=9.2.0"),
        ("pytest==9.2.0,", ""),
        ("<3.14", "<3.15"),
        ("pip,", "pip, unheard-of==1.0,"),
        ("-c constraints.txt, ", ""),
    ],
)
def test_a_conda_environment_that_differs_is_found(old, new):
    assert old in CONDA
    assert not conda_problems(CONDA, SMALL, GOOD, ">=3.11,<3.14")
    assert conda_problems(CONDA.replace(old, new), SMALL, GOOD, ">=3.11,<3.14")


def test_an_environment_with_another_version_is_found():
    versions = {"torch": "2.13.0+cpu", "pytest": "9.2.0"}
    assert not running_problems(SMALL, GOOD, versions.__getitem__)
    assert running_problems(SMALL, GOOD, (versions | {"torch": "2.12.1"}).__getitem__)

    def nothing_installed(name):
        raise importlib.metadata.PackageNotFoundError(name)

    assert running_problems(SMALL, GOOD, nothing_installed) == ["torch is not installed", "pytest is not installed"]
