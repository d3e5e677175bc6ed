"""Test the installation: pinned versions, Makefile, settings of Jupyter, wheel, and workflows."""

import ast
import contextlib
import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import pytest
from minimal_environment import modules_of, packages_of
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import course_lib

yaml = pytest.importorskip("yaml", reason="PyYAML comes with JupyterLab")

ROOT = Path(__file__).parents[2]


def read_requirements(*extras):
    """Return the requirements of the library and of these extras."""
    groups = [PROJECT["dependencies"], *(EXTRAS[name] for name in extras)]
    return [Requirement(text) for group in groups for text in group]


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
CONSTRAINTS = re.findall(r"^[^#\n]+", (ROOT / "constraints.txt").read_text("utf-8"), re.M)
# package -> its one line in constraints.txt
PINS = {canonicalize_name(pin.name): pin for pin in map(Requirement, CONSTRAINTS)}


def test_dependencies_are_pinned_to_installed_versions():
    assert all(re.fullmatch(r"==\d[\da-z.]*", str(pin.specifier)) for pin in PINS.values())
    for needed in read_requirements(*EXTRAS):
        pin = PINS[canonicalize_name(needed.name)]
        assert needed.specifier.contains(str(pin.specifier)[2:], prereleases=True), f"{needed}"
        assert str(pin.marker) == str(needed.marker), "constraints.txt and pyproject.toml differ"


def test_pinned_packages_support_oldest_supported_python():
    oldest = f"{re.search(r'>=([0-9.]+)', PROJECT['requires-python'])[1]}.0"
    too_new = []
    for pin in PINS.values():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # of another platform
            installed = importlib.metadata.distribution(pin.name)
            version = Version(installed.version).public  # without a local label such as +cpu
            assert f"=={version}" == str(pin.specifier), f"{pin.name} {version}: make install"
            needed = installed.metadata.get("Requires-Python", "")
            if not SpecifierSet(needed).contains(oldest):
                too_new.append(f"{pin} needs Python {needed}, but {oldest} is promised")
    assert too_new == []


def test_indirect_dependencies_are_pinned():
    """Without a pin, pip may try many versions of a package."""
    required = packages_of(read_requirements(*(EXTRAS.keys() - {"peers"})))
    installed = {canonicalize_name(each.name) for each in importlib.metadata.distributions()}
    by_cuda = re.compile("nvidia-|cuda-")  # torch's CUDA build names their versions
    assert {each for each in required & installed if not by_cuda.match(each)} - PINS.keys() <= {
        "setuptools"  # a new environment may have another version
    }


def test_pinned_triton_version_matches_pinned_torch():
    pair = [str(PINS[name]) for name in ("torch", "triton")]
    # torch's package for CUDA names its triton; the one for CPUs does not
    expected = ["torch==2.13.0", 'triton==3.7.1; sys_platform == "linux"']
    assert pair == expected, "look up the triton of this torch, then change the pair here as well"


OLDEST = re.search(r"torch>=([\d.]+)", " ".join(PROJECT["dependencies"]))[1]
NUMBERS = OLDEST.replace(".", ", ")
RECORDED = re.search(r"with torch ([\d.]+),\nCUDA", (ROOT / "docs/gpus.md").read_text("utf-8"))[1]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("pyproject.toml", f"from torch {OLDEST} on"),
        ("course_lib/lessons/lesson_00/figures.py", f'({NUMBERS}), "{OLDEST}"'),
        ("course_lib/lessons/__main__.py", f"({NUMBERS})"),
        ("course_lib/lessons/__main__.py", f"takes {OLDEST} or newer"),
        ("docs/gpus.md", f"torch ≥ {OLDEST}"),
        ("docs/gpus.md", f"with torch {OLDEST}.0, {RECORDED}.0"),
        ("docs/gpus.zh.md", f"torch ≥ {OLDEST}"),
        ("CONTRIBUTING.md", f"TORCH_VERSION={OLDEST}.0"),
        ("Makefile", f"TORCH_VERSION={OLDEST}.0"),
    ],
)
def test_all_files_state_same_oldest_supported_torch_version(file, text):
    assert text in (ROOT / file).read_text(encoding="utf-8")


def test_conda_environment_installs_packages_with_pip():
    conda = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))["dependencies"]
    by_pip = {"pip": ["-c constraints.txt", "-e .[course]"]}
    assert conda == ["python" + PROJECT["requires-python"], "pip", by_pip]


# --- the Makefile ---


def make(*arguments):
    """Return the commands that `make` would run, or its error message."""
    done = subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else done.stderr


def commands(folder, *arguments):
    """Return the commands that install the course into an environment in this folder."""
    target = f"{folder}/.course-installed"
    return make(target, f"VENV={folder}", f"PYTHON={sys.executable}", *arguments)


CPU = f"--index-url https://download.pytorch.org/whl/cpu {PINS['torch']}"


def test_make_installs_cpu_torch_first_on_request(tmp_path):
    lines = commands(tmp_path / "new", "TORCH=cpu")
    places = [lines.index(each) for each in ("-m venv", CPU, "-e '.[course]' -c constraints.txt")]
    assert places == sorted(places)
    assert CPU not in commands(tmp_path / "new")
    assert 'TORCH must be cpu or empty, got "gpu"' in commands(tmp_path / "new", "TORCH=gpu")


def test_make_preserves_cpu_torch_of_existing_environment(tmp_path):
    (tmp_path / "bin").mkdir()
    stamps = [tmp_path / name for name in ("bin/pip", ".course-torch-cpu", ".course-installed")]
    for stamp in stamps:
        stamp.touch()
    assert "pip install" not in commands(tmp_path) + commands(tmp_path, "TORCH=cpu")
    stamps[2].unlink()  # as after `make clean`
    assert CPU not in commands(tmp_path) and "-c constraints.txt" in commands(tmp_path)
    os.utime(stamps[1], (0, 0))  # other constraints since
    assert CPU in commands(tmp_path)
    stamps[1].unlink()  # an environment with CUDA
    stamps[2].touch()
    assert "pip install" not in commands(tmp_path)
    assert CPU in commands(tmp_path, "TORCH=cpu")


def test_pip_constraints_preserve_installed_cpu_torch(tmp_path):
    """PyPI's build with CUDA satisfies torch==2.13.0; only the whole version excludes it."""
    stamps = [tmp_path / name for name in (".course-torch-cpu", ".course-test-installed")]
    constraints = f"' -c constraints.txt -c {stamps[0]}\n"
    lines = commands(tmp_path, "TORCH=cpu", str(stamps[1]))
    assert lines.count(constraints) == lines.count("pip install") - 1 == 2
    assert constraints not in commands(tmp_path, str(stamps[1]))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/pip").touch()
    script = f'#!/bin/sh\ncase "$*" in *"-m pip"*) exit;; esac\nexec {sys.executable} "$@"\n'
    (tmp_path / "bin/python").write_text(script)
    (tmp_path / "bin/python").chmod(0o755)
    subprocess.run(["make", stamps[0], f"VENV={tmp_path}", "TORCH=cpu"], cwd=ROOT, check=True)
    assert stamps[0].read_text() == f"torch=={importlib.metadata.version('torch')}\n"
    assert constraints in commands(tmp_path)


# --- Jupyter's settings ---

JUPYTERLAB = ROOT / "publish/jupyterlab"
SETTINGS = json.loads((JUPYTERLAB / "server.json").read_text("utf-8"))


def listed(folder, settings):
    """Return the names in Jupyter's file list of a folder, except those of lessons."""
    manager = pytest.importorskip("jupyter_server.services.contents.filemanager")
    config = pytest.importorskip("traitlets.config").Config(settings)
    contents = manager.FileContentsManager(root_dir=str(folder), config=config)
    names = {entry["name"] for entry in contents.get("", type="directory")["content"]}
    return {name for name in names if not re.fullmatch(r"\d\d_\w+\.ipynb", name)}


def test_jupyterlab_file_browser_shows_only_files_for_learners(tmp_path):
    assert listed(ROOT / "notebooks", SETTINGS) == {"GLOSSARY.md", "INSTRUCTORS.md"}
    work = pytest.importorskip("publish.work")
    work.write_edition(ROOT / "notebooks", tmp_path)
    (tmp_path / work.GIVEN).mkdir()
    assert listed(tmp_path, SETTINGS) == {"GLOSSARY.md", "docs", "examples"}


def test_make_and_binder_install_jupyter_settings(tmp_path, monkeypatch):
    places = {
        "overrides.json": "share/jupyter/lab/settings/overrides.json",
        "server.json": "etc/jupyter/jupyter_server_config.json",
        "ipython_kernel_config.json": "etc/ipython/ipython_kernel_config.json",
    }
    for target in ("test", "lab", "results", "install", "browser", "notebooks", "grade"):
        lines = make(target, f"VENV={tmp_path}")
        for name, place in places.items():
            source = (JUPYTERLAB / name).relative_to(ROOT)
            assert f"cp {source} {tmp_path}/{place}\n" in lines
    (tmp_path / "bin").mkdir()
    for program, line in (("python", f"echo {tmp_path}"), ("jupyter", "true")):
        (tmp_path / "bin" / program).write_text(f"#!/bin/sh\n{line}\n", "utf-8")
        (tmp_path / "bin" / program).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}"}
    subprocess.run([ROOT / "binder/postBuild"], cwd=ROOT, env=environment, check=True)
    for name, place in places.items():
        assert (tmp_path / place).read_bytes() == (JUPYTERLAB / name).read_bytes()
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", f"{tmp_path}/etc/jupyter")
    server = pytest.importorskip("jupyter_server.serverapp").ServerApp()
    server.load_config_file()
    assert "scripts" in server.config.ContentsManager.hide_globs


def test_saving_notebook_leaves_script_unchanged():
    """Jupytext's extension of JupyterLab would write a learner's answers into the script."""
    jupytext = pytest.importorskip("jupytext")
    assert jupytext.config.find_jupytext_configuration_file(str(ROOT / "notebooks"))
    extensions = SETTINGS["ServerApp"]["jpserver_extensions"]
    (name,) = [name for name, on in extensions.items() if not on]
    assert callable(importlib.import_module(name).load_jupyter_server_extension)


def test_library_version_equals_project_version():
    assert course_lib.__version__ == PROJECT["version"]


# --- the extra `course` ---


MISSING = re.compile(r"\b(ImportError|ModuleNotFoundError|Exception)\b")


def unguarded_imports(source):
    """Return the top-level packages that code imports outside a `try` with an import error."""
    tree = ast.parse(source)
    guarded = {
        each
        for node in ast.walk(tree)
        if isinstance(node, ast.Try)
        and any(MISSING.search(ast.unparse(handler.type)) for handler in node.handlers)
        for part in node.body
        for each in ast.walk(part)
    }
    names = []
    for node in set(ast.walk(tree)) - guarded:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.append(node.module)
    return {name.partition(".")[0] for name in names}


def test_required_third_party_imports_are_listed_in_course_extra():
    library = [path for path in ROOT.glob("course_lib/**/*.py") if "fonts" not in path.parts]
    paths = [*ROOT.glob("notebooks/scripts/*.py"), *library]
    present = modules_of(packages_of(read_requirements("course"))) | {"course_lib"}
    found = {path: unguarded_imports(path.read_text("utf-8")) for path in paths}
    missing = {path: names - sys.stdlib_module_names - present for path, names in found.items()}
    assert len(library) > 100 and not any(missing.values()), missing


def test_make_installs_test_packages_for_test_targets_only(tmp_path):
    """`make lab` requires the first stamp only; the second installs the other packages."""
    assert "course,docs,test" not in commands(tmp_path / "new")
    both = commands(tmp_path / "new", f"{tmp_path}/new/.course-test-installed")
    assert both.index("'.[course]'") < both.index("'.[course,docs,test]' -c constraints.txt")
    rules = (ROOT / "Makefile").read_text("utf-8")
    needs = dict(re.findall(r"^([\w-]+): (\$\(\w+\))", rules, re.M))
    learners = ("lab", "notebooks", "student", "pages", "grade")
    assert {needs[target] for target in learners} == {"$(INSTALLED)"}
    assert {needs[target] for target in ("test", "check", "browser", "site")} == {"$(COMPLETE)"}


# --- workflows, containers, Binder ---

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def missing_in(command):
    """Return the targets of make and the files that a command names and that do not exist."""
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M)
    unknown = set(re.findall(r"\bmake ([\w-]+)", command)) - set(targets)
    files = re.findall(r"(?:^|\s)((?:tests|\.ci|notebooks)/[\w./]+)", command)
    return [*unknown, *(file for file in files if not (ROOT / file).exists())]


@pytest.mark.parametrize("path", WORKFLOWS, ids=[path.stem for path in WORKFLOWS])
def test_commands_in_ci_workflow_exist(path):
    workflow = yaml.safe_load(path.read_text("utf-8"))
    for job in workflow["jobs"].values():
        for step in job["steps"]:
            assert missing_in(step.get("run", "")) == []


def test_container_and_binder_install_pinned_cpu_versions():
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text("utf-8"))
    for line in (container["postCreateCommand"], container["postAttachCommand"]):
        assert missing_in(line) == []
    assert "TORCH=cpu" in container["postCreateCommand"]
    python = container["image"].rpartition(":")[2]
    assert (ROOT / "binder/runtime.txt").read_text("utf-8").strip() == f"python-{python}"
    assert Requirement(f"python{PROJECT['requires-python']}").specifier.contains(f"{python}.1")
    lines = (ROOT / "binder/requirements.txt").read_text("utf-8").splitlines()
    assert {f"{PINS['torch']}+cpu", "-e .[course]"} <= set(lines)
    (constraints,) = [line.split()[1] for line in lines if line.startswith("-c ")]
    assert (ROOT / "binder" / constraints).resolve() == ROOT / "constraints.txt"


def test_make_with_other_torch_version_uses_separate_environment(tmp_path):
    lines = partial(make, "test-library", f"OTHER_VENV={tmp_path}")
    oldest = lines(f"TORCH_VERSION={OLDEST}.0")
    assert f"--upgrade torch=={OLDEST}.0" in oldest and "torch==" not in lines()
    assert "download.pytorch.org/whl/cpu" in lines("TORCH=cpu")
    assert f"{tmp_path}/constraints.txt" in oldest and " -c constraints.txt" not in oldest
    assert "tests/library/test_" in oldest and missing_in(oldest) == []
