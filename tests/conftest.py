"""What all tests share: GPU tests are skipped, and say so, where there is no GPU."""

import os

import pytest
import torch

# The notebooks' outputs are stored with the default language; nbval's kernels inherit this environment.
os.environ.pop("COURSE_LANG", None)

# Two workers with a thread for every core each would wait for one another most of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU; run `make gpu` on a machine that has one")
