"""Answers to the lessons' exercises, a file a lesson: right ones, and wrong ones with what they are
told.

A file has `ANSWERS`, where a wrong answer stands alone or with a part of what it is told. Those of
an exercise that is a table of mistakes are made from it, and need no rows. A file may
have `EQUIVALENT`: check -> mutants of its solution that are right as well, with the reason
(`mutants.py` makes them).
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
ANSWERS = {
    f"{number}.{name}": rows
    for number, file in FILES.items()
    for name, rows in file.ANSWERS.items()
}
#: Exercises that are a table of mistakes
TABLES = {name: check for name, check in CHECKS.items() if isinstance(check, Numbers | Largest)}
for name, check in TABLES.items():
    right, wrong = ANSWERS.get(name, ((), ()))
    made = [check.right_answer()] if isinstance(check, Numbers) else []  # a largest size takes long
    ANSWERS[name] = ([*right, *made], [*wrong, *check.wrong_answers()])
EQUIVALENT = {
    f"{number}.{name}": rows
    for number, file in FILES.items()
    for name, rows in getattr(file, "EQUIVALENT", {}).items()
}
