"""Run the blocks of any model by a schedule, in place, if they form a chain."""

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
    """Run the blocks of a model by a schedule, in place, until the handle is removed.

    The blocks must form a chain. In a forward pass each block is called once, in the order of their
    names in the model, and its first argument is what the previous block returned: a tensor, or a
    container with exactly one floating-point tensor. The output of a block except the last must
    have no other use. Other arguments are constants. Everything else is as in
    `ScheduledSequential`, and hooks are as in `checkpoint_blocks`. Blocks that were compiled with
    `torch.compile` run compiled. A compiled model has a graph break at each block, and its blocks
    run uncompiled.

    Args:
        model: Model to change in place: its blocks get a new `forward`.
        blocks: The blocks, as in `checkpoint_blocks`. If a model has several lists of blocks that
            do not form one chain, such as an encoder and a decoder, name one list.
        schedule: A schedule with one stage per block, or a function that returns one for the chain
            of the blocks, such as `lambda chain: optimal(chain, budget_bytes)`. The chain is
            measured in the forward pass, on symbolic copies.

    Returns:
        A handle with the `names` of the blocks. `handle.remove()` undoes the change, and so does
        leaving a `with` block.

    Raises:
        ValueError: No module that is called has such a name; a block is checkpointed already; in a
            forward or backward pass, the blocks do not form a chain.
        TypeError: An argument has the wrong type.
        IllegalSchedule: The schedule is not legal for this number of stages.
        RuntimeError: As in `ScheduledSequential`.
    """
    kind("model", model, nn.Module, "an nn.Module")
    if not isinstance(schedule, Schedule):
        function("schedule", schedule, "a Schedule or a function of a Chain")
    return ScheduledBlocks(model, names_of(model, blocks), schedule)


class ScheduledBlocks(BlocksInPlace):
    """Blocks that run in the order of a schedule until the handle is removed.

    `schedule_blocks` returns it.

    Args:
        known: Cache of measured chains, for a schedule that is a function.

    Attributes:
        advice: Alternative to a schedule that the error message recommends if the first run and
            the recomputation of a block differ. If None, the two runs are not compared.
    """

    advice: str | None = None

    def __init__(self, model: nn.Module, names: Sequence[str], schedule, known: dict | None = None):
        self.schedule = schedule
        self.known = {} if known is None else known
        self.run: Run | None = None
        self.complete = False  # whether all blocks have been called in this forward pass
        if isinstance(schedule, Schedule):
            _check_schedule(schedule, len(names))
        super().__init__(model, names)

    def check(self) -> None:
        """After a forward pass, raise an error if the schedule has not run to its end."""
        if not self.complete:
            missed = self.names[self.run.next if self.run else 0]
            raise ValueError(f"{missed} was not called; {CHAIN}")

    def _call(self, i: int, forward: Callable, args: tuple, kwargs: dict) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            # With fullgraph=True this becomes an error; otherwise the blocks run outside the graph.
            torch._dynamo.graph_break(
                "schedule_blocks runs blocks in a different order, which one graph cannot do;"
                " compile the blocks instead of the model, or leave out fullgraph=True"
            )
        return self._scheduled(i, forward, args, kwargs)

    @torch._disable_dynamo
    def _scheduled(self, i: int, forward: Callable, args: tuple, kwargs: dict) -> Any:
        # checked first, so that a block of another list raises a clear error
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
        stages = [_Stage(forward.block(), forward.original_forward()) for forward in self._forwards]
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
        """Measure the blocks on symbolic copies, invisibly to meters; like blocks only once."""
        if hooks_active():  # the hooks would also see the tensors that the copies save
            raise ValueError(
                "schedule must be a Schedule, not a function, for blocks that run inside"
                " saved-tensor hooks, such as those of a checkpoint, got a function and"
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
    """A block with the arguments of its call, except the tensor that goes through the chain."""

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
    """A placeholder for a block's output, which the model passes to the next block.

    The next block gets the real output, and its gradient, from the `Run`.
    """

    @staticmethod
    def forward(ctx, output: Tensor, link: Tensor, name: str) -> Tensor:
        ctx.name = name
        return output.detach()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        raise ValueError(f"what {ctx.name} returned is used by others than the next block; {CHAIN}")


def _only(name: str, value: Any) -> Tensor:
    """Return the one tensor through which gradients flow."""
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
