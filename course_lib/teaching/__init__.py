"""Tools that all lessons share: the language switch, plots, tables, verdicts, GPU measurements.

Without IPython or pandas, the tools show plain text. Only the functions that draw need matplotlib.
Code for a single lesson is in `course_lib.lessons`.
"""

from course_lib.labels import say, text

from .claims import Claim
from .exercises import Verdict, expect_number
from .figures import (
    COLORS,
    category_label,
    category_look,
    figure,
    phase_label,
    predicted_and_measured,
)
from .playgrounds import playground
from .switch import language
from .tables import Table, compare, predictions, table
from .timeline import timelines

__all__ = [
    "COLORS",
    "Claim",
    "Table",
    "Verdict",
    "category_label",
    "category_look",
    "compare",
    "expect_number",
    "figure",
    "language",
    "phase_label",
    "playground",
    "predicted_and_measured",
    "predictions",
    "say",
    "table",
    "text",
    "timelines",
]
