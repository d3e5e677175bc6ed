"""The exercises of lesson 03 on schedules: the recurrence, and schedules written by hand."""

import math
import random
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
from course_lib.teaching.exercises import WrongAnswer, cases, exercise, not_answered, right, wrong

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


# In each chain no output is larger than the one before it, as the lesson assumes. Otherwise the
# recurrence would also need the room of the forwards that are passed.
_CHAINS = (
    Chain.uniform(4, saved_bytes=2),
    _uneven_chain((1, 2, 1, 3), (5, 9, 1, 1), (2, 4, 1, 6), (1, 1, 1, 2), (4, 8, 1, 2)),
    _uneven_chain((3, 6, 1, 2), (1, 2, 1, 5), (6, 12, 1, 1), (2, 4, 1, 4), (1, 2, 1, 3)),
    _uneven_chain(
        (1, 2, 4, 5), (3, 6, 3, 3), (3, 6, 3, 7), (4, 8, 2, 6), (2, 4, 1, 3), input_bytes=2
    ),
)


def _draw_chain(rng: random.Random) -> Chain:
    outputs = sorted((rng.randint(1, 3) for _ in range(4)), reverse=True)
    forwards = [rng.randint(1, 6) for _ in outputs]
    return _uneven_chain(
        *(
            (time, 2 * time, output, output + rng.randint(0, 4))
            for time, output in zip(forwards, outputs, strict=True)
        ),
        input_bytes=outputs[0],
    )


def _chains() -> tuple[Chain, ...]:
    return tuple(cases(_CHAINS, _draw_chain))


@cache
def _least_times(chains: tuple[Chain, ...]) -> list[list[float]]:
    """Return the least times of each chain with 1, 2, ... bytes besides its input.

    They are found by simulating every schedule.
    """
    found = []
    for chain in chains:
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
    """Return the least time of the stages by the recurrence, with one mistake in running on.

    Args:
        stages: The stages that are left to do.
        room: Bytes besides the input of the first stage.
        mistake: A key of `_MISTAKES`, which says what the mistake is, or "never runs on".
    """
    if not stages:
        return 0
    first, ends = stages[0], range(1, len(stages))
    times = [_run_on(stages, e, room, mistake) for e in ends if mistake != "never runs on"]
    if first.saved_bytes + first.output_bytes <= room:
        later = _fastest(stages[1:], room - first.saved_bytes, mistake)
        times.append(first.forward_time + later + first.backward_time)
    return min(times, default=math.inf)


def _run_on(stages: tuple[Stage, ...], e: int, room: int, mistake: str) -> float:
    """Return the time of running on to stage e, with the mistake in it."""
    output = stages[e - 1].output_bytes
    kept = {
        "saved": stages[e - 1].saved_bytes,
        "next": stages[e].output_bytes,
        "first": stages[0].output_bytes,
        "all outputs": sum(stage.output_bytes for stage in stages[:e]),
        "one byte": 1,
        "input": 0,
        "exchanged": 0,
    }.get(mistake, output)
    passed = {
        "time": (),
        "too far": stages[: e + 1],
        "not the first": stages[1:e],
        "only the first": stages[:1],
        "of e": stages[e : e + 1],
        "twice": stages[:e] * 2,
    }.get(mistake, stages[:e])
    ahead = sum(stage.forward_time for stage in passed)
    if mistake == "backward":
        ahead += sum(stage.backward_time for stage in passed)
    behind = stages[e + 1 :] if mistake == "after e" else stages[e:]
    later = _fastest(behind, room - kept, mistake)
    if mistake == "earlier":
        return ahead + later
    earlier_room = room - output if mistake in ("gone", "exchanged") else room
    earlier = _fastest(stages[:e], earlier_room, mistake)
    return ahead + (max(later, earlier) if mistake == "longer" else later + earlier)


#: One message for four mistakes.
_PASSED = (
    "You added the forward times of the wrong stages. On the way to `e`, exactly `stages[:e]`"
    " are passed."
)
#: Mistake in running on -> verdict.
_MISTAKES = {
    "input": "You gave the later stages all of `room`. The input that is kept takes some of it.",
    "one byte": (
        "You took 1 byte for the input that is kept. It takes the `output_bytes` of the stage"
        " before it."
    ),
    "next": "You took the output of `stages[e]`. Its input is the output of the stage before it,"
    " `stages[e - 1]`.",
    "first": "You took the output of `stages[0]`. The input that is kept is that of stage `e`, the"
    " output of `stages[e - 1]`.",
    "saved": (
        "You took `saved_bytes` for the input that is kept. An input takes the `output_bytes`"
        " of the stage before it."
    ),
    "all outputs": (
        "You subtracted the outputs of all stages that are passed. Only one is kept, the input of"
        " stage `e`."
    ),
    "gone": (
        "You gave the earlier stages too little. By then the input that was kept has been"
        " released, so they have all of `room`."
    ),
    "exchanged": (
        "You exchanged the bytes of the two parts. The kept input takes some of `room` while the"
        " later stages run, and is released before the earlier ones."
    ),
    "time": "You left out the time of running on, which is the forward times of the stages that"
    " are passed.",
    "too far": _PASSED,
    "not the first": _PASSED,
    "only the first": _PASSED,
    "of e": _PASSED,
    "twice": (
        "You counted the forwards of `stages[:e]` twice. `fastest` of these stages has their second"
        " run."
    ),
    "backward": (
        "You added backward times on the way. Running on runs forwards only, and `fastest` of"
        " `stages[:e]` has the backwards."
    ),
    "earlier": "You left out `stages[:e]`. These stages still have to be done.",
    "after e": "You left out stage `e` itself. It is the first of the later stages, `stages[e:]`.",
    "longer": "You took the longer of the two parts. They run one after the other, so add them.",
}


@exercise(
    hint=(
        (
            "On the way to stage e, the stages before it run forward once. Then the stages from e"
            " on are done, and then the stages before e."
        ),
        (
            "One input is kept meanwhile. Which stage made it, and while which of the two parts is"
            " it in memory?"
        ),
    )
)
def check_recurrence(answer: Any) -> Verdict:
    """Check `fastest(stages, room)` on four chains with every useful `room`, a number of bytes.

    The right times are found by simulating every schedule.
    """
    chains = _chains()
    wanted = _least_times(chains)
    try:
        given = [
            _table_of(answer, chain, len(times))
            for chain, times in zip(chains, wanted, strict=True)
        ]
    except RecursionError:
        message = (
            "Your function calls itself without end. Each call must have fewer stages, so e"
            " must begin at 1 and be at most the last index."
        )
        return wrong(message, exact=True)
    unanswered = _times_with("never runs on", chains)
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
        if given == _times_with(mistake, chains):
            return wrong(text("Not yet. {reason}", reason=text(reason)), exact=True)
    return _first_difference(given, wanted)


@cache
def _times_with(mistake: str, chains: tuple[Chain, ...]) -> list[list[float]]:
    """Return the recurrence's times with a mistake in it, for each chain and budget."""
    pairs = zip(chains, _least_times(chains), strict=True)
    return [
        _table_of(lambda stages, room: _fastest(stages, room, mistake), chain, len(times))
        for chain, times in pairs
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
                    "length": len(_chains()[chain]),
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
            "With 11 forwards, five of six stages run twice, so the last segment has one stage. How"
            " many stages fit into the one before it, and into the earlier ones?"
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
            "After the backward of stage 4, from which input do you reach stages 2 and 3 with the"
            " fewest forwards? What must be released so that all of both fits?"
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
            "Running on is a list of forwards, of which one keeps its input, and then two plans. In"
            " which order do they come, and with which number does each begin?"
        ),
    )
)
def check_plan(answer: Any) -> Verdict:
    """Check `plan(first, stages, room)`: its lists take the least time within the bytes.

    The chains are those of `check_recurrence`, with every number of bytes that suffices, and the
    pyramid within 150 MB.
    """
    chains = _chains()
    tried = [
        (chain, room, time)
        for chain, times in zip(chains, _least_times(chains), strict=True)
        for room, time in enumerate(times, start=1)
        if time < math.inf
    ]
    chain, budget = pyramid(), 150_000_000
    time = simulate(optimal(chain, budget), chain).time
    tried.append((chain, budget - chain.input_bytes, time))
    for chain, room, least in tried:
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
            number=len(tried),
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
