"""Lesson 04: move bytes to a lower tier."""
