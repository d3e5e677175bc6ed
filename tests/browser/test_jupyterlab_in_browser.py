"""Tests of JupyterLab as `make lab` starts it, with a copy of the notebooks and their trust."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from timeouts import TIMEOUT_SECONDS

pytest.importorskip("jupyterlab", reason="JupyterLab comes with the extra `course`")
from jupyter_server.serverapp import list_running_servers

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[2]
LESSON, SLIDERS = "00_start_here", "07_fit_the_budget"


def with_sliders_only(notebook):
    """Return a lesson with its imports, language switch and sliders, which run in seconds."""
    calls = re.compile(r"^(language|(figures\.)?\w+_playground)\(", re.M)
    kept = [cell for cell in notebook["cells"] if calls.search("".join(cell["source"]))]
    lines = [line for cell in notebook["cells"] for line in cell["source"]]
    imports = [line for line in lines if re.match(r"from .*(_playground|lessons\.lesson_)", line)]
    kept[0]["source"] = [*imports, *kept[0]["source"]]
    return {**notebook, "cells": kept}


@pytest.fixture(scope="module")
def lab(browser, tmp_path_factory):
    """Yield the address of JupyterLab with a copy of the notebooks, trusted as by `make lab`."""
    root = tmp_path_factory.mktemp("lab")
    notebooks = root / "course/notebooks"
    shutil.copytree(ROOT / "notebooks", notebooks, ignore=shutil.ignore_patterns(".ipynb_*"))
    sliders = with_sliders_only(json.loads((notebooks / f"{SLIDERS}.ipynb").read_text("utf-8")))
    (notebooks / "sliders.ipynb").write_text(json.dumps(sliders), "utf-8")
    for name, target in (
        ("overrides.json", "settings/overrides.json"),
        ("server.json", "config/jupyter_server_config.json"),
        ("ipython_kernel_config.json", "ipython/profile_default/ipython_kernel_config.json"),
    ):
        (root / target).parent.mkdir(parents=True)
        shutil.copy(ROOT / "publish/jupyterlab" / name, root / target)
    folders = ("DATA", "RUNTIME", "CONFIG")
    environment = {
        **os.environ,
        **{f"JUPYTER_{name}_DIR": str(root / name.lower()) for name in folders},
        "IPYTHONDIR": str(root / "ipython"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    trust = ("jupyter", "trust", *sorted(notebooks.glob("*.ipynb")))
    for command in (("publish.work", "--work", notebooks.parent / "work"), trust):
        subprocess.run([sys.executable, "-m", *command], cwd=ROOT, env=environment, check=True)

    options = {
        "ServerApp.root_dir": notebooks.parent,
        "IdentityProvider.token": "",
        # `make install` puts these settings into .venv/share.
        "LabApp.app_settings_dir": root / "settings",
        "LabApp.user_settings_dir": root / "user",
        "LabApp.workspaces_dir": root / "workspaces",
    }
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--allow-root",
        "--no-browser",
        "--expose-app-in-browser",
        *(f"--{key}={value}" for key, value in options.items()),
    ]
    with (root / "log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        yield f"{address_of(server, root)}/lab/tree"
    finally:
        server.terminate()
        server.wait(TIMEOUT_SECONDS)


def address_of(server, root):
    """Wait until the server runs, and return its address; fail if it has ended."""
    while server.poll() is None:
        for running in list_running_servers(root / "runtime"):
            return f"http://127.0.0.1:{running['port']}"
        time.sleep(0.2)
    pytest.fail(f"JupyterLab does not answer:\n{(root / 'log').read_text()[-2000:]}")


@pytest.fixture
def open_lesson(lab, open_page):
    def open_one(name, folder="notebooks", **options):
        options["viewport"] = {"width": 1400, "height": 900}
        page = open_page(f"{lab}/{folder}/{name}.ipynb?reset", **options)
        page.locator(".jp-Notebook .course-language").wait_for()
        return page

    return open_one


def rendered(notebook):
    """Wait until all prose of the notebook is rendered, and return the notebook."""
    notebook.locator(".jp-MarkdownCell").last.locator("div[lang=zh]").wait_for(state="attached")
    return notebook


def run_command(page, name, **arguments):
    page.evaluate(
        "([name, options]) => { jupyterapp.commands.execute(name, options); }", [name, arguments]
    )


KERNEL = "jupyterapp.shell.currentWidget.sessionContext.session?.kernel"


def wait_for_kernel(page):
    """Wait until the kernel of the current notebook is idle."""
    page.wait_for_function(f"{KERNEL}?.status === 'idle'")


def languages(notebook):
    """Return the languages of the visible text."""
    cells = notebook.locator(".jp-Cell")
    return [name for name in ("en", "zh") if cells.locator(f"div[lang={name}]:visible").count()]


def test_arrow_keys_change_language_of_current_notebook_only(open_lesson):
    page = open_lesson(LESSON)
    left = rendered(page.locator(".jp-Notebook").first)
    assert languages(left) == ["en"]
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.name") == "course-language":
            break
    images = left.locator("img[alt]")
    for key, chosen in (("Right", "zh"), ("Left", "en"), ("Right", "zh")):
        page.keyboard.press(f"Arrow{key}")
        assert page.evaluate("document.activeElement.value") == chosen
        assert languages(left) == [chosen]
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        assert left.locator("img[alt]:visible").count() == images.count() // 2 > 1
        assert left.locator(".course-language label:visible").count() == 3

    right = {"mode": "split-right"}
    run_command(page, "docmanager:open", path="notebooks/sliders.ipynb", options=right)
    right = page.locator(".jp-Notebook").nth(1)
    right.locator(".course-language").wait_for()
    right.locator("input[value=en]").check()
    assert (left.locator("input[value=zh]").is_checked(), languages(left)) == (True, ["zh"])


def assert_opening_changed_nothing(page, name, folder):
    """Assert that the notebook is not marked as unsaved, and has the metadata of its file."""
    stored = json.loads((ROOT / f"notebooks/{name}.ipynb").read_text("utf-8"))["metadata"]
    if folder == "work":
        del stored["outputs_made_from"]
    wait_for_kernel(page)
    # JupyterLab stores the kernel's own metadata, with another order of keys, once it arrives.
    page.evaluate(f"{KERNEL}.info.then(() => new Promise(requestAnimationFrame))")
    model = "jupyterapp.shell.currentWidget.context.model"
    metadata = page.evaluate(f"JSON.stringify({model}.sharedModel.metadata)")
    assert json.loads(metadata) == stored and page.evaluate(f"{model}.dirty") is False


def run_switch(page):
    """Run the cell of the language switch, and wait for its new buttons."""
    wait_for_kernel(page)
    old = page.locator(".course-language")
    old.evaluate_all("forms => forms.forEach((form) => form.classList.add('old'))")
    page.evaluate("""() => {
      const cells = jupyterapp.shell.currentWidget.content;
      const sources = cells.widgets.map((cell) => cell.model.sharedModel.source);
      cells.activeCellIndex = sources.findIndex((source) => source.includes("language()"));
    }""")
    run_command(page, "notebook:run-cell")
    page.locator(".course-language:not(.old)").wait_for()
    page.wait_for_function("!document.querySelector('.course-language.old')")


def test_rerunning_language_cell_preserves_selected_language(open_lesson):
    page = open_lesson(LESSON)
    assert_opening_changed_nothing(page, LESSON, "notebooks")
    notebook = rendered(page.locator(".jp-Notebook"))
    for chosen in ("zh", "en"):
        notebook.locator(f"input[value={chosen}]").check()
        run_switch(page)
        assert notebook.locator(f"input[value={chosen}]").is_checked()
        assert languages(notebook) == [chosen]

        run_command(page, "notebook:clear-all-cell-outputs")
        page.wait_for_function("!document.querySelector('.course-language')")
        assert languages(notebook) == ["en", "zh"]
        run_switch(page)
        assert languages(notebook) == [chosen]


def test_learner_notebook_opens_in_browser_language_with_collapsed_labeled_solutions(open_lesson):
    page = open_lesson(SLIDERS, "work", locale="zh-CN")
    assert_opening_changed_nothing(page, SLIDERS, "work")
    notebook = rendered(page.locator(".jp-Notebook"))
    assert notebook.locator(".jp-OutputArea-output").count() == 1
    assert languages(notebook) == ["zh"] and notebook.locator("input[value=zh]").is_checked()
    for chosen in ("en", "zh"):
        notebook.locator(f"input[value={chosen}]").check()
        assert languages(notebook) == [chosen]
    folded = notebook.locator(".jp-InputPlaceholder .jp-PlaceholderText").all_inner_texts()
    solutions = [line for line in folded if "Solution" in line]
    assert len(solutions) >= 5 and all("答案" in line for line in solutions)


def test_moving_slider_in_executed_notebook_redraws_plot(open_lesson):
    page = open_lesson("sliders")
    wait_for_kernel(page)
    run_command(page, "notebook:run-all-cells")
    page.locator(".widget-slider").first.wait_for()
    figure = page.locator(".widget-interact figure[lang=en] img")
    figure.wait_for()
    before = figure.get_attribute("alt")
    page.locator(".widget-slider .noUi-handle, .widget-slider .ui-slider-handle").first.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function(
        "before => document.querySelector('.widget-interact img')?.alt !== before", arg=before
    )
    assert figure.count() == 1
    assert page.locator("[data-mime-type*=error], [data-mime-type*=stderr]").count() == 0
    assert page.locator("input[value=en]").is_checked()
