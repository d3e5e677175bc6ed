"""Alt texts of figures, which a screen reader reads aloud instead of showing the picture."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from course_lib.labels import in_both_languages, join_labels, text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_KINDS = {
    "area": "stacked areas",
    "bar": "bars",
    "box": "boxes",
    "line": "lines",
    "point": "data points",
    "tile": "coloured tiles",
}


def alt_text(drawn: "Figure", language: str) -> str:
    """Return the alt text of a figure: its title, followed by a description.

    If the argument `alt` was passed to `figure`, it is the description. Otherwise the description
    lists the figure's texts, and the first and the last value of measured curves. Other values are
    not listed, because they may differ between machines.

    Args:
        drawn: The figure, whose texts must already be in `language`.
        language: "en" or "zh".
    """
    if (own_alt := getattr(drawn, "course_alt", None)) is not None:
        description = in_language(own_alt, language)
    else:
        sentences = [*(_panel(ax, language) for ax in drawn.axes), *_shared_labels(drawn, language)]
        description = (" " if language == "en" else "").join(sentences)
    title = _plain(drawn.get_suptitle())
    return (
        in_language(text("{title}. {description}", title=title, description=description), language)
        if title
        else description
    )


def in_language(words: str, language: str) -> str:
    """Return a label (text with a Chinese translation) as plain text in a given language.

    Args:
        words: The label. An ordinary string is translated if its translation is known.
        language: "en" or "zh".

    Returns:
        The English or the Chinese text. If there is no Chinese translation, the English text.
    """
    return str(words) if language == "en" else in_both_languages(words)[1]


def _panel(ax: "Axes", language: str) -> str:
    """Return a sentence on a panel: its kinds of drawing (such as lines), axes and labels."""
    clauses = [join_labels(_KINDS[kind] for kind in _kinds(ax))]
    if ax.axison:
        clauses += [_axis("x axis: {label}", ax.xaxis), _axis("y axis: {label}", ax.yaxis)]
    legend = ax.get_legend()
    clauses.append(_list_texts([*(legend.get_texts() if legend else ()), *ax.texts]))
    description = join_labels(filter(None, clauses), "; ")
    if title := _plain(ax.get_title(loc="left") or ax.get_title()):
        description = text("{title}: {description}", title=title, description=description)
    sentence = in_language(text("{description}.", description=description), language)
    return sentence[:1].upper() + sentence[1:]


def _kinds(ax: "Axes") -> list[str]:
    from matplotlib.collections import PatchCollection, PolyCollection

    curves = [
        line for line in ax.lines if line.get_linestyle() != "None" and len(line.get_xdata()) > 2
    ]
    artists_of = {
        "tile": ax.images,
        "bar": ax.containers,
        "box": [item for item in ax.collections if isinstance(item, PatchCollection)],
        "area": [item for item in ax.collections if isinstance(item, PolyCollection)],
        "line": curves,
        "point": [line for line in ax.lines if line.get_marker() not in ("None", None, "")],
    }
    return [kind for kind, artists in artists_of.items() if artists]


def _axis(template: str, axis: Any) -> str:
    label = _plain(axis.get_label_text())
    if label and axis.get_scale() == "log":
        label = text("{label} (log scale)", label=label)
    return text(template, label=label) if label else ""


def _shared_labels(drawn: "Figure", language: str) -> list[str]:
    """Return a sentence with the labels and legends that belong to all panels.

    The result is a list with one sentence, or an empty list if there are no labels.
    """
    items = [item for legend in drawn.legends for item in legend.get_texts()]
    clauses = [_plain(drawn.get_supxlabel()), _plain(drawn.get_supylabel()), _list_texts(items)]
    description = join_labels(filter(None, clauses), "; ")
    return (
        [in_language(text("All panels: {description}.", description=description), language)]
        if description
        else []
    )


def _list_texts(items: Iterable[Any]) -> str:
    """Return a list of the texts that contain letters, as one label.

    Each text is listed once, in the order in which the texts were written. Numbers are left out,
    because they mean nothing without their position.
    """
    labels: dict[str, None] = {}
    for item in items:
        if any(character.isalpha() for character in item.get_text()):
            words = f"“{_plain(item.get_text())}”"
            if ends := getattr(item, "course_ends", None):
                words = text(
                    "{words} from {first} to {last}", words=words, first=ends[0], last=ends[1]
                )
            labels[words] = None
    return text("labels: {labels}", labels=join_labels(labels)) if labels else ""


def _plain(words: str) -> str:
    """Return text on one line without `$`. Chinese lines are joined without a space."""
    lines = [line.strip() for line in words.replace("$", "").splitlines()]
    return "".join(
        line if not i or "\u3000" <= lines[i - 1][-1:] <= "\u9fff" else f" {line}"
        for i, line in enumerate(lines)
    )
