"""Owns weights of 8 and 4 bits: how they are quantized, how they lie in memory, and the way back to a dense matrix.

Does not own the products with them (lowbit_linear), nor the checkpoints they are read from (models.quantized).

A tile is 512 bytes: 16 out features by 32 (FP8) or 64 (INT4) in features, 16 bytes for each of a warp's 32 lanes, in the order
in which the tensor cores want a 16 x 16 operand (PTX ISA, mma.m16n8k16): lane 4g + t holds, of rows g and g + 8 and of each 16
in features, numbers 2t, 2t + 1, 2t + 8 and 2t + 9. One 16-byte load is two or four operands, and nothing moves between lanes.
Each 16-bit word holds the same place of all the operands. INT4: four bits each, the first lowest. FP8: the first's sign in bit
15 and its other bits in 10 to 4, where bfloat16 has sign, exponent and mantissa (2^-120 of the value, denormals too); the
second's in bits 11, 14 to 12 and 3 to 0, which shifts of 4 bring there.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runtime.ops._triton import tl, triton

if TYPE_CHECKING:
    from runtime.ops.fp8 import Fp8

FORMATS = ("fp8", "int4")
TILE_ROWS = 16
TILE_WIDTH = {"fp8": 32, "int4": 64}
GROUPS = (128, 64, 32)
"""In features that may share a scale of an INT4 weight; of FP8, 128 or all."""

E4M3_MAX = 448.0

ROWS_AT_ONCE = 1024
"""Rows rounded at a time, which bounds what is dense on the way."""


@dataclass(frozen=True)
class LowBit:
    """A weight `[out, in]` in tiles; stands where a dense weight tensor stands in `Linear`.

    Attributes:
        format: "fp8" (e4m3) or "int4".
        shape: (out, in), as of the dense weight.
        group: in features that share a scale; 0: all of them.
        tiles: `[blocks, tiles a row, 32, 8]` int16, a block being 16 rows; rows and in features past the shape are zero.
        scales: `[blocks, groups, 16]`, multiplied in; float32, bfloat16 or float16.
        zeros: `[blocks, groups, 16]` uint8, the INT4 code that stands for 0; None: 8 everywhere.
        scratch: memory for the dense weight, shared by all weights of a model and free to be overwritten by any of them.
    """

    format: str
    shape: tuple[int, int]
    group: int
    tiles: Tensor
    scales: Tensor
    zeros: Tensor | None
    scratch: Tensor

    @classmethod
    def empty(
        cls, format: str, shape: tuple[int, int], group: int, scratch: Tensor, scale_dtype: torch.dtype, zeros: bool = False
    ) -> "LowBit":
        """Of all zeros, on scratch's device."""
        blocks, device = -(-shape[0] // TILE_ROWS), scratch.device
        wide = -(-shape[1] // TILE_WIDTH[format])
        groups = wide * TILE_WIDTH[format] // group if group else 1
        tiles = torch.zeros((blocks, wide, 32, 8), dtype=torch.int16, device=device)
        scales = torch.zeros((blocks, groups, TILE_ROWS), dtype=scale_dtype, device=device)
        return cls(format, shape, group, tiles, scales, torch.zeros_like(scales, dtype=torch.uint8) if zeros else None, scratch)

    @property
    def nbytes(self) -> int:
        return self.tiles.nbytes + self.scales.nbytes + (self.zeros.nbytes if self.zeros is not None else 0)

    def __getitem__(self, rows: slice) -> "LowBitRows":
        return LowBitRows(self, rows.start, rows.stop)

    def fill(self, row: int, codes: Tensor, scales: Tensor, zeros: Tensor | None = None) -> None:
        """Put in rows from `row`, a multiple of 16, on: codes `[rows, in]` uint8 as `quantize` gives them, scales and zeros
        `[rows, groups]`."""
        assert row % TILE_ROWS == 0
        blocks = slice(row // TILE_ROWS, row // TILE_ROWS + -(-len(codes) // TILE_ROWS))
        self.tiles[blocks] = pack(codes, self.format)
        for own, given in ((self.scales, scales), (self.zeros, zeros)):
            if own is not None and given is not None:
                padded = torch.zeros((own[blocks].shape[0] * TILE_ROWS, own.shape[1]), dtype=own.dtype, device=own.device)
                padded[: len(given), : given.shape[1]] = given
                own[blocks] = padded.view(-1, TILE_ROWS, own.shape[1]).transpose(1, 2)


@dataclass(frozen=True)
class LowBitRows:
    """Rows of a LowBit weight, from a multiple of 16 on, or of an Fp8 one, to be filled as a tensor's rows are."""

    weight: "LowBit | Fp8"
    first: int
    last: int
    dtype: None = None  # no tensor's: what is copied in is rounded

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes * (self.last - self.first) // self.weight.shape[0]

    def __getitem__(self, rows: slice) -> "LowBitRows":
        return LowBitRows(self.weight, self.first + rows.start, self.first + rows.stop)

    def copy_(self, source: Tensor, non_blocking: bool = False) -> None:
        """Round `source [rows, in]` of a floating type to the format, some rows at a time. Raises ValueError as `quantize`."""
        weight = self.weight
        for row in range(0, len(source), ROWS_AT_ONCE):
            rows = source[row : row + ROWS_AT_ONCE].to(weight.scales.device, non_blocking=non_blocking)
            weight.fill(self.first + row, *quantize(rows, weight.format, weight.group, weight.scales.dtype))

    def normal_(self, mean: float = 0.0, std: float = 1.0, generator: torch.Generator | None = None) -> None:
        """Random weights of the scratch's type, rounded to the format."""
        weight = self.weight
        for row in range(self.first, self.last, ROWS_AT_ONCE):
            size = (min(ROWS_AT_ONCE, self.last - row), weight.shape[1])
            rows = torch.empty(size, dtype=weight.scratch.dtype, device=weight.scratch.device)
            weight[row : row + size[0]].copy_(rows.normal_(mean, std, generator=generator))


def quantize(weight: Tensor, format: str, group: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """weight `[rows, in]` -> codes `[rows, in]` uint8, scales `[rows, groups]`; rounded to nearest, ties to even.

    FP8: the largest magnitude of a row or group becomes 448. INT4: codes are value / scale + 8, and the number furthest from
    zero becomes -8, so its scale has the other sign and all 16 codes are of use. A group of zeros has scale 0 or next to it.

    Raises:
        ValueError: NaN or infinity among the weights, or in features that groups do not divide.
    """
    rows, width = weight.shape
    if group and width % group:
        raise ValueError(f"{width} in features are not a multiple of the group of {group}")
    grouped = weight.float().view(rows, -1, group or width)
    furthest = grouped.gather(2, grouped.abs().argmax(2, keepdim=True))
    if not furthest.isfinite().all():
        raise ValueError("NaN or infinity among the weights")
    tiny = torch.finfo(torch.float32).tiny
    if format == "fp8":
        scales = (furthest.abs() / E4M3_MAX).clamp(min=tiny).to(scale_dtype)
        codes = (grouped / scales.float()).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        scales = (furthest / -8).to(scale_dtype)
        divisor = torch.where(scales.float().abs() < tiny, 1.0, scales.float())
        codes = (grouped / divisor).round().clamp(-8, 7).add(8).to(torch.uint8)
    return codes.view(rows, width), scales[:, :, 0]


def pack(codes: Tensor, format: str) -> Tensor:
    """codes `[rows, in]` uint8 -> tiles `[blocks, tiles a row, 32, 8]` int16. What fills a tile up is zero."""
    tile = TILE_WIDTH[format]
    blocks, wide = -(-codes.shape[0] // TILE_ROWS), -(-codes.shape[1] // tile)
    full = torch.full((blocks * TILE_ROWS, wide * tile), 8 if format == "int4" else 0, dtype=torch.uint8, device=codes.device)
    full[: codes.shape[0], : codes.shape[1]] = codes
    # rows: half, g; in features: operand j, half h, lane t, pair i
    parts = full.view(blocks, 2, 8, wide, tile // 16, 2, 4, 2).permute(0, 3, 2, 6, 5, 1, 7, 4).to(torch.int32)
    if format == "fp8":
        a, b = parts.unbind(-1)
        words = (a & 0x80) << 8 | (a & 0x7F) << 4 | (b & 0x80) << 4 | (b & 0x70) << 8 | (b & 0x0F)
    else:
        words = (parts << torch.arange(0, 16, 4, dtype=torch.int32, device=parts.device)).sum(-1)
    return torch.where(words > 0x7FFF, words - 0x10000, words).to(torch.int16).reshape(blocks, wide, 32, 8)


def unpack(weight: LowBit) -> Tensor:
    """The codes `[out, in]` uint8 again."""
    blocks, wide = weight.tiles.shape[:2]
    words = weight.tiles.view(blocks, wide, 8, 4, 2, 2, 2).to(torch.int32) & 0xFFFF
    if weight.format == "fp8":
        a = words >> 8 & 0x80 | words >> 4 & 0x7F
        b = words >> 4 & 0x80 | words >> 8 & 0x70 | words & 0x0F
        parts = torch.stack((a, b), -1)
    else:
        parts = torch.stack([words >> 4 * j & 0xF for j in range(4)], -1)
    rows, width = weight.shape
    full = parts.permute(0, 5, 2, 1, 7, 4, 3, 6).reshape(blocks * TILE_ROWS, -1)
    return full[:rows, :width].to(torch.uint8)


def dense_torch(weight: "LowBit | Fp8") -> Tensor:
    """The values `[out, in]` float32, exact. The torch twin of the kernel below."""
    if not isinstance(weight, LowBit):
        return weight.dense_torch()
    codes = unpack(weight)
    rows, width = weight.shape
    scales, zeros = (
        None if own is None else own.transpose(1, 2).reshape(-1, own.shape[1])[:rows].float()
        for own in (weight.scales, weight.zeros)
    )
    assert scales is not None

    def spread(own: Tensor) -> Tensor:
        return own.repeat_interleave(weight.group, 1)[:, :width] if weight.group else own

    if weight.format == "fp8":
        return codes.view(torch.float8_e4m3fn).float() * spread(scales)
    return (codes.float() - (8.0 if zeros is None else spread(zeros))) * spread(scales)


@triton.jit
def _value(bits):
    """bfloat16 bits in the low half of int32 -> float32. By integers: Triton's interpreter loses bfloat16's denormals."""
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def fp8_values(words):
    """16-bit words of tiles -> 2^-120 of what they hold for each of two operands, float32."""
    w = words.to(tl.int32)
    return _value(w & 0x87F0), _value(((w << 4) & 0x80F0) | ((w >> 4) & 0x0700))


@triton.jit
def int4_values(words):
    """16-bit words of tiles -> 128 + the code they hold for each of four operands, float32."""
    w = words.to(tl.int32)
    return (
        _value((w & 0xF) | 0x4300),
        _value(((w >> 4) & 0xF) | 0x4300),
        _value(((w >> 8) & 0xF) | 0x4300),
        _value(((w >> 12) & 0xF) | 0x4300),
    )


@triton.jit
def operand(words, TILES: tl.constexpr):
    """`[TILES * 256]` words or values of one 16-bit place, in memory's order -> a 16 x (16 * TILES) matrix."""
    parts = tl.reshape(words, [TILES, 8, 4, 2, 2, 2])  # tile, g, t, half of 16 in features, half of 16 rows, pair
    return tl.reshape(tl.permute(parts, (4, 1, 0, 3, 2, 5)), [16, 16 * TILES])


@triton.jit
def _dense_kernel(
    tiles_ptr,
    scales_ptr,
    zeros_ptr,
    out_ptr,
    rows,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    FP8: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    TILES: tl.constexpr,
):
    block, first = tl.program_id(0), tl.program_id(1) * TILES
    i = tl.arange(0, TILES * 256)
    words = tl.load(tiles_ptr + (block.to(tl.int64) * WIDE + first) * 256 + i, mask=first * 256 + i < WIDE * 256, other=0)
    r = tl.arange(0, 16)
    OPERANDS: tl.constexpr = 2 if FP8 else 4
    at = tl.arange(0, 16 * TILES)
    parts = fp8_values(words) if FP8 else int4_values(words)
    for j in tl.static_range(OPERANDS):
        k = (first + at // 16) * (16 * OPERANDS) + 16 * j + at % 16
        inside = k < WIDTH
        GROUPS: tl.constexpr = WIDE * 16 * OPERANDS // GROUP if GROUP else 1
        scale_at = (block * GROUPS + (k // GROUP if GROUP else k * 0))[None, :] * 16 + r[:, None]
        value = operand(parts[j], TILES)
        if FP8:
            value *= 1.329227995784916e36  # 2^120
        elif HAS_ZEROS:
            value -= 128.0 + tl.load(zeros_ptr + scale_at, mask=inside[None, :], other=0).to(tl.float32)
        else:
            value -= 136.0
        value *= tl.load(scales_ptr + scale_at, mask=inside[None, :], other=0.0).to(tl.float32)
        row = block.to(tl.int64) * 16 + r[:, None]
        tl.store(out_ptr + row * WIDTH + k[None, :], value.to(out_ptr.dtype.element_ty), mask=inside[None, :] & (row < rows))


def dense(weight: "Tensor | LowBit | Fp8") -> Tensor:
    """The weight `[out, in]` as a matrix: itself, or its values in the type of its scratch, where they lie until the next call
    for any weight that shares it.

    Bytes: tiles and scales read, out * in values written.
    """
    if isinstance(weight, Tensor):
        return weight
    rows, width = weight.shape
    out = weight.scratch[: rows * width].view(rows, width)
    if not weight.scales.is_cuda:
        return out.copy_(dense_torch(weight))
    return dense_into(out, weight)


def dense_into(out: Tensor, weight: "LowBit | Fp8") -> Tensor:
    """The kernel of `dense`, launched."""
    if not isinstance(weight, LowBit):
        return weight.dense_into(out)
    blocks, wide = weight.tiles.shape[:2]
    zeros = weight.zeros if weight.zeros is not None else weight.scales
    _dense_kernel[(blocks, triton.cdiv(wide, 8))](
        *(weight.tiles, weight.scales, zeros, out, weight.shape[0]),
        WIDTH=weight.shape[1],
        WIDE=wide,
        FP8=weight.format == "fp8",
        GROUP=weight.group,
        HAS_ZEROS=weight.zeros is not None,
        TILES=8,
    )
    return out
