"""What the notebooks share: the language switch, figures, tables, and checks for the exercises.

Works without IPython and pandas (then as plain text), and needs matplotlib only to draw.
"""

from . import exercises
from .exercises import *  # noqa: F403 - every check_<exercise>
from .figures import (
    COLORS,
    category_label,
    category_look,
    figure,
    phase_label,
    predicted_and_measured,
    schedule_pictures,
    timelines,
    waterfall_picture,
)
from .gpu import on_gpu
from .languages import language, text
from .machine import about_this_machine
from .maps import course_map
from .playgrounds import (
    activation_playground,
    budget_playground,
    draw_activation_bytes,
    draw_budget,
    draw_schedule,
    schedule_playground,
)
from .said import what_you_may_have_read
from .tables import Table, claims, compare, predictions, table
from .workers import ddp_bytes

__all__ = [
    "COLORS",
    "Table",
    "about_this_machine",
    "activation_playground",
    "budget_playground",
    "category_label",
    "category_look",
    "claims",
    "compare",
    "course_map",
    "ddp_bytes",
    "draw_activation_bytes",
    "draw_budget",
    "draw_schedule",
    "figure",
    "language",
    "on_gpu",
    "phase_label",
    "predicted_and_measured",
    "predictions",
    "schedule_pictures",
    "schedule_playground",
    "table",
    "text",
    "timelines",
    "waterfall_picture",
    "what_you_may_have_read",
    *exercises.__all__,
]
