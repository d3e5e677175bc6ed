"""The website in a browser: each language has its address, is remembered, and keyboard and search
work in it."""

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


class Server(ThreadingHTTPServer):
    def handle_error(self, request, address):
        pass  # a page that is left hangs up in the middle of an answer


@pytest.fixture(scope="module")
def address(browser, built_site):
    """The site as a server gives it out."""
    with Server(("127.0.0.1", 0), partial(Quiet, directory=built_site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def shown(page, selector="article"):
    """What can be read there."""
    return page.locator(selector).first.inner_text()


PLACE = {"en": 0, "zh": 1}
CODES = {"en": "en", "zh": "zh-CN"}


def choose(page, language):
    """Follow the visible switch to the page in that language."""
    page.locator(".language-switch:visible a").nth(PLACE[language]).click()
    # between two pages the document is empty
    page.wait_for_function(f"document.documentElement?.lang === '{CODES[language]}'")


ENGLISH, CHINESE = (
    "Which ones should we forget? (checkpoint schedules)",
    "该忘掉哪些？（检查点的调度）",
)


def test_the_keyboard_reaches_the_switch_and_a_page_shows_one_language_alone(address, open_page):
    page = open_page(f"{address}/en/{LESSON}", viewport={"width": 1600, "height": 900})
    for _ in range(8):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.hreflang") == "zh-CN":
            break
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/zh/{LESSON}")
    for language, here, gone in (("zh", CHINESE, ENGLISH), ("en", ENGLISH, CHINESE)):
        if language == "en":
            choose(page, "en")
        assert page.evaluate("document.documentElement.lang") == CODES[language]
        for place in ("article h1", ".sidebar-tree", "body"):
            assert here in shown(page, place) and gone not in shown(page, place)
        other = "en" if language == "zh" else "zh"
        assert page.locator("article p:visible").count() > 50
        assert page.locator(f"article [lang={other}]").count() == 0
        assert here in page.title() and gone not in page.title()
        assert page.locator(f"article figure[lang={language}] > img:visible").count() > 2
    page.locator("article mjx-container:visible").first.wait_for()
    assert page.locator("article mjx-container").count() > 50
    assert page.evaluate(
        "document.fonts.ready.then(() => [...document.fonts].some((f) => f.status === 'loaded'))"
    )


def test_the_language_stays_on_the_next_page_and_is_remembered_by_the_front_page(
    address, open_page
):
    page = open_page(f"{address}/index.html")
    page.wait_for_url("**/en/index.html")
    choose(page, "zh")
    page.locator("article a[href*='06_flash']").first.click()
    page.wait_for_url("**/zh/notebooks/06_flash_attention.html")
    assert re.match("6 [\u3400-\u9fff]", shown(page, "article h1"))
    page.goto(f"{address}/index.html")
    page.wait_for_url("**/zh/index.html")


def test_the_switch_keeps_the_place_in_the_page(address, open_page):
    page = open_page(f"{address}/en/{LESSON}#section-3-4")
    choose(page, "zh")
    assert page.url.endswith(f"/zh/{LESSON}#section-3-4")
    assert page.locator("section#section-3-4 > h2").inner_text().startswith("3.4 ")


@pytest.mark.parametrize(("locale", "language"), [("de-DE", "en"), ("zh-TW", "zh")])
def test_a_first_visit_is_in_the_language_of_the_browser(address, open_page, locale, language):
    page = open_page(f"{address}/index.html", locale=locale)
    page.wait_for_url(f"**/{language}/index.html")


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


def test_without_scripts_links_lead_to_each_language(address, open_page):
    page = open_page(f"{address}/index.html", java_script_enabled=False)
    page.locator("a").nth(PLACE["en"]).click()
    page.locator(f".sidebar-tree a[href='{LESSON}']").click()
    assert ENGLISH in shown(page, "article h1")
    page.locator(".language-switch:visible a").nth(PLACE["zh"]).click()
    assert ENGLISH not in shown(page, "article h1") and CHINESE in shown(page, "article h1")


def test_a_lesson_can_be_downloaded(address, open_page):
    page = open_page(f"{address}/zh/{LESSON}")
    with page.expect_download() as download:
        page.locator("p.download a").click()
    assert download.value.suggested_filename == "03_sqrt_schedule.ipynb"


def test_on_a_phone_no_page_is_wider_than_the_screen_and_wide_tables_scroll(address, open_page):
    page = open_page("about:blank", viewport={"width": 390, "height": 800})
    names = ("index.html", "notebooks/claims.html", "api/memory.html", LESSON)
    for path in (f"{language}/{name}" for name in names for language in ("en", "zh")):
        page.goto(f"{address}/{path}")
        page.wait_for_load_state("networkidle")  # formulas too
        # the theme's headings stand out by 8 pixels
        for place, more in (("html", 0), (".article-container", 8)):
            assert (
                page.locator(place).evaluate("element => element.scrollWidth - element.clientWidth")
                <= more
            ), path
    assert page.locator("article [tabindex='0']:has(table)").count() > 0, "with the keyboard too"
    boxes = page.locator("article pre:visible")
    wide = "nodes => nodes.filter((n) => n.scrollWidth > n.clientWidth).map((n) => n.tabIndex)"
    assert set(boxes.evaluate_all(wide)) == {0}


# where the theme first has contents next to the text, and a laptop's
@pytest.mark.parametrize("width", [1320, 1366])
def test_on_a_laptop_no_page_is_wider_than_the_screen(address, open_page, width):
    page = open_page(f"{address}/en/{LESSON}", viewport={"width": width, "height": 768})
    assert page.locator("html").evaluate("element => element.scrollWidth") == width


def luminance(color):
    """0 for black, 1 for white, of "rgb(r, g, b)"."""
    channels = [float(part) for part in color.removeprefix("rgb(").rstrip(")").split(",")[:3]]
    return sum(
        weight * channel / 255
        for weight, channel in zip((0.2126, 0.7152, 0.0722), channels, strict=True)
    )


def test_figures_have_a_light_ground_in_the_dark(address, open_page):
    page = open_page(f"{address}/en/{LESSON}", color_scheme="dark")
    style = "element => getComputedStyle(element).backgroundColor"
    assert luminance(page.locator("body").evaluate(style)) < 0.1
    figures = page.locator("article img")
    assert figures.count() > 2
    assert min(luminance(figures.nth(n).evaluate(style)) for n in range(figures.count())) > 0.9


@pytest.mark.parametrize(
    ("language", "words"),
    [
        *(("en", words) for words in ("CUDA out of memory", "OOM", "out of memory")),
        *(("zh", words) for words in ("显存不足", "爆显存", "显存优化", "显存碎片", "OOM")),
        *(("en", words) for words in ("显存不足", "爆显存", "显存优化", "显存碎片")),
    ],
)
def test_the_search_leads_first_to_what_to_do_when_memory_runs_out(
    address, open_page, language, words
):
    page = open_page(f"{address}/{language}/search.html?q={words}")
    first = page.locator("#search-results li a").first
    first.wait_for()
    page.wait_for_function(
        "document.querySelector('#search-results p.search-summary').innerText.match(/\\d|one page/)"
    )
    assert "docs/out_of_memory.html" in first.get_attribute("href")


@pytest.mark.parametrize("word", ["带宽", "拷"])
def test_the_search_finds_a_chinese_word_of_one_character_or_two(address, open_page, word):
    page = open_page(f"{address}/zh/search.html?q={word}")
    found = page.locator("#search-results li a[href*='04_offload']").first
    found.wait_for()
    assert re.match(r"[\d.]+ [\u3400-\u9fff]", found.inner_text()), "in its language"
    choose(page, "en")
    assert "/en/search.html?q=" in page.url, "the same words, in the other language"


def test_from_the_file_system_a_claim_leads_to_the_section_that_measured_it(built_site, open_page):
    page = open_page(f"{built_site.as_uri()}/index.html", locale="zh-CN")
    page.wait_for_url("**/zh/index.html")
    page.locator(".sidebar-tree a[href*=claims]").click()
    page.wait_for_url("**/zh/notebooks/claims.html")
    page.locator("article a[href*='#section-3-9']:visible").first.click()
    page.wait_for_url("**/03_sqrt_schedule.html#section-3-9")
    assert page.locator("section#section-3-9 > h2").is_visible()


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
