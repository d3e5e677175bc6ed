"""Lesson 08: beyond one device."""

from course_lib.lessons.older_edition import reject_names_in

__getattr__ = reject_names_in(__name__)
