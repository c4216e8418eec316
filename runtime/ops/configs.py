"""Owns how each fused kernel is cut into blocks: a table for the shapes that were timed, and a rule for every other shape.

Does not own the kernels. Times behind the table are of whole decode steps, never of a kernel alone.
"""

from dataclasses import dataclass
from typing import Literal

Kernel = Literal["norm_linear", "proj_residual", "norm_gate_up"]


@dataclass(frozen=True)
class Tile:
    """A block takes `rows` out features and walks the in features in slices of `k_slice`.

    Attributes:
        rows: power of two, at most the weight's rows (of gate alone for norm_gate_up); 16 and up for batches.
        k_slice: power of two, at most the in features; 16 and up for batches.
        warps, stages: Triton's; stages above 1 pipeline the loads of the slices.
        splits: blocks that share a row's in features; proj_residual's batches only.
        ahead: lines of 128 bytes of each row fetched to L2 before the wait, a power of two or 0; batches only (one row
            loads its first tile then).
    """

    rows: int
    k_slice: int
    warps: int
    stages: int
    splits: int = 1
    ahead: int = 2


SINGLE: dict[tuple[Kernel, int, int], Tile] = {
    ("norm_linear", 12288, 4096): Tile(8, 1024, 4, 1),
    ("norm_linear", 6144, 4096): Tile(4, 4096, 4, 1),
    ("norm_linear", 32000, 4096): Tile(2, 4096, 4, 1),
    ("norm_linear", 128256, 4096): Tile(2, 4096, 4, 1),
    ("proj_residual", 4096, 4096): Tile(8, 2048, 4, 1),
    ("norm_gate_up", 11008, 4096): Tile(2, 4096, 8, 1),
    ("norm_gate_up", 14336, 4096): Tile(2, 4096, 8, 1),
    ("proj_residual", 4096, 11008): Tile(1, 256, 2, 1),
    ("proj_residual", 4096, 14336): Tile(1, 2048, 4, 1),
}
"""Batch 1 on an H200, by kernel, out features (F for norm_gate_up) and in features; bfloat16 weights."""

BATCH: dict[tuple[Kernel, int, int], Tile] = {
    ("norm_linear", 12288, 4096): Tile(64, 64, 4, 6, ahead=0),
    ("norm_linear", 6144, 4096): Tile(64, 256, 4, 5),
    ("norm_linear", 32000, 4096): Tile(64, 64, 4, 8),
    ("norm_linear", 128256, 4096): Tile(64, 128, 4, 8),
    ("norm_gate_up", 11008, 4096): Tile(64, 128, 4, 5, ahead=0),
    ("norm_gate_up", 14336, 4096): Tile(64, 256, 4, 3),
    ("proj_residual", 4096, 4096): Tile(64, 128, 4, 8, splits=2),
    ("proj_residual", 4096, 11008): Tile(64, 128, 4, 8, splits=2, ahead=0),
    ("proj_residual", 4096, 14336): Tile(64, 256, 4, 5, splits=2),
}
"""Batches of 2 to 16 on an H200. 64 rows: with fewer, Triton has no wgmma for them."""

FEW_BLOCKS = 192
"""Blocks below which a projection of a batch splits its in features: an H200 has 132 SMs."""


def tile_for(kernel: Kernel, n: int, width: int, batch: int, itemsize: int) -> Tile:
    """The tile of a kernel with weights `[n, width]` (n of gate alone for norm_gate_up), for `batch` rows."""
    table = SINGLE if batch == 1 else BATCH
    if itemsize == 2 and (kernel, n, width) in table:
        return table[kernel, n, width]
    return _single_rule(kernel, n, width) if batch == 1 else _batch_rule(kernel, n, width, itemsize)


def _single_rule(kernel: Kernel, n: int, width: int) -> Tile:
    """Whole rows in one slice where a row is one power of two up to 4096; else slices that divide it, or nearly."""
    rows = min(1 if kernel == "norm_gate_up" else 2, n)
    divisor = width & -width
    if divisor == width and width <= 4096:
        return Tile(rows, width, 4 if width >= 1024 else 1, 1)
    if kernel == "proj_residual":  # two rows of 512 spill under triton 3.6
        return Tile(1, 256 if width > 4096 else min(_floor_power(width), 512), 2, 1)
    return Tile(rows, min(_floor_power(width), 512), 2, 1)


def _batch_rule(kernel: Kernel, n: int, width: int, itemsize: int) -> Tile:
    """Slices that divide a row, 64 rows a block, and for a projection splits where blocks are few."""
    divisor = width & -width
    rows = min(64, max(16, _floor_power(n)))
    if itemsize > 2:
        return Tile(16, min(32, max(16, _floor_power(width))), 4, 2)
    k_slice = min(128, divisor) if divisor >= 32 else min(32, max(16, _floor_power(width)))
    if kernel != "proj_residual":
        return Tile(rows, k_slice, 4, 5)
    splits = 1
    while splits < 4 and -(-n // rows) * splits < FEW_BLOCKS // 2 and _splits_fit(width // k_slice, splits * 2):
        splits *= 2
    return Tile(rows, k_slice, 4, 6, splits)


def _splits_fit(slices: int, splits: int) -> bool:
    """Whether each split gets at least one slice when all but the last take the same number."""
    return -(-slices // splits) * (splits - 1) < slices


def _floor_power(n: int) -> int:
    return 1 << (n.bit_length() - 1)
