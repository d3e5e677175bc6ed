"""Rows of an interrupted grading, with which the next grading continues.

Each graded file is one line of JSON in a hidden file next to the table. The line counts only if the
file, the lesson, the library, the limits and the seed of the checks are the same. The hidden file
is removed when the grading is complete.
"""

import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Self

from .verdicts import Row

_SEED = "seed"


def key_of(*parts: object) -> str:
    """Return a hash of JSON values: everything on which the rows of a file depend."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class Progress:
    """Rows on disk that an unfinished grading has written for one table."""

    def __init__(self, table: Path) -> None:
        self._path = table.with_name(f".{table.stem}_progress.jsonl")
        self._rows: dict[str, list[Row]] = {}
        self._seed = ""

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a+", encoding="utf-8")
        self._file.seek(0)
        for line in self._file:
            try:
                key, rows = json.loads(line)
                if key == _SEED:
                    self._seed = str(rows)
                    continue
                self._rows[key] = [Row(**row) for row in rows]
            except (ValueError, TypeError):  # an incomplete line, because the grading was killed
                continue
        return self

    def __exit__(self, *error: object) -> None:
        if self._path.exists() and not self._path.stat().st_size:
            self._path.unlink()
        self._file.close()

    def rows(self, key: str) -> list[Row] | None:
        """Return a file's rows from an interrupted grading, or None."""
        return self._rows.get(key)

    def seed(self, given: str | None) -> str:
        """Return the seed of the random cases that checks draw.

        This is the given seed, otherwise the seed of an interrupted grading, otherwise a new seed.
        """
        seed = given or self._seed or secrets.token_hex(4)
        if seed != self._seed:
            # The seed reaches the disk together with the first rows.
            self._write(_SEED, seed)
            self._seed = seed
        return seed

    def add(self, key: str, rows: Sequence[Row]) -> None:
        """Write the rows of a file to the disk."""
        self._write(key, [asdict(row) for row in rows])
        self._file.flush()

    def _write(self, key: str, value: object) -> None:
        self._file.write(f"\n{json.dumps([key, value])}\n")

    def finish(self) -> None:
        """Remove the hidden file when the table has all rows."""
        self._path.unlink(missing_ok=True)
