"""The answer of `python -m course_lib.budget`: three lines, a script that runs, and `--for`."""

import ast
import json
import re
import warnings

import pytest

from course_lib.budget import Recipe, estimate
from course_lib.budget import __main__ as command
from course_lib.budget.scripts import FRAMEWORKS
from course_lib.memory import MemoryMeter

SIZES = ["--hidden", "128", "--layers", "3", "--heads", "2", "--vocabulary", "500"]
SIZES += ["--sequence", "64", "--batch", "4"]
LAPTOP = ["--device", "laptop", "--quick"]
USERS = """
import torch
from torch import nn

def make_model():
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)))

class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        blocks = (nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(6))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 97, "hidden_size": 128, "intermediate_size": 352}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4))

tokens = torch.ones(2, 4, dtype=torch.long)
llama.make_batch = lambda: {"input_ids": tokens.clone(), "labels": tokens.clone()}
Normed.make_batch = lambda: torch.ones(4, 8, 40, 40)
Normed.loss_sum = lambda model, batch: (model(batch).square().sum(), len(batch))
make_model.make_batch = lambda: torch.ones(512, 256)
make_model.loss_sum = lambda model, batch: (model(batch).square().sum(), len(batch))
"""


@pytest.fixture
def told(capsys):
    """A function that returns what the command prints."""

    def run(*arguments):
        assert command.main([*arguments]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as exit:
            command.main([*arguments])
        return exit.value.code, capsys.readouterr().err

    return run


@pytest.fixture
def users(tmp_path, monkeypatch):
    (tmp_path / "users_net.py").write_text(USERS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)


def script_in(printed):
    """The script in the output: from the line after its heading to what is no longer code."""
    _, _, rest = printed.partition(" at the peak:\n\n")
    parts = rest.split("\n\n")
    for count in range(len(parts), 0, -1):
        try:
            ast.parse("\n\n".join(parts[:count]))
        except SyntaxError:
            continue
        return "\n\n".join(parts[:count])
    raise AssertionError(printed)


def measured(script):
    """The peak of the script's training, which is its last statement."""
    *before, training = ast.parse(script).body
    names = {"__name__": "script"}
    exec(compile(ast.Module(before, []), "script", "exec"), names)
    with MemoryMeter(names["model"], names["optimizer"]) as meter:
        exec(compile(ast.Module([training], []), "script", "exec"), names)
    return meter.peak_bytes


@pytest.mark.parametrize("device", ["RTX 4090", "laptop"])
def test_the_first_three_lines_say_whether_it_fits_what_is_left_and_what_is_outside(device, told):
    found = json.loads(told(*SIZES, "--device", device, "--budget", "1GB", "--quick", "--json"))
    first, second, third = told(
        *SIZES, "--device", device, "--budget", "1GB", "--quick"
    ).splitlines()[:3]
    best, room = found["recipes"][0], found["room_bytes"]
    needed = best["reserved_bytes"] if device != "laptop" else best["peak_bytes"]
    left = room - needed
    assert first.startswith("it fits: ") and f" of 1.0 GB ({device})" in first
    assert f" {(10**9 - left) / 1e6:.1f} MB of" in first
    assert second == f"left: {left / 1e6:.1f} MB, {left / 1e9:.0%} of the memory"
    assert third == ("in files: nothing" if device == "laptop" else "in host memory: nothing")
    assert found["fits"] is True and found["left_bytes"] == left


def test_offloaded_state_is_named_with_the_host_memory_that_it_takes(told):
    peak = estimate(*_decoder(), Recipe("bf16", attention=None), kind="cuda").peak_bytes
    asked = [*SIZES, "--device", "H100", "--count", "tensors", "--budget", f"{peak * 2 // 3}B"]
    found = json.loads(told(*asked, "--quick", "--json"))
    assert found["recipes"][0]["recipe"]["offload_optimizer"] == 1.0
    state = 12 * found["parameters"]
    assert found["host_state_bytes"] == state
    third = told(*asked, "--quick").splitlines()[2]
    assert f"{state / 1e6:.1f} MB of optimizer state, 12 bytes per parameter" in third


def _decoder():
    from functools import partial

    from course_lib.models import Decoder, random_tokens

    sizes = {"vocabulary": 500, "hidden": 128, "layers": 3, "heads": 2, "sequence": 64}
    return partial(Decoder, **sizes, fused=True), partial(random_tokens, 4, 64, 500)


@pytest.mark.parametrize("share", [2, 0.6])
@pytest.mark.parametrize("model", [SIZES, ["--model", "users_net:make_model"]])
def test_the_printed_script_runs_and_peaks_at_the_printed_bytes(model, share, told, users):
    plain = json.loads(told(*model, *LAPTOP, "--budget", "1GB", "--json"))["way"][0]["peak_bytes"]
    printed = told(*model, *LAPTOP, "--budget", f"{int(plain * share)}B", "--for", "torch")
    [peak] = re.findall(r"([\d,]+) bytes \([\d.,]+ MB\) at the peak:", printed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        more = measured(script_in(printed)) - int(peak.replace(",", ""))
    assert 0 <= more <= 8  # the loss and the weight of the first step live until the second's


def test_details_add_to_what_is_printed_and_take_nothing_away(told):
    asked = [*SIZES, "--device", "A100", "--budget", "1GB", "--quick"]
    short, long = (told(*asked, *more).split("\n\n") for more in ([], ["--details"]))
    assert [part for part in short if part not in long] == [short[-1]]
    added = "\n\n".join(part for part in long if part not in short)
    for words in ("sources:", "what is live at its peak", "workspace that cuBLAS", "optim="):
        assert words in added


def test_lines_for_the_trainer_are_not_printed_for_a_model_that_it_cannot_train(told, users):
    asked = ["--model", "users_net:make_model", *LAPTOP, "--budget", "1GB", "--details"]
    printed = told(*asked)
    assert "TrainingArguments(" not in printed and "must be a model of transformers" in printed


def test_without_for_each_framework_has_its_cheapest_recipe_or_a_reason(told):
    asked = [*SIZES, *LAPTOP, "--budget", "1GB"]
    answers = json.loads(told(*asked, "--json"))["frameworks"]
    assert answers.keys() == FRAMEWORKS.keys()
    assert "script" in answers["torch"] and "ranks" in answers["fsdp2"]["problem"]
    assert "transformers" in answers["trainer"]["problem"]
    printed = told(*asked)
    assert all(re.search(rf"^{name}  ", printed, re.M) for name in FRAMEWORKS)
    ranks = json.loads(told(*asked, "--ranks", "2", "--json"))["frameworks"]
    assert "fully_shard" in ranks["fsdp2"]["script"] and "problem" in ranks["torch"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--for", "trainer"], "must be a model of transformers .* framework='torch'"),
        (["--for", "fsdp2"], "ranks must be .* got 1"),
        (["--for", "torch", "--ranks", "2"], "ranks must be 1 .*fsdp2"),
        (["--for", "trainr"], "did you mean 'trainer'"),
        (["--for", "trainer", "--ranks", "2"], "ranks must be 1 .*fsdp2"),
        (["--for", "torch", "--tier", "file"], "--tier must be host for a script"),
        (["--for", "fsdp2", "--lora", "4"], "--for fsdp2 cannot be combined with --lora"),
        (["--ranks", "2", "--optimizer", "lion"], "--optimizer must be adam when --ranks is 2"),
        (["--for", "fsdp2", "--ranks", "2", "--precision", "bf16-only"], "precision must be"),
    ],
)
def test_what_a_framework_cannot_express_is_refused_and_names_one_that_can(more, words, refused):
    status, sentence = refused(*SIZES, "--device", "H100", *more)
    assert status == 2 and re.search(words, sentence)
    assert sentence.count("\n") == 1


def test_a_model_whose_blocks_have_batch_norm_gets_no_checkpoint_in_a_script(told, users):
    asked = ["--model", "users_net:Normed", *LAPTOP, "--precision", "fp32"]
    plain = json.loads(told(*asked, "--budget", "1GB", "--json"))["recipes"][0]["peak_bytes"]
    budget = ["--budget", f"{int(plain * 0.85)}B"]
    found = json.loads(told(*asked, *budget, "--json"))
    assert found["recipes"][0]["recipe"]["checkpoint"] == "layers"
    # `fit` undoes the second update of the statistics, and a script cannot.
    assert found["frameworks"]["torch"]["problem"].startswith("nothing was found that fits")
    assert command.main([*asked, *budget, "--for", "torch", "--json"]) == 1
    assert "checkpoint" not in script_in(told(*asked, "--budget", "1GB", "--for", "torch"))


def test_a_search_for_one_framework_that_finds_nothing_says_that_only_its_recipes_were_tried(
    capsys, users
):
    asked = ["--model", "users_net:make_model", *LAPTOP, "--for", "torch", "--budget", "10kB"]
    assert command.main(asked) == 1
    first, second, third, *rest = capsys.readouterr().err.splitlines()
    assert first.startswith("nothing was found") and second.startswith("missing: ")
    assert third.startswith("in files: ") and "without --for, all are tried" in "\n".join(rest)
    assert command.main([*asked, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["fits"] is False


def test_a_config_for_the_trainer_falls_back_to_weights_in_bf16_and_says_what_is_lost(
    told, tmp_path
):
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
    config = {"model_type": "llama", "vocab_size": 97, "hidden_size": 64, "intermediate_size": 112}
    config |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config), "utf-8")
    asked = ["--config", f"{file}", "--sequence", "8", "--batch", "2", *LAPTOP, "--for", "trainer"]
    best = json.loads(told(*asked, "--budget", "1GB", "--json"))
    assert best["recipes"][0]["recipe"]["precision"] == "autocast"
    budget = f"{best['recipes'][0]['peak_bytes'] * 2 // 3}B"
    printed = told(*asked, "--budget", budget)
    assert "are lost by rounding" in printed.splitlines()[3] and ".bfloat16()" in printed
    assert "are lost" not in told(*asked, "--budget", budget, "--precision", "bf16-only")


def test_without_for_the_bytes_of_the_trainer_are_those_of_its_own_step(told, users):
    """Its Adafactor is that of transformers, so a step takes other bytes than `train_step`."""
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
    asked = ["--model", "users_net:llama", *LAPTOP, "--budget", "1GB", "--precision", "fp32"]
    asked += ["--optimizer", "adafactor"]
    found = json.loads(told(*asked, "--json"))
    alone = json.loads(told(*asked, "--for", "trainer", "--json"))["recipes"][0]
    assert found["frameworks"]["trainer"]["peak_bytes"] == alone["peak_bytes"]
    assert alone["peak_bytes"] != found["recipes"][0]["peak_bytes"]
