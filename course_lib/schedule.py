"""Which activations to forget: schedules for a chain of stages, their exact cost, and their execution.

A network is a `Chain`; a `Schedule` says which stage runs when and what its forward keeps; `simulate` is the referee
that says what it costs. `optimal` finds the cheapest schedule under a byte budget, `ScheduledSequential` runs one under
autograd. Lesson 03 explains.

Example, with `net` an `nn.Sequential`::

    chain = Chain.profile(net, x)
    plan = optimal(chain, budget_bytes)
    simulate(plan, chain)  # peak_bytes, seconds, forward_steps
    ScheduledSequential(net, plan)(x).sum().backward()

Source of the model: Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains:
how to train deep neural networks with limited memory" (Rotor), arXiv:1911.13214.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import FlopCounterMode

from course_lib.memory import MemoryMeter

__all__ = [
    "Backward",
    "Chain",
    "Cost",
    "Forward",
    "IllegalSchedule",
    "InfeasibleBudget",
    "Schedule",
    "ScheduledSequential",
    "Stage",
    "binomial",
    "frontier",
    "optimal",
    "recursive",
    "segments",
    "simulate",
    "sqrt_segments",
    "store_all",
]

KEEPS = ("all", "input", "nothing")
# Apart in lightness too, for readers who see no colours and for grey prints.
COLORS = {"all": "#228833", "input": "#224488", "nothing": "#BBBBBB", "backward": "#EE6677"}


class IllegalSchedule(ValueError):
    """An action of a schedule breaks a rule of `simulate`; the message says which action and which rule."""


class InfeasibleBudget(ValueError):
    """No schedule fits the budget.

    Attributes:
        budget_bytes: the budget.
        least_bytes: the least budget for which there is a schedule.
    """

    def __init__(self, budget_bytes: int, least_bytes: int):
        super().__init__(f"budget_bytes is {budget_bytes}, but this chain needs at least {least_bytes}")
        self.budget_bytes, self.least_bytes = budget_bytes, least_bytes

    def __reduce__(self):
        return type(self), (self.budget_bytes, self.least_bytes)


# ---- the chain


@dataclass(frozen=True)
class Stage:
    """One link of a chain.

    Attributes:
        forward_seconds: of its forward pass, in any unit.
        backward_seconds: of its backward pass, in the same unit.
        output_bytes: of its output; the gradient of the output takes as many.
        saved_bytes: all that its forward keeps for its backward, its output included, its input not.
        forward_overhead_bytes: what a forward that keeps all takes on top of that, while it runs.
        backward_overhead_bytes: what its backward takes, while it runs, on top of its input, `saved_bytes` and the
            gradient of its output: the gradient of its input, where that is not made in place, and temporaries.
        unsaved_overhead_bytes: what a forward that does not keep all takes, while it runs, on top of its input and
            output; None for as much as `forward_overhead_bytes`.

    Raises:
        TypeError, ValueError: a field is not of its kind, or out of its range; the message names it.
    """

    forward_seconds: float
    backward_seconds: float
    output_bytes: int
    saved_bytes: int
    forward_overhead_bytes: int = 0
    backward_overhead_bytes: int = 0
    unsaved_overhead_bytes: int | None = None

    def __post_init__(self):
        for name in ("forward_seconds", "backward_seconds"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
                raise TypeError(f"{name} is {value!r}; it takes a number")
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value}; it takes a finite number, 0 or more")
        _check_int("output_bytes", self.output_bytes, 1)
        _check_int("saved_bytes", self.saved_bytes, 1)
        _check_int("forward_overhead_bytes", self.forward_overhead_bytes, 0)
        _check_int("backward_overhead_bytes", self.backward_overhead_bytes, 0)
        if self.unsaved_overhead_bytes is not None:
            _check_int("unsaved_overhead_bytes", self.unsaved_overhead_bytes, 0)
        if self.saved_bytes < self.output_bytes:
            raise ValueError(
                f"saved_bytes is {self.saved_bytes}; it includes the output, so it takes {self.output_bytes} or more"
            )


@dataclass(frozen=True)
class Chain:
    """Stages 0 to L-1, one after the other; stage i turns x_i into x_{i+1}.

    Attributes:
        stages: the L stages.
        input_bytes: of x_0.

    Raises:
        TypeError, ValueError: there is no stage, one is no `Stage`, or `input_bytes` is not positive.
    """

    stages: tuple[Stage, ...]
    input_bytes: int

    def __post_init__(self):
        object.__setattr__(self, "stages", tuple(self.stages))
        if not self.stages:
            raise ValueError("the chain has no stages; it takes one or more")
        for i, stage in enumerate(self.stages):
            if not isinstance(stage, Stage):
                raise TypeError(f"stages[{i}] is {stage!r}; it takes a Stage")
        _check_int("input_bytes", self.input_bytes, 1)

    def __len__(self) -> int:
        return len(self.stages)

    @classmethod
    def uniform(
        cls,
        length: int,
        *,
        activation_bytes: int = 1,
        saved_bytes: int | None = None,
        forward_seconds: float = 1.0,
        backward_seconds: float = 2.0,
    ) -> Chain:
        """`length` equal stages; `saved_bytes` is `activation_bytes` (the output alone) if left out."""
        _check_int("length", length, 1)
        saved = activation_bytes if saved_bytes is None else saved_bytes
        return cls((Stage(forward_seconds, backward_seconds, activation_bytes, saved),) * length, activation_bytes)

    @classmethod
    def profile(cls, module: nn.Sequential, x: Tensor, *, clock: bool = False, repeats: int = 5) -> Chain:
        """Measure the stages of a module, each by itself, as `ScheduledSequential` runs them.

        Bytes are the meter's: exact, and without the gradients of parameters that persist (make them beforehand, as
        from the second step on, to measure the same in a run). Buffers and random numbers are as before afterwards.

        Args:
            module: the chain; every child takes one tensor and returns one.
            x: its input, of the size to be trained with; it tells whether a gradient of the input is needed.
            clock: False for times that repeat: FLOPs of matrix products and convolutions, and for a stage without
                any, the number of elements of its output. True for seconds, the median of `repeats` runs.

        Raises:
            TypeError: the module is no `nn.Sequential`, or a stage returns something else than one tensor.
        """
        _check_module(module)
        if not isinstance(x, Tensor):
            raise TypeError(f"x is {type(x).__name__}; it takes a tensor")
        _check_int("repeats", repeats, 1)
        stages, value, needs, states = [], x.detach(), x.requires_grad, _random_states(x)
        try:
            for i, stage in enumerate(module):
                measured, value = _profile_stage(i, stage, value, needs, repeats if clock else 0)
                needs = needs or any(parameter.requires_grad for parameter in stage.parameters())
                stages.append(measured)
        finally:
            _set_random_states(x, states)
        return cls(tuple(stages), x.nbytes)


def _profile_stage(i: int, stage: nn.Module, x: Tensor, needs: bool, clocked: int) -> tuple[Stage, Tensor]:
    """One stage's costs, and its output."""

    def forward() -> tuple[Tensor, list[Tensor]]:
        leaf = x.detach().requires_grad_(needs and _differentiable(x))
        output = _call(i, stage, leaf.view_as(leaf), spare_buffers=True)
        return output, _wanted(stage, leaf)

    def backward(output: Tensor, wanted: list[Tensor], gradient: Tensor) -> None:
        if output.requires_grad:
            torch.autograd.grad(output, wanted, gradient, allow_unused=True)

    with torch.no_grad(), MemoryMeter() as unsaved:
        value = _call(i, stage, x, spare_buffers=True)
    gradient = torch.ones_like(value)
    with MemoryMeter() as saving:  # one block for both: backward frees what forward saved as it goes
        with torch.enable_grad():
            output, wanted = forward()
        saved, operators = max(saving.live_bytes, output.nbytes), len(saving.phases())
        backward(output, wanted, gradient)
    live = sum(saving.series().values())
    del output, wanted

    with torch.enable_grad(), FlopCounterMode(display=False) as forward_flops:
        output, wanted = forward()
    with FlopCounterMode(display=False) as backward_flops:
        backward(output, wanted, gradient)
    costs = [flops.get_total_flops() or value.numel() for flops in (forward_flops, backward_flops)]
    if clocked:
        seconds: tuple[list[float], list[float]] = ([], [])
        for _ in range(clocked):
            with torch.enable_grad():
                output, wanted = _timed(x, seconds[0], forward)
            _timed(x, seconds[1], backward, output, wanted, gradient)
        costs = [statistics.median(values) for values in seconds]
    measured = Stage(
        float(costs[0]),
        float(costs[1]),
        value.nbytes,
        saved,
        int(live[:operators].max(initial=saved)) - saved,
        int(live[operators:].max(initial=saved)) - saved,
        max(0, unsaved.peak_bytes - value.nbytes),
    )
    return measured, value


def _timed(x: Tensor, seconds: list[float], function, *args):
    wait = torch.cuda.synchronize if x.is_cuda else lambda: None
    wait()
    start = time.perf_counter()
    result = function(*args)
    wait()
    seconds.append(time.perf_counter() - start)
    return result


# ---- schedules


class Forward(NamedTuple):
    """Run stage i on x_i. What it keeps: "all" for its backward, its "input" alone, or "nothing"."""

    stage: int
    keep: str = "all"


class Backward(NamedTuple):
    """Run the backward of stage i: from the gradient of x_{i+1} to that of x_i."""

    stage: int


Action = Forward | Backward


class Schedule(Sequence):
    """An immutable sequence of `Forward` and `Backward` actions. `simulate` says whether it is legal for a chain.

    Raises:
        TypeError, ValueError: one of the actions is no action.
    """

    def __init__(self, actions: Iterable[Action]):
        self._actions = tuple(actions)
        for number, action in enumerate(self._actions):
            if not isinstance(action, (Forward, Backward)):
                raise TypeError(f"action {number} is {action!r}; it takes Forward(stage, keep) or Backward(stage)")
            if isinstance(action.stage, bool) or not isinstance(action.stage, int):
                raise TypeError(f"action {number} is {action!r}; its stage takes a whole number")
            if isinstance(action, Forward) and action.keep not in KEEPS:
                raise ValueError(f'action {number} is {action!r}; keep takes "all", "input" or "nothing"')

    def __len__(self) -> int:
        return len(self._actions)

    def __iter__(self) -> Iterator[Action]:
        return iter(self._actions)

    def __getitem__(self, index):
        return Schedule(self._actions[index]) if isinstance(index, slice) else self._actions[index]

    def __eq__(self, other) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return len(self) == len(other) and all(map(_same, self, other))

    def __hash__(self) -> int:
        return hash(tuple(islice(self, 64)))

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, islice(self, 4)))
        return f"Schedule of {len(self)} actions: {shown}{', ...' if len(self) > 4 else ''}"

    def plot(self, ax=None, *, chain: Chain | None = None):
        """Draw time on x and stage on y: what runs, and as bars behind it what is kept.

        Args:
            ax: matplotlib's axes; new ones if left out.
            chain: for its times; a uniform chain if left out.

        Returns:
            The axes.
        """
        import matplotlib.pyplot as plt
        from matplotlib.collections import PatchCollection
        from matplotlib.patches import Patch, Rectangle

        if chain is None:
            chain = Chain.uniform(1 + max(action.stage for action in self))
        ax = plt.subplots()[1] if ax is None else ax
        runs, kept = _drawing(self, chain)
        for keep, opacity in (("all", 0.25), ("input", 0.35)):
            bars = [Rectangle((start, i - 0.5), end - start, 1.0) for i, start, end, what in kept if what == keep]
            ax.add_collection(PatchCollection(bars, facecolor=COLORS[keep], alpha=opacity, linewidth=0))
        for what, color in COLORS.items():
            boxes = [Rectangle((start, i - 0.5), end - start, 1.0) for i, start, end, kind in runs if kind == what]
            edge = {"edgecolor": "#888888", "linewidth": 0.6} if what == "nothing" else {"linewidth": 0}
            ax.add_collection(PatchCollection(boxes, facecolor=color, **edge))
        ax.set(xlim=(0, max(end for _, _, end, _ in runs) or 1), ylim=(-0.5, len(chain) - 0.5))
        ax.set(xlabel="time", ylabel="stage")
        labels = {"all": "keep all", "input": "keep input", "nothing": "keep nothing", "backward": "backward"}
        ax.legend(handles=[Patch(color=COLORS[what], label=label) for what, label in labels.items()], fontsize="small")
        return ax


def _same(left: Action, right: Action) -> bool:
    return type(left) is type(right) and left == right


def _drawing(schedule: Schedule, chain: Chain) -> tuple[list[tuple], list[tuple]]:
    """(stage, start, end, kind) of what runs; (stage, start, end, "all" or "input") of what is kept meanwhile."""
    referee, now, runs, kept = _Referee(chain), 0.0, [], []
    since: dict[tuple[int, str], float] = {}
    for action in schedule:
        referee.take(action)
        stage, start = chain.stages[action.stage], now
        now += stage.backward_seconds if isinstance(action, Backward) else stage.forward_seconds
        runs.append((action.stage, start, now, "backward" if isinstance(action, Backward) else action.keep))
        # x_L belongs to no stage as an input; it is drawn with the last stage's "all".
        alive = {(i, "input") for i in referee.inputs if i < len(chain)} | {(i, "all") for i in referee.saved}
        for value in alive - since.keys():
            since[value] = start
        for value in since.keys() - alive:
            kept.append((value[0], since.pop(value), now, value[1]))
    kept += [(i, start, now, what) for (i, what), start in since.items()]
    return runs, kept


# ---- the referee


@dataclass(frozen=True)
class Cost:
    """What a schedule costs on a chain.

    Attributes:
        peak_bytes: the most bytes live during an action.
        seconds: the sum of the actions' times.
        forward_steps: how many of the actions are forwards.
    """

    peak_bytes: int
    seconds: float
    forward_steps: int


def simulate(schedule: Sequence[Action], chain: Chain) -> Cost:
    """Check that a schedule is legal for a chain, and count what it costs.

    What can be alive, and its bytes: the value x_i (`input_bytes` for i = 0, else `output_bytes` of stage i-1); the
    set S_i of all that stage i saved (`saved_bytes`; x_{i+1} is in it); one gradient d_i (as large as x_i).
    At the start x_0 is alive. "x_i is alive" below means: by itself, or in S_{i-1}.

    - `Forward(i, "all")` needs x_i alive; makes S_i (x_{i+1} by itself, if alive, ends: it is in S_i now).
    - `Forward(i, "input")` needs x_i alive; makes x_{i+1}.
    - `Forward(i, "nothing")` needs x_i alive; makes x_{i+1}; then x_i by itself ends (in S_{i-1} it stays).
    - `Backward(i)` needs S_i, x_i and d_{i+1} alive, so each runs once, from L-1 down to 0; then S_i, d_{i+1}, and x_i
      and x_{i+1} by themselves end, and d_i is there. d_L comes from outside at the beginning of Backward(L-1).

    Live during an action is all that is alive before it, plus what it makes, plus its overhead:
    `forward_overhead_bytes`, `unsaved_overhead_bytes` or `backward_overhead_bytes`. A forward counts what it makes
    also if the same is alive already. A backward makes d_i in place of what it ends; where a real one needs more, that
    is part of its overhead. The gradients of parameters are no part of this.

    Args:
        schedule: the actions.
        chain: the chain they are for.

    Raises:
        IllegalSchedule: an action breaks a rule, or stages are left without their backward.

    Source: Beaumont et al., arXiv:1911.13214, section 3; but d_L counts only from Backward(L-1) on, since the loss is
    not a stage here.
    """
    referee = _Referee(chain)
    for action in schedule:
        referee.take(action)
    if referee.next_backward >= 0:
        raise IllegalSchedule(
            f"the schedule ends after {referee.number} actions, but each stage needs its backward and "
            f"Backward({referee.next_backward}) has not run"
        )
    return Cost(referee.peak_bytes, referee.seconds, referee.forward_steps)


class _Referee:
    """What is alive while a schedule runs."""

    def __init__(self, chain: Chain):
        self.stages = chain.stages
        self.value_bytes = [chain.input_bytes, *(stage.output_bytes for stage in chain.stages)]
        self.unsaved = [_unsaved_overhead(stage) for stage in chain.stages]
        self.inputs = {0}  # i: x_i is alive by itself
        self.saved: set[int] = set()  # i: S_i is alive
        self.next_backward = len(chain) - 1
        self.live_bytes = self.peak_bytes = chain.input_bytes
        self.seconds, self.forward_steps, self.number = 0.0, 0, 0

    def take(self, action: Action) -> None:
        if not isinstance(action, (Forward, Backward)):
            raise TypeError(f"action {self.number} is {action!r}; it takes Forward(stage, keep) or Backward(stage)")
        i = action.stage
        if not 0 <= i < len(self.stages):
            self.refuse(action, f"this chain has the stages 0 to {len(self.stages) - 1}")
        if isinstance(action, Forward):
            self.forward(action, i)
        else:
            self.backward(action, i)
        self.number += 1

    def forward(self, action: Action, i: int) -> None:
        if i > self.next_backward:
            self.refuse(action, "a stage does not run again after its backward")
        if i not in self.inputs and i - 1 not in self.saved:
            self.refuse(action, f"a stage runs only with its input alive, and x_{i} is not")
        stage, keep = self.stages[i], action.keep
        if keep == "all":
            self.count(stage.saved_bytes, stage.forward_overhead_bytes)
            if i in self.saved:
                self.live_bytes -= stage.saved_bytes
            self.saved.add(i)
            self.drop(i + 1)
        else:
            self.count(stage.output_bytes, self.unsaved[i])
            self.drop(i + 1)
            self.inputs.add(i + 1)
            if keep == "nothing":
                self.drop(i)
        self.seconds += stage.forward_seconds
        self.forward_steps += 1

    def backward(self, action: Action, i: int) -> None:
        if i != self.next_backward:
            due = f"Backward({self.next_backward}) is due" if self.next_backward >= 0 else "all have run"
            self.refuse(action, f"backwards run once each, from the last stage to the first, and {due}")
        if i not in self.saved:
            self.refuse(action, f"a backward needs what a forward that keeps all saved, and stage {i}'s is not alive")
        if i not in self.inputs and i - 1 not in self.saved:
            self.refuse(action, f"a backward needs its stage's input alive, and x_{i} is not")
        stage = self.stages[i]
        if i == len(self.stages) - 1:
            self.live_bytes += stage.output_bytes  # the gradient comes from outside
        self.count(0, stage.backward_overhead_bytes)
        self.saved.remove(i)
        self.drop(i)
        self.drop(i + 1)
        self.live_bytes += self.value_bytes[i] - stage.saved_bytes - stage.output_bytes
        self.next_backward -= 1
        self.seconds += stage.backward_seconds

    def count(self, made_bytes: int, overhead_bytes: int) -> None:
        self.live_bytes += made_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + overhead_bytes)

    def drop(self, i: int) -> None:
        if i in self.inputs:
            self.inputs.remove(i)
            self.live_bytes -= self.value_bytes[i]

    def refuse(self, action: Action, rule: str) -> None:
        raise IllegalSchedule(f"action {self.number}, {action!r}, is illegal: {rule}")


# ---- schedules by rule


def store_all(chain: Chain) -> Schedule:
    """Keep everything: each forward once, then each backward. No schedule is faster.

    Args:
        chain: L stages.
    """
    _check_chain(chain)
    return Schedule(_keep_all(0, len(chain)))


def segments(chain: Chain, count: int) -> Schedule:
    """Cut the chain into `count` segments, keep what enters each, and keep all of one segment at a time.

    Equal stages: the sizes of the segments differ by at most one, the larger ones first (while fewer inputs are kept
    when these are recomputed). Uneven stages: the cut whose simulated peak is least, the balanced one if it is.

    Args:
        chain: L stages.
        count: of segments, 1 (the same as `store_all`) to L.

    Returns:
        A schedule with one extra forward per stage that is not in the last segment.

    Raises:
        TypeError, ValueError: `count` is not between 1 and L.

    Source: Chen et al. 2016, arXiv:1604.06174, section 4; the least peak by a dynamic program over cuts.
    """
    _check_chain(chain)
    _check_int("count", count, 1)
    length = len(chain)
    if count > length:
        raise ValueError(f"count is {count}; a chain of {length} stages takes 1 to {length} segments")
    size, larger = divmod(length, count)
    cuts = list(accumulate([size + (j < larger) for j in range(count)], initial=0))
    balanced = _segmented(cuts)
    if len(set(chain.stages)) == 1:
        return balanced
    best = _segmented(_best_cuts(chain, count))
    return best if simulate(best, chain).peak_bytes < simulate(balanced, chain).peak_bytes else balanced


def sqrt_segments(chain: Chain) -> Schedule:
    """Cut the chain into k* segments and keep only what enters each.

    With s bytes saved per stage and b bytes at a boundary, holding k boundaries and one segment of L/k stages costs
    k*b + (L/k)*s bytes, least at k* = sqrt(L*s/b). Of the whole numbers around k*, the one for which this is less.

    Args:
        chain: L stages; s and b are the means of their `saved_bytes` and `output_bytes`.

    Returns:
        A schedule with one extra forward per stage that is not in the last segment.

    Source: Chen et al. 2016, arXiv:1604.06174, section 4, for s = b.
    """
    _check_chain(chain)
    length = len(chain)
    s = sum(stage.saved_bytes for stage in chain.stages) / length
    b = sum(stage.output_bytes for stage in chain.stages) / length
    best = math.sqrt(length * s / b)
    counts = {min(max(1, count), length) for count in (math.floor(best), math.ceil(best))}
    return segments(chain, min(sorted(counts), key=lambda k: k * b + length / k * s))


def recursive(chain: Chain) -> Schedule:
    """Halve the chain, keep what enters the second half, finish that half, then the first; each half likewise.

    At most ceil(log2 L) + 1 inputs and one stage's saved bytes are alive at once, for about (L/2) * log2 L extra
    forwards.

    Args:
        chain: L stages.

    Source: Chen et al. 2016, arXiv:1604.06174, section 4.4.
    """
    _check_chain(chain)
    actions: list[Action] = []
    waiting = [(0, len(chain))]  # a stack: the right half runs before the left one
    while waiting:
        start, end = waiting.pop()
        if end - start == 1:
            actions += [Forward(start, "all"), Backward(start)]
            continue
        middle = (start + end) // 2
        actions += _advance(start, middle)
        waiting += [(start, middle), (middle, end)]
    return Schedule(actions)


def binomial(length: int, slots: int) -> Schedule:
    """The fewest forwards for equal stages when at most `slots` inputs are kept at once, x_0 among them.

    Every stage's forward that keeps all runs just before its backward. The forwards beyond these L number
    r*L - C(s+r, s+1), with s slots and r the least number for which C(s+r, s) >= L.

    Args:
        length: L, the number of stages.
        slots: s, 1 or more; more than L - 1 change nothing.

    Returns:
        A lazy sequence: actions are made when asked for, so L may be large.

    Raises:
        TypeError, ValueError: an argument is not a positive whole number.

    Source: Griewank and Walther 2000, "Algorithm 799: revolve", ACM TOMS 26(1).
    """
    _check_int("length", length, 1)
    _check_int("slots", slots, 1)
    return _Binomial(length, min(slots, max(1, length - 1)))


class _Binomial(Schedule):
    def __init__(self, length: int, slots: int):
        self.length, self.slots = length, slots

    def __len__(self) -> int:
        return 2 * self.length + _binomial_extra(self.length, self.slots)

    def __iter__(self) -> Iterator[Action]:
        waiting = [(0, self.length, self.slots)]
        while waiting:
            start, length, slots = waiting.pop()
            if length == 1:
                yield Forward(start, "all")
                yield Backward(start)
                continue
            split = _binomial_split(length, slots)
            yield Forward(start, "input")
            for i in range(start + 1, start + split):
                yield Forward(i, "nothing")
            waiting += [(start, split, slots), (start + split, length - split, slots - 1)]

    def __getitem__(self, index):
        if isinstance(index, slice):
            return Schedule(tuple(self)[index])
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(f"index is {index}; this schedule has {len(self)} actions")
        start, length, slots = 0, self.length, self.slots
        while length > 1:
            split = _binomial_split(length, slots)
            if number < split:
                return Forward(start + number, "nothing" if number else "input")
            number -= split
            right = 2 * (length - split) + _binomial_extra(length - split, slots - 1)
            if number < right:
                start, length, slots = start + split, length - split, slots - 1
            else:
                number, length = number - right, split
        return Backward(start) if number else Forward(start, "all")


@lru_cache(maxsize=1 << 16)
def _binomial_repeats(length: int, slots: int) -> int:
    """The least r with C(s+r, s) >= L: no stage runs forward more than r times without keeping all."""
    if slots == 1:
        return length - 1
    r, reach = 0, 1
    while reach < length:
        r += 1
        reach = reach * (slots + r) // r
    return r


def _binomial_extra(length: int, slots: int) -> int:
    if length == 1:
        return 0
    r = _binomial_repeats(length, slots)
    return r * length - math.comb(slots + r, slots + 1)


def _binomial_split(length: int, slots: int) -> int:
    """How far to run before the next input is kept: the largest distance that keeps both parts within r repeats."""
    if slots == 1:
        return length - 1
    r = _binomial_repeats(length, slots)
    return min(math.comb(slots + r - 1, slots), length - math.comb(slots + r - 2, slots - 1))


def _keep_all(start: int, end: int) -> list[Action]:
    return [Forward(i, "all") for i in range(start, end)] + [Backward(i) for i in reversed(range(start, end))]


def _advance(start: int, end: int) -> list[Action]:
    """From x_start to x_end, keeping x_start."""
    return [Forward(start, "input"), *(Forward(i, "nothing") for i in range(start + 1, end))]


def _segmented(cuts: list[int]) -> Schedule:
    pairs = list(pairwise(cuts))
    actions: list[Action] = []
    for start, end in pairs[:-1]:
        actions += _advance(start, end)
    for start, end in reversed(pairs):
        actions += _keep_all(start, end)
    return Schedule(actions)


def _best_cuts(chain: Chain, count: int) -> list[int]:
    """The boundaries 0 = c_0 < ... < c_count = L for which the peak of `_segmented` is least.

    need[a] is the least that the stages from a on take, beyond what is kept before a and x_a, with so many segments:
    the first of them ends at some b, and takes its own, or else leaves x_b kept for the rest.
    """
    sizes, length = _Sizes(chain), len(chain)
    own = np.full((length, length + 1), _MANY, dtype=np.int64)  # what segment a..b-1 takes
    for a in range(length):
        saved = np.cumsum(sizes.saved[a:])
        forward = np.maximum.accumulate(saved + sizes.forward_overhead[a:])
        backward = np.maximum.accumulate(saved + sizes.values[a + 1 :] + sizes.backward_overhead[a:])
        own[a, a + 1 :] = np.maximum(forward + sizes.gradient[a:], backward)
        own[a, a + 1 : length] = np.maximum(own[a, a + 1 : length], sizes.through[a, a + 1 : length])
    need, chosen = own[:, length], []
    for _ in range(count - 1):
        taken = np.maximum(own[:, :length], (sizes.values[:length] + need)[None, :])
        chosen.append(taken.argmin(axis=1))
        need = taken.min(axis=1)
    cuts = [0]
    for ends in reversed(chosen):
        cuts.append(int(ends[cuts[-1]]))
    return [*cuts, length]


# ---- the cheapest schedule under a budget

_MANY = 1 << 60  # bytes: more than there are


class _Sizes:
    """The chain's bytes and times as arrays, and what each kind of step takes.

    Steps work on stages s to t, both included, with x_s kept by others and not counted, and with the gradient of
    x_{t+1} counted where it is alive already: not for t = L-1, whose gradient comes with its backward.
    """

    def __init__(self, chain: Chain):
        stages, length = chain.stages, len(chain)
        self.length = length
        self.values = np.array([chain.input_bytes, *(stage.output_bytes for stage in stages)], dtype=np.int64)
        self.saved = np.array([stage.saved_bytes for stage in stages], dtype=np.int64)
        self.forward_overhead = np.array([stage.forward_overhead_bytes for stage in stages], dtype=np.int64)
        self.backward_overhead = np.array([stage.backward_overhead_bytes for stage in stages], dtype=np.int64)
        self.unsaved_overhead = np.array([_unsaved_overhead(stage) for stage in stages], dtype=np.int64)
        self.forward = np.array([float(stage.forward_seconds) for stage in stages])
        self.backward = np.array([float(stage.backward_seconds) for stage in stages])
        self.elapsed = np.concatenate([[0.0], np.cumsum(self.forward)])
        self.gradient = np.append(self.values[1:length], 0)  # of x_{t+1}, during the forwards of stages up to t
        # through[s, e]: what running from x_s to x_e takes, x_s kept and the rest dropped on the way
        self.through = np.zeros((length, length + 1), dtype=np.int64)
        for s in range(length):
            running = self.values[s + 1 :] + self.unsaved_overhead[s:]
            running[1:] += self.values[s + 1 : length]
            self.through[s, s + 1 :] = np.maximum.accumulate(running)

    def all_bytes(self, s: int, t: int) -> int:
        """What stage s takes, in its forward and its backward, when all of it is kept."""
        forward = self.gradient[t] + self.forward_overhead[s]
        backward = self.values[s + 1] + self.backward_overhead[s]
        return int(self.saved[s] + max(forward, backward))

    def split_bytes(self, s: int, t: int) -> np.ndarray:
        """What running from x_s to x_e takes, for e = s+1 to t."""
        return self.gradient[t] + self.through[s, s + 1 : t + 1]


def optimal(chain: Chain, budget_bytes: int, *, slots: int | None = None) -> Schedule:
    """The fastest persistent schedule whose simulated peak is within the budget.

    Persistent: what is kept stays until its backward. Time[s, t, m], the least for stages s to t with m bytes beyond
    x_s, is the lesser of: keep all of stage s, and do s+1 to t with `saved_bytes` less; or run on from x_s to some x_e,
    keep it, do e to t with its bytes less, and then s to e-1 with m again.

    Bytes are counted in units, sizes rounded up and the budget down, so that the peak never exceeds the budget. If the
    greatest common divisor of all sizes goes into the budget at most `slots` times, that is the unit and the result
    is exact; else the unit is budget_bytes / slots, rounded up. Should only the rounding make a feasible budget
    infeasible, the slots are doubled, up to four times, before the schedule of the least peak is returned.

    Args:
        chain: L stages.
        budget_bytes: for all that `simulate` counts.
        slots: how many units the budget has. The table takes 8 * L**2 * slots bytes: 160 MB for 200 stages and 500. If
            left out, as many as a table of 64 MB holds, but 500 at least and 20,000 at most.

    Raises:
        InfeasibleBudget: no schedule fits; the least budget is named, exactly.
        TypeError, ValueError: an argument is not of its kind.

    Source: Beaumont et al., arXiv:1911.13214, theorem 1.
    """
    _check_chain(chain)
    _check_int("budget_bytes", budget_bytes, None)
    slots = min(max(500, 8_000_000 // len(chain) ** 2), 20_000) if slots is None else slots
    _check_int("slots", slots, 1)
    fastest = store_all(chain)
    if simulate(fastest, chain).peak_bytes <= budget_bytes:
        return fastest
    sizes = _Sizes(chain)
    least = _LeastMemory(sizes)
    least_bytes = chain.input_bytes + int(least.need[0, -1])
    if budget_bytes < least_bytes:
        raise InfeasibleBudget(budget_bytes, least_bytes)
    budget = budget_bytes - chain.input_bytes
    grain = int(
        np.gcd.reduce(
            np.concatenate([sizes.values[1:], sizes.saved, sizes.forward_overhead,
                            sizes.backward_overhead, sizes.unsaved_overhead])
        )
    )  # fmt: skip
    for finer in (1, 2, 4, 8, 16):
        unit = grain if budget // grain <= slots * finer else -(-budget // (slots * finer))
        table = _LeastTime(sizes, budget // unit, unit)
        if table.feasible():
            return table.schedule()
    return least.schedule()


class _LeastMemory:
    """need[s, t]: the least bytes, beyond x_s, with which stages s to t can be done."""

    def __init__(self, sizes: _Sizes):
        self.sizes, length = sizes, sizes.length
        self.need = np.full((length, length), _MANY, dtype=np.int64)
        for t in range(length):
            for s in reversed(range(t + 1)):
                keep, split = self.options(s, t)
                self.need[s, t] = min(keep, split.min(initial=_MANY))

    def options(self, s: int, t: int) -> tuple[int, np.ndarray]:
        """For keeping all of stage s, and for running on to x_e, e = s+1 to t."""
        sizes, keep = self.sizes, self.sizes.all_bytes(s, t)
        if s == t:
            return keep, np.empty(0, dtype=np.int64)
        keep = max(keep, int(self.need[s + 1, t] + sizes.saved[s]))
        right = self.need[s + 1 : t + 1, t] + sizes.values[s + 1 : t + 1]
        return keep, np.maximum(np.maximum(sizes.split_bytes(s, t), right), self.need[s, s:t])

    def schedule(self) -> Schedule:
        def choose(s: int, t: int, _) -> tuple[int | None, Any, Any]:
            keep, split = self.options(s, t)
            return (None if keep <= split.min(initial=_MANY) else s + 1 + int(split.argmin())), None, None

        return _assemble(self.sizes.length, None, choose)


class _LeastTime:
    """time[s, t, m]: the least time for stages s to t with m units beyond x_s; infinite if that is too little."""

    def __init__(self, sizes: _Sizes, units: int, unit: int):
        self.sizes, self.units, self.unit = sizes, units, unit
        self.saved, self.values = -(-sizes.saved // unit), -(-sizes.values // unit)
        length = sizes.length
        self.time = np.full((length, length, units + 1), np.inf)
        first = np.full((length, length), units + 1)  # the least m with a finite time
        room = np.empty((length, units + 1))
        for t in range(length):
            right = np.full((length + 1, units + 1), np.inf)  # right[e, m]: e to t within m, x_e included; + elapsed[e]
            for s in reversed(range(t + 1)):
                best = self.time[s, t]
                if s < t:
                    total = np.add(self.time[s, s:t], right[s + 1 : t + 1], out=room[: t - s])
                    needed = -(-sizes.split_bytes(s, t) // unit)
                    reached = np.maximum(first[s, s:t], first[s + 1 : t + 1, t] + self.values[s + 1 : t + 1])
                    for e in np.flatnonzero(needed > reached):  # where running there takes more than both parts
                        total[e, : needed[e]] = np.inf
                    np.minimum.reduce(total, axis=0, out=best)
                    best -= sizes.elapsed[s]
                np.minimum(best, self.keep(s, t), out=best)
                finite = np.isfinite(best)
                if finite.any():
                    first[s, t] = int(finite.argmax())
                    shift = int(self.values[s])
                    if shift <= units:
                        np.add(best[: units + 1 - shift], sizes.elapsed[s], out=right[s, shift:])

    def keep(self, s: int, t: int) -> np.ndarray:
        """The time, for every m, if all of stage s is kept."""
        own = self.sizes.forward[s] + self.sizes.backward[s]
        result = np.full(self.units + 1, np.inf)
        needed, saved = -(-self.sizes.all_bytes(s, t) // self.unit), int(self.saved[s])
        if s == t:
            result[needed:] = own
        elif needed <= self.units:
            result[needed:] = self.time[s + 1, t, needed - saved : self.units + 1 - saved] + own
        return result

    def feasible(self) -> bool:
        return bool(np.isfinite(self.time[0, -1, -1]))

    def schedule(self) -> Schedule:
        return _assemble(self.sizes.length, self.units, self.choose)

    def choose(self, s: int, t: int, m: int) -> tuple[int | None, int, int]:
        """Where to run on to (None: keep all of stage s); the units for what follows, and for what precedes."""
        after = m - int(self.saved[s])
        if s == t:
            return None, after, m
        ends = np.arange(s + 1, t + 1)
        left = m - self.values[ends]
        split = np.where(left >= 0, self.time[ends, t, np.maximum(left, 0)], np.inf)
        split = split + self.time[s, s:t, m] + (self.sizes.elapsed[ends] - self.sizes.elapsed[s])
        split[-(-self.sizes.split_bytes(s, t) // self.unit) > m] = np.inf
        if self.keep(s, t)[m] <= split.min():
            return None, after, m
        e = int(split.argmin())
        return s + 1 + e, int(left[e]), m


def _assemble(length: int, memory, choose) -> Schedule:
    """The schedule that follows from `choose(s, t, memory)`; a stack, since chains may be long."""
    actions: list[Action] = []
    waiting: list[tuple] = [(0, length - 1, memory)]
    while waiting:
        s, t, m = waiting.pop()
        if t is None:
            actions.append(Backward(s))
            continue
        end, after, before = choose(s, t, m)
        if end is None:
            actions.append(Forward(s, "all"))
            waiting.append((s, None, None))
            if s < t:
                waiting.append((s + 1, t, after))
        else:
            actions += _advance(s, end)
            waiting += [(s, end - 1, before), (end, t, after)]
    return Schedule(actions)


def frontier(chain: Chain) -> list[Cost]:
    """Every non-dominated (peak_bytes, seconds) of a persistent schedule, from the least peak to the least time.

    `optimal`'s recurrence, with the least time kept as a step function of the bytes, so that nothing is rounded. Times
    that differ by less than one part in 10^12 count as equal. Where times and sizes have little in common, the number
    of steps can grow quickly with L; then ask `optimal` for single budgets.

    Args:
        chain: L stages.

    Returns:
        Costs with rising `peak_bytes` and falling `seconds`; the last one has `store_all`'s time.

    Source: the recurrence of Beaumont et al., arXiv:1911.13214, theorem 1.
    """
    _check_chain(chain)
    sizes, length = _Sizes(chain), len(chain)
    steps: dict[tuple[int, int], _Steps] = {}
    for t in range(length):
        for s in reversed(range(t + 1)):
            own, all_bytes = float(sizes.forward[s] + sizes.backward[s]), sizes.all_bytes(s, t)
            if s == t:
                steps[s, t] = _Steps(np.array([all_bytes]), np.array([own]), np.array([1]))
                continue
            after = steps[s + 1, t]
            options = [(np.maximum(after.bytes + sizes.saved[s], all_bytes), after.seconds + own, after.forwards + 1)]
            for e, needed in zip(range(s + 1, t + 1), sizes.split_bytes(s, t), strict=True):
                count, seconds, forwards = _both(steps[e, t], int(sizes.values[e]), steps[s, e - 1], int(needed))
                options.append((count, seconds + (sizes.elapsed[e] - sizes.elapsed[s]), forwards + (e - s)))
            steps[s, t] = _non_dominated(*map(np.concatenate, zip(*options, strict=True)))
    return [
        Cost(int(count) + chain.input_bytes, float(seconds), int(forwards))
        for count, seconds, forwards in zip(*steps[0, length - 1], strict=True)
    ]


class _Steps(NamedTuple):
    """A falling step function: from `bytes[j]` on, the least time is `seconds[j]`, with `forwards[j]` forwards."""

    bytes: np.ndarray
    seconds: np.ndarray
    forwards: np.ndarray


def _both(right: _Steps, kept_bytes: int, left: _Steps, needed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The sum of two step functions, the right one with `kept_bytes` beside it, from `needed` bytes on."""
    shifted = right.bytes + kept_bytes
    start = max(shifted[0], left.bytes[0], needed)
    points = np.concatenate([[start], shifted[shifted > start], left.bytes[left.bytes > start]])
    i = np.searchsorted(shifted, points, side="right") - 1
    j = np.searchsorted(left.bytes, points, side="right") - 1
    return points, right.seconds[i] + left.seconds[j], right.forwards[i] + left.forwards[j]


def _non_dominated(count: np.ndarray, seconds: np.ndarray, forwards: np.ndarray) -> _Steps:
    order = np.lexsort((forwards, seconds, count))
    count, seconds, forwards = count[order], seconds[order], forwards[order]
    before = np.concatenate([[np.inf], np.minimum.accumulate(seconds)[:-1]])
    kept = seconds < before * (1 - 1e-12)
    return _Steps(count[kept], seconds[kept], forwards[kept])


# ---- execution


class ScheduledSequential(nn.Sequential):
    """Run a module's stages by a schedule, under autograd: outputs and gradients are those of the plain module.

    Every stage is one node of the graph, so gradients accumulate in the same order as without a schedule. Random
    numbers: a stage that draws some draws the same when it runs again. Running statistics of normalisation layers
    change in a stage's first run only. Autocast is as in the first run. Without gradients the stages just run.

    The bytes live are those that `simulate` counts for `Chain.profile`; on top come the states of the random number
    generators of stages that draw and run again (5,056 bytes each on the CPU), and the gradients of parameters. A
    stage hands on the gradients of its own parameters together, at the end of its backward: that is in the profile.

    Args:
        module: the chain, an `nn.Sequential`; its stages are shared, under the same names. A stage takes one tensor and
            returns one, does not change it in place, and computes the same each time. Gradients flow from stage to
            stage only.
        schedule: legal for as many stages.

    Raises:
        IllegalSchedule: the schedule is not legal for so many stages.
        TypeError: the module is no `nn.Sequential`, or a stage returns something else than one tensor.
        RuntimeError: a stage changes its input in place, or returns another shape or dtype when it runs again; the
            backward pass runs a second time, or is itself to be differentiated.
    """

    def __init__(self, module: nn.Sequential, schedule: Schedule):
        _check_module(module)
        if not isinstance(schedule, Schedule):
            raise TypeError(f"schedule is {type(schedule).__name__}; it takes a Schedule")
        simulate(schedule, Chain.uniform(len(module)))
        super().__init__()
        for name, stage in module._modules.items():
            self.add_module(name, stage)
        self.training = module.training
        self.schedule, self._length = schedule, len(module)

    def forward(self, x: Tensor) -> Tensor:
        stages = list(self)
        if len(stages) != self._length:
            raise ValueError(f"this module has {len(stages)} stages now, but its schedule is for {self._length}")
        if not torch.is_grad_enabled():
            return super().forward(x)
        run = _Run(stages, self.schedule, x)
        run.to_next_backward()
        value = x
        for i, stage in enumerate(stages):
            parameters = [parameter for parameter in stage.parameters() if parameter.requires_grad]
            value = _StageNode.apply(run, i, value, *parameters)
        return value


class _StageNode(torch.autograd.Function):
    """A stage in the outer graph. Between two of them goes a tensor of the right shape without memory of its own."""

    @staticmethod
    def forward(ctx, run: _Run, i: int, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.run, ctx.i = run, i
        if i + 1 == len(run.stages):
            return run.graphs[i][1].detach()
        shape, dtype, device = run.kinds[i]
        return torch.empty((), dtype=dtype, device=device).expand(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        return None, None, *ctx.run.backward(ctx.i, gradient)


class _Run:
    """What one forward and backward pass holds: the values, graphs and random states alive between actions."""

    def __init__(self, stages: list[nn.Module], schedule: Schedule, x: Tensor):
        self.stages, self.actions = stages, iter(schedule)
        self.due: int | None = None  # the stage whose backward comes next, once all before it has run
        self.left = Counter(action.stage for action in schedule if isinstance(action, Forward))  # runs to come
        self.values: dict[int, Tensor] = {0: x.detach()}
        self.graphs: dict[int, tuple[Tensor, Tensor]] = {}  # (input, output) of a stage that keeps all
        self.kinds: dict[int, tuple] = {}  # (shape, dtype, device) of each stage's output
        self.random: dict[int, list[Tensor]] = {}  # before the first run of a stage that draws and will run again
        trained = [any(parameter.requires_grad for parameter in stage.parameters()) for stage in stages]
        self.needs = list(accumulate(trained, lambda before, now: before or now, initial=x.requires_grad))
        self.autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in sorted({"cpu", x.device.type})
            if torch.amp.is_autocast_available(kind)
        ]

    def to_next_backward(self) -> None:
        """Run the forwards up to the next backward; `due` is then its stage."""
        with ExitStack() as modes:
            # No cache: a weight that is cast where nothing is kept must not be used where gradients are wanted.
            for kind, enabled, dtype in self.autocast:
                modes.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            for action in self.actions:
                if isinstance(action, Backward):
                    self.due = action.stage
                    return
                self.forward(*action)

    def forward(self, i: int, keep: str) -> None:
        x = self.values[i] if i in self.values else self.graphs[i - 1][1].detach()
        with torch.set_grad_enabled(keep == "all"):
            if keep == "all":
                x = x.detach().requires_grad_(self.needs[i] and _differentiable(x))
            # A view, because FlopCounterMode's hook on a module's input may not meet a leaf inside autograd.grad.
            output = self.call(i, x.view_as(x))
        if keep == "all":
            self.graphs[i] = (x, output)
            self.values.pop(i + 1, None)
        else:
            self.values[i + 1] = output
            if keep == "nothing":
                self.values.pop(i, None)

    def call(self, i: int, x: Tensor) -> Tensor:
        """Run stage i with the random numbers of its first run."""
        self.left[i] -= 1
        if i not in self.kinds:
            states = _random_states(x) if self.left[i] else None
            output = _call(i, self.stages[i], x)
            if states is not None and not _equal(states, _random_states(x)):
                self.random[i] = states
            self.kinds[i] = _kind(output)
            return output
        now = _random_states(x) if i in self.random else None
        try:
            if now is not None:
                _set_random_states(x, self.random[i] if self.left[i] else self.random.pop(i))
            output = _call(i, self.stages[i], x, spare_buffers=True)
        finally:
            if now is not None:
                _set_random_states(x, now)
        if _kind(output) != self.kinds[i]:
            raise RuntimeError(
                f"stage {i} returned {_kind(output)} when it ran again, but {self.kinds[i]} at first; "
                "a schedule takes stages that compute the same each time"
            )
        return output

    def backward(self, i: int, gradient: Tensor) -> list[Tensor | None]:
        """The gradients of the input of stage i and of its parameters."""
        if self.due is None:
            self.to_next_backward()
        if self.due != i:
            raise RuntimeError(
                "this backward pass has run already, and what the schedule kept for it is gone: "
                "call the module again instead of backward() with retain_graph=True"
            )
        self.due = None
        x, output = self.graphs.pop(i)
        wanted = _wanted(self.stages[i], x)
        if output.requires_grad:
            found = list(torch.autograd.grad(output, wanted, gradient, allow_unused=True))
        else:
            found = [None] * len(wanted)
        self.values.pop(i, None)
        self.values.pop(i + 1, None)
        return found if x.requires_grad else [None, *found]


def _wanted(stage: nn.Module, x: Tensor) -> list[Tensor]:
    """What the backward of a stage computes gradients of: its input, where one is needed, and its parameters."""
    return [tensor for tensor in (x, *stage.parameters()) if tensor.requires_grad]


def _differentiable(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _kind(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
    return tuple(tensor.shape), tensor.dtype, tensor.device


def _call(i: int, stage: nn.Module, x: Tensor, *, spare_buffers: bool = False) -> Tensor:
    """Stage i on x; with `spare_buffers`, the running statistics of its normalisation layers stay as they are."""
    version, statistics_of = x._version, {}
    if spare_buffers:
        for name, layer in stage.named_modules():
            if isinstance(layer, _NormBase) and layer.training:
                prefix = f"{name}." if name else ""
                statistics_of |= {prefix + key: buffer.clone() for key, buffer in layer.named_buffers(recurse=False)}
    output = torch.func.functional_call(stage, statistics_of, (x,)) if statistics_of else stage(x)
    if not isinstance(output, Tensor):
        raise TypeError(f"stage {i} returned {type(output).__name__}; every stage of a chain returns one tensor")
    if x._version != version:
        raise RuntimeError(
            f"stage {i} changed its input in place, but a schedule may need it again; make it out of place"
        )
    return output


def _random_states(x: Tensor) -> list[Tensor]:
    """The states of the CPU's random number generator and of the one of x's device."""
    device = getattr(torch, x.device.type, None)
    if x.device.type in ("cpu", "meta") or not hasattr(device, "get_rng_state"):
        return [torch.get_rng_state()]
    return [torch.get_rng_state(), device.get_rng_state(x.device)]


def _equal(states: list[Tensor], others: list[Tensor]) -> bool:
    with _disable_current_modes():  # these are no symbolic tensors, even where the stages run on such
        return all(map(torch.equal, states, others))


def _set_random_states(x: Tensor, states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        getattr(torch, x.device.type).set_rng_state(states[1], x.device)


# ---- helpers for arguments


def _unsaved_overhead(stage: Stage) -> int:
    return stage.forward_overhead_bytes if stage.unsaved_overhead_bytes is None else stage.unsaved_overhead_bytes


def _check_int(name: str, value: Any, least: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} is {value!r}; it takes a whole number")
    if least is not None and value < least:
        raise ValueError(f"{name} is {value}; it takes {least} or more")


def _check_chain(chain: Any) -> None:
    if not isinstance(chain, Chain):
        raise TypeError(f"chain is {type(chain).__name__}; it takes a Chain")


def _check_module(module: Any) -> None:
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            f"module is {type(module).__name__}; it takes an nn.Sequential whose children each turn one tensor into one"
        )
    if not len(module):
        raise ValueError("module has no stages; it takes an nn.Sequential with one child or more")
