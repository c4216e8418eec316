"""Starts the kernel tests in Triton's interpreter, in processes of their own, several at once: each takes minutes of a core."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy
import pytest

FILES = ("test_kernels.py", "test_token_linear.py", "test_fused.py", "test_full_sampler.py", "test_lowbit.py")


def _play(file: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not gpu", "-p", "no:cacheprovider"]
    command.append(str(Path(__file__).with_name(file)))
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def playing() -> Iterator[dict[str, Future[subprocess.CompletedProcess[str]]]]:
    triton = pytest.importorskip("triton", reason="needs Triton")
    if triton.__version__.startswith("3.6.") and numpy.lib.NumpyVersion(numpy.__version__) >= "2.4.0":
        pytest.skip("needs Triton 3.7 or NumPy before 2.4: Triton 3.6's interpreter takes arrays of one element for numbers")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {file: pool.submit(_play, file) for file in FILES}


@pytest.mark.parametrize("file", FILES)
def test_every_kernel_is_its_twin_in_the_interpreter(playing, file):
    done = playing[file].result()
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout
