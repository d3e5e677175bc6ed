"""Lesson 03: which activations to forget."""

from course_lib.lessons.older_edition import refuse_names_in

__getattr__ = refuse_names_in(__name__)
