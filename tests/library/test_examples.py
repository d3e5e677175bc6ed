"""The examples run unchanged, and print equal predicted and measured bytes."""

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
ARGUMENTS = {"two_ranks.py": ["fsdp"]}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_example_script_states_its_command_and_prediction_equals_measurement(
    path, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", [str(path), *ARGUMENTS.get(path.name, [])])
    runpy.run_path(str(path), run_name="__main__")
    assert f"python examples/{path.name}" in path.read_text("utf-8").split('"""')[1]
    lines = capsys.readouterr().out.splitlines()
    counts = [[int(n.replace(",", "")) for n in re.findall(r"\d[\d,]{4,}", line)] for line in lines]
    if path.name == "your_budget.py":  # the first recipe that fits, and its run
        assert counts[0][0] == counts[-1][0] <= 9_000_000
    else:
        assert counts and all(predicted == measured for predicted, measured in counts)
