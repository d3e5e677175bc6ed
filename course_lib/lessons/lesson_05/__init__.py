"""Lesson 05: split the batch."""
