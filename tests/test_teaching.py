"""The language switch, figures, tables, and what exercise checks are made of."""

import importlib.util
import itertools
import linecache
import os
import re
import subprocess
import sys
import warnings
from fractions import Fraction
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from markup import spoken_problems
from properties import HealthCheck, given, settings, st

from course_lib import labels, teaching
from course_lib.memory import CATEGORY_COLORS, CATEGORY_HATCHES, MemoryMeter, saved_tensors
from course_lib.schedule import COLORS as SCHEDULE_COLORS
from course_lib.teaching import figures, pictures
from course_lib.teaching.exercises import (
    Verdict,
    WrongAnswer,
    exercise,
    expect_number,
    in_words,
    largest_that_fits,
    right,
    wrong,
)
from course_lib.teaching.switch import Switch
from course_lib.teaching.timeline import STACK

FONTS = Path(teaching.__file__).parent / "fonts"
ROOT = Path(__file__).parent.parent


pytestmark = pytest.mark.usefixtures("fresh")


class FakeMeter:
    """What `timelines` asks of a meter, without a model: bytes rise through the forward, fall
    through the backward."""

    def __init__(
        self,
        peak_bytes: int,
        operators: int = 60,
        categories=("parameter", "activation", "temporary"),
    ):
        slope = numpy.concatenate(
            [numpy.linspace(0, 1, operators), numpy.linspace(1, 0, operators), [0.0, 0.0]]
        )
        constant = peak_bytes // 4
        self._series = {name: numpy.zeros(len(slope), dtype=numpy.int64) for name in STACK}
        self._series["parameter"][:] = constant
        share = (peak_bytes - constant) // (len(categories) - 1)
        for name in categories[1:]:
            self._series[name] = (slope * share).astype(numpy.int64)
        self._phases = ["forward"] * operators + ["backward"] * operators + ["optimizer"] * 2
        self.peak_bytes = int(sum(self._series.values()).max())

    def series(self):
        return self._series

    def phases(self):
        return self._phases


def hanzi() -> str:
    """All of GB2312: the build script's own list, checked against a few characters from either end
    of both levels."""
    specification = importlib.util.spec_from_file_location("build", FONTS / "build.py")
    build = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(build)
    found = build.hanzi()
    assert len(set(found)) == 6763 and set("啊座亍齄存激活值显") <= set(found)
    return found


def words_in(figure) -> str:
    return "\n".join(
        item.get_text() for item in figure.findobj(lambda artist: hasattr(artist, "get_text"))
    )


# The language
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "expected"), [("en", "bytes"), ("zh", "字节"), ("both", "bytes 字节")]
)
def test_plain_text_speaks_the_language_that_was_chosen_and_english_until_then(chosen, expected):
    assert labels.say("bytes") == "bytes"
    teaching.language(chosen)
    assert labels.say("bytes") == expected and labels.say("MB") == "MB"


def test_the_environment_goes_before_the_notebooks_default(monkeypatch, capsys):
    monkeypatch.setenv("COURSE_LANG", "zh")
    assert labels.say("bytes") == "字节"
    teaching.language("en")
    assert labels.say("bytes") == "字节" and "中文 (" in capsys.readouterr().out


def test_an_unknown_language_is_an_error_that_names_the_three(monkeypatch):
    with pytest.raises(ValueError, match='default must be "en", "zh" or "both", got \'fr\''):
        teaching.language("fr")
    monkeypatch.setenv("COURSE_LANG", "chinese")
    for call in (teaching.language, lambda: labels.say("a")):
        with pytest.raises(ValueError, match=r"COURSE_LANG must be .*, got 'chinese'"):
            call()


@pytest.mark.parametrize("chosen", ["en", "zh", "both"])
def test_the_switch_checks_the_language_in_force_and_keeps_to_its_notebook(chosen):
    markup = Switch(chosen)._repr_html_()
    (checked,) = re.findall(r'<input [^>]*value="(\w+)"[^>]* checked>', markup)
    assert checked == chosen and spoken_problems(markup) == []
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


def test_no_glyph_is_missing_in_a_label_of_every_hanzi_with_math(tmp_path):
    characters = hanzi()
    signs = "× ÷ ± ≤ ≥ ≈ √ Σ θ λ μ · … – — “ ” ‘ ’ → ← ↑ ↓ ⌊ ⌋ ∘ ∞ ✓ ✗ −"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawn, axes = teaching.figure(f"{signs} ，。、；：？！（）《》「」")
        drawn.set_layout_engine("none")  # the lines below are far longer than the figure is wide
        for start in range(0, len(characters), 100):
            # With math in the string matplotlib takes another path, and every other character from
            # one font only.
            axes.text(
                0,
                start / 7000,
                rf"{characters[start : start + 100]} $\sqrt{{L}} \leq \lfloor k \rfloor \theta$",
            )
            axes.text(0, start / 7000, characters[start : start + 100])
        # those: DejaVu, or in math
        axes.set_xlabel("".join(sign for sign in signs if sign not in "⌊⌋∘✗") + " $x^2$")
        axes.plot([-1, 1])
        drawn.savefig(tmp_path / "figure.png")


def characters_without_glyph(words: str) -> set[str]:
    """Those of the characters that neither the course's font nor the one behind it, DejaVu Sans,
    can draw."""
    from fontTools.ttLib import TTFont
    from matplotlib import font_manager

    paths = [*FONTS.glob("*.otf"), Path(font_manager.findfont("DejaVu Sans"))]
    drawn = set().union(*(TTFont(path).getBestCmap() for path in paths))
    return {character for character in words if ord(character) not in drawn and character != "\n"}


def test_whatever_a_figure_may_say_is_in_the_fonts_in_both_languages():
    catalog = labels.catalog()
    assert characters_without_glyph("".join((*catalog, *catalog.values()))) == set()
    assert characters_without_glyph("a \U00020bb7") == {"\U00020bb7"}  # a hanzi outside GB2312


def test_the_missing_glyph_test_can_fail(tmp_path):
    with pytest.warns(UserWarning, match="Glyph .* missing"):
        drawn, axes = teaching.figure()
        axes.set_xlabel("\U00020bb7")  # a hanzi outside GB2312
        drawn.savefig(tmp_path / "figure.png")


def test_the_bundled_font_is_renamed_and_carries_its_licence():
    from fontTools.ttLib import TTFont

    files = sorted(FONTS.glob("*.otf"))
    assert files and sum(file.stat().st_size for file in files) < 3_000_000
    for file in files:
        font = TTFont(file)
        for identifier in (1, 4, 6):
            assert "noto" not in font["name"].getDebugName(identifier).lower()
        assert font["name"].getDebugName(1) == figures.FONT
        assert font["CFF "].cff.fontNames == ["CourseSansSC-Regular"]
        assert "SIL Open Font License" in font["name"].getDebugName(13)
    licence = (FONTS / "OFL.txt").read_text(encoding="utf-8")
    assert "SIL OPEN FONT LICENSE Version 1.1" in licence and "Copyright 2014-2021 Adobe" in licence


def test_the_cjk_font_stands_before_dejavu_and_labels_set_later_use_it():
    import matplotlib

    _, axes = teaching.figure()
    assert matplotlib.rcParams["font.family"] == [figures.FONT, "DejaVu Sans"]
    assert axes.set_title("以后").get_fontfamily() == [figures.FONT, "DejaVu Sans"]


def test_what_the_reader_changes_after_the_first_figure_stays():
    import matplotlib

    teaching.figure()
    matplotlib.rcParams["font.size"] = 17.0
    teaching.figure()
    assert matplotlib.rcParams["font.size"] == 17.0


# Of linear RGB, severity 1: Machado, Oliveira and Fernandes, "A physiologically-based model for
# simulation of color vision deficiency", 2009, table 1.
VISION = {
    "full": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
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
    """(smallest difference over the kinds of colour vision, difference in grey), CIE 1976."""
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


def test_colours_that_somebody_cannot_tell_apart_are_found():
    # green and orange: equal without red cones
    assert confusable({"a": "#228833", "b": "#EE7733"}, {"a": "//"})
    assert confusable({"a": "#4477AA", "b": "#228833"}, {})  # blue and green: equal in grey
    assert confusable({"a": "#4477AA", "b": "#228833"}, {"a": "//"}) == []


def test_layers_are_hatched_and_curves_differ_in_style():
    meter = FakeMeter(10**9, categories=("parameter", "optimizer", "activation"))
    layers = teaching.timelines(plain=meter).axes[0].collections
    assert {area.get_hatch() for area in layers} == {"////", "xxxx", None}
    _, axes = teaching.figure()
    curves = [axes.plot([0, 1, 2], color="#228833")[0] for _ in range(4)]
    assert len({curve.get_linestyle() for curve in curves}) == 4


# Figures in words
# --------------------------------------------------------------------------------------------------


def sample(title="vs first", **options):
    drawn, axes = teaching.figure(title, **options)
    axes.set_xlabel(teaching.text("predicted ({unit})", unit="$L$"))
    axes.set(ylabel=f"{teaching.text('bytes')} (MB)", yscale="log")
    teaching.predicted_and_measured(axes, [1, 2, 3], [1, 2, 3], [1, 2, 3], "device")
    axes.text(1, 1, "3.14")
    return drawn


ENGLISH = (
    "vs first. Lines, data points; x axis: predicted (L); y axis: bytes (MB) (log scale); labels:"
    " “device” from 1 to 3."
)
CHINESE = (
    "首行的倍数。曲线、数据点；横轴：预测（L）；纵轴：字节 (MB)（对数）；标注：“设备”从 1 到 3。"
)


def test_a_figure_says_its_message_its_axes_and_its_labels_in_each_language():
    assert pictures.description(sample()) == (ENGLISH, CHINESE)


def test_words_given_for_a_figure_are_said_instead_of_its_axes():
    assert pictures.description(sample(alt="Right.")) == ("vs first. Right.", "首行的倍数。正确。")


def test_timelines_say_each_peak_its_phase_and_what_it_holds():
    en, zh = pictures.description(teaching.timelines(plain=FakeMeter(200_000_000)))
    assert (
        "plain: peak 200.0 MB in the forward phase, of it temporary 75.0 MB, activation 75.0 MB"
        in en
    )
    assert "基线：峰值 200.0 MB，出现在前向阶段，其中临时张量 75.0 MB、激活值 75.0 MB" in zh


def drawn_words(drawn, language):
    """What a canvas was asked to write, ticks included, while the figure was drawn in a
    language."""
    from matplotlib.text import Text

    with pictures.drawn_in(drawn, language):
        drawn.draw_without_rendering()
        return [item.get_text() for item in drawn.findobj(Text) if item.get_text()]


def test_a_figure_is_drawn_in_each_language_with_its_legend_and_its_ticks_and_is_english_again():
    drawn, axes = teaching.figure("vs first")
    axes.bar(["activation", "gradient"], [1, 2], label="peak (MB)")
    axes.legend(title="measured")
    before, chinese = drawn_words(drawn, "en"), drawn_words(drawn, "zh")
    assert {"vs first", "activation", "gradient", "peak (MB)", "measured"} <= set(before)
    assert {"首行的倍数", "激活值", "梯度", "峰值（MB）", "实测"} <= set(chinese)
    assert [words for words in chinese if labels.is_english(words)] == []
    assert [words for words in chinese if words[0].isdigit()] == [
        words for words in before if words[0].isdigit()
    ]
    assert drawn_words(drawn, "en") == before


def test_a_figure_in_an_unknown_language_is_refused():
    with pytest.raises(ValueError, match="language must be 'en' or 'zh', got 'fr'"):
        drawn_words(sample(), "fr")


def test_a_figure_is_shown_as_a_picture_a_language_whose_words_can_be_read_again(monkeypatch):
    from matplotlib.figure import Figure

    shown = []
    monkeypatch.setattr(
        "IPython.display.display", lambda bundle, **more: shown.append({**bundle, **more})
    )
    pictures.show(sample('<b> & "b"', alt="Right."))
    pictures.show(Figure())  # nothing to see: as IPython does it
    assert [set(bundle) - {"raw"} for bundle in shown] == [
        {"text/html", "text/plain", "metadata"},
        {"text/plain"},
    ]
    markup = shown[0]["text/html"]
    assert spoken_problems(markup) == []
    found = pictures.pictures_in(markup)
    assert {language: each.alt for language, each in found.items()} == {
        "en": '<b> & "b". Right.',
        "zh": '<b> & "b"。正确。',
    }
    assert found["en"].png != found["zh"].png and all(
        each.png.startswith("iVBO") for each in found.values()
    )
    assert pictures.pictures_in(f"<p>{markup}</p>") == {}
    large = shown[0]["metadata"]["slides"]
    assert set(large) == {"en", "zh"} and large["en"] != large["zh"] and large["en"] not in markup


def test_a_figure_for_slides_has_larger_letters_on_a_slides_sheet_and_is_as_before_afterwards():
    drawn, (above, _) = figures.figure(
        "A long title that tells what is seen " * 3, rows=2, height=5.6
    )
    above.set_title("short")

    def state():
        return (
            tuple(drawn.get_size_inches()),
            drawn.get_suptitle(),
            above.get_title(loc="left"),
            above.get_title(),
        )

    before, (width, height) = state(), drawn.get_size_inches()
    # pixels an inch of the page's picture
    blown_up = min(pictures.SLIDE[0] / width, pictures.SLIDE[1] / height)
    with pytest.raises(RuntimeError), pictures.enlarge(drawn):
        inches = drawn.get_size_inches()
        larger = pictures.SLIDE[0] / inches[0] / blown_up
        assert 1.1 < larger <= pictures.LARGER + 1e-9
        assert inches[0] / inches[1] == pytest.approx(pictures.SLIDE[0] / pictures.SLIDE[1])
        assert (
            drawn._suptitle.get_window_extent().width <= inches[0] * drawn.dpi
            and "\n" in drawn.get_suptitle()
        )
        raise RuntimeError
    assert state() == before
    drawn.course_larger = 1.0
    with pictures.enlarge(drawn):
        assert pictures.SLIDE[0] / drawn.get_size_inches()[0] == pytest.approx(blown_up)


def test_figures_are_shown_with_their_words_once_the_language_is_chosen():
    said = run_without(
        "",
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "from traitlets.config import Config\n"
        "import matplotlib\n"
        "matplotlib.use('Agg')\n"
        "shell = InteractiveShell.instance(config=Config(HistoryManager={'enabled': False}))\n"
        "from course_lib.teaching import figure, language\n"
        "from course_lib.teaching.pictures import show\n"
        "language()\n"
        "drawn, _ = figure()\n"
        "print(shell.display_formatter.ipython_display_formatter.lookup(drawn) is show)\n",
    )
    assert said.splitlines()[-1] == "True"


def test_categories_and_phases_have_the_glossarys_names():
    said = [
        *map(teaching.category_label, ("activation", "optimizer", "backward")),
        teaching.phase_label("optimizer"),
    ]
    assert said == ["activation", "optimizer state", "backward", "optimizer"]
    assert list(map(labels.chinese, said)) == ["激活值", "优化器状态", "反向", "优化器"]
    with pytest.raises(ValueError, match=r"^name must be one of .*, got 'weights'"):
        teaching.category_label("weights")


def test_timelines_share_one_scale_and_mark_every_peak():
    meters = {"plain": FakeMeter(200_000_000), "checkpointed": FakeMeter(80_000_000, operators=90)}
    drawn = teaching.timelines(meters, title="Half")
    first, second = drawn.axes
    assert first.get_ylim() == second.get_ylim() and first.get_xlim() == second.get_xlim() == (
        0,
        182,
    )
    assert first.get_ylim()[1] > 200
    for panel, meter in zip(drawn.axes, meters.values(), strict=True):
        (marker,) = [line for line in panel.lines if line.get_marker() == "o"]
        assert marker.get_ydata()[0] == pytest.approx(meter.peak_bytes / 1e6)
        assert any(f"{meter.peak_bytes / 1e6:,.1f} MB" in item.get_text() for item in panel.texts)
    assert "(−60%)" in words_in(drawn)
    assert "plain" in words_in(drawn) and "forward" in words_in(drawn)


def test_timelines_with_equal_peaks_say_no_change():
    meter = FakeMeter(200_000_000)
    drawn = teaching.timelines(plain=meter, again=meter)
    assert words_in(drawn).count("peak 200.0 MB") == 2 and "%" not in "".join(words_in(drawn))


def test_updates_within_backward_are_no_stripes_of_a_timeline():
    from matplotlib.patches import Rectangle

    meter = FakeMeter(200_000_000)
    # each parameter's update, right after its gradient
    meter._phases[70:110:2] = ["optimizer"] * 20
    panel = teaching.timelines(plain=meter).axes[0]
    bands = [
        (patch.get_x(), patch.get_width())
        for patch in panel.patches
        if isinstance(patch, Rectangle) and patch.get_y() == 1
    ]
    assert bands == [(0, 60), (60, 60), (120, 2)]


def test_timelines_stack_the_categories_to_the_live_bytes():
    meter = FakeMeter(200_000_000)
    drawn = teaching.timelines(plain=meter)
    top = max(
        area.get_paths()[0].vertices[:, 1].max()
        for area in drawn.axes[0].collections
        if area.get_paths()
    )
    assert top == pytest.approx(meter.peak_bytes / 1e6)


def test_timelines_name_every_category_that_holds_bytes():
    drawn = teaching.timelines(
        plain=FakeMeter(10**9),
        other=FakeMeter(10**7, categories=("parameter", "gradient", "buffer")),
    )
    for name in ("parameter", "activation", "temporary", "gradient", "buffer"):
        assert teaching.category_label(name) in words_in(drawn)
    assert teaching.category_label("optimizer") not in words_in(drawn)


def test_timelines_draw_a_real_meter_without_a_warning(tmp_path):
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    with MemoryMeter(model) as meter:
        model(torch.randn(256, 64)).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawn = teaching.timelines(plain=meter)
        for language in pictures.LANGUAGES:
            with pictures.drawn_in(drawn, language):
                drawn.savefig(tmp_path / "figure.png")


def test_timelines_of_nothing_are_an_error():
    with pytest.raises(ValueError, match="at least one meter"):
        teaching.timelines()
    with pytest.raises(ValueError, match="'idle' recorded no operator"):
        teaching.timelines(idle=SimpleNamespace(series=dict, phases=list, peak_bytes=0))


# Tables
# --------------------------------------------------------------------------------------------------


def measurement(peak_bytes, flops=10**9, seconds=0.5):
    return SimpleNamespace(
        peak_bytes=peak_bytes,
        allocator_peak_bytes=None,
        workspace_bytes=7,
        flops=flops,
        seconds=seconds,
        device="cpu",
    )


class _Text(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.found = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.found.append(data)


def parsed(shown) -> tuple[set[str], str]:
    reader = _Text()
    reader.feed(shown._repr_html_())
    return set(reader.tags), " ".join("".join(reader.found).split())


def test_compare_gives_each_measurement_against_the_first():
    compared = teaching.compare(
        {"plain": measurement(200_000_000)}, half=measurement(100_000_000, 2 * 10**9)
    )
    assert compared.data["peak (MB)"].tolist() == [200.0, 100.0]
    assert compared.data["vs first"].tolist() == [1.0, 0.5]
    assert compared.data["FLOPs vs first"].tolist() == [1.0, 2.0]
    assert "0.500×" in parsed(compared)[1] and "基线" in parsed(compared)[1]


def test_seconds_and_workspace_are_shown_only_when_asked_for():
    arms = {"plain": measurement(1000)}
    assert "seconds" not in repr(teaching.compare(arms)) and "workspace" not in repr(
        teaching.compare(arms)
    )
    assert (
        teaching.compare(arms)._repr_html_()
        == teaching.compare(plain=measurement(1000, seconds=9.0))._repr_html_()
    )
    everything = teaching.compare(arms, seconds=True, workspace=True).data
    assert everything["seconds"].tolist() == [0.5] and everything["device"].tolist() == ["cpu"]
    with pytest.raises(ValueError, match="at least one measurement"):
        teaching.compare()


def test_predictions_give_the_error_in_per_cent_of_the_measured():
    shown = teaching.predictions([("a", 99_000_000, 100_000_000), ("b", 7, 7), ("c", 5, None)])
    errors = shown.data["error (%)"].tolist()
    assert errors == [-1.0, 0.0, None]
    assert "−1.00" in repr(shown) and "–" in repr(shown)
    exact = teaching.predictions([("a", 84_000_000_000, 84_000_000_001)], unit="bytes")
    assert "84,000,000,000" in repr(exact) and "84,000,000,001" in repr(exact)
    assert "−0.000000001" in repr(exact), "what is not equal never shows as 0"


def test_an_unknown_unit_is_an_error_unless_its_scale_is_given():
    with pytest.raises(ValueError, match=r"unit must be one of .*, got 'Mb'"):
        teaching.predictions([("a", 1, 1)], unit="Mb")
    assert teaching.predictions([("a", 30, 20)], unit="b", scale=10).data[
        "predicted (b)"
    ].tolist() == [3.0]


@pytest.mark.parametrize(
    "guess", [300e6, "300 MB", "300MB", "300e6", "300,000,000", torch.tensor(300_000_000)]
)
def test_a_guess_may_have_its_unit_written_beside_it(guess):
    assert teaching.predictions([("peak", guess, 2e8)]).data["predicted (MB)"].tolist() == [300.0]


@pytest.mark.parametrize("guess", ["many", "300 mb", "", ["300"], True])
def test_a_guess_that_is_no_number_is_told_what_one_looks_like(guess):
    with pytest.raises(
        ValueError,
        match=r'a prediction must be a number of bytes or FLOPs, such as 300e6 or "300 MB", got ',
    ):
        teaching.predictions([("peak", guess, 2e8)])


def test_tables_escape_what_they_are_given():
    evil = '<script>alert("1")</script>'
    shown = teaching.table([evil, "b"], [[evil, teaching.text("Right. {why}", why=evil)]])
    tags, words = parsed(shown)
    assert "script" not in tags and "b" not in tags
    assert evil in words


def test_numbers_of_a_column_stand_at_the_right_with_as_many_decimals_each():
    rows = [[1, 0.4, 2e-7, "0.50", "00"], [1024, 12, 3, "–", "01"]]
    markup = teaching.table(["a", "b", "c", "d", "e"], rows)._repr_html_()
    cells = re.findall(r"text-align: (right|left)[^>]*>([^<]*)</div></td>", markup)
    first = [
        ("right", "1"),
        ("right", "0.4"),
        ("right", "2e-07"),
        ("right", "0.50"),
        ("left", "00"),
    ]
    second = [("right", "1,024"), ("right", "12.0"), ("right", "3"), ("right", "–"), ("left", "01")]
    assert cells == first + second


def test_a_number_keeps_its_unit_on_its_line():
    markup = teaching.table(["x"], [["602 → 623 MB, 1.33 ×, 3 Bs"]])._repr_html_()
    assert "602 → 623\u00a0MB, 1.33\u00a0×, 3 Bs" in markup


def test_the_librarys_tables_have_numbers_at_the_right_and_words_at_the_left():
    markup = saved_tensors(lambda: torch.ones(2, requires_grad=True).exp())._repr_html_()
    sides = {tag: re.findall(f'<{tag} style="text-align: (\\w+)"', markup) for tag in ("th", "td")}
    assert sides["th"] == sides["td"] and sides["th"][0] == "right" and "left" in sides["th"]


def test_whatever_shows_itself_marks_both_languages_for_the_switch():
    for shown in (
        teaching.compare({"plain": measurement(2)}, seconds=True, workspace=True),
        teaching.predictions([("activation", 1, 2)], unit="bytes"),
        teaching.table(["`x`"], [["yes"]]),
        right("Right."),
        wrong("Not answered yet.", hint="yes"),
        teaching.text("Right. {why}", why="yes"),
        saved_tensors(lambda: torch.ones(2, requires_grad=True).exp()),
    ):
        markup = shown._repr_html_()
        assert spoken_problems(markup) == [] and 'lang="zh"' in markup and 'lang="en"' in markup


def test_the_plain_text_of_a_table_lines_up_although_hanzi_are_wide():
    import unicodedata

    def columns(line):
        return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in line)

    teaching.language("both")
    lines = repr(teaching.table(["measured", "n"], [["parameter", 10_000], ["x", 2]])).splitlines()
    assert len({columns(line) for line in lines}) == 1
    assert "parameter 参数" in lines[1] and "10,000" in lines[1]


def test_a_row_of_the_wrong_length_is_an_error():
    with pytest.raises(ValueError, match="a row must have 2 cells, one per column, got 1"):
        teaching.table(["a", "b"], [[1]])


# Exercises
# --------------------------------------------------------------------------------------------------


class Hostile:
    """Fails at whatever is asked of it."""

    def __getattr__(self, name):
        raise RuntimeError(name)

    __eq__ = __float__ = __repr__ = __bool__ = __len__ = __hash__ = lambda *_: 1 / 0


anything = st.one_of(
    *(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.decimals(),
        st.fractions(),
        st.complex_numbers(),
    ),
    *(
        st.text(),
        st.binary(),
        st.lists(st.integers()),
        st.dates(),
        st.functions(),
        st.just(10**5000),
    ),
    *(
        st.just(odd)
        for odd in (Hostile, numpy.zeros((2, 2)), numpy.array(["x"]), numpy.float32("nan"))
    ),
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(anything, st.floats(min_value=0, max_value=1))
def test_a_check_never_raises_whatever_the_answer(answer, tolerance):
    verdict = expect_number(answer, 84, tolerance=tolerance, wrong_answers={12: "a"})
    assert isinstance(verdict, Verdict) and repr(verdict) and verdict._repr_html_()


def test_not_even_an_answer_that_fails_at_everything_makes_a_check_raise():
    verdict = expect_number(Hostile(), 84)
    assert not verdict and "`Hostile`" in verdict.message


@pytest.mark.parametrize(
    "answer", [84, 84.0, numpy.float64(84), numpy.array([84]), torch.tensor(84.0), Fraction(84)]
)
def test_a_number_of_any_kind_is_an_answer(answer):
    assert expect_number(answer, 84)


@pytest.mark.parametrize("answer", [torch.ones(3), torch.empty(1, device="meta"), torch, "84"])
def test_what_is_no_number_is_told_so(answer):
    assert "Expected one number" in expect_number(answer, 84).message


@given(
    st.integers(min_value=-(10**20), max_value=10**20),
    st.integers(min_value=-(10**20), max_value=10**20),
)
def test_without_tolerance_only_the_exact_number_is_right(answer, expected):
    assert bool(expect_number(answer, expected)) == (answer == expected)


def test_the_tolerance_is_relative():
    assert expect_number(101, 100, tolerance=0.01) and not expect_number(101.1, 100, tolerance=0.01)
    assert not expect_number(True, 1), "a yes is not a number"


def test_a_wrong_number_is_told_why_and_the_right_one_too():
    asked = {
        "wrong_answers": {12: "Twelve."},
        "why": "Seven times twelve.",
    }
    assert [expect_number(answer, 84, **asked).message for answer in (84, 12, 1, 99, None)] == [
        *(
            "Right. Seven times twelve.",
            "Not yet. Twelve.",
            "Not yet. The number is too small.",
            "Not yet. The number is too large.",
        ),
        "Not answered yet.",
    ]
    exact = [expect_number(answer, 84, **asked).exact for answer in (12, 1, None)]
    assert exact == [True, False, True], "which mistake it was is known of twelve alone"


def asked_for(hint, **options):
    """An exercise that knows what to say of the numbers 1 to 4; what else it is given, it calls."""

    @exercise(hint, **options)
    def check(answer):
        """What is checked."""
        if answer == 1:
            return right("yes")
        if answer == 2:
            return wrong("no")
        if answer == 3:
            raise WrongAnswer("no", hint="closer")
        if answer == 4:
            return expect_number(12, 84, wrong_answers={12: "Twelve."})
        return answer()

    return check


def test_hints_come_in_two_steps_and_none_before_a_first_attempt():
    check = asked_for(("first", "second"))
    tried = [check(answer) for answer in (None, 2, ..., 2, 2, 1)]
    assert [verdict.hint for verdict in tried] == [None, "first", None, "second", "second", None]
    assert tried[0].message == tried[2].message == "Not answered yet." and check.tries == 3
    assert [asked_for("only")(2).hint for _ in range(2)] == ["only", "only"]
    assert check.__doc__ == "What is checked."


def test_what_names_the_mistake_needs_no_hint_and_a_hint_of_its_own_goes_before():
    check = asked_for(("first", "second"))
    assert (check(4).message, check(4).hint) == ("Not yet. Twelve.", None)
    assert check(3).hint == "closer"
    assert [check(2).hint for _ in range(2)] == [
        "first",
        "second",
    ], "neither was a hint of the exercise's"


def test_an_exercise_knows_whether_the_last_answer_was_right():
    check, known = asked_for("hint"), []
    for answer in (None, 2, 1, None, 1, 5):
        check(answer)
        known.append(check.accepted)
    assert known == [False, False, True, False, True, False] and not asked_for("hint").accepted


def test_a_stub_that_raises_is_not_answered_yet():
    def stub():
        raise NotImplementedError

    def unfinished():
        raise NotImplementedError("that branch")

    check = asked_for("hint")
    assert (check(stub).message, check(stub).hint) == ("Not answered yet.", None)
    assert "that branch" in check(unfinished).message


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
            "Line 3 of your cell, `return x[3]  # no`: IndexError",
            1,
        ),
        (
            "def inner():\n    torch.ones(2) @ 1\n\ndef answer():\n    inner()",
            "Line 2 of your cell, `torch",
            1,
        ),
        (
            "answer = lambda: 1 / 0",
            "Line 1 of your cell, `answer = lambda: 1 / 0`: ZeroDivisionError",
            1,
        ),
        (THROUGH_BACKWARD, "Line 9 of your cell, `return gradient @ gradient`: RuntimeError", 1),
        (
            "def answer():\n    return kepp",
            "Line 2 of your cell, `return kepp`: NameError: name 'kepp'",
            0,
        ),
        (
            "def answer(x):\n    return x",
            "Line 1 of your cell, `def answer(x):`: TypeError: answer() missing 1",
            0,
        ),
        (
            "def answer():\n    return answer(1)",
            "Line 2 of your cell, `return answer(1)`: TypeError",
            0,
        ),
        (
            "def answer():\n    return 1 + 'a'",
            "Line 2 of your cell, `return 1 + 'a'`: TypeError",
            1,
        ),
    ],
)
def test_an_exception_shows_the_readers_own_line_and_a_typing_slip_no_hint(
    source, said, hint, monkeypatch
):
    monkeypatch.setenv("COURSE_LABELS", "strict")
    verdict = asked_for("`hint`")(cell(source)["answer"])
    assert (
        not verdict
        and verdict.message.startswith(said)
        and verdict.hint == ("`hint`" if hint else None)
    )
    assert (
        labels.chinese(verdict.message).startswith("你的单元格第 ")
        and spoken_problems(verdict._repr_html_()) == []
    )


NOTEBOOK = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in (
    "import torch\\nfrom course_lib.lessons import lesson_02",
    "def mine(block, x):\\n    y = block(x)\\n    return y @ y",
    "def mine_too(block, x):\\n    return blok(x)",
    "print(lesson_02.check_checkpoint(mine), lesson_02.check_checkpoint(mine_too), sep='|')",
):
    shell.run_cell(cell)
"""


def test_a_cell_of_a_notebook_is_where_the_readers_lines_stand():
    pytest.importorskip("IPython")
    both = run_without("", NOTEBOOK).split("|")
    assert (
        both[0].startswith("✗ Line 3 of your cell, `return y @ y`: RuntimeError: ")
        and "Hint: " in both[0]
    )
    assert (
        both[1].strip()
        == "✗ Line 2 of your cell, `return blok(x)`: NameError: name 'blok' is not defined"
    )


def test_where_no_line_of_the_readers_ran_the_exception_is_said_in_the_exercises_words():
    check = asked_for("try", raised="Broken: {error}")
    assert check(5).message == "Expected a function, got a `int`."
    assert check(partial(int, "")).message.startswith("Broken: ValueError(")
    assert check(lambda: [Hostile()].index(Hostile)).hint == "try"

    def unsayable():
        raise ValueError(Hostile())

    assert check(unsayable).message == "Broken: ValueError", "what cannot be shown is named"


def test_a_reason_in_words_is_shown_one_to_compare_with_and_not_judged():
    why = in_words("Because it is kept.")
    assert [why(answer).message for answer in (None, "  ", 3)] == [
        *("Not answered yet.", "Not answered yet.", "Write a sentence in quotes."),
    ]
    shown = why("It stays.")
    assert (
        repr(shown) == "→ Compare with yours: Because it is kept."
        and not shown
        and shown.hint is None
    )


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (4, (4, 40, 80)),
        (8, "8 peaks at 80"),
        (2, "4 fits as well, with 40"),
        (3, "want"),
        ("4", "want"),
    ],
)
def test_the_largest_size_that_fits_is_the_answer(answer, found):
    def asked(budget):
        return largest_that_fits(answer, [2, 4, 8], lambda size: 10 * size, budget, "want")

    if isinstance(found, tuple):
        assert asked(50) == found and asked(40) == found
    else:
        with pytest.raises(WrongAnswer, match=found):
            asked(50)


def test_the_largest_size_of_all_has_none_above_it():
    assert largest_that_fits(8, [2, 4, 8], lambda size: 10 * size, 80, "want") == (8, 80, None)


def test_verdicts_escape_what_they_say():
    assert "<b>" not in Verdict(False, "<b>", "<b>")._repr_html_()


# Without the notebook's packages
# --------------------------------------------------------------------------------------


def run_without(blocked: str, program: str) -> str:
    block = f"import sys\nfor name in {blocked!r}.split(): sys.modules[name] = None\n"
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", block + program]
    done = subprocess.run(
        command, capture_output=True, encoding="utf-8", check=False, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_matplotlib_is_needed_only_to_draw():
    run_without("matplotlib", "from course_lib.teaching import *; language(); table(['a'], [[1]])")


def test_everything_falls_back_to_plain_text_without_ipython_and_pandas():
    said = run_without(
        "IPython pandas ipywidgets",
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


def test_a_table_shows_truth_as_marks():
    shown = str(teaching.table(["checkpoint", "gradients equal"], [("`a`", True), ("`b`", False)]))
    assert [line.split()[-1] for line in shown.splitlines()[1:]] == ["✓", "✗"]
