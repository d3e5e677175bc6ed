"""JupyterLab as `make lab` starts it, with a copy of the notebooks, settings and trust of its own."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from patience import HANGS_SECONDS

pytest.importorskip("jupyterlab", reason="JupyterLab comes with the extra `course`")

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[2]
LESSON, SLIDERS = "00_start_here", "01_memory_bottleneck"


def only_the_sliders(notebook):
    """A lesson's imports, its switch and its sliders, without the minutes between them."""
    shown = re.compile(r"^(language|(figures\.)?\w+_playground)\(\)", re.M)
    kept = [cell for cell in notebook["cells"] if shown.search("".join(cell["source"]))]
    wanted = re.compile(r"from .*(_playground|lessons\.lesson_)")
    imports = [line for cell in notebook["cells"] for line in cell["source"] if wanted.match(line)]
    kept[0]["source"] = [*imports, *kept[0]["source"]]
    return {**notebook, "cells": kept}


@pytest.fixture(scope="module")
def lab(browser, tmp_path_factory):
    """The address of JupyterLab with a copy of the notebooks, trusted as `make lab` does."""
    place = tmp_path_factory.mktemp("lab")
    notebooks = place / "course/notebooks"
    shutil.copytree(ROOT / "notebooks", notebooks, ignore=shutil.ignore_patterns(".ipynb_*"))
    sliders = only_the_sliders(json.loads((notebooks / f"{SLIDERS}.ipynb").read_text("utf-8")))
    (notebooks / "sliders.ipynb").write_text(json.dumps(sliders), "utf-8")
    for name, target in (
        ("overrides.json", "settings/overrides.json"),
        ("server.json", "config/jupyter_server_config.json"),
        ("ipython_kernel_config.json", "ipython/profile_default/ipython_kernel_config.json"),
    ):
        (place / target).parent.mkdir(parents=True)
        shutil.copy(ROOT / "publish/jupyterlab" / name, place / target)
    folders = ("DATA", "RUNTIME", "CONFIG")
    environment = {
        **os.environ,
        **{f"JUPYTER_{name}_DIR": str(place / name.lower()) for name in folders},
        "IPYTHONDIR": str(place / "ipython"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    trust = ("jupyter", "trust", *sorted(notebooks.glob("*.ipynb")))
    for made in (("publish.work", "--work", notebooks.parent / "work"), trust):
        subprocess.run([sys.executable, "-m", *made], cwd=ROOT, env=environment, check=True)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "ServerApp.port": port,
        "ServerApp.port_retries": 0,
        "ServerApp.root_dir": notebooks.parent,
        "IdentityProvider.token": "",
        # in the environment these settings are in .venv/share
        "LabApp.app_settings_dir": place / "settings",
        "LabApp.user_settings_dir": place / "user",
        "LabApp.workspaces_dir": place / "workspaces",
    }
    command = [sys.executable, "-m", "jupyterlab", "--allow-root", "--no-browser"]
    command += ["--expose-app-in-browser", *(f"--{name}={each}" for name, each in options.items())]
    address = f"http://127.0.0.1:{port}"
    with (place / "log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        wait_for(f"{address}/api", server, place / "log")
        yield f"{address}/lab/tree"
    finally:
        server.terminate()
        server.wait(HANGS_SECONDS)


def wait_for(address, server, log):
    """Wait until the server answers, or has ended."""
    while server.poll() is None:
        try:
            return urllib.request.urlopen(address, timeout=HANGS_SECONDS)
        except urllib.error.URLError:
            time.sleep(0.2)
    pytest.fail(f"JupyterLab does not answer:\n{log.read_text()[-2000:]}")


@pytest.fixture
def open_lesson(lab, open_page):
    def open_one(name, folder="notebooks", **options):
        options["viewport"] = {"width": 1400, "height": 900}
        page = open_page(f"{lab}/{folder}/{name}.ipynb?reset", **options)
        page.locator(".jp-Notebook .course-language").wait_for()
        return page

    return open_one


def rendered(notebook):
    """The notebook once its prose is there, which comes cell by cell."""
    notebook.locator(".jp-MarkdownCell").last.locator("div[lang=zh]").wait_for(state="attached")
    return notebook


def command(page, name, **arguments):
    page.evaluate(
        "([name, options]) => { jupyterapp.commands.execute(name, options); }", [name, arguments]
    )


KERNEL = "jupyterapp.shell.currentWidget.sessionContext.session?.kernel"


def wait_for_kernel(page):
    """Wait until the notebook in front has a kernel that can run cells."""
    page.wait_for_function(f"{KERNEL}?.status === 'idle'")


def visible(notebook):
    """The languages of which something can be seen."""
    cells = notebook.locator(".jp-Cell")
    return [one for one in ("en", "zh") if cells.locator(f"div[lang={one}]:visible").count()]


def test_the_keyboard_turns_the_switch_and_two_lessons_side_by_side_each_keep_their_language(
    open_lesson,
):
    page = open_lesson(LESSON)
    left = rendered(page.locator(".jp-Notebook").first)
    assert visible(left) == ["en"]
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.name") == "course-language":
            break
    figures = left.locator("img[alt]")
    for key, chosen in (("Right", "zh"), ("Left", "en"), ("Right", "zh")):
        page.keyboard.press(f"Arrow{key}")
        assert page.evaluate("document.activeElement.value") == chosen and visible(left) == [chosen]
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        assert left.locator("img[alt]:visible").count() == figures.count() // 2 > 1
        assert left.locator(".course-language label:visible").count() == 3

    right = {"mode": "split-right"}
    command(page, "docmanager:open", path="notebooks/sliders.ipynb", options=right)
    right = page.locator(".jp-Notebook").nth(1)
    right.locator(".course-language").wait_for()
    right.locator("input[value=en]").check()
    assert (left.locator("input[value=zh]").is_checked(), visible(left)) == (True, ["zh"])


def run_the_switch(page):
    """Run the switch's cell of the notebook in front, and wait for its new buttons."""
    wait_for_kernel(page)
    old = page.locator(".course-language")
    old.evaluate_all("forms => forms.forEach((form) => form.classList.add('old'))")
    page.evaluate("""() => {
      const cells = jupyterapp.shell.currentWidget.content;
      const sources = cells.widgets.map((cell) => cell.model.sharedModel.source);
      cells.activeCellIndex = sources.findIndex((source) => source.includes("language()"));
    }""")
    command(page, "notebook:run-cell")
    page.locator(".course-language:not(.old)").wait_for()
    page.wait_for_function("!document.querySelector('.course-language.old')")


def test_a_chosen_language_stays_when_the_switchs_cell_runs_again(open_lesson):
    page = open_lesson(LESSON)
    notebook = rendered(page.locator(".jp-Notebook"))
    for chosen in ("zh", "en"):
        notebook.locator(f"input[value={chosen}]").check()
        run_the_switch(page)
        assert notebook.locator(f"input[value={chosen}]").is_checked()
        assert visible(notebook) == [chosen]

        command(page, "notebook:clear-all-cell-outputs")
        page.wait_for_function("!document.querySelector('.course-language')")
        assert visible(notebook) == ["en", "zh"], "without the switch nothing is hidden"
        run_the_switch(page)
        assert visible(notebook) == [chosen]


@pytest.mark.parametrize("folder", ["notebooks", "work"])
def test_an_opened_lesson_is_not_marked_as_changed(open_lesson, folder):
    stored = json.loads((ROOT / f"notebooks/{LESSON}.ipynb").read_text("utf-8"))["metadata"]
    if folder == "work":
        stored.pop("outputs_made_from")
    page = open_lesson(LESSON, folder)
    wait_for_kernel(page)
    # JupyterLab stores what the kernel says of itself, in another order of keys, when it is there
    page.evaluate(f"{KERNEL}.info.then(() => new Promise(requestAnimationFrame))")
    model = "jupyterapp.shell.currentWidget.context.model"
    metadata = page.evaluate(f"JSON.stringify({model}.sharedModel.metadata)")
    assert json.loads(metadata) == stored and page.evaluate(f"{model}.dirty") is False


def test_a_learners_copy_opens_in_the_browsers_language_and_names_its_solutions(open_lesson):
    page = open_lesson(SLIDERS, "work", locale="zh-CN")
    notebook = rendered(page.locator(".jp-Notebook"))
    assert notebook.locator(".jp-OutputArea-output").count() == 1
    assert visible(notebook) == ["zh"] and notebook.locator("input[value=zh]").is_checked()
    for chosen in ("en", "zh"):
        notebook.locator(f"input[value={chosen}]").check()
        assert visible(notebook) == [chosen]
    folded = notebook.locator(".jp-InputPlaceholder .jp-PlaceholderText").all_inner_texts()
    solutions = [line for line in folded if "Solution" in line]
    assert len(solutions) >= 5 and all("答案" in line for line in solutions)


def test_the_glossary_is_in_the_file_list_and_opens_as_a_page_to_be_read(open_lesson):
    page = open_lesson(LESSON)
    command(page, "filebrowser:go-to-path", path="notebooks")
    page.locator(".jp-DirListing-itemText").get_by_text("GLOSSARY.md", exact=True).dblclick()
    assert page.locator(".jp-DirListing-itemModified:visible").count() == 0, "names have the room"
    glossary = page.locator(".jp-MarkdownViewer")
    glossary.locator("table").first.wait_for()
    assert glossary.locator("td").filter(has_text="激活值").count() > 0


def test_a_notebook_runs_from_top_to_bottom_and_a_slider_moves_its_figure(open_lesson):
    page = open_lesson("sliders")
    wait_for_kernel(page)
    command(page, "notebook:run-all-cells")
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
    assert page.locator("input[value=en]").is_checked(), "the switch was made again"
