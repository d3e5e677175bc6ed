"""Lesson 03: which activations to forget."""
