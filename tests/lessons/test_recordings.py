"""GPU experiments: their numbers and labels, recordings of them, and their display in lessons."""

import json
import math
import re
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from course_lib import lessons
from course_lib.labels import in_both_languages
from course_lib.lessons import __main__ as command
from course_lib.teaching import experiments, language
from course_lib.teaching.experiments import (
    TINY,
    AttentionKernels,
    Experiment,
    Run,
    check_result,
    decoder_and_tokens,
    need_host_memory,
    seconds,
)
from course_lib.teaching.recordings import FOLDER, provenance, record, recorded_results

ROOT = Path(__file__).parents[2]
EXPERIMENTS = lessons.experiments()
NAMED = {f"{item.lesson}.{item.name}": item for item in EXPERIMENTS}
PROVENANCE = set(provenance("cpu")) | {"figures", "sizes", "notes", "date", "command"}
HAN = re.compile(r"[\u4e00-\u9fff]")
each_experiment = pytest.mark.parametrize("item", EXPERIMENTS, ids=list(NAMED))
RUN = Experiment.run


@cache
def small_run(name):
    """Run an experiment on the CPU at its small sizes, once for all tests."""
    return RUN(NAMED[name], "cpu", small=True)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def simulated_gpu(monkeypatch):
    """Return a function that simulates a GPU with a name and one result for all experiments."""
    found = small_run("01.korthikanti")  # before the GPU is simulated

    def simulate(name):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
        monkeypatch.setattr(Experiment, "run", lambda item: found)

    return simulate


def store(folder, gpu="Some GPU", day="2026-01-02", sizes=None, notes=None, **named):
    """Write a recording of lesson 01 as `record` does, with numbers per experiment."""
    origin = {"torch": "2.11.0", "date": day, "sizes": sizes or {}, "notes": notes or {}}
    entries = {name: origin | {"figures": values} for name, values in named.items()}
    path = folder / f"{gpu.lower().replace(' ', '-')}.json"
    path.write_text(json.dumps({"gpu": gpu, "experiments": {"01": entries}}), encoding="utf-8")


def command_line(monkeypatch, *arguments):
    """Run the command on the CPU and return the recording that it writes to the folder."""
    folder = arguments[0]
    argv = ["lessons", "--device", "cpu", "--folder", *map(str, arguments)]
    monkeypatch.setattr(sys, "argv", argv)
    command.main()
    return recording_in(folder)


def recording_in(folder):
    return json.loads((folder / "cpu.json").read_text(encoding="utf-8"))


def experiment_of(function, **options):
    """Return an experiment with sizes that can be halved."""
    options = {"sizes": {"batch": 4, "layers": 2}, "small": {"batch": 2, "layers": 1}} | options
    return replace(EXPERIMENTS[0], function=function, **options)


# The experiments
# --------------------------------------------------------------------------------------------------


@each_experiment
def test_experiment_and_numbers_have_distinct_labels_in_both_languages(item):
    values = small_run(f"{item.lesson}.{item.name}").figures
    labels = [item.label_of(name) for name in values]
    assert len(set(labels)) == len(values) > 0
    words = map(in_both_languages, [item.title, *labels])
    for name, (en, zh) in zip(["its title", *values], words, strict=True):
        assert name not in en and not HAN.search(en)
        assert HAN.search(zh)


def test_experiment_results_on_cpu_satisfy_claims_in_their_titles():
    step, layer, attention, monitor = (
        small_run(f"01.{name}").figures
        for name in ("decoder_step", "korthikanti", "attention_sequence", "monitor")
    )
    assert step["meter_peak_bytes"] + step["workspace_bytes"] == step["allocator_peak_bytes"]
    assert layer["saved_bytes"] == layer["predicted_bytes"] > layer["paper_bytes"]
    assert attention["fused_32_tensors_bytes"] < attention["standard_32_tensors_bytes"]
    parameters = list(decoder_and_tokens(torch.device("cpu"), **TINY)[0].parameters())
    weights = sum(p.nbytes for p in parameters)
    state = 2 * weights + 4 * len(parameters)  # with one step counter per parameter
    assert step["parameter_count"] == weights / 4
    assert monitor["step_live_bytes"] - monitor["backward_live_bytes"] == state
    assert monitor["step_live_bytes"] - monitor["zero_grad_live_bytes"] == weights
    assert monitor["forward_live_bytes"] > monitor["backward_live_bytes"] > 2 * weights
    recipes = small_run("07.three_recipes").figures
    for recipe in lessons.lesson("07", "gpu").RECIPES:
        assert recipes[f"{recipe}_peak_bytes"] == recipes[f"{recipe}_predicted_bytes"]


def test_experiment_seeds_its_run_and_restores_caller_random_state():
    item = replace(
        EXPERIMENTS[0], function=lambda device: [{"drawn_seconds": torch.rand(()).item()}], small={}
    )
    state = torch.get_rng_state()
    first = item.run("cpu", small=True)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert item.run("cpu", small=True) == first


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"peak": 1}, "unit.* got '01 decoder_step: peak'"),
        ({"peak_bytes": 1.5}, "whole number, got 1.5"),
        ({"peak_bytes": True}, "whole number, got True"),
        ({"step_seconds": math.nan}, "finite number, got nan"),
    ],
)
def test_experiment_rejects_number_that_violates_its_unit(values, message):
    item = replace(EXPERIMENTS[0], function=lambda device: [values], small={})
    with pytest.raises(ValueError, match=message):
        item.run("cpu", small=True)


@pytest.mark.parametrize(("lesson", "name"), [("99", "monitor"), ("01", "no_such")])
def test_unknown_experiment_raises_with_list_of_experiments(lesson, name):
    with pytest.raises(ValueError, match=r"must be one of .*(00, 01|korthikanti)"):
        lessons.on_gpu(lesson, name)


# Recordings
# --------------------------------------------------------------------------------------------------


def test_lesson_loads_numbers_recorded_by_experiment_command(tmp_path, monkeypatch):
    folder = tmp_path / "not" / "there"
    found = command_line(monkeypatch, folder, "--only", "01.kor", "06", "--skip", "07")
    (path,) = folder.iterdir()
    # the same figures give the same bytes in any order
    assert path.read_text("utf-8") == json.dumps(found, indent=2, sort_keys=True) + "\n"
    assert {lesson: set(named) for lesson, named in found["experiments"].items()} == {
        "01": {"korthikanti"},
        "06": {"attention_forward_and_backward"},
    }
    assert str(tmp_path) not in json.dumps(found)
    attention = found["experiments"]["06"]["attention_forward_and_backward"]
    assert attention["notes"] == {"framework_takes": "FLASH_ATTENTION", "course_takes": "TORCH"}
    assert attention["sizes"] == NAMED["06.attention_forward_and_backward"].small
    assert set(attention) == PROVENANCE
    assert attention["python"] and attention["cpu"] and attention["threads"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shown = recorded_results(NAMED["06.attention_forward_and_backward"], folder)
    assert (shown.source, shown.gpu, shown.problem) == ("recorded", "CPU", None)
    assert (shown.values, shown.notes) == (attention["figures"], attention["notes"])


def test_record_command_names_failed_experiment_and_saves_other_experiments(
    tmp_path, monkeypatch, capsys
):
    def fails(device, **sizes):
        yield {"before_bytes": 1}
        raise RuntimeError("the cable is out. And more.\nAnd more")

    found = [experiment_of(fails), NAMED["01.korthikanti"]]
    monkeypatch.setattr(command, "experiments", lambda: found)
    with pytest.raises(SystemExit, match=r"^failed: 01\.decoder_step$"):
        command_line(monkeypatch, tmp_path)
    assert capsys.readouterr().err == "01.decoder_step failed: RuntimeError: the cable is out\n"
    assert list(recording_in(tmp_path)["experiments"]["01"]) == ["korthikanti"]


def test_failed_write_leaves_stored_recording_unchanged(tmp_path, monkeypatch):
    def recorded(count):
        run = Run({"x_bytes": count}, {})
        return record(NAMED["01.monitor"], run, command="c", folder=tmp_path, device="cpu")

    def half(self, text, **options):
        with self.open("w", encoding="utf-8") as file:
            file.write(text[:10])
        raise OSError("no space left")

    path = recorded(1)
    before = path.read_bytes()
    monkeypatch.setattr(type(path), "write_text", half)
    with pytest.raises(OSError, match="no space"):
        recorded(2)
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == before


def test_missing_recording_shows_message_without_numbers(no_gpu, tmp_path):
    found = recorded_results(NAMED["01.monitor"], tmp_path / "nothing")
    assert (found.source, found.values, found.gpu, found.date) == ("none", {}, None, None)
    shown = lessons.on_gpu("01", folder=tmp_path / "nothing")
    assert list(shown.figures) == [item.name for item in lessons.experiments("01")]
    for text in (repr(shown), re.sub("<[^>]*>", "", shown._repr_html_())):
        assert "No recording yet" in text and "make gpu" in text
        assert "MB" not in text and not re.search(r"\b0\b", text)


def test_failed_gpu_run_shows_recording_with_error_message(simulated_gpu, tmp_path, monkeypatch):
    store(tmp_path, monitor={"model_live_bytes": 12_345_678})
    simulated_gpu("Tiny GPU")

    def too_large(item):
        raise MemoryError("it is too large")

    monkeypatch.setattr(Experiment, "run", too_large)
    found = recorded_results(NAMED["01.monitor"], tmp_path)
    assert (found.source, found.gpu) == ("recorded", "Some GPU")
    assert found.problem == "Tiny GPU: MemoryError: it is too large"
    shown = repr(lessons.on_gpu("01", "monitor", folder=tmp_path))
    assert f"could not run it ({found.problem})" in shown


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize(
    ("arguments", "version", "message"),
    [
        ([], None, "no CUDA GPU"),
        (["--check"], None, "no CUDA GPU"),
        (["--only", "nothing"], None, "No experiment has such a name"),
        (["--device", "cpu"], "2.8.1+cu128", "torch is 2.8.1"),
        (["--device", "cpu"], None, "--folder"),
    ],
)
def test_record_command_without_runnable_experiment_exits_and_writes_nothing(
    arguments, version, message, monkeypatch, capsys
):
    monkeypatch.setattr(torch, "__version__", version or torch.__version__)
    monkeypatch.setattr(sys, "argv", ["course_lib.lessons", *arguments])
    before = sorted(FOLDER.iterdir())
    with pytest.raises(SystemExit) as ended:
        command.main()
    # for a string, Python prints it and returns 1
    assert message in ended.value.code and ended.value.code.endswith(": nothing was run.")
    assert capsys.readouterr() == ("", "")
    assert sorted(FOLDER.iterdir()) == before


def assert_complete(recording):
    """Require the machine and the fields of every entry, which must belong to an experiment."""
    assert recording["gpu"] and recording["gpu_memory_bytes"] and recording["experiments"]
    for lesson, named in recording["experiments"].items():
        for name, entry in named.items():
            title = f"{lesson}.{name}"
            assert entry.keys() >= PROVENANCE, title
            assert entry["sizes"].keys() == NAMED[title].sizes.keys(), title
            for figure, value in entry["figures"].items():
                check_result(f"{title}: {figure}", value)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_stored_recording_is_complete_and_consistent(path):
    recording = json.loads(path.read_text(encoding="utf-8"))
    assert_complete(recording)
    first = recording["experiments"].get("01", {})
    found = {name: value for entry in first.values() for name, value in entry["figures"].items()}
    for name, value in found.items():
        assert value <= found.get(name.replace("_allocated_", "_reserved_"), value), name
        assert value <= found.get(name.replace("fused", "standard"), value), name
    assert found.get("difference_bytes", 0) == 0


# Little memory, times, kernels
# ------------------------------------------------------------------------------------------


def test_experiment_out_of_memory_retries_with_half_batch_or_layers():
    tried = []

    def large(device, batch, layers):
        tried.append((batch, layers))
        yield {"first_bytes": batch * layers}
        if batch == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if layers == 2:
            raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")
        yield {"second_bytes": 1}

    run = experiment_of(large).run("cpu")
    assert tried == [(4, 2), (2, 2), (2, 1)]
    assert run == Run({"first_bytes": 2, "second_bytes": 1}, {"batch": 2, "layers": 1})

    def full(device, lengths):
        raise MemoryError(lengths)

    lengths = experiment_of(full, sizes={"lengths": (16, 64)}, small={"lengths": (8, 32)})
    with pytest.raises(MemoryError, match=r"too little memory for the smallest size .*\(8, 32\)"):
        lengths.run("cpu")


def test_need_host_memory_raises_if_request_exceeds_free_memory():
    need_host_memory(1)
    if sys.platform == "linux":
        with pytest.raises(MemoryError, match="1000000 GB of host memory"):
            need_host_memory(10**15)


def test_recorded_result_names_reduced_batch_and_attention_kernel_of_run(no_gpu, tmp_path):
    sizes, values = NAMED["01.monitor"].sizes, {"model_live_bytes": 1}
    notes = {"attention": "CUDNN_ATTENTION"}
    store(tmp_path, sizes=sizes | {"batch": 1}, notes=notes, monitor=values)
    assert recorded_results(NAMED["01.monitor"], tmp_path).smaller == {"batch": 1}
    text = repr(lessons.on_gpu("01", "monitor", folder=tmp_path))
    assert "fit into memory: batch 1." in text and "attention: CUDNN_ATTENTION" in text
    store(tmp_path, sizes=sizes, monitor=values)
    assert "fit into memory" not in repr(lessons.on_gpu("01", "monitor", folder=tmp_path))


def test_timing_alternates_order_of_variants_and_discards_first_round(monkeypatch):
    called, now = [], [0.0]

    def arm(name, seconds):
        called.append(name)
        now[0] += seconds + 100 * (len(called) <= 2)

    monkeypatch.setattr(experiments.time, "perf_counter", lambda: now[0])
    arms = {"a": lambda: arm("a", 1), "b": lambda: arm("b", 2)}
    found = seconds(torch.device("cpu"), arms, rounds=1)
    assert called == ["b", "a", "a", "b"]
    assert found == {"a_seconds": 1, "b_seconds": 2}


@pytest.mark.parametrize("name", ["FLASH_ATTENTION", "MATH"])
def test_recorded_attention_kernel_is_selected_sdpa_backend(name):
    q = torch.randn(1, 2, 8, 4, requires_grad=True)
    with AttentionKernels() as kernels, sdpa_kernel(getattr(SDPBackend, name)):
        functional.scaled_dot_product_attention(q, q, q).sum().backward()
    assert str(kernels) == name


# What a lesson shows
# --------------------------------------------------------------------------------------------------


def test_recorded_numbers_are_shown_with_units_in_chosen_language(fresh, no_gpu, tmp_path):
    language("zh")
    values = {"step_seconds": 0.0125, "step_flops": 3_000_000_000, "parameter_count": 1_000_000}
    values |= {"saved_bytes": 12_345_678, "statistic_bytes": 4}
    store(tmp_path, decoder_step=values)
    text = repr(lessons.on_gpu("01", "decoder_step", folder=tmp_path))
    assert "上的记录" in text and "Recorded" not in text
    parts = ["Some GPU", "2.11.0", "2026-01-02", "12.346 MB", "12,345,678", "4 B"]
    parts += ["12.50 ms", "3.000 GFLOPs", "1,000,000"]
    assert [part for part in parts if part not in text] == []


def test_recordings_of_two_gpus_are_shown_as_columns(fresh, no_gpu, simulated_gpu, tmp_path):
    sizes = NAMED["01.korthikanti"].small

    def shown():
        return lessons.on_gpu("01", "korthikanti", folder=tmp_path)

    for gpu, day, saved in (("A GPU", "2026-01-02", 5), ("B GPU", "2026-01-03", 12_345_678)):
        values = {"saved_bytes": saved, "statistic_bytes": 4}
        store(tmp_path, gpu, day, sizes, korthikanti=values)
    assert shown().figures["korthikanti"].gpu == "B GPU"  # the latest
    words = " ".join(repr(shown()).split())
    assert "figure B GPU A GPU bytes" in words and "12.346 MB 5 B 12,345,678 / 5" in words
    assert words.count("Recorded on") == 2
    store(tmp_path, "A GPU", "2026-01-02", {"batch": 1}, korthikanti={"saved_bytes": 5})
    assert "A GPU" not in repr(shown())
    store(tmp_path, "A GPU", "2026-01-02", sizes, korthikanti={"saved_bytes": 5})
    simulated_gpu("B GPU")  # what it measures now replaces its recording
    assert shown().figures["korthikanti"].values["difference_bytes"] == 0
    live = repr(shown())
    assert "Measured now on B GPU" in live and "刚刚在 B GPU 上测得" in shown()._repr_html_()
    assert live.count("Recorded on A GPU") == live.count("Recorded on") == 1


# On a GPU
# --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@each_experiment
def test_experiment_recorded_on_gpu_is_read_back_unchanged(item, tmp_path, monkeypatch):
    run = item.run(small=True)
    path = record(item, run, command="make gpu", folder=tmp_path)
    assert_complete(json.loads(path.read_text(encoding="utf-8")))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert recorded_results(item, tmp_path).values == run.figures
    assert run.figures.get("difference_bytes", 0) == 0
