"""What to install is said once, and the environment that runs agrees with it; the wheel is
whole."""

import ast
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
from functools import cache
from pathlib import Path

import pytest
from make_variables import forget_make

import course_lib

yaml = pytest.importorskip("yaml", reason="PyYAML comes with JupyterLab")
Requirement = pytest.importorskip("packaging.requirements").Requirement
Version = pytest.importorskip("packaging.version").Version

ROOT = Path(__file__).parents[1]


def plain(name):
    """A package's name as package tools compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_requirements(pyproject, without=None):
    """All requirements of the library and of its extras, but for one of these."""
    project = tomllib.loads(pyproject)["project"]
    extras = project.get("optional-dependencies", {})
    groups = [project["dependencies"], *(extras[name] for name in extras if name != without)]
    return [Requirement(text) for group in groups for text in group]


def read_pins(constraints):
    """Package -> its one line in constraints.txt."""
    lines = (line.split("#")[0].strip() for line in constraints.splitlines())
    return {plain(pin.name): pin for pin in (Requirement(line) for line in lines if line)}


def pin_problems(requirements, pins):
    """Every requirement has one exact public version, within its range and for the same
    platforms."""
    problems = [
        f"{pin} is not exact"
        for pin in pins.values()
        if not re.fullmatch(r"==\d[\da-z.]*", str(pin.specifier))
    ]
    for requirement in requirements:
        pin = pins.get(plain(requirement.name))
        if pin is None:
            problems.append(f"{requirement.name} has no line in constraints.txt")
        elif not requirement.specifier.contains(str(pin.specifier).lstrip("=>~"), prereleases=True):
            problems.append(f"{pin} is outside of pyproject.toml's {requirement}")
        elif str(pin.marker) != str(requirement.marker):
            problems.append(f"{pin} and pyproject.toml's {requirement} are for different platforms")
    return problems


def running_problems(requirements, pins, version_of=importlib.metadata.version):
    """Direct dependencies whose installed version is not the pinned one; a local label such as +cpu
    may differ."""
    problems = []
    for requirement in requirements:
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        try:
            installed = Version(version_of(requirement.name)).public
        except importlib.metadata.PackageNotFoundError:
            installed = "nothing"
        pin = pins.get(plain(requirement.name))
        if pin is None or f"=={installed}" != str(pin.specifier):
            problems.append(
                f"{requirement.name}: {installed} is installed, constraints.txt has {pin}"
            )
    return problems


PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
REQUIREMENTS = read_requirements(PYPROJECT)
PINS = read_pins((ROOT / "constraints.txt").read_text(encoding="utf-8"))


def test_every_dependency_is_pinned_to_one_version_and_that_one_runs():
    assert pin_problems(REQUIREMENTS, PINS) == []
    # which few will install
    assert running_problems(read_requirements(PYPROJECT, without="peers"), PINS) == []


def test_the_extra_for_plots_is_what_the_lessons_draw_with():
    extras = tomllib.loads(PYPROJECT)["project"]["optional-dependencies"]
    assert extras["plot"] == [each for each in extras["course"] if each.startswith("matplotlib")]


def test_torch_and_triton_are_the_pair_that_belongs_together():
    assert str(PINS["torch"]) == "torch==2.13.0"
    assert str(PINS["triton"]) == 'triton==3.7.1; sys_platform == "linux"'


def test_conda_gives_python_and_pip_and_pip_all_the_rest():
    *conda, by_pip = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))[
        "dependencies"
    ]
    assert conda == ["python" + tomllib.loads(PYPROJECT)["project"]["requires-python"], "pip"]
    assert by_pip == {"pip": ["-c constraints.txt", "-e .[course]"]}


SMALL = read_requirements(
    '[project]\ndependencies = ["torch>=2.9"]\noptional-dependencies.test = ["pytest>=8,<10"]'
)
GOOD = "torch==2.13.0\npytest==9.2.0\n"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("torch==2.13.0", "torch>=2.13.0"),
        ("torch==2.13.0", "torch==2.13.0+cpu"),
        ("torch==2.13.0", "torch==2.13.*"),
        ("torch==2.13.0", "torch==2.8.0"),
        ("pytest==9.2.0", "pytest==10.0.0"),
        ("pytest==9.2.0", ""),
        ("torch==2.13.0", 'torch==2.13.0; sys_platform == "linux"'),
    ],
)
def test_a_wrong_pin_is_found(old, new):
    assert pin_problems(SMALL, read_pins(GOOD)) == []
    assert pin_problems(SMALL, read_pins(GOOD.replace(old, new)))


def test_another_version_than_the_pinned_one_is_found():
    versions = {"torch": "2.13.0+cpu", "pytest": "9.2.0"}
    assert running_problems(SMALL, read_pins(GOOD), versions.__getitem__) == []
    assert (
        len(running_problems(SMALL, read_pins(GOOD), (versions | {"torch": "2.12.1"}).__getitem__))
        == 1
    )


# --- the Makefile ---


def commands(place, *arguments, **variables):
    """What `make` would run for an environment at that place; a failure is its last line."""
    if shutil.which("make") is None:
        pytest.skip("needs make")
    environment = {**os.environ, **variables}
    command = [
        "make",
        "-n",
        f"{place}/.course-installed",
        f"VENV={place}",
        f"PYTHON={sys.executable}",
        *arguments,
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else done.stderr


CPU = "--index-url https://download.pytorch.org/whl/cpu torch==2.13.0"


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [(["TORCH=cpu"], {}), ([], {"TORCH": "cpu"})],
    ids=["after", "before"],
)
def test_make_takes_torch_without_cuda_first_where_it_is_asked_to(tmp_path, arguments, variables):
    said = commands(tmp_path / "new", *arguments, **variables)
    assert (
        -1
        < said.index("-m venv")
        < said.index(CPU)
        < said.index("-e '.[course]' -c constraints.txt")
    )
    assert CPU not in commands(tmp_path / "new")
    assert re.search(
        'TORCH must be cpu or empty, got "gpu"', commands(tmp_path / "new", "TORCH=gpu")
    )


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [(["TORCH=cpu"], {}), ([], {"TORCH": "cpu"})],
    ids=["after", "before"],
)
def test_make_in_a_test_ignores_variables_of_make_test(tmp_path, arguments, variables):
    """`make test TORCH=cpu` and `TORCH=cpu make test`, with an environment whose Python writes down
    its variables; then the `make` of a student's Makefile, with the variables that the tests keep.
    """
    if shutil.which("make") is None:
        pytest.skip("needs make")
    venv, log = tmp_path / "venv", tmp_path / "variables.json"
    (venv / "bin").mkdir(parents=True)
    writes = f"import json, os; json.dump(dict(os.environ), open('{log}', 'w'))"
    for name in ("pip", "ruff", "pyrefly", "python"):
        (venv / "bin" / name).write_text(f'#!/bin/sh\nexec {sys.executable} -c "{writes}"\n')
        (venv / "bin" / name).chmod(0o755)
    for stamp in ("torch-cpu", "installed", "test-installed"):
        (venv / f".course-{stamp}").touch()
    subprocess.run(
        ["make", "test", f"VENV={venv}", *arguments],
        cwd=ROOT,
        env={**os.environ, **variables},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    environment = json.loads(log.read_text())
    shutil.copy(ROOT / "publish/student_assets/Makefile", tmp_path)
    (tmp_path / "constraints.txt").write_text("torch==2.13.0\n")

    def said():
        command = ["make", "-n", "lab"]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        ).stdout

    assert CPU in said()  # the variables of `make test` do reach what it starts
    forget_make(environment)
    assert "--index-url" not in said() and "-m venv" in said()


def test_tests_have_forgotten_the_variables_of_make():
    """`conftest.py` removes them, in every worker."""
    kept = dict(os.environ)
    forget_make(kept)
    assert kept == dict(os.environ)


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


# --- the file list ---

JUPYTERLAB = ROOT / "publish/jupyterlab"


def listed(folder, settings):
    """The names that Jupyter's file list has of a folder, as its server is told to show it."""
    manager = pytest.importorskip("jupyter_server.services.contents.filemanager")
    config = pytest.importorskip("traitlets.config").Config(settings)
    contents = manager.FileContentsManager(root_dir=str(folder), config=config)
    return {entry["name"] for entry in contents.get("", type="directory")["content"]}


def test_the_stored_lessons_file_list_shows_lessons_glossary_and_guide_alone():
    settings = json.loads((JUPYTERLAB / "server.json").read_text("utf-8"))
    shown = listed(ROOT / "notebooks", settings)
    assert {name for name in shown if not re.fullmatch(r"\d\d_\w+\.ipynb", name)} == {
        "GLOSSARY.md",
        "INSTRUCTORS.md",
    }
    assert listed(ROOT / "notebooks", {}) - shown == {"scripts"}


def test_a_learners_file_list_has_no_file_for_instructors(tmp_path):
    """The copy's own hidden files are not in the list either."""
    work = pytest.importorskip("publish.work")
    work.write_edition(ROOT / "notebooks", tmp_path)
    (tmp_path / work.GIVEN).mkdir()
    shown = listed(tmp_path, json.loads((JUPYTERLAB / "server.json").read_text("utf-8")))
    assert {name for name in shown if not re.fullmatch(r"\d\d_\w+\.ipynb", name)} == {
        *("GLOSSARY.md", "docs", "examples")
    }


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
    for name, does in (("python", f"echo {tmp_path}"), ("jupyter", "true")):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{does}\n", "utf-8")
        (tmp_path / "bin" / name).chmod(0o755)
    path = f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        [ROOT / "binder/postBuild"], cwd=ROOT, env={**os.environ, "PATH": path}, check=True
    )
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
    settings = json.loads((JUPYTERLAB / "server.json").read_text("utf-8"))
    extensions = settings["ServerApp"]["jpserver_extensions"]
    (name,) = [name for name, on in extensions.items() if not on]
    assert callable(importlib.import_module(name).load_jupyter_server_extension)


# --- the wheel ---


def test_the_wheel_holds_the_library_and_the_lessons_but_not_what_makes_site_and_slides(tmp_path):
    """Built where it may write, with the setuptools that is here: nothing is downloaded."""
    setuptools = pytest.importorskip("setuptools")
    if Version(setuptools.__version__) < Version("77"):
        pytest.skip("needs setuptools 77 or newer")
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
    there = {
        path.relative_to(tmp_path).as_posix()
        for path in (tmp_path / "course_lib").rglob("*")
        if path.is_file()
    }
    assert there == packed
    # a lesson can read what a learner has, so its stored outputs follow from the same files
    pytest.importorskip("jupytext")
    from publish import notebooks

    hashed = {path.relative_to(ROOT).as_posix() for path in notebooks.library_files()}
    assert hashed - packed == {"publish/notebooks.py"} and packed <= hashed


def test_the_library_says_the_version_of_its_distribution():
    assert course_lib.__version__ == tomllib.loads(PYPROJECT)["project"]["version"]


# --- what a learner installs ---

IMPORT_GUARDS = {"ImportError", "ModuleNotFoundError", "Exception"}


def unguarded_imports(source):
    """Top-level packages that code imports, wherever it does, outside of a `try` that goes on
    without them."""
    found = set()

    def look(node, guarded):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module]
        else:
            names = []
        if not guarded:
            found.update(name.partition(".")[0] for name in names)
        if isinstance(node, ast.Try):
            caught = {
                each.id
                for handler in node.handlers
                for each in ast.walk(handler.type or ast.Name("Exception"))
                if isinstance(each, ast.Name)
            }
            for child in node.body:
                look(child, guarded or bool(caught & IMPORT_GUARDS))
            for child in [*node.handlers, *node.orelse, *node.finalbody]:
                look(child, guarded)
            return
        for child in ast.iter_child_nodes(node):
            look(child, guarded)

    look(ast.parse(source), guarded=False)
    return found


def brought_by(requirements):
    """Names of these distributions, and of all that they bring along, as installed here."""
    found, todo = set(), [plain(requirement.name) for requirement in requirements]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        try:
            needed = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform
        for each in map(Requirement, needed):
            if each.marker is None or each.marker.evaluate({"extra": ""}):
                todo.append(plain(each.name))
    return found


def learners_requirements():
    project = tomllib.loads(PYPROJECT)["project"]
    return [
        Requirement(text)
        for text in [*project["dependencies"], *project["optional-dependencies"]["course"]]
    ]


@cache
def installed():
    """(distributions that `[course]` brings, package -> the distributions it may come from)."""
    return brought_by(learners_requirements()), importlib.metadata.packages_distributions()


def not_for_learners(imported):
    """Imported packages that no distribution of `[course]` brings."""
    here, whose = installed()
    return {
        name
        for name in imported - sys.stdlib_module_names - {"course_lib"}
        if not here & {plain(each) for each in whose.get(name, [])}
    }


def test_what_lessons_and_the_library_import_is_in_course_or_guarded():
    lessons = [*(ROOT / "notebooks").glob("scripts/*.py")]
    aside = ("site", "slides", "_assets", "fonts", "images", "lesson_slides", "slide_parts")
    library = [
        path
        for path in (ROOT / "course_lib").rglob("*.py")
        if not any(part.startswith(aside) or part.endswith("_assets") for part in path.parts)
        and path.stem not in aside
    ]
    needed = {}
    for path in [*lessons, *library]:
        if lacking := not_for_learners(unguarded_imports(path.read_text("utf-8"))):
            needed[path.relative_to(ROOT).as_posix()] = lacking
    assert len(library) > 100 and needed == {}


def test_an_import_that_learners_lack_is_found_and_a_guarded_one_is_not():
    assert not_for_learners(unguarded_imports("def f():\n    import pytest")) == {"pytest"}
    assert not_for_learners({"torch", "PIL", "nbformat", "transformers", "os"}) == set()
    guarded = "try:\n    import triton\nexcept ImportError:\n    triton = None"
    assert unguarded_imports(guarded) == set()
    assert unguarded_imports(guarded.replace("ImportError", "KeyError")) == {"triton"}


def test_make_installs_for_tests_only_what_lessons_do_not_need(tmp_path):
    """The second stamp brings the rest; `make lab` asks for the first alone."""
    said = commands(tmp_path / "new")
    assert "'.[course]' -c constraints.txt" in said and "course,docs,test" not in said
    both = commands(tmp_path / "new", f"{tmp_path}/new/.course-test-installed")
    assert both.index("'.[course]'") < both.index("'.[course,docs,test]' -c constraints.txt")
    rules = (ROOT / "Makefile").read_text("utf-8")
    needs = dict(re.findall(r"^([\w-]+): (\$\(\w+\))", rules, re.M))
    for target in ("lab", "notebooks", "student", "pages", "grade"):
        assert needs[target] == "$(INSTALLED)", target
    for target in ("test", "browser", "bench", "site", "slides"):
        assert needs[target] == "$(COMPLETE)", target


# --- machines elsewhere: workflows, containers, notebooks in a cloud ---

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def workflow_problems(workflow, targets):
    """What a code host would refuse, as far as it can be known here, and commands of ours that are
    none."""
    problems = []
    if not {"name", "jobs"} <= workflow.keys() or not (workflow.get("on") or workflow.get(True)):
        problems.append("a workflow has a name, jobs, and says when it runs")
    if "permissions" not in workflow:
        problems.append("it says what it may write")
    for name, job in workflow.get("jobs", {}).items():
        if not {"runs-on", "steps", "timeout-minutes"} <= job.keys():
            problems.append(f"{name} says where it runs, its steps and how long they may take")
        for step in job.get("steps", []):
            if ("run" in step) == ("uses" in step):
                problems.append(f"{name}: a step either runs or uses")
            if "uses" in step and not re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"]):
                problems.append(f"{name}: {step['uses']} names no version")
            problems += command_problems(step.get("run", ""), targets)
    return problems


def command_problems(command, targets):
    """Targets of make and files that a command names and that are not there."""
    made = set(re.findall(r"\bmake ([\w-]+)", command)) - targets
    files = re.findall(r"(?:^|\s)((?:tests|\.ci|notebooks)/[\w./]+)", command)
    return [f"make {name} is no target" for name in made] + [
        f"{file} is no file" for file in files if not (ROOT / file).exists()
    ]


def makefile_targets():
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))


def test_workflows_run_what_is_there_on_each_push_and_every_week():
    targets = makefile_targets()
    workflows = {path.stem: yaml.safe_load(path.read_text("utf-8")) for path in WORKFLOWS}
    problems = {name: workflow_problems(each, targets) for name, each in workflows.items()}
    assert problems == {"checks": [], "site": [], "weekly": []}
    # YAML takes the key `on` for the truth value
    assert "push" in workflows["checks"][True]
    commands = [step.get("run") for step in workflows["checks"]["jobs"]["checks"]["steps"]]
    assert ".ci/run" in commands and "make test" in (ROOT / ".ci/run").read_text("utf-8")
    assert workflows["weekly"][True]["schedule"][0]["cron"]
    oldest, newest = workflows["weekly"]["jobs"]["library"]["strategy"]["matrix"]["torch"]
    (torch,) = [each for each in REQUIREMENTS if each.name == "torch"]
    assert torch.specifier.contains(oldest) and newest == "newest"
    assert not torch.specifier.contains(f"2.{int(oldest.split('.')[1]) - 1}.9")  # it is the oldest


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("make install", "make instal"),
        ("tests/sweep_models.py", "tests/sweep.py"),
        ("checkout@v4", "checkout"),
        ("timeout-minutes: 90\n", "\n"),
        ("- run: make install", "- name: make install"),
        ("permissions:\n  contents: read\n", ""),
    ],
)
def test_a_workflow_that_a_host_would_refuse_is_found(old, new):
    text = (ROOT / ".github/workflows/weekly.yml").read_text("utf-8")
    assert old in text
    assert workflow_problems(yaml.safe_load(text.replace(old, new)), makefile_targets())


def test_the_container_and_the_cloud_install_the_pinned_versions_without_cuda():
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text("utf-8"))
    for key in ("postCreateCommand", "postAttachCommand"):
        assert command_problems(container[key], makefile_targets()) == []
    assert "TORCH=cpu" in container["postCreateCommand"]
    python = container["image"].rpartition(":")[2]
    runtime = (ROOT / "binder/runtime.txt").read_text("utf-8").strip()
    assert runtime == f"python-{python}"
    supported = tomllib.loads(PYPROJECT)["project"]["requires-python"]
    assert Requirement(f"python{supported}").specifier.contains(f"{python}.1")
    lines = (ROOT / "binder/requirements.txt").read_text("utf-8").splitlines()
    assert f"{PINS['torch']}+cpu" in lines and "-e .[course]" in lines
    named = next(line.split()[1] for line in lines if line.startswith("-c "))
    assert (ROOT / "binder" / named).resolve() == ROOT / "constraints.txt"
    after = ROOT / "binder/postBuild"
    assert os.access(after, os.X_OK) and after.read_text("utf-8").startswith("#!")
    done = subprocess.run(["bash", "-n", str(after)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert command_problems(after.read_text("utf-8").replace("*.ipynb", ""), {"lab"}) == []


def test_templates_for_issues_have_the_two_fields_that_a_host_asks_for():
    templates = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.md"))
    assert templates
    for path in templates:
        _, header, body = path.read_text("utf-8").split("---\n", 2)
        assert {"name", "about"} <= yaml.safe_load(header).keys() and body.strip(), path.name


def test_another_torch_gets_an_environment_of_its_own_and_runs_the_library_alone(tmp_path):
    if shutil.which("make") is None:
        pytest.skip("needs make")

    def said(*arguments):
        command = ["make", "-n", "test-library", f"OTHER_VENV={tmp_path}", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    oldest = said("TORCH_VERSION=2.9.0")
    assert "--upgrade torch==2.9.0" in oldest and "torch==" not in said()
    assert "download.pytorch.org/whl/cpu" in said("TORCH=cpu")
    assert f"{tmp_path}/constraints.txt" in oldest and " -c constraints.txt" not in oldest
    tests = re.findall(r"tests/(test_\w+)\.py", oldest)
    assert len(tests) > 15 and all((ROOT / "tests" / f"{name}.py").exists() for name in tests)
    assert not {"test_environment", "test_notebooks", "test_lessons", "test_site"} & set(tests)


def test_hooks_before_a_commit_run_what_is_installed_and_download_nothing():
    yaml = pytest.importorskip("yaml")
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    assert repository["repo"] == "local"
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for hook in repository["hooks"]:
        tool = hook["entry"].split()[0].removeprefix(".venv/bin/")
        assert hook["language"] == "system"
        assert f"$(BIN)/{tool}" in makefile and shutil.which(tool, path=Path(sys.executable).parent)
