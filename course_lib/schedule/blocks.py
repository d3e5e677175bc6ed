"""The blocks of any model, run by a schedule: in place, where each takes what the one before
returned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from course_lib._check import function, kind, shown
from course_lib._torch import autocast_of, kind_of, look_of, tensors_in
from course_lib.checkpoint.blocks import BlocksInPlace, names_of
from course_lib.memory.storages import hooks_active

from .actions import Backward, Schedule, simulate
from .chain import Chain, symbolic_chain
from .executor import Run, states_of
from .stages import check_constants, differentiable, the_tensor, with_tensor

CHAIN = "the blocks must form a chain, each called once with what the one before returned"


def schedule_blocks(
    model: nn.Module,
    blocks: str | Sequence[str] | None = None,
    *,
    schedule: Schedule | Callable[[Chain], Schedule],
) -> ScheduledBlocks:
    """Let the blocks of a model run by a schedule: in place, until the handle is removed.

    The blocks form a chain: in a forward pass each is called once, in the order of their names in
    the model, with what the one before returned as its first argument: a tensor, or a container
    with one floating tensor in it. Nothing else uses what a block but the last returns. Other
    arguments are constants. All else is as for `ScheduledSequential`, and hooks as for
    `checkpoint_blocks`. Blocks that `torch.compile` has compiled run compiled. A compiled model has
    a break in its graph at each block, and its blocks run uncompiled.

    Args:
        model: changed in place: its blocks get a `forward` of their own.
        blocks: as for `checkpoint_blocks`; of several lists that form no chain, as an encoder and a
            decoder, name one.
        schedule: for as many stages as there are blocks; or a function that makes one of the chain
            that they are, as measured on symbolic copies in the forward pass: `lambda chain:
            optimal(chain, budget_bytes)`.

    Returns:
        A handle with the `names` of the blocks. `handle.remove()` undoes; so does leaving a `with`
        block.

    Raises:
        ValueError: no module that is called has such a name, or one is checkpointed already; in a
            forward or backward pass, the blocks form no chain.
        TypeError: arguments of other types.
        IllegalSchedule: the schedule is not legal for so many stages.
        RuntimeError: as for `ScheduledSequential`.
    """
    kind("model", model, nn.Module, "an nn.Module")
    if not isinstance(schedule, Schedule):
        function("schedule", schedule, "a Schedule or a function of a Chain")
    return ScheduledBlocks(model, names_of(model, blocks), schedule)


class ScheduledBlocks(BlocksInPlace):
    """Blocks that run by a schedule until they are put back: what `schedule_blocks` returns.

    Args:
        known: where chains are kept that were measured, for a schedule that is a function.

    Attributes:
        advice: what to do instead of a schedule, for the error of a block that runs differently
            again; None does not compare.
    """

    advice: str | None = None

    def __init__(self, model: nn.Module, names: Sequence[str], schedule, known: dict | None = None):
        self.schedule = schedule
        self.known = {} if known is None else known
        self.run: Run | None = None
        self.complete = False  # whether all blocks have been called
        if isinstance(schedule, Schedule):
            _check_schedule(schedule, len(names))
        super().__init__(model, names)

    def check(self) -> None:
        """Raise, after a forward pass, if the schedule has not been gone through."""
        if not self.complete:
            missed = self.names[self.run.next if self.run else 0]
            raise ValueError(f"{missed} was not called; {CHAIN}")

    def _call(self, i: int, forward: Callable, args: tuple, kwargs: dict) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            # With fullgraph=True this is the error, and else the blocks run outside the graphs.
            torch._dynamo.graph_break(
                "schedule_blocks runs blocks in an order of its own, which one graph cannot do;"
                " compile the blocks instead of the model, or leave out fullgraph=True"
            )
        return self._scheduled(i, forward, args, kwargs)

    @torch._disable_dynamo
    def _scheduled(self, i: int, forward: Callable, args: tuple, kwargs: dict) -> Any:
        # first: a block of another list says so
        handed_on = self._following(i, args) if i else None
        check_constants(
            {f"argument {i + 1}": value for i, value in enumerate(args[1:], 1)} | kwargs
        )
        x = handed_on if i else self._start(args, kwargs)
        run = self.run
        self.complete = False
        run.stages[i].arguments = with_tensor(args[0], x.new_empty(0)), args[1:], kwargs
        self.link = run.step(self.link if i else x)
        result = run.stages[i].result
        if run.next < len(self.names):
            self.handed_on = _Between.apply(run.output(i), self.link, self.names[i])
            return with_tensor(result, self.handed_on)
        output = run.end(self.link)
        self.run = self.link = self.handed_on = None
        self.complete = True
        return with_tensor(result, output)

    def _start(self, args: tuple, kwargs: dict) -> Tensor:
        stages = [_Stage(forward.block(), forward.own()) for forward in self._forwards]
        x = _only(f"the first argument of {self.names[0]}", args[0] if args else None)
        schedule = self.schedule
        if not isinstance(schedule, Schedule):
            schedule = schedule(self._chain(stages, args, kwargs))
            _check_schedule(schedule, len(stages))
        states = states_of([stage.block for stage in stages], self.names, self.advice)
        self.run = Run(stages, schedule, x, {}, states)
        return x

    def _following(self, i: int, args: tuple) -> Tensor:
        name, before = self.names[i], self.names[i - 1]
        if self.run is None or self.run.next != i:
            raise ValueError(
                f"{name} must be called once and after {before}, got another order of calls;"
                f" {CHAIN}"
            )
        x = _only(f"the first argument of {name}", args[0] if args else None)
        if x is not self.handed_on:
            raise ValueError(
                f"{name} must be called with what {before} returned, got something else; {CHAIN}"
            )
        return x

    def _chain(self, stages: list[_Stage], args: tuple, kwargs: dict) -> Chain:
        """Measures of the blocks, found on symbolic copies and out of sight of meters; one stands
        for all like it."""
        if hooks_active():  # they would see what the copies save
            raise ValueError(
                "schedule must be a Schedule, not a function, for blocks that run inside"
                " hooks on saved tensors, as of a checkpoint, got a function and"
                f" {self.names[0]} in such hooks"
            )
        x = the_tensor(args[0])
        given = tuple(map(kind_of, tensors_in([args, kwargs])))
        key = self.names, tuple(map(look_of, stages)), given, autocast_of(x)
        if key not in self.known:
            for stage in stages:
                stage.arguments = with_tensor(args[0], x.new_empty(0)), args[1:], kwargs
            probe = nn.ModuleList(stages), x.detach().requires_grad_(x.requires_grad)
            self.known[key] = symbolic_chain(self.names[0], probe, lambda copied: copied)
        return self.known[key]


class _Stage(nn.Module):
    """A block with the arguments of its call but for the tensor that goes through the chain."""

    def __init__(self, block: nn.Module, own: Callable):
        super().__init__()
        self.block, self.own = block, own
        self.arguments: tuple[Any, tuple, dict] | None = None
        self.result: Any = None

    def forward(self, x: Tensor) -> Tensor:
        first, args, kwargs = self.arguments
        result = self.own(with_tensor(first, x), *args, **kwargs)
        output = _only("what a block returns", result)
        self.result = with_tensor(result, output.new_empty(0))
        return output


class _Between(torch.autograd.Function):
    """Stand-in that a block hands on, for the eyes of the model: the next block takes its gradient
    another way."""

    @staticmethod
    def forward(ctx, output: Tensor, link: Tensor, name: str) -> Tensor:
        ctx.name = name
        return output.detach()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        raise ValueError(f"what {ctx.name} returned is used by others than the next block; {CHAIN}")


def _only(name: str, value: Any) -> Tensor:
    """The one tensor that gradients go through."""
    floating = [tensor for tensor in tensors_in(value) if differentiable(tensor)]
    if len(floating) != 1:
        raise ValueError(
            f"{name} must contain one floating-point tensor, got {shown(value)} with"
            f" {len(floating)}; {CHAIN}"
        )
    return floating[0]


def _check_schedule(schedule: Any, count: int) -> None:
    kind("schedule", schedule, Schedule, "a Schedule")
    simulate(schedule, Chain.uniform(count))
    first = [action.stage for action in schedule[: count + 1]]
    if first != [*range(count), count - 1] or not isinstance(schedule[count], Backward):
        raise ValueError(
            "schedule must run each block once before the first backward, got one that"
            " runs a block twice"
        )
