"""Offline compilation for `sm_90`, with no GPU: PTX, and registers, stack and local memory read from the cubin."""

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Compiled:
    ptx: str
    registers: int
    stack_bytes: int
    local_bytes: int


def compile_kernel(kernel, signature, constants, **options):
    """Compile a `@triton.jit` kernel. `signature` gives each run-time argument its Triton type; pointers are aligned."""
    names = [parameter.name for parameter in kernel.params]
    source = ASTSource(
        kernel,
        signature={name: signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature.get(name, "").startswith("*")},
    )
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(binary.asm["cubin"])
        cubin.flush()
        usage = subprocess.run([CUOBJDUMP, "-res-usage", cubin.name], capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf"{word}:(\d+)", usage)[1]) for word in ("REG", "STACK", "LOCAL"))
    return Compiled(binary.asm["ptx"], registers, stack, local)
