"""Photograph a lesson in JupyterLab for the READMEs: lesson.en.png and lesson.zh.png.

    python -m course_lib.teaching.editions.images.lesson

It takes Chromium and Playwright, as the tests in a browser do (tests/browser/conftest.py). The
stored notebook is shown; no cell runs.
"""

import io
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[4]
LESSON = "02_checkpointing"
TOP = "2.1 Watch it run"  # the heading that stands at the top of the picture
FONT = ROOT / "course_lib/teaching/fonts/CourseSansSC-Regular.otf"
COLORS = 64  # of the picture's palette: text and one figure need no more


def main() -> None:
    with tempfile.TemporaryDirectory() as work, sync_playwright() as driver:
        place = Path(work)
        shutil.copy(ROOT / f"notebooks/{LESSON}.ipynb", place)
        environment = {**os.environ, "JUPYTER_DATA_DIR": f"{work}/data"}
        environment |= {
            "JUPYTER_CONFIG_DIR": f"{work}/config",
            "JUPYTER_RUNTIME_DIR": f"{work}/run",
        }
        trust = [sys.executable, "-m", "jupyter", "trust", str(place / f"{LESSON}.ipynb")]
        subprocess.run(trust, env=environment, check=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        options = {
            "ServerApp.port": port,
            "ServerApp.root_dir": place,
            "IdentityProvider.token": "",
            "LabApp.user_settings_dir": place / "user",
            "LabApp.workspaces_dir": place / "workspaces",
        }
        settings = place / "settings"
        settings.mkdir()
        shutil.copy(ROOT / "course_lib/teaching/jupyterlab/overrides.json", settings)
        options["LabApp.app_settings_dir"] = settings
        command = [sys.executable, "-m", "jupyterlab", "--allow-root", "--no-browser"]
        command += [f"--{name}={value}" for name, value in options.items()]
        with open(place / "log", "w") as log:
            server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            wait_for(f"http://127.0.0.1:{port}/api")
            chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
            # Chinese also where the machine has no Chinese font
            (place / "fonts").mkdir()
            shutil.copy(FONT, place / "fonts")
            browser = driver.chromium.launch(
                executable_path=chromium,
                args=["--no-sandbox"],
                env={**os.environ, "XDG_DATA_HOME": work},
            )
            for language in ("en", "zh"):
                address = f"http://127.0.0.1:{port}/lab/tree/{LESSON}.ipynb?reset"
                photograph(browser, address, language)
            browser.close()
        finally:
            server.terminate()
            server.wait(20)


def wait_for(address: str) -> None:
    """Wait until the server answers, a minute at most."""
    for _ in range(300):
        try:
            urllib.request.urlopen(address, timeout=5)
            return
        except urllib.error.URLError:
            time.sleep(0.2)
    raise TimeoutError("JupyterLab does not answer")


def photograph(browser, address: str, language: str) -> None:
    """The lesson as a reader of this language sees it."""
    page = browser.new_page(viewport={"width": 1340, "height": 930})
    page.goto(address)
    switch = page.locator(f".course-language input[value={language}]")
    switch.wait_for(timeout=60_000)
    page.locator(".jp-MarkdownCell").last.locator("div[lang]").first.wait_for(
        timeout=60_000, state="attached"
    )
    switch.check()
    page.wait_for_timeout(2000)  # prose comes cell by cell
    heading = page.locator(".jp-MarkdownCell h2", has_text=TOP).first
    heading.evaluate("node => node.scrollIntoView({block: 'start'})")
    page.wait_for_timeout(1000)
    picture = Image.open(io.BytesIO(page.locator(".jp-NotebookPanel").screenshot()))
    target = Path(__file__).with_name(f"lesson.{language}.png")
    picture.convert("RGB").quantize(COLORS).save(target, optimize=True)
    print(f"{target.name}: {target.stat().st_size / 1e3:.0f} kB")
    page.close()


if __name__ == "__main__":
    main()
