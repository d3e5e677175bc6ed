"""`python -m course_lib.budget`, and the rates by which recipes are priced."""

import importlib
import io
import json
import math
import pickle
import re
import sys
import traceback
import warnings
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch

from course_lib import labels, options
from course_lib.budget import (
    RATES,
    Estimate,
    InfeasibleBudget,
    Rates,
    Recipe,
    estimate,
    fit,
    measured_rates,
    run,
    this_machine,
    train_step,
)
from course_lib.budget import __main__ as command
from course_lib.budget import rates as rates_module
from course_lib.budget.device import CONTEXT_HOPPER_BYTES, kept_bytes, workspace_bytes
from course_lib.budget.show import steps_to
from course_lib.distributed import __main__ as ranks_command
from course_lib.labels import chinese, verbatim
from course_lib.memory import CachingAllocator, symbolic
from course_lib.memory.show import bytes_text, decimal
from course_lib.models import Decoder, deep_mlp, random_tokens
from course_lib.offload import HostStore
from course_lib.simulated import SimulatedDevice
from course_lib.workload import shape_of

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
    # forward takes 4 seconds, backward 8, as copies do
    assert ROUND.seconds(priced(recipe, down=100, up=200)) == 12
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
    "decoder": (
        partial(Decoder, layers=3, **SMALL),
        partial(random_tokens, 2, 16, 64),
        "none",
        0.2,
    ),
    "checkpoints": (
        partial(Decoder, layers=8, **SMALL),
        partial(random_tokens, 2, 16, 64),
        "layers",
        0.2,
    ),
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
def test_copies_hide_as_the_clock_of_the_simulated_device_says_and_hold_what_its_memory_does(
    name, ratio, copies
):
    """Copies down take `ratio` times as long as forward."""
    make, of, checkpoint, tolerance = CLOCKS[name]
    recipe = Recipe(
        optimizer="sgd",
        checkpoint=checkpoint,
        offload_activations=True,
        min_bytes=1 << 10,
        **copies,
    )
    expected, flops = estimate(make, of, recipe, loss_sum=summed, tier="host"), 1e9
    link = expected.bytes_down / (expected.flops / flops / 3) / ratio
    speeds = {"flops_per_second": flops, "up_bytes_per_second": link, "down_bytes_per_second": link}
    with SimulatedDevice(**speeds) as device:
        model, batch = device.move(make()), device.move(of())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        begins, before = (
            device.seconds,
            device.live_bytes - sum(p.nbytes for p in model.parameters()),
        )
        train_step(model, optimizer, batch, recipe, loss_sum=summed, store=HostStore())
    taken = device.seconds - begins
    rates = Rates(flops, flops, link)
    assert device.peak_bytes - before == expected.peak_bytes
    assert rates.seconds(expected) == pytest.approx(taken, rel=tolerance)
    more = replace(expected, recipe=replace(recipe, prefetch=2, in_flight=2))
    assert rates.seconds(more) <= rates.seconds(expected)


def test_an_update_on_the_host_reads_and_writes_28_bytes_a_parameter():
    """Adam in fp32: gradient, weight and two moments are read, weight and moments written; SGD has
    no moments."""
    bf16, fp32 = Recipe(precision="bf16", offload_optimizer=1.0), Recipe(offload_optimizer=1.0)
    for recipe in (bf16, fp32):
        sent = recipe.dtype.itemsize * 3
        part = ROUND.parts(priced(recipe, down=sent, up=sent, below=3))
        assert part["update"] == 3 * (4 * 4 + 3 * 4) / 28 and part["down"] == part["up"] == 0
        assert part["gradients"] == part["parameters"] == sent / 25
        assert ROUND.seconds(priced(recipe, down=sent, up=sent, below=3)) == part["compute"] + 3
    sgd = Recipe(optimizer="sgd", offload_optimizer=1.0)
    assert ROUND.parts(priced(sgd, down=12, up=12, below=3))["update"] == pytest.approx(
        3 * (2 * 4 + 4) / 28
    )


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
    assert (
        file.host_parameters == 0 and 2 * host.host_parameters == host.bytes_down == host.bytes_up
    )
    both = Recipe(
        precision="bf16", offload_optimizer=fraction, offload_activations=True, min_bytes=1000
    )
    moved = estimate(make, batch, both, tier="host")
    part = Rates(1, 1, 1).parts(moved)
    assert (
        part["down"] == moved.bytes_down - host.bytes_down > 0
        and part["up"] == moved.bytes_up - host.bytes_up > 0
    )


def test_every_device_has_a_source_and_its_memory_in_the_bytes_that_it_has():
    assert all(rates.source for rates in RATES.values())
    assert RATES["H200"].memory_bytes == 150_109_880_320 and RATES["laptop"].memory_bytes is None
    sizes = {"RTX 4090": 24, "A100": 80, "A100 40GB": 40, "H100": 80, "H200": 141}
    for name, gigabytes in sizes.items():
        assert 1 < RATES[name].memory_bytes / (gigabytes * 10**9) < 1.08


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
    for spoiled in (
        "{",
        "[]",
        json.dumps({**kept, "measured_on": "another"}),
        json.dumps({**kept, "colour": 1}),
    ):
        file.write_text(spoiled, encoding="utf-8")
        assert this_machine().link_bytes == 3.5
    assert len(calls) == 5
    blocked = tmp_path / "file"
    blocked.write_text("", encoding="utf-8")
    assert this_machine(blocked / "below.json").fp32_flops == 1.5  # not kept, and no error


def test_what_is_measured_are_rates():
    found = measured_rates(0.01)
    assert all(
        0 < value < math.inf for name, value in asdict(found).items() if name.endswith("_flops")
    )
    assert 0 < found.link_bytes < math.inf and 0 < found.host_bytes < math.inf
    assert (found.memory_bytes is None) == (not torch.cuda.is_available())


# ---- the command

SMALL = (
    "--hidden 64 --layers 2 --heads 2 --vocabulary 100 --sequence 32 --batch 4 --precision fp32"
    " --machine laptop"
)


def test_the_command_prints_what_fits_and_draws_the_way_there(tmp_path, capsys):
    pytest.importorskip("matplotlib").use("agg")
    picture = tmp_path / "way.png"
    assert command.main([*SMALL.split(), "--budget", "2.5MB", "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    with symbolic():
        count = sum(
            p.numel()
            for p in Decoder(vocabulary=100, hidden=64, heads=2, layers=2, sequence=32).parameters()
        )
    assert f"{count:,} parameters" in printed
    best = re.search(r"the cheapest: (Recipe\(.*\))", printed)[1]
    found = estimate(
        lambda: Decoder(vocabulary=100, hidden=64, heads=2, layers=2, sequence=32, fused=True),
        lambda: random_tokens(4, 32, 100),
        eval(best, {"Recipe": Recipe}),
    )
    assert found.peak_bytes <= 2_500_000 and f"{found.peak_bytes:,} bytes" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("language", "words"),
    [
        ("en", ("the least found is", "the largest category is", "108,544 parameters")),
        ("zh", ("找到的最小值是", "其中最大的一类是", "个参数")),
    ],
)
def test_the_command_says_what_the_least_is(language, words, capsys, monkeypatch):
    monkeypatch.setenv("COURSE_LANG", language)
    assert (
        command.main([*SMALL.split(), "--budget", "1kB", "--optimizer", "sgd", "--batch", "1"]) == 1
    )
    told = capsys.readouterr().err
    assert all(word in told for word in words)
    assert re.search(r"\d[\d,.]* (k|M)B", told) and "sgd" in told


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("80GiB", 80 * 2**30),
        ("24GB", 24 * 10**9),
        ("1.5 kB", 1500),
        ("2e9", 2 * 10**9),
        ("7MiB", 7 * 2**20),
        ("24G", 24 * 10**9),
        ("24g", 24 * 10**9),
        ("24Gi", 24 * 2**30),
        ("3B", 3),
    ],
)
def test_a_budget_has_a_unit_or_is_in_bytes(text, count):
    assert options.byte_count(text) == count


@pytest.mark.parametrize(
    ("text", "count"), [("7B", 7e9), ("7e9", 7e9), ("124M", 124e6), ("1.5b", 1.5e9), ("60k", 6e4)]
)
def test_a_number_of_parameters_may_have_a_unit(text, count):
    assert options.parameter_count(text) == count


@pytest.mark.parametrize(
    ("option", "typed", "meant"),
    [
        ("device", "rtx 4090", "RTX 4090"),
        ("device", "NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("device", "5090", "RTX 5090"),
        ("device", "t4", "T4"),
        ("device", "a100-80gb", "A100"),
        ("device", "A100 40 GB", "A100 40GB"),
        ("device", "mi300x", "MI300X"),
        ("device", "this", "this"),
        ("optimizer", "AdamW", "adam"),
        ("optimizer", "adamw_bnb_8bit", "adam8bit"),
        ("precision", "bfloat16", "bf16"),
    ],
)
def test_names_are_taken_as_people_type_them(option, typed, meant):
    given = command.arguments().parse_args([f"--{option}", typed])
    assert getattr(given, option) == meant


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (
            "--budget 80Gob",
            "must be one of B, kB, MB, GB, TB, KiB, MiB, GiB, TiB, got 'Gob' in '80Gob'",
        ),
        ("--budget lots", "must be a number of bytes such as 80GiB or 24GB, got 'lots'"),
        ("--budget 0MB", "must be between 1 byte and 1e18 bytes, got '0MB'"),
        (
            "--budget 24",
            "got '24': did you mean 24GB (10**9 bytes each) or 24GiB (2**30 bytes each)?",
        ),
        ("--budget 1GB --devise T4", "unrecognized arguments: --devise T4; did you mean --device?"),
        ("--budget 1GB config.json", "config.json; did you mean --config config.json?"),
        ("--budget 1GB --device H10", "got 'H10'; did you mean 'H100'?"),
        ("--budget 1GB --precision fp16", "got 'fp16'; fp16 needs loss scaling"),
        ("--budget 1MB --device t4", "--budget must be more than the 463,732,736 bytes"),
        ("--budget 1GB --layers 0", "must be a whole number between 1 and 10,000,000, got '0'"),
        ("--budget 1GB --heads 3", "divisor of hidden"),
        ("--budget 1GB --plot way.foo", "the file's extension must be one of"),
        (
            "--budget 1GB --plot nowhere/way.png",
            "must be in a folder that exists, got 'nowhere/way.png'",
        ),
        (
            "--budget 1GB --sequence 10000000 --batch 10000000 --hidden 10000000 --heads 1",
            "overflow",
        ),
        (
            "--budget 1GB --parameters many",
            "must be a number of parameters such as 7B, 124M or 7e9, at least 1e4, got 'many'",
        ),
    ],
)
def test_the_command_refuses_in_one_sentence(changed, told, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main([*SMALL.split(), *changed.split()])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and told in error.splitlines()[-1] and "Traceback" not in error


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("commanded", [command, ranks_command])
def test_a_command_in_a_language_that_does_not_exist_is_one_sentence(
    commanded, monkeypatch, capsys
):
    monkeypatch.setenv("COURSE_LANG", "xx")
    with pytest.raises(SystemExit) as stopped:
        commanded.arguments()
    told = capsys.readouterr().err
    assert stopped.value.code == 2 and told == (
        'error: COURSE_LANG must be "en", "zh" or "both", got \'xx\'\n'
    )


# ---- the commands in Chinese


HAN = re.compile("[\u3400-\u9fff]")


@pytest.fixture(params=["budget", "distributed"])
def parser(request, fresh, monkeypatch):
    """A command's parser, in Chinese; a label without Chinese is an error."""
    monkeypatch.setenv("COURSE_LANG", "zh")
    monkeypatch.setenv("COURSE_LABELS", "strict")
    return {"budget": command, "distributed": ranks_command}[request.param].arguments()


def test_the_help_of_a_command_is_chinese_down_to_the_words_of_argparse(parser, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    usage, *options = parser.format_help().splitlines()
    assert usage.startswith("用法：") and "选项:" in options and "显示这份说明" in "".join(options)
    assert [
        action.dest for action in parser._actions if action.help and not HAN.search(action.help)
    ] == []
    assert HAN.search(parser.description) and HAN.search(parser.epilog)
    monkeypatch.setenv("COURSE_LANG", "en")
    assert (
        labels.in_both_languages("options") == ("options", "选项")
        and "show this help" in command.arguments().format_help()
    )


ERRORS = [
    (
        "--budget 80Gob",
        "参数 --budget：单位必须是 B, kB, MB, GB, TB, KiB, MiB, GiB, TiB 之一，实际是 '80Gob' 里的",
    ),
    ("--budget lots", "参数 --budget：必须是 80GiB 或 24GB 这样的字节数，实际是 'lots'"),
    ("--budget 0MB", "参数 --budget：必须在 1 到 1e18 字节之间，实际是 '0MB'"),
    ("--layers 0", "参数 --layers：必须是 1 到 10,000,000 之间的整数，实际是 '0'"),
    (
        "--parameters many",
        "参数 --parameters：必须是 7B、124M 或 7e9 这样的参数量，并且不小于 1e4，实际是 'many'",
    ),
    ("--plot way.foo", "参数 --plot：'way.foo' 的扩展名必须是 "),
    ("--plot nowhere/way.png", "参数 --plot：所在的目录必须已经存在，实际是 'nowhere/way.png'"),
    ("--plot tests.png", "参数 --plot：必须是文件，实际是目录 'tests.png'"),
    ("--plot", "参数 --plot：需要一个值"),
    ("--tier below", "参数 --tier：没有 'below' 这一项，可选："),
    ("--what", "无法识别的参数：--what"),
    ("--devise T4", "无法识别的参数：--devise T4。是想写 --device 吗？"),
    (
        "--budget 24",
        "参数 --budget：必须带单位，实际是 '24'。是想写 24GB（每个 10**9 字节）还是 24GiB",
    ),
    ("--device X", "参数 --device/--machine：必须是 laptop, "),
    (
        "--device H10",
        f"参数 --device/--machine：必须是 {', '.join([*RATES, 'this'])} 之一，实际是 'H10'。是想写",
    ),
    (
        "--precision fp16",
        "参数 --precision：必须是 fp32, bf16 之一，实际是 'fp16'。fp16 需要损失缩放",
    ),
    (
        "--device t4 --budget 1MB",
        "--budget 必须大于 CUDA 和 cuBLAS 在 GPU（T4）上占用的 463,732,736",
    ),
    ("--hidden 64", "缺少 --budget，请给出 80GiB 这样的字节数"),
]


@pytest.mark.parametrize(("given", "told"), ERRORS)
def test_an_error_of_the_command_is_said_in_chinese(
    given, told, capsys, monkeypatch, tmp_path, fresh
):
    monkeypatch.setenv("COURSE_LANG", "zh")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests.png").mkdir()
    with pytest.raises(SystemExit) as stopped:
        command.main([*SMALL.replace("--machine laptop", "").split(), *given.split()])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.startswith(f"错误：{told}")


REFUSED = [
    (
        ["--model", "nowhere:make"],
        "--model 必须是可以导入的 package.module:function，而 'nowhere:make' 找不到（No module"
        " named 'nowhere'）。请在模块所在的目录里运行命令，或者把这个目录加入 PYTHONPATH",
    ),
    (
        ["--mode", "ddp,zero3"],
        f"--mode 必须是 {', '.join(ranks_command.MODES)} 中的一种或几种，实际是 'zero3'",
    ),
    (["--steps", "0"], "--steps 必须是不小于 1 的整数，实际是 0"),
    (["--every", "2"], "--every 必须与 --save 一起使用"),
    (
        ["--ranks", "2", "--save", "here"],
        "--ranks 不能与 --save 同时使用，因为它只预测一个训练步，不启动任何进程",
    ),
    (
        ["--ranks", "2", "--micro-batches", "3"],
        "--micro-batches 必须是每个进程样本数（4）的约数，实际是 3",
    ),
]


WITHOUT_LOSS = "model 必须有损失，而 Linear 没有。请给模型加一个方法 loss_sum(batch)"


@pytest.mark.parametrize(("given", "told"), REFUSED)
def test_an_error_of_the_ranks_command_is_said_in_chinese(given, told, capsys, monkeypatch, fresh):
    monkeypatch.setenv("COURSE_LANG", "zh")
    monkeypatch.setattr(sys, "argv", ["command", *given])
    monkeypatch.setattr(ranks_command.signal, "signal", lambda *_: None)
    monkeypatch.setattr(ranks_command, "end_with", lambda parent: None)
    monkeypatch.setattr(
        ranks_command.os, "_exit", lambda code: (_ for _ in ()).throw(SystemExit(code))
    )
    with pytest.raises(SystemExit) as stopped:
        ranks_command.main.__wrapped__()
    assert stopped.value.code == 2 and capsys.readouterr().err.startswith(f"错误：{told}")


def test_every_sentence_of_an_error_in_the_catalog_is_one_that_a_command_says():
    told = [chinese for _, chinese in (*ERRORS, *REFUSED)] + [WITHOUT_LOSS]
    pieces = {
        zh: [piece[:5] for piece in re.split(r"\{\w+\}", zh)][:2]
        for zh in labels.sentences().values()
    }
    unsaid = [
        zh
        for zh, first in pieces.items()
        if not any(all(p in each for p in first) for each in told)
    ]
    assert pieces and unsaid == []


def test_the_way_is_drawn_in_the_language_and_every_character_has_its_glyph(
    tmp_path, capsys, monkeypatch, fresh
):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setenv("COURSE_LANG", "zh")
    monkeypatch.setenv("COURSE_LABELS", "strict")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a glyph that is missing is one
        assert (
            command.main([*SMALL.split(), "--budget", "2.5MB", "--plot", str(tmp_path / "way.png")])
            == 0
        )
    (ax,) = pyplot.gcf().axes
    legend = [each.get_text() for each in ax.get_legend().get_texts()]
    assert "参数" in legend and "优化器状态" in legend and all(map(HAN.search, legend))
    assert ax.get_title().endswith("个参数装进 2,500,000 字节（2.5 MB）") or HAN.search(
        ax.get_title()
    )
    assert all(HAN.search(each.get_text()) for each in ax.get_xticklabels()[1:])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--model m:f --sequence 8", "--sequence cannot be combined with --model"),
        ("--model m:f --batch 8", "--batch cannot be combined with --model"),
        ("--model m:f --vocabulary 8", "--vocabulary cannot be combined with --model"),
        ("--config c.json --vocabulary 8", "--vocabulary cannot be combined with --config"),
        ("--config c.json --batch-from m:f", "--batch-from cannot be combined with --config"),
        ("--parameters 1e6 --batch-from m:f", "--batch-from cannot be combined with --parameters"),
        (
            "--model m",
            (
                "--model must be package.module:function, which can be imported from"
                " here, got 'm' without a"
            ),
        ),
    ],
)
def test_what_would_be_passed_over_is_refused(arguments, says, capfd):
    status, [line] = refused(capfd, *arguments.split(), "--budget", "1GB")
    assert status == 2 and line.startswith(f"error: {says}")


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
        Recipe(
            precision="bf16",
            optimizer="momentum",
            update="foreach",
            accumulate="fp32",
            micro_batches=2,
        ),
        Recipe(
            precision=None,
            attention=None,
            head_chunk=8,
            checkpoint="segments",
            segments=2,
            in_backward=True,
        ),
        Recipe(checkpoint="optimal", schedule_bytes=10, micro_batches=3, offload_optimizer=0.5),
        Recipe(offload_activations=True, min_bytes=10),
    ],
    ids=str,
)
def test_the_way_leads_from_the_plain_step_to_the_recipe(recipe):
    steps = steps_to(recipe)
    assert steps[-1] == recipe and len(set(steps)) == len(steps) > 1
    assert steps[0].changed_fields().keys() <= {"precision", "optimizer", "update", "attention"}
    assert steps[0].attention == (None if recipe.attention is None else "standard")


# ---- which model


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA), encoding="utf-8")
    return str(path)


CHEAP = [
    "--sequence",
    "32",
    "--batch",
    "2",
    "--device",
    "laptop",
    "--precision",
    "fp32",
    "--optimizer",
    "sgd",
]


def test_a_config_is_read_and_its_cheapest_step_is_taken(config, capsys):
    assert command.main(["--config", config, *CHEAP, "--budget", "10MB", "--json", "--check"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["parameters"] == sum(
        p.numel() for p in command.workload_of(namespace(config)).make_model().parameters()
    )
    assert told["budget_bytes"] == 10**7 and told["recipes"][0]["peak_bytes"] <= 10**7
    plain = {"optimizer": "sgd", "attention": None}
    assert told["recipes"][0]["recipe"] == told["way"][-1]["recipe"] == plain
    check = told["check"]
    assert check["predicted_bytes"] == told["recipes"][0]["peak_bytes"]
    if check["device"] == "cpu":
        assert check["measured_bytes"] == check["predicted_bytes"] <= check["allocator_bytes"]


def namespace(config):
    return command.arguments().parse_args(["--config", config, *CHEAP])


def test_the_command_speaks_the_language_that_is_asked_for(config, capsys, monkeypatch):
    monkeypatch.setattr(labels, "_chosen", None)
    monkeypatch.setenv("COURSE_LABELS", "strict")  # English that has no Chinese is an error
    said, found, search = {}, [], command.fit

    def once(*asked, **options):  # a search speaks no language
        found[:] = found or [search(*asked, **options)]
        return found[0]

    monkeypatch.setattr(command, "fit", once)
    for spoken in ("en", "zh"):
        monkeypatch.setenv("COURSE_LANG", spoken)
        assert (
            command.main(
                ["--config", config, *CHEAP, "--budget", "1GB", "--check", "--device", "RTX 4090"]
            )
            == 0
        )
        said[spoken] = capsys.readouterr().out
    assert (
        "the way there:" in said["en"]
        and "1 recipe fits into" in said["en"]
        and not re.search("[一-鿿]", said["en"])
    )
    assert "从基线走到这里：" in said["zh"] and "1 种配方装得进" in said["zh"]
    numbers = [re.findall(r"\d[\d,.]*\d", text) for text in said.values()]
    assert sorted(numbers[0]) == sorted(numbers[1])


def test_where_nothing_fits_programs_are_told_so_too(config, capsys):
    assert command.main(["--config", config, *CHEAP, "--budget", "1kB", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (
        told["recipes"] == []
        and told["least_bytes"] > 1000
        and "the least peak found" in told["error"]
    )


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

def without_loss():
    return nn.Linear(8, 8)

def with_loss():
    return nn.Linear(8, 8)

with_loss.loss_sum = lambda model, batch: (model(batch).sum(), len(batch))
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
    assert (
        command.main(
            ["--model", *named, "--budget", "1GB", "--device", "laptop", "--precision", "fp32"]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert "9 parameters; 6 samples" in printed and "the cheapest: Recipe()" in printed


def test_a_model_without_a_loss_is_refused_and_the_advice_can_be_followed(
    own_module, capfd, monkeypatch, fresh
):
    more = ["--batch-from", f"{own_module}:batch", "--budget", "1GB"]
    status, [line] = refused(capfd, "--model", f"{own_module}:without_loss", *more)
    assert status == 2 and "as the attribute loss_sum of the function that --model names" in line
    assert command.main(["--model", f"{own_module}:with_loss", *more]) == 0
    assert "72 parameters; 6 samples" in capfd.readouterr().out
    monkeypatch.setenv("COURSE_LANG", "zh")
    _, [line] = refused(capfd, "--model", f"{own_module}:without_loss", *more)
    assert line.startswith(f"错误：{WITHOUT_LOSS}") and "--model 所指函数的属性 loss_sum" in line
    names = {"torch": torch}
    exec(line[line.index("def loss_sum") :], names)
    total, weight = names["loss_sum"](
        torch.nn.Linear(8, 3), (torch.ones(6, 8), torch.zeros(6).long())
    )
    assert total.dim() == 0 and total.requires_grad and weight == 6


FAILING = """
import torch
from torch import nn

class Net(nn.Linear):
    def loss(self, x):
        return self(x[:, :3]).mean()

class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        raise LookupError("not in the table")

class Late(Net):
    def loss(self, x):
        return Backward.apply(self(x)).mean()

class Looking(Net):
    def loss(self, x):
        if self(x).sum() > 0:
            return x.mean()

class Numbers(Net):
    def loss(self, x):
        return torch.as_tensor(self(x).detach().numpy().sum())

class Kept(Net):
    def loss(self, x):
        return (self(x) * kept).mean()

class Nameless(Net):
    def loss(self, x):
        return self(x).mena()

class Asking(Net):
    def loss(self, x):
        from course_lib.attention import flash_attention
        return flash_attention(self(x)[0], x, x)

kept = torch.ones(8)

def of(kind):
    def make():
        return kind(8, 8)
    make.make_batch = lambda: torch.ones(4, 8)
    return make

net, late, looking, numbers = of(Net), of(Late), of(Looking), of(Numbers)
before, nameless, asking = of(Kept), of(Nameless), of(Asking)

def missing():
    return {}["width"]

missing.make_batch = net.make_batch

def quits():
    raise ValueError("first line\\nsecond line")

quits.make_batch = net.make_batch

def no_batch():
    return Net(8, 8)

no_batch.make_batch = lambda: open("nowhere.txt")
"""
USERS = [  # what it is, the line that is named, the function, what is said
    ("net", "self(x[:, :3])", "loss", "RuntimeError: .*reduction dim"),
    ("late", "raise LookupError", "backward", "LookupError: not in the table"),
    ("nameless", ".mena()", "loss", "AttributeError: 'Tensor' object has no attribute 'mena'"),
    ("missing", "return {}", "missing", "KeyError: 'width'"),
    ("quits", "raise ValueError", "quits", "ValueError: first line"),
    ("no_batch", 'open("nowhere.txt")', "<lambda>", "FileNotFoundError: "),
]
REFUSED_IN_THE_USERS_CODE = [
    ("looking", ".sum() > 0", "loss", "the step reads values of its data"),
    ("numbers", ".numpy()", "loss", "the step reads values of its data"),
    ("before", "* kept", "loss", "got a tensor that was created earlier"),
    ("asking", "flash_attention(self", "loss", "q must be a dense tensor"),
]


@pytest.fixture
def failing(tmp_path, monkeypatch):
    """A module of the user's in the folder where the command is called; text -> the number of its
    line."""
    (tmp_path / "fails_in_a_test.py").write_text(FAILING, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "fails_in_a_test", raising=False)
    lines = FAILING.splitlines()
    return lambda text: next(number for number, line in enumerate(lines, 1) if text in line)


def refused(capfd, *arguments):
    """The exit status, and all that is on stderr, PyTorch's log with it."""
    with pytest.raises(SystemExit) as stopped:
        command.main([*arguments, "--precision", "fp32"])
    told = capfd.readouterr()
    assert told.out == ""
    return stopped.value.code, told.err.splitlines()


@pytest.mark.parametrize(
    ("which", "text", "function", "said"), USERS, ids=[case[0] for case in USERS]
)
def test_what_the_users_own_code_raises_is_told_in_two_lines_with_the_users_line(
    which, text, function, said, failing, capfd
):
    status, lines = refused(capfd, "--model", f"fails_in_a_test:{which}", "--budget", "1GB")
    place = f"fails_in_a_test.py, line {failing(text)}, in {function}"
    assert status == 1 and len(lines) == 2 and text in lines[1]
    assert re.match(f"error: {re.escape(place)}: {said}", lines[0]) and "Fake" not in lines[0]


@pytest.mark.parametrize(
    ("which", "text", "function", "said"),
    REFUSED_IN_THE_USERS_CODE,
    ids=[case[0] for case in REFUSED_IN_THE_USERS_CODE],
)
def test_what_is_refused_in_the_users_code_is_one_sentence_that_names_the_line(
    which, text, function, said, failing, capfd
):
    status, [line] = refused(capfd, "--model", f"fails_in_a_test:{which}", "--budget", "1GB")
    assert (
        status == 2
        and re.match(f"error: .*{said}", line)
        and re.search(" Change | must ", line)
        and "Fake" not in line
    )
    assert f"fails_in_a_test.py, line {failing(text)}, in {function}" in line


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ("import nowhere_to_be_found", 1, "error: own_import.py, line 2: ModuleNotFoundError: "),
        ("x = (1", 1, "error: own_import.py, line 2: SyntaxError: "),
        ("x.y", 1, "error: own_import.py, line 2: NameError: "),
        (
            "",
            2,
            (
                "error: --model must be package.module:function, which can be imported from here,"
                " got 'own_import:model', which is not found "
            ),
        ),
    ],
)
def test_a_module_that_fails_is_told_from_one_that_is_not_found(
    text, status, said, tmp_path, monkeypatch, capfd
):
    (tmp_path / "own_import.py").write_text(f"\n{text}\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_import", raising=False)
    code, lines = refused(capfd, "--model", "own_import:model", "--budget", "1GB")
    assert code == status and lines[0].startswith(said) and len(lines) <= 2


@pytest.mark.parametrize(
    ("which", "text", "function", "said"), USERS, ids=[case[0] for case in USERS]
)
def test_in_python_errors_keep_their_type_and_name_the_users_line(
    which, text, function, said, failing
):
    make = getattr(importlib.import_module("fails_in_a_test"), which)
    place = f"fails_in_a_test.py, line {failing(text)}, in {function}"
    for take in (estimate, run, partial(fit, progress=False)):
        with pytest.raises(Exception) as raised:
            take(make, make.make_batch, 10**6 if isinstance(take, partial) else Recipe())
        ends = traceback.extract_tb(raised.value.__traceback__)[-1]
        notes = getattr(raised.value, "__notes__", [])
        assert raised.value.__context__ is None  # nothing is shown twice
        assert type(raised.value) in (
            RuntimeError,
            LookupError,
            AttributeError,
            KeyError,
            ValueError,
            FileNotFoundError,
        )
        if ends.filename.endswith("fails_in_a_test.py"):
            assert (ends.lineno, notes) == (failing(text), [])
        else:
            assert len(notes) == 1 and notes[0].startswith(f"{place}: ") and text in notes[0]


def test_a_line_of_a_notebook_is_that_of_a_cell():
    cell = "import torch\ndef make():\n    model = torch.nn.Linear(2, 2)\n"
    cell += "    model.loss = lambda x: (x @ x).sum()\n    return model\n"
    names = {"__name__": "__main__"}
    exec(compile(cell, "ipykernel_1234/5678.py", "exec"), names)
    with pytest.raises(RuntimeError) as raised:
        estimate(names["make"], lambda: torch.ones(3, 2), Recipe())
    assert raised.value.__notes__[-1] == "a cell, line 4, in <lambda>"


def test_pytorchs_log_of_symbolic_tensors_is_silent_for_an_estimate_only(failing, caplog):
    make = importlib.import_module("fails_in_a_test").net
    for take in (
        partial(estimate, recipe=Recipe()),
        partial(fit, budget_bytes=10**6, progress=False),
    ):
        with pytest.raises(RuntimeError):
            take(make, make.make_batch)
    assert not caplog.records
    with pytest.raises(RuntimeError), symbolic():
        make().loss(make.make_batch())
    assert [record.name for record in caplog.records] == ["torch._subclasses.fake_tensor"]


@pytest.mark.parametrize("blocks", [None, "layers.*"])
@pytest.mark.parametrize("take", [estimate, run])
def test_bytes_that_no_schedule_fits_are_named_as_the_recipe_names_them(take, blocks):
    make = partial(Decoder, vocabulary=61, hidden=32, heads=4, layers=2, sequence=8)
    recipe = Recipe(checkpoint="optimal", schedule_bytes=1, blocks=blocks)
    with pytest.raises(
        InfeasibleBudget, match=r"^schedule_bytes is 1, but [^\n]* needs at least \d+$"
    ) as raised:
        take(make, partial(random_tokens, 2, 8, 61), recipe)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def screen(self):
        """What stands there in the end: a carriage return goes back to the line's beginning."""
        lines = []
        for text in self.getvalue().split("\n"):
            line = ""
            for part in text.split("\r"):
                line = part + line[len(part) :]
            lines.append(line.rstrip())
        return "\n".join(lines)


def test_no_bar_is_left_on_the_line_of_an_error(failing, monkeypatch):
    pytest.importorskip("tqdm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with pytest.raises(SystemExit):
        command.main(["--model", "fails_in_a_test:net", "--budget", "1GB"])
    assert "recipes" in terminal.getvalue()  # there was one
    assert terminal.screen().startswith("error: fails_in_a_test.py, line ")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": -4}, "num_hidden_layers must be a whole number, at least 1, got -4"),
        (
            {"num_hidden_layers": True},
            "num_hidden_layers must be a whole number, at least 1, got True",
        ),
        (
            {"num_key_value_heads": 3},
            "num_key_value_heads must be a divisor of the 4 attention heads, got 3",
        ),
        (
            {"hidden_size": 66},
            (
                "hidden_size must be a multiple of num_attention_heads = 4 unless"
                " head_dim is set, got 66"
            ),
        ),
    ],
)
def test_a_config_is_refused_before_the_search(changes, said, tmp_path, capfd, monkeypatch):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | changes), encoding="utf-8")
    monkeypatch.setattr(command, "fit", None)
    status, [line] = refused(
        capfd, "--config", str(path), "--sequence", "8", "--batch", "1", "--budget", "1GB"
    )
    assert status == 2 and line.startswith(f"error: {said}")


ONE_LAYER = (
    "--hidden 64 --layers 1 --heads 2 --vocabulary 100 --sequence 32 --batch 1 --optimizer sgd"
)


def test_a_device_has_the_budget_where_none_is_given(capsys):
    size = f"{ONE_LAYER} --json".split()
    assert command.main([*size, "--device", "RTX 4090"]) == 0
    told = json.loads(capsys.readouterr().out)
    memory = RATES["RTX 4090"].memory_bytes
    assert told["budget_bytes"] == told["rates"]["memory_bytes"] == memory and told[
        "room_bytes"
    ] == memory - kept_bytes("RTX 4090")
    assert told["device"] == "RTX 4090" and told["kind"] == "cuda"


def test_cublas_keeps_8_mib_a_thread_and_four_times_that_on_hopper():
    assert workspace_bytes("A100") == workspace_bytes("this") == 2 * 8320 * 1024
    assert workspace_bytes("H100") == workspace_bytes("H200") == 2 * 32 << 20
    assert kept_bytes("MI300X") == 0  # without CUDA


def test_what_a_gpu_holds_beside_the_tensors_stands_beside_the_figures_and_in_none_of_them(capsys):
    size = ONE_LAYER.split()
    assert command.main([*size, "--device", "H100", "--budget", "1GB"]) == 0
    printed = capsys.readouterr().out
    best = estimate(
        partial(Decoder, vocabulary=100, hidden=64, heads=2, layers=1, sequence=32, fused=True),
        partial(random_tokens, 1, 32, 100),
        eval(re.search(r"the cheapest: (Recipe\(.*\))", printed)[1], {"Recipe": Recipe}),
        tier="host",
        kind="cuda",
    )
    assert f"peak {best.peak_bytes:,} bytes" in printed
    allocator = CachingAllocator()
    allocator.replay(best.trace())
    reserved = allocator.memory_stats()["reserved_bytes.all.peak"]
    left = 10**9 - reserved - (64 << 20) - CONTEXT_HOPPER_BYTES
    first, table = printed.split("what one step of the cheapest holds on a GPU:")
    [row] = [line for line in first.splitlines() if line.endswith(str(best.recipe))][:1]
    assert f"{best.peak_bytes / 1e6:,.1f}  " in row and f"  {left / 1e6:,.1f}  " in row
    for line, count in (
        ("tensors at the peak", best.peak_bytes),
        ("reserved, by the allocator's rules", reserved),
        ("workspace that cuBLAS keeps", 64 << 20),
        ("the context of CUDA", CONTEXT_HOPPER_BYTES),
        ("of the 1,000.0 MB,", left),
    ):
        [row] = [row for row in table.splitlines() if row.startswith(line)]
        assert f" {count / 1e6:,.1f} " in f"{row} "
    assert command.main([*size, "--device", "laptop", "--budget", "1GB", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["kind"], told["on_device"]) == ("cpu", None)


@pytest.mark.parametrize(("budget", "status"), [("1GB", 0), (f"{kept_bytes('A100') + 99}B", 1)])
def test_memory_that_cuda_keeps_is_named_where_the_budget_is_less_by_it(budget, status, capsys):
    asked = [*ONE_LAYER.split(), "--device", "A100", "--budget", budget]
    assert command.main(asked) == status
    memory = options.byte_count(budget)
    counts = [kept_bytes("A100"), memory, memory - kept_bytes("A100")]
    kept, whole, room = map(bytes_text, counts)
    printed = "".join(capsys.readouterr())
    sentence = f"CUDA's context and cuBLAS keep {kept} of the {whole}, so {room} are left"
    assert printed.count(sentence) == 1 and re.search(rf"fits? into {re.escape(room)}", printed)
    if status == 0:
        assert command.main([*asked, "--count", "tensors"]) == 0
        printed = capsys.readouterr().out
        assert "cuBLAS keep" not in printed.partition("the way there")[0]
        assert re.search(rf"fits? into {re.escape(whole)}; \d+ were estimated", printed)


def test_the_search_goes_by_what_is_reserved_where_that_is_asked_for(capsys):
    budget = 3_000_000 + kept_bytes("H100")
    size = [*ONE_LAYER.split(), "--device", "H100", "--budget", f"{budget}B", "--json"]
    assert command.main(size) == 0
    told = json.loads(capsys.readouterr().out)
    best = told["on_device"]
    assert told["count"] == "reserved"
    assert best["tensors"] == told["recipes"][0]["peak_bytes"] < best["reserved"] <= 3_000_000
    assert best["reserved"] == told["recipes"][0]["reserved_bytes"]
    tensors = [*size[:-2], "3MB", "--json", "--count", "tensors"]
    assert command.main(tensors) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["room_bytes"] == 3_000_000 >= told["recipes"][0]["peak_bytes"]
    with pytest.raises(SystemExit) as raised:
        command.main([*size, "--device", "laptop", "--count", "reserved"])
    assert raised.value.code == 2 and "no caching allocator" in capsys.readouterr().err


def test_where_the_cheapest_leaves_little_a_recipe_that_leaves_more_is_shown(capsys):
    """The budget is the cheapest recipe's own peak, so that it leaves nothing."""
    size = [*ONE_LAYER.split(), "--device", "laptop", "--json", "--budget"]
    assert command.main([*size, "1GB"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["leaner"] == []
    peak = told["recipes"][0]["peak_bytes"]
    assert command.main([*size, f"{peak}B"]) == 0
    told = json.loads(capsys.readouterr().out)
    [leaner] = told["leaner"]
    assert told["recipes"][0]["peak_bytes"] == peak
    assert leaner["peak_bytes"] <= 0.95 * peak and leaner not in told["recipes"]
    assert command.main([*size[:-2], "--budget", f"{peak}B"]) == 0
    assert "the cheapest leaves less than 5% of the budget" in capsys.readouterr().out


def test_the_plain_step_calls_the_attention_that_people_have(config, capsys):
    """The baseline of a config is PyTorch's attention, as transformers' default, and no recipe
    replaces it by the course's tiles."""
    size = ["--config", config, "--sequence", "32", "--batch", "2", "--device", "laptop"]
    assert command.main([*size, "--budget", "1GB", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert all(each["recipe"]["attention"] is None for each in (*told["recipes"], *told["way"]))
    made = command.workload_of(command.arguments().parse_args(size)).make_model
    with symbolic():
        assert {layer.attention.fused for layer in made().layers} == {True}


def test_advice_names_the_techniques_that_act_on_the_largest_category():
    def advice(recipe, **at_peak):
        return command._advice(Estimate(recipe, 1, at_peak, {}, "", 1, 0, 0))

    plain = advice(Recipe(), activation=3, optimizer=2)
    assert plain.endswith(
        "precision, attention, checkpoint, offload_activations, head_chunk, micro_batches, ranks"
    )
    assert "micro_batches" not in advice(Recipe(in_backward=True), activation=3, optimizer=2)
    some = advice(Recipe(precision="bf16", offload_optimizer=1.0), activation=1, optimizer=2)
    assert some.endswith(": optimizer, ranks")
    many = {"in_backward": True, "precision": "bf16"}
    assert advice(Recipe(**many), gradient=2).endswith("as fields of Recipe: ranks")
    assert "already uses every technique" in advice(Recipe(ranks=4, precision="bf16"), parameter=2)


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
    monkeypatch.setattr(
        command, "this_machine", lambda: Rates(1e9, 2e9, 3e9, verbatim("measured, in a test"))
    )
    assert (
        command.main(
            [*SMALL.replace("laptop", "this").split(), "--budget", "1GB", "--optimizer", "sgd"]
        )
        == 0
    )
    assert "measured, in a test" in capsys.readouterr().out


def test_a_step_that_is_larger_than_the_machine_is_not_taken(monkeypatch, capsys):
    monkeypatch.setattr("course_lib.budget.check._memory", lambda device: 1000)
    with pytest.raises(SystemExit):
        command.main([*SMALL.split(), "--budget", "1GB", "--optimizer", "sgd", "--check"])
    assert "this machine has 1,000 bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            "--sequence 32 --batch 2 --budget 1MB",
            "--parameters, or --hidden and --layers, got none",
        ),
        (
            "--config a.json --hidden 3 --sequence 32 --batch 2 --budget 1MB",
            "--parameters, or --hidden and --layers, got --config and --hidden",
        ),
        (
            "--config none.json --sequence 32 --batch 2 --budget 1MB",
            "must be a file that can be read, got 'none.json'",
        ),
        ("--hidden 64 --layers 1 --batch 2 --budget 1MB", "--sequence is missing"),
        ("--hidden 64 --layers 1 --sequence 8 --budget 1MB", "--batch is missing"),
        ("--hidden 64 --sequence 8 --batch 1 --budget 1MB", "the size is missing"),
        ("--hidden 64 --layers 1 --sequence 8 --batch 1", "--budget is missing"),
        ("--hidden 64 --layers 1 --sequence 8 --batch 1 --device laptop", "--budget is missing"),
        ("--model nowhere_at_all:model --budget 1MB", "is not found"),
        ("--model json:dumps --budget 1MB", "--batch-from is missing"),
        ("--model own_module_of_a_user:value --budget 1MB", "must be package.module:function"),
        ("--model own_module_of_a_user:absent --budget 1MB", "must be package.module:function"),
    ],
)
def test_a_model_that_cannot_be_found_is_said_in_one_sentence(options, told, own_module, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(options.split())
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and told in error.splitlines()[-1] and "Traceback" not in error


def test_a_config_of_an_unknown_class_is_named_with_what_is_known(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "model_type": "lama"}), encoding="utf-8")
    with pytest.raises(SystemExit):
        command.main(["--config", str(path), *CHEAP, "--budget", "1GB"])
    last = capsys.readouterr().err.splitlines()[-1]
    assert "got 'lama'" in last and all(name in last for name in ("llama", "mixtral", "gpt2"))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0.000"),
        (1234.5, "1,234.500"),
        (0.01, "0.010"),
        (0.00999, "0.00999"),
        (1.23e-5, "0.0000123"),
    ],
)
def test_a_small_number_is_shown_with_three_digits_instead_of_zeros(value, shown):
    assert decimal(value) == shown
