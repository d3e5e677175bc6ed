"""Estimates: a recipe's needs, read off the trace of its step on symbolic tensors; and the same
step for real, to check them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from course_lib._check import kind as of_kind
from course_lib._check import one_of
from course_lib._origin import explained, noted
from course_lib.accumulation import StepResult
from course_lib.labels import text, verbatim
from course_lib.memory import AllocatorSettings, MemoryMeter, Trace
from course_lib.memory.show import Table
from course_lib.offload import DiskStore, Traffic

from .kinds import KINDS
from .loss import LossSum, check_loss
from .process import check_arguments, process_trace
from .rank import rank_trace
from .recipe import Recipe
from .step import build, default_dtype, make_state, pieces_of, run_pieces

TIERS = ("file", "host")


@dataclass(frozen=True, repr=False)
class Estimate(Table):
    """Needs of one step by a recipe, from the second step on; the batch itself is not counted.

    Attributes:
        recipe: the recipe.
        peak_bytes: most tensor bytes live at once: model, gradients, optimizer state, and all that
            the step makes.
        at_peak: category -> bytes at that moment.
        phase_peaks: phase ("forward", "backward", "optimizer") -> the most bytes live in it.
        operator: the one that reaches the peak.
        flops: of matrix products, forward, backward and recomputed; those of fused attention among
            them.
        bytes_down: moved to the tier below.
        bytes_up: moved back from it.
        tier: "file" (as a CPU does it) or "host" (as a GPU does it: the update runs below, so that
            only gradients go down and parameters come up).
        host_parameters: how many parameters the host updates, with "host" below.
        sent_bytes: communicated by a rank, as `course_lib.distributed.Communicated` counts.
        kind: of the device, one of `KINDS`.
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
    kind: str = "cpu"

    columns = ("category", "MB at the peak")

    @classmethod
    def of(
        cls, trace: Trace, recipe: Recipe, tier: str, host_parameters: int = 0, kind: str = "cpu"
    ) -> Estimate:
        """The estimate that is read off the trace of a step by the recipe."""
        return cls(
            recipe,
            trace.peak_bytes,
            trace.at_peak(),
            trace.phase_peaks(),
            trace.peak_operator,
            trace.flops,
            trace.bytes_down,
            trace.bytes_up,
            tier,
            host_parameters,
            trace.sent_bytes,
            kind,
        )

    def traced_by(self, run: Callable[[], Trace]) -> Estimate:
        """Keep how the step is run again, for `trace`."""
        object.__setattr__(self, "_run", run)  # no field: two estimates are equal without it
        return self

    def trace(self) -> Trace:
        """The step's events, by running the symbolic step again: no estimate keeps them.

        Raises:
            ValueError: this one was not made by `estimate` or `fit`.
        """
        run = getattr(self, "_run", None)
        if run is None:
            raise ValueError(
                "this estimate was not made by `estimate` or `fit`, so its step cannot be run"
                " again; use one of theirs"
            )
        return run()

    def reserved_bytes(self, settings: AllocatorSettings | str | None = None) -> int:
        """The most that PyTorch's allocator reserves for the step on a GPU, by its rules
        (`Trace.allocated`). The first call for some settings runs the step again, as `trace` does.
        """
        known = vars(self).setdefault("_reserved", {})  # no field: equal estimates stay equal
        key = str(settings)
        if key not in known:
            allocator = self.trace().allocated(settings)
            known[key] = allocator.memory_stats()["reserved_bytes.all.peak"]
        return known[key]

    def __getstate__(self) -> dict[str, Any]:
        # a function may not be pickled
        return {name: value for name, value in vars(self).items() if name != "_run"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    @property
    def moved_bytes(self) -> int:
        """Bytes to another tier or another rank, both ways."""
        return self.bytes_down + self.bytes_up + self.sent_bytes

    def rows(self) -> list[Sequence]:
        named = {
            name: text("optimizer state" if name == "optimizer" else name) for name in self.at_peak
        }
        return [
            (named[name], f"{count / 1e6:,.1f}") for name, count in self.at_peak.items() if count
        ]

    def caption(self) -> str:
        values = {
            "recipe": str(self.recipe),
            "peak": self.peak_bytes,
            "megabytes": self.peak_bytes / 1e6,
        }
        values |= {
            "operator": verbatim(self.operator),
            "tera": self.flops / 1e12,
            "giga": self.moved_bytes / 1e9,
        }
        return text(
            "{recipe}: peak {peak:,} bytes ({megabytes:,.1f} MB) in {operator}, {tera:,.3f} TFLOPs,"
            " {giga:,.3f} GB moved",
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
    kind: str = "cpu",
) -> Estimate:
    """Run the step by the recipe on symbolic tensors, which take no memory, under the meter.

    Of micro-batches that are alike two are run, since all after the first find the same memory.
    Flash attention goes through the tiles of one group of heads, as all groups take the same.
    Everything else is the step of `train_step`.

    A step for real takes as many tensor bytes on a CPU, but for the states of random generators
    (5,056 bytes each) that an "optimal" schedule keeps where there is dropout. On top come, there
    and on a GPU, what operators allocate inside themselves (`course_lib.memory.measure` reports it)
    and what the allocator rounds up; and on a GPU, flash attention runs as a kernel and needs no
    tensors for its tiles. nn.LSTM, whose fused operator on a CPU keeps a workspace, is refused;
    without oneDNN it is not fused. So are sparse gradients, and all other operators of
    `course_lib.memory.cpu_kernels.INEXACT`.

    A model that `torch.compile` has compiled, or whose modules are compiled, is estimated as it was
    written. `train_step` runs it compiled, which can take less memory or more: measure that step
    with `course_lib.memory.measure`.

    Of a recipe with several `ranks` it is what the rank that holds most takes of its share of the
    batch, from the second step on, to the byte what `course_lib.distributed` measures there, but
    for the losses of all micro-batches after the second, some bytes each.

    Args:
        make_model, make_batch: make the model in fp32, and a batch, that of all ranks; called with
            symbolic tensors.
        recipe: the recipe.
        loss_sum: as for `train_step`. A weight that is counted in the batch must stay a tensor,
            since symbolic ones have no numbers.
        max_norm: as for `train_step`. What is estimated is a step whose gradient is clipped.
        tier: what is below, for the optimizer: "file", as on a CPU, or "host", as on a GPU.
        kind: "cpu" or "cuda", where PyTorch updates all parameters at once unless the recipe says
            otherwise; what else differs is listed in `course_lib.budget.kinds`.

    Raises:
        ValueError: the model's step looks at values of its data, which symbolic tensors don't have,
            or at tensors that were there before; recipe, model and batch do not go together, or the
            ranks do not divide the batch.
    """
    one_of("tier", tier, TIERS)
    one_of("kind", kind, KINDS)
    check_arguments(make_model, make_batch, recipe)
    options = {"loss_sum": loss_sum, "max_norm": max_norm}
    if recipe.ranks > 1:
        run = partial(rank_trace, make_model, make_batch, recipe, **options)
        with explained():
            found = Estimate.of(run(), recipe, tier, kind=kind)
            return found.traced_by(partial(run, events=True))
    options |= {"tier": tier, "kind": kind}
    run = partial(process_trace, make_model, make_batch, recipe, **options)
    with explained():
        trace, on_host = run()
    found = Estimate.of(trace, recipe, tier, on_host, kind)
    return found.traced_by(lambda: run(events=True)[0])


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
    """The same step for real, under a meter: the model is made, the optimizer's state too, and one
    step is taken.

    Args:
        make_model, make_batch, recipe, loss_sum, max_norm: as for `estimate`.
        budget_bytes: the meter stops the operator that passes it.
        store: the tier below; a file that is dropped afterwards if left out.

    Raises:
        course_lib.memory.MemoryBudgetExceeded: the step passed the budget; the operator is named.
    """
    check_arguments(make_model, make_batch, recipe)
    own = store is None
    of_kind("store", store, (DiskStore, type(None)), "a DiskStore, or None")
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
        moved = Traffic(
            *(a - b for a, b in zip(vars(store.stats).values(), vars(before).values(), strict=True))
        )
        return Run(result, meter, moved)
    finally:
        if own:
            store.close()
