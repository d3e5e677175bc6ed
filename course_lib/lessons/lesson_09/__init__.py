"""Lesson 09: the course's tools on your own model."""

from course_lib.lessons.older_edition import refuse_names_in

__getattr__ = refuse_names_in(__name__)
