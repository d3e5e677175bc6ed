"""The website in a browser: the language button works, is remembered, and goes with the address."""

import re
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytestmark = pytest.mark.browser

LESSON = "notebooks/03_sqrt_schedule.html"
NARROW = {"viewport": {"width": 390, "height": 800}}


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


def choose(page, language):
    page.locator(f".language-switch:visible button[value={language}]").click()


def pressed(page):
    return page.locator(".language-switch:visible button[aria-pressed=true]").get_attribute("value")


ENGLISH, CHINESE = "Which ones should we forget?", "该忘掉哪些？"


def test_the_button_hides_the_other_language_in_prose_headings_tables_and_contents(address, open_page):
    page = open_page(f"{address}/{LESSON}", viewport={"width": 1600, "height": 900})
    for language, here, gone in (("zh", CHINESE, ENGLISH), ("en", ENGLISH, CHINESE)):
        choose(page, language)
        assert pressed(page) == language
        for place in ("article h1", ".sidebar-tree"):
            assert here in shown(page, place) and gone not in shown(page, place)
        other = "en" if language == "zh" else "zh"
        assert page.locator(f"article [lang={language}]:visible").count() > 100
        assert page.locator(f"article [lang={other}]:visible").count() == 0
        assert page.locator(f".toc-tree [lang={other}]:visible, .related-pages [lang={other}]:visible").count() == 0
        assert here in page.title() and gone not in page.title()
    choose(page, "both")
    assert f"{ENGLISH} / {CHINESE}" in shown(page, "article h1")
    assert page.locator("article table [lang=zh]:visible").count() > 10
    assert page.evaluate("document.documentElement.lang") == "en"


def test_the_language_is_remembered_on_the_next_page_and_after_a_reload(address, open_page):
    page = open_page(f"{address}/index.html")
    choose(page, "zh")
    page.locator("article a[href*='01_memory']").click()
    page.wait_for_url("**/notebooks/01_memory_bottleneck.html*")
    assert pressed(page) == "zh" and shown(page, "article h1").startswith("1 训练步的字节去了哪里")
    page.reload()
    assert pressed(page) == "zh" and page.url.endswith("?lang=zh")
    page.goto(f"{address}/api/memory.html")
    assert pressed(page) == "zh" and page.evaluate("document.documentElement.lang") == "zh-Hans"
    choose(page, "en")
    page.go_back()
    assert pressed(page) == "en", "the page before is in the language that was chosen last"


def test_the_address_names_the_language_and_keeps_its_anchor(address, open_page):
    page = open_page(f"{address}/{LESSON}?lang=zh#claims-03")
    assert pressed(page) == "zh" and page.url.endswith("?lang=zh#claims-03")
    choose(page, "both")
    assert page.url.endswith("?lang=both#claims-03")
    page = open_page(f"{address}/{LESSON}?lang=klingon")
    assert pressed(page) == "en"


@pytest.mark.parametrize(("locale", "language"), [("en-GB", "en"), ("de-DE", "en"), ("zh-CN", "zh"), ("zh-TW", "zh")])
def test_a_first_visit_is_in_the_language_of_the_browser(address, open_page, locale, language):
    page = open_page(f"{address}/{LESSON}", locale=locale)
    assert pressed(page) == language and "lang=" not in page.url


FORGETFUL = """
const set = Storage.prototype.setItem;
Storage.prototype.setItem = function (key, value) {
  if (key === "course-language") throw new Error("refused");
  set.call(this, key, value);
};
"""


def test_a_browser_that_remembers_nothing_carries_the_language_in_the_links(address, open_page):
    page = open_page(f"{address}/index.html")
    page.add_init_script(FORGETFUL)
    page.reload()
    choose(page, "zh")
    with page.expect_navigation(url="**/claims.html?lang=zh"):
        page.locator(".sidebar-tree a[href*=claims]").click()


def test_without_scripts_both_languages_show(address, open_page):
    page = open_page(f"{address}/{LESSON}", java_script_enabled=False)
    assert ENGLISH in shown(page, "article h1") and CHINESE in shown(page, "article h1")
    assert page.locator(".language-switch:visible").count() == 0


def test_a_phone_has_the_button_in_its_header_and_no_page_is_wider_than_the_screen(address, open_page):
    page = open_page(f"{address}/index.html", **NARROW)
    for path in ("index.html", LESSON, "notebooks/claims.html", "notebooks/GLOSSARY.html", "api/memory.html"):
        page.goto(f"{address}/{path}")
        choose(page, "both")
        page.wait_for_load_state("networkidle")  # formulas too
        for place, more in (("html", 0), (".article-container", 8)):  # the theme's headings stand out by 8 pixels
            assert page.locator(place).evaluate("element => element.scrollWidth - element.clientWidth") <= more, path


def test_the_keyboard_reaches_the_button_and_chooses(address, open_page):
    page = open_page(f"{address}/{LESSON}")
    for _ in range(8):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.value") == "zh":
            break
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    assert pressed(page) == "zh"


def test_a_wide_table_can_be_scrolled_with_the_keyboard(address, open_page):
    page = open_page(f"{address}/{LESSON}?lang=both", **NARROW)
    assert page.locator("article [tabindex='0']:has(table)").count() > 0


def luminance(color):
    """0 for black, 1 for white, of "rgb(r, g, b)"."""
    channels = [float(part) for part in color.removeprefix("rgb(").rstrip(")").split(",")[:3]]
    return sum(weight * channel / 255 for weight, channel in zip((0.2126, 0.7152, 0.0722), channels, strict=True))


def test_figures_have_a_light_ground_in_the_dark(address, open_page):
    page = open_page(f"{address}/{LESSON}", color_scheme="dark")
    style = "element => getComputedStyle(element).backgroundColor"
    assert luminance(page.locator("body").evaluate(style)) < 0.1
    figures = page.locator("article img")
    assert figures.count() > 2
    assert min(luminance(figures.nth(n).evaluate(style)) for n in range(figures.count())) > 0.9
    page.goto(f"{address}/index.html")
    assert luminance(page.locator("article img").first.evaluate(style)) > 0.9


def test_figures_are_described_in_the_language_of_the_page_and_never_hidden(address, open_page):
    page = open_page(f"{address}/{LESSON}")
    figures = page.locator("article img.figure")
    for language, english, chinese in (("en", True, False), ("zh", False, True), ("both", True, True)):
        choose(page, language)
        assert figures.count() > 2 and page.locator("article img.figure:visible").count() == figures.count()
        for words in figures.evaluate_all("figures => figures.map((figure) => figure.alt)"):
            assert (bool(re.match("[A-Z]", words)), bool(re.search("[\u3400-\u9fff]", words))) == (english, chinese)


def test_a_table_in_english_only_stays_in_chinese(address, open_page):
    page = open_page(f"{address}/notebooks/01_memory_bottleneck.html?lang=zh")
    assert page.locator("article section[lang=en] table:visible").count() > 0


def test_formulas_are_drawn(address, open_page):
    page = open_page(f"{address}/{LESSON}?lang=zh")
    page.locator("article mjx-container:visible").first.wait_for()
    assert page.locator("article mjx-container").count() > 50
    assert page.evaluate("document.fonts.ready.then(() => [...document.fonts].some((f) => f.status === 'loaded'))")


def test_the_search_finds_a_chinese_word_of_two_characters(address, open_page):
    page = open_page(f"{address}/search.html?q=带宽&lang=zh")
    page.locator("#search-results li").first.wait_for()
    page.wait_for_function("document.querySelector('#search-results p').innerText.includes('找到')")
    assert "不忘掉，而是挪到下一级存储呢" in shown(page, "#search-results")
    assert page.url.endswith("lang=zh") and "q=" in page.url


def test_a_link_from_a_claim_leads_to_the_section_that_measured_it(address, open_page):
    page = open_page(f"{address}/notebooks/claims.html?lang=en")
    page.get_by_text("lesson 03, section 3.10").click()
    page.wait_for_url("**/03_sqrt_schedule.html*#claims-03")
    assert page.locator("section#claims-03 > h2").is_visible()


def test_the_site_works_from_the_file_system(built_site, open_page):
    page = open_page(f"{built_site.as_uri()}/index.html?lang=zh")
    page.locator(".sidebar-tree a[href*=claims]").click()
    page.wait_for_url("**/claims.html*")
    assert pressed(page) == "zh" and shown(page, "article h1").startswith("常见说法与结论")


@pytest.mark.parametrize(("named", "error"), [("/no/such/chromium", FileNotFoundError), (sys.executable, None)])
def test_a_browser_that_is_named_and_not_there_is_an_error(monkeypatch, chromium_finder, named, error):
    monkeypatch.setenv("CHROMIUM", named)
    if error is None:
        assert chromium_finder() == named
    else:
        with pytest.raises(error, match="no such program"):
            chromium_finder()
