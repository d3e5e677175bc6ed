"""What the tests in a browser share: one headless Chromium, and pages that tell of errors in them.

They need Chromium (the one that CHROMIUM names, or one on the PATH) and Playwright for Python.
Where either is missing they are skipped, and say what to install; `make browser`, which asks for
them, stops there. Nothing is downloaded.
"""

import pytest
from patience import HANGS_SECONDS

from publish.chromium import NO_CHROMIUM, find_chromium

# No sandbox: containers have none. The others keep a fresh Chromium from calling home.
ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)


def pytest_collection_modifyitems(config):
    """Whoever asks for these tests alone learns in one sentence why there are none."""
    if config.option.markexpr != "browser":
        return
    try:
        if find_chromium() is None:
            raise pytest.UsageError(f"`make browser` {NO_CHROMIUM}")
    except FileNotFoundError as error:
        raise pytest.UsageError(str(error)) from None


@pytest.fixture(scope="session")
def browser():
    """A headless Chromium, driven by Playwright."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="needs Playwright for Python: pip install playwright"
    )
    chromium = find_chromium()
    if chromium is None:
        pytest.skip(NO_CHROMIUM)
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=chromium, args=list(ARGUMENTS))
        yield launched
        launched.close()


@pytest.fixture
def open_page(browser):
    """open_page(address, **options of the context): a page of its own, without any of PROBLEMS."""
    contexts, trouble = [], []

    def open_one(address, **options):
        defaults = {"viewport": {"width": 1280, "height": 800}, "locale": "en-US"}
        context = browser.new_context(**{**defaults, **options})
        context.set_default_timeout(1000 * HANGS_SECONDS)  # in milliseconds
        contexts.append(context)
        page = context.new_page()
        for event, problem in PROBLEMS.items():
            page.on(event, lambda found, problem=problem: trouble.extend(problem(found)))
        page.goto(address)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert trouble == []


# Beginnings of addresses on this machine.
HERE = ("http://127.0.0.1:", "ws://127.0.0.1:", "file:", "data:", "blob:", "about:")
# Event of a page -> what is wrong about it: a list of one, or of none.
PROBLEMS = {
    "console": lambda said: [f"console: {said.text}"] if said.type == "error" else [],
    "pageerror": lambda error: [f"script: {error}"],
    "response": lambda got: [f"{got.status}: {got.url}"] if got.status >= 400 else [],
    "request": lambda sent: [] if sent.url.startswith(HERE) else [f"request to {sent.url}"],
}
