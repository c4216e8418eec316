"""Owns the import of Triton. Where it is not installed (macOS and Windows have no build), a stand-in lets each kernel's file
be imported for the torch twin beside it; `runtime.device.resolve` refuses CUDA there, so no kernel is launched.
"""

from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:

    class _Absent:
        """Takes the place of the decorator and of annotations in kernel signatures; does nothing else."""

        constexpr = staticmethod(lambda value: value)

        @staticmethod
        def jit(kernel: Any) -> Any:
            return kernel

    triton = tl = _Absent()

__all__ = ["tl", "triton"]
