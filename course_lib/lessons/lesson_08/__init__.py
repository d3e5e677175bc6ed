"""Lesson 08: beyond one device."""
