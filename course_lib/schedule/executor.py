"""Run a schedule under autograd."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes

from course_lib._check import kind
from course_lib._torch import (
    AutocastState,
    ObserverMode,
    RandomState,
    is_symbolic,
    modes_when_recomputed,
    tensors_in,
)
from course_lib.checkpoint.repeatable import BlockState, Comparison

from .actions import Backward, Forward, Schedule, simulate
from .chain import Chain
from .stages import (
    GradientSlot,
    Kept,
    as_modules,
    check_constants,
    handed_on,
    run_stage,
    the_tensor,
    trained,
    with_tensor,
)


class ScheduledSequential(nn.Sequential):
    """Run stages by a schedule, under autograd, with the outputs and gradients of a plain chain.

    Every stage is one node of the graph, so gradients accumulate in the same order as without a
    schedule. A stage that runs again draws the same random numbers as in its first run (of PyTorch,
    Python and NumPy, and of generators in its attributes). It also starts with its buffers and
    attributes of before its first run, and leaves all of these unchanged. Only a stage's first run
    changes them. Autocast is as in the first run. Without gradients the stages simply run one after
    the other.

    The live bytes are those that `simulate` counts for `Chain.profile`, plus the gradients of
    parameters, plus some state of stages that run again. This state consists of copies of buffers
    and of tensors in attributes (all of them during the first run, afterwards only those that it
    changed), and of the states of the random number generators (5,056 bytes on the CPU) for stages
    that draw. A stage passes the gradients of its parameters to autograd together, at the end of
    its backward; the profile includes this.

    Args:
        module: The chain: an `nn.Sequential`, or a list of modules and functions. Modules are
            shared and keep their names. The parameters of a function are those in its closure and
            defaults, or in a `partial`. A stage receives what the previous one returned: a tensor,
            or a container with exactly one floating-point tensor; a tuple of one tensor and Nones
            becomes that tensor. Gradients flow through that tensor only. A stage must not change it
            in place, and must compute the same result each time.
        schedule: A schedule that is legal for this number of stages.

    Call the module with the chain's input. Keyword arguments are constants that every stage
    receives.

    Raises:
        IllegalSchedule: The schedule is not legal for this number of stages.
        TypeError, ValueError: An argument has the wrong type or value; a stage returns no tensor,
            or several through which gradients flow.
        RuntimeError: A stage changes its input in place, uses a tensor that requires a gradient and
            is not its own, or returns another shape or dtype when it runs again. Or the backward
            pass runs a second time, or is itself differentiated.
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
        # The alternative to a schedule that the error message recommends if the first run and the
        # recomputation of a stage differ. If None, the two runs are not compared.
        self.advice: str | None = None
        self._length = len(stages)

    def forward(self, x: Any, **kwargs) -> Any:
        stages = list(self)
        value = handed_on("x", x)
        if len(stages) != self._length:
            raise ValueError(
                f"this module has {len(stages)} stages now, but its schedule is for {self._length}"
            )
        if not torch.is_grad_enabled():
            for i, stage in enumerate(stages):
                value = run_stage(i, stage, value, kwargs)
            return value
        check_constants(kwargs)
        names = [f"stage {i}" for i in range(len(stages))]
        states = states_of(stages, names, self.advice)
        run = Run(stages, self.schedule, value, kwargs, states)
        link = the_tensor(value)
        for _ in stages:
            link = run.step(link)
        return run.end(link)


_runner: ContextVar[Callable | None] = ContextVar("runner", default=None)


@contextmanager
def forwards_run_by(runner: Callable) -> Iterator[None]:
    """Let `runner` run the stages without gradients in the passes that begin inside the block.

    It gets a stage, the tensors that it computes with, everything else that determines the result,
    the function that runs the stage, and the watch for random numbers. Instead of calling that
    function, it may return an equal result.
    """
    token = _runner.set(runner)
    try:
        yield
    finally:
        _runner.reset(token)


class StageNode(torch.autograd.Function):
    """A stage in the outer graph.

    Only empty tensors pass between two nodes. The `Run` holds values and gradients, because
    autograd would hold a gradient for as long as its node's backward runs.
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
    """The end of the outer graph, where the output leaves the `Run` and its gradient enters."""

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
        states: States of the stages before their first run.
    """

    def __init__(
        self,
        stages: list[nn.Module],
        schedule: Schedule,
        value: Any,
        kwargs: dict,
        states: list[BlockState],
    ):
        x = the_tensor(value)
        self.states = dict(enumerate(states))
        self.stages, self.kwargs, self.actions = stages, kwargs, iter(schedule)
        self.next = 0  # the stage that runs next for the first time
        # the stage whose backward is next, once all actions before it have run
        self.due: int | None = None
        # stage -> number of its forwards that have not run yet
        self.left = Counter(action.stage for action in schedule if isinstance(action, Forward))
        self.values: dict[int, Any] = {0: with_tensor(value, x.detach())}
        self.kept: dict[int, Kept] = {}  # stage -> what it keeps, for stages run with "all"
        self.slot = GradientSlot()  # holds the gradient of the output of stage `due`
        self.kinds: dict[int, tuple] = {}  # stage -> (shape, dtype, device) of its output
        # stage -> random state and buffers before its first run, for its later runs
        self.before: dict[int, tuple[RandomState | None, dict[str, Tensor]]] = {}
        trains = [bool(trained(stage)) for stage in stages]
        self.needs = list(
            accumulate(trains, lambda before, now: before or now, initial=x.requires_grad)
        )
        self.autocast = AutocastState([x.device.type])
        self.modes = modes_when_recomputed()
        self.runner = _runner.get()

    def step(self, link: Tensor) -> Tensor:
        """Run the next stage for the first time; return its node, which follows `link`."""
        i = self.next
        with self.autocast.restored(cache_enabled=False):
            for action in self.actions:
                self.forward(*action)
                if action.stage == i:
                    break
        self.next += 1
        if self.next == len(self.stages):
            self.to_next_backward()
        return StageNode.apply(self, i, link, *trained(self.stages[i]))

    def output(self, i: int) -> Any:
        """Return the output of stage i, without its graph."""
        value = self.kept[i].output if i in self.kept else self.values[i + 1]
        return with_tensor(value, the_tensor(value).detach())

    def end(self, link: Tensor) -> Any:
        """After the last `step`, return the output of the last stage as part of the outer graph."""
        output = self.output(len(self.stages) - 1)
        return with_tensor(output, Output.apply(self, the_tensor(output), link))

    def to_next_backward(self) -> None:
        """Run the forwards up to the next backward, and set `due` to its stage."""
        # The autocast cache is off, because cast weights would stay in it. In older torch versions
        # they would also lack the path to their gradients.
        with self.autocast.restored(cache_enabled=False):
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
        """Run stage i with the random numbers and buffers of its first run.

        Returns:
            A `Kept` if `keep` is "all", else the value for the next stage.
        """
        self.left[i] -= 1
        device, random, buffers, watch = the_tensor(value).device, None, {}, None
        if i in self.before:
            random, buffers = self.before[i] if self.left[i] else self.before.pop(i)
            buffers = {name: buffer.clone() for name, buffer in buffers.items()}
        elif self.left[i]:
            watch = _Watch(self.stages[i], device)
        if random is not None:
            now = RandomState([device])
            random.restore()
        more = self.left[i] > 0
        state = self.states[i] if more else self.states.pop(i)  # the last run frees its copies
        try:
            with state.next_run(more):
                if keep == "all":
                    result = self.keep(i, value, buffers)
                else:
                    drawing = nullcontext() if watch is None else watch.drawing
                    with torch.no_grad(), drawing:
                        result = self.hand_on(i, value, buffers, drawing)
        finally:
            if random is not None:
                now.restore()
        if watch is not None:
            self.before[i] = watch.changed()
        output = the_tensor(result.output if keep == "all" else result)
        check_kind(i, output, self.kinds)
        state.check_output(output, more)
        return result

    def keep(self, i: int, value: Any, buffers: dict[str, Tensor]) -> Kept:
        return Kept(i, self.stages[i], value, self.kwargs, self.needs[i], buffers, self.slot)

    def hand_on(self, i: int, value: Any, buffers: dict[str, Tensor], drawing: Any) -> Any:
        stage = self.stages[i]
        compute = partial(run_stage, i, stage, value, self.kwargs, buffers)
        if self.runner is None:
            return compute()
        return self.runner(stage, self.given(i, value), self.context(i), compute, drawing)

    def given(self, i: int, value: Any) -> list[Tensor]:
        """Return the tensors that stage i computes with, except its own."""
        arguments = getattr(self.stages[i], "arguments", None)
        return list(dict.fromkeys(tensors_in([value, self.kwargs, arguments])))

    def context(self, i: int) -> tuple:
        """Return everything else that determines what a run of stage i needs."""
        return i == len(self.stages) - 1, self.needs[i], torch.is_autocast_enabled("cpu")

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
                "this backward pass has already run, and its saved tensors are freed: "
                "call the module again instead of backward() with retain_graph=True"
            )
        self.due = None
        self.values.pop(i + 1, None)
        found = self.kept.pop(i).backward()
        self.values.pop(i, None)
        return found


def check_kind(i: int, output: Tensor, kinds: dict[int, tuple]) -> None:
    """Raise if the output of stage i differs in shape, dtype or device from its first run.

    `kinds` holds these of the first runs and is filled here.
    """
    found = tuple(output.shape), output.dtype, output.device
    # a shape that broadcasts, or another dtype, would not raise an error later
    if kinds.setdefault(i, found) != found:
        raise RuntimeError(
            f"stage {i} returned {found} when it ran again, but {kinds[i]} at first; "
            "a stage of a schedule must compute the same each time"
        )


def states_of(
    blocks: Sequence[nn.Module], names: Sequence[str], advice: str | None
) -> list[BlockState]:
    """Return states of the blocks of a schedule; with `advice`, the blocks compare their runs."""
    return [
        BlockState(block, Comparison(name, advice) if advice is not None else None)
        for block, name in zip(blocks, names, strict=True)
    ]


class _Watch:
    """The random state and the buffers before a stage's first run, to find out what it changed."""

    def __init__(self, stage: nn.Module, device: torch.device):
        self.stage = stage
        self.devices = [device]
        self.random = RandomState(self.devices)
        self.drawing = _Drawing() if is_symbolic() else nullcontext()
        self.buffers = {
            name: (buffer, buffer._version, buffer.clone())
            for name, buffer in stage.named_buffers()
        }

    def changed(self) -> tuple[RandomState | None, dict[str, Tensor]]:
        after = dict(self.stage.named_buffers())
        # random states are not symbolic tensors, even if the stages run on symbolic tensors
        with _disable_current_modes():
            symbolic = isinstance(self.drawing, _Drawing)
            drew = self.drawing.seen if symbolic else self.random != RandomState(self.devices)
            buffers = {
                name: copy
                for name, (buffer, version, copy) in self.buffers.items()
                if after.get(name) is not buffer or self._is_changed(buffer, version, copy)
            }
        return self.random if drew else None, buffers

    def _is_changed(self, buffer: Tensor, version: int, copy: Tensor) -> bool:
        """Return whether a buffer has changed, by its values.

        Normalization layers change their statistics without increasing the version counter.
        """
        if not is_symbolic(copy):
            return not torch.equal(buffer, copy)
        norms = [
            m
            for m in self.stage.modules()
            if isinstance(m, nn.modules.batchnorm._NormBase) and m.training
        ]
        return buffer._version != version or any(
            buffer is statistic for m in norms for statistic in m.buffers()
        )


class _Drawing(ObserverMode):
    """Detect operators that draw random numbers, since symbolic ones do not advance a generator."""

    seen = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen |= torch.Tag.nondeterministic_seeded in getattr(
            func, "tags", ()
        ) and not _without_dropout(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _without_dropout(func, args: tuple, kwargs: dict) -> bool:
    """Return whether this is an attention operator with dropout disabled."""
    given = (
        dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
        | kwargs
    )
    return "query" in given and not given.get("dropout_p")
