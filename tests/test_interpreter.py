"""The kernels' tests in Triton's interpreter. TRITON_INTERPRET is read at import: each file is a process of its own, which
gives way to whatever plays beside it.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

triton = pytest.importorskip("triton", reason="needs Triton")
if triton.__version__.startswith("3.6.") and numpy.lib.NumpyVersion(numpy.__version__) >= "2.4.0":
    pytest.skip(
        "needs Triton 3.7 or NumPy before 2.4: Triton 3.6's interpreter takes arrays of one element for numbers",
        allow_module_level=True,
    )

FILES = [f"runtime/ops/test_{name}.py" for name in ("kernels", "token_linear", "lowbit", "fused", "full_sampler")] + [
    "bench/test_fusion_kernels.py"
]


@pytest.mark.timeout(0)  # each test of the process has its own
@pytest.mark.parametrize("file", FILES)
def test_every_kernel_is_its_twin_in_the_interpreter(file):
    command = ["nice", sys.executable, "-m", "pytest", "-q", "-x", "-m", "not gpu", "-p", "no:cacheprovider"]
    command += [str(Path(__file__).parent / file)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout
