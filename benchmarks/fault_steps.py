"""Steps for `faults.py`, each with one technique of the library, on a small model with dropout."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.accumulation import AccumulatedStep, split
from course_lib.attention import flash_attention
from course_lib.budget import Recipe, build, estimate, train_step
from course_lib.checkpoint import checkpoint_blocks, checkpointed_loss
from course_lib.checkpoint.readable import checkpoint
from course_lib.memory import MemoryMeter
from course_lib.offload import DiskStore, HostStore, OffloadedOptimizer, offload_activations
from course_lib.schedule import recursive, schedule_blocks
from course_lib.simulated import SimulatedDevice

aten = torch.ops.aten
SGD = partial(torch.optim.SGD, lr=0.5)


class Net(nn.Module):
    """Three blocks with dropout and a head."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, around: Callable = lambda block, x: block(x)) -> Tensor:
        for block in self.blocks:
            x = around(block, x)
        return self.head(x).square().mean()


@dataclass
class Step:
    """A step with a technique, and the objects of its caller that no fault may change.

    Attributes:
        call: Function that runs the step.
        model: Model whose parameters and gradients must not be lost.
        batch: Tensors of the caller that no step may change.
        store: Store whose reservations must be free after a fault; None without one.
        restores: Whether gradients and random numbers must be as before after every error.
        close: Function that ends the technique.
        symbolic: Whether the operators run on tensors without values, so that only hooks can fail.
        device: The simulated device on which the step runs.
        optimizer: Optimizer whose state belongs to the step.
        scaler: Scaler of the loss, whose state must be as before after every error.
        forks: Whether the step also runs in a forked process.
    """

    call: Callable[[], object]
    model: nn.Module
    batch: list[Tensor]
    store: DiskStore | HostStore | None = None
    restores: bool = False
    close: Callable[[], object] = lambda: None
    symbolic: bool = False
    device: SimulatedDevice | None = None
    optimizer: torch.optim.Optimizer | None = None
    scaler: torch.amp.GradScaler | None = None
    forks: bool = True
    before: list[Tensor] = field(default_factory=list)

    def __post_init__(self):
        self.before = [p.detach().clone() for p in self.model.parameters()]
        self.state = copy.deepcopy(self.optimizer.state_dict()) if self.optimizer else None
        self.scale = self.scaler.state_dict() if self.scaler else None

    def reset(self) -> None:
        """Restore parameters, gradients, optimizer, scaler and random numbers of the first call."""
        if self.optimizer:
            self.optimizer.load_state_dict(copy.deepcopy(self.state))
        if self.scaler:
            self.scaler.load_state_dict(self.scale)
        with torch.no_grad():
            for p, values in zip(self.model.parameters(), self.before, strict=True):
                p.copy_(values)
                p.grad = None
        torch.manual_seed(0)


def inputs() -> Tensor:
    return torch.randn(8, 16, requires_grad=True)


def inside(context: Callable[[nn.Module], AbstractContextManager], folder: Path) -> Step:
    """Return a step: a forward and a backward pass inside `context(model)`."""
    model, x = Net(), inputs()

    def call() -> None:
        with context(model):
            model(x).backward()

    return Step(call, model, [x])


def around(how: Callable, folder: Path) -> Step:
    """Return a step: a forward and a backward pass in which `how` runs each block."""
    model, x = Net(), inputs()
    return Step(lambda: model(x, how).backward(), model, [x])


def in_autocast(model: nn.Module) -> ExitStack:
    """Apply `checkpoint_blocks` and autocast, whose dtypes the recomputation must repeat."""
    stack = ExitStack()
    device = next(model.parameters()).device.type
    stack.enter_context(torch.autocast(device, torch.bfloat16))
    stack.enter_context(checkpoint_blocks(model, "blocks.*"))
    return stack


def selective(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, keep=[aten.addmm.default])


def offloaded(folder: Path) -> Step:
    model, x, store = Net(), inputs(), DiskStore(folder)

    def call() -> None:
        with offload_activations(store, min_bytes=0):
            loss = model(x)
        loss.backward()

    return Step(call, model, [x], store, close=store.close)


def on_streams(folder: Path) -> Step:
    """Return a step with offloaded activations on a simulated device that raises at a race."""
    stack, store = ExitStack(), HostStore()
    device = stack.enter_context(SimulatedDevice(memory_bytes=1 << 22))
    model, x = device.move(Net()), device.move(inputs())

    def call() -> None:
        with offload_activations(store, min_bytes=0):
            loss = model(x)
        loss.backward()

    return Step(call, model, [x], store, close=stack.close, device=device, forks=False)


def updated_on_streams(folder: Path) -> Step:
    """Return a step that updates parameters of a simulated device on the host."""
    stack = ExitStack()
    device = stack.enter_context(SimulatedDevice(memory_bytes=1 << 22))
    model, x = device.move(Net()), device.move(inputs())
    optimizer = OffloadedOptimizer(model.parameters(), torch.optim.SGD, lr=0.5, momentum=0.9)

    def call() -> None:
        model(x).backward()
        optimizer.step()

    call()  # makes the state
    model.zero_grad()
    options = {"close": stack.close, "device": device, "optimizer": optimizer, "forks": False}
    return Step(call, model, [x], **options)


def chunked(folder: Path) -> Step:
    model, x, targets = nn.Linear(16, 9), inputs(), torch.arange(8)
    return Step(
        lambda: checkpointed_loss(x, model, targets, chunk=3).backward(), model, [x, targets]
    )


class Attention(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = super().forward(x).view(2, 1, 4, 48).chunk(3, -1)
        return flash_attention(q, k, v, backend="torch", block_q=2, block_k=2).square().sum()


def attention(folder: Path) -> Step:
    model, x = Attention(16, 48), inputs()
    return Step(lambda: model(x).backward(), model, [x])


def loss_sum(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    return model(x) * len(x), len(x)


def accumulated(folder: Path) -> Step:
    model, x = Net(), inputs().detach()
    optimizer = SGD(model.parameters())
    step = AccumulatedStep(model, optimizer, loss_sum, max_norm=1.0)
    return Step(lambda: step(split(x, 3)), model, [x], restores=True)


def scaled(folder: Path) -> Step:
    """Return a step of micro-batches in fp16 under autocast, with a scaler."""
    model, x = Net(), inputs().detach()
    optimizer, scaler = SGD(model.parameters()), torch.amp.GradScaler(x.device.type, 1024.0)
    step = AccumulatedStep(
        model, optimizer, loss_sum, scaler=scaler, max_norm=1.0, autocast_dtype=torch.float16
    )
    return Step(lambda: step(split(x, 3)), model, [x], restores=True, scaler=scaler)


def replicated(folder: Path) -> Step:
    """Return a step of micro-batches through DDP, in a group of one process.

    Each call creates a new DDP, because DDP rejects all forward passes after an error between the
    first and the last gradient, with `AccumulatedStep` and without it.
    """
    model, x = Net(), inputs().detach()
    backend = "nccl" if x.is_cuda else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    optimizer = SGD(model.parameters())

    def call() -> None:
        replica = nn.parallel.DistributedDataParallel(model)
        AccumulatedStep(replica, optimizer, loss_sum, max_norm=1.0)(split(x, 3))

    options = {"restores": True, "close": dist.destroy_process_group, "forks": False}
    return Step(call, model, [x], **options)


def paged(folder: Path) -> Step:
    model, x, store = Net(), inputs(), DiskStore(folder)
    optimizer = OffloadedOptimizer(
        model.parameters(), torch.optim.SGD, lr=0.5, momentum=0.9, store=store, page_bytes=1000
    )

    def call() -> None:
        model(x).backward()
        optimizer.step()

    call()  # makes the state
    model.zero_grad()
    return Step(call, model, [x], store, close=store.close, optimizer=optimizer)


RECIPE = Recipe(
    optimizer="sgd", attention=None, checkpoint="layers", blocks="blocks.*", micro_batches=2,
    offload_activations=True, min_bytes=0,
)  # fmt: skip


def by_recipe(folder: Path) -> Step:
    store, x = DiskStore(folder), inputs().detach()
    model, optimizer = build(Net, RECIPE, lr=0.5)
    run = partial(train_step, model, optimizer, x, RECIPE, loss_sum=loss_sum, store=store)
    options = {"restores": True, "close": store.close}
    return Step(run, model, [x], store, **options)


def estimated(folder: Path) -> Step:
    """Return an estimate as a step; its operators run on tensors without values."""
    recipe = Recipe(attention=None, checkpoint="layers", blocks="blocks.*")

    def call() -> None:
        estimate(Net, lambda: torch.randn(8, 16), recipe, loss_sum=loss_sum)

    return Step(call, Net(), [], restores=True, symbolic=True, forks=False)


@contextmanager
def scheduled(model: nn.Module) -> Iterator[None]:
    with schedule_blocks(model, "blocks.*", schedule=recursive):
        yield


STEPS: dict[str, Callable[[Path], Step]] = {
    "MemoryMeter": partial(inside, MemoryMeter),
    "checkpoint, reentrant": partial(around, partial(checkpoint, use_reentrant=True)),
    "checkpoint, not reentrant": partial(around, partial(checkpoint, use_reentrant=False)),
    "checkpoint, selective": partial(around, selective),
    "checkpoint_blocks": partial(inside, partial(checkpoint_blocks, blocks="blocks.*")),
    "checkpoint_blocks, autocast": partial(inside, in_autocast),
    "checkpointed_loss": chunked,
    "schedule_blocks": partial(inside, scheduled),
    "offload_activations": offloaded,
    "offload_activations on streams": on_streams,
    "OffloadedOptimizer": paged,
    "OffloadedOptimizer on streams": updated_on_streams,
    "AccumulatedStep": accumulated,
    "AccumulatedStep, GradScaler": scaled,
    "AccumulatedStep, DDP": replicated,
    "flash_attention": attention,
    "train_step": by_recipe,
    "estimate": estimated,
}
