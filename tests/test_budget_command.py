"""`python -m course_lib.budget`, and the rates by which recipes are priced."""

import importlib
import json
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import traceback
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import foreign_models
import pytest
import torch

from course_lib import labels
from course_lib.budget import (
    RATES,
    Estimate,
    InfeasibleBudget,
    Rates,
    Recipe,
    answer,
    estimate,
    fit,
    measured_rates,
    report,
    run,
    this_machine,
    train_step,
)
from course_lib.budget import __main__ as command
from course_lib.budget import rates as rates_module
from course_lib.budget.device_memory import context_bytes, kept_bytes, workspace_bytes
from course_lib.budget.waterfall import steps_to
from course_lib.distributed import __main__ as ranks_command
from course_lib.labels import chinese, verbatim
from course_lib.memory import CachingAllocator, symbolic
from course_lib.memory.show import bytes_text, decimal
from course_lib.models import Decoder, deep_mlp, random_tokens
from course_lib.offload import HostStore
from course_lib.simulated import SimulatedDevice
from course_lib.workload import shape_of, workload_of

# ---- what a step costs


def priced(recipe, tier="host", flops=6000, down=0, up=0, below=0):
    return Estimate(recipe, 1, {}, {}, "", flops, down, up, tier, below)


ROUND = Rates(1e3, 2e3, 1e2, host_bytes=28.0, flops_share=0.5, link_share=0.25)
ACTIVATIONS = {"offload_activations": True}  # two copies each way, which all may be hidden
ONE_COPY = {**ACTIVATIONS, "prefetch": 1, "in_flight": 1}
NO_COPY = {**ACTIVATIONS, "prefetch": 0, "in_flight": 0}
SGD_BELOW = {"optimizer": "sgd", "offload_optimizer": 1.0}
BF16 = {"precision": "bf16", "offload_optimizer": 1.0}


@pytest.mark.parametrize(
    ("fields", "moved", "seconds"),
    [
        ({}, {}, 12),
        ({"precision": "bf16"}, {}, 6),
        ({}, {"tier": "file", "down": 50, "up": 25}, 12 + 3),
        # forward takes 4 seconds and backward 8, and the copies run at the same time
        (ACTIVATIONS, {"down": 100, "up": 200}, 12),
        (ACTIVATIONS, {"down": 500, "up": 750}, 20 + 30),
        (ACTIVATIONS, {"tier": "file", "down": 250, "up": 200}, 12 + 18),
        (ONE_COPY, {"down": 100, "up": 200}, 12 + 2 + 4),  # half of the copies are not hidden
        ({**ONE_COPY, "prefetch": 2}, {"down": 100, "up": 200}, 12 + 2),
        (NO_COPY, {"down": 100, "up": 200}, 12 + 4 + 8),
        # inputs of blocks are copied one at a time, and forward is a quarter
        ({**ONE_COPY, "checkpoint": "layers"}, {"down": 100, "up": 250}, 12 + 1 + 1),
        # Adam's update reads and writes 28 bytes per parameter; SGD has no moments
        ({"offload_optimizer": 1.0}, {"down": 12, "up": 12, "below": 3}, 12 + 3),
        (BF16, {"down": 6, "up": 6, "below": 3}, 6 + 3),
        (SGD_BELOW, {"down": 12, "up": 12, "below": 3}, 12 + 3 * (2 * 4 + 4) / 28),
        ({**ACTIVATIONS, "offload_optimizer": 1.0}, {"down": 112, "up": 212, "below": 3}, 12 + 3),
        # steps in backward have nothing to overlap with
        ({**BF16, "in_backward": True}, {"down": 100, "up": 100, "below": 50}, 6 + 4 + 50 + 4),
    ],
)
def test_a_step_takes_the_seconds_of_its_parts_that_do_not_overlap(fields, moved, seconds):
    assert ROUND.seconds(priced(Recipe(**fields), **moved)) == pytest.approx(seconds)


TINY = {"vocabulary": 64, "hidden": 32, "heads": 2, "sequence": 16}
CLOCKS = {
    "none": (partial(deep_mlp, 12, 32), partial(torch.ones, 64, 32), 0.1),
    "layers": (partial(Decoder, layers=8, **TINY), partial(random_tokens, 2, 16, 64), 0.2),
}


def summed(model, batch):
    return (model(batch).sum(), len(batch)) if batch.is_floating_point() else model.loss_sum(batch)


@pytest.mark.parametrize(
    ("checkpoint", "ratio", "prefetch", "in_flight"),
    [
        ("none", 1, None, None),
        ("none", 1, 1, 1),
        ("none", 0.5, 0, 1),
        ("none", 2, 2, 1),
        ("none", 4, 1, 2),
        ("layers", 0.5, 1, 2),
        ("layers", 2, 1, 2),
    ],
)
def test_copies_hide_and_hold_as_clock_and_memory_of_the_simulated_device_say(
    checkpoint, ratio, prefetch, in_flight
):
    """Copies down take `ratio` times as long as forward."""
    make, of, tolerance = CLOCKS[checkpoint]
    copies = {"prefetch": prefetch, "in_flight": in_flight, "min_bytes": 1 << 10}
    recipe = Recipe("fp32", "sgd", checkpoint=checkpoint, offload_activations=True, **copies)
    expected, flops = estimate(make, of, recipe, loss_sum=summed, tier="host"), 1e9
    link = expected.bytes_down / (expected.flops / flops / 3) / ratio
    speeds = {"flops_per_second": flops, "up_bytes_per_second": link, "down_bytes_per_second": link}
    with SimulatedDevice(**speeds) as device:
        model, batch = device.move(make()), device.move(of())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        begins = device.seconds
        before = device.live_bytes - sum(p.nbytes for p in model.parameters())
        train_step(model, optimizer, batch, recipe, loss_sum=summed, store=HostStore())
    taken = device.seconds - begins
    rates = Rates(flops, flops, link)
    assert device.peak_bytes - before == expected.peak_bytes
    assert rates.seconds(expected) == pytest.approx(taken, rel=tolerance)
    more = replace(expected, recipe=replace(recipe, prefetch=2, in_flight=2))
    assert rates.seconds(more) <= rates.seconds(expected)


def test_every_device_has_a_source_and_its_memory_in_the_bytes_that_it_has():
    assert all(rates.source for rates in RATES.values())
    assert RATES["H200"].memory_bytes == 150_109_880_320 and RATES["laptop"].memory_bytes is None
    sizes = {"RTX 4090": 24, "A100": 80, "A100 40GB": 40, "H100": 80, "H200": 141}
    for name, gigabytes in sizes.items():
        assert 1 < RATES[name].memory_bytes / (gigabytes * 10**9) < 1.08


def test_cublas_keeps_more_on_hopper_and_nothing_is_known_to_be_kept_without_cuda():
    assert workspace_bytes("H100") == workspace_bytes("H200") == 2 * 32 << 20
    assert workspace_bytes("A100") == workspace_bytes("T4") == 2 * 8320 * 1024
    assert kept_bytes("MI300X") == kept_bytes("laptop") == 0


def test_context_is_measured_on_hopper_and_marked_as_an_assumption_elsewhere():
    gpus = {name: rates for name, rates in RATES.items() if rates.capability}
    assumed = {name for name, rates in gpus.items() if "assumed" in rates.context_source}
    assert gpus.keys() - assumed == {"H100", "H200"} and len({kept_bytes(n) for n in gpus}) > 2


@pytest.mark.parametrize(("typo", "nearest"), [("H10", "H100"), ("RTX 409", "RTX 4090")])
def test_unknown_device_is_an_error_with_the_nearest_name(typo, nearest):
    with pytest.raises(ValueError, match=f"^device must be one of .*did you mean '{nearest}'"):
        kept_bytes(typo)


def test_own_device_states_what_cuda_keeps():
    own = replace(RATES["L4"], memory_bytes=10**10, context_bytes=10**8, context_source="mine")
    assert kept_bytes(own) == 10**8 + 2 * 8320 * 1024
    with pytest.raises(TypeError, match="context_bytes must be"):
        Rates(1, 1, 1, capability=(8, 9))


OWN_DEVICE = """
from course_lib.budget import Rates
def card():
    return Rates(1e13, 1e14, 1e10, memory_bytes=10**9, capability=(8, 0), context_bytes=10**8)
def other():
    return "H100"
"""


def test_command_takes_the_rates_of_an_own_device(tmp_path, monkeypatch, capsys):
    (tmp_path / "own_device.py").write_text(OWN_DEVICE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    asked = [*ONE_LAYER, "--device", "own_device:card"]
    assert command.main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["device"], told["kind"], told["budget_bytes"]) == (asked[-1], "cuda", 10**9)
    assert told["room_bytes"] == 10**9 - 10**8 - 2 * 8320 * 1024
    assert command.main([*asked, "--details"]) == 0
    assert "the user's own device" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command.main([*asked[:-1], "own_device:other"])
    assert "--device must be a function that returns Rates" in capsys.readouterr().err


def test_this_machine_is_measured_once_and_kept(tmp_path, monkeypatch):
    calls = []
    measured = Rates(1.5, 2.5, 3.5, rates_module._measured_on(rates_module._here()))
    monkeypatch.setattr(rates_module, "measured_rates", lambda: (calls.append(1), measured)[1])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert this_machine() == this_machine() == measured and len(calls) == 1
    assert "在这台机器上测得" in chinese(this_machine().source), "after it was read from the file"
    file = tmp_path / "course_lib" / "rates.json"
    kept = json.loads(file.read_text("utf-8"))
    assert kept["bf16_flops"] == 2.5 and str(torch.__version__) in kept["measured_on"]
    for spoiled in ("{", "[]", json.dumps(kept | {"measured_on": "another"})):
        file.write_text(spoiled, encoding="utf-8")
        assert this_machine().link_bytes == 3.5
    assert len(calls) == 4
    blocked = tmp_path / "file"
    blocked.write_text("", encoding="utf-8")
    assert this_machine(blocked / "below.json").fp32_flops == 1.5  # not kept, and no error


def test_what_is_measured_are_rates():
    found = measured_rates(0.01)
    rates = found.fp32_flops, found.bf16_flops, found.link_bytes, found.host_bytes
    assert all(0 < rate < math.inf for rate in rates)
    assert (found.memory_bytes is None) == (not torch.cuda.is_available())


# ---- the command

SIZES = "--hidden 64 --heads 2 --vocabulary 100 --sequence 32"
SMALL = f"{SIZES} --layers 2 --batch 4 --precision fp32"
ONE_LAYER = f"{SIZES} --layers 1 --batch 1 --optimizer sgd".split()
MODEL = {"hidden": 64, "heads": 2, "vocabulary": 100, "sequence": 32, "layers": 1, "fused": True}
STEP = partial(Decoder, **MODEL), partial(random_tokens, 1, 32, 100)
HAN = re.compile("[\u3400-\u9fff]")


def test_the_command_prints_and_draws_in_the_language_that_is_asked_for(
    tmp_path, capsys, monkeypatch, fresh
):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    said, found, search = [], {}, answer.fit

    def once(*asked, **options):  # a search speaks no language
        name = options["framework"]
        found[name] = found.get(name) or search(*asked, **options)
        return found[name]

    monkeypatch.setattr(answer, "fit", once)
    monkeypatch.setenv("COURSE_LABELS", "strict")  # English that has no Chinese is an error
    picture = tmp_path / "way.png"
    asked = ["--details", "--device", "A100", "--count", "tensors", "--check", "--budget", "0.5MB"]
    for spoken in ("en", "zh"):
        monkeypatch.setenv("COURSE_LANG", spoken)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Glyph")  # which is missing
            assert command.main([*ONE_LAYER, *asked, "--plot", str(picture)]) == 0
        said.append(capsys.readouterr().out)
    assert "from the baseline to the cheapest recipe:" in said[0] and not HAN.search(said[0])
    numbers = [sorted(re.findall(r"\d[\d,.]*\d", text)) for text in said]
    assert "从基线到代价最小的配方" in said[1] and numbers[0] == numbers[1]
    assert picture.read_bytes().startswith(b"\x89PNG")
    (ax,) = pyplot.gcf().axes
    words = [*ax.get_legend().get_texts(), *ax.get_xticklabels()[1:], ax.title]
    assert all(HAN.search(each.get_text()) for each in words)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib's, if the text of the budget is far outside
        assert command.main([*ONE_LAYER, *asked[:-1], "1TB", "--plot", str(picture)]) == 0
    (ax,) = pyplot.gcf().axes
    (budget,) = (each for each in ax.texts if "↑" in each.get_text())
    assert budget.xy == (1, ax.get_ylim()[1]) and not ax.lines


def test_the_command_says_what_the_least_is_to_people_and_to_programs(capsys):
    kept = kept_bytes("A100")
    asked = [*ONE_LAYER, "--device", "A100", "--precision", "fp32", "--budget", f"{kept + 99}B"]
    assert command.main(asked) == 1
    said = capsys.readouterr().err
    assert "58,560 parameters" in said and "the largest category is" in said
    sentence = f"keep {bytes_text(kept)} of the {bytes_text(kept + 99)}, so 99 bytes are left"
    assert said.count(sentence) == 1 and "fits into 99 bytes" in said
    least = re.search(r"the least found is ([\d,]+) bytes", said)[1]
    assert command.main([*asked, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["recipes"] == [] and "the least peak found" in told["error"]
    assert f"{told['least_bytes']:,}" == least


@pytest.mark.parametrize(
    ("option", "typed", "meant"),
    [
        ("budget", "80GiB", 80 * 2**30),
        ("budget", "1.5 kB", 1500),
        ("budget", "2e9", 2 * 10**9),
        ("budget", "24gi", 24 * 2**30),
        ("budget", "3B", 3),
        ("parameters", "7e9", 7e9),
        ("parameters", "1.5b", 1.5e9),
        ("device", "NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("device", "5090", "RTX 5090"),
        ("device", "A100 40 GB", "A100 40GB"),
        ("device", "a100-80gb", "A100"),
        ("optimizer", "AdamW", "adam"),
        ("optimizer", "adamw_bnb_8bit", "adam8bit"),
        ("optimizer", "paged_adamw_8bit", "adam8bit"),
        ("optimizer", "Paged_AdamW", "adam"),
        ("precision", "bfloat16", "bf16"),
    ],
)
def test_units_and_names_are_taken_as_people_type_them(option, typed, meant):
    given = command.arguments().parse_args([f"--{option}", typed])
    assert getattr(given, option) == meant


# ---- what the command refuses

IN_BOTH_LANGUAGES = [
    (f"{SMALL} {given}", told)
    for given, told in [
        ("--budget 80Gob", "got 'Gob' in '80Gob'"),
        ("--budget 1GB --base nf4", "--base cannot be used without --lora"),
        ("--budget 1GB --lora 4", "--precision fp32 cannot be combined with --lora"),
        ("--budget 1GB --lora 4 --ranks 2", "--ranks 2 cannot be combined with --lora"),
        ("--budget lots", "got 'lots'"),
        ("--budget 0MB", "got '0MB'"),
        ("--budget -5GB", "got '-5GB'"),
        ("--budget 24", "24GB (10**9 bytes each) or 24GiB (2**30 bytes each)?"),
        ("--layers 0", "got '0'"),
        ("--parameters many", "got 'many'"),
        ("--plot way.foo", "got 'way.foo'"),
        ("--plot nowhere/way.png", "got 'nowhere/way.png'"),
        ("--plot folder.png", "got the folder 'folder.png'"),
        ("--plot", "expected one argument"),
        ("--tier below", "'below'"),
        ("--what", "unrecognized arguments: --what"),
        ("--devise T4", "did you mean --device?"),
        ("config.json", "did you mean --config config.json?"),
        ("--device X", "got 'X'"),
        ("--device H10", "did you mean 'H100'?"),
        ("--precision fp16", "fp16 needs loss scaling"),
        ("--device t4 --budget 1MB", "--budget must be more than the 463,732,736 bytes"),
        ("--device laptop", "--budget is missing"),
        ("--budget 1GB --for trainer", "must be a model of transformers"),
        ("--budget 1GB --for fsdp2", "ranks must be at least 2"),
        ("--budget 1GB --for torch --ranks 2", "'fsdp2' can run several ranks"),
        ("--budget 1GB --check --ranks 2", "--check cannot be combined with --ranks 2"),
    ]
]
OF_RANKS = (
    "--model nowhere:make",
    "--mode ddp,zero3",
    "--steps 0",
    "--every 2",
    "--ranks 2 --save here",
    "--ranks 2 --micro-batches 3",
)
IN_ENGLISH = [
    (f"{SMALL} --budget 1GB --heads 3", "divisor of hidden"),
    (f"{SMALL} --budget 1GB --device laptop --count reserved", "no caching allocator"),
    (
        f"{SMALL} --budget 1GB --batch 10000000 --sequence 10000000 --hidden 10000000",
        "fewer than 2**63",
    ),
    ("--sequence 8", "--parameters, or --hidden and --layers, got none"),
    ("--config a.json --hidden 3", "got --config and --hidden"),
    ("--hidden 64 --layers 1 --batch 2", "--sequence is missing"),
    ("--hidden 64 --layers 1 --sequence 8", "--batch is missing"),
    ("--hidden 64 --sequence 8 --batch 1", "the size is missing"),
    ("--model json:dumps", "--batch-from is missing"),
    ("--model m:f --sequence 8", "--sequence cannot be combined with --model"),
    ("--config c.json --vocabulary 8", "--vocabulary cannot be combined with --config"),
    ("--parameters 1e6 --batch-from m:f", "--batch-from cannot be combined with --parameters"),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "folder.png").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def refused(capfd, *arguments):
    """The exit status, and all that is on stderr, PyTorch's log with it."""
    with pytest.raises(SystemExit) as stopped:
        command.main(["--precision", "fp32", *arguments])
    told = capfd.readouterr()
    assert told.out == ""
    return stopped.value.code, told.err.splitlines()


@pytest.mark.parametrize(("arguments", "told"), [*IN_BOTH_LANGUAGES, *IN_ENGLISH])
def test_the_command_refuses_in_one_sentence(arguments, told, folder, capfd):
    status, [line] = refused(capfd, *arguments.split())
    assert status == 2 and line.startswith("error: ") and told in line


def test_every_sentence_of_an_error_in_the_catalog_is_said_in_chinese_by_a_command(
    users, capfd, monkeypatch, fresh
):
    monkeypatch.setenv("COURSE_LANG", "zh")
    said = [refused(capfd, *given.split())[1][0] for given, _ in IN_BOTH_LANGUAGES]
    assert said[0].startswith("错误：参数 --budget：") and "'80Gob' 里的 'Gob'" in said[0]
    monkeypatch.setattr(ranks_command.signal, "signal", lambda *_: None)
    monkeypatch.setattr(ranks_command, "end_with_torchrun", lambda: None)
    monkeypatch.setattr(ranks_command.os, "_exit", sys.exit)
    for given in OF_RANKS:
        monkeypatch.setattr(sys, "argv", ["command", *given.split()])
        with pytest.raises(SystemExit, match="2"):
            ranks_command.main.__wrapped__()
        said.append(capfd.readouterr().err.strip())
    english = re.compile(r"\b[a-z]{2,} [a-z]{2,} [a-z]{2,}\b")
    assert [each for each in said if not each.startswith("错误：") or english.search(each)] == []
    said += refused(capfd, "--model", "of_a_user:without_loss", "--budget", "1GB")[1]
    monkeypatch.setattr(sys, "argv", ["command", "--ranks", "2", "--model", "of_a_user:model"])
    model = importlib.import_module("of_a_user").model = partial(foreign_models.Pictures)
    model.loss_sum = lambda model, batch: (model(batch).sum(), len(batch))
    rows = partial(torch.ones, 4, 8)
    for make_batch, split in (
        (lambda: (rows(), rows()[:3]), None),
        (lambda: (rows(), [1, 2, 3, 4]), None),
        (lambda: "tokens", None),
        (rows, lambda batch, parts: [batch]),
    ):
        model.make_batch, model.split = make_batch, split
        with pytest.raises(SystemExit, match="2"):
            ranks_command.main.__wrapped__()
        said.append(capfd.readouterr().err.strip())
    sentences = [re.sub(r"\\\{\w+\\\}", ".+", re.escape(zh)) for zh in labels.sentences().values()]
    assert [each for each in sentences if not re.search(each, "\n".join(said))] == []


@pytest.mark.parametrize("commanded", [command, ranks_command])
def test_a_command_refuses_a_language_that_does_not_exist(commanded, fresh, monkeypatch, capsys):
    monkeypatch.setenv("COURSE_LANG", "xx")
    with pytest.raises(SystemExit, match="2"):
        commanded.arguments()
    told = capsys.readouterr().err
    assert told.startswith("error: COURSE_LANG must be ") and told.endswith(", got 'xx'\n")


@pytest.mark.parametrize("commanded", [command, ranks_command])
def test_the_help_is_chinese_down_to_the_words_of_argparse(commanded, fresh, monkeypatch):
    monkeypatch.setenv("COURSE_LANG", "zh")
    monkeypatch.setenv("COURSE_LABELS", "strict")
    monkeypatch.setenv("COLUMNS", "400")
    parser = commanded.arguments()
    usage, *lines = parser.format_help().splitlines()
    assert usage.startswith("用法：") and "选项:" in lines and "显示这份说明" in "".join(lines)
    words = [parser.description, parser.epilog, *(action.help for action in parser._actions)]
    assert [each for each in words if each and not HAN.search(each)] == []


@pytest.mark.parametrize("parameters", [5e6, 1e9, 7e9, 70e9])
def test_the_shape_has_about_as_many_parameters_as_asked_for(parameters):
    hidden, layers = shape_of(parameters, 32_000)
    assert hidden % 128 == 0
    assert hidden / 128 == pytest.approx(layers, abs=4)
    count = 12 * layers * hidden**2 + 32_000 * hidden
    assert count == pytest.approx(parameters, rel=0.05)
    wider = hidden + 128  # of which no number of layers comes nearer
    others = [12 * n * wider**2 + 32_000 * wider for n in range(1, layers + 1)]
    assert min(abs(other - parameters) for other in others) >= abs(count - parameters)


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(checkpoint="layers", blocks="layers.*", first_blocks=2, attention="flash"),
        Recipe(update="foreach", attention=None, checkpoint="segments", segments=2, head_chunk=8),
        Recipe(offload_activations=True, min_bytes=10, optimizer="momentum", in_backward=True),
    ],
)
def test_the_way_leads_from_the_plain_step_to_the_recipe(recipe):
    steps = steps_to(recipe)
    assert steps[-1] == recipe and len(set(steps)) == len(steps) > 1
    assert steps[0].changed_fields().keys() <= {"precision", "optimizer", "update", "attention"}
    assert steps[0].attention == (None if recipe.attention is None else "standard")


# ---- which model

LLAMA = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
}
CHEAP = ["--sequence", "32", "--batch", "2", "--precision", "fp32", "--optimizer", "sgd"]


def test_a_config_is_read_and_its_cheapest_step_is_taken(tmp_path, capsys):
    """The baseline of a config is PyTorch's attention, as transformers' default, and no recipe
    replaces it by the course's tiles."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA), encoding="utf-8")
    asked = ["--config", f"{config}", *CHEAP, "--device", "laptop"]
    assert command.main([*asked, "--budget", "10MB", "--json", "--check"]) == 0
    told = json.loads(capsys.readouterr().out)
    make_model = workload_of(command.arguments().parse_args(asked)).make_model
    assert {layer.attention.fused for layer in make_model().layers} == {True}
    assert told["parameters"] == sum(p.numel() for p in make_model().parameters())
    assert told["budget_bytes"] == 10**7 and told["recipes"][0]["peak_bytes"] <= 10**7
    plain = {"optimizer": "sgd", "attention": None}
    assert told["recipes"][0]["recipe"] == told["way"][-1]["recipe"] == plain
    assert all(each["recipe"]["attention"] is None for each in (*told["recipes"], *told["way"]))
    check = told["check"]
    assert check["predicted_bytes"] == told["recipes"][0]["peak_bytes"]
    if check["device"] == "cpu":
        assert check["measured_bytes"] == check["predicted_bytes"] <= check["allocator_bytes"]


USERS_MODULE = """
import torch
from torch import nn

from course_lib.attention import flash_attention

kept = torch.ones(8)

def batch():
    return torch.ones(6, 8)

def of(loss):
    def make():
        return type("Net", (nn.Linear,), {"loss": loss})(8, 8)
    make.make_batch = batch
    return make

@of
def net(model, x):
    return model(x).square().mean()

@of
def shapes(model, x):
    return model(x[:, :3]).mean()

class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        raise LookupError("not in the table")

@of
def late(model, x):
    return Backward.apply(model(x)).mean()

@of
def looking(model, x):
    if model(x).sum() > 0:
        return x.mean()

@of
def numbers(model, x):
    return torch.as_tensor(model(x).detach().numpy().sum())

@of
def before(model, x):
    return (model(x) * kept).mean()

@of
def routed(model, x):
    return model(x[x.sum(1) > 0]).mean()

@of
def asking(model, x):
    return flash_attention(model(x)[0], x, x)

class Skipping(nn.Module):
    # A chain of blocks with a skip connection and BatchNorm, and without a list of its blocks.
    def __init__(self):
        super().__init__()
        for name in ("down", "middle", "up"):
            block = nn.Sequential(nn.Linear(8, 99), nn.BatchNorm1d(99), nn.Tanh(), nn.Linear(99, 8))
            self.add_module(name, block)

    def loss_sum(self, x):
        first = self.down(x)
        return self.up(self.middle(first) + first).square().sum(), len(x)

def skipping():
    return Skipping()

skipping.make_batch = lambda: torch.ones(600, 8)

def without_loss():
    return nn.Linear(8, 8)

def with_loss():
    return nn.Linear(8, 8)

def alone():
    return net()

def no_batch():
    return net()

def quits():
    raise ValueError("first line\\nsecond line")

without_loss.make_batch = with_loss.make_batch = quits.make_batch = batch
with_loss.loss_sum = lambda model, batch: (model(batch).sum(), len(batch))
no_batch.make_batch = lambda: open("nowhere.txt")
"""


@pytest.fixture
def users(folder, monkeypatch):
    """The module `of_a_user` in the folder where the command is called; text -> the number of its
    line."""
    (folder / "of_a_user.py").write_text(USERS_MODULE, encoding="utf-8")
    monkeypatch.delitem(sys.modules, "of_a_user", raising=False)
    lines = USERS_MODULE.splitlines()
    return lambda text: next(number for number, line in enumerate(lines, 1) if text in line)


@pytest.mark.parametrize(
    "which", [["of_a_user:alone", "--batch-from", "of_a_user:batch"], ["of_a_user:net"]]
)
def test_a_function_of_the_users_says_what_the_model_is(users, which, capsys):
    asked = ["--model", *which, "--budget", "1GB", "--device", "laptop", "--precision", "fp32"]
    assert command.main([*asked, "--details"]) == 0
    printed = capsys.readouterr().out
    assert "72 parameters; 6 samples" in printed and "the cheapest recipe: Recipe()" in printed


SKIPPING = ["--model", "of_a_user:skipping", "--device", "laptop", "--precision", "fp32"]
SKIPPING += ["--optimizer", "sgd"]


def test_the_command_says_what_was_not_tried_and_takes_the_names_of_blocks(users, capsys):
    assert command.main([*SKIPPING, "--budget", "1GB"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("no checkpoint was tried") == printed.count("only one micro-batch") == 1
    assert command.main([*SKIPPING, "--budget", "1GB", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    no_checkpoint, one_micro_batch = told["not_tried"]
    assert no_checkpoint.endswith("(--blocks in the command): 'down', 'middle', 'up'")
    assert "BatchNorm" in one_micro_batch
    budget = ["--budget", f"{told['recipes'][0]['peak_bytes'] * 2 // 3}B"]
    named = [*SKIPPING, *budget, "--blocks", "down, m*,up"]
    assert command.main(named) == 0
    printed = capsys.readouterr().out
    assert "no checkpoint" not in printed and "of down m* up" in printed
    assert command.main([*named, "--json"]) == 0
    assert "blocks" in json.loads(capsys.readouterr().out)["recipes"][0]["recipe"]


def test_the_advice_at_the_end_is_what_the_model_allows(users, capsys):
    """Checkpoints need names, there is no attention and no head, and BatchNorm mixes samples."""
    assert command.main([*SKIPPING, "--budget", "100kB"]) == 1
    printed = capsys.readouterr().err
    assert "no checkpoint was tried" in printed and "is activation;" in printed
    fields = printed.rpartition("as fields of Recipe: ")[2].strip().split(", ")
    assert set(fields) <= {"precision", "offload_activations"} and "precision" in fields
    assert command.main([*SKIPPING, "--budget", "100kB", "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["not_tried"]) == 2


def test_names_of_blocks_that_match_nothing_are_refused(users, capfd):
    status, [line] = refused(capfd, *SKIPPING, "--budget", "1GB", "--blocks", "down,left.*")
    assert status == 2 and "got 'left.*'; the model has 'down'" in line


def test_a_model_without_a_loss_is_refused_and_the_advice_can_be_followed(users, capfd):
    status, [line] = refused(capfd, "--model", "of_a_user:without_loss", "--budget", "1GB")
    assert status == 2 and "as the attribute loss_sum of the function that --model names" in line
    assert command.main(["--model", "of_a_user:with_loss", "--budget", "1GB"]) == 0
    names = {"torch": torch}
    exec(line[line.index("def loss_sum") :], names)
    batch = torch.ones(6, 8), torch.zeros(6).long()
    total, weight = names["loss_sum"](torch.nn.Linear(8, 3), batch)
    assert total.dim() == 0 and total.requires_grad and weight == 6


@pytest.mark.parametrize(
    ("which", "text", "function", "said"),
    [
        ("shapes", "model(x[:, :3])", "shapes", "RuntimeError: .*reduction dim"),
        ("late", "raise LookupError", "backward", "LookupError: not in the table"),
        ("quits", "raise ValueError", "quits", "ValueError: first line"),
        ("no_batch", 'open("nowhere.txt")', "<lambda>", "FileNotFoundError: "),
    ],
)
def test_what_the_users_own_code_raises_is_told_with_the_users_line(
    which, text, function, said, users, capfd
):
    """The command tells it in two lines; in Python the error keeps its type, and has the line as a
    note where its traceback does not end there."""
    place = f"of_a_user.py, line {users(text)}, in {function}"
    status, lines = refused(capfd, "--model", f"of_a_user:{which}", "--budget", "1GB")
    assert status == 1 and len(lines) == 2 and text in lines[1]
    assert re.match(f"error: {re.escape(place)}: {said}", lines[0]) and "Fake" not in lines[0]
    make = getattr(sys.modules["of_a_user"], which)
    search = partial(fit, budget_bytes=10**6, progress=False)
    for take in (partial(estimate, recipe=Recipe()), partial(run, recipe=Recipe()), search):
        with pytest.raises(Exception) as raised:
            take(make, make.make_batch)
        assert type(raised.value).__name__ == said.partition(":")[0]
        assert raised.value.__context__ is None  # nothing is shown twice
        ends = traceback.extract_tb(raised.value.__traceback__)[-1]
        notes = getattr(raised.value, "__notes__", [])
        if ends.filename.endswith("of_a_user.py"):
            assert (ends.lineno, notes) == (users(text), [])
        else:
            assert len(notes) == 1 and notes[0].startswith(f"{place}: ") and text in notes[0]


@pytest.mark.parametrize(
    ("which", "text", "said"),
    [
        ("looking", ".sum() > 0", "the step reads values of its data"),
        ("numbers", ".numpy()", "the step reads values of its data"),
        ("routed", "[x.sum(1) > 0]", "as tokens.chunk(experts) does"),
        ("before", "* kept", "got a tensor that was created earlier"),
        ("asking", "flash_attention(model", "q must be a dense tensor"),
    ],
)
def test_what_is_refused_in_the_users_code_is_one_sentence_that_names_the_line(
    which, text, said, users, capfd
):
    status, [line] = refused(capfd, "--model", f"of_a_user:{which}", "--budget", "1GB")
    assert status == 2 and line.startswith("error: ") and said in line and "Fake" not in line
    assert re.search(" Change | must ", line)
    assert f"of_a_user.py, line {users(text)}, in {which}" in line


@pytest.mark.parametrize(
    ("text", "said"),
    [("import nowhere_to_be_found", "ModuleNotFoundError"), ("x = (1", "SyntaxError")],
)
def test_a_module_that_fails_is_told_with_its_line(text, said, folder, monkeypatch, capfd):
    (folder / "own_import.py").write_text(f"\n{text}\n", encoding="utf-8")
    monkeypatch.delitem(sys.modules, "own_import", raising=False)
    status, lines = refused(capfd, "--model", "own_import:model", "--budget", "1GB")
    assert status == 1 and lines[0].startswith(f"error: own_import.py, line 2: {said}: ")


def test_a_line_of_a_notebook_is_that_of_a_cell():
    cell = "import torch\ndef make():\n    model = torch.nn.Linear(2, 2)\n"
    cell += "    model.loss = lambda x: (x @ x).sum()\n    return model\n"
    names = {"__name__": "__main__"}
    exec(compile(cell, "ipykernel_1234/5678.py", "exec"), names)
    with pytest.raises(RuntimeError) as raised:
        estimate(names["make"], lambda: torch.ones(3, 2), Recipe())
    assert raised.value.__notes__[-1] == "a cell, line 4, in <lambda>"


def test_pytorchs_log_of_symbolic_tensors_is_silent_for_an_estimate_only(users, caplog):
    make = importlib.import_module("of_a_user").shapes
    with pytest.raises(RuntimeError):
        estimate(make, make.make_batch, Recipe())
    assert not caplog.records
    with pytest.raises(RuntimeError), symbolic():
        make().loss(make.make_batch())
    assert caplog.records


@pytest.mark.parametrize(("take", "blocks"), [(estimate, None), (run, "layers.*")])
def test_bytes_that_no_schedule_fits_are_named_as_the_recipe_names_them(take, blocks):
    make = partial(Decoder, vocabulary=61, hidden=32, heads=4, layers=2, sequence=8)
    recipe = Recipe(checkpoint="optimal", schedule_bytes=1, blocks=blocks)
    with pytest.raises(InfeasibleBudget, match=r"^schedule_bytes is 1, but ") as raised:
        take(make, partial(random_tokens, 2, 8, 61), recipe)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_no_bar_is_left_on_the_line_of_an_error(users, monkeypatch, capsys):
    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with pytest.raises(SystemExit):
        command.main(["--model", "of_a_user:shapes", "--budget", "1GB"])
    bar, _, error = capsys.readouterr().err.rpartition("error: ")
    assert "recipes" in bar and error.startswith("of_a_user.py, line ")
    *_, over, end = bar.split("\r")
    assert over.isspace() and end == ""  # the bar is written over


# ---- on a device


def test_what_a_gpu_holds_apart_from_tensors_is_shown_and_in_none_of_the_figures(capsys):
    assert command.main([*ONE_LAYER, "--device", "H100", "--budget", "1GB", "--details"]) == 0
    printed = capsys.readouterr().out
    recipe = eval(re.search(r"the cheapest recipe: (Recipe\(.*\))", printed)[1], {"Recipe": Recipe})
    best = estimate(*STEP, recipe, tier="host", kind="cuda")
    assert f"peak {best.peak_bytes:,} bytes" in printed
    allocator = CachingAllocator()
    allocator.replay(best.trace())
    reserved = allocator.memory_stats()["reserved_bytes.all.peak"]
    room = 10**9 - (64 << 20) - context_bytes("H100")
    left = room - reserved
    assert printed.count(f"so {bytes_text(room)} are left for the step") == 1
    assert f" into {bytes_text(room)}; " in printed
    first, table = printed.split("GPU memory of a step of the cheapest recipe:")
    rows = (line for line in first.splitlines() if line.endswith(str(best.recipe)))
    row = next(line for line in rows if not line.startswith("torch"))
    assert f"{best.peak_bytes / 1e6:,.1f}  " in row and f"  {left / 1e6:,.1f}  " in row
    for line, count in (
        ("tensors at the peak", best.peak_bytes),
        ("reserved, by the allocator's rules", reserved),
        ("workspace that cuBLAS keeps", 64 << 20),
        ("the context of CUDA", context_bytes("H100")),
        ("of the 1,000.0 MB,", left),
    ):
        [row] = [row for row in table.splitlines() if row.startswith(line)]
        assert f" {count / 1e6:,.1f} " in f"{row} "


def test_the_column_of_what_is_left_counts_what_must_fit(capsys):
    asked = [*ONE_LAYER, "--device", "H100", "--budget", "3MB", "--count", "tensors"]
    assert command.main([*asked, "--json"]) == 0
    peak = json.loads(capsys.readouterr().out)["recipes"][0]["peak_bytes"]
    assert command.main(asked) == 0
    printed = capsys.readouterr().out
    header, row, *_ = printed[printed.index("peak (MB)  reserved") :].splitlines()
    assert header.split("  ")[2].strip() == "left (MB)"
    assert float(row.split()[2]) == round((3_000_000 - peak) / 1e6, 1)
    assert "MB more than the available" not in printed


def test_a_device_has_the_budget_and_a_search_goes_by_what_is_reserved(capsys):
    asked = [*ONE_LAYER, "--device", "RTX 4090", "--json"]
    assert command.main(asked) == 0
    told = json.loads(capsys.readouterr().out)
    memory, first = RATES["RTX 4090"].memory_bytes, told["recipes"][0]
    assert told["budget_bytes"] == told["rates"]["memory_bytes"] == memory and told["leaner"] == []
    assert told["room_bytes"] == memory - kept_bytes("RTX 4090")
    assert (told["device"], told["kind"], told["count"]) == ("RTX 4090", "cuda", "reserved")
    assert told["on_device"]["tensors"] == first["peak_bytes"] < first["reserved_bytes"]
    assert told["on_device"]["reserved"] == first["reserved_bytes"]
    assert command.main([*asked, "--budget", "3MB", "--count", "tensors"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["room_bytes"] == 3_000_000 >= told["recipes"][0]["peak_bytes"]


def test_where_the_cheapest_leaves_little_a_recipe_that_leaves_more_is_shown(capsys):
    """The budget is the cheapest recipe's own peak, so that it leaves nothing."""
    peak = estimate(*STEP, Recipe("bf16", "sgd", attention=None)).peak_bytes
    asked = [*ONE_LAYER, "--device", "laptop", "--budget", f"{peak}B"]
    assert command.main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    [leaner] = told["leaner"]
    assert (told["kind"], told["on_device"]) == ("cpu", None)
    assert told["recipes"][0]["peak_bytes"] == peak
    assert leaner["peak_bytes"] <= 0.95 * peak and leaner not in told["recipes"]
    assert command.main(asked) == 0
    assert "the cheapest recipe leaves less than 5% of the budget" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("recipe", "largest", "additions", "ends"),
    [
        (Recipe(checkpoint="layers"), "activation", "head_chunk ranks", "head_chunk, ranks"),
        (Recipe(in_backward=True), "activation", "checkpoint in_backward", "Recipe: checkpoint"),
        (Recipe(**BF16), "optimizer", "ranks optimizer", "optimizer state; .*: optimizer, ranks"),
        (Recipe(precision="bf16"), "activation", "", "or more ranks"),
        (Recipe(ranks=4, precision="bf16"), "parameter", "micro_batches", "or more ranks"),
    ],
)
def test_advice_names_the_allowed_techniques_that_act_on_the_largest_category(
    recipe, largest, additions, ends
):
    at_peak = {"other": 2, largest: 3, "buffer": 1}
    advice = report._advice(Estimate(recipe, 1, at_peak, {}, "", 1, 0, 0), additions.split())
    assert re.search(f"{ends}$", advice)


OUTPUT = "from course_lib.labels.command import run_command; run_command(lambda: print('x' * {}))"


@pytest.mark.parametrize(
    "arguments",
    [["-c", OUTPUT.format(1)], ["-c", OUTPUT.format(10**6)], ["-m", command.__package__, "--help"]],
    ids=["short", "long", "help"],
)
def test_a_command_ends_quietly_in_a_closed_pipe_and_in_one_line_on_a_full_disk(arguments):
    def ended(output):
        done = subprocess.run(
            [sys.executable, *arguments], stdout=output, stderr=subprocess.PIPE, text=True
        )
        return done.returncode, done.stderr

    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe, Path("/dev/full").open("w") as full:
        assert ended(pipe) == (128 + signal.SIGPIPE, "")
        assert ended(full) == (
            1,
            "error: the output cannot be written ([Errno 28] No space left on device)\n",
        )


def test_progress_is_a_line_at_times_where_there_is_no_terminal(monkeypatch, capsys):
    now = iter([0.0, 10.0, 31.0, 40.0, 70.0])
    monkeypatch.setattr(command.time, "monotonic", lambda: next(now))
    watch = command._lines_of_progress()
    for _ in range(4):
        watch(Recipe())
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("recipes estimated in 31 s: 1; now: ")
    assert second.startswith("recipes estimated in 70 s: 3; now: ")


def test_the_rates_of_this_machine_can_be_asked_for(monkeypatch, capsys):
    rates = Rates(1e9, 2e9, 3e9, verbatim("measured, in a test"))
    monkeypatch.setattr(command, "this_machine", lambda: rates)
    assert command.main([*ONE_LAYER, "--device", "this", "--budget", "1GB", "--details"]) == 0
    assert "measured, in a test" in capsys.readouterr().out


def test_a_step_that_is_larger_than_the_machine_is_not_taken(monkeypatch, capfd):
    monkeypatch.setattr("course_lib.budget.check._memory", lambda device: 1000)
    _, [line] = refused(capfd, *ONE_LAYER, "--budget", "1GB", "--check")
    assert "this machine has 1,000 bytes" in line


@pytest.mark.parametrize(
    ("value", "shown"), [(0, "0.000"), (1234.5, "1,234.500"), (1.23e-5, "0.0000123")]
)
def test_a_small_number_is_shown_with_three_digits_instead_of_zeros(value, shown):
    assert decimal(value) == shown
