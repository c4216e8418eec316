"""Owns weights of 4 bits, in tiles: how they lie in memory and the way back to a dense matrix; and for 8 bits too, rounding.

Does not own the products (token_linear, lowbit_batch), the checkpoints they are read from (models.quantized) or how 8 bits lie
(fp8).

A tile is 512 bytes: 8 out features by 128 in features, of which thread 4g + t has 16 bytes: of row g, and of each 32 in
features, numbers 8t to 8t + 7, which are its places of two of the tensor cores' operands (PTX ISA, mma.m16n8k16). So nothing
moves between lanes, whether a warp takes a tile (a batch) or 64 bytes of one row in each of eight (one token), and one token's
x is 16 bytes a lane as well. Each 16-bit word holds the same place of four operands, the first lowest: of the 0th, 1st, 4th and
5th of a tile, or of the 2nd, 3rd, 6th and 7th.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from runtime.ops._triton import tl, triton

if TYPE_CHECKING:
    from runtime.ops.fp8 import Fp8

FORMATS = ("fp8", "int4")
TILE_ROWS = 8
TILE_WIDTH = 128

BLOCK_ROWS = 16
"""Rows that a batch's product takes together: those of two tiles."""

E4M3_MAX = 448.0

ROWS_AT_ONCE = 1024
"""Rows rounded at a time, which bounds what is dense on the way."""


CODES = tl.constexpr("""{
    .reg .b32 a; shr.b32 a, $4, 8;
    and.b32 $0, $4, 0x000f000f; and.b32 $1, $4, 0x00f000f0; and.b32 $2, a, 0x000f000f; and.b32 $3, a, 0x00f000f0;
}""")

SMALLEST = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}
"""The smallest number of a type, which a code of 1 is for `codes`."""


@dataclass(frozen=True)
class LowBit:
    """A weight `[out, in]` in tiles; stands where a dense weight tensor stands in `Linear`.

    Attributes:
        shape: (out, in), as of the dense weight.
        group: in features that share a scale: 128, 64 or 32.
        tiles: `[blocks, 2, tiles a row, 32, 8]` int16, a block being 16 rows; rows and in features past the shape are zero.
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
        blocks, wide = -(-shape[0] // BLOCK_ROWS), -(-shape[1] // TILE_WIDTH)
        tiles = torch.zeros((blocks, 2, wide, 32, 8), dtype=torch.int16, device=scratch.device)
        scales = torch.zeros((blocks, wide * TILE_WIDTH // group, BLOCK_ROWS), dtype=scale_dtype, device=scratch.device)
        return cls(shape, group, tiles, scales, torch.zeros_like(scales, dtype=torch.uint8) if zeros else None, scratch)

    @property
    def words(self) -> Tensor:
        """The tiles as `[rows, words a row]`, of which eight rows take turns at 32 words each; a view."""
        return self.tiles.view(self.tiles.shape[0] * BLOCK_ROWS, -1)

    @property
    def nbytes(self) -> int:
        return self.tiles.nbytes + self.scales.nbytes + (self.zeros.nbytes if self.zeros is not None else 0)

    def __getitem__(self, rows: slice) -> "LowBitRows":
        return LowBitRows(self, rows.start, rows.stop)

    def fill(self, row: int, codes: Tensor, scales: Tensor, zeros: Tensor | None = None) -> None:
        """Put in rows from `row`, a multiple of 16, on: codes `[rows, in]` uint8 as `quantize` gives them, scales and zeros
        `[rows, groups]`, or `[rows, 1]` for all groups alike."""
        assert row % BLOCK_ROWS == 0
        count, wide = -(-len(codes) // BLOCK_ROWS), self.tiles.shape[2]
        blocks = slice(row // BLOCK_ROWS, row // BLOCK_ROWS + count)
        full = torch.full((count * BLOCK_ROWS, wide * TILE_WIDTH), 8, dtype=torch.uint8, device=codes.device)
        full[: codes.shape[0], : codes.shape[1]] = codes
        # rows: tile, g; in features: tile, two bits of an operand, lane t, the third, half, pair
        parts = full.view(count, 2, 8, wide, 2, 2, 4, 2, 2, 2).permute(0, 1, 3, 2, 6, 5, 8, 9, 4, 7).flatten(-2).to(torch.int32)
        words = (parts << torch.arange(0, 16, 4, dtype=torch.int32, device=parts.device)).sum(-1)
        words = torch.where(words > 0x7FFF, words - 0x10000, words)
        self.tiles[blocks] = words.to(torch.int16).reshape(count, 2, wide, 32, 8)
        for own, given in ((self.scales, scales), (self.zeros, zeros)):
            if own is not None and given is not None:
                padded = torch.zeros((count * BLOCK_ROWS, own.shape[1]), dtype=own.dtype, device=own.device)
                padded[: len(given), : given.shape[1] if given.shape[1] > 1 else None] = given
                own[blocks] = padded.view(count, BLOCK_ROWS, -1).transpose(1, 2)

    def unpack(self) -> Tensor:
        """The codes `[out, in]` uint8 again."""
        blocks, _, wide = self.tiles.shape[:3]
        words = self.tiles.view(blocks, 2, wide, 8, 4, 2, 2, 2)
        parts = torch.stack([words >> 4 * j & 0xF for j in range(4)], -1).unflatten(-1, (2, 2))
        full: Tensor = parts.permute(0, 1, 3, 2, 8, 5, 4, 9, 6, 7).reshape(blocks * BLOCK_ROWS, -1)
        return full[: self.shape[0], : self.shape[1]].to(torch.uint8)

    def dense_torch(self) -> Tensor:
        """The values `[out, in]` float32, exact. The torch twin of the kernel below."""

        def spread(own: Tensor) -> Tensor:
            rows = own.transpose(1, 2).reshape(-1, own.shape[1])[: self.shape[0]].float()
            return rows.repeat_interleave(self.group, 1)[:, : self.shape[1]]

        return (self.unpack().float() - (8.0 if self.zeros is None else spread(self.zeros))) * spread(self.scales)

    def dense_into(self, out: Tensor) -> Tensor:
        """The values in out's type, by one launch. Bytes: tiles and scales read, out written."""
        blocks, _, wide = self.tiles.shape[:3]
        _dense_kernel[(2 * blocks, triton.cdiv(wide, 4))](
            *(self.tiles, self.scales, self.zeros, out, self.shape[0]),
            WIDTH=self.shape[1],
            WIDE=wide,
            GROUP=self.group,
            TILES=4,
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
    GROUPS: tl.constexpr = WIDE * 128 // GROUP
    tile, first = tl.program_id(0), tl.program_id(1) * TILES
    i = tl.arange(0, TILES * 256)
    words = tl.load(tiles_ptr + (tile.to(tl.int64) * WIDE + first) * 256 + i, mask=first * 256 + i < WIDE * 256, other=0)
    r = tl.arange(0, 8)[:, None]
    at = tl.arange(0, 32 * TILES)
    row = tile.to(tl.int64) * 8 + r
    for j in tl.static_range(4):
        # tile, g, lane t, operand's middle bit, half, pair -> rows, in features
        codes = tl.reshape((words.to(tl.int32) >> 4 * j) & 0xF, [TILES, 8, 4, 2, 2, 2])
        codes = tl.reshape(tl.permute(codes, (1, 0, 3, 2, 4, 5)), [8, 32 * TILES])
        k = ((first + at // 32) * 128 + j // 2 * 64 + at % 32 // 4 * 8 + j % 2 * 4 + at % 4)[None, :]
        scale_at = (tile // 2 * GROUPS + k // GROUP) * 16 + tile % 2 * 8 + r
        zero = tl.load(zeros_ptr + scale_at, mask=k < WIDTH, other=0).to(tl.int32) if zeros_ptr is not None else 8
        scale = tl.load(scales_ptr + scale_at, mask=k < WIDTH, other=0.0).to(tl.float32)
        value = (codes - zero).to(tl.float32) * scale
        tl.store(out_ptr + row * WIDTH + k, value.to(out_ptr.dtype.element_ty), mask=(k < WIDTH) & (row < rows))


@triton.jit
def word_operands(words, ASM: tl.constexpr, DOT_DTYPE: tl.constexpr):
    """What the assembly makes of the words for each of four operands, two words at a time."""
    a, b, c, d = tl.inline_asm_elementwise(
        ASM, "=&r,=&r,=&r,=&r,r", [words], dtype=(tl.int16, tl.int16, tl.int16, tl.int16), is_pure=True, pack=2
    )
    a, b = a.to(DOT_DTYPE, bitcast=True), b.to(DOT_DTYPE, bitcast=True)
    return a, b, c.to(DOT_DTYPE, bitcast=True), d.to(DOT_DTYPE, bitcast=True)


@triton.jit
def codes(words, DOT_DTYPE: tl.constexpr):
    """The words' codes for each of four operands, the second and fourth times 16; of types of 2 bytes, times their smallest
    number: below and just above the smallest normal number a type's values are as far apart as integers."""
    if tl.float32 == DOT_DTYPE:
        w = words.to(tl.int32)
        low, high = (w & 0xFF).to(tl.float32), ((w >> 8) & 0xFF).to(tl.float32)
        a, c = (w & 0xF).to(tl.float32), ((w >> 8) & 0xF).to(tl.float32)
        parts = (a, low - a, c, high - c)
    else:
        parts = word_operands(words, CODES, DOT_DTYPE)
    return parts


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
