"""Offline compilation for `sm_90`, with no GPU: PTX and what it reads; registers, stack and local memory from the cubin."""

import os
import re
import subprocess
import tempfile
from collections import deque
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.runtime.ops.launches import Launch

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
MAX_SHARED_BYTES = 227 * 1024
TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64",
    torch.int16: "*i16", torch.uint8: "*u8", torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip
BITS = re.compile(r"\.(?:v(\d)\.)?[bfsu](\d+)$")


@dataclass(frozen=True)
class Read:
    """A load from global memory: the pointers its address was made of, bytes a thread, its hint, its side of the wait."""

    pointers: frozenset[str]
    bytes: int
    evict_first: bool
    before_wait: bool


@dataclass(frozen=True)
class Compiled:
    """A kernel's PTX and its cubin's resources; `parameters` are the names of what is passed at run time, in order."""

    ptx: str
    parameters: tuple[str, ...]
    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int

    @cached_property
    def code(self) -> list[str]:
        """Instructions, one a line, without predicates."""
        return [re.sub(r"^@!?%p\d+\s+", "", line) for line in self._lines if line.endswith(";")]

    @cached_property
    def _lines(self) -> list[str]:
        return [line.split("//")[0].strip() for line in self.ptx.splitlines()]

    @cached_property
    def before_wait(self) -> set[int]:
        """Indices into `code` of what runs before a wait: on the shortest way from the start to each, or all if there is none.
        A loop whose first turn waits is so seen up to there, and what else is in it as coming after."""
        labels, at = {}, 0
        for line in self._lines:
            if line.endswith(":"):
                labels[line[:-1]] = at
            at += line.endswith(";")
        came_from, queue = {0: 0}, deque([0])
        while queue:
            at = queue.popleft()
            operation, *rest = self.code[at].rstrip(";").split()
            following = [] if operation == "ret" or operation == "bra.uni" else [at + 1]
            following += [labels[rest[0]]] if operation.startswith("bra") else []
            for each in following:
                if each < len(self.code) and each not in came_from:
                    came_from[each] = at
                    queue.append(each)
        waits = [i for i, line in enumerate(self.code) if line.startswith("griddepcontrol.wait")]
        found: set[int] = set() if waits else set(range(len(self.code)))
        for at in waits:
            while at:
                at = came_from[at]
                found.add(at)
        return found

    def first(self, instruction: str, start: int = 0) -> int | None:
        """Index into `code` of the first line from `start` on that begins with `instruction`."""
        return next((i for i in range(start, len(self.code)) if self.code[i].startswith(instruction)), None)

    @cached_property
    def reads(self) -> list[Read]:
        """Loads from global memory, into registers or by `cp.async`, in the order of the code."""
        made_of: dict[str, frozenset[str]] = {}
        found = []
        for index, line in enumerate(self.code):
            operation, _, operands = line.replace("\t", " ").partition(" ")
            registers = re.findall(r"%\w+", operands)
            if operation.startswith("ld.param"):
                name = self.parameters[int(match[1])] if (match := re.search(r"_param_(\d+)\]", operands)) else ""
                made_of[registers[0]] = frozenset({name} if name.endswith("_ptr") else ())
            elif operation.startswith(("ld.global", "cp.async.ca.shared", "cp.async.cg.shared")):
                address = re.findall(r"\[\s*(%\w+)", operands)[-1]
                if operation.startswith("cp.async"):
                    size = int(operands.split(",")[2].rstrip(" ;"), 0)
                else:
                    vector, bits = BITS.search(operation).groups()
                    size = int(vector or 1) * int(bits) // 8
                read = Read(made_of.get(address, frozenset()), size, "evict_first" in operation, index in self.before_wait)
                found.append(read)
            elif registers:
                made_of[registers[0]] = frozenset().union(*(made_of.get(r, frozenset()) for r in registers[1:]))
        return found


def compile_launch(launch: Launch) -> Compiled:
    """Compile a kernel as the launch would on a GPU: tensors aligned to 16 bytes if their offset is, integers specialised on 1
    and on multiples of 16 where the kernel lets them."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    multiples = []
    for parameter in launch.kernel.params:
        name, value = parameter.name, launch.arguments[parameter.name]
        specialised = isinstance(value, int) and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (specialised and value == 1):
            signature[name], constants[name] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
            aligned = value.storage_offset() * value.itemsize % 16 == 0
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            aligned = specialised and value % 16 == 0
        if aligned:
            multiples.append(name)
    options = tuple(launch.options.items())
    return _compiled(launch.kernel, tuple(signature.items()), tuple(constants.items()), tuple(multiples), options)


@cache
def _compiled(kernel: Any, signature: tuple, constants: tuple, multiples: tuple, options: tuple) -> Compiled:
    names = [name for name, _ in signature]
    source = ASTSource(
        kernel,
        signature=dict(signature),
        constexprs={(names.index(name),): value for name, value in constants},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in multiples},
    )
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(options))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(binary.asm["cubin"])
        cubin.flush()
        usage = subprocess.run([CUOBJDUMP, "-res-usage", cubin.name], capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf"{word}:(\d+)", usage)[1]) for word in ("REG", "STACK", "LOCAL"))
    parameters = tuple(name for name, kind in signature if kind != "constexpr")
    return Compiled(binary.asm["ptx"], parameters, registers, stack, local, binary.metadata.shared)
