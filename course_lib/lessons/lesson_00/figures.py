"""Lesson 00's report on this machine, and its map of the course."""

import os
import platform
import shutil
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from course_lib.memory import MemoryMeter
from course_lib.teaching import Table, category_label, figure, table, text
from course_lib.teaching.figures import shown_once
from course_lib.teaching.marks import arrow, write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# (number, x, y, question): a lesson's place on the map
_PLACES = (
    ("01", 0.0, 1.0, "Where do\nthe bytes go?"),
    ("02", 1.0, 2.0, "Forget and\ncompute again?"),
    ("03", 2.0, 2.0, "Which ones\nto forget?"),
    ("04", 1.0, 1.0, "Move them to\na lower tier?"),
    ("05", 1.0, 0.0, "Split\nthe batch?"),
    ("06", 2.0, 0.0, "Let the operator\nforget?"),
    ("07", 3.0, 1.0, "Fit a\nbudget"),
    ("08", 4.0, 1.0, "Beyond\none device"),
    ("09", 5.0, 1.0, "And other\nmodels?"),
)
_ARROWS = ("01-02", "02-03", "01-04", "01-05", "05-06", "03-07", "04-07", "06-07", "07-08", "08-09")
_COLORS = {"01": "#DCE6F0", "07": "#F6DFE0", "08": "#F6DFE0", "09": "#F6DFE0"}
_ALT = (
    "A map of the lessons. Lesson 01 asks where the bytes go. Arrows lead from it to 02, forget and"
    " compute again, with 03, which ones to forget; to 04, move them to a lower tier; and to 05,"
    " split the batch, with 06, let the operator forget. All three ways lead to 07, fit a"
    " budget, on to 08, beyond one device, and to 09, other models."
)
_WIDTH, _HEIGHT = 0.82, 0.72


def about_this_machine() -> Table:
    """Return a table of this machine's Python, PyTorch, CPU cores, memory and GPU.

    A column shows whether each item, such as the memory, is sufficient for the course.
    """
    rows = [
        ("Python", platform.python_version(), _enough(sys.version_info >= (3, 11), "3.11")),
        ("PyTorch", torch.__version__, _enough(_version(torch.__version__) >= (2, 9), "2.9")),
        ("processor cores", str(os.cpu_count()), _enough((os.cpu_count() or 0) >= 2, "2")),
        ("memory", *_memory()),
        ("GPU", *_gpu()),
    ]
    return table(["what", "here", "enough?"], rows)


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def _enough(good: bool, wanted: str) -> str:
    return "yes" if good else text("no: the course needs {wanted} or more", wanted=wanted)


def _memory() -> tuple[str, str]:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        return "?", "4 GB are enough"
    return f"{total / 1e9:.1f} GB", _enough(total > 4e9, "4 GB")


def _gpu() -> tuple[str, str]:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(), "yes, the lessons measure on it"
    if shutil.which("nvidia-smi"):
        return (
            "–",
            "this machine seems to have one, but this build of torch cannot use it (see"
            " Troubleshooting, below)",
        )
    return "–", "not needed: bytes and FLOPs are counted on the CPU"


def peak_table(meters: Mapping[str, MemoryMeter], heading: str = "at the peak (MB)") -> Table:
    """Return a table of the bytes at the peak of several training steps, by category, in MB.

    The last row is the sum of all categories.

    Args:
        meters: Dict from the heading of a column to the meter that measured the step.
        heading: Heading of the first column, which has the names of the categories.
    """
    kinds = ("parameter", "gradient", "optimizer", "activation", "temporary")
    parts = [meter.at_peak() for meter in meters.values()]
    rows = [
        (category_label(kind), *(round(each[kind] / 1e6, 1) for each in parts)) for kind in kinds
    ]
    peaks = (round(meter.peak_bytes / 1e6, 1) for meter in meters.values())
    return table([heading, *meters], [*rows, ("peak (MB)", *peaks)])


def course_map() -> "Figure":
    """Draw a map of the course: one box per lesson, and arrows to the lessons that build on it."""
    from matplotlib.patches import FancyBboxPatch

    title = "Measure first; then the ways to save; then all of them together"
    drawn, ax = figure(title, width=8.6, height=3.6, alt=_ALT)
    drawn.course_larger = 1.3  # larger words would not fit into the boxes
    places = {number: (x, y) for number, x, y, _ in _PLACES}
    for arrow_name in _ARROWS:
        (x, y), (to_x, to_y) = (places[number] for number in arrow_name.split("-"))
        look = {"color": "#888888", "linewidth": 1.2}
        arrow(ax, (x + _WIDTH / 2, y), (to_x - _WIDTH / 2, to_y), "-|>", **look)
    rounded = {"boxstyle": "round,pad=0,rounding_size=0.06", "edgecolor": "none"}
    for number, x, y, question in _PLACES:
        corner, color = (x - _WIDTH / 2, y - _HEIGHT / 2), _COLORS.get(number, "#E6F0E4")
        ax.add_patch(FancyBboxPatch(corner, _WIDTH, _HEIGHT, facecolor=color, **rounded))
        write(ax, x, y + 0.24, number, fontsize=9, color="#777777")
        write(ax, x, y - 0.08, question, fontsize=8, linespacing=1.15)
    ax.set(xlim=(-0.5, 5.5), ylim=(-0.5, 2.5))
    ax.axis("off")
    return shown_once(drawn)
