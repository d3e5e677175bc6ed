"""Functions for PyTorch that several modules use, and the paths of its private modules.

No other file of the library names a private module of torch in its code, except
`checkpoint/readable.py`, which is copied alone. If a new torch has moved or removed a name, change
it here and in `tests/test_torch_doors.py`, which lists what the library uses.

A copy of a technique needs only those of these modules that it imports.
"""
