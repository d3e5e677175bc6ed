"""Lesson 00: how much memory a training step can save."""
