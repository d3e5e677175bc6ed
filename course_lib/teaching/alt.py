"""Figures in words: the alt text that a screen reader says in place of the picture, in the language in force.

JupyterLab shows a picture's bytes without any alt text, whatever the output's metadata say, and so does nbconvert's
own template. An `<img>` in HTML keeps its alt in both, and on a Sphinx page too: so that is how figures are shown.
"""

import html
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .languages import current, parts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_KINDS = {
    "area": ("stacked areas", "堆叠面积"),
    "bar": ("bars", "柱形"),
    "box": ("boxes", "方块"),
    "line": ("lines", "曲线"),
    "point": ("points", "数据点"),
    "tile": ("coloured tiles", "色块"),
}


def alt_text(drawn: "Figure") -> str:
    """A figure's title, then what was given as `alt` when it was made, or else what can be read off its axes.

    Only words and figures that are written in the picture, and the ends of measured curves: other coordinates may
    differ from machine to machine.
    """
    en, zh = description(drawn)
    return {"en": en, "zh": zh, "both": en if en == zh else f"{en} {zh}"}[current()]


def show_with_alt_text() -> None:
    """From now on figures are shown in notebooks as pictures with an alt text. Without IPython nothing happens."""
    try:
        from IPython import get_ipython
    except ImportError:
        return
    if shell := get_ipython():
        shell.display_formatter.ipython_display_formatter.for_type_by_name("matplotlib.figure", "Figure", show)


@dataclass(frozen=True)
class Picture:
    """A figure as it is stored in a notebook's output."""

    png: str  # base64
    en: str  # its alt text in each language; the same twice where they cannot be told apart
    zh: str


def picture_in(markup: str) -> Picture | None:
    """The figure that an output's HTML is, None for any other HTML."""
    found = re.fullmatch(r'<img lang="\w+" alt="([^"]*)" src="data:image/png;base64,([^"]*)">\s*', markup)
    return Picture(found[2], *alt_parts(html.unescape(found[1]))) if found else None


def alt_parts(words: str) -> tuple[str, str]:
    """(English, Chinese) of an alt text in both languages, as `alt_text` makes it.

    The Chinese begins behind the last English full stop before the first hanzi; it may itself begin with a number.
    """
    first = re.search("[\u3400-\u9fff]", words)
    cut = words.rfind(". ", 0, first.start()) if first else -1
    return (words[: cut + 1], words[cut + 2 :]) if cut >= 0 else (words, words)


def show(drawn: "Figure") -> None:
    """Instead of IPython's own PNG, not beside it: twice would double the notebook's size."""
    from IPython.core.pylabtools import print_figure
    from IPython.display import display

    bundle = {"text/plain": repr(drawn)}
    if png := print_figure(drawn, base64=True):  # None for a figure without axes
        language = {"both": "mul"}.get(current(), current())
        source = f"data:image/png;base64,{png}"
        bundle["text/html"] = f'<img lang="{language}" alt="{html.escape(alt_text(drawn))}" src="{source}">'
    display(bundle, raw=True)


def description(drawn: "Figure") -> tuple[str, str]:
    """(English, Chinese)."""
    given = getattr(drawn, "course_alt", None)
    if given is None:
        panels = [_panel(ax) for ax in drawn.axes]
        if shared := _shared(drawn):
            panels.append(shared)
        given = " ".join(en for en, _ in panels), "".join(zh for _, zh in panels)
    en, zh = _said(drawn.get_suptitle())
    return f"{en}. {given[0]}".strip(" .") + ".", f"{zh}。{given[1]}".strip("。") + "。"  # there may be no title


def _panel(ax: "Axes") -> tuple[str, str]:
    """One sentence: what is drawn, over which axes, with which words in it."""
    kinds = _kinds(ax)
    clauses = [(", ".join(_KINDS[kind][0] for kind in kinds), "、".join(_KINDS[kind][1] for kind in kinds))]
    if ax.axison:
        clauses += [_axis(("x axis", "横轴"), ax.xaxis), _axis(("y axis", "纵轴"), ax.yaxis)]
    legend = ax.get_legend()
    clauses.append(_labels([*(legend.get_texts() if legend else ()), *ax.texts]))
    en, zh = ([clause[side] for clause in clauses if clause[side]] for side in (0, 1))
    title = _said(ax.get_title(loc="left") or ax.get_title())
    sentence = (f"{title[0]}: " if title[0] else "") + "; ".join(en)
    return f"{sentence[:1].upper()}{sentence[1:]}.", (f"{title[1]}：" if title[1] else "") + f"{'；'.join(zh)}。"


def _kinds(ax: "Axes") -> list[str]:
    from matplotlib.collections import PatchCollection, PolyCollection

    curves = [line for line in ax.lines if line.get_linestyle() != "None" and len(line.get_xdata()) > 2]
    found = {
        "tile": ax.images,
        "bar": ax.containers,
        "box": [item for item in ax.collections if isinstance(item, PatchCollection)],
        "area": [item for item in ax.collections if isinstance(item, PolyCollection)],
        "line": curves,
        "point": [line for line in ax.lines if line.get_marker() not in ("None", None, "")],
    }
    return [kind for kind, artists in found.items() if artists]


def _axis(name: tuple[str, str], axis: Any) -> tuple[str, str]:
    en, zh = _said(axis.get_label_text())
    log = (" (log scale)", "（对数）") if axis.get_scale() == "log" else ("", "")
    return (f"{name[0]}: {en}{log[0]}", f"{name[1]}：{zh}{log[1]}") if en else ("", "")


def _shared(drawn: "Figure") -> tuple[str, str] | None:
    """Labels and legends that belong to all panels."""
    items = [text for legend in drawn.legends for text in legend.get_texts()]
    clauses = [_said(drawn.get_supxlabel()), _said(drawn.get_supylabel()), _labels(items)]
    en, zh = ([clause[side] for clause in clauses if clause[side]] for side in (0, 1))
    return (f"All panels: {'; '.join(en)}.", f"各图：{'；'.join(zh)}。") if en else None


def _labels(items: Any) -> tuple[str, str]:
    """The words among texts: numbers alone say nothing without their place."""
    found = {}  # each label once, in the order they were written
    for item in items:
        if any(character.isalpha() for character in item.get_text()):
            en, zh = (f"“{words}”" for words in _said(item.get_text()))
            if ends := getattr(item, "course_ends", None):
                en, zh = f"{en} from {ends[0]} to {ends[1]}", f"{zh}从 {ends[0]} 到 {ends[1]}"
            found[en] = zh
    return (f"labels: {', '.join(found)}", f"标注：{'、'.join(found.values())}") if found else ("", "")


def _said(words: str) -> tuple[str, str]:
    """Both languages of a label, on one line each and without the signs of math."""
    en, zh = (side.replace("$", "") for side in parts(words))
    return " ".join(en.split()), " ".join(re.sub("(?<=[\u3000-\u9fff])\n", "", zh).split())
