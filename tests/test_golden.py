"""Estimates are what they were: a sample of the table that `tests/golden.py` compares whole."""

from dataclasses import replace

import golden
import pytest

SAMPLE = 16  # rows; all of the table takes minutes


@pytest.mark.filterwarnings("ignore")
def test_estimates_are_what_they_were_in_rows_that_hold_most_pairs_of_model_and_technique():
    rows = golden.sample(SAMPLE)
    assert {row["model"] for row in rows} == set(golden.MODELS)
    assert golden.moved(rows) == []


@pytest.mark.filterwarnings("ignore")
def test_a_case_that_has_moved_is_named_with_what_it_was_and_is(monkeypatch):
    row = next(
        row for row in golden.read(golden.FILE) if row["model"] == "chain" and "refused" not in row
    )
    case = golden.MODELS["chain"]
    smaller = replace(case, make_batch=lambda: case.make_batch()[:-1])
    monkeypatch.setitem(golden.MODELS, "chain", smaller)
    told = golden.moved([row])
    assert any(
        f"peak_bytes was {row['peak_bytes']}, is " in line and row["recipe"] in line
        for line in told
    )
