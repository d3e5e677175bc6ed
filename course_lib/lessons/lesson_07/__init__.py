"""Lesson 07: fit a budget with all techniques."""

from course_lib.lessons.older_edition import reject_names_in

__getattr__ = reject_names_in(__name__)
