"""The language switch, figures, tables and exercise checks."""

import functools
import importlib.util
import itertools
import os
import subprocess
import sys
import warnings
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
from markup import spoken_problems
from properties import HealthCheck, given, settings, st

from course_lib import teaching
from course_lib.teaching import alt, exercises, figures, languages
from course_lib.teaching.exercises import Verdict, check_optimizer_bytes, expect_number

FONTS = Path(teaching.__file__).parent / "fonts"
ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No language chosen yet, no window, and matplotlib as the test found it."""
    import matplotlib

    monkeypatch.delenv("COURSE_LANG", raising=False)
    monkeypatch.setattr(languages, "_chosen", None)
    with matplotlib.rc_context():
        matplotlib.use("Agg")
        yield
        from matplotlib import pyplot

        pyplot.close("all")


class FakeMeter:
    """What `timelines` asks of a meter, without a model: bytes rise through the forward, fall through the backward."""

    def __init__(self, peak_bytes: int, operators: int = 60, categories=("parameter", "activation", "temporary")):
        slope = numpy.concatenate([numpy.linspace(0, 1, operators), numpy.linspace(1, 0, operators), [0.0, 0.0]])
        constant = peak_bytes // 4
        self._series = {name: numpy.zeros(len(slope), dtype=numpy.int64) for name in figures._STACK}
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
    """All of GB2312: the build script's own list, checked against a few characters from either end of both levels."""
    specification = importlib.util.spec_from_file_location("build", FONTS / "build.py")
    build = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(build)
    found = build.hanzi()
    assert len(set(found)) == 6763 and set("啊座亍齄存激活值显") <= set(found)
    return found


def words_in(figure) -> str:
    return "\n".join(item.get_text() for item in figure.findobj(lambda artist: hasattr(artist, "get_text")))


# The language ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("chosen", "expected"), [("en", "peak"), ("zh", "峰值"), ("both", "peak 峰值")])
def test_text_speaks_the_language_that_was_chosen(chosen, expected):
    teaching.language(chosen)
    assert teaching.text("peak", "峰值") == expected


def test_text_is_in_both_languages_until_one_is_chosen():
    assert teaching.text("peak", "峰值") == "peak 峰值"
    assert teaching.text("MB", "MB") == "MB"


def test_the_environment_goes_before_the_notebooks_default(monkeypatch):
    monkeypatch.setenv("COURSE_LANG", "zh")
    assert teaching.text("peak", "峰值") == "峰值"
    teaching.language("en")
    assert teaching.text("peak", "峰值") == "峰值"
    assert languages._Switch(languages.current())._repr_html_().index("checked> 中文")


def test_an_unknown_language_is_an_error_that_names_the_three(monkeypatch):
    with pytest.raises(ValueError, match='default is \'fr\', but must be "en", "zh" or "both"'):
        teaching.language("fr")
    monkeypatch.setenv("COURSE_LANG", "chinese")
    for call in (teaching.language, lambda: teaching.text("a", "b")):
        with pytest.raises(ValueError, match="COURSE_LANG is 'chinese'"):
            call()


def test_the_switch_is_the_same_html_every_time_and_stays_inside_its_notebook():
    markup = languages._Switch("both")._repr_html_()
    assert markup == languages._Switch("both")._repr_html_()
    rules = [line for line in markup.splitlines() if "display: none" in line]
    assert len(rules) == 2
    for rule, shown, hidden in zip(rules, ("en", "zh"), ("zh", "en"), strict=True):
        assert rule.startswith(f".jp-Notebook:has(.course-language input[value={shown}]:checked)")
        assert f")[lang={hidden}] {{" in rule and " .jp-Cell " in rule
    # A radio group ends at its form: two open notebooks each keep their own choice.
    assert markup.index("<form") < markup.index("<input") and markup.rindex("<input") < markup.index("</form>")
    assert " id=" not in markup and "<script" not in markup


def test_the_switch_checks_exactly_the_language_in_force():
    for chosen in ("en", "zh", "both"):
        markup = languages._Switch(chosen)._repr_html_()
        assert markup.count(" checked>") == 1
        before = markup[: markup.index(" checked>")]
        assert before.rindex(f'value="{chosen}"') > before.rindex("<input")


def test_the_switch_is_a_group_with_a_name_and_says_which_words_are_chinese():
    markup = languages._Switch("both")._repr_html_()
    assert markup.index("<form") < markup.index("<fieldset") < markup.index("<legend") < markup.index("<input")
    assert spoken_problems(markup) == [] and ":focus-visible" in markup
    # The switch hides what is marked as the other language, but never its own words.
    hidden = next(line for line in markup.splitlines() if "display: none" in line)
    assert "label" not in hidden and "legend" not in hidden


# Figures --------------------------------------------------------------------------------------------------------------


def test_no_glyph_is_missing_in_a_label_of_every_hanzi_with_math(tmp_path):
    characters = hanzi()
    signs = "× ÷ ± ≤ ≥ ≈ √ Σ θ λ μ · … – — “ ” ‘ ’ → ← ↑ ↓ ⌊ ⌋ ∘ ∞ ✓ ✗ −"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawn, axes = teaching.figure((signs, "，。、；：？！（）《》「」"))
        drawn.set_layout_engine("none")  # the lines below are far longer than the figure is wide
        for start in range(0, len(characters), 100):
            # With math in the string matplotlib takes another path, and every other character from one font only.
            axes.text(0, start / 7000, rf"{characters[start : start + 100]} $\sqrt{{L}} \leq \lfloor k \rfloor \theta$")
            axes.text(0, start / 7000, characters[start : start + 100])
        axes.set_xlabel("".join(sign for sign in signs if sign not in "⌊⌋∘✗") + " $x^2$")  # those: DejaVu, or in math
        axes.plot([-1, 1])
        drawn.savefig(tmp_path / "figure.png")


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


def test_a_title_in_both_languages_has_the_english_line_first():
    drawn, _ = teaching.figure(("Peak falls", "峰值下降"))
    assert drawn.get_suptitle() == "Peak falls\n峰值下降"


def test_figure_gives_one_axes_or_an_array():
    assert hasattr(teaching.figure()[1], "plot")
    assert teaching.figure(rows=2, columns=3)[1].shape == (2, 3)


def test_the_colours_are_the_meters_colours():
    memory = pytest.importorskip("course_lib.memory")
    assert {name: teaching.COLORS[name] for name in memory.CATEGORY_COLORS} == memory.CATEGORY_COLORS
    assert len(set(teaching.COLORS.values())) == len(teaching.COLORS) == 9


# Of linear RGB, severity 1: Machado, Oliveira and Fernandes, "A physiologically-based model for simulation of color
# vision deficiency", 2009, table 1.
VISION = {
    "full": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [
        [0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]
    ],
}  # fmt: skip


def lab(linear):
    """CIE L*a*b* (D65) of linear sRGB."""
    to_xyz = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
    xyz = numpy.array(to_xyz) @ numpy.clip(linear, 0, 1) / [0.95047, 1, 1.08883]
    x, y, z = numpy.where(xyz > 216 / 24389, numpy.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return numpy.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def differences(one, other):
    """(smallest difference over the kinds of colour vision, difference in grey), CIE 1976."""
    from matplotlib.colors import to_rgb

    coded = numpy.array([to_rgb(one), to_rgb(other)])
    pair = numpy.where(coded <= 0.04045, coded / 12.92, ((coded + 0.055) / 1.055) ** 2.4)
    seen = (
        numpy.linalg.norm(lab(matrix @ pair[0]) - lab(matrix @ pair[1])) for matrix in map(numpy.array, VISION.values())
    )
    return min(seen), abs(lab(pair[0])[0] - lab(pair[1])[0])


def confusable(colors, hatches):
    """Pairs that look alike: closer than 12 to somebody, or closer than 10 in grey and hatched alike."""
    return [
        (one, other)
        for one, other in itertools.combinations(colors, 2)
        for colored, grey in [differences(colors[one], colors[other])]
        if colored < 12 or (grey < 10 and hatches.get(one) == hatches.get(other))
    ]


def test_the_colours_are_told_apart_without_colour_vision_and_in_grey():
    schedule = pytest.importorskip("course_lib.schedule")
    memory = pytest.importorskip("course_lib.memory")
    assert confusable(memory.CATEGORY_COLORS, memory.CATEGORY_HATCHES) == []
    assert confusable(schedule.COLORS, {}) == []
    assert {name: memory.CATEGORY_HATCHES.get(name) for name in memory.CATEGORY_COLORS} == figures.HATCHES


def test_colours_that_somebody_cannot_tell_apart_are_found():
    assert confusable({"a": "#228833", "b": "#EE7733"}, {"a": "//"})  # green and orange: equal without red cones
    assert confusable({"a": "#4477AA", "b": "#228833"}, {})  # blue and green: equal in grey
    assert confusable({"a": "#4477AA", "b": "#228833"}, {"a": "//"}) == []


def test_layers_are_hatched_and_curves_differ_in_style():
    meter = FakeMeter(10**9, categories=("parameter", "optimizer", "activation"))
    layers = teaching.timelines(plain=meter).axes[0].collections
    assert {area.get_hatch() for area in layers} == {"////", "xxxx", None}
    _, axes = teaching.figure()
    curves = [axes.plot([0, 1, 2], color="#228833")[0] for _ in range(4)]
    assert len({curve.get_linestyle() for curve in curves}) == 4


# Figures in words -----------------------------------------------------------------------------------------------------


def sample(**options):
    drawn, axes = teaching.figure(("Peak falls", "峰值下降"), **options)
    axes.set(
        xlabel=teaching.text("layers $L$", "层数 $L$"), ylabel=f"{teaching.text('peak', '峰值')} (MB)", yscale="log"
    )
    teaching.predicted_and_measured(axes, [1, 2, 3], [1, 2, 3], [1, 2, 3], ("decoder", "解码器"))
    axes.text(1, 1, "3.14")
    return drawn


ENGLISH = "Peak falls. Lines, points; x axis: layers L; y axis: peak (MB) (log scale); labels: “decoder” from 1 to 3."
CHINESE = "峰值下降。曲线、数据点；横轴：层数 L；纵轴：峰值 (MB)（对数）；标注：“解码器”从 1 到 3。"


@pytest.mark.parametrize(("chosen", "said"), [("en", ENGLISH), ("zh", CHINESE), ("both", f"{ENGLISH} {CHINESE}")])
def test_a_figure_says_its_message_its_axes_and_its_labels_in_the_language_in_force(chosen, said):
    teaching.language(chosen)
    assert alt.alt_text(sample()) == said


def test_panels_are_said_one_by_one_and_what_they_share_once():
    drawn, (left, right) = teaching.figure(columns=2)
    for axes, title in ((left, ("before", "之前")), (right, ("after", "之后"))):
        axes.bar([1, 2], [1, 2])
        axes.set_title(teaching.text(*title))
    drawn.supylabel(teaching.text("bytes", "字节"))
    assert alt.alt_text(drawn) == "Before: bars. After: bars. All panels: bytes. 之前：柱形。之后：柱形。各图：字节。"


def test_words_given_for_a_figure_are_said_instead_of_its_axes():
    assert alt.alt_text(sample(alt=("It halves.", "减半。"))) == "Peak falls. It halves. 峰值下降。减半。"


def test_the_languages_of_a_label_are_told_apart_again():
    composed = f"{teaching.text('peak', '峰值')} 3 MB, {teaching.text('live bytes at the peak', '峰值处的存活字节')}"
    assert languages.parts(composed) == ("peak 3 MB, live bytes at the peak", "峰值 3 MB, 峰值处的存活字节")
    assert languages.parts("GFLOPs") == ("GFLOPs", "GFLOPs")


def test_timelines_say_each_peak_its_phase_and_what_it_holds():
    said = alt.alt_text(teaching.timelines({("plain", "普通"): FakeMeter(200_000_000)}, title=("Half", "一半")))
    assert "plain: peak 200.0 MB in the forward phase, of it temporary 75.0 MB, activation 75.0 MB" in said
    assert "普通：峰值 200.0 MB，出现在前向阶段，其中临时张量 75.0 MB、激活值 75.0 MB" in said


def test_every_figure_of_the_library_has_words_in_both_languages():
    from course_lib.schedule import Chain, store_all

    chain = Chain.uniform(4)
    for drawn in (
        teaching.course_map(),
        teaching.draw_activation_bytes(),
        teaching.schedule_pictures({("all", "全部"): store_all(chain)}, chain, title=("All", "全部")),
        teaching.timelines(plain=FakeMeter(10**6)),
    ):
        en, zh = alt._description(drawn)
        assert not en[0].islower() and en.endswith(".") and zh.endswith("。") and not set("。，、；：") & set(en)
        assert len(en) > 80 and len(zh) > 40


def test_a_figure_is_shown_as_a_picture_with_its_words(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda bundle, raw: shown.append(bundle))
    alt._show(sample(alt=('<b> & "b"', "乙")))
    (bundle,) = shown
    assert set(bundle) == {"text/html", "text/plain"}  # no second copy of the picture
    assert '<img lang="mul" alt="Peak falls. &lt;b&gt; &amp; &quot;b&quot;.' in bundle["text/html"]
    assert 'src="data:image/png;base64,iVBO' in bundle["text/html"]
    from matplotlib.figure import Figure

    picture = alt.picture_in(bundle["text/html"])
    assert (picture.en, picture.zh) == ('Peak falls. <b> & "b".', "峰值下降。乙。") and picture.png.startswith("iVBO")
    alt._show(Figure())  # nothing to see: as IPython does it
    assert set(shown[1]) == {"text/plain"}


@pytest.mark.parametrize(
    ("words", "halves"),
    [
        ("It falls. To 3.5 MB. 32 层，降到 3.5 MB。", ("It falls. To 3.5 MB.", "32 层，降到 3.5 MB。")),
        ("Only English.", ("Only English.",) * 2),
        ("只有中文。", ("只有中文。",) * 2),
    ],
)
def test_the_languages_of_a_stored_alt_text_are_told_apart(words, halves):
    assert alt.alt_parts(words) == halves
    assert alt.picture_in(f'<p><img lang="mul" alt="{words}" src="data:image/png;base64,iVBO"></p>') is None


def test_figures_are_shown_with_their_words_once_the_language_is_chosen():
    said = run_without(
        "",
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "from traitlets.config import Config\n"
        "import matplotlib\n"
        "matplotlib.use('Agg')\n"
        "shell = InteractiveShell.instance(config=Config(HistoryManager={'enabled': False}))\n"
        "from course_lib.teaching import figure, language\n"
        "from course_lib.teaching.alt import _show\n"
        "language()\n"
        "drawn, _ = figure()\n"
        "print(shell.display_formatter.ipython_display_formatter.lookup(drawn) is _show)\n",
    )
    assert said.splitlines()[-1] == "True"


def test_categories_and_phases_have_the_glossarys_names():
    assert teaching.category_label("activation") == "activation 激活值"
    assert teaching.category_label("optimizer") == "optimizer state 优化器状态"
    assert teaching.category_label("backward") == "backward 反向"
    assert teaching.phase_label("optimizer") == "optimizer 优化器"
    with pytest.raises(ValueError, match="'weights' is none of"):
        teaching.category_label("weights")


def test_timelines_share_one_scale_and_mark_every_peak():
    meters = {("plain", "普通"): FakeMeter(200_000_000), "checkpointed": FakeMeter(80_000_000, operators=90)}
    drawn = teaching.timelines(meters, title=("Half", "一半"))
    first, second = drawn.axes
    assert first.get_ylim() == second.get_ylim() and first.get_xlim() == second.get_xlim() == (0, 182)
    assert first.get_ylim()[1] > 200
    for panel, meter in zip(drawn.axes, meters.values(), strict=True):
        (marker,) = [line for line in panel.lines if line.get_marker() == "o"]
        assert marker.get_ydata()[0] == pytest.approx(meter.peak_bytes / 1e6)
        assert any(f"{meter.peak_bytes / 1e6:,.1f} MB" in item.get_text() for item in panel.texts)
    assert "(−60 %)" in words_in(drawn)
    assert "plain 普通" in words_in(drawn) and "forward 前向" in words_in(drawn)


def test_timelines_stack_the_categories_to_the_live_bytes():
    meter = FakeMeter(200_000_000)
    drawn = teaching.timelines(plain=meter)
    top = max(area.get_paths()[0].vertices[:, 1].max() for area in drawn.axes[0].collections if area.get_paths())
    assert top == pytest.approx(meter.peak_bytes / 1e6)


def test_timelines_name_every_category_that_holds_bytes():
    drawn = teaching.timelines(
        plain=FakeMeter(10**9), other=FakeMeter(10**7, categories=("parameter", "gradient", "buffer"))
    )
    for name in ("parameter", "activation", "temporary", "gradient", "buffer"):
        assert teaching.category_label(name) in words_in(drawn)
    assert teaching.category_label("optimizer") not in words_in(drawn)


def test_timelines_draw_a_real_meter_without_a_warning(tmp_path):
    torch = pytest.importorskip("torch")
    memory = pytest.importorskip("course_lib.memory")
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    with memory.MemoryMeter(model) as meter:
        model(torch.randn(256, 64)).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        teaching.timelines({("plain", "普通"): meter}).savefig(tmp_path / "figure.png")


def test_timelines_of_nothing_are_an_error():
    with pytest.raises(ValueError, match="at least one meter"):
        teaching.timelines()
    with pytest.raises(ValueError, match="'idle' recorded no operator"):
        teaching.timelines(idle=SimpleNamespace(series=dict, phases=list, peak_bytes=0))


# Tables ---------------------------------------------------------------------------------------------------------------


def measurement(peak_bytes, flops=10**9, seconds=0.5):
    return SimpleNamespace(
        peak_bytes=peak_bytes, allocator_peak_bytes=None, workspace_bytes=7, flops=flops, seconds=seconds, device="cpu"
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
    compared = teaching.compare({("plain", "普通"): measurement(200_000_000)}, half=measurement(100_000_000, 2 * 10**9))
    assert compared.data["peak, MB"].tolist() == [200.0, 100.0]
    assert compared.data["vs first"].tolist() == [1.0, 0.5]
    assert compared.data["FLOPs vs first"].tolist() == [1.0, 2.0]
    assert "0.500×" in parsed(compared)[1] and "普通" in parsed(compared)[1]


def test_seconds_and_workspace_are_shown_only_when_asked_for():
    arms = {"plain": measurement(1000)}
    assert "seconds" not in repr(teaching.compare(arms)) and "workspace" not in repr(teaching.compare(arms))
    assert teaching.compare(arms)._repr_html_() == teaching.compare(plain=measurement(1000, seconds=9.0))._repr_html_()
    everything = teaching.compare(arms, seconds=True, workspace=True).data
    assert everything["seconds"].tolist() == [0.5] and everything["device"].tolist() == ["cpu"]
    with pytest.raises(ValueError, match="at least one measurement"):
        teaching.compare()


def test_predictions_give_the_error_in_per_cent_of_the_measured():
    shown = teaching.predictions([("a", 99_000_000, 100_000_000), ("b", 7, 7), ("c", 5, None)])
    errors = shown.data["error, %"].tolist()
    assert errors[:2] == [-1.0, 0.0] and errors[2] != errors[2]  # the last is not a number: nothing was measured
    assert "−1.00" in repr(shown) and "–" in repr(shown)
    exact = teaching.predictions([("a", 84_000_000_000, 84_000_000_001)], unit="bytes")
    assert "84,000,000,000" in repr(exact) and "84,000,000,001" in repr(exact)
    assert "−0.000000001" in repr(exact), "what is not equal never shows as 0"


def test_an_unknown_unit_is_an_error_unless_its_scale_is_given():
    with pytest.raises(ValueError, match="unit is 'Mb'"):
        teaching.predictions([("a", 1, 1)], unit="Mb")
    assert teaching.predictions([("a", 30, 20)], unit="b", scale=10).data["predicted, b"].tolist() == [3.0]


def test_tables_escape_what_they_are_given():
    evil = '<script>alert("1")</script>'
    shown = teaching.table([evil, (evil, evil + "中")], [[evil, (evil, "<b>中</b>")]])
    tags, words = parsed(shown)
    assert "script" not in tags and "b" not in tags
    assert evil in words


def test_tables_mark_both_languages_for_the_switch_and_keep_a_space_between_them():
    claims = teaching.claims([(("It trains `x`", "它能训练"), "run it", "2 of 6", ("False", "错误"))])
    markup = claims._repr_html_()
    assert '<span lang="en"' in markup and '<span lang="zh"' in markup
    assert "False 错误" in parsed(claims)[1] and "<code>x</code>" in markup
    assert markup == claims._repr_html_()


def test_whatever_shows_itself_marks_its_chinese():
    shown = [
        teaching.about_this_machine(),
        teaching.compare({("plain", "普通"): measurement(2)}, seconds=True, workspace=True),
        teaching.predictions([(("peak", "峰值"), 1, 2)], unit="bytes"),
        teaching.claims([(("It trains", "它能训练"), "run it", "2 of 6", ("False", "错误"))]),
        teaching.on_gpu("01"),
        *(getattr(exercises, name)(None) for name in exercises.__all__ if name.startswith("check_")),
    ]
    for item in shown:
        markup = item._repr_html_()
        assert spoken_problems(markup) == [] and 'lang="zh"' in markup and 'lang="en"' in markup


def test_a_table_in_english_only_says_so_and_is_never_hidden():
    torch = pytest.importorskip("torch")
    memory = pytest.importorskip("course_lib.memory")
    x = torch.ones(2, requires_grad=True)
    assert memory.saved_tensors(lambda: x.exp())._repr_html_().startswith('<section lang="en">')
    assert "section" not in languages._RULE


def test_the_plain_text_of_a_table_lines_up_although_hanzi_are_wide():
    import unicodedata

    def columns(line):
        return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in line)

    lines = repr(teaching.table([("name", "名称"), "n"], [[("parameter", "参数"), 10_000], ["x", 2]])).splitlines()
    assert len({columns(line) for line in lines}) == 1
    assert "parameter 参数" in lines[1] and "10,000" in lines[1]


def test_a_row_of_the_wrong_length_is_an_error():
    with pytest.raises(ValueError, match="a row has 1 cells, but there are 2 columns"):
        teaching.table(["a", "b"], [[1]])


# Exercises ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [84_000_000_000, 84e9, numpy.float64(84e9), numpy.array([84e9])])
def test_the_optimizer_of_seven_billion_parameters_keeps_84_gb(answer):
    assert check_optimizer_bytes(answer)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(56e9, "two moments"), (112e9, "all 16"), (28e9, "keeps three"), (84, "in GB"), (1, "small"), (9e99, "large")],
)
def test_a_wrong_answer_is_told_why_and_given_a_hint(answer, reason):
    verdict = check_optimizer_bytes(answer)
    assert not verdict and reason in verdict.message[0] and verdict.hint is not None
    assert verdict.hint[1] in repr(verdict) and verdict.hint[1] in parsed(verdict)[1]


@pytest.mark.parametrize("answer", [None, ...])
def test_no_answer_is_neither_right_nor_an_error(answer):
    verdict = check_optimizer_bytes(answer)
    assert not verdict and verdict.message == ("Not answered yet.", "还没有作答。")


class Hostile:
    """Fails at whatever is asked of it."""

    def __getattr__(self, name):
        raise RuntimeError(name)

    __eq__ = __float__ = __repr__ = __bool__ = __len__ = __hash__ = lambda *_: 1 / 0


anything = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.decimals(), st.fractions(), st.complex_numbers()),
    *(st.text(), st.binary(), st.lists(st.integers()), st.dates(), st.functions(), st.just(10**5000)),
    *(st.just(odd) for odd in (Hostile, numpy.zeros((2, 2)), numpy.array(["x"]), numpy.float32("nan"))),
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(anything, st.floats(min_value=0, max_value=1))
def test_a_check_never_raises_whatever_the_answer(answer, tolerance):
    verdict = expect_number(answer, 84, tolerance=tolerance, wrong_answers={12: ("a", "b")}, hint=("c", "d"))
    assert isinstance(verdict, Verdict) and repr(verdict) and verdict._repr_html_()


def test_not_even_an_answer_that_fails_at_everything_makes_a_check_raise():
    verdict = expect_number(Hostile(), 84)
    assert not verdict and "`Hostile`" in verdict.message[0]


@pytest.mark.parametrize("make", ["torch.tensor(84.0)", "torch.ones(3)", "torch.empty(1, device='meta')", "torch"])
def test_tensors_are_answers_too(make):
    torch = pytest.importorskip("torch")
    verdict = expect_number(eval(make, {"torch": torch}), 84)
    assert bool(verdict) == (make == "torch.tensor(84.0)")


@given(st.integers(min_value=-(10**20), max_value=10**20), st.integers(min_value=-(10**20), max_value=10**20))
def test_without_tolerance_only_the_exact_number_is_right(answer, right):
    assert bool(expect_number(answer, right)) == (answer == right)


def test_the_tolerance_is_relative():
    assert expect_number(101, 100, tolerance=0.01) and not expect_number(101.1, 100, tolerance=0.01)
    assert not expect_number(True, 1), "a yes is not a number"


def test_verdicts_escape_what_they_say():
    assert "<b>" not in Verdict(False, ("<b>", "<b>"), ("<b>", "<b>"))._repr_html_()


def test_every_check_in_exercises_can_be_imported_from_teaching():
    checks = [name for name in vars(exercises) if name.startswith("check_")]
    assert checks and all(hasattr(teaching, name) and name in teaching.__all__ for name in checks)


# Without the notebook's packages --------------------------------------------------------------------------------------


def run_without(blocked: str, program: str) -> str:
    block = f"import sys\nfor name in {blocked!r}.split(): sys.modules[name] = None\n"
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", block + program]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_everything_falls_back_to_plain_text_without_ipython_and_pandas():
    said = run_without(
        "IPython pandas",
        "from course_lib.teaching import *\n"
        "language('zh')\n"
        "print(predictions([(('parameter', '参数'), 5, 4)], unit='bytes'))\n"
        "print(check_optimizer_bytes(None))\n"
        "assert predictions([])._repr_html_() is None\n",
    ).splitlines()
    assert said[0].startswith("Language 语言: 中文")
    assert said[1].split("\t") == ["", "预测，字节", "实测，字节", "误差，%"]
    assert said[2].split("\t") == ["参数", "5", "4", "+25.00"]
    assert said[3] == "✗ 还没有作答。"


def test_matplotlib_is_needed_only_to_draw():
    run_without("matplotlib", "from course_lib.teaching import *; language(); table(['a'], [[1]])")


def test_colours_do_not_need_the_meter():
    said = run_without("course_lib.memory", "from course_lib.teaching import COLORS; print(COLORS)")
    assert said.strip() == repr(teaching.COLORS)


def test_the_checks_of_lesson_01_tell_right_from_wrong():
    pytest.importorskip("torch")
    for check, right, wrong in (
        (exercises.check_optimizer_bytes, 84e9, [56e9, 84, None, "84e9"]),
        (exercises.check_largest_batch, 26, [25, 27, 26.5, 0, -1, None]),
        (exercises.check_swiglu_bytes, 8_912_896, [8_912_897, 8.912896, None]),
    ):
        assert check(right)
        assert not any(check(answer) for answer in wrong)


def test_the_checks_of_lesson_02_tell_right_from_wrong():
    torch = pytest.importorskip("torch")
    from course_lib.checkpoint import checkpoint

    def right(block, x):
        return checkpoint(block, x, use_reentrant=False)

    def forgets_the_mask(block, x):
        return checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)

    def hides(block, x):  # keeps everything where nobody looks, and computes nothing again
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or len(kept) - 1, lambda i: kept[i]):
            return block(x)

    twice = lambda block, x: (block(x), block(x))[1]  # noqa: E731
    for wrong in (None, lambda block, x: block(x), twice, lambda block, x: x, hides):
        assert not exercises.check_checkpoint(wrong)
        assert not exercises.check_dropout_checkpoint(wrong)
    assert exercises.check_checkpoint(right) and exercises.check_checkpoint(forgets_the_mask)
    assert exercises.check_dropout_checkpoint(right) and not exercises.check_dropout_checkpoint(forgets_the_mask)
    aten = torch.ops.aten
    assert exercises.check_policy([aten.bmm.default])
    for wrong in (None, aten.bmm.default, [], [aten.addmm.default], ["bmm"]):
        assert not exercises.check_policy(wrong)
    assert exercises.check_head_chunk(256)
    assert not any(exercises.check_head_chunk(wrong) for wrong in (None, 128, 512, 100, "256"))


def test_the_checks_of_lesson_03_tell_right_from_wrong():
    from course_lib.schedule import Backward, Chain, Forward, optimal, segments, sqrt_segments, store_all

    assert exercises.check_segment_count(24) and exercises.check_segment_count(24.0)
    assert not any(exercises.check_segment_count(wrong) for wrong in (None, 8, 576, 8 / 3, "24"))
    six = Chain.uniform(6, saved_bytes=2)
    assert exercises.check_drawn_schedule(list(segments(six, 4)))
    unfinished = [Forward(0, "input"), ...]
    too_much, illegal = [store_all(six), segments(six, 3), segments(six, 5)], [[Backward(5)], [Forward(1, "all")], [3]]
    for wrong in (None, [], unfinished, *too_much, *illegal):
        assert not exercises.check_drawn_schedule(wrong)
    assert "x_1" in exercises.check_drawn_schedule([Forward(1, "all")]).message[0]
    chain = exercises.pyramid()
    assert exercises.check_beats_sqrt(optimal(chain, 150_000_000))
    slower = optimal(chain, 131_000_000)
    for wrong in (None, sqrt_segments(chain), store_all(chain), slower, store_all(six), 3):
        assert not exercises.check_beats_sqrt(wrong)


def test_the_checks_of_lesson_04_tell_right_from_wrong():
    torch = pytest.importorskip("torch")
    from torch.autograd.graph import saved_tensors_hooks

    assert exercises.check_hiding_intensity(6349) and exercises.check_hiding_intensity(400e12 / 63e9)
    assert not any(exercises.check_hiding_intensity(wrong) for wrong in (None, 6.349, 15698, 3175))
    assert exercises.check_what_goes_down({0, 2}) and exercises.check_what_goes_down([2, 0])
    for wrong in (None, {0}, {0, 1, 2}, {0, 2, 4}, {7}, 3, {"0"}, set()):
        assert not exercises.check_what_goes_down(wrong)

    def keeps(copying, numbers=True):
        def offloading(store):
            def pack(tensor):
                store.append(copying(tensor.detach()))
                return len(store) - 1

            return saved_tensors_hooks(pack, lambda number: store[number] if numbers else store[0])

        return offloading

    nothing = lambda store: saved_tensors_hooks(lambda t: t, lambda t: t)  # noqa: E731
    assert exercises.check_offloading(keeps(torch.clone))
    for wrong in (None, nothing, keeps(lambda t: t), keeps(torch.clone, numbers=False), keeps(torch.zeros_like)):
        assert not exercises.check_offloading(wrong)

    def copies_and_keeps(store):
        return saved_tensors_hooks(lambda t: store.append(t.detach().clone()) or t, lambda t: t)

    def copies_and_hides(store, hidden={}):  # noqa: B006 - kept on purpose
        def pack(tensor):
            store.append(tensor.detach().clone())
            hidden[len(store) - 1] = tensor
            return len(store) - 1

        return saved_tensors_hooks(pack, lambda number: store[number])

    for wrong in (copies_and_keeps, copies_and_hides):
        verdict = exercises.check_offloading(wrong)
        assert not verdict and "nothing is freed" in verdict.message[0] and verdict.hint


def test_the_checks_of_lesson_05_tell_right_from_wrong():
    torch = pytest.importorskip("torch")

    def right(model, loss_sum, pieces):
        total = 0
        for piece in pieces:
            loss, weight = loss_sum(model, piece)
            loss.backward()
            total += weight
        for parameter in model.parameters():
            parameter.grad /= total

    def means(model, loss_sum, pieces):
        for piece in pieces:
            loss, weight = loss_sum(model, piece)
            (loss / max(weight, 1) / len(pieces)).backward()

    def last(model, loss_sum, pieces):
        right(model, loss_sum, pieces[-1:])

    def counts_first(model, loss_sum, pieces):
        total = sum(loss_sum(model, piece)[1] for piece in pieces)
        for piece in filter(len, pieces):
            (loss_sum(model, piece)[0] / total).backward()

    def joined(model, loss_sum, pieces):
        right(model, loss_sum, [torch.cat(pieces)])

    def all_graphs_at_once(model, loss_sum, pieces):
        losses, weights = zip(*(loss_sum(model, piece) for piece in pieces), strict=True)
        (sum(losses) / sum(weights)).backward()

    assert exercises.check_accumulation(right) and exercises.check_accumulation(counts_first)
    for wrong in (None, means, last, lambda *_: None):
        assert not exercises.check_accumulation(wrong)
    for wrong in (joined, all_graphs_at_once):
        verdict = exercises.check_accumulation(wrong)
        assert not verdict and "saves no memory" in verdict.message[0] and verdict.hint
    assert exercises.check_largest_micro_batch(14) and exercises.check_fast_micro_batch(16)
    assert not any(exercises.check_largest_micro_batch(wrong) for wrong in (None, 8, 14.5, 15, 25))
    assert not any(exercises.check_fast_micro_batch(wrong) for wrong in (None, 8, 32, 64, "16"))


def test_the_checks_of_lesson_06_tell_right_from_wrong():
    torch = pytest.importorskip("torch")

    def in_blocks(scores, block, rescale=True, step=1):
        largest, total = scores.new_full(scores.shape[:1], float("-inf")), scores.new_zeros(scores.shape[:1])
        for part in scores.split(block, dim=1)[::step]:
            new = torch.maximum(largest, part.amax(1))
            total = total * ((largest - new).exp() if rescale else 1) + (part - new[:, None]).exp().sum(1)
            largest = new
        return largest + total.log()

    def padded(scores, block):
        return in_blocks(torch.nn.functional.pad(scores, (0, -scores.shape[1] % block), value=float("-inf")), block)

    def from_right_to_left(scores, block):
        return in_blocks(scores, block, step=-1)

    def of_transposed(scores, block):
        parts = [part.logsumexp(0) for part in scores.T.split(block)]
        return torch.stack(parts).logsumexp(0)

    for correct in (in_blocks, padded, from_right_to_left, of_transposed):
        assert exercises.check_log_sum_exp(correct)

    def shifted(scores, block, largest):
        return largest + sum((part - largest[:, None]).exp().sum(1) for part in scores.split(block, dim=1)).log()

    def row_by_row(scores, block):
        return torch.stack([shifted(row[None], block, row.max()[None])[0] for row in scores])

    def two_passes(scores, block):
        return shifted(scores, block, torch.stack([part.amax(1) for part in scores.split(block, dim=1)]).amax(0))

    for wrong, reason in (
        (lambda scores, block: shifted(scores, block, scores.amax(1)), "`amax` took more than a block"),
        (lambda scores, block: shifted(scores, block, scores.sort(1).values[:, -1]), "`sort` took more than a block"),
        (row_by_row, "`max` took more than a block"),
        (two_passes, "second pass"),
    ):
        verdict = exercises.check_log_sum_exp(wrong)
        assert not verdict and reason in verdict.message[0] and verdict.hint
    for wrong in (
        None,
        lambda scores, block: scores.exp().sum(1).log(),
        lambda scores, block: torch.logsumexp(scores, 1),
        lambda scores, block: in_blocks(scores, block, rescale=False),
        lambda scores, block: 3,
    ):
        assert not exercises.check_log_sum_exp(wrong)
    assert exercises.check_probabilities(lambda q, k, lse: (q @ k.T / q.shape[1] ** 0.5 - lse[:, None]).exp())
    for wrong in (None, lambda q, k, lse: q @ k.T, lambda q, k, lse: (q @ k.T).softmax(1), lambda q, k, lse: lse):
        assert not exercises.check_probabilities(wrong)

    def by_hand(q, k, lse):
        weights = (q @ k.T / 4 - lse[:, None]).exp()
        return weights / weights.sum(1, keepdim=True)

    for wrong in (lambda q, k, lse: (q @ k.T / 4).softmax(1), by_hand):
        verdict = exercises.check_probabilities(wrong)
        assert not verdict and "do not come from `lse`" in verdict.message[0] and verdict.hint
    assert exercises.check_grouped_bytes(84_410_368)
    assert not any(exercises.check_grouped_bytes(wrong) for wrong in (None, 83_886_080, 84_148_224, 84.410368))


def test_two_processes_reduce_the_gradients_once_or_for_every_micro_batch():
    parameter_bytes, sent = teaching.ddp_bytes(micro_batches=3)
    assert sent == {True: parameter_bytes, False: 3 * parameter_bytes}


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's list of threads")
def test_a_worker_leaves_no_thread_of_its_group_to_the_interpreters_end(tmp_path):
    pytest.importorskip("torch")
    said = run_without(
        "",
        "from pathlib import Path\n"
        "from course_lib.teaching.workers import _on_rank\n"
        f"_on_rank({str(tmp_path)!r}, 2, 1, 0)\n"
        "names = [(thread / 'comm').read_text().strip() for thread in Path('/proc/self/task').iterdir()]\n"
        "print([name for name in names if 'gloo' in name])\n",
    )
    assert said.strip() == "[]"


def test_pictures_of_schedules_say_peak_and_time_and_share_one_scale():
    from course_lib.schedule import Chain, recursive, store_all

    chain = Chain.uniform(8)
    pictures = {("all", "全部"): store_all(chain), ("halves", "对半"): recursive(chain)}
    teaching.language("en")
    drawn = teaching.schedule_pictures(pictures, chain, unit="b", scale=1)
    first, second = drawn.axes
    assert [ax.get_title(loc="left") for ax in (first, second)] == ["all · 10 b · 1.00 ×", "halves · 6 b · 1.50 ×"]
    assert first.get_xlim() == second.get_xlim() == (0, 36)
    assert drawn.legends[0].get_texts()[0].get_text() == "forward, keeps all"


def test_the_schedule_under_a_slider_keeps_its_budget_or_says_what_it_takes():
    teaching.language("en")
    assert teaching.draw_schedule(360).get_suptitle() == "A budget of 360 MB costs 0 % more time"
    assert teaching.draw_schedule(100).get_suptitle() == "100 MB is too little: it takes 131 MB"
    title = teaching.draw_schedule(200).axes[0].get_title(loc="left")
    assert float(title.split(" · ")[1].removesuffix(" MB")) <= 200


@pytest.mark.parametrize("slider", ["activation_playground()", "schedule_playground()", "budget_playground([])"])
def test_without_jupyter_the_slider_says_what_it_needs(slider):
    program = f"from course_lib.teaching import *\n{slider}"
    assert "JupyterLab" in run_without("IPython ipywidgets", program)


# Lesson 07 ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def taken():
    """recipe -> what it takes on four layers of lesson 07's decoder; estimated once."""
    pytest.importorskip("torch")
    from course_lib.budget import estimate
    from course_lib.models import Decoder, random_tokens

    def make_model():
        return Decoder(vocabulary=8192, hidden=640, heads=40, layers=4, sequence=384)

    return functools.cache(lambda recipe: estimate(make_model, lambda: random_tokens(2, 384, 8192), recipe))


@pytest.fixture(scope="module")
def small_steps():
    """Three recipes on the smaller decoder of lesson 07, as estimates; the last one moves bytes."""
    pytest.importorskip("torch")
    from course_lib.budget import Recipe, estimate
    from course_lib.models import Decoder, random_tokens

    def make_model():
        return Decoder(vocabulary=1024, hidden=128, heads=8, layers=2, sequence=256)

    flash = {"attention": "flash"}
    recipes = Recipe(), Recipe(**flash), Recipe(**flash, micro_batches=8, offload_optimizer=1.0)
    return [estimate(make_model, lambda: random_tokens(8, 256, 1024), recipe) for recipe in recipes]


def test_where_activations_are_small_a_second_micro_batch_raises_the_peak(taken):
    from course_lib.budget import Recipe

    forgetful = {"attention": "flash", "checkpoint": "layers"}
    one, two = taken(Recipe(**forgetful)), taken(Recipe(**forgetful, micro_batches=2))
    assert two.peak_bytes > one.peak_bytes and two.flops == one.flops
    assert two.at_peak["gradient"] == two.at_peak["parameter"], "a full set of gradients is there"
    assert two.phase_peaks["backward"] == two.peak_bytes
    assert taken(Recipe(micro_batches=2)).peak_bytes < taken(Recipe()).peak_bytes, "it helps where they are large"


def test_the_savings_of_flash_and_checkpoints_do_not_add_up(taken):
    from course_lib.budget import Recipe

    plain = taken(Recipe()).peak_bytes
    techniques = {"attention": "flash"}, {"checkpoint": "layers"}, {"attention": "flash", "checkpoint": "layers"}
    flash, checkpoints, both = (plain - taken(Recipe(**each)).peak_bytes for each in techniques)
    assert max(flash, checkpoints) < both < flash + checkpoints


def test_with_the_state_on_the_host_a_device_needs_less_than_16_bytes_a_parameter():
    pytest.importorskip("torch")
    from course_lib.budget import Recipe, estimate
    from course_lib.memory import symbolic
    from course_lib.models import Decoder, random_tokens

    def make_model():  # four of the 32 layers
        return Decoder(vocabulary=32000, hidden=4096, heads=32, layers=4, sequence=4096)

    with symbolic():
        parameters = sum(p.numel() for p in make_model().parameters())
    forgetful = {"precision": "bf16", "attention": "flash", "checkpoint": "layers"}
    on_device, on_host = (
        estimate(make_model, lambda: random_tokens(1, 4096, 32000), Recipe(**forgetful, **more), tier="host")
        for more in ({}, {"offload_optimizer": 1.0, "in_backward": True})
    )
    assert on_host.peak_bytes < 4 * parameters < 16 * parameters < on_device.peak_bytes
    assert on_device.at_peak["optimizer"] >= 12 * parameters and on_host.at_peak["optimizer"] == 0
    assert on_device.moved_bytes == 0 and on_host.moved_bytes == (2 + 2) * parameters  # gradients down, parameters up


def test_flash_takes_more_flops_where_no_tile_is_masked_as_a_whole_and_fewer_elsewhere(taken):
    from course_lib.attention.tiled import BLOCK
    from course_lib.budget import Recipe, estimate
    from course_lib.models import Decoder, random_tokens

    flash = Recipe(attention="flash")
    assert BLOCK > 384 and taken(flash).flops > taken(Recipe()).flops

    def make_model():
        return Decoder(vocabulary=64, hidden=32, heads=2, layers=1, sequence=2 * BLOCK)

    ours, plain = (estimate(make_model, lambda: random_tokens(1, 2 * BLOCK, 64), r) for r in (flash, Recipe()))
    assert ours.flops < plain.flops


SMALL_CHECKS = "check_forty_megabytes", "check_fourteen_megabytes", "check_eleven_megabytes"
ALL_CHECKS = (*SMALL_CHECKS, "check_beats_the_lesson")
FORGETFUL = {"attention": "flash", "checkpoint": "layers"}
LEAST = {**FORGETFUL, "micro_batches": 8}


@pytest.mark.parametrize(
    ("check", "fields", "said"),
    [
        ("check_forty_megabytes", {"micro_batches": 4}, "Right: 32.6 MB"),
        ("check_forty_megabytes", {"micro_batches": 8}, "Right: "),
        ("check_forty_megabytes", {"micro_batches": 2}, "does not fit: 56.2 MB > 40 MB"),
        ("check_forty_megabytes", {"attention": "flash", "micro_batches": 4}, "takes 1.033 times the FLOPs"),
        ("check_forty_megabytes", {"micro_batches": 4, "offload_optimizer": 0.25}, "fits, but moves"),
        ("check_fourteen_megabytes", LEAST, "Right: 13.4 MB"),
        ("check_fourteen_megabytes", {"attention": "flash", "micro_batches": 8}, "does not fit: 16.9 MB > 14 MB"),
        ("check_fourteen_megabytes", {**LEAST, "offload_optimizer": 0.5}, "fits, but moves"),
        ("check_eleven_megabytes", {**LEAST, "offload_optimizer": 0.5}, "Right: 10.8 MB"),
        ("check_eleven_megabytes", {**LEAST, "offload_optimizer": 1.0}, "Right: 10.0 MB"),
        ("check_eleven_megabytes", {**LEAST, "offload_optimizer": 0.25}, "does not fit: 11.9 MB > 11 MB"),
    ],
)
def test_the_checks_of_lesson_07_tell_right_from_wrong(check, fields, said):
    pytest.importorskip("torch")
    from course_lib.budget import Recipe

    verdict = getattr(exercises, check)(Recipe(**fields))
    assert bool(verdict) == said.startswith("Right") and said in verdict.message[0]
    assert verdict or verdict.hint


def test_the_lesson_is_beaten_by_one_layer_less_to_compute_again_and_not_by_itself():
    pytest.importorskip("torch")
    from course_lib.budget import Recipe

    below = {"attention": "flash", "in_backward": True, "offload_optimizer": 1.0}
    better = exercises.check_beats_the_lesson(Recipe(**below, checkpoint="segments", segments=19))
    assert better and "544.5 MB, 7.673 s : 7.731 s" in better.message[0]
    itself = exercises.check_beats_the_lesson(Recipe(**below, checkpoint="layers"))
    assert not itself and "not cheaper: 7.731 s : 7.731 s" in itself.message[0] and itself.hint
    assert "does not fit" in exercises.check_beats_the_lesson(Recipe(**FORGETFUL)).message[0]


@pytest.mark.parametrize("check", ALL_CHECKS)
def test_what_is_no_recipe_for_lesson_07_is_refused_and_never_an_error(check):
    pytest.importorskip("torch")
    from course_lib.budget import Recipe

    sgd, bf16, odd = {"optimizer": "sgd"}, {"precision": "bf16"}, {"micro_batches": 9}
    for answer, said in (
        (None, "Not answered yet."),
        (..., "Not answered yet."),
        ("micro_batches=4", "this is a `str`"),
        (LEAST, "this is a `dict`"),
        (Recipe, "this is a `type`"),
        (Hostile(), "this is a `Hostile`"),
        (Recipe(**sgd), "Precision and optimizer stay"),
        (Recipe(**bf16), "Precision and optimizer stay"),
        (Recipe(**odd), "cannot be estimated: micro_batches is 9"),
    ):
        verdict = getattr(exercises, check)(answer)
        assert not verdict and said in verdict.message[0] and verdict.hint and verdict._repr_html_()


def test_the_way_to_a_budget_is_drawn_in_bars_as_high_as_the_estimates(small_steps, tmp_path):
    names = [("plain", "普通"), "+ flash", ("+ pieces, state below", "+ 分份，状态在下一级")]
    measured = [estimate.peak_bytes + 3_000_000 for estimate in small_steps]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawn = teaching.waterfall_picture(names, small_steps, measured, 20_000_000, title=("It fits", "装得下"))
        drawn.savefig(tmp_path / "figure.png")
    (axes,) = drawn.axes
    steps = range(len(small_steps))
    tops = [max(layer[i].get_y() + layer[i].get_height() for layer in axes.containers) for i in steps]
    assert tops == pytest.approx([estimate.peak_bytes / 1e6 for estimate in small_steps])
    (points,) = [line for line in axes.lines if line.get_marker() == "D"]
    assert points.get_ydata() == pytest.approx([count / 1e6 for count in measured])
    assert [line.get_ydata()[0] for line in axes.lines if line.get_linestyle() == "--"] == [20]
    held = {category for estimate in small_steps for category, count in estimate.at_peak.items() if count}
    assert {teaching.category_label(category) for category in held} <= set(words_in(axes.get_legend()).splitlines())
    assert "1.03 × FLOPs" in words_in(drawn) and "MB ↕" in words_in(drawn)


def test_the_way_to_a_budget_is_told_in_both_languages(small_steps):
    names = [("plain", "普通"), "+ flash", ("+ pieces", "+ 分份")]
    measured = [estimate.peak_bytes for estimate in small_steps]
    drawn = teaching.waterfall_picture(names, small_steps, measured, 20_000_000, title=("It fits", "装得下"))
    en, zh = alt._description(drawn)
    peaks = [f"{estimate.peak_bytes / 1e6:,.0f}" for estimate in small_steps]
    assert "plain {}, + flash {}, + pieces {}; the budget is 20.".format(*peaks) in en and "It fits" in en
    assert "普通 {}，+ flash {}，+ 分份 {}；预算为 20。".format(*peaks) in zh and "装得下" in zh


def test_the_budget_under_a_slider_names_the_cheapest_recipe_that_fits(small_steps, tmp_path):
    teaching.language("en")
    for budget, fitting, cheapest in ((110, 3, 0), (80, 2, 1), (20, 1, 2)):
        drawn = teaching.draw_budget(small_steps, budget)
        assert drawn.get_suptitle().startswith(f"{budget} MB: {fitting} fit, the cheapest takes ")
        assert drawn.axes[0].get_title("left") == str(small_steps[cheapest].recipe)
    none = f"5 MB: none fits, the least is {small_steps[2].peak_bytes / 1e6:.1f} MB"
    assert teaching.draw_budget(small_steps, 5).get_suptitle() == none
    axes = teaching.draw_budget(small_steps, 80).axes[0]
    count = {line.get_label(): len(line.get_xdata()) for line in axes.lines}
    assert (count["fits"], count["does not fit"]) == (2, 1)
    teaching.language("both")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for budget in (5, 80):
            drawn = teaching.draw_budget(small_steps, budget)
            drawn.savefig(tmp_path / "figure.png")
            en, zh = alt._description(drawn)
            assert f"{budget} MB" in en and f"{budget} MB" in zh and not set("。，、；：") & set(en)
