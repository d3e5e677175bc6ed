"""Measure several functions with alternating calls in one run, so that the ratios of their times
carry over to other machines better than seconds do."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch


def in_turns(arms: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Call every function once in each round, and return the seconds of each call.

    The order is reversed in every second round. One more round runs first as a warm-up.
    """
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for i in range(-1, rounds):
        for name in list(arms) if i % 2 else list(arms)[::-1]:
            wait()
            start = time.perf_counter()
            arms[name]()
            wait()
            if i >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


class Results:
    """Rows of a benchmark on a GPU, written to a file as JSON after each row, if one is given."""

    def __init__(self, output: Path | None):
        self.output, self.rows = output, []
        self.facts = {"torch": torch.__version__}

    def add(self, **row) -> None:
        self.rows.append(row)
        if self.output:
            self.output.write_text(json.dumps({**self.facts, "rows": self.rows}, indent=1) + "\n")
