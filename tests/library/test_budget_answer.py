"""The answer of `python -m course_lib.budget`: its first lines, scripts, and the option `--for`.

The printed peak is compared with the meter's while the printed script runs."""

import ast
import json
import re
import sys
import warnings
from contextlib import redirect_stdout
from functools import cache, partial
from io import StringIO

import pytest
from script_models import run_script
from test_configs import LLAMA_3_8B, small

from course_lib.budget import RATES, Recipe, answer, estimate, fit
from course_lib.budget import __main__ as command
from course_lib.budget.scripts import FRAMEWORKS
from course_lib.models import Decoder, random_tokens

SIZES = ["--hidden", "128", "--layers", "2", "--heads", "2", "--vocabulary", "500"]
SIZES += ["--sequence", "64", "--batch", "4"]
LAPTOP = ["--device", "laptop", "--quick"]
USER_CODE = """
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


@cache
def outputs_of(*arguments):
    """Run the command once, and return what it prints with --json and without."""
    results, make_result = [], command.Result
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as printed:
        patch.setattr(
            command, "Result", lambda *fields: results.append(make_result(*fields)) or results[-1]
        )
        assert command.main([*arguments, "--json"]) == 0
    given = command.arguments().parse_args([*arguments])
    return json.loads(printed.getvalue()), str(results[0].as_text(given))


def printed_by(*arguments):
    return outputs_of(*arguments)[1]


def result_of(*arguments):
    return outputs_of(*arguments)[0]


@pytest.fixture
def user_code(tmp_path, monkeypatch):
    (tmp_path / "user_code.py").write_text(USER_CODE, encoding="utf-8")
    # Tests of another file import another module of this name.
    monkeypatch.delitem(sys.modules, "user_code", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)


def script_in(printed):
    """Return the script in the output: the longest code after its heading."""
    _, _, rest = printed.partition(" at the peak:\n\n")
    parts = rest.split("\n\n")
    for count in range(len(parts), 0, -1):
        try:
            ast.parse("\n\n".join(parts[:count]))
        except SyntaxError:
            continue
        return "\n\n".join(parts[:count])
    raise AssertionError(printed)


@pytest.mark.parametrize("device", ["RTX 4090", "laptop"])
def test_command_output_begins_with_fit_verdict_and_remaining_memory(device):
    arguments = [*SIZES, "--device", device, "--budget", "1GB", "--quick"]
    found = result_of(*arguments)
    first, second, third, *_ = printed_by(*arguments).splitlines()
    best = found["recipes"][0]
    needed = best["reserved_bytes"] if device != "laptop" else best["peak_bytes"]
    left = found["room_bytes"] - needed
    assert first.startswith("it fits: ") and f" of 1.0 GB ({device})" in first
    assert f" {(10**9 - left) / 1e6:.1f} MB of" in first
    assert second == f"left: {left / 1e6:.1f} MB, {left / 1e9:.0%} of the memory"
    assert third == ("in files: nothing" if device == "laptop" else "in host memory: nothing")
    assert found["fits"] is True and found["left_bytes"] == left


def test_command_prints_host_memory_of_offloaded_state():
    arguments = [*SIZES, "--device", "H100", "--count", "tensors", "--quick", "--budget"]
    peak = result_of(*arguments, "1GB")["way"][0]["peak_bytes"]
    arguments.append(f"{peak * 2 // 3}B")
    found = result_of(*arguments)
    assert found["recipes"][0]["recipe"]["offload_optimizer"] == 1.0
    state = 12 * found["parameters"]
    assert found["host_state_bytes"] == state
    third = printed_by(*arguments).splitlines()[2]
    assert f"{state / 1e6:.1f} MB of optimizer state, 12 bytes per parameter" in third


@pytest.mark.parametrize(
    ("model", "share"), [(SIZES, 0.6), (["--model", "user_code:make_model"], 2)]
)
def test_printed_training_script_runs_and_has_printed_peak_bytes(model, share, user_code):
    plain = result_of(*model, *LAPTOP, "--budget", "1GB")["way"][0]["peak_bytes"]
    printed = printed_by(*model, *LAPTOP, "--budget", f"{int(plain * share)}B", "--for", "torch")
    [peak] = re.findall(r"([\d,]+) bytes \([\d.,]+ MB\) at the peak:", printed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        meter, _ = run_script(script_in(printed))
    # the loss and the weight of the first step are live until those of the second exist
    assert 0 <= meter.peak_bytes - int(peak.replace(",", "")) <= 8


def test_command_prints_script_or_rejection_reason_for_each_framework():
    arguments = [*SIZES, *LAPTOP, "--budget", "1GB"]
    answers = result_of(*arguments)["frameworks"]
    assert answers.keys() == FRAMEWORKS.keys()
    assert "script" in answers["torch"] and "ranks" in answers["fsdp2"]["problem"]
    assert "transformers" in answers["trainer"]["problem"]
    printed = printed_by(*arguments)
    assert all(re.search(rf"^{name}  ", printed, re.M) for name in FRAMEWORKS)
    arguments += ["--ranks", "2", "--details"]
    ranks = result_of(*arguments)["frameworks"]
    assert "fully_shard" in ranks["fsdp2"]["script"] and "problem" in ranks["torch"]
    assert "network cards" not in printed_by(*arguments)  # a laptop's network is not known


def test_script_for_model_with_batch_norm_contains_no_checkpoint(user_code):
    arguments = ["--model", "user_code:Normed", *LAPTOP, "--precision", "fp32"]
    plain = result_of(*arguments, "--budget", "1GB")["recipes"][0]["peak_bytes"]
    budget = ["--budget", f"{int(plain * 0.85)}B"]
    found = result_of(*arguments, *budget)
    assert found["recipes"][0]["recipe"]["checkpoint"] == "layers"
    # `fit` undoes the second update of the statistics, and a script cannot.
    assert found["frameworks"]["torch"]["problem"].startswith("nothing was found that fits")
    assert command.main([*arguments, *budget, "--for", "torch", "--json"]) == 1
    printed = printed_by(*arguments, "--budget", "1GB", "--for", "torch")
    assert "checkpoint" not in script_in(printed)


def test_infeasible_search_for_one_framework_suggests_trying_all_frameworks(capsys, user_code):
    arguments = ["--model", "user_code:make_model", *LAPTOP, "--for", "torch", "--budget", "10kB"]
    assert command.main(arguments) == 1
    first, second, third, *rest = capsys.readouterr().err.splitlines()
    assert first.startswith("nothing was found") and second.startswith("missing: ")
    assert third.startswith("in files: ") and "without --for, all are tried" in "\n".join(rest)


def test_trainer_search_resorts_to_bf16_weights_with_rounding_warning(config_file):
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
    arguments = ["--config", f"{config_file(small(LLAMA_3_8B))}", "--sequence", "8", "--batch", "2"]
    arguments += [*LAPTOP, "--for", "trainer"]
    best = result_of(*arguments, "--budget", "1GB")
    assert best["recipes"][0]["recipe"]["precision"] == "autocast"
    budget = f"{best['recipes'][0]['peak_bytes'] * 2 // 3}B"
    printed = printed_by(*arguments, "--budget", budget)
    assert "are lost by rounding" in printed.splitlines()[3] and ".bfloat16()" in printed
    assert "are lost" not in printed_by(*arguments, "--budget", budget, "--precision", "bf16-only")


def test_trainer_adafactor_peak_does_not_depend_on_framework_option(user_code):
    """The Trainer's Adafactor is that of transformers, which needs other bytes than PyTorch's."""
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
    arguments = ["--model", "user_code:llama", *LAPTOP, "--budget", "1GB", "--precision", "fp32"]
    arguments += ["--optimizer", "adafactor"]
    found = result_of(*arguments)
    separate = result_of(*arguments, "--for", "trainer")["recipes"][0]
    assert found["frameworks"]["trainer"]["peak_bytes"] == separate["peak_bytes"]
    assert separate["peak_bytes"] != found["recipes"][0]["peak_bytes"]


def test_recipe_with_spare_memory_is_cheapest_one_even_if_listed():
    sizes = {"vocabulary": 61, "hidden": 32, "heads": 4, "layers": 6, "sequence": 24}
    functions = partial(Decoder, **sizes), partial(random_tokens, 8, 24, 61)
    recipes = [Recipe(checkpoint="layers", micro_batches=2), Recipe(), Recipe(checkpoint="layers")]
    budget = max(estimate(*functions, recipe).peak_bytes for recipe in recipes)
    found = fit(*functions, budget, recipes=recipes, progress=False)
    machine = answer.Machine("laptop", RATES["laptop"], "file", "cpu", "tensors", budget, False)
    fitting = [each for each in found if each.peak_bytes <= 0.95 * budget]
    assert found[0] not in fitting and len(fitting) == 2
    assert answer.with_spare_memory(found, machine) == fitting[:1]
