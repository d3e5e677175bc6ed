"""`python -m course_lib.budget`, and the rates by which recipes are priced."""

import json
import math
import re
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch

from course_lib import labels
from course_lib.budget import RATES, Estimate, Rates, Recipe, estimate, measured_rates, this_machine, train_step
from course_lib.budget import __main__ as command
from course_lib.budget import rates as rates_module
from course_lib.budget.asked import shape_of
from course_lib.budget.rates import UPDATE_BYTES, allowance_bytes
from course_lib.budget.recipe import ALL_ABOVE, OPTIMIZERS
from course_lib.budget.show import steps_to
from course_lib.memory import symbolic
from course_lib.models import Decoder, deep_mlp, random_tokens
from course_lib.offload import HostStore, SimulatedDevice

LLAMA = {
    "model_type": "llama", "vocab_size": 97, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
}  # fmt: skip


# ---- what a step costs


def priced(recipe, tier="host", flops=6000, down=0, up=0, below=0):
    return Estimate(recipe, 1, {}, {}, "", flops, down, up, tier, below)


ROUND = Rates(1e3, 2e3, 1e2, host_bytes=28.0, flops_share=0.5, link_share=0.25)


def test_flops_and_links_are_priced_at_the_share_that_is_reached():
    assert ROUND.seconds(priced(Recipe())) == 6000 / 500
    assert ROUND.seconds(priced(Recipe(precision="bf16"))) == 6000 / 1000
    assert ROUND.seconds(priced(Recipe(), tier="file", down=50, up=25)) == 12 + 3


def test_activations_are_copied_beside_the_compute_to_the_host_but_not_to_a_file():
    recipe = Recipe(offload_activations=True)  # two copies each way: all wait for what is longer
    assert ROUND.seconds(priced(recipe, down=100, up=200)) == 12  # forward takes 4 seconds, backward 8, as copies do
    assert ROUND.seconds(priced(recipe, down=500, up=200)) == 20 + 8
    assert ROUND.seconds(priced(recipe, down=100, up=750)) == 4 + 30
    one = replace(recipe, prefetch=1, in_flight=1)  # half of the copies are not hidden
    assert ROUND.seconds(priced(one, down=100, up=200)) == 12 + 2 + 4
    none = replace(recipe, prefetch=0, in_flight=0)
    assert ROUND.seconds(priced(none, down=100, up=200)) == 12 + 4 + 8
    inputs = replace(one, checkpoint="layers")  # one at a time, and forward is a quarter
    assert ROUND.seconds(priced(inputs, down=100, up=250)) == 12 + 1 + 1
    assert ROUND.seconds(priced(recipe, tier="file", down=250, up=200)) == 30


COPIES = [{"prefetch": p, "in_flight": f} for p in (0, 1, 2) for f in (1, 2)]
SMALL = {"vocabulary": 64, "hidden": 32, "heads": 2, "sequence": 16}
CLOCKS = {
    "mlp": (lambda: deep_mlp(12, 32), lambda: torch.ones(64, 32), "none", 0.1),
    "decoder": (partial(Decoder, layers=3, **SMALL), partial(random_tokens, 2, 16, 64), "none", 0.2),
    "checkpoints": (partial(Decoder, layers=8, **SMALL), partial(random_tokens, 2, 16, 64), "layers", 0.2),
}


def summed(model, batch):
    return (model(batch).sum(), len(batch)) if batch.is_floating_point() else model.loss_sum(batch)


@pytest.mark.parametrize(
    ("name", "ratio", "copies"),
    [
        *(("mlp", 1, copies) for copies in [{}, *COPIES]),
        *(("mlp", ratio, copies) for ratio in (0.5, 2, 4) for copies in COPIES[::3]),
        *(("decoder", 1, copies) for copies in COPIES[::2]),
        *(("checkpoints", ratio, COPIES[3]) for ratio in (0.5, 2)),
    ],
)
def test_copies_hide_as_the_clock_of_the_simulated_device_says_and_hold_what_its_memory_does(name, ratio, copies):
    """Copies down take `ratio` times as long as forward."""
    make, of, checkpoint, tolerance = CLOCKS[name]
    recipe = Recipe(optimizer="sgd", checkpoint=checkpoint, offload_activations=True, min_bytes=1 << 10, **copies)
    expected, flops = estimate(make, of, recipe, loss_sum=summed, tier="host"), 1e9
    link = expected.bytes_down / (expected.flops / flops / 3) / ratio
    speeds = {"flops_per_second": flops, "up_bytes_per_second": link, "down_bytes_per_second": link}
    with SimulatedDevice(**speeds) as device:
        model, batch = device.move(make()), device.move(of())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        begins, before = device.seconds, device.live_bytes - sum(p.nbytes for p in model.parameters())
        train_step(model, optimizer, batch, recipe, loss_sum=summed, store=HostStore())
    taken = device.seconds - begins
    rates = Rates(flops, flops, link)
    assert device.peak_bytes - before == expected.peak_bytes
    assert rates.seconds(expected) == pytest.approx(taken, rel=tolerance)
    more = replace(expected, recipe=replace(recipe, prefetch=2, in_flight=2))
    assert rates.seconds(more) <= rates.seconds(expected)


def test_an_update_on_the_host_reads_and_writes_28_bytes_a_parameter():
    """Adam in fp32: gradient, weight and two moments are read, weight and moments written; SGD has no moments."""
    bf16, fp32 = Recipe(precision="bf16", offload_optimizer=1.0), Recipe(offload_optimizer=1.0)
    for recipe in (bf16, fp32):
        sent = recipe.dtype.itemsize * 3
        part = ROUND.parts(priced(recipe, down=sent, up=sent, below=3))
        assert part["update"] == 3 * (4 * 4 + 3 * 4) / 28 and part["down"] == part["up"] == 0
        assert part["gradients"] == part["parameters"] == sent / 25
        assert ROUND.seconds(priced(recipe, down=sent, up=sent, below=3)) == part["compute"] + 3
    sgd = Recipe(optimizer="sgd", offload_optimizer=1.0)
    assert ROUND.parts(priced(sgd, down=12, up=12, below=3))["update"] == pytest.approx(3 * (2 * 4 + 4) / 28)


def test_the_update_of_every_optimizer_that_the_host_can_run_has_a_price():
    assert UPDATE_BYTES.keys() == set(OPTIMIZERS) - set(ALL_ABOVE)


def test_steps_in_backward_have_nothing_to_overlap_with():
    recipe = Recipe(precision="bf16", offload_optimizer=1.0, in_backward=True)
    step = priced(recipe, down=100, up=100, below=50)
    assert ROUND.seconds(step) == 6 + 4 + 50 + 4


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_an_estimate_says_how_many_parameters_the_host_updates(fraction):
    make = partial(Decoder, vocabulary=61, hidden=32, heads=4, layers=3, sequence=24)
    batch = partial(random_tokens, 2, 24, 61)
    recipe = Recipe(precision="bf16", offload_optimizer=fraction)
    host, file = (estimate(make, batch, recipe, tier=tier) for tier in ("host", "file"))
    assert file.host_parameters == 0 and 2 * host.host_parameters == host.bytes_down == host.bytes_up
    both = Recipe(precision="bf16", offload_optimizer=fraction, offload_activations=True, min_bytes=1000)
    moved = estimate(make, batch, both, tier="host")
    part = Rates(1, 1, 1).parts(moved)
    assert part["down"] == moved.bytes_down - host.bytes_down > 0 and part["up"] == moved.bytes_up - host.bytes_up > 0


def test_every_device_has_a_source_and_its_memory_in_the_bytes_that_it_has():
    assert all(rates.source for rates in RATES.values())
    assert RATES["H200"].memory_bytes == 150_754_820_096 and RATES["laptop"].memory_bytes is None
    sizes = {"RTX 4090": 24, "A100": 80, "A100 40GB": 40, "H100": 80, "H200": 141}
    for name, gigabytes in sizes.items():
        assert 1 < RATES[name].memory_bytes / (gigabytes * 10**9) < 1.08
    assert allowance_bytes(1000) == 100


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fp32_flops", 0),
        ("link_bytes", "fast"),
        ("host_bytes", -1),
        ("flops_share", 1.5),
        ("link_share", 0),
        ("memory_bytes", 2.5),
    ],
)
def test_rates_that_cannot_be_are_refused(name, value):
    fields = {"fp32_flops": 1, "bf16_flops": 1, "link_bytes": 1, name: value}
    with pytest.raises((TypeError, ValueError), match=rf"^{name} is .*; it takes .+"):
        Rates(**fields)


def test_this_machine_is_measured_once_and_kept(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(rates_module, "measured_rates", lambda: (calls.append(1), Rates(1.5, 2.5, 3.5, "here"))[1])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert this_machine() == this_machine() == Rates(1.5, 2.5, 3.5, "here") and len(calls) == 1
    file = tmp_path / "course_lib" / "rates.json"
    kept = json.loads(file.read_text("utf-8"))
    assert kept["bf16_flops"] == 2.5 and str(torch.__version__) in kept["measured_on"]
    for spoiled in ("{", "[]", json.dumps({**kept, "measured_on": "another"}), json.dumps({**kept, "colour": 1})):
        file.write_text(spoiled, encoding="utf-8")
        assert this_machine().link_bytes == 3.5
    assert len(calls) == 5
    blocked = tmp_path / "file"
    blocked.write_text("", encoding="utf-8")
    assert this_machine(blocked / "below.json").fp32_flops == 1.5  # not kept, and no error


def test_what_is_measured_are_rates():
    found = measured_rates(0.01)
    assert all(0 < value < math.inf for name, value in asdict(found).items() if name.endswith("_flops"))
    assert 0 < found.link_bytes < math.inf and 0 < found.host_bytes < math.inf
    assert (found.memory_bytes is None) == (not torch.cuda.is_available())


# ---- the command

SMALL = "--hidden 64 --layers 2 --heads 2 --vocabulary 100 --sequence 32 --batch 4 --precision fp32 --machine laptop"


def test_the_command_prints_what_fits_and_draws_the_way_there(tmp_path, capsys):
    pytest.importorskip("matplotlib").use("agg")
    picture = tmp_path / "way.png"
    assert command.main([*SMALL.split(), "--budget", "2.5MB", "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    with symbolic():
        count = sum(p.numel() for p in Decoder(vocabulary=100, hidden=64, heads=2, layers=2, sequence=32).parameters())
    assert f"{count:,} parameters" in printed
    best = re.search(r"the cheapest: (Recipe\(.*\))", printed)[1]
    found = estimate(
        lambda: Decoder(vocabulary=100, hidden=64, heads=2, layers=2, sequence=32),
        lambda: random_tokens(4, 32, 100),
        eval(best, {"Recipe": Recipe}),
    )
    assert found.peak_bytes <= 2_500_000 and f"{found.peak_bytes:,} bytes" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("language", "words"), [("en", "the least peak found is"), ("zh", "找到的最小峰值是")])
def test_the_command_says_what_the_least_is(language, words, capsys, monkeypatch):
    monkeypatch.setenv("COURSE_LANG", language)
    assert command.main([*SMALL.split(), "--budget", "1kB", "--optimizer", "sgd", "--batch", "1"]) == 1
    told = capsys.readouterr().err
    assert words in told and re.search(r"\d[\d,.]* (k|M)B", told) and "sgd" in told


@pytest.mark.parametrize(
    ("text", "count"),
    [("80GiB", 80 * 2**30), ("24GB", 24 * 10**9), ("1.5 kB", 1500), ("2e9", 2 * 10**9), ("7MiB", 7 * 2**20)],
)
def test_a_budget_has_a_unit_or_is_in_bytes(text, count):
    assert command.bytes_from(text) == count


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ("--budget 80Gob", "no unit"),
        ("--budget lots", "no number of bytes"),
        ("--budget 0MB", "no budget"),
        ("--budget 1GB --layers 0", "no count"),
        ("--budget 1GB --heads 3", "divisor of hidden"),
        ("--budget 1GB --plot way.foo", "no kind of picture"),
        ("--budget 1GB --plot nowhere/way.png", "does not exist"),
        ("--budget 1GB --sequence 10000000 --batch 10000000 --hidden 10000000 --heads 1", "overflow"),
        ("--budget 1GB --parameters many", "no number of parameters"),
    ],
)
def test_the_command_refuses_in_one_sentence(changed, told, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main([*SMALL.split(), *changed.split()])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and told in error.splitlines()[-1] and "Traceback" not in error


@pytest.mark.parametrize("parameters", [5e6, 1e9, 70e9])
def test_the_shape_has_about_as_many_parameters_as_asked_for(parameters):
    hidden, layers = shape_of(parameters, 32_000)
    assert hidden % 128 == 0
    assert hidden / 128 == pytest.approx(layers, abs=4)
    assert 12 * layers * hidden**2 + 32_000 * hidden == pytest.approx(parameters, rel=0.05)


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(checkpoint="layers", blocks="layers.*", first_blocks=2, attention="flash"),
        Recipe(precision="bf16", optimizer="momentum", update="foreach", accumulate="fp32", micro_batches=2),
        Recipe(precision=None, attention=None, head_chunk=8, checkpoint="segments", segments=2, in_backward=True),
        Recipe(checkpoint="optimal", schedule_bytes=10, micro_batches=3, offload_optimizer=0.5),
        Recipe(offload_activations=True, min_bytes=10),
    ],
    ids=str,
)
def test_the_way_leads_from_the_plain_step_to_the_recipe(recipe):
    steps = steps_to(recipe)
    assert steps[-1] == recipe and len(set(steps)) == len(steps) > 1
    assert steps[0].changed().keys() <= {"precision", "optimizer", "update"}


# ---- which model


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA), encoding="utf-8")
    return str(path)


CHEAP = ["--sequence", "32", "--batch", "2", "--device", "laptop", "--precision", "fp32", "--optimizer", "sgd"]


def test_a_config_is_read_and_its_cheapest_step_is_taken(config, capsys):
    assert command.main(["--config", config, *CHEAP, "--budget", "10MB", "--json", "--check"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["parameters"] == sum(p.numel() for p in command.asked(namespace(config)).make_model().parameters())
    assert told["budget_bytes"] == 10**7 and told["recipes"][0]["peak_bytes"] <= 10**7
    assert told["recipes"][0]["recipe"] == {"optimizer": "sgd"} and told["way"][-1]["recipe"] == {"optimizer": "sgd"}
    check = told["check"]
    assert check["predicted_bytes"] == told["recipes"][0]["peak_bytes"]
    if check["device"] == "cpu":
        assert check["measured_bytes"] == check["predicted_bytes"] <= check["allocator_bytes"]


def namespace(config):
    return command.arguments().parse_args(["--config", config, *CHEAP])


def test_the_command_speaks_the_language_that_is_asked_for(config, capsys, monkeypatch):
    monkeypatch.setattr(labels, "_chosen", None)
    monkeypatch.setenv("COURSE_LABELS", "strict")  # English that has no Chinese is an error
    said = {}
    for spoken in ("en", "zh"):
        monkeypatch.setenv("COURSE_LANG", spoken)
        assert command.main(["--config", config, *CHEAP, "--budget", "10MB", "--check", "--device", "RTX 4090"]) == 0
        said[spoken] = capsys.readouterr().out
    assert "the way there:" in said["en"] and "recipes fit into" in said["en"] and not re.search("[一-鿿]", said["en"])
    assert "一步步怎样到达：" in said["zh"] and "种配方装得进" in said["zh"]
    numbers = [re.findall(r"\d[\d,.]*\d", text) for text in said.values()]
    assert sorted(numbers[0]) == sorted(numbers[1])


def test_where_nothing_fits_programs_are_told_so_too(config, capsys):
    assert command.main(["--config", config, *CHEAP, "--budget", "1kB", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["recipes"] == [] and told["least_bytes"] > 1000 and "the least peak found" in told["error"]


MODULE = """
import torch
from torch import nn

class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 1)

    def loss(self, batch):
        return self.net(batch).square().mean()

def model():
    return Regression()

def batch():
    return torch.ones(6, 8)

def with_batch():
    return Regression()

with_batch.make_batch = batch
value = 3
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_module_of_a_user.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "own_module_of_a_user"


@pytest.mark.parametrize("which", [["model", "--batch-from", "batch"], ["with_batch"]])
def test_a_function_of_the_users_says_what_the_model_is(own_module, which, capsys):
    named = [name if name.startswith("--") else f"{own_module}:{name}" for name in which]
    assert command.main(["--model", *named, "--budget", "1MB", "--device", "laptop", "--precision", "fp32"]) == 0
    printed = capsys.readouterr().out
    assert "9 parameters; 6 samples" in printed and "the cheapest: Recipe()" in printed


ONE_LAYER = "--hidden 64 --layers 1 --heads 2 --vocabulary 100 --sequence 32 --batch 1 --optimizer sgd"


def test_a_device_has_the_budget_where_none_is_given(capsys):
    size = f"{ONE_LAYER} --json".split()
    assert command.main([*size, "--device", "RTX 4090"]) == 0
    told = json.loads(capsys.readouterr().out)
    memory = RATES["RTX 4090"].memory_bytes
    assert told["budget_bytes"] == memory - allowance_bytes(memory) and told["rates"]["memory_bytes"] == memory
    assert told["allowance_bytes"] == allowance_bytes(memory) and told["device"] == "RTX 4090"


def test_the_allowance_for_a_gpu_stands_beside_the_figures_and_in_none_of_them(capsys):
    size = ONE_LAYER.split()
    assert command.main([*size, "--device", "H100", "--budget", "1GB"]) == 0
    printed = capsys.readouterr().out
    best = estimate(
        partial(Decoder, vocabulary=100, hidden=64, heads=2, layers=1, sequence=32),
        partial(random_tokens, 1, 32, 100),
        eval(re.search(r"the cheapest: (Recipe\(.*\))", printed)[1], {"Recipe": Recipe}),
        tier="host",
    )
    assert f"peak {best.peak_bytes:,} bytes" in printed and "not measured here" in printed.splitlines()[-1]


def test_the_rates_of_this_machine_can_be_asked_for(monkeypatch, capsys):
    monkeypatch.setattr(command, "this_machine", lambda: Rates(1e9, 2e9, 3e9, "measured, in a test"))
    assert command.main([*SMALL.replace("laptop", "this").split(), "--budget", "1GB", "--optimizer", "sgd"]) == 0
    assert "measured, in a test" in capsys.readouterr().out


def test_a_step_that_is_larger_than_the_machine_is_not_taken(monkeypatch, capsys):
    monkeypatch.setattr("course_lib.budget.checking._memory", lambda device: 1000)
    with pytest.raises(SystemExit):
        command.main([*SMALL.split(), "--budget", "1GB", "--optimizer", "sgd", "--check"])
    assert "this machine has 1,000 bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--sequence 32 --batch 2 --budget 1MB", "the model is missing"),
        ("--config a.json --hidden 3 --sequence 32 --batch 2 --budget 1MB", "the model is --config and --hidden"),
        ("--config none.json --sequence 32 --batch 2 --budget 1MB", "cannot be read"),
        ("--hidden 64 --layers 1 --batch 2 --budget 1MB", "--sequence is missing"),
        ("--hidden 64 --layers 1 --sequence 8 --budget 1MB", "--batch is missing"),
        ("--hidden 64 --sequence 8 --batch 1 --budget 1MB", "the size is missing"),
        ("--hidden 64 --layers 1 --sequence 8 --batch 1", "--budget is missing"),
        ("--hidden 64 --layers 1 --sequence 8 --batch 1 --device laptop", "--budget is missing"),
        ("--model nowhere_at_all:model --budget 1MB", "is not found"),
        ("--model json:dumps --budget 1MB", "--batch-from is missing"),
        ("--model own_module_of_a_user:value --budget 1MB", "it takes package.module:function"),
        ("--model own_module_of_a_user:absent --budget 1MB", "it takes package.module:function"),
    ],
)
def test_a_model_that_cannot_be_found_is_said_in_one_sentence(options, told, own_module, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(options.split())
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and told in error.splitlines()[-1] and "Traceback" not in error


def test_a_config_of_an_unknown_class_is_named_with_what_is_known(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "model_type": "mamba"}), encoding="utf-8")
    with pytest.raises(SystemExit):
        command.main(["--config", str(path), *CHEAP, "--budget", "1MB"])
    last = capsys.readouterr().err.splitlines()[-1]
    assert "model_type is 'mamba'" in last and all(name in last for name in ("llama", "mixtral", "gpt2"))
