"""The website in a browser: addresses and memory of the languages, keyboard, and search."""

import os
import re
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytestmark = pytest.mark.browser

LESSON = "notebooks/03_sqrt_schedule.html"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def address(browser, built_site):
    """The site as a server gives it out."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=built_site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def shown(page, selector="article"):
    """What can be read there."""
    return page.locator(selector).first.inner_text()


CODES = {"en": "en", "zh": "zh-CN"}


def choose(page, language):
    """Follow the visible switch to the page in that language."""
    page.locator(f".language-switch:visible a[lang={CODES[language]}]").click()
    # between two pages the document is empty
    page.wait_for_function(f"document.documentElement?.lang === '{CODES[language]}'")


ENGLISH = "Which ones should we forget? (checkpoint schedules)"
CHINESE = "该忘掉哪些？（检查点的调度）"


def test_the_keyboard_reaches_the_switch_and_a_page_shows_one_language_alone(address, open_page):
    page = open_page(f"{address}/en/{LESSON}", viewport={"width": 1600, "height": 900})
    for _ in range(8):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.hreflang") == "zh-CN":
            break
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/zh/{LESSON}")
    for place in ("article h1", ".sidebar-tree", "body"):
        assert CHINESE in shown(page, place) and ENGLISH not in shown(page, place)
    assert page.locator("article p:visible").count() > 50
    assert page.locator("article figure[lang=zh] > img:visible").count() > 2
    page.locator("article mjx-container:visible").first.wait_for()
    assert page.locator("article mjx-container").count() > 50
    assert page.evaluate(
        "document.fonts.ready.then(() => [...document.fonts].some((f) => f.status === 'loaded'))"
    )


def test_the_switch_keeps_the_place_and_the_front_page_remembers_the_language(address, open_page):
    page = open_page(f"{address}/index.html")
    page.wait_for_url("**/en/index.html")
    page.goto(f"{address}/en/{LESSON}#section-3-4")
    choose(page, "zh")
    assert page.url.endswith(f"/zh/{LESSON}#section-3-4")
    assert re.match("3.4 [\u3400-\u9fff]", shown(page, "section#section-3-4 > h2"))
    page.goto(f"{address}/index.html")
    page.wait_for_url("**/zh/index.html")


@pytest.mark.parametrize(("locale", "language"), [("de-DE", "en"), ("zh-TW", "zh")])
def test_a_first_visit_is_in_the_language_of_the_browser_from_a_server_and_from_files(
    address, built_site, open_page, locale, language
):
    for place in (address, built_site.as_uri()):
        page = open_page(f"{place}/index.html", locale=locale)
        page.wait_for_url(f"**/{language}/index.html")
        page.locator(".sidebar-tree a[href*=claims]").click()
        page.locator("article a[href*='#section-3-9']:visible").first.click()
        page.wait_for_url(f"**/{language}/{LESSON}#section-3-9")
        assert page.locator("section#section-3-9 > h2").is_visible()


FORGETFUL = """
for (const name of ["getItem", "setItem"]) {
  const original = Storage.prototype[name];
  Storage.prototype[name] = function (key, ...values) {
    if (key === "course-language") throw new Error("refused");
    return original.call(this, key, ...values);
  };
}
"""


def test_a_browser_that_remembers_nothing_keeps_the_language_in_the_links(address, open_page):
    page = open_page("about:blank")
    page.add_init_script(FORGETFUL)
    page.goto(f"{address}/index.html")
    page.wait_for_url("**/en/index.html")
    choose(page, "zh")
    page.locator(".sidebar-tree a[href*=claims]").click()
    page.wait_for_url("**/zh/notebooks/claims.html")


# a phone's, where the theme first has contents next to the text, and a laptop's
@pytest.mark.parametrize("width", [390, 1320, 1366])
def test_no_page_is_wider_than_the_screen_and_wide_boxes_scroll(address, open_page, width):
    page = open_page("about:blank", viewport={"width": width, "height": 800})
    for name in ("index.html", "notebooks/claims.html", "api/memory.html", LESSON):
        page.goto(f"{address}/en/{name}")
        page.wait_for_load_state("networkidle")  # formulas too
        # the theme's headings stand out by 8 pixels
        for place, more in (("html", 0), (".article-container", 8)):
            wider = page.locator(place).evaluate("box => box.scrollWidth - box.clientWidth")
            assert wider <= more, name
    wide = "nodes => nodes.filter((n) => n.scrollWidth > n.clientWidth).map((n) => n.tabIndex)"
    boxes = page.locator("article pre:visible").evaluate_all(wide)
    assert set(boxes) <= {0}, "with the keyboard too"
    assert width > 390 or (boxes and page.locator("article [tabindex='0']:has(table)").count())


def test_figures_have_a_light_ground_in_the_dark(address, open_page):
    page = open_page(f"{address}/en/{LESSON}", color_scheme="dark")
    grounds = "found => found.map((each) => getComputedStyle(each).backgroundColor)"
    figures = page.locator("article img").evaluate_all(grounds)
    assert len(figures) > 2 and set(figures) == {"rgb(255, 255, 255)"}
    assert page.locator("body").evaluate_all(grounds) != ["rgb(255, 255, 255)"]


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
def test_the_search_finds_a_page_in_its_language(address, open_page, language, words, page_found):
    page = open_page(f"{address}/{language}/search.html?q={words}")
    results = page.locator("#search-results li a")
    results.first.wait_for()
    page.wait_for_function(
        "document.querySelector('#search-results p.search-summary').innerText.match(/\\d|one page/)"
    )
    if page_found.startswith("docs"):
        assert page_found in results.first.get_attribute("href")
    else:
        found = page.locator(f"#search-results li a[href*='{page_found}']").first
        assert re.match(r"[\d.]+ [\u3400-\u9fff]", found.inner_text())
        choose(page, "en")
        assert "/en/search.html?q=" in page.url, "the same words, in the other language"


# Sphinx's lists of parameters have nothing, or no names, before what they describe.
WRITTEN_BY_SPHINX = {"definition-list"}


@pytest.mark.parametrize("language", ["en", "zh"])
def test_axe_finds_nothing_but_what_sphinx_writes(address, open_page, language):
    """axe-core is not kept here: AXE names the axe.min.js of its npm package."""
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
