"""`python -m course_lib.budget`: options, output and errors; and the rates that price a step."""

import importlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import traceback
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from test_configs import LLAMA_3_8B, small

from course_lib.budget import (
    RATES,
    Estimate,
    Rates,
    Recipe,
    estimate,
    fit,
    run,
    this_machine,
    train_step,
)
from course_lib.budget import __main__ as command
from course_lib.budget.device_memory import context_bytes, kept_bytes, workspace_bytes
from course_lib.distributed import __main__ as ranks_command
from course_lib.labels import chinese, verbatim
from course_lib.memory import CachingAllocator
from course_lib.models import Decoder, deep_mlp, random_tokens
from course_lib.offload import HostStore
from course_lib.simulated import SimulatedDevice
from course_lib.workload import shape_of, workload_of

# ---- what a step costs


def estimate_of(recipe, tier="host", flops=6000, down=0, up=0, offloaded=0):
    return Estimate(recipe, 1, {}, {}, "", flops, down, up, tier, offloaded)


ROUND_RATES = Rates(1e3, 2e3, 1e2, host_bytes=28.0, flops_share=0.5, link_share=0.25)
ACTIVATIONS = {"offload_activations": True}  # two copies each way, which can all be hidden
ONE_COPY = {**ACTIVATIONS, "prefetch": 1, "in_flight": 1}
NO_COPY = {**ACTIVATIONS, "prefetch": 0, "in_flight": 0}
SGD_OFFLOADED = {"optimizer": "sgd", "offload_optimizer": 1.0}
BF16 = {"precision": "bf16", "offload_optimizer": 1.0}


@pytest.mark.parametrize(
    ("fields", "moved", "seconds"),
    [
        ({}, {}, 12),
        ({"precision": "autocast"}, {}, 6),
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
        ({"offload_optimizer": 1.0}, {"down": 12, "up": 12, "offloaded": 3}, 12 + 3),
        (BF16, {"down": 6, "up": 6, "offloaded": 3}, 6 + 3),
        (SGD_OFFLOADED, {"down": 12, "up": 12, "offloaded": 3}, 12 + 3 * (2 * 4 + 4) / 28),
        (
            {**ACTIVATIONS, "offload_optimizer": 1.0},
            {"down": 112, "up": 212, "offloaded": 3},
            12 + 3,
        ),
        # steps in backward have nothing to overlap with
        ({**BF16, "in_backward": True}, {"down": 100, "up": 100, "offloaded": 50}, 6 + 4 + 50 + 4),
    ],
)
def test_step_seconds_count_overlapping_compute_and_copies_once(fields, moved, seconds):
    assert ROUND_RATES.seconds(estimate_of(Recipe(**fields), **moved)) == pytest.approx(seconds)


TINY = {"vocabulary": 64, "hidden": 32, "heads": 2, "sequence": 16}
SIMULATED = {
    "none": (partial(deep_mlp, 12, 32), partial(torch.ones, 64, 32), 0.1),
    "layers": (partial(Decoder, layers=8, **TINY), partial(random_tokens, 2, 16, 64), 0.2),
}


def summed(model, batch):
    return (model(batch).sum(), len(batch)) if batch.is_floating_point() else model.loss_sum(batch)


@pytest.mark.parametrize(
    ("checkpoint", "ratio", "prefetch", "in_flight"),
    [("none", 1, None, None), ("none", 0.5, 0, 1), ("none", 4, 1, 2), ("layers", 2, 1, 2)],
)
def test_estimated_seconds_of_offloading_equal_simulated_device_time(
    checkpoint, ratio, prefetch, in_flight
):
    """Copies to the host take `ratio` times as long as forward."""
    make, make_batch, tolerance = SIMULATED[checkpoint]
    copies = {"prefetch": prefetch, "in_flight": in_flight, "min_bytes": 1 << 10}
    recipe = Recipe("fp32", "sgd", checkpoint=checkpoint, offload_activations=True, **copies)
    expected, flops = estimate(make, make_batch, recipe, loss_sum=summed, tier="host"), 1e9
    link = expected.bytes_down / (expected.flops / flops / 3) / ratio
    speeds = {"flops_per_second": flops, "up_bytes_per_second": link, "down_bytes_per_second": link}
    with SimulatedDevice(**speeds) as device:
        model, batch = device.move(make()), device.move(make_batch())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        start = device.seconds
        before = device.live_bytes - sum(p.nbytes for p in model.parameters())
        train_step(model, optimizer, batch, recipe, loss_sum=summed, store=HostStore())
    seconds = device.seconds - start
    rates = Rates(flops, flops, link)
    assert device.peak_bytes - before == expected.peak_bytes
    assert rates.seconds(expected) == pytest.approx(seconds, rel=tolerance)
    more = replace(expected, recipe=replace(recipe, prefetch=2, in_flight=2))
    assert rates.seconds(more) <= rates.seconds(expected)


def test_cuda_context_and_workspace_bytes_depend_on_device():
    assert workspace_bytes("H100") == workspace_bytes("H200") == 2 * 32 << 20
    assert workspace_bytes("A100") == workspace_bytes("T4") == 2 * 8320 * 1024
    assert kept_bytes("MI300X") == kept_bytes("laptop") == 0
    with pytest.raises(TypeError, match="context_bytes must be"):
        Rates(1, 1, 1, capability=(8, 9))


def test_rates_of_this_machine_are_positive_and_name_their_source():
    rates = this_machine(0.01)
    assert all(0 < count < math.inf for count in (rates.fp32_flops, rates.link_bytes))
    assert str(torch.__version__) in rates.source and "在这台机器上测得" in chinese(rates.source)


# ---- the command

SIZES = "--hidden 64 --heads 2 --vocabulary 100 --sequence 32"
SMALL = f"{SIZES} --layers 2 --batch 4 --precision fp32"
ONE_LAYER = f"{SIZES} --layers 1 --batch 1 --optimizer sgd".split()
MODEL = {"hidden": 64, "heads": 2, "vocabulary": 100, "sequence": 32, "layers": 1, "fused": True}
STEP = partial(Decoder, **MODEL), partial(random_tokens, 1, 32, 100)
HAN = re.compile("[\u3400-\u9fff]")


def result_of(capsys, *arguments, status=0):
    """Return what the command prints as JSON."""
    assert command.main([*arguments, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_command_prints_and_plots_text_in_selected_language(tmp_path, capsys, monkeypatch, fresh):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setenv("COURSE_LABELS", "strict")  # English that has no Chinese is an error
    picture, outputs = tmp_path / "steps.png", []
    arguments = [*ONE_LAYER, "--details", "--device", "A100", "--count", "tensors", "--check"]
    arguments.append("--quick")
    for language in ("en", "zh"):
        monkeypatch.setenv("COURSE_LANG", language)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Glyph")  # a font lacks a Chinese character
            assert command.main([*arguments, "--budget", "0.5MB", "--plot", str(picture)]) == 0
        outputs.append(capsys.readouterr().out)
    english, translated = outputs
    assert "from the baseline to the cheapest recipe:" in english and not HAN.search(english)
    numbers = [sorted(re.findall(r"\d[\d,.]*\d", text)) for text in outputs]
    assert "从基线到代价最小的配方" in translated and numbers[0] == numbers[1]
    assert picture.read_bytes().startswith(b"\x89PNG")
    (ax,) = pyplot.gcf().axes
    words = [*ax.get_legend().get_texts(), *ax.get_xticklabels()[1:], ax.title]
    assert [each.get_text() for each in words if not HAN.search(each.get_text())] == []


def test_command_reports_lowest_peak_if_no_recipe_fits(capsys):
    kept = kept_bytes("A100")
    arguments = [*ONE_LAYER, "--device", "A100", "--precision", "fp32", "--budget", f"{kept + 99}B"]
    assert command.main(arguments) == 1
    printed = capsys.readouterr().err
    assert "58,560 parameters" in printed and "the largest category is" in printed
    assert "so 99 bytes are left" in printed and "fits into 99 bytes" in printed
    least = re.search(r"the least found is ([\d,]+) bytes", printed)[1]
    result = result_of(capsys, *arguments, status=1)
    assert result["recipes"] == [] and "the lowest peak found" in result["error"]
    assert f"{result['least_bytes']:,}" == least


@pytest.mark.parametrize(
    ("option", "typed", "meant"),
    [
        ("budget", "1.5 kB", 1500),
        ("budget", "2e9", 2 * 10**9),
        ("budget", "24gi", 24 * 2**30),
        ("budget", "3B", 3),
        ("parameters", "1.5b", 1.5e9),
        ("device", "NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("device", "5090", "RTX 5090"),
        ("device", "a100-80gb", "A100"),
        ("optimizer", "AdamW", "adam"),
        ("optimizer", "paged_adamw_8bit", "adam8bit"),
        ("precision", "bfloat16", "bf16"),
    ],
)
def test_command_options_accept_common_spellings_of_units_and_names(option, typed, meant):
    given = command.arguments().parse_args([f"--{option}", typed])
    assert getattr(given, option) == meant


# ---- errors

INVALID = [
    (f"{SMALL} {options}", message)
    for options, message in [
        ("--budget 80Gob", "got 'Gob' in '80Gob'"),
        ("--budget 1GB --base nf4", "--base cannot be used without --lora"),
        ("--budget 1GB --lora 4", "--precision fp32 cannot be combined with --lora"),
        ("--budget 1GB --lora 4 --ranks 2", "--ranks 2 cannot be combined with --lora"),
        ("--budget lots", "got 'lots'"),
        ("--budget 24", "24GB (1 GB is 10**9 bytes) or 24GiB (1 GiB is 2**30 bytes)?"),
        ("--plot steps.foo", "got 'steps.foo'"),
        ("--plot nowhere/steps.png", "got 'nowhere/steps.png'"),
        ("--plot folder.png", "got the folder 'folder.png'"),
        ("--plot", "expected one argument"),
        ("--what", "unrecognized arguments: --what"),
        ("--devise T4", "did you mean --device?"),
        ("config.json", "did you mean --config config.json?"),
        ("--device X", "got 'X'"),
        ("--device H10", "did you mean 'H100'?"),
        ("--precision fp16", "fp16 needs loss scaling"),
        ("--device t4 --budget 1MB", "--budget must be more than the 463,732,736 bytes"),
        ("--device laptop", "--budget is missing"),
        ("--budget 1GB --lora 0", "between 1 and 10,000,000, got '0'"),
        ("--budget 1GB --lora-targets q_proj", "--lora-targets cannot be used without --lora"),
        ("--budget 1GB --for trainr", "did you mean 'trainer'?"),
        ("--budget 1GB --for trainer", "must be a model of transformers"),
        ("--budget 1GB --for trainer --ranks 2", "ranks must be 1 "),
        ("--budget 1GB --for fsdp2", "ranks must be at least 2"),
        ("--budget 1GB --for fsdp2 --lora 4", "--for fsdp2 cannot be combined with --lora"),
        ("--budget 1GB --for fsdp2 --ranks 2 --precision bf16-only", "precision must be"),
        ("--budget 1GB --for torch --ranks 2", "'fsdp2' can run several ranks"),
        ("--budget 1GB --ranks 2 --optimizer lion", "--optimizer must be adam when --ranks is 2"),
        ("--budget 1GB --check --ranks 2", "--check cannot be combined with --ranks 2"),
    ]
]
FOR_RANKS = (
    "--model nowhere:make",
    "--mode ddp,zero3",
    "--steps 0",
    "--every 2",
    "--ranks 2 --save here",
    "--ranks 2 --micro-batches 3",
)
INVALID += [
    (f"{SMALL} --budget 1GB --heads 3", "divisor of hidden"),
    (f"{SMALL} --budget 1GB --device laptop --count reserved", "no caching allocator"),
    (f"{SMALL} --budget 1GB --device T4 --for torch --tier file", "--tier must be host for a"),
    (
        f"{SMALL} --budget 1GB --batch 100000 --sequence 10000000 --hidden 10000000",
        "fewer than 2**63",
    ),
    ("--sequence 8", "--parameters, or --hidden and --layers, got none"),
    ("--config a.json --hidden 3", "got --config and --hidden"),
    ("--hidden 64 --layers 1 --batch 2", "--sequence is missing"),
    ("--hidden 64 --layers 1 --sequence 8", "--batch is missing"),
    ("--hidden 64 --sequence 8 --batch 1", "the size is missing"),
    ("--model json:dumps", "a function that returns a batch is missing"),
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


def error_of(capfd, *arguments):
    """Return the exit status and the lines on stderr, which include PyTorch's log."""
    with pytest.raises(SystemExit) as stopped:
        command.main(["--precision", "fp32", *arguments])
    output = capfd.readouterr()
    assert output.out == ""
    return stopped.value.code, output.err.splitlines()


@pytest.mark.parametrize(("arguments", "message"), INVALID)
def test_command_rejects_invalid_options_in_one_line(arguments, message, folder, capfd):
    status, [line] = error_of(capfd, *arguments.split())
    assert status == 2 and line.startswith("error: ") and message in line


def test_errors_of_both_commands_are_translated_to_chinese(folder, capfd, monkeypatch, fresh):
    monkeypatch.setenv("COURSE_LANG", "zh")
    monkeypatch.setattr(ranks_command, "end_on_signals", lambda: None)
    monkeypatch.setattr(ranks_command.os, "_exit", sys.exit)

    def error_of_ranks(*arguments):
        monkeypatch.setattr(sys, "argv", ["command", *arguments])
        with pytest.raises(SystemExit, match="2"):
            ranks_command.main.__wrapped__()
        return capfd.readouterr().err.strip()

    errors = [error_of(capfd, *options.split())[1][0] for options, _ in INVALID]
    assert errors[0].startswith("错误：参数 --budget：") and "'80Gob' 里的 'Gob'" in errors[0]
    errors += [error_of_ranks(*options.split()) for options in FOR_RANKS]
    english = re.compile(r"\b[a-z]{2,} [a-z]{2,} [a-z]{2,}\b")
    assert [each for each in errors if not each.startswith("错误：") or english.search(each)] == []


@pytest.mark.parametrize("module", [command, ranks_command])
def test_command_help_is_fully_translated_to_chinese(module, fresh, monkeypatch):
    monkeypatch.setenv("COURSE_LANG", "zh")
    monkeypatch.setenv("COURSE_LABELS", "strict")
    monkeypatch.setenv("COLUMNS", "400")
    parser = module.arguments()
    usage, *lines = parser.format_help().splitlines()
    assert usage.startswith("用法：") and "选项:" in lines and "显示这份说明" in "".join(lines)
    words = [parser.description, parser.epilog, *(action.help for action in parser._actions)]
    assert [each for each in words if each and not HAN.search(each)] == []


@pytest.mark.parametrize("parameters", [5e6, 1e9, 7e9, 70e9])
def test_generated_decoder_shape_has_requested_parameter_count(parameters):
    hidden, layers = shape_of(parameters, 32_000)
    assert hidden % 128 == 0
    assert hidden / 128 == pytest.approx(layers, abs=4)
    count = 12 * layers * hidden**2 + 32_000 * hidden
    assert count == pytest.approx(parameters, rel=0.05)
    wider = hidden + 128  # no number of layers of this width comes closer
    others = [12 * n * wider**2 + 32_000 * wider for n in range(1, layers + 1)]
    assert min(abs(other - parameters) for other in others) >= abs(count - parameters)


# ---- models

CHEAP = ["--sequence", "32", "--batch", "2", "--precision", "fp32", "--optimizer", "sgd"]


def test_command_with_config_file_measures_cheapest_recipe(config_file, capsys):
    """All recipes use PyTorch's attention, which is the default of transformers."""
    arguments = ["--config", f"{config_file(small(LLAMA_3_8B))}", *CHEAP, "--device", "laptop"]
    result = result_of(capsys, *arguments, "--budget", "10MB", "--check")
    model = workload_of(command.arguments().parse_args(arguments)).make_model()
    assert {layer.attention.fused for layer in model.layers} == {True}
    assert result["parameters"] == sum(p.numel() for p in model.parameters())
    found, steps, check = result["recipes"], result["way"], result["check"]
    assert found[0]["recipe"] == steps[-1]["recipe"] == {"optimizer": "sgd", "attention": None}
    assert all(each["recipe"]["attention"] is None for each in (*found, *steps))
    assert check["predicted_bytes"] == found[0]["peak_bytes"] <= 10**7
    if check["device"] == "cpu":
        assert check["measured_bytes"] == check["predicted_bytes"] <= check["allocator_bytes"]


USER_CODE = """
import torch
from torch import nn

from course_lib.attention import flash_attention

def batch():
    return torch.ones(6, 8)

def model_with(loss):
    def make():
        return type("Net", (nn.Linear,), {"loss": loss})(8, 8)
    make.make_batch = batch
    return make

@model_with
def net(model, x):
    return model(x).square().mean()

@model_with
def wrong_shapes(model, x):
    return model(x[:, :3]).mean()

class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        raise LookupError("not in the table")

@model_with
def fails_in_backward(model, x):
    return Backward.apply(model(x)).mean()

@model_with
def branches_on_values(model, x):
    if model(x).sum() > 0:
        return x.mean()

@model_with
def passes_wrong_argument(model, x):
    return flash_attention(model(x)[0], x, x)

class UNet(nn.Module):
    # Blocks with a skip connection and BatchNorm, which are not in a list.
    def __init__(self):
        super().__init__()
        for name in ("down", "middle", "up"):
            block = nn.Sequential(nn.Linear(8, 99), nn.BatchNorm1d(99), nn.Tanh(), nn.Linear(99, 8))
            self.add_module(name, block)

    def loss_sum(self, x):
        first = self.down(x)
        return self.up(self.middle(first) + first).square().sum(), len(x)

UNet.make_batch = lambda: torch.ones(600, 8)

def without_loss():
    return nn.Linear(8, 8)

def with_loss():
    return nn.Linear(8, 8)

def no_batch():
    return net()

def fails():
    raise ValueError("first line\\nsecond line")

without_loss.make_batch = with_loss.make_batch = fails.make_batch = batch
with_loss.loss_sum = lambda model, batch: (model(batch).sum(), len(batch))
no_batch.make_batch = lambda: open("nowhere.txt")
"""


@pytest.fixture
def user_code(folder, monkeypatch):
    """Write the module `user_code`, and return a function from a text to the number of its line."""
    (folder / "user_code.py").write_text(USER_CODE, encoding="utf-8")
    monkeypatch.delitem(sys.modules, "user_code", raising=False)
    lines = USER_CODE.splitlines()
    return lambda text: next(number for number, line in enumerate(lines, 1) if text in line)


UNET = ["--model", "user_code:UNet", "--optimizer", "sgd"]
UNET += ["--device", "laptop", "--precision", "fp32"]


def test_command_lists_untried_techniques_until_block_names_are_given(user_code, capsys):
    result = result_of(capsys, *UNET, "--budget", "1GB")
    no_checkpoint, one_micro_batch = result["not_tried"]
    assert no_checkpoint.endswith("(--blocks in the command): 'down', 'middle', 'up'")
    assert "BatchNorm" in one_micro_batch
    budget = f"{result['recipes'][0]['peak_bytes'] * 2 // 3}B"
    result = result_of(capsys, *UNET, "--budget", budget, "--blocks", "down, m*,up")
    assert "blocks" in result["recipes"][0]["recipe"] and len(result["not_tried"]) == 1


def test_infeasible_budget_advice_names_only_techniques_that_model_supports(user_code, capsys):
    """Checkpoints need block names, BatchNorm excludes micro-batches, and there is no attention."""
    assert command.main([*UNET, "--budget", "100kB"]) == 1
    printed = capsys.readouterr().err
    assert "no checkpoint was tried" in printed and "is activation;" in printed
    fields = printed.rpartition("as fields of Recipe: ")[2].strip().split(", ")
    assert set(fields) <= {"precision", "offload_activations"} and "precision" in fields


def test_command_rejects_block_names_that_match_no_module(user_code, capfd):
    status, [line] = error_of(capfd, *UNET, "--budget", "1GB", "--blocks", "down,left.*")
    assert status == 2 and "got 'left.*'; the model has 'down'" in line


def test_code_suggested_for_model_without_loss_computes_valid_loss(user_code, capfd):
    status, [line] = error_of(capfd, "--model", "user_code:without_loss", "--budget", "1GB")
    assert status == 2 and "set loss_sum as an attribute of the function that --model names" in line
    assert command.main(["--model", "user_code:with_loss", "--budget", "1GB"]) == 0
    names = {"torch": torch}
    exec(line[line.index("def loss_sum") :], names)
    batch = torch.ones(6, 8), torch.zeros(6).long()
    total, weight = names["loss_sum"](torch.nn.Linear(8, 3), batch)
    assert total.dim() == 0 and total.requires_grad and weight == 6


@pytest.mark.parametrize(
    ("name", "text", "function", "message"),
    [
        ("wrong_shapes", "model(x[:, :3])", "wrong_shapes", "RuntimeError: .*reduction dim"),
        ("fails_in_backward", "raise LookupError", "backward", "LookupError: not in the table"),
        ("fails", "raise ValueError", "fails", "ValueError: first line"),
        ("no_batch", 'open("nowhere.txt")', "<lambda>", "FileNotFoundError: "),
    ],
)
def test_command_error_in_user_code_names_file_and_line(
    name, text, function, message, user_code, capfd
):
    """The command prints two lines. In Python the error keeps its type, and gets the line as a note
    if its traceback does not end there."""
    place = f"user_code.py, line {user_code(text)}, in {function}"
    status, lines = error_of(capfd, "--model", f"user_code:{name}", "--budget", "1GB")
    assert status == 1 and len(lines) == 2 and text in lines[1]
    assert re.match(f"error: {re.escape(place)}: {message}", lines[0]) and "Fake" not in lines[0]
    make = getattr(sys.modules["user_code"], name)
    search = partial(fit, budget_bytes=10**6, progress=False)
    for call in (partial(estimate, recipe=Recipe()), partial(run, recipe=Recipe()), search):
        with pytest.raises(Exception) as raised:
            call(make, make.make_batch)
        assert type(raised.value).__name__ == message.partition(":")[0]
        assert raised.value.__context__ is None  # a traceback shows the error only once
        last = traceback.extract_tb(raised.value.__traceback__)[-1]
        notes = getattr(raised.value, "__notes__", [])
        if last.filename.endswith("user_code.py"):
            assert (last.lineno, notes) == (user_code(text), [])
        else:
            assert len(notes) == 1 and notes[0].startswith(f"{place}: ") and text in notes[0]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("branches_on_values", ".sum() > 0", "the step reads the values of a tensor"),
        ("passes_wrong_argument", "flash_attention(model", "q must be a dense tensor"),
    ],
)
def test_command_rejects_unsupported_user_code_in_one_line(name, text, message, user_code, capfd):
    status, [line] = error_of(capfd, "--model", f"user_code:{name}", "--budget", "1GB")
    assert status == 2 and line.startswith("error: ") and message in line and "Fake" not in line
    assert re.search(" Change | must ", line)
    assert f"user_code.py, line {user_code(text)}, in {name}" in line


@pytest.mark.parametrize(
    ("text", "error"),
    [("import nonexistent_module", "ModuleNotFoundError"), ("x = (1", "SyntaxError")],
)
def test_command_error_while_importing_user_module_names_line(
    text, error, folder, monkeypatch, capfd
):
    (folder / "invalid.py").write_text(f"\n{text}\n", encoding="utf-8")
    monkeypatch.delitem(sys.modules, "invalid", raising=False)
    status, lines = error_of(capfd, "--model", "invalid:model", "--budget", "1GB")
    assert status == 1 and lines[0].startswith(f"error: invalid.py, line 2: {error}: ")


def test_error_in_model_defined_in_notebook_names_cell_line():
    cell = "import torch\ndef make():\n    model = torch.nn.Linear(2, 2)\n"
    cell += "    model.loss = lambda x: (x @ x).sum()\n    return model\n"
    names = {"__name__": "__main__"}
    exec(compile(cell, "ipykernel_1234/5678.py", "exec"), names)
    with pytest.raises(RuntimeError) as raised:
        estimate(names["make"], lambda: torch.ones(3, 2), Recipe())
    assert raised.value.__notes__[-1] == "a cell, line 4, in <lambda>"


def test_estimate_suppresses_pytorch_log_messages_about_symbolic_tensors(user_code, caplog):
    make = importlib.import_module("user_code").wrong_shapes
    with pytest.raises(RuntimeError):
        estimate(make, make.make_batch, Recipe())
    assert not caplog.records


# ---- devices


def test_command_counts_reserved_memory_cublas_workspace_and_cuda_context(capsys):
    arguments = [*ONE_LAYER, "--device", "H100", "--budget", "1GB"]
    result = result_of(capsys, *arguments)
    recipe = Recipe(**result["recipes"][0]["recipe"])
    best = estimate(*STEP, recipe, tier="host", kind="cuda")
    allocator = CachingAllocator()
    allocator.replay(best.trace())
    reserved = allocator.memory_stats()["reserved_bytes.all.peak"]
    expected = {"tensors": best.peak_bytes, "reserved": reserved}
    expected |= {"workspace": 64 << 20, "context": context_bytes("H100")}
    assert expected.items() <= result["on_device"].items()
    assert result["room_bytes"] == 10**9 - expected["workspace"] - expected["context"]
    assert result["left_bytes"] == result["room_bytes"] - reserved


def test_default_budget_equals_device_memory_and_limits_reserved_bytes(capsys):
    arguments = [*ONE_LAYER, "--device", "RTX 4090"]
    result, memory = result_of(capsys, *arguments), RATES["RTX 4090"].memory_bytes
    assert result["budget_bytes"] == memory and result["leaner"] == []
    assert result["room_bytes"] == memory - kept_bytes("RTX 4090")
    assert (result["device"], result["kind"], result["count"]) == ("RTX 4090", "cuda", "reserved")
    result = result_of(capsys, *arguments, "--budget", "3MB", "--count", "tensors")
    peak = result["recipes"][0]["peak_bytes"]
    assert result["room_bytes"] == 3_000_000 == peak + result["left_bytes"] >= peak


def test_command_adds_recipe_with_spare_memory_if_cheapest_fills_budget(capsys):
    """The budget is the peak of the cheapest recipe, which therefore leaves nothing."""
    peak = estimate(*STEP, Recipe("bf16", "sgd", attention=None)).peak_bytes
    result = result_of(capsys, *ONE_LAYER, "--device", "laptop", "--budget", f"{peak}B")
    [leaner] = result["leaner"]
    assert (result["kind"], result["on_device"]) == ("cpu", None)
    assert result["recipes"][0]["peak_bytes"] == peak
    assert leaner["peak_bytes"] <= 0.95 * peak and leaner not in result["recipes"]


OUTPUT = "from course_lib.labels.command import Parser, run_command; run_command(lambda: {})"


@pytest.mark.parametrize("printed", ["print('x')", "Parser().parse_args(['--help'])"])
def test_command_exits_without_traceback_on_closed_pipe_or_full_disk(printed):
    def run_with(output):
        started = [sys.executable, "-c", OUTPUT.format(printed)]
        done = subprocess.run(started, stdout=output, stderr=subprocess.PIPE, text=True)
        return done.returncode, done.stderr

    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe, Path("/dev/full").open("w") as full:
        assert run_with(pipe) == (128 + signal.SIGPIPE, "")
        status, error = run_with(full)
    assert status == 1 and re.fullmatch("error: .*No space left on device.*\n", error)


def test_device_option_this_uses_measured_rates_of_current_machine(monkeypatch, capsys):
    rates = Rates(1e9, 2e9, 3e9, verbatim("measured, in a test"))
    monkeypatch.setattr(command, "this_machine", lambda: rates)
    assert command.main([*ONE_LAYER, "--device", "this", "--budget", "1GB", "--details"]) == 0
    assert "measured, in a test" in capsys.readouterr().out


def test_check_option_rejects_step_larger_than_machine_memory(monkeypatch, capfd):
    monkeypatch.setattr("course_lib.budget.check._memory", lambda device: 1000)
    _, [line] = error_of(capfd, *ONE_LAYER, "--budget", "1GB", "--check")
    assert "device cpu has only 1,000 bytes" in line
