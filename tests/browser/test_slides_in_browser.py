"""Tests of the slides in a browser without network: size, keys, speaker notes and handouts."""

from itertools import cycle, product

import pytest
from edition_fixtures import NAMES

pytest.importorskip("nbconvert")
pytest.importorskip("latex2mathml")

from publish import handout, slides
from publish.cells import is_project

pytestmark = pytest.mark.browser

DECKS = [name for name in NAMES if not is_project(name)]
SCREEN = {"viewport": {"width": 1280, "height": 720}, "offline": True}
LEAST_SIZE = 70  # percent; smaller text cannot be read from the back row

# Returns, for every slide with all its fragments, the overflow of its body, the size of its text in
# percent, and the number of elements outside.
INSPECT_SLIDES = """() => Reveal.getSlides().map((slide) => {
  const place = Reveal.getIndices(slide);
  Reveal.slide(place.h, place.v, 99);
  const body = slide.querySelector(".body"), frame = slide.querySelector(".frame").getBoundingClientRect();
  const outside = [...slide.querySelectorAll(".heading *, .body *:not(.notes, .notes *)")].filter((element) => {
    const box = element.getBoundingClientRect();
    return box.width > 0 && (box.left < frame.left - 1 || box.right > frame.right + 1
      || box.top < frame.top - 1 || box.bottom > frame.bottom + 1);
  });
  return {
    place: `${place.h}/${place.v} ${slide.querySelector(".heading").innerText}`,
    over: Math.max(body.scrollHeight - body.clientHeight, body.scrollWidth - body.clientWidth),
    size: Number(body.dataset.size),
    outside: outside.length,
  };
})"""


@pytest.fixture
def open_deck(built_decks, open_page):
    def open_one(language, name):
        page = open_page((built_decks / language / f"{name}.html").as_uri(), **SCREEN)
        page.wait_for_function("Reveal.isReady()")
        return page

    return open_one


def pytest_generate_tests(metafunc):
    """Open every deck in `make browser`, and one per lesson, in alternating languages, elsewhere."""
    if "name" in metafunc.fixturenames:
        only_browser = metafunc.config.option.markexpr == "browser"
        one_per_lesson = zip(cycle(slides.LANGUAGES), DECKS)
        decks = product(slides.LANGUAGES, DECKS) if only_browser else one_per_lesson
        metafunc.parametrize(("language", "name"), list(decks))


def test_slides_fit_screen_and_request_no_external_resources(open_deck, language, name):
    page = open_deck(language, name)
    found = page.evaluate(INSPECT_SLIDES)
    assert len(found) >= 8
    for slide in found:
        assert slide["over"] <= 0 and not slide["outside"] and slide["size"] >= LEAST_SIZE, slide
    loaded = page.evaluate("performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert [address for address in loaded if not address.startswith("data:")] == []


@pytest.mark.parametrize("key", ["Space", "ArrowRight"])
def test_space_or_arrow_key_shows_all_slides_in_order(open_deck, key):
    page = open_deck("both", "00_start_here")
    total = page.evaluate("Reveal.getTotalSlides()")
    shown = [page.evaluate("Reveal.getSlidePastCount()")]
    while not page.evaluate("Reveal.isLastSlide()") or page.evaluate(
        "Reveal.availableFragments().next"
    ):
        page.keyboard.press(key)
        shown.append(page.evaluate("Reveal.getSlidePastCount()"))
        assert len(shown) < 10 * total
    assert sorted(set(shown)) == list(range(total)) and shown == sorted(shown)
    while page.evaluate("Reveal.getSlidePastCount()") == total - 1:
        page.keyboard.press("ArrowLeft")
    assert page.evaluate("Reveal.getSlidePastCount()") == total - 2


def test_speaker_view_shows_minutes_and_question(open_deck):
    page = open_deck("zh", "01_memory_bottleneck")
    with page.expect_popup() as opened:
        page.keyboard.press("s")
    view = opened.value
    view.wait_for_function(
        "document.querySelector('.speaker-controls-notes .value')?.innerText.includes('提问')"
    )
    assert "分钟" in view.inner_text(".speaker-controls-notes .value")


def test_handout_has_one_page_per_slide(built_decks, browser, open_deck, tmp_path):
    slides_shown = open_deck("en", "00_start_here").evaluate("Reveal.getTotalSlides()")
    target = tmp_path / "handout.pdf"
    handout.print_deck(browser, built_decks / "en/00_start_here.html", target)
    assert handout.page_count(target.read_bytes()) == slides_shown


def test_handout_command_exits_with_message_if_chromium_or_deck_missing(tmp_path, monkeypatch):
    for find_chromium, message in (
        (lambda: None, "a handout needs Chromium"),
        (lambda: "chromium", "has no deck of these lessons: run `make slides` first"),
    ):
        monkeypatch.setattr(handout, "find_chromium", find_chromium)
        with pytest.raises(SystemExit, match=message):
            handout.main(["77", "--decks", str(tmp_path), "--output", str(tmp_path / "out")])
    assert list(tmp_path.iterdir()) == []
