"""For every test: torch keeps to one thread, here and in processes that tests start, since several share the machine; cuBLAS
has no workspace, as behind every door; and tests marked `gpu` are skipped without one. For `make test`: what plays beside what.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":0:0")  # read at torch's first product

import pytest
import torch

torch.set_num_threads(1)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """Two, which two cores play at once. A GPU is one session's alone: what it is timed at is not another's work."""
    return 1 if torch.cuda.is_available() else 2


def pytest_collection_modifyitems(items):
    """Files of minutes begin first, so that no worker is left alone with one: the interpreter's, whose processes give way, and
    beside them the server's, where clients and a browser watch what comes when."""

    def place(item):
        return item.path.name != "test_interpreter.py", item.path.parent.name != "server", "compile" not in item.path.name

    items.sort(key=place)
