"""Tables of verdicts: one row per exercise of each notebook, and one per exercise of the class."""

import csv
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

COLUMNS = ("name", "lesson", "exercise", "verdict", "message", "sentence")
RIGHT, WRONG, UNANSWERED, TROUBLE = MARKS = ("✓", "✗", "○", "!")
BY_EXERCISE = ("lesson", "exercise", *MARKS, "most frequent mistake", "made by")


@dataclass(frozen=True)
class Row:
    """One row of the table: the verdict on one exercise of one notebook."""

    name: str
    lesson: str
    exercise: str
    verdict: str
    message: str
    sentence: str = ""


@dataclass(frozen=True)
class Exercise:
    """The verdicts of a class on one exercise.

    Attributes:
        counts: Dict from a mark, such as ✓, to the number of notebooks with this mark.
        mistake: The most frequent message on wrong answers, or "".
        made_by: Number of wrong answers with that message.
    """

    lesson: str
    exercise: str
    counts: dict[str, int]
    mistake: str
    made_by: int

    def __str__(self) -> str:
        marks = "  ".join(f"{self.counts[mark]:3} {mark}" for mark in MARKS)
        mistake = f"  {self.made_by} × {self.mistake[:60]}" if self.mistake else ""
        return f"{self.lesson} {self.exercise:24} {marks}{mistake}"


def by_exercise(rows: Sequence[Row]) -> list[Exercise]:
    """Count the verdicts of the class on each exercise, in the order of the lessons."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.exercise != "–":  # "–" marks a row on the whole notebook
            groups.setdefault((row.lesson, row.exercise), []).append(row)
    found = []
    for (lesson, exercise), group in sorted(groups.items(), key=lambda item: item[0][0]):
        counts = Counter(row.verdict for row in group)
        mistakes = Counter(row.message for row in group if row.verdict == WRONG)
        mistake, made_by = mistakes.most_common(1)[0] if mistakes else ("", 0)
        found.append(
            Exercise(lesson, exercise, {mark: counts[mark] for mark in MARKS}, mistake, made_by)
        )
    return found


def write_by_exercise(exercises: Sequence[Exercise], target: Path) -> None:
    """Write the class's table as CSV for a spreadsheet, completely or not at all."""
    rows = (
        [each.lesson, each.exercise, *each.counts.values(), each.mistake, each.made_by]
        for each in exercises
    )
    _write(BY_EXERCISE, rows, target)


def write_table(rows: Sequence[Row], target: Path) -> None:
    """Write the rows as CSV for a spreadsheet, completely or not at all.

    An apostrophe keeps the spreadsheet from reading a text as a formula.
    """
    _write(COLUMNS, ([getattr(row, column) for column in COLUMNS] for row in rows), target)


def _write(head: Sequence[str], rows: Iterable[Sequence[object]], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8-sig", newline="", dir=target.parent, delete=False
    ) as file:
        try:
            writer = csv.writer(file)
            writer.writerow(head)
            for row in rows:
                values = map(str, row)
                writer.writerow(
                    [
                        f"'{each}" if each[:1] in ("=", "+", "-", "@", "\t") else each
                        for each in values
                    ]
                )
            file.close()
            Path(file.name).replace(target)
        except BaseException:
            Path(file.name).unlink()
            raise
