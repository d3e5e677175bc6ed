"""Run a schedule under autograd: `ScheduledSequential`, and the `Run` of any chain of stages.

Unlike the module `actions`, which simulates a schedule, this module runs the stages. The module
`blocks` uses the `Run` for the blocks of a model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from course_lib._check import kind
from course_lib._torch.modes import AutocastState, modes_when_recomputed
from course_lib._torch.tensors import tensors_in
from course_lib.checkpoint.comparison import Comparison
from course_lib.checkpoint.repeatable import BlockState

from .actions import Backward, Forward, Schedule, simulate
from .chain import Chain
from .stages import (
    GradientSlot,
    KeptStage,
    as_modules,
    check_constants,
    checked_value,
    main_tensor,
    run_stage,
    trainable_parameters,
    with_main_tensor,
)


class ScheduledSequential(nn.Sequential):
    """Run stages by a schedule, with the same outputs and gradients as without a schedule.

    Every stage is one node of the graph, so gradients accumulate in the same order as without a
    schedule. A stage that runs again draws the same random numbers as in its first run, from the
    global generators of PyTorch, Python and NumPy and from generators in its attributes. It starts
    with the values that its buffers and attributes had before its first run. Only the first run of
    a stage changes generators, buffers and attributes. With gradients disabled, the stages simply
    run one after the other.

    Autocast is as in the first run. If several stages use one parameter under autocast, its
    gradients are added in the parameter's data type. Without a schedule they are added in the lower
    precision, because the stages share one cast copy, so that sum is less accurate.

    The live bytes are those that `simulate` counts for the chain of `Chain.profile`, plus the
    gradients of parameters, plus some state of stages that run again. This state consists of copies
    of buffers and of tensors in attributes. During a stage's first run all of them are copied;
    afterwards only the copies of those that the run changed are kept. For a stage that draws random
    numbers, the state also includes the states of the generators (5,056 bytes on the CPU). A stage
    holds the gradients of all its parameters until the end of its backward, when it passes them to
    autograd. The profile includes these gradients.

    Args:
        module: The chain: an `nn.Sequential`, or a list of modules and functions. Modules are
            used without copying, and keep their names. The parameters of a function are those in
            its closure and defaults, or in a `partial`. A stage receives the result of the previous
            stage: a tensor, or a container with exactly one floating-point tensor. A tuple of one
            tensor and Nones becomes that tensor. Gradients flow only through that tensor. A stage
            must not change it in place, and must compute the same result each time.
        schedule: A schedule that is legal for this number of stages.

    Call the module with the chain's input. Keyword arguments are constants that every stage
    receives.

    Raises:
        IllegalSchedule: The schedule is not legal for this number of stages.
        TypeError, ValueError: An argument has the wrong type or value; a stage returns no tensor,
            or several through which gradients flow.
        RuntimeError: A stage changes its input in place, uses a tensor that requires a gradient and
            is neither its input nor its parameter, or returns another shape or dtype when it runs
            again. Also if the backward pass runs a second time, or is itself differentiated.
    """

    def __init__(self, module: Sequence[Callable], schedule: Schedule):
        stages = as_modules(module)
        kind("schedule", schedule, Schedule, "a Schedule")
        simulate(schedule, Chain.uniform(len(stages)))
        super().__init__()
        for name, stage in stages.items():
            self.add_module(name, stage)
        self.training = getattr(module, "training", True)
        self.schedule = schedule
        # Advice in the error message that is raised if a later run of a stage differs from its
        # first run. If None, the runs are not compared.
        self.advice: str | None = None
        self._length = len(stages)

    def forward(self, x: Any, **kwargs) -> Any:
        stages = list(self)
        value = checked_value("x", x)
        if len(stages) != self._length:
            raise ValueError(
                f"the number of stages must be {self._length}, as in the schedule, got"
                f" {len(stages)}; do not add or remove stages"
            )
        if not torch.is_grad_enabled():
            for i, stage in enumerate(stages):
                value = run_stage(i, stage, value, kwargs)
            return value
        check_constants(kwargs)
        names = [f"stage {i}" for i in range(len(stages))]
        states = states_of(stages, names, self.advice)
        run = Run(stages, self.schedule, value, kwargs, states)
        link = main_tensor(value)
        for _ in stages:
            link = run.step(link)
        return run.end(link)


_runner: ContextVar[Callable | None] = ContextVar("runner", default=None)


@contextmanager
def forwards_run_by(runner: Callable) -> Iterator[None]:
    """Let `runner` run the forwards that build no graph, in passes that begin in the block.

    Args:
        runner: Function (stage, tensors, context, compute, drawing) -> result. It may call
            `compute`, which runs the stage, or return an equal result without running it. The
            tensors are the inputs of the stage, without its parameters and buffers. The context is
            everything else that determines the result. If `drawing` has an attribute `seen`, the
            runner must set it to True for a stage that draws random numbers.
    """
    token = _runner.set(runner)
    try:
        yield
    finally:
        _runner.reset(token)


class StageNode(torch.autograd.Function):
    """Node of one stage in the outer graph, which the caller of the chain sees.

    Only empty tensors pass between two nodes. The `Run` holds values and gradients, because
    autograd would keep the gradient of a node's output alive until the node's backward ends.
    """

    @staticmethod
    def forward(ctx, run: Run, i: int, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.run, ctx.i = run, i
        return torch.empty(0, device=x.device)

    @staticmethod
    @once_differentiable
    def backward(ctx, nothing: Tensor):
        x_gradient, gradients = ctx.run.backward(ctx.i)
        if ctx.i > 0:
            ctx.run.slot.gradient = x_gradient
            x_gradient = nothing
        return None, None, x_gradient, *gradients


class Output(torch.autograd.Function):
    """Last node of the outer graph, which returns the output and receives its gradient."""

    @staticmethod
    def forward(ctx, run: Run, output: Tensor, link: Tensor) -> Tensor:
        ctx.run = run
        return output.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        ctx.run.slot.gradient = gradient
        return None, None, torch.empty(0, device=gradient.device)


class Run:
    """State of one forward and backward pass: the values and graphs that are live between actions.

    The caller calls `step` once for each stage and then `end`. Autograd later calls `backward` for
    each stage.

    Args:
        stages: The stages.
        schedule: A schedule that is legal for this number of stages.
        value: Input of the first stage.
        kwargs: Constants that every stage receives as keyword arguments.
        states: One `BlockState` per stage.
    """

    def __init__(
        self,
        stages: list[nn.Module],
        schedule: Schedule,
        value: Any,
        kwargs: dict,
        states: list[BlockState],
    ):
        x = main_tensor(value)
        self.states = dict(enumerate(states))
        self.stages, self.kwargs, self.actions = stages, kwargs, iter(schedule)
        self.next_stage = 0  # index of the first stage that has not run yet
        # the stage whose backward is the next action, or None if other actions come before it
        self.due: int | None = None
        # stage -> number of its forward actions that have not run yet
        self.forwards_left = Counter(
            action.stage for action in schedule if isinstance(action, Forward)
        )
        self.values: dict[int, Any] = {0: with_main_tensor(value, x.detach())}
        self.kept: dict[int, KeptStage] = {}  # stage -> its graph, if it was run with "all"
        self.slot = GradientSlot()  # holds the gradient of the output of stage `due`
        self.output_kinds: dict[int, tuple] = {}  # stage -> (shape, dtype, device) of its output
        trains = [bool(trainable_parameters(stage)) for stage in stages]
        self.needs_gradient = list(
            accumulate(trains, lambda earlier, this: earlier or this, initial=x.requires_grad)
        )
        self.autocast = AutocastState([x.device.type])
        self.modes = modes_when_recomputed()
        self.runner = _runner.get()

    def step(self, link: Tensor) -> Tensor:
        """Run the actions up to the first run of the next stage.

        Args:
            link: Output of the previous stage's node; for the first stage, the input.

        Returns:
            The output of the stage's node, an empty tensor.
        """
        i = self.next_stage
        with self.autocast.restore(cache_enabled=False):
            for action in self.actions:
                self.forward(*action)
                if action.stage == i:
                    break
        self.next_stage += 1
        if self.next_stage == len(self.stages):
            self.to_next_backward()
        return StageNode.apply(self, i, link, *trainable_parameters(self.stages[i]))

    def output(self, i: int) -> Any:
        """Return the output of stage i, without its graph."""
        value = self.kept[i].output if i in self.kept else self.values[i + 1]
        return with_main_tensor(value, main_tensor(value).detach())

    def end(self, link: Tensor) -> Any:
        """Return the output of the last stage, connected to the outer graph.

        Args:
            link: Result of the last `step`.
        """
        output = self.output(len(self.stages) - 1)
        return with_main_tensor(output, Output.apply(self, main_tensor(output), link))

    def to_next_backward(self) -> None:
        """Run all forward actions up to the next backward action, and set `due` to its stage."""
        # The autocast cache is disabled, because it would keep cast weights in memory. In older
        # versions of torch, a weight that was cast while gradients were disabled would also stay in
        # the cache without a graph.
        with self.autocast.restore(cache_enabled=False):
            for action in self.actions:
                if isinstance(action, Backward):
                    self.due = action.stage
                    return
                self.forward(*action)

    def forward(self, i: int, keep: str) -> None:
        value = self.values[i] if i in self.values else self.output(i - 1)
        result = self.run(i, value, keep)
        if keep == "all":
            self.kept[i] = result
            self.values.pop(i + 1, None)
        else:
            self.values[i + 1] = result
            if keep == "nothing":
                self.values.pop(i, None)

    def run(self, i: int, value: Any, keep: str) -> Any:
        """Run stage i with the random numbers, buffers and attributes of its first run.

        Returns:
            A `KeptStage` if `keep` is "all", else the value for the next stage.
        """
        self.forwards_left[i] -= 1
        runs_again = self.forwards_left[i] > 0
        # after the last run of a stage, the copies in its state are released
        state = self.states[i] if runs_again else self.states.pop(i)
        with state.next_run(runs_again, main_tensor(value).device) as drawing:
            if keep == "all":
                result = KeptStage(
                    i, self.stages[i], value, self.kwargs, self.needs_gradient[i], self.slot
                )
            else:
                with torch.no_grad(), drawing:
                    result = self.run_without_graph(i, value, drawing)
        output = main_tensor(result.output if keep == "all" else result)
        check_kind(i, output, self.output_kinds)
        state.check_output(output, runs_again)
        return result

    def run_without_graph(self, i: int, value: Any, drawing: Any) -> Any:
        stage = self.stages[i]
        compute = partial(run_stage, i, stage, value, self.kwargs)
        if self.runner is None:
            return compute()
        return self.runner(stage, self.tensors_of(i, value), self.context(i), compute, drawing)

    def tensors_of(self, i: int, value: Any) -> list[Tensor]:
        """Return the input tensors of stage i, without its parameters and buffers."""
        arguments = getattr(self.stages[i], "arguments", None)
        return list(dict.fromkeys(tensors_in([value, self.kwargs, arguments])))

    def context(self, i: int) -> tuple:
        """Return everything that determines the result of stage i, except the tensors."""
        return i == len(self.stages) - 1, self.needs_gradient[i], torch.is_autocast_enabled("cpu")

    def backward(self, i: int) -> tuple[Tensor | None, list[Tensor | None]]:
        """Return the gradients of the input of stage i and of its parameters."""
        if self.due is None:
            with ExitStack() as stack:
                for mode in self.modes:
                    stack.enter_context(mode)
                self.to_next_backward()
        if self.due != i:
            self.slot.take()
            raise RuntimeError(
                "this backward pass has already run, and its saved tensors are freed; "
                "call the module again instead of backward() with retain_graph=True"
            )
        self.due = None
        self.values.pop(i + 1, None)
        gradients = self.kept.pop(i).backward()
        self.values.pop(i, None)
        return gradients


def check_kind(i: int, output: Tensor, output_kinds: dict[int, tuple]) -> None:
    """Raise an error if the output of stage i has another shape, dtype or device than at first.

    Args:
        i: Number of the stage.
        output: Output of its last run.
        output_kinds: Stage -> (shape, dtype, device) in its first run. It is filled here.
    """
    output_kind = tuple(output.shape), output.dtype, output.device
    # Without this check, a shape that broadcasts or another dtype would not raise an error later.
    if output_kinds.setdefault(i, output_kind) != output_kind:
        raise RuntimeError(
            f"stage {i} returned {output_kind} when it ran again, but {output_kinds[i]} in its"
            " first run; a stage of a schedule must compute the same result each time"
        )


def states_of(
    blocks: Sequence[nn.Module], names: Sequence[str], advice: str | None
) -> list[BlockState]:
    """Return one `BlockState` per block of a schedule.

    Args:
        blocks: The blocks.
        names: Their names, for error messages.
        advice: Advice in the error message if a later run of a block differs from the first; None
            to not compare the runs.
    """
    return [
        BlockState(block, Comparison(name, advice) if advice is not None else None, buffers=True)
        for block, name in zip(blocks, names, strict=True)
    ]
