"""Seconds that each file of tests takes, from a run of `make test`.

    python tests/tools/seconds.py  # print them, the longest first
    python tests/tools/seconds.py --write  # store them in seconds.csv

`make test` writes the report that is read here. Workers start the files with the most stored
seconds first, and `make check` chooses tests that fit into its time. The table also lists single
tests that take at least two seconds. Store it again after large changes, from a quiet machine.
"""

from __future__ import annotations

import argparse
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import csv_tables

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_suffix(".csv")
REPORT = ROOT / "build/tests.xml"
LISTED_SECONDS = 2  # a shorter test has no row of its own
UNKNOWN_SECONDS = 20  # of a file without a row


def measured(report: Path) -> dict[str, float]:
    """Map files, and the longer tests in them, to their seconds in a report of pytest.

    The cases of a parametrized test are added up.
    """
    files, tests = Counter[str](), Counter[str]()
    for case in ET.parse(report).iter("testcase"):
        file, duration = case.get("file"), float(case.get("time", 0))
        if file is None:  # an error while a file was collected
            continue
        files[file] += duration
        if file.endswith(".py"):
            tests[f"{file}::{case.get('name', '').partition('[')[0]}"] += duration
    longer = {name: duration for name, duration in tests.items() if duration >= LISTED_SECONDS}
    return {name: round(duration, 1) for name, duration in {**files, **longer}.items()}


def read() -> dict[str, float]:
    """Read the stored table."""
    return {row["file"]: float(row["seconds"]) for row in csv_tables.read(TABLE)}


def write(table: dict[str, float]) -> None:
    """Store a table."""
    rows = [{"file": name, "seconds": f"{taken:g}"} for name, taken in sorted(table.items())]
    csv_tables.write(TABLE, rows)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("report", nargs="?", type=Path, default=REPORT, help="JUnit XML of pytest")
    parser.add_argument("--write", action="store_true", help="replace the stored rows of its files")
    given = parser.parse_args(arguments)
    if not given.report.exists():
        parser.error(f"there is no report {given.report}; run `make test` first")
    found = measured(given.report)
    for name, duration in sorted(found.items(), key=lambda item: -item[1]):
        print(f"{duration:8.1f}  {name}")
    if given.write:
        files = {name: name.partition("::")[0] for name in (*read(), *found)}
        measured_files = {files[name] for name in found}
        kept = {
            name: duration
            for name, duration in read().items()
            if files[name] not in measured_files and (ROOT / files[name]).exists()
        }
        write(kept | found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
