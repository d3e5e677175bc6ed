"""Lesson 02: forget activations, and compute them again."""
