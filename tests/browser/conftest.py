"""Fixtures of the browser tests: one headless Chromium, and pages whose errors fail the test.

The tests need Playwright for Python and Chromium (the one that CHROMIUM names, or one on the PATH).
Without them the tests are skipped with a reason, and `make browser` fails. Nothing is downloaded.
"""

import pytest
from timeouts import TIMEOUT_SECONDS

from publish.chromium import NO_CHROMIUM, find_chromium

# Containers have no sandbox. The other options prevent requests of a fresh Chromium.
ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)


def pytest_collection_modifyitems(config):
    """Stop with one sentence if only these tests are selected and there is no Chromium."""
    if config.option.markexpr != "browser":
        return
    try:
        if find_chromium() is None:
            raise pytest.UsageError(f"`make browser` {NO_CHROMIUM}")
    except FileNotFoundError as error:
        raise pytest.UsageError(str(error)) from None


@pytest.fixture(scope="session")
def browser():
    """Return a headless Chromium that Playwright controls."""
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
    """Return a function that opens an address in a new context; afterwards, check for PROBLEMS."""
    contexts, problems = [], []

    def open_one(address, **options):
        defaults = {"viewport": {"width": 1280, "height": 800}, "locale": "en-US"}
        context = browser.new_context(**{**defaults, **options})
        context.set_default_timeout(1000 * TIMEOUT_SECONDS)  # in milliseconds
        contexts.append(context)
        page = context.new_page()
        for event, problems_of in PROBLEMS.items():
            page.on(event, lambda found, check=problems_of: problems.extend(check(found)))
        page.goto(address)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert problems == []


LOCAL = ("http://127.0.0.1:", "ws://127.0.0.1:", "file:", "data:", "blob:", "about:")
# Event of a page -> function that returns the problems of the event's argument
PROBLEMS = {
    "console": lambda message: [message.text] if message.type == "error" else [],
    "pageerror": lambda error: [f"script: {error}"],
    "response": lambda response: [response.url] if response.status >= 400 else [],
    "request": lambda request: [] if request.url.startswith(LOCAL) else [request.url],
}
