"""There is one list of what to install, and the environment that runs agrees with it; the wheel is
whole."""

import ast
import contextlib
import importlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from functools import cache, partial
from pathlib import Path

import pytest
from make_variables import forget_make

import course_lib

yaml = pytest.importorskip("yaml", reason="PyYAML comes with JupyterLab")
Requirement = pytest.importorskip("packaging.requirements").Requirement
SpecifierSet = pytest.importorskip("packaging.specifiers").SpecifierSet
Version = pytest.importorskip("packaging.version").Version

ROOT = Path(__file__).parents[1]


def plain(name):
    """A package's name as package tools compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_requirements(project, *extras):
    """The requirements of the library and of its extras."""
    groups = [project["dependencies"], *(project["optional-dependencies"][name] for name in extras)]
    return [Requirement(text) for group in groups for text in group]


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
CONSTRAINTS = re.findall(r"^[^#\n]+", (ROOT / "constraints.txt").read_text("utf-8"), re.M)
# package -> its one line in constraints.txt
PINS = {plain(pin.name): pin for pin in map(Requirement, CONSTRAINTS)}


def test_every_dependency_is_pinned_to_one_version_and_that_one_runs():
    assert all(re.fullmatch(r"==\d[\da-z.]*", str(pin.specifier)) for pin in PINS.values())
    for needed in read_requirements(PROJECT, *EXTRAS):
        pin = PINS[plain(needed.name)]
        assert needed.specifier.contains(str(pin.specifier)[2:], prereleases=True), f"{needed}"
        assert str(pin.marker) == str(needed.marker), "constraints.txt and pyproject.toml differ"
    for needed in read_requirements(PROJECT, *(EXTRAS.keys() - {"peers"})):  # which few install
        if needed.marker is None or needed.marker.evaluate():
            # a local label such as +cpu may differ
            public = Version(importlib.metadata.version(needed.name)).public
            pinned = str(PINS[plain(needed.name)].specifier)
            assert f"=={public}" == pinned, f"{needed.name} {public} is installed: make install"


def test_every_installed_pin_supports_the_oldest_python_that_is_promised():
    oldest = f"{re.search(r'>=([0-9.]+)', PROJECT['requires-python'])[1]}.0"
    too_new = []
    for pin in PINS.values():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # of another platform
            installed = importlib.metadata.distribution(pin.name)
            version = Version(installed.version).public
            assert f"=={version}" == str(pin.specifier), f"{pin.name} {version}: make install"
            needed = installed.metadata.get("Requires-Python", "")
            if not SpecifierSet(needed).contains(oldest):
                too_new.append(f"{pin} needs Python {needed}, but {oldest} is promised")
    assert too_new == []


def test_every_package_that_the_extras_bring_is_pinned():
    """If several versions of a package are allowed, pip may try them all."""
    brought = brought_by(read_requirements(PROJECT, *(EXTRAS.keys() - {"peers"})))
    here = {plain(each.name) for each in importlib.metadata.distributions()}
    by_cuda = re.compile("nvidia-|cuda-")  # torch's CUDA build names their versions
    assert {each for each in brought & here if not by_cuda.match(each)} - PINS.keys() <= {
        "setuptools"  # a new environment may have another version
    }


def test_the_extra_for_plots_is_what_the_lessons_draw_with():
    assert EXTRAS["plot"] == [each for each in EXTRAS["course"] if each.startswith("matplotlib")]


def test_torch_and_triton_are_the_pair_that_belongs_together():
    pair = [str(PINS[name]) for name in ("torch", "triton")]
    # torch's package for CUDA names its triton; the one for CPUs does not
    expected = ["torch==2.13.0", 'triton==3.7.1; sys_platform == "linux"']
    assert pair == expected, "look up the triton of this torch, then change the pair here as well"


OLDEST = re.search(r"torch>=([\d.]+)", " ".join(PROJECT["dependencies"]))[1]
NUMBERS = OLDEST.replace(".", ", ")
RECORDED = re.search(r"with torch ([\d.]+),\nCUDA", (ROOT / "docs/gpus.md").read_text("utf-8"))[1]


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("pyproject.toml", f"from torch {OLDEST} on"),
        ("course_lib/lessons/lesson_00.py", f'({NUMBERS}), "{OLDEST}"'),
        ("course_lib/lessons/__main__.py", f"({NUMBERS})"),
        ("course_lib/lessons/__main__.py", f"takes {OLDEST} or newer"),
        ("docs/gpus.md", f"torch ≥ {OLDEST}"),
        ("docs/gpus.md", f"with torch {OLDEST}.0, {RECORDED}.0"),
        ("docs/gpus.zh.md", f"torch ≥ {OLDEST}"),
        ("CONTRIBUTING.md", f"TORCH_VERSION={OLDEST}.0"),
        ("Makefile", f"TORCH_VERSION={OLDEST}.0"),
    ],
)
def test_every_place_that_names_the_oldest_torch_names_that_of_pyproject(file, said):
    assert said in (ROOT / file).read_text(encoding="utf-8")


def test_conda_gives_python_and_pip_and_pip_all_the_rest():
    conda = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))["dependencies"]
    by_pip = {"pip": ["-c constraints.txt", "-e .[course]"]}
    assert conda == ["python" + PROJECT["requires-python"], "pip", by_pip]


# --- the Makefile ---


def make(*arguments, folder=ROOT, variables=os.environ):
    """What `make` would run; a failure is its last line."""
    if shutil.which("make") is None:
        pytest.skip("needs make")
    command = ["make", "-n", *arguments]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else done.stderr


def with_python(place, pip):
    """Make an environment whose Python runs these shell commands instead of pip."""
    if shutil.which("make") is None:
        pytest.skip("needs make")
    (place / "bin").mkdir()
    (place / "bin/pip").touch()
    script = f'#!/bin/sh\ncase "$*" in *"-m pip"*) {pip};; esac\nexec {sys.executable} "$@"\n'
    (place / "bin/python").write_text(script)
    (place / "bin/python").chmod(0o755)


def commands(place, *arguments):
    """What `make` would run for an environment at that place."""
    goal = f"{place}/.course-installed"
    return make(goal, f"VENV={place}", f"PYTHON={sys.executable}", *arguments)


CPU = f"--index-url https://download.pytorch.org/whl/cpu {PINS['torch']}"


def test_make_takes_torch_without_cuda_first_where_it_is_asked_to(tmp_path):
    said = commands(tmp_path / "new", "TORCH=cpu")
    places = [said.index(each) for each in ("-m venv", CPU, "-e '.[course]' -c constraints.txt")]
    assert places == sorted(places)
    assert CPU not in commands(tmp_path / "new")
    assert 'TORCH must be cpu or empty, got "gpu"' in commands(tmp_path / "new", "TORCH=gpu")


@pytest.mark.parametrize(("arguments", "variables"), [(["TORCH=cpu"], {}), ([], {"TORCH": "cpu"})])
def test_make_in_a_test_ignores_variables_of_make_test(tmp_path, arguments, variables):
    """What `make test TORCH=cpu` and `TORCH=cpu make test` hand on to Python; then the `make` of a
    student's Makefile, with the variables that the tests keep."""
    if shutil.which("make") is None:
        pytest.skip("needs make")
    writes = "import json, os; print(json.dumps(dict(os.environ)))"
    (tmp_path / "Makefile").write_text(f"test:\n\t@{sys.executable} -c '{writes}'\n")
    inherited = {**os.environ, **variables}
    said = subprocess.check_output(["make", "test", *arguments], cwd=tmp_path, env=inherited)
    environment = json.loads(said)
    shutil.copy(ROOT / "publish/student_assets/Makefile", tmp_path)
    (tmp_path / "constraints.txt").write_text(f"{PINS['torch']}\n")
    # the variables of `make test` do reach what it starts
    assert CPU in make("lab", folder=tmp_path, variables=environment)
    forget_make(environment)
    said = make("lab", folder=tmp_path, variables=environment)
    assert "--index-url" not in said and "-m venv" in said


def test_an_environment_that_has_torch_without_cuda_keeps_to_it(tmp_path):
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


def test_pip_may_not_replace_torch_without_cuda(tmp_path):
    """PyPI's build with CUDA satisfies torch==2.13.0; only the whole version excludes it."""
    stamps = [tmp_path / name for name in (".course-torch-cpu", ".course-test-installed")]
    exactly = f"' -c constraints.txt -c {stamps[0]} "
    said = commands(tmp_path, "TORCH=cpu", str(stamps[1]))
    assert said.count(exactly) == said.count("pip install") - 1 == 2
    assert exactly not in commands(tmp_path, str(stamps[1]))
    with_python(tmp_path, pip="exit 0")
    subprocess.run(["make", stamps[0], f"VENV={tmp_path}", "TORCH=cpu"], cwd=ROOT, check=True)
    assert stamps[0].read_text() == f"torch=={importlib.metadata.version('torch')}\n"
    assert exactly in commands(tmp_path)


CONFLICT = """ERROR: Cannot install a because these package versions have conflicting dependencies.

The conflict is caused by:
    a 1.0 depends on b>1
    The user requested (constraint) b==2

ERROR: ResolutionImpossible: for help visit a page"""
NO_VERSION = """ERROR: Could not find a version that satisfies the requirement b==2
ERROR: No matching distribution found for b==2"""


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (CONFLICT, "The user requested (constraint) b==2"),
        (NO_VERSION, "No matching distribution found for b==2"),
        ("ERROR: [Errno 28] No space left on device", "[Errno 28] No space left on device"),
    ],
)
def test_a_failed_installation_shows_the_reason_last(tmp_path, output, reason):
    log = "\n".join(f"2026-11-28T15:44:33,331 {line}" for line in output.splitlines())
    (tmp_path / "output").write_text(f"{log}\n")
    with_python(tmp_path, pip=f"cp {tmp_path}/output {tmp_path}/pip.log; exit 1")
    for name in ("torch-cpu", "installed", "test-installed"):
        command = ["make", f"{tmp_path}/.course-{name}", f"VENV={tmp_path}"]
        failed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        *_, last, of_make = failed.stderr.splitlines()
        assert failed.returncode and of_make.startswith("make: ***")
        assert last == f"pip failed (all messages are in {tmp_path}/pip.log): {reason}"
        (tmp_path / f".course-{name}").touch()  # the next one needs it


# --- the file list ---

JUPYTERLAB = ROOT / "publish/jupyterlab"
SETTINGS = json.loads((JUPYTERLAB / "server.json").read_text("utf-8"))


def listed(folder, settings):
    """The names that Jupyter's file list shows for a folder under these settings, apart from those
    of lessons."""
    manager = pytest.importorskip("jupyter_server.services.contents.filemanager")
    config = pytest.importorskip("traitlets.config").Config(settings)
    contents = manager.FileContentsManager(root_dir=str(folder), config=config)
    names = {entry["name"] for entry in contents.get("", type="directory")["content"]}
    return {name for name in names if not re.fullmatch(r"\d\d_\w+\.ipynb", name)}


def test_the_file_list_shows_lessons_and_what_a_reader_needs_beside_them_alone(tmp_path):
    """A learner's copy has no file for instructors, and its hidden files are not in the list."""
    shown = listed(ROOT / "notebooks", SETTINGS)
    assert shown == {"GLOSSARY.md", "INSTRUCTORS.md"}
    assert listed(ROOT / "notebooks", {}) - shown == {"scripts"}
    work = pytest.importorskip("publish.work")
    work.write_edition(ROOT / "notebooks", tmp_path)
    (tmp_path / work.GIVEN).mkdir()
    assert listed(tmp_path, SETTINGS) == {"GLOSSARY.md", "docs", "examples"}


def test_make_and_the_cloud_put_jupyters_settings_where_it_looks_for_them(tmp_path, monkeypatch):
    places = {
        "overrides.json": "share/jupyter/lab/settings/overrides.json",
        "server.json": "etc/jupyter/jupyter_server_config.json",
        "ipython_kernel_config.json": "etc/ipython/ipython_kernel_config.json",
    }
    said = commands(tmp_path, *(f"{tmp_path}/{place}" for place in places.values()), "install")
    for name, place in places.items():
        source = (JUPYTERLAB / name).relative_to(ROOT)
        assert f"cp {source} {tmp_path}/{place}\n" in said
    (tmp_path / "bin").mkdir()
    for program, does in (("python", f"echo {tmp_path}"), ("jupyter", "true")):
        (tmp_path / "bin" / program).write_text(f"#!/bin/sh\n{does}\n", "utf-8")
        (tmp_path / "bin" / program).chmod(0o755)
    found_first = {**os.environ, "PATH": f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}"}
    subprocess.run([ROOT / "binder/postBuild"], cwd=ROOT, env=found_first, check=True)
    for name, place in places.items():
        assert (tmp_path / place).read_bytes() == (JUPYTERLAB / name).read_bytes()
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", f"{tmp_path}/etc/jupyter")
    server = pytest.importorskip("jupyter_server.serverapp").ServerApp()
    server.load_config_file()
    assert "scripts" in server.config.ContentsManager.hide_globs


def test_a_saved_notebook_leaves_its_script_alone():
    """jupytext.toml pairs them for `make notebooks`; JupyterLab's part of jupytext would do so as
    well, and write a reader's answers into the lesson's source."""
    jupytext = pytest.importorskip("jupytext")
    assert jupytext.config.find_jupytext_configuration_file(str(ROOT / "notebooks"))
    extensions = SETTINGS["ServerApp"]["jpserver_extensions"]
    (name,) = [name for name, on in extensions.items() if not on]
    assert callable(importlib.import_module(name).load_jupyter_server_extension)


# --- the wheel ---


def test_the_wheel_holds_the_library_and_the_lessons_but_not_what_makes_site_and_slides(tmp_path):
    """Built where it may write, with the setuptools that is here: nothing is downloaded."""
    pytest.importorskip("setuptools", minversion="77")
    unwanted = shutil.ignore_patterns("__pycache__", ".*")
    shutil.copytree(ROOT / "course_lib", tmp_path / "course_lib", ignore=unwanted)
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    build = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("course_lib/")}
    there = filter(Path.is_file, (tmp_path / "course_lib").rglob("*"))
    assert {path.relative_to(tmp_path).as_posix() for path in there} == packed
    # a lesson can read what a learner has, so its stored outputs follow from the same files
    pytest.importorskip("jupytext")
    from publish import dependencies, notebooks

    scripts = sorted((ROOT / "notebooks" / "scripts").glob("[0-9]*.py"))
    library = dependencies.Library(ROOT)
    one = library.closure(ast.parse("from course_lib.lessons.lesson_02 import own_code"))
    own = {name for name in one if name.startswith("course_lib.lessons.lesson_02.")}
    # `on_gpu` finds `gpu` by the number
    assert own == {f"course_lib.lessons.lesson_02.{file}" for file in ("own_code", "gpu")}
    used = {
        n for s in scripts for n in library.closure(notebooks.code_of(notebooks.read_script(s)))
    }
    hashed = [*(library.paths[name] for name in used), *library.data_of(used)]
    assert used and {path.relative_to(ROOT).as_posix() for path in hashed} <= packed


def test_the_library_says_the_version_of_its_distribution():
    assert course_lib.__version__ == PROJECT["version"]


# --- what a learner installs ---


MISSING = re.compile(r"\b(ImportError|ModuleNotFoundError|Exception)\b")


def unguarded_imports(source):
    """Top-level packages that code imports, wherever it does, outside of a `try` that goes on
    without them."""
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


def brought_by(requirements):
    """Names of these distributions, and of all that they bring along, as installed here."""
    found, waiting = set(), list(requirements)
    for each in waiting:
        if plain(each.name) in found or (each.marker and not each.marker.evaluate({"extra": ""})):
            continue
        found.add(plain(each.name))
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # of another platform
            waiting += map(Requirement, importlib.metadata.requires(each.name) or [])
    return found


@cache
def for_learners():
    """The packages that a distribution of `[course]` brings."""
    here = brought_by(read_requirements(PROJECT, "course"))
    whose = importlib.metadata.packages_distributions()
    return {name for name, names in whose.items() if here & set(map(plain, names))}


def not_for_learners(source):
    """Imported packages that no distribution of `[course]` brings."""
    own = sys.stdlib_module_names | {"course_lib"}
    return unguarded_imports(source) - own - for_learners()


def test_what_lessons_and_the_library_import_is_in_course_or_guarded():
    library = [path for path in ROOT.glob("course_lib/**/*.py") if "fonts" not in path.parts]
    paths = [*ROOT.glob("notebooks/scripts/*.py"), *library]
    lacking = {path: not_for_learners(path.read_text("utf-8")) for path in paths}
    assert len(library) > 100 and not any(lacking.values()), lacking


def test_an_import_that_learners_lack_is_found_and_a_guarded_one_is_not():
    assert not_for_learners("def f():\n    import pytest") == {"pytest"}
    assert not_for_learners("import torch, PIL, nbformat, transformers, os") == set()
    for caught, found in (("ImportError", set()), ("KeyError", {"pytest"})):
        assert not_for_learners(f"try:\n    import pytest\nexcept {caught}:\n    pass") == found


def test_make_installs_for_tests_only_what_lessons_do_not_need(tmp_path):
    """The second stamp brings the rest; `make lab` asks for the first alone."""
    assert "course,docs,test" not in commands(tmp_path / "new")
    both = commands(tmp_path / "new", f"{tmp_path}/new/.course-test-installed")
    assert both.index("'.[course]'") < both.index("'.[course,docs,test]' -c constraints.txt")
    rules = (ROOT / "Makefile").read_text("utf-8")
    needs = dict(re.findall(r"^([\w-]+): (\$\(\w+\))", rules, re.M))
    learners = ("lab", "notebooks", "student", "pages", "grade")
    assert {needs[target] for target in learners} == {"$(INSTALLED)"}
    assert {needs[target] for target in ("test", "browser", "site")} == {"$(COMPLETE)"}


@pytest.mark.parametrize(
    "target", ["test", "lab", "results", "install", "browser", "notebooks", "grade"]
)
def test_every_target_that_starts_kernels_gives_them_the_configuration_of_make_lab(
    target, tmp_path
):
    """Whichever target ran first in the folder; the new folder here has none of the files."""
    for stamp in ("bin/pip", ".course-installed", ".course-test-installed", ".course-trusted"):
        (tmp_path / stamp).parent.mkdir(exist_ok=True)
        (tmp_path / stamp).touch()
    copies = [
        line for line in make(target, f"VENV={tmp_path}").splitlines() if line.startswith("cp ")
    ]
    source = "publish/jupyterlab"
    assert copies == [
        f"cp {source}/overrides.json {tmp_path}/share/jupyter/lab/settings/overrides.json",
        f"cp {source}/server.json {tmp_path}/etc/jupyter/jupyter_server_config.json",
        f"cp {source}/ipython_kernel_config.json {tmp_path}/etc/ipython/ipython_kernel_config.json",
    ]


# --- machines elsewhere: workflows, containers, notebooks in a cloud ---

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def missing_in(command):
    """Targets of make and files that a command names and that are not there."""
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M)
    made = set(re.findall(r"\bmake ([\w-]+)", command)) - set(targets)
    files = re.findall(r"(?:^|\s)((?:tests|\.ci|notebooks)/[\w./]+)", command)
    return [*made, *(file for file in files if not (ROOT / file).exists())]


@pytest.mark.parametrize("path", WORKFLOWS, ids=[path.stem for path in WORKFLOWS])
def test_a_workflow_is_one_that_a_host_runs_and_its_commands_are_there(path):
    workflow = yaml.safe_load(path.read_text("utf-8"))
    # YAML takes the key `on` for the truth value
    assert {"name", "permissions", True} <= workflow.keys()
    for job in workflow["jobs"].values():
        assert {"runs-on", "timeout-minutes"} <= job.keys()
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step.get("uses", "a/b@v1"))
            assert missing_in(step.get("run", "")) == []


def test_workflows_run_on_each_push_and_every_week():
    checks, _, weekly = (yaml.safe_load(path.read_text("utf-8")) for path in WORKFLOWS)
    assert "push" in checks[True] and ".ci/run" in str(checks)
    assert "make test" in (ROOT / ".ci/run").read_text("utf-8")
    assert weekly[True]["schedule"][0]["cron"]
    versions = weekly["jobs"]["library"]["strategy"]["matrix"]["torch"]
    assert versions == [f"{OLDEST}.0", f"{RECORDED}.0", "newest"]


def test_the_container_and_the_cloud_install_the_pinned_versions_without_cuda():
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text("utf-8"))
    after = (ROOT / "binder/postBuild").read_text("utf-8")  # which a test above runs
    for line in (container["postCreateCommand"], container["postAttachCommand"], after):
        assert missing_in(line) == []
    assert "TORCH=cpu" in container["postCreateCommand"]
    python = container["image"].rpartition(":")[2]
    assert (ROOT / "binder/runtime.txt").read_text("utf-8").strip() == f"python-{python}"
    assert Requirement(f"python{PROJECT['requires-python']}").specifier.contains(f"{python}.1")
    lines = (ROOT / "binder/requirements.txt").read_text("utf-8").splitlines()
    assert {f"{PINS['torch']}+cpu", "-e .[course]"} <= set(lines)
    (constraints,) = [line.split()[1] for line in lines if line.startswith("-c ")]
    assert (ROOT / "binder" / constraints).resolve() == ROOT / "constraints.txt"


def test_templates_for_issues_have_the_two_fields_that_a_host_asks_for():
    templates = [path.read_text("utf-8") for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.md")]
    headers = [yaml.safe_load(template.split("---\n")[1]) for template in templates]
    assert templates and all({"name", "about"} <= header.keys() for header in headers)


def test_another_torch_gets_an_environment_of_its_own_and_runs_the_library_alone(tmp_path):
    said = partial(make, "test-library", f"OTHER_VENV={tmp_path}")
    oldest = said(f"TORCH_VERSION={OLDEST}.0")
    assert f"--upgrade torch=={OLDEST}.0" in oldest and "torch==" not in said()
    assert "download.pytorch.org/whl/cpu" in said("TORCH=cpu")
    assert f"{tmp_path}/constraints.txt" in oldest and " -c constraints.txt" not in oldest
    tests = re.findall(r"tests/(test_\w+)\.py", oldest)
    assert len(tests) > 15 and all((ROOT / "tests" / f"{name}.py").exists() for name in tests)
    assert not {"test_environment", "test_notebooks", "test_lessons", "test_site"} & set(tests)


def test_hooks_before_a_commit_run_what_is_installed_and_download_nothing():
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    assert repository["repo"] == "local"
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for hook in repository["hooks"]:
        tool = hook["entry"].split()[0].removeprefix(".venv/bin/")
        assert hook["language"] == "system"
        assert f"$(BIN)/{tool}" in makefile and shutil.which(tool, path=Path(sys.executable).parent)
