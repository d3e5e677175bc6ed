"""A training run on several ranks: its model and batches, its loop and its checkpoints.

The other modules of `course_lib.distributed` run, predict and measure single training steps of
one rank.
"""
