"""Names from PyTorch's private modules, in one place, and helpers that several packages use.

No other file of the library names a private module of PyTorch in its code, except
`checkpoint/readable.py`, which can be copied without the rest of the library. If a new version of
PyTorch moves or removes a private name, change it here and in `test_private_torch_names.py`, which
lists the names that the library uses.

A user who copies one technique needs only the modules of this folder that the technique's code
imports.
"""
