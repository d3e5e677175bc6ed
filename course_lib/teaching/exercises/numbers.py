"""Exercises whose answers are numbers: right answers, and tables of mistakes with wrong numbers.

These words are used below:

- *Answer*: a number, a dictionary of numbers, or a function that returns one of these.
- *Row*: a key of such a dictionary. A single number is in the row None.
- *Case*: the arguments, as a tuple, with which an answer that is a function is called once. Any
  other answer has a single case, the empty tuple.
- *Mistake*: an error in reasoning, identified by the name of its message. In each case, it
  gives a wrong number in all rows, in some rows, or in none.
- *Variant*: one of several wrong numbers, or dictionaries of wrong numbers, of the same mistake.
"""

import inspect
import math
import numbers as kinds
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from functools import cache
from typing import Any

from course_lib.labels import LabelError, join_labels, text, verbatim

from .exercise import Exercise, messages_of, table_of
from .messages import Messages
from .verdicts import Verdict, WrongAnswer, not_answered, returns_none, right, wrong

_BYTE_UNITS = {
    **{name: 1000**power for power, name in enumerate(("kB", "MB", "GB", "TB"), 1)},
    **{name: 1024**power for power, name in enumerate(("KiB", "MiB", "GiB", "TiB"), 1)},
}


def largest_that_fits(
    answer: Any,
    sizes: Sequence[int],
    peak: Callable[[int], int],
    budget_bytes: int,
    not_a_size: str,
) -> tuple[int, int, int | None]:
    """Check that the learner's answer is the largest size whose peak is within a budget.

    Args:
        answer: The learner's answer.
        sizes: Allowed sizes in ascending order.
        peak: Function that returns the peak in bytes for a size.
        budget_bytes: Budget in bytes.
        not_a_size: Message for an answer that is not one of the sizes, as a label.

    Returns:
        Three numbers: the answer, its peak in bytes, and the peak of the next larger size in bytes.
        The third is None if there is no larger size.

    Raises:
        WrongAnswer: The answer is wrong.
    """
    number = _number(answer)
    if number not in sizes:
        raise WrongAnswer(not_a_size, exact=True)
    place = sizes.index(number)
    size, here = sizes[place], peak(sizes[place])
    if here > budget_bytes:
        raise WrongAnswer(
            text("Your size is too large: {size} peaks at {here:,} bytes.", size=size, here=here)
        )
    if place + 1 == len(sizes):
        return size, here, None
    above = peak(sizes[place + 1])
    if above <= budget_bytes:
        raise WrongAnswer(
            text(
                "Your size fits, with a peak of {here:,} bytes, but {next} fits as well, with"
                " {above:,} bytes.",
                here=here,
                next=sizes[place + 1],
                above=above,
            )
        )
    return size, here, above


def expect_number(
    answer: Any,
    expected: float,
    *,
    tolerance: float = 0.0,
    wrong_answers: Mapping[float, str] | None = None,
    why: str | None = None,
    in_bytes: bool = False,
) -> Verdict:
    """Compare the learner's answer with a number, and return a verdict.

    The function never raises an error because of the answer.

    Args:
        answer: The answer. Numbers of any numeric type are accepted, including tensors with one
            element. None and `...` mean that the learner has not changed the cell. Any other answer
            is wrong.
        expected: The right answer.
        tolerance: Relative tolerance, for the right answer and for the wrong answers.
        wrong_answers: Dict from a wrong number to the explanation of the mistake. If the answer is
            one of these numbers, the verdict has the explanation and no hint.
        why: Reason why the right answer is right. It is shown only if the answer is right.
        in_bytes: Whether the right answer is in bytes. If so, an answer that is right in another
            unit, such as MB or GiB, gets a message about the unit.
    """
    if answer is None or answer is ...:
        return not_answered()
    number = _number(answer)
    if number is None:
        kind = "nan" if _is_nan(answer) else type(answer).__name__
        return wrong(text("Expected one number, got a `{kind}`.", kind=verbatim(kind)), exact=True)
    if _close(number, expected, max(tolerance, _rounding_error(answer))):
        return right("Right." if why is None else text("Right. {why}", why=why))
    for mistaken, reason in (wrong_answers or {}).items():
        if _close(number, mistaken, tolerance):
            return wrong(text("Not yet. {reason}", reason=reason), exact=True)
    for unit, size in _BYTE_UNITS.items() if in_bytes else ():
        if _close(number * size, expected, 0.01):
            return wrong(text("That is in {unit}. Give bytes.", unit=unit), exact=True)
    return wrong(
        "Not yet. The number is too small."
        if number < expected
        else "Not yet. The number is too large."
    )


def _number(answer: Any) -> Fraction | float | None:
    """Return the answer as a number that can be compared without overflow, or None.

    Infinity stays a float.
    """
    try:
        # a tensor or an array with one element, or a NumPy number
        if hasattr(answer, "item"):
            answer = answer.item()
        if isinstance(answer, bool) or not isinstance(answer, (kinds.Real, Decimal)):
            return None
        if isinstance(answer, kinds.Rational):
            return Fraction(answer.numerator, answer.denominator)
        answer = float(answer)
        if math.isnan(answer):
            return None
        return answer if math.isinf(answer) else Fraction(answer)
    except Exception:  # the answer's own methods may raise, but the learner gets a verdict
        return None


def _is_nan(answer: Any) -> bool:
    try:
        return math.isnan(answer)
    except Exception:  # not a number, or one whose own methods raise
        return False


def _rounding_error(answer: Any) -> float:
    """Return the relative error of a number that has fp32's 24 bits, and 0 for other numbers."""
    return 2.0**-23 if str(getattr(answer, "dtype", "")).endswith("float32") else 0.0


def _close(number: Fraction | float, expected: float, tolerance: float) -> bool:
    if isinstance(number, float):  # infinite
        return False
    return abs(number - Fraction(expected)) <= Fraction(tolerance) * abs(Fraction(expected))


#: A list of pairs: a case, and what the answer returned for this case
_Answers = list[tuple[tuple, Any]]


@dataclass(frozen=True)
class each:
    """A mistake that can be made in every row of an answer, such as elements instead of bytes.

    It is used in the argument `mistakes` of `numbers`. The answer to an exercise may be a dict of
    numbers, and a row is one of its keys. If the answer is a single number, it is the only row.
    Each row is compared alone, so that the mistake is named even if the other rows are right.

    Attributes:
        of: Function that returns the wrong number of a row, or a tuple of several wrong numbers. It
            returns None if the row cannot have the mistake. The first argument is the right number
            of the row. If the answer is a function, the arguments of the answer follow.
    """

    of: Callable[..., Any]


@dataclass(frozen=True)
class throughout:
    """A mistake that is named only if it explains all numbers of the learner's answer.

    It is used in the argument `mistakes` of `numbers`. An answer has several numbers if it is a
    dict, or a function that is called for several cases. Use this class if a single number does not
    identify the mistake. In some cases, for example, the mistake may give the right number, or the
    same number as another mistake. A mistake that explains all numbers is named in preference to
    mistakes that explain one number.

    Attributes:
        mistake: The mistake, in any other form that `numbers` accepts. It must give a number for
            every row (key of the dict).
        tolerance: Relative tolerance of the wrong numbers. It replaces the tolerance of the
            exercise.
    """

    mistake: Any
    tolerance: float = 0.0


@dataclass(frozen=True)
class _Table:
    """The right and the wrong numbers of an exercise for each case.

    The attributes are arguments of `numbers`.

    Attributes:
        compute: Function of a case that returns the right number, or a dict from row to right
            number.
        cases: Arguments of each case, or None if the answer is not a function.
    """

    compute: Callable[..., Any]
    mistakes: Mapping[str, Any]
    cases: Callable[[], Iterable] | Iterable | None
    tolerance: float | Callable[..., float]

    def list_cases(self) -> list[tuple]:
        """Return the arguments of each case. Without cases, return a list with an empty tuple."""
        if self.cases is None:
            return [()]
        found = self.cases() if callable(self.cases) else self.cases
        return [case if isinstance(case, tuple) else (case,) for case in found]

    def has_rows(self, *case: Any) -> bool:
        return isinstance(self.compute(*case), Mapping)

    def rows(self, *case: Any) -> dict[Any, Any]:
        """Return a dict from row to right number. A single number is in the row None."""
        return dict(_by_row(self.compute(*case)))

    def values(self, mistake: Any, *case: Any) -> list[dict[Any, Any]]:
        """Return a list of dicts from row to wrong number, for a mistake in this case.

        The list has one dict per variant of the mistake.
        """
        if isinstance(mistake, throughout):
            mistake = mistake.mistake
        if isinstance(mistake, each):
            found: Any = {row: mistake.of(count, *case) for row, count in self.rows(*case).items()}
        else:
            found = mistake(*case) if callable(mistake) else mistake
        return _ways(_by_row(found))

    def wrong_answers(self, name: str) -> Iterator[Any]:
        """Yield wrong answers to the exercise, one for each variant of the mistake `name`.

        An answer is a function if the exercise has cases, and otherwise a number or a dict.
        """
        mistake = self.mistakes[name]
        for choice in range(max(len(self.values(mistake, *case)) for case in self.list_cases())):

            def answer(*case: Any, choice: int = choice) -> Any:
                wanted, wrong_rows = self.rows(*case), self.values(mistake, *case)
                if choice < len(wrong_rows):
                    wanted |= wrong_rows[choice]
                return wanted if self.has_rows(*case) else wanted[None]

            yield answer() if self.cases is None else answer

    def tolerance_in(self, case: tuple) -> float:
        return self.tolerance(*case) if callable(self.tolerance) else self.tolerance

    def right_case(self, row: Any, answers: _Answers) -> tuple | None:
        """Return the first case in which the answer's number for `row` is right, or None.

        The number is right if it is within the tolerance. `answers` is a list of pairs: a case,
        and the result that the answer returned for this case.
        """
        for case, given in answers:
            rows = _by_row(given)
            if row in rows and _is(rows[row], self.rows(*case)[row], self.tolerance_in(case)):
                return case
        return None

    def mistakes_of_row(self, row: Any, case: tuple) -> dict[float, str]:
        """Return a dict from each wrong number of this row and case to the name of its mistake."""
        found: dict[float, str] = {}
        for name, mistake in self.mistakes.items():
            if isinstance(mistake, throughout):
                continue
            for values in self.values(mistake, *case):
                if row in values:
                    found.setdefault(values[row], name)
        return found

    def mistake_throughout(self, answers: _Answers) -> str | None:
        """Return the name of the first `throughout` mistake that explains all numbers, or None."""
        for name, mistake in self.mistakes.items():
            if not isinstance(mistake, throughout):
                continue
            ways = zip(*(self.values(mistake, *case) for case, _ in answers), strict=True)
            for way in ways:
                pairs = zip(answers, way, strict=True)
                if all(_are(given, rows, mistake.tolerance) for (_, given), rows in pairs):
                    return name
        return None


class Numbers(Exercise):
    """The check of an exercise whose answer is a number, a dict of numbers, or a function.

    If the answer is a function, it returns a number or a dict of numbers. The decorator `numbers`
    creates instances.

    Attributes:
        mistakes: Dict from the name of a message to the wrong numbers that the message explains
            (see `numbers`).
    """

    def __init__(
        self,
        compute: Callable[..., Any],
        mistakes: Mapping[str, Any],
        *,
        cases: Callable[[], Iterable] | Iterable | None,
        also: Any,
        tolerance: float | Callable[..., float],
        in_bytes: bool | Collection[str],
        place: str | None,
        hint_below: str | None,
        blank: tuple | Callable[..., bool],
        elsewhere: str | None,
        within: Callable[[], AbstractContextManager],
        right_values: Callable[[_Answers], Mapping[str, Any]] | None,
        otherwise: str | None,
    ) -> None:
        super().__init__(compute, *messages_of(compute, {}))
        self._check, self._table = self._verdict, table_of(compute)
        self._numbers = _Table(compute, mistakes, cases, tolerance)
        self._say = Messages(inspect.getfile(compute))
        self.mistakes, self._also, self._in_bytes, self._blank = mistakes, also, in_bytes, blank
        self._place, self._hint_below = place, hint_below
        self._elsewhere, self._otherwise = elsewhere, otherwise
        self._within, self._right_values = within, right_values
        self._names = list(inspect.signature(compute).parameters)
        for names in filter(None, (*mistakes, place, hint_below, elsewhere, otherwise)):
            for name in names.split():
                self._full_name(name)  # a wrong name is an error before anybody answers

    def _full_name(self, name: str) -> str:
        """Return "table.name" of a message of the exercise's table, or else of the table `common`.

        Raises:
            LabelError: Neither table has a message with this name.
        """
        for table in (self._table, "common"):
            if f"{table}.{name}" in self._say:
                return f"{table}.{name}"
        raise LabelError(
            f"no message is named {name!r}: add it to messages.toml, in the table"
            f" [{self._table}] or in the table [common]"
        )

    def _message(self, names: str) -> str:
        """Return the message of a mistake. Names with spaces between them give joined messages."""
        return join_labels((self._say(self._full_name(name)) for name in names.split()), " ")

    def right_answer(self) -> Any:
        """Return a right answer to the exercise: a number, a dict of numbers, or a function."""
        return self._numbers.compute() if self._numbers.cases is None else self._numbers.compute

    def wrong_answers(self) -> Iterator[tuple[Any, str]]:
        """Yield pairs of a wrong answer and the message about its mistake, for each known mistake.

        A mistake with several wrong numbers yields a pair for each of them.
        """
        for name in self.mistakes:
            for answer in self._numbers.wrong_answers(name):
                yield answer, self._message(name)

    def _verdict(self, answer: Any) -> Verdict:
        answers = self._answers_of(answer)
        for case, given in answers:
            problem = self._problem(case, given, answers)
            if problem is not None:
                name = self._numbers.mistake_throughout(answers)
                if name is None:
                    return problem
                return wrong(text("Not yet. {reason}", reason=self._message(name)), exact=True)
        values = self._right_values(answers) if self._right_values else {}
        return self._say.right(f"{self._table}.right", **values)

    def _answers_of(self, answer: Any) -> _Answers:
        """Return a list of pairs: each case, and what the answer returned for this case.

        Raises:
            WrongAnswer: The answer returned nothing for a case, or is not written yet.
        """
        if self._numbers.cases is None:
            return [((), answer)]
        found, cases = [], self._numbers.list_cases()
        for case in cases:
            with self._within():
                given = answer(*case)
            if self._is_blank(given, *case):
                others = (self._is_blank(answer(*other), *other) for other in cases[1:])
                if case == cases[0] and all(others):
                    raise WrongAnswer(not_answered().message, exact=True)
                if given is None or given is ...:
                    verdict = returns_none(self._case_name(case))
                    raise WrongAnswer(verdict.message, exact=True)
            found.append((case, given))
        return found

    def _is_blank(self, given: Any, *case: Any) -> bool:
        if given is None or given is ...:
            return True
        if callable(self._blank):
            of_numbers = all(_number(number) is not None for number in _by_row(given).values())
            return of_numbers and self._blank(given, *case)
        if isinstance(given, Mapping):
            return bool(given) and all(map(self._is_blank, given.values()))
        return any(given is blank or (blank == 0 and _is_zero(given)) for blank in self._blank)

    def _case_name(self, case: tuple) -> str:
        pairs = zip(self._names, case, strict=True)
        return join_labels(
            f"{name} = {value:,}" if isinstance(value, kinds.Number) else f"{name} = {value}"
            for name, value in pairs
        )

    def _problem(self, case: tuple, given: Any, answers: _Answers) -> Verdict | None:
        """Return the verdict on what the answer returned for a case, or None if it is right."""
        wanted = self._numbers.rows(*case)
        if self._numbers.has_rows(*case):
            if not isinstance(given, Mapping) or set(given) != set(wanted):
                keys = f"{self._table}.keys"
                message = self._say(keys) if keys in self._say else _keys_of(wanted, *case)
                return wrong(message, exact=True)
            if self._is_blank(given, *case):
                return not_answered()
        else:
            given = {None: given}
        tolerance = self._numbers.tolerance_in(case)
        for row, count in wanted.items():
            others = self._numbers.values(self._also, *case)
            if any(row in also and _is(given[row], also[row], tolerance) for also in others):
                continue
            mistakes = self._numbers.mistakes_of_row(row, case)
            reasons = {number: self._message(name) for number, name in mistakes.items()}
            verdict = expect_number(
                given[row],
                count,
                tolerance=tolerance,
                wrong_answers=reasons,
                in_bytes=self._in_bytes is True or row in (self._in_bytes or ()),
            )
            if verdict:
                continue
            if self._otherwise and not verdict.exact:
                values = dict(zip(self._names, case, strict=True)) | {"row": row}
                values |= {"given": _as_float(given[row]), "wanted": count}
                return wrong(self._say.fill(self._full_name(self._otherwise), **values))
            if self._elsewhere and (other := self._numbers.right_case(row, answers)):
                values = {"right": self._case_name(other), "wrong": self._case_name(case)}
                name = self._full_name(self._elsewhere)
                return wrong(self._say.fill(name, row=f"`{row}`", **values), exact=True)
            if self._hint_below and row != next(iter(wanted)) and not verdict.exact:
                verdict = replace(verdict, hint=self._message(self._hint_below))
            return replace(verdict, message=self._with_place(case, row, verdict.message))
        return None

    def _with_place(self, case: tuple, row: Any, message: str) -> str:
        """Put the case and the row before the message of a verdict."""
        if self._place == "":
            return message
        if self._place:
            values = dict(zip(self._names, case, strict=True)) | {"row": row, "message": message}
            return self._say.fill(self._full_name(self._place), **values)
        if row is not None:
            message = text("{name}: {message}", name=f"`{row}`", message=message)
        if not case or self._elsewhere:
            return message
        return text("For {case}: {message}", case=self._case_name(case), message=message)


def _by_row(found: Any) -> Mapping[Any, Any]:
    """Return a dict from row to number. If `found` is a single number, it is in the row None."""
    return found if isinstance(found, Mapping) else {None: found}


def _ways(rows: Mapping[Any, Any]) -> list[dict[Any, Any]]:
    """Split a mistake into its variants: return one dict from row to wrong number per variant.

    Args:
        rows: Dict from row to wrong number, or to a tuple with the wrong number of each variant.
            Rows with None are left out.
    """
    ways = {row: _several(value) for row, value in rows.items() if value is not None}
    most = max(map(len, ways.values()), default=0)
    return [{row: way[i] for row, way in ways.items() if i < len(way)} for i in range(most)]


def _keys_of(rows: Mapping[Any, Any], *case: Any) -> str:
    names = join_labels(f"`{name}`" for name in rows)
    if case:
        return text("Return a dictionary with the keys {names}.", names=names)
    return text("Give a dictionary with the keys {names}.", names=names)


def _several(value: Any) -> tuple:
    return value if isinstance(value, tuple) else (value,)


def _as_float(given: Any) -> float:
    """Return a number as a float, or infinity if it is too large for a float."""
    try:
        return float(given)
    except OverflowError:
        return math.inf if given > 0 else -math.inf


def _is_zero(given: Any) -> bool:
    return isinstance(given, int | float) and given == 0


def _is(given: Any, expected: float, tolerance: float) -> bool:
    return bool(expect_number(given, expected, tolerance=tolerance))


def _are(given: Any, rows: Mapping[Any, Any], tolerance: float) -> bool:
    """Return whether an answer has the same rows as `rows`, and the same number in each row."""
    numbers = _by_row(given)
    return numbers.keys() == rows.keys() and all(
        _is(numbers[row], number, tolerance) for row, number in rows.items()
    )


def numbers(
    mistakes: Mapping[str, Any],
    *,
    cases: Callable[[], Iterable] | Iterable | None = None,
    also: Any = None,
    tolerance: float | Callable[..., float] = 0.0,
    in_bytes: bool | Collection[str] = False,
    place: str | None = None,
    hint_below: str | None = None,
    blank: tuple | Callable[..., bool] = (None, ...),
    elsewhere: str | None = None,
    within: Callable[[], AbstractContextManager] = nullcontext,
    right_values: Callable[[_Answers], Mapping[str, Any]] | None = None,
    otherwise: str | None = None,
) -> Callable[[Callable[..., Any]], Numbers]:
    """Turn a function `check_NAME`, which computes the right answer, into the check of an exercise.

    The function returns a number, or a dict of numbers. A key of this dict is called a row. If the
    argument `cases` is given, the learner's answer must be a function. The answer and `check_NAME`
    are called with the arguments of each case. For example:

        @numbers(
            {
                "elements": each(lambda count, n: count // 4),  # a mistake in each row
                "no_sums": lambda n: {"bf16": 2 * n},  # a mistake in one row
            },
            cases=lambda: cases([1000, 7000], lambda rng: rng.randint(100, 999)),
        )
        def check_gradient_bytes(n: int) -> dict[str, int]:
            return {"fp32": 4 * n, "bf16": 6 * n}

    The table NAME of the lesson's `messages.toml` has the messages `hint` and `right`. It may also
    have `later_hint`, and `keys` for an answer whose dict has wrong keys. The message about a
    mistake is in this table, or in the table `common`.

    Args:
        mistakes: Dict from the name of a message to the wrong number that the message explains, or
            to a dict from row to wrong number. A tuple lists several wrong numbers of one mistake.
            If there are cases, the value may also be a function of a case that returns a number, a
            tuple or a dict. If the function returns None, the mistake makes no difference in this
            case.
            `each` is for a mistake in any row, and `throughout` for a mistake that must explain all
            numbers. If two mistakes have the same number, the first one is named. A name with a
            space, such as "a b", joins the messages a and b.
        cases: Iterable with the arguments of each case (a tuple or a single argument), or a
            function that returns such an iterable. The function can call `graded_cases.cases`,
            which adds random cases while notebooks are graded. None means that the answer is not a
            function.
        also: Numbers that are accepted besides the result of `check_NAME`, in the form of a value
            of `mistakes`.
        tolerance: Relative tolerance of right and wrong numbers, or a function of a case that
            returns this tolerance.
        in_bytes: Whether the answer is in bytes (see `expect_number`), or the names of the rows
            that are in bytes.
        place: Name of a message that adds the case and the row to another message. Its placeholders
            are the case's arguments, {row} and {message}. By default, the case and the row are
            written before the message, such as "For k = 3: " and "`row`: ". With "", nothing is
            added, which suits cases that are long texts.
        hint_below: Name of the hint for all rows after the first. By default, all rows have the
            same hint.
        blank: Values that mean that the learner has not changed the cell, or a function that
            returns whether the learner has not changed it. The function's arguments are the result
            of the answer for a case, followed by the arguments of this case.
        elsewhere: Name of a message for a row that is wrong in one case and right in another. Its
            placeholders are {row}, {right} (the case in which the row is right) and {wrong} (the
            case in which it is wrong). If this argument is given, no other message names a case.
        within: Function that returns a context manager, in which the learner's function is called.
            It may, for example, limit the work of the call (`WorkLimit`). A new context manager is
            used for each call.
        right_values: Function that returns the values of the placeholders in the message `right`.
            Its argument is a list of pairs: a case, and the result of the answer for this case.
        otherwise: Name of a message for a number that no mistake explains, instead of "too small"
            or "too large". Its placeholders are the case's arguments, {row}, {given} and {wanted}.
    """
    return lambda compute: Numbers(
        compute,
        mistakes,
        cases=cases,
        also=also,
        tolerance=tolerance,
        in_bytes=in_bytes,
        place=place,
        hint_below=hint_below,
        blank=blank,
        elsewhere=elsewhere,
        within=within,
        right_values=right_values,
        otherwise=otherwise,
    )


class Largest(Exercise):
    """The check of an exercise that asks for the largest size whose peak is within a budget.

    The decorator `largest` creates instances.
    """

    def __init__(
        self,
        peak: Callable[[int], int],
        sizes: Sequence[int],
        budget_bytes: int,
        mistakes: Mapping[str, Any],
    ) -> None:
        super().__init__(peak, *messages_of(peak, {}))
        self._check, self._peak, self._sizes = self._verdict, cache(peak), sizes
        self._budget, self.mistakes, self._table = budget_bytes, mistakes, table_of(peak)
        self._say = Messages(inspect.getfile(peak))

    def wrong_answers(self) -> Iterator[tuple[int, str]]:
        """Yield pairs of a wrong size and the message about its mistake, for each known mistake."""
        for name, sizes in self.mistakes.items():
            for size in _several(sizes):
                yield size, self._say(f"{self._table}.{name}")

    def _verdict(self, answer: Any) -> Verdict:
        for mistaken, message in self.wrong_answers():
            if expect_number(answer, mistaken):
                raise WrongAnswer(text("Not yet. {reason}", reason=message), exact=True)
        size, here, above = largest_that_fits(
            answer, self._sizes, self._peak, self._budget, self._say(f"{self._table}.not_a_size")
        )
        values = {"size": size, "here": here, "next": size + 1, "above": above}
        return right(self._say.fill(f"{self._table}.right", **values))


def largest(
    sizes: Sequence[int], budget_bytes: int, mistakes: Mapping[str, Any] | None = None
) -> Callable[[Callable[[int], int]], Largest]:
    """Turn a function `check_NAME` into the check of an exercise about the largest possible size.

    `check_NAME` takes a size, such as a batch size, and returns the peak in bytes. The right answer
    is the largest size whose peak is within the budget. The table NAME of the lesson's
    `messages.toml` has the messages `hint`, `right` and `not_a_size`. The message `right` may have
    four placeholders: {size} for the answer, {here} for its peak, {next} for the answer plus 1, and
    {above} for the peak of the next larger allowed size.

    Args:
        sizes: Allowed sizes in ascending order.
        budget_bytes: Budget in bytes.
        mistakes: Dict from the name of a message to the wrong size that the message explains, or to
            a tuple of wrong sizes.
    """
    return lambda peak: Largest(peak, sizes, budget_bytes, mistakes or {})
