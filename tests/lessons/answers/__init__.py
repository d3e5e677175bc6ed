"""Right and wrong answers to the lessons' exercises, in one file per lesson.

A file has `RIGHT` and `WRONG`, which map each exercise to a list of answers. A wrong answer is
listed alone or with a part of the expected message. An exercise that is a table of mistakes needs no
answers here: they are generated from the table, with others of another type or unit. A file may have
`EQUIVALENT`: check -> reason -> mutants of its solution that are right as well, as
`exercise_mutants.py` describes them.
"""

from importlib import import_module
from pathlib import Path

from course_lib import lessons
from course_lib.teaching.exercises import Largest, Numbers

CHECKS = {
    f"{number}.{name.removeprefix('check_')}": check
    for number in lessons.LESSONS
    for name, check in lessons.checks_of(number).items()
}
FILES = {
    path.stem[-2:]: import_module(f"answers.{path.stem}")
    for path in Path(__file__).parent.glob("lesson_*.py")
}
#: Exercises that are a table of mistakes
TABLES = {name: check for name, check in CHECKS.items() if isinstance(check, Numbers | Largest)}


def answers_of_other_kinds(check):
    """Yield answers to a table in another unit, of another type or missing, with their messages."""
    right, cases = check.right_answer(), check._numbers.list_cases()

    def with_each(change):
        """Return the right answer with each number changed."""

        def changed(answer):
            if isinstance(answer, dict):
                return {row: change(number) for row, number in answer.items()}
            return change(answer)

        return (lambda *case: changed(right(*case))) if callable(right) else changed(right)

    if check._in_bytes is True:
        yield with_each(lambda number: number / 1e6), "in MB"
        yield with_each(lambda number: number / 2**20), "in MiB"
    yield with_each(lambda number: [number]), "Expected one number, got a `list`"
    if check._numbers.has_rows(*cases[0]):
        yield (lambda *case: 3) if callable(right) else 3, "a dictionary with the keys"
    if callable(right):
        yield 3, "Expected a function, got a `int`"
        yield lambda *case: None, "Not answered yet"
        if len(cases) > 1:
            yield lambda *case: right(*case) if case == cases[0] else None, "returns None for"


def answers_to(name):
    """Return the right and the wrong answers to an exercise, both from its file and its table."""
    file, exercise, table = FILES[name[:2]], name[3:], TABLES.get(name)
    right, wrong = file.RIGHT.get(exercise, []), file.WRONG.get(exercise, [])
    if isinstance(table, Numbers):  # finding the largest size takes long
        right, wrong = [*right, table.right_answer()], [*wrong, *answers_of_other_kinds(table)]
    return right, [*wrong, *(table.wrong_answers() if table else ())]


NAMES = {
    f"{number}.{name}" for number in FILES for name in FILES[number].RIGHT | FILES[number].WRONG
}
#: Exercise -> its right and its wrong answers
ANSWERS = {name: answers_to(name) for name in sorted(NAMES | TABLES.keys())}
#: Exercise -> mutants of its solution that are right as well, each with the reason
EQUIVALENT = {
    f"{number}.{name}": {mutant: reason for reason, mutants in rows.items() for mutant in mutants}
    for number, file in FILES.items()
    for name, rows in getattr(file, "EQUIVALENT", {}).items()
}
