"""Editions of the course: what is made from the stored notebooks."""
