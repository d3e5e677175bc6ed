"""Samples of a timeline and the plot of it."""

import subprocess
import sys

import pytest
import torch
from patience import HANGS_SECONDS
from training_steps import mlp

from course_lib.memory import CATEGORIES, MemoryMeter


def test_a_sample_names_its_operator_and_the_timeline_can_be_sliced():
    with MemoryMeter() as meter:
        x = torch.ones(10) + 1
    assert [sample.operator for sample in meter.timeline] == [
        "aten.ones.default",
        "aten.add.Tensor",
    ]
    assert meter.timeline[-1].bytes["temporary"] == x.nbytes and hash(meter.timeline[-1])
    assert [sample.live_bytes for sample in meter.timeline[0:2]] == [40, 80]


def test_the_library_imports_nothing_that_draws_and_works_without():
    code = """
import sys
from course_lib.memory import measure, saved_tensors
from course_lib.models import deep_mlp
extras = ("matplotlib", "IPython", "pandas", "course_lib.teaching")
print(*(name for name in extras if name in sys.modules))
sys.modules.update(dict.fromkeys(extras))  # importing them fails from here on
import torch
model, x = deep_mlp(2, 8), torch.ones(4, 8)
table = saved_tensors(model, x)
print("<table" in table._repr_html_(), "4 saved tensors, 512 bytes" in str(table))
found = measure(lambda: model(x).sum().backward(), model=model, repeats=1)
print("<table" in found._repr_html_(), "peak of live tensors" in repr(found))
"""
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=HANGS_SECONDS,
        check=True,
    )
    assert found.stdout.split() == ["True"] * 4


def test_the_plot_marks_the_peak():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    model, optimizer, step = mlp()
    with MemoryMeter(model, optimizer) as meter:
        step()
    ax = meter.plot()
    try:
        (mark,) = ax.lines
        (moment,), (height,) = mark.get_data()
        assert height == meter.peak_bytes / 1e6
        assert meter.timeline[moment - 1].live_bytes == meter.peak_bytes
        assert [text.get_text() for text in ax.texts] == [f"{meter.peak_bytes / 1e6:,.2f} MB"]
        assert {text.get_text() for text in ax.get_legend().get_texts()} <= set(CATEGORIES)
        assert (ax.get_xlabel(), ax.get_ylabel()) == ("operators", "live MB")
        _, other = plt.subplots()
        assert meter.plot(other) is other
    finally:
        plt.close("all")


def test_plot_without_matplotlib_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with MemoryMeter() as meter:
        torch.ones(4)
    with pytest.raises(ModuleNotFoundError, match=r"`pip install matplotlib`.* extra `plot`"):
        meter.plot()
