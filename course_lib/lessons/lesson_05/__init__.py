"""Lesson 05: split the batch."""

from course_lib.lessons.older_edition import reject_names_in

__getattr__ = reject_names_in(__name__)
