"""Lesson 06: attention that keeps no scores."""

from course_lib.lessons.older_edition import reject_names_in

__getattr__ = reject_names_in(__name__)
