"""Training steps for tests of `course_lib.memory`, and their bytes as the allocator counts them."""

import os
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from course_lib._torch.steps import not_collecting
from course_lib.memory import MemoryMeter
from course_lib.models import DecoderLayer, deep_mlp

os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def train(model, x, optimizer=None, **options):
    """Return a model, its optimizer, and a function that trains it for one step."""
    optimizer = optimizer and optimizer(model.parameters(), **options)

    def step():
        model(x).square().mean().backward()
        if optimizer is not None:
            optimizer.step()

    return model, optimizer, step


def mlp(activation=nn.GELU):
    model = deep_mlp(6, 128, activation=activation)
    return train(model, torch.randn(256, 128), optimizer=torch.optim.Adam)


def checkpointed(reentrant):
    """Return a step of decoder layers that run under PyTorch's own checkpoint."""
    layers = nn.ModuleList(DecoderLayer(128, 4, dropout=0.1) for _ in range(3))
    optimizer = torch.optim.Adam(layers.parameters())
    x = torch.randn(8, 64, 128, requires_grad=reentrant)

    def step():
        y = x
        for layer in layers:
            y = checkpoint(layer, y, use_reentrant=reentrant)
        y.square().mean().backward()
        optimizer.step()
        x.grad = None

    return layers, optimizer, step


class OuterOptimizer(torch.optim.Optimizer):
    """Optimizer whose step calls that of another optimizer, which holds the state."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.base = torch.optim.Adam(self.param_groups[0]["params"], lr=0.1, foreach=False)

    @torch.no_grad()
    def step(self, closure=None):
        copies = [p.detach().clone() for p in self.param_groups[0]["params"]]
        self.base.step()
        torch._foreach_mul_(copies, 2.0)

    def held_tensors(self):
        return (value for state in self.base.state.values() for value in state.values())

    def state_dict(self):
        return self.base.state_dict()

    def load_state_dict(self, content):
        self.base.load_state_dict(content)


class CountingBackend:
    """Backend of `torch.compile` that counts compilations and runs of the compiled code."""

    def __init__(self):
        self.compiled = self.runs = 0

    def __call__(self, graph, inputs):
        self.compiled += 1

        def run(*args):
            self.runs += 1
            return graph(*args)

        return run


def allocations(step):
    """Return the bytes of each allocation (+) and release (-), as the profiler records them."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()
    events = enumerate(profile.profiler.kineto_results.events())
    changes = sorted(
        (event.start_ns(), i, event.nbytes()) for i, event in events if event.name() == "[memory]"
    )
    return [change for _, _, change in changes]


def metered(step, *given, **options):
    """Run a step under a meter of the model and the optimizer in `given`, and return the meter."""
    with MemoryMeter(*given, **options) as meter:
        step()
    return meter


def bytes_of(tensors):
    return sum(tensor.nbytes for tensor in tensors)


def at_end(meter):
    return {name: int(values[-1]) for name, values in meter.series().items()}


def empty_gradients(model):
    model.zero_grad(set_to_none=True)


def one_more_sample():
    """Run an operator, because a sample counts only the releases before its operator."""
    torch.empty(0)


def step_in_backward(model, optimizer):
    """Let the optimizer step as soon as the gradient of any parameter is complete."""

    def update(parameter):
        optimizer.step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)


@contextmanager
def hooks_restored():
    """Check that the block leaves no hook, no mode and no patched function behind."""

    def state():
        hooks = optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks
        modes = _get_current_dispatch_mode_stack()
        return torch.get_rng_state, *map(len, hooks), len(modes), dict(vars(torch.UntypedStorage))

    before = state()
    yield
    assert state() == before


@contextmanager
def no_gc():
    """Disable garbage collection, so that only reference counts release tensors."""
    # The first call of a checkpoint loads the compiler, which leaves a reference cycle.
    checkpoint(torch.sin, torch.ones(1, requires_grad=True), use_reentrant=False)
    with not_collecting():
        yield
