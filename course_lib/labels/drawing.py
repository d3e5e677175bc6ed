"""The font with the Chinese characters of the labels, for all drawing code."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FONT = "Course Sans SC"
_FILE = Path(__file__).parents[1] / "teaching" / "fonts" / "CourseSansSC-Regular.otf"
#: In a string with math, matplotlib draws everything else in the first font only, so that is the
#: one with Chinese characters.
FAMILY = [FONT, "DejaVu Sans"]


def add_font() -> None:
    """Register the font with matplotlib."""
    from matplotlib import font_manager

    if not any(entry.fname == str(_FILE) for entry in font_manager.fontManager.ttflist):
        font_manager.fontManager.addfont(_FILE)


@contextmanager
def course_font() -> Iterator[None]:
    """Draw and save figures in the block in the course's font."""
    import matplotlib

    add_font()
    with matplotlib.rc_context({"font.family": FAMILY}):
        yield
