"""The website in a browser: the language button works, is remembered, and goes with the address."""

import re
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

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


def choose(page, language):
    page.locator(f".language-switch:visible button[value={language}]").click()


def pressed(page):
    return page.locator(".language-switch:visible button[aria-pressed=true]").get_attribute("value")


ENGLISH, CHINESE = (
    "Which ones should we forget? (checkpoint schedules)",
    "该忘掉哪些？（检查点的调度）",
)


def test_the_button_turns_prose_headings_contents_and_figures_and_the_keyboard_reaches_it(
    address, open_page
):
    page = open_page(f"{address}/{LESSON}", viewport={"width": 1600, "height": 900})
    for _ in range(8):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.value") == "zh":
            break
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    figures = page.locator("article figure[lang] > img")
    for language, here, gone in (("zh", CHINESE, ENGLISH), ("en", ENGLISH, CHINESE)):
        assert pressed(page) == language
        for place in ("article h1", ".sidebar-tree"):
            assert here in shown(page, place) and gone not in shown(page, place)
        other = "en" if language == "zh" else "zh"
        assert page.locator(f"article [lang={language}]:visible").count() > 100
        assert page.locator(f"article [lang={other}]:visible").count() == 0
        assert (
            page.locator(
                f".toc-tree [lang={other}]:visible, .related-pages [lang={other}]:visible"
            ).count()
            == 0
        )
        assert here in page.title() and gone not in page.title()
        assert (
            page.locator(f"article figure[lang={language}] > img:visible").count()
            == figures.count() // 2
        )
        choose(page, "en")
    choose(page, "both")
    assert f"{ENGLISH} / {CHINESE}" in shown(page, "article h1")
    assert (
        figures.count() > 2
        and page.locator("article figure[lang] > img:visible").count() == figures.count()
    )
    assert page.locator("article table [lang=zh]:visible").count() > 10
    assert page.evaluate("document.documentElement.lang") == "en"
    page.locator("article mjx-container:visible").first.wait_for()
    assert page.locator("article mjx-container").count() > 50
    assert page.evaluate(
        "document.fonts.ready.then(() => [...document.fonts].some((f) => f.status === 'loaded'))"
    )


def test_the_language_is_remembered_on_the_next_page_and_after_a_reload(address, open_page):
    page = open_page(f"{address}/index.html")
    choose(page, "zh")
    page.locator("article a[href*='06_flash']:visible").click()
    page.wait_for_url("**/notebooks/06_flash_attention.html*")
    assert pressed(page) == "zh" and re.match("6 [\u3400-\u9fff]", shown(page, "article h1"))
    assert page.locator("article table span[lang=zh]:visible").count() > 0
    assert page.locator("article table span[lang=en]:visible").count() == 0
    page.goto(f"{address}/api/memory.html")
    assert pressed(page) == "zh" and page.evaluate("document.documentElement.lang") == "zh-Hans"
    choose(page, "en")
    page.go_back()
    assert pressed(page) == "en", "the page before is in the language that was chosen last"


def test_the_address_names_the_language_and_keeps_its_anchor(address, open_page):
    page = open_page(f"{address}/notebooks/claims.html?lang=klingon")
    assert pressed(page) == "en"
    page.goto(f"{address}/notebooks/claims.html?lang=zh#claim-3-1")
    assert pressed(page) == "zh" and page.url.endswith("?lang=zh#claim-3-1")
    choose(page, "both")
    assert page.url.endswith("?lang=both#claim-3-1")


@pytest.mark.parametrize(("locale", "language"), [("de-DE", "en"), ("zh-TW", "zh")])
def test_a_first_visit_is_in_the_language_of_the_browser(address, open_page, locale, language):
    page = open_page(f"{address}/index.html", locale=locale)
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


def test_on_a_phone_no_page_is_wider_than_the_screen_and_wide_tables_scroll(address, open_page):
    page = open_page(f"{address}/index.html", viewport={"width": 390, "height": 800})
    for path in ("index.html", "notebooks/claims.html", "api/memory.html", LESSON):
        page.goto(f"{address}/{path}")
        choose(page, "both")
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


# where the theme first has contents beside the text, and a laptop's
@pytest.mark.parametrize("width", [1320, 1366])
def test_on_a_laptop_no_page_is_wider_than_the_screen(address, open_page, width):
    page = open_page(f"{address}/{LESSON}", viewport={"width": width, "height": 768})
    assert page.locator("html").evaluate("element => element.scrollWidth") == width


def luminance(color):
    """0 for black, 1 for white, of "rgb(r, g, b)"."""
    channels = [float(part) for part in color.removeprefix("rgb(").rstrip(")").split(",")[:3]]
    return sum(
        weight * channel / 255
        for weight, channel in zip((0.2126, 0.7152, 0.0722), channels, strict=True)
    )


def test_figures_have_a_light_ground_in_the_dark(address, open_page):
    page = open_page(f"{address}/{LESSON}", color_scheme="dark")
    style = "element => getComputedStyle(element).backgroundColor"
    assert luminance(page.locator("body").evaluate(style)) < 0.1
    figures = page.locator("article img")
    assert figures.count() > 2
    assert min(luminance(figures.nth(n).evaluate(style)) for n in range(figures.count())) > 0.9


@pytest.mark.parametrize("word", ["带宽", "拷"])
def test_the_search_finds_a_chinese_word_of_one_character_or_two(address, open_page, word):
    page = open_page(f"{address}/search.html?q={word}&lang=zh")
    found = page.locator("#search-results li a[href*='04_offload']").first
    found.wait_for()
    assert (
        re.match(r"[\d.]+ [\u3400-\u9fff]", found.inner_text()) and "/" not in found.inner_text()
    ), "in its language"
    assert page.url.endswith("lang=zh") and "q=" in page.url


def test_columns_that_say_the_same_are_one_in_each_language(address, open_page):
    page = open_page(f"{address}/notebooks/NOTES.html?lang=zh")
    assert "装不下" in shown(page) and "Which model of yours" not in shown(page)
    choose(page, "both")
    assert "装不下" in shown(page) and "Which model of yours" in shown(page)


def test_from_the_file_system_a_claim_leads_to_the_section_that_measured_it(built_site, open_page):
    page = open_page(f"{built_site.as_uri()}/index.html?lang=zh")
    page.locator(".sidebar-tree a[href*=claims]").click()
    page.wait_for_url("**/claims.html*")
    assert pressed(page) == "zh"
    page.locator("article a[href*='#claims-03']:visible").first.click()
    page.wait_for_url("**/03_sqrt_schedule.html*#claims-03")
    assert page.locator("section#claims-03 > h2").is_visible()
