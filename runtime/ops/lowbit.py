"""Owns weights of 4 bits, in tiles: how they lie in memory and the way back to a dense matrix; and for 8 bits too, rounding.

Does not own the products (lowbit_linear), the checkpoints they are read from (models.quantized) or how 8 bits lie (fp8).

A tile is 512 bytes: 16 out features by 64 in features, 16 bytes for each of a warp's 32 lanes, in the order in which the tensor
cores want a 16 x 16 operand (PTX ISA, mma.m16n8k16): lane 4g + t holds, of rows g and g + 8 and of each 16 in features, numbers
2t, 2t + 1, 2t + 8 and 2t + 9. One 16-byte load is four operands, and nothing moves between lanes. Each 16-bit word holds the
same place of all four, the first lowest.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from runtime.ops._triton import tl, triton

if TYPE_CHECKING:
    from runtime.ops.fp8 import Fp8

FORMATS = ("fp8", "int4")
TILE_ROWS = 16
TILE_WIDTH = 64

E4M3_MAX = 448.0

ROWS_AT_ONCE = 1024
"""Rows rounded at a time, which bounds what is dense on the way."""


@dataclass(frozen=True)
class LowBit:
    """A weight `[out, in]` in tiles; stands where a dense weight tensor stands in `Linear`.

    Attributes:
        shape: (out, in), as of the dense weight.
        group: in features that share a scale: 128, 64 or 32.
        tiles: `[blocks, tiles a row, 32, 8]` int16, a block being 16 rows; rows and in features past the shape are zero.
        scales: `[blocks, groups, 16]`, multiplied in; float32, bfloat16 or float16.
        zeros: `[blocks, groups, 16]` uint8, the code that stands for 0; None: 8 everywhere.
        scratch: memory for the dense weight, shared by all weights of a model and free to be overwritten by any of them.
    """

    shape: tuple[int, int]
    group: int
    tiles: Tensor
    scales: Tensor
    zeros: Tensor | None
    scratch: Tensor

    format: ClassVar[str] = "int4"

    @classmethod
    def empty(
        cls, shape: tuple[int, int], group: int, scratch: Tensor, scale_dtype: torch.dtype, zeros: bool = False
    ) -> "LowBit":
        """Of all zeros, on scratch's device."""
        blocks, wide = -(-shape[0] // TILE_ROWS), -(-shape[1] // TILE_WIDTH)
        tiles = torch.zeros((blocks, wide, 32, 8), dtype=torch.int16, device=scratch.device)
        scales = torch.zeros((blocks, wide * TILE_WIDTH // group, TILE_ROWS), dtype=scale_dtype, device=scratch.device)
        return cls(shape, group, tiles, scales, torch.zeros_like(scales, dtype=torch.uint8) if zeros else None, scratch)

    @property
    def nbytes(self) -> int:
        return self.tiles.nbytes + self.scales.nbytes + (self.zeros.nbytes if self.zeros is not None else 0)

    def __getitem__(self, rows: slice) -> "LowBitRows":
        return LowBitRows(self, rows.start, rows.stop)

    def fill(self, row: int, codes: Tensor, scales: Tensor, zeros: Tensor | None = None) -> None:
        """Put in rows from `row`, a multiple of 16, on: codes `[rows, in]` uint8 as `quantize` gives them, scales and zeros
        `[rows, groups]`, or `[rows, 1]` for all groups alike."""
        assert row % TILE_ROWS == 0
        count, wide = -(-len(codes) // TILE_ROWS), self.tiles.shape[1]
        blocks = slice(row // TILE_ROWS, row // TILE_ROWS + count)
        full = torch.full((count * TILE_ROWS, wide * TILE_WIDTH), 8, dtype=torch.uint8, device=codes.device)
        full[: codes.shape[0], : codes.shape[1]] = codes
        # rows: half, g; in features: tile, operand j, half h, lane t, pair i
        parts = full.view(count, 2, 8, wide, 4, 2, 4, 2).permute(0, 3, 2, 6, 5, 1, 7, 4).to(torch.int32)
        words = (parts << torch.arange(0, 16, 4, dtype=torch.int32, device=parts.device)).sum(-1)
        words = torch.where(words > 0x7FFF, words - 0x10000, words)
        self.tiles[blocks] = words.to(torch.int16).reshape(count, wide, 32, 8)
        for own, given in ((self.scales, scales), (self.zeros, zeros)):
            if own is not None and given is not None:
                padded = torch.zeros((count * TILE_ROWS, own.shape[1]), dtype=own.dtype, device=own.device)
                padded[: len(given), : given.shape[1] if given.shape[1] > 1 else None] = given
                own[blocks] = padded.view(count, TILE_ROWS, -1).transpose(1, 2)

    def unpack(self) -> Tensor:
        """The codes `[out, in]` uint8 again."""
        blocks, wide = self.tiles.shape[:2]
        words = self.tiles.view(blocks, wide, 8, 4, 2, 2, 2)
        parts = torch.stack([words >> 4 * j & 0xF for j in range(4)], -1)
        full = parts.permute(0, 5, 2, 1, 7, 4, 3, 6).reshape(blocks * TILE_ROWS, -1)
        return full[: self.shape[0], : self.shape[1]].to(torch.uint8)

    def dense_torch(self) -> Tensor:
        """The values `[out, in]` float32, exact. The torch twin of the kernel below."""

        def spread(own: Tensor) -> Tensor:
            rows = own.transpose(1, 2).reshape(-1, own.shape[1])[: self.shape[0]].float()
            return rows.repeat_interleave(self.group, 1)[:, : self.shape[1]]

        return (self.unpack().float() - (8.0 if self.zeros is None else spread(self.zeros))) * spread(self.scales)

    def dense_into(self, out: Tensor) -> Tensor:
        """The values in out's type, by one launch. Bytes: tiles and scales read, out written."""
        blocks, wide = self.tiles.shape[:2]
        _dense_kernel[(blocks, triton.cdiv(wide, 8))](
            *(self.tiles, self.scales, self.zeros, out, self.shape[0]),
            WIDTH=self.shape[1],
            WIDE=wide,
            GROUP=self.group,
            TILES=8,
        )
        return out


@triton.jit
def _dense_kernel(
    tiles_ptr,
    scales_ptr,
    zeros_ptr,
    out_ptr,
    rows,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    GROUP: tl.constexpr,
    TILES: tl.constexpr,
):
    GROUPS: tl.constexpr = WIDE * 64 // GROUP
    block, first = tl.program_id(0), tl.program_id(1) * TILES
    i = tl.arange(0, TILES * 256)
    words = tl.load(tiles_ptr + (block.to(tl.int64) * WIDE + first) * 256 + i, mask=first * 256 + i < WIDE * 256, other=0)
    r = tl.arange(0, 16)[:, None]
    at = tl.arange(0, 16 * TILES)
    row = block.to(tl.int64) * 16 + r
    for j in tl.static_range(4):
        # tile, g, lane t, half of 16 in features, half of 16 rows, pair -> rows, in features
        codes = tl.reshape((words.to(tl.int32) >> 4 * j) & 0xF, [TILES, 8, 4, 2, 2, 2])
        codes = tl.reshape(tl.permute(codes, (4, 1, 0, 3, 2, 5)), [16, 16 * TILES])
        k = ((first + at // 16) * 64 + 16 * j + at % 16)[None, :]
        scale_at = (block * GROUPS + k // GROUP) * 16 + r
        zero = tl.load(zeros_ptr + scale_at, mask=k < WIDTH, other=0).to(tl.int32) if zeros_ptr is not None else 8
        scale = tl.load(scales_ptr + scale_at, mask=k < WIDTH, other=0.0).to(tl.float32)
        value = (codes - zero).to(tl.float32) * scale
        tl.store(out_ptr + row * WIDTH + k, value.to(out_ptr.dtype.element_ty), mask=(k < WIDTH) & (row < rows))


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

    FP8: the largest magnitude of a row (group 0) or group becomes 448. INT4: codes are value / scale + 8, and the number
    furthest from zero becomes -8, so its scale has the other sign and all 16 codes are of use. A group of zeros has scale 0 or
    next to it.

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


def dense(weight: "Tensor | LowBit | Fp8") -> Tensor:
    """The weight `[out, in]` as a matrix: itself, or its values in the type of its scratch, where they lie until the next call
    for any weight that shares it."""
    if isinstance(weight, Tensor):
        return weight
    rows, width = weight.shape
    out = weight.scratch[: rows * width].view(rows, width)
    return weight.dense_into(out) if weight.scales.is_cuda else out.copy_(weight.dense_torch())
