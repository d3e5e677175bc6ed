"""Comparison of a block's first recomputation with its first run in `checkpoint_blocks`."""

import copy
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from course_lib.checkpoint import checkpoint_blocks, comparison
from course_lib.memory import MemoryMeter

WIDTH = 6


def write(state):
    with torch.no_grad():
        state.memory.add_(1)


def keep(state):
    pass


class Block(nn.Module):
    """Block that computes with the state in an argument and then changes that state."""

    def __init__(self, change):
        super().__init__()
        self.linear, self.change = nn.Linear(WIDTH, WIDTH), change

    def forward(self, x, state=None):
        if state is None:
            return self.linear(x).tanh()
        # the copy is saved for backward, and later changes do not reach it
        factor = state.memory.clone()
        self.change(state)
        return (self.linear(x) * factor).tanh()


class Model(nn.Module):
    def __init__(self, change=keep, count=2):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(change) for _ in range(count))

    def forward(self, x, *states, **named):
        for layer in self.layers:
            x = layer(x, *states, **named)
        return x


def inputs(samples=3):
    return torch.linspace(-1, 1, samples * WIDTH).view(samples, WIDTH)


def gradients(model):
    found = [copy.deepcopy(parameter.grad) for parameter in model.parameters()]
    model.zero_grad()
    return found


def memory():
    return torch.full((WIDTH,), 0.5)


def test_argument_changed_before_recomputation_raises_without_leaving_gradients():
    model, x, state = Model(write), inputs(), SimpleNamespace(memory=memory())
    with checkpoint_blocks(model):
        for _ in range(2):  # the comparison continues after an error
            output = model(x, state=state)
            random = torch.get_rng_state()
            message = r"^the recomputation of layers\.1 differs .*use_cache=False.*compare=False"
            with pytest.raises(RuntimeError, match=message):
                output.sum().backward()
            assert torch.equal(torch.get_rng_state(), random)
            assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
            assert torch.equal(x, inputs()) and x.grad is None
            assert gradients(model) == [None] * 4
    with checkpoint_blocks(model, compare=False):
        model(x, state).sum().backward()
    assert all(gradient is not None for gradient in gradients(model))


class OwnError(RuntimeError):
    pass


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            ValueError("full."),
            r"^the recomputation of 0 .* raised ValueError\. The recomputation .*exclude.* full",
        ),
        (OwnError("full"), "^full$"),
    ],
)
def test_error_in_recomputation_names_block_unless_its_type_is_custom(error, message):
    def fail_again(state):
        write(state)
        if state.memory[0] > 2:  # 0.5 before the first run
            raise error

    model = nn.Sequential(Block(fail_again))
    with checkpoint_blocks(model, "0"):
        output = model[0](inputs(), SimpleNamespace(memory=memory()))
        with pytest.raises(RuntimeError, match=message):
            output.sum().backward()


class RandomBlock(nn.Module):
    """Block with a dropout, a batch norm, an in-place activation and a NaN."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))

    def forward(self, x):
        x = F.dropout(self.norm(self.linear(x)), 0.3)
        x = F.batch_norm(x, self.mean, self.variance, training=True)
        x = F.rrelu(x, training=True)
        return x + (x.detach() * 0).log().mul(0 * x)[:, :1].nan_to_num() + F.relu_(x * 1.5)


class NestedBlocks(nn.Module):
    """Block that contains blocks, which are checkpointed as well."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

    def forward(self, x):
        for inner in self.inner:
            x = inner(x).sin().exp()
        return x


def frozen():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).requires_grad_(False)


autocast = partial(torch.autocast, "cpu", torch.bfloat16)
EQUAL = {  # name -> (block, batch, options of checkpoint_blocks, context of the forward pass)
    "dropout, norms and NaN": (RandomBlock, inputs, {}, nullcontext),
    "dropout in autocast": (RandomBlock, inputs, {}, autocast),
    "nested": (NestedBlocks, inputs, {"blocks": ["?", "?.inner.*"]}, nullcontext),
    "policy": (NestedBlocks, inputs, {"policy": [torch.ops.aten.addmm.default]}, nullcontext),
    "state": (NestedBlocks, inputs, {"preserve_module_state": True}, nullcontext),
    "frozen": (frozen, inputs, {}, nullcontext),
    "one sample": (NestedBlocks, partial(inputs, 1), {}, nullcontext),
    "autocast": (NestedBlocks, inputs, {}, autocast),
    "recurrent": (lambda: nn.RNNCell(WIDTH, WIDTH), inputs, {}, nullcontext),
}


def results_and_peak(case, compare=None, dtype=torch.float32):
    """Return (gradients, next random number) of two steps, and their peak in bytes."""
    make, batch, options, context = EQUAL[case]
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), make(), make()).to(dtype)
    options = {"blocks": ["1", "2"], **options, "compare": compare}
    checkpoints = nullcontext() if compare is None else checkpoint_blocks(model, **options)
    torch.manual_seed(2)
    with checkpoints, MemoryMeter(model) as meter:
        for _ in range(2):
            with context():
                first, second = model(batch().to(dtype)), model(batch().to(dtype) * 2)
            with torch.no_grad():
                model(batch().to(dtype))
            (first.float().square().sum() + second.float().sum()).backward()
    return (gradients(model), torch.rand(1)), meter.peak_bytes


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, torch.float32) for case in EQUAL),
        *((case, torch.bfloat16) for case in ("dropout, norms and NaN", "policy")),
    ],
)
def test_comparison_of_recomputation_changes_neither_gradients_nor_peak(case, dtype):
    plain, _ = results_and_peak(case, dtype=dtype)
    found, peak = results_and_peak(case, True, dtype)
    torch.testing.assert_close(found, plain, rtol=0, atol=0, equal_nan=True)
    assert peak == results_and_peak(case, False, dtype)[1]


def test_comparison_checks_only_first_recomputation_of_each_block(monkeypatch):
    sums, checksum = [], comparison.checksum
    monkeypatch.setattr(
        comparison, "checksum", lambda tensor: sums.append(tensor) or checksum(tensor)
    )
    model = Model(count=3)
    with checkpoint_blocks(model):
        loss = model(inputs(), SimpleNamespace(memory=memory())).sum()
        loss.backward(retain_graph=True)
        count = len(sums)
        loss.backward()
        model(inputs(), SimpleNamespace(memory=memory())).sum().backward()
    assert count > 0 and count % 2 == 0 and len(sums) == count


def test_comparison_ignores_dropout_if_random_state_is_not_preserved():
    model = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)))
    with checkpoint_blocks(model, "0", preserve_rng_state=False):
        model(inputs()).sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_comparison_inside_another_checkpoint_detects_changed_argument(reentrant):
    def run(change):
        model, state = Model(change, count=1), SimpleNamespace(memory=memory())
        x = inputs().requires_grad_()
        with checkpoint_blocks(model):
            checkpoint(lambda x: model(x, state), x, use_reentrant=reentrant).sum().backward()

    run(keep)
    with pytest.raises(RuntimeError, match=r"recomputation of layers\.0 differs"):
        run(write)


def test_comparison_in_ddp_model_detects_changed_argument(one_process):
    model, state = Model(), SimpleNamespace(memory=memory())
    model(inputs(), state).sum().backward()
    expected = gradients(model)
    for change in (keep, write):
        parallel = DistributedDataParallel(Model(change))
        with checkpoint_blocks(parallel, "module.layers.*"):
            loss = parallel(inputs(), state).sum()
            if change is keep:
                loss.backward()
                torch.testing.assert_close(gradients(parallel), expected)
            else:
                with pytest.raises(RuntimeError, match=r"recomputation of module\.layers\.1"):
                    loss.backward()
