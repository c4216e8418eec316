"""Starts the kernel tests in Triton's interpreter, in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = Path(__file__).with_name("test_kernels.py")


def test_every_kernel_is_its_twin_in_the_interpreter():
    pytest.importorskip("triton", reason="needs Triton")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(KERNELS)]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout
