"""The kernels' tests in Triton's interpreter. Each file takes up to minutes in a process of its own: conftest.py starts them
before the first test, they play beside all others, and this file comes behind the folders to hear how they ended.
"""

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
def test_every_kernel_is_its_twin_in_the_interpreter(interpreted, file):
    done = interpreted(file)
    out, err = done.communicate()
    assert done.returncode == 0, out[-4000:] + err[-2000:]
    assert "skipped" not in out
