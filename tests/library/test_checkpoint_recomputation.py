"""Recomputation of blocks that depend on state, against plain steps and PyTorch's operators."""

import random
from collections import defaultdict, deque
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from estimate_checks import assert_measured
from torch import nn
from torch.overrides import TorchFunctionMode

pytest.importorskip("expecttest", reason="PyTorch's operator database needs expecttest")

from sweep_gradients import RUNS, UNCHANGED, compare
from sweep_operators import VERDICTS, findings

from course_lib._torch.autograd import saved_value_may_differ
from course_lib._torch.modules import attributes_of
from course_lib.budget import Recipe, build, train_step
from course_lib.checkpoint import checkpoint_blocks, comparison
from course_lib.checkpoint.comparison import Sketch
from course_lib.checkpoint.repeatable import BlockState, Repeatable

WIDTH = 8
global_calls = {"count": 0}


# ---- kinds of state: name -> (function that gives a block its state, factor computed with it)


KINDS = {
    "global_generators": (lambda block: None, lambda block, x: random.random() * np.random.rand()),
    "dropout": (lambda block: None, lambda block, x: nn.functional.dropout(x.detach(), 0.3)),
    "batch_norm": (
        lambda block: setattr(block, "norm", nn.BatchNorm1d(WIDTH)),
        lambda block, x: block.norm(x),
    ),
    "instance_norm": (
        lambda block: setattr(block, "norm", nn.InstanceNorm1d(2, track_running_stats=True)),
        lambda block, x: block.norm(x.view(len(x), 2, -1)).view(x.shape),
    ),
}


def state(make=lambda block: None):
    """Register a function `factor(block, x)`; `make(block)` gives the block its state."""

    def register(factor):
        KINDS[factor.__name__] = make, factor
        return factor

    return register


def give_generators(block):
    block.generator = torch.Generator().manual_seed(1)
    block.generators = [random.Random(1), np.random.default_rng(1)]


@state(give_generators)
def own_generators(block, x):
    numbers = torch.rand(WIDTH, generator=block.generator)
    return numbers * sum(generator.random() for generator in block.generators)


@state(lambda block: setattr(block, "load", torch.zeros(WIDTH)))
def tensor_changed_in_place(block, x):
    block.load += x.detach().abs().sum(0)
    return block.load.clone()


@state()
def attribute_that_appears(block, x):
    block.total = getattr(block, "total", 0.0) + float(x.detach().sum())
    return block.total


@state(lambda block: vars(block).update(dict.fromkeys(("load", "same"), torch.zeros(WIDTH))))
def tensor_with_two_names(block, x):
    block.load += x.detach().mean(0)
    block.load = block.load * 0.5
    return block.same + block.load


@state(lambda block: setattr(block, "loads", {"a": [torch.zeros(WIDTH)]}))
def tensor_in_nested_containers(block, x):
    block.loads["a"][0] += x.detach().mean(0)
    block.loads["b"] = block.loads.get("b", 0) + 1
    return block.loads["a"][0] + block.loads["b"]


@state(lambda block: setattr(block, "array", np.zeros(WIDTH, dtype=np.float32)))
def array(block, x):
    block.array += x.detach().mean(0).numpy()
    return torch.from_numpy(block.array.copy())


@state(lambda block: vars(block).update(last=deque([0.5], 2), counts=defaultdict(int)))
def deque_and_defaultdict(block, x):
    block.last.append(float(x.detach().sum()))
    block.counts["calls"] += 1
    return sum(block.last) * block.counts["calls"]


@state(lambda block: vars(block).update(load=(load := torch.zeros(2, WIDTH)), row=load[0]))
def tensor_that_shares_memory(block, x):
    block.row += x.detach().mean(0)
    return block.load[0].clone()


@state(lambda block: block.register_buffer("average", torch.zeros(WIDTH)))
def buffer(block, x):
    block.average.mul_(0.5).add_(x.detach().mean(0))
    return block.average.clone()


@state(lambda block: block.register_buffer("average", torch.zeros(WIDTH)))
def data_of_a_buffer_changed(block, x):
    block.average.data.mul_(0.5).add_(x.detach().mean(0))
    return block.average.clone()


@state()
def data_of_a_parameter_changed(block, x):
    block.linear.weight.data.mul_(0.9)
    return 1.0


@state()
def global_variable(block, x):
    global_calls["count"] += 1
    return 1 / global_calls["count"]


# ---- the model


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        make, self.factor = KINDS[kind]
        self.linear, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        make(self)

    def forward(self, x):
        hidden = self.linear(x).sin() * self.factor(self, x)
        return x + self.out(hidden).sin()


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layers = nn.ModuleList(Block(kind) for _ in range(4))

    def loss_sum(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().sum(), len(x)


class Staged(Model):
    """Model with a method `stages`."""

    def stages(self, x):
        return [*self.layers, lambda x: (x.square().sum(), len(x))]


def make(model, kind):
    torch.manual_seed(0)
    return model(kind)


def batch():
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(3))


def stepped(model, kind, recipe):
    """Return gradients, state and random numbers after two runs of each block."""
    micro_batches = 1 if kind == "batch_norm" else 2  # batch norm mixes the samples of a batch
    recipe = replace(recipe, micro_batches=micro_batches)
    module, optimizer = build(partial(make, model, kind), recipe, lr=1e-3)
    global_calls["count"] = 0
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    found = {}
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: found.__setitem__(name, p.grad.clone())
        )
    for _ in range(3 - micro_batches):
        train_step(module, optimizer, batch(), recipe)
    tensors = *module.parameters(), *module.buffers()
    attributes = [attributes_of(part) for part in module.modules()]
    numbers = random.random(), np.random.rand(), torch.rand(1), global_calls["count"]
    return content([found, tensors, attributes, numbers])


def content(value):
    """Convert to plain Python values that can be compared; a generator becomes its state."""
    if isinstance(value, dict):
        return {key: content(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [content(item) for item in value]
    if isinstance(value, torch.Generator):
        value = value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return content(value.bit_generator.state)
    return value.tolist() if isinstance(value, (torch.Tensor, np.ndarray)) else value


SCHEDULE_BYTES = 1250  # few enough that a schedule recomputes blocks
CHECKPOINTS = {
    "layers": (Model, {"checkpoint": "layers"}),
    "selective": (Model, {"checkpoint": "selective"}),
    "segments of blocks": (Model, {"checkpoint": "segments", "segments": 2}),
    "schedule of blocks": (Model, {"checkpoint": "optimal", "schedule_bytes": SCHEDULE_BYTES}),
    "segments of stages": (Staged, {"checkpoint": "segments", "segments": 2}),
    "schedule of stages": (Staged, {"checkpoint": "optimal", "schedule_bytes": SCHEDULE_BYTES}),
}


def checkpointed(checkpoint, kind):
    model, fields = CHECKPOINTS[checkpoint]
    return stepped(model, kind, Recipe(optimizer="sgd", **fields))


@cache
def plain(kind):
    return stepped(Model, kind, Recipe(optimizer="sgd"))


# Kinds of state that cannot be restored -> the error.
DIFFERENT = r"^the recomputation of (layers|stage) ?\.?\d"
ALWAYS = dict.fromkeys(("data_of_a_parameter_changed", "global_variable"), DIFFERENT)
ALWAYS |= {"tensor_that_shares_memory": r"load. .* shares its memory with .*row"}
VALUES = dict.fromkeys(("attribute_that_appears", "array"), "reads the values of a tensor")
BUFFERS = ALWAYS | {"data_of_a_buffer_changed": DIFFERENT, "buffer": "average"}
REJECTED = {
    "layers": BUFFERS,
    "selective": BUFFERS,
    "segments of blocks": ALWAYS,
    "schedule of blocks": ALWAYS | VALUES,
    "segments of stages": BUFFERS,
    "schedule of stages": ALWAYS | VALUES,
}


# A schedule runs blocks as segments do, and only plans on symbolic copies beforehand.
PLANNED = (
    *("global_generators", "own_generators", "tensor_changed_in_place"),
    *("tensor_in_nested_containers", "global_variable", *VALUES),
)
CASES = [
    (checkpoint, kind)
    for checkpoint in CHECKPOINTS
    for kind in (PLANNED if "schedule" in checkpoint else KINDS)
]


@pytest.mark.parametrize(("checkpoint", "kind"), CASES)
def test_checkpointed_block_equals_baseline_or_is_rejected(checkpoint, kind):
    if kind in REJECTED[checkpoint]:
        with pytest.raises((ValueError, RuntimeError), match=REJECTED[checkpoint][kind]):
            checkpointed(checkpoint, kind)
    else:
        assert checkpointed(checkpoint, kind) == plain(kind)


ESTIMATED = [(each, kind) for each in CHECKPOINTS for kind in ("dropout", "batch_norm")]
ESTIMATED += [(each, "tensor_changed_in_place") for each in ("layers", "segments of stages")]
ESTIMATED += [("selective", "instance_norm"), ("schedule of blocks", "instance_norm")]


@pytest.mark.parametrize(("checkpoint", "kind"), ESTIMATED)
def test_estimate_of_checkpointed_stateful_blocks_equals_measurement(checkpoint, kind):
    model, fields = CHECKPOINTS[checkpoint]

    def make_model():
        module = make(model, kind)
        module.batch_norm_per_micro_batch = True
        return module

    assert_measured(make_model, batch, Recipe(optimizer="sgd", micro_batches=2, **fields))


# ---- PyTorch's operator database

# Operators that write running statistics after saving them; backward in training ignores these.
STATISTICS = {
    "_batch_norm_with_update",
    "_native_batch_norm_legit",
    "native_batch_norm",
    "nn.functional.batch_norm",
}


def test_checkpointed_gradient_of_every_operator_equals_gradient_without_checkpoint():
    verdicts = {(kind, verdict): set() for kind in (UNCHANGED, *RUNS) for verdict in VERDICTS}
    for name, _, found in findings(compare, torch.float32, 1):
        for kind, finding in found.items():
            verdicts[kind, finding.verdict].add(name)
    assert all(len(verdicts[kind, "equal"]) > 500 for kind in (UNCHANGED, *RUNS))
    # rrelu fills its noise after saving it. It is the last operator of its call, so the readable
    # checkpoint, which stops early, reads unset memory.
    rrelu, statistics = "nn.functional.rrelu", "nn.functional.instance_norm"
    expected = {
        (UNCHANGED, "different"): STATISTICS | {rrelu, statistics},
        ("compared", "rejected"): {rrelu, statistics},
        # instance_norm changes running statistics among its arguments
        **{
            (kind, "rejected"): {statistics}
            for kind in ("nonreentrant", "reentrant", "kept", "kept by turns")
        },
    }
    found = {
        key: names - ({rrelu} if key[0] not in (UNCHANGED, "compared") else set())
        for key, names in verdicts.items()
        if key[1] in ("different", "rejected")
    }
    assert expected == {key: names for key, names in found.items() if names}


def test_checksum_sketch_leaves_float64_tensor_unchanged():
    tensor = torch.randn(6, 5, dtype=torch.float64)
    before = tensor.clone()
    assert not Sketch(tensor).differs(Sketch(tensor))
    assert torch.equal(tensor, before)


@pytest.mark.parametrize("checkpoint", ["layers", "selective"])
def test_gpu_checksums_do_not_change_results_of_checkpointed_block(checkpoint, monkeypatch):
    """Use the checksums for GPU tensors on CPU tensors."""
    sums = []
    monkeypatch.setattr(
        comparison, "_bit_checksum", lambda tensor: sums.append(tensor) or Sketch(tensor)
    )
    assert checkpointed(checkpoint, "own_generators") == plain("own_generators")
    assert sums


def test_comparison_ignores_random_seed_saved_by_attention():
    attention = SimpleNamespace(name=lambda: "ScaledDotProductFlashAttentionBackward0")
    embedding = SimpleNamespace(name=lambda: "EmbeddingBackward0")
    seed, weights = torch.zeros((), dtype=torch.int64), torch.zeros(())
    assert saved_value_may_differ(attention, seed)
    assert not saved_value_may_differ(attention, weights)
    assert not saved_value_may_differ(embedding, seed)


def test_batch_norm_statistics_update_once_despite_eval_before_backward():
    norm = nn.BatchNorm1d(WIDTH)
    block = Repeatable(norm, BlockState(norm, None, statistics=True))
    loss = block.checkpoint((torch.randn(5, WIDTH),), {}).square().sum()
    mean = norm.running_mean.clone()
    norm.eval()
    loss.backward()
    assert norm.num_batches_tracked == 1 and torch.equal(norm.running_mean, mean)


def test_recomputation_restores_containers_holding_the_original_objects():
    block, other, item = nn.Identity(), nn.Identity(), SimpleNamespace()
    block.loop = [1, defaultdict(other.named_buffers, {block: item})]
    block.loop.append(block.loop)  # it contains itself
    state = BlockState(block)
    with state.next_run():
        block.loop.append(2)
    with state.next_run():
        _, by_block, loop = block.loop
        assert loop is block.loop and by_block[block] is item
        assert by_block.default_factory.__self__ is other
    assert len(block.loop) == 4


def test_attribute_changed_in_place_before_recomputation_is_rejected():
    block = nn.Identity()
    block.load = torch.zeros(2)
    state = BlockState(block)
    with state.next_run():
        pass
    block.load += 1
    with (
        pytest.raises(RuntimeError, match=r"^the tensor `load` was changed in place after"),
        state.next_run(),
    ):
        pass


# ---- arguments of a block


class Accumulating(nn.Module):
    """Block that computes with a list and a dict in an argument and changes both."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, WIDTH))

    def forward(self, x, state):
        values, counts = state["values"], state["counts"]
        counts["runs"] = 1 + counts.get("runs", 0)
        y = (x * self.weight * (len(values) + counts["runs"])).exp()
        values.append(y)
        return y.sin()


@pytest.mark.parametrize("preserve_module_state", [False, True])
def test_list_or_dict_argument_is_restored_before_recomputation(preserve_module_state):
    def step(checkpointed):
        model, state = nn.ModuleList(Accumulating() for _ in range(2)), {"values": [], "counts": {}}
        if checkpointed:
            checkpoint_blocks(model, "*", preserve_module_state=preserve_module_state)
        x = torch.linspace(-1, 1, WIDTH, requires_grad=True)
        y = x
        for block in model:
            y = block(y, state=state)
        y.sum().backward()
        return [x.grad, *(p.grad for p in model.parameters()), *state["values"]]

    found, expected = step(True), step(False)
    assert len(found) == len(expected) == 5 and all(map(torch.equal, found, expected))


def test_tensor_in_container_changed_after_block_raises():
    model = nn.ModuleList([Accumulating()])
    checkpoint_blocks(model, "*", compare=False)
    x, scale = torch.ones(WIDTH, requires_grad=True), torch.ones(WIDTH)
    loss = model[0](x, state={"values": [scale], "counts": {}}).sum()
    scale.mul_(2)
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


@pytest.mark.parametrize("when_recomputed", [True, False])
def test_recomputation_enters_function_modes_only_if_when_recomputed_is_true(when_recomputed):
    class Counting(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            calls.append(func is torch.tanh)
            return func(*args, **(kwargs or {}))

    Counting.when_recomputed = when_recomputed
    calls, model = [], nn.Sequential(nn.Sequential(nn.Tanh(), nn.Tanh()))
    checkpoint_blocks(model, "0")
    with Counting():
        output = model(torch.ones(3, requires_grad=True))
    output.sum().backward()
    assert sum(calls) == (4 if when_recomputed else 2)
