"""Run a schedule under autograd: `ScheduledSequential`, and `ChainRun` for any chain of stages.

The module `actions` simulates a schedule, and this module runs the stages. The module `blocks` uses
`ChainRun` for the blocks of a model.
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
    """A sequence of stages, such as layers, that runs by a schedule with unchanged results.

    **Results.** Outputs and gradients are the same as without a schedule, with one exception (see
    Autocast). Every stage is one node of autograd's graph, so gradients accumulate in the same
    order as without a schedule. A stage that runs again draws the same random numbers as in its
    first run. This holds for the global generators of PyTorch, Python and NumPy and for generators
    in attributes of the stage. The stage starts with the values that its buffers and attributes had
    before its first run. Only the first run of a stage changes generators, buffers and attributes.
    With gradients disabled, the stages simply run one after the other.

    **Autocast.** A later run of a stage uses the autocast settings of its first run. Gradients
    differ from those without a schedule only if several stages use one parameter under autocast.
    With a schedule, the parameter's gradients are added in the parameter's data type. Without a
    schedule, they are added in autocast's lower precision, because the stages share one cast copy
    of the parameter.

    **Memory.** The live bytes are those that `simulate` counts for the chain of `Chain.profile`,
    plus two parts: the gradients accumulated in `grad` of the parameters, and some state of stages
    that run again. This state consists of copies of buffers and of tensors in attributes. All of
    these tensors are copied before a stage's first run. After this run, a copy is kept only if the
    run has changed the original. For a stage that draws random numbers, the state also includes the
    states of the generators (5,056 bytes on the CPU). The new gradients of a stage's parameters are
    passed to autograd only when the stage's backward ends. Until then `simulate` counts these
    gradients.

    Args:
        module: The stages: an `nn.Sequential`, or a list of modules and functions. Modules are used
            without copying, and keep their names. The parameters of a function are those in its
            closure and defaults, or in a `partial`. A stage receives the result of the previous
            stage: a tensor, or a container with exactly one floating-point tensor. A tuple of one
            tensor and Nones becomes that tensor. Gradients flow only through the floating-point
            tensor. A stage must not change its input in place, and must compute the same result
            each time.
        schedule: A schedule that is legal for this number of stages.

    Call the module with the input of the first stage. Keyword arguments are constants that every
    stage receives.

    Raises:
        IllegalSchedule: The schedule is not legal for this number of stages.
        TypeError, ValueError: An argument has the wrong type or value.
        TypeError: A stage returns no tensor, or several tensors, if not
            exactly one of them is floating-point or complex.
        RuntimeError: A stage changes its input in place, returns another shape or dtype when it
            runs again, or uses a tensor that requires a gradient but is neither the stage's input
            nor one of its parameters. The error is also raised if the backward pass runs a second
            time, or if second derivatives are computed.
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
        # If a later run of a stage differs from its first run, the error message ends with this
        # advice. If the advice is None, the runs are not compared.
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
        run = ChainRun(stages, self.schedule, value, kwargs, states)
        link = main_tensor(value)
        for _ in stages:
            link = run.run_next_stage(link)
        return run.finish_forward(link)


_runner: ContextVar[Callable | None] = ContextVar("runner", default=None)


@contextmanager
def use_forward_runner(runner: Callable) -> Iterator[None]:
    """Inside a `with` block, let `runner` run stages that build no autograd graph.

    A stage runs without a graph if the schedule keeps only the stage's input, or nothing. If a
    forward pass begins in the `with` block, the runner is also used in the backward pass of this
    forward pass, even after the end of the `with` block. `course_lib` uses this to skip stages
    whose result it has computed before.

    Args:
        runner: Function (stage, tensors, settings, compute, detector) -> result of the stage.
            `tensors` is the list of all tensors that the stage receives, without its parameters and
            buffers. `settings` is a tuple of bools on which the result also depends. The runner may
            call `compute()`, which runs the stage, or return an equal result without running it.

            `detector` may have an attribute `seen`, which must be True after a stage that draws
            random numbers. `compute()` sets it in this case. A runner that returns the result of
            such a stage without calling `compute` must set `detector.seen` itself.
    """
    token = _runner.set(runner)
    try:
        yield
    finally:
        _runner.reset(token)


class StageNode(torch.autograd.Function):
    """Autograd node of one stage, in the graph that the caller of a scheduled model sees.

    Only empty tensors pass between two nodes. The `ChainRun` holds values and gradients, because
    autograd would keep the gradient of a node's output alive until the node's backward ends.
    """

    @staticmethod
    def forward(ctx, run: ChainRun, i: int, x: Tensor, *parameters: Tensor) -> Tensor:
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


class OutputNode(torch.autograd.Function):
    """Last autograd node in the graph that the caller of a scheduled model sees.

    Its forward returns the output of the last stage, and its backward receives the gradient of this
    output.
    """

    @staticmethod
    def forward(ctx, run: ChainRun, output: Tensor, link: Tensor) -> Tensor:
        ctx.run = run
        return output.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        ctx.run.slot.gradient = gradient
        return None, None, torch.empty(0, device=gradient.device)


class ChainRun:
    """One forward and backward pass through a chain of stages by a schedule.

    This object has the values and the autograd graphs that are live. For the forward pass, call
    `run_next_stage` once for each stage, and then `finish_forward`, which returns the output. These
    calls add one autograd node per stage to the caller's graph. In the backward pass, each of these
    nodes calls `backward` for its stage.

    Args:
        stages: The stages, such as layers.
        schedule: A schedule that is legal for this number of stages.
        value: Input of the first stage.
        kwargs: Constants that every stage receives as keyword arguments.
        states: One `BlockState` per stage, which records the stage's state before its first run.
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
        # Number of the stage whose backward is the next action; None if the next action is a
        # forward.
        self.due: int | None = None
        # Number of forward actions that have not run yet, by stage.
        self.forwards_left = Counter(
            action.stage for action in schedule if isinstance(action, Forward)
        )
        self.values: dict[int, Any] = {0: with_main_tensor(value, x.detach())}
        self.kept: dict[int, KeptStage] = {}  # graphs of stages that ran with keep="all"
        self.slot = GradientSlot()  # holds the gradient of the output of stage `due`
        self.output_kinds: dict[int, tuple] = {}  # (shape, dtype, device) of outputs, by stage
        trains = [bool(trainable_parameters(stage)) for stage in stages]
        self.needs_gradient = list(
            accumulate(trains, lambda earlier, this: earlier or this, initial=x.requires_grad)
        )
        self.autocast = AutocastState([x.device.type])
        self.modes = modes_when_recomputed()
        self.runner = _runner.get()

    def run_next_stage(self, link: Tensor) -> Tensor:
        """Run the schedule's actions up to and including the first run of the next stage.

        For the last stage, the forward actions before the first backward action also run.

        Args:
            link: Result of the previous call. For the first stage, the `main_tensor` of its input,
                through which gradients flow.

        Returns:
            The output of the stage's autograd node: an empty tensor, which carries no data and only
            links this node to the next one.
        """
        i = self.next_stage
        with self.autocast.restore(cache_enabled=False):
            for action in self.actions:
                self.run_forward(*action)
                if action.stage == i:
                    break
        self.next_stage += 1
        if self.next_stage == len(self.stages):
            self.run_until_next_backward()
        return StageNode.apply(self, i, link, *trainable_parameters(self.stages[i]))

    def output(self, i: int) -> Any:
        """Return the output of stage i, without its autograd history."""
        value = self.kept[i].output if i in self.kept else self.values[i + 1]
        return with_main_tensor(value, main_tensor(value).detach())

    def finish_forward(self, link: Tensor) -> Any:
        """Return the output of the last stage, connected to the graph that the caller sees.

        Args:
            link: Result of the last `run_next_stage`.
        """
        output = self.output(len(self.stages) - 1)
        return with_main_tensor(output, OutputNode.apply(self, main_tensor(output), link))

    def run_until_next_backward(self) -> None:
        """Run all forward actions of the schedule up to the next backward action.

        The attribute `due` is set to the number of the stage whose backward is next.
        """
        # The autocast cache is disabled, because it would keep cast weights in memory. In older
        # versions of torch, it would also keep weights that were cast while gradients were
        # disabled. Later runs would use these weights, which have no graph, so the parameters would
        # get no gradients.
        with self.autocast.restore(cache_enabled=False):
            for action in self.actions:
                if isinstance(action, Backward):
                    self.due = action.stage
                    return
                self.run_forward(*action)

    def run_forward(self, i: int, keep: str) -> None:
        """Run a forward action of stage i, and store the values that it keeps.

        Args:
            i: Number of the stage.
            keep: "all" to keep the stage's graph, "input" to keep its input and output, or
                "nothing" to keep its output and release its input.
        """
        value = self.values[i] if i in self.values else self.output(i - 1)
        result = self.compute(i, value, keep)
        if keep == "all":
            self.kept[i] = result
            self.values.pop(i + 1, None)
        else:
            self.values[i + 1] = result
            if keep == "nothing":
                self.values.pop(i, None)

    def compute(self, i: int, value: Any, keep: str) -> Any:
        """Compute stage i with the random numbers, buffers and attributes of its first run.

        Args:
            i: Number of the stage.
            value: Input of the stage.
            keep: "all" to build a graph for the stage's backward; "input" or "nothing" to build
                none.

        Returns:
            A `KeptStage`, which has the graph, if `keep` is "all". Otherwise the input of the next
            stage.
        """
        self.forwards_left[i] -= 1
        runs_again = self.forwards_left[i] > 0
        # The last run of a stage removes the stage's state, so that the copies in the state are
        # released when this run ends.
        state = self.states[i] if runs_again else self.states.pop(i)
        with state.next_run(runs_again, main_tensor(value).device) as detector:
            if keep == "all":
                result = KeptStage(
                    i, self.stages[i], value, self.kwargs, self.needs_gradient[i], self.slot
                )
            else:
                with torch.no_grad(), detector:
                    result = self.compute_without_graph(i, value, detector)
        output = main_tensor(result.output if keep == "all" else result)
        check_output_kind(i, output, self.output_kinds)
        state.check_output(output, runs_again)
        return result

    def compute_without_graph(self, i: int, value: Any, detector: Any) -> Any:
        """Compute stage i without an autograd graph, and return its result.

        Args:
            i: Number of the stage.
            value: Input of the stage.
            detector: Object that the runner receives as its argument `detector` (see
                `use_forward_runner`). If no runner was set, the object is not used.
        """
        stage = self.stages[i]
        compute = partial(run_stage, i, stage, value, self.kwargs)
        if self.runner is None:
            return compute()
        return self.runner(stage, self.tensors_of(i, value), self.settings_of(i), compute, detector)

    def tensors_of(self, i: int, value: Any) -> list[Tensor]:
        """Return all tensors that stage i receives as its input and its other arguments.

        Args:
            i: Number of the stage.
            value: Input of the stage.
        """
        arguments = getattr(self.stages[i], "arguments", None)
        return list(dict.fromkeys(tensors_in([value, self.kwargs, arguments])))

    def settings_of(self, i: int) -> tuple:
        """Return three bools on which the result of stage i depends, besides its tensors.

        They state whether stage i is the last one, whether backward needs the gradient of the
        stage's input, and whether autocast is enabled on the CPU.
        """
        return i == len(self.stages) - 1, self.needs_gradient[i], torch.is_autocast_enabled("cpu")

    def backward(self, i: int) -> tuple[Tensor | None, list[Tensor | None]]:
        """Run the backward of stage i, after the forward actions that the schedule has before it.

        Returns:
            The gradient of the stage's input, and a list of the gradients of its parameters. A
            gradient is None if it is not needed.

        Raises:
            RuntimeError: The backward pass has already run.
        """
        if self.due is None:
            with ExitStack() as stack:
                for mode in self.modes:
                    stack.enter_context(mode)
                self.run_until_next_backward()
        if self.due != i:
            self.slot.take()
            raise RuntimeError(
                "this backward pass has already run, and its saved tensors are freed; "
                "call the module again, because a schedule does not support retain_graph=True"
            )
        self.due = None
        self.values.pop(i + 1, None)
        gradients = self.kept.pop(i).backward()
        self.values.pop(i, None)
        return gradients


def check_output_kind(i: int, output: Tensor, output_kinds: dict[int, tuple]) -> None:
    """Raise an error if stage i's output differs in shape, dtype or device from its first output.

    Args:
        i: Number of the stage.
        output: Output of the stage's last run.
        output_kinds: Map from the number of a stage to (shape, dtype, device) of its first output.
            If the stage has run for the first time, this function adds an entry for its output.
    """
    output_kind = tuple(output.shape), output.dtype, output.device
    # Later operators would accept an output with another dtype, or with a shape that broadcasts.
    if output_kinds.setdefault(i, output_kind) != output_kind:
        raise RuntimeError(
            f"stage {i} returned {output_kind} when it ran again, but {output_kinds[i]} in its"
            " first run; a stage of a schedule must compute the same result each time"
        )


def states_of(
    blocks: Sequence[nn.Module], names: Sequence[str], advice: str | None
) -> list[BlockState]:
    """Create one `BlockState` per block, which records the block's state before its first run.

    Args:
        blocks: The blocks.
        names: Names of the blocks, for error messages.
        advice: Text at the end of the error that is raised if a later run of a block differs from
            its first run. If None, the runs are not compared, and this error is never raised.
    """
    return [
        BlockState(block, Comparison(name, advice) if advice is not None else None, buffers=True)
        for block, name in zip(blocks, names, strict=True)
    ]
