"""A training run on several ranks: its model and batches, its loop and its checkpoints.

Formulas, predictions and measurements, in the modules next to this package, do not need it. They
are about the step of one rank's `Trainer`, on any model and batch.
"""
