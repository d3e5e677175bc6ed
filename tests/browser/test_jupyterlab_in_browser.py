"""JupyterLab as `make lab` starts it: the switch, two lessons side by side, a kernel that runs one,
a slider, and the file list.

The server works on a copy of the notebooks, and keeps its settings, trust and kernels' files beside
it.
"""

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
JUPYTERLAB = ROOT / "publish/jupyterlab"
LESSON, SLIDERS = "00_start_here", "01_memory_bottleneck"
SIZE = {"viewport": {"width": 1400, "height": 900}}


def only_the_sliders(notebook):
    """A lesson's imports, its switch and its sliders, without the minutes between them."""
    shown = re.compile(r"^(language|(lesson_\d\d\.)?\w+_playground)\(\)", re.M)
    kept = [cell for cell in notebook["cells"] if shown.search("".join(cell["source"]))]
    wanted = re.compile(r"from .*(_playground|import lesson_)")
    imports = [line for cell in notebook["cells"] for line in cell["source"] if wanted.match(line)]
    kept[0]["source"] = [*imports, *kept[0]["source"]]
    return {**notebook, "cells": kept}


@pytest.fixture(scope="module")
def lab(browser, tmp_path_factory):
    """The address of JupyterLab with a copy of the notebooks, trusted as `make lab` does."""
    place = tmp_path_factory.mktemp("lab")
    notebooks, settings = place / "course/notebooks", place / "settings"
    shutil.copytree(
        ROOT / "notebooks", notebooks, ignore=shutil.ignore_patterns(".ipynb_checkpoints")
    )
    shutil.copy(ROOT / "README.md", notebooks.parent)
    sliders = only_the_sliders(json.loads((notebooks / f"{SLIDERS}.ipynb").read_text("utf-8")))
    (notebooks / "sliders.ipynb").write_text(json.dumps(sliders), "utf-8")
    settings.mkdir()
    shutil.copy(JUPYTERLAB / "overrides.json", settings)
    (place / "config").mkdir()
    shutil.copy(JUPYTERLAB / "server.json", place / "config/jupyter_server_config.json")
    (place / "ipython/profile_default").mkdir(parents=True)
    shutil.copy(JUPYTERLAB / "ipython_kernel_config.json", place / "ipython/profile_default")

    folders = {"DATA": "data", "CONFIG": "config", "RUNTIME": "runtime"}
    environment = {f"JUPYTER_{name}_DIR": str(place / folder) for name, folder in folders.items()}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {
        **os.environ,
        **environment,
        "IPYTHONDIR": str(place / "ipython"),
        "PYTHONPATH": path,
    }
    make = [sys.executable, "-m", "publish.work", "--work", str(notebooks.parent / "work")]
    subprocess.run(make, cwd=ROOT, env=environment, check=True)
    trusted = map(str, sorted(notebooks.glob("*.ipynb")))
    subprocess.run(
        [sys.executable, "-m", "jupyter", "trust", *trusted], env=environment, check=True
    )

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "ServerApp.port": port,
        "ServerApp.port_retries": 0,
        "ServerApp.root_dir": notebooks.parent,
        "IdentityProvider.token": "",
        "LabApp.app_settings_dir": settings,  # in the environment these are those of .venv/share
        "LabApp.user_settings_dir": place / "user",
        "LabApp.workspaces_dir": place / "workspaces",
    }
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--allow-root",
        "--no-browser",
        "--expose-app-in-browser",
    ]
    command += [f"--{name}={value}" for name, value in options.items()]
    address = f"http://127.0.0.1:{port}"
    with (place / "log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        wait_for(f"{address}/api", server, place / "log")
        yield f"{address}/lab/tree/notebooks"
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
    def open_one(name, folder="notebooks"):
        page = open_page(f"{lab.removesuffix('notebooks')}{folder}/{name}.ipynb?reset", **SIZE)
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


def run_all(page):
    """All cells of the notebook that is in front, once its kernel is there."""
    wait_for_kernel(page)
    command(page, "notebook:run-all-cells")


def visible(notebook):
    """The languages of which something can be seen."""
    return [
        one for one in ("en", "zh") if notebook.locator(f".jp-Cell div[lang={one}]:visible").count()
    ]


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

    command(
        page, "docmanager:open", path="notebooks/sliders.ipynb", options={"mode": "split-right"}
    )
    right = page.locator(".jp-Notebook").nth(1)
    right.locator(".course-language").wait_for()
    right.locator("input[value=en]").check()
    assert (left.locator("input[value=zh]").is_checked(), visible(left)) == (True, ["zh"])


def run_the_switch(page):
    """Run the switch's cell of the notebook in front, and wait for its new buttons."""
    wait_for_kernel(page)
    page.evaluate(
        "for (const form of document.querySelectorAll('.course-language')) form.className += ' old'"
    )
    cells = "jupyterapp.shell.currentWidget.content"
    page.evaluate(
        f"{cells}.activeCellIndex ="
        f" {cells}.widgets.findIndex(cell => cell.model.sharedModel.source.includes('language()'))"
    )
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


def test_a_lesson_opens_in_the_browsers_language(lab, open_page):
    page = open_page(f"{lab}/{LESSON}.ipynb?reset", **SIZE, locale="zh-CN")
    notebook = rendered(page.locator(".jp-Notebook"))
    assert visible(notebook) == ["zh"] and notebook.locator("input[value=zh]").is_checked()


@pytest.mark.parametrize("folder", ["notebooks", "work"])
def test_an_opened_lesson_is_not_marked_as_changed(open_lesson, folder):
    stored = json.loads((ROOT / f"notebooks/{LESSON}.ipynb").read_text("utf-8"))["metadata"]
    if folder == "work":
        stored.pop("outputs_made_from")
    page = open_lesson(LESSON, folder)
    wait_for_kernel(page)
    context = "jupyterapp.shell.currentWidget.context"
    metadata = f"JSON.stringify({context}.model.sharedModel.metadata)"
    # JupyterLab stores what the kernel says of itself, in another order of keys, when it is there
    page.evaluate(f"{KERNEL}.info.then(() => new Promise(requestAnimationFrame))")
    assert json.loads(page.evaluate(metadata)) == stored
    assert page.evaluate(f"{context}.model.dirty") is False


def test_a_learners_copy_has_the_switch_and_no_result_and_names_its_solutions(open_lesson):
    page = open_lesson(SLIDERS, "work")
    notebook = rendered(page.locator(".jp-Notebook"))
    assert notebook.locator(".jp-OutputArea-output").count() == 1
    for chosen in ("zh", "en"):
        notebook.locator(f"input[value={chosen}]").check()
        assert visible(notebook) == [chosen]
    folded = notebook.locator(".jp-InputPlaceholder .jp-PlaceholderText").all_inner_texts()
    solutions = [line for line in folded if "Solution" in line]
    assert len(solutions) >= 5 and all("答案" in line for line in solutions)


def test_an_exercise_that_runs_first_says_which_cell_it_needs(open_lesson):
    page = open_lesson(SLIDERS, "work")
    wait_for_kernel(page)
    cells = "jupyterapp.shell.currentWidget.content"
    page.evaluate(
        f"{cells}.activeCellIndex = {cells}.widgets.findIndex(cell =>"
        " cell.model.sharedModel.source.includes('check_training_state'))"
    )
    command(page, "notebook:run-cell")
    error = page.locator("[data-mime-type*=stderr]")  # JupyterLab shows errors in this type
    error.wait_for()
    assert "the cell that starts with `import weakref`" in error.inner_text()
    assert "由上面的一个单元格导入" in error.inner_text()


def test_the_file_list_shows_lessons_glossary_and_guide(open_lesson):
    page = open_lesson(LESSON)
    command(page, "filebrowser:go-to-path", path="notebooks")
    shown = page.locator(".jp-DirListing-itemText")
    shown.get_by_text("GLOSSARY.md", exact=True).wait_for()
    lessons = [path.name for path in (ROOT / "notebooks").glob("*.ipynb")]
    expected = {*lessons, "sliders.ipynb", "GLOSSARY.md", "INSTRUCTORS.md"}
    assert set(shown.all_inner_texts()) == expected
    assert page.locator(".jp-DirListing-itemModified:visible").count() == 0, "names have the room"


def test_the_glossary_opens_as_a_page_to_be_read(open_lesson):
    page = open_lesson(LESSON)
    command(page, "filebrowser:go-to-path", path="notebooks")
    page.locator(".jp-DirListing-itemText").get_by_text("GLOSSARY.md", exact=True).dblclick()
    glossary = page.locator(".jp-MarkdownViewer")
    glossary.locator("table").first.wait_for()
    assert glossary.locator("td").filter(has_text="激活值").count() > 0


def test_a_notebook_runs_from_top_to_bottom_and_a_slider_moves_its_figure(open_lesson):
    page = open_lesson("sliders")
    run_all(page)
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
