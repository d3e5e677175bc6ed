"""course_lib.distributed: one launch on 2 and one on 4 processes, shared by what they are asked;
symbolic ranks."""

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
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import reduce
from pathlib import Path
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist
from patience import HANGS_SECONDS
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from course_lib.accumulation import AccumulatedStep
from course_lib.budget import Recipe, estimate
from course_lib.distributed import (
    MODES,
    CommunicationCounter,
    Trainer,
    Watch,
    held_bytes,
    last_complete,
    launch,
    load,
    predict,
    prediction,
    save,
    sent_bytes,
    shapes_of,
    task_of,
    train,
)
from course_lib.distributed import __main__ as command
from course_lib.distributed.sharded_checkpoint import check_fits
from course_lib.distributed.tasks import Task
from course_lib.memory import MemoryBudgetExceeded, MemoryMeter, symbolic

ON_CPU = [mode for mode in MODES if mode != "fsdp-cpu"]
ON_FOUR = ["ddp", "zero1", "fsdp"]
STEPS, MORE = 10, 2
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
import os
from course_lib.models import Decoder, random_tokens


def small():
    return Decoder(vocabulary=97, hidden=32, heads=2, layers=2, sequence=16)


def failing():
    model, calls = small(), []

    def fail(*_):
        calls.append(1)
        if len(calls) == 2 and os.environ.get("RANK") == "1":
            raise ArithmeticError("rank 1 gives up")

    model.register_forward_pre_hook(fail)
    return model


def halting():
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    write = FileSystemWriter.write_data

    def halt(self, *arguments):
        if os.environ["RANK"] == "1" and "step-00000004" in str(self.path):
            print("rank 1 halts", file=sys.stderr, flush=True)
            time.sleep(10**6)
        return write(self, *arguments)

    FileSystemWriter.write_data = halt
    return small()


class Mean(Decoder):
    def loss(self, tokens):
        return self(tokens[:, :-1]).mean()


def mean():
    return Mean(vocabulary=97, hidden=32, heads=2, layers=2, sequence=16)


for function in (small, failing, halting, mean):
    function.make_batch = lambda: random_tokens(4, 16, 97)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributed")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "faulty.py").write_text(FAULTY)
    sys.path.insert(0, str(folder))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(folder), str(Path(__file__).parents[1]), *filter(None, [before])]
    )
    yield folder
    sys.path.remove(str(folder))
    os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


@pytest.fixture(scope="module")
def task(folder):
    return task_of(str(folder / "config.json"), sequence=32, unequal=True)


@pytest.fixture(scope="module")
def options(folder):
    return ["--config", str(folder / "config.json"), "--sequence", "32", "--unequal", "--details"]


@pytest.fixture(scope="module")
def two(folder, options):
    """All modes on 2 processes, 10 steps, saved in the end."""
    asked = ["--mode", ",".join(ON_CPU), "--steps", str(STEPS), "--save", str(folder / "saved")]
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


@pytest.fixture(scope="module")
def alone(by_hand):
    return by_hand[0]


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def cut(parameters, ranks):
    """Numbers of each rank's chunks along the first dimension, and of the first rank's, to which
    all are padded."""
    chunks = [[len(c) * c[0].numel() for c in torch.chunk(p, ranks)] for p in parameters]
    return [sum(c[rank] if rank < len(c) else 0 for c in chunks) for rank in range(ranks)], sum(
        c[0] for c in chunks
    )


# ---- on 2 and 4 processes


def test_ranks_have_unequal_numbers_of_tokens(task):
    counts = [int((task.part(0, 2, rank)["labels"] >= 0).sum()) for rank in range(2)]
    assert counts[0] > counts[1] > 0


@pytest.mark.parametrize("mode", ON_CPU)
def test_two_ranks_follow_the_losses_of_one_process_on_the_whole_batch(two, alone, mode):
    differences = [abs(a - b) for a, b in zip(two[mode]["losses"], alone[:STEPS], strict=True)]
    assert max(differences) < (BF16 if mode == "fsdp-bf16" else 1e-5)


@pytest.mark.parametrize("mode", ON_FOUR)
def test_four_ranks_go_on_from_where_two_were_saved_and_add_micro_batches_up(four, alone, mode):
    assert four[mode]["losses"] == pytest.approx(alone[STEPS:], abs=1e-5, rel=0)


@pytest.mark.parametrize("mode", ON_FOUR)
def test_the_gradient_of_four_ranks_is_clipped_by_the_norm_of_the_whole(four, two, by_hand, mode):
    norms = by_hand[1][STEPS:]
    assert four[mode]["norms"] == pytest.approx(norms, rel=1e-4) and min(norms) > MAX_NORM
    assert "norms" not in two[mode]


def test_a_line_of_json_has_its_fields(two):
    assert list(two) == ON_CPU
    for line in two.values():
        assert set(line) - {"taken"} == {
            "mode",
            "ranks",
            "losses",
            "predicted",
            "measured",
            "communicated",
        }
        assert (
            set(line["predicted"])
            == set(line["measured"])
            == {"parameter", "gradient", "optimizer"}
        )
        assert line["ranks"] == 2 and all(len(ranks) == 2 for ranks in line["measured"].values())


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_holds_what_zero_says_with_padding(request, task, ranks):
    found, parameters = (
        request.getfixturevalue({2: "two", 4: "four"}[ranks]),
        list(task.make_model().parameters()),
    )
    numbers, tensors = sum(p.numel() for p in parameters), len(parameters)
    own, padded = cut(parameters, ranks)
    assert padded > own[-1] and sum(own) == numbers
    for mode, line in found.items():
        measured, whole = line["measured"], mode in ("ddp", "zero1")
        assert (
            measured["parameter"]
            == measured["gradient"]
            == [4 * (numbers if whole else padded)] * ranks
        )
        if mode == "ddp":
            assert measured["optimizer"] == [8 * numbers + 4 * tensors] * ranks
        elif mode == "zero1":
            assert sum(measured["optimizer"]) == 8 * numbers + 4 * tensors
        else:
            assert measured["optimizer"] == [8 * share + 4 * tensors for share in own]
        assert line["predicted"] == {name: max(values) for name, values in measured.items()}
        each = held_bytes(shapes_of(task.make_model()), mode, ranks)
        assert {name: [held[name] for held in each] for name in measured} == measured


def test_what_is_communicated_is_counted_and_predicted(two, four, task):
    model = task.make_model()
    numbers = sum(p.numel() for p in model.parameters())
    padded, blocks = (2 * cut(part.parameters(), 2)[1] for part in (model, model.layers))
    expected = {
        "ddp": 4 * 2 * numbers,
        "zero1": 4 * 3 * numbers,  # its all-reduce, and a broadcast of each parameter
        "fsdp": 4 * (2 * padded + blocks),  # the root is gathered once
        "fsdp-keep": 4 * 2 * padded,
        "fsdp-checkpoint": 4 * (2 * padded + blocks),
        "fsdp-bf16": 2 * (padded + blocks) + 4 * padded,
    }
    for mode, line in two.items():
        assert line["communicated"] == {"predicted": expected[mode], "measured": expected[mode]}
    padded, blocks = (4 * cut(part.parameters(), 4)[1] for part in (model, model.layers))
    # gathered for each of two micro-batches, reduced with the last
    both = 4 * (2 * (padded + blocks) + padded)
    assert four["fsdp"]["communicated"] == {"predicted": both, "measured": both}
    for mode in ("ddp", "zero1"):
        assert four[mode]["communicated"] == {
            "predicted": expected[mode],
            "measured": expected[mode],
        }


@pytest.mark.parametrize("mode", ON_FOUR)
def test_a_symbolic_rank_of_four_takes_to_the_byte_what_a_real_one_takes(four, task, mode):
    found, taken = at(task, mode, 4, micro_batches=2, max_norm=MAX_NORM), four[mode]["taken"][0]
    assert asdict(found) == taken


@pytest.mark.parametrize("mode", ON_CPU)
def test_a_symbolic_rank_takes_to_the_byte_what_a_real_one_takes(two, task, mode):
    for rank in (0, 1) if mode in ("zero1", "fsdp") else (0,):
        found = predict(
            task.make_model,
            lambda rank=rank: task.part(0, 2, rank),
            task.loss_sum,
            mode,
            2,
            rank=rank,
        )
        taken = two[mode]["taken"][rank]
        assert asdict(found) == taken and found.peak_bytes == sum(found.at_peak.values())


@pytest.mark.parametrize("mode", ON_CPU)
def test_a_recipe_for_two_ranks_is_estimated_to_the_byte_as_it_was_measured(two, task, mode):
    shard = {"ddp": "ddp", "zero1": "zero1", "fsdp-keep": "zero2"}.get(mode, "zero3")
    more = {"fsdp-checkpoint": {"checkpoint": "layers"}, "fsdp-bf16": {"precision": "bf16"}}.get(
        mode, {}
    )
    recipe = Recipe(ranks=2, shard=shard, attention=None, **more)
    found = estimate(task.make_model, lambda: task.make_batch(0), recipe, loss_sum=task.loss_sum)
    taken = max(two[mode]["taken"], key=lambda rank: rank["peak_bytes"])
    assert (found.peak_bytes, found.flops, found.sent_bytes) == (
        taken["peak_bytes"], taken["flops"], taken["sent_bytes"]
    )  # fmt: skip
    at_peak = dict(taken["at_peak"])
    at_peak["parameter"] += at_peak.pop("gathered")
    assert found.at_peak == at_peak


@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("mode", ["ddp", "zero1"])
def test_buckets_are_gradients_in_a_prediction_and_in_any_step(one_process, task, mode, steps):
    taken = train(task, mode, steps).taken[0]
    # all of them: the peak is before the first gradient is computed
    assert taken.at_peak["gradient"] == 4 * shapes_of(task.make_model()).numbers
    dist.destroy_process_group()
    assert taken == at(task, mode, ranks=1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_the_parameters_gathered_at_the_peak_are_told_apart(two, task):
    model = task.make_model()
    root = cut([p for name, p in model.named_parameters() if "layers" not in name], 2)[1]
    of_all, block = (cut(part.parameters(), 2)[1] for part in (model, model.layers[0]))
    gathered = {mode: line["taken"][0]["at_peak"]["gathered"] for mode, line in two.items()}
    assert gathered["ddp"] == gathered["zero1"] == 0
    assert gathered["fsdp"] == 4 * 2 * root and gathered["fsdp-bf16"] == 2 * 2 * root
    assert gathered["fsdp-keep"] == 4 * 2 * of_all
    assert gathered["fsdp-checkpoint"] in (4 * 2 * root, 4 * 2 * (root + block))
    activations = {mode: line["taken"][0]["at_peak"]["activation"] for mode, line in two.items()}
    assert (
        activations["fsdp-checkpoint"]
        < activations["fsdp-bf16"]
        < activations["fsdp"]
        == activations["ddp"]
    )


# ---- symbolic ranks


def test_a_flop_counter_around_a_prediction_counts_and_changes_nothing(task):
    for mode in ("fsdp", "fsdp-checkpoint"):  # its hooks would hold what is recomputed
        found = at(task, mode)
        with FlopCounterMode(display=False) as counter:
            assert at(task, mode) == found
        assert counter.get_total_flops() == found.flops > 0


def at(task, mode, ranks=2, **options):
    return predict(
        task.make_model, lambda: task.part(0, ranks, 0), task.loss_sum, mode, ranks, **options
    )


def test_no_sync_saves_traffic_and_costs_fsdp_the_whole_gradient(task):
    shapes, found = shapes_of(task.make_model()), {}
    for mode in ("ddp", "fsdp"):
        for sync in ("each", "last"):
            taken = found[mode, sync] = at(task, mode, micro_batches=2, sync=sync)
            assert taken.sent_bytes == sent_bytes(shapes, mode, 2, micro_batches=2, sync=sync)
    numbers = shapes.numbers
    assert found["ddp", "each"].sent_bytes - found["ddp", "last"].sent_bytes == 2 * 4 * numbers
    # Pieces that are not reduced add up beside DDP's buckets, into which they are copied in the
    # end.
    assert found["ddp", "last"].peak_bytes - found["ddp", "each"].peak_bytes == 4 * numbers
    padded = 2 * cut(task.make_model().parameters(), 2)[1]
    assert found["fsdp", "each"].sent_bytes - found["fsdp", "last"].sent_bytes == 4 * padded
    costs = found["fsdp", "last"].peak_bytes - found["fsdp", "each"].peak_bytes
    assert 0.4 * 4 * numbers < costs <= 4 * numbers  # whole gradients, in place of shares


@pytest.mark.parametrize("mode", ["ddp", "zero1"])
def test_micro_batches_in_the_buckets_send_as_little_as_the_last_and_hold_as_little_as_each(
    task, mode
):
    each, last, kept = (
        at(task, mode, micro_batches=2, **o) for o in ({"sync": "each"}, {}, {"in_buckets": True})
    )
    assert kept.sent_bytes == last.sent_bytes < each.sent_bytes
    shapes = shapes_of(task.make_model())
    assert each.sent_bytes == sent_bytes(shapes, mode, 2, micro_batches=2, sync="each")
    assert kept.peak_bytes == each.peak_bytes == last.peak_bytes - 4 * shapes.numbers


def test_on_a_process_micro_batches_in_the_buckets_take_what_is_predicted_and_change_no_loss(
    one_process, task
):
    options = {"micro_batches": 2, "max_norm": 1.0}
    beside, kept = (train(task, "ddp", 4, in_buckets=inside, **options) for inside in (False, True))
    assert kept.losses == beside.losses and kept.norms == beside.norms
    dist.destroy_process_group()
    assert kept.taken == [at(task, "ddp", 1, in_buckets=True, **options)]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


READS = [
    getattr(torch.Tensor, f)
    for f in ("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__")
]


class Reads(TorchFunctionMode):
    """Notes where a program waits for the value of a tensor."""

    def __init__(self):
        super().__init__()
        self.events = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in READS:
            self.events.append("read")
        return func(*args, **(kwargs or {}))


def test_a_rank_keeps_within_its_budget_or_is_stopped_by_it(one_process, task):
    peak = train(task, "ddp", 3).taken[0].peak_bytes
    assert train(task, "ddp", 3, budget_bytes=peak).as_dict()["budget_bytes"] == peak
    with pytest.raises(MemoryBudgetExceeded) as stopped:
        train(task, "ddp", 3, budget_bytes=peak - 1)
    assert stopped.value.budget_bytes == peak - 1


@pytest.mark.parametrize(
    ("given", "budgets"),
    [
        (None, {}),
        ("48e6", {"ddp": 48_000_000, "fsdp": 48_000_000}),
        ("fsdp=9B,ddp=8kB", {"ddp": 8000, "fsdp": 9}),
    ],
)
def test_a_budget_is_of_all_modes_or_of_one(given, budgets):
    assert command._budgets(given, ["ddp", "fsdp"]) == budgets


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_between_forward_and_backward_of_a_micro_batch_nothing_is_read(one_process, task, mode):
    def loss_sum(model, piece):
        loss, weight = task.loss_sum(model, piece)
        reads.events.append("forward")
        loss.register_hook(lambda _: reads.events.append("backward"))
        return loss, weight

    trainer = Trainer(mode, task.make_model(), loss_sum, micro_batches=2)
    with Reads() as reads:
        trainer(task.part(0, 1, 0))  # the first of all reads the weight of its first piece
        reads.events.clear()
        trainer(task.part(1, 1, 0))
    assert reads.events[:4] == ["forward", "backward"] * 2 and set(reads.events[4:]) == {"read"}


class Towers(nn.Module):
    """Two lists of unlike blocks, of which the shorter one is larger."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        for name, wide, count in (("tower", 256, 2), ("decoder", 64, 3)):
            blocks = [nn.Sequential(nn.Linear(64, wide), nn.Linear(wide, 64)) for _ in range(count)]
            setattr(self, name, nn.ModuleList(blocks))

    def forward(self, x):
        return reduce(lambda x, block: block(x), [*self.tower, *self.decoder], x)


def towers():
    return Towers()


towers.make_batch = lambda: torch.ones(8, 64)
towers.loss_sum = lambda model, x: (model(x).square().sum(), len(x))


def test_blocks_of_several_lists_are_cut_by_name_and_the_command_says_where_the_root_is_large(
    told, folder
):
    importlib.import_module("faulty").towers = towers
    asked = ["--model", "faulty:towers", "--ranks", "8", "--mode", "fsdp-checkpoint", "--json"]
    [some], said = told(*asked, "--blocks", "decoder.*")
    assert (
        "73% of the parameters are outside all blocks (the largest is tower.0.0.weight)" in said
        and said.count("\n") == 1
    )
    [every], said = told(*asked, "--blocks", "tower.*,decoder.*")
    assert said == "" and every["at_peak"]["gathered"] < some["at_peak"]["gathered"]
    assert every["peak_bytes"] < some["peak_bytes"]
    [unnamed], said = told(*asked)  # every list, by itself
    assert said == "" and unnamed["peak_bytes"] == every["peak_bytes"]
    own = task_of(model="faulty:towers")
    found = at(own, "fsdp-checkpoint", 8, blocks=["tower.*", "decoder.*"])
    assert found.peak_bytes == every["peak_bytes"]
    shapes = shapes_of(own.make_model(), ["tower.*", "decoder.*"])
    assert shapes.root == () and sent_bytes(shapes, "fsdp", 8) == every["communicated"]["predicted"]
    assert told(*asked, "--mode", "ddp")[1] == ""  # where nothing is cut


def test_the_framework_s_wrapper_takes_what_checkpoint_blocks_takes(task):
    ours, wrapper = (at(task, "fsdp-checkpoint", wrapper=wrapper) for wrapper in (False, True))
    assert ours.held == wrapper.held and ours.sent_bytes == wrapper.sent_bytes
    assert ours.peak_bytes == pytest.approx(wrapper.peak_bytes, rel=0.02)


def test_eight_ranks_hold_an_eighth_and_none_is_started(task):
    with symbolic():
        shapes = shapes_of(task_of().make_model())
    whole = 4 * 6_875_648  # the course's decoder, of 100 parameter tensors
    assert (
        held_bytes(shapes, "fsdp", 8)
        == [{"parameter": whole // 8, "gradient": whole // 8, "optimizer": whole // 4 + 4 * 100}]
        * 8
    )
    assert at(task, "fsdp", 8).held == held_bytes(shapes_of(task.make_model()), "fsdp", 8)[0]
    assert not dist.is_initialized()


def test_one_rank_sends_nothing_and_holds_all(one_process, task, alone):
    for mode in ("ddp", "zero1", "fsdp", "fsdp-checkpoint"):
        run = train(task, mode, 3)
        assert run.losses == pytest.approx(alone[:3], abs=1e-5, rel=0)
        assert run.taken[0].sent_bytes == run.predicted_sent == 0
        assert [run.taken[0].held] == held_bytes(shapes_of(task.make_model()), mode, 1)


def test_a_hugging_face_model_trains_by_its_own_loss_weighed_by_its_labels(folder, task):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }

    def llama():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=99))

    def batch():
        tokens = torch.arange(4 * 16).view(4, 16) % 99
        return {"input_ids": tokens, "labels": tokens.masked_fill(tokens > 40, -100)}

    llama.make_batch = batch
    importlib.import_module("faulty").llama = llama
    own, model = task_of(model="faulty:llama"), llama()
    loss, weight = own.loss_sum(own.make_model(), own.make_batch(0))
    assert int(weight) == 41 - 3 and (loss / weight).item() == pytest.approx(
        model(**batch()).loss.item(), rel=1e-6
    )
    assert not own.make_model().config.use_cache
    for mode in ("ddp", "fsdp-checkpoint"):  # a rotary embedding has buffers, which DDP broadcasts
        assert at(own, mode).sent_bytes == sent_bytes(shapes_of(model), mode, 2)


@pytest.fixture(scope="module")
def frozen(task):
    """The task with a model of which little is trained, as with LoRA."""

    def make_model():
        model = task.make_model().requires_grad_(False)
        model.layers[0].requires_grad_(True)
        return model

    return replace(task, make_model=make_model)


def test_a_step_that_fails_leaves_no_hook_on_the_optimizer():
    model, seen = nn.Linear(2, 2), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = MagicMock(model=MagicMock(parameters=lambda: seen.append(1) or []))
    trainer.optimizer = optimizer
    with pytest.raises(KeyError), Watch(model) as watch, watch.step(trainer):
        raise KeyError
    optimizer.step()
    assert not seen  # the hook would ask the model for its gradients


def test_frozen_parameters_have_neither_gradient_nor_state(one_process, frozen):
    model = frozen.make_model()
    with Watch(model) as watch:
        trainer = Trainer("fsdp", model, frozen.loss_sum)
        with watch.step(trainer):
            trainer(frozen.part(0, 1, 0))
    assert [watch.taken.held] == held_bytes(shapes_of(frozen.make_model()), "fsdp", 1)


@pytest.mark.parametrize(
    ("mode", "shard"), [("ddp", "ddp"), ("zero1", "zero1"), ("fsdp-keep", "zero2")]
)
def test_frozen_parameters_are_gathered_where_they_are_cut_and_never_sent_otherwise(
    frozen, mode, shard
):
    shapes, taken = shapes_of(frozen.make_model()), at(frozen, mode).sent_bytes
    assert sent_bytes(shapes, mode, 2) == taken
    recipe = Recipe(ranks=2, shard=shard, attention=None)
    found = estimate(
        frozen.make_model, lambda: frozen.make_batch(0), recipe, loss_sum=frozen.loss_sum
    )
    assert found.sent_bytes == taken


# ---- what goes wrong


def below(pid):
    """The processes that one has started."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in children for child in file.read_text().split()]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_rank_that_fails_ends_all_with_its_traceback(folder):
    with pytest.raises(RuntimeError, match="rank 1 gives up") as error:
        launch(
            2, "--model", "faulty:failing", "--mode", "fsdp", "--steps", "50", timeout=HANGS_SECONDS
        )
    told = str(error.value)
    assert "in fail" in told and "Root Cause" in told
    assert "gloo/transport" not in told  # what the other rank saw


def test_what_the_command_refuses_reaches_the_caller_of_launch(folder):
    with pytest.raises(RuntimeError) as error:
        launch(1, "--mode", "fdsp", timeout=HANGS_SECONDS)
    assert str(error.value).startswith(
        "torchrun ended with exit status 1: error: --mode must be one or several of ddp,"
    )
    assert "\n" not in str(error.value)


SLOW_TO_END = """#!/bin/sh
trap 'sleep 1; exit 1' TERM
echo $$ > {folder}/pid
while true; do sleep 0.1; done
"""


def test_an_interrupt_waits_in_launch_for_torchrun_to_end_its_ranks(monkeypatch, tmp_path):
    (tmp_path / "python").write_text(SLOW_TO_END.format(folder=tmp_path))
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    communicate, waits = subprocess.Popen.communicate, threading.Event()

    def communicate_noted(self, *arguments, **options):
        waits.set()
        return communicate(self, *arguments, **options)

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate_noted)

    def interrupt():
        # An interrupt inside Popen() itself would leave the process without an owner to end it.
        waits.wait(HANGS_SECONDS)
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    # a shell that runs the tests in the background has them ignore it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        launch(2)
    thread.join()
    signal.signal(signal.SIGINT, before)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize("gpu", [False, True])
def test_ranks_are_forked_only_where_there_is_no_gpu(gpu, monkeypatch, tmp_path):
    """CUDA cannot be used in a forked process."""
    (tmp_path / "python").write_text('#!/bin/sh\necho "$@" >&2\nexit 1\n')
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    with pytest.raises(RuntimeError) as error:
        launch(2)
    assert ("--start-method fork" in str(error.value)) is (sys.platform == "linux" and not gpu)


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:{}] {} [127.0.0.1]:5083"


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        (RuntimeError(GLOO.format(547, "Connection closed by peer")), True),
        (RuntimeError(GLOO.format(537, "Read error") + ": Connection reset by peer"), True),
        (RuntimeError(GLOO.format(457, "writev") + ": Broken pipe"), True),
        (
            dist.DistBackendError("NCCL error: remote process exited or there was a network error"),
            True,
        ),
        (RuntimeError("rank 1 gives up"), False),
    ],
)
def test_a_rank_that_lost_another_lets_that_one_speak_first(monkeypatch, capsys, error, waits):
    waited = []
    monkeypatch.setattr("time.sleep", waited.append)
    with pytest.raises((RuntimeError, SystemExit)) as raised, command._report_cause_first():
        raise error
    assert (raised.value is error) == bool(waited) == waits
    place = (
        r"^rank 0: error: \S*test_distributed\.py, line \d+, in test_a_rank\w+: RuntimeError: rank"
        r" 1 gives up\n {4}"
    )
    assert bool(re.match(place, capsys.readouterr().err)) != waits


# torchrun, which kills after 30 seconds what does not end by itself: here it waits.
PATIENT_TORCHRUN = f"""
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import PContext

close = PContext.close
PContext.close = lambda self, death_sig=None, timeout=None: close(self, death_sig, {HANGS_SECONDS})
run.main()
"""


@pytest.fixture(scope="module")
def interrupted(folder):
    """What an interrupt left behind that came while rank 1 was in the middle of its second
    checkpoint."""
    saved = folder / "interrupted"
    torchrun = [
        sys.executable,
        "-c",
        PATIENT_TORCHRUN,
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    asked = [
        "--model",
        "faulty:halting",
        "--mode",
        "fsdp",
        "--steps",
        "9",
        "--every",
        "2",
        "--save",
        str(saved),
    ]
    # not lo, where there is another
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": socket.if_nameindex()[-1][1]}
    started = {
        "stderr": subprocess.PIPE,
        "stdout": subprocess.DEVNULL,
        "text": True,
        "env": environment,
    }
    with subprocess.Popen(
        [*torchrun, "-m", "course_lib.distributed", *asked], **started
    ) as running:
        assert any("rank 1 halts" in line for line in running.stderr)
        ranks = below(running.pid)
        assert len(ranks) == 2 and all(map(alive, ranks))
        elsewhere = [address for pid in ranks for address in not_loopback(pid)]
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=HANGS_SECONDS)
        left = [pid for pid in ranks if alive(pid)]
    return saved / "fsdp", left, elsewhere


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")


def test_newest_checkpoint_has_the_largest_step_and_not_the_last_name(tmp_path):
    for name in ("step-99999999", "step-100000000.replaced", "step-100000000", "step-7"):
        (tmp_path / name).mkdir()
    assert last_complete(tmp_path).name == "step-100000000"


@needs_proc
def test_after_an_end_in_the_middle_of_saving_the_last_complete_checkpoint_is_used(
    interrupted, one_process
):
    saved = interrupted[0]
    assert sorted(path.name for path in saved.iterdir()) == [
        "step-00000002",
        "step-00000004.incomplete",
    ]
    task = task_of(model="faulty:small")
    straight = train(task, "ddp", 4)
    resumed = train(task, "ddp", 2, resume=last_complete(saved))  # by another mode, on one rank
    assert resumed.losses == pytest.approx(straight.losses[2:], abs=1e-5, rel=0)


@needs_proc
def test_an_interrupt_leaves_no_process_and_ranks_talk_on_the_loopback_alone(interrupted):
    assert interrupted[1:] == ([], [])


def test_a_rank_whose_torchrun_was_killed_ends(monkeypatch):
    ended, parents = [], iter([7, 7, 1])
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    command.end_with(7)
    assert ended == [1] and list(parents) == []  # after as long as its parent was there


def not_loopback(pid):
    """The addresses beyond 127.0.0.1 and ::1 to which a rank is connected."""
    files = Path(f"/proc/{pid}/fd").iterdir()
    inodes = {str(file.readlink()) for file in files if file.is_symlink()}
    found = []
    for name, local in (
        ("tcp", ("0100007F",)),
        ("tcp6", ("0" * 24 + "01000000", "0000000000000000FFFF00000100007F")),
    ):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if f"socket:[{fields[9]}]" in inodes and fields[1].split(":")[0] not in local:
                found.append(fields[1])
    return found


@pytest.fixture
def told(monkeypatch, capsys, folder):
    """What the command prints with --json, and what it says on stderr."""

    def ask(*arguments):
        with monkeypatch.context() as patch:
            patch.setattr(
                command.threading,
                "Thread",
                lambda **_: type("None", (), {"start": lambda _: None})(),
            )
            patch.setattr(sys, "argv", ["course_lib.distributed", *arguments])
            patch.setattr(os, "_exit", lambda status: pytest.fail(f"refused: {status}"))
            command.main()
        out, said = capsys.readouterr()
        return [json.loads(line) for line in out.splitlines()], said

    return ask


@pytest.fixture
def refused(monkeypatch, capsys, folder):
    """The sentence with which the command, as rank 0 of so many, refuses its arguments."""

    class Ended(BaseException):
        pass

    def end(status):
        raise Ended(status)

    def ask(*arguments, ranks=2, rank=0, torchrun=True, status=2):
        with monkeypatch.context() as patch:
            patch.setattr(command, "RANK", rank)
            patch.setattr(os, "_exit", end)
            patch.setattr(time, "sleep", end)
            patch.setattr(
                command.threading,
                "Thread",
                lambda **_: type("None", (), {"start": lambda _: None})(),
            )
            patch.setattr(sys, "argv", ["course_lib.distributed", *map(str, arguments)])
            if torchrun:
                for name, value in (
                    ("WORLD_SIZE", ranks),
                    ("LOCAL_WORLD_SIZE", ranks),
                    ("LOCAL_RANK", rank),
                ):
                    patch.setenv(name, str(value))
                patch.setenv("TORCHELASTIC_RUN_ID", "none")
            with pytest.raises(Ended) as ended:
                command.main()
        assert rank or ended.value.args == (status,)
        return capsys.readouterr().err

    return ask


@pytest.mark.parametrize(
    ("arguments", "ranks", "says"),
    [
        (
            [],
            3,
            "the number of ranks must be a divisor of the batch's 8 samples (1, 2, 4, 8), got 3",
        ),
        (
            ["--mode", "ddp,zero3"],
            2,
            "--mode must be one or several of ddp, zero1, fsdp, fsdp-keep,",
        ),
        (
            ["--backend", "nccl"],
            2,
            "--backend must be 'gloo' without a GPU per rank, got 'nccl' with 0 GPUs for 2 ranks",
        ),
        (["--backend", "mpi"], 2, "invalid choice: 'mpi'"),
        (["--steps", "0"], 2, "--steps must be a whole number, at least 1, got 0"),
        (
            ["--micro-batches", "3"],
            2,
            "--micro-batches must be a divisor of a rank's 4 samples, got 3",
        ),
        (["--sequence", "0"], 2, "--sequence: must be a whole number between 1 and 10,000,000"),
        (
            ["--config", "nowhere.json"],
            2,
            "config must be a file that can be read, got 'nowhere.json'",
        ),
        (["--model", "nowhere:model"], 2, "got 'nowhere:model', which is not found"),
        (
            ["--model", "faulty:small", "--batch", "8"],
            2,
            "--batch cannot be combined with --model",
        ),
        (
            ["--resume", "nowhere"],
            2,
            (
                "resume must be a folder with a complete checkpoint, as --save writes"
                " it, got 'nowhere'"
            ),
        ),
        (
            ["--model", "faulty:mean"],
            2,
            "--model must have a loss that is a sum with a known weight, got 'faulty:mean'",
        ),
        (["--every", "2"], 2, "--every needs --save"),
        (["--max-norm", "0"], 2, "--max-norm must be a number above 0, got 0.0"),
        (
            ["--budget", "48"],
            2,
            "--budget must have a unit, got '48'",
        ),
        (
            ["--budget", "fsdp=48e6"],
            2,
            "--budget must be bytes such as 48MB, or ddp=48MB for one of the modes ddp, got 'fsdp=",
        ),
        (["--budget", "ddp=-1"], 2, "--budget must be a number of bytes such as 80GiB or 24GB"),
        (["--ranks", "2", "--budget", "48e6"], 2, "--ranks cannot be combined with --budget"),
        (
            ["--blocks", "layer.*"],
            2,
            "blocks must match the name of a module that is called, got ['layer.*']",
        ),
        (
            ["--mode", "ddp,fsdp", "--in-buckets"],
            2,
            "--in-buckets cannot be combined with --mode fsdp, only with ddp or zero1",
        ),
        (["--ranks", "2", "--save", "here"], 2, "--ranks cannot be combined with --save"),
        (
            ["--ranks", "2", "--mode", "fsdp-cpu"],
            2,
            "--ranks cannot be combined with --mode fsdp-cpu",
        ),
    ],
)
def test_bad_input_is_refused_in_one_sentence(refused, monkeypatch, arguments, ranks, says):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    told = refused(*arguments, ranks=ranks)
    assert told.startswith("error: ") and says in told and told.count("\n") == 1
    assert refused(*arguments, ranks=ranks, rank=1) == ""  # on rank 0 alone


OWN = """
import torch
from course_lib.models import Decoder
def tokens():
    return torch.ones(4, 9, dtype=torch.long)
def of(loss):
    def make():
        return Decoder(vocabulary=8, hidden=8, heads=2, layers=2, sequence=8)
    make.make_batch, make.loss_sum = tokens, loss
    return make
def wrong(model, batch):
    return model(batch[:, :-1]) @ batch.float(), 1
def looks(model, batch):
    if model(batch[:, :-1]).sum() > 0:
        return 0, 1
wrong, looks = of(wrong), of(looks)
def missing():
    return {}["width"]
missing.make_batch = tokens
def with_width(width):
    return None
with_width.make_batch = tokens
def no_batch():
    return wrong()
no_batch.make_batch = dict
"""


@pytest.mark.parametrize(
    ("name", "status", "says"),
    [
        ("wrong", 1, "own_of_a_user.py, line 12, in wrong: RuntimeError: "),
        ("missing", 1, "own_of_a_user.py, line 18, in missing: KeyError: 'width'"),
        (
            "looks",
            2,
            (
                "the step reads values of its data (aten._local_scalar_dense.default) at"
                " own_of_a_user.py, "
            ),
        ),
        (
            "with_width",
            2,
            "--model must be callable with no arguments, got a function with the arguments (width)",
        ),
        (
            "no_batch",
            2,
            (
                "batch must be a tensor or a container of tensors, got a dict, which"
                " contains no tensor"
            ),
        ),
    ],
)
def test_an_error_of_the_users_code_is_told_with_its_line(
    refused, monkeypatch, tmp_path, caplog, name, status, says
):
    (tmp_path / "own_of_a_user.py").write_text(OWN, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_of_a_user", raising=False)
    told = refused(
        "--model", f"own_of_a_user:{name}", "--ranks", "2", torchrun=False, status=status
    )
    assert (
        told.startswith(f"error: {says}") and told.count("\n") == 3 - status and not caplog.records
    )


def test_the_help_says_what_each_mode_is():
    told = command.arguments().format_help()
    assert [mode for mode in MODES if f"\n  {mode} " not in told] == []


def test_without_torchrun_the_command_says_how_to_start_it(refused, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    told = refused(torchrun=False)
    assert (
        "must be started by torchrun: python -m torch.distributed.run" in told
        and told.count("\n") == 1
    )


def test_a_checkpoint_of_another_model_is_refused(one_process, task, tmp_path):
    trainer = Trainer("fsdp", task.make_model(), task.loss_sum)
    saved = save(tmp_path, trainer, 1)
    check_fits(saved, task.make_model())
    with pytest.raises(
        ValueError,
        match=r"a checkpoint of this model, got .*, in which head.weight is \(515,"
        r" 66\) instead of \(2048, 256\)",
    ):
        check_fits(saved, task_of().make_model())


def test_saved_and_loaded_a_trainer_is_the_same(one_process, task, tmp_path):
    first, second = (Trainer(mode, task.make_model(), task.loss_sum) for mode in ("fsdp", "zero1"))
    for step in range(2):
        first(task.part(step, 1, 0))
    assert load(save(tmp_path, first, 2), second) == 2
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), other)
        moments = first.optimizer.state[one]["exp_avg_sq"].full_tensor()
        assert torch.equal(moments, second.local.state[other]["exp_avg_sq"])


def test_a_model_with_dropout_goes_on_from_a_checkpoint_as_it_would_have_gone_on(
    one_process, tmp_path
):
    def make_model():
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(2)]
        return nn.Sequential(nn.ModuleList(blocks)[0], *blocks[1:])

    dropping = Task(
        make_model,
        lambda _: torch.ones(4, 8),
        lambda model, x: (model(x).square().sum(), len(x)),
        4,
    )
    straight = train(dropping, "fsdp", 4)
    train(dropping, "fsdp", 2, save_to=tmp_path)
    resumed = train(dropping, "fsdp", 2, resume=last_complete(tmp_path))
    assert resumed.losses == straight.losses[2:]


def test_of_each_rank_the_random_state_is_saved(two, folder):
    names = (
        FileSystemReader(last_complete(folder / "saved" / "fsdp"))
        .read_metadata()
        .state_dict_metadata
    )
    assert [name for name in names if name.startswith("random")] == ["random.0.cpu", "random.1.cpu"]


def test_at_no_moment_of_saving_again_is_there_no_whole_checkpoint(
    one_process, task, tmp_path, monkeypatch
):
    found, rename, remove = [], os.rename, shutil.rmtree

    def look():
        names = {path.name for path in last_complete(tmp_path).iterdir()}
        found.append(".metadata" in names)

    def renaming(old, new):
        look()
        rename(old, new)
        look()

    def removing(path, **options):
        (Path(path) / ".metadata").unlink(missing_ok=True)  # it may be stopped there
        look()
        remove(path, **options)
        look()

    trainer = Trainer("fsdp", task.make_model(), task.loss_sum)
    first = save(tmp_path, trainer, 1)
    monkeypatch.setattr(os, "rename", renaming)
    monkeypatch.setattr(shutil, "rmtree", removing)
    trainer(task.part(0, 1, 0))
    assert save(tmp_path, trainer, 1) == first and len(found) >= 6 and all(found)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_scaler_is_refused_where_ranks_would_not_agree_to_skip_a_step(one_process, task):
    trainer, scaler = Trainer("fsdp", task.make_model(), task.loss_sum), torch.amp.GradScaler("cpu")
    with pytest.raises(
        ValueError, match="scaler must be None for an FSDP2 model, got a GradScaler"
    ):
        AccumulatedStep(trainer.model, trainer.optimizer, task.loss_sum, scaler=scaler)


def test_two_predictions_at_once_are_refused(one_process, task):
    with pytest.raises(RuntimeError, match="without a process group, but one exists already"):
        at(task, "fsdp")


@pytest.fixture
def one_of_four():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


# ---- what a prediction needs of PyTorch that is private


def test_a_fake_group_returns_at_once_and_leaves_tensors_as_they_are(one_of_four):
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [1, 1] and dist.get_world_size() == 4


@pytest.mark.parametrize("name", prediction.IN_CPP)
def test_a_ddp_model_is_made_by_functions_that_can_be_replaced(one_process, name):
    with patch(f"torch.nn.parallel.distributed.{name}") as called:
        nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    assert called.call_count == 1


def test_a_reducer_is_an_attribute_of_a_ddp_model_which_asks_it_to_sort_its_buckets(
    one_process,
):
    run = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    real, run.reducer = run.reducer, MagicMock(wraps=run.reducer)
    run(torch.ones(1, 2))
    assert real is not run.reducer and run.reducer._rebuild_buckets.call_count == 1


def test_hooks_on_all_modules_stand_in_two_dictionaries():
    module, calls = nn.Linear(2, 2), []
    handles = [
        nn.modules.module.register_module_forward_pre_hook(lambda *_: calls.append("before")),
        nn.modules.module.register_module_forward_hook(lambda *_: calls.append("after")),
    ]
    module(torch.ones(1, 2))
    with ExitStack() as stack:
        for name in prediction.HOOKS:
            stack.enter_context(patch.dict(f"torch.nn.modules.module.{name}", clear=True))
        module(torch.ones(1, 2))
    for handle in handles:
        handle.remove()
    assert calls == ["before", "after"]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # these names are those of older versions too
def test_what_is_sent_is_counted_by_kind(one_of_four):
    with CommunicationCounter() as sent:
        dist.all_reduce(torch.ones(10))
        dist.all_reduce(torch.ones(10, dtype=torch.float64))  # not of parameters
        assert sent.bytes == 2 * 40
        dist.all_gather_into_tensor(torch.ones(40), torch.ones(10))
        assert sent.bytes == 2 * 40 + 160
        dist.reduce_scatter_tensor(torch.ones(10), torch.ones(40))
        dist.broadcast(torch.ones(10), 0)
    assert sent.bytes == 2 * 40 + 160 + 160 + 40


def test_a_meter_sees_parameters_gathered_into_storages_from_before_it(one_of_four, task):
    trainer = Trainer("fsdp-keep", task.make_model(), task.loss_sum)
    for _ in range(2):
        with MemoryMeter(trainer.model, trainer.optimizer) as meter:
            trainer(task.part(0, 4, 0))
    own, padded = (
        held_bytes(shapes_of(task.make_model()), "fsdp", 4)[0],
        cut(task.make_model().parameters(), 4)[1],
    )
    assert meter.at_peak()["parameter"] == own["parameter"] + 4 * 4 * padded


@pytest.mark.gpu
def test_on_gpus_the_same_script_trains_by_nccl(options):
    ranks = min(2, torch.cuda.device_count())
    lines = launch(
        ranks,
        *options,
        "--mode",
        ",".join(MODES),
        "--backend",
        "nccl",
        "--steps",
        "3",
        timeout=HANGS_SECONDS,
    )
    first = lines[0]["losses"]
    for line in lines:
        assert line["losses"] == pytest.approx(
            first, abs=BF16 if line["mode"] == "fsdp-bf16" else 1e-3, rel=0
        )
        assert all(math.isfinite(loss) for loss in line["losses"])
        if line["mode"] != "fsdp-cpu":
            assert line["predicted"] == {
                name: max(values) for name, values in line["measured"].items()
            }
        assert line["communicated"]["predicted"] == line["communicated"]["measured"]
