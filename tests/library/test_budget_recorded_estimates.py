"""Estimates equal recorded ones: a row of each of four models in `recorded_estimates.csv`."""

import pytest
import recorded_estimates


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["convolutions", "deep decoder", "BART", "ranks"])
def test_estimate_of_longest_recipe_equals_recorded_estimate(name):
    rows = [
        row for row in recorded_estimates.read() if row["model"] == name and "refused" not in row
    ]
    longest = max(rows, key=lambda row: len(row["recipe"]))
    assert recorded_estimates.differences_of([longest]) == []
