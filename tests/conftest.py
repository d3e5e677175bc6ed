"""What all tests share: GPU tests are skipped, and say so, where there is no GPU."""

import os

import pytest
import torch

# The notebooks' outputs are stored with the default language; nbval's kernels inherit this environment.
os.environ.pop("COURSE_LANG", None)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU; run `make gpu` on a machine that has one")
