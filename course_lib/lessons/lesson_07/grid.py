"""Stored estimates of the course's step for a grid of recipes, which are slow to compute.

`python -c "from course_lib.lessons.lesson_07 import grid; grid.print_rows()"` computes all
estimates again, and a test computes some of them.
"""

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import NamedTuple

from course_lib.budget import Recipe, estimate

from .exercises import make_batch, make_model


class RecipeCosts(NamedTuple):
    """A recipe (the techniques of a training step), and the costs of a step with these techniques.

    All steps after the first step have these costs.

    Attributes:
        recipe: The recipe.
        peak_bytes: Most bytes that are live at once.
        flops: FLOPs per step.
        moved_bytes: Bytes per step that are moved to and from the lower tier.
    """

    recipe: Recipe
    peak_bytes: int
    flops: int
    moved_bytes: int


def recipes() -> Iterator[Recipe]:
    """Yield 64 recipes, which are combinations of the techniques of a training step.

    The recipes combine these choices:

    - attention: standard or flash
    - checkpoints: none, or around each layer
    - batch: whole, in 2 micro-batches, in 8 micro-batches, or whole with an optimizer step in
      backward
    - optimizer state: in memory or offloaded
    - activations: in memory or offloaded
    """
    # 0 micro-batches mean an optimizer step in backward
    combinations = product(
        ("standard", "flash"), ("none", "layers"), (1, 2, 8, 0), (0.0, 1.0), (False, True)
    )
    for attention, checkpoint, micro_batches, state, activations in combinations:
        yield Recipe(
            attention=attention,
            checkpoint=checkpoint,
            micro_batches=max(micro_batches, 1),
            in_backward=micro_batches == 0,
            offload_optimizer=state,
            page_bytes=1 << 20 if state and micro_batches else Recipe().page_bytes,
            offload_activations=activations,
        )


@cache
def stored_estimates() -> tuple[RecipeCosts, ...]:
    """Return the stored costs of all recipes that the function `recipes` yields."""
    return tuple(RecipeCosts(recipe, *row) for recipe, row in zip(recipes(), _ROWS, strict=True))


# (peak_bytes, flops, moved_bytes), in the order of `recipes`
_ROWS: tuple[tuple[int, int, int], ...] = (
    (277682584, 45097156608, 0),
    (124824984, 45097156608, 337641472),
    (222677400, 45097156608, 110010368),
    (69819800, 45097156608, 447651840),
    (207597980, 45097156608, 0),
    (159367572, 45097156608, 192937984),
    (152592796, 45097156608, 110010368),
    (104362388, 45097156608, 302948352),
    (134800820, 45097156608, 0),
    (134800820, 45097156608, 0),
    (79795636, 45097156608, 110010368),
    (79795636, 45097156608, 110010368),
    (277682588, 45097156608, 0),
    (108861852, 45097156608, 337641472),
    (222677404, 45097156608, 110010368),
    (53856668, 45097156608, 447651840),
    (134001048, 54760833024, 0),
    (134001048, 54760833024, 18874368),
    (78995864, 54760833024, 110010368),
    (78995864, 54760833024, 128884736),
    (129941916, 54760833024, 0),
    (129941916, 54760833024, 0),
    (74936732, 54760833024, 110010368),
    (74936732, 54760833024, 110010368),
    (117352884, 54760833024, 0),
    (117352884, 54760833024, 0),
    (63656336, 54760833024, 110010368),
    (63656336, 54760833024, 110010368),
    (119224732, 54760833024, 0),
    (112933276, 54760833024, 18874368),
    (64219548, 54760833024, 110010368),
    (57928092, 54760833024, 128884736),
    (252778904, 45634027520, 0),
    (126995864, 45634027520, 287309824),
    (197773720, 45634027520, 110010368),
    (71990680, 45634027520, 397320192),
    (195146140, 45634027520, 0),
    (151105948, 45634027520, 176160768),
    (140140956, 45634027520, 110010368),
    (96100764, 45634027520, 286171136),
    (131687860, 45634027520, 0),
    (131687860, 45634027520, 0),
    (76682676, 45634027520, 110010368),
    (76682676, 45634027520, 110010368),
    (252778908, 45634027520, 0),
    (109123996, 45634027520, 287309824),
    (197773724, 45634027520, 110010368),
    (54118812, 45634027520, 397320192),
    (130888088, 55297703936, 0),
    (130888088, 55297703936, 18874368),
    (75882904, 55297703936, 110010368),
    (75882904, 55297703936, 128884736),
    (128385436, 55297703936, 0),
    (128385436, 55297703936, 0),
    (73380252, 55297703936, 110010368),
    (73380252, 55297703936, 110010368),
    (116963764, 55297703936, 0),
    (116963764, 55297703936, 0),
    (63656336, 55297703936, 110010368),
    (63656336, 55297703936, 110010368),
    (118167964, 55297703936, 0),
    (109820316, 55297703936, 18874368),
    (63162780, 55297703936, 110010368),
    (54815132, 55297703936, 128884736),
)


def print_rows() -> None:
    """Compute the costs of all recipes again, and print them as lines of the stored table."""
    for recipe in recipes():
        found = estimate(make_model, make_batch, recipe)
        print(f"    ({found.peak_bytes}, {found.flops}, {found.moved_bytes}),")
