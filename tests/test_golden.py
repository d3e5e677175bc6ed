"""Estimates are what they were: a part of the table that `tests/golden.py` compares whole."""

import golden
import pytest

from course_lib.budget import Recipe

RECIPES = [eval(row["recipe"], {"Recipe": Recipe}) for row in golden.read()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", golden.MODELS)
def test_the_estimate_of_the_longest_recipe_of_each_model_is_what_it_was(name):
    rows = [row for row in golden.read() if row["model"] == name and "refused" not in row]
    assert golden.moved([max(rows, key=lambda row: len(row["recipe"]))]) == []


def test_some_estimates_are_of_recipes_with_another_value_in_each_field():
    changed = {field for recipe in RECIPES for field in recipe.changed_fields()}
    assert changed == Recipe.__dataclass_fields__.keys()
