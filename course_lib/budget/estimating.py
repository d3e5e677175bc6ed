"""What a recipe takes: its step on symbolic tensors, under the meter; and the same step for real, to check it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from course_lib._check import kind, one_of
from course_lib._origin import explained, noted
from course_lib._torch import not_collecting, tensors_in
from course_lib.accumulation import StepResult
from course_lib.labels import text
from course_lib.memory import PHASES, MemoryMeter, symbolic
from course_lib.memory.counting import CountingMeter
from course_lib.memory.show import Table
from course_lib.offload import DiskStore, OffloadedOptimizer, SymbolicStore, Traffic, chosen_below

from .groups import groups_of
from .loss import LossSum, check_loss, loss_of, trained
from .optimizers import LR, base_of
from .recipe import Recipe
from .step import (
    build,
    check_function,
    check_recipe,
    default_dtype,
    make_state,
    model_of,
    optimizer_of,
    pieces_of,
    run_pieces,
)

TIERS = ("file", "host")


@dataclass(frozen=True, repr=False)
class Estimate(Table):
    """What one step by a recipe takes, from the second step on; the batch itself is not counted.

    Attributes:
        recipe: the recipe.
        peak_bytes: most tensor bytes live at once: model, gradients, optimizer state, and all that the step makes.
        at_peak: category -> bytes at that moment.
        phase_peaks: phase ("forward", "backward", "optimizer") -> the most bytes live in it.
        operator: the one that reaches the peak.
        flops: of matrix products, forward, backward and recomputed; those of fused attention among them.
        bytes_down: moved to the tier below.
        bytes_up: moved back from it.
        tier: "file" (as a CPU does it) or "host" (as a GPU does it: the update runs below, so that only gradients go
            down and parameters come up).
        host_parameters: how many parameters the host updates, with "host" below.
        sent_bytes: communicated by a rank, as `course_lib.distributed.Communicated` counts.
    """

    recipe: Recipe
    peak_bytes: int
    at_peak: dict[str, int] = field(hash=False)
    phase_peaks: dict[str, int] = field(hash=False)
    operator: str
    flops: int
    bytes_down: int
    bytes_up: int
    tier: str = "file"
    host_parameters: int = 0
    sent_bytes: int = 0

    columns = ("category", "MB at the peak")

    @property
    def moved_bytes(self) -> int:
        """To another tier or another rank, both ways."""
        return self.bytes_down + self.bytes_up + self.sent_bytes

    def rows(self) -> list[Sequence]:
        named = {name: text("optimizer state" if name == "optimizer" else name) for name in self.at_peak}
        return [(named[name], f"{count / 1e6:,.1f}") for name, count in self.at_peak.items() if count]

    def caption(self) -> str:
        values = {"recipe": str(self.recipe), "peak": self.peak_bytes, "megabytes": self.peak_bytes / 1e6}
        values |= {"operator": self.operator, "tera": self.flops / 1e12, "giga": self.moved_bytes / 1e9}
        return text(
            "{recipe}: peak {peak:,} bytes ({megabytes:,.1f} MB) in {operator}, {tera:,.3f} TFLOPs, "
            "{giga:,.3f} GB moved",
            **values,
        )


@dataclass(frozen=True)
class Run:
    """A step that was run: its `StepResult`, the meter that watched it, and what moved."""

    result: StepResult
    meter: MemoryMeter
    traffic: Traffic


def estimate(
    make_model: Callable[[], nn.Module],
    make_batch: Callable[[], Any],
    recipe: Recipe,
    *,
    loss_sum: LossSum | None = None,
    max_norm: float | None = None,
    tier: str = "file",
) -> Estimate:
    """Run the step by the recipe on symbolic tensors, which take no memory, under the meter.

    Of micro-batches that are alike two are run, since all after the first find the same memory. Flash attention goes
    through the tiles of one group of heads, as all groups take the same. Everything else is the step of `train_step`.

    A step for real takes as many tensor bytes on a CPU, but for the states of random generators (5,056 bytes each) that
    an "optimal" schedule keeps where there is dropout. On top come, there and on a GPU, what operators allocate inside
    themselves (`course_lib.memory.measure` reports it) and what the allocator rounds up; and on a GPU, flash attention
    runs as a kernel and needs no tensors for its tiles. nn.LSTM, whose fused operator on a CPU keeps a workspace, is
    refused; without oneDNN it is not fused. So are sparse gradients.

    Args:
        make_model, make_batch: make the model in fp32, and a batch; called with symbolic tensors.
        recipe: the recipe.
        loss_sum: as for `train_step`. A weight that is counted in the batch must stay a tensor, since symbolic ones
            have no numbers.
        max_norm: as for `train_step`. What is estimated is a step whose gradient is clipped.
        tier: what is below, for the optimizer: "file", as on a CPU, or "host", as on a GPU.

    Raises:
        ValueError: the model's step looks at values of its data, which symbolic tensors don't have, or at tensors that
            were there before; recipe, model and batch do not go together.
    """
    one_of("tier", tier, TIERS)
    check_arguments(make_model, make_batch, recipe)
    with symbolic(), explained():
        return _estimate(make_model, make_batch, recipe, loss_sum, max_norm, tier)


def check_arguments(make_model, make_batch, recipe) -> None:
    check_function("make_model", make_model)
    check_function("make_batch", make_batch)
    check_recipe(recipe)


def _estimate(make_model, make_batch, recipe: Recipe, loss_sum, max_norm, tier: str) -> Estimate:
    store = SymbolicStore()
    model = model_of(make_model, recipe)
    check_loss(model, recipe, loss_sum)
    optimizer = symbolic_optimizer(model, recipe, store, tier)
    with default_dtype(recipe.dtype):
        batch = make_batch()
    pieces = pieces_of(batch, recipe.micro_batches)
    make_state(model, optimizer)
    meter, totals = watched(model, optimizer, pieces, recipe.on(tier), loss_sum, store, max_norm)
    peak = meter.peak_bytes, meter.at_peak(), *peaks_in(meter)
    return Estimate(recipe, *peak, *totals, tier, sum(p.numel() for p in getattr(optimizer, "below", ())))


def symbolic_optimizer(model: nn.Module, recipe: Recipe, store: SymbolicStore, tier: str) -> torch.optim.Optimizer:
    if tier == "host" and recipe.offload_optimizer:
        return _PartlyOnHost(model, recipe, store)
    return optimizer_of(model, recipe, store=store)


def watched(
    model,
    optimizer,
    pieces: list[Any],
    recipe: Recipe,
    loss_sum,
    store: SymbolicStore,
    max_norm: float | None,
    groups: list[list[int]] | None = None,
) -> tuple[Watch, list]:
    """The step under a meter, and its totals: FLOPs, bytes down, bytes up.

    Of micro-batches that are alike the last one stands for all but the very first: it finds what the others have left.
    """
    groups = groups_of(model, pieces, loss_sum) if groups is None else groups
    times = {0: 1} | {group[-1]: sum(map(bool, group)) for group in groups if group[-1]}
    store.stats = Traffic()
    marks: list[tuple[int, int, int]] = []
    left = 0  # bytes that a piece leaves until the optimizer's step: its loss, and its weight if that is a tensor

    def noted(model, piece):
        nonlocal left
        pair = loss_of(model, piece, recipe, loss_sum)
        left = sum(tensor.nbytes for tensor in tensors_in(pair))
        return pair

    def marked() -> Iterator[Any]:
        unseen, before = [], -1
        for i in sorted(times):
            marks.append((meter.flops, store.stats.bytes_down, store.stats.bytes_up))
            if passed := i - before - 1:  # what is not run leaves as much
                unseen.append(next(tensors_in(pieces[i])).new_empty(passed * left, dtype=torch.uint8))
            yield pieces[i]
            before = i
        del unseen
        marks.append((meter.flops, store.stats.bytes_down, store.stats.bytes_up))

    with not_collecting(), Watch(model, optimizer) as meter:
        run_pieces(model, optimizer, marked(), recipe, noted, store, max_norm)
    end = (meter.flops, store.stats.bytes_down, store.stats.bytes_up)
    # Between two marks lies one micro-batch; after the last one, the optimizer.
    spans = [[b - a for a, b in zip(*pair, strict=True)] for pair in zip(marks, [*marks[1:], end], strict=True)]
    counts = [*(times[i] for i in sorted(times)), 1]
    return meter, [sum(n * span[i] for n, span in zip(counts, spans, strict=True)) for i in range(3)]


@noted()
def run(
    make_model: Callable[[], nn.Module],
    make_batch: Callable[[], Any],
    recipe: Recipe,
    *,
    loss_sum: LossSum | None = None,
    max_norm: float | None = None,
    budget_bytes: int | None = None,
    store: DiskStore | None = None,
) -> Run:
    """The same step for real, under a meter: the model is made, the optimizer's state too, and one step is taken.

    Args:
        make_model, make_batch, recipe, loss_sum, max_norm: as for `estimate`.
        budget_bytes: the meter stops the operator that passes it.
        store: the tier below; a file that is dropped afterwards if left out.

    Raises:
        course_lib.memory.MemoryBudgetExceeded: the step passed the budget; the operator is named.
    """
    check_arguments(make_model, make_batch, recipe)
    own = store is None
    kind("store", store, (DiskStore, type(None)), "a DiskStore, or None")
    store = DiskStore() if own else store
    try:
        model, optimizer = build(make_model, recipe, store=store)
        check_loss(model, recipe, loss_sum)
        with default_dtype(recipe.dtype):
            batch = make_batch()
        pieces = pieces_of(batch, recipe.micro_batches)
        make_state(model, optimizer)
        before = Traffic(**vars(store.stats))
        with MemoryMeter(model, optimizer, budget_bytes=budget_bytes) as meter:
            result = run_pieces(model, optimizer, pieces, recipe, loss_sum, store, max_norm)
        moved = Traffic(*(a - b for a, b in zip(vars(store.stats).values(), vars(before).values(), strict=True)))
        return Run(result, meter, moved)
    finally:
        if own:
            store.close()


def peaks_in(meter: MemoryMeter) -> tuple[dict[str, int], str]:
    """The most bytes live in each phase, and the operator that reaches the peak."""
    live = sum(meter.series().values())
    phases = dict.fromkeys(PHASES, 0)
    for phase, count in zip(meter.phases(), live.tolist(), strict=True):
        phases[phase] = max(phases[phase], count)
    if not len(live) or live.max() < meter.peak_bytes:
        return phases, "what model and optimizer hold on entry"
    return phases, meter.timeline[int(live.argmax())].operator


_DEVICE = torch.ops.prim.device.default
_TILES = torch.ops.course_lib.tiles.default
_UNSEEN = {torch.ops.aten.mkldnn_rnn_layer.default}  # nn.LSTM on a CPU: its workspace outlives it


class Watch(CountingMeter):
    """The meter of an estimate."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is _DEVICE and type(args[0]) is FakeTensor:  # autograd asks more often than operators run
            return args[0].fake_device
        if func in _UNSEEN:
            raise ValueError(
                f"the step runs {func}, which keeps memory that symbolic tensors do not show; an estimate takes it, "
                "as the step itself then must run, under torch.backends.mkldnn.flags(enabled=False)"
            )
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if getattr(result, "layout", None) is torch.sparse_coo:
            raise ValueError(
                "the step makes a sparse gradient, whose bytes depend on its values, but an estimate runs on symbolic "
                "tensors, which have shapes only; it takes sparse=False"
            )
        if func is _TILES:  # it stands for many, and tells which of them takes the most
            self._ledger.operators[-1] = args[3], self._ledger.operators[-1][1]
        return result


class _PartlyOnHost(torch.optim.Optimizer):
    """For symbolic steps: what `OffloadedOptimizer` takes on a GPU. The part below has its state and its update on the
    host: on the device nothing is left of it, and its gradients go down and its parameters come up.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, store: SymbolicStore):
        parameters = trained(model)
        super().__init__(parameters, {"lr": LR})
        self.below, self.traffic = chosen_below(parameters, recipe.offload_optimizer), store
        above = [p for p in parameters if p not in self.below]
        base, settings = base_of(recipe)
        options = {"fraction": 0.0, "page_bytes": recipe.page_bytes, "lr": LR}
        self.rest = OffloadedOptimizer(above, base, **options, **settings) if above else None

    def held_tensors(self) -> Iterator[Tensor]:
        return self.rest.held_tensors() if self.rest is not None else iter(())

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.below:
            if p.grad is not None:
                self.traffic.stats.bytes_down += p.grad.nbytes
                self.traffic.stats.bytes_up += p.nbytes
        if self.rest is not None:
            self.rest.step()
