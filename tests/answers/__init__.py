"""Answers to the lessons' exercises, a file a lesson: right ones, and wrong ones with what they are
told.

A file has `ANSWERS`, where a wrong answer stands alone or with a part of what it is told, and may
have `EQUIVALENT`: check -> mutants of its solution that are right as well, with the reason
(`mutants.py` makes them).
"""

from importlib import import_module
from pathlib import Path

from course_lib import lessons

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
EQUIVALENT = {
    f"{number}.{name}": rows
    for number, file in FILES.items()
    for name, rows in getattr(file, "EQUIVALENT", {}).items()
}
