"""Run the scoreboard: compare each technique of the library with the tool that an engineer would
otherwise use (its peer), on the same work, with alternating calls in one run.

    python benchmarks                        # every group, about 5 minutes on two quiet cores
    python benchmarks memory offload         # only these groups
    python benchmarks --page docs            # write docs/scoreboard.md and docs/scoreboard.zh.md

A ratio below 1 means that the course's median time is smaller. Ratios carry over to other machines
better than seconds do; bytes are exact. The results go to build/bench.json as well.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib
import json
import os
import platform
import time
import warnings
from pathlib import Path

import torch
from page import GROUPS, short, write
from scoreboard import Row, one_thread

import course_lib


def line(row: Row) -> str:
    """Return a row as a line of text."""
    numbers = [short(each) for each in (row.ratio, row.low, row.high) if each is not None]
    ratio = "{:>8} ({} to {})".format(*numbers) if numbers else ""
    sizes = [f"{size:,}" if size is not None else "" for size in (row.course_bytes, row.peer_bytes)]
    return f"{row.peer:28}{ratio:26}{sizes[0]:>16}{sizes[1]:>16}  {row.note}".rstrip()


def measured(groups: list[str], rounds: int) -> dict[str, list[Row]]:
    """Run the groups, print each row when it is measured, and return a dict from group to rows."""
    found: dict[str, list[Row]] = {}
    for group in groups:
        found[group], work, start = [], None, time.perf_counter()
        print(f"\n== {group}")
        for row in importlib.import_module(group).rows(rounds):
            if row.work != work:
                work = row.work
                print(work)
            print("  " + line(row), flush=True)
            found[group].append(row)
        print(f"({time.perf_counter() - start:.0f} s)")
    return found


def facts() -> dict[str, str]:
    """Return the date, machine and versions of a run, with which users can judge the results."""
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "course_lib": course_lib.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--rounds", type=int, default=7, help="calls that count (default: 7)")
    parser.add_argument("--output", type=Path, default=Path("build/bench.json"), metavar="FILE")
    parser.add_argument("--page", type=Path, metavar="FOLDER", help="write the pages there")
    given = parser.parse_args()
    if unknown := [group for group in given.groups if group not in GROUPS]:
        parser.error(f"GROUP must be one of {', '.join(GROUPS)}, got {', '.join(unknown)}")
    if given.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {given.rounds}")
    warnings.simplefilter("ignore")
    with one_thread():
        found = measured(given.groups or list(GROUPS), given.rounds)
    stored = {group: [dataclasses.asdict(row) for row in rows] for group, rows in found.items()}
    given.output.parent.mkdir(parents=True, exist_ok=True)
    about = facts() | {"rounds": str(given.rounds)}
    given.output.write_text(json.dumps(about | {"groups": stored}, indent=1) + "\n")
    if given.page:
        write(found, about, given.page)


if __name__ == "__main__":
    main()
