"""Lesson 00: what is on this machine, and the course as a map."""

import os
import platform
import shutil
import sys
from typing import TYPE_CHECKING

import torch

from course_lib.teaching import Table, figure, table, text
from course_lib.teaching.figures import shown_once

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# (number, x, y, English, Chinese): a lesson's place on the map.
_PLACES = (
    ("01", 0.0, 1.0, "Where do\nthe bytes go?", "字节去了\n哪里？"),
    ("02", 1.0, 2.0, "Forget and\ncompute again?", "忘掉再算\n一遍？"),
    ("03", 2.0, 2.0, "Which ones\nto forget?", "该忘掉\n哪些？"),
    ("04", 1.0, 1.0, "Move them\ndown a tier?", "挪到下一级\n存储？"),
    ("05", 1.0, 0.0, "Take the batch\nin pieces?", "把批次\n拆开？"),
    ("06", 2.0, 0.0, "Let the operator\nforget?", "让算子\n自己忘掉？"),
    ("07", 3.0, 1.0, "Fit a\nbudget", "装进\n预算"),
    ("08", 4.0, 1.0, "Beyond\none device", "不止\n一台设备"),
)
_ARROWS = ("01-02", "02-03", "01-04", "01-05", "05-06", "03-07", "04-07", "06-07", "07-08")
_COLORS = {"01": "#DCE6F0", "07": "#F6DFE0", "08": "#F6DFE0"}
_ALT = (
    "A map of the lessons. Lesson 01 asks where the bytes go. Arrows lead from it to 02, forget and compute again, "
    "with 03, which ones to forget; to 04, move them down a tier; and to 05, take the batch in pieces, with 06, let "
    "the operator forget. All three ways lead to 07, fit a budget, and on to 08, beyond one device.",
    "各课的地图。第 01 课问字节去了哪里。箭头从它出发，通向第 02 课（忘掉再算一遍）和第 03 课（该忘掉哪些），第 04 课"
    "（挪到下一级存储），以及第 05 课（把批次拆开）和第 06 课（让算子自己忘掉）。三条路都通向第 07 课（装进预算），"
    "再到第 08 课（不止一台设备）。",
)
_WIDTH, _HEIGHT = 0.82, 0.72


def about_this_machine() -> Table:
    """Python, torch, processor, memory and GPU of this machine, and whether that is enough for the course."""
    rows = [
        (("Python", "Python"), platform.python_version(), _enough(sys.version_info >= (3, 11), "3.11")),
        (("PyTorch", "PyTorch"), torch.__version__, _enough(_version(torch.__version__) >= (2, 9), "2.9")),
        (("processor cores", "处理器核数"), str(os.cpu_count()), _enough((os.cpu_count() or 0) >= 2, "2")),
        (("memory", "内存"), *_memory()),
        (("GPU", "GPU"), *_gpu()),
    ]
    return table([("what", "项目"), ("here", "本机"), ("enough?", "够用吗？")], rows)


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def _enough(good: bool, wanted: str) -> tuple[str, str]:
    return ("yes", "够用") if good else (f"no: the course needs {wanted} or more", f"不够：本课程需要 {wanted} 以上")


def _memory() -> tuple[str, tuple[str, str]]:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        return "?", ("4 GB are enough", "4 GB 就够")
    return f"{total / 1e9:.1f} GB", _enough(total > 4e9, "4 GB")


def _gpu() -> tuple[str, tuple[str, str]]:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(), ("yes, lessons show its figures live", "够用，各课会在上面现场测量")
    if shutil.which("nvidia-smi"):
        return "–", (
            "there seems to be one, but this build of torch cannot use it: see Troubleshooting",
            "似乎有 GPU，但当前的 torch 版本用不了它：见“疑难解答”",
        )
    return "–", ("not needed: bytes and FLOPs are the same without one", "不需要：字节数和 FLOPs 在没有 GPU 时也一样")


def course_map() -> "Figure":
    """Draw the lessons and the ways between them: measure first, then the ways to save, then all together."""
    title = (
        "Measure first; then the ways to save; then all of them together",
        "先测量；再看各种节省办法；最后合在一起用",
    )
    drawn, ax = figure(title, height=3.6, alt=_ALT)
    places = {number: (x, y) for number, x, y, _, _ in _PLACES}
    for arrow in _ARROWS:
        (x, y), (to_x, to_y) = (places[number] for number in arrow.split("-"))
        start, end = (x + _WIDTH / 2, y), (to_x - _WIDTH / 2, to_y)
        ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "#888888", "linewidth": 1.2})
    for number, x, y, english, chinese in _PLACES:
        corner, color = (x - _WIDTH / 2, y - _HEIGHT / 2), _COLORS.get(number, "#E6F0E4")
        ax.add_patch(_box(corner, color))
        ax.text(x, y + 0.24, number, ha="center", va="center", fontsize=9, color="#777777")
        ax.text(
            x, y - 0.08, text(english, chinese, separator="\n"), ha="center", va="center", fontsize=8, linespacing=1.15
        )
    ax.set(xlim=(-0.5, 4.5), ylim=(-0.5, 2.5))
    ax.axis("off")
    return shown_once(drawn)


def _box(corner: tuple[float, float], color: str):
    from matplotlib.patches import FancyBboxPatch

    return FancyBboxPatch(
        corner, _WIDTH, _HEIGHT, boxstyle="round,pad=0,rounding_size=0.06", facecolor=color, edgecolor="none"
    )
