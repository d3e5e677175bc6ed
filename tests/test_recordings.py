"""GPU experiments: their figures and labels, recordings of them, and how a lesson shows them."""

import contextlib
import json
import math
import re
import signal
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from course_lib import lessons
from course_lib.labels import chinese, in_both_languages
from course_lib.lessons import __main__ as command
from course_lib.teaching import experiments, language, recordings
from course_lib.teaching.allocator import Allocator
from course_lib.teaching.experiments import (
    TINY,
    UNITS,
    AttentionKernels,
    Experiment,
    Run,
    check_figure,
    experiment,
    need_host_memory,
    seconds,
)
from course_lib.teaching.recordings import FOLDER, figures, provenance, record

ROOT = Path(__file__).parents[1]
EXPERIMENTS = lessons.experiments()
NAMED = {f"{item.lesson}.{item.name}": item for item in EXPERIMENTS}
PROVENANCE = set(provenance("cpu")) | {"figures", "sizes", "notes", "date", "command"}
HAN = re.compile(r"[\u4e00-\u9fff]")
each = pytest.mark.parametrize("item", EXPERIMENTS, ids=list(NAMED))
RUN = Experiment.run


@cache
def small_run(name):
    """An experiment on the CPU at its small sizes; run once, because all tests only read what it
    found."""
    return RUN(NAMED[name], "cpu", small=True)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def gpu_called(monkeypatch):
    """Pretends that there is a GPU of that name, whose figures are those of small runs on the
    CPU."""
    for name in NAMED:
        small_run(name)  # before torch is told that there is a GPU

    def pretend(name):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(total_memory=24 * 10**9)
        )
        monkeypatch.setattr(
            recordings,
            "provenance",
            lambda device: {"torch": str(torch.__version__), "driver": "1"},
        )
        monkeypatch.setattr(Experiment, "run", lambda item: small_run(f"{item.lesson}.{item.name}"))

    return pretend


def store(folder, gpu="Some GPU", day="2026-01-02", sizes=None, notes=None, **named):
    """A recording of lesson 01 as `record` writes it: experiment=figures."""
    entries = {
        name: {
            "figures": values,
            "torch": "2.11.0",
            "date": day,
            "sizes": sizes or {},
            "notes": notes or {},
        }
        for name, values in named.items()
    }
    path = folder / f"{gpu.lower().replace(' ', '-')}.json"
    path.write_text(json.dumps({"gpu": gpu, "experiments": {"01": entries}}), encoding="utf-8")


def command_line(monkeypatch, *arguments):
    """What the command writes to the folder for a CPU, whose experiments really run."""
    folder = arguments[0]
    monkeypatch.setattr(
        sys, "argv", ["lessons", "--device", "cpu", "--folder", *map(str, arguments)]
    )
    command.main()
    return written(folder)


def written(folder):
    return json.loads((folder / "cpu.json").read_text(encoding="utf-8"))


def made_of(function, **options):
    """An experiment with sizes to be halved."""
    options = {"sizes": {"batch": 4, "layers": 2}, "small": {"batch": 2, "layers": 1}} | options
    return replace(EXPERIMENTS[0], function=function, **options)


# The experiments
# --------------------------------------------------------------------------------------------------


@each
def test_an_experiment_gives_finite_numbers_with_units_in_their_names(item):
    values = small_run(f"{item.lesson}.{item.name}").figures
    assert values and all(
        name.rpartition("_")[2] in UNITS and math.isfinite(value) for name, value in values.items()
    )
    json.dumps(values, allow_nan=False)


@each
def test_an_experiment_and_its_figures_have_names_of_their_own_in_both_languages(item):
    values = small_run(f"{item.lesson}.{item.name}").figures
    labels = [item.label_of(name) for name in values]
    assert len(set(labels)) == len(values)
    for name, (en, zh) in zip(
        ["its title", *values], map(in_both_languages, [item.title, *labels]), strict=True
    ):
        assert name not in en and not HAN.search(en)
        assert HAN.search(zh)


def test_an_experiment_draws_the_same_random_numbers_every_time_and_leaves_none_drawn():
    item = replace(
        EXPERIMENTS[0], function=lambda device: [{"drawn_seconds": torch.rand(()).item()}], small={}
    )
    state = torch.get_rng_state()
    first = item.run("cpu", small=True)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert item.run("cpu", small=True) == first


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"peak": 1}, "must end in its unit, .*, got '01 decoder_step: peak'"),
        ({"peak_bytes": 1.5}, "must be a whole number, got"),
        ({"peak_bytes": True}, "must be a whole number, got"),
        ({"peak_bytes": None}, "must be a whole number, got"),
        ({"step_seconds": math.nan}, "must be a finite number, got"),
        ({"step_seconds": math.inf}, "must be a finite number, got"),
    ],
)
def test_a_figure_that_is_no_number_of_its_unit_is_refused(values, complaint):
    item = replace(EXPERIMENTS[0], function=lambda device: [values], small={})
    with pytest.raises(ValueError, match=complaint):
        item.run("cpu", small=True)


def test_an_arms_figures_are_labelled_by_arm_and_quantity():
    @experiment(
        title="a",
        sizes={},
        small=TINY,
        variants={"plain": "plain"},
        labels={"x_{n}_bytes": "x {n}"},
    )
    def made(device):
        return {}

    assert (made.name, made.small) == ("made", TINY)
    assert made.label_of("plain_allocator_peak_bytes") == "plain: allocator's peak"
    assert chinese(made.label_of("plain_peak_bytes")) == "基线：张量峰值"
    assert made.label_of("x_512_bytes") == "x 512"
    assert made.label_of("other_bytes") == "`other_bytes`"


@pytest.mark.parametrize(("lesson", "name"), [("99", "monitor"), ("01", "no_such")])
def test_an_unknown_experiment_is_an_error_that_names_the_known_ones(lesson, name):
    with pytest.raises(
        ValueError, match=r"must be one of 00, 01|of lesson 01, which are decoder_step, korthikanti"
    ):
        lessons.on_gpu(lesson, name)


# Recordings
# --------------------------------------------------------------------------------------------------


def test_what_the_command_writes_is_what_a_lesson_reads(tmp_path, monkeypatch):
    folder = tmp_path / "not" / "there"
    found = command_line(monkeypatch, folder, "--only", "01.kor", "06", "--skip", "07")
    assert [path.name for path in folder.iterdir()] == ["cpu.json"]
    assert {lesson: set(named) for lesson, named in found["experiments"].items()} == {
        "01": {"korthikanti"},
        "06": {"attention_forward_and_backward"},
    }
    assert str(tmp_path) not in json.dumps(found)
    attention = found["experiments"]["06"]["attention_forward_and_backward"]
    assert attention["notes"] == {"framework_takes": "FLASH_ATTENTION", "course_takes": "TORCH"}
    assert attention["sizes"] == NAMED["06.attention_forward_and_backward"].small
    assert (
        set(attention) == PROVENANCE
        and attention["python"]
        and attention["cpu"]
        and attention["threads"]
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shown = figures(NAMED["06.attention_forward_and_backward"], folder)
    assert (shown.source, shown.gpu, shown.torch, shown.problem) == (
        "recorded",
        "CPU",
        str(torch.__version__),
        None,
    )
    assert (shown.values, shown.notes) == (attention["figures"], attention["notes"])


def test_an_experiment_that_fails_is_named_and_all_that_was_measured_is_written(
    tmp_path, monkeypatch, capsys
):
    def fails(device, **sizes):
        yield {"before_bytes": 1}
        raise RuntimeError("the cable is out. And more.\nAnd more")

    found = [made_of(fails), NAMED["01.korthikanti"]]
    monkeypatch.setattr(command, "experiments", lambda: found)
    with pytest.raises(SystemExit, match=r"^failed: 01\.decoder_step$"):
        command_line(monkeypatch, tmp_path)
    assert capsys.readouterr().err == "01.decoder_step failed: RuntimeError: the cable is out\n"
    entries = written(tmp_path)["experiments"]["01"]
    assert (
        entries["decoder_step"]["figures"] == {"before_bytes": 1}
        and entries["korthikanti"]["figures"]
    )


def test_an_interrupt_keeps_what_was_there_and_what_was_measured(tmp_path, monkeypatch, capsys):
    command_line(monkeypatch, tmp_path, "--only", "01.korthikanti")
    path = tmp_path / "cpu.json"
    older = written(tmp_path)
    older["experiments"]["01"]["korthikanti"]["torch"] = "2.9.0"
    path.write_text(json.dumps(older), encoding="utf-8")

    def interrupted(device, **sizes):
        yield {"first_bytes": 1}
        raise KeyboardInterrupt

    items = [
        replace(NAMED[name], function=interrupted) for name in ("01.korthikanti", "01.monitor")
    ]
    for item in items:
        monkeypatch.setattr(
            command, "experiments", lambda item=item: [item, NAMED["07.three_recipes"]]
        )
        with pytest.raises(SystemExit) as stopped:
            command_line(monkeypatch, tmp_path)
        assert stopped.value.code == 130
        assert capsys.readouterr().err == "interrupted: the figures measured until now are kept\n"
    assert [each.name for each in tmp_path.iterdir()] == ["cpu.json"]
    now = written(tmp_path)
    assert now["experiments"]["01"]["korthikanti"] == older["experiments"]["01"]["korthikanti"]
    assert now["unfinished"]["01.korthikanti"]["figures"] == {"first_bytes": 1}
    assert now["experiments"]["01"]["monitor"]["figures"] == {"first_bytes": 1}

    monkeypatch.undo()
    again = command_line(monkeypatch, tmp_path, "--only", "01.korthikanti")
    assert again["unfinished"] == {} and again["experiments"]["01"]["korthikanti"]["torch"] == str(
        torch.__version__
    )


@pytest.mark.parametrize("comes_out", ["as another error", "not at all"])
def test_an_interrupt_that_a_callback_of_torch_s_met_ends_the_command_too(
    tmp_path, monkeypatch, capsys, comes_out
):
    def unheard(device, **sizes):
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        if comes_out == "as another error":
            raise RuntimeError("KeyboardInterrupt: <EMPTY MESSAGE>")
        yield {"first_bytes": 1}

    items = [replace(NAMED["01.monitor"], function=unheard), NAMED["07.three_recipes"]]
    monkeypatch.setattr(command, "experiments", lambda: items)
    # a worker of the tests ignores it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit) as stopped:
            command_line(monkeypatch, tmp_path)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    told = capsys.readouterr()
    assert (stopped.value.code, told.err) == (
        130,
        "interrupted: the figures measured until now are kept\n",
    )
    assert "07" not in told.out


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(tmp_path, monkeypatch):
    item = NAMED["01.monitor"]
    path = record(item, Run({"x_bytes": 1}, {}), command="c", folder=tmp_path, device="cpu")
    before = path.read_bytes()

    write, interrupted = type(path).write_text, [path, path.with_suffix(".new")]

    def half(self, text, **options):
        write(self, text[:10] if self in interrupted else text, **options)
        if self in interrupted:
            raise OSError("no space left")

    monkeypatch.setattr(type(path), "write_text", half)
    with pytest.raises(OSError):
        record(item, Run({"x_bytes": 2}, {}), command="c", folder=tmp_path, device="cpu")
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == before
    interrupted.pop()  # the file itself is never written to
    record(item, Run({"x_bytes": 3}, {}), command="c", folder=tmp_path, device="cpu")
    assert written(tmp_path)["experiments"]["01"]["monitor"]["figures"] == {"x_bytes": 3}


def test_figures_of_the_same_sizes_and_software_are_added_to_and_a_finished_run_replaces_them(
    tmp_path,
):
    def now(found, sizes=(1, 2), finished=False):
        run = Run(found, {"lengths": sizes})
        return json.loads(
            record(
                item, run, command="c", folder=tmp_path, device="cpu", finished=finished
            ).read_text()
        )

    item = NAMED["01.monitor"]
    now({"a_bytes": 1, "b_bytes": 2}, finished=True)
    assert now({"b_bytes": 3})["experiments"]["01"]["monitor"]["figures"] == {
        "a_bytes": 1,
        "b_bytes": 3,
    }
    other = now({"b_bytes": 4}, sizes=(1, 3))
    assert other["experiments"]["01"]["monitor"]["figures"] == {"a_bytes": 1, "b_bytes": 3}
    assert other["unfinished"]["01.monitor"]["figures"] == {"b_bytes": 4}
    assert now({"b_bytes": 5}, sizes=(1, 3), finished=True)["experiments"]["01"]["monitor"][
        "figures"
    ] == {"b_bytes": 5}
    assert now({"c_bytes": 6}, sizes=(1, 3), finished=True)["experiments"]["01"]["monitor"][
        "figures"
    ] == {"c_bytes": 6}


def test_the_same_figures_give_the_same_bytes_in_any_order(gpu_called, tmp_path):
    gpu_called("Example")
    one, other = NAMED["01.monitor"], NAMED["07.three_recipes"]

    def bytes_of(*pairs):
        for item, values in pairs:
            path = record(item, Run(values, {}), command="c", folder=tmp_path)
        found = path.read_bytes()
        path.unlink()
        return found

    first = bytes_of((one, {"x_bytes": 1, "y_bytes": 2}), (other, {"z_bytes": 3}))
    assert bytes_of((other, {"z_bytes": 3}), (one, {"y_bytes": 2, "x_bytes": 1})) == first
    assert first.endswith(b"}\n")


def test_live_figures_and_recorded_ones_stand_in_the_same_order(gpu_called, tmp_path, monkeypatch):
    gpu_called("Example")
    for item in EXPERIMENTS:
        live = figures(item, tmp_path)
        assert live.source == "live"
        record(item, small_run(f"{item.lesson}.{item.name}"), command="c", folder=tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: False)
            assert list(figures(item, tmp_path).values) == list(live.values)


def test_figures_are_ordered_by_number_not_by_letter(no_gpu, tmp_path):
    store(tmp_path, attention_sequence={f"fused_{n}_tensors_bytes": n for n in (1024, 2048, 512)})
    assert list(figures(NAMED["01.attention_sequence"], tmp_path).values.values()) == [
        512,
        1024,
        2048,
    ]


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
        assert "No recording yet" in text and "make gpu" in text
        assert "MB" not in text and not re.search(r"\b0\b", text)


def test_a_gpu_that_cannot_run_an_experiment_is_named_beside_the_recording(
    gpu_called, tmp_path, monkeypatch
):
    store(tmp_path, monitor={"model_live_bytes": 12_345_678})
    gpu_called("Tiny GPU")

    def too_large(item):
        raise MemoryError("there is no room for it")

    monkeypatch.setattr(Experiment, "run", too_large)
    found, problem = (
        figures(NAMED["01.monitor"], tmp_path),
        "Tiny GPU: MemoryError: there is no room for it",
    )
    assert (found.source, found.gpu, found.problem) == ("recorded", "Some GPU", problem)
    assert f"could not run it ({problem})" in repr(lessons.on_gpu("01", "monitor", folder=tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize(
    ("arguments", "version", "said"),
    [
        ([], None, "There is no CUDA GPU that torch can use here"),
        (["--check"], None, "There is no CUDA GPU that torch can use here"),
        (["--only", "nothing"], None, "No experiment has such a name"),
        (
            ["--device", "cpu"],
            "2.8.1+cu128",
            "torch is 2.8.1+cu128, and the course takes 2.9 or newer",
        ),
        (
            ["--device", "cpu"],
            None,
            "A CPU's figures are no recordings and take a --folder of their own",
        ),
    ],
)
def test_where_there_is_nothing_to_run_the_command_says_one_sentence_and_writes_nothing(
    arguments, version, said, monkeypatch, capsys
):
    monkeypatch.setattr(torch, "__version__", version or torch.__version__)
    monkeypatch.setattr(sys, "argv", ["course_lib.lessons", *arguments])
    before = FOLDER.exists() and sorted(FOLDER.iterdir())
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == f"{said}: nothing was run."  # which Python prints, and returns 1
    assert capsys.readouterr() == ("", "")
    assert (FOLDER.exists() and sorted(FOLDER.iterdir())) == before


def stored_problems(recording):
    """What a recording lacks, or holds and should not."""
    problems = [
        f"no {field}"
        for field in ("gpu", "gpu_memory_bytes", "experiments")
        if not recording.get(field)
    ]
    for lesson, named in recording.get("experiments", {}).items():
        for name, entry in named.items():
            title = f"{lesson}.{name}"
            problems += [f"{title}: no {field}" for field in PROVENANCE if field not in entry]
            if title not in NAMED or set(entry.get("sizes", {})) != set(NAMED[title].sizes):
                problems.append(f"{title} with these sizes is no experiment")
            if not re.fullmatch(r"\d{4}-\d\d-\d\d", str(entry.get("date"))):
                problems.append(f"{title}: date is not YYYY-MM-DD")
            for figure, value in entry.get("figures", {}).items():
                try:
                    check_figure(f"{title}: {figure}", value)
                except ValueError as error:
                    problems.append(str(error))
    return problems


def disagreeing(named):
    """Figures of lesson 01 from one GPU that cannot all be right: experiment -> its figures."""
    step, sequence, monitor, layer = (
        named.get(name, {})
        for name in ("decoder_step", "attention_sequence", "monitor", "korthikanti")
    )
    problems = []
    if "max_memory_reserved_bytes" in step:
        allocated, reserved = step["max_memory_allocated_bytes"], step["max_memory_reserved_bytes"]
        if (
            not max(step["meter_peak_bytes"], step["max_memory_requested_bytes"])
            <= allocated
            <= reserved
        ):
            problems.append("a step's meter, requested, allocated, reserved")
        if (
            abs(step["allocated_between_operators_bytes"] / step["meter_blocks_peak_bytes"] - 1)
            > 0.01
        ):
            problems.append("a step's meter, and the allocator between two operators")
    if layer.get("difference_bytes") or layer.get("statistic_bytes", 4) != 4:
        problems.append("Korthikanti's formula")
    for name, value in sequence.items():
        if (
            re.fullmatch("standard_.*_tensors_bytes", name)
            and not sequence[name.replace("standard", "fused")] < value
        ):
            problems.append(f"{name}: fused attention takes more")
    for name, value in monitor.items():
        if (
            name.endswith("_allocated_bytes")
            and value > monitor[name.replace("allocated", "reserved")]
        ):
            problems.append(f"{name}: more than is reserved")
    return problems


def test_every_stored_recording_has_all_its_fields_and_agrees_with_itself():
    stored = {
        path.name: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(FOLDER.glob("*.json"))
    }
    if not stored:
        pytest.skip("no recording is stored yet; `make gpu` makes one on a machine with a GPU")
    problems = {name: stored_problems(recording) for name, recording in stored.items()}
    for name, recording in stored.items():
        found = recording["experiments"].get("01", {}).items()
        problems[name] += disagreeing({experiment: entry["figures"] for experiment, entry in found})
    assert not any(problems.values()), problems


def test_a_stored_recording_that_lacks_something_is_found():
    entry = dict.fromkeys(PROVENANCE) | {
        "sizes": dict.fromkeys(TINY),
        "date": "2026-01-02",
        "figures": {"a_bytes": 0},
    }

    def recording(name="01.monitor", **changed):
        lesson, name = name.split(".")
        return {"gpu": "x", "gpu_memory_bytes": 1, "experiments": {lesson: {name: entry | changed}}}

    assert stored_problems(recording()) == []
    for field in ("gpu", "gpu_memory_bytes", "experiments"):
        assert stored_problems({key: value for key, value in recording().items() if key != field})
    for field in PROVENANCE:
        less = recording()
        less["experiments"]["01"]["monitor"] = {
            key: value for key, value in entry.items() if key != field
        }
        assert stored_problems(less)
    for wrong in ({"a_bytes": None}, {"a": 1}):
        assert stored_problems(recording(figures=wrong))
    assert stored_problems(recording("02.monitor")) and stored_problems(
        recording(sizes={"batch": 1})
    )
    assert stored_problems(recording(date="yesterday"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"monitor": {"step_allocated_bytes": 2, "step_reserved_bytes": 1}},
        {"korthikanti": {"difference_bytes": 1}},
        {"korthikanti": {"statistic_bytes": 2}},
        {"attention_sequence": {"standard_8_tensors_bytes": 1, "fused_8_tensors_bytes": 1}},
        {"decoder_step": {"max_memory_allocated_bytes": 1000}},
        {"decoder_step": {"allocated_between_operators_bytes": 1020}},
    ],
)
def test_figures_that_cannot_be_right_together_are_found(wrong):
    step = {
        f"max_memory_{kind}_bytes": 1100 + i
        for i, kind in enumerate(("requested", "allocated", "reserved"))
    }
    step |= {
        "meter_peak_bytes": 1000,
        "meter_blocks_peak_bytes": 1000,
        "allocated_between_operators_bytes": 1005,
    }
    good = {
        "monitor": {"step_allocated_bytes": 1, "step_reserved_bytes": 1},
        "korthikanti": {"difference_bytes": 0},
    }
    good["decoder_step"] = step
    assert disagreeing(good) == []
    assert disagreeing(good | {name: good.get(name, {}) | values for name, values in wrong.items()})


# Little room, times, kernels
# ------------------------------------------------------------------------------------------


def test_where_there_is_no_room_the_batch_is_halved_then_the_layers_and_the_sizes_are_told():
    tried, found = [], []

    def large(device, batch, layers):
        tried.append((batch, layers))
        yield {"first_bytes": batch * layers}
        if batch * layers > 2:
            raise (
                torch.OutOfMemoryError("CUDA out of memory"),
                RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"),
            )[batch == 2]
        yield {"second_bytes": 1}

    run = made_of(large).run("cpu", on_result=found.append)
    assert tried == [(4, 2), (2, 2), (2, 1)]
    assert run == found[-1] == Run({"first_bytes": 2, "second_bytes": 1}, {"batch": 2, "layers": 1})
    lengths = made_of(
        lambda device, lengths: _full(lengths),
        sizes={"lengths": (16, 64)},
        small={"lengths": (8, 32)},
    )
    with pytest.raises(
        MemoryError, match=r"^memory is too small at any size \(MemoryError: \(8, 32\)\)$"
    ):
        lengths.run("cpu")


def _full(what):
    raise MemoryError(what)


def test_an_error_that_is_no_lack_of_memory_is_raised_as_it_is():
    def wrong(device, **sizes):
        raise RuntimeError("shapes do not go together")

    with pytest.raises(RuntimeError, match="shapes"):
        made_of(wrong).run("cpu")


def test_more_host_memory_than_is_free_is_not_asked_for():
    need_host_memory(1)
    if sys.platform == "linux":
        with pytest.raises(
            MemoryError, match=r"^pinning needs 1000000 GB of host memory, but \d+ GB are free$"
        ):
            need_host_memory(10**15)


def test_a_recording_of_smaller_sizes_says_so_and_which_kernel_ran(no_gpu, tmp_path):
    sizes = NAMED["01.monitor"].sizes | {"batch": 1}
    store(
        tmp_path,
        sizes=sizes,
        notes={"attention": "CUDNN_ATTENTION"},
        monitor={"model_live_bytes": 1},
    )
    assert figures(NAMED["01.monitor"], tmp_path).smaller == {"batch": 1}
    text = repr(lessons.on_gpu("01", "monitor", folder=tmp_path))
    assert all(part in text for part in ("fit into memory: batch 1.", "attention: CUDNN_ATTENTION"))
    store(tmp_path, sizes=NAMED["01.monitor"].sizes, monitor={"model_live_bytes": 1})
    assert "fit into memory" not in repr(lessons.on_gpu("01", "monitor", folder=tmp_path))


def test_allocated_is_never_above_reserved_and_library_workspaces_are_counted_anew(monkeypatch):
    held, cleared = {"allocated": 10, "reserved": 100, "requested": 9}, []
    for name in ("init", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: held["allocated"])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: held["reserved"])
    monkeypatch.setattr(
        torch.cuda, "memory_stats", lambda _: {"requested_bytes.all.current": held["requested"]}
    )
    monkeypatch.setattr(
        torch._C, "_cuda_clearCublasWorkspaces", lambda: cleared.append(1), raising=False
    )
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    allocator = Allocator(torch.device("cuda"))
    held |= {"allocated": 60, "requested": 50}  # in what was reserved before
    assert (
        allocator.allocated_bytes(),
        allocator.reserved_bytes(),
        allocator.requested_bytes(),
        len(cleared),
    ) == (
        50,
        90,
        41,
        1,
    )


def test_arms_are_timed_in_turns_from_either_end_and_the_first_round_does_not_count(monkeypatch):
    called, now = [], [0.0]

    def arm(name, seconds):
        called.append(name)
        now[0] += seconds + 100 * (len(called) <= 2)

    monkeypatch.setattr(experiments.time, "perf_counter", lambda: now[0])
    taken = seconds(
        torch.device("cpu"), {"a": lambda: arm("a", 1), "b": lambda: arm("b", 2)}, rounds=1
    )
    assert called == ["b", "a", "a", "b"]
    assert taken == {"a_seconds": 1, "b_seconds": 2}


def test_the_kernel_that_attention_runs_is_named():
    q = torch.randn(1, 2, 8, 4, requires_grad=True)
    for backend, name in (
        (SDPBackend.FLASH_ATTENTION, "FLASH_ATTENTION"),
        (SDPBackend.MATH, "MATH"),
    ):
        with AttentionKernels() as kernels, sdpa_kernel(backend):
            functional.scaled_dot_product_attention(q, q, q).sum().backward()
        assert str(kernels) == name


# What a lesson shows
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "has", "lacks"), [("en", "Recorded on", "上的记录"), ("zh", "上的记录", "Recorded")]
)
def test_recorded_figures_are_labelled_as_recorded_in_the_language_chosen(
    fresh, no_gpu, tmp_path, chosen, has, lacks
):
    language(chosen)
    store(tmp_path, korthikanti={"saved_bytes": 12_345_678, "statistic_bytes": 4})
    text = repr(lessons.on_gpu("01", "korthikanti", folder=tmp_path))
    assert has in text and lacks not in text
    assert all(
        part in text
        for part in ("Some GPU", "2.11.0", "2026-01-02", "12.346 MB", "12,345,678", "4 B")
    )


def test_recordings_of_two_gpus_are_columns_and_bytes_that_differ_are_all_shown(
    fresh, no_gpu, gpu_called, tmp_path
):
    sizes = NAMED["01.korthikanti"].small
    for gpu, day, saved in (("Old GPU", "2026-01-02", 5), ("New GPU", "2026-01-03", 12_345_678)):
        figures_of_it = {"saved_bytes": saved, "statistic_bytes": 4}
        store(tmp_path, gpu, day, sizes, korthikanti=figures_of_it)
    shown = lessons.on_gpu("01", "korthikanti", folder=tmp_path)
    assert shown.figures["korthikanti"].gpu == "New GPU"  # the latest
    words = " ".join(repr(shown).split())
    assert "figure New GPU Old GPU bytes" in words
    assert "12.346 MB 5 B 12,345,678 / 5" in words
    assert repr(shown).count("Recorded on") == 2
    store(tmp_path, "Old GPU", "2026-01-02", {"batch": 1}, korthikanti={"saved_bytes": 5})
    assert "Old GPU" not in repr(lessons.on_gpu("01", "korthikanti", folder=tmp_path))
    store(tmp_path, "Old GPU", "2026-01-02", sizes, korthikanti={"saved_bytes": 5})
    gpu_called("New GPU")  # what it measures now replaces its recording
    live = repr(lessons.on_gpu("01", "korthikanti", folder=tmp_path))
    assert "Measured now on New GPU" in live and live.count("Recorded on Old GPU") == 1
    assert live.count("Recorded on") == 1


def test_live_figures_are_labelled_as_measured_now(gpu_called, tmp_path):
    gpu_called("This GPU")
    shown = lessons.on_gpu("01", "korthikanti", folder=tmp_path)
    assert (
        "Measured now on This GPU" in repr(shown)
        and "刚刚在 This GPU 上测得" in shown._repr_html_()
    )
    assert shown.figures["korthikanti"].values["difference_bytes"] == 0


def test_all_experiments_of_a_lesson_are_shown_if_none_is_named(no_gpu, tmp_path):
    assert list(lessons.on_gpu("01", folder=tmp_path).figures) == [
        item.name for item in lessons.experiments("01")
    ]
    assert list(lessons.on_gpu("01", "monitor", "korthikanti").figures) == [
        "monitor",
        "korthikanti",
    ]


def test_figures_are_shown_in_the_unit_of_their_name(no_gpu, tmp_path):
    store(
        tmp_path,
        decoder_step={
            "step_seconds": 0.0125,
            "step_flops": 3_000_000_000,
            "parameter_count": 1_000_000,
        },
    )
    text = repr(lessons.on_gpu("01", "decoder_step", folder=tmp_path))
    assert all(part in text for part in ("12.50 ms", "3.000 GFLOPs", "1,000,000"))


# On a GPU
# --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@each
def test_on_a_gpu_every_experiment_runs_at_small_sizes_and_is_read_back(
    item, tmp_path, monkeypatch
):
    run = item.run(small=True)
    path = record(item, run, command="make gpu", folder=tmp_path)
    assert stored_problems(json.loads(path.read_text(encoding="utf-8"))) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert figures(item, tmp_path).values == run.figures
    # the others agree at full size, where workspaces are small beside them
    if item.name in ("monitor", "korthikanti"):
        assert disagreeing({item.name: run.figures}) == []
