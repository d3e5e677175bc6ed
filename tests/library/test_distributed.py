"""Distributed training on 2 and 4 processes, compared with one process and with predictions."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from process_groups import run_ranks, single_process_group
from timeouts import TIMEOUT_SECONDS
from torch import nn
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.utils.flop_counter import FlopCounterMode

from course_lib._torch.symbolic import is_symbolic
from course_lib.accumulation import AccumulatedStep
from course_lib.budget import Recipe, estimate
from course_lib.distributed import (
    MODES,
    Trainer,
    Watch,
    held_bytes,
    latest_complete_checkpoint,
    launch,
    load,
    predict,
    save,
    sent_bytes,
    shapes_of,
    task_of,
    train,
)
from course_lib.distributed import __main__ as command
from course_lib.distributed.training.sharded_checkpoint import check_fits
from course_lib.distributed.training.torchrun import end_on_signals
from course_lib.memory import MemoryBudgetExceeded

ON_CPU = [mode for mode in MODES if mode != "fsdp-cpu"]
ON_FOUR = ["ddp", "zero1", "fsdp"]
STEPS, MORE = 4, 2  # bytes are measured in the third step
MAX_NORM = 0.3  # of the gradient in the steps after these
# Shards are padded: 2 and 4 do not divide the vocabulary, and 4 does not divide the width.
CONFIG = {
    "model_type": "gpt2",
    "vocab_size": 515,
    "n_embd": 66,
    "n_head": 2,
    "n_layer": 2,
    "n_positions": 32,
}
BF16_TOLERANCE = 5e-3  # of a loss: matrix products in bf16 keep 8 bits

USER_CODE = """
import os, torch
from course_lib.models import Decoder, random_tokens


def small():
    return Decoder(vocabulary=97, hidden=32, heads=2, layers=2, sequence=16)


def failing():
    def fail(*_):
        calls.append(1)
        if len(calls) == 2 and os.environ.get("RANK") == "1":
            raise ArithmeticError(f"rank 1 gives up on {os.environ['GLOO_SOCKET_IFNAME']}")

    model, calls = small(), []
    model.register_forward_pre_hook(fail)
    return model


def dropping():
    torch.manual_seed(0)
    blocks = ([torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)] for _ in range(2))
    return torch.nn.Sequential(*(torch.nn.Sequential(*block) for block in blocks))


dropping.loss_sum = lambda model, x: (model(x).square().sum(), len(x))
dropping.make_batch = lambda: torch.ones(4, 8)


def wrong(model, batch):
    return model(batch[:, :-1]) @ batch.float(), 1


def made_wrong():
    return small()


made_wrong.loss_sum = wrong
mean, with_width = (lambda: torch.nn.Linear(2, 2)), (lambda width: None)
for function in (small, failing, mean, made_wrong, with_width):
    function.make_batch = lambda: random_tokens(4, 16, 97)
"""
WRONG = USER_CODE[: USER_CODE.index("    return model(")].count("\n") + 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributed")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "rank_code.py").write_text(USER_CODE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        for path in (Path(__file__).parents[2], folder):
            patch.setenv("PYTHONPATH", str(path), prepend=os.pathsep)
        yield folder


@pytest.fixture(scope="module")
def task(folder):
    return task_of(str(folder / "config.json"), sequence=32, unequal=True)


@pytest.fixture(scope="module")
def options(folder):
    return ["--config", str(folder / "config.json"), "--sequence", "32", "--unequal", "--details"]


@pytest.fixture(scope="module")
def two_ranks(folder, options):
    """Return the output of all modes on 2 processes, saved after the last step."""
    more = ["--mode", ",".join(ON_CPU), "--steps", str(STEPS), "--save", str(folder / "saved")]
    more += ["--every", str(STEPS)]
    return {line["mode"]: line for line in launch(2, *options, *more, timeout=TIMEOUT_SECONDS)}


@pytest.fixture(scope="module")
def four_ranks(folder, options, two_ranks):
    """Resume the checkpoints of `two_ranks` on 4 processes, with micro-batches and clipping."""
    more = ["--mode", ",".join(ON_FOUR), "--steps", str(MORE), "--resume", str(folder / "saved")]
    more += ["--micro-batches", "2", "--max-norm", str(MAX_NORM)]
    return {line["mode"]: line for line in launch(4, *options, *more, timeout=TIMEOUT_SECONDS)}


@pytest.fixture(scope="module")
def by_hand(task):
    """Return losses and norms of a plain loop on the whole batch, which clips in its last steps."""
    model, losses, norms = task.make_model(), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS + MORE):
        batch = task.make_batch(step)
        logits, labels = model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten()
        loss = nn.functional.cross_entropy(logits, labels)
        loss.backward()
        limit = MAX_NORM if step >= STEPS else math.inf
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def shard_sizes(model, ranks):
    """Return each rank's number of elements without padding, and the padded number."""
    chunks = [[c.numel() for c in torch.chunk(p, ranks)] for p in model.parameters()]
    own = [sum(c[rank] for c in chunks if rank < len(c)) for rank in range(ranks)]
    return own, own[0]


def predict_rank(task, mode, ranks=2, rank=0, **options):
    """Predict the memory and communication of a rank."""
    make_batch = partial(task.part, 0, ranks, rank)
    return predict(task.make_model, make_batch, task.loss_sum, mode, ranks, rank=rank, **options)


def test_predicted_model_is_symbolic_and_takes_no_memory(task):
    made = []

    def make_model():
        made.append(task.make_model())
        return made[-1]

    predict(make_model, partial(task.part, 0, 2, 0), task.loss_sum, "zero1", 2)
    assert is_symbolic(*made[0].parameters())


# ---- on 2 and 4 processes


@pytest.mark.parametrize("mode", ON_CPU)
def test_two_ranks_have_losses_of_one_process_and_predicted_bytes(two_ranks, task, by_hand, mode):
    tolerance = BF16_TOLERANCE if mode == "fsdp-bf16" else 1e-5
    assert two_ranks[mode]["losses"] == pytest.approx(by_hand[0][:STEPS], abs=tolerance, rel=0)
    assert two_ranks[mode]["ranks"] == 2 and "norms" not in two_ranks[mode]
    for rank in (0, 1) if mode in ("zero1", "fsdp") else (0,):
        found = predict_rank(task, mode, rank=rank)
        assert asdict(found) == two_ranks[mode]["taken"][rank]
        assert found.peak_bytes == sum(found.at_peak.values())


@pytest.mark.parametrize("mode", ON_FOUR)
def test_training_resumed_on_four_ranks_equals_training_in_one_process(
    four_ranks, task, by_hand, mode
):
    losses, norms = (values[STEPS:] for values in by_hand)
    assert four_ranks[mode]["losses"] == pytest.approx(losses, abs=1e-5, rel=0)
    assert four_ranks[mode]["norms"] == pytest.approx(norms, rel=1e-4) and min(norms) > MAX_NORM
    found = predict_rank(task, mode, 4, micro_batches=2, max_norm=MAX_NORM)
    assert asdict(found) == four_ranks[mode]["taken"][0]


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_stores_predicted_bytes_of_padded_zero_shards(two_ranks, four_ranks, task, ranks):
    model = task.make_model()
    shapes, tensors = shapes_of(model), len(list(model.parameters()))
    own, padded = shard_sizes(model, ranks)
    elements = sum(own)
    assert padded > own[-1]
    for mode, line in {2: two_ranks, 4: four_ranks}[ranks].items():
        measured, whole = line["measured"], mode in ("ddp", "zero1")
        each = [4 * (elements if whole else padded)] * ranks
        assert measured["parameter"] == measured["gradient"] == each
        if mode == "ddp":
            assert measured["optimizer"] == [8 * elements + 4 * tensors] * ranks
        elif mode == "zero1":
            assert sum(measured["optimizer"]) == 8 * elements + 4 * tensors
        else:
            assert measured["optimizer"] == [8 * share + 4 * tensors for share in own]
        assert line["predicted"] == {name: max(values) for name, values in measured.items()}
        held = held_bytes(shapes, mode, ranks)
        assert {name: [rank[name] for rank in held] for name in measured} == measured


def test_measured_communicated_bytes_equal_formula(two_ranks, four_ranks, task):
    model = task.make_model()
    elements = sum(p.numel() for p in model.parameters())
    padded, blocks = (2 * shard_sizes(part, 2)[1] for part in (model, model.layers))
    expected = {
        "ddp": 4 * 2 * elements,
        "zero1": 4 * 3 * elements,  # its all-reduce, and a broadcast of each parameter
        "fsdp": 4 * (2 * padded + blocks),  # the root is gathered once
        "fsdp-keep": 4 * 2 * padded,
        "fsdp-checkpoint": 4 * (2 * padded + blocks),
        "fsdp-bf16": 2 * (padded + blocks) + 4 * padded,
    }
    padded, blocks = (4 * shard_sizes(part, 4)[1] for part in (model, model.layers))
    # Weights are gathered for both micro-batches, and gradients reduced with the last one.
    on_four = expected | {"fsdp": 4 * (2 * (padded + blocks) + padded)}
    for lines, sent in ((two_ranks, expected), (four_ranks, on_four)):
        for mode, line in lines.items():
            assert line["communicated"] == {"predicted": sent[mode], "measured": sent[mode]}


@pytest.mark.parametrize(
    ("mode", "field"),
    [("fsdp-checkpoint", {"checkpoint": "layers"}), ("fsdp-bf16", {"precision": "bf16"})],
)
def test_estimate_of_two_ranks_equals_measured_bytes(two_ranks, task, mode, field):
    """Compare two recipes; `test_budget_ranks.py` compares all others with a prediction."""
    recipe = Recipe(ranks=2, shard="zero3", attention=None, **field)
    found = estimate(task.make_model, lambda: task.make_batch(0), recipe, loss_sum=task.loss_sum)
    taken = max(two_ranks[mode]["taken"], key=lambda rank: rank["peak_bytes"])
    for name in ("peak_bytes", "flops", "sent_bytes"):
        assert getattr(found, name) == taken[name]
    held = taken["at_peak"]
    gathered = {"parameter": held["parameter"] + held["gathered"]}
    assert found.at_peak | {"gathered": held["gathered"]} == held | gathered


@pytest.mark.parametrize(("mode", "steps"), [("ddp", 3), ("zero1", 2), ("fsdp-checkpoint", 3)])
def test_single_rank_sends_no_bytes_and_stores_all_state(task, by_hand, mode, steps):
    shapes = shapes_of(task.make_model())
    with single_process_group():
        run = train(task, mode, steps)
    assert run.losses == pytest.approx(by_hand[0][:steps], abs=1e-5, rel=0)
    [taken] = run.taken
    assert taken.sent_bytes == run.predicted_sent == 0
    assert [taken.held] == held_bytes(shapes, mode, 1)
    assert taken == predict_rank(task, mode, ranks=1)
    if mode in ("ddp", "zero1"):  # all buckets: the peak is before the first gradient is computed
        assert taken.at_peak["gradient"] == 4 * shapes.numbers


@pytest.mark.parametrize("mode", ["fsdp", "fsdp-keep", "fsdp-checkpoint"])
def test_bf16_option_gathers_in_bf16_and_stores_shards_in_fp32(task, mode):
    shapes, options = shapes_of(task.make_model()), {"bf16": True}
    found = predict_rank(task, mode, **options)
    assert found.sent_bytes == sent_bytes(shapes, mode, 2, **options)
    assert found.held == held_bytes(shapes, mode, 2)[0]  # the shards stay in fp32


def test_bytes_of_gathered_parameters_at_peak_equal_formula(two_ranks, task):
    model = task.make_model()
    parts = model, model.layers, model.layers[0]
    total, blocks, block = (4 * 2 * shard_sizes(part, 2)[1] for part in parts)
    root = total - blocks
    gathered = {mode: line["taken"][0]["at_peak"]["gathered"] for mode, line in two_ranks.items()}
    assert gathered.pop("fsdp-checkpoint") in (root, root + block)
    expected = {"fsdp": root, "fsdp-bf16": root / 2, "fsdp-keep": total}
    assert gathered == {"ddp": 0, "zero1": 0} | expected


# ---- symbolic ranks


@pytest.mark.parametrize("mode", ["fsdp", "fsdp-checkpoint"])
def test_flop_counter_around_prediction_does_not_change_predicted_bytes(task, mode):
    found = predict_rank(task, mode)
    with FlopCounterMode(display=False) as counter:  # its hooks would keep recomputed tensors alive
        assert predict_rank(task, mode) == found
    assert counter.get_total_flops() == found.flops > 0


@pytest.mark.parametrize("mode", ["ddp", "zero1", "fsdp"])
def test_reducing_gradients_once_lowers_traffic_but_raises_peak(task, mode):
    shapes = shapes_of(task.make_model())
    each, last = (predict_rank(task, mode, micro_batches=2, sync=sync) for sync in ("each", "last"))
    for sync, taken in (("each", each), ("last", last)):
        assert taken.sent_bytes == sent_bytes(shapes, mode, 2, micro_batches=2, sync=sync)
    saved, cost = each.sent_bytes - last.sent_bytes, last.peak_bytes - each.peak_bytes
    gradient = 4 * shapes.numbers
    if mode == "fsdp":  # full gradients instead of shards
        assert saved == 4 * 2 * shard_sizes(task.make_model(), 2)[1] and 0.4 < cost / gradient <= 1
        return
    # Gradients that are not reduced yet are summed outside the buckets and copied there at the end.
    assert saved == 2 * gradient and cost == gradient
    kept = predict_rank(task, mode, micro_batches=2, in_buckets=True)
    assert kept.sent_bytes == last.sent_bytes and kept.peak_bytes == each.peak_bytes


def test_accumulating_in_ddp_buckets_has_same_losses_and_predicted_memory(task):
    options = {"micro_batches": 2, "max_norm": 1.0}
    with single_process_group():
        plain, in_buckets = (train(task, "ddp", 4, in_buckets=b, **options) for b in (False, True))
    assert in_buckets.losses == plain.losses and in_buckets.norms == plain.norms
    assert in_buckets.taken == [predict_rank(task, "ddp", 1, in_buckets=True, **options)]


def test_rank_that_exceeds_its_memory_budget_is_stopped(one_process, task):
    peak = train(task, "ddp", 3).taken[0].peak_bytes
    assert train(task, "ddp", 3, budget_bytes=peak).as_dict()["budget_bytes"] == peak
    with pytest.raises(MemoryBudgetExceeded) as stopped:
        train(task, "ddp", 3, budget_bytes=peak - 1)
    assert stopped.value.budget_bytes == peak - 1


@pytest.mark.parametrize(
    ("option", "budgets"),
    [("48e6", {"ddp": 48e6, "fsdp": 48e6}), ("fsdp=9B,ddp=8kB", {"ddp": 8000, "fsdp": 9})],
)
def test_budget_option_applies_to_every_mode_or_one_named_mode(option, budgets):
    assert command._parse_budgets(option, ["ddp", "fsdp"]) == budgets


def towers():
    """Return two lists of different blocks. The shorter list has more parameters."""
    lists = {
        name: nn.Sequential(
            *(nn.Sequential(nn.Linear(64, wide), nn.Linear(wide, 64)) for _ in range(count))
        )
        for name, wide, count in (("tower", 256, 2), ("decoder", 64, 3))
    }
    return nn.Sequential(OrderedDict(lists, end=nn.Identity()))


towers.make_batch = lambda: torch.ones(8, 64)
towers.loss_sum = lambda model, x: (model(x).square().sum(), len(x))


def test_command_warns_if_unlisted_blocks_make_fsdp_root_large(run_command):
    options = ["--model", f"{__name__}:towers", "--ranks", "8", "--mode", "fsdp-checkpoint"]
    [some], errors, _ = run_command(*options, "--json", "--blocks", "decoder.*")
    assert "73%" in errors and "tower.0.0.weight" in errors
    [every], errors, _ = run_command(*options, "--json", "--blocks", "tower.*,decoder.*")
    assert errors == "" and every["at_peak"]["gathered"] < some["at_peak"]["gathered"]
    [unnamed], errors, _ = run_command(*options, "--json")
    assert errors == "" and unnamed["peak_bytes"] == every["peak_bytes"] < some["peak_bytes"]


def test_failed_step_leaves_no_hook_on_the_optimizer():
    model = nn.Linear(2, 2)
    trainer = MagicMock(optimizer=torch.optim.SGD(model.parameters()))
    with pytest.raises(KeyError), Watch(model) as watch, watch.step(trainer):
        raise KeyError
    trainer.optimizer.step()
    assert not trainer.model.parameters.called  # the hook would ask for the gradients


@pytest.mark.parametrize(
    ("mode", "shard"), [("ddp", "ddp"), ("zero1", "zero1"), ("fsdp-keep", "zero2")]
)
def test_frozen_parameters_are_communicated_only_if_sharded(task, mode, shard):
    """Train one layer of the model, as with LoRA; it has a buffer, as of a rotary embedding."""

    def make_model():
        model = task.make_model().requires_grad_(False)
        model.layers[0].requires_grad_(True).register_buffer("table", torch.ones(8))
        return model

    frozen, shapes = replace(task, make_model=make_model), shapes_of(make_model())
    recipe = Recipe(ranks=2, shard=shard, attention=None)
    make_batch = partial(task.make_batch, 0)
    found = estimate(make_model, make_batch, recipe, loss_sum=task.loss_sum)
    taken = predict_rank(frozen, mode)
    assert taken.sent_bytes == sent_bytes(shapes, mode, 2) == found.sent_bytes
    with single_process_group():  # they have neither gradient nor state
        [taken] = train(frozen, mode, 1).taken
    assert [taken.held] == held_bytes(shapes, mode, 1)


# ---- errors and interrupts


def test_failing_rank_stops_all_ranks_and_shows_its_traceback(folder):
    options = ["--model", "rank_code:failing", "--mode", "fsdp", "--steps", "50"]
    with pytest.raises(RuntimeError, match="rank 1 gives up on lo") as error:
        launch(2, *options, timeout=TIMEOUT_SECONDS)
    message = str(error.value)
    assert "in fail" in message and "Root Cause" in message
    assert "gloo/transport" not in message  # the error of the other rank


SLOW_TO_END = """#!/bin/sh
trap 'sleep 1; exit 1' TERM
echo $$ > {folder}/pid
while true; do sleep 0.1; done
"""


def put_python(monkeypatch, folder, script):
    """Let `launch` start a shell script instead of Python."""
    path = folder / "python"
    path.write_text(script)
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def test_interrupted_launch_waits_until_ranks_have_ended(monkeypatch, tmp_path):
    put_python(monkeypatch, tmp_path, SLOW_TO_END.format(folder=tmp_path))
    pid = tmp_path / "pid"

    def interrupted(self, **options):
        monkeypatch.undo()  # launch itself waits by `communicate` once more
        while not pid.exists() or not pid.read_text().strip():
            time.sleep(0.02)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        launch(2)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


@pytest.mark.parametrize("gpu", [False, True])
def test_ranks_are_forked_only_without_gpu(gpu, monkeypatch, tmp_path):
    """CUDA cannot be used in a forked process."""
    put_python(monkeypatch, tmp_path, '#!/bin/sh\necho "$@" >&2\nexit 1\n')
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    with pytest.raises(RuntimeError) as error:
        launch(2)
    assert ("--start-method fork" in str(error.value)) is (sys.platform == "linux" and not gpu)


def test_launch_raises_error_message_of_launched_command(monkeypatch, tmp_path):
    put_python(monkeypatch, tmp_path, "#!/bin/sh\necho error: x must be 1 >&2; echo >&2; exit 2\n")
    with pytest.raises(RuntimeError, match=r"exit status 2: error: x must be 1$"):
        launch(1)


LOST_PEER = RuntimeError("[gloo/gloo/transport/tcp/pair.cc:457] writev [127.0.0.1]: Broken pipe")


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        (LOST_PEER, 1),
        (dist.DistBackendError("NCCL error: remote process exited"), 1),
        (RuntimeError("rank 1 gives up"), 0),
    ],
)
def test_rank_that_lost_peer_waits_for_failed_ranks_report(monkeypatch, capsys, error, waits):
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    with pytest.raises((RuntimeError, SystemExit)) as raised, command._report_cause_first():
        raise error
    assert len(waited) == waits and (raised.value is error) == bool(waited)
    message = r"rank 0: error: \S*test_distributed\.py, line \d+, in test_\w+: RuntimeError: rank 1"
    assert bool(re.match(message, capsys.readouterr().err)) == (not waited)


def test_latest_complete_checkpoint_ignores_incomplete_folders_and_has_largest_step(tmp_path):
    for name in ("step-99999999", "step-100000000", "step-100000002-b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").touch()
    (tmp_path / "step-100000001").mkdir()  # not complete
    assert latest_complete_checkpoint(tmp_path).name == "step-100000000"


def test_signals_end_ranks_at_once(monkeypatch):
    handlers = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    end_on_signals()
    assert handlers == dict.fromkeys((signal.SIGINT, signal.SIGTERM), signal.SIG_DFL)


class ProcessEnded(BaseException):
    """Raised instead of ending the process."""


@pytest.fixture
def run_command(monkeypatch, capsys, folder):
    """Return a function that runs the command, with `ranks` as a rank of torchrun.

    It returns the JSON lines, stderr, and the exit status if the command ends the process.
    """

    def run(*arguments, ranks=None, rank=0):
        with monkeypatch.context() as patch:
            end = MagicMock(side_effect=ProcessEnded)
            patch.setattr(command, "end_on_signals", MagicMock())
            patch.setattr(sys, "argv", ["course_lib.distributed", *arguments])
            patch.setattr(command, "RANK", rank)
            patch.setattr(os, "_exit", end)
            patch.setattr(time, "sleep", MagicMock(side_effect=ProcessEnded))
            patch.delenv("TORCHELASTIC_RUN_ID", raising=False)
            if ranks:
                patch.setenv("TORCHELASTIC_RUN_ID", "none")
                for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
                    patch.setenv(name, str(ranks))
                patch.setenv("LOCAL_RANK", str(rank))
            with suppress(ProcessEnded):
                command.main()
        out, errors = capsys.readouterr()
        status = end.call_args.args[0] if end.called else None
        return [json.loads(line) for line in out.splitlines()], errors, status

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--mode ddp,zero3", "--mode must be one or several of ddp,"),
        ("--backend nccl", "--backend nccl needs one GPU"),
        ("--steps 0", "--steps must"),
        ("--micro-batches 3", "--micro-batches must be a divisor of a rank's 4 samples"),
        ("--batch 3", "the number of ranks must be a divisor of the batch's 3 samples (1, 3)"),
        ("--sequence 0", "--sequence: must"),
        ("--config nowhere.json", "config must be a file"),
        ("--model nowhere:model", "'nowhere:model', which is not found"),
        ("--model rank_code:small --batch 8", "--batch cannot be combined with --model"),
        ("--resume nowhere", "resume must be a folder with a complete checkpoint"),
        ("--model rank_code:mean", "must have a method loss_sum"),
        ("--every 2", "--every needs --save"),
        ("--max-norm 0", "--max-norm must"),
        ("--budget 48", "--budget must have a unit"),
        ("--budget fsdp=48e6", "with one of the modes ddp, got 'fsdp="),
        ("--blocks layer.*", "blocks must match the name of a module"),
        ("--mode fsdp,ddp --bf16", "--bf16 cannot be combined with --mode ddp, only with modes"),
        ("--mode ddp,fsdp --in-buckets", "--in-buckets cannot be combined with --mode fsdp"),
        ("--ranks 2 --budget 48e6", "--ranks cannot be combined with --budget"),
        ("--ranks 2 --mode fsdp-cpu", "--ranks cannot be combined with --mode fsdp-cpu"),
        # Errors of the user's code, with its line.
        ("--ranks 2 --model rank_code:made_wrong", f"line {WRONG}, in wrong: RuntimeError: "),
        ("--ranks 2 --model rank_code:with_width", "--model must be callable with no arguments"),
    ],
)
def test_command_rejects_bad_options_in_one_sentence(
    run_command, monkeypatch, caplog, arguments, message
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    lines, errors, status = run_command(*arguments.split(), ranks=2)
    assert errors.startswith("error: ") and message in errors and lines == [] == caplog.records
    assert errors.count("\n") == 3 - status and status == (1 if "Error: " in message else 2)
    assert run_command(*arguments.split(), ranks=2, rank=1) == ([], "", None)  # only on rank 0


def test_command_started_without_torchrun_explains_how_to_start_it(run_command):
    _, errors, status = run_command()
    assert "python -m torch.distributed.run" in errors and status == 2


def test_fsdp_checkpoint_loads_into_zero1_of_same_model_only(one_process, task, tmp_path):
    first, second = (Trainer(mode, task.make_model(), task.loss_sum) for mode in ("fsdp", "zero1"))
    for step in range(2):
        first(task.part(step, 1, 0))
    saved = save(tmp_path, first, 2)
    assert load(saved, second) == 2
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), other)
        moments = first.optimizer.state[one]["exp_avg_sq"].full_tensor()
        assert torch.equal(moments, second.local.state[other]["exp_avg_sq"])
    check_fits(saved, task.make_model())
    with pytest.raises(ValueError, match=r"head.weight is \(515, 66\) instead of \(2048, 256\)"):
        check_fits(saved, task_of().make_model())


def losses_with_dropout(rank, steps, **options):
    """Return the losses of each mode. Each rank drops other elements."""
    task = task_of(model="rank_code:dropping")

    def make_model():
        model = task.make_model()
        torch.manual_seed(rank)
        return model

    own = replace(task, make_model=make_model)
    return {mode: train(own, mode, steps, **each).losses for mode, each in options.items()}


def test_resumed_training_has_losses_of_uninterrupted_training(folder, tmp_path):
    """Use dropout, which shows whether each rank continues with its own random state."""
    saved = {mode: {"save_to": tmp_path / mode, "every": 2} for mode in ON_FOUR}
    straight, _ = run_ranks(2, partial(losses_with_dropout, steps=4, **saved))
    resumed = {mode: {"resume": tmp_path / mode / "step-00000002"} for mode in ON_FOUR}
    found, _ = run_ranks(2, partial(losses_with_dropout, steps=2, **resumed))
    assert found == {mode: values[2:] for mode, values in straight.items()}


def test_interrupted_save_leaves_no_checkpoint_that_looks_complete(
    one_process, task, tmp_path, monkeypatch
):
    trainer = Trainer("fsdp", task.make_model(), task.loss_sum)
    assert save(tmp_path, trainer, 1) == latest_complete_checkpoint(tmp_path)
    monkeypatch.setattr(FileSystemWriter, "write_data", MagicMock(side_effect=KeyboardInterrupt))
    with pytest.raises(CheckpointException):
        save(tmp_path, trainer, 1)
    with pytest.raises(ValueError, match="must be a folder with a complete checkpoint"):
        latest_complete_checkpoint(tmp_path)


def test_sharded_step_rejects_scaler_and_prediction_rejects_process_group(one_process, task):
    trainer, scaler = Trainer("fsdp", task.make_model(), task.loss_sum), torch.amp.GradScaler("cpu")
    with pytest.raises(ValueError, match="scaler must be None"):
        AccumulatedStep(trainer.model, trainer.optimizer, task.loss_sum, scaler=scaler)
    with pytest.raises(RuntimeError, match="without a process group"):
        predict_rank(task, "fsdp")


@pytest.mark.gpu
def test_training_on_gpus_with_nccl_succeeds_in_every_mode(options):
    options = [*options, "--mode", ",".join(MODES), "--backend", "nccl", "--steps", "3"]
    lines = launch(min(2, torch.cuda.device_count()), *options, timeout=TIMEOUT_SECONDS)
    for line in lines:
        tolerance = BF16_TOLERANCE if line["mode"] == "fsdp-bf16" else 1e-3
        assert line["losses"] == pytest.approx(lines[0]["losses"], abs=tolerance, rel=0)
        assert all(math.isfinite(loss) for loss in line["losses"])
        if line["mode"] != "fsdp-cpu":
            most = {name: max(values) for name, values in line["measured"].items()}
            assert line["predicted"] == most
        assert line["communicated"]["predicted"] == line["communicated"]["measured"]
