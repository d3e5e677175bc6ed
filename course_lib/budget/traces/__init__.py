"""Trace a step on symbolic tensors, which need no memory, and run equal parts of it only once.

`process_trace` traces the step of a single process, and `rank_trace` traces the step of one of
several ranks. Both use the other files, which find equal blocks, micro-batches and stages.
"""
