"""Tests of the website in a browser: languages and their addresses, keyboard, width and search."""

import os
import re
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytestmark = pytest.mark.browser

LESSON = "notebooks/03_sqrt_schedule.html"


@pytest.fixture(scope="module")
def address(browser, built_site):
    """Yield the address of a server of the website."""
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=built_site)
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def visible_text(page, selector):
    return page.locator(selector).first.inner_text()


CODES = {"en": "en", "zh": "zh-CN"}


def choose(page, language):
    """Click on a language in the visible switch, and wait for the page in that language."""
    page.locator(f".language-switch:visible a[lang={CODES[language]}]").click()
    # The document is empty between two pages.
    page.wait_for_function(f"document.documentElement?.lang === '{CODES[language]}'")


ENGLISH = "Which ones should we forget? (checkpoint schedules)"
CHINESE = "该忘掉哪些？（检查点的调度）"


def test_language_link_is_reachable_by_keyboard_and_page_is_monolingual(address, open_page):
    page = open_page(f"{address}/en/{LESSON}", viewport={"width": 1600, "height": 900})
    for _ in range(8):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.hreflang") == "zh-CN":
            break
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/zh/{LESSON}")
    for selector in ("article h1", ".sidebar-tree", "body"):
        words = visible_text(page, selector)
        assert CHINESE in words and ENGLISH not in words
    assert page.locator("article p:visible").count() > 50
    assert page.locator("article figure[lang=zh] > img:visible").count() > 2
    page.locator("article mjx-container:visible").first.wait_for()
    assert page.locator("article mjx-container").count() > 50
    assert page.evaluate(
        "document.fonts.ready.then(() => [...document.fonts].some((f) => f.status === 'loaded'))"
    )


def test_language_switch_preserves_section_and_index_page_remembers_choice(address, open_page):
    page = open_page(f"{address}/index.html")
    page.wait_for_url("**/en/index.html")
    page.goto(f"{address}/en/{LESSON}#section-3-4")
    choose(page, "zh")
    assert page.url.endswith(f"/zh/{LESSON}#section-3-4")
    assert re.match("3.4 [\u3400-\u9fff]", visible_text(page, "section#section-3-4 > h2"))
    page.goto(f"{address}/index.html")
    page.wait_for_url("**/zh/index.html")


@pytest.mark.parametrize(
    ("scheme", "locale", "language"), [("http", "de-DE", "en"), ("file", "zh-TW", "zh")]
)
def test_first_visit_selects_browser_language_over_http_and_file_urls(
    address, built_site, open_page, scheme, locale, language
):
    root = address if scheme == "http" else built_site.as_uri()
    page = open_page(f"{root}/index.html", locale=locale)
    page.wait_for_url(f"**/{language}/index.html")
    page.locator(".sidebar-tree a[href*=claims]").click()
    link = page.locator(f"article a[href*='{LESSON.rpartition('/')[2]}#section-']:visible").first
    section = link.get_attribute("href").partition("#")[2]
    link.click()
    page.wait_for_url(f"**/{language}/{LESSON}#{section}")
    assert page.locator(f"section#{section} > h2").is_visible()


NO_STORAGE = """
for (const name of ["getItem", "setItem"]) {
  const original = Storage.prototype[name];
  Storage.prototype[name] = function (key, ...values) {
    if (key === "course-language") throw new Error("no storage");
    return original.call(this, key, ...values);
  };
}
"""


def test_navigation_preserves_chosen_language_when_browser_storage_is_unavailable(
    address, open_page
):
    page = open_page("about:blank")
    page.add_init_script(NO_STORAGE)
    page.goto(f"{address}/index.html")
    page.wait_for_url("**/en/index.html")
    choose(page, "zh")
    page.locator(".sidebar-tree a[href*=claims]").click()
    page.wait_for_url("**/zh/notebooks/claims.html")


# a phone, and the least width at which the theme shows contents next to the text
@pytest.mark.parametrize("width", [390, 1320])
def test_site_pages_fit_screen_width_and_wide_content_scrolls(address, open_page, width):
    page = open_page("about:blank", viewport={"width": width, "height": 800})
    for name in ("index.html", "notebooks/claims.html", "api/memory.html", LESSON):
        page.goto(f"{address}/en/{name}")
        page.wait_for_load_state("networkidle")  # including formulas
        # The theme's headings overflow by 8 pixels.
        for selector, allowed in (("html", 0), (".article-container", 8)):
            excess = page.locator(selector).evaluate("box => box.scrollWidth - box.clientWidth")
            assert excess <= allowed, name
    wide = "nodes => nodes.filter((n) => n.scrollWidth > n.clientWidth).map((n) => n.tabIndex)"
    boxes = page.locator("article pre:visible").evaluate_all(wide)
    assert set(boxes) <= {0}  # so that the keyboard scrolls them
    assert width > 390 or (boxes and page.locator("article [tabindex='0']:has(table)").count())


@pytest.mark.parametrize(
    ("language", "words", "page_found"),
    [
        ("en", "CUDA out of memory", "docs/out_of_memory"),
        ("en", "爆显存", "docs/out_of_memory"),
        ("zh", "显存碎片", "docs/out_of_memory"),
        ("zh", "OOM", "docs/out_of_memory"),
        ("zh", "拷", "04_offload"),
        ("zh", "带宽", "04_offload"),
    ],
)
def test_search_returns_results_in_language_of_page(
    address, open_page, language, words, page_found
):
    page = open_page(f"{address}/{language}/search.html?q={words}")
    results = page.locator("#search-results li a")
    results.first.wait_for()
    page.wait_for_function(
        "document.querySelector('#search-results p.search-summary').innerText.match(/\\d|one page/)"
    )
    summary = visible_text(page, "#search-results p.search-summary")
    assert bool(re.search("[\u3400-\u9fff]", summary)) == (language == "zh")
    if page_found.startswith("docs"):
        assert page_found in results.first.get_attribute("href")
    else:
        found = page.locator(f"#search-results li a[href*='{page_found}']").first
        assert re.match(r"[\d.]+ [\u3400-\u9fff]", found.inner_text())
        choose(page, "en")
        assert "/en/search.html?q=" in page.url


# Rules that Sphinx's lists of parameters violate.
WRITTEN_BY_SPHINX = {"definition-list"}


@pytest.mark.parametrize("language", ["en", "zh"])
def test_axe_finds_no_accessibility_violations_on_site_pages(address, open_page, language):
    """Run axe-core, whose axe.min.js the environment variable AXE names."""
    axe = os.environ.get("AXE") or pytest.skip("needs axe-core: AXE=path/to/axe.min.js")
    page = open_page(f"{address}/{language}/index.html")
    found = {}
    for name in ("index", "search", LESSON.removesuffix(".html"), "notebooks/claims", "api/memory"):
        page.goto(f"{address}/{language}/{name}.html")
        page.wait_for_load_state("networkidle")
        page.evaluate(Path(axe).read_text("utf-8"))
        violations = page.evaluate("axe.run().then((found) => found.violations)")
        found[name] = {each["id"] for each in violations} - WRITTEN_BY_SPHINX
    assert found == {name: set() for name in found}
