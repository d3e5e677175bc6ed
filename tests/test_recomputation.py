"""Blocks that compute with more than their arguments: what a recomputation must find as the first
run did."""

import random
from collections import defaultdict, deque
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from measured import assert_measured
from torch import nn
from torch.overrides import TorchFunctionMode

pytest.importorskip("expecttest", reason="PyTorch's operator database needs expecttest")

from sweep_gradients import UNCHANGED, WAYS, compare
from sweep_operators import VERDICTS, findings

from course_lib._torch.autograd import saved_value_may_differ
from course_lib._torch.modules import attributes_of
from course_lib.budget import Recipe, build, train_step
from course_lib.checkpoint import checkpoint_blocks, comparison
from course_lib.checkpoint.comparison import Sketch
from course_lib.checkpoint.repeatable import BlockState, Repeatable

WIDTH = 8
_calls = {"count": 0}  # of a block that counts in a global variable


# ---- kinds of state: what gives a block its state, and the factor that it computes with it


KINDS = {
    "global_generators": (
        lambda block: None,
        lambda block, x: random.random() * np.random.rand(),
    ),
    "dropout": (
        lambda block: None,
        lambda block, x: nn.functional.dropout(x.detach(), 0.3),
    ),
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
    """Register a factor of `(block, x)`; `make(block)` gives the block what it needs."""

    def register(factor):
        KINDS[factor.__name__] = make, factor
        return factor

    return register


def give_generators(block):
    block.generator = torch.Generator().manual_seed(1)
    block.others = [random.Random(1), np.random.default_rng(1)]


@state(give_generators)
def own_generators(block, x):
    numbers = torch.rand(WIDTH, generator=block.generator)
    return numbers * sum(other.random() for other in block.others)


@state(lambda block: setattr(block, "load", torch.zeros(WIDTH)))
def tensor_changed_in_place(block, x):
    block.load += x.detach().abs().sum(0)
    return block.load.clone()


@state()
def attribute_that_appears(block, x):
    block.seen = getattr(block, "seen", 0.0) + float(x.detach().sum())
    return block.seen


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


@state(lambda block: setattr(block, "load", torch.zeros(WIDTH)))
def data_of_an_attribute_changed(block, x):
    block.load.data.add_(x.detach().mean(0))
    return block.load.clone()


@state()
def data_of_a_parameter_changed(block, x):
    block.linear.weight.data.mul_(0.9)
    return 1.0


@state()
def global_variable(block, x):
    _calls["count"] += 1
    return 1 / _calls["count"]


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
    """A model with its own chain."""

    def stages(self, x):
        return [*self.layers, lambda x: (x.square().sum(), len(x))]


def make(model, kind):
    torch.manual_seed(0)
    return model(kind)


def batch():
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(3))


def stepped(model, kind, recipe):
    """Gradients and state after two micro-batches: all that a later step would find."""
    micro_batches = 1 if kind == "batch_norm" else 2  # it mixes the samples of a batch
    recipe = replace(recipe, micro_batches=micro_batches)
    module, optimizer = build(partial(make, model, kind), recipe, lr=1e-3)
    _calls["count"] = 0
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
    numbers = random.random(), np.random.rand(), torch.rand(1), _calls["count"]
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


FEW = 1250  # bytes: so few that a schedule recomputes blocks
CHECKPOINTS = {
    "layers": (Model, {"checkpoint": "layers"}),
    "selective": (Model, {"checkpoint": "selective"}),
    "segments of blocks": (Model, {"checkpoint": "segments", "segments": 2}),
    "schedule of blocks": (Model, {"checkpoint": "optimal", "schedule_bytes": FEW}),
    "segments of stages": (Staged, {"checkpoint": "segments", "segments": 2}),
    "schedule of stages": (Staged, {"checkpoint": "optimal", "schedule_bytes": FEW}),
}


def checkpointed(checkpoint, kind):
    model, fields = CHECKPOINTS[checkpoint]
    return stepped(model, kind, Recipe(optimizer="sgd", **fields))


@cache
def plain(kind):
    return stepped(Model, kind, Recipe(optimizer="sgd"))


# kinds that are refused, because their state cannot be restored -> the error
ANYWHERE = dict.fromkeys(
    ("data_of_an_attribute_changed", "data_of_a_parameter_changed", "global_variable"),
    r"^the recomputation of (layers|stage) ?\.?\d",
)
ANYWHERE |= {"tensor_that_shares_memory": r"load .* shares its memory with .*row"}
DATA = {"data_of_a_buffer_changed": ANYWHERE["global_variable"]}
VALUES = dict.fromkeys(("attribute_that_appears", "array"), "reads values of its data")
BUFFERS = ANYWHERE | DATA | {"buffer": "average"}
REFUSED = {
    "layers": BUFFERS,
    "selective": BUFFERS,
    "segments of blocks": ANYWHERE,
    "schedule of blocks": ANYWHERE | VALUES,
    "segments of stages": BUFFERS,
    "schedule of stages": ANYWHERE | VALUES,
}


# a schedule within a budget runs blocks as segments do; it plans on symbolic copies beforehand
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
def test_recomputed_block_equals_plain_step_or_is_refused(checkpoint, kind):
    if kind in REFUSED[checkpoint]:
        with pytest.raises((ValueError, RuntimeError), match=REFUSED[checkpoint][kind]):
            checkpointed(checkpoint, kind)
    else:
        assert checkpointed(checkpoint, kind) == plain(kind)


@pytest.mark.parametrize(
    "kind", ["dropout", "tensor_changed_in_place", "batch_norm", "instance_norm"]
)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_kept_state_and_comparison_leave_estimate_equal_to_run(checkpoint, kind):
    model, fields = CHECKPOINTS[checkpoint]

    def made():
        module = make(model, kind)
        module.batch_norm_per_micro_batch = True
        return module

    assert_measured(made, batch, Recipe(optimizer="sgd", micro_batches=2, **fields))


# ---- PyTorch's operator database

# they write running statistics after saving them, which backward does not read in training
STATISTICS = {
    "_batch_norm_with_update",
    "_native_batch_norm_legit",
    "native_batch_norm",
    "nn.functional.batch_norm",
}


def test_gradients_of_every_operator_are_those_of_the_plain_call():
    verdicts = {(way, verdict): set() for way in (UNCHANGED, *WAYS) for verdict in VERDICTS}
    for name, _, found in findings(compare, torch.float32, 1):
        for way, finding in found.items():
            verdicts[way, finding.verdict].add(name)
    assert all(len(verdicts[way, "equal"]) > 500 for way in (UNCHANGED, *WAYS))
    # rrelu fills its noise after saving it. It is the last operator of its call here, so the
    # readable checkpoint, which stops early, reads whatever the memory of the noise held.
    rrelu, statistics = "nn.functional.rrelu", "nn.functional.instance_norm"
    expected = {
        (UNCHANGED, "different"): STATISTICS | {rrelu, statistics},
        ("compared", "refused"): {rrelu, statistics},
        # instance_norm changes running statistics among its arguments
        **{
            (way, "refused"): {statistics}
            for way in ("nonreentrant", "reentrant", "kept", "kept by turns")
        },
    }
    found = {
        key: names - ({rrelu} if key[0] not in (UNCHANGED, "compared") else set())
        for key, names in verdicts.items()
        if key[1] in ("different", "refused")
    }
    assert expected == {key: names for key, names in found.items() if names}


def test_a_sketch_of_values_changes_no_tensor():
    tensor = torch.randn(6, 5, dtype=torch.float64)
    before = tensor.clone()
    assert not Sketch(tensor).differs(Sketch(tensor))
    assert torch.equal(tensor, before)


@pytest.mark.parametrize("checkpoint", ["layers", "selective"])
def test_the_checksums_of_a_gpu_are_taken_outside_the_modes_of_a_checkpoint(
    checkpoint, monkeypatch
):
    """The test uses the GPU's checksums on CPU tensors."""
    taken = []
    monkeypatch.setattr(comparison, "_bits", lambda tensor: taken.append(1) or Sketch(tensor))
    assert checkpointed(checkpoint, "own_generators") == plain("own_generators")
    assert taken


def test_seeds_that_attention_saves_without_drawing_from_them_are_not_compared():
    attention = SimpleNamespace(name=lambda: "ScaledDotProductFlashAttentionBackward0")
    embedding = SimpleNamespace(name=lambda: "EmbeddingBackward0")
    seed, weights = torch.zeros((), dtype=torch.int64), torch.zeros(())
    assert saved_value_may_differ(attention, seed)
    assert not saved_value_may_differ(attention, weights)
    assert not saved_value_may_differ(embedding, seed)


def test_statistics_are_updated_once_also_if_the_mode_changes_before_backward():
    norm = nn.BatchNorm1d(WIDTH)
    block = Repeatable(norm, BlockState(norm, None, statistics=True))
    loss = block.checkpoint((torch.randn(5, WIDTH),), {}).square().sum()
    mean = norm.running_mean.clone()
    norm.eval()
    loss.backward()
    assert norm.num_batches_tracked == 1 and torch.equal(norm.running_mean, mean)


def test_tensors_of_a_list_are_kept_by_name_and_frozen_parameters_are_not_copied():
    block = nn.LSTM(WIDTH, WIDTH).requires_grad_(False)  # with a list of its parameters
    block.counts = [torch.zeros(1), torch.zeros(1)]
    state = BlockState(block, None)
    with state.first_run():
        assert [each.name for each in state.modules.tensors] == ["counts[0]", "counts[1]"]


def test_later_run_finds_containers_as_they_were_and_the_same_objects_in_them():
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


def test_attribute_changed_in_place_between_two_runs_is_refused():
    block = nn.Identity()
    block.load = torch.zeros(2)
    state = BlockState(block)
    with state.next_run():
        pass
    block.load += 1
    with pytest.raises(RuntimeError, match=r"^load was changed in place after"), state.next_run():
        pass


# ---- arguments of a block


class Accumulating(nn.Module):
    """A block that computes with a list or a dict among its arguments, and changes it."""

    def __init__(self, container):
        super().__init__()
        self.weight, self.container = nn.Parameter(torch.linspace(0.5, 2, WIDTH)), container

    def forward(self, x, state):
        values = state if self.container == "list" else state["values"]
        y = (x * self.weight * (1 + len(values))).exp()
        if self.container == "list":
            values.append(y)
        else:
            state["values"] = (*values, y)
        return y.sin()


@pytest.mark.parametrize("preserve_module_state", [False, True])
@pytest.mark.parametrize("container", ["list", "dict"])
def test_list_or_dict_among_arguments_is_restored_for_recomputation(
    container, preserve_module_state
):
    """Gradients are wrong if the recomputation gets the container as the first run left it."""

    def step(checkpointed):
        model = nn.ModuleList([Accumulating(container) for _ in range(2)])
        if checkpointed:
            checkpoint_blocks(model, "*", preserve_module_state=preserve_module_state)
        state = [] if container == "list" else {"values": ()}
        x = torch.linspace(-1, 1, WIDTH, requires_grad=True)
        y = x
        for block in model:
            y = block(y, state=state)
        y.sum().backward()
        values = state if container == "list" else state["values"]
        return [x.grad, *(p.grad for p in model.parameters()), *values]

    found, expected = step(True), step(False)
    assert len(found) == len(expected) == 5 and all(map(torch.equal, found, expected))


def test_tensor_in_a_container_changed_after_the_block_is_an_error():
    model = nn.ModuleList([Accumulating("list")])
    checkpoint_blocks(model, "*", compare=False)
    x, scale = torch.ones(WIDTH, requires_grad=True), torch.ones(WIDTH)
    loss = model[0](x, state=[scale]).sum()
    scale.mul_(2)
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


@pytest.mark.parametrize("last", [True, False])
def test_rrelu_is_refused_as_the_last_operator_of_a_block(last):
    def step(checkpointed):
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH), nn.RReLU(), *([] if last else [nn.Tanh()])]
        model = nn.Sequential(nn.Sequential(*layers))
        if checkpointed:
            checkpoint_blocks(model, "0")
        model(torch.linspace(-1, 1, WIDTH)).sum().backward()
        return [p.grad for p in model.parameters()]

    if last:
        with pytest.raises(RuntimeError, match="last operator is rrelu in training mode"):
            step(True)
    else:
        assert all(map(torch.equal, step(True), step(False)))


@pytest.mark.parametrize("when_recomputed", [True, False])
def test_mode_that_asks_for_it_is_entered_for_the_recomputation(when_recomputed):
    class Counting(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            calls.append(func is torch.exp)
            return func(*args, **(kwargs or {}))

    class Block(nn.Module):
        def forward(self, x):
            return torch.exp(x).sin()

    Counting.when_recomputed = when_recomputed
    calls, model = [], nn.Sequential(Block())
    checkpoint_blocks(model, "0")
    with Counting():
        output = model(torch.ones(3, requires_grad=True))
    output.sum().backward()
    assert sum(calls) == (2 if when_recomputed else 1)
