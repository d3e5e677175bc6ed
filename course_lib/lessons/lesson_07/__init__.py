"""Lesson 07: fit a budget with all techniques."""
