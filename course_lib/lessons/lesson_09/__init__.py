"""Lesson 09: the course's tools on your own model."""
