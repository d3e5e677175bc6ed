"""Blocks that compute with more than their arguments: what a recomputation must find as the first
run did."""

import random
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from measured import assert_measured
from torch import nn

pytest.importorskip("expecttest", reason="PyTorch's operator database needs expecttest")

from sweep_gradients import UNCHANGED, WAYS, compare
from sweep_operators import VERDICTS, findings

from course_lib._check import InfeasibleBudget
from course_lib._torch import saves_unset_memory
from course_lib.budget import Recipe, build, train_step
from course_lib.checkpoint import checkpoint, repeatable
from course_lib.checkpoint.repeatable import BlockState, Repeatable, Sketch
from course_lib.models import Decoder, random_tokens

WIDTH = 8
_calls = {"count": 0}  # of a block that counts in a global variable


class Counter:
    """An object that a block changes in place."""

    count = 0


# ---- kinds of state: what a block holds, and the factor that it computes with it

KINDS = {}


def state(make=lambda block: None):
    """Register a factor of `(block, x)`; `make(block)` gives the block what it needs."""

    def register(factor):
        KINDS[factor.__name__] = make, factor
        return factor

    return register


@state()
def python_random(block, x):
    return random.random()


@state()
def numpy_random(block, x):
    return np.random.rand()


@state()
def dropped_out(block, x):
    return nn.functional.dropout(x.detach(), 0.5)


@state(lambda block: setattr(block, "generator", torch.Generator().manual_seed(1)))
def own_torch_generator(block, x):
    return torch.rand(WIDTH, generator=block.generator)


@state(lambda block: setattr(block, "generators", [random.Random(1)]))
def own_python_generator_in_a_list(block, x):
    return block.generators[0].random()


@state(lambda block: setattr(block, "generator", np.random.default_rng(1)))
def own_numpy_generator(block, x):
    return block.generator.random()


@state(lambda block: setattr(block, "load", torch.zeros(WIDTH)))
def tensor_changed_in_place(block, x):
    block.load += x.detach().abs().sum(0)
    return block.load.clone()


@state(lambda block: setattr(block, "load", torch.zeros(WIDTH)))
def tensor_replaced(block, x):
    block.load = block.load * 0.5 + x.detach().mean(0)
    return block.load


@state(lambda block: setattr(block, "load", None))
def tensor_from_none(block, x):
    if block.load is None:
        block.load = x.detach().mean(0)
    else:
        block.load += x.detach().mean(0)
    return block.load.clone()


@state()
def attribute_that_appears(block, x):
    block.seen = getattr(block, "seen", 0.0) + float(x.detach().sum())
    return block.seen


def _two_names(block):
    block.load = block.same = torch.zeros(WIDTH)


@state(_two_names)
def tensor_with_two_names(block, x):
    block.load += x.detach().mean(0)
    return block.same + block.load


@state(lambda block: setattr(block, "count", 0))
def counter(block, x):
    block.count += 1
    return 1 / block.count


@state(lambda block: setattr(block, "history", []))
def growing_list(block, x):
    block.history.append(x.detach().mean(0))
    return torch.stack(block.history).sum(0)


@state(lambda block: setattr(block, "loads", {"a": [torch.zeros(WIDTH)]}))
def tensor_in_nested_containers(block, x):
    block.loads["a"][0] += x.detach().mean(0)
    block.loads["b"] = block.loads.get("b", 0) + 1
    return block.loads["a"][0] + block.loads["b"]


@state(lambda block: setattr(block, "array", np.zeros(WIDTH, dtype=np.float32)))
def array(block, x):
    block.array += x.detach().mean(0).numpy()
    return torch.from_numpy(block.array.copy())


@state(lambda block: setattr(block, "norm", nn.BatchNorm1d(WIDTH)))
def batch_norm(block, x):
    return block.norm(x)


@state(lambda block: setattr(block, "norm", nn.InstanceNorm1d(2, track_running_stats=True)))
def instance_norm(block, x):
    return block.norm(x.view(len(x), 2, -1)).view(x.shape)


@state(lambda block: block.register_buffer("average", torch.zeros(WIDTH)))
def buffer(block, x):
    block.average.mul_(0.5).add_(x.detach().mean(0))
    return block.average.clone()


@state(lambda block: block.register_buffer("average", torch.zeros(WIDTH)))
def data_of_a_buffer_replaced(block, x):
    block.average.data = block.average * 0.5 + x.detach().mean(0)
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


@state(lambda block: setattr(block, "counter", Counter()))
def object_changed_in_place(block, x):
    block.counter.count += 1
    return 1 / block.counter.count


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
    micro_batches = 1 if kind == "batch_norm" else 2  # which mixes the samples of a batch
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
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if key in STATE:
                found[f"{name}.{key}"] = content(value)
    return {
        **found,
        "parameters": list(module.parameters()),
        "buffers": list(module.buffers()),
        "next": (random.random(), np.random.rand(), torch.rand(1), _calls["count"]),
    }


STATE = [
    "generator",
    "generators",
    "load",
    "same",
    "seen",
    "count",
    "history",
    "loads",
    "array",
    "counter",
]


def content(value):
    """What is compared of an attribute; of a generator, its state."""
    if isinstance(value, Counter):
        return value.count
    if isinstance(value, list):
        return [content(item) for item in value]
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    return value.bit_generator.state if isinstance(value, np.random.Generator) else value


def assert_same(a, b, where=""):
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, np.ndarray):
        assert (a == b).all(), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (one, other) in enumerate(zip(a, b, strict=True)):
            assert_same(one, other, f"{where}[{i}]")
    else:
        assert a == b, where


CHECKPOINTS = {
    "layers": (Model, {"checkpoint": "layers"}),
    "selective": (Model, {"checkpoint": "selective"}),
    "segments of blocks": (Model, {"checkpoint": "segments", "segments": 2}),
    "schedule of blocks": (Model, {"checkpoint": "optimal", "schedule_bytes": 1}),
    "segments of stages": (Staged, {"checkpoint": "segments", "segments": 2}),
    "schedule of stages": (Staged, {"checkpoint": "optimal", "schedule_bytes": 1}),
}


def checkpointed(checkpoint, kind):
    """A step with these checkpoints, in the fewest bytes for a schedule within a budget."""
    model, fields = CHECKPOINTS[checkpoint]
    try:
        return stepped(model, kind, Recipe(optimizer="sgd", **fields))
    except InfeasibleBudget as error:
        least = fields | {"schedule_bytes": error.least_bytes}
        return stepped(model, kind, Recipe(optimizer="sgd", **least))


@cache
def plain(kind):
    return stepped(Model, kind, Recipe(optimizer="sgd"))


# what is refused, and not run with the state of the first run
ANYWHERE = dict.fromkeys(
    (
        "data_of_an_attribute_changed",
        "data_of_a_parameter_changed",
        "global_variable",
        "object_changed_in_place",
    ),
    r"^the recomputation of (layers\.\d|stage \d( to stage \d)?) is not equal to its first run.*:"
    r" (tensor \d+ saved|its output|it changes [\w.]+ again).* Change the block, or exclude it",
)
IN_PLACE = dict.fromkeys(
    ("buffer", "data_of_a_buffer_replaced"),
    r"^checkpoint must be .* changes a buffer \(layers\.0\.average\)",
)
DATA = {"data_of_a_buffer_changed": ANYWHERE["global_variable"]}
VALUES = dict.fromkeys(
    ("attribute_that_appears", "array"), r"reads values of its data .* at .*test_recomputation"
)
REFUSED = {
    "layers": ANYWHERE | IN_PLACE | DATA,
    "selective": ANYWHERE | IN_PLACE | DATA,
    "segments of blocks": ANYWHERE,
    "schedule of blocks": ANYWHERE | VALUES,
    "segments of stages": ANYWHERE | DATA | dict.fromkeys(IN_PLACE, ANYWHERE["global_variable"]),
    "schedule of stages": ANYWHERE | VALUES,
}


# a schedule within a budget runs blocks as segments do; it plans on symbolic copies beforehand
PLANNED = (
    *("python_random", "numpy_random", "own_torch_generator", "tensor_changed_in_place"),
    *("growing_list", "global_variable", *VALUES),
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
        assert_same(checkpointed(checkpoint, kind), plain(kind))


@pytest.mark.parametrize("kind", ["tensor_changed_in_place", "growing_list", "instance_norm"])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_kept_state_and_comparison_leave_estimate_equal_to_run(checkpoint, kind):
    model, fields = CHECKPOINTS[checkpoint]
    fields = fields | {"micro_batches": 2}
    if "schedule_bytes" in fields:
        fields |= {"schedule_bytes": 5000}
    recipe = Recipe(optimizer="sgd", **fields)
    assert_measured(partial(make, model, kind), batch, recipe)


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
    expected = {
        # rrelu draws its noise after saving it, and its gradients are equal all the same
        (UNCHANGED, "different"): STATISTICS
        | {"nn.functional.rrelu", "nn.functional.instance_norm"},
        # a recomputation would change the running statistics again
        ("compared", "refused"): STATISTICS,
    }
    assert expected == {
        key: names
        for key, names in verdicts.items()
        if names and key[1] in ("different", "refused")
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.float32, torch.int64])
def test_a_sketch_of_values_changes_no_tensor(dtype):
    tensor = torch.randn(6, 5).to(dtype)
    before = tensor.clone()
    first = Sketch(torch.view_as_real(tensor) if dtype.is_complex else tensor)
    assert torch.equal(tensor, before)
    assert not first.differs(Sketch(torch.view_as_real(tensor) if dtype.is_complex else tensor))


@pytest.mark.parametrize("checkpoint", ["layers", "selective"])
def test_the_checksums_of_a_gpu_are_taken_outside_the_modes_of_a_checkpoint(
    checkpoint, monkeypatch
):
    """Here a CPU's tensors get them too."""
    sizes = {"vocabulary": 64, "hidden": 16, "heads": 2, "layers": 3, "sequence": 8}
    taken = []
    monkeypatch.setattr(repeatable, "_bits", lambda tensor: taken.append(1) or Sketch(tensor))

    def weights(**fields):
        recipe = Recipe(optimizer="sgd", **fields)
        model, optimizer = build(lambda: Decoder(**sizes), recipe)
        train_step(model, optimizer, random_tokens(4, 8, 64), recipe)
        return list(model.parameters())

    plain = weights()
    assert all(map(torch.equal, weights(checkpoint=checkpoint), plain))
    assert taken


@pytest.mark.parametrize(
    ("node", "dtype", "unset"),
    [
        ("ScaledDotProductCudnnAttentionBackward0", torch.int64, True),
        ("ScaledDotProductFlashAttentionBackward0", torch.uint64, True),
        ("ScaledDotProductEfficientAttentionBackward0", torch.float32, False),
        ("EmbeddingBackward0", torch.int64, False),
        ("CtcLossBackward0", torch.float32, True),
    ],
)
def test_seeds_that_attention_saves_without_drawing_from_them_are_not_compared(node, dtype, unset):
    assert (
        saves_unset_memory(SimpleNamespace(name=lambda: node), torch.zeros((), dtype=dtype))
        is unset
    )
    assert not saves_unset_memory(None, torch.zeros(()))


class SharedMemory(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.ones(2, WIDTH)
        self.row = self.table[0]

    def forward(self, x):
        self.row.mul_(0.5)
        return (x * self.table[0]).sin()


def test_an_attribute_that_shares_its_memory_with_another_is_refused_if_it_changes():
    block = SharedMemory()
    with pytest.raises(
        RuntimeError, match="table was changed in place, but shares its memory with row"
    ):
        checkpoint(
            Repeatable(block, BlockState(block, None)),
            torch.ones(3, WIDTH, requires_grad=True),
            use_reentrant=False,
        )


def test_statistics_are_updated_once_also_if_the_mode_changes_before_backward():
    norm = nn.BatchNorm1d(WIDTH)
    state = BlockState(norm, None, statistics=True)
    x = torch.randn(5, WIDTH, requires_grad=True)
    loss = checkpoint(Repeatable(norm, state), x, use_reentrant=False).square().sum()
    mean = norm.running_mean.clone()
    norm.eval()
    loss.backward()
    assert norm.num_batches_tracked == 1 and torch.equal(norm.running_mean, mean)


def test_frozen_parameters_in_attributes_are_not_copied():
    lstm = nn.LSTM(WIDTH, WIDTH).requires_grad_(False)
    state = BlockState(lstm, None)
    with state.first_run():
        assert state.attributes.tensors == []


def test_each_tensor_of_a_list_has_a_name_of_its_own():
    block = nn.Identity()
    block.counts = [torch.zeros(1), torch.zeros(1)]
    state = BlockState(block, None)
    with state.first_run():
        assert [each.name for each in state.attributes.tensors] == ["counts[0]", "counts[1]"]
