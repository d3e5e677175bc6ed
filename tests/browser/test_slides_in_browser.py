"""The slides in a browser, offline: each one fits, pages turn, and the speaker has notes."""

from itertools import cycle, product

import pytest
from editions import NAMES

pytest.importorskip("nbconvert")
pytest.importorskip("latex2mathml")

from publish import handout, slides

pytestmark = pytest.mark.browser

SCREEN = {"viewport": {"width": 1280, "height": 720}, "offline": True}
LEAST_SIZE = 70  # percent: below it the words of a slide are too small for the back row

# Every slide with all its fragments: how far its body reaches over, how much it was shrunk, what
# stands outside.
LOOK_AT_ALL = """() => Reveal.getSlides().map((slide) => {
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
    """`make browser` opens every deck, `make test` one of each lesson, in the languages in turns."""
    if "name" in metafunc.fixturenames:
        all_of_them = metafunc.config.option.markexpr == "browser"
        one_of_each = zip(cycle(slides.LANGUAGES), NAMES)
        decks = product(slides.LANGUAGES, NAMES) if all_of_them else one_of_each
        metafunc.parametrize(("language", "name"), list(decks))


def test_every_slide_fits_the_screen_and_nothing_is_loaded(open_deck, language, name):
    page = open_deck(language, name)
    looks = page.evaluate(LOOK_AT_ALL)
    assert len(looks) >= 8
    assert [
        look for look in looks if look["over"] > 0 or look["outside"] or look["size"] < LEAST_SIZE
    ] == []
    loaded = page.evaluate("performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert [address for address in loaded if not address.startswith("data:")] == []


@pytest.mark.parametrize("key", ["Space", "ArrowRight"])
def test_a_key_turns_every_page_in_order(open_deck, key):
    page = open_deck("both", "00_start_here")
    total = page.evaluate("Reveal.getTotalSlides()")
    seen = [page.evaluate("Reveal.getSlidePastCount()")]
    while not page.evaluate("Reveal.isLastSlide()") or page.evaluate(
        "Reveal.availableFragments().next"
    ):
        page.keyboard.press(key)
        seen.append(page.evaluate("Reveal.getSlidePastCount()"))
        assert len(seen) < 10 * total
    assert sorted(set(seen)) == list(range(total)) and seen == sorted(seen)
    while page.evaluate("Reveal.getSlidePastCount()") == total - 1:
        page.keyboard.press("ArrowLeft")
    assert page.evaluate("Reveal.getSlidePastCount()") == total - 2


def test_a_result_waits_for_a_key(open_deck):
    page = open_deck("en", "02_checkpointing")
    page.evaluate("""() => {
      const slide = Reveal.getSlides().find((each) => each.querySelector('.result.fragment'));
      const place = Reveal.getIndices(slide);
      Reveal.slide(place.h, place.v, -1);
    }""")
    shown = "getComputedStyle(Reveal.getCurrentSlide().querySelector('.result')).visibility"
    assert page.evaluate(shown) == "hidden"
    page.keyboard.press("Space")
    assert page.evaluate(shown) == "visible"


def test_a_formula_stretches_its_brackets(open_deck):
    page = open_deck("en", "01_memory_bottleneck")
    page.evaluate("""document.fonts.load("54px 'Course Math'")""")  # Chromium loads it when needed
    bracket = page.evaluate("""() => {
      for (const slide of Reveal.getSlides()) {
        const found = [...slide.querySelectorAll('math[display=block] mo')].find((mo) => mo.textContent === '(');
        if (found) { const at = Reveal.getIndices(slide); Reveal.slide(at.h, at.v); return [
          found.getBoundingClientRect().height, parseFloat(getComputedStyle(found).fontSize)]; }
      }
    }""")
    assert bracket[0] > 1.5 * bracket[1]


def test_the_speaker_sees_minutes_and_a_question(open_deck):
    page = open_deck("zh", "01_memory_bottleneck")
    with page.expect_popup() as opened:
        page.keyboard.press("s")
    view = opened.value
    view.wait_for_function(
        "document.querySelector('.speaker-controls-notes .value')?.innerText.includes('提问')"
    )
    assert "分钟" in view.inner_text(".speaker-controls-notes .value")


def test_a_handout_has_one_page_for_each_slide(built_decks, browser, open_deck, tmp_path):
    slides_shown = open_deck("en", "00_start_here").evaluate("Reveal.getTotalSlides()")
    target = tmp_path / "handout.pdf"
    handout.print_deck(browser, built_decks / "en/00_start_here.html", target)
    assert handout.page_count(target.read_bytes()) == slides_shown


def test_a_handout_without_chromium_or_decks_is_one_sentence(tmp_path, monkeypatch):
    for find, said in (
        (lambda: None, "a handout needs Chromium"),
        (lambda: "chromium", "has no deck of these lessons: run `make slides` first"),
    ):
        monkeypatch.setattr(handout, "find_chromium", find)
        with pytest.raises(SystemExit, match=said):
            handout.main(["77", "--decks", str(tmp_path), "--output", str(tmp_path / "out")])
    assert list(tmp_path.iterdir()) == []
