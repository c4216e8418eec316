"""For every test: torch keeps to one thread, since tests are small and several processes share the machine; cuBLAS has no
workspace, as behind every door; and tests marked `gpu` are skipped without one."""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":0:0")  # read at torch's first product

import pytest
import torch

torch.set_num_threads(1)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
