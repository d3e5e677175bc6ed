"""The font that has the labels' Chinese, for whatever draws them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FONT = "Course Sans SC"
_FILE = Path(__file__).parents[1] / "teaching" / "fonts" / "CourseSansSC-Regular.otf"
#: In a string with math, matplotlib takes everything else from the first font only: that is the
#: one with Chinese.
FAMILY = [FONT, "DejaVu Sans"]


def add_font() -> None:
    """Make the font known to matplotlib."""
    from matplotlib import font_manager

    if not any(entry.fname == str(_FILE) for entry in font_manager.fontManager.ttflist):
        font_manager.fontManager.addfont(_FILE)


@contextmanager
def course_font() -> Iterator[None]:
    """Write what is drawn and saved in the block in the course's font."""
    import matplotlib

    add_font()
    with matplotlib.rc_context({"font.family": FAMILY}):
        yield
