"""For every test: torch keeps to one thread, since tests are small and several processes share the machine; cuBLAS has no
workspace, as behind every door; and tests marked `gpu` are skipped without one.
"""

import os
import subprocess
import sys
from contextlib import ExitStack
from functools import cache
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":0:0")  # read at torch's first product

import pytest
import torch

torch.set_num_threads(1)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session", autouse=True)
def interpreted(request):
    """Gives the process that plays a file's tests in Triton's interpreter (TRITON_INTERPRET is read at import). Those that are
    asked for start before the first test, and take what processor time the others leave."""
    with ExitStack() as stack:

        @cache
        def play(file):
            command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not gpu", "-p", "no:cacheprovider"]
            process = subprocess.Popen(
                [*command, str(Path(__file__).parent / file)],
                env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            os.setpriority(os.PRIO_PROCESS, process.pid, 10)
            return process

        if "PYTEST_XDIST_WORKER" not in os.environ:  # each worker would play all
            for item in request.session.items:
                if item.path.name == "test_interpreter.py":
                    play(item.callspec.params["file"])
        yield play
