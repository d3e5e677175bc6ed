"""PAIRS: what lessons that are not converted yet import; it goes with them."""

from course_lib.labels import both as parts
from course_lib.labels import of as label

__all__ = ["label", "parts"]
