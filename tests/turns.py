"""Times for the benchmarks: taken in one run, in turns, so that their ratios carry over to other
machines."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch


def in_turns(arms: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each arm, a call of each in every round, the order turned round from one round to
    the next."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for i in range(-1, rounds):  # the first round warms up
        for name in list(arms) if i % 2 else list(arms)[::-1]:
            wait()
            start = time.perf_counter()
            arms[name]()
            wait()
            if i >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


class Results:
    """What a benchmark measures: in a file, if one is given, as JSON, from each row on."""

    def __init__(self, output: Path | None):
        self.output, self.rows = output, []
        self.facts = {"torch": torch.__version__}

    def add(self, **row) -> None:
        self.rows.append(row)
        if self.output:
            self.output.write_text(json.dumps({**self.facts, "rows": self.rows}, indent=1) + "\n")
