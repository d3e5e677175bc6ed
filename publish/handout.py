"""Handouts: the decks of `make slides` as PDF, one slide per page, printed by Chromium.

    python -m publish.handout            # every deck of build/slides
    python -m publish.handout 01 02      # select by the lesson's number

A page shows a slide with all of its fragments, without the speaker's notes. The decks of the
language "both" are not printed, because a learner reads only one language.
"""

import argparse
import re
import sys
from pathlib import Path

from playwright.sync_api import Browser, Error, sync_playwright

from .cells import EditionError, output_folder
from .chromium import NO_CHROMIUM, find_chromium

DECKS, HANDOUTS = Path("build/slides"), Path("build/handout")
LANGUAGES = ("en", "zh")
MOST_SECONDS = 300  # limit for one deck; a busy machine needs a tenth of it
# No sandbox, because containers have none, and the decks are the course's own files.
_OPTIONS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]


def print_deck(browser: Browser, deck: Path, target: Path) -> None:
    """Print a deck as PDF, in the view that reveal.js has for printing.

    Raises:
        EditionError: The PDF has too few pages.
    """
    page = browser.new_page()
    page.set_default_timeout(1000 * MOST_SECONDS)  # in milliseconds
    page.goto(f"{deck.resolve().as_uri()}?print-pdf")
    # reveal.js counts no slides and creates no pages until it is ready.
    page.wait_for_function(
        "Reveal.getTotalSlides() > 0"
        " && document.querySelectorAll('.pdf-page').length === Reveal.getTotalSlides()"
    )
    page.evaluate("document.fonts.ready.then(() => new Promise(requestAnimationFrame))")
    slides = page.evaluate("Reveal.getTotalSlides()")
    printed = page.pdf(prefer_css_page_size=True, print_background=True)
    if page_count(printed) != slides:
        raise EditionError(f"{deck} has {slides} slides, but its PDF has {page_count(printed)}")
    target.write_bytes(printed)
    page.close()


def page_count(pdf: bytes) -> int:
    """Return the number of pages of a PDF from Chromium, as stated at the root of its page tree."""
    return max(map(int, re.findall(rb"/Count (\d+)", pdf)), default=0)


def build(decks: Path, output: Path, lessons: list[str]) -> None:
    """Write `output/<language>/<lesson>.pdf` for the decks whose name starts with a given number.

    Raises:
        EditionError: Chromium or a deck is missing.
    """
    chromium = find_chromium()
    if chromium is None:
        raise EditionError(f"a handout {NO_CHROMIUM}")
    found = [
        path
        for language in LANGUAGES
        for path in sorted((decks / language).glob("*.html"))
        if not lessons or path.name.startswith(tuple(lessons))
    ]
    if not found:
        raise EditionError(f"{decks} has no deck of these lessons: run `make slides` first")
    with output_folder(output) as folder, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=_OPTIONS)
        for path in found:
            target = folder / path.parent.name / f"{path.stem}.pdf"
            target.parent.mkdir(exist_ok=True)
            print_deck(browser, path, target)
            print(f"{output / target.relative_to(folder)}", flush=True)
        browser.close()


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("lessons", nargs="*", help='numbers such as "01"; all decks if none')
    parser.add_argument("--decks", type=Path, default=DECKS, help="folder of `make slides`")
    parser.add_argument("--output", type=Path, default=HANDOUTS, help="folder to make or replace")
    chosen = parser.parse_args(arguments)
    try:
        build(chosen.decks, chosen.output, chosen.lessons)
    except (EditionError, OSError, Error) as error:
        sys.exit(f"handout: {error}; {chosen.output} is left as it was")


if __name__ == "__main__":
    main()
