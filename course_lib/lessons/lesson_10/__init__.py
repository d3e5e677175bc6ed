"""Project 10: predict, check and reduce the memory of a training step of your own model."""
