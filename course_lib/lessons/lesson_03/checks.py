"""The exercises of lesson 03 on schedules: the recurrence, and schedules written by hand."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from course_lib.schedule import (
    Backward,
    Chain,
    Cost,
    Forward,
    IllegalSchedule,
    Schedule,
    Stage,
    optimal,
    simulate,
)
from course_lib.teaching import Verdict, text
from course_lib.teaching.exercises import WrongAnswer, exercise, not_answered, right, wrong

# The recurrence
# --------------------------------------------------------------------------------------------------


def every_schedule(first: int, last: int) -> Iterator[list]:
    """Yield all persistent schedules of stages `first` to `last`, as lists of actions.

    There are 1, 2, 6, 22, 90, 394 for one to six stages (the large Schröder numbers).
    """
    if first > last:
        yield []
        return
    for rest in every_schedule(first + 1, last):
        yield [Forward(first, "all"), *rest, Backward(first)]
    for end in range(first + 1, last + 1):
        ahead = [Forward(first, "input"), *(Forward(i, "nothing") for i in range(first + 1, end))]
        for later in every_schedule(end, last):
            for earlier in every_schedule(first, end - 1):
                yield [*ahead, *later, *earlier]


def _uneven_chain(*sizes: tuple[float, float, int, int], input_bytes: int = 1) -> Chain:
    """Return a chain from tuples (forward time, backward time, output bytes, saved bytes)."""
    return Chain(tuple(Stage(*each) for each in sizes), input_bytes)


# Chains with boundaries of one byte, and others. In each chain, running on fits whenever the
# backward that follows fits, as the lesson says. Otherwise the recurrence would need one more
# check.
_CHAINS = (
    Chain.uniform(4, saved_bytes=2),
    _uneven_chain((1, 2, 1, 3), (5, 9, 1, 1), (2, 4, 1, 6), (1, 1, 1, 2), (4, 8, 1, 2)),
    _uneven_chain((3, 6, 1, 2), (1, 2, 1, 5), (6, 12, 1, 1), (2, 4, 1, 4), (1, 2, 1, 3)),
    _uneven_chain(
        (1, 2, 2, 3), (3, 6, 1, 1), (3, 6, 2, 6), (4, 8, 3, 7), (2, 4, 3, 5), input_bytes=2
    ),
)


@cache
def _least_times() -> list[list[float]]:
    """Return the least times of each chain with 1, 2, ... bytes besides its input.

    They are found by simulating every schedule.
    """
    found = []
    for chain in _CHAINS:
        costs = [simulate(actions, chain) for actions in every_schedule(0, len(chain) - 1)]
        most = max(cost.peak_bytes for cost in costs)
        budgets = range(chain.input_bytes + 1, most + 3)
        found.append(
            [
                min((c.time for c in costs if c.peak_bytes <= budget), default=math.inf)
                for budget in budgets
            ]
        )
    return found


def _fastest(stages: tuple[Stage, ...], room: int, mistake: str) -> float:
    """Return the least time of the stages by the recurrence, with one mistake in it.

    Args:
        stages: The stages that are left to do.
        room: Bytes besides the input of the first stage.
        mistake: A key of `_MISTAKES`, which says what the mistake is.
    """
    if not stages:
        return 0
    first, best = stages[0], math.inf
    taken = (
        first.saved_bytes
        + (0 if mistake == "gradient" else first.output_bytes)
        + (mistake == "strictly")
    )
    if (taken <= room or mistake == "fits") and (mistake != "one at a time" or len(stages) == 1):
        left = room - {"kept": 0, "gradient kept": taken}.get(mistake, first.saved_bytes)
        backward = 0 if mistake == "backward" else first.backward_time
        forward = 0 if mistake == "forward" else first.forward_time
        best = forward + _fastest(stages[1:], left, mistake) + backward
    ends = {"never runs on": (), "one step": range(1, min(2, len(stages)))}.get(
        mistake, range(1, len(stages))
    )
    for end in () if mistake == "greedy" and best < math.inf else ends:
        before, behind = stages[end - 1], stages[end]
        boundary = {
            "saved": before.saved_bytes,
            "next": behind.output_bytes,
            "one byte": 1,
            "input": 0,
        }
        kept = boundary.get(mistake, before.output_bytes)
        passed = {
            "time": (),
            "too far": stages[: end + 1],
            "not the first": stages[1:end],
            "only the first": stages[:1],
        }
        ahead = sum(stage.forward_time for stage in passed.get(mistake, stages[:end]))
        earlier = room - kept if mistake == "gone" else room
        again = 0 if mistake == "earlier" else _fastest(stages[:end], earlier, mistake)
        way = ahead + _fastest(stages[end:], room - kept, mistake) + again
        best = way if mistake == "last way" else min(best, way)
    return best


#: One message for three mistakes.
_PASSED = (
    "You added the forward times of the wrong stages. On the way to `e`, exactly `stages[:e]`"
    " are passed."
)
#: Mistake in the recurrence -> verdict.
_MISTAKES = {
    "gradient": (
        "You left out the gradient that comes in. Backward needs `saved_bytes + output_bytes`."
    ),
    "fits": "Your function never compares bytes with `room`. Check whether what the first stage"
    " keeps fits.",
    "strictly": "You wrote `<`. Use `<=`, because bytes that fill `room` exactly fit.",
    "kept": (
        "You gave the other stages all of `room`. What the first stage keeps stays in memory,"
        " so they have `saved_bytes` less."
    ),
    "gradient kept": (
        "You subtracted the gradient for the other stages, too. It is in memory only during"
        " the first stage's backward, so they have only `saved_bytes` less."
    ),
    "backward": "You left out the `backward_time` of the stage that is kept whole.",
    "forward": "You left out the `forward_time` of the stage that is kept whole.",
    "input": "You gave the later stages all of `room`. The input that is kept takes some of it.",
    "one byte": (
        "You took 1 byte for the input that is kept. It takes the `output_bytes` of the stage"
        " before it."
    ),
    "next": "You took the output of `stages[e]`. Its input is the output of the stage before it,"
    " `stages[e - 1]`.",
    "saved": (
        "You took `saved_bytes` for the input that is kept. An input takes the `output_bytes`"
        " of the stage before it."
    ),
    "gone": (
        "You gave the earlier stages too little. By then the input that was kept has been"
        " released, so they have all of `room`."
    ),
    "time": "You left out the time of running on, which is the forward times of the stages that"
    " are passed.",
    "too far": _PASSED,
    "not the first": _PASSED,
    "only the first": _PASSED,
    "last way": "You returned the time of the last way that you tried. Return the least of all of"
    " them.",
    "earlier": "You left out `stages[:e]`. These stages still have to be done.",
    "greedy": (
        "You run on only if keeping all does not fit. Running on may still be faster, so"
        " compare both ways."
    ),
    "one step": "You run on by one stage only. Try every later stage.",
    "one at a time": (
        "You keep all of a stage only if it is the last one left. Keeping several stages"
        " whole at once may be faster."
    ),
}


@exercise(
    hint=(
        (
            "On the way to stage e, the stages before it run forward once. Then the stages from e"
            " on are done, and then the stages before e."
        ),
        (
            "Add the forward times of `stages[:e]`, then `fastest` of `stages[e:]` with the kept"
            " input's bytes less, then `fastest` of `stages[:e]` with all of `room`."
        ),
    )
)
def check_recurrence(answer: Any) -> Verdict:
    """Check `fastest(stages, room)` on four chains with every useful `room`, a number of bytes.

    The right times are found by simulating every schedule.
    """
    wanted = _least_times()
    try:
        given = [
            _table_of(answer, chain, len(times))
            for chain, times in zip(_CHAINS, wanted, strict=True)
        ]
    except RecursionError:
        message = (
            "Your function calls itself without end. Each call must have fewer stages, so e"
            " must begin at 1 and be at most the last index."
        )
        return wrong(message, exact=True)
    unanswered = _times_with("never runs on")
    if given == unanswered or any(one is None for times in given for one in times):
        return not_answered()
    if given == wanted:
        number = sum(len(times) for times in wanted)
        return right(
            text(
                "Right: in all {number} cases, your time is that of the fastest schedule that"
                " discards nothing early.",
                number=number,
            )
        )
    for mistake, reason in _MISTAKES.items():
        if given == _times_with(mistake):
            return wrong(text("Not yet. {reason}", reason=text(reason)), exact=True)
    return _first_difference(given, wanted)


@cache
def _times_with(mistake: str) -> list[list[float]]:
    """Return the recurrence's times with a mistake in it, for each chain and budget."""
    chains = zip(_CHAINS, _least_times(), strict=True)
    return [
        _table_of(lambda stages, room: _fastest(stages, room, mistake), chain, len(times))
        for chain, times in chains
    ]


def _table_of(fastest: Callable, chain: Chain, count: int) -> list:
    """Return the times that `fastest` gives for 1, 2, ..., `count` bytes besides the input."""
    return [fastest(chain.stages, room) for room in range(1, count + 1)]


def _first_difference(given: list[list], wanted: list[list[float]]) -> Verdict:
    """Return the verdict on the first chain and number of bytes with a wrong time."""
    for chain, (times, least) in enumerate(zip(given, wanted, strict=True)):
        for room, (one, best) in enumerate(zip(times, least, strict=True), start=1):
            if one != best:
                try:
                    shown = f"{float(one + 0.0):g}"
                except TypeError:
                    kind = type(one).__name__
                    return wrong(
                        text("Expected one number, got a `{kind}`.", kind=kind), exact=True
                    )
                values = {
                    "length": len(_CHAINS[chain]),
                    "room": room,
                    "given": shown,
                    "best": f"{best:g}",
                }
                return wrong(
                    text(
                        "Not yet: for {length} stages and room = {room}, the least time is"
                        " {best}, but you return {given}.",
                        **values,
                    )
                )
    raise AssertionError("the tables do not differ")


# Schedules by hand
# --------------------------------------------------------------------------------------------------


@exercise(
    hint=(
        (
            "Use segments that get shorter. Keep the input of each segment, then work from"
            " the last segment to the first."
        ),
        (
            'Use four segments of 2, 2, 1 and 1 stages. Begin with `Forward(0, "input")` and'
            ' `Forward(1, "nothing")`.'
        ),
    )
)
def check_drawn_schedule(actions: Any) -> Verdict:
    """Check a schedule for `Chain.uniform(6, saved_bytes=2)`.

    Its peak must be at most 7, with at most 11 forwards.
    """
    if isinstance(actions, list | tuple) and (... in actions or not actions):
        return not_answered()
    cost = _simulate(actions, Chain.uniform(6, saved_bytes=2))
    found = {"peak": cost.peak_bytes, "forwards": cost.forward_steps}
    if cost.peak_bytes <= 7 and cost.forward_steps <= 11:
        return right(text("Right: the peak is {peak}, with {forwards} forwards.", **found))
    return wrong(
        text(
            "Your schedule is legal, but it exceeds a limit: its peak is {peak}, and it has"
            " {forwards} forwards.",
            **found,
        )
    )


def five_stages() -> Chain:
    """Return five stages for which a schedule that is not persistent is the fastest in 13 bytes."""
    # (forward time, output bytes, saved bytes)
    sizes = [(10, 2, 3), (5, 4, 4), (5, 4, 4), (5, 1, 1), (10, 4, 4)]
    return Chain(tuple(Stage(forward, 1, output, kept) for forward, output, kept in sizes), 1)


@exercise(
    hint=(
        (
            "On the way, keep the inputs of stages 0 and 1. From which of them will you run"
            " forward only once more?"
        ),
        (
            'After the backward of stage 4, go from x_1 to x_2 with `Forward(1, "nothing")`.'
            " This releases x_1, so all of stages 2 and 3 fit."
        ),
    )
)
def check_gives_up_early(actions: Any) -> Verdict:
    """Check a schedule for `five_stages()` in 13 bytes that is faster than all persistent ones."""
    if isinstance(actions, Sequence) and [*actions] in ([], [*optimal(five_stages(), 13)]):
        return not_answered()
    cost = _simulate(actions, five_stages())
    found = {"peak": cost.peak_bytes, "time": f"{cost.time:g}"}
    if cost.peak_bytes > 13:
        return wrong(text("The peak of your schedule is {peak}, above 13.", peak=cost.peak_bytes))
    if cost.time >= 80:
        return wrong(
            text(
                "The peak is at most 13, but your schedule takes {time}. `optimal` takes 80.",
                time=found["time"],
            )
        )
    return right(
        text(
            "Right: your schedule takes {time} within {peak} bytes, and `optimal` takes 80.",
            **found,
        )
    )


def pyramid() -> Chain:
    """Return twelve stages like a convolution pyramid: outputs shrink, and the head is small."""
    sizes = [32, 32, 32, 16, 16, 16, 8, 8, 8, 4, 4, 1]  # MB of each stage's output
    return Chain(tuple(Stage(4, 8, size * 10**6, 2 * size * 10**6) for size in sizes), 3 * 10**6)


@exercise(
    hint=(
        (
            "Ask `run_on` for each e, and compare with `fastest`. Where they are equal, this way"
            " is one of the fastest."
        ),
        (
            'Running on is `Forward(first, "input")`, then `Forward(..., "nothing")` up to stage'
            " e - 1, then the plan from e on, which begins at first + e, then the plan of"
            " `stages[:e]`, which begins at first."
        ),
    )
)
def check_plan(answer: Any) -> Verdict:
    """Check `plan(first, stages, room)`: its lists take the least time within the bytes.

    The chains are those of `check_recurrence`, with every number of bytes that suffices, and the
    pyramid within 150 MB.
    """
    cases = [
        (chain, room, time)
        for chain, times in zip(_CHAINS, _least_times(), strict=True)
        for room, time in enumerate(times, start=1)
        if time < math.inf
    ]
    chain, budget = pyramid(), 150_000_000
    time = simulate(optimal(chain, budget), chain).time
    cases.append((chain, budget - chain.input_bytes, time))
    for chain, room, least in cases:
        actions = answer(0, chain.stages, room)
        unset = actions is None or actions is ...
        if unset or (isinstance(actions, list | tuple) and not actions):
            return not_answered()
        cost = _simulate(actions, chain)
        peak = cost.peak_bytes - chain.input_bytes
        values = {"length": len(chain), "room": f"{room:,}"}
        if peak > room:
            message = (
                "Not yet: for {length} stages and room = {room}, your list needs {peak} bytes"
                " besides the input."
            )
            return wrong(text(message, **values, peak=f"{peak:,}"))
        if cost.time > least:
            message = (
                "Not yet: for {length} stages and room = {room}, your list takes {time}, but the"
                " least time is {least}."
            )
            values |= {"time": f"{cost.time:g}", "least": f"{least:g}"}
            return wrong(text(message, **values))
    return right(
        text(
            "Right: in all {number} cases, your list takes the least time within the bytes.",
            number=len(cases),
        )
    )


#: Pattern of an error of `simulate` -> message. The errors themselves are in English only.
_REFUSALS = {
    r"runs only if its input is live, and (x_\d+) is not": "its input {what} is not in memory.",
    r"its stage's input is live, and (x_\d+) is not": (
        "it needs the stage's input, but {what} is not in memory."
    ),
    r"and S_(\d+) is not; run": (
        'nothing that it needs of stage {what} is kept. Run that stage with `"all"` first.'
    ),
    r"first, and (Backward\(\d+\)) is next": (
        "`{what}` must come next, because backwards run from the last stage to the first."
    ),
    r"(again) after its backward": "the backward of its stage is done, so it must not run again.",
    r"and (Backward\(\d+\)) has not run": "the list ends before `{what}`.",
    r"has the stages 0 to (\d+)": "the last stage of this chain is stage `{what}`.",
}


def _refusal(refused: IllegalSchedule) -> str:
    """Return the message of an illegal schedule in the reader's language, if its rule is above."""
    message = f"{refused}"
    number = re.search(r"action (\d+), (\w+\(.*?\))", message)
    for pattern, words in _REFUSALS.items():
        if found := re.search(pattern, message):
            reason = text(words, what=found[1]) if "{what}" in words else text(words)
            if number is None:
                return text("`simulate` refuses: {reason}", reason=reason)
            values = {"number": number[1], "action": f"`{number[2]}`", "reason": reason}
            return text(
                "`simulate` refuses {action}, action {number} of the list, counted from 0:"
                " {reason}",
                **values,
            )
    return text("`simulate` refuses: {problem}.", problem=f"`{message}`")


def _simulate(actions: Any, chain: Chain) -> Cost:
    """Return the cost of the reader's schedule, or refuse it with the reason."""
    try:
        return simulate(Schedule(actions), chain)
    except IllegalSchedule as refused:
        raise WrongAnswer(_refusal(refused)) from None
    except Exception as error:
        raise WrongAnswer(
            text("Your schedule cannot be simulated: {error}.", error=f"`{error!r}`")
        ) from None
