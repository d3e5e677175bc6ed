"""Lesson 00: how much memory a training step can save."""

from course_lib.lessons.older_edition import reject_names_in

__getattr__ = reject_names_in(__name__)
