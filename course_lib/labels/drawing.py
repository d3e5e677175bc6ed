"""Drawing with labels: the optional import of matplotlib, and a font with Chinese characters."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

FONT = "Course Sans SC"
_FILE = Path(__file__).parents[1] / "teaching" / "fonts" / "CourseSansSC-Regular.otf"
#: In a string with math, matplotlib writes the text outside the math in the first font only.
#: Therefore the first font must be the one with Chinese characters.
FAMILY = [FONT, "DejaVu Sans"]


def pyplot() -> ModuleType:
    """Import and return `matplotlib.pyplot`.

    Raises:
        ModuleNotFoundError: matplotlib is not installed. The message says how to install it.
    """
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise ModuleNotFoundError(
            "a plot needs matplotlib, which is not installed: run `pip install matplotlib`,"
            " or install course_lib with its extra `plot`",
            name="matplotlib",
        ) from None
    return plt


def add_font() -> None:
    """Register the course's font, which contains Chinese characters, with matplotlib.

    If the font is already registered, the function does nothing.
    """
    from matplotlib import font_manager

    if not any(entry.fname == str(_FILE) for entry in font_manager.fontManager.ttflist):
        font_manager.fontManager.addfont(_FILE)


@contextmanager
def course_font() -> Iterator[None]:
    """Use the course's font in a `with` block, so that figures can show Chinese characters.

    Figures must be drawn and saved inside the block.
    """
    import matplotlib

    add_font()
    with matplotlib.rc_context({"font.family": FAMILY}):
        yield
