"""Lesson 06: attention that keeps no scores."""
