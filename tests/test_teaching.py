"""The language switch, figures, tables, and what exercise checks are made of."""

import html
import itertools
import linecache
import math
import os
import re
import subprocess
import sys
import unicodedata
from decimal import Decimal
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from markup import spoken_problems

from course_lib import labels, teaching
from course_lib.memory import CATEGORY_COLORS, CATEGORY_HATCHES
from course_lib.schedule import COLORS as SCHEDULE_COLORS
from course_lib.schedule import Chain, simulate
from course_lib.teaching import figures, marks, pictures
from course_lib.teaching.exercises import (
    Exercise,
    Verdict,
    WrongAnswer,
    expect_number,
    largest_that_fits,
    right,
    wrong,
)
from course_lib.teaching.switch import Switch
from course_lib.teaching.timeline import STACK

FONTS = Path(teaching.__file__).parent / "fonts"
ROOT = Path(__file__).parent.parent


pytestmark = pytest.mark.usefixtures("fresh")


def fake_meter(peak_bytes, operators=60, categories=("parameter", "activation", "temporary")):
    """What `timelines` asks of a meter, without a model: bytes rise through the forward, fall
    through the backward."""
    rise = numpy.linspace(0, 1, operators)
    slope = numpy.concatenate([rise, rise[::-1], [0.0, 0.0]])
    share = (peak_bytes - peak_bytes // 4) // (len(categories) - 1)
    series = {name: numpy.zeros(len(slope), dtype=numpy.int64) for name in STACK}
    series |= {name: (slope * share).astype(numpy.int64) for name in categories[1:]}
    series["parameter"] += peak_bytes // 4
    phases = ["forward"] * operators + ["backward"] * operators + ["optimizer"] * 2
    peak = int(sum(series.values()).max())
    return SimpleNamespace(series=lambda: series, phases=lambda: phases, peak_bytes=peak)


IDLE = SimpleNamespace(series=dict, phases=list, peak_bytes=0)


def words_in(figure) -> str:
    return "\n".join(
        item.get_text() for item in figure.findobj(lambda artist: hasattr(artist, "get_text"))
    )


# The language
# --------------------------------------------------------------------------------------------------


def test_the_environment_goes_before_the_notebooks_default(monkeypatch, capsys):
    monkeypatch.setenv("COURSE_LANG", "zh")
    assert labels.say("bytes") == "字节"
    teaching.language("en")
    assert labels.say("bytes") == "字节" and "中文 (" in capsys.readouterr().out
    monkeypatch.setenv("COURSE_LANG", "chinese")
    with pytest.raises(ValueError, match=r"COURSE_LANG must be .* got 'chinese'"):
        teaching.language()


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: teaching.language("fr"), "default must be .* got 'fr'"),
        (lambda: teaching.language("fr", only=True), "language must be .* got 'fr'"),
        (lambda: drawn_words(teaching.figure()[0], "fr"), "language must be .* got 'fr'"),
        (lambda: teaching.category_label("weights"), "name must be .* got 'weights'"),
        (teaching.timelines, "at least one meter"),
        (lambda: teaching.timelines(idle=IDLE), "'idle' recorded no operator"),
        (teaching.compare, "at least one measurement"),
        (lambda: teaching.predictions([("a", 1, 1)], unit="Mb"), "unit must be .* got 'Mb'"),
        (lambda: teaching.table(["a", "b"], [[1]]), "2 cells.* got 1"),
    ],
)
def test_what_cannot_be_shown_is_an_error_that_names_it(call, complaint):
    with pytest.raises(ValueError, match=complaint):
        call()


@pytest.mark.parametrize("chosen", ["en", "zh", "both"])
def test_the_switch_checks_the_language_in_force_and_keeps_to_its_notebook(chosen):
    markup = Switch(chosen)._repr_html_()
    assert re.findall(r'<input [^>]*value="(\w+)"[^>]* checked>', markup) == [chosen]
    # A radio group ends at its form: two open notebooks each keep their own choice.
    assert markup.count("<form") == 1 and " id=" not in markup


@pytest.mark.parametrize(
    ("arguments", "environment", "follows"),
    [((), "", True), (("en",), "", False), ((), "en", False), (("zh",), "en", False)],
)
def test_a_switch_follows_the_browser_unless_a_language_is_named(
    monkeypatch, arguments, environment, follows
):
    shown = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    monkeypatch.setenv("COURSE_LANG", environment)
    teaching.language(*arguments)
    assert ("navigator.language" in shown[0]._repr_html_()) is follows


# Figures
# --------------------------------------------------------------------------------------------------


def characters_without_glyph(words):
    """Characters that neither the course's font nor the one behind it, DejaVu Sans, can draw."""
    from fontTools.ttLib import TTFont
    from matplotlib import font_manager

    paths = [*FONTS.glob("*.otf"), Path(font_manager.findfont("DejaVu Sans"))]
    drawn = set().union(*(TTFont(path).getBestCmap() for path in paths))
    return {character for character in words if ord(character) not in drawn and character != "\n"}


SIGNS = "× ÷ ± ≤ ≥ ≈ √ Σ θ λ μ · … – — “ ” ‘ ’ → ← ↑ ↓ ∞ ✓ − ，。、；：？！（）《》「」"


def test_whatever_a_figure_may_say_is_in_the_fonts_in_both_languages():
    codes = itertools.product(range(0xB0, 0xF8), range(0xA1, 0xFF))
    hanzi = "".join(bytes(code).decode("gb2312", "ignore") for code in codes)
    assert len(hanzi) == 6763
    catalog = labels.catalog()
    assert characters_without_glyph("".join((SIGNS, hanzi, *catalog, *catalog.values()))) == set()
    assert characters_without_glyph("a \U00020bb7") == {"\U00020bb7"}  # a hanzi outside GB2312


def test_the_bundled_font_is_renamed_and_carries_its_licence():
    from fontTools.ttLib import TTFont

    (file,) = FONTS.glob("*.otf")
    names = TTFont(file)["name"]
    assert names.getDebugName(1) == figures.FONT
    assert "noto" not in f"{names.getDebugName(4)} {names.getDebugName(6)}".lower()
    assert "SIL Open Font License" in names.getDebugName(13)
    assert "Copyright 2014-2021 Adobe" in (FONTS / "OFL.txt").read_text(encoding="utf-8")


def test_the_cjk_font_is_first_curves_differ_in_style_and_what_the_reader_changes_stays():
    import matplotlib

    _, axes = teaching.figure()
    curves = [axes.plot([0, 1, 2], color="#228833")[0] for _ in range(4)]
    assert len({curve.get_linestyle() for curve in curves}) == 4
    assert axes.set_title("以后").get_fontfamily() == [figures.FONT, "DejaVu Sans"]
    matplotlib.rcParams["font.size"] = 17.0
    teaching.figure()
    assert matplotlib.rcParams["font.size"] == 17.0


# Of linear RGB, severity 1: Machado, Oliveira and Fernandes, "A physiologically-based model for
# simulation of color vision deficiency", 2009, table 1.
VISION = {
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}


def lab(linear):
    """CIE L*a*b* (D65) of linear sRGB."""
    to_xyz = [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.0721750],
        [0.0193339, 0.1191920, 0.9503041],
    ]
    xyz = numpy.array(to_xyz) @ numpy.clip(linear, 0, 1) / [0.95047, 1, 1.08883]
    x, y, z = numpy.where(xyz > 216 / 24389, numpy.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return numpy.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def differences(one, other):
    """(smallest difference over the kinds of colour blindness, difference in grey), CIE 1976."""
    from matplotlib.colors import to_rgb

    coded = numpy.array([to_rgb(one), to_rgb(other)])
    pair = numpy.where(coded <= 0.04045, coded / 12.92, ((coded + 0.055) / 1.055) ** 2.4)
    seen = (
        numpy.linalg.norm(lab(matrix @ pair[0]) - lab(matrix @ pair[1]))
        for matrix in map(numpy.array, VISION.values())
    )
    return min(seen), abs(lab(pair[0])[0] - lab(pair[1])[0])


def confusable(colors, hatches):
    """Pairs that look alike: closer than 12 to somebody, or closer than 10 in grey and hatched
    alike."""
    return [
        (one, other)
        for one, other in itertools.combinations(colors, 2)
        for colored, grey in [differences(colors[one], colors[other])]
        if colored < 12 or (grey < 10 and hatches.get(one) == hatches.get(other))
    ]


def test_the_colours_are_told_apart_without_colour_vision_and_in_grey():
    assert confusable(CATEGORY_COLORS, CATEGORY_HATCHES) == []
    assert confusable(SCHEDULE_COLORS, {}) == []
    assert {name: CATEGORY_HATCHES.get(name) for name in CATEGORY_COLORS} == figures.HATCHES
    assert len(set(teaching.COLORS.values())) == len(teaching.COLORS) == len(CATEGORY_COLORS) + 2
    # green and orange are equal without red cones, blue and green in grey
    assert confusable({"a": "#228833", "b": "#EE7733"}, {"a": "//"})
    assert confusable({"a": "#4477AA", "b": "#228833"}, {})


# Marks
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("upright", [True, False])
def test_stacked_bars_add_up_to_the_bytes_of_the_shown_categories(upright):
    bars = {2: {"parameter": 3_000_000, "input": 9_000_000}, 5: {"activation": 500_000}}
    _, ax = teaching.figure()
    ends = marks.stacked_bars(ax, bars, ["activation", "parameter"], 0.5, upright=upright)
    assert ends == [3.0, 0.5]
    boxes = [bar.get_bbox().bounds for bar in ax.patches]  # left, bottom, width, height
    if upright:
        boxes = [(y, x, height, width) for x, y, width, height in boxes]
    assert boxes == [(0, 1.75, 0, 0.5), (0, 4.75, 0.5, 0.5), (0, 1.75, 3, 0.5), (0.5, 4.75, 0, 0.5)]
    assert ax.get_legend_handles_labels()[1] == ["activation", "parameter"]


def test_marks_are_drawn_at_their_places_in_both_languages():
    rows = [{"words": "device", "first": n, "last": 2 * n} for n in (1, 3)]
    alt = marks.clauses("{words} from {first} to {last}", rows)
    drawn, ax = teaching.figure("vs first", alt=alt)
    marks.label_axes(ax, "bytes", "peak (MB)", ticks=[1, 16], ylim=(0, 2))
    marks.note(ax, "device", (1, 1), (-4, 2))
    marks.write(ax, 16, 0.5, "gradient")
    marks.points(ax, {1: 2e6, 16: 1e6}, "s--", unit=1e6)
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_ylim()) == ("bytes", "peak (MB)", (0, 2))
    assert ax.lines[0].get_xydata().tolist() == [[1, 2], [16, 1]]
    assert [(each.xy, each.xyann) for each in ax.texts[:1]] == [((1, 1), (-4, 2))]
    assert ax.texts[1].get_position() == (16, 0.5)
    assert {"字节", "峰值（MB）", "设备", "梯度", "1", "16"} <= set(drawn_words(drawn, "zh"))
    assert pictures.description(drawn)[1] == "首行的倍数。设备从 1 到 2；设备从 3 到 6。"


# Figures in words
# --------------------------------------------------------------------------------------------------


def sample(title="vs first", **options):
    drawn, axes = teaching.figure(title, **options)
    axes.set_xlabel(teaching.text("predicted ({unit})", unit="$L$"))
    axes.set(ylabel=f"{teaching.text('bytes')} (MB)", yscale="log")
    teaching.predicted_and_measured(axes, [1, 2, 3], [1, 2, 3], [1, 2, 3], "device")
    axes.text(1, 1, "3.14")
    return drawn


ENGLISH = "vs first. Lines, data points; x axis: predicted (L); y axis: bytes (MB) (log scale);"
ENGLISH += " labels: “device” from 1 to 3."
CHINESE = "首行的倍数。曲线、数据点；横轴：预测（L）；纵轴：字节 (MB)（对数）；"
CHINESE += "标注：“设备”从 1 到 3。"


def test_a_figure_says_its_message_and_its_axes_or_the_words_given_for_it():
    assert pictures.description(sample()) == (ENGLISH, CHINESE)
    assert pictures.description(sample(alt="Right.")) == ("vs first. Right.", "首行的倍数。正确。")


def drawn_words(drawn, language):
    """What a figure says that is drawn in a language, ticks included."""
    with pictures.drawn_in(drawn, language):
        drawn.draw_without_rendering()
        return [words for words in words_in(drawn).splitlines() if words]


def test_a_figure_is_drawn_in_each_language_with_its_legend_and_its_ticks_and_is_english_again():
    drawn, axes = teaching.figure("vs first")
    axes.bar(["activation", "gradient"], [1, 2], label="peak (MB)")
    axes.legend(title="measured")
    before, chinese = drawn_words(drawn, "en"), drawn_words(drawn, "zh")
    assert {"vs first", "activation", "gradient", "peak (MB)", "measured"} <= set(before)
    assert {"首行的倍数", "激活值", "梯度", "峰值（MB）", "实测"} <= set(chinese)
    assert [words for words in chinese if labels.is_english(words)] == []
    ticks = [words for words in before if words[0].isdigit()]
    assert [words for words in chinese if words[0].isdigit()] == ticks
    assert drawn_words(drawn, "en") == before


def test_a_figure_is_shown_as_a_picture_a_language_whose_words_can_be_read_again(monkeypatch):
    from matplotlib.figure import Figure

    shown = []
    show = "IPython.display.display"
    monkeypatch.setattr(show, lambda bundle, **more: shown.append({**bundle, **more}))
    monkeypatch.setenv(pictures.FOR_SLIDES, "1")
    pictures.show(sample('<b> & "b"', alt="Right."))
    pictures.show(Figure())  # nothing to see: as IPython does it
    monkeypatch.delenv(pictures.FOR_SLIDES)
    pictures.show(sample('<b> & "b"', alt="Right."))
    without_slides = shown.pop()
    assert without_slides == {**shown[0], "metadata": {}}
    kinds = [set(bundle) - {"raw"} for bundle in shown]
    assert kinds == [{"text/html", "text/plain", "metadata"}, {"text/plain"}]
    markup, slides = shown[0]["text/html"], shown[0]["metadata"]["slides"]
    assert spoken_problems(markup) == []
    found = pictures.pictures_in(markup)
    assert (found["en"].alt, found["zh"].alt) == ('<b> & "b". Right.', '<b> & "b"。正确。')
    # four different pictures
    assert len({found["en"].png, found["zh"].png, slides["en"], slides["zh"]}) == 4
    assert pictures.pictures_in(f"<p>{markup}</p>") == {} and slides["en"] not in markup


def test_a_figure_for_slides_has_larger_letters_on_a_slides_sheet_and_is_as_before_afterwards():
    def state():
        return (drawn.get_suptitle(), *drawn.get_size_inches())

    drawn, _ = figures.figure("A long title that tells what is seen " * 3, rows=2, height=5.6)
    before = state()
    # pixels an inch of the page's picture
    blown_up = min(pictures.SLIDE[0] / before[1], pictures.SLIDE[1] / before[2])
    with pytest.raises(RuntimeError), pictures.enlarge(drawn):
        _, width, height = state()
        assert 1.1 < pictures.SLIDE[0] / width / blown_up <= pictures.LARGER + 1e-9
        assert width / height == pytest.approx(pictures.SLIDE[0] / pictures.SLIDE[1])
        assert drawn._suptitle.get_window_extent().width <= width * drawn.dpi
        raise RuntimeError
    assert state() == before
    drawn.course_larger = 1.0
    with pictures.enlarge(drawn):
        assert pictures.SLIDE[0] / state()[1] == pytest.approx(blown_up)


def test_timelines_share_one_scale_and_say_every_peak_with_what_it_holds():
    held = ("parameter", "optimizer", "activation")
    meters = {"plain": fake_meter(200_000_000, categories=held)}
    meters["checkpointed"] = fake_meter(80_000_000, operators=90)
    drawn = teaching.timelines(meters, title="Half")
    first, second = drawn.axes
    assert first.get_ylim() == second.get_ylim() and first.get_xlim() == second.get_xlim()
    for panel, meter in zip(drawn.axes, meters.values(), strict=True):
        (marker,) = [line.get_ydata() for line in panel.lines if line.get_marker() == "o"]
        layers = [area.get_paths()[0].vertices for area in panel.collections if area.get_paths()]
        tops = [*marker, max(layer[:, 1].max() for layer in layers)]
        assert tops == pytest.approx([meter.peak_bytes / 1e6] * 2)
    assert {area.get_hatch() for area in first.collections} == {"////", "xxxx", None}
    named = ["(−60%)", "80.0 MB", "plain", "forward"]
    named += map(teaching.category_label, (*held, "temporary"))
    assert [each for each in named if each not in words_in(drawn)] == []
    assert teaching.category_label("gradient") not in words_in(drawn)
    en, zh = pictures.description(drawn)
    assert "80.0 MB in the forward phase, of it temporary 30.0 MB, activation 30.0 MB" in en
    assert "80.0 MB，出现在前向阶段，其中临时张量 30.0 MB、激活值 30.0 MB" in zh


def test_updates_within_backward_are_no_stripes_and_equal_peaks_no_change_of_a_timeline():
    from matplotlib.patches import Rectangle

    meter = fake_meter(200_000_000)
    # each parameter's update, right after its gradient
    meter.phases()[70:110:2] = ["optimizer"] * 20
    drawn = teaching.timelines(plain=meter, again=meter)
    assert words_in(drawn).count("peak 200.0 MB") == 2 and "%" not in words_in(drawn)
    bands = [
        (patch.get_x(), patch.get_width())
        for patch in drawn.axes[0].patches
        if isinstance(patch, Rectangle) and patch.get_y() == 1
    ]
    assert bands == [(0, 60), (60, 60), (120, 2)]


# Tables
# --------------------------------------------------------------------------------------------------


def measurement(peak_bytes, flops, seconds):
    fields = {"peak_bytes": peak_bytes, "flops": flops, "seconds": seconds, "device": "cpu"}
    return SimpleNamespace(**fields, allocator_peak_bytes=None, workspace_bytes=7)


def test_compare_gives_each_measurement_against_the_first_and_seconds_if_they_are_asked_for():
    arms = {"plain": measurement(200_000_000, 10**9, 0.5)}
    arms["half"] = measurement(100_000_000, 2 * 10**9, 9.0)
    compared = teaching.compare(arms)
    columns = compared.data[["peak (MB)", "vs first", "FLOPs vs first"]]
    assert columns.values.T.tolist() == [[200.0, 100.0], [1.0, 0.5], [1.0, 2.0]]
    assert "0.500×" in compared._repr_html_() and "基线" in compared._repr_html_()
    everything = teaching.compare(arms, seconds=True, workspace=True).data
    assert everything["seconds"].tolist() == [0.5, 9.0]
    assert {"seconds", "device"} <= {*everything.columns} - {*compared.data.columns}


def test_predictions_give_the_error_in_per_cent_of_the_measured():
    shown = teaching.predictions([("a", 99_000_000, 100_000_000), ("b", 7, 7), ("c", 5, None)])
    errors = shown.data["error (%)"].tolist()
    assert errors == [-1.0, 0.0, None]
    assert "−1.00" in repr(shown) and "–" in repr(shown)
    exact = repr(teaching.predictions([("a", 84_000_000_000, 84_000_000_001)], unit="bytes"))
    assert "84,000,000,000" in exact and "84,000,000,001" in exact
    assert "−0.000000001" in exact, "what is not equal never shows as 0"
    scaled = teaching.predictions([("a", 30, 20)], unit="b", scale=10)
    assert scaled.data["predicted (b)"].tolist() == [3.0]


@pytest.mark.parametrize(
    "guess", [300e6, "300 MB", "300MB", "300e6", "300,000,000", torch.tensor(300_000_000)]
)
def test_a_guess_may_have_its_unit_written_beside_it(guess):
    assert teaching.predictions([("peak", guess, 2e8)]).data["predicted (MB)"].tolist() == [300.0]


@pytest.mark.parametrize("guess", ["many", "300 mb", "", ["300"], True])
def test_a_guess_that_is_no_number_is_told_what_one_looks_like(guess):
    with pytest.raises(ValueError, match='such as 300e6 or "300 MB"'):
        teaching.predictions([("peak", guess, 2e8)])


def test_tables_escape_what_they_are_given():
    evil = '<script>alert("1")</script>'
    shown = teaching.table([evil, "b"], [[evil, teaching.text("Right. {why}", why=evil)]])
    markup = shown._repr_html_() + Verdict(False, evil, evil)._repr_html_()
    assert "<script" not in markup and markup.count(html.escape(evil)) > 4


def test_numbers_of_a_column_stand_at_the_right_with_as_many_decimals_each():
    rows = [[1, 0.4, 2e-7, "0.50", "00"], [1024, 12, 3, "–", "602 → 623 MB, 1.33 ×, 3 Bs"]]
    markup = teaching.table(["a", "b", "c", "d", "e"], rows)._repr_html_()
    cells = re.findall(r"text-align: (right|left)[^>]*>([^<]*)</div></td>", markup)
    # a unit stays on the line of its number
    words = ["1,024", "12.0", "3", "–", "602 → 623\u00a0MB, 1.33\u00a0×, 3 Bs"]
    assert [text for _, text in cells] == ["1", "0.4", "2e-07", "0.50", "00", *words]
    assert [side for side, _ in cells] == [*["right"] * 4, "left"] * 2


def test_the_plain_text_of_a_table_lines_up_although_hanzi_are_wide():
    def columns(line):
        return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in line)

    teaching.language("both")
    lines = repr(teaching.table(["measured", "n"], [["parameter", 10_000], ["x", 2]])).splitlines()
    assert len(set(map(columns, lines))) == 1
    assert lines[1].split() == ["parameter", "参数", "10,000"] and labels.say("MB") == "MB"


# Exercises
# --------------------------------------------------------------------------------------------------


class Hostile:
    """Fails at whatever is asked of it."""

    def __getattr__(self, name):
        raise RuntimeError(name)

    __eq__ = __float__ = __repr__ = __bool__ = __len__ = __hash__ = __call__ = lambda *_: 1 / 0


@pytest.mark.parametrize(
    "answer",
    [
        *(torch.ones(3), torch.empty(1, device="meta"), torch, "84", b"84", True, 1j, Hostile()),
        *(Hostile, numpy.zeros((2, 2)), numpy.array(["x"]), numpy.float32("nan"), Decimal("nan")),
    ],
    ids=lambda answer: type(answer).__name__,
)
def test_what_is_no_number_is_told_so(answer):
    assert "Expected one number" in expect_number(answer, 1).message


def test_the_tolerance_is_relative_and_without_one_only_the_exact_number_is_right():
    assert expect_number(101, 100, tolerance=0.01) and not expect_number(101.1, 100, tolerance=0.01)
    assert expect_number(10**20, 10**20) and not expect_number(10**20 + 1, 10**20)
    assert not expect_number(10**5000, 1) and not expect_number(-math.inf, 1)


def test_a_wrong_number_is_told_why_and_the_right_one_too():
    asked = {"wrong_answers": {12: "Twelve."}, "why": "Seven times twelve."}
    assert [expect_number(answer, 84, **asked).message for answer in (84, 12, 1, 99, None)] == [
        "Right. Seven times twelve.",
        "Not yet. Twelve.",
        "Not yet. The number is too small.",
        "Not yet. The number is too large.",
        "Not answered yet.",
    ]
    exact = [expect_number(answer, 84, **asked).exact for answer in (12, 1, None)]
    assert exact == [True, False, True], "which mistake it was is known of twelve alone"


def asked_for(hint, raised="It raised {error}."):
    """An exercise that knows what to say of the numbers 1 to 3; what else it is given, it calls."""

    def check(answer):
        """What is checked."""
        if answer == 3:
            raise WrongAnswer("no", hint="closer")
        known = {1: right("yes"), 2: wrong("no")}.get(answer)
        return answer() if known is None else known

    hints = (hint,) if isinstance(hint, str) else hint
    return Exercise(check, hints, lambda error: labels.text(raised, error=error))


def test_hints_come_in_two_steps_and_none_before_a_first_attempt():
    check = asked_for(("first", "second"))
    tried = [check(answer) for answer in (None, 2, ..., 2, 2, 1)]
    assert [verdict.hint for verdict in tried] == [None, "first", None, "second", "second", None]
    assert tried[0].message == tried[2].message == "Not answered yet." and check.tries == 3
    assert [asked_for("only")(2).hint for _ in range(2)] == ["only", "only"]
    assert check.__doc__ == "What is checked."


def test_what_names_the_mistake_needs_no_hint_and_a_hint_of_its_own_goes_before():
    check = asked_for(("first", "second"))
    named = check(lambda: expect_number(12, 84, wrong_answers={12: "Twelve."}))
    assert (named.message, named.hint) == ("Not yet. Twelve.", None)
    assert check(3).hint == "closer"
    assert check(2).hint == "first", "neither was a hint of the exercise's"


def test_an_exercise_knows_whether_the_last_answer_was_right():
    check, known = asked_for("hint"), []
    for answer in (None, 2, 1, None, 1, 5):
        check(answer)
        known.append(check.accepted)
    assert known == [False, False, True, False, True, False] and not asked_for("hint").accepted


def test_a_stub_that_raises_is_not_answered_yet():
    def stub():
        raise NotImplementedError

    verdict = asked_for("hint")(stub)
    assert (verdict.message, verdict.hint) == ("Not answered yet.", None)


def cell(source):
    """Names that a notebook's cell makes: it runs as `__main__`, and linecache has its text."""
    name, names = f"cell-{abs(hash(source))}", {"__name__": "__main__", "torch": torch}
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), names)
    return names


THROUGH_BACKWARD = """
class Mine(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 2

    @staticmethod
    def backward(context, gradient):
        return gradient @ gradient

def answer():
    Mine.apply(torch.ones(3, 2, requires_grad=True)).sum().backward()
"""


@pytest.mark.parametrize(
    ("source", "said", "hint"),
    [
        (
            "def answer():\n    x = [1]\n    return x[3]  # no",
            "3, `return x[3]  # no`: IndexErr",
            1,
        ),
        ("def inner():\n    torch.ones(2) @ 1\n\ndef answer():\n    inner()", "2, `torch", 1),
        ("answer = lambda: 1 / 0", "1, `answer = lambda: 1 / 0`: ZeroDivisionError", 1),
        (THROUGH_BACKWARD, "9, `return gradient @ gradient`: RuntimeError", 1),
        ("def answer():\n    raise NotImplementedError('x')", "2, `raise NotImplemented", 1),
        ("def answer():\n    return kepp", "2, `return kepp`: NameError: name 'kepp'", 0),
        ("def answer(x):\n    return x", "1, `def answer(x):`: TypeError: answer() missing 1", 0),
        ("def answer():\n    return answer(1)", "2, `return answer(1)`: TypeError", 0),
        ("def answer():\n    return 1 + 'a'", "2, `return 1 + 'a'`: TypeError", 1),
    ],
)
def test_an_exception_shows_the_readers_own_line_and_a_typing_slip_no_hint(
    source, said, hint, monkeypatch
):
    monkeypatch.setenv("COURSE_LABELS", "strict")
    verdict = asked_for("`hint`")(cell(source)["answer"])
    assert not verdict and verdict.hint == ("`hint`" if hint else None)
    line, _, rest = said.partition(", ")
    assert verdict.message.startswith(f"Line {line} of your cell, {rest}")
    assert labels.chinese(verdict.message).startswith("你的单元格第 ")
    assert spoken_problems(verdict._repr_html_()) == []


NOTEBOOK = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in (
    "import torch\\nfrom course_lib.lessons.lesson_02 import exercises",
    "def mine(block, x):\\n    y = block(x)\\n    return y @ y",
    "def mine_too(block, x):\\n    return blok(x)",
    "print(exercises.check_checkpoint(mine), exercises.check_checkpoint(mine_too), sep='|')",
):
    shell.run_cell(cell)
"""


def test_a_cell_of_a_notebook_is_where_the_readers_lines_stand():
    pytest.importorskip("IPython")
    first, second = run_without("", NOTEBOOK).split("|")
    assert first.startswith("✗ Line 3 of your cell, `return y @ y`: RuntimeError: ")
    assert second.startswith("✗ Line 2 of your cell, `return blok(x)`: NameError: ")
    assert "Hint: " in first and "Hint: " not in second


def test_where_no_line_of_the_readers_ran_the_exception_is_said_in_the_exercises_words():
    check = asked_for("try", raised="Broken: {error}")
    assert check(5).message == "Expected a function, got a `int`."
    assert check(partial(int, "")).message.startswith("Broken: ValueError(")
    assert check(lambda: [Hostile()].index(Hostile)).hint == "try"

    def unsayable():
        raise ValueError(Hostile())

    assert check(unsayable).message == "Broken: ValueError", "what cannot be shown is named"


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda: Chain.uniform(0), None),
        (lambda: simulate([3], Chain.uniform(3)), None),
        (lambda: simulate(None, Chain.uniform(3)), "try"),
        (lambda: int("x"), "try"),
    ],
    ids=[
        "ValueError of the library",
        "TypeError of the library",
        "an expression of the library",
        "Python",
    ],
)
def test_error_that_the_library_raises_gets_no_hint(answer, hint):
    verdict = asked_for("try", raised="Broken: {error}")(answer)
    assert verdict.message.startswith("Broken: ") and verdict.hint == hint


def test_the_largest_size_that_fits_may_fill_the_budget_and_be_the_last():
    for size, above in ((4, 80), (8, None)):
        found = largest_that_fits(size, [2, 4, 8], lambda n: 10 * n, 10 * size, "not a size")
        assert found == (size, 10 * size, above)


def test_an_answer_that_is_not_a_size_gets_no_hint():
    def found(answer):
        return right(f"{largest_that_fits(answer, [2, 4, 8], lambda n: n, 4, 'Give a size.')}")

    check = Exercise(found, ("The hint.",), str)
    assert check(4) and check(2).hint == "The hint."
    verdict = check(3)
    assert verdict.message == "Give a size." and verdict.hint is None


# Without the notebook's packages
# --------------------------------------------------------------------------------------


def run_without(blocked, program):
    block = f"import sys\nfor name in {blocked!r}.split(): sys.modules[name] = None\n"
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", block + program]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_everything_but_figures_falls_back_to_plain_text_without_the_notebooks_packages():
    said = run_without(
        "IPython pandas ipywidgets matplotlib",
        "from course_lib.teaching import *\n"
        "language('zh')\n"
        "print(predictions([('parameter', 5, 4)], unit='bytes'))\n"
        "print(expect_number(None, 1))\n"
        "playground(None, None)\n"
        "assert predictions([])._repr_html_() is None\n",
    ).splitlines()
    assert said[0].startswith("Language 语言: 中文")
    assert said[1].split("\t") == ["", "预测（字节）", "实测（字节）", "误差（%）"]
    assert said[2].split("\t") == ["参数", "5", "4", "+25.00"]
    assert said[3:] == ["✗ 还没有作答。", "滑块需要在 JupyterLab 中使用。"]
