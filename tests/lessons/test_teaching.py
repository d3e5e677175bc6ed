"""The language switch, figures, tables, and the parts of exercise checks."""

import html
import itertools
import linecache
import math
import os
import re
import subprocess
import sys
from decimal import Decimal
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from html_checks import spoken_problems

from course_lib import labels, teaching
from course_lib.memory import CATEGORY_COLORS, CATEGORY_HATCHES
from course_lib.schedule import Chain, simulate
from course_lib.teaching import figures, marks, pictures
from course_lib.teaching.exercises import (
    Exercise,
    Verdict,
    WrongAnswer,
    expect_number,
    right,
    wrong,
)
from course_lib.teaching.timeline import STACK

FONTS = Path(teaching.__file__).parent / "fonts"
ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.usefixtures("fresh")


def fake_meter(peak_bytes, operators=60, categories=("parameter", "activation", "temporary")):
    """Simulate a meter for `timelines`: bytes rise in forward and fall in backward."""
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


def test_language_variable_overrides_notebook_default(monkeypatch, capsys):
    monkeypatch.setenv("COURSE_LANG", "zh")
    assert labels.say("bytes") == "字节"
    teaching.language("en")
    assert labels.say("bytes") == "字节" and "中文 (" in capsys.readouterr().out
    monkeypatch.setenv("COURSE_LANG", "chinese")
    with pytest.raises(ValueError, match=r"COURSE_LANG must be .* got 'chinese'"):
        teaching.language()


@pytest.mark.parametrize(
    ("call", "message"),
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
        *(
            (partial(teaching.predictions, [("a", guess, 1)]), 'such as 300e6 or "300 MB"')
            for guess in ("many", "300 mb", "", ["300"], True)
        ),
    ],
)
def test_invalid_teaching_argument_raises_value_error_naming_it(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("arguments", "environment", "follows", "language"),
    [
        ((), "", True, "en"),
        (("both",), "", False, "both"),
        ((), "zh", False, "zh"),
        (("zh",), "en", False, "en"),
    ],
)
def test_language_switch_follows_browser_unless_language_is_given(
    monkeypatch, arguments, environment, follows, language
):
    shown = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    monkeypatch.setenv("COURSE_LANG", environment)
    teaching.language(*arguments)
    markup = shown[0]._repr_html_()
    assert ("navigator.language" in markup) is follows
    checked = re.findall(r'<input [^>]*value="(\w+)"[^>]* checked>', markup)
    assert checked == [language]
    # a radio group ends at its form, so that two open notebooks have their own choices
    assert markup.count("<form") == 1 and " id=" not in markup


# Figures
# --------------------------------------------------------------------------------------------------


def test_fonts_have_glyphs_of_all_labels():
    """Labels are drawn in the course's font, and in DejaVu Sans behind it."""
    from fontTools.ttLib import TTFont
    from matplotlib import font_manager

    paths = [*FONTS.glob("*.otf"), Path(font_manager.findfont("DejaVu Sans"))]
    drawn = set().union(*(TTFont(path).getBestCmap() for path in paths))
    words = "".join(itertools.chain(*labels.catalog().items()))
    assert {sign for sign in words if ord(sign) not in drawn} <= {"\n"}


def test_creating_plot_preserves_font_size_changed_by_user():
    import matplotlib

    _, axes = teaching.figure()
    curves = [axes.plot([0, 1, 2], color="#228833")[0] for _ in range(4)]
    assert len({curve.get_linestyle() for curve in curves}) == 4
    assert axes.set_title("以后").get_fontfamily() == [figures.FONT, "DejaVu Sans"]
    matplotlib.rcParams["font.size"] = 17.0
    teaching.figure()
    assert matplotlib.rcParams["font.size"] == 17.0


def test_timelines_use_meter_hatches_and_distinct_color_per_category():
    assert {name: CATEGORY_HATCHES.get(name) for name in CATEGORY_COLORS} == figures.HATCHES
    assert len(set(teaching.COLORS.values())) == len(teaching.COLORS) == len(CATEGORY_COLORS) + 2


# Marks
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("upright", [True, False])
def test_stacked_bars_have_length_of_sum_of_shown_categories(upright):
    bars = {2: {"parameter": 3_000_000, "input": 9_000_000}, 5: {"activation": 500_000}}
    _, ax = teaching.figure()
    ends = marks.stacked_bars(ax, bars, ["activation", "parameter"], 0.5, upright=upright)
    assert ends == [3.0, 0.5]
    boxes = [bar.get_bbox().bounds for bar in ax.patches]  # left, bottom, width, height
    if upright:
        boxes = [(y, x, height, width) for x, y, width, height in boxes]
    assert boxes == [(0, 1.75, 0, 0.5), (0, 4.75, 0.5, 0.5), (0, 1.75, 3, 0.5), (0.5, 4.75, 0, 0.5)]
    assert ax.get_legend_handles_labels()[1] == ["activation", "parameter"]


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
    "vs first. Lines, data points; x axis: predicted (L); y axis: bytes (MB) (log scale);"
    " labels: “device” from 1 to 3."
)
CHINESE = (
    "首行的倍数。曲线、数据点；横轴：预测（L）；纵轴：字节 (MB)（对数）；标注：“设备”从 1 到 3。"
)


def test_plot_description_contains_title_and_axis_labels_or_alt_text():
    assert pictures.description(sample()) == (ENGLISH, CHINESE)
    assert pictures.description(sample(alt="Right.")) == ("vs first. Right.", "首行的倍数。正确。")


def drawn_words(drawn, language):
    """Return the words of a figure that is drawn in a language, with its ticks."""
    with pictures.drawn_in(drawn, language):
        drawn.draw_without_rendering()
        return [words for words in words_in(drawn).splitlines() if words]


def test_drawing_plot_in_chinese_translates_all_labels_and_restores_english():
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


def test_show_outputs_one_image_with_alt_text_per_language(monkeypatch):
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


def test_enlarge_resizes_plot_to_slide_and_restores_it_after_error():
    drawn, _ = figures.figure("A long title that states what is shown " * 3, rows=2, height=5.6)
    before = drawn.get_suptitle(), *drawn.get_size_inches()
    with pytest.raises(RuntimeError), pictures.enlarge(drawn):
        width, height = drawn.get_size_inches()
        assert width / height == pytest.approx(pictures.SLIDE[0] / pictures.SLIDE[1])
        assert drawn._suptitle.get_window_extent().width <= width * drawn.dpi
        raise RuntimeError
    assert (drawn.get_suptitle(), *drawn.get_size_inches()) == before


def test_timelines_share_axes_and_label_each_peak():
    held = ("parameter", "optimizer", "activation")
    meters = {
        "plain": fake_meter(200_000_000, categories=held),
        "checkpointed": fake_meter(80_000_000, operators=90),
    }
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


def test_timeline_merges_updates_within_backward_into_one_band():
    from matplotlib.patches import Rectangle

    meter = fake_meter(200_000_000)
    meter.phases()[70:110:2] = ["optimizer"] * 20
    patches = teaching.timelines(plain=meter).axes[0].patches
    bands = [each for each in patches if isinstance(each, Rectangle) and each.get_y() == 1]
    assert [(band.get_x(), band.get_width()) for band in bands] == [(0, 60), (60, 60), (120, 2)]


# Tables
# --------------------------------------------------------------------------------------------------


def measurement(peak_bytes, flops, seconds):
    fields = {"peak_bytes": peak_bytes, "flops": flops, "seconds": seconds, "device": "cpu"}
    return SimpleNamespace(**fields, allocator_peak_bytes=None, workspace_bytes=7)


def test_compare_shows_peak_and_flops_relative_to_first_measurement():
    arms = {
        "plain": measurement(200_000_000, 10**9, 0.5),
        "half": measurement(100_000_000, 2 * 10**9, 9.0),
    }
    compared = teaching.compare(arms)
    columns = compared.data[["peak (MB)", "vs first", "FLOPs vs first"]]
    assert columns.values.T.tolist() == [[200.0, 100.0], [1.0, 0.5], [1.0, 2.0]]
    assert "0.500×" in compared._repr_html_() and "基线" in compared._repr_html_()
    everything = teaching.compare(arms, seconds=True, workspace=True).data
    assert everything["seconds"].tolist() == [0.5, 9.0]
    assert {"seconds", "device"} <= {*everything.columns} - {*compared.data.columns}


def test_predictions_show_error_as_percentage_of_measured_value():
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
def test_predictions_accept_guess_as_number_or_string_with_unit(guess):
    assert teaching.predictions([("peak", guess, 2e8)]).data["predicted (MB)"].tolist() == [300.0]


def test_tables_and_verdicts_escape_html():
    evil = '<script>alert("1")</script>'
    shown = teaching.table([evil, "b"], [[evil, teaching.text("Right. {why}", why=evil)]])
    markup = shown._repr_html_() + Verdict(False, evil, evil)._repr_html_()
    assert "<script" not in markup and markup.count(html.escape(evil)) > 4


# Exercises
# --------------------------------------------------------------------------------------------------


class RaisesOnUse:
    """Object whose attributes and operators raise."""

    def __getattr__(self, name):
        raise RuntimeError(name)

    __eq__ = __float__ = __repr__ = __bool__ = __len__ = __hash__ = __call__ = lambda *_: 1 / 0


@pytest.mark.parametrize(
    "answer",
    [torch.ones(3), "84", True, 1j, RaisesOnUse(), RaisesOnUse, numpy.array(["x"]), Decimal("nan")],
    ids=lambda answer: type(answer).__name__,
)
def test_expect_number_rejects_answer_that_is_not_one_number(answer):
    assert "Expected one number" in expect_number(answer, 1).message


def test_expect_number_applies_relative_tolerance_that_defaults_to_zero():
    assert expect_number(101, 100, tolerance=0.01) and not expect_number(101.1, 100, tolerance=0.01)
    assert expect_number(10**20, 10**20) and not expect_number(10**20 + 1, 10**20)
    assert not expect_number(10**5000, 1) and not expect_number(-math.inf, 1)


def test_expect_number_explains_wrong_and_right_answers():
    options = {"wrong_answers": {12: "Twelve."}, "why": "Seven times twelve."}
    assert [expect_number(answer, 84, **options).message for answer in (84, 12, 1, 99, None)] == [
        "Right. Seven times twelve.",
        "Not yet. Twelve.",
        "Not yet. The number is too small.",
        "Not yet. The number is too large.",
        "Not answered yet.",
    ]
    exact = [expect_number(answer, 84, **options).exact for answer in (12, 1, None)]
    assert exact == [True, False, True], "only for 12 the message names the mistake"


def exercise_with(hint, raised="It raised {error}."):
    """Return an exercise with verdicts for the numbers 1 to 3, which calls other answers."""

    def check(answer):
        """Docstring of the check."""
        if answer == 3:
            raise WrongAnswer("no", hint="closer")
        verdict = {1: right("yes"), 2: wrong("no")}.get(answer)
        return answer() if verdict is None else verdict

    hints = (hint,) if isinstance(hint, str) else hint
    return Exercise(check, hints, lambda error: labels.text(raised, error=error))


def test_exercise_counts_attempts_and_stores_last_verdict():
    check = exercise_with(("first", "second"))
    tried = [(check(answer), check.accepted) for answer in (None, 2, ..., 2, 2, 1, None)]
    assert [accepted for _, accepted in tried] == [*5 * [False], True, False]
    tried = [verdict for verdict, _ in tried[:-1]]
    assert [verdict.hint for verdict in tried] == [None, "first", None, "second", "second", None]
    assert tried[0].message == tried[2].message == "Not answered yet." and check.tries == 3
    assert [exercise_with("only")(2).hint for _ in range(2)] == ["only", "only"]
    assert check.__doc__ == "Docstring of the check."


def test_mistake_message_or_verdict_hint_replaces_exercise_hint():
    check = exercise_with(("first", "second"))
    named = check(lambda: expect_number(12, 84, wrong_answers={12: "Twelve."}))
    assert (named.message, named.hint) == ("Not yet. Twelve.", None)
    assert check(3).hint == "closer"
    assert check(2).hint == "first", "neither was a hint of the exercise's"


def cell(source):
    """Run a notebook's cell as `__main__`, with its text in linecache, and return its names."""
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
    ("source", "message", "hint"),
    [
        ("def answer():\n    x = []\n    return x[3]  # no", "3, `return x[3]  # no`: IndexErr", 1),
        ("def inner():\n    torch.ones(2) @ 1\n\ndef answer():\n    inner()", "2, `torch", 1),
        (THROUGH_BACKWARD, "9, `return gradient @ gradient`: RuntimeError", 1),
        ("def answer():\n    raise NotImplementedError('x')", "2, `raise NotImplemented", 1),
        ("def answer():\n    return kepp", "2, `return kepp`: NameError: name 'kepp'", 0),
        ("def answer(x):\n    return x", "1, `def answer(x):`: TypeError: answer() missing 1", 0),
        ("def answer():\n    return answer(1)", "2, `return answer(1)`: TypeError", 0),
        ("def answer():\n    return 1 + 'a'", "2, `return 1 + 'a'`: TypeError", 1),
    ],
)
def test_exception_in_answer_shows_cell_line_and_typo_hides_hint(
    source, message, hint, monkeypatch
):
    monkeypatch.setenv("COURSE_LABELS", "strict")
    verdict = exercise_with("`hint`")(cell(source)["answer"])
    assert not verdict and verdict.hint == ("`hint`" if hint else None)
    line, _, rest = message.partition(", ")
    assert verdict.message.startswith(f"Line {line} of your cell, {rest}")
    assert labels.chinese(verdict.message).startswith("你的单元格第 ")
    assert spoken_problems(verdict._repr_html_()) == []


NOTEBOOK = (
    "import torch\nfrom course_lib.lessons.lesson_02 import exercises",
    "def mine(block, x):\n    y = block(x)\n    return y @ y",
    "def mine_too(block, x):\n    return blok(x)",
    "print(exercises.check_checkpoint(mine), exercises.check_checkpoint(mine_too), sep='|')",
)


def test_exception_shows_line_of_notebook_cell(capsys):
    interactiveshell = pytest.importorskip("IPython.core.interactiveshell")
    shell = interactiveshell.InteractiveShell()
    for source in NOTEBOOK:
        shell.run_cell(source)
    first, second = capsys.readouterr().out.split("|")
    assert first.startswith("✗ Line 3 of your cell, `return y @ y`: RuntimeError: ")
    assert second.startswith("✗ Line 2 of your cell, `return blok(x)`: NameError: ")
    assert "Hint: " in first and "Hint: " not in second


def test_exception_outside_learner_cell_shows_message_of_exercise():
    check = exercise_with("hint", raised="Broken: {error}")
    assert check(5).message == "Expected a function, got a `int`."
    assert check(partial(int, "")).message.startswith("Broken: ValueError(")

    def raise_unprintable():
        raise ValueError(RaisesOnUse())

    assert check(raise_unprintable).message == "Broken: ValueError"


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda: Chain.uniform(0), None),
        (lambda: simulate([3], Chain.uniform(3)), None),
        (lambda: simulate(None, Chain.uniform(3)), "hint"),  # Python raises in the library
        (lambda: int("x"), "hint"),
    ],
)
def test_library_argument_error_in_answer_shows_no_hint(answer, hint):
    verdict = exercise_with("hint", raised="Broken: {error}")(answer)
    assert verdict.message.startswith("Broken: ") and verdict.hint == hint


# Without the notebook's packages
# --------------------------------------------------------------------------------------

WITHOUT_PACKAGES = """
import sys
sys.modules |= dict.fromkeys(("IPython", "pandas", "ipywidgets", "matplotlib"))
from course_lib.teaching import *
language("zh")
print(predictions([("parameter", 5, 4)], unit="bytes"))
print(expect_number(None, 1))
playground(None, None)
assert predictions([])._repr_html_() is None
"""


def test_teaching_shows_bilingual_plain_text_without_optional_packages():
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WITHOUT_PACKAGES]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Language 语言: 中文")
    assert lines[1].split("\t") == ["", "预测（字节）", "实测（字节）", "误差（%）"]
    assert lines[2].split("\t") == ["参数", "5", "4", "+25.00"]
    assert lines[3:] == ["✗ 还没有作答。", "滑块需要在 JupyterLab 中使用。"]
