"""The lessons' GPU experiments, their recordings, and how a lesson shows them."""

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from course_lib import recordings
from course_lib.memory import training_state_bytes
from course_lib.recordings import lesson_01, lesson_07
from course_lib.teaching import languages, on_gpu

ROOT = Path(__file__).parents[1]
EXPERIMENTS = recordings.experiments()
FIELDS = {"gpu", "gpu_memory_bytes", "driver", "torch", "date", "command", "figures"}
HAN = re.compile(r"[\u4e00-\u9fff]")
each = pytest.mark.parametrize("item", EXPERIMENTS, ids=[f"{item.lesson}-{item.name}" for item in EXPERIMENTS])


@cache
def small_run(lesson, name):
    """The figures of an experiment on the CPU at its small sizes; made once, because all tests only read them."""
    return recordings.run(lesson, name, "cpu", small=True)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def gpu_called(monkeypatch):
    """Pretends that there is a GPU of that name, whose figures are those of small runs on the CPU."""
    for item in EXPERIMENTS:
        small_run(item.lesson, item.name)  # before torch is told that there is a GPU

    def pretend(name):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(total_memory=24 * 10**9))
        monkeypatch.setattr(recordings, "run", small_run)

    return pretend


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """An empty folder for recordings, which lessons read from too."""
    read = recordings.figures
    monkeypatch.setattr(recordings, "figures", lambda lesson, name: read(lesson, name, folder=tmp_path))
    return tmp_path


def store(folder, gpu="Some GPU", day="2026-01-02", **figures):
    """A recording of lesson 01 as `record` writes it: experiment=figures."""
    recording = {"gpu": gpu, "torch": "2.11.0", "date": day, "driver": "1", "command": "c", "gpu_memory_bytes": 1}
    path = folder / f"{gpu.lower().replace(' ', '-')}.json"
    path.write_text(json.dumps(recording | {"figures": {"01": figures}}), encoding="utf-8")


# The experiments ------------------------------------------------------------------------------------------------------


@each
def test_an_experiment_gives_finite_numbers_with_units_in_their_names(item):
    values = small_run(item.lesson, item.name)
    assert values
    for name, value in values.items():
        assert name.rpartition("_")[2] in recordings.UNITS
        assert math.isfinite(value)
    json.dumps(values, allow_nan=False)


@each
def test_an_experiment_and_its_figures_have_names_in_both_languages(item):
    values = small_run(item.lesson, item.name)
    labels = [recordings.label_of(item.lesson, item.name, name) for name in values]
    assert len(set(labels)) == len(values)
    assert HAN.search(item.title[1]) and not HAN.search(item.title[0])
    for name, (en, zh) in zip(values, labels, strict=True):
        assert name not in en and not HAN.search(en)
        assert HAN.search(zh)


@each
def test_an_experiment_leaves_no_random_number_drawn(item):
    state = torch.get_rng_state()
    recordings.run(item.lesson, item.name, "cpu", small=True)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_decoder_step_counts_the_same_peak_with_the_meter_and_with_measure():
    sizes = lesson_01.SMALL_GPT
    values = small_run("01", "decoder_step")
    model, _ = lesson_01.decoder(torch.device("cpu"), sizes)
    assert values["parameter_count"] == sum(p.numel() for p in model.parameters())
    assert values["meter_peak_bytes"] + values["workspace_bytes"] == values["allocator_peak_bytes"]
    assert values["meter_blocks_peak_bytes"] >= values["meter_peak_bytes"]
    assert values["meter_peak_bytes"] > sum(training_state_bytes(values["parameter_count"], "fp32-sgd").values())


def test_the_formula_of_korthikanti_is_met_to_the_byte():
    values = small_run("01", "korthikanti")
    assert values["difference_bytes"] == 0
    assert values["saved_bytes"] == values["predicted_bytes"] > values["paper_bytes"]


def test_fused_attention_peaks_lower_than_standard_attention():
    values = small_run("01", "attention_sequence")
    assert values["fused_32_tensors_bytes"] < values["standard_32_tensors_bytes"]


def test_the_monitor_sees_each_phase_take_and_give_back_what_it_should():
    values = small_run("01", "monitor")
    model, _ = lesson_01.decoder(torch.device("cpu"), lesson_01.SMALL_GPT)
    weights = sum(p.nbytes for p in model.parameters())
    moments = 2 * weights + 4 * len(list(model.parameters()))  # and a step counter each
    assert values["step_live_bytes"] - values["backward_live_bytes"] == moments
    assert values["step_live_bytes"] - values["zero_grad_live_bytes"] == weights
    assert values["forward_live_bytes"] > values["backward_live_bytes"] > values["model_live_bytes"] >= weights


def test_the_three_recipes_of_lesson_07_peak_where_they_are_predicted():
    values = small_run("07", "three_recipes")
    for recipe in lesson_07.RECIPES:
        assert values[f"{recipe}_peak_bytes"] == values[f"{recipe}_predicted_bytes"]
        for figure in ("predicted_bytes", "peak_bytes", "allocator_peak_bytes"):  # the last comes on a GPU only
            assert HAN.search(recordings.label_of("07", "three_recipes", f"{recipe}_{figure}")[1])
    assert values["least_peak_bytes"] < values["plain_peak_bytes"]


@pytest.mark.parametrize(
    ("figures", "complaint"),
    [
        ({"peak": 1}, "does not say its unit"),
        ({"peak_bytes": 1.5}, "takes a whole number"),
        ({"peak_bytes": True}, "takes a whole number"),
        ({"peak_bytes": None}, "takes a whole number"),
        ({"step_seconds": math.nan}, "takes a finite number"),
        ({"step_seconds": math.inf}, "takes a finite number"),
    ],
)
def test_a_figure_that_is_no_number_of_its_unit_is_refused(monkeypatch, figures, complaint):
    item = replace(EXPERIMENTS[0], function=lambda device: figures, small={})
    monkeypatch.setitem(recordings._experiments, (item.lesson, item.name), item)
    with pytest.raises(ValueError, match=complaint):
        recordings.run(item.lesson, item.name, "cpu", small=True)


def test_two_experiments_of_one_name_are_refused():
    with pytest.raises(ValueError, match="lesson 01 has two experiments called 'monitor'"):
        recordings.experiment("01", "monitor", en="again", zh="再来", small={})(lambda device: {})


@pytest.mark.parametrize(("lesson", "name"), [("99", "monitor"), ("01", "no_such")])
def test_an_unknown_experiment_is_an_error_that_names_the_known_ones(lesson, name):
    with pytest.raises(ValueError, match=r"GPU experiments (are in 01|of lesson 01 are decoder_step, korthikanti)"):
        recordings.figures(lesson, name)
    with pytest.raises(ValueError, match="GPU experiments"):
        on_gpu(lesson, name)


# Recordings -----------------------------------------------------------------------------------------------------------


def test_what_the_command_writes_is_what_figures_reads(gpu_called, tmp_path, monkeypatch):
    from course_lib.recordings import __main__ as command

    gpu_called("NVIDIA Example 9000 (24 GB)")
    monkeypatch.setattr(command, "run", recordings.run)
    monkeypatch.setattr(sys, "argv", ["recordings", "--folder", str(tmp_path)])
    command.main()
    (path,) = tmp_path.iterdir()
    assert path.name == "nvidia-example-9000-24-gb.json"
    written = json.loads(path.read_text(encoding="utf-8"))
    assert set(written) == FIELDS
    assert written["gpu_memory_bytes"] == 24 * 10**9 and written["driver"]
    assert str(tmp_path) not in path.read_text(encoding="utf-8")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for item in EXPERIMENTS:
        found = recordings.figures(item.lesson, item.name, folder=tmp_path)
        assert (found.source, found.gpu) == ("recorded", "NVIDIA Example 9000 (24 GB)")
        assert (found.torch, found.date, found.problem) == (str(torch.__version__), written["date"], None)
        assert found.values == written["figures"][item.lesson][item.name]


def test_the_same_figures_give_the_same_bytes_in_any_order(gpu_called, tmp_path):
    gpu_called("Example")
    one = {"01": {"a": {"x_bytes": 1, "y_bytes": 2}, "b": {"z_bytes": 3}}}
    other = {"01": {"b": {"z_bytes": 3}, "a": {"y_bytes": 2, "x_bytes": 1}}}
    first = recordings.record(one, command="c", folder=tmp_path).read_bytes()
    assert recordings.record(other, command="c", folder=tmp_path).read_bytes() == first
    assert first.endswith(b"}\n")


def test_live_figures_and_recorded_ones_stand_in_the_same_order(gpu_called, tmp_path, monkeypatch):
    gpu_called("Example")
    for item in EXPERIMENTS:
        live = recordings.figures(item.lesson, item.name, folder=tmp_path)
        assert live.source == "live"
        recordings.record({item.lesson: {item.name: live.values}}, command="c", folder=tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: False)
            recorded = recordings.figures(item.lesson, item.name, folder=tmp_path)
        assert list(recorded.values) == list(live.values)


def test_figures_are_ordered_by_number_not_by_letter(no_gpu, tmp_path):
    store(tmp_path, attention_sequence={f"fused_{n}_tensors_bytes": n for n in (1024, 2048, 512)})
    found = recordings.figures("01", "attention_sequence", folder=tmp_path)
    assert list(found.values.values()) == [512, 1024, 2048]


def test_of_several_recordings_the_latest_counts(no_gpu, tmp_path):
    store(tmp_path, "A GPU", "2026-03-01", monitor={"model_live_bytes": 1})
    store(tmp_path, "B GPU", "2026-05-01", monitor={"model_live_bytes": 2})
    store(tmp_path, "C GPU", "2026-09-01", korthikanti={"saved_bytes": 3})
    found = recordings.figures("01", "monitor", folder=tmp_path)
    assert (found.gpu, found.values) == ("B GPU", {"model_live_bytes": 2})


@each
def test_a_missing_recording_says_so_and_shows_no_figure(no_gpu, folder, item):
    found = recordings.figures(item.lesson, item.name)
    assert (found.source, found.values, found.gpu, found.date) == ("none", {}, None, None)
    shown = on_gpu(item.lesson, item.name)
    for text in (repr(shown), re.sub("<[^>]*>", "", shown._repr_html_())):
        assert "No recording yet" in text and "还没有记录" in text and "make gpu" in text
        assert "MB" not in text and not re.search(r"\b0\b", text)


def test_a_gpu_that_cannot_run_an_experiment_is_named_beside_the_recording(gpu_called, folder, monkeypatch):
    store(folder, monitor={"model_live_bytes": 12_345_678})
    gpu_called("Tiny GPU")

    def too_large(lesson, name):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    monkeypatch.setattr(recordings, "run", too_large)
    found = recordings.figures("01", "monitor")
    assert (found.source, found.gpu) == ("recorded", "Some GPU")
    assert found.problem == "Tiny GPU: CUDA out of memory"
    assert "could not run it (Tiny GPU: CUDA out of memory)" in repr(on_gpu("01", "monitor"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_command_says_one_sentence_and_writes_nothing(tmp_path):
    command = [sys.executable, "-m", "course_lib.recordings", "--folder", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode != 0 and result.stdout == ""
    assert len(result.stderr.splitlines()) == 1 and "no CUDA GPU" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_recordings_import_with_torch_and_numpy_alone():
    check = (
        "import sys; from course_lib import recordings; recordings.experiments(); "
        "print(*{'pandas', 'matplotlib', 'IPython', 'course_lib.teaching'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, cwd=ROOT)
    assert (result.returncode, result.stdout.split(), result.stderr) == (0, [], "")


def stored_problems(recording):
    """What a recording lacks, or holds and should not."""
    problems = [f"no {field}" for field in sorted(FIELDS) if not recording.get(field)]
    known = {(item.lesson, item.name) for item in EXPERIMENTS}
    for lesson, named in recording.get("figures", {}).items():
        for name, values in named.items():
            if (lesson, name) not in known:
                problems.append(f"{lesson} {name} is no experiment")
            for figure, value in values.items():
                try:
                    recordings._check(figure, value)
                except ValueError as error:
                    problems.append(str(error))
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", str(recording.get("date"))):
        problems.append("date is not YYYY-MM-DD")
    return problems


def test_every_stored_recording_has_all_its_fields():
    stored = sorted(recordings.FOLDER.glob("*.json"))
    if not stored:
        pytest.skip("no recording is stored yet; `make gpu` makes one on a machine with a GPU")
    problems = {path.name: stored_problems(json.loads(path.read_text(encoding="utf-8"))) for path in stored}
    assert not any(problems.values()), problems


def test_a_stored_recording_that_lacks_something_is_found():
    good = dict.fromkeys(FIELDS, "something") | {"date": "2026-01-02", "figures": {"01": {"monitor": {"a_bytes": 0}}}}
    assert stored_problems(good) == []
    for field in FIELDS:
        assert stored_problems({key: value for key, value in good.items() if key != field})
    for figures in ({"02": {"monitor": {}}}, {"01": {"monitor": {"a_bytes": None}}}, {"01": {"monitor": {"a": 1}}}):
        assert stored_problems(good | {"figures": figures})
    assert stored_problems(good | {"date": "yesterday"})


# What a lesson shows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "has", "lacks"), [("en", "Recorded on", "上的记录"), ("zh", "上的记录", "Recorded")]
)
def test_recorded_figures_are_labelled_as_recorded_in_the_language_chosen(
    no_gpu, folder, monkeypatch, chosen, has, lacks
):
    monkeypatch.setattr(languages, "_chosen", chosen)
    store(folder, korthikanti={"saved_bytes": 12_345_678, "statistic_bytes": 4})
    text = repr(on_gpu("01", "korthikanti"))
    assert has in text and lacks not in text
    assert all(part in text for part in ("Some GPU", "2.11.0", "2026-01-02", "12.346 MB", "12,345,678", "4 B"))


def test_a_page_has_both_languages_in_elements_of_their_own(no_gpu, folder):
    pytest.importorskip("pandas")
    store(folder, korthikanti={"saved_bytes": 12_345_678})
    html = on_gpu("01", "korthikanti")._repr_html_()
    assert html.count('lang="en"') == html.count('lang="zh"') == 6  # title, origin, three headings, one label
    for words in ('lang="en" style="display: block">Recorded on', 'lang="zh" style="display: block">Some GPU 上的记录'):
        assert words in html
    assert "12.346 MB" in html and "<table" in html and "not measured on this machine" in html


def test_live_figures_are_labelled_as_measured_now(gpu_called, folder):
    gpu_called("This GPU")
    shown = on_gpu("01", "korthikanti")
    assert "Measured now on This GPU" in repr(shown) and "刚刚在 This GPU 上测得" in repr(shown)
    assert shown.figures["korthikanti"].values["difference_bytes"] == 0


def test_all_experiments_of_a_lesson_are_shown_if_none_is_named(no_gpu, folder):
    assert list(on_gpu("01").figures) == [item.name for item in recordings.experiments("01")]
    assert list(on_gpu("01", "monitor", "korthikanti").figures) == ["monitor", "korthikanti"]


def test_figures_are_shown_in_the_unit_of_their_name(no_gpu, folder):
    store(folder, decoder_step={"step_seconds": 0.0125, "step_flops": 3_000_000_000, "parameter_count": 1_000_000})
    text = repr(on_gpu("01", "decoder_step"))
    assert all(part in text for part in ("12.50 ms", "3.000 GFLOPs", "1,000,000"))


# On a GPU -------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_on_a_gpu_every_experiment_runs_at_full_size_and_is_read_back(tmp_path, monkeypatch):
    values = {}
    for item in EXPERIMENTS:
        values.setdefault(item.lesson, {})[item.name] = recordings.run(item.lesson, item.name)
    path = recordings.record(values, command="make gpu", folder=tmp_path)
    assert stored_problems(json.loads(path.read_text(encoding="utf-8"))) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for item in EXPERIMENTS:
        assert recordings.figures(item.lesson, item.name, folder=tmp_path).source == "recorded"

    step, lesson = values["01"]["decoder_step"], values["01"]
    assert step["meter_peak_bytes"] <= step["max_memory_allocated_bytes"] <= step["max_memory_reserved_bytes"]
    assert step["allocated_between_operators_bytes"] == pytest.approx(step["meter_blocks_peak_bytes"], rel=0.01)
    assert lesson["korthikanti"]["difference_bytes"] == 0
    assert lesson["korthikanti"]["statistic_bytes"] == 4
    for length in (512, 1024, 2048, 4096):
        sequence = lesson["attention_sequence"]
        assert sequence[f"fused_{length}_tensors_bytes"] < sequence[f"standard_{length}_tensors_bytes"]
    monitor = lesson["monitor"]
    assert monitor["empty_cache_reserved_bytes"] < monitor["zero_grad_reserved_bytes"]
    for after in ("model", "forward", "backward", "step", "zero_grad", "empty_cache"):
        assert monitor[f"{after}_allocated_bytes"] <= monitor[f"{after}_reserved_bytes"]
