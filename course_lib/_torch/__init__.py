"""Functions for PyTorch that several modules use, and the paths of PyTorch's private modules.

No other file of the library names a private module of torch in its code, except
`checkpoint/readable.py`, which is copied alone. If a new torch has moved or removed a name, change
the name here and in `tests/test_torch_doors.py`, which lists the names that the library uses.

A copy of a technique needs only the modules of this folder that it imports.
"""
