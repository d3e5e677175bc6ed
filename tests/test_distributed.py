"""course_lib.distributed: one launch on 2 and one on 4 processes, shared by the tests; symbolic
ranks."""

import importlib
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from patience import HANGS_SECONDS
from torch import nn
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.distributed.tensor import DeviceMesh, DTensor, Shard
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import course_lib.distributed as package
from course_lib.accumulation import AccumulatedStep
from course_lib.budget import Recipe, estimate
from course_lib.distributed import (
    MODES,
    Trainer,
    Watch,
    held_bytes,
    last_complete,
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
from course_lib.distributed.prediction import fake_rank
from course_lib.distributed.training.sharded_checkpoint import check_fits
from course_lib.distributed.training.torchrun import end_with
from course_lib.memory import MemoryBudgetExceeded, MemoryMeter

ON_CPU = [mode for mode in MODES if mode != "fsdp-cpu"]
ON_FOUR = ["ddp", "zero1", "fsdp"]
STEPS, MORE = 4, 2  # bytes are measured in the third step
MAX_NORM = 0.3  # of the gradient in the steps after these
# Neither 2 nor 4 divides the vocabulary, 4 not the width: what is sharded is padded.
CONFIG = {
    "model_type": "gpt2",
    "vocab_size": 515,
    "n_embd": 66,
    "n_head": 2,
    "n_layer": 2,
    "n_positions": 32,
}
BF16 = 5e-3  # of a loss: products in bf16 keep 8 bits

FAULTY = """
import os, sys, time, torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from course_lib.models import Decoder, random_tokens

write = FileSystemWriter.write_data


def small():
    return Decoder(vocabulary=97, hidden=32, heads=2, layers=2, sequence=16)


def failing():
    def fail(*_):
        calls.append(1)
        if len(calls) == 2 and os.environ.get("RANK") == "1":
            raise ArithmeticError("rank 1 gives up")

    model, calls = small(), []
    model.register_forward_pre_hook(fail)
    return model


def halting():
    def halt(self, *arguments):
        if os.environ["RANK"] == "1" and "step-00000004" in str(self.path):
            print("rank 1 halts", file=sys.stderr, flush=True)
            time.sleep(10**6)
        return write(self, *arguments)

    FileSystemWriter.write_data = halt
    return small()


def dropping():
    torch.manual_seed(0)
    blocks = ([torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)] for _ in range(2))
    model = torch.nn.Sequential(*(torch.nn.Sequential(*block) for block in blocks))
    torch.manual_seed(int(os.environ.get("RANK", 0)))  # each rank drops other numbers
    return model


dropping.loss_sum = lambda model, x: (model(x).square().sum(), len(x))
dropping.make_batch = lambda: torch.ones(4, 8)


def wrong(model, batch):
    return model(batch[:, :-1]) @ batch.float(), 1


def looks(model, batch):
    if model(batch[:, :-1]).sum() > 0:
        return 0, 1


def missing():
    return {}["width"]


made_wrong, made_looks, no_batch = (lambda: small() for _ in range(3))
made_wrong.loss_sum, made_looks.loss_sum = wrong, looks
mean, with_width = (lambda: torch.nn.Linear(2, 2)), (lambda width: None)
for function in (small, failing, halting, mean, made_wrong, made_looks, missing, with_width):
    function.make_batch = lambda: random_tokens(4, 16, 97)
no_batch.make_batch = dict
"""
WRONG, MISSING = (
    FAULTY[: FAULTY.index(line)].count("\n") + 1 for line in ("    return model(", "    return {}")
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributed")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "faulty.py").write_text(FAULTY)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        for path in (Path(__file__).parents[1], folder):
            patch.setenv("PYTHONPATH", str(path), prepend=os.pathsep)
        yield folder


@pytest.fixture(scope="module")
def task(folder):
    return task_of(str(folder / "config.json"), sequence=32, unequal=True)


@pytest.fixture(scope="module")
def options(folder):
    return ["--config", str(folder / "config.json"), "--sequence", "32", "--unequal", "--details"]


@pytest.fixture(scope="module")
def two(folder, options):
    """All modes on 2 processes, saved before the measured step and in the end."""
    asked = ["--mode", ",".join(ON_CPU), "--steps", str(STEPS), "--save", str(folder / "saved")]
    asked += ["--every", "2"]
    return {line["mode"]: line for line in launch(2, *options, *asked, timeout=HANGS_SECONDS)}


@pytest.fixture(scope="module")
def four(folder, options, two):
    """What 2 processes saved, resumed on 4, each with 2 micro-batches and the gradient clipped."""
    asked = ["--mode", ",".join(ON_FOUR), "--steps", str(MORE), "--resume", str(folder / "saved")]
    asked += ["--micro-batches", "2", "--max-norm", str(MAX_NORM)]
    return {line["mode"]: line for line in launch(4, *options, *asked, timeout=HANGS_SECONDS)}


@pytest.fixture(scope="module")
def by_hand(task):
    """Losses and norms of one process on the whole batch, by a loop that clips the gradient in its
    last steps."""
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


@contextmanager
def only_rank():
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture
def one_process():
    with only_rank():
        yield


def cut(model, ranks):
    """Numbers of each rank's chunks along the first dimension, and of the first rank's, to which
    all are padded."""
    chunks = [[c.numel() for c in torch.chunk(p, ranks)] for p in model.parameters()]
    own = [sum(c[rank] for c in chunks if rank < len(c)) for rank in range(ranks)]
    return own, own[0]


def at(task, mode, ranks=2, rank=0, **options):
    """Predict the memory and communication of a rank."""
    make_batch = partial(task.part, 0, ranks, rank)
    return predict(task.make_model, make_batch, task.loss_sum, mode, ranks, rank=rank, **options)


# ---- on 2 and 4 processes


@pytest.mark.parametrize("mode", ON_CPU)
def test_two_ranks_follow_one_process_and_take_what_symbolic_ones_take(two, task, by_hand, mode):
    allowed = BF16 if mode == "fsdp-bf16" else 1e-5
    assert two[mode]["losses"] == pytest.approx(by_hand[0][:STEPS], abs=allowed, rel=0)
    assert two[mode]["ranks"] == 2 and "norms" not in two[mode]
    for rank in (0, 1) if mode in ("zero1", "fsdp") else (0,):
        found = at(task, mode, rank=rank)
        assert asdict(found) == two[mode]["taken"][rank]
        assert found.peak_bytes == sum(found.at_peak.values())


@pytest.mark.parametrize("mode", ON_FOUR)
def test_four_ranks_go_on_where_two_were_saved_and_clip_the_whole(four, task, by_hand, mode):
    losses, norms = (values[STEPS:] for values in by_hand)
    assert four[mode]["losses"] == pytest.approx(losses, abs=1e-5, rel=0)
    assert four[mode]["norms"] == pytest.approx(norms, rel=1e-4) and min(norms) > MAX_NORM
    found = at(task, mode, 4, micro_batches=2, max_norm=MAX_NORM)
    assert asdict(found) == four[mode]["taken"][0]


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_holds_what_zero_says_with_padding(two, four, task, ranks):
    model = task.make_model()
    shapes, tensors = shapes_of(model), len(list(model.parameters()))
    own, padded = cut(model, ranks)
    numbers = sum(own)
    assert padded > own[-1]
    for mode, line in {2: two, 4: four}[ranks].items():
        measured, whole = line["measured"], mode in ("ddp", "zero1")
        each = [4 * (numbers if whole else padded)] * ranks
        assert measured["parameter"] == measured["gradient"] == each
        if mode == "ddp":
            assert measured["optimizer"] == [8 * numbers + 4 * tensors] * ranks
        elif mode == "zero1":
            assert sum(measured["optimizer"]) == 8 * numbers + 4 * tensors
        else:
            assert measured["optimizer"] == [8 * share + 4 * tensors for share in own]
        assert line["predicted"] == {name: max(values) for name, values in measured.items()}
        held = held_bytes(shapes, mode, ranks)
        assert {name: [rank[name] for rank in held] for name in measured} == measured


def test_what_is_communicated_is_counted_and_predicted(two, four, task):
    model = task.make_model()
    numbers = sum(p.numel() for p in model.parameters())
    padded, blocks = (2 * cut(part, 2)[1] for part in (model, model.layers))
    expected = {
        "ddp": 4 * 2 * numbers,
        "zero1": 4 * 3 * numbers,  # its all-reduce, and a broadcast of each parameter
        "fsdp": 4 * (2 * padded + blocks),  # the root is gathered once
        "fsdp-keep": 4 * 2 * padded,
        "fsdp-checkpoint": 4 * (2 * padded + blocks),
        "fsdp-bf16": 2 * (padded + blocks) + 4 * padded,
    }
    padded, blocks = (4 * cut(part, 4)[1] for part in (model, model.layers))
    # gathered for each of two micro-batches, reduced with the last
    on_four = expected | {"fsdp": 4 * (2 * (padded + blocks) + padded)}
    for lines, sent in ((two, expected), (four, on_four)):
        for mode, line in lines.items():
            assert line["communicated"] == {"predicted": sent[mode], "measured": sent[mode]}


@pytest.mark.parametrize(
    ("mode", "field"),
    [("fsdp-checkpoint", {"checkpoint": "layers"}), ("fsdp-bf16", {"precision": "bf16"})],
)
def test_a_recipe_for_two_ranks_is_estimated_to_the_byte_as_it_was_measured(two, task, mode, field):
    """`tests/test_budget_ranks.py` compares all other recipes with a prediction."""
    recipe = Recipe(ranks=2, shard="zero3", attention=None, **field)
    found = estimate(task.make_model, lambda: task.make_batch(0), recipe, loss_sum=task.loss_sum)
    taken = max(two[mode]["taken"], key=lambda rank: rank["peak_bytes"])
    for name in ("peak_bytes", "flops", "sent_bytes"):
        assert getattr(found, name) == taken[name]
    held = taken["at_peak"]
    gathered = {"parameter": held["parameter"] + held["gathered"]}
    assert found.at_peak | {"gathered": held["gathered"]} == held | gathered


@pytest.mark.parametrize(
    ("mode", "steps"),
    [("ddp", 2), ("ddp", 3), ("zero1", 2), ("fsdp", 3), ("fsdp-checkpoint", 3)],
)
def test_one_rank_sends_nothing_holds_all_and_takes_what_is_predicted(task, by_hand, mode, steps):
    shapes = shapes_of(task.make_model())
    with only_rank():
        run = train(task, mode, steps)
    assert run.losses == pytest.approx(by_hand[0][:steps], abs=1e-5, rel=0)
    [taken] = run.taken
    assert taken.sent_bytes == run.predicted_sent == 0
    assert [taken.held] == held_bytes(shapes, mode, 1) and taken == at(task, mode, ranks=1)
    if mode in ("ddp", "zero1"):  # all buckets: the peak is before the first gradient is computed
        assert taken.at_peak["gradient"] == 4 * shapes.numbers


def test_the_parameters_gathered_at_the_peak_are_told_apart(two, task):
    model = task.make_model()
    parts = model, model.layers, model.layers[0]
    of_all, blocks, block = (4 * 2 * cut(part, 2)[1] for part in parts)
    root = of_all - blocks
    at_peak = {mode: line["taken"][0]["at_peak"] for mode, line in two.items()}
    gathered = {mode: found["gathered"] for mode, found in at_peak.items()}
    assert gathered.pop("fsdp-checkpoint") in (root, root + block)
    expected = {"fsdp": root, "fsdp-bf16": root / 2, "fsdp-keep": of_all}
    assert gathered == {"ddp": 0, "zero1": 0} | expected
    activation = {mode: found["activation"] for mode, found in at_peak.items()}
    less, half, whole = (activation[mode] for mode in ("fsdp-checkpoint", "fsdp-bf16", "fsdp"))
    assert less < half < whole == activation["ddp"]


# ---- symbolic ranks


def test_dtensor_finds_shapes_without_memory_on_a_fake_rank():
    """DTensor runs a new operator on tensors of the full size, here of 5 times the local one."""
    with fake_rank(5, 0):
        mesh = DeviceMesh("cpu", range(5))
        with MemoryMeter() as meter:
            local = torch.ones(1009)
            result = DTensor.from_local(local, mesh, [Shard(0)]) * 2
    assert result.shape == (5 * 1009,)
    assert meter.peak_bytes == 2 * local.nbytes


@pytest.mark.parametrize("mode", ["fsdp", "fsdp-checkpoint"])
def test_a_flop_counter_around_a_prediction_counts_and_changes_nothing(task, mode):
    found = at(task, mode)
    with FlopCounterMode(display=False) as counter:  # its hooks would hold what is recomputed
        assert at(task, mode) == found
    assert counter.get_total_flops() == found.flops > 0


@pytest.mark.parametrize("mode", ["ddp", "zero1", "fsdp"])
def test_no_sync_saves_traffic_at_the_cost_of_a_gradient_unless_it_is_in_the_buckets(task, mode):
    shapes = shapes_of(task.make_model())
    each, last = (at(task, mode, micro_batches=2, sync=sync) for sync in ("each", "last"))
    for sync, taken in (("each", each), ("last", last)):
        assert taken.sent_bytes == sent_bytes(shapes, mode, 2, micro_batches=2, sync=sync)
    saved, cost = each.sent_bytes - last.sent_bytes, last.peak_bytes - each.peak_bytes
    gradient = 4 * shapes.numbers
    if mode == "fsdp":  # whole gradients instead of shards
        assert saved == 4 * 2 * cut(task.make_model(), 2)[1] and 0.4 < cost / gradient <= 1
        return
    # Gradients that are not reduced yet are summed outside the buckets and copied there at the end.
    assert saved == 2 * gradient and cost == gradient
    kept = at(task, mode, micro_batches=2, in_buckets=True)
    assert kept.sent_bytes == last.sent_bytes and kept.peak_bytes == each.peak_bytes


def test_on_a_process_micro_batches_in_the_buckets_take_what_is_predicted_and_change_no_loss(task):
    options = {"micro_batches": 2, "max_norm": 1.0}
    with only_rank():
        beside, kept = (train(task, "ddp", 4, in_buckets=each, **options) for each in (False, True))
    assert kept.losses == beside.losses and kept.norms == beside.norms
    assert kept.taken == [at(task, "ddp", 1, in_buckets=True, **options)]


def test_a_rank_keeps_within_its_budget_or_is_stopped_by_it(one_process, task):
    peak = train(task, "ddp", 3).taken[0].peak_bytes
    assert train(task, "ddp", 3, budget_bytes=peak).as_dict()["budget_bytes"] == peak
    with pytest.raises(MemoryBudgetExceeded) as stopped:
        train(task, "ddp", 3, budget_bytes=peak - 1)
    assert stopped.value.budget_bytes == peak - 1


@pytest.mark.parametrize(
    ("given", "budgets"),
    [("48e6", {"ddp": 48e6, "fsdp": 48e6}), ("fsdp=9B,ddp=8kB", {"ddp": 8000, "fsdp": 9})],
)
def test_a_budget_is_of_all_modes_or_of_one(given, budgets):
    assert command._budgets(given, ["ddp", "fsdp"]) == budgets


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_between_forward_and_backward_of_a_micro_batch_nothing_is_read(one_process, task, mode):
    reads = ("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__")
    events = []

    class Reads(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func in [getattr(torch.Tensor, name) for name in reads]:
                events.append("read")
            return func(*args, **(kwargs or {}))

    def loss_sum(model, piece):
        loss, weight = task.loss_sum(model, piece)
        events.append("forward")
        loss.register_hook(lambda _: events.append("backward"))
        return loss, weight

    trainer = Trainer(mode, task.make_model(), loss_sum, micro_batches=2)
    with Reads():
        trainer(task.part(0, 1, 0))  # the first of all reads the weight of its first piece
        events.clear()
        trainer(task.part(1, 1, 0))
    assert events[:4] == ["forward", "backward"] * 2 and set(events[4:]) == {"read"}


class Towers(nn.Module):
    """Two lists of unlike blocks, of which the shorter one is larger."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        for name, wide, count in (("tower", 256, 2), ("decoder", 64, 3)):
            blocks = [nn.Sequential(nn.Linear(64, wide), nn.Linear(wide, 64)) for _ in range(count)]
            setattr(self, name, nn.Sequential(*blocks))

    @staticmethod
    def make_batch():
        return torch.ones(8, 64)

    def forward(self, x):
        return self.decoder(self.tower(x))

    def loss_sum(self, x):
        return self(x).square().sum(), len(x)


def test_blocks_of_several_lists_are_cut_by_name_and_the_command_says_where_the_root_is_large(told):
    importlib.import_module("faulty").Towers = Towers
    asked = ["--model", "faulty:Towers", "--ranks", "8", "--mode", "fsdp-checkpoint", "--json"]
    [some], said, _ = told(*asked, "--blocks", "decoder.*")
    assert "73%" in said and "tower.0.0.weight" in said and said.count("\n") == 1
    [every], said, _ = told(*asked, "--blocks", "tower.*,decoder.*")
    assert said == "" and every["at_peak"]["gathered"] < some["at_peak"]["gathered"]
    [unnamed], said, _ = told(*asked)  # every list, by itself
    assert said == "" and unnamed["peak_bytes"] == every["peak_bytes"] < some["peak_bytes"]
    shapes = shapes_of(Towers(), ["tower.*", "decoder.*"])
    assert shapes.root == () and sent_bytes(shapes, "fsdp", 8) == every["communicated"]["predicted"]
    assert told(*asked, "--mode", "ddp")[1] == ""  # where nothing is cut


def test_the_framework_s_wrapper_takes_what_checkpoint_blocks_takes(task):
    ours, wrapper = (at(task, "fsdp-checkpoint", wrapper=wrapper) for wrapper in (False, True))
    assert ours.held == wrapper.held and ours.sent_bytes == wrapper.sent_bytes
    assert ours.peak_bytes == pytest.approx(wrapper.peak_bytes, rel=0.02)


def test_a_hugging_face_model_trains_by_its_own_loss_weighed_by_its_labels(folder):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 99}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = torch.arange(4 * 16).view(4, 16) % 99
    batch = {"input_ids": tokens, "labels": tokens.masked_fill(tokens > 40, -100)}

    def llama():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))

    llama.make_batch = lambda: batch
    importlib.import_module("faulty").llama = llama
    own, model = task_of(model="faulty:llama"), llama()
    loss, weight = own.loss_sum(own.make_model(), batch)
    assert (loss / weight).item() == pytest.approx(model(**batch).loss.item(), rel=1e-6)
    assert int(weight) == 41 - 3 and not own.make_model().config.use_cache
    for mode in ("ddp", "fsdp-checkpoint"):  # a rotary embedding has buffers, which DDP broadcasts
        assert at(own, mode).sent_bytes == sent_bytes(shapes_of(model), mode, 2)


def test_a_step_that_fails_leaves_no_hook_on_the_optimizer():
    model = nn.Linear(2, 2)
    trainer = MagicMock(optimizer=torch.optim.SGD(model.parameters()))
    with pytest.raises(KeyError), Watch(model) as watch, watch.step(trainer):
        raise KeyError
    trainer.optimizer.step()
    assert not trainer.model.parameters.called  # the hook would ask for the gradients


@pytest.mark.parametrize(
    ("mode", "shard"), [("ddp", "ddp"), ("zero1", "zero1"), ("fsdp-keep", "zero2")]
)
def test_frozen_parameters_are_sent_only_where_they_are_cut(task, mode, shard):
    """Little of the model is trained, as with LoRA."""

    def make_model():
        model = task.make_model().requires_grad_(False)
        model.layers[0].requires_grad_(True)
        return model

    frozen, shapes = replace(task, make_model=make_model), shapes_of(make_model())
    recipe = Recipe(ranks=2, shard=shard, attention=None)
    make_batch = partial(task.make_batch, 0)
    found = estimate(make_model, make_batch, recipe, loss_sum=task.loss_sum)
    taken = at(frozen, mode)
    assert taken.sent_bytes == sent_bytes(shapes, mode, 2) == found.sent_bytes
    with only_rank():  # they have neither gradient nor state
        [taken] = train(frozen, mode, 1).taken
    assert [taken.held] == held_bytes(shapes, mode, 1)


# ---- what goes wrong


def test_a_rank_that_fails_ends_all_with_its_traceback(folder):
    asked = ["--model", "faulty:failing", "--mode", "fsdp", "--steps", "50"]
    with pytest.raises(RuntimeError, match="rank 1 gives up") as error:
        launch(2, *asked, timeout=HANGS_SECONDS)
    told = str(error.value)
    assert "in fail" in told and "Root Cause" in told
    assert "gloo/transport" not in told  # what the other rank saw


def test_what_the_command_refuses_reaches_the_caller_of_launch(folder):
    with pytest.raises(RuntimeError) as error:
        launch(1, "--mode", "fdsp", timeout=HANGS_SECONDS)
    assert "error: --mode must" in str(error.value) and "\n" not in str(error.value)


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


def test_an_interrupt_waits_in_launch_for_torchrun_to_end_its_ranks(monkeypatch, tmp_path):
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
def test_ranks_are_forked_only_where_there_is_no_gpu(gpu, monkeypatch, tmp_path):
    """CUDA cannot be used in a forked process."""
    put_python(monkeypatch, tmp_path, '#!/bin/sh\necho "$@" >&2\nexit 1\n')
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    with pytest.raises(RuntimeError) as error:
        launch(2)
    assert ("--start-method fork" in str(error.value)) is (sys.platform == "linux" and not gpu)


LOST_PEER = RuntimeError("[gloo/gloo/transport/tcp/pair.cc:457] writev [127.0.0.1]: Broken pipe")


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        (LOST_PEER, 1),
        (dist.DistBackendError("NCCL error: remote process exited"), 1),
        (RuntimeError("rank 1 gives up"), 0),
    ],
)
def test_rank_that_lost_its_peer_lets_the_peer_report_first(monkeypatch, capsys, error, waits):
    waited = []
    monkeypatch.setattr(command._interrupted, "wait", waited.append)
    with pytest.raises((RuntimeError, SystemExit)) as raised, command._report_cause_first():
        raise error
    assert (raised.value is error) == len(waited) == waits
    told = r"rank 0: error: \S*test_distributed\.py, line \d+, in test_\w+: RuntimeError: rank 1"
    assert bool(re.match(told, capsys.readouterr().err)) != waits


def test_an_interrupted_rank_does_not_wait_for_its_peer(monkeypatch):
    """The peer was interrupted as well, and has no cause to report."""
    interrupted, waited = threading.Event(), []
    monkeypatch.setattr(interrupted, "wait", lambda _: waited.append(not interrupted.is_set()))
    monkeypatch.setattr(command, "_interrupted", interrupted)
    before = signal.signal(signal.SIGINT, command._interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(RuntimeError, match="Broken pipe"), command._report_cause_first():
        raise LOST_PEER
    assert waited == [False]


# torchrun, which kills after 30 seconds what does not end by itself: here it waits.
PATIENT_TORCHRUN = f"""
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import PContext

close = PContext.close
PContext.close = lambda self, death_sig=None, timeout=None: close(self, death_sig, {HANGS_SECONDS})
run.main()
"""


def test_public_names_are_imported_on_first_use_and_others_are_refused(monkeypatch):
    for name in package.__all__:
        monkeypatch.delitem(vars(package), name, raising=False)
        assert getattr(package, name) is vars(package)[name] and name in dir(package)
    with pytest.raises(AttributeError, match="has no attribute 'trainer'"):
        package.trainer  # noqa: B018


def test_newest_checkpoint_has_the_largest_step_and_not_the_last_name(tmp_path):
    (tmp_path / "step-100000001").mkdir()  # not complete
    with pytest.raises(ValueError, match="must be a folder with a complete checkpoint"):
        last_complete(tmp_path)
    for name in ("step-99999999", "step-100000000.replaced", "step-100000000", "step-100000002-b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").touch()
    assert last_complete(tmp_path).name == "step-100000000"


def test_an_interrupt_while_saving_leaves_no_process_and_the_last_checkpoint(folder):
    """It comes while rank 1 is in the middle of its second checkpoint."""
    psutil = pytest.importorskip("psutil")
    saved = folder / "interrupted"
    started = [sys.executable, "-c", PATIENT_TORCHRUN, "--standalone", "--nproc-per-node", "2"]
    started += ["-m", "course_lib.distributed", "--model", "faulty:halting", "--mode", "fsdp"]
    started += ["--steps", "9", "--every", "2", "--save", str(saved)]
    # not lo, where there is another
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": socket.if_nameindex()[-1][1]}
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(started, env=environment, **pipes) as running:
        assert any("rank 1 halts" in line for line in running.stderr)
        ranks = psutil.Process(running.pid).children()
        addresses = {each.laddr.ip for rank in ranks for each in rank.net_connections()}
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=HANGS_SECONDS)
    assert len(ranks) == 2 and not any(
        rank.is_running() and rank.status() != "zombie" for rank in ranks
    )
    # ranks talk on the loopback alone
    assert addresses and addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    names = ["step-00000002", "step-00000004"]
    assert sorted(path.name for path in (saved / "fsdp").iterdir()) == names
    task = task_of(model="faulty:small")
    with only_rank():
        straight = train(task, "ddp", 4)
        # by another mode, on one rank
        resumed = train(task, "ddp", 2, resume=last_complete(saved / "fsdp"))
    assert resumed.losses == pytest.approx(straight.losses[2:], abs=1e-5, rel=0)


def test_a_rank_whose_torchrun_was_killed_ends(monkeypatch):
    ended, parents = [], iter([7, 7, 1])
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    end_with(7)
    assert ended == [1] and list(parents) == []  # after as long as its parent was there


class Ended(BaseException):
    """Stands in for the end of the process."""


@pytest.fixture
def told(monkeypatch, capsys, folder):
    """A function that runs the command, as a rank of torchrun's where `ranks` is given, and returns
    its lines of JSON, what it says on stderr, and the exit status if it ends the process."""

    def ask(*arguments, ranks=None, rank=0):
        with monkeypatch.context() as patch:
            end = MagicMock(side_effect=Ended)
            patch.setattr(command.threading, "Thread", MagicMock())
            patch.setattr(sys, "argv", ["course_lib.distributed", *arguments])
            patch.setattr(command, "RANK", rank)
            patch.setattr(os, "_exit", end)
            patch.setattr(time, "sleep", MagicMock(side_effect=Ended))
            patch.delenv("TORCHELASTIC_RUN_ID", raising=False)
            if ranks:
                patch.setenv("TORCHELASTIC_RUN_ID", "none")
                for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
                    patch.setenv(name, str(ranks))
                patch.setenv("LOCAL_RANK", str(rank))
            with suppress(Ended):
                command.main()
        out, said = capsys.readouterr()
        status = end.call_args.args[0] if end.called else None
        return [json.loads(line) for line in out.splitlines()], said, status

    return ask


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--mode ddp,zero3", "--mode must be one or several of ddp,"),
        ("--backend nccl", "--backend must be 'gloo'"),
        ("--backend mpi", "'mpi'"),
        ("--steps 0", "--steps must"),
        ("--micro-batches 3", "--micro-batches must be a divisor of a rank's 4 samples"),
        ("--batch 3", "the number of ranks must be a divisor of the batch's 3 samples (1, 3)"),
        ("--sequence 0", "--sequence: must"),
        ("--config nowhere.json", "config must be a file"),
        ("--model nowhere:model", "'nowhere:model', which is not found"),
        ("--model faulty:small --batch 8", "--batch cannot be combined with --model"),
        ("--resume nowhere", "resume must be a folder with a complete checkpoint"),
        ("--model faulty:mean", "--model must have a loss that is a sum"),
        ("--every 2", "--every needs --save"),
        ("--max-norm 0", "--max-norm must"),
        ("--budget 48", "--budget must have a unit"),
        ("--budget fsdp=48e6", "for one of the modes ddp, got 'fsdp="),
        ("--budget ddp=-1", "--budget must be a number of bytes"),
        ("--blocks layer.*", "blocks must match the name of a module"),
        ("--mode ddp,fsdp --in-buckets", "--in-buckets cannot be combined with --mode fsdp"),
        ("--ranks 2 --budget 48e6", "--ranks cannot be combined with --budget"),
        ("--ranks 2 --save here", "--ranks cannot be combined with --save"),
        ("--ranks 2 --mode fsdp-cpu", "--ranks cannot be combined with --mode fsdp-cpu"),
        # errors of the user's code, which have a second line
        ("--ranks 2 --model faulty:made_wrong", f"line {WRONG}, in wrong: RuntimeError: "),
        ("--ranks 2 --model faulty:missing", f"line {MISSING}, in missing: KeyError: 'width'"),
        ("--ranks 2 --model faulty:made_looks", "the step reads values of its data (aten._loc"),
        ("--ranks 2 --model faulty:with_width", "--model must be callable with no arguments"),
        ("--ranks 2 --model faulty:no_batch", "batch must be a tensor or a container of tensors"),
    ],
)
def test_what_is_refused_is_told_in_one_sentence(told, monkeypatch, caplog, arguments, says):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    lines, said, status = told(*arguments.split(), ranks=2)
    assert said.startswith("error: ") and says in said and lines == [] == caplog.records
    assert said.count("\n") == 3 - status and status == (1 if "Error: " in says else 2)
    assert told(*arguments.split(), ranks=2, rank=1) == ([], "", None)  # on rank 0 alone


def test_the_help_says_what_each_mode_is():
    told = command.arguments().format_help()
    assert [mode for mode in MODES if f"\n  {mode} " not in told] == []


def test_without_torchrun_the_command_says_how_to_start_it(told):
    _, said, status = told()
    assert "python -m torch.distributed.run" in said and said.count("\n") == 1 and status == 2


def test_a_trainer_is_loaded_as_it_was_saved_and_for_its_model_alone(one_process, task, tmp_path):
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


def test_two_ranks_resume_with_the_losses_of_a_run_without_interruption(folder):
    """Dropout shows whether each rank continues with its own random state."""
    asked = ["--model", "faulty:dropping", "--mode", ",".join(ON_CPU)]
    saved = ["--save", str(folder / "dropping"), "--every", "2"]
    straight = launch(2, *asked, "--steps", "4", *saved, timeout=HANGS_SECONDS)
    for each in (folder / "dropping").glob("*/step-00000004/.metadata"):
        each.unlink()  # so that step 2 is the last complete one
    asked += ["--steps", "2", "--resume", str(folder / "dropping")]
    resumed = launch(2, *asked, timeout=HANGS_SECONDS)
    assert [line["mode"] for line in resumed] == ON_CPU
    for line, whole in zip(resumed, straight, strict=True):
        assert line["losses"] == whole["losses"][2:]


def test_saving_again_always_leaves_a_whole_checkpoint(one_process, folder, tmp_path, monkeypatch):
    task = task_of(model="faulty:dropping")
    trainer, other = (Trainer("fsdp", task.make_model(), task.loss_sum) for _ in range(2))
    found, remove, write = [], shutil.rmtree, FileSystemWriter.write_data

    def looking(function, *given, **options):
        found.append(load(last_complete(tmp_path), other))
        result = function(*given, **options)
        found.append(load(last_complete(tmp_path), other))
        return result

    def removing(path, **options):
        for part in Path(path).glob("*.distcp"):
            part.unlink()  # it may be stopped there
        looking(remove, path, **options)

    def stopping(*given):
        looking(write, *given)
        raise KeyboardInterrupt

    first = save(tmp_path, trainer, 1)
    replaced = first.with_suffix(".replaced")
    monkeypatch.setattr(os, "rename", partial(looking, os.rename))
    monkeypatch.setattr(shutil, "rmtree", removing)
    trainer(task.part(0, 1, 0))
    with monkeypatch.context() as patch, pytest.raises(CheckpointException):
        patch.setattr(FileSystemWriter, "write_data", stopping)
        save(tmp_path, trainer, 1)
    assert last_complete(tmp_path) == replaced
    assert save(tmp_path, trainer, 1) == first and not replaced.exists()
    replaced.mkdir()
    (replaced / "part").touch()  # left by a save that was stopped while it deleted
    assert save(tmp_path, trainer, 1) == first
    assert len(found) >= 16 and set(found) == {1}
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_scaler_of_a_sharded_model_and_two_predictions_at_once_are_refused(one_process, task):
    trainer, scaler = Trainer("fsdp", task.make_model(), task.loss_sum), torch.amp.GradScaler("cpu")
    with pytest.raises(ValueError, match="scaler must be None"):
        AccumulatedStep(trainer.model, trainer.optimizer, task.loss_sum, scaler=scaler)
    with pytest.raises(RuntimeError, match="without a process group"):
        at(task, "fsdp")


@pytest.mark.gpu
def test_on_gpus_the_same_script_trains_by_nccl(options):
    asked = [*options, "--mode", ",".join(MODES), "--backend", "nccl", "--steps", "3"]
    lines = launch(min(2, torch.cuda.device_count()), *asked, timeout=HANGS_SECONDS)
    for line in lines:
        allowed = BF16 if line["mode"] == "fsdp-bf16" else 1e-3
        assert line["losses"] == pytest.approx(lines[0]["losses"], abs=allowed, rel=0)
        assert all(math.isfinite(loss) for loss in line["losses"])
        if line["mode"] != "fsdp-cpu":
            most = {name: max(values) for name, values in line["measured"].items()}
            assert line["predicted"] == most
        assert line["communicated"]["predicted"] == line["communicated"]["measured"]
