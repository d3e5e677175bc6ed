"""Lesson 09: the course's tools on your own model."""

from course_lib.lessons.older_edition import reject_names_in

__getattr__ = reject_names_in(__name__)
