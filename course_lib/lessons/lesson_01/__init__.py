"""Lesson 01: where the bytes of a training step go."""
