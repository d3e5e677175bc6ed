"""What the notebooks share: the language switch, figures, tables, and checks for the exercises.

Works without IPython and pandas (then as plain text), and needs matplotlib only to draw.
"""

from . import exercises
from .exercises import *  # noqa: F403 - every check_<exercise>
from .figures import COLORS, category_label, figure, phase_label, timelines
from .languages import language, text
from .tables import Table, claims, compare, predictions, table

__all__ = [
    "COLORS",
    "Table",
    "category_label",
    "claims",
    "compare",
    "figure",
    "language",
    "phase_label",
    "predictions",
    "table",
    "text",
    "timelines",
    *exercises.__all__,
]
