"""Starts the kernel tests in Triton's interpreter, in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest


@pytest.mark.parametrize("file", ["test_kernels.py", "test_fused.py", "test_full_sampler.py", "test_lowbit.py"])
def test_every_kernel_is_its_twin_in_the_interpreter(file):
    triton = pytest.importorskip("triton", reason="needs Triton")
    if triton.__version__.startswith("3.6.") and numpy.lib.NumpyVersion(numpy.__version__) >= "2.4.0":
        pytest.skip("needs Triton 3.7 or NumPy before 2.4: Triton 3.6's interpreter takes arrays of one element for numbers")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not gpu", "-p", "no:cacheprovider"]
    command.append(str(Path(__file__).with_name(file)))
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout
