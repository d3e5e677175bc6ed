"""Schedules: lists of what runs when, and of what each forward keeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from course_lib._check import kind, one_of, whole

KEEPS = ("all", "input", "nothing")


class Forward(NamedTuple):
    """Run stage i on x_i. What it keeps: "all" for its backward, its "input" alone, or "nothing"."""

    stage: int
    keep: str = "all"


class Backward(NamedTuple):
    """Run the backward of stage i: from the gradient of x_{i+1} to that of x_i."""

    stage: int


Action = Forward | Backward


def check_action(number: int, action: Action) -> None:
    if type(action) is Forward and type(action.stage) is int and action.keep in KEEPS:
        return  # the common case at once: schedules may be long
    kind(f"action {number}", action, (Forward, Backward), "a Forward(stage, keep) or a Backward(stage)")
    whole(f"the stage of action {number}", action.stage)
    if isinstance(action, Forward):
        one_of(f"keep of action {number}", action.keep, KEEPS)


class Schedule(Sequence):
    """An immutable sequence of `Forward` and `Backward` actions. `simulate` says whether it is legal for a chain.

    Raises:
        TypeError, ValueError: one of the actions is no action.
    """

    def __init__(self, actions: Iterable[Action]):
        self._actions = tuple(actions)
        for number, action in enumerate(self._actions):
            check_action(number, action)

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
        """Draw time on x and stage on y: what runs, and as bars behind it what is kept.

        Args:
            ax: matplotlib's axes; new ones if left out.
            chain: for its times; a uniform chain if left out.

        Returns:
            The axes.
        """
        from .pictures import draw

        return draw(self, ax, chain)
