"""Trace a step on symbolic tensors, which need no memory, without running its equal parts again.

`process_trace` traces the step of a single process, and `rank_trace` that of one of several ranks.
Both call the other files, which find equal blocks, micro-batches and stages.
"""
