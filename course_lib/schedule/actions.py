"""Schedules as sequences of actions, their simulated cost, and a plot.

A schedule lists which stage runs when, and what each forward keeps. This module does not run any
stage. The modules `executor` and `blocks` run stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from course_lib._check import kind, one_of, whole

from .chain import Chain

# The colors also differ in lightness, for color-blind people and for grayscale prints.
COLORS = {"all": "#228833", "input": "#224488", "nothing": "#BBBBBB", "backward": "#EE6677"}
KEEPS = ("all", "input", "nothing")


class Forward(NamedTuple):
    """Action of a schedule: run the forward of stage i (a layer, for example) on its input x_i.

    Attributes:
        stage: The stage's number, i.
        keep: Values that stay in memory after the action, in addition to the stage's output. "all"
            keeps everything that the stage's backward needs, "input" keeps x_i, and "nothing"
            releases x_i.
    """

    stage: int
    keep: str = "all"


class Backward(NamedTuple):
    """Action of a schedule: run the backward of stage i (a layer, for example).

    The backward computes the gradient of the stage's input x_i from the gradient of its output
    x_{i+1}.

    Attributes:
        stage: The stage's number, i.
    """

    stage: int


Action = Forward | Backward


class Schedule(Sequence):
    """An immutable sequence of `Forward` and `Backward` actions of the stages of a network.

    It determines which values are kept for backward, and which stages run again. Creating a
    schedule does not check whether it can run: `simulate` checks this for a chain of stages.

    Args:
        actions: The actions, in the order in which they run.

    Raises:
        TypeError, ValueError: An element is not an action.
    """

    def __init__(self, actions: Iterable[Action]):
        self._actions = tuple(actions)
        for number, action in enumerate(self._actions):
            if type(action) is Forward and type(action.stage) is int and action.keep in KEEPS:
                continue  # skip the slow checks below, because schedules may be long
            kind(
                f"action {number}",
                action,
                (Forward, Backward),
                "a Forward(stage, keep) or a Backward(stage)",
            )
            whole(f"the stage of action {number}", action.stage)
            if isinstance(action, Forward):
                one_of(f"keep of action {number}", action.keep, KEEPS)

    def __len__(self) -> int:
        return len(self._actions)

    def __iter__(self) -> Iterator[Action]:
        return iter(self._actions)

    def __getitem__(self, index):
        return Schedule(self._actions[index]) if isinstance(index, slice) else self._actions[index]

    def __eq__(self, other) -> bool:
        return self._actions == other._actions if isinstance(other, Schedule) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._actions)

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self._actions[:4]))
        return f"Schedule of {len(self)} actions: {shown}{', ...' if len(self) > 4 else ''}"

    def plot(self, ax=None, *, chain=None):
        """Plot the schedule, with time on the x axis and stages on the y axis.

        Bars show when each action runs, and how long values are kept.

        Args:
            ax: Matplotlib axes. By default new axes are made.
            chain: `Chain` with the times of the stages. By default each forward takes 1 unit of
                time and each backward takes 2.

        Returns:
            The axes.
        """
        return _draw(self, ax, chain)


# ---- the cost of a schedule


class IllegalSchedule(ValueError):
    """Error for a schedule that cannot run, for example because a stage's input is not live.

    `simulate` describes the rules. The message has the first illegal action and the broken rule.
    """


@dataclass(frozen=True)
class Cost:
    """Memory and time of a schedule, as `simulate` computes them for the stages of a `Chain`.

    Attributes:
        peak_bytes: Largest number of bytes that are live during an action.
        time: Sum of the times of all actions, in the chain's unit of time.
        forward_steps: Number of forward actions, including those that run a stage again.
    """

    peak_bytes: int
    time: float
    forward_steps: int


def simulate(schedule: Sequence[Action], chain: Chain) -> Cost:
    """Compute the cost of a schedule for a chain: its peak bytes, time and number of forwards.

    The function also checks that the schedule is legal. The chain has L stages, 0 to L-1. Stage i
    computes x_{i+1} from x_i. Three kinds of data can be live:

    - a value x_i. Its size is the `input_bytes` of the chain for i = 0, and the `output_bytes` of
      stage i-1 otherwise.
    - S_i, everything that stage i saved for its backward. Its size is the `saved_bytes` of stage i.
      S_i contains x_{i+1}.
    - the gradient d_i of one value x_i. It has the same size as x_i.

    At the start only x_0 is live. A value x_i can be live as a part of S_{i-1}, or by itself,
    without S_{i-1}. An action that needs x_i can run in either case.

    - `Forward(i, "all")` needs x_i. It creates S_i. If x_{i+1} is live by itself, it is released,
      because S_i contains it.
    - `Forward(i, "input")` needs x_i. It creates x_{i+1}.
    - `Forward(i, "nothing")` needs x_i. It creates x_{i+1}. Then it releases x_i if x_i is live by
      itself. It does not release S_{i-1}.
    - `Backward(i)` needs S_i, x_i and d_{i+1}. It creates d_i, and releases S_i and d_{i+1}. It
      also releases each of x_i and x_{i+1} that is live by itself. Because d_{i+1} is needed, each
      backward runs once, in the order from stage L-1 down to stage 0. The gradient d_L of the
      chain's output becomes live at the beginning of `Backward(L-1)`.

    While an action runs, the bytes that were live before it are live, plus additional bytes:

    - For a forward, the additional bytes are the sum of `saved_bytes` and `forward_overhead_bytes`,
      whatever `keep` is. The full sum counts even if S_i or x_{i+1} is live already.
    - For a backward, the additional bytes are `backward_overhead_bytes`. The simulation assumes
      that a backward creates d_i in the memory that it releases. If a real backward needs more
      memory for d_i, the overhead includes the difference. The overhead also includes the gradients
      of the stage's parameters, which no longer count after the stage's backward.

    Args:
        schedule: The actions.
        chain: The chain on which they run.

    Returns:
        The cost. Bytes are exact for these rules, and the time has the chain's unit.

    Raises:
        IllegalSchedule: An action breaks a rule, or the backward of some stage is missing.

    Source: Beaumont et al., arXiv:1911.13214, section 3, except that d_L counts only from
    Backward(L-1) on, since the loss is not a stage here.
    """
    simulation = Simulation(chain)
    for action in schedule if isinstance(schedule, Schedule) else Schedule(schedule):
        simulation.run_action(action)
    if simulation.next_backward >= 0:
        raise IllegalSchedule(
            f"the schedule ends after {simulation.number} actions, but the backward of every stage"
            f" must run and Backward({simulation.next_backward}) has not run"
        )
    return Cost(simulation.peak_bytes, math.fsum(simulation.times), simulation.forward_steps)


class Simulation:
    """Simulation of a schedule: the data that are live at present, and the cost so far.

    Stage i computes x_{i+1} from x_i, and S_i is everything that it saved for its backward. S_i
    contains x_{i+1}. `simulate` describes the rules.

    Attributes:
        inputs: Set of every i for which x_i is live by itself, not only as a part of S_{i-1}.
        saved: Set of every i for which S_i is live.
        next_backward: Number of the stage whose backward must run next; -1 after the last one.
        live_bytes: Bytes live after the last action.
        during_bytes: Bytes live during the last action.
        peak_bytes: Largest number of bytes live during an action so far.
        times: Durations of the actions so far, in the chain's unit of time.
        number: Number of actions so far.
        forward_steps: Number of forward actions so far.
    """

    def __init__(self, chain: Chain):
        self.stages = kind("chain", chain, Chain, "a Chain").stages
        self.value_bytes = [chain.input_bytes, *(stage.output_bytes for stage in chain.stages)]
        self.inputs = {0}
        self.saved: set[int] = set()
        self.next_backward = len(chain) - 1
        self.live_bytes = self.peak_bytes = self.during_bytes = chain.input_bytes
        self.times: list[float] = []
        self.forward_steps = self.number = 0

    def run_action(self, action: Action) -> None:
        """Simulate one action: update the live data and the cost.

        Raises:
            IllegalSchedule: The action breaks a rule of `simulate`.
        """
        i = action.stage
        if not 0 <= i < len(self.stages):
            self.raise_illegal(
                action, f"the chain or module has only the stages 0 to {len(self.stages) - 1}"
            )
        if isinstance(action, Forward):
            self.forward(action, i)
        else:
            self.backward(action, i)
        self.number += 1

    def forward(self, action: Forward, i: int) -> None:
        """Simulate a forward action: check its inputs, and update the live data and the cost.

        `inputs` and `saved` change as `action.keep` requires. `live_bytes`, `during_bytes`,
        `peak_bytes`, `times` and `forward_steps` are updated as well. `run_action` updates
        `number`.

        Args:
            action: The action.
            i: Number of the action's stage, `action.stage`. It must be a stage of the chain.

        Raises:
            IllegalSchedule: The backward of stage i has run already, or the stage's input x_i is
                not live.
        """
        if i > self.next_backward:
            self.raise_illegal(action, "a stage does not run again after its backward")
        if i not in self.inputs and i - 1 not in self.saved:
            self.raise_illegal(action, f"stage {i} needs its input x_{i}, which is not live")
        stage = self.stages[i]
        self.record_peak(stage.saved_bytes + stage.forward_overhead_bytes)
        self.release_value(i + 1)
        if action.keep == "all":
            self.live_bytes += 0 if i in self.saved else stage.saved_bytes
            self.saved.add(i)
        else:
            self.live_bytes += stage.output_bytes
            self.inputs.add(i + 1)
            if action.keep == "nothing":
                self.release_value(i)
        self.times.append(stage.forward_time)
        self.forward_steps += 1

    def backward(self, action: Backward, i: int) -> None:
        """Simulate a backward action: check its inputs, and update the live data and the cost.

        The number i is removed from `saved`, and i and i + 1 are removed from `inputs` if they are
        in this set. `live_bytes`, `during_bytes`, `peak_bytes` and `times` are updated, and
        `next_backward` becomes i - 1. `run_action` updates `number`.

        Args:
            action: The action.
            i: Number of the action's stage, `action.stage`. It must be a stage of the chain.

        Raises:
            IllegalSchedule: The backward of stage i is not the next one, or the stage's saved data
                S_i or its input x_i is not live.
        """
        if i != self.next_backward:
            state = (
                f"Backward({self.next_backward}) is next"
                if self.next_backward >= 0
                else "all of them have run"
            )
            self.raise_illegal(
                action, f"each backward runs once, from the last stage to the first, and {state}"
            )
        if i not in self.saved:
            self.raise_illegal(
                action,
                f"the backward of stage {i} needs the tensors that Forward({i}, 'all') saves"
                f" (S_{i}), which are not live; run Forward({i}, 'all') before it",
            )
        if i not in self.inputs and i - 1 not in self.saved:
            self.raise_illegal(
                action,
                f"the backward of stage {i} needs the stage's input x_{i}, which is not live",
            )
        stage = self.stages[i]
        if i == len(self.stages) - 1:
            self.live_bytes += stage.output_bytes  # d_L, the gradient of the chain's output
        self.record_peak(stage.backward_overhead_bytes)
        self.saved.remove(i)
        self.release_value(i)
        self.release_value(i + 1)
        self.live_bytes += self.value_bytes[i] - stage.saved_bytes - stage.output_bytes
        self.next_backward -= 1
        self.times.append(stage.backward_time)

    def record_peak(self, more_bytes: int) -> None:
        """Record the bytes that are live during an action, and update the peak.

        Args:
            more_bytes: Bytes that the action needs while it runs, in addition to `live_bytes`.
        """
        self.during_bytes = self.live_bytes + more_bytes
        self.peak_bytes = max(self.peak_bytes, self.during_bytes)

    def release_value(self, i: int) -> None:
        """Release x_i, the input of stage i, if it is live by itself.

        If stage i-1 has saved x_i for its backward, the saved value stays live.
        """
        if i in self.inputs:
            self.inputs.remove(i)
            self.live_bytes -= self.value_bytes[i]

    def raise_illegal(self, action: Action, reason: str) -> None:
        """Raise an `IllegalSchedule` error whose message has the action and the reason."""
        raise IllegalSchedule(f"action {self.number}, {action!r}, is illegal: {reason}")


# ---- the plot


def _draw(schedule: Schedule, ax, chain: Chain | None):
    """Draw a schedule on axes; `Schedule.plot` describes the arguments."""
    if ax is None:  # before the imports below, so that a missing matplotlib raises a clear error
        from course_lib.labels.drawing import pyplot

        ax = pyplot().subplots()[1]
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Patch, Rectangle

    def draw_bars(spans: list[tuple], kind: str, **style) -> None:
        rectangles = [
            Rectangle((start, i - 0.5), end - start, 1.0)
            for i, start, end, kind_of_bar in spans
            if kind_of_bar == kind
        ]
        ax.add_collection(PatchCollection(rectangles, facecolor=COLORS[kind], **style))

    if chain is None:
        chain = Chain.uniform(1 + max(action.stage for action in schedule))
    runs, kept = _bars(schedule, chain)
    draw_bars(kept, "all", alpha=0.25, linewidth=0)
    draw_bars(kept, "input", alpha=0.35, linewidth=0)
    for kind_of_bar in COLORS:
        edge = (
            {"edgecolor": "#888888", "linewidth": 0.6}
            if kind_of_bar == "nothing"
            else {"linewidth": 0}
        )
        draw_bars(runs, kind_of_bar, **edge)
    ax.set(xlim=(0, max(end for _, _, end, _ in runs) or 1), ylim=(-0.5, len(chain) - 0.5))
    ax.set(xlabel="time", ylabel="stage")
    labels = {
        "all": "keep all",
        "input": "keep input",
        "nothing": "keep nothing",
        "backward": "backward",
    }
    ax.legend(
        handles=[
            Patch(color=COLORS[kind_of_bar], label=label) for kind_of_bar, label in labels.items()
        ],
        fontsize="small",
    )
    return ax


def _bars(schedule: Schedule, chain: Chain) -> tuple[list[tuple], list[tuple]]:
    """Return the bars of a plot, as two lists: actions that run, and values that are kept.

    A bar is (stage, start, end, kind). Start and end are in the chain's unit of time. The kind of
    an action is a key of `COLORS`, and the kind of a kept value is "all" or "input".
    """
    simulation = Simulation(chain)
    now = 0.0
    runs = []
    kept = []
    start_times: dict[tuple[int, str], float] = {}
    for action in schedule:
        simulation.run_action(action)
        start, now = now, now + simulation.times[-1]
        runs.append(
            (action.stage, start, now, "backward" if isinstance(action, Backward) else action.keep)
        )
        # x_L has no bar of its own, because it is not the input of any stage.
        alive = {(i, "input") for i in simulation.inputs if i < len(chain)} | {
            (i, "all") for i in simulation.saved
        }
        for value in alive - start_times.keys():
            start_times[value] = start
        for value in start_times.keys() - alive:
            kept.append((value[0], start_times.pop(value), now, value[1]))
    kept += [(i, start, now, kind_of_bar) for (i, kind_of_bar), start in start_times.items()]
    return runs, kept
