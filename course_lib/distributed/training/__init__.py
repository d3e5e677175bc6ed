"""A training run on several ranks: its model and batches, its loop and its checkpoints.

The modules next to this package, with formulas, predictions and measurements, do not need it. They
work with the step of one rank's `Trainer`, for any model and batch.
"""
