"""Owns weights of 8 bits (e4m3): how they lie in memory, what kernels multiply with, and the way back to a dense matrix.

Does not own the products (token_linear; of batches norm_linear, proj_residual, norm_gate_up), nor rounding (lowbit).

Bytes 2k and 2k + 1 of a row are in features k and in / 2 + k: so a thread's 16-byte load goes with two of x, of 8 in features
each. One row's become operands by their bits alone (`pairs`), the even bytes of a word of 32 bits being neighbours, and the odd
ones. A batch's go to the tensor cores as they are, and x is put in their order.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from runtime.ops._triton import tl, triton
from runtime.ops.lowbit import LowBitRows


@dataclass(frozen=True)
class Fp8:
    """A weight `[out, in]` in e4m3; stands where a dense weight tensor stands in `Linear`.

    Attributes:
        codes: `[out, in]` uint8, in the order above; in is even.
        scales: `[out, groups]` float32, multiplied in.
        group: in features that share a scale: 128, or 0: all of them.
        scratch: memory for the dense weight, shared by all weights of a model and free to be overwritten by any of them.
    """

    codes: Tensor
    scales: Tensor
    group: int
    scratch: Tensor

    format: ClassVar[str] = "fp8"

    @classmethod
    def empty(cls, shape: tuple[int, int], group: int, scratch: Tensor) -> "Fp8":
        """Not yet filled, on scratch's device."""
        codes = torch.empty(shape, dtype=torch.uint8, device=scratch.device)
        scales = torch.empty((shape[0], shape[1] // group if group else 1), device=scratch.device)
        return cls(codes, scales, group, scratch)

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def __getitem__(self, rows: slice) -> LowBitRows:
        return LowBitRows(self, rows.start, rows.stop)

    def fill(self, row: int, codes: Tensor, scales: Tensor, zeros: Tensor | None = None) -> None:
        """Put in rows from `row` on: codes `[rows, in]` uint8 in the order of in features, scales `[rows, groups]`."""
        assert zeros is None
        rows, width = codes.shape
        self.codes[row : row + rows].view(rows, -1, 2).copy_(codes.reshape(rows, 2, width // 2).transpose(1, 2))
        self.scales[row : row + rows] = scales

    def unpack(self) -> Tensor:
        """The codes `[out, in]` uint8 in the order of in features."""
        return self.codes.view(len(self.codes), -1, 2).transpose(1, 2).reshape(self.shape)

    def dense_torch(self) -> Tensor:
        """The values `[out, in]` float32, exact. The torch twin of the kernel below."""
        scales = self.scales.repeat_interleave(self.group, 1) if self.group else self.scales
        return self.unpack().view(torch.float8_e4m3fn).float() * scales

    def dense_into(self, out: Tensor) -> Tensor:
        """The values in out's type, by one launch. Bytes: codes and scales read, out written."""
        rows, width = self.shape
        words = self.codes.view(torch.int16)
        _dense_kernel[(rows, triton.cdiv(width // 2, 1024))](
            *(words, self.scales, out), WIDTH=width, GROUPS=self.scales.shape[1], GROUP=self.group, BLOCK=1024
        )
        return out


@triton.jit
def _value(code):
    """An e4m3 code in int32 -> float32. The bits, put where float32 has its own, are 2^-120 of the value, denormals too."""
    return ((code & 0x80) << 24 | (code & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36


PAIRS = """{{
    .reg .b32 a, b, c, d;
    shl.b32 a, $2, {low}; shl.b32 b, $2, 8; and.b32 b, b, 0x80008000; lop3.b32 $0, a, {mask}, b, 0xea;
    shr.b32 c, $2, {high}; and.b32 d, $2, 0x80008000; lop3.b32 $1, c, {mask}, d, 0xea;
}}"""
BF16_PAIRS = tl.constexpr(PAIRS.format(low=4, high=4, mask="0x07f007f0"))
FP16_PAIRS = tl.constexpr(PAIRS.format(low=7, high=1, mask="0x3f803f80"))

UNITS = {torch.bfloat16: 2.0**-120, torch.float16: 2.0**-8}
"""What a weight of 1 is for `pairs`: the bits, put where a type has its own, are so much times the value, denormals too. In
float32 it is 1."""


@triton.jit
def pairs(words, DOT_DTYPE: tl.constexpr):
    """The low and the high bytes of words of 16 bits as numbers of DOT_DTYPE, each of the words' shape."""
    if tl.float32 == DOT_DTYPE:
        w = words.to(tl.int32)
        low, high = _value(w & 0xFF), _value((w >> 8) & 0xFF)
    else:
        ASM: tl.constexpr = BF16_PAIRS if tl.bfloat16 == DOT_DTYPE else FP16_PAIRS
        low, high = tl.inline_asm_elementwise(ASM, "=&r,=&r,r", [words], dtype=(tl.int16, tl.int16), is_pure=True, pack=2)
        low, high = low.to(DOT_DTYPE, bitcast=True), high.to(DOT_DTYPE, bitcast=True)
    return low, high


@triton.jit
def _dense_kernel(
    words_ptr, scales_ptr, out_ptr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    HALF: tl.constexpr = WIDTH // 2
    words = tl.load(words_ptr + row * HALF + k, mask=k < HALF, other=0).to(tl.int32)
    for half in tl.static_range(2):
        at = half * HALF + k
        scale = tl.load(scales_ptr + row * GROUPS + (at // GROUP if GROUP else at * 0), mask=k < HALF, other=0.0)
        tl.store(out_ptr + row * WIDTH + at, (_value(words >> 8 * half) * scale).to(out_ptr.dtype.element_ty), mask=k < HALF)
