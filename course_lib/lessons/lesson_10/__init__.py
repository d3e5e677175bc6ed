"""Project 10: predict, check and reduce the memory of a training step of your own model."""

from course_lib.lessons.older_edition import reject_names_in

__getattr__ = reject_names_in(__name__)
