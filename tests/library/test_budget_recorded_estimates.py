"""Estimates equal recorded ones: one row per model in the table of `recorded_estimates.py`."""

import pytest
import recorded_estimates

from course_lib.budget import Recipe

RECIPES = [eval(row["recipe"], {"Recipe": Recipe}) for row in recorded_estimates.read()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", recorded_estimates.MODELS)
def test_estimate_of_longest_recipe_equals_recorded_estimate(name):
    rows = [
        row for row in recorded_estimates.read() if row["model"] == name and "refused" not in row
    ]
    longest = max(rows, key=lambda row: len(row["recipe"]))
    assert recorded_estimates.differences_of([longest]) == []


def test_recorded_recipes_vary_every_recipe_field():
    changed = {field for recipe in RECIPES for field in recipe.changed_fields()}
    assert changed == Recipe.__dataclass_fields__.keys()
