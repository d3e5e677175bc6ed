"""GPU experiments: their figures and labels, recordings of them, and how a lesson shows them."""

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

from course_lib import lessons
from course_lib.lessons import __main__ as command
from course_lib.teaching import languages
from course_lib.teaching.experiments import TINY, UNITS, Experiment, check_figure, experiment
from course_lib.teaching.recorded import FOLDER, figures, record

ROOT = Path(__file__).parents[1]
EXPERIMENTS = lessons.experiments()
NAMED = {f"{item.lesson}.{item.name}": item for item in EXPERIMENTS}
FIELDS = {"gpu", "gpu_memory_bytes", "driver", "torch", "date", "command", "figures"}
HAN = re.compile(r"[\u4e00-\u9fff]")
each = pytest.mark.parametrize("item", EXPERIMENTS, ids=list(NAMED))
RUN = Experiment.run


@cache
def small_run(name):
    """The figures of an experiment on the CPU at its small sizes; made once, because all tests only read them."""
    return RUN(NAMED[name], "cpu", small=True)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def gpu_called(monkeypatch):
    """Pretends that there is a GPU of that name, whose figures are those of small runs on the CPU."""
    for name in NAMED:
        small_run(name)  # before torch is told that there is a GPU

    def pretend(name):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(total_memory=24 * 10**9))
        monkeypatch.setattr(Experiment, "run", lambda item: small_run(f"{item.lesson}.{item.name}"))

    return pretend


def store(folder, gpu="Some GPU", day="2026-01-02", **named):
    """A recording of lesson 01 as `record` writes it: experiment=figures."""
    recording = {"gpu": gpu, "torch": "2.11.0", "date": day, "driver": "1", "command": "c", "gpu_memory_bytes": 1}
    path = folder / f"{gpu.lower().replace(' ', '-')}.json"
    path.write_text(json.dumps(recording | {"figures": {"01": named}}), encoding="utf-8")


def command_line(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["lessons", *map(str, arguments)])
    command.main()


# The experiments ------------------------------------------------------------------------------------------------------


@each
def test_an_experiment_gives_finite_numbers_with_units_in_their_names(item):
    values = small_run(f"{item.lesson}.{item.name}")
    assert values and all(name.rpartition("_")[2] in UNITS and math.isfinite(value) for name, value in values.items())
    json.dumps(values, allow_nan=False)


@each
def test_an_experiment_and_its_figures_have_names_of_their_own_in_both_languages(item):
    values = small_run(f"{item.lesson}.{item.name}")
    labels = [item.label_of(name) for name in values]
    assert len(set(labels)) == len(values)
    assert HAN.search(item.title[1]) and not HAN.search(item.title[0])
    for name, (en, zh) in zip(values, labels, strict=True):
        assert name not in en and not HAN.search(en)
        assert HAN.search(zh)


def test_an_experiment_draws_the_same_random_numbers_every_time_and_leaves_none_drawn():
    item = replace(EXPERIMENTS[0], function=lambda device: {"drawn_seconds": torch.rand(()).item()}, small={})
    state = torch.get_rng_state()
    first = item.run("cpu", small=True)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert item.run("cpu", small=True) == first


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"peak": 1}, "does not say its unit"),
        ({"peak_bytes": 1.5}, "takes a whole number"),
        ({"peak_bytes": True}, "takes a whole number"),
        ({"peak_bytes": None}, "takes a whole number"),
        ({"step_seconds": math.nan}, "takes a finite number"),
        ({"step_seconds": math.inf}, "takes a finite number"),
    ],
)
def test_a_figure_that_is_no_number_of_its_unit_is_refused(values, complaint):
    item = replace(EXPERIMENTS[0], function=lambda device: values, small={})
    with pytest.raises(ValueError, match=complaint):
        item.run("cpu", small=True)


def test_an_arms_figures_are_labelled_by_arm_and_quantity():
    @experiment(
        title=("a", "甲"), sizes={}, small=TINY, arms={"plain": ("plain", "普通")}, labels={"x_{}_bytes": ("x {}",) * 2}
    )
    def made(device):
        return {}

    assert (made.name, made.small) == ("made", TINY)
    assert made.label_of("plain_allocator_peak_bytes") == ("plain: allocator's peak", "普通：分配器峰值")
    assert made.label_of("plain_peak_bytes") == ("plain: peak of tensors", "普通：张量峰值")
    assert made.label_of("x_512_bytes") == ("x 512", "x 512")
    assert made.label_of("other_bytes") == ("`other_bytes`",) * 2


@pytest.mark.parametrize(("lesson", "name"), [("99", "monitor"), ("01", "no_such")])
def test_an_unknown_experiment_is_an_error_that_names_the_known_ones(lesson, name):
    with pytest.raises(ValueError, match=r"takes one of 00, 01|of lesson 01 are decoder_step, korthikanti"):
        lessons.on_gpu(lesson, name)


# Recordings -----------------------------------------------------------------------------------------------------------


def test_what_the_command_writes_is_what_a_lesson_reads(gpu_called, tmp_path, monkeypatch):
    gpu_called("NVIDIA Example 9000 (24 GB)")
    folder = tmp_path / "not" / "there"
    command_line(monkeypatch, "--folder", folder)
    (path,) = folder.iterdir()
    assert path.name == "nvidia-example-9000-24-gb.json"
    written = json.loads(path.read_text(encoding="utf-8"))
    assert set(written) == FIELDS
    assert written["gpu_memory_bytes"] == 24 * 10**9 and written["driver"]
    assert str(tmp_path) not in path.read_text(encoding="utf-8")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for item in EXPERIMENTS:
        found = figures(item, folder)
        assert (found.source, found.gpu) == ("recorded", "NVIDIA Example 9000 (24 GB)")
        assert (found.torch, found.date, found.problem) == (str(torch.__version__), written["date"], None)
        assert found.values == written["figures"][item.lesson][item.name]


def test_an_experiment_that_fails_is_named_and_the_others_are_written(gpu_called, tmp_path, monkeypatch, capsys):
    gpu_called("Example")

    def run(item):
        if item.name == "monitor":
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return small_run(f"{item.lesson}.{item.name}")

    monkeypatch.setattr(Experiment, "run", run)
    with pytest.raises(SystemExit, match=r"failed: 01\.monitor$"):
        command_line(monkeypatch, "--folder", tmp_path, "--only", "01")
    assert "01.monitor failed: OutOfMemoryError: CUDA out of memory" in capsys.readouterr().err
    written = json.loads((tmp_path / "example.json").read_text(encoding="utf-8"))["figures"]
    assert set(written) == {"01"} and set(written["01"]) == {i.name for i in lessons.experiments("01")} - {"monitor"}


def test_a_part_is_added_to_what_was_recorded_with_the_same_torch_and_driver(gpu_called, tmp_path, monkeypatch):
    gpu_called("Example")
    command_line(monkeypatch, "--folder", tmp_path, "--only", "01.korthikanti")
    command_line(monkeypatch, "--folder", tmp_path, "--only", "01.mon", "06", "07", "--skip", "07.three")
    path = tmp_path / "example.json"
    written = json.loads(path.read_text(encoding="utf-8"))
    assert {lesson: set(names) for lesson, names in written["figures"].items()} == {
        "01": {"korthikanti", "monitor"},
        "06": {"attention_forward_and_backward"},
    }
    path.write_text(json.dumps(written | {"torch": "2.9.0"}), encoding="utf-8")
    command_line(monkeypatch, "--folder", tmp_path, "--only", "06")
    assert set(json.loads(path.read_text(encoding="utf-8"))["figures"]) == {"06"}, "older ones would be called new"


def test_the_same_figures_give_the_same_bytes_in_any_order(gpu_called, tmp_path):
    gpu_called("Example")
    one, other = NAMED["01.monitor"], NAMED["07.three_recipes"]

    def written(*pairs):
        for item, values in pairs:
            path = record(item, values, command="c", folder=tmp_path)
        found = path.read_bytes()
        path.unlink()
        return found

    first = written((one, {"x_bytes": 1, "y_bytes": 2}), (other, {"z_bytes": 3}))
    assert written((other, {"z_bytes": 3}), (one, {"y_bytes": 2, "x_bytes": 1})) == first
    assert first.endswith(b"}\n")


def test_live_figures_and_recorded_ones_stand_in_the_same_order(gpu_called, tmp_path, monkeypatch):
    gpu_called("Example")
    for item in EXPERIMENTS:
        live = figures(item, tmp_path)
        assert live.source == "live"
        record(item, live.values, command="c", folder=tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: False)
            assert list(figures(item, tmp_path).values) == list(live.values)


def test_figures_are_ordered_by_number_not_by_letter(no_gpu, tmp_path):
    store(tmp_path, attention_sequence={f"fused_{n}_tensors_bytes": n for n in (1024, 2048, 512)})
    assert list(figures(NAMED["01.attention_sequence"], tmp_path).values.values()) == [512, 1024, 2048]


def test_of_several_recordings_the_latest_counts(no_gpu, tmp_path):
    store(tmp_path, "A GPU", "2026-03-01", monitor={"model_live_bytes": 1})
    store(tmp_path, "B GPU", "2026-05-01", monitor={"model_live_bytes": 2})
    store(tmp_path, "C GPU", "2026-09-01", korthikanti={"saved_bytes": 3})
    found = figures(NAMED["01.monitor"], tmp_path)
    assert (found.gpu, found.values) == ("B GPU", {"model_live_bytes": 2})


@each
def test_a_missing_recording_says_so_and_shows_no_figure(no_gpu, tmp_path, item):
    found = figures(item, tmp_path / "nothing")
    assert (found.source, found.values, found.gpu, found.date) == ("none", {}, None, None)
    shown = lessons.on_gpu(item.lesson, item.name, folder=tmp_path / "nothing")
    for text in (repr(shown), re.sub("<[^>]*>", "", shown._repr_html_())):
        assert "No recording yet" in text and "还没有记录" in text and "make gpu" in text
        assert "MB" not in text and not re.search(r"\b0\b", text)


def test_a_gpu_that_cannot_run_an_experiment_is_named_beside_the_recording(gpu_called, tmp_path, monkeypatch):
    store(tmp_path, monitor={"model_live_bytes": 12_345_678})
    gpu_called("Tiny GPU")

    def too_large(item):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    monkeypatch.setattr(Experiment, "run", too_large)
    found = figures(NAMED["01.monitor"], tmp_path)
    assert (found.source, found.gpu, found.problem) == ("recorded", "Some GPU", "Tiny GPU: CUDA out of memory")
    assert "could not run it (Tiny GPU: CUDA out of memory)" in repr(lessons.on_gpu("01", "monitor", folder=tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize(("arguments", "said"), [([], "no CUDA GPU"), (["--only", "nothing"], "No experiment")])
def test_where_there_is_nothing_to_run_the_command_says_one_sentence_and_writes_nothing(arguments, said, tmp_path):
    given = [sys.executable, "-m", "course_lib.lessons", "--folder", str(tmp_path), *arguments]
    result = subprocess.run(given, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode != 0 and result.stdout == ""
    assert len(result.stderr.splitlines()) == 1 and said in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_experiments_import_with_torch_and_numpy_alone():
    check = (
        "import sys\nfor name in ('pandas', 'matplotlib', 'IPython', 'ipywidgets'): sys.modules[name] = None\n"
        "from course_lib import lessons; lessons.experiments()"
    )
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, cwd=ROOT)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def stored_problems(recording):
    """What a recording lacks, or holds and should not."""
    problems = [f"no {field}" for field in sorted(FIELDS) if not recording.get(field)]
    for lesson, named in recording.get("figures", {}).items():
        for name, values in named.items():
            if f"{lesson}.{name}" not in NAMED:
                problems.append(f"{lesson} {name} is no experiment")
            for figure, value in values.items():
                try:
                    check_figure(figure, value)
                except ValueError as error:
                    problems.append(str(error))
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", str(recording.get("date"))):
        problems.append("date is not YYYY-MM-DD")
    return problems


def test_every_stored_recording_has_all_its_fields():
    stored = sorted(FOLDER.glob("*.json"))
    if not stored:
        pytest.skip("no recording is stored yet; `make gpu` makes one on a machine with a GPU")
    problems = {path.name: stored_problems(json.loads(path.read_text(encoding="utf-8"))) for path in stored}
    assert not any(problems.values()), problems


def test_a_stored_recording_that_lacks_something_is_found():
    good = dict.fromkeys(FIELDS, "something") | {"date": "2026-01-02", "figures": {"01": {"monitor": {"a_bytes": 0}}}}
    assert stored_problems(good) == []
    for field in FIELDS:
        assert stored_problems({key: value for key, value in good.items() if key != field})
    for named in ({"02": {"monitor": {}}}, {"01": {"monitor": {"a_bytes": None}}}, {"01": {"monitor": {"a": 1}}}):
        assert stored_problems(good | {"figures": named})
    assert stored_problems(good | {"date": "yesterday"})


# What a lesson shows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "has", "lacks"), [("en", "Recorded on", "上的记录"), ("zh", "上的记录", "Recorded")]
)
def test_recorded_figures_are_labelled_as_recorded_in_the_language_chosen(
    no_gpu, tmp_path, monkeypatch, chosen, has, lacks
):
    monkeypatch.setattr(languages, "_chosen", chosen)
    store(tmp_path, korthikanti={"saved_bytes": 12_345_678, "statistic_bytes": 4})
    text = repr(lessons.on_gpu("01", "korthikanti", folder=tmp_path))
    assert has in text and lacks not in text
    assert all(part in text for part in ("Some GPU", "2.11.0", "2026-01-02", "12.346 MB", "12,345,678", "4 B"))


def test_live_figures_are_labelled_as_measured_now(gpu_called, tmp_path):
    gpu_called("This GPU")
    shown = lessons.on_gpu("01", "korthikanti", folder=tmp_path)
    assert "Measured now on This GPU" in repr(shown) and "刚刚在 This GPU 上测得" in repr(shown)
    assert shown.figures["korthikanti"].values["difference_bytes"] == 0


def test_all_experiments_of_a_lesson_are_shown_if_none_is_named(no_gpu, tmp_path):
    assert list(lessons.on_gpu("01", folder=tmp_path).figures) == [item.name for item in lessons.experiments("01")]
    assert list(lessons.on_gpu("01", "monitor", "korthikanti").figures) == ["monitor", "korthikanti"]


def test_figures_are_shown_in_the_unit_of_their_name(no_gpu, tmp_path):
    store(tmp_path, decoder_step={"step_seconds": 0.0125, "step_flops": 3_000_000_000, "parameter_count": 1_000_000})
    text = repr(lessons.on_gpu("01", "decoder_step", folder=tmp_path))
    assert all(part in text for part in ("12.50 ms", "3.000 GFLOPs", "1,000,000"))


# On a GPU -------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_on_a_gpu_every_experiment_runs_at_full_size_and_is_read_back(tmp_path, monkeypatch):
    values = {name: item.run() for name, item in NAMED.items()}
    for name, item in NAMED.items():
        path = record(item, values[name], command="make gpu", folder=tmp_path)
    assert stored_problems(json.loads(path.read_text(encoding="utf-8"))) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert all(figures(item, tmp_path).source == "recorded" for item in EXPERIMENTS)

    step, sequence, monitor = (values[f"01.{name}"] for name in ("decoder_step", "attention_sequence", "monitor"))
    assert step["meter_peak_bytes"] <= step["max_memory_allocated_bytes"] <= step["max_memory_reserved_bytes"]
    assert step["allocated_between_operators_bytes"] == pytest.approx(step["meter_blocks_peak_bytes"], rel=0.01)
    assert values["01.korthikanti"]["difference_bytes"] == 0
    assert values["01.korthikanti"]["statistic_bytes"] == 4
    for length in (512, 1024, 2048, 4096):
        assert sequence[f"fused_{length}_tensors_bytes"] < sequence[f"standard_{length}_tensors_bytes"]
    assert monitor["empty_cache_reserved_bytes"] < monitor["zero_grad_reserved_bytes"]
    for after in ("model", "forward", "backward", "step", "zero_grad", "empty_cache"):
        assert monitor[f"{after}_allocated_bytes"] <= monitor[f"{after}_reserved_bytes"]
