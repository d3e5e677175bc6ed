"""The referee: whether a schedule is legal for a chain, and exactly what it costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from course_lib._check import kind

from .actions import Action, Backward, Forward, check_action
from .chain import Chain


class IllegalSchedule(ValueError):
    """An action of a schedule breaks a rule of `simulate`; the message says which action and which rule."""


@dataclass(frozen=True)
class Cost:
    """What a schedule costs on a chain.

    Attributes:
        peak_bytes: the most bytes live during an action.
        time: the sum of the actions' times, in the chain's unit.
        forward_steps: how many of the actions are forwards.
    """

    peak_bytes: int
    time: float
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

    Live during an action is all that is alive before it, plus what it makes, plus its overhead. A forward takes
    `saved_bytes` and `forward_overhead_bytes` while it runs, whatever it keeps, also if the same is alive already. A
    backward makes d_i in place of what it ends; where a real one needs more, that is `backward_overhead_bytes`. The
    gradients of parameters count there, until the stage's backward is done.

    Args:
        schedule: the actions.
        chain: the chain they are for.

    Raises:
        IllegalSchedule: an action breaks a rule, or stages are left without their backward.

    Source: Beaumont et al., arXiv:1911.13214, section 3; but d_L counts only from Backward(L-1) on, since the loss is
    not a stage here.
    """
    referee = Referee(chain)
    for action in schedule:
        referee.take(action)
    if referee.next_backward >= 0:
        raise IllegalSchedule(
            f"the schedule ends after {referee.number} actions, but each stage needs its backward and "
            f"Backward({referee.next_backward}) has not run"
        )
    return Cost(referee.peak_bytes, math.fsum(referee.times), referee.forward_steps)


class Referee:
    """What is alive while a schedule runs."""

    def __init__(self, chain: Chain):
        self.stages = kind("chain", chain, Chain, "a Chain").stages
        self.value_bytes = [chain.input_bytes, *(stage.output_bytes for stage in chain.stages)]
        self.inputs = {0}  # i: x_i is alive by itself
        self.saved: set[int] = set()  # i: S_i is alive
        self.next_backward = len(chain) - 1
        self.live_bytes = self.peak_bytes = chain.input_bytes
        self.times: list[float] = []
        self.forward_steps = self.number = 0

    def take(self, action: Action) -> None:
        check_action(self.number, action)
        i = action.stage
        if not 0 <= i < len(self.stages):
            self.refuse(action, f"this chain has the stages 0 to {len(self.stages) - 1}")
        if isinstance(action, Forward):
            self.forward(action, i)
        else:
            self.backward(action, i)
        self.number += 1

    def forward(self, action: Forward, i: int) -> None:
        if i > self.next_backward:
            self.refuse(action, "a stage does not run again after its backward")
        if i not in self.inputs and i - 1 not in self.saved:
            self.refuse(action, f"a stage runs only with its input alive, and x_{i} is not")
        stage = self.stages[i]
        self.count(stage.saved_bytes + stage.forward_overhead_bytes)
        self.drop(i + 1)
        if action.keep == "all":
            self.live_bytes += 0 if i in self.saved else stage.saved_bytes
            self.saved.add(i)
        else:
            self.live_bytes += stage.output_bytes
            self.inputs.add(i + 1)
            if action.keep == "nothing":
                self.drop(i)
        self.times.append(stage.forward_time)
        self.forward_steps += 1

    def backward(self, action: Backward, i: int) -> None:
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
        self.count(stage.backward_overhead_bytes)
        self.saved.remove(i)
        self.drop(i)
        self.drop(i + 1)
        self.live_bytes += self.value_bytes[i] - stage.saved_bytes - stage.output_bytes
        self.next_backward -= 1
        self.times.append(stage.backward_time)

    def count(self, more_bytes: int) -> None:
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + more_bytes)

    def drop(self, i: int) -> None:
        if i in self.inputs:
            self.inputs.remove(i)
            self.live_bytes -= self.value_bytes[i]

    def refuse(self, action: Action, rule: str) -> None:
        raise IllegalSchedule(f"action {self.number}, {action!r}, is illegal: {rule}")
